"""Kernels: plain and Triton forms (interpreted on machines without a GPU) against float64."""

import functools
import math
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from conftest import gpt, make_runtime, relative_error, smoke_config, train_steps

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = dict(cross_entropy="cross_entropy_kernel", relu2_mlp="relu2_matmul_kernel",
               qkv_kernel="qkv_kernel")  # fmt: skip


@pytest.mark.parametrize("is_paired, key_offset, has_norm, dims, num_rotating", [
    (True, True, True, (16, 16), 4), (False, True, False, (8, 12), 3), (True, False, True, (16, 8), 8)], ids=str)
def test_queries_keys_and_values(is_paired, key_offset, has_norm, dims, num_rotating):
    """150 tokens of two sequences in tiles of 64, in float32. Queries and values have other sizes. With FP8 the
    kernel's gradient is clamped to 8, multiplied by 56 = 448 / 8 and stored in both orders."""
    torch.manual_seed(0)
    (K, L), H, P, T = dims, 4, 2 if is_paired else 1, 150
    heads = gpt.Heads(H, K, L, P, key_offset, has_norm)
    positions, is_fixed = torch.arange(T) % 75, torch.arange(K) % (K // 2) >= num_rotating
    angles = torch.rand(T, P, K // 2) * 6 * ~is_fixed[: K // 2]
    tables = angles.cos(), angles.sin(), torch.tensor(0.3)
    takes_previous = (is_fixed & (positions > 0)[:, None, None]).float().to(DEVICE)
    rope = gpt.Rope(*(table.to(DEVICE) for table in tables), num_rotating, takes_previous)
    step_inputs = gpt.StepInputs(torch.zeros(2), {}, (positions == 0).to(DEVICE))
    weight = torch.randn(H * (2 * K + L), 32, device=DEVICE) * 32**-0.5
    x, results = torch.randn(T, 32, device=DEVICE), []
    grads = [torch.randn(*shape, device=DEVICE) for shape in ((T, H, K), (T, H, K), (T, H * L))]
    for make_qkv in (gpt.make_qkv, gpt.fused_qkv):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        outputs = make_qkv(*leaves, rope, heads, step_inputs, gpt.Operations())
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, grads)])
    for plain, ours in zip(*results):
        assert relative_error(ours, plain.double()) < (1e-6 if DEVICE == "cpu" else 1e-3)
    tables, packed = (*rope[:3], step_inputs.is_sequence_start), x @ weight.T
    grad, scaled = torch.empty_like(packed), torch.empty_like(packed)
    scaled_t = scaled.new_empty(scaled.shape[::-1])
    gpt.launch_qkv(packed, tables, num_rotating, heads, *grads, grad)
    gpt.launch_qkv(packed, tables, num_rotating, heads, *[4 * y for y in grads], scaled, scaled_t)
    assert torch.allclose(scaled, (4 * grad).clamp(-8, 8) * 56, rtol=1e-5, atol=1e-3) and scaled.abs().max() == 448
    assert torch.equal(scaled_t, scaled.T)


@pytest.mark.parametrize("dtype, most, width", [(torch.float32, 20_000, 8), (torch.bfloat16, 600, 24)], ids=str)
def test_sums_of_rows(dtype, most, width):
    """0 to 20,000 reads of a row, 16 at once, by tiles of 8 channels. Sums of small numbers are exact in float32. Added in
    bfloat16, 600 of them would stay at 512. Sums of others have equal bits in each call."""
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 1, 15, 16, 17, most, 0, 33])
    places = torch.repeat_interleave(counts)[torch.randperm(int(counts.sum()))].to(DEVICE)
    small = torch.randint(1, 3, (len(places), width), device=DEVICE)
    given = places, places.argsort(stable=True), len(counts)
    exact = torch.zeros(len(counts), width, dtype=torch.int64, device=DEVICE).index_add_(0, places, small)
    ours = gpt.launch_row_sums(small.to(dtype), *given)
    assert torch.allclose(ours.float(), exact.float(), rtol=0 if dtype == torch.float32 else 2**-7, atol=0)
    grad = torch.randn(small.shape, device=DEVICE).to(dtype)
    exact = exact.double().zero_().index_add_(0, places, grad.double())
    ours = gpt.launch_row_sums(grad, *given)
    assert torch.equal(ours, gpt.launch_row_sums(grad, *given))
    for sums in (ours, gpt.sum_rows(grad, *given)):
        assert sums.dtype == dtype and relative_error(sums, exact) < (1e-5 if dtype == torch.float32 else 2**-8)


CAP = gpt.Softcap(30.0, 0.0, 7.5)  # 15 tanh(logit / 15) + 15
CAPS = [CAP, gpt.Softcap(60.0, 0.0, 15.0), gpt.Softcap(23.0, 5.0, 7.5)]


