"""benchmarks/tune.py on the CPU: real workers, real refusals, and what it would try on other machines."""

import json
import os
import sys

import pytest
from conftest import ROOT, data_args, gpt, launch, smoke_config

sys.path.insert(0, str(ROOT / "benchmarks"))
import tune  # noqa: E402

TIMED = {"faster", "no difference", "slower"}


def run_tune(shards, cwd, *words, **env):
    """(its json, its report) of a run in two rounds of a model smaller than preset smoke's."""
    args = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=1024", *data_args(shards),
            "--rounds=2", "--json=tune.json", *words]
    done = launch([str(ROOT / "benchmarks" / "tune.py"), *args], cwd, env=env)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    return json.loads((cwd / "tune.json").read_text()), done.stdout


@pytest.mark.slow
def test_alternatives_are_timed_refused_and_named(shards, tmp_path):
    """The same gradients in two halves are timed; another rate is refused, what cannot start gives its reason."""
    result, report = run_tune(shards, tmp_path, "--alternative=--micro_batch_tokens=512",
                              "--alternative=--embed-lr=0.1", "--alternative=--micro_batch_tokens=128")
    halves, other, failed = result["alternatives"]
    assert halves["verdict"] in TIMED and halves["ms_per_step"] > 0 and halves["rounds"] == 2
    assert halves["quartiles"][0] <= halves["ratio"] <= halves["quartiles"][1]
    assert halves["loss"] == pytest.approx(result["loss"], rel=1e-3)  # 4e-4: sums in another order
    assert abs(other["loss"] / result["loss"] - 1) > tune.TOLERANCE["float32"]
    assert other["verdict"] == "refused" and "rounding makes at most" in other["reason"] and "ratio" not in other
    assert failed["verdict"] == "failed" and "is less than one packed sequence" in failed["reason"]
    assert result["chosen"] in ([], ["--micro_batch_tokens=512"]) and result["data"] == "real shards"
    assert [line.split(" | ")[0] for line in report.splitlines() if line.startswith("| ")][:5] == [
        "| alternative", "| plain", "| `--micro_batch_tokens=512`", "| `--embed_lr=0.1`",
        "| `--micro_batch_tokens=128`"]


@pytest.mark.slow
def test_ranks_threads_and_other_numerics(shards, tmp_path):
    """Two ranks train the same as one; bfloat16 does not have to, and is not recommended; two start at a time."""
    result, report = run_tune(shards, tmp_path, "--alternative=NPROC=2 OMP_NUM_THREADS=1", "--jobs=2",
                              "--alternative=--dtype=bfloat16", "--alternative=GOMP_SPINCOUNT=1000")
    ranks, bfloat16, spinning = result["alternatives"]
    assert {ranks["verdict"], bfloat16["verdict"], spinning["verdict"]} <= TIMED
    assert ranks["loss"] == pytest.approx(result["loss"], rel=1e-3) and spinning["loss"] == result["loss"]
    assert bfloat16["loss"] != result["loss"] and bfloat16["other_numerics"]
    assert "--dtype=bfloat16" not in result["chosen"] and report.index("other numerics") < report.index("bfloat16`")


@pytest.mark.slow
def test_what_there_is_no_time_for_is_said(shards, tmp_path):
    result, report = run_tune(shards, tmp_path, "--seconds=15",
                              *["--alternative=--micro_batch_tokens=512"] * 9)
    assert result["alternatives"][-1]["verdict"] == "not tried" and "not tried: the time was up" in report
    assert result["seconds"] < 60


@pytest.mark.parametrize("env, words, message", [
    (dict(TRITON_INTERPRET="0"), ["--fast=symmetric_matmul"],
     "the plain config fails: --fast=symmetric_matmul: symmetric_matmul cannot be used (it fails on this"),
    pytest.param(dict(NPROC="2"), ["--tokens_per_step=1536"],
                 "the plain config fails: --tokens_per_step=1536 is 3 packed sequences", marks=pytest.mark.slow),
    (dict(NPROC="two"), [], "NPROC=two: give a whole number of processes")])
