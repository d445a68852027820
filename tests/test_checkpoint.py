"""Checkpoints: a stopped run continues with equal bits on any number of ranks. Damaged files are never used."""

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import (
    AT_THE_END,
    SCRIPT,
    TINY,
    assert_same_bits,
    at_step,
    before_call,
    data_args,
    find_saved,
    gpt,
    make_runtime,
    read_tensors,
    run_script,
    slow_but,
    smoke_config,
)
from run_ranks import ENVIRONMENT, run_ranks

ONE_SEQUENCE = "--micro_batch_tokens=512"
FRONTIER = ["--preset=smoke_frontier", "--device=cpu", "--warmup_iterations=0", "--val_tokens=1024"]
FRONTIER += [ONE_SEQUENCE, "--adam_eps=1.0"]  # equal bits on one and more ranks
FP8 = ["--fp8=on", "--fp8_parts=head,mlp", "--model_dim=128", "--head_dim=64"]


def train(shards, *args, preset=TINY, status: int = 0) -> dict | None:
    """Train in this process. Returns the new result, or None."""
    before = set(Path().rglob("*_seed*.json"))
    assert gpt.main([*preset, *data_args(shards), *args]) == status
    new = set(Path().rglob("*_seed*.json")) - before
    return json.loads(new.pop().read_text()) if new else None


def stop_at(monkeypatch, step: int, signum: int = signal.SIGTERM) -> None:
    """The next run in this process gets a signal in this step, once."""
    at_step(monkeypatch, step, lambda: os.kill(os.getpid(), signum))


def forget(step: int | None = None) -> None:
    """Delete the results, and a checkpoint, as if the run had been killed before it."""
    for path in Path().rglob("*_seed*.json"):
        path.unlink()
    if step:
        shutil.rmtree(find_saved(step))


@pytest.fixture(autouse=True)
def write_in_time(request, monkeypatch):
    """A slow disk skips no save, so that the saved steps are known. One test is about skipped saves."""
    if "skipped" not in request.node.name:
        before_call(monkeypatch, gpt.Checkpoints, "exchange", lambda self, _: self.writing and self.writing.result())


def list_saved(folder: str = "checkpoints") -> list[str]:
    return sorted(path.name for path in Path(folder).rglob("*step_*"))


def points_of(result: dict) -> tuple:
    return [point[:2] for point in result["val_points"]], result["train_points"]


# ---- a resumed run is the run ---------------------------------------------------------------------------------------


VARIANTS = {
    "muon": [],
    "warm-up": ["--warmup_iterations=2"],
    "adamw": ["--matrix_rule=adamw", "--matrix_lr=0.005"],
    "hyperball": ["--matrix_rule=normuonh", "--gains=norm,output"],  # momentum, second momentum, radius
    "bfloat16": ["--dtype=bfloat16", "--embed_dtype=bfloat16"],
    "no grid": ["--grad_grid=0"],
    "every": ['--groups={"embed":{"every":3},"value_embed":{"every":3},"head":{"every":3},"scalar":{"every":3}}'],
    "tied": ["--tie_head=on"],
    "untied before": ["--tie_head=on", "--untie_frac=0.5"],
    "untied after": ["--tie_head=on", "--untie_frac=0.9", '--groups={"embed":{"every":2},"head":{"every":2}}'],
    "low_bits": ["--matrix_dtype=bfloat16", "--state_dtype=float32", "--matrix_rule=normuon"],
    "fp8": FP8,  # scales are one step late
    "guard": ["--guard=on"],
    "averages": ["--averages=on"],
}
QUICK = ("muon", "warm-up", "bfloat16", "every", "untied after", "low_bits", "guard", "averages")


def read_telemetry(result: dict) -> list[dict]:
    """The measured steps of a run without their times. A repeated step counts once, as it was at last."""
    lines = map(json.loads, Path("logs", f"{result['run_id']}.jsonl").read_text().splitlines())
    measured = {line["step"]: line for line in lines if line["event"] == "telemetry"}
    return [{key: line[key] for key in line if key not in ("seconds", "train_time_ms")} for line in measured.values()]


