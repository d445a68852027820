"""A whole run of the newest recipe from the command line against record92_reference.py, in float64."""

import functools
import json

import numpy as np
import pytest
import record92_reference as reference
import torch
from conftest import run_script
from reference_run import read_shards, validation_rows
from run_float64 import read_initial_parameters, run_float64

GROUPS = ("matrix", "embed", "value_embed", "ngram", "head", "scalar", "residual", "mix", "gate")
WORDS = b"the of and to in is that it was for on as with his he at by be this had not are but from or have".split()
TOKENS = [*(bytes([i]) for i in range(256)), b"th", b"he", b" ", b" t", *(b" " + word for word in WORDS)]
TOKENS = [*dict.fromkeys(TOKENS)]
VOCAB = len(TOKENS) + 1  # the last token begins a document
STAGES = [
    dict(duration=2, window_long=30, window_short=12, max_doc_len=50, num_classes=96,
         loss_weights=[[1, 1], [0.5, 0.5], [0.25, 0]], prefix_weight=[0.25]),
    dict(duration=3, window_long=44, window_short=20, lr_factor=1.5, max_doc_len=90, num_classes=160,
         loss_weights=[[1, 1], [0.5, 0.25]], prefix_weight=[0.2, 0.1]),
    dict(duration=2, window_long=60, window_short=28, lr_factor=1.7),
    dict(duration=1, window_long=66, window_short=32, tokens_per_step=1024, seq_len=256),
]  # fmt: skip
DECAYS = dict(embed=0.04, head=0.03, value_embed=0.02, scalar=0.02, residual=0.03, mix=0.04, gate=0.05)
OPTIONS = dict(
    preset="smoke_frontier", grad_grid=0, stages=json.dumps(STAGES), num_iterations=42, extension_steps=2,
    tokens_per_step=512, seq_len=128, micro_batch_tokens=256, max_doc_len=120, max_attention_len=70,
    vocab_size=VOCAB, ngram_rows=400, warmup_iterations=0, untie_frac=0.8,
    val_tokens=512, val_seq_len=256, val_loss_every=15, val_windows="150,60",
    momentum_warmup_steps=10, momentum_cooldown_steps=5, embed_lr=0.03,
    adam_eps=1,  # large enough to matter
    matrix_weight_decay=0.3, groups=json.dumps({name: {"weight_decay": decay} for name, decay in DECAYS.items()}),
)  # fmt: skip
FIRST_STEP = ("--extension_steps=0", "--averages=off")  # of a run of one step

# What the rows of these parameters of model.pt are in the reference: numbers of layers, outputs of a generator
NUMBERS = dict(
    scalar=[("scales", 0, 0), ("scales", 0, 1), ("smear",), ("scales", 1, 0), ("scales", 1, 1), ("scales", 2, 0),
            ("scales", 2, 1), ("skip",), ("scales", 5, 0), ("scales", 5, 1)],
    residual=[("residual", layer, i) for layer in range(5) for i in range(2) if (layer, i) != (3, 0)],
    mix=[("output", layer, i) for layer in range(4) for i in range(2) if (layer, i) != (3, 0)],
)  # fmt: skip
GENERATORS = {
    "blocks.0.gates": ("pre", "x0.0 ngram.0 x0.1 ngram.1 xsa.1 gate.2"),
    "blocks.3.gates": ("post", "skip x0.4 gate.5"),
    "blocks.5.mudd": ("mudd", "m10 m11 m6 m7 m9 m8 m12 m13 m0 m1 m2 m3 m4 m5"),
    "blocks.5.mudd_out": ("end", "n0 n1 n2 n3 n4 n5 n6 n7"),
}


