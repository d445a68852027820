"""What counts on eight GPUs: each test fails where what saves or counts their time is taken out."""

import json
import math
import random
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.nn.functional as F
from conftest import data_args, gpt, make_runtime, smoke_config
from ranks import run_ranks
from torch.overrides import TorchFunctionMode

TINY = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=512", "--val_tokens=1024"]
TINY += ["--warmup_iterations=0", "--val_loss_every=0"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(shards, *args, preset=TINY) -> dict:
    """A run in this process; returns its json."""
    before = set(Path("logs").glob("*.json"))
    assert gpt.main([*preset, *data_args(shards), *args]) == 0
    (path,) = set(Path("logs").glob("*.json")) - before
    return json.loads(path.read_text())


def make_trainer(shards, **changes):
    """A trainer before its first step, and the batches of all its steps."""
    cfg = smoke_config(shards, tokens_per_step=1024, micro_batch_tokens=512, **changes)
    trainer = gpt.Trainer(cfg, make_runtime(fp8=frozenset({"fp8_mlp"} if cfg.fp8_mlp == "on" else ())))
    data = gpt.TrainData(cfg, trainer.schedule)
    return trainer, gpt.Prefetcher(data.batches(cfg, trainer.rt, 0, cfg.num_iterations), trainer.rt.device)


def before_call(monkeypatch, owner, name, do) -> None:
    """Have do(*arguments) called before the real function."""
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        do(*args)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


# ---- clock ---------------------------------------------------------------------------------------------


def test_the_first_data_are_on_the_clock(shards, here, monkeypatch, capsys):
    """Time passes only where it is said here. Four steps of a batch each, all read before the last ends."""
    now = [1000.0]
    monkeypatch.setattr(gpt.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: 1e9)
    for owner, name, seconds in (
        (gpt, "find_prefixes", 8),  # these three are on the clock
        (gpt.Prefetcher, "__init__", 4),
        (gpt.TrainData, "batch", 1),
        (gpt.TrainData, "__init__", 32),  # and these before it
        (gpt.ValData, "__init__", 16),
        (gpt, "read_vocabulary", 64),
    ):
        before_call(monkeypatch, owner, name, lambda *_, s=seconds: now.__setitem__(0, now[0] + s))
    Path("vocab.json").write_text(json.dumps({"a": 97, "ab": 98}))
    stages = '--stages=[{"duration":1,"window_long":128,"window_short":64,"prefix_weight":"0.5"}]'
    result = run(shards, stages, "--vocab_file=vocab.json", "--num_iterations=4")
    assert result["train_time_ms"] == 1000 * (8 + 4 + 4 * 1)
    assert result["data_setup_s"] == 32 + 16 + 64
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "before the clock" in line]
    assert "112.0 s to check and plan the data, 0.0 s of warm-up" in row


def test_prefixes_are_those_of_a_search_of_all_pairs():
    """Of two bytes, so that many texts begin with others; with the empty text, in any order."""
    chance = random.Random(0)
    for count in (0, 1, 30, 150):
        texts = list({bytes(chance.choices((0, 255), k=chance.randint(0, 8))) for _ in range(count)})
        ids = dict(zip(texts, chance.sample(range(200), len(texts))))
        expected = [-1] * 200
        for text in texts:
            shorter = [p for p in texts if p and len(p) < len(text) and text.startswith(p)]
            if shorter:
                expected[ids[text]] = ids[max(shorter, key=len)]
        assert gpt.find_prefixes(ids, 200).tolist() == expected
    assert sum(number >= 0 for number in expected) > 50


# ---- warm-up -------------------------------------------------------------------------------------------


