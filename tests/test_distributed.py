"""Several processes on gloo against one: the same parameters, the same loss, the same refusals."""

import json

import pytest
import torch
from conftest import ROOT, launch, run_script, smoke_run


def train_on(nproc, folder, shards, **changes):
    out = folder / f"{nproc}.pt"
    changes = dict(
        changes, num_layers=3, adam_eps=1.0, train_files=f"{shards}/train_*.bin", tokens_per_step=6144
    )
    worker = ROOT / "tests" / "distributed_worker.py"
    done = launch([str(worker), str(out), json.dumps(changes)], folder, nproc)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_parameters_after_three_steps_do_not_depend_on_the_ranks(rule, shards, tmp_path):
    """Gradients differ by the order of float32 sums: 1e-6 of entries up to 1e3, so 1e-3 at most in Adam's units, and
    with its epsilon at 1 a step passes on lr * 1e-3 = 6e-4 of that at worst, where it moves entries by lr = 0.6. Muon's
    iteration multiplies 1e-7 by at most 3.4445^5 = 485. Without the reduction or the gathering the difference is 0.1."""
    results = {n: train_on(n, tmp_path, shards, matrix_rule=rule) for n in (1, 2, 3)}
    for n in (2, 3):
        assert results[n]["spread"] == 0  # bit-identical on all ranks
        for name, param in results[1]["params"].items():
            assert torch.allclose(param, results[n]["params"][name], atol=1e-4), name
    assert all(full == 3 * local for local, full in results[3]["shards"])
    assert [full for _, full in results[3]["shards"]] != [
        full for _, full in results[1]["shards"]
    ]  # some were padded


def test_torchrun_gives_the_same_validation_loss(shards, tmp_path):
    losses = {}
    for nproc in (1, 2, 4):
        (tmp_path / str(nproc)).mkdir()
        losses[nproc] = smoke_run(shards, tmp_path / str(nproc), "--seed=3", nproc=nproc)["final_val_loss"]
    assert losses[2] == pytest.approx(losses[1], abs=1e-3) and losses[4] == pytest.approx(
        losses[1], abs=1e-3
    )


def test_only_rank_0_writes_and_reports_bad_input(shards, tmp_path):
    done = run_script(
        ["--preset=smoke", "--tokens_per_step=512", f"--train_files={shards}/train_*.bin"], tmp_path, nproc=2
    )
    assert done.returncode != 0 and done.stderr.count("train_gpt.py: error:") == 1
    assert "2 ranks cannot share" in done.stderr
    result = smoke_run(shards, tmp_path, nproc=2)
    assert len(list((tmp_path / "logs").iterdir())) == 2  # one log, one json
    assert result["config"]["derived"]["ranks"] == 2 and result["stdout"].count("val_loss") == 3
