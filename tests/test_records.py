"""Record folders and their tools: statistics, leaderboard, replay, ablation, the ladder's runner."""

import ast
import copy
import hashlib
import json
import math
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, data_args, gpt, run_script

sys.path.insert(0, str(ROOT / "records"))
import ablate  # noqa: E402
import make_leaderboard  # noqa: E402
import plot  # noqa: E402
import replay  # noqa: E402
import results  # noqa: E402
import run_ladder  # noqa: E402
import validate  # noqa: E402

SCRIPTS = sorted((ROOT / "records").glob("*/*/train_gpt.py"))
COMMITTED = results.read_track("*")
ALLOWED = {"torch", "numpy", "huggingface_hub", "tqdm", "triton", "tiktoken", *sys.stdlib_module_names}


def run_tool(name, *args):
    command = [sys.executable, str(ROOT / "records" / name), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def tool(capsys, monkeypatch):
    """Run a tool here as run_tool() does in a process: (status, output, what it says on stderr)."""

    def run(module, *args):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, args)])
        capsys.readouterr()
        return results.run_guarded(module.main), *capsys.readouterr()

    return run


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

    def make(name, losses, script=real_record / "train_gpt.py", **changes):
        """A record, or for a name like ladder/muon a rung of that script."""
        folder = tmp_path / "laptop" / f"2026-01-01_{name}"
        folder.mkdir(parents=True)
        shutil.copy(script, folder.parent if "/" in name else folder)
        changes["script_sha256"] = hashlib.sha256(script.read_bytes()).hexdigest()
        for seed, loss in enumerate(losses):
            made = copy.deepcopy(result) | dict(final_val_loss=loss, seed=seed, **changes)
            made["config"]["seed"] = seed
            (folder / f"{seed}.json").write_text(json.dumps(made))
        return folder

    return make


def edit_json(folder, change):
    path = sorted(folder.glob("*.json"))[-1]
    result = json.loads(path.read_text())
    change(result)
    path.write_text(json.dumps(result))


def test_validate_against_a_table_of_students_t(make_record, tool):
    """Mean 1.1, sd 0.1, n 3: t = -0.2 / (0.1 / sqrt 3) = -3.464 at 2 degrees of freedom, p = 0.0371 below 1.3; -17.3
    below 2.1, p = 0.0017."""
    folder = make_record("three", [1.0, 1.1, 1.2])
    line, is_claim = validate.format_record(results.read_record(folder), 1.3)
    assert "n = 3" in line and "1.1000 +- 0.1000 (best 1.0000)" in line and not is_claim
    assert results.summarize([1.0, 1.1, 1.2], 1.3).p == pytest.approx(0.0371, abs=1e-4)
    assert results.summarize([1.0, 1.1, 1.2], 2.1).p == pytest.approx(0.00166, abs=1e-5)
    assert validate.format_record(results.read_record(folder), 2.1)[1]
    status, out, _ = tool(validate, folder, "--target=1.3")
    assert status == 1 and "p = 0.037: not shown to be below" in out
    assert tool(validate, folder, "--target=2.1")[0] == 0


def test_one_seed_is_no_test(make_record, tool):
    """Neither a claim nor a failure, and no nan; beside a folder that fails its test the status is that one's."""
    one, three = make_record("one", [1.0]), make_record("three", [1.0, 1.1, 1.2])
    status, out, err = tool(validate, one, "--target=1.3", f"--baseline={three}")
    assert (status, err) == (0, "") and "nan" not in out
    first, second = out.splitlines()
    assert first.startswith(f"{one}: n = 1, loss 1.0000, ")
    assert first.endswith(" s; target 1.3; one seed: no test possible")
    assert second.endswith("loss +0.0000 over one seed: no test possible; 1.000 of its time")
    status, out, _ = tool(validate, three)
    assert status == 0 and out.endswith("; no target yet\n") and "1.1000 +- 0.1000 (best 1.0000)" in out
    assert tool(validate, one, three, "--target=1.05")[0] == 1
    assert tool(validate, three, "--target=0")[0] == 1  # a target like any other


def test_paired_comparison(make_record, tool):
    """Differences -0.2, -0.3, -0.4: mean -0.3, sd 0.1, half width 4.303 * 0.1 / sqrt 3 = 0.2484."""
    ours, theirs = make_record("ours", [1.0, 1.1, 1.2]), make_record("theirs", [1.2, 1.4, 1.6, 9.0])
    effect = results.compare(*(results.read_record(folder).losses for folder in (ours, theirs)))
    assert (effect.n, effect.mean) == (3, pytest.approx(-0.3))
    assert (effect.low, effect.high) == (pytest.approx(-0.5484, abs=1e-4), pytest.approx(-0.0516, abs=1e-4))
    line = validate.format_comparison(results.read_record(ours), results.read_record(theirs))
    assert "-0.3000 [-0.5484, -0.0516] over 3 seeds" in line and "1.000 of its time" in line
    edit = make_record("elsewhere", [1.0])
    edit_json(edit, lambda result: result["hardware"].update(cpu="another"))
    status, _, err = tool(validate, ours, f"--baseline={edit}", "--target=2")
    assert status == 2 and "different machines (cpu" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda result: result.update(script_sha256="0" * 64), "mixes scripts: seed 1 "),
        (lambda result: result["config"].update(matrix_lr=7.0), "mixes configs: seed 1 differs from seed 0 in matrix_lr"),
        (lambda result: result["hardware"].update(cpu="another"), "mixes machines: seed 1 differs from seed 0 in cpu"),
        (lambda result: result.update(corpus_fingerprint="0" * 16), "mixes data: seed 1 differs from seed 0 in corpus_f"),
        (lambda result: result.pop("config"), "no result (KeyError: 'config'): 1.json; put"),
        (None, "holds no result"),
    ],
)
def test_folders_that_are_no_record(make_record, tool, change, words):
    folder = make_record("odd", [1.0, 1.1] if change else [])
    if change:
        edit_json(folder, change)
    status, out, err = tool(validate, folder)
    assert (status, out, err.count("\n")) == (2, "", 1) and words in err and "1.json" in err or not change


