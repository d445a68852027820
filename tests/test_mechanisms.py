"""Option --without: each part that a recipe has can be left out, and training continues."""

import dataclasses
import math

import pytest
from conftest import CPU_FORMS, gpt, make_runtime, smoke_config, start_prefetcher

from tools.compare import find_parts

OPTIONS = {
    field.name: field.metadata["off"]
    for field in dataclasses.fields(gpt.Config) if field.metadata["off"] is not None
}
SEVERAL = {"muon", "row_adam", "batch_warmup"}  # parts of several options or fields
SPECIAL = {  # a part that is not one option: (preset, place, field, its values in all rows)
    "adam_odd_steps": ("record_92", "groups", "every", {1}),
    "dropped_mlp": ("record_32", "layers", "mlp", {True}),
    "value_embed": ("record_32", "layers", "value_embed", {None}),
    "multi_token": ("record_92", "stages", "loss_weights", {((1, 1),)}),
    **{
        part: ("record_92", "layers", part, {off})
        for off, parts in (
            (False, ("head_gate", "key_offset", "second_mlp", "paired", "xsa")),
            (None, ("skip_from", "v_dim", "attention_from", "gates_from")),
            ((), ("mudd_in", "mudd_out")),
        )
        for part in parts
    },
    "prefix_weight": ("record_92", "stages", "prefix_weight", {()}),
    "num_classes": ("record_92", "stages", "num_classes", {None}),
    "weight_decay": ("record_92", "groups", "weight_decay", {0.0}),
    "late_every": ("record_92", "groups", "late_every", {0}),
}


def without(part: str, preset: str) -> tuple[gpt.Config, dict]:
    """The preset without a part, and the options that change."""
    options = dict(preset=preset, device="cpu")
    before, after = gpt.make_config(options), gpt.make_config({**options, "without": part})
    changed = {name for name in vars(before) if getattr(before, name) != getattr(after, name)}
    return after, {name: getattr(after, name) for name in changed - {"without"}}


@pytest.mark.house
def test_every_part_is_known_here():
    assert {*OPTIONS, *SPECIAL, *SEVERAL} == gpt.list_parts().keys()


@pytest.mark.parametrize("part", sorted(OPTIONS))
def test_an_option_gets_its_value_of_off(part):
    """Or the option is off in this preset."""
    for preset in ("record_32", "record_92"):
        assert without(part, preset)[1] in ({}, {part: OPTIONS[part]})
    assert getattr(gpt.make_config({"preset": "record_32", "without": part}), part) == OPTIONS[part]


@pytest.mark.parametrize("part", SPECIAL)
def test_a_field_gets_one_value_in_all_rows(part):
    preset, place, field, values = SPECIAL[part]
    extra = ",mudd_out" if part == "value_embed" else ""  # which reads it, in record_92
    after, changes = without(part + extra, preset)
    assert changes.keys() == {place}
    rows = getattr(after, place)
    assert {getattr(row, field) for row in (rows.values() if place == "groups" else rows)} == values


def test_parts_of_several_options():
    after, changes = without("muon", "record_32")
    matrix = after.groups["matrix"]
    assert changes.keys() == {"groups"}
    assert (matrix.rule, matrix.lr, matrix.betas, matrix.weight_decay) == ("adamw", 0.0018, (0.9, 0.95), 0.1)
    assert without("row_adam", "record_92")[0].groups["ngram"].rule == "adamw"
    after, _ = without("batch_warmup", "record_92")
    assert {(row.tokens_per_step, row.seq_len, row.lr_factor) for row in after.stages} == {(None, None, 1.0)}


def test_parts_that_contradict_the_rest_get_the_line_of_the_check(capsys):
    """In record_92 mudd_out reads value embeddings."""
    assert gpt.main(["--preset=record_92", "--without=value_embed", "--print_config"]) == 2
    assert "layer 10 reads ve0, " in capsys.readouterr().err
    layers = {gpt.make_config({"preset": "record_92", "without": text}).layers
              for text in ("mudd_out,value_embed", "value_embed,mudd_out")}
    assert len(layers) == 1


PARTS = sorted({*find_parts(smoke_config(num_layers=5))} - {"fp8"})


@pytest.mark.parametrize("part", PARTS)
def test_without_a_part_it_is_gone_and_training_goes_on(part, shards):
    """Four steps: the loss falls below ln 257, of a uniform guess. test_model_92.py has record_92."""
    cfg = smoke_config(shards, num_layers=5, tokens_per_step=512, num_iterations=4, without=part)
    assert part not in find_parts(cfg)
    trainer, losses = gpt.Trainer(cfg, make_runtime(fast=CPU_FORMS)), []
    batches = start_prefetcher(trainer)
    for step in range(4):
        losses.append(trainer.train_step(batches, trainer.schedule.at(step)).item())
    batches.close()
    assert losses[3] < math.log(257) < losses[0] < 7


def test_an_unknown_part_ends_with_the_names_of_all(capsys):
    assert gpt.main(["--preset=quick", "--without=qknorm", "--print_config"]) == 2
    error = capsys.readouterr().err
    assert "--without=qknorm" in error and "qk_norm" in error


def test_without_reaches_layers_and_stages_given_by_hand():
    layers = tuple(gpt.LayerSpec(skip_from=i - 1 if i == 3 else None) for i in range(4))
    cfg = gpt.make_config({"preset": "smoke", "layers": layers, "without": "skip_from"})
    assert cfg.layers == (gpt.LayerSpec(),) * 4
    stages = (gpt.Stage(1, 64, 64), gpt.Stage(1, 256, 128))
    cfg = gpt.make_config({"preset": "smoke", "stages": stages, "without": "multi_token"})
    assert [stage.window_long for stage in cfg.stages] == [64, 256]


def test_given_options_win():
    cap = (30.0, 0.0, 7.5)
    assert gpt.make_config({"preset": "record_32", "without": "softcap", "softcap": cap}).softcap == cap
    cfg = gpt.make_config({"preset": "record_32", "without": "muon", "matrix_rule": "normuon"})
    assert (cfg.groups["matrix"].rule, cfg.groups["matrix"].lr) == ("normuon", 0.0018)
