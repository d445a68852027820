"""Simulated messages: their arrival, calculated by hand, and the record of a real step."""

import pytest
from conftest import gpt, make_runtime, smoke_config

from benchmarks import comm, simulate_ranks
from benchmarks.simulate_ranks import Event


def send(number, ms, communicator="a"):
    return Event("send", f"m{number}", number, communicator, 1e6 * ms)  # at 1 GB/s


def wait(number):
    return Event("wait", f"m{number}", number)


def compute(ms):
    return Event("compute", "", ms=ms)


def play(*events, latency_ms=0.0, num_cycles=1):
    return simulate_ranks.play(list(events), 1.0, latency_ms, num_cycles)


@pytest.mark.parametrize("events, latency, total, exposed", [
    ([send(0, 10), compute(15), wait(0)], 0, 15, 0),  # has arrived during the computation
    ([send(0, 10), compute(4), wait(0)], 0, 10, 6),
    ([send(0, 10), send(1, 10), compute(5), wait(1)], 0, 20, 15),  # a communicator works in order
    ([send(0, 10), send(1, 10, "b"), compute(5), wait(1)], 0, 20, 15),  # two share the link
    ([send(0, 10), send(1, 2, "b"), wait(1), wait(0)], 0, 12, 12),  # the short one takes 4 ms
    ([send(0, 10), send(1, 2), wait(1)], 0, 12, 12),  # queued behind the long one
    ([send(0, 10), compute(4), wait(0)], 3, 13, 9),
    ([send(0, 10), send(1, 10, "b"), wait(0), wait(1)], 3, 23, 23),  # latencies overlap
])  # fmt: skip
def test_when_messages_arrive(events, latency, total, exposed):
    played = play(*events, latency_ms=latency)
    assert played["ms"] == pytest.approx(total) and played["exposed_ms"] == pytest.approx(exposed)
    assert played["ms"] == pytest.approx(played["computing_ms"] + played["exposed_ms"])


def test_a_message_is_awaited_in_the_next_cycle():
    """Number 5 is sent at the end of a cycle and awaited as number 4 in the next one, after 3 ms."""
    cycle = [compute(3), wait(4), compute(10), send(5, 8)]
    assert play(*cycle, num_cycles=1)["exposed_ms"] == 0
    for num_cycles in (2, 3):
        played = play(*cycle, num_cycles=num_cycles)
        assert (played["ms"], played["exposed"]) == (pytest.approx(18), {"m4": pytest.approx(5)})


def test_a_step_takes_the_longer_of_host_and_gpu():
    """Stages 1 and 3 of `record_92` on one H100, by their measured kernels, and with replayed graphs."""
    assert simulate_ranks.Host().limit(126, 4) == pytest.approx((181.384, 181.384, 30.534), abs=1e-3)
    assert simulate_ranks.Host().limit(399, 8) == pytest.approx((362.768, 399, 0))
    assert simulate_ranks.Host(launches=100).limit(126, 4) == pytest.approx((16.4, 126, 0))


@pytest.mark.parametrize("preset", ["smoke", "smoke_92"])
def test_a_recorded_step_has_all_its_messages(shards, preset, monkeypatch):
    """The bytes equal those of the arguments of Comm. Each message is awaited once. All-gathers are apart."""
    cfg = smoke_config(shards, preset=preset, num_iterations=12, extension_steps=0, stages=(gpt.Stage(1, 128, 64),),
                       tokens_per_step=512, seq_len=256)
    steps, real = [], gpt.Trainer.train_step
    collectives = lambda: (gpt.reduce_scatter_single, gpt.all_gather_single, gpt.dist.all_to_all_single, gpt.Table.add)
    before = collectives()

    def train_step(trainer, *args):
        with comm.count_bytes() as sent:
            real(trainer, *args)
        steps.append(sum(sent.values()))

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    rt = make_runtime(world_size=2)
    events = simulate_ranks.record_cycle(cfg, rt, gpt.TrainData(cfg, gpt.Schedule(cfg)), num_cycles=2)
    assert collectives() == before  # restored
    sent = [event for event in events if event.kind == "send"]
    assert sum(event.num_bytes for event in sent) == pytest.approx(sum(steps[-cfg.longest_period :]))
    assert {event.communicator for event in sent} == {"reductions", "gathers"}
    assert all((event.communicator == "gathers") == event.name.startswith("gather") for event in sent)
    if preset == "smoke_92":  # in four steps two updates of the embedding, and rows in each
        names = ["gather embed", "gather value_embeds.0", "rows value_embeds.0", "rows ngram (fetched)"]
        assert [sum(event.name == name for event in sent) for name in names] == [2, 0, 4, 4]
    waits = sorted(event.number for event in events if event.kind == "wait")
    numbers = [event.number for event in sent]
    shifted = sorted(number if number in numbers else number + len(numbers) for number in waits)
    assert shifted == sorted(numbers)  # waits for the previous cycle, shifted by a cycle
    computing = [event.ms for event in events if event.kind == "compute"]
    assert min(computing) >= 0 and sum(computing) > 1