def test_a_damaged_result_is_named(make_record, tool):
    folder = make_record("odd", [1.0, 1.1])
    for content in (b"", b"{", b"[]", b"\xff", b"7"):
        (folder / "1.json").write_bytes(content)
        status, _, err = tool(validate, folder)
        assert status == 2 and err.count("\n") == 1 and "1.json; put its files" in err


@pytest.mark.parametrize(
    "module, option, words",
    [
        (ablate, "--seeds=0", "--seeds: 0 is not a whole number of at least 1: see --help"),
        (ablate, "--jobs=two", "--jobs: two is not a whole number of at least 1"),
        (run_ladder, "--seeds=-1", "--seeds: -1 is not a whole number of at least 1"),
        (run_ladder, "--end_seeds=1.5", "--end_seeds: 1.5 is not a whole number of at least 1"),
        (ablate, "--extra='a", "--extra: invalid split value"),
        (ablate, "--extra=--without=softcap", "--extra=--without=softcap would replace what a run here is told"),
        (run_ladder, "--extra='a", "--extra: invalid split value"),
        (replay, "--random=-1", "--random: -1 is not a whole number of at least 1"),
        (replay, "--most_seconds=nan", "--most_seconds: nan is not a number of at least 0"),
        (replay, "--rand=1", "unrecognized arguments: --rand=1"),
        (validate, "--target=low", "--target: low is not a number of at least 0"),
        (plot, "--a\nb=x", "the following arguments are required: paths"),
        (validate, "--base=x", "the following arguments are required: folders"),
    ],
)
def test_options_that_no_tool_takes(module, option, words, tool, monkeypatch):
    """One line and status 2, and nothing runs; no option is cut short."""
    monkeypatch.setattr(results, "run_missing", None)
    status, out, err = tool(module, option)
    assert (status, out, err.count("\n")) == (2, "", 1) and words in err
    assert err.startswith(f"{module.__name__}.py: error: ")


@pytest.mark.parametrize("args", [["records/laptop/2026-11-21_first"], ["--help"]])
def test_a_reader_may_leave_early(args):
    """As head does: nothing on stderr, and the status that SIGPIPE would leave."""
    command = shlex.join([sys.executable, "records/validate.py", *args]) + " | true; echo ${PIPESTATUS[0]}"
    for unbuffered in ("", "1") if args != ["--help"] else ("",):
        env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=env)
        assert (done.stdout, done.stderr) == ("141\n", "")


