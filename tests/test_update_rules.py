"""Update rules against references in float64, the optimizer that calls them, and the buckets they run on."""

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
POLYNOMIALS = dict(  # as published, by Muon and by Polar Express; the last one is Newton-Schulz of order 5
    newton_schulz=[(3.4445, -4.7750, 2.0315)] * 5,
    polar_express=[(8.156554524902461, -22.48329292557795, 15.878769915207462),
                   (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                   (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                   (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                   (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)],
    precise=[(2, -1.5, 0.5)] * 12)


def make_hyper(step=1, betas=(0.9, 0.95), grad_scale=1.0, **changes):
    scalars = (0.9, grad_scale, 1 - betas[0] ** step, 1 - betas[1] ** step)
    return gpt.Hyperparameters(*map(torch.tensor, scalars), betas, 1e-8, torch.float32)._replace(**changes)


def full(value):
    return torch.full((1, 1, 1), value)


def norms(x):
    return x.double().square().sum(dim=(1, 2)).sqrt()


def equalize(singular, method):
    """What an orthogonaliser makes of all singular values of a matrix."""
    values = singular / (np.linalg.norm(singular) * (1.02 if method == "polar_express" else 1))
    for a, b, c in POLYNOMIALS[method]:
        values = a * values + b * values**3 + c * values**5
    return values


def update_by_hand(name, method, w, grads, lr, decay):
    """W and what is remembered after each gradient; matrices of numpy, one at a time, in float64."""
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
        if "normuon" in name:  # rows, or columns of a wide matrix, to equal size; the norm stays
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
    """Two matrices, three updates in float32; gradients come at half their size, and grad_scale doubles them."""
    rng = np.random.default_rng(0)
    weights, grads = rng.standard_normal((2, *shape)), rng.standard_normal((3, 2, *shape))
    references = [list(update_by_hand(name, method, weights[i], grads[:, i], 0.05, 0.02)) for i in range(2)]
    param, rule = torch.tensor(weights).float(), gpt.RULES[name]
    state = rule.init_state(param)
    for step in range(3):
        hyper = make_hyper(step + 1, grad_scale=2.0, orthogonalize=method)
        rule.update(param, torch.tensor(grads[step]).float() / 2, state, full(0.05), full(0.02), hyper)
        for i, reference in enumerate(references):
            expected, remembered = reference[step]
            assert np.abs(param[i].numpy() - expected).max() < 2e-6  # float32 rounds weights of 3 by 1e-7
            for key, ours in state.items():
                assert np.abs(ours[i].numpy() - remembered[key]).max() < 2e-6, key


class Ends(nn.Module):
    """What the optimizer asks of every model: an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = gpt.declare(torch.zeros(3), "embed"), nn.Module()
        self.head.weight = gpt.declare(torch.zeros(3), "head")


@pytest.mark.parametrize("name, method", RULES_AND_METHODS)
def test_the_optimizer_tells_every_rule_its_numbers(name, method):
    """Three steps of 24,576 tokens, half of those that gradients are scaled to; decay is rate times 0.4."""
    rng, model = np.random.default_rng(0), Ends()
    weights, grads = rng.standard_normal((2, 6, 14)), rng.standard_normal((3, 2, 6, 14))
    model.stack = gpt.declare(torch.tensor(weights).float(), "matrix")
    cfg = smoke_config(matrix_rule=name, orthogonalize=method, matrix_lr=0.05, adam_eps=1e-8,
                       tokens_per_step=24_576, matrix_betas=(0.9, 0.95), matrix_weight_decay=0.0 if name in SPHERES else 0.4)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    for grad in grads:
        model.stack.grad = torch.tensor(grad).float() / 2
        optimizer.step(1.0, 0.9, 24_576)
    for i in range(2):
        *_, (expected, _) = update_by_hand(name, method, weights[i], grads[:, i], 0.05, 0.02)
        assert np.abs(model.stack[i].detach().numpy() - expected).max() < 2e-6


@pytest.mark.parametrize("method", BANDS)
def test_the_polynomials_to_the_last_digit(method):
    """On singular values of 3, 4, 12, 84, whose norm is 85, times 2^20, beside which the epsilon is lost."""
    singular = np.array([3.0, 4, 12, 84]) * 2**20
    made = gpt.orthogonalize(torch.tensor(np.diag(singular))[None], torch.float64, method)[0]
    assert np.abs(made.numpy() - np.diag(equalize(singular, method))).max() < 1e-12


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adam_is_torchs_adamw(weight_decay):
    torch.manual_seed(0)
    ours, rule = torch.randn(37), gpt.RULES["adamw"]
    theirs = nn.Parameter(ours.clone())
    reference = torch.optim.AdamW([theirs], lr=0.03, betas=(0.8, 0.95), eps=1e-8, weight_decay=weight_decay)
    state, lr = rule.init_state(ours), torch.tensor([0.03])
    for step in range(1, 21):
        theirs.grad = torch.randn(37)
        hyper = make_hyper(step, (0.8, 0.95), grad_scale=4.0)
        rule.update(ours, theirs.grad / 4, state, lr, lr * weight_decay, hyper)
        reference.step()
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("every", [1, 2])
def test_the_first_two_updates_of_the_optimizer_are_adams(every):
    """All parameters of a model, by hand in float64: from zero moments, bias corrected with t = 1, then t = 2.

    Gradients of `every` steps are summed, and scaled as those of a step, to a loss summed over 49,152 tokens.
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
                       for name, param in named.items())  # where no update is due, none moves
            for name, param in named.items():
                grad = torch.randn_like(param) / 8
                if param.spec.is_table:
                    param.take_rows(gpt.RowPlan(torch.arange(len(param)), len(param), make_runtime()), grad)
                else:
                    param.grad = grad if param.grad is None else param.grad + grad
                grads[name] += grad.double() * 49_152 / 2048
            optimizer.step(1.0, 0.9, 2048)
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
        rule.update(param, torch.randn_like(param), state, full(0.02), full(0.0), make_hyper(step))
    assert ((norms(param) / before) - 1).abs().max() < 1e-6
    assert torch.allclose(state["radius"].flatten().double(), before, rtol=1e-6)


@pytest.mark.parametrize("eta", [0.001, 0.02, 0.5])
def test_a_step_at_a_right_angle_turns_by_arctan_eta(eta):
    torch.manual_seed(0)
    param, update = torch.randn(2, 2, 16, 40)
    update -= param * ((update * param).sum(dim=(1, 2)) / norms(param).float() ** 2).view(2, 1, 1)
    before, state = param.clone(), dict(radius=gpt.matrix_norm(param))
    param = gpt.hyperball_step(param, update * 1e-3, state, full(eta), full(0.0), make_hyper())  # its size is lost
    cosine = (before.double() * param).sum(dim=(1, 2)) / norms(before) / norms(param)
    assert cosine.arccos().tolist() == pytest.approx([math.atan(eta)] * 2, rel=1e-4)


@pytest.mark.parametrize("name", SPHERES)
def test_without_gradient_nothing_moves(name):
    rule, param = gpt.RULES[name], torch.randn(2, 8, 8)
    before = param.clone()
    rule.update(param, torch.zeros_like(param), rule.init_state(param), full(0.1), full(0.0), make_hyper())
    assert torch.allclose(param, before, rtol=1e-6)  # rescaled, so rounded


def test_every_matrix_of_a_stack_has_its_own_norm():
    """Q and K are stored together, and so are V and O: a step of one does not depend on the others."""
    torch.manual_seed(0)
    param, grad = torch.randn(2, 4, 16, 16)
    param *= torch.tensor([0.1, 1.0, 3.0, 9.0]).view(4, 1, 1)
    alone, rule = [part[None].clone() for part in param], gpt.RULES["normuonh"]
    for part, part_grad in zip(alone, grad):
        rule.update(part, part_grad[None], rule.init_state(part), full(0.1), full(0.0), make_hyper())
    rule.update(param, grad, rule.init_state(param), full(0.1), full(0.0), make_hyper())
    assert torch.allclose(param, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24), (5, 77), (1, 9)], ids=str)
