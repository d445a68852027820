"""Constants of the published records against tables copied from their scripts.

The ladder is checked in its frozen script, together with mechanisms that only old records use. The medium track is a
preset of the script in the root.
"""

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, gpt

sys.path.insert(0, str(ROOT / "records"))
import results  # noqa: E402

frozen = results.load_script(ROOT / "records" / "laptop" / "2026-11-21_ladder")
BATCH, SMALL = 512 * 1024, 8 * 48 * 1024
HIDDEN_DEFAULT = 1 / math.sqrt(3)  # standard deviation of PyTorch's default, times sqrt(inputs)

# name: minutes, steps, tokens per step, cooldown steps (or their fraction), options of the record
PUBLISHED = {
    "2024-06-06_adamw_rotary": (
        31.4,
        9536,
        BATCH,
        2048,
        dict(
            matrix_rule="adamw",
            matrix_lr=0.0018,
            embed_lr=0.0018,
            adam_betas=(0.9, 0.95),
            final_lr_frac=0,
            matrix_weight_decay=0.1,
            adam_weight_decay=0.1,
            rotary="full",
            rotary_base=10_000,
            num_heads=12,
            head_dim=64,
            activation="gelu",
            tie_head="on",
            qk_norm="off",
            depth_scale="on",
            zero_init="off",
            softcap=0,
            embed_norm="off",
            num_value_embeds=0,
            x0_shortcut="off",
            skips="off",
            drop_attention="off",
            drop_mlp="off",
            seq_len=1024,
            document_mask="off",
            row_start="anywhere",
            attention_gate_dim=0,
            fp8_head="off",
            residual_dtype="float32",
            attention_scale=0,
            yarn_max_window=0,
            init_std=HIDDEN_DEFAULT,
            adam_eps=1e-8 * 49_152,
        ),
    ),
    "2024-10-04_muon": (
        24.9,
        7000,
        BATCH,
        2000,
        dict(
            matrix_rule="muon",
            matrix_lr=0.2 * 0.0018,
            embed_lr=2 * 0.0018,
            adam_weight_decay=0,
            lr_warmup_frac=0,
            matrix_weight_decay=0,
            momentum_form="sum",
            momentum_end=0.95,
            fuse_qkv="on",
            muon_scale="measured_rms",
        ),
    ),
    "2024-10-11_split_qkv": (
        22.3,
        6200,
        BATCH,
        1800,
        dict(vocab_multiple=1, fuse_qkv="off", muon_scale="rms", embed_lr=0.0036, matrix_lr=0.1 * 0.0036),
    ),
    "2024-10-14_modern_blocks": (
        15.2,
        5100,
        BATCH,
        1450,
        dict(
            vocab_multiple=128,
            activation="relu_squared",
            zero_init="on",
            qk_norm="on",
            num_heads=6,
            head_dim=128,
            depth_scale="off",
        ),
    ),
    "2024-11-03_untied_head": (
        10.8,
        4578,
        BATCH,
        1308,
        dict(
            tie_head="off",
            embed_norm="on",
            embed_lr=0.3,
            head_lr=0.002,
            adam_betas=(0.9, 0.95),
            matrix_lr=0.02,
            muon_scale="spectral",
            lr_warmup_frac=0,
            mlp_up_lr_mul=2,
        ),
    ),
    "2024-11-06_shortcuts": (
        8.2,
        3200,
        BATCH,
        914,
        dict(
            value_pattern="first",
            value_mix="lerp",
            x0_shortcut="on",
            scalar_lr=0.02,
            softcap=30,
            momentum_start=0.85,
            momentum_end=0.95,
            momentum_warmup_steps=500,
        ),
    ),
    "2024-11-08_bfloat16": (7.8, 3242, BATCH, 926, dict(residual_dtype="auto")),
    "2024-11-10_unet_skips": (
        7.2,
        3000,
        BATCH,
        900,
        dict(skips="plain", skip_init=1, embed_lr=0.6, head_lr=0.008, matrix_lr=0.04, scalar_lr=0.04),
    ),
    "2024-11-19_flex_attention": (
        5.03,
        1875,
        BATCH,
        562,
        dict(seq_len=65_536, document_mask="on", stages=(frozen.Stage(1, 1024, 1024),)),
    ),
    "2024-11-24_window_warmup": (
        4.66,
        1750,
        BATCH,
        640,
        dict(adam_betas=(0.8, 0.95), matrix_lr=0.05, momentum_warmup_steps=300),
    ),
    "2024-12-04_value_embeds": (
        4.41,
        1530,
        BATCH,
        600,
        dict(num_value_embeds=12, value_pattern="all", value_mix="lerp", value_embed_lr=0.6),
    ),
    "2024-12-08_mirrored_values": (
        3.95,
        1480,
        BATCH,
        600,
        dict(num_value_embeds=6, value_pattern="mirrored", value_mix="scales", momentum_form="ema"),
    ),
    "2024-12-17_sparse_values": (
        3.57,
        1490,
        BATCH,
        600,
        dict(num_value_embeds=3, value_pattern="ends", drop_attention="on", rotary="half", rotary_base=1024),
    ),
    "2025-01-04_softcap_15": (
        3.4,
        1390,
        BATCH,
        0.4,
        dict(softcap=15, embed_dtype="bfloat16", final_lr_frac=0),
    ),
    "2025-01-13_fp8_head": (
        3.142,
        1395,
        BATCH,
        0.4,
        dict(fp8_head="auto", final_lr_frac=0.1, init_std=0.5, adam_betas=(0.8, 0.95)),
    ),
    "2025-01-16_long_short": (
        2.992,
        1393,
        BATCH,
        0.4,
        dict(window_pattern="mixed", attention_scale=0.12, adam_eps=1e-10 * 49_152),
    ),
    "2025-01-26_smaller_batch": (2.933, 1770, SMALL, 0.4, dict(seq_len=49_152, val_seq_len=262_144)),
    "2025-07-13_document_rows": (2.863, 1750, SMALL, 0.45, dict(row_start="document", final_lr_frac=0.05)),
    "2025-07-18_transposed_mlp": (2.817, 1750, SMALL, 0.45, dict(mlp_up_lr_mul=1)),
    "2025-08-23_attention_gate": (2.812, 1695, SMALL, 0.45, dict(attention_gate_dim=12, head_lr=0.008)),
    "2025-09-03_short_documents": (2.731, 1670, SMALL, 0.45, dict(max_doc_len=2048, drop_mlp="off")),
    "2025-09-05_no_first_mlp": (2.717, 1705, SMALL, 0.45, dict(drop_mlp="on", yarn_max_window=0)),
    "2025-09-10_yarn": (2.656, 1670, SMALL, 0.5, dict(attention_scale=0.1, yarn_max_window=65_536)),
    "2025-09-11_sigmoid_skips": (
        2.625,
        1670,
        SMALL,
        0.5,
        dict(skips="sigmoid", skip_init=-1.5, adam_eps=1e-8),
    ),
}


