"""benchmarks/tune.py on the CPU: real workers and refusals, and the alternatives of other machines."""

import io
import itertools
import json
import os
import sys
import threading
import time
from contextlib import ExitStack

import pytest
from conftest import ROOT, at_most, before_call, data_args, gpt, launch, smoke_config

from benchmarks import tune

TIMED = {"faster", "no difference", "slower"}
STUB = """import json, os, sys, time
time.sleep(float(os.environ.get("SLEEP", "0")))
facts = dict(loss=1.0, step_seconds=0.1, seconds_per_token=1e-6, data="none", dtype="float32", fp8=[], compiles=False,
             threads=1, device="cpu", machine="a stub", room=1, environment=dict(os.environ), argv=sys.argv[1:])
print(json.dumps(facts), flush=True)
for line in sys.stdin:
    print(json.dumps(dict(seconds_per_token=float(os.environ.get("TOKEN", "1e-6")))), flush=True)
"""


def run_tune(shards, cwd, *words, **env):
    """(json, report) of a run in two rounds. The model is smaller than preset smoke's."""
    args = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=1024", *data_args(shards),
            "--rounds=2", "--seconds=3000", "--json=tune.json", *words]
    done = launch([str(ROOT / "benchmarks" / "tune.py"), *args], cwd, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"alternative {n}/{len(lines)}" for n in range(1, len(lines) + 1)]
    return json.loads((cwd / "tune.json").read_text()), done.stdout


@pytest.mark.slow
def test_alternatives_are_timed_refused_and_named(shards, tmp_path):
    """Two micro-batches are timed. Another learning rate is refused. A config that cannot start gives its reason."""
    result, report = run_tune(shards, tmp_path, "--alternative=--micro_batch_tokens=512",
                              "--alternative=--embed-lr=0.1", "--alternative=--micro_batch_tokens=128")
    halves, other, failed = result["alternatives"]
    assert halves["verdict"] in TIMED and halves["rounds"] == 2 and result["seconds_per_token"] > 0
    assert halves["quartiles"][0] <= halves["ratio"] <= halves["quartiles"][1]
    assert halves["loss"] == pytest.approx(result["loss"], rel=1e-3)  # 4e-4: sums in another order
    assert abs(other["loss"] / result["loss"] - 1) > tune.TOLERANCE["float32"]
    assert other["verdict"] == "refused" and "rounding makes at most" in other["reason"] and "ratio" not in other
    assert failed["verdict"] == "failed" and "--micro_batch_tokens=128" in failed["reason"]
    assert result["chosen"] in ([], ["--micro_batch_tokens=512"]) and result["data"] == "real shards"
    assert [line.split(" | ")[0] for line in report.splitlines() if line.startswith("| ")][:5] == [
        "| alternative", "| plain", "| `--micro_batch_tokens=512`", "| `--embed_lr=0.1`",
        "| `--micro_batch_tokens=128`"]


@pytest.mark.slow
def test_ranks_threads_and_other_numerics(shards, tmp_path):
    """Two ranks end at the loss of one. bfloat16 may end at another and is not recommended. Two start in parallel."""
    result, report = run_tune(shards, tmp_path, "--alternative=NPROC=2 OMP_NUM_THREADS=1", "--jobs=2",
                              "--alternative=--dtype=bfloat16", "--alternative=GOMP_SPINCOUNT=1000")
    ranks, bfloat16, spinning = result["alternatives"]
    assert {ranks["verdict"], bfloat16["verdict"], spinning["verdict"]} <= TIMED
    assert ranks["loss"] == pytest.approx(result["loss"], rel=1e-3) and spinning["loss"] == result["loss"]
    assert bfloat16["loss"] != result["loss"] and bfloat16["other_numerics"]
    assert "--dtype=bfloat16" not in result["chosen"] and report.index("other numerics") < report.index("bfloat16`")


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


