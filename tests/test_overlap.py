"""Communication and saves overlap with computation: each part waits only for the parameters that it reads."""

import json
import threading

import pytest
import torch
from conftest import AT_THE_END, before_call, find_saved, gpt, make_runtime, run, smoke_config, smoke_run
from run_ranks import run_ranks
from test_fp8 import FP8_MLP
from torch.overrides import TorchFunctionMode


def test_scales_are_reduced_during_the_update(shards, tmp_path):
    """On two ranks the all-reduce starts before the first update, and the next step waits for it."""
    changes = dict(
        preset="smoke", device="cpu", train_files=f"{shards}/train_*.bin", micro_batch_tokens=512, **FP8_MLP
    )
    ends, _, errors = run_ranks("scale_steps", 2, tmp_path / "order.json", json.dumps(changes))
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    calls = json.loads((tmp_path / "order.json").read_text())
    step = ["forward", "forward", "send scales", "update"]
    assert calls == [*step, "await scales", *step, "await scales", *step]


def test_checkpoints_reuse_memory_allocated_before_the_clock(shards, here, monkeypatch):
    """Three checkpoints in a row use one set of tensors, and each has the weights of its step bit for bit.

    A step does not wait for the disk: each write starts only after the next step has ended. The state of random
    numbers is small and has no reserved memory.
    """
    events, saves, weights, write = [], [], {}, gpt.write_atomic
    has_ended = {step: threading.Event() for step in (1, 2, 3)}
    before_call(monkeypatch, gpt, "make_staging", lambda _: events.append("staging"))
    before_call(monkeypatch, gpt.Trainer, "run", lambda made, *_: (events.append("clock"), trainer.append(made)))

    def note_save(checkpoints, saved):
        weights[saved.progress.step] = {name: p.detach().clone() for name, p in saved.model.named_parameters()}

    def note_copies(saved, *args):
        state, copies = collect(saved, *args)
        if "clock" in events:
            saves.append({name: copy.copy for name, copy in copies.items()})
        return state, copies

    def write_late(path, *args):
        if path.suffix == ".pt":
            assert has_ended[min(int(path.stem[5:]) + 1, 3)].wait(300)
        write(path, *args)

    trainer, collect = [], gpt.collect_state
    monkeypatch.setattr(gpt, "collect_state", note_copies)
    before_call(monkeypatch, gpt.Checkpoints, "save", note_save)
    monkeypatch.setattr(gpt, "write_atomic", write_late)
    before_call(monkeypatch, gpt.Checkpoints, "wait", lambda _: has_ended[trainer[0].progress.step].set())
    monkeypatch.setattr(gpt.Checkpoints, "KEPT", 3)
    run(shards, "--num_iterations=3", "--checkpoint_every=1", AT_THE_END)
    assert events[:2] == ["staging", "clock"] and events.count("staging") == 1
    # all copies still exist, so no other tensor has their memory
    expected, *pointers = (
        {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for tensors in (trainer[0].staging, *saves)
    )
    assert pointers == [expected] * 3 and len(set(expected.values())) == len(expected) > len(weights[1])
    for step, expected in weights.items():
        _, tensors = gpt.read_checkpoint(find_saved(step))
        assert [name for name, p in expected.items() if not torch.equal(tensors[name], p)] == []
    assert not [name for name, p in weights[3].items() if torch.equal(p, weights[2][name])]
    events.clear()
    run(shards, "--num_iterations=1", AT_THE_END)
    assert "staging" not in events and trainer[1].staging == {}


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
