"""Properties that matter on eight GPUs: the clock, communication, memory of checkpoints, choice of attention."""

import dataclasses
import json
import math
import random
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import data_args, gpt, make_runtime, smoke_config
from run_ranks import ENVIRONMENT, run_ranks
from test_wiring import (  # noqa: F401
    ATTENTION_FORMS,
    TINY,
    advance,
    before_call,
    enter_folder,
    find_saved,
    make_trainer,
    replace_clock,
    run,
)
from torch.overrides import TorchFunctionMode

AT_THE_END = "--val_loss_every=0"  # the only validation


# ---- clock ---------------------------------------------------------------------------------------------


def test_the_first_data_are_on_the_clock(shards, here, monkeypatch, now, capsys):
    """The time advances only in these functions. Each of four steps has one batch, all read before the last ends."""
    for owner, name, seconds in (
        (gpt, "find_prefix_tokens", 8),  # on the clock
        (gpt.Prefetcher, "__init__", 4),
        (gpt.TrainData, "batch", 1),
        (gpt.TrainData, "__init__", 32),  # before it
        (gpt.ValData, "__init__", 16),
        (gpt, "read_vocabulary", 64),
    ):
        advance(monkeypatch, now, owner, name, seconds)
    Path("vocab.json").write_text(json.dumps({"a": 97, "ab": 98}))
    stages = '--stages=[{"duration":1,"window_long":128,"window_short":64,"prefix_weight":"0.5"}]'
    result = run(shards, stages, "--vocab_file=vocab.json", "--num_iterations=4", AT_THE_END)
    assert result["train_time_ms"] == 1000 * (8 + 4 + 4 * 1)
    assert result["data_setup_s"] == 32 + 16 + 64
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "before the clock" in line]
    assert "112.0 s to check and plan the data, 0.0 s of warm-up" in row


def test_prefixes_equal_a_search_of_all_pairs():
    """Texts of two bytes, so that many begin with others, in random order, with the empty text."""
    chance = random.Random(0)
    for count in (0, 1, 30, 150):
        texts = list({bytes(chance.choices((0, 255), k=chance.randint(0, 8))) for _ in range(count)})
        ids = dict(zip(texts, chance.sample(range(200), len(texts))))
        expected = [-1] * 200
        for text in texts:
            shorter = [p for p in texts if p and len(p) < len(text) and text.startswith(p)]
            if shorter:
                expected[ids[text]] = ids[max(shorter, key=len)]
        assert gpt.find_prefix_tokens(ids, 200).tolist() == expected
    assert sum(number >= 0 for number in expected) > 50


# ---- warm-up -------------------------------------------------------------------------------------------


