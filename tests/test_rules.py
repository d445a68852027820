"""The family of update rules: what each one does to a matrix, and that every one trains."""

import math

import pytest
import torch
from conftest import gpt, make_runtime, smoke_config
from torch import nn

SPHERES = [name for name, rule in gpt.RULES.items() if rule.keeps_norm]
LRS = dict(muon=0.05, normuon=0.05, muonh=0.02, normuonh=0.02, adamh=0.01, adamw=0.002)


def make_knobs(step=1, betas=(0.9, 0.95), **changes):
    scalars = (0.9, 1.0, 1 - betas[0] ** step, 1 - betas[1] ** step)
    return gpt.Knobs(*map(torch.tensor, scalars), betas, 1e-8, torch.float32)._replace(**changes)


def full(value):
    return torch.full((1, 1, 1), value)


def norms(x):
    return x.double().square().sum(dim=(1, 2)).sqrt()


def test_the_table():
    assert set(gpt.RULES) == {"muon", "normuon", "muonh", "normuonh", "adamh", "adamw"} == set(LRS)
    assert SPHERES == ["muonh", "normuonh", "adamh"]


@pytest.mark.parametrize("name", SPHERES)
def test_norms_stay_for_a_thousand_steps(name):
    """In float32: each step rounds the norm by at most 2^-24 and sets it anew."""
    torch.manual_seed(0)
    rule, param = gpt.RULES[name], torch.randn(3, 8, 24) * torch.tensor([0.01, 1.0, 50.0]).view(3, 1, 1)
    before, state = norms(param), rule.init(param)
    for step in range(1, 1001):
        rule.update(param, torch.randn_like(param), state, full(0.02), full(0.0), make_knobs(step))
    assert ((norms(param) / before) - 1).abs().max() < 1e-6
    assert torch.allclose(state["radius"].flatten().double(), before, rtol=1e-6)


@pytest.mark.parametrize("eta", [0.001, 0.02, 0.5])
def test_a_step_at_a_right_angle_turns_by_arctan_eta(eta):
    torch.manual_seed(0)
    param, step = torch.randn(2, 2, 16, 40)
    step -= param * ((step * param).sum(dim=(1, 2)) / norms(param).float() ** 2).view(2, 1, 1)
    before, state = param.clone(), gpt.init_radius(param)
    gpt.rotate(param, step * 1e-3, state, full(eta))  # the size of the step does not matter
    cosine = (before.double() * param).sum(dim=(1, 2)) / norms(before) / norms(param)
    assert cosine.arccos().tolist() == pytest.approx([math.atan(eta)] * 2, rel=1e-4)


@pytest.mark.parametrize("name", SPHERES)
def test_without_gradient_nothing_moves(name):
    rule, param = gpt.RULES[name], torch.randn(2, 8, 8)
    before = param.clone()
    rule.update(param, torch.zeros_like(param), rule.init(param), full(0.1), full(0.0), make_knobs())
    assert torch.allclose(param, before, rtol=1e-6)  # rescaled, so rounded


def test_every_matrix_of_a_stack_has_its_own_norm():
    """Q, K, V and O are stored together: a step of one does not depend on the others."""
    torch.manual_seed(0)
    param, grad = torch.randn(2, 4, 16, 16)
    param *= torch.tensor([0.1, 1.0, 3.0, 9.0]).view(4, 1, 1)
    alone, rule = [part[None].clone() for part in param], gpt.RULES["normuonh"]
    for part, part_grad in zip(alone, grad):
        rule.update(part, part_grad[None], rule.init(part), full(0.1), full(0.0), make_knobs())
    rule.update(param, grad, rule.init(param), full(0.1), full(0.0), make_knobs())
    assert torch.allclose(param, torch.cat(alone), atol=1e-5)


BANDS = dict(newton_schulz=(0.6, 1.25), polar_express=(0.85, 1.15), precise=(0.98, 1.001))


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("shape", [(48, 48), (24, 96), (96, 24)], ids=["square", "wide", "tall"])
def test_singular_values_after_each_orthogonaliser(method, shape):
    """Against an SVD in float64: those above a hundredth of the norm land in the method's band, vectors stay."""
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


