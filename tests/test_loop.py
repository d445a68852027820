"""Whole runs: their output and files, repetition, replay, and refusals."""

import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    SCRIPT,
    STEP_LINE,
    TINY,
    VAL_LINE,
    at_step,
    before_call,
    data_args,
    gpt,
    list_logged,
    make_runtime,
    read_events,
    run,
    run_script,
    smoke_config,  # fmt: skip
    smoke_run,
)


@pytest.fixture(scope="module")
def smoke(shards, tmp_path_factory):
    return smoke_run(shards, tmp_path_factory.mktemp("smoke"))


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
    assert list_logged(smoke["path"].with_suffix(".txt")) == list(range(1, 13))
    assert len(VAL_LINE.findall(steps)) == 3
    losses = [[int(m[1]), float(m[5])] for m in STEP_LINE.finditer(steps)]
    assert losses == [[step, pytest.approx(loss, abs=6e-5)] for step, loss in smoke["train_points"]]
    assert re.fullmatch(r"\d{8}-\d{6}_seed0_[0-9a-f]{8}", smoke["run_id"]) and smoke["path"].stem == smoke["run_id"]


def test_json_has_the_keys_of_the_contract(smoke):
    """The loss falls from ln 384 to below ln 26 = 3.26, that of 26 letters without their context."""
    names = "track preset config argv script_sha256 git_commit corpus_fingerprint seed versions hardware val_points"
    names += " train_points final_val_loss choices resumed_from key data_setup_s resumed_at guard_actions"
    names += " train_time_ms compile_time_s tokens_per_s mfu peak_memory_mib"
    assert set(names.split()) <= set(smoke)
    losses = [loss for _, loss, _ in smoke["val_points"]]
    assert losses[0] == pytest.approx(5.9506, abs=1e-3) and losses[-1] < 2.6
    assert smoke["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert smoke["val_points"][-1][1] == smoke["final_val_loss"] and smoke["val_points"][-1][0] == 12
    assert smoke["train_time_ms"] == smoke["val_points"][-1][2] > 0
    assert smoke["tokens_per_s"] == pytest.approx(12 * 2048 / smoke["train_time_ms"] * 1000, rel=0.02)
    assert smoke["peak_memory_mib"] > 100 and smoke["mfu"] > 0


@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler")
@pytest.mark.slow
def test_compiled_run_agrees(shards, tmp_path):
    stages = '--stages=[{"duration":1,"window_long":64,"window_short":64}]'
    args = ["--num_layers=2", "--num_iterations=4", stages]
    plain, compiled = (smoke_run(shards, tmp_path, *args, f"--compile={mode}") for mode in ("off", "on"))
    assert compiled["final_val_loss"] == pytest.approx(plain["final_val_loss"], abs=1e-3)
    assert compiled["compile_time_s"] > plain["compile_time_s"]


RECORD = [*TINY, "--num_iterations=3", "--val_loss_every=0", "--record=mine"]


def test_a_record_is_of_the_data_of_its_track(shards, here, capsys):
    """Others are refused before training, and leave no run."""
    run(shards, "--track=laptop", preset=RECORD, status=2)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "these are not the data of track laptop: give another --track" in errors
    assert not list(here.rglob("*.json")) and not list(here.rglob("*.txt"))
    run(shards, "--track=mine", preset=RECORD)


def test_a_result_that_cannot_be_read_is_one_line(shards, here, capsys):
    run(shards, preset=RECORD)
    (record,) = here.glob("records/*/*/*_seed*.json")
    record.with_name("9_seed9.json").mkdir()
    run(shards, preset=RECORD, status=1)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "9_seed9.json" in errors


def test_a_record_is_of_one_script_config_and_machine(shards, here, monkeypatch, capsys):
    """Others are refused at the start, and leave nothing. Seeds and folders may differ."""
    run(shards, preset=RECORD)
    before = sorted(path for path in here.rglob("*"))

    def refuse(*args):
        capsys.readouterr()
        run(shards, *args, preset=RECORD, status=2)
        errors = capsys.readouterr().err
        assert "--record=mine has a result with " in errors and errors.count("\n") == 1
        assert sorted(here.rglob("*")) == before

    refuse("--head_lr=0.01")
    refuse("--val_tokens=2048")
    for owner, name, value in (
            (torch.backends.cpu, "get_cpu_capability", lambda: "other"), (gpt, "SCRIPT", gpt.SCRIPT + b"\n"),
            (gpt, "fingerprint", lambda _: "0" * 16)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            refuse("--seed=1")
    run(shards, "--seed=1", "--telemetry_every=3", "--checkpoint_every=2", preset=RECORD)
    runs = [json.loads(path.read_text()) for path in here.glob("records/*/*/*.json")]
    assert sorted(run["seed"] for run in runs) == [0, 1] and len({run["key"] for run in runs}) == 2


def test_a_file_for_training_and_validation_is_refused(shards, here, capsys):
    shutil.copy(shards / "val_0.bin", here / "train_1.bin")
    for train_files in (shards / "val_0.bin", here):  # itself, and a copy
        assert gpt.main([*TINY, f"--train_files={train_files}", f"--val_files={shards}"]) == 2
        assert f"a shard of --val_files={shards} is in --train_files={train_files}" in capsys.readouterr().err
    assert not list(here.rglob("*.txt"))


def test_a_closed_stdout_does_not_end_a_run(shards, here):
    words = shlex.join([sys.executable, str(SCRIPT), *TINY, *data_args(shards), "--num_iterations=2"])
    done = subprocess.run(["bash", "-c", f"{words} | head -n 1; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert done.stdout.endswith("\n0\n") and done.stderr == "" and len(list(here.glob("logs/*.json"))) == 1


def test_shards_with_several_bos_tokens_are_refused(shards):
    cfg = smoke_config(shards)
    first = gpt.open_shard(f"{shards}/train_0.bin", 257)
    other = dataclasses.replace(first, bos=0, sha256="")
    with pytest.raises(gpt.RunError, match=r"have other BOS tokens: \[0, 256\]"):
        gpt.describe_run(cfg, make_runtime(), [], [first], [other])


def test_ctrl_c_before_the_first_step(shards, here, monkeypatch, capsys):
    before_call(monkeypatch, gpt, "choose_precision", lambda *_: signal.default_int_handler(signal.SIGINT, None))
    assert gpt.main([*TINY, *data_args(shards)]) == 130
    assert capsys.readouterr().err == "train_gpt.py: stopped by SIGINT\n"


def test_the_printed_loss_is_the_mean_of_the_last_steps(shards, here):
    """A line for each twentieth of the run, with the mean of its steps."""
    result = smoke_run(shards, here, "--num_iterations=40", "--val_loss_every=0")
    losses, said = dict(result["train_points"]), result["stdout"]
    for step in (4, 38):
        mean = np.mean([losses[step - 1], losses[step]])
        assert f"step {step}/40: loss {mean:.4f}, " in said


def test_a_record_is_not_continued_on_other_hardware(shards, here, monkeypatch, capsys):
    """A plain run is."""
    for preset, status in ((RECORD, 2), (RECORD[:-1], 0)):
        with monkeypatch.context() as patch:
            at_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
            run(shards, preset=preset, status=143)
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other")
            run(shards, "--resume=auto", preset=preset, status=status)
    assert "is of other hardware" in capsys.readouterr().err


def test_one_record_is_one_result_however_often_it_was_stopped(shards, here, monkeypatch):
    """Log and events move to the record with their names. The third run finds the result."""
    args = [*TINY, *data_args(shards), "--num_iterations=6", "--record=twice", "--telemetry_every=2", "--resume=auto"]
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert gpt.main(args) == 143
    assert not list(Path("records").rglob("*_seed*"))
    assert [gpt.main(args) for _ in range(2)] == [0, 0]
    (folder,) = Path("records/try").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_twice", folder.name)
    assert (folder / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".jsonl", ".py", ".txt"]
    (log,) = folder.glob("*.txt")
    assert list_logged(log) == list(range(1, 7)) and log.read_text().count("=" * 100 + "\n") == 1
    assert len({path.stem for path in folder.glob("*_seed0*")}) == 1 and not list(Path("logs").iterdir())
    assert [event["step"] for event in read_events("telemetry")] == [2, 4, 6]


def test_an_edit_during_the_run_changes_nothing(shards, tmp_path, monkeypatch):
    """Hash and copy of the script are of the bytes that run, even if it is edited while PyTorch is imported."""
    monkeypatch.setattr(gpt, "__file__", str(tmp_path / "train_gpt.py"))
    assert gpt.find_commit() == ""
    script = tmp_path / "train_gpt.py"
    shutil.copy(SCRIPT, script)
    # the script imports it after PyTorch. On a CPU it is optional
    (tmp_path / "triton.py").write_text(f"open({str(script)!r}, 'a').write('# edited')\nraise ImportError")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "train_gpt.py"], ["commit", "-qm", "a commit"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    assert gpt.find_commit() == commit
    words = ["--preset=smoke", "--num_iterations=2", "--record=edited", *data_args(shards)]
    done = run_script(words, tmp_path, script=script)
    assert done.returncode == 0, done.stderr
    assert script.read_bytes() == SCRIPT.read_bytes() + b"# edited"
    (path,) = tmp_path.glob("records/try/*/*.json")
    result = json.loads(path.read_text())
    assert result["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert (path.parent / "train_gpt.py").read_bytes() == SCRIPT.read_bytes()
    assert result["git_commit"] == f"{commit}-dirty"


@pytest.mark.parametrize("error, where", [
    (OSError("could not get source code"), "warm_up"), (ValueError("expected 3, got 2"), "train_step"),
    (FileNotFoundError(2, "No such file", "table.txt"), "train_step"),
    (torch.OutOfMemoryError("full"), "train_step")], ids=str)
def test_a_bug_keeps_its_traceback_and_the_log(shards, here, monkeypatch, capsys, error, where):
    """An error of the model is not bad input. Status 1, and the log of the steps before stays."""
    def fail(trainer, *_):
        if where == "warm_up" or trainer.progress.step == 4:
            raise error

    before_call(monkeypatch, gpt.Trainer, where, fail)
    assert gpt.main([*TINY, "--telemetry_every=2", *data_args(shards)]) == 1
    assert "Traceback (most recent call last)" in (said := capsys.readouterr().err) and str(error) in said
    (log,) = Path("logs").glob("*.txt")
    if where == "train_step":
        assert list_logged(log) == [1, 2, 3, 4]
        events = [(event["event"], event["step"]) for event in read_events()]
        assert events == [("validation", 0), ("telemetry", 2), ("telemetry", 4)]


@pytest.mark.parametrize("name", [".json", "model.pt"])
def test_a_full_disk_is_one_line(shards, here, monkeypatch, capsys, name):
    """While the result or the model is written. Status 1."""
    def refuse(path, *_):
        if path.name.endswith(name) and path.name != "state.json":
            raise OSError(28, "No space left on device", str(path))

    before_call(monkeypatch, gpt, "write_atomic", refuse)
    run(shards, "--num_iterations=2", status=1)
    errors = capsys.readouterr().err
    assert errors.startswith("train_gpt.py: error: [Errno 28] No space left") and errors.count("\n") == 1


@pytest.mark.slow
def test_a_copy_in_an_empty_folder(tmp_path):
    """Without data there is one line. The embedded corpus is built by data/text.py, as run.sh does it."""
    script = shutil.copy(SCRIPT, tmp_path / "train_gpt.py")
    done = run_script(["--preset=smoke"], tmp_path, script=script)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    for name in ("data/text.py", "tools/common.py"):
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


def test_an_output_folder_that_cannot_be_written(shards, here, capsys):
    (here / "file").write_text("a file, not a folder")
    (here / "a").mkdir()
    (here / "a" / "checkpoints").write_text("")
    for out in ("file", "a", f"b/{'c' * 300}"):
        assert gpt.main([*TINY, *data_args(shards), f"--out={out}"]) == 2
        errors = capsys.readouterr().err
        assert f"--out={out}" in errors and errors.count("\n") == 1
    assert not [path for path in here.rglob("*") if path.is_file() and path.stat().st_size and path.name != "file"]


def test_the_clock_runs_and_stands(monkeypatch, now):
    """It goes on from the seconds of an earlier life. Pauses synchronize, read() does not."""
    waits = []
    monkeypatch.setattr(gpt.torch.cuda, "synchronize", waits.append)
    device = torch.device("cuda", 0)
    progress = gpt.Progress(train_time=100.0)
    timer = gpt.TrainClock(device, progress, gpt.clock(device))
    assert timer.read() == 100 and waits == [device]
    now[0] += 12
    assert timer.read() == 112 and progress.train_time == 100 and len(waits) == 1
    for _ in range(2):
        with timer.paused():
            now[0] += 1000
            assert progress.train_time == 112
    assert timer.read() == 112 and len(waits) == 5
    now[0] += 2
    assert timer.read() == 114 and len(waits) == 5
    with timer.paused():
        assert progress.train_time == 114 and len(waits) == 6


@pytest.mark.parametrize("device, lengths", [
    ("cpu", list(range(1, 46))), ("cuda", [0] * 19 + [20] * 20 + [40] * 6)])
def test_losses_are_read_late_on_a_gpu(device, lengths):
    """20 steps share an all-reduce. A loss is the mean of two ranks, of which the other has half of it."""
    comm = gpt.Comm(0, 2)
    comm.all_reduce = lambda losses: losses * 1.5
    cfg, progress, found = gpt.make_config({"preset": "smoke", "num_iterations": 45}), gpt.Progress(), []
    log = gpt.RunLog(cfg, gpt.Runtime(torch.device(device), comm), {}, {}, progress)
    for progress.step in range(1, 46):
        progress.tokens = progress.step
        log.log_step(torch.tensor(float(progress.step)), 1.0)
        found.append(len(log.train_points))
    log.flush_losses()
    assert found == lengths and log.train_points == [[step, 0.75 * step] for step in range(1, 46)]


def test_the_first_signal_is_the_status():
    """Of several ranks, which handle later signals, too."""
    with gpt.Stop(make_runtime(0, 2)) as stop:
        stop.catch_signals()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert stop.requested == 128 + signal.SIGTERM
