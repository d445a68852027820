"""Record folders and their tools: statistics, leaderboard, replay, ablation, ladder."""

import copy
import hashlib
import json
import math
import multiprocessing
import shutil
import signal
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, call_tool, data_args, gpt, launch, smoke_run

from tools import common, leaderboard, plot, replay, results, validate
from tools import ladder as ladder_tool

SCRIPTS = sorted((ROOT / "records").glob("*/*/train_gpt.py"))
COMMITTED = results.read_track("*")


@pytest.fixture
def tool(capsys, monkeypatch):
    """Run a tool in this process and return (status, stdout, stderr)."""

    def run(module, *args):
        monkeypatch.setattr(sys, "argv", [Path(module.__file__).name, *map(str, args)])
        return call_tool(capsys, common.run_guarded, module.main)

    return run


@pytest.fixture(scope="module")
def real_record(shards, tmp_path_factory):
    out = tmp_path_factory.mktemp("records")
    args = ["--record=tiny", "--num_iterations=4", "--val_loss_every=2"]
    return smoke_run(shards, out, *TINY, *args)["path"].parent


@pytest.fixture
def make_record(real_record, tmp_path):
    """Make copies of the real record with other names, seeds and losses."""
    (source,) = real_record.glob("*.json")
    result = json.loads(source.read_text()) | dict(corpus_fingerprint=gpt.TRACK_DATA["laptop"])
    facts, log = source.with_suffix(".txt").read_text().split(validate.LOG_RULE)

    def make(name, losses, script=real_record / "train_gpt.py", **changes):
        """A record, or a rung for a name like ladder/muon."""
        folder = tmp_path / "laptop" / f"2026-01-01_{name}"
        folder.mkdir(parents=True)
        shutil.copy(script, folder.parent if "/" in name else folder)
        if "/" in name:
            shutil.copy(ladder_tool.LADDER / "ladder.toml", folder.parent)
        changes["script_sha256"] = hashlib.sha256(script.read_bytes()).hexdigest()
        for seed, loss in enumerate(losses):
            made = copy.deepcopy(result) | dict(
                track="laptop", final_val_loss=loss, seed=seed, run_id=str(seed), **changes)
            made["config"].update(seed=seed, val_tokens=131_072)
            old_loss = result["final_val_loss"]
            if "val_points" not in changes:
                made["val_points"][-1][1] = loss
            (folder / f"{seed}.json").write_text(json.dumps(made))
            made_facts = json.dumps({name: made.get(name) for name in json.loads(facts)})
            lines = log.replace(f"val_loss:{old_loss:.4f}", f"val_loss:{loss:.4f}")
            (folder / f"{seed}.txt").write_text(f"{made_facts}{validate.LOG_RULE}{lines}")
        return folder

    return make


def edit_json(folder, change, is_last=True):
    """Change the last result of a folder, or all of them."""
    for path in sorted(folder.glob("*.json"))[-1 if is_last else 0 :]:
        result = json.loads(path.read_text())
        change(result)
        path.write_text(json.dumps(result))


def test_validate_against_a_table_of_students_t(make_record, tool):
    """Mean 1.1, sd 0.1, n 3: t = -0.2 / (0.1 / sqrt 3) = -3.464, p = 0.0371. Against 2.1: t = -17.3, p = 0.0017."""
    folder = make_record("three", [1.0, 1.1, 1.2])
    assert results.summarize([1.0, 1.1, 1.2], 1.3).p == pytest.approx(0.0371, abs=1e-4)
    assert results.summarize([1.0, 1.1, 1.2], 2.1).p == pytest.approx(0.00166, abs=1e-5)
    (folder / "._0.json").write_bytes(b"\0\5\26\7")  # of macOS
    status, out, _ = tool(validate, folder, "--target=1.3")
    assert status == 1 and "p = 0.037: not shown to be below" in out
    assert "n = 3, loss 1.1000 +- 0.1000 (best 1.0000)" in out
    status, out, _ = tool(validate, folder, folder, "--target=2.1")
    assert status == 0 and out.endswith("\ntarget: 2 below it at p < 0.01, 0 not shown to be below it, 0 not tested\n")
    assert tool(validate, folder, "--target=0")[0] == 1  # 0 counts as a target


@pytest.mark.parametrize("part, change", [
    ("script_sha256", lambda facts: facts.update(script_sha256="0" * 64)),
    ("versions", lambda facts: facts["versions"].update(torch="1.0")),
    ("config", lambda facts: facts["config"].update(num_iterations=5)),
    ("the last validation", None)])
