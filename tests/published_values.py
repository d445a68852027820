"""Expected numbers of five presets, written from specifications and not from the program.

Sources: C92.x is a section of the specification of record 92, A to D of that of the earlier records, H1 and
H2 of that of Hyperball. DIFF is docs/differences.md, and JSON is the field "config" of
records/laptop/2026-11-28_six_grams/*.json. "Derived" marks arithmetic on such numbers, "reading" a choice
where a text is open. If a preset differs on purpose, the comment says so. record92_reference.py has record
92's stages and schedules, and the polynomials of all presets are in the two references.

Conventions: steps count from 0. Windows are in tokens: the published number of blocks times 128. A learning
rate is lr * multiplier * factor(step). Decay is w -= (lr_now * lr_mul) * (wd_now * wd_mul) * w with lr_now =
lr * factor. In record_92 wd_now = wd * factor, since the published decay follows the square of the learning
rate. 0 in late_every: no late interval.
"""

import math
from typing import NamedTuple

BF16, FP32 = "bfloat16", "float32"
BLOCK = 128  # B6, C92.3: window in tokens = 128 x blocks
V = 50304  # B1, C92.1: 50,257 padded
ZERO = ("constant", 0.0)

# -----------------------------------------------------------------------------------------------------------
# 1. STAGES: (first step after the stage, tokens of a step, long and short window, factor of learning rates)

STAGES = {
    # B6: stage = int(3 * step / 1671). B12: tokens. B11 has no stage multiplier
    "record_32": [
        (557, 393_216, 3 * BLOCK, 1 * BLOCK, 1.0),
        (1114, 393_216, 7 * BLOCK, 3 * BLOCK, 1.0),
        (1670, 393_216, 11 * BLOCK, 5 * BLOCK, 1.0),
    ],
    # D7: 12 slots of equal length, their batches, windows and learning rates. The preset keeps the 7,500
    # steps of record 2 (D, table), because it lacks mechanisms of record 18, and has no extension and one
    # target. B6's rule of borders: int(12 * step / 7501)
    "track_2": [
        (626, 131_072, 3 * BLOCK, 1 * BLOCK, 1.0),
        (1251, 262_144, 7 * BLOCK, 3 * BLOCK, 1.52),
        (1876, 393_216, 11 * BLOCK, 5 * BLOCK, 1.73),
        (2501, 524_288, 13 * BLOCK, 6 * BLOCK, 2.0),
        (3126, 524_288, 15 * BLOCK, 7 * BLOCK, 2.0),
        (3751, 524_288, 17 * BLOCK, 8 * BLOCK, 2.0),
        (4376, 524_288, 19 * BLOCK, 9 * BLOCK, 2.0),
        (5001, 524_288, 21 * BLOCK, 10 * BLOCK, 2.0),
        *[(step, 524_288, 23 * BLOCK, 11 * BLOCK, 2.0) for step in (5626, 6251, 6876, 7500)],
    ],
    # JSON: stages, tokens_per_step. derived.stage_ends = 56, 111, 165
    "laptop": [(56, 2048, 384, 32, 1.0), (111, 2048, 512, 32, 1.0), (165, 2048, 768, 32, 1.0)],
}
# Reading: the MuonH recipe on record 32's model, so data and windows of B. H2 has other data (nanochat)
STAGES["muonh"] = STAGES["record_32"]


class Run(NamedTuple):
    """Numbers of a whole run."""

    scheduled_steps: int
    extension_steps: int
    train_tokens: int
    seq_len: int
    max_doc_len: int
    val_windows: tuple
    val_tokens: int
    val_seq_len: int
    attention_piece: int = 0  # attention within pieces of this many tokens of a document. 0: no pieces


RUN = {
    # B11, B12, B13, B6
    "record_32": Run(1670, 0, 1670 * 393_216, 49_152, 2048, (13 * BLOCK, 6 * BLOCK), 10_485_760, 262_144),
    # C92.9, C92.12.1. Certified log: 1,122 + 52 + 20 steps
    "record_92": Run(1122 + 52, 20, 328_663_040, 49_152, 3072, (20 * BLOCK, 6 * BLOCK), 10_485_760, 262_144,
                    2560),
    # D (record 2), D7, and 4 x 65,536 validation tokens a sequence of record 3. A packed sequence has an
    # eighth of the first batch
    "track_2": Run(7500, 0, 626 * 131_072 + 625 * 262_144 + 625 * 393_216 + 5624 * 524_288, 16_384, 4096,
                   (27 * BLOCK, 11 * BLOCK), 10_485_760, 65_536),
    # JSON. max_attention_len = 0
    "laptop": Run(165, 0, 337_920, 1024, 1024, (1280, 32), 131_072, 8192),
}  # fmt: skip
RUN["muonh"] = RUN["record_32"]  # B: record 32's model


