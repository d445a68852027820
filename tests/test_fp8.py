"""The FP8 head: real FP8 matmuls on the CPU against float32."""

import pytest
import torch
from conftest import gpt, smoke_config, smoke_run


def make_operands(num_tokens=64, dim=128, vocab=256):
    torch.manual_seed(0)
    x = gpt.rms_norm(torch.randn(num_tokens, dim)).requires_grad_()
    w = (torch.randn(vocab, dim) * 0.05).requires_grad_()
    return x, w, torch.rand(num_tokens, vocab) - 0.5


def relative_error(ours, exact):
    return ((ours.float() - exact).norm() / exact.norm()).item()


def test_forward_and_backward_are_within_fp8_rounding():
    """Rounding to 3 (e4m3) or 2 (e5m2) mantissa bits errs by 2^-4 or 2^-3 at most, uniformly: rms 0.026 and 0.052 of a
    factor at the worst mantissa. Two factors add in squares; independent errors of a product sum do not grow."""
    x, w, grad = make_operands()
    (x @ w.T * grad).sum().backward()
    exact = (x @ w.T).detach(), x.grad, w.grad
    x8, w8 = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()
    y = gpt.fp8_linear(x8, w8)
    (y.float() * grad).sum().backward()
    assert (y.dtype, x8.grad.dtype, w8.grad.dtype) == (torch.bfloat16,) * 3
    errors = [relative_error(a, b) for a, b in zip((y, x8.grad, w8.grad), exact)]
    assert 1e-3 < errors[0] < 0.04 and 1e-3 < errors[1] < 0.065 and 1e-3 < errors[2] < 0.065


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


def test_custom_op_is_registered_whole():
    """Fake implementation and autograd, by torch's own checker (whose schema test cannot compare 8-bit outputs)."""
    x, w, _ = make_operands(32, 64, 128)
    torch.library.opcheck(
        gpt.fp8_linear_op,
        (x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_(), 0.02),
        test_utils=("test_faketensor", "test_autograd_registration"),
    )


def test_validation_does_not_use_it():
    cfg = smoke_config()
    model = gpt.GPT(cfg, use_fp8=True)
    model.head.weight.data.normal_(std=0.1)
    x = gpt.rms_norm(torch.randn(32, 64))
    exact = gpt.softcap(x @ model.head.weight.T)
    assert torch.equal(model.eval().head.logits(x), exact)
    assert not torch.equal(model.train().head.logits(x), exact)


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
