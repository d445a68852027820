#!/usr/bin/env python3
"""What a training step costs, and where the time goes.

    python benchmarks/step.py --preset=laptop                       # table; add --json FILE, --trace FILE
    python benchmarks/step.py --preset=laptop --compare='--compile=on'   # two configs, interleaved: a ratio
    torchrun --standalone --nproc_per_node=8 benchmarks/step.py --num_steps=60
    python benchmarks/step.py --predict_ranks=8                     # this step on 8 such devices, on paper

Other options are those of train_gpt.py. A short run through all stages of the schedule is timed step by
step, after the warm-up of a real run; a few more steps under the profiler give the breakdown. On a GPU it
goes by the names of the kernels, and the ten longest are listed. Random tokens, which cost the same, stand
in for shards that are not there.
"""

import dataclasses
import itertools
import json
import re
import shlex
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "records"), str(ROOT / "benchmarks")]
import timeline  # noqa: E402
from results import Parser, at_least  # noqa: E402

import train_gpt as gpt  # noqa: E402

PROFILED_STEPS = 3
REST = "embedding, norms, residuals"
PARTS = ("attention", "MLP", "head and loss", REST, "optimizer", "data wait", "idle")
# On a GPU: the first of these whose pattern is found in a kernel's name. Inductor's templates are products
# or FlexAttention; nvjet and xmma are cuBLAS. Where kernels overlap, the first kind has the time: so copies
# and NCCL have only what nothing else hides.
KERNEL_KINDS = {
    "our kernels": "|".join(  # Triton adds nothing to their names, Inductor a number
        rf"^{name}(_\d+)?$" for name, value in vars(gpt).items()
        if gpt.triton and isinstance(value, gpt.triton.runtime.jit.KernelInterface)) or "$^",
    "attention": "flex_attention|flash|fmha|sdpa|^triton_tem_(?!.*mm)",
    "matmuls": "gemm|gemv|cutlass|cublas|nvjet|xmma|splitK|^triton_tem_",
    "Inductor's kernels": "^triton_",
    "other kernels": "^(?!nccl|Mem(cpy|set))",
    "copies and fills": "^Mem",
    "NCCL": "^nccl"}
NUM_LONGEST = 10  # kernels that are listed


class TimedBatches:
    """A Prefetcher whose waiting is measured and shows in a profile."""

    def __init__(self, batches: gpt.Prefetcher):
        self.batches, self.waited = batches, 0.0

    def __next__(self) -> gpt.Batch:
        start = time.perf_counter()
        with record_function("data wait"):
            batch = next(self.batches)
        self.waited += time.perf_counter() - start
        return batch


