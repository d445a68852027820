"""The loop of a run: clock, warm-up, result, signals, snapshots and the state of a resumed run."""

import dataclasses
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import (
    AT_THE_END,
    TINY,
    advance,
    before_call,
    data_args,
    find_saved,
    gpt,
    make_runtime,
    make_trainer,
    run,
    start_prefetcher,
)


def load_from(trainer, shards, **changes):
    """Another trainer with other options, which continues from the state of this one."""
    metadata = dict(progress=dataclasses.asdict(trainer.progress), is_tied=trainer.model.is_tied,
                    optimizer_steps=trainer.optimizer.step_count, files=["rank0.pt"])
    other, step, close = make_trainer(shards, **changes)
    with tempfile.TemporaryDirectory() as folder:
        rows = {entry: rows.clone() for entry, rows in gpt.collect_rows(trainer).items()}
        torch.save(rows, Path(folder, "rank0.pt"))
        Path(folder, "state.json").write_text(json.dumps(metadata))
        gpt.load_state(other, Path(folder), gpt.read_metadata(Path(folder)))
    return other, step, close


# ---- clock, result ------------------------------------------------------------------------------------------------


def test_the_clock_counts_steps_and_saves_and_no_validations(shards, here, monkeypatch, now):
    """A step takes 2 s and a validation 100 s. The blocking part of a save takes 10 s, also before the clock."""
    advance(monkeypatch, now, gpt.Trainer, "train_step", 2.0)
    advance(monkeypatch, now, gpt.Trainer, "validate", 100.0)
    advance(monkeypatch, now, gpt, "collect_rows", 10.0)
    result = run(shards, "--num_iterations=6", "--val_loss_every=2", "--checkpoint_every=3")
    assert [[step, time] for step, _, time in result["val_points"]] == [[0, 0], [2, 4000], [4, 18_000], [6, 32_000]]
    assert result["train_time_ms"] == 32_000 and result["tokens_per_s"] == 6 * 512 // 32
    assert result["compile_time_s"] == 10


def test_mfu_is_relative_to_the_peak_of_all_ranks(shards, here, monkeypatch, now):
    """After its last step the run has four ranks of 10^11 FLOP/s each."""
    train = gpt.Trainer.run

    def train_and_grow(self, *args):
        train(self, *args)
        monkeypatch.setattr(gpt.Runtime, "world_size", 4)

    advance(monkeypatch, now, gpt.Trainer, "train_step", 0.004)
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: 1e11)
    monkeypatch.setattr(gpt.Trainer, "run", train_and_grow)
    result = run(shards, "--num_iterations=3", "--val_loss_every=0")
    flops = 512 / 0.004 * result["config"]["derived"]["flops_per_token"]
    assert result["mfu"] == pytest.approx(flops / 4e11, abs=1e-4) and result["mfu"] > 0.1


def test_the_result_is_the_last_validation_and_not_the_best(shards, here, monkeypatch):
    losses = iter([5.0, 3.0, 4.0])
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: next(losses))
    result = run(shards, "--num_iterations=4", "--val_loss_every=2")
    assert result["final_val_loss"] == 4.0 and [point[1] for point in result["val_points"]] == [5.0, 3.0, 4.0]


def test_a_seed_repeats_and_another_seed_does_not(shards, here):
    results = [run(shards, "--num_iterations=4", f"--seed={seed}") for seed in (0, 1, 0)]
    points = [[point[:2] for point in result["val_points"]] for result in results]
    assert points[0] == points[2] != points[1] and len(points[0]) == 2


def test_a_record_has_log_and_events_under_their_names(shards, here):
    """The events move with the log, and each file keeps its suffix."""
    args = ["--num_iterations=2", "--record=one", "--track=mine", "--telemetry_every=1", "--val_loss_every=0"]
    assert gpt.main([*TINY, *data_args(shards), *args]) == 0
    (folder,) = Path("records/mine").iterdir()
    (result,) = folder.glob("*.json")
    names = {"train_gpt.py", *(result.with_suffix(suffix).name for suffix in (".json", ".txt", ".jsonl"))}
    assert {path.name for path in folder.iterdir()} == names and not list(Path("logs").iterdir())
    events = [json.loads(line)["event"] for line in result.with_suffix(".jsonl").read_text().splitlines()]
    assert events == ["telemetry", "telemetry", "validation"]
    assert "step:2/2 train_time:" in result.with_suffix(".txt").read_text()