def test_telemetry_has_seen_every_length_before_the_clock(shards, here, monkeypatch):
    """Each pair of micro-batch tokens and sequence length is compiled once."""
    warm, timed, clock = set(), set(), []
    before_call(monkeypatch, gpt.Trainer, "run", lambda *args: clock.append(args))

    def note(_, batch, step_inputs):
        num_tokens = len(batch.inputs)
        (timed if clock else warm).add((num_tokens, num_tokens // int(step_inputs.is_sequence_start.sum())))

    before_call(monkeypatch, gpt.Telemetry, "inspect", note)
    preset = ["--preset=smoke_frontier", "--device=cpu", "--telemetry_every=1", "--val_loss_every=0"]
    run(shards, "--num_iterations=6", "--micro_batch_tokens=2048", "--val_tokens=1024", preset=preset)
    assert timed == {(1024, 256), (2048, 512)} and warm >= timed


# ---- targets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "head_loss"])
def test_a_stage_has_the_targets_with_weights(form):
    """One column if only the next token has a weight.

    Loss and gradients equal four columns with three zero weights, and a sum of separate cross-entropies.
    """
    torch.manual_seed(0)
    rich = gpt.Stage(1, 128, 64, loss_weights="1 0.5 0.25:0", prefix_weight="0.5:0.25")
    cfg = smoke_config(stages=(gpt.Stage(1, 128, 64), rich), num_layers=1)
    rt, schedule = make_runtime(dtype=torch.float64, fast=frozenset({form} - {"plain"})), gpt.Schedule(cfg)
    model = gpt.GPT(cfg, rt)
    head, ops = model.head, model.ops
    assert ops.head_loss is (gpt.head_loss if form == "plain" else gpt.fused_head_loss)
    head.prefix_tokens = torch.where(torch.arange(257) % 3 > 0, torch.arange(257) // 2, -1)
    head.weight.data = torch.randn(*head.weight.shape, dtype=torch.float64)
    states = [schedule.at(step) for step in (0, cfg.num_iterations - 1)]
    assert [state.stage_index for state in states] == [0, 1]
    plain, rich = (gpt.make_step_inputs(state, 64, 32, rt, cfg) for state in states)
    weights = [torch.tensor(state.loss_weights) for state in states]
    assert [len(given) for given in weights] == [1, 4]
    targets = torch.randint(256, (64,))
    given = []  # to the loss, as columns (T, n)
    noting = ops._replace(head_loss=lambda x, w, columns, *rest: given.append(columns.T) or torch.zeros(()))
    for step_inputs, loss_weights in zip((plain, rich), weights):
        head(torch.zeros(64, cfg.model_dim), targets, step_inputs, loss_weights, noting)
    (first,), columns = given
    assert columns.shape == (4, 64) and torch.equal(first, targets) and torch.equal(columns[0], targets)
    for ahead, missing in ((1, [31, 63]), (2, [30, 31, 62, 63])):  # the ends of two packed sequences
        column = columns[ahead]
        assert (column == -1).nonzero().ravel().tolist() == missing
        assert torch.equal(column[column >= 0], targets.roll(-ahead)[column >= 0])
    assert torch.equal(columns[3], head.prefix_tokens[targets])
    x = gpt.rms_norm(torch.randn(64, cfg.model_dim, dtype=torch.float64)).requires_grad_()

    def differentiate(loss):
        return loss.detach(), *torch.autograd.grad(loss, (x, head.weight))

    ours = differentiate(head(x, targets, plain, weights[0], ops))
    padded = differentiate(head(x, targets, rich, torch.tensor([1.0, 0, 0, 0]), ops))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, padded))
    exact = sum(
        weight * F.cross_entropy(head.compute_logits(x), column, ignore_index=-1, reduction="sum")
        for weight, column in zip(weights[1].double(), columns)
    )
    ours = differentiate(head(x, targets, rich, weights[1], ops))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, differentiate(exact)))
    given.clear()
    head.eval()  # validation uses only the next token, in every stage
    head(x.detach(), targets, rich, weights[1], noting)
    assert torch.equal(given[0], targets[None])