class Schedule(NamedTuple):
    """Rates: w (stage's factor) + floor (1 - w), w = (1 - step / steps) / fall. Momentum: a linear rise."""

    matrix_fall: float
    other_fall: float
    floor: float
    momentum: tuple
    momentum_steps: int


SCHEDULES = {
    "record_32": Schedule(0.5, 0.5, 0.1, (0.85, 0.95), 300),  # B11
    "track_2": Schedule(0.7, 0.7, 0.1, (0.85, 0.95), 300),  # D7. It is silent on momentum: B11
    "muonh": Schedule(1.0, 0.3, 0.0, (0.85, 0.95), 300),  # H2: no warmup
    # JSON: cooldown_frac 0.5, final_lr_frac 0.1, matrix_cooldown_frac -1 (read: as the others). Form: B11
    "laptop": Schedule(0.5, 0.5, 0.1, (0.7, 0.7), 0),
}

# -----------------------------------------------------------------------------------------------------------
# 2. PARAMETERS


class Parameter(NamedTuple):
    """init: constant, normal or uniform with a number, one per stacked matrix, or all values in order."""

    shape: tuple
    dtype: str
    group: str
    init: tuple | list


def of_layers(layers, name, *parameter):
    return {f"blocks.{i}.{name}": Parameter(*parameter) for i in layers}


def embeddings(shape, dtype, num_values, embed=("normal", 1.0), value=("normal", 1.0), head=ZERO):
    """The embedding, the value embeddings and the head."""
    return {
        "embed": Parameter(shape, dtype, "embed", embed),
        **{f"value_embeds.{i}": Parameter(shape, dtype, "value_embed", value) for i in range(num_values)},
        "head.weight": Parameter(shape, dtype, "head", head),
    }


def matrices(attention, mlps, dim, hidden, std, out=ZERO):
    """Matrices in float32 of layers with attention, and of those with an MLP."""
    return {
        **of_layers(attention, "attention.qk", (2, dim, dim), FP32, "matrix", [std] * 2),
        **of_layers(attention, "attention.v", (dim, dim), FP32, "matrix", std),
        **of_layers(attention, "attention.proj", (dim, dim), FP32, "matrix", out),
        **of_layers(mlps, "mlp.up_down", (2, dim, hidden), FP32, "matrix", [std, out]),
    }


def scalars(group, name, value, layers):
    """A learned scalar of these layers."""
    return of_layers(layers, f"scalars.{name}", (1,), FP32, group, [value])


def scalars_32(layers, attention, values, skips):
    """The scalars of record 32's layers: a, b, s0, s1 and the skip's logit."""
    return {
        **scalars("scalar", "resid", 1.0, layers),
        **scalars("scalar", "x0", 0.0, layers),
        **scalars("scalar", "v_scale", 0.5, attention),
        **scalars("scalar", "ve_scale", 0.5, values),
        **scalars("scalar", "skip", -1.5, skips),
    }


# B1: 12 slots, width 768, 6 x 128, MLP 3,072. B3, B4, B5, B7, B8. Embedding N(0, 1) and head zero: A8, B is
# silent on both. One scalar vector. Used (derived): 6 skip weights, 12 a, 12 b, s0 of 11 layers with
# attention, s1 of 6 layers with a value embedding. B11: the gates are in the Muon group
STD_768 = ("uniform", 0.5 * 768**-0.5)  # B4, B5, C92.2: std of the uniform start, bound sqrt(3) * std
RECORD_32_ATTENTION = [i for i in range(12) if i != 7]
RECORD_32_SCALARS = scalars_32(range(12), RECORD_32_ATTENTION, (0, 1, 2, 9, 10, 11), range(6, 12))
RECORD_32_PARAMETERS = {
    **embeddings((V, 768), BF16, 3),
    **matrices(RECORD_32_ATTENTION, range(1, 12), 768, 3072, STD_768),
    **of_layers(RECORD_32_ATTENTION, "attention.attention_gate_weight", (6, 12), BF16, "matrix", ZERO),
    **RECORD_32_SCALARS,
}

