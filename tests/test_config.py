"""Config, presets, command line: derived numbers and errors."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, gpt, run

from tools.compare import find_parts

PRESETS = [*gpt.PRESETS, *sorted(path.stem for path in (ROOT / "presets").glob("*.json"))]


def test_parameters_of_record_32_term_by_term():
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
    derived = gpt.derived_numbers(gpt.make_config({"preset": "record_32"}), 8)
    assert derived["num_params"] == total
    assert (derived["tokens_per_rank"], derived["grad_accum_steps"], derived["ranks"]) == (49_152, 1, 8)
    assert derived["train_tokens"] == 1670 * 393_216


def test_flops_of_record_32_term_by_term():
    attention, mlp, head = 11 * 4 * 768**2 * 6, 11 * 2 * 768 * 3072 * 6, 50_304 * 768 * 6
    spans = [(557, 384, 128), (557, 896, 384), (556, 1408, 640)]  # steps per stage: int(3 * step / 1671)
    keys = sum(steps * (3 * long + 8 * short) for steps, long, short in spans) / 1670
    cfg = gpt.make_config({"preset": "record_32"})
    assert gpt.derived_numbers(cfg, 1)["flops_per_token"] == round(attention + mlp + head + 12 * 768 * keys)


def test_layers_of_laptop():
    cfg = gpt.make_config({"preset": "laptop"})
    assert cfg.sequence_start == "anywhere"
    assert cfg.layers == tuple(gpt.LayerSpec(kind, key_offset=True, value_embed=i)
                               for i, kind in enumerate(("short", "long")))


def test_layers_of_a_deeper_and_wider_laptop():
    """The pattern of the layers is a function of the depth. The heads follow from the width."""
    cfg = gpt.make_config({"preset": "laptop", "num_layers": "7", "model_dim": "256"})
    assert [layer.attention for layer in cfg.layers] == [*["short"] * 3, "long", "short", "short", "long"]
    assert [layer.value_embed for layer in cfg.layers] == [0, 1, 0, 1, 0, 1, 0]
    assert [layer.skip_from for layer in cfg.layers] == [None, None, None, None, 2, 1, 0]
    assert (cfg.num_heads, cfg.head_dim) == (4, 64)
    assert gpt.make_config({"preset": "smoke", "model_dim": 96}).num_heads == 3
    assert gpt.make_config({"preset": "smoke", "head_dim": 16}).num_heads == 4
    (layer,) = gpt.make_config({"preset": "laptop", "num_layers": 1}).layers
    assert layer == gpt.LayerSpec("long", key_offset=True, value_embed=0)
    changed = gpt.make_config({"preset": "laptop", "layers": '{"xsa": true}', "num_layers": "7"})
    assert changed.layers == tuple(dataclasses.replace(layer, xsa=True) for layer in cfg.layers)


def test_layers_of_the_record():
    """Layers, windows, value embeddings and skips of record 32."""
    layers = gpt.make_config({"preset": "record_32"}).layers
    assert [i for i, s in enumerate(layers) if s.attention == "none"] == [7]
    assert [i for i, s in enumerate(layers) if s.attention == "long"] == [0, 4, 11]
    assert [i for i, s in enumerate(layers) if not s.mlp] == [0]
    assert [s.value_embed for s in layers] == [0, 1, 2, *[None] * 6, 0, 1, 2]
    assert [s.skip_from for s in layers] == [*[None] * 6, 5, 4, 3, 2, 1, 0]


def test_layers_of_the_medium_track():
    """Record 18 of this track."""
    cfg = gpt.make_config({"preset": "track_2"})
    assert [s.value_embed for s in cfg.layers] == [0, 1, 2, 3, 4, *[None] * 6, 0, 1, 2, 3, 4]
    skips = {i: s.skip_from for i, s in enumerate(cfg.layers) if s.skip_from is not None}
    assert skips == {9: 6, 10: 4, 11: 2}
    assert all(spec.mlp and spec.attention != "none" for spec in cfg.layers)
    assert [i for i, spec in enumerate(cfg.layers) if spec.attention == "long"] == [0, 4, 11, 15]
    scales = [ropes["long"].softmax_scale for ropes in gpt.Schedule(cfg).ropes]
    assert len(set(scales[:4])) == 4 and len(set(scales[3:])) == 1  # YaRN stops at 13 blocks
    assert cfg.fp8_parts == () and gpt.derived_numbers(cfg, 8)["num_params"] == (
        7 * 50_304 * 1024 + 16 * (4 + 8) * 1024**2 + 16 * 8 * 16 + 16 * 2 + 3 + 16 + 10
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_resolves_and_survives_the_command_line(name):
    """Also as JSON."""
    cfg = gpt.make_config({"preset": name})
    values = gpt.plain_dict(cfg)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    for key in ("without", "fast", "fp8_parts", "gains"):
        texts[key] = ",".join(values[key])
    given = gpt.parse_argv([f"--{key}={text}" for key, text in texts.items()])
    assert given == texts and gpt.make_config(given) == cfg
    assert gpt.config_from_dict(values) == cfg
    cfg = dataclasses.replace(cfg, num_iterations=cfg.num_iterations or 100)
    assert gpt.derived_numbers(cfg, 1)["num_params"] > 0


@pytest.mark.parametrize("name", ["record_32", "record_92", "laptop", "smoke_92", "muonh"])
def test_a_preset_without_each_of_its_parts(name):
    """A valid config, which lacks the part."""
    parts = find_parts(gpt.make_config({"preset": name}))
    assert len(parts) > 10
    for part in parts:
        assert part not in find_parts(gpt.make_config({"preset": name, "without": part}))


@pytest.mark.parametrize("command", ["train_gpt.py --print_config", "tools/validate.py --target=9 records/laptop/*"])
def test_a_closed_pipe_is_no_traceback(command):
    done = subprocess.run(f"{sys.executable} {command} | true", shell=True, cwd=ROOT, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 9])
def test_the_pattern_exists_at_any_depth(depth):
    cfg = gpt.make_config({"preset": "smoke", "num_layers": depth})
    assert len(cfg.layers) == depth and any(spec.attention != "none" for spec in cfg.layers)


def test_spellings_are_equal():
    words = ["--num_iterations=7", "--embed_lr=0.7", "--matrix_cooldown_frac=-1", "--matrix_betas=0.8,0.9"]
    others = "--num-iterations 7 --embed-lr 0.7 --matrix-cooldown-frac=-1 --matrix-betas 0.8,0.9".split()
    cfg, other = (gpt.make_config(gpt.parse_argv(["--preset=smoke", *given])) for given in (words, others))
    assert cfg == other and (cfg.num_iterations, cfg.matrix_cooldown_frac) == (7, -1)
    assert (cfg.groups["embed"].lr, cfg.groups["matrix"].betas) == (0.7, (0.8, 0.9))
    for text in ("on", "true", "On", "TRUE"):
        assert gpt.make_config({"preset": "smoke", "smear": text}).smear is True


def test_groups_change_the_given_fields(tmp_path):
    """As a dict, as JSON or from a file. All other fields are the preset's."""
    given = {"head": {"every": 2}, "embed": {"betas": [0.5, 0.6]}}
    path = tmp_path / "groups.json"
    path.write_text(json.dumps(given))
    base = gpt.make_config({"preset": "muonh"})
    expected = base.groups | dict(
        head=dataclasses.replace(base.groups["head"], lr=0.5, every=2),
        embed=dataclasses.replace(base.groups["embed"], betas=(0.5, 0.6)),
    )
    for groups in (given, json.dumps(given), str(path)):
        cfg = gpt.make_config({"preset": "muonh", "head_lr": 0.5, "groups": groups})
        assert cfg.groups == expected and (cfg.longest_period, base.longest_period) == (2, 1)


