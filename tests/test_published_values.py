"""Five presets against the numbers of their publications (published_values.py): rows, parameters, states."""

import fnmatch
import math

import numpy as np
import published_values as published
import pytest
import record92_reference as reference
import torch
from conftest import gpt, make_runtime
from reference_run import ORTHOGONALIZATIONS
from test_model_92 import SMALL

pytestmark = pytest.mark.recipe
PRESETS = list(published.PARAMETERS)


def make_config(preset, **changes):
    return gpt.make_config({"preset": preset, "device": "cpu", **changes})


def make_empty_model(cfg):
    with torch.device("meta"):
        return gpt.GPT(cfg)


def is_close(ours, theirs):
    return math.isclose(ours, theirs, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("preset", published.STAGES)
def test_every_step(preset):
    """Stages, learning rates and momentum, also at the final validation. test_model_92.py has record_92."""
    cfg, stages, run = make_config(preset), published.STAGES[preset], published.RUN[preset]
    schedule, formula = gpt.Schedule(cfg), published.SCHEDULES[preset]
    assert [end for _, _, end in schedule.stage_ranges()] == [row[0] for row in stages]
    for step in range(run.scheduled_steps + 1):
        is_final, state = step == run.scheduled_steps, schedule.at(step)
        _, tokens, long, short, peak = next((row for row in stages if step < row[0]), stages[-1])
        assert state.windows == (run.val_windows if is_final else (long, short)), step
        stage = state.stage
        found = stage.tokens_per_step, stage.seq_len, stage.max_doc_len
        assert found == (tokens, run.seq_len, run.max_doc_len), step
        assert (stage.num_classes, stage.prefix_weight, state.loss_weights) == (None, (), (1.0,)), step
        for name, group in published.GROUPS[preset].items():
            fall = formula.matrix_fall if name == "matrix" else formula.other_fall
            w = min((1 - step / run.scheduled_steps) / fall, 1.0)
            factor = peak if w == 1 else peak * w + formula.floor * (1 - w)
            assert is_close(state.lr[name], group.lr * factor), (step, name)
            assert state.weight_decay[name] == group.weight_decay == 0
        t, (low, high) = min(step / (formula.momentum_steps or 1), 1.0), formula.momentum
        assert is_close(state.momentum, low + t * (high - low)), step


@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_of_a_run(preset):
    cfg = make_config(preset)
    schedule = gpt.Schedule(cfg)
    found = (cfg.scheduled_steps, cfg.extension_steps, schedule.count_tokens(), cfg.seq_len, cfg.max_doc_len,
             schedule.at(cfg.num_iterations).windows, cfg.val_tokens, cfg.val_seq_len, cfg.max_attention_len)
    assert found == published.RUN[preset]
    assert cfg.softcap == published.SOFTCAP[preset]


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
def test_parameters(preset, monkeypatch):
    """Shape, dtype and group of every parameter, and its initial values with a small vocabulary."""
    expected, cfg = published.PARAMETERS[preset], make_config(preset)
    params = dict(make_empty_model(cfg).named_parameters())
    assert params.keys() == expected.keys()
    for name, param in params.items():
        assert (tuple(param.shape), str(param.dtype)[6:], param.spec.group) == expected[name][:3], name
    torch.manual_seed(0)
    rows, fill_uniform = (2048 if cfg.ngram_rows else 0), gpt.fill_uniform

    def fill_quickly(x, std):
        """16 columns of random numbers, repeated. A model of full width takes seconds."""
        columns = torch.zeros(*x.shape[:-1], 16)
        fill_uniform(columns, std)
        x.copy_(torch.cat([columns] * (x.size(-1) // 16), dim=-1))

    monkeypatch.setattr(gpt, "fill_uniform", fill_quickly)
    model = gpt.GPT(make_config(preset, vocab_size=1000, **({"ngram_rows": rows} if rows else {})))
    for name, param in model.named_parameters():
        values, start = param.detach().float(), expected[name].init
        if isinstance(start, list) and isinstance(start[0], tuple):  # one for each stacked matrix
            assert len(start) == len(values)
            for matrix, one in zip(values, start):
                check_start(name, matrix, one)
        else:
            check_start(name, values, start)
    assert model.is_tied == published.OPTIMIZER[preset][3]
    queries, keys = model.blocks[-1].attention.qk.flatten(0, 1).chunk(2)
    assert torch.equal(queries, keys) == (preset == "laptop")


@pytest.mark.parametrize("preset", PRESETS)
def test_groups_and_multipliers(preset):
    cfg, params = make_config(preset), dict(make_empty_model(make_config(preset)).named_parameters())
    assert {param.spec.group for param in params.values()} == published.GROUPS[preset].keys()
    for name, row in published.GROUPS[preset].items():
        group = cfg.groups[name]
        assert (group.rule, group.every, group.late_every) == (row.rule, row.every, row.late_every), name
        assert is_close(group.lr, row.lr) and is_close(group.weight_decay, row.weight_decay), name
        assert all(theirs in (None, ours) for ours, theirs in zip(group.betas, row.betas)), name
    for name, param in params.items():
        rows = published.MULTIPLIERS.get(preset, {}).items()
        lr, wd = next((row for pattern, row in rows if fnmatch.fnmatch(name, pattern)), (1.0, 1.0))
        shape_factor = 1.0
        if cfg.groups[param.spec.group].rule in ("anvil", "muon", "normuon"):  # the rule multiplies, too
            shape_factor = max(1, param.size(-2) / param.size(-1)) ** 0.5
        ours, theirs = np.broadcast_arrays(np.array(param.spec.lr_mul) * shape_factor, lr)
        assert ours == pytest.approx(theirs, rel=1e-12), name
        assert param.spec.wd_mul == pytest.approx(wd, rel=1e-12), name
    epsilon, polynomial, is_cautious, is_tied = published.OPTIMIZER[preset]
    assert cfg.adam_eps == pytest.approx(epsilon, rel=1e-12, abs=0)
    assert (cfg.orthogonalize, cfg.decay == "cautious", cfg.tie_head) == (polynomial, is_cautious, is_tied)


@pytest.mark.parametrize("name", gpt.POLYNOMIALS)
def test_polynomials(name):
    maps, *margin = {**ORTHOGONALIZATIONS, "six_maps": (reference.MAPS, 1.05, 1e-6)}[name]
    assert gpt.POLYNOMIALS[name] == (tuple(maps), *margin)


@pytest.mark.parametrize("preset", PRESETS)
def test_states(preset):
    """Names and dtypes of the optimizer's state, and lanes of the variance."""
    cfg = make_config(preset)
    lanes, found = published.LANES.get(preset, {}), {}
    for bucket in gpt.Optimizer(make_empty_model(cfg), cfg, make_runtime()).buckets:
        dtype = str(bucket.values.dtype)[6:]
        expected = published.STATES[preset][f"{bucket.group_name}, {dtype}"]
        states = {key: state for key, state in bucket.state.items() if not key.startswith("average")}
        assert {key: str(state.dtype)[6:] for key, state in states.items()} == expected, bucket.name
        for pattern in lanes:
            if list_fitting(bucket.params, [pattern]):
                found.setdefault(pattern, set()).add(tuple(states["second_momentum"].shape[1:]))
    assert found == lanes


@pytest.mark.parametrize("preset", published.ROPE)
def test_rope(preset):
    """Frequencies and softmax scales of the first stage and of the final validation."""
    cfg = make_config(preset)
    schedule, (rotating, first_scale, final_scale, final) = gpt.Schedule(cfg), published.ROPE[preset]
    first = {i: 1024 ** (-i / (rotating - 1)) for i in range(rotating)}
    for step, scale, frequencies in ((0, first_scale, first), (cfg.num_iterations, final_scale, final)):
        for kind in ("short", "long"):
            rope = schedule.at(step).rope[kind]
            assert (rope.frequencies > 0).sum() == rotating
            assert rope.softmax_scale == pytest.approx(scale, rel=1e-9)
            assert {i: rope.frequencies[i] for i in frequencies} == pytest.approx(frequencies, rel=1e-9)


@pytest.mark.parametrize("preset", published.FP8_HEAD)
def test_fp8(preset):
    scales, delayed = gpt.head_fp8_scales(make_config(preset)), gpt.DelayedScales
    assert scales[:3] == pytest.approx(published.FP8_HEAD[preset], rel=1e-12)
    assert (scales.logits_dtype == torch.float8_e4m3fn) == (preset == "record_92")
    assert gpt.QKV_LIMIT == published.FP8_QKV_LIMIT
    assert (delayed.FACTORS, delayed.FLOORS) == (published.FP8_MLP_FACTORS, published.FP8_MLP_FLOORS)
    starts = delayed(gpt.GPT(make_config("smoke")), make_runtime().comm).leaves  # of three MLPs
    starts = torch.cat([start.detach().flatten() for start in starts])
    assert starts.tolist() == [*published.FP8_MLP_STARTS] * 3


def list_names(buckets):
    return {name for bucket in buckets for name in bucket.params}


def list_fitting(names, patterns):
    return {name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}


def test_averages():
    """Parameters of every average, and its rate in every step, read from averages of the step numbers."""
    cfg = gpt.make_config(SMALL)
    optimizer = gpt.Optimizer(gpt.GPT(cfg).double(), cfg, make_runtime())
    buckets, names = optimizer.buckets, optimizer.bucket_of
    rows = {}  # buckets by (key, weight)
    for key, average, bucket in gpt.list_averages(buckets):
        rows.setdefault((key, average.weight), []).append(bucket)
    rates = [{} for _ in rows]

    def read():
        return [selected[0].state[key].max().item() for (key, _), selected in rows.items()]

    for step in range(cfg.num_iterations):
        for bucket in buckets:
            bucket.shard.fill_(step)
        before = read()
        optimizer.step_count, optimizer.updated = step + 1, buckets
        optimizer.update_averages()
        for found, old, new in zip(rates, before, read()):
            if new != old:
                found[step] = (new - old) / (step - old)
    ticks = reference.average_ticks(reference.RECORD_92)
    odd_rates = {step: 1 - (1 - rate) * (1 - rates[0].get(step + 1, 0)) for step, rate in rates[0].items() if step % 2}
    assert [*rates[0]] == [*range(896, 1194)]
    rates[0] = {896: rates[0][896], **odd_rates}  # an even step has the head of the step before
    for row, found, (name, patterns, weight) in zip(rows, rates, published.AVERAGES, strict=True):
        assert found == pytest.approx(ticks[name], rel=1e-6), name
        assert row[1] == weight and list_names(rows[row]) == list_fitting(names, patterns)
    for kind, patterns in zip(gpt.RESTORED_NORMS, published.NORMS_RESTORED, strict=True):
        members = list_names(bucket for bucket in buckets if bucket.kind == kind)
        assert members == list_fitting(names, patterns)
