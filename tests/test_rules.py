"""The table of rules as options: what is refused, what presets and depth make of it, and that every rule trains."""

import pytest
import torch
from conftest import SCRIPT, VAL_LINE, data_args, gpt, make_runtime, run_script, smoke_config
from test_update_rules import RULES_AND_METHODS, SPHERES

LRS = dict(muon=0.05, normuon=0.05, muonh=0.02, normuonh=0.02, adamh=0.005, adamw=0.002)


def test_the_table():
    assert list(gpt.RULES) == list(LRS) == list(gpt.list_choices(gpt.OPTIONS["matrix_rule"]))
    assert SPHERES == ["muonh", "normuonh", "adamh"]
    assert [name for name, rule in gpt.RULES.items() if not rule.per_matrix] == ["adamw"]


@pytest.mark.parametrize("changes, complaint", [
    (dict(matrix_rule="muonh", matrix_weight_decay=0.1), "matrix_weight_decay=0.1 has no effect"),
    (dict(matrix_rule="normuonh", zero_init="off"), "zero_init=off has no effect.*output_gain=off"),
    (dict(tokens_per_param=8.0), "no effect without --depth"),
    (dict(matrix_rule="muons"), "matrix_rule=muons is not one of muon, normuon, muonh"),
    (dict(depth=-4), "depth=-4 is too small"),
    (dict(num_layers=0, matrix_rule="muonh"), "num_layers=0 is too small")])
def test_options_that_do_nothing_or_cannot_be_are_refused(changes, complaint):
    """The last three before anything is worked out from them."""
    with pytest.raises(gpt.InputError, match=complaint):
        smoke_config(**changes)


def test_gates_and_gains_are_on_no_sphere():
    cfg = smoke_config(matrix_rule="normuonh", norm_gain="on")
    rules = {name: cfg.groups[param.spec.group].rule for name, param in gpt.GPT(cfg).named_parameters()}
    matrices = {name for name in rules if name.endswith((".qk", ".vo", ".up_down"))}
    assert {name for name, rule in rules.items() if rule == "normuonh"} == matrices
    assert {rules[name] for name in set(rules) - matrices} == {"adamw"}
    assert sum(".gain_" in name for name in rules) == 2 * (3 + 3)  # 3 attentions, 3 MLPs: each has both


def make_block(**gains):
    """A layer without attention, and a function that says what it makes of 16 tokens."""
    cfg = smoke_config(num_layers=1, layers=(gpt.LayerSpec(attention="none"),), **gains)
    torch.manual_seed(0)
    block, x = gpt.Block(cfg, 0, gpt.list_weights(cfg)), torch.randn(16, 64)
    weights = gpt.Weights(x=torch.ones(16, 1), x0=torch.zeros(16, 1))
    return block, lambda: block(x, gpt.Saved(x0=x), weights, None, None, None) - x


@pytest.mark.recipe
def test_a_zero_gain_before_relu_squared_sleeps_for_ever_and_one_after_it_wakes():
    """The branch is quadratic in the first, whose gradient at 0 is exactly 0, and linear in the second."""
    block, run = make_block(norm_gain="on", output_gain="on")
    for sleeper, other in (("mlp.gain_in", "mlp.gain_out"), ("mlp.gain_out", "mlp.gain_in")):
        named = dict(block.named_parameters())
        named[sleeper].data.zero_()
        named[other].data.fill_(1.0)
        grad, _ = torch.autograd.grad(run().sum(), (named[sleeper], named[other]))
        assert (grad == 0).all() == (sleeper == "mlp.gain_in")


@pytest.mark.recipe
@pytest.mark.parametrize("gain", ["norm_gain", "output_gain"])
def test_gains_do_what_they_say(gain):
    """Norm gains of 2 are inputs of attention and MLP times 2; output gains of 2 what they add, times 2."""
    block, run = make_block(output_gain="on", norm_gain="on")
    block.mlp.gain_out.data.fill_(1.0)
    plain = run()
    (block.mlp.gain_in if gain == "norm_gain" else block.mlp.gain_out).data.fill_(2.0)
    factor = 4 if gain == "norm_gain" else 2  # ReLU^2 squares it
    assert plain.abs().max() > 0.1 and torch.allclose(run(), factor * plain, atol=1e-4)


def test_matrices_have_a_schedule_of_their_own():
    cfg = smoke_config(num_iterations=100, lr_warmup_frac=0.1, cooldown_frac=0.3, matrix_cooldown_frac=1.0,
                       final_lr_frac=0.0)
    at = gpt.Schedule(cfg).at
    assert [at(step).lr_factor for step in (0, 4, 50, 70, 85)] == pytest.approx([0.1, 0.5, 1, 1, 0.5])
    matrix = [at(step).matrix_lr_factor for step in (0, 4, 9, 50, 85)]
    assert matrix == pytest.approx([0.1, 0.5, 0.91, 0.5, 0.15])
    same = gpt.Schedule(smoke_config()).at(9)
    assert same.lr_factor == same.matrix_lr_factor < 1