@pytest.mark.parametrize("name", [
    *slow_but([name for name in VARIANTS if name != "fp8"], *QUICK),
    pytest.param("fp8", marks=pytest.mark.recipe),  # an edited MLP has no FP8 form
])
def test_a_resumed_run_is_the_run(shards, here, name, capsys):
    """The last checkpoint is deleted, as if the run had been killed before it. auto continues under the run_id."""
    args = ["--num_iterations=18", "--checkpoint_every=7", "--telemetry_every=4", *VARIANTS[name]]
    whole, measured = (result := train(shards, *args)), read_telemetry(result)
    step = 15 if name == "every" else 14
    assert list_saved() == [f"step_{step:06d}", "step_000018"]
    end, model = read_tensors(find_saved(18)), next(Path().rglob("model.pt"))
    weights = torch.load(model, weights_only=True)["tensors"]
    assert ("blocks.1.attention.qk/low_bits" in end) == (name == "low_bits")
    assert ("fp8/scales" in end) == (name == "fp8") and ("head.weight/average0" in end) == (name == "averages")

    forget(18)
    model.unlink()
    again = train(shards, *args, "--resume=auto")
    assert points_of(again) == points_of(whole) and len(whole["val_points"]) == 4
    assert_same_bits(read_tensors(find_saved(18)), end)
    assert_same_bits(torch.load(model, weights_only=True)["tensors"], weights)
    assert read_telemetry(again) == measured and len(measured) == 4
    assert (again["run_id"], again["resumed_at"], again["resumed_from"]) == (whole["run_id"], [step], "")
    log = Path("logs", f"{whole['run_id']}.txt").read_text()
    steps = [int(n) for n in re.findall(r"^step:(\d+)/18 train_time:\d+ms step_avg:\S+ train_loss", log, re.M)]
    assert steps == [*range(1, 19), *range(step + 1, 19)]
    capsys.readouterr()
    assert train(shards, *args, "--resume=auto") is None  # finished
    assert f"logs/{whole['run_id']}.json is the result of this run" in capsys.readouterr().out
    forget()  # as if killed in the final validation
    assert points_of(train(shards, *args, "--resume=auto")) == points_of(whole)


def test_the_recipe_with_all_mechanisms(shards, here):
    """A sharded table, averages, tied weights that were untied, gradients over two and four steps."""
    args = ["--checkpoint_every=6", "--telemetry_every=2"]
    whole = train(shards, *args, preset=FRONTIER)
    measured, end = read_telemetry(whole), read_tensors(find_saved(14))
    assert {"ngram/", "ngram/exp_avg_sq"} <= end.keys() and any("average" in name for name in end)
    forget(14)
    again = train(shards, *args, "--resume=auto", preset=FRONTIER)
    assert again["resumed_at"] == [12] and points_of(again) == points_of(whole)
    assert_same_bits(read_tensors(find_saved(14)), end)
    assert read_telemetry(again) == measured and len(measured) == 7


def test_training_draws_no_random_numbers(shards, here, monkeypatch):
    """With all mechanisms. So a checkpoint needs no state of a random number generator."""
    states = []
    before_call(monkeypatch, gpt.RunLog, "start_training", lambda *_: states.append(torch.get_rng_state()))
    train(shards, "--telemetry_every=2", "--guard=on", "--num_iterations=6", preset=FRONTIER)
    assert torch.equal(*states, torch.get_rng_state())


def test_what_a_checkpoint_holds(shards, here):
    args = ["--num_iterations=7", "--checkpoint_every=7", "--val_loss_every=3"]
    result, step = train(shards, *args), find_saved(7)
    assert sorted(path.name for path in step.iterdir()) == ["rank0.pt", "state.json"]
    assert step.parent.name == result["run_id"]
    assert step.parent.parent.name == f"smoke_seed0_{result['key']}" and re.fullmatch("[0-9a-f]{12}", result["key"])
    metadata, tensors = gpt.read_metadata(step), read_tensors(step)
    cfg = gpt.config_from_dict(metadata["config"])
    assert cfg == gpt.make_config(gpt.parse_argv([*TINY, *data_args(shards), *args]))
    state = gpt.RULES["muon"].init_state(torch.ones(2, 8, 8), False)
    assert {f"blocks.1.attention.qk/{key}" for key in ("", *state)} <= tensors.keys()
    for name, param in gpt.GPT(cfg).named_parameters():
        assert tensors[f"{name}/"].numel() == param.numel()
    assert metadata["progress"]["step"] == metadata["optimizer_steps"] == 7 and not metadata["is_tied"]
    assert metadata["progress"]["train_time"] > 0 and [point[0] for point in metadata["val_points"]] == [0, 3, 6]
    assert metadata["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest() and metadata["bos"] == 256
    assert metadata["choices"] == result["choices"] and metadata["choices"]["dtype"] == "float32"
    assert metadata["key"] == result["key"] == gpt.make_key(metadata) == gpt.make_key(result)


def test_a_run_keeps_two_steps_and_leaves_others(shards, here, capsys):
    """A partial folder of the run that continues is removed, that of another run stays."""
    args = ["--num_iterations=6", "--checkpoint_every=1", "--resume=auto"]
    result = train(shards, *args)
    folder = find_saved(6).parent
    assert f"starting anew: no checkpoint in {folder.parent}\n" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "model.pt", "step_000005", "step_000006"]
    other = folder.with_name("20200101-000000_seed0_00000000")
    for name in ("step_000001", "step_000002", "step_000003", ".step_000004.partial"):
        shutil.copytree(folder / "step_000005", other / name)
    (folder / ".step_000006.partial").mkdir()
    forget(6)
    assert points_of(train(shards, *args)) == points_of(result)
    assert list_saved(folder) == ["step_000005", "step_000006"] and len(list_saved(other)) == 4


