"""Option --without: each part that a recipe has can be left out, and training continues."""

import dataclasses
import math

import pytest
from conftest import CPU_FORMS, gpt, make_runtime, smoke_config, start_prefetcher

OPTIONS = {
    field.name: field.metadata["off"] for field in dataclasses.fields(gpt.Config) if "off" in field.metadata
}
SEVERAL = {"muon", "variance", "row_adam", "untied_head"}  # parts of several options or fields
SPECIAL = {  # a part that is not one option: (preset, place, field, its values in all rows)
    "adam_odd_steps": ("frontier", "groups", "every", {1}),
    "short_windows": ("frontier", "layers", "attention", {"long", "none"}),
    "dropped_attention": ("frontier", "layers", "attention", {"long", "short"}),
    "dropped_mlp": ("track_1", "layers", "mlp", {True}),
    "value_embed": ("track_1", "layers", "value_embed", {None}),
    "multi_token": ("frontier", "stages", "loss_weights", {((1, 1),)}),
    "window_warmup": ("track_1", "stages", "window_long", {1408}),
    "batch_warmup": ("frontier", "stages", "tokens_per_step", {None}),
    **{
        part: ("frontier", "layers", part, {off})
        for off, parts in (
            (False, ("head_gate", "key_offset", "second_mlp", "paired", "xsa")),
            (None, ("skip_from", "v_dim", "attention_from", "gates_from")),
            ((), ("mudd_in", "mudd_out")),
        )
        for part in parts
    },
    "prefix_weight": ("frontier", "stages", "prefix_weight", {()}),
    "num_classes": ("frontier", "stages", "num_classes", {None}),
    "weight_decay": ("frontier", "groups", "weight_decay", {0.0}),
    "late_every": ("frontier", "groups", "late_every", {0}),
}


def without(part: str, preset: str) -> tuple[gpt.Config, dict]:
    """The preset without a part, and the options that change."""
    options = dict(preset=preset, device="cpu")
    before, after = gpt.make_config(options), gpt.make_config({**options, "without": part})
    changed = {name for name in vars(before) if getattr(before, name) != getattr(after, name)}
    return after, {name: getattr(after, name) for name in changed - {"without"}}


@pytest.mark.parametrize("preset", ["track_1", "frontier"])
def test_an_option_gets_its_value_of_off(preset):
    parts = gpt.list_parts(gpt.make_config({"preset": preset})).keys()
    assert {*OPTIONS, *SPECIAL, *SEVERAL, "polar_express"} >= parts
    for part in parts & OPTIONS.keys():
        assert without(part, preset)[1] == {part: OPTIONS[part]}


@pytest.mark.parametrize("part", SPECIAL)
def test_a_field_gets_one_value_in_all_rows(part):
    preset, place, field, values = SPECIAL[part]
    after, changes = without(part, preset)
    assert changes.keys() == {place}
    rows = getattr(after, place)
    assert {getattr(row, field) for row in (rows.values() if place == "groups" else rows)} == values


def test_parts_of_several_options():
    after, changes = without("muon", "track_1")
    matrix = after.groups["matrix"]
    assert changes.keys() == {"groups"}
    assert (matrix.rule, matrix.lr, matrix.betas, matrix.weight_decay) == ("adamw", 0.0018, (0.9, 0.95), 0.1)
    for preset, rule in dict(frontier="muon", muonh="muonh", laptop="muon").items():
        assert without("variance", preset)[0].groups["matrix"].rule == rule
    assert without("row_adam", "frontier")[0].groups["ngram"].rule == "adamw"
    assert without("polar_express", "frontier")[1] == dict(orthogonalize="newton_schulz")
    after, changes = without("untied_head", "track_1")
    assert changes.keys() == {"tie_head", "embed_std", "groups"}
    assert (after.tie_head, after.embed_std, after.groups["head"].lr) == (True, (0.02, 1.0), 0.0036)


@pytest.mark.parametrize("part", sorted(gpt.list_parts(smoke_config(num_layers=5)).keys() - {"fp8"}))
def test_without_a_part_it_is_gone_and_training_goes_on(part, shards):
    """Four steps: the loss falls below ln 257, of a uniform guess. test_frontier.py has frontier."""
    cfg = smoke_config(shards, num_layers=5, tokens_per_step=512, num_iterations=4, without=part)
    assert part not in gpt.list_parts(cfg)
    trainer, losses = gpt.Trainer(cfg, make_runtime(fast=CPU_FORMS)), []
    batches = start_prefetcher(trainer)
    for step in range(4):
        losses.append(trainer.train_step(batches, trainer.schedule.at(step)).item())
    batches.close()
    assert losses[3] < math.log(257) < losses[0] < 7


def test_only_a_part_that_is_there_can_be_taken_away(capsys):
    for part in ("xsa", "qknorm"):
        assert gpt.main(["--preset=quick", f"--without={part}", "--print_config"]) == 2
        assert f"--without={part}" in capsys.readouterr().err


def test_without_reaches_layers_and_stages_given_by_hand():
    layers = tuple(gpt.LayerSpec(skip_from=i - 1 if i == 3 else None) for i in range(4))
    cfg = gpt.make_config({"preset": "smoke", "layers": layers, "without": "skip_from"})
    assert cfg.layers == (gpt.LayerSpec(),) * 4
    stages = (gpt.Stage(1, 64, 64), gpt.Stage(1, 256, 128))
    cfg = gpt.make_config({"preset": "smoke", "stages": stages, "without": "window_warmup"})
    assert [stage.window_long for stage in cfg.stages] == [256, 256] and cfg.val_windows == (320, 128)


def test_given_options_win():
    cap = (30.0, 0.0, 7.5)
    assert gpt.make_config({"preset": "track_1", "without": "softcap", "softcap": cap}).softcap == cap
    cfg = gpt.make_config({"preset": "track_1", "without": "muon", "matrix_rule": "normuon"})
    assert (cfg.groups["matrix"].rule, cfg.groups["matrix"].lr) == ("normuon", 0.0018)
