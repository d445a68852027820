#!/usr/bin/env python3
"""Measure the time of collectives between ranks, and how much of it a training step does not hide.

    torchrun --standalone --nproc_per_node=8 benchmarks/comm.py      # NCCL with GPUs, gloo without
    torchrun --standalone --nproc_per_node=4 benchmarks/comm.py --preset=laptop_32 --json comm.json
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 benchmarks/comm.py

Takes about a minute and the options of train_gpt.py (--preset, --device, ...). Needs no data: tokens are
random.

The first table times all_reduce and reduce_scatter plus all_gather, which send equal bytes, over message
sizes. Bus bandwidth is 2 (N - 1) / N times size over time, the rate of each rank's link. The second table
times training steps of the first stage at several --comm_bucket_mb, and a step that sends nothing. The
difference is exposed communication.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import Parser, RecordError, at_least, output_file, require_packages, run_guarded

with require_packages():
    import numpy as np
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    import train_gpt as gpt
    from benchmarks import common

REPEATS = 5  # of each message, for the median
PASSES = 2  # over the bucket sizes, so that noise affects all of them


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
def send_nothing(rt: gpt.Runtime):
    """Make a step keep its local sums and its old parameters, so that it sends no buckets.

    It does the rest of its work. Rows of sparse gradients are still exchanged.
    """
    real = gpt.reduce_scatter_single, gpt.all_gather_single

    def copy_own(shard: torch.Tensor, full: torch.Tensor, async_op: bool) -> SimpleNamespace:
        shard.copy_(rt.comm.local_shard(full))
        return SimpleNamespace(wait=lambda: None)

    gpt.reduce_scatter_single = copy_own
    gpt.all_gather_single = lambda full, shard, async_op=False, **more: (
        SimpleNamespace(wait=lambda: None) if async_op else real[1](full, shard, **more))
    try:
        yield
    finally:
        gpt.reduce_scatter_single, gpt.all_gather_single = real


@contextlib.contextmanager
def count_bytes() -> Iterator[Counter]:
    """Count the bytes that this rank sends for gradients and parameters, by collective."""
    sent = Counter()
    sizes = dict(
        reduce_scatter=lambda comm, full: full.nbytes - full.nbytes // comm.world_size,
        all_gather=lambda comm, full, shard: full.nbytes - shard.nbytes,
        all_to_all=lambda comm, rows, send_counts, _: (
            (sum(send_counts) - send_counts[comm.rank]) * rows.itemsize * math.prod(rows.shape[1:])))
    real = {name: getattr(gpt.Comm, name) for name in sizes}

    def wrap(name: str) -> Callable:
        def counted(comm: gpt.Comm, *args):
            sent[name] += sizes[name](comm, *args)
            return real[name](comm, *args)

        return counted

    for name in sizes:
        setattr(gpt.Comm, name, wrap(name))
    try:
        yield sent
    finally:
        for name in sizes:
            setattr(gpt.Comm, name, real[name])


def count_minimum_bytes(optimizer: gpt.Optimizer, first_step: int, last_step: int) -> float:
    """Bytes that a rank must send in these steps: each gradient and each parameter once per update.

    The 1/N that the rank owns is not sent. Row-sparse gradients are not included.
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
        total += (last_update - first_update) * num_bytes * (1 if bucket.sparse else 2)
    return total * (1 - 1 / optimizer.rt.world_size)


