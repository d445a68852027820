"""Expected numbers of the five presets, written from specifications and not from the program.

Sources: C92.x is a section of the specification of record 92, A to D of that of the earlier records, H1 and H2 of
that of Hyperball. INSIDE is docs/inside.md, and JSON is the field "config" of
records/laptop/2026-11-25_long_windows/*.json. "Derived" marks arithmetic on such numbers, "reading" a choice
where a text is open. If a preset differs on purpose, the comment says so.

Conventions: steps count from 0. Windows are in tokens: the published number of blocks times 128. A learning
rate is lr * multiplier * factor(step). Decay is w -= (lr_now * lr_mul) * (wd_now * wd_mul) * w with lr_now =
lr * factor. In frontier wd_now = wd * factor, since the published decay follows the square of the learning
rate. 0 in late_every: no late interval.
"""

import math

BF16, FP32 = "bfloat16", "float32"
BLOCK = 128  # B6, C92.3: window in tokens = 128 x blocks
V = 50304  # B1, C92.1: 50,257 padded
ZERO = ("constant", 0.0)

# -----------------------------------------------------------------------------------------------------------
# 1. STAGES

# B6: stage = int(3 * step / 1671). B12: tokens, cap. B11 has no stage multiplier.
TRACK_1_STAGES = [
    dict(
        steps=(0, 556), tokens=393_216, seq_len=49_152, cap=2048, windows=(3 * BLOCK, 1 * BLOCK),
        classes=None, weights_first=(1.0,), weights_last=(1.0,), lr_factor=1.0,
    ),
    dict(
        steps=(557, 1113), tokens=393_216, seq_len=49_152, cap=2048, windows=(7 * BLOCK, 3 * BLOCK),
        classes=None, weights_first=(1.0,), weights_last=(1.0,), lr_factor=1.0,
    ),
    dict(
        steps=(1114, 1669), tokens=393_216, seq_len=49_152, cap=2048, windows=(11 * BLOCK, 5 * BLOCK),
        classes=None, weights_first=(1.0,), weights_last=(1.0,), lr_factor=1.0,
    ),
]

# C92.9: steps, tokens, cap, windows, lr. C92.5: classes and weights. Weights: next token, second, third, and
# the prefix weight last in the first two rows. Only those rows have one.
FRONTIER_STAGES = [
    dict(
        steps=(0, 319), tokens=8 * 16_384, seq_len=16_384, cap=896, windows=(3 * BLOCK, 1 * BLOCK),
        classes=10_240, weights_first=(1.0, 0.5, 0.25, 0.25),
        weights_last=(1.0, 0.5, 0.25 * (1 - 319 / 320), 0.25), has_prefix=True, lr_factor=1.0,
    ),
    dict(
        steps=(320, 680), tokens=8 * 32_768, seq_len=32_768, cap=2048, windows=(7 * BLOCK, 3 * BLOCK),
        classes=10_240, weights_first=(1.0, 0.5, 0.20), weights_last=(1.0, 0.5 * (1 - 360 / 361), 0.05),
        has_prefix=True, lr_factor=1.52,
    ),
    dict(
        steps=(681, 964), tokens=8 * 49_152, seq_len=49_152, cap=3072, windows=(11 * BLOCK, 5 * BLOCK),
        classes=14_336, weights_first=(1.0,), weights_last=(1.0,), has_prefix=False, lr_factor=1.73,
    ),
    dict(
        steps=(965, 1106), tokens=8 * 49_152, seq_len=49_152, cap=3072, windows=(11 * BLOCK, 5 * BLOCK),
        classes=24_576, weights_first=(1.0,), weights_last=(1.0,), has_prefix=False, lr_factor=1.73,
    ),
    dict(
        steps=(1107, 1173), tokens=8 * 40_960, seq_len=40_960, cap=3072, windows=(11 * BLOCK, 5 * BLOCK),
        classes=None, weights_first=(1.0,), weights_last=(1.0,), has_prefix=False,
        lr_factor=1.73 * math.sqrt(20 / 24),
    ),
    # The extension has no multiplier: its factor is the floor 0.30, absolute (C92.9).
    dict(
        steps=(1174, 1193), tokens=8 * 16_384, seq_len=16_384, cap=3072, windows=(13 * BLOCK, 6 * BLOCK),
        classes=None, weights_first=(1.0,), weights_last=(1.0,), has_prefix=False, lr_factor=None,
    ),
]

# C92.5: prefix weight from this step on, quarters of stage 2 by floor(4 t)
PREFIX_STEPS = {0: 0.25, 320: 0.20, 411: 0.15, 501: 0.10, 591: 0.05, 681: 0.0}

# D7: 12 slots of equal length, their batches, windows, cap and learning rates. The preset keeps the 7,500 steps of
# record 2 (D, table), because it lacks mechanisms of record 18, and has no extension and one target. B6's rule
# of borders: int(12 * step / 7501). A packed sequence has an eighth of the first batch
TRACK_2_STAGES = [
    dict(
        steps=steps, tokens=tokens, seq_len=16_384, cap=4096, windows=(long * BLOCK, short * BLOCK), classes=None,
        weights_first=(1.0,), weights_last=(1.0,), lr_factor=factor,
    )
    for steps, tokens, long, short, factor in [
        ((0, 625), 131_072, 3, 1, 1.0),
        ((626, 1250), 262_144, 7, 3, 1.52),
        ((1251, 1875), 393_216, 11, 5, 1.73),
        ((1876, 2500), 524_288, 13, 6, 2.0),
        ((2501, 3125), 524_288, 15, 7, 2.0),
        ((3126, 3750), 524_288, 17, 8, 2.0),
        ((3751, 4375), 524_288, 19, 9, 2.0),
        ((4376, 5000), 524_288, 21, 10, 2.0),
        ((5001, 5625), 524_288, 23, 11, 2.0),
        ((5626, 6250), 524_288, 23, 11, 2.0),
        ((6251, 6875), 524_288, 23, 11, 2.0),
        ((6876, 7499), 524_288, 23, 11, 2.0),
    ]
]

# Reading: the MuonH recipe on record 32's model, so data and windows of B. H2 has other data (nanochat).
MUONH_STAGES = [dict(stage) for stage in TRACK_1_STAGES]

