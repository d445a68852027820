"""Schedules at 0, at boundaries and at the end, against record 32."""

import math

import numpy as np
import pytest
from conftest import gpt


@pytest.fixture(scope="module")
def schedule():
    return gpt.Schedule(gpt.make_config({"preset": "track_1"}))


def test_stage_of_every_step_is_the_records(schedule):
    for step in range(1670):
        assert schedule.at(step).stage_index == int(3 * step / 1671)
    assert schedule.at(1670).stage_index == 3  # final validation
    assert schedule.at(1670).stage == schedule.cfg.full_stages[2]


def test_the_last_validation_has_windows_of_its_own_or_those_of_the_last_stage(schedule):
    assert (schedule.at(1669).windows, schedule.at(1670).windows) == ((1408, 640), (1664, 768))
    same = gpt.Schedule(gpt.make_config({"preset": "track_1", "val_windows": ()}))
    last, final = same.at(1669), same.at(1670)
    assert (final.windows, final.attention_scale) == (last.windows, last.attention_scale)
    assert last.windows == (1408, 640) and np.array_equal(final.frequencies, last.frequencies)


def test_windows_are_the_records(schedule):
    windows = [(long // 128, short // 128) for long, short in schedule.windows]
    assert windows == [(3, 1), (7, 3), (11, 5), (13, 6)]


def test_attention_scale_grows_as_published(schedule):
    assert [round(scale, 4) for _, scale in schedule.rotary] == [0.1, 0.1169, 0.1275, 0.1318]


def test_yarn_by_hand(schedule):
    first, second = schedule.rotary[0][0], schedule.rotary[1][0]
    assert np.allclose(first[:32], (1 / 1024) ** np.linspace(0, 1, 32)) and not first[32:].any()
    for j in range(64):
        rotations = 3 * 128 * first[j] / (2 * math.pi)
        g = min(max((rotations - 1) / 31, 0), 1)
        assert second[j] == pytest.approx(first[j] * (3 / 7 + g * (1 - 3 / 7)), rel=1e-12)
    assert second[0] == first[0] and second[31] == pytest.approx(
        first[31] * 3 / 7
    )  # fast ones stay, slow ones stretch


@pytest.mark.parametrize(
    "step, factor",
    [
        (0, 1),
        (835, 1),  # half of the steps are left: the fall begins
        (836, (834 + 0.1) / 835),  # 834 of the 835 steps of the fall are left
        (1253, (417 + 418 * 0.1) / 835),
        (1669, (1 + 834 * 0.1) / 835),
        (1670, 0.1),
    ],
)
def test_learning_rate(schedule, step, factor):
    """A step early or late is off by 0.9 / 835 = 1e-3."""
    assert schedule.at(step).lr_factor == pytest.approx(factor, rel=1e-12)


def test_the_first_steps_of_a_fall_of_its_own():
    """12 steps: the rates of matrices fall from step 3 on, over 9, the others from step 6 on, over 6, to 0.1."""
    cfg = gpt.make_config({"preset": "smoke", "cooldown_frac": 0.5, "matrix_cooldown_frac": 0.75})
    states = list(map(gpt.Schedule(cfg).at, (3, 4, 6, 7)))
    assert [state.lr_factor for state in states] == pytest.approx([1, 1, 1, 1 - 0.9 / 6])
    assert [state.matrix_lr_factor for state in states] == pytest.approx([1, *(1 - 0.9 * i / 9 for i in (1, 3, 4))])


def test_rise_and_fall():
    """12 steps: full rate at the third (0.25 * 12 = 3), then a fall over the last 3 to 0."""
    cfg = gpt.make_config(
        {"preset": "smoke", "lr_warmup_frac": 0.25, "cooldown_frac": 0.25, "final_lr_frac": 0.0}
    )
    factors = [gpt.Schedule(cfg).at(step).lr_factor for step in range(13)]
    assert factors == pytest.approx([1 / 3, 2 / 3, *[1] * 8, 2 / 3, 1 / 3, 0])


@pytest.mark.parametrize("step, momentum", [(0, 0.85), (150, 0.90), (300, 0.95), (1669, 0.95)])
def test_momentum(schedule, step, momentum):
    assert schedule.at(step).momentum == pytest.approx(momentum)


def test_no_cooldown_and_no_momentum_warmup():
    schedule = gpt.Schedule(
        gpt.make_config({"preset": "smoke", "cooldown_frac": 0.0, "momentum_warmup_steps": 0})
    )
    assert schedule.at(12).lr_factor == 1 and schedule.at(0).momentum == 0.95


def test_stages_may_change_batch_length_and_learning_rate():
    stages = (
        gpt.Stage(1, 64, 64, tokens_per_step=1024, max_doc_len=100, lr_factor=0.5),
        gpt.Stage(3, 64, 64),
    )
    schedule = gpt.Schedule(gpt.make_config({"preset": "smoke", "stages": stages, "cooldown_frac": 0.5}))
    assert [(s, e) for _, s, e in schedule.spans()] == [(0, 4), (4, 12)]  # ceil(13 / 4) = 4
    assert schedule.total_tokens() == 4 * 1024 + 8 * 2048
    assert schedule.at(0).lr_factor == 0.5 and schedule.at(4).lr_factor == 1
