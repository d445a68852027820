"""A step of one of several ranks, played on paper: what it computes, and its messages, in real order.

Recorder makes one process compute what rank 0 of N would: it replaces the collectives of train_gpt.py by
ones that send nothing, and notes when a message is sent, by which communicator, and when it is awaited.
play() then lets the messages travel while the rest computes. A communicator sends its messages in order, one
at a time; communicators that send at once share the link.
"""

import math
import statistics
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as gpt  # noqa: E402

# All-gather and reduce-scatter of NCCL over eight H100 on NVSwitch: about 350 GB/s of bus bandwidth for
# large messages in published runs of nccl-tests on such nodes (of 450 GB/s of the data sheet); small ones
# take 20 to 30 microseconds. Assumed here, not measured; benchmarks/comm.py measures both.
BUS_GB_PER_S, LATENCY_MS = 350.0, 0.025


class Event(NamedTuple):
    """Something that happens in the order of the program."""

    kind: str  # compute, send, wait; or begin and end of a record
    name: str
    number: int = -1  # of the message
    communicator: str = ""
    num_bytes: float = 0.0  # that this rank gives to others
    ms: float = math.nan  # of computing


class Message:
    """Stands in for a work handle of torch.distributed."""

    def __init__(self, recorder: "Recorder", name: str):
        self.recorder, self.name, self.number = recorder, name, len(recorder.names)
        recorder.names.append(name)

    def wait(self) -> None:
        self.recorder.add(Event("wait", self.name, self.number))


class Recorder:
    """Collectives that send nothing and are noted; between them the time that passes on the device."""

    def __init__(self, rt: gpt.Runtime):
        self.rt, self.events, self.names, self.marks = rt, [], [], []
        self.bucket = ""  # that is being sent or updated

    def add(self, event: Event) -> None:
        self.events.append(event)
        if self.rt.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(gpt.clock(self.rt.device))

    def send(self, kind: str, communicator: str, num_bytes: float) -> Message:
        message = Message(self, f"{kind} {self.bucket}")
        self.add(Event("send", message.name, message.number, communicator, num_bytes))
        return message

    def read(self) -> list[Event]:
        """The events, and before each the computing since the last one; the record begins anew."""
        gpt.clock(self.rt.device)
        found, last = [], None
        for event, mark in zip(self.events, self.marks):
            if last is not None:
                ms = last.elapsed_time(mark) if self.rt.device.type == "cuda" else 1e3 * (mark - last)
                found.append(Event("compute", f"until {event.kind} {event.name}", ms=ms))
            found.append(event)
            last = mark
        self.events, self.marks = [], []
        return found

    @contextmanager
    def replace_collectives(self):
        """Of rt.world_size ranks, of which this process is rank 0."""
        ranks = self.rt.world_size

        def reduce_scatter(shard, full, **_):
            shard.copy_(full.view(ranks, *shard.shape)[0])
            return self.send("reduce", "reductions", full.nbytes - shard.nbytes)

        def all_gather(full, shard, **options):
            if options.get("async_op"):
                return self.send("gather", "gathers", full.nbytes * (ranks - 1) / ranks)
            full.view(ranks, -1).copy_(shard.reshape(1, -1))  # as if all ranks had this shard

        def all_to_all(received, sent, _receive_counts, send_counts, **_):
            received.zero_()
            num_bytes = (sum(send_counts) - send_counts[0]) * (sent.nbytes / max(1, len(sent)))
            return self.send("rows", "reductions", num_bytes)

        def all_reduce(tensor, *_, **options):
            if options.get("async_op"):
                return self.send("all-reduce", "reductions", 2 * tensor.nbytes * (ranks - 1) / ranks)

        def named(method, find_name):
            def call(owner, *args):
                before, self.bucket = self.bucket, find_name(owner)
                try:
                    return method(owner, *args)
                finally:
                    self.bucket = before
            return call

        # called by gpt.Comm, which still counts their bytes
        new = [(gpt, "reduce_scatter_single", reduce_scatter), (gpt, "all_gather_single", all_gather),
               (gpt.dist, "all_to_all_single", all_to_all), (gpt.dist, "all_reduce", all_reduce),
               (gpt.dist, "broadcast", lambda *_, **__: None),
               *((gpt.Bucket, name, named(getattr(gpt.Bucket, name), lambda bucket: bucket.name))
                 for name in ("start_reduce", "update", "start_gather")),
               # the hook of a row-sparse gradient knows the bucket
               (gpt.RowSparseGradient, "add",
                named(gpt.RowSparseGradient.add, lambda sparse: sparse.on_added.args[0].name))]
        old = [(owner, name, getattr(owner, name)) for owner, name, _ in new]
        for owner, name, value in new:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in old:
                setattr(owner, name, value)


