"""Connections between parts, which neither unit tests nor comparisons of whole runs can see."""

import datetime
import json
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import BOS, data_args, gpt, make_runtime, smoke_config
from run_ranks import run_ranks

TINY = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=512", "--warmup_iterations=0"]
TINY += ["--val_tokens=1024"]
ATTENTION_FORMS = [name for name, row in gpt.list_fast_forms().items() if "attention" in row.fast]
CPU_FORMS = frozenset(
    {"rms_norm", "norm_rotate", "cpu_attention", "compose_heads", "head_loss", "sparse_embedding", "fused_adamw"}
)


@pytest.fixture(name="here")
def enter_folder(tmp_path, monkeypatch):
    """A new folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(name="now")
def replace_clock(monkeypatch):
    """The time in seconds, in a list. Only the test advances it."""
    seconds = [1000.0]
    monkeypatch.setattr(gpt.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: 1e9)
    return seconds


def before_call(monkeypatch, owner, name, do) -> None:
    """Call do(*arguments) before the real function."""
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        do(*args)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def advance(monkeypatch, now, owner, name, seconds) -> None:
    """Advance the time by these seconds in each call of a function."""
    before_call(monkeypatch, owner, name, lambda *_: now.__setitem__(0, now[0] + seconds))


def run(shards, *args, preset=TINY) -> dict:
    """A run in this process. Returns its json."""
    before = set(Path("logs").glob("*.json"))
    assert gpt.main([*preset, *data_args(shards), *args]) == 0
    (path,) = set(Path("logs").glob("*.json")) - before
    return json.loads(path.read_text())


def find_saved(step: int) -> Path:
    """The only checkpoint of a step in this folder."""
    (path,) = Path().glob(f"checkpoints/*/step_{step:06d}.pt")
    return path


def make_trainer(shards, **changes):
    """A new trainer, a function that makes one step, and a function that ends its thread."""
    cfg = smoke_config(shards, tokens_per_step=1024, micro_batch_tokens=512, **changes)
    fp8 = frozenset({"fp8_mlp"} if cfg.fp8_mlp == "on" else ())
    trainer = gpt.Trainer(cfg, make_runtime(fast=CPU_FORMS, fp8=fp8))
    batches = trainer_batches(trainer)

    def step():
        loss = trainer.train_step(batches, trainer.schedule.at(trainer.progress.step))
        trainer.progress.step += 1
        return loss

    return trainer, step, lambda: batches.executor.shutdown(cancel_futures=True)


def trainer_batches(trainer):
    data = gpt.TrainData(trainer.cfg, trainer.schedule)
    return gpt.Prefetcher(
        data.batches(trainer.rt, 0, trainer.cfg.num_iterations), trainer.rt.device
    )


def save_state(trainer) -> tuple[gpt.Saved, dict]:
    """(checkpoint of a trainer as it is read again, metadata of its run)."""
    run = gpt.describe_run(trainer.cfg, trainer.rt, [])
    state, copies = gpt.collect_state(trainer)
    metadata = json.loads(json.dumps({**run, **state}))
    return gpt.Saved(Path("x.pt"), metadata, {name: copy.read() for name, copy in copies.items()}), run


def load_from(trainer, shards, **changes):
    """Another trainer with other options, which continues from the state of this one."""
    other, step, close = make_trainer(shards, **changes)
    gpt.load_state(other, *save_state(trainer))
    return other, step, close


# ---- clock, result ----------------------------------------------------------------------------------


def test_the_clock_counts_steps_and_saves_and_no_validations(shards, here, monkeypatch, now):
    """A step takes 2 s and a validation 100 s. The blocking part of a save takes 10 s, also before the clock."""
    advance(monkeypatch, now, gpt.Trainer, "train_step", 2.0)
    advance(monkeypatch, now, gpt.Trainer, "validate", 100.0)
    advance(monkeypatch, now, gpt, "collect_state", 10.0)
    result = run(shards, "--num_iterations=6", "--val_loss_every=2", "--checkpoint_every=3")
    assert [[step, time] for step, _, time in result["val_points"]] == [[0, 0], [2, 4000], [4, 18_000], [6, 32_000]]
    assert result["train_time_ms"] == 32_000 and result["tokens_per_s"] == 6 * 512 // 32
    assert result["compile_time_s"] == 10


def test_mfu_is_relative_to_the_peak_of_all_ranks(shards, here, monkeypatch, now, capsys):
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
    assert f"{100 * result['mfu']:.1f} % of 0.40 TFLOP/s" in capsys.readouterr().out


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


# ---- signals ----------------------------------------------------------------------------------------


@pytest.fixture
def received():
    """The signals that the handlers of this test receive, which a run replaces. SIGHUP is ignored."""
    numbers = []
    handlers = {number: lambda number, _: numbers.append(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers[signal.SIGHUP] = signal.SIG_IGN
    old = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield numbers
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("world_size", [1, 2])
def test_signal_handlers_are_restored_on_one_rank_and_stay_on_several(world_size, received):
    stop = gpt.Stop(make_runtime(world_size=world_size))
    with stop.catch_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == 143 and received == []
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    stop.requested = 0
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    if world_size == 1:
        assert received == [signal.SIGTERM, signal.SIGINT] and stop.requested == 0
    else:
        assert received == [] and stop.requested == 143


def test_a_signal_while_the_result_is_written_has_no_effect(shards, here, monkeypatch, received):
    before_call(monkeypatch, gpt.RunLog, "finish", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    result = run(shards, "--num_iterations=2", "--val_loss_every=0")
    assert received == [] and result["val_points"][-1][0] == 2


# ---- compiler, timeout ------------------------------------------------------------------------------


def test_the_compiler_mode_is_passed_on(monkeypatch):
    """From the option to torch.compile()."""
    calls = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: calls.append(options) or fn)
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: 1e9)
    cfg = smoke_config(compile="on", compile_mode="max-autotune-no-cudagraphs")
    rt = gpt.choose_precision(cfg, make_runtime())
    calls.clear()
    rt.compile(len)
    assert calls == [dict(dynamic=False, mode="max-autotune-no-cudagraphs")]


def test_the_timeout_is_set_for_both_groups_of_a_step():
    """The group of gradients and the group of all-gathers. The gloo group keeps its long timeout."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        groups = [dist.group.WORLD, *(dist.new_group(timeout=gpt.LONG_TIMEOUT) for _ in range(2))]
        gpt.Comm(0, 2, *groups[1:]).set_timeout(datetime.timedelta(seconds=7))
        timeouts = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
    finally:
        dist.destroy_process_group()
    assert [timeout.total_seconds() for timeout in timeouts] == [7, 3600, 7]


