"""The guard: faults in real runs, which recover and end within 2 % of the loss without a fault."""

import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, data_args, find_saved, gpt, make_runtime, run, slow_but, smoke_config
from run_ranks import run_ranks

sys.path.insert(0, str(ROOT / "data"))
import text as text_tool  # noqa: E402

ARGS = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=512", "--num_iterations=300"]
ARGS += ["--val_loss_every=0", "--guard=on"]
FAULT = 102  # the step of the fault, counted from 1


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Real text. On the progressions of other tests the loss is nearly 0, and its noise is larger than its mean."""
    folder = tmp_path_factory.mktemp("text")
    files = itertools.islice(text_tool.read_torch_source(), 0, None, 8)
    encoding = text_tool.encode_bytes, gpt.BYTE_VOCAB_SIZE, gpt.BYTE_BOS
    text_tool.write_corpus(files, folder, "every eighth file", *encoding)
    return folder


def read_run() -> tuple[float, list[dict]]:
    """Final loss, and the guard's events, of the newest run."""
    path = max(Path("logs").glob("*.json"), key=lambda p: p.stat().st_mtime)
    events = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    return json.loads(path.read_text())["final_val_loss"], [e for e in events if e["event"] == "guard"]


def train(text, *args, status: int = 0) -> tuple[float, list[dict]]:
    assert gpt.main([*ARGS, *data_args(text), *args]) == status
    return read_run() if status == 0 else (0.0, [])


@pytest.fixture(scope="module")
def clean(text, tmp_path_factory):
    """A function from options to the final loss without a fault."""
    losses = {}

    def run_clean(*args):
        if args not in losses:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("clean"))
                losses[args], events = train(text, *args)
                assert events == []
        return losses[args]

    return run_clean


def in_step(first: int, last: int | None = None):
    """Whether a trainer is in one of these steps. Steps of the warm-up do not count."""

    def is_in(trainer) -> bool:
        return trainer.optimizer.timer and first <= trainer.progress.step + 1 <= (last or first)

    return is_in


def spoil(param, value):
    """Set one entry of a gradient. Backward adds to it."""
    param.grad = torch.zeros_like(param)
    param.grad[0, 0].fill_(value)


def spoil_gradient(patch, value=float("nan")):
    def train_step(self, *args, real_step=gpt.Trainer.train_step):
        if in_step(FAULT)(self):
            spoil(self.model.blocks[1].mlp.up_down, value)
        return real_step(self, *args)

    patch.setattr(gpt.Trainer, "train_step", train_step)


def poison_batch(patch):
    real = gpt.TrainData.batch

    def batch(self, indices, *args):
        made = real(self, indices, *args)
        if indices.start == FAULT - 1 and len(self.sequences) == 300:  # one packed sequence a step
            noise = np.random.default_rng(0)
            return gpt.make_batch(noise.integers(0, 256, (1, len(made.inputs) + 1)), gpt.BYTE_BOS)
        return made

    patch.setattr(gpt.TrainData, "batch", batch)


def raise_learning_rate(patch):
    def at(self, step, real=gpt.Schedule.at):
        state, factor = real(self, step), 100 if step + 1 == FAULT else 1
        return state._replace(lr={name: lr * factor for name, lr in state.lr.items()})

    patch.setattr(gpt.Schedule, "at", at)


def overflow_fp8(patch):
    """Activations of the head are 1000 times too large for their static scale, and they do not saturate."""
    real = gpt.quantize_fp8

    def train_step(self, *args, real_step=gpt.Trainer.train_step):
        if in_step(FAULT)(self):
            patch.setattr(gpt, "quantize_fp8", lambda x, dtype, scale=None: (
                (1000 * x / scale).to(dtype), torch.tensor(scale)))
        loss = real_step(self, *args)
        patch.setattr(gpt, "quantize_fp8", real)
        return loss

    patch.setattr(gpt.Trainer, "train_step", train_step)


