"""Whole runs: their output and files, repetition, replay, and refusals."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    AT_THE_END,
    BOS,
    SCRIPT,
    STEP_LINE,
    TINY,
    VAL_LINE,
    VOCAB,
    advance,
    at_step,
    before_call,
    data_args,
    gpt,
    make_runtime,
    run_script,
    smoke_config,
    smoke_run,
    write_shard,
)


@pytest.fixture(scope="module")
def smoke(shards, tmp_path_factory):
    return smoke_run(shards, tmp_path_factory.mktemp("smoke"))


def test_the_loss_falls(smoke):
    losses = [loss for _, loss, _ in smoke["val_points"]]
    assert losses[0] == pytest.approx(5.9506, abs=1e-3)  # ln 384
    assert losses[-1] < 2.6  # which of 26 letters: ln 26 = 3.26 without looking at the context


def test_printed_lines_and_log_are_what_parsers_read(smoke):
    assert [int(m[1]) for m in VAL_LINE.finditer(smoke["stdout"])] == [0, 6, 12]
    assert not STEP_LINE.search(smoke["stdout"])
    log = smoke["path"].with_suffix(".txt").read_text()
    header, steps = log.split("\n" + "=" * 100 + "\n")
    metadata = json.loads(header)
    assert metadata["versions"]["torch"] == torch.__version__ and metadata["argv"] == smoke["argv"]
    assert metadata["key"] == smoke["key"] == gpt.make_key(metadata)
    source = smoke["path"].parent / f"train_gpt_{metadata['script_sha256'][:12]}.py"
    assert source.read_bytes() == SCRIPT.read_bytes()
    assert [int(m[1]) for m in STEP_LINE.finditer(steps)] == list(range(1, 13))
    assert len(VAL_LINE.findall(steps)) == 3
    losses = [[int(m[1]), float(m[5])] for m in STEP_LINE.finditer(steps)]
    assert losses == [[step, pytest.approx(loss, abs=6e-5)] for step, loss in smoke["train_points"]]
    assert re.fullmatch(r"\d{8}-\d{6}_seed0_[0-9a-f]{8}", smoke["run_id"]) and smoke["path"].stem == smoke["run_id"]


def test_json_has_the_keys_of_the_contract(smoke):
    names = "track preset config argv script_sha256 git_commit corpus_fingerprint seed versions hardware val_points"
    names += " train_points final_val_loss choices resumed_from key data_setup_s resumed_at guard_actions"
    names += " train_time_ms compile_time_s tokens_per_s mfu peak_memory_mib"
    assert set(names.split()) <= set(smoke)
    assert smoke["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert smoke["val_points"][-1][1] == smoke["final_val_loss"] and smoke["val_points"][-1][0] == 12
    assert smoke["train_time_ms"] == smoke["val_points"][-1][2] > 0
    assert smoke["tokens_per_s"] == pytest.approx(12 * 2048 / smoke["train_time_ms"] * 1000, rel=0.02)
    assert smoke["peak_memory_mib"] > 100 and 0 < smoke["mfu"] < 1
    assert re.search(rf"^result: +{re.escape(smoke['path'].relative_to(smoke['path'].parents[1]).as_posix())}$", smoke["stdout"], re.M)


def test_warm_up_leaves_no_trace(smoke, shards, tmp_path):
    """The preset warms up one step per stage. Losses are equal to the last bit with none and with three."""
    for steps in (0, 3):
        run = smoke_run(shards, tmp_path, f"--warmup_iterations={steps}")
        assert [p[:2] for p in run["val_points"]] == [p[:2] for p in smoke["val_points"]]


@pytest.mark.parametrize(
    "args",
    [
        ["--matrix_rule=adamw", "--matrix_lr=0.005"],
        pytest.param(["--matrix_weight_decay=0.5"], marks=pytest.mark.slow),
        pytest.param(["--dtype=bfloat16"], marks=pytest.mark.slow),
        ["--without=untied_head", "--head_lr=0.008", "--embed_std=0.02,0.01"],
        pytest.param(["--embed_dtype=bfloat16"], marks=pytest.mark.slow),
        pytest.param(["--micro_batch_tokens=512"], marks=pytest.mark.slow),
    ],
)
def test_switches_train_too_and_do_something(smoke, shards, tmp_path, args):
    run = smoke_run(shards, tmp_path, *args)
    assert run["final_val_loss"] < 3.2 and run["final_val_loss"] != smoke["final_val_loss"]


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)
@pytest.mark.slow
def test_compiled_run_agrees(shards, tmp_path):
    args = [
        "--num_layers=2",
        "--num_iterations=4",
        '--stages=[{"duration":1,"window_long":64,"window_short":64}]',
    ]
    plain, compiled = (smoke_run(shards, tmp_path, *args, f"--compile={mode}") for mode in ("off", "on"))
    assert compiled["final_val_loss"] == pytest.approx(plain["final_val_loss"], abs=1e-3)
    assert compiled["compile_time_s"] > plain["compile_time_s"]


# ---- records --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_record_replays_bit_for_bit_and_its_name_is_kept(shards, tmp_path):
    first = smoke_run(shards, tmp_path, "--record=first", "--seed=1")
    folder = first["path"].parent
    assert (
        re.fullmatch(r"\d{4}-\d\d-\d\d_first", folder.name)
        and folder.parent == tmp_path / "records" / "try"
    )
    assert (folder / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".py", ".txt"]
    assert not list(tmp_path.rglob("*.partial"))

    # replay: the record's script with its argv, in the record's folder and as a copy
    for script in (folder / "train_gpt.py", shutil.copy(folder / "train_gpt.py", tmp_path / "train_gpt.py")):
        done = run_script(first["argv"][1:], tmp_path, script=script)
        assert done.returncode == 0, done.stderr
    results = [json.loads(p.read_text()) for p in folder.glob("*.json")]
    assert len(results) == 3 and len(list(folder.iterdir())) == 7
    assert len({json.dumps([p[:2] for p in r["val_points"]]) for r in results}) == 1


def record(shards, *args, status=0) -> None:
    """A record run of three steps in this process."""
    assert gpt.main([*TINY, "--num_iterations=3", AT_THE_END, "--record=mine", *data_args(shards), *args]) == status


def test_a_record_is_of_one_script_config_and_machine(shards, here, monkeypatch, capsys):
    """Others are refused at the start, and leave nothing. Seeds and folders may differ."""
    record(shards)
    before = sorted(path for path in here.rglob("*"))

    def refuse(*args):
        capsys.readouterr()
        record(shards, *args, status=2)
        errors = capsys.readouterr().err
        assert "--record=mine has a result of another " in errors and errors.count("\n") == 1
        assert sorted(here.rglob("*")) == before

    for option in ("--head_lr=0.01", "--dtype=bfloat16", "--val_tokens=2048", "--num_iterations=4"):
        refuse(option)
    for owner, name, value in ((torch, "get_num_threads", lambda: 64), (gpt, "SCRIPT", gpt.SCRIPT + b"\n"),
                               (gpt, "fingerprint", lambda _: "0" * 16)):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            refuse("--seed=1")
    record(shards, "--seed=1", "--telemetry_every=3", "--checkpoint_every=2")
    runs = [json.loads(path.read_text()) for path in here.glob("records/*/*/*.json")]
    assert sorted(run["seed"] for run in runs) == [0, 1] and len({run["key"] for run in runs}) == 2


def test_a_record_is_not_continued_on_other_hardware(shards, here, monkeypatch, capsys):
    """A plain run is."""
    for options, status in ((["--record=mine"], 2), ([], 0)):
        args = [*TINY, *data_args(shards), "--num_iterations=6", AT_THE_END, *options]
        with monkeypatch.context() as patch:
            at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert gpt.main(args) == 143
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 64)
            assert gpt.main([*args, "--resume=auto"]) == status
    assert "is of other hardware" in capsys.readouterr().err


def test_one_record_is_one_result_however_often_it_was_stopped(shards, here, monkeypatch):
    args = [*TINY, *data_args(shards), "--num_iterations=6", "--record=twice", "--telemetry_every=2", "--resume=auto"]
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert gpt.main(args) == 143
    assert not list(Path("records").rglob("*_seed*"))
    assert [gpt.main(args) for _ in range(2)] == [0, 0]
    (folder,) = Path("records/try").iterdir()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".jsonl", ".py", ".txt"]
    log = next(folder.glob("*.txt")).read_text()
    steps = [int(step) for step in re.findall(r"^step:(\d+)/6 train_time:\d+ms step_avg:\S+ train_loss", log, re.M)]
    assert steps == list(range(1, 7)) and log.count("=" * 100 + "\n") == 1


def make_repository(folder, *names) -> str:
    """Commit files of a folder. Returns the commit."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", *names], ["commit", "-qm", "a commit"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True).stdout.strip()


