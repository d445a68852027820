"""Simulate a step of one of several ranks, with its computation and its collectives in their real order.

Recorder makes one process do the work of rank 0 of N. It replaces the collectives of train_gpt.py by ones
that send nothing, and records the start, the communicator and the wait of each message. play() then
simulates the transfers in parallel with the computation. A communicator sends its messages in order, one
after the other. Communicators that send simultaneously share the link. Host adds the time of the launches.
"""

import math
import statistics
import time
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch

import train_gpt as gpt

# All-gather and reduce-scatter of NCCL over eight H100 on NVSwitch: published runs of nccl-tests have about
# 350 GB/s of bus bandwidth for large messages (450 GB/s in the data sheet) and 20 to 30 microseconds for
# small ones. Assumed here, not measured. benchmarks/comm.py measures both.
BUS_GB_PER_S, LATENCY_MS = 350.0, 0.025


class Host(NamedTuple):
    """Python launches kernels and copies. The defaults were measured with `record_92` on one H100."""

    launches: int = 1106  # in a micro-batch. A replay of a CUDA graph is one
    us_per_launch: float = 41.0  # 45 ms / 1,106

    def limit(self, gpu_ms: float, micros: float) -> tuple[float, float, float]:
        """(ms of the host, ms of the step, percent of it with the GPU idle) for a step of micro-batches.

        The host launches while the GPU computes, so the step takes the longer of the two.
        """
        host_ms = micros * self.launches * self.us_per_launch / 1e3
        ms = max(host_ms, gpu_ms)
        return host_ms, ms, 100 * (1 - gpu_ms / ms)


class Event(NamedTuple):
    """An event, in program order."""

    kind: str  # compute, send, wait, or begin and end of a record
    name: str
    number: int = -1  # of the message
    communicator: str = ""
    num_bytes: float = 0.0  # sent to other ranks
    ms: float = math.nan  # of computing


class Message:
    """Stands in for a work handle of torch.distributed."""

    def __init__(self, recorder: "Recorder", name: str):
        self.recorder, self.name, self.number = recorder, name, len(recorder.names)
        recorder.names.append(name)

    def wait(self) -> None:
        self.recorder.add(Event("wait", self.name, self.number))


class Recorder:
    """Records collectives, which send nothing, and the time on the device between them."""

    def __init__(self, rt: gpt.Runtime):
        self.rt, self.events, self.names, self.marks = rt, [], [], []
        self.bucket = ""  # name of the bucket in communication

    def add(self, event: Event) -> None:
        self.events.append(event)
        mark = time.perf_counter()
        if self.rt.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks.append(mark)

    def send(self, kind: str, communicator: str, num_bytes: float) -> Message:
        message = Message(self, f"{kind} {self.bucket}")
        self.add(Event("send", message.name, message.number, communicator, num_bytes))
        return message

    def read(self) -> list[Event]:
        """Return the events with the computation before each of them, and start a new record."""
        gpt.clock(self.rt.device)
        found = self.events[:1]
        for event, last, mark in zip(self.events[1:], self.marks, self.marks[1:]):
            ms = last.elapsed_time(mark) if self.rt.device.type == "cuda" else 1e3 * (mark - last)
            found += [Event("compute", f"until {event.kind} {event.name}", ms=ms), event]
        self.events, self.marks = [], []
        return found

    @contextmanager
    def replace_collectives(self):
        """This process is rank 0 of rt.world_size ranks."""
        ranks = self.rt.world_size

        def reduce_scatter(shard, full, **_):
            shard.copy_(full.view(ranks, *shard.shape)[0])
            return self.send("reduce", "reductions", full.nbytes - shard.nbytes)

        def all_gather(full, shard, **_):
            return self.send("gather", "gathers", full.nbytes - shard.nbytes)

        def all_to_all(received, sent, _receive_counts, send_counts, **_):
            received.zero_()
            num_bytes = (sum(send_counts) - send_counts[0]) * (sent.nbytes / max(1, len(sent)))
            return self.send("rows", "reductions", num_bytes)

        def all_reduce(tensor, *_, **_options):
            return self.send("all-reduce", "reductions", 2 * tensor.nbytes * (ranks - 1) / ranks)

        def named(owner, name, suffix=""):
            method = getattr(owner, name)

            def call(bucket, *args):
                self.bucket = bucket.name + suffix
                result = method(bucket, *args)
                self.bucket = ""
                return result
            return owner, name, call

        with ExitStack() as stack:
            for owner, name, function in (
                    (gpt, "reduce_scatter_single", reduce_scatter), (gpt, "all_gather_single", all_gather),
                    (gpt.dist, "all_to_all_single", all_to_all), (gpt.dist, "all_reduce", all_reduce),
                    (gpt.dist, "broadcast", lambda *_, **__: None), named(gpt.Bucket, "start_reduce"),
                    named(gpt.Bucket, "start_gather"), named(gpt.Table, "add"),
                    named(gpt.Table, "start_reading", " (fetched)")):
                stack.enter_context(patch.object(owner, name, function))
            yield


