"""The loop of a run: clock, warm-up, result, signals, snapshots and the state of a resumed run."""

import dataclasses
import json
import os
import re
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    advance,
    before_call,
    copy_rows,
    find_saved,
    gpt,
    make_runtime,
    make_trainer,
    run,
    smoke_config,
    train_steps,
)

PREFIXES = ["--vocab_file=vocab.json"]
PREFIXES += ['--stages=[{"duration":1,"window_long":128,"window_short":64,"prefix_weight":[0.5]}]']


def load_from(trainer, shards, **changes):
    """Another trainer with other options, which continues from the state of this one."""
    metadata = dict(progress=dataclasses.asdict(trainer.progress), is_tied=trainer.model.is_tied,
                    optimizer_steps=trainer.optimizer.step_count, hardware=dict(ranks=1))
    other, step, close = make_trainer(shards, **changes)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(copy_rows(trainer), Path(folder, "rank0.pt"))
        Path(folder, "state.json").write_text(json.dumps(metadata))
        gpt.load_state(other, Path(folder), gpt.read_metadata(Path(folder)))
    return other, step, close


def test_a_batch_that_does_not_count_changes_no_validation(shards, monkeypatch):
    """Ranks repeat a batch if their number does not divide the batches."""
    trainer, _, _ = make_trainer(shards)
    data, state = gpt.ValData(trainer.cfg), trainer.schedule.at(0)
    first, second = (batch for batch, _ in data.batches(gpt.Comm(), 2))
    loss = trainer.validate(data, state, 1)
    monkeypatch.setattr(data, "batches", lambda *_: iter([(first, True), (second, False)]))
    assert trainer.validate(data, state, 1) == loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_metric_is_not_rounded(shards, dtype):
    """Only the activations and the logits have the dtype of the run. The rest in float64 is the same number."""
    torch.manual_seed(0)
    trainer = gpt.Trainer(cfg := smoke_config(shards), make_runtime(dtype=dtype))
    data, state, model, exact = gpt.ValData(cfg), trainer.schedule.at(0), trainer.model, 0.0
    weight = model.head.weight.data.normal_()
    inputs = trainer.get_step_inputs(state, data.batch_tokens, cfg.val_seq_len)
    for batch, _ in data.batches(trainer.rt.comm, data.num_batches):
        logits = gpt.linear(model.run_layers(batch, inputs, trainer.val_ops).detach(), weight)
        exact += F.cross_entropy(model.head.softcap(logits.double()), batch.targets, reduction="sum").item()
    assert logits.dtype == dtype and trainer.validate(data, state) == pytest.approx(exact / cfg.val_tokens, rel=1e-6)


def test_the_clock_counts_steps_and_neither_saves_nor_validations(shards, here, monkeypatch, now):
    """A step takes 2 s, the averages 3 s, a validation 100 s and a save 10 s. Before the clock: a step of the warm-up for
    each of three stages, and a validation."""
    advance(monkeypatch, now, gpt.Trainer, "train_step", 2.0)
    advance(monkeypatch, now, gpt.Trainer, "validate", 100.0)
    advance(monkeypatch, now, gpt, "collect_rows", 10.0)
    advance(monkeypatch, now, gpt.Optimizer, "apply_averages", 3.0)
    args = ["--num_iterations=6", "--val_loss_every=2", "--checkpoint_every=3", "--warmup_iterations=1"]
    result = run(shards, *args)
    assert [[step, time] for step, _, time in result["val_points"]] == [[0, 0], [2, 4000], [4, 8000], [6, 15_000]]
    assert result["train_time_ms"] == 15_000 and result["tokens_per_s"] == round(6 * 512 / 15)
    assert result["compile_time_s"] == 3 * 2 + 100
    log = Path("logs", result["run_id"]).with_suffix(".txt").read_text()
    times = re.findall(r"^step:\d/6 train_time:(\d+)ms", log, re.M)
    assert times == ["2000", "4000", "6000", "8000", "10000", "12000"]
    result = run(shards, "--num_iterations=6", "--val_loss_every=0")
    assert result["train_time_ms"] == 15_000 and now[0] > 1000 + 2 * 12 + 30


def test_mfu_is_relative_to_the_peak_of_all_ranks():
    """512 tokens in 4 ms, 1000 FLOP each, on four ranks of 10^9 FLOP/s each."""
    progress = gpt.Progress(tokens=512, train_time=0.004)
    trainer = SimpleNamespace(rt=make_runtime(world_size=4, peak_flops=1e9), progress=progress)
    measured = gpt.measure_run(trainer, dict(config=dict(derived=dict(flops_per_token=1000))))
    assert measured["mfu"] == 512 * 1000 / 0.004 / 4e9 and measured["tokens_per_s"] == 128_000


