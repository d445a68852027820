"""Schedules against record 32, and all steps of five presets against formulas that are written out here."""

import math

import numpy as np
import pytest
import torch
from conftest import gpt, make_runtime, smoke_config
from test_update_rules import Ends


@pytest.fixture(scope="module")
def schedule():
    return gpt.Schedule(gpt.make_config({"preset": "track_1"}))


def factor(schedule, step, group="embed"):
    """The learning rate of a group at a step, divided by its option."""
    return schedule.at(step).lr[group] / schedule.cfg.groups[group].lr


def test_the_last_validation_has_windows_of_its_own_or_those_of_the_last_stage(schedule):
    assert (schedule.at(1669).windows, schedule.at(1670).windows) == ((1408, 640), (1664, 768))
    same = gpt.Schedule(gpt.make_config({"preset": "track_1", "val_windows": ()}))
    last, final = same.at(1669), same.at(1670)
    assert final.windows == last.windows == (1408, 640)
    for kind in ("long", "short"):
        assert final.rope[kind].softmax_scale == last.rope[kind].softmax_scale
        assert np.array_equal(final.rope[kind].frequencies, last.rope[kind].frequencies)


def test_softmax_scale_grows_as_published(schedule):
    for kind in ("long", "short"):
        assert [round(ropes[kind].softmax_scale, 4) for ropes in schedule.ropes] == [0.1, 0.1169, 0.1275, 0.1318]


def test_yarn_by_hand(schedule):
    first, second = (schedule.ropes[stage]["long"].frequencies for stage in (0, 1))
    assert np.allclose(first[:32], (1 / 1024) ** np.linspace(0, 1, 32)) and not first[32:].any()
    for j in range(64):
        rotations = 3 * 128 * first[j] / (2 * math.pi)
        g = min(max((rotations - 1) / 31, 0), 1)
        assert second[j] == pytest.approx(first[j] * (3 / 7 + g * (1 - 3 / 7)), rel=1e-12)
    assert second[0] == first[0] and second[31] == pytest.approx(
        first[31] * 3 / 7
    )  # fast ones stay, slow ones stretch


def test_yarn_of_narrow_heads_by_hand():
    """All 8 pairs rotate. The windows of short layers are 48, 96 and 480, and then 160, by the limit of YaRN."""
    stages = (gpt.Stage(1, 512, 48), gpt.Stage(1, 512, 96), gpt.Stage(1, 512, 480))
    cfg = smoke_config(stages=stages, num_layers=6, short_qk_dim=16, attention_scale=(0.1, 0.2), yarn_max_window=160)
    ropes, window = gpt.Schedule(cfg).ropes, 48
    frequencies, scale = [1024 ** (-j / 7) for j in range(8)], 0.2
    for setting, new in zip(ropes, (48, 96, 160)):
        stretch = window / new
        for j in range(8):
            g = min(max((window * frequencies[j] / (2 * math.pi) - 1) / 31, 0), 1)
            frequencies[j] *= stretch + g * (1 - stretch)
        scale, window = scale * (1 - 0.2 * math.log(stretch)), new
        assert setting["short"].frequencies == pytest.approx(frequencies, rel=1e-12)
        assert setting["short"].softmax_scale == pytest.approx(scale, rel=1e-12)
        assert setting["long"].softmax_scale == 0.1 and setting["long"].frequencies.shape == (16,)


def test_the_first_steps_of_a_fall_of_its_own():
    """12 steps: rates of matrices fall over 9 steps from step 3 on, others over 6 steps from step 6 on, to 0.1."""
    cfg = gpt.make_config({"preset": "smoke", "cooldown_frac": 0.5, "matrix_cooldown_frac": 0.75})
    schedule, steps = gpt.Schedule(cfg), (3, 4, 6, 7)
    for group in cfg.groups:
        expected = [1, *(1 - 0.9 * i / 9 for i in (1, 3, 4))] if group == "matrix" else [1, 1, 1, 1 - 0.9 / 6]
        assert [factor(schedule, step, group) for step in steps] == pytest.approx(expected)


def test_rise_and_fall():
    """12 steps: full rate at the third (0.25 * 12 = 3), then a fall over the last 3 to 0."""
    cfg = gpt.make_config(
        {"preset": "smoke", "lr_warmup_frac": 0.25, "cooldown_frac": 0.25, "final_lr_frac": 0.0}
    )
    factors = [factor(gpt.Schedule(cfg), step) for step in range(13)]
    assert factors == pytest.approx([1 / 3, 2 / 3, *[1] * 8, 2 / 3, 1 / 3, 0])


def test_momentum_that_rises_and_falls_at_one_time():
    """12 steps: a rise over 10 and a fall over the last 8. The smaller value counts."""
    cfg = gpt.make_config({"preset": "smoke", "momentum_warmup_steps": 10, "momentum_cooldown_steps": 8})
    parts = [(gpt.Schedule(cfg).at(step).momentum - 0.85) / 0.1 for step in (0, 4, 5, 6, 7, 10, 12)]
    assert parts == pytest.approx([0, 0.4, 0.5, 0.6, 5 / 8, 2 / 8, 0])