def record_cycle(cfg: gpt.Config, rt: gpt.Runtime, data: gpt.TrainData, num_cycles: int = 5
                 ) -> list[Event]:
    """The events of rank 0 of rt.world_size in cfg.longest_period steps of the last stage, on this device.

    Times are medians over num_cycles cycles. The optimizer repeats the last cycle before the final two
    steps, so groups have their late periods, and all cycles have the same updates.
    """
    recorder, steps = Recorder(rt), cfg.longest_period
    last, cycles = cfg.num_iterations - 1, []
    first_of_cycle = max(0, (last - 1) // steps - 1) * steps
    with recorder.replace_collectives():
        trainer = gpt.Trainer(cfg, rt)
        same = (batch for _ in range(steps * (num_cycles + 2))
                for batch in data.batches(rt.comm, last, last + 1))
        batches = gpt.prefetch(same, rt.device)
        for _ in range(num_cycles + 2):  # two to warm up
            trainer.optimizer.step_count = first_of_cycle
            recorder.add(Event("begin", ""))
            for _ in range(steps):
                trainer.train_step(batches, trainer.schedule.at(last))
            recorder.add(Event("end", ""))
            cycles.append(recorder.read())
        batches.close()
    kinds = {tuple((event.kind, event.name) for event in cycle) for cycle in cycles[2:]}
    assert len(kinds) == 1, "cycles differ in their collectives"
    return [event._replace(ms=statistics.median(same.ms for same in column))
            if event.kind == "compute" else event for event, *column in zip(cycles[-1], *cycles[2:])]


def play(events: list[Event], bus_gb_per_s: float = BUS_GB_PER_S,
         latency_ms: float = LATENCY_MS, num_cycles: int = 3) -> dict:
    """Simulate num_cycles equal cycles, because a message may be awaited in the next one.

    Returns milliseconds of the last cycle: in total, of computing, and of waiting for each message.
    """
    now, start, exposed = 0.0, 0.0, {}
    numbers = [event.number for event in events if event.kind == "send"]
    first, count = min(numbers, default=0), len(numbers)
    queues: dict[str, list[list]] = {}  # by communicator: [number, ms of latency left, ms of link left]
    done: set[int] = set()

    def advance(until: float, number: int = -1) -> None:
        """Simulate transfers until this time, or until message number has arrived."""
        nonlocal now
        while now < until and number not in done:
            heads = [queue[0] for queue in queues.values() if queue]
            sharing = sum(head[1] <= 0 for head in heads)  # heads whose latency is over
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
            elif event.kind == "wait" and number >= first and number not in done:
                before = now
                advance(math.inf, number)
                exposed[event.name] = exposed.get(event.name, 0.0) + now - before
    return dict(ms=now - start, exposed_ms=sum(exposed.values()), exposed=exposed,
                computing_ms=sum(event.ms for event in events if event.kind == "compute"),
                sent_mb=sum(event.num_bytes for event in events if event.kind == "send") / 1e6)
