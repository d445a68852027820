"""Update rules against references in float64, the optimizer that calls them, and its buckets."""

import math

import numpy as np
import pytest
import torch
from conftest import gpt, make_runtime, smoke_config
from torch import nn

SPHERES = [name for name, rule in gpt.RULES.items() if rule.keeps_norm]
BANDS = dict(newton_schulz=(0.6, 1.25), polar_express=(0.85, 1.15), precise=(0.98, 1.001))
RULES_AND_METHODS = [(name, method) for name in gpt.RULES
                     for method in (BANDS if "muon" in name else ["newton_schulz"])]
POLYNOMIALS = dict(  # as published, by Muon and by Polar Express. The last one is Newton-Schulz of order 5
    newton_schulz=[(3.4445, -4.7750, 2.0315)] * 5,
    polar_express=[(8.156554524902461, -22.48329292557795, 15.878769915207462),
                   (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                   (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                   (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                   (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)],
    precise=[(2, -1.5, 0.5)] * 12)


def make_args(lr=0.05, decay=0.0, step=1, betas=(0.9, 0.95), grad_scale=1.0, dtype=torch.float32, **changes):
    """Arguments of an update with momentum 0.9. decay includes lr. dtype: of the numbers."""
    scalars = (0.9, grad_scale, 1 - betas[0] ** step, 1 - betas[1] ** step)
    lr, decay, *scalars = (torch.tensor(value, dtype=dtype) for value in (lr, decay, *scalars))
    return gpt.UpdateArgs(lr, decay, *scalars, betas, 1e-8)._replace(**changes)


def first_state(cfg):
    """The schedule at step 0, with momentum 0.9. Learning rates are the options."""
    return gpt.Schedule(cfg).at(0)._replace(momentum=0.9)


def norms(x):
    return x.double().square().sum(dim=(1, 2)).sqrt()


def equalize(singular, method):
    """All singular values of a matrix after its orthogonalization."""
    values = singular / (np.linalg.norm(singular) * (1.02 if method == "polar_express" else 1))
    for a, b, c in POLYNOMIALS[method]:
        values = a * values + b * values**3 + c * values**5
    return values


def update_by_hand(name, method, w, grads, lr, decay):
    """W and the state after each gradient. One numpy matrix, in float64."""
    rows, columns = w.shape
    m, v, radius = np.zeros_like(w), np.zeros_like(w), np.linalg.norm(w)
    axis = 1 if rows >= columns else 0
    seen = np.zeros_like(w).mean(axis, keepdims=True)
    for step, grad in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        if "adam" in name:
            update = m / (np.sqrt(v) + 1e-8) * np.sqrt(1 - 0.95**step) / (1 - 0.9**step)
        else:
            left, singular, right = np.linalg.svd(0.1 * grad + 0.9 * m, full_matrices=False)
            update = left * equalize(singular, method) @ right
        if "normuon" in name:  # rows, or columns of a wide matrix, to equal size. The norm stays
            seen = 0.95 * seen + 0.05 * (update**2).mean(axis, keepdims=True)
            balanced = update / np.sqrt(seen)
            update = balanced * np.linalg.norm(update) / np.linalg.norm(balanced)
        if name.endswith("h"):
            w = w - lr * radius * update / np.linalg.norm(update)
            w = w * radius / np.linalg.norm(w)
        else:
            size = max(1, rows / columns) ** 0.5 if "muon" in name else 1
            w = w * (1 - decay) - lr * size * update
        yield w, dict(momentum=m, exp_avg=m, exp_avg_sq=v, second_momentum=seen, radius=radius)


@pytest.mark.parametrize("name, method", RULES_AND_METHODS)
@pytest.mark.parametrize("shape", [(8, 8), (6, 14), (20, 5)], ids=["square", "wide", "tall"])
def test_every_rule_against_float64(name, method, shape):
    """Two matrices, three updates in float32. Gradients have half their size, and grad_scale doubles them."""
    rng = np.random.default_rng(0)
    weights, grads = rng.standard_normal((2, *shape)), rng.standard_normal((3, 2, *shape))
    references = [list(update_by_hand(name, method, weights[i], grads[:, i], 0.05, 0.02)) for i in range(2)]
    param, rule = torch.tensor(weights).float(), gpt.RULES[name]
    state = rule.init_state(param)
    for step in range(3):
        args = make_args(0.05, 0.02, step + 1, grad_scale=2.0, polynomial=method)
        rule.update(param, torch.tensor(grads[step]).float() / 2, state, args)
        for i, reference in enumerate(references):
            expected, remembered = reference[step]
            assert np.abs(param[i].numpy() - expected).max() < 2e-6  # float32 rounds weights of 3 by 1e-7
            for key, ours in state.items():
                assert np.abs(ours[i].numpy() - remembered[key]).max() < 2e-6, key


class Ends(nn.Module):
    """The parts of a model that the optimizer needs: an embedding, a head, segments, is_tied."""

    segments, is_tied = (), False

    def __init__(self):
        super().__init__()
        self.embed, self.head = gpt.parameter(torch.zeros(3), "embed"), nn.Module()
        self.head.weight = gpt.parameter(torch.zeros(3), "head")


@pytest.mark.parametrize("name, method", RULES_AND_METHODS)
def test_the_optimizer_tells_every_rule_its_numbers(name, method):
    """Three steps of 24,576 tokens. Gradients are scaled to twice as many. Weight decay is 0.4, times the rate."""
    rng, model = np.random.default_rng(0), Ends()
    weights, grads = rng.standard_normal((2, 6, 14)), rng.standard_normal((3, 2, 6, 14))
    model.stack = gpt.parameter(torch.tensor(weights).float(), "matrix")
    cfg = smoke_config(matrix_rule=name, orthogonalize=method, matrix_lr=0.05, adam_eps=1e-8,
                       tokens_per_step=24_576, matrix_betas=(0.9, 0.95), matrix_weight_decay=0.0 if name in SPHERES else 0.4)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    for grad in grads:
        model.stack.grad = torch.tensor(grad).float() / 2
        optimizer.step(first_state(cfg))
    for i in range(2):
        *_, (expected, _) = update_by_hand(name, method, weights[i], grads[:, i], 0.05, 0.02)
        assert np.abs(model.stack[i].detach().numpy() - expected).max() < 2e-6


def orthogonalize(x, dtype, method="newton_schulz"):
    return gpt.orthogonalize(x, make_args(dtype=dtype, polynomial=method)._replace(dtype=dtype))


@pytest.mark.parametrize("method", BANDS)
def test_the_polynomials_to_the_last_digit(method):
    """Singular values 3, 4, 12, 84 have the norm 85. They are multiplied by 2^20, so that the epsilon is lost."""
    singular = np.array([3.0, 4, 12, 84]) * 2**20
    made = orthogonalize(torch.tensor(np.diag(singular))[None], torch.float64, method)[0]
    assert np.abs(made.numpy() - np.diag(equalize(singular, method))).max() < 1e-12


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs_adamw(weight_decay):
    torch.manual_seed(0)
    ours, rule = torch.randn(37), gpt.RULES["adamw"]
    theirs = nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=0.03, betas=(0.8, 0.95), eps=1e-8, weight_decay=weight_decay)
    state = rule.init_state(ours)
    for step in range(1, 21):
        theirs.grad = torch.randn(37)
        args = make_args(0.03, 0.03 * weight_decay, step, (0.8, 0.95), grad_scale=4.0)
        rule.update(ours, theirs.grad / 4, state, args)
        reference.step()
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("fast", [(), ("sparse_embedding", "fused_adamw")], ids=["plain", "fast"])
@pytest.mark.parametrize("every", [1, 2])
def test_the_first_two_updates_of_the_optimizer_are_adams(every, fast):
    """All parameters of a model, by hand in float64: from zero moments, bias corrected with t = 1, then t = 2.

    Gradients of `every` steps are summed. They are scaled to a loss summed over 49,152 tokens, as if they were
    of one step.
    """
    torch.manual_seed(0)
    table = dict(  # group: rate, betas, decay
        matrix=(0.05, (0.9, 0.95), 0.1), embed=(0.6, (0.7, 0.9), 0.0), value_embed=(0.3, (0.8, 0.99), 0.2),
        head=(0.01, (0.5, 0.6), 0.3), scalar=(0.04, (0.8, 0.95), 0.0), gain=(0.1, (0.6, 0.7), 0.0))
    options = dict(matrix_rule="adamw", mlp_up_lr_mul=3.0, norm_gain="on", output_gain="on", adam_eps=1e-3, grad_grid=0.0)
    for group, (lr, betas, decay) in table.items():
        options |= {f"{group}_lr": lr, f"{group}_betas": betas, f"{group}_weight_decay": decay,
                    f"{group}_every": every}
    cfg = smoke_config(**options)
    rt = make_runtime(fast=frozenset(fast))
    model = gpt.GPT(cfg, rt)
    optimizer = gpt.Optimizer(model, cfg, rt)
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
                if param.spec.is_table and fast:
                    param.sparse_grad.add(gpt.RowPlan(torch.arange(len(param)), len(param), rt.comm), grad)
                else:
                    param.grad = grad if param.grad is None else param.grad + grad
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


@pytest.mark.parametrize("name", SPHERES)
def test_norms_stay_for_a_thousand_steps(name):
    """In float32: each step rounds the norm by at most 2^-24 and sets it anew."""
    torch.manual_seed(0)
    rule, param = gpt.RULES[name], torch.randn(3, 8, 24) * torch.tensor([0.01, 1.0, 50.0]).view(3, 1, 1)
    before, state = norms(param), rule.init_state(param)
    for step in range(1, 1001):
        rule.update(param, torch.randn_like(param), state, make_args(0.02, step=step))
    assert ((norms(param) / before) - 1).abs().max() < 1e-6
    assert torch.allclose(state["radius"].flatten().double(), before, rtol=1e-6)


@pytest.mark.parametrize("eta", [0.001, 0.02, 0.5])
def test_a_step_at_a_right_angle_turns_by_arctan_eta(eta):
    torch.manual_seed(0)
    param, update = torch.randn(2, 2, 16, 40)
    update -= param * ((update * param).sum(dim=(1, 2)) / norms(param).float() ** 2).view(2, 1, 1)
    before, state = param.clone(), dict(radius=gpt.matrix_norm(param))
    param = gpt.sphere_step(param, update * 1e-3, state, make_args(eta))  # the size of the update is lost
    cosine = (before.double() * param).sum(dim=(1, 2)) / norms(before) / norms(param)
    assert cosine.arccos().tolist() == pytest.approx([math.atan(eta)] * 2, rel=1e-4)


@pytest.mark.parametrize("name", SPHERES)
def test_without_gradient_nothing_moves(name):
    rule, param = gpt.RULES[name], torch.randn(2, 8, 8)
    before = param.clone()
    rule.update(param, torch.zeros_like(param), rule.init_state(param), make_args(0.1))
    assert torch.allclose(param, before, rtol=1e-6)  # rescaled, so rounded


def test_every_matrix_of_a_stack_has_its_own_norm():
    """Q and K are one parameter, and V and O are one. A step of one matrix does not depend on the others."""
    torch.manual_seed(0)
    param, grad = torch.randn(2, 4, 16, 16)
    param *= torch.tensor([0.1, 1.0, 3.0, 9.0]).view(4, 1, 1)
    alone, rule = [part[None].clone() for part in param], gpt.RULES["normuonh"]
    for part, part_grad in zip(alone, grad):
        rule.update(part, part_grad[None], rule.init_state(part), make_args(0.1))
    rule.update(param, grad, rule.init_state(param), make_args(0.1))
    assert torch.allclose(param, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24), (5, 77), (1, 9)], ids=str)
