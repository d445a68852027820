"""Benchmarks end to end, and the calculation of their figures. test_distributed.py runs comm.py."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, advance, call_tool, data_args, gpt, launch, make_runtime, smoke_config
from torch.autograd.profiler_util import FunctionEvent

from benchmarks import (
    comm,
    common,
    compare_nanogpt,
    gpt2_baseline,
    gpu,
    roofline,
    step,
)
from tools import results
from tools.common import run_guarded


@pytest.mark.slow
def test_step_compares_and_profiles(shards, tmp_path):
    """Parts add up to a step of the first stage."""
    args = ["--preset=smoke", "--device=cpu", *data_args(shards), "--num_steps=6"]
    args += [f"--json={tmp_path}/step.json", f"--trace={tmp_path}/trace.json"]
    done = launch([str(ROOT / "benchmarks/step.py"), *args, "--compare=--value_gate_dim=4"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "step.json").read_text())
    first, second = result["runs"]
    assert second["flags"] == first["flags"] + " --value_gate_dim=4" and result["data"] == "real shards"
    assert result["ratio"] == pytest.approx(second["seconds_per_token"] / first["seconds_per_token"])
    for timed in result["runs"]:
        ms = list(timed["ms_by_stage"].values())
        assert sum(timed["parts"].values()) == pytest.approx(ms[0])
        assert all(timed["parts"][part] > 0 for part in step.PARTS[:5])
        assert len(ms) == 3 and timed["num_recompiles"] == 0
        mean_ms = sum(steps * one for steps, one in zip((3, 2, 1), ms)) / 6
        assert timed["tokens_per_s"] == pytest.approx(2048e3 / mean_ms, rel=1e-3)
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("tool, option", [
    ("step", "--num_steps=2"), ("step", "--compare='a"), ("step", "--num_step=9"), ("gpu", "--second=9"), ("step", "--seq_len=100"),
    ("comm", "--max_mb=-1"),
    ("gpu", "--parts=tests,track_3"), ("gpu", "--seconds=0"), ("gpt2_baseline", "--options=--model_dims=4"),
    ("gpt2_baseline", "--context=10000000"), ("gpt2_baseline", "--num_heads=3"),
    ("gpt2_baseline", "--beta2=1.5"), ("gpt2_baseline", "--lr=inf"),
    ("compare_nanogpt", "--only=code,poems"), ("compare_nanogpt", "--shakespeare=nowhere"),
    ("roofline", "--cards=h200,x1"),
    ("tune", "--rounds=1"), ("tune", "--num_step=9"), ("tune", "--alternative=--compile=on fast"),
    ("tune", "--seq_len=100"), ("tools.compare", "--pairs=1"), ("tools.ladder", "--end_seeds=1.5"),
    ("tools.ladder", "--only=target,moun"), ("tools.ladder", f"--ladder={ROOT}/records"),
    ("tools.replay", "--random=-1"), ("tools.replay", "--most_seconds=nan"), ("tools.replay", "--all=3"),
    ("tools.validate", "--target=low"), ("tools.plot", "--a\nb=x"), ("tools.sample", "--temperature=-1")])
def test_bad_options_end_with_one_line(tool, option, monkeypatch, capsys):
    """And with status 2 and no run, for each tool. The line names the option or its value."""
    module, tool = importlib.import_module(tool if "." in tool else f"benchmarks.{tool}"), tool.rpartition(".")[2]
    monkeypatch.setattr(sys, "argv", [f"{tool}.py", option])
    monkeypatch.setattr(results, "run_missing", None)
    status, out, err = call_tool(capsys, run_guarded, module.main)
    word = option.split("=")[-2 if "--options=--" in option else 0]
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"{tool}.py: error: ")
    assert word.lstrip("-") in err or "required" in err or option.split(",")[-1] in err


OURS = [name for name, value in vars(gpt).items() if hasattr(value, "arg_names")]
KERNELS_BY_KIND = {  # by their names in Triton, in Inductor and in a step of record_32
    "our kernels": [*OURS, *(f"{name}_0" for name in OURS)],
    "attention": ["triton_tem_fused_flex_attention_backward_select_backward_transpose_1",
                  "triton_tem_fused_zeros_1", "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(Params)"],
    "matmuls": ["nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "triton_tem_fused_mm_3",
                "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x256x128",
                "void cublasLt::splitKreduce_kernel<32, 16, int, float>(float*)"],
    "Inductor's kernels": ["triton_poi_fused__scaled_mm__to_copy_clamp_0", "triton_red_fused_sum_15"],
    "other kernels": ["void at::native::indexFuncLargeIndex<float, long>(int)"],
    "copies and fills": ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"],
    "NCCL": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"]}


def test_kernels_are_told_by_their_names():
    found = {kind: {step.name_kind(name) for name in names} for kind, names in KERNELS_BY_KIND.items()}
    assert found == {kind: {kind} for kind in step.KERNEL_KINDS} and len(OURS) > 4


def test_kernels_share_the_time_and_the_longest_are_listed():
    """A matmul that hides half of a message, a fill and a pause. Events of the host and named ranges do not count."""
    kinds = dict(device_type=step.DeviceType.CUDA)
    names = ["nvjet_tst_1", "ncclDevKernel_AllGather", "Memset (Device)", "optimizer", "aten::mm"]
    spans = [(0, 4), (2, 6), (8, 9), (0, 10), (0, 5)]
    options = [kinds, kinds, kinds, dict(kinds, is_user_annotation=True), {}]
    events = [FunctionEvent(id=0, name=name, thread=0, start_us=1e3 * (start + at), end_us=1e3 * (end + at),
                            **more)
              for at in (0, 10, 20) for name, (start, end), more in zip(names, spans, options)]
    kernels = step.list_kernels(events)
    parts = {kind: ms for kind, ms in step.share_time(kernels).items() if ms}
    assert parts == {"matmuls": 12, "NCCL": 6, "copies and fills": 3}
    assert step.find_longest(kernels, 3) == [
        dict(name="nvjet_tst_1", kind="matmuls", calls=1, ms=4),
        dict(name="ncclDevKernel_AllGather", kind="NCCL", calls=1, ms=4),
        dict(name="Memset (Device)", kind="copies and fills", calls=1, ms=1)]


def test_random_shards_have_fewer_tokens_than_classes(tmp_path):
    """A sampled loss needs all targets of a sequence among its classes. The head has as many outputs."""
    stages = (gpt.Stage(1, 64, 64, num_classes=192), gpt.Stage(1, 64, 64, num_classes=128))
    cfg = step.use_random_shards(smoke_config(stages=stages), str(tmp_path), make_runtime())
    batches = list(gpt.TrainData(cfg, gpt.Schedule(cfg)).batches(gpt.Comm(), 0, 12))
    assert {batch.classes.size(1) for batch in batches} == {192, 128}
    assert len(set(torch.cat([batch.targets for batch in batches]).tolist())) == 128  # with BOS
    assert step.classify("aten::mm", [[512, 64], [64, 192]], cfg) == "head and loss"


@pytest.mark.slow
def test_the_gpu_day_is_rehearsed(tmp_path):
    """Every part of benchmarks/gpu.py on the CPU. The tests marked gpu are found, and skipped."""
    words = [str(ROOT / "benchmarks/gpu.py"), "--rehearse", "--seconds=3000", f"--out={tmp_path}/new/day"]
    done = launch(words, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    parts = json.loads((tmp_path / "new/day.json").read_text())["parts"]
    assert list(parts) == list(gpu.list_parts(True)) and all(part["ok"] for part in parts.values())
    assert parts["tests"]["counts"]["skipped"] >= 10
    first, second = parts["kernels"]["runs"]
    assert first["seconds_per_token"] > 0
    assert second["flags"].endswith("--fast=rms_norm,block_attention,head_loss")
    assert parts["record_92"]["runs"][0]["flags"].endswith("--preset=smoke_92")
    assert parts["train"]["differences"] == {"0": 0, "4": 0, "8": 0, "12": 0}  # no Triton kernels on a CPU
    verdicts = [row["verdict"] for row in parts["tune"]["tuned"]["alternatives"]]
    assert len(verdicts) == 2 and set(verdicts) <= {"faster", "no difference", "slower"}
    assert all(len(parts[name]["product_tflops"]) == 2 for name in parts if name != "tests")


STAGES = {"first": (0.1, 0.2, 0.3), "second": (0.1, 0.19, 0.4)}  # seconds of a step
STEPS = (7, 7, 6)  # of a run of 20 steps
TRUE_RATIO = 4430 / 3900  # sums of steps times milliseconds. The median of all steps would give 0.95


def make_subject(seconds, every=1, num_ranks=1, **changes) -> step.Subject:
    """A subject after steps that took these seconds, at a peak of 1,000 tokens a second and rank."""
    cfg, subject = smoke_config(num_iterations=len(seconds), **changes), object.__new__(step.Subject)
    rt = make_runtime(world_size=num_ranks, peak_flops=gpt.derived_numbers(cfg, 1)["flops_per_token"] * 1000.0)
    trainer, batches = SimpleNamespace(schedule=gpt.Schedule(cfg)), SimpleNamespace(waited=0.0)
    vars(subject).update(cfg=cfg, rt=rt, every=every, seconds=seconds, warm_up_s=0, num_graphs=0,
                         trainer=trainer, batches=batches)
    return subject


def test_the_ratio_counts_all_stages():
    """Stages of 100, 200 and 300 ms against 100, 190 and 400 ms: the second config is slower."""
    first, second = (make_subject([time for time, steps in zip(times, STEPS) for _ in range(steps)],
                                  tokens_per_step=1024) for times in STAGES.values())
    found = step.compare(first, second)
    assert found["ratio"] == pytest.approx(TRUE_RATIO)
    assert found["ratio_quartiles"] == pytest.approx([0.95, 4 / 3])
    assert second.measure()["tokens_per_s"] == round(20 * 1024 / 4.43)
    assert list(second.measure()["ms_by_stage"].values()) == pytest.approx([100, 190, 400])


@pytest.mark.parametrize("num_steps", [7, 8])
def test_the_ratio_counts_both_kinds_of_steps(num_steps):
    """Each second step does more: 100 and 200 ms against 150 ms, for even and odd numbers of steps."""
    stages = (gpt.Stage(1, 128, 64),)
    first = make_subject([0.15] * num_steps, stages=stages)
    second = make_subject([(0.1, 0.2)[number % 2] for number in range(num_steps)], every=2, stages=stages)
    found = step.compare(first, second)
    assert found["ratio"] == pytest.approx(1) and found["ratio_quartiles"] == pytest.approx([1, 1])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_speed_of_stages_of_different_sizes(num_ranks):
    """1,000 tokens a second and rank, which is the peak. The median of all steps would give 875."""
    sizes, stages = [1024] * 3 + [2048] * 9, (gpt.Stage(3, 256, 128, 1024), gpt.Stage(9, 256, 128, 2048))
    seconds = [size / 1000 / num_ranks for size in sizes]
    found = make_subject(seconds, num_ranks=num_ranks, stages=stages).measure()
    assert found["tokens_per_s"] == 1000 * num_ranks and found["mfu"] == pytest.approx(1.0)
    ms = found["ms_by_stage"]  # two stages with equal windows stay two
    assert ms == {"1: windows 256/128": 1024 / num_ranks, "2: windows 256/128": 2048 / num_ranks}


def test_the_mean_of_a_cycle():
    """The median over cycles ignores one slow step. Fewer steps than a cycle are averaged."""
    assert common.time_step([1, 2] * 3 + [1], 2) == 1.5
    assert common.time_step([5, 5, 90, 5, 5, 5, 5], 1) == 5
    assert common.time_step([2, 4], 4) == 3


def test_comm_counts_the_flops_of_the_first_stage():
    """Its steps are of the first stage, whose windows are shorter than the mean of all."""
    cfg = smoke_config(stages=(gpt.Stage(1, 64, 32, 1024), gpt.Stage(1, 256, 128)))
    first = smoke_config(stages=(gpt.Stage(1, 64, 32, 1024),))
    flops, all_flops = (gpt.derived_numbers(c, 1)["flops_per_token"] for c in (first, cfg))
    assert comm.count_step_flops(cfg) == flops * 1024 < all_flops * 1024


def test_comm_does_not_time_compilation(monkeypatch, now, tmp_path):
    """Adam acts in each second step, so the first two steps compile. Both take 9 s and are left out."""
    cfg = smoke_config(num_layers=2, groups={"embed": {"every": 2}}, tokens_per_step=1024)
    seconds = iter([9, 9, *[0.1] * 9])
    advance(monkeypatch, now, gpt.Trainer, "train_step", lambda *_: next(seconds))
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    try:
        seconds, sent = comm.time_steps(cfg, make_runtime(), 2)
    finally:
        dist.destroy_process_group()
    assert seconds == pytest.approx([0.1, 0.1]) and sent["mb"] == 0


def test_the_loss_of_the_baseline():
    """The mean over all validation rows: 17 rows are two parts of 16 and 1."""
    def loss_of(part):
        assert part.shape[1] == 9
        return part[:, 0].double().mean()

    assert gpt2_baseline.average_loss(loss_of, np.arange(17 * 8 + 1), 8) == 8 * 8


def train_baseline(monkeypatch, capsys, shards, *args) -> str:
    """The output of five steps of a small plain GPT-2."""
    options = "--num_layers=1 --model_dim=32 --num_heads=2 --head_dim=16 --val_tokens=8192 --dtype=float32"
    monkeypatch.setattr(sys, "argv", [
        "gpt2_baseline.py", "--steps=5", "--context=64", "--tokens_per_step=256", "--num_heads=2", *args,
        f"--options={options} {' '.join(data_args(shards))}"])
    status, out, _ = call_tool(capsys, gpt2_baseline.main)
    assert status == 0
    return out


def test_the_baseline_validates_off_the_clock(shards, now, monkeypatch, capsys):
    """A step takes 2 s. Validations after 0, 2, 4 and 5 steps find losses 5, 4, 2 and 1."""
    calls, losses = [], iter([5.0, 4.0, 2.0, 1.0])
    monkeypatch.setattr(gpt2_baseline, "average_loss", lambda *args: calls.append(args) or next(losses))
    advance(monkeypatch, now, gpt2_baseline, "average_loss", 100)
    advance(monkeypatch, now, torch.optim.AdamW, "step", 2)
    out = train_baseline(monkeypatch, capsys, shards, "--val_every=2", "--target=2.5")
    assert "val_loss 1.0000, 5 steps of 256 tokens in 10.00 s" in out
    assert out.splitlines()[-1] == "loss 2.5 after 7.00 s"  # three quarters of the way from 4 s to 8 s
    assert [(len(tokens), context) for _, tokens, context in calls] == 4 * [(8193, 64)]


def test_validations_do_not_change_the_training_of_the_baseline(shards, monkeypatch, capsys):
    plain, *others = (train_baseline(monkeypatch, capsys, shards, *args).split(" tokens in ")[0]
                      for args in ([], ["--val_every=1", "--target=0.1"]))
    assert others == [plain] and "val_loss 5." in plain
    assert "loss 0.1 not reached" in train_baseline(monkeypatch, capsys, shards, "--target=0.1")


def test_both_recipes_to_the_loss_of_tiny_shakespeare(tmp_path, monkeypatch, capsys):
    """Seeds and dtypes interleaved, on the same validation tokens. In bfloat16 nanoGPT's recipe misses the loss."""
    runs, clock = [], iter(range(100, 999, 100))

    def time_process(command):
        options = [word for part in command for word in part.removeprefix("--options=").split()]
        named = dict(option.split("=") for option in options if "=" in option)
        runs.append((command[0], int(named["--seed"]), named["--dtype"]))
        assert named["--val_files"] == str(tmp_path)
        late = "/train_000001.bin" if "--preset" in named else ""
        assert named["--train_files"] == str(tmp_path) + late
        if "--preset" in named:
            assert (named["--preset"], named["--val_loss_every"]) == ("quick", "20")
            folder = Path(named["--out"], "logs")
            folder.mkdir()
            (folder / "a.json").write_text(json.dumps(dict(
                val_points=[[0, 5.5, 0], [20, 1.98, 4000], [40, 1.78, 8000]], final_val_loss=1.78,
                train_time_ms=8000)))
            return next(clock), ""
        assert (named["--val_tokens"], named["--val_seq_len"]) == ("40960", "8192")
        assert (named["--val_every"], named["--target"], named["--context"]) == ("100", "1.88", "64")
        end = "after 24.00 s" if named["--dtype"] == "float32" else "not reached"
        return next(clock), f"seed 0: val_loss 1.8700, 2000 steps of 768 tokens in 30.25 s\nloss 1.88 {end}\n"

    monkeypatch.setattr(compare_nanogpt, "time_process", time_process)
    monkeypatch.setattr(compare_nanogpt, "SHAKESPEARE_PRESET", "quick")
    monkeypatch.setattr(compare_nanogpt, "list_dtypes", lambda: ["float32", "bfloat16"])
    monkeypatch.setattr(sys, "argv", ["compare_nanogpt.py", f"--shakespeare={tmp_path}", "--seeds=2"])
    status, out, errors = call_tool(capsys, compare_nanogpt.main)
    assert (status, out, runs) == (2, "", []) and f"run ./run.sh data/tiny_shakespeare.py --out={tmp_path}\n" in errors
    for name in ("train_000000.bin", "val_000000.bin"):
        (tmp_path / name).touch()
    status, out, _ = call_tool(capsys, compare_nanogpt.main)
    assert status == 0 and out.splitlines()[2:6] == [
        "| 0 | nanoGPT | float32 | 24.0 | 1.00 | 1.8700 | 30.2 | 100.0 |",
        "| 0 | quick | float32 | 6.0 | 0.25 | 1.7800 | 8.0 | 200.0 |",
        "| 0 | nanoGPT | bfloat16 | not reached |  | 1.8700 | 30.2 | 300.0 |",
        "| 0 | quick | bfloat16 | 6.0 | < 0.20 | 1.7800 | 8.0 | 400.0 |"]
    assert runs == [(f"{tool}.py", seed, dtype) for seed in (0, 1) for dtype in ("float32", "bfloat16")
                    for tool in ("benchmarks/gpt2_baseline", "train_gpt")]


