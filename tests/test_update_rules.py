"""Update rules against references in float64. Every rule trains."""

import functools
import math

import numpy as np
import pytest
import torch
from conftest import CPU_FORMS, gpt, make_runtime, smoke_config, train_steps
from record92_reference import MAPS
from reference_run import ORTHOGONALIZATIONS
from torch import nn

SPHERES = [name for name, rule in gpt.RULES.items() if rule.keeps_norm]
BANDS = dict(newton_schulz=(0.6, 1.25), polar_express=(0.85, 1.15), six_maps=(0.99, 1.001))
MARGINS = dict(polar_express=1.02, six_maps=1.05)  # inputs are divided by this times their norm
# Rules with a float64 formula in update_by_hand(). All rules of gpt.RULES are tested for their properties
MATRIX_RULES = ["muon", "normuon", "muonh", "normuonh", "anvil", "adamw"]
RULES_AND_METHODS = [(name, method) for name in MATRIX_RULES
                     for method in (BANDS if "muon" in name or name == "anvil" else ["newton_schulz"])]
POLYNOMIALS = {**{name: maps for name, (maps, _, _) in ORTHOGONALIZATIONS.items()}, "six_maps": MAPS}  # as published


def make_args(lr=0.05, decay=0.0, step=1, betas=(0.9, 0.95), grad_scale=1.0, dtype=torch.float32, **changes):
    """(Hyper, UpdateOptions) of an update with momentum 0.9. anvil mixes its fast and slow momentum."""
    hyper = dict(
        lr=lr, weight_decay=decay, momentum=0.9, grad_scale=grad_scale, bias_correction1=1 - betas[0] ** step,
        bias_correction2=1 - betas[1] ** step, beta1=betas[0], beta2=betas[1], decay_time=0.0, has_slow_momentum=1.0)
    hyper |= {name: changes.pop(name) for name in gpt.Hyper._fields if name in changes}
    hyper = {name: torch.as_tensor(value, dtype=dtype) for name, value in hyper.items()}
    return gpt.Hyper(**hyper), gpt.UpdateOptions(1e-8, **changes)


def first_state(cfg):
    """The schedule at step 0, with momentum 0.9. Learning rates are the options."""
    return gpt.Schedule(cfg).at(0)._replace(momentum=0.9, has_slow_momentum=True)


def norms(x):
    return x.double().square().sum(dim=(1, 2)).sqrt()


def equalize(singular, method):
    """All singular values of a matrix after its orthogonalization."""
    values = singular / (np.linalg.norm(singular) * MARGINS.get(method, 1))
    for a, b, c in POLYNOMIALS[method]:
        values = a * values + b * values**3 + c * values**5
    return values


def update_by_hand(name, method, w, grads, lr, decay, by_row=False):
    """W and the state after each gradient, in float64. by_row: rows of wide matrices, not columns."""
    rows, columns = w.shape
    m, v, slow, radius = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w), np.linalg.norm(w)
    axis = 1 if rows >= columns or by_row else 0
    seen = np.zeros_like(w).mean(axis, keepdims=True)
    for step, grad in enumerate(grads, 1):
        beta = 0.85 if name == "anvil" else 0.9
        m, v, slow = beta * m + (1 - beta) * grad, 0.95 * v + 0.05 * grad**2, 0.98 * slow + 0.02 * grad
        mean = 0.4385 * m + 0.5615 * slow if name == "anvil" else m
        if "adam" in name:
            update = m / (np.sqrt(v) + 1e-8) * np.sqrt(1 - 0.95**step) / (1 - 0.9**step)
        else:
            left, singular, right = np.linalg.svd(0.1 * grad + 0.9 * mean, full_matrices=False)
            update = left * equalize(singular, method) @ right
        if "normuon" in name or name == "anvil":  # rows, or columns of a wide matrix, to equal size. The norm stays
            seen = 0.95 * seen + 0.05 * (update**2).mean(axis, keepdims=True)
            balanced = update / np.sqrt(seen)
            update = balanced * np.linalg.norm(update) / np.linalg.norm(balanced)
        if name.endswith("h"):
            w = w - lr * radius * update / np.linalg.norm(update)
            w = w * radius / np.linalg.norm(w)
        else:
            size = 1 if "adam" in name else max(1, rows / columns) ** 0.5
            w = w * (1 - decay * (size if name == "anvil" else 1)) - lr * size * update
        yield w, dict(momentum=m, slow_momentum=slow, exp_avg=m, exp_avg_sq=v, second_momentum=seen, radius=radius)