def test_an_edit_during_the_run_changes_nothing(shards, tmp_path):
    """The hash and the copy of the script are of the bytes that run, even if it is edited while PyTorch is imported."""
    script = tmp_path / "train_gpt.py"
    shutil.copy(SCRIPT, script)
    # the script imports it after PyTorch. On a CPU it is optional
    (tmp_path / "triton.py").write_text(f"open({str(script)!r}, 'a').write('# edited')\nraise ImportError")
    commit = make_repository(tmp_path, "train_gpt.py")
    done = run_script(["--preset=smoke", "--num_iterations=2", "--record=edited", *data_args(shards)], tmp_path, script=script)
    assert done.returncode == 0, done.stderr
    assert script.read_bytes() == SCRIPT.read_bytes() + b"# edited"
    (path,) = tmp_path.glob("records/try/*/*.json")
    result = json.loads(path.read_text())
    assert result["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert (path.parent / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()
    assert result["git_commit"] == f"{commit}-dirty"


def test_the_commit_is_of_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt, "__file__", str(tmp_path / "train_gpt.py"))
    Path(gpt.__file__).write_bytes(gpt.SCRIPT)
    assert gpt.find_commit() == ""
    head = make_repository(tmp_path, "train_gpt.py")
    assert gpt.find_commit() == head
    Path(gpt.__file__).write_bytes(gpt.SCRIPT + b"\n")
    assert gpt.find_commit() == f"{head}-dirty"