def convert_parameters(tensors, shape):
    """The parameters of model.pt by the reference's names. Entries that only the reference has are 0."""
    left, sizes, p = dict(tensors), reference.parameter_sizes(shape), {}
    p.update(embed=left.pop("embed"), head=left.pop("head.weight"), table=left.pop("ngram"))
    p.update(smear_gate=left.pop("blocks.0.smear_gate"), gate_scale=left.pop("scalars.gates_scale")[0])
    for name in ("scales", "residual", "output", "smear", "skip"):
        p[name] = torch.zeros(sizes[name], dtype=torch.float64)
    for group, rows in NUMBERS.items():
        for (name, *index), value in zip(rows, left.pop(f"scalars.{group}"), strict=True):
            p[name][tuple(index)] = value
    for i, layer in enumerate(shape.topology.value):
        p[f"ve.{layer}"] = left.pop(f"value_embeds.{i}")
    for layer in shape.topology.attention:
        attention, is_half = f"blocks.{layer}.attention", layer in shape.topology.half_v
        p[f"qk.{layer}"] = left.pop(f"{attention}.qk")
        if is_half:
            p[f"v.{layer}"], p[f"o.{layer}"] = left.pop(f"{attention}.v")[0], left.pop(f"{attention}.proj")[0]
        else:
            p[f"v.{layer}"], p[f"o.{layer}"] = left.pop(f"{attention}.v_proj")
        if f"ve_gate.{layer}" in sizes:
            p[f"ve_gate.{layer}"] = left.pop(f"{attention}.ve_gate_weight")
    for slot in shape.topology.mlps:
        name = "second_mlp" if slot.endswith("b") else "mlp"
        p[f"mlp.{slot}.in"], p[f"mlp.{slot}.out"] = left.pop(f"blocks.{slot.rstrip('b')}.{name}.up_down").mT
    for name, (generator, order) in GENERATORS.items():
        outputs = [output for output, size, _ in reference.outputs_of(shape, generator) for _ in range(size)]
        rows = [row for output in order.split() for row, other in enumerate(outputs) if other == output]
        p[f"{generator}.w1"] = left.pop(f"{name}.fc")
        for part in ("w2", "bias"):
            p[f"{generator}.{part}"] = torch.zeros(sizes[f"{generator}.{part}"], dtype=torch.float64)
        p[f"{generator}.w2"][rows], p[f"{generator}.bias"][rows] = left.pop(f"{name}.proj"), left.pop(f"{name}.bias")
    p["end.groups"] = left.pop("blocks.5.mudd_out.group_proj").view(sizes["end.groups"])
    assert not left
    assert {name: tuple(value.shape) for name, value in p.items()} | {"signs": sizes["signs"]} == sizes
    return p


def make_signs(rows, dim):
    """The trainer's signs of n-grams: a hash of their position."""
    bits = torch.arange(rows * dim)
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (((bits >> 15) & 1) * 2 - 1).double().view(rows, dim)


