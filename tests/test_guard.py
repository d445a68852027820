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
from conftest import (
    AT_THE_END,
    ROOT,
    TINY,
    data_args,
    find_saved,
    gpt,
    make_runtime,
    read_tensors,
    slow_but,
    smoke_config,
)
from run_ranks import run_ranks

sys.path.insert(0, str(ROOT / "data"))
import text as text_tool  # noqa: E402

ARGS = [*TINY, "--num_iterations=300", AT_THE_END, "--guard=on"]
BFLOAT16, HEAD, ALL = ["--dtype=bfloat16"], ["--fp8=on", "--fp8_parts=head"], ["--fp8=on", "--fp8_parts=head,mlp"]
SIZE = ["--model_dim=128", "--head_dim=64"]  # FP8 needs multiples of 16
FAULT = 102  # the step of the fault, counted from 1


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Real text. On the progressions of other tests the loss is nearly 0, and its noise is larger than its mean."""
    folder = tmp_path_factory.mktemp("text")
    files = itertools.islice(text_tool.read_torch_source(), 0, None, 8)
    encoding = text_tool.encode_bytes, gpt.BYTE_VOCAB_SIZE, gpt.BYTE_BOS
    text_tool.write_corpus(files, folder, "every eighth file", *encoding)
    return folder


def read_run() -> tuple[dict, list[dict]]:
    """The newest result, and the guard's events."""
    path = max(Path("logs").glob("*.json"), key=lambda p: p.stat().st_mtime)
    events = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    return json.loads(path.read_text()), [e for e in events if e["event"] == "guard"]


def train(text, *args) -> tuple[dict, list[dict]]:
    assert gpt.main([*ARGS, *data_args(text), *args]) == 0
    return read_run()


@pytest.fixture(scope="module")
def clean(text, tmp_path_factory):
    """A function from options to the final loss without a fault."""
    losses = {}

    def run_clean(*args):
        if args not in losses:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(tmp_path_factory.mktemp("clean"))
                result, events = train(text, *args)
                assert events == []
                losses[args] = result["final_val_loss"]
        return losses[args]

    return run_clean


def change_steps(patch, steps, before=lambda _: None, after=lambda _, loss: loss) -> None:
    """Call before(trainer) and after(trainer, loss) in these steps, counted from 1. after() returns the loss."""
    real = gpt.Trainer.train_step

    def train_step(self, *args):
        is_due = self.progress.step + 1 in steps
        if is_due:
            before(self)
        loss = real(self, *args)
        return after(self, loss) if is_due else loss

    patch.setattr(gpt.Trainer, "train_step", train_step)


def spoil_loss(patch, steps) -> None:
    change_steps(patch, steps, after=lambda _, loss: loss * math.nan)


def spoil_gradient(patch, value=math.nan) -> None:
    """Set one entry of a gradient. Backward adds to it."""
    def spoil(trainer):
        param = trainer.model.blocks[1].mlp.up_down
        param.grad = torch.zeros_like(param)
        param.grad[0, 0].fill_(value)

    change_steps(patch, [FAULT], spoil)


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
    large = lambda x, dtype, scale=None: ((1000 * x / scale).to(dtype), torch.tensor(scale))
    change_steps(patch, [FAULT], lambda _: patch.setattr(gpt, "quantize_fp8", large),
                 lambda _, loss: patch.setattr(gpt, "quantize_fp8", real) or loss)  # fmt: skip


FAULTS = {  # name: (options, fault, pattern of the fault in the event, lowered precision)
    "a NaN in a gradient": (BFLOAT16, spoil_gradient, r"gradient norm nan", "bfloat16"),
    "an infinite gradient": (BFLOAT16, lambda p: spoil_gradient(p, 1e30), r"gradient norm inf", "bfloat16"),
    "a gradient too large": (BFLOAT16, lambda p: spoil_gradient(p, 1e5), r"gradient norm \S+ exceeds", "bfloat16"),
    "a poisoned batch": (HEAD, poison_batch, r"loss \S+ exceeds", "fp8_head"),
    "a learning rate 100 times too high": (HEAD, raise_learning_rate, r"loss \S+ exceeds", "fp8_head"),
    "FP8 overflow": (HEAD, overflow_fp8, r"loss \S+ exceeds", "fp8_head"),
}