# JSON: stages, tokens_per_step, seq_len, max_doc_len. derived.stage_ends = 114, 228, 340
LAPTOP_STAGES = [
    dict(
        steps=(0, 113), tokens=2048, seq_len=1024, cap=1024, windows=(256, 64), classes=None,
        weights_first=(1.0,), weights_last=(1.0,), lr_factor=1.0,
    ),
    dict(
        steps=(114, 227), tokens=2048, seq_len=1024, cap=1024, windows=(512, 64), classes=None,
        weights_first=(1.0,), weights_last=(1.0,), lr_factor=1.0,
    ),
    dict(
        steps=(228, 339), tokens=2048, seq_len=1024, cap=1024, windows=(1024, 128), classes=None,
        weights_first=(1.0,), weights_last=(1.0,), lr_factor=1.0,
    ),
]

STAGES = {
    "track_1": TRACK_1_STAGES, "frontier": FRONTIER_STAGES, "track_2": TRACK_2_STAGES, "muonh": MUONH_STAGES,
    "laptop": LAPTOP_STAGES,
}

# total_steps = scheduled_steps + extension_steps. attention_piece: attention within pieces of this many
# tokens of a document
RUN = {
    # B11, B12, B13, B6
    "track_1": dict(
        scheduled_steps=1670, extension_steps=0, total_steps=1670, train_tokens=1670 * 393_216,
        val_windows=(13 * BLOCK, 6 * BLOCK), val_tokens=10_485_760, val_seq_len=262_144,
        attention_piece=None,
    ),
    # C92.9, C92.12.1. Certified log: 1,122 + 52 + 20 steps
    "frontier": dict(
        scheduled_steps=1122 + 52, extension_steps=20, total_steps=1194, train_tokens=328_663_040,
        val_windows=(20 * BLOCK, 6 * BLOCK), val_tokens=10_485_760, val_seq_len=262_144,
        attention_piece=2560,
    ),
    # D (record 2), D7, and 4 x 65,536 validation tokens a sequence of record 3
    "track_2": dict(
        scheduled_steps=7500, extension_steps=0, total_steps=7500,
        train_tokens=626 * 131_072 + 625 * 262_144 + 625 * 393_216 + 5624 * 524_288,
        val_windows=(27 * BLOCK, 11 * BLOCK), val_tokens=10_485_760, val_seq_len=65_536, attention_piece=None,
    ),
    # B: record 32's model
    "muonh": dict(
        scheduled_steps=1670, extension_steps=0, total_steps=1670, train_tokens=1670 * 393_216,
        val_windows=(13 * BLOCK, 6 * BLOCK), val_tokens=10_485_760, val_seq_len=262_144,
        attention_piece=None,
    ),
    # JSON. max_attention_len = 0
    "laptop": dict(
        scheduled_steps=340, extension_steps=0, total_steps=340, train_tokens=696_320,
        val_windows=(1024, 128), val_tokens=131_072, val_seq_len=8192, attention_piece=None,
    ),
}

# -----------------------------------------------------------------------------------------------------------
# 2. LR AND MOMENTUM

LR = {
    # B11: w = (1 - x) / 0.5, w + 0.1 (1 - w), x = step / 1670
    "track_1": {
        0: 1.0, 556: 1.0, 557: 1.0, 834: 1.0, 835: 1.0, 836: 834 / 835 + 0.1 / 835,
        1113: (557 + 0.1 * 278) / 835, 1114: (556 + 0.1 * 279) / 835, 1400: (270 + 0.1 * 565) / 835,
        1669: (1 + 0.1 * 834) / 835,
    },
    # C92.9: from 234 on value (1 - t) + 0.30 t, t = (s - 234) / 940. C92.12.2 has 0.999255, 0.936702,
    # 1.408383, 1.156596, 0.941149, 1.049989, 0.617947, 0.403447, 0.391182, 0.301361, 0.3. Matrices, Adam and
    # table alike
    "frontier": {
        0: 1.0, 234: 1.0, 235: (939 + 0.3) / 940, 319: (855 + 0.3 * 85) / 940,
        320: (1.52 * 854 + 0.3 * 86) / 940, 514: (1.52 * 660 + 0.3 * 280) / 940,
        680: (1.52 * 494 + 0.3 * 446) / 940, 681: (1.73 * 493 + 0.3 * 447) / 940,
        964: (1.73 * 210 + 0.3 * 730) / 940, 965: (1.73 * 209 + 0.3 * 731) / 940,
        1106: (1.73 * 68 + 0.3 * 872) / 940, 1107: (1.73 * math.sqrt(20 / 24) * 67 + 0.3 * 873) / 940,
        1173: (1.73 * math.sqrt(20 / 24) + 0.3 * 939) / 940, 1174: 0.3, 1193: 0.3,
    },
    # D7: stage value, cool-down 0.7 (from 2250 = 0.3 * 7500), floor 0.1
    "track_2": {
        0: 1.0, 625: 1.0, 626: 1.52, 1250: 1.52, 1251: 1.73, 1875: 1.73, 1876: 2.0, 2250: 2.0,
        2251: (2.0 * 5249 + 0.1) / 5250, 4875: 1.05, 7499: (2.0 + 0.1 * 5249) / 5250,
    },
    # H2: warmdown 1.0 for matrices and 0.3 for all others, to 0, no warmup. 0.3 * 1670 = 501 steps, from
    # 1169 on
    "muonh": {
        0: {"matrix": 1.0, "others": 1.0},
        1: {"matrix": 1669 / 1670, "others": 1.0},
        557: {"matrix": 1113 / 1670, "others": 1.0},
        835: {"matrix": 0.5, "others": 1.0},
        1114: {"matrix": 556 / 1670, "others": 1.0},
        1168: {"matrix": 502 / 1670, "others": 1.0},
        1169: {"matrix": 501 / 1670, "others": 1.0},
        1170: {"matrix": 500 / 1670, "others": 500 / 501},
        1400: {"matrix": 270 / 1670, "others": 270 / 501},
        1669: {"matrix": 1 / 1670, "others": 1 / 501},
    },
    # JSON: cooldown_frac 0.5, final_lr_frac 0.1, matrix_cooldown_frac -1 (read: as the others). The form is
    # that of B11
    "laptop": {
        0: 1.0, 113: 1.0, 114: 1.0, 169: 1.0, 170: 1.0, 171: (169 + 0.1) / 170, 227: (113 + 0.1 * 57) / 170,
        228: (112 + 0.1 * 58) / 170, 255: 0.55, 339: (1 + 0.1 * 169) / 170,
    },
}