def test_singular_values_after_each_orthogonaliser(method, shape):
    """Against an SVD in float64: values above 1/50 of the norm land in the method's band, vectors stay."""
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    u, singular, vh = torch.linalg.svd(x, full_matrices=False)
    big = singular / norms(x)[:, None] > 0.02
    made = orthogonalize(x, torch.float64, method)
    after = (u.mT @ made @ vh.mT).diagonal(dim1=-2, dim2=-1)
    low, high = BANDS[method]
    assert low < after[big].min() and after.max() < high
    rebuilt = u @ torch.diag_embed(after) @ vh
    assert (made - rebuilt).norm() / made.norm() < 1e-9


@pytest.mark.parametrize("method", BANDS)
def test_a_rank_that_is_missing_stays_missing(method):
    torch.manual_seed(0)
    x = torch.randn(2, 32, 3, dtype=torch.float64) @ torch.randn(2, 3, 48, dtype=torch.float64)
    singular = torch.linalg.svdvals(orthogonalize(x, torch.float64, method))
    low, high = BANDS[method]
    assert low < singular[:, :3].min() and singular.max() < high and singular[:, 3:].max() < 1e-9


def test_orthogonalize_in_bfloat16_and_of_zero():
    x = torch.randn(2, 32, 96)
    low, high = orthogonalize(x, torch.bfloat16).float(), orthogonalize(x, torch.float32)
    assert (low - high).norm() / high.norm() < 0.03  # bfloat16 has 8 bits. Five iterations do not amplify it
    assert not orthogonalize(torch.zeros(1, 4, 8), torch.float32).any()