# C92.2. Both MLP matrices are published as 2816 x 768 (hidden x 768). The shape here is this repository's
# (2, D, M). Narrow layers are stored without unused rows (DIFF, "narrow heads and values";
# C92.2 says that training is the same). The embedding is a copy of the head
ROOT_1_1 = math.sqrt(1.1)
STD_FC = ("uniform", 768**-0.5 / math.sqrt(3))  # generators: uniform with bound 768^-0.5
RECORD_92_PARAMETERS = {
    **embeddings((V, 768), BF16, 4, ("normal", 0.005), ("normal", 0.01), ("normal", 0.005)),
    "ngram": Parameter((84_602_880, 768), BF16, "ngram", ZERO),
    **of_layers((0, 1, 2, 5, 8), "attention.qk", (6, 2 * 64, 768), BF16, "matrix", [STD_768] * 6),
    **of_layers((3, 10), "attention.qk", (6, 2 * 128, 768), BF16, "matrix", [STD_768] * 6),
    **of_layers((0, 2, 3, 5, 10), "attention.v", (768, 768), BF16, "matrix", STD_768),
    **of_layers((0, 2, 3, 5, 10), "attention.proj", (768, 768), BF16, "matrix", STD_768),
    **of_layers((1, 8), "attention.v", (6 * 64, 768), BF16, "matrix", STD_768),
    **of_layers((1, 8), "attention.proj", (768, 6 * 64), BF16, "matrix", STD_768),
    **of_layers((1, 2, 8), "attention.ve_gate_weight", (6, 12), BF16, "gate", ZERO),
    **of_layers((*range(7), 8, 9, 10), "mlp.up_down", (2, 768, 2816), BF16, "matrix", [STD_768, ZERO]),
    "blocks.8.second_mlp.up_down": Parameter((2, 768, 2816), BF16, "matrix", [STD_768, ZERO]),
    "blocks.0.smear_gate": Parameter((12,), BF16, "gate", ZERO),
    # Pre: XSA 1 and 3 (12), attention gate 3 (6), alpha 0 1 2, beta 0 1. Bias = start / 0.1, sorted
    "blocks.0.gates.fc": Parameter((64, 768), BF16, "gate", STD_FC),
    "blocks.0.gates.proj": Parameter((23, 64), BF16, "gate", ZERO),
    "blocks.0.gates.bias": Parameter((23,), BF16, "gate", [0.0] * (12 + 3) + [0.5] * 2 + [2.5] * 6),
    # Post: attention gate 10 (6), alpha 4 5 7, beta 4 5 9, skip
    "blocks.4.gates.fc": Parameter((64, 768), BF16, "gate", STD_FC),
    "blocks.4.gates.proj": Parameter((13, 64), BF16, "gate", ZERO),
    "blocks.4.gates.bias": Parameter((13,), BF16, "gate", [0.0] * 3 + [0.5] * 3 + [2.5] * 6 + [5.0]),
    # MUDD id 0: m0..m5 m10 = 0, m11 = 0.05, m9 = m13 = 1, m8 = m12 = sqrt(1.1), m6 = m7 = 2. C90.3:
    # sqrt(1.1) / 0.1 becomes 10.5 in bf16
    "blocks.10.mudd.fc": Parameter((64, 768), BF16, "gate", STD_FC),
    "blocks.10.mudd.proj": Parameter((14, 64), BF16, "gate", ZERO),
    "blocks.10.mudd.bias": Parameter(
        (14,), BF16, "gate", [0.0] * 7 + [0.5] + [10.0] * 2 + [10.5] * 2 + [20.0] * 2),
    # MUDD id 1: n1 = -0.5. G is published as 14 x 12 x 64, of which 10 x 12 x 64 are used (C92.2)
    "blocks.10.mudd_out.fc": Parameter((64, 768), BF16, "gate", STD_FC),
    "blocks.10.mudd_out.proj": Parameter((10, 64), BF16, "gate", ZERO),
    "blocks.10.mudd_out.bias": Parameter((10,), BF16, "gate", [-5.0] + [0.0] * 9),
    "blocks.10.mudd_out.group_proj": Parameter((10 * 12, 64), BF16, "gate", ZERO),
    # C92.2, C92.3 (unused r and p), C92.16 (O of layer 10 has s1). Layers with attention: 0 1 2 3 5 8 10
    **scalars("scalar", "skip", -1.5, [6]),
    **scalars("scalar", "smear", 0.0, [0]),
    **scalars("scalar", "qkv_scale", 0.5, (0, 1, 2, 3, 5, 8, 10)),
    **scalars("scalar", "proj_scale", 1.0, (0, 1, 2, 3, 5, 8, 10)),
    # r of attention: all but 6 and 10. r of the MLP: all but 10
    **scalars("residual", "resid_attn", ROOT_1_1, (0, 1, 2, 3, 4, 5, 7, 8, 9)),
    **scalars("residual", "resid_mlp", ROOT_1_1, range(10)),
    # p of attention: all but 4 6 7 9 10. p of the MLP: all but 7 and 10
    **scalars("mix", "proj_out", 1.0, (0, 1, 2, 3, 5, 8)),
    **scalars("mix", "down_out", 1.0, (*range(7), 8, 9)),
    "gates_scale": Parameter((1,), FP32, "gate", [0.1]),  # C92.16: one scale serves pre and post
}  # fmt: skip

