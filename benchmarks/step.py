#!/usr/bin/env python3
"""Time of a training step and of its parts.

    ./run.sh benchmarks/step.py --preset=laptop  # a table, with --json FILE and --trace FILE
    ./run.sh benchmarks/step.py --preset=laptop --compare='--compile=on'   # the ratio of two configs
    torchrun --standalone --nproc_per_node=8 benchmarks/step.py --num_steps=60

Takes the options of train_gpt.py. Warms up as a real run does, and times each step of a short run through
all stages. Two configs are interleaved step by step. A few more steps under the profiler give the parts of a
step. On a GPU the kernels are sorted by name, and the ten longest are listed. Missing shards are replaced by
random tokens, whose steps take equal time.
"""

import dataclasses
import itertools
import math
import re
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, at_least, output_file, require_packages, run_guarded, warn

with require_packages():
    import numpy as np
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function
    from tqdm import tqdm

    import train_gpt as gpt
    from benchmarks import common
    from data.text import write_shard

PROFILED_STEPS = 3
REST = "embedding, norms, residuals"
PARTS = ("attention", "MLP", "head and loss", REST, "optimizer", "data wait", "idle")
# Kinds of GPU kernels. The first pattern found in a kernel's name decides. Inductor's templates are matmuls
# or FlexAttention, nvjet and xmma are cuBLAS. If kernels overlap, the first kind gets the time. So copies
# and NCCL get only the time that no other kernel hides.
KERNEL_KINDS = {
    "our kernels": "|".join(  # Inductor adds a number to their names
        rf"^{name}(_\d+)?$" for name, value in vars(gpt).items()
        if gpt.triton and isinstance(value, gpt.triton.runtime.jit.KernelInterface)) or "$^",
    "attention": "flex_attention|flash|fmha|sdpa|^triton_tem_(?!.*mm)",
    "matmuls": "gemm|gemv|cutlass|cublas|nvjet|xmma|splitK|^triton_tem_",
    "Inductor's kernels": "^triton_",
    "other kernels": "^(?!nccl|Mem(cpy|set))",
    "copies and fills": "^Mem",
    "NCCL": "^nccl"}
NUM_LONGEST = 10  # listed kernels
TRITON_FORMS = "qkv_kernel", "cross_entropy", "relu2_mlp"  # with our Triton kernels


class TimedBatches:
    """Prefetched batches whose wait times are summed and marked in a profile."""

    def __init__(self, batches: Iterator[gpt.Batch]):
        self.batches, self.waited = batches, 0.0

    def __next__(self) -> gpt.Batch:
        start = time.perf_counter()
        with record_function("data wait"):
            batch = next(self.batches)
        self.waited += time.perf_counter() - start
        return batch


class Subject:
    """One config, ready to step: data, trainer, and the cost of its warm-up."""

    def __init__(self, cfg: gpt.Config, rt: gpt.Runtime):
        self.rt, self.cfg = rt, cfg
        # steps until Adam and telemetry have acted at least once
        self.every = math.lcm(cfg.longest_period, cfg.telemetry_every or 1)
        before = count_graphs()
        self.data, self.val_data = gpt.TrainData(cfg, gpt.Schedule(cfg)), gpt.ValData(cfg)
        start = gpt.clock(rt.device)
        self.trainer = gpt.Trainer(cfg, rt)
        self.trainer.warm_up(self.data, self.val_data)
        self.warm_up_s = gpt.clock(rt.device) - start
        self.num_graphs = count_graphs() - before
        run = gpt.describe_run(cfg, rt, [], self.data.shards, self.val_data.shards)
        self.log = gpt.RunLog(cfg, rt, run, {}, self.trainer.progress)  # no files before __enter__
        self.log.print = lambda _text: None
        self.monitor = gpt.Monitor(self.trainer, self.log)
        self.batches = TimedBatches(gpt.prefetch(
            self.data.batches(rt.comm, 0, cfg.num_iterations), rt.device))
        self.seconds: list[float] = []

    def step(self) -> None:
        """Time one training step with telemetry and guard, until its last update is done."""
        trainer, progress, device = self.trainer, self.trainer.progress, self.rt.device
        start, state = gpt.clock(device), trainer.schedule.at(progress.step)
        loss = trainer.train_step(self.batches, state, self.monitor.start_step())
        progress.step += 1
        progress.tokens += state.stage.tokens_per_step
        self.log.log_step(loss, 1.0)
        self.monitor.end_step(loss, state, must_wait=False)
        trainer.optimizer.finish()
        self.seconds.append(gpt.clock(device) - start)

    def measure(self) -> dict:
        """The figures of all steps. tokens/s and MFU follow from seconds_per_token."""
        rt, schedule = self.rt, self.trainer.schedule
        timed = list(enumerate(self.seconds))
        token = common.time_token(timed, schedule, self.every)
        flops = gpt.derived_numbers(self.cfg, 1)["flops_per_token"]
        stages = zip(common.time_stages(timed, schedule, self.every), schedule.stage_ranges())
        return dict(seconds_per_token=token, tokens_per_s=round(1 / token),
                    ms_by_stage={f"{number}: windows {stage.window_long}/{stage.window_short}": 1e3 * seconds
                                 for number, (seconds, (stage, _, _)) in enumerate(stages, 1)},
                    mfu=flops / token / (rt.peak_flops * rt.world_size),
                    matmul_tflops=rt.peak_flops / 1e12, warm_up_s=self.warm_up_s, num_graphs=self.num_graphs,
                    data_wait_ms=1e3 * self.batches.waited / len(self.seconds))