def test_output_that_cannot_be_written(tmp_path):
    """A full disk behind stdout; a locale without the letters of a folder."""
    folder = ROOT / "records" / "laptop" / "2026-11-21_first"
    command = [sys.executable, str(ROOT / "records" / "validate.py"), str(folder)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left on device: check" in done.stderr
    odd = tmp_path / "laptop" / "\u0416"
    shutil.copytree(folder, odd)
    env = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([*command[:2], str(odd)], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "set PYTHONIOENCODING=utf-8" in done.stderr


def test_runs_of_one_seed_count_once(make_record):
    folder = make_record("again", [1.0, 1.1])
    edit_json(folder, lambda result: (result.update(seed=0), result["config"].update(seed=0)))
    record = results.read_record(folder)
    assert record.losses == {0: 1.0} and record.num_replays == 1


def test_what_an_older_result_leaves_to_its_log():
    """The type of activations decides bits, and stood only there."""
    folder = ROOT / "records" / "laptop" / "2026-11-22_frontier" / "tables"
    assert "activations" not in json.loads(next(folder.glob("*.json")).read_text())["hardware"]
    assert {r["hardware"]["activations"] for r in results.read_record(folder).results} == {"bfloat16"}


def test_results_with_the_names_of_before_are_read(real_record, tmp_path, tool):
    """Options of the frozen scripts have other names now. The script in the root refuses them, the tools read them."""
    ladder = results.RECORDS / "laptop" / "2026-11-22_frontier"
    first, last = ladder / "record_32", ladder / "tables"
    result = results.read_record(last).results[0]
    old, new = {"kernels", "x0_shortcut", "fp8_head_max", "row_start"}, {"fast", "x0_mix", "fp8_head_amax", "sequence_start"}
    assert old <= result["config"].keys() and not new & result["config"].keys()
    assert "gates_at" in result["config"]["layers"][0]
    ours = results.read_record(real_record).results[0]["config"]
    assert new <= ours.keys() and not old & ours.keys() and "gates_from" in ours["layers"][0]
    for name in old:
        assert gpt.main([f"--{name}={result['config'][name]}", "--print_config"]) == 2
    assert old <= results.settings(result).keys()
    status, out, err = tool(validate, last, f"--baseline={first}")
    assert (status, err) == (0, "") and out.count("\n") == 2
    status, _, err = tool(plot, first, last, f"--out={tmp_path}/curves")
    assert (status, err) == (0, "") and (tmp_path / "curves.svg").stat().st_size > 1000
    assert plot.count_tokens(last, result)[-1] == pytest.approx(result["config"]["derived"]["train_tokens"] / 1e6)
    assert "torch 1.0, here 2." in replay.find_differences({**result, "versions": {"torch": "1.0"}})
    assert set(ablate.read_losses(last)) == set(results.read_record(last).losses)


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


def test_the_target_is_the_mean_of_the_rung_that_sets_it(make_record):
    """A rung is what lies in a ladder's folder: somebody's own try of a rung's name, or of its preset, is none."""
    script = run_ladder.LADDER / "train_gpt.py"
    own = make_record("target", [9.0], preset="laptop_target")
    make_record("muon", [9.0], script)
    rungs = {"target": [1.001, 1.012], "muon": [3.0], "adamw_rotary": [1.5]}
    folders = [make_record(f"ladder/{name}", losses, script) for name, losses in rungs.items()]
    records = results.read_track("laptop", own.parents[1])
    assert [record.name for record in records] == [f"laptop/2026-01-01_{name}" for name in (
        "ladder/adamw_rotary", "ladder/muon", "ladder/target", "muon", "target")]
    assert results.find_target("laptop", records) == results.find_own_target(records[-1]) == 1.01
    assert results.find_target("track_1", []) == 3.28 and results.find_target("laptop", records[3:]) is None
    found = make_leaderboard.read_rungs(records, folders[0].parent, 1.01)
    assert [rung.name for rung in found] == ["2024-06-06_adamw_rotary", "2024-10-04_muon"]
    assert found[1].effect.mean == 1.5 and found[1].minutes == 24.9


def test_the_target_of_a_rung_is_its_ladders_however_it_is_named(monkeypatch):
    monkeypatch.chdir(run_ladder.LADDER.parent)
    for folder in (run_ladder.LADDER / "yarn", Path(run_ladder.LADDER.name, "yarn")):
        assert results.find_own_target(results.read_record(folder)) == 1.39


def test_a_readme_without_a_place_for_the_lines_is_refused_first(tmp_path, tool):
    (tmp_path / "README.md").write_text("mine")
    status, _, err = tool(make_leaderboard, f"--records_dir={tmp_path}", f"--readme={tmp_path}/README.md")
    assert status == 2 and "has no place for the lines" in err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_the_fastest_claim_is_one_that_holds(make_record):
    """Below 1.39 with p < 0.01; sooner ones whose mean is above, or whose p is not small, do not count, nor do
    one that never gets there by its curve and those of other machines."""
    losses = dict(careful=[1.30, 1.31, 1.32], fast=[1.345, 1.35, 1.34], unsure=[1.2, 1.38, 1.3], worse=[1.4, 1.41, 1.42])
    times = dict(careful=90_000, fast=60_000, unsure=50_000, worse=40_000)
    for name in losses:
        folder = make_record(name, losses[name], val_points=[[0, 5.39, 0], [8, 1.0, times[name]]])
    make_record("never", losses["fast"], val_points=[[0, 5.39, 0], [8, 1.5, 1000]])
    machine = dict(device="cpu", ranks=1, threads=9, cpu="another")
    make_record("elsewhere_x", losses["fast"], val_points=[[0, 5.39, 0], [8, 1.0, 1000]], hardware=machine)
    records = results.read_track("laptop", folder.parent.parent)
    fastest = make_leaderboard.find_fastest(records, 1.39)
    assert [record.folder.name[11:] for record in fastest] == ["fast", "elsewhere_x"]
    line, other = make_leaderboard.format_claims(records, 1.39).splitlines()
    seconds = 60 * 4 / 4.39  # from 5.39 to 1.39, of the way to 1.0
    assert f"`2026-01-01_fast`](laptop/2026-01-01_fast) reaches it after {seconds:.0f} s" in line
    assert "9 threads of another, PyTorch" in other
    none = [r for r in records if r.folder.name.endswith("e")]
    assert make_leaderboard.find_fastest(none, 1.39) == []
    assert make_leaderboard.format_claims(none, 1.39).startswith("No record reaches it")


def test_curves_are_drawn_the_same_twice(real_record, tmp_path):
    for name in ("a", "b"):
        plot.plot_curves([results.read_record(real_record)], 3.0, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    result = results.read_record(real_record).results[0]
    assert plot.count_tokens(real_record, result) == [0, 2 * 2048 / 1e6, 4 * 2048 / 1e6]


@pytest.mark.parametrize("name, stem", [("lr_0.03", "lr_0.03"), ("curves", "curves"), ("a.b.png", "a.b"), ("c.svg", "c")])
def test_a_pictures_name_keeps_its_points(name, stem, real_record, tmp_path, tool):
    status, out, _ = tool(plot, real_record, f"--out={tmp_path / name}")
    assert status == 0 and out == f"{tmp_path / stem}.png and {tmp_path / stem}.svg\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{stem}.png", f"{stem}.svg"]


def test_a_picture_that_cannot_be_written(real_record, tmp_path, tool):
    """No folder; no more than 10,000 bytes of a file: the old picture stays."""
    status, _, err = tool(plot, real_record, f"--out={tmp_path}/no/such/x")
    assert status == 2 and err.count("\n") == 1
    assert f"{tmp_path}/no/such/x.svg cannot be written (No such file or directory): choose another place" in err
    for name in ("", ".", "/"):
        status, _, err = tool(plot, real_record, f"--out={name}")
        assert status == 2 and err.count("\n") == 1 and "is no name for a picture" in err
    (tmp_path / "x.svg").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        status, _, err = tool(plot, real_record, f"--out={tmp_path}/x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2 and "x.svg cannot be written (File too large)" in err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.svg": "old"}


@pytest.mark.parametrize("folder, tokens", [("first", 480 * 4096), ("ladder/muon", 160 * 5120)])
def test_tokens_are_counted_by_the_script_that_ran(folder, tokens):
    """The oldest script has no config_from_dict, and no script but its own has a ladder's presets."""
    record = results.read_record(ROOT / "records" / "laptop" / f"2026-11-21_{folder}")
    counted = plot.count_tokens(record.folder, record.results[0])
    steps = [step for step, _, _ in record.results[0]["val_points"]]
    assert counted == pytest.approx([step / steps[-1] * tokens / 1e6 for step in steps])


def test_the_leaderboard_is_what_its_json_files_make(tmp_path):
    text, lines, picture = make_leaderboard.make_readme(ROOT / "records")
    assert (ROOT / "records" / "README.md").read_text() == text, "run records/make_leaderboard.py"
    readme = (ROOT / "README.md").read_text()
    assert make_leaderboard.replace_marked(readme, lines) == readme, "run records/make_leaderboard.py"
    plot.plot_ladder(*picture, tmp_path / "ladder")
    _, blocks = make_leaderboard.read_blocks(results.read_track("*", ROOT / "records"))
    plot.plot_times(blocks, tmp_path / "frontier")
    for name in ("ladder.svg", "frontier.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "records" / name).read_text()


def test_what_is_published_agrees_with_the_ladder():
    """Days in their order, and every rung on the day and with the minutes that its own script gives it."""
    published = plot.read_published()
    days = [record.day for record in published]
    assert days == sorted(days) and len({record.record for record in published}) == len(published)
    known = {(record.day.isoformat(), record.minutes) for record in published}
    ladder = results.load_script(run_ladder.LADDER).LADDER
    assert {(name[:10], rung.minutes) for name, rung in ladder.items()} <= known
    by_number = {record.record: record for record in published}
    assert (by_number[1].minutes, by_number[32].minutes, published[-1].minutes) == (45, 2.625, 1.23)


@pytest.fixture
def picture(monkeypatch, tmp_path):
    """The figure at the top of the README, with its curves."""
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    curves, target = make_leaderboard.make_readme(ROOT / "records")[2]
    plot.plot_ladder(curves, target, tmp_path / "ladder")
    yield figures[0], curves, target
    plot.plt.close(figures[0])


def test_the_picture_shows_medians_of_all_seeds(picture):
    """Typed from the json files by hand; what ran on another machine is dashed, the target a line of its own."""
    figure, curves, target = picture
    published, losses = figure.axes
    *lines, target_line = losses.get_lines()
    assert [curve.label for curve in curves] == [
        "AdamW of 2024", "record 32", "with frontier's blocks", "laptop now, slower cores"]
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    assert ends == [pytest.approx(end, abs=0.06) for end in ((218.2, 1.394), (89.4, 0.978), (85.0, 0.915), (93.9, 0.983))]
    assert [line.get_linestyle() for line in lines] == ["-", "-", "-", "--"]
    assert set(target_line.get_ydata()) == {target} == {1.03}
    for line, band, curve in zip(lines, losses.collections, curves, strict=True):
        final = list(curve.record.losses.values())
        assert line.get_ydata()[-1] == statistics.median(final)
        edges = [y for x, y in band.get_paths()[0].vertices if x == line.get_xdata()[-1]]
        assert (min(edges), max(edges)) == (min(final), max(final))
        assert len(line.get_xdata()) == len(curve.record.results[0]["val_points"]) - 1  # the start is not drawn
    marked = [line.get_ydata()[0] for line in published.get_lines()[2:]]
    assert marked == [31.4, 2.625, 1.23]


def test_no_words_of_the_picture_stand_on_a_curve(picture):
    figure, _, _ = picture
    figure.canvas.draw()
    boxes = []
    for panel in figure.axes:
        points = []
        for line in panel.get_lines():
            drawn = plot.matplotlib.cbook.STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data(orig=False))
            path = line.get_transform().transform_path(plot.matplotlib.path.Path(list(zip(*drawn))))
            points += [point for piece in path.interpolated(200).to_polygons(closed_only=False) for point in piece]
        for band in panel.collections:
            path = panel.transData.transform_path(band.get_paths()[0])
            points += list(path.interpolated(200).vertices)
            assert not [1 for text in panel.texts if path.contains_points(text.get_window_extent().corners()).any()]
        found = [text.get_window_extent() for text in panel.texts if text.get_text()]
        assert len(found) >= 3 and len(points) > 1000
        assert not [point for point in points for box in found if box.contains(*point)]
        boxes += [*found, panel.title.get_window_extent()]
    assert all(figure.bbox.contains(*corner) for box in boxes for corner in box.corners())
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.overlaps(other)]


def test_the_leaderboard_goes_on_without_a_run_that_does_not_fit(tmp_path, tool):
    """A trial among the runs of a rung: it is named, the rung and all others stand as without it, and so do the
    tools that look for a target or for runs to replay."""
    folder = tmp_path / "records" / "laptop" / "2026-11-21_ladder"
    folder.mkdir(parents=True)
    shutil.copy(run_ladder.LADDER / "train_gpt.py", folder)
    for name in ("target", "adamw_rotary", "muon"):
        shutil.copytree(run_ladder.LADDER / name, folder / name)
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(make_leaderboard.MARKS))
    args = f"--records_dir={tmp_path}/records", f"--readme={readme}"
    assert tool(make_leaderboard, *args) == (0, "", "")
    before = (tmp_path / "records" / "README.md").read_bytes(), readme.read_bytes()
    trial = json.loads(sorted((folder / "muon").glob("*.json"))[0].read_text())
    trial["config"]["matrix_lr"] = trial["seed"] = trial["config"]["seed"] = 7
    (folder / "muon" / "20270101-000000_seed7_0000.json").write_text(json.dumps(trial))
    (folder / "yarn").mkdir()
    (folder / "yarn" / "x.json").write_text("{}")
    status, _, err = tool(make_leaderboard, *args)
    assert status == 1 and err.count("\n") == 3, err  # a rung without any run is named as such too
    assert f"left out: {folder}/muon mixes configs: seed 7 differs from seed 0 in matrix_lr: 20270101-000000_seed7" in err
    assert f"left out: {folder}/yarn holds what is no result (KeyError: " in err
    assert before == ((tmp_path / "records" / "README.md").read_bytes(), readme.read_bytes())
    status, out, err = tool(validate, folder / "adamw_rotary")
    assert (status, err.count("left out")) == (1, 3) and "target 1.39, p = 1: not shown" in out
    status, _, err = tool(make_leaderboard, f"--records_dir={tmp_path}/none", f"--readme={readme}")
    assert status == 2 and f"{tmp_path}/none: No such file or directory" in err and err.count("\n") == 1