def test_the_result_is_the_last_validation_and_not_the_best(shards, here, monkeypatch):
    losses = iter([5.0, 3.0, 4.0])
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: next(losses))
    result = run(shards, "--num_iterations=2", "--val_loss_every=1")
    assert result["final_val_loss"] == 4.0 and [point[1] for point in result["val_points"]] == [5.0, 3.0, 4.0]


def test_the_first_data_are_on_the_clock(shards, here, monkeypatch, now):
    """The time advances only in these functions. Each of four steps has one batch, all read before the last ends."""
    for owner, name, seconds in (
        (gpt, "find_prefix_tokens", 8),  # on the clock
        (gpt, "prefetch", 4),
        (gpt.TrainData, "read_batch", 1),
        (gpt.TrainData, "__init__", 32),  # before it
        (gpt.ValData, "__init__", 16),
        (gpt, "read_vocabulary", 64),
    ):
        advance(monkeypatch, now, owner, name, seconds)
    Path("vocab.json").write_text(json.dumps({"a": 97, "ab": 98}))
    result = run(shards, *PREFIXES, "--num_iterations=4", "--val_loss_every=0")
    assert result["train_time_ms"] == 1000 * (8 + 4 + 4 * 1)
    assert result["data_setup_s"] == 32 + 16 + 64


@pytest.fixture
def received():
    """The signals that the handlers of this test receive, which a run replaces."""
    numbers, note = [], lambda number, _: numbers.append(number)
    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("world_size", [1, 2])
def test_signal_handlers_are_restored_and_the_second_signal_of_one_rank_acts(world_size, received):
    stop = gpt.Stop(make_runtime(world_size=world_size))
    with stop:
        stop.catch_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == 143 and received == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] * (world_size == 1) and stop.requested == 143
    received.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]


# FP8 needs multiples of 16
WIDE = dict(fp8="on", fp8_parts="mlp", num_heads=2, head_dim=64, model_dim=128, num_layers=2)


def find_changes(before: dict, after: dict) -> set[str]:
    return {entry for entry in before if not torch.equal(before[entry], after[entry])}


@pytest.mark.parametrize("changes", [WIDE, dict(preset="smoke_92")], ids=["smoke", "smoke_92"])
def test_a_snapshot_returns_exactly(shards, changes):
    """Values, state, averages and FP8 scales return, and pending gradients and amax values are gone. A sparse n-gram
    table returns with its state, too, or stays, if the snapshot is made without. Thirteen steps, because zeros hold
    back gradients in the first ones, and averages begin late. smoke_92 keeps gradients for its next update
    then."""
    trainer, step, close = make_trainer(shards, **changes)
    partial, snapshot, before = gpt.Snapshot(trainer, with_tables=False), gpt.Snapshot(trainer), copy_rows(trainer)
    for _ in range(13 if "preset" in changes else 4):
        step()
    assert trainer.optimizer.has_no_pending_gradients() == ("preset" not in changes)
    after = copy_rows(trainer)
    kept = {entry for entry in before if entry.startswith("ngram/")}
    unused = {"fp8/scales/0"} if "preset" in changes else set()
    assert find_changes(before, after) == before.keys() - unused and len(kept) == (3 if "preset" in changes else 0)
    partial.restore()
    restored = copy_rows(trainer)
    assert find_changes(before, restored) == kept
    assert all(torch.equal(restored[entry], after[entry]) for entry in kept)
    snapshot.restore()
    assert not find_changes(before, copy_rows(trainer)) and trainer.optimizer.step_count == 0
    for bucket in trainer.optimizer.buckets:
        assert bucket.total is None or not bucket.total.any()
        assert bucket not in trainer.optimizer.tables or not bucket.pieces and not bucket.arriving
    close()


@pytest.mark.parametrize("rule", ["row_adam", "adamw"])
def test_the_warm_up_leaves_no_trace(shards, monkeypatch, rule):
    """Parameters, state and averages return to the last bit, also of an n-gram table. A sparse one, which can be larger
    than the rest, is not copied."""
    groups = {"ngram": dict(rule=rule, betas=(0.5, 0.9))}
    trainer, step, close = make_trainer(shards, preset="smoke_92", warmup_iterations=1, groups=groups)
    train_data, val_data = gpt.TrainData(trainer.cfg, trainer.schedule), gpt.ValData(trainer.cfg)
    before = copy_rows(trainer)
    steps, train_step, copied = [], trainer.train_step, []
    trainer.train_step = lambda *args: steps.append(args) or train_step(*args)
    before_call(monkeypatch, gpt.Snapshot, "restore", lambda snapshot: copied.extend(snapshot.copies))
    trainer.warm_up(train_data, val_data)
    table = trainer.optimizer.bucket_of["ngram"].shard
    assert len(copied) > 10 and (table.shape in {copy.shape for copy in copied}) == (rule == "adamw")
    assert {state.stage for _, state in steps} == {*trainer.schedule.stages}
    assert trainer.optimizer.step_count == 0
    assert not find_changes(before, copy_rows(trainer))
    losses = [step() for _ in range(2)]
    close()
    fresh, step, close = make_trainer(shards, preset="smoke_92", groups=groups)
    assert [step() for _ in range(2)] == losses and not find_changes(copy_rows(fresh), copy_rows(trainer))
    close()


