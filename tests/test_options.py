"""Each option changes the training, is refused, or stands in a list of options that change nothing by design."""

import dataclasses
import hashlib
import json
from contextlib import suppress

import pytest
from conftest import data_args, gpt

# Options that change neither losses nor weights by design
OUTPUTS = {"track", "record", "out", "checkpoint_every", "resume"}
OBSERVERS = {"telemetry_every", "tracker", "guard", "val_loss_every"}
SHORT_DATA = {"epochs"}  # acts if the files are too short
SPEED = {"compile", "warmup_iterations", "micro_batch_tokens"}
SPEED |= {"fp8_parts", "fp8_head_amax"}  # of FP8, which is off on a CPU unless it is on
OTHER_TESTS = {*"preset without layers stages groups device train_files val_files vocab_file".split()}
WITHOUT_EFFECT = OUTPUTS | OBSERVERS | SHORT_DATA | SPEED | OTHER_TESTS
LENGTHS = {  # of the runs
    "smoke": ["--num_iterations=8"],
    "smoke_92": [],  # in 9 steps no scalar shrinks, so cautious decay of scalars would be idle
}
FIELDS = {field.name: field for field in dataclasses.fields(gpt.Config)}
GROUP_FIELDS = {field.name: field for field in dataclasses.fields(gpt.Group)}
GROUPS = ("matrix", "embed", "value_embed", "scalar", "ngram")  # one of each kind of bucket and storage
BY_GROUP = {f"groups.{group}.{field}": (group, field) for group in GROUPS for field in GROUP_FIELDS}
OTHER_VALUES = dict(
    fast=["off"], dtype=["float32", "bfloat16"], vocab_size=[300], vocab_multiple=[64],
    head_dim=[16], model_dim=[32], num_heads=[1], num_layers=[6],
    val_windows=["64,64"], val_tokens=[2048, 16384], val_seq_len=[512],
    num_iterations=[7], tokens_per_step=[4096], seq_len=[1024, 256], max_doc_len=[32],
    max_attention_len=[0, 64],
    matrix_cooldown_frac=[0.2], untie_frac=[0.2], lr_warmup_frac=[0.5], momentum_cooldown_steps=[3],
    late_start=[0.0, 1.0], yarn_max_window=[0], momentum=["0.5,0.95", "0.85,0.9"],
    ngram_rows=[100], ngram_order=[2, 3], short_qk_dim=[0, 8], mudd_groups=[1, 2], value_gate_dim=[4],
    gains=["norm", "output", "norm,output"],
    softcap=["23.0,5.0,7.5", "15.0,0.0,7.5", "30.0,0.0,5.0", "0.0,0.0,7.5"],
    embed_std=["0.5,0.01", "0.02,0.5"], attention_scale=["0.2,0.1", "0.17,0.2"],
    mlp_lr_mul=["2.0,1.0", "1.0,2.0"],
)


def list_values(name: str, value) -> list[str]:
    """Other values of an option, or of a field of a group."""
    group, field = BY_GROUP.get(name, ("", name))
    option = GROUP_FIELDS[field] if group else FIELDS[name]
    if name in OTHER_VALUES:
        return [str(other) for other in OTHER_VALUES[name] if other != value]
    if field == "rule":
        return [rule for rule in gpt.RULES if rule != value][:2]  # test_update_rules.py compares all
    if field == "late_every" and group:
        return [str(period) for period in (4, 8) if period != value]
    choices, low, high = (option.metadata[key] for key in ("choices", "low", "high"))
    if choices:
        return [choice for choice in choices if choice not in (value, "auto")]
    if option.type == "bool":
        return ["off" if value else "on"]
    if option.type == "int":
        return [str(value + 1), *(["0"] if value and low <= 0 else [])]
    if option.type == "float":
        others = [value / 2, value / 2 + 0.125] if value else [0.125]
        return [str(other) for other in others if other <= high]
    return ["0.25,0.75"]


def write_word(name: str, text: str) -> str:
    """An option of the command line with this value."""
    if name not in BY_GROUP:
        return f"--{name}={text}"
    group, field = BY_GROUP[name]
    value = f'"{text}"' if field == "rule" else f"[{text}]" if field == "betas" else text
    return f'--groups={{"{group}": {{"{field}": {value}}}}}'


def train(words: list[str]) -> str:
    """A hash of losses and weights of a whole run. RunError if the options are refused."""
    cfg = gpt.make_config(gpt.parse_argv(words))
    rt = gpt.choose_precision(cfg, gpt.start_runtime(cfg))
    trainer, train_data = gpt.Trainer(cfg, rt), gpt.TrainData(cfg, gpt.Schedule(cfg))
    losses, batches = [], gpt.prefetch(train_data.batches(rt.comm, 0, cfg.num_iterations), rt.device)
    for step in range(cfg.num_iterations):
        trainer.progress.step = step
        losses.append(trainer.train_step(batches, trainer.schedule.at(step)).item())
    batches.close()
    val_data = gpt.ValData(cfg)
    losses.append(trainer.validate(val_data, trainer.schedule.at(cfg.num_iterations)))
    digest = hashlib.sha256(json.dumps(losses).encode())
    for tensor in gpt.collect_rows(trainer).values():
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def try_options(preset: str, names: set[str], shards) -> tuple[set[str], set[str]]:
    """Train with other values of these options. Returns (options that change training, values without effect)."""
    words = [f"--preset={preset}", "--device=cpu", *data_args(shards), *LENGTHS[preset]]
    cfg = gpt.make_config(gpt.parse_argv(words))
    dtype = gpt.choose_precision(cfg, gpt.start_runtime(cfg)).dtype  # auto depends on the processor
    base = {name: getattr(cfg.groups[group], field) for name, (group, field) in BY_GROUP.items()}
    base |= vars(cfg) | dict(dtype=str(dtype).removeprefix("torch."))
    usual, active, idle = train(words), set(), set()
    assert train(words) == usual
    for name in names:
        for text in list_values(name, base[name]):
            word = write_word(name, text)
            with suppress(gpt.RunError):
                if train([*words, word]) != usual:
                    active.add(name)
                    break  # one value with an effect suffices
                idle.add(word)
    return active, idle


@pytest.mark.slow
def test_each_option_changes_training_or_is_refused(shards):
    """Options of mechanisms that smoke lacks have an effect in smoke_92."""
    names = {*FIELDS, *BY_GROUP} - WITHOUT_EFFECT
    active, _ = try_options("smoke", names, shards)
    assert len(active) >= 65
    others, idle = try_options("smoke_92", names - active, shards)
    assert len(others) >= 15 and idle <= {"--state_dtype=storage"}  # its parameters are stored in float32
