"""The FP8 head: real FP8 matmuls on the CPU against float32."""

import pytest
import torch
from conftest import gpt, smoke_config, smoke_run


def relative_error(ours, exact):
    return ((ours.float() - exact).norm() / exact.norm()).item()


def test_loss_and_gradients_are_within_fp8_rounding():
    """Rounding to 3 (e4m3) or 2 (e5m2) mantissa bits errs by 2^-4 or 2^-3 at most, uniformly: rms 0.026 and 0.052 of a
    factor at the worst mantissa. Two factors add in squares, and logits that err move the gradient itself by as much."""
    torch.manual_seed(0)
    x, targets = gpt.rms_norm(torch.randn(64, 128)).requires_grad_(), torch.randint(256, (64,))
    w = (torch.randn(256, 128) * 0.05).requires_grad_()
    exact = torch.nn.functional.cross_entropy(gpt.softcap(x @ w.T, 15.0), targets, reduction="sum")
    exact.backward()
    x8, w8 = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()
    loss = gpt.HeadLoss.apply(x8, w8, targets, 15.0, True, False)
    loss.backward()
    assert (loss.dtype, x8.grad.dtype, w8.grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert 1e-5 < abs(loss.item() / exact.item() - 1) < 0.01
    assert 1e-3 < relative_error(x8.grad, x.grad) < 0.08 and 1e-3 < relative_error(w8.grad, w.grad) < 0.08


def test_scales_keep_unit_activations_and_gradients_in_range():
    one_hot = torch.zeros(16, 768)
    one_hot[:, 3] = 768**0.5  # the largest entry an RMS-normalised vector can have
    x8 = gpt.to_fp8(one_hot, 768**0.5 / 448, torch.float8_e4m3fn)
    assert x8.float().max() == 448
    assert gpt.to_fp8(torch.tensor([1.0, -1.0]), gpt.FP8_GRAD_SCALE, torch.float8_e5m2).float().tolist() == [
        448,
        -448,
    ]
    assert (
        gpt.to_fp8(torch.tensor([9.0]), gpt.FP8_WEIGHT_SCALE, torch.float8_e4m3fn).float().item() == 448
    )  # saturates


def test_validation_does_not_use_it():
    model = gpt.GPT(smoke_config(), use_fp8=True)
    model.head.weight.data.normal_(std=0.1)
    x, targets = gpt.rms_norm(torch.randn(32, 64)), torch.randint(257, (32,))
    exact = torch.nn.functional.cross_entropy(
        gpt.softcap(x @ model.head.weight.T, 15.0), targets, reduction="sum"
    )
    assert torch.equal(model.eval().head(x, targets), exact)
    assert not torch.equal(model.train().head(x, targets), exact)


def test_a_run_with_it_trains_as_well(shards, tmp_path):
    on = smoke_run(shards, tmp_path, "--fp8_head=on")
    off = smoke_run(shards, tmp_path, "--fp8_head=off")
    assert "fp8 head: on" in on["stdout"] and "fp8 head: off" in off["stdout"]
    assert on["final_val_loss"] == pytest.approx(off["final_val_loss"], abs=0.02)
    assert on["final_val_loss"] != off["final_val_loss"]


def test_forcing_it_where_it_cannot_work(capsys):
    args = [
        "--preset=smoke",
        "--device=cpu",
        "--fp8_head=on",
        "--num_heads=1",
        "--head_dim=72",
        "--model_dim=72",
    ]
    assert gpt.main(args) == 2
    assert "--fp8_head=auto" in capsys.readouterr().err


def test_a_failing_probe_turns_it_off_with_one_line():
    cfg = smoke_config(num_heads=1, head_dim=72, model_dim=72, fp8_head="auto")
    use, note = gpt.choose_fp8(cfg, torch.device("cpu"))
    assert not use and note.count("\n") == 0 and note.startswith("fp8 head: off")