def test_a_plain_config_that_fails_ends_with_one_line(shards, tmp_path, env, words, message):
    args = ["--preset=smoke", "--device=cpu", *data_args(shards), *words]
    done = launch([str(ROOT / "benchmarks" / "tune.py"), *args], tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("tune.py: error: ") and message in done.stderr


def say(**facts) -> dict:
    """What a plain worker says of itself."""
    return dict(device="cpu", threads=2, compiles=False, dtype="float32", fp8=[]) | facts


def list_words(cfg: gpt.Config, facts: dict, **env) -> list[str]:
    found = tune.list_alternatives(cfg, facts, {"NPROC": "1", "GOMP_SPINCOUNT": "1000", **env})
    return [" ".join(words) for words in found]


def test_what_is_tried_on_a_cpu(monkeypatch):
    """Threads, ranks that can share the step, waiting, halves of the micro-batch; nothing that is so already."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert list_words(gpt.make_config({"preset": "laptop"}), say()) == [
        "--micro_batch_tokens=1024", "GOMP_SPINCOUNT=100000", "OMP_NUM_THREADS=1", "NPROC=2 OMP_NUM_THREADS=1",
        "--compile=on", "--dtype=bfloat16"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    found = list_words(smoke_config(seq_len=256, micro_batch_tokens=512), say(threads=4), NPROC="4")
    assert "NPROC=8 OMP_NUM_THREADS=2" in found and "NPROC=4 OMP_NUM_THREADS=4" not in found
    assert [words for words in found if "micro" in words] == ["--micro_batch_tokens=256"]  # a rank's two sequences
    assert {"--comm_bucket_mb=16.0", "--comm_bucket_mb=256.0", "--segments=1", "--segments=2"} <= set(found)
    assert "--segments=6" not in found  # of four layers


def test_what_is_tried_on_gpus():
    """Our kernels one by one and the compiler's modes, the longest last; sequences are never cut."""
    cfg = gpt.make_config({"preset": "track_1"})
    facts = say(device="cuda", compiles=True, dtype="bfloat16", fp8=["fp8_head"])
    forms = "--fast=rms_norm,norm_rotate,flex_attention"
    assert list_words(cfg, facts) == [
        "--micro_batch_tokens=98304", "--micro_batch_tokens=196608", f"{forms},cross_entropy,sparse_embedding",
        f"{forms},head_loss,relu2_mlp,sparse_embedding", f"{forms},head_loss,symmetric_matmul,sparse_embedding",
        f"{forms},head_loss,sparse_embedding", "--segments=3", "--compile_mode=coordinate-descent", "--fp8_head=off", "--fp8_linear=on",
        "--fp8_mlp=on", "--compile_mode=max-autotune-no-cudagraphs"]
    found = list_words(cfg, facts, NPROC="8")  # a sequence each: no micro-batch is larger
    assert not [words for words in found if "micro" in words] and "--segments=3" not in found
    assert "--comm_bucket_mb=256.0" in found and "--segments=6" in found
    for words in found:
        gpt.make_config(gpt.parse_argv(["--preset=track_1", *words.split()])[0])


def test_winners_go_together_where_they_set_different_things():
    def row(words, ratio, verdict="faster", other_numerics=False):
        return dict(words=tune.parse_words(words), ratio=ratio, verdict=verdict, other_numerics=other_numerics)

    rows = [row("OMP_NUM_THREADS=1", 0.9), row("NPROC=2 OMP_NUM_THREADS=1", 0.6), row("--segments=3", 0.97),
            row("--micro-batch-tokens=1024", 0.7), row("--compile=on", 0.99, "no difference"),
            row("--dtype=bfloat16", 0.5, other_numerics=True)]
    assert tune.combine(rows) == [("NPROC=2", "OMP_NUM_THREADS=1"), ("--micro_batch_tokens=1024",), ("--segments=3",)]