def test_a_log_of_another_run_is_named(make_record, tool, part, change):
    folder = make_record("mixed", [1.0, 1.1])
    log = folder / "1.txt"
    facts, lines = log.read_text().split(validate.LOG_RULE)
    facts = json.loads(facts)
    if change:
        change(facts)
    else:
        lines = lines.replace("val_loss:1.1000", "val_loss:1.0000")
    log.write_text(json.dumps(facts) + validate.LOG_RULE + lines)
    status, _, errors = tool(validate, folder, "--target=9")
    assert status == 2 and errors.splitlines()[-1].endswith(f"1.txt: {part} of the log and of the json differ")
    log.unlink()
    assert "has no log of 1" in tool(validate, folder, "--target=9")[2]


def test_a_curve_that_ends_early_is_named(make_record, tool):
    folder = make_record("short", [1.0])
    edit_json(folder, lambda result: result["config"].update(num_iterations=5))
    log = folder / "0.txt"
    log.write_text(log.read_text().replace('"num_iterations": 4', '"num_iterations": 5'))
    assert "0.json: the curve ends at step, loss and milliseconds [4, 1.0, " in tool(validate, folder)[2]


@pytest.mark.parametrize("is_base", [False, True])
def test_a_time_that_the_curve_does_not_have_is_named(make_record, is_base):
    """In a record, and in the runs of the record before it."""
    base, record = make_claim(make_record)
    edit_json(record / f"against_{base.name}" if is_base else record, lambda result: result.update(train_time_ms=1))
    with pytest.raises(results.RecordError, match="the curve ends at step, loss and milliseconds .*, 1]$"):
        results.read_claim(*map(results.read_record, (record, base)))


def test_a_missing_base_is_named(make_record):
    base, record = make_claim(make_record)
    base.rename(base.with_name("other"))
    refused = []
    assert leaderboard.format_chain([results.read_record(record)], refused.append) == ""
    assert refused == [f"{record} was measured against {base}, which does not exist"]


def test_other_folders_are_checked_after_a_wrong_one(make_record, tool):
    good, bad = make_record("good", [1.0, 1.1]), make_record("bad", [])
    status, out, errors = tool(validate, bad, good, "--target=9")
    assert status == 2 and f"{good}: n = 2" in out and "target: " not in out and "bad is no record" in errors


def make_claim(make_record) -> tuple[Path, Path]:
    """(base, record): the record takes 0.8 of the time at equal steps and ends 0.1 lower. Folder against_ has the base
    with 9, 10 and 11 of 10 steps. A step lowers the loss by 0.05. Only the time of 10 steps counts."""
    base = make_record("base", [2.0, 2.1, 2.2])
    record = make_record("new", [1.9, 2.0, 2.1])
    against = record / f"against_{base.name}"
    against.mkdir()
    for seed in range(3):
        result = json.loads((base / f"{seed}.json").read_text())
        for steps in (9, 10, 11):
            loss = 2.0 + 0.1 * seed - 0.05 * (steps - 10)
            run = result | dict(train_time_ms=10_000 if steps == 10 else 7000 * seed, final_val_loss=loss, run_id=f"{seed}_{steps}")
            run["val_points"] = [[steps, loss, run["train_time_ms"]]]
            run["config"] = result["config"] | dict(num_iterations=steps)
            (against / f"{seed}_{steps}.json").write_text(json.dumps(run))
    for folder, seconds in ((base, 10), (record, 8)):
        edit_json(folder, lambda result, seconds=seconds: (
            result.update(train_time_ms=1000 * seconds, val_points=[[10, result["final_val_loss"], 1000 * seconds]]),
            result["config"].update(num_iterations=10)), is_last=False)
    return base, record


def test_a_claim_is_the_time_at_equal_loss(make_record, tmp_path):
    """11 of 9 steps lower the loss by 0.1, so 0.1 less is worth ln(11 / 9): 0.8 * 9 / 11."""
    base, record = map(results.read_record, make_claim(make_record))
    assert results.find_base(record.folder) == base.folder and results.find_base(base.folder) is None
    claim = results.read_claim(record, base)
    assert claim.ratio == pytest.approx(0.8 * 9 / 11) and claim.low == pytest.approx(claim.high) and claim.pairs == 3
    repeats = record.folder / f"against_{base.folder.name}" / "repeats"
    repeats.mkdir()
    side = dict(side="new", ratio=0.7, low=0.6, high=0.8, pairs=5, verdict="faster")
    (repeats / "mine.json").write_text(json.dumps(dict(date="2026-11-29", machine="mine", base="base", sides=[side])))
    text = leaderboard.format_chain([base, record])
    assert f"| {base.folder.name} | 0.655 (0.655 to 0.655, 3 pairs): " in text and "<br>0.700 (0.600 to 0.800, 5 pairs): mine | 0.655 | 8.0 s" in text
    assert "| 1.000 | 10.0 s" in text and leaderboard.format_chain([base]) == ""
    newest = results.read_record(make_record("a_newest", [1.8]))  # stands below the others nevertheless
    shutil.copytree(repeats, newest.folder / f"against_{record.folder.name}" / "repeats")
    *_, last = leaderboard.format_chain([base, record, newest]).strip().splitlines()
    assert f"mine | {0.8 * 9 / 11 * 0.7:.3f} | " in last
    assert {found.folder for found in results.read_track("laptop", tmp_path)} == {base.folder, record.folder, newest.folder}