FAULTS = {  # name: (options, fault, pattern of the fault in the event, lowered precision)
    "a NaN in a gradient": ([], spoil_gradient, r"gradient norm is nan", ""),
    "an infinite gradient": ([], lambda p: spoil_gradient(p, 1e30), r"gradient norm is inf", ""),
    "a gradient too large": ([], lambda p: spoil_gradient(p, 1e5), r"gradient norm \S+ exceeds", ""),
    "a poisoned batch": ([], poison_batch, r"loss \S+ exceeds", ""),
    "a learning rate 100 times too high": ([], raise_learning_rate, r"loss \S+ exceeds", ""),
    "FP8 overflow": (["--fp8_head=on"], overflow_fp8, r"loss \S+ exceeds", "the head no longer uses FP8, "),
    "a NaN in bfloat16": (["--dtype=bfloat16"], spoil_gradient, "is nan", "activations become float32, "),
}


@pytest.mark.parametrize("name", slow_but(FAULTS, "a NaN in a gradient"))
def test_the_run_recovers(text, clean, tmp_path, monkeypatch, capsys, name):
    options, spoil, noticed, done = FAULTS[name]
    expected = clean(*options)
    monkeypatch.chdir(tmp_path)
    spoil(monkeypatch)
    loss, (event, *others) = train(text, *options)
    assert abs(loss / expected - 1) < 0.02 and others == []
    assert FAULT <= event["step"] <= FAULT + 2 and re.search(noticed, event["fault"])
    assert (
        event["measures"]
        == f"restored weights of step 90, {done}learning rates times 0.5 until step {event['step'] + 21}"
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("guard: ")]
    assert lines == [f"guard: step {event['step']}: {event['fault']}: {event['measures']}"]


@pytest.mark.slow
def test_without_a_fault_it_changes_nothing(text, clean, tmp_path, monkeypatch):
    expected = clean()
    monkeypatch.chdir(tmp_path)
    assert gpt.main([*ARGS, *data_args(text), "--guard=off", "--num_iterations=300"]) == 0
    (path,) = Path("logs").glob("*.json")
    assert json.loads(path.read_text())["final_val_loss"] == expected and not list(
        Path("logs").glob("*.jsonl")
    )


@pytest.mark.slow
def test_one_rank_of_two_sends_a_nan(text, clean, tmp_path, monkeypatch):
    """Both restore one step."""
    options = ["--tokens_per_step=1024"]
    expected = clean(*options)
    monkeypatch.chdir(tmp_path)
    args = [*options, "--warmup_iterations=1"]
    ends, _, errors = run_ranks("fail", 2, "nan", f"1@{FAULT + 3}", *ARGS, *data_args(text), *args)
    assert [status for status, _ in ends] == [0, 0], errors[-2000:]
    loss, (event,) = read_run()
    assert event["fault"] == "gradient norm is nan" and event["step"] == FAULT
    assert event["measures"].startswith("restored weights of step 90, learning rates times 0.5 until step 123")
    assert abs(loss / expected - 1) < 0.02


def test_the_guard_gives_up_with_a_checkpoint(text, tmp_path, monkeypatch, capsys):
    """A NaN in every step from 30 on causes six actions, each one step late, and exit status 3."""
    monkeypatch.chdir(tmp_path)
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        loss = real(self, *args)
        return loss * float("nan") if self.progress.step >= 30 else loss

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    train(text, status=3)
    out, errors = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.startswith("guard: ")]
    assert len(lines) == 7 and "loss is nan" in lines[0]
    assert lines[6].endswith("restored weights of step 20, the run stops, because 6 rollbacks did not help")
    assert "learning rates times 0.015625 " in lines[5]  # 2^-6
    found = re.search(
        r"stopped by the guard after step (\d+) of 300: lower the learning rates, and continue with: python .*step_(\d+).pt$", errors
    )
    metadata, tensors = gpt.read_checkpoint(find_saved(int(found[1])))
    assert metadata["progress"]["num_actions"] == 7 and metadata["progress"]["actions_in_a_row"] == 0
    assert int(found[1]) == int(found[2]) and all(bool(t.isfinite().all()) for t in tensors.values())


