"""Telemetry: each number against an independent computation, and its absence of effects on the run."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import before_call, data_args, gpt, make_runtime, run, smoke_config, start_prefetcher
from run_ranks import run_ranks

from records import plot

ARGS = ["--preset=smoke", "--device=cpu", "--num_layers=3", "--num_iterations=9", "--val_loss_every=4"]
ARGS += ["--micro_batch_tokens=512"]  # so that two ranks sum equal packed sequences


def read_lines(cwd=".") -> list[dict]:
    (path,) = (Path(cwd) / "logs").glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured_lines(cwd=".") -> list[dict]:
    return [line for line in read_lines(cwd) if line["event"] == "telemetry"]


def make_log(trainer, lines: list) -> gpt.RunLog:
    """The log of a run without files, whose events are appended to lines."""
    log = gpt.RunLog(trainer.cfg, trainer.rt, {}, {})
    log.write_event = lambda _event, _step, **entries: lines.append(entries)
    log.print = lambda *_, **__: None
    log.start_training(trainer)
    return log


def measure_step(trainer, log, telemetry, step: int, make_loss) -> torch.Tensor:
    """A measured step, counted from 1, as Trainer.run() makes it. make_loss(): its loss."""
    trainer.optimizer.timer = gpt.StepTimer(trainer.optimizer.groups, trainer.rt, telemetry.start_step())
    loss, timer = make_loss(), trainer.optimizer.timer
    trainer.optimizer.timer, trainer.progress.step, trainer.progress.tokens = None, step, step
    log.log_step(loss, timer, 1.0)
    telemetry.end_step(loss, timer, 1.0)
    return loss


@pytest.fixture(scope="module")
def measured(shards, tmp_path_factory):
    """(lines of a run that is measured every third step, its json)."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert gpt.main([*ARGS, *data_args(shards), "--telemetry_every=3", "--checkpoint_every=5"]) == 0
    (path,) = (folder / "logs").glob("*.json")
    return read_lines(folder), json.loads(path.read_text())


def test_lines_and_their_fields(measured):
    lines, result = measured
    assert [(line["event"], line["step"]) for line in lines if line["event"] != "checkpoint"] == [
        ("validation", 0), ("telemetry", 3), ("validation", 4), ("telemetry", 6), ("validation", 8), ("telemetry", 9),
        ("validation", 9)]  # fmt: skip
    assert [line["step"] for line in lines if line["event"] == "checkpoint"] == [5, 9]
    validations = [[x["step"], x["val_loss"], x["train_time_ms"]] for x in lines if x["event"] == "validation"]
    assert validations == result["val_points"]
    line = next(line for line in lines if line["event"] == "telemetry")
    assert set(line) == {"event", "step", "train_time_ms", "loss", "loss_slope_per_1000_steps", "groups", "fp8",
                         "seconds"}  # fmt: skip
    assert set(line["groups"]) == {"matrix", "embed", "value_embed", "head", "scalar"}
    assert set(line["groups"]["matrix"]) == {"grad_norm", "weight_norm", "update_ratio", "momentum_norm"}
    assert set(line["fp8"]) == {"x", "w", "grad"}


def test_telemetry_changes_no_bit(shards, measured, here):
    """Neither losses nor the final parameters, also in the recipe with all mechanisms."""
    assert gpt.main([*ARGS, *data_args(shards)]) == 0
    (path,) = Path("logs").glob("*.json")
    result = json.loads(path.read_text())
    assert result["train_points"] == measured[1]["train_points"]
    assert result["final_val_loss"] == measured[1]["final_val_loss"]
    models = []
    for every in (0, 2):
        words = ["--preset=smoke_frontier", "--device=cpu", "--num_iterations=8", f"--telemetry_every={every}", f"--out={every}"]
        assert gpt.main([*words, *data_args(shards)]) == 0
        (path,) = Path(str(every)).rglob("model.pt")
        models.append(torch.load(path, weights_only=True)["tensors"])
    assert [name for name in models[0] if not torch.equal(models[0][name], models[1][name])] == []


