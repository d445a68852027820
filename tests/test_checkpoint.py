"""Checkpoints: a stopped run continues with equal bits on any number of ranks. Damaged files are never used."""

import errno
import functools
import hashlib
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    AT_THE_END,
    BOS,
    SCRIPT,
    TINY,
    VOCAB,
    assert_same_bits,
    at_step,
    before_call,
    data_args,
    find_saved,
    gpt,
    list_logged,
    make_documents,
    make_runtime,
    read_events,
    read_tensors,
    run,
    slow_but,
    smoke_config,
    write_shard,
)
from run_ranks import ENVIRONMENT, exact_sums, run_ranks

from tools import sample

ONE_SEQUENCE = "--micro_batch_tokens=512"
SMOKE_92 = ["--preset=smoke_92", "--device=cpu", "--warmup_iterations=0", "--val_tokens=1024"]
SMOKE_92 += [ONE_SEQUENCE, "--adam_eps=1.0"]  # equal bits on one and more ranks
FP8 = ["--fp8=on", "--fp8_parts=head,mlp", "--model_dim=128", "--head_dim=64"]


def stop_at(monkeypatch, step: int, signum: int = signal.SIGTERM) -> None:
    """The next run in this process gets a signal in this step, once."""
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), signum))


def forget(step: int | None = None) -> None:
    """Delete the results, and a checkpoint, as if the run had been killed before it."""
    for path in Path().rglob("*_seed*.json"):
        path.unlink()
    if step:
        shutil.rmtree(find_saved(step))


def list_saved(folder: str = "checkpoints") -> list[str]:
    return sorted(path.name for path in Path(folder).rglob("*step_*"))


def check_model(step: Path) -> dict[str, torch.Tensor]:
    """The parameters in model.pt: those of this checkpoint after the averages, without optimizer state."""
    content, tensors = torch.load(step.parent / "model.pt", weights_only=True), read_tensors(step)
    averaged = {entry.partition("/")[0] for entry in tensors if "/average" in entry}
    found = {f"{name}/": rows for name, rows in content["tensors"].items()}
    assert found.keys() == {entry for entry in tensors if entry[-1] == "/"}
    assert json.loads(content["metadata"])["bos"] == 256
    for entry, rows in found.items():
        assert torch.equal(rows.flatten(), tensors[entry].flatten()) or entry[:-1] in averaged, entry
    return content["tensors"]


def points_of(result: dict) -> tuple:
    return [point[:2] for point in result["val_points"]], result["train_points"]


# ---- a resumed run is the run ---------------------------------------------------------------------------------------


VARIANTS = {
    "muon": [],
    "warm-up": ["--warmup_iterations=2"],
    "hyperball": ["--matrix_rule=normuonh", "--gains=norm,output"],  # momentum, second momentum, radius
    "bfloat16": ["--matrix_dtype=bfloat16", "--embed_dtype=bfloat16"],
    "every": ['--groups={"embed":{"every":3},"value_embed":{"every":3},"head":{"every":3},"scalar":{"every":3}}'],
    "untied before": ["--tie_head=on", "--untie_frac=0.5"],
    "untied after": ["--tie_head=on", "--untie_frac=0.9", '--groups={"embed":{"every":2},"head":{"every":2}}'],
    "low_bits": ["--matrix_dtype=bfloat16", "--state_dtype=float32", "--matrix_rule=normuon"],
    "fp8": FP8,  # scales are one step late
    "guard": ["--guard=on"],
    # n-grams, averages, tied weights, gradients over two and four steps, sampled classes: a part of 2048
    "all mechanisms": [*SMOKE_92, "--vocab_multiple=2048"],
}
SLOW = ("hyperball", "untied before")


def read_telemetry() -> list[dict]:
    """The measured steps of a run without their times. A repeated step counts once, as it was at last."""
    measured = {line["step"]: line for line in read_events("telemetry")}
    return [{key: line[key] for key in line if key not in ("seconds", "train_time_ms")} for line in measured.values()]


@pytest.mark.parametrize("name", [
    *slow_but([name for name in VARIANTS if name != "fp8"], *(VARIANTS.keys() - SLOW)),
    pytest.param("fp8", marks=pytest.mark.recipe),  # an edited MLP has no FP8 form
])
def test_a_resumed_run_is_the_run(shards, here, name, capsys, monkeypatch):
    """The last checkpoint is deleted, as if the run had been killed before it. auto continues under the run_id.

    Training draws no random numbers, so a checkpoint needs no state of a generator.
    """
    life = functools.partial(run, shards, *VARIANTS[name], "--num_iterations=12", "--checkpoint_every=5",
                             "--telemetry_every=4", preset=[] if name == "all mechanisms" else TINY)
    states, step = [], {"every": 6, "all mechanisms": 8}.get(name, 10)
    with monkeypatch.context() as patch:
        before_call(patch, gpt.Stop, "catch_signals", lambda _: states.append(torch.get_rng_state()))
        whole = life()
    assert torch.equal(*states, torch.get_rng_state()) and list_saved() == [f"step_{step:06d}", "step_000012"]
    measured, end, weights = read_telemetry(), read_tensors(find_saved(12)), check_model(find_saved(12))
    assert ("blocks.1.attention.qk/low_bits" in end) == (name == "low_bits")
    assert "fp8/scales" in end
    assert ({"ngram/", "ngram/exp_avg_sq", "head.weight/average0"} <= end.keys()) == (name == "all mechanisms")

    forget(12)
    next(Path().rglob("model.pt")).unlink()
    again = life("--resume=auto")
    assert points_of(again) == points_of(whole) and len(whole["val_points"]) == 3
    assert_same_bits(read_tensors(find_saved(12)), end)
    assert_same_bits(check_model(find_saved(12)), weights)
    assert read_telemetry() == measured and len(measured) == 3
    assert (again["run_id"], again["resumed_at"], again["resumed_from"]) == (whole["run_id"], [step], "")
    assert list_logged(Path("logs", f"{whole['run_id']}.txt")) == [*range(1, 13), *range(step + 1, 13)]
    capsys.readouterr()
    assert life("--resume=auto") is None  # finished
    assert f"logs/{whole['run_id']}.json is the result of this run" in capsys.readouterr().out
    forget()  # as if killed in the final validation
    assert points_of(life("--resume=auto")) == points_of(whole)


def test_a_finished_run_without_checkpoints_is_not_repeated(shards, here, capsys):
    """Of another seed it is."""
    result = run(shards, "--num_iterations=2", "--resume=auto")
    assert not list(Path().rglob("step_*")) and run(shards, "--num_iterations=2", "--resume=auto") is None
    assert f"logs/{result['run_id']}.json is the result of this run: nothing to do" in capsys.readouterr().out
    assert run(shards, "--num_iterations=2", "--resume=auto", "--seed=1")["run_id"] != result["run_id"]