@pytest.mark.parametrize("name", slow_but(FAULTS, "FP8 overflow"))
def test_the_run_recovers(text, clean, here, monkeypatch, capsys, name):
    """It restores step 90, because the snapshot of step 100 is too young. No step is repeated."""
    options, spoil, noticed, lowered = FAULTS[name]
    expected = clean(*options)
    spoil(monkeypatch)
    result, (event, *others) = train(text, *options)
    assert abs(result["final_val_loss"] / expected - 1) < 0.02 and others == [] and result["guard_actions"] == 1
    assert FAULT <= event["step"] <= FAULT + 2 and re.search(noticed, event["fault"])
    assert event["measure"] == gpt.LOW_PRECISIONS[lowered]
    (line,) = re.findall("^guard: .*$", capsys.readouterr().out, re.M)
    assert line == f"guard: step {event['step']}: {event['fault']}: restored weights of step 90, {event['measure']}"
    assert [step for step, _ in result["train_points"]] == list(range(1, 301))


@pytest.mark.slow
def test_one_rank_of_two_sends_a_nan(text, clean, here):
    """Both restore one step."""
    options = (*HEAD, "--tokens_per_step=1024", "--warmup_iterations=1")
    expected = clean(*options)
    ends, _, errors = run_ranks("fail", 2, "nan", f"1@{FAULT}", *ARGS, *data_args(text), *options)
    assert [status for status, _ in ends] == [0, 0], errors[-2000:]
    result, (event,) = read_run()
    assert event["fault"].startswith("gradient norm nan") and event["step"] == FAULT
    assert abs(result["final_val_loss"] / expected - 1) < 0.02


@pytest.mark.slow
def test_without_a_fault_it_changes_nothing(text, clean, here):
    expected = clean()
    assert gpt.main([*ARGS, *data_args(text), "--guard=off"]) == 0
    (path,) = Path("logs").glob("*.json")
    assert json.loads(path.read_text())["final_val_loss"] == expected and not list(Path("logs").glob("*.jsonl"))


def test_the_precision_rises_until_the_run_ends(shards, here, monkeypatch, capsys):
    """Three faults: FP8 of the head, of the linears, bfloat16. Learning rates stay. A fourth fault ends the run."""
    used, rates = [], []

    def note(trainer):
        used.append((sorted(trainer.model.fp8), str(trainer.model.dtype)))

    def train_step(self, batches, state, real=gpt.Trainer.train_step):
        rates.append((state.lr, self.schedule.at(self.progress.step).lr))
        return real(self, batches, state)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    monkeypatch.setattr(gpt.Guard, "SNAPSHOT_EVERY", 6)
    change_steps(monkeypatch, [11, 17, 23, 29], note, lambda _, loss: loss * math.nan)
    args = [*TINY, *data_args(shards), *SIZE, *ALL, *BFLOAT16, "--guard=on", AT_THE_END, "--num_iterations=32"]
    args += ["--seq_len=256", "--tokens_per_step=256", "--micro_batch_tokens=256", "--checkpoint_every=26"]
    assert gpt.main(args) == 1
    out, errors = capsys.readouterr()
    pattern = r"^guard: step (\d+): loss nan exceeds \S+: restored weights of step (\d+), (.*)$"
    lines = re.findall(pattern, out + errors.partition("error: ")[2], re.M)
    assert lines == [("11", "6", gpt.LOW_PRECISIONS["fp8_head"]), ("17", "13", gpt.LOW_PRECISIONS["fp8"]),
                     ("23", "19", gpt.LOW_PRECISIONS["bfloat16"]), ("29", "25", "and ends")]  # fmt: skip
    assert used == [(["fp8_head", "fp8_mlp"], "torch.bfloat16"), (["fp8_mlp"], "torch.bfloat16"),
                    ([], "torch.bfloat16"), ([], "torch.float32")]  # fmt: skip
    assert errors.count("\n") == 1 and not list(Path("logs").glob("*.json"))
    assert len(rates) == 30 and all(ours == planned for ours, planned in rates)

    # What is switched off stays off in the next life
    assert gpt.read_metadata(find_saved(26))["progress"]["lowered"] == ["fp8_head", "fp8", "bfloat16"]
    used.clear()
    change_steps(monkeypatch, [27], note)
    monkeypatch.setattr(gpt.Guard, "end_step", lambda *_: None)
    monkeypatch.setattr(gpt.RunLog, "check_loss", lambda *_: None)
    assert gpt.main([*args, "--resume=auto"]) == 0
    assert used[0] == ([], "torch.float32")