# D: 16 layers, width 1,024, 8 x 128, MLP 4,096. D table, record 9: 5 value embeddings in layers 0-4 and
# 11-15. D7: all layers have attention and MLP, gates read 16 channels. Skips into layers 9, 10, 11. Starts
# and dtypes are those of B. Scalars: 3 skips, 16 a, 16 b, 16 s0, 10 s1
TRACK_2_PARAMETERS = {
    **embeddings((V, 1024), BF16, 5),
    **matrices(range(16), range(16), 1024, 4096, ("uniform", 0.5 * 1024**-0.5)),
    **of_layers(range(16), "attention.attention_gate_weight", (8, 16), BF16, "matrix", ZERO),
    **scalars_32(range(16), range(16), (*range(5), *range(11, 16)), (9, 10, 11)),
}

# Record 32 with H1 and H2: no matrix begins with zeros, all have std 768^-0.5 (also the wide one of the MLP,
# not 1 / sqrt(fan_in)). Norm gains start at 1 (H2, v1), output gains at 0 (v1 and v2). Gains are float32
# here (H2: bf16). The gates begin with zeros as in B, so they are in group scalar: a sphere of radius 0 has
# one point
STD_MUONH = ("uniform", 768**-0.5)
MUONH_PARAMETERS = {
    **embeddings((V, 768), BF16, 3),
    **matrices(RECORD_32_ATTENTION, range(1, 12), 768, 3072, STD_MUONH, STD_MUONH),
    **of_layers(RECORD_32_ATTENTION, "attention.attention_gate_weight", (6, 12), BF16, "scalar", ZERO),
    **of_layers(RECORD_32_ATTENTION, "attn_gain_in", (768,), FP32, "gain", ("constant", 1.0)),
    **of_layers(RECORD_32_ATTENTION, "attn_gain_out", (768,), FP32, "gain", ZERO),
    **of_layers(range(1, 12), "mlp_gain_in", (768,), FP32, "gain", ("constant", 1.0)),
    **of_layers(range(1, 12), "mlp_gain_out", (768,), FP32, "gain", ZERO),
    **RECORD_32_SCALARS,  # B7
}

# JSON: model_dim 128, 2 heads of 64, mlp_ratio 2, vocab 257 padded to 272, layers, init_std 0.5 (read: times
# D^-0.5, uniform, as in B4), embed_std, zero_init "mlp", embed_dtype, matrix_dtype. Value embeddings: layer 0
# table 0, layer 1 table 1. num_params = 21,372,936 (derived). The start of the head, the table and the
# scalars is not in the JSON. 8 scalars complete num_params: 2 s0, 2 s1, and x0 and n-grams in 2 layers
STD_128 = ("uniform", 0.5 * 128**-0.5)
LAPTOP_PARAMETERS = {
    **embeddings((272, 128), FP32, 2),
    "ngram": Parameter((163_840, 128), FP32, "ngram", ZERO),
    **matrices((0, 1), (0, 1), 128, 256, STD_128),
    **of_layers((0, 1), "attention.proj", (128, 128), FP32, "matrix", STD_128),
    **scalars("scalar", "v_scale", 0.5, (0, 1)),
    **scalars("scalar", "ve_scale", 0.5, (0, 1)),
    **scalars("mix", "x0", 0.0, (0, 1)),
    **scalars("mix", "ngram_in", 0.05, [0]),
    **scalars("mix", "ngram", 0.05, [1]),
}