def test_a_rung_of_another_machine_is_left_out_of_the_ladder(make_record):
    script, left = run_ladder.LADDER / "train_gpt.py", []
    make_record("ladder/adamw_rotary", [1.5], script)
    other = make_record("ladder/muon", [1.4], script, hardware=dict(device="cpu", ranks=1, threads=9, cpu="another"))
    make_record("ladder/split_qkv", [1.3], script)
    rungs = make_leaderboard.read_rungs(results.read_track("laptop", other.parents[2]), other.parent, 1.0, left.append)
    assert [rung.record.folder.name for rung in rungs] == ["adamw_rotary", "split_qkv"]
    assert rungs[1].effect.mean == pytest.approx(-0.2)
    (line,) = left
    assert "muon ran on another machine than" in line


def test_a_script_stands_once():
    """In the folder of its record, and in no log: the records can be searched."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in SCRIPTS]
    assert len(set(digests)) == len(digests) == len(list((ROOT / "records").rglob("train_gpt.py")))
    assert not [path for path in (ROOT / "records").rglob("*.txt") if "def main(" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_committed_script_imports_what_it_may(script):
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        )
    }
    assert imported <= ALLOWED


@pytest.mark.parametrize("record", COMMITTED, ids=lambda record: record.name)
def test_a_committed_record_is_whole(record, capsys):
    """Its script makes the recorded config; its logs begin with that script's hash, and end as the json does."""
    for path in record.folder.glob("*.json"):
        result = json.loads(path.read_text())  # read_record has compared its hash with the script's
        argv = [*result["argv"], f"--preset={result['preset']}", "--print_config"]
        assert results.load_script(record.folder).main(argv) == 0
        assert json.loads(capsys.readouterr().out) == result["config"]
        facts, lines = path.with_suffix(".txt").read_text().split(f"\n{'=' * 100}\n")
        assert json.loads(facts) == {key: result[key] for key in ("script_sha256", "argv", "versions", "hardware")}
        step, loss, milliseconds = result["val_points"][-1]
        assert loss == result["final_val_loss"]
        assert f"step:{step}/{step} val_loss:{loss:.4f} train_time:{milliseconds}ms" in lines


