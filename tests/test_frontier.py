"""The newest recipe against a reference in float64 (record92_reference.py), and its mechanisms."""

import dataclasses
import json
import types

import numpy as np
import pytest
import record92_reference as reference
import torch
from conftest import CPU_FORMS, gpt, make_runtime, slow_but, smoke_run

from records import sample

SHAPE = dataclasses.replace(
    reference.MINIATURE, missing_targets_count=False,  # see test_record_92.py
    stage_steps=(10, 10, 12, 4, 6), lr_decay_from=9, momentum_ramp=9, momentum_cooldown=6, slow_rail_from=18,
    rare_events_from=14, split_step=37, tail_ema_from=28, blend_from=29, tail_avg_from=37, value_from=33,
)  # fmt: skip
RANKS = SHAPE.ranks
WITHOUT_OPTIMIZER = CPU_FORMS - {"sparse_embedding", "fused_adamw"}  # of a model that is not trained
COEFFICIENTS = dict(
    mudd_v=["m0", "m1", "m2"], mudd_x=["m3", "m4", "m5"], ve_gate=["m6", "m7"], resid_attn=["m8"], attn_out=["m9"],
    x_in=["m10"], ngram=["m11"], resid_mlp=["m12"], mlp_out=["m13"], mudd_out=[f"n{i}" for i in range(10)],
)  # fmt: skip
NUMBERS = dict(
    qkv_scale=("scales", 0), proj_scale=("scales", 1), resid_attn=("residual", 0), resid_mlp=("residual", 1),
    attn_out=("output", 0), mlp_out=("output", 1),
)  # fmt: skip
SMALL = dict(
    preset="frontier", device="cpu", vocab_size=50, vocab_multiple=2, model_dim=96, num_heads=6, head_dim=16,
    short_qk_dim=8, ngram_rows=202, embed_dtype="float32", matrix_dtype="float32", mudd_groups=4,
    layers=tuple(dataclasses.replace(spec, v_dim=spec.v_dim and 8) for spec in gpt.FRONTIER_LAYERS),
)  # fmt: skip
PARTS = sorted(gpt.list_parts(gpt.load_preset("frontier")))