def test_singular_values_after_each_orthogonaliser(method, shape):
    """Against an SVD in float64: those above a fiftieth of the norm land in the method's band, vectors stay."""
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    u, singular, vh = torch.linalg.svd(x, full_matrices=False)
    big = singular / norms(x)[:, None] > 0.02
    made = gpt.orthogonalize(x, torch.float64, method)
    after = (u.mT @ made @ vh.mT).diagonal(dim1=-2, dim2=-1)
    low, high = BANDS[method]
    assert low < after[big].min() and after.max() < high
    rebuilt = u @ torch.diag_embed(after) @ vh
    assert (made - rebuilt).norm() / made.norm() < 1e-9


@pytest.mark.parametrize("method", BANDS)
def test_a_rank_that_is_missing_stays_missing(method):
    torch.manual_seed(0)
    x = torch.randn(2, 32, 3, dtype=torch.float64) @ torch.randn(2, 3, 48, dtype=torch.float64)
    singular = torch.linalg.svdvals(gpt.orthogonalize(x, torch.float64, method))
    low, high = BANDS[method]
    assert low < singular[:, :3].min() and singular.max() < high and singular[:, 3:].max() < 1e-9


def test_orthogonalize_in_bfloat16_and_of_zero():
    x = torch.randn(2, 32, 96)
    low, high = gpt.orthogonalize(x, torch.bfloat16).float(), gpt.orthogonalize(x, torch.float32)
    assert (low - high).norm() / high.norm() < 0.03  # bfloat16 has 8 bits; five iterations do not amplify it
    assert not gpt.orthogonalize(torch.zeros(1, 4, 8), torch.float32).any()


