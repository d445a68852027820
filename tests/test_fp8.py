"""FP8: casts as they are, multiplied in float32 on the CPU, against float32 throughout."""

import math

import pytest
import torch
from conftest import AT_THE_END, gpt, make_runtime, make_trainer, run, smoke_config, smoke_run
from run_ranks import run_ranks

CAP = gpt.Softcap(30.0, 0.0, 7.5)
FP8_MLP = dict(fp8="on", fp8_parts="mlp", model_dim=128, num_heads=2, head_dim=64, num_layers=2)


def relative_error(ours, exact):
    return ((ours.float() - exact).norm() / exact.norm()).item()


def test_loss_and_gradients_are_within_fp8_rounding():
    """Rounding to 3 (e4m3) or 2 (e5m2) mantissa bits errs by 2^-4 or 2^-3 at most, uniformly: rms 0.026 and 0.052 of a
    factor at the worst mantissa. Two factors add in squares, and logits that err move the gradient itself by as much."""
    torch.manual_seed(0)
    x, targets = gpt.rms_norm(torch.randn(64, 128)).requires_grad_(), torch.randint(256, (64,))
    w = (torch.randn(256, 128) * 0.05).requires_grad_()
    exact = torch.nn.functional.cross_entropy(CAP(x @ w.T), targets, reduction="sum")
    exact.backward()
    x8, w8 = x.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()
    scales = gpt.FP8Scales(x=128**0.5 / 448, weight=0.875 / 448, grad=1 / 448)
    loss = gpt.fused_head_loss(x8, w8, targets[:, None], torch.ones(1), CAP, scales=scales)
    loss.backward()
    assert (loss.dtype, x8.grad.dtype, w8.grad.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert 1e-5 < abs(loss.item() / exact.item() - 1) < 0.01
    assert 1e-3 < relative_error(x8.grad, x.grad) < 0.08 and 1e-3 < relative_error(w8.grad, w.grad) < 0.08


@pytest.mark.parametrize("grad_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_products_on_a_cpu_are_those_of_the_real_operation(grad_dtype):
    """Products of FP8 numbers are exact in float32. Only the order of 64 sums, and one rounding at the end, differ.

    The matrices are small: on some processors the real operation takes a thousand times longer than its stand-in."""
    torch.manual_seed(0)
    a, b = ((torch.randn(rows, 64) * 8).to(dtype) for rows, dtype in ((32, grad_dtype), (48, torch.float8_e4m3fn)))
    scales = torch.tensor(0.25), torch.tensor(3.0)
    for dtype, error in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        ours = gpt.scaled_matmul(a, b, *scales, dtype, fast=False)
        real = torch._scaled_mm(a, b.T, *scales, out_dtype=dtype)
        assert ours.shape == (32, 48) and ours.dtype == real.dtype == dtype
        assert torch.allclose(ours.float(), real.float(), rtol=error, atol=error * real.float().abs().max().item())
        assert torch.equal(gpt.scaled_matmul(a, b, 0.25, 3.0, dtype, fast=True), ours)


def test_scales_keep_unit_activations_and_gradients_in_range():
    one_hot = torch.zeros(16, 768)
    one_hot[:, 3] = 768**0.5  # the largest entry an RMS-normalised vector can have
    x8 = gpt.quantize_fp8(one_hot, torch.float8_e4m3fn, 768**0.5 / 448)[0]
    assert x8.float().max() == 448
    assert gpt.quantize_fp8(torch.tensor([1.0, -1.0]), torch.float8_e5m2, gpt.head_fp8_scales(smoke_config()).grad)[0].float().tolist() == [
        448,
        -448,
    ]
    scales = gpt.head_fp8_scales(smoke_config())
    assert scales == (8 / 448, 2**-9, 1 / 448, None)  # of 64 channels, and the record's of the weight
    assert gpt.quantize_fp8(torch.tensor([0.875, 9.0]), torch.float8_e4m3fn, scales.weight)[0].float().tolist() == [448, 448]  # saturates


def test_validation_does_not_use_it():
    model = gpt.GPT(smoke_config(), make_runtime(fp8=frozenset({"fp8_head"})))
    model.head.weight.data.normal_(std=0.1)
    x, targets = gpt.rms_norm(torch.randn(32, 64)), torch.randint(257, (32,))
    step_inputs = gpt.make_step_inputs(gpt.Schedule(model.cfg).at(0), 32, 32, make_runtime(), model.cfg)
    exact = torch.nn.functional.cross_entropy(CAP(x @ model.head.weight.T), targets, reduction="sum")
    assert torch.equal(model.eval().head(x, targets, step_inputs, None, model.eval_ops), exact)
    assert not torch.equal(model.train().head(x, targets, step_inputs, None, model.ops), exact)


@pytest.mark.slow
def test_a_run_with_it_trains_as_well(shards, tmp_path):
    on = smoke_run(shards, tmp_path, "--fp8=on")
    off = smoke_run(shards, tmp_path, "--fp8=off")
    assert "fp8 head: on" in on["stdout"] and "fp8 head" not in off["stdout"]
    assert on["choices"]["fp8"] == "on" and off["choices"]["fp8"] == "off"
    assert on["final_val_loss"] == pytest.approx(off["final_val_loss"], abs=0.02)
    assert on["final_val_loss"] != off["final_val_loss"]


def test_auto_is_off_on_a_cpu():
    use, note = gpt.choose_fp8(smoke_config(dtype="auto"), torch.device("cpu"), "fp8_head", torch.bfloat16, False)
    assert not use and note.startswith("fp8 head: off") and note.count("\n") == 0


def test_queries_keys_and_values_in_fp8():
    """Inputs above 8 saturate, and gradients above 8. Everything is e4m3, so each factor errs by 0.026 rms."""
    torch.manual_seed(0)
    x, w = gpt.rms_norm(torch.randn(48, 256)).requires_grad_(), (torch.randn(128, 256) * 0.02).requires_grad_()
    grad = torch.randn(48, 128) * 0.01
    exact, ours = x @ w.T, gpt.LinearFP8.apply(x, w)
    assert 1e-3 < relative_error(ours, exact) < 0.05
    for ours_grad, exact_grad in zip(
        torch.autograd.grad(ours, (x, w), grad), torch.autograd.grad(exact, (x, w), grad)
    ):
        assert 1e-3 < relative_error(ours_grad, exact_grad) < 0.05
    large = x.detach() * 10
    assert torch.equal(gpt.LinearFP8.apply(large, w), gpt.LinearFP8.apply(large.clamp(-8, 8), w)) and large.abs().max() > 8
    y = gpt.LinearFP8.apply(x, w)
    saturated = torch.autograd.grad(y, x, grad * 1e4, retain_graph=True)[0]
    assert torch.equal(saturated, torch.autograd.grad(y, x, (grad * 1e4).clamp(-8, 8))[0])


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
    scaling = gpt.DelayedScaling().to(device)
    scaling.hidden_scale.copy_(hidden.detach().max() / 448)
    scaling.pre_grad_scale.copy_(pre_grad.detach().abs().max() / 57344)
    ours = gpt.relu2_mlp_fp8(x, up, down, scaling, use_kernel)
    inputs = x, up, down
    *grads, amax = torch.autograd.grad(ours, (*inputs, scaling.amax.requires_grad_()), grad, allow_unused=True)
    assert amax is None  # it did not need a gradient in forward
    ours = gpt.relu2_mlp_fp8(x, up, down, scaling, use_kernel)
    *grads, amax = torch.autograd.grad(ours, (*inputs, scaling.amax), grad)
    assert amax.tolist() == pytest.approx([hidden.max().item(), pre_grad.abs().max().item()], rel=0.1)
    assert 1e-3 < relative_error(ours, exact) < 0.07
    for ours_grad, exact_grad in zip(grads, torch.autograd.grad(exact, inputs, grad)):
        assert 1e-3 < relative_error(ours_grad, exact_grad) < 0.12
    scaling.hidden_scale /= 4  # the hidden activation saturates at a quarter of its largest entry
    assert relative_error(gpt.relu2_mlp_fp8(x, up, down, scaling, use_kernel), exact) > 0.2


def test_logits_in_fp8():
    """The loss of e4m3 logits is the loss of their rounded values."""
    torch.manual_seed(0)
    x, w, targets = gpt.rms_norm(torch.randn(64, 128)), torch.randn(256, 128) * 0.3, torch.randint(256, (64, 1))
    scales = gpt.head_fp8_scales(gpt.make_config({"preset": "frontier"}))
    assert scales.logits_dtype == torch.float8_e4m3fn and gpt.head_fp8_scales(smoke_config()).logits_dtype is None
    losses = [gpt.fused_head_loss(x, w, targets, torch.ones(1), CAP, scales=s) for s in (scales, scales._replace(logits_dtype=None))]
    rounded = [gpt.quantize_fp8(y, torch.float8_e4m3fn, scale)[0].float() * scale for y, scale in ((x, scales.x), (w, scales.weight))]
    logits = (rounded[0] @ rounded[1].T).to(torch.float8_e4m3fn).float()
    exact = torch.nn.functional.cross_entropy(CAP(logits), targets[:, 0], reduction="sum")
    assert losses[0].item() == pytest.approx(exact.item(), rel=1e-5) != losses[1].item()
    assert gpt.scaled_matmul(*(torch.ones(16, 16).to(torch.float8_e4m3fn),) * 2, *torch.tensor([10.0, 10.0]),
                             torch.float8_e4m3fn, True).float().max() == 448  # saturates


def test_scales_are_measured_from_each_tensor():
    """The largest entry becomes the largest finite number. Zeros stay zeros."""
    for dtype, limit in ((torch.float8_e4m3fn, 448), (torch.float8_e5m2, 57344)):
        for size in (1e-6, 1.0, 1e6):
            cast, scale = gpt.quantize_fp8(torch.tensor([[size, -size / 2]]), dtype)
            assert cast.float().tolist() == [[limit, -limit / 2]]
            assert (cast.float() * scale).flatten().tolist() == pytest.approx([size, -size / 2], rel=1e-6)
        assert not gpt.quantize_fp8(torch.zeros(2, 3), dtype)[0].float().any()


@pytest.mark.recipe
@pytest.mark.parametrize("name", ["fp8_mlp", "fp8_qkv"])
def test_layers_validate_and_sample_in_the_activation_dtype(name):
    cfg = smoke_config(num_heads=4, model_dim=128, zero_init="off", fp8_parts="mlp")
    torch.manual_seed(0)
    model = gpt.GPT(cfg, make_runtime(fp8=frozenset({name})))
    x, block = gpt.rms_norm(torch.randn(64, 128)), model.blocks[1]
    step_inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(0), 64, 64, make_runtime(), cfg)
    exact = torch.relu(x @ block.mlp.up_down[0]).square() @ block.mlp.up_down[1].T
    assert torch.allclose(block.mlp(x, None, model.eval_ops), exact, atol=1e-5)
    assert 1e-3 < relative_error(block.mlp(x, None, model.ops), exact) < 0.1 or name == "fp8_qkv"
    doc_ids = torch.zeros(64, dtype=torch.int32)
    s = dict(v_scale=torch.full((64, 1), 0.5), ve_scale=torch.zeros(64, 1))
    inputs = x, None, dict(ve1=x), s, gpt.make_mask(doc_ids, 64), step_inputs
    outputs = [block.attention(*inputs, ops) for ops in (model.ops, model.eval_ops)]
    assert torch.equal(*outputs) == (name == "fp8_mlp")
    tokens = torch.randint(257, (64,))
    model.head.weight.data.normal_(std=0.1)
    run = lambda: model(tokens, tokens.roll(-1), doc_ids, step_inputs).item()
    in_fp8, model_loss = model.train() and run(), model.eval() and run()
    model.use_fp8(frozenset())
    assert torch.equal(block.attention(*inputs, model.ops), outputs[1])
    assert model_loss == run() != in_fp8 and model.train() and run() == pytest.approx(model_loss, rel=1e-6)


# ---- delayed scales ------------------------------------------------------------------------------------------------


def test_a_delayed_scale_is_the_largest_of_all_micro_batches(shards, monkeypatch):
    """The first micro-batch of a step may have the larger amax. The next step begins anew."""
    trainer, step, close = make_trainer(shards, **FP8_MLP)
    (module,), seen = [m for m in trainer.model.modules() if isinstance(m, gpt.DelayedScaling)], []
    product = gpt.relu2_matmul_fp8

    def note(*args):
        seen.append(product(*args))
        return seen[-1]

    monkeypatch.setattr(gpt, "relu2_matmul_fp8", note)
    for _ in range(3):  # in the first step the zero output matrix has no gradient before the activation
        seen.clear()
        step()
        before = module.pre_grad_scale.item()
        trainer.scales.finish()
        hidden, grads = ([amax.item() for *_, amax in seen[i::2]] for i in range(2))
        assert len(hidden) == len(grads) == 2  # micro-batches
        expected = max(grads) * 1.25 / 57344 if any(grads) else before
        found = module.hidden_scale.item(), module.pre_grad_scale.item()
        assert found == pytest.approx((max(hidden) * 1.03 / 448, expected), rel=1e-6)
    close()
    assert hidden[0] != hidden[1] and all(grads) and trainer.scales.amax is None and module.amax.grad is None


def test_a_delayed_scale_is_the_largest_of_all_ranks(tmp_path):
    ends, out, errors = run_ranks("scales", 2, tmp_path / "scales.pt")
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    one = [7 * 1.03 / 448, 3 * 1.25 / 57344]
    assert torch.load(tmp_path / "scales.pt", weights_only=True).tolist() == pytest.approx(one * 2)


def test_a_scale_that_is_zero_or_not_finite_is_ignored():
    modules = torch.nn.ModuleList(gpt.DelayedScaling() for _ in range(3))
    scales, unit = gpt.DelayedScales(modules, make_runtime().comm), 1.03 / 448
    for entries, expected in (
        ((2.0, 3.0, 4.0), (2, 3, 4)),
        ((math.nan, 5.0, math.inf), (2, 5, 4)),  # each module separately
        ((6.0, math.nan, 1.0), (6, 5, 1)),  # until the next usable one
        ((0.0, 1.0, 1e-9), (6, 1, 1e-6 / unit)),  # 1e-6 is the smallest scale
    ):
        for micro_batch in range(2):
            for module, entry in zip(modules, entries):
                module.amax.grad = torch.tensor([entry * (0.5 + 0.5 * micro_batch), 0.0])
            scales.collect()
        scales.start()
        scales.finish()
        found = torch.stack(scales.scales)
        assert torch.allclose(found[::2], unit * torch.tensor(expected), rtol=1e-6, atol=0)
        assert found[1::2].tolist() == [2**-3] * 3 and scales.amax is None


@pytest.mark.recipe  # an edited MLP has no FP8 form
def test_the_guard_restores_scales(shards, here, monkeypatch):
    """A weight becomes NaN in step 18. The MLP stays in FP8, and the head leaves it."""
    saved, before, after, losses = {}, [], [], []
    act, snapshot, train_step = gpt.Guard._roll_back, gpt.Snapshot.__init__, gpt.Trainer.train_step

    def spoil_and_step(self, *args):
        if self.progress.step == 17 and not after:
            self.model.blocks[1].mlp.up_down.data[0, 0, 0] = math.nan
        losses.append(train_step(self, *args).item())
        return losses[-1] * torch.ones(())

    def note_snapshot(self, trainer):
        snapshot(self, trainer)
        saved[trainer.progress.step] = [scale.clone() for scale in trainer.scales.scales]

    def note_action(self, *args):
        scales = self.trainer.scales
        before.extend(x.clone() for x in (*scales.scales, scales.amax))
        act(self, *args)
        after.append((self.trainer.progress.step, self.snapshots[-1][0], [x.clone() for x in scales.scales]))

    monkeypatch.setattr(gpt.Trainer, "train_step", spoil_and_step)
    monkeypatch.setattr(gpt.Snapshot, "__init__", note_snapshot)
    monkeypatch.setattr(gpt.Guard, "_roll_back", note_action)
    options = [f"--{name}={value}" for name, value in {**FP8_MLP, "fp8_parts": "head,mlp"}.items()]
    result = run(shards, "--guard=on", "--num_iterations=24", AT_THE_END, *options)
    ((step, made, scales),) = after
    assert result["guard_actions"] == 1 and made == 10 and sorted(saved) == [0, 10, 20]
    (*before, amax) = before  # the amax is NaN, and the scales are still finite
    assert all(x.isfinite() for x in before) and amax.isnan().any()
    assert all(map(torch.equal, scales, saved[10])) and all(x.isfinite() for x in scales)
    assert not any(map(torch.equal, scales, saved[0])) and not any(map(torch.equal, scales, saved[20]))
    assert [i for i, loss in enumerate(losses) if not math.isfinite(loss)] == list(range(17, step))
    assert math.isfinite(result["final_val_loss"])
