"""Edits of the recipe take effect, whatever their size: runs of edited scripts in float64.

The training losses of an edited script are those of its plain forms, and never those of the unedited script. An edit of
the training loss does not reach the metric.
"""

import functools
import importlib.util
import json
import sys
from contextlib import chdir

import pytest
import torch
from conftest import ROOT, SCRIPT, data_args, slow_but
from run_float64 import EXACT, Torch

pytestmark = pytest.mark.recipe  # an edited recipe may lack the lines that are edited here
LOSS = "            loss = loss + target_weight * cross_entropy\n"
Z_LOSS = "            loss = loss + target_weight * (cross_entropy + {} * logits.logsumexp(-1).square().sum())\n"
CROSS_ENTROPY = 'logits, target, ignore_index=-1, reduction="sum")'
EDITS = {  # name: (old, new, FP8 part that computes the same)
    "z-loss 1e-4": (LOSS, Z_LOSS.format(1e-4), "head"),
    "z-loss 1e-6": (LOSS, Z_LOSS.format(1e-6), "head"),
    "label smoothing": (CROSS_ENTROPY, CROSS_ENTROPY[:-1] + ", label_smoothing=1e-3)", "head"),
    "softcap 0.7 % wider": ("torch.sigmoid(logits / self.width)", "torch.sigmoid(logits / (self.width * 15.1 / 15))", "head"),
    "leaky ReLU 0.01": ("F.relu(x @ up).square()", "F.leaky_relu(x @ up, 0.01).square()", "mlp"),
    "leaky ReLU 0.2": ("F.relu(x @ up).square()", "F.leaky_relu(x @ up, 0.2).square()", "mlp"),
    "GELU": ("F.relu(x @ up).square()", "F.gelu(x @ up)", "mlp"),
    "eps of the norm": ("eps=RMS_EPS)\n\n\ndef relu2_mlp", "eps=1e-6)\n\n\ndef relu2_mlp", ""),
    "RoPE base": ("ROTARY_BASE = 1024 ", "ROTARY_BASE = 1025 ", ""),
    "direction of RoPE": ("x.roll(x.size(-1) // 2, -1), sin)", "x.roll(x.size(-1) // 2, -1), -sin)", ""),
    "softmax scale": ("q = q * rope.softmax_scale", "q = q * rope.softmax_scale * 1.0001", ""),
    "attention": ("return (scores.softmax(-1) @ v)", "return ((scores * 0.9999).softmax(-1) @ v)", ""),
    "window": ("(query - key <= window) &", "(query - key <= window + 1) &", ""),
    "scale of gates": ("SCALE, HIDDEN = 0.1, 64", "SCALE, HIDDEN = 0.1001, 64", ""),
    "key offset": ("k.roll(1, 0), rope", "k.roll(2, 0), rope", ""),
    "newton_schulz": ("-4.7750, 2.0315)", "-4.7750, 2.0316)", ""),
    "six_maps": ("2.256537145403,", "2.256547145403,", ""),
    "outputs of matmuls": ("return x @ weight.type_as(x).T", "return 1.00001 * x @ weight.type_as(x).T", ""),
}  # fmt: skip
ONLY = {"smoke_92": ("scale of gates", "key offset", "six_maps"), "smoke": ("newton_schulz",)}
UNEDITED = {}  # what train() returns, by preset
OF_THE_LOSS = ("z-loss 1e-4", "z-loss 1e-6", "label smoothing")


def load(text: str, path):
    """The module of a script, whose float32 is float64."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{path.stem}_float64", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch, module.measure_matmul = Torch(), lambda *_: 1e9
    return module


@pytest.fixture
def train(tmp_path, shards, capsys):
    """Train three steps. Returns (training losses, loss of the first validation, what was printed)."""
    count = iter(range(99))

    def run(module, *options):
        out = tmp_path / str(next(count))
        words = ["--num_iterations=3", "--warmup_iterations=0", "--val_loss_every=3", "--val_tokens=1024", f"--out={out}"]
        torch.set_default_dtype(torch.float64)
        try:
            assert module.main([*EXACT, *data_args(shards), *words, *options]) == 0
        finally:
            torch.set_default_dtype(torch.float32)
        (path,) = out.glob("logs/*.json")
        result = json.loads(path.read_text())
        return [loss for _, loss in result["train_points"]], result["val_points"][0][1], capsys.readouterr().out

    with chdir(tmp_path):
        yield run


def difference(ours, theirs) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs))


CASES = [(preset, name) for preset in ("smoke", "smoke_92") for name in EDITS
         if all(name not in names or only == preset for only, names in ONLY.items())]  # fmt: skip


@pytest.mark.parametrize("preset, name", slow_but(CASES, ("smoke", "eps of the norm")))
def test_an_edit_takes_effect(preset, name, train, tmp_path):
    old, new, fp8_part = EDITS[name]
    text = SCRIPT.read_text()
    assert text.count(old) == 1
    file = ROOT / "presets/smoke_92.json"
    words = f"--preset={preset if preset == 'smoke' else file}"
    run = functools.partial(train, load(text.replace(old, new), tmp_path / "edited.py"), words)
    if preset not in UNEDITED:
        UNEDITED[preset] = train(load(text, tmp_path / "train_gpt.py"), words, "--fast=off")
    before, metric_before, _ = UNEDITED[preset]
    losses, metric, _ = run("--fast=off")
    assert difference(losses, before) > 1e-11  # the edit changes something
    fast, fast_metric, lines = run()
    assert difference(losses, fast) < 1e-2 * difference(losses, before) + 1e-12, lines
    if fp8_part:
        fp8, fp8_metric, lines = run("--fp8=on", f"--fp8_parts={fp8_part}")
        assert "was edited: without fast forms" in lines and f"fp8_{fp8_part}" in lines
        assert difference(losses, fp8) < 1e-2 * difference(losses, before) + 1e-12, lines
    if name in OF_THE_LOSS:
        assert metric == fast_metric == fp8_metric == metric_before