def test_a_snapshot_of_a_tied_model_ties_it_again(shards):
    """After each restore three steps repeat their losses. The model unties with step 4 of 12."""
    trainer, step, close = make_trainer(shards, tie_head="on", untie_frac=0.25, num_layers=2)
    for count, was_tied in ((2, True), (5, False)):
        while trainer.optimizer.step_count < count:
            step()
        snapshot, losses = gpt.Snapshot(trainer), []
        assert (snapshot.step_count, snapshot.is_tied) == (count, was_tied)
        for _ in range(2):
            losses.append(train_steps(trainer, 3, count))
            assert not trainer.model.is_tied
            snapshot.restore()
            assert trainer.model.is_tied == was_tied and trainer.optimizer.step_count == count
            assert (trainer.optimizer.bucket_of["embed"] in trainer.optimizer.updated) == (not was_tied)
            assert all(map(torch.equal, gpt.list_tensors(trainer, True), snapshot.copies))
        assert losses[0] == losses[1]
    close()


def test_a_resumed_run_of_another_length_stays_tied_or_untied(shards):
    """12 steps, of which 6 are tied. From step 4 a run of 6 steps unties in its next step, with the state of the head.
    From step 8 a run of 24 steps has two tables, although it would untie after step 12, and the embedding keeps its
    own state."""
    options = dict(tie_head="on", untie_frac=0.5, num_layers=2)
    trainer, step, close = make_trainer(shards, num_iterations=12, **options)
    for _ in range(4):
        step()
    shorter, step_shorter, close_shorter = load_from(trainer, shards, num_iterations=6, **options)
    model, optimizer = shorter.model, shorter.optimizer
    head, embed = (optimizer.bucket_of[name] for name in ("head.weight", "embed"))
    assert model.is_tied and embed not in optimizer.updated and head.segment == 0
    assert torch.equal(model.embed, model.head.weight) and not any(state.any() for state in embed.state.values())
    before = head.values.clone()
    step_shorter()
    assert not model.is_tied and embed in optimizer.updated and head.segment == 1
    assert torch.equal(embed.values, head.values) and not torch.equal(before, head.values)
    assert model.embed.data_ptr() == embed.values.data_ptr() != head.values.data_ptr()
    assert embed.state.keys() == {"exp_avg", "exp_avg_sq"}
    assert all(torch.equal(embed.state[key], head.state[key]) and embed.state[key].any() for key in embed.state)
    assert all(embed.state[key].data_ptr() != head.state[key].data_ptr() for key in embed.state)
    for count in range(5, 9):
        step()
        assert trainer.model.is_tied == (count < 7)
    longer, step_longer, close_longer = load_from(trainer, shards, num_iterations=24, **options)
    assert not longer.model.is_tied
    before = (longer.model.embed - longer.model.head.weight).norm().item()
    step_longer()
    after = (longer.model.embed - longer.model.head.weight).norm().item()
    assert before > 0.1 and after > before / 2  # the embedding is no copy of the head again
    for end in (close, close_shorter, close_longer):
        end()


def test_a_resumed_run_reads_the_vocabulary_again(shards, here, monkeypatch):
    """The prefix table is not in the checkpoint. It is filled before the first step, and the losses equal
    those without a stop."""
    Path("vocab.json").write_text(json.dumps({"abc"[: 1 + i % 3] + "-" * (i // 3): 97 + i for i in range(26)}))
    found = []
    before_call(monkeypatch, gpt.Trainer, "train_step",
                lambda trainer, *_: found.append(trainer.model.head.prefix_tokens[96:104].tolist()))
    args = [*PREFIXES, "--num_iterations=6", "--checkpoint_every=3", "--val_loss_every=0"]
    whole = run(shards, *args)["val_points"]
    again = run(shards, *args, f"--resume={find_saved(3)}")["val_points"]
    assert [point[:2] for point in again] == [point[:2] for point in whole]
    assert found == [[-1, -1, 97, 98, 97, 98, 99, 100]] * (6 + 3)  # of a, ab, abc, a-, ab-, abc-, a--


def test_averages_act_after_the_last_step_only(shards, here):
    results = [run(shards, f"--averages={name}", "--val_loss_every=11") for name in ("on", "off")]
    assert results[0]["train_points"] == results[1]["train_points"]
    first, second = ([loss for _, loss, _ in result["val_points"]] for result in results)
    assert first[:-1] == second[:-1] and abs(first[-1] - second[-1]) > 1e-3