def write_shard(path, tokens):
    header = np.zeros(256, "<i4")
    header[:5] = 20240520, 1, len(tokens), VOCAB, VOCAB - 1
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def write_files(folder):
    """Three training shards, a validation shard and the vocabulary, in GPT-2's characters for bytes."""
    rng, used = np.random.default_rng(0), np.array([*range(97, 110), *range(256, VOCAB - 1)])
    for name, size in (("train_0", 9000), ("train_1", 30_000), ("train_2", 80_000), ("val_0", 1000)):
        steps = [rng.integers(1, 4, rng.integers(2, 300)) for _ in range(size // 100)]
        documents = [[VOCAB - 1, *used[np.cumsum(step) % len(used)]] for step in steps]
        write_shard(folder / f"{name}.bin", np.concatenate(documents)[:size])
    characters, others = {}, 256
    for byte in range(256):
        printable = 33 <= byte < 127 or 161 <= byte < 173 or 174 <= byte
        characters[byte] = chr(byte if printable else others)
        others += not printable
    names = ["".join(characters[byte] for byte in token) for token in TOKENS]
    ids = {name: i for i, name in enumerate([*names, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(ids))


@pytest.fixture(scope="module", name="options")
def make_options(tmp_path_factory):
    """The options of the run, with its files."""
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    paths = dict(train_files=folder / "train_*.bin", val_files=folder / "val_*.bin", vocab_file=folder / "vocab.json")
    return [f"--{name}={value}" for name, value in {**OPTIONS, **paths}.items()]


@pytest.fixture(scope="module", name="run_reference")
def make_run_reference(options, tmp_path_factory):
    """A function that returns the reference's run of a config: parameters, training losses, validation points."""

    @functools.cache
    def run(text):
        config = json.loads(text)
        shape, (shards, _) = reference.shape_of(config), read_shards(config["train_files"])
        assert len(list(reference.packed_batches(shape, shards[:1]))) < shape.steps  # the run reads several shards
        tensors = read_initial_parameters(tmp_path_factory.mktemp("first") / "run", GROUPS, *options, *FIRST_STEP)
        p = convert_parameters(tensors, shape) | {"signs": make_signs(shape.sign_rows, shape.dim)}
        chunks = [[*inputs, targets[-1]] for inputs, targets, _ in validation_rows(config)]
        prefix_of = reference.prefix_table(TOKENS + [b""] * (shape.vocab - len(TOKENS)))
        return reference.run(config, p, shards, chunks, prefix_of)

    return lambda config: run(json.dumps({**config, "fast": "", "derived": {}}))


@pytest.mark.recipe
@pytest.mark.slow
@pytest.mark.parametrize("fast, nproc", [("auto", 1), ("off", 1), ("auto", 2)])
def test_whole_run(fast, nproc, options, run_reference, tmp_path):
    """The training loss of every step, all validation losses, and every parameter at the end."""
    result, tensors = run_float64(tmp_path / "run", *options, f"--fast={fast}", nproc=nproc)
    p, losses, points = run_reference(result["config"])
    assert [loss for _, loss in result["train_points"]] == pytest.approx(losses, abs=1e-9)
    assert [point[0] for point in result["val_points"]] == [step for step, _ in points]
    assert [point[1] for point in result["val_points"]] == pytest.approx([loss for _, loss in points], abs=1e-9)
    ours = convert_parameters(tensors, reference.shape_of(result["config"]))
    errors = {name: (value - p[name]).abs().max().item() for name, value in ours.items()}
    assert max(errors.values()) < 1e-9, sorted(errors.items(), key=lambda item: -item[1])[:5]
    assert (p["embed"] - p["head"]).abs().max() > 1e-3  # untied


def list_constants(shape, step):
    """All numbers of a step, except those of the averages. After the last step: the windows of the validation."""
    if step == shape.steps:
        short, long, narrow, wide, *scales = reference.windows_at(shape, step - 1, validation=True)
        return [short, long, *narrow.tolist(), *wide.tolist(), *scales]
    stage, (weights, prefix) = shape.stage(step), reference.loss_weights(shape, step)
    short, long, narrow, wide, *scales = reference.windows_at(shape, step)
    names = "head embed ve.1 scales residual output smear_gate ve_gate.1 mudd.w1 end.bias pre.w2 gate_scale"
    groups = [reference.adam_settings(shape, name, step) for name in names.split()]
    return [
        shape.stage_tokens[stage], shape.stage_caps[stage], reference.lr_factor(shape, step),
        *reference.rail_settings(shape, step), *weights, prefix, reference.candidate_count(shape, step) or 0,
        reference.table_event(shape, step), *reference.table_settings(shape, step),
        short, long, *narrow.tolist(), *wide.tolist(), *scales,
        *[value for lr, betas, decay in groups for value in (lr, *betas, decay)],
    ]  # fmt: skip


@pytest.mark.recipe
def test_the_record_from_its_options(tmp_path):
    """What the reference reads from the options of preset frontier is record 92, in every step."""
    done = run_script(["--preset=frontier", "--ngram_rows=84602880", "--print_config"], tmp_path)
    shape, record = reference.shape_of(json.loads(done.stdout)), reference.RECORD_92
    assert shape.topology == record.topology
    assert reference.parameter_sizes(shape) == reference.parameter_sizes(record)
    assert reference.average_ticks(shape) == reference.average_ticks(record)
    for name in "tokenizer ranks attention_cap split_step matrix_lr adam_eps gradient_scale".split():
        assert getattr(shape, name) == getattr(record, name)
    assert shape.matrix_decay == pytest.approx(record.matrix_decay)
    for step in range(record.steps + 1):
        assert list_constants(shape, step) == pytest.approx(list_constants(record, step), rel=1e-9, abs=1e-12), step