def test_verdicts_follow_from_the_times(run_stubs, capsys):
    """0.97 of the time is faster, 0.99 makes no difference. Winners that set other options go together."""
    tokens = ["0.9e-6", "0.97e-6", "0.99e-6", "1.05e-6", "1.2e-6"]
    result = run_stubs([f"TOKEN={token}" for token in tokens])
    assert capsys.readouterr().err == "".join(f"alternative {n}/5: TOKEN={token}\n" for n, token in enumerate(tokens, 1))
    rows = result["alternatives"]
    assert [row["verdict"] for row in rows] == ["faster", "faster", "no difference", "slower", "slower"]
    assert [row["ratio"] for row in rows] == pytest.approx([0.9, 0.97, 0.99, 1.05, 1.2])
    assert result["chosen"] == ("TOKEN=0.9e-6",) and result["together"]["verdict"] == "faster"
    assert result["seconds_per_token"] == 1e-6
    report = tune.format_report(result)
    rows += [tune.describe(("--compile=on",), "faster", ratio=0.95), tune.describe(("--dtype=bfloat16",), "faster", ratio=0.5)]
    assert tune.combine(rows) == [("TOKEN=0.9e-6",), ("--compile=on",)]
    assert "| plain | 1.000 | |" in report and "| `TOKEN=0.9e-6` | 0.900 | 0.900 (0.900 to 0.900) |" in report


@pytest.mark.parametrize("seconds, verdict, is_second, last", [
    (350, "no verdict", False, "No verdict: the time was not enough"), (9000, "faster", True, "To paste: TOKEN=0.9e-6 "),
    (1700, "faster", False, "To paste (no time was left for a second measurement): TOKEN=0.9e-6 ")])
def test_too_few_rounds_are_no_verdict(run_stubs, monkeypatch, seconds, verdict, is_second, last):
    """Each of the first six turns takes 100 s, so 350 s are enough for two of three rounds. Later turns take 300 s."""
    now, turns = [0.0], iter([100.0] * 6 + [300.0] * 6)
    monkeypatch.setattr(tune, "monotonic", lambda: now[0])
    before_call(monkeypatch, tune.Worker, "take_turn", lambda *_: now.__setitem__(0, now[0] + next(turns)))
    result = run_stubs(["TOKEN=0.9e-6"], seconds=seconds)
    (row,), report = result["alternatives"], tune.format_report(result)
    assert row["verdict"] == verdict and (result["together"] is not None) == is_second
    assert ("no verdict: the time was up after 2 of 3 rounds" in report) == (seconds == 350)
    assert report.splitlines()[-1].startswith(last)


def test_an_interruption_waits_for_no_worker(run_stubs):
    """The alternative does not answer for an hour. Its process and the timer of its time are ended."""
    start = time.monotonic()
    with pytest.raises(TimeoutError), at_most(4):
        run_stubs(["SLEEP=3600"])
    seconds = time.monotonic() - start
    left = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in left:
        timer.cancel()
    assert seconds < 15 and not left


