"""Option --without: exactly one mechanism is gone, and training continues."""

import dataclasses
import math

import pytest
from conftest import gpt, make_runtime, smoke_config

WITHOUT = {  # mechanism: (a preset with it, {option: value without it}). Sets are the values of all layers or stages
    "muon": ("track_1", dict(matrix_rule="adamw", matrix_lr=0.0018, matrix_weight_decay=0.1)),
    "momentum_warmup": ("track_1", dict(momentum_warmup_steps=0)),
    "momentum_cooldown": ("frontier", dict(momentum_cooldown_steps=0)),
    "cooldown": ("track_1", dict(cooldown_frac=0.0)),
    "polar_express": ("frontier", dict(orthogonalize="newton_schulz")),
    "variance": ("frontier", dict(matrix_rule="muon")),
    "slow_momentum": ("frontier", dict(slow_momentum_start=1.0)),
    "averages": ("frontier", dict(averages="off")),
    "decay": ("frontier", dict(matrix_weight_decay=0, embed_weight_decay=0, head_weight_decay=0,
                               value_embed_weight_decay=0, ngram_weight_decay=0, gate_weight_decay=0)),
    "cautious_decay": ("frontier", dict(decay="decoupled")),
    "adam_odd_steps": ("frontier", {f"{name}_every": 1 for name in gpt.TRACK_1_GROUPS if name != "matrix"}),
    "late_period": ("frontier", dict(late_start=1.0)),
    "row_adam": ("frontier", dict(ngram_rule="adamw")),
    "low_bits": ("frontier", dict(matrix_dtype="float32")),
    "qk_groups": ("frontier", dict(qk_group_heads=0)),
    "untied_head": ("track_1", dict(tie_head="on", embed_std=0.02, head_lr=0.0036)),
    "tied_head": ("frontier", dict(tie_head="off")),
    "zero_init": ("frontier", dict(zero_init="off")),
    "qk_norm": ("track_1", dict(qk_norm="off")),
    "yarn": ("track_1", dict(yarn_max_window=0)),
    "attention_gate": ("frontier", dict(gate={False})),
    "value_embeds": ("frontier", dict(num_value_embeds=0, value_embed={None}, mudd_out={"", "x_in,h7,h9,h3,mlp_in,attn_in"})),
    "value_gates": ("frontier", dict(value_gate_dim=0)),
    "x0_mix": ("frontier", dict(x0_mix="off")),
    "residual_weights": ("frontier", dict(residual_init=0.0)),
    "skips": ("frontier", dict(skip_from={None})),
    "smear": ("frontier", dict(smear="off")),
    "key_offset": ("frontier", dict(key_offset={False})),
    "ngram": ("frontier", dict(ngram_rows=0)),
    "trigrams": ("frontier", dict(ngram_order=2)),
    "short_heads": ("frontier", dict(short_qk_dim=0)),
    "half_values": ("frontier", dict(v_dim={None})),
    "second_mlp": ("frontier", dict(second_mlp={False})),
    "mudd_groups": ("frontier", dict(mudd_groups=1)),
    "paired_heads": ("frontier", dict(paired={False})),
    "attention_from": ("frontier", dict(attention_from={None})),
    "xsa": ("frontier", dict(xsa={False})),
    "mudd": ("frontier", dict(mudd_in={""}, mudd_out={""})),
    "mudd_gates": ("frontier", dict(gates_from={None})),
    "short_windows": ("frontier", dict(attention={"long", "none"})),
    "window_warmup": ("track_1", dict(window_long={1408}, window_short={640})),
    "batch_warmup": ("frontier", dict(tokens_per_step={None}, seq_len={None}, lr_factor={1.0})),
    "multi_token": ("frontier", dict(loss_weights={"1"})),
    "prefix_loss": ("frontier", dict(prefix_weight={"0"})),
    "sampled_loss": ("frontier", dict(num_classes={None})),
    "attention_pieces": ("frontier", dict(max_attention_len=0)),
    "dropped_attention": ("frontier", dict(attention={"long", "short"})),
    "dropped_mlp": ("track_1", dict(mlp={True})),
    "document_mask": ("track_1", dict(document_mask="off")),
    "document_start": ("track_1", dict(sequence_start="anywhere")),
    "softcap": ("track_1", dict(softcap=0.0)),
    "logit_shift": ("frontier", dict(softcap=30.0, softcap_shift=0.0)),
    "fp8_head": ("track_1", dict(fp8_head="off")),
    "fp8_logits": ("frontier", dict(fp8_logits="off")),
    "fp8_mlp": ("frontier", dict(fp8_mlp="off")),
    "fp8_qkv": ("frontier", dict(fp8_qkv="off")),
}  # fmt: skip


