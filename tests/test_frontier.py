"""The newest recipe against a plain float64 reading of it (frontier_reference.py), and its mechanisms."""


import json

import frontier_reference as reference
import numpy as np
import pytest
import torch
from conftest import gpt, make_runtime, slow_but, smoke_run

SMALL = dict(
    preset="frontier",
    device="cpu",
    vocab_size=50,
    vocab_multiple=2,
    model_dim=96,
    num_heads=6,
    head_dim=16,
    bigram_rows=101,
    embed_dtype="float32",
    matrix_dtype="float32",
)
COEFFICIENTS = dict(
    dc_mix="dc_w1",
    dc_out="dc_w2",
    skip_gate="skip",
    first_bigram="bigram",
    **{
        name: f"m{i}"
        for i, name in enumerate(
            "value_x_in value_h7 value_x in_x_in in_h7 in_x value_gate _ attention_residual attention x_in "
            "_bigram mlp_residual mlp".split()
        )
    },
    **{f"out_{name}": f"n{i}" for i, name in enumerate("x_in h7 h9 ve0 h3".split())},
)
NUMBERS = dict(
    qkv="s0",
    output="s1",
    attention_residual="attn_residual",
    attention="attn_out",
    mlp_residual="mlp_residual",
    mlp="mlp_out",
)


def make_reference(seed=0):
    shape = reference.Shape(50, 96, 6, 16, 384, 101, gpt.SIGN_ROWS)
    return shape, reference.init_params(shape, torch.Generator().manual_seed(seed))


def find_rows(weight, spec, kind, shape):
    """Where the reference keeps a weight of a generator: its rows, for several streams those of each."""
    near, written = [*spec.mudd_in.split(","), "x"], spec.mudd_out.split(",")
    streams = dict(values=("value", near), inputs=("in", near), outputs=("out", written))
    if weight.name not in streams:
        return torch.arange(100)[find_row(weight.layer, weight.name, len(weight.inits), kind, shape)]
    prefix, names = streams[weight.name]
    return torch.cat(
        [torch.arange(100)[find_row(weight.layer, f"{prefix}_{name}", 1, kind, shape)] for name in names]
    )


def find_row(layer, name, size, kind, shape):
    row = 0
    wanted = COEFFICIENTS.get(name, name)
    if kind == "mudd" and name == "bigram":
        wanted = "m11"
    for other_layer, other, rows, _ in reference.outputs_of(kind, shape):
        if (other_layer, other) == (layer, wanted):
            return slice(row, row + size)
        row += rows
    raise KeyError((layer, name))


def read_parameters(model, shape, p):
    """The reference's parameters in the model's layout, by the model's names."""
    values = {}
    values["embed"], values["head.weight"], values["bigram"] = p["embed"], p["head"], p["bigram"]
    values["gate_scale"] = p["gate_scale"].view(1)
    for i in range(5):
        values[f"value_embeds.{i}"] = p[f"ve.{i}"]
    sources = {"gates0": "pre", "gates4": "post", "mudd10": "mudd", "out10": "out"}
    for group, param in model.scalars.items():
        parts = [
            p[c.name] if c.name in ("skip", "smear") else p[f"{NUMBERS[c.name]}.{c.layer}"]
            for c in model.weights
            if c.source == group
        ]
        values[f"scalars.{group}"] = torch.stack(parts)
        assert len(parts) == len(param)
    for i, block in enumerate(model.blocks):
        own = f"blocks.{i}"
        if block.attention is not None:
            qk = torch.cat((p[f"q.{i}"], p[f"k.{i}"]))
            values[f"{own}.attention.qk"] = qk.view(block.attention.qk.shape)
            values[f"{own}.attention.vo"] = torch.stack((p[f"v.{i}"], p[f"o.{i}"]))
            if block.attention.value_gate is not None:
                values[f"{own}.attention.value_gate"] = p[f"ve_gate.{i}"]
        values[f"{own}.mlp.up_down"] = torch.stack((p[f"up.{i}"].T, p[f"down.{i}"].T))
        if block.smear_gate is not None:
            values[f"{own}.smear_gate"] = p["smear_gate"]
        for kind in ("gates", "mudd", "out"):
            if getattr(block, kind) is None:
                continue
            source = f"{kind}{i}"
            chosen = [w for w in model.weights if w.source == source]
            order = torch.cat([find_rows(w, model.cfg.layers[w.layer], sources[source], shape) for w in chosen])
            for ours, theirs in (("inner", "w1"), ("outer", "w2"), ("bias", "bias")):
                tensor = p[f"{sources[source]}.{theirs}"]
                values[f"{own}.{kind}.{ours}"] = tensor if ours == "inner" else tensor[order]
    assert values.keys() == {name for name, _ in model.named_parameters()}
    return values