@pytest.mark.parametrize("name, method", RULES_AND_METHODS)
@pytest.mark.parametrize("shape, by_row", [((8, 8), False), ((6, 14), False), ((20, 5), False), ((6, 14), True)],
                         ids=["square", "wide", "tall", "wide by row"])
def test_every_rule_against_float64(name, method, shape, by_row):
    """Two matrices, three updates in float32. Gradients have half their size, and grad_scale doubles them."""
    rng = np.random.default_rng(0)
    weights, grads = rng.standard_normal((2, *shape)), rng.standard_normal((3, 2, *shape))
    references = [list(update_by_hand(name, method, weights[i], grads[:, i], 0.05, 0.02, by_row)) for i in range(2)]
    param, rule = torch.tensor(weights).float(), gpt.RULES[name]
    state = rule.init_state(param, by_row=by_row)
    for step in range(3):
        args = make_args(0.05, 0.4, step + 1, grad_scale=2.0, polynomial=method)
        rule.update(param, torch.tensor(grads[step]).float() / 2, state, *args)
        for i, reference in enumerate(references):
            expected, remembered = reference[step]
            assert np.abs(param[i].numpy() - expected).max() < 2e-6  # float32 rounds weights of 3 by 1e-7
            for key, ours in state.items():
                assert np.abs(ours[i].numpy() - remembered[key]).max() < 2e-6, key


class Ends(nn.Module):
    """The parts of a model that the optimizer needs: an embedding, a head, one segment, is_tied."""

    segments, is_tied = [range(1)], False

    def __init__(self):
        super().__init__()
        self.embed, self.head = gpt.parameter(torch.zeros(3), "embed"), nn.Module()
        self.head.weight = gpt.parameter(torch.zeros(3), "head")
        rules = {name: rule.update for name, rule in gpt.RULES.items()}
        self.calls = gpt.Calls(None, None, None, rules, functools.partial(gpt.update_shard, rules))


@pytest.mark.parametrize("method", BANDS)
def test_the_polynomials_to_the_last_digit(method):
    """Singular values 3, 4, 12, 84 have the norm 85. They are multiplied by 2^20, so that the epsilon is lost."""
    singular = np.array([3.0, 4, 12, 84]) * 2**20
    made = gpt.orthogonalize(torch.tensor(np.diag(singular))[None], method, torch.float64)[0]
    assert np.abs(made.numpy() - np.diag(equalize(singular, method))).max() < 1e-12


MAPPED = {1e-4: 0.06425008, 1e-3: 0.58454118, 3e-3: 0.9950672, 0.01: 1.00026686, 0.1: 0.99959977, 0.3: 0.99960094,
          0.6: 1.00007966, 0.9: 1.0000996, 1 / 1.05: 1.00040139, 0.9525: 23.17621282}


def test_the_six_maps_of_anvil():
    """The published values. The maps diverge just above 1 / 1.05."""
    for value, expected in MAPPED.items():
        for a, b, c in gpt.POLYNOMIALS["six_maps"].coefficients:
            value = a * value + b * value**3 + c * value**5
        assert value == pytest.approx(expected, abs=1e-8)


ANVIL = {  # shape: (first three weights and norm of the matrix) after each of two steps, state "second_momentum"
    (4, 6): ([(-0.001025, -0.053924, -0.090892, 0.354581), (-0.016206, -0.049512, -0.088542, 0.341779)],
             [0.036507, 0.046968, 0.023353, 0.028872, 0.029747, 0.024571]),
    (6, 4): ([(-0.002845, -0.056735, -0.093358, 0.362386), (-0.009984, -0.058894, -0.083459, 0.372705)],
             [0.029457, 0.041447, 0.029371, 0.029833, 0.030857, 0.029043]),
}


