"""Record folders and their tools: statistics, leaderboard, replay, ablation, the ladder's runner."""

import ast
import copy
import importlib.util
import json
import math
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, data_args, run_script

sys.path.insert(0, str(ROOT / "records"))
import make_leaderboard  # noqa: E402
import plot  # noqa: E402
import replay  # noqa: E402
import results  # noqa: E402
import run_ladder  # noqa: E402
import validate  # noqa: E402

COMMITTED = sorted(path.parent for path in (ROOT / "records").glob("*/*/train_gpt.py"))
ALLOWED = {"torch", "numpy", "huggingface_hub", "tqdm", "triton", "tiktoken", *sys.stdlib_module_names}


def run_tool(name, *args):
    command = [sys.executable, str(ROOT / "records" / name), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def real_record(shards, tmp_path_factory):
    """A record that a run has left."""
    out = tmp_path_factory.mktemp("records")
    args = [
        "--preset=smoke",
        "--record=tiny",
        "--num_iterations=4",
        "--val_loss_every=2",
        "--val_tokens=1024",
    ]
    done = run_script([*args, *data_args(shards), f"--records_dir={out}", f"--logs_dir={out}/logs"], out)
    assert done.returncode == 0, done.stderr
    (folder,) = (out / "laptop").iterdir()
    return folder


@pytest.fixture
def make_record(real_record, tmp_path):
    """Copies of the record under other names, seeds and losses."""
    (source,) = real_record.glob("*.json")
    result = json.loads(source.read_text())

    def make(name, losses, **changes):
        folder = tmp_path / "laptop" / f"2026-01-01_{name}"
        folder.mkdir(parents=True)
        shutil.copy(real_record / "train_gpt.py", folder)
        for seed, loss in enumerate(losses):
            made = copy.deepcopy(result) | dict(final_val_loss=loss, seed=seed, **changes)
            made["config"]["seed"] = seed
            (folder / f"{name}{seed}.json").write_text(json.dumps(made))
        return folder

    return make


def edit_json(folder, change):
    path = sorted(folder.glob("*.json"))[-1]
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))


def test_validate_against_a_table_of_students_t(make_record):
    """Mean 1.1, sd 0.1, n 3: t = -0.2 / (0.1 / sqrt 3) = -3.464 at 2 degrees of freedom, p = 0.0371 below 1.3; -17.3
    below 2.1, p = 0.0017."""
    folder = make_record("three", [1.0, 1.1, 1.2])
    line, is_claim = validate.format_record(results.read_record(folder), 1.3)
    assert "n = 3" in line and "1.1000 +- 0.1000 (best 1.0000)" in line and not is_claim
    assert results.summarize([1.0, 1.1, 1.2], 1.3).p == pytest.approx(0.0371, abs=1e-4)
    assert results.summarize([1.0, 1.1, 1.2], 2.1).p == pytest.approx(0.00166, abs=1e-5)
    assert validate.format_record(results.read_record(folder), 2.1)[1]
    done = run_tool("validate.py", folder, "--target=1.3")
    assert done.returncode == 1 and "p = 0.037: not shown to be below" in done.stdout
    assert run_tool("validate.py", folder, "--target=2.1").returncode == 0


def test_paired_comparison(make_record):
    """Differences -0.2, -0.3, -0.4: mean -0.3, sd 0.1, half width 4.303 * 0.1 / sqrt 3 = 0.2484."""
    ours, theirs = make_record("ours", [1.0, 1.1, 1.2]), make_record("theirs", [1.2, 1.4, 1.6, 9.0])
    effect = results.compare(*(results.read_record(folder).losses for folder in (ours, theirs)))
    assert (effect.n, effect.mean) == (3, pytest.approx(-0.3))
    assert (effect.low, effect.high) == (pytest.approx(-0.5484, abs=1e-4), pytest.approx(-0.0516, abs=1e-4))
    line = validate.format_comparison(results.read_record(ours), results.read_record(theirs))
    assert "-0.3000 [-0.5484, -0.0516] over 3 seeds" in line and "1.000 of its time" in line
    edit = make_record("elsewhere", [1.0])
    edit_json(edit, lambda result: result["hardware"].update(cpu="another"))
    done = run_tool("validate.py", ours, f"--baseline={edit}", "--target=2")
    assert done.returncode == 2 and "different machines (cpu" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda result: result.update(script_sha256="0" * 64), "mixes scripts"),
        (lambda result: result["config"].update(matrix_lr=7.0), "mixes configs"),
        (lambda result: result["hardware"].update(cpu="another"), "mixes machines"),
        (None, "holds no result"),
    ],
)
def test_folders_that_are_no_record(make_record, change, words):
    folder = make_record("odd", [1.0, 1.1] if change else [])
    if change:
        edit_json(folder, change)
    done = run_tool("validate.py", folder)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and words in done.stderr