def test_snapshots_continue_after_a_rollback_if_adam_skips_steps(text, tmp_path, monkeypatch):
    """Adam updates every third step, and snapshots are made after its updates, also after a rollback."""
    monkeypatch.chdir(tmp_path)
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        loss = real(self, *args)
        return loss * float("nan") if self.progress.step in (41, 81) else loss

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    every = [f"--{group}_every=3" for group in ("embed", "value_embed", "head", "scalar")]
    _, events = train(text, *every, "--num_iterations=90", "--checkpoint_every=90")
    went_back = [int(re.match(r"restored weights of step (\d+)", event["measures"])[1]) for event in events]
    assert [event["step"] for event in events] == [42, 82]
    assert 30 <= went_back[0] <= 37 and 70 <= went_back[1] <= 77
    assert find_saved(90).exists()


def make_guard(text):
    trainer = gpt.Trainer(smoke_config(text, guard="on"), make_runtime())
    log = gpt.RunLog(trainer.cfg, trainer.rt, gpt.describe_run(trainer.cfg, trainer.rt, []))
    return gpt.Guard(trainer, log, gpt.Stop(trainer.rt)), trainer


def test_the_learning_rate_is_scaled_until_a_step(text):
    """Steps of Adam and of matrices are proportional to their learning rates. The scale ends at step 5."""
    changes = {}
    for step, scale in ((4, 1.0), (4, 0.5), (5, 0.5)):
        _, trainer = make_guard(text)
        trainer.progress = gpt.Progress(step=step, lr_scale=scale, lr_scale_until=5)
        weights = dict(head=trainer.model.head.weight, matrix=trainer.model.blocks[1].mlp.up_down)
        weights["attention"] = trainer.model.blocks[1].attention.v_proj
        weights["head"].data.normal_()  # a zero head gives no gradients to the layers
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        data = gpt.TrainData(trainer.cfg, trainer.schedule)
        batches = gpt.Prefetcher(data.batches(trainer.rt, 0, 1), trainer.rt.device)
        trainer.train_step(batches, trainer.schedule.at(0))
        batches.executor.shutdown(cancel_futures=True)
        changes[step, scale] = {name: weight.detach() - before[name] for name, weight in weights.items()}
    for name, change in changes[4, 1.0].items():
        assert change.abs().max() > 1e-4, name
        assert torch.allclose(changes[4, 0.5][name], change / 2, atol=1e-6), name
        assert torch.equal(changes[5, 0.5][name], change), name


def test_a_validation_loss_that_rises(text, capsys):
    """5 % above the best loss is allowed. After more the guard restores the oldest snapshot."""
    guard, trainer = make_guard(text)
    first = trainer.model.embed.detach().clone()
    trainer.progress.step = 10
    trainer.model.embed.data.add_(1)
    guard.snapshots.append((10, gpt.Snapshot(trainer)))
    trainer.progress.step = 30
    guard.check_validation(30, 2.0)
    guard.check_validation(30, 2.0999)
    assert capsys.readouterr().out == "" and not torch.equal(trainer.model.embed, first)
    guard.check_validation(30, 2.1001)
    assert torch.equal(trainer.model.embed, first)
    assert "validation loss 2.1001, best so far 2.0000: restored weights of step 0" in capsys.readouterr().out
    guard.check_validation(30, float("nan"))
    assert "validation loss nan" in capsys.readouterr().out


def test_the_limits_of_loss_and_gradient_norm(text):
    """1.5 times the median loss, and 10 times the median gradient norm after 16 good steps."""
    guard, trainer = make_guard(text)
    assert guard._find_fault(100.0, 100.0) == "" and guard._find_fault(float("inf"), 1.0) == "loss is inf"
    trainer.progress.good_steps = [[2.0, 1.0]] * 10 + [[9.0, 9.0]] * 5
    assert guard._find_fault(2.999, 100.0) == "" and guard._find_fault(3.001, 1.0) == "loss 3.001 exceeds 3"
    trainer.progress.good_steps += [[2.0, 1.0]]
    assert guard._find_fault(2.999, 9.99) == ""
    assert guard._find_fault(3.001, 9.99) == "loss 3.001 exceeds 3"
    assert guard._find_fault(2.999, 10.01) == "gradient norm 10.01 exceeds 10"


