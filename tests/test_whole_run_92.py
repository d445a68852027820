"""A whole run of the newest recipe from the command line against record92_reference.py, in float64."""

import functools
import json

import numpy as np
import pytest
import record92_reference as reference
from conftest import gpt
from reference_run import ngram_signs, read_shards, validation_rows
from run_float64 import assert_equal_run, read_initial_parameters, run_float64
from test_model_92 import convert_parameters

from data.text import write_shard

GROUPS = ("matrix", "embed", "value_embed", "ngram", "head", "scalar", "residual", "mix", "gate")
WORDS = b"the of and to in is that it was for on as with his he at by be this had not are but from or have"
TOKENS = [*(bytes([i]) for i in range(256)), b"th", b"he", b" t", *(b" " + word for word in WORDS.split())]
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
    preset="smoke_92", stages=json.dumps(STAGES), num_iterations=42, extension_steps=2,
    tokens_per_step=512, seq_len=128, micro_batch_tokens=256, max_doc_len=120, max_attention_len=70,
    vocab_size=VOCAB, ngram_rows=400, warmup_iterations=0, untie_frac=0.8,
    val_tokens=512, val_seq_len=256, val_loss_every=15, val_windows="150,60",
    momentum_warmup_steps=10, momentum_cooldown_steps=5, embed_lr=0.03,
    adam_eps=1,  # large enough to matter
    matrix_weight_decay=0.3,
    groups=json.dumps({name: {"weight_decay": decay} for name, decay in DECAYS.items()}),
)  # fmt: skip
FIRST_STEP = ("--extension_steps=0", "--averages=off")  # of a run of one step


@pytest.fixture(scope="module", name="options")
def make_options(tmp_path_factory):
    """The options of the run, with its files: three training shards, a validation shard and the vocabulary."""
    folder = tmp_path_factory.mktemp("files")
    rng, used = np.random.default_rng(0), np.array([*range(97, 110), *range(256, VOCAB - 1)])
    for name, size in (("train_0", 9000), ("train_1", 30_000), ("train_2", 80_000), ("val_0", 1000)):
        steps = [rng.integers(1, 4, rng.integers(2, 300)) for _ in range(size // 100)]
        documents = [[VOCAB - 1, *used[np.cumsum(step) % len(used)]] for step in steps]
        write_shard(folder / f"{name}.bin", np.concatenate(documents)[:size], VOCAB, VOCAB - 1)
    reference.write_vocabulary(folder / "vocab.json", TOKENS)
    files = dict(train_files="train_*.bin", val_files="val_*.bin", vocab_file="vocab.json")
    paths = {name: folder / file for name, file in files.items()}
    return [f"--{name}={value}" for name, value in {**OPTIONS, **paths}.items()]


def convert(tensors, config):
    """The parameters of model.pt by the reference's names."""
    return convert_parameters(tensors, gpt.config_from_dict(config), reference.shape_of(config))


@pytest.fixture(scope="module", name="run_reference")
def make_run_reference(options, tmp_path_factory):
    """A function that returns the reference's run of a config: parameters, training losses, validations."""

    @functools.cache
    def run(text):
        config = json.loads(text)
        shape, (shards, _) = reference.shape_of(config), read_shards(config["train_files"])
        of_one_shard = list(reference.packed_batches(shape, shards[:1]))
        assert len(of_one_shard) < shape.steps  # the run reads several shards
        folder = tmp_path_factory.mktemp("first") / "run"
        tensors = read_initial_parameters(folder, GROUPS, *options, *FIRST_STEP)
        p = convert(tensors, config) | {"signs": ngram_signs(shape.dim)}
        chunks = [[*inputs, targets[-1]] for inputs, targets, _ in validation_rows(config)]
        prefix_of = reference.prefix_table(TOKENS + [b""] * (shape.vocab - len(TOKENS)))
        p, losses, points = reference.run(config, p, shards, chunks, prefix_of)
        p.pop("signs")
        return p, losses, points

    return lambda config: run(json.dumps({**config, "fast": "", "derived": {}}))


@pytest.mark.recipe
@pytest.mark.slow
@pytest.mark.parametrize("fast, nproc", [("auto", 1), ("off", 1), ("auto", 2)])
def test_whole_run(fast, nproc, options, run_reference, tmp_path):
    """The training loss of every step, all validation losses, and every parameter at the end."""
    result, tensors = run_float64(tmp_path / "run", *options, f"--fast={fast}", nproc=nproc)
    expected = run_reference(result["config"])
    assert_equal_run(result, convert(tensors, result["config"]), expected)
    assert (expected[0]["embed"] - expected[0]["head"]).abs().max() > 1e-3  # untied


def list_constants(shape, step):
    """All numbers of a step, except those of its stage and of the averages."""
    names = "head embed ve.1 scales residual output smear_gate ve_gate.1 mudd.w1 end.bias pre.w2 gate_scale"
    groups = [reference.adam_settings(shape, name, step) for name in names.split()]
    weights, prefix = reference.loss_weights(shape, step)
    return [
        reference.lr_factor(shape, step), *reference.rail_settings(shape, step), *weights, prefix,
        reference.candidate_count(shape, step) or 0, reference.table_event(shape, step),
        *reference.table_settings(shape, step),
        *[value for lr, betas, decay in groups for value in (lr, *betas, decay)]]  # fmt: skip


def list_stage_constants(shape, step):
    """Tokens, longest document, windows and RoPE of a step. After the last step: of the validation."""
    last, stage = shape.steps - 1, shape.stage(step)
    short, long, narrow, wide, *scales = reference.windows_at(shape, min(step, last), validation=step > last)
    sizes = shape.stage_tokens[stage], shape.stage_caps[stage], short, long
    return [*sizes, *narrow.tolist(), *wide.tolist(), *scales]


@pytest.mark.recipe
def test_the_record_from_its_options():
    """What the reference reads from the options of preset record_92 is record 92, in every step."""
    config = gpt.plain_dict(gpt.make_config({"preset": "record_92", "ngram_rows": 84602880}))
    shape, record = reference.shape_of(config), reference.RECORD_92
    assert shape.topology == record.topology
    assert reference.parameter_sizes(shape) == reference.parameter_sizes(record)
    assert reference.average_ticks(shape) == reference.average_ticks(record)
    for name in "tokenizer ranks attention_cap split_step matrix_lr adam_eps gradient_scale".split():
        assert getattr(shape, name) == getattr(record, name)
    assert shape.matrix_decay == pytest.approx(record.matrix_decay)
    equal = functools.partial(pytest.approx, rel=1e-9, abs=1e-12)
    for step in range(record.steps):
        assert list_constants(shape, step) == equal(list_constants(record, step)), step
    firsts = [shape.first(stage) for stage in range(6)]
    assert firsts == [0, 320, 681, 965, 1107, 1174]  # in the record more classes at 965, but no new stage
    assert [record.first(stage) for stage in range(5)] == [step for step in firsts if step != 965]
    for step in (*firsts, record.steps):
        assert list_stage_constants(shape, step) == equal(list_stage_constants(record, step)), step
