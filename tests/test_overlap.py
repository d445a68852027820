"""Communication and saves overlap with computation: each part waits only for the parameters that it reads."""

import json
import threading

import pytest
import torch
from conftest import (
    AT_THE_END,
    assert_same_bits,
    before_call,
    find_saved,
    gpt,
    make_runtime,
    read_tensors,
    run,
    smoke_config,
    smoke_run,
)
from run_ranks import run_ranks
from torch.overrides import TorchFunctionMode


def test_scales_are_reduced_during_the_update(shards, tmp_path):
    """On two ranks the all-reduce starts before the first update, and the next step waits for it."""
    changes = dict(preset="smoke", device="cpu", train_files=f"{shards}/train_*.bin", micro_batch_tokens=512,
                   fp8="on", fp8_parts=["mlp"], model_dim=128, num_heads=2, head_dim=64, num_layers=2)  # fmt: skip
    ends, _, errors = run_ranks("scale_steps", 2, tmp_path / "order.json", json.dumps(changes))
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    calls = json.loads((tmp_path / "order.json").read_text())
    step = ["forward", "forward", "send scales", "update"]
    assert calls == [*step, "await scales", *step, "await scales", *step]


def test_checkpoints_reuse_memory_allocated_before_the_clock(shards, here, monkeypatch):
    """Three checkpoints in a row use one set of tensors, and each has the state of its step bit for bit.

    A step does not wait for the disk: each write starts only after the next step has ended.
    """
    events, saves, states, made = [], [], {}, []
    has_ended = {step: threading.Event() for step in range(1, 7)}
    before_call(monkeypatch, gpt.Checkpoints, "start", lambda *_: events.append("start"))
    before_call(monkeypatch, gpt.Trainer, "run", lambda *_: events.append("clock"))
    before_call(monkeypatch, gpt.Checkpoints, "wait", lambda _: [event.set() for event in has_ended.values()])

    def note_state(checkpoints, trainer, **_):
        made.append(checkpoints)
        states[trainer.progress.step] = {name: rows.clone() for name, rows in gpt.collect_rows(trainer).items()}

    def write_late(_checkpoints, files, _problem=""):
        if not isinstance(files, list):  # pieces of large entries, of which there are none
            return
        ((path, copies),) = files
        saves.append({entry: copy.copy.data_ptr() for entry, copy in copies.items()})
        step = int(path.parent.name[6:12])
        assert step == 6 or has_ended[step + 1].wait(60)

    before_call(monkeypatch, gpt.Checkpoints, "_write", write_late)
    monkeypatch.setattr(gpt.Checkpoints, "KEPT", 3)
    save = gpt.Checkpoints.save
    monkeypatch.setattr(gpt.Checkpoints, "save", lambda self, trainer, **more: note_state(self, trainer) or save(
        self, trainer, **more))  # fmt: skip

    def end_step(checkpoints, _stop):
        has_ended[checkpoints.log.progress.step].set()
        if checkpoints.writing and checkpoints.log.progress.step % 2:
            checkpoints.writing.result()

    before_call(monkeypatch, gpt.Checkpoints, "exchange", end_step)
    run(shards, "--num_iterations=6", "--checkpoint_every=2", AT_THE_END)
    assert events == ["start", "clock"] and sorted(states) == [2, 4, 6]
    expected = {entry: rows.data_ptr() for entry, rows in made[0].copies.items()}
    assert saves == [expected] * 3 and len(set(expected.values())) == len(expected) == len(states[2])
    for step, state in states.items():
        parts = {entry.rpartition("/")[0]: rows for entry, rows in state.items()}
        assert_same_bits(read_tensors(find_saved(step)), parts)
    assert not [name for name, rows in states[6].items() if name.endswith("//0") and torch.equal(rows, states[4][name])]
    events.clear()
    run(shards, "--num_iterations=1", AT_THE_END)
    assert events == ["clock"]


class NoteReads(TorchFunctionMode):
    """Call note(name) whenever a function of PyTorch is given a parameter."""

    def __init__(self, model: torch.nn.Module, note):
        super().__init__()
        self.names, self.note = {id(param): name for name, param in model.named_parameters()}, note

    def __torch_function__(self, function, types, args=(), kwargs=None):
        for x in torch.utils._pytree.tree_leaves((args, kwargs or {})):
            if id(x) in self.names:
                self.note(self.names[id(x)])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("tie_head", ["off", "on"])