def test_no_cooldown_and_no_momentum_warmup():
    schedule = gpt.Schedule(
        gpt.make_config({"preset": "smoke", "cooldown_frac": 0.0, "momentum_warmup_steps": 0})
    )
    assert factor(schedule, 12) == 1 and schedule.at(0).momentum == 0.95


def test_stages_may_change_batch_length_and_learning_rate():
    stages = (
        gpt.Stage(1, 64, 64, tokens_per_step=1024, max_doc_len=100, lr_factor=0.5),
        gpt.Stage(3, 64, 64),
    )
    schedule = gpt.Schedule(gpt.make_config({"preset": "smoke", "stages": stages, "cooldown_frac": 0.5}))
    assert [(s, e) for _, s, e in schedule.stage_ranges()] == [(0, 4), (4, 12)]  # ceil(13 / 4) = 4
    assert schedule.count_tokens() == 4 * 1024 + 8 * 2048
    assert factor(schedule, 0) == factor(schedule, 3) == 0.5 and factor(schedule, 4) == 1


LRS = dict(matrix=0.05, embed=0.6, value_embed=0.6, ngram=0.6, head=0.008, scalar=0.04, residual=0.04, mix=0.008, gate=0.008,
           gain=0.1)  # of record 32
MOMENTUM = (0.85, 0.95, 300, 0)  # from, to, steps of the rise, last steps of the fall
FORMULAS = dict(  # by preset. ends: the first step after each stage. falls: of all groups, of matrices, final value
    track_1=dict(ends=(557, 1114, 1670), falls=(0.5, 0.5, 0.1)),
    laptop=dict(ends=(114, 228, 340), falls=(0.5, 0.5, 0.1), momentum=(0.8, 0.8, 0, 0),
                lrs=dict(matrix=0.07, embed=0.3, value_embed=0.3, ngram=0.3)),
    smoke_frontier=dict(ends=(7, 10, 12, 14), extension=2, peaks=(1, 1.5, 1.5, 1), falls=(0.8, 0.8, 0.3),
                        momentum=(0.85, 0.93, 4, 4), decay_follows_lr=True,
                        lrs=dict(matrix=0.06, embed=0.02, head=0.02), decays=dict(matrix=0.135, ngram=0.01),
                        targets=(((1, 1), (0.5, 0.5), (0.25, 0)), ((1, 1), (0.5, 0.5)), ((1, 1), (0.25, 0.25)), ((1, 1),))),
    muonh=dict(ends=(557, 1114, 1670), falls=(0.3, 1.0, 0.0),
               lrs=dict(matrix=0.02, embed=0.3, value_embed=0.3, ngram=0.3, head=0.004)),
    track_2=dict(ends=(626, 1251, 1876, 2501, 3126, 3751, 4376, 5001, 5626, 6251, 6876, 7500),
                 peaks=(1, 1.52, 1.73, *[2] * 9), falls=(0.7, 0.7, 0.1),
                 lrs=dict(matrix=0.0125, embed=0.15, value_embed=0.3, ngram=0.3, head=0.0015)),
)


def written_out(step, ends, falls, extension=0, peaks=(), momentum=MOMENTUM, decay_follows_lr=False, lrs=(),
                decays=(), targets=()):
    """(learning rates, weight decays, momentum, loss weights) at a step."""
    num_steps, scheduled = ends[-1], ends[-1] - extension
    stage = sum(step >= end for end in ends[:-1])  # the last stage, too, for the final validation
    start = ends[stage - 1] if stage else 0

    # Learning rates: the stage's factor, then a linear fall to a fraction of the option
    factors = {}
    for group in LRS:
        fall = falls[1] if group == "matrix" else falls[0]
        peak, t = peaks[stage] if peaks else 1, min(max(scheduled - step, 0) / (fall * scheduled), 1)
        factors[group] = peak if t == 1 else peak * t + falls[2] * (1 - t)
    lr = {group: {**LRS, **dict(lrs)}[group] * factors[group] for group in LRS}
    decay = {group: dict(decays).get(group, 0) * (factors[group] if decay_follows_lr else 1) for group in LRS}

    # Momentum: a linear rise over the first steps and a linear fall over the last
    low, high, rise, fall = momentum
    t = min(step / rise if rise else 1, (num_steps - step) / fall if fall else 1, 1)
    ramps = targets[stage] if targets else ((1, 1),)
    done, length = step - start, ends[stage] - start
    weights = tuple(first + done / length * (last - first) for first, last in ramps)
    return lr, decay, low + t * (high - low), weights