def test_telemetry_has_seen_every_length_before_the_clock(shards, here, monkeypatch):
    """Tokens of a micro-batch and of a packed sequence: what is compiled anew for each."""
    warm, timed, clock = set(), set(), []
    before_call(monkeypatch, gpt.Trainer, "run", lambda *args: clock.append(args))

    def note(_, batch, stage):
        (timed if clock else warm).add((len(batch.inputs), stage.row_len))

    before_call(monkeypatch, gpt.Telemetry, "inspect", note)
    preset = ["--preset=smoke_frontier", "--device=cpu", "--telemetry_every=1", "--val_loss_every=0"]
    run(shards, "--num_iterations=6", "--micro_batch_tokens=2048", "--val_tokens=1024", preset=preset)
    assert timed == {(1024, 256), (2048, 512)} and warm >= timed


# ---- targets -------------------------------------------------------------------------------------------


def test_a_stage_has_the_targets_that_it_weighs(monkeypatch):
    """One column where nothing else is weighed; the loss and its gradients are those of four columns, three
    of which weigh nothing, and those of cross-entropies summed one by one."""
    torch.manual_seed(0)
    rich = gpt.Stage(1, 128, 64, loss_weights="1 0.5 0.25:0", prefix_weight="0.5:0.25")
    cfg = smoke_config(stages=(gpt.Stage(1, 128, 64), rich), num_layers=1)
    rt, schedule, head = make_runtime(dtype=torch.float64), gpt.Schedule(cfg), gpt.GPT(cfg).head
    head.prefixes = torch.where(torch.arange(257) % 3 > 0, torch.arange(257) // 2, -1)
    head.weight.data = torch.randn(*head.weight.shape, dtype=torch.float64)
    states = [schedule.at(step) for step in (0, cfg.num_iterations - 1)]
    assert [state.stage_index for state in states] == [0, 1]
    plain, rich = (gpt.make_stage_inputs(state, 64, 32, rt, cfg) for state in states)
    targets = torch.randint(256, (64,))
    given = []  # to the loss, as columns (T, n)
    monkeypatch.setattr(gpt, "HeadLoss", type("Noting", (gpt.HeadLoss,), {
        "apply": lambda x, w, columns, *rest: given.append(columns.T) or torch.zeros(())}))  # fmt: skip
    for stage in (plain, rich):
        head(torch.zeros(64, cfg.model_dim), targets, stage)
    monkeypatch.undo()
    (first,), columns = given
    assert columns.shape == (4, 64) and torch.equal(first, targets) and torch.equal(columns[0], targets)
    for ahead, missing in ((1, [31, 63]), (2, [30, 31, 62, 63])):  # the ends of two packed sequences
        column = columns[ahead]
        assert (column == -1).nonzero().ravel().tolist() == missing
        assert torch.equal(column[column >= 0], targets.roll(-ahead)[column >= 0])
    assert torch.equal(columns[3], head.prefixes[targets])
    weights = [torch.tensor(state.loss_weights) for state in states]
    assert [len(given) for given in weights] == [1, 4]
    x = gpt.rms_norm(torch.randn(64, cfg.model_dim, dtype=torch.float64)).requires_grad_()

    def differentiate(loss):
        return loss.detach(), *torch.autograd.grad(loss, (x, head.weight))

    ours = differentiate(head(x, targets, plain, weights[0]))
    padded = differentiate(head(x, targets, rich, torch.tensor([1.0, 0, 0, 0])))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, padded))
    exact = sum(
        weight * F.cross_entropy(head.logits(x), column, ignore_index=-1, reduction="sum")
        for weight, column in zip(weights[1].double(), columns)
    )
    ours = differentiate(head(x, targets, rich, weights[1]))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, differentiate(exact)))


