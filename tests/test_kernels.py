"""Kernels: the plain forms against float64, the Triton forms (interpreted where there is no GPU) against the plain."""

import pytest
import torch
import torch.nn.functional as F
from conftest import gpt, make_runtime, smoke_config, smoke_run

triton = pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AT = torch.device(DEVICE), torch.float32, DEVICE == "cuda"
# units, rows, columns: one tile, odd, tall, wide, several tiles, one row
SHAPES = [(1, 128, 64), (3, 33, 65), (2, 150, 40), (2, 40, 300), (2, 260, 130), (1, 1, 7)]


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_symmetric_product(shape, use_kernels):
    """float32 sums of up to 300 products: 300 * 2^-24 = 2e-5 at worst; bfloat16 results are rounded by 2^-8 at most."""
    torch.manual_seed(0)
    x = torch.randn(*shape, device=DEVICE) * shape[2] ** -0.5  # products near 1: float16 must hold them
    half = torch.float16 if use_kernels and DEVICE == "cpu" else torch.bfloat16  # not in the interpreter
    for dtype, bound in ((torch.float32, 2e-5 if DEVICE == "cpu" else 1e-3), (half, 2**-8)):
        given = x.to(dtype)
        gram = gpt.symmetric_product(given, use_kernels=use_kernels)
        exact = given.double() @ given.double().mT
        assert gram.dtype == dtype and relative_error(gram, exact) < bound
        if use_kernels:
            assert torch.equal(gram[:, :128, 128:], gram[:, 128:, :128].mT)  # a tile and its image
        power = gpt.symmetric_product(gram, gram, 2.0315, -4.7750, use_kernels)
        exact = 2.0315 * gram.double() @ gram.double() - 4.7750 * gram.double()
        assert relative_error(power, exact) < 4 * bound  # some of it cancels


def test_symmetric_product_reads_transposed_views():
    x = torch.randn(2, 40, 70, device=DEVICE).mT
    assert relative_error(gpt.symmetric_product(x, use_kernels=True), x.double() @ x.double().mT) < 1e-3


@pytest.mark.parametrize("use_kernels", [False, True])
def test_orthogonalize_is_the_same_with_the_kernels(use_kernels):
    torch.manual_seed(0)
    for shape in ((2, 136, 256), (2, 256, 136), (1, 130, 130)):
        x = torch.randn(*shape, device=DEVICE) * shape[2] ** -0.5  # products near 1: float16 must hold them
        ours = gpt.orthogonalize(x, torch.float32, use_kernels=use_kernels)
        plain = gpt.orthogonalize(x, torch.float64)
        assert relative_error(ours, plain) < 1e-3  # 3.4445^5 = 485 times float32's 6e-8, and more on a GPU


def exact_loss(x, weight, targets):
    """float64 reference: summed loss and the gradients of both operands, by autograd."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(30 * torch.sigmoid(x @ weight.T / 7.5), targets, reduction="sum")
    loss.backward()
    return loss.detach(), x.grad, weight.grad


CAP = gpt.Softcap(30.0, 0.0, 7.5)  # 15 tanh(logit / 15) + 15


@pytest.mark.parametrize("shape", [(128, 128), (300, 130), (16, 259)])
def test_transpose_moves_every_byte(shape):
    """In the kernel as in PyTorch's copy, also where tiles stand over the edge."""
    x = torch.randint(256, shape, dtype=torch.uint8, device=DEVICE).view(torch.float8_e5m2)
    for use_kernels in (False, True):
        turned = gpt.transpose(x, use_kernels)
        assert turned.dtype == x.dtype and turned.is_contiguous()
        assert torch.equal(turned.view(torch.uint8), x.view(torch.uint8).T)