@pytest.mark.slow
def test_replay_tells_the_same_from_another(real_record, tool, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as here and in the process that made it
    result = results.read_record(real_record).results[0]
    assert replay.find_differences(result) == ""
    status, out, err = tool(replay, real_record)
    assert (status, err) == (0, "") and out.endswith(f"seed 0: {result['final_val_loss']!r} again, bit for bit\n")
    other = copy.deepcopy(result)
    other["val_points"][1][1] += 1e-9
    is_same, line = replay.replay(real_record, other)
    assert not is_same and "step 2 or before" in line
    other["versions"]["torch"] = "1.0"
    assert "torch 1.0, here 2." in replay.find_differences(other)
    for key, there in (("activations", "bfloat16"), ("simd", "NEON")):
        other = copy.deepcopy(result)
        other["hardware"][key] = there
        assert replay.find_differences(other).startswith(f"{key} {there}, here ")
    del other["hardware"]["simd"]  # as in results of before
    assert replay.find_differences(other) == ""
    assert tool(replay)[0] == 2


@pytest.fixture
def replayed(monkeypatch):
    """Names and seeds of what replay.py would run again, instead of running it."""
    names = []
    monkeypatch.setattr(replay, "replay", lambda folder, result: (names.append((folder.name, result["seed"])), (True, "again"))[1])
    return names


def of_here(result):
    """A result as a run of this process would leave it."""
    result["hardware"]["threads"] = torch.get_num_threads()


def test_replaying_nothing_is_a_failure(make_record, tool, replayed):
    """One line with the reason and what helps; so for folders, and for a choice among records of which none fits."""
    here, there = make_record("here", [1.0]), make_record("there", [1.0, 1.1])
    edit_json(here, of_here)
    for path in there.glob("*.json"):
        result = json.loads(path.read_text())
        result["hardware"]["cpu"] = "another"
        path.write_text(json.dumps(result))
    status, out, err = tool(replay, there)
    assert (status, out.count("passed over (cpu another, here "), err.count("\n")) == (1, 2, 1)
    assert "nothing was replayed: none of 2 runs is of this machine and version (cpu another, here" in err
    assert "--force runs them all the same" in err and not replayed
    status, out, err = tool(replay, "--random=1", "--records_dir", make_empty(there))
    assert status == 1 and "this machine can replay 0 of 2 runs in" in out and "--force" in err and not replayed
    status, _, err = tool(replay, here, "--most_seconds=0")
    assert status == 1 and "no run took at most 0 s: give more with --most_seconds" in err and not replayed
    assert tool(replay, here, there)[0] == 0 and replayed == [(here.name, 0)]
    assert tool(replay, there, "--force")[0] == 0 and replayed[1:] == [(there.name, 0), (there.name, 1)]


def make_empty(folder):
    """A folder of records that has only this one."""
    place = folder.parents[1] / "only"
    shutil.copytree(folder, place / "laptop" / folder.name)
    return place


def test_random_chooses_among_what_can_be_replayed(make_record, tool, replayed):
    """Of twelve runs one is of this machine: it is chosen always. Beside folders, --random adds to them."""
    folder = make_record("mixed", [1.0] * 11, hardware=dict(device="cpu", ranks=1, cpu="another", threads=3))
    here, own = make_record("here", [1.0]), make_record("own", [1.0])
    edit_json(here, of_here), edit_json(own, of_here)
    place = make_empty(folder)
    shutil.copytree(here, place / "laptop" / here.name)
    for _ in range(3):
        assert tool(replay, "--random=1", f"--records_dir={place}")[0] == 0
    assert replayed == [(here.name, 0)] * 3
    status, out, _ = tool(replay, own, "--random=2", f"--records_dir={place}")
    assert status == 0 and replayed[3:] == [(own.name, 0), (here.name, 0)]
    assert f"--random=2: this machine can replay 1 of 12 runs in {place}" in out
    assert tool(replay, "--all", f"--records_dir={place}")[1].count("passed over") == 11


def test_a_replay_that_differs_is_a_failure(make_record, tool, monkeypatch):
    folder = make_record("here", [1.0])
    edit_json(folder, of_here)
    monkeypatch.setattr(replay, "replay", lambda folder, result: (False, "another loss"))
    assert tool(replay, folder)[0] == 1


def test_nothing_runs_after_a_run_that_has_failed(tmp_path):
    source = b"import sys; open(sys.argv[1], 'w'); sys.exit(sys.argv[1] == 'b')"
    with pytest.raises(results.RecordError, match="b --seed=0 ended with status 1; the same command of x.py"):
        results.run_missing([(name, 0, [name]) for name in "abcd"], lambda _: set(), source, "x.py", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.slow
def test_ablation_runs_once_and_pairs_seeds(shards, tmp_path):
    extra = " ".join(["--num_iterations=2", "--val_tokens=1024", "--val_loss_every=0", *data_args(shards)])
    args = [
        "--preset=smoke",
        "--mechanisms=muon",
        "--seeds=1",
        "--jobs=2",
        f"--logs_dir={tmp_path}",
        f"--extra={extra}",
    ]
    done = run_tool("ablate.py", *args)
    assert done.returncode == 0, done.stderr
    found = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
    assert found["muon"]["config"]["without"] == "muon"
    effect = found["muon"]["final_val_loss"] - found["nothing"]["final_val_loss"]
    assert effect != 0 and f"| muon | {effect:+.4f} |  | 1 |  | one seed: no test possible |" in done.stdout
    assert "nan" not in done.stdout and "over 1 seed\n" in done.stdout
    assert run_tool("ablate.py", *args).stdout == done.stdout and len(list(tmp_path.rglob("*.json"))) == 2
    done = run_tool("ablate.py", "--mechanisms=softcup")
    assert done.returncode == 2 and "did you mean softcap" in done.stderr


@pytest.mark.slow
def test_the_ladder_goes_on_where_it_was_interrupted(shards, tmp_path):
    """A run that is missing is made by the ladder's own script, and lies in its rung without that."""
    extra = ["--num_iterations=1", "--val_tokens=8192", "--val_loss_every=0", "--num_layers=1"]
    args = ["--only=target,muon", "--seeds=1", "--end_seeds=1", f"--logs_dir={tmp_path}/trials"]
    args.append(f"--extra={' '.join([*extra, *data_args(shards)])}")
    done = run_tool("run_ladder.py", *args)
    assert done.returncode == 0, done.stderr
    (ladder,) = (tmp_path / "trials" / "laptop").iterdir()
    assert sorted(path.name for path in ladder.iterdir()) == ["muon", "target", "train_gpt.py"]
    presets = {name: results.read_record(ladder / name).results[0]["preset"] for name in ("muon", "target")}
    assert presets == dict(target="laptop_target", muon="laptop_2024-10-04_muon")
    kept, lost = (next((ladder / name).glob("*.json")) for name in ("target", "muon"))
    log = kept.with_suffix(".txt").read_text()
    assert json.loads(log.split("\n=")[0])["argv"][1] == "--record=target" and "def main(" not in log
    lost.unlink()
    assert run_tool("run_ladder.py", *args).returncode == 0
    assert list((ladder / "target").glob("*.json")) == [kept] and len(list(lost.parent.glob("*.json"))) == 1
    (ladder / "train_gpt.py").write_text("LADDER = {'2024-10-04_muon': 0}")
    done = run_tool("run_ladder.py", f"--ladder={ladder}")
    assert done.returncode == 2 and "mixes scripts" in done.stderr


@pytest.mark.parametrize(
    "option, words",
    [("--only=target,moun", "did you mean muon"), (f"--ladder={ROOT}/records", "has no train_gpt.py with a LADDER")],
)
def test_a_ladder_that_cannot_be_run(option, words, tool):
    status, out, err = tool(run_ladder, option)
    assert (status, out, err.count("\n")) == (2, "", 1) and words in err


@pytest.fixture
def small_ladder(tmp_path, monkeypatch):
    """A ladder whose script leaves at once what a run leaves; its result says on which cpu it ran."""
    source = """LADDER = {"2024-10-04_muon": 0}
if __name__ == "__main__":
    import hashlib, json, pathlib, sys
    argv = sys.argv[1:]
    folder = pathlib.Path("records", "laptop", "x")
    folder.mkdir(parents=True, exist_ok=True)
    facts = dict(script_sha256=hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest(), argv=argv)
    seed = int(argv[-1].split("=")[1])
    result = dict(seed=seed, final_val_loss=1.0 + seed, track="laptop", train_time_ms=1, versions=dict(torch="2.13"))
    result |= dict(hardware=dict(cpu="this"), config=dict(seed=seed, extra=argv[2:-1]), **facts)
    (folder / f"{seed}.json").write_text(json.dumps(result))
    (folder / f"{seed}.txt").write_text(f"facts\\n{'=' * 100}\\nstep:1/1\\n")
"""
    ladder = tmp_path / "laptop" / "ladder"
    ladder.mkdir(parents=True)
    (ladder / "train_gpt.py").write_text(source)
    is_other = lambda result: f"cpu {result['hardware']['cpu']}, here this" * (result["hardware"]["cpu"] != "this")
    monkeypatch.setattr(replay, "find_differences", is_other)
    return ladder


def test_trials_leave_the_ladder_as_it_is(small_ladder, tmp_path, tool):
    """With further options every run goes into a ladder of its own, which the other tools can read."""
    args = "--only=muon", "--seeds=2", "--end_seeds=2", f"--ladder={small_ladder}", f"--logs_dir={tmp_path}/trials"
    status, _, err = tool(run_ladder, *args)
    assert status == 0, err
    before = {path: path.read_bytes() for path in small_ladder.rglob("*") if path.is_file()}
    assert results.read_record(small_ladder / "muon").losses == {0: 1.0, 1: 2.0}
    for extra in ("--matrix_lr=1", "--matrix_lr=2"):
        status, out, _ = tool(run_ladder, *args, f"--extra={extra}")
        place = out.strip().removeprefix("the trial: python records/validate.py ").removesuffix("/*/")
        assert status == 0 and place.startswith(f"{tmp_path}/trials/laptop/ladder_")
        record = results.read_record(run_ladder.Path(place, "muon"))
        assert record.losses == {0: 1.0, 1: 2.0} and record.results[0]["config"]["extra"] == [extra]
        assert tool(validate, run_ladder.Path(place, "muon"))[0] == 0
    assert {path: path.read_bytes() for path in small_ladder.rglob("*") if path.is_file()} == before
    assert len(list((tmp_path / "trials" / "laptop").iterdir())) == 2


def test_a_rung_takes_no_seed_of_another_machine(small_ladder, tmp_path, tool):
    """It is refused before anything runs, since the tools would refuse the rung."""
    args = "--only=muon", f"--ladder={small_ladder}"
    assert tool(run_ladder, *args, "--seeds=1", "--end_seeds=1")[0] == 0
    edit_json(small_ladder / "muon", lambda result: result["hardware"].update(cpu="another"))
    status, _, err = tool(run_ladder, *args, "--seeds=2", "--end_seeds=2")
    assert status == 2 and err.count("\n") == 1 and "muon is of another machine (cpu another, here this): copy" in err
    assert len(list((small_ladder / "muon").iterdir())) == 2
    assert tool(run_ladder, *args, "--seeds=1", "--end_seeds=1")[0] == 0  # nothing to run, nothing to refuse


def test_a_log_loses_the_script_it_begins_with():
    """And only that script: one of another hash is refused, a log without any stays as it is."""
    rule, facts = f"\n{'=' * 100}\n", dict(versions={"torch": "2.13"}, hardware={"threads": 2})
    result = dict(script_sha256=hashlib.sha256(b"print()\n").hexdigest(), argv=["--seed=3"], **facts)
    stripped = run_ladder.strip_log(f"print()\n{rule}{json.dumps(facts)}{rule}step:1/1\n", result)
    assert stripped == f"{json.dumps(result, indent=1)}{rule}step:1/1\n"
    assert run_ladder.strip_log(stripped, result) == stripped
    with pytest.raises(results.RecordError, match="another script"):
        run_ladder.strip_log(f"exit()\n{rule}{{}}{rule}", result)


def test_the_plan_of_the_ladder(tmp_path):
    """Seed by seed over all rungs; the first and the last one more often, or those that a ladder.toml says."""
    ladder = list(results.load_script(run_ladder.LADDER).LADDER)
    plan = run_ladder.plan_runs(*run_ladder.read_presets(run_ladder.LADDER), 3, 8)
    assert plan[:25] == [
        ("target", "laptop_target", 0),
        *((name.partition("_")[2], f"laptop_{name}", 0) for name in ladder),
    ]
    assert len(plan) == 3 * 25 + 5 * 2 and len(set(plan)) == len(plan)
    assert [(name, seed) for name, _, seed in plan[-2:]] == [("adamw_rotary", 7), ("sigmoid_skips", 7)]
    rungs = '[low]\npreset = "laptop_32"\nchange = "a"\n[high]\npreset = "laptop"\nchange = "b"\nhas_more_seeds = true\n'
    (tmp_path / "ladder.toml").write_text(rungs)
    plan = run_ladder.plan_runs(*run_ladder.read_presets(tmp_path), 1, 2)
    assert plan == [("low", "laptop_32", 0), ("high", "laptop", 0), ("high", "laptop", 1)]


def test_a_ladder_that_lists_its_rungs(tmp_path):
    """Two rungs of the old ladder as blocks: their difference as scipy has it, and who reaches whose loss when."""
    folder = tmp_path / "laptop" / "2026-01-01_blocks"
    folder.mkdir(parents=True)
    shutil.copy(run_ladder.LADDER / "train_gpt.py", folder)
    toml = ""
    for name in ("adamw_rotary", "sigmoid_skips"):
        shutil.copytree(run_ladder.LADDER / name, folder / name)
        toml += f'[{name}]\npreset = "a"\nchange = "of {name}"\nhas_more_seeds = true\n'
        toml += "sets_target = true\n" * (name == "adamw_rotary")
    (folder / "ladder.toml").write_text(toml)
    records = results.read_track("laptop", tmp_path)
    found, blocks = make_leaderboard.read_blocks(records)
    assert found == folder and list(blocks) == ["adamw_rotary", "sigmoid_skips"]
    target = results.find_target("laptop", records)
    text = make_leaderboard.format_blocks(found, blocks, target)
    first, last = (list(record.losses.values()) for record in blocks.values())
    mean = statistics.mean(a - b for a, b in zip(first, last))
    assert f"{mean:.3f} [" in text and "and < 0.0001 by the t-test, which expects no outliers" in text
    assert "It is lower for 8 seeds of 8:\np = 0.0078 by Wilcoxon" in text  # 2 of the 2^8 ways of signs
    times = [results.find_crossing(result, statistics.mean(first))[1] for result in blocks["sigmoid_skips"].results]
    assert f"`adamw_rotary` after {statistics.median(times):.0f} s" in text
    assert results.find_setting(records) is blocks["adamw_rotary"] and target == round(statistics.mean(first), 2)
    seconds = statistics.median(results.find_crossing(result, target)[1] for result in blocks["sigmoid_skips"].results)
    claim = make_leaderboard.format_target(blocks["adamw_rotary"], target, records)
    assert f"target is {target:g} nats" in claim and "`sigmoid_skips`](laptop/2026-01-01_blocks/sigmoid_skips) " in claim
    assert f"after {seconds:.0f} s of training (median) and ends at {statistics.mean(last):.3f}" in claim
    assert f"| {seconds:.0f} | {-mean:+.3f} [" in text  # in its row
    assert f"| of sigmoid_skips | 8 | {statistics.mean(last):.3f} |" in text and text.count("| helps |") == 1
    plot.plot_times(blocks, tmp_path / "picture")
    assert (tmp_path / "picture.svg").stat().st_size > 1000
