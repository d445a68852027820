"""benchmarks/tune.py on the CPU: real workers and refusals, and the alternatives of other machines."""

import io
import itertools
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, advance, at_most, data_args, gpt, launch, smoke_config

from benchmarks import tune

TIMED = {"faster", "no difference", "slower"}
STUB = """import json, os, sys, time
time.sleep(float(os.environ.get("SLEEP", "0")))
facts = dict(loss=1.0, step_seconds=0.1, seconds_per_token=1e-6, data="none", dtype="float32", fp8=[],
             compiles=False, threads=1, device="cpu", machine="a stub", room=1)
print(json.dumps(facts), flush=True)
for line in sys.stdin:
    print(json.dumps(dict(seconds_per_token=float(os.environ.get("TOKEN", "1e-6")))), flush=True)
"""


@pytest.mark.slow
def test_alternatives_are_timed_refused_and_named(shards, here):
    """Another learning rate is refused. bfloat16 may end at another loss. What cannot start gives its reason."""
    words = ["--micro_batch_tokens=512", "NPROC=2 OMP_NUM_THREADS=1", "GOMP_SPINCOUNT=1000",
             "--embed-lr=0.1", "--micro_batch_tokens=128", "--dtype=bfloat16"]
    args = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=1024", *data_args(shards),
            "--rounds=2", "--seconds=3000", "--json=tune.json", "--jobs=2"]
    args += [f"--alternative={text}" for text in words]
    done = launch([str(ROOT / "benchmarks/tune.py"), *args], here)
    assert done.returncode == 0, done.stderr[-2000:]
    result, report = json.loads(Path("tune.json").read_text()), done.stdout
    halves, ranks, spinning, other, failed, bfloat16 = result["alternatives"]
    assert {halves["verdict"], ranks["verdict"], spinning["verdict"], bfloat16["verdict"]} <= TIMED
    assert halves["rounds"] == 2 and result["seconds_per_token"] > 0 and result["data"] == "real shards"
    assert halves["quartiles"][0] <= halves["ratio"] <= halves["quartiles"][1]
    assert halves["loss"] == pytest.approx(result["loss"], rel=1e-3)  # 4e-4: sums in another order
    assert ranks["loss"] == pytest.approx(result["loss"], rel=1e-3) and spinning["loss"] == result["loss"]
    assert abs(other["loss"] / result["loss"] - 1) > tune.TOLERANCE["float32"]
    assert other["verdict"] == "refused" and "ratio" not in other
    assert failed["verdict"] == "failed" and "--micro_batch_tokens=128" in failed["reason"]
    assert bfloat16["loss"] != result["loss"] and bfloat16["other_numerics"]
    assert "--dtype=bfloat16" not in result["chosen"]
    assert report.index("`--embed_lr=0.1`") < report.index("other numerics") < report.index("bfloat16`")