PARAMETERS = {
    "record_32": RECORD_32_PARAMETERS, "record_92": RECORD_92_PARAMETERS, "track_2": TRACK_2_PARAMETERS,
    "muonh": MUONH_PARAMETERS, "laptop": LAPTOP_PARAMETERS,
}  # fmt: skip

# -----------------------------------------------------------------------------------------------------------
# 3. GROUPS AND OPTIMIZER


class Group(NamedTuple):
    """betas: None has no effect."""

    lr: float
    betas: tuple = (0.8, 0.95)
    weight_decay: float = 0.0
    rule: str = "adamw"
    every: int = 1
    late_every: int = 0


GROUPS = {
    # B11
    "record_32": {
        "matrix": Group(0.05, (None, None), rule="muon"), "embed": Group(0.008 * 75),
        "value_embed": Group(0.008 * 75), "head": Group(0.008), "scalar": Group(0.008 * 5),
    },
    # C92.7 (table), C92.4. Matrix: W loses (2.25 lr) eta W. Adam: wd 0.005 * mult * lr_p^2. every 2: odd
    # steps 1, 3, ... C92.4: ngram has no first moment. The README of record 92 says betas 0.75/0.95, which
    # has no effect
    "record_92": {
        "matrix": Group(0.023, (None, 0.9), 2.25 * 0.023, rule="anvil"),
        "embed": Group(0.008, (0.5, 0.95), 0.008 * 0.005 * 150, every=2),
        "head": Group(0.008, (0.5, 0.95), 0.008 * 0.005 * 150, every=2),
        "value_embed": Group(0.008 * 70, (0.75, 0.95), 0.008 * 70 * 0.005 * 5, every=2, late_every=4),
        "ngram": Group(0.008 * 70, (0.0, 0.95), 0.008 * 70 * 0.005 * 5, "row_adam", every=2, late_every=4),
        "scalar": Group(0.008 * 5, (0.9, 0.99), every=2),
        "residual": Group(0.008 * 5, (0.9, 0.95), every=2),
        "mix": Group(0.008, (0.9, 0.95), every=2),
        "gate": Group(0.008, (0.9, 0.99), 0.008 * 0.005 * 1, every=2),
    },
    # Record 2 of the medium track (D1), halved because the last stages double the rates. Mechanisms of
    # record 18 (NorMuon, cautious decay, tied head) are not in the preset. Scalars: B11
    "track_2": {
        "matrix": Group(0.025 / 2, (None, None), rule="muon"), "embed": Group(0.3 / 2),
        "value_embed": Group(0.004 * 75), "head": Group(0.003 / 2), "scalar": Group(0.008 * 5),
    },
    # H2, table of v2 at B = 2^19, and H1: the rule is NorMuon on a sphere. The preset does not scale rates
    # with the batch. Gains: H2. Scalars: B11, since they are record 32's
    "muonh": {
        "matrix": Group(0.02, (None, 0.95), rule="normuonh"), "embed": Group(0.3), "value_embed": Group(0.3),
        "head": Group(0.004), "scalar": Group(0.008 * 5), "gain": Group(0.1),
    },
    # JSON
    "laptop": {
        "matrix": Group(0.05, (None, 0.9), rule="normuon"), "embed": Group(0.3, (0.5, 0.95)),
        "value_embed": Group(0.3, (0.75, 0.95)), "ngram": Group(0.4, (0.0, 0.95), rule="row_adam"),
        "head": Group(0.02, (0.5, 0.95)), "scalar": Group(0.04),
        "mix": Group(0.008, (0.9, 0.95)),
    },
}  # fmt: skip