@pytest.mark.parametrize("apply, at_rest", [(gpt.apply_update, 1), (gpt.apply_spectral_update, 0.8)])
def test_decay_in_its_forms(apply, at_rest):
    """W (1 - lr wd), everywhere or where W has the sign of the update; where that is zero, only with Muon."""
    param, update = torch.tensor([[[1.0, -2.0, 3.0, 4.0]]]), torch.tensor([[[1.0, 1.0, -1.0, 0.0]]])
    cautious = param * torch.tensor([0.8, 1, 1, at_rest])
    for decay, decayed in (("decoupled", param * 0.8), ("cautious", cautious)):
        ours = apply(param, update, {}, full(0.1), full(0.2), make_hyper(decay=decay))
        assert torch.allclose(ours, decayed - 0.1 * update)


def test_bfloat16_parameters_are_updated_in_float32():
    param, rule = torch.ones(64, dtype=torch.bfloat16), gpt.RULES["adamw"]
    state = rule.init_state(param)
    assert state["exp_avg"].dtype == torch.bfloat16
    rule.update(param, torch.full((64,), 3.0), state, torch.tensor([0.25]), torch.zeros(1), make_hyper())
    assert param.unique().tolist() == [0.75]  # Adam's first step is lr
    state = gpt.RULES["normuonh"].init_state(torch.ones(2, 4, 8, dtype=torch.bfloat16))
    assert {key for key, x in state.items() if x.dtype == torch.float32} == {"second_momentum", "radius"}


class Pair(Ends):
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
def test_multipliers(rule):
    """Each matrix, and each element, has its own inside a bucket."""
    cfg = smoke_config(matrix_rule=rule, matrix_lr=0.1, matrix_weight_decay=0.2)
    model = Pair()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    assert [list(bucket.params) for bucket in optimizer.buckets] == [["head.weight"], ["d", "c"], ["b", "a"], ["embed"]]
    matrix, vector = torch.randn(4, 8), torch.randn(5)
    for name in "abcd":
        param = getattr(model, name)
        param.grad = (matrix if param.dim() == 2 else vector).to(param.dtype).expand_as(param).clone()
    optimizer.step(1.0, 0.9, gpt.GRAD_TOKENS)
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    # without decay, b would move twice as far as a; decay is lr_mul * wd_mul = 6 times as strong
    decay = 0.1 * 0.2
    update = moved["a"] - decay * before["a"]
    assert update.abs().max() > 0.01
    assert torch.allclose(moved["b"] - 6 * decay * before["b"], 2 * update, atol=1e-5)
    assert torch.allclose(moved["d"], 0.5 * moved["c"], atol=1e-6)


def test_parameters_live_in_buckets_and_gradients_are_autograds_own():
    """A bucket of one parameter takes its gradient as it is; several lie side by side; a table's is kept by rows."""
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
        bucket.row_size, is_table = 0, bucket.row_size > 0  # of one rank, a table with an ordinary gradient
        bucket.start_reduce()
        packed, params = bucket.reduced, bucket.params
        is_own = len(params) == 1 and packed.numel() == sum(param.numel() for param in params.values())
        kinds.add((is_own, is_table))
        for name, param in params.items():
            assert torch.equal(packed[bucket.slices[name]].flatten(), param.grad.flatten())
            assert (packed.data_ptr() == param.grad.data_ptr()) == is_own
    assert kinds == {(True, True), (True, False), (False, False)}
    assert sorted(optimizer.bucket_of) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("spec", [None, gpt.ParamSpec("misc")])
def test_a_parameter_without_a_group_is_named(spec):
    model = gpt.GPT(smoke_config())
    model.extra = nn.Parameter(torch.zeros(3))
    if spec:
        model.extra.spec = spec
    with pytest.raises(AssertionError, match=r"parameter extra \(3,\) is in no group.*matrix, embed"):
        gpt.Optimizer(model, smoke_config(), make_runtime())


