#!/usr/bin/env python3
"""Measure the time of collectives between ranks, and how much of it a training step does not hide.

    torchrun --standalone --nproc_per_node=8 benchmarks/comm.py      # GPUs, by NCCL
    torchrun --standalone --nproc_per_node=2 benchmarks/comm.py      # processors, by gloo
    torchrun --standalone --nproc_per_node=4 benchmarks/comm.py --preset=laptop_32 --json comm.json
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 benchmarks/comm.py

Takes about a minute and the options of train_gpt.py (--preset, --device, ...). Needs no data: tokens are
random.

The first table times all_reduce and reduce_scatter plus all_gather, which send equal bytes, over message
sizes. Bus bandwidth is 2 (N - 1) / N times size over time, the rate of each rank's link. The second table
times training steps of the first stage, and steps that send no gradients and no parameters except rows of
tables. The difference is exposed communication.
"""

import contextlib
import dataclasses
import gc
import math
import statistics
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, RecordError, at_least, output_file, require_packages, run_guarded

with require_packages():
    import numpy as np
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    import train_gpt as gpt
    from benchmarks import common

REPEATS = 5  # of each message, for the median
PASSES = 2  # over both kinds of steps, so that noise affects both


def make_groups(rt: gpt.Runtime) -> dict[str, tuple[dist.ProcessGroup | None, int]]:
    """{name: (group of this rank, its number of ranks)}.

    The group of all ranks. On several nodes also the ranks of a node, and one rank of each node.
    """
    local_size = gpt.env_int("LOCAL_WORLD_SIZE", rt.world_size)
    num_nodes = rt.world_size // local_size
    groups = {"all ranks": (None, rt.world_size)}
    if num_nodes > 1:
        nodes = [list(range(n * local_size, (n + 1) * local_size)) for n in range(num_nodes)]
        for name, members in (("inside a node", nodes),
                              ("across nodes", [list(ranks) for ranks in zip(*nodes)])):
            group, _ = dist.new_subgroups_by_enumeration(members)
            if len(members[0]) > 1:
                groups[name] = (group, len(members[0]))
    return groups


