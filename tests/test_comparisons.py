"""Comparisons during a run. Compiled code is compared with the code that it was made from, and off if it differs. Ranks
compare checksums of parameters, and a difference ends the run. torch.compile is replaced by functions with a fault, so
nothing is compiled, except in one slow test."""

import functools
import json
import re
import shutil
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    AT_THE_END,
    CPU_FORMS,
    TINY,
    assert_same_bits,
    before_call,
    data_args,
    gpt,
    make_runtime,
    run,
    slow_but,
    smoke_config,
)
from cpu_graphs import graphs_on_cpu
from run_ranks import leak, run_ranks

SHORT = [*TINY, "--num_iterations=3", "--val_loss_every=2"]  # without steps in the warm-up
SMOKE_92 = ["--preset=smoke_92", "--device=cpu", "--dtype=float32", "--fp8=off", "--num_iterations=6",
            "--warmup_iterations=0", "--val_tokens=1024", AT_THE_END]  # fmt: skip
OFF = re.compile(r"^torch.compile: off \((\w+) of (\S+): relative error (\S+) against the code without it\)$", re.M)


def in_function(name: str, fault):
    """A compiler: the function `name` gets a fault, and the others are copied."""
    return lambda fn, **_: fault(fn) if fn.__name__ == name else functools.partial(fn)


def in_rule(rule: str):
    """A compiler whose code of one update rule makes the new weights 10 % larger."""
    def compile(fn, **_):
        if getattr(fn, "__self__", None) is not gpt.RULES[rule]:
            return functools.partial(fn)
        return lambda param, *args: (fn(param, *args), param.mul_(1.1))

    return compile


def times(factor: float):
    """The first output is multiplied by a factor."""
    def fault(fn):
        def call(*args):
            result = fn(*args)
            return (result[0] * factor, *result[1:]) if isinstance(result, tuple) else result * factor

        return call

    return fault


def wrong_input_gradient(fn):
    """The gradient of the first argument is 20 % too large, and the result is right."""
    def call(x, *args):
        if x.requires_grad:
            x = x * 1
            x.register_hook(lambda grad: 1.2 * grad)
        return fn(x, *args)

    return call


def wrong_weight_gradient(fn):
    """The gradients of parameters are 20 % too large. The result and the gradient of the first argument are right."""
    def call(x, *args):
        result = fn(x, *args)
        if not torch.is_grad_enabled():
            return result
        more = 0.2 * fn(x.detach(), *args)
        return result + (more - more.detach())

    return call


FAULTS = {  # fault: (options, compiler, what differs)
    "a leak": (SHORT, in_function("run_segment", leak), "activations of validation"),
    "a leak in training": (
        SHORT, in_function("run_segment", lambda fn: leak(fn, is_on=torch.is_grad_enabled)), "activations of training"),
    "a leak in validation": (
        SHORT, in_function("run_segment", lambda fn: leak(fn, is_on=lambda: not torch.is_grad_enabled())),
        "activations of validation"),
    "NaN": (SHORT, in_function("run_segment", times(float("nan"))), "activations of validation"),
    "loss": (SHORT, in_function("forward", times(1.01)), "loss of validation"),
    "input gradient": (SHORT, in_function("forward", wrong_input_gradient), "gradient of "),
    "weight gradient": (SHORT, in_function("forward", wrong_weight_gradient), "gradient of head.weight"),
    "bfloat16": ([*SHORT, "--dtype=bfloat16"], in_function("run_segment", leak), "activations of validation"),
    "n-grams": (SMOKE_92, in_function("sum_ngrams", times(1.05)), ("gradient of ngram", "activations of n-grams")),
    "muon": (SHORT, in_rule("muon"), "update of "),
    "adamw": (SHORT, in_rule("adamw"), "update of "),
    "anvil": (SMOKE_92, in_rule("anvil"), "update of "),
    "row_adam": (SMOKE_92, in_rule("row_adam"), "update of ngram"),
}  # fmt: skip


def train(shards, *options, preset=SHORT) -> tuple[dict, dict]:
    """The result and the final tensors of a run in this folder."""
    result = run(shards, *options, preset=preset)
    (model,) = Path().glob(f"checkpoints/*/{result['run_id']}/model.pt")
    return result, torch.load(model, weights_only=True)["tensors"]