OPTIMIZER = {  # Adam's epsilon, polynomial, cautious decay, tied head
    "record_32": (1e-8, "newton_schulz", False, False),  # B11, section 0 (EMA momentum and Nesterov)
    "record_92": (1e-10, "six_maps", True, True),  # C92.7, C92.4
    "track_2": (1e-8, "newton_schulz", False, False),  # D7
    # H1, H2: 1e-10 for gradients of a mean over tokens. Here gradients are a sum over 49,152 tokens
    "muonh": (1e-10 * 49_152, "polar_express", False, False),
    "laptop": (0.01, "newton_schulz", False, False),  # JSON
}

# lr and wd relative to the group, by the first pattern that fits. A tuple has one entry for each stacked
# matrix. Others have 1, 1, also with the factor of the shape, max(1, rows/cols)^0.5 (B11, C92.7). C92.16:
# values of half the width as if padded to 768 x 768, so factor 1. H1: no effect in Hyperball
UP, DOWN = math.sqrt(2816 / 768), 2 * math.sqrt(2816 / 768)  # C92.7: 1.914854 and 3.829708
MULTIPLIERS = {  # C92.7, table. wd: decay is lr_p^2 * 0.005 * wd mult, so it has the lr multiplier twice
    "record_92": {
        "*.up_down": ((UP, DOWN), 1.0), "blocks.0.smear_gate": (0.01, 0.0), "gates_scale": (0.1, 0.0),
        "*.mudd.bias": (0.25, 0.0), "*.mudd_out.bias": (0.25, 0.0), "*.gates.bias": (0.1, 0.0),
        "*.mudd.*": (0.25, 0.25), "*.mudd_out.*": (0.25, 0.25), "*.gates.*": (0.1, 0.1),
    },
}  # fmt: skip

# -----------------------------------------------------------------------------------------------------------
# 4. STATES by group and dtype of the parameters

MOMENTS = dict(exp_avg=FP32, exp_avg_sq=FP32)
TABLES_BF16 = dict.fromkeys(
    ("embed, bfloat16", "value_embed, bfloat16", "head, bfloat16"), dict(exp_avg=BF16, exp_avg_sq=BF16))
ROWS = {"exp_avg_sq": FP32, "last_update": FP32}
STATES = {
    # B8. The moments of the float32 scalars are float32 here, and bf16 in the publication
    "record_32": {
        "matrix, float32": dict(momentum=FP32), "matrix, bfloat16": dict(momentum=BF16), **TABLES_BF16,
        "scalar, float32": MOMENTS,
    },
    # C92.7, C90.3 (all states fp32), C92.4 and C92.13 (per row: v, last event). Adam parameters in bf16 have
    # no low bits (C90.3)
    "record_92": {
        "matrix, bfloat16": dict(momentum=FP32, slow_momentum=FP32, low_bits="int16", second_momentum=FP32),
        **dict.fromkeys(TABLES_BF16, MOMENTS), "ngram, bfloat16": ROWS, "gate, bfloat16": MOMENTS,
        **{f"{group}, float32": MOMENTS for group in ("scalar", "residual", "mix", "gate")},
    },
    # H1: variance and norms fp32, R stored once
    "muonh": {
        "matrix, float32": dict(momentum=FP32, second_momentum=FP32, radius=FP32), **TABLES_BF16,
        "scalar, float32": MOMENTS, "gain, float32": MOMENTS,
        "scalar, bfloat16": dict(exp_avg=BF16, exp_avg_sq=BF16),
    },
    # JSON: all parameters and states are float32
    "laptop": {
        "matrix, float32": dict(momentum=FP32, second_momentum=FP32), "ngram, float32": ROWS,
        **{f"{group}, float32": MOMENTS for group in ("embed", "value_embed", "head", "scalar", "mix")},
    },
}  # fmt: skip
STATES["track_2"] = STATES["record_32"]  # B
# C92.7, C92.16: the variance has one value per row, or per column of wide QK. The hidden x 768 MLP of the
# publication is stored as 768 x hidden here, so its rows are columns. The half-width V has 384 rows
LANES = {
    "muonh": {"*.qk": {(768, 1)}, "*.attention.[vp]*": {(768, 1)}, "*.up_down": {(1, 3072)}},
    "laptop": {"*.qk": {(128, 1)}, "*.attention.[vp]*": {(128, 1)}, "*.up_down": {(1, 256)}},
    "record_92": {
        "*.qk": {(1, 768)}, "*.attention.v": {(768, 1), (384, 1)}, "*.attention.proj": {(768, 1)},
        "*.up_down": {(1, 2816)},
    },
}  # fmt: skip