def test_a_bug_keeps_its_traceback(shards, here, monkeypatch, capsys):
    """An error of the model is not bad input. Status 1, in the warm-up and in a step, and the log stays."""
    for error in (ValueError("expected 3, got 2"), OSError("could not get source code")):
        for warm_up in (1, 0):
            def forward(*_args, error=error):
                raise error

            monkeypatch.setattr(gpt.Block, "forward", forward)
            assert gpt.main([*TINY, f"--warmup_iterations={warm_up}", *data_args(shards)]) == 1
            assert "Traceback (most recent call last)" in (said := capsys.readouterr().err) and str(error) in said
    assert len(list(Path("logs").glob("*.txt"))) == 4 and not list(Path("logs").glob("*.json"))


@pytest.mark.slow
def test_a_copy_in_an_empty_folder(tmp_path):
    """Without data one line names the ways to get it. The embedded corpus is built by data/text.py, as run.sh does it."""
    script = shutil.copy(SCRIPT, tmp_path / "train_gpt.py")
    done = run_script(["--preset=smoke"], tmp_path, script=script)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    for name in ("data/text.py", "records/common.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(SCRIPT.parent / name, tmp_path / name)
    make_corpus = [sys.executable, "-c", 'import runpy; runpy.run_path("data/text.py")["make_embedded_corpus"]()']
    subprocess.run(make_corpus, cwd=tmp_path, check=True)
    done = run_script(["--preset=smoke"], tmp_path, script=script)
    assert done.returncode == 0, done.stderr
    final = float(VAL_LINE.findall(done.stdout)[-1][2])
    assert final == pytest.approx(2.990, abs=0.03)  # golden: PyTorch 2.13's source, seed 0, float32
    info = json.loads((tmp_path / "data" / "torch_source" / "corpus.json").read_text())
    (result,) = (tmp_path / "logs").glob("*.json")
    assert json.loads(result.read_text())["corpus_fingerprint"] == info["fingerprint"]


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_an_output_folder_that_cannot_be_written(shards, here, capsys):
    (here / "file").write_text("a file, not a folder")
    (here / "a").mkdir()
    (here / "a" / "checkpoints").write_text("")
    for out in ("file", "a", f"b/{'c' * 300}"):
        assert gpt.main([*TINY, *data_args(shards), f"--out={out}"]) == 2
        errors = capsys.readouterr().err
        assert f"--out={out}" in errors and errors.count("\n") == 1
    assert not [path for path in here.rglob("*") if path.is_file() and path.stat().st_size and path.name != "file"]


def test_memory_that_runs_out_while_training_costs_no_log(shards, here, monkeypatch, capsys):
    """Status 1 and a line that names the option. The log of four steps is kept."""
    def run_out():
        raise torch.OutOfMemoryError("full")

    at_step(monkeypatch, 5, run_out)
    args = ["--preset=smoke", "--device=cpu", "--warmup_iterations=0", "--telemetry_every=2"]
    assert gpt.main([*args, *data_args(shards)]) == 1
    assert "out of memory" in (said := capsys.readouterr().err) and "--micro_batch_tokens=512" in said
    measured, log = sorted((here / "logs").iterdir())
    assert [int(m[1]) for m in STEP_LINE.finditer(log.read_text())] == [1, 2, 3, 4]
    events = map(json.loads, measured.read_text().splitlines())
    assert [(e["event"], e["step"]) for e in events] == [("validation", 0), ("telemetry", 2), ("telemetry", 4)]


def test_a_full_disk_of_logs(shards, here, monkeypatch, capsys):
    """It is reported once, and training continues. Checkpoints are written. Without a result the status is 1."""
    def refuse(log, suffix, _line):
        if suffix in log.files:
            log.files[suffix] = open("/dev/full", "wb", buffering=0)

    before_call(monkeypatch, gpt.RunLog, "_append", refuse)
    before_call(monkeypatch, gpt, "write_atomic", lambda path, _: path.parent.name == "logs" and open("/dev/full/x"))
    assert gpt.main([*TINY, *data_args(shards), "--num_iterations=6", "--checkpoint_every=3"]) == 1
    out, errors = capsys.readouterr()
    assert out.count("cannot be written (No space left on device): training continues") == 1
    assert "this run has no result" in errors and errors.count("\n") == 1 and not list(Path("logs").glob("*.json"))
    assert "step:6/6 val_loss" in out and sorted(path.name for path in Path().rglob("step_*")) == ["step_000003", "step_000006"]


def test_training_and_validation_of_one_length_keep_their_own_positions(shards):
    """Each packed sequence restarts positions. A validation sequence does not, even if both passes have equal lengths."""
    trainer = gpt.Trainer(smoke_config(shards), make_runtime())
    state = trainer.schedule.at(0)
    training, validation = trainer.get_step_inputs(state, 1024, 512), trainer.get_step_inputs(state, 1024, 1024)
    own, other = training.ropes["long", False].cos, validation.ropes["long", False].cos
    assert torch.equal(own[:512], own[512:]) and not torch.equal(other[:512], other[512:])
    assert trainer.get_step_inputs(state, 1024, 512) is training  # made once
    assert trainer.get_step_inputs(trainer.schedule.at(9), 1024, 512) is not training  # until the stage changes


def pass_time_by_hand(monkeypatch) -> list[int]:
    """A clock that shows the sum of this list, in seconds."""
    now = [1000]
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: 1e9)
    monkeypatch.setattr(gpt.time, "perf_counter", lambda: sum(now))
    return now