def time_collective(kind: str, tensor: torch.Tensor, group, num_ranks: int, rt: gpt.Runtime) -> float:
    """Median seconds of all_reduce, or reduce_scatter plus all_gather, on the slowest rank."""
    shard = tensor.view(num_ranks, -1)[dist.get_rank(group)]
    received = torch.empty_like(shard)
    seconds = []
    for _ in range(REPEATS + 1):
        dist.barrier(group)
        start = gpt.clock(rt.device)
        if kind == "all_reduce":
            dist.all_reduce(tensor, group=group)
        else:
            gpt.reduce_scatter_single(received, tensor, group=group)
            gpt.all_gather_single(tensor, shard, group=group)
        seconds.append(gpt.clock(rt.device) - start)
    slowest = torch.tensor(statistics.median(seconds[1:]), device=rt.device)  # the first is warm-up
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure_messages(max_mb: float, rt: gpt.Runtime) -> list[dict]:
    """One row for each group and message size, from 4 KB up by factors of four."""
    sizes = [4096 * 4**i for i in range(20) if 4096 * 4**i <= max_mb * 2**20]
    groups, rows = make_groups(rt), []
    with tqdm(total=len(groups) * len(sizes), desc="messages", disable=not rt.is_main) as bar:
        for name, (group, num_ranks) in groups.items():
            for size in sizes:
                elements = max(1, size // (4 * num_ranks)) * num_ranks
                tensor = torch.zeros(elements, device=rt.device)
                row = dict(group=name, ranks=num_ranks, bytes=tensor.nbytes)
                for kind in ("all_reduce", "reduce_scatter + all_gather"):
                    seconds = time_collective(kind, tensor, group, num_ranks, rt)
                    bus = 2 * (num_ranks - 1) / num_ranks * tensor.nbytes / seconds
                    row[kind] = dict(ms=1e3 * seconds, bus_gb_per_s=bus / 1e9)
                rows.append(row)
                bar.update()
    return rows


@contextlib.contextmanager
def send_nothing() -> Iterator[None]:
    """Make a step keep its local sums and its old parameters, so that it sends no buckets.

    It does the rest of its work. Rows of tables are still exchanged.
    """
    done = SimpleNamespace(wait=lambda: None)
    with patch.multiple(gpt.Comm, all_gather=lambda comm, full, shard: done,
                        reduce_scatter=lambda comm, full: done):
        yield


@contextlib.contextmanager
def count_bytes() -> Iterator[Counter]:
    """Count the bytes that this rank sends for gradients and parameters, by collective."""
    sent = Counter()
    sizes = dict(
        reduce_scatter=lambda comm, full: full.nbytes - full.nbytes // comm.world_size,
        all_gather=lambda comm, full, shard: full.nbytes - shard.nbytes,
        all_to_all=lambda comm, rows, send_counts, _: (
            (sum(send_counts) - send_counts[comm.rank]) * rows.itemsize * math.prod(rows.shape[1:])))

    def wrap(name: str, real: Callable) -> Callable:
        def counted(comm: gpt.Comm, *args):
            sent[name] += sizes[name](comm, *args)
            return real(comm, *args)

        return counted

    with patch.multiple(gpt.Comm, **{name: wrap(name, getattr(gpt.Comm, name)) for name in sizes}):
        yield sent


def count_minimum_bytes(optimizer: gpt.Optimizer, first_step: int, last_step: int) -> float:
    """Bytes that a rank must send in these steps: each gradient and each parameter once per update.

    The 1/N that the rank owns is not sent. Tables are not included.
    """
    total = 0.0
    for bucket in optimizer.buckets:
        if bucket in optimizer.tables:
            continue
        num_bytes = sum(param.nbytes for param in bucket.params.values())
        first_update, last_update = (bucket.group.count_updates(step, optimizer.late_step)
                                     for step in (first_step, last_step))
        if bucket is optimizer.bucket_of["embed"] and optimizer.cfg.tie_head:
            first = -(-(optimizer.untie_step + 1) // bucket.group.every)
            first_update = min(max(first_update, first), last_update)
        total += (last_update - first_update) * num_bytes * 2
    return total * (1 - 1 / optimizer.comm.world_size)


def time_steps(cfg: gpt.Config, rt: gpt.Runtime, num_steps: int) -> tuple[list[float], dict]:
    """(seconds of each step of the first stage on the slowest rank, MB per step).

    The first cycle of longest_period steps compiles both kinds of updates and is not timed.
    """
    trainer = gpt.Trainer(cfg, rt)
    cfg, state, bos = trainer.cfg, trainer.schedule.at(0), cfg.vocab_size - 1
    stage, rng = state.stage, np.random.default_rng(0)
    _, rows = gpt.divide_step(cfg, rt.world_size, stage)
    tokens = rng.integers(0, bos, (rt.world_size, rows, stage.seq_len + 1))
    tokens[:, :, :: stage.max_doc_len] = bos
    batch = gpt.add_plans(gpt.make_batch(tokens[rt.comm.rank], bos), list(tokens), rt.comm.rank, cfg)
    if stage.num_classes:  # other targets are ignored
        batch = batch._replace(classes=torch.arange(stage.num_classes).repeat(rows, 1))
    batch, warm_up = gpt.move_batch(batch, rt.device), cfg.longest_period
    batches, seconds, total = iter(lambda: batch, None), [], warm_up + num_steps
    with count_bytes() as num_bytes:
        for _ in range(total):
            dist.barrier()
            start = gpt.clock(rt.device)
            trainer.train_step(batches, state)
            trainer.optimizer.finish()
            seconds.append(gpt.clock(rt.device) - start)
    minimum = num_bytes["all_to_all"] + count_minimum_bytes(trainer.optimizer, 0, total)
    sent = dict(mb=sum(num_bytes.values()) / 1e6 / total, minimum_mb=minimum / 1e6 / total)
    slowest = torch.tensor(seconds[warm_up:], device=rt.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    del trainer
    gc.collect()  # hooks and parameters form cycles, which would keep both models
    return slowest.tolist(), sent


def measure_steps(cfg: gpt.Config, rt: gpt.Runtime, num_steps: int) -> list[dict]:
    """Two rows: steps that send nothing, and steps."""
    seconds, sent = {False: [], True: []}, {}
    count = max(1, num_steps // PASSES // cfg.longest_period) * cfg.longest_period
    for sends in tqdm([False, True] * PASSES, desc="steps", disable=not rt.is_main):
        with contextlib.nullcontext() if sends else send_nothing():
            times, sent[sends] = time_steps(cfg, rt, count)
        seconds[sends] += times
    sent[False]["mb"] = 0.0
    means = {sends: common.time_step(seconds[sends], cfg.longest_period) for sends in seconds}
    flops = count_step_flops(cfg) / (rt.peak_flops * rt.world_size)
    return [dict(sends=sends, **sent[sends], ms=1e3 * mean,
                 spread_ms=1e3 * (max(seconds[sends]) - min(seconds[sends])),
                 exposed=max(0.0, 1 - means[False] / mean), utilisation=flops / mean)
            for sends, mean in means.items()]


def count_step_flops(cfg: gpt.Config) -> int:
    """FLOPs of a step of the first stage."""
    first = dataclasses.replace(cfg, stages=cfg.stages[:1], extension_steps=0)
    return gpt.derived_numbers(first, 1)["flops_per_token"] * cfg.full_stages[0].tokens_per_step


def format_report(result: dict) -> str:
    """Both tables and the advice, as Markdown."""
    lines = [f"{result['ranks']} ranks on {result['nodes']} node(s), {result['backend']}, "
             f"{result['hardware']}, PyTorch {result['torch']}, preset {result['preset']}", "",
             "| ranks | message | all_reduce ms | bus GB/s | reduce_scatter + all_gather ms | bus GB/s |",
             "|---|---|---|---|---|---|"]
    for row in result["messages"]:
        cells = [f"{row[kind]['ms']:.3f} | {row[kind]['bus_gb_per_s']:.2f}" for kind in list(row)[-2:]]
        lines.append(f"| {row['group']}, {row['ranks']} | {row['bytes'] / 2**10:,.0f} KB "
                     f"| {' | '.join(cells)} |")
    lines += ["", "| steps | MB sent (least) | ms per step | spread | exposed | utilisation |",
              "|---|---|---|---|---|---|"]
    for row in result["steps"]:
        kind, sent = "nothing sent", "-"
        if row["sends"]:
            kind, sent = "as trained", f"{row['mb']:.2f} ({row['minimum_mb']:.2f})"
        lines.append(f"| {kind} | {sent} | {row['ms']:.1f} | {row['spread_ms']:.1f} | "
                     f"{100 * row['exposed']:.1f} % | {100 * row['utilisation']:.1f} % |")
    return "\n".join((*lines, "", result["advice"]))


def advise(result: dict) -> str:
    """A line with a verdict by the exposed part of a step."""
    _, step = result["steps"]
    spread = max(row["spread_ms"] for row in result["steps"])
    word = ("suits the recipe" if step["exposed"] < 0.1 else "costs something" if step["exposed"] < 0.3
            else "is too slow for this step")
    verdict = f"this connection {word}"
    if step["exposed"] * step["ms"] < spread:
        verdict = f"less than the spread of a step, {spread:.1f} ms. More --num_steps decide"
    return (f"{100 * step['exposed']:.0f} % of a step of {step['ms']:.1f} ms is communication that nothing "
            f"hides: {verdict}")


def measure(args: Namespace, values: dict) -> None:
    """Measure, print the report on rank 0, write the JSON."""
    cfg = gpt.make_config(values)
    rt = gpt.start_runtime(cfg)
    if rt.world_size < 2:
        raise RecordError("one rank has no collectives: start with torchrun --nproc_per_node=2 or more")
    rt, max_mb = gpt.choose_precision(cfg, rt), args.max_mb or (256 if rt.device.type == "cuda" else 16)
    nodes = rt.world_size // gpt.env_int("LOCAL_WORLD_SIZE", rt.world_size)
    result = dict(common.describe_run(rt), nodes=nodes, backend=dist.get_backend(), preset=cfg.preset,
                  messages=measure_messages(max_mb, rt), steps=measure_steps(cfg, rt, args.num_steps))
    result["advice"] = advise(result)
    if rt.is_main:
        common.write_report("\n" + format_report(result), result, args.json)
    rt.comm.close()


def main() -> int:
    """Parse and measure."""
    parser = Parser(__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--max_mb", type=at_least(0.004, float),
                        help="largest message (default 256, without GPUs 16)")
    parser.add_argument("--num_steps", type=at_least(1), default=8,
                        help="steps of each kind (default %(default)s)")
    args, rest = common.parse_known(parser)
    return run_guarded(lambda: measure(args, gpt.parse_argv(rest)))


if __name__ == "__main__":
    sys.exit(main())
