"""Communication overlaps with computation: each part waits only for the parameters that it reads. Saves are off the
clock."""

from types import SimpleNamespace

import pytest
import torch
from conftest import (
    AT_THE_END,
    advance,
    assert_same_bits,
    before_call,
    copy_rows,
    find_saved,
    gpt,
    make_runtime,
    read_tensors,
    run,
    smoke_config,
    train_steps,
)
from torch.overrides import TorchFunctionMode

from benchmarks import simulate_ranks


def record_third_step(cfg: gpt.Config) -> tuple[list[str], gpt.Optimizer]:
    """The order of messages, updates and calls of the model on the first of two ranks."""
    recorder = simulate_ranks.Recorder(make_runtime(0, 2))
    with recorder.replace_collectives(), pytest.MonkeyPatch.context() as patch:
        note = lambda name: recorder.add(simulate_ranks.Event(name, ""))
        trainer, first = gpt.Trainer(cfg, recorder.rt), []
        before_call(patch, gpt.Bucket, "update", lambda bucket, *_: note(f"update {bucket.name}"))
        trainer.model.register_forward_pre_hook(lambda *_: note("forward"))
        trainer.model.blocks[0].register_forward_pre_hook(lambda *_: note("first block"))
        before_call(patch, trainer.optimizer, "step", lambda *_: note("end of backward"))
        before_call(patch, trainer, "train_step", lambda *_: first.append(len(recorder.events)))
        train_steps(trainer, 3)
    return [f"{event.kind} {event.name}".strip() for event in recorder.events[first[-1] :]], trainer.optimizer


def test_messages_leave_early_and_are_awaited_late(shards):
    """Backward reduces buckets in reverse order of their segments: the head, then the last segment, and so on.
    They are updated and gathered in this order, too. When the first block starts, its parameters are gathered, and
    all-gathers of the last block and of the head are not awaited yet."""
    events, optimizer = record_third_step(smoke_config(shards, tokens_per_step=1024, num_layers=3))
    segments = {bucket.name: bucket.segment for bucket in optimizer.buckets if bucket not in optimizer.tables}

    def places(kind: str, start: int = 0, end: int | None = None) -> list[int]:
        """Segments of the buckets in these events. Rows of tables are left out."""
        names = [event.removeprefix(f"{kind} ") for event in events[start:end] if event.startswith(f"{kind} ")]
        return [segments[name] for name in names if name in segments]

    begin, end = events.index("first block"), events.index("end of backward")
    assert len(set(segments.values())) == 4 and len(segments) > 10
    assert places("send reduce", 0, end) == places("send reduce") == sorted(segments.values(), reverse=True)
    assert set(places("wait gather", 0, begin)) == {0} and places("wait gather", begin) == sorted(
        place for place in segments.values() if place)
    assert places("send gather") == sorted(segments.values(), reverse=True)
    updates, tables = places("update"), {table.name for table in optimizer.tables}
    assert updates == sorted(segments.values(), reverse=True)
    for table in tables:  # fetched before the first block, and their gradients have left before the end of backward
        sent = events.index(f"send rows {table}")
        assert events.index(f"send rows {table} (fetched)") < begin < sent < end < events.index(f"wait rows {table}")


def test_checkpoints_are_off_the_clock(shards, here, monkeypatch, now):
    """The folder is locked before the clock starts. Each checkpoint has the state of its step bit for bit, and the
    clock stands still while it is written: only three steps take time."""
    events, states = [], {}
    before_call(monkeypatch, gpt, "lock_run", lambda _: events.append("lock"))
    before_call(monkeypatch, gpt.Stop, "catch_signals", lambda _: events.append("clock"))
    before_call(monkeypatch, gpt.Checkpoints, "save", lambda _, trainer: states.update({
        trainer.progress.step: copy_rows(trainer)}))
    advance(monkeypatch, now, gpt, "write_atomic", 100.0)
    advance(monkeypatch, now, gpt.Trainer, "train_step", 2.0)
    monkeypatch.setattr(gpt.Checkpoints, "KEPT", 3)
    result = run(shards, "--num_iterations=6", "--checkpoint_every=2", AT_THE_END)
    assert events == ["lock", "clock"] and sorted(states) == [2, 4, 6]
    assert result["train_time_ms"] == 6 * 2000
    for step, state in states.items():
        parts = {entry.rpartition("/")[0]: rows for entry, rows in state.items()}
        assert_same_bits(read_tensors(find_saved(step)), parts)
    assert not [name for name, x in states[6].items() if name.endswith("//0") and torch.equal(x, states[4][name])]
    events.clear()
    run(shards, "--num_iterations=1", AT_THE_END)
    assert events == ["clock", "lock"]  # test_trainer: the save of the last step is not on the clock


def test_without_pinned_memory_copies_go_on(monkeypatch, capsys):
    """Batches for a GPU are pinned, or a line says once that they cannot be."""
    pinned, is_full = [], []

    def pin_memory(tensor):
        if is_full:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        pinned.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(gpt, "move_batch", lambda batch, _: batch)
    gpt.print_once.cache_clear()
    capsys.readouterr()
    for is_full in ([], [True]):  # noqa: B007 (pin_memory() reads it)
        batches = gpt.prefetch(iter([gpt.Batch(*torch.arange(6).view(3, 2))]), SimpleNamespace(type="cuda"))
        assert [batch.doc_ids.tolist() for batch in batches] == [[4, 5]]
        assert pinned == [2, 2, 2]
    assert capsys.readouterr().out == ("copies to the GPU are slow: pin_memory fails (CUDA error: out of memory)\n")


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
def test_every_parameter_is_awaited_before_it_is_read(monkeypatch, num_layers, num_segments, tie_head):
    """On several ranks, with as few as one segment. The model waits for a bucket in the segment that reads its first
    parameter, or with the head. While tied the embedding is not read, and its segment has the head's weight."""
    awaited, first_read = [], {}  # segments in the order of their waits, and by parameter the one that reads it first
    monkeypatch.setattr(gpt.Comm, "broadcast", lambda _comm, tensor: None)  # the second rank does not exist
    trainer = gpt.Trainer(smoke_config(num_layers=num_layers, tie_head=tie_head), make_runtime(0, 2))
    model, optimizer, tokens = trainer.model, trainer.optimizer, torch.randint(257, (128,))
    monkeypatch.setattr(model, "wait_for", awaited.append)
    for table in optimizer.tables:  # no plans: each rank has half of the rows
        table.params[table.name].data = torch.zeros(384, 64)
    batch = gpt.Batch(tokens.int(), tokens, torch.zeros(128, dtype=torch.int32))
    step_inputs = trainer.get_step_inputs(trainer.schedule.at(0), 128, 128)
    names = {name for name, _ in model.named_parameters()}
    for is_tied in (True, False) if tie_head == "on" else (False,):
        assert model.is_tied == is_tied
        awaited.clear(), first_read.clear()
        with torch.no_grad(), NoteReads(model, lambda name: first_read.setdefault(name, awaited[-1])):
            model(batch, step_inputs, gpt.Operations())
        assert awaited == [0, *range(num_segments), num_segments]
        assert first_read.keys() == names - ({"embed"} if is_tied else set())
        for bucket in optimizer.updated:
            if bucket not in optimizer.tables:
                assert bucket.segment == min(first_read[name] for name in bucket.params)
        assert {name for bucket in optimizer.updated for name in bucket.params} == first_read.keys()
        assert first_read["head.weight"] == (0 if is_tied else num_segments)
        if is_tied:
            optimizer.untie()
