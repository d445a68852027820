"""Update rules as options: refusals, the defaults that a rule brings, presets, depth."""

import pytest
import torch
from conftest import gpt, smoke_config

ADAMW = dict(matrix_rule="adamw", matrix_lr=0.0018, matrix_betas=(0.9, 0.95), matrix_weight_decay=0.1,
             mlp_up_lr_mul=1.0, mlp_down_lr_mul=1.0)  # of record 2


def options_of(preset: str, **overrides) -> dict:
    """All options by name."""
    return gpt.flatten_groups(vars(gpt.make_config({"preset": preset, **overrides})))


@pytest.mark.parametrize("changes, complaint", [
    (dict(matrix_rule="muonh", matrix_weight_decay=0.1), "matrix_weight_decay=0.1 has no effect"),
    (dict(matrix_rule="normuonh", zero_init="off"), "zero_init=off has no effect.*output_gain=off"),
    (dict(tokens_per_param=8.0), "no effect without --depth"),
    (dict(matrix_rule="muons"), "matrix_rule=muons is not one of muon, normuon, muonh"),
    (dict(matrix_rule="row_adam"), "matrix_rule=row_adam is not one of muon, .*, adamw: "),
    (dict(ngram_rows=512, ngram_rule="muon"), "ngram_rule=muon is not one of adamw, row_adam: "),
    (dict(head_every=2, head_late_every=3), "head_late_every=3 is not a multiple of head_every=2"),
    (dict(depth=-4), "depth=-4 is too small"),
    (dict(num_layers=0, matrix_rule="muonh"), "num_layers=0 is too small")])
def test_options_that_do_nothing_or_cannot_be_are_refused(changes, complaint):
    """An unknown rule, depth=-4 and num_layers=0 are refused before other options are computed from them."""
    with pytest.raises(gpt.InputError, match=complaint):
        smoke_config(**changes)


def test_anvil_brings_its_slow_momentum_and_its_maps():
    """Without them it would compute what normuon computes. Explicit options take precedence."""
    names = ("orthogonalize", "slow_momentum_start")
    found = [tuple(options_of("smoke", matrix_rule="anvil", **changes)[name] for name in names)
             for changes in ({}, dict(orthogonalize="newton_schulz", slow_momentum_start=0.5))]
    assert found == [("six_maps", 514 / 1174), ("newton_schulz", 0.5)]
    assert options_of("smoke_frontier", matrix_rule="anvil")["slow_momentum_start"] == 0.5  # the preset's


def test_gates_and_gains_have_adamw():
    cfg = smoke_config(matrix_rule="normuonh", norm_gain="on")
    rules = {name: cfg.groups[param.spec.group].rule for name, param in gpt.GPT(cfg).named_parameters()}
    matrices = {name for name in rules if name.endswith((".qk", ".v_proj", ".up_down"))}
    assert {name for name, rule in rules.items() if rule == "normuonh"} == matrices
    assert {rules[name] for name in set(rules) - matrices} == {"adamw"}
    assert sum("_gain_" in name for name in rules) == 2 * (3 + 3)  # 3 attentions and 3 MLPs have both


def test_the_muonh_preset():
    """The submission of 2026-02: gains 1 in, 0 out, non-zero projections of standard deviation 1/sqrt(D)."""
    values = options_of("muonh")
    expected = dict(matrix_rule="normuonh", orthogonalize="polar_express", matrix_lr=0.02, gain_lr=0.1,
                    matrix_cooldown_frac=1.0, cooldown_frac=0.3, final_lr_frac=0.0)
    assert {name: values[name] for name in expected} == expected
    small = dict(preset="muonh", vocab_size=257, num_layers=2, num_heads=2, model_dim=256)
    torch.manual_seed(0)
    block = gpt.GPT(gpt.make_config(small)).blocks[1]
    assert block.mlp.up_down.std(dim=(1, 2)).tolist() == pytest.approx([1 / 16] * 2, rel=0.01)
    for matrices in (block.attention.qk, block.attention.v_proj):
        assert matrices.std(dim=(1, 2)).tolist() == pytest.approx([1 / 16] * 2, rel=0.02)
    for gain_in, gain_out in ((block.mlp_gain_in, block.mlp_gain_out), (block.attn_gain_in, block.attn_gain_out)):
        assert not gain_out.any() and (gain_in == 1).all()


