"""Fast forms: the check at the start of a run, and which forms a run takes. test_kernels has each form alone."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from conftest import CPU_FORMS, SCRIPT, gpt, make_runtime, smoke_config

from tools.results import load_script

pytest.importorskip("triton")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
DEVICE = GPU if torch.cuda.is_available() else CPU
pytestmark = [
    pytest.mark.recipe,  # an edited plain form has no fast form, by design
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    *([pytest.mark.usefixtures("eager_flex")] if DEVICE is CPU else []),
]


def name_case(value) -> str:
    """Workers of pytest-xdist must name the cases alike, and the order of a set is random."""
    return ",".join(sorted(value)) if isinstance(value, (set, frozenset)) else str(value)


def attend_by_lists(copy):
    """attention() that sees exactly the blocks in the lists of FlexAttention, which needs a GPU for that."""

    def attend(q, k, v, mask):
        num_blocks, at = len(q) // 128, torch.arange(len(q))
        kinds = torch.zeros(num_blocks, num_blocks, dtype=torch.int64)  # 0: invisible, 1: partial, 2: full
        lists = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
        for kind, (counts, indices) in enumerate(lists, 1):
            for row, (count, blocks) in enumerate(zip(counts[0, 0], indices[0, 0])):
                kinds[row, blocks[:count].long()] = kind
        kinds = kinds.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return copy.attention(q, k, v, (kinds == 2) | (kinds == 1) & mask.mask_mod(0, 0, at[:, None], at))

    return attend


@pytest.fixture
def load_copy(tmp_path, monkeypatch):
    def load(old: str, new: str):
        text = SCRIPT.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old} is {text.count(old)} times in train_gpt.py"
        (tmp_path / "train_gpt.py").write_text(text.replace(old, new), encoding="utf-8")
        copy = load_script(tmp_path)
        if DEVICE is CPU:
            monkeypatch.setattr(copy, "attend_flex", attend_by_lists(copy))
        return copy

    return load


def slow(*given):
    return pytest.param(*given, marks=pytest.mark.slow)


ONE = dict(num_layers=1, layers=(gpt.LayerSpec(),))
CONFIGS = dict(  # with all that a kernel needs, and few layers, because the interpreter is slow
    smoke=dict(),
    record_92=dict(preset="smoke_92"),
    laptop=dict(preset="laptop"),
    qkv=dict(preset="smoke_92", num_layers=2,
             layers=(gpt.LayerSpec(paired=True), gpt.LayerSpec("long", key_offset=True))),
    loss=dict(preset="smoke_92", **ONE),
    mlp=dict(mlp_ratio=8, **ONE),
)  # fmt: skip


@pytest.mark.parametrize("config, names", [
    ("smoke", CPU_FORMS), ("record_92", CPU_FORMS), ("laptop", CPU_FORMS), ("mlp", {"relu2_mlp"}),
    slow("record_92", {"flex_attention"}), slow("qkv", {"qkv_kernel"}), slow("loss", {"cross_entropy"})],
    ids=name_case)  # fmt: skip
def test_right_forms_pass_the_check(config, names):
    """With a thousandth of the error that is allowed, on a CPU. And something is compared."""
    check = gpt.FormCheck(smoke_config(**CONFIGS[config]), DEVICE)
    assert check.find_error(sorted(names), torch.float32, 1e-5 if DEVICE is CPU else 0.01) == ""
    ours = check.run(sorted(names), torch.float32)
    assert len(ours) > 8 and not all(torch.equal(check.plain[name], ours[name]) for name in ours)


FAULTS = {  # (form, config): lines of code, and the same lines with a fault
    ("rms_norm", "record_92"): [
        # 2 % too large, and without the second term of the gradient
        ("x.size(-1) + RMS_EPS).type_as(x)", "x.size(-1) + RMS_EPS).type_as(x) * 1.02"),
        ("return torch.addcmul(grad, y, total, value=-1 / y.size(-1)) * scale", "return grad * scale")],
    ("block_attention", "smoke"): [
        # a window of 64 tokens less, and one more
        ("positions - window)", "positions - window + 64)"),
        ("positions - window)", "positions - window - 64)"),
        # attention to the next token, to other documents, and to the keys of another head
        ("earlier[:size, :size].T", "earlier[:size, :size].T.triu(2).nan_to_num(0.0)"),
        ("torch.searchsorted(doc_ids, doc_ids)", "torch.searchsorted(doc_ids, 0 * doc_ids)"),
        ("q, k.mT).softmax(-1)", "q, k.roll(len(mask), 0).mT).softmax(-1)"),
        # gradients without the softmax's, of another head's queries, and of keys in the wrong blocks
        ("torch._softmax_backward_data(grad @ v.mT, probs, -1, probs.dtype)", "grad @ v.mT * probs"),
        ("(grad_scores.mT @ q,", "(grad_scores.mT @ q.flip(0),"),
        ("probs.mT @ grad):", "probs.mT @ grad.roll(1, 0)):"),
        ("total[:-i] += parts[i:, -1 - i]", "total[:-i] += parts[:-i, -1 - i]"),
        ("total = parts[:, -1].clone()", "total = parts[:, 0].clone()"),
    ],
    ("block_attention", "record_92"): [  # a window of one token more
        ("positions - window)", "positions - window - 1)")],
    ("flex_attention", "record_92"): [
        # blocks that are left out, and blocks without the mask that they need
        ("(distance - (BLOCK - 1) <= window) & overlap", "(distance <= window) & overlap"),
        ("(distance - (BLOCK - 1) <= window) & overlap", "(distance < window) & overlap"),
        ("(distance + (BLOCK - 1) <= window)", "(distance <= window)")],
    ("flex_attention", "smoke"): [  # likewise between documents, and the wrong blocks without a mask
        ("            & (first[:, None] == last) & (first == last[:, None]))", "            )"),
        ("num_full, full_start + column]", "num_full, full_start - 1 + column]")],
    ("head_loss", "record_92"): [
        # no derivative of the softcap, no shift, missing targets, and gradients of the first target only
        ("grads.mul_(torch.addcmul(capped, capped, capped, value=-1 / softcap.cap))", "pass"),
        ("capped = softcap(logits", "capped = softcap._replace(shift=0.0)(logits"),
        ("weights.type_as(capped) * (targets >= 0)", "weights.type_as(capped) * (targets >= -1)"),
        ("scatter_add_(1, targets, -weights)", "scatter_add_(1, targets[:, :1], -weights[:, :1])")],
    ("relu2_mlp", "mlp"): [
        # a gradient 2 % too large, no ReLU, columns of another tile, and a gradient by the other matrix
        ("total *= 2 * tl.sqrt", "total *= 2.04 * tl.sqrt"),
        ("total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)", "pass"),
        ("columns[None, :] * STRIDE_N", "(columns % BLOCK_N)[None, :] * STRIDE_N"),
        ("matmul(pre, Scaled(up, up_scale), grad.dtype)", "matmul(pre, Scaled(down, up_scale), grad.dtype)")],
    ("qkv_kernel", "qkv"): [
        # a softmax scale 2 % off, a rotation backward, and no second term of the gradient of the norm
        ("other=1.0).to(tl.float32) * scale", "other=1.0).to(tl.float32) * scale * 1.02"),
        ("join_halves(first * cos - second * sin, second * cos + first * sin)",
         "join_halves(first * cos + second * sin, second * cos - first * sin)"),
        ("grad = (grad - x * (tl.sum(grad * x, axis=1, keep_dims=True) / K)) *", "grad = grad *"),
        # positions of single heads, keys that go to the next sequence, and no gradient of keys that moved
        ("(tokens[:, None] * P + head % P) * HALF", "(tokens[:, None] * P) * HALF"),
        ("tl.where(is_moved, has_next, False)", "tl.where(is_moved, tokens[:, None] + 1 < T, False)"),
        ("grad += tl.load(out_ptr + here + H * K, mask=moves, other=0.0).to(tl.float32)", "pass")],
    ("cross_entropy", "loss"): [
        # a gradient 2 % too large, no mask of the vocabulary, equal targets, and missing targets
        ("factor = CAP / (4 * WIDTH)", "factor = 1.02 * CAP / (4 * WIDTH)"),
        ("tl.where(at < V, tl.exp2((t - 1) * (CAP / 2", "tl.where(at >= 0, tl.exp2((t - 1) * (CAP / 2"),
        ("tl.where(tl.load(targets_ptr + j) == target, tl", "tl.where(j == i, tl"),
        ("weight = tl.where(target >= 0, tl.load(", "weight = tl.where(target >= -1, tl.load(")],
}  # fmt: skip
SLOW = {"qkv_kernel", "cross_entropy"}


@pytest.mark.parametrize("form, config, old, new", [
    (slow if form in SLOW else lambda *case: case)(form, config, *fault)
    for (form, config), faults in FAULTS.items() for fault in faults])  # fmt: skip
def test_the_check_finds_a_fault(form, config, old, new, load_copy):
    """One wrong line of a fast form or of a kernel."""
    copy = load_copy(old, new)
    error = copy.FormCheck(smoke_config(**CONFIGS[config]), DEVICE).find_error([form], torch.float32, 0.01)
    assert " differs from its plain form by " in error


# the gradient of the MLP without factor, scale or order. A head that saturates, or with twice a gradient
FP8_FAULTS = [
    ("fp8_mlp", "y * 2 * (hidden.values.float() * hidden.scale)", "y * (hidden.values.float() * hidden.scale)"),
    ("fp8_mlp", "y * 2 * (hidden.values.float() * hidden.scale)", "y * 2 * hidden.values.float()"),
    ("fp8_mlp", "Scaled(hidden_t, hidden_scale)", "Scaled(hidden_t.roll(1, 0), hidden_scale)"),
    ("fp8_head", "HeadScales(x=math.sqrt(cfg.model_dim) / 448", "HeadScales(x=0.3 / 448"),
    ("fp8_head", "torch.full((), scales.grad, device", "torch.full((), 2 * scales.grad, device")]  # fmt: skip


@pytest.mark.parametrize("config, fault", [
    ("laptop", None), ("record_92", None), *(slow("record_92", fault) for fault in FP8_FAULTS)])  # fmt: skip
def test_a_right_fp8_form_stays_on_and_a_wrong_one_is_off(config, fault, load_copy):
    """In bfloat16, with all other forms."""
    copy, off = (load_copy(*fault[1:]), {fault[0]}) if fault else (gpt, set())
    cfg = smoke_config(**CONFIGS[config], fp8="on", fp8_parts="head,mlp", fast=",".join(CPU_FORMS))
    chosen, lines = copy.choose_fast_forms(cfg, copy.Runtime(DEVICE, dtype=torch.bfloat16))
    assert chosen == CPU_FORMS | {"fp8_head", "fp8_mlp"} - off and len(lines) == 1 + len(off), lines


@pytest.mark.house
def test_digests_are_of_the_code():
    """If you have changed a plain form and its fast forms alike, copy its new digest to DIGESTS."""
    new = {name: digest for name, digest in gpt.compute_digests().items() if digest != gpt.DIGESTS[name]}
    assert not new, f"new digests, for DIGESTS: {new}"
    names = {function for functions in gpt.FORMS.values() for function in functions}
    assert names == gpt.DIGESTS.keys()


EDITS = {  # of plain forms: (name of the function or class, fast forms that compute something else)
    ("hidden = F.relu(x @ up).square()", "hidden = F.gelu(x @ up)"): ("relu2_mlp", "relu2_mlp"),
    ("return (scores.softmax(-1) @ v)", "return ((scores * 0.999).softmax(-1) @ v)"): ("attention", "block_attention"),
    ("(query - key <= window) &", "(query - key < window) &"): ("is_visible", "block_attention"),
    ("F.cross_entropy(logits, target, ignore", "F.cross_entropy(1.0001 * logits, target, ignore"):
        ("head_loss", "head_loss, fp8_head"),
    ("logits = logits + self.shift", "logits = logits + 1.0001 * self.shift"): ("Softcap", "head_loss, fp8_head"),
    ("eps=RMS_EPS)\n", "eps=1e-6)\n"): ("rms_norm", "rms_norm, qkv_kernel, fp8_qkv"),
    ("torch.cat((cos, cos), dim=-1)", "torch.cat((cos, 1.0001 * cos), dim=-1)"): ("rotate", "qkv_kernel, fp8_qkv"),
    ("q = q * rope.softmax_scale", "q = 1.0001 * q * rope.softmax_scale"): ("make_qkv", "qkv_kernel, fp8_qkv"),
    ("return x @ weight.type_as(x).T", "return 1.0001 * x @ weight.type_as(x).T"):
        ("linear", "qkv_kernel, head_loss, fp8_head, fp8_qkv"),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit[0])
def test_an_edited_plain_form_switches_its_fast_forms_off(edit, load_copy):
    """FP8 too, with one line. The other forms stay on, and the edited function runs. Comments do not count."""
    copy, (function, off) = load_copy(*edit), EDITS[edit]
    names = CPU_FORMS | {"relu2_mlp", "fp8_head", *off.split(", ")}
    parts = ",".join(name[4:] for name in names & {*gpt.FP8_FORMS})
    cfg = smoke_config(fast=",".join(names & {*gpt.FORMS} - {*gpt.FP8_FORMS}), fp8="on", fp8_parts=parts, **CONFIGS["mlp"])
    chosen, lines = copy.choose_fast_forms(cfg, copy.Runtime())
    assert chosen == names - {*off.split(", ")}
    assert lines[1:] == [f"{function} was edited: without fast forms {off}"]
    plain, ours, fast = (copy.make_operations(cfg, given, torch.float32) for given in ((), chosen, off.split(", ")))
    for field in plain._fields:
        if getattr(fast, field) is not getattr(plain, field):
            assert getattr(ours, field) is getattr(plain, field)


@pytest.mark.parametrize("layers", ['{"mlp": false}', '{"mlp": false, "attention": "none", "value_embed": null}'])
def test_a_model_without_mlps_keeps_its_forms(layers):
    """Without attention, too, the gradient of a scale in front of the last norm is zero but for rounding."""
    cfg = smoke_config(layers=layers, fp8="off")
    chosen, lines = gpt.choose_fast_forms(cfg, gpt.Runtime())
    assert chosen == CPU_FORMS and len(lines) == 1


def test_a_comment_switches_nothing_off(load_copy):
    copy = load_copy("    hidden = F.relu(x @ up).square()  # (T, F)", "    # activation\n    hidden = (F.relu(x @ up)).square()")
    assert copy.compute_digests() == gpt.compute_digests()


def test_long_sequences_need_a_fast_form_of_attention(load_copy):
    """The T x T masks of an edited attention() would not fit. A line says that it does not run."""
    copy = load_copy("return (scores.softmax(-1) @ v)", "return ((scores * 0.9).softmax(-1) @ v)")
    for length, num_tokens in ((16_384, 8192), (8192, 16_384)):  # sequences of a micro-batch share one mask
        cfg = smoke_config(val_seq_len=length, val_tokens=length, micro_batch_tokens=num_tokens, **ONE)
        chosen, lines = copy.choose_fast_forms(cfg, copy.Runtime())
        assert "block_attention" in chosen and lines[1] == "attention was edited: without fast forms block_attention"
        assert lines[2] == "attention() needs masks of 16384 x 16384 tokens: block_attention replaces it"
    chosen, lines = copy.choose_fast_forms(replace(cfg, micro_batch_tokens=8192), copy.Runtime())
    assert "block_attention" not in chosen and len(lines) == 2


WRONG = {
    "it fails on this cpu device: no registers": (
        "block_attention", "attention", lambda f: Mock(side_effect=RuntimeError("no registers\nleft"))),
    " differs from its plain form by nan": (
        "block_attention", "attention", lambda f: lambda *xs: f(*xs) * float("nan")),
    " differs from its plain form by 0.02": ("head_loss", "head_loss", lambda f: lambda *xs: f(*xs) * 1.02),
    "it fails on this cpu device: 'head.weight'": (
        "head_loss", "head_loss", lambda f: lambda x, weight, *rest: f(x, weight.detach(), *rest)),
}  # fmt: skip


@pytest.mark.parametrize("reason", WRONG)
@pytest.mark.parametrize("fast", ["auto", "rms_norm,block_attention,head_loss"])
def test_a_wrong_form_is_off_with_one_line(fast, reason, monkeypatch):
    """The others stay on, whether a user names them or not."""
    (name, field, wrap), real = WRONG[reason], gpt.make_operations

    def make(cfg, names, dtype):
        ops = real(cfg, names, dtype)
        return ops._replace(**{field: wrap(getattr(ops, field))}) if name in names else ops

    monkeypatch.setattr(gpt, "make_operations", make)
    chosen, lines = gpt.choose_fast_forms(smoke_config(fast=fast), make_runtime())
    assert chosen == CPU_FORMS - {name} and len(lines) == 2
    assert lines[1].startswith(f"fast form {name}: off (") and reason in lines[1]
    assert lines[0] == f"fast forms: {', '.join(form for form in gpt.FORMS if form in chosen)}"


ON_A_GPU = {"rms_norm", "qkv_kernel", "flex_attention", "cross_entropy", "step_graphs"}
FP8_LAYERS = {"fp8_mlp", "fp8_qkv"}
PARTS = dict(fp8_parts="head,mlp,qkv")
WIDE = dict(num_heads=2, head_dim=64, model_dim=128, **PARTS)
BF16 = dict(dtype=torch.bfloat16)
CHOICES = [  # capability (None: a CPU), changes of the runtime, changes of the config, forms
    (None, {}, {}, CPU_FORMS),
    (None, BF16, WIDE, CPU_FORMS),
    ((9, 0), {}, WIDE, {*ON_A_GPU, "relu2_mlp"}),
    ((9, 0), {}, dict(mlp_ratio=3), ON_A_GPU),  # tiles must divide the matrices
    ((9, 0), {}, dict(num_heads=1, head_dim=32, model_dim=32, mlp_ratio=4), ON_A_GPU),
    ((9, 0), {}, dict(without="softcap"), ON_A_GPU - {"cross_entropy"} | {"head_loss"}),
    ((10, 0), {}, {}, ON_A_GPU),  # the MLP's kernel was measured on Hopper only
    ((8, 0), {}, {}, ON_A_GPU),
    ((7, 5), {}, {}, {"rms_norm", "flex_attention", "head_loss", "step_graphs"}),  # too few registers for our kernels
    ((6, 1), {}, {}, CPU_FORMS),
    ((9, 0), BF16, WIDE, {*ON_A_GPU, "relu2_mlp", "fp8_head", *FP8_LAYERS}),
    ((9, 0), BF16, dict(fp8="off"), ON_A_GPU),
    ((8, 9), dict(dtype=torch.float32, use_compile=True), WIDE, ON_A_GPU),
    ((8, 0), BF16, WIDE, ON_A_GPU),  # it has no FP8
]  # fmt: skip


def use_results(monkeypatch, capability, find_error) -> None:
    """Let a GPU have this capability, and the check these results."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(gpt.FormCheck, "__init__", lambda check, *_: setattr(check, "lines", []))
    monkeypatch.setattr(gpt.FormCheck, "find_graph_error", lambda *_: "")
    monkeypatch.setattr(gpt.FormCheck, "find_error", lambda _check, *given: find_error(*given))


