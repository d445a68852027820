"""Benchmarks end to end and the calculation of their figures. comm.py end to end is in test_distributed.py."""

import hashlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, SCRIPT, data_args, gpt, launch, make_runtime, smoke_config
from torch.autograd.profiler_util import FunctionEvent

from benchmarks import (
    comm,
    common,
    compare_nanogpt,
    compare_scripts,
    copy_loss,
    cpu_ablation,
    gpt2_baseline,
    gpu,
    roofline,
    rules,
    step,
    tune,
)


@pytest.mark.slow
def test_step_compares_profiles_and_predicts(shards, tmp_path):
    """Parts add up to a step of the first stage. Slow collectives are exposed. Peak memory needs a single config."""
    args = ["--preset=smoke", "--device=cpu", *data_args(shards), "--num_steps=6",
            f"--json={tmp_path}/step.json"]
    args += [f"--trace={tmp_path}/trace.json", "--compare=--value_gate_dim=4", "--predict_ranks=2"]
    done = launch([str(ROOT / "benchmarks" / "step.py"), *args, "--bus_gb_per_s=0.1"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "step.json").read_text())
    first, second = result["runs"]
    assert second["flags"] == first["flags"] + " --value_gate_dim=4" and result["data"] == "real shards"
    assert result["ratio"] == pytest.approx(second["seconds_per_token"] / first["seconds_per_token"])
    for run in result["runs"]:
        ms = list(run["ms_by_stage"].values())
        assert sum(run["parts"].values()) == pytest.approx(ms[0])
        assert all(run["parts"][part] > 0 for part in step.PARTS[:5])
        assert len(ms) == 3 and run["num_recompiles"] == 0
        mean_ms = sum(steps * one for steps, one in zip((3, 2, 1), ms)) / 6
        assert run["tokens_per_s"] == pytest.approx(2048e3 / mean_ms, rel=1e-3)
        assert "peak_memory_mib" not in run
        assert len(run["layers"]) == 4 and all(row["max"] > row["std"] > 0 for row in run["layers"])
    assert "peak memory" not in done.stdout  # a process has one peak for both models
    prediction = result["prediction"]
    assert prediction["ms"] == pytest.approx(prediction["computing_ms"] + prediction["exposed_ms"])
    assert prediction["ms"] >= prediction["sent_mb"] / 0.1 > 0  # at 0.1 GB/s the messages are the longest part
    assert sum(prediction["exposed"].values()) == pytest.approx(prediction["exposed_ms"])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    low, high = result["ratio_quartiles"]
    assert (f"second / first, time per token: {result['ratio']:.3f} (quartiles of rounds "
            f"{low:.3f} to {high:.3f})") in done.stdout
    assert "recompiles" in done.stdout


@pytest.mark.parametrize("module, option", [
    (step, "--num_steps=2"), (step, "--compare='a"), (step, "--num_step=9"), (step, "--seq_len=100"),
    (comm, "--max_mb=-1"), (compare_scripts, "--steps=0"), (copy_loss, "--depth=3"), (gpu, "--parts=tests,track_3"),
    (gpu, "--seconds=0"), (gpt2_baseline, "--options='a"), (gpt2_baseline, "--options=--model_dims=4"),
    (gpt2_baseline, "--context=10000000"), (gpt2_baseline, "--num_heads=3"), (gpt2_baseline, "--beta2=1.5"),
    (gpt2_baseline, "--lr=inf"), (cpu_ablation, "--variant=bare"), (compare_nanogpt, "--only=code,poems"),
    (roofline, "--cards=h200,x1"), (rules, "--seeds=1"), (tune, "--rounds=1"), (tune, "--num_step=9"),
    (tune, "--alternative=--compile=on fast"), (tune, "--seq_len=100")])
def test_bad_options_end_with_one_line(module, option, monkeypatch, capsys):
    """And with status 2, for each tool. The line names the option or its value."""
    name = Path(module.__file__).name
    monkeypatch.setattr(sys, "argv", [name, option])
    try:
        status = module.main()
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    word = option.split("=")[-2 if "--options=--" in option else 0]
    assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith(f"{name}: error: ")
    assert word.lstrip("-") in err or "required" in err or option.split(",")[-1] in err


