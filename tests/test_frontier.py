"""The newest recipe against a reference in float64 (frontier_reference.py), and its mechanisms."""

import dataclasses
import json

import frontier_reference as reference
import numpy as np
import pytest
import torch
from conftest import CPU_FORMS, gpt, make_runtime, slow_but, smoke_run

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
WITHOUT_OPTIMIZER = CPU_FORMS - {"sparse_embedding", "fused_adamw"}  # of a model that is not trained
COEFFICIENTS = dict(
    dc_pre="dc_w1",
    dc_post="dc_w2",
    skip_gate="skip",
    bigram_in="bigram",
    head_gate="gate",
    **{
        name: f"m{i}"
        for i, name in enumerate(
            "value_x_in value_h7 value_x in_x_in in_h7 in_x ve_gate _ resid_attn attn_out x_in _bigram "
            "resid_mlp mlp_out".split()
        )
    },
    **{f"out_{name}": f"n{i}" for i, name in enumerate("x_in h7 h9 ve0 h3".split())},
)
NUMBERS = dict(
    qkv_scale="s0",
    proj_scale="s1",
    resid_attn="attn_residual",
    attn_out="attn_out",
    resid_mlp="mlp_residual",
    mlp_out="mlp_out",
)


def make_reference(seed=0):
    shape = reference.Shape(50, 96, 6, 16, 384, 101, gpt.NUM_SIGN_ROWS)
    return shape, reference.init_params(shape, torch.Generator().manual_seed(seed))