@pytest.mark.parametrize("milliseconds, status", [(8000, 0), (13_000, 1)])
def test_a_claim_must_be_faster(make_record, tool, milliseconds, status):
    """At a lower loss, 13 s are 1.06 of the 10 s of the base."""
    _, record = make_claim(make_record)
    for path in record.glob("*.json"):
        result = json.loads(path.read_text())
        loss, steps = result["final_val_loss"], result["config"]["num_iterations"]
        result.update(train_time_ms=milliseconds, val_points=[[steps, loss, milliseconds]])
        path.write_text(json.dumps(result))
        facts = json.dumps({name: result[name] for name in ("script_sha256", "argv", "versions", "hardware", "config")})
        end = f"step:{steps}/{steps} val_loss:{loss:.4f} train_time:{milliseconds}ms step_avg:1ms\n"
        path.with_suffix(".txt").write_text(f"{facts}{validate.LOG_RULE}{end}")
    found, out, _ = tool(validate, record, "--target=9")
    assert found == status and f"needs {milliseconds / 10_000 * 9 / 11:.3f} (" in out


@pytest.mark.parametrize("change, words", [
    (lambda result: result["hardware"].update(threads=64), "threads was "),
    (lambda result: result.update(script_sha256="0" * 64), "other script"),
    (lambda result: result["config"].update(seq_len=64), "seq_len was ")])
def test_pairs_that_do_not_belong_together(make_record, change, words):
    base, record = make_claim(make_record)
    edit_json(record / f"against_{base.name}", change)
    with pytest.raises(results.RecordError, match=words):
        results.read_claim(*map(results.read_record, (record, base)))


def test_paired_comparison(make_record):
    """Differences -0.2, -0.3, -0.4: mean -0.3, sd 0.1, half width 4.303 * 0.1 / sqrt 3 = 0.2484."""
    ours, theirs = make_record("ours", [1.0, 1.1, 1.2]), make_record("theirs", [1.2, 1.4, 1.6, 9.0])
    left, right = (results.read_record(folder) for folder in (ours, theirs))
    effect = results.compare(left, right)
    assert (effect.n, effect.mean) == (3, pytest.approx(-0.3))
    assert (effect.low, effect.high) == (pytest.approx(-0.5484, abs=1e-4), pytest.approx(-0.0516, abs=1e-4))
    assert effect.p == pytest.approx(0.0351, abs=1e-4)
    with pytest.raises(results.RecordError, match="share no seed"):
        results.compare(left._replace(results=left.results[:1]), right._replace(results=right.results[1:]))


def test_one_seed_is_no_test(make_record, tool):
    """It is neither a claim nor a failure. On a GPU runs of one seed may differ, and count once."""
    status, out, err = tool(validate, make_record("one", [1.0]), "--target=1.3")
    assert (status, err) == (0, "") and "nan" not in out and out.count("one seed: no test possible") == 1
    again = make_record("again", [1.0, 1.1], hardware=dict(device="cuda", ranks=1, gpu="a GPU"))
    edit_json(again, lambda result: (result.update(seed=0), result["config"].update(seed=0)))
    record = results.read_record(again)
    assert record.losses == {0: 1.0} and record.num_replays == 1


def test_equal_losses_are_no_evidence():
    """scipy gives p = 0 for a sample without variance."""
    assert math.isnan(results.summarize([1.0, 1.0, 1.0], 1.5).p)


@pytest.mark.parametrize("target, expected", [
    (1.75, (15, 2.5)), (1.0, (40, 9.0)), (0.5, None), (9, (40, 9.0))])
def test_the_crossing_is_interpolated(target, expected):
    points = [[0, 5.0, 0], [10, 2.0, 1000], [20, 1.5, 4000], [40, 1.0, 9000]]
    assert results.find_crossing(dict(val_points=points), target) == expected