@pytest.mark.parametrize("shape", ANVIL, ids=str)
def test_anvil_at_the_published_values(shape):
    """Two steps in float64. The second one mixes the two momenta. The decay is 2.25 lr, and cautious."""
    steps, variance = ANVIL[shape]
    i, j = (torch.arange(1, size + 1, dtype=torch.float64) for size in shape)
    i, rule = i[:, None], gpt.RULES["anvil"]
    weight = 0.1 * torch.cos(i + 0.5 * j)[None]
    state, grads = rule.init_state(weight), (torch.sin(0.7 * i * j), torch.cos(0.3 * i + 0.9 * j))
    for grad, expected in zip(grads, steps):  # the weights of the momenta do not matter in the first step
        hyper, options = make_args(0.023, 2.25 * 0.023, betas=(0.9, 0.9), dtype=torch.float64, momentum=0.93,
                                   polynomial="six_maps", cautious=True)  # fmt: skip
        rule.update(weight, grad[None], state, hyper, options._replace(dtype=torch.float64))
        assert [*weight[0, 0, :3].tolist(), weight.norm().item()] == pytest.approx(expected, abs=1e-6)
    assert state["second_momentum"].flatten().tolist() == pytest.approx(variance, abs=1e-6)


@pytest.mark.parametrize("shape", [(64, 48), (256, 768)], ids=str)
def test_a_gradient_of_rank_one_is_at_the_edge_of_the_six_maps(shape):
    """Its singular value is 1 / 1.05 after the division. In float32 the norm of the result is 1."""
    torch.manual_seed(0)
    x = torch.randn(1, shape[0], 1) @ torch.randn(1, 1, shape[1])
    assert norms(gpt.orthogonalize(x, "six_maps", torch.float32)).item() == pytest.approx(1, abs=2e-3)


@pytest.mark.parametrize("kind", ["normal", "equal", "signs", "one row"])
def test_rank_one_does_not_diverge_in_bfloat16(kind):
    """bfloat16 rounds the norm and each entry, so a margin of 1.05 is exceeded. The largest singular value is about 1."""
    torch.manual_seed(0)
    for rows, columns in [(64, 128), (16, 16), (64, 64), (128, 512)] * 5:
        left, right = torch.randn(1, rows, 1), torch.randn(1, 1, columns)
        left, right = dict(normal=(left, right), equal=(left[:, :1].expand_as(left), right[..., :1].expand_as(right)),
                           signs=(left.sign(), right.sign()), **{"one row": (torch.eye(rows)[None, :, 3:4], right)})[kind]
        result = gpt.orthogonalize(left @ right, "six_maps", torch.bfloat16)
        assert torch.linalg.matrix_norm(result.float(), 2).item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("every", [1, 2])
def test_the_first_two_updates_of_the_optimizer_are_adams(every):
    """All parameters of a model, by hand in float64: from zero moments, bias corrected with t = 1, then t = 2.
    Gradients of `every` steps are summed. They are scaled to a loss summed over 49,152 tokens, as if they were of one
    step."""
    torch.manual_seed(0)
    table = dict(  # group: rate, betas, decay
        matrix=(0.05, (0.9, 0.95), 0.1), embed=(0.6, (0.7, 0.9), 0.0), value_embed=(0.3, (0.8, 0.99), 0.2),
        head=(0.01, (0.5, 0.6), 0.3), scalar=(0.04, (0.8, 0.95), 0.0), gain=(0.1, (0.6, 0.7), 0.0))
    groups = {name: dict(lr=lr, betas=betas, weight_decay=decay, every=every)
              for name, (lr, betas, decay) in table.items()}
    groups["matrix"]["rule"] = "adamw"
    cfg = smoke_config(groups=groups, mlp_lr_mul=(3.0, 1.0), gains="norm,output", adam_eps=1e-3)
    model = gpt.GPT(cfg)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    named = dict(model.named_parameters())
    expected = {name: param.detach().double() for name, param in named.items()}
    m, v = ({name: torch.zeros_like(w) for name, w in expected.items()} for _ in "mv")
    assert {param.spec.group for param in named.values()} == set(table)
    for t in (1, 2):
        grads = {name: torch.zeros_like(w) for name, w in expected.items()}
        for _ in range(every):
            assert all(torch.allclose(param.double(), expected[name], atol=1e-6)
                       for name, param in named.items())  # nothing moves when no update is due
            for name, param in named.items():
                grad = torch.randn_like(param) / 8
                if param.spec.is_table:  # a gradient of each row
                    plan = gpt.plan_rows([np.arange(len(param))], 0, len(param))
                    optimizer.bucket_of[name].start_reading(plan)().backward(grad)
                else:
                    param.grad += grad
                grads[name] += grad.double() * 49_152 / 2048
            optimizer.step(first_state(cfg))
        for name, param in named.items():
            lr, (beta1, beta2), decay = table[param.spec.group]
            lr *= torch.tensor([3.0, 1.0]).view(2, 1, 1) if name.endswith("up_down") else 1
            m[name] = beta1 * m[name] + (1 - beta1) * grads[name]
            v[name] = beta2 * v[name] + (1 - beta2) * grads[name] ** 2
            step = m[name] / (v[name].sqrt() + 1e-3) * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
            expected[name] = expected[name] * (1 - lr * decay) - lr * step
            assert torch.allclose(param.double(), expected[name], atol=1e-6), f"{name}, update {t}"


