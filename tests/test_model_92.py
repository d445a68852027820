"""The newest recipe against a reference in float64 (record92_reference.py), and its mechanisms."""

import dataclasses

import numpy as np
import pytest
import record92_reference as reference
import torch
from conftest import CPU_FORMS, gpt, make_runtime, smoke_run
from record92_reference import RECORD_92, write_vocabulary
from run_float64 import Torch

from tools.compare import find_parts

CPU = torch.device("cpu")
SMALL = dict(
    preset="record_92", device="cpu", vocab_size=50, vocab_multiple=2, model_dim=48, num_heads=6, head_dim=8,
    short_qk_dim=4, ngram_rows=202, embed_dtype="float32", matrix_dtype="float32", mudd_groups=4,
    layers=tuple(dataclasses.replace(spec, v_dim=spec.v_dim and 4) for spec in gpt.RECORD_92_LAYERS),
)  # fmt: skip
LENGTHS = [  # steps, tokens of a rank, longest document and number of classes of each stage
    (10, 16, 7, 24), (10, 24, 12, 32), (8, 32, 18, 40), (4, 32, 18, 48), (5, 28, 18, None), (6, 16, 18, None),
]  # fmt: skip
TINY = dict(
    vocab_size=60, vocab_multiple=64, model_dim=32, num_heads=4, head_dim=8, short_qk_dim=4, ngram_rows=400,
    mlp_ratio=1.5, mlp_lr_mul=(1.5**0.5, 2 * 1.5**0.5), mudd_groups=4, num_iterations=42, extension_steps=6,
    layers=tuple(dataclasses.replace(spec, v_dim=spec.v_dim and 4) for spec in gpt.RECORD_92_LAYERS),
    embed_dtype="float32", matrix_dtype="float32", max_attention_len=13, yarn_max_window=52,
    val_windows=(80, 24), tokens_per_step=64, seq_len=32, max_doc_len=18,
    stages=tuple(
        dataclasses.replace(
            stage, duration=steps, tokens_per_step=2 * length, seq_len=length, max_doc_len=cap,
            window_long=stage.window_long // 32, window_short=stage.window_short // 32, num_classes=classes)
        for stage, (steps, length, cap, classes) in zip(gpt.RECORD_92_STAGES, LENGTHS)),
)  # fmt: skip
NUMBERS = dict(
    qkv_scale=("scales", 0), proj_scale=("scales", 1), resid_attn=("residual", 0), resid_mlp=("residual", 1),
    proj_out=("output", 0), down_out=("output", 1),
)  # fmt: skip
COEFFICIENTS = dict(
    mudd_v=["m0", "m1", "m2"], mudd_x=["m3", "m4", "m5"], ve_gate=["m6", "m7"], resid_attn=["m8"],
    attn_out=["m9"], x_in=["m10"], ngram=["m11"], resid_mlp=["m12"], mlp_out=["m13"],
)  # fmt: skip


def list_coefficients(layer, scalar, shape):
    """The reference's names of a scalar of token gates."""
    if scalar.source == "mudd":
        return COEFFICIENTS[scalar.name]
    if scalar.source == "mudd_out":
        return [f"n{i}" for i in range(len(shape.topology.end))]
    names = dict(head_gate=f"gate.{layer}", skip_gate="skip", ngram_in="ngram.0")
    return [names.get(scalar.name, f"{scalar.name}.{layer}")]


def convert_parameters(tensors, cfg, shape):
    """Parameters or gradients of the model by the reference's names. What only the reference has is 0."""
    left, sizes, p = dict(tensors), reference.parameter_sizes(shape), {}
    p.update(embed=left.pop("embed"), head=left.pop("head.weight"), table=left.pop("ngram"))
    p.update(smear_gate=left.pop("blocks.0.smear_gate"), gate_scale=left.pop("gates_scale")[0])
    p |= {f"ve.{layer}": left.pop(f"value_embeds.{i}") for i, layer in enumerate(shape.topology.value)}
    p |= {name: p["gate_scale"].new_zeros(sizes[name]) for name in ("scales", "residual", "output")}
    scalars = [(layer, scalar) for layer in range(cfg.num_layers) for scalar in gpt.layer_scalars(cfg, layer)]
    for layer, scalar in scalars:
        if scalar.source in ("scalar", "residual", "mix"):
            (value,) = left.pop(f"blocks.{layer}.scalars.{scalar.name}")
            if scalar.name in ("skip", "smear"):
                p[scalar.name] = value
            else:
                name, column = NUMBERS[scalar.name]
                p[name][layer, column] = value

    # Matrices. RoPE rotates channels j and j + K/2 of a head here, 2j and 2j + 1 in the published layout. So
    # the rows of `qk` are in another order
    for layer in shape.topology.attention:
        own, width = f"blocks.{layer}.attention", reference.qk_width(shape, layer)
        qk = left.pop(f"{own}.qk")
        p[f"qk.{layer}"] = qk.unflatten(1, (-1, 2, width // 2)).transpose(2, 3).reshape(qk.shape)
        p[f"v.{layer}"], p[f"o.{layer}"] = left.pop(f"{own}.v"), left.pop(f"{own}.proj")
        if f"ve_gate.{layer}" in sizes:
            p[f"ve_gate.{layer}"] = left.pop(f"{own}.ve_gate_weight")
    for slot in shape.topology.mlps:
        name = "second_mlp" if slot.endswith("b") else "mlp"
        p[f"mlp.{slot}.in"], p[f"mlp.{slot}.out"] = left.pop(f"blocks.{slot.rstrip('b')}.{name}.up_down").mT
    last = shape.topology.last
    sources = dict(pre=("gates", 0), post=("gates", shape.topology.post), mudd=("mudd", last))
    for name, source in {**sources, "end": ("mudd_out", last)}.items():
        theirs = [output for output, size, _ in reference.outputs_of(shape, name) for _ in range(size)]
        wanted = [
            theirs.index(one) + i for layer, scalar in scalars
            if scalar.source == source[0] and (source[0] != "gates" or cfg.layers[layer].gates_from == source[1])
            for one in list_coefficients(layer, scalar, shape) for i in range(theirs.count(one))]  # fmt: skip
        own, order = f"blocks.{source[1]}.{source[0]}", np.argsort(wanted)
        assert sorted(wanted) == list(range(len(theirs)))
        p[f"{name}.w1"], p[f"{name}.w2"] = left.pop(f"{own}.fc"), left.pop(f"{own}.proj")[order]
        p[f"{name}.bias"] = left.pop(f"{own}.bias")[order]
    p["end.groups"] = left.pop(f"blocks.{last}.mudd_out.group_proj").view(sizes["end.groups"])
    assert not left
    assert {name: tuple(value.shape) for name, value in p.items()} | {"signs": sizes["signs"]} == sizes
    return p


class Example:
    """A model with random parameters, the reference's shape and parameters. Two ranks read two buffers."""

    def __init__(self):
        self.cfg = gpt.change_options(gpt.load_preset("record_92"), TINY)  # sequences may have any length
        self.shape = dataclasses.replace(reference.shape_of(gpt.plain_dict(self.cfg)), gradient_scale=1.0)
        torch.manual_seed(0)
        self.model = model = gpt.GPT(self.cfg).double()
        for param in model.parameters():
            param.data += 0.1 * torch.randn_like(param)
        model.is_tied = False  # embedding and head differ
        self.prefixes = [i // 3 if i % 4 else -1 for i in range(64)]
        model.head.prefix_tokens.copy_(torch.tensor(self.prefixes))
        self.p = self.convert({name: param.detach() for name, param in model.named_parameters()})
        self.p["signs"] = model.ngram_signs

    def convert(self, tensors):
        return convert_parameters(tensors, self.cfg, self.shape)


@pytest.fixture(name="float64")
def use_float64(monkeypatch):
    """Also the tables of RoPE have float64."""
    monkeypatch.setattr(gpt, "torch", Torch())


@pytest.mark.recipe
@pytest.mark.parametrize("fast", [frozenset(), CPU_FORMS], ids=["plain", "fast"])
@pytest.mark.parametrize("step", [0, 10, 19, 20, 28, 32, 36, 41])
def test_forward_and_gradients(step, fast, float64):
    """Every stage: logits, loss, and the gradient of every parameter."""
    example = Example()
    cfg, shape, model, p = example.cfg, example.shape, example.model, example.p
    state, ops = gpt.Schedule(cfg).at(step), gpt.make_operations(cfg, fast, torch.float64)
    rng, bos = np.random.default_rng(0), shape.bos
    shard = np.concatenate([[bos, *rng.integers(0, bos, size)] for size in rng.integers(0, 40, 900)])
    call = list(reference.packed_batches(shape, [shard]))[step]
    length, num_classes = len(call[0][0]) - 1, reference.candidate_count(shape, step)
    offsets, classes = [reference.sweep_start(shape, rank) for rank in range(2)], None
    if num_classes:
        chosen = [gpt.choose_classes(np.array(buffer[1:]), num_classes, shape.vocab, offset)[0]
                  for (buffer, _), offset in zip(call, offsets)]  # fmt: skip
        classes = torch.tensor(np.stack(chosen))
    rows = np.array([buffer for buffer, _ in call])
    batch = gpt.make_batch(rows, shape.bos, cfg.max_attention_len)._replace(classes=classes)
    inputs = gpt.make_step_inputs(state, 2 * length, length, cfg, CPU)

    logits = model.head.compute_logits(model.run_layers(batch, inputs, ops)).chunk(2)
    for ours, (buffer, boundaries) in zip(logits, call):
        windows = reference.windows_at(shape, step)
        assert (ours - reference.forward(shape, p, buffer[:-1], boundaries, windows)[1]).abs().max() < 1e-9

    weights = torch.tensor(state.loss_weights, dtype=torch.float64)
    loss = model(batch, inputs, ops, weights)
    loss.backward()
    theirs, expected, _ = reference.gradients(shape, p, call, step, example.prefixes, offsets)
    assert loss.item() / 2 == pytest.approx(theirs, rel=1e-12)
    grads = {name: torch.zeros_like(param) if param.grad is None else param.grad / 2
             for name, param in model.named_parameters()}  # fmt: skip
    errors = {name: (grad - expected[name]).abs().max() for name, grad in example.convert(grads).items()}
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.recipe
def test_validation(float64):
    """The final validation: its windows of 80 and 24, a document of 90 tokens, next tokens only."""
    example = Example()
    cfg, chunk = example.cfg, np.random.default_rng(0).integers(0, example.shape.bos, 97)
    chunk[[0, 7]] = example.shape.bos
    inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(42), 96, 96, cfg, CPU)
    ops = gpt.make_operations(cfg, (), torch.float64)
    ours = example.model(gpt.make_batch(chunk[None], example.shape.bos), inputs, ops).item() / 96
    assert ours == pytest.approx(reference.validation_loss(example.shape, example.p, [chunk]), rel=1e-12)


@pytest.mark.recipe
def test_schedule():
    """Rates and decays of all groups, momentum, weights, windows, classes, YaRN and tokens of every step."""
    cfg = gpt.make_config({"preset": "record_92"})
    schedule = gpt.Schedule(cfg)
    assert schedule.count_tokens() == 328_663_040
    ends = [end for _, _, end in schedule.stage_ranges()]
    assert ends == [320, 681, 965, 1107, 1174, 1194]  # from step 965 on with more classes
    table = gpt.Group(every=2, late_every=4)
    late, events = cfg.step_at(cfg.late_start), 0
    ropes = [reference.windows_at(RECORD_92, RECORD_92.first(stage)) for stage in range(5)]
    for step in range(cfg.num_iterations):
        state, stage = schedule.at(step), RECORD_92.stage(step)
        for name, group in cfg.groups.items():
            factor = schedule.compute_lr_factor(step, name)
            assert factor == pytest.approx(reference.lr_factor(RECORD_92, step), abs=1e-12)
            assert state.lr[name] == group.lr * factor
            assert state.weight_decay[name] == group.weight_decay * factor
        rails = reference.rail_settings(RECORD_92, step)
        momenta = (gpt.FAST_BETA, gpt.FAST_WEIGHT) if state.has_slow_momentum else (state.momentum, 1)
        assert (state.momentum, *momenta) == pytest.approx(rails)
        weights, prefix = reference.loss_weights(RECORD_92, step)
        assert state.loss_weights == pytest.approx([*weights, *([prefix] if prefix else [])], abs=1e-12)
        assert bool(state.stage.prefix_weight) == bool(prefix)
        assert state.stage.num_classes == reference.candidate_count(RECORD_92, step)
        assert_equal_rope(state, ropes[stage])
        tokens = RECORD_92.stage_tokens[stage]
        assert (state.stage.tokens_per_step, state.stage.seq_len) == (8 * tokens, tokens)
        assert state.stage.max_doc_len == RECORD_92.stage_caps[stage]
        is_event = (step + 1) % table.period(step, late) == 0
        assert is_event == reference.table_event(RECORD_92, step)
        events += is_event
        assert table.count_updates(step + 1, late) == events
    assert_equal_rope(schedule.at(1194), reference.windows_at(RECORD_92, 1193, validation=True))
    assert events == 382 and schedule.at(1194).windows == (2560, 768)
    assert cfg.step_at(cfg.untie_frac) == 1174  # untied after the next odd step, 1175


def assert_equal_rope(state, expected):
    """Windows, frequencies and softmax scales."""
    assert state.windows == (expected.long, expected.short)
    for kind, frequencies in (("short", expected.narrow), ("long", expected.wide)):
        assert state.rope[kind].frequencies[:32] == pytest.approx(frequencies.numpy(), rel=1e-12)
        assert not state.rope[kind].frequencies[32:].any()
    scales = expected.narrow_scale, expected.wide_scale
    assert [state.rope[kind].softmax_scale for kind in ("short", "long")] == pytest.approx(scales, rel=1e-12)


def test_n_grams_of_four_to_six_tokens():
    """Equal n-grams have equal rows, in each of three sequences. In parts of 2^20 rows others have other rows, except
    by chance. N-grams do not reach across the start of a sequence. A row by hand: the XOR of the products."""
    rng = np.random.default_rng(0)
    tokens, is_start = np.tile(rng.integers(0, 257, 600, dtype=np.int32), 3), np.arange(1800) % 600 == 0
    rows = gpt.hash_ngrams(tokens, is_start, 5 * 2**20, 6)
    for length, row in enumerate(rows, 2):
        part = row.reshape(3, 600) - (length - 2) * 2**20
        assert np.array_equal(part[0], part[1]) and np.array_equal(part[0], part[2]), length
        assert part.min() >= 0 and (part[0] == 2**20 - 1).tolist() == [i < length - 1 for i in range(600)]
        expected = len({tuple(tokens[i - length + 1 : i + 1]) for i in range(length - 1, 600)})
        assert expected - 2 <= len(set(part[0, length - 1 :].tolist())) <= expected
    mixed = 17351 * tokens[9] ^ 60961 * tokens[8] ^ 45259 * tokens[7] ^ 50131 * tokens[6]
    assert rows[2][9] == mixed % (2**20 - 1) + 2 * 2**20


@pytest.mark.parametrize("num_rows, order", [(84_602_880, 3), (377_280, 2), (163_840, 6), (1002, 5)])
def test_hashes(num_rows, order):
    """Rows and signs of arrays and tensors against arithmetic in Python integers, int32 wrap included."""
    rng, starts = np.random.default_rng(0), [0, 300]
    tokens, is_start = rng.integers(0, 50304, 600, dtype=np.int32), np.zeros(600, dtype=bool)
    is_start[starts] = True
    given, copies = (tokens, is_start), (torch.tensor(tokens), torch.tensor(is_start))
    rows, signs = gpt.hash_ngrams(*given, num_rows, order), gpt.hash_signs(*given, order)
    more = [*gpt.hash_ngrams(*copies, num_rows, order), *gpt.hash_signs(*copies, order)]
    for ours, tensor in zip([*rows, *signs], more, strict=True):
        assert torch.equal(torch.tensor(ours), tensor) and ours.dtype == np.int32
    assert np.array_equal(tokens, copies[0].numpy()) and len(rows) == len(signs) == order - 1
    shape = dataclasses.replace(RECORD_92, table_rows=num_rows)
    for start in starts:
        part = slice(start, start + 300)
        for ours, theirs in ((rows, reference.ngram_rows), (signs, reference.sign_rows)):
            for row, expected in zip(ours, theirs(shape, tokens[part], order), strict=True):
                assert row[part].tolist() == expected
    assert order < 4 or signs[1] is signs[-1]  # hashed once
    signs = gpt.make_ngram_signs(8192, 96)
    assert signs.abs().unique().tolist() == [1.0] and abs(signs.double().mean()) < 0.01  # sd 0.001


@pytest.mark.parametrize("need", [0, 700, 2000])
def test_classes_of_the_sampled_loss(need):
    """All targets and the next negatives of the sweep, for several calls, against the reference."""
    rng, offset = np.random.default_rng(need), 50_000
    theirs = offset
    for count in (300 + need, 40_000 + need):
        targets = rng.permutation(50_257)[: count - need]
        ours, offset = gpt.choose_classes(targets, count, RECORD_92.vocab, offset)
        expected, theirs = reference.candidate_set(RECORD_92, targets, theirs, count)
        assert ours.tolist() == expected and offset == theirs
    with pytest.raises(gpt.RunError, match="num_classes=299"):
        gpt.choose_classes(np.arange(300), 299, RECORD_92.vocab, 0)


def test_pieces_of_documents():
    """The published ends of attention pieces for documents that end at 3072, 3100, 8220 and 8221."""
    tokens = np.zeros((1, 8222), dtype=np.int64)
    tokens[0, [0, 3072, 3100, 8220]] = 1
    doc_ids = gpt.make_batch(tokens, 1, 2560).doc_ids
    ends = [*(np.flatnonzero(np.diff(doc_ids.numpy())) + 1).tolist(), 8221]
    assert ends == reference.attention_boundaries([3072, 3100, 8220, 8221], 2560)
    assert ends == [2560, 3072, 3100, 5660, 8220, 8221]


def test_a_row_of_the_table_at_the_published_values():
    """Four events of a row, one of them missed. The second and the fourth row are as if all were its own."""
    rule = gpt.RULES["row_adam"]
    table = torch.zeros(1, 4, dtype=torch.float64)
    grads = {1: [0.3, -0.2, 0.1, 0.05], 3: [-0.1, -0.2, 0.4, 0.0], 4: [0.2, 0.2, -0.2, 0.1]}
    state = rule.init_state(table)
    expected = {
        1: ([-0.890086, 0.593390, -0.296695, -0.148348], 0.00178125),
        3: ([-0.558033, 1.243540, -1.596995, -0.148348], 0.00423258),
        4: ([-1.335291, 0.446783, -0.794696, -0.536977], 0.00698865),
    }
    for event in range(1, 5):
        beta2, decay, wide = (0.95, 5, 0) if event < 4 else (0.9025, 10, 1)
        number = lambda x: torch.tensor(x, dtype=torch.float64)
        hyper = gpt.Hyper(
            lr=number([0.56]), weight_decay=number([0.56 * 0.005 * decay]), momentum=number(0.0),
            grad_scale=number(1.0), bias_correction1=number(1.0), bias_correction2=number(1 - beta2**event),
            beta1=number(0.0), beta2=number(beta2), decay_time=number(-np.log(0.95) * (event + wide)),
            has_slow_momentum=number(0.0))
        options = gpt.UpdateOptions(eps=1e-10, cautious=True)
        before = table.clone()
        rule.update(table, torch.tensor([grads.get(event, [0.0] * 4)], dtype=torch.float64), state, hyper, options)
        if event in expected:
            assert table[0].tolist() == pytest.approx(expected[event][0], abs=1e-6)
            assert state["exp_avg_sq"].item() == pytest.approx(expected[event][1], abs=1e-8)
        else:
            assert torch.equal(table, before)


def test_prefixes(tmp_path):
    """The table of prefixes against brute force, from a vocabulary file in the format of the hub."""
    rng = np.random.default_rng(0)
    texts = [bytes(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(60)]
    texts = [*dict.fromkeys([*(bytes([i]) for i in range(256)), *texts, b"<|a"])]
    write_vocabulary(tmp_path / "vocab.json", texts)
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
    args = (gpt.Hyper(*map(torch.tensor, (1e-3, 1e-4, 0.9, 1.0, 0.1, 0.1, 0.9, 0.9, 0.0, 0.0))),
            gpt.UpdateOptions(1e-10, polynomial="polar_express", cautious=True))
    for weight in (start.clone(), start.float()):
        states.append(rule.init_state(weight, fp32_state=True))
        weights.append(weight)
    for _ in range(20):
        grad = torch.randn(2, 8, 16)
        for weight, state in zip(weights, states):
            rule.update(weight, grad, state, *args)
    upper, lower = weights[0].view(torch.int16).int() << 16, states[0]["low_bits"].int() & 0xFFFF
    assert torch.equal((upper | lower).view(torch.float32), weights[1])
    shown = (weights[1].view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(weights[0].float(), shown)
    assert states[0]["momentum"].dtype == torch.float32
    assert set(rule.init_state(start)) == {"momentum", "second_momentum"}  # as record 32's bfloat16 gates


@pytest.mark.recipe
@pytest.mark.parametrize("part", sorted(find_parts(gpt.load_preset("record_92"))))
def test_without(part, monkeypatch):
    """Without each part of the newest recipe two steps are finite, in fast forms and with FP8."""
    torch.manual_seed(0)
    first = gpt.Stage(1, 256, 128, 128, None, 1.0, None, ((1, 1), (0.5, 0.5), (0.25, 0)), (0.25,), 48)
    stages = first, gpt.Stage(1, 384, 128, lr_factor=1.5)
    small = {name: value for name, value in SMALL.items() if name not in ("preset", "device")}
    small |= dict(tokens_per_step=256, seq_len=128, max_doc_len=128, val_seq_len=128, num_iterations=20)
    small |= dict(extension_steps=2, stages=stages, fp8="on", fp8_parts="mlp", matrix_dtype="bfloat16")
    monkeypatch.setitem(gpt.PRESETS, "small", ("record_92", "", small))
    options = dict(preset="small", device="cpu")
    base, cfg = gpt.make_config(options), gpt.make_config({**options, "without": part})
    before, after = gpt.plain_dict(base), gpt.plain_dict(cfg)
    assert {name for name in after if after[name] != before[name]} - {"without"}
    fast = CPU_FORMS | ({"fp8_mlp"} if cfg.fp8 == "on" else set())
    trainer = gpt.Trainer(cfg, make_runtime(fast=fast))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 49, (2, 129))
    tokens[rng.random(tokens.shape) < 0.02] = tokens[:, 0] = 49
    batch = gpt.add_plans(gpt.make_batch(tokens, 49), [tokens], 0, trainer.cfg)
    monkeypatch.setattr(gpt, "hash_tokens", None)  # the batch has all rows
    for step in (18, 19):  # one of them updates Adam
        assert trainer.train_step(iter([batch] * 9), trainer.schedule.at(step)).isfinite()
    assert all(param.isfinite().all() for param in trainer.model.parameters())


# Untied after 12 steps. All gradients are applied after 4, 8, 12 and 14 steps
UNTIED_LATE = ("--preset=smoke_92", "--micro_batch_tokens=512", "--untie_frac=0.9")


@pytest.mark.slow
def test_ranks_and_resumed_runs_agree(shards, tmp_path):
    """Two ranks add gradients of several steps in another order. Checkpoints of a tied and of an untied head."""
    folders = [tmp_path / name for name in ("one", "two", "8", "12", "from_8", "from_12")]
    for folder in folders:
        folder.mkdir()
    whole_run = smoke_run(shards, folders[0], *UNTIED_LATE)
    two = smoke_run(shards, folders[1], *UNTIED_LATE, "--checkpoint_every=2", nproc=2)
    assert two["final_val_loss"] == pytest.approx(whole_run["final_val_loss"], rel=2e-6)
    saved = folders[1].glob("checkpoints/*/*/step_*")
    assert sorted(path.name for path in saved) == ["step_000012", "step_000014"]
    last = gpt.make_config({"preset": "smoke_92"})
    assert gpt.Optimizer(gpt.GPT(last), last, make_runtime()).untie_step == 7
    for step, stopped, new in ((8, folders[2], folders[4]), (12, folders[3], folders[5])):
        smoke_run(shards, stopped, *UNTIED_LATE, f"--checkpoint_every={step}")
        (path,) = stopped.glob(f"checkpoints/*/*/step_{step:06d}")
        assert gpt.read_metadata(path)["is_tied"] == (step == 8)
        resumed = smoke_run(shards, new, *UNTIED_LATE, f"--resume={path}")
        assert resumed["final_val_loss"] == whole_run["final_val_loss"]
        assert resumed["resumed_at"] == [step]


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
    attention, (up, mlp_out) = block.attention, block.mlp.up_down
    matrices = dict(q=attention.qk[0], k=attention.qk[-1], v=attention.v, attention=attention.proj)
    matrices |= dict(up=up, mlp=mlp_out)
    expected = {**dict.fromkeys(matrices, 0.7 * 48**-0.5), "mlp": 0.7 * 176**-0.5}
    expected |= dict.fromkeys(zero.split(), 0)
    stds = {name: matrix.std().item() for name, matrix in matrices.items()}
    assert stds == pytest.approx(expected, rel=0.03)


def test_a_last_stage_without_steps():
    """Fewer steps than stages. The final validation still has its inputs."""
    for steps, num_targets in ((1, 2), (2, 1), (3, 1)):
        cfg = gpt.make_config({"preset": "smoke_92", "num_iterations": steps, "extension_steps": 0})
        state = gpt.Schedule(cfg).at(steps)
        assert len(state.stage.loss_weights) == len(state.loss_weights) == num_targets
