"""tools/compare.py: its decisions in simulations, and comparisons of real runs whose clocks are exact."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY, data_args

from tools import compare

CLOCK = """
if __name__ == "__main__":
    now, real_step = [0.0], Trainer.train_step
    def timed_step(*args):
        now[0] += SECONDS
        return real_step(*args)
    time.perf_counter, Trainer.train_step = lambda: now[0], timed_step
"""
SHORT = ["--num_iterations=10", "--val_loss_every=0"]


@pytest.fixture
def make_script(tmp_path):
    """A function that writes a version whose steps take exactly this many seconds, with a changed text."""
    def make(name: str, seconds: float, old: str = "", new: str = "") -> Path:
        text = (ROOT / "train_gpt.py").read_text()
        assert text.count(old) == 1 or not old
        text = text.replace(old, new) if old else text
        path = tmp_path / f"{name}.py"
        before, main = text.rsplit('if __name__ == "__main__":', 1)
        path.write_text(before + CLOCK.replace("SECONDS", f"{seconds}").strip() + main)
        return path
    return make


def run_compare(monkeypatch, capsys, shards, *words: str, status: int = 0) -> str:
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--", *TINY, *SHORT, *data_args(shards)])
    assert compare.main() == status
    return capsys.readouterr().out


def simulate(generator, num_runs: int, effect: float, spread: float) -> tuple[float, float]:
    """(fraction of comparisons that are decided, mean number of pairs) of a true effect on the logarithm of the ratio,
    and a standard deviation of one pair."""
    num_decided, num_pairs = 0, 0
    for _ in range(num_runs):
        sample = generator.normal(effect, spread, compare.MOST_PAIRS).tolist()
        ends = (n for n in range(compare.FIRST_LOOK, compare.MOST_PAIRS + 1) if compare.decide([sample[:n]]))
        end = next(ends, None)
        num_decided += end is not None
        num_pairs += end or compare.MOST_PAIRS
    return num_decided / num_runs, num_pairs / num_runs


def test_a_script_is_no_better_than_itself():
    """At most 1 % of comparisons are decided. Of 10,000 it was 0.12 %."""
    decided, pairs = simulate(np.random.default_rng(0), 1000, 0.0, 0.03)
    assert decided <= 0.01 and pairs > 11.9


@pytest.mark.parametrize("effect, spread, most_pairs", [(0.02, 0.01, 9), (0.05, 0.01, 5), (0.1, 0.01, 4), (0.1, 0.03, 7)])
def test_true_effects_are_decided(effect, spread, most_pairs):
    decided, pairs = simulate(np.random.default_rng(0), 200, math.log1p(effect), spread)
    assert decided > 0.9 and pairs < most_pairs


def test_several_sides_share_the_error():
    """Holm: the smallest p is compared with a third of the error, the next one with a half, and so on."""
    def make_sample(p: float) -> list[float]:
        """Three values whose t-test has this p."""
        t = float(compare.stats.t.isf(p / 2, 2))
        shift = t / math.sqrt(3)
        return [shift - 1, shift, shift + 1]

    error = compare.ERROR / 10
    assert compare.estimate(make_sample(error)).p == pytest.approx(error)
    assert compare.decide([make_sample(0.99 * error)]) == {0}
    assert compare.decide([make_sample(1.01 * error)]) == set()
    assert compare.decide([make_sample(0.9 * error), make_sample(0.3 * error), make_sample(0.4 * error)]) == {0, 1, 2}
    assert compare.decide([make_sample(0.9 * error), make_sample(0.35 * error), make_sample(0.4 * error)]) == set()
    assert compare.decide([make_sample(0.9 * error), make_sample(0.3 * error), make_sample(0.6 * error)]) == {1}
    assert compare.decide([[5.0, 5.0]]) == set()  # two pairs


def test_an_estimate():
    """Against SciPy's t-test. Equal values have no spread."""
    values = [0.1, 0.3, 0.2, 0.7]
    test = compare.stats.ttest_1samp(values, 0.0)
    found, interval = compare.estimate(values), test.confidence_interval(0.95)
    assert found[:5] == pytest.approx((0.325, interval.low, interval.high, test.pvalue, 4))
    assert compare.estimate([0.5, 0.5]).p == 0 and compare.estimate([0.0, 0.0]).p == 1
    assert compare.estimate([0.5]).p == 1