@pytest.mark.parametrize("capability, runtime, changes, expected", CHOICES, ids=name_case)
def test_which_forms_auto_takes(capability, runtime, changes, expected, monkeypatch):
    """If all are right. They are checked in float32, then with FP8 in the dtype of the run."""
    checked = []
    note = lambda names, dtype, _limit: checked.append((set(names), dtype)) or ""
    use_results(monkeypatch, capability, note)
    rt = gpt.Runtime(GPU if capability else CPU, **runtime)
    chosen, (line,) = gpt.choose_fast_forms(smoke_config(**changes), rt)
    names = [name for name in gpt.FORMS if name in chosen]
    assert chosen == expected and line == f"fast forms: {', '.join(names)}"
    assert checked[0] == (expected - {*gpt.FP8_FORMS}, torch.float32)
    assert checked[1:] == ([(expected, rt.dtype)] if rt.dtype == torch.bfloat16 else [])


def test_flex_attention_of_long_sequences_runs_on_a_gpu_after_an_edit(monkeypatch):
    """T x T masks would not fit."""
    use_results(monkeypatch, (9, 0), lambda names, *_: "wrong" if "flex_attention" in names else "")
    cfg, rt = smoke_config(val_seq_len=16_384, val_tokens=16_384), gpt.Runtime(GPU)
    chosen, (_, line, _) = gpt.choose_fast_forms(cfg, rt)
    assert "flex_attention" in chosen and line == "fast form flex_attention: off (wrong)"
    assert "flex_attention" not in gpt.choose_fast_forms(smoke_config(), rt)[0]