def test_padding_stays_zero():
    optimizer = gpt.Optimizer(Pair(), smoke_config(), make_runtime())
    for bucket in optimizer.buckets:
        for param in bucket.params.values():
            param.grad = torch.ones_like(param)
    optimizer.step(1.0, 0.9, gpt.GRAD_TOKENS)
    bucket = optimizer.bucket_of["c"]
    assert bucket is optimizer.bucket_of["d"] and len(bucket.values) == 64
    for part in bucket.values.view(2, 32):
        assert part[:5].all() and not part[5:].any()


class Stuck(Ends):
    """A matrix that is zero, beside one that is not."""

    def __init__(self):
        super().__init__()
        self.alive, self.dead = (gpt.declare(data, "matrix") for data in (torch.ones(4, 8), torch.zeros(4, 8)))


@pytest.mark.parametrize("name", SPHERES)
def test_a_zero_matrix_is_refused_by_name(name):
    with pytest.raises(gpt.InputError, match="one of dead is zero: give --output_gain=on"):
        gpt.Optimizer(Stuck(), smoke_config(matrix_rule=name), make_runtime())


@pytest.mark.parametrize("decay, acts", [("decoupled", 1), ("cautious", 0)])
def test_decay_along_the_rate_is_along_each_groups_own(decay, acts):
    """Rates of Adam's groups at half, of matrices at a quarter: W (1 - lr f wd f), and no gradient; cautious decay
    then rests with Adam, but not with Muon."""
    cfg = smoke_config(decay=decay, decay_schedule="lr", matrix_lr=0.1, matrix_weight_decay=0.5, head_lr=0.1,
                       head_weight_decay=0.5, zero_init="off")
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(1.0)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    matrix = model.blocks[1].mlp.up_down
    before = matrix.clone()
    optimizer.step(0.5, 0.9, 2048, 0.25, None)
    assert torch.allclose(model.head.weight, torch.tensor(1 - acts * 0.1 * 0.5 * 0.5 * 0.5))
    assert torch.allclose(matrix, before * (1 - 0.1 * 0.25 * 0.5 * 0.25))


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_the_fused_form_of_adam_is_the_rule(dtype, error, monkeypatch):
    """Over five steps, with decay and a gradient that is zero for half the rows; and only where it can be."""
    results, calls, kernel = [], [], torch._fused_adamw_
    for is_fused in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "_fused_adamw_", lambda *args, **more: calls.append(1) or kernel(*args, **more))
            if not is_fused:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
            generator = torch.Generator().manual_seed(1)
            param = torch.randn(64, 3, generator=generator).to(dtype).flatten()
            state = gpt.RULES["adamw"].init_state(param)
            for step in range(1, 6):
                grad = torch.randn(64, 3, generator=generator).to(dtype)
                grad[::2] = 0
                hyper = make_hyper(step, (0.8, 0.95), grad_scale=3.0)
                hyper = hyper._replace(**{name: getattr(hyper, name).to(dtype) for name in ("bias_correction1", "bias_correction2")})
                lr, decay = torch.tensor([0.02]).to(dtype), torch.tensor([0.001]).to(dtype)
                gpt.RULES["adamw"].update(param, grad.flatten(), state, lr, decay, hyper)
            results.append((param, state["exp_avg"], state["exp_avg_sq"]))
    assert len(calls) == 5
    for ours, plain in zip(*results):
        assert torch.allclose(ours, plain, rtol=error, atol=error)
    assert not torch.equal(results[0][0], torch.randn(64, 3, generator=torch.Generator().manual_seed(1)).flatten())

    def fits(rule="adamw", size=1, like=param, num_decays=1, **changes) -> bool:
        """Whether an update is made by the kernel."""
        before, like, one, decay = len(calls), like.clone(), *(torch.ones(n).to(dtype) for n in (size, num_decays))
        state = gpt.RULES[rule].init_state(like)
        gpt.RULES[rule].update(like, torch.ones_like(like), state, one, decay, make_hyper(**changes))
        return len(calls) > before

    monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **more: calls.append(1))
    matrices = param.view(1, 64, 3)
    assert fits() and not fits(decay="cautious") and not fits(size=192) and not fits(num_decays=192)
    assert not fits("adamh", like=matrices) and not fits("muon", like=matrices)
    assert not fits(like=param.bfloat16())
