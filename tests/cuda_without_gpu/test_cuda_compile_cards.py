"""Cards other than Hopper, and other options: a file of its own, for another worker of pytest."""

import fake_cuda
import pytest
from test_cuda_compile import SMALL, compile_for, compile_kinds

pytestmark = pytest.mark.skipif(bool(fake_cuda.find_obstacle()), reason=fake_cuda.find_obstacle())

WITHOUT_KERNELS = ["--fast=rms_norm,norm_rotate,flex_attention,head_loss,sparse_embedding"]  # without our Triton kernels


@pytest.mark.cards
@pytest.mark.parametrize("card", ["a100", "4090", "5090"])
def test_every_kind_of_layer_compiles_for(card):
    """A100 has no FP8 for the head, the others less shared memory."""
    compile_kinds(card)


@pytest.mark.slow
def test_a_gpu_without_bfloat16_trains_in_float32():
    """Inductor refuses bfloat16 below capability 8.0, in storage too."""
    compile_for("t4", *SMALL, "--own")


@pytest.mark.cards
@pytest.mark.parametrize("options", [["--preset=muonh"], WITHOUT_KERNELS, ["--dtype=float32"]], ids=str)
def test_other_options_compile(options):
    compile_kinds("h200", *options)


@pytest.mark.cards
def test_fp8_linears_compile():
    figures = compile_for("h200", "--preset=d24", "--num_layers=4", "--layers=[]", "--fp8_linear=on")
    assert figures["graphs"]["training"] == 4 and figures["graphs"]["validation"] == 2
