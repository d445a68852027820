"""Five presets against the numbers of their publications (published_values.py): each row, each parameter, each state."""

import dataclasses
import fnmatch

import numpy as np
import published_values as published
import pytest
import torch
from conftest import gpt, make_runtime

pytestmark = pytest.mark.recipe
PRESETS = list(published.STAGES)


def make_config(preset, **changes):
    return gpt.make_config({"preset": preset, "device": "cpu", **changes})


@pytest.mark.parametrize("preset", PRESETS)
def test_stages(preset):
    """Every step of every row."""
    cfg, rows, run = make_config(preset), published.STAGES[preset], published.RUN[preset]
    schedule = gpt.Schedule(cfg)
    assert [(start, end - 1) for _, start, end in schedule.stage_ranges()] == [row["steps"] for row in rows]
    for row in rows:
        first, last = row["steps"]
        for step in range(first, last + 1):
            state = schedule.at(step)
            stage = state.stage
            found = stage.tokens_per_step, stage.seq_len, stage.max_doc_len, state.windows, stage.num_classes
            assert found == (row["tokens"], row["seq_len"], row["cap"], row["windows"], row["classes"]), step
            assert bool(stage.prefix_weight) == row.get("has_prefix", False)
        for step, weights in ((first, row["weights_first"]), (last, row["weights_last"])):
            assert schedule.at(step).loss_weights == pytest.approx(weights, rel=1e-12)
        if row["lr_factor"] is not None:
            assert stage.lr_factor == pytest.approx(row["lr_factor"], rel=1e-12)
    for step, weight in published.PREFIX_STEPS.items() if preset == "frontier" else ():
        state = schedule.at(step)
        assert (state.loss_weights[-1] if state.stage.prefix_weight else 0) == weight
    assert (schedule.scheduled_steps, cfg.extension_steps) == (run["scheduled_steps"], run["extension_steps"])
    assert schedule.count_tokens() == run["train_tokens"]
    assert schedule.at(cfg.num_iterations).windows == run["val_windows"]
    found = cfg.val_tokens, cfg.val_seq_len, cfg.max_attention_len or None
    assert found == (run["val_tokens"], run["val_seq_len"], run["attention_piece"])


@pytest.mark.parametrize("preset", PRESETS)
def test_schedules(preset):
    """Learning rates and momentum at known steps. Weight decays follow the rates only in frontier."""
    cfg = make_config(preset)
    schedule = gpt.Schedule(cfg)
    for step, factor in published.LR[preset].items():
        state = schedule.at(step)
        for name, group in cfg.groups.items():
            expected = factor["matrix" if name == "matrix" else "others"] if isinstance(factor, dict) else factor
            assert state.lr[name] == pytest.approx(group.lr * expected, rel=1e-12), (step, name)
            decay = group.weight_decay * (expected if preset == "frontier" else 1)
            assert state.weight_decay[name] == pytest.approx(decay, rel=1e-12), (step, name)
    for step, momentum in published.MOMENTUM[preset].items():
        assert schedule.at(step).momentum == pytest.approx(momentum, rel=1e-12)
    for step, rails in published.FRONTIER_RAILS.items() if preset == "frontier" else ():
        state = schedule.at(step)
        assert (state.momentum, state.fast_beta, state.fast_weight) == pytest.approx(rails, rel=1e-12)


def check_start(name, values, start):
    """values of a matrix or vector: a constant, a standard deviation to 5 %, or a multiset of constants."""
    if isinstance(start, list):
        assert sorted(values.tolist()) == pytest.approx(start, rel=1e-6), name
    elif start[0] == "constant":
        assert (values == start[1]).all(), name
    else:
        assert values.std().item() == pytest.approx(start[1], rel=0.05), name
        largest = values.abs().max().item()
        assert (largest <= 3**0.5 * start[1] * 1.01) == (start[0] == "uniform"), name


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters(preset):
    """Shape, dtype and group of every parameter, and its initial values with a small vocabulary."""
    expected, cfg = published.PARAMETERS[preset], make_config(preset)
    with torch.device("meta"):
        params = dict(gpt.GPT(cfg).named_parameters())
    assert params.keys() == expected.keys()
    for name, row in expected.items():
        param = params[name]
        found = tuple(param.shape), str(param.dtype)[6:], param.spec.group
        assert found == (row["shape"], row["dtype"], row["group"]), name
    torch.manual_seed(0)
    rows = 2048 if cfg.ngram_rows else 0
    model = gpt.GPT(make_config(preset, vocab_size=1000, **({"ngram_rows": rows} if rows else {})))
    for name, param in model.named_parameters():
        values, start = param.detach().float(), expected[name]["init"]
        if isinstance(start, list) and isinstance(start[0], tuple):  # one for each stacked matrix
            assert len(start) == len(values)
            for matrix, one in zip(values, start):
                check_start(name, matrix, one)
        else:
            check_start(name, values, start)
    assert model.is_tied == published.OPTIMIZER[preset]["tied"]