def copy_state(trainer) -> dict[str, torch.Tensor]:
    return {name: rows.clone() for name, rows in gpt.collect_rows(trainer).items()}


@pytest.mark.parametrize("preset", ["smoke", "smoke_frontier"])
def test_the_bits_of_a_snapshot(shards, here, monkeypatch, preset):
    """A rollback restores parameters and state of the step it names, also of a sharded table, and the scales of FP8."""
    made, restored, init, restore = {}, [], gpt.Snapshot.__init__, gpt.Snapshot.restore

    def note(self, trainer):
        init(self, trainer)
        made[id(self)] = trainer.progress.step, copy_state(trainer), self

    def compare(self):
        before = copy_state(self.trainer)
        restore(self)
        step, expected, _ = made[id(self)]
        found = copy_state(self.trainer)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        assert not all(torch.equal(before[name], expected[name]) for name in expected)
        restored.append(step)

    monkeypatch.setattr(gpt.Snapshot, "__init__", note)
    monkeypatch.setattr(gpt.Snapshot, "restore", compare)
    monkeypatch.setattr(gpt.Guard, "SNAPSHOT_EVERY", 2)
    spoil_loss(monkeypatch, [11])
    size = SIZE if preset == "smoke" else []
    args = [f"--preset={preset}", "--device=cpu", "--warmup_iterations=0", "--val_tokens=1024", *size, *HEAD]
    assert gpt.main([*args, *data_args(shards), "--fp8_parts=head,mlp", "--guard=on", "--num_iterations=14"]) == 0
    assert restored == [8 if preset == "smoke" else 4]
    result, (event,) = read_run()
    assert (event["step"], event["action"], result["guard_actions"]) == (11, 1, 1)


def test_snapshots_continue_after_a_rollback_if_adam_skips_steps(text, here, monkeypatch, capsys):
    """Adam updates every third step, and snapshots are made after its updates, also after a rollback."""
    monkeypatch.setattr(gpt, "lower_precision", lambda _: "something is off")
    spoil_loss(monkeypatch, [42, 82])
    every = json.dumps({group: {"every": 3} for group in ("embed", "value_embed", "head", "scalar")})
    _, events = train(text, f"--groups={every}", "--num_iterations=90", "--checkpoint_every=90")
    went_back = [int(step) for step in re.findall(r"restored weights of step (\d+)", capsys.readouterr().out)]
    assert [event["step"] for event in events] == [42, 82]
    assert 30 <= went_back[0] <= 37 and 70 <= went_back[1] <= 77
    assert find_saved(90).exists()


def test_the_limits_of_loss_and_gradient_norm(shards):
    """1.5 times the median loss, and 10 times the median gradient norm after 16 good steps."""
    trainer = gpt.Trainer(smoke_config(shards, guard=True), make_runtime())
    guard = gpt.Guard(trainer, None)
    assert guard._find_fault(100.0, 100.0) == "" and guard._find_fault(math.inf, 1.0).startswith("loss inf")
    trainer.progress.good_steps = [[2.0, 1.0]] * 10 + [[9.0, 9.0]] * 5
    assert guard._find_fault(2.999, 100.0) == "" and guard._find_fault(3.001, 1.0) == "loss 3.001 exceeds 3"
    trainer.progress.good_steps += [[2.0, 1.0]]
    assert guard._find_fault(2.999, 9.99) == ""
    assert guard._find_fault(3.001, 9.99) == "loss 3.001 exceeds 3"
    assert guard._find_fault(2.999, 10.01) == "gradient norm 10.01 exceeds 10"
    assert guard._find_fault(2.0, math.nan).startswith("gradient norm nan")