def test_verdicts_are_corrected_for_the_table():
    """Holm, by hand: 0.01 * 3 = 0.03, 0.02 * 2 = 0.04, then max(0.04, 0.03 * 1) = 0.04."""
    effects = [results.Estimate(3, mean, mean - 1, mean + 1, p)
               for mean, p in ((-1, 0.02), (1, 0.01), (-1, 0.03))]
    single = results.Estimate(1, -1, math.nan, math.nan, math.nan)
    adjusted = results.holm([None, single, *effects])
    assert all(map(math.isnan, adjusted[:2])) and adjusted[2:] == pytest.approx([0.04, 0.03, 0.04])
    assert [results.judge(*pair) for pair in zip(effects, adjusted[2:])] == ["helps", "hurts", "helps"]
    assert results.judge(effects[0], 0.05) == "no effect shown"
    assert results.judge(single, math.nan) == "one seed: no test possible"
    assert results.holm([results.Estimate(3, -1, -2, 0, 0.6)] * 2) == [1.0, 1.0]


BOTH = "1.json (seed 1) differs from 0.json (seed 0): "


@pytest.mark.parametrize("change, words", [
    (lambda result: result.update(script_sha256="0" * 64), "mixes scripts: seed 1 "),
    (lambda result: result["config"]["groups"]["matrix"].update(lr=7.0), BOTH + "matrix_lr was 0.05"),
    (lambda result: result["hardware"].update(cpu="another"), BOTH + "cpu was "),
    (lambda result: result.update(corpus_fingerprint="0" * 16), BOTH + "other data"),
    (lambda result: result.update(final_val_loss=math.nan), "diverged run: seed 1 ends at a loss of nan"),
    (lambda result: result.update(final_val_loss=1.0), "one run under two seeds: 0 and 1 both end at 1.0"),
    (lambda result: result.update(seed=0), "two losses of seed 0, 1.0 and 1.1, which are equal bits on a "),
    (lambda result: result.pop("config"), "no result (KeyError: 'config')"),
    (None, "is no record")])
def test_folders_that_are_no_record(make_record, tool, change, words):
    folder = make_record("odd", [1.0, 1.1] if change else [])
    if change:
        edit_json(folder, change)
    status, out, err = tool(validate, folder)
    assert (status, out, err.count("\n")) == (2, "", 1) and words in err and ("1.json" in err or not change)


def test_other_data_are_refused_in_each_comparison(make_record, tool, tmp_path):
    """A machine is refused for times. A text is refused for times and losses."""
    ours, text, machine, shorter = (make_record(name, [1.2, 1.5] if name != "ours" else [1.0, 1.1])
                                    for name in ("ours", "text", "machine", "shorter"))
    edit_json(text, lambda result: result.update(corpus_fingerprint="b" * 16), is_last=False)
    edit_json(machine, lambda result: result["hardware"].update(cpu="another"), is_last=False)
    edit_json(shorter, lambda result: result["config"].update(val_tokens=1), is_last=False)
    left, *others = (results.read_record(folder) for folder in (ours, text, machine, shorter))
    for other, kind, words in (
            (0, "losses", "_ours is not comparable with .*_text .other data.: "), (0, "times", "other data"),
            (2, "losses", r"val_tokens was 1, here \d+"), (1, "times", "here .*: run both on one machine")):
        with pytest.raises(results.RecordError, match=words):
            results.check_comparable(left, others[other], kind)
    refused = []
    assert leaderboard.keep_comparable([left, *others], "times", refused.append) == [left, others[2]]
    assert [line.split(" is not")[0] for line in refused] == [str(text), str(machine)]
    assert results.compare(left, others[1]).mean == pytest.approx(-0.3)
    assert tool(plot, ours, text, f"--out={tmp_path}/x")[0] == 2 and not list(tmp_path.glob("x.*"))


def test_records_on_other_data_are_left_out_of_a_track(make_record, tool):
    """Their losses are not losses on the data of the target."""
    make_record("ladder/target", [1.3, 1.31, 1.32])
    other, refused = make_record("text", [0.1, 0.11, 0.12], corpus_fingerprint="b" * 16), []
    text, _, _ = leaderboard.make_readme(other.parents[1], refused.append)
    assert "_text" not in text and "2026-01-01_ladder/target" in text and "No record reaches it" in text
    assert refused == [f"{other} has other data than track laptop: give a new --track"]
    assert tool(validate, other)[0] == 2 and tool(validate, other, "--target=0.2")[0] == 0