def test_the_cap_of_before():
    logits = torch.linspace(-99, 99, 67, dtype=torch.float64)
    assert torch.allclose(CAP(logits), 15 * torch.tanh(logits / 15) + 15)
    assert torch.equal(gpt.Softcap(0.0, 5.0, 7.5)(logits), logits + 5)  # a shift changes no probability
    assert gpt.Softcap(23.0, 5.0, 7.5)(torch.tensor(-5.0)) == 11.5


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("cap", [CAP, gpt.Softcap(60.0, 0.0, 15.0), gpt.Softcap(23.0, 5.0, 7.5), gpt.Softcap(0, 0, 1)])
@pytest.mark.parametrize("shape", [(5, 128), (3, 4096), (2, 5000), (1, 7)], ids=str)
@pytest.mark.parametrize("target_weights", [(1.0,), (1.0, 0.5, 0.25)], ids=str)
def test_softcapped_cross_entropy(target_weights, shape, cap, use_kernels):
    """One target, and three of which some are missing."""
    torch.manual_seed(0)
    logits, weights = torch.randn(shape, device=DEVICE) * (20 if cap.top else 3), torch.tensor(target_weights, device=DEVICE)
    targets = torch.randint(shape[1], (shape[0], len(weights)), device=DEVICE)
    targets[::2, 1:] = -1
    wide = logits.double().requires_grad_()
    capped = cap.top * torch.sigmoid((wide + cap.shift) / cap.width) if cap.top else wide
    exact = sum(
        weight * F.cross_entropy(capped, target, reduction="none", ignore_index=-1)
        for weight, target in zip(weights.double(), targets.T)
    )
    (expected,) = torch.autograd.grad(exact.sum(), wide)
    given = targets, weights, cap
    losses, grads = gpt.softcapped_cross_entropy(logits, *given, torch.float32, 1.0, use_kernels)
    assert torch.allclose(losses.double(), exact, rtol=1e-5, atol=1e-5)
    assert (
        relative_error(grads, expected) < 1e-4
    )  # float32 exponentials of numbers up to 60: 60 * 2^-24 and more
    scale = 1 / 448
    _, small = gpt.softcapped_cross_entropy(logits, *given, torch.float8_e5m2, scale, use_kernels)
    assert small.dtype == torch.float8_e5m2 and small.float().abs().max() <= 448 * sum(target_weights)
    # Triton's interpreter casts what rounds up to a power of two to half of that
    is_right = torch.frexp(expected / scale).mantissa.abs() < (0.9375 if use_kernels and DEVICE == "cpu" else 1)
    error = relative_error(small.float()[is_right] * scale, expected[is_right])
    assert 1e-3 < error < 2**-3  # two bits of mantissa
    _, bf16 = gpt.softcapped_cross_entropy(logits.bfloat16(), *given, torch.bfloat16, 1.0, use_kernels)
    assert bf16.dtype == torch.bfloat16


@pytest.mark.parametrize("use_kernels", [False, True])
def test_head_loss_against_float64(monkeypatch, use_kernels):
    """In one chunk and in three: the loss, and gradients scaled by that of the loss."""
    torch.manual_seed(0)
    x, weight = torch.randn(48, 32, device=DEVICE), torch.randn(128, 32, device=DEVICE)
    targets = torch.randint(128, (48,), device=DEVICE)
    loss, grad_x, grad_w = exact_loss(x, weight, targets)
    for chunk in (16_384, 20):
        monkeypatch.setattr(gpt, "LOGITS_CHUNK", chunk)
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        aim = targets[:, None], torch.ones(1, device=DEVICE), CAP
        ours = gpt.HeadLoss.apply(a, b, *aim, 0.0, use_kernels)
        (3 * ours).backward()
        bound = 1e-5 if DEVICE == "cpu" else 1e-3
        assert ours.item() == pytest.approx(loss.item(), rel=bound)
        assert relative_error(a.grad, 3 * grad_x) < bound * 10
        assert relative_error(b.grad, 3 * grad_w) < bound * 10