def test_balanced_rows_by_hand():
    """r = mean square of a row; v = 0.95 v + 0.05 r; X / sqrt(v), scaled back to the norm of X. Columns if wide."""
    torch.manual_seed(0)
    for shape, dim in (((6, 4), -1), ((4, 6), -2)):
        step, seen = torch.randn(2, 1, *shape), None
        state = gpt.init_balance(step[0])
        for x in step:
            r = x.square().mean(dim=dim, keepdim=True)
            seen = 0.05 * r if seen is None else 0.95 * seen + 0.05 * r
            expected = x / seen.sqrt()
            expected *= x.norm() / expected.norm()
            assert torch.allclose(gpt.balance(x, state, make_knobs()), expected, atol=1e-5)
            assert torch.allclose(state["mean_square"], seen, atol=1e-7)


def test_decay_in_its_forms():
    """W (1 - lr wd), everywhere or where W has the sign of the step."""
    param, step = torch.tensor([[[1.0, -2.0, 3.0, 4.0]]]), torch.tensor([[[1.0, 1.0, -1.0, 0.0]]])
    for decay, expected in (
        ("none", param - 0.1 * step),
        ("decoupled", param * 0.8 - 0.1 * step),
        ("cautious", param - 0.1 * step - 0.2 * torch.tensor([[[1.0, 0.0, 0.0, 0.0]]])),
    ):
        ours = param.clone()
        gpt.take_step(ours, step, full(0.1), full(0.2), make_knobs(decay=decay))
        assert torch.allclose(ours, expected)


class Stuck(nn.Module):
    """A matrix that is zero, beside one that is not."""

    def __init__(self):
        super().__init__()
        self.alive, self.dead = (
            gpt.declare(data, "matrix") for data in (torch.ones(4, 8), torch.zeros(4, 8))
        )


@pytest.mark.parametrize("name", SPHERES)
def test_a_zero_matrix_is_refused_by_name(name):
    with pytest.raises(gpt.InputError, match="one of dead is zero: give --output_gain=on"):
        gpt.Optimizer(Stuck(), smoke_config(matrix_rule=name), make_runtime())


@pytest.mark.parametrize(
    "changes, complaint",
    [
        (dict(matrix_rule="muonh", matrix_weight_decay=0.1), "matrix_weight_decay=0.1 has no effect"),
        (dict(matrix_rule="adamh", fuse_qkv="on"), "one norm of those of Q, K and V.*fuse_qkv=off"),
        (dict(matrix_rule="normuonh", zero_init="off"), "zero_init=off has no effect.*output_gain=off"),
        (dict(decay="none", adam_weight_decay=0.1), "decay=none beside a weight decay of 0.1"),
        (dict(tokens_per_param=8.0), "no effect without --depth"),
        (dict(matrix_rule="muons"), "matrix_rule=muons is not one of muon, normuon, muonh"),
    ],
)
def test_options_that_would_do_nothing_are_refused(changes, complaint):
    with pytest.raises(gpt.InputError, match=complaint):
        for name, value in changes.items():
            gpt.check_value(gpt.config_fields()[name], value)
        smoke_config(**changes)


def test_gates_and_gains_are_on_no_sphere():
    model = gpt.GPT(smoke_config(matrix_rule="normuonh", norm_gain="on"))
    hypers = gpt.group_hypers(smoke_config(matrix_rule="normuonh"))
    rules = {name: hypers[param.spec.group].rule for name, param in model.named_parameters()}
    assert {rule for name, rule in rules.items() if name.endswith(("qkvo", "up_down"))} == {"normuonh"}
    assert {rule for name, rule in rules.items() if not name.endswith(("qkvo", "up_down"))} == {"adamw"}
    assert sum(name.endswith("_gain") for name in rules) == 2 * (
        3 + 3
    )  # 3 attentions and 3 MLPs, each with both


