"""Checkpoints: a run that was stopped or killed continues with equal bits. Damaged files are refused in one line."""

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
from conftest import ROOT, SCRIPT, at_most, before_call, data_args, gpt, run_script, slow_but
from run_ranks import ENVIRONMENT, run_ranks

from records import sample

TINY = [
    "--preset=smoke",
    "--device=cpu",
    "--num_layers=2",
    "--tokens_per_step=512",
    "--micro_batch_tokens=512",
    "--save_model=off",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find_results() -> set[Path]:
    return {path for path in Path().rglob("*.json") if gpt.RUN_ID.fullmatch(path.stem)}


def run(shards, *args, status: int = 0) -> list | None:
    """Train in this process. Returns the validation points of the new result, or None if there is none."""
    before = find_results()
    assert gpt.main([*TINY, *data_args(shards), *args]) == status
    new = find_results() - before
    return [point[:2] for point in json.loads(new.pop().read_text())["val_points"]] if new else None


def read_result() -> dict:
    """The newest result."""
    return json.loads(max(find_results(), key=lambda path: path.stat().st_mtime_ns).read_text())


def find_step(step: int, folder: str = "checkpoints") -> Path:
    """The only checkpoint of a step."""
    (path,) = Path(folder).glob(f"*/step_{step:06d}.pt")
    return path


def list_files(folder: str | Path = "checkpoints") -> list[str]:
    """Names of all checkpoints in a folder and its subfolders."""
    return sorted(path.name for path in Path(folder).rglob("*.pt"))


def tensors_of(path) -> dict[str, torch.Tensor]:
    return gpt.read_checkpoint(Path(path))[1]


def assert_same_bits(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def stop_after(step: int):
    """A context in which runs get a SIGTERM request after a step."""
    patch, real = pytest.MonkeyPatch.context(), gpt.Stop.poll
    steps = iter(range(1, 10**6))

    class Context:
        def __enter__(self):
            self.patch = patch.__enter__()
            self.patch.setattr(gpt.Stop, "poll", lambda stop: 143 if next(steps) >= step else real(stop))

        def __exit__(self, *error):
            patch.__exit__(*error)

    return Context()


VARIANTS = {
    "muon": [],
    "adamw": ["--matrix_rule=adamw", "--matrix_lr=0.005"],
    "hyperball": ["--matrix_rule=normuonh", "--norm_gain=on"],  # momentum, second momentum, radius
    "hyperball, Adam": ["--matrix_rule=adamh"],
    "bfloat16": ["--dtype=bfloat16", "--embed_dtype=bfloat16"],
    "no grid": ["--grad_grid=0"],
    "every": [f"--{group}_every=3" for group in ("embed", "value_embed", "head", "scalar")],  # saves at 9 and 15
    "tied": ["--tie_head=on"],
    "untied before": ["--tie_head=on", "--untie_frac=0.5"],
    "untied after": ["--tie_head=on", "--untie_frac=0.9", "--embed_every=2", "--head_every=2"],
    "low_bits": ["--matrix_dtype=bfloat16", "--state_dtype=float32", "--matrix_rule=normuon"],
    "fp8 mlp": ["--fp8_mlp=on", "--model_dim=128", "--head_dim=64"],  # scales are one step late
    "guard": ["--guard=on"],
}


@pytest.mark.parametrize("name", [
    *slow_but([name for name in VARIANTS if name != "fp8 mlp"], "muon", "bfloat16", "every", "untied after", "low_bits", "guard"),
    pytest.param("fp8 mlp", marks=pytest.mark.recipe),  # an edited MLP has no FP8 form
])
def test_a_resumed_run_is_the_run(shards, here, name, capsys):
    """The last checkpoint is deleted, as if the run had been killed before it. auto continues under the run_id."""
    args = ["--num_iterations=18", "--checkpoint_every=7", *VARIANTS[name]]
    points, result = run(shards, *args), read_result()
    step = 15 if name == "every" else 14
    assert list_files() == [f"step_{step:06d}.pt", "step_000018.pt"]
    end = tensors_of(find_step(18))
    cfg = gpt.make_config(gpt.parse_argv([*TINY, *args])[0])
    state = gpt.RULES[cfg.groups["matrix"].rule].init_state(torch.ones(2, 8, 8, dtype=getattr(torch, cfg.matrix_dtype)), cfg.state_dtype == "float32")
    assert {f"blocks.1.attention.{part}/{key}" for part in ("qk", "v_proj") for key in state} < set(end)
    assert ("low_bits" in state) == (name == "low_bits") and ("fp8/0" in end) == (name == "fp8 mlp")

    find_step(18).unlink()
    for path in find_results():
        path.unlink()
    more = ["--resume=auto", "--logs_dir=second"]
    assert run(shards, *args, *more) == points and len(points) == 4
    assert_same_bits(tensors_of(find_step(18)), end)
    again = read_result()
    log = Path("second", f"{result['run_id']}.txt").read_text()  # it begins with the log of the first folder
    steps = [int(n) for n in re.findall(r"^step:(\d+)/18 train_time", log, re.M)]
    assert steps == [*range(1, 19), *range(step + 1, 19)]
    assert (again["run_id"], again["resumed_at"], again["resumed_from"]) == (result["run_id"], [step], {})
    assert again["train_points"] == result["train_points"] and len(again["train_points"]) == 18
    assert run(shards, *args, *more) is None  # finished
    assert "of a finished run, see second/" in capsys.readouterr().out
    for path in find_results():
        path.unlink()  # as if killed in the final validation
    assert run(shards, *args, *more) == points


def test_training_draws_no_random_numbers(shards, here, monkeypatch):
    """With all mechanisms. So a checkpoint needs no state of a random number generator."""
    states = []
    before_call(monkeypatch, gpt.RunLog, "start_training", lambda *_: states.append(torch.get_rng_state()))
    options = ["--val_tokens=1024", "--num_iterations=6", "--val_loss_every=3", "--telemetry_every=2", "--guard=on"]
    assert gpt.main(["--preset=smoke_frontier", "--device=cpu", *data_args(shards), *options]) == 0
    assert torch.equal(*states, torch.get_rng_state())


def test_what_a_checkpoint_holds(shards, here):
    args = ["--num_iterations=7", "--checkpoint_every=7", "--val_loss_every=3"]
    run(shards, *args)
    result = read_result()
    metadata, tensors = gpt.read_checkpoint(find_step(7))
    model = gpt.GPT(gpt.config_from_dict(metadata["config"]))
    names = {name for name, _ in model.named_parameters()}
    assert names < set(tensors) and "blocks.1.attention.qk/momentum" in tensors
    assert all(tensors[name].shape == param.shape for name, param in model.named_parameters())
    assert {f"head.weight/{key}" for key in ("exp_avg", "exp_avg_sq")} < set(tensors)
    assert metadata["progress"]["step"] == metadata["optimizer_steps"] == 7
    assert metadata["progress"]["train_time"] > 0 and [point[0] for point in metadata["val_points"]] == [0, 3, 6]
    assert metadata["script_sha256"] == hashlib.sha256(SCRIPT.read_bytes()).hexdigest() and metadata["bos"] == 256
    assert gpt.config_from_dict(metadata["config"]) == gpt.make_config(
        gpt.parse_argv([*TINY, *data_args(shards), *args])[0]
    )
    # the identity is that of the result and of the log
    header = json.loads(Path("logs", f"{result['run_id']}.txt").read_text().split("\n=")[0])
    for other in (result, header):
        assert gpt.identify(metadata) == gpt.identify(other) and len(gpt.identify(metadata)) > 100
    assert metadata["choices"] == dict(dtype="float32", compile=False, fast=metadata["choices"]["fast"], fp8=[], ngram_rows=0)


def test_the_two_highest_steps_are_kept_and_auto_starts_anew_without_any(shards, here, capsys):
    run(shards, "--num_iterations=6", "--checkpoint_every=1", "--resume=auto")
    assert "starting anew without a checkpoint in checkpoints: there is none\n" in capsys.readouterr().out
    (folder,) = Path("checkpoints").iterdir()
    assert folder.name == read_result()["run_id"] and re.fullmatch(r"\d{8}-\d{6}_seed0_[0-9a-f]{8}", folder.name)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step_000005.pt", "step_000006.pt"]


def test_auto_takes_the_highest_step_that_can_be_read(shards, here, capsys):
    """By number, whatever the dates of the files: a clock may be set back, and cp -r changes dates."""
    args = ["--num_iterations=9", "--checkpoint_every=4"]
    points = run(shards, *args)
    os.utime(find_step(8), (4e9, 4e9))
    for path in find_results():
        path.unlink()
    capsys.readouterr()
    run(shards, *args, "--resume=auto")
    assert re.search(r"resumed checkpoints/\S*/step_000009.pt after step 9\n", capsys.readouterr().out)
    find_step(9).write_bytes(find_step(9).read_bytes()[:100_000])
    for path in find_results():
        path.unlink()
    assert run(shards, *args, "--resume=auto") == points
    assert re.search(r"resumed checkpoints/\S*/step_000008.pt after step 8\n", capsys.readouterr().out)


def test_auto_takes_the_newest_run_that_fits(shards, here, capsys):
    """Another learning rate, seed or preset is another run. A line names the newest one and the first difference."""
    args = ["--num_iterations=400", "--val_loss_every=0"]
    for number, more in enumerate((["--head_lr=0.01"], [], ["--seed=1"])):
        with stop_after(2 + number):
            run(shards, *args, *more, status=143)
    with stop_after(1):
        run(shards, *args, "--resume=auto", status=143)
    assert list_files() == ["step_000002.pt", "step_000003.pt", "step_000004.pt", "step_000004.pt"]
    assert re.search(r"resumed \S*_seed0_\w+/step_000003.pt after step 3\n", capsys.readouterr().out)
    with stop_after(1):
        run(shards, *args, "--resume=auto", "--mlp_up_lr_mul=2", status=143)
    line = r"starting anew without a checkpoint in checkpoints: the newest is checkpoints/\S*_seed1_\w+, but seed was 1, here 0"
    assert re.search(line, capsys.readouterr().out)


def test_the_layout_of_older_scripts_is_named(shards, here, capsys):
    old = Path("checkpoints/smoke_seed0")
    old.mkdir(parents=True)
    (old / "step_000099.pt").write_text("")
    run(shards, "--num_iterations=3", "--resume=auto")
    assert f"starting anew without a checkpoint in checkpoints: {old} has the layout of older scripts" in capsys.readouterr().out
    assert list_files() == ["step_000099.pt"]


def test_a_path_with_other_options_is_a_new_run(shards, here, capsys):
    """Options, data and number of steps may change. One line lists them, and the result names its origin."""
    run(shards, "--num_iterations=6", "--checkpoint_every=6")
    first = read_result()
    more = ["--num_iterations=8", "--tokens_per_step=1024", "--head_lr=0.01"]
    points = run(shards, f"--resume={find_step(6)}", *more)
    assert points[-1][0] == 8 and points[0] == first["val_points"][0][:2]
    out, second = capsys.readouterr().out, read_result()
    assert second["run_id"] != first["run_id"]
    assert second["resumed_from"] == {"run_id": first["run_id"], "step": 6}
    assert f"after step 6 as a new run {second['run_id']}: num_iterations was 6, here 8, tokens_per_step was 512, here 1024, checkpoint_every was 6, here 0, head_lr was" in out
    # the speed counts the tokens that were trained on
    assert second["tokens_per_s"] == pytest.approx((6 * 512 + 2 * 1024) / (second["train_time_ms"] / 1000), rel=0.01)
    assert len(second["train_points"]) == 8


def test_a_new_plan_that_repeats_tokens_says_so(shards, here, capsys):
    stages = [dict(duration=1, window_long=64, window_short=64, tokens_per_step=n, seq_len=256) for n in (256, 512)]
    args = ["--val_loss_every=0", f"--stages={json.dumps(stages)}"]
    run(shards, "--num_iterations=8", "--checkpoint_every=6", *args)
    run(shards, "--num_iterations=16", f"--resume={find_step(6)}", *args)
    # steps of 256 and 512 tokens: 5 and 1 before, 6 of the first kind now
    assert "this run has trained on 1792 tokens, but its schedule plans 1536 before step 6, so tokens are repeated" in capsys.readouterr().out


def test_an_older_checkpoint_of_a_run_begins_a_new_one(shards, here):
    """Its later checkpoints and its log stay as they are."""
    run(shards, "--num_iterations=9", "--checkpoint_every=4")
    first, before = read_result(), {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    run(shards, "--num_iterations=9", "--checkpoint_every=4", f"--resume={find_step(8)}")
    assert read_result()["resumed_from"] == {"run_id": first["run_id"], "step": 8}
    assert {path: path.read_bytes() for path in before} == before


# ---- several ranks --------------------------------------------------------------------------------------------------


def fail(num_ranks: int, mode: str, shards, *args) -> tuple[list, list | None, str]:
    """run_ranks.fail, in rank 1: exit statuses by rank, validation points or None, and stderr."""
    before = find_results()
    ends, _, errors = run_ranks("fail", num_ranks, mode, 1, *TINY, *data_args(shards), *args)
    new = find_results() - before
    points = [point[:2] for point in json.loads(new.pop().read_text())["val_points"]] if new else None
    return [status for status, _ in ends], points, errors


@pytest.mark.parametrize(
    "grid, bound", [("0.000244140625", 0.0), pytest.param("0", 1e-4, marks=pytest.mark.slow)]
)
def test_other_numbers_of_ranks_continue_a_run(shards, here, grid, bound):
    """One rank, then three, then one. With gradients on a grid the bits are equal, else the losses within rounding."""
    args = [f"--grad_grid={grid}", "--num_iterations=12", "--tokens_per_step=3072", "--checkpoint_every=4"]
    alone = run(shards, *args)
    whole = tensors_of(find_step(12))
    find_step(12).unlink()
    for path in find_results():
        path.unlink()
    shutil.copytree("checkpoints", "one")
    statuses, points, errors = fail(3, "none", shards, *args, "--resume=auto")
    assert statuses == [0, 0, 0], errors[-2000:]
    ranks = tensors_of(find_step(12))
    find_step(12).unlink()
    for path in find_results():
        path.unlink()
    for other in (points, run(shards, *args, "--resume=auto")):
        assert [step for step, _ in other] == [step for step, _ in alone]
        assert max(abs(ours - theirs) for (_, ours), (_, theirs) in zip(other, alone)) <= bound
    if bound == 0:
        assert_same_bits(ranks, whole)
        assert_same_bits(tensors_of(find_step(12)), whole)


STOPS = {"by SIGTERM": ("term", 143), "by SIGINT": ("int", 130)}


@pytest.mark.parametrize("cause", slow_but(STOPS, "by SIGTERM"))
def test_all_ranks_stop_at_the_same_step(shards, here, cause):
    """A signal to one of three ranks: one line and one checkpoint. One rank continues it to equal bits."""
    args = ["--num_iterations=12", "--tokens_per_step=3072", "--val_loss_every=4"]
    mode, status = STOPS[cause]
    statuses, points, errors = fail(3, mode, shards, *args)
    assert statuses == [status] * 3 and points is None, errors[-2000:]
    (found,) = re.findall(
        r"^train_gpt.py: stopped (.*) after step (\d+) of 12: continue with: torchrun (.*)$", errors, re.M
    )
    (name,) = list_files()
    path = find_step(int(found[1]))
    assert found[0] == cause and found[2].endswith(f" --resume={path}")
    assert path.name == name and int(found[1]) == 3
    assert errors.count("\n") == 1
    resumed = run(shards, *args, f"--resume={path}", "--checkpoint_every=12")
    assert run(shards, *args, "--checkpoint_every=12", "--checkpoint_dir=alone") == resumed
    assert_same_bits(*(tensors_of(find_step(12, folder)) for folder in ("checkpoints", "alone")))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_torchrun_is_stopped_with_a_checkpoint(shards, here, signum):
    """SIGTERM of a scheduler to the launcher, or Ctrl-C: all ranks exit after one line and one checkpoint."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(SCRIPT)]
    command += [*TINY, *data_args(shards), "--tokens_per_step=1024", "--num_iterations=4000", "--epochs=100"]
    command += ["--val_loss_every=5", f"--logs_dir={here}/logs"]
    agent = start(command)
    wait_for_line(agent, "step:5/")
    agent.send_signal(signum)
    _, errors = agent.communicate(timeout=3000)
    line = (
        f"train_gpt.py: stopped by {signum.name} after step .* of 4000: continue with: "
        "torchrun --standalone --nproc_per_node=2 "
    )
    assert agent.returncode != 0 and len(re.findall(line, errors)) == errors.count("train_gpt.py: ") == 1
    (path,) = Path("checkpoints").rglob("*.pt")
    assert gpt.read_checkpoint(path)[0]["hardware"]["ranks"] == 2
    assert subprocess.run(["pgrep", "-f", f"{here}/logs"], capture_output=True).stdout == b""


# ---- stopped, killed ------------------------------------------------------------------------------------------------


def restore_signals() -> None:
    """In a child process: nohup and shells without job control start pytest with ignored signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(command: list[str], **more) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT,
           "preexec_fn": restore_signals, **more},
    )  # fmt: skip


def wait_for_line(process: subprocess.Popen, prefix: str) -> None:
    for line in process.stdout:
        if line.startswith(prefix):
            return
    raise AssertionError(f"no line begins with {prefix}: {process.stderr.read()[-2000:]}")


@pytest.mark.parametrize("signum, status", slow_but([(signal.SIGINT, 130), (signal.SIGTERM, 143)], (signal.SIGTERM, 143)))
def test_a_signal_saves_and_the_printed_command_continues(shards, here, signum, status):
    """The number of steps is so large that the run cannot end before the signal. The rest is a short new run."""
    args = ["--num_iterations=4000", "--epochs=100", "--val_loss_every=10"]
    child = start([sys.executable, str(SCRIPT), *TINY, *data_args(shards), *args])
    wait_for_line(child, "step:10/")
    child.send_signal(signum)
    _, errors = child.communicate(timeout=3000)
    assert child.returncode == status and errors.count("\n") == 1
    found = re.fullmatch(
        r"train_gpt.py: stopped by (\w+) after step (\d+) of 4000: continue with: python (.*)\n", errors
    )
    step = int(found[2])
    assert found[1] == signum.name and step >= 10
    words = shlex.split(found[3])
    assert words[-1] == f"--resume={find_step(step)}"
    child = start([sys.executable, *words])
    wait_for_line(child, f"step:{step // 10 * 10 + 10}/")
    child.send_signal(signum)
    assert child.wait(3000) == status
    child.communicate()
    (log,) = Path("logs").glob("*.txt")  # one run
    times = [int(ms) for ms in re.findall(r"^step:\d+/4000 train_time:(\d+)ms", log.read_text(), re.M)]
    steps = [int(n) for n in re.findall(r"^step:(\d+)/4000 train_time", log.read_text(), re.M)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > step and times == sorted(times)


@pytest.mark.parametrize("run_sh", ["./run.sh", "../a folder/run.sh"])
def test_the_command_that_continues_begins_with_run_sh(run_sh, shards, here, monkeypatch, capsys):
    """run.sh sets RUN_SH to the name under which it was started."""
    monkeypatch.setenv("RUN_SH", run_sh)
    with stop_after(2):
        run(shards, "--num_iterations=6", "--seed=1", status=143)
    words = shlex.split(capsys.readouterr().err.partition("continue with: ")[2])
    assert words[:2] == ["NPROC=1", run_sh] and words[-2:] == ["--seed=1", f"--resume={find_step(2)}"]


def test_a_lost_terminal_saves_and_stops(shards, here):
    """As when ssh breaks off: SIGHUP, and a bar that can no longer be drawn. The line is in the log."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))  # rows, columns
    words = [sys.executable, str(SCRIPT), *TINY, *data_args(shards), "--num_iterations=40000", "--epochs=100",
             "--val_loss_every=0"]  # fmt: skip

    def take_terminal() -> None:
        restore_signals()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    child = start(words, stdin=its, stdout=its, stderr=its, start_new_session=True, preexec_fn=take_terminal)
    os.close(its)
    shown = b""
    with at_most(3000):
        while not re.search(rb"loss \d\.\d+, [\d,]+ tok/s", shown):  # the bar, long before the last step
            shown += os.read(ours, 10_000)
    os.close(ours)
    assert child.wait(3000) == 129
    (path,) = Path("checkpoints").rglob("*.pt")
    (log,) = Path("logs").glob("*.txt")
    step = gpt.read_checkpoint(path)[0]["progress"]["step"]
    assert log.read_text().splitlines()[-1].startswith(f"stopped by SIGHUP after step {step} of 40000: continue with: ")


def test_a_signal_that_is_ignored_stays_ignored(shards, here, monkeypatch):
    """As SIGHUP under nohup: the run continues to its end."""
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
    """Call act once, in the third step of a run in this process."""
    real, is_done = gpt.Trainer.train_step, []

    def train_step(self, *args):
        if self.progress.step == 2 and not is_done:
            is_done.append(True)
            act()
        return real(self, *args)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)


def test_a_run_that_trains_is_not_continued_by_another_process(shards, here, monkeypatch, capsys):
    """Its folder is locked. A new run with equal options has another run_id, so it is not refused."""
    args, seen = ["--num_iterations=6", "--checkpoint_every=2"], []

    def start_another():
        while not list(Path("logs").glob("train_gpt_*.py")):  # written in the background, after the checkpoint
            time.sleep(0.01)
        before = sorted(Path(".").rglob("*"))
        for more in (["--resume=auto"], [f"--resume={find_step(2)}"]):
            capsys.readouterr()
            seen.append(gpt.main([*TINY, *data_args(shards), *args, *more]))
            errors = capsys.readouterr().err
            assert errors.count("\n") == 1 and "is in use: another process continues this run" in errors
        assert sorted(Path(".").rglob("*")) == before
        assert gpt.main([*TINY, *data_args(shards), *args]) == 0

    at_the_third_step(monkeypatch, start_another)
    run(shards, *args)
    assert seen == [2, 2]
    folders = list(Path("checkpoints").iterdir())
    assert [list_files(folder) for folder in folders] == [["step_000004.pt", "step_000006.pt"]] * 2
    assert len(find_results()) == 2


def test_a_file_system_without_locks_is_named(shards, here, monkeypatch, capsys):
    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(gpt.fcntl, "flock", flock)
    run(shards, "--num_iterations=3", "--checkpoint_every=2")
    (folder,) = Path("checkpoints").iterdir()
    assert capsys.readouterr().out.count(f"{folder} cannot be locked: make sure that no second process continues this run\n") == 1


def test_logs_may_lie_beside_checkpoints(shards, here):
    """A run that wrote its result into the folder of its checkpoints waited for its own lock."""
    with at_most(3000):
        run(shards, "--num_iterations=3", "--checkpoint_every=2", "--logs_dir=checkpoints")
    assert len(find_results()) == 1


@pytest.mark.slow
def test_killed_twenty_times(shards, here):
    """SIGKILL at 20 random moments, a checkpoint after every step. No life falls behind the one before it."""
    args = ["--num_iterations=400", "--checkpoint_every=1", "--val_loss_every=1", "--val_tokens=1024"]
    command = [sys.executable, str(ROOT / "tests/run_and_kill.py"), "20", *TINY, *data_args(shards), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ends"] == [-signal.SIGKILL] * 20 + [0], report["last"][-2000:]
    resumed = [step for step in report["resumed"] if step]  # 0: killed while it started
    assert resumed == sorted(resumed) and len(set(resumed)) > 10
    killed = tensors_of(find_step(400))
    assert not list(Path("checkpoints").rglob("*.partial"))
    run(shards, *args, "--checkpoint_every=400", "--checkpoint_dir=whole")
    assert_same_bits(killed, tensors_of(find_step(400, "whole")))


def test_a_signal_in_the_last_step(shards, here, monkeypatch, capsys):
    """The run saves before the final validation, which the next life does. A signal during that one has no effect."""
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


def test_a_finished_run_is_not_repeated_and_other_options_begin_a_new_one(shards, here, capsys):
    args = ["--num_iterations=6", "--checkpoint_every=6"]
    run(shards, *args)
    assert run(shards, *args, "--resume=auto") is None
    assert "nothing to do" in capsys.readouterr().out
    for option, line in (("--head_lr=0.01", "head_lr was 0.008, here 0.01"), ("--guard=on", "guard was off, here on")):
        assert run(shards, *args, "--resume=auto", option)[-1][0] == 6
        assert line in capsys.readouterr().out or option == "--guard=on"


def test_a_resumed_run_keeps_its_choices(shards, here, capsys, monkeypatch):
    """An automatic choice of the first start stays, whatever the processor reports now. An option overrules it."""
    args = ["--num_iterations=6", "--checkpoint_every=3", "--dtype=auto"]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    points, choices = run(shards, *args), read_result()["choices"]
    assert choices["dtype"] == "bfloat16" and "rms_norm" in choices["fast"]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {})
    monkeypatch.setattr(gpt, "find_obstacle", lambda needs, *_: "a test")  # auto would use no fast form now
    find_step(6).unlink()
    for path in find_results():
        path.unlink()
    assert run(shards, *args, "--resume=auto") == points
    assert read_result()["choices"] == choices
    run(shards, *args, f"--resume={find_step(3)}", "--dtype=float32")
    assert read_result()["choices"]["dtype"] == "float32"


def test_choices_that_do_not_exist_here(shards, here, capsys, monkeypatch):
    """A fast form that this machine refuses: a plain run chooses anew and says so, a record ends."""
    args = ["--num_iterations=6", "--checkpoint_every=3"]
    real = gpt.verify

    def refuse(name, *more):
        return "refused here" if name == "rms_norm" else real(name, *more)

    for record, status in (([], 0), (["--record=mine"], 2)):
        run(shards, *args, *record)
        max(Path("checkpoints").rglob("step_000006.pt"), key=lambda path: path.stat().st_mtime_ns).unlink()
        for path in find_results():
            path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(gpt, "verify", refuse)
            capsys.readouterr()
            run(shards, *args, *record, "--resume=auto", status=status)
        out, errors = capsys.readouterr()
        assert ("this machine lacks the earlier choices (--fast=" in out) == (status == 0)
        assert ("this machine lacks the choices of the first start of --record=mine (--fast=" in errors) == (status == 2)
    assert "rms_norm cannot be used (refused here)" in errors and errors.count("\n") == 1


def test_one_run_is_one_result_however_often_it_was_stopped(shards, here, capsys):
    """Two lives, one log that has both, one json. After the end there is nothing to do."""
    args = ["--num_iterations=20", "--val_loss_every=0", "--record=twice", "--checkpoint_every=5"]
    with stop_after(8):
        assert run(shards, *args, status=143) is None
    assert not Path("records").exists()
    for _ in range(2):
        assert gpt.main([*TINY, *data_args(shards), *args, "--resume=auto"]) == 0
    (folder,) = Path("records/try").iterdir()
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".py", ".txt"]
    log = next(folder.glob("*.txt")).read_text()
    steps = [int(step) for step in re.findall(r"^step:(\d+)/\d+ train_time", log, re.M)]
    assert steps == list(range(1, 21)) and log.count("=" * 100 + "\n") == 1
    assert "of a finished run" in capsys.readouterr().out


RECORD_CHANGES = {  # the second half of a record with another ...: words of the line
    "option": (["--matrix_lr=0.3"], "matrix_lr was 0.05, here 0.3"),
    "seed": (["--seed=1"], "seed was 0, here 1"),
    "data": (["--train_files=other_*.bin"], "train_files was "),
    "bytes": ([], "other data"),
    "machine": ([], "threads was "),
    "ranks": ([], "ranks was 1, here 2"),
    "script": ([], "other script"),
}


@pytest.mark.parametrize("what", slow_but(RECORD_CHANGES, "option", "bytes", "machine"))
def test_a_record_is_continued_only_as_it_began(shards, here, monkeypatch, capsys, what):
    """By PATH it is refused. auto finds no run that fits, so it begins a new one and says why."""
    shutil.copy(shards / "train_1.bin", "train_a.bin")
    shutil.copy(shards / "train_1.bin", "other_a.bin")
    args = ["--num_iterations=8", "--val_loss_every=0", "--record=hybrid", "--train_files=train_a.bin", "--track=try"]
    with stop_after(4):
        run(shards, *args, status=143)
    (path,), options = Path("checkpoints").rglob("*.pt"), RECORD_CHANGES[what][0]
    if what == "bytes":
        data = bytearray(Path("train_a.bin").read_bytes())
        data[-2] = 98  # a token of the last document
        Path("train_a.bin").write_bytes(data)
    if what == "script":
        monkeypatch.setattr(gpt, "SCRIPT", gpt.SCRIPT + b"\n# another line\n")
    if what == "machine":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    if what == "ranks":
        describe = gpt.describe_machine
        monkeypatch.setattr(gpt, "describe_machine", lambda rt: (m := describe(rt)) | dict(hardware=m["hardware"] | dict(ranks=2)))
    capsys.readouterr()
    run(shards, *args, *options, f"--resume={path}", status=2)
    errors = capsys.readouterr().err
    assert f"{path} cannot continue --record=hybrid ({RECORD_CHANGES[what][1]}" in errors and errors.count("\n") == 1
    with stop_after(1):
        run(shards, *args, *options, "--resume=auto", status=143)
    out = capsys.readouterr().out
    assert "starting anew without a checkpoint" in out and RECORD_CHANGES[what][1] in out
    assert len(list(Path("checkpoints").iterdir())) == 2


def test_a_plain_run_continues_on_another_machine_and_says_so(shards, here, monkeypatch, capsys):
    args = ["--num_iterations=6", "--val_loss_every=0"]
    with stop_after(4):
        run(shards, *args, status=143)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert run(shards, *args, "--resume=auto")
    assert re.search(r"resumed \S+ after step 4: threads was \d+, here 64\n", capsys.readouterr().out)
    assert read_result()["resumed_at"] == [4]


# ---- disks ----------------------------------------------------------------------------------------------------------


def run_limited(shards, most_bytes: int, *args) -> subprocess.CompletedProcess:
    """A run whose files may not exceed a size: writing fails as on a full disk."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *TINY, *data_args(shards), *args],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
    )


def test_no_room_for_checkpoints(shards, here):
    """Each failure is reported. The result is complete, and status 1 says that the last checkpoint is missing."""
    done = run_limited(shards, 500_000, "--num_iterations=6", "--checkpoint_every=2")  # checkpoints of 1.5 MB
    assert done.returncode == 1
    lines = re.findall(r"^no checkpoint of step (\d): (\S+) cannot be written \(File too large\)$", done.stdout, re.M)
    assert [int(step) for step, _ in lines] == [2, 4, 6] and not list_files()
    assert done.stderr == "train_gpt.py: error: the last checkpoint or model was not written, see above\n"
    assert len(find_results()) == 1


def test_no_room_for_the_model(shards, here):
    """The result is complete, and status 1 says that model.pt is missing."""
    done = run_limited(shards, 480_000, "--num_iterations=2", "--save_model=on")
    assert done.returncode == 1
    assert re.search(r"^no model: \S+ cannot be written \(File too large\)$", done.stdout, re.M)
    assert done.stderr == "train_gpt.py: error: the last checkpoint or model was not written, see above\n"
    assert not list_files() and len(find_results()) == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_leaves_its_model(num_ranks, shards, here, capsys):
    """The parameters of model.pt are those of the last checkpoint. Its optimizer state is left out."""
    args = [*TINY, *data_args(shards), "--tokens_per_step=1024", "--num_iterations=2"]
    args += ["--checkpoint_every=2", "--save_model=auto"]
    done = run_script(args, here, nproc=num_ranks)
    assert done.returncode == 0, done.stderr
    step = find_step(2)
    content = torch.load(step.parent / "model.pt", weights_only=True)
    config, weights = json.loads(content["metadata"])["config"], content["tensors"]
    state = tensors_of(step)
    assert weights.keys() == {name for name in state if "/" not in name} and len(weights) == 11
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    assert config["num_layers"] == 2
    assert gpt.main([*args, f"--resume={step.parent / 'model.pt'}"]) == 2
    assert "model.pt has no optimizer state: name a step_*.pt, or give --resume=auto\n" in capsys.readouterr().err


def test_large_models_are_left_out(shards, here, monkeypatch):
    """auto writes a model below the limit."""
    for limit, names in ((10**5, []), (10**7, ["model.pt"])):
        monkeypatch.setattr(gpt.Checkpoints, "MODEL_BYTES", limit)
        run(shards, "--num_iterations=1", "--save_model=auto")
        assert list_files() == names


@pytest.mark.slow
def test_no_room_for_the_log(shards, here):
    """Nor for the result: training ends with its card, and status 1."""
    done = run_limited(shards, 1000, "--num_iterations=6")
    assert done.returncode == 1
    assert done.stdout.count("cannot be written (File too large): training continues without it") == 1
    assert done.stderr.startswith(
        "train_gpt.py: error: this run is not recorded: logs cannot be written (File too large)"
    )
    assert done.stderr.count("\n") == 1
    assert "step:6/6 val_loss" in done.stdout and "| validation loss  |" in done.stdout
    assert not list(Path("logs").glob("*.json"))


@pytest.mark.slow
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
    """Rank 0 needs longer for a checkpoint than a collective of a step may take. The others wait for it."""
    args = ["--num_iterations=6", "--tokens_per_step=1536", "--checkpoint_every=3"]
    statuses, points, errors = fail(3, "slow disk", shards, *args)
    assert statuses == [0, 0, 0] and points, errors[-2000:]


def test_partial_files_of_a_killed_process_are_removed(shards, here):
    with stop_after(2):
        run(shards, "--num_iterations=6", "--checkpoint_every=3", status=143)
    partial = find_step(2).with_name(".step_000003.pt.4194303.partial")
    partial.write_text("")
    run(shards, "--num_iterations=6", "--checkpoint_every=3", "--resume=auto")
    assert not partial.exists() and list_files() == ["step_000003.pt", "step_000006.pt"]
    script = f"train_gpt_{hashlib.sha256(SCRIPT.read_bytes()).hexdigest()[:12]}.py"
    assert Path("logs", script).read_bytes() == SCRIPT.read_bytes()


def refuse_to_write(monkeypatch, is_refused) -> None:
    """A full disk, for some paths."""
    real = gpt.write_atomic

    def write_atomic(path, *more):
        if is_refused(path):
            raise OSError(28, "No space left on device", str(path))
        real(path, *more)

    monkeypatch.setattr(gpt, "write_atomic", write_atomic)


def test_a_full_disk_of_logs_prevents_no_checkpoint(shards, here, monkeypatch, capsys):
    refuse_to_write(monkeypatch, lambda path: path.parent.name == "logs")
    args = [*TINY, *data_args(shards), "--num_iterations=6", "--checkpoint_every=3", "--checkpoint_dir=other"]
    assert gpt.main(args) == 1
    out, errors = capsys.readouterr()
    assert "no checkpoint" not in out and "this run is not recorded: logs cannot be written" in errors
    assert list_files("other") == ["step_000003.pt", "step_000006.pt"]


def test_if_the_last_checkpoint_fails_the_one_before_is_named(shards, here, monkeypatch, capsys):
    refuse_to_write(monkeypatch, lambda path: path.name == "step_000005.pt")
    with stop_after(5):
        assert run(shards, "--num_iterations=400", "--val_loss_every=0", "--checkpoint_every=4", status=143) is None
    out, errors = capsys.readouterr()
    folder = find_step(4).parent
    assert f"no checkpoint of step 5: {folder} cannot be written (No space left on device)" in out
    assert "stopped by SIGTERM after step 5 of 400: continue with: " in errors
    assert errors.endswith(f"--resume={folder}/step_000004.pt\n")


def test_a_record_without_room_stays_in_logs_with_its_log(shards, here, monkeypatch, capsys):
    """Neither log nor json is in the record folder, and the line says where they are."""
    refuse_to_write(monkeypatch, lambda path: path.suffix == ".json" and "records" in path.parts)
    args = [*TINY, *data_args(shards), "--num_iterations=3", "--record=full"]
    assert gpt.main(args) == 1
    (result,), (log,) = Path("logs").glob("*.json"), Path("logs").glob("*.txt")
    assert result.stem == log.stem and not list(Path("records").rglob("*_seed*"))
    assert f"incomplete. The result was written to {result} instead" in capsys.readouterr().err


def test_a_file_is_complete_before_the_logs_move(tmp_path):
    moved = []

    def fail(_file):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        gpt.write_atomic(tmp_path / "a.json", fail, lambda: moved.append("too early"))
    assert moved == [] and list(tmp_path.iterdir()) == []
    gpt.write_atomic(tmp_path / "a.json", b"{}", lambda: moved.extend(path.read_bytes() for path in tmp_path.iterdir()))
    assert moved == [b"{}"] and [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("how", ["vanish", "become a file"])
def test_folders_that_change_while_training(shards, here, monkeypatch, capsys, how):
    """Vanished folders are made again. If files take their place, the run ends with status 1."""
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        if self.progress.step == 4 and Path("logs").is_dir():
            while not list(Path("logs").glob("train_gpt_*.py")):  # the last file of the background thread
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
        assert status == 0 and errors == "" and len(find_results()) == 1
        assert list_files() == ["step_000006.pt", "step_000009.pt"]
    else:
        assert status == 1 and "error: this run is not recorded: logs cannot be written" in errors
        assert re.findall(r"no checkpoint of step (\d): checkpoints/\S+ cannot be written", out) == ["6", "9"]
        assert "step:9/9 val_loss" in out


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


UNREADABLE, OTHER = "cannot be read as a checkpoint", ", not 'train_gpt 11'"
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
    "code in an archive": (lambda path: torch.save({"metadata": Bomb()}, path), UNREADABLE),
}
FOREIGN = [  # an entry of the metadata, its new value, words of the message
    ("run_id", "/somewhere/victim", "its run_id is '/somewhere/victim'"),
    ("run_id", "../../victim", "its run_id is "),
]
FILE = "--resume=FILE"
OPTIONS = {  # arguments: words of the message
    ("--resume=nowhere.pt",): "nowhere.pt cannot be read as a checkpoint",
    ("--resume=.",): ". cannot be read as a checkpoint",
    (FILE, "--num_layers=3"): "has scalars.scalar of shape (9,), but this run needs (12,) (num_layers was 2, here 3, other layers)",
    (FILE, "--model_dim=128", "--head_dim=64"): "of shape (384, 64), but this run needs (384, 128) (",
    (FILE, "--mlp_ratio=2"): "(mlp_ratio was 4.0, here 2.0",
    (FILE, "--matrix_rule=adamw"): "/exp_avg (",
    (FILE, "--matrix_rule=normuonh"): "(matrix_rule was muon, here normuonh",
    (FILE, "--num_iterations=5"): "is from step 6, but --num_iterations is 5",
    ("--checkpoint_every=-1",): "--checkpoint_every=-1 is too small: give at least 0",
    ("--checkpoint_every=often",): "--checkpoint_every=often is not a whole number",
    ("--checkpoint_every=5", "--checkpoint_dir=a_file"): "a_file cannot be written",
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
    """Exit status 2, one line, and no new file."""
    before = sorted(Path(".").rglob("*"))
    path = next(Path("checkpoints").rglob("*.pt"))
    capsys.readouterr()
    args = [word.replace("FILE", str(path)) for word in args]
    assert gpt.main([*TINY, *data_args(shards), "--num_iterations=6", "--checkpoint_every=6", "--val_loss_every=0", *args]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("train_gpt.py: error: ") and errors.count("\n") == 1 and words in errors, errors
    assert [path for path in sorted(Path(".").rglob("*")) if path not in before and path.name != "logs"] == []


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_refused(shards, saved, here, capsys, monkeypatch, name):
    """Before anything is measured or built. Nothing in it is executed."""
    shutil.copytree(saved, "checkpoints")
    path = find_step(6)
    change, words = DAMAGE[name]
    change(path)
    monkeypatch.setattr(gpt, "choose_precision", None)
    refuse(shards, [FILE], words, capsys, monkeypatch)
    if words == OTHER:  # of another script, so it is another run
        monkeypatch.undo()
        monkeypatch.chdir(here)
        run(shards, "--num_iterations=2", "--resume=auto")
        assert f"the newest is {path.parent}, but another version of the script wrote it" in capsys.readouterr().out
    else:
        refuse(shards, ["--resume=auto"], words, capsys, monkeypatch)
    assert sample.main([str(path)]) == 2 and capsys.readouterr().err.count("\n") == 1
    assert not Path("boom").exists()


@pytest.mark.parametrize("entry, value, words", FOREIGN, ids=str)
def test_a_run_id_that_is_no_folder_name_is_refused(shards, saved, here, capsys, monkeypatch, entry, value, words):
    shutil.copytree(saved, "checkpoints")
    path = find_step(6)
    content = torch.load(path, weights_only=True)
    metadata = json.loads(content["metadata"])
    part, _, name = entry.rpartition(".")
    (metadata[part] if part else metadata)[name] = value
    torch.save({**content, "metadata": json.dumps(metadata)}, path)
    refuse(shards, [FILE], words, capsys, monkeypatch)


@pytest.mark.slow
def test_ranks_refuse_with_one_line(shards, saved, here):
    """Rank 0 reads the file. The others receive the reason, and leave it the time to print it."""
    shutil.copytree(saved, "checkpoints")
    flip("data/0")(find_step(6))
    statuses, _, errors = fail(2, "none", shards, "--tokens_per_step=1024", f"--resume={find_step(6)}")
    assert statuses == [2, 2] and errors.count("\n") == 1 and "it is damaged: the checksum of " in errors


@pytest.mark.parametrize("args", OPTIONS, ids=lambda args: " ".join(args))
def test_options_that_do_not_fit(shards, saved, here, capsys, monkeypatch, args):
    shutil.copytree(saved, "checkpoints")
    Path("a_file").write_text("")
    refuse(shards, args, OPTIONS[args], capsys, monkeypatch)


def test_low_bits_that_the_options_do_not_have(shards, here, capsys):
    """The file is complete, only the option does not fit."""
    run(shards, "--num_iterations=3", "--checkpoint_every=3", *VARIANTS["low_bits"])
    args = [*VARIANTS["low_bits"], "--state_dtype=storage"]
    run(shards, "--num_iterations=6", f"--resume={find_step(3)}", *args, status=2)
    errors = capsys.readouterr().err
    assert re.search(r"step_000003.pt also has \S+/low_bits \(.*state_dtype was float32, here storage.*\): give the options", errors)