# ---- rotary tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
def test_small_rotary_tables_are_the_large_ones(pairs, monkeypatch):
    """Queries and keys, of single heads and of paired ones, are turned by either as complex numbers are by
    their angle; in the last stage, whose softmax scale is not the first one's."""
    torch.manual_seed(0)
    layers = gpt.LayerSpec("long"), gpt.LayerSpec(paired=True)
    shape = dict(num_layers=2, layers=layers, num_heads=4, model_dim=128)
    cfg = smoke_config(rotary_pairs=pairs, qk_norm="off", **shape)
    state, model = gpt.Schedule(cfg).at(cfg.num_iterations), gpt.GPT(cfg)
    assert state.attention_scale != cfg.attention_scale
    small, large = (
        gpt.make_stage_inputs(state, 96, 48, make_runtime(dtype=torch.float64, use_compile=is_compiled), cfg)
        for is_compiled in (True, False)
    )
    qk = torch.randn(96, 2, 4, 32, dtype=torch.float64)  # (T, 2, H, K)
    positions, heads = torch.arange(96.0).double() % 48, torch.arange(4.0).double()
    for name, block, place in (
        ("", model.blocks[0], positions[:, None] + 0 * heads),  # (T, H)
        ("paired_", model.blocks[1], 2 * positions[:, None] + heads % 2),
    ):
        tables, expanded = ([getattr(s, f"{name}{kind}") for kind in ("cos", "sin")] for s in (small, large))
        parities = 2 if name else 1
        assert all(table.shape == (96, parities, 8) for table in tables)
        again = gpt.expand_rotary(*tables, small.attention_scale, pairs)
        assert all(table.shape == (96, 2, 4 // parities, parities, 32) for table in expanded)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-15) for a, b in zip(again, expanded))
        seen, attention = [], block.attention  # q and k, as attention takes them
        monkeypatch.setattr(gpt, "multiply_linear", lambda x, w, _: torch.cat((qk.flatten(1), x), 1) if len(w) == 384 else x)
        monkeypatch.setattr(gpt, "attend", lambda q, k, v, mask, seen=seen: seen.append(
            torch.stack([x.reshape(96, 4, 32) for x in (q, k)], 1)) or q)  # fmt: skip
        for stage in (small, large):
            attention(torch.zeros(96, 128, dtype=torch.float64), None, gpt.Saved(), gpt.Weights(), None, None, stage)
        monkeypatch.undo()
        turned, same = seen
        assert torch.allclose(turned, same, rtol=0, atol=1e-14)
        angle = place[..., None] * torch.tensor(state.frequencies)  # (T, H, K/2)
        a, b = qk.chunk(2, -1) if pairs == "halves" else (qk[..., ::2], qk[..., 1::2])
        z = torch.complex(a, b) * torch.exp(-1j * angle)[:, None]
        parts = (z.real, z.imag)
        expected = torch.cat(parts, -1) if pairs == "halves" else torch.stack(parts, -1).flatten(-2)
        expected[:, 0] *= state.attention_scale
        assert torch.allclose(turned, expected, rtol=0, atol=1e-13)


# ---- tables by rows ------------------------------------------------------------------------------------


def test_a_table_by_rows_has_the_dense_gradient():
    """Of two micro-batches, to the last bit in float64: some rows often, both ends, others never."""
    torch.manual_seed(0)
    param = gpt.declare(torch.randn(37, 6, dtype=torch.float64), "value_embed", is_table=True)
    bucket = gpt.Bucket([("table", param)], "value_embed", gpt.Group(), make_runtime(), False)
    param.take_rows, dense = bucket.take_rows, param.detach().clone().requires_grad_()
    total = torch.zeros(37, 6, dtype=torch.float64)
    for rows in ([36, 0, 36, 0, 0, *torch.randint(3, 30, (90,)).tolist()], [36, 36, 5, 36]):
        rows = torch.tensor(rows, dtype=torch.int32)[torch.randperm(len(rows))]
        grad = torch.randn(len(rows), 6, dtype=torch.float64)
        ours = gpt.look_up(param, rows, gpt.RowPlan(rows, len(param), make_runtime()))
        plain = F.embedding(rows, dense)
        assert torch.equal(ours, plain)
        ours.backward(grad)
        total += torch.autograd.grad(plain, dense, grad)[0]
    assert param.grad is None and torch.equal(bucket.grads[:-6].view(37, 6), total)
    assert total[0].any() and total[36].any() and not total[30:36].any()


def test_ranks_share_a_table_that_does_not_divide(tmp_path):
    """37 rows on 3 ranks: the sums that each rank has of its 13 are those of all ranks' tokens."""
    ends, _, errors = run_ranks("rows", 3, tmp_path / "rows.pt")
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    ours, dense = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert ours.shape == (39, 6) and torch.equal(ours[:37], dense) and not ours[37:].any()
    assert dense[0].any() and dense[36].any()


def test_a_table_is_read_by_rows_only(shards, monkeypatch):
    """An ordinary look-up would leave a gradient that nobody reads."""
    trainer, batches = make_trainer(shards, num_layers=2)
    trainer.train_step(batches, trainer.schedule.at(0))
    monkeypatch.setattr(gpt, "look_up", lambda table, rows, _plan: F.embedding(rows, table))
    with pytest.raises(AssertionError, match=r"value_embeds.0 is a table .*: read its rows with look_up"):
        trainer.train_step(batches, trainer.schedule.at(1))
    batches.executor.shutdown(cancel_futures=True)


# ---- scales of FP8 -------------------------------------------------------------------------------------

FP8_MLP = dict(fp8_mlp="on", model_dim=128, num_heads=2, head_dim=64, num_layers=2)


def test_a_scale_that_is_not_finite_is_not_taken_over():
    modules = torch.nn.ModuleList(gpt.DelayedScale() for _ in range(3))
    scales, unit = gpt.DelayedScales(modules, make_runtime()), 1.8 / 448
    for entries, expected in (
        ((2.0, 3.0, 4.0), (2, 3, 4)),
        ((math.nan, 5.0, math.inf), (2, 5, 4)),  # each for itself
        ((6.0, math.nan, 1.0), (6, 5, 1)),  # and not for ever
    ):
        for module, entry in zip(modules, entries):
            module(torch.tensor([0.5, entry]))
            module(torch.tensor([0.5, 0.25]))  # a second micro-batch hides nothing
        scales.start()
        scales.finish()
        assert torch.allclose(torch.stack(scales.scales), unit * torch.tensor(expected), rtol=1e-6, atol=0)
        assert not any(module.largest for module in modules)


def test_the_guard_restores_scales(shards, here, monkeypatch):
    """A NaN gets into a weight in step 18: FP8 of the MLP goes on, the head's is what is given up."""
    saved, before, after, losses = {}, [], [], []
    act, snapshot, train_step = gpt.Guard._act, gpt.Trainer.snapshot, gpt.Trainer.train_step

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
        before.extend(x.clone() for x in (*scales.scales, *scales.largest))
        act(self, *args)
        after.append((self.trainer.progress.step, self.snapshots[-1][0], [x.clone() for x in scales.scales]))

    monkeypatch.setattr(gpt.Trainer, "train_step", spoil_and_step)
    monkeypatch.setattr(gpt.Trainer, "snapshot", note_snapshot)
    monkeypatch.setattr(gpt.Guard, "_act", note_action)
    options = [f"--{name}={value}" for name, value in FP8_MLP.items()]
    result = run(shards, "--guard=on", "--fp8_head=on", "--num_iterations=24", *options)
    ((step, made, scales),) = after
    assert result["guard_actions"] == 1 and made == 10 and sorted(saved) == [0, 10, 20]
    (scale, largest) = before  # the action: a NaN has been seen, but not taken over
    assert scale.isfinite() and largest.isnan()
    assert all(map(torch.equal, scales, saved[10])) and all(x.isfinite() for x in scales)
    assert not any(map(torch.equal, scales, saved[0])) and not any(map(torch.equal, scales, saved[20]))
    assert [i for i, loss in enumerate(losses) if not math.isfinite(loss)] == list(range(17, step))
    assert math.isfinite(result["final_val_loss"])


def test_scales_travel_while_the_optimizer_works(shards, tmp_path):
    """On two ranks: sent before the first update, awaited where the next step starts, and only there."""
    changes = dict(
        preset="smoke", device="cpu", train_files=f"{shards}/train_*.bin", micro_batch_tokens=512, **FP8_MLP
    )
    ends, _, errors = run_ranks("scale_steps", 2, tmp_path / "order.json", json.dumps(changes))
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    calls = json.loads((tmp_path / "order.json").read_text())
    step = ["forward", "forward", "send scales", "update"]
    assert calls == [*step, "await scales", *step, "await scales", *step]


# ---- checkpoints ---------------------------------------------------------------------------------------


def test_checkpoints_share_memory_that_was_taken_before_the_clock(shards, here, monkeypatch):
    """Of three, each has the weights of its step to the last bit, though the disk is slower than the steps
    and all are copied into the same tensors. What is small has none: the state of random numbers."""
    events, saves, weights, write = [], [], {}, gpt.write_atomic
    before_call(monkeypatch, gpt, "make_staging", lambda _: events.append("staging"))
    before_call(monkeypatch, gpt.Trainer, "run", lambda made, *_: (events.append("clock"), trainer.append(made)))

    def note_save(checkpoints, step, facts, copies):
        weights[step] = {name: p.detach().clone() for name, p in trainer[0].model.named_parameters()}
        saves.append({name: copy.copy for name, copy in copies.items() if name != "random/cpu"})

    def write_slowly(path, data):
        time.sleep(0.2 if path.suffix == ".pt" else 0)
        write(path, data)

    trainer = []
    before_call(monkeypatch, gpt.Checkpoints, "save", note_save)
    monkeypatch.setattr(gpt, "write_atomic", write_slowly)
    monkeypatch.setattr(gpt.Checkpoints, "KEPT", 3)
    run(shards, "--num_iterations=3", "--checkpoint_every=1")
    assert events[:2] == ["staging", "clock"] and events.count("staging") == 1
    # all are still held, so that nothing else can have got their memory
    expected, *pointers = (
        {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for tensors in (trainer[0].staging, *saves)
    )
    assert pointers == [expected] * 3 and len(set(expected.values())) == len(expected) > len(weights[1])
    for step, expected in weights.items():
        _, tensors = gpt.read_checkpoint(Path(f"checkpoints/smoke_seed0/step_{step:06d}.pt"))
        assert [name for name, p in expected.items() if not torch.equal(tensors[name], p)] == []
    assert not [name for name, p in weights[3].items() if torch.equal(p, weights[2][name])]
    events.clear()
    run(shards, "--num_iterations=1")
    assert "staging" not in events and trainer[1].staging == {}


# ---- attention -----------------------------------------------------------------------------------------


class CudaIsTheCPU(TorchFunctionMode):
    """What is asked for on CUDA is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("device"), "type", None) == "cuda":
            kwargs["device"] = torch.device("cpu")
        return function(*args, **kwargs)


def attend_by_pairs(q, k, v, mask, spoil=lambda y: y):
    """Attention from the mask function of a block mask: differentiable, as FlexAttention is not on a CPU."""
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


ATTENTION = {  # what attend_flex() is: what the run is told
    "right": (attend_by_pairs, "attention: FlexAttention"),
    "raises": (refuse, "it fails on this cuda device (no such instruction here)"),
    "backward raises": (
        lambda *args: attend_by_pairs(*args, refuse_backward),
        "it fails on this cuda device (no such instruction here)",
    ),
    "wrong": (
        lambda *args: attend_by_pairs(*args, lambda y: y * 1.05),
        "it fails on this cuda device (its output differs from the dense form's by 0.05)",
    ),
    "not a number": (
        lambda *args: attend_by_pairs(*args, lambda y: y * math.nan),
        "it fails on this cuda device (its output differs from the dense form's by nan)",
    ),
    "gradient wrong": (
        lambda *args: attend_by_pairs(*args, WrongGradient.apply),
        "it fails on this cuda device (its gradient differs from the dense form's by 0.05)",
    ),
}


@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flex_attention_is_tried_before_it_is_trusted(case, dtype, monkeypatch):
    """Forward and backward; a stand-in computes what a GPU would, right or wrong."""
    torch.manual_seed(0)
    attend_flex, told = ATTENTION[case]
    monkeypatch.setattr(gpt, "attend_flex", attend_flex)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: fn)
    with CudaIsTheCPU():
        works, note = gpt.choose_attention(smoke_config(), torch.device("cuda"), dtype, True)
    assert works == (case == "right")
    if dtype == torch.float32 or "differs" not in told:
        assert note == (told if works else f"attention: dense, in blocks, {told}")
    else:  # rounded, so that the last digits are others
        start = told.partition(" by ")[0]
        assert note.startswith(f"attention: dense, in blocks, {start}") and "\n" not in note


def test_a_run_goes_on_where_flex_attention_fails(shards, here, monkeypatch, capsys):
    """A compiled run on a GPU asks; what it then does is attention in blocks."""
    choose = gpt.choose_attention

    def choose_as_on_cuda(cfg, device, dtype, use_compile):
        with CudaIsTheCPU(), monkeypatch.context() as patch:
            patch.setattr(torch, "compile", lambda fn, **_: fn)
            return choose(cfg, torch.device("cuda"), dtype, True)

    monkeypatch.setattr(gpt, "attend_flex", refuse)
    monkeypatch.setattr(gpt, "choose_attention", choose_as_on_cuda)
    result = run(shards, "--num_iterations=2")
    assert math.isfinite(result["final_val_loss"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "attention" in line]
    assert (
        len(lines) == 1 and "dense, in blocks, it fails on this cuda device (no such instruction" in lines[0]
    )


# ---- nodes ---------------------------------------------------------------------------------------------


@pytest.fixture
def two_nodes(monkeypatch):
    """The environment of the first rank of two, each on a node of its own."""
    numbers = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, LOCAL_WORLD_SIZE=1, MASTER_PORT=1)
    for name, value in dict(MASTER_ADDR="127.0.0.1", **numbers).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def test_a_host_name_that_means_loopback(two_nodes, here, shards, monkeypatch, capsys):
    """Then other nodes would be told to find this one at their own: one line, before anybody waits."""
    monkeypatch.setattr(gpt.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(gpt.socket, "gethostbyname", dict(node7="127.0.1.1").get)
    monkeypatch.setattr(gpt.dist, "init_process_group", lambda *_, **__: pytest.fail("it has gone on"))
    monkeypatch.setattr(gpt.ctypes, "CDLL", refuse_library)
    assert gpt.main([*TINY, *data_args(shards), "--tokens_per_step=1024"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "node7, means 127.0.1.1" in err and "set GLOO_SOCKET_IFNAME to" in err


def refuse_library(name):
    """So that this process does not ask for a signal when its parent ends."""
    raise OSError(name)


@pytest.mark.parametrize("why", ["interface", "one node", "address", "no address"])
def test_where_gloo_finds_the_others(two_nodes, why, monkeypatch):
    def look_up_host(_name):
        if why == "no address":
            raise gpt.socket.gaierror
        return "10.0.0.7" if why == "address" else "127.0.1.1"

    monkeypatch.setattr(gpt.socket, "gethostbyname", look_up_host)
    if why == "interface":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    if why == "one node":
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(gpt.ctypes, "CDLL", refuse_library)

    def join(*_, **__):
        raise EOFError("it has gone on")

    monkeypatch.setattr(gpt.dist, "init_process_group", join)
    with pytest.raises(EOFError):
        gpt.start_runtime(smoke_config())


def test_an_interface_that_is_not_there(shards, tmp_path, monkeypatch):
    """Two ranks of one node, started for real."""
    monkeypatch.setitem(ranks.ENVIRONMENT, "GLOO_SOCKET_IFNAME", "nosuchif")
    args = [*TINY, *data_args(shards), "--tokens_per_step=1024"]
    ends, _, errors = run_ranks("fail", 2, "none", 0, *args, cwd=tmp_path)
    lines = errors.splitlines()
    assert [status for status, _ in ends] == [2, 2]
    ours = [line for line in lines if line.startswith("train_gpt.py: error: ")]
    assert ours and all("GLOO_SOCKET_IFNAME" in line and "nosuchif" in line for line in ours), errors[-2000:]
    assert "Traceback" not in errors
