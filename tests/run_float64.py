"""Whole runs of train_gpt.py in float64, for comparison with references.

python tests/run_float64.py OPTIONS runs the script as it is, but its torch.float32 is float64. Give
--dtype=float32, --embed_dtype=float32 and --matrix_dtype=float32, so that nothing is rounded.
"""

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
EXACT = ("--device=cpu", "--dtype=float32", "--embed_dtype=float32", "--matrix_dtype=float32", "--fp8=off")


def run_float64(folder: Path, *options: str, nproc: int = 1) -> tuple[dict, dict[str, torch.Tensor]]:
    """A run in a new folder. Returns (its json, the parameters of its model.pt by name)."""
    from conftest import launch

    folder.mkdir()
    done = launch([__file__, *EXACT, *options], folder, nproc)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,), (model,) = folder.glob("logs/*.json"), folder.glob("checkpoints/**/model.pt")
    tensors = torch.load(model, weights_only=True)["tensors"]
    return json.loads(result.read_text()), tensors


def read_initial_parameters(folder: Path, groups: tuple[str, ...], *options: str) -> dict[str, torch.Tensor]:
    """The parameters after a step with learning rates of 0. groups: those that have parameters."""
    once = ("--num_iterations=1", "--val_loss_every=0", "--warmup_iterations=0")
    return run_float64(folder, *options, *once, *(f"--{group}_lr=0" for group in groups))[1]


class Torch:
    """PyTorch with another float32."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    import train_gpt as gpt

    gpt.torch = Torch()
    torch.set_default_dtype(torch.float64)
    sys.exit(gpt.main())