MOMENTUM = {
    # B11: linear from 0.85 to 0.95 in 300 steps
    "track_1": {
        0: 0.85, 1: 0.85 + 0.1 / 300, 150: 0.90, 299: 0.85 + 0.1 * 299 / 300, 300: 0.95, 835: 0.95,
        1669: 0.95,
    },
    # C92.7: lookahead m. C92.12.2 has 0.889667, 0.929667, 0.93, 0.9284, 0.882, 0.8516
    "frontier": {
        0: 0.85, 119: 0.85 + 0.08 * 119 / 240, 239: 0.85 + 0.08 * 239 / 240, 240: 0.93, 513: 0.93, 514: 0.93,
        1144: 0.93, 1145: 0.93 - 0.08 * 1 / 50, 1174: 0.93 - 0.08 * 30 / 50, 1193: 0.93 - 0.08 * 49 / 50,
    },
    # D7 is silent: B11
    "track_2": {0: 0.85, 150: 0.90, 300: 0.95, 7499: 0.95},
    # H2: 0.85 to 0.95 linearly over 300 steps, then constant
    "muonh": {0: 0.85, 1: 0.85 + 0.1 / 300, 150: 0.90, 299: 0.85 + 0.1 * 299 / 300, 300: 0.95, 1669: 0.95},
    # JSON: momentum 0.8 at the start and the end, no warmup, no cooldown
    "laptop": {0: 0.8, 170: 0.8, 339: 0.8},
}

# C92.7: (momentum m, beta bf of the fast rail, weight w of the fast rail). C92.16: before 514 bf = m(s) of
# the same step
FRONTIER_RAILS = {
    0: (0.85, 0.85, 1.0), 119: (0.85 + 0.08 * 119 / 240, 0.85 + 0.08 * 119 / 240, 1.0),
    240: (0.93, 0.93, 1.0), 513: (0.93, 0.93, 1.0), 514: (0.93, 0.85, 0.4385), 1144: (0.93, 0.85, 0.4385),
    1145: (0.9284, 0.85, 0.4385), 1193: (0.93 - 0.08 * 49 / 50, 0.85, 0.4385),
}

# -----------------------------------------------------------------------------------------------------------
# 3. PARAMETERS

# B1: 12 slots, width 768, 6 x 128, MLP 3,072. B3, B4, B5, B7, B8. Embedding N(0, 1) and head zero: A8, B is
# silent on both. One scalar vector. Used (derived): 6 skip weights, 12 a, 12 b, s0 of 11 layers with
# attention, s1 of 6 layers with a value embedding
STD_768 = 0.5 * 768**-0.5  # B4, B5, C92.2: std of the uniform start, bound sqrt(3) * std
TRACK_1_PARAMETERS = {
    "embed": dict(shape=(V, 768), dtype=BF16, group="embed", init=("normal", 1.0)),
    "head.weight": dict(shape=(V, 768), dtype=BF16, group="head", init=ZERO),
    **{
        f"value_embeds.{i}": dict(shape=(V, 768), dtype=BF16, group="value_embed", init=("normal", 1.0))
        for i in range(3)
    },
    **{
        f"blocks.{i}.attention.qk": dict(
            shape=(2, 768, 768), dtype=FP32, group="matrix", init=[("uniform", STD_768)] * 2
        )
        for i in range(12)
        if i != 7
    },
    **{
        f"blocks.{i}.attention.v_proj": dict(
            shape=(2, 768, 768), dtype=FP32, group="matrix", init=[("uniform", STD_768), ZERO]
        )
        for i in range(12)
        if i != 7
    },
    # B11: the gates are in the Muon group
    **{
        f"blocks.{i}.attention.head_gate_weight": dict(shape=(6, 12), dtype=BF16, group="matrix", init=ZERO)
        for i in range(12)
        if i != 7
    },
    **{
        f"blocks.{i}.mlp.up_down": dict(
            shape=(2, 768, 3072), dtype=FP32, group="matrix", init=[("uniform", STD_768), ZERO]
        )
        for i in range(1, 12)
    },
    "scalars.scalar": dict(
        shape=(47,), dtype=FP32, group="scalar", init=[-1.5] * 6 + [0.0] * 12 + [0.5] * (11 + 6) + [1.0] * 12
    ),
}