def test_results_of_old_and_new_scripts_are_identified(real_record):
    """A flat config and nested groups have one form. Facts that a result lacks are not compared."""
    old = results.read_record(results.RECORDS / "laptop" / "2026-11-22_frontier" / "tables").results[0]
    new = results.read_record(real_record).results[0]
    ours, theirs = results.identify(new), results.identify(old)
    assert theirs["options.matrix_lr"] == old["config"]["matrix_lr"] and ours["options.matrix_lr"] == 0.05
    assert ours["options.head_every"] == 1 and theirs["options.kernels"] and "options.derived" not in ours
    assert {"data", "script", "machine.cpu", "machine.torch", "choices.dtype"} <= ours.keys() & theirs.keys()
    assert not any(results.differences(new, new, kind) for kind in results.MAY_DIFFER)
    other = copy.deepcopy(new)
    other["config"]["groups"]["head"]["lr"], other["config"]["telemetry_every"] = 7.0, 5
    other["config"]["out"], other["config"]["seed"], other["versions"]["cudnn"] = "x", 3, "9"
    assert results.differences(new, other, "record") == ["head_lr was 0.008, here 7.0"]
    assert results.differences(new, other, "replay") == ["seed was 0, here 3", "head_lr was 0.008, here 7.0"]
    newer = copy.deepcopy(other)
    newer["versions"]["cudnn"] = "10"
    assert results.differences(other, newer, "times") == ["cudnn was 9, here 10"]
    assert not results.differences(other, newer, "losses")
    assert "other data" in results.differences(old, new, "losses")


def test_the_logs_of_this_checkout_are_no_record(make_record, monkeypatch):
    folder = make_record("a", [1.0], script=ROOT / "train_gpt.py")
    monkeypatch.setattr(results, "ROOT", folder.resolve())
    with pytest.raises(results.RecordError, match="is no record"):
        results.read_record(folder)


def test_the_target_is_the_mean_of_the_rung_that_sets_it(make_record):
    """A rung is in the folder of a ladder. A record with the name or the preset of a rung is none."""
    own = make_record("target", [9.0], preset="laptop_target")
    make_record("muon", [9.0])
    rungs = {"target": [1.001, 1.012], "muon": [3.0], "adamw_rotary": [1.5]}
    folders = [make_record(f"ladder/{name}", losses) for name, losses in rungs.items()]
    records = results.read_track("laptop", own.parents[1])
    assert [record.name for record in records] == [f"laptop/2026-01-01_{name}" for name in (
        "ladder/adamw_rotary", "ladder/muon", "ladder/target", "muon", "target")]
    assert [results.find_own_target(records[i]) for i in (-1, 2)] == [(1.01, False), (1.01, True)]
    assert results.find_target("laptop", records) == 1.01
    assert results.find_target("track_1", []) == 3.28 and results.find_target("laptop", records[3:]) is None
    (rungs,) = leaderboard.list_ladders(records).values()
    assert [rung.folder for rung in rungs] == [folders[2], folders[1]]


def test_the_record_that_sets_a_target_makes_no_claim(make_record, tool):
    """Rounding up made it pass a test against itself: 1.1752 is below 1.18 with p = 7e-05."""
    curve, losses = [[0, 5.0, 0], [8, 1.0, 1000]], [1.1751, 1.1752, 1.1753]
    setting = make_record("ladder/target", losses, val_points=curve)
    records = results.read_track("laptop", setting.parents[2])
    assert results.find_target("laptop", records) == 1.18
    assert leaderboard.find_newest(records, 1.18) is None
    record = results.read_record(setting)
    line, is_below = validate.format_record(record, *results.find_own_target(record))
    assert is_below is None and "sets the target 1.18, its mean to two decimals" in line and "p = " not in line
    assert "| sets the target |" in leaderboard.make_readme(setting.parents[2])[0]
    other = make_record("other", [1.1751, 1.1752, 1.1754], val_points=curve)
    records = results.read_track("laptop", setting.parents[2])
    assert leaderboard.find_newest(records, 1.18).folder == other


def test_the_newest_claim_is_one_that_holds(make_record):
    """With p < 0.01 below 1.39. Not if the mean is above, p is large, or the curve does not reach the target."""
    losses = dict(a_slow=[1.30, 1.31, 1.32], b_fast=[1.345, 1.35, 1.34], c_unsure=[1.2, 1.38, 1.3],
                  d_worse=[1.4, 1.41, 1.42], e_never=[1.345, 1.35, 1.34])
    for name, seeds in losses.items():
        end = 1.5 if name == "e_never" else 1.0
        folder = make_record(name, seeds, val_points=[[0, 5.39, 0], [8, end, 60_000]])
    records = results.read_track("laptop", folder.parent.parent)
    assert leaderboard.find_newest(records, 1.39).folder.name == "2026-01-01_b_fast"
    seconds = 60 * 4 / 4.39  # from 5.39 to 1.39, of the way to 1.0
    line = leaderboard.format_claim(records, 1.39)
    assert f"`2026-01-01_b_fast`](laptop/2026-01-01_b_fast), reaches it after {seconds:.1f} s" in line
    assert leaderboard.format_claim(records[2:], 1.39).startswith("No record reaches it")


