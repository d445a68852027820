"""On a CUDA device: every kernel against its plain form, and runs against runs on the CPU: `./run.sh test -m gpu`."""

import json

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, data_args, gpt, launch, relative_error, run_script, smoke_config, smoke_run

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
FP8_SCALES = gpt.head_fp8_scales(gpt.make_config({"preset": "record_32", "fp8_head_amax": 0.875}))
CAPS = [gpt.Softcap(30.0, 0.0, 7.5), gpt.Softcap(23.0, 5.0, 7.5)]


def choose_dtype() -> torch.dtype:
    return torch.bfloat16 if gpt.supports_bfloat16(CUDA) else torch.float32


@pytest.fixture(autouse=True)
def full_float32():
    """References are exact float32, not TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False, fullgraph=True)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_transpose_of_a_gradient(is_compiled):
    """The gradient of the logits of 8,192 tokens, and a shape that is no multiple of the tiles."""
    run = compiled(gpt.transpose) if is_compiled else gpt.transpose
    for shape in ((8192, 50_304), (1000, 272)):
        x = torch.randint(256, shape, dtype=torch.uint8, device=CUDA).view(torch.float8_e5m2)
        turned = run(gpt.Scaled(x, torch.ones((), device=CUDA)), True).values
        assert torch.equal(turned.view(torch.uint8), x.view(torch.uint8).T)


@pytest.mark.parametrize("num_rows", [10_000, 100_000])
def test_sums_of_rows(num_rows):
    """Of 49,152 tokens that follow Zipf's law, in bfloat16: float32 sums, rounded once, equal in each call."""
    chance = 1 / torch.arange(3.0, num_rows + 3, device=CUDA)
    places = torch.multinomial(chance, 49_152, replacement=True)
    grad = torch.randn(49_152, 768, device=CUDA).bfloat16()
    given = grad, places, places.argsort(stable=True), num_rows
    sums = gpt.launch_row_sums(*given)
    exact = torch.zeros(num_rows, 768, device=CUDA, dtype=torch.float64).index_add_(0, places, grad.double())
    assert relative_error(sums, exact) < 2**-8 and torch.equal(sums, gpt.launch_row_sums(*given))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_mlp_in_one_function(is_compiled):
    """Sizes of record_32, bfloat16: output and gradients within the rounding of matmuls and of squares."""
    if not gpt.supports_bfloat16(CUDA):
        pytest.skip("no bfloat16 on this device")
    torch.manual_seed(0)
    scaled = (torch.randn(n, m, device=CUDA) * m**-0.25 for n, m in ((1024, 768), (768, 3072), (768, 3072)))
    x, up, down = (tensor.bfloat16().requires_grad_() for tensor in scaled)
    run = compiled(gpt.fused_relu2_mlp) if is_compiled else gpt.fused_relu2_mlp
    y = run(x, up, down, None)
    grad = torch.randn_like(y)
    wide = [t.detach().double().requires_grad_() for t in (x, up, down)]
    exact = torch.relu(wide[0] @ wide[1]).square() @ wide[2].T
    theirs = [exact, *torch.autograd.grad(exact, wide, grad.double())]
    for ours, other in zip((y, *torch.autograd.grad(y, (x, up, down), grad)), theirs):
        assert relative_error(ours, other) < 2**-7


@pytest.fixture(scope="module")
def record_92_check():
    return gpt.FormCheck(gpt.make_config({"preset": "record_92"}), CUDA)


@pytest.mark.parametrize("name", list(gpt.FORMS))
def test_every_fast_form_agrees_with_its_plain_form(name, record_92_check):
    """In the model of the newest recipe, forward and backward, with TF32 matmuls as in a run."""
    is_fp8, capability = name in gpt.FP8_FORMS, torch.cuda.get_device_capability()
    needs_kernels = name in ("qkv_kernel", "cross_entropy", "relu2_mlp", "fp8_qkv")
    if is_fp8 and capability < (8, 9) or needs_kernels and capability < (8, 0):
        pytest.skip("not on this device")
    torch.set_float32_matmul_precision("high")
    dtype, limit = (choose_dtype(), 0.3) if is_fp8 else (torch.float32, 0.01)
    assert record_92_check.find_error([name], dtype, limit) == ""