def record_cycle(cfg: gpt.Config, rt: gpt.Runtime, data: gpt.TrainData, num_cycles: int = 5
                 ) -> list[Event]:
    """What rank 0 of rt.world_size computes and sends in cfg.adam_every steps of the last stage, on this
    device; times are medians over some cycles."""
    recorder, steps = Recorder(rt), cfg.adam_every
    last, cycles = cfg.num_iterations - 1, []
    with recorder.replace_collectives():
        trainer = gpt.Trainer(cfg, rt)
        same = (batch for _ in range(steps * (num_cycles + 2))
                for batch in data.batches(rt, last, last + 1))
        batches = gpt.Prefetcher(same, rt.device)
        for _ in range(num_cycles + 2):  # two to warm up
            recorder.add(Event("begin", ""))
            for _ in range(steps):
                trainer.train_step(batches, trainer.schedule.at(last))
            recorder.add(Event("end", ""))
            cycles.append(recorder.read())
        batches.executor.shutdown(cancel_futures=True)
    kinds = {tuple((event.kind, event.name) for event in cycle) for cycle in cycles[2:]}
    assert len(kinds) == 1, "steps differ in what they send"
    return [event._replace(ms=statistics.median(same.ms for same in column))
            if event.kind == "compute" else event for event, *column in zip(cycles[-1], *cycles[2:])]


def play(events: list[Event], bus_gb_per_s: float = BUS_GB_PER_S,
         latency_ms: float = LATENCY_MS, num_cycles: int = 3) -> dict:
    """Milliseconds of the last of some equal cycles of steps, whose messages may be awaited in the next one:
    in all, of computing, and waited for by message."""
    now, start, exposed = 0.0, 0.0, {}
    numbers = [event.number for event in events if event.kind == "send"]
    first, count = min(numbers, default=0), len(numbers)
    queues: dict[str, list[list]] = {}  # by communicator: [number, ms of latency left, ms of link left]
    done: set[int] = set()

    def advance(until: float, number: int = -1) -> None:
        """Let messages travel until then, or until one has arrived."""
        nonlocal now
        while now < until and number not in done:
            heads = [queue[0] for queue in queues.values() if queue]
            sharing = sum(head[1] <= 0 for head in heads)  # whose latency is over
            spans = [head[1] if head[1] > 0 else head[2] * sharing for head in heads]
            span = min([*spans, until - now])
            for head in heads:
                if head[1] > 0:
                    head[1] -= span
                    head[1] = head[1] if head[1] > 1e-12 else 0.0
                else:
                    head[2] -= span / sharing
            now += span
            for queue in queues.values():
                if queue and queue[0][1] <= 0 and queue[0][2] <= 1e-12:
                    done.add(queue.pop(0)[0])
            if math.isinf(until) and not heads:
                raise AssertionError(f"message {number} is awaited and was never sent")

    for cycle in range(num_cycles):
        start, exposed = now, {}
        for event in events:
            number = event.number + cycle * count
            if event.kind == "compute":
                advance(now + event.ms)
            elif event.kind == "send":
                queues.setdefault(event.communicator, []).append(
                    [number, latency_ms, event.num_bytes / bus_gb_per_s / 1e6])
            elif event.kind == "wait" and number >= first and number not in done:  # before: it is there
                before = now
                advance(math.inf, number)
                exposed[event.name] = exposed.get(event.name, 0.0) + now - before
    return dict(ms=now - start, exposed_ms=sum(exposed.values()), exposed=exposed,
                computing_ms=sum(event.ms for event in events if event.kind == "compute"),
                sent_mb=sum(event.num_bytes for event in events if event.kind == "send") / 1e6)