PUBLISHED = {  # depth: width, parameters in millions, tokens a step, decay, steps at 12 and at 8 tokens per parameter
    4: (256, 11.5, 2**18, 0.520, 528, 352),  # 1.890 before the clamp
    8: (512, 41.9, 2**18, 0.520, 1920, 1280),
    12: (768, 110.1, 2**19, 0.280, 2520, 1680),
    16: (1024, 234.9, 2**19, 0.131, 5376, 3584),
    20: (1280, 435.2, 2**20, 0.100, 4980, 3320),
    24: (1536, 729.8, 2**20, 0.060, 8352, 5568),
    26: (1664, 918.4, 2**20, 0.048, 10510, 7007),
    32: (2048, 1677.7, 2**21, 0.037, 9600, 6400),
}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_depth_has_the_published_values(depth):
    """The published depth recipe, with its vocabulary of 32,768."""
    width, millions, batch, decay, steps_at_12, steps_at_8 = PUBLISHED[depth]
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
    """0.02 * 12 / depth, times the root of batch / 2^19. Explicit options win."""
    matrix = gpt.make_config({"preset": "d24", "matrix_rule": "muonh"}).groups["matrix"]
    assert (matrix.lr, matrix.weight_decay) == (pytest.approx(0.02 * 2**0.5 / 2), 0)
    cfg = gpt.make_config({"preset": "d24", "matrix_lr": 0.5, "num_iterations": 7})
    assert (cfg.groups["matrix"].lr, cfg.num_iterations) == (0.5, 7)
    derived = gpt.derived_numbers(gpt.make_config({"preset": "d12"}), 8)
    heads, width, vocab = 6, 768, 50_304
    keys = 3 * 2048 + 9 * 512  # three long layers of twelve, and nine short ones
    assert derived["flops_per_token"] == 6 * (12 * 12 * width**2 + vocab * width) + 12 * width * keys
    assert derived["num_params"] == (8 * vocab * width + 12 * (12 * width**2 + heads * 12) + 12 * 2 + 12 + 6)


def test_depth_with_the_muonh_recipe():
    """Gains and schedules are preset muonh's, with --preset=muonh --depth and with --preset=d24 --matrix_rule."""
    recipe = gpt.flatten_groups(gpt.PRESETS["muonh"][2])
    for overrides in ({"preset": "muonh", "depth": 24}, {"preset": "d24", "matrix_rule": "normuonh"}):
        cfg = gpt.make_config(overrides)
        values, scaled = gpt.flatten_groups(vars(cfg)), ("matrix_lr", "embed_lr", "value_embed_lr", "ngram_lr", "head_lr")
        assert all(values[name] == value for name, value in recipe.items() if name not in scaled)
        assert (cfg.momentum_end, cfg.momentum_warmup_steps, cfg.lr_warmup_frac) == (0.95, 300, 0)
        assert values["matrix_lr"] == pytest.approx(0.02 * 2**0.5 / 2)
        assert values["head_lr"] == pytest.approx(0.004 * 2**0.5 * 2**-0.5)  # twice the batch, twice the width
    deep = gpt.make_config({"preset": "muonh", "num_layers": 24})
    assert deep.groups["matrix"].lr == pytest.approx(0.01)


def test_depth_with_other_rules_and_batches():
    """Half the batch: twice the steps, rates by its root, so that lr wd tokens stays. Adam has another rate."""
    cfg = gpt.make_config({"preset": "track_1", "depth": 24, "vocab_size": 32_768, "tokens_per_step": 2**19})
    assert (cfg.num_iterations, cfg.groups["matrix"].lr) == (16704, pytest.approx(0.02))
    assert cfg.groups["matrix"].weight_decay == pytest.approx(0.060 / 2**0.5, abs=6e-4)
    adam = gpt.make_config({"preset": "d12", "matrix_rule": "adamw"})
    assert (cfg.mlp_up_lr_mul, adam.mlp_up_lr_mul) == (2, 1)
    matrix = adam.groups["matrix"]
    assert (matrix.lr, matrix.weight_decay) == (pytest.approx(gpt.RULES["adamw"].lr), 0)
    assert adam.adam_eps == pytest.approx(1e-10 * 49_152)


