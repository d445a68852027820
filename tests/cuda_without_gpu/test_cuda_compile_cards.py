"""GPUs other than Hopper, and other options. A separate file, so that a second pytest worker can run it."""

import fake_cuda
import pytest
from test_cuda_compile import SMALL, compile_for, compile_kinds

pytestmark = pytest.mark.skipif(bool(fake_cuda.find_obstacle()), reason=fake_cuda.find_obstacle())

WITHOUT_KERNELS = ["--fast=rms_norm,norm_rotate,flex_attention,head_loss,sparse_embedding"]  # no Triton kernels of ours


@pytest.mark.cards
@pytest.mark.parametrize("card", ["a100", "4090", "5090"])
def test_every_kind_of_layer_compiles_for(card):
    """The A100 has no FP8. The other GPUs have less shared memory."""
    compile_kinds(card)


@pytest.mark.slow
def test_a_gpu_without_bfloat16_trains_in_float32():
    """Inductor refuses bfloat16 below capability 8.0, also for storage."""
    compile_for("t4", *SMALL, "--own")


@pytest.mark.cards
@pytest.mark.parametrize("options", [["--preset=muonh"], WITHOUT_KERNELS, ["--dtype=float32"]], ids=str)
def test_other_options_compile(options):
    compile_kinds("h200", *options)


@pytest.mark.cards
def test_fp8_linears_compile():
    figures = compile_for("h200", "--preset=track_1", "--num_layers=4", "--layers=[]", "--num_heads=12",
                          "--model_dim=1536", "--fp8_linear=on")
    assert figures["graphs"]["training"] == 4 and figures["graphs"]["validation"] == 2