FIELDS = dict(flex_attention={"make_mask", "attention"}, block_attention={"make_mask", "attention"},
              cross_entropy={"head_loss"}, qkv_kernel={"make_qkv"}, step_graphs=set())  # fmt: skip


@pytest.mark.parametrize("name", [name for name in gpt.FORMS if name not in gpt.FP8_FORMS])
def test_a_named_form_replaces_its_operations_alone(name):
    """FP8 uses the kernels that are chosen."""
    make = lambda *names: gpt.make_operations(smoke_config(), names, torch.float32)
    plain, ops = gpt.Operations(), make(name)
    changed = {field for field in ops._fields if getattr(ops, field) is not getattr(plain, field)}
    assert changed == FIELDS.get(name, {name}) and make() == plain
    assert make(name, "fp8_head").head_loss.args[0] == (name == "cross_entropy")
    assert make(name, "fp8_mlp").relu2_mlp.keywords["use_kernel"] == (name == "relu2_mlp")


def test_a_vector_whose_gradient_is_not_finite_is_a_difference(monkeypatch):
    """Although gradients of vectors are not compared in bfloat16."""
    check, real = gpt.FormCheck(smoke_config(), DEVICE), gpt.FormCheck.run
    names = [name for name, x in check.plain.items() if x.dim() == 1]

    def spoil(self, *args):
        return {name: x * math.nan if name == names[-1] else x for name, x in real(self, *args).items()}

    assert check.find_error([], torch.float32, 0.4) == ""
    monkeypatch.setattr(gpt.FormCheck, "run", spoil)
    assert check.find_error([], torch.float32, 0.4) == f"{names[-1]} differs from its plain form by nan"


def test_both_replays_of_a_graph_are_compared(monkeypatch):
    for wrong in range(2):
        check = gpt.FormCheck(smoke_config(), DEVICE)
        monkeypatch.setattr(gpt.FormCheck, "find_error", lambda *args, wrong=wrong: "wrong" if args[4] == wrong else "")
        assert check.find_graph_error([], torch.float32) == "wrong"
