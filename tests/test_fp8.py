"""FP8: casts as they are, multiplied in float32 on the CPU, against float32 throughout."""

import functools
import math

import pytest
import torch
from conftest import gpt, make_runtime, make_trainer, relative_error, smoke_config, smoke_run
from run_ranks import run_ranks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
CAP = gpt.Softcap(30.0, 0.0, 7.5)
FP8_MLP = dict(fp8="on", fp8_parts="mlp", model_dim=128, num_heads=2, head_dim=64, num_layers=2)


def test_loss_and_gradients_are_within_fp8_rounding():
    """Rounding to 3 (e4m3) or 2 (e5m2) mantissa bits errs by 2^-4 or 2^-3 at most, uniformly: rms 0.026 and 0.052 of a
    factor at the worst mantissa. Two factors add in squares, and logits that err move the gradient by as much."""
    torch.manual_seed(0)
    x, targets = gpt.rms_norm(torch.randn(64, 128)).requires_grad_(), torch.randint(256, (64,))
    w = (torch.randn(256, 128) * 0.05).requires_grad_()
    exact = torch.nn.functional.cross_entropy(CAP(x @ w.T), targets, reduction="sum")
    exact.backward()
    x8, w8 = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()
    scales = gpt.HeadScales(x=128**0.5 / 448, weight=0.875 / 448, grad=1 / 448)
    loss = gpt.FusedHeadLoss.apply(False, scales, x8, w8, targets[:, None], torch.ones(1), CAP)
    loss.backward()
    assert (loss.dtype, x8.grad.dtype, w8.grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert 1e-5 < abs(loss.item() / exact.item() - 1) < 0.01
    assert 1e-3 < relative_error(x8.grad, x.grad) < 0.08 and 1e-3 < relative_error(w8.grad, w.grad) < 0.08


@pytest.mark.parametrize("grad_dtype", [E4M3, E5M2], ids=str)
def test_products_on_a_cpu_are_those_of_the_real_operation(grad_dtype):
    """Products of FP8 numbers are exact in float32. Only the order of 64 sums, and one rounding at the end, differ.
    The matrices are small: on some processors the real operation takes a thousand times longer than its stand-in."""
    torch.manual_seed(0)
    a, b = ((torch.randn(rows, 64) * 8).to(dtype) for rows, dtype in ((32, grad_dtype), (48, E4M3)))
    scales = torch.tensor(0.25), torch.tensor(3.0)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        ours = gpt.matmul(gpt.Scaled(a, scales[0]), gpt.Scaled(b, scales[1]), dtype)
        real = torch._scaled_mm(a, b.T, *scales, out_dtype=dtype)
        assert ours.shape == (32, 48) and ours.dtype == real.dtype == dtype
        assert torch.allclose(ours.float(), real.float(), rtol=error, atol=error * real.float().abs().max().item())
        assert torch.equal(gpt.matmul(gpt.Scaled(a, 0.25), gpt.Scaled(b, 3.0), dtype, fast=True), ours)


def test_scales_keep_unit_activations_and_gradients_in_range():
    one_hot = torch.zeros(16, 768)
    one_hot[:, 3] = 768**0.5  # the largest entry an RMS-normalised vector can have
    quantize = lambda *args: gpt.quantize(*args).values.float()
    assert quantize(one_hot, E4M3, 768**0.5 / 448).max() == 448
    scales = gpt.head_fp8_scales(smoke_config())
    assert scales == (8 / 448, 2**-9, 1 / 448, None)  # of 64 channels, and the record's of the weight
    assert quantize(torch.tensor([1.0, -1.0]), E5M2, scales.grad).tolist() == [448, -448]
    assert quantize(torch.tensor([0.875, 9.0]), E4M3, scales.weight).tolist() == [448, 448]  # saturates


@pytest.mark.slow
def test_a_run_with_it_trains_as_well(shards, tmp_path):
    on = smoke_run(shards, tmp_path, "--fp8=on")
    off = smoke_run(shards, tmp_path, "--fp8=off")
    assert ", fp8_head\n" in on["stdout"] and "fp8" not in off["stdout"]
    assert on["choices"]["fp8"] == "on" and off["choices"]["fp8"] == "off"
    assert on["final_val_loss"] == pytest.approx(off["final_val_loss"], abs=0.02)
    assert on["final_val_loss"] != off["final_val_loss"]


@pytest.mark.skipif(gpt.triton is None, reason="needs Triton")
def test_queries_keys_and_values_in_fp8():
    """Inputs above 8 saturate, and gradients above 8. Everything is e4m3, so each factor errs by 0.026 rms. Triton's
    interpreter halves gradients that round up to a power of two."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    heads = gpt.Heads(4, 16, 16, 1, False, False)  # 150 tokens, no norm and no rotation
    zeros = functools.partial(torch.zeros, device=device)
    rope = gpt.Rope(zeros(150, 1, 8) + 1, zeros(150, 1, 8), torch.ones((), device=device), 0, None)
    inputs = gpt.StepInputs(zeros(2), {}, zeros(150).bool())
    x = gpt.rms_norm(torch.randn(150, 256, device=device)).requires_grad_()
    w = (torch.randn(192, 256, device=device) * 0.02).requires_grad_()
    grad = torch.randn(150, 192, device=device) * 0.1

    def run(make_qkv, x, **options):
        outputs = make_qkv(x, w, rope, heads, inputs, gpt.Operations(), **options)
        return torch.cat([y.flatten(1) for y in outputs], 1)

    exact, ours = run(gpt.make_qkv, x), run(gpt.fused_qkv, x, fp8_dtype=gpt.E4M3)
    assert 1e-3 < relative_error(ours, exact) < 0.05
    differentiate = lambda y, grad: torch.autograd.grad(y, (x, w), grad, retain_graph=True)
    for ours_grad, exact_grad in zip(differentiate(ours, grad), differentiate(exact, grad)):
        assert 1e-3 < relative_error(ours_grad, exact_grad) < (0.05 if device == "cuda" else 0.12)
    large = x.detach() * 10
    saturated, clamped = (run(gpt.fused_qkv, y, fp8_dtype=gpt.E4M3) for y in (large, large.clamp(-8, 8)))
    assert torch.equal(saturated, clamped) and large.abs().max() > 8
    large = grad * 1e3
    assert all(map(torch.equal, differentiate(ours, large), differentiate(ours, large.clamp(-8, 8))))


@pytest.mark.parametrize("use_kernel", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_the_mlp_in_fp8(use_kernel):
    """Every factor is rounded to e4m3, gradients to e5m2. The amax of both hidden tensors are the gradient of amax."""
    torch.manual_seed(0)
    device = "cuda" if use_kernel else "cpu"
    x = gpt.rms_norm(torch.randn(128, 256, device=device)).requires_grad_()
    up, down = ((torch.randn(256, 512, device=device) / 16).requires_grad_() for _ in range(2))
    grad = torch.randn(128, 256, device=device) * 0.1
    pre = x @ up
    exact = (hidden := pre.relu().square()) @ down.T
    pre_grad = 2 * (grad @ down) * pre.relu()
    amax, inputs = (hidden.max().item(), pre_grad.abs().max().item()), (x, up, down)
    scales = [torch.tensor(y, device=device, requires_grad=True) for y in (amax[0] / 448, amax[1] / 57344)]
    ours = gpt.fused_relu2_mlp(*inputs, scales, use_kernel, use_fp8=True)
    *grads, amax_hidden, amax_grad = torch.autograd.grad(ours, (*inputs, *scales), grad)
    assert (amax_hidden.item(), amax_grad.item()) == pytest.approx(amax, rel=0.1)
    assert 1e-3 < relative_error(ours, exact) < 0.07
    for ours_grad, exact_grad in zip(grads, torch.autograd.grad(exact, inputs, grad)):
        assert 1e-3 < relative_error(ours_grad, exact_grad) < 0.12
    small = scales[0] / 4, scales[1]  # the hidden activation saturates
    assert relative_error(gpt.fused_relu2_mlp(*inputs, small, use_kernel, use_fp8=True), exact) > 0.2


def test_logits_in_fp8():
    """The loss of e4m3 logits is the loss of their rounded values."""
    torch.manual_seed(0)
    x, w, targets = gpt.rms_norm(torch.randn(64, 128)), torch.randn(256, 128) * 0.3, torch.randint(256, (64, 1))
    scales = gpt.head_fp8_scales(gpt.make_config({"preset": "record_92"}))
    assert scales.logits_dtype == E4M3 and gpt.head_fp8_scales(smoke_config()).logits_dtype is None
    both = scales, scales._replace(logits_dtype=None)
    losses = [gpt.FusedHeadLoss.apply(False, s, x, w, targets, torch.ones(1), CAP) for s in both]
    (x8, _), (w8, _) = gpt.quantize(x, E4M3, scales.x), gpt.quantize(w, E4M3, scales.weight)
    logits = (x8.float() * scales.x @ (w8.float() * scales.weight).T).to(E4M3).float()
    exact = torch.nn.functional.cross_entropy(CAP(logits), targets[:, 0], reduction="sum")
    assert losses[0].item() == pytest.approx(exact.item(), rel=1e-5) != losses[1].item()
    ones, ten = torch.ones(16, 16).to(E4M3), torch.tensor(10.0)
    assert gpt.matmul(gpt.Scaled(ones, ten), gpt.Scaled(ones, ten), E4M3).float().max() == 448  # saturates


def test_scales_are_measured_from_each_tensor():
    """The largest entry becomes the largest finite number. Zeros stay zeros."""
    for dtype, limit in ((E4M3, 448), (E5M2, 57344)):
        for size in (1e-6, 1.0, 1e6):
            cast, scale = gpt.quantize(torch.tensor([[size, -size / 2]]), dtype)
            assert cast.float().tolist() == [[limit, -limit / 2]]
            assert (cast.float() * scale).flatten().tolist() == pytest.approx([size, -size / 2], rel=1e-6)
        assert not gpt.quantize(torch.zeros(2, 3), dtype)[0].float().any()


@pytest.mark.parametrize("name", gpt.FP8_FORMS)
def test_validation_and_sampling_are_in_the_activation_dtype(name):
    """Only the operations of training change, and the guard can take them back."""
    cfg = smoke_config(num_heads=4, model_dim=128, zero_init="off")
    trainer = gpt.Trainer(cfg, make_runtime(fast=frozenset({name, "block_attention"})))
    model = trainer.model
    model.head.weight.data.normal_(std=0.1)
    batch = gpt.Batch(*torch.randint(257, (2, 64)), torch.zeros(64, dtype=torch.int32))
    inputs = batch, gpt.make_step_inputs(gpt.Schedule(cfg).at(0), 64, 64, cfg, CPU)
    exact = model(*inputs, gpt.Operations()).item()
    assert model(*inputs, trainer.val_ops).item() == pytest.approx(exact, rel=1e-6)
    assert 1e-7 < abs(model(*inputs, trainer.ops, torch.ones(1)).item() / exact - 1) < 0.02
    assert gpt.raise_precision(trainer, dict(choices={})) and trainer.fast == {"block_attention"}
    assert model(*inputs, trainer.ops, torch.ones(1)).item() == pytest.approx(exact, rel=1e-6)


def test_a_delayed_scale_is_the_largest_of_all_micro_batches(shards, monkeypatch):
    """The first micro-batch of a step may have the larger amax. The next step begins anew."""
    trainer, step, close = make_trainer(shards, **FP8_MLP)
    scales, seen = trainer.fp8_scales, []
    product = gpt.relu2_matmul

    def note(*args):
        seen.append(product(*args))
        return seen[-1]

    monkeypatch.setattr(gpt, "relu2_matmul", note)
    for _ in range(3):  # in the first step the zero output matrix has no gradient before the activation
        seen.clear()
        before = scales.read()[1].item()
        step()
        hidden, grads = ([amax.item() for *_, amax in seen[i::2]] for i in range(2))
        assert len(hidden) == len(grads) == 2  # micro-batches
        expected = max(grads) * 1.25 / 57344 if any(grads) else before
        assert scales.read().tolist() == pytest.approx([max(hidden) * 1.03 / 448, expected], rel=1e-6)
    close()
    assert hidden[0] != hidden[1] and all(grads) and scales.amax is None and scales.leaves[0].grad is None


def test_a_delayed_scale_is_the_largest_of_all_ranks(tmp_path):
    ends, out, errors = run_ranks("scales", 2, tmp_path / "scales.pt")
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    one = [7 * 1.03 / 448, 3 * 1.25 / 57344]
    assert torch.load(tmp_path / "scales.pt", weights_only=True).flatten().tolist() == pytest.approx(one * 2)


def test_a_scale_that_is_zero_or_not_finite_is_ignored():
    model, unit = gpt.GPT(smoke_config(num_layers=3, layers=(gpt.LayerSpec(),) * 3)), 1.03 / 448
    scales = gpt.DelayedScales(model, gpt.Comm())
    for entries, expected in (
        ((2.0, 3.0, 4.0), (2, 3, 4)),
        ((math.nan, 5.0, math.inf), (2, 5, 4)),  # each MLP separately
        ((6.0, math.nan, 1.0), (6, 5, 1)),  # until the next usable one
        ((0.0, 1.0, 1e-9), (6, 1, 1e-6 / unit)),  # 1e-6 is the smallest scale
    ):
        for factor in (0.5, 1.0):  # micro-batches
            for block, entry in zip(model.blocks, entries):
                block.mlp.scales[0].grad, block.mlp.scales[1].grad = torch.tensor([entry * factor, 0.0])
            scales.record_amax()
        scales.update()
        hidden, grads = scales.read().view(3, 2).T
        assert torch.allclose(hidden, unit * torch.tensor(expected), rtol=1e-6, atol=0)
        assert grads.tolist() == [2**-3] * 3 and scales.amax is None


def test_a_snapshot_restores_scales(shards):
    """A weight becomes NaN. The amax of the bad step is forgotten. Then training goes on."""
    trainer, step, close = make_trainer(shards, **FP8_MLP)
    initial = trainer.fp8_scales.read()
    for _ in range(3):
        step()
    snapshot, losses = gpt.Snapshot(trainer), []
    saved = trainer.fp8_scales.read()
    for _ in range(2):
        losses.append(step())
    later = trainer.fp8_scales.read()
    assert not (saved == initial).any() and not (saved == later).any()
    trainer.model.blocks[1].mlp.up_down.data[0, 0, 0] = math.nan
    assert step().isnan()
    snapshot.restore()
    assert torch.equal(trainer.fp8_scales.read(), saved) and trainer.fp8_scales.amax is None
    assert step().isfinite() and all(loss.isfinite() for loss in losses)
    close()
