"""tools/compare.py: its decisions in simulations, and comparisons of real runs whose clocks are exact."""

import json
import math
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY, data_args, launch
from scipy import stats

from tools import compare, replay, results, validate

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


def run_compare(monkeypatch, capsys, *words: str, status: int = 0) -> str:
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
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
        t = float(stats.t.isf(p / 2, 2))
        shift = t / math.sqrt(3)
        return [shift - 1, shift, shift + 1]

    error = compare.ERROR / 10
    assert results.estimate(make_sample(error)).p == pytest.approx(error)
    assert compare.decide([make_sample(0.99 * error)]) == {0}
    assert compare.decide([make_sample(1.01 * error)]) == set()
    assert compare.decide([make_sample(0.9 * error), make_sample(0.3 * error), make_sample(0.4 * error)]) == {0, 1, 2}
    assert compare.decide([make_sample(0.9 * error), make_sample(0.35 * error), make_sample(0.4 * error)]) == set()
    assert compare.decide([make_sample(0.9 * error), make_sample(0.3 * error), make_sample(0.6 * error)]) == {1}
    assert compare.decide([[5.0, 5.0]]) == set()  # two pairs


def test_an_estimate():
    """Against SciPy's t-test. Equal values have no spread."""
    values = [0.1, 0.3, 0.2, 0.7]
    test = stats.ttest_1samp(values, 0.0)
    found, interval = results.estimate(values), test.confidence_interval(0.95)
    assert found == pytest.approx((4, 0.325, interval.low, interval.high, test.pvalue))
    assert results.estimate([0.5, 0.5]).p == 0 and results.estimate([0.0, 0.0]).p == 1
    assert math.isnan(results.estimate([0.5]).p)


