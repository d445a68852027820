"""Config, presets, command line: derived numbers and errors."""

import json
import math
import os
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPT, at_most, data_args, gpt, run_script, slow_but


def test_parameters_of_track_1_term_by_term():
    """Record 32, by hand."""
    dim, vocab = 768, 50_304
    assert vocab == math.ceil(50_257 / 128) * 128
    embedding = head = vocab * dim
    value_embeds = 3 * vocab * dim
    attention = 11 * 4 * dim * dim  # Q, K, V, O in every layer but 7
    gates = 11 * 6 * 12  # per head, from 12 channels
    mlp = 11 * 2 * dim * 4 * dim  # in every layer but 0
    lambdas = 12 * 2  # stream and x0, per layer
    skips = 6  # layers 6-11 take 5-0
    values = 11 + 6  # s0 per attention, s1 if a value embedding enters: layers 0, 1, 2, 9, 10, 11
    total = embedding + head + value_embeds + attention + gates + mlp + lambdas + skips + values
    assert total == 271_024_967  # the record's 271.02 M. Of its 60 scalars the 47 that are used
    derived = gpt.derived_numbers(gpt.make_config({"preset": "track_1"}), 8)
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
    """Layers, windows, value embeddings and skips of record 32."""
    layers = gpt.make_config({"preset": "track_1"}).layers
    assert [i for i, s in enumerate(layers) if s.attention == "none"] == [7]
    assert [i for i, s in enumerate(layers) if s.attention == "long"] == [0, 4, 11]
    assert [i for i, s in enumerate(layers) if not s.mlp] == [0]
    assert [s.value_embed for s in layers] == [0, 1, 2, *[None] * 6, 0, 1, 2]
    assert [s.skip_from for s in layers] == [*[None] * 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("name", [*gpt.PRESETS, *sorted(path.stem for path in (ROOT / "records/presets").glob("*.json"))])
def test_every_preset_resolves_and_survives_the_command_line(name):
    cfg = gpt.make_config({"preset": name})
    argv = [f"--{option}={gpt.show_value(value)}" for option, value in gpt.flatten_groups(vars(cfg)).items()]
    assert gpt.make_config(gpt.parse_argv(argv)[0]) == cfg
    assert gpt.config_from_dict(gpt.plain_dict(cfg)) == cfg
    assert gpt.derived_numbers(cfg, 1)["num_params"] > 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 9, 16])
def test_the_pattern_exists_at_any_depth(depth):
    cfg = gpt.make_config({"preset": "smoke", "num_layers": depth})
    assert len(cfg.layers) == depth and any(spec.attention != "none" for spec in cfg.layers)


def test_spellings_are_equal():
    values = [
        gpt.parse_argv(argv)[0]
        for argv in (
            ["--num_iterations=7", "--embed_betas=0.7,0.9", "--matrix_cooldown_frac=-1", "--logs_dir=a-b"],
            "--num-iterations 7 --embed-betas 0.7,0.9 --matrix-cooldown-frac -1 --logs-dir a-b".split(),
        )
    ]
    expected = dict(num_iterations=7, embed_betas=(0.7, 0.9), matrix_cooldown_frac=-1.0, logs_dir="a-b")
    assert values[0] == values[1] == expected


def test_options_of_groups():
    """Each changes one group. All others are the preset's."""
    cfg = gpt.make_config({"preset": "muonh", "head_lr": 0.5, "embed_betas": (0.5, 0.6), "scalar_every": 2})
    assert (cfg.groups["head"].lr, cfg.groups["embed"].lr, cfg.groups["matrix"].rule) == (0.5, 0.3, "normuonh")
    assert [name for name, group in cfg.groups.items() if group.betas == (0.5, 0.6)] == ["embed"]
    assert [name for name, group in cfg.groups.items() if group.every == 2] == ["scalar"]
    assert (cfg.adam_every, gpt.make_config({"preset": "muonh"}).adam_every) == (2, 1)


def test_a_tied_head_is_counted_once():
    both, once = (gpt.derived_numbers(gpt.make_config({"preset": "track_1", "tie_head": tie}), 8) for tie in ("off", "on"))
    assert both["num_params"] - once["num_params"] == 50_304 * 768
    assert both["flops_per_token"] == once["flops_per_token"]  # the head multiplies in both cases


STAGE = '"duration":1,"window_long":128,"window_short":64'