KERNELS_BY_KIND = {
    "our kernels": [name + number for name, value in vars(gpt).items() if hasattr(value, "arg_names")
                    for number in ("", "_0")],
    "attention": ["triton_tem_fused_flex_attention_backward_select_backward_transpose_1", "triton_tem_fused_zeros_1",
                  "triton_per_fused_flex_attention_backward_select_backward_transpose_0",
                  "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)"],
    "matmuls": ["nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT",
                "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x256x128",
                "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(int)",
                "void cublasLt::splitKreduce_kernel<32, 16, int, float>(float*)", "triton_tem_fused_mm_3"],
    "Inductor's kernels": ["triton_poi_fused__scaled_mm__to_copy_clamp_div_full_permute_view_0",
                           "triton_red_fused_sum_15"],
    "other kernels": ["void at::native::indexFuncLargeIndex<float, long>(int)", "vectorized_elementwise_kernel"],
    "copies and fills": ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"],
    "NCCL": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"]}


@pytest.mark.parametrize("kind", KERNELS_BY_KIND)
def test_kernels_are_told_by_their_names(kind):
    """Our kernels by their names in Triton and Inductor, Inductor's by their names in a step of track_1."""
    assert list(step.KERNEL_KINDS) == list(KERNELS_BY_KIND)
    assert {step.name_kind(name) for name in KERNELS_BY_KIND[kind]} == {kind}


def test_kernels_share_the_time_and_the_longest_are_listed():
    """Three steps: a matmul that hides half of a message, a fill that no kernel hides, and a pause. Events of the host
    and ranges that it named are no kernels."""
    kinds = dict(device_type=step.DeviceType.CUDA)
    names = ["nvjet_tst_1", "ncclDevKernel_AllGather", "Memset (Device)", "optimizer", "aten::mm"]
    spans = [(0, 4), (2, 6), (8, 9), (0, 10), (0, 5)]
    options = [kinds, kinds, kinds, dict(kinds, is_user_annotation=True), {}]
    events = [FunctionEvent(id=0, name=name, thread=0, start_us=1e3 * (start + at), end_us=1e3 * (end + at), **more)
              for at in (0, 10, 20) for name, (start, end), more in zip(names, spans, options)]
    kernels = step.list_kernels(events)
    parts = {kind: ms for kind, ms in step.share_time(kernels).items() if ms}
    assert parts == {"matmuls": 12, "NCCL": 6, "copies and fills": 3}
    assert step.find_longest(kernels, 3) == [
        dict(name="nvjet_tst_1", kind="matmuls", calls=1, ms=4),
        dict(name="ncclDevKernel_AllGather", kind="NCCL", calls=1, ms=4),
        dict(name="Memset (Device)", kind="copies and fills", calls=1, ms=1)]
    with torch.profiler.profile() as prof:
        torch.ones(2) + 1
    assert prof.events() and step.list_kernels(prof.events()) == []


def test_random_shards_have_fewer_tokens_than_classes(tmp_path):
    """A sampled loss needs all targets of a sequence among its classes. The head is found by the number of classes."""
    stages = (gpt.Stage(1, 64, 64, num_classes=192), gpt.Stage(1, 64, 64, num_classes=128))
    cfg = step.use_random_shards(smoke_config(stages=stages), str(tmp_path), make_runtime())
    batches = list(gpt.TrainData(cfg, gpt.Schedule(cfg)).batches(make_runtime(), 0, 12))
    assert {batch.classes.size(1) for batch in batches} == {192, 128}
    assert len(set(torch.cat([batch.targets for batch in batches]).tolist())) == 128  # with BOS
    assert step.classify("aten::mm", [[512, 64], [64, 192]], cfg) == "head and loss"


@pytest.mark.slow
def test_the_gpu_day_is_rehearsed(tmp_path):
    """Every part of benchmarks/gpu.py on the CPU. The tests marked gpu are found and skipped without a GPU."""
    done = launch([str(ROOT / "benchmarks" / "gpu.py"), "--rehearse", "--seconds=3000", f"--out={tmp_path}/new/day"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    result, rows = json.loads((tmp_path / "new/day.json").read_text()), (tmp_path / "new/day.md").read_text()
    parts = result["parts"]
    assert list(parts) == list(gpu.list_parts(True)) and all(part["ok"] for part in parts.values())
    assert parts["tests"]["counts"]["skipped"] >= 20
    first, second = parts["kernels"]["runs"]
    assert first["seconds_per_token"] > 0 and second["flags"].endswith(
        "--fast=rms_norm,norm_rotate,cpu_attention,head_loss,sparse_embedding,fused_adamw")
    assert parts["frontier"]["runs"][0]["flags"].endswith("--preset=smoke_frontier")
    assert parts["train"]["differences"] == {"0": 0, "4": 0, "8": 0, "12": 0}  # no Triton kernels on a CPU
    verdicts = [row["verdict"] for row in parts["tune"]["tuned"]["alternatives"]]
    assert len(verdicts) == 2 and set(verdicts) <= {"faster", "no difference", "slower"}
    assert all(len(parts[name]["product_tflops"]) == 2 for name in parts if name != "tests")
    assert rows.count("\n| ") == 8 and "not right" not in rows


STAGES = {"first": (0.1, 0.2, 0.3), "second": (0.1, 0.19, 0.4)}  # seconds of a step
STEPS = (7, 7, 6)  # of a run of 20 steps
TRUE_RATIO = 4430 / 3900  # sums of steps times milliseconds. The median of all steps would give 0.95


@pytest.fixture
def clock(monkeypatch):
    """A clock that advances in training steps, and by a nanosecond when it is read."""
    now = [0.0]

    def read(device):
        now[0] += 1e-9
        return now[0]

    monkeypatch.setattr(gpt, "clock", read)

    def advance(owner, duration):
        """Let each training step of an owner (a Trainer or its class) take duration(state, number) seconds."""
        real, calls = owner.train_step, [0]

        def train_step(*args):
            loss = real(*args)
            now[0] += duration(args[-1], calls[0])
            calls[0] += 1
            return loss

        monkeypatch.setattr(owner, "train_step", train_step)

    return advance


def make_subject(shards, advance, duration, **changes) -> step.Subject:
    """A subject after all of its steps, which took duration(state, number) seconds."""
    options = dict(num_iterations=20, num_layers=2, tokens_per_step=1024, warmup_iterations=0)
    subject = step.Subject(smoke_config(shards, **options | changes), make_runtime())
    advance(subject.trainer, duration)
    for _ in range(subject.cfg.num_iterations):
        subject.step()
    subject.batches.batches.executor.shutdown(cancel_futures=True)
    return subject


def test_the_ratio_counts_all_stages(shards, clock):
    """Stages of 100, 200 and 300 ms against 100, 190 and 400 ms: the second config is slower."""
    first, second = (make_subject(shards, clock, lambda state, _, seconds=seconds: seconds[state.stage_index])
                     for seconds in STAGES.values())
    found = step.compare(first, second)
    assert found["ratio"] == pytest.approx(TRUE_RATIO) and found["ratio_quartiles"] == pytest.approx([0.95, 4 / 3])
    assert second.measure()["tokens_per_s"] == round(20 * 1024 / 4.43)
    assert list(second.measure()["ms_by_stage"].values()) == pytest.approx([100, 190, 400])


@pytest.mark.parametrize("num_steps", [7, 8])
@pytest.mark.parametrize("changes", [dict(groups={"embed": {"every": 2}}), dict(telemetry_every=2)])
def test_the_ratio_counts_both_kinds_of_steps(shards, clock, num_steps, changes, tmp_path, monkeypatch):
    """Each second step does more: 100 and 200 ms against 150 ms, for even and odd numbers of steps."""
    monkeypatch.chdir(tmp_path)
    one_stage = dict(num_iterations=num_steps, stages=(gpt.Stage(1, 128, 64),))
    first = make_subject(shards, clock, lambda *_: 0.15, **one_stage)
    second = make_subject(shards, clock, lambda _, number: (0.1, 0.2)[number % 2], **one_stage, **changes)
    found = step.compare(first, second)
    assert found["ratio"] == pytest.approx(1) and found["ratio_quartiles"] == pytest.approx([1, 1])


def test_two_versions_are_compared_over_all_stages(shards, clock, monkeypatch, capsys):
    """Both versions of the script on the test's clock. One slow step has no effect."""
    load = compare_scripts.load_script

    def load_slow(path):
        module = load(path)
        clock(module.Trainer, lambda state, number: 9 if number == 3 else STAGES["first"][state.stage_index])
        return module

    monkeypatch.setattr(compare_scripts, "load_script", load_slow)
    clock(gpt.Trainer, lambda state, _: STAGES["second"][state.stage_index])
    words = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=1024"]
    monkeypatch.setattr(sys, "argv", ["compare_scripts.py", str(SCRIPT), *words, *data_args(shards), "--num_iterations=20"])
    assert compare_scripts.main() == 0
    us = [1e6 * sum(steps * s for steps, s in zip(STEPS, stages)) / 20 / 1024 for stages in STAGES.values()]
    line = capsys.readouterr().out
    assert f"{us[0]:.2f} us a token before, {us[1]:.2f} after: {TRUE_RATIO:.3f} (stages 1.000, 0.950, 1.333, " in line


def test_the_mean_of_a_cycle():
    """The median over cycles ignores one slow step. Fewer steps than a cycle are averaged."""
    assert common.time_step([1, 2] * 3 + [1], 2) == 1.5
    assert common.time_step([5, 5, 90, 5, 5, 5, 5], 1) == 5
    assert common.time_step([2, 4], 4) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_speed_of_stages_of_different_sizes(ranks):
    """1,000 tokens a second and rank, which is the peak. The median of all steps would give 875."""
    sizes = [1024] * 3 + [2048] * 9
    cfg = smoke_config(stages=tuple(gpt.Stage(n, 256, 128, size) for n, size in ((3, 1024), (9, 2048))))
    subject = SimpleNamespace(
        cfg=cfg, rt=make_runtime(world_size=ranks, peak_flops=gpt.count_flops(cfg) * 1000.0), every=1,
        seconds=[size / 1000 / ranks for size in sizes], trainer=SimpleNamespace(schedule=gpt.Schedule(cfg)),
        batches=SimpleNamespace(waited=0.0), warm_up_s=0, num_graphs=0)
    found = step.Subject.measure(subject)
    assert found["tokens_per_s"] == 1000 * ranks and found["mfu"] == pytest.approx(1.0)
    ms = found["ms_by_stage"]  # two stages with equal windows stay two
    assert ms == {"1: windows 256/128": 1024 / ranks, "2: windows 256/128": 2048 / ranks}


def test_comm_counts_the_flops_of_the_first_stage():
    """Its steps are of the first stage, whose windows are shorter than the mean of all."""
    cfg = smoke_config(stages=(gpt.Stage(1, 64, 32, 1024), gpt.Stage(1, 256, 128)))
    first = smoke_config(stages=(gpt.Stage(1, 64, 32, 1024),))
    assert comm.count_step_flops(cfg) == gpt.count_flops(first) * 1024 < gpt.count_flops(cfg) * 1024


def test_comm_does_not_time_compilation(clock, tmp_path):
    """Adam acts in each second step, so the first two steps compile. Both take 9 s and are left out."""
    cfg = smoke_config(num_layers=2, groups={"embed": {"every": 2}}, tokens_per_step=1024)
    clock(gpt.Trainer, lambda _, number: 9 if number < 2 else 0.1)
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    try:
        seconds, sent = comm.time_steps(cfg, make_runtime(), 2)
    finally:
        dist.destroy_process_group()
    assert seconds == pytest.approx([0.1, 0.1]) and sent["mb"] == 0


def test_the_baseline_reads_all_shards(shards):
    """And its loss is the mean over all validation rows: 17 rows are two parts of 16 and 1."""
    tokens = gpt2_baseline.read_tokens(smoke_config(shards))
    assert len(tokens) == sum(gpt.read_shard_header(str(shards / f"train_{n}.bin"))[0] for n in (0, 1))
    rows = np.arange(17 * 8 + 1)

    def loss_of(part):
        assert part.shape[1] == 9
        return part[:, 0].double().mean()

    assert gpt2_baseline.average_loss(loss_of, rows, 8) == 8 * 8


def leave_result(folder: Path, script: bytes, seed: int, loss: float, **changes) -> None:
    """A finished run in a folder, as train_gpt.py writes it."""
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    result = dict(seed=seed, final_val_loss=loss, script_sha256=hashlib.sha256(script).hexdigest(), track="laptop",
                  config=dict(matrix_lr=0.1), hardware=dict(device="cpu", ranks=1, cpu="x", threads=1),
                  versions=dict(torch="2"), corpus_fingerprint="a" * 16, train_time_ms=1e3,
                  val_points=[[0, 9.0, 0], [2, loss, 1e3]])
    (folder / "logs" / f"seed{seed}.json").write_text(json.dumps(result | changes))


def test_rules_compares_on_other_seeds(tmp_path, monkeypatch, capsys):
    """The seeds that chose a rate are not among those that judge it: the mean is of seeds 2 and 3."""
    (tmp_path / "train_gpt.py").write_bytes(b"script")
    monkeypatch.setattr(rules, "RULES", dict(list(rules.RULES.items())[:1]))
    monkeypatch.setattr(rules, "HERE", tmp_path)
    for factor in rules.GRID:
        for seed in range(2):
            leave_result(tmp_path / f"rule_muon_{0.05 * factor:g}", b"script", seed, factor + seed / 8)
    for seed, loss in (2, 3.0), (3, 4.0):
        leave_result(tmp_path / "rule_muon_0.0125", b"script", seed, loss)
    rules.compare_rules(2, tmp_path)
    assert "| muon | 0.0125 (edge of the grid) | 3.500 | 0.707 |" in capsys.readouterr().out


def test_the_roofline_adds_up(tmp_path):
    """One kernel bound by memory, one by arithmetic, on rates of the data sheet times what is attainable."""
    nodes = [dict(kind="", call="", is_template=False, bytes=4.32e9, flops=0, operations=[]),
             dict(kind="", call="mm", is_template=False, bytes=1, flops=0.8 * 989e12, operations=[])]
    graph = dict(name="Segment.run_blocks", direction="forward", nodes=nodes, calls={"measured": 2, "training": 9})
    run = dict(graphs=[graph], eager={"measured update": {"zero_": [1, 4.32e9]}}, micros=2, updates=1)
    run |= dict(micros_per_step=8, bytes_per_rank=2 * 0.8 * 450e9)
    parts = roofline.tabulate(run, roofline.DEVICES["h200"], 1)
    assert parts["pointwise forward"] == pytest.approx([8, 34.56, 0, 8])  # a ms each, 8 micro-batches
    assert parts["head: matmuls"][0] == pytest.approx(8000)
    assert parts["eager: look-ups, sums of gradients"] == pytest.approx([1, 4.32, 0, 1])
    eight = roofline.tabulate(run, roofline.DEVICES["h200"], 8)
    assert eight["pointwise forward"][0] == pytest.approx(1)
    assert eight["sent, if nothing hid it"][0] == pytest.approx(1750)  # 7/8 of 2 s


def test_repeats_are_found_within_a_document():
    """Eight tokens again within the window, outside it, and in another document. Also a sequence of one token."""
    eight = list(range(1, 9))
    inputs = torch.tensor([*eight, 9, *eight, 9, 9, 9, *eight, *[7] * 10], dtype=torch.int32)
    doc_ids = torch.zeros(len(inputs), dtype=torch.int32)
    repeats = copy_loss.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=9)
    assert repeats.nonzero()[0].tolist() == [16, 17, 36, 37]  # the third time comes 11 tokens after the second
    repeats = copy_loss.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=11)
    assert repeats.nonzero()[0].tolist() == [16, 17, 26, 27, 36, 37]
    doc_ids[9:] = 1
    repeats = copy_loss.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=11)
    assert repeats.nonzero()[0].tolist() == [27, 36, 37]
    doc_ids = torch.tensor([0] * 12 + [1] * 4, dtype=torch.int32)  # the second eight ends in the next document
    inputs = torch.tensor([*eight, *eight], dtype=torch.int32)
    assert not copy_loss.find_repeats(gpt.Batch(inputs, inputs.long(), doc_ids), window=9).any()