def test_a_zero_gain_before_relu_squared_sleeps_for_ever_and_one_after_it_wakes():
    """The branch is quadratic in the first, whose gradient at 0 is exactly 0, and linear in the second."""
    torch.manual_seed(0)
    cfg = smoke_config(norm_gain="on", output_gain="on", num_layers=2)
    block, ones = gpt.Block(cfg, gpt.LayerSpec(attention="none")), dict(x=torch.ones(16, 1))
    x, step = torch.randn(16, 64), gpt.StepInputs((64, 64), *torch.zeros(2, 16, 2, 1, 32))
    for sleeper, other in (("mlp_gain", "mlp.output_gain"), ("mlp.output_gain", "mlp_gain")):
        named = dict(block.named_parameters())
        named[sleeper].data.zero_()
        named[other].data.fill_(1.0)
        grad, _ = torch.autograd.grad(
            block(x, {}, ones, None, step).square().sum(), (named[sleeper], named[other])
        )
        assert (grad == 0).all() == (sleeper == "mlp_gain")


@pytest.mark.parametrize("gain", ["norm_gain", "output_gain"])
def test_gains_do_what_they_say(gain):
    """Norm gains of 2 are inputs of attention and MLP times 2; output gains of 2 what they add, times 2."""
    torch.manual_seed(0)
    cfg = smoke_config(output_gain="on", norm_gain="on", num_layers=1)
    block, ones = gpt.Block(cfg, gpt.LayerSpec(attention="none")), dict(x=torch.ones(16, 1))
    x, step = torch.randn(16, 64), gpt.StepInputs((64, 64), *torch.zeros(2, 16, 2, 1, 32))
    block.mlp.output_gain.data.fill_(1.0)
    plain = block(x, {}, ones, None, step) - x
    (block.mlp_gain if gain == "norm_gain" else block.mlp.output_gain).data.fill_(2.0)
    factor = 4 if gain == "norm_gain" else 2  # ReLU^2 squares it
    assert torch.allclose(block(x, {}, ones, None, step) - x, factor * plain, atol=1e-4)


def test_matrices_have_a_schedule_of_their_own():
    cfg = smoke_config(
        num_iterations=100,
        cooldown_frac=0.3,
        matrix_cooldown_frac=1.0,
        matrix_warmup_frac=0.1,
        final_lr_frac=0.0,
    )
    at = gpt.Schedule(cfg).at
    assert [at(step).lr_factor for step in (0, 50, 70, 85)] == pytest.approx([1, 1, 1, 0.5])
    assert [at(step).matrix_lr_factor for step in (0, 4, 9, 50, 85)] == pytest.approx(
        [0.1, 0.5, 0.91, 0.5, 0.15]
    )
    same = gpt.Schedule(smoke_config()).at(9)
    assert same.lr_factor == same.matrix_lr_factor < 1


RULES_AND_METHODS = [
    (name, method) for name in gpt.RULES for method in (BANDS if "muon" in name else ["newton_schulz"])
]


def train_briefly(shards, name, lr, method="newton_schulz"):
    """Loss of the fortieth step of a model of two slots."""
    changes = dict(num_iterations=40, num_layers=2, tokens_per_step=512, cooldown_frac=0.0)
    cfg = smoke_config(shards, matrix_rule=name, matrix_lr=lr, orthogonalize=method, **changes)
    trainer = gpt.Trainer(cfg, make_runtime())
    data = gpt.TrainData(cfg, trainer.schedule)
    batches = gpt.Prefetcher(data.batches(cfg, trainer.rt, 0, 40), trainer.rt.device)
    for step in range(40):
        loss = trainer.train_step(batches, trainer.schedule.at(step)).item()
        trainer.progress.step += 1
    batches.close()
    return loss


@pytest.mark.parametrize("name, method", RULES_AND_METHODS)
def test_every_rule_trains(name, method, shards, frozen_losses):
    """Embeddings and head learn which bytes there are; only the matrices can learn what comes next."""
    assert train_briefly(shards, name, LRS[name], method) < frozen_losses[name in SPHERES] - 0.01


@pytest.fixture(scope="module")
def frozen_losses(shards):
    """The loss with matrices that stay as they are, zero (False) and not (True)."""
    return {False: train_briefly(shards, "muon", 0.0), True: train_briefly(shards, "muonh", 0.0)}