class Subject:
    """One config, ready to step: data, trainer, and what its warm-up cost."""

    def __init__(self, cfg: gpt.Config, rt: gpt.Runtime):
        self.cfg, self.rt = cfg, rt
        before = count_graphs()
        self.data, self.val_data = gpt.TrainData(cfg, gpt.Schedule(cfg)), gpt.ValData(cfg)
        start = gpt.clock(rt.device)
        self.trainer = gpt.Trainer(cfg, rt)
        log = gpt.RunLog(cfg, rt, [])  # writes nothing before it is entered
        self.telemetry = gpt.Telemetry(self.trainer, log) if cfg.telemetry_every else None
        self.trainer.warm_up(self.data, self.val_data, self.telemetry.inspect if self.telemetry else None)
        self.warm_up_s = gpt.clock(rt.device) - start
        self.num_graphs = count_graphs() - before
        self.guard = gpt.Guard(self.trainer, log, gpt.Stop(rt)) if cfg.guard == "on" else None
        self.batches = TimedBatches(gpt.Prefetcher(
            self.data.batches(rt, 0, cfg.num_iterations), rt.device))
        self.seconds: list[float] = []

    def step(self) -> None:
        """One timed training step with all that looks on (telemetry, guard), all of its work done."""
        trainer, progress, rt = self.trainer, self.trainer.progress, self.rt
        start, state = gpt.clock(rt.device), trainer.schedule.at(progress.step)
        is_measured = self.telemetry is not None and self.telemetry.start_step()
        if is_measured or self.guard:
            trainer.optimizer.probe = gpt.Probe(trainer.optimizer.groups, rt, is_measured)
        loss = trainer.train_step(self.batches, state)
        probe, trainer.optimizer.probe = trainer.optimizer.probe, None
        progress.step += 1
        progress.tokens += state.stage.tokens_per_step
        for look in filter(None, (self.guard, self.telemetry)):
            look.end_step(loss, probe, 0.0)
        trainer.optimizer.finish()
        self.seconds.append(gpt.clock(rt.device) - start)

    def measure(self) -> dict:
        """The figures of all steps so far."""
        cfg, rt, ranges = self.cfg, self.rt, self.trainer.schedule.stage_ranges()
        tokens = self.trainer.schedule.count_tokens() / cfg.num_iterations  # of a step, on average
        flops = gpt.count_flops(cfg) * tokens
        medians = [statistics.median(self.seconds[a:b]) for _, a, b in ranges]
        # stages have steps of different sizes, so their medians count by their steps
        mean = sum(median * (b - a) for median, (_, a, b) in zip(medians, ranges)) / cfg.num_iterations
        stages = {f"{number}: windows {stage.window_long}/{stage.window_short}": 1e3 * median
                  for number, (median, (stage, _, _)) in enumerate(zip(medians, ranges), 1)}
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return dict(ms_per_step=1e3 * statistics.median(self.seconds), quartiles_ms=[1e3 * low, 1e3 * high],
                    ms_by_stage=stages,
                    tokens_per_s=round(tokens / mean),
                    mfu=flops / mean / (rt.peak_flops * rt.world_size), matmul_tflops=rt.peak_flops / 1e12,
                    tflop_per_step=flops / 1e12, peak_memory_mib=gpt.read_peak_memory_mib(rt),
                    warm_up_s=self.warm_up_s, num_graphs=self.num_graphs,
                    data_wait_ms=1e3 * self.batches.waited / len(self.seconds))


def list_forms(cfg: gpt.Config, device: torch.device, use_compile: bool, kernels: Collection[str] = ()
               ) -> str:
    """A value of --fast: the fast forms that auto would try here, and of our Triton kernels only these."""
    names, replaced = [], set()
    for name, row in gpt.list_fast_forms().items():
        fits = name in kernels if name in gpt.TRITON_FORMS else not (
            name in gpt.FP8_FORMS or gpt.find_obstacle(row.needs, cfg, device, use_compile))
        if fits and not replaced & row.fast.keys():
            names.append(name)
            replaced |= row.fast.keys()
    return ",".join(names)


def count_graphs() -> int:
    """Graphs that torch.compile has made so far in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def use_random_shards(cfg: gpt.Config, folder: str, rt: gpt.Runtime) -> gpt.Config:
    """The config with shards of random tokens, enough for its steps; every rank writes its own."""
    rng, bos = np.random.default_rng(0), cfg.vocab_size - 1
    files = {}
    needed = 2 * gpt.Schedule(cfg).count_tokens() + 2 * cfg.seq_len
    for name, size in (("train", needed), ("val", cfg.val_tokens + 1)):
        tokens = rng.integers(0, bos, size, dtype=np.uint16)
        tokens[:: cfg.max_doc_len] = bos
        path = Path(folder, f"{name}_{rt.rank}.bin")
        gpt.write_shard(path, tokens, cfg.vocab_size, bos)
        files[f"{name}_files"] = str(path)
    return dataclasses.replace(cfg, **files)


def classify(name: str, shapes: list, cfg: gpt.Config) -> str:
    """The part of the model an operator works for, told from its name and the sizes of its operands."""
    sizes = {size for shape in shapes if isinstance(shape, (list, tuple)) for size in shape}
    if cfg.padded_vocab_size in sizes and "embedding" not in name:
        return "head and loss"
    if cfg.mlp_ratio * cfg.model_dim in sizes:
        return "MLP"
    if "attention" in name or "softmax" in name or "mm" in name or sizes & {cfg.head_dim, 3 * cfg.model_dim}:
        return "attention"  # the one product without an own size is that with the output projection
    return REST


def share_operators(events: list, cfg: gpt.Config) -> dict[str, float]:
    """Milliseconds of each part on a CPU: the own time of the operators that work for it."""
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
    """A kernel, copy or fill that ran on the device; in milliseconds."""

    name: str
    start: float
    end: float


def name_kind(name: str) -> str:
    """The first of KERNEL_KINDS that a kernel's name fits."""
    return next(kind for kind, pattern in KERNEL_KINDS.items() if re.search(pattern, name))