@pytest.mark.parametrize("preset", ["smoke", "smoke_92", "laptop", "record_32"])
def test_no_form_that_auto_takes_is_refused(preset):
    torch.set_float32_matmul_precision("high")
    cfg = gpt.make_config({"preset": preset, "compile": "auto", "dtype": "auto"})
    rt = gpt.choose_precision(cfg, gpt.Runtime(CUDA))
    assert " off (" not in "".join(rt.notes) and ("flex_attention" in rt.fast) == rt.use_compile, rt.notes


@pytest.mark.parametrize("has_group", [False, True])
def test_a_run_with_step_graphs_has_the_bits_of_a_run_without(shards, tmp_path, has_group):
    """Stages, micro-batches, untying, averages, FP8. NCCL's threads do not disturb a capture."""
    options = ["--preset=smoke_92", "--device=cuda", "--orthogonalize=polar_express"]
    if has_group:  # main() destroys it
        dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=CUDA)
        dist.all_reduce(torch.ones(1, device=CUDA))
    with_graphs = smoke_run(shards, tmp_path, *options)
    forms = with_graphs["choices"]["fast"]
    assert "step_graphs" in forms
    without = smoke_run(shards, tmp_path, *options, f"--fast={','.join(name for name in forms if name != 'step_graphs')}")
    assert with_graphs["train_points"] == without["train_points"]
    assert with_graphs["final_val_loss"] == without["final_val_loss"]


def test_step_graphs_of_the_newest_recipe():
    cfg = gpt.make_config({"preset": "record_92"})
    names = [name for name in gpt.FORMS if name != "block_attention" and name not in gpt.FP8_FORMS]
    names += gpt.FP8_FORMS if torch.cuda.get_device_capability() >= (8, 9) else ()
    assert gpt.FormCheck(cfg, CUDA).find_graph_error(names, choose_dtype()) == ""


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("grad_dtype, scale, bound", [
    (torch.bfloat16, 1.0, 2**-8), (torch.float8_e5m2, FP8_SCALES.grad, 2**-3)])
@pytest.mark.parametrize("cap, target_weights", list(zip(CAPS, [(1.0,), (1.0, 0.5, 0.25, 0.25)])))
def test_cross_entropy(cap, target_weights, grad_dtype, scale, bound, is_compiled):
    """The record's vocabulary, with logits beyond the cap. e5m2 has two bits of mantissa. Some targets are missing."""
    torch.manual_seed(0)
    logits = (torch.randn(2048, 50_304, device=CUDA) * 20).bfloat16()
    weights = torch.tensor(target_weights, device=CUDA)
    targets = torch.randint(50_257, (2048, len(weights)), device=CUDA)
    targets[::3, 1:] = -1
    run = compiled(gpt.softcapped_cross_entropy) if is_compiled else gpt.softcapped_cross_entropy
    losses, grads = run(logits, targets, weights, cap, grad_dtype, scale, True)
    exact, exact_grads = gpt.softcapped_cross_entropy(logits.double(), targets, weights, cap, torch.float32)
    assert torch.allclose(losses, exact.float(), rtol=1e-4, atol=1e-4)
    assert relative_error(grads.float() * scale, exact_grads) < bound