def find_row(rows, name):
    """The row of the pattern that fits a name, or {}."""
    fitting = [row for pattern, row in rows.items() if fnmatch.fnmatch(name, pattern)]
    assert len(fitting) < 2
    return fitting[0] if fitting else {}


@pytest.mark.parametrize("preset", PRESETS)
def test_groups_and_multipliers(preset):
    cfg, options = make_config(preset), published.OPTIMIZER[preset]
    with torch.device("meta"):
        params = dict(gpt.GPT(cfg).named_parameters())
    assert {param.spec.group for param in params.values()} == published.GROUPS[preset].keys()
    for name, row in published.GROUPS[preset].items():
        group = cfg.groups[name]
        assert (group.rule, group.every, group.late_every) == (row["rule"], row["every"], row["late_every"]), name
        assert (group.lr, group.weight_decay) == pytest.approx((row["lr"], row["weight_decay"]), rel=1e-12), name
        pairs = [(ours, theirs) for ours, theirs in zip(group.betas, row["betas"]) if theirs is not None]
        assert all(ours == theirs for ours, theirs in pairs), name
    for name, param in params.items():
        row = find_row(published.MULTIPLIERS[preset], name)
        shape_factor = 1.0
        if cfg.groups[param.spec.group].rule in ("anvil", "muon", "normuon"):  # the rule multiplies, too
            shape_factor = max(1, param.size(-2) / param.size(-1)) ** 0.5
        ours, theirs = np.broadcast_arrays(np.array(param.spec.lr_mul) * shape_factor, row.get("lr", 1.0))
        assert ours == pytest.approx(theirs, rel=1e-12), name
        assert param.spec.wd_mul == pytest.approx(row.get("wd", 1.0), rel=1e-12), name
    assert cfg.adam_eps == pytest.approx(options["adam_eps"], rel=1e-12)
    assert (cfg.decay == "cautious") == options["cautious"]
    found = *cfg.momentum, cfg.momentum_warmup_steps, cfg.momentum_cooldown_steps
    assert found == tuple(options[f"momentum_{name}"] for name in ("start", "end", "warmup_steps", "cooldown_steps"))
    maps = published.POLYNOMIALS[options["polynomial"]]
    assert cfg.orthogonalize == options["polynomial"]
    assert gpt.POLYNOMIALS[cfg.orthogonalize] == maps["maps"]
    assert gpt.MARGINS.get(cfg.orthogonalize, (1.0, 1e-7)) == (maps["margin"], maps["eps"])
    never = 2**63 - 1
    assert cfg.step_at(cfg.late_start) == options.get("late_start", never)
    assert cfg.step_at(cfg.slow_momentum_start) == options.get("slow_start", never)
    assert cfg.step_at(cfg.untie_frac) == options.get("last_tied_update", never + 1) - 1


@pytest.mark.parametrize("preset", PRESETS)
def test_states(preset):
    """Names and dtypes of the optimizer's state, and lanes of the variance."""
    cfg = make_config(preset, vocab_size=300, **({"ngram_rows": 2048} if make_config(preset).ngram_rows else {}))
    if preset == "track_2":  # every layer has equal matrices
        cfg = make_config(preset, vocab_size=300, num_layers=4, layers=cfg.layers[:4])
    optimizer = gpt.Optimizer(gpt.GPT(cfg), cfg, make_runtime())
    for bucket in optimizer.buckets:
        dtype = str(bucket.values.dtype)[6:]
        expected = published.STATES[preset][f"{bucket.group_name}, {dtype}"]
        found = {key: str(state.dtype)[6:] for key, state in bucket.state.items() if not key.startswith("average")}
        assert found == expected, bucket.name
        for pattern, lanes in published.LANES[preset].items():
            if fnmatch.fnmatch(bucket.name, pattern):
                assert bucket.state["second_momentum"].shape[1:] == lanes, bucket.name