# C92.2. Both MLP matrices are published as 2816 x 768 (hidden x 768). The shape here is this repository's
# (2, D, M). Narrow layers are stored without unused rows (INSIDE, "narrow heads and values";
# C92.2 says that training is the same)
ROOT_1_1 = math.sqrt(1.1)
STD_FC = 768**-0.5 / math.sqrt(3)  # generators: uniform with bound 768^-0.5
FRONTIER_QK_DIM = {0: 64, 1: 64, 2: 64, 3: 128, 5: 64, 8: 64, 10: 128}
FRONTIER_PARAMETERS = {
    "embed": dict(shape=(V, 768), dtype=BF16, group="embed", init=("normal", 0.005)),  # a copy of the head
    "head.weight": dict(shape=(V, 768), dtype=BF16, group="head", init=("normal", 0.005)),
    **{
        f"value_embeds.{i}": dict(shape=(V, 768), dtype=BF16, group="value_embed", init=("normal", 0.01))
        for i in range(4)
    },
    "ngram": dict(shape=(84_602_880, 768), dtype=BF16, group="ngram", init=ZERO),
    **{
        f"blocks.{i}.attention.qk": dict(
            shape=(6, 2 * k, 768), dtype=BF16, group="matrix", init=[("uniform", STD_768)] * 6
        )
        for i, k in FRONTIER_QK_DIM.items()
    },
    **{
        f"blocks.{i}.attention.v_proj": dict(
            shape=(2, 768, 768), dtype=BF16, group="matrix", init=[("uniform", STD_768)] * 2
        )
        for i in (0, 2, 3, 5, 10)
    },
    **{
        f"blocks.{i}.attention.v": dict(
            shape=(1, 6 * 64, 768), dtype=BF16, group="matrix", init=[("uniform", STD_768)]
        )
        for i in (1, 8)
    },
    **{
        f"blocks.{i}.attention.proj": dict(
            shape=(1, 768, 6 * 64), dtype=BF16, group="matrix", init=[("uniform", STD_768)]
        )
        for i in (1, 8)
    },
    **{
        f"blocks.{i}.attention.ve_gate_weight": dict(shape=(6, 12), dtype=BF16, group="gate", init=ZERO)
        for i in (1, 2, 8)
    },
    **{
        f"blocks.{i}.mlp.up_down": dict(
            shape=(2, 768, 2816), dtype=BF16, group="matrix", init=[("uniform", STD_768), ZERO]
        )
        for i in (0, 1, 2, 3, 4, 5, 6, 8, 9, 10)
    },
    "blocks.8.second_mlp.up_down": dict(
        shape=(2, 768, 2816), dtype=BF16, group="matrix", init=[("uniform", STD_768), ZERO]
    ),
    "blocks.0.smear_gate": dict(shape=(12,), dtype=BF16, group="gate", init=ZERO),
    # Pre: XSA 1 and 3 (12), attention gate 3 (6), alpha 0 1 2, beta 0 1. Bias = start / 0.1, sorted
    "blocks.0.gates.fc": dict(shape=(64, 768), dtype=BF16, group="gate", init=("uniform", STD_FC)),
    "blocks.0.gates.proj": dict(shape=(23, 64), dtype=BF16, group="gate", init=ZERO),
    "blocks.0.gates.bias": dict(
        shape=(23,), dtype=BF16, group="gate", init=[0.0] * (12 + 3) + [0.5] * 2 + [2.5] * 6
    ),
    # Post: attention gate 10 (6), alpha 4 5 7, beta 4 5 9, skip
    "blocks.4.gates.fc": dict(shape=(64, 768), dtype=BF16, group="gate", init=("uniform", STD_FC)),
    "blocks.4.gates.proj": dict(shape=(13, 64), dtype=BF16, group="gate", init=ZERO),
    "blocks.4.gates.bias": dict(
        shape=(13,), dtype=BF16, group="gate", init=[0.0] * 3 + [0.5] * 3 + [2.5] * 6 + [5.0]
    ),
    # MUDD id 0: m0..m5 m10 = 0, m11 = 0.05, m9 = m13 = 1, m8 = m12 = sqrt(1.1), m6 = m7 = 2. C90.3:
    # sqrt(1.1) / 0.1 becomes 10.5 in bf16
    "blocks.10.mudd.fc": dict(shape=(64, 768), dtype=BF16, group="gate", init=("uniform", STD_FC)),
    "blocks.10.mudd.proj": dict(shape=(14, 64), dtype=BF16, group="gate", init=ZERO),
    "blocks.10.mudd.bias": dict(
        shape=(14,), dtype=BF16, group="gate", init=[0.0] * 7 + [0.5] + [10.0] * 2 + [10.5] * 2 + [20.0] * 2
    ),
    # MUDD id 1: n1 = -0.5. G is published as 14 x 12 x 64, of which 10 x 12 x 64 are used (C92.2)
    "blocks.10.mudd_out.fc": dict(shape=(64, 768), dtype=BF16, group="gate", init=("uniform", STD_FC)),
    "blocks.10.mudd_out.proj": dict(shape=(10, 64), dtype=BF16, group="gate", init=ZERO),
    "blocks.10.mudd_out.bias": dict(shape=(10,), dtype=BF16, group="gate", init=[-5.0] + [0.0] * 9),
    "blocks.10.mudd_out.group_proj": dict(shape=(10 * 12, 64), dtype=BF16, group="gate", init=ZERO),
    # C92.2, C92.3 (unused r and p), C92.16 (O of layer 10 has s1). Layers with attention: 0 1 2 3 5 8 10
    "scalars.scalar": dict(
        shape=(16,), dtype=FP32, group="scalar", init=[-1.5, 0.0] + [0.5] * 7 + [1.0] * 7
    ),
    # r of attention: all but 6 and 10. r of the MLP: all but 10
    "scalars.residual": dict(shape=(9 + 10,), dtype=FP32, group="residual", init=[ROOT_1_1] * 19),
    # p of attention: all but 4 6 7 9 10. p of the MLP: all but 7 and 10
    "scalars.mix": dict(shape=(6 + 9,), dtype=FP32, group="mix", init=[1.0] * 15),
    # C92.16: one scale serves pre and post
    "scalars.gates_scale": dict(shape=(1,), dtype=FP32, group="gate", init=[0.1]),
}

# D: 16 layers, width 1,024, 8 x 128, MLP 4,096. D table, record 9: 5 value embeddings in layers 0-4 and 11-15.
# D7: all layers have attention and MLP, gates read 16 channels. Skips into layers 9, 10, 11. Starts and dtypes
# are those of B. Scalars: 3 skips, 16 a, 16 b, 16 s0, 10 s1
STD_1024 = 0.5 * 1024**-0.5
TRACK_2_PARAMETERS = {
    "embed": dict(shape=(V, 1024), dtype=BF16, group="embed", init=("normal", 1.0)),
    "head.weight": dict(shape=(V, 1024), dtype=BF16, group="head", init=ZERO),
    **{
        f"value_embeds.{i}": dict(shape=(V, 1024), dtype=BF16, group="value_embed", init=("normal", 1.0))
        for i in range(5)
    },
    **{
        f"blocks.{i}.attention.qk": dict(
            shape=(2, 1024, 1024), dtype=FP32, group="matrix", init=[("uniform", STD_1024)] * 2
        )
        for i in range(16)
    },
    **{
        f"blocks.{i}.attention.v_proj": dict(
            shape=(2, 1024, 1024), dtype=FP32, group="matrix", init=[("uniform", STD_1024), ZERO]
        )
        for i in range(16)
    },
    **{
        f"blocks.{i}.attention.head_gate_weight": dict(shape=(8, 16), dtype=BF16, group="matrix", init=ZERO)
        for i in range(16)
    },
    **{
        f"blocks.{i}.mlp.up_down": dict(
            shape=(2, 1024, 4096), dtype=FP32, group="matrix", init=[("uniform", STD_1024), ZERO]
        )
        for i in range(16)
    },
    "scalars.scalar": dict(
        shape=(61,), dtype=FP32, group="scalar", init=[-1.5] * 3 + [0.0] * 16 + [0.5] * 26 + [1.0] * 16
    ),
}

