"""Schedules at their boundaries. test_published_values.py and test_model_92.py have all steps of presets."""

import math

import numpy as np
import pytest
from conftest import gpt, smoke_config


def factor(schedule, step, group="embed"):
    """The learning rate of a group at a step, divided by its option."""
    return schedule.at(step).lr[group] / schedule.cfg.groups[group].lr


def test_the_last_validation_may_have_the_windows_of_the_last_stage():
    schedule = gpt.Schedule(gpt.make_config({"preset": "record_32", "val_windows": ()}))
    last, final = schedule.at(1669), schedule.at(1670)
    assert final.windows == last.windows == (1408, 640)
    for kind in ("long", "short"):
        assert final.rope[kind].softmax_scale == last.rope[kind].softmax_scale
        assert np.array_equal(final.rope[kind].frequencies, last.rope[kind].frequencies)


def test_yarn_stops_where_it_is_told():
    """Windows 64, 192, 256, 320. A limit of 192 allows one change. Limits of 0 and 32 allow none."""
    stages = (gpt.Stage(1, 64, 64), gpt.Stage(1, 192, 64), gpt.Stage(1, 256, 128))
    for limit, growths in ((0, [1] * 4), (32, [1] * 4), (192, [1, *[1 + 0.2 * math.log(3)] * 3])):
        ropes = gpt.Schedule(smoke_config(stages=stages, yarn_max_window=limit)).ropes
        scales = [rope["long"].softmax_scale for rope in ropes]  # the last is of the validation
        assert scales == pytest.approx([0.1 * growth for growth in growths])


@pytest.mark.recipe
@pytest.mark.parametrize("changes, of_matrices, of_others", [
    # rates of matrices fall over 9 steps from step 3 on, others over 6 steps from step 6 on, to 0.1
    (dict(cooldown_frac=0.5, matrix_cooldown_frac=0.75),
     {3: 1, 4: 0.9, 6: 0.7, 7: 0.6}, {6: 1, 7: 0.85, 12: 0.1}),
    # the full rate at the third step (0.25 * 12 = 3), then a fall over the last 3 to 0
    (dict(lr_warmup_frac=0.25, cooldown_frac=0.25, final_lr_frac=0.0), {},
     dict(enumerate([1 / 3, 2 / 3, *[1] * 8, 2 / 3, 1 / 3, 0]))),
    (dict(cooldown_frac=0.0), {}, {0: 1, 12: 1}),
    (dict(num_iterations=100, lr_warmup_frac=0.1, cooldown_frac=0.3, matrix_cooldown_frac=1.0,
          final_lr_frac=0.0),
     {0: 0.1, 4: 0.5, 9: 0.91, 50: 0.5, 85: 0.15}, {0: 0.1, 4: 0.5, 50: 1, 70: 1, 85: 0.5}),
])  # fmt: skip
def test_rise_and_fall(changes, of_matrices, of_others):
    """Factors of learning rates by step. Without matrix_cooldown_frac they are equal for all groups."""
    schedule = gpt.Schedule(smoke_config(**changes))
    for group in schedule.cfg.groups:
        expected = of_matrices if group == "matrix" and of_matrices else of_others
        assert {step: factor(schedule, step, group) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize("warmup, cooldown, parts", [
    (10, 8, {0: 0, 4: 0.4, 5: 0.5, 6: 0.6, 7: 5 / 8, 10: 2 / 8, 12: 0}),  # the smaller value counts
    (0, 0, {0: 1, 12: 1}),
])  # fmt: skip
def test_momentum_that_rises_and_falls(warmup, cooldown, parts):
    """12 steps, from 0.85 to 0.95 and back."""
    schedule = gpt.Schedule(smoke_config(momentum_warmup_steps=warmup, momentum_cooldown_steps=cooldown))
    assert {step: (schedule.at(step).momentum - 0.85) / 0.1 for step in parts} == pytest.approx(parts)


def test_stages_may_change_batch_length_and_learning_rate():
    first = gpt.Stage(1, 64, 64, tokens_per_step=1024, max_doc_len=100, lr_factor=0.5)
    stages = first, gpt.Stage(3, 64, 64)
    schedule = gpt.Schedule(smoke_config(stages=stages, cooldown_frac=0.5))
    assert [(s, e) for _, s, e in schedule.stage_ranges()] == [(0, 4), (4, 12)]  # ceil(13 / 4) = 4
    assert schedule.count_tokens() == 4 * 1024 + 8 * 2048
    assert factor(schedule, 0) == factor(schedule, 3) == 0.5 and factor(schedule, 4) == 1


@pytest.mark.recipe
def test_decay_follows_its_schedule():
    """Constant, a cosine, or in each group the learning rate's factor."""
    options = dict(matrix_weight_decay=0.3, matrix_cooldown_frac=1.0)
    options["groups"] = {"embed": {"weight_decay": 0.2}}
    for kind, values in (("constant", [1, 1, 1]), ("cosine", [1, 0.5, 0]), ("lr", None)):
        schedule = gpt.Schedule(smoke_config(decay_schedule=kind, **options))
        for group, decay in (("matrix", 0.3), ("embed", 0.2), ("head", 0)):
            factors = values or [factor(schedule, step, group) for step in (0, 6, 12)]
            found = [schedule.at(step).weight_decay[group] for step in (0, 6, 12)]
            assert found == pytest.approx([decay * one for one in factors], abs=1e-12)
    assert schedule.at(6).weight_decay["matrix"] == pytest.approx(0.3 * 0.55)
    assert schedule.at(6).weight_decay["embed"] == pytest.approx(0.2)


def test_weights_fall_over_the_steps_of_the_run():
    """Without an extension the published end of the last stage is a step after the run, so it is clipped."""
    stage = gpt.Stage(1, 64, 64, loss_weights=((1, 1), (1, 0)))
    schedule = gpt.Schedule(smoke_config(stages=(stage,)))
    assert schedule.num_iterations == 12
    assert [schedule.at(step).loss_weights for step in (0, 3, 6)] == [(1, 1), (1, 0.75), (1, 0.5)]


def test_a_cosine_decay_ends_with_the_run():
    """Not with the schedule before an extension."""
    stages = gpt.Stage(1, 64, 64), gpt.Stage(1, 64, 64)
    cfg = smoke_config(decay_schedule="cosine", extension_steps=4, matrix_weight_decay=0.3, stages=stages)
    found = [gpt.Schedule(cfg).at(step).weight_decay["matrix"] for step in (6, 12)]
    assert found == pytest.approx([0.15, 0], abs=1e-12)


def test_ends_of_stages_and_fractions_are_exact():
    """Five equal stages of 9 steps end after 2, 4, ... of 10 steps: 6 / 10 is not rounded up to 7. 0.07 of 100 steps are 7,
    although the product exceeds it."""
    schedule = gpt.Schedule(smoke_config(stages=(gpt.Stage(1, 64, 64),) * 5, num_iterations=9))
    assert [end for _, _, end in schedule.stage_ranges()] == [2, 4, 6, 8, 9]
    for num_steps in (100, 1174, 7500):
        cfg = smoke_config(num_iterations=num_steps)
        assert [cfg.step_at(k / 100) for k in range(100)] == [-(-k * num_steps // 100) for k in range(100)]