@pytest.mark.parametrize("fast", [frozenset(), frozenset({"sparse_embedding", "fused_adamw", "head_loss"})], ids=len)
def test_the_numbers(shards, fast):
    """The third step of a trainer against autograd and tensors before and after it, in plain and in fast forms."""
    cfg, rt = smoke_config(shards, telemetry_every=1, adam_eps=1e-8), make_runtime(fast=fast)
    trainer, lines = gpt.Trainer(cfg, rt), []
    tables = {name: bucket.sparse for name, bucket in trainer.optimizer.bucket_of.items() if bucket.sparse}
    assert set(tables) == ({f"value_embeds.{i}" for i in range(2)} if fast else set())
    telemetry = gpt.Telemetry(trainer, log := make_log(trainer, lines))
    batches, losses = start_prefetcher(trainer), []
    for step in range(3):
        params = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
        grads, update = {}, trainer.optimizer.step

        def note(*args, update=update, grads=grads):
            grads.update({name: (tables[name].wait() if name in tables else param.grad).clone()
                          for name, param in trainer.model.named_parameters()})
            update(*args)

        trainer.optimizer.step = note
        make_loss = lambda step=step: trainer.train_step(batches, trainer.schedule.at(step))
        losses.append(measure_step(trainer, log, telemetry, step + 1, make_loss))
        trainer.optimizer.step = update
    batches.executor.shutdown(cancel_futures=True)
    norm = lambda named: sum(t.double().square().sum().item() for t in named) ** 0.5
    after = dict(trainer.model.named_parameters())
    assert lines[2]["groups"].keys() == set(trainer.optimizer.groups)
    for group, facts in lines[2]["groups"].items():
        names = [name for name, param in after.items() if param.spec.group == group]
        weight = norm(after[name] for name in names)
        update = norm(after[name].detach() - params[name] for name in names)
        key = "momentum" if group == "matrix" else "exp_avg"
        states = [bucket.state[key] for bucket in trainer.optimizer.buckets if bucket.group_name == group]
        expected = dict(grad_norm=norm(grads[name] for name in names) / cfg.tokens_per_step, weight_norm=weight,
                        update_ratio=update / weight, momentum_norm=norm(states))  # fmt: skip
        assert facts == pytest.approx(expected, rel=1e-4), group
    assert [line["loss"] for line in lines] == [loss.item() for loss in losses]


def test_the_seconds_of_a_step(shards, here, monkeypatch, now):
    """The time advances only in these functions. Each runs in one part of the step."""
    parts = {"data wait": (gpt.Prefetcher, "__next__", 1), "forward and backward": (torch.Tensor, "backward", 10),
             "communication": (gpt.RowSparseGradient, "wait", 100), "optimizer": (gpt.StepTimer, "add_norms", 1000),
             "measuring": (gpt.GPT, "run_layers", 100_000)}  # fmt: skip
    calls = Counter()
    before_call(monkeypatch, gpt.Trainer, "run", lambda *_: calls.clear())  # earlier calls compare fast forms
    for part, (owner, name, seconds) in parts.items():
        def pass_time(*_, part=part, seconds=seconds):
            timer = next((a.optimizer.timer for a in trainer), None)
            if part != "measuring" or timer.part == "measuring":  # forward passes call run_layers(), too
                calls.update([part])
                now[0] += seconds

        before_call(monkeypatch, owner, name, pass_time)
    trainer = []
    before_call(monkeypatch, gpt.Trainer, "run", lambda made, *_: trainer.append(made))
    before_call(monkeypatch, gpt.Trainer, "warm_up", lambda made, *_: trainer.append(made))
    args = ["--tokens_per_step=1024", "--micro_batch_tokens=512", "--val_loss_every=0"]
    run(shards, *args, "--num_iterations=1", "--telemetry_every=1")
    (line,) = measured_lines()
    assert line["seconds"] == {part: calls[part] * seconds for part, (_, _, seconds) in parts.items()}
    assert [calls[part] for part in parts] == [2, 2, 1, 7, 1]  # two micro-batches, one table, seven buckets