def test_choose_kernels_compares_before_it_trusts(monkeypatch):
    cfg = smoke_config(kernels="on")
    assert gpt.choose_kernels(cfg, *AT) == (set(gpt.KERNELS), "kernels: on")
    use_kernels, note = gpt.choose_kernels(smoke_config(), torch.device("cpu"), torch.float32, False)
    assert not use_kernels and "plain PyTorch" in note
    plain = gpt.softcapped_cross_entropy

    def wrong(*args, use_kernels=False):
        losses, grads = plain(*args, use_kernels=use_kernels)
        return losses, grads * (1.02 if use_kernels else 1)

    monkeypatch.setattr(gpt, "softcapped_cross_entropy", wrong)
    assert gpt.choose_kernels(smoke_config(kernels="products"), *AT) == ({"products"}, "kernels: products")
    real = gpt.try_launch
    with monkeypatch.context() as patch:  # as auto does where there is a GPU: the others stay
        patch.setattr(gpt, "try_launch", lambda field, wish, _reason, *rest: real(field, wish, "", *rest))
        patch.setattr(gpt, "time_mlp", lambda *_: 0.5)
        chosen, note = gpt.choose_kernels(smoke_config(kernels="auto"), *AT)
        assert chosen == {"products", "mlp"} and note.startswith("kernels: mlp, products; not loss, it fails on this cpu device")
    with pytest.raises(gpt.InputError, match="--kernels=loss but .* differs"):
        gpt.choose_kernels(smoke_config(kernels="loss"), *AT)
    with pytest.raises(gpt.InputError, match="--kernels=on but .* differs from its plain form by 0.0[12]"):
        gpt.choose_kernels(cfg, *AT)


