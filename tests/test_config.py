"""Config, presets, command line: what they derive, and how they refuse."""

import dataclasses
import json
import math

import pytest
from conftest import gpt, run_script


def test_parameters_of_track_1_term_by_term():
    """Record 32, by hand."""
    dim, vocab = 768, 50_304
    assert vocab == math.ceil(50_257 / 128) * 128
    embedding = head = vocab * dim
    value_embeds = 3 * vocab * dim
    attention = 11 * 4 * dim * dim  # Q, K, V, O in every slot but 7
    gates = 11 * 6 * 12  # per head, from 12 channels
    mlp = 11 * 2 * dim * 4 * dim  # in every slot but 0
    lambdas = 12 * 2  # stream and x0, per slot
    skips = 6  # slots 6-11 take 5-0
    values = 11 + 6  # s0 per attention; s1 where a value embedding enters: slots 0, 1, 2, 9, 10, 11
    total = embedding + head + value_embeds + attention + gates + mlp + lambdas + skips + values
    assert total == 271_024_967  # the record's 271.02 M: its 60 scalars are 47 here, those that are used
    derived = gpt.derive(gpt.make_config({"preset": "track_1"}), 8)
    assert derived["num_params"] == total
    assert (derived["tokens_per_rank"], derived["grad_accum_steps"], derived["ranks"]) == (49_152, 1, 8)
    assert derived["train_tokens"] == 1670 * 393_216


def test_flops_of_track_1_term_by_term():
    attention, mlp, head = 11 * 4 * 768**2 * 6, 11 * 2 * 768 * 3072 * 6, 50_304 * 768 * 6
    spans = [(557, 384, 128), (557, 896, 384), (556, 1408, 640)]  # steps per stage: int(3 * step / 1671)
    keys = sum(steps * (3 * long + 8 * short) for steps, long, short in spans) / 1670
    cfg = gpt.make_config({"preset": "track_1"})
    assert gpt.count_flops(cfg) == round(attention + mlp + head + 12 * 768 * keys)


def test_layers_of_the_record():
    """Slots, windows, value embeddings and skips of record 32."""
    layers = gpt.make_config({"preset": "track_1"}).layers
    assert [i for i, s in enumerate(layers) if s.attention == "none"] == [7]
    assert [i for i, s in enumerate(layers) if s.attention == "long"] == [0, 4, 11]
    assert [i for i, s in enumerate(layers) if not s.mlp] == [0]
    assert [s.value_embed for s in layers] == [0, 1, 2, *[None] * 6, 0, 1, 2]
    assert [s.skip_from for s in layers] == [*[None] * 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_every_preset_resolves_and_survives_the_command_line(name):
    cfg = gpt.make_config({"preset": name})
    argv = [
        f"--{field.name}={gpt.show_value(getattr(cfg, field.name))}" for field in dataclasses.fields(cfg)
    ]
    assert gpt.make_config(gpt.parse_argv(argv)[0]) == cfg
    assert json.loads(json.dumps(gpt.resolved_dict(cfg, 1)))["derived"]["num_params"] > 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 9, 16])
def test_the_pattern_exists_at_any_depth(depth):
    cfg = gpt.make_config({"preset": "smoke", "num_layers": depth})
    assert len(cfg.layers) == depth and any(spec.attention != "none" for spec in cfg.layers)


def test_spellings_are_equal():
    values = [
        gpt.parse_argv(argv)[0]
        for argv in (
            ["--num_iterations=7", "--adam_betas=0.7,0.9"],
            ["--num-iterations", "7", "--adam-betas", "0.7,0.9"],
        )
    ]
    assert values[0] == values[1] == {"num_iterations": 7, "adam_betas": (0.7, 0.9)}


@pytest.mark.parametrize(
    "args, value, remedy",
    [
        (["--num_iteration=5"], "--num_iteration", "--num_iterations"),
        (["stray"], "stray", "--track"),
        (["--xyzzy=1"], "--xyzzy", "--help"),
        (["--num_iterations=many"], "many", "1670"),
        (["--num_iterations=0"], "0", "at least 1"),
        (["--matrix_lr=nan"], "nan", "ordinary number"),
        (["--momentum_end=1.5"], "1.5", "at most"),
        (["--device=tpu"], "tpu", "cuda"),
        (["--preset=laptpo"], "laptpo", "laptop"),
        (["--seed"], "--seed", "--seed=0"),
        (["--head_dim=100"], "model_dim", "--model_dim=200"),
        (["--seq_len=500"], "500", "384 and 512"),
        (["--tokens_per_step=700"], "700", "512 and 1024"),
        (["--val_tokens=1000"], "1000", "1024"),
        (["--micro_batch_tokens=256"], "256", "--seq_len=256"),
        (['--stages=[{"share":1,"window_long":64,"window_short":128}]'], "128", "short <= long"),
        (['--stages=[{"share":1}]'], "share", "window_long"),
        (["--stages=[]"], "--stages", "above 0"),
        (['--layers=[{"attention":"wide"}]', "--num_layers=1"], "wide", "long, short or none"),
        (['--layers=[{"skip_from":0}]', "--num_layers=1"], "skip_from=0", "earlier slot"),
        (['--layers=[{"value_embed":5}]', "--num_layers=1"], "value_embed=5", "num_value_embeds"),
        (["--layers=[{}]"], "1 slots", "--num_layers=1"),
        (["--record=../x"], "../x", "lower-case"),
        (["--attention_gate_dim=100"], "100", "at most 64"),
        (["--cooldown_frac=0.5", "--adam_betas=0.9"], "0.9", "0.8,0.95"),
    ],
)
def test_bad_options_end_with_status_2_and_one_line(args, value, remedy, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gpt.main(["--preset=smoke", "--device=cpu", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("train_gpt.py: error: ")
    assert value in err and remedy in err
    assert not list(tmp_path.iterdir())


def test_cuda_that_is_absent(capsys):
    if gpt.torch.cuda.is_available():
        pytest.skip("has CUDA")
    assert gpt.main(["--preset=smoke", "--device=cuda"]) == 2
    assert "--device=cpu" in capsys.readouterr().err


def test_print_config_needs_neither_cuda_nor_data(tmp_path):
    done = run_script(["--preset=track_1", "--print_config"], tmp_path)
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    config = json.loads(done.stdout)
    assert config["num_iterations"] == 1670 and config["derived"]["num_params"] == 271_024_967


def test_help_names_every_field(capsys):
    assert gpt.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{name}=" in text for name in gpt.config_fields())
    assert gpt.main(["--list_presets"]) == 0
    presets, mechanisms = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in presets.splitlines()] == list(gpt.PRESETS)
    assert all(name in mechanisms for name in gpt.MECHANISMS)


@pytest.mark.parametrize("world_size, near", [(3, "1536 and 3072"), (8, "4096")])
def test_ranks_that_cannot_share_the_rows(world_size, near):
    cfg = gpt.make_config({"preset": "smoke"})  # 4 rows of 512
    with pytest.raises(gpt.InputError, match=near):
        gpt.split_rows(cfg, world_size, cfg.tokens_per_step)


@pytest.mark.parametrize(
    "world_size, micro, expected",
    [(1, 512, (4, 1)), (1, 1024, (2, 2)), (1, 1536, (2, 2)), (2, 9999, (1, 2)), (4, 512, (1, 1))],
)
def test_rows_are_split_evenly(world_size, micro, expected):
    cfg = gpt.make_config({"preset": "smoke", "micro_batch_tokens": micro})
    assert gpt.split_rows(cfg, world_size, cfg.tokens_per_step) == expected