@pytest.mark.parametrize("cautious", [False, True])
def test_row_adam_against_float64(cautious):
    """Six updates, of which a row misses those without a gradient: its weights, and its second moment until it is
    read. beta2 changes after three updates, from 0.9 to 0.81, as in a group with late_every."""
    rng, rule = np.random.default_rng(0), gpt.RULES["row_adam"]
    param = torch.tensor(rng.standard_normal((5, 6))).float()
    state = rule.init_state(param)
    assert {key: x.shape for key, x in state.items()} == {"exp_avg_sq": (5, 1), "last_update": (5, 1)}
    weight, mean_square, last = param.double().numpy(), np.zeros(5), np.zeros(5)
    elapsed, power = 0.0, 1.0  # sum of -log(beta2), product of beta2
    for step in range(6):
        beta2 = 0.9 if step < 3 else 0.81
        elapsed, power = elapsed - math.log(beta2), power * beta2
        grad = rng.standard_normal((5, 6)) * (rng.random((5, 1)) < 0.6)
        grad[4] = 0  # never read
        for row in grad.any(1).nonzero()[0]:
            mean_square[row] *= math.exp(last[row] - elapsed)  # once per update since the row was read
            mean_square[row] += (1 - beta2) * ((2 * grad[row]) ** 2).mean()
            last[row] = elapsed
            update = 2 * grad[row] / (math.sqrt(mean_square[row]) + 1e-8) * math.sqrt(1 - power)
            decay = 0.02 * (update * weight[row] > 0) if cautious else 0.02
            weight[row] = weight[row] * (1 - decay) - 0.05 * update
        args = make_args(0.05, 0.4, grad_scale=2.0, betas=(0.0, beta2), cautious=cautious,
                         decay_time=torch.tensor(elapsed), bias_correction2=torch.tensor(1 - power))
        rule.update(param, torch.tensor(grad).float(), state, *args)
        assert np.abs(param.numpy() - weight).max() < 2e-6
        assert np.abs(state["exp_avg_sq"].ravel().numpy() - mean_square).max() < 2e-6
    assert (last[:4] > 0).all() and len(set(last)) > 2 and not state["last_update"][4].any()


@pytest.mark.parametrize("name", SPHERES)
def test_norms_stay_for_hundreds_of_steps(name):
    """A float32 step rounds the norm by at most 2^-24, and sets it anew. Without gradient nothing moves."""
    torch.manual_seed(0)
    rule, param = gpt.RULES[name], torch.randn(3, 8, 24) * torch.tensor([0.01, 1.0, 50.0]).view(3, 1, 1)
    start, state = param.clone(), rule.init_state(param)
    rule.update(param, torch.zeros_like(param), state, *make_args(0.1))
    assert torch.allclose(param, start, rtol=1e-6)  # rescaled, so rounded
    for step in range(1, 301):
        rule.update(param, torch.randn_like(param), state, *make_args(0.02, step=step))
    assert ((norms(param) / norms(start)) - 1).abs().max() < 1e-6
    assert not torch.allclose(param, start, rtol=0.5)
    assert torch.allclose(state["radius"].flatten().double(), norms(start), rtol=1e-6)


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("rows, columns, rank", [
    (48, 48, 48), (24, 96, 24), (96, 24, 24), (1, 9, 1), (32, 48, 3)])
def test_singular_values_after_each_orthogonaliser(method, rows, columns, rank):
    """By an SVD in float64: values above 1/50 of the norm land in the band, zeros and vectors stay."""
    torch.manual_seed(0)
    x = torch.randn(3, rows, rank, dtype=torch.float64) @ torch.randn(3, rank, columns, dtype=torch.float64)
    u, singular, vh = torch.linalg.svd(x, full_matrices=False)
    big, (low, high) = singular / norms(x)[:, None] > 0.02, BANDS[method]
    made = gpt.orthogonalize(x, method, torch.float64)
    after = (u.mT @ made @ vh.mT).diagonal(dim1=-2, dim2=-1)
    assert low < after[big].min() and after.max() < high and (after[:, rank:].abs() < 1e-9).all()
    assert (made - u @ torch.diag_embed(after) @ vh).norm() / made.norm() < 1e-9