def test_what_a_checkpoint_holds(shards, here):
    args = ["--num_iterations=7", "--checkpoint_every=7", "--val_loss_every=3"]
    result, step = run(shards, *args), find_saved(7)
    assert sorted(path.name for path in step.iterdir()) == ["rank0.pt", "state.json"]
    assert step.parent.name == result["run_id"]
    assert step.parent.parent.name == f"smoke_seed0_{result['key']}" and re.fullmatch("[0-9a-f]{12}", result["key"])
    metadata, tensors = gpt.read_metadata(step), read_tensors(step)
    cfg = gpt.config_from_dict(metadata["config"])
    assert cfg == gpt.make_config(gpt.parse_argv([*TINY, *data_args(shards), *args]))
    sizes = {f"{name}/": param.numel() for name, param in gpt.GPT(cfg).named_parameters()}
    assert sizes == {entry: rows.numel() for entry, rows in tensors.items() if entry.endswith("/")}
    assert metadata["progress"]["step"] == metadata["optimizer_steps"] == 7 and not metadata["is_tied"]
    assert metadata["progress"]["train_time"] > 0 and [point[0] for point in metadata["val_points"]] == [0, 3, 6]
    assert metadata["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest() and metadata["bos"] == 256
    assert metadata["choices"] == result["choices"] and metadata["choices"]["dtype"] == "float32"
    assert metadata["key"] == result["key"] == gpt.make_key(metadata) == gpt.make_key(result)


def test_a_run_keeps_two_steps_and_leaves_others(shards, here, capsys):
    """An incomplete step of the run that continues is removed. Steps of other runs, and copies, stay."""
    args = ["--num_iterations=6", "--checkpoint_every=1", "--resume=auto"]
    result = run(shards, *args)
    folder = find_saved(6).parent
    assert f"starting anew: no whole checkpoint in {folder.parent}\n" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "model.pt", "step_000005", "step_000006"]
    other = folder.with_name("20200101-000000_seed0_00000000")
    for name in ("step_000001", "step_000002", "step_000003", "step_000004"):
        shutil.copytree(folder / "step_000005", other / name)
    (other / "step_000004/rank0.pt").unlink()
    forget(6)
    shutil.copytree(other / "step_000004", folder / "step_000009")
    for name in ("step_000002_keep", "step_000008_backup"):
        shutil.copytree(folder / "step_000005", folder / name)
    again = run(shards, *args)
    assert points_of(again) == points_of(result) and again["resumed_at"] == [5]
    assert list_saved(folder) == ["step_000002_keep", "step_000005", "step_000006", "step_000008_backup"]
    assert len(list_saved(other)) == 4


# ---- several ranks --------------------------------------------------------------------------------------------------


def train_ranks(num_ranks: int, mode: str, shards, *args, preset=TINY, status: int = 0) -> str:
    """run_ranks.fail, in rank 1. All ranks end with this status. Returns stderr."""
    ends, _, errors = run_ranks("fail", num_ranks, mode, 1, *preset, *data_args(shards), *args)
    assert [end for end, _ in ends] == [status] * num_ranks, errors[-2000:]
    return errors


SHORT = [ONE_SEQUENCE, "--num_iterations=6", "--tokens_per_step=1536", "--checkpoint_every=2"]
JOBS = {  # name: (preset, options, number of ranks, steps with checkpoints)
    "smoke": (TINY, SHORT, 3, (2, 4, 6)),
    "record_92": (SMOKE_92, ["--num_iterations=10", "--checkpoint_every=4"], 2, (4, 8, 10)),
    "fp8": (TINY, [*FP8, *SHORT], 3, (2, 4, 6)),
}


@pytest.fixture(name="rounding")
def round_gradients():
    with exact_sums():
        yield


@pytest.mark.parametrize("name", ["smoke", "record_92", pytest.param("fp8", marks=[pytest.mark.slow, pytest.mark.recipe])])
def test_other_numbers_of_ranks_continue_a_run(shards, here, name, monkeypatch, rounding):
    """One rank, then several from the first checkpoint, then one from the second: equal bits, because gradients are
    rounded."""
    monkeypatch.setattr(gpt.Checkpoints, "KEPT", 3)
    preset, args, num_ranks, (first, second, last) = JOBS[name]
    whole, end = run(shards, *args, preset=preset), read_tensors(find_saved(last))
    weights = check_model(find_saved(last))
    forget(last)
    shutil.rmtree(find_saved(second))
    train_ranks(num_ranks, "none", shards, *args, "--resume=auto", preset=preset)
    assert_same_bits(read_tensors(path := find_saved(last)), end)
    for key, ours in check_model(path).items():  # norms of averages are sums in another order
        assert torch.allclose(ours, weights[key], rtol=1e-6), key
    files, metadata = sorted(path.glob("rank*.pt")), gpt.read_metadata(path)
    assert [file.name for file in files] == [f"rank{i}.pt" for i in range(num_ranks)]
    assert metadata["progress"]["resumed_at"] == [first] and metadata["hardware"]["ranks"] == num_ranks
    size = sum(tensor.nbytes for tensor in end.values())
    assert size < sum(file.stat().st_size for file in files) < 1.05 * size + 20_000
    forget(last)
    again = run(shards, *args, "--resume=auto", preset=preset)
    assert (again["resumed_at"], again["hardware"]["ranks"]) == ([first, second], 1)
    assert_same_bits(read_tensors(path), end)
    assert again["val_points"][-1][1] == whole["val_points"][-1][1]


