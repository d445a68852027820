"""Telemetry: each number against an independent computation, and its absence of effects on the run."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import advance, data_args, gpt, make_trainer, read_events, run
from run_ranks import run_ranks

ARGS = ["--preset=smoke_92", "--device=cpu", "--num_iterations=8", "--warmup_iterations=0"]
ARGS += ["--val_tokens=1024", "--val_loss_every=4"]


@pytest.fixture(scope="module")
def measured(shards, tmp_path_factory):
    """A folder with a run of the recipe with all mechanisms, which is measured every second step."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert gpt.main([*ARGS, *data_args(shards), "--telemetry_every=2", "--checkpoint_every=8"]) == 0
    return folder


def test_lines_and_their_fields(measured):
    """What is not measured is left out. Groups are updated every second step, tables later every fourth."""
    lines = read_events(folder=measured)
    assert [(line["event"], line["step"]) for line in lines] == [
        ("validation", 0), ("telemetry", 2), ("telemetry", 4), ("validation", 4), ("telemetry", 6),
        ("telemetry", 8), ("validation", 8)]
    (path,) = (measured / "logs").glob("*.json")
    validations = [[x["step"], x["val_loss"], x["train_time_ms"]] for x in lines if x["event"] == "validation"]
    assert validations == json.loads(path.read_text())["val_points"]
    lines = read_events("telemetry", folder=measured)
    names = "event step loss groups seconds"
    assert set(lines[0]) == set(names.split())
    always = {"matrix", "head", "scalar", "residual", "mix", "gate"}
    groups = {*always, "value_embed", "ngram"}
    assert [set(line["groups"]) for line in lines] == [groups, groups, always, {*groups, "embed"}]
    assert set(lines[0]["groups"]["matrix"]) == {"grad_norm", "weight_norm", "update_ratio", "momentum_norm"}
    for line in lines:
        for group, norms in line["groups"].items():  # only rows with a gradient change in a table with row_adam
            assert {name for name, norm in norms.items() if norm > 0} == (
                {"grad_norm"} if group == "ngram" else set(lines[0]["groups"]["matrix"]))


def test_telemetry_changes_no_bit(shards, measured, here, monkeypatch):
    """Neither losses nor the final parameters. Without it nothing is measured."""
    monkeypatch.setattr(gpt, "UpdateNorms", None)
    plain = run(shards, preset=ARGS)
    assert not list(here.rglob("*.jsonl"))
    (path,) = (measured / "logs").glob("*.json")
    result = json.loads(path.read_text())
    assert all(result[name] == plain[name] for name in ("train_points", "final_val_loss"))
    models = (next(folder.rglob("model.pt")) for folder in (measured, here))
    ours, theirs = (torch.load(path, weights_only=True)["tensors"] for path in models)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_updates_of_bfloat16_matrices_include_their_low_bits(shards, here):
    """The upper halves alone move in steps of 0.4 %, more than these updates."""
    ratios = []
    for options in ([], ["--matrix_dtype=bfloat16", "--state_dtype=float32"]):
        folder = Path(str(len(ratios)))
        options += ["--matrix_lr=0.0002", "--num_iterations=3", "--telemetry_every=3"]
        run(shards, *options, f"--out={folder}")
        (line,) = read_events("telemetry", folder=folder)
        ratios.append(line["groups"]["matrix"]["update_ratio"])
    assert 0 < ratios[0] < 1e-3 and ratios[1] == pytest.approx(ratios[0], rel=0.2)


def test_the_numbers(shards):
    """The fourth step, by tensors before and after it. One group is updated in every second step."""
    groups = {"scalar": dict(every=2), "ngram": dict(rule="row_adam")}
    options = dict(telemetry_every=1, adam_eps=1e-8, num_layers=2, ngram_rows=512, groups=groups)
    (trainer, step, close), lines, losses = make_trainer(shards, **options), [], []
    optimizer, grads = trainer.optimizer, {}
    for bucket in optimizer.buckets:
        def wait_and_note(bucket=bucket, wait=bucket.wait_for_gradient):
            wait()
            grads[bucket.name] = bucket.grad.clone()

        bucket.wait_for_gradient = wait_and_note
    log = gpt.RunLog(trainer.cfg, trainer.rt, {}, {}, trainer.progress)
    log.write_event = lambda _event, _step, **entries: lines.append(entries)
    monitor = gpt.Monitor(trainer, log)
    for _ in range(4):
        before = {bucket.name: bucket.shard.clone() for bucket in optimizer.buckets}
        losses.append(step(monitor.start_step()))
        monitor.end_step(losses[-1], trainer.schedule.at(trainer.progress.step - 1), must_wait=False)
    close()
    norm = lambda tensors: sum(t.double().square().sum().item() for t in tensors) ** 0.5
    assert lines[3]["groups"].keys() == {bucket.group_name for bucket in optimizer.buckets}
    for group, facts in lines[3]["groups"].items():
        buckets = [bucket for bucket in optimizer.buckets if bucket.group_name == group]
        num_tokens = 1024 * (2 if group == "scalar" else 1)
        expected = dict(grad_norm=norm(grads[bucket.name] for bucket in buckets) / num_tokens)
        expected |= dict(weight_norm=0, update_ratio=0, momentum_norm=0)
        if group != "ngram":
            weight = norm(bucket.shard for bucket in buckets)
            key = "momentum" if group == "matrix" else "exp_avg"
            update = norm(bucket.shard - before[bucket.name] for bucket in buckets)
            expected |= dict(weight_norm=weight, update_ratio=update / weight,
                             momentum_norm=norm(bucket.state[key] for bucket in buckets))
        assert facts == pytest.approx(expected, rel=1e-4) and facts["grad_norm"] > 0, group
    assert [line["loss"] for line in lines] == [loss.item() for loss in losses]


