"""Telemetry: every number against the same number computed another way, and a run that does not notice it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, data_args, gpt, make_runtime, smoke_config
from ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(ROOT / "records"))
import plot  # noqa: E402
import results  # noqa: E402

ARGS = ["--preset=smoke", "--device=cpu", "--num_layers=3", "--num_iterations=9", "--val_loss_every=4"]
ARGS += ["--micro_batch_tokens=512"]  # so that two ranks sum equal packed sequences


def read_lines(cwd) -> list[dict]:
    (path,) = (Path(cwd) / "logs").glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def measured(shards, tmp_path_factory):
    """A run with a line every third step, and its final loss."""
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
    assert [
        [x["step"], x["val_loss"], x["train_time_ms"]] for x in lines if x["event"] == "validation"
    ] == result["val_points"]
    line = next(line for line in lines if line["event"] == "telemetry")
    assert set(line) == {"event", "step", "train_time_ms", "loss", "loss_ema", "loss_slope_per_1000_steps", "groups",
                         "layers", "logits", "fp8", "seconds"}  # fmt: skip
    assert set(line["groups"]) == {"matrix", "embed", "value_embed", "head", "scalar"}
    assert set(line["groups"]["matrix"]) == {"grad_norm", "weight_norm", "update_ratio", "momentum_norm"}
    assert len(line["layers"]) == 3 and set(line["fp8"]) == {"x", "w", "grad"}


def test_the_run_does_not_notice(shards, measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gpt.main([*ARGS, *data_args(shards)]) == 0
    (path,) = Path("logs").glob("*.json")
    assert json.loads(path.read_text())["final_val_loss"] == measured[1]["final_val_loss"]


@pytest.mark.parametrize("fast", [frozenset(), frozenset({"sparse_embedding", "fused_adamw", "head_loss"})], ids=len)
def test_the_numbers(shards, fast):
    """One step of a trainer, measured, against autograd and tensors before and after it. In plain and in fast forms."""
    cfg, rt = smoke_config(shards, telemetry_every=1, adam_eps=1e-8), make_runtime(fast=fast)
    trainer, lines = gpt.Trainer(cfg, rt), []
    tables = {name: bucket.sparse for name, bucket in trainer.optimizer.bucket_of.items() if bucket.sparse}
    assert set(tables) == ({f"value_embeds.{i}" for i in range(2)} if fast else set())

    class Log:
        def write_event(self, event, step, **facts):
            lines.append(facts)

    telemetry = gpt.Telemetry(trainer, Log())
    data = gpt.TrainData(cfg, trainer.schedule)
    batches, losses = gpt.Prefetcher(data.batches(rt, 0, 3), torch.device("cpu")), []
    blocks = []
    trainer.model.blocks[1].register_forward_hook(
        lambda _m, _i, output: blocks.append(output.detach().clone())
    )
    for step in range(3):
        params = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
        blocks.clear()
        probe = trainer.optimizer.probe = gpt.Probe(trainer.optimizer.groups, rt, telemetry.start_step())
        grads = {}
        update = trainer.optimizer.step

        def note(*args, update=update, grads=grads):
            grads.update({name: (tables[name].wait() if name in tables else param.grad).clone()
                          for name, param in trainer.model.named_parameters()})
            update(*args)

        trainer.optimizer.step = note
        losses.append(trainer.train_step(batches, trainer.schedule.at(step)))
        trainer.optimizer.step = update
        telemetry.end_step(losses[-1], probe, 0.0)
    batches.executor.shutdown(cancel_futures=True)
    norm = lambda named: sum(t.double().square().sum().item() for t in named) ** 0.5
    after = dict(trainer.model.named_parameters())
    for group, facts in lines[2]["groups"].items():
        names = [name for name, param in after.items() if param.spec.group == group]
        weight = norm(after[name] for name in names)
        assert facts["grad_norm"] == pytest.approx(
            norm(grads[name] for name in names) / cfg.tokens_per_step, rel=1e-4
        )
        assert facts["weight_norm"] == pytest.approx(weight, rel=1e-4)
        update = norm(after[name].detach() - params[name] for name in names)
        assert facts["update_ratio"] == pytest.approx(update / weight, rel=1e-4)
        key = "momentum" if group == "matrix" else "exp_avg"
        states = [bucket.state[key] for bucket in trainer.optimizer.buckets if bucket.group_name == group]
        assert facts["momentum_norm"] == pytest.approx(norm(states), rel=1e-4)
    first = blocks[0]  # of the first micro-batch, the one that is measured
    shown = lines[2]["layers"][1]
    assert shown == pytest.approx(
        dict(mean=first.mean().item(), std=first.std().item(), max=first.abs().max().item())
    )
    values = [loss.item() for loss in losses]
    assert lines[2]["loss"] == values[2]
    ema = 0.98 * (0.98 * values[0] + 0.02 * values[1]) + 0.02 * values[2]
    assert lines[2]["loss_ema"] == pytest.approx(ema)
    parts = lines[2]["seconds"]
    assert (
        parts["forward and backward"] > parts["optimizer"] > parts["communication"] >= 0
        and parts["data wait"] > 0
    )
    assert 15 - 30 < lines[2]["logits"]["mean"] < 30 and lines[2]["logits"]["max"] <= 30


def test_the_slope_of_the_loss(measured):
    """Least squares over the losses since the last line, against numpy's own on the logged ones: a line falls."""
    lines = [line for line in measured[0] if line["event"] == "telemetry"]
    assert all(line["loss_slope_per_1000_steps"] < 0 for line in lines)
    trainer, facts = gpt.Trainer(smoke_config(telemetry_every=4), make_runtime()), {}
    log = type("Log", (), {"write_event": lambda self, *_, **given: facts.update(given)})()
    telemetry = gpt.Telemetry(trainer, log)
    for step, loss in enumerate((3.0, 2.9, 2.8, 2.7)):
        trainer.progress.step = step
        probe = gpt.Probe(trainer.optimizer.groups, trainer.rt, telemetry.start_step())
        telemetry.end_step(torch.tensor(loss), probe, 0.0)
    assert facts["loss_slope_per_1000_steps"] == pytest.approx(-100, rel=1e-4)