def test_the_clock_runs_and_stands(monkeypatch):
    """It goes on from the seconds of an earlier life, and stands inside paused(). Laps and pauses synchronize, read() does not."""
    now, waits = pass_time_by_hand(monkeypatch), []
    monkeypatch.setattr(gpt.torch.cuda, "synchronize", waits.append)
    device = torch.device("cuda", 0)
    timer = gpt.TrainClock(device, 100.0, gpt.clock(device))
    assert timer.read() == 100 and waits == [device]
    now.append(5)
    assert timer.read() == 105
    now.append(7)
    assert timer.read() == 112 and timer.seconds == 100 and len(waits) == 1
    with timer.paused():
        assert timer.seconds == 112 and len(waits) == 2
        now.append(1000)
        assert timer.seconds == 112
    assert timer.read() == 112 and len(waits) == 3
    now.append(2)
    assert timer.read() == 114 and len(waits) == 3
    assert timer.lap() == timer.seconds == 114 and len(waits) == 4
    assert timer.lap() == timer.read() == 114  # a lap does not stop the clock, nor set it back
    for _ in range(2):
        with timer.paused():
            now.append(1000)
        now.append(3)
    assert timer.read() == timer.lap() == 120


def test_the_clock_leaves_out_validations_and_all_before_the_first_step(shards, tmp_path, monkeypatch):
    """Steps of 120 s count, and validations of 100 s do not: of the warm-up, before, between and after the steps."""
    monkeypatch.chdir(tmp_path)
    now, validate, train_step = pass_time_by_hand(monkeypatch), gpt.Trainer.validate, gpt.Trainer.train_step
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *args: now.append(100) or validate(*args))
    monkeypatch.setattr(gpt.Trainer, "train_step", lambda *args: now.append(120) or train_step(*args))
    run = smoke_run(shards, tmp_path, "--num_iterations=6", "--val_loss_every=2", "--checkpoint_every=3")
    assert [[step, time] for step, _, time in run["val_points"]] == [[step, 120_000 * step] for step in (0, 2, 4, 6)]
    assert run["train_time_ms"] == 720_000 and run["tokens_per_s"] == round(6 * 2048 / 720)
    # a step of the warm-up and a validation for each of three stages, and the final validation
    assert run["compile_time_s"] == 3 * 120 + 4 * 100
    log = run["path"].with_suffix(".txt").read_text()
    assert [int(line[3]) for line in STEP_LINE.finditer(log)] == [120_000 * step for step in range(1, 7)]


