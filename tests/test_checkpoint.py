"""Checkpoints: a run that was stopped or killed goes on as if it had not been, and damage is refused in one line."""

import fcntl
import hashlib
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPT, at_most, data_args, gpt, slow_but
from ranks import ENVIRONMENT, run_ranks

TINY = [
    "--preset=smoke",
    "--device=cpu",
    "--num_layers=2",
    "--tokens_per_step=512",
    "--micro_batch_tokens=512",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(shards, *args, status: int = 0) -> list:
    """A run in this process; returns the validation points of its json (None where it stops)."""
    before = set(Path("logs").glob("*.json"))
    assert gpt.main([*TINY, *data_args(shards), *args]) == status
    made = set(Path("logs").glob("*.json")) - before
    return [point[:2] for point in json.loads(made.pop().read_text())["val_points"]] if made else None


def tensors_of(path) -> dict[str, torch.Tensor]:
    return gpt.read_checkpoint(Path(path))[1]


def assert_same_bits(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


VARIANTS = {
    "muon": [],
    "adamw": ["--matrix_rule=adamw", "--matrix_lr=0.005"],
    "hyperball": ["--matrix_rule=normuonh", "--norm_gain=on"],  # momentum, second momentum, radius
    "hyperball, Adam": ["--matrix_rule=adamh"],
    "bfloat16": ["--dtype=bfloat16", "--embed_dtype=bfloat16"],
    "no grid": ["--grad_grid=0"],
    "every": [f"--{group}_every=3" for group in gpt.TRACK_1_GROUPS if group != "matrix"],  # saved at 9, 15: none may wait
    "tied": ["--tie_head=on"],
    "untied before": ["--tie_head=on", "--untie_frac=0.5"],
    "untied after": ["--tie_head=on", "--untie_frac=0.9", "--embed_every=2", "--head_every=2"],
    "low_bits": ["--matrix_dtype=bfloat16", "--state_dtype=float32", "--matrix_rule=normuon"],
    "fp8 mlp": ["--fp8_mlp=on", "--model_dim=128", "--head_dim=64"],  # scales follow a step behind
    "guard": ["--guard=on"],
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_is_the_run(shards, here, name):
    args = ["--num_iterations=18", "--checkpoint_every=7", *VARIANTS[name]]
    points = run(shards, *args)
    saved = sorted(Path("checkpoints/smoke_seed0").iterdir())
    assert [path.name for path in saved] == [
        f"step_{15 if name == 'every' else 14:06d}.pt",
        "step_000018.pt",
    ]
    end = tensors_of(saved[1])
    cfg = gpt.make_config(gpt.parse_argv([*TINY, *args])[0])
    state = gpt.RULES[cfg.groups["matrix"].rule].init_state(torch.ones(2, 8, 8, dtype=getattr(torch, cfg.matrix_dtype)), cfg.state_dtype == "float32")
    assert {f"blocks.1.attention.{part}/{key}" for part in ("qk", "v_proj") for key in state} < set(end)
    assert ("low_bits" in state) == (name == "low_bits") and ("fp8/0" in end) == (name == "fp8 mlp")
    again = run(shards, *args, f"--resume={saved[0]}", "--checkpoint_dir=other")
    assert again == points and len(points) == 4
    assert_same_bits(tensors_of("other/smoke_seed0/step_000018.pt"), end)
    assert run(shards, *args, "--resume=auto", "--checkpoint_dir=other") is None  # finished: nothing to do
    for path in Path("logs").glob("*.json"):
        path.unlink()  # as if killed in the final validation
    assert run(shards, *args, "--resume=auto", "--checkpoint_dir=other") == points


def test_what_a_checkpoint_holds(shards, here):
    run(shards, "--num_iterations=7", "--checkpoint_every=7", "--val_loss_every=3")
    random_state = torch.get_rng_state()
    facts, tensors = gpt.read_checkpoint(Path("checkpoints/smoke_seed0/step_000007.pt"))
    model = gpt.GPT(gpt.config_from_dict(facts["config"]))
    names = {name for name, _ in model.named_parameters()}
    assert names < set(tensors) and "blocks.1.attention.qk/momentum" in tensors
    assert all(tensors[name].shape == param.shape for name, param in model.named_parameters())
    assert {f"head.weight/{key}" for key in ("exp_avg", "exp_avg_sq")} < set(tensors)
    assert torch.equal(tensors["random/cpu"], random_state)
    assert facts["progress"]["step"] == facts["optimizer_steps"] == 7 and facts["world_size"] == 1
    assert facts["progress"]["train_time"] > 0 and [point[0] for point in facts["val_points"]] == [0, 3, 6]
    assert facts["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest() and facts["bos"] == 256
    assert gpt.config_from_dict(facts["config"]) == gpt.make_config(
        gpt.parse_argv(
            [*TINY, *data_args(shards), "--num_iterations=7", "--checkpoint_every=7", "--val_loss_every=3"]
        )[0]
    )


def test_the_newest_two_are_kept_and_auto_starts_anew_without(shards, here, capsys):
    run(shards, "--num_iterations=6", "--checkpoint_every=1", "--resume=auto")
    assert "no checkpoint in checkpoints/smoke_seed0: starting anew" in capsys.readouterr().out
    files = sorted(path.name for path in Path("checkpoints/smoke_seed0").iterdir())
    assert files == ["step_000005.pt", "step_000006.pt"]


def test_auto_takes_the_newest_that_is_whole(shards, here, capsys):
    points = run(shards, "--num_iterations=9", "--checkpoint_every=4")
    newest = Path("checkpoints/smoke_seed0/step_000009.pt")
    newest.write_bytes(newest.read_bytes()[:100_000])
    capsys.readouterr()
    assert run(shards, "--num_iterations=9", "--resume=auto") == points
    assert "resumed checkpoints/smoke_seed0/step_000008.pt after step 8\n" in capsys.readouterr().out


def test_other_options_are_named_when_a_run_goes_on_with_them(shards, here, capsys):
    run(shards, "--num_iterations=6", "--checkpoint_every=6")
    points = run(
        shards, "--num_iterations=8", "--resume=checkpoints/smoke_seed0/step_000006.pt", "--head_lr=0.01"
    )
    assert points[-1][0] == 8
    assert "after step 6: num_iterations was 6, here 8, head_lr was 0.008, here 0.01\n" in capsys.readouterr().out


# ---- several ranks --------------------------------------------------------------------------------------------------


def fail(num_ranks: int, mode: str, shards, *args) -> tuple[list, list | None, str]:
    """ranks.fail, in rank 1: exit statuses by rank, validation points or None, and what went to stderr."""
    before = set(Path("logs").glob("*.json"))
    ends, _, errors = run_ranks("fail", num_ranks, mode, 1, *TINY, *data_args(shards), *args)
    made = set(Path("logs").glob("*.json")) - before
    points = [point[:2] for point in json.loads(made.pop().read_text())["val_points"]] if made else None
    return [status for status, _ in ends], points, errors


@pytest.mark.parametrize(
    "grid, bound", [("0.000244140625", 0.0), pytest.param("0", 1e-4, marks=pytest.mark.slow)]
)
def test_other_numbers_of_ranks_go_on(shards, here, grid, bound):
    """One rank, then three, then one. With gradients on a grid the same bits, without within rounding."""
    args = [f"--grad_grid={grid}", "--num_iterations=12", "--tokens_per_step=3072", "--checkpoint_every=4"]
    alone = run(shards, *args)
    saved = Path("checkpoints/smoke_seed0")
    shutil.copy(saved / "step_000008.pt", "at_8.pt")
    statuses, points, errors = fail(
        3, "none", shards, *args, "--resume=at_8.pt", "--checkpoint_dir=three", "--checkpoint_every=2"
    )
    assert statuses == [0, 0, 0], errors[-2000:]
    for other in (points, run(shards, *args, "--resume=three/smoke_seed0/step_000010.pt")):
        assert [step for step, _ in other] == [step for step, _ in alone]
        assert max(abs(ours - theirs) for (_, ours), (_, theirs) in zip(other, alone)) <= bound
    if bound == 0:
        ours, theirs = (
            tensors_of(f"{folder}/smoke_seed0/step_000012.pt") for folder in ("three", "checkpoints")
        )
        assert_same_bits(ours, theirs)


STOPS = {"by SIGTERM": ("term", 143), "by SIGINT": ("int", 130), "at its time limit": ("none", 124)}


@pytest.mark.parametrize("cause", slow_but(STOPS, "by SIGTERM"))
def test_all_ranks_stop_at_the_same_step(shards, here, cause):
    """A signal to one of three ranks, or time: one line, one checkpoint, with which one rank goes on to the same bits."""
    args = ["--num_iterations=12", "--tokens_per_step=3072", "--val_loss_every=4"]
    mode, status = STOPS[cause]
    limit = ["--time_limit=0.01"] if mode == "none" else []  # over after the first step; agreed upon in the second
    statuses, points, errors = fail(3, mode, shards, *args, *limit)
    assert statuses == [status] * 3 and points is None, errors[-2000:]
    (found,) = re.findall(
        r"^train_gpt.py: stopped (.*) after step (\d+) of 12: continue with: torchrun (.*)$", errors, re.M
    )
    (path,) = Path("checkpoints/smoke_seed0").iterdir()
    assert found[0] == cause and found[2].endswith(f" --resume={path}")
    assert path.name == f"step_{int(found[1]):06d}.pt" and int(found[1]) == (2 if mode == "none" else 3)
    assert errors.count("\n") == 1
    resumed = run(shards, *args, f"--resume={path}", "--checkpoint_every=12")
    assert run(shards, *args, "--checkpoint_every=12", "--checkpoint_dir=alone") == resumed
    ours, theirs = (tensors_of(f"{folder}/smoke_seed0/step_000012.pt") for folder in ("checkpoints", "alone"))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("signum", slow_but([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_torchrun_is_stopped_with_a_checkpoint(shards, here, signum):
    """A scheduler's SIGTERM to the launcher, or Ctrl-C: all ranks leave, after one line and one checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    command += [*TINY, *data_args(shards), "--tokens_per_step=1024", "--num_iterations=200"]
    command += ["--val_loss_every=5", f"--logs_dir={here}/logs"]
    agent = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    for line in agent.stdout:
        if line.startswith("step:5/"):
            break
    agent.send_signal(signum)
    _, errors = agent.communicate(timeout=60)
    line = (
        f"train_gpt.py: stopped by {signum.name} after step .* of 200: continue with: "
        "torchrun --standalone --nproc_per_node=2 "
    )
    assert agent.returncode != 0 and len(re.findall(line, errors)) == errors.count("train_gpt.py: ") == 1
    (path,) = Path("checkpoints/smoke_seed0").iterdir()
    assert gpt.read_checkpoint(path)[0]["world_size"] == 2
    assert subprocess.run(["pgrep", "-f", f"{here}/logs"], capture_output=True).stdout == b""


# ---- stopped, killed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum, status", slow_but([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGTERM, 143)))
def test_a_signal_saves_and_the_printed_command_goes_on(shards, here, signum, status):
    args = ["--num_iterations=40", "--val_loss_every=10"]
    points = run(shards, *args)
    command = [sys.executable, str(SCRIPT), *TINY, *data_args(shards), *args]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    for line in child.stdout:
        if line.startswith("step:10/"):
            break
    child.send_signal(signum)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == status and errors.count("\n") == 1
    found = re.fullmatch(
        r"train_gpt.py: stopped by (\w+) after step (\d+) of 40: continue with: python (.*)\n", errors
    )
    assert found[1] == signum.name and 10 <= int(found[2]) < 40
    words = shlex.split(found[3])
    assert words[-1] == f"--resume=checkpoints/smoke_seed0/step_{int(found[2]):06d}.pt"
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(max(Path("logs").glob("*.json"), key=os.path.getmtime).read_text())
    assert [point[:2] for point in result["val_points"]] == points
    assert result["resumed_at"] == [int(found[2])]
    times = [milliseconds for _, _, milliseconds in result["val_points"]]
    assert (
        times == sorted(set(times)) and times[-1] == result["train_time_ms"]
    )  # one clock through both lives


def test_a_lost_terminal_saves_and_stops(shards, here):
    """As when ssh breaks off: SIGHUP, and a bar that can no longer be drawn. The line is in the log."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))  # rows, columns
    words = [sys.executable, str(SCRIPT), *TINY, *data_args(shards), "--num_iterations=4000", "--epochs=10",
             "--val_loss_every=0"]  # fmt: skip
    child = subprocess.Popen(
        words, stdin=its, stdout=its, stderr=its, env=ENVIRONMENT, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(its)
    shown = b""
    with at_most(60):
        while not re.search(rb"loss \d\.\d+, [\d,]+ tok/s", shown):  # the bar, long before the last step
            shown += os.read(ours, 10_000)
    os.close(ours)
    assert child.wait(60) == 129
    (path,) = Path("checkpoints/smoke_seed0").iterdir()
    (log,) = Path("logs").glob("*.txt")
    step = gpt.read_checkpoint(path)[0]["progress"]["step"]
    assert log.read_text().splitlines()[-1].startswith(f"stopped by SIGHUP after step {step} of 4000: continue with: ")


def test_a_signal_that_is_ignored_stays_ignored(shards, here, monkeypatch):
    """As SIGHUP under nohup: the run goes on to its end."""
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        os.kill(os.getpid(), signal.SIGHUP)
        return real(self, *args)

    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    try:
        assert run(shards, "--num_iterations=2")[-1][0] == 2
    finally:
        signal.signal(signal.SIGHUP, old)


# ---- two runs at once -----------------------------------------------------------------------------------------------


def at_the_third_step(monkeypatch, act) -> None:
    """Have a run in this process do something, once, in its third step: another run, for one."""
    real, is_done = gpt.Trainer.train_step, []

    def train_step(self, *args):
        if self.progress.step == 2 and not is_done:
            is_done.append(True)
            act()
        return real(self, *args)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)


def test_two_runs_leave_one_anothers_checkpoints_alone(shards, here, monkeypatch, capsys):
    """Of one preset and seed: who asks for the same folder is refused, and changes nothing in it."""
    args, seen = ["--num_iterations=6", "--checkpoint_every=2"], []

    def start_another():
        while not list(Path("logs").glob("train_gpt_*.py")):  # written in the background, after the checkpoint
            time.sleep(0.01)
        assert Path("checkpoints/smoke_seed0/step_000002.pt").exists()
        before = sorted(Path(".").rglob("*"))
        for more in ([], ["--resume=auto"], ["--checkpoint_every=0", "--time_limit=100"]):
            capsys.readouterr()
            seen.append(gpt.main([*TINY, *data_args(shards), *args, *more]))
            errors = capsys.readouterr().err
            assert errors.count("\n") == 1 and "checkpoints/smoke_seed0 is in use by another run" in errors
        assert sorted(Path(".").rglob("*")) == before
        assert gpt.main([*TINY, *data_args(shards), *args, "--checkpoint_dir=other"]) == 0

    at_the_third_step(monkeypatch, start_another)
    run(shards, *args)
    assert seen == [2, 2, 2]
    for folder in ("checkpoints", "other"):
        assert sorted(path.name for path in Path(folder, "smoke_seed0").iterdir()) == ["step_000004.pt", "step_000006.pt"]
    run(shards, *args, "--num_iterations=8", "--resume=auto")  # and the next one may


def test_a_run_that_is_stopped_beside_another_leaves_a_folder_of_its_own(shards, here, monkeypatch, capsys):
    def stop_another():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpt.Stop, "agree", lambda _: 143)
            assert gpt.main([*TINY, *data_args(shards), "--num_iterations=400", "--val_loss_every=0"]) == 143

    at_the_third_step(monkeypatch, stop_another)
    run(shards, "--num_iterations=6", "--checkpoint_every=2")
    own, other = sorted(Path("checkpoints").iterdir())
    assert own.name == "smoke_seed0" and re.fullmatch(r"smoke_seed0_\d{8}-\d{6}_seed0_\w{4}", other.name)
    assert [path.name for path in sorted(own.iterdir())] == ["step_000004.pt", "step_000006.pt"]
    assert f"--resume=checkpoints/{other.name}/step_000001.pt" in capsys.readouterr().err


def test_the_time_limit_saves_and_stops(shards, here, capsys):
    assert run(shards, "--num_iterations=400", "--val_loss_every=0", "--time_limit=3", status=124) is None
    errors = capsys.readouterr().err
    step = int(re.search(r"stopped at its time limit after step (\d+) of 400: continue with: ", errors)[1])
    assert Path(f"checkpoints/smoke_seed0/step_{step:06d}.pt").exists() and errors.count("\n") == 1


@pytest.mark.slow
def test_killed_twenty_times(shards, here):
    """SIGKILL at 20 random moments, a checkpoint after every step: each life finds a whole one, none repeats far."""
    args = ["--num_iterations=400", "--checkpoint_every=1", "--val_loss_every=1", "--val_tokens=1024"]
    command = [sys.executable, str(ROOT / "tests/killed.py"), "20", *TINY, *data_args(shards), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ends"] == [-signal.SIGKILL] * 20 + [0], report["last"][-2000:]
    resumed = [step for step in report["resumed"] if step]  # killed while they start: 0
    assert resumed == sorted(resumed) and len(set(resumed)) > 10  # none falls back, most get on
    killed = tensors_of("checkpoints/smoke_seed0/step_000400.pt")
    assert sorted(path.name for path in Path("checkpoints/smoke_seed0").iterdir())[-1] == "step_000400.pt"
    assert not list(Path("checkpoints").rglob("*.partial"))
    run(shards, *args, "--checkpoint_every=400", "--checkpoint_dir=whole")
    assert_same_bits(killed, tensors_of("whole/smoke_seed0/step_000400.pt"))


def test_a_signal_in_the_last_step(shards, here, monkeypatch, capsys):
    """Saved before the final validation, which the next life makes; a signal during that validation comes too late."""
    args, real = ["--num_iterations=8", "--val_loss_every=4"], (gpt.Trainer.train_step, gpt.Trainer.validate)
    points = run(shards, *args)

    def signal_at(step, function):
        def wrapped(self, *given, **more):
            if self.progress.step == step and signal.getsignal(signal.SIGTERM):  # 0, the default, in the warm-up
                os.kill(os.getpid(), signal.SIGTERM)
            return function(self, *given, **more)

        return wrapped

    monkeypatch.setattr(gpt.Trainer, "train_step", signal_at(7, real[0]))
    assert run(shards, *args, status=143) is None
    assert "stopped by SIGTERM after step 8 of 8: continue with:" in capsys.readouterr().err
    monkeypatch.setattr(gpt.Trainer, "train_step", real[0])
    monkeypatch.setattr(gpt.Trainer, "validate", signal_at(8, real[1]))
    assert run(shards, *args, "--resume=auto") == points


def test_a_finished_run_is_not_done_again_but_other_options_are_heard(shards, here, capsys):
    args = ["--num_iterations=6", "--checkpoint_every=6"]
    run(shards, *args)
    assert run(shards, *args, "--resume=auto", "--telemetry_every=2") is None
    assert "nothing to do" in capsys.readouterr().out
    for option in ("--head_lr=0.01", "--num_iterations=6 --val_tokens=2048", "--guard=on"):
        assert run(shards, *args, "--resume=auto", *option.split(), status=2) is None
        errors = capsys.readouterr().err
        assert "is the end of a finished run with other options" in errors and errors.count("\n") == 1
        name, _, value = option.split()[-1][2:].partition("=")
        assert f" {name} was " in errors and f", here {value})" in errors


def test_a_resumed_run_keeps_its_precision(shards, here, capsys, monkeypatch):
    """What auto meant when it began, whatever the processor says of itself now; and an option overrules it."""
    args = ["--num_iterations=6", "--checkpoint_every=3", "--dtype=auto"]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    points = run(shards, *args)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    capsys.readouterr()
    saved = "--resume=checkpoints/smoke_seed0/step_000003.pt"
    again = run(shards, *args, saved, "--checkpoint_dir=other")
    assert "activations: bfloat16 (as this run, or the first one of its record, began" in capsys.readouterr().out
    assert again == points
    run(shards, *args, saved, "--checkpoint_dir=third", "--dtype=float32")
    assert "activations: float32 (chosen by --dtype" in capsys.readouterr().out


def test_one_run_is_one_result_however_often_it_was_stopped(shards, here, capsys):
    """Two lives, one log that holds both, one json; after the end, nothing to do."""
    args = ["--num_iterations=400", "--val_loss_every=0", "--record=twice", "--checkpoint_every=50"]
    assert run(shards, *args, "--time_limit=2.5", status=124) is None
    assert not Path("records").exists()
    stopped = int(re.search(r"after step (\d+)", capsys.readouterr().err)[1])
    args[0] = f"--num_iterations={stopped + 2}"
    for _ in range(2):
        assert gpt.main([*TINY, *data_args(shards), *args, "--resume=auto"]) == 0
    (folder,) = Path("records/laptop").iterdir()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".py", ".txt"]
    log = next(folder.glob("*.txt")).read_text()
    steps = [int(step) for step in re.findall(r"^step:(\d+)/\d+ train_time", log, re.M)]
    assert steps == list(range(1, len(steps) + 1)) and log.count("=" * 100 + "\n") == 1
    assert "is the end of a finished run" in capsys.readouterr().out


# ---- disks ----------------------------------------------------------------------------------------------------------


def run_limited(shards, most_bytes: int, *args) -> subprocess.CompletedProcess:
    """A run whose files may not grow beyond a size: writing fails as on a full disk."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *TINY, *data_args(shards), *args],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
    )


def test_no_room_for_checkpoints(shards, here):
    """Said once, and the run is whole: checkpoints of 1.5 MB, a log of 0.2 MB."""
    done = run_limited(shards, 500_000, "--num_iterations=12", "--checkpoint_every=2")
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count(
            "no checkpoint of step 2: checkpoints/smoke_seed0 cannot be written (File too large)"
        )
        == 1
    )
    assert done.stdout.count("no checkpoint") == 1 and not list(Path("checkpoints").rglob("*.p*"))
    assert len(list(Path("logs").glob("*.json"))) == 1


def test_no_room_for_the_log(shards, here):
    """Nor for the result: training ends with its card, and status 1."""
    done = run_limited(shards, 1000, "--num_iterations=6")
    assert done.returncode == 1
    assert done.stdout.count("cannot be written (File too large): training goes on without it") == 1
    assert done.stderr.startswith(
        "train_gpt.py: error: this run is not recorded: logs cannot be written (File too large)"
    )
    assert done.stderr.count("\n") == 1
    assert "step:6/6 val_loss" in done.stdout and "| validation loss  |" in done.stdout
    assert not list(Path("logs").glob("*.json"))


def test_a_console_that_takes_nothing(shards, here):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *TINY, *data_args(shards), "--num_iterations=3"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
    assert done.returncode == 0 and done.stderr == ""
    assert len(list(Path("logs").glob("*.json"))) == 1


@pytest.mark.slow
def test_a_slow_disk_is_no_stall(shards, here):
    """Rank 0 waits 5.5 s for each checkpoint, the others for it; a stall ends the run after 4 s."""
    args = ["--num_iterations=6", "--tokens_per_step=1536", "--checkpoint_every=3", "--comm_timeout=5"]
    statuses, points, errors = fail(3, "slow disk", shards, *args)
    assert statuses == [0, 0, 0] and points, errors[-2000:]


def test_other_files_in_the_folder(shards, here):
    """What a killed run was writing goes; checkpoints of other runs stay, whatever their date."""
    folder = Path("checkpoints/smoke_seed0")
    folder.mkdir(parents=True)
    partial = folder / ".step_000001.pt.4194303.partial"
    for path in (partial, folder / "step_000099.pt", folder / "step_000098.pt"):
        path.write_text("")
        os.utime(path, (4e9, 4e9))
    run(shards, "--num_iterations=6", "--checkpoint_every=3")
    assert not partial.exists()
    assert sorted(path.name[9:11] for path in folder.glob("step_*.pt")) == ["03", "06", "98", "99"]
    script = f"train_gpt_{hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]}.py"
    assert Path("logs", script).exists()


def test_runs_that_are_stopped_one_after_another_keep_what_they_left(shards, here, capsys):
    """Without --checkpoint_every, under one name and seed: each was told to go on from its own file."""
    for step in (1, 2, 3):
        with pytest.MonkeyPatch.context() as patch:
            count = iter(range(1, 99))
            patch.setattr(gpt.Stop, "agree", lambda _, n=step, c=count: 143 if next(c) >= n else 0)
            assert run(shards, "--num_iterations=400", "--val_loss_every=0", status=143) is None
    assert sorted(path.name for path in Path("checkpoints/smoke_seed0").iterdir()) == [
        f"step_{step:06d}.pt" for step in (1, 2, 3)
    ]
    (script,) = Path("logs").glob("train_gpt_*.py")  # with which they can be read, though no run has ended
    assert script.read_bytes() == SCRIPT.read_bytes()


def test_a_run_that_goes_on_deletes_its_own_checkpoints_only(shards, here, monkeypatch, capsys):
    """Another one of its name and seed has left two there; its own first one is deleted, as the newest two stay."""
    run(shards, "--num_iterations=10", "--checkpoint_every=5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt.Stop, "agree", lambda _: 143)
        assert run(shards, "--num_iterations=400", "--val_loss_every=0", status=143) is None
    args = ["--num_iterations=9", "--checkpoint_every=3", "--resume=checkpoints/smoke_seed0/step_000001.pt"]
    run(shards, *args)
    left = sorted(path.name for path in Path("checkpoints/smoke_seed0").iterdir())
    assert left == [f"step_{step:06d}.pt" for step in (5, 6, 9, 10)]


def refuse_to_write(monkeypatch, is_refused) -> None:
    """A full disk, for some paths."""
    real = gpt.write_atomic

    def write_atomic(path, data):
        if is_refused(path):
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(gpt, "write_atomic", write_atomic)


def test_a_full_disk_of_logs_prevents_no_checkpoint(shards, here, monkeypatch, capsys):
    refuse_to_write(monkeypatch, lambda path: path.parent.name == "logs")
    args = [*TINY, *data_args(shards), "--num_iterations=6", "--checkpoint_every=3", "--checkpoint_dir=other"]
    assert gpt.main(args) == 1
    out, errors = capsys.readouterr()
    assert "no checkpoint" not in out and "this run is not recorded: logs cannot be written" in errors
    assert sorted(path.name for path in Path("other/smoke_seed0").iterdir()) == ["step_000003.pt", "step_000006.pt"]


def test_where_the_last_checkpoint_fails_the_one_before_is_named(shards, here, monkeypatch, capsys):
    refuse_to_write(monkeypatch, lambda path: path.name == "step_000005.pt")
    count = iter(range(1, 99))
    monkeypatch.setattr(gpt.Stop, "agree", lambda _: 143 if next(count) >= 5 else 0)
    args = ["--num_iterations=400", "--val_loss_every=0", "--checkpoint_every=4"]
    assert run(shards, *args, status=143) is None
    out, errors = capsys.readouterr()
    assert "no checkpoint of step 5: checkpoints/smoke_seed0 cannot be written (No space left on device)" in out
    assert re.search(r"stopped by SIGTERM after step 5 of 400: continue with: .*smoke_seed0/step_000004.pt$", errors)


@pytest.mark.parametrize("how", ["vanish", "become a file"])
def test_folders_that_change_while_training(shards, here, monkeypatch, capsys, how):
    """Vanished folders are made anew, for the result and the next checkpoint; where a file stands in their place, the
    run ends with status 1."""
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        if self.progress.step == 4 and Path("logs").is_dir():
            while not Path("checkpoints/smoke_seed0/step_000003.pt").exists():  # written in the background
                time.sleep(0.01)
            shutil.rmtree("logs")
            shutil.rmtree("checkpoints")
            if how == "become a file":
                Path("logs").write_text("")
                Path("checkpoints").write_text("")
        return real(self, *args)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    status = gpt.main([*TINY, *data_args(shards), "--num_iterations=9", "--checkpoint_every=3"])
    out, errors = capsys.readouterr()
    if how == "vanish":
        assert status == 0 and errors == ""
        assert len(list(Path("logs").glob("*.json"))) == 1
        assert [p.name for p in Path("checkpoints/smoke_seed0").iterdir()].count("step_000009.pt") == 1
    else:
        assert status == 1 and "error: this run is not recorded: logs cannot be written" in errors
        assert out.count("no checkpoint of step 6: checkpoints/smoke_seed0 cannot be written") == 1
        assert out.count("no checkpoint") == 1 and "step:9/9 val_loss" in out


# ---- refusals -------------------------------------------------------------------------------------------------------


class Bomb:
    """A pickle that leaves a file when it is loaded by a careless reader."""

    def __reduce__(self):
        return (Path.touch, (Path("boom"),))


def put(make):
    """Replace the content of a file by what is made of it."""
    return lambda path: path.write_bytes(make(path.read_bytes()))


def flip(member: str):
    """Change one bit in the middle of a member of the archive."""

    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith(f"/{member}"))
        data = bytearray(path.read_bytes())
        lengths = struct.unpack_from("<HH", data, info.header_offset + 26)  # of name and padding, behind 30 bytes
        data[info.header_offset + 30 + sum(lengths) + info.file_size // 2] ^= 0x10
        path.write_bytes(data)

    return change


UNREADABLE, OTHER = "cannot be read as a checkpoint", "it is not of format 'train_gpt 7'"
DAMAGE = {  # what is done to the file: words of the message
    **{
        f"cut to {share:.1%}": (put(lambda data, s=share: data[: int(len(data) * s)]), UNREADABLE)
        for share in (0.0, 0.001, 0.3, 0.7, 0.95, 0.999)
    },
    **{
        f"one bit of {member}": (flip(member), "it is damaged: the checksum of ")
        for member in ("data.pkl", "data/0", "data/9")
    },
    "random bytes": (put(lambda _: os.urandom(5000)), UNREADABLE),
    "a pickle that runs code": (put(lambda _: pickle.dumps(Bomb())), UNREADABLE),
    "a shard": (put(lambda _: b"\0" * 4096), UNREADABLE),
    "text": (put(lambda _: b"step 250\n" * 100), UNREADABLE),
    **{
        f"format {number}": (  # of before, whose parameters had other names, and of a later script
            lambda path, n=number: torch.save({**torch.load(path, weights_only=True), "format": f"train_gpt {n}"}, path),
            OTHER,
        )
        for number in (6, 99)
    },
    "not our keys": (lambda path: torch.save({"model": torch.zeros(3)}, path), OTHER),
    "a bare tensor": (lambda path: torch.save(torch.zeros(3), path), OTHER),
    "code in an archive": (lambda path: torch.save({"facts": Bomb()}, path), UNREADABLE),
}
FILE = "--resume=checkpoints/smoke_seed0/step_000006.pt"
OPTIONS = {  # arguments: words of the message
    ("--resume=nowhere.pt",): "nowhere.pt cannot be read as a checkpoint",
    ("--resume=.",): ". cannot be read as a checkpoint",
    (FILE, "--num_layers=3"): "another model: num_layers was 2, here 3",
    (FILE, "--model_dim=128", "--head_dim=64"): "another model: head_dim was 32, here 64",
    (FILE, "--attention_gate_dim=0"): "another model: attention_gate_dim was 12, here 0",
    (FILE, "--mlp_ratio=2"): "another model: mlp_ratio was 4, here 2",
    (FILE, "--embed_dtype=bfloat16"): "another model: embed_dtype was float32, here bfloat16",
    (FILE, "--matrix_rule=adamw"): "another model: matrix_rule was muon, here adamw",
    ("--resume=auto", "--num_layers=3"): "another model: num_layers was 2, here 3",
    (FILE, "--layers=[{}, {}]"): "another model: layers were others: give",
    (FILE, "--num_iterations=5"): "has made 6 steps, more than --num_iterations=5",
    ("--checkpoint_every=-1",): "--checkpoint_every=-1 is too small: give at least 0",
    ("--checkpoint_every=often",): "--checkpoint_every=often is not a whole number",
    ("--checkpoint_every=5", "--checkpoint_dir=a_file"): "a_file/smoke_seed0 cannot be written",
    ("--time_limit=-1",): "--time_limit=-1.0 is too small",
    ("--time_limit=soon",): "--time_limit=soon is not a number",
    ("--telemetry_every=1.5",): "--telemetry_every=1.5 is not a whole number",
    ("--guard=maybe",): "--guard=maybe is not one of on, off",
    ("--resume",): "argument --resume: expected one argument",
}


@pytest.fixture(scope="module")
def saved(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(shards, "--num_iterations=6", "--checkpoint_every=6", "--val_loss_every=0")
    return folder / "checkpoints"


def refuse(shards, args, words: str, capsys, monkeypatch) -> None:
    """Exit status 2, one line, and nothing left behind but what was there; before anything is probed or built."""
    before = sorted(Path(".").rglob("*"))
    capsys.readouterr()
    monkeypatch.setattr(gpt, "choose_precision", None)
    assert gpt.main([*TINY, *data_args(shards), "--num_iterations=6", *args]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("train_gpt.py: error: ") and errors.count("\n") == 1 and words in errors
    assert sorted(Path(".").rglob("*")) == before


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused(shards, saved, here, capsys, monkeypatch, name):
    shutil.copytree(saved, "checkpoints")
    path = Path("checkpoints/smoke_seed0/step_000006.pt")
    change, words = DAMAGE[name]
    change(path)
    refuse(shards, [FILE], words, capsys, monkeypatch)
    refuse(shards, ["--resume=auto"], words, capsys, monkeypatch)
    assert gpt.main([f"--sample={path}"]) == 2 and capsys.readouterr().err.count("\n") == 1
    assert not Path("boom").exists()


def test_ranks_refuse_with_one_line(shards, saved, here):
    """Rank 0 reads the file; the others learn from it what is wrong, and leave it time to say so."""
    shutil.copytree(saved, "checkpoints")
    flip("data/0")(Path("checkpoints/smoke_seed0/step_000006.pt"))
    statuses, _, errors = fail(2, "none", shards, "--tokens_per_step=1024", FILE)
    assert statuses == [2, 2] and errors.count("\n") == 1 and "it is damaged: the checksum of " in errors


def test_a_record_goes_on_with_its_own_script_only(saved, monkeypatch):
    path = saved / "smoke_seed0/step_000006.pt"
    facts, _ = gpt.read_checkpoint(path)
    cfg = gpt.config_from_dict({**facts["config"], "record": "mine", "resume": str(path)})
    assert gpt.find_checkpoint(cfg)[0] == path
    monkeypatch.setattr(gpt, "hash_script", lambda: "other")
    with pytest.raises(gpt.InputError, match="left by another script"):
        gpt.find_checkpoint(cfg)


@pytest.mark.parametrize("args", OPTIONS, ids=lambda args: " ".join(args))
def test_options_that_do_not_fit(shards, saved, here, capsys, monkeypatch, args):
    shutil.copytree(saved, "checkpoints")
    Path("a_file").write_text("")
    refuse(shards, args, OPTIONS[args], capsys, monkeypatch)
