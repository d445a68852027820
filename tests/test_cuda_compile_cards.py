"""Cards other than Hopper: a file of its own, for another worker of pytest."""

import fake_cuda
import pytest
from test_cuda_compile import compile_kinds

pytestmark = pytest.mark.skipif(bool(fake_cuda.find_obstacle()), reason=fake_cuda.find_obstacle())


@pytest.mark.slow
@pytest.mark.parametrize("card", ["a100", "4090", "5090"])
def test_every_kind_of_layer_compiles_for(card):
    """A100 has no FP8 for the head, the others less shared memory."""
    compile_kinds(card)