def test_runs_of_one_seed_count_once(make_record):
    folder = make_record("again", [1.0, 1.1])
    edit_json(folder, lambda result: (result.update(seed=0), result["config"].update(seed=0)))
    record = results.read_record(folder)
    assert record.losses == {0: 1.0} and record.num_replays == 1


@pytest.mark.parametrize("target, expected", [(1.75, (15, 2.5)), (1.0, (40, 9.0)), (0.5, None), (9, None)])
def test_the_crossing_is_interpolated(target, expected):
    points = [[0, 5.0, 0], [10, 2.0, 1000], [20, 1.5, 4000], [40, 1.0, 9000]]
    assert results.find_crossing(dict(val_points=points), target) == expected


@pytest.mark.parametrize(
    "low, high, words",
    [(-2, -1, "helps"), (-1, 1, "no effect shown"), (1, 2, "hurts"), (math.nan, math.nan, "no")],
)
def test_a_rung_is_judged_by_its_interval(low, high, words):
    assert make_leaderboard.judge(results.Effect(3, (low + high) / 2, low, high, 0.5)).startswith(words)


def test_the_target_is_the_mean_of_the_records_that_set_it(make_record):
    make_record("target", [1.001, 1.012], preset="laptop_target")
    make_record("aaa", [9.0], preset="laptop_target")  # somebody's own try with the same preset
    make_record("muon", [3.0], preset="laptop_2024-10-04_muon")
    folder = make_record("adamw_rotary", [1.5], preset="laptop_2024-06-06_adamw_rotary").parent.parent
    records = results.read_track("laptop", folder)
    assert results.find_target("laptop", records) == 1.01
    assert results.find_target("track_1", []) == 3.28 and results.find_target("laptop", records[:1]) is None
    rungs = make_leaderboard.read_rungs(records, 1.01)
    assert [rung.name for rung in rungs] == ["2024-06-06_adamw_rotary", "2024-10-04_muon"]
    assert rungs[1].effect.mean == 1.5


def test_the_fastest_claim_is_one_that_holds(make_record):
    """Below 1.39 with p < 0.01; faster ones whose mean is above, or whose p is not small, do not count."""
    losses = dict(slow=[1.30, 1.31, 1.32], fast=[1.345, 1.35, 1.34], unsure=[1.2, 1.38, 1.3], worse=[1.4] * 3)
    times = dict(slow=90_000, fast=60_000, unsure=50_000, worse=40_000)
    for name in losses:
        folder = make_record(name, losses[name], train_time_ms=times[name])
    records = results.read_track("laptop", folder.parent.parent)
    fastest = make_leaderboard.find_fastest(records, 1.39)
    assert fastest.folder.name == "2026-01-01_fast" and make_leaderboard.time_runs(fastest) == 60
    assert make_leaderboard.find_fastest([r for r in records if r.folder.name.endswith("e")], 1.39) is None


def test_curves_are_drawn_the_same_twice(real_record, tmp_path):
    for name in ("a", "b"):
        plot.plot_curves([results.read_record(real_record)], 3.0, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    result = results.read_record(real_record).results[0]
    assert plot.count_tokens(result) == [0, 2 * 2048 / 1e6, 4 * 2048 / 1e6]


def test_the_leaderboard_is_what_its_json_files_make(tmp_path):
    text, lines, rungs, setting, target = make_leaderboard.make_readme(ROOT / "records")
    assert (ROOT / "records" / "README.md").read_text() == text, "run records/make_leaderboard.py"
    readme = (ROOT / "README.md").read_text()
    assert make_leaderboard.replace_marked(readme, lines) == readme, "run records/make_leaderboard.py"
    plot.plot_ladder(rungs, setting, target, tmp_path / "ladder")
    assert (tmp_path / "ladder.svg").read_text() == (ROOT / "records" / "ladder.svg").read_text()


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_a_committed_record_is_whole(folder, tmp_path):
    """Its json belongs to its script; the script parses, imports what it may, and makes the recorded config."""
    record = results.read_record(folder)  # compares the hashes
    source = (folder / "train_gpt.py").read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        )
    }
    assert imported <= ALLOWED
    spec = importlib.util.spec_from_file_location("recorded", folder / "train_gpt.py")
    recorded = sys.modules["recorded"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorded)
    assert record.results
    for path in folder.glob("*.json"):
        result, log = json.loads(path.read_text()), path.with_suffix(".txt").read_text()
        cfg = recorded.make_config(recorded.parse_argv(result["argv"])[0])
        assert recorded.resolved_dict(cfg, result["hardware"]["ranks"]) == result["config"]
        step, loss, milliseconds = result["val_points"][-1]
        assert log.startswith(f"{source}\n{'=' * 100}\n") and loss == result["final_val_loss"]
        assert f"step:{step}/{step} val_loss:{loss:.4f} train_time:{milliseconds}ms" in log


