"""Whole runs: their output and files, repetition, replay, and refusals."""

import dataclasses
import datetime
import hashlib
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import (
    BOS,
    SCRIPT,
    STEP_LINE,
    VAL_LINE,
    VOCAB,
    data_args,
    gpt,
    make_runtime,
    run_script,
    slow_but,
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
    assert gpt.identify(metadata) == gpt.identify(smoke)
    source = smoke["path"].parent / f"train_gpt_{metadata['script_sha256'][:12]}.py"
    assert source.read_bytes() == SCRIPT.read_bytes()
    assert [int(m[1]) for m in STEP_LINE.finditer(steps)] == list(range(1, 13))
    assert len(VAL_LINE.findall(steps)) == 3
    losses = [[int(m[1]), float(m[5])] for m in STEP_LINE.finditer(steps)]
    assert losses == [[step, pytest.approx(loss, abs=6e-5)] for step, loss in smoke["train_points"]]
    assert re.fullmatch(r"\d{8}-\d{6}_seed0_[0-9a-f]{8}", smoke["run_id"]) and smoke["path"].stem == smoke["run_id"]


def test_json_has_the_keys_of_the_contract(smoke):
    assert {
        "track",
        "preset",
        "config",
        "argv",
        "script_sha256",
        "git_commit",
        "corpus_fingerprint",
        "seed",
        "versions",
        "hardware",
        "val_points",
        "train_points",
        "final_val_loss",
        "choices",
        "resumed_from",
        "train_time_ms",
        "compile_time_s",
        "tokens_per_s",
        "mfu",
        "peak_memory_mib",
    } <= set(smoke)
    assert smoke["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    assert smoke["val_points"][-1][1] == smoke["final_val_loss"] and smoke["val_points"][-1][0] == 12
    assert smoke["train_time_ms"] == smoke["val_points"][-1][2] > 0
    assert smoke["tokens_per_s"] == pytest.approx(12 * 2048 / smoke["train_time_ms"] * 1000, rel=0.02)
    assert smoke["peak_memory_mib"] > 100 and 0 < smoke["mfu"] < 1
    assert re.search(r"\| validation loss +\| \d\.\d{4} after 12 steps", smoke["stdout"])


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
        ["--without=untied_head", "--head_lr=0.008"],  # a rate for hundreds of steps, not for twelve
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


def test_steps_are_in_the_log_and_the_final_validation_alone_on_the_console(shards, tmp_path):
    run = smoke_run(shards, tmp_path, "--val_loss_every=0")
    assert [int(m[1]) for m in STEP_LINE.finditer(run["path"].with_suffix(".txt").read_text())] == [*range(1, 13)]
    assert not STEP_LINE.search(run["stdout"])
    assert [int(m[1]) for m in VAL_LINE.finditer(run["stdout"])] == [12]


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

    other = tmp_path / "changed.py"
    other.write_bytes(SCRIPT.read_bytes() + b"\n# one more line\n")
    done = run_script(first["argv"][1:], tmp_path, script=other)
    assert (
        done.returncode == 2
        and "belongs to another script" in done.stderr
        and len(list(folder.iterdir())) == 7
    )


def record(shards, *args, status=0) -> str:
    """A record run of three steps in this process. Returns its stderr."""
    words = ["--preset=smoke", "--device=cpu", "--num_iterations=3", "--val_loss_every=0", "--record=mine"]
    assert gpt.main([*words, *data_args(shards), *args]) == status
    return ""


def test_a_record_is_of_one_config_and_machine(shards, tmp_path, monkeypatch, capsys):
    """Other options and machines are refused at the start, and leave nothing. Seeds and folders may differ."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    record(shards, "--dtype=auto")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    before = sorted(path for path in tmp_path.rglob("*"))
    for option in ("--head_lr=0.01", "--dtype=float32", "--val_tokens=2048", "--checkpoint_every=2", "--telemetry_every=3"):
        capsys.readouterr()
        record(shards, "--dtype=auto", option, status=2)
        errors = capsys.readouterr().err
        assert "--record=mine has other runs (records/try/" in errors and errors.count("\n") == 1
        assert f"{option[2:].partition('=')[0]} was " in errors and sorted(tmp_path.rglob("*")) == before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 64)
        record(shards, "--dtype=auto", "--seed=1", status=2)
        assert "threads was 1, here 64" in capsys.readouterr().err and sorted(tmp_path.rglob("*")) == before
    record(shards, "--dtype=auto", "--seed=1", "--logs_dir=elsewhere")
    assert "dtype and fast forms are those of the first start" in capsys.readouterr().out
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("records/*/*/*.json")]
    assert sorted((run["seed"], run["choices"]["dtype"]) for run in runs) == [(0, "bfloat16"), (1, "bfloat16")]
    assert len({json.dumps(run["choices"]) for run in runs}) == 1
    (path, _) = tmp_path.glob("records/*/*/*.json")
    path.with_name("0.json").write_text("[]")
    record(shards, "--dtype=auto", "--seed=2", status=2)
    assert "0.json is not a result" in capsys.readouterr().err


def at_the_first_step(monkeypatch, act) -> None:
    """Call act once, in the first training step of a run in this process."""
    real, begun = gpt.Trainer.train_step, []

    def train_step(self, *args):
        if not begun:
            begun.append(True)
            act()
        return real(self, *args)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)


@pytest.mark.parametrize("how", ["script", "options"])
def test_two_runs_that_take_one_name_at_once(how, shards, tmp_path, monkeypatch, capsys):
    """Both may start. The one that ends second keeps its result in logs/ and has status 1."""
    monkeypatch.chdir(tmp_path)

    def run_another():
        with pytest.MonkeyPatch.context() as patch:
            if how == "script":
                patch.setattr(gpt, "SCRIPT", b"# another script")
            record(shards, *(["--head_lr=0.01"] if how == "options" else []))

    at_the_first_step(monkeypatch, run_another)
    record(shards, "--seed=1", status=1)
    out, errors = capsys.readouterr()
    words = "belongs to another script" if how == "script" else "has other runs"
    assert "this run is not recorded: --record=mine " + words in errors and errors.count("\n") == 1
    (kept,), (first,) = tmp_path.glob("logs/*.json"), tmp_path.glob("records/try/*/*.json")
    assert f"The result was written to logs/{kept.name} instead" in errors and "| result           | none, see below" in out
    assert (json.loads(kept.read_text())["seed"], json.loads(first.read_text())["seed"]) == (1, 0)
    script = (first.parent / "train_gpt.py").read_bytes()
    assert (script == b"# another script") == (how == "script")
    assert next(tmp_path.glob("logs/train_gpt_*.py")).read_bytes() == SCRIPT.read_bytes()


def test_seeds_around_midnight_are_one_record(shards, tmp_path, monkeypatch):
    """The folder has the date of the first result. A run that began on the day before joins it."""
    monkeypatch.chdir(tmp_path)

    class Today(datetime.date):
        day = 24

        @classmethod
        def today(cls):
            return datetime.date(2026, 11, cls.day)

    monkeypatch.setattr(gpt.datetime, "date", Today)

    def run_another():
        Today.day = 25
        record(shards, "--seed=1")

    at_the_first_step(monkeypatch, run_another)
    record(shards)
    (folder,) = tmp_path.glob("records/try/*")
    assert folder.name == "2026-11-25_mine" and len(list(folder.glob("*.json"))) == 2


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
    assert result["git_commit"] == commit


@pytest.mark.parametrize("change, expected", [("none", "{head}"), ("edit", "{head}-dirty"), ("untracked", "")])
def test_the_commit_is_of_the_script(tmp_path, monkeypatch, change, expected):
    script = tmp_path / "train_gpt.py"
    script.write_bytes(gpt.SCRIPT)
    (tmp_path / "other").write_text("")
    head = make_repository(tmp_path, "other" if change == "untracked" else "train_gpt.py")
    if change == "edit":
        monkeypatch.setattr(gpt, "SCRIPT", gpt.SCRIPT + b"\n")
    monkeypatch.setattr(gpt, "__file__", str(script))
    assert gpt.find_commit() == expected.format(head=head)


def test_a_record_on_other_data_needs_a_track(shards, tmp_path, monkeypatch, capsys):
    """laptop is a corpus, track_1 the files of its preset. smoke has track try, which takes any data."""
    monkeypatch.chdir(tmp_path)
    record(shards, "--track=laptop", status=2)
    errors = capsys.readouterr().err
    assert re.search(r"error: corpus fingerprint [0-9a-f]{16} of --train_files=\S+ is not the data of track laptop", errors)
    assert errors.endswith("give a new name with --track=NAME\n") and errors.count("\n") == 1
    record(shards, "--track=track_1", status=2)
    assert "--val_tokens=4096 is not the data of track track_1" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*_seed*"))
    record(shards, "--track=mine")
    assert len(list(tmp_path.glob("records/mine/*_mine/*.json"))) == 1
    assert {gpt.make_config({"preset": name}).track for name in ("smoke", "smoke_frontier", "quick")} == {"try"}


def test_a_record_whose_logs_lie_in_its_folder(shards, tmp_path, monkeypatch, capsys):
    """It is a record like others: compared, with its script under the name train_gpt.py."""
    monkeypatch.chdir(tmp_path)
    record(shards)
    (folder,) = tmp_path.glob("records/try/*")
    record(shards, "--seed=1", f"--logs_dir={folder.relative_to(tmp_path)}")
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".py", ".txt", ".txt"]
    record(shards, "--head_lr=0.01", f"--logs_dir={folder.relative_to(tmp_path)}", status=2)
    assert "has other runs" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(shards, tmp_path, monkeypatch, capsys):
    """Status 1 and one line. No result, and no checkpoint after it."""
    monkeypatch.chdir(tmp_path)
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        loss = real(self, *args)
        return loss * math.nan if self.progress.step == 4 else loss

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    args = ["--preset=smoke", "--device=cpu", "--checkpoint_every=2", "--record=nan", *data_args(shards)]
    assert gpt.main(args) == 1
    errors = capsys.readouterr().err
    assert errors == "train_gpt.py: error: the training loss of step 5 is nan: lower the learning rates, or give --guard=on\n"
    assert not list(tmp_path.rglob("*_seed0_*.json")) and not list(tmp_path.glob("records/*"))
    assert sorted(path.name for path in tmp_path.rglob("*.pt")) == ["step_000002.pt", "step_000004.pt"]


def test_a_bug_keeps_its_traceback(shards, tmp_path, monkeypatch):
    """A ValueError or OSError of the model is not bad input, in the warm-up or without one."""
    monkeypatch.chdir(tmp_path)
    for error in (ValueError("not enough values to unpack (expected 3, got 2)"), OSError("could not get source code")):
        for warm_up in (1, 0):
            def forward(*_args, error=error):
                raise error

            monkeypatch.setattr(gpt.Block, "forward", forward)
            with pytest.raises(type(error)):
                gpt.main(["--preset=smoke", "--device=cpu", f"--warmup_iterations={warm_up}", *data_args(shards)])


@pytest.mark.slow
def test_a_copy_in_an_empty_folder(tmp_path):
    """Without data one line names the ways to get it. The embedded corpus is built by data/text.py, as run.sh does it."""
    script = shutil.copy(SCRIPT, tmp_path / "train_gpt.py")
    done = run_script(["--preset=smoke"], tmp_path, script=script)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "run python data/cached_fineweb10B.py" in done.stderr
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
    val = tmp_path / "data" / "torch_source" / "val_000000.bin"
    data = val.read_bytes()
    # a corpus of other text is not replaced
    corpus = tmp_path / "data" / "torch_source" / "corpus.json"
    corpus.write_text(json.dumps({**info, "source": "notes"}))
    done = subprocess.run(make_corpus, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "data/torch_source has a corpus with source 'notes', but this folder is for the PyTorch source" in done.stderr
    assert json.loads(corpus.read_text())["source"] == "notes" and val.read_bytes() == data
    # a corpus of another PyTorch is built again
    (tmp_path / "data" / "torch_source" / "corpus.json").write_text(
        json.dumps({**info, "source": "torch 1.0"})
    )
    os.utime(tmp_path / "data" / "torch_source" / "val_000000.bin", (0, 0))
    subprocess.run(make_corpus, cwd=tmp_path, check=True)
    assert json.loads((tmp_path / "data" / "torch_source" / "corpus.json").read_text()) == info


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_an_output_folder_that_cannot_be_written(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").write_text("a file, not a folder")
    for field, *args in (("logs_dir",), ("records_dir", "--logs_dir=l", "--record=r", "--records_dir=logs")):
        assert gpt.main(["--preset=smoke", "--device=cpu", *data_args(shards), *args]) == 2
        err = capsys.readouterr().err
        assert f"choose another folder with --{field}" in err and err.count("\n") == 1
        assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_trying_a_folder_leaves_nothing(tmp_path):
    with pytest.raises(gpt.InputError, match="File name too long.*: elsewhere"):
        gpt.check_writable(tmp_path / "a" / ("b" * 300), "elsewhere")
    assert not list(tmp_path.iterdir())
    gpt.check_writable(tmp_path / "a" / "b", "elsewhere")
    assert not list(tmp_path.iterdir())
    with ThreadPoolExecutor(8) as pool:  # runs that begin in one instant share logs/, and none is refused
        for number in range(50):
            list(pool.map(lambda _, n=number: gpt.check_writable(tmp_path / str(n) / "c", ""), range(8)))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_missing_data_leaves_nothing_behind(tmp_path):
    done = run_script(["--preset=smoke", "--train_files=nowhere/*.bin"], tmp_path)
    assert done.returncode == 2 and "nowhere/*.bin" in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_out_of_memory_names_the_knob(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = smoke_config(shards)
    with (
        pytest.raises(gpt.InputError, match="--micro_batch_tokens=512"),
        gpt.RunLog(cfg, make_runtime(), gpt.describe_run(cfg, make_runtime(), [])),
        gpt.explain_memory(cfg),
    ):
        raise torch.OutOfMemoryError("full")
    assert not list((tmp_path / "logs").iterdir())
    with pytest.raises(RuntimeError, match="shape"), gpt.explain_memory(cfg):
        torch.zeros(2) @ torch.zeros(3, 3)  # other errors pass


def test_seeds_of_a_record_are_of_one_text(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["--preset=smoke", "--device=cpu", "--num_iterations=2", "--record=one", *data_args(shards)]
    assert gpt.main(args) == 0
    monkeypatch.setattr(gpt, "fingerprint", lambda _: "0" * 16)  # other shards under the same names
    assert gpt.main([*args, "--seed=1"]) == 2
    assert "has other runs" in (said := capsys.readouterr().err) and "other data" in said


def test_memory_that_runs_out_while_training_costs_no_log(shards, tmp_path, monkeypatch):
    """Bad input leaves no files, but the log of four steps is kept."""
    monkeypatch.chdir(tmp_path)
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        if self.log.progress.step == 4:
            raise torch.OutOfMemoryError("full")
        return real(self, *args)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    args = ["--preset=smoke", "--device=cpu", "--warmup_iterations=0", "--telemetry_every=2"]
    assert gpt.main([*args, *data_args(shards)]) == 2
    measured, log = sorted((tmp_path / "logs").iterdir())
    assert log.read_text().splitlines()[-1].startswith("out of memory with --micro_batch_tokens=1024")
    events = map(json.loads, measured.read_text().splitlines())
    assert [(e["event"], e["step"]) for e in events] == [("validation", 0), ("telemetry", 2), ("telemetry", 4)]


def test_a_crash_keeps_its_log(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg, rt = smoke_config(shards), make_runtime()
    with pytest.raises(ZeroDivisionError), gpt.RunLog(cfg, rt, gpt.describe_run(cfg, rt, [])) as log:
        log.print("step:1")
        raise ZeroDivisionError
    (left,) = (tmp_path / "logs").iterdir()
    assert left.name == f"{log.run_id}.txt" and left.read_text().endswith("=\nstep:1\n")


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


def test_progress_without_a_terminal(shards, tmp_path, monkeypatch, capsys):
    """About every 5 % of the run: step, loss and the time to go, from the time per token and the last validation."""
    monkeypatch.chdir(tmp_path)
    now, validate, train_step = pass_time_by_hand(monkeypatch), gpt.Trainer.validate, gpt.Trainer.train_step
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *args: now.append(100) or validate(*args))
    monkeypatch.setattr(gpt.Trainer, "train_step", lambda *args: now.append(120) or train_step(*args))
    args = ["--preset=smoke", "--device=cpu", "--num_iterations=30", "--val_loss_every=10", "--warmup_iterations=0"]
    assert gpt.main([*args, *data_args(shards)]) == 0
    found = re.findall(r"^step (\d+)/30: loss (\d\.\d{4}), (\d+) min (\d+) s to go$", capsys.readouterr().out, re.M)
    assert [int(step) for step, *_ in found] == list(range(2, 30, 2))
    # 120 s per step, and 100 s for each validation after steps 10, 20 and 30 that is still to come
    assert [60 * int(minutes) + int(seconds) for _, _, minutes, seconds in found] == [
        (30 - step) * 120 + 100 * (1 + (30 - step) // 10) for step in range(2, 30, 2)]
    (result,) = tmp_path.glob("logs/*.json")
    points = dict(map(tuple, json.loads(result.read_text())["train_points"]))
    assert [float(loss) for _, loss, *_ in found] == [pytest.approx(points[int(step)], abs=6e-5) for step, *_ in found]


def test_the_time_to_go_of_a_resumed_run(shards, tmp_path, monkeypatch, capsys):
    """It is counted from the tokens of this process, which makes four times fewer tokens per step here."""
    monkeypatch.chdir(tmp_path)
    now, train_step = pass_time_by_hand(monkeypatch), gpt.Trainer.train_step
    monkeypatch.setattr(gpt.Trainer, "train_step", lambda *args: now.append(60) or train_step(*args))
    args = ["--preset=smoke", "--device=cpu", "--val_loss_every=0", "--warmup_iterations=0", *data_args(shards)]
    assert gpt.main([*args, "--num_iterations=6", "--checkpoint_every=6"]) == 0
    (path,) = tmp_path.glob("checkpoints/*/step_000006.pt")
    capsys.readouterr()
    assert gpt.main([*args, "--num_iterations=9", "--tokens_per_step=512", f"--resume={path}"]) == 0
    (line,) = re.findall(r"^step 7/9: loss \d\.\d+, (\d+) min (\d+) s to go$", capsys.readouterr().out, re.M)
    assert 60 * int(line[0]) + int(line[1]) == 120  # two steps as long as this one, a minute each


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


@pytest.mark.parametrize("hard, status", slow_but([(None, 0), (50, 1)], (None, 0)))
def test_more_shards_than_open_files(hard, status, tmp_path):
    """The limit is raised to the hard limit. If that is too low, Python's error says so."""
    tokens = np.full(600, 97, np.uint16)
    tokens[0] = BOS
    for number in range(80):
        write_shard(tmp_path / f"train_{number:03}.bin", tokens, VOCAB, BOS)
    write_shard(tmp_path / "val_0.bin", np.tile(tokens, 10), VOCAB, BOS)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    words = ["--preset=smoke", "--device=cpu", "--num_layers=1", "--num_iterations=20", "--val_loss_every=0", "--warmup_iterations=0"]
    done = subprocess.run([sys.executable, str(SCRIPT), *words, "--max_doc_len=600", *data_args(tmp_path)], cwd=tmp_path, preexec_fn=limit,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == status, done.stderr
    assert bool(re.search("Too many open files", done.stderr)) == bool(hard)


def test_shards_of_another_bos_are_refused(tmp_path):
    """Documents begin with it, and masks are made with one number for all shards."""
    for name, bos in (("train_0", BOS), ("train_1", 97), ("val_0", 97)):
        tokens = np.full(30_000, 98, np.uint16)
        tokens[::100] = bos
        write_shard(tmp_path / f"{name}.bin", tokens, VOCAB, bos)
    cfg = smoke_config(tmp_path)
    with pytest.raises(gpt.InputError, match="train_1.bin has BOS token 97, the other shards have 256"):
        gpt.TrainData(cfg, gpt.Schedule(dataclasses.replace(cfg, num_iterations=20)))
    with pytest.raises(gpt.InputError, match="val_0.bin has BOS token 97, the other shards have 256"):
        gpt.ValData(cfg, BOS)
    assert gpt.ValData(cfg, 97).batch(0).doc_ids.max() == 11  # 1,024 tokens in documents of 100


def test_a_folder_means_its_shards(shards, tmp_path, monkeypatch, capsys):
    """As nanoGPT names a dataset. A text file gets the line that converts it, and nothing is to be deleted."""
    monkeypatch.chdir(tmp_path)
    args = ["--preset=smoke", "--device=cpu", "--num_iterations=2", "--val_loss_every=0"]
    for files in (data_args(shards), [f"--train_files={shards}", f"--val_files={shards}"]):
        assert gpt.main([*args, *files]) == 0
    ours, theirs = (json.loads(path.read_text()) for path in tmp_path.glob("logs/*.json"))
    assert ours["corpus_fingerprint"] == theirs["corpus_fingerprint"] and ours["val_points"][0][1] == theirs["val_points"][0][1]
    (tmp_path / "notes.txt").write_text("some text\n" * 200)
    capsys.readouterr()
    assert gpt.main([*args, "--train_files=notes.txt"]) == 2
    errors = capsys.readouterr().err
    assert "notes.txt is not a token shard" in errors and "convert text with python data/text.py PATH --out FOLDER" in errors
    assert "delete" not in errors