@pytest.mark.parametrize(
    "capability, has_triton, expected",
    [
        ((9, 0), True, (torch.bfloat16, True)),
        ((8, 0), True, (torch.bfloat16, True)),
        ((7, 5), True, (torch.float32, True)),  # T4: no bfloat16
        ((6, 1), True, (torch.float32, False)),  # no Triton for it
        ((8, 9), False, (torch.bfloat16, False)),  # Windows: no Triton, so no FlexAttention either
    ],
)
def test_what_a_gpu_is_given(monkeypatch, capability, has_triton, expected):
    """Facts of the device alone; its matmuls are not measured here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_args: 1e12)
    monkeypatch.setattr(gpt, "triton", triton if has_triton else None)
    cfg, device = smoke_config(dtype="auto"), torch.device("cuda")
    dtype, _, note = gpt.choose_dtype(cfg, device)
    use_compile, compile_note = gpt.choose_compile(cfg, device)
    assert (dtype, use_compile) == expected and f"torch.compile {'on' if use_compile else 'off'}" in compile_note
    assert ("activations: bfloat16" in note) == (capability >= (8, 0))
    if not has_triton:
        with pytest.raises(gpt.InputError, match="--compile=on .*Triton is not installed"):
            gpt.choose_compile(smoke_config(compile="on"), device)
    if capability < (8, 0):
        with pytest.raises(gpt.InputError, match="--dtype=bfloat16 needs"):
            gpt.choose_dtype(smoke_config(dtype="bfloat16"), device)


@pytest.mark.parametrize(
    "says, name",
    [
        (dict(architecture="x86_64", avx512_bf16=False, amx_bf16=False), "float32"),
        (dict(architecture="x86_64", avx512_bf16=True, amx_bf16=False), "bfloat16"),
        (dict(architecture="x86_64", avx512_bf16=False, amx_bf16=True), "bfloat16"),
        (dict(architecture="aarch64", bf16=True), "bfloat16"),
        ({}, "float32"),  # says nothing
    ],
)
def test_a_processor_says_whether_it_multiplies_bfloat16(monkeypatch, says, name):
    """Nothing is timed for it: the same machine must choose the same every time. What a run or a record began with
    it keeps, and --dtype overrules both."""
    rates = iter([1.0, 1e9] * 4)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: says, raising=False)
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: next(rates))
    choose = lambda dtype, first="": gpt.choose_dtype(smoke_config(dtype=dtype), torch.device("cpu"), first)
    assert [str(choose("auto")[0])[6:] for _ in range(2)] == [name] * 2
    assert ("does not multiply bfloat16" in choose("auto")[2]) == (name == "float32")
    for first in ("float32", "bfloat16"):
        dtype, _, note = choose("auto", first)
        assert str(dtype)[6:] == first and f"{first} (as this run, or the first one of its record, began" in note
    assert choose("float32", "bfloat16")[0] == torch.float32


@pytest.mark.recipe  # one of the kernels is ReLU^2
def test_training_with_the_kernels_is_training_without(shards):
    """Two steps in float32; the kernels add in another order, which Adam's epsilon of 1 keeps small.

    Without the grid: a gradient rounded the other way is much in a direction that is hardly there.
    """
    weights = {}
    for use_kernels in (False, True):
        cfg = smoke_config(
            shards,
            num_layers=2,
            seq_len=128,
            tokens_per_step=128,
            micro_batch_tokens=128,
            adam_eps=1.0,
            grad_grid=0.0,
        )
        trainer = gpt.Trainer(cfg, make_runtime(kernels=frozenset(gpt.KERNELS if use_kernels else ())))
        data = gpt.TrainData(cfg, trainer.schedule)
        batches = gpt.Prefetcher(data.batches(cfg, trainer.rt, 0, 2), trainer.rt.device)
        for step in range(2):
            trainer.train_step(batches, trainer.schedule.at(step))
        batches.executor.shutdown(cancel_futures=True)
        weights[use_kernels] = {name: p.clone() for name, p in trainer.model.state_dict().items()}
    for name, plain in weights[False].items():
        assert torch.allclose(plain, weights[True][name], rtol=0, atol=1e-3), name
    assert any(not torch.equal(plain, weights[True][name]) for name, plain in weights[False].items())


@pytest.mark.parametrize("name", gpt.KERNELS)
def test_one_kernel_alone_is_launched(shards, name, monkeypatch):
    """And the other not."""
    launched = set()
    for own, kernel in dict(loss="cross_entropy_kernel", products="symmetric_kernel", mlp="squared_product_kernel").items():
        real = getattr(gpt, kernel)

        class Noting:
            def __getitem__(self, grid, own=own, real=real):
                launched.add(own)
                return real[grid]

        monkeypatch.setattr(gpt, kernel, Noting())
    cfg = smoke_config(shards, seq_len=128, tokens_per_step=128, micro_batch_tokens=128, num_layers=2, num_heads=1, model_dim=192, head_dim=192)
    trainer = gpt.Trainer(cfg, make_runtime(kernels=frozenset({name})))
    batches = gpt.Prefetcher(gpt.TrainData(cfg, trainer.schedule).batches(cfg, trainer.rt, 0, 1), trainer.rt.device)
    trainer.train_step(batches, trainer.schedule.at(0))
    batches.executor.shutdown(cancel_futures=True)
    assert launched == {name}


def test_kernels_on_the_command_line(shards, tmp_path):
    args = ["--seq_len=128", "--tokens_per_step=128", "--micro_batch_tokens=128", "--num_iterations=2"]
    result = smoke_run(shards, tmp_path, "--kernels=on", *args, "--warmup_iterations=0")
    assert "kernels: on" in result["stdout"]


def test_a_compiler_that_is_to_search_must_compile():
    with pytest.raises(gpt.InputError, match="--compile_mode=coordinate-descent has no effect where nothing"):
        gpt.choose_compile(smoke_config(compile_mode="coordinate-descent"), torch.device("cpu"))


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs", "coordinate-descent"])
def test_how_the_compiler_is_called(mode, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: calls.append(options) or fn)
    make_runtime(use_compile=True, compile_mode=mode).compile(len)
    expected = dict(options=dict(coordinate_descent_tuning=True)) if mode == "coordinate-descent" else dict(mode=mode)
    assert calls == [dict(dynamic=False, **expected)]


@pytest.mark.parametrize("shape", [(128, 64, 128), (384, 128, 256)])
def test_the_squared_product_and_its_gradient(shape):
    """Forward and backward of the MLP by the kernel, against float64; as the plain form, but for rounding."""
    torch.manual_seed(0)
    tokens, dim, hidden = shape
    given = [torch.randn(*s) / s[-1] ** 0.25 for s in ((tokens, dim), (dim, hidden), (dim, hidden), (tokens, dim))]
    x, up, down, grad = (t.to(DEVICE).requires_grad_() for t in given)
    y = gpt.FusedMLP.apply(x, up, down, None)
    ours = [y, *torch.autograd.grad(y, (x, up, down), grad)]
    wide = [t.detach().double().requires_grad_() for t in (x, up, down)]
    exact = torch.relu(wide[0] @ wide[1]).square() @ wide[2].T
    theirs = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for one, other in zip(ours, theirs):
        assert relative_error(one, other) < (2e-3 if DEVICE == "cuda" else 1e-5)  # there products are in TF32


def test_sizes_that_the_tiles_do_not_divide_stay_plain(monkeypatch):
    assert gpt.can_fuse_mlp(128, 64, 128) and gpt.can_fuse_mlp(49_152, 768, 3072)
    assert not any(gpt.can_fuse_mlp(*sizes) for sizes in ((64, 64, 128), (128, 32, 128), (128, 64, 192)))
    cfg = smoke_config(model_dim=32, num_heads=1, head_dim=32)
    mlp, x = gpt.MLP(cfg), torch.randn(128, 32)
    plain = mlp(x)
    mlp.use_kernels = True
    monkeypatch.setattr(gpt, "squared_product_kernel", None)
    assert torch.equal(mlp(x), plain)


def test_a_slow_kernel_is_left_out(monkeypatch):
    """By auto alone; time_mlp() itself runs where there is a GPU."""
    launches = []
    monkeypatch.setattr(gpt, "try_launch", lambda *args: (launches.append(args), (True, "kernels: on"))[1])
    for ratio, expected in ((0.9, {"loss", "products", "mlp"}), (1.13, {"loss", "products"})):
        monkeypatch.setattr(gpt, "time_mlp", lambda *_args, ratio=ratio: ratio)
        chosen, note = gpt.choose_kernels(smoke_config(kernels="auto"), torch.device("cuda"), torch.bfloat16, True)
        assert chosen == expected and ("not mlp, it takes 1.13 times as long" in note) == (ratio > 1)
    assert gpt.choose_kernels(smoke_config(kernels="on"), torch.device("cuda"), torch.bfloat16, True)[0] == set(gpt.KERNELS)


def test_the_squared_product_of_scaled_factors():
    """As the MLP has it in FP8; here in float16, of which the interpreter knows products: the scale of the product, a
    small copy over its own scale that saturates, the largest entry."""
    torch.manual_seed(0)
    x, w = (torch.randn(*shape, device=DEVICE).half() for shape in ((256, 64), (128, 64)))
    scale, small_scale = torch.tensor(0.05, device=DEVICE), torch.tensor(1e-5, device=DEVICE)
    exact = torch.relu(x.double() @ w.double().T * 0.05).square()
    post, small, largest = gpt.squared_product_fp8(x, w.T, scale, small_scale, torch.float32, torch.float16)
    assert relative_error(post, exact) < 1e-3 and largest.item() == pytest.approx(exact.max().item(), rel=1e-3)
    limit = torch.finfo(torch.float16).max
    assert relative_error(small, (exact / 1e-5).clamp(max=limit)) < 1e-3 and (small == limit).any()
