"""Each option changes the training, is refused, or stands in a list of options that change nothing by design."""

import hashlib
import json

import pytest
from conftest import data_args, gpt, smoke_run

# Options that change neither losses nor weights by design
OUTPUTS = {"track", "record", "records_dir", "logs_dir", "checkpoint_dir", "checkpoint_every", "save_model"}
OUTPUTS |= {"resume", "time_limit"}
OBSERVERS = {"telemetry_every", "tracker", "guard", "check_ranks_every", "val_loss_every", "val_mask"}
SHORT_DATA = {"epochs"}  # acts if the files are too short
SPEED = {"compile", "compile_mode", "segments", "warmup_iterations", "micro_batch_tokens", "comm_bucket_mb"}
SPEED |= {"comm_timeout"}
SPEED |= {"fp8_head", "fp8_linear", "fp8_mlp", "fp8_qkv", "fp8_head_amax", "fp8_logits"}  # off on a CPU, unless they are on
SAMPLES = {option.name for option in gpt.OPTIONS.values() if option.section.startswith("Sampling")}
OTHER_TESTS = {
    "preset",
    "without",
    "only_with",
    "layers",
    "stages",
    "depth",
    "device",
    "train_files",
    "val_files",
}
WITHOUT_EFFECT = OUTPUTS | OBSERVERS | SHORT_DATA | SPEED | SAMPLES | OTHER_TESTS
LENGTHS = {  # of the runs
    "smoke": ["--num_iterations=8"],
    "smoke_frontier": [],  # in 9 steps no scalar shrinks, so cautious decay of scalars would be idle
    "laptop": ["--num_iterations=6", "--val_tokens=8192"],
}
OTHER_VALUES = dict(
    fast=["off"],
    dtype=["float32", "bfloat16"],
    head_dim=[16],
    model_dim=[32],
    num_heads=[1],
    num_layers=[6],
    vocab_size=[300],
    vocab_multiple=[64],
    val_windows=["64,64"],
    matrix_betas=["0.5,0.5"],
    yarn_max_window=[0],
    val_tokens=[2048, 16384],
    val_seq_len=[512],
    num_iterations=[7],
    tokens_per_step=[4096],
    seq_len=[1024, 256],
    max_doc_len=[32],
    matrix_cooldown_frac=[0.2],
    untie_frac=[0.2],
    lr_warmup_frac=[0.5],
    momentum_cooldown_steps=[3],
    grad_grid=[0.25],
    ngram_rows=[100],
    ngram_order=[2, 3],
    short_qk_dim=[0, 8],
    mudd_groups=[1, 2],
    max_attention_len=[0, 64],
    late_start=[0.0, 1.0],
    value_gate_dim=[4],
    **{f"{name}_late_every": [4, 8] for name in gpt.TRACK_1_GROUPS},
)


def list_values(name: str, value) -> list[str]:
    """Other values of an option."""
    option = gpt.OPTIONS[name]
    if name in OTHER_VALUES:
        return [str(other) for other in OTHER_VALUES[name] if other != value]
    if option.choices:
        return [choice for choice in option.choices if choice not in (value, "auto")]
    if option.type is int:
        return [str(value + 1), *(["0"] if value and not option.low else [])]
    if option.type is float:
        others = [value / 2, value / 2 + 0.125] if value else [0.125]
        return [str(other) for other in others if option.high is None or other <= option.high]
    return ["0.25,0.75"]


def train(words: list[str]) -> str:
    """A hash of losses and weights of a whole run. InputError if the options are refused."""
    cfg = gpt.make_config(gpt.parse_argv(words)[0])
    rt = gpt.choose_precision(cfg, gpt.start_runtime(cfg))
    trainer, train_data = gpt.Trainer(cfg, rt), gpt.TrainData(cfg, gpt.Schedule(cfg))
    if any(stage.has_prefix_target for stage in cfg.stages):
        trainer.model.head.prefix_tokens.copy_(
            gpt.find_prefix_tokens(gpt.read_vocabulary(cfg), cfg.padded_vocab_size)
        )
    losses, batches = [], gpt.Prefetcher(train_data.batches(rt, 0, cfg.num_iterations), rt.device)
    with batches.executor:
        for step in range(cfg.num_iterations):
            trainer.progress.step = step
            losses.append(trainer.train_step(batches, trainer.schedule.at(step)).item())
    losses.append(
        trainer.validate(gpt.ValData(cfg, train_data.bos), trainer.schedule.at(cfg.num_iterations))
    )
    digest = hashlib.sha256(json.dumps(losses).encode())
    for tensor in gpt.list_tensors(trainer):
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def is_refused(words: list[str]) -> bool:
    try:
        return not gpt.make_config(gpt.parse_argv(words)[0])
    except gpt.InputError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("preset", LENGTHS)