@pytest.mark.parametrize(
    "args, value, remedy",
    [
        (["--num_layer=3", "--zzzzzz=2"], "--num_layer ", "did you mean --num_layers? docs/from_nanogpt.md"),
        (["--num_iteration=5"], "--num_iteration ", "did you mean --num_iterations"),
        (["--embed-beta=0.9,0.9"], "--embed_beta ", "did you mean --embed_betas"),
        (["stray"], "stray", "is not an option"),
        (["--xyzzy=1"], "--xyzzy", "--help"),
        (["--num_iterations=many"], "many", "1670"),
        (["--num_iterations=0"], "0", "at least 1"),
        (["--num_iterations", "-5"], "-5", "at least 1"),
        (["--final_lr_frac", "-0.5"], "-0.5", "at least 0"),
        (["--seed=-1"], "-1", "at least 0"),
        (["--seed=99999999999999999999999"], "99999999999999999999999", "at most 2147483647"),
        ([f"--seed={'9' * 400}"], "999999999", "at most 2147483647"),  # more than a float can hold
        (["--num_iterations=" + "9" * 31], "9" * 31, "at most 2147483647"),
        (["--num_iterations=" + "9" * 5000], "9" * 31, "1670"),  # more digits than Python reads
        (["--matrix_lr=nan"], "nan", "ordinary number"),
        (["--momentum_end=1.5"], "1.5", "at most"),
        (["--device=tpu"], "tpu", "cuda"),
        (["--device=a\nb"], "--device=a", "cuda"),
        (["--matrix_rule=nuon"], "nuon", "normuon"),
        (["--num_layers=0", "--matrix_rule=muonh"], "--num_layers=0", "at least 1"),
        (["--preset=laptpo"], "laptpo", "laptop"),
        (["--seed"], "--seed", "one argument"),
        (["--head_dim=100"], "model_dim", "= 200"),
        (["--seq_len=500"], "500", "multiple of 128"),
        (["--tokens_per_step=700"], "700", "multiple of 512"),
        (["--val_tokens=1000"], "1000", "1024"),
        (["--micro_batch_tokens=256"], "256", "seq_len=512"),
        (["--val_windows=64,128"], "64,128", "the long window first"),
        (["--val_windows=5"], "5", "1664,768"),
        (['--stages=[{"duration":1,"window_long":64,"window_short":128}]'], "window_short=128", "wrong duration, lr_factor or window"),
        (['--stages=[{"duration":1}]'], "duration", "window_long"),
        (["--stages=[]"], "--stages", "at least one stage"),
        (['--stages=[{"duration":"a","window_long":128,"window_short":64}]'], "duration='a'", '[{"duration": 1'),
        (['--stages=[{"duration":1,"window_long":128.5,"window_short":64}]'], "long=128.5", '[{"duration": 1'),
        (['--stages=[{"duration":1,"window_long":128,"window_short":64.0}]'], "short=64.0", '[{"duration": 1'),
        (['--stages=[{"duration":0,"window_long":128,"window_short":64}]'], "duration=0", "wrong duration"),
        ([f'--stages=[{{{STAGE},"lr_factor":-1}}]'], "lr_factor=-1", "wrong duration"),
        ([f'--stages=[{{{STAGE},"max_doc_len":1}}]'], "max_doc_len=1", "at least 2"),
        ([f'--stages=[{{{STAGE},"tokens_per_step":700}}]'], "700", "multiple of 512"),
        (["--layers={}"], "a list is needed", 'give one like [{"'),
        (['--layers=[{"attention":5}]'], "attention=5", 'give one like [{"'),
        (['--layers=[{"attention":"wide"}]', "--num_layers=1"], "attention=wide", "layer 0"),
        (['--layers=[{"skip_from":0}]', "--num_layers=1"], "skip_from=0", "give 0 to -1"),
        (['--layers=[{"value_embed":5}]', "--num_layers=1"], "value_embed=5", "give 0 to 2"),
        (["--layers=[{}]"], "1 layers", "--num_layers=4"),
        (["--seed=1e3"], "--seed=1e3 is not a whole number:", "give one like 0\n"),
        (["--grad_grid=x"], "--grad_grid=x is not a number:", "give one like 0.0\n"),
        (["--layers=[{"], "(Expecting property name", 'give one like [{"attention": "short", "mlp": true, '),
        (["--layers=" + "x" * 600], "x" * 100 + "... cannot be read (Expecting value", '"second_mlp": false}]\n'),
        (["--record=../x"], "../x", "lower-case"),
        (["--record=" + "x" * 150], "x" * 50, "at most 100"),
        (["--record=" + "x" * 300], "x" * 50, "at most 100"),
        (["--logs_dir=a\0b"], "a\0b cannot be written (embedded null byte)", "another folder with --logs_dir"),
        (["--resume=a\0b"], "a\0b cannot be read", "give --resume=auto, or the path of another one"),
        (["--attention_gate_dim=100"], "100", "at most 64"),
        (["--segments=5"], "--segments=5", "give at most 4"),
        (["--fast=head"], "--fast=head: head is not a fast form", "give auto, off, or some of rms_norm,norm_rotate"),
        (["--fast=rms_norm,auto"], "auto is not a fast form", "give auto, off, or some of"),
        (["--fast=on"], "--fast=on: on is not a fast form", "give auto, off"),
        (["--cooldown_frac=0.5", "--embed_betas=0.9"], "0.9", "0.8,0.95"),
        (["--embed_betas="], "--embed_betas", "two numbers"),
        (["--embed_betas=0.9"], "0.9 cannot be read (two numbers are needed)", "give one like 0.8,0.95"),
        (["--qk_group_heads=3"], "--num_heads=2", "multiple of 3"),
        (['--stages=[{"duration":1,"window_long":64}]'], "cannot be read (window_short is missing)", "give one like"),
        ([f'--stages=[{{{STAGE},"prefix_weight":1}}]'], "prefix_weight=1 is not of type str", "give one like"),
        (["--matrix_rule=row_adam"], "row_adam", "normuon"),
        (["--ngram_rule=muon", "--ngram_rows=512"], "muon", "row_adam"),
        (["--ngram_rows=2"], "--ngram_rows=2", "thousands"),
        (["--ngram_rows=5", "--ngram_order=3"], "--ngram_rows=5", "thousands"),
        (["--ngram_rows=513", "--ngram_order=3"], "--ngram_rows=513", "even number"),
        (["--ngram_order=4", "--ngram_rows=512"], "--ngram_order=4", "at most 3"),
        (["--mudd_groups=7"], "--model_dim=64", "multiple of 7"),
        (["--mlp_ratio=0"], "--mlp_ratio=0", "at least 0.1"),
        (["--late_start=1.5"], "--late_start=1.5", "at most 1"),
        (["--averages=1"], "--averages=1", "off"),
        (["--embed_every=2", "--embed_late_every=3"], "--embed_late_every=3", "not a multiple of embed_every=2"),
        ([f'--stages=[{{{STAGE},"num_classes":1}}]'], "num_classes=1", "at least 2"),
        ([f'--stages=[{{{STAGE},"loss_weights":"1:0.5/0.2"}}]'], "loss_weights='1:0.5/0.2'", "give numbers or ramps"),
        ([f'--stages=[{{{STAGE},"loss_weights":"1:0.5:0"}}]'], "loss_weights='1:0.5:0'", "give numbers or ramps"),
        ([f'--stages=[{{{STAGE},"prefix_weight":"0.2/-1"}}]'], "prefix_weight='0.2/-1'", "give numbers or ramps"),
        (['--layers=[{"second_mlp":true,"mlp":false}]', "--num_layers=1"], "second_mlp=true", "but no MLP"),
        (['--layers=[{"v_dim":33}]', "--num_layers=1"], "v_dim=33", "give 1 to 32"),
        (['--layers=[{"v_dim":0}]', "--num_layers=1"], "v_dim=0", "give 1 to 32"),
        (['--layers=[{}]', "--num_layers=1", "--short_qk_dim=6"], "--short_qk_dim=6", "multiple of 4"),
        (['--layers=[{"key_offset":true}]', "--num_layers=1", "--short_qk_dim=16"], "key_offset=true", "all channels rotate"),
        (['--layers=[{"attention":"none","mudd_out":"attn_in"}]', "--num_layers=1"], "mudd_out=attn_in", "among mlp_in, x_in"),
        (['--layers=[{"mlp":false,"mudd_out":"mlp_in"}]', "--num_layers=1"], "mudd_out=mlp_in", "among attn_in, x_in"),
        (['--layers=[{"mudd_in":"attn_in"}]', "--num_layers=1"], "mudd_in=attn_in", "choose among"),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_bad_options_end_with_status_2_and_one_line(args, value, remedy, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert gpt.main(["--preset=smoke", "--device=cpu", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("train_gpt.py: error: ")
    assert value in err and remedy in err
    assert not list(tmp_path.iterdir())


def test_the_number_of_layers_that_a_preset_has_may_be_said():
    """Its layers stay, each with its mechanisms. Record 32's pattern exists at any depth."""
    for name in ("quick", "frontier", "track_2"):
        cfg = gpt.make_config({"preset": name})
        assert gpt.make_config({"preset": name, "num_layers": cfg.num_layers}) == cfg
    assert len(gpt.make_config({"preset": "track_1", "num_layers": 6}).layers) == 6


@pytest.mark.parametrize("reader", ["head -1", "true"])
@pytest.mark.parametrize("argument", slow_but(["--list_presets", "--print_config", "--help"], "--help"))
def test_a_reader_that_has_read_enough(argument, reader, tmp_path):
    """No traceback, and status 0 or the status of a broken pipe."""
    words = f"{sys.executable} {SCRIPT} {argument} | {reader} >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.strip() in ("0", "141")


@pytest.mark.parametrize(
    "args, field",
    [
        (["--record=x"], "records_dir"),
        ([], "logs_dir"),
        (["--checkpoint_every=1"], "checkpoint_dir"),
    ],
    ids=str,
)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no /proc")
def test_output_folders_that_cannot_be_are_refused_before_the_run(
    args, field, shards, capsys, tmp_path, monkeypatch
):
    """Permissions are no help here: root may write /proc, but no folder can be made there."""
    monkeypatch.chdir(tmp_path)
    argv = ["--preset=smoke", "--device=cpu", *data_args(shards), *args, f"--{field}=/proc/nope"]
    assert gpt.main(argv) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and "step:" not in out
    assert "/proc/nope" in err and f"choose another folder with --{field}" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["train_files", "val_files", "resume"])
def test_a_pipe_is_no_file(field, shards, capsys, tmp_path, monkeypatch):
    """A program that opens a pipe waits for its writer, here for ever."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with at_most(3000):
        assert gpt.main(["--preset=smoke", "--device=cpu", *data_args(shards), f"--{field}=pipe"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "pipe" in err
    assert ("give --resume=auto" if field == "resume" else "not a token shard") in err
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


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
    with pytest.raises(SystemExit, match="^0$"):
        gpt.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in gpt.OPTIONS)
    assert all(f"--{name}_lr FLOAT" in text for name in gpt.TRACK_1_GROUPS)
    assert gpt.main(["--list_presets"]) == 0
    presets, mechanisms = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in presets.splitlines()] == [*gpt.PRESETS, "also"]
    assert all(name in mechanisms for name in gpt.MECHANISMS)


def test_ranks_that_cannot_share_the_sequences():
    """Every stage is checked, and the error has the numbers of that stage."""
    stages = (gpt.Stage(1, 64, 64, tokens_per_step=512), gpt.Stage(1, 64, 64))
    for cfg, tokens, sequences in ((gpt.make_config({"preset": "smoke"}), 2048, 4),
                                   (gpt.make_config({"preset": "smoke", "stages": stages}), 512, 1)):
        for refuse in (gpt.check_world_size, gpt.derived_numbers):
            with pytest.raises(gpt.InputError, match=f"--tokens_per_step={tokens} is {sequences} packed .* 3 ranks cannot"):
                refuse(cfg, 3)
    assert gpt.check_world_size(cfg, 1) == (2, 2)  # of the last stage


@pytest.mark.parametrize(
    "world_size, micro, expected",
    [(1, 512, (4, 1)), (1, 1024, (2, 2)), (1, 1536, (2, 2)), (2, 9999, (1, 2)), (4, 512, (1, 1))],
)
def test_sequences_are_split_evenly(world_size, micro, expected):
    cfg = gpt.make_config({"preset": "smoke", "micro_batch_tokens": micro})
    assert gpt.sequences_per_rank(cfg, world_size, cfg.tokens_per_step, cfg.seq_len) == expected
    assert gpt.check_world_size(cfg, world_size) == expected


def test_errors_list_the_names(capsys):
    assert gpt.main(["--preset=nosuch"]) == 2
    assert capsys.readouterr().err.endswith(f"Presets: {', '.join(gpt.PRESETS)}, and records/presets/*.json\n")
    assert gpt.main(["--without=nosuch"]) == 2
    assert capsys.readouterr().err.endswith(f"Mechanisms: {', '.join(gpt.MECHANISMS)}\n")


def test_spaces_and_files_in_options(tmp_path, capsys):
    with_space, without = (gpt.make_config({"preset": "smoke", "without": text}) for text in ("softcap, skips", "softcap,skips"))
    assert gpt.dataclasses.replace(with_space, without=without.without) == without and without.softcap == 0
    path = tmp_path / "stages.json"
    path.write_text('[{"duration": 1, "window_long": 64, "window_short": 64}]')
    assert gpt.parse_argv([f"--stages={path}"])[0]["stages"] == (gpt.Stage(1, 64, 64),)
    assert gpt.main([f"--stages={tmp_path}/none.json"]) == 2
    assert "none.json cannot be read ([Errno 2] No such file" in capsys.readouterr().err
    path.write_text('[{"durations": 1}]')
    assert gpt.main([f"--stages={path}"]) == 2
    assert "(durations is not one of duration, window_long, window_short, " in capsys.readouterr().err