def list_kernels(events: list) -> list[Kernel]:
    """What a profile says that ran on the GPU; it also shows ranges there that the host has named."""
    return [Kernel(event.name, event.time_range.start / 1e3, event.time_range.end / 1e3) for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation]


def share_time(kernels: list[Kernel]) -> dict[str, float]:
    """Milliseconds of each kind. Every moment is counted once, for the first kind that runs in it."""
    changes = sorted((moment, change, name_kind(name)) for name, start, end in kernels
                     for moment, change in ((start, 1), (end, -1)))
    parts, running = dict.fromkeys(KERNEL_KINDS, 0.0), Counter()
    for (moment, change, kind), (following, *_) in itertools.pairwise(changes):
        running[kind] += change
        if now := next((kind for kind in KERNEL_KINDS if running[kind]), None):
            parts[now] += following - moment
    return parts


def find_longest(kernels: list[Kernel], num_steps: int) -> list[dict]:
    """The kernels that take most time, with calls and milliseconds of a step."""
    times, calls = Counter(), Counter(kernel.name for kernel in kernels)
    for name, start, end in kernels:
        times[name] += end - start
    return [dict(name=name, kind=name_kind(name), calls=calls[name] / num_steps, ms=ms / num_steps)
            for name, ms in times.most_common(NUM_LONGEST)]


def break_down(subject: Subject, trace: Path | None) -> tuple[dict[str, float], list[dict]]:
    """(milliseconds of each part, the longest kernels on a GPU). Parts are the profiler's shares of the
    median step: of every kernel's time on a GPU, of every operator's own time on a CPU."""
    rt, cfg = subject.rt, subject.cfg
    use_cuda = rt.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * use_cuda
    optimizer_step = subject.trainer.optimizer.step

    def marked_step(*args):
        with record_function("optimizer"):
            optimizer_step(*args)
            subject.trainer.optimizer.finish()

    subject.trainer.optimizer.step = marked_step
    subject.trainer.progress.step = 0
    batches = gpt.Prefetcher(subject.data.batches(rt, 0, PROFILED_STEPS), rt.device)
    subject.batches = TimedBatches(batches)
    start, seconds = gpt.clock(rt.device), subject.seconds.copy()
    with profile(activities=activities, record_shapes=True) as prof:
        for _ in range(PROFILED_STEPS):
            subject.step()
        wall = gpt.clock(rt.device) - start
    subject.trainer.optimizer.step, subject.seconds = optimizer_step, seconds
    batches.executor.shutdown(cancel_futures=True)
    if trace and rt.is_main:
        prof.export_chrome_trace(str(trace))
    kernels = list_kernels(prof.events()) if use_cuda else []
    parts = share_time(kernels) if use_cuda else share_operators(prof.events(), cfg)
    parts["idle"] = max(0.0, 1e3 * wall - sum(parts.values()))
    scale = 1e3 * statistics.median(subject.seconds) / sum(parts.values())  # profiling slows the host down
    return {name: ms * scale for name, ms in parts.items()}, find_longest(kernels, PROFILED_STEPS)