def test_progress_without_a_terminal(shards, here, monkeypatch, capsys, now):
    """Every 20th of the run: step, loss and speed. The final line of a step is that of the validation."""
    advance(monkeypatch, now, gpt.Trainer, "train_step", 2)
    assert gpt.main([*TINY, *data_args(shards), "--num_iterations=30", AT_THE_END]) == 0
    found = re.findall(r"^step (\d+)/30: loss (\d\.\d{4}), ([\d,]+) tokens/s$", capsys.readouterr().out, re.M)
    assert [int(step) for step, *_ in found] == list(range(2, 30, 2)) and {speed for *_, speed in found} == {"256"}
    (result,) = here.glob("logs/*.json")
    points = dict(map(tuple, json.loads(result.read_text())["train_points"]))
    assert [float(loss) for _, loss, _ in found] == [pytest.approx(points[int(step)], abs=6e-5) for step, *_ in found]


@pytest.mark.parametrize("device, batch", [("cpu", 1), ("cuda", 10)])
def test_losses_are_read_late_on_a_gpu(device, batch):
    """There ten steps share an all-reduce, and their losses are read when the next ten are sent."""
    rt = make_runtime()
    history = gpt.LossHistory(rt, [])
    history.batch = batch
    assert gpt.LossHistory(dataclasses.replace(rt, device=torch.device(device)), []).batch == batch
    lengths = []
    for step in range(1, 26):
        history.add(step, torch.tensor(float(step)))
        lengths.append(len(history.points))
    assert lengths == (list(range(1, 26)) if batch == 1 else [0] * 19 + [10] * 6)
    history.flush()
    assert history.points == [[step, float(step)] for step in range(1, 26)]


def test_shards_of_another_bos_are_refused(tmp_path):
    """Documents begin with it, and masks are made with one number for all shards."""
    for name, bos in (("train_0", BOS), ("train_1", 97), ("val_0", 97)):
        tokens = np.full(30_000, 98, np.uint16)
        tokens[::100] = bos
        write_shard(tmp_path / f"{name}.bin", tokens, VOCAB, bos)
    cfg = smoke_config(tmp_path)
    with pytest.raises(gpt.RunError, match="train_1.bin"):
        gpt.TrainData(cfg, gpt.Schedule(dataclasses.replace(cfg, num_iterations=20)))
    with pytest.raises(gpt.RunError, match="val_0.bin"):
        gpt.ValData(cfg, BOS)
    assert gpt.ValData(cfg, 97).batch(0).doc_ids.max() == 11  # 1,024 tokens in documents of 100
