"""The CUDA path without a GPU: what tests/cuda_without_gpu/cuda_compile.py compiles, and what must be true of it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import fake_cuda
import pytest
from conftest import gpt

pytestmark = pytest.mark.skipif(bool(fake_cuda.find_obstacle()), reason=fake_cuda.find_obstacle())

# every mechanism of a layer that track_1 has
THREE_LAYERS = (dict(attention="long", mlp=False, value_embed=0), dict(attention="none"),
                dict(attention="short", value_embed=0, skip_from=1))
SMALL = ["--num_layers=3", f"--layers={json.dumps(THREE_LAYERS)}", "--seq_len=2048",
         "--micro_batch_tokens=2048", "--val_seq_len=4096", "--val_tokens=4096"]
# FlexAttention's backward holds two tiles of gradients of 64 x 128 and one of scores in registers; PyTorch chose
# its blocks, and spills 88 to 96 bytes of 255 registers on Hopper by its own choice. Reductions of Inductor save 8.
SPILLS_BY_PYTORCH = ("triton_tem_fused", "triton_red_fused", "triton_per_fused", "triton_poi_fused")


def compile_for(card: str, *options: str) -> dict:
    """The figures of tests/cuda_without_gpu/cuda_compile.py, once they hold for every card and config."""
    command = [sys.executable, str(Path(__file__).with_name("cuda_compile.py")), card, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout.startswith("{"), done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert "error" not in figures, figures["error"]
    assert figures["graph_breaks"] == {} and figures["recompiled"] == []  # over all stages, validation and back
    assert figures["fp64"] == {} and figures["too_large"] == []
    assert [name for name in figures["spills"] if not name.startswith(SPILLS_BY_PYTORCH)] == []
    return figures


@pytest.mark.parametrize(
    "options", [["--own"], pytest.param([], marks=pytest.mark.cards)], ids=["our kernels", "all kernels"])  # fmt: skip
def test_every_kind_of_layer_compiles_for_hopper(options):
    """Head, masks, layers, both update rules; an uncompiled remainder that is small. Inductor writes all its code; that
    Triton makes a cubin of every kernel, not only of ours, takes as long again and is left to -m cards."""
    figures = compile_for("h200", *SMALL, *options)
    # the comparison of each compiled fast form, forward and backward: norm, rotation, attention, cross-entropy, MLP, and only
    # forward symmetric products. Forward and backward of layers and head. Muon for two shapes of matrices and the gates, Adam
    # for tables and for numbers. Layers and head
    assert figures["graphs"] == {"setup": 11, "training": 4, "training update": 5, "validation": 2}
    own = {name.rpartition("_")[0]: kernel for name, kernel in figures["own"].items()}
    assert set(own) == {"symmetric_kernel", "cross_entropy_kernel", "relu2_matmul_kernel", "transpose_kernel"}
    for name in ("symmetric_kernel", "relu2_matmul_kernel"):
        assert own[name]["wgmma"] > 0  # Hopper's matrix units, not the older path
    assert all(kernel["wide_loads"] > 0 for kernel in own.values())  # 16 bytes at a time
    # per micro-batch: 2 look-ups, their gradients, the sums of 13 gradients into their bucket, and rows of 3 tables that
    # are read, added to and written
    assert figures["eager_per_micro"] <= 40 and figures["eager_gb_per_micro"] < 1.4


@pytest.mark.slow
def test_segments_of_several_ranks_compile():
    """Two graphs for each of three segments and the head; the small graphs of validation and of the measuring pass
    beside them. As rank 0 of two, whose messages are noted."""
    figures = compile_for("h200", *SMALL, "--segments=3", "--fp8_head=off", "--telemetry_every=1", "--ranks=2", "--own")
    assert figures["graphs"]["training"] == 8 and figures["graphs"]["validation"] == 4
    assert figures["graphs"]["telemetry"] == 1


@pytest.mark.parametrize("options", [
    pytest.param(["--own"], marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.cards)], ids=["our kernels", "all"])
def test_segments_of_the_newest_recipe_compile(options):
    """With all its mechanisms, in five layers: what one segment computes, the others read. The head has two graphs more,
    for the one target of the last stage."""
    layers = json.dumps(list(map(dataclasses.asdict, gpt.SMOKE_FRONTIER_LAYERS)))
    figures = compile_for("h200", "--preset=frontier", "--num_layers=5", f"--layers={layers}", "--segments=3",
                          "--micro_batch_tokens=49152", "--val_seq_len=4096", "--val_tokens=4096", *options)
    assert figures["graphs"]["training"] == 10 and figures["graphs"]["validation"] == 4


@pytest.mark.cards
@pytest.mark.parametrize("preset, training, validation", [("track_1", 19.9, 16.2), ("frontier", 27.6, 18.9)])
def test_the_whole_step_compiles(preset, training, validation):
    """One graph forward and one backward for all stages, and for the head one each for every number of targets. One each
    for validation. GB of live tensors, of passes that compile nothing."""
    figures = compile_for("h200", f"--preset={preset}")
    assert figures["graphs"]["training"] == dict(track_1=4, frontier=6)[preset] and figures["graphs"]["validation"] == 2
    assert figures["peak_gb"] == pytest.approx(dict(training=training, validation=validation), rel=0.05)


def compile_kinds(card: str, *options: str) -> None:
    """Every kind of layer at full width: what fits or does not, spills or breaks, does so in any number of layers."""
    figures = compile_for(card, *SMALL, *options)
    assert figures["graphs"]["training"] == 4 and figures["graphs"]["validation"] == 2
