"""Whole runs of train_gpt.py in float64, for comparison with references.

python tests/run_float64.py OPTIONS runs the script as it is, but its torch.float32 is float64. Give
--dtype=float32, --embed_dtype=float32 and --matrix_dtype=float32, so that nothing is rounded.
"""

import functools
import importlib.util
import io
import json
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
EXACT = ("--device=cpu", "--dtype=float32", "--embed_dtype=float32", "--matrix_dtype=float32", "--fp8=off")


class Torch:
    """PyTorch with another float32."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@functools.cache
def load_float64():
    """A copy of the module train_gpt with another float32."""
    spec = importlib.util.spec_from_file_location("train_gpt_float64", ROOT / "train_gpt.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.torch, module.measure_matmul = Torch(), lambda *_: 1e9  # its timing takes a second
    return module


def call_main(options: list[str]) -> int:
    """The exit status of a run in this process."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return load_float64().main(options)
    finally:
        torch.set_default_dtype(default)


def run_float64(folder: Path, *options: str, nproc: int = 1) -> tuple[dict, dict[str, torch.Tensor]]:
    """A run in a new folder. Returns (its json, the parameters of its model.pt by name)."""
    from conftest import launch

    folder.mkdir()
    if nproc == 1:
        with chdir(folder), redirect_stdout(io.TextIOWrapper(io.BytesIO(), write_through=True)):
            assert call_main([*EXACT, *options]) == 0
    else:
        done = launch([__file__, *EXACT, *options], folder, nproc)
        assert done.returncode == 0, done.stderr[-3000:]
    (result,), (model,) = folder.glob("logs/*.json"), folder.glob("checkpoints/**/model.pt")
    tensors = torch.load(model, weights_only=True)["tensors"]
    return json.loads(result.read_text()), tensors


def read_initial_parameters(folder: Path, groups: tuple[str, ...], *options: str) -> dict[str, torch.Tensor]:
    """The parameters after a step with learning rates of 0. groups: those that have parameters."""
    once = ("--num_iterations=1", "--val_loss_every=0", "--warmup_iterations=0", "--fast=off")
    return run_float64(folder, *options, *once, *(f"--{group}_lr=0" for group in groups))[1]


def assert_equal_run(result: dict, params: dict[str, torch.Tensor], expected: tuple) -> None:
    """Compare a run's json and final parameters to 1e-9. expected: all final parameters, the training loss of every
    step, [step, loss] of every validation."""
    final, losses, points = expected
    assert [step for step, _ in result["train_points"]] == list(range(1, len(losses) + 1))
    assert [step for step, *_ in result["val_points"]] == [step for step, _ in points]
    pairs = [(loss, theirs) for (_, loss), theirs in zip(result["train_points"], losses)]
    pairs += [(loss, theirs) for (_, loss, _), (_, theirs) in zip(result["val_points"], points)]
    assert max(abs(ours - theirs) for ours, theirs in pairs) < 1e-9
    errors = {name: float((value - final[name]).abs().max()) for name, value in params.items()}
    assert errors.keys() == final.keys() and max(errors.values()) < 1e-9, sorted(
        errors.items(), key=lambda item: -item[1])[:5]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(call_main(sys.argv[1:]))