@pytest.mark.parametrize("mode, signum", slow_but([("term", 15), ("int", 2)], ("term", 15)))
def test_all_ranks_stop_at_the_same_step(shards, here, mode, signum, rounding):
    """A signal to one of three ranks: one line and one checkpoint. One rank continues it to equal bits."""
    args = [ONE_SEQUENCE, "--num_iterations=8", "--tokens_per_step=1536", "--val_loss_every=4"]
    errors = train_ranks(3, mode, shards, *args, status=128 + signum)
    assert not list(Path("logs").glob("*.json"))
    line = r"train_gpt.py: stopped by (\w+) after step (\d+) of 8: (\S+)\. --resume=auto continues\n"
    found = re.fullmatch(line, errors)
    assert found[1] == signal.Signals(signum).name and int(found[2]) == 6 and found[3] == str(find_saved(6))
    run(shards, *args, "--resume=auto", "--checkpoint_every=8")
    resumed = read_tensors(find_saved(8))
    run(shards, *args, "--checkpoint_every=8", "--out=alone")
    (alone,) = Path("alone").rglob("step_000008")
    assert_same_bits(resumed, read_tensors(alone))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_is_stopped_with_a_checkpoint(shards, here, signum):
    """SIGTERM of a scheduler to the launcher, or Ctrl-C: all ranks exit after one line and one checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    command += [*TINY, *data_args(shards), "--tokens_per_step=1024", "--num_iterations=4000", "--epochs=100"]
    agent = subprocess.Popen([*command, "--val_loss_every=5", f"--out={here}"], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,  # nohup makes pytest ignore SIGINT
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip
    assert any(line.startswith("step:5/") for line in agent.stdout), agent.stderr.read()[-2000:]
    agent.send_signal(signum)
    _, errors = agent.communicate(timeout=3000)
    line = f"train_gpt.py: stopped by {signum.name} after step "
    assert agent.returncode != 0 and errors.count(line) == errors.count("train_gpt.py: ") == 1, errors
    (step,) = Path("checkpoints").rglob("step_*")
    assert gpt.read_metadata(step)["hardware"]["ranks"] == 2
    assert subprocess.run(["pgrep", "-f", f"out={here}"], capture_output=True).stdout == b""


@pytest.mark.slow
def test_ranks_wait_for_a_slow_disk(shards, here):
    """The file of rank 1 needs longer than a collective of a step may take."""
    train_ranks(2, "slow disk", shards, "--num_iterations=3", "--tokens_per_step=1024", "--checkpoint_every=2")
    assert list_saved() == ["step_000002", "step_000003"]


def test_all_ranks_learn_of_a_write_error(shards, here):
    """Rank 1 cannot write its part of the last step. All ranks say so, and nothing of the step is left."""
    args = [ONE_SEQUENCE, "--num_iterations=5", "--tokens_per_step=1024", "--checkpoint_every=4", AT_THE_END]
    errors = train_ranks(2, "full disk", shards, *args, status=1)
    assert list_saved() == ["step_000004"] and list(Path("logs").glob("*.json"))
    line = rf"(train_gpt.py: error: {find_saved(4).parent}/step_000005 was not written: .*/rank1.pt'\n)\1"
    assert re.fullmatch(line, errors)  # a line of each rank, because no torchrun ends rank 1


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops(shards, here, monkeypatch, capsys, signum):
    """Also without --checkpoint_every. The handlers of before are in force again."""
    args, old = ["--num_iterations=8", AT_THE_END], signal.signal(signum, signal.default_int_handler)
    stop_at(monkeypatch, 5, signum)
    assert run(shards, *args, status=128 + signum) is None
    assert signal.signal(signum, old) is signal.default_int_handler
    line = f"train_gpt.py: stopped by {signum.name} after step 5 of 8: {find_saved(5)}. --resume=auto continues\n"
    assert capsys.readouterr().err == line
    (log,) = Path("logs").glob("*.txt")
    assert log.read_text().splitlines()[-1] + "\n" == line.removeprefix("train_gpt.py: ")
    assert run(shards, *args, "--resume=auto")["resumed_at"] == [5]
    assert list_logged(log) == list(range(1, 9))  # one log, no step twice


def test_a_signal_waits_for_the_last_gradient(shards, here, monkeypatch):
    """The Adam groups are updated in every third step, and a checkpoint has no gradients."""
    stop_at(monkeypatch, 4)
    run(shards, "--num_iterations=8", *VARIANTS["every"], status=143)
    assert list_saved() == ["step_000006"]


def test_signals_are_left_alone_in_a_thread_and_if_they_are_ignored(shards, here, monkeypatch):
    handlers, statuses = [], []
    before_call(monkeypatch, gpt.Stop, "exchange",
                lambda *_: handlers.append(signal.getsignal(signal.SIGTERM)))
    args = [*TINY, *data_args(shards), "--num_iterations=2", AT_THE_END]
    thread = threading.Thread(target=lambda: statuses.append(gpt.main(args)))
    thread.start()
    thread.join()
    old = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        stop_at(monkeypatch, 1)
        statuses.append(gpt.main(args))
    finally:
        signal.signal(signal.SIGTERM, old)
    assert statuses == [0, 0] and handlers == [old, old, signal.SIG_IGN, signal.SIG_IGN]


# ---- the last step --------------------------------------------------------------------------------------------------


def send_sigterm(*_) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


LAST = ["--num_iterations=8", AT_THE_END, "--averages=on"]
STOPPED = "stopped by SIGTERM after step 8 of 8: STEP. --resume=auto continues"
UNFINISHED = ("in the final validation: REASON. STEP has the weights. --resume=auto validates them, and --resume=PATH with "
              "another --val_seq_len needs less memory")
VALIDATION = UNFINISHED.replace("REASON", "stopped by SIGTERM")


def check_the_end(shards, monkeypatch, errors: str, line: str, *args) -> None:
    """This line is the last one of the errors and of the log. The next life is stopped in the validation of step 8. The
    life after that finishes it, with the points of a run without a stop, and removes it without --checkpoint_every.
    Neither saves it again."""
    line = line.replace("STEP", str(find_saved(8)))
    (log,) = Path("logs").glob("*.txt")
    assert errors.splitlines()[-1].removeprefix("train_gpt.py: ").removeprefix("error: ") == line
    assert log.read_text().splitlines()[-1] == line
    before_call(monkeypatch, gpt.Checkpoints, "save", lambda _, trainer: (
        trainer.progress.resumed_at and pytest.fail("it was saved again")))
    with monkeypatch.context() as patch:
        before_call(patch, gpt.Trainer, "validate", send_sigterm)
        run(shards, *LAST, *args, "--resume=auto", status=143)
    assert log.read_text().splitlines()[-1] == VALIDATION.replace("STEP", str(find_saved(8)))
    again = run(shards, *LAST, *args, "--resume=auto")
    assert again["resumed_at"] == [8] and points_of(again) == points_of(run(shards, *LAST, "--out=whole"))
    assert ("step_000008" in list_saved()) == bool(args)


@pytest.mark.parametrize("args", [[], ["--checkpoint_every=4"]], ids=["", "checkpoint_every"])
@pytest.mark.parametrize("owner, name, line", [
    (gpt.Trainer, "train_step", STOPPED),
    (gpt.Stop, "finish_exchange", STOPPED),
    (gpt.Trainer, "validate", VALIDATION)],
    ids=["last step", "before the save", "validation"])
def test_a_signal_at_the_end(shards, here, monkeypatch, capsys, owner, name, line, args):
    """In the last step, before the last checkpoint, or in the final validation, which it ends at once. The averages,
    which change the weights between the last two, are applied once."""
    with monkeypatch.context() as patch:
        at_step(patch, 8, send_sigterm) if name == "train_step" else before_call(patch, owner, name, send_sigterm)
        assert run(shards, *LAST, *args, status=143) is None
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    check_the_end(shards, monkeypatch, errors, line, *args)


def test_a_signal_after_the_final_validation_has_no_effect(shards, here, monkeypatch):
    before_call(monkeypatch, gpt.RunLog, "finish", send_sigterm)
    assert len(run(shards, *LAST)["train_points"]) == 8 and list_saved() == []


@pytest.mark.parametrize("mode, line", [
    ("term", STOPPED.replace("8", "5")), ("term in validation", VALIDATION)], ids=["last step", "validation"])
def test_ranks_get_a_signal_at_the_end(shards, here, rounding, mode, line):
    """In the last step one of two, in the final validation both. One rank validates the checkpoint."""
    args = [ONE_SEQUENCE, "--num_iterations=5", "--tokens_per_step=1024", AT_THE_END]
    errors = train_ranks(2, mode, shards, *args, status=143)
    assert errors == f"train_gpt.py: {line}\n".replace("STEP", str(find_saved(5)))
    again = run(shards, *args, "--resume=auto")
    assert again["resumed_at"] == [5] and again["hardware"]["ranks"] == 1
    assert again["final_val_loss"] == run(shards, *args, "--out=alone")["final_val_loss"]


@pytest.mark.parametrize("error, reason, has_traceback", [
    (torch.OutOfMemoryError("CUDA out of memory.\nMore"), "CUDA out of memory.", False),
    (ValueError("no such mask\nMore"), "no such mask", True), (KeyError(), "KeyError()", True)], ids=repr)
def test_a_final_validation_that_fails(shards, here, monkeypatch, capsys, error, reason, has_traceback):
    """Status 1. The last line has the first line of the error and the weights, after the traceback of an unexpected
    error."""
    with monkeypatch.context() as patch:
        patch.setattr(gpt.Trainer, "validate", lambda *_: throw(error))
        run(shards, *LAST, status=1)
    errors = capsys.readouterr().err
    assert ("Traceback" in errors) == ("in validate" in errors or "in throw" in errors) == has_traceback
    assert has_traceback or errors.count("\n") == 1
    check_the_end(shards, monkeypatch, errors, UNFINISHED.replace("REASON", reason))


def throw(error: Exception):
    raise error


def refuse(patch, pattern: str) -> None:
    """The disk is full for files whose path fits a pattern."""
    before_call(patch, gpt, "write_atomic", lambda path, *_: path.match(pattern) and throw(
        OSError(28, "No space left on device", str(path))))


@pytest.mark.parametrize("case", ["a RunError", "too large", "too large after a resume", "full disk"])
def test_a_failed_validation_names_no_weights(shards, here, monkeypatch, capsys, case):
    """If the error has its own advice, or if the weights are not saved."""
    error, args = ValueError("no such mask"), []
    if case == "a RunError":
        error = gpt.RunError("rank 1 has other parameters")
    if case == "too large after a resume":
        run(shards, *LAST, "--num_iterations=4", "--checkpoint_every=4")
        args = [f"--resume={find_saved(4)}"]
    if case.startswith("too large"):
        monkeypatch.setattr(gpt.Checkpoints, "LAST_BYTES", 0)
    if case == "full disk":
        refuse(monkeypatch, "step_000008/*")
        args = ["--checkpoint_every=4"]
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: throw(error))
    run(shards, *LAST, *args, status=1)
    errors = capsys.readouterr().err
    assert "the weights" not in errors and ("Traceback" in errors) == (case != "a RunError")
    assert case != "a RunError" or errors == "train_gpt.py: error: rank 1 has other parameters\n"


@pytest.mark.parametrize("args, kept", [([], []), (["--checkpoint_every=5"], ["step_000005", "step_000008"])])
def test_the_last_step_stays_until_all_is_written(shards, here, monkeypatch, args, kept):
    """It is saved before the averages and the validation, and without --checkpoint_every it goes after model.pt."""
    found, saved = {}, kept or ["step_000008"]

    def note(name):
        files = [path for pattern in ("logs/*.json", "checkpoints/*/*/model.pt") for path in here.glob(pattern)]
        found[name] = list_saved(), [path.suffix for path in files]

    for owner, name in ((gpt.Optimizer, "apply_averages"), (gpt.Trainer, "validate"), (gpt.RunLog, "finish"),
                        (gpt.Checkpoints, "write_model"), (gpt.Checkpoints, "remove_last")):
        before_call(monkeypatch, owner, name, lambda *_, name=name: note(name))
    run(shards, *LAST, *args)
    assert found == dict(apply_averages=(saved, []), validate=(saved, []), write_model=(saved, []),
                         finish=(saved, [".pt"]), remove_last=(saved, [".json", ".pt"]))
    assert list_saved() == kept


@pytest.mark.parametrize("pattern", ["logs/*.json", "model.pt"])
def test_the_last_step_stays_if_the_result_is_not_written(shards, here, monkeypatch, capsys, pattern):
    """Or model.pt, which is written before it. Status 1, one line, and the next life writes both."""
    with monkeypatch.context() as patch:
        refuse(patch, pattern)
        run(shards, *LAST, status=1)
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "No space left on device" in errors
    assert list_saved() == ["step_000008"] and gpt.is_whole(find_saved(8), make_runtime())
    assert run(shards, *LAST, "--resume=auto") and list(Path().rglob("model.pt")) and list_saved() == []


@pytest.mark.parametrize("owner, name", [
    (gpt.Checkpoints, "save_last"), (gpt.Optimizer, "apply_averages")], ids=["save", "averages"])
def test_a_signal_between_the_last_save_and_the_validation(shards, here, monkeypatch, capsys, owner, name):
    """It ends the run as one in the final validation."""
    with monkeypatch.context() as patch:
        before_call(patch, owner, name, send_sigterm)
        run(shards, *LAST, status=143)
    check_the_end(shards, monkeypatch, capsys.readouterr().err, VALIDATION)


@pytest.mark.parametrize("case, reason", [
    ("full disk", "step_000008 was not written: "), ("locked", "is in use by another process"), ("no lock", "no lock")])
def test_a_last_step_that_cannot_be_saved(shards, here, monkeypatch, capsys, case, reason):
    """A line has the reason, and the run goes on: nobody asked for this checkpoint. A failed validation then names no
    weights."""
    if case == "full disk":
        refuse(monkeypatch, "step_000008/*")
    if case == "locked":
        monkeypatch.setattr(gpt, "lock_run", lambda _: None)
    if case == "no lock":
        monkeypatch.setattr(gpt, "lock_run", lambda _: throw(OSError(37, "no lock")))
    assert len(run(shards, *LAST)["train_points"]) == 8
    out, errors = capsys.readouterr()
    assert reason in out and errors == "" and list_saved() == []
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: throw(ValueError("no such mask")))
    run(shards, *LAST, status=1)
    assert "the weights" not in capsys.readouterr().err


def test_a_line_names_the_checkpoint_if_the_same_run_has_ended(shards, here, monkeypatch, capsys):
    """--resume=auto would find the result of the other run, and have nothing to do."""
    args = ["--num_iterations=8", AT_THE_END]
    ended = run(shards, *args)
    stop_at(monkeypatch, 5)
    run(shards, *args, status=143)
    (step,) = Path().glob("checkpoints/*/*/step_000005")
    assert capsys.readouterr().err.endswith(f": {step}. --resume={step} continues\n")
    monkeypatch.undo()
    monkeypatch.chdir(here)
    again = run(shards, *args, f"--resume={step}")
    assert again["resumed_at"] == [5] and again["final_val_loss"] == ended["final_val_loss"]


@pytest.mark.parametrize("owner, name, line", [
    (gpt.Stop, "finish_exchange", STOPPED), (gpt.Trainer, "validate", VALIDATION)], ids=["before the save", "validation"])
def test_a_line_names_the_option_that_continues(shards, here, monkeypatch, capsys, owner, name, line):
    """In a run that began with --resume=PATH it is this option."""
    run(shards, *LAST, "--num_iterations=4", "--checkpoint_every=4")
    args = [*LAST, option := f"--resume={find_saved(4)}"]
    with monkeypatch.context() as patch:
        before_call(patch, owner, name, send_sigterm)
        run(shards, *args, status=143)
    line = line.replace("STEP", str(find_saved(8))).replace("--resume=auto", option)
    assert capsys.readouterr().err == f"train_gpt.py: {line}\n"
    assert run(shards, *args)["resumed_at"] == [4, 8]


def test_a_large_last_step_is_saved_on_request(shards, here, monkeypatch, capsys):
    """LAST_BYTES is the largest size that is saved without a signal before."""
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        run(shards, *LAST, status=143)
    size = sum(rows.nbytes for rows in read_tensors(find_saved(8)).values())
    saves = []
    before_call(monkeypatch, gpt.Checkpoints, "save", lambda _, trainer: saves.append(trainer.progress.step))
    for limit in (size, size - 1):
        monkeypatch.setattr(gpt.Checkpoints, "LAST_BYTES", limit)
        capsys.readouterr()
        run(shards, *LAST)
        line = "no checkpoint, because it has 0 GB: --checkpoint_every=8 writes it\n"
        assert saves == [8] and capsys.readouterr().out.count(line) == (limit < size)
    before_call(monkeypatch, gpt.Stop, "finish_exchange", send_sigterm)
    run(shards, *LAST, status=143)
    assert saves == [8, 8]


def test_ranks_decide_by_the_bytes_of_all(shards, here, monkeypatch):
    """Of two ranks the first has one more row of a table. With limits between twice their bytes each rank alone would
    decide otherwise than the other, which would wait for it."""
    args = ["--ngram_rows=201", '--groups={"ngram": {"rule": "adamw"}}', "--tokens_per_step=1024", "--num_iterations=1"]
    args = [*TINY, *data_args(shards), *args, AT_THE_END]
    cfg, last, model = gpt.make_config(gpt.parse_argv(args)), [], []
    monkeypatch.setattr(gpt.Comm, "broadcast", lambda *_: None)
    for rank in range(2):
        trainer = gpt.Trainer(cfg, make_runtime(rank, 2))
        last.append(sum(rows.nbytes for rows in gpt.collect_rows(trainer).values()))
        model.append(sum(bucket.shard.nbytes for bucket in trainer.optimizer.buckets))
    for first, second in (last, model):
        assert 2 * first > first + second > 2 * second
    limits = {"model": [sum(model), sum(last) - 1], "last": [sum(model) - 1, sum(last)]}
    ends, _, errors = run_ranks("train_with_limits", 2, json.dumps(limits), *args)
    assert [status for status, _ in ends] == [0, 0], errors[-2000:]
    written = sorted(str(path.relative_to(here)).split("/")[0::4] for path in here.glob("*/checkpoints/*/*/*"))
    assert written == [["last", ".lock"], ["model", "model.pt"]]  # .lock: it was saved, and then removed


# ---- which checkpoint -----------------------------------------------------------------------------------------------


def test_the_key_of_a_run(shards, monkeypatch):
    """Script, data and options that change a result are in it. Folders, telemetry and the machine are not."""

    def make(num_shards=2, **changes):
        return gpt.describe_run(smoke_config(shards, **changes), make_runtime(), [], shard_list[:num_shards], [])

    cfg = smoke_config(shards)
    shard_list = gpt.TrainData(cfg, gpt.Schedule(cfg)).shards
    first = make()
    assert re.fullmatch("[0-9a-f]{12}", first["key"])
    for same in (dict(out="other"), dict(resume="auto"), dict(checkpoint_every=3), dict(telemetry_every=2),
                 dict(tracker="wandb")):  # fmt: skip
        assert make(**same)["key"] == first["key"] != make(**same)["run_id"]
    for other in (dict(seed=1), dict(head_lr=0.1), dict(num_iterations=13), dict(guard=True), dict(record="x"),
                  dict(track="y"), dict(dtype="bfloat16"), dict(fast=("off",)), dict(val_tokens=2048),
                  dict(groups={"embed": {"every": 2}}), dict(num_shards=1)):  # fmt: skip
        assert make(**other)["key"] != first["key"], other
    assert gpt.make_key(make(seed=1), "seed") == gpt.make_key(first, "seed")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert make()["key"] == first["key"]
    monkeypatch.setattr(gpt, "SCRIPT", gpt.SCRIPT + b"\n")
    assert make()["key"] != first["key"]


def test_auto_takes_the_furthest_step_of_its_key(shards, here, monkeypatch, capsys):
    """Also of an older run, as after a clock was set back. Of equal steps the newest run's. Another learning rate or
    seed is another key."""
    args, moments = ["--num_iterations=400", AT_THE_END], iter(range(1, 9))
    monkeypatch.setattr(gpt.time, "strftime", lambda *_: f"20260101-00000{next(moments)}")
    for step, more in ((4, []), (7, ["--head_lr=0.01"]), (2, []), (9, ["--seed=1"]), (6, ["--resume=auto"]),
                       (6, []), (8, ["--resume=auto"])):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            run(shards, *args, *more, status=143)
    found = re.findall(r"^resumed \S+/20260101-00000(\d)_seed0_\w+/step_(\d+)$", capsys.readouterr().out, re.M)
    assert found == [("1", "000004"), ("6", "000006")]


def test_steps_are_sorted_as_numbers(shards, here, capsys):
    """From a million on names are longer. Copies of step 4 have such names: the furthest continues, two stay."""
    args = ["--num_iterations=6", "--checkpoint_every=2", AT_THE_END]
    run(shards, *args)
    step, names = find_saved(4), ["step_1000000", "step_999998", "step_999999"]
    for name in names:
        shutil.copytree(step, step.with_name(name))
    forget(6)
    capsys.readouterr()
    run(shards, *args, "--resume=auto")
    assert f"resumed {step.with_name('step_1000000')}\n" in capsys.readouterr().out
    assert list_saved() == ["step_1000000", "step_999999"]


def test_rank_0_lists_the_steps(shards, here):
    """Rank 1, in another folder, lacks rank 0's steps 4 and 5, and has a step 6. Both take step 2."""
    args = ["--num_iterations=6", "--checkpoint_every=2", AT_THE_END, "--tokens_per_step=1024", ONE_SEQUENCE]
    run(shards, *args)
    (folder,) = Path("checkpoints").glob("*/*")
    shutil.copytree("checkpoints", "other/checkpoints")
    (folder / "step_000006").rename(folder / "step_000005")
    shutil.rmtree(Path("other", folder, "step_000004"))
    shutil.copytree(folder / "step_000004", folder / "step_000002")
    shutil.copytree(folder / "step_000004", Path("other", folder, "step_000002"))
    forget()
    words = [*TINY, *data_args(shards), *args, "--resume=auto"]
    ends, out, errors = run_ranks("train_mixed", 2, "folder", "other", "", *words)
    assert [status for status, _ in ends] == [0, 0], errors[-2000:]
    assert f"resumed {folder}/step_000002 ({folder}/step_000005 is not whole)\n" in out