def list_facts(cfg) -> dict:
    """All options by name. Fields of layers and stages are lists of values."""
    facts = {**gpt.flatten_groups(vars(cfg)), "layers": None, "stages": None, "without": None}
    for items in (cfg.layers, cfg.stages):
        for field in dataclasses.fields(items[0]):
            key = field.name if field.name not in facts else f"{field.name} of stages"
            facts[key] = [getattr(item, field.name) for item in items]
    return facts


@pytest.mark.parametrize("mechanism", gpt.MECHANISMS)
def test_without_a_mechanism_exactly_its_options_are_others(mechanism):
    preset, expected = WITHOUT[mechanism]
    expected = {f"{name} of stages" if name in ("tokens_per_step", "seq_len") and isinstance(value, set) else name:
                value for name, value in expected.items()}  # fmt: skip
    before, after = (
        list_facts(gpt.make_config(dict(preset=preset, device="cpu", **extra)))
        for extra in ({}, dict(without=mechanism))
    )
    assert {name for name in before if before[name] != after[name]} == set(expected)
    found = {name: set(after[name]) if isinstance(value, set) else after[name] for name, value in expected.items()}
    assert found == expected


SHORT = [name for name, (preset, _) in WITHOUT.items() if preset == "track_1" and name != "fp8_head"]


@pytest.mark.parametrize("mechanism", SHORT)  # test_frontier.py tests the remaining ones
def test_without_a_mechanism_it_is_gone_and_training_goes_on(mechanism, shards):
    """Four steps: the loss falls below ln 257, the loss of a uniform guess."""
    cfg = smoke_config(shards, num_layers=6, tokens_per_step=512, num_iterations=4, without=mechanism)
    trainer = gpt.Trainer(cfg, make_runtime())
    batches = gpt.Prefetcher(gpt.TrainData(cfg, trainer.schedule).batches(trainer.rt, 0, 4), trainer.rt.device)
    losses = []
    for step in range(4):
        losses.append(trainer.train_step(batches, trainer.schedule.at(step)).item())
        trainer.progress.step += 1
    batches.executor.shutdown(cancel_futures=True)
    assert losses[3] < math.log(257) < losses[0] < 7


def test_only_a_mechanism_that_is_there_can_be_taken_away(capsys):
    assert gpt.main(["--preset=quick", "--without=xsa", "--print_config"]) == 2
    assert capsys.readouterr().err.endswith("--without=xsa: preset quick has no xsa: leave it out\n")
    assert gpt.make_config(dict(preset="muonh", without="variance")).groups["matrix"].rule == "muonh"


def test_without_reaches_layers_and_stages_given_by_hand():
    layers = tuple(gpt.LayerSpec(skip_from=i - 1 if i == 3 else None) for i in range(4))
    cfg = gpt.make_config({"preset": "smoke", "layers": layers, "without": "skips"})
    assert cfg.layers == (gpt.LayerSpec(),) * 4
    stages = (gpt.Stage(1, 64, 64), gpt.Stage(1, 256, 128))
    cfg = gpt.make_config({"preset": "smoke", "stages": stages, "without": "window_warmup"})
    assert [stage.window_long for stage in cfg.stages] == [256, 256] and cfg.val_windows == (320, 128)
    assert gpt.make_config({"device": "cpu", "without": "softcap"}).preset == "laptop"


def test_mechanisms_reach_layers_that_a_preset_spells_out():
    cfg = gpt.make_config({"preset": "track_2", "without": "value_embeds,skips,short_windows"})
    assert {(s.value_embed, s.skip_from, s.attention) for s in cfg.layers} == {(None, None, "long")}


def test_explicit_options_win():
    assert gpt.make_config({"preset": "track_1", "without": "softcap", "softcap": 30.0}).softcap == 30
    cfg = gpt.make_config({"preset": "track_1", "without": "muon", "matrix_rule": "normuon"})
    assert (cfg.groups["matrix"].rule, cfg.groups["matrix"].lr) == ("normuon", 0.05)


def test_a_mechanism_that_is_none(capsys):
    assert gpt.main(["--preset=smoke", "--without=qknorm"]) == 2
    assert "did you mean qk_norm" in capsys.readouterr().err