# ---- guard ------------------------------------------------------------------------------------------


def test_the_guard_checks_validation_losses(shards, here, monkeypatch, capsys):
    losses = iter([6.0, 5.0, 9.0, 4.0])
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: next(losses))
    run(shards, "--num_iterations=6", "--val_loss_every=2", "--guard=on")
    out = capsys.readouterr().out
    assert out.count("guard: ") == 1
    assert "guard: step 4: validation loss 9.0000 after 5.0000: weights of step 0" in out


@pytest.mark.parametrize("guard", ["on", "off"])
def test_a_last_validation_loss_that_is_not_finite_is_no_result(shards, here, monkeypatch, capsys, guard):
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: math.nan)
    args = ["--num_iterations=2", "--val_loss_every=0", f"--guard={guard}"]
    assert gpt.main([*TINY, *data_args(shards), *args]) == 1
    assert "the validation loss of step 2 is nan: " in capsys.readouterr().err and not list(Path("logs").glob("*.json"))


def test_the_guard_checks_a_step_before_it_is_saved(shards, here, monkeypatch, capsys):
    """A NaN in a gradient of the saved step. Otherwise the guard checks one step late."""
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        if self.progress.step == 5:
            param = self.model.blocks[1].mlp.up_down
            param.grad = torch.full_like(param, math.nan)
        return real(self, *args)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    run(shards, "--num_iterations=8", "--checkpoint_every=6", "--guard=on")
    assert "guard: step 6: gradient norm is nan" in capsys.readouterr().out
    for step in (6, 8):
        _, tensors = gpt.read_checkpoint(find_saved(step))
        assert [name for name, tensor in tensors.items() if not tensor.isfinite().all()] == []