def test_decay_follows_its_schedule():
    for schedule, values in (("constant", [1, 1, 1]), ("cosine", [1, 0.5, 0])):
        at = gpt.Schedule(smoke_config(decay_schedule=schedule)).at
        assert [at(step).decay_factor for step in (0, 6, 12)] == pytest.approx(values, abs=1e-12)
    assert gpt.Schedule(smoke_config(decay_schedule="lr")).at(0).decay_factor is None  # the group's own


def train_briefly(shards, name, lr, method="newton_schulz"):
    """Loss of the fortieth step of a model of two layers."""
    changes = dict(num_iterations=40, num_layers=2, tokens_per_step=512, cooldown_frac=0.0)
    cfg = smoke_config(shards, matrix_rule=name, matrix_lr=lr, orthogonalize=method, **changes)
    trainer = gpt.Trainer(cfg, make_runtime())
    data = gpt.TrainData(cfg, trainer.schedule)
    batches = gpt.Prefetcher(data.batches(cfg, trainer.rt, 0, 40), trainer.rt.device)
    for step in range(40):
        loss = trainer.train_step(batches, trainer.schedule.at(step)).item()
        trainer.progress.step += 1
    batches.executor.shutdown(cancel_futures=True)
    return loss


@pytest.mark.recipe
@pytest.mark.parametrize("name, method", RULES_AND_METHODS)
def test_every_rule_trains(name, method, shards, frozen_losses):
    """Embeddings and head learn which bytes there are; only the matrices can learn what comes next."""
    assert train_briefly(shards, name, LRS[name], method) < frozen_losses[name in SPHERES] - 0.01


LION = '''
def lion_direction(grad, state, hyper):
    """The sign of an average that leans to the newest gradient. Source: Lion, arXiv 2302.06675."""
    momentum, (beta1, beta2) = state["momentum"], hyper.betas
    direction = (momentum * beta1 + grad * (1 - beta1)).sign()
    momentum.lerp_(grad, 1 - beta2)
    return direction


'''


def test_a_new_rule_is_a_function_and_a_line(shards, tmp_path):
    """As README says: known on the command line, with its state in checkpoints, and it learns."""
    place, line = "@dataclass(frozen=True)\nclass Rule:", '    "adamw": Rule('
    source = SCRIPT.read_text()
    assert source.count(place) == source.count(line) == 1
    source = source.replace(place, f"{LION.lstrip()}{place}")
    source = source.replace(line, f'    "lion": Rule(lion_direction, ("momentum",), False, apply_update, 0.0003),\n{line}')
    script = tmp_path / "train_gpt.py"
    script.write_text(source)
    args = ["--preset=smoke", "--matrix_rule=lion", "--matrix_betas=0.9,0.99", "--checkpoint_every=24", *data_args(shards)]
    done = run_script([*args, "--num_iterations=24"], tmp_path, script)
    assert done.returncode == 0, done.stderr
    losses = [float(match[2]) for match in VAL_LINE.findall(done.stdout)]
    assert losses[0] == pytest.approx(5.9506, abs=1e-3) and losses[-1] < 2.6  # ln 26: without what went before, 3.26
    facts, tensors = gpt.read_checkpoint(tmp_path / "checkpoints/smoke_seed0/step_000024.pt")
    assert facts["config"]["matrix_lr"] == 0.0003  # what the line suggests
    assert tensors["blocks.1.attention.qk/momentum"].abs().max() > 0


@pytest.fixture(scope="module")
def frozen_losses(shards):
    """The loss with matrices that stay as they are, zero (False) and not (True)."""
    return {False: train_briefly(shards, "muon", 0.0), True: train_briefly(shards, "muonh", 0.0)}