def test_curves_of_records_and_of_plain_runs_are_drawn(real_record, tool, tmp_path):
    """A line is named by the options that differ."""
    first = results.read_record(real_record).results[0]
    assert plot.count_tokens(first, [0, 2, 4]) == [0, 2 * 512 / 1e6, 4 * 512 / 1e6]
    stages = [dict(tokens_per_step=100), dict(tokens_per_step=None)]
    stepped = dict(config=dict(derived=dict(stage_ends=[3, 10]), stages=stages, tokens_per_step=50))
    assert plot.count_tokens(stepped, [2, 5]) == [200 / 1e6, 400 / 1e6]
    argvs = ["--preset=smoke --seed=5", "--preset=smoke --seed=7 --matrix-lr 0.5", "--preset smoke"]
    names = plot.name_runs([first | dict(argv=argv.split()) for argv in argvs])
    assert names == ["seed=5", "seed=7, matrix_lr=0.5", first["run_id"]]
    assert plot.name_runs([first]) == [first["run_id"]]
    plain = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, result in zip(plain, (first, first | dict(run_id="b"))):
        path.write_text(json.dumps(result))
    for name, paths in dict(record=[real_record], runs=plain).items():
        assert tool(plot, *paths, f"--out={tmp_path}/{name}.svg")[0] == 0
        assert (tmp_path / f"{name}.svg").stat().st_size > 1000
    status, _, err = tool(plot, *[plain[0]] * 13, f"--out={tmp_path}/many")
    assert status == 0 and "the first 12 of 13 lines have colours" in err
    picture = (tmp_path / "many.svg").read_text()
    assert picture.count("stroke-dasharray") >= 2 * 6 and picture.count(f"stroke: {plot.GREY}") >= 2
    assert tool(plot, ROOT / "presets/d12.json", f"--out={tmp_path}/d")[0] == 2 and not (tmp_path / "d.svg").exists()


@pytest.mark.parametrize("seconds", [dict(step=3.0), {"forward and backward": 2.0, "optimizer": 1.0}])
def test_telemetry_of_new_and_old_scripts_is_drawn(seconds, tmp_path, monkeypatch):
    """Of two runs. Steps measure the groups that they update. If a killed run repeats a step, its last line counts.

    Few training losses are drawn as they are. A norm of zero is a gap.
    """
    norms = {2: ("matrix", "embed"), 4: ("matrix",), 6: ("matrix", "ngram", "embed")}
    lines = [dict(event="telemetry", step=step, loss=norm * step, seconds=seconds,
                  groups={name: dict(grad_norm=norm) for name in names} | dict(mix=dict(grad_norm=norm * (step != 4))))
             for norm in (5.0, 1.0) for step, names in norms.items()]
    paths, figures = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], []
    for path in paths:
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    plot.plot_runs(paths, tmp_path / "picture")
    drawn = [{line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}
             for panel in figures[0].axes]
    for losses, groups, _, times in (drawn[:4], drawn[4:]):
        assert losses["training"] == [[2, 2], [4, 4], [6, 6]]
        assert str(groups.pop("mix")) == "[[2.0, 1.0], [4.0, nan], [6.0, 1.0]]"
        assert groups == dict(matrix=[[2, 1], [4, 1], [6, 1]], embed=[[2, 1], [6, 1]], ngram=[[6, 1]])
        assert times == {part: [[step, 1000 * time] for step in norms] for part, time in seconds.items()}


def test_the_leaderboard_is_up_to_date(tmp_path):
    text, blocks, picture = leaderboard.make_readme(ROOT / "records")
    assert (ROOT / "records" / "README.md").read_text() == text, "run tools/leaderboard.py"
    found = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        assert leaderboard.fill_blocks(text, blocks) == text, "run tools/leaderboard.py"
        found |= {match[2] for match in leaderboard.BLOCK.finditer(text)}
    assert found == blocks.keys()
    plot.plot_ladder(*picture, tmp_path / "ladder")
    assert (tmp_path / "ladder.svg").read_text() == (ROOT / "records/ladder.svg").read_text()


def test_pictures_are_of_the_present_presets(tmp_path):
    """The last curve is `laptop` beside the newest published record. docs/run.svg is drawn from docs/run.jsonl."""
    name, (_, _, number, _) = list(leaderboard.CURVES.items())[-1]
    (then,) = {json.dumps(result["config"]["derived"]) for result in
               results.read_record(results.RECORDS / "laptop" / name).results}
    then, now = json.loads(then), gpt.derived_numbers(gpt.make_config({"preset": "laptop"}), 1)
    for fact in ("num_params", "train_tokens", "stage_ends", "flops_per_token"):
        assert then[fact] == now[fact]
    assert number == plot.read_published()[-1].record and f"record {number}, " in gpt.PRESETS["record_92"][1]
    plot.plot_runs([ROOT / "docs/run.jsonl"], tmp_path / "run")
    assert (tmp_path / "run.svg").read_text() == (ROOT / "docs/run.svg").read_text()
    end = plot.read_events(ROOT / "docs/run.jsonl")["validation"][-1]
    step, loss, time = end["step"], end["val_loss"], end["train_time_ms"]
    assert step == now["scheduled_steps"]
    assert f"step:{step}/{step} val_loss:{loss:.4f} train_time:{time}ms" in (ROOT / "README.md").read_text()