# ---- copies, random state, tables -------------------------------------------------------------------


def test_a_copy_does_not_change_with_its_tensor():
    tensor = torch.arange(5.0)
    copy = gpt.HostCopy(tensor)
    tensor.zero_()
    assert copy.read().tolist() == [0, 1, 2, 3, 4]


def test_a_snapshot_returns_exactly(shards):
    """Values, moments and FP8 scales return, and pending gradients and amax values are gone.

    Three steps, because a zero head and zero output projections hold back gradients in the first ones.
    """
    trainer, step, close = make_trainer(shards, fp8_mlp="on", num_heads=2, head_dim=64, model_dim=128, num_layers=2)
    count, is_tied, before = snapshot = trainer.snapshot()
    for _ in range(3):
        step()
    assert count == 0 and not is_tied and trainer.optimizer.step_count == 3
    assert not any(map(torch.equal, trainer.tensors(), before))
    trainer.restore(snapshot)
    assert trainer.optimizer.step_count == 0 and all(map(torch.equal, trainer.tensors(), before))
    assert trainer.scales.reduced is None and not any(trainer.scales.amax)
    assert trainer.optimizer.has_no_pending_gradients()
    close()


def test_a_snapshot_of_a_tied_model_ties_it_again(shards):
    """A snapshot of an untied model leaves it untied. After each restore three steps repeat their losses."""
    trainer, step, close = make_trainer(shards, tie_head="on", untie_frac=0.25)  # it unties with step 4 of 12
    for count, was_tied in ((2, True), (5, False)):
        while trainer.optimizer.step_count < count:
            step()
        snapshot, losses = trainer.snapshot(), []
        assert snapshot[:2] == (count, was_tied)
        for _ in range(2):
            batches = trainer_batches(trainer)
            losses.append([trainer.train_step(batches, trainer.schedule.at(count)).item() for _ in range(3)])
            batches.executor.shutdown(cancel_futures=True)
            assert not trainer.model.is_tied
            trainer.restore(snapshot)
            assert trainer.model.is_tied == was_tied and trainer.optimizer.step_count == count
            assert (trainer.optimizer.bucket_of["embed"] in trainer.optimizer.updated) == (not was_tied)
            assert all(map(torch.equal, trainer.tensors(), snapshot[2]))
        assert losses[0] == losses[1]
    close()


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
    wide = dict(fp8_mlp="on", num_heads=2, head_dim=64, model_dim=128, num_layers=2)
    trainer, _, close = make_trainer(shards, **wide)
    trainer.model.use_fp8(frozenset(gpt.FP8_FORMS))
    assert gpt.lower_precision(trainer) == "the head leaves FP8" and trainer.model.fp8 == {"fp8_linear", "fp8_mlp"}
    assert trainer.model.ops.head_loss is gpt.fused_head_loss  # without scales
    other, _, close_other = load_from(trainer, shards, **wide)
    assert other.progress.lowered == ["fp8_head"] and other.model.fp8 == {"fp8_mlp"}
    assert gpt.lower_precision(trainer) == "the linears leave FP8"
    lowest, _, close_lowest = load_from(trainer, shards, **wide)
    assert lowest.progress.lowered == ["fp8_head", "fp8"] and lowest.model.fp8 == frozenset()
    other.rt = other.optimizer.rt = make_runtime(dtype=torch.bfloat16)
    other.model.use_fp8(frozenset(gpt.FP8_FORMS))
    said = [gpt.lower_precision(other, ["fp8_head"]), *(gpt.lower_precision(other) for _ in range(3))]
    assert said == ["the head leaves FP8", "the linears leave FP8", "activations become float32", ""]
    assert other.progress.lowered == ["fp8_head", "fp8", "bfloat16"] and other.model.fp8 == frozenset()
    assert other.rt.dtype == other.model.dtype == torch.float32
    for end in (close, close_other, close_lowest):
        end()