def time_steps(cfg: gpt.Config, rt: gpt.Runtime, num_steps: int) -> tuple[list[float], dict]:
    """(seconds of each step of the first stage on the slowest rank, messages and MB per step).

    The first cycle of adam_every steps compiles both kinds of updates and is not timed.
    """
    trainer = gpt.Trainer(cfg, rt)
    state, bos = trainer.schedule.at(0), cfg.vocab_size - 1
    stage, rng = state.stage, np.random.default_rng(rt.rank)
    _, rows = gpt.sequences_per_rank(cfg, rt.world_size, stage.tokens_per_step, stage.seq_len)
    tokens = rng.integers(0, bos, (rows, stage.seq_len + 1))
    tokens[:, :: stage.max_doc_len] = bos
    batch = gpt.Batch(*(x.to(rt.device) for x in gpt.make_batch(tokens, bos)[:3]))
    if stage.num_classes:  # other targets are ignored
        classes = torch.arange(stage.num_classes, device=rt.device)
        batch = batch._replace(classes=classes.expand(rows, -1).contiguous())
    batches, seconds, warm_up = iter(lambda: batch, None), [], cfg.adam_every
    total = warm_up + num_steps
    with count_bytes() as num_bytes:
        for _ in range(total):
            dist.barrier()
            start = gpt.clock(rt.device)
            trainer.train_step(batches, state)
            trainer.optimizer.finish()
            seconds.append(gpt.clock(rt.device) - start)
    minimum = num_bytes["all_to_all"] + count_minimum_bytes(trainer.optimizer, 0, total)
    mb, minimum_mb = (count / 1e6 / total for count in (sum(num_bytes.values()), minimum))
    sent = dict(messages=2 * len(trainer.optimizer.updated), mb=mb, minimum_mb=minimum_mb)
    slowest = torch.tensor(seconds[warm_up:], device=rt.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    del trainer
    gc.collect()  # hooks and parameters form cycles, which would keep the models of all sizes
    return slowest.tolist(), sent


def choose_buckets(cfg: gpt.Config) -> list[float]:
    """Powers of two from 1/64 of the parameters up to all of them, in MB."""
    with torch.device("meta"):
        total = sum(p.nbytes for p in gpt.GPT(cfg).parameters()) / 1e6
    return [2.0 ** math.ceil(math.log2(total / 4**i)) for i in range(4)]


def measure_steps(cfg: gpt.Config, rt: gpt.Runtime, num_steps: int) -> list[dict]:
    """One row for each bucket size. The first row sends nothing."""
    variants: list[float | None] = [None, *choose_buckets(cfg)]
    seconds: dict[float | None, list[float]] = {variant: [] for variant in variants}
    sent, count = {}, max(1, num_steps // PASSES // cfg.adam_every) * cfg.adam_every
    for variant in tqdm(variants * PASSES, desc="steps", disable=not rt.is_main):
        with send_nothing(rt) if variant is None else contextlib.nullcontext():
            bucket_mb = variants[1] if variant is None else variant
            times, sent[variant] = time_steps(dataclasses.replace(cfg, comm_bucket_mb=bucket_mb), rt,
                                              count)
        seconds[variant] += times
    sent[None] |= dict(messages=0, mb=0.0)
    means = {variant: common.time_step(seconds[variant], cfg.adam_every) for variant in variants}
    flops = count_step_flops(cfg) / (rt.peak_flops * rt.world_size)
    return [dict(bucket_mb=variant, **sent[variant], ms=1e3 * mean,
                 spread_ms=1e3 * (max(seconds[variant]) - min(seconds[variant])),
                 exposed=max(0.0, 1 - means[None] / mean), utilisation=flops / mean)
            for variant, mean in means.items()]


def count_step_flops(cfg: gpt.Config) -> int:
    """FLOPs of a step of the first stage."""
    first = dataclasses.replace(cfg, stages=cfg.stages[:1], extension_steps=0)
    return gpt.count_flops(first) * cfg.full_stages[0].tokens_per_step


def recommend(rows: list[dict]) -> float:
    """The largest bucket within 2 % of the fastest: fewer collectives and larger batches of updates."""
    fastest = min(row["ms"] for row in rows)
    return max(row["bucket_mb"] for row in rows if row["ms"] <= 1.02 * fastest)


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
    lines += ["", "| --comm_bucket_mb | messages | MB sent (least) | ms per step | spread | exposed | "
              "utilisation |", "|---|---|---|---|---|---|---|"]
    for row in result["steps"]:
        sends = row["bucket_mb"] is not None
        label = f"{row['bucket_mb']:g}" if sends else "nothing sent"
        sent = f"{row['messages']} | {row['mb']:.2f} ({row['minimum_mb']:.2f})" if sends else "- | -"
        lines.append(f"| {label} | {sent} | {row['ms']:.1f} | {row['spread_ms']:.1f} | "
                     f"{100 * row['exposed']:.1f} % | {100 * row['utilisation']:.1f} % |")
    return "\n".join((*lines, "", *result["advice"]))


def advise(result: dict) -> list[str]:
    """Lines with latency, bandwidth, whether they suffice, and the recommended bucket size."""
    whole = [row for row in result["messages"] if row["group"] == "all ranks"]
    kind = "reduce_scatter + all_gather"
    latency, best = whole[0][kind]["ms"], max(row[kind]["bus_gb_per_s"] for row in whole)
    silent = result["steps"][0]
    bare = silent["minimum_mb"] / 1e3 / best * 1e3  # ms
    share = bare / (bare + silent["ms"])
    word = ("suits the recipe" if share < 0.1 else "costs something" if share < 0.3
            else "is too slow for this step")
    return [
        f"latency {latency:.3f} ms, bandwidth {best:.2f} GB/s: {silent['minimum_mb']:.1f} MB per step take "
        f"{bare:.1f} ms, computing takes {silent['ms']:.1f} ms. That is {100 * share:.0f} % without "
        f"overlap: this connection {word}",
        f"recommended: --comm_bucket_mb={result['recommended_bucket_mb']:g}"]


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
    result["recommended_bucket_mb"] = recommend(result["steps"][1:])
    result["advice"] = advise(result)
    if rt.is_main:
        common.write_report("\n" + format_report(result), result, args.json)
    dist.destroy_process_group()


def main() -> int:
    """Parse and measure."""
    parser = Parser(__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--max_mb", type=at_least(0.004, float),
                        help="largest message (default 256, without GPUs 16)")
    parser.add_argument("--num_steps", type=at_least(1), default=8,
                        help="steps of each bucket size (default %(default)s)")
    args, rest = parser.parse_known_args()

    return run_guarded(lambda: measure(args, gpt.parse_argv(rest)))


if __name__ == "__main__":
    sys.exit(main())
