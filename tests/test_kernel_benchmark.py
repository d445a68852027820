"""benchmarks/kernels.py: errors of all kernels and candidates at a tiny size, and the share of the limit."""

from argparse import Namespace

import pytest
import torch
from conftest import gpt

pytest.importorskip("triton")
from benchmarks import kernels  # noqa: E402


def test_errors_of_kernels_and_candidates(monkeypatch):
    """Interpreted on a CPU. There FP8 numbers that round up to a power of two are halved."""
    for name in kernels.KERNELS:
        monkeypatch.setattr(gpt, name, kernels.Recorder(getattr(gpt, name)))
    torch.manual_seed(0)
    shape = dict(model_dim=128, head_dim=64, mlp_ratio=2.0, fp8_parts=("head", "logits", "mlp", "qkv"))
    args = Namespace(num_tokens=[128], only=["relu2", "qkv", "head", "sums"], variants=True)
    result = kernels.measure(args, gpt.make_config({"preset": "smoke_92", **shape}))
    rows = {(row["name"], row["shape"]): row for row in result["kernels"]}
    assert len(rows) == len(result["kernels"]) == 33
    for (name, _), row in rows.items():
        limit = 0.15 if "FP8" in name or name == "cross-entropy" else 1e-6 if result["rates"] == {} else 2**-7
        assert row["error"] <= limit and row["rounding"] <= row["error"] * 1.01, row
    sums = [row["sums"] for row in result["kernels"] if "sums" in row]
    assert len(sums) == 4 and max(sums) < (1e-6 if result["rates"] == {} else 0.01)
    assert all(case in kernels.format_table(result) for case, _ in rows)


def test_share_of_the_limit():
    """Of matmuls in bfloat16 and FP8, and of memory."""
    rates = dict(bfloat16=1e15, fp8=2e15, copy=2e12)
    case = kernels.Case("", "", None, None, num_bytes=1e9, flops=2e12)
    assert kernels.rate(case, 4000.0, rates) == dict(us=4000, rate=500, unit="TFLOP/s", limit_us=2000, share=0.5)
    assert kernels.rate(case._replace(dtype=gpt.E5M2), 4000.0, rates)["share"] == 0.25
    found = kernels.rate(case._replace(num_bytes=8e9), 5000.0, rates)
    assert found == dict(us=5000, rate=1.6, unit="TB/s", limit_us=4000, share=0.8)