def test_each_script_exists_once():
    """In the folder of its record and in no log, so that the records can be searched."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in SCRIPTS]
    assert len(set(digests)) == len(digests) == len(list((ROOT / "records").rglob("train_gpt.py")))
    assert not [path for path in (ROOT / "records").rglob("*.txt") if "def main(" in path.read_text()]


@pytest.mark.parametrize("record", COMMITTED, ids=lambda record: record.name)
def test_a_committed_record_is_whole(record, capsys):
    """Its script makes the recorded config. Its logs are those of its results."""
    validate.check_files(record)
    for path in record.folder.glob("*.json"):
        result = json.loads(path.read_text())  # read_record has compared its hash with the script's
        argv = [*result["argv"], f"--preset={result['preset']}", "--print_config"]
        if result["track"] == "shakespeare":  # its number of steps follows from files that a clone lacks
            argv.append(f"--num_iterations={result['config']['num_iterations']}")
        assert results.load_script(record.folder).main(argv) == 0
        printed = json.loads(capsys.readouterr().out)
        printed["derived"].pop("mechanisms", None)  # since 11-25 a printed config lists what --without can leave out
        assert printed == result["config"]


def test_a_replay_compares_losses_and_machines(real_record, monkeypatch):
    """It starts at the first step, also of a resumed run. Here it runs in this process."""
    def run(command, *_, **__):
        assert command[1] == str(real_record.resolve() / "train_gpt.py")
        return SimpleNamespace(returncode=gpt.main(command[2:]), stderr="")

    monkeypatch.setattr(replay, "run_training", run)
    result = results.read_record(real_record).results[0]
    loss, other = f"{result['final_val_loss']!r} again, bit for bit", copy.deepcopy(result)
    other["versions"]["torch"] = "1.0"
    assert replay.find_differences(result) == "" and "torch was 1.0" in replay.find_differences(other)
    assert replay.find_differences({**result, "resumed_from": "x/step_2"}) == "it began with x/step_2"
    line = f"resumed at [2]: replayed from the start, {loss}"
    assert replay.replay(real_record, {**result, "resumed_at": [2]}) == (True, line)
    other = copy.deepcopy(result)
    other["val_points"][1][1] += 1e-9
    is_same, line = replay.replay(real_record, other)
    assert is_same is False and line.endswith("differs first in the validation at step 2")
    other["corpus_fingerprint"], other["choices"]["dtype"] = "b" * 16, "float16"
    is_same, line = replay.replay(real_record, other, is_forced=True)
    assert is_same is None and line.startswith("passed over (other data, dtype in use was float16, here ")


def test_the_options_of_a_replay(tmp_path):
    """A result with a key is its own preset. Of an older one most of the command line is repeated."""
    argv = ["--record=a", "--resume", "x.pt", "--time-limit=9", "--checkpoint_every", "2", "--tracker=wandb"]
    old = dict(argv=[*argv, "--seed", "1"], config=dict(logs_dir="logs", records_dir="records"))
    kept = ["--record=a", "--seed=1", "--records_dir=o", "--logs_dir=o"]
    assert replay.make_options(tmp_path, old, "o") == kept
    new = replay.make_options(tmp_path, dict(old, key="k", run_id="r"), "o")
    assert new[:2] == [f"--preset={tmp_path}/r.json", "--out=o"]


def test_what_is_replayed(make_record, tool, tmp_path, monkeypatch):
    """Runs of this machine, or with --force all. --random adds runs. To replay nothing is a failure."""
    replayed = []
    monkeypatch.setattr(replay, "replay", lambda folder, result, is_forced, _: (
        replayed.append((folder.name, result["seed"])), (True, ""))[1])
    here, there = make_record("here", [1.0, 1.1]), make_record("there", [1.0, 1.1])
    edit_json(there, lambda result: result["hardware"].update(cpu="another"), is_last=False)
    for args in ([there], ["--random=1", "--records_dir", tmp_path / "none"], [here, "--most_seconds=0"]):
        status, _, err = tool(replay, *args)
        assert (status, err.count("\n")) == (1, 1) and "nothing was replayed" in err and not replayed
    assert tool(replay, here, there)[1].endswith("\n2 equal bit for bit, 0 not, 2 passed over\n")
    assert replayed == [(here.name, 0), (here.name, 1)]
    assert tool(replay, there, "--force")[0] == 0 and replayed[2:] == [(there.name, 0), (there.name, 1)]
    shutil.copytree(tmp_path / "laptop", tmp_path / "only/laptop")
    (tmp_path / "only/laptop" / here.name / "1.json").unlink()
    for _ in range(3):  # one of three runs fits this machine
        del replayed[:]
        assert tool(replay, there, "--random=2", f"--records_dir={tmp_path}/only")[0] == 0
        assert replayed == [(here.name, 0)]
    assert tool(replay, "--all", f"--records_dir={tmp_path}/only")[1].count("passed over (") == 2
    monkeypatch.setattr(replay, "replay", lambda *_: (False, "another loss"))
    assert tool(replay, here)[0] == 1


def test_a_file_that_cannot_be_written_is_one_line(tmp_path, capsys):
    path = tmp_path / "nowhere" / "curves.svg"
    assert common.run_guarded(lambda: path.write_text("")) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors.endswith(f"error: {path}: No such file or directory\n")


def test_runs_of_a_tool_end_with_the_first_failure(tmp_path):
    """Runs of an earlier call are left out."""
    source = b"import sys; open(sys.argv[1], 'w'); sys.exit(sys.argv[1] == 'b')"
    runs = [(name, 0, [name]) for name in "eabcd"]
    with pytest.raises(results.RecordError, match="b --seed=0 ended with status 1: .*start x.py again"):
        results.run_missing(runs, lambda name: {0} if name == "e" else set(), source, "x.py", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_running_process(number, tmp_path, capfd):
    """The run sends the signal to the tool, which ends it and exits with one line."""
    source = f"import os, time; os.kill(os.getppid(), {int(number)}); time.sleep(3000)".encode()

    def call():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv[0] = "x.py"
        sys.exit(common.run_guarded(lambda: results.run_missing(
            [("a", 0, [])], lambda _: set(), source, "x.py", tmp_path), "interrupted. Runs are kept"))

    process = multiprocessing.Process(target=call)
    process.start()
    process.join(1000)
    assert process.exitcode == 128 + number
    assert capfd.readouterr().err.splitlines()[-1] == "x.py: interrupted. Runs are kept"


@pytest.mark.slow
def test_the_ladder_goes_on_where_it_was_interrupted(shards, tmp_path):
    """The ladder's script makes a missing run, and the run is in its rung without a script."""
    extra = ["--num_iterations=1", "--val_tokens=8192", "--val_loss_every=0", "--num_layers=1"]
    command = [str(ROOT / "tools/ladder.py"), "--only=target,muon", "--seeds=1", "--end_seeds=1"]
    command += [f"--logs_dir={tmp_path}/trials", f"--extra={' '.join([*extra, *data_args(shards)])}"]
    done = launch(command, ROOT)
    assert done.returncode == 0, done.stderr
    (ladder,) = (tmp_path / "trials" / "laptop").iterdir()
    assert sorted(path.name for path in ladder.iterdir()) == ["ladder.toml", "muon", "target", "train_gpt.py"]
    presets = {name: results.read_record(ladder / name).results[0]["preset"] for name in ("muon", "target")}
    assert presets == dict(target="laptop_target", muon="laptop_2024-10-04_muon")
    kept, lost = (next((ladder / name).glob("*.json")) for name in ("target", "muon"))
    log = kept.with_suffix(".txt").read_text()
    assert json.loads(log.split("\n=")[0])["argv"][1] == "--record=target" and "def main(" not in log
    lost.unlink()
    assert launch(command, ROOT).returncode == 0
    assert list((ladder / "target").glob("*.json")) == [kept] and len(list(lost.parent.glob("*.json"))) == 1


def test_the_table_of_a_ladder():
    """The numbers of the newest ladder, computed again."""
    records = results.read_track("laptop")
    (_, folder), ladders = leaderboard.list_ladders(records), leaderboard.list_ladders(records)
    rungs = {record.folder.name: record for record in ladders[folder]}
    assert ladder_tool.plan_runs(results.read_ladder(folder), 0, 1) == [
        ("record_32", "laptop_32", 0), ("tables", "laptop", 0)]
    target, setting = results.find_target("laptop", records), results.find_setting(records)
    first, last = (list(rungs[name].losses.values()) for name in ("record_32", "tables"))
    assert setting is rungs["record_32"] and target == round(statistics.mean(first), 2)
    text = leaderboard.format_ladder(folder, ladders[folder], setting)
    time = statistics.median(results.find_crossing(result, target)[1] for result in rungs["tables"].results)
    gap = statistics.mean(rungs["tables"].losses[seed] - loss for seed, loss in rungs["optimizer"].losses.items())
    assert f"| 8 | {statistics.mean(last):.3f} |" in text and f" | {time:.0f} | {gap:+.3f} [" in text
    assert "| 8 | 1.031 | 0.113 | sets the target |" in text