def find_rows(scalar, spec, kind, shape):
    """The rows of the reference with a scalar of token gates. Several activations have rows for each."""
    near, written = [*spec.mudd_in.split(","), "x"], spec.mudd_out.split(",")
    streams = dict(mudd_v=("value", near), mudd_x=("in", near), mudd_out=("out", written))
    if scalar.name not in streams:
        return torch.arange(100)[find_row(scalar.layer, scalar.name, len(scalar.init), kind, shape)]
    prefix, names = streams[scalar.name]
    return torch.cat(
        [torch.arange(100)[find_row(scalar.layer, f"{prefix}_{name}", 1, kind, shape)] for name in names]
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
    values["scalars.gates_scale"] = p["gate_scale"].view(1)
    for i in range(5):
        values[f"value_embeds.{i}"] = p[f"ve.{i}"]
    sources = {"gates0": "pre", "gates4": "post", "mudd10": "mudd", "mudd_out10": "out"}
    for group, param in model.scalars.items():
        if group == "gates_scale":
            continue
        parts = [
            p[s.name] if s.name in ("skip", "smear") else p[f"{NUMBERS[s.name]}.{s.layer}"]
            for s in model.layer_scalars
            if s.source == group
        ]
        values[f"scalars.{group}"] = torch.stack(parts)
        assert len(parts) == len(param)
    for i, block in enumerate(model.blocks):
        own = f"blocks.{i}"
        if block.attention is not None:
            qk = torch.cat((p[f"q.{i}"], p[f"k.{i}"]))
            values[f"{own}.attention.qk"] = qk.view(block.attention.qk.shape)
            values[f"{own}.attention.v_proj"] = torch.stack((p[f"v.{i}"], p[f"o.{i}"]))
            if block.attention.ve_gate_weight is not None:
                values[f"{own}.attention.ve_gate_weight"] = p[f"ve_gate.{i}"]
        values[f"{own}.mlp.up_down"] = torch.stack((p[f"up.{i}"].T, p[f"down.{i}"].T))
        if block.smear_gate is not None:
            values[f"{own}.smear_gate"] = p["smear_gate"]
        for kind in ("gates", "mudd", "mudd_out"):
            if getattr(block, kind) is None:
                continue
            source = f"{kind}{i}"
            chosen = [s for s in model.layer_scalars if s.source == source]
            order = torch.cat([find_rows(s, model.cfg.layers[s.layer], sources[source], shape) for s in chosen])
            for ours, theirs in (("fc", "w1"), ("proj", "w2"), ("bias", "bias")):
                tensor = p[f"{sources[source]}.{theirs}"]
                values[f"{own}.{kind}.{ours}"] = tensor if ours == "fc" else tensor[order]
    assert values.keys() == {name for name, _ in model.named_parameters()}
    return values


def make_model(cfg, shape, p, rt):
    model = gpt.GPT(cfg, rt).double()
    with torch.no_grad():
        for name, value in read_parameters(model, shape, p).items():
            dict(model.named_parameters())[name].copy_(value)
        model.bigram_signs.copy_(p["signs"])
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
@pytest.mark.parametrize("fast", [frozenset(), WITHOUT_OPTIMIZER], ids=["plain", "fast"])
@pytest.mark.parametrize("step", slow_but([0, 422, 423, 846, 847, 1269, 1270, 1284, 1285], 1285), ids=str)
def test_forward_and_losses(step, fast):
    """Every stage, every change of YaRN, the final validation: logits, training and validation loss."""
    cfg, (shape, p), rt = gpt.make_config(SMALL), make_reference(), make_runtime(dtype=torch.float64, fast=fast)
    model, state = make_model(cfg, shape, p, rt), gpt.Schedule(cfg).at(step)
    model.is_tied = False  # embedding and head of the reference differ
    batch, starts = make_tokens(step, length=416)
    prefixes = torch.tensor([(i - 7 if i % 3 else -1) for i in range(50)]).clamp(min=-1)
    model.head.prefix_tokens.copy_(prefixes)
    is_final = step == cfg.num_iterations
    stage = reference.stage_at(min(step, 1284), 16, final_validation=is_final)
    inputs = gpt.make_step_inputs(state, 832, 416, rt, cfg)
    expected = reference.forward(p, shape, batch.inputs, starts, batch.doc_ids, stage)
    logits = model.head.compute_logits(model.run_layers(batch.inputs, batch.doc_ids, inputs)[0])
    assert (logits - expected).abs().max() < 1e-9
    weights = torch.tensor(state.loss_weights, dtype=torch.float64)
    if not is_final:
        theirs = reference.loss_weights(step)
        used = [*theirs[: state.stage.num_targets - state.stage.has_prefix_target], theirs[3]]
        assert state.loss_weights == pytest.approx(used[: state.stage.num_targets], abs=1e-15)
        assert sum(theirs) == pytest.approx(sum(state.loss_weights))  # other weights are 0
        loss = reference.loss(
            p, shape, batch.inputs, batch.targets, starts, batch.doc_ids, stage, theirs[:3], theirs[3], prefixes
        )
        assert model(*batch, inputs, weights).item() == pytest.approx(loss.item(), rel=1e-12)
    val_loss = reference.val_loss(p, shape, batch.inputs, batch.targets, starts, batch.doc_ids, stage)
    assert model.eval()(*batch, inputs).item() / 832 == pytest.approx(val_loss.item(), rel=1e-12)


def test_schedule():
    """Rates and decays of all groups, momentum, weights, windows and YaRN of every step, and the tokens."""
    cfg = gpt.make_config({"preset": "frontier"})
    schedule = gpt.Schedule(cfg)
    assert schedule.count_tokens() == reference.total_tokens() == 338_821_120
    for step in range(cfg.num_iterations):
        state = schedule.at(step)
        frequencies, scale = reference.yarn(step, 128)
        for name, group in cfg.groups.items():
            factor = schedule.compute_lr_factor(step, name)
            assert factor == pytest.approx(reference.lr_factor(step), abs=1e-12)
            assert (state.lr[name], state.weight_decay[name]) == (group.lr * factor, group.weight_decay * factor)
        assert state.momentum == pytest.approx(reference.momentum(step), abs=1e-12)
        assert state.windows[::-1] == reference.windows(step)
        assert state.softmax_scale == pytest.approx(scale, rel=1e-12)
        assert state.frequencies[:32] == pytest.approx(frequencies.numpy(), rel=1e-12)
        assert state.stage.tokens_per_step == reference.TOKENS[reference.stage_of(step)]
    assert schedule.at(1285).windows == (2560, 768)


@pytest.mark.recipe
@pytest.mark.parametrize("fast", [frozenset(), CPU_FORMS], ids=["plain", "fast"])
@pytest.mark.parametrize("steps", slow_but([6, 40], 6))
def test_steps(steps, fast, monkeypatch):
    """Every parameter after some steps, with a tied head in the first half: gradients, both rules, their masks.

    Learning rates are a hundredth of the recipe's, because rounding errors would grow tenfold in each step.
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
    model = make_model(cfg, shape, p, make_runtime(dtype=torch.float64, fast=fast))
    prefixes = torch.tensor([(i - 7 if i % 3 else -1) for i in range(50)]).clamp(min=-1)
    model.head.prefix_tokens.copy_(prefixes)
    optimizer = gpt.Optimizer(model, cfg, make_runtime(dtype=torch.float64, fast=fast))
    assert model.is_tied and optimizer.untie_step == last_tied
    schedule, batches = gpt.Schedule(gpt.make_config(SMALL)), [make_tokens(i, length=128) for i in range(steps)]
    inputs = gpt.make_step_inputs(schedule.at(0), 256, 128, optimizer.rt, cfg)
    for step, (batch, _) in enumerate(batches):
        state = schedule.scale_lr(schedule.at(step * 30), 0.01)
        weights = torch.tensor(state.loss_weights, dtype=torch.float64)  # later stages have fewer targets
        inputs = inputs._replace(has_prefix_target=state.stage.has_prefix_target)
        model(*batch, inputs, weights).backward()
        optimizer.step(state._replace(stage=dataclasses.replace(state.stage, tokens_per_step=256)))
        assert model.is_tied == (step < last_tied)
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
    assert (model.embed - model.head.weight).abs().max() > 1e-4  # they are untied


@pytest.mark.parametrize("fast", [frozenset(), WITHOUT_OPTIMIZER], ids=["plain", "fast"])
def test_the_number_of_segments_changes_no_bit(fast):
    """Several ranks have several segments, and one rank has one: loss and gradients are equal to the last bit."""
    cfg, (shape, p), rt = gpt.make_config(SMALL), make_reference(), make_runtime(fast=fast)
    model, (batch, _) = make_model(cfg, shape, p, rt).float(), make_tokens(0, length=256)
    inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(0), 512, 256, rt, cfg)
    results = []
    for num_segments in (1, 4, 11):
        model.split_layers(num_segments)
        loss, weights = model(*batch, inputs), [param for name, param in model.named_parameters() if name != "embed"]
        results.append([loss, *torch.autograd.grad(loss, weights)])
    assert [[torch.equal(x, y) for x, y in zip(results[0], other)].count(False) for other in results[1:]] == [0, 0]


@pytest.mark.parametrize("form", ["plain", "fused", "kernel"])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.5, 0.25, 0.2], [0.0, 0.7]], ids=str)
def test_cross_entropy_of_several_targets(weights, form):
    """Loss and gradient against autograd in float64: weighted cross-entropies of the capped logits."""
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
    if form == "plain":  # token by token, with the identity as the head
        losses = torch.stack(
            [gpt.head_loss(x[None], torch.eye(300), t[None], weights, cap) for x, t in zip(logits, targets)]
        )
        grads = torch.autograd.grad(losses.sum() / 0.5, logits)[0]
    else:
        losses, grads = gpt.softcapped_cross_entropy(
            logits.detach(), targets, weights, cap, torch.float32, 0.5, use_kernel=form == "kernel"
        )
    assert torch.allclose(losses.double(), expected, atol=2e-5)  # float32 on sums of up to 40
    assert torch.allclose(grads * 0.5, expected_grad, atol=1e-6)


def test_hashes():
    """Rows and signs of the bigram table against arithmetic in Python integers, int32 wrap included."""
    rng, starts = np.random.default_rng(0), [0, 300]
    tokens = torch.tensor(rng.integers(0, 50304, 600), dtype=torch.int32)
    is_start = torch.zeros(600, dtype=torch.bool)
    is_start[starts] = True
    rows = gpt.bigram_hash(tokens, is_start, 377_280)
    assert rows.tolist() == list(reference.bigram_rows_of(tokens, starts, 377_280))
    assert 27191 * 377_279 > 2**31  # so position 1 wraps
    signs = ((tokens ^ gpt.shift_right(tokens, is_start)) % 8192).masked_fill(is_start, 0)
    assert signs.tolist() == list(reference.sign_rows_of(tokens, starts, 8192))
    model = gpt.GPT(gpt.make_config(SMALL))
    signs = model.bigram_signs
    assert signs.abs().unique().tolist() == [1.0] and abs(signs.mean()) < 0.01  # sd 0.001


def test_prefixes(tmp_path):
    """The table of prefixes against brute force, from a vocabulary file in the format of the hub."""
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
    prefixes = gpt.find_prefix_tokens(gpt.read_vocabulary(cfg), cfg.padded_vocab_size)
    expected = reference.prefix_table([*texts, b""])
    assert prefixes.tolist()[: len(expected)] == expected
    assert max(expected) > 255  # some have a prefix of two bytes
    (tmp_path / "vocab.json").write_text("[]")
    with pytest.raises(gpt.InputError, match="vocab_file.*cached_fineweb10B"):
        gpt.read_vocabulary(cfg)


def test_low_bits():
    """A bfloat16 matrix with low bits in its state trains like a float32 one, and holds the upper half."""
    torch.manual_seed(0)
    rule, states, weights = gpt.RULES["normuon"], [], []
    start = torch.randn(2, 8, 16).bfloat16()
    args = gpt.UpdateArgs(
        *map(torch.tensor, (1e-3, 1e-4, 0.9, 1.0, 0.1, 0.1)), (0.9, 0.9), 1e-10, polynomial="polar_express",
        cautious=True,
    )  # fmt: skip
    for weight in (start.clone(), start.float()):
        states.append(rule.init_state(weight, fp32_state=True))
        weights.append(weight)
    for _ in range(20):
        grad = torch.randn(2, 8, 16)
        for weight, state in zip(weights, states):
            rule.update(weight, grad, state, args)
    upper, lower = weights[0].view(torch.int16).int() << 16, states[0]["low_bits"].int() & 0xFFFF
    assert torch.equal((upper | lower).view(torch.float32), weights[1])
    shown = (weights[1].view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(weights[0].float(), shown)
    assert states[0]["momentum"].dtype == torch.float32
    assert set(rule.init_state(start)) == {"momentum", "second_momentum"}  # record 32's bfloat16 gates have none


@pytest.mark.recipe
def test_fp8_of_the_mlp():
    """Forward in e4m3, a rounding of 2^-4 at most. Backward as in bfloat16. The scale follows a step behind."""
    torch.manual_seed(0)
    cfg = gpt.make_config({**SMALL, "fp8_mlp": "on", "zero_init": "off"})
    model, rt = gpt.GPT(cfg, make_runtime(dtype=torch.bfloat16, fp8=frozenset({"fp8_mlp"}))), make_runtime()
    mlp, plain = gpt.MLP(cfg).bfloat16(), gpt.MLP(cfg).bfloat16()
    plain.load_state_dict(mlp.state_dict())
    x = torch.randn(64, 96, dtype=torch.bfloat16).requires_grad_()
    outputs = []
    for module, ops in ((mlp, model.ops), (plain, gpt.Operations())):
        y = module(x, ops)
        outputs.append((y, *torch.autograd.grad(y.float().square().sum(), (x, module.up_down))))
    largest = (x @ mlp.up_down[0]).relu().square().max().item()
    assert mlp.scaling.amax.item() == pytest.approx(largest, rel=0.15)  # of FP8 products
    assert plain.scaling.amax.item() == 0
    scales = gpt.DelayedScales(mlp, rt.comm)
    scales.start()
    scales.finish()
    assert mlp.scaling.scale.item() == pytest.approx(1.8 / 448 * largest, rel=0.15)
    assert mlp.scaling.amax.item() == 0
    error = lambda ours, exact: ((ours - exact).float().norm() / exact.float().norm()).item()
    assert 0 < error(outputs[0][0], outputs[1][0]) < 0.5  # a scale of 1 flushes small values
    better = mlp(x, model.ops)
    assert 0 < error(better, outputs[1][0]) < 0.06  # rounding to 3 bits of mantissa is 0.03 rms for each factor
    for ours, exact in zip(outputs[0][1:], outputs[1][1:]):
        assert error(ours, exact) < 0.5
    assert torch.equal(mlp(x, model.eval_ops), plain(x, gpt.Operations()))  # validation is in bfloat16


ABSENT = {"dropped_mlp", "momentum_warmup"}  # not in this recipe


@pytest.mark.parametrize("fast", [frozenset(), CPU_FORMS], ids=["plain", "fast"])
@pytest.mark.parametrize("mechanism", sorted(set(gpt.MECHANISMS) - ABSENT))
def test_without(mechanism, fast, monkeypatch):
    """Without each mechanism of the newest recipe two steps are finite."""
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
    fp8 = frozenset({"fp8_mlp"} if cfg.fp8_mlp == "on" else ())
    trainer = gpt.Trainer(cfg, make_runtime(fp8=fp8, fast=fast))
    batch, _ = make_tokens(0, length=128)
    for step in (18, 19):  # one of them updates Adam
        assert trainer.train_step(iter([batch] * 9), trainer.schedule.at(step)).isfinite()
    assert all(param.isfinite().all() for param in trainer.model.parameters())


FRONTIER = ("--preset=smoke_frontier", "--micro_batch_tokens=512", "--check_ranks_every=1")


@pytest.fixture(scope="module")
def whole_run(shards, tmp_path_factory):
    """A run of the recipe with all mechanisms, without a stop."""
    return smoke_run(shards, tmp_path_factory.mktemp("whole"), *FRONTIER)


@pytest.mark.slow
def test_ranks_and_resumed_runs_agree_to_the_last_bit(shards, tmp_path, whole_run, capsys):
    """Two ranks, a checkpoint of a tied head and one of an untied head. All end with the loss of one rank."""
    two = smoke_run(shards, tmp_path, *FRONTIER, "--checkpoint_every=2", nproc=2)
    assert two["final_val_loss"] == whole_run["final_val_loss"]
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name for path in folder.glob("*.pt")) == ["step_000010.pt", "step_000012.pt"]
    last = gpt.make_config({"preset": "smoke_frontier"})
    assert gpt.Optimizer(gpt.GPT(last), last, make_runtime()).untie_step == 7
    for step in (6, 10):
        stopped = tmp_path / str(step)
        stopped.mkdir()
        smoke_run(shards, stopped, *FRONTIER, f"--checkpoint_every={step}")
        (path,) = stopped.glob(f"checkpoints/*/step_{step:06d}.pt")
        assert gpt.read_checkpoint(path)[0]["is_tied"] == (step == 6)
        new = tmp_path / f"from_{step}"
        new.mkdir()
        resumed = smoke_run(shards, new, *FRONTIER, f"--resume={path}")
        assert resumed["final_val_loss"] == whole_run["final_val_loss"]
        assert resumed["resumed_at"] == [step]
        capsys.readouterr()
        assert gpt.main([f"--sample={path}", "--prompt=abc", "--max_new_tokens=5", "--device=cpu"]) == 0
        assert capsys.readouterr().out.startswith("abc")


def test_telemetry_and_guard(shards, tmp_path):
    """Telemetry measures every layer and every group with an update. The guard does not act."""
    result = smoke_run(shards, tmp_path, *FRONTIER, "--telemetry_every=4", "--guard=on")
    lines = [json.loads(line) for line in result["path"].with_suffix(".jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["event"] == "telemetry"]
    assert [line["step"] for line in measured] == [4, 8, 12]
    assert all(len(line["layers"]) == 5 and np.isfinite(line["loss"]) for line in measured)
    groups = {"matrix", "head", "value_embed", "scalar", "residual", "mix", "gate"}
    *tied, untied = (set(line["groups"]) for line in measured)  # it unties in step 8, after its updates
    assert tied == [groups, groups] and untied == {*groups, "embed"}
    assert result["guard_actions"] == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(bigram_rows=1), "--bigram_rows=1 "),
        (dict(qk_group_heads=4), "--qk_group_heads=4 does not divide num_heads=6: give --qk_group_heads=1 or 2 or 3 or 6, or 0"),
        (dict(value_gate_dim=5), "--value_gate_dim=5 is not a multiple of 2"),
        (dict(extension_steps=1285), "--extension_steps=1285 "),
        (dict(stages=()), "--stages is empty"),
        (dict(stages=(gpt.Stage(1, 384, 128, seq_len=0),)), "seq_len=0"),
        (dict(stages=(gpt.Stage(1, 384, 128, loss_weights="1 x"),)), "loss_weights='1 x'"),
        (dict(stages=(gpt.Stage(1, 384, 128, prefix_weight="1 1"),)), "prefix_weight='1 1'"),
        (dict(num_layers=1, layers=(gpt.LayerSpec("none", mudd_in="x_in"),)), "mudd_in=x_in, which adds to values"),
        (dict(num_layers=1, layers=(gpt.LayerSpec(mudd_out="h3"),)), "mudd_out=h3: choose among x_in"),
        (dict(num_layers=1, layers=(gpt.LayerSpec(attention_from=1),)), "attention_from=1"),
        (dict(num_layers=1, layers=(gpt.LayerSpec(gates_from=2),)), "gates_from=2"),
        (dict(num_heads=3, head_dim=32, num_layers=1, layers=(gpt.LayerSpec(paired=True),)), "paired heads"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(gpt.InputError, match=message.replace("(", r"\(")):
        gpt.make_config({**SMALL, "qk_group_heads": 1, "extension_steps": 0, **options})


@pytest.mark.parametrize("lengths", [(None, 1024), (1024, None)])
def test_a_micro_batch_has_the_longest_sequence_of_all_stages(lengths):
    stages = tuple(gpt.Stage(1, 384, 128, seq_len=length) for length in lengths)
    changes = dict(stages=stages, extension_steps=0, seq_len=128, tokens_per_step=1024)
    assert gpt.make_config({**SMALL, **changes, "micro_batch_tokens": 1024}).stages == stages
    with pytest.raises(gpt.InputError) as error:
        gpt.make_config({**SMALL, **changes, "micro_batch_tokens": 896})
    assert str(error.value) == (
        "--micro_batch_tokens=896 is less than one packed sequence, seq_len=1024: give --micro_batch_tokens=1024, "
        "or shorten seq_len in --stages")


@pytest.mark.parametrize("zero_init, zero", [("on", "attention mlp"), ("mlp", "mlp"), ("off", "")])
def test_the_initial_standard_deviation_of_matrices(zero_init, zero):
    """init_std divided by the root of the fan-in, except for output projections that begin with zeros."""
    torch.manual_seed(0)
    block = gpt.GPT(gpt.make_config({**SMALL, "zero_init": zero_init, "init_std": 0.7})).blocks[1]
    (v, attention_out), (up, mlp_out) = block.attention.v_proj, block.mlp.up_down
    stds = {name: weight.std().item() for name, weight in dict(
        q=block.attention.qk[0], k=block.attention.qk[-1], v=v, attention=attention_out, up=up, mlp=mlp_out).items()}
    expected = {**dict.fromkeys(stds, 0.7 * 96**-0.5), "mlp": 0.7 * 384**-0.5, **dict.fromkeys(zero.split(), 0)}
    assert stds == pytest.approx(expected, rel=0.03)


def test_a_last_stage_without_steps(shards):
    """Fewer steps than stages. The final validation still has its inputs."""
    for num_iterations in (1, 2, 3):
        cfg = gpt.make_config({"preset": "smoke_frontier", "num_iterations": num_iterations, "extension_steps": 0})
        state = gpt.Schedule(cfg).at(num_iterations)
        assert state.stage.num_targets == len(state.loss_weights) == 1  # of the last stage