@pytest.mark.slow
def test_two_ranks_report_the_numbers_of_one_rank(shards, tmp_path):
    """Also of tables, whose rows are divided."""
    args = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--num_iterations=6", "--telemetry_every=3",
            "--micro_batch_tokens=512", "--ngram_rows=512", '--groups={"ngram": {"rule": "row_adam"}}']
    found = []
    for num_ranks in (1, 2):
        (folder := tmp_path / str(num_ranks)).mkdir()
        ends, _, errors = run_ranks("fail", num_ranks, "none", 0, *args, *data_args(shards), cwd=folder)
        assert not any(status for status, _ in ends), errors[-2000:]
        found.append(read_events("telemetry", folder=folder))
    for alone, line in zip(*found, strict=True):
        assert line["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert line["groups"].keys() == alone["groups"].keys()
        for group, numbers in line["groups"].items():
            assert numbers == pytest.approx(alone["groups"][group], rel=1e-4)


def test_a_tracker_gets_all_events(shards, here, monkeypatch, now, capsys):
    """wandb and trackio have one interface. A package that is missing ends the run before it trains."""
    advance(monkeypatch, now, gpt.Trainer, "train_step", 2.0)
    advance(monkeypatch, now, gpt.Trainer, "validate", 100.0)
    calls = []

    class Tracker:
        init = staticmethod(lambda **entries: calls.append(entries))
        log = staticmethod(lambda entries, step: calls.append((step, entries)))
        finish = staticmethod(lambda: calls.append("finish"))

    monkeypatch.setitem(sys.modules, "trackio", Tracker)
    result = run(shards, "--num_iterations=4", "--telemetry_every=2", "--tracker=trackio")
    assert calls[0]["name"] == result["run_id"] and calls[-1] == "finish"
    assert [line["seconds"] for line in read_events("telemetry")] == [dict(step=2.0)] * 2
    written = [(line.pop("step"), {line.pop("event"): line}) for line in read_events()]
    losses = [(step, {"train_loss": loss}) for step, loss in result["train_points"]]
    assert [call for call in calls[1:-1] if "train_loss" not in call[1]] == written
    assert [call for call in calls[1:-1] if "train_loss" in call[1]] == losses and len(losses) == 4
    assert {next(iter(entries)) for _, entries in written} == {"validation", "telemetry"}
    steps = [step for step, _ in calls[1:-1]]
    assert steps == sorted(steps)  # wandb drops a step that is lower than the one before
    monkeypatch.setitem(sys.modules, "wandb", None)
    args = ["--preset=smoke", "--device=cpu", "--warmup_iterations=0", "--tracker=wandb"]
    before = sorted(here.rglob("logs/*"))
    assert gpt.main([*args, *data_args(shards)]) == 2
    assert "error: --tracker=wandb needs its package" in capsys.readouterr().err and sorted(here.rglob("logs/*")) == before


def test_tensorboard_gets_all_events(shards, here):
    """Read again with the package. It is not among the requirements of the tests."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = run(shards, "--num_iterations=4", "--telemetry_every=2", "--tracker=tensorboard")
    (folder,) = Path("logs/tensorboard").iterdir()
    assert folder.name == result["run_id"]
    events = accumulator.EventAccumulator(str(folder)).Reload()
    losses = [(event.step, pytest.approx(event.value)) for event in events.Scalars("train_loss")]
    assert [tuple(point) for point in result["train_points"]] == losses and len(losses) == 4
    *_, end = events.Scalars("validation/val_loss")
    assert (end.step, end.value) == (4, pytest.approx(result["final_val_loss"]))
    assert [event.step for event in events.Scalars("telemetry/groups/matrix/grad_norm")] == [2, 4]


@pytest.mark.parametrize("function", ["init", "log", "finish"])
def test_a_tracker_that_raises_is_off(shards, here, monkeypatch, capsys, function):
    """With one line. The losses are those of a run without it."""
    class Tracker:
        init = log = finish = staticmethod(lambda *_args, **_options: None)

    def fail(*_args, **_options):
        raise ConnectionError("no network")

    setattr(Tracker, function, staticmethod(fail))
    monkeypatch.setitem(sys.modules, "trackio", Tracker)
    result = run(shards, "--num_iterations=3", "--tracker=trackio")
    out = capsys.readouterr().out
    assert out.count(f"--tracker=trackio is off: {function}() raises ConnectionError('no network')") == 1
    assert result["train_points"] == run(shards, "--num_iterations=3")["train_points"]