@pytest.mark.slow
def test_slower_steps_and_fewer_steps(shards, make_script, monkeypatch, capsys, tmp_path):
    """Steps of 0.515 s instead of 0.5 s: 1.03 of the time. With nine of ten steps the time is 0.9, and the loss that
    this costs has its price by definition: it was measured with 0.9 of the steps. Finished runs are not repeated."""
    base, slow = make_script("base", 0.5), make_script("slow", 0.515)
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    for name in ("data", "records", "train_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = [str(base), str(slow), f"{base} --num_iterations=9", "--pairs=3", f"--json={tmp_path / 'figures.json'}"]
    out = run_compare(monkeypatch, capsys, shards, *words, f"--plot={tmp_path / 'curves.svg'}")
    slower, fewer = json.loads((tmp_path / "figures.json").read_text())["sides"]
    assert (slower["verdict"], slower["pairs"]) == ("slower", 3) and slower["ratio"] == pytest.approx(1.03)
    (folder,) = (tmp_path / "logs" / "compare").iterdir()
    rows = json.loads((folder / "runs.json").read_text())
    assert len(rows) >= 3 * 5 and all(row["steps"] in (9, 10, 11) for row in rows.values())

    def read(name: str, seed: int, scale: str = "1") -> tuple[float, float]:
        row = rows[f"{name} seed {seed} x{scale}"]
        return row["loss"], math.log(row["seconds"])

    changes = [np.subtract(read(base, seed, "1.1"), read(base, seed, "0.9")) for seed in range(3)]
    nats, times = np.sum(changes, axis=0)
    assert nats < 0 and times == pytest.approx(3 * math.log(11 / 9))
    expected = []
    for seed in range(fewer["pairs"]):
        loss, seconds = np.subtract(read(f"{base} --num_iterations=9", seed), read(base, seed))
        assert seconds == pytest.approx(math.log(0.9))
        expected.append(seconds - loss * times / nats)
    assert fewer["ratio"] == pytest.approx(math.exp(np.mean(expected)))
    assert out.splitlines()[-2].startswith(f"{slow} needs 1.030 of the time of {base} at equal loss (1.030 to 1.030, 3")
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    monkeypatch.setattr(compare, "train", lambda *_: pytest.fail("a finished run is repeated"))
    assert run_compare(monkeypatch, capsys, shards, *words) == out


def test_sides_of_the_command_line(tmp_path):
    source = (ROOT / "train_gpt.py").read_bytes()
    assert compare.read_side("laptop --seq_len=512", ["--x=1"]) == (
        "laptop --seq_len=512", source, ("--preset=laptop", "--x=1", "--seq_len=512"))
    assert compare.read_side("--matrix_lr=0.03", []).options == ("--matrix_lr=0.03",)
    script = tmp_path / "mine.py"
    script.write_bytes(b"pass")
    assert compare.read_side(f"{script} --a=b", []) == (f"{script} --a=b", b"pass", ("--a=b",))
    record = ROOT / "records/laptop/2026-11-28_six_grams"
    side = compare.read_side(str(record), [])
    assert side.source == (record / "train_gpt.py").read_bytes() and side.options[0].startswith(f"--preset={record}/")
    for text in ("nothing_like_this", "laptop --seed=1", "laptop --out=x"):
        with pytest.raises(compare.RecordError):
            compare.read_side(text, [])


def test_parts_of_a_preset():
    sides = compare.list_parts(compare.read_side("smoke", []))
    assert "--without=softcap" in [side.name for side in sides] and all("--preset=smoke" in side.options for side in sides)
    assert "--without=ngram_rows" not in [side.name for side in sides]
    assert len(sides) == len({side.name for side in sides}) > 10


@pytest.mark.parametrize("words, line", [
    (["smoke"], "give two or more sides"), (["smoke", "smoke"], "give two or more sides"),
    (["smoke", "smoke --seed=1"], "--seed"), (["smoke", "no_such_thing"], "no_such_thing")])
def test_bad_input_is_one_line(shards, monkeypatch, capsys, words, line):
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--", *data_args(shards)])
    assert compare.main() == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and line in errors


def test_a_run_that_fails_is_one_line(shards, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    for name in ("data", "records", "train_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "argv", ["compare.py", "smoke", "smoke --seq_len=100", "--", *data_args(shards)])
    assert compare.main() == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("compare.py: error: ") and "seq_len=100" in errors[-1]