@pytest.mark.slow
def test_the_loss_of_a_checkpoint_in_two_parts(shards, tmp_path):
    """Weighted by their shares, both add up to the validation loss of the run."""
    args = ["--preset=smoke", *data_args(shards), "--num_iterations=4", "--val_tokens=2048", "--checkpoint_every=4"]
    done = launch([str(ROOT / "train_gpt.py"), *args], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = tmp_path.glob("checkpoints/*/*/step_*")
    (result,) = tmp_path.glob("logs/*.json")
    step, loss, share, repeated, others = copy_loss.split_loss(path)
    assert step == 4 and 0 < share < 1
    assert share * repeated + (1 - share) * others == pytest.approx(loss, rel=1e-5)
    assert loss == pytest.approx(json.loads(result.read_text())["final_val_loss"], rel=1e-5)


def test_two_versions_step_against_step(shards, monkeypatch, capsys):
    """The script against itself: equal losses, a ratio for each stage. Without updates the losses differ."""
    words = ["compare_scripts.py", str(SCRIPT), "--preset=smoke", "--device=cpu", *data_args(shards)]
    monkeypatch.setattr(sys, "argv", [*words, "--num_iterations=6", "--steps=2"])
    assert compare_scripts.main() == 0
    line = capsys.readouterr().out
    assert re.search(r"smoke, float32, 1 threads, 6 steps: [\d.]+ us a token before, [\d.]+ after: [\d.]+ "
                     r"\(stages ([\d.]+, ){3}quartiles of turns [\d.]+ to [\d.]+\)\. "
                     r"Losses at most 0\.0e\+00 apart", line)
    monkeypatch.setattr(gpt.Optimizer, "step", lambda self, *_: None)  # only of the second version
    assert compare_scripts.main() == 0
    assert "Losses at most 0.0e+00" not in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["compare_scripts.py", str(SCRIPT), "--kernels=off"])
    assert compare_scripts.main() == 2 and capsys.readouterr().err.count("\n") == 1
