"""The newest recipe against a plain float64 reading of it (frontier_reference.py), and its mechanisms."""


import frontier_reference as reference
import numpy as np
import pytest
import torch
from conftest import gpt, make_runtime

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
    dc_gather="dc_w1",
    dc_give="dc_w2",
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


def find_row(layer, name, size, kind, shape):
    """Where the reference keeps a coefficient of a generator: (its row, rows)."""
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
    split, values = gpt.split_names, {}
    values["embed"], values["head.weight"], values["bigram"] = p["embed"], p["head"], p["bigram"]
    values["gate_scale"] = p["gate_scale"].view(1)
    for i in range(5):
        values[f"value_embeds.{i}"] = p[f"ve.{i}"]
    sources = {"gates0": "pre", "gates4": "post", "mudd10": "mudd", "out10": "out"}
    for group, param in model.numbers.items():
        parts = [
            p[c.name] if c.name in ("skip", "smear") else p[f"{NUMBERS[c.name]}.{c.layer}"]
            for c in model.coefficients
            if c.source == group
        ]
        values[f"numbers.{group}"] = torch.stack(parts)
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
        for kind in block.generators:
            source = f"{kind}{i}"
            order = torch.cat(
                [
                    torch.arange(100)[find_row(c.layer, c.name, c.size, sources[source], shape)]
                    for c in model.coefficients
                    if c.source == source
                ]
            )
            for ours, theirs in (("inner", "w1"), ("outer", "w2"), ("bias", "bias")):
                tensor = p[f"{sources[source]}.{theirs}"]
                values[f"{own}.generators.{kind}.{ours}"] = tensor if ours == "inner" else tensor[order]
    assert values.keys() == {name for name, _ in model.named_parameters()} and split("") == []
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


@pytest.mark.parametrize("step", [0, 422, 423, 846, 847, 1269, 1270, 1284, 1285], ids=str)
def test_forward_and_losses(step):
    """Every stage, every change of YaRN, the final validation: logits, training and validation loss."""
    cfg, (shape, p) = gpt.make_config(SMALL), make_reference()
    model, state = make_model(cfg, shape, p), gpt.Schedule(cfg).at(step)
    batch, starts = make_tokens(step, length=512)
    prefixes = torch.tensor([(i - 7 if i % 3 else -1) for i in range(50)]).clamp(min=-1)
    model.prefixes.copy_(prefixes)
    is_final = step == cfg.num_iterations
    stage = reference.stage_at(min(step, 1284), 16, final_validation=is_final)
    inputs = gpt.make_stage_inputs(state, 1024, 512, make_runtime(dtype=torch.float64), cfg)
    expected = reference.forward(p, shape, batch.inputs, starts, batch.doc_ids, stage)
    logits = model.head.logits(model.encode(batch.inputs, batch.doc_ids, inputs))
    assert (logits - expected).abs().max() < 1e-9
    weights = torch.tensor(state.loss_weights, dtype=torch.float64)
    if not is_final:
        theirs = reference.loss_weights(step)
        assert state.loss_weights == pytest.approx(theirs, abs=1e-15)
        loss = reference.loss(
            p, shape, batch.inputs, batch.targets, starts, batch.doc_ids, stage, theirs[:3], theirs[3], prefixes
        )
        assert model(*batch, inputs, weights).item() == pytest.approx(loss.item(), rel=1e-12)
    val_loss = reference.val_loss(p, shape, batch.inputs, batch.targets, starts, batch.doc_ids, stage)
    assert model.eval()(*batch, inputs).item() / 1024 == pytest.approx(val_loss.item(), rel=1e-12)


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


def test_forty_steps(monkeypatch):
    """Every parameter after 40 steps, tied for the first 20: gradients, both rules, their masks.

    At a hundredth of the rates: at the recipe's own, rounding errors grow tenfold each step.
    """
    monkeypatch.setattr(gpt, "GRAD_TOKENS", 128)
    changes = dict(untie_frac=19 / 1270, tokens_per_step=256, seq_len=128, max_doc_len=128, val_seq_len=128)
    stages = (
        gpt.Stage(1, 384, 128, loss_weights="1 0.5 0.25:0", prefix_weight="0.25"),
        gpt.Stage(1, 384, 128),
    )
    cfg, (shape, p) = gpt.make_config({**SMALL, **changes, "stages": stages}), make_reference()
    with torch.no_grad():
        p["embed"].copy_(p["head"])
    model = make_model(cfg, shape, p)
    prefixes = torch.tensor([(i - 7 if i % 3 else -1) for i in range(50)]).clamp(min=-1)
    model.prefixes.copy_(prefixes)
    optimizer = gpt.Optimizer(model, cfg, make_runtime(dtype=torch.float64))
    assert optimizer.last_tied_step == 19
    schedule, batches = gpt.Schedule(gpt.make_config(SMALL)), [make_tokens(i, length=128) for i in range(40)]
    inputs = gpt.make_stage_inputs(schedule.at(0), 256, 128, optimizer.rt, cfg)
    for step, (batch, _) in enumerate(batches):
        state = schedule.at(step * 30)
        model(*batch, inputs, torch.tensor(state.loss_weights, dtype=torch.float64)).backward()
        factor = 0.01 * state.lr_factor
        optimizer.step(factor, state.momentum, 256, factor, factor)
    reference.train(
        p,
        shape,
        [(batch.inputs, batch.targets, starts, batch.doc_ids) for batch, starts in batches],
        untie_step=19,
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
