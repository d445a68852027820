"""Whole runs of the script, by its command line, against an independent implementation in float64."""

import functools
import json

import numpy as np
import pytest
import reference_run
from conftest import slow_but
from run_float64 import assert_equal_run, read_initial_parameters, run_float64

from data.text import write_shard

VOCAB, BOS = 50, 49
SHARDS = dict(train_0=1000, train_1=600, train_2=1100, train_3=1300, val_0=300, val_1=400)
COMMON = dict(
    vocab_size=VOCAB, vocab_multiple=4, val_tokens=512, val_seq_len=128, val_loss_every=3, epochs=3,
    tokens_per_step=512, micro_batch_tokens=256,
)  # fmt: skip
RECORD_32_STAGES = [
    dict(duration=3, window_long=20, window_short=8, tokens_per_step=256, max_doc_len=30, seq_len=128),
    dict(duration=4, window_long=30, window_short=12, tokens_per_step=512, lr_factor=1.5, seq_len=128),
    dict(duration=3, window_long=44, window_short=20, max_doc_len=60)]
LAPTOP_STAGES = [
    dict(duration=1, window_long=long, window_short=short) for long, short in ((20, 8), (40, 8), (80, 16))]
GROUPS = ("matrix", "embed", "value_embed", "head", "scalar")
RUNS = {  # groups that have parameters, options
    "record_32": (GROUPS, dict(
        preset="record_32", num_layers=6, num_heads=4, head_dim=12, model_dim=48, mlp_ratio=2, seq_len=256,
        max_doc_len=90, num_iterations=10, warmup_iterations=2, val_windows="64,32", momentum_warmup_steps=5,
        adam_eps=1,  # large enough to matter
        matrix_cooldown_frac=0.8, matrix_weight_decay=0.5, groups='{"embed": {"weight_decay": 0.1}}',
        decay_schedule="cosine", stages=json.dumps(RECORD_32_STAGES), guard="on")),
    "laptop": ((*GROUPS, "mix", "ngram"), dict(
        preset="laptop", num_heads=2, head_dim=16, model_dim=32, ngram_rows=512, seq_len=128,
        num_iterations=12, val_windows="100,24", stages=json.dumps(LAPTOP_STAGES))),
}  # fmt: skip


def name_parameters(config, tensors):
    """The parameters of a model.pt by the names of reference_run."""
    p = {"embed": tensors["embed"], "head": tensors["head.weight"]}
    for i, layer in enumerate(config["layers"]):
        names = dict(resid="a", x0="b", ngram="c", ngram_in="c", skip="skip", v_scale="s0", ve_scale="s1")
        for name, ours in names.items():
            if f"blocks.{i}.scalars.{name}" in tensors:
                (p[f"{ours}.{i}"],) = tensors[f"blocks.{i}.scalars.{name}"]
        if layer["attention"] != "none":
            p[f"q.{i}"], p[f"k.{i}"] = tensors[f"blocks.{i}.attention.qk"]
            p[f"v.{i}"], p[f"o.{i}"] = (tensors[f"blocks.{i}.attention.{name}"] for name in ("v", "proj"))
            if config["attention_gate_dim"]:
                p[f"gate.{i}"] = tensors[f"blocks.{i}.attention.attention_gate_weight"]
            if layer["value_embed"] is not None:
                p[f"ve.{layer['value_embed']}"] = tensors[f"value_embeds.{layer['value_embed']}"]
        if layer["mlp"]:
            p[f"up.{i}"], p[f"down.{i}"] = tensors[f"blocks.{i}.mlp.up_down"]
    if config["ngram_rows"]:
        p["ngram"] = tensors["ngram"]
    assert sum(value.numel() for value in p.values()) == sum(value.numel() for value in tensors.values())
    return p


@pytest.fixture(scope="module", params=RUNS)
def case(request, tmp_path_factory):
    """(options of a run, a function that returns the reference's run of a config)."""
    folder, (groups, own) = tmp_path_factory.mktemp(request.param), RUNS[request.param]
    rng = np.random.default_rng(0)
    for name, size in SHARDS.items():
        documents = [[BOS, *np.cumsum(rng.integers(0, 4, rng.integers(2, 150))) % BOS] for _ in range(100)]
        write_shard(folder / f"{name}.bin", np.concatenate(documents)[:size], VOCAB, BOS)
    files = dict(train_files=f"{folder}/train_*.bin", val_files=f"{folder}/val_*.bin")
    options = [f"--{name}={value}" for name, value in {**COMMON, **own, **files}.items()]

    @functools.cache
    def run_reference(config):
        config, tensors = json.loads(config), read_initial_parameters(folder / "initial", groups, *options)
        return reference_run.run(config, name_parameters(config, tensors))

    return options, lambda config: run_reference(json.dumps({**config, "fast": "", "derived": {}}))


@pytest.mark.recipe
@pytest.mark.parametrize("fast, nproc", slow_but([("auto", 1), ("off", 1), ("auto", 2)], ("auto", 1)))
def test_whole_run(case, fast, nproc, tmp_path):
    """The training loss of every step, every validation loss and all final parameters, to 1e-9."""
    options, run_reference = case
    result, tensors = run_float64(tmp_path / "run", *options, f"--fast={fast}", nproc=nproc)
    assert_equal_run(result, name_parameters(result["config"], tensors), run_reference(result["config"]))
    assert (result["choices"]["fast"] == ["off"]) == (fast == "off") and not result["guard_actions"]