@pytest.mark.parametrize("rule, at_rest", [("adamw", 1), ("muon", 0.8)])
def test_decay_in_its_forms(rule, at_rest):
    """W (1 - lr wd). Cautious decay acts on elements that have the sign of the update. If the update is zero, only
    Muon's decay acts."""
    param, update = torch.tensor([[[1.0, -2.0, 3.0, 4.0]]]), torch.tensor([[[1.0, 1.0, -1.0, 0.0]]])
    cautious = param * torch.tensor([0.8, 1, 1, at_rest])
    for is_cautious, decayed in ((False, param * 0.8), (True, cautious)):
        args = make_args(0.1, 0.2, cautious=is_cautious)
        if rule == "muon":
            ours = gpt.spectral_step(param, update, args)
        else:  # the first update of Adam is the sign of its gradient
            ours = gpt.adamw(param, update, gpt.RULES["adamw"].init_state(param), args)
        assert torch.allclose(ours, decayed - 0.1 * update)


@pytest.mark.parametrize("shape", [(4, 8), (8, 8), (32, 8)], ids=str)
def test_a_step_of_tall_matrices_is_longer(shape):
    """Times the square root of rows / columns if there are more rows than columns."""
    weight, update = torch.randn(2, 1, *shape)
    moved = weight - gpt.spectral_step(weight, update, make_args(0.1))
    assert torch.allclose(moved, 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * update, atol=1e-6)