@pytest.mark.parametrize("num_tokens", [1024, 49_152])
@pytest.mark.parametrize("window", [128, 1408])
def test_flex_attention_forward_and_backward(num_tokens, window):
    """Documents and window against dense attention. The inputs are views, as in the model."""
    torch.manual_seed(0)
    dtype = choose_dtype()
    doc_ids = (torch.rand(num_tokens, device=CUDA) < 1 / 400).cumsum(0).int()
    qk = torch.randn(num_tokens, 2, 6, 128, device=CUDA, dtype=dtype, requires_grad=True)
    qkv = torch.randn(num_tokens, 3 * 768, device=CUDA, dtype=dtype, requires_grad=True)
    weight = torch.randn(num_tokens, 6, 128, device=CUDA, dtype=dtype)

    def attend(qk, qkv, doc_ids, window, build, attention) -> torch.Tensor:
        q, k = (qk * torch.tensor([0.1, 1.0], device=CUDA, dtype=qk.dtype)[:, None, None]).unbind(1)
        return attention(q, k, qkv[:, 1536:].unflatten(1, (6, 128)), build(doc_ids, window))

    size = torch.tensor(window, dtype=torch.int32, device=CUDA)
    ours = compiled(attend)(qk, qkv, doc_ids, size, gpt.build_block_mask, gpt.attend_flex)
    grads = torch.autograd.grad((ours * weight).sum(), (qk, qkv))
    exact_inputs = [x.detach().float().requires_grad_() for x in (qk, qkv)]
    ops = gpt.make_operations(smoke_config(), {"block_attention"}, torch.float32)
    exact = attend(*exact_inputs, doc_ids, window, ops.make_mask, ops.attention)
    expected = torch.autograd.grad((exact * weight.float()).sum(), exact_inputs)
    assert relative_error(ours, exact) < 0.01  # bfloat16 rounds inputs, scores and sums by 2^-9 each
    for our, grad in zip(grads, expected):
        assert relative_error(our, grad) < 0.02