def resolve(preset):
    return frozen.make_config({"preset": preset})


def smoke(**changes):
    return frozen.make_config({"preset": "smoke", "device": "cpu", **changes})


def differing(a, b):
    a, b = resolve(a), resolve(b)
    return {f.name for f in dataclasses.fields(a) if getattr(a, f.name) != getattr(b, f.name)}


def test_the_ladder_is_whole_and_in_order():
    assert list(frozen.LADDER) == list(PUBLISHED) == sorted(PUBLISHED)
    minutes = [rung.minutes for rung in frozen.LADDER.values()]
    assert minutes == [row[0] for row in PUBLISHED.values()] == sorted(minutes, reverse=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_constants_are_the_records(name):
    """Two rungs have a known error: they keep the cooldown fraction of the previous rung."""
    _, steps, tokens, fall, facts = PUBLISHED[name]
    if name in ("2024-12-08_mirrored_values", "2024-12-17_sparse_values"):
        assert fall == 600
        fall = 600 / 1530
    cfg = resolve(name)
    assert (cfg.num_iterations, cfg.tokens_per_step, cfg.vocab_size) == (steps, tokens, 50257)
    assert cfg.cooldown_frac == pytest.approx(fall if fall < 1 else fall / steps)
    for field, value in facts.items():
        assert (
            getattr(cfg, field) == pytest.approx(value)
            if isinstance(value, float)
            else (getattr(cfg, field) == value)
        ), field


def test_the_last_rung_is_the_recipe():
    assert differing("2025-09-11_sigmoid_skips", "track_1") == {"preset"}
    budget = {"preset", "num_iterations", "momentum_warmup_steps", "val_loss_every"}
    assert differing("laptop_2025-09-11_sigmoid_skips", "laptop") == budget


def test_laptop_rungs_differ_as_the_records_do_and_see_equal_tokens():
    """Except options without a measurable effect on a laptop, such as bfloat16 embeddings and Adam's epsilon."""
    names, per_record = list(frozen.LADDER), {"preset", "num_iterations", "cooldown_frac", "val_loss_every"}
    for before, name in zip(names, names[1:]):
        full, small = differing(before, name), differing(f"laptop_{before}", f"laptop_{name}")
        skipped = {"embed_dtype", "adam_eps", "momentum_warmup_steps", "max_doc_len"} | per_record
        if name == "2025-01-26_smaller_batch":  # sequences of 65,536 and 49,152 tokens are both 1,024 here
            skipped |= {"seq_len", "val_seq_len"}
        assert full - skipped == small - skipped, name
    for name in names:
        assert frozen.Schedule(resolve(f"laptop_{name}")).total_tokens() == frozen.LAPTOP_TOKENS
    assert differing("laptop_target", f"laptop_{names[0]}") == {"preset", "num_iterations", "val_loss_every"}


def test_windows_of_the_records():
    """Record 13: 64 floor((1728 x + 64) / 64) tokens. Record 16: floor((1728 x + 128) / 128) blocks of 128."""
    for name, window in (
        ("2024-11-24_window_warmup", lambda x: 64 * math.floor((1728 * x + 64) / 64)),
        ("2024-12-17_sparse_values", lambda x: 128 * math.floor((1728 * x + 128) / 128)),
        ("2025-01-16_long_short", lambda x: 128 * math.floor((1728 * x + 128) / 128)),
    ):
        schedule = frozen.Schedule(resolve(name))
        for step in range(2, schedule.num_iterations - 2):  # one step from a boundary both windows are accepted
            near = {window(other / schedule.num_iterations) for other in (step - 1, step, step + 1)}
            assert schedule.at(step).stage.window_long in near, (name, step)
    assert frozen.Schedule(resolve("2024-11-24_window_warmup")).at(1750).stage.window_long == 1792
    shorts = {s.window_long // 128: s.window_short // 128 for s in resolve("2025-01-16_long_short").stages}
    assert shorts == {blocks: max(1, blocks // 2) for blocks in range(1, 15)}


def test_layers_of_the_records():
    values = {name: [spec.value_embed for spec in resolve(name).layers] for name in frozen.LADDER}
    assert values["2024-11-03_untied_head"] == [None] * 12
    assert values["2024-11-06_shortcuts"] == [None, *["first"] * 11]
    assert values["2024-12-04_value_embeds"] == list(range(12))
    assert values["2024-12-08_mirrored_values"] == [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    assert values["2024-12-17_sparse_values"] == [0, 1, 2, *[None] * 6, 0, 1, 2]
    windows = ["".join(s.attention[0] for s in resolve(n).layers) for n in frozen.LADDER]
    assert windows[0] == "l" * 12 and windows[12] == "lllllllnllll" and windows[15] == "lssslssnsssl"
    skips = [spec.skip_from for spec in resolve("2024-11-10_unet_skips").layers]
    assert skips == [*[None] * 6, 5, 4, 3, 2, 1, 0]


def test_muons_older_forms():
    """m = mu m + g, and updates of root mean square 1, by formula and measured."""
    torch.manual_seed(0)
    grad, buffer, param = torch.randn(3, 2, 24, 8)
    knobs = frozen.Knobs(*map(torch.tensor, (0.9, 1.0, 1.0, 1.0)), (0.9, 0.95), 1e-8, torch.float32)
    lr = torch.full((1, 1, 1), 0.1)
    direction = grad + 0.9 * (0.9 * buffer + grad)
    step = frozen.orthogonalize(direction, torch.float32)
    for scale, factor in (
        ("rms", 24**0.5),
        ("measured_rms", (24 * 8) ** 0.5 / step.norm(dim=(1, 2), keepdim=True)),
        ("spectral", 3**0.5),
    ):
        ours, state = param.clone(), dict(momentum=buffer.clone())
        frozen.update_muon(ours, grad, state, lr, lr * 0, knobs._replace(muon_scale=scale, momentum_form="sum"))
        assert torch.allclose(state["momentum"], 0.9 * buffer + grad, atol=1e-6)
        assert torch.allclose(ours, param - 0.1 * factor * step, atol=1e-5)
    measured = (
        param - ours.copy_(param - 0.1 * (24 * 8) ** 0.5 / step.norm(dim=(1, 2), keepdim=True) * step)
    ) / 0.1
    assert measured.square().mean(dim=(1, 2)).sqrt().tolist() == pytest.approx([1, 1])


def test_learning_rate_warm_up_and_decay_of_embeddings():
    schedule = frozen.Schedule(resolve("2024-06-06_adamw_rotary"))
    factors = [schedule.at(step).lr_factor for step in (0, 127, 255, 256, 9535 - 2048, 9535)]
    assert factors == pytest.approx([1 / 256, 0.5, 1, 1, 1, 1 / 2048])
    hypers = frozen.group_hypers(resolve("2024-06-06_adamw_rotary"))
    assert {name: hyper.weight_decay for name, hyper in hypers.items()} == dict(
        matrix=0.1, embed=0.1, value_embed=0.1, head=0.1, scalar=0.0
    )


def test_full_rotary_frequencies():
    """1 / 10000^(2 i / head_dim) and the usual softmax scale. Without YaRN they are constant over all stages."""
    cfg = smoke(rotary="full", rotary_base=10_000, yarn_max_window=0, attention_scale=0.0)
    for frequencies, scale in frozen.Schedule(cfg).rotary:
        assert np.allclose(frequencies, 10_000.0 ** (-np.arange(0, 32, 2) / 32), rtol=1e-12)
        assert scale == 32**-0.5


# ---- the script in the root ---------------------------------------------------------------------------------------


def test_the_medium_track():
    """Record 18 of the medium track. Mechanisms that do not exist here are replaced by record 2 of this track."""
    cfg = gpt.make_config({"preset": "track_2"})
    assert (cfg.num_layers, cfg.model_dim, cfg.num_heads, cfg.head_dim) == (16, 1024, 8, 128)
    assert [s.value_embed for s in cfg.layers] == [0, 1, 2, 3, 4, *[None] * 6, 0, 1, 2, 3, 4]
    assert {i: s.skip_from for i, s in enumerate(cfg.layers) if s.skip_from is not None} == {
        9: 6,
        10: 4,
        11: 2,
    }
    assert all(spec.mlp and spec.attention != "none" for spec in cfg.layers)
    assert [i for i, spec in enumerate(cfg.layers) if spec.attention == "long"] == [0, 4, 11, 15]
    train = cfg.stages
    assert [stage.window_long // 128 for stage in train] == [3, 7, 11, 13, 15, 17, 19, 21, 23, 23, 23, 23]
    assert [stage.window_short // 128 for stage in train] == [1, 3, 5, 6, 7, 8, 9, 10, 11, 11, 11, 11]
    assert [stage.tokens_per_step for stage in train[:4]] == [131_072, 262_144, 393_216, None]
    assert [stage.lr_factor for stage in train] == [1, 1.52, 1.73, *[2.0] * 9]
    assert cfg.val_windows == (27 * 128, 11 * 128)
    assert (cfg.max_doc_len, cfg.cooldown_frac, cfg.final_lr_frac, cfg.fp8_parts) == (4096, 0.7, 0.1, ())
    rates = [cfg.groups[name].lr * train[-1].lr_factor for name in ("matrix", "head", "embed", "value_embed")]
    assert rates == [0.025, 0.003, 0.3, 0.6]  # the first three are from record 2
    scales = [ropes["long"].softmax_scale for ropes in gpt.Schedule(cfg).ropes]
    assert len(set(scales[:4])) == 4 and len(set(scales[3:])) == 1  # YaRN stops at 13 blocks
    assert gpt.derived_numbers(cfg, 8)["num_params"] == (
        7 * 50_304 * 1024 + 16 * (4 + 8) * 1024**2 + 16 * 8 * 16 + 16 * 2 + 3 + 16 + 10
    )