# Record 32 with H1 and H2: no matrix begins with zeros, all have std 768^-0.5 (also the wide one of the MLP, not
# 1 / sqrt(fan_in)). Norm gains start at 1 (H2, v1), output gains at 0 (v1 and v2). Gains are float32 here (H2: bf16).
# The gates begin with zeros as in B, so they are in group scalar: a sphere of radius 0 has one point
STD_MUONH = ("uniform", 768**-0.5)
MUONH_PARAMETERS = {
    "embed": dict(shape=(V, 768), dtype=BF16, group="embed", init=("normal", 1.0)),
    "head.weight": dict(shape=(V, 768), dtype=BF16, group="head", init=ZERO),
    **{
        f"value_embeds.{i}": dict(shape=(V, 768), dtype=BF16, group="value_embed", init=("normal", 1.0))
        for i in range(3)
    },
    **{
        f"blocks.{i}.attention.qk": dict(shape=(2, 768, 768), dtype=FP32, group="matrix", init=[STD_MUONH] * 2)
        for i in range(12)
        if i != 7
    },
    **{
        f"blocks.{i}.attention.v_proj": dict(
            shape=(2, 768, 768), dtype=FP32, group="matrix", init=[STD_MUONH] * 2
        )
        for i in range(12)
        if i != 7
    },
    **{
        f"blocks.{i}.attention.head_gate_weight": dict(shape=(6, 12), dtype=BF16, group="scalar", init=ZERO)
        for i in range(12)
        if i != 7
    },
    **{
        f"blocks.{i}.mlp.up_down": dict(
            shape=(2, 768, 3072), dtype=FP32, group="matrix", init=[STD_MUONH] * 2
        )
        for i in range(1, 12)
    },
    **{
        f"blocks.{i}.attn_gain_in": dict(shape=(768,), dtype=FP32, group="gain", init=("constant", 1.0))
        for i in range(12)
        if i != 7
    },
    **{
        f"blocks.{i}.attn_gain_out": dict(shape=(768,), dtype=FP32, group="gain", init=ZERO)
        for i in range(12)
        if i != 7
    },
    **{
        f"blocks.{i}.mlp_gain_in": dict(shape=(768,), dtype=FP32, group="gain", init=("constant", 1.0))
        for i in range(1, 12)
    },
    **{
        f"blocks.{i}.mlp_gain_out": dict(shape=(768,), dtype=FP32, group="gain", init=ZERO)
        for i in range(1, 12)
    },
    "scalars.scalar": dict(  # B7
        shape=(47,), dtype=FP32, group="scalar", init=[-1.5] * 6 + [0.0] * 12 + [0.5] * 17 + [1.0] * 12
    ),
}

# JSON: model_dim 128, 2 heads of 64, mlp_ratio 2, vocab 257 padded to 272, layers, init_std 0.5 (read: times
# D^-0.5, uniform, as in B4), embed_std, zero_init "mlp", embed_dtype, matrix_dtype. Layer 0
# has no attention. Value embeddings: layer 1 table 1, layer 2 table 0, layer 3 table 1. Two tables fit
# num_params = 2,695,182 (derived). The start of the head, the table and the scalars is not in the JSON
STD_128 = 0.5 * 128**-0.5
LAPTOP_PARAMETERS = {
    "embed": dict(shape=(272, 128), dtype=FP32, group="embed", init=("normal", 1.0)),
    "head.weight": dict(shape=(272, 128), dtype=FP32, group="head", init=ZERO),
    **{
        f"value_embeds.{i}": dict(shape=(272, 128), dtype=FP32, group="value_embed", init=("normal", 1.0))
        for i in range(2)
    },
    "ngram": dict(shape=(16_384, 128), dtype=FP32, group="ngram", init=ZERO),
    **{
        f"blocks.{i}.attention.qk": dict(
            shape=(2, 128, 128), dtype=FP32, group="matrix", init=[("uniform", STD_128)] * 2
        )
        for i in (1, 2, 3)
    },
    **{
        f"blocks.{i}.attention.v_proj": dict(
            shape=(2, 128, 128), dtype=FP32, group="matrix", init=[("uniform", STD_128)] * 2
        )
        for i in (1, 2, 3)
    },
    **{
        f"blocks.{i}.mlp.up_down": dict(
            shape=(2, 128, 256), dtype=FP32, group="matrix", init=[("uniform", STD_128), ZERO]
        )
        for i in range(4)
    },
    # 14 scalars complete num_params = 2,695,182: 2 skips, 3 s0, 3 s1, and x0 and n-grams in 3 layers
    "scalars.scalar": dict(
        shape=(8,), dtype=FP32, group="scalar", init=[-1.5] * 2 + [0.5] * 6
    ),
    "scalars.mix": dict(shape=(6,), dtype=FP32, group="mix", init=[0.0] * 3 + [0.05] * 3),
}


PARAMETERS = {
    "track_1": TRACK_1_PARAMETERS, "frontier": FRONTIER_PARAMETERS, "track_2": TRACK_2_PARAMETERS,
    "muonh": MUONH_PARAMETERS, "laptop": LAPTOP_PARAMETERS,
}

# -----------------------------------------------------------------------------------------------------------
# 4. GROUPS

