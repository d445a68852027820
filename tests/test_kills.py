"""Runs that are killed or stopped again and again end with the bits of the run without an interruption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, assert_same_bits, at_step, data_args, find_saved, gpt, read_tensors, run
from run_ranks import ENVIRONMENT, exact_sums

pytestmark = pytest.mark.slow
NUM_KILLS = int(os.environ.get("NUM_KILLS", 6))
SMOKE = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--seq_len=128", "--tokens_per_step=768", "--epochs=100"]
SMOKE += ["--micro_batch_tokens=128", "--warmup_iterations=0", "--val_tokens=1024", "--val_loss_every=10"]
SMOKE_92 = ["--preset=smoke_92", "--device=cpu", "--warmup_iterations=0", "--val_tokens=1024"]


def test_killed_again_and_again(shards, here):
    """On one to three ranks, a checkpoint after every step. No life falls behind the one before it."""
    args = [*SMOKE, *data_args(shards), f"--num_iterations={30 + 10 * NUM_KILLS}", "--telemetry_every=5"]
    command = [sys.executable, str(ROOT / "tests/run_and_kill.py"), str(NUM_KILLS), "0", "3", *args]
    done = subprocess.run([*command, "--checkpoint_every=1"], capture_output=True, text=True, timeout=3000, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    lives = json.loads(done.stdout)
    for life in lives[:-1]:
        killed, others = (life["ends"], []) if life["victim"] is None else (
            [life["ends"].pop(life["victim"])], life["ends"])
        assert set(killed) == {-signal.SIGKILL} and set(others) <= {1}, life
        assert life["seconds"] < 120
    assert set(lives[-1]["ends"]) == {0}, lives[-1]
    assert {life["what"] for life in lives} > {"moment", "write"} and {life["ranks"] for life in lives} == {1, 2, 3}
    resumed = [life["resumed"] for life in lives if life["resumed"]]  # 0: killed while it started
    assert resumed == sorted(resumed) and len(set(resumed)) >= NUM_KILLS // 2
    last = int(args[-2].partition("=")[2])
    end = read_tensors(find_saved(last))
    assert len(list(Path("logs").glob("*.json"))) == 1
    with exact_sums():
        assert gpt.main([*args, f"--checkpoint_every={last}", "--out=whole"]) == 0
    (whole,) = Path("whole").rglob("step_*")
    assert_same_bits(end, read_tensors(whole))
    left = sorted(path.name for path in Path("checkpoints").rglob("*step_*"))
    assert len(left) == 2 and left[1] == f"step_{last:06d}" and left[0].startswith("step_")  # no partial folder


def test_all_mechanisms_are_stopped_at_many_steps(shards, here, monkeypatch):
    """SIGTERM in a step, in one process. Some steps have gradients that wait for an update, so a run stops later."""
    args = ["--telemetry_every=3", "--checkpoint_every=14"]
    whole = run(shards, *args, "--out=whole", preset=SMOKE_92)
    (path,) = Path("whole").rglob("step_000014")
    end, seen = read_tensors(path), set()
    for step in range(1, 15, 3):
        out = Path(str(step))
        with monkeypatch.context() as patch:
            at_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
            run(shards, args[0], f"--out={out}", preset=SMOKE_92, status=143)
        (saved,) = out.rglob("step_*")
        assert step <= (stopped := int(saved.name[5:])) <= step + 3
        seen.add(stopped)
        again = run(shards, *args, f"--out={out}", "--resume=auto", preset=SMOKE_92)
        (last,) = out.rglob("step_000014")
        assert_same_bits(read_tensors(last), end)
        assert all(again[name] == whole[name] for name in ("train_points", "final_val_loss"))
    assert len(seen) >= 4
