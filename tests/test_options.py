"""Each option changes the training, is refused, or stands in a list of options that change nothing by design."""

import hashlib
import json
from contextlib import suppress

import pytest
from conftest import data_args, gpt

# Options that change neither losses nor weights by design
OUTPUTS = {"track", "record", "records_dir", "logs_dir", "checkpoint_dir", "checkpoint_every", "save_model"}
OUTPUTS |= {"resume"}
OBSERVERS = {"telemetry_every", "tracker", "guard", "val_loss_every"}
SHORT_DATA = {"epochs"}  # acts if the files are too short
SPEED = {"compile", "segments", "warmup_iterations", "micro_batch_tokens", "comm_bucket_mb"}
SPEED |= {"fp8_head", "fp8_linear", "fp8_mlp", "fp8_qkv", "fp8_head_amax", "fp8_logits"}  # off on a CPU, unless they are on
OTHER_TESTS = {
    "preset",
    "without",
    "layers",
    "stages",
    "device",
    "train_files",
    "val_files",
    "vocab_file",
}
WITHOUT_EFFECT = OUTPUTS | OBSERVERS | SHORT_DATA | SPEED | OTHER_TESTS
LENGTHS = {  # of the runs
    "smoke": ["--num_iterations=8"],
    "smoke_frontier": [],  # in 9 steps no scalar shrinks, so cautious decay of scalars would be idle
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


def try_options(preset: str, names: set[str], shards) -> tuple[set[str], set[str]]:
    """Train with other values of these options. Returns (options that change training, values without effect)."""
    words = [f"--preset={preset}", "--device=cpu", *data_args(shards), *LENGTHS[preset]]
    cfg = gpt.make_config(gpt.parse_argv(words)[0])
    dtype = gpt.choose_precision(cfg, gpt.start_runtime(cfg)).dtype  # auto depends on the processor
    base = gpt.flatten_groups(vars(cfg)) | dict(dtype=str(dtype).removeprefix("torch."))
    usual, active, idle = train(words), set(), set()
    assert train(words) == usual
    for name in names:
        for text in list_values(name, base[name]):
            with suppress(gpt.InputError):
                has_effect = train([*words, f"--{name}={text}"]) != usual
                active |= {name} if has_effect else set()
                idle |= set() if has_effect else {f"--{name}={text}"}
    return active, idle


@pytest.mark.slow
def test_each_option_changes_training_or_is_refused(shards):
    """Options of mechanisms that smoke lacks have an effect in smoke_frontier."""
    names = gpt.OPTIONS.keys() - WITHOUT_EFFECT
    active, _ = try_options("smoke", names, shards)
    assert len(active) >= 50
    others, idle = try_options("smoke_frontier", names - active, shards)
    assert len(others) >= 30 and idle <= {"--state_dtype=storage"}  # its parameters are stored in float32


@pytest.mark.parametrize("words, group", [
    ("--residual_lr=1", "residual"), ("--mix_betas=0.5,0.5", "mix"), ("--gate_weight_decay=0.5", "gate"),
    ("--value_embed_lr=0.5 --num_value_embeds=0", "value_embed"), ("--ngram_rule=row_adam", "ngram")])  # fmt: skip
def test_an_option_of_a_group_without_parameters_is_refused(words, group, capsys):
    assert gpt.main(["--preset=smoke", *words.split(), "--print_config"]) == 2
    errors = capsys.readouterr().err
    assert errors.endswith(f" has no effect: this model has no parameter of group {group}\n")
    assert errors.startswith(f"train_gpt.py: error: {words.partition('=')[0]} ") and errors.count("\n") == 1