def test_orthogonalize_in_bfloat16_and_of_zero():
    x = torch.randn(2, 32, 96)
    low = gpt.orthogonalize(x, "newton_schulz", torch.bfloat16).float()
    high = gpt.orthogonalize(x, "newton_schulz", torch.float32)
    assert (low - high).norm() / high.norm() < 0.03  # bfloat16 has 8 bits. Five iterations do not amplify it
    assert not gpt.orthogonalize(torch.zeros(1, 4, 8), "newton_schulz", torch.float32).any()


@pytest.mark.parametrize("rule, at_rest", [("adamw", 1), ("muon", 0.8)])
def test_decay_in_its_forms(rule, at_rest):
    """W (1 - lr wd). Cautious decay acts on elements that have the sign of the update. If the update is zero, only
    Muon's decay acts."""
    param, update = torch.tensor([[[1.0, -2.0, 3.0, 4.0]]]), torch.tensor([[[1.0, 1.0, -1.0, 0.0]]])
    cautious = param * torch.tensor([0.8, 1, 1, at_rest])
    for is_cautious, decayed in ((False, param * 0.8), (True, cautious)):
        function = gpt.RULES[rule].function
        with_decay, without = (
            function(param, update, gpt.RULES[rule].init_state(param), *make_args(0.1, decay, cautious=is_cautious))
            for decay in (0.2, 0.0))  # an orthogonalized row, and Adam's first update, have the gradient's signs
        assert torch.allclose(with_decay - without, decayed - param)


def test_bfloat16_parameters_are_updated_in_float32():
    param, rule = torch.ones(64, dtype=torch.bfloat16), gpt.RULES["adamw"]
    state = rule.init_state(param)
    assert state["exp_avg"].dtype == torch.bfloat16
    rule.update(param, torch.full((64,), 3.0), state, *make_args(0.25))
    assert param.unique().tolist() == [0.75]  # Adam's first step is lr
    state = gpt.RULES["normuonh"].init_state(torch.ones(2, 4, 8, dtype=torch.bfloat16))
    assert {key for key, x in state.items() if x.dtype == torch.float32} == {"second_momentum", "radius"}


@pytest.mark.recipe
@pytest.mark.parametrize("name, lr, method", [
    ("muon", 0.05, "newton_schulz"), ("normuon", 0.05, "polar_express"), ("anvil", 0.05, "six_maps"),
    ("muonh", 0.02, "newton_schulz"), ("normuonh", 0.02, "polar_express"),
    ("adamw", 0.002, "newton_schulz")])
def test_every_rule_trains(name, lr, method, shards):
    """Embeddings and head learn the frequencies of bytes. Only matrices, which a rate of 0 freezes, can
    learn their order: the loss of step 40 of a model with two layers."""
    losses = []
    for rate in (0.0, lr):
        cfg = smoke_config(shards, matrix_rule=name, matrix_lr=rate, orthogonalize=method, num_layers=2,
                           num_iterations=40, tokens_per_step=512, cooldown_frac=0.0,
                           gains="output" if name in SPHERES else "")
        losses.append(train_steps(gpt.Trainer(cfg, make_runtime(fast=CPU_FORMS)), 40)[-1])
    assert losses[1] < losses[0] - 0.01


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_row_adam_leaves_rows_whose_gradient_is_not_finite(value):
    """Or whose mean square is not. Neither weights nor state change."""
    rule, param = gpt.RULES["row_adam"], torch.ones(2, 4)
    state, grad = rule.init_state(param), torch.ones(2, 4)
    grad[0, 1] = value
    args = make_args(0.05, 0.0, grad_scale=1.0, betas=(0.0, 0.9), cautious=False, decay_time=torch.tensor(0.1),
                     bias_correction2=torch.tensor(0.1))
    rule.update(param, grad, state, *args)
    assert param[0].tolist() == [1.0] * 4 and (param[1] < 1).all()
    assert [state[name][0].item() for name in ("exp_avg_sq", "last_update")] == [0.0, 0.0] and state["exp_avg_sq"][1] > 0