def test_more_targets_are_no_fault(text, here):
    """The loss is a sum over targets, so a stage with twice the weight has twice the loss."""
    stages = [dict(duration=1, window_long=256, window_short=128, loss_weights=weights)
              for weights in ([[1, 1]], [[1, 1], [1, 1]])]  # fmt: skip
    _, events = train(text, f"--stages={json.dumps(stages)}", "--num_iterations=60")
    assert events == []


def test_a_snapshot_is_trusted_after_five_steps(shards, monkeypatch):
    """After a fault in step 12 the snapshot of step 10 is too young, and the guard restores step 0."""
    trainer = gpt.Trainer(smoke_config(shards, guard=True), make_runtime())
    lines = []
    log = gpt.RunLog(trainer.cfg, trainer.rt, {}, {})
    log.print = lines.append
    monkeypatch.setattr(gpt, "lower_precision", lambda _: "something is off")
    guard = gpt.Guard(trainer, log)
    for step, fault, restored in ((10, 12, 0), (20, 24, 20), (30, 33, 20)):
        guard.snapshots.append((step, gpt.Snapshot(trainer)))
        trainer.progress.step = fault + 1
        guard._roll_back(fault, "a fault")
        assert lines.pop() == f"guard: step {fault}: a fault: restored weights of step {restored}, something is off"
    assert [step for step, _ in guard.snapshots] == [0, 20] and trainer.progress.num_actions == 3


@pytest.mark.parametrize("step, args, kind", [(3, [], "training"), (3, ["--guard=on"], "guard"), (8, [], "training")])
def test_a_loss_that_is_not_finite_ends_the_run(shards, here, monkeypatch, capsys, step, args, kind):
    """Status 1 and one line, with and without the guard. No result, and no checkpoint after it."""
    spoil_loss(monkeypatch, [step])
    args = [*args, "--num_iterations=8", "--checkpoint_every=2", "--record=nan"]
    assert gpt.main([*TINY, *data_args(shards), *args]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and kind in errors and f"step {step}" in errors and "nan" in errors
    assert not list(Path().rglob("*_seed0_*.json"))
    assert all(int(path.name[5:]) < step for path in Path().rglob("step_*"))


@pytest.mark.parametrize("guard", ["on", "off"])
def test_a_last_validation_loss_that_is_not_finite_is_no_result(shards, here, monkeypatch, capsys, guard):
    monkeypatch.setattr(gpt.Trainer, "validate", lambda *_: math.nan)
    args = ["--num_iterations=2", AT_THE_END, f"--guard={guard}"]
    assert gpt.main([*TINY, *data_args(shards), *args]) == 1
    assert "the validation loss of step 2 is nan: " in capsys.readouterr().err and not list(Path("logs").glob("*.json"))


def test_the_guard_checks_a_step_before_it_is_saved(shards, here, monkeypatch, capsys):
    """A NaN in a gradient of the saved step. Otherwise the guard checks one step late."""
    def spoil(trainer):
        param = trainer.model.blocks[1].mlp.up_down
        param.grad = torch.full_like(param, math.nan)

    change_steps(monkeypatch, [6], spoil)
    args = [*TINY, *data_args(shards), *SIZE, *HEAD, "--num_iterations=8", "--checkpoint_every=6", "--guard=on"]
    assert gpt.main(args) == 0
    assert "guard: step 6: gradient norm nan" in capsys.readouterr().out
    for step in (6, 8):
        tensors = read_tensors(find_saved(step))
        assert [name for name, tensor in tensors.items() if not tensor.isfinite().all()] == []