@pytest.fixture(scope="module")
def train_plain(shards, tmp_path_factory):
    """A function that trains without the compiler, once for each options."""
    @functools.cache
    def train_once(*options):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("plain"))
            return train(shards, "--compile=off", preset=options)

    return lambda options: train_once(*options)


def assert_same_run(ours, theirs) -> None:
    """All losses and parameters have equal bits."""
    (result, tensors), (plain, plain_tensors) = ours, theirs
    assert result["train_points"] == plain["train_points"] and len(plain["train_points"]) > 1
    assert [loss for _, loss, _ in result["val_points"]] == [loss for _, loss, _ in plain["val_points"]]
    assert_same_bits(tensors, plain_tensors)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_compiler_with_a_fault_is_off(shards, here, monkeypatch, capsys, train_plain, fault):
    """One line says which number differs, and the run is that of --compile=off, although it has no warm-up."""
    options, compiler, expected = FAULTS[fault]
    plain = train_plain(options)
    monkeypatch.setattr(torch, "compile", compiler)
    capsys.readouterr()
    ours = train(shards, "--compile=on", preset=options)
    ((kind, name, size),) = OFF.findall(capsys.readouterr().out)
    assert f"{kind} of {name}".startswith(expected) and (float(size) > 0 or (fault, size) == ("NaN", "nan"))
    assert (ours[0]["choices"]["compile"], plain[0]["choices"]["compile"]) == ("off", "off")
    assert_same_run(ours, plain)