# ---- several ranks --------------------------------------------------------------------------------------------------


def train_ranks(num_ranks: int, mode: str, shards, *args, preset=TINY) -> tuple[list, str]:
    """run_ranks.fail, in rank 1: exit statuses by rank, and stderr."""
    ends, _, errors = run_ranks("fail", num_ranks, mode, 1, *preset, *data_args(shards), *args)
    return [status for status, _ in ends], errors


JOBS = {  # name: (preset, options, number of ranks, step of the checkpoint, last step)
    "smoke": (TINY, [ONE_SEQUENCE, "--num_iterations=12", "--tokens_per_step=3072", "--checkpoint_every=4"], 3, 8, 12),
    "frontier": (FRONTIER, ["--checkpoint_every=6"], 2, 12, 14),
    "fp8": (TINY, [*FP8, ONE_SEQUENCE, "--num_iterations=12", "--tokens_per_step=3072", "--checkpoint_every=4"], 3, 8, 12),
}


@pytest.mark.parametrize("name", ["smoke", "frontier", pytest.param("fp8", marks=[pytest.mark.slow, pytest.mark.recipe])])
def test_other_numbers_of_ranks_continue_a_run(shards, here, name):
    """One rank, then several, then one: equal bits, because gradients are on a grid."""
    preset, args, num_ranks, step, last = JOBS[name]
    whole = train(shards, *args, preset=preset)
    end = read_tensors(find_saved(last))
    forget(last)
    statuses, errors = train_ranks(num_ranks, "none", shards, *args, "--resume=auto", preset=preset)
    assert statuses == [0] * num_ranks, errors[-2000:]
    (path,) = Path("logs").glob("*.json")
    assert json.loads(path.read_text())["resumed_at"] == [step]
    assert_same_bits(read_tensors(find_saved(last)), end)
    forget(last)
    statuses, errors = train_ranks(num_ranks, "none", shards, *args, preset=preset)  # from the start
    assert statuses == [0] * num_ranks, errors[-2000:]
    (path,) = Path("checkpoints").rglob(f"step_{last:06d}")
    assert_same_bits(read_tensors(path), end)
    files, metadata = sorted(path.glob("rank*.pt")), gpt.read_metadata(path)
    assert [file.name for file in files] == metadata["files"] == [f"rank{i}.pt" for i in range(num_ranks)]
    size = sum(tensor.nbytes for tensor in end.values())
    assert size < sum(file.stat().st_size for file in files) < 1.05 * size
    forget(last)
    again = train(shards, *args, "--resume=auto", preset=preset)
    assert (again["resumed_at"], again["hardware"]["ranks"]) == ([step], 1)
    assert_same_bits(read_tensors(path), end)
    assert again["val_points"][-1][1] == whole["val_points"][-1][1]


def test_buckets_of_another_size_continue_a_run(shards, here):
    """Saved with buckets of few parameters on two ranks, loaded with all of a group in one bucket on three."""
    counts = [len(gpt.plan_buckets(gpt.GPT(cfg := smoke_config(comm_bucket_mb=mb)), cfg, 2)) for mb in (0.01, 64)]
    assert counts[0] > 1.5 * counts[1]
    args = [ONE_SEQUENCE, "--num_layers=4", "--num_iterations=8", "--tokens_per_step=3072", "--checkpoint_every=4"]
    statuses, errors = train_ranks(2, "none", shards, *args, "--comm_bucket_mb=0.01")
    assert statuses == [0, 0], errors[-2000:]
    end, first = read_tensors(find_saved(8)), find_saved(4)
    more = ["--comm_bucket_mb=64", f"--resume={first}", "--out=other"]
    statuses, errors = train_ranks(3, "none", shards, *args, *more)
    assert statuses == [0, 0, 0], errors[-2000:]
    (last,) = Path("other").rglob("step_000008")
    assert_same_bits(read_tensors(last), end)