# ---- rotary tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "norm_rotate"])
@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
def test_small_rotary_tables_equal_the_expanded_ones(pairs, form):
    """Both rotate queries and keys of single and paired heads like complex numbers.

    The state is of the last stage, which has another softmax scale than the first.
    """
    torch.manual_seed(0)
    layers = gpt.LayerSpec("long"), gpt.LayerSpec(paired=True)
    shape = dict(num_layers=2, layers=layers, num_heads=4, model_dim=128)
    cfg = smoke_config(rotary_pairs=pairs, qk_norm="off", **shape)
    rt = make_runtime(dtype=torch.float64, fast=frozenset({form} - {"plain"}))
    state, model = gpt.Schedule(cfg).at(cfg.num_iterations), gpt.GPT(cfg, rt)
    assert state.softmax_scale != cfg.attention_scale
    small, large = (
        gpt.make_step_inputs(state, 96, 48, dataclasses.replace(rt, use_compile=is_compiled), cfg)
        for is_compiled in (True, False)
    )
    qk = torch.randn(96, 2, 4, 32, dtype=torch.float64)  # (T, 2, H, K)
    seen = []  # q and k at the input of attention, of both layers for each kind of table
    model.ops = model.ops._replace(
        linear=lambda x, w: torch.cat((qk.flatten(1), x), 1) if len(w) == 384 else x,
        attention=lambda q, k, v, mask: seen.append(torch.stack([x.reshape(96, 4, 32) for x in (q, k)], 1)) or q,
    )
    for step_inputs in (small, large):
        model.run_layers(torch.zeros(96, dtype=torch.int32), torch.zeros(96, dtype=torch.int32), step_inputs)
    positions, heads = torch.arange(96.0).double() % 48, torch.arange(4.0).double()
    for name, turned, same, place in (
        ("rope", seen[0], seen[2], positions[:, None] + 0 * heads),  # (T, H)
        ("paired_rope", seen[1], seen[3], 2 * positions[:, None] + heads % 2),
    ):
        tables, expanded = (getattr(step_inputs, name) for step_inputs in (small, large))
        parities = 2 if name == "paired_rope" else 1
        assert all(table.shape == (96, parities, 8) for table in tables)
        again = gpt.expand_rope(tables, small.softmax_scale, pairs)
        assert all(table.shape == (96, 2, 4 // parities, parities, 32) for table in expanded)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-15) for a, b in zip(again, expanded))
        assert torch.allclose(turned, same, rtol=0, atol=1e-14)
        angle = place[..., None] * torch.tensor(state.frequencies)  # (T, H, K/2)
        a, b = qk.chunk(2, -1) if pairs == "halves" else (qk[..., ::2], qk[..., 1::2])
        z = torch.complex(a, b) * torch.exp(-1j * angle)[:, None]
        parts = (z.real, z.imag)
        expected = torch.cat(parts, -1) if pairs == "halves" else torch.stack(parts, -1).flatten(-2)
        expected[:, 0] *= state.softmax_scale
        assert torch.allclose(turned, expected, rtol=0, atol=1e-13)


# ---- row-sparse gradients ------------------------------------------------------------------------------------


def test_a_row_sparse_gradient_equals_the_dense_one():
    """Two micro-batches, bit for bit in float64. Some rows repeat, both ends are read, others never."""
    torch.manual_seed(0)
    param, rt = gpt.parameter(torch.randn(37, 6, dtype=torch.float64), "value_embed", is_table=True), make_runtime()
    bucket = gpt.Bucket([("table", param)], "value_embed", gpt.Group(), rt, False)
    param.sparse_grad = gpt.RowSparseGradient(bucket.shard, 6, rt.comm)
    dense, total = param.detach().clone().requires_grad_(), torch.zeros(37, 6, dtype=torch.float64)
    for rows in ([36, 0, 36, 0, 0, *torch.randint(3, 30, (90,)).tolist()], [36, 36, 5, 36]):
        rows = torch.tensor(rows, dtype=torch.int32)[torch.randperm(len(rows))]
        grad = torch.randn(len(rows), 6, dtype=torch.float64)
        ours = gpt.sparse_embedding(rows, param)
        plain = F.embedding(rows, dense)
        assert torch.equal(ours, plain)
        ours.backward(grad)
        total += torch.autograd.grad(plain, dense, grad)[0]
    sums = param.sparse_grad.wait()
    assert param.grad is None and sums.shape == bucket.shard.shape and torch.equal(sums[: 37 * 6].view(37, 6), total)
    assert total[0].any() and total[36].any() and not total[30:36].any()
    param.sparse_grad.clear()
    assert not param.sparse_grad.wait().any()


def test_ranks_share_a_table_that_does_not_divide(tmp_path):
    """37 rows on 3 ranks. Each rank has the sums of its 13 rows over the tokens of all ranks."""
    ends, _, errors = run_ranks("rows", 3, tmp_path / "rows.pt")
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    ours, dense = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert ours.shape == (39, 6) and torch.equal(ours[:37], dense) and not ours[37:].any()
    assert dense[0].any() and dense[36].any()


def test_a_table_refuses_an_ordinary_gradient(shards):
    """The optimizer would not read the gradient of an ordinary lookup."""
    trainer, step, close = make_trainer(shards, num_layers=2)
    assert trainer.optimizer.bucket_of["value_embeds.0"].sparse
    step()
    trainer.model.ops = trainer.model.ops._replace(embedding=gpt.embedding)
    with pytest.raises(AssertionError, match=r"value_embeds.0 is a table .*: read it with ops.embedding\(\)"):
        step()
    close()


def test_without_the_fast_form_a_table_has_an_ordinary_gradient(shards):
    """On one rank it trains bit for bit like the fast form, because both add in one order."""
    params = []
    for fast in (frozenset(), frozenset({"sparse_embedding"})):
        cfg = smoke_config(shards, tokens_per_step=1024, micro_batch_tokens=512, num_layers=2)
        trainer = gpt.Trainer(cfg, make_runtime(fast=fast))
        assert bool(trainer.optimizer.bucket_of["value_embeds.0"].sparse) == bool(fast)
        before = trainer.model.value_embeds["0"].detach().clone()
        batches = gpt.Prefetcher(gpt.TrainData(cfg, trainer.schedule).batches(trainer.rt, 0, 3), trainer.rt.device)
        for step in range(3):
            trainer.train_step(batches, trainer.schedule.at(step))
        batches.executor.shutdown(cancel_futures=True)
        params.append(dict(trainer.model.named_parameters()))
        assert not torch.equal(before, trainer.model.value_embeds["0"])
    assert all(torch.equal(param, params[1][name]) for name, param in params[0].items())


# ---- scales of FP8 -------------------------------------------------------------------------------------

FP8_MLP = dict(fp8_mlp="on", model_dim=128, num_heads=2, head_dim=64, num_layers=2)


def test_a_scale_that_is_not_finite_is_ignored():
    modules = torch.nn.ModuleList(gpt.DelayedScaling() for _ in range(3))
    scales, unit = gpt.DelayedScales(modules, make_runtime().comm), 1.8 / 448
    for entries, expected in (
        ((2.0, 3.0, 4.0), (2, 3, 4)),
        ((math.nan, 5.0, math.inf), (2, 5, 4)),  # each module separately
        ((6.0, math.nan, 1.0), (6, 5, 1)),  # until the next finite one
    ):
        for module, entry in zip(modules, entries):
            module(torch.tensor([0.5, entry]))
            module(torch.tensor([0.5, 0.25]))  # a second micro-batch
        scales.start()
        scales.finish()
        assert torch.allclose(torch.stack(scales.scales), unit * torch.tensor(expected), rtol=1e-6, atol=0)
        assert not any(module.amax for module in modules)


def test_the_guard_restores_scales(shards, here, monkeypatch):
    """A weight becomes NaN in step 18. The MLP stays in FP8, and the head leaves it."""
    saved, before, after, losses = {}, [], [], []
    act, snapshot, train_step = gpt.Guard._roll_back, gpt.Trainer.snapshot, gpt.Trainer.train_step

    def spoil_and_step(self, *args):
        if self.progress.step == 17 and not after:
            self.model.blocks[1].mlp.up_down.data[0, 0, 0] = math.nan
        losses.append(train_step(self, *args).item())
        return losses[-1] * torch.ones(())

    def note_snapshot(self):
        made = snapshot(self)
        saved[self.progress.step] = [scale.clone() for scale in self.scales.scales]
        return made

    def note_action(self, *args):
        scales = self.trainer.scales
        before.extend(x.clone() for x in (*scales.scales, *scales.amax))
        act(self, *args)
        after.append((self.trainer.progress.step, self.snapshots[-1][0], [x.clone() for x in scales.scales]))

    monkeypatch.setattr(gpt.Trainer, "train_step", spoil_and_step)
    monkeypatch.setattr(gpt.Trainer, "snapshot", note_snapshot)
    monkeypatch.setattr(gpt.Guard, "_roll_back", note_action)
    options = [f"--{name}={value}" for name, value in FP8_MLP.items()]
    result = run(shards, "--guard=on", "--fp8_head=on", "--num_iterations=24", AT_THE_END, *options)
    ((step, made, scales),) = after
    assert result["guard_actions"] == 1 and made == 10 and sorted(saved) == [0, 10, 20]
    (scale, amax) = before  # the amax is NaN, and the scale is still finite
    assert scale.isfinite() and amax.isnan()
    assert all(map(torch.equal, scales, saved[10])) and all(x.isfinite() for x in scales)
    assert not any(map(torch.equal, scales, saved[0])) and not any(map(torch.equal, scales, saved[20]))
    assert [i for i, loss in enumerate(losses) if not math.isfinite(loss)] == list(range(17, step))
    assert math.isfinite(result["final_val_loss"])


def test_scales_are_reduced_during_the_update(shards, tmp_path):
    """On two ranks the all-reduce starts before the first update, and the next step waits for it."""
    changes = dict(
        preset="smoke", device="cpu", train_files=f"{shards}/train_*.bin", micro_batch_tokens=512, **FP8_MLP
    )
    ends, _, errors = run_ranks("scale_steps", 2, tmp_path / "order.json", json.dumps(changes))
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    calls = json.loads((tmp_path / "order.json").read_text())
    step = ["forward", "forward", "send scales", "update"]
    assert calls == [*step, "await scales", *step, "await scales", *step]


# ---- checkpoints ---------------------------------------------------------------------------------------


def test_checkpoints_reuse_memory_allocated_before_the_clock(shards, here, monkeypatch):
    """Three checkpoints in a row use one set of tensors, and each has the weights of its step bit for bit.

    A step does not wait for the disk: each write starts only after the next step has ended. The state of random
    numbers is small and has no reserved memory.
    """
    events, saves, weights, write = [], [], {}, gpt.write_atomic
    has_ended = {step: threading.Event() for step in (1, 2, 3)}
    before_call(monkeypatch, gpt, "make_staging", lambda _: events.append("staging"))
    before_call(monkeypatch, gpt.Trainer, "run", lambda made, *_: (events.append("clock"), trainer.append(made)))

    def note_save(checkpoints, step, state, copies):
        weights[step] = {name: p.detach().clone() for name, p in trainer[0].model.named_parameters()}
        saves.append({name: copy.copy for name, copy in copies.items() if name != "random/cpu"})

    def write_late(path, *args):
        if path.suffix == ".pt":
            assert has_ended[min(int(path.stem[5:]) + 1, 3)].wait(300)
        write(path, *args)

    trainer = []
    before_call(monkeypatch, gpt.Checkpoints, "save", note_save)
    monkeypatch.setattr(gpt, "write_atomic", write_late)
    before_call(monkeypatch, gpt.Checkpoints, "wait", lambda _: has_ended[trainer[0].progress.step].set())
    monkeypatch.setattr(gpt.Checkpoints, "KEPT", 3)
    run(shards, "--num_iterations=3", "--checkpoint_every=1", AT_THE_END)
    assert events[:2] == ["staging", "clock"] and events.count("staging") == 1
    # all copies still exist, so no other tensor has their memory
    expected, *pointers = (
        {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for tensors in (trainer[0].staging, *saves)
    )
    assert pointers == [expected] * 3 and len(set(expected.values())) == len(expected) > len(weights[1])
    for step, expected in weights.items():
        _, tensors = gpt.read_checkpoint(find_saved(step))
        assert [name for name, p in expected.items() if not torch.equal(tensors[name], p)] == []
    assert not [name for name, p in weights[3].items() if torch.equal(p, weights[2][name])]
    events.clear()
    run(shards, "--num_iterations=1", AT_THE_END)
    assert "staging" not in events and trainer[1].staging == {}


# ---- attention -----------------------------------------------------------------------------------------


class CudaIsTheCPU(TorchFunctionMode):
    """Make tensors on the CPU if the device is CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


def attend_by_pairs(q, k, v, mask, spoil=lambda y: y):
    """Attention from the mask function of a block mask. FlexAttention is not differentiable on a CPU."""
    at = torch.arange(len(q))
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0)  # (H, T, T)
    scores = scores.masked_fill(~mask.mask_mod(0, 0, at[:, None], at), -math.inf)
    return spoil(scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)


class WrongGradient(torch.autograd.Function):
    """y, and a gradient that is 5 % too large."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.05


def refuse(*_):
    raise RuntimeError("no such\ninstruction here")


def refuse_backward(y):
    y.register_hook(refuse)
    return y


FAILS = "it fails on this cuda device: no such instruction here"
ATTENTION = {  # a stand-in for attend_flex(), and the reason against it
    "right": (attend_by_pairs, ""),
    "raises": (refuse, FAILS),
    "backward raises": (lambda *args: attend_by_pairs(*args, refuse_backward), FAILS),
    "wrong": (
        lambda *args: attend_by_pairs(*args, lambda y: y * 1.05), "it differs from its plain form by 0.05"
    ),
    "not a number": (
        lambda *args: attend_by_pairs(*args, lambda y: y * math.nan), "it differs from its plain form by nan"
    ),
    "gradient wrong": (
        lambda *args: attend_by_pairs(*args, WrongGradient.apply), "it differs from its plain form by 0.05"
    ),
}


def replace_flex(monkeypatch, attend_flex) -> None:
    """Replace attend_flex() in the table of fast forms, and keep only forms of attention."""
    rows = gpt.list_fast_forms()
    rows = {name: rows[name] for name in ATTENTION_FORMS}
    flex = rows["flex_attention"]
    rows["flex_attention"] = flex._replace(fast={**flex.fast, "attention": attend_flex})
    monkeypatch.setattr(gpt, "list_fast_forms", lambda: rows)


def choose_as_on_cuda(cfg, monkeypatch, dtype) -> tuple[frozenset, list[str]]:
    """choose_fast_forms() of a compiled run on a GPU, in eager mode on the CPU."""
    with CudaIsTheCPU(), monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda fn, **_: fn)
        return gpt.choose_fast_forms(cfg, torch.device("cuda"), dtype, True)


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_is_compared_before_it_is_used(case, dtype, monkeypatch):
    """Forward and backward. The replacement is right, wrong or fails."""
    torch.manual_seed(0)
    attend_flex, told = ATTENTION[case]
    replace_flex(monkeypatch, attend_flex)
    fast, (first, *lines) = choose_as_on_cuda(smoke_config(), monkeypatch, dtype)
    (name,) = fast
    assert name == ("flex_attention" if case == "right" else "block_attention")
    assert first == f"fast forms: {name}" and len(lines) == (case != "right")
    for line in lines:
        if dtype == torch.float32 or "differs" not in told:
            assert line == f"fast form flex_attention: off ({told})"
        else:  # rounded, so the last digits differ
            start = told.partition(" by ")[0]
            assert line.startswith(f"fast form flex_attention: off ({start}") and "\n" not in line


@pytest.mark.parametrize("case", [case for case in ATTENTION if case != "right"])
def test_flex_attention_by_name_must_work(case, monkeypatch):
    """The run ends with the reason."""
    attend_flex, told = ATTENTION[case]
    replace_flex(monkeypatch, attend_flex)
    with pytest.raises(gpt.InputError) as error:
        choose_as_on_cuda(smoke_config(fast="flex_attention"), monkeypatch, torch.float32)
    assert str(error.value) == f"--fast=flex_attention: flex_attention cannot be used ({told}): leave it out"


def test_a_run_uses_blocks_if_flex_attention_fails(shards, here, monkeypatch, capsys):
    """The choices are of a compiled run on a GPU."""
    blocks = []
    before_call(monkeypatch, gpt, "choose_blocks", lambda *args: blocks.append(args))
    with monkeypatch.context() as patch:
        replace_flex(patch, refuse)
        chosen = choose_as_on_cuda(smoke_config(), patch, torch.float32)
    blocks.clear()
    monkeypatch.setattr(gpt, "choose_fast_forms", lambda *_: chosen)
    result = run(shards, "--num_iterations=2", AT_THE_END)
    assert math.isfinite(result["final_val_loss"]) and blocks
    lines = [line for line in capsys.readouterr().out.splitlines() if "attention" in line]
    assert lines == ["fast forms: block_attention", f"fast form flex_attention: off ({FAILS})"]


# ---- nodes ---------------------------------------------------------------------------------------------


def test_an_address_that_does_not_exist(shards, here, monkeypatch, capsys):
    """One line, before init_process_group() would retry for an hour."""
    monkeypatch.setattr(gpt.dist, "init_process_group", lambda *_, **__: pytest.fail("it joins the group"))
    monkeypatch.setattr(gpt.ctypes, "CDLL", refuse_library)
    address = dict(MASTER_ADDR="node7.invalid", MASTER_PORT="1", RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    for name, value in address.items():
        monkeypatch.setenv(name, value)
    assert gpt.main([*TINY, *data_args(shards), "--tokens_per_step=1024"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "rank 0 does not reach the others at MASTER_ADDR=node7.invalid" in err
    assert "start with torchrun. On several nodes also set GLOO_SOCKET_IFNAME" in err


def refuse_library(name):
    """Without libc this process does not request a signal for the end of its parent."""
    raise OSError(name)


def test_an_interface_that_is_not_there(shards, tmp_path, monkeypatch):
    """Two ranks of one node."""
    monkeypatch.setitem(ENVIRONMENT, "GLOO_SOCKET_IFNAME", "nosuchif")
    args = [*TINY, *data_args(shards), "--tokens_per_step=1024"]
    ends, _, errors = run_ranks("fail", 2, "none", 0, *args, cwd=tmp_path)
    lines = errors.splitlines()
    assert [status for status, _ in ends] == [2, 2]
    ours = [line for line in lines if line.startswith("train_gpt.py: error: ")]
    assert ours and all("GLOO_SOCKET_IFNAME" in line and "nosuchif" in line for line in ours), errors[-2000:]
    assert "Traceback" not in errors