def test_the_muonh_preset():
    """The submission of 2026-02: gains 1 in, 0 out, non-zero projections of standard deviation 1/sqrt(D)."""
    values = vars(gpt.make_config({"preset": "muonh"}))
    expected = dict(matrix_rule="normuonh", orthogonalize="polar_express", matrix_lr=0.02, gain_lr=0.1,
                    matrix_cooldown_frac=1.0, cooldown_frac=0.3, final_lr_frac=0.0)
    assert {name: values[name] for name in expected} == expected
    small = dict(preset="muonh", vocab_size=257, num_layers=2, num_heads=2, model_dim=256)
    torch.manual_seed(0)
    block = gpt.GPT(gpt.make_config(small)).blocks[1]
    assert block.mlp.up_down.std(dim=(1, 2)).tolist() == pytest.approx([1 / 16] * 2, rel=0.01)
    for matrices in (block.attention.qk, block.attention.vo):
        assert matrices.std(dim=(1, 2)).tolist() == pytest.approx([1 / 16] * 2, rel=0.02)
    assert not block.mlp.gain_out.any() and (block.mlp.gain_in == 1).all()


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
    options = dict(preset="track_1", depth=depth, vocab_size=32_768)
    cfg = gpt.make_config(options)
    matrix = cfg.groups["matrix"]
    assert (cfg.num_layers, cfg.model_dim, cfg.num_heads) == (depth, width, width // 128)
    assert cfg.tokens_per_step == batch
    assert 12 * depth * width**2 + 32_768 * width == pytest.approx(millions * 1e6, rel=0.005)
    assert cfg.num_iterations == pytest.approx(steps_at_12, abs=1)
    assert matrix.weight_decay == pytest.approx(decay, abs=6e-4)
    assert matrix.lr == pytest.approx(0.02 * (batch / 2**19) ** 0.5)
    fewer = gpt.make_config({**options, "tokens_per_param": 8.0})
    assert fewer.num_iterations == pytest.approx(steps_at_8, abs=1)
    assert [spec.value_embed is not None for spec in cfg.layers][::-1] == [i % 2 == 0 for i in range(depth)]


def test_depth_scales_the_step_of_rules_that_keep_norms():
    """0.02 * 12 / depth, times the root of the batch against 2^19; explicit options win."""
    matrix = gpt.make_config({"preset": "d24", "matrix_rule": "muonh"}).groups["matrix"]
    assert (matrix.lr, matrix.weight_decay) == (pytest.approx(0.02 * 2**0.5 / 2), 0)
    cfg = gpt.make_config({"preset": "d24", "matrix_lr": 0.5, "num_iterations": 7})
    assert (cfg.groups["matrix"].lr, cfg.num_iterations) == (0.5, 7)
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
        values, scaled = vars(cfg), ("matrix_lr", "embed_lr", "value_embed_lr", "head_lr")
        assert all(values[name] == value for name, value in recipe.items() if name not in scaled)
        assert (cfg.momentum_end, cfg.momentum_warmup_steps, cfg.lr_warmup_frac) == (0.95, 300, 0)
        assert values["matrix_lr"] == pytest.approx(0.02 * 2**0.5 / 2)
        assert values["head_lr"] == pytest.approx(0.004 * 2**0.5 * 2**-0.5)  # twice the batch, twice the width
    deep = gpt.make_config({"preset": "muonh", "num_layers": 24})
    assert deep.groups["matrix"].lr == pytest.approx(0.01)


def test_depth_with_other_rules_and_batches():
    """Half the batch: twice the steps, rates by the root of it, so that lr wd tokens stays; Adam has its own rate."""
    cfg = gpt.make_config({"preset": "track_1", "depth": 24, "vocab_size": 32_768, "tokens_per_step": 2**19})
    assert (cfg.num_iterations, cfg.groups["matrix"].lr) == (16704, pytest.approx(0.02))
    assert cfg.groups["matrix"].weight_decay == pytest.approx(0.060 / 2**0.5, abs=6e-4)
    adam = gpt.make_config({"preset": "d12", "matrix_rule": "adamw"})
    assert (cfg.mlp_up_lr_mul, adam.mlp_up_lr_mul) == (2, 1)
    matrix = adam.groups["matrix"]
    assert (matrix.lr, matrix.weight_decay) == (pytest.approx(gpt.RULES["adamw"].lr), 0)
    assert adam.adam_eps == pytest.approx(1e-10 * 49_152)


def test_a_rule_without_a_rate_takes_one_that_suits_it():
    """That of 12 layers, times 12 / depth in deeper models where norms are kept; a rate that is given stays."""
    def rate(preset, **options):
        return gpt.make_config({"preset": preset, **options}).groups["matrix"].lr

    rates = {name: rate("laptop_32", matrix_rule=name) for name in gpt.RULES}
    assert rates == {name: rule.lr for name, rule in gpt.RULES.items()}
    assert rates["muon"] == rates["normuon"] == 0.05
    assert rate("laptop_32", matrix_rule="muonh", num_layers=48) == rates["muonh"] / 4
    assert rate("laptop_32", matrix_rule="muon", num_layers=48) == rates["muon"]
    assert rate("smoke", matrix_rule="adamw", matrix_lr=0.3) == 0.3
    assert rate("muonh") == 0.02
    assert rate("track_2", matrix_rule="normuon") == rate("track_2") == 0.0125  # muon and normuon: same units