def predict(subject: Subject, num_ranks: int, bus_gb_per_s: float) -> dict:
    """A step of the last stage on each of num_ranks such devices: this one computes what rank 0 would, and
    its messages are played in their real order (timeline.py). Milliseconds per step."""
    cfg, rt = subject.cfg, subject.rt
    if rt.world_size > 1:
        raise gpt.InputError("--predict_ranks starts from one rank: run it without torchrun")
    gpt.check_world_size(cfg, num_ranks)
    events = timeline.record_cycle(cfg, dataclasses.replace(rt, comm=gpt.Comm(0, num_ranks)), subject.data)
    played, steps = timeline.play(events, bus_gb_per_s), cfg.adam_every
    longest = sorted(played.pop("exposed").items(), key=lambda row: -row[1])
    exposed = {name: ms / steps for name, ms in longest}
    return dict(ranks=num_ranks, bus_gb_per_s=bus_gb_per_s, latency_ms=timeline.LATENCY_MS, exposed=exposed,
                **{name: value / steps for name, value in played.items()})


def format_report(result: dict) -> str:
    """Everything measured, as Markdown."""
    lines = [f"{result['ranks']} x {result['hardware']}, PyTorch {result['torch']}, {result['data']}", "",
             "| | " + " | ".join(run["flags"] for run in result["runs"]) + " |",
             "|---|" + "---|" * len(result["runs"])]
    rows = {
        "ms per step (quartiles)": lambda r: (
            f"{r['ms_per_step']:.1f} ({r['quartiles_ms'][0]:.1f} to {r['quartiles_ms'][1]:.1f})"),
        "tokens/s": lambda r: f"{r['tokens_per_s']:,}",
        "MFU": lambda r: f"{100 * r['mfu']:.1f} % of {r['matmul_tflops']:.2f} TFLOP/s",
        "peak memory MiB": lambda r: f"{r['peak_memory_mib']:,}",
        "compile and warm-up s": lambda r: f"{r['warm_up_s']:.1f}",
        "graphs, recompiles after warm-up": lambda r: f"{r['num_graphs']}, {r['num_recompiles']}",
        "data wait ms": lambda r: f"{r['data_wait_ms']:.2f}"}
    for name, show in rows.items():
        lines.append(f"| {name} | " + " | ".join(show(run) for run in result["runs"]) + " |")
    for name in result["runs"][0]["ms_by_stage"]:
        cells = [f"{run['ms_by_stage'].get(name, float('nan')):.1f}" for run in result["runs"]]
        lines.append(f"| ms, {name} | " + " | ".join(cells) + " |")
    if len(result["runs"]) == 2:
        lines += ["", f"second / first: {result['ratio']:.3f}"]
    lines += ["", "| part of a step | " + " | ".join(run["flags"] for run in result["runs"]) + " |"]
    lines += ["|---|" + "---|" * len(result["runs"])]
    for part in result["runs"][0]["parts"]:
        cells = []
        for run in result["runs"]:
            total = sum(run["parts"].values())
            cells.append(f"{run['parts'][part]:.1f} ms, {100 * run['parts'][part] / total:.1f} %")
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    for run in result["runs"]:
        if run["longest_kernels"]:
            lines += ["", f"Longest kernels of the first {PROFILED_STEPS} steps, {run['flags']}:", "",
                      "| kernel | kind | calls a step | ms a step |", "|---|---|---:|---:|"]
            lines += [f"| `{kernel['name'][:90]}` | {kernel['kind']} | {kernel['calls']:.0f} | "
                      f"{kernel['ms']:.1f} |" for kernel in run["longest_kernels"]]
    if "prediction" in result:
        p = result["prediction"]
        lines += ["", f"{p['ranks']} such devices at {p['bus_gb_per_s']:g} GB/s and "
                  f"{1e3 * p['latency_ms']:g} us, on paper: {p['ms']:.2f} ms a step, "
                  f"{p['computing_ms']:.2f} of computing, {p['exposed_ms']:.2f} of waiting for "
                  f"{p['sent_mb']:,.0f} MB", "",
                  "| waits for | ms a step |", "|---|---:|",
                  *(f"| {name} | {ms:.2f} |" for name, ms in list(p["exposed"].items())[:8])]
    return "\n".join(lines)