def test_the_muonh_preset():
    """The submission of 2026-02: gains 1 in, 0 out, non-zero projections of standard deviation 1/sqrt(D)."""
    cfg = gpt.make_config({"preset": "muonh"})
    assert (cfg.matrix_rule, cfg.orthogonalize, cfg.matrix_lr, cfg.gain_lr) == (
        "normuonh",
        "polar_express",
        0.02,
        0.1,
    )
    assert (cfg.matrix_cooldown_frac, cfg.cooldown_frac, cfg.final_lr_frac) == (1.0, 0.3, 0.0)
    small = gpt.make_config(
        {"preset": "muonh", "vocab_size": 257, "num_layers": 2, "num_heads": 2, "model_dim": 256}
    )
    torch.manual_seed(0)
    block = gpt.GPT(small).blocks[1]
    assert block.mlp.up_down.std(dim=(1, 2)).tolist() == pytest.approx([1 / 16] * 2, rel=0.01)
    assert block.attention.qkvo.std(dim=(1, 2)).tolist() == pytest.approx([1 / 16] * 4, rel=0.02)
    assert not block.mlp.output_gain.any() and (block.mlp_gain == 1).all()


WORKED = {  # depth: width, parameters in millions, tokens a step, decay, steps at 12 and at 8 tokens per parameter
    4: (256, 11.5, 2**18, 0.520, 528, 352),  # 1.890 before the clamp
    8: (512, 41.9, 2**18, 0.520, 1920, 1280),
    12: (768, 110.1, 2**19, 0.280, 2520, 1680),
    16: (1024, 234.9, 2**19, 0.131, 5376, 3584),
    20: (1280, 435.2, 2**20, 0.100, 4980, 3320),
    24: (1536, 729.8, 2**20, 0.060, 8352, 5568),
    26: (1664, 918.4, 2**20, 0.048, 10510, 7007),
    32: (2048, 1677.7, 2**21, 0.037, 9600, 6400),
}


@pytest.mark.parametrize("depth", WORKED)
def test_depth_makes_the_worked_values(depth):
    """The published depth recipe, with its vocabulary of 32,768."""
    width, millions, batch, decay, steps_at_12, steps_at_8 = WORKED[depth]
    cfg = gpt.make_config({"preset": "track_1", "depth": depth, "vocab_size": 32_768})
    assert (cfg.num_layers, cfg.model_dim, cfg.num_heads, cfg.tokens_per_step) == (
        depth,
        width,
        width // 128,
        batch,
    )
    assert 12 * depth * width**2 + 32_768 * width == pytest.approx(millions * 1e6, rel=0.005)
    assert cfg.num_iterations == pytest.approx(steps_at_12, abs=1)
    assert cfg.matrix_weight_decay == pytest.approx(decay, abs=6e-4)
    assert cfg.matrix_lr == pytest.approx(0.02 * (batch / 2**19) ** 0.5)
    fewer = gpt.make_config(
        {"depth": depth, "vocab_size": 32_768, "tokens_per_param": 8.0, "preset": "track_1"}
    )
    assert fewer.num_iterations == pytest.approx(steps_at_8, abs=1)
    assert [spec.value_embed is not None for spec in cfg.layers][::-1] == [i % 2 == 0 for i in range(depth)]


def test_depth_scales_the_step_of_rules_that_keep_norms():
    """0.02 * 12 / depth, times the root of the batch against 2^19; explicit options win."""
    cfg = gpt.make_config({"preset": "d24", "matrix_rule": "muonh"})
    assert cfg.matrix_lr == pytest.approx(0.02 * 2**0.5 / 2) and cfg.matrix_weight_decay == 0
    assert gpt.make_config({"preset": "d24", "matrix_lr": 0.5, "num_iterations": 7}).num_iterations == 7
    derived = gpt.derive(gpt.make_config({"preset": "d12"}), 8)
    heads, width, vocab = 6, 768, 50_304
    keys = 3 * 2048 + 9 * 512  # three long layers of twelve, and nine short ones
    assert derived["flops_per_token"] == 6 * (12 * 12 * width**2 + vocab * width) + 12 * width * keys
    assert derived["num_params"] == (8 * vocab * width + 12 * (12 * width**2 + heads * 12) + 12 * 2 + 12 + 6)


