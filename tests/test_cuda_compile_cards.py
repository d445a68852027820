"""track_1 as a whole for cards other than Hopper: a file of its own, for another worker of pytest."""

import fake_cuda
import pytest
from test_cuda_compile import compile_whole

pytestmark = pytest.mark.skipif(bool(fake_cuda.find_obstacle()), reason=fake_cuda.find_obstacle())


@pytest.mark.slow
@pytest.mark.parametrize("card, training", [("a100", 26.5), ("4090", 25.2), ("5090", 25.2)])
def test_the_whole_step_compiles_for(card, training):
    """GB of live tensors in training; A100 has no FP8 for the head."""
    compile_whole(card, ["--preset=track_1"], training, 15.8)