def test_a_checkpoint_of_other_data(shards, here, capsys):
    """A line has the tokens that it has read. The same data by another name are no other data."""
    args = ["--num_iterations=6", "--checkpoint_every=3", AT_THE_END]
    run(shards, *args)
    (here / "link").symlink_to(shards)
    for files, is_other in ((f"{shards}/train_1.bin", True), (f"{here}/link/train_*.bin", False)):
        capsys.readouterr()
        run(shards, *args, f"--resume={find_saved(3)}", f"--train_files={files}", f"--out={is_other}")
        line = f"resumed {find_saved(3)}"
        if is_other:
            line += ". It has read 1,536 tokens of other data: this run skips as many at the start of its own"
        assert f"\n{line}\n" in capsys.readouterr().out


def test_a_checkpoint_needs_no_fp8_scales(shards, here):
    """Those of the run stay as they are, and its losses too, because it has no FP8."""
    whole, path = run(shards, *SAVED), find_saved(3) / "rank0.pt"
    tensors = torch.load(path, weights_only=True)
    del tensors["fp8/scales/0"]
    torch.save(tensors, path)
    forget(6)
    again = run(shards, *SAVED, "--resume=auto")
    assert again["resumed_at"] == [3] and points_of(again) == points_of(whole)


def test_a_path_begins_a_new_run_that_continues_itself(shards, here, monkeypatch):
    """Options, data and number of steps may change, and PATH stays as it is."""
    first = run(shards, "--num_iterations=6", "--checkpoint_every=3")
    path = find_saved(3)
    before = {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}
    more = [f"--resume={path}", "--num_iterations=8", "--tokens_per_step=1024", "--head_lr=0.01"]
    whole = run(shards, *more, "--out=whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        run(shards, *more, status=143)
    second = run(shards, *more)
    assert {file: file.read_bytes() for file in before} == before
    assert second["resumed_from"] == f"{first['run_id']}/step_000003" and second["resumed_at"] == [3, 5]
    assert second["run_id"] != first["run_id"] and second["key"] == whole["key"] != first["key"]
    assert points_of(second) == points_of(whole) and second["val_points"][-1][0] == 8
    assert second["tokens_per_s"] == pytest.approx((3 * 512 + 5 * 1024) / (second["train_time_ms"] / 1000), rel=0.01)
    assert run(shards, *more) is None  # finished


def test_a_resumed_run_keeps_its_choices(shards, here, monkeypatch, capsys):
    """What auto chose stays, whatever the processor reports now. An option overrules it, and a form that fails is off."""
    args = ["--num_iterations=2", "--checkpoint_every=1", "--dtype=auto", AT_THE_END]
    monkeypatch.setattr(gpt, "supports_bfloat16", lambda _: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    whole = run(shards, *args, "--fast=head_loss,block_attention")
    assert whole["choices"]["dtype"] == "bfloat16" and whole["choices"]["fast"] == ["block_attention", "head_loss"]
    path = find_saved(1) / "state.json"
    metadata = json.loads(path.read_text())
    metadata["config"]["fast"], metadata["key"] = ["auto"], "0"  # as if auto had chosen them
    path.write_text(json.dumps(metadata))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    again = run(shards, *args, f"--resume={path.parent}")
    assert points_of(again) == points_of(whole) and again["choices"] == whole["choices"]
    assert run(shards, *args, f"--resume={path.parent}", "--dtype=float32")["choices"]["dtype"] == "float32"
    real = gpt.FormCheck.find_error
    monkeypatch.setattr(gpt.FormCheck, "find_error", lambda check, names, *more: (
        "refused here" if "head_loss" in names else real(check, names, *more)))
    capsys.readouterr()
    new = run(shards, *args, f"--resume={path.parent}", "--out=other")
    assert "fast form head_loss: off (refused here)" in capsys.readouterr().out
    assert new["choices"]["fast"] == ["block_attention"]


def test_two_processes_do_not_continue_one_run(shards, here, monkeypatch, capsys):
    """The second one waits for the lock, and then fails. A new run with equal options is not disturbed."""
    args, seen, waits = ["--num_iterations=6", "--checkpoint_every=2"], [], []

    def start_others():
        while not list(Path("checkpoints").rglob("step_000002/rank0.pt")):
            time.sleep(0.01)
        before = {path for path in Path("checkpoints").rglob("*")}
        with monkeypatch.context() as patch:
            patch.setattr(gpt.time, "sleep", waits.append)
            capsys.readouterr()
            seen.append(gpt.main([*TINY, *data_args(shards), *args, "--resume=auto"]))
        errors = capsys.readouterr().err
        assert "is in use by another process" in errors and errors.count("waiting up to 60 s") == 1
        assert {path for path in Path("checkpoints").rglob("*")} == before
        seen.append(gpt.main([*TINY, *data_args(shards), *args]))

    at_step(monkeypatch, 4, start_others)
    run(shards, *args)
    assert seen == [2, 0] and waits == [1] * 60
    assert list_saved() == ["step_000004", "step_000004", "step_000006", "step_000006"]


def test_a_step_that_another_process_saves_is_not_removed(shards, here, monkeypatch, capsys):
    """While the new one waits for the lock, after its choice of step 4. It does not train these steps again."""
    args = ["--num_iterations=6", AT_THE_END, "--checkpoint_every=2"]
    run(shards, *args)
    shutil.copytree(find_saved(6), here / "late")
    forget(6)
    before_call(monkeypatch, gpt, "lock_run", lambda folder: shutil.copytree("late", folder / "step_000006"))
    run(shards, *args, "--resume=auto", status=2)
    assert "was trained by another process meanwhile: start again" in capsys.readouterr().err
    assert gpt.is_whole(find_saved(6), make_runtime())


# ---- disks ----------------------------------------------------------------------------------------------------------

def write_tensor(file) -> None:
    torch.save(torch.zeros(9999), file)


@pytest.mark.parametrize("data", [bytes(9999), write_tensor])
def test_a_write_error_names_its_file(tmp_path, data):
    """The system allows files of 1,000 bytes. The file has its old content, and none is left beside it."""
    path, limits = tmp_path / "model.pt", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(b"old")
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as caught:
            gpt.write_atomic(path, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


class Interrupted(io.BytesIO):
    """A file at whose second write Ctrl-C is pressed."""

    def write(self, data) -> int:
        if self.tell():
            raise KeyboardInterrupt
        return super().write(data)


def test_ctrl_c_while_a_tensor_is_written_stays_one(tmp_path):
    """torch.save() raises a RuntimeError instead."""
    with pytest.raises(RuntimeError):
        write_tensor(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        gpt.write_atomic(tmp_path / "model.pt", lambda _: write_tensor(Interrupted()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, step", [("rank0.pt", 6), ("state.json", 6), ("rank0.pt", 8)])
def test_after_a_write_error_training_goes_on(shards, here, monkeypatch, capsys, name, step):
    """With the checkpoints before it. If the last one failed, the status is 1, and model.pt is written."""
    def refuse(path, *_):
        if str(path).endswith(f"step_{step:06d}/{name}"):
            raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        before_call(patch, gpt, "write_atomic", refuse)
        found = run(shards, "--num_iterations=8", AT_THE_END, "--checkpoint_every=2", status=int(step == 8))
    assert "No space left on device" in capsys.readouterr().out and list(Path().rglob("model.pt"))
    assert list_saved() == [f"step_{kept:06d}" for kept in (2, 4, 6, 8) if kept != step][-2:]
    if step == 8:  # its result was written before
        assert run(shards, "--num_iterations=8", AT_THE_END, "--checkpoint_every=2", "--resume=auto") is None
    else:
        assert len(found["train_points"]) == 8


# ---- damaged files and refusals -------------------------------------------------------------------------------------


class Bomb:
    """A pickle that leaves a file when it is loaded by a careless reader."""

    def __reduce__(self):
        return (Path.touch, (Path("boom"),))


def put(make, name="rank0.pt"):
    """Replace the content of a file by what is made of it."""
    return lambda step: (step / name).write_bytes(make((step / name).read_bytes()))


DAMAGE = {  # what is done to the folder of the newest step
    **{f"cut to {share:.1%}": put(lambda data, s=share: data[: int(len(data) * s)])
       for share in (0.0, 0.3, 0.999)},
    "one bit": put(lambda data: (int.from_bytes(data) ^ 1 << 4 * len(data)).to_bytes(len(data))),
    "random bytes": put(lambda _: os.urandom(5000)),
    "a pickle that runs code": put(lambda _: pickle.dumps(Bomb())),
    "an archive that runs code": lambda step: torch.save({"head.weight//0": Bomb()}, step / "rank0.pt"),
    "no tensors": lambda step: (step / "rank0.pt").unlink(),
    "a folder for tensors": lambda step: ((step / "rank0.pt").unlink(), (step / "rank0.pt").mkdir()),
    "no metadata": lambda step: (step / "state.json").unlink(),
    "half the metadata": put(lambda data: data[: len(data) // 2], "state.json"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(shards, tmp_path_factory):
    """A folder with a finished run of 6 steps, saved after steps 3 and 6, and its result."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = run(shards, *SAVED)
    return folder / "checkpoints", result


SAVED = ["--num_iterations=6", "--checkpoint_every=3", AT_THE_END]


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_step_is_not_used(shards, saved, here, capsys, name):
    """auto takes the step before. Given by its path it is refused. Nothing in it is executed."""
    shutil.copytree(saved[0], "checkpoints")
    DAMAGE[name](step := find_saved(6))
    capsys.readouterr()
    assert gpt.main([*TINY, *data_args(shards), *SAVED, f"--resume={step}"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("train_gpt.py: error: ") and errors.count("\n") == 1 and str(step) in errors
    again = run(shards, *SAVED, "--resume=auto")
    assert again["resumed_at"] == [3] and points_of(again) == points_of(saved[1])
    for step in (3, 6):
        DAMAGE[name](find_saved(step))
    forget()
    capsys.readouterr()
    assert run(shards, *SAVED, "--resume=auto")["resumed_at"] == []
    assert "starting anew: no whole checkpoint in" in capsys.readouterr().out
    shutil.rmtree("logs")
    assert run(shards, *SAVED, "--resume=auto", "--seed=1")["resumed_at"] == []  # another key
    assert not Path("boom").exists()


def test_one_bit_anywhere(tmp_path):
    """A file with a wrong bit, also in the directory of the archive, is refused, or has equal tensors."""
    tensors = {f"{name}//0": torch.randn(5, 7) for name in "abcdefghijklmnopqrst"}
    torch.save(tensors, tmp_path / "rank0.pt")
    (tmp_path / "state.json").write_text(json.dumps(dict(hardware=dict(ranks=1))))
    data, places, num_refused = (tmp_path / "rank0.pt").read_bytes(), random.Random(0), 0
    for _ in range(300):
        changed = bytearray(data)
        changed[places.randrange(len(data))] ^= 1 << places.randrange(8)
        (tmp_path / "rank0.pt").write_bytes(changed)
        if gpt.is_whole(tmp_path, make_runtime()):
            found = {f"{name}/0": parts[0][1] for name, parts in gpt.open_tensors(tmp_path).items()}
            assert_same_bits(found, tensors)
        else:
            num_refused += 1
    assert num_refused > 150


def test_metadata_names_no_files(shards, saved, here):
    shutil.copytree(saved[0], "checkpoints")
    path = find_saved(6) / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run_id": "../../victim"}))
    assert run(shards, *SAVED, "--resume=auto")["run_id"] == saved[1]["run_id"]
    assert not list(Path().rglob("victim*"))


@pytest.mark.parametrize("args", [
    ["--resume=nowhere"],
    ["--resume=."],
    ["--resume=STEP", "--num_layers=3"],
    ["--resume=STEP", "--num_layers=1"],
    ["--resume=STEP", "--model_dim=128", "--head_dim=64"],
    ["--resume=STEP", "--matrix_rule=adamw"],
    ["--resume=STEP", "--averages=on"],
    ["--resume=STEP", "--num_iterations=5"],
], ids=" ".join)  # fmt: skip
def test_what_does_not_fit_is_refused(shards, saved, here, capsys, args):
    """Status 2, one line, and no file of a run."""
    shutil.copytree(saved[0], "checkpoints")
    before = sorted(Path("checkpoints").rglob("*"))
    capsys.readouterr()
    run(shards, *SAVED, *(word.replace("STEP", str(find_saved(6))) for word in args), status=2)
    errors = capsys.readouterr().err
    assert errors.startswith("train_gpt.py: error: ") and errors.count("\n") == 1
    assert sorted(Path("checkpoints").rglob("*")) == before and not list(Path("logs").glob("*"))


def test_rank_0_checks_the_files_of_all_ranks(shards, here):
    """Of newer steps, in a run of two. One without the end of rank 1's file is removed, and a whole one stays."""
    for step in (Path("late/step_000004"), Path("late/step_000003")):
        step.mkdir(parents=True)
        (step / "state.json").write_text(json.dumps(dict(hardware=dict(ranks=2))))
        for rank in range(2):
            torch.save({"head.weight//0": torch.zeros(9)}, step / f"rank{rank}.pt")
    put(lambda data: data[:-9], "rank1.pt")(step)
    train_ranks(2, "late", shards, "--num_iterations=2", "--tokens_per_step=1024", "--checkpoint_every=2", AT_THE_END)
    assert list_saved() == ["step_000002", "step_000004"]


@pytest.mark.slow
def test_ranks_agree_on_the_newest_whole_step(shards, here):
    """Rank 1 checks the damaged file, and rank 0 only its own. Both fall back."""
    args = ["--tokens_per_step=1024", ONE_SEQUENCE, *SAVED]
    train_ranks(2, "none", shards, *args)
    end = read_tensors(find_saved(6))
    forget()
    path = find_saved(6) / "rank1.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    train_ranks(2, "none", shards, *args, "--resume=auto")
    (result,) = Path("logs").glob("*.json")
    assert json.loads(result.read_text())["resumed_at"] == [3]
    assert_same_bits(read_tensors(find_saved(6)), end)


def test_a_step_without_all_files_is_no_model(saved, here):
    """As while a run writes it. The step before is sampled."""
    shutil.copytree(saved[0], "checkpoints")
    for model in Path("checkpoints").rglob("model.pt"):
        model.unlink()
    (find_saved(6) / "rank0.pt").unlink()
    os.utime(find_saved(6))
    assert sample.find_model(Path("checkpoints")) == find_saved(3)


# ---- a run that begins with the weights of another -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["hyperball", "all mechanisms", "low_bits"])
def test_a_run_begins_with_the_weights_of_a_model(shards, here, name):
    """Its first validation has the model's last loss, and its optimizer state is fresh. So have two ranks."""
    preset = [] if name == "all mechanisms" else TINY
    windows = ['--stages={"window_long":128,"window_short":64}', "--val_windows=128,64"]  # in all validations
    life = functools.partial(run, shards, *VARIANTS[name], "--num_iterations=4", *windows, preset=preset)
    first = life()
    (model,) = Path().rglob("model.pt")
    second = life("--seed=1", f"--resume={model}", "--val_loss_every=4", "--checkpoint_every=4")
    assert second["val_points"][0] == [0, first["final_val_loss"], second["val_points"][0][2]]
    assert second["resumed_from"] == f"{first['run_id']}/model.pt" and second["resumed_at"] == []
    assert second["train_points"][0][0] == 1 and second["val_points"][-1][1] != first["final_val_loss"]
    if name == "hyperball":  # each matrix keeps the norm that it has now
        trained = torch.load(model, weights_only=True)["tensors"]["blocks.1.mlp.up_down"]
        kept = read_tensors(find_saved(4))["blocks.1.mlp.up_down/radius"]
        assert torch.equal(kept, gpt.matrix_norm(trained))
    train_ranks(2, "none", shards, *VARIANTS[name], "--num_iterations=4", *windows, "--seed=2", "--seq_len=256",
                f"--resume={model}", "--val_loss_every=4", preset=preset)
    (ranks,) = (json.loads(path.read_text()) for path in Path("logs").glob("*_seed2_*.json"))
    assert ranks["val_points"][0][1] == pytest.approx(first["final_val_loss"], rel=1e-6)


def test_weights_of_another_text_help(shards, here, tmp_path):
    """Twenty steps on other documents after forty on these: a lower loss than without them."""
    rng = np.random.default_rng(7)
    write_shard(tmp_path / "train_new.bin", make_documents(rng, 40_000), VOCAB, BOS)
    new = [*TINY, f"--train_files={tmp_path}/train_new.bin", f"--val_files={shards}/val_*.bin", AT_THE_END]
    run(shards, "--num_iterations=40", AT_THE_END)
    (model,) = Path().rglob("model.pt")
    losses = []
    for more in ([], [f"--resume={model}"]):
        assert gpt.main([*new, "--num_iterations=20", f"--out=run{len(losses)}", *more]) == 0
        (path,) = Path(f"run{len(losses)}", "logs").glob("*.json")
        losses.append(json.loads(path.read_text())["final_val_loss"])
    assert losses[1] < losses[0] - 0.2


def test_a_model_that_does_not_fit_is_refused(shards, here, capsys):
    run(shards, "--num_iterations=2")
    (model,) = Path().rglob("model.pt")
    for more, line in (["--model_dim=128", "blocks.0.attention.attention_gate_weight has 24 numbers in "],
                       ["--num_layers=3", "give the options of its run"],
                       ["--without=value_embed", "but 0 in this run"]):  # its tables would be lost
        run(shards, "--num_iterations=2", more, f"--resume={model}", status=2)
        assert line in capsys.readouterr().err
    Path("text.pt").write_text("text")
    run(shards, "--resume=text.pt", status=2)
    assert "text.pt is no folder step_... of a checkpoint, and no model.pt" in capsys.readouterr().err
