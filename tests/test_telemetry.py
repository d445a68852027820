"""Telemetry: each number against an independent computation, and its absence of effects on the run."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import before_call, data_args, find_saved, gpt, make_runtime, run, smoke_config
from run_ranks import run_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from records import plot, results

ARGS = ["--preset=smoke", "--device=cpu", "--num_layers=3", "--num_iterations=9", "--val_loss_every=4"]
ARGS += ["--micro_batch_tokens=512"]  # so that two ranks sum equal packed sequences


def read_lines(cwd) -> list[dict]:
    (path,) = (Path(cwd) / "logs").glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured_lines(cwd=".") -> list[dict]:
    return [line for line in read_lines(cwd) if line["event"] == "telemetry"]


def make_log(trainer, lines: list) -> gpt.RunLog:
    """The log of a run without files, whose events are appended to lines."""
    log = gpt.RunLog(trainer.cfg, trainer.rt, gpt.describe_run(trainer.cfg, trainer.rt, []))
    log.write_event = lambda _event, _step, **entries: lines.append(entries)
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
    assert [
        [x["step"], x["val_loss"], x["train_time_ms"]] for x in lines if x["event"] == "validation"
    ] == result["val_points"]
    line = next(line for line in lines if line["event"] == "telemetry")
    assert set(line) == {"event", "step", "train_time_ms", "loss", "loss_ema", "loss_slope_per_1000_steps", "groups",
                         "layers", "logits", "fp8", "seconds"}  # fmt: skip
    assert set(line["groups"]) == {"matrix", "embed", "value_embed", "head", "scalar"}
    assert set(line["groups"]["matrix"]) == {"grad_norm", "weight_norm", "update_ratio", "momentum_norm"}
    assert len(line["layers"]) == 3 and set(line["fp8"]) == {"x", "w", "grad"}


def test_telemetry_changes_no_loss(shards, measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gpt.main([*ARGS, *data_args(shards)]) == 0
    (path,) = Path("logs").glob("*.json")
    assert json.loads(path.read_text())["final_val_loss"] == measured[1]["final_val_loss"]


@pytest.mark.parametrize("fast", [frozenset(), frozenset({"sparse_embedding", "fused_adamw", "head_loss"})], ids=len)
def test_the_numbers(shards, fast):
    """The third step of a trainer against autograd and tensors before and after it, in plain and in fast forms."""
    cfg, rt = smoke_config(shards, telemetry_every=1, adam_eps=1e-8), make_runtime(fast=fast)
    trainer, lines = gpt.Trainer(cfg, rt), []
    tables = {name: bucket.sparse for name, bucket in trainer.optimizer.bucket_of.items() if bucket.sparse}
    assert set(tables) == ({f"value_embeds.{i}" for i in range(2)} if fast else set())

    log = make_log(trainer, lines)
    log.start_training(trainer)
    telemetry = gpt.Telemetry(trainer, log)
    data = gpt.TrainData(cfg, trainer.schedule)
    batches, losses = gpt.Prefetcher(data.batches(rt, 0, 3), torch.device("cpu")), []
    blocks = []
    trainer.model.blocks[1].register_forward_hook(
        lambda _m, _i, output: blocks.append(output.detach().clone())
    )
    for step in range(3):
        params = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
        blocks.clear()
        grads = {}
        update = trainer.optimizer.step

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
    first = blocks[0]  # of the first micro-batch, which is measured
    shown = lines[2]["layers"][1]
    assert shown == pytest.approx(
        dict(mean=first.mean().item(), std=first.std().item(), max=first.abs().max().item())
    )
    values = [loss.item() for loss in losses]
    assert lines[2]["loss"] == values[2]
    ema = 0.98 * (0.98 * values[0] + 0.02 * values[1]) + 0.02 * values[2]
    assert lines[2]["loss_ema"] == pytest.approx(ema)
    assert 15 - 30 < lines[2]["logits"]["mean"] < 30 and lines[2]["logits"]["max"] <= 30


def test_the_seconds_of_a_step(shards, here, monkeypatch, now):
    """The time advances only in these functions. Each runs in one part of the step."""
    parts = {"data wait": (gpt.Prefetcher, "__next__", 1), "forward and backward": (torch.Tensor, "backward", 10),
             "communication": (gpt.RowSparseGradient, "wait", 100), "optimizer": (gpt.StepTimer, "add_norms", 1000),
             "measuring": (gpt.Telemetry, "_measure_layers", 100_000)}  # fmt: skip
    calls = Counter()
    before_call(monkeypatch, gpt.Trainer, "run", lambda *_: calls.clear())  # earlier calls compare fast forms
    for part, (owner, name, seconds) in parts.items():
        before_call(monkeypatch, owner, name,
                    lambda *_, s=seconds, p=part: (calls.update([p]), now.__setitem__(0, now[0] + s)))
    args = ["--tokens_per_step=1024", "--micro_batch_tokens=512", "--val_loss_every=0"]
    run(shards, *args, "--num_iterations=1", "--telemetry_every=1")
    (line,) = measured_lines()
    assert line["seconds"] == {part: calls[part] * seconds for part, (_, _, seconds) in parts.items()}
    assert [calls[part] for part in parts] == [2, 2, 1, 7, 1]  # two micro-batches, one table, seven buckets


def test_the_slope_of_the_loss(measured):
    """Least squares over the losses since the last line. A loss that falls by 0.1 per step has slope -100."""
    lines = [line for line in measured[0] if line["event"] == "telemetry"]
    assert all(line["loss_slope_per_1000_steps"] < 0 for line in lines)
    trainer, lines = gpt.Trainer(smoke_config(telemetry_every=4), make_runtime()), []
    log = make_log(trainer, lines)
    log.start_training(trainer)
    telemetry = gpt.Telemetry(trainer, log)
    for step, loss in enumerate((3.0, 2.9, 2.8, 2.7), 1):
        measure_step(trainer, log, telemetry, step, lambda loss=loss: torch.tensor(loss))
    (line,) = lines
    assert line["loss_slope_per_1000_steps"] == pytest.approx(-100, rel=1e-4)


def test_a_resumed_run_has_the_telemetry_of_a_run_without_a_stop(shards, here):
    """Bit for bit, except its times. The losses since the last line are in the checkpoint."""
    args = ["--num_iterations=12", "--val_loss_every=0", "--telemetry_every=4", "--checkpoint_every=6"]
    run(shards, *args)
    expected = [line for line in measured_lines() if line["step"] > 6]
    Path("logs").rename("whole")
    run(shards, *args, f"--resume={find_saved(6)}", "--checkpoint_dir=other")
    resumed = measured_lines()
    assert [line["step"] for line in resumed] == [8, 12]
    for line in (*expected, *resumed):
        del line["seconds"], line["train_time_ms"]
    assert resumed == expected


def test_groups_without_an_update_are_left_out(shards, here):
    """Adam updates every second step, and the embedding only after it is untied. No number is 0 instead."""
    args = ["--num_iterations=6", "--val_loss_every=0", "--telemetry_every=1"]
    args += [f"--{group}_every=2" for group in ("embed", "value_embed", "head", "scalar")]
    run(shards, *args, "--tie_head=on", "--untie_frac=0.5")
    lines = measured_lines()
    tied = {"matrix", "value_embed", "head", "scalar"}
    assert [set(line["groups"]) for line in lines] == [{"matrix"}, tied, {"matrix"}, tied, {"matrix"}, {*tied, "embed"}]
    assert all(norm > 0 for line in lines[1:] for group in line["groups"].values() for norm in group.values())


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_no_number_of_a_table_is_zero_instead(shards, here, fast):
    """The recipe with all mechanisms, with a sharded and with an ordinary n-gram table. What is not measured is left out."""
    args = ["--num_iterations=8", "--val_loss_every=0", "--telemetry_every=4", "--warmup_iterations=0", f"--fast={fast}"]
    run(shards, *args, preset=["--preset=smoke_frontier", "--device=cpu", "--save_model=off"])
    for line in measured_lines():
        assert {"ngram", "value_embed"} <= set(line["groups"])
        assert [(group, name) for group, norms in line["groups"].items() for name, norm in norms.items() if norm == 0] == []


def test_fractions_of_fp8():
    """The largest value of e4m3 is 448 and the smallest is 2^-9. Half of the smallest is rounded to zero."""
    x = torch.tensor([0.0, 1.0, 449.0, -1000.0, 2.0**-11, 448.0, 2.0**-9, -(2.0**-11)])
    fractions = gpt.measure_fp8(x, 1.0, torch.float8_e4m3fn)
    assert fractions == dict(saturated=2 / 8, flushed=2 / 8)
    assert gpt.measure_fp8(x * 4, 4.0, torch.float8_e4m3fn) == fractions


@pytest.mark.slow
def test_two_ranks_report_the_numbers_of_one_rank(shards, measured, tmp_path):
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
def test_telemetry_does_not_change_the_graphs_of_training(shards, tmp_path, monkeypatch):
    """Telemetry adds one graph, for its forward pass. All other graphs are equal."""
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
        telemetry = gpt.Telemetry(trainer, make_log(trainer, []))
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
    """Nothing is measured: there are no hooks and no timer."""
    trainer = gpt.Trainer(smoke_config(shards), make_runtime())
    before = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in trainer.model.modules()
    )
    gpt.Telemetry(trainer, None)
    after = sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in trainer.model.modules()
    )
    assert before == after == 0 and not trainer.optimizer.timer.rows


def test_a_tracker_gets_all_numbers_of_the_jsonl(shards, tmp_path, monkeypatch):
    """Each number of each line, read back from TensorBoard at its step."""
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


def test_a_tracker_whose_package_is_missing(shards, tmp_path, monkeypatch):
    """Python's error ends the run before it writes a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ModuleNotFoundError, match="trackio"):
        gpt.main([*ARGS, *data_args(shards), "--tracker=trackio"])
    assert not list(tmp_path.rglob("*.txt"))


def test_the_picture_of_runs(shards, tmp_path, monkeypatch):
    """Each measured step is a point of each curve. Each run has four panels with common scales and legends above."""
    monkeypatch.chdir(tmp_path)
    for seed in (0, 1):
        assert gpt.main([*ARGS, *data_args(shards), "--telemetry_every=3", f"--seed={seed}"]) == 0
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, out: figures.append(figure))
    paths = sorted((tmp_path / "logs").glob("*.jsonl"))
    plot.plot_runs(paths, tmp_path / "runs")
    rows = [figures[0].axes[:4], figures[0].axes[4:]]
    for path, (losses, norms, _, seconds) in zip(paths, rows):
        measured = plot.read_events(path)["telemetry"]
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
        plot.plot_runs(paths[:1], tmp_path / "runs")