def test_each_option_changes_training_or_is_refused(preset, shards):
    """smoke_frontier runs only the values that smoke refuses, because it lacks the mechanism."""
    words = [f"--preset={preset}", "--device=cpu", *data_args(shards), *LENGTHS[preset]]
    cfg = gpt.make_config(gpt.parse_argv(words)[0])
    dtype = gpt.choose_precision(cfg, gpt.start_runtime(cfg)).dtype  # auto depends on the processor
    base = gpt.flatten_groups(vars(cfg)) | dict(dtype=str(dtype).removeprefix("torch."))
    usual, idle, num_changes, num_refused = train(words), [], 0, 0
    assert train(words) == usual
    for name in gpt.OPTIONS.keys() - WITHOUT_EFFECT:
        for text in list_values(name, base[name]):
            if preset == "smoke_frontier" and not is_refused(["--preset=smoke", f"--{name}={text}"]):
                continue
            try:
                is_idle = train([*words, f"--{name}={text}"]) == usual
                num_changes += not is_idle
                idle += [f"--{name}={text}"] if is_idle else []
            except gpt.InputError:
                num_refused += 1
    # the config has this value anyway
    assert idle == ([] if preset == "smoke_frontier" else ["--output_gain=off"])
    few = preset == "smoke_frontier"
    assert num_changes >= (40 if few else 50) and num_refused >= (0 if few else 15)


IDLE = [  # (preset, option without effect and further options, missing part)
    ("smoke", "--residual_lr=1", "a parameter of group residual"),
    ("smoke", "--mix_betas=0.5,0.5", "a parameter of group mix"),
    ("smoke", "--gate_weight_decay=0.5", "a parameter of group gate"),
    ("smoke", "--gain_every=2", "a parameter of group gain"),
    ("smoke", "--value_embed_lr=0.5 --num_value_embeds=0", "a parameter of group value_embed"),
    ("smoke", "--value_embed_std=0.5 --num_value_embeds=0", "value embeddings"),
    ("smoke", "--value_gate_dim=8 --num_value_embeds=0", "value embeddings"),
    ("smoke", "--num_value_embeds=9", "layers that read these tables"),
    ("smoke", "--matrix_betas=0.5,0.5", "a rule with betas"),
    ("smoke", "--orthogonalize=precise --matrix_rule=adamw", "a rule that orthogonalizes"),
    ("smoke", "--qk_group_heads=1 --matrix_rule=adamh --output_gain=on", "a rule that orthogonalizes"),
    ("smoke", "--matrix_weight_decay=0.1 --matrix_rule=muonh", "a rule that changes norms"),
    ("smoke", "--embed_lr=1 --tie_head=on", "--tie_head=off or --untie_frac"),
    ("smoke", "--embed_betas=0.5,0.5 --tie_head=on", "--tie_head=off or --untie_frac"),
    ("smoke", "--state_dtype=float32", "parameters in bfloat16"),
    ("smoke", "--decay=cautious", "weight decay"),
    ("smoke", "--decay_schedule=cosine", "weight decay"),
    ("smoke", "--gate_hidden=16", "layers with gates_from"),
    ("smoke", "--fp8_head_amax=2 --fp8_head=off", "--fp8_head"),
    ("smoke", "--fp8_logits=on --fp8_head=off", "--fp8_head"),
    ("smoke", "--untie_frac=0.5", "--tie_head=on"),
    ("smoke", "--vocab_file=x", "a prefix_weight in --stages"),
    ("smoke", "--softcap_width=5 --softcap=0", "--softcap"),
    ("smoke", "--softcap_shift=5 --without=softcap", "--softcap"),
    ("smoke", "--tokens_per_param=20", "--depth"),
    ("smoke", "--zero_init=off --output_gain=on", "--output_gain=off"),
    ("smoke", "--final_lr_frac=0 --cooldown_frac=0", "--cooldown_frac"),
    ("smoke", "--momentum_end=0.5 --matrix_rule=adamw", "a rule with momentum"),
    ("smoke", "--momentum_start=0.5 --without=muon", "a rule with momentum"),
    ("smoke", "--slow_momentum_start=0.5", "--matrix_rule=anvil"),
    ("smoke", "--late_start=0.5", "a group with another late_every"),
    ("smoke", "--embed_late_every=2", "--late_start below 1"),
    ("smoke", "--ngram_rule=row_adam", "a parameter of group ngram"),
    ("smoke", "--ngram_order=3", "--ngram_rows"),
    ("smoke", "--short_qk_dim=16", "short layers"),
    ("smoke", "--short_attention_scale=0.2", "--short_qk_dim"),
    ("smoke", "--mudd_groups=2", "a layer with mudd_out"),
    ("smoke", "--max_attention_len=512", "fewer tokens than seq_len"),
    ("laptop", "--max_doc_len=128", "--sequence_start=document"),
    ("laptop", "--momentum_start=0.5", "a rule with momentum, and --momentum_warmup_steps or"),
    ("laptop", "--momentum_warmup_steps=9", "a rule with momentum, and another --momentum_start"),
    ("laptop", "--momentum_cooldown_steps=9", "a rule with momentum, and another --momentum_start"),
]