def test_the_slope_of_the_loss(measured):
    """Least squares over the losses since the last line. A loss that falls by 0.1 per step has slope -100."""
    assert all(line["loss_slope_per_1000_steps"] < 0 for line in measured[0] if line["event"] == "telemetry")
    trainer, lines = gpt.Trainer(smoke_config(telemetry_every=4), make_runtime()), []
    telemetry = gpt.Telemetry(trainer, log := make_log(trainer, lines))
    for step, loss in enumerate((9.0, 5.0, 7.0, 8.0, 3.0, 2.9, 2.8, 2.7), 1):
        measure_step(trainer, log, telemetry, step, lambda loss=loss: torch.tensor(loss))
    assert len(lines) == 2 and lines[1]["loss_slope_per_1000_steps"] == pytest.approx(-100, rel=1e-4)


def test_groups_without_an_update_are_left_out(shards, here):
    """Adam updates every second step, and the embedding only after it is untied. No number is 0 instead."""
    every = json.dumps({group: {"every": 2} for group in ("embed", "value_embed", "head", "scalar")})
    args = ["--num_iterations=6", "--val_loss_every=0", "--telemetry_every=1", f"--groups={every}"]
    run(shards, *args, "--tie_head=on", "--untie_frac=0.5")
    lines = measured_lines()
    tied = {"matrix", "value_embed", "head", "scalar"}
    assert [set(line["groups"]) for line in lines] == [{"matrix"}, tied, {"matrix"}, tied, {"matrix"}, {*tied, "embed"}]
    assert all(norm > 0 for line in lines[1:] for group in line["groups"].values() for norm in group.values())


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_no_number_of_a_table_is_zero_instead(shards, here, fast):
    """The recipe with all mechanisms, with a sharded and with an ordinary n-gram table. What is not measured is left out."""
    args = ["--num_iterations=8", "--val_loss_every=0", "--telemetry_every=4", "--warmup_iterations=0", f"--fast={fast}"]
    run(shards, *args, "--val_tokens=1024", preset=["--preset=smoke_frontier", "--device=cpu"])
    for line in measured_lines():
        assert {"ngram", "value_embed"} <= set(line["groups"])
        assert [(group, name) for group, norms in line["groups"].items() for name, norm in norms.items() if norm == 0] == []


def test_fractions_of_fp8():
    """The largest value of e4m3 is 448 and the smallest is 2^-9. Half of the smallest is rounded to zero."""
    x = torch.tensor([0.0, 1.0, 449.0, -1000.0, 2.0**-11, 448.0, 2.0**-9, -(2.0**-11)])
    fractions = gpt.measure_fp8(x, 1.0, torch.float8_e4m3fn)
    assert fractions == dict(saturated=2 / 8, flushed=2 / 8)
    assert gpt.measure_fp8(x * 4, 4.0, torch.float8_e4m3fn) == fractions


def test_fractions_of_the_head(shards, monkeypatch):
    """Input, weight and gradient of the head on the first micro-batch. Every token and row is sampled here."""
    monkeypatch.setattr(gpt.Telemetry, "SAMPLE", 1024)
    trainer = gpt.Trainer(smoke_config(shards, telemetry_every=1), make_runtime())
    model, weight = trainer.model, trainer.model.head.weight
    weight.data.normal_(std=0.05)
    weight.data[:7], weight.data[7:9] = 1e-9, 1e9  # flushed, saturated
    telemetry, batches = gpt.Telemetry(trainer, make_log(trainer, [])), start_prefetcher(trainer)
    assert telemetry.start_step() and trainer.inspect
    batch = next(batches)
    batches.executor.shutdown(cancel_futures=True)
    inputs = trainer.get_step_inputs(trainer.schedule.at(0), len(batch.inputs), 512)
    telemetry.inspect(batch, inputs)
    assert trainer.inspect is None and telemetry.measured["w"]["saturated"] == pytest.approx(2 / len(weight))
    x = model.run_layers(batch.inputs, batch.doc_ids, inputs).detach()
    logits = (x @ weight.T).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy(model.head.softcap(logits), batch.targets.long(), reduction="sum")
    scales, (grad,) = gpt.head_fp8_scales(trainer.cfg), torch.autograd.grad(loss, logits)
    for name, tensor, scale, largest, least in (("x", x, scales.x, 448, 2.0**-9), ("w", weight, scales.weight, 448, 2.0**-9),
                                                ("grad", grad, scales.grad, 57344, 2.0**-16)):  # fmt: skip
        ratio = (tensor.detach() / scale).abs()
        expected = dict(saturated=(ratio > largest).float().mean().item(),
                        flushed=((ratio > 0) & (ratio <= least / 2)).float().mean().item())  # fmt: skip
        assert telemetry.measured[name] == pytest.approx(expected, abs=2e-3), name


