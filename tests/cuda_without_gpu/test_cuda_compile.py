"""The CUDA path without a GPU: cuda_compile.py compiles the training step, and the tests check the result."""

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

# every mechanism of a layer that record_32 has
THREE_LAYERS = (dict(attention="long", mlp=False, value_embed=0), dict(attention="none"),
                dict(attention="short", value_embed=0, skip_from=1))
SMALL = ["--num_layers=3", f"--layers={json.dumps(THREE_LAYERS)}", "--seq_len=2048",
         "--micro_batch_tokens=2048", "--val_seq_len=4096", "--val_tokens=4096"]
# FlexAttention's backward keeps two gradient tiles of 64 x 128 and one tile of scores in registers. With the blocks
# that PyTorch chooses it spills 88 to 96 bytes on Hopper. Reductions of Inductor spill 8 bytes.
SPILLS_BY_PYTORCH = ("triton_tem_fused", "triton_red_fused", "triton_per_fused", "triton_poi_fused")


def compile_for(card: str, *options: str) -> dict:
    """The figures of cuda_compile.py, after the checks that hold for every GPU and config."""
    command = [sys.executable, str(Path(__file__).with_name("cuda_compile.py")), card, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.stdout.startswith("{"), done.stderr[-2000:]
    figures = json.loads(done.stdout)
    assert "error" not in figures, figures["error"]
    assert figures["graph_breaks"] == {} and figures["recompiled"] == []  # in all stages and in validation
    assert figures["fp64"] == {} and figures["too_large"] == []
    assert figures["waits"] == []  # in a step Python never waits for the GPU
    assert [name for name in figures["spills"] if not name.startswith(SPILLS_BY_PYTORCH)] == []
    return figures


@pytest.mark.parametrize("options", [
    pytest.param(["--own"], marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.cards)],
    ids=["our kernels", "all kernels"])  # fmt: skip
def test_every_kind_of_layer_compiles_for_hopper(options):
    """Head, masks, layers and both update rules compile, and few operations stay eager.

    By default Triton compiles only our kernels. Cubins of all kernels take twice the time and run with -m cards.
    """
    figures = compile_for("h200", *SMALL, *options)
    # training: forward and backward of layers and head. Update: Muon for the matrices of attention, of the MLPs and of
    # the gates, Adam for head and embedding, for tables and for scalars. Validation: layers and head
    assert figures["graphs"] == {"training": 4, "training update": 6, "validation": 2}
    own = {name.rpartition("_")[0]: kernel for name, kernel in figures["own"].items()}
    assert set(own) == {f"{name}_kernel" for name in "cross_entropy relu2_matmul transpose qkv row_sums".split()}
    assert own["relu2_matmul_kernel"]["wgmma"] > 0  # Hopper's matrix units
    assert all(kernel["wide_loads"] > 0 for kernel in own.values())  # loads of 16 bytes
    # per micro-batch: additions of the loss and of gradients, one for each parameter. Eleven of 24 parameters are learned
    # scalars. When they were one tensor per group there were 14 additions, but the compiled graphs had 110 launches.
    # The others are lookups of embedding and table, and four small operations for each sum of rows
    assert figures["additions_per_micro"] <= 24
    assert figures["eager_per_micro"] - figures["additions_per_micro"] <= 12 and figures["eager_gb_per_micro"] < 0.8
    assert figures["launches_per_micro"] <= 102


@pytest.mark.slow
def test_segments_of_several_ranks_compile():
    """On rank 0 of two. Three segments and the head have two graphs each."""
    figures = compile_for("h200", *SMALL, "--fp8=off", "--ranks=2", "--own")
    assert figures["graphs"]["training"] == 8 and figures["graphs"]["validation"] == 4


@pytest.mark.parametrize("options", [
    pytest.param(["--own"], marks=pytest.mark.slow), pytest.param([], marks=pytest.mark.cards)], ids=["our kernels", "all"])
def test_segments_of_the_newest_recipe_compile(options):
    """All mechanisms in six layers, so segments read activations of earlier segments.

    The head has two more graphs for the single target of the last stage.
    """
    layers = json.dumps(list(map(dataclasses.asdict, gpt.make_config({"preset": "smoke_92"}).layers)))
    figures = compile_for("h200", "--preset=record_92", "--num_layers=6", f"--layers={layers}", "--ranks=2",
                          "--micro_batch_tokens=49152", "--val_seq_len=4096", "--val_tokens=4096", *options)
    assert (figures["graphs"]["training"], figures["graphs"]["validation"]) == (14, 6)  # four segments


@pytest.mark.cards
@pytest.mark.parametrize("preset, training, validation", [("record_32", 21.9, 14.4), ("record_92", 81.2, 78.3)])
def test_the_whole_step_compiles(preset, training, validation):
    """Limits: peak memory in GB of live tensors, without the passes that compile. PyTorch 2.11 differs.

    All stages share one forward and one backward graph of the layers. The head has one pair for each number of targets.
    record_92 has a pair of graphs for the signs of n-grams.
    """
    table = ["--ngram_rows=42301440"] if preset == "record_92" else []
    figures = compile_for("h200", f"--preset={preset}", *table)
    graphs = figures["graphs"]["training"], figures["graphs"]["validation"]
    assert graphs == dict(record_32=(4, 2), record_92=(8, 3))[preset]
    peak = figures["peak_gb"]
    assert peak["training"] < 1.05 * training and peak["validation"] < 1.05 * validation


def compile_kinds(card: str, *options: str) -> None:
    """Compile every kind of layer at full width. Kernels do not depend on the number of layers."""
    figures = compile_for(card, *SMALL, *options)
    assert figures["graphs"]["training"] == 4 and figures["graphs"]["validation"] == 2