@pytest.mark.parametrize("preset", PRESETS)
def test_rope(preset):
    """Frequencies and softmax scales of the first stage and of the final validation."""
    cfg = make_config(preset)
    schedule = gpt.Schedule(cfg)
    for step, name in ((0, "start"), (cfg.num_iterations, "final")):
        for kind, expected in published.ROPE[preset][name].items():
            rope = schedule.at(step).rope[kind]
            assert (rope.frequencies > 0).sum() == expected["rotating"]
            assert rope.softmax_scale == pytest.approx(expected["scale"], rel=1e-9)
            for index, frequency in expected["freqs"].items():
                assert rope.frequencies[index] == pytest.approx(frequency, rel=1e-9)


@pytest.mark.parametrize("preset", PRESETS)
def test_softcap_and_fp8(preset):
    cfg = make_config(preset)
    assert cfg.softcap == published.SOFTCAP[preset]
    if preset in published.FP8_HEAD:
        assert gpt.head_fp8_scales(cfg)[:3] == pytest.approx(published.FP8_HEAD[preset], rel=1e-12)
    assert (gpt.head_fp8_scales(cfg).logits_dtype == torch.float8_e4m3fn) == (preset == "frontier")
    mlp, scales = gpt.DelayedScaling(), gpt.DelayedScales
    assert gpt.QKV_LIMIT == published.FP8_QKV_LIMIT
    assert (scales.FACTORS, scales.FLOORS) == (published.FP8_MLP_FACTORS, published.FP8_MLP_FLOORS)
    assert (mlp.hidden_scale.item(), mlp.pre_grad_scale.item()) == published.FP8_MLP_STARTS


def test_averages():
    """The rate of every average in every step, read from averages of the step numbers, and weights and norms."""
    sizes = dict(model_dim=48, num_heads=6, head_dim=8, short_qk_dim=4, vocab_size=50, ngram_rows=202, mudd_groups=4)
    layers = tuple(dataclasses.replace(spec, v_dim=spec.v_dim and 4) for spec in gpt.FRONTIER_LAYERS)
    cfg = make_config("frontier", layers=layers, embed_dtype="float32", matrix_dtype="float32", **sizes)
    optimizer = gpt.Optimizer(gpt.GPT(cfg).double(), cfg, make_runtime())
    rows, rates = optimizer.averages.rows, [{} for _ in published.AVERAGES]
    assert len(rows) == len(rates)
    for step in range(published.RUN["frontier"]["total_steps"]):
        for bucket in optimizer.buckets:
            bucket.shard.fill_(step)
        before = [read_average(row) for row in rows]
        optimizer.averages.update(step, optimizer.buckets)
        for row, old, found in zip(rows, before, rates):
            new = read_average(row)
            if new != old:
                found[step] = (new - old) / (step - old)
    for (_, _, selected), found, expected in zip(rows, rates, published.AVERAGES):
        assert found == pytest.approx(expected["rates"], rel=1e-6), expected["name"]
        check_members(selected, expected["parameters"], expected["weight"])
    for selected, parameters in zip(optimizer.averages.norms, published.NORMS_RESTORED, strict=True):
        check_members(selected, parameters, 1.0)


def read_average(row):
    """An average of equal numbers."""
    key, _, selected = row
    return next(iter(selected)).state[key].max().item()


def check_members(selected, patterns, weight):
    """The parameters of an average, and their common weight. Others have weight 0."""
    for bucket, multipliers in selected.items():
        for name, part in bucket.slices.items():
            is_member = any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            own = multipliers[part] if len(multipliers) > 1 else multipliers
            assert own.unique().tolist() == pytest.approx([weight * is_member], rel=1e-6), name