@pytest.mark.parametrize("mode, signum", slow_but([("term", 15), ("int", 2), ("usr1", 10)], ("term", 15)))
def test_all_ranks_stop_at_the_same_step(shards, here, mode, signum):
    """A signal to one of three ranks: one line and one checkpoint. One rank continues it to equal bits."""
    args = [ONE_SEQUENCE, "--num_iterations=12", "--tokens_per_step=3072", "--val_loss_every=4"]
    statuses, errors = train_ranks(3, mode, shards, *args)
    assert statuses == [128 + signum] * 3 and not list(Path("logs").glob("*.json")), errors[-2000:]
    line = r"train_gpt.py: stopped by (\w+) after step (\d+) of 12: (\S+)\. --resume=auto continues\n"
    found = re.fullmatch(line, errors)
    assert found[1] == signal.Signals(signum).name and int(found[2]) == 6 and found[3] == str(find_saved(6))
    train(shards, *args, "--resume=auto", "--checkpoint_every=12")
    resumed = read_tensors(find_saved(12))
    train(shards, *args, "--checkpoint_every=12", "--out=alone")
    (alone,) = Path("alone").rglob("step_000012")
    assert_same_bits(resumed, read_tensors(alone))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_is_stopped_with_a_checkpoint(shards, here, signum):
    """SIGTERM of a scheduler to the launcher, or Ctrl-C: all ranks exit after one line and one checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    command += [*TINY, *data_args(shards), "--tokens_per_step=1024", "--num_iterations=4000", "--epochs=100"]
    agent = start([*command, "--val_loss_every=5", f"--out={here}"])
    wait_for_line(agent, "step:5/")
    agent.send_signal(signum)
    _, errors = agent.communicate(timeout=3000)
    line = f"train_gpt.py: stopped by {signum.name} after step "
    assert agent.returncode != 0 and errors.count(line) == errors.count("train_gpt.py: ") == 1, errors
    (step,) = Path("checkpoints").rglob("step_*")
    assert gpt.read_metadata(step)["hardware"]["ranks"] == 2
    assert subprocess.run(["pgrep", "-f", f"out={here}"], capture_output=True).stdout == b""


@pytest.mark.slow
def test_a_slow_disk_is_no_stall(shards, here):
    """Each file needs longer than a collective of a step may take. Ranks wait for it only at the end."""
    args = ["--num_iterations=6", "--tokens_per_step=1536", "--checkpoint_every=3"]
    statuses, errors = train_ranks(3, "slow disk", shards, *args)
    assert statuses == [0, 0, 0] and list_saved() == ["step_000003", "step_000006"], errors[-2000:]


# ---- signals --------------------------------------------------------------------------------------------------------


def restore_signals() -> None:
    """In a child process: nohup and shells without job control start pytest with ignored signals."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
                            preexec_fn=restore_signals)  # fmt: skip


def wait_for_line(process: subprocess.Popen, prefix: str) -> None:
    for line in process.stdout:
        if line.startswith(prefix):
            return
    raise AssertionError(f"no line begins with {prefix}: {process.stderr.read()[-2000:]}")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops(shards, here, monkeypatch, capsys, signum):
    """Also without --checkpoint_every. The handlers of before are in force again."""
    args, old = ["--num_iterations=8", AT_THE_END], signal.signal(signum, signal.default_int_handler)
    stop_at(monkeypatch, 5, signum)
    assert train(shards, *args, status=128 + signum) is None
    assert signal.signal(signum, old) is signal.default_int_handler
    line = f"train_gpt.py: stopped by {signum.name} after step 5 of 8: {find_saved(5)}. --resume=auto continues\n"
    assert capsys.readouterr().err == line
    (log,) = Path("logs").glob("*.txt")
    assert log.read_text().splitlines()[-1] + "\n" == line.removeprefix("train_gpt.py: ")
    assert train(shards, *args, "--resume=auto")["resumed_at"] == [5]
    steps = [int(n) for n in re.findall(r"^step:(\d+)/8 train_time:\d+ms step_avg:\S+ train_loss", log.read_text(), re.M)]
    assert steps == list(range(1, 9))  # one log, no step twice


def test_a_signal_waits_for_the_last_gradient(shards, here, monkeypatch):
    """The Adam groups are updated in every third step, and a checkpoint has no gradients."""
    stop_at(monkeypatch, 4)
    train(shards, "--num_iterations=8", *VARIANTS["every"], status=143)
    assert list_saved() == ["step_000006"]