def test_a_rule_has_a_default_learning_rate():
    """The rule's rate, times 12 / depth in deeper models if norms are kept. An explicit rate stays."""
    def rate(preset, **options):
        return gpt.make_config({"preset": preset, **options}).groups["matrix"].lr

    rules = gpt.OPTIONS["matrix_rule"].choices
    rates = {name: rate("laptop_32", matrix_rule=name) for name in rules}
    assert rates == {name: gpt.RULES[name].lr for name in rules}
    assert rates["muon"] == rates["normuon"] == 0.05
    assert rate("laptop_32", matrix_rule="muonh", num_layers=48) == rates["muonh"] / 4
    assert rate("laptop_32", matrix_rule="muon", num_layers=48) == rates["muon"]
    assert rate("smoke", matrix_rule="adamw", matrix_lr=0.3) == 0.3
    assert rate("muonh") == 0.02
    assert rate("track_2", matrix_rule="normuon") == rate("track_2") == 0.0125  # muon and normuon: equal units


@pytest.mark.parametrize("preset", ["track_1", "frontier", "smoke_frontier", "laptop"])
@pytest.mark.parametrize("given", [dict(matrix_rule="adamw"), dict(without="muon")], ids=str)
def test_another_rule_brings_its_options(preset, given):
    """Learning rate, betas, decay and the multipliers of the MLP. Every other option is the preset's."""
    plain, values = options_of(preset), options_of(preset, **given)
    assert values == {**plain, **given, **ADAMW}
    assert {name for name in ADAMW if plain[name] != ADAMW[name]} >= {"matrix_rule", "matrix_lr", "matrix_weight_decay"}
    for name, value in dict(matrix_lr=0.5, matrix_betas=(0.5, 0.6), matrix_weight_decay=0.25, mlp_up_lr_mul=3.0,
                            mlp_down_lr_mul=5.0).items():  # explicit options win
        assert options_of(preset, **given, **{name: value}) == {**values, name: value}
    for name in ADAMW:  # also if they are the preset's
        if name != "matrix_rule":
            assert options_of(preset, **given, **{name: plain[name]}) == {**values, name: plain[name]}


def test_frontier_with_a_rule_that_keeps_norms_has_its_options():
    """11 layers are fewer than 12, so the rate is the rule's."""
    values = options_of("frontier", matrix_rule="muonh")
    expected = dict(matrix_lr=0.02, matrix_betas=(0.9, 0.95), matrix_weight_decay=0, mlp_up_lr_mul=1, mlp_down_lr_mul=1)
    assert {name: values[name] for name in expected} == expected


def test_only_with_switches_muon_off_with_all_its_options():
    values = options_of("frontier", only_with="cooldown,smear")
    assert {name: values[name] for name in ADAMW} == {**ADAMW, "matrix_weight_decay": 0.0}  # decay is off, too
    values = options_of("frontier", only_with="cooldown,decay")
    assert {name: values[name] for name in ADAMW} == ADAMW


@pytest.mark.parametrize("preset, lr", [("track_1", 0.05), ("frontier", 0.023), ("laptop", 0.07)])
def test_a_rule_that_is_given_wins_over_without_muon(preset, lr):
    """--without=muon --matrix_rule=muon trains muon, with the preset's options."""
    given = dict(without="muon", matrix_rule="muon")
    values = options_of(preset, **given)
    assert values == {**options_of(preset), **given} and values["matrix_lr"] == lr
    argv = [f"--preset={preset}", "--without=muon", "--matrix_rule=muon"]
    assert gpt.flatten_groups(vars(gpt.make_config(gpt.parse_argv(argv)[0]))) == values
    assert options_of(preset, **given, matrix_lr=0.5) == {**values, "matrix_lr": 0.5}


@pytest.mark.parametrize("preset", ["track_1", "frontier", "laptop", "track_2"])
def test_muon_and_normuon_keep_the_options_of_a_preset(preset):
    """Their learning rates have equal units."""
    for rule in ("muon", "normuon"):
        assert options_of(preset, matrix_rule=rule) == {**options_of(preset), "matrix_rule": rule}