def count_tokens(schedule: gpt.Schedule, start: int, end: int) -> int:
    """Training tokens of the steps start..end-1."""
    return sum(schedule.stages[schedule.find_stage(step)[0]].tokens_per_step for step in range(start, end))


def compare(first: Subject, second: Subject) -> dict:
    """Ratio of the seconds per token, second over first, and quartiles of this ratio over rounds.

    A round is the smallest number of steps after which both have updated all parameters.
    """
    count = min(math.lcm(first.every, second.every), len(first.seconds))

    def time_round(subject: Subject, start: int) -> float:
        schedule, end = subject.trainer.schedule, start + count
        return sum(subject.seconds[start:end]) / count_tokens(schedule, start, end)

    ratios = [time_round(second, start) / time_round(first, start)
              for start in range(len(first.seconds) - count + 1)]
    tokens = [subject.measure()["seconds_per_token"] for subject in (first, second)]
    return dict(ratio=tokens[1] / tokens[0], ratio_quartiles=common.find_quartiles(ratios)[::2])


def list_forms(is_gpu: bool, *kernels: str) -> str:
    """A value of --fast: these TRITON_FORMS, and the other forms that a run would choose."""
    return ",".join(("rms_norm", "flex_attention" if is_gpu else "block_attention", "head_loss", *kernels))


def count_graphs() -> int:
    """Number of graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def use_random_shards(cfg: gpt.Config, folder: str, rt: gpt.Runtime) -> gpt.Config:
    """The config with shards of random tokens, enough for its steps. Each rank writes a pair.

    With a sampled loss there are fewer different tokens than classes, because all targets are classes.
    """
    rng, bos = np.random.default_rng(0), cfg.vocab_size - 1
    fewest = min(stage.num_classes or bos + 1 for stage in cfg.full_stages)
    used = rng.permutation(bos)[: fewest - 1].astype(np.uint16)
    files = {}
    needed = 2 * gpt.Schedule(cfg).count_tokens() + 2 * cfg.seq_len
    for name, size in (("train", needed), ("val", cfg.val_tokens + 1)):
        tokens = used[rng.integers(0, len(used), size)]
        tokens[:: cfg.max_doc_len] = bos
        path = Path(folder, f"{name}_{rt.comm.rank}.bin")
        write_shard(path, tokens, cfg.vocab_size, bos)
        files[f"{name}_files"] = str(path)
    return dataclasses.replace(cfg, **files)


def classify(name: str, shapes: list, cfg: gpt.Config) -> str:
    """The part of the model that calls an operator, from its name and the sizes of its operands."""
    sizes = {size for shape in shapes if isinstance(shape, (list, tuple)) for size in shape}
    classes = {cfg.padded_vocab_size, *(stage.num_classes for stage in cfg.stages)}
    if sizes & classes and "embedding" not in name:
        return "head and loss"
    if cfg.mlp_hidden in sizes:
        return "MLP"
    if "attention" in name or "softmax" in name or "mm" in name or sizes & {cfg.head_dim, 3 * cfg.model_dim}:
        return "attention"  # also the output projection, which has no size that only it has
    return REST


def share_operators(events: list, cfg: gpt.Config) -> dict[str, float]:
    """Milliseconds of each part on a CPU: self time of its operators."""
    parts = dict.fromkeys(PARTS, 0.0)
    for event in events:
        own = event.self_cpu_time_total / 1e3
        parents, ancestor = [event.name], event.cpu_parent
        while ancestor is not None:
            parents.append(ancestor.name)
            ancestor = ancestor.cpu_parent
        if "optimizer" in parents:
            parts["optimizer"] += own
        elif "data wait" in parents:
            parts["data wait"] += own
        elif event.name != "data wait" and event.thread != -1 and own > 0:
            parts[classify(event.name, event.input_shapes or [], cfg)] += own
    return parts


class Kernel(NamedTuple):
    """A kernel, copy or fill on the device, in milliseconds."""

    name: str
    start: float
    end: float


def name_kind(name: str) -> str:
    """The first of KERNEL_KINDS whose pattern fits a kernel's name."""
    return next(kind for kind, pattern in KERNEL_KINDS.items() if re.search(pattern, name))