@pytest.mark.slow
def test_a_record_is_measured_in_pairs(shards, make_script, monkeypatch, capsys, tmp_path):
    """The base takes 0.5 s for a step, and the new script 0.515 s, with nine of ten steps. So it needs 0.927 of the time.
    The loss that the missing step costs has a price, which 9 and 11 steps of the base give. Finished runs are not repeated.
    The pairs are repeated by replay.py, from the presets in the records, with equal clocks and losses."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    for name in ("data", "train_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    options = [*TINY, *SHORT, *data_args(shards)]
    done = launch([str(make_script("base", 0.5)), *options, "--record=base", f"--out={tmp_path}"], tmp_path)
    assert done.returncode == 0, done.stderr
    (base,) = (tmp_path / "records/try").iterdir()
    new = f"{make_script('new', 0.515)} {shlex.join(options)} --num_iterations=9"
    words = [str(base), new, "--record=shorter", "--pairs=3", "--first_seed=4", f"--json={tmp_path / 'figures.json'}"]
    out = run_compare(monkeypatch, capsys, *words, f"--plot={tmp_path / 'curves.svg'}")
    (figures,) = json.loads((tmp_path / "figures.json").read_text())["sides"]
    (folder,) = (tmp_path / "logs" / "compare").iterdir()
    rows = json.loads((folder / "runs.json").read_text())
    assert len(rows) == 3 * 4 and all(row["steps"] in (9, 10, 11) for row in rows.values())

    def read(name: str, seed: int, scale: str = "1") -> tuple[float, float]:
        row = rows[f"{name} seed {seed} x{scale}"]
        return row["loss"], math.log(row["seconds"])

    changes = [np.subtract(read(base, seed, "1.1"), read(base, seed, "0.9")) for seed in range(4, 7)]
    nats, times = np.sum(changes, axis=0)
    assert nats < 0 and times == pytest.approx(3 * math.log(11 / 9))
    expected = []
    for seed in range(4, 7):
        loss, seconds = np.subtract(read(new, seed), read(base, seed))
        assert seconds == pytest.approx(math.log(0.9 * 1.03))
        expected.append(seconds - loss * times / nats)
    assert figures["ratio"] == pytest.approx(math.exp(np.mean(expected)))
    assert f"needs {figures['ratio']:.3f} of the time of {base} at equal loss (" in out
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    record = results.read_record(next((tmp_path / "records/try").glob("*_shorter")))
    claim = results.read_claim(record, results.read_record(base))
    assert claim[:4] == pytest.approx([figures[name] for name in ("ratio", "low", "high", "pairs")])
    assert sorted(record.losses) == [4, 5, 6] and len(list(record.folder.glob("against_*_base/*.txt"))) == 9
    validate.check_files(record)
    monkeypatch.setattr(sys, "argv", ["replay.py", str(record.folder), "--against", f"--json={tmp_path / 'here.json'}"])
    assert replay.main() == 0
    out = capsys.readouterr().out
    assert out.count(claim.format()) == 2 and "this machine" in out and out.endswith("of this machine overlap\n")
    (here,) = json.loads((tmp_path / "here.json").read_text())["sides"]
    assert here["ratio"] == pytest.approx(claim.ratio) and here["pairs"] == 3
    monkeypatch.setattr(compare, "train", lambda *_: pytest.fail("a finished run is repeated"))
    run_compare(monkeypatch, capsys, *words, status=2)  # the record exists
    shutil.rmtree(record.folder)
    run_compare(monkeypatch, capsys, *words)


def test_sides_of_the_command_line(tmp_path):
    source = (ROOT / "train_gpt.py").read_bytes()
    assert compare.read_side("laptop --seq_len=512", ["--x=1"]) == (
        "laptop --seq_len=512", source, ("--preset=laptop", "--x=1", "--seq_len=512"))
    assert compare.read_side("--matrix_lr=0.03", []).options == ("--matrix_lr=0.03",)
    assert compare.read_side("laptop", ["--preset=smoke", "--x=1"]).options == ("--preset=laptop", "--x=1")
    script = tmp_path / "mine.py"
    script.write_bytes(b"pass")
    assert compare.read_side(f"{script} --a=b", []) == (f"{script} --a=b", b"pass", ("--a=b",))
    preset = tmp_path / "mine.json"
    preset.write_text("{}")
    assert compare.read_side(f"{preset} --a=b", []) == (f"{preset} --a=b", source, (f"--preset={preset}", "--a=b"))
    record = ROOT / "records/laptop/2026-11-28_six_grams"
    side = compare.read_side(str(record), [])
    assert side.source == (record / "train_gpt.py").read_bytes() and side.options[0].startswith(f"--preset={record}/")
    for text in ("nothing_like_this", "laptop --seed=1", "laptop --out=x"):
        with pytest.raises(compare.RecordError):
            compare.read_side(text, [])


def test_a_record_is_of_the_track_of_its_base():
    base = ROOT / "records/laptop/2026-11-28_six_grams"
    folder = compare.find_record_folder("mine", base, compare.read_side("laptop", []))
    assert folder.parent == base.parent and folder.name.endswith("_mine")
    for name, place, side, words in (
            ("six_grams", base, "laptop", "exists"), ("mine", base, "smoke", "smoke has track try"),
            ("mine", ROOT / "records/laptop/2026-11-21_ladder/muon", "laptop", "is not records/laptop/RECORD")):
        with pytest.raises(compare.RecordError, match=words):
            compare.find_record_folder(name, place, compare.read_side(side, []))


def test_parts_of_a_preset():
    sides = compare.list_parts(compare.read_side("smoke", []))
    assert "--without=softcap" in [side.name for side in sides] and all("--preset=smoke" in side.options for side in sides)
    assert "--without=ngram_rows" not in [side.name for side in sides]
    assert len(sides) == len({side.name for side in sides}) > 10


@pytest.mark.parametrize("words, line", [
    (["smoke"], "give two or more sides"), (["smoke", "smoke"], "give two or more sides"),
    (["smoke", "smoke --seed=1"], "--seed"), (["smoke", "no_such_thing"], "no_such_thing"),
    (["smoke --num_iterations=4", "smoke"], "--num_iterations=4 is too few"),
    (["smoke", "smoke --matrix_lrr=1"], "smoke --matrix_lrr=1: --matrix_lrr=1 is not an option: did you mean --matrix_lr?"),
    (["smoke", "smoke --val_tokens=8192"], "smoke --val_tokens=8192 has val_tokens=8192, and smoke has 4096"),
    (["smoke", ""], "a side is empty"), (["smoke", "smoke --x='"], "No closing quotation"),
    (["README.md", "smoke"], "README.md: "),
    (["HEAD", "laptop", "--record=mine"], "HEAD is no folder: the first side must be"),
    (["records/laptop/2026-11-28_six_grams", "laptop", "--record=mine"], "give none after --")])
def test_bad_input_is_one_line(shards, monkeypatch, capsys, words, line):
    monkeypatch.setattr(sys, "argv", ["compare.py", *words, "--", *data_args(shards)])
    assert compare.main() == 2
    *more, error = capsys.readouterr().err.splitlines()
    assert line in error and more in ([], ["compare.py: reading the options of 2 sides"])


def test_a_run_that_fails_is_one_line(shards, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    for name in ("data", "records", "train_gpt.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setattr(sys, "argv", ["compare.py", "smoke", "smoke --seq_len=100", "--", *data_args(shards)])
    assert compare.main() == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith("compare.py: error: ") and "seq_len=100" in errors[-1]
