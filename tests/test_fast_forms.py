"""Fast forms: each against its plain form, and how a run chooses them. If a plain form is edited, its fast form is off."""

import contextlib
import functools
import importlib.util
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import SCRIPT, data_args, gpt, make_runtime, smoke_config, smoke_run

pytest.importorskip("triton")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
pytestmark = [
    pytest.mark.recipe,  # an edited plain form has no fast form, by design
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

DEVICE = GPU if torch.cuda.is_available() else CPU
NAMES = [name for name in gpt.list_fast_forms() if name not in gpt.FP8_FORMS]
ATTENTION_FORMS = {"flex_attention", "cpu_attention", "block_attention"}
FLOAT64_NAMES = [name for name in NAMES if name != "relu2_mlp"]  # its kernel sums in float32
TILES = dict(mlp_ratio=4.0)  # the tiles of relu2_mlp do not divide the 176 channels of smoke_frontier
SHORT = "--warmup_iterations=0", "--micro_batch_tokens=512", "--val_seq_len=512", "--val_loss_every=0"  # it saves time


@pytest.fixture(autouse=True)
def let_flex_attention_differentiate(monkeypatch):
    """FlexAttention refuses gradients on a CPU, because its compiled form has none there. The eager form has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


# (a) Each form against its plain form


@pytest.mark.parametrize("preset", ["smoke", "smoke_frontier"])
@pytest.mark.parametrize("name", gpt.list_fast_forms())
def test_a_fast_form_equals_its_plain_form(name, preset):
    """Results and gradients, in float32. FP8 has the tolerance of its row."""
    torch.manual_seed(0)
    row, cfg = gpt.list_fast_forms()[name], smoke_config(preset=preset, **TILES)
    bound = row.tolerance if name in gpt.FP8_FORMS else 1e-4 if DEVICE is CPU else 2e-3
    errors = gpt.compare_forms(row, cfg, DEVICE, torch.float32, False)
    leaves, constants = row.inputs(cfg, DEVICE, torch.float32)
    plain = row.run(row.plain, *[x.requires_grad_() for x in leaves], *constants)
    loss = sum(y.sum() for y in plain)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if loss.requires_grad else ()
    assert len(errors) == len(plain) + sum(grad is not None for grad in grads)
    assert all(error < bound for error in errors), [float(error) for error in errors]
    if name in gpt.FP8_FORMS:
        assert all(error > 1e-4 for error in errors)  # it rounds
    if DEVICE is CPU:
        assert gpt.verify(name, cfg, CPU, torch.float32, False) == ""


@pytest.mark.parametrize("preset", ["smoke", "smoke_frontier"])
@pytest.mark.parametrize("name", FLOAT64_NAMES)
def test_a_fast_form_equals_its_plain_form_in_float64(name, preset):
    """compare_forms() rounds to float32, as do tables of RoPE, hyperparameters and losses of the Triton kernel."""
    torch.manual_seed(0)
    row, cfg = gpt.list_fast_forms()[name], smoke_config(preset=preset)
    for error in gpt.compare_forms(row, cfg, CPU, torch.float64, False):
        assert error < (5e-6 if name == "fused_adamw" else 5e-7)


def test_the_table_names_only_operations():
    """A row that replaces another name would change nothing. adamw belongs to the optimizer."""
    for name, row in gpt.list_fast_forms().items():
        assert row.plain and set(row.plain) <= set(row.fast), name
        assert set(row.fast) <= {*gpt.Operations._fields, "adamw"}, name
        for key, function in row.plain.items():
            assert key == "adamw" or function is getattr(gpt.Operations(), key), name
    assert {*gpt.FP8_FORMS, *gpt.TRITON_FORMS, *ATTENTION_FORMS, *gpt.EVAL_FORMS} <= set(gpt.list_fast_forms())


@pytest.mark.parametrize("preset", ["smoke", "smoke_frontier"])
def test_every_operation_of_a_model_has_its_fast_form(preset):
    """And the model computes the loss and the gradients of plain operations."""
    cfg, results = smoke_config(preset=preset), {}
    fast, lines = gpt.choose_fast_forms(cfg, CPU, torch.float32, False)
    assert len(lines) == 1
    torch.manual_seed(0)
    tokens, ids = torch.randint(257, (257,)), torch.arange(256) // 100
    for is_fast in (False, True):
        rt = make_runtime(fast=fast - {"sparse_embedding"} if is_fast else frozenset())
        torch.manual_seed(0)
        model = gpt.GPT(cfg, rt)
        for param in model.parameters():
            param.data.add_(torch.randn_like(param) * 0.02)
        step_inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(0), 256, 256, rt, cfg)
        loss = model(tokens[:-1], tokens[1:], ids, step_inputs)
        loss.backward()
        with torch.no_grad():
            eval_loss = model.eval()(tokens[:-1], tokens[1:], ids, step_inputs)
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        results[is_fast] = dict(loss=loss.detach(), eval_loss=eval_loss, **grads)
    plain, ours = results[False], results[True]
    assert plain.keys() == ours.keys() and len(plain) > 15
    assert not all(torch.equal(plain[name], ours[name]) for name in plain)
    for name in plain:
        assert (ours[name] - plain[name]).norm() <= 1e-4 * plain[name].norm(), name


# (b) Edits of plain forms

GELU = "hidden = F.relu(x @ up).square()", "hidden = F.gelu(x @ up)"
SOFTER = "return (scores.softmax(-1) @ v).transpose(0, 1)", "return ((scores * 0.9).softmax(-1) @ v).transpose(0, 1)"
NEARER = "return (key <= query) & (query - key <= window) &", "return (key <= query) & (query - key <= window // 2) &"


@pytest.fixture
def load_copy(tmp_path, monkeypatch):
    """A function that loads an edited copy of train_gpt.py."""

    def load(old: str, new: str):
        text = SCRIPT.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old} is {text.count(old)} times in train_gpt.py"
        path = tmp_path / "copy" / "train_gpt.py"
        path.parent.mkdir()
        path.write_text(text.replace(old, new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("edited_train_gpt", path)
        copy = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, copy)
        spec.loader.exec_module(copy)
        copy.measure_matmul = lambda *_: 1e9
        return copy

    return load


def run_copy(copy, shards: Path, cwd: Path, *args: str) -> dict:
    """smoke_run() of a copy."""
    with contextlib.chdir(cwd), contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), write_through=True)) as out:
        assert copy.main(["--preset=smoke", "--device=cpu", *data_args(shards), *SHORT, *args]) == 0
    (result,) = cwd.glob("logs/**/*.json")
    return {**json.loads(result.read_text()), "stdout": out.buffer.getvalue().decode()}


def off_lines(text: str) -> list[str]:
    return re.findall(r"^.*?(fast form \w+: off .*)$", text, re.M)


@pytest.fixture(scope="module")
def runs(shards, tmp_path_factory):
    """Results of runs of this script, by preset and --fast. Each run is made once."""

    @functools.cache
    def run(preset: str, fast: str, *args: str) -> dict:
        return smoke_run(shards, tmp_path_factory.mktemp("runs"), f"--preset={preset}", f"--fast={fast}", *args)

    return run


def without_obstacles(copy, monkeypatch, *needs: str) -> None:
    """As if the device were one on which auto tries these forms."""
    real = copy.find_obstacle
    monkeypatch.setattr(copy, "find_obstacle", lambda kind, *rest: "" if kind in needs else real(kind, *rest))


def test_an_edited_mlp_switches_its_fast_form_off(load_copy, monkeypatch):
    """Everywhere, also on a device that could use it, with one line."""
    copy = load_copy(*GELU)
    cfg = copy.make_config(dict(preset="smoke", device="cpu"))
    given = cfg, CPU, torch.float32, False
    without_obstacles(copy, monkeypatch, "Hopper")
    without_obstacles(gpt, monkeypatch, "Hopper")
    assert "relu2_mlp" in gpt.choose_fast_forms(smoke_config(), *given[1:])[0]
    reason = copy.verify("relu2_mlp", *given)
    assert reason.startswith("it differs from its plain form by ")
    chosen, lines = copy.choose_fast_forms(*given)
    assert "relu2_mlp" not in chosen and len(lines) == 2 and lines[1].startswith("fast form relu2_mlp: off (it differs")
    assert copy.verify("fp8_mlp", *given).startswith("it differs from its plain form by ")
    with pytest.raises(copy.RunError, match="--fast=relu2_mlp"):
        copy.choose_fast_forms(copy.make_config(dict(preset="smoke", fast="relu2_mlp")), *given[1:])
    ops = copy.make_operations(cfg, chosen, torch.float32)
    x, up, down = torch.randn(8, 64), torch.randn(64, 256), torch.randn(64, 256)
    assert torch.equal(ops.relu2_mlp(x, up, down), torch.nn.functional.gelu(x @ up) @ down.T)


def test_edited_attention_of_long_sequences_is_an_error(load_copy):
    """Its T x T masks would not fit. The line says so before anything is allocated."""
    copy = load_copy(*SOFTER)
    given = CPU, torch.float32, False
    for changes, longest in ((dict(), 262_144), (dict(val_seq_len=8192), 49_152)):
        cfg = copy.make_config(dict(preset="track_1", device="cpu", **changes))
        with pytest.raises(copy.RunError, match=f"{longest} x {longest} tokens.*--seq_len") as error:
            copy.choose_fast_forms(cfg, *given)
        assert error.value.status == 2
    short = dict(preset="track_1", device="cpu", val_seq_len=8192, seq_len=8192, tokens_per_step=8192)
    with pytest.raises(copy.RunError, match="49152 x 49152"):  # sequences of a micro-batch share one mask
        copy.choose_fast_forms(copy.make_config(short), *given)
    cfg = copy.make_config(dict(**short, micro_batch_tokens=8192))
    chosen, lines = copy.choose_fast_forms(cfg, *given)
    assert not chosen & ATTENTION_FORMS
    assert len([line for line in lines if re.match("fast form (cpu|block)_attention: off ", line)]) == 2


@pytest.mark.parametrize("edit, num_off", [(SOFTER, 2), (NEARER, 1)], ids=["attention", "is_visible"])
def test_edited_attention_of_short_sequences_runs(edit, num_off, load_copy, runs, shards, tmp_path):
    """The masks of block_attention call is_visible(), so they follow an edit of it."""
    edited = run_copy(load_copy(*edit), shards, tmp_path)
    assert len(off_lines(edited["stdout"])) == num_off
    difference = abs(edited["final_val_loss"] - runs("smoke", "auto", *SHORT)["final_val_loss"])
    assert 1e-6 < difference < 0.5


# (c) Forms that compute something else


def map_tensors(change, y):
    return change(y) if isinstance(y, torch.Tensor) else tuple(map(change, y))


def spoil(name: str, factor: float, monkeypatch, wrap=None, key: str = "") -> None:
    """Let a fast form be wrong by a factor. key: which of its functions, if it has several."""
    rows = gpt.list_fast_forms()
    key = key or next(key for key in rows[name].fast if key != "make_mask")
    function = rows[name].fast[key]
    wrap = wrap or (lambda function: lambda *given, **options: map_tensors(lambda y: y * factor, function(*given, **options)))
    row = rows[name]._replace(fast={**rows[name].fast, key: wrap(function)})
    monkeypatch.setattr(gpt, "list_fast_forms", lambda: {**rows, name: row})


def scale_step(factor: float):
    """A wrong update has a wrong learning rate."""
    return lambda update: lambda param, grad, state, args: update(
        param, grad, state, args._replace(lr=args.lr * factor))


def scale_gradient(factor: float):
    """A wrong backward, while the results are right."""

    def wrap(function):
        def wrong(*given, **options):
            change = lambda y: y.detach() + (y - y.detach()) * factor
            return map_tensors(change, function(*given, **options))

        return wrong

    return wrap


def assert_refused(name, monkeypatch, capsys, shards, tmp_path, reason="it differs from its plain form by "):
    """In auto it is off with one line. If it is asked for by name, the run ends with status 2."""
    cfg, given = smoke_config(preset="smoke_frontier", **TILES), (CPU, torch.float32, False)
    monkeypatch.setattr(gpt, "find_obstacle", lambda *_: "")
    monkeypatch.chdir(tmp_path)
    if name in gpt.FP8_FORMS:
        is_on, line = gpt.choose_fp8(cfg, CPU, name, torch.float32, False)
        label = name.replace("_", " ")
        assert not is_on and line.startswith(f"{label}: off ({reason}") and "\n" not in line
        option, rest = "--fp8=on", [f"--fp8_parts={name[4:]}", "--fast=off"]
    else:
        only = {key: row for key, row in gpt.list_fast_forms().items() if key == name}
        with monkeypatch.context() as patch:
            patch.setattr(gpt, "list_fast_forms", lambda: only)
            chosen, lines = gpt.choose_fast_forms(cfg, *given)
        assert name not in chosen and len(lines) == 2 and lines[1].startswith(f"fast form {name}: off ({reason}")
        option, rest = f"--fast={name}", []
    words = ["--preset=smoke_frontier", "--device=cpu", "--mlp_ratio=4.0"]
    assert gpt.main([*words, option, *rest, *data_args(shards)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and option in error and reason.strip() in error
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", gpt.list_fast_forms())
def test_a_form_that_computes_something_else_is_refused(name, monkeypatch, capsys, shards, tmp_path):
    """5 % beside it. FP8 rounds by more, so there it is 50 %."""
    factor = 1.5 if name in gpt.FP8_FORMS else 1.05
    spoil(name, factor, monkeypatch, scale_step(factor) if name == "fused_adamw" else None)
    assert_refused(name, monkeypatch, capsys, shards, tmp_path)


@pytest.mark.parametrize(
    "name", [n for n in gpt.list_fast_forms() if n not in ("symmetric_matmul", "sparse_embedding", "fused_adamw")]
)
def test_a_form_with_another_gradient_is_refused(name, monkeypatch, capsys, shards, tmp_path):
    factor = 1.5 if name in gpt.FP8_FORMS else 1.05
    spoil(name, factor, monkeypatch, scale_gradient(factor))
    assert_refused(name, monkeypatch, capsys, shards, tmp_path)


@pytest.mark.parametrize("name", ["rms_norm", "cpu_attention", "head_loss"])
def test_a_form_without_gradient_is_refused(name, monkeypatch):
    spoil(name, 1.0, monkeypatch, lambda function: lambda *given, **options: function(*given, **options).detach())
    assert gpt.verify(name, smoke_config(), CPU, torch.float32, False)


def test_a_form_that_forgets_one_gradient_is_refused(monkeypatch):
    """The gradient of the last input stands at the end of the list."""
    spoil("head_loss", 1.0, monkeypatch, lambda function: lambda x, weight, *rest: function(x, weight.detach(), *rest))
    assert gpt.verify("head_loss", smoke_config(), CPU, torch.float32, False)


def test_a_form_that_fails_is_refused(monkeypatch, capsys, shards, tmp_path):
    def fail(_function):
        def wrong(*_given, **_options):
            raise RuntimeError("no registers\nleft")

        return wrong

    spoil("rms_norm", 1.0, monkeypatch, fail)
    assert_refused("rms_norm", monkeypatch, capsys, shards, tmp_path, "it fails on this cpu device: no registers left")


def test_not_a_number_is_a_difference(monkeypatch):
    spoil("rms_norm", float("nan"), monkeypatch)
    assert "differs from its plain form by nan" in gpt.verify("rms_norm", smoke_config(), CPU, torch.float32, False)


# (d) How auto chooses

EVERYWHERE = {"rms_norm", "norm_rotate", "sparse_embedding"}
ON_A_GPU = {"qkv_kernel", "cross_entropy", "symmetric_matmul"}
CHOICES = {  # (device, capability, use_compile): forms besides EVERYWHERE
    ("cpu", None, False): {"cpu_attention", "head_loss", "fused_adamw"},
    ("cpu", None, True): {"block_attention", "head_loss", "fused_adamw"},
    ("cuda", (9, 0), True): {"flex_attention", "relu2_mlp", *ON_A_GPU},
    ("cuda", (8, 0), True): {"flex_attention", *ON_A_GPU},
    ("cuda", (9, 0), False): {"block_attention", "relu2_mlp", *ON_A_GPU},
    ("cuda", (7, 5), True): {"flex_attention", "head_loss"},  # Triton's tiles do not fit
}


@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_which_forms_auto_takes(case, monkeypatch):
    device, capability, use_compile = torch.device(case[0]), *case[1:]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(gpt, "compare_forms", lambda *_: [])
    cfg = smoke_config(preset="smoke_frontier", **TILES)
    chosen, lines = gpt.choose_fast_forms(cfg, device, torch.float32, use_compile)
    assert chosen == EVERYWHERE | CHOICES[case]
    assert lines[0] == f"fast forms: {', '.join(name for name in NAMES if name in chosen)}"
    assert len(lines) == (4 if capability == (7, 5) else 1)
    chosen, _ = gpt.choose_fast_forms(smoke_config(without="softcap"), device, torch.float32, use_compile)
    assert "cross_entropy" not in chosen and "head_loss" in chosen


@pytest.mark.parametrize(
    "refused, replacement",
    [("flex_attention", "block_attention"), ("cross_entropy", "head_loss"), ("relu2_mlp", None)],
)
def test_after_a_form_that_fails_auto_takes_the_next(refused, replacement, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(gpt, "verify", lambda name, *_: "it fails" if name == refused else "")
    chosen, lines = gpt.choose_fast_forms(smoke_config(), GPU, torch.bfloat16, True)
    assert refused not in chosen and (replacement is None or replacement in chosen)
    assert lines[1:] == [f"fast form {refused}: off (it fails)"]


@pytest.mark.parametrize("name", gpt.TRITON_FORMS)
def test_kernels_need_triton_and_registers(name, monkeypatch):
    cfg = smoke_config()
    assert gpt.verify(name, cfg, CPU, torch.float32, False) == ""
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "triton", None)
        assert gpt.verify(name, cfg, CPU, torch.float32, False) == "Triton is not installed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    assert "below capability 8.0" in gpt.verify(name, cfg, GPU, torch.float32, True)


# (e) Runs


@pytest.mark.parametrize("preset", ["smoke", "smoke_frontier"])
def test_a_run_in_plain_forms_is_a_run_in_fast_forms(preset, runs):
    """All steps of it. T x T masks take less time for short sequences."""
    plain, fast = runs(preset, "off", *SHORT), runs(preset, "auto", *SHORT)
    assert "fast forms: none\n" in plain["stdout"] and "cpu_attention" in fast["stdout"]
    assert plain["final_val_loss"] == pytest.approx(fast["final_val_loss"], abs=1e-3)
    assert plain["final_val_loss"] < 5


# (f) The option


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("flex_attention", "symmetric_matmul")])
def test_a_named_form_is_the_only_one(name):
    cfg = smoke_config(fast=name)
    chosen, lines = gpt.choose_fast_forms(cfg, CPU, torch.float32, False)
    assert chosen == {name} and lines == [f"fast forms: {name}"]
    ops, plain = gpt.make_operations(cfg, chosen, torch.float32), gpt.Operations()
    changed = {key for key in ops._fields if getattr(ops, key) is not getattr(plain, key)}
    assert changed == set(gpt.list_fast_forms()[name].fast) - {"adamw"}


def test_forms_of_one_operation_exclude_each_other():
    """Only one of them could run, and the log would name both."""
    for names in ("cpu_attention,block_attention", "cross_entropy,head_loss"):
        with pytest.raises(gpt.RunError, match="--fast="):
            gpt.choose_fast_forms(smoke_config(fast=names), CPU, torch.float32, False)


@pytest.mark.parametrize("name, changes", [
    ("relu2_mlp", dict(num_heads=1, head_dim=72, model_dim=72)),
    ("relu2_mlp", dict(num_heads=1, head_dim=64, model_dim=64, mlp_ratio=2.75)),
    ("cross_entropy", dict(without="softcap"))])  # fmt: skip
def test_a_kernel_that_does_not_fit_the_model_is_refused(name, changes):
    """Tiles that do not divide the matrices would read and leave out entries, in silence. One kernel needs a softcap."""
    with pytest.raises(gpt.RunError, match=f"--fast={name}"):
        gpt.choose_fast_forms(smoke_config(fast=name, **changes), CPU, torch.float32, False)


def test_fp8_forms_are_verified_with_the_kernels_that_they_use(monkeypatch):
    """fp8_head calls the kernels of cross_entropy if that is chosen, too."""
    called = []
    real = gpt.softcapped_cross_entropy

    def note(*given, **options):
        called.append((given[6:] or [options.get("use_kernel", False)])[-1])
        return real(*given, **options)

    monkeypatch.setattr(gpt, "softcapped_cross_entropy", note)
    cfg = smoke_config(fp8="on", fast="cross_entropy")
    rt = gpt.choose_precision(cfg, make_runtime())
    assert rt.fp8 == {"fp8_head"} and rt.fast == {"cross_entropy"}
    assert called and all(called)  # each by the kernel