def test_fp8_head_points_where_bfloat16_does():
    """e4m3 has three bits of mantissa and e5m2 has two. Errors of 50,304 logits average out."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 on this device")
    torch.manual_seed(0)
    x = gpt.rms_norm(torch.randn(4096, 768, device=CUDA)).bfloat16()
    weight = (torch.randn(50_304, 768, device=CUDA) * 0.05).bfloat16()
    targets, one, results = torch.randint(50_257, (4096, 1), device=CUDA), torch.ones(1, device=CUDA), []
    for scales in (None, FP8_SCALES):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = compiled(gpt.FusedHeadLoss.apply)(True, scales, a, b, targets, one, CAPS[0])
        results.append((loss.item(), *torch.autograd.grad(loss, (a, b))))
    (plain, *plain_grads), (fp8, *fp8_grads) = results
    assert fp8 == pytest.approx(plain, rel=2e-3)
    for ours, exact in zip(fp8_grads, plain_grads):
        assert torch.cosine_similarity(ours.float().flatten(), exact.float().flatten(), dim=0) > 0.995


@pytest.fixture(scope="module")
def gpu_run(shards, tmp_path_factory):
    """20 steps of smoke on the GPU, with a checkpoint after 10, and its folder."""
    folder = tmp_path_factory.mktemp("gpu")
    return smoke_run(shards, folder, *LONGER, "--device=cuda", "--checkpoint_every=10"), folder


LONGER = ["--num_iterations=20", "--val_loss_every=10"]


def losses(result):
    return [loss for _, loss, _ in result["val_points"]]


def test_the_gpu_learns_what_the_cpu_learns(shards, gpu_run, tmp_path):
    """float32 with TF32 matmuls (2^-11). In 20 steps the loss falls from 5.9 to about 2."""
    cpu = smoke_run(shards, tmp_path, *LONGER)
    assert losses(gpu_run[0]) == pytest.approx(losses(cpu), abs=0.03)
    assert losses(cpu)[-1] < losses(cpu)[0] - 2


def test_the_newest_recipe_learns_what_the_cpu_learns(shards, tmp_path):
    """All mechanisms, compiled, against plain forms on the CPU, in 24 steps. The head is tied in the first 16."""
    longer, results = ["--preset=smoke_92", "--num_iterations=24", "--val_loss_every=8"], []
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        results.append(losses(smoke_run(shards, folder, *longer, f"--device={device}")))
    assert results[0] == pytest.approx(results[1], abs=0.05)
    assert results[0][-1] < results[0][0] - 2


@pytest.mark.parametrize("options", [
    ["--compile=off"], ["--fast=off"], ["--fast=rms_norm,flex_attention,head_loss"],
    ["--dtype=bfloat16"]], ids=str)
def test_other_forms_learn_equally(shards, gpu_run, tmp_path, options):
    """Eager, plain forms, no Triton kernels of ours, bfloat16 with an FP8 head if the GPU has FP8."""
    if options == ["--dtype=bfloat16"] and not gpt.supports_bfloat16(CUDA):
        pytest.skip("no bfloat16 on this device")
    other = smoke_run(shards, tmp_path, *LONGER, "--device=cuda", *options)
    assert losses(other) == pytest.approx(losses(gpu_run[0]), abs=0.05)


def test_checkpoints_go_from_gpu_to_cpu_and_back(shards, gpu_run, tmp_path):
    _, folder = gpu_run
    first = next(folder.rglob("step_000010"))
    on_cpu = smoke_run(shards, tmp_path, *LONGER, f"--resume={first}", "--checkpoint_every=15")
    (middle,) = tmp_path.rglob("step_000015")
    again = smoke_run(shards, tmp_path, *LONGER, "--device=cuda", f"--resume={middle}")
    for result in (on_cpu, again):
        assert losses(result) == pytest.approx(losses(gpu_run[0]), abs=0.03)


def test_gpu_and_cpu_write_one_text(gpu_run):
    checkpoint = next(gpu_run[1].rglob("step_000020"))
    options = [str(checkpoint), "--prompt=abc", "--temperature=0", "--max_new_tokens=20"]
    texts = [launch([str(ROOT / "tools/sample.py"), *options, f"--device={device}"], gpu_run[1])
             for device in ("cpu", "auto")]
    assert texts[0].returncode == 0 and len(texts[0].stdout) > 10, texts[0].stderr
    assert texts[0].stdout == texts[1].stdout


def test_a_validation_sequence_of_262144_tokens_is_the_sum_of_its_documents():
    """Documents of 8,192 tokens have one loss in one sequence and separately, because none sees another."""
    cfg = smoke_config(num_layers=4, num_heads=2, head_dim=64, model_dim=128,
                       stages=(gpt.Stage(1, 1664, 768),))
    torch.manual_seed(0)
    ops = gpt.make_operations(cfg, {"rms_norm", "flex_attention"}, choose_dtype())
    model = gpt.GPT(cfg)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    model.to(CUDA)
    model.calls = gpt.make_calls(model, compiled)
    state = gpt.Schedule(cfg).at(0)
    tokens = torch.randint(257, (262_145,), device=CUDA)

    @torch.no_grad()
    def measure(part: slice, documents: torch.Tensor) -> float:
        batch = gpt.Batch(tokens[:-1][part].int(), tokens[1:][part], documents)
        return model(batch, gpt.make_step_inputs(state, len(documents), 8192, cfg, CUDA), ops).item()

    whole = measure(slice(None), torch.arange(262_144, device=CUDA, dtype=torch.int32) // 8192)
    one = torch.zeros(8192, device=CUDA, dtype=torch.int32)
    parts = sum(measure(slice(begin, begin + 8192), one) for begin in range(0, 262_144, 8192))
    assert whole == pytest.approx(parts, rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_learn_what_one_learns(shards, gpu_run, tmp_path):
    two = run_script(["--preset=smoke", *data_args(shards), *LONGER, "--device=cuda"], tmp_path, nproc=2)
    assert two.returncode == 0, two.stderr[-2000:]
    (path,) = (tmp_path / "logs").glob("*.json")
    assert losses(json.loads(path.read_text())) == pytest.approx(losses(gpu_run[0]), abs=0.03)


def test_blocked_attention_runs_without_triton(monkeypatch):
    """49,152 tokens forward and backward in bounded memory, as on Windows."""
    monkeypatch.setattr(gpt, "triton", None)
    rt = gpt.choose_precision(smoke_config(compile="auto"), gpt.Runtime(CUDA))
    assert not rt.use_compile and "block_attention" in rt.fast
    heads = 49_152, 6, 128
    q, k, v = (torch.randn(heads, device=CUDA, dtype=choose_dtype(), requires_grad=True) for _ in range(3))
    doc_ids = torch.arange(49_152, device=CUDA, dtype=torch.int32) // 1000
    torch.cuda.reset_peak_memory_stats()
    mask = gpt.build_dense_mask(doc_ids, 1408, q.dtype)
    gpt.BlockAttention.apply(q, k, v, mask).sum().backward()
    assert v.grad.isfinite().all() and torch.cuda.max_memory_allocated() < 30e9