def test_workers_get_environment_and_options(run_stubs, monkeypatch):
    """Variables of the words go into the environment, options to the command line. The rest is inherited."""
    monkeypatch.setenv("INHERITED", "7")
    args = tune.Namespace(seconds=3000.0, rounds=2)
    with ExitStack() as stack:
        tuner = tune.Tuner(args, ["--preset=smoke", "--device=cpu"], stack)
        facts = tuner.launch(tune.parse_words("OMP_NUM_THREADS=3 --embed-lr=0.1 GOMP_SPINCOUNT=9")).read(300)
    names = ("NPROC", "INHERITED", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    assert [facts["environment"].get(name) for name in names] == ["1", "7", "9", "3"]
    assert facts["argv"] == ["--worker", "--preset=smoke", "--device=cpu", "--embed_lr=0.1"]
    plain = tuner.facts["environment"]
    assert [plain.get(name) for name in names] == ["1", "7", None, os.environ.get("OMP_NUM_THREADS")]
    assert tuner.facts["argv"] == ["--worker", "--preset=smoke", "--device=cpu"]


@pytest.mark.parametrize("preset, num_steps, turn", [
    ("laptop", 1, [0, 7, 14]),
    ("laptop", 7, [0, 1, 7, 8, 14, 15]),
    ("laptop", 99, list(range(20))),
    ("smoke_frontier", 1, [*range(4), *range(7, 18)]),  # tables are later updated each fourth step
    ("track_2", 1, [0, 2, 4, 6, 7, 9, 11, 13, 14, 16, 18])])  # ceil(21 i / 12)
def test_a_turn_visits_all_stages(preset, num_steps, turn):
    cfg = tune.step.shorten(gpt.make_config({"preset": preset, "device": "cpu"}), tune.NUM_STEPS)
    assert tune.list_turn(gpt.Schedule(cfg), cfg.adam_every, num_steps) == turn


def test_a_worker_measures_time_per_token(shards, monkeypatch):
    """Stages of 100, 190 and 400 ms, and 100 ms more in each second step, on a clock of the test."""
    now, real, number = [0.0], gpt.Trainer.train_step, itertools.count()

    def read(device):
        now[0] += 1e-9
        return now[0]

    def train_step(trainer, batches, state):
        loss = real(trainer, batches, state)
        now[0] += (0.1, 0.19, 0.4)[state.stage_index] + next(number) % 2 / 10
        return loss

    monkeypatch.setattr(gpt, "clock", read)
    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    monkeypatch.setattr(sys, "stdin", io.StringIO("3\n9\n"))
    answers = io.StringIO()
    monkeypatch.setattr(sys, "stdout", answers)
    words = ["--num_layers=2", "--tokens_per_step=1024", "--dtype=float32", '--groups={"embed": {"every": 2}}']
    assert tune.work(["--preset=smoke", "--device=cpu", *data_args(shards), *words]) == 0
    found = [json.loads(line)["seconds_per_token"] for line in answers.getvalue().splitlines()]
    true = (7 * 0.15 + 7 * 0.24 + 6 * 0.45) / 20 / 1024
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
        "--micro_batch_tokens=1024", "GOMP_SPINCOUNT=100000", "OMP_NUM_THREADS=1", "NPROC=2 OMP_NUM_THREADS=1",
        "--compile=on", "--dtype=bfloat16"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    found = list_words(smoke_config(seq_len=256, micro_batch_tokens=512), make_facts(threads=4), NPROC="4")
    assert "NPROC=8 OMP_NUM_THREADS=2" in found and "NPROC=4 OMP_NUM_THREADS=4" not in found
    assert [words for words in found if "micro" in words] == ["--micro_batch_tokens=256"]  # a rank's two sequences
    assert {"--comm_bucket_mb=16.0", "--comm_bucket_mb=256.0"} <= set(found)


def test_what_is_tried_on_gpus():
    """Our kernels one by one and the compiler's modes, the slowest last. Sequences are never cut."""
    cfg = gpt.make_config({"preset": "track_1"})
    facts = make_facts(device="cuda", compiles=True, dtype="bfloat16", fp8=["fp8_head"])
    forms = "--fast=rms_norm,norm_rotate,flex_attention"
    assert list_words(cfg, facts) == [
        "--micro_batch_tokens=98304", "--micro_batch_tokens=196608",
        "--fast=rms_norm,norm_rotate,qkv_kernel,flex_attention,head_loss,sparse_embedding", f"{forms},cross_entropy,sparse_embedding",
        f"{forms},head_loss,relu2_mlp,sparse_embedding", f"{forms},head_loss,symmetric_matmul,sparse_embedding",
        f"{forms},head_loss,sparse_embedding", "--fp8=off", "--fp8=on --fp8_parts=head,mlp",
        "--fp8=on --fp8_parts=head,qkv"]
    found = list_words(cfg, facts, NPROC="8")  # a sequence each: no micro-batch is larger
    assert not [words for words in found if "micro" in words]
    assert "--comm_bucket_mb=256.0" in found
    for words in found:
        gpt.make_config(gpt.parse_argv(["--preset=track_1", *words.split()]))