@pytest.mark.slow
def test_replay_tells_the_same_from_another(real_record, tmp_path):
    result = results.read_record(real_record).results[0]
    result["hardware"]["threads"] = torch.get_num_threads()  # one here, two in the process that made it
    assert replay.find_differences(result) == ""
    is_same, line = replay.replay(real_record, result)
    assert is_same and line.startswith(repr(result["final_val_loss"]))
    other = copy.deepcopy(result)
    other["val_points"][1][1] += 1e-9
    is_same, line = replay.replay(real_record, other)
    assert not is_same and "step 2 or before" in line
    other["versions"]["torch"] = "1.0"
    assert "torch 1.0, here 2." in replay.find_differences(other)
    assert run_tool("replay.py").returncode == 2


@pytest.mark.slow
def test_ablation_runs_once_and_pairs_seeds(shards, tmp_path):
    extra = " ".join(["--num_iterations=2", "--val_tokens=1024", "--val_loss_every=0", *data_args(shards)])
    args = [
        "--preset=smoke",
        "--mechanisms=muon",
        "--seeds=1",
        f"--logs_dir={tmp_path}",
        f"--extra={extra}",
    ]
    done = run_tool("ablate.py", *args)
    assert done.returncode == 0, done.stderr
    found = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
    assert found["muon"]["config"]["without"] == "muon"
    effect = found["muon"]["final_val_loss"] - found["nothing"]["final_val_loss"]
    assert effect != 0 and f"| muon | {effect:+.4f} |" in done.stdout
    assert run_tool("ablate.py", *args).stdout == done.stdout and len(list(tmp_path.rglob("*.json"))) == 2
    done = run_tool("ablate.py", "--mechanisms=softcup")
    assert done.returncode == 2 and "did you mean softcap" in done.stderr


@pytest.mark.slow
def test_the_ladder_goes_on_where_it_was_interrupted(shards, tmp_path):
    extra = ["--num_iterations=1", "--val_tokens=8192", "--val_loss_every=0", "--num_layers=1"]
    args = ["--only=target,muon", "--seeds=1", "--end_seeds=1", f"--records_dir={tmp_path}"]
    args.append(f"--extra={' '.join([*extra, *data_args(shards)])}")
    done = run_tool("run_ladder.py", *args)
    assert done.returncode == 0, done.stderr
    folders = {path.name[11:]: path for path in (tmp_path / "laptop").iterdir()}
    assert {name: results.read_record(path).results[0]["preset"] for name, path in folders.items()} == dict(
        target="laptop_target", muon="laptop_2024-10-04_muon"
    )
    (kept,) = folders["target"].glob("*.json")
    next(folders["muon"].glob("*.json")).unlink()
    assert run_tool("run_ladder.py", *args).returncode == 0
    assert (
        list(folders["target"].glob("*.json")) == [kept] and len(list(folders["muon"].glob("*.json"))) == 1
    )
    (folders["muon"] / "train_gpt.py").write_text("another")
    done = run_tool("run_ladder.py", *args)
    assert done.returncode == 2 and "of another script: go on with --script=" in done.stderr
    done = run_tool("run_ladder.py", "--only=target,moun")
    assert done.returncode == 2 and "did you mean muon" in done.stderr


def test_the_plan_of_the_ladder():
    """Seed by seed over all rungs; the first and the last one more often."""
    plan = run_ladder.plan_runs(3, 8, [])
    presets = [f"laptop_{name}" for name in run_ladder.gpt.LADDER]
    assert plan[:25] == [("laptop_target", 0), *((preset, 0) for preset in presets)]
    assert len(plan) == 3 * 25 + 5 * 2 and len(set(plan)) == len(plan)
    assert plan[-2:] == [(presets[0], 7), (presets[-1], 7)]
    assert [results.name_rung(preset) for preset in presets[:2]] == ["adamw_rotary", "muon"]