def test_a_preset_file(tmp_path):
    """Its values replace its parent's. Stages may be in another file."""
    (tmp_path / "stages.json").write_text('[{"duration": 1, "window_long": 64, "window_short": 64}]')
    options = dict(num_iterations=7, groups={"head": {"lr": 0.5}}, stages=str(tmp_path / "stages.json"))
    (tmp_path / "mine.json").write_text(json.dumps(dict(parent="smoke", **options)))
    cfg = gpt.make_config({"preset": str(tmp_path / "mine.json"), "seed": 3})
    assert (cfg.preset, cfg.num_iterations, cfg.seed, cfg.num_layers) == ("mine", 7, 3, 4)
    assert cfg.groups["head"].lr == 0.5 and cfg.stages == (gpt.Stage(1, 64, 64),)
    (tmp_path / "mine.json").write_text(json.dumps(dict(parent="smoke", num_layer=3)))
    with pytest.raises(gpt.RunError, match="mine.json: --num_layer=3: unknown name 'num_layer': did you mean num_layers"):
        gpt.load_preset(str(tmp_path / "mine.json"))


def test_a_result_as_a_preset_repeats_its_config(shards, here):
    """Without record, out and --resume=auto. What --resume=PATH names is its start."""
    every = '--groups={"head": {"every": 2}}'
    result = run(shards, "--num_iterations=2", "--seed=3", "--without=softcap", every)
    path = f"logs/{result['run_id']}.json"
    asked = gpt.config_from_dict(result["config"])
    assert gpt.make_config(gpt.parse_argv([f"--preset={path}"])) == asked
    resumed = {**result, "config": {**result["config"], "resume": "model.pt", "record": "a", "out": "b"}}
    Path("resumed.json").write_text(json.dumps(resumed))
    assert gpt.load_preset("resumed.json") == dataclasses.replace(asked, resume="model.pt", record="", out=".")
    resumed["config"]["resume"] = "auto/step_5"
    Path("resumed.json").write_text(json.dumps(resumed))
    assert gpt.load_preset("resumed.json").resume == "auto/step_5"
    resumed["config"]["resume"] = "auto"
    Path("resumed.json").write_text(json.dumps(resumed))
    assert gpt.load_preset("resumed.json") == dataclasses.replace(asked, resume="", record="", out=".")
    assert (asked.preset, asked.seed, asked.softcap[0], asked.groups["head"].every) == ("smoke", 3, 0, 2)
    assert gpt.main([f"--preset={path}", "--out=again"]) == 0
    (repeated,) = (json.loads(other.read_text()) for other in here.glob("again/logs/*_seed3_*.json"))
    assert repeated["key"] == result["key"] and repeated["val_points"][-1][1] == result["final_val_loss"]