def test_the_comparison_on_a_text_of_ones_own(tmp_path, monkeypatch, capsys):
    """The numbers of the runs in its table."""
    def time_process(command):
        if "train_gpt.py" not in command:
            return 30.0, "seed 1: val_loss 1.5000, 2000 steps\n"
        (out,) = (option.removeprefix("--out=") for option in command if option.startswith("--out="))
        Path(out, "logs").mkdir()
        Path(out, "logs", "a.json").write_text(json.dumps(dict(final_val_loss=1.25)))
        return 15.0, ""

    monkeypatch.setattr(compare_nanogpt, "time_process", time_process)
    monkeypatch.setattr(compare_nanogpt, "list_dtypes", lambda: ["float32"])
    text = tmp_path / "code.py"
    text.write_text("def f(): pass\n" * 9999)
    monkeypatch.setattr(sys, "argv", ["compare_nanogpt.py", str(text), "--seeds=1"])
    status, out, _ = call_tool(capsys, compare_nanogpt.main)
    assert status == 0 and out.splitlines()[2:] == ["| code.py | 0 | 30.0 | 1.5000 | 15.0 | 1.2500 | 0.50 |"]


def test_the_roofline_adds_up(monkeypatch, capsys):
    """One kernel bound by memory, one by arithmetic, on attainable rates. A slow host decides the step."""
    nodes = [dict(kind="", call="", is_template=False, bytes=4.32e9, flops=0, operations=[]),
             dict(kind="", call="mm", is_template=False, bytes=1, flops=0.8 * 989e12, operations=[])]
    graph = dict(name="Segment.run_blocks", direction="forward", nodes=nodes, label="blocks")
    graph["calls"] = {"measured": 2, "training": 9}
    run = dict(graphs=[graph], eager={"measured update": {"zero_": [1, 4.32e9]}}, micros=2, updates=1,
               micros_per_step=8, bytes_per_rank=2 * 0.8 * 450e9)
    parts = roofline.tabulate(run, roofline.DEVICES["h200"], 1)
    assert parts["pointwise forward"] == pytest.approx([8, 34.56, 0, 8])  # a ms each, 8 micro-batches
    assert parts["head: matmuls"][0] == pytest.approx(8000)
    assert parts["eager: look-ups, sums of gradients"] == pytest.approx([1, 4.32, 0, 1])
    eight = roofline.tabulate(run, roofline.DEVICES["h200"], 8)
    assert eight["pointwise forward"][0] == pytest.approx(1)
    assert eight["sent, if nothing hid it"][0] == pytest.approx(1750)  # 7/8 of 2 s
    run |= dict(micros_per_step=4, ranks=8, micro_tokens=9, sequence=[("graph", "blocks")])
    monkeypatch.setattr(roofline, "load", lambda *_: run)

    def predict(*options):
        monkeypatch.setattr(sys, "argv", ["roofline.py", "--cards=h200", "--us_per_launch=1000", *options])
        assert roofline.main() == 0
        return capsys.readouterr().out

    rows = [line.split(" | ")[:2] for line in predict("--launches=3000").splitlines()[-9:]]
    assert rows == [["| **sum, one GPU**", "4,005.0"], ["| host", "12,000.0"],  # 4 micro-batches
                    ["| **longer of host and GPU**", "12,000.0"], ["| GPU idle, %", "66.6"],
                    ["| **sum, each of 8 GPUs**", "2,250.6"], ["| host", "3,000.0"],  # one, of half the tokens
                    ["| **longer of host and GPU**", "3,000.0"], ["| GPU idle, %", "25.0"],
                    ["| of the last sum sent, if nothing hid it", "1,750.0"]]
    assert "takes 1200.00 ms: 1200.00 ms a step, GPU idle 17 %" in predict("--ranks=8", "--launches=600")
    assert "takes 1000.00 ms: 1001.00 ms a step, GPU idle 0 %" in predict("--ranks=8", "--launches=500")