def make_model(cfg, shape, p):
    model = gpt.GPT(cfg).double()
    model.dtype = torch.float64
    with torch.no_grad():
        for name, value in read_parameters(model, shape, p).items():
            dict(model.named_parameters())[name].copy_(value)
        model.signs.copy_(p["signs"])
    return model


def make_tokens(seed, buffers=2, length=256):
    """Buffers of several documents: tokens, targets, starts and document numbers."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 49, (buffers, length + 1))
    rows[rng.random(rows.shape) < 0.02] = 49
    rows[:, 0] = 49
    batch = gpt.make_batch(rows, 49)
    return batch, [length * i for i in range(buffers)]


@pytest.mark.recipe
@pytest.mark.parametrize("step", slow_but([0, 422, 423, 846, 847, 1269, 1270, 1284, 1285], 423, 1285), ids=str)
def test_forward_and_losses(step):
    """Every stage, every change of YaRN, the final validation: logits, training and validation loss."""
    cfg, (shape, p) = gpt.make_config(SMALL), make_reference()
    model, state = make_model(cfg, shape, p), gpt.Schedule(cfg).at(step)
    batch, starts = make_tokens(step, length=416)
    prefixes = torch.tensor([(i - 7 if i % 3 else -1) for i in range(50)]).clamp(min=-1)
    model.head.prefixes.copy_(prefixes)
    is_final = step == cfg.num_iterations
    stage = reference.stage_at(min(step, 1284), 16, final_validation=is_final)
    inputs = gpt.make_stage_inputs(state, 832, 416, make_runtime(dtype=torch.float64), cfg)
    expected = reference.forward(p, shape, batch.inputs, starts, batch.doc_ids, stage)
    logits = model.head.logits(model.run_layers(batch.inputs, batch.doc_ids, inputs)[0])
    assert (logits - expected).abs().max() < 1e-9
    weights = torch.tensor(state.loss_weights, dtype=torch.float64)
    if not is_final:
        theirs = reference.loss_weights(step)
        used = [*theirs[: state.stage.num_targets - state.stage.has_prefixes], theirs[3]]
        assert state.loss_weights == pytest.approx(used[: state.stage.num_targets], abs=1e-15)
        assert sum(theirs) == pytest.approx(sum(state.loss_weights))  # the others are 0
        loss = reference.loss(
            p, shape, batch.inputs, batch.targets, starts, batch.doc_ids, stage, theirs[:3], theirs[3], prefixes
        )
        assert model(*batch, inputs, weights).item() == pytest.approx(loss.item(), rel=1e-12)
    val_loss = reference.val_loss(p, shape, batch.inputs, batch.targets, starts, batch.doc_ids, stage)
    assert model.eval()(*batch, inputs).item() / 832 == pytest.approx(val_loss.item(), rel=1e-12)


def test_schedule():
    """Rates, momentum, weights, windows and YaRN of every step; tokens; stage edges."""
    cfg = gpt.make_config({"preset": "frontier"})
    schedule = gpt.Schedule(cfg)
    assert schedule.total_tokens() == reference.total_tokens() == 338_821_120
    for step in range(cfg.num_iterations):
        state = schedule.at(step)
        frequencies, scale = reference.yarn(step, 128)
        assert state.lr_factor == state.matrix_lr_factor == pytest.approx(reference.lr_factor(step), abs=1e-12)
        assert state.momentum == pytest.approx(reference.momentum(step), abs=1e-12)
        assert state.windows[::-1] == reference.windows(step)
        assert state.attention_scale == pytest.approx(scale, rel=1e-12)
        assert state.frequencies[:32] == pytest.approx(frequencies.numpy(), rel=1e-12)
        assert state.stage.tokens_per_step == reference.TOKENS[reference.stage_of(step)]
    assert schedule.at(1285).windows == (2560, 768)


@pytest.mark.recipe
@pytest.mark.parametrize("steps", slow_but([6, 40], 6))
def test_steps(steps, monkeypatch):
    """Every parameter after some steps, tied for the first half: gradients, both rules, their masks.

    At a hundredth of the rates: at the recipe's own, rounding errors grow tenfold each step.
    """
    monkeypatch.setattr(gpt, "GRAD_TOKENS", 128)
    last_tied = {6: 3, 40: 19}[steps]
    changes = dict(untie_frac=last_tied / 1270, tokens_per_step=256, seq_len=128, max_doc_len=128, val_seq_len=128)
    stages = (
        gpt.Stage(1, 384, 128, loss_weights="1 0.5 0.25:0", prefix_weight="0.25"),
        gpt.Stage(1, 384, 128),
    )
    cfg, (shape, p) = gpt.make_config({**SMALL, **changes, "stages": stages}), make_reference()
    with torch.no_grad():
        p["embed"].copy_(p["head"])
    model = make_model(cfg, shape, p)
    prefixes = torch.tensor([(i - 7 if i % 3 else -1) for i in range(50)]).clamp(min=-1)
    model.head.prefixes.copy_(prefixes)
    optimizer = gpt.Optimizer(model, cfg, make_runtime(dtype=torch.float64))
    assert optimizer.last_tied_step == last_tied
    schedule, batches = gpt.Schedule(gpt.make_config(SMALL)), [make_tokens(i, length=128) for i in range(steps)]
    inputs = gpt.make_stage_inputs(schedule.at(0), 256, 128, optimizer.rt, cfg)
    for step, (batch, _) in enumerate(batches):
        state = schedule.at(step * 30)
        weights = torch.tensor(state.loss_weights, dtype=torch.float64)  # later stages have fewer targets
        inputs = inputs._replace(num_targets=len(weights), has_prefixes=state.stage.has_prefixes)
        model(*batch, inputs, weights).backward()
        factor = 0.01 * state.lr_factor
        optimizer.step(factor, state.momentum, 256, factor, factor)
    reference.train(
        p,
        shape,
        [(batch.inputs, batch.targets, starts, batch.doc_ids) for batch, starts in batches],
        untie_step=last_tied,
        prefix_of=prefixes,
        stage_for=lambda step: reference.stage_at(0, 16),
        lr_for=lambda step: 0.01 * reference.lr_factor(step * 30),
        momentum_for=lambda step: reference.momentum(step * 30),
        weights_for=lambda step: reference.loss_weights(step * 30),
    )
    expected, ours = read_parameters(model, shape, p), dict(model.named_parameters())
    errors = {name: (ours[name] - expected[name]).abs().max().item() for name in ours}
    assert max(errors.values()) < 1e-9, sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert (model.embed - model.head.weight).abs().max() > 1e-4  # and they have parted


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.5, 0.25, 0.2], [0.0, 0.7]], ids=str)
def test_cross_entropy_of_several_targets(weights, use_kernels):
    """The sum of weighted cross-entropies of the capped logits, and its gradient, by autograd in float64."""
    torch.manual_seed(0)
    logits = (torch.randn(9, 300) * 8).requires_grad_()
    targets, weights = torch.randint(300, (9, len(weights))), torch.tensor(weights)
    targets[::3, -1] = -1
    cap = gpt.Softcap(23.0, 5.0, 7.5)
    z = 23 * torch.sigmoid((logits.double() + 5) / 7.5)
    terms = torch.nn.functional.cross_entropy(
        z[:, :, None].expand(-1, -1, len(weights)), targets, ignore_index=-1, reduction="none"
    )
    expected = (terms * weights.double()).sum(1)
    (expected_grad,) = torch.autograd.grad(expected.sum(), logits)
    losses, grads = gpt.softcapped_cross_entropy(
        logits.detach(), targets, weights, cap, torch.float32, 0.5, use_kernels
    )
    assert torch.allclose(losses.double(), expected, atol=2e-5)  # float32 on sums of up to 40
    assert torch.allclose(grads * 0.5, expected_grad, atol=1e-6)


def test_hashes():
    """Rows and signs of the bigram table against arithmetic in Python integers, int32 wrap included."""
    rng, starts = np.random.default_rng(0), [0, 300]
    tokens = torch.tensor(rng.integers(0, 50304, 600), dtype=torch.int32)
    is_start = torch.zeros(600, dtype=torch.bool)
    is_start[starts] = True
    rows = gpt.hash_pairs(tokens, is_start, 377_280)
    assert rows.tolist() == list(reference.bigram_rows_of(tokens, starts, 377_280))
    assert 27191 * 377_279 > 2**31  # so position 1 wraps
    signs = ((tokens ^ gpt.previous(tokens, is_start)) % 8192).masked_fill(is_start, 0)
    assert signs.tolist() == list(reference.sign_rows_of(tokens, starts, 8192))
    model = gpt.GPT(gpt.make_config(SMALL))
    assert model.signs.abs().unique().tolist() == [1.0] and abs(model.signs.mean()) < 0.01  # sd 0.001


def test_prefixes(tmp_path):
    """The table of prefixes against brute force, from a file as the hub has it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # as themselves, other bytes from 256 on
    chars = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in chars]
    rng, chars = np.random.default_rng(0), {**chars, **{byte: chr(256 + i) for i, byte in enumerate(others)}}
    texts = [bytes(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(60)]
    texts = [*dict.fromkeys([*(bytes([i]) for i in range(256)), *texts, b"<|a"])]
    names = ["".join(chars[byte] for byte in text) for text in texts]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate([*names, "<|endoftext|>"])}))
    changes = dict(vocab_size=len(texts) + 1, vocab_file=str(tmp_path / "vocab.json"))
    cfg = gpt.make_config({**SMALL, **changes})
    prefixes = gpt.find_prefixes(gpt.read_vocabulary(cfg), cfg.padded_vocab_size)
    expected = reference.prefix_table([*texts, b""])
    assert prefixes.tolist()[: len(expected)] == expected
    assert max(expected) > 255  # some have a prefix of two bytes
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(gpt.InputError, match="vocab_file.*cached_fineweb10B"):
        gpt.read_vocabulary(cfg)