def prepare(argv: list[str], num_steps: int, folder: str, rt: gpt.Runtime | None):
    """(config of a short run, runtime): real shards where they exist, else random ones."""
    cfg = gpt.make_config(gpt.parse_argv(argv)[0])
    cfg = dataclasses.replace(cfg, num_iterations=num_steps, extension_steps=0,
                              val_tokens=cfg.val_seq_len * max(1, gpt.env_int("WORLD_SIZE", 1)),
                              warmup_iterations=max(1, cfg.warmup_iterations))
    rt = gpt.choose_precision(cfg, rt or gpt.start_runtime(cfg))
    if cfg.train_files.startswith(gpt.EMBEDDED_CORPUS):
        gpt.ensure_corpus(cfg, rt)
    try:
        gpt.find_shards(cfg.train_files, "train_files")
        gpt.find_shards(cfg.val_files, "val_files")
        return cfg, rt, "real shards"
    except gpt.InputError:
        return use_random_shards(cfg, folder, rt), rt, "random tokens"


def measure(args: Namespace, argv: list[str]) -> None:
    """Step all configs in turn, profile each, print and write the report."""
    flags = [argv] + ([[*argv, *args.compare]] if args.compare else [])
    with tempfile.TemporaryDirectory() as folder:
        cfg, rt, data = prepare(flags[0], args.num_steps, folder, None)
        subjects = [Subject(cfg, rt)]
        subjects += [Subject(*prepare(other, args.num_steps, folder, rt)[:2]) for other in flags[1:]]
        before = count_graphs()
        for _ in tqdm(range(args.num_steps), desc="steps", disable=not rt.is_main):
            for subject in subjects:
                subject.step()
        runs = []
        for subject, words in zip(subjects, flags):
            subject.batches.batches.executor.shutdown(cancel_futures=True)
            figures = subject.measure()
            subject.trainer.validate(subject.val_data, subject.trainer.schedule.at(args.num_steps))
            figures["flags"] = " ".join(words) or f"--preset={cfg.preset}"
            figures["num_recompiles"] = count_graphs() - before
            before = count_graphs()
            figures["parts"], figures["longest_kernels"] = break_down(
                subject, args.trace if subject is subjects[0] else None)
            runs.append(figures)
        hardware = gpt.describe_machine(rt)["hardware"]
        result = dict(date=time.strftime("%Y-%m-%d"), torch=torch.__version__,
                      hardware=hardware.get("gpu", hardware["cpu"]), ranks=rt.world_size, data=data,
                      runs=runs)
        if len(runs) == 2:
            result["ratio"] = runs[1]["ms_per_step"] / runs[0]["ms_per_step"]
        if args.predict_ranks:
            result["prediction"] = predict(subjects[0], args.predict_ranks, args.bus_gb_per_s)
        if rt.is_main:
            print("\n" + format_report(result), flush=True)
            if args.json:
                gpt.write_atomic(args.json, (json.dumps(result, indent=1) + "\n").encode())


def main() -> int:
    """Parse, measure; bad input ends with status 2 and one line."""
    parser = Parser(__doc__)
    parser.add_argument("--num_steps", type=at_least(PROFILED_STEPS), default=24,
                        help="timed steps (default %(default)s)")
    parser.add_argument("--compare", type=shlex.split, metavar="FLAGS",
                        help="options added for the second of two configs")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the profile for chrome://tracing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--predict_ranks", type=at_least(1), metavar="N",
                        help="predict the step of N such devices")
    parser.add_argument("--bus_gb_per_s", type=at_least(1e-6, float), default=timeline.BUS_GB_PER_S,
                        help="for the prediction: from benchmarks/comm.py")
    args, rest = parser.parse_known_args()

    def body() -> int:
        for path in (args.json, args.trace):
            if path:
                gpt.check_writable(path.parent, "choose another folder")
        measure(args, rest)
        return 0

    return gpt.run_guarded(body, "step.py")


if __name__ == "__main__":
    sys.exit(main())