def test_more_targets_are_no_fault(text, tmp_path, monkeypatch):
    """The loss is a sum over targets, so a stage with twice the weight has twice the loss."""
    monkeypatch.chdir(tmp_path)
    stages = [dict(duration=1, window_long=256, window_short=128, loss_weights=weights) for weights in ("1", "1 1")]
    _, events = train(text, f"--stages={json.dumps(stages)}", "--num_iterations=60")
    assert events == []


def test_a_snapshot_is_trusted_after_five_good_steps(text, capsys):
    """After a fault in step 12 the snapshot of step 10 is too young, and the guard restores step 0."""
    guard, trainer = make_guard(text)
    guard.snapshots.append((10, gpt.Snapshot(trainer)))
    trainer.progress.step = 13
    guard._roll_back(12, "a fault")
    assert "restored weights of step 0" in capsys.readouterr().out and [step for step, _ in guard.snapshots] == [0]
    guard.snapshots.append((20, gpt.Snapshot(trainer)))
    trainer.progress.step = 25
    guard._roll_back(24, "a fault")
    assert "restored weights of step 20" in capsys.readouterr().out
    assert (trainer.progress.lr_scale, trainer.progress.lr_scale_until) == (0.25, 45)  # the first span has not ended


@pytest.fixture
def spoiled_losses(monkeypatch):
    """The steps, counted from 1, whose loss becomes NaN."""
    steps, real = set(), gpt.Trainer.train_step

    def train_step(self, *args):
        loss = real(self, *args)
        return loss * float("nan") if self.progress.step + 1 in steps else loss

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    return steps


def test_the_guard_can_give_up_in_the_last_step(text, tmp_path, monkeypatch, capsys, spoiled_losses):
    """No result, exit status 3 and a checkpoint. The run that continues from it counts all actions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpt.Guard, "MOST_ACTIONS", 1)
    spoiled_losses |= {4, 8}
    train(text, "--num_iterations=8", status=3)
    assert not list(Path("logs").glob("*.json"))
    errors = capsys.readouterr().err
    assert "stopped by the guard after step 8 of 8: lower the learning rates, and continue with: " in errors and errors.count("\n") == 1
    progress = gpt.read_checkpoint(find_saved(8))[0]["progress"]
    assert (progress["num_actions"], progress["actions_in_a_row"]) == (2, 0)
    spoiled_losses.clear()
    train(text, "--num_iterations=10", f"--resume={find_saved(8)}", "--checkpoint_dir=other")
    (result,) = Path("logs").glob("*.json")
    assert json.loads(result.read_text())["guard_actions"] == 2


def test_without_a_guard_a_loss_that_is_not_finite_ends_the_run(text, tmp_path, monkeypatch, capsys, spoiled_losses):
    monkeypatch.chdir(tmp_path)
    spoiled_losses |= {3}
    train(text, "--num_iterations=8", "--guard=off", status=1)
    errors = capsys.readouterr().err
    assert "the training loss of step 3 is nan: lower the learning rates, or give --guard=on" in errors
    assert errors.count("\n") == 1 and not list(Path("logs").glob("*.json"))


def test_the_guard_checks_validation_losses(shards, here, monkeypatch, capsys):
    losses = iter([6.0, 5.0, 9.0, 4.0])
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: next(losses))
    run(shards, "--num_iterations=6", "--val_loss_every=2", "--guard=on")
    out = capsys.readouterr().out
    assert out.count("guard: ") == 1
    assert "guard: step 4: validation loss 9.0000, best so far 5.0000: restored weights of step 0" in out


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