@pytest.mark.parametrize("preset", FORMULAS)
def test_every_step_is_the_formula(preset):
    """Also the final validation. Stages, rates, decays, momentum and loss weights. test_frontier.py has frontier."""
    schedule, formula = gpt.Schedule(gpt.make_config({"preset": preset})), FORMULAS[preset]
    assert [end for _, _, end in schedule.stage_ranges()] == list(formula["ends"])
    for step in range(formula["ends"][-1] + 1):
        state, (lr, decay, momentum, loss_weights) = schedule.at(step), written_out(step, **formula)
        for ours, expected in ((state.lr, lr), (state.weight_decay, decay)):
            assert list(ours) == list(expected) == list(LRS)
            assert all(math.isclose(ours[group], expected[group], rel_tol=1e-12) for group in LRS), step
        assert math.isclose(state.momentum, momentum, rel_tol=1e-12), step
        assert len(state.loss_weights) == len(loss_weights), step
        assert all(math.isclose(*pair, rel_tol=1e-12, abs_tol=1e-12) for pair in zip(state.loss_weights, loss_weights)), step


def test_adam_groups_of_frontier_are_updated_in_odd_steps():
    """At step 700 only matrices move. At step 701 the head moves by its learning rate, times Adam's direction.

    Its moments begin at zero, so that is 0.5 / sqrt(0.05). The bias corrections of 351 updates are 1. Value embeddings
    move at step 703, with the betas of two updates.
    """
    cfg = gpt.make_config({"preset": "frontier"})
    model, schedule = Ends(), gpt.Schedule(cfg)
    model.matrix = gpt.parameter(torch.ones(4, 8), "matrix")
    model.table = gpt.parameter(torch.zeros(3), "value_embed")
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    optimizer.step_count = 700

    def rate(step):
        t = (1174 - step) / 940
        return 1.73 * t + 0.3 * (1 - t)

    head = 0.008 * rate(701) * 0.5 / 0.05**0.5
    table = 0.56 * rate(703) * (1 - 0.75**2) / (1 - 0.95**2) ** 0.5
    for step, distances in ((700, (0.0, 0.0)), (701, (head, 0.0)), (702, (head, 0.0)), (703, (None, table))):
        before = model.matrix.detach().clone()
        for param in model.parameters():
            gradient = torch.ones_like(param)  # of all steps since the last update together
            param.grad = gradient if param.grad is None else param.grad + gradient
        optimizer.step(schedule.at(step))
        assert not torch.equal(model.matrix, before)
        for param, distance in zip((model.head.weight, model.table), distances):
            assert distance is None or param.tolist() == pytest.approx([-distance] * 3, rel=1e-5)
        assert torch.equal(model.embed, model.head.weight)


def lr_factors(cfg, group, *steps):
    """Learning rates of a group at these steps, divided by its option."""
    return [factor(gpt.Schedule(cfg), step, group) for step in steps]


def test_matrices_have_a_separate_schedule():
    cfg = smoke_config(num_iterations=100, lr_warmup_frac=0.1, cooldown_frac=0.3, matrix_cooldown_frac=1.0,
                       final_lr_frac=0.0)
    for group in set(cfg.groups) - {"matrix"}:
        assert lr_factors(cfg, group, 0, 4, 50, 70, 85) == pytest.approx([0.1, 0.5, 1, 1, 0.5])
    assert lr_factors(cfg, "matrix", 0, 4, 9, 50, 85) == pytest.approx([0.1, 0.5, 0.91, 0.5, 0.15])
    cfg = smoke_config()
    (embed,), (matrix,) = lr_factors(cfg, "embed", 9), lr_factors(cfg, "matrix", 9)
    assert embed == pytest.approx(matrix) and matrix < 1


def test_decay_follows_its_schedule():
    """Constant, a cosine, or in each group the learning rate's factor."""
    options = dict(matrix_weight_decay=0.3, groups={"embed": {"weight_decay": 0.2}}, matrix_cooldown_frac=1.0)
    for schedule, values in (("constant", [1, 1, 1]), ("cosine", [1, 0.5, 0]), ("lr", None)):
        cfg = smoke_config(decay_schedule=schedule, **options)
        states = [gpt.Schedule(cfg).at(step) for step in (0, 6, 12)]
        for group, decay in (("matrix", 0.3), ("embed", 0.2), ("head", 0)):
            expected = [decay * factor for factor in values or lr_factors(cfg, group, 0, 6, 12)]
            assert [state.weight_decay[group] for state in states] == pytest.approx(expected, abs=1e-12)
    assert states[1].weight_decay["matrix"] == pytest.approx(0.3 * 0.55)
    assert states[1].weight_decay["embed"] == pytest.approx(0.2)


def test_yarn_stops_where_it_is_told():
    """Windows 64, 192, 256, 320. A limit of 192 allows one change. Limits of 0 and 32 allow none."""
    stages = (gpt.Stage(1, 64, 64), gpt.Stage(1, 192, 64), gpt.Stage(1, 256, 128))
    scales = {
        limit: [
            ropes["long"].softmax_scale
            for ropes in gpt.Schedule(smoke_config(stages=stages, yarn_max_window=limit)).ropes
        ]
        for limit in (0, 32, 192)
    }
    assert scales[0] == scales[32] == [0.1] * 4  # the last in the final validation
    assert scales[192] == pytest.approx([0.1, *[0.1 * (1 + 0.2 * math.log(3))] * 3])