def test_a_signal_in_the_last_step(shards, here, monkeypatch, capsys):
    """The run saves before the final validation, which the next life does. A signal during that one has no effect."""
    args = ["--num_iterations=8", "--val_loss_every=4"]
    whole = train(shards, *args)
    with monkeypatch.context() as patch:
        stop_at(patch, 8)
        assert train(shards, *args, status=143) is None
    assert "stopped by SIGTERM after step 8 of 8: " in capsys.readouterr().err
    with monkeypatch.context() as patch:
        before_call(patch, gpt.Trainer, "validate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert points_of(train(shards, *args, "--resume=auto")) == points_of(whole)


def test_signals_are_left_alone_in_a_thread_and_if_they_are_ignored(shards, here, monkeypatch):
    handlers, statuses = [], []
    note = lambda: handlers.append(signal.getsignal(signal.SIGTERM))
    before_call(monkeypatch, gpt.Checkpoints, "exchange", lambda *_: note())
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


# ---- which checkpoint -----------------------------------------------------------------------------------------------


def test_the_key_of_a_run(shards, monkeypatch):
    """Script, data and options that change a result are in it. Folders, telemetry and the machine are not."""

    def make(**changes):
        return gpt.describe_run(smoke_config(shards, **changes), make_runtime(), [], shard_list)

    cfg = smoke_config(shards)
    shard_list = gpt.TrainData(cfg, gpt.Schedule(cfg)).shards
    first = make()
    assert re.fullmatch("[0-9a-f]{12}", first["key"])
    for same in (dict(out="other"), dict(resume="auto"), dict(checkpoint_every=3), dict(telemetry_every=2),
                 dict(tracker="wandb")):  # fmt: skip
        assert make(**same)["key"] == first["key"] != make(**same)["run_id"]
    for other in (dict(seed=1), dict(head_lr=0.1), dict(num_iterations=13), dict(guard=True), dict(record="x"),
                  dict(track="y"), dict(dtype="bfloat16"), dict(fast=("off",)), dict(val_tokens=2048),
                  dict(comm_bucket_mb=1.0), dict(groups={"embed": {"every": 2}})):  # fmt: skip
        assert make(**other)["key"] != first["key"], other
    assert gpt.make_key(make(seed=1), "seed") == gpt.make_key(first, "seed")
    shard_list = shard_list[:1]
    assert make()["key"] != first["key"]
    shard_list = gpt.TrainData(cfg, gpt.Schedule(cfg)).shards
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert make()["key"] == first["key"]
    monkeypatch.setattr(gpt, "SCRIPT", gpt.SCRIPT + b"\n")
    assert make()["key"] != first["key"]


def test_auto_takes_the_newest_run_of_its_key(shards, here, monkeypatch, capsys):
    """Another learning rate or seed is another key, which is only named."""
    args, moments = ["--num_iterations=400", AT_THE_END], iter(range(1, 9))
    monkeypatch.setattr(gpt.time, "strftime", lambda *_: f"20260101-00000{next(moments)}")
    for step, more in ((4, []), (3, ["--head_lr=0.01"]), (2, []), (5, ["--seed=1"])):
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            train(shards, *args, *more, status=143)
    lines = []
    for more in ([], ["--mlp_lr_mul=2,3"]):
        with monkeypatch.context() as patch:
            stop_at(patch, 6)
            capsys.readouterr()
            train(shards, *args, *more, "--resume=auto", status=143)
            lines += re.findall(r"^(?:resumed|starting anew).*$", capsys.readouterr().out, re.M)
    assert re.fullmatch(r"resumed \S+/20260101-000003_seed0_\w+/step_000002", lines[0])
    assert lines[1].startswith("starting anew: no checkpoint in ")
    assert re.search(r"--resume=\S+/20260101-000003_seed0_\w+/step_000006$", lines[1])


def test_a_path_begins_a_new_run_that_continues_itself(shards, here, monkeypatch):
    """Options, data and number of steps may change, and PATH stays as it is."""
    first = train(shards, "--num_iterations=6", "--checkpoint_every=3")
    path = find_saved(3)
    before = {file: file.read_bytes() for file in Path().rglob("*") if file.is_file()}
    more = [f"--resume={path}", "--num_iterations=8", "--tokens_per_step=1024", "--head_lr=0.01"]
    whole = train(shards, *more, "--out=whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        train(shards, *more, status=143)
    second = train(shards, *more)
    assert {file: file.read_bytes() for file in before} == before
    assert second["resumed_from"] == f"{first['run_id']}/step_000003" and second["resumed_at"] == [3, 5]
    assert second["run_id"] != first["run_id"] and second["key"] == whole["key"] != first["key"]
    assert points_of(second) == points_of(whole) and second["val_points"][-1][0] == 8
    assert second["tokens_per_s"] == pytest.approx((3 * 512 + 5 * 1024) / (second["train_time_ms"] / 1000), rel=0.01)
    assert train(shards, *more) is None  # finished


def test_a_resumed_run_keeps_its_choices(shards, here, monkeypatch, capsys):
    """What auto chose stays, whatever the processor reports now. An option overrules it, and a lost form is replaced."""
    args = ["--num_iterations=6", "--checkpoint_every=3", "--dtype=auto"]
    monkeypatch.setattr(gpt, "supports_bfloat16", lambda _: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    whole = train(shards, *args)
    assert whole["choices"]["dtype"] == "bfloat16" and "rms_norm" in whole["choices"]["fast"]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    real = gpt.find_obstacle
    monkeypatch.setattr(gpt, "find_obstacle", lambda needs, *more: "a test")  # auto would use no fast form now
    forget(6)
    again = train(shards, *args, "--resume=auto")
    assert points_of(again) == points_of(whole) and again["choices"] == whole["choices"]
    assert train(shards, *args, f"--resume={find_saved(3)}", "--dtype=float32")["choices"]["dtype"] == "float32"
    monkeypatch.setattr(gpt, "find_obstacle", real)
    real = gpt.verify
    refuse = lambda name, *more: "refused here" if name == "rms_norm" else real(name, *more)
    monkeypatch.setattr(gpt, "verify", refuse)
    capsys.readouterr()
    new = train(shards, *args, f"--resume={find_saved(3)}", "--out=other")
    assert "this machine lacks the choices of the checkpoint" in capsys.readouterr().out
    assert "rms_norm" not in new["choices"]["fast"] and "cpu_attention" in new["choices"]["fast"]


def test_two_processes_do_not_continue_one_run(shards, here, monkeypatch, capsys):
    """The second one waits for the lock, and then fails. A new run with equal options is not disturbed."""
    args, seen, waits = ["--num_iterations=6", "--checkpoint_every=2"], [], []

    def start_others():
        while not list(Path("checkpoints").rglob("step_000002")):
            time.sleep(0.01)
        before = {path for path in Path("checkpoints").rglob("*")}
        with monkeypatch.context() as patch:
            patch.setattr(gpt.time, "sleep", waits.append)
            capsys.readouterr()
            seen.append(gpt.main([*TINY, *data_args(shards), *args, "--resume=auto"]))
        assert "is in use by another process" in capsys.readouterr().err
        assert {path for path in Path("checkpoints").rglob("*")} == before
        seen.append(gpt.main([*TINY, *data_args(shards), *args]))

    at_step(monkeypatch, 4, start_others)
    train(shards, *args)
    assert seen == [2, 0] and waits == [1] * 60
    assert list_saved() == ["step_000004", "step_000004", "step_000006", "step_000006"]


# ---- disks ----------------------------------------------------------------------------------------------------------


def fail_to_write(monkeypatch, is_refused) -> None:
    """A full disk, for some paths."""
    def refuse(path, *_):
        if is_refused(path):
            raise OSError(28, "No space left on device", str(path))

    before_call(monkeypatch, gpt, "write_atomic", refuse)


def test_a_write_error_of_one_file(shards, here, monkeypatch, capsys):
    """Of tensors, and of the metadata. The next step is saved, and a stop names the step before."""
    args = ["--num_iterations=400", AT_THE_END, "--checkpoint_every=2"]
    names = (".step_000004.partial/rank0.pt", ".step_000006.partial/state.json", ".step_000009.partial/rank0.pt")
    fail_to_write(monkeypatch, lambda path: str(path).endswith(names))
    stop_at(monkeypatch, 9)
    train(shards, *args, status=143)
    out, errors = capsys.readouterr()
    assert re.findall(r"no checkpoint of step (\d): \S+ cannot be written \(.*No space", out) == ["4", "6", "9"]
    assert list_saved() == ["step_000002", "step_000008"] and f"of 400: {find_saved(8)}. " in errors


def test_a_save_is_skipped_while_the_last_one_is_written(shards, here, monkeypatch, capsys):
    """Training does not wait for the disk. The last step waits for both."""
    may_write = threading.Event()
    is_slow = lambda path, *_: path.name != "rank0.pt" or ".step_000002" not in str(path) or may_write.wait(300)
    before_call(monkeypatch, gpt, "write_atomic", is_slow)
    at_step(monkeypatch, 7, may_write.set)
    train(shards, "--num_iterations=7", "--checkpoint_every=2")
    skipped = re.findall(r"^no checkpoint of step (\d): the one of step 2 is not written yet$", capsys.readouterr().out, re.M)
    assert skipped == ["4", "6"] and list_saved() == ["step_000002", "step_000007"]


@pytest.mark.parametrize("num_ranks", slow_but([1, 2], 1))
def test_entries_above_the_limit_are_written_in_pieces(shards, here, monkeypatch, num_ranks):
    """A file for each piece, read back by any number of ranks."""
    monkeypatch.setattr(gpt.Checkpoints, "PIECE_BYTES", 100_000)
    train(shards, "--checkpoint_every=6", preset=FRONTIER)
    step, end = find_saved(12), read_tensors(find_saved(14))
    entries = [torch.load(file, weights_only=True) for file in sorted(step.glob("rank0_*.pt"))]
    assert all(len(entry) == 1 and tensor.nbytes <= 100_000 for entry in entries for tensor in entry.values())
    rows = sorted(int(name.split("/")[2]) for entry in entries for name in entry if name.startswith("ngram//"))
    assert rows == [0, 390, 780]  # 1,024 rows of 256 bytes
    sizes = [file.stat().st_size for file in step.glob("rank*.pt")]
    assert sum(tensor.nbytes for tensor in read_tensors(step).values()) < sum(sizes)
    assert sorted(gpt.read_metadata(step)["files"]) == sorted(file.name for file in step.glob("rank*.pt"))
    forget(14)
    statuses, errors = train_ranks(num_ranks, "pieces", shards, "--checkpoint_every=6", "--resume=auto", preset=FRONTIER)
    assert statuses == [0] * num_ranks, errors[-2000:]
    assert_same_bits(read_tensors(find_saved(14)), end)
    damage = find_saved(14) / "rank0_1.pt"
    damage.write_bytes(damage.read_bytes()[:-100])
    assert not gpt.is_whole(damage.parent, make_runtime()) and gpt.is_whole(step, make_runtime())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_leaves_its_model(num_ranks, shards, here):
    """The parameters of model.pt are those of the last checkpoint. Its optimizer state is left out."""
    args = [*TINY, *data_args(shards), "--tokens_per_step=1024", "--num_iterations=2", "--checkpoint_every=2"]
    done = run_script(args, here, nproc=num_ranks)
    assert done.returncode == 0, done.stderr
    step = find_saved(2)
    content = torch.load(step.parent / "model.pt", weights_only=True)
    metadata, weights = json.loads(content["metadata"]), content["tensors"]
    state = {name[:-1]: tensor for name, tensor in read_tensors(step).items() if name.endswith("/")}
    assert weights.keys() == state.keys() and metadata["config"]["num_layers"] == 2 and metadata["bos"] == 256
    assert [name for name in state if not torch.equal(state[name].flatten(), weights[name].flatten())] == []
    assert gpt.main([*args, f"--resume={step.parent / 'model.pt'}"]) == 2


# ---- damaged files and refusals -------------------------------------------------------------------------------------


class Bomb:
    """A pickle that leaves a file when it is loaded by a careless reader."""

    def __reduce__(self):
        return (Path.touch, (Path("boom"),))


def put(make, name="rank0.pt"):
    """Replace the content of a file by what is made of it."""
    return lambda step: (step / name).write_bytes(make((step / name).read_bytes()))


def flip(member: str):
    """Change one bit in the middle of a member of the archive."""

    def change(step: Path) -> None:
        with zipfile.ZipFile(step / "rank0.pt") as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith(f"/{member}"))
        data = bytearray((step / "rank0.pt").read_bytes())
        lengths = int.from_bytes(data[info.header_offset + 26 :][:2], "little"), int.from_bytes(
            data[info.header_offset + 28 :][:2], "little")  # of name and padding, behind 30 bytes
        data[info.header_offset + 30 + sum(lengths) + info.file_size // 2] ^= 0x10
        (step / "rank0.pt").write_bytes(data)

    return change


DAMAGE = {  # what is done to the folder of the newest step
    **{f"cut to {share:.1%}": put(lambda data, s=share: data[: int(len(data) * s)])
       for share in (0.0, 0.001, 0.3, 0.95, 0.999)},
    **{f"one bit of {member}": flip(member) for member in ("data.pkl", "data/0", "data/9")},
    "random bytes": put(lambda _: os.urandom(5000)),
    "a pickle that runs code": put(lambda _: pickle.dumps(Bomb())),
    "a shard": put(lambda _: b"\0" * 4096),
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
        result = train(shards, *SAVED)
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
    again = train(shards, *SAVED, "--resume=auto")
    assert again["resumed_at"] == [3] and points_of(again) == points_of(saved[1])
    for step in (3, 6):
        DAMAGE[name](find_saved(step))
    forget()
    if name != "no metadata":  # a folder without it is no step
        train(shards, *SAVED, "--resume=auto", status=2)
    shutil.rmtree("logs")
    train(shards, *SAVED, "--resume=auto", "--seed=1")  # damage of another key does not matter
    assert not Path("boom").exists()


def test_one_bit_anywhere(tmp_path):
    """A file with a wrong bit, also in the directory of the archive, is refused, or has equal tensors."""
    tensors = {f"{name}//0": torch.randn(5, 7) for name in "abcdefghijklmnopqrst"}
    torch.save(tensors, tmp_path / "rank0.pt")
    (tmp_path / "state.json").write_text(json.dumps(dict(files=["rank0.pt"])))
    data, places, num_refused = (tmp_path / "rank0.pt").read_bytes(), random.Random(0), 0
    for _ in range(500):
        changed = bytearray(data)
        changed[places.randrange(len(data))] ^= 1 << places.randrange(8)
        (tmp_path / "rank0.pt").write_bytes(changed)
        if gpt.is_whole(tmp_path, make_runtime()):
            found = {f"{name}/0": parts[0][1] for name, parts in gpt.open_tensors(tmp_path).items()}
            assert_same_bits(found, tensors)
        else:
            num_refused += 1
    assert num_refused > 250


def test_code_in_an_archive_is_not_executed(shards, saved, here):
    """The archive fits its checksums, but PyTorch refuses to read it. So the step before is used."""
    shutil.copytree(saved[0], "checkpoints")
    torch.save({"head.weight//0": Bomb()}, find_saved(6) / "rank0.pt")
    assert train(shards, *SAVED, "--resume=auto")["resumed_at"] == [3]
    assert not Path("boom").exists()


def test_names_of_files_do_not_come_from_a_checkpoint(shards, saved, here):
    """Neither of tensors nor of the run's own files."""
    shutil.copytree(saved[0], "checkpoints")
    torch.save({"boom": torch.zeros(3)}, "boom.pt")
    path = find_saved(6) / "state.json"
    metadata = json.loads(path.read_text())
    metadata["files"] += ["../../../../boom.pt", "/boom.pt", "other.pt"]
    metadata["run_id"] = "../../victim"
    path.write_text(json.dumps(metadata))
    again = train(shards, *SAVED, "--resume=auto")
    assert again["run_id"] == saved[1]["run_id"] and points_of(again) == points_of(saved[1])
    assert not list(Path().rglob("victim*"))


@pytest.mark.parametrize("args", [
    ["--resume=nowhere"],
    ["--resume=."],
    ["--resume=STEP", "--num_layers=3"],
    ["--resume=STEP", "--num_layers=1"],
    ["--resume=STEP", "--model_dim=128", "--head_dim=64"],
    ["--resume=STEP", "--mlp_ratio=2"],
    ["--resume=STEP", "--matrix_rule=adamw"],
    ["--resume=STEP", "--averages=on"],
    ["--resume=STEP", "--num_iterations=5"],
], ids=" ".join)  # fmt: skip
def test_what_does_not_fit_is_refused(shards, saved, here, capsys, args):
    """Status 2, one line, and no file of a run."""
    shutil.copytree(saved[0], "checkpoints")
    before = sorted(Path("checkpoints").rglob("*"))
    capsys.readouterr()
    train(shards, *SAVED, *(word.replace("STEP", str(find_saved(6))) for word in args), status=2)
    errors = capsys.readouterr().err
    assert errors.startswith("train_gpt.py: error: ") and errors.count("\n") == 1
    assert sorted(Path("checkpoints").rglob("*")) == before and not list(Path("logs").glob("*"))


@pytest.mark.slow
def test_ranks_agree_on_the_newest_whole_step(shards, here):
    """Rank 1 checks the damaged file, and rank 0 only its own. Both fall back."""
    args = ["--tokens_per_step=1024", ONE_SEQUENCE, *SAVED]
    statuses, errors = train_ranks(2, "none", shards, *args)
    assert statuses == [0, 0], errors[-2000:]
    end = read_tensors(find_saved(6))
    forget()
    path = find_saved(6) / "rank1.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    statuses, errors = train_ranks(2, "none", shards, *args, "--resume=auto")
    assert statuses == [0, 0], errors[-2000:]
    (result,) = Path("logs").glob("*.json")
    assert json.loads(result.read_text())["resumed_at"] == [3]
    assert_same_bits(read_tensors(find_saved(6)), end)