@pytest.mark.parametrize("num_layers, num_segments", [(1, 1), (2, 2), (5, 4)])
def test_every_parameter_has_a_part_that_waits_for_it(monkeypatch, num_layers, num_segments, tie_head):
    """On several ranks, with as few as one segment. The parts are the model, its segments and the head. The first
    part that reads a parameter of a bucket waits for the bucket, and no parameter is left out. While tied the
    embedding is not read, and the model waits for the head's weight. Afterwards it waits for both."""
    awaited, first_read = [], {}  # parts in the order of their waits, and by parameter the part that reads it first
    monkeypatch.setattr(gpt.Optimizer, "wait_for_parameters", lambda _optimizer, reader, *_: awaited.append(reader))
    monkeypatch.setattr(gpt.Comm, "broadcast", lambda _comm, tensor: None)  # the second rank does not exist
    cfg = smoke_config(num_layers=num_layers, tie_head=tie_head)
    trainer = gpt.Trainer(cfg, make_runtime(0, 2, fast=frozenset({"sparse_embedding"})))
    model, optimizer, tokens = trainer.model, trainer.optimizer, torch.randint(257, (128,))
    assert any(bucket.sparse for bucket in optimizer.buckets) == (num_layers > 1)
    step_inputs = trainer.get_step_inputs(trainer.schedule.at(0), 128, 128)
    names = {name for name, _ in model.named_parameters()}
    for is_tied in (True, False) if tie_head == "on" else (False,):
        assert model.is_tied == is_tied
        awaited.clear(), first_read.clear()
        with torch.no_grad(), NoteReads(model, lambda name: first_read.setdefault(name, awaited[-1])):
            model(tokens.int(), tokens, torch.zeros(128, dtype=torch.int32), step_inputs)
        assert awaited == list(range(num_segments + 2))
        assert first_read.keys() == names - ({"embed"} if is_tied else set())
        assert first_read["head.weight" if is_tied else "embed"] == 0
        assert first_read["head.weight"] == (0 if is_tied else num_segments + 1)
        for bucket in optimizer.updated:  # the model hands its scalars to all segments and waits for them itself
            readers = {0 if name.startswith("scalars.") else first_read[name] for name in bucket.params}
            assert bucket.first_reader == min(readers)
        assert {name for bucket in optimizer.updated for name in bucket.params} == first_read.keys()
        if is_tied:
            optimizer.untie()


@pytest.mark.parametrize("reader", range(4))
def test_a_part_waits_for_its_buckets(monkeypatch, reader):
    """For all whose first reader it is, and for no others."""
    monkeypatch.setattr(gpt.Comm, "broadcast", lambda _comm, tensor: None)
    trainer = gpt.Trainer(smoke_config(num_layers=2), make_runtime(0, 2))
    optimizer, tokens, finished = trainer.optimizer, torch.zeros(128, dtype=torch.int32), []
    assert {bucket.first_reader for bucket in optimizer.buckets} == set(range(4))

    class Work:
        def __init__(self, bucket):
            self.bucket = bucket

        def wait(self):
            finished.append(self.bucket)

    for bucket in optimizer.buckets:
        bucket.gathering = Work(bucket)
    optimizer.wait_for_parameters(reader)
    assert finished == [bucket for bucket in optimizer.buckets if bucket.first_reader == reader] != []
    with torch.no_grad():
        trainer.model(tokens, tokens.long(), tokens, trainer.get_step_inputs(trainer.schedule.at(0), 128, 128))
    assert len(finished) == len(optimizer.buckets) == len(set(finished))


@pytest.mark.slow
def test_a_single_layer_is_waited_for_too(shards, tmp_path):
    """One segment is still a segment: every parameter of the last step has come back before it is read."""
    options = ["--num_layers=1", "--num_iterations=4", "--micro_batch_tokens=512", "--telemetry_every=2"]
    (tmp_path / "one").mkdir(), (tmp_path / "two").mkdir()
    one = smoke_run(shards, tmp_path / "one", *options)
    two = smoke_run(shards, tmp_path / "two", *options, nproc=2)
    assert [loss for _, loss, _ in one["val_points"]] == [loss for _, loss, _ in two["val_points"]]