def test_the_random_state_is_restored(shards):
    trainer, step, close = make_trainer(shards, num_iterations=2)
    step()
    saved = save_state(trainer)
    expected = torch.rand(3)
    torch.manual_seed(99)
    gpt.load_state(trainer, *saved)
    assert torch.equal(torch.rand(3), expected)
    close()


def test_a_resumed_run_reads_the_vocabulary_again(shards, here):
    """The prefix table is not in the checkpoint, and the losses equal those without a stop."""
    Path("vocab.json").write_text(json.dumps({"abc"[: 1 + i % 3] + "-" * (i // 3): 97 + i for i in range(26)}))
    stages = '--stages=[{"duration":1,"window_long":128,"window_short":64,"prefix_weight":"0.5"}]'
    args = [stages, "--vocab_file=vocab.json", "--num_iterations=6", "--checkpoint_every=3"]
    whole = run(shards, *args)["val_points"]
    again = run(shards, *args, f"--resume={find_saved(3)}", "--checkpoint_dir=other")["val_points"]
    assert [point[:2] for point in again] == [point[:2] for point in whole]
    cfg = gpt.make_config({"preset": "smoke", "device": "cpu", "vocab_file": "vocab.json"})
    prefixes = gpt.find_prefix_tokens(gpt.read_vocabulary(cfg), cfg.padded_vocab_size)
    assert prefixes[96:104].tolist() == [-1, -1, 97, 98, 97, 98, 99, 100]  # of a, ab, abc, a-, ab-, abc-, a--


# ---- masks ------------------------------------------------------------------------------------------


def test_masks_of_paired_heads_see_two_rows_of_every_token(monkeypatch):
    """Every form of attention. Each token has two positions, and the window counts positions."""
    layers = (gpt.LayerSpec(paired=True), gpt.LayerSpec("long"))
    cfg = smoke_config(num_layers=2, layers=layers, seq_len=256)
    doc_ids, state = torch.arange(256) // 100, gpt.Schedule(cfg).at(0)
    (long, short), rows = state.windows, torch.arange(512)
    masks, operations = {}, {}
    for form in ("plain", *ATTENTION_FORMS):
        rt = make_runtime(fast=frozenset({form} - {"plain"}))
        made, model = {}, gpt.GPT(cfg, rt)

        def note(block, x, acts, s, mask, *_, made=made):
            made[block.spec.attention, block.spec.paired] = mask
            return x

        with monkeypatch.context() as patch:
            patch.setattr(gpt.Block, "forward", note)
            model.run_layers(doc_ids.int(), doc_ids, gpt.make_step_inputs(state, 256, 256, rt, cfg))
        assert set(made) == {("short", True), ("long", False)}
        masks[form], operations[form] = made, model.ops
    assert len({ops.attention for ops in operations.values()}) == 4
    for (kind, paired), window, ids in (
        (("short", True), short, doc_ids.repeat_interleave(2)),
        (("long", False), long, doc_ids),
    ):
        at = rows[: len(ids)]
        expected = (at <= at[:, None]) & (at[:, None] - at <= window) & (ids == ids[:, None])
        assert torch.equal(masks["plain"][kind, paired], expected)
        flex = masks["flex_attention"][kind, paired]
        assert torch.equal(flex.mask_mod(0, 0, at[:, None], at), expected)
        assert flex.shape[-2:] == (len(ids), len(ids))
        q, k = torch.randn(2, len(ids), 1, 8)
        scores = (q[:, 0] @ k[:, 0].T).masked_fill(~expected, -math.inf).softmax(-1)
        v = torch.randn(len(ids), 1, 8)
        for form in ("plain", "cpu_attention", "block_attention"):
            y = operations[form].attention(q, k, v, masks[form][kind, paired])
            assert torch.allclose(y[:, 0], scores @ v[:, 0], atol=1e-5), form


# ---- scales of FP8 ----------------------------------------------------------------------------------


def test_a_delayed_scale_is_the_largest_of_all_micro_batches(shards):
    """The first micro-batch of a step has the larger amax. The next step begins at zero."""
    trainer, step, close = make_trainer(shards, fp8_mlp="on", num_heads=2, head_dim=64, model_dim=128, num_layers=2)
    (module,), seen = [m for m in trainer.model.modules() if isinstance(m, gpt.DelayedScaling)], []
    sizes = iter([5.0, 3.0, 2.0, 4.0])

    def resize(_, args):
        seen.append(args[0].max())
        return args[0].clamp(max=0) + next(sizes)

    module.register_forward_pre_hook(resize)
    for expected in (5.0, 4.0):
        step()
        trainer.scales.finish()
        assert module.scale.item() == pytest.approx(expected * 1.8 / 448, rel=1e-6)
    close()
    assert len(seen) == 4 and module.amax == 0


def test_a_delayed_scale_is_the_largest_of_all_ranks(tmp_path):
    ends, out, errors = run_ranks("scales", 2, tmp_path / "scales.pt")
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    assert torch.load(tmp_path / "scales.pt", weights_only=True).tolist() == pytest.approx([7 * 1.8 / 448] * 2)


# ---- files during training --------------------------------------------------------------------------


def test_a_shard_that_is_cut_short_during_training(tmp_path):
    """Reading a lost part is an error. A memory map would end the process. A new file of this name has no effect."""
    tokens = np.arange(5000, dtype=np.uint16) % 256
    tokens[::100] = BOS
    path = tmp_path / "train_0.bin"
    gpt.write_shard(path, tokens, 257, BOS)
    shard = gpt.open_shard(str(path), 257)
    gpt.write_shard(path, tokens[:1000], 257, BOS)
    assert np.array_equal(shard.read(4000, 5000), tokens[4000:])
    shard = gpt.open_shard(str(path), 257)
    with open(path, "r+b") as file:
        file.truncate(1024 + 2 * 600)
    assert np.array_equal(shard.read(100, 600), tokens[100:600])
    with pytest.raises(gpt.RunError, match="train_0.bin was cut short during this run, before token 601"):
        shard.read(500, 601)


def test_a_run_whose_shard_is_cut_short_ends_with_a_line(shards, here, monkeypatch, capsys):
    path = here / "train_0.bin"
    path.write_bytes((shards / "train_1.bin").read_bytes())
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        if self.progress.step == 3:
            with open(path, "r+b") as file:
                file.truncate(2000)
        return real(self, *args)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    args = [f"--train_files={path}", f"--val_files={shards}/val_*.bin", "--num_iterations=30"]
    assert gpt.main([*TINY, *args]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "train_0.bin was cut short" in err


def test_the_bar_shows_the_last_loss_and_the_speed(shards, here, monkeypatch):
    """The bar of a run with a terminal. On a CPU it shows the loss of each step at once."""
    shown, losses = [], []
    monkeypatch.setattr(gpt, "has_progress_bar", lambda: True)
    monkeypatch.setattr(gpt.tqdm, "set_postfix_str", lambda _bar, text, refresh: shown.append(text))
    monkeypatch.setattr(gpt.RunLog, "BAR_SECONDS", 0.0)
    real_step = gpt.Trainer.train_step

    def train_step(self, *args):
        loss = real_step(self, *args)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    run(shards, "--num_iterations=5", "--val_loss_every=0")
    assert [text.split(",")[0] for text in shown] == [f"loss {loss:.4f}" for loss in losses]
    assert "tok/s" in shown[0] and len(shown) == 5