def list_state(trainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters and optimizer state, with tables, and of all gradients."""
    buckets = [(bucket.name, bucket) for bucket in trainer.optimizer.buckets]
    tensors = {f"{name}/{key}": tensor for name, bucket in buckets for key, tensor in bucket.state.items()}
    tensors |= {name: bucket.values for name, bucket in buckets}
    tensors |= {f"{name}/grad": bucket.total for name, bucket in buckets if bucket.total is not None}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def make_compiled(shards, preset: str = "smoke", dtype=torch.float32, fast=CPU_FORMS, **changes):
    """A trainer that compiles, and its data."""
    cfg = smoke_config(shards, preset=preset, device="cpu", **changes)
    trainer = gpt.Trainer(cfg, make_runtime(use_compile=True, dtype=dtype, fast=fast))
    return trainer, gpt.TrainData(cfg, trainer.schedule), gpt.ValData(cfg)


def is_compiled_now(calls) -> bool:
    return calls.rules["muon"] != gpt.RULES["muon"].update


NOISE = times(1 + 2.0**-20)  # the rounding of a few operations in float32


@pytest.mark.parametrize("preset, warmup_iterations, forms", [
    ("smoke", 0, []), ("smoke_92", 0, []), ("smoke_92", 1, []), ("smoke", 1, ["step_graphs"])])
def test_a_faultless_compiler_stays_on(shards, monkeypatch, preset, warmup_iterations, forms):
    """Rounding is no fault. Afterwards the functions are those of the compiler, in graphs or not, parameters, state and
    gradients have their bits, no gradients of tables are left, and the steps of the warm-up are not counted."""
    names = "run_segment", "sum_ngrams", "forward"
    monkeypatch.setattr(torch, "compile", lambda fn, **_: (NOISE if fn.__name__ in names else functools.partial)(fn))
    fast = frozenset({"rms_norm", "head_loss", *forms})
    trainer, *data = make_compiled(shards, preset, fast=fast, warmup_iterations=warmup_iterations)
    for bucket in trainer.optimizer.buckets:
        bucket.values.add_(0.01)  # also to rows of a table that begins with zeros
    calls, before = trainer.model.calls, list_state(trainer)
    with graphs_on_cpu():
        assert trainer.warm_up(*data) == [] and trainer.use_compile
    assert trainer.model.calls is calls and isinstance(calls.run_head, gpt.StepGraphs) == bool(forms)
    assert all(isinstance(rule, functools.partial) for rule in calls.rules.values())
    assert_same_bits(list_state(trainer), before)
    assert all(not (table.pieces or table.arriving or table.discards_updates) for table in trainer.optimizer.tables)
    assert trainer.optimizer.step_count == 0 and trainer.model.is_tied == trainer.cfg.tie_head


def test_after_a_fault_no_function_is_compiled(shards, monkeypatch):
    """Or in a graph. Parameters, state and gradients have the bits of the start."""
    monkeypatch.setattr(torch, "compile", in_function("run_segment", leak))
    fast = frozenset({"rms_norm", "head_loss", "step_graphs"})
    trainer, *data = make_compiled(shards, fast=fast, warmup_iterations=1)
    before = list_state(trainer)
    with graphs_on_cpu():
        (line,) = trainer.warm_up(*data)
    assert OFF.search(line) and not trainer.use_compile
    calls = trainer.model.calls
    assert (calls.run_segment, calls.run_head) == (trainer.model.run_segment, trainer.model.head.forward)
    assert calls.rules == {name: rule.update for name, rule in gpt.RULES.items()}
    assert len(trainer.graphs) == 3 and not any(graphs.graphs for graphs in trainer.graphs)
    assert_same_bits(list_state(trainer), before)


@pytest.mark.parametrize("preset, dtype", [("smoke", "float32"), ("smoke_92", "bfloat16")])
def test_the_compared_updates(shards, preset, dtype):
    """They equal the first real update to the last bit, and change nothing. Momentum of earlier steps does not count.
    A table has 7 rows with gradients, which become 8. Matrices in bfloat16 have their low bits in the state."""
    cfg = smoke_config(shards, preset=preset, matrix_dtype=dtype)
    optimizer = (trainer := gpt.Trainer(cfg, make_runtime())).optimizer
    optimizer.step_count = 2
    optimizer.set_hypers(trainer.schedule.at(2))
    torch.manual_seed(0)
    assert any("low_bits" in bucket.state for bucket in optimizer.buckets) == (dtype == "bfloat16")
    for bucket in optimizer.buckets:
        rows = torch.arange(3, 17, 2) if bucket.total is None else slice(None)
        if bucket.total is None:
            bucket.rows, bucket.grad = rows, torch.randn(7, cfg.model_dim)
            bucket.shard.normal_()  # it begins with zeros
        bucket.grad.normal_()
        grad, start, before = bucket.grad.clone(), bucket.read_shard(), list_state(trainer)
        first = bucket.compute_update(trainer.model.calls)
        assert_same_bits(list_state(trainer), before)
        bucket.update(trainer.model.calls)
        values = first.pop("values")
        assert len(values) == (8 if bucket.total is None else len(bucket.shard))
        assert torch.equal(values[: len(grad)], (bucket.read_shard() - start)[rows]) and values.any(), bucket.name
        assert first.keys() == bucket.state.keys() - {"low_bits"}
        for key, state in first.items():
            assert torch.equal(state[: len(bucket.state[key][rows])], bucket.state[key][rows]), (bucket.name, key)
        bucket.rows, bucket.grad = rows, grad
        later = bucket.compute_update(trainer.model.calls)["values"]
        for name in bucket.rule.moments:
            bucket.state[name].zero_()
        assert torch.equal(later, bucket.compute_update(trainer.model.calls)["values"]), bucket.name


def test_a_whole_run_with_a_faultless_compiler(shards, here, monkeypatch, capsys, train_plain):
    plain = train_plain(SHORT)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: functools.partial(fn))
    ours = train(shards, "--compile=on")
    assert ours[0]["choices"]["compile"] == "on" and "torch.compile: off" not in capsys.readouterr().out
    assert_same_run(ours, plain)


GRAPHED = [*SHORT, "--warmup_iterations=1", "--fast=rms_norm,head_loss"]


@pytest.mark.parametrize("fault", [None, "a leak in training", "loss", "adamw"])
def test_compiled_code_in_graphs(shards, here, monkeypatch, capsys, train_plain, fault):
    """With a fault neither the graphs of segments and head nor those of updates are used any more."""
    plain = train_plain(GRAPHED)
    monkeypatch.setattr(torch, "compile", FAULTS[fault][1] if fault else lambda fn, **_: functools.partial(fn))
    with graphs_on_cpu():
        ours = train(shards, "--compile=on", "--fast=rms_norm,head_loss,step_graphs", preset=GRAPHED)
    assert "step_graphs" in ours[0]["choices"]["fast"]
    assert len(OFF.findall(capsys.readouterr().out)) == (fault is not None)
    assert ours[0]["choices"]["compile"] == ("off" if fault else "on")
    assert_same_run(ours, plain)


LIMITS = {  # largest relative errors in float32, in bfloat16, and with FP8
    "activations of validation": (1e-3, 0.04, 0.04), "loss of validation": (1e-4, 0.01, 0.01),
    "activations of training": (1e-3, 0.04, 0.16), "loss of training": (1e-4, 0.01, 0.04),
    "gradient": (1e-3, 0.1, 0.4), "update": (1e-2, 0.3, 1.2),
}  # fmt: skip


@pytest.mark.parametrize("case", ["float32", "bfloat16", "FP8"])
def test_every_number_has_its_limit(shards, monkeypatch, case):
    """Each compiled result alone, of every bucket, is 1.4 times its limit off: a line names it. All are 0.7 times their
    limits off: no line. At equal results the error is exactly 0."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: functools.partial(fn))
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    fast = CPU_FORMS | ({"fp8_head"} if case == "FP8" else set())
    trainer, *data = make_compiled(
        shards, dtype=dtype, fast=fast, num_layers=2, micro_batch_tokens=512, tokens_per_step=512, val_seq_len=512)
    run_batches, compute_update, wrong = gpt.run_batches, gpt.Bucket.compute_update, Counter()
    errors = {}

    def change(kind, name, result):
        key = f"{kind} of {name}"
        limit = LIMITS.get(key) or LIMITS[kind]
        errors[key] = limit[["float32", "bfloat16", "FP8"].index(case)]
        return result * (1 + wrong[key] * errors[key])

    def run_wrong_batches(trainer, *args):
        results, is_compiled = run_batches(trainer, *args), is_compiled_now(trainer.model.calls)
        return {key: change(*key, result) if is_compiled else result for key, result in results.items()}

    def compute_wrong_update(bucket, calls):
        result = compute_update(bucket, calls)
        if is_compiled_now(calls):
            result["values"] = change("update", f"{bucket.name}/values", result["values"])
        return result

    monkeypatch.setattr(gpt, "run_batches", run_wrong_batches)
    monkeypatch.setattr(gpt.Bucket, "compute_update", compute_wrong_update)
    functions = trainer.model.calls

    def check() -> list[str]:
        trainer.model.calls = functions
        return gpt.check_compiler(trainer, *data)

    used = set()
    before_call(monkeypatch, gpt.GPT, "run_layers", lambda *args: used.add(
        (torch.is_grad_enabled(), args[-1] is trainer.val_ops)))
    assert check() == [] and used == {(True, False), (False, True)}  # validation has its own operations
    num_buckets = len(trainer.optimizer.buckets)
    assert len(errors) == 4 + 2 * num_buckets == 18
    for key in errors:
        wrong.clear()
        wrong[key] = 1.4
        ((kind, name, _),) = OFF.findall("\n".join(check()))
        assert f"{kind} of {name}" == key
    wrong.update(dict.fromkeys(errors, 0.7))
    wrong[key] = 0.7
    assert check() == []


@pytest.mark.parametrize("fault, expected", {
    None: "", "a leak in training": "activations of training", "a leak in validation": "activations of validation",
    "loss": "loss of validation", "muon": "update of ", "input gradient": ""}.items())  # fmt: skip
def test_without_memory_for_plain_gradients(shards, monkeypatch, fault, expected):
    """A line says that gradients were not compared. Activations, losses and updates are. Nothing is left of the failed
    backward pass."""
    monkeypatch.setattr(torch, "compile", FAULTS[fault][1] if fault else lambda fn, **_: functools.partial(fn))
    trainer, *data = make_compiled(shards, warmup_iterations=0)
    before, calls = list_state(trainer), []

    def fail_in_the_second(*_):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("too many activations")

    before_call(monkeypatch, torch.Tensor, "backward", fail_in_the_second)
    first, *lines = trainer.warm_up(*data)
    assert first == "gradients of compiled code were not compared, because they need too much memory"
    found = [f"{kind} of {name}" for kind, name, _ in OFF.findall("\n".join(lines))]
    assert trainer.use_compile == (not expected) and len(found) == len(lines) == bool(expected)
    assert all(name.startswith(expected) for name in found)
    assert_same_bits(list_state(trainer), before)


@pytest.mark.parametrize("first, line", [(2, "activations and losses of compiled code were not compared, because they need too "
                                          "much memory"), (1, "compiled code was not compared, because the memory does "
                                          "not suffice")])  # fmt: skip
def test_without_memory_for_any_plain_code(shards, monkeypatch, first, line):
    """The run goes on with compiled code. A wrong update rule is noticed if the compiled pass has memory."""
    monkeypatch.setattr(torch, "compile", FAULTS["muon"][1])
    trainer, *data = make_compiled(shards, warmup_iterations=0)
    before, calls = list_state(trainer), []

    def fail(*_):
        calls.append(1)
        if len(calls) >= first:
            raise torch.OutOfMemoryError("too many activations")

    before_call(monkeypatch, gpt, "run_batches", fail)
    lines = trainer.warm_up(*data)
    assert line in lines and len(OFF.findall("\n".join(lines))) == first - 1 and len(lines) == 2 * first - 1
    assert trainer.use_compile == is_compiled_now(trainer.model.calls) == (first == 1)
    assert_same_bits(list_state(trainer), before)


def leaking_rows(fn):
    """The embedding of a token's n-grams leaks into that of the next."""
    return lambda rows, *args: (lambda x: x + 0.05 * x.roll(1, 0))(fn(rows, *args))


def wrong_with_classes(fn):
    """A sampled softmax has a loss that is 10 % too large."""
    def call(x, targets, step_inputs, loss_weights, classes, ops):
        return fn(x, targets, step_inputs, loss_weights, classes, ops) * (1 if classes is None else 1.1)

    return call


def wrong_state(fn, **_):
    """adamw doubles its second moment after each update."""
    if getattr(fn, "__self__", None) is not gpt.RULES["adamw"]:
        return functools.partial(fn)
    return lambda param, grad, state, *args: (fn(param, grad, state, *args), state["exp_avg_sq"].mul_(2))


@pytest.mark.parametrize("compiler, dtype", [
    (in_function("sum_ngrams", leaking_rows), torch.bfloat16),
    (in_function("forward", wrong_with_classes), torch.float32),
    (wrong_state, torch.float32)], ids=["n-grams in bfloat16", "classes", "state"])  # fmt: skip
def test_more_faults_of_a_compiler(shards, monkeypatch, compiler, dtype):
    monkeypatch.setattr(torch, "compile", compiler)
    trainer, *data = make_compiled(shards, "smoke_92", dtype=dtype, warmup_iterations=0)
    assert OFF.search("\n".join(trainer.warm_up(*data)))


def test_the_second_attempt_has_the_memory_of_the_first(shards, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **_: functools.partial(fn))
    trainer, *data = make_compiled(shards, warmup_iterations=0)
    losses, are_left = [], []

    def fail_in_the_second(loss, *_):
        losses.append(weakref.ref(loss))
        if len(losses) == 2:
            raise torch.OutOfMemoryError("too many activations")

    before_call(monkeypatch, torch.Tensor, "backward", fail_in_the_second)
    before_call(monkeypatch, gpt, "run_batches", lambda *_: are_left.append(any(loss() is not None for loss in losses)))
    trainer.warm_up(*data)
    assert are_left == [False] * 3


def test_the_comparison_is_cheap(shards, here, monkeypatch):
    """One micro-batch with its gradients and one validation batch, compiled and not. Without a compiler none."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: functools.partial(fn))
    calls, is_warming_up = Counter(), [False]
    before_call(monkeypatch, gpt.GPT, "run_layers", lambda _model, batch, *_: calls.update(
        {(torch.is_grad_enabled(), len(batch.inputs)): is_warming_up[-1]}))
    before_call(monkeypatch, torch.Tensor, "backward", lambda *_: calls.update(backward=is_warming_up[-1]))
    before_call(monkeypatch, gpt.Trainer, "warm_up", lambda *_: is_warming_up.append(True))
    before_call(monkeypatch, gpt.Stop, "catch_signals", lambda *_: is_warming_up.append(False))
    for mode, expected in (("off", {}), ("on", {(True, 512): 2, (False, 1024): 2, "backward": 2})):
        calls.clear()
        run(shards, f"--compile={mode}", "--micro_batch_tokens=512", "--tokens_per_step=1024", preset=SHORT)
        assert {key: number for key, number in calls.items() if number} == expected and any(calls)


PAIR = [*SHORT, "--tokens_per_step=1024"]


def read_result(folder) -> dict:
    (path,) = folder.glob("logs/*_seed*.json")
    return json.loads(path.read_text())


@pytest.mark.parametrize("rank", slow_but([0, 1], 1))
def test_one_rank_with_a_fault_switches_off_the_compiler_of_all(shards, tmp_path, rank):
    """The losses are those of two ranks without a compiler."""
    folders = [tmp_path / mode for mode in ("on", "off")]
    for folder in folders:
        options = [*PAIR, *data_args(shards), f"--compile={folder.name}", f"--out={folder}"]
        ends, out, errors = run_ranks("train_compiled", 2, rank, *options)
        assert [status for status, _ in ends] == [0, 0], errors[-2000:]
        assert len(OFF.findall(out)) == errors.count("rank 1: no compiler") == (folder.name == "on")
    ours, plain = map(read_result, folders)
    assert ours["choices"]["compile"] == "off" and ours["final_val_loss"] == plain["final_val_loss"]
    assert ours["train_points"] == plain["train_points"] and len(plain["train_points"]) > 1


@pytest.mark.parametrize("what, step", [("half", 1), ("swap", 1), ("bit", 1), ("first", 0), ("rows", 0)])
def test_a_rank_with_other_parameters_ends_the_run(shards, tmp_path, what, step):
    """Rank 1 has received other values, all, two parts in exchange, or one bit. Both ranks end with a line. Those of
    the start are noticed before the first step, those of a step at the next validation."""
    options = [*PAIR, f"--val_loss_every={step}", *data_args(shards), f"--out={tmp_path}"]
    ends, out, errors = run_ranks("train_corrupted", 2, what, *options)
    assert [status for status, _ in ends] == [1, 1], errors
    line = f"train_gpt.py: error: rank 1 has other parameters than rank 0 after step {step}: a GPU or the network is"
    assert errors.count(line) == 2 and "Traceback" not in errors
    assert ("val_loss:" in out) == (step == 1) and not list(tmp_path.rglob("*_seed*.json"))


@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler")
@pytest.mark.slow
def test_the_real_compiler_stays_on(shards, here, train_plain, capsys):
    """Of two layers in one stage. Rounding changes a loss of about 5 by less than 1e-4."""
    options = [*SHORT, "--num_iterations=2", '--stages=[{"duration":1,"window_long":64,"window_short":64}]']
    plain, _ = train_plain(tuple(options))
    ours, _ = train(shards, "--compile=on", preset=options)
    assert ours["choices"]["compile"] == "on" and "torch.compile: off" not in capsys.readouterr().out
    assert ours["final_val_loss"] == pytest.approx(plain["final_val_loss"], abs=1e-4)
    assert ours["compile_time_s"] > plain["compile_time_s"]


def test_small_gradients_are_compared_like_larger_ones():
    """As if they had a ten-thousandth of the largest gradient. The loss, which is a sum over tokens, sets no such limit."""
    trainer = SimpleNamespace(ops=gpt.Operations(), fast=frozenset())
    plain = {("loss", "training"): torch.tensor(5000.0), ("gradient", "a"): torch.tensor([100.0]),
             ("gradient", "b"): torch.tensor([1e-5]), ("gradient", "c"): torch.tensor([0.2])}
    assert gpt.find_difference(trainer, {**plain, ("gradient", "b"): torch.tensor([2e-5])}, plain) == ""
    assert gpt.find_difference(trainer, {**plain, ("gradient", "b"): torch.tensor([5e-5])}, plain) != ""
    found = gpt.find_difference(trainer, {**plain, ("gradient", "c"): torch.tensor([0.2004])}, plain)
    assert found == "gradient of c: relative error 0.002"
