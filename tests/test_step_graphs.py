"""Step graphs: a run with CUDA graphs has the bits of a run without them. On a CPU cpu_graphs.py replaces the graphs."""

import json
import math

import pytest
import torch
from conftest import assert_same_bits, gpt, make_runtime, smoke_config
from cpu_graphs import graphs_on_cpu
from run_ranks import run_ranks

FORMS = "rms_norm,head_loss"
COMMON = ["--device=cpu"]
SMOKE_92 = ["--preset=smoke_92", "--dtype=float32", "--fp8=on", "--fp8_parts=head,mlp",
            "--slow_momentum_start=0.4"]
SMOKE = ["--preset=smoke", "--micro_batch_tokens=512"]


def train(folder, *options, has_graphs=True, num_ranks=1) -> tuple[dict, dict]:
    """The result and the final tensors of a run."""
    forms = f"{FORMS},step_graphs" if has_graphs else FORMS
    options = [*COMMON, *options, f"--fast={forms}", f"--out={folder}"]
    if num_ranks > 1:
        ends, _, errors = run_ranks("train_with_graphs", num_ranks, *options)
        assert all(status == 0 for status, _ in ends), errors[-2000:]
    else:
        with graphs_on_cpu():
            assert gpt.main(options) == 0
    path = max(folder.glob("logs/*.json"))
    (model,) = folder.glob(f"checkpoints/*/{path.stem}/model.pt")
    result = json.loads(path.read_text())
    assert ("step_graphs" in result["choices"]["fast"]) == has_graphs
    return result, torch.load(model, weights_only=True)["tensors"]


def assert_same_run(ours, theirs) -> None:
    (result, tensors), (plain, plain_tensors) = ours, theirs
    assert result["train_points"] == plain["train_points"] and len(plain["train_points"]) > 5
    assert [loss for _, loss, _ in result["val_points"]] == [loss for _, loss, _ in plain["val_points"]]
    assert_same_bits(tensors, plain_tensors)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_record_92(num_ranks, tmp_path):
    """Six stages, two micro-batches in some, FP8, untying, averages and a slow momentum that begins late."""
    runs = [train(tmp_path / str(has_graphs), *SMOKE_92, has_graphs=has_graphs, num_ranks=num_ranks)
            for has_graphs in (True, False)]
    assert runs[0][0]["choices"]["fp8"] == "on"
    assert_same_run(*runs)


def test_laptop(tmp_path):
    options = ["--preset=laptop", "--dtype=float32", "--num_iterations=9", "--val_tokens=2048", "--val_seq_len=1024",
               "--warmup_iterations=1", "--seq_len=512", "--micro_batch_tokens=1024"]
    assert_same_run(*(train(tmp_path / str(has_graphs), *options, has_graphs=has_graphs)
                      for has_graphs in (True, False)))


def test_a_resumed_run(tmp_path):
    """Parameters, state and FP8 scales of a checkpoint are copied to where the graphs read them."""
    options = [*SMOKE, "--fp8=on", "--fp8_parts=head,mlp", "--checkpoint_every=6"]
    whole = train(tmp_path, *options)
    (step,) = tmp_path.glob("checkpoints/*/*/step_000006")
    again, tensors = train(tmp_path, *options, f"--resume={step}")
    assert again["resumed_at"] == [6]
    assert_same_run((dict(again, val_points=whole[0]["val_points"]), tensors), whole)


def test_the_guard(tmp_path, monkeypatch, capsys):
    """After a rollback activations and updates are in float32, and have no graphs."""
    real, captures = gpt.Trainer.train_step, []

    def train_step(trainer, *args):
        if trainer.progress.step == 7:
            captures[:] = [graphs.can_capture for graphs in trainer.graphs]
        return real(trainer, *args) * (math.nan if trainer.progress.step == 6 else 1)

    monkeypatch.setattr(gpt.Trainer, "train_step", train_step)
    options = [*SMOKE, "--dtype=bfloat16", "--fp8=off", "--guard=on"]
    runs = [train(tmp_path / str(has_graphs), *options, has_graphs=has_graphs) for has_graphs in (False, True)]
    assert runs[1][0]["choices"]["dtype"] == "float32" and captures == [False] * 3
    assert "restored weights of step 0, activations become float32\n" in capsys.readouterr().out
    assert_same_run(*runs)


def test_which_graphs_are_captured(shards):
    """One for each size of micro-batches and kind of targets, and one for each dense bucket. None in validation, or
    after the warm-up. Segments and head use memory of their own."""
    stages = (gpt.Stage(1, 64, 64, tokens_per_step=512), gpt.Stage(1, 128, 64), gpt.Stage(1, 128, 64, num_classes=200))
    cfg = smoke_config(shards, stages=stages, micro_batch_tokens=1024)
    with graphs_on_cpu() as pools:
        trainer = gpt.Trainer(cfg, make_runtime(fast=frozenset({"step_graphs"})))
        trainer.warm_up(gpt.TrainData(cfg, trainer.schedule), gpt.ValData(cfg))
        numbers = [len(graphs.graphs) for graphs in trainer.graphs]
        num_dense = len(trainer.optimizer.buckets) - sum(table.is_sparse for table in trainer.optimizer.tables)
        assert numbers == [2, 3, num_dense] and sorted(map(len, pools.values())) == sorted(numbers)
        state, batches = trainer.schedule.at(0), gpt.TrainData(cfg, trainer.schedule).batches(trainer.rt.comm, 0, 9)
        trainer.choose_operations(torch.float64, trainer.fast)
        trainer.train_step(batches, state)
        assert not any(graphs.graphs for graphs in trainer.graphs)