def test_bfloat16_parameters_are_updated_in_float32():
    param, rule = torch.ones(64, dtype=torch.bfloat16), gpt.RULES["adamw"]
    state = rule.init_state(param)
    assert state["exp_avg"].dtype == torch.bfloat16
    rule.update(param, torch.full((64,), 3.0), state, make_args(0.25))
    assert param.unique().tolist() == [0.75]  # Adam's first step is lr
    state = gpt.RULES["normuonh"].init_state(torch.ones(2, 4, 8, dtype=torch.bfloat16))
    assert {key for key, x in state.items() if x.dtype == torch.float32} == {"second_momentum", "radius"}


class Pair(Ends):
    """Two equal matrices and two equal vectors, each with separate multipliers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        matrix, vector = torch.randn(4, 8), torch.randn(5)
        self.a = gpt.parameter(matrix.clone(), "matrix")
        self.b = gpt.parameter(matrix.clone(), "matrix", lr_mul=2.0, wd_mul=3.0)
        self.c = gpt.parameter(vector.clone(), "scalar")
        self.d = gpt.parameter(vector.clone(), "scalar", lr_mul=0.5)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_multipliers(rule):
    """Each matrix and each element of a bucket has a separate multiplier."""
    cfg = smoke_config(matrix_rule=rule, matrix_lr=0.1, matrix_weight_decay=0.2)
    model = Pair()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    assert [list(bucket.params) for bucket in optimizer.buckets] == [["head.weight"], ["d", "c"], ["b", "a"], ["embed"]]
    matrix, vector = torch.randn(4, 8), torch.randn(5)
    for name in "abcd":
        param = getattr(model, name)
        param.grad = (matrix if param.dim() == 2 else vector).to(param.dtype).expand_as(param).clone()
    optimizer.step(first_state(cfg))
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    # without decay, b would move twice as far as a. Its decay is lr_mul * wd_mul = 6 times as strong
    decay = 0.1 * 0.2
    update = moved["a"] - decay * before["a"]
    assert update.abs().max() > 0.01
    assert torch.allclose(moved["b"] - 6 * decay * before["b"], 2 * update, atol=1e-5)
    assert torch.allclose(moved["d"], 0.5 * moved["c"], atol=1e-6)


def test_parameters_live_in_buckets_and_gradients_are_autograds_own():
    """A bucket of one parameter takes its gradient as it is. Several gradients are packed side by side."""
    model = gpt.GPT(smoke_config())
    optimizer = gpt.Optimizer(model, smoke_config(), make_runtime())
    for name, param in model.named_parameters():
        bucket = optimizer.bucket_of[name]
        assert param.untyped_storage().data_ptr() == bucket.values.untyped_storage().data_ptr()
        assert torch.equal(param.flatten(), bucket.values[bucket.slices[name]].flatten())
        assert param.grad is None
        param.grad = torch.randn_like(param)
    kinds = set()
    for bucket in optimizer.buckets:
        is_table = any(param.spec.is_table for param in bucket.params.values())
        bucket.start_reduce()
        packed, params = bucket.grad, bucket.params
        is_own = len(params) == 1 and packed.numel() == sum(param.numel() for param in params.values())
        kinds.add((is_own, is_table))
        for name, param in params.items():
            assert torch.equal(packed[bucket.slices[name]].flatten(), param.grad.flatten())
            assert (packed.data_ptr() == param.grad.data_ptr()) == is_own
    assert kinds == {(True, True), (True, False), (False, False)}
    assert sorted(optimizer.bucket_of) == sorted(name for name, _ in model.named_parameters())


def test_a_table_has_a_gradient_by_rows_only_with_its_fast_form():
    """An ordinary gradient of such a table would be lost, so it is an error that names the table."""
    cfg, rt = smoke_config(), make_runtime(fast=frozenset({"sparse_embedding"}))
    plain = gpt.Optimizer(gpt.GPT(cfg), cfg, make_runtime())
    assert not any(bucket.sparse for bucket in plain.buckets)
    model = gpt.GPT(cfg, rt)
    optimizer = gpt.Optimizer(model, cfg, rt)
    tables = {name for name, param in model.named_parameters() if param.spec.is_table}
    assert tables == {"value_embeds.0", "value_embeds.1"}
    assert {bucket.name for bucket in optimizer.buckets if bucket.sparse} == tables
    assert all(len(optimizer.bucket_of[name].params) == 1 for name in tables)
    model.value_embeds["0"].grad = torch.zeros_like(model.value_embeds["0"])
    with pytest.raises(AssertionError, match="value_embeds.0 is a table with an ordinary gradient"):
        optimizer.step(first_state(cfg))


@pytest.mark.parametrize("spec", [None, gpt.ParamSpec("misc")])
def test_a_parameter_without_a_group_is_named(spec):
    model = gpt.GPT(smoke_config())
    model.extra = nn.Parameter(torch.zeros(3))
    if spec:
        model.extra.spec = spec
    with pytest.raises(AssertionError, match=r"parameter extra \(3,\) has no group.*matrix, embed"):
        gpt.Optimizer(model, smoke_config(), make_runtime())


def test_padding_stays_zero():
    cfg = smoke_config()
    optimizer = gpt.Optimizer(Pair(), cfg, make_runtime())
    for bucket in optimizer.buckets:
        for param in bucket.params.values():
            param.grad = torch.ones_like(param)
    optimizer.step(first_state(cfg))
    bucket = optimizer.bucket_of["c"]
    assert bucket is optimizer.bucket_of["d"] and len(bucket.values) == 64
    for part in bucket.values.view(2, 32):
        assert part[:5].all() and not part[5:].any()


class Stuck(Ends):
    """A zero matrix beside another one."""

    def __init__(self):
        super().__init__()
        self.alive, self.dead = (gpt.parameter(data, "matrix") for data in (torch.ones(4, 8), torch.zeros(4, 8)))


@pytest.mark.parametrize("name", SPHERES)
def test_a_zero_matrix_is_refused_by_name(name):
    with pytest.raises(gpt.InputError, match="one of dead is zero: give --output_gain=on"):
        gpt.Optimizer(Stuck(), smoke_config(matrix_rule=name), make_runtime())


@pytest.mark.parametrize("decay, acts", [("decoupled", 1), ("cautious", 0)])
def test_decay_along_the_rate_is_along_each_groups_own(decay, acts):
    """Rates of Adam's groups at half, of matrices at a quarter: W (1 - lr f wd f), and no gradient.

    Cautious decay does not act on Adam's parameters then, but it acts on Muon's.
    """
    cfg = smoke_config(decay=decay, decay_schedule="lr", matrix_lr=0.1, matrix_weight_decay=0.5, head_lr=0.1,
                       head_weight_decay=0.5, zero_init="off", cooldown_frac=0.5, matrix_cooldown_frac=1.0,
                       final_lr_frac=0.0)
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(1.0)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    matrix = model.blocks[1].mlp.up_down
    before = matrix.clone()
    optimizer.step(gpt.Schedule(cfg).at(9))  # a quarter of the 12 steps remains
    assert torch.allclose(model.head.weight, torch.tensor(1 - acts * 0.1 * 0.5 * 0.5 * 0.5))
    assert torch.allclose(matrix, before * (1 - 0.1 * 0.25 * 0.5 * 0.25))


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_the_fused_form_of_adam_is_the_rule(dtype, error, monkeypatch):
    """Over five steps, with decay and a gradient that is zero for half the rows."""
    results, calls, kernel = [], [], torch._fused_adamw_
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **more: calls.append(1) or kernel(*args, **more))
    for update in (gpt.fused_adamw, gpt.RULES["adamw"].update):
        generator = torch.Generator().manual_seed(1)
        param = torch.randn(64, 3, generator=generator).to(dtype).flatten()
        state = gpt.RULES["adamw"].init_state(param)
        for step in range(1, 6):
            grad = torch.randn(64, 3, generator=generator).to(dtype)
            grad[::2] = 0
            args = make_args([0.02], [0.001], step, (0.8, 0.95), grad_scale=3.0, dtype=dtype)
            update(param, grad.flatten(), state, args)
        results.append((param, state["exp_avg"], state["exp_avg_sq"]))
        assert len(calls) == 5  # of the first form only
    for ours, plain in zip(*results):
        assert torch.allclose(ours, plain, rtol=error, atol=error)
    assert not torch.equal(results[0][0], torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).flatten())


class Scalars(Ends):
    """Parameters of one group, in one bucket."""

    def __init__(self, group, *shape, dtype=torch.float32, lr_muls=(1.0,), wd_muls=(1.0,)):
        super().__init__()
        pairs = [(lr_mul, wd_mul) for lr_mul in lr_muls for wd_mul in wd_muls]
        self.params = nn.ParameterList(
            gpt.parameter(torch.ones(shape, dtype=dtype), group, *multipliers) for multipliers in pairs)


@pytest.mark.parametrize("group, fits, model, changes", [
    ("scalar", True, dict(), {}),
    ("scalar", False, dict(), dict(decay="cautious")),
    ("scalar", False, dict(lr_muls=(1.0, 0.5)), {}),
    ("scalar", False, dict(wd_muls=(1.0, 0.5)), {}),
    ("scalar", False, dict(dtype=torch.bfloat16), {}),
    ("scalar", False, dict(dtype=torch.bfloat16), dict(state_dtype="float32")),
    ("scalar", False, dict(dtype=torch.float64), {}),
    ("matrix", False, dict(), dict(matrix_rule="adamh")),
    ("matrix", False, dict(), dict(matrix_rule="muon")),
    ("matrix", True, dict(), dict(matrix_rule="adamw", matrix_weight_decay=0.1)),
], ids=str)
def test_the_fused_form_of_adam_is_used_only_if_it_fits(group, fits, model, changes, monkeypatch):
    """In float32, with one learning rate and one decay in the bucket, and without cautious decay."""
    calls, cfg = [], smoke_config(**changes)
    monkeypatch.setattr(gpt, "fused_adamw", lambda param, *_: calls.append(param))
    for fast in ((), ("fused_adamw",)):
        optimizer = gpt.Optimizer(Scalars(group, 8, 8, **model), cfg, make_runtime(fast=frozenset(fast)))
        bucket = optimizer.bucket_of["params.0"]
        assert all(name.startswith("params.") for name in bucket.params)
        for param in bucket.params.values():
            param.grad = torch.ones_like(param)
        optimizer.step(first_state(cfg))
        assert any(param is bucket.shard for param in calls) == (fits and bool(fast))