@pytest.mark.parametrize("shape", [(128, 128), (300, 130), (16, 259)])
def test_transpose_moves_every_byte(shape):
    """In the kernel as in PyTorch's copy, also if tiles stand over the edge."""
    x = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE).view(torch.float8_e5m2)
    for use_kernel in (False, True):
        turned = gpt.transpose(gpt.Scaled(x, torch.ones(())), use_kernel).values
        assert turned.dtype == x.dtype and turned.is_contiguous()
        assert torch.equal(turned.view(torch.uint8), x.view(torch.uint8).T)


def test_the_cap_of_before():
    logits = torch.linspace(-99, 99, 67, dtype=torch.float64)
    assert torch.allclose(CAP(logits), 15 * torch.tanh(logits / 15) + 15)
    assert torch.equal(gpt.Softcap(0.0, 5.0, 7.5)(logits), logits + 5)  # a shift changes no probability
    assert gpt.Softcap(23.0, 5.0, 7.5)(torch.tensor(-5.0)) == 11.5


@pytest.mark.parametrize("cap, use_kernel", [  # the kernel needs a softcap
    *((cap, use_kernel) for cap in CAPS for use_kernel in (False, True)),
    (gpt.Softcap(0, 0, 1), False)])  # fmt: skip
@pytest.mark.parametrize("shape", [(5, 128), (3, 4096), (2, 5000), (1, 7)], ids=str)
@pytest.mark.parametrize("target_weights", [(1.0,), (1.0, 0.5, 0.25)], ids=str)
def test_softcapped_cross_entropy(target_weights, shape, cap, use_kernel):
    """One target, and three of which some are missing."""
    torch.manual_seed(0)
    logits = torch.randn(shape, device=DEVICE) * (20 if cap.cap else 3)
    weights = torch.tensor(target_weights, device=DEVICE)
    targets = torch.randint(shape[1], (shape[0], len(weights)), device=DEVICE)
    targets[::2, 1:] = -1
    wide = logits.double().requires_grad_()
    capped = cap.cap * torch.sigmoid((wide + cap.shift) / cap.width) if cap.cap else wide
    exact = sum(weight * F.cross_entropy(capped, target, reduction="none", ignore_index=-1)
                for weight, target in zip(weights.double(), targets.T))  # fmt: skip
    (expected,) = torch.autograd.grad(exact.sum(), wide)
    given = targets, weights, cap
    losses, grads = gpt.softcapped_cross_entropy(logits, *given, torch.float32, 1.0, use_kernel)
    assert torch.allclose(losses.double(), exact, rtol=1e-5, atol=1e-5)
    assert relative_error(grads, expected) < 1e-4  # float32 exponentials of numbers up to 60: 60 * 2^-24
    scale = 1 / 448
    _, small = gpt.softcapped_cross_entropy(logits, *given, torch.float8_e5m2, scale, use_kernel)
    assert small.dtype == torch.float8_e5m2 and small.float().abs().max() <= 448 * sum(target_weights)
    # Triton's interpreter halves numbers that round up to a power of two
    is_right = torch.frexp(expected / scale).mantissa.abs() < (0.9375 if use_kernel and DEVICE == "cpu" else 1)
    error = relative_error(small.float()[is_right] * scale, expected[is_right])
    assert 1e-3 < error < 2**-3  # two bits of mantissa
    _, bf16 = gpt.softcapped_cross_entropy(logits.bfloat16(), *given, torch.bfloat16, 1.0, use_kernel)
    assert bf16.dtype == torch.bfloat16


HEADS = dict(plain=gpt.head_loss, fused=functools.partial(gpt.FusedHeadLoss.apply, False, None),
             kernel=functools.partial(gpt.FusedHeadLoss.apply, True, None))  # fmt: skip


@pytest.mark.parametrize("head_loss", HEADS.values(), ids=HEADS)
def test_head_loss_against_float64(monkeypatch, head_loss):
    """In one chunk and in three: the loss, and gradients that follow the gradient of the loss."""
    torch.manual_seed(0)
    x, weight = torch.randn(48, 32, device=DEVICE), torch.randn(128, 32, device=DEVICE)
    targets = torch.randint(128, (48,), device=DEVICE)
    wide = [t.double().requires_grad_() for t in (x, weight)]
    loss = F.cross_entropy(30 * torch.sigmoid(wide[0] @ wide[1].T / 7.5), targets, reduction="sum")
    grad_x, grad_w = torch.autograd.grad(loss, wide)
    for chunk in (16_384, 20):
        monkeypatch.setattr(gpt, "LOGITS_CHUNK", chunk)
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        ours = head_loss(a, b, targets[:, None], torch.ones(1, device=DEVICE), CAP)
        (3 * ours).backward()
        bound = 1e-5 if DEVICE == "cpu" else 1e-3
        assert ours.item() == pytest.approx(loss.item(), rel=bound)
        assert relative_error(a.grad, 3 * grad_x) < bound * 10
        assert relative_error(b.grad, 3 * grad_w) < bound * 10


