"""Communication and saves overlap with computation: each part waits only for the parameters that it reads."""

import threading
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    AT_THE_END,
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


def test_checkpoints_reuse_memory_allocated_before_the_clock(shards, here, monkeypatch):
    """Three checkpoints in a row use one set of tensors, and each has the state of its step bit for bit.
    Training goes on until the next save, which waits: each write starts only after that one has begun."""
    events, saves, states, made, save = [], [], {}, [], gpt.Checkpoints.save
    has_begun = {step: threading.Event() for step in (1, 2, 4, 6)}
    before_call(monkeypatch, gpt.Checkpoints, "start", lambda *_: events.append("start"))
    before_call(monkeypatch, gpt.Stop, "catch_signals", lambda _: events.append("clock"))

    def note_state(checkpoints, trainer, **more):
        made.append(checkpoints)
        has_begun[trainer.progress.step].set()
        states[trainer.progress.step] = copy_rows(trainer)
        save(checkpoints, trainer, **more)

    def write_late(checkpoints, folder, *_):
        step = int(folder.name[5:])
        saves.append({entry: rows.data_ptr() for entry, rows in checkpoints.copies.items()})
        assert step in (1, 6) or has_begun[step + 2].wait(60)

    before_call(monkeypatch, gpt.Checkpoints, "write", write_late)
    monkeypatch.setattr(gpt.Checkpoints, "save", note_state)
    monkeypatch.setattr(gpt.Checkpoints, "KEPT", 3)
    run(shards, "--num_iterations=6", "--checkpoint_every=2", AT_THE_END)
    assert events == ["start", "clock"] and sorted(states) == [2, 4, 6]
    expected = {entry: rows.data_ptr() for entry, rows in made[0].copies.items()}
    assert saves == [expected] * 3 and len(set(expected.values())) == len(expected) == len(states[2])
    for step, state in states.items():
        parts = {entry.rpartition("/")[0]: rows for entry, rows in state.items()}
        assert_same_bits(read_tensors(find_saved(step)), parts)
    assert not [name for name, x in states[6].items() if name.endswith("//0") and torch.equal(x, states[4][name])]
    events.clear()
    run(shards, "--num_iterations=1", AT_THE_END)
    assert events == ["clock", "start"]  # test_trainer: the save of the last step is not on the clock


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


def test_without_pinned_memory_copies_go_on(shards, here, monkeypatch, capsys):
    """Batches for a GPU and memory for checkpoints are pinned, or a line says once that they cannot be."""
    pinned, is_full = [], []

    def pin_memory(tensor):
        if is_full:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        pinned.append(tensor.numel())
        return tensor.clone()

    trainer, collect = gpt.Trainer(smoke_config(shards), make_runtime()), gpt.collect_rows
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(gpt, "move_batch", lambda batch, _: batch)
    monkeypatch.setattr(gpt, "collect_rows", lambda _: {
        name: rows.as_subclass(OnGpu) for name, rows in collect(trainer).items()})
    sizes = {name: rows.numel() for name, rows in collect(trainer).items()}
    gpt.print_once.cache_clear()
    capsys.readouterr()
    for is_full in ([], [True]):
        batches = gpt.prefetch(iter([gpt.Batch(*torch.arange(6).view(3, 2))]), SimpleNamespace(type="cuda"))
        assert [batch.doc_ids.tolist() for batch in batches] == [[4, 5]]
        checkpoints = SimpleNamespace(rt=make_runtime(), folder=here / str(len(is_full)), copies={})
        gpt.Checkpoints.start(checkpoints, trainer)
        checkpoints.lock.close()
        assert {name: rows.numel() for name, rows in checkpoints.copies.items()} == sizes
        assert pinned == [2, 2, 2, *sizes.values()]
    assert capsys.readouterr().out == ("copies to and from the GPU are slow: pin_memory fails "
                                       "(CUDA error: out of memory)\n")


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