@pytest.mark.parametrize("preset, words, needed", IDLE)
def test_options_without_effect_are_refused(preset, words, needed, capsys):
    option, *others = words.split()
    assert gpt.main([f"--preset={preset}", option, *others, "--print_config"]) == 2
    name = option.partition("=")[0]
    line = f"train_gpt.py: error: {name}="
    error = capsys.readouterr().err
    assert error.startswith(line) and f" has no effect without {needed}" in error and error.count("\n") == 1
    gpt.make_config(gpt.parse_argv([f"--preset={preset}", *others])[0])  # the further options are right
    usual = gpt.show_value(gpt.resolve_preset(preset)[name[2:]])
    gpt.make_config(
        gpt.parse_argv([f"--preset={preset}", f"{name}={usual}"])[0]
    )  # the value that it has anyway


def test_each_need_has_a_case():
    """Except for stages, whose rows need a list in JSON, and for the parts that no preset lacks. One group stands for
    all in late_every."""
    shown = {words.split("=")[0][2:] for _, words, _ in IDLE} | {f"{name}_late_every" for name in gpt.TRACK_1_GROUPS}
    assert gpt.NEEDS.keys() - shown == {
        "embed_weight_decay", "embed_every", "mlp_up_lr_mul", "mlp_down_lr_mul", "seq_len"
    }  # fmt: skip


def test_lists_of_mechanisms_that_do_nothing(capsys):
    for words, line in (
        (["--only_with=,"], "--only_with=, has no mechanism"),
        (["--without=, ,"], "--without=, , has no mechanism"),
        (["--without=muon", "--only_with=muon"], "--without=muon has no effect, because --only_with switches off all other mechanisms"),
    ):
        assert gpt.main(["--preset=smoke", *words]) == 2
        assert line in capsys.readouterr().err


def test_an_option_that_needs_a_device_prints_a_line(shards, tmp_path):
    lines = ["--fp8_head_amax=2.0 has no effect, because the head is not in FP8"]
    words = ("comm_timeout=9.0", "comm_bucket_mb=9.0", "check_ranks_every=1", "segments=2")
    lines += [f"--{word} has no effect on one rank" for word in words]
    options = [f"--{word}" for word in (*words, "fp8_head_amax=2")]
    said = smoke_run(shards, tmp_path, "--num_iterations=1", *options)["stdout"].splitlines()
    assert set(lines) <= set(said)
    said = smoke_run(shards, tmp_path, "--num_iterations=1")["stdout"].splitlines()
    assert not [line for line in said if "has no effect" in line]
