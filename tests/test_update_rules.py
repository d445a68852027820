"""Update rules on local tensors, and the banks they run on."""

import pytest
import torch
from conftest import gpt, make_runtime, smoke_config
from torch import nn


def make_knobs(step=1, momentum=0.9, betas=(0.8, 0.95), eps=1e-8, grad_scale=1.0):
    scalars = (momentum, grad_scale, 1 - betas[0] ** step, 1 - betas[1] ** step)
    return gpt.Knobs(*map(torch.tensor, scalars), betas, eps, torch.float32)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs_adamw(weight_decay):
    torch.manual_seed(0)
    ours = torch.randn(37)
    theirs = nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=0.03, betas=(0.8, 0.95), eps=1e-8, weight_decay=weight_decay)
    state = gpt.init_adam(ours)
    for step in range(1, 21):
        theirs.grad = torch.randn(37)
        gpt.update_adam(
            ours,
            theirs.grad / 4,
            state,
            torch.tensor([0.03]),
            torch.tensor([0.03 * weight_decay]),
            make_knobs(step, grad_scale=4.0),
        )
        reference.step()
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32), (5, 77), (1, 9)])
def test_orthogonalize_against_the_svd(shape):
    """Singular values land in the published band; singular vectors stay: the result is close to U V^T in direction."""
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    y = gpt.orthogonalize(x, torch.float32).double()
    assert y.shape == x.shape
    singular = torch.linalg.svdvals(y)
    big = (
        torch.linalg.svdvals(x) / x.norm(dim=(-2, -1))[:, None] > 0.02
    )  # tiny ones need more than 5 iterations
    assert 0.6 < singular[big].min() and singular.max() < 1.25
    alignment = (y * (u @ vh)).sum(dim=(-2, -1)) / y.norm(dim=(-2, -1)) / (u @ vh).norm(dim=(-2, -1))
    assert alignment.min() > 0.96


def test_orthogonalize_in_bfloat16_and_of_zero():
    x = torch.randn(2, 32, 96)
    low, high = gpt.orthogonalize(x, torch.bfloat16).float(), gpt.orthogonalize(x, torch.float32)
    assert (low - high).norm() / high.norm() < 0.03  # bfloat16 has 8 bits; five iterations do not amplify it
    assert not gpt.orthogonalize(torch.zeros(1, 4, 8), torch.float32).any()


def test_muon_step_by_hand():
    """M = mu M + (1 - mu) G; U = (1 - mu) G + mu M; W = W (1 - decay) - lr s NS(U), s = sqrt(rows / columns) if tall."""
    torch.manual_seed(0)
    param, buffer, grad = torch.randn(3, 2, 24, 8)
    new_buffer = 0.9 * buffer + 0.1 * grad * 2
    direction = 0.1 * grad * 2 + 0.9 * new_buffer
    expected = param * (1 - 0.01) - 0.05 * 3**0.5 * gpt.orthogonalize(direction, torch.float32)
    state = dict(momentum=buffer.clone())
    gpt.update_muon(
        param,
        grad,
        state,
        torch.full((1, 1, 1), 0.05),
        torch.full((1, 1, 1), 0.01),
        make_knobs(grad_scale=2.0),
    )
    assert torch.allclose(state["momentum"], new_buffer, atol=1e-6)
    assert torch.allclose(param, expected, atol=1e-6)


class Pair(nn.Module):
    """Two like matrices, two like vectors, each with its own multipliers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        matrix, vector = torch.randn(4, 8), torch.randn(5)
        self.a = gpt.declare(matrix.clone(), "matrix")
        self.b = gpt.declare(matrix.clone(), "matrix", lr_mul=2.0, wd_mul=3.0)
        self.c = gpt.declare(vector.clone(), "scalar")
        self.d = gpt.declare(vector.clone(), "scalar", lr_mul=0.5)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_multipliers_hold_inside_a_stack(rule):
    cfg = smoke_config(matrix_rule=rule, matrix_lr=0.1, matrix_weight_decay=0.2)
    model = Pair()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    assert [bin.num_params for bin in optimizer.bins] == [2, 2]
    grads = dict(a=torch.randn(4, 8), c=torch.randn(5))
    for param, grad in (
        (model.a, grads["a"]),
        (model.b, grads["a"]),
        (model.c, grads["c"]),
        (model.d, grads["c"]),
    ):
        param.grad.copy_(grad)
    optimizer.step(1.0, 0.9, gpt.GRAD_TOKENS)
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    # without decay, b would move twice as far as a; decay is lr_mul * wd_mul = 6 times as strong
    decay = 0.1 * 0.2
    update = moved["a"] - decay * before["a"]
    assert update.abs().max() > 0.01
    assert torch.allclose(moved["b"] - 6 * decay * before["b"], 2 * update, atol=1e-5)
    assert torch.allclose(moved["d"], 0.5 * moved["c"], atol=1e-6)


def test_parameters_and_gradients_live_in_the_banks():
    model = gpt.GPT(smoke_config())
    optimizer = gpt.Optimizer(model, smoke_config(), make_runtime())
    spans = [
        (
            b.params.data_ptr(),
            b.params.data_ptr() + b.params.nbytes,
            b.grads.data_ptr(),
            b.grads.data_ptr() + b.grads.nbytes,
        )
        for b in optimizer.bins
    ]
    for param in model.parameters():
        assert any(
            p0 <= param.data_ptr() < p1 and g0 <= param.grad.data_ptr() < g1 for p0, p1, g0, g1 in spans
        )
    assert sorted(optimizer.owners) == sorted(n for n, _ in model.named_parameters())


@pytest.mark.parametrize(
    "spec, message", [(None, "no update rule"), (gpt.ParamSpec("misc"), "group 'misc'")]
)
def test_a_parameter_without_a_rule_is_named(spec, message):
    model = gpt.GPT(smoke_config())
    model.extra = nn.Parameter(torch.zeros(3))
    if spec:
        model.extra.spec = spec
    with pytest.raises(ValueError, match=f"extra.*{message}"):
        gpt.Optimizer(model, smoke_config(), make_runtime())


def test_padding_stays_zero_and_restore_is_exact():
    cfg, model = smoke_config(), Pair()
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    saved = optimizer.snapshot()
    for param in model.parameters():
        param.grad.fill_(1.0)
    optimizer.step(1.0, 0.9, gpt.GRAD_TOKENS)
    (bin,) = optimizer.owners["c"]
    assert bin.params.numel() == 64 and not bin.params[5:32].any() and not bin.params[37:].any()
    assert any(not torch.equal(t, saved[1][name]) for name, t in optimizer.tensors().items())
    optimizer.restore(saved)
    assert optimizer.step_count == 0 and all(
        torch.equal(t, saved[1][name]) for name, t in optimizer.tensors().items()
    )


def test_bfloat16_parameters_are_updated_in_float32():
    param = torch.ones(64, dtype=torch.bfloat16)
    state = gpt.init_adam(param)
    assert state["exp_avg"].dtype == torch.bfloat16
    gpt.update_adam(param, torch.full((64,), 3.0), state, torch.tensor([0.25]), torch.zeros(1), make_knobs())
    assert param.unique().tolist() == [0.75]  # Adam's first step is lr