def list_kernels(events: list) -> list[Kernel]:
    """The GPU kernels of a profile, without the ranges that the host has named."""
    return [Kernel(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation]


def share_time(kernels: list[Kernel]) -> dict[str, float]:
    """Milliseconds of each kind. Each moment counts once, for the first kind that runs."""
    changes = sorted((moment, change, name_kind(name)) for name, start, end in kernels
                     for moment, change in ((start, 1), (end, -1)))
    parts, running = dict.fromkeys(KERNEL_KINDS, 0.0), Counter()
    for (moment, change, kind), (following, *_) in itertools.pairwise(changes):
        running[kind] += change
        if now := next((kind for kind in KERNEL_KINDS if running[kind]), None):
            parts[now] += following - moment
    return parts


def find_longest(kernels: list[Kernel], num_steps: int) -> list[dict]:
    """The kernels that take most time, with calls and milliseconds per step."""
    times, calls = Counter(), Counter(kernel.name for kernel in kernels)
    for name, start, end in kernels:
        times[name] += end - start
    return [dict(name=name, kind=name_kind(name), calls=calls[name] / num_steps, ms=ms / num_steps)
            for name, ms in times.most_common(NUM_LONGEST)]


def break_down(subject: Subject, trace: Path | None) -> tuple[dict[str, float], list[dict]]:
    """(milliseconds of each part, the longest kernels on a GPU), per step of the first stage.

    The profiler measures shares, of kernel time on a GPU and of operator time on a CPU. They are scaled to
    the step without profiler.
    """
    rt, cfg = subject.rt, subject.cfg
    use_cuda = rt.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * use_cuda
    optimizer_step = subject.trainer.optimizer.step
    num_steps = max(1, PROFILED_STEPS // cfg.longest_period) * cfg.longest_period

    def marked_step(*args):
        with record_function("optimizer"):
            optimizer_step(*args)
            subject.trainer.optimizer.finish()

    subject.trainer.optimizer.step = marked_step
    subject.trainer.progress.step = 0
    batches = gpt.prefetch(subject.data.batches(rt.comm, 0, num_steps), rt.device)
    subject.batches = TimedBatches(batches)
    start, seconds = gpt.clock(rt.device), subject.seconds.copy()
    with profile(activities=activities, record_shapes=True) as prof:
        for _ in range(num_steps):
            subject.step()
        wall = gpt.clock(rt.device) - start
    subject.trainer.optimizer.step, subject.seconds = optimizer_step, seconds
    batches.close()
    if trace and rt.is_main:
        prof.export_chrome_trace(str(trace))
    kernels = list_kernels(prof.events()) if use_cuda else []
    parts = share_time(kernels) if use_cuda else share_operators(prof.events(), cfg)
    parts["idle"] = max(0.0, 1e3 * wall - sum(parts.values()))
    first_ms = next(iter(subject.measure()["ms_by_stage"].values()))
    scale = first_ms / sum(parts.values())  # the profiler slows the host down
    return {name: ms * scale for name, ms in parts.items()}, find_longest(kernels, num_steps)


def format_report(result: dict) -> str:
    """Everything measured, as Markdown."""
    lines = [f"{result['ranks']} x {result['hardware']}, PyTorch {result['torch']}, {result['data']}", "",
             "| | " + " | ".join(run["flags"] for run in result["runs"]) + " |",
             "|---|" + "---|" * len(result["runs"])]
    rows = {
        "us per token": lambda r: f"{1e6 * r['seconds_per_token']:.3f}",
        "tokens/s": lambda r: f"{r['tokens_per_s']:,}",
        "MFU": lambda r: f"{100 * r['mfu']:.1f} % of {r['matmul_tflops']:.2f} TFLOP/s",
        "peak memory MiB": lambda r: f"{r['peak_memory_mib']:,}",
        "compile and warm-up s": lambda r: f"{r['warm_up_s']:.1f}",
        "graphs, recompiles after warm-up": lambda r: f"{r['num_graphs']}, {r['num_recompiles']}",
        "data wait ms": lambda r: f"{r['data_wait_ms']:.2f}"}
    if len(result["runs"]) == 2:  # the process has one peak for both models
        del rows["peak memory MiB"]
    for name, show in rows.items():
        lines.append(f"| {name} | " + " | ".join(show(run) for run in result["runs"]) + " |")
    for name in result["runs"][0]["ms_by_stage"]:
        cells = [f"{run['ms_by_stage'].get(name, float('nan')):.1f}" for run in result["runs"]]
        lines.append(f"| ms, {name} | " + " | ".join(cells) + " |")
    if len(result["runs"]) == 2:
        low, high = result["ratio_quartiles"]
        lines += ["", f"second / first, time per token: {result['ratio']:.3f} in all steps together. "
                  f"Quartiles of single rounds: {low:.3f} to {high:.3f}"]
    heads = ["part of a step, first stage", *(run["flags"] for run in result["runs"])]
    lines += ["", f"| {' | '.join(heads)} |"]
    lines += ["|---|" + "---|" * len(result["runs"])]
    for part in result["runs"][0]["parts"]:
        cells = []
        for run in result["runs"]:
            total = sum(run["parts"].values())
            cells.append(f"{run['parts'][part]:.1f} ms, {100 * run['parts'][part] / total:.1f} %")
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    for run in result["runs"]:
        if run["longest_kernels"]:
            lines += ["", f"Longest kernels of the first stage, {run['flags']}:", "",
                      "| kernel | kind | calls a step | ms a step |", "|---|---|---:|---:|"]
            lines += [f"| `{kernel['name'][:90]}` | {kernel['kind']} | {kernel['calls']:.0f} | "
                      f"{kernel['ms']:.1f} |" for kernel in run["longest_kernels"]]
    return "\n".join(lines)


def shorten(cfg: gpt.Config, num_steps: int) -> gpt.Config:
    """The config with a schedule of num_steps steps."""
    return dataclasses.replace(cfg, num_iterations=num_steps, extension_steps=0)


def prepare(argv: list[str], num_steps: int, folder: str, rt: gpt.Runtime | None):
    """(config of a short run, runtime, name of its data). Missing shards become random ones."""
    cfg = shorten(gpt.make_config(gpt.parse_argv(argv)), num_steps)
    cfg = dataclasses.replace(cfg, val_tokens=cfg.val_seq_len * max(1, gpt.env_int("WORLD_SIZE", 1)),
                              warmup_iterations=max(1, cfg.warmup_iterations))
    rt = gpt.choose_precision(cfg, rt or gpt.start_runtime(cfg))
    try:
        gpt.find_shards(cfg.train_files, "train_files")
        gpt.find_shards(cfg.val_files, "val_files")
        return cfg, rt, "real shards"
    except gpt.RunError:
        return use_random_shards(cfg, folder, rt), rt, "random tokens"


def measure(args: Namespace, argv: list[str]) -> None:
    """Interleave the steps of all configs, profile each, print and write the report."""
    flags = [argv] + ([[*argv, *args.compare]] if args.compare else [])
    with tempfile.TemporaryDirectory() as folder:
        cfg, rt, data = prepare(flags[0], args.num_steps, folder, None)
        if args.num_steps < cfg.longest_period:
            raise gpt.RunError(f"--num_steps={args.num_steps}: give at least {cfg.longest_period}, the most "
                               "steps between updates", 2)
        if rt.is_main:
            warn("warming up, with --compile=on minutes")
        subjects = [Subject(cfg, rt)]
        for other in flags[1:]:
            other_cfg, other_rt, _ = prepare(other, args.num_steps, folder, rt)
            if other_rt.dtype == rt.dtype:  # one rate of matmuls for both
                other_rt = dataclasses.replace(other_rt, peak_flops=rt.peak_flops)
            subjects.append(Subject(other_cfg, other_rt))
        before = count_graphs()
        for _ in tqdm(range(args.num_steps), desc="steps", disable=not rt.is_main):
            for subject in subjects:
                subject.step()
        runs = []
        for subject, words in zip(subjects, flags):
            subject.batches.batches.close()
            figures = subject.measure()
            if len(subjects) == 1:
                figures["peak_memory_mib"] = gpt.read_peak_memory_mib(rt)
            subject.trainer.validate(subject.val_data, subject.trainer.schedule.at(args.num_steps))
            figures["flags"] = " ".join(words) or f"--preset={cfg.preset}"
            figures["num_recompiles"] = count_graphs() - before
            before = count_graphs()
            figures["parts"], figures["longest_kernels"] = break_down(
                subject, args.trace if subject is subjects[0] else None)
            runs.append(figures)
        result = dict(common.describe_run(rt), data=data, runs=runs)
        if len(runs) == 2:
            result |= compare(*subjects)
        if rt.is_main:
            common.write_report("\n" + format_report(result), result, args.json)
        rt.comm.close()


def main() -> int:
    """Parse and measure."""
    parser = Parser(__doc__)
    parser.add_argument("--num_steps", type=at_least(PROFILED_STEPS), default=24,
                        help="timed steps (default %(default)s)")
    parser.add_argument("--compare", type=shlex.split, metavar="FLAGS",
                        help="further options of a second config")
    parser.add_argument("--trace", type=output_file, metavar="FILE",
                        help="write the profile for chrome://tracing")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything as JSON")
    args, rest = common.parse_known(parser)

    return run_guarded(lambda: measure(args, rest))


if __name__ == "__main__":
    sys.exit(main())