@pytest.mark.parametrize("capability, has_triton, expected", [
    ((9, 0), True, (torch.bfloat16, True)),
    ((8, 0), True, (torch.bfloat16, True)),
    ((7, 5), True, (torch.float32, True)),  # T4: no bfloat16
    ((6, 1), True, (torch.float32, False)),  # no Triton for it
    ((8, 9), False, (torch.bfloat16, False))])  # Windows: no Triton, so no FlexAttention either # fmt: skip
def test_what_a_gpu_is_given(monkeypatch, capability, has_triton, expected):
    """Facts of the device alone. Its matmuls are not measured here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_args: 1e12)
    monkeypatch.setattr(gpt, "triton", triton if has_triton else None)
    monkeypatch.setattr(gpt, "choose_fast_forms", lambda *_: (frozenset(), ["fast forms: none"]))
    rt = gpt.Runtime(torch.device("cuda"))
    choose = lambda **changes: gpt.choose_precision(smoke_config(**changes), rt)
    rt = choose(dtype="auto", compile="auto")
    assert (rt.dtype, rt.use_compile) == expected
    assert not choose(compile="off").use_compile and choose(compile="on").use_compile
    if capability < (8, 0):
        with pytest.raises(gpt.RunError, match="--dtype=bfloat16"):
            choose(dtype="bfloat16")


@pytest.mark.parametrize("says, name", [
    (dict(architecture="x86_64", avx512_bf16=False, amx_bf16=False), "float32"),
    (dict(architecture="x86_64", avx512_bf16=True, amx_bf16=False), "bfloat16"),
    (dict(architecture="x86_64", avx512_bf16=False, amx_bf16=True), "bfloat16"),
    (dict(architecture="aarch64", bf16=True), "bfloat16"),
    ({}, "float32")])  # it says nothing # fmt: skip
def test_a_processor_says_whether_it_multiplies_bfloat16(monkeypatch, says, name):
    """Nothing is timed for it, so a machine chooses equally every time. --dtype overrules it."""
    rates = iter([1.0, 1e9] * 4)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: says, raising=False)
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: next(rates))
    choose = lambda dtype: str(gpt.choose_dtype(smoke_config(dtype=dtype), torch.device("cpu"))[0])[6:]
    assert [choose("auto"), choose("auto")] == [name] * 2
    assert [choose("float32"), choose("bfloat16")] == ["float32", "bfloat16"]


@pytest.mark.parametrize("dtype, expected", [(torch.bfloat16, "ieee"), (torch.float64, "bf16")], ids=str)
def test_float32_products_are_not_rounded(monkeypatch, dtype, expected):
    """oneDNN is used unless it multiplies in bfloat16, as with AMX. Here its products are simulated."""
    setting, real = torch.backends.mkldnn.matmul, torch.Tensor.__matmul__
    old, setting.fp32_precision = setting.fp32_precision, "ieee"

    def multiply(a, b):
        return real(a.to(dtype), b.to(dtype)).float() if setting.fp32_precision == "bf16" else real(a, b)

    monkeypatch.setattr(torch.Tensor, "__matmul__", multiply)
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: 1e9)
    try:
        gpt.choose_dtype(smoke_config(), torch.device("cpu"))
        assert setting.fp32_precision == expected
    finally:
        setting.fp32_precision = old


SHORT = dict(seq_len=128, tokens_per_step=128, micro_batch_tokens=128)  # the interpreter is slow


@pytest.mark.recipe  # one of the kernels is ReLU^2
def test_training_with_the_kernels_is_training_without(shards):
    """Two steps in float32. The kernels add in another order, which Adam's epsilon of 1 keeps small. Without the grid:
    a gradient rounded the other way is much in a direction that is hardly there."""
    weights = {}
    for use_kernels in (False, True):
        cfg = smoke_config(shards, num_layers=2, adam_eps=1.0, **SHORT)
        trainer = gpt.Trainer(cfg, make_runtime(fast=frozenset(KERNELS if use_kernels else ())))
        train_steps(trainer, 2)
        weights[use_kernels] = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    for name, plain in weights[False].items():
        assert torch.allclose(plain, weights[True][name], rtol=0, atol=1e-3), name
    assert any(not torch.equal(plain, weights[True][name]) for name, plain in weights[False].items())


@pytest.mark.parametrize("name", KERNELS)
def test_one_kernel_alone_is_launched(shards, name, monkeypatch):
    """And the others not. Validation launches only the kernel of queries, keys and values."""
    launched = set()
    for form, kernel in KERNELS.items():
        noting, real = MagicMock(), getattr(gpt, kernel)
        noting.__getitem__.side_effect = lambda grid, form=form, real=real: launched.add(form) or real[grid]
        monkeypatch.setattr(gpt, kernel, noting)
    monkeypatch.setitem(gpt.POLYNOMIALS, "newton_schulz", gpt.Polynomial(gpt.POLYNOMIALS["newton_schulz"].coefficients[:1]))  # it saves time
    shape = dict(num_heads=3, model_dim=192, head_dim=64, mlp_ratio=2)
    layer = dict(num_layers=1, layers=(gpt.LayerSpec(value_embed=0),))
    cfg = smoke_config(shards, **shape, **layer, **SHORT)
    trainer = gpt.Trainer(cfg, make_runtime(fast=frozenset({name})))
    train_steps(trainer, 1)
    assert launched == {name}
    launched.clear()
    trainer.validate(gpt.ValData(cfg), trainer.schedule.at(1), num_batches=1)
    assert launched == {name} & {"qkv_kernel"}


@pytest.mark.recipe
@pytest.mark.parametrize("shape", [(128, 64, 128), (384, 128, 256), (256, 32, 256)])
def test_the_mlp_of_the_kernel_and_its_gradient(shape):
    """Forward and backward of the MLP, by the kernel and plainly, against float64."""
    torch.manual_seed(0)
    tokens, dim, hidden = shape
    given = [torch.randn(*s) / s[-1] ** 0.25 for s in ((tokens, dim), (dim, hidden), (dim, hidden), (tokens, dim))]
    x, up, down, grad = (t.to(DEVICE).requires_grad_() for t in given)
    for mlp in (gpt.fused_relu2_mlp, gpt.relu2_mlp):
        y = mlp(x, up, down, None)
        ours = [y, *torch.autograd.grad(y, (x, up, down), grad)]
        wide = [t.detach().double().requires_grad_() for t in (x, up, down)]
        exact = torch.relu(wide[0] @ wide[1]).square() @ wide[2].T
        theirs = [exact, *torch.autograd.grad(exact, wide, grad.double())]
        for one, other in zip(ours, theirs, strict=True):
            assert relative_error(one, other) < (2e-3 if DEVICE == "cuda" else 1e-5)  # there products are in TF32
    for rows, inner, columns in ((129, 64, 128), (128, 48, 128), (128, 64, 192)):  # some would be left out
        with pytest.raises(AssertionError, match="tiles"):
            gpt.fused_relu2_mlp(torch.zeros(rows, inner), *[torch.zeros(inner, columns)] * 2, None)


def test_the_squared_product_of_scaled_factors():
    """As the MLP has it in FP8. Here it is in float16, of which the interpreter knows products: the scale of the
    product, a result over its own scale that saturates, the largest entry. Forward, and backward with both signs."""
    torch.manual_seed(0)
    x, w = (torch.randn(*shape, device=DEVICE).half() for shape in ((256, 64), (64, 128)))
    hidden = torch.rand(256, 128, device=DEVICE).half()
    one, scale, small, hidden_scale = (torch.tensor(value, device=DEVICE) for value in (1.0, 0.05, 1e-5, 0.25))
    product, limit = x.double() @ w.double() * 0.05, torch.finfo(torch.float16).max
    given = gpt.Scaled(x, scale), gpt.Scaled(w, one), small, torch.float32
    saved = gpt.Scaled(hidden, hidden_scale)
    backward = product * 2 * (hidden.double() * 0.25).sqrt()
    for sign, more, exact in ((1, (), product.relu().square()), (1, (saved,), backward), (-1, (saved,), -backward)):
        signed = gpt.Scaled(sign * x, scale)  # so once the entry of largest size is negative
        (ours, _), (ours_t, _), amax = gpt.launch_relu2_matmul(signed, *given[1:], *more)
        assert amax.item() == pytest.approx(exact.abs().max().item(), rel=1e-3)
        assert ours.dtype == torch.float16 and torch.equal(ours_t, ours.T)
        assert relative_error(ours, (exact / 1e-5).clamp(-limit, limit)) < 1e-3 and (ours == limit).any()
    assert (ours == -limit).any()
    x[3, 5] = math.nan  # it must not become a finite number
    for more in ((), (saved,)):
        (ours, _), (ours_t, _), amax = gpt.launch_relu2_matmul(*given, *more)
        assert ours[3].isnan().all() and ours_t[:, 3].isnan().all() and amax == math.inf
        assert not ours[:3].isnan().any()