def make_config(shape=SHAPE):
    """The trainer's config of a shape of the reference. Its sequences may have any length."""
    first, steps = shape.first(4), shape.steps
    thirds = [
        (stage, steps // len(counts), count)
        for stage, (steps, counts) in enumerate(zip(shape.stage_steps, shape.candidates))
        for count in counts
    ]
    thirds[-2] = thirds[-2][0], thirds[-2][1] + 1, thirds[-2][2]  # see Schedule: scheduled steps + 1
    ramps = [((1, 1), (0.5, 0.5), (0.25, 0)), ((1, 1), (0.5, 0)), *[((1, 1),)] * 3]
    stages = tuple(
        gpt.Stage(
            duration=duration,
            window_long=shape.stage_blocks[stage][1] * shape.block,
            window_short=shape.stage_blocks[stage][0] * shape.block,
            tokens_per_step=RANKS * shape.stage_tokens[stage],
            max_doc_len=shape.stage_caps[stage],
            lr_factor=shape.stage_lr[stage],
            seq_len=shape.stage_tokens[stage],
            loss_weights=ramps[stage],
            prefix_weight=shape.prefix_weights[stage] if stage < 2 else (),
            num_classes=count,
        )
        for stage, duration, count in thirds
    )
    layers = tuple(dataclasses.replace(spec, v_dim=spec.v_dim and shape.v_half) for spec in gpt.FRONTIER_LAYERS)
    values = dict(
        vocab_size=shape.tokenizer, vocab_multiple=shape.vocab, model_dim=shape.dim,
        num_heads=shape.heads, head_dim=shape.qk_wide, short_qk_dim=shape.qk_narrow, layers=layers,
        mlp_ratio=shape.hidden / shape.dim, ngram_rows=shape.table_rows,
        mudd_groups=shape.groups, embed_dtype="float32", matrix_dtype="float32", stages=stages,
        yarn_max_window=shape.stage_blocks[4][1] * shape.block,
        mlp_lr_mul=((shape.hidden / shape.dim) ** 0.5, 2 * (shape.hidden / shape.dim) ** 0.5),
        num_iterations=steps, extension_steps=shape.stage_steps[4], tokens_per_step=RANKS * shape.stage_tokens[2],
        seq_len=shape.stage_tokens[2], max_attention_len=shape.attention_cap, late_start=shape.rare_events_from / first,
        slow_momentum_start=shape.slow_rail_from / first, untie_frac=(shape.split_step - 1.5) / first,
        cooldown_frac=(first - shape.lr_decay_from) / first, momentum_warmup_steps=shape.momentum_ramp,
        momentum_cooldown_steps=shape.momentum_cooldown,
        val_windows=(shape.validation_blocks[1] * shape.block, shape.validation_blocks[0] * shape.block),
    )  # fmt: skip
    return gpt.change_options(gpt.load_preset("frontier"), values)


def find_coefficients(scalar):
    """The reference's names of a scalar of token gates."""
    names = dict(xsa=f"xsa.{scalar.layer}", head_gate=f"gate.{scalar.layer}", skip_gate="skip", ngram_in="ngram.0")
    if "mudd" in scalar.source:
        return COEFFICIENTS[scalar.name]
    return [names.get(scalar.name, f"{scalar.name}.{scalar.layer}")]


def read_parameters(model, shape, p):
    """The reference's parameters in the model's layout, by the model's names."""
    values = {"embed": p["embed"], "head.weight": p["head"], "ngram": p["table"]}
    values["scalars.gates_scale"] = p["gate_scale"].view(1)
    values |= {f"value_embeds.{i}": p[f"ve.{layer}"] for i, layer in enumerate(reference.VALUE)}
    for group, param in model.scalars.items():
        if group == "gates_scale":
            continue
        rows = [s for s in model.layer_scalars if s.source == group]
        parts = [
            p[s.name] if s.name in ("skip", "smear") else p[NUMBERS[s.name][0]][s.layer, NUMBERS[s.name][1]] for s in rows
        ]
        values[f"scalars.{group}"] = torch.stack(parts)
        assert len(parts) == len(param)
    sources = {"gates0": "pre", "gates4": "post", "mudd10": "mudd", "mudd_out10": "end"}
    for i, block in enumerate(model.blocks):
        own = f"blocks.{i}"
        if block.attention is not None:
            values[f"{own}.attention.qk"] = p[f"qk.{i}"]
            if i in reference.HALF_V:
                values[f"{own}.attention.v"], values[f"{own}.attention.proj"] = p[f"v.{i}"][None], p[f"o.{i}"][None]
            else:
                values[f"{own}.attention.v_proj"] = torch.stack((p[f"v.{i}"], p[f"o.{i}"]))
            if block.attention.ve_gate_weight is not None:
                values[f"{own}.attention.ve_gate_weight"] = p[f"ve_gate.{i}"]
        for name, slot in (("mlp", str(i)), ("second_mlp", f"{i}b")):
            if getattr(block, name) is not None:
                values[f"{own}.{name}.up_down"] = torch.stack((p[f"mlp.{slot}.in"].T, p[f"mlp.{slot}.out"].T))
        if block.smear_gate is not None:
            values[f"{own}.smear_gate"] = p["smear_gate"]
        for kind in ("gates", "mudd", "mudd_out"):
            if getattr(block, kind) is None:
                continue
            source, rows, at = f"{kind}{i}", {}, 0
            theirs = sources[source]
            for name, size, _ in reference.outputs_of(shape, theirs):
                rows[name], at = list(range(at, at + size)), at + size
            chosen = [s for s in model.layer_scalars if s.source == source]
            order = [row for s in chosen for name in find_coefficients(s) for row in rows[name]]
            assert sorted(order) == list(range(at))
            values[f"{own}.{kind}.fc"] = p[f"{theirs}.w1"]
            values[f"{own}.{kind}.proj"], values[f"{own}.{kind}.bias"] = p[f"{theirs}.w2"][order], p[f"{theirs}.bias"][order]
            if kind == "mudd_out":
                values[f"{own}.{kind}.group_proj"] = p["end.groups"].flatten(0, 1)
    return values


def make_model(cfg, shape, p, rt):
    model = gpt.GPT(cfg, rt).double()
    values = read_parameters(model, shape, p)
    params = dict(model.named_parameters())
    assert values.keys() == params.keys()
    if rt.world_size > 1:  # the last row is padding
        values["ngram"] = values["ngram"].chunk(rt.world_size)[rt.rank]
    with torch.no_grad():
        for name, value in values.items():
            params[name][: len(value)].copy_(value) if value.dim() else params[name].copy_(value)
        model.ngram_signs = p["signs"]
    return model


@pytest.fixture(autouse=True)
def use_small_constants(request, monkeypatch):
    """The reference's miniature has 16 rows of signs, and fewer hidden channels of token gates."""
    if request.function.__name__ in ("test_forward_and_gradients", "test_validation"):
        monkeypatch.setattr(gpt, "NUM_SIGN_ROWS", SHAPE.sign_rows)
        monkeypatch.setattr(gpt.TokenGates, "HIDDEN", SHAPE.gate_hidden)


def make_shard(seed=0, documents=900):
    """A shard of documents of 1 to 40 tokens."""
    rng = np.random.default_rng(seed)
    parts = [[SHAPE.bos, *rng.integers(0, SHAPE.bos, length)] for length in rng.integers(0, 40, documents)]
    return np.concatenate(parts)


PREFIXES = [i // 3 if i % 4 else -1 for i in range(SHAPE.vocab)]


def make_batch(cfg, call, classes=None):
    """One batch of the buffers of all ranks."""
    rows = np.array([buffer for buffer, _ in call])
    return gpt.make_batch(rows, SHAPE.bos, True, cfg.max_attention_len)._replace(classes=classes)


def list_calls():
    return list(reference.packed_batches(SHAPE, [make_shard()]))


@pytest.mark.recipe
@pytest.mark.parametrize("fast", [frozenset(), WITHOUT_OPTIMIZER], ids=["plain", "fast"])
@pytest.mark.parametrize("step", slow_but([0, 10, 19, 20, 28, 32, 36, 41], 41), ids=str)
def test_forward_and_gradients(step, fast):
    """Every stage: logits, loss, and the gradient of every parameter."""
    cfg, p = make_config(), reference.init_params(SHAPE, spread=0.1)
    with torch.no_grad():
        p["embed"] = p["embed"] + 0.003 * torch.randn_like(p["embed"])
    rt = make_runtime(dtype=torch.float64, fast=fast)
    model, state, call = make_model(cfg, SHAPE, p, rt), gpt.Schedule(cfg).at(step), list_calls()[step]
    model.is_tied = False  # embedding and head of the reference differ
    model.head.prefix_tokens.copy_(torch.tensor(PREFIXES))
    num_tokens, num_classes = len(call[0][0]) - 1, reference.candidate_count(SHAPE, step)
    inputs = gpt.make_step_inputs(state, RANKS * num_tokens, num_tokens, rt, cfg)
    offsets = [reference.sweep_start(SHAPE, rank) for rank in range(RANKS)]
    classes = None
    if num_classes:
        chosen = [gpt.choose_classes(np.array(buffer[1:]), num_classes, SHAPE.vocab, offset)[0]
                  for (buffer, _), offset in zip(call, offsets)]  # fmt: skip
        classes = torch.tensor(np.stack(chosen))
    batch = make_batch(cfg, call, classes)

    # Logits
    logits = model.head.compute_logits(model.run_layers(batch.inputs, batch.doc_ids, inputs))
    for rank, (buffer, boundaries) in enumerate(call):
        windows = reference.windows_at(SHAPE, step)
        _, expected = reference.forward(SHAPE, p, buffer[:-1], boundaries, windows)
        assert (logits[rank * num_tokens :][:num_tokens] - expected).abs().max() < 1e-9

    # Loss and gradients
    weights = torch.tensor(state.loss_weights, dtype=torch.float64)
    loss = model(*batch[:3], inputs, weights, batch.classes)
    loss.backward()
    theirs, grads, _ = reference.gradients(SHAPE, p, call, step, PREFIXES, offsets)
    assert loss.item() / RANKS == pytest.approx(theirs, rel=1e-12)
    expected = read_parameters(model, SHAPE, grads)
    for name, param in model.named_parameters():
        ours = param.grad if param.grad is not None else torch.zeros_like(param)
        assert (ours / RANKS - expected[name]).abs().max() < 1e-9, name


@pytest.mark.recipe
def test_validation():
    """The final validation: its windows, whole documents, next tokens only."""
    cfg, p, rt = make_config(), reference.init_params(SHAPE, spread=0.1), make_runtime(dtype=torch.float64)
    model, state = make_model(cfg, SHAPE, p, rt).eval(), gpt.Schedule(cfg).at(cfg.num_iterations)
    chunk = make_shard(1)[:97]
    batch = gpt.make_batch(chunk[None], SHAPE.bos)
    inputs = gpt.make_step_inputs(state, 96, 96, rt, cfg)
    ours = model(*batch[:3], inputs).item() / 96
    assert ours == pytest.approx(reference.validation_loss(SHAPE, p, [chunk]), rel=1e-12)


def test_schedule():
    """Rates and decays of all groups, momentum, weights, windows, classes and YaRN of every step, and the tokens."""
    cfg, full = gpt.make_config({"preset": "frontier"}), reference.RECORD_92
    schedule = gpt.Schedule(cfg)
    assert schedule.count_tokens() == 328_663_040
    assert [end for _, _, end in schedule.stage_ranges()] == [320, 681, 965, 1107, 1174, 1194]  # 965: more classes
    table = gpt.Group(every=2, late_every=4)
    late, events = cfg.step_at(cfg.late_start), 0
    for step in range(cfg.num_iterations):
        state, (narrow, wide) = schedule.at(step), (reference.yarn(full, kind, full.stage(step)) for kind in (0, 1))
        for name, group in cfg.groups.items():
            factor = schedule.compute_lr_factor(step, name)
            assert factor == pytest.approx(reference.lr_factor(full, step), abs=1e-12)
            assert (state.lr[name], state.weight_decay[name]) == (group.lr * factor, group.weight_decay * factor)
        m, fast_beta, fast_weight = reference.rail_settings(full, step)
        assert (state.momentum, state.fast_beta, state.fast_weight) == pytest.approx((m, fast_beta, fast_weight))
        short, long = full.stage_blocks[full.stage(step)]
        assert state.windows == (128 * long, 128 * short)
        weights, prefix = reference.loss_weights(full, step)
        used = [*weights, *([prefix] if prefix else [])]
        assert state.loss_weights == pytest.approx(used, abs=1e-12)
        assert state.stage.num_classes == reference.candidate_count(full, step)
        for ours, (frequencies, scale) in ((state.rope["short"], narrow), (state.rope["long"], wide)):
            assert ours.softmax_scale == pytest.approx(scale, rel=1e-12)
            assert ours.frequencies[:32] == pytest.approx(frequencies.numpy(), rel=1e-12)
        tokens, cap = full.stage_tokens[full.stage(step)], full.stage_caps[full.stage(step)]
        assert (state.stage.tokens_per_step, state.stage.seq_len, state.stage.max_doc_len) == (8 * tokens, tokens, cap)
        is_event = (step + 1) % table.period(step, late) == 0
        assert is_event == reference.table_event(full, step)
        events += is_event
        assert table.count_updates(step + 1, late) == events
    assert events == 382 and schedule.at(1194).windows == (2560, 768)
    assert cfg.step_at(cfg.untie_frac) == 1174  # untied after the next odd step, 1175


def make_tokens(seed, buffers=2, length=256):
    """Buffers of several documents."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 49, (buffers, length + 1))
    rows[rng.random(rows.shape) < 0.02] = 49
    rows[:, 0] = 49
    return gpt.make_batch(rows, 49)


@pytest.mark.parametrize("fast", [frozenset(), WITHOUT_OPTIMIZER], ids=["plain", "fast"])
def test_the_number_of_segments_changes_no_bit(fast):
    """Several ranks have several segments, and one rank has one: loss and gradients are equal to the last bit."""
    torch.manual_seed(0)
    cfg, rt = gpt.make_config(SMALL), make_runtime(fast=fast)
    model, batch = gpt.GPT(cfg, rt), make_tokens(0, length=256)[:3]
    with torch.no_grad():
        for param in model.parameters():
            param += 0.02 * torch.randn_like(param)
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


@pytest.mark.parametrize("num_rows, order", [(84_602_880, 3), (377_280, 2)])
def test_hashes(num_rows, order):
    """Rows and signs of the table against arithmetic in Python integers, int32 wrap included."""
    rng, starts = np.random.default_rng(0), [0, 300]
    tokens = torch.tensor(rng.integers(0, 50304, 600), dtype=torch.int32)
    is_start = torch.zeros(600, dtype=torch.bool)
    is_start[starts] = True
    rows, signs = gpt.hash_ngrams(tokens, is_start, num_rows, order)
    assert rows.shape == signs.shape == (order - 1, 600)
    size = dataclasses.replace(reference.RECORD_92, table_rows=num_rows * 2 // (order - 1))  # each part of `rows`
    for start in starts:
        part = slice(start, start + 300)
        for ours, theirs in ((rows, reference.ngram_rows), (signs, reference.sign_rows)):
            for row, expected in zip(ours, theirs(size, tokens[part])):
                assert row[part].tolist() == expected
    signs = gpt.GPT(gpt.make_config(SMALL)).ngram_signs
    assert signs.abs().unique().tolist() == [1.0] and abs(signs.mean()) < 0.01  # sd 0.001


@pytest.mark.parametrize("need", [0, 700, 2000])
def test_classes_of_the_sampled_loss(need):
    """All targets and the next negatives of the sweep, for several calls, against the reference."""
    shape, rng, offset = reference.RECORD_92, np.random.default_rng(need), 50_000
    theirs = offset
    for count in (300 + need, 40_000 + need):
        targets = rng.permutation(50_257)[:300] if count < 40_000 else rng.permutation(50_257)[:40_000]
        ours, offset = gpt.choose_classes(targets, count, shape.vocab, offset)
        expected, theirs = reference.candidate_set(shape, targets, theirs, count)
        assert ours.tolist() == expected and offset == theirs
    with pytest.raises(gpt.RunError, match="num_classes=299"):
        gpt.choose_classes(np.arange(300), 299, shape.vocab, 0)


@pytest.mark.parametrize("gib, ranks, rows", [
    (79, 1, 21_150_720), (79, 8, 84_602_880), (139, 1, 42_301_440), (40, 1, 377_280), (24, 1, 377_280)])  # fmt: skip
def test_the_table_that_fits(gib, ranks, rows, monkeypatch):
    """A row has 768 bfloat16 values and two float32 moments. 40 GiB of each GPU are for everything else."""
    memory = gib * 2**30
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=memory))
    rt = dataclasses.replace(make_runtime(world_size=ranks), device=torch.device("cuda"))
    cfg = gpt.make_config({"preset": "frontier"})
    assert gpt.choose_ngram_rows(cfg, rt) == rows
    assert gpt.choose_ngram_rows(cfg, make_runtime()) == 377_280  # a CPU
    larger = [n for n in gpt.NGRAM_ROWS if n > rows]
    assert not larger or larger[-1] * 1544 > max(0, memory - 40 * 2**30) * ranks


def test_pieces_of_documents():
    """The published ends of attention pieces for documents that end at 3072, 3100, 8220 and 8221."""
    tokens = np.zeros((1, 8222), dtype=np.int64)
    tokens[0, [0, 3072, 3100, 8220]] = 1
    doc_ids = gpt.make_batch(tokens, 1, True, 2560).doc_ids
    ends = [*(np.flatnonzero(np.diff(doc_ids.numpy())) + 1).tolist(), 8221]
    assert ends == reference.attention_boundaries([3072, 3100, 8220, 8221], 2560)
    assert ends == [2560, 3072, 3100, 5660, 8220, 8221]


def test_a_row_of_the_table_at_the_published_values():
    """Four events of a row, one of them missed. The second and the fourth row are as if all were its own."""
    rule = gpt.RULES["row_adam"]
    table, grads = torch.zeros(1, 4, dtype=torch.float64), {1: [0.3, -0.2, 0.1, 0.05], 3: [-0.1, -0.2, 0.4, 0.0]}
    grads[4], state = [0.2, 0.2, -0.2, 0.1], rule.init_state(table)
    expected = {
        1: ([-0.890086, 0.593390, -0.296695, -0.148348], 0.00178125),
        3: ([-0.558033, 1.243540, -1.596995, -0.148348], 0.00423258),
        4: ([-1.335291, 0.446783, -0.794696, -0.536977], 0.00698865),
    }
    for event in range(1, 5):
        beta2, decay, wide = (0.95, 5, 0) if event < 4 else (0.9025, 10, 1)
        number = lambda x: torch.tensor(x, dtype=torch.float64)
        args = gpt.UpdateArgs(
            lr=number([0.56]), weight_decay=number([0.56 * 0.56 * 0.005 * decay]), momentum=number(0.0),
            grad_scale=number(1.0), bias_correction1=number(1.0), bias_correction2=number(1 - beta2**event),
            betas=(0.0, beta2), eps=1e-10, cautious=True,
            decay_time=number(-np.log(0.95) * (event + wide)),
        )  # fmt: skip
        before = table.clone()
        rule.update(table, torch.tensor([grads.get(event, [0.0] * 4)], dtype=torch.float64), state, args)
        if event in expected:
            assert table[0].tolist() == pytest.approx(expected[event][0], abs=1e-6)
            assert state["exp_avg_sq"].item() == pytest.approx(expected[event][1], abs=1e-8)
        else:
            assert torch.equal(table, before)


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
    with pytest.raises(gpt.RunError, match="vocab_file"):
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
    """Products of e4m3 and e5m2. The scales follow a step behind. Validation is in bfloat16."""
    torch.manual_seed(0)
    cfg = gpt.make_config({**SMALL, "zero_init": "off"})
    model, rt = gpt.GPT(cfg, make_runtime(dtype=torch.bfloat16, fp8=frozenset({"fp8_mlp"}))), make_runtime()
    mlp, plain = gpt.MLP(cfg).bfloat16(), gpt.MLP(cfg).bfloat16()
    plain.load_state_dict(mlp.state_dict())
    scales, errors = gpt.DelayedScales(mlp, rt.comm), []
    error = lambda ours, exact: ((ours - exact).float().norm() / exact.float().norm()).item()
    x = gpt.rms_norm(torch.randn(64, 96)).bfloat16().requires_grad_()
    for _ in range(2):
        outputs = []
        for module, ops in ((mlp, model.ops), (plain, gpt.Operations())):
            y = module(x, None, ops)
            y.float().square().sum().backward()
            outputs.append((y, x.grad, module.up_down.grad))
            x.grad = module.up_down.grad = None
        errors.append([error(ours, exact) for ours, exact in zip(*outputs)])
        scales.collect()
        scales.start()
        scales.finish()
    largest = (x @ mlp.up_down[0]).relu().square().max().item()
    assert mlp.scaling.hidden_scale.item() == pytest.approx(1.03 / 448 * largest, rel=0.15)  # of FP8 products
    assert plain.scaling.amax.grad is None
    assert all(0 < e < bound for e, bound in zip(errors[1], (0.08, 0.15, 0.15)))
    assert torch.equal(mlp(x, None, model.eval_ops), plain(x, None, gpt.Operations()))


@pytest.mark.parametrize("fast", [frozenset(), CPU_FORMS], ids=["plain", "fast"])
@pytest.mark.parametrize("part", PARTS)
def test_without(part, fast, monkeypatch):
    """Without each part of the newest recipe two steps are finite."""
    torch.manual_seed(0)
    stages = (
        gpt.Stage(1, 256, 128, 128, None, 1.0, None, ((1, 1), (0.5, 0.5), (0.25, 0)), (0.25,), 48),
        gpt.Stage(1, 384, 128, lr_factor=1.5),
    )
    small = dict(SMALL, tokens_per_step=256, seq_len=128, max_doc_len=128, val_seq_len=128, num_iterations=20)
    small |= dict(extension_steps=2, stages=stages, fp8="on", fp8_parts="mlp,qkv", matrix_dtype="bfloat16")
    small.pop("preset"), small.pop("device")
    monkeypatch.setitem(gpt.PRESETS, "small", ("frontier", "", small))
    options = dict(preset="small", device="cpu")
    base, cfg = gpt.make_config(options), gpt.make_config({**options, "without": part})
    before, after = gpt.plain_dict(base), gpt.plain_dict(cfg)
    assert {name for name in after if after[name] != before[name]} - {"without"}
    fp8 = frozenset({"fp8_mlp", "fp8_qkv"} if cfg.fp8 == "on" else ())
    trainer = gpt.Trainer(cfg, make_runtime(fp8=fp8, fast=fast))
    batch = make_tokens(0, length=128)
    for step in (18, 19):  # one of them updates Adam
        assert trainer.train_step(iter([batch] * 9), trainer.schedule.at(step)).isfinite()
    assert all(param.isfinite().all() for param in trainer.model.parameters())


FRONTIER = ("--preset=smoke_frontier", "--micro_batch_tokens=512")


UNTIED_LATE = "--untie_frac=0.9"  # after 12 steps. All gradients are applied after 4, 8, 12 and 14 steps


@pytest.fixture(scope="module")
def whole_run(shards, tmp_path_factory):
    """A run of the recipe with all mechanisms, without a stop."""
    return smoke_run(shards, tmp_path_factory.mktemp("whole"), *FRONTIER, UNTIED_LATE)


@pytest.mark.slow
def test_ranks_and_resumed_runs_agree_to_the_last_bit(shards, tmp_path, whole_run, capsys):
    """Two ranks, a checkpoint of a tied head and one of an untied head. All end with the loss of one rank."""
    two = smoke_run(shards, tmp_path, *FRONTIER, UNTIED_LATE, "--checkpoint_every=2", nproc=2)
    assert two["final_val_loss"] == whole_run["final_val_loss"]
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name for path in folder.glob("*/step_*")) == ["step_000012", "step_000014"]
    last = gpt.make_config({"preset": "smoke_frontier"})
    assert gpt.Optimizer(gpt.GPT(last), last, make_runtime()).untie_step == 7
    for step in (8, 12):
        stopped = tmp_path / str(step)
        stopped.mkdir()
        smoke_run(shards, stopped, *FRONTIER, UNTIED_LATE, f"--checkpoint_every={step}")
        (path,) = stopped.glob(f"checkpoints/*/*/step_{step:06d}")
        assert gpt.read_metadata(path)["is_tied"] == (step == 8)
        new = tmp_path / f"from_{step}"
        new.mkdir()
        resumed = smoke_run(shards, new, *FRONTIER, UNTIED_LATE, f"--resume={path}")
        assert resumed["final_val_loss"] == whole_run["final_val_loss"]
        assert resumed["resumed_at"] == [step]
        capsys.readouterr()
        assert sample.main([str(path), "--prompt=abc", "--max_new_tokens=5", "--device=cpu"]) == 0
        assert capsys.readouterr().out.startswith("abc")


def test_telemetry_and_guard(shards, tmp_path):
    """Telemetry measures every group with an update. The guard does not act."""
    result = smoke_run(shards, tmp_path, *FRONTIER, "--telemetry_every=4", "--guard=on")
    lines = [json.loads(line) for line in result["path"].with_suffix(".jsonl").read_text().splitlines()]
    measured = [line for line in lines if line["event"] == "telemetry"]
    assert [line["step"] for line in measured] == [4, 8, 12]
    assert all(np.isfinite(line["loss"]) for line in measured)
    groups = {"matrix", "head", "value_embed", "ngram", "scalar", "residual", "mix", "gate"}
    *tied, untied = (set(line["groups"]) for line in measured)  # it unties in step 8, after its updates
    assert tied == [groups, groups] and untied == {*groups, "embed"}
    assert result["guard_actions"] == 0


@pytest.mark.parametrize("lengths", [(None, 1024), (1024, None)])
def test_a_micro_batch_has_the_longest_sequence_of_all_stages(lengths):
    stages = tuple(gpt.Stage(1, 384, 128, seq_len=length) for length in lengths)
    changes = dict(stages=stages, extension_steps=0, seq_len=128, tokens_per_step=1024)
    assert gpt.make_config({**SMALL, **changes, "micro_batch_tokens": 1024}).stages == stages
    with pytest.raises(gpt.RunError, match="seq_len=1024.*--micro_batch_tokens=896"):
        gpt.make_config({**SMALL, **changes, "micro_batch_tokens": 896})


@pytest.mark.parametrize("zero_init, zero", [("on", "attention mlp"), ("mlp", "mlp"), ("off", "")])
def test_the_initial_standard_deviation_of_matrices(zero_init, zero):
    """init_std divided by the root of the fan-in, except for output projections that begin with zeros."""
    torch.manual_seed(0)
    block = gpt.GPT(gpt.make_config({**SMALL, "zero_init": zero_init, "init_std": 0.7})).blocks[0]
    (v, attention_out), (up, mlp_out) = block.attention.v_proj, block.mlp.up_down
    stds = {name: weight.std().item() for name, weight in dict(
        q=block.attention.qk[0], k=block.attention.qk[-1], v=v, attention=attention_out, up=up, mlp=mlp_out).items()}
    expected = {**dict.fromkeys(stds, 0.7 * 96**-0.5), "mlp": 0.7 * 352**-0.5, **dict.fromkeys(zero.split(), 0)}
    assert stds == pytest.approx(expected, rel=0.03)


def test_a_last_stage_without_steps(shards):
    """Fewer steps than stages. The final validation still has its inputs."""
    for num_iterations in (1, 2, 3):
        cfg = gpt.make_config({"preset": "smoke_frontier", "num_iterations": num_iterations, "extension_steps": 0})
        state = gpt.Schedule(cfg).at(num_iterations)
        assert len(state.stage.loss_weights) == len(state.loss_weights) == {1: 2, 2: 1, 3: 1}[num_iterations]