def test_the_first_data_are_on_the_clock(shards, here, monkeypatch, now):
    """The time advances only in these functions. Each of four steps has one batch, all read before the last ends."""
    for owner, name, seconds in (
        (gpt, "find_prefix_tokens", 8),  # on the clock
        (gpt.Prefetcher, "__init__", 4),
        (gpt.TrainData, "batch", 1),
        (gpt.TrainData, "__init__", 32),  # before it
        (gpt.ValData, "__init__", 16),
        (gpt, "read_vocabulary", 64),
    ):
        advance(monkeypatch, now, owner, name, seconds)
    Path("vocab.json").write_text(json.dumps({"a": 97, "ab": 98}))
    stages = '--stages=[{"duration":1,"window_long":128,"window_short":64,"prefix_weight":[0.5]}]'
    result = run(shards, stages, "--vocab_file=vocab.json", "--num_iterations=4", AT_THE_END)
    assert result["train_time_ms"] == 1000 * (8 + 4 + 4 * 1)
    assert result["data_setup_s"] == 32 + 16 + 64


def test_telemetry_has_seen_every_length_before_the_clock(shards, here, monkeypatch):
    """Each pair of micro-batch tokens and sequence length is compiled once."""
    warm, timed, clock = set(), set(), []
    before_call(monkeypatch, gpt.Trainer, "run", lambda *args: clock.append(args))

    def note(_, batch, step_inputs):
        num_tokens = len(batch.inputs)
        (timed if clock else warm).add((num_tokens, num_tokens // int(step_inputs.is_sequence_start.sum())))

    before_call(monkeypatch, gpt.Telemetry, "inspect", note)
    preset = ["--preset=smoke_frontier", "--device=cpu", "--telemetry_every=1", "--val_loss_every=0"]
    run(shards, "--num_iterations=6", "--micro_batch_tokens=2048", "--val_tokens=1024", preset=preset)
    assert timed == {(1024, 256), (2048, 512)} and warm >= timed


def test_the_bar_shows_the_last_loss_and_the_speed(shards, here, monkeypatch):
    """The bar of a run with a terminal. On a CPU it shows the loss of each step at once."""
    shown, losses = [], []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(gpt.tqdm, "set_postfix_str", lambda _bar, text, refresh: shown.append(text))
    real_step = gpt.Trainer.train_step

    def train_step(self, *args):
        loss = real_step(self, *args)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    run(shards, "--num_iterations=5", "--val_loss_every=0")
    assert [text.split(",")[0] for text in shown] == [f"loss {loss:.4f}" for loss in losses]
    assert "tokens/s" in shown[0] and len(shown) == 5


# ---- signals ------------------------------------------------------------------------------------------------------


@pytest.fixture
def received():
    """The signals that the handlers of this test receive, which a run replaces. SIGUSR1 is ignored."""
    numbers = []
    handlers = {number: lambda number, _: numbers.append(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers[signal.SIGUSR1] = signal.SIG_IGN
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield numbers
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("world_size", [1, 2])
def test_signal_handlers_are_restored_and_the_second_signal_of_one_rank_acts(world_size, received):
    stop = gpt.Stop(make_runtime(world_size=world_size))
    with stop.catch_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == 143 and received == []
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM] * (world_size == 1) and stop.requested == 143
    received.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]


def test_a_signal_while_the_result_is_written_has_no_effect(shards, here, monkeypatch, received):
    before_call(monkeypatch, gpt.RunLog, "finish", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    result = run(shards, "--num_iterations=2", "--val_loss_every=0")
    assert received == [] and result["val_points"][-1][0] == 2


# ---- state: copies, snapshots, resumed runs ------------------------------------------------------------------------


def test_a_copy_does_not_change_with_its_tensor():
    tensor = torch.arange(5.0)
    copy = gpt.HostCopy(tensor)
    tensor.zero_()
    assert copy.read().tolist() == [0, 1, 2, 3, 4]


def test_a_snapshot_returns_exactly(shards):
    """Values, moments and FP8 scales return, and pending gradients and amax values are gone.

    Four steps, because a zero head and zero output projections hold back gradients in the first ones.
    """
    trainer, step, close = make_trainer(shards, fp8="on", fp8_parts="mlp", num_heads=2, head_dim=64, model_dim=128, num_layers=2)
    snapshot = gpt.Snapshot(trainer)
    before = snapshot.copies
    for _ in range(4):
        step()
    assert snapshot.step_count == 0 and not snapshot.is_tied and trainer.optimizer.step_count == 4
    assert not any(map(torch.equal, gpt.list_tensors(trainer), before))
    snapshot.restore()
    assert trainer.optimizer.step_count == 0 and all(map(torch.equal, gpt.list_tensors(trainer), before))
    assert trainer.scales.amax is None and trainer.scales.work is None
    assert trainer.optimizer.has_no_pending_gradients()
    close()


def test_a_snapshot_of_a_tied_model_ties_it_again(shards):
    """A snapshot of an untied model leaves it untied. After each restore three steps repeat their losses."""
    trainer, step, close = make_trainer(shards, tie_head="on", untie_frac=0.25)  # it unties with step 4 of 12
    for count, was_tied in ((2, True), (5, False)):
        while trainer.optimizer.step_count < count:
            step()
        snapshot, losses = gpt.Snapshot(trainer), []
        assert (snapshot.step_count, snapshot.is_tied) == (count, was_tied)
        for _ in range(2):
            batches = start_prefetcher(trainer)
            losses.append([trainer.train_step(batches, trainer.schedule.at(count)).item() for _ in range(3)])
            batches.executor.shutdown(cancel_futures=True)
            assert not trainer.model.is_tied
            snapshot.restore()
            assert trainer.model.is_tied == was_tied and trainer.optimizer.step_count == count
            assert (trainer.optimizer.bucket_of["embed"] in trainer.optimizer.updated) == (not was_tied)
            assert all(map(torch.equal, gpt.list_tensors(trainer), snapshot.copies))
        assert losses[0] == losses[1]
    close()


def test_two_snapshots_of_a_sharded_table_return_exactly(shards):
    """In the recipe with all mechanisms. The later one first, then the earlier one, which frees the updates after it.

    After each restore the steps repeat their losses, and the table its rows, their state and the averages.
    """
    trainer, step, close = make_trainer(shards, preset="smoke_frontier", untie_frac=1.0)
    close()
    (table,) = trainer.optimizer.tables

    def train(first, last):
        batches = gpt.Prefetcher(gpt.TrainData(trainer.cfg, trainer.schedule).batches(trainer.rt, first, last),
                                 trainer.rt.device)
        losses = [trainer.train_step(batches, trainer.schedule.at(step)).item() for step in range(first, last)]
        batches.executor.shutdown(cancel_futures=True)
        return losses, copy()

    def copy():
        trainer.optimizer.finish()
        return [tensor.clone() for tensor in (*gpt.list_tensors(trainer), table.shard, *table.state.values())]

    train(0, 2)
    early, state_early = gpt.Snapshot(trainer), copy()
    losses_early, state_late = train(2, 8)
    late = gpt.Snapshot(trainer)
    losses_late, end = train(8, 14)
    assert any("average0" in bucket.state for bucket in trainer.optimizer.buckets)
    for snapshot, state, first, last, losses, after in (
        (late, state_late, 8, 14, losses_late, end),
        (early, state_early, 2, 8, losses_early, state_late),
    ):
        snapshot.restore()
        assert all(map(torch.equal, copy(), state)) and trainer.optimizer.step_count == first
        again, made = train(first, last)
        assert again == losses and all(map(torch.equal, made, after))
    late = gpt.Snapshot(trainer)
    late.forget_earlier()
    assert not table.undo and table.first_undo == late.marks[0]
    table.forget(None)
    assert table.undo is None


def test_a_resumed_run_of_another_length_stays_tied_or_untied(shards):
    """12 steps, of which 6 are tied.

    From step 4 a run of 6 steps unties in its next step, with the state of the head. From step 8 a run of 24
    steps has two tables, although it would untie after step 12, and the embedding keeps its own state.
    """
    options = dict(tie_head="on", untie_frac=0.5)
    trainer, step, close = make_trainer(shards, num_iterations=12, **options)
    for _ in range(4):
        step()
    shorter, step_shorter, close_shorter = load_from(trainer, shards, num_iterations=6, **options)
    model, optimizer = shorter.model, shorter.optimizer
    head, embed = (optimizer.bucket_of[name] for name in ("head.weight", "embed"))
    assert model.is_tied and embed not in optimizer.updated and head.first_reader == 0
    assert torch.equal(model.embed, model.head.weight) and not any(state.any() for state in embed.state.values())
    before = head.values.clone()
    step_shorter()
    assert not model.is_tied and embed in optimizer.updated and head.first_reader == 2
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


def test_a_lowered_precision_stays_lowered(shards):
    """A resumed run lowers the precisions that the guard gave up. The next action lowers the next precision."""
    wide = dict(fp8="on", fp8_parts="mlp", num_heads=2, head_dim=64, model_dim=128, num_layers=2)
    trainer, _, close = make_trainer(shards, **wide)
    trainer.model.use_fp8(frozenset(gpt.FP8_FORMS))
    assert gpt.lower_precision(trainer) == "the head no longer uses FP8" and trainer.model.fp8 == {"fp8_mlp", "fp8_qkv"}
    assert trainer.model.ops.head_loss is gpt.fused_head_loss  # without scales
    other, _, close_other = load_from(trainer, shards, **wide)
    assert other.progress.lowered == ["fp8_head"] and other.model.fp8 == {"fp8_mlp"}
    assert gpt.lower_precision(trainer) == "the linears no longer use FP8"
    lowest, _, close_lowest = load_from(trainer, shards, **wide)
    assert lowest.progress.lowered == ["fp8_head", "fp8"] and lowest.model.fp8 == frozenset()
    other.rt = other.optimizer.rt = make_runtime(dtype=torch.bfloat16)
    other.model.use_fp8(frozenset(gpt.FP8_FORMS))
    said = [gpt.lower_precision(other, ["fp8_head"]), *(gpt.lower_precision(other) for _ in range(3))]
    assert said == ["the head no longer uses FP8", "the linears no longer use FP8", "activations become float32", ""]
    assert other.progress.lowered == ["fp8_head", "fp8", "bfloat16"] and other.model.fp8 == frozenset()
    assert other.rt.dtype == other.model.dtype == torch.float32
    for end in (close, close_other, close_lowest):
        end()


def test_a_resumed_run_reads_the_vocabulary_again(shards, here):
    """The prefix table is not in the checkpoint, and the losses equal those without a stop."""
    Path("vocab.json").write_text(json.dumps({"abc"[: 1 + i % 3] + "-" * (i // 3): 97 + i for i in range(26)}))
    stages = '--stages=[{"duration":1,"window_long":128,"window_short":64,"prefix_weight":[0.5]}]'
    args = [stages, "--vocab_file=vocab.json", "--num_iterations=6", "--checkpoint_every=3"]
    whole = run(shards, *args)["val_points"]
    again = run(shards, *args, f"--resume={find_saved(3)}")["val_points"]
    assert [point[:2] for point in again] == [point[:2] for point in whole]
    cfg = gpt.Config(vocab_file="vocab.json", vocab_size=257)
    prefixes = gpt.find_prefix_tokens(gpt.read_vocabulary(cfg), cfg.padded_vocab_size)
    assert prefixes[96:104].tolist() == [-1, -1, 97, 98, 97, 98, 99, 100]  # of a, ab, abc, a-, ab-, abc-, a--