@pytest.mark.slow
def test_two_ranks_report_the_numbers_of_one_rank(shards, measured, here):
    args = [*ARGS, *data_args(shards), "--telemetry_every=3"]
    ends, _, errors = run_ranks("fail", 2, "none", 0, *args)
    assert [status for status, _ in ends] == [0, 0], errors[-2000:]
    alone = [line for line in measured[0] if line["event"] == "telemetry"]
    for one, other in zip(measured_lines(), alone, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for group in one["groups"]:
            assert one["groups"][group] == pytest.approx(other["groups"][group], rel=1e-4)
        for name in one["fp8"]:  # rank 0 has an equal first sequence
            assert one["fp8"][name] == pytest.approx(other["fp8"][name], rel=1e-4)
        assert one["seconds"]["communication"] > 0


def test_telemetry_costs_no_time_when_off(shards, here, monkeypatch):
    """Nothing is measured."""
    monkeypatch.setattr(gpt.Telemetry, "inspect", None)
    monkeypatch.setattr(gpt.Telemetry, "end_step", None)
    monkeypatch.setattr(gpt.StepTimer, "add_norms", lambda self, *_: None if not self.rows else pytest.fail("it is measured"))
    run(shards, "--num_iterations=2")
    assert not list(Path("logs").glob("*.jsonl"))


def test_a_tracker_gets_all_events(shards, here, monkeypatch):
    """wandb and trackio have one interface. A package that is missing ends the run before it trains."""
    calls = []

    class Tracker:
        init = staticmethod(lambda **entries: calls.append(entries))
        log = staticmethod(lambda entries, step: calls.append((step, entries)))
        finish = staticmethod(lambda: calls.append("finish"))

    monkeypatch.setitem(sys.modules, "trackio", Tracker)
    result = run(shards, "--num_iterations=4", "--telemetry_every=2", "--tracker=trackio")
    assert calls[0]["name"] == result["run_id"] and calls[-1] == "finish"
    written = [(line.pop("step"), {line.pop("event"): line}) for line in read_lines()]
    assert calls[1:-1] == written and {next(iter(entries)) for _, entries in written} == {"validation", "telemetry"}
    monkeypatch.setitem(sys.modules, "wandb", None)
    args = ["--preset=smoke", "--device=cpu", "--warmup_iterations=0", "--tracker=wandb"]
    assert gpt.main([*args, *data_args(shards)]) == 1


def test_the_picture_of_runs(shards, here, monkeypatch):
    """Each measured step is a point of each curve."""
    for seed in (0, 1):
        assert gpt.main([*ARGS, *data_args(shards), "--telemetry_every=3", f"--seed={seed}"]) == 0
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    paths = sorted(Path("logs").glob("*.jsonl"))
    plot.plot_runs(paths, here / "runs")
    rows = [figures[0].axes[:4], figures[0].axes[4:]]
    for path, (losses, norms, _, seconds) in zip(paths, rows):
        measured = plot.read_events(path)["telemetry"]
        assert losses.get_lines()[0].get_ydata().tolist() == [line["loss"] for line in measured]
        assert norms.get_lines()[0].get_xdata().tolist() == [3, 6, 9]
        assert len(norms.get_lines()) == len(measured[0]["groups"]) and len(seconds.get_lines()) == 5