def test_depth_with_the_muonh_recipe():
    """Gains and schedules stay those of preset muonh, whichever of the two is named first."""
    recipe = gpt.PRESETS["muonh"][2]
    for overrides in ({"preset": "muonh", "depth": 24}, {"preset": "d24", "matrix_rule": "normuonh"}):
        cfg = gpt.make_config(overrides)
        scaled = ("matrix_lr", "embed_lr", "value_embed_lr", "head_lr")
        assert all(getattr(cfg, name) == value for name, value in recipe.items() if name not in scaled)
        assert (cfg.momentum_end, cfg.momentum_warmup_steps, cfg.lr_warmup_frac) == (0.95, 300, 0)
        assert cfg.matrix_lr == pytest.approx(0.02 * 2**0.5 / 2)
        assert cfg.head_lr == pytest.approx(0.004 * 2**0.5 * 2**-0.5)  # twice the batch, twice the width
    assert gpt.make_config({"preset": "muonh", "num_layers": 24}).matrix_lr == pytest.approx(0.01)


def test_depth_with_other_rules_and_batches():
    """Half the batch: twice the steps, rates by the root of it, so that lr wd tokens stays; Adam has its own rate."""
    cfg = gpt.make_config({"preset": "track_1", "depth": 24, "vocab_size": 32_768, "tokens_per_step": 2**19})
    assert (cfg.num_iterations, cfg.matrix_lr) == (16704, pytest.approx(0.02))
    assert cfg.matrix_weight_decay == pytest.approx(0.060 / 2**0.5, abs=6e-4) and cfg.mlp_up_lr_mul == 2
    adam = gpt.make_config({"preset": "d12", "matrix_rule": "adamw"})
    assert (adam.matrix_lr, adam.matrix_weight_decay) == (pytest.approx(gpt.RULES["adamw"].lr), 0)
    assert adam.adam_eps == pytest.approx(1e-10 * 49_152)


def test_a_rule_without_a_rate_takes_one_that_suits_it():
    """That of 12 slots, times 12 / depth in deeper models where norms are kept; a rate that is given stays."""
    rate = {name: gpt.make_config({"preset": "laptop", "matrix_rule": name}).matrix_lr for name in gpt.RULES}
    assert rate["muon"] == rate["normuon"] == 0.05 and rate["adamw"] == gpt.RULES["adamw"].lr
    assert rate["muonh"] == gpt.RULES["muonh"].lr == 4 * gpt.RULES["muonh"].suggest_lr(48)
    assert smoke_config(matrix_rule="adamw", matrix_lr=0.3).matrix_lr == 0.3
    assert gpt.make_config({"preset": "muonh"}).matrix_lr == 0.02
    track_2 = gpt.make_config({"preset": "track_2"})  # muon and normuon: the same units
    assert gpt.make_config({"preset": "track_2", "matrix_rule": "normuon"}).matrix_lr == track_2.matrix_lr
    with pytest.raises(gpt.InputError, match="muon_scale=measured_rms: give --matrix_lr too"):
        gpt.make_config({"preset": "2024-06-06_adamw_rotary", "matrix_rule": "muon"})


def test_decay_along_the_rate_is_along_each_groups_own():
    """Rates of Adam's groups at half, of matrices at a quarter: W (1 - lr f wd f), and no gradient."""
    changes = dict(decay_schedule="lr", matrix_weight_decay=0.5, adam_weight_decay=0.5, head_lr=0.1)
    cfg = smoke_config(matrix_lr=0.1, zero_init="off", **changes)
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(1.0)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    matrix = model.blocks[1].mlp.up_down
    before = matrix.clone()
    optimizer.step(0.5, 0.9, 2048, 0.25, 1.0)
    assert torch.allclose(model.head.weight, torch.tensor(1 - 0.1 * 0.5 * 0.5 * 0.5))
    assert torch.allclose(matrix, before * (1 - 0.1 * 0.25 * 0.5 * 0.25))


def test_decay_follows_its_schedule():
    for schedule, values in (("constant", [1, 1, 1]), ("lr", [1, 1, 0.1]), ("cosine", [1, 0.5, 0])):
        at = gpt.Schedule(smoke_config(decay_schedule=schedule)).at
        assert [at(step).decay_factor for step in (0, 6, 12)] == pytest.approx(values, abs=1e-12)