# -----------------------------------------------------------------------------------------------------------
# 5. ROPE: (number of rotating frequencies, first softmax scale, final one, some final frequencies in radians
# per token by index). B6: they begin at (1/1024)^(i/31), and all layers follow the long window

# B6, applied by hand for windows of 3, 7, 11, 13 blocks. C92.12.10: 1 0.07363021 0.006769144 0.0002253606
LONG_13 = {
    0: 1.0, 1: 0.799638231117, 8: 0.0736302051215, 16: 0.00676914398306, 24: 0.00107801076386,
    31: 0.000225360576923,
}  # fmt: skip
GROWTH_13 = (0.2 * math.log(7 / 3) + 1) * (0.2 * math.log(11 / 7) + 1) * (0.2 * math.log(13 / 11) + 1)
ROPE = {
    "record_32": (32, 0.1, 0.1 * GROWTH_13, LONG_13),  # B6: 0.1, 0.1169, 0.1275, 0.1318
    # D7: updates up to 13 blocks only. Base, number and start of the scale are B6's (reading)
    "track_2": (32, 0.1, 0.1 * GROWTH_13, LONG_13),
    "muonh": (32, 0.1, 0.1 * GROWTH_13, LONG_13),  # record 32's model (reading)
    # JSON: attention_scale 0.1, yarn_max_window 65536, head_dim 64. Half of the channels rotate (A17).
    # Base 1024 and the form of B6, for windows 384, 512, 768, 1280
    "laptop": (16, 0.1, 0.1 * math.prod(0.2 * math.log(x) + 1 for x in (4 / 3, 3 / 2, 5 / 3)), {
        0: 1.0, 1: 0.629960524947, 4: 0.0738121858884, 8: 0.00763264798643, 12: 0.3 / 256, 15: 0.3 / 1024}),
}  # fmt: skip

# -----------------------------------------------------------------------------------------------------------
# 6. AVERAGES of record_92, C92.8, in this order: name in record92_reference.py, parameters, weight

V_AND_O = ("*.attention.v", "*.attention.proj")
AVERAGES = [
    ("tail-ema", ("embed", "head.weight"), 0.65),
    ("tail-avg", (*V_AND_O, "*.up_down"), 1.0),
    ("value", ("value_embeds.*",), 1.0),
    ("bank-blend", ("*.qk",), 0.55),
    ("bank-blend", (*V_AND_O, "*.up_down"), 0.3493),  # from the result of tail-avg: 0.3493 = 0.55 - 0.2007
]
# Frobenius norms of before, of embedding, head and the banks QK, VO, MLP
NORMS_RESTORED = (("embed",), ("head.weight",), ("*.qk",), V_AND_O, ("*.up_down",))

# -----------------------------------------------------------------------------------------------------------
# 7. SOFTCAP AND FP8

SOFTCAP = {  # cap, shift, width. B2, C92.1, JSON. D7 is silent: B2
    "record_32": (30.0, 0.0, 7.5), "muonh": (30.0, 0.0, 7.5), "track_2": (30.0, 0.0, 7.5),
    "record_92": (23.0, 5.0, 7.5), "laptop": (23.0, 5.0, 7.5),
}  # fmt: skip
FP8_HEAD = {  # scales of input, weight and gradient. B9. C92.5: 2.0 / 448, and DIFF for the two others
    "record_32": (math.sqrt(768) / 448, 2.0**-9, 1 / 448),
    "record_92": (math.sqrt(768) / 448, 2.0 / 448, 1 / 448),
}  # fmt: skip
# C92.6. The loss is not divided by 8 ranks here, so the scales of gradients are 8 times the published ones
FP8_QKV_LIMIT = 8.0  # of inputs 8, of gradients 8 * 1
FP8_MLP_FACTORS = (1.03 / 448, 1.25 / 57_344)  # of the largest value of the step before: post, dpre
FP8_MLP_FLOORS = (1e-6, 1e-12)
FP8_MLP_STARTS = (1.0, 8 * 2.0**-6)
