"""GPUs other than Hopper, and other options. A separate file, so that a second pytest worker can run it."""

import fake_cuda
import pytest
from test_cuda_compile import SMALL, compile_for, compile_kinds

pytestmark = pytest.mark.skipif(bool(fake_cuda.find_obstacle()), reason=fake_cuda.find_obstacle())

WITHOUT_KERNELS = ["--fast=rms_norm,flex_attention,head_loss"]  # no Triton kernels of ours


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