def test_shares_of_fp8():
    """e4m3 holds 448 at most, 2^-9 at least; half of that rounds to zero."""
    x = torch.tensor([0.0, 1.0, 449.0, -1000.0, 2.0**-11, 448.0, 2.0**-9, -(2.0**-11)])
    shares = gpt.measure_fp8(x, 1.0, torch.float8_e4m3fn)
    assert shares == dict(saturated=2 / 8, flushed=2 / 8)
    assert gpt.measure_fp8(x * 4, 4.0, torch.float8_e4m3fn) == shares


@pytest.mark.slow
def test_ranks_report_what_one_rank_does(shards, measured, tmp_path):
    args = [*ARGS, *data_args(shards), "--telemetry_every=3"]
    ends, _, errors = run_ranks("fail", 2, "none", 0, *args, cwd=tmp_path)
    assert [status for status, _ in ends] == [0, 0], errors[-2000:]
    ours = [line for line in read_lines(tmp_path) if line["event"] == "telemetry"]
    alone = [line for line in measured[0] if line["event"] == "telemetry"]
    for one, other in zip(ours, alone, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        for group in one["groups"]:
            assert one["groups"][group] == pytest.approx(other["groups"][group], rel=1e-4)
        for ours, alone_layer in zip(one["layers"], other["layers"], strict=True):  # rank 0 has an equal first sequence
            assert ours == pytest.approx(alone_layer, rel=1e-4, abs=1e-6)
        assert one["seconds"]["communication"] > 0


@pytest.mark.slow
def test_telemetry_leaves_the_graphs_that_train_alone(shards, tmp_path, monkeypatch):
    """The same graphs with telemetry as without, and one more: that of the pass which measures."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    for every in (0, 1):
        torch._dynamo.reset()
        cfg = smoke_config(shards, telemetry_every=every)
        rt = make_runtime()
        monkeypatch.setattr(
            type(rt), "compile", lambda self, f: torch.compile(f, backend=backend, dynamic=False)
        )
        trainer = gpt.Trainer(cfg, rt)
        log = type("Log", (), {"write_event": lambda *_, **__: None})()
        telemetry = gpt.Telemetry(trainer, log)
        data = gpt.TrainData(cfg, trainer.schedule)
        batches = gpt.Prefetcher(data.batches(rt, 0, 2), rt.device)
        for step in range(2):
            telemetry.start_step()
            trainer.train_step(batches, trainer.schedule.at(step))
        batches.executor.shutdown(cancel_futures=True)
        graphs.append("end")
    half = graphs.index("end")
    without, measured = graphs[:half], graphs[half + 1 : -1]
    assert without and [graph for graph in measured if graph in without] == without
    assert len(measured) == len(without) + 1


def test_telemetry_costs_no_time_when_off(shards):
    """No hook is registered, and the probe has no rows: nothing is measured or summed."""
    trainer = gpt.Trainer(smoke_config(shards), make_runtime())
    before = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in trainer.model.modules()
    )
    gpt.Telemetry(trainer, None)
    after = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in trainer.model.modules()
    )
    assert before == after == 0 and trainer.optimizer.probe is None


def test_a_tracker_gets_what_the_jsonl_has(shards, tmp_path, monkeypatch):
    """TensorBoard itself, read back: every number of every line, at its step."""
    monkeypatch.chdir(tmp_path)
    assert gpt.main([*ARGS, *data_args(shards), "--telemetry_every=3", "--tracker=tensorboard"]) == 0
    (folder,) = (tmp_path / "logs" / "tensorboard").iterdir()
    reader = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    for event in ("validation", "telemetry"):
        for line in (line for line in read_lines(tmp_path) if line["event"] == event):
            facts = {key: value for key, value in line.items() if key not in ("event", "step")}
            for name, number in gpt.flatten_numbers(facts, event).items():
                found = {point.step: point.value for point in reader.Scalars(name)}
                assert found[line["step"]] == pytest.approx(number, rel=1e-6), name
    assert {"validation/val_loss", "telemetry/groups/matrix/update_ratio", "telemetry/layers/2/std"} <= set(
        reader.Tags()["scalars"]
    )


def test_a_tracker_whose_package_is_not_there(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert gpt.main([*ARGS, *data_args(shards), "--tracker=trackio"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "pip install trackio" in error
    assert not list(tmp_path.rglob("*.txt"))


def test_a_tracker_that_fails_is_left(shards, tmp_path, monkeypatch, capsys):
    """The first number it takes breaks it: one line, and the run ends as it would."""
    monkeypatch.chdir(tmp_path)

    def add_scalar(*_):
        raise OSError("no space left")

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_scalar)
    assert gpt.main([*ARGS, *data_args(shards), "--tracker=tensorboard"]) == 0
    assert capsys.readouterr().out.count("--tracker=tensorboard has failed (no space left)") == 1


def test_the_picture_of_runs(shards, tmp_path, monkeypatch):
    """Every measured step is a point of every curve, every run four panels of the same scales, legends above them."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        assert gpt.main([*ARGS, *data_args(shards), "--telemetry_every=3", f"--seed={seed}"]) == 0
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    paths = sorted((tmp_path / "logs").glob("*.jsonl"))
    plot.plot_runs(paths, tmp_path / "runs")
    rows = [figures[0].axes[:4], figures[0].axes[4:]]
    for path, (losses, norms, _, seconds) in zip(paths, rows):
        measured = plot.read_events(path, "telemetry")
        assert losses.get_lines()[0].get_ydata().tolist() == [line["loss_ema"] for line in measured]
        assert norms.get_lines()[0].get_xdata().tolist() == [3, 6, 9]
        assert len(norms.get_lines()) == len(measured[0]["groups"]) and len(seconds.get_lines()) == 5
    figures[0].canvas.draw()
    for first, second in zip(*rows):
        assert first.get_ylim() == second.get_ylim() and first.get_xlim() == second.get_xlim()
        for panel in (first, second):
            low, high = panel.get_ylim()
            assert all(low <= y <= high for line in panel.get_lines() for y in line.get_ydata())
            assert panel.get_legend().get_window_extent().y0 >= panel.get_window_extent().y1
            assert panel.title.get_window_extent().y0 >= panel.get_legend().get_window_extent().y1 - 1
    paths[0].write_text('{"event": "validation", "step": 0}\n')
    with pytest.raises(results.RecordError, match="give the jsonl of a run with --telemetry_every"):
        plot.read_events(paths[0], "telemetry")