def test_a_tied_head_is_counted_once():
    both, once = (gpt.derived_numbers(gpt.make_config({"preset": "record_32", "tie_head": tie}), 8)
                  for tie in ("off", "on"))
    assert both["num_params"] - once["num_params"] == 50_304 * 768
    assert both["flops_per_token"] == once["flops_per_token"]  # the head multiplies in both cases


STAGE = '"duration":1,"window_long":128,"window_short":64'


@pytest.mark.parametrize(
    "args, value", [
        (["--num_layer=3"], "did you mean --num_layers?"),
        (["--preset=laptpo"], "laptpo"),
        (["--num_iterations=0"], "--num_iterations=0"),
        (["--final_lr_frac", "-0.5"], "-0.5"),
        (["--final_lr_frac", "-5e-1"], "--final_lr_frac=-0.5"),
        (["--seed=99999999999999999999999"], "99999999999999999999999"),
        (["--matrix_betas=0.9"], "0.9"),
        (["--momentum=0.5,1.5"], "1.5"),
        (["--smear=1"], "--smear=1"),
        (["--matrix_rule=nuon"], "nuon"),
        (["--matrix_rule=muonh"], "--gains=output"),
        (['--groups={"ngram": {"rule": "muon"}}'], "muon"),
        (['--groups={"nobody": {}}'], "nobody"),
        (["--head_dim=100"], "--model_dim=64"),
        (["--seq_len=500"], "500"),
        (["--val_tokens=1000"], "1000"),
        (["--micro_batch_tokens=256"], "256"),
        (["--stages=none.json"], "none.json"),
        (["--stages=[]"], "--stages is empty"),
        (['--stages=[{"duration":1}]'], "window_long"),
        ([f'--stages=[{{{STAGE},"tokens_per_step":700}}]'], "700"),
        (["--layers=[{}]"], "--num_layers=4"),
        (['--layers=[{"attention":"wide"}]', "--num_layers=1"], "attention=wide"),
        (['--layers=[{"skip_from":0}]', "--num_layers=1"], "reads h0,"),
        (['--layers=[{"mudd_in":["attn_in","h1"]}]', "--num_layers=1"], "reads h1,"),
        (['--layers={"gates_from":1}'], "gates_from=1"),
        (['--layers={"gates_from":-1}'], "gates_from=-1"),
        (['--layers={"xsb":true}'], "unknown name 'xsb'"),
        (['--stages=[{"duration":1,"window_long":64}]'], "needs window_short"),
        (["--softcap=15"], "15 is not a list: give values separated by commas"),
        (['--layers={"paired":true}', "--num_heads=1", "--head_dim=64"], "--num_heads=1 is odd"),
        (['--layers={"attention":"none","value_embed":null,"mudd_out":["attn_in"]}'], "no attention"),
        (['--layers={"mlp":false,"mudd_out":["mlp_in"]}'], "no mlp"),
        (['--layers={"mlp":false,"second_mlp":true}'], "no mlp"),
        (['--layers={"v_dim":64}'], "v_dim=64: give 1 to --head_dim=32"),
        (['--stages={"window_short":-1}'], "window_short=-1"),
        (['--stages={"duration":0}'], "duration=0"),
        (['--stages={"lr_factor":-1}'], "lr_factor=-1"),
        (["--ngram_rows=7", "--ngram_order=5"], "--ngram_rows=7: give 0, or at least 8"),
        (["--record=../x"], "../x"),
        (["--fast=kernel_that_is_not_there"], "kernel_that_is_not_there"),
        (["--extension_steps=12"], "--extension_steps=12"),
        (["--train_files=none/*.bin"], "none/*.bin"),
        (["--guard=on", "--ngram_rows=7812501"], "n-gram table, which has 2.0 GB: give --guard=off"),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_bad_input_ends_with_status_2_and_one_line(args, value, capsys, here):
    assert gpt.main(["--preset=smoke", "--device=cpu", *args]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("train_gpt.py: error: ")
    assert value in err and not any(path.is_file() for path in here.rglob("*"))


def test_the_guard_copies_tables_up_to_2_gb():
    """Of rows with 64 values of 4 or 2 bytes. One row more is refused, see above."""
    for options in (dict(guard=True, ngram_rows=7_812_500), dict(ngram_rows=7_812_501),
                    dict(guard=True, ngram_rows=15_625_000, embed_dtype="bfloat16")):  # fmt: skip
        assert gpt.make_config(dict(options, preset="smoke")).ngram_rows == options["ngram_rows"]


def test_an_object_changes_all_layers_or_stages():
    """At any depth, and in layers that a preset lists. The other fields stay."""
    for values in ({"preset": "record_32", "num_layers": 5}, {"preset": "record_92"}):
        before, after = (gpt.make_config({**values, **given}) for given in ({}, {"layers": '{"xsa": true}'}))
        assert after.layers == tuple(dataclasses.replace(layer, xsa=True) for layer in before.layers)
        after = gpt.make_config({**values, "stages": '{"window_long": 512, "lr_factor": 2}'})
        assert after.stages == tuple(dataclasses.replace(stage, window_long=512, lr_factor=2) for stage in before.stages)


@pytest.mark.house
def test_help_names_the_update_rules(capsys):
    with pytest.raises(SystemExit):
        gpt.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name, rule in gpt.RULES.items() if not rule.row_state)


def test_the_number_of_layers_that_a_preset_has_may_be_said():
    """Its layers stay, each with its mechanisms. Record 32's pattern exists at any depth."""
    for name in ("quick", "record_92", "track_2"):
        cfg = gpt.make_config({"preset": name})
        assert gpt.make_config({"preset": name, "num_layers": cfg.num_layers}) == cfg
    assert len(gpt.make_config({"preset": "record_32", "num_layers": 6}).layers) == 6


def test_print_config_needs_neither_cuda_nor_data(here, capsys):
    assert gpt.main(["--preset=record_32", "--device=cpu", "--print_config"]) == 0 and not list(here.iterdir())
    config = json.loads(capsys.readouterr().out)
    assert config["num_iterations"] == 1670 and config["derived"]["num_params"] == 271_024_967
    assert config["derived"]["mechanisms"] == sorted(gpt.list_parts())
    assert gpt.config_from_dict(config) == gpt.make_config({"preset": "record_32", "device": "cpu"})


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        gpt.main(["--help"])
    text = capsys.readouterr().out
    names = [field.name for field in dataclasses.fields(gpt.Config)]
    assert len(gpt.GROUP_OPTIONS) == 13
    assert all(f"--{name} " in text for name in [*names, *gpt.GROUP_OPTIONS])
    assert all(name in text for name in gpt.PRESETS)


@pytest.mark.parametrize("options, preset", [([], "laptop"), (["--device=cpu"], "laptop"), (["--preset=smoke"], "smoke")])
def test_help_shows_the_defaults_of_the_preset_that_runs(capsys, monkeypatch, options, preset):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(options))
    with pytest.raises(SystemExit):
        gpt.main([*options, "--help"])
    assert f"Defaults of {preset}:" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("variable", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_a_launcher_without_torchrun_is_refused(monkeypatch, variable):
    """Each of its processes would train alone. With RANK torchrun has started this process."""
    cfg = gpt.make_config(dict(preset="smoke", device="cpu"))
    monkeypatch.setenv(variable, "2")
    with pytest.raises(gpt.RunError, match=f"{variable}=2 without torchrun") as error:
        gpt.start_runtime(cfg)
    assert error.value.status == 2
    monkeypatch.setenv("RANK", "0")
    assert gpt.start_runtime(cfg).world_size == 1
    monkeypatch.delenv("RANK")
    monkeypatch.setenv(variable, "1")
    assert gpt.start_runtime(cfg).world_size == 1


@pytest.mark.parametrize("local_rank, line", [
    (1, "2 ranks on this machine, but PyTorch sees 1 GPUs: start at most 1"),
    (0, "Old GPU has capability 3.7, and PyTorch .* was built for sm_80, sm_90: .*no kernel image")])
def test_gpus_that_cannot_run_are_one_line(monkeypatch, local_rank, line):
    """A rank without a GPU, and a GPU for which this PyTorch has no kernels."""
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

    answers = dict(is_available=True, device_count=1, get_device_capability=(3, 7), get_device_name="Old GPU",
                   get_arch_list=["sm_80", "sm_90"])
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch, "ones", refuse)
    for name, value in (("RANK", local_rank), ("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(gpt.RunError, match=line) as error:
        gpt.start_runtime(gpt.make_config(dict(preset="smoke")))
    assert error.value.status == 2


def test_ranks_that_cannot_share_the_sequences():
    """Every stage is checked, and the error has the numbers of that stage."""
    stages = (gpt.Stage(1, 64, 64, tokens_per_step=512), gpt.Stage(1, 64, 64))
    cfg = gpt.make_config({"preset": "smoke", "stages": stages})
    for refuse in (gpt.check_world_size, gpt.derived_numbers):
        with pytest.raises(gpt.RunError, match="--tokens_per_step=512: 3 ranks cannot share 1 "):
            refuse(cfg, 3)
    gpt.check_world_size(cfg, 1)
    derived = gpt.derived_numbers(cfg, 1)
    assert derived["grad_accum_steps"] == 2  # of the last stage, as the next two
    assert derived["grad_accum_steps"] * derived["tokens_per_micro_batch"] == derived["tokens_per_rank"] == cfg.tokens_per_step


@pytest.mark.parametrize("world_size, micro, expected", [
    (1, 512, (4, 1)), (1, 1024, (2, 2)), (1, 1536, (2, 2)), (2, 9999, (1, 2)), (4, 512, (1, 1))])
def test_sequences_are_split_evenly(world_size, micro, expected):
    cfg = gpt.make_config({"preset": "smoke", "micro_batch_tokens": micro})
    assert gpt.divide_step(cfg, world_size, cfg.full_stages[0]) == expected


@pytest.mark.parametrize("content", ['{"num_iterations": 5', "[]", "{}"])
def test_a_file_that_is_no_preset_is_refused_in_one_line(tmp_path, capsys, content):
    (tmp_path / "mine.json").write_text(content)
    assert gpt.main([f"--preset={tmp_path / 'mine.json'}", "--print_config"]) == 2
    errors = capsys.readouterr().err
    assert "mine.json is no " in errors and errors.count("\n") == 1


@pytest.mark.parametrize("old, new", gpt.OLD_PRESETS.items())
def test_old_names_of_presets_end_with_the_new_ones(old, new, capsys):
    assert gpt.main([f"--preset={old}", "--print_config"]) == 2
    assert f"--preset={old} is now named {new}" in capsys.readouterr().err and gpt.load_preset(new).preset == new


def test_an_empty_list_is_written_as_the_help_shows_it():
    cfg = gpt.make_config(gpt.parse_argv(["--preset=smoke", "--layers=()", "--gains=()", "--without=()", "--val_windows=()"]))
    assert cfg == dataclasses.replace(gpt.make_config({"preset": "smoke"}), gains=(), val_windows=())


@pytest.mark.parametrize("value", ["true", '"on"'])
def test_on_and_off_are_booleans_of_json(value):
    assert all(layer.xsa for layer in gpt.make_config({"preset": "smoke", "layers": f'{{"xsa": {value}}}'}).layers)