GROUPS = {
    # B11
    "track_1": {
        "matrix": dict(rule="muon", lr=0.05, betas=(None, None), weight_decay=0.0, every=1, late_every=0),
        "embed": dict(
            rule="adamw", lr=0.008 * 75, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0
        ),
        "value_embed": dict(
            rule="adamw", lr=0.008 * 75, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0
        ),
        "head": dict(rule="adamw", lr=0.008, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "scalar": dict(
            rule="adamw", lr=0.008 * 5, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0
        ),
    },
    # C92.7 (table), C92.4. Matrix: W loses (2.25 lr) eta W. Adam: wd 0.005 * mult * lr_p^2. every 2: odd
    # steps 1, 3, ...
    "frontier": {
        "matrix": dict(
            rule="anvil", lr=0.023, betas=(None, 0.9), weight_decay=2.25 * 0.023, every=1, late_every=0
        ),
        "embed": dict(
            rule="adamw", lr=0.008, betas=(0.5, 0.95), weight_decay=0.008 * 0.005 * 150, every=2,
            late_every=0,
        ),
        "head": dict(
            rule="adamw", lr=0.008, betas=(0.5, 0.95), weight_decay=0.008 * 0.005 * 150, every=2,
            late_every=0,
        ),
        "value_embed": dict(
            rule="adamw", lr=0.008 * 70, betas=(0.75, 0.95), weight_decay=0.008 * 70 * 0.005 * 5, every=2,
            late_every=4, late_betas=(0.5625, 0.9025), late_weight_decay=0.008 * 70 * 0.005 * 10,
        ),
        # C92.4: no first moment. The README of record 92 says betas 0.75/0.95, which has no effect
        "ngram": dict(
            rule="row_adam", lr=0.008 * 70, betas=(0.0, 0.95), weight_decay=0.008 * 70 * 0.005 * 5, every=2,
            late_every=4, late_betas=(0.0, 0.9025), late_weight_decay=0.008 * 70 * 0.005 * 10,
        ),
        "scalar": dict(
            rule="adamw", lr=0.008 * 5, betas=(0.9, 0.99), weight_decay=0.0, every=2, late_every=0
        ),
        "residual": dict(
            rule="adamw", lr=0.008 * 5, betas=(0.9, 0.95), weight_decay=0.0, every=2, late_every=0
        ),
        "mix": dict(rule="adamw", lr=0.008, betas=(0.9, 0.95), weight_decay=0.0, every=2, late_every=0),
        "gate": dict(
            rule="adamw", lr=0.008, betas=(0.9, 0.99), weight_decay=0.008 * 0.005 * 1, every=2, late_every=0
        ),
    },
    # Record 2 of the medium track (D1), halved because the last stages double the rates. Mechanisms of record 18
    # (NorMuon, cautious decay, tied head) are not in the preset. Scalars: B11
    "track_2": {
        "matrix": dict(rule="muon", lr=0.025 / 2, betas=(None, None), weight_decay=0.0, every=1, late_every=0),
        "embed": dict(rule="adamw", lr=0.3 / 2, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "value_embed": dict(rule="adamw", lr=0.004 * 75, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "head": dict(rule="adamw", lr=0.003 / 2, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "scalar": dict(rule="adamw", lr=0.008 * 5, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
    },
    # H2, table of v2 at B = 2^19, and H1: the rule is NorMuon on a sphere. The preset does not scale rates with the
    # batch. Gains: H2. Scalars: B11, since they are record 32's
    "muonh": {
        "matrix": dict(rule="normuonh", lr=0.02, betas=(None, 0.95), weight_decay=0.0, every=1, late_every=0),
        "embed": dict(rule="adamw", lr=0.3, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "value_embed": dict(rule="adamw", lr=0.3, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "head": dict(rule="adamw", lr=0.004, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "scalar": dict(rule="adamw", lr=0.008 * 5, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
        "gain": dict(rule="adamw", lr=0.1, betas=(0.8, 0.95), weight_decay=0.0, every=1, late_every=0),
    },
    # JSON
    "laptop": {
        "matrix": dict(rule="normuon", lr=0.07, betas=(None, 0.9), weight_decay=0.0, every=1, late_every=0),
        "embed": dict(rule="adamw", lr=0.3, betas=(0.5, 0.95), weight_decay=0.0, every=1, late_every=0),
        "value_embed": dict(
            rule="adamw", lr=0.3, betas=(0.75, 0.95), weight_decay=0.0, every=1, late_every=0
        ),
        "ngram": dict(rule="row_adam", lr=0.3, betas=(0.0, 0.95), weight_decay=0.0, every=1, late_every=0),
        "head": dict(rule="adamw", lr=0.008, betas=(0.5, 0.95), weight_decay=0.0, every=1, late_every=0),
        "scalar": dict(rule="adamw", lr=0.04, betas=(0.9, 0.99), weight_decay=0.0, every=1, late_every=0),
        "mix": dict(rule="adamw", lr=0.008, betas=(0.9, 0.95), weight_decay=0.0, every=1, late_every=0),
    },
}

# margin and eps: X = U / (margin * norm + eps)
POLYNOMIALS = {
    # Section 0
    "newton_schulz": dict(margin=1.0, eps=1e-7, maps=((3.4445, -4.7750, 2.0315),) * 5),
    # C38
    "polar_express": dict(
        margin=1.02, eps=1e-6,
        maps=(
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
    ),
    # C92.7. The factor is 1.05 * sqrt(trace of the first Gram matrix) + 1e-6
    "six_maps": dict(
        margin=1.05, eps=1e-6,
        maps=(
            (3.923798038567, -6.095026865488, 3.905234618423),
            (3.278126713798, -3.328923386476, 0.989127286973),
            (3.505298394150, -5.137358782410, 1.968325560615),
            (2.815058591845, -3.685181239622, 1.417196497642),
            (2.245503932403, -2.443826979899, 0.963091710461),
            (2.256537145403, -2.166840097229, 0.929501253245),
        ),
    ),
}

OPTIMIZER = {
    # B11, section 0 (EMA momentum and Nesterov)
    "track_1": dict(
        adam_eps=1e-8, polynomial="newton_schulz", cautious=False, momentum_start=0.85, momentum_end=0.95,
        momentum_warmup_steps=300, momentum_cooldown_steps=0, tied=False,
    ),
    # C92.7, C92.4
    "frontier": dict(
        adam_eps=1e-10, polynomial="six_maps", cautious=True, late_start=336, last_tied_update=1175,
        slow_start=514, momentum_start=0.85, momentum_end=0.93, momentum_warmup_steps=240,
        momentum_cooldown_steps=50, tied=True,
    ),
    # D7 has eps 1e-8, and is silent on the momentum: B11
    "track_2": dict(
        adam_eps=1e-8, polynomial="newton_schulz", cautious=False, momentum_start=0.85, momentum_end=0.95,
        momentum_warmup_steps=300, momentum_cooldown_steps=0, tied=False,
    ),
    # H1, H2: 1e-10 for gradients of a mean over tokens. Here gradients are a sum over 49,152 tokens
    "muonh": dict(
        adam_eps=1e-10 * 49_152, polynomial="polar_express", cautious=False, momentum_start=0.85,
        momentum_end=0.95, momentum_warmup_steps=300, momentum_cooldown_steps=0, tied=False,
    ),
    # JSON
    "laptop": dict(
        adam_eps=0.01, polynomial="polar_express", cautious=False, momentum_start=0.8, momentum_end=0.8,
        momentum_warmup_steps=0, momentum_cooldown_steps=0, tied=False,
    ),
}

# -----------------------------------------------------------------------------------------------------------
# 5. MULTIPLIERS: lr and wd relative to the group. A tuple has one entry for each stacked matrix. Parameters
# without an entry have 1, 1

UP, DOWN = math.sqrt(2816 / 768), 2 * math.sqrt(2816 / 768)  # C92.7: 1.914854 and 3.829708
MULTIPLIERS = {
    "track_1": {},  # B11: max(1, rows/cols)^0.5 is 1 for all
    "frontier": {
        # C92.7. The decay has the shape factor once, by eta, so wd is 1
        "blocks.*.attention.qk": dict(lr=1.0, wd=1.0),
        "blocks.*.attention.v_proj": dict(lr=(1.0, 1.0), wd=1.0),
        # C92.16: as if padded to 768 x 768, so factor 1
        "blocks.*.attention.v": dict(lr=1.0, wd=1.0),
        "blocks.*.attention.proj": dict(lr=1.0, wd=1.0),
        "blocks.*.mlp.up_down": dict(lr=(UP, DOWN), wd=1.0),
        "blocks.8.second_mlp.up_down": dict(lr=(UP, DOWN), wd=1.0),
        # C92.7, table. wd: decay is lr_p^2 * 0.005 * wd mult, so it has the lr multiplier twice
        "blocks.0.smear_gate": dict(lr=0.01, wd=0.0),
        "blocks.*.attention.ve_gate_weight": dict(lr=1.0, wd=1.0),
        "blocks.10.mudd.fc": dict(lr=0.25, wd=0.25),
        "blocks.10.mudd.proj": dict(lr=0.25, wd=0.25),
        "blocks.10.mudd.bias": dict(lr=0.25, wd=0.0),
        "blocks.10.mudd_out.fc": dict(lr=0.25, wd=0.25),
        "blocks.10.mudd_out.proj": dict(lr=0.25, wd=0.25),
        "blocks.10.mudd_out.group_proj": dict(lr=0.25, wd=0.25),
        "blocks.10.mudd_out.bias": dict(lr=0.25, wd=0.0),
        "blocks.0.gates.fc": dict(lr=0.1, wd=0.1),
        "blocks.0.gates.proj": dict(lr=0.1, wd=0.1),
        "blocks.0.gates.bias": dict(lr=0.1, wd=0.0),
        "blocks.4.gates.fc": dict(lr=0.1, wd=0.1),
        "blocks.4.gates.proj": dict(lr=0.1, wd=0.1),
        "blocks.4.gates.bias": dict(lr=0.1, wd=0.0),
        "scalars.gates_scale": dict(lr=0.1, wd=0.0),
    },
    "track_2": {"blocks.*.mlp.up_down": dict(lr=1.0)},
    "muonh": {},  # H1: the shape factor has no effect in Hyperball
    "laptop": {"blocks.*.mlp.up_down": dict(lr=(1.0, 1.0), wd=1.0)},  # JSON: mlp_lr_mul
}
# -----------------------------------------------------------------------------------------------------------
# 6. STATES

MOMENTS_BF16, MOMENTS_FP32 = dict(exp_avg=BF16, exp_avg_sq=BF16), dict(exp_avg=FP32, exp_avg_sq=FP32)
# By group and dtype of the parameters
STATES = {
    # B8. The moments of the float32 scalars are float32 here, and bf16 in the publication
    "track_1": {
        "matrix, float32": dict(momentum=FP32), "matrix, bfloat16": dict(momentum=BF16),
        "embed, bfloat16": MOMENTS_BF16, "value_embed, bfloat16": MOMENTS_BF16, "head, bfloat16": MOMENTS_BF16,
        "scalar, float32": MOMENTS_FP32,
    },
    # C92.7, C90.3 (all states fp32), C92.4 and C92.13 (per row: v, last event). Adam parameters in bf16 have no
    # low bits (C90.3)
    "frontier": {
        "matrix, bfloat16": dict(momentum=FP32, slow_momentum=FP32, low_bits="int16", second_momentum=FP32),
        "embed, bfloat16": MOMENTS_FP32, "head, bfloat16": MOMENTS_FP32, "value_embed, bfloat16": MOMENTS_FP32,
        "ngram, bfloat16": dict(exp_avg_sq=FP32, last_update=FP32), "scalar, float32": MOMENTS_FP32,
        "residual, float32": MOMENTS_FP32, "mix, float32": MOMENTS_FP32, "gate, bfloat16": MOMENTS_FP32,
        "gate, float32": MOMENTS_FP32,
    },
    # H1: variance and norms fp32, R stored once
    "muonh": {
        "matrix, float32": dict(momentum=FP32, second_momentum=FP32, radius=FP32),
        "embed, bfloat16": MOMENTS_BF16, "value_embed, bfloat16": MOMENTS_BF16, "head, bfloat16": MOMENTS_BF16,
        "scalar, float32": MOMENTS_FP32, "scalar, bfloat16": MOMENTS_BF16, "gain, float32": MOMENTS_FP32,
    },
    # JSON: all parameters and states are float32
    "laptop": {
        "matrix, float32": dict(momentum=FP32, second_momentum=FP32), "embed, float32": MOMENTS_FP32,
        "value_embed, float32": MOMENTS_FP32, "ngram, float32": dict(exp_avg_sq=FP32, last_update=FP32),
        "head, float32": MOMENTS_FP32, "scalar, float32": MOMENTS_FP32, "mix, float32": MOMENTS_FP32,
    },
}
STATES["track_2"] = STATES["track_1"]  # B
# C92.7, C92.16: the variance has one value per row, or per column of wide QK. The hidden x 768 MLP of the
# publication is stored as 768 x hidden here, so its rows are columns
LANES = {
    "track_1": {}, "track_2": {}, "muonh": {"*.qk": (768, 1), "*.up_down": (1, 3072)},
    "laptop": {"*.qk": (128, 1), "*.up_down": (1, 256)},
    "frontier": {
        "*.qk": (1, 768), "*.v_proj": (768, 1), "*.v": (384, 1), "*.proj": (768, 1), "*.up_down": (1, 2816),
    },
}

# -----------------------------------------------------------------------------------------------------------
# 7. ROPE: number of rotating frequencies, radians per token by index, softmax scale

# B6, C92.3: (1/1024)^(i/31)
START_32 = {
    0: 1.0, 1: 1024 ** (-1 / 31), 8: 1024 ** (-8 / 31), 16: 1024 ** (-16 / 31), 24: 1024 ** (-24 / 31),
    31: 1 / 1024,
}
# B6, applied by hand for windows of 3, 7, 11, 13 blocks. C92.12.10: 1 0.07363021 0.006769144 0.0002253606
LONG_13 = {
    0: 1.0, 1: 0.799638231117, 8: 0.0736302051215, 16: 0.00676914398306, 24: 0.00107801076386,
    31: 0.000225360576923,
}
# Windows of 1, 3, 5, 6 blocks. C92.12.10: 0.7499319 0.03491806 0.004657422 0.0001627604
SHORT_6 = {
    0: 0.74993188636, 1: 0.529482540284, 8: 0.0349180559781, 16: 0.00465742152697, 24: 0.000778563329456,
    31: 0.000162760416667,
}
GROWTH_7 = 0.2 * math.log(7 / 3) + 1
GROWTH_11 = 0.2 * math.log(11 / 7) + 1
GROWTH_13 = 0.2 * math.log(13 / 11) + 1
GROWTH_1_3, GROWTH_3_5, GROWTH_5_6 = (
    0.2 * math.log(3) + 1, 0.2 * math.log(5 / 3) + 1, 0.2 * math.log(6 / 5) + 1,
)

TRACK_1_ROPE = dict(  # B6: all layers follow the long window. 0.1, 0.1169, 0.1275, 0.1318
    start=dict(
        short=dict(rotating=32, freqs=START_32, scale=0.1), long=dict(rotating=32, freqs=START_32, scale=0.1)
    ),
    final=dict(
        short=dict(rotating=32, freqs=LONG_13, scale=0.1 * GROWTH_7 * GROWTH_11 * GROWTH_13),
        long=dict(rotating=32, freqs=LONG_13, scale=0.1 * GROWTH_7 * GROWTH_11 * GROWTH_13),
    ),
)
ROPE = {
    "track_1": TRACK_1_ROPE,
    # C92.2, C92.3, C92.9: 0.13, 0.158564, 0.174764, 0.181136 and 0.085, 0.099404, 0.108390, 0.112011
    "frontier": dict(
        start=dict(
            short=dict(rotating=32, freqs=START_32, scale=0.13),
            long=dict(rotating=32, freqs=START_32, scale=0.085),
        ),
        final=dict(
            short=dict(rotating=32, freqs=SHORT_6, scale=0.13 * GROWTH_1_3 * GROWTH_3_5 * GROWTH_5_6),
            long=dict(rotating=32, freqs=LONG_13, scale=0.085 * GROWTH_7 * GROWTH_11 * GROWTH_13),
        ),
    ),
    # D7: updates up to 13 blocks only. Base, number and start of the scale are B6's (reading: D7 does not
    # repeat them)
    "track_2": dict(
        start=dict(
            short=dict(rotating=32, freqs=START_32, scale=0.1),
            long=dict(rotating=32, freqs=START_32, scale=0.1),
        ),
        final=dict(
            short=dict(rotating=32, freqs=LONG_13, scale=0.1 * GROWTH_7 * GROWTH_11 * GROWTH_13),
            long=dict(rotating=32, freqs=LONG_13, scale=0.1 * GROWTH_7 * GROWTH_11 * GROWTH_13),
        ),
    ),
    "muonh": TRACK_1_ROPE,  # record 32's model (reading)
    # JSON: attention_scale 0.15, yarn_max_window 65536, rotary_pairs halves, head_dim 64. Half of the
    # channels rotate: INSIDE. Base 1024 and the form of B6, for windows 256, 512, 1024 (reading: all layers
    # follow the long window, as in B6)
    "laptop": dict(
        start=dict(
            short=dict(
                rotating=16,
                freqs={
                    0: 1.0, 1: 1024 ** (-1 / 15), 4: 1024 ** (-4 / 15), 8: 1024 ** (-8 / 15),
                    12: 1024 ** (-12 / 15), 15: 1 / 1024,
                },
                scale=0.15,
            ),
            long=dict(
                rotating=16,
                freqs={
                    0: 1.0, 1: 1024 ** (-1 / 15), 4: 1024 ** (-4 / 15), 8: 1024 ** (-8 / 15),
                    12: 1024 ** (-12 / 15), 15: 1 / 1024,
                },
                scale=0.15,
            ),
        ),
        final=dict(
            short=dict(
                rotating=16,
                freqs={
                    0: 1.0, 1: 0.565612098229, 4: 0.0560068675057, 8: 0.00620508392692, 12: 1 / 1024,
                    15: 1 / 4096,
                },
                scale=0.15 * (0.2 * math.log(2) + 1) ** 2,
            ),
            long=dict(
                rotating=16,
                freqs={
                    0: 1.0, 1: 0.565612098229, 4: 0.0560068675057, 8: 0.00620508392692, 12: 1 / 1024,
                    15: 1 / 4096,
                },
                scale=0.15 * (0.2 * math.log(2) + 1) ** 2,
            ),
        ),
    ),
}

# -----------------------------------------------------------------------------------------------------------
# 8. AVERAGES of frontier, C92.8, in this order. First tick: a copy. Later A += rate (W - A). Ticks after the
# update of a step

V_AND_O = ("*.attention.v_proj", "*.attention.v", "*.attention.proj")
VO_AND_MLP = (*V_AND_O, "*.up_down")
BLEND_STEPS = [*range(901, 1190, 4), 1192, 1193]
# rates by step. 1: the value is copied. The record counts step 896 first, which has the head of step 895
AVERAGES = [
    dict(
        name="tail-ema", parameters=("embed", "head.weight"), weight=0.65,
        rates={895: 1.0, **dict.fromkeys(range(897, 1193, 2), 1 - (1 - 2 / 299) ** 2), 1193: 2 / 299},
    ),
    dict(
        name="tail-avg", parameters=VO_AND_MLP, weight=1.0,
        rates={945: 1.0, **dict.fromkeys(range(949, 1194, 4), 4 / 53)},
    ),
    dict(
        name="value", parameters=("value_embeds.*",), weight=1.0,
        rates={947: 1.0, **dict.fromkeys(range(951, 1192, 4), 4 / 53)},
    ),
    # from the result of tail-avg: 0.3493 = 0.55 - 0.2007
    dict(
        name="bank-blend, QK", parameters=("*.qk",), weight=0.55,
        rates={897: 1.0, **dict.fromkeys(BLEND_STEPS, 2 / 75)},
    ),
    dict(
        name="bank-blend, VO and MLP", parameters=VO_AND_MLP, weight=0.3493,
        rates={897: 1.0, **dict.fromkeys(BLEND_STEPS, 2 / 75)},
    ),
]
# C92.8: Frobenius norms of before, of embedding, head and the banks QK, VO, MLP
NORMS_RESTORED = (("embed",), ("head.weight",), ("*.qk",), V_AND_O, ("*.up_down",))

# -----------------------------------------------------------------------------------------------------------
# 9. SOFTCAP AND FP8

SOFTCAP = {  # cap, shift, width. B2, C92.1, JSON. D7 is silent: B2
    "track_1": (30.0, 0.0, 7.5), "muonh": (30.0, 0.0, 7.5), "track_2": (30.0, 0.0, 7.5),
    "frontier": (23.0, 5.0, 7.5), "laptop": (23.0, 5.0, 7.5),
}
FP8_HEAD = {  # scales of input, weight and gradient. B9. C92.5: 2.0 / 448, and INSIDE for the two others
    "track_1": (math.sqrt(768) / 448, 2.0**-9, 1 / 448), "frontier": (math.sqrt(768) / 448, 2.0 / 448, 1 / 448),
}
# C92.6. The loss is not divided by 8 ranks here, so the scales of gradients are 8 times the published ones
FP8_QKV_LIMIT = 8.0  # of inputs 8, of gradients 8 * 1
FP8_MLP_FACTORS = (1.03 / 448, 1.25 / 57_344)  # of the largest value of the step before: post, dpre
FP8_MLP_FLOORS = (1e-6, 1e-12)
FP8_MLP_STARTS = (1.0, 8 * 2.0**-6)