def test_mantissas():
    """A bfloat16 matrix with its other 16 bits is trained like a float32 one, and shows its upper half."""
    torch.manual_seed(0)
    rule, states, weights = gpt.RULES["normuon"], [], []
    start = torch.randn(2, 8, 16).bfloat16()
    hyper = gpt.Hyperparameters(
        torch.tensor(0.9), torch.tensor(1.0), torch.tensor(0.1), torch.tensor(0.1), (0.9, 0.9), 1e-10,
        torch.float32, orthogonalize="polar_express", decay="cautious",
    )  # fmt: skip
    for weight in (start.clone(), start.float()):
        states.append(rule.init_state(weight, is_wide=True))
        weights.append(weight)
    for _ in range(20):
        grad = torch.randn(2, 8, 16)
        for weight, state in zip(weights, states):
            rule.update(weight, grad, state, torch.tensor(1e-3), torch.tensor(1e-4), hyper)
    upper, lower = weights[0].view(torch.int16).int() << 16, states[0]["mantissa"].int() & 0xFFFF
    assert torch.equal((upper | lower).view(torch.float32), weights[1])
    shown = (weights[1].view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(weights[0].float(), shown)
    assert states[0]["momentum"].dtype == torch.float32
    assert set(rule.init_state(start)) == {"momentum", "second_momentum"}  # record 32's bfloat16 gates have none


@pytest.mark.recipe
def test_fp8_of_the_mlp():
    """Forward in e4m3, a rounding of 2^-4 at most; backward as in bfloat16; the scale follows a step behind."""
    torch.manual_seed(0)
    cfg = gpt.make_config({**SMALL, "fp8_mlp": "on", "zero_init": "off"})
    mlp, plain = gpt.MLP(cfg).bfloat16(), gpt.MLP(cfg).bfloat16()
    plain.load_state_dict(mlp.state_dict())
    mlp.use_fp8_forward = True
    mlp.delayed.scale, mlp.delayed.largest = torch.tensor(1.0), torch.tensor(0.0)
    x = [torch.randn(64, 96, dtype=torch.bfloat16).requires_grad_() for _ in range(1)]
    rt = make_runtime()
    outputs = []
    for module in (mlp, plain):
        module.train()
        y = module(x[0])
        outputs.append((y, *torch.autograd.grad(y.float().square().sum(), (x[0], module.up_down))))
    largest = gpt.ReLUSquared.apply(x[0] @ mlp.up_down[0]).max().item()
    assert mlp.delayed.largest.item() == pytest.approx(largest, rel=0.15)  # of FP8 products
    scales = gpt.DelayedScales(mlp, rt)
    scales.start()
    scales.finish()
    assert mlp.delayed.scale.item() == pytest.approx(1.8 / 448 * largest, rel=0.15)
    assert mlp.delayed.largest.item() == 0
    error = lambda ours, exact: ((ours - exact).float().norm() / exact.float().norm()).item()
    assert 0 < error(outputs[0][0], outputs[1][0]) < 0.5  # a scale of 1 flushes what is small
    better = mlp(x[0])
    assert 0 < error(better, outputs[1][0]) < 0.06  # rounding to 3 bits of mantissa is 0.03 rms for each factor
    for ours, exact in zip(outputs[0][1:], outputs[1][1:]):
        assert error(ours, exact) < 0.5
    assert torch.equal(mlp.eval()(x[0]), plain.eval()(x[0]))  # validation is in bfloat16


ABSENT = {"dropped_mlp", "momentum_warmup"}  # what this recipe does not have


@pytest.mark.parametrize("mechanism", sorted(set(gpt.MECHANISMS) - ABSENT))
def test_without(mechanism, monkeypatch):
    """Every mechanism can be taken from the newest recipe, and two steps of what is left are finite."""
    torch.manual_seed(0)
    stages = (
        gpt.Stage(1, 256, 128, 128, None, 1.0, None, "1 0.5 0.25:0", "0.25"),
        gpt.Stage(1, 384, 128, lr_factor=1.5),
    )
    small = dict(SMALL, tokens_per_step=256, seq_len=128, max_doc_len=128, val_seq_len=128, num_iterations=20)
    small |= dict(extension_steps=2, stages=stages, fp8_mlp="on", matrix_dtype="bfloat16")
    small.pop("preset"), small.pop("device")
    monkeypatch.setitem(gpt.PRESETS, "small", ("frontier", "", small))
    options = dict(preset="small", device="cpu")
    base, cfg = gpt.make_config(options), gpt.make_config({**options, "without": mechanism})
    before, after = gpt.plain_dict(base), gpt.plain_dict(cfg)
    assert {name for name in after if after[name] != before[name]} - {"without"}
    trainer = gpt.Trainer(cfg, make_runtime(fp8={"fp8_mlp"} if cfg.fp8_mlp == "on" else set()))
    batch, _ = make_tokens(0, length=128)
    for step in (18, 19):  # Adam's is among them
        assert trainer.train_step(iter([batch] * 9), trainer.schedule.at(step)).isfinite()
    assert all(param.isfinite().all() for param in trainer.model.parameters())


FRONTIER = ("--preset=smoke_frontier", "--micro_batch_tokens=512", "--check_ranks_every=1")


@pytest.fixture(scope="module")
def whole_run(shards, tmp_path_factory):
    """The recipe with all mechanisms, without interruption."""
    return smoke_run(shards, tmp_path_factory.mktemp("whole"), *FRONTIER)


def test_ranks_and_resumed_runs_agree_to_the_last_bit(shards, tmp_path, whole_run, capsys):
    """Two ranks, a checkpoint while the head is tied, one after: each ends with the loss of one rank in one go."""
    two = smoke_run(shards, tmp_path, *FRONTIER, "--checkpoint_every=2", nproc=2)
    assert two["final_val_loss"] == whole_run["final_val_loss"]
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["step_000010.pt", "step_000012.pt"]
    last = gpt.make_config({"preset": "smoke_frontier"})
    assert gpt.Optimizer(gpt.GPT(last), last, make_runtime()).last_tied_step == 7
    for step in (6, 10):
        stopped = tmp_path / str(step)
        stopped.mkdir()
        smoke_run(shards, stopped, *FRONTIER, f"--checkpoint_every={step}")
        (path,) = stopped.glob(f"checkpoints/*/step_{step:06d}.pt")
        new = tmp_path / f"from_{step}"
        new.mkdir()
        resumed = smoke_run(shards, new, *FRONTIER, f"--resume={path}")
        assert resumed["final_val_loss"] == whole_run["final_val_loss"]
        assert resumed["resumed_at"] == [step]
        capsys.readouterr()
        assert gpt.main([f"--sample={path}", "--prompt=abc", "--max_new_tokens=5", "--device=cpu"]) == 0
        assert capsys.readouterr().out.startswith("abc")


def test_telemetry_and_guard(shards, tmp_path):
    """Both look on, measure every layer, and change nothing of the run."""
    result = smoke_run(shards, tmp_path, *FRONTIER, "--telemetry_every=4", "--guard=on")
    lines = [json.loads(line) for line in result["path"].with_suffix(".jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["event"] == "telemetry"]
    assert [line["step"] for line in measured] == [4, 8, 12]
    assert all(len(line["layers"]) == 5 and np.isfinite(line["loss"]) for line in measured)
    assert {"matrix", "embed", "head", "value_embed", "scalar", "residual", "mix", "gate"} <= set(
        measured[0]["groups"]
    )
    assert result["guard_actions"] == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(bigram_rows=1), "--bigram_rows=1 "),
        (dict(qk_group_heads=4), "--num_heads=6 is not a multiple of qk_group_heads=4"),
        (dict(value_gate_dim=5), "--value_gate_dim=5 is not a multiple of 2"),
        (dict(extension_steps=1285), "--extension_steps=1285 "),
        (dict(stages=()), "--stages is empty"),
        (dict(stages=(gpt.Stage(1, 384, 128, seq_len=0),)), "seq_len=0"),
        (dict(stages=(gpt.Stage(1, 384, 128, loss_weights="1 x"),)), "loss_weights='1 x'"),
        (dict(stages=(gpt.Stage(1, 384, 128, prefix_weight="1 1"),)), "prefix_weight='1 1'"),
        (dict(num_layers=1, layers=(gpt.LayerSpec("none", mudd_in="x_in"),)), "mudd_in=x_in and no attention"),
        (dict(num_layers=1, layers=(gpt.LayerSpec(mudd_out="h3"),)), "mudd_out=h3: choose among x_in"),
        (dict(num_layers=1, layers=(gpt.LayerSpec(attention_from=1),)), "attention_from=1"),
        (dict(num_layers=1, layers=(gpt.LayerSpec(gates_at=2),)), "gates_at=2"),
        (dict(num_heads=3, head_dim=32, num_layers=1, layers=(gpt.LayerSpec(paired=True),)), "paired heads"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(gpt.InputError, match=message.replace("(", r"\(")):
        gpt.make_config({**SMALL, "qk_group_heads": 1, "extension_steps": 0, **options})


def test_a_last_stage_without_steps(shards):
    """Fewer steps than stages: the final validation still has its inputs."""
    for num_iterations in (1, 2, 3):
        cfg = gpt.make_config({"preset": "smoke_frontier", "num_iterations": num_iterations, "extension_steps": 0})
        state = gpt.Schedule(cfg).at(num_iterations)
        assert state.stage.num_targets == len(state.loss_weights) == 1  # of the last stage