@pytest.fixture
def run_stubs(tmp_path, monkeypatch):
    """Run tune() with workers that take TOKEN seconds per token, by default 1e-6."""
    path = tmp_path / "stub.py"
    path.write_text(STUB)
    monkeypatch.setattr(tune, "__file__", str(path))
    for name in ("NPROC", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    options = ["--preset=smoke", "--device=cpu"]

    def run(alternatives, seconds=3000.0):
        words = [tune.parse_words(text) for text in alternatives]
        return tune.tune(tune.Namespace(seconds=seconds, rounds=3, alternative=words, jobs=1), options)

    return run


def test_verdicts_follow_from_the_times(run_stubs):
    """0.97 of the time is faster, 0.99 makes no difference. Winners that set other options go together."""
    tokens = ["0.9e-6", "0.97e-6", "0.99e-6", "1.05e-6", "1.2e-6"]
    result = run_stubs([f"TOKEN={token}" for token in tokens])
    rows = result["alternatives"]
    assert [row["verdict"] for row in rows] == ["faster", "faster", "no difference", "slower", "slower"]
    assert [row["ratio"] for row in rows] == pytest.approx([0.9, 0.97, 0.99, 1.05, 1.2])
    assert result["chosen"] == ("TOKEN=0.9e-6",) and result["together"]["verdict"] == "faster"
    assert result["seconds_per_token"] == 1e-6
    rows += [tune.describe(("--compile=on",), "faster", ratio=0.95),
             tune.describe(("--dtype=bfloat16",), "faster", ratio=0.5)]
    assert tune.combine(rows) == [("TOKEN=0.9e-6",), ("--compile=on",)]


@pytest.mark.parametrize("seconds, verdict, is_second", [
    (350, "no verdict", False), (9000, "faster", True), (1700, "faster", False)])
def test_too_few_rounds_are_no_verdict(run_stubs, monkeypatch, now, seconds, verdict, is_second):
    """The first six turns take 100 s each: 350 s suffice for two of three rounds. Later ones take 300 s."""
    turns = iter([100.0] * 6 + [300.0] * 6)
    monkeypatch.setattr(tune, "monotonic", lambda: now[0])
    advance(monkeypatch, now, tune.Worker, "take_turn", lambda *_: next(turns))
    result = run_stubs(["TOKEN=0.9e-6"], seconds=seconds)
    (row,) = result["alternatives"]
    assert row["verdict"] == verdict and (result["together"] is not None) == is_second


def test_an_interruption_waits_for_no_worker(run_stubs):
    """The alternative does not answer for an hour. Its process and the timer of its time are ended."""
    start = time.monotonic()
    with pytest.raises(TimeoutError), at_most(1):
        run_stubs(["SLEEP=3600"])
    assert time.monotonic() - start < 15
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.parametrize("preset, num_steps, turn", [
    ("laptop", 1, [0, 7, 14]),
    ("laptop", 7, [0, 1, 7, 8, 14, 15]),
    ("laptop", 99, list(range(20))),
    ("smoke_92", 1, [*range(4), *range(7, 18)]),  # tables are later updated each fourth step
    ("track_2", 1, [0, 2, 4, 6, 7, 9, 11, 13, 14, 16, 18])])  # ceil(21 i / 12)
def test_a_turn_visits_all_stages(preset, num_steps, turn):
    cfg = tune.step.shorten(gpt.make_config({"preset": preset, "device": "cpu"}), tune.NUM_STEPS)
    assert tune.list_turn(gpt.Schedule(cfg), cfg.longest_period, num_steps) == turn


def test_a_worker_measures_time_per_token(shards, monkeypatch, now):
    """Stages of 100, 190 and 400 ms, and 100 ms more in each second step, on a clock of the test."""
    number, times = itertools.count(), {128: 0.1, 192: 0.19, 256: 0.4}  # by the long window
    advance(monkeypatch, now, gpt.Trainer, "train_step",
            lambda *args: times[args[2].stage.window_long] + next(number) % 2 / 10)
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n9\n"))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    answers = sys.stdout
    assert tune.work([*TINY, *data_args(shards), '--groups={"embed": {"every": 2}}']) == 0
    found = [json.loads(line)["seconds_per_token"] for line in answers.getvalue().splitlines()]
    true = (7 * 0.15 + 7 * 0.24 + 6 * 0.45) / 20 / 512
    assert found == pytest.approx([true] * 3, rel=1e-6)


def make_facts(**facts) -> dict:
    """The first answer of a plain worker."""
    return dict(device="cpu", threads=2, compiles=False, dtype="float32", fp8=[]) | facts


def list_words(cfg: gpt.Config, facts: dict, **env) -> list[str]:
    found = tune.list_alternatives(cfg, facts, {"NPROC": "1", "GOMP_SPINCOUNT": "1000", **env})
    return [" ".join(words) for words in found]


def test_what_is_tried_on_a_cpu(monkeypatch):
    """Threads, numbers of ranks, spinning, halves of the micro-batch. The present values are left out."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert list_words(gpt.make_config({"preset": "laptop"}), make_facts()) == [
        "--micro_batch_tokens=1024", "GOMP_SPINCOUNT=100000", "OMP_NUM_THREADS=1",
        "NPROC=2 OMP_NUM_THREADS=1", "--compile=on", "--dtype=bfloat16"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    found = list_words(smoke_config(seq_len=256, micro_batch_tokens=512), make_facts(threads=4), NPROC="4")
    assert "NPROC=8 OMP_NUM_THREADS=2" in found and "NPROC=4 OMP_NUM_THREADS=4" not in found
    assert [words for words in found if "micro" in words] == ["--micro_batch_tokens=256"]  # one of two


def test_what_is_tried_on_gpus():
    """Our kernels one by one, and other numerics. Sequences are never cut."""
    cfg = gpt.make_config({"preset": "record_32"})
    facts = make_facts(device="cuda", compiles=True, dtype="bfloat16", fp8=["fp8_head"])
    forms = "--fast=rms_norm,flex_attention,head_loss"
    found = list_words(cfg, facts)
    assert found == [
        "--micro_batch_tokens=98304", "--micro_batch_tokens=196608", f"{forms},qkv_kernel",
        f"{forms},cross_entropy", f"{forms},relu2_mlp", forms,
        "--fp8=off", "--fp8=on --fp8_parts=head,mlp", "--fp8=on --fp8_parts=head,qkv"]
    assert list_words(cfg, facts, NPROC="8") == found[2:]  # a sequence each: no micro-batch is larger
    for words in found:
        gpt.make_config(gpt.parse_argv(["--preset=record_32", *words.split()]))
