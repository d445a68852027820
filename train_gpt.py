#!/usr/bin/env python3
"""Train a GPT-2-class language model to a target loss in the least wall-clock time. One file, any machine.

Result card
    track_1  record 32: 271 M parameters, 656.7 M tokens of FineWeb, to 3.28 on 8xH100: not yet run there
    frontier the newest recipe: 636 M parameters, 338.8 M tokens, to 3.28 on 8xH100: not yet run there
    laptop   1.12 M parameters, byte tokens of the PyTorch source, two CPU cores, two minutes: records/laptop
    quick    the same, half a minute; with --train_files also for little text of your own

Launch
    python train_gpt.py                                            # CUDA: track_1; else: laptop, two minutes
    torchrun --standalone --nproc_per_node=8 train_gpt.py          # the record setting (or ./run.sh)
    python train_gpt.py --preset=laptop --record=my_idea --seed=1  # leaves a folder in records/
    python train_gpt.py --checkpoint_every=250 --resume=auto       # continues where it was interrupted
    python train_gpt.py --sample=CHECKPOINT --prompt='def '        # text from a trained model
    python train_gpt.py --help                                     # also --list_presets, --print_config

Part one, the recipe: whoever has read it knows everything that decides the loss and the time.
    CONFIG           what can be chosen, and what record 32 and the newest recipe chose
    MODEL            blocks and their weights, from tokens to logits
    LOSS AND KERNELS norm, rotary, attention, cross-entropy, FP8, and our Triton kernels
    UPDATE RULES     Muon, Adam, Hyperball, as a table of functions
    OPTIMIZER        buckets of parameters; reduce-scatter, update, all-gather
    DATA             shards, packed sequences, batches
    SCHEDULES        learning rates, momentum, windows and loss weights at every step
    TRAINING         one step, the timed loop, the whole run
Part two, the workshop that the recipe runs in: devices, ranks, files, words; nothing that decides the loss.
    RUNTIME, COMMAND LINE, RUN RECORD, CHECKPOINTS, TELEMETRY AND GUARD, SAMPLING, MAIN

New here? Search for these names, in this order (rooms begin with "# ====")
    1. LayerSpec, Stage, Group           a run as data; then PRESETS: track_1 is the default of every option
    2. Block.forward, Attention.forward  what one layer computes
    3. list_weights                      every learned weight of a layer, and where it comes from
    4. Segment.forward, GPT.run_layers   how the layers follow one another
    5. HeadLoss.forward                  logits, loss and their gradient
    6. Rule.update, RULES                how a matrix changes, given its gradient
    7. Optimizer.step, Optimizer.tie     what eight GPUs do between backward and changed weights
    8. Schedule.at                       everything that changes with the step, the learning rates first
    9. Trainer.run, Trainer.train_step   where the clock starts and stops, and what one step is
   10. train                             a run from its options to its result

Shape letters: B batch, T tokens, D model_dim, H num_heads, K head_dim, V padded vocabulary, N ranks,
    M matrices (or elements) of a bucket.
"""
from __future__ import annotations

import argparse
import codecs
import ctypes
import dataclasses
import datetime
import difflib
import functools
import glob
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import typing
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and "OMP_WAIT_POLICY" not in os.environ:  # before PyTorch loads OpenMP
    # Threads that wait give up their core soon, which beside a busy process saves a third of the time and
    # more; where this process is the only one that runs they wait longer, and work begins sooner.
    try:
        num_running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    except OSError:  # not Linux
        num_running = 2
    os.environ.setdefault("GOMP_SPINCOUNT", "1000" if num_running > 1 else "100000")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

# ############################## PART ONE: THE RECIPE #######################################################

# ==== CONFIG ===============================================================================================
# Everything that can be chosen, one line each: name, default, meaning, range. The defaults are record 32,
# the preset track_1; every other preset is a difference from another one. Layers and stages are data, so
# that no code asks for a layer's number. To add an option, add a line here and use it: command line, help
# and checks follow. The presets for small machines are in COMMAND LINE.

AUTO = ("auto", "on", "off")
KERNELS = ("loss", "products", "mlp")


def option(default, meaning: str, low=None, high=None, choices=None):
    """Declare an option; low and high are inclusive, choices a tuple or a function that gives one."""
    high = 2**31 - 1 if isinstance(default, int) and high is None else high
    return dataclasses.field(default=default,
                             metadata=dict(help=meaning, low=low, high=high, choices=choices))


def choice(default: str, meaning: str, *choices: str):
    """Declare an option with these values, or on and off."""
    return option(default, meaning, choices=choices or ("on", "off"))


def split_names(text: str) -> list[str]:
    return list(filter(None, text.split(",")))


@dataclass(frozen=True)
class LayerSpec:
    """What one layer contains. Layers are data: forward never asks for a layer's number."""

    attention: str = "short"  # long | short: which scheduled window; none: no attention in this layer
    mlp: bool = True
    value_embed: int | None = None  # value-embedding table mixed into the values
    skip_from: int | None = None  # earlier layer whose output enters here (U-Net skip)
    attention_from: int | None = None  # earlier layer whose output attention reads; None: this layer's own
    paired: bool = False  # each two heads see one another's keys
    key_offset: bool = False  # half of every key is that of the token before
    xsa: bool = False  # exclusive self attention: less of a token's own value
    gate: bool = False  # a weight for the output of each head
    dc: bool = False  # dynamically composed heads: attention to the nearest tokens, mixed across heads
    gates_at: int | None = None  # layer from whose input its gates are computed; None: learned scalars
    mudd_in: str = ""  # streams, as a,b, added to its input and its values with weights of every token
    mudd_out: str = ""  # streams added to its output in the same way

    def reads(self) -> set[str]:
        """The streams this layer takes beside its input: ve<table>, h<layer> (an output), x_in (the first
        layer's input)."""
        named = {f"{kind}{number}" for kind, number in (
            ("ve", self.value_embed), ("h", self.skip_from), ("h", self.attention_from))
            if number is not None}
        return named.union(split_names(self.mudd_in), split_names(self.mudd_out),
                           ["x_in"] if self.mudd_in else [])


@dataclass(frozen=True)
class Stage:
    """A stretch of the run."""

    duration: float  # relative to the other stages; of the last one extension_steps, where there are any
    window_long: int  # tokens a query looks back in long layers
    window_short: int  # the same in short layers
    tokens_per_step: int | None = None  # None: the run's
    max_doc_len: int | None = None  # None: the run's
    lr_factor: float = 1.0  # times every learning rate
    seq_len: int | None = None  # None: the run's
    loss_weights: str = "1"  # of the next token, the one after it, ...; a:b goes from a towards b
    prefix_weight: str = "0"  # of the longest token that the next one begins with

    @property
    def has_prefixes(self) -> bool:
        return self.prefix_weight != "0"

    @property
    def num_targets(self) -> int:
        """Tokens that the logits of a token are held against, the prefix of the next one included."""
        return len(self.loss_weights.split()) + self.has_prefixes


@dataclass(frozen=True)
class Group:
    """How the parameters of a group are trained. Only those of group "matrix" can choose their rule."""

    rule: str = option("adamw", "update rule", choices=lambda: tuple(RULES))
    lr: float = option(0.0, "learning rate, which stages and schedules multiply", 0.0)
    betas: tuple[float, float] = option((0.8, 0.95), "Adam betas, as a,b (normuon: the second)", 0.0, 0.9999)
    weight_decay: float = option(0.0, "weight decay; 0: none", 0.0)
    every: int = option(1, "steps from one update to the next; gradients are summed", 1)


GROUPS = {
    "matrix": Group("muon", 0.05, (0.9, 0.95)),  # of the blocks; muon: lr in spectral norm
    "embed": Group(lr=0.6),
    "value_embed": Group(lr=0.6),  # and the table of token pairs
    "head": Group(lr=0.008),
    "scalar": Group(lr=0.04),  # factors and skip weights
    "residual": Group(lr=0.04, betas=(0.9, 0.95)),  # factors of the stream in every sublayer
    "mix": Group(lr=0.008, betas=(0.9, 0.95)),  # factors of what is added to it
    "gate": Group(lr=0.008, betas=(0.9, 0.99)),  # matrices from which weights are computed for every token
    "gain": Group(lr=0.1),  # of norms and outputs
}


# A field of each group: matrix_lr, embed_betas and so on
GroupConfig = dataclasses.make_dataclass("GroupConfig", [
    (f"{name}_{field.name}", field.type,
     dataclasses.field(default=getattr(group, field.name), metadata=field.metadata))
    for name, group in GROUPS.items() for field in dataclasses.fields(Group)
    if field.name != "rule" or name == "matrix"], frozen=True, namespace={"__doc__": Group.__doc__})


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network."""

    depth: int = option(0, "layers from which shape, batch, steps and rates follow; 0: their options", 0, 64)
    tokens_per_param: float = option(12.0, "training tokens per parameter with --depth", 0.1, 1e6)
    num_layers: int = option(12, "layers", 1, 1000)
    num_heads: int = option(6, "attention heads per layer", 1, 4096)
    head_dim: int = option(128, "channels per head", 8, 4096)
    model_dim: int = option(768, "residual channels = num_heads * head_dim", 8, 65536)
    mlp_ratio: int = option(4, "MLP hidden channels per residual channel", 1, 64)
    vocab_size: int = option(50257, "tokens of the vocabulary", 2, 65536)
    vocab_multiple: int = option(128, "the vocabulary is padded to a multiple of this", 1, 65536)
    tie_head: str = choice("off", "head and token embedding are kept equal, by the head's options")
    embed_dtype: str = choice("bfloat16", "embedding, head, gate storage", "bfloat16", "float32")
    matrix_dtype: str = choice("float32", "matrix storage", "float32", "bfloat16")
    init_std: float = option(0.5, "sqrt(fan-in) times the standard deviation of matrices at first", 0.0)
    embed_std: float = option(1.0, "standard deviation of the embedding at first", 0.0)
    value_embed_std: float = option(1.0, "the same of the value embeddings", 0.0)
    zero_init: str = choice("on", "matrices that write into the residual stream begin at zero; mlp: those "
                            "of the MLP", "on", "mlp", "off")
    output_gain: str = choice("auto", "instead of matrices learned gains begin at zero; auto: with "
                              "rules that keep norms", *AUTO)
    norm_gain: str = choice("off", "learned gains, 1 at first, of the norms before attention and MLP")
    qk_norm: str = choice("on", "normalise each head's queries and keys")
    qk_group_heads: int = option(0, "heads whose queries, or keys, are orthogonalised as one; 0: all", 0)
    rotary_pairs: str = choice("halves", "channels that rotate together: j and j + K/2, or 2j and 2j + 1",
                               "halves", "adjacent")
    attention_scale: float = option(0.1, "softmax scale at first", 0.0)
    yarn_max_window: int = option(65_536, "YaRN follows the long window as far as this; 0: not at all", 0)
    attention_gate_dim: int = option(12, "input channels of the per-head attention gate; 0: no gate", 0)
    num_value_embeds: int = option(3, "value-embedding tables; 0: none", 0)
    value_gate_dim: int = option(0, "input channels of their per-head gate; 0: a learned number", 0, 24)
    x0_shortcut: str = choice("on", "mix the embedding into every layer's input, by learned numbers; "
                              "after: into the stream after attention", "off", "on", "after")
    residual_init: float = option(0.0, "learned factor of the stream in each sublayer, at first; 0: none", 0)
    smear: str = choice("off", "mix the embedding of the token before into each, by a gate")
    bigram_rows: int = option(0, "rows of the table of hashed token pairs, mixed like x0; 0: none", 0)
    gate_hidden: int = option(64, "hidden channels where weights are computed for every token (MUDD)", 1)
    softcap: float = option(30.0, "logits become softcap * sigmoid((logit + shift) / width): 30, 0, 7.5 "
                            "make 15 tanh(logit / 15) + 15; 0: they stay", 0)
    softcap_shift: float = option(0.0, "shift of the softcap")
    softcap_width: float = option(7.5, "width of the softcap", 1e-3)
    fp8_head: str = choice("auto", "FP8 matmuls in the head while training", *AUTO)
    fp8_head_max: float = option(0.875, "size at which weights of the head saturate in FP8", 1e-6)
    fp8_mlp: str = choice("off", "FP8 matmuls in the MLP's forward", *AUTO)
    fp8_linear: str = choice("auto", "FP8 in all linears of the layers; auto: from 1536 channels", *AUTO)
    layers: tuple[LayerSpec, ...] = option((), "layers as JSON; empty: record 32's pattern at this depth")


@dataclass(frozen=True)
class OptimConfig:
    """Update rules and schedules."""

    orthogonalize: str = choice("newton_schulz", "how muon rules make singular values equal",
                                "newton_schulz", "polar_express", "precise")
    mlp_up_lr_mul: float = option(1.0, "factor on the learning rate of the MLP's first matrix", 0.0)
    mlp_down_lr_mul: float = option(1.0, "the same of its second", 0.0)
    decay: str = choice("decoupled", "cautious: only towards the update", "decoupled", "cautious")
    decay_schedule: str = choice("constant", "how decay changes; cosine: to 0", "constant", "lr", "cosine")
    momentum_start: float = option(0.85, "Muon momentum at step 0", 0.0, 0.9999)
    momentum_end: float = option(0.95, "Muon momentum after its warm-up", 0.0, 0.9999)
    momentum_warmup_steps: int = option(300, "steps over which momentum rises", 0)
    momentum_cooldown_steps: int = option(0, "last steps, over which it falls to momentum_start", 0)
    adam_eps: float = option(1e-8, "Adam epsilon, for a loss summed over 49,152 tokens", 1e-30)
    state_dtype: str = choice("storage", "of moments: the parameter's; or float32, and bfloat16 matrices "
                              "keep their lower half beside them", "storage", "float32")
    untie_frac: float = option(1.0, "fraction of the run after which a tied embedding is its own", 0.0, 1.0)
    grad_grid: float = option(0.0, "round gradients to multiples of this: the same bits on any ranks", 0.0)
    lr_warmup_frac: float = option(0.0, "fraction of the run where rates rise linearly", 0.0, 1.0)
    cooldown_frac: float = option(0.5, "fraction of the run where rates fall linearly", 0.0, 1.0)
    matrix_cooldown_frac: float = option(-1.0, "the same of block matrices; -1: cooldown_frac", -1.0, 1.0)
    final_lr_frac: float = option(0.1, "learning rate at the end, as a fraction of the option", 0.0, 1.0)


@dataclass(frozen=True)
class TrainConfig:
    """Data, budget, devices and output."""

    preset: str = option("auto", "starting point (--list_presets); auto: track_1 with CUDA, laptop without")
    without: str = option("", "mechanisms to switch off, as a,b (--list_presets); options beside it win")
    only_with: str = option("", "switch off all mechanisms but these, as a,b")
    track: str = option("track_1", "folder under records/ in which this run may compete")
    record: str = option("", "name of a record run; its script, log and result go to records_dir")
    seed: int = option(0, "seed of the initial weights", 0)
    device: str = choice("auto", "where to train", "auto", "cuda", "cpu")
    dtype: str = choice("auto", "activations; auto: bfloat16 where fast", "auto", "bfloat16", "float32")
    kernels: str = choice("auto", "our Triton kernels; auto: on CUDA, if they prove right at start, and the "
                          "MLP's fast; or one of them alone", *AUTO, *KERNELS)
    compile: str = choice("auto", "torch.compile the model; auto: on CUDA with Triton", *AUTO)
    compile_mode: str = choice("default", "how long its compiler searches for faster kernels", "default",
                               "max-autotune-no-cudagraphs", "coordinate-descent")
    segments: int = option(0, "graphs that the layers are cut into, so that messages travel meanwhile; 0: "
                           "one on one rank, four on several", 0)
    train_files: str = option("data/fineweb10B/fineweb_train_*.bin", "pattern of the training shards")
    epochs: int = option(1, "times that the training files may be read, if once is too short", 1)
    val_files: str = option("data/fineweb10B/fineweb_val_*.bin", "pattern of the validation shards")
    val_tokens: int = option(10_485_760, "validation tokens", 1)
    val_seq_len: int = option(262_144, "tokens of one validation sequence", 128)
    val_windows: tuple[int, ...] = option((1664, 768), "long,short at the end; empty: the last stage's", 1)
    val_loss_every: int = option(125, "steps between validations; 0: only at the end", 0)
    num_iterations: int = option(1670, "optimizer steps", 1)
    extension_steps: int = option(0, "of these, steps of the last stage, after the schedule's end", 0)
    tokens_per_step: int = option(393_216, "training tokens of one optimizer step, over all ranks", 128)
    seq_len: int = option(49_152, "tokens of a packed sequence of documents, whatever the ranks", 128)
    micro_batch_tokens: int = option(49_152, "most tokens per forward-backward: decides the memory", 128)
    row_start: str = choice("document", "where packed sequences begin; anywhere: where the last one ended",
                            "document", "anywhere")
    document_mask: str = choice("on", "a token sees its own document only, not the whole packed sequence")
    max_doc_len: int = option(2048, "training documents are cut to this many tokens", 2)
    warmup_iterations: int = option(3, "untimed steps per stage before the clock starts; then undone", 0)
    comm_bucket_mb: float = option(64.0, "MB of like parameters in one message between ranks", 0.0)
    comm_timeout: float = option(20.0, "seconds a rank waits for the others before it ends the run", 1.0)
    check_ranks_every: int = option(0, "debug: steps between comparisons of all ranks' bits; 0: never", 0)
    checkpoint_every: int = option(0, "steps between checkpoints; 0: only when a run is stopped", 0)
    checkpoint_dir: str = option("checkpoints", "where checkpoints go, each run in a folder of its own")
    resume: str = option("", "checkpoint to continue from; auto: the newest of this run, if there is one")
    time_limit: float = option(0.0, "seconds until the run saves a checkpoint and stops; 0: never", 0.0)
    telemetry_every: int = option(0, "steps between measurements, left in <run_id>.jsonl; 0: never", 0)
    tracker: str = choice("off", "send losses, and what is measured, to this tool, too; needs its package",
                          "off", "tensorboard", "trackio", "wandb")
    guard: str = choice("off", "roll back and continue more carefully when training goes wrong")
    records_dir: str = option("records", "where record runs go")
    logs_dir: str = option("logs", "where all other runs go")
    stages: tuple[Stage, ...] = option(
        (Stage(1, 384, 128), Stage(1, 896, 384), Stage(1, 1408, 640)), "stages as JSON: duration, "
        "window_long, window_short, tokens_per_step, max_doc_len, lr_factor, seq_len, loss_weights, "
        "prefix_weight")
    vocab_file: str = option("data/gpt2_vocab.json", "ids by token in JSON, for stages with a prefix_weight")


@dataclass(frozen=True)
class SampleConfig:
    """Text instead of training."""

    sample: str = option("", "checkpoint to write text with")
    prompt: str = option("", "what the text begins with; token ids where no tokenizer is at hand")
    max_new_tokens: int = option(256, "tokens to write at most; a document end stops earlier", 1)
    temperature: float = option(0.8, "0: always the likeliest token", 0.0)
    top_k: int = option(50, "choose among so many of the likeliest tokens; 0: among all", 0)


@dataclass(frozen=True)
class Config(TrainConfig, OptimConfig, ModelConfig, GroupConfig, SampleConfig):
    """All options of a run."""

    @property
    def groups(self) -> dict[str, Group]:
        """The groups by name."""
        return {name: Group(**{field.name: getattr(self, f"{name}_{field.name}", field.default)
                               for field in dataclasses.fields(Group)}) for name in GROUPS}

    @property
    def has_output_gain(self) -> bool:
        """Whether layers begin with zero gains instead of zero matrices."""
        keeps_norm = RULES[self.groups["matrix"].rule].keeps_norm
        return self.output_gain == "on" or self.output_gain == "auto" and keeps_norm

    def output_std(self, part: str) -> float:
        """init_std of the matrices by which attention or mlp write into the residual stream."""
        return 0.0 if self.zero_init in ("on", part) and not self.has_output_gain else self.init_std

    @property
    def padded_vocab_size(self) -> int:
        """V: the vocabulary rounded up."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def adam_every(self) -> int:
        """Steps in which every group has been updated."""
        return max(group.every for group in self.groups.values())

    @property
    def full_stages(self) -> tuple[Stage, ...]:
        """The stages with what they take from the run."""
        return tuple(dataclasses.replace(stage, **{
            name: getattr(stage, name) or getattr(self, name)
            for name in ("tokens_per_step", "max_doc_len", "seq_len")}) for stage in self.stages)


CONFIG_PARTS = (TrainConfig, ModelConfig, OptimConfig, GroupConfig, SampleConfig)  # in the order of --help
OPTIONS = {field.name: field for part in CONFIG_PARTS for field in dataclasses.fields(part)}
TYPES = typing.get_type_hints(Config)  # of the options: their annotations are text


GRAD_TOKENS = 49_152  # gradients are scaled to a loss summed over so many tokens: the unit of Adam's epsilon


def build_layers(num_layers: int, num_value_embeds: int, drop_attention: bool = True
                 ) -> tuple[LayerSpec, ...]:
    """The layers of record 32 at any depth.

    Four evenly spaced layers look far; the third of them has no attention. Layer 0 has no MLP. The upper
    half takes the outputs of the lower half in reverse. The first and the last layers share value embeddings
    0, 1, 2, ...
    """
    last, layers = num_layers - 1, []
    num_values = min(num_value_embeds, num_layers // 2)
    long_layers = {round(i * last / 3) for i in range(4)}
    no_attention = round(2 * last / 3) if num_layers >= 4 and drop_attention else None
    for i in range(num_layers):
        from_end = last - i
        value_embed = i if i < num_values else num_values - 1 - from_end if from_end < num_values else None
        layers.append(LayerSpec(
            attention="none" if i == no_attention else "long" if i in long_layers else "short",
            mlp=i > 0 or num_layers == 1, value_embed=None if i == no_attention else value_embed,
            skip_from=from_end if from_end < min(i, num_layers // 2) else None))
    return tuple(layers)


# The record of 2026-07-17, layer by layer. Gates of layers 0 to 3 are computed from the embeddings, those of
# the others from the output of layer 3. Layer 10 also computes weights from its own input (MUDD).
FRONTIER_LAYERS = tuple(LayerSpec(
    attention="none" if i == 6 else "long" if i in (3, 10) else "short",
    value_embed={1: 0, 2: 1, 8: 2, 9: 3, 10: 4}.get(i), skip_from=3 if i == 6 else None,
    attention_from=7 if i > 7 else None, paired=i in (0, 2, 5, 9), key_offset=i in (3, 10),
    xsa=i in (1, 3, 4, 7), gate=i in (3, 10), dc=i == 10, gates_at=0 if i < 4 else 4,
    mudd_in="x_in,h7" if i == 10 else "", mudd_out="x_in,h7,h9,ve0,h3" if i == 10 else "")
    for i in range(11))


# name: (parent, what it is, differences from the parent)
PRESETS: dict[str, tuple[str | None, str, dict]] = {
    "track_1": (None, "the record recipe: 271 M parameters, FineWeb, 3.28 on 8xH100", {}),
    "frontier": ("track_1", "the newest recipe, of 2026-07-17: 636 M parameters, half the time", dict(
        num_layers=11, layers=FRONTIER_LAYERS, attention_gate_dim=0, num_value_embeds=5, value_gate_dim=12,
        qk_group_heads=2, rotary_pairs="adjacent", yarn_max_window=1664, x0_shortcut="after",
        residual_init=1.1**0.5, smear="on", bigram_rows=377_280, zero_init="mlp",
        tie_head="on", untie_frac=2 / 3, embed_std=0.005, value_embed_std=0.01,
        softcap=23.0, softcap_shift=5.0, fp8_head_max=1.6, fp8_mlp="auto", matrix_dtype="bfloat16",
        state_dtype="float32", adam_eps=1e-10, orthogonalize="polar_express", decay="cautious",
        decay_schedule="lr", mlp_up_lr_mul=2.0, mlp_down_lr_mul=4.0, momentum_cooldown_steps=50,
        matrix_rule="normuon", matrix_lr=0.023, matrix_betas=(0.9, 0.9), matrix_weight_decay=0.023 * 1.2,
        embed_lr=0.008, embed_betas=(0.5, 0.95), embed_weight_decay=0.008 * 0.005 * 150,
        head_betas=(0.5, 0.95), head_weight_decay=0.008 * 0.005 * 150,
        value_embed_betas=(0.75, 0.95), value_embed_weight_decay=0.6 * 0.005 * 5,
        scalar_betas=(0.9, 0.99), gate_weight_decay=0.008 * 0.005,
        **{f"{name}_every": 2 for name in GROUPS if name != "matrix"},  # Adam: odd steps only
        num_iterations=1285, extension_steps=15, cooldown_frac=0.6, final_lr_frac=0.15,
        val_loss_every=250, val_windows=(2560, 768), stages=(
            Stage(423, 384, 128, 131_072, 896, 1.0, 16_384, "1 0.5 0.25:0", "0.25"),
            Stage(424, 896, 384, 262_144, None, 1.52, 32_768, "1 0.5:0", "0.25:0"),
            Stage(424, 1408, 640, lr_factor=1.73), Stage(15, 1664, 768, lr_factor=1.73)))),
}

# ==== MODEL ================================================================================================
# A pre-norm transformer on T tokens. There is no batch dimension: documents are told apart by doc_ids.
# Matrices are stored as (outputs, inputs), but for the MLP's. What multiplies something in a layer is a
# field of Weights, a learned scalar or one computed for every token, and list_weights() says which; gates
# with a small matrix of their own are parameters of Attention and Block. What later layers read is a field
# of Saved. To add a gate: an option or a field of LayerSpec, a field of Weights with its line in
# list_weights(), and its use in Block.forward or Attention.forward.

class StageInputs(typing.NamedTuple):
    """What the schedule tells the model for a whole stage."""

    windows: Tensor | tuple[int, int]  # (long, short) tokens; for FlexAttention a tensor (2,): it can change
    cos: Tensor  # (T, 1, K/4) of the pairs that rotate; where nothing compiles as expand_rotary() makes it
    sin: Tensor
    paired_cos: Tensor | None  # (T, 2, K/4), or expanded, of even and odd heads
    paired_sin: Tensor | None
    attention_scale: Tensor  # () of the softmax
    offset: Tensor  # (T, 1, K) 1 for the channels that rotary leaves alone, but of the first token; else 0
    is_start: Tensor  # (T,) tokens with which packed sequences start
    num_targets: int = 1  # that the logits of a token are held against, the prefix of the next one included
    has_prefixes: bool = False
    row_len: int | None = None  # tokens of a packed sequence; only where attention is dense


class Weights(typing.NamedTuple):
    """What multiplies something in one layer: of each token (T, 1), or of each head (T, H); None: not there.

    A learned scalar has the same value for all tokens. list_weights() says where each comes from.
    """

    x: Tensor | None = None  # the stream, at the start
    x0: Tensor | None = None  # the normalised embeddings
    x_in: Tensor | None = None  # the first layer's input
    bigram: Tensor | None = None  # the embeddings of token pairs
    first_bigram: Tensor | None = None  # the same in layer 0, before x_in is saved
    skip: Tensor | None = None  # logit of the weight of an earlier layer's output
    skip_gate: Tensor | None = None  # times that weight
    qkv: Tensor | None = None  # the matrices of queries, keys and values
    value: Tensor | None = None  # the values
    value_embed: Tensor | None = None  # the value embeddings
    value_gate: Tensor | None = None  # (T, 2) the same, one for each half of the heads
    output: Tensor | None = None  # the matrix after attention
    attention_residual: Tensor | None = None  # the stream, where attention is added
    attention: Tensor | None = None
    mlp_residual: Tensor | None = None
    mlp: Tensor | None = None
    xsa: Tensor | None = None
    gate: Tensor | None = None
    dc_mix: Tensor | None = None
    dc_out: Tensor | None = None
    smear: Tensor | None = None
    values: Tensor | None = None  # (T, n) the streams of mudd_in, and x, as values
    inputs: Tensor | None = None  # (T, n) the same streams, as input
    outputs: Tensor | None = None  # (T, n) the streams of mudd_out, as output


class WeightSource(typing.NamedTuple):
    """Where one of a layer's Weights comes from."""

    layer: int
    name: str
    inits: tuple[float, ...]  # its numbers at first
    source: str  # group of learned scalars; or gates<layer>, mudd<layer>, out<layer>: computed there


def list_weights(cfg: Config) -> list[WeightSource]:
    """All Weights of the model, layer by layer. Sources: records 9, 15 and 32; those of 2026."""
    found, heads, is_after = [], cfg.num_heads, cfg.x0_shortcut == "after"
    has_residual = cfg.residual_init > 0
    for layer, spec in enumerate(cfg.layers):
        attends, has_values = spec.attention != "none", spec.value_embed is not None
        has_skip, has_mudd = spec.skip_from is not None, bool(spec.mudd_in)
        gates = "mix" if spec.gates_at is None else f"gates{spec.gates_at}"
        own = [f"mudd{layer}"] * 2 if has_mudd else ["residual", "mix"]
        inject = "scalar" if not is_after else own[0] if has_mudd else gates
        enters, num_streams = attends or not is_after, 1 + len(split_names(spec.mudd_in))
        written = split_names(spec.mudd_out)
        rows = [  # whether it is there, and its fields
            (cfg.x0_shortcut == "on", "x", 1, 1.0, "scalar"),
            (cfg.x0_shortcut != "off" and enters, "x_in" if has_mudd and is_after else "x0", 1, 0.0, inject),
            (cfg.bigram_rows > 0 and enters, "first_bigram" if is_after and not layer else "bigram", 1, 0.05,
             inject),
            (has_skip, "skip", 1, -1.5, "scalar"),
            (has_skip and gates != "mix", "skip_gate", 1, 0.5, gates),
            (attends, "qkv" if has_residual else "value", 1, 0.5, "scalar"),
            (attends and has_values and not (cfg.value_gate_dim or has_mudd), "value_embed", 1, 0.5,
             "scalar"),
            (attends and has_values and has_mudd, "value_gate", 2, 2.0, own[0]),
            (attends and has_residual, "output", 1, 1.0, "scalar"),
            (attends and has_residual, "attention_residual", 1, cfg.residual_init, own[0]),
            (attends and has_residual, "attention", 1, 1.0, own[1]),
            (spec.mlp and has_residual, "mlp_residual", 1, cfg.residual_init, own[0]),
            (spec.mlp and has_residual, "mlp", 1, 1.0, own[1]),
            (attends and spec.xsa, "xsa", heads, 0.0, gates),
            (attends and spec.gate, "gate", heads, 0.25, gates),
            (attends and spec.dc, "dc_mix", heads, 1.0, gates),
            (attends and spec.dc, "dc_out", heads, 0.0, gates),
            (layer == 0 and cfg.smear == "on", "smear", 1, 0.0, "scalar"),
            (attends and has_mudd, "values", num_streams, 0.0, own[0]),
            (has_mudd, "inputs", num_streams, 0.0, own[0]),
            (bool(written), "outputs", len(written),
             tuple(-0.5 if name == f"h{spec.attention_from}" else 0.0 for name in written), f"out{layer}")]
        found += [WeightSource(layer, name, init if isinstance(init, tuple) else (init,) * size, source)
                  for is_there, name, size, init, source in rows if is_there]
    return found


class Saved(typing.NamedTuple):
    """Activations (T, D) and weights that later layers read."""

    value_embeds: dict[int, Tensor] = {}  # by table
    bigram: Tensor | None = None
    x0: Tensor | None = None
    x_in: Tensor | None = None
    layers: dict[int, Tensor] = {}  # outputs of layers
    weights: dict[int, dict[str, Tensor]] = {}  # of layers, as far as they are computed

    def read(self, names: str) -> list[Tensor]:
        """The streams that a LayerSpec names, as x_in,h7,ve0."""
        return [self.x_in if name == "x_in" else
                self.layers[int(name[1:])] if name[0] == "h" else self.value_embeds[int(name[2:])]
                for name in split_names(names)]


def combine(x: Tensor, a: Tensor | None, *terms: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """a x, or x, plus b y of each term (b, y) that has a weight b: rows x, y (T, D), weights (T, 1)."""
    for b, y in terms:
        if b is None:
            continue
        if torch.compiler.is_compiling():  # fuses the passes of any form, and refuses x and y that are one
            x = torch.addcmul(x if a is None else x * a, y, b)
        else:
            x = WeightedSum.apply(x, a, y, b)
        a = None
    return x


@dataclass(frozen=True)
class ParamSpec:
    """How one parameter is trained; set beside the parameter by declare()."""

    group: str  # a name in GROUPS
    lr_mul: float | tuple[float, ...] = 1.0  # or of each matrix of a stack
    wd_mul: float = 1.0
    is_table: bool = False  # of rows that are looked up: its gradient is kept and sent by rows


def declare(data: Tensor, group: str, lr_mul: float | tuple[float, ...] = 1.0, wd_mul: float = 1.0,
            is_table: bool = False) -> nn.Parameter:
    param = nn.Parameter(data)
    param.spec = ParamSpec(group, lr_mul, wd_mul, is_table)
    return param


def init_matrices(shape: tuple[int, ...], *stds: float) -> Tensor:
    """Uniform matrices (M, *shape), each with its standard deviation; 1/sqrt(3 inputs) is PyTorch's default.

    Source: record 19.
    """
    matrices = torch.empty(len(stds), *shape)
    for matrix, std in zip(matrices, stds):
        draw(Tensor.uniform_, matrix, -(3**0.5) * std, 3**0.5 * std) if std else matrix.zero_()
    return matrices


def draw(fill: Callable, x: Tensor, *args: float) -> Tensor:
    """Fill with random numbers; not on the meta device, where that would first import the compiler."""
    return x if x.is_meta else fill(x, *args)


class Attention(nn.Module):
    """Multi-head attention with QK-norm, rotary, value embeddings and what its LayerSpec adds."""

    use_fp8 = False  # while training

    def __init__(self, cfg: Config, spec: LayerSpec):
        super().__init__()
        self.heads, self.spec, dim = (cfg.num_heads, cfg.head_dim), spec, cfg.model_dim
        self.has_qk_norm, self.rotary_pairs = cfg.qk_norm == "on", cfg.rotary_pairs
        rows = (cfg.qk_group_heads or cfg.num_heads) * cfg.head_dim
        storage, gate_storage = getattr(torch, cfg.matrix_dtype), getattr(torch, cfg.embed_dtype)
        matrices = init_matrices((dim, dim), *[cfg.init_std * dim**-0.5] * 3,
                                 cfg.output_std("attention") * dim**-0.5).to(storage)
        self.qk = declare(matrices[:2].reshape(-1, rows, dim), "matrix")  # (2H / group, group * K, D)
        self.vo = declare(matrices[2:].clone(), "matrix")  # (2, D, D)
        self.gate = self.value_gate = None
        if cfg.attention_gate_dim:  # it begins at zero, which a rule that keeps norms would never leave
            group = "scalar" if RULES[cfg.groups["matrix"].rule].keeps_norm else "matrix"
            self.gate = declare(
                torch.zeros(cfg.num_heads, cfg.attention_gate_dim, dtype=gate_storage), group)
        if cfg.value_gate_dim and spec.value_embed is not None and not spec.mudd_in:
            self.value_gate = declare(
                torch.zeros(cfg.num_heads, cfg.value_gate_dim, dtype=gate_storage), "gate")

    def forward(self, x: Tensor, values: Tensor | None, saved: Saved, w: Weights,
                mask: BlockMask | Tensor, band: Tensor | None, stage: StageInputs) -> Tensor:
        """x (T, D) normalised, values (T, D) of other streams, where there are -> (T, D)."""
        spec, dim, use_fp8 = self.spec, x.size(1), self.use_fp8 and self.training
        to_v, to_out = self.vo.type_as(x).unbind()
        to_qkv = torch.cat((self.qk.type_as(x).flatten(0, 1), to_v))  # (3D, D)
        if w.qkv is not None:  # source: the records of 2025-12-10 and 2025-12-11
            to_qkv, to_out = to_qkv * w.qkv[:1], to_out * w.output[:1]
        qk, v = multiply_linear(x, to_qkv, use_fp8).split((2 * dim, dim), dim=1)  # (T, 2D), (T, D)

        # Norm and rotary, which gives q the softmax scale. Where heads are paired, the even ones stand at
        # position 2t and the odd ones at 2t + 1.
        cos, sin = (stage.paired_cos, stage.paired_sin) if spec.paired else (stage.cos, stage.sin)
        if cos.dim() == 3:  # in a graph, where this becomes part of the product
            cos, sin = expand_rotary(cos, sin, stage.attention_scale, self.rotary_pairs)
        qk = qk.unflatten(1, (2, -1, 1 + spec.paired, self.heads[1]))  # (T, 2, H, 1, K) or (T, 2, H/2, 2, K)
        qk = NormRotary.apply(qk, cos, sin, self.rotary_pairs, self.has_qk_norm)
        q, k = qk.flatten(2, 3).unbind(1)  # (T, H, K) each
        if spec.key_offset:  # source: the record of 2025-12-14; torch.where takes five times as long
            k = torch.lerp(k, k.roll(1, 0), stage.offset.type_as(k))

        # Values: of this layer, of a table of embeddings, of other streams. Where there is one kind, its
        # weight waits for the output, as attention is linear in its values.
        table = None if spec.value_embed is None else saved.value_embeds[spec.value_embed]  # (T, D)
        out_weight = None
        if table is None and values is None:
            out_weight = w.value
        elif values is None and w.value is not None and w.value_embed is not None:
            v = combine(v, w.value, (w.value_embed, table))
        else:
            v = v if w.value is None else v * w.value
            if table is not None:
                if self.value_gate is not None:  # source: the records of 2025-12-29 and 2026-02-03
                    half = self.value_gate.size(1) // 2
                    gate = torch.cat((x[:, :half], table[:, :half]), dim=1) @ self.value_gate.type_as(x).T
                    gate = 2 * torch.sigmoid(gate)  # (T, H)
                elif w.value_gate is not None:  # (T, 2) -> (T, H)
                    gate = w.value_gate.repeat_interleave(-(-self.heads[0] // 2), dim=1)[:, : self.heads[0]]
                else:
                    gate = w.value_embed
                v, table = v.unflatten(1, self.heads), table.unflatten(1, self.heads)  # (T, H, K)
                v = torch.addcmul(v, table, gate[..., None]).flatten(1)  # (T, D)
            v = v if values is None else v + values
        v = v.unflatten(1, self.heads)  # (T, H, K)

        if spec.paired:  # a token is two rows: heads s and s + H/2 see each other's keys
            rows = (x.reshape(-1, self.heads[0] // 2, self.heads[1]) for x in (q, k, v))  # (2T, H/2, K)
            y = attend(*rows, mask).reshape(v.shape)  # (T, H, K)
        else:
            y = attend(q, k, v, mask)  # (T, H, K)
        if spec.dc:
            y = y + compose_heads(q, k, v, band, w.dc_mix, w.dc_out)
        if spec.xsa:  # less of a token's own value: the records of 2026-04-29 and after
            along = (y * v).sum(-1) / (v * v).sum(-1).clamp(min=1e-8)  # (T, H)
            y = y - (along * w.xsa.tanh())[..., None] * v
        if self.gate is not None:  # source: record 28
            gate = torch.sigmoid(x[:, : self.gate.size(1)] @ self.gate.type_as(x).T)  # (T, H)
            out_weight = gate if out_weight is None else gate * out_weight
        for weight in (out_weight, w.gate):
            y = y if weight is None else y * weight[..., None]
        return multiply_linear(y.flatten(1), to_out, use_fp8)  # (T, D)


class MLP(nn.Module):
    """Linear, ReLU^2, linear; both matrices stored (D, hidden), one batch for the optimizer."""

    use_fp8 = False  # while training
    use_fp8_forward = use_kernels = False  # the same

    def __init__(self, cfg: Config):
        super().__init__()
        dim, hidden = cfg.model_dim, cfg.mlp_ratio * cfg.model_dim
        down_inputs = dim if cfg.has_output_gain else hidden
        matrices = init_matrices((dim, hidden), cfg.init_std * dim**-0.5,
                                 cfg.output_std("mlp") * down_inputs**-0.5)
        self.up_down = declare(matrices.to(getattr(torch, cfg.matrix_dtype)), "matrix",  # (2, D, 4D)
                               lr_mul=(cfg.mlp_up_lr_mul, cfg.mlp_down_lr_mul))
        self.delayed = DelayedScale() if cfg.fp8_mlp != "off" else None

    def forward(self, x: Tensor) -> Tensor:
        """x (T, D) normalised -> (T, D)."""
        (up, down), use_fp8 = self.up_down.type_as(x).unbind(), self.use_fp8 and self.training
        has_no_kernel = use_fp8 or self.use_fp8_forward and x.device.type == "cpu"
        if self.use_kernels and self.training and not has_no_kernel and can_fuse_mlp(len(x), *up.shape):
            if not self.use_fp8_forward:
                return FusedMLP.apply(x, up, down, None)
            y, largest = FusedMLP.apply(x, up, down, self.delayed.scale.clone())
            self.delayed.note(largest.detach())
            return y
        if self.use_fp8_forward and self.training:
            y = ReLUSquared.apply(LinearFP8.apply(x, up.T, None, False))  # (T, 4D)
            return LinearFP8.apply(y, down, self.delayed(y), False)  # (T, D)
        y = ReLUSquared.apply(multiply_linear(x, up.T, use_fp8))  # (T, 4D)
        return multiply_linear(y, down, use_fp8)  # (T, D)


class Generator(nn.Module):
    """Weights of every token, s (W2 gelu(W1 x) + b), from an activation x.

    Source: multiway dynamic dense connections (MUDD), the record of 2026-04-22.
    """

    SCALE = 0.1  # s at first

    def __init__(self, cfg: Config, weights: list[WeightSource], lr_mul: float):
        super().__init__()
        self.weights, inits = weights, [init / self.SCALE for w in weights for init in w.inits]
        hidden, dim, storage = cfg.gate_hidden, cfg.model_dim, getattr(torch, cfg.embed_dtype)
        self.inner = declare(init_matrices((hidden, dim), (3 * dim) ** -0.5)[0].to(storage), "gate", lr_mul,
                             lr_mul)
        self.outer = declare(torch.zeros(len(inits), hidden, dtype=storage), "gate", lr_mul, lr_mul)
        self.bias = declare(torch.tensor(inits).to(storage), "gate", lr_mul, 0.0)

    def forward(self, x: Tensor, scale: Tensor | float) -> Iterator[tuple[WeightSource, Tensor]]:
        """x (T, D) -> each of its weights (T, size)."""
        y = F.gelu(x @ self.inner.type_as(x).T)  # (T, hidden)
        y = (y @ self.outer.type_as(x).T + self.bias.type_as(x)) * scale  # (T, all sizes)
        return zip(self.weights, y.split([len(w.inits) for w in self.weights], dim=1))


class Block(nn.Module):
    """One layer: skip in, mix with the embedding, attention, MLP, each where its LayerSpec says so."""

    def __init__(self, cfg: Config, layer: int, weights: list[WeightSource]):
        super().__init__()
        self.spec, self.is_after = cfg.layers[layer], cfg.x0_shortcut == "after"
        self.attention = None if self.spec.attention == "none" else Attention(cfg, self.spec)
        self.mlp = MLP(cfg) if self.spec.mlp else None
        for part in filter(None, (self.attention, self.mlp)):  # (D,) of what it reads, and of what it writes
            part.gain_in = part.gain_out = None
            if cfg.norm_gain == "on":
                part.gain_in = declare(torch.ones(cfg.model_dim), "gain")
            if cfg.has_output_gain:
                part.gain_out = declare(torch.zeros(cfg.model_dim), "gain")
        # What computes weights of every token: before this layer for several layers, and for this one; at
        # its end.
        for kind, lr_mul in (("gates", 0.1), ("mudd", 0.25), ("out", 0.25)):
            chosen = [w for w in weights if w.source == f"{kind}{layer}"]
            setattr(self, kind, Generator(cfg, chosen, lr_mul) if chosen else None)
        self.smear_gate = None
        if layer == 0 and cfg.smear == "on":
            self.smear_gate = declare(torch.zeros(
                min(12, cfg.model_dim), dtype=getattr(torch, cfg.embed_dtype)), "gate", 0.01, 0.0)

    def forward(self, x: Tensor, saved: Saved, w: Weights, mask: BlockMask | Tensor | None,
                band: Tensor | None, stage: StageInputs) -> Tensor:
        """x (T, D) -> (T, D)."""
        spec, values = self.spec, None
        if w.skip is not None:
            gate = torch.sigmoid(w.skip) if w.skip_gate is None else torch.sigmoid(w.skip) * w.skip_gate
            x = combine(x, None, (gate, saved.layers[spec.skip_from]))
        if not self.is_after:
            x = x if w.x is None else x * w.x
            x = combine(x, None, (w.bigram, saved.bigram), (w.x0, saved.x0))
        if spec.mudd_in:
            streams = [*saved.read(spec.mudd_in), x]
            values = sum(y * b for y, b in zip(streams, w.values.split(1, dim=1)))
            x = combine(x, None, *zip(w.inputs.split(1, dim=1), streams))
        if self.attention is not None:
            y = rms_norm(x if spec.attention_from is None else saved.layers[spec.attention_from])
            y = y if self.attention.gain_in is None else y * self.attention.gain_in.type_as(y)
            y = self.attention(y, values, saved, w, mask, band, stage)
            y = y if self.attention.gain_out is None else y * self.attention.gain_out.type_as(y)
            x = x + y if w.attention is None else combine(x, w.attention_residual, (w.attention, y))
            if self.is_after:
                x = combine(x, None, (w.bigram, saved.bigram), (w.x0, saved.x0), (w.x_in, saved.x_in))
        if self.mlp is not None:
            y = rms_norm(x)
            y = y if self.mlp.gain_in is None else y * self.mlp.gain_in.type_as(y)
            y = self.mlp(y)
            y = y if self.mlp.gain_out is None else y * self.mlp.gain_out.type_as(y)
            x = x + y if w.mlp is None else combine(x, w.mlp_residual, (w.mlp, y))
        if self.out is not None:
            ((_, outputs),) = self.out(x, Generator.SCALE)
            x = combine(x, None, *zip(outputs.split(1, dim=1), saved.read(spec.mudd_out)))
        return x


class Segment(nn.Module):
    """Consecutive layers of a model, which owns their blocks.

    The first segment normalises the embeddings, the last one what the head reads. Where ranks share the work
    each is compiled by itself: its gradients are final, and on their way, when its backward ends.
    """

    def __init__(self, cfg: Config, blocks: nn.ModuleList, layers: range, use_flex: bool,
                 weights: list[WeightSource]):
        super().__init__()
        self.blocks, self.layers, self.use_flex = nn.ModuleList(blocks[i] for i in layers), layers, use_flex
        self.weights = weights  # of all layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == cfg.num_layers
        self.saved = set().union(*(spec.reads() for spec in cfg.layers))  # streams that some layer reads

    def forward(self, x: Tensor, saved: Saved, scalars: dict[str, Tensor], gate_scale: Tensor | None,
                doc_ids: Tensor, stage: StageInputs, dtype: torch.dtype, save_all: bool
                ) -> tuple[Tensor, Saved]:
        """x (T, D), learned numbers (n,) by group, doc_ids (T,) -> x (T, D) after these layers."""
        num_tokens, masks, band = x.size(0), {}, None
        saved = saved._replace(layers=dict(saved.layers),
                               weights={layer: dict(found) for layer, found in saved.weights.items()})

        # The learned numbers of these layers become (T, size). So their gradients are summed row by row,
        # then over rows in their own precision, all in one kernel: more exact than sums in bfloat16; and in
        # the same order, into however many segments the model is cut.
        for group, param in scalars.items():
            sources = [w for w in self.weights if w.source == group]
            columns = param.expand(num_tokens, -1).split([len(w.inits) for w in sources], dim=1)
            for w, column in zip(sources, columns):
                if w.layer in self.layers:
                    saved.weights.setdefault(w.layer, {})[w.name] = column.to(dtype)
        if gate_scale is not None:
            gate_scale = gate_scale.expand(num_tokens, 1).to(dtype)

        if self.is_first:
            x, block = x.to(dtype), self.blocks[0]
            if block.smear_gate is not None:  # a part of the token before: the record of 2025-09-18
                gate = torch.sigmoid(x[:, : len(block.smear_gate)] @ block.smear_gate.type_as(x)[:, None])
                x = torch.addcmul(x, previous(x, stage.is_start), saved.weights[0]["smear"] * gate)
            x = rms_norm(x)
            saved = saved._replace(x0=x)
        for layer, block in zip(self.layers, self.blocks):
            for generator, scale in ((block.gates, gate_scale), (block.mudd, Generator.SCALE)):
                for w, column in generator(x, scale) if generator is not None else ():
                    saved.weights.setdefault(w.layer, {})[w.name] = column
            weights = Weights(**saved.weights.get(layer, {}))
            if layer == 0:
                x = combine(x, None, (weights.first_bigram, saved.bigram))
                saved = saved._replace(x_in=x if "x_in" in self.saved else None)

            # Masks are made where they are first needed, and shared by all layers of this segment.
            spec, kind = block.spec, (block.spec.attention, block.spec.paired)
            if spec.attention != "none" and kind not in masks:
                ids = doc_ids.repeat_interleave(2) if spec.paired else doc_ids
                window = stage.windows[0 if spec.attention == "long" else 1]
                masks[kind] = build_block_mask(ids, window) if self.use_flex else build_dense_mask(
                    ids, window, stage.row_len * (1 + spec.paired), dtype=dtype)
            if spec.dc:
                band = build_dense_mask(doc_ids, DC_BAND - 1, None, BLOCK, dtype)
            x = block(x, saved, weights, masks.get(kind), band, stage)
            if save_all or f"h{layer}" in self.saved:
                saved.layers[layer] = x
        return rms_norm(x) if self.is_last else x, saved


class Head(nn.Module):
    """Logits and loss. Source: records 18 and 32."""

    use_fp8 = False

    def __init__(self, cfg: Config, use_kernels: bool):
        super().__init__()
        self.fp8_max, self.use_kernels = cfg.fp8_head_max, use_kernels
        self.cap = Softcap(cfg.softcap, cfg.softcap_shift, cfg.softcap_width)
        self.weight = declare(torch.zeros(  # (V, D)
            cfg.padded_vocab_size, cfg.model_dim, dtype=getattr(torch, cfg.embed_dtype)), "head")
        self.register_buffer("prefixes", torch.full((cfg.padded_vocab_size,), -1), persistent=False)  # (V,)

    def forward(self, x: Tensor, targets: Tensor, stage: StageInputs, weights: Tensor | None = None
                ) -> Tensor:
        """Cross-entropy summed over tokens, of all targets with weights (n,), by default of the next token
        alone; in float32, without FP8 and of targets (T,) only where no gradient is wanted."""
        if not self.training:
            weight = self.weight.type_as(x)
            return sum(F.cross_entropy(self.cap(part @ weight.T), target, reduction="sum")
                       for part, target in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)))

        # All that logits are compared with, -1 for none: the next token, those after it in the packed
        # sequence, and the prefix of the next one. Source: the records of 2025-12-22 and 2026-07-13.
        columns = [targets]
        for _ in range(stage.num_targets - stage.has_prefixes - 1):
            columns.append(columns[-1].roll(-1).masked_fill(stage.is_start.roll(-1), -1))
        if stage.has_prefixes:
            columns.append(self.prefixes[targets])
        if weights is None:
            weights = torch.tensor([1.0] + [0.0] * (len(columns) - 1), device=x.device)
        return HeadLoss.apply(x, self.weight, torch.stack(columns, dim=1), weights, self.cap,
                              self.fp8_max if self.use_fp8 else 0.0, self.use_kernels)

    def logits(self, x: Tensor) -> Tensor:
        """x (T, D) -> softcapped logits (T, V) in float32."""
        return self.cap(x @ self.weight.type_as(x).T)


class GPT(nn.Module):
    """The language model, initialised on the CPU from its generator: the same weights on every device."""

    # Both are set by the optimizer. Where there are several ranks the first is called before parameters are
    # read, with their names, and waits for those that other ranks are still sending.
    wait_for: Callable[[list[str]], None] | None = None
    takes_rows = False  # whether gradients of tables are taken by rows

    def __init__(self, cfg: Config, rt: Runtime | None = None):
        super().__init__()
        rt = rt or Runtime()
        self.cfg, self.rt, self.use_flex, self.dtype = cfg, rt, rt.use_flex, rt.dtype
        table, storage = (cfg.padded_vocab_size, cfg.model_dim), getattr(torch, cfg.embed_dtype)
        self.embed = declare(  # (V, D)
            draw(Tensor.normal_, torch.empty(table), 0.0, cfg.embed_std).to(storage), "embed")
        used = {spec.value_embed for spec in cfg.layers} - {None}
        self.value_embeds = nn.ParameterDict({
            str(i): declare(draw(Tensor.normal_, torch.empty(table), 0.0, cfg.value_embed_std).to(storage),
                            "value_embed", is_table=True) for i in sorted(used)})
        self.weights = list_weights(cfg)
        self.blocks = nn.ModuleList(Block(cfg, i, self.weights) for i in range(cfg.num_layers))
        inits = {group: [init for w in self.weights if w.source == group for init in w.inits]
                 for group in GROUPS}
        self.scalars = nn.ParameterDict({
            group: declare(torch.tensor(found), group) for group, found in inits.items() if found})
        has_gates = any(block.gates is not None for block in self.blocks)
        self.gate_scale = declare(torch.tensor([Generator.SCALE]), "gate", 0.1, 0.0) if has_gates else None
        self.head = Head(cfg, "loss" in rt.kernels)
        if cfg.tie_head == "on":
            self.head.weight.data.copy_(self.embed.data)
        bigram = torch.zeros(cfg.bigram_rows, cfg.model_dim, dtype=storage)
        self.bigram = declare(bigram, "value_embed", is_table=True) if cfg.bigram_rows else None
        if not self.embed.is_meta:
            self.make_tables()
        self.make_segments(1)
        self.set_fp8(rt.fp8)
        for block in self.blocks:
            if block.mlp is not None:
                block.mlp.use_kernels = "mlp" in rt.kernels

    def make_tables(self) -> None:
        """What is not trained, and the same in every run: signs of the bigram table, token prefixes."""
        cfg, bits = self.cfg, torch.arange(SIGN_ROWS * self.cfg.model_dim if self.cfg.bigram_rows else 0)
        for _ in range(2):  # mixed until they look random
            bits = (bits ^ bits >> 16) * 0x45D9F3B & 0xFFFFFFFF
        signs = ((bits >> 15 & 1) * 2 - 1).view(-1, cfg.model_dim).to(self.embed.dtype)  # (8192, D)
        self.register_buffer("signs", signs, persistent=False)
        self.head.prefixes = torch.full((cfg.padded_vocab_size,), -1)  # (V,), none until they are read

    def set_fp8(self, fp8: frozenset[str]) -> None:
        self.fp8, self.head.use_fp8 = fp8, "fp8_head" in fp8
        for module in self.modules():
            if isinstance(module, (Attention, MLP)):
                module.use_fp8, module.use_fp8_forward = "fp8_linear" in fp8, "fp8_mlp" in fp8

    def forward(self, inputs: Tensor, targets: Tensor, doc_ids: Tensor, stage: StageInputs,
                loss_weights: Tensor | None = None) -> Tensor:
        """inputs, targets, doc_ids (T,) -> loss summed over the T tokens, float32.

        loss_weights (n,): of the next token, the one after it, ..., and of the next one's prefix.
        """
        x, _ = self.run_layers(inputs, doc_ids, stage)
        if self.wait_for is not None:
            self.wait_for(self.read_order[-1])
        return self.head(x, targets, stage, loss_weights)

    def run_layers(self, inputs: Tensor, doc_ids: Tensor, stage: StageInputs, save_all: bool = False
                   ) -> tuple[Tensor, Saved]:
        """inputs, doc_ids (T,) -> normalised final activations (T, D), and what later layers read, or all.

        Segments and head are compiled, the look-ups in tables are not: PyTorch's own kernel sums the rows of
        their gradients sorted, so always in the same order; Inductor would add them atomically, into a
        float32 copy of each table. Each table is looked up where it is first read. Source: record 32.
        """
        if self.wait_for is not None:
            self.wait_for(self.read_order[0])
        x, saved, is_start = F.embedding(inputs, self.embed), Saved({}), stage.is_start  # (T, D)
        by_rows = self.takes_rows and torch.is_grad_enabled()
        if self.bigram is not None:
            # Pairs of tokens are hashed to rows of a table, with signs that tell the pairs of a row apart.
            # Source: the records of 2026-01-19 and 2026-05-20.
            rows = hash_pairs(inputs, is_start, len(self.bigram))  # (T,)
            plan = RowPlan(rows, len(self.bigram), self.rt) if by_rows else None
            signs = (inputs ^ previous(inputs, is_start)) % SIGN_ROWS
            signs = F.embedding(signs.masked_fill(is_start, 0), self.signs).to(self.dtype)  # (T, D)
            saved = Saved({}, look_up(self.bigram, rows, plan).to(self.dtype) * signs)
        plan = RowPlan(inputs, len(self.embed), self.rt) if by_rows and self.value_embeds else None
        scalars = dict(self.scalars.items())
        for segment, names in zip(self.segments, self.read_order[1:]):
            if self.wait_for is not None:
                self.wait_for(names)
            for i in segment.tables:
                saved.value_embeds[int(i)] = look_up(self.value_embeds[i], inputs, plan).to(self.dtype)
            x, saved = segment(x, saved, scalars, self.gate_scale, doc_ids, stage, self.dtype, save_all)
        return x, saved

    def make_segments(self, num_segments: int) -> None:
        """Divide the layers into segments; each has the tables that it reads first."""
        rest = len(self.blocks) - 1  # the first segment is one layer: the tables of others arrive meanwhile
        bounds = [0, *(1 + rest * i // max(1, num_segments - 1) for i in range(num_segments))]
        bounds[-1] = len(self.blocks)
        self.segments = [Segment(self.cfg, self.blocks, range(*pair), self.use_flex, self.weights)
                         for pair in itertools.pairwise(bounds)]
        left = list(self.value_embeds)
        for segment in self.segments:
            reads = set().union(*(self.cfg.layers[layer].reads() for layer in segment.layers))
            segment.tables = [i for i in left if f"ve{i}" in reads]
            left = [i for i in left if i not in segment.tables]
        owners = [tuple([f"blocks.{layer}." for layer in segment.layers]
                        + [f"value_embeds.{i}." for i in segment.tables]) for segment in self.segments]
        left, self.read_order = [f"{name}." for name, _ in self.named_parameters()], []
        for owner in (*owners, ("head.",)):
            self.read_order.append([name[:-1] for name in left if name.startswith(owner)])
            left = [name for name in left if not name.startswith(owner)]
        # names of the parameters as they are read: before all segments, by each of them, by the head
        self.read_order.insert(0, [name[:-1] for name in left])

# ==== LOSS AND KERNELS =====================================================================================
# Mathematics on local tensors: no ranks, no schedules, no modules that learn. Where an operation has a fast
# and a plain form, one function chooses between them, and a test proves that they agree. Gradients in closed
# form save passes over memory where no compiler fuses them. FP8 is for training alone: validation multiplies
# in the dtype of the activations, with the same weights. Our Triton kernels stand at the end of the room.

BLOCK = 128  # tokens of one attention block: windows and documents are tested block by block first
# The same for the dense form: smaller ones mask fewer products in vain, larger ones make larger matmuls
DENSE_BLOCKS = {"cpu": 64, "cuda": 256}
DC_BAND = 112  # nearest tokens, over which attention is mixed across heads
SIGN_ROWS = 8192  # of signs for the bigram table


def inverse_rms(x: Tensor) -> Tensor:
    """1 / root mean square over the last dimension of x (..., D), (..., 1); float32's epsilon."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True,
                                    dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.rsqrt(norm.square() / x.size(-1) + 1.1920929e-07).type_as(x)


class RMSNorm(torch.autograd.Function):
    """x (..., D) over its root mean square, without a gain, and with float32's epsilon for every dtype. The
    gradient in closed form takes a third of the passes over memory where no compiler fuses them."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        scale = inverse_rms(x)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        """Take out of the gradient what would change the length: scale (g - y mean(g y))."""
        y, scale = ctx.saved_tensors
        mean = torch.linalg.vecdot(grad, y)[..., None] / y.size(-1)  # (..., 1)
        return torch.addcmul(grad, y, mean, value=-1) * scale


rms_norm = RMSNorm.apply


class ReLUSquared(torch.autograd.Function):
    """max(0, x)^2, whose gradient takes one pass over memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        root = F.relu(x)
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, root, value=2)


def previous(x: Tensor, is_start: Tensor) -> Tensor:
    """x (T, ...) of the token before; zeros where a packed sequence starts, is_start (T,)."""
    return x.roll(1, 0).masked_fill(is_start.view(-1, *[1] * (x.dim() - 1)), 0)


def hash_pairs(tokens: Tensor, is_start: Tensor, num_rows: int) -> Tensor:
    """Row (T,) of each token and the one before it in a table whose last row is for starts, which also
    stands for the token there. int32, which may wrap. Source: the record of 2026-01-19."""
    tokens = tokens.int().masked_fill(is_start, num_rows - 1)
    rows = (36313 * tokens ^ 27191 * previous(tokens, is_start)) % (num_rows - 1)
    return rows.masked_fill(is_start, num_rows - 1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, pairs: str = "halves", is_inverse: bool = False
                 ) -> Tensor:
    """Rotate the two channels of each pair by the angle of their position, or back, in the precision of the
    tables.

    x (T, ..., K); cos, sin broadcast against it, sin with the sign of each channel (expand_rotary).
    Source: record 32; adjacent pairs the record of 2026-01-07.
    """
    if pairs == "halves":
        partner = x.roll(x.size(-1) // 2, dims=-1)
    else:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, partner, sin, value=-1 if is_inverse else 1)


class NormRotary(torch.autograd.Function):
    """QK-norm, where on, and rotary in one, with the gradient in closed form: a third less time on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, pairs: str, has_norm: bool) -> Tensor:
        """x (T, ..., K) and tables as apply_rotary() takes them."""
        scale = inverse_rms(x) if has_norm else None
        y = apply_rotary(x, cos, sin, pairs)
        y = y * scale if has_norm else y
        y = y.type_as(x) if y.dtype != x.dtype else y  # PyTorch 2.11 loses the gradient of a cast to itself
        ctx.pairs, ctx.keeps_input = pairs, torch.compiler.is_compiling()
        ctx.save_for_backward(x if ctx.keeps_input else y, cos, sin, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """As in RMSNorm, after the way back; or before it, where y has been rotated and has the length that
        the tables give it. A compiler makes one pass of the first form."""
        y, cos, sin, scale = ctx.saved_tensors
        if ctx.keeps_input:
            grad = apply_rotary(grad, cos, sin, ctx.pairs, is_inverse=True)
            if scale is not None:
                y_normed = y.type_as(grad) * scale
                mean = torch.linalg.vecdot(grad, y_normed)[..., None] / y.size(-1)
                grad = torch.addcmul(grad, y_normed, mean.type_as(grad), value=-1) * scale
            return grad.type_as(y), None, None, None, None
        if scale is not None:  # the tables of all tokens have the softmax scale in common
            square = (cos[:1, ..., :1].square() + sin[:1, ..., :1].square()) * y.size(-1)
            along = torch.linalg.vecdot(grad, y)[..., None] / square
            grad = torch.addcmul(grad, y, along.type_as(grad), value=-1) * scale
        return apply_rotary(grad, cos, sin, ctx.pairs, is_inverse=True).type_as(y), None, None, None, None


class WeightedSum(torch.autograd.Function):
    """a x + b y, or x + b y, of rows x, y (T, D) and their weights a, b (T, 1), where nothing is compiled:
    the gradient of a weight is one pass over memory."""

    @staticmethod
    def forward(ctx, x: Tensor, a: Tensor | None, y: Tensor, b: Tensor) -> Tensor:
        x = x if a is None else x.contiguous()  # backward would read rows that lie apart
        ctx.save_for_backward(*((y, b) if a is None else (y, b, x, a)))
        return torch.addcmul(x if a is None else x * a, y, b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        y, b, *rest = ctx.saved_tensors
        grad_y, grad_b = grad * b, torch.linalg.vecdot(grad, y)[..., None]
        if not rest:
            return grad, None, grad_y, grad_b
        x, a = rest
        return grad * a, torch.linalg.vecdot(grad, x)[..., None], grad_y, grad_b


def make_mask_mod(doc_ids: Tensor, window: Tensor | int) -> Callable:
    """The one definition of who sees whom. doc_ids (T,); window in tokens, itself excluded."""
    def mask_mod(_batch, _head, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= window) & (doc_ids[q_idx] == doc_ids[kv_idx])

    return mask_mod


def build_block_mask(doc_ids: Tensor, window: Tensor) -> BlockMask:
    """Block mask for FlexAttention from the document range of each block; never a T x T matrix.

    doc_ids (T,) never decreases; window is a 0-d tensor, so that one compiled graph serves every window.
    Blocks in which all pairs are visible skip the mask function. A query block sees an unbroken run of key
    blocks that ends with its own, and those seen in full are one that ends before it, so counts give the
    lists without a sort. Source: records 12 and 16.
    """
    first, last = doc_ids.view(-1, BLOCK)[:, 0], doc_ids.view(-1, BLOCK)[:, -1]  # (T/128,) document range
    block = torch.arange(first.size(0), device=doc_ids.device, dtype=torch.int32)
    row = block[:, None]  # query blocks, in lists by key block those
    distance = (row - block) * BLOCK  # (T/128, T/128) tokens from query block to key block
    overlap = (first[:, None] <= last) & (first <= last[:, None])
    visible = (distance >= 0) & (distance - (BLOCK - 1) <= window) & overlap
    full = ((distance > 0) & (distance + (BLOCK - 1) <= window)
            & (first[:, None] == last) & (first == last[:, None]))
    lists = []  # counts (1, 1, T/128) and blocks (1, 1, T/128, T/128): partial, full
    for is_by_query, dim in ((True, 1), (False, 0)):
        num_visible, num_full = (seen.sum(dim, dtype=torch.int32) for seen in (visible, full))  # (T/128,)
        start, length = row + 1 - num_visible[:, None], num_full[:, None]
        if is_by_query:
            partial = torch.where(start + block < row - length, start + block, row)
            unmasked = row - length + block
        else:
            partial, unmasked = torch.where(block == 0, row, row + length + block), row + 1 + block
        for counts, blocks in ((num_visible - num_full, partial), (num_full, unmasked)):
            lists += [counts[None, None], blocks.clamp(max=block.size(0) - 1)[None, None]]
    return BlockMask(doc_ids.shape * 2, *lists, (BLOCK, BLOCK), make_mask_mod(doc_ids, window))


def build_dense_mask(doc_ids: Tensor, window: int, row_len: int | None = None, size: int | None = None,
                     dtype: torch.dtype = torch.float32) -> Tensor:
    """Mask (T/C, C, M * C) to add to scores, 0 or -inf: of a query block, for the M key blocks that end with
    its own; where those would be all of a packed sequence, it is one block. doc_ids (T,) never decreases."""
    num_tokens = doc_ids.size(0)
    row_len = row_len or num_tokens
    size = math.gcd(row_len, size or DENSE_BLOCKS[doc_ids.device.type])  # C
    spans = 1 + -(-window // size)  # M: key blocks a query block can reach
    if spans * size >= row_len:
        size, spans = row_len, 1
    num_keys, reach, like = spans * size, (spans - 1) * size, dict(dtype=dtype, device=doc_ids.device)
    starts = torch.arange(0, num_tokens, size, device=doc_ids.device).view(-1, 1, 1)
    if torch.compiler.is_compiling():  # which makes one kernel of it
        q_idx = starts + torch.arange(size, device=doc_ids.device)[:, None]  # (T/C, C, 1)
        kv_idx = starts + torch.arange(-reach, size, device=doc_ids.device)  # (T/C, 1, M * C)
        visible = (kv_idx >= 0) & make_mask_mod(doc_ids, window)(None, None, q_idx, kv_idx.clamp(min=0))
        return torch.zeros(visible.shape, **like).masked_fill(~visible, -math.inf)
    # Otherwise in a sixth of the time: what the window hides is the same in every block; what lies before
    # the first key of a query's document is a row of a triangle.
    square = torch.full((num_keys, num_keys), -math.inf, **like)
    hidden = square[:size].triu(reach + 1) + square[:size].tril(reach - window - 1)  # (C, M * C)
    first = torch.searchsorted(doc_ids, doc_ids).view(-1, size) - (starts[..., 0] - reach)  # (T/C, C)
    return F.embedding(first.clamp(min=0), square.tril(-1)).add_(hidden)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor) -> Tensor:
    """Windowed document attention with the softmax scale already in q. q, k, v (T, H, K) -> (T, H, K).

    With a dense mask it is computed in blocks of C queries over M * C keys.
    """
    if isinstance(mask, BlockMask):
        return attend_flex(q, k, v, mask)
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        return BlockAttention.apply(q, k, v, mask)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        y = F.scaled_dot_product_attention(*split_blocks(q, k, v, mask), attn_mask=mask[:, None], scale=1.0)
    return y.transpose(1, 2).flatten(0, 1)  # (T, H, K)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attention through FlexAttention. q, k, v (T, H, K) -> (T, H, K). Only fast when compiled."""
    options = FLEX_FLOAT32 if q.dtype == torch.float32 else None
    q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))  # (1, H, T, K)
    y = flex_attention(q, k, v, block_mask=mask, scale=1.0, kernel_options=options)  # (1, H, T, K)
    return y[0].transpose(0, 1)  # (T, H, K)


# Tiles of FlexAttention that fit into the shared memory of every GPU (64 KiB on Turing) in float32; what
# PyTorch would choose does not
FLEX_FLOAT32 = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_M1=16, BLOCK_N1=32, BLOCK_M2=32, BLOCK_N2=16, num_stages=1,
                    num_warps=4)


class BlockAttention(torch.autograd.Function):
    """Attention over the keys that a mask of build_dense_mask() names, read where they lie: on a CPU
    scaled_dot_product_attention, which needs copies of them, takes half as long again."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q, k, v (T, H, K) -> (T, H, K)."""
        num_blocks, size, num_keys = mask.shape
        q = q.transpose(0, 1).contiguous().unflatten(1, (num_blocks, size))  # (H, T/C, C, K)
        k, v = (F.pad(x.transpose(0, 1), (0, 0, num_keys - size, 0)) for x in (k, v))  # (H, R + T, K)
        scores, y = q.new_empty(q.size(0), *mask.shape), torch.empty_like(q)  # (H, T/C, C, M * C)
        for head, keys in enumerate(k):  # unfold: the overlapping keys of each block (T/C, K, M * C)
            torch.baddbmm(mask, q[head], keys.unfold(0, num_keys, size), out=scores[head])
        probs = scores.softmax(-1)
        for head, values in enumerate(v):
            torch.bmm(probs[head], values.unfold(0, num_keys, size).mT, out=y[head])
        ctx.save_for_backward(q, k, v, probs, mask)
        return y.flatten(1, 2).transpose(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """grad (T, H, K) -> gradients of q, k, v (T, H, K)."""
        q, k, v, probs, mask = ctx.saved_tensors
        num_blocks, size, num_keys = mask.shape
        grad = grad.transpose(0, 1).contiguous().view_as(q)  # (H, T/C, C, K)
        grad_scores, grad_q = torch.empty_like(probs), torch.empty_like(q)
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for head, values in enumerate(v):
            torch.bmm(grad[head], values.unfold(0, num_keys, size), out=grad_scores[head])
        grad_scores = torch._softmax_backward_data(grad_scores, probs, -1, probs.dtype)
        for head, keys in enumerate(k):
            torch.bmm(grad_scores[head], keys.unfold(0, num_keys, size).mT, out=grad_q[head])
            for total, weights, x in ((grad_k, grad_scores, q), (grad_v, probs, grad)):
                parts = (weights[head].mT @ x[head]).unflatten(1, (-1, size))  # (T/C, M, C, K)
                blocks = total[head].unflatten(0, (-1, size))  # (T/C + M - 1, C, K)
                for i in range(num_keys // size):
                    blocks[i : i + num_blocks] += parts[:, i]
        grads = (x[:, num_keys - size :].transpose(0, 1) for x in (grad_k, grad_v))
        return grad_q.flatten(1, 2).transpose(0, 1), *grads, None


def split_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (T, H, K) -> blocks of queries (T/C, H, C, K), and of keys and values (T/C, H, M * C, K)."""
    num_blocks, size, num_keys = mask.shape
    blocks = [q.unflatten(0, (num_blocks, size)).transpose(1, 2)]
    for x in (k, v):
        x = F.pad(x, (0, 0, 0, 0, num_keys - size, 0)).unflatten(0, (-1, size))  # (T/C + M - 1, C, H, K)
        x = torch.cat([x[i : i + num_blocks] for i in range(num_keys // size)], dim=1)  # (T/C, M * C, H, K)
        blocks.append(x.transpose(1, 2))
    return tuple(blocks)


def compose_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, mix: Tensor, out: Tensor) -> Tensor:
    """The attention of all heads over the nearest tokens: summed over heads with weights mix, and returned
    to each head with weights out.

    q, k, v (T, H, K), mask of build_dense_mask(), mix and out (T, H) -> (T, H, K). Source: dynamically
    composable heads, the record of 2026-05-27.
    """
    q, k, v = split_blocks(q, k, v, mask)
    probs = (q @ k.mT + mask[:, None]).softmax(-1)  # (T/C, H, C, M * C)
    mix = mix * (mix.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    mix, out = (x.unflatten(0, mask.shape[:2]).mT[..., None] for x in (mix, out))  # (T/C, H, C, 1)
    mixed = (probs * mix).sum(1, keepdim=True)  # (T/C, 1, C, M * C)
    return ((mixed @ v) * out).transpose(1, 2).flatten(0, 1)  # (T, H, K)


class Softcap(typing.NamedTuple):
    """Bounds logits: top * sigmoid((logit + shift) / width). A top of 0 leaves them as they are.

    Source: records 9 and 19; with a shift the record of 2025-12-26.
    """

    top: float
    shift: float
    width: float

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits + self.shift if self.shift else logits
        return self.top * torch.sigmoid(logits / self.width) if self.top else logits


def softcapped_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor, cap: Softcap,
                             grad_dtype: torch.dtype, grad_scale: float = 1.0, use_kernels: bool = False
                             ) -> tuple[Tensor, Tensor]:
    """Losses (T,) of logits (T, V) once softcapped, against targets (T, n) of weights (n,); and d loss /
    d logits (T, V) over grad_scale.

    A target of -1 has no term. The gradient comes with the loss, in the precision in which it will be
    multiplied; with one target no entry exceeds 1 over grad_scale. Without a cap always in plain form.
    Source: the fused kernel of 2026-01-16.
    """
    if use_kernels and cap.top:
        losses = torch.empty_like(logits[:, 0], dtype=torch.float32)
        grads = torch.empty_like(logits, dtype=grad_dtype)
        cross_entropy_kernel[(logits.size(0),)](
            logits, targets, weights, losses, grads, logits.size(1), targets.size(1), *cap, grad_scale,
            BLOCK=4096, num_warps=8)
        return losses, grads
    capped = cap(logits)  # (T, V)
    log_probs = torch.log_softmax(capped, dim=-1)  # (T, V)
    weights, targets = weights.type_as(capped) * (targets >= 0), targets.clamp(min=0)  # (T, n)
    losses = -(log_probs.gather(1, targets) * weights).sum(1)  # (T,)
    weights = weights / (grad_scale * cap.width if cap.top else grad_scale)
    grads = log_probs.exp_().mul_(weights.sum(1, keepdim=True)).scatter_add_(1, targets, -weights)  # (T, V)
    if cap.top:  # the slope of the cap, but for its width
        grads.mul_(torch.addcmul(capped, capped, capped, value=-1 / cap.top))
    return losses, grads.to(grad_dtype)


class HeadLoss(torch.autograd.Function):
    """Head, softcap and cross-entropy in one, whose gradients are made together with the loss.

    Logits exist for LOGITS_CHUNK tokens at a time and never in float32; their gradient has the precision in
    which it is multiplied. FP8 is for x of unit root mean square, whose entries are at most sqrt(D).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, target_weights: Tensor, cap: Softcap,
                fp8_max: float, use_kernels: bool) -> Tensor:
        """x (T, D), weight (V, D), targets (T, n), target_weights (n,) -> loss summed over tokens.

        fp8_max: the size at which a weight saturates; 0: no FP8.
        """
        w, loss, grad_xs, grad_w = weight.type_as(x), torch.zeros((), device=x.device), [], None
        wide = torch.promote_types(x.dtype, torch.float32)
        x_scale, w_scale = math.sqrt(x.size(1)) / 448, fp8_max / 448
        if fp8_max:  # cast once for all chunks
            w, _ = to_fp8(w, E4M3, w_scale)  # (V, D)
            w_transposed = transpose(w, use_kernels)  # (D, V)
        for part, target in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
            if fp8_max:
                x8, _ = to_fp8(part, E4M3, x_scale)
                logits = scaled_matmul(x8, w, x_scale, w_scale, x.dtype, fast=True)  # (T, V)
                losses, grad8 = softcapped_cross_entropy(logits, target, target_weights, cap, E5M2,
                                                         FP8_GRAD_SCALE, use_kernels)
                grad_x = scaled_matmul(grad8, w_transposed, FP8_GRAD_SCALE, w_scale, x.dtype, fast=False)
                part_w = scaled_matmul(transpose(grad8, use_kernels), transpose(x8, use_kernels),
                                       FP8_GRAD_SCALE, x_scale, torch.float32, fast=False)  # (V, D)
            else:
                losses, grads = softcapped_cross_entropy(part @ w.T, target, target_weights, cap, x.dtype,
                                                         use_kernels=use_kernels)
                grad_x, part_w = grads @ w, (grads.T @ part).to(wide)  # (T, D), (V, D)
            loss = loss + losses.sum()
            grad_xs.append(grad_x)
            grad_w = part_w if grad_w is None else grad_w + part_w
        ctx.save_for_backward(torch.cat(grad_xs), grad_w.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.type_as(grad_x), grad_w * grad.type_as(grad_w), None, None, None, None, None


FP8_OPTIONS = ("fp8_head", "fp8_linear", "fp8_mlp")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_LEAST = 128  # rows and columns of a weight for which casting pays
FP8_GRAD_SCALE = 1 / 448  # belongs to a loss summed over tokens: an entry of d loss / d logits is at most 1
LOGITS_CHUNK = 24_576  # tokens whose logits exist at once


def to_fp8(x: Tensor, dtype: torch.dtype, scale: Tensor | float | None = None
           ) -> tuple[Tensor, Tensor | float]:
    """x over a scale, saturating; and the scale: by default () that makes its largest entry the dtype's."""
    limit = torch.finfo(dtype).max
    scale = x.abs().max().float().clamp(min=1e-12) / limit if scale is None else scale
    return (x.float() / scale).clamp_(-limit, limit).to(dtype).contiguous(), scale


def scaled_matmul(a: Tensor, b: Tensor, scale_a: float | Tensor, scale_b: float | Tensor,
                  out_dtype: torch.dtype, fast: bool) -> Tensor:
    """(a * scale_a) @ (b * scale_b).T of FP8 tensors. a (M, K), b (N, K), both row-major -> (M, N).

    On a CPU their exact products are summed in float32: its FP8 operation can take a thousand times longer.
    """
    if a.device.type == "cpu":
        return (a.float() @ b.float().T * (scale_a * scale_b)).to(out_dtype)
    scales = (scale if isinstance(scale, Tensor) else torch.full(
        (), scale, dtype=torch.float32, device=a.device) for scale in (scale_a, scale_b))
    return torch._scaled_mm(a, b.T, *scales, out_dtype=out_dtype, use_fast_accum=fast)


class LinearFP8(torch.autograd.Function):
    """x W^T in FP8, and so are the two matmuls of backward, or they are in x's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, x_scale: Tensor | None, is_whole: bool) -> Tensor:
        x8, x_scale = to_fp8(x.flatten(0, -2), E4M3, x_scale)
        w8, w_scale = to_fp8(weight, E4M3)
        ctx.save_for_backward(*((x8, x_scale, w8, w_scale) if is_whole else (x, weight)))
        ctx.weight_dtype = weight.dtype
        y = scaled_matmul(x8, w8, x_scale, w_scale, x.dtype, fast=True)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """grad (..., N) -> gradients of x (..., K) and weight (N, K)."""
        if len(ctx.saved_tensors) == 2:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None, None
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        grad8, scale = to_fp8(grad.flatten(0, -2), E5M2)
        grad_x = scaled_matmul(grad8, w8.T.contiguous(), scale, w_scale, grad.dtype, fast=False)
        grad_w = scaled_matmul(grad8.T.contiguous(), x8.T.contiguous(), scale, x_scale, grad.dtype, False)
        return grad_x.unflatten(0, grad.shape[:-1]), grad_w.to(ctx.weight_dtype), None, None


def multiply_linear(x: Tensor, weight: Tensor, use_fp8: bool) -> Tensor:
    """x (..., K) times weight (N, K) transposed, (..., N): in FP8 where asked to and the sizes allow it."""
    sizes = (x.numel() // x.size(-1), *weight.shape)
    if use_fp8 and min(weight.shape) >= FP8_LEAST and all(size % 16 == 0 for size in sizes):
        return LinearFP8.apply(x, weight, None, True)
    return x @ weight.type_as(x).T


class DelayedScale(nn.Module):
    """The FP8 scale of an activation, from its largest entry in the last step: casting it needs no second
    pass. Source: the record of 2026-07-17."""

    MARGIN = 1.8  # for what grows from step to step

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("largest", torch.zeros(()), persistent=False)  # entry of this step so far

    def forward(self, x: Tensor) -> Tensor:
        self.note(x.detach().max().float())
        return self.scale.clone()

    def note(self, largest: Tensor) -> None:
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, largest))


class DelayedScales:
    """All of a model: the largest entries of a step, over all ranks, become the scales of the next."""

    def __init__(self, model: nn.Module, rt: Runtime):
        modules = [module for module in model.modules() if isinstance(module, DelayedScale)]
        self.scales, self.largest = [m.scale for m in modules], [m.largest for m in modules]
        self.rt, self.sent, self.work = rt, None, None

    def start(self) -> None:
        """After the last backward of a step: ask the other ranks; nobody waits."""
        if self.scales:
            self.sent = torch.stack(self.largest)
            if self.rt.world_size > 1:
                self.work = dist.all_reduce(self.sent, dist.ReduceOp.MAX, async_op=True)

    def finish(self) -> None:
        """Before the next forward: take the new scales over, where they are finite."""
        if self.work is not None:
            self.work.wait()
        if self.sent is not None:
            new = self.sent.clamp(min=1e-12) * (DelayedScale.MARGIN / 448)
            new = torch.where(new.isfinite(), new, torch.stack(self.scales))
            torch._foreach_copy_(self.scales, list(new.unbind()))
            self.clear()

    def clear(self) -> None:
        """Forget the largest entries, sent or not."""
        if self.scales:
            torch._foreach_zero_(self.largest)
        self.sent = self.work = None


def transpose(x: Tensor, use_kernels: bool = False) -> Tensor:
    """FP8 x (M, N) -> (N, M), which products in FP8 need along their inner dimension.

    The kernel takes a ninth of the time of what torch.compile makes of a transposed copy of bytes.
    """
    if not use_kernels:
        return x.T.contiguous()
    out = x.new_empty(x.size(1), x.size(0), dtype=torch.uint8)
    transpose_kernel[triton.cdiv(x.size(1), 128), triton.cdiv(x.size(0), 128)](
        x.view(torch.uint8), out, *x.shape, BLOCK=128, num_warps=8)
    return out.view(x.dtype)


def squared_product(x: Tensor, w: Tensor, post: Tensor | None = None, use_kernels: bool = False
                    ) -> Tensor:
    """max(0, X W)^2 of x (T, D) and w (D, H), (T, H); or, of a P that this made, X W * 2 sqrt(P): the
    gradient in what was squared, of one X W in P.

    The kernel does not write the product itself down, which saves two passes of three over (T, H). Source:
    the records of 2026-01-14 and 2026-06-11.
    """
    if not use_kernels:
        y = x @ w
        return F.relu(y).square() if post is None else y * (2 * post.sqrt())
    out = x.new_empty(len(x), w.size(1))
    launch_squared_product(x.contiguous(), w.contiguous(), out, post)
    return out


def launch_squared_product(x: Tensor, w: Tensor, out: Tensor, post: Tensor | None,
                           scales: Tensor | None = None, small: Tensor | None = None,
                           largest: Tensor | None = None) -> None:
    """Fill out, and what else is given, with squared_product_kernel."""
    (rows, inner), columns, num_bytes = x.shape, w.size(1), x.element_size()
    is_wide = (columns % 256 == 0 and num_bytes < 4 and x.device.type == "cuda"
               and torch.cuda.get_device_capability(x.device)[0] in (9, 10))  # room for four stages
    width, depth = 256 if is_wide else 128, 128 // num_bytes
    depth = depth if inner % depth == 0 else 64
    limit = 0.0 if small is None else 448.0 if small.dtype == E4M3 else 65504.0  # or float16's
    squared_product_kernel[(rows // 128 * (columns // width),)](
        x, w, out if post is None else post, out, out if scales is None else scales,
        out if small is None else small, out if largest is None else largest, rows, columns, inner,
        w.stride(0), w.stride(1), post is not None, limit, BLOCK_M=128, BLOCK_N=width, BLOCK_K=depth,
        GROUP=8, num_warps=8, num_stages=4 if is_wide else 3)


def squared_product_fp8(x: Tensor, w: Tensor, scale: Tensor, small_scale: Tensor, dtype: torch.dtype,
                        small_dtype: torch.dtype = torch.float8_e4m3fn
                        ) -> tuple[Tensor, Tensor, Tensor]:
    """squared_product() of FP8 x (T, D) and w (D, H), whose product has a scale (), in a dtype; the same
    over a scale (), in FP8; its largest entry ()."""
    out = torch.empty(len(x), w.size(1), dtype=dtype, device=x.device)
    small, largest = torch.empty_like(out, dtype=small_dtype), out.new_zeros((), dtype=torch.float32)
    launch_squared_product(x, w, out, None, torch.stack((scale, 1 / small_scale)), small, largest)
    return out, small, largest


class FusedMLP(torch.autograd.Function):
    """Linear, ReLU^2, linear, of which backward needs the square alone; the first product and its like in
    backward by squared_product(). In FP8 forward where a scale is given."""

    @staticmethod
    def forward(ctx, x: Tensor, up: Tensor, down: Tensor, post_scale: Tensor | None
                ) -> Tensor | tuple[Tensor, Tensor]:
        """x (T, D), up and down (D, 4D) -> (T, D); with an FP8 scale also the largest square."""
        if post_scale is None:
            post = squared_product(x, up, use_kernels=True)  # (T, 4D)
            result = post @ down.T
        else:
            (x8, x_scale), (up8, up_scale), (down8, down_scale) = (to_fp8(t, E4M3) for t in (x, up.T, down))
            post, post8, largest = squared_product_fp8(x8, up8.T, x_scale * up_scale, post_scale, x.dtype)
            result = scaled_matmul(post8, down8, post_scale, down_scale, x.dtype, fast=True), largest
        ctx.save_for_backward(x, up, down, post)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor, *_) -> tuple[Tensor, Tensor, Tensor, None]:
        """grad (T, D) -> gradients of x (T, D), up and down (D, 4D)."""
        x, up, down, post = ctx.saved_tensors
        inner = squared_product(grad, down, post, use_kernels=True)  # (T, 4D)
        return inner @ up.T, x.T @ inner, grad.T @ post, None


def can_fuse_mlp(num_tokens: int, dim: int, hidden: int) -> bool:
    """Whether squared_product_kernel's tiles divide both products."""
    return num_tokens % 128 == 0 and dim % 64 == 0 and hidden % 128 == 0


def symmetric_product(x: Tensor, add: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0,
                      use_kernels: bool = False) -> Tensor:
    """X X^T of each matrix X of x (M, short, long) -> (M, short, short); with a symmetric A of that shape,
    alpha X X^T + beta A.

    The kernel computes one triangle: half the FLOPs. Source: record 27.
    """
    if not use_kernels:
        if add is None:
            return torch.bmm(x, x.mT)
        return torch.baddbmm(add, x, x.mT, beta=beta, alpha=alpha)
    x = x.contiguous()
    num_matrices, size, depth = x.shape
    out = x.new_empty(num_matrices, size, size)
    tiles = triton.cdiv(size, 128)
    symmetric_kernel[tiles, tiles, num_matrices](
        x, x if add is None else add.contiguous(), out, size, depth, alpha, beta, add is not None, BLOCK=128,
        DEPTH=64, num_warps=8, num_stages=4 if x.element_size() == 2 else 2)  # that fit shared memory
    return out


if triton is not None:

    @triton.jit
    def symmetric_kernel(x_ptr, add_ptr, out_ptr, SIZE, INNER, ALPHA: tl.constexpr, BETA: tl.constexpr,
                         HAS_ADD: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
        """One tile on or above the diagonal of alpha X X^T + beta A, stored there and mirrored."""
        i, j, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        if j < i:
            return
        rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
        x_ptr += matrix * SIZE * INNER
        add_ptr += matrix * SIZE * SIZE
        out_ptr += matrix * SIZE * SIZE
        total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for start in range(0, INNER, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            left = tl.load(x_ptr + rows[:, None] * INNER + depth[None, :],
                           mask=(rows[:, None] < SIZE) & (depth[None, :] < INNER), other=0.0)
            right = tl.load(x_ptr + cols[None, :] * INNER + depth[:, None],
                            mask=(cols[None, :] < SIZE) & (depth[:, None] < INNER), other=0.0)
            total += tl.dot(left, right)
        total *= ALPHA
        inside = (rows[:, None] < SIZE) & (cols[None, :] < SIZE)
        here = rows[:, None] * SIZE + cols[None, :]
        if HAS_ADD:
            total += BETA * tl.load(add_ptr + here, mask=inside, other=0.0).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + here, total, mask=inside)
        if j > i:  # a tile on the diagonal is whole as it is
            tl.store(out_ptr + cols[None, :] * SIZE + rows[:, None], total, mask=inside)

    @triton.jit
    def cross_entropy_kernel(logits_ptr, targets_ptr, weights_ptr, losses_ptr, grads_ptr, V,
                             NUM_TARGETS: tl.constexpr, TOP: tl.constexpr, SHIFT: tl.constexpr,
                             WIDTH: tl.constexpr, GRAD_SCALE: tl.constexpr, BLOCK: tl.constexpr):
        """One token: its loss and d loss / d logits. Capped logits are at most TOP: it serves as max."""
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * V
        grads_ptr += row * V
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=-float("inf"),
                             eviction_policy="evict_last").to(tl.float32)  # read again below
            total += tl.where(at < V, tl.exp(TOP / (1 + tl.exp(-(logits + SHIFT) / WIDTH)) - TOP), 0.0)
        log_total = tl.log(tl.sum(total, axis=0)) + TOP
        loss = log_total * 0.0
        all_weights = log_total * 0.0
        for i in tl.static_range(NUM_TARGETS):
            target = tl.load(targets_ptr + row * NUM_TARGETS + i)
            weight = tl.where(target >= 0, tl.load(weights_ptr + i), 0.0)
            target_logit = tl.load(logits_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
            loss += weight * (log_total - TOP / (1 + tl.exp(-(target_logit + SHIFT) / WIDTH)))
            all_weights += weight
        tl.store(losses_ptr + row, loss)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=0.0,
                             eviction_policy="evict_first").to(tl.float32)
            gate = 1 / (1 + tl.exp(-(logits + SHIFT) / WIDTH))
            grad = all_weights * tl.exp(TOP * gate - log_total)
            for i in tl.static_range(NUM_TARGETS):
                target = tl.load(targets_ptr + row * NUM_TARGETS + i)
                grad -= tl.where(at == target, tl.load(weights_ptr + i), 0.0)
            grad = grad * (TOP / WIDTH) * gate * (1 - gate) / GRAD_SCALE  # the slope of the cap
            tl.store(grads_ptr + at, grad.to(grads_ptr.dtype.element_ty), mask=at < V)

    @triton.jit
    def transpose_kernel(x_ptr, out_ptr, ROWS, COLUMNS, BLOCK: tl.constexpr):
        """One tile of bytes, read along its rows and written along its columns."""
        rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
        tile = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :], mask=inside)
        tl.store(out_ptr + columns[:, None] * ROWS + rows[None, :], tile.T, mask=inside.T)

    @triton.jit
    def squared_product_kernel(x_ptr, w_ptr, post_ptr, out_ptr, scales_ptr, small_ptr, largest_ptr, ROWS,
                               COLUMNS, INNER, STRIDE_K, STRIDE_N, IS_BACKWARD: tl.constexpr,
                               LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                               BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
        """One tile of max(0, X W)^2, or of X W * 2 sqrt(P); sizes are multiples of the tile's.

        With a LIMIT there are scales: of the product, and 1 over that of a copy of the result in 8 bits,
        which saturates at the limit; and the largest entry is noted. Tiles that are computed side by side
        share rows of X and columns of W in the cache.
        """
        number, num_columns = tl.program_id(0), COLUMNS // BLOCK_N
        first = number // (GROUP * num_columns) * GROUP
        height = min(ROWS // BLOCK_M - first, GROUP)
        place = number % (GROUP * num_columns)
        rows = (first + place % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + rows[:, None] * INNER + depth[None, :]
        w_ptrs = w_ptr + depth[:, None] * STRIDE_K + columns[None, :] * STRIDE_N
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for _ in range(0, INNER, BLOCK_K):
            total = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), total)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * STRIDE_K
        here = rows[:, None] * COLUMNS + columns[None, :]
        if IS_BACKWARD:
            total *= 2 * tl.sqrt(tl.load(post_ptr + here).to(tl.float32))
        else:
            if LIMIT > 0:
                total *= tl.load(scales_ptr)
            total = tl.maximum(total, 0.0)
            total *= total
        tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty))
        if LIMIT > 0:
            tl.atomic_max(largest_ptr, tl.max(total))
            total = tl.minimum(total * tl.load(scales_ptr + 1), LIMIT)
            tl.store(small_ptr + here, total.to(small_ptr.dtype.element_ty))

# ==== UPDATE RULES =========================================================================================
# How one shard of a bucket changes, given its gradient: on local tensors, in place. A rule is a direction,
# perhaps with its variance normalised, and a way to apply it. To add a rule, write its direction or the way
# it is applied, and add a line to RULES: the command line, checkpoints and all ranks then know it. Where the
# new way of applying needs whole matrices or keeps norms, Rule.per_matrix or Rule.keeps_norm must say so.

def wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype to sum in: float32, or x's where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class Hyperparameters(typing.NamedTuple):
    """What schedule and config tell a rule; tensors are 0-d on the CPU, so that no value recompiles."""

    momentum: Tensor
    grad_scale: Tensor  # GRAD_TOKENS over the run's tokens_per_step: a loss summed over GRAD_TOKENS tokens
    bias_correction1: Tensor  # 1 - beta1^t
    bias_correction2: Tensor  # 1 - beta2^t
    betas: tuple[float, float]
    eps: float
    dtype: torch.dtype  # of the orthogonalisation
    use_kernels: bool = False
    orthogonalize: str = "newton_schulz"
    decay: str = "decoupled"


# a, b, c of each iteration X = a X + b (X X^T) X + c (X X^T)^2 X
ITERATIONS = {
    "newton_schulz": ((3.4445, -4.7750, 2.0315),) * 5,  # Muon: singular values about 0.7 to 1.2
    "polar_express": (  # the record of 2025-09-29, for singular values of 1.02 times the norm and below
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)),
    "precise": ((2.0, -1.5, 0.5),) * 12,  # where steps count and time does not: towards 1 from below
}


def orthogonalize(x: Tensor, dtype: torch.dtype, method: str = "newton_schulz",
                  use_kernels: bool = False) -> Tensor:
    """Push the singular values of each matrix of x (M, rows, columns) towards 1, keeping its vectors.

    An odd polynomial in X, iterated in `dtype` on the wide side (ITERATIONS). Returns x.shape in `dtype`.
    Source: Muon; the form of record 11; Polar Express.
    """
    tall = x.size(-2) > x.size(-1)
    x = x.to(dtype)
    x = x.mT if tall else x  # (M, short, long)
    use_kernels = use_kernels and x.size(-2) > 128  # a single tile has no other half to save
    norm = x.to(wide_dtype(x)).norm(dim=(-2, -1), keepdim=True)
    x = x / (norm * 1.02 + 1e-6 if method == "polar_express" else norm + 1e-7).to(dtype)
    for a, b, c in ITERATIONS[method]:
        gram = symmetric_product(x, use_kernels=use_kernels)  # (M, short, short)
        gram = symmetric_product(gram, gram, c, b, use_kernels)
        x = torch.baddbmm(x, gram, x, beta=a)  # (M, short, long)
    return x.mT if tall else x


def nesterov_orthogonalize(grad: Tensor, state: dict[str, Tensor], hyper: Hyperparameters) -> Tensor:
    """Nesterov momentum, made orthogonal (M, rows, columns). Source: Muon, 2024-10; records 3 to 32."""
    momentum = state["momentum"]
    grad = (grad * hyper.grad_scale).to(momentum.dtype) * (1 - hyper.momentum)
    momentum.mul_(hyper.momentum).add_(grad)
    return orthogonalize(momentum * hyper.momentum + grad, hyper.dtype, hyper.orthogonalize,
                         hyper.use_kernels)


def adam_direction(grad: Tensor, state: dict[str, Tensor], hyper: Hyperparameters) -> Tensor:
    """Adam's update with bias correction, in float32, of any shape; epsilon is added before the correction.

    Source: record 32.
    """
    beta1, beta2 = hyper.betas
    grad = grad.to(wide_dtype(grad)) * hyper.grad_scale
    exp_avg = state["exp_avg"].to(grad.dtype) * beta1 + grad * (1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].to(grad.dtype) * beta2 + grad.square() * (1 - beta2)
    state["exp_avg"].copy_(exp_avg)
    state["exp_avg_sq"].copy_(exp_avg_sq)
    return exp_avg / (exp_avg_sq.sqrt() + hyper.eps) * (
        hyper.bias_correction2.sqrt() / hyper.bias_correction1)


def normalize_variance(update: Tensor, state: dict[str, Tensor], hyper: Hyperparameters) -> Tensor:
    """Give the rows, or the columns of a wide matrix, of an update (M, rows, columns) equal size over time.

    The norm of the update stays. Source: NorMuon, the record of 2025-10-24.
    """
    rows, columns = update.shape[-2:]
    update = update.to(wide_dtype(update))
    mean_square = update.square().mean(dim=-1 if rows >= columns else -2, keepdim=True)
    state["second_momentum"].lerp_(mean_square, 1 - hyper.betas[1])
    normalized = update * state["second_momentum"].clamp(min=1e-10).rsqrt()
    return normalized * (matrix_norm(update) / matrix_norm(normalized).clamp(min=1e-10))


def matrix_norm(x: Tensor) -> Tensor:
    """Frobenius norm of every matrix of x (M, rows, columns), float32 (M, 1, 1)."""
    return x.to(wide_dtype(x)).square().sum(dim=(-2, -1), keepdim=True).sqrt()


def apply_update(weight: Tensor, update: Tensor, state: dict[str, Tensor], lr: Tensor, decay: Tensor,
                 hyper: Hyperparameters, is_aligned: Callable = torch.gt) -> Tensor:
    """The weight less lr * update and the decay. lr broadcasts against it; decay is lr times wd.

    Cautious decay acts only where it has the direction of the update. Source: AdamW; the records of
    2025-11-10 and 2025-12-18.
    """
    keep = 1 - decay * is_aligned(update * weight, 0) if hyper.decay == "cautious" else 1 - decay
    return weight * keep - update * lr


def apply_spectral_update(weight: Tensor, update: Tensor, state: dict[str, Tensor], lr: Tensor,
                          decay: Tensor, hyper: Hyperparameters) -> Tensor:
    """apply_update() where lr is the size of an orthogonal update in spectral norm. Cautious decay also acts
    where the update is zero. Source: record 4."""
    rows, columns = update.shape[-2:]
    return apply_update(weight, update, state, lr * max(1, rows / columns) ** 0.5, decay, hyper, torch.ge)


def hyperball_step(weight: Tensor, update: Tensor, state: dict[str, Tensor], lr: Tensor, _decay: Tensor,
                   _hyper: Hyperparameters) -> Tensor:
    """W <- R N(W - lr R N(update)), N(X) = X / |X|: every matrix stays on the sphere of its first norm R.

    An update at a right angle to W rotates it by arctan(lr) radians; its size does not matter. Without
    gradient nothing moves. Source: Hyperball, arXiv 2606.16899.
    """
    radius, update = state["radius"], update.to(wide_dtype(update))
    weight = weight - update * (lr * radius / matrix_norm(update).clamp(min=1e-10))
    return weight * (radius / matrix_norm(weight).clamp(min=1e-10))


@dataclass(frozen=True)
class Rule:
    """An update rule, put together from the functions above."""

    direction: Callable
    moments: tuple[str, ...]  # what the direction keeps: of the parameter's shape, zero at first
    is_normalized: bool
    apply: Callable
    lr: float  # by default, tuned with 12 layers

    @property
    def per_matrix(self) -> bool:
        """Whether it must see whole matrices."""
        return self.apply is not apply_update

    @property
    def keeps_norm(self) -> bool:
        """Whether matrices stay on their spheres: then there is no decay, and a zero matrix is stuck."""
        return self.apply is hyperball_step

    def init_state(self, param: Tensor, is_wide: bool = False) -> dict[str, Tensor]:
        """The state for parameters (M, ...): moments like the parameter, or wide, and then a bfloat16 matrix
        has its other 16 bits, too; all else in float32."""
        dtype = wide_dtype(param) if is_wide else param.dtype
        state = {name: torch.zeros_like(param, dtype=dtype) for name in self.moments}
        if is_wide and self.per_matrix and param.dtype == torch.bfloat16:
            state["mantissa"] = torch.zeros_like(param, dtype=torch.int16)
        if self.is_normalized:
            rows, columns = param.shape[-2:]
            shape = (len(param), rows, 1) if rows >= columns else (len(param), 1, columns)
            state["second_momentum"] = param.new_zeros(shape, dtype=wide_dtype(param))
        if self.keeps_norm:
            state["radius"] = matrix_norm(param)
        return state

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: Tensor, decay: Tensor,
               hyper: Hyperparameters) -> None:
        """One update of param (M, ...) from grad (M, ...). lr and decay, lr times wd, broadcast against it.

        lr is in units of the parameter for Adam, of the spectral norm for Muon, and the length of an update
        as a fraction of the norm for rules that keep norms.
        """
        # On a CPU PyTorch's own kernel does all of a plain Adam update in an eighth of the time. It is told
        # a late step, at which it corrects no bias: ours is in the rate, as our epsilon needs it.
        if (self.direction is adam_direction and self.apply is apply_update and hyper.decay == "decoupled"
                and lr.numel() == decay.numel() == 1 and param.device.type == "cpu"
                and param.dtype == state["exp_avg"].dtype == wide_dtype(param)
                and not torch.compiler.is_compiling()):
            rate = float(lr * hyper.bias_correction2.sqrt() / hyper.bias_correction1)
            torch._fused_adamw_(
                [param], [grad * hyper.grad_scale], [state["exp_avg"]], [state["exp_avg_sq"]], [],
                [torch.tensor(1e9)], lr=rate, beta1=hyper.betas[0], beta2=hyper.betas[1], eps=hyper.eps,
                amsgrad=False, maximize=False, weight_decay=float(decay) / rate if rate else 0.0)
            return

        update = self.direction(grad, state, hyper)
        if self.is_normalized:
            update = normalize_variance(update, state, hyper).type_as(update)

        # The weight in float32. A bfloat16 matrix is its upper half, cut off; the lower half is kept beside
        # it, and integers wrap. Source: the record of 2026-01-04.
        if "mantissa" in state:
            bits = param.view(torch.int16).int() << 16 | state["mantissa"].int() & 0xFFFF
            weight = self.apply(bits.view(torch.float32), update, state, lr, decay, hyper)
            bits = weight.view(torch.int32)
            param.view(torch.int16).copy_(bits >> 16)
            state["mantissa"].copy_(bits)
        else:
            param.copy_(self.apply(param.to(wide_dtype(param)), update, state, lr, decay, hyper))


MUON, ADAM = (nesterov_orthogonalize, ("momentum",)), (adam_direction, ("exp_avg", "exp_avg_sq"))
RULES = {
    "muon": Rule(*MUON, False, apply_spectral_update, 0.05),
    "normuon": Rule(*MUON, True, apply_spectral_update, 0.05),
    "muonh": Rule(*MUON, False, hyperball_step, 0.02),
    "normuonh": Rule(*MUON, True, hyperball_step, 0.02),
    "adamh": Rule(*ADAM, False, hyperball_step, 0.005),
    "adamw": Rule(*ADAM, False, apply_update, 0.0018),
}

# ==== OPTIMIZER ============================================================================================
# Like parameters lie in buckets: one tensor for their values, padded to a multiple of the ranks. When all
# gradients of a bucket are final, one message reduce-scatters them, each rank updates its shard in one
# batched call, and an all-gather brings the new values back, in the order in which the model reads them,
# which waits for each only there. The gradient of a table of many rows is kept and sent by rows. On one rank
# nothing is sent. Source: records 23, 24, 32, and that of 2026-02-06.

BIG_PARAMETER = 2**20  # elements from which an elementwise parameter gets a bucket of its own
ALIGNMENT = 32  # elements: parameters in elementwise buckets begin on 64 bytes at least


class RowPlan:
    """The rows of a table that the tokens of a micro-batch read, each once, and the ranks that own them.

    Made in the forward pass: what it tells the host is there when the backward pass asks for it.
    """

    def __init__(self, rows: Tensor, num_rows: int, rt: Runtime):
        """rows (T,) of a table (num_rows, D), of which each rank owns an equal part."""
        self.rt, self.rows_per_rank, self.arriving = rt, -(-num_rows // rt.world_size), None
        # Each row once: of sorted rows, those that differ from the one before are new.
        ordered, order = rows.long().sort(stable=True)  # (T,)
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[1:] = ordered[1:] != ordered[:-1]
        places = is_new.cumsum(0) - 1
        self.places = torch.empty_like(places).scatter_(0, order, places)  # (T,) of each token's row in rows
        # (T,) the rows in order, filled up with the number of a row beyond the table
        self.rows = torch.full_like(ordered, self.rows_per_rank * rt.world_size).scatter_(0, places, ordered)
        if rt.world_size > 1:
            first = torch.arange(1 + rt.world_size, device=rows.device) * self.rows_per_rank
            counts = torch.searchsorted(self.rows, first).diff()  # (N,) rows of each rank
            self.counts = HostCopy(gather_shards(counts[None], rt))  # (N, N) from rank to rank

    def start_exchange(self, sums: Tensor) -> ArrivingRows:
        """Send sums (T, D) of rows to the ranks that own them."""
        counts, rank = self.counts.read().tolist(), self.rt.rank
        sent, received = counts[rank], [row[rank] for row in counts]
        num_bytes = (sum(sent) - sent[rank]) * sums[0].nbytes
        if self.arriving is None:  # the numbers of the rows, for all tables that are read with this plan
            self.arriving = start_exchange(self.rows[: sum(sent), None], sent, received)
            num_bytes += (sum(sent) - sent[rank]) * self.rows.itemsize
        return ArrivingRows(*self.arriving, *start_exchange(sums[: sum(sent)], sent, received), received,
                            self.rows_per_rank * rank, num_bytes)


class ArrivingRows(typing.NamedTuple):
    """Rows of a gradient on their way to this rank, and how many of each rank, in turn."""

    rows: Tensor  # (n, 1)
    rows_work: dist.Work
    sums: Tensor  # (n, D)
    work: dist.Work
    counts: list[int]
    first_row: int  # of this rank's shard
    num_bytes: int  # that this rank has sent to others


class LookUp(torch.autograd.Function):
    """Rows of a table, whose gradient goes to the optimizer by rows and never has the size of the table.
    Without a plan it is an ordinary gradient."""

    @staticmethod
    def forward(ctx, table: nn.Parameter, rows: Tensor, plan: RowPlan | None) -> Tensor:
        """table (R, D), rows (T,) -> (T, D)."""
        ctx.table, ctx.plan = table, plan
        ctx.save_for_backward(rows)
        return F.embedding(rows, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """Sums of grad (T, D) over the tokens of each row, always in the same order."""
        sum_rows, places = torch.ops.aten.embedding_dense_backward, ctx.saved_tensors[0]
        if ctx.plan is None:
            return sum_rows(grad, places, len(ctx.table), -1, False), None, None
        ctx.table.take_rows(ctx.plan, sum_rows(grad, ctx.plan.places, len(places), -1, False))
        return None, None, None


look_up = LookUp.apply


class Bucket:
    """Like parameters that travel as one message: their values (M, *unit), this rank's state.

    A unit is what its rule must see whole: a matrix, or for elementwise rules one element. Padding has no
    gradient and stays zero. Gradients are autograd's own tensors until all are final. Those of a table are
    added up by rows, of this rank's shard alone.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], group_name: str, group: Group, rt: Runtime,
                 is_wide: bool):
        self.name, self.group_name, self.group, self.rt = named[0][0], group_name, group, rt
        self.params, self.rule, first = dict(named), RULES[group.rule], named[0][1]
        self.row_size = first.size(-1) if first.spec.is_table else 0  # D

        # Parameters lie one behind another, aligned and padded to a multiple of the ranks. They become views
        # of the bucket's values, which on all ranks are those of rank 0.
        unit = tuple(first.shape[-2:]) if self.rule.per_matrix else ()
        align, self.slices, size = 1 if unit else self.row_size or ALIGNMENT, {}, 0
        for name, param in named:
            self.slices[name] = slice(size, size + param.numel() // math.prod(unit))
            size += -(-(self.slices[name].stop - size) // align) * align
        size = -(-size // (align * rt.world_size)) * align * rt.world_size
        self.values = torch.zeros(size, *unit, dtype=first.dtype, device=rt.device)
        for name, param in named:
            values = self.values[self.slices[name]].view(param.shape)
            values.copy_(param.data)
            param.data = values
        broadcast(self.values, rt)
        self.shard = local_shard(self.values, rt)  # (M/N, *unit)
        self.state = self.rule.init_state(self.shard, is_wide)

        # Multipliers of this rank's matrices (M/N, 1, 1); of elements (M/N,), or (1,) if they share one.
        like = dict(dtype=wide_dtype(self.values), device=rt.device)
        for kind in ("lr_mul", "wd_mul"):
            given = {name: getattr(param.spec, kind) for name, param in named}
            if not unit and len(set(given.values())) == 1 and not isinstance(given[self.name], tuple):
                multipliers = torch.tensor([given[self.name]], **like)
            else:
                multipliers = torch.ones(size, **like)
                for name, values in given.items():  # one for all matrices of a parameter, or one for each
                    values = torch.tensor(values, **like).view(-1, 1)
                    multipliers[self.slices[name]].view(len(values), -1).copy_(values)
                multipliers = local_shard(multipliers.view(-1, *[1] * len(unit)), rt)
            setattr(self, kind, multipliers)

        self.tied: Bucket | None = None  # the embedding's: its gradients are added here, it gets the values
        self.place = 0  # index in the model's read_order: 0 before the segments, then they, then the head
        self.grad_grid = 0.0  # to which sums of rows are rounded
        self.grads: Tensor | None = None  # of a table: the sums of the shard's rows so far
        self.arriving: ArrivingRows | None = None
        self.on_rows: Callable[[], None] | None = None  # called when the rows of a micro-batch are final
        self.is_updated = False  # and the new values are not sent yet
        self.missing = len(named)  # parameters whose gradient is not final
        self.tokens = 0  # whose gradients have been summed since the last update
        self.reducing = self.gathering = None  # messages under way
        self.num_bytes = self.minimum_bytes = 0.0  # that this rank has sent, and must send

    def start_reduce(self) -> None:
        """Send the gradients; called as soon as the last of them is final."""
        share = 1 - 1 / self.rt.world_size
        # a rank must send all gradients and all parameters once, but for its own shard of either
        num_bytes = share * sum(param.nbytes for param in self.params.values())
        self.minimum_bytes += num_bytes if self.row_size else 2 * num_bytes
        if self.row_size:  # was sent by rows
            return

        # All gradients (M, *unit): that of a single parameter as it is, others side by side.
        self.reduced = None
        for bucket in filter(None, (self, self.tied)):
            grads = [param.grad for param in bucket.params.values()]
            if len(grads) == 1 and grads[0] is not None and grads[0].numel() == self.values.numel():
                packed = grads[0].view(self.values.shape)
            else:
                packed = torch.zeros_like(self.values)
                parts = [(packed[part].view(grad.shape), grad)
                         for part, grad in zip(bucket.slices.values(), grads) if grad is not None]
                torch._foreach_copy_(*map(list, zip(*parts))) if parts else None
            self.reduced = packed if self.reduced is None else self.reduced.add_(packed)
        if self.rt.world_size > 1:
            full, self.reduced = self.reduced, torch.empty_like(self.shard)
            self.num_bytes += full.nbytes - self.shard.nbytes
            self.reducing = reduce_scatter_single(self.reduced, full, async_op=True)

    def take_rows(self, plan: RowPlan | None = None, sums: Tensor | None = None) -> None:
        """Add sums (T, D) of a plan's rows to the gradient of a table. Of several ranks each sends them to
        those who own the rows, and adds what has arrived of the micro-batch before."""
        pieces, arrived, self.arriving = [], self.arriving, None
        if arrived:  # those of each rank in turn, so that sums have one order
            arrived.rows_work.wait()
            arrived.work.wait()
            rows = arrived.rows[:, 0] - arrived.first_row
            pieces = zip(rows.split(arrived.counts), arrived.sums.split(arrived.counts))
        if plan is not None:
            sums = round_to_multiple(sums, self.grad_grid) if self.grad_grid else sums
            if self.rt.world_size == 1:
                pieces = [(plan.rows, sums)]
            else:
                self.arriving = plan.start_exchange(sums)
                self.num_bytes += self.arriving.num_bytes
                self.minimum_bytes += self.arriving.num_bytes
        for rows, sums in pieces:  # rows (n,) of the shard, all different; or a padding row at its end
            if self.grads is None:
                self.grads = self.shard.new_zeros(len(self.shard) + self.row_size)
            table = self.grads.view(-1, self.row_size)
            table[rows] = table[rows] + sums  # index_add_() takes six times as long
        if plan is not None and self.on_rows:
            self.on_rows()

    def update(self, update: Callable, lr_factor: float, decay_factor: float, hyper: Hyperparameters,
               probe: Probe | None) -> None:
        """Wait for the summed gradients, update this rank's shard, clear gradients."""
        if probe:
            probe.mark("communication")
        if self.reducing is not None:
            self.reducing.wait()
        if self.row_size:
            assert all(param.grad is None for param in self.params.values()), (
                f"{self.name} is a table and has an ordinary gradient: read its rows with look_up()")
            if self.arriving:
                self.take_rows()
            self.reduced = (torch.zeros_like(self.shard) if self.grads is None
                            else self.grads[: -self.row_size])
        if probe:
            probe.mark("optimizer")
        lr = self.lr_mul * (self.group.lr * lr_factor)
        before = self.shard.clone() if probe and probe.is_full else None
        update(self.shard, self.reduced, self.state, lr,
               lr * self.wd_mul * (self.group.weight_decay * decay_factor), hyper)
        if probe:
            probe.note(self, self.reduced, before)
        self.clear()
        self.is_updated = True

    def start_gather(self) -> None:
        """Send this rank's new values to the others."""
        self.is_updated = False
        if self.rt.world_size > 1:
            self.num_bytes += self.values.nbytes - self.shard.nbytes
            self.gathering = all_gather_single(self.values, self.shard, group=self.rt.gathers,
                                               async_op=True)
        elif self.tied:
            self.tied.values.copy_(self.values)

    def clear(self) -> None:
        """Forget gradients, sent or not."""
        self.reducing = self.reduced = self.arriving = None
        self.missing, self.tokens = len(self.params), 0
        if self.grads is not None:
            self.grads.zero_()
        for param in self.params.values():
            param.grad = None
        if self.tied:
            self.tied.clear()
            self.missing += len(self.tied.params)

    def finish(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            if self.tied:
                self.tied.values.copy_(self.values)

    def read(self, key: str) -> Tensor:
        """The values, or all ranks' part of a state: (M, ...)."""
        return self.values if key == "" else gather_shards(self.state[key], self.rt)

def round_to_multiple(x: Tensor, unit: float) -> Tensor:
    """Round to multiples of a power of two. Sums of such numbers are exact, so free of order and grouping.

    They are as long as none exceeds 2^24 times the unit in float32, 2^8 times in bfloat16.
    """
    shift = 1.5 * unit / torch.finfo(x.dtype).eps  # around it, neighbouring numbers are one step apart
    return (x + shift).sub_(shift)


class Optimizer:
    """All buckets of a model. Owns the storage of every parameter."""

    def __init__(self, model: nn.Module, cfg: Config, rt: Runtime):
        self.cfg, self.rt, self.step_count, self.is_armed = cfg, rt, 0, False
        self.probe: Probe | None = None  # measures the step that is under way

        # Parameters are sorted by group, rule, dtype and shape. Backward finishes the last layers first, so
        # they come first.
        kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
        for name, param in reversed(list(model.named_parameters())):
            spec = getattr(param, "spec", None)
            assert spec and spec.group in cfg.groups, (
                f"parameter {name} {tuple(param.shape)} is in no group: create it with declare() in one of "
                f"{', '.join(GROUPS)}")
            if RULES[cfg.groups[spec.group].rule].per_matrix:
                kind = param.shape[-2:]
            else:
                kind = name if param.numel() >= BIG_PARAMETER or spec.is_table else "small"
            kinds.setdefault((spec.group, param.dtype, kind), []).append((name, param))

        # Each kind fills buckets of about cfg.comm_bucket_mb. A bucket ends where its matrices divide by the
        # ranks, if one can.
        self.buckets: list[Bucket] = []
        for (group_name, dtype, kind), named in kinds.items():
            group, parts, size = cfg.groups[group_name], [[]], 0
            unit = math.prod(kind) if RULES[group.rule].per_matrix else 1
            most = cfg.comm_bucket_mb * 1e6 / (unit * dtype.itemsize) if rt.world_size > 1 else math.inf
            for name, param in named:
                if parts[-1] and size >= most and size % rt.world_size == 0:
                    parts.append([])
                    size = 0
                parts[-1].append((name, param))
                size += param.numel() // unit
            self.buckets += [Bucket(part, group_name, group, rt, cfg.state_dtype == "float32")
                             for part in parts]
        for bucket in self.buckets:
            for name in bucket.params if bucket.rule.keeps_norm else ():
                if not matrix_norm(bucket.values[bucket.slices[name]]).all():
                    raise InputError(f"--matrix_rule={bucket.group.rule} keeps the norm of every matrix, "
                                     f"and one of {name} is zero: give --output_gain=on or --zero_init=off, "
                                     "and --init_std above 0")

        # A tied embedding becomes a copy of the head with the head's first update after cfg.untie_frac of
        # the schedule. Source: the record of 2025-12-22.
        every, scheduled = cfg.groups["head"].every, cfg.num_iterations - cfg.extension_steps
        self.last_tied_step = math.ceil(cfg.untie_frac * scheduled)
        self.last_tied_step += -(self.last_tied_step + 1) % every
        if cfg.untie_frac == 1:
            self.last_tied_step = sys.maxsize
        self.places = {name: place for place, names in enumerate(getattr(model, "read_order", ()))
                       for name in names}
        self.tie()
        self.groups = [name for name in cfg.groups if name in {bucket.group_name for bucket in self.buckets}]
        self.updates = {rule: rt.compile(RULES[rule].update)
                        for rule in {bucket.group.rule for bucket in self.buckets}}
        self.in_flight: list[Bucket] = []  # whose gradients are being summed
        for name, param in model.named_parameters():
            bucket = self.bucket_of[name]
            if param.spec.is_table:
                param.take_rows, bucket.grad_grid = bucket.take_rows, cfg.grad_grid
                if rt.world_size > 1:
                    bucket.on_rows = functools.partial(self._on_gradient, name)
                continue
            if cfg.grad_grid:
                param.register_hook(functools.partial(round_to_multiple, unit=cfg.grad_grid))
            if rt.world_size > 1:
                param.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, name))
        model.takes_rows = True
        if rt.world_size > 1:
            model.wait_for = self.wait_for

    def tie(self) -> None:
        """Say which buckets are updated: all, but while the embedding is tied to the head only the head's,
        by its options, with the gradients of both. And where the model first reads each of them."""
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.params}
        head, embed = self.bucket_of["head.weight"], self.bucket_of["embed"]
        is_tied = self.cfg.tie_head == "on" and self.step_count <= self.last_tied_step
        head.tied, self.bucket_of["embed"] = (embed, head) if is_tied else (None, embed)
        self.updated = [bucket for bucket in self.buckets if bucket in self.bucket_of.values()]
        for bucket in self.updated:
            names = [name for name, owner in self.bucket_of.items() if owner is bucket]
            bucket.place = min(self.places.get(name, 0) for name in names)
        head.clear()

    def count_bytes(self) -> tuple[float, float]:
        """Bytes that this rank has sent so far, and the least that would have done."""
        return (sum(bucket.num_bytes for bucket in self.buckets),
                sum(bucket.minimum_bytes for bucket in self.buckets))

    def wait_for(self, names: list[str]) -> None:
        """Wait for these parameters, and no others, of the last step."""
        if torch.compiler.is_compiling():
            return
        if self.probe:
            self.probe.mark("communication")
        for bucket in dict.fromkeys(self.bucket_of[name] for name in names):
            bucket.finish()
        if self.probe:
            self.probe.mark("forward and backward")

    def _on_gradient(self, name: str, _param: Tensor | None = None) -> None:
        """Send a bucket with the last of its gradients, in the last micro-batch of a step of its group."""
        bucket = self.bucket_of[name]
        if self.is_armed and (self.step_count + 1) % bucket.group.every == 0:
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.start_reduce()
                self.in_flight.append(bucket)

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float, tokens_per_step: int,
             matrix_lr_factor: float | None = None, decay_factor: float | None = 1.0) -> None:
        """Update every parameter that is due from gradients summed over tokens_per_step tokens of all ranks.

        Group "matrix" has a factor of its own where one is given; decay_factor None: that of the rate.
        Parameters are valid after finish().
        """
        cfg, matrix_lr_factor = self.cfg, lr_factor if matrix_lr_factor is None else matrix_lr_factor
        for bucket in self.updated:
            bucket.tokens += tokens_per_step
            is_due = (self.step_count + 1) % bucket.group.every == 0
            if is_due and bucket not in self.in_flight:  # one rank has no hooks, and some have no gradient
                bucket.start_reduce()
                self.in_flight.append(bucket)
        self.step_count += 1

        # Matrices of later segments are updated first: their gradients came long ago, those of the tables
        # are still on their way. New values are sent in the order in which the model reads them.
        to_send = sorted(self.in_flight, key=lambda bucket: bucket.place)
        later = [bucket for bucket in self.in_flight if bucket.group_name == "matrix" and bucket.place > 1]
        for bucket in (*later, *(bucket for bucket in to_send if bucket not in later)):
            factor = matrix_lr_factor if bucket.group_name == "matrix" else lr_factor
            (beta1, beta2), updates = bucket.group.betas, self.step_count // bucket.group.every
            scale = GRAD_TOKENS / cfg.tokens_per_step  # that of the run: a larger step has a larger gradient
            scalars = [torch.tensor(value, dtype=wide_dtype(bucket.values))
                       for value in (momentum, scale, 1 - beta1**updates, 1 - beta2**updates)]
            hyper = Hyperparameters(*scalars, bucket.group.betas, cfg.adam_eps, self.rt.dtype,
                                    "products" in self.rt.kernels, cfg.orthogonalize, cfg.decay)
            bucket.update(self.updates[bucket.group.rule], factor,
                          factor if decay_factor is None else decay_factor, hyper, self.probe)
            while to_send and to_send[0].is_updated:
                to_send.pop(0).start_gather()
        self.in_flight, self.is_armed = [], False

        if cfg.tie_head == "on" and self.step_count == self.last_tied_step + 1:
            # From here on the embedding is a parameter of its own, which begins as a copy of the head, state
            # included.
            head = self.bucket_of["head.weight"]
            if head.gathering is not None:
                head.finish()
            for key, state in head.tied.state.items():
                state.copy_(head.state[key])
            self.tie()

    def finish(self) -> None:
        for bucket in self.buckets:
            if bucket.gathering is not None:
                bucket.finish()

    def is_settled(self) -> bool:
        """Whether no gradients wait for a later step: only then a snapshot holds everything."""
        return not any(bucket.tokens for bucket in self.updated)


# ==== DATA =================================================================================================
# Shards become packed sequences, and these become batches. A packed sequence ("row") is seq_len tokens of
# whole documents, cut to max_doc_len, each beginning with the BOS token. Which ones a step sees is decided
# once, for the whole run, before the first step: ranks and micro-batches only split them, so the loss does
# not depend on either. Source: record 32; data/README.md has the file format.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
SHARD_REMEDY = "delete it and fetch or build it again (data/)"
BYTE_VOCAB_SIZE, BYTE_BOS = 257, 256  # byte tokens: 256 values and BOS


class Batch(typing.NamedTuple):
    """Tokens of one forward pass (T,): int32 inputs, int64 targets, int32 document numbers in order."""

    inputs: Tensor
    targets: Tensor
    doc_ids: Tensor


@dataclass(frozen=True)
class Shard:
    """A token file, checked and kept open: one that takes its name meanwhile changes nothing. It is read and
    not mapped, because a map of a file that was cut short ends the process (SIGBUS)."""

    file: typing.BinaryIO
    num_tokens: int
    starts: np.ndarray  # where its documents begin
    bos: int
    sha256: str
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def ends(self, max_doc_len: int) -> np.ndarray:
        """Running count of usable tokens after each document, documents cut to max_doc_len."""
        lengths = np.diff(self.starts, append=self.num_tokens)
        return np.minimum(lengths, max_doc_len).cumsum()

    def read(self, first: int = 0, end: int | None = None) -> np.ndarray:
        """Tokens first..end-1, by default all, uint16; RunError where the file no longer has them."""
        end = self.num_tokens if end is None else min(end, self.num_tokens)
        with self.lock:
            self.file.seek(SHARD_HEADER_BYTES + 2 * first)
            data = self.file.read(2 * (end - first))
        if len(data) != 2 * (end - first):
            raise RunError(f"{self.file.name} was cut short while this run was reading it, it ends before "
                           f"token {end}: {SHARD_REMEDY}, then --resume=auto", of_one_rank=True)
        return np.frombuffer(data, dtype="<u2")


def read_shard_header(path: str) -> tuple[int, int, int]:
    """(tokens, vocabulary size, BOS token) of a shard whose length agrees; else InputError."""
    problem, header = None, np.zeros(0, dtype="<i4")
    try:
        size = os.path.getsize(path)
        if os.path.isfile(path):  # a pipe would wait for its writer
            header = np.fromfile(path, dtype="<i4", count=SHARD_HEADER_BYTES // 4)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): "
                         "check the path and its permissions") from None
    if len(header) * 4 < SHARD_HEADER_BYTES or header[0] != SHARD_MAGIC or header[1] != SHARD_VERSION:
        problem = f"is not a token shard (magic {SHARD_MAGIC}, version {SHARD_VERSION})"
    elif header[2] <= 0:
        problem = "holds no tokens"
    elif size != SHARD_HEADER_BYTES + 2 * int(header[2]):
        problem = f"has {size} bytes where its header announces {SHARD_HEADER_BYTES + 2 * int(header[2])}"
    if problem:
        raise InputError(f"{path} {problem}: {SHARD_REMEDY}")
    return int(header[2]), int(header[3]) or 50257, int(header[4]) or 50256


def open_shard(path: str, vocab_size: int) -> Shard:
    """Open and check a .bin shard; InputError names the file and what is wrong with it."""
    num_tokens, shard_vocab, bos = read_shard_header(path)
    if shard_vocab != vocab_size:
        raise InputError(f"{path} has a vocabulary of {shard_vocab}, the model of {vocab_size}: "
                         f"set --vocab_size={shard_vocab} or choose other files")
    file = open(path, "rb", buffering=0)
    tokens = np.fromfile(file, dtype="<u2", count=num_tokens, offset=SHARD_HEADER_BYTES)
    if tokens.max() >= vocab_size:
        raise InputError(f"{path} has token {tokens.max()}, not below its vocabulary size {vocab_size}: "
                         f"{SHARD_REMEDY}")
    starts = np.flatnonzero(tokens == bos)
    if not len(starts):
        raise InputError(f"{path} has no BOS (token {bos}): {SHARD_REMEDY}")
    return Shard(file, num_tokens, starts, bos, hashlib.sha256(tokens).hexdigest())


def find_shards(pattern: str, field: str) -> list[str]:
    """Files of a glob pattern in sorted order; InputError says how to get them."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise InputError(f"--{field}={pattern} matches no file: run python data/cached_fineweb10B.py "
                         "for FineWeb, or python data/text.py for your own text, both of this file's "
                         "repository")
    return paths


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int, bos: int) -> None:
    """Write a shard under a temporary name and rename it. tokens uint16, beginning with BOS."""
    header = np.zeros(SHARD_HEADER_BYTES // 4, dtype="<i4")
    header[:5] = SHARD_MAGIC, SHARD_VERSION, len(tokens), vocab_size, bos
    write_atomic(path, header.tobytes() + tokens.astype("<u2").tobytes())


def fingerprint(shards: Iterable[Shard]) -> str:
    return hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()[:16]


class Row(typing.NamedTuple):
    """Where a packed sequence lies in a shard: documents first..last, each cut to max_doc_len; or, where it
    may begin anywhere, tokens first..last."""

    shard: int
    first: int
    last: int
    seq_len: int
    max_doc_len: int


class TrainData:
    """The packed sequences of a whole run, planned exactly; any rank can build any of them."""

    def __init__(self, cfg: Config, schedule: Schedule):
        """Walk the shards in order, each opened when first needed. A packed sequence that a shard cannot
        fill begins in the next one; InputError where all of them, and all epochs, are not enough."""
        self.cfg, self.spans, self.rows = cfg, schedule.spans(), []
        paths, is_anywhere = find_shards(cfg.train_files, "train_files"), cfg.row_start == "anywhere"
        self.shards = [open_shard(paths[0], cfg.vocab_size)]
        again = itertools.chain.from_iterable(itertools.repeat(range(len(paths)), cfg.epochs - 1))
        order = itertools.chain(range(1, len(paths)), again)
        shard = position = 0  # the first document, or token, that is still free
        bar = tqdm(total=len(paths), initial=1, desc="scan shards", unit="file", disable=not show_bar(),
                   leave=False)
        for stage, start, end in self.spans:
            ends = self.shards[shard].ends(stage.max_doc_len)
            for _ in range(self.first_row(end) - self.first_row(start)):
                while True:
                    if is_anywhere:  # it begins with a token, the last target of the row before
                        last = position + stage.seq_len
                        has_room = last < self.shards[shard].num_tokens
                    else:  # it begins with a document, and holds a token more than it needs
                        needed = (ends[position - 1] if position else 0) + stage.seq_len + 1
                        last = int(np.searchsorted(ends, needed))
                        has_room = last < len(ends)
                    if has_room:
                        break
                    shard, position = next(order, None), 0
                    if shard is None:
                        self._report_missing()
                    if shard == len(self.shards):
                        self.shards.append(open_shard(paths[shard], cfg.vocab_size))
                        bar.update()
                    ends = self.shards[shard].ends(stage.max_doc_len)
                self.rows.append(Row(shard, position, last, stage.seq_len, stage.max_doc_len))
                position = last if is_anywhere else last + 1
        bar.close()

    def first_row(self, step: int) -> int:
        return sum((min(end, step) - start) * (stage.tokens_per_step // stage.seq_len)
                   for stage, start, end in self.spans if start < step)

    def _report_missing(self) -> typing.NoReturn:
        """Say how many tokens are missing, and what helps."""
        have, num_rows = sum(row.seq_len for row in self.rows), self.first_row(self.spans[-1][2])
        missing = sum((end - start) * stage.tokens_per_step for stage, start, end in self.spans) - have
        epochs = -(-self.cfg.epochs * num_rows // max(1, len(self.rows)))  # at least
        again = f", read it again (--epochs={epochs})" if self.rows else ""
        whole = "; --row_start=anywhere uses documents whole, however long they are"
        raise InputError(f"--train_files={self.cfg.train_files} is {missing} tokens short of this run: get "
                         f"more (data/cached_fineweb10B.py N, data/text.py PATH...){again} or lower "
                         f"--num_iterations{whole if self.cfg.row_start == 'document' else ''}")

    def tokens_of(self, index: int) -> np.ndarray:
        """The seq_len + 1 tokens of a packed sequence, uint16."""
        row = self.rows[index]
        shard = self.shards[row.shard]
        if self.cfg.row_start == "anywhere":
            return shard.read(row.first, row.last + 1)
        starts = shard.starts[row.first : row.last + 2].tolist()
        ends = [*starts[1:], shard.num_tokens][: row.last + 1 - row.first]
        tokens = shard.read(starts[0], min(ends[-1], starts[len(ends) - 1] + row.max_doc_len))
        pieces = [tokens[start - starts[0] : min(end, start + row.max_doc_len) - starts[0]]
                  for start, end in zip(starts, ends)]
        return np.concatenate(pieces)[: row.seq_len + 1]

    def batch(self, rows: range) -> Batch:
        tokens = np.stack([self.tokens_of(index) for index in rows])  # (rows, seq_len + 1)
        return make_batch(tokens, self.shards[0].bos, self.cfg.document_mask == "on")

    def batches(self, cfg: Config, rt: Runtime, start: int, end: int) -> Iterator[Batch]:
        """This rank's micro-batches of steps start..end-1."""
        for step in range(start, end):
            first, stage = self.first_row(step), next(span[0] for span in self.spans if step < span[2])
            accum, per_micro = split_rows(cfg, rt.world_size, stage.tokens_per_step, stage.seq_len)
            first += rt.rank * accum * per_micro
            for micro in range(accum):
                yield self.batch(range(first + micro * per_micro, first + (micro + 1) * per_micro))


def make_batch(tokens: np.ndarray, bos: int, has_document_mask: bool = True) -> Batch:
    """Packed sequences (rows, 1 + their inputs) of any integer type -> one Batch on the CPU.

    They never see each other; documents within one do where has_document_mask is False.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].ravel()
    is_start = (inputs == bos) & has_document_mask
    is_start[:, 0] = True
    doc_ids = is_start.cumsum(dtype=np.int32)
    inputs = inputs.ravel().astype(np.int32)
    return Batch(*map(torch.from_numpy, (inputs, targets.astype(np.int64), doc_ids)))


class ValData:
    """The first val_tokens of the validation files, cut into val_seq_len, documents whole (record 32)."""

    def __init__(self, cfg: Config):
        self.cfg, num_rows = cfg, cfg.val_tokens // cfg.val_seq_len
        rows = min(num_rows, max(1, cfg.micro_batch_tokens // cfg.val_seq_len))
        rows = next(n for n in range(rows, 0, -1) if num_rows % n == 0)  # of one batch
        self.batch_tokens, self.num_batches = rows * cfg.val_seq_len, num_rows // rows
        self.shards = [open_shard(path, cfg.vocab_size) for path in find_shards(cfg.val_files, "val_files")]
        pieces, missing = [], cfg.val_tokens + 1
        for shard in self.shards:
            pieces.append(shard.read(0, missing))
            missing -= len(pieces[-1])
        if missing:
            most = (cfg.val_tokens - missing) // cfg.val_seq_len * cfg.val_seq_len
            remedy = f"at most --val_tokens={most}" if most else "more text, or a shorter --val_seq_len"
            raise InputError(f"--val_files={cfg.val_files} is {missing} tokens short of "
                             f"--val_tokens={cfg.val_tokens} + 1: give {remedy}")
        self.tokens = np.concatenate(pieces)

    def batch(self, index: int) -> Batch:
        span = self.tokens[index * self.batch_tokens :]
        rows = np.lib.stride_tricks.sliding_window_view(span, self.cfg.val_seq_len + 1)
        rows = rows[: self.batch_tokens : self.cfg.val_seq_len]  # (rows, val_seq_len + 1)
        return make_batch(rows, self.shards[0].bos, self.cfg.document_mask == "on")


class Prefetcher:
    """Builds batches ahead in a thread, pinned for CUDA; next() raises what was raised there."""

    DEPTH = 4

    def __init__(self, batches: Iterator[Batch], device: torch.device):
        self.batches, self.device = batches, device
        self.executor = ThreadPoolExecutor(1, "prefetch")
        self.pending = deque(self.executor.submit(self._build) for _ in range(self.DEPTH))

    def _build(self) -> Batch | None:
        batch = next(self.batches, None)
        if batch is None or self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # threads start on device 0, where pinning would allocate
        return Batch(*(t.pin_memory() for t in batch))

    def __next__(self) -> Batch:
        batch = self.pending.popleft().result()
        assert batch is not None, "the planned batches are used up"
        self.pending.append(self.executor.submit(self._build))
        return Batch(*(t.to(self.device, non_blocking=True) for t in batch))


def read_vocabulary(cfg: Config) -> dict[bytes, int]:
    """Ids of the tokens that are text, by their bytes."""
    try:
        ids = json.loads(Path(cfg.vocab_file).read_text())
        # GPT-2's file writes every byte as a printable character: those that are none come after 255.
        printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, itertools.count(256)
        decode = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
        texts = {bytes(decode[char] for char in text): i for text, i in ids.items()
                 if text != "<|endoftext|>"}
        if max(ids.values()) >= cfg.vocab_size:
            raise ValueError("ids beyond the vocabulary")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"--vocab_file={cfg.vocab_file} cannot be read as ids by token ({error}): get it "
                         "with python data/cached_fineweb10B.py, or give --without=prefix_loss") from None
    return texts


def find_prefixes(texts: dict[bytes, int], size: int) -> Tensor:
    """The longest token that each token begins with, itself apart, or -1 (size,): from bytes alone, so that
    tokens which are no text have none. In sorted order a text's prefixes lie on a stack. Source: the record
    of 2026-07-13."""
    prefixes, stack = np.full(size, -1), []
    for text in sorted(filter(None, texts)):
        while stack and not text.startswith(stack[-1]):
            stack.pop()
        if stack:
            prefixes[texts[text]] = texts[stack[-1]]
        stack.append(text)
    return torch.from_numpy(prefixes)

# ==== SCHEDULES ============================================================================================
# Everything that changes with the step, as pure functions of the step: stages, windows, YaRN, learning
# rates, decay, momentum, loss weights. To add a schedule of one of these: its option and its line in
# Schedule.at(). Of something else also a field of StepState, which Trainer.train_step() passes on to the
# model or to the optimizer. Source: record 32.

ROTARY_BASE = 1024  # the lowest rotary frequency is 1/base


class StepState(typing.NamedTuple):
    """The schedule at one step."""

    stage_index: int
    stage: Stage
    windows: tuple[int, int]  # long, short
    lr_factor: float
    matrix_lr_factor: float
    decay_factor: float | None  # None: that of the learning rate of each group
    momentum: float
    frequencies: np.ndarray  # (K/2,) radians per token, after YaRN
    attention_scale: float
    loss_weights: tuple[float, ...]  # of the targets that Head.forward() lists


def parse_ramps(text: str) -> list[tuple[float, float]]:
    """'1 0.5:0' -> [(1, 1), (0.5, 0)]: weights as a stage begins, and towards its end; else ValueError."""
    ramps = [tuple(map(float, word.split(":"))) for word in text.split()]
    if not all(len(ramp) <= 2 and all(0 <= value < 1e6 for value in ramp) for ramp in ramps):
        raise ValueError
    return [(ramp[0], ramp[-1]) for ramp in ramps]


class Schedule:
    """The stages of a run and what follows from them."""

    def __init__(self, cfg: Config):
        self.cfg, self.num_iterations, self.stages = cfg, cfg.num_iterations, cfg.full_stages
        self.scheduled = cfg.num_iterations - cfg.extension_steps
        durations = [stage.duration for stage in cfg.stages][: len(cfg.stages) - bool(cfg.extension_steps)]
        ends = np.cumsum(durations) * (self.scheduled + 1) / sum(durations)
        self.ends = [math.ceil(end) for end in ends]  # first step after each stage
        if cfg.extension_steps:
            self.ends = [*self.ends[:-1], self.scheduled, self.num_iterations]
        self.windows = [(stage.window_long, stage.window_short) for stage in cfg.stages]
        self.windows.append(cfg.val_windows or self.windows[-1])  # of the final validation
        self.ramps = [parse_ramps(f"{stage.loss_weights} {stage.prefix_weight}")[: stage.num_targets]
                      for stage in cfg.stages]

        # Frequencies and softmax scale of each stage: YaRN, where on, on every change of the long window.
        # Half of the pairs rotate, the others have frequency 0 (record 17).
        quarter, self.rotary = cfg.head_dim // 4, []
        exponents = np.concatenate((np.linspace(0, 1, quarter), np.full(quarter, np.inf)))
        frequencies, scale, old = (1 / ROTARY_BASE) ** exponents, cfg.attention_scale, None
        for window, _ in self.windows:
            new = min(window, cfg.yarn_max_window) or 1  # the same always, where there is no YaRN
            old = old or new
            rotations = old * frequencies / (2 * math.pi)
            weight = np.clip((rotations - 1) / (32 - 1), 0, 1)
            frequencies = frequencies * (old / new + weight * (1 - old / new))
            scale *= 0.2 * math.log(new / old) + 1
            old = new
            self.rotary.append((frequencies, scale))

    def spans(self) -> list[tuple[Stage, int, int]]:
        """(stage, first step, one past its last) of every stage that has steps."""
        spans = [(stage, start, min(end, self.num_iterations))
                 for stage, start, end in zip(self.stages, [0, *self.ends], self.ends)]
        return [span for span in spans if span[1] < span[2]]

    def total_tokens(self) -> int:
        return sum(stage.tokens_per_step * (end - start) for stage, start, end in self.spans())

    def at(self, step: int) -> StepState:
        """The state at a step; at num_iterations, that of the final validation."""
        assert 0 <= step <= self.num_iterations, f"step {step} is outside 0..{self.num_iterations}"
        cfg, index = self.cfg, len(self.ends)
        if step < self.num_iterations:
            index = next(i for i, end in enumerate(self.ends) if step < end)
        last = min(index, len(self.ends) - 1)  # at num_iterations the last stage is still in force
        stage = self.stages[last]

        # The factors on all learning rates: a linear rise over lr_warmup_frac of the run, the stage's value,
        # a linear fall to final_lr_frac, a fraction of the option and not of the stage's rate. The fall
        # takes the last cooldown_frac of the run; matrices may have one of their own.
        left, warmup = max(0.0, 1 - step / self.scheduled), cfg.lr_warmup_frac * self.scheduled
        own = cfg.matrix_cooldown_frac if cfg.matrix_cooldown_frac >= 0 else cfg.cooldown_frac
        factors = []
        for cooldown in (cfg.cooldown_frac, own):
            factor = stage.lr_factor
            if step + 1 < warmup:
                factor = stage.lr_factor * (step + 1) / warmup
            elif cooldown > 0 and left <= cooldown:
                weight = left / cooldown
                factor = stage.lr_factor * weight + cfg.final_lr_frac * (1 - weight)
            factors.append(factor)
        lr_factor, matrix_lr_factor = factors
        decay_factor = dict(constant=1.0, lr=None,
                            cosine=0.5 + 0.5 * math.cos(math.pi * step / self.num_iterations))

        # Momentum of matrices rises over its first steps and falls over its last ones.
        rise = min(step / cfg.momentum_warmup_steps, 1.0) if cfg.momentum_warmup_steps else 1.0
        if step > self.num_iterations - cfg.momentum_cooldown_steps:
            rise = min(rise, (self.num_iterations - step) / cfg.momentum_cooldown_steps)
        momentum = cfg.momentum_start + rise * (cfg.momentum_end - cfg.momentum_start)

        # Weights of the stage's targets: ramps, which do not reach their end.
        first = self.ends[last - 1] if last else 0
        part = (step - first) / max(1, min(self.ends[last], self.num_iterations) - first)
        loss_weights = tuple(start + (end - start) * part for start, end in self.ramps[last])
        return StepState(index, stage, self.windows[index], lr_factor, matrix_lr_factor,
                         decay_factor[cfg.decay_schedule], momentum, *self.rotary[index], loss_weights)


def expand_rotary(cos: Tensor, sin: Tensor, scale: Tensor, pairs: str) -> tuple[Tensor, Tensor]:
    """cos and sin (T, P, K/4) of the pairs that rotate, as of P kinds of heads -> (T, 2, 1, P, K) of all
    channels of stacked q, which carries the softmax scale (), and k; sin with the sign of its channel."""
    num_fixed = cos.size(-1)
    cos, sin = F.pad(cos, (0, num_fixed), value=1.0), F.pad(sin, (0, num_fixed))  # (T, P, K/2)
    if pairs == "halves":
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, -sin), dim=-1)
    else:
        cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((sin, -sin), -1).flatten(-2)
    scales = torch.stack((scale, torch.ones_like(scale))).view(2, 1, 1, 1)
    return cos[:, None, None] * scales, sin[:, None, None] * scales


def make_stage_inputs(state: StepState, num_tokens: int, period: int, rt: Runtime, cfg: Config
                      ) -> StageInputs:
    """What the model is told of a stage. Positions start anew with every packed sequence of `period` tokens.

    Tables are float32 on CUDA, and small where a compiler makes what else they need part of the product.
    """
    dtype, pairs = torch.float32 if rt.device.type == "cuda" else rt.dtype, cfg.rotary_pairs
    positions = torch.arange(num_tokens, device=rt.device) % period
    frequencies = torch.tensor(state.frequencies[: cfg.head_dim // 4], device=rt.device)  # (K/4,)
    scale = torch.tensor(state.attention_scale, dtype=torch.float64, device=rt.device)

    # cos and sin at the positions (T, P) of P kinds of heads; where heads are paired, of even and odd ones.
    kinds, tables = [positions[:, None]], []
    if any(spec.paired for spec in cfg.layers):
        kinds.append(2 * positions[:, None] + torch.arange(2, device=rt.device))
    for kind in kinds:
        angles = kind[..., None].double() * frequencies  # (T, P, K/4)
        cos_sin = angles.cos(), angles.sin()
        if not rt.use_compile:  # on a CPU it would be slow to broadcast them over heads
            heads = cfg.num_heads // kind.size(1) if rt.device.type == "cpu" else 1
            cos_sin = [x.expand(-1, -1, heads, -1, -1) for x in expand_rotary(*cos_sin, scale, pairs)]
        tables += [x.to(dtype).contiguous() for x in cos_sin]
    tables += [None] * (4 - len(tables))
    is_fixed = torch.tensor(state.frequencies == 0, device=rt.device)  # (K/2,)
    is_fixed = is_fixed.repeat(2) if pairs == "halves" else is_fixed.repeat_interleave(2)  # (K,)
    windows = torch.tensor(state.windows, dtype=torch.int32, device=rt.device)
    return StageInputs(
        windows if rt.use_flex else state.windows, *tables, scale.to(dtype),
        (is_fixed & (positions > 0)[:, None, None]).to(dtype), positions == 0, len(state.loss_weights),
        state.stage.prefix_weight != "0", None if rt.use_flex else period)

# ==== TRAINING =============================================================================================
# One step, the loop around it, and the run around the loop. The clock runs while the model trains, and
# stands while it validates. What looks on (telemetry, guard, comparison of ranks, the expected end) is one
# list, called after every step; it changes nothing of a step unless it is switched on.

SEGMENTS = 4  # of a model whose gradients travel while it computes


@dataclass
class Progress:
    """Where a run stands, beside its tensors."""

    step: int = 0
    tokens: int = 0
    train_time: float = 0.0  # seconds on the clock
    resumed_at: list[int] = dataclasses.field(default_factory=list)
    good_steps: list[list[float]] = dataclasses.field(default_factory=list)  # guard: last [loss, gradient]
    loss_ema: float = math.nan  # telemetry
    num_actions: int = 0  # of the guard
    lowered: list[str] = dataclasses.field(default_factory=list)  # low precisions that the guard gave up
    lr_scale: float = 1.0
    lr_scale_until: int = 0  # step


class Trainer:
    """Model, optimizer and schedule of a run, one step of it, and the timed loop."""

    ANNOUNCE_AFTER = 5.0  # seconds of training, after which the time to go is said

    def __init__(self, cfg: Config, rt: Runtime):
        self.cfg, self.rt, self.schedule = cfg, rt, Schedule(cfg)
        torch.manual_seed(cfg.seed)
        storage = {} if computes_bfloat16(rt.device) else dict(embed_dtype="float32")
        model = GPT(dataclasses.replace(cfg, **storage), rt).to(rt.device)
        model.make_segments(cfg.segments or (1 if rt.world_size == 1 else min(SEGMENTS, cfg.num_layers)))
        self.optimizer = Optimizer(model, cfg, rt)
        self.model, self.progress, self.scales = model, Progress(), DelayedScales(model, rt)
        self.staging: dict[str, Tensor] = {}  # memory for the copies of a checkpoint, used again and again
        for part in (*model.segments, model.head):
            part.forward = rt.compile(part.forward)
        self.stage_inputs: dict[tuple[int, int], tuple[int, StageInputs]] = {}  # of the stage last asked for
        self.inspect: Callable[[Batch, StageInputs], None] | None = None  # telemetry's, for the next batch

    def train_step(self, batches: Prefetcher, state: StepState) -> Tensor:
        """One optimizer step; returns the mean loss of this rank's tokens, still on the device."""
        rt, progress, optimizer, probe = self.rt, self.progress, self.optimizer, self.optimizer.probe
        tokens = state.stage.tokens_per_step // rt.world_size  # of this rank
        weights = torch.tensor(state.loss_weights).to(rt.device, non_blocking=True)  # nobody waits
        total, left = torch.zeros((), device=rt.device), tokens
        if self.scales.sent is not None:
            self.scales.finish()
        while left:
            if probe:
                probe.mark("data wait")
            batch = next(batches)
            if probe:
                probe.mark("forward and backward")
            left -= len(batch.inputs)
            optimizer.is_armed = left == 0  # the gradients of the last micro-batch are final
            inputs = self.inputs_at(state, len(batch.inputs), state.stage.seq_len)
            if self.inspect:
                self.inspect(batch, inputs)
            loss = self.model(*batch, inputs, weights)
            loss.backward()
            total += loss.detach()
        if "fp8_mlp" in self.model.fp8:
            self.scales.start()
        lr_scale = progress.lr_scale if progress.step < progress.lr_scale_until else 1.0
        optimizer.step(state.lr_factor * lr_scale, state.momentum, state.stage.tokens_per_step,
                       state.matrix_lr_factor * lr_scale, state.decay_factor)
        if probe:
            probe.mark("")
        return total / tokens

    @torch.no_grad()
    def validate(self, data: ValData, state: StepState, num_batches: int | None = None) -> float:
        """Mean loss over the validation tokens, or some of them, shared out over the ranks."""
        self.optimizer.finish()
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.rt.device)
        num_batches = num_batches or data.num_batches
        for index in range(self.rt.rank, num_batches, self.rt.world_size):
            batch = Batch(*(x.to(self.rt.device, non_blocking=True) for x in data.batch(index)))
            total += self.model(*batch, self.inputs_at(state, data.batch_tokens, self.cfg.val_seq_len))
        self.model.train()
        if self.rt.world_size > 1:
            all_reduce_sum(total, self.rt)
        return total.item() / (num_batches * data.batch_tokens)

    def inputs_at(self, state: StepState, num_tokens: int, period: int) -> StageInputs:
        """The model's inputs at a schedule state; made anew only when the stage or the length changes."""
        stage_index, made = self.stage_inputs.get((num_tokens, period), (None, None))
        if stage_index != state.stage_index:
            made = make_stage_inputs(state, num_tokens, period, self.rt, self.cfg)
            self.stage_inputs[num_tokens, period] = (state.stage_index, made)
        return made

    def warm_up(self, train_data: TrainData, val_data: ValData, inspect: Callable | None = None) -> None:
        """Run every shape and window once or more, then put parameters and rule state back exactly. inspect
        is telemetry's, which compiles something of its own for every length."""
        if not self.cfg.warmup_iterations:
            return
        saved, num_batches = self.snapshot(), min(self.rt.world_size, val_data.num_batches)
        for _, start, end in self.schedule.spans():
            self.inspect = inspect
            steps = min(self.cfg.warmup_iterations * self.cfg.adam_every, end - start)  # of every kind
            batches = Prefetcher(train_data.batches(self.cfg, self.rt, start, start + steps), self.rt.device)
            with batches.executor:
                for _ in range(steps):
                    self.train_step(batches, self.schedule.at(start))
            self.validate(val_data, self.schedule.at(start), num_batches)
        self.validate(val_data, self.schedule.at(self.cfg.num_iterations), num_batches)
        self.restore(saved)
        del saved
        if self.rt.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.rt.device)

    def run(self, train_data: TrainData, val_data: ValData, log: RunLog, checkpoints: Checkpoints,
            stop: Stop, telemetry: Telemetry, vocabulary: dict[bytes, int]) -> None:
        """All steps from where progress stands; RunStopped where a signal, the time limit or the guard ends
        them early. The clock runs, but while the model validates."""
        cfg, rt, optimizer, progress = self.cfg, self.rt, self.optimizer, self.progress
        guard = Guard(self, log, stop) if cfg.guard == "on" else None
        self.log, self.first, self.val_seconds = log, (progress.train_time, progress.tokens), 0.0
        # What looks on after every step, with its loss, its measurements and the seconds on the clock.
        looking = [log.log_step, self.announce_end]
        if cfg.check_ranks_every:
            looking.insert(0, lambda *_: progress.step % cfg.check_ranks_every or check_ranks(optimizer))
        looking += [look.end_step for look in (guard, telemetry if cfg.telemetry_every else None) if look]
        if rt.world_size > 1:
            barrier(rt)
            set_timeout(rt, datetime.timedelta(seconds=cfg.comm_timeout))

        # Here the clock starts. As in the published runs, the table of prefixes, the reading of the first
        # shard and the first batches are on it.
        started, is_due = clock(rt.device), False
        if vocabulary:
            self.model.head.prefixes.copy_(find_prefixes(vocabulary, cfg.padded_vocab_size))
        batches = Prefetcher(train_data.batches(cfg, rt, progress.step, cfg.num_iterations), rt.device)
        with batches.executor:
            while True:
                step, is_last = progress.step, progress.step == cfg.num_iterations
                state = self.schedule.at(step)

                # Validate, if it is due. Here the clock stops, and below it runs again.
                if is_last or cfg.val_loss_every and step % cfg.val_loss_every == 0:
                    optimizer.finish()
                    progress.train_time += clock(rt.device) - started
                    before = time.perf_counter()
                    val_loss = self.validate(val_data, state)
                    self.val_seconds = time.perf_counter() - before
                    time_ms = progress.train_time * 1000
                    log.val_points.append([step, val_loss, round(time_ms)])
                    log.write_event("validation", step, val_loss=val_loss, train_time_ms=round(time_ms))
                    log.print(f"step:{step}/{cfg.num_iterations} val_loss:{val_loss:.4f} "
                              f"train_time:{time_ms:.0f}ms step_avg:{time_ms / max(step, 1):.2f}ms")
                    started = clock(rt.device)
                    if guard and not is_last:
                        guard.judge_validation(step, val_loss)
                if is_last:
                    if stop.work is not None:
                        stop.collect()
                    return

                # Train.
                is_measured = bool(cfg.telemetry_every) and telemetry.start_step()
                if is_measured or guard:
                    optimizer.probe = Probe(optimizer.groups, rt, is_measured)
                loss = self.train_step(batches, state)
                probe, optimizer.probe = optimizer.probe, None
                progress.step += 1
                progress.tokens += state.stage.tokens_per_step
                elapsed = progress.train_time + time.perf_counter() - started
                for look in looking:
                    look(loss, probe, elapsed)

                # Save, or stop, where no gradients wait for a later update: else they would be lost.
                status, is_last = stop.agree(), progress.step == cfg.num_iterations
                if cfg.checkpoint_every and (is_last or progress.step % cfg.checkpoint_every == 0):
                    is_due = True
                if guard and is_last:
                    guard.judge()
                if (status or is_due) and (is_last or optimizer.is_settled()):
                    if guard:
                        guard.judge()
                    checkpoints.wait()
                    barrier(rt)  # patient: a slow disk is no stalled rank
                    if status:  # and what was not to be saved has no memory of its own, and takes its time
                        set_timeout(rt, PATIENCE)
                    optimizer.finish()
                    now = clock(rt.device)
                    progress.train_time, started, is_due = progress.train_time + now - started, now, False
                    checkpoints.save(progress.step, *collect_state(self))  # what this costs is training time
                    if status:
                        stop.end(status, f"step {progress.step} of {cfg.num_iterations}", checkpoints)

    def announce_end(self, _loss: Tensor, _probe: Probe | None, elapsed: float) -> None:
        """Say once, after the first seconds of training, how long the rest will take."""
        first_time, first_tokens = self.first or (math.inf, 0)
        if elapsed - first_time < self.ANNOUNCE_AFTER:
            return
        cfg, progress, self.first = self.cfg, self.progress, None
        num_validations = 1 + (cfg.num_iterations - progress.step) // (cfg.val_loss_every or sys.maxsize)
        tokens_left = sum((end - max(start, progress.step)) * stage.tokens_per_step
                          for stage, start, end in self.schedule.spans() if end > progress.step)
        seconds_per_token = (elapsed - first_time) / (progress.tokens - first_tokens)
        left = round(tokens_left * seconds_per_token + num_validations * self.val_seconds)
        hint = ", --preset=quick takes a third of that" if cfg.preset == "laptop" and left > 120 else ""
        self.log.print(f"step {progress.step}: about {left // 60} min {left % 60} s to go{hint}")

    def tensors(self) -> list[Tensor]:
        """Parameters, state of their rules, FP8 scales: all that training changes."""
        return [*(tensor for bucket in self.optimizer.buckets
                  for tensor in (bucket.values, *bucket.state.values())), *self.scales.scales]

    def snapshot(self) -> tuple[int, list[Tensor]]:
        self.optimizer.finish()
        self.scales.finish()
        return self.optimizer.step_count, [tensor.clone() for tensor in self.tensors()]

    def restore(self, snapshot: tuple[int, list[Tensor]]) -> None:
        """Return to a snapshot exactly; gradients are cleared."""
        self.optimizer.finish()
        self.scales.finish()
        self.optimizer.step_count, saved = snapshot
        self.optimizer.tie()
        for tensor, old in zip(self.tensors(), saved):
            tensor.copy_(old)
        for part in (*self.optimizer.buckets, self.scales):
            part.clear()


def train(cfg: Config, argv: list[str]) -> None:
    """The whole run: data, log, model, warm-up, loop, result."""
    rt = start_runtime(cfg)
    stop, derived = Stop(rt, argv, cfg.time_limit), derive(cfg, rt.world_size)
    intro = (f"preset {cfg.preset}: {derived['num_params'] / 1e6:.2f} M parameters, {rt.world_size} x "
             f"{rt.device.type}, {derived['train_tokens'] / 1e6:.2f} M training tokens")

    # Everything that can be wrong is found before anything is trained: outputs, the checkpoint, the data.
    saved, activations = prepare_outputs(cfg, rt)
    print0(f"{intro}, in {Path.cwd()}", rt)  # records are published: their logs name no folder
    if saved and (result := broadcast_object(find_result(saved[1], cfg), rt)):
        print0(f"{saved[0]} is the end of a finished run, see {result}: nothing to do (without --resume it "
               "starts anew)", rt)
        return
    ensure_corpus(cfg, rt)
    setup_start = time.perf_counter()
    train_data, val_data = TrainData(cfg, Schedule(cfg)), ValData(cfg)
    vocabulary = read_vocabulary(cfg) if any(stage.has_prefixes for stage in cfg.stages) else {}
    data_setup_s = round(time.perf_counter() - setup_start, 2)
    with explain_memory(cfg):
        rt = choose_precision(cfg, rt, activations)

    log = RunLog(cfg, rt, argv, saved and saved[1])
    log.facts["corpus_fingerprint"] = fingerprint((*train_data.shards, *val_data.shards))
    checkpoints = Checkpoints(cfg, log, train_data.shards[0].bos)
    with ExitStack() as stack, explain_memory(cfg):
        share_errors(lambda: [stack.enter_context(part) for part in (log, checkpoints)], rt)
        log.print(intro, to_console=False)
        for note in rt.notes:
            log.print(note)
        trainer = Trainer(cfg, rt)
        if saved:
            log.print(resume(trainer, saved))
        elif cfg.resume:
            log.print(f"no checkpoint in {name_checkpoints(cfg)}: starting anew")

        # Warm up every shape off the clock, and undo it; take the memory for checkpoints.
        start, telemetry = clock(rt.device), Telemetry(trainer, log)
        trainer.warm_up(train_data, val_data, telemetry.inspect if cfg.telemetry_every else None)
        if cfg.checkpoint_every or cfg.time_limit:
            make_staging(trainer)
        facts = dict(config={**plain_dict(cfg), "derived": derived},
                     compile_time_s=round(clock(rt.device) - start, 2), data_setup_s=data_setup_s)

        # Train, and leave the result.
        log.start_training(trainer.progress)
        first_step, before = trainer.progress.step, trainer.optimizer.count_bytes()
        with stop.catch_signals():
            trainer.run(train_data, val_data, log, checkpoints, stop, telemetry, vocabulary)
        checkpoints.wait()  # whose last line belongs into the log
        rt, progress, num_steps = trainer.rt, trainer.progress, max(1, cfg.num_iterations - first_step)
        sent = [round((now - then) / num_steps)
                for then, now in zip(before, trainer.optimizer.count_bytes())]
        tokens_per_s = derived["train_tokens"] / progress.train_time
        flops = tokens_per_s * derived["flops_per_token"]
        log.finish(dict(
            **facts, train_time_ms=round(progress.train_time * 1000), tokens_per_s=round(tokens_per_s),
            mfu=round(flops / (rt.peak_flops * rt.world_size), 4), bytes_per_step=sent[0],
            minimum_bytes_per_step=sent[1], peak_memory_mib=read_peak_memory_mib(rt),
            resumed_at=progress.resumed_at, guard_actions=progress.num_actions))
    print_sample(trainer.model, cfg, trainer.rt)

# ############################## PART TWO: THE WORKSHOP #####################################################

# ==== RUNTIME ==============================================================================================
# Which device, which rank, and what is fast here. This room alone reads the environment and talks to other
# processes: on one rank its collectives do nothing. What a device can do is found out by doing it once, in
# choose_precision(). torchrun ends all ranks when one dies; the timeout of the collectives ends a rank that
# waits for one that has stalled.

class RunError(Exception):
    """A run that cannot continue: main() prints one line and exits with the status."""

    status = 1

    def __init__(self, message: str, status: int | None = None, of_one_rank: bool = False):
        super().__init__(message)
        self.status = self.status if status is None else status
        self.of_one_rank = of_one_rank  # other ranks may not have met it, so this one must print it


class InputError(RunError):
    """Bad input; the line names value and remedy."""

    status = 2


class RunStopped(RunError):
    """An end before the last step, on purpose: the status says why, the line how to continue."""


@dataclass(frozen=True)
class Runtime:
    """Where and how a process computes; by default alone, on a CPU, in float32."""

    device: torch.device = torch.device("cpu")
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    dtype: torch.dtype = torch.float32  # of activations and of the orthogonalisation
    use_compile: bool = False
    compile_mode: str = "default"
    use_flex: bool = False  # FlexAttention (compiled CUDA) or dense attention in blocks
    kernels: frozenset[str] = frozenset()  # of KERNELS: our Triton kernels in place of the plain forms
    fp8: frozenset[str] = frozenset()  # options fp8_...: what multiplies in FP8 while training
    peak_flops: float = 0.0  # FLOP/s of a large matmul measured here: the ceiling MFU is stated against
    notes: tuple[str, ...] = ()  # choices made here, printed once
    control: dist.ProcessGroup | None = None  # on CPUs, patient: for what is not part of a step
    gathers: dist.ProcessGroup | None = None  # of all-gathers: messages of one group wait for one another

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def compile(self, fn):
        """torch.compile fn where this run compiles; shapes are static by design."""
        if not self.use_compile:
            return fn
        torch._dynamo.config.recompile_limit = 64  # segments share one piece of code, and so do update rules
        if self.compile_mode == "coordinate-descent":
            return torch.compile(fn, dynamic=False, options={"coordinate_descent_tuning": True})
        return torch.compile(fn, dynamic=False, mode=self.compile_mode)


PATIENCE = datetime.timedelta(hours=1)  # for compilation and disks


def env_int(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def check_environment() -> None:
    """Raise InputError where what torchrun says in the environment makes no sense. Called before anything
    else reads it."""
    for name, default in dict(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1").items():
        text = os.environ.get(name, default)
        least = 1 if name.endswith("WORLD_SIZE") else 0
        if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
            raise InputError(f"{name}={text} in the environment is not a whole number of at least {least}: "
                             "unset it, or start with torchrun", of_one_rank=True)
    for prefix in ("", "LOCAL_"):
        rank, world_size = env_int(f"{prefix}RANK", 0), env_int(f"{prefix}WORLD_SIZE", 1)
        if rank >= world_size:
            raise InputError(f"{prefix}RANK={rank} in the environment is not below {prefix}WORLD_SIZE="
                             f"{world_size}: unset both, or start with torchrun", of_one_rank=True)


def start_runtime(cfg: Config, is_alone: bool = False) -> Runtime:
    """Join the process group, unless told to stay alone; choose_precision() then adds precision."""
    use_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    rank, local_rank, world_size = (0, 0, 1) if is_alone else (
        env_int("RANK", 0), env_int("LOCAL_RANK", 0), env_int("WORLD_SIZE", 1))
    if cfg.device == "cuda" and not use_cuda:
        raise InputError("--device=cuda but PyTorch sees no CUDA device: use --device=cpu, "
                         "or install a CUDA build of torch")
    if use_cuda and local_rank >= torch.cuda.device_count():
        raise InputError(f"local rank {local_rank} has no GPU of its own: start at most "
                         f"{torch.cuda.device_count()} processes per node, or use --device=cpu",
                         of_one_rank=True)
    check_ranks_fit(cfg, world_size)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    control = gathers = None
    if use_cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        keep_freed_memory()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # on CPU too: bfloat16 stays bfloat16
    if world_size > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise InputError(f"WORLD_SIZE={world_size} in the environment, but no {name}: start with "
                                 "torchrun, or unset WORLD_SIZE", of_one_rank=True)
        with suppress(OSError, AttributeError):  # PR_SET_PDEATHSIG, on Linux: no rank outlives its launcher
            ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)

        # On several nodes gloo takes the network interface of the host's name. Where that name means this
        # node's own loopback, it would look there for the others.
        is_told = env_int("LOCAL_WORLD_SIZE", world_size) == world_size or "GLOO_SOCKET_IFNAME" in os.environ
        with suppress(OSError):  # a name without an address: gloo then looks for another interface
            name = socket.gethostname()
            address = "" if is_told else socket.gethostbyname(name)
            if address.startswith("127."):
                raise InputError(f"this host's name, {name}, means {address}, where no other node "
                                 "finds it: set GLOO_SOCKET_IFNAME to its network interface (ip -br address "
                                 "lists them), or give the name its address in /etc/hosts", of_one_rank=True)
        try:
            socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # or it would be asked for an hour
            dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None,
                                    timeout=PATIENCE)
            control = dist.new_group(backend="gloo", timeout=PATIENCE)
            gathers = dist.new_group(timeout=PATIENCE)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"rank {rank} does not find the others at MASTER_ADDR="
                             f"{os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']} "
                             f"({str(error)[:200]}): start with torchrun, and with GLOO_SOCKET_IFNAME=the "
                             "network interface where there are several nodes", of_one_rank=True) from None
    return Runtime(device, rank, local_rank, world_size, control=control, gathers=gathers)


def choose_precision(cfg: Config, rt: Runtime, activations: str = "") -> Runtime:
    """Decide precision, compilation, FP8 and kernels by short real launches; rank 0 decides for all.

    activations: their type in the run that this one continues, or in the first one of its record.
    """
    dtype, peak_flops, *notes = choose_dtype(cfg, rt.device, activations)
    use_compile, note = choose_compile(cfg, rt.device)
    use_flex, attention_note = choose_attention(cfg, rt.device, dtype, use_compile)
    kernels, kernels_note = choose_kernels(cfg, rt.device, dtype, use_compile)
    fp8 = {field: choose_fp8(cfg, rt.device, field, use_compile) for field in FP8_OPTIONS}
    return dataclasses.replace(rt, **broadcast_object(dict(
        dtype=dtype, use_compile=use_compile, compile_mode=cfg.compile_mode,
        use_flex=use_flex, kernels=kernels,
        fp8=frozenset(field for field, (works, _) in fp8.items() if works),
        peak_flops=peak_flops, notes=(*notes, f"{attention_note}; {note}",
                                      *(note for _, note in fp8.values()), kernels_note)), rt))


def try_launch(field: str, wish: str, reason: str, launch: Callable[[], None], device: torch.device
               ) -> tuple[bool, str]:
    """(whether to use what an option names, one line saying why), by launching it where nothing speaks
    against it. Whatever a compiler raises, training must not depend on it."""
    name = field.replace("_", " ")
    if wish == "off" or wish == "auto" and reason:
        return False, f"{name}: off ({reason if wish == 'auto' else f'--{field}=off'})"
    try:
        launch()
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        if wish != "auto":
            raise InputError(f"--{field}={wish} but it fails on this device ({reason}): use --{field}=auto "
                             "or off") from None
        return False, f"{name}: off, it fails on this {device.type} device ({reason})"
    return True, f"{name}: {'on' if wish == 'auto' else wish}"


def keep_freed_memory() -> None:
    """Let glibc keep freed activations for the next step: no page faults in the hot loop."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # not glibc; only speed is lost
        return
    libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: allocate from the heap up to 1 GiB
    libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: keep up to 2 GiB of free heap


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_matmul(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a square matmul, the best of six."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(6):
        start = clock(device)
        a @ b
        best = min(best, clock(device) - start)
    return 2 * size**3 / best


def computes_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is a type of this device, if not always a fast one."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


def choose_dtype(cfg: Config, device: torch.device, first: str = "") -> tuple[torch.dtype, float, str]:
    """(dtype of activations, FLOP/s of a large matmul in it, one line): for auto what the device says of
    itself; or first, what this run, or the first one of its record, began with."""
    is_cuda, has_bf16 = device.type == "cuda", computes_bfloat16(device)
    if not has_bf16 and "bfloat16" in (cfg.dtype, first):
        raise InputError("--dtype=bfloat16 needs a GPU of capability 8.0 (Ampere): use --dtype=auto; what "
                         "began in bfloat16 goes on where it can")
    if cfg.dtype != "auto":
        name, reason = cfg.dtype, "chosen by --dtype"
    elif first:
        name, reason = first, "as this run, or the first one of its record, began"
    elif has_bf16 if is_cuda else any(  # PyTorch before 2.13 cannot tell what a processor has
            getattr(torch.cpu, "get_capabilities", dict)().get(kind)
            for kind in ("avx512_bf16", "amx_bf16", "bf16")):
        name, reason = "bfloat16", f"this {'GPU' if is_cuda else 'processor'} multiplies it"
    else:
        name, reason = "float32", f"this {'GPU' if is_cuda else 'processor'} does not multiply bfloat16"
    dtype = getattr(torch, name)
    rate = measure_matmul(device, dtype, 8192 if is_cuda else 1024)
    return dtype, rate, f"activations: {name} ({reason}; matmul measured at {rate / 1e12:.2f} TFLOP/s)"


def choose_compile(cfg: Config, device: torch.device) -> tuple[bool, str]:
    """(whether to compile, one line saying why): with Triton, which Windows lacks, and capability 7.0."""
    is_cuda, reason = device.type == "cuda", ""
    if is_cuda and triton is None:
        reason = "Triton is not installed"
    elif is_cuda and torch.cuda.get_device_capability(device) < (7, 0):
        reason = "a GPU below capability 7.0"
    if cfg.compile == "on" and reason:
        raise InputError(f"--compile=on but it cannot be ({reason}): use --compile=auto or off")
    if cfg.compile_mode != "default" and (cfg.compile == "off" or cfg.compile == "auto" and not is_cuda):
        raise InputError(f"--compile_mode={cfg.compile_mode} has no effect where nothing is compiled: give "
                         "--compile=on, or leave it out")
    use_compile = not reason and (cfg.compile == "on" or cfg.compile == "auto" and is_cuda)
    return use_compile, f"torch.compile {'on' if use_compile else 'off'}{reason and f' ({reason})'}"


def choose_attention(cfg: Config, device: torch.device, dtype: torch.dtype, use_compile: bool
                     ) -> tuple[bool, str]:
    """(whether attention is FlexAttention, one line saying why): where a compiler for it is at hand and the
    device runs it, forward and backward, with the result of the dense form."""
    reason = "" if use_compile and device.type == "cuda" else "nothing is compiled for a GPU"

    def launch() -> None:
        doc_ids, window = torch.arange(4 * BLOCK, device=device) // 300, torch.tensor(BLOCK, device=device)
        shape = 3, len(doc_ids), cfg.num_heads, cfg.head_dim
        forms = [lambda *x: attend(*x, build_block_mask(doc_ids, window)),
                 lambda *x: attend(*x, build_dense_mask(doc_ids, BLOCK, dtype=dtype))]
        forms[0] = torch.compile(forms[0], dynamic=False) if use_compile else forms[0]
        x, results = torch.randn(shape, device=device), []
        x[0] *= cfg.head_dim**-0.5  # the softmax scale
        for form in forms:
            qkv = x.to(dtype, copy=True).requires_grad_()
            y = form(*qkv.unbind())
            y.float().square().sum().backward()
            results.append((y.detach(), qkv.grad))
        for name, ours, plain in zip(("output", "gradient"), *results):
            error = (ours.float() - plain.float()).norm() / plain.float().norm()
            if not error < 0.02:  # bfloat16 rounds to 0.002 rms, several times
                raise RuntimeError(f"its {name} differs from the dense form's by {error:.3g}")

    works, note = try_launch("attention", "auto", reason, launch, device)
    if works:
        return True, "attention: FlexAttention"
    return False, f"attention: dense, in blocks{'' if reason else note.removeprefix('attention: off')}"


def choose_fp8(cfg: Config, device: torch.device, field: str, use_compile: bool) -> tuple[bool, str]:
    """(whether head, linears or MLP train in FP8, one line saying why), by running the real matmuls once."""
    is_head, reason = field == "fp8_head", ""
    if device.type == "cpu":
        reason = f"no CPU multiplies FP8 faster than bfloat16; --{field}=on forces it"
    elif cfg.dtype == "float32":
        reason = "--dtype=float32"
    elif not is_head and (field == "fp8_linear" and cfg.model_dim < 1536 or not use_compile):
        reason = "measuring costs more than it gains below 1536 channels, or uncompiled"

    def launch() -> None:
        for name in ("model_dim", "padded_vocab_size") if is_head else ("model_dim",):
            if getattr(cfg, name) % 16:
                raise RuntimeError(f"{name}={getattr(cfg, name)} is not a multiple of 16")
        if not is_head and cfg.model_dim < FP8_LEAST:
            raise RuntimeError(f"model_dim={cfg.model_dim} is below {FP8_LEAST}")
        x = torch.randn(32, cfg.model_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = torch.zeros(128, cfg.model_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        if is_head:
            targets = torch.zeros(32, 1, device=device, dtype=torch.int64)
            HeadLoss.apply(x, w, targets, torch.ones(1, device=device), Softcap(30.0, 0.0, 7.5), 1.0,
                           False).backward()
        else:
            LinearFP8.apply(x, w, None, field == "fp8_linear").sum().backward()

    return try_launch(field, getattr(cfg, field), reason, launch, device)


def choose_kernels(cfg: Config, device: torch.device, dtype: torch.dtype, use_compile: bool
                   ) -> tuple[frozenset[str], str]:
    """(which Triton kernels to use, one line saying why), by comparing each with its plain form.

    They are launched as training launches them: a kernel that is right by itself may not compile in a graph.
    """
    is_cpu, chosen, left_out = device.type == "cpu", set(), []

    def launch(name: str) -> None:
        if triton is None:
            raise RuntimeError("Triton is not installed")
        if not computes_bfloat16(device):
            raise RuntimeError("a GPU below capability 8.0, whose registers the tiles overflow")
        # Triton's interpreter, which is what a CPU has, cannot multiply bfloat16
        x = torch.randn(2, 256, 304, device=device).to(torch.float32 if is_cpu else dtype)
        has_fp8 = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 9)
        form = functools.partial(compute_by_kernel, name, has_fp8)
        compiled = torch.compile(form, dynamic=False) if use_compile and not is_cpu else form
        for our, plain in zip(compiled(x, True), form(x, False)):
            error = (our.float() - plain.float()).norm() / plain.float().norm()
            if not error < 0.01:  # bfloat16 rounds to 0.002 rms
                raise RuntimeError(f"a kernel differs from its plain form by {error:.3g}")

    note = ""
    for name in KERNELS if cfg.kernels in AUTO else [cfg.kernels]:
        works, note = try_launch("kernels", cfg.kernels, "plain PyTorch on a CPU" * is_cpu,
                                 functools.partial(launch, name), device)
        if works and cfg.kernels == "auto" and name == "mlp":
            ratio = time_mlp(cfg, device, dtype)
            if ratio >= 1:
                works, note = False, f"kernels: off, it takes {ratio:.2f} times as long as plain PyTorch"
        chosen |= {name} if works else set()
        left_out += [] if works else [f"{name}{note.removeprefix('kernels: off')}"]
    if chosen and left_out:
        note = f"kernels: {', '.join(sorted(chosen))}; not {'; '.join(left_out)}"
    return frozenset(chosen), note


def compute_by_kernel(name: str, has_fp8: bool, x: Tensor, use_kernels: bool) -> list[Tensor]:
    """What a kernel is for, in all its forms, from random x (2, 256, 304), by the kernel or plainly."""
    if name == "loss":
        logits, targets = x[0] * 5, torch.arange(256, device=x.device)[:, None]
        cap = Softcap(30.0, 0.0, 7.5)
        return [transpose(to_fp8(x[1], E5M2)[0], use_kernels), *softcapped_cross_entropy(
            logits, targets, x.new_ones(1), cap, x.dtype, use_kernels=use_kernels)]
    if name == "products":
        gram = symmetric_product(x)
        return [symmetric_product(x, use_kernels=use_kernels),
                symmetric_product(gram, gram, 0.5, 2.0, use_kernels)]
    factors = x[0, :, :128] / 8, x[1, :128, :256] / 8
    post = squared_product(*factors, use_kernels=use_kernels)
    found, one = [post, squared_product(*factors, post, use_kernels)], x.new_ones((), dtype=torch.float32)
    (x8, x_scale), (w8, w_scale) = (to_fp8(t, E4M3) for t in (factors[0], factors[1].T))
    if has_fp8 and use_kernels:
        found += squared_product_fp8(x8, w8.T, x_scale * w_scale, one, x.dtype)
    elif has_fp8:
        post = squared_product(x8.float() * x_scale, w8.T.float() * w_scale)
        found += [post, to_fp8(post, E4M3, one)[0], post.max()]
    return found


def time_mlp(cfg: Config, device: torch.device, dtype: torch.dtype) -> float:
    """Time of squared_product() of both kinds by our kernel, over that of plain PyTorch, compiled."""
    hidden = cfg.mlp_ratio * cfg.model_dim
    if not can_fuse_mlp(8192, cfg.model_dim, hidden):
        return math.inf
    x, w, post = (torch.randn(shape, device=device).to(dtype) for shape in (
        (8192, cfg.model_dim), (cfg.model_dim, hidden), (8192, hidden)))
    post, times = post.abs(), []
    for use_kernels in (True, False):
        form = torch.compile(functools.partial(squared_product, use_kernels=use_kernels), dynamic=False)
        for given in ((x, w), (x, w, post)):
            form(*given)
            best = math.inf
            for _ in range(5):
                start = clock(device)
                for _ in range(10):
                    form(*given)
                best = min(best, clock(device) - start)
            times.append(best)
    return sum(times[:2]) / sum(times[2:])


@contextmanager
def explain_memory(cfg: Config):
    """Turn an out-of-memory error into an InputError that names the option."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        smaller = max(128, cfg.micro_batch_tokens // 2 // 128 * 128)
        rows = f" --seq_len={smaller}" if cfg.seq_len > smaller else ""
        raise InputError(f"out of memory with --micro_batch_tokens={cfg.micro_batch_tokens}: try "
                         f"--micro_batch_tokens={smaller}{rows} "
                         f"(or --val_seq_len={max(128, cfg.val_seq_len // 2)})", of_one_rank=True) from error


def read_peak_memory_mib(rt: Runtime) -> int:
    """Most memory in use: while training by the GPU's allocator; on CPU ever by the whole process."""
    if rt.device.type == "cuda":
        return torch.cuda.max_memory_allocated(rt.device) >> 20
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)


# PyTorch 2.13 renamed these two
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce_sum(tensor: Tensor, rt: Runtime) -> Tensor:
    if rt.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast(tensor: Tensor, rt: Runtime) -> None:
    if rt.world_size > 1:
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)  # NCCL lacks int16


def broadcast_object(value, rt: Runtime):
    """Rank 0's value, a plain Python object, on every rank."""
    box = [value]
    if rt.world_size > 1:
        dist.broadcast_object_list(box, src=0, group=rt.control)
    return box[0]


def barrier(rt: Runtime) -> None:
    if rt.world_size > 1:
        dist.barrier(group=rt.control)


def local_shard(full: Tensor, rt: Runtime) -> Tensor:
    """This rank's (M/N, ...) view of (M, ...)."""
    return full.unflatten(0, (rt.world_size, -1))[rt.rank]


def gather_shards(shard: Tensor, rt: Runtime) -> Tensor:
    """All ranks' (M/N, ...) as (M, ...), on every rank."""
    if rt.world_size == 1:
        return shard
    full = shard.new_empty(rt.world_size * len(shard), *shard.shape[1:])
    all_gather_single(full.view(torch.uint8), shard.contiguous().view(torch.uint8))
    return full


def set_timeout(rt: Runtime, timeout: datetime.timedelta) -> None:
    """How long a rank waits from now on for the others in a collective of a step."""
    for group in (dist.group.WORLD, rt.gathers) if rt.world_size > 1 else ():
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def start_exchange(sent: Tensor, send_counts: list[int], receive_counts: list[int]
                   ) -> tuple[Tensor, dist.Work]:
    """Give every rank its number of rows of a tensor, in the order of ranks: (what arrives, when it has)."""
    arriving = sent.new_empty(sum(receive_counts), *sent.shape[1:])
    work = dist.all_to_all_single(arriving.view(torch.uint8), sent.contiguous().view(torch.uint8),
                                  receive_counts, send_counts, async_op=True)
    return arriving, work


def share_errors(body: Callable, rt: Runtime):
    """Do what rank 0 may find impossible; its InputError is raised on every rank, which else would wait."""
    result, problem = None, ""
    try:
        result = body()
    except InputError as error:
        problem = str(error)
    problem = broadcast_object(problem, rt)
    if problem:
        raise InputError(problem)
    return result


def is_first_to_say(key: str) -> bool:
    """Whether no other rank of the job has asked with this key: so that one line is printed, not N."""
    answers = []

    def ask() -> None:
        with suppress(RuntimeError):  # the store may be gone, too
            answers.append(dist.distributed_c10d._get_default_store().add(f"train_gpt/{key}", 1) == 1)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(5)  # where rank 0 holds the store, it may be frozen with it
    return all(answers) if answers else "TORCHELASTIC_RUN_ID" in os.environ or env_int("RANK", 0) == 1


class HostCopy:
    """A copy of a tensor on its way to the CPU, into one that is there or a new one; the tensor may change
    at once."""

    PINNED = 2**20  # most bytes that are pinned for one copy: pinning takes a second for 5 GB

    def __init__(self, tensor: Tensor, out: Tensor | None = None):
        tensor, self.event = tensor.detach(), None
        is_cuda = tensor.device.type != "cpu"
        self.copy = out if out is not None else torch.empty_like(
            tensor, device="cpu", pin_memory=is_cuda and tensor.nbytes <= self.PINNED)
        self.copy.copy_(tensor, non_blocking=True)
        if is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def read(self) -> Tensor:
        if self.event:
            self.event.synchronize()
        return self.copy


class Stop:
    """A wish to end early: the exit status it asks for, else 0. All ranks heed it after the same step."""

    TIME_LIMIT, GUARD = 124, 3  # exit statuses
    CAUSES = {130: "by SIGINT", 143: "by SIGTERM", 129: "by SIGHUP", TIME_LIMIT: "at its time limit",
              GUARD: "by the guard"}

    def __init__(self, rt: Runtime, argv: Iterable[str] = (), time_limit: float = 0.0):
        self.rt, self.argv, self.time_limit = rt, argv, time_limit or math.inf
        self.started, self.wish, self.agreed, self.work = time.monotonic(), 0, 0, None

    @contextmanager
    def catch_signals(self):
        """Turn SIGINT, SIGTERM and SIGHUP, a lost terminal, into a wish; SIGINT again after a second
        interrupts. What is ignored, as SIGHUP under nohup, stays ignored."""
        first_at = math.inf

        def handle(signum: int, _frame) -> None:
            nonlocal first_at
            if signum == signal.SIGINT and time.monotonic() > first_at + 1:
                raise KeyboardInterrupt
            first_at = min(first_at, time.monotonic())
            self.wish = self.wish or 128 + signum

        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has two of them
                 if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
        old = {name: signal.signal(getattr(signal, name), handle) for name in names}
        try:
            yield
        finally:  # of several ranks they stay: the launcher's SIGTERM would cut off last words
            for name, handler in old.items() if self.rt.world_size == 1 else ():
                signal.signal(getattr(signal, name), handler)

    def agree(self) -> int:
        """The largest wish of all ranks. Every rank calls this after every step; wishes of others arrive a
        step later, so that nobody waits for them."""
        if time.monotonic() - self.started > self.time_limit:
            self.wish = self.wish or self.TIME_LIMIT
        if self.rt.world_size == 1:
            return self.wish
        self.collect()
        self.flag = torch.tensor(self.wish)
        self.work = dist.all_reduce(self.flag, dist.ReduceOp.MAX, group=self.rt.control, async_op=True)
        return self.agreed

    def collect(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work, self.agreed = None, self.agreed or int(self.flag)

    def end(self, status: int, where: str, checkpoints: Checkpoints) -> typing.NoReturn:
        """Raise RunStopped on every rank, with the command line that continues from the last checkpoint."""
        rt, argv = self.rt, list(self.argv)
        self.collect()
        path = checkpoints.wait() or next(iter(checkpoints.own), None)  # an older one, where that one failed
        path = broadcast_object(path, rt)
        barrier(rt)  # a launcher ends all ranks when the first one leaves
        remedy = "no checkpoint"
        if path:
            per_node = env_int("LOCAL_WORLD_SIZE", rt.world_size)
            nodes = f"--nnodes={rt.world_size // per_node} --rdzv_backend=c10d --rdzv_endpoint=HOST:PORT"
            nodes = nodes if rt.world_size > per_node else "--standalone"
            launcher = f"torchrun {nodes} --nproc_per_node={per_node}" if rt.world_size > 1 else "python"
            rest = [word for before, word in zip(("", *argv), argv)
                    if not word.startswith("--resume") and before != "--resume"]
            words = shlex.join([os.path.relpath(__file__), *rest, f"--resume={path}"])
            remedy = f"continue with: {launcher} {words}"
        raise RunStopped(f"stopped {self.CAUSES[status]} after {where}: {remedy}", status)

# ==== COMMAND LINE =========================================================================================
# From words to a Config: presets for small machines, --without and --depth, parsing, and every check of
# options that cannot work together. Whatever is wrong ends in one line that names the value and a remedy. To
# add a preset or a mechanism that can be switched off, add a line to PRESETS or MECHANISMS.

EMBEDDED_CORPUS = "data/torch_source"  # built on first use from the installed PyTorch: no download needed

# Small: what of it pays at that size (laptop, quick), and every mechanism (smoke_frontier)
LAPTOP_LAYERS = (  # attention to embeddings alone would learn to copy first, and no later layer better
    LayerSpec("none"), LayerSpec("short", True, 1, key_offset=True),
    LayerSpec("short", True, 0, 1, key_offset=True), LayerSpec("long", True, 1, 0, key_offset=True))


SMALL_LAYERS = (
    LayerSpec(paired=True, gates_at=0),
    LayerSpec("long", True, 0, key_offset=True, xsa=True, gate=True, gates_at=0),
    LayerSpec("short", True, 1, paired=True, gates_at=2), LayerSpec("none", skip_from=1, gates_at=2),
    LayerSpec("long", True, 2, attention_from=2, key_offset=True, gate=True, dc=True, gates_at=2,
              mudd_in="x_in,h2", mudd_out="x_in,h2,h3,ve0,h1"))


PRESETS = PRESETS | {
    "laptop_32": ("track_1", "record 32 in miniature: byte tokens, two CPU cores", dict(
        track="laptop",
        train_files=f"{EMBEDDED_CORPUS}/train_*.bin", val_files=f"{EMBEDDED_CORPUS}/val_*.bin",
        vocab_size=257, num_layers=5, num_heads=2, head_dim=96, model_dim=192, embed_dtype="float32",
        num_iterations=480, tokens_per_step=4096, seq_len=1024, micro_batch_tokens=2048, max_doc_len=1024,
        val_tokens=131_072, val_seq_len=8192, val_loss_every=80, warmup_iterations=1,
        momentum_warmup_steps=100, adam_eps=1e-2,  # small batches: below it a gradient is rounding noise
        grad_grid=2.0**-12, val_windows=(320, 128),
        stages=(Stage(1, 128, 64), Stage(1, 192, 64), Stage(1, 256, 128)))),
    "laptop": ("laptop_32", "the newest recipe in miniature: what of it pays at this size", dict(
        num_layers=4, num_heads=2, head_dim=64, model_dim=128, mlp_ratio=2, layers=LAPTOP_LAYERS,
        attention_scale=0.15, attention_gate_dim=0, vocab_multiple=16, bigram_rows=4096, zero_init="mlp",
        x0_shortcut="after", softcap=23.0, softcap_shift=5.0, matrix_rule="normuon", matrix_lr=0.07,
        matrix_betas=(0.9, 0.9), orthogonalize="polar_express", momentum_start=0.8, momentum_end=0.8,
        momentum_warmup_steps=0, embed_lr=0.3, embed_betas=(0.5, 0.95), head_betas=(0.5, 0.95),
        value_embed_lr=0.3, value_embed_betas=(0.75, 0.95), scalar_betas=(0.9, 0.99), warmup_iterations=0,
        num_iterations=720, tokens_per_step=2048, val_loss_every=120, row_start="anywhere")),
    "quick": ("laptop", "the same in half a minute, also on little text of your own", dict(
        num_iterations=260, epochs=100, val_tokens=40_960, val_loss_every=0)),
    "smoke": ("laptop_32", "seconds on any machine: what the tests run", dict(
        num_layers=4, num_heads=2, head_dim=32, model_dim=64, num_iterations=12, tokens_per_step=2048,
        seq_len=512, micro_batch_tokens=1024, max_doc_len=256, val_tokens=4096, val_seq_len=1024,
        val_loss_every=6, dtype="float32", momentum_warmup_steps=10)),
    "smoke_frontier": ("smoke", "the newest recipe with all its mechanisms, in seconds", dict(
        num_layers=5, layers=SMALL_LAYERS, bigram_rows=512, smear="on", softcap=23.0,
        softcap_shift=5.0, x0_shortcut="after", residual_init=1.1**0.5, zero_init="mlp",
        attention_gate_dim=0, tie_head="on", untie_frac=2 / 3, embed_std=0.02, value_embed_std=0.01,
        value_gate_dim=12, qk_group_heads=1, orthogonalize="polar_express", decay="cautious",
        decay_schedule="lr", mlp_up_lr_mul=2.0, mlp_down_lr_mul=4.0, matrix_rule="normuon",
        matrix_lr=0.06, matrix_betas=(0.9, 0.9), matrix_weight_decay=0.06 * 1.2, embed_lr=0.02,
        embed_betas=(0.5, 0.95), head_lr=0.02, head_betas=(0.5, 0.95), value_embed_betas=(0.75, 0.95),
        scalar_betas=(0.9, 0.99), extension_steps=2, momentum_warmup_steps=4, momentum_cooldown_steps=4,
        cooldown_frac=0.6, final_lr_frac=0.15, state_dtype="float32",
        **{f"{name}_every": 2 for name in GROUPS if name != "matrix"}, stages=(
            Stage(1, 128, 64, 1024, None, 1.0, 256, "1 0.5 0.25:0"), Stage(1, 192, 64, None, None, 1.5),
            Stage(1, 256, 128)))),
    "muonh": ("track_1", "Hyperball: matrices keep their norm, layers begin with zero gains", dict(
        matrix_rule="normuonh", orthogonalize="polar_express", output_gain="on", norm_gain="on",
        init_std=1.0, matrix_lr=0.02, matrix_cooldown_frac=1.0, cooldown_frac=0.3, final_lr_frac=0.0,
        embed_lr=0.3, value_embed_lr=0.3, head_lr=0.004)),
    **{f"d{depth}": ("track_1", f"{depth} layers, all else from that number (--depth)", dict(depth=depth))
       for depth in (12, 24, 26)},
    # Constants of the medium track's record 18 for what exists here, of its record 2 for all else: matrices
    # (there NorMuon), embedding and head (there tied at first), whose rates record 18's stages double.
    "track_2": ("track_1", "the medium track: 16 layers of 1024 channels, FineWeb, 2.92 on 8xH100", dict(
        track="track_2", num_layers=16, num_heads=8, model_dim=1024, attention_gate_dim=16,
        num_value_embeds=5, fp8_head="off", yarn_max_window=1664,
        layers=tuple(LayerSpec(attention="long" if i in (0, 4, 11, 15) else "short",
                               value_embed=i if i < 5 else i - 11 if i > 10 else None,
                               skip_from={9: 6, 10: 4, 11: 2}.get(i)) for i in range(16)),
        num_iterations=7500, tokens_per_step=524_288, seq_len=16_384, micro_batch_tokens=65_536,
        max_doc_len=4096, val_seq_len=65_536, cooldown_frac=0.7,
        matrix_lr=0.025 / 2, embed_lr=0.3 / 2, head_lr=0.003 / 2, value_embed_lr=0.3,
        val_windows=(3456, 1408),
        stages=(Stage(1, 384, 128, 131_072), Stage(1, 896, 384, 262_144, lr_factor=1.52),
                Stage(1, 1408, 640, 393_216, lr_factor=1.73),
                *(Stage(1, 128 * blocks, 128 * min(11, blocks // 2), lr_factor=2.0)
                  for blocks in (13, 15, 17, 19, 21, 23, 23, 23, 23))))),
}


def change(where: str | None = None, **new) -> Callable:
    """A function that changes every LayerSpec or Stage of a tuple, or every layer with that attention."""
    return lambda items: tuple(dataclasses.replace(item, **new)
                               if where in (None, getattr(item, "attention", None)) else item
                               for item in items)


# What --without switches off, and how; a function is applied to the option's value
MECHANISMS: dict[str, dict] = {
    "muon": dict(matrix_rule="adamw", matrix_lr=0.0018),
    "momentum_warmup": dict(momentum_warmup_steps=0),
    "momentum_cooldown": dict(momentum_cooldown_steps=0),
    "cooldown": dict(cooldown_frac=0.0, matrix_cooldown_frac=-1.0),
    "polar_express": dict(orthogonalize="newton_schulz"),
    "variance": dict(matrix_rule=lambda rule: rule.removeprefix("nor")),
    "decay": {f"{name}_weight_decay": 0.0 for name in GROUPS},
    "cautious_decay": dict(decay="decoupled"),
    "adam_odd_steps": {f"{name}_every": 1 for name in GROUPS},
    "mantissas": dict(matrix_dtype="float32"),
    "qk_groups": dict(qk_group_heads=0),
    "tied_head": dict(tie_head="off"),
    "untied_head": dict(tie_head="on", untie_frac=1.0, embed_std=0.02, head_lr=0.0036),
    "zero_init": dict(zero_init="off"),
    "qk_norm": dict(qk_norm="off"),
    "yarn": dict(yarn_max_window=0),
    "attention_gate": dict(attention_gate_dim=0, layers=change(gate=False)),
    "value_embeds": dict(num_value_embeds=0, layers=lambda layers: tuple(dataclasses.replace(
        spec, value_embed=None, **{field: ",".join(
            name for name in split_names(getattr(spec, field)) if not name.startswith("ve"))
            for field in ("mudd_in", "mudd_out")}) for spec in layers)),
    "value_gates": dict(value_gate_dim=0),
    "x0_shortcut": dict(x0_shortcut="off"),
    "residual_weights": dict(residual_init=0.0),
    "skips": dict(layers=change(skip_from=None)),
    "smear": dict(smear="off"),
    "key_offset": dict(layers=change(key_offset=False)),
    "bigram": dict(bigram_rows=0),
    "paired_heads": dict(layers=change(paired=False)),
    "attention_from": dict(layers=change(attention_from=None)),
    "xsa": dict(layers=change(xsa=False)),
    "mudd": dict(layers=change(mudd_in="", mudd_out="")),
    "mudd_gates": dict(layers=change(gates_at=None)),
    "dc": dict(layers=change(dc=False)),
    "short_windows": dict(layers=change("short", attention="long")),
    "window_warmup": dict(stages=lambda stages: change(
        window_long=stages[-1].window_long, window_short=stages[-1].window_short)(stages)),
    "batch_warmup": dict(stages=change(tokens_per_step=None, seq_len=None, lr_factor=1.0)),
    "multi_token": dict(stages=change(loss_weights="1")),
    "prefix_loss": dict(stages=change(prefix_weight="0")),
    "dropped_attention": dict(layers=change("none", attention="long")),
    "dropped_mlp": dict(layers=change(mlp=True)),
    "document_mask": dict(document_mask="off"),
    "document_rows": dict(row_start="anywhere"),
    "softcap": dict(softcap=0.0),
    "logit_shift": dict(softcap=lambda top: 30.0 if top else top, softcap_shift=0.0),
    "fp8_head": dict(fp8_head="off"),
    "fp8_mlp": dict(fp8_mlp="off"),
}


def scale_by_depth(values: dict, tokens_per_step: int | None) -> dict:
    """Options of a model of `depth` layers of 64 channels each, trained on tokens_per_param.

    Batch (tokens), rates and decay follow from the size against that of 12 layers. A rule that keeps norms
    has the gains and schedules of preset muonh, no decay, and smaller updates the deeper the model. Of the
    published recipe betas and decay of each Adam group and momentum's fall at the end are left out. Source:
    nanochat, and MuonH of 2026-02-03.
    """
    depth, rule = values["depth"], values["matrix_rule"]

    widths = {layers: -(-64 * layers // 128) * 128 for layers in (depth, 8, 12)}
    sizes = {layers: width * (12 * layers * width + values["vocab_size"])
             for layers, width in widths.items()}
    width, num_params, least = widths[depth], sizes[depth], max(sizes[depth], sizes[8])
    batch, least_batch = (tokens_per_step or 2 ** round(math.log2(2**19 * (size / sizes[12]) ** 0.383))
                          for size in (num_params, least))
    decay = 0.28 * (least_batch / 2**19) ** 0.5 * sizes[12] / least  # the rule explodes below 8 layers
    batch_scale, width_scale = (batch / 2**19) ** 0.5, (width / 768) ** -0.5
    num_iterations = max(1, int(values["tokens_per_param"] * num_params / batch))
    is_muon, keeps_norm = "muon" in rule, RULES[rule].keeps_norm
    recipe = PRESETS["muonh"][2] if keeps_norm else dict(
        lr_warmup_frac=min(0.1, 40 / num_iterations), cooldown_frac=0.65, final_lr_frac=0.05,
        momentum_end=0.97, momentum_warmup_steps=400, decay="cautious", decay_schedule="cosine",
        matrix_weight_decay=decay if is_muon else 0.0, mlp_up_lr_mul=2.0 if is_muon else 1.0,
        embed_lr=0.3, value_embed_lr=0.15, head_lr=0.008)
    rates = {name: recipe[name] * width_scale * batch_scale
             for name in ("embed_lr", "value_embed_lr", "head_lr")}
    matrix_lr = (0.02 if is_muon else RULES[rule].lr) * (12 / depth if keeps_norm else 1)
    return {**recipe, **rates, **dict(
        num_layers=depth, model_dim=width, head_dim=128, num_heads=width // 128, num_value_embeds=depth,
        layers=tuple(LayerSpec(attention="long" if i % 4 == 3 or i == depth - 1 else "short",
                               value_embed=i if (depth - 1 - i) % 2 == 0 else None) for i in range(depth)),
        stages=(Stage(1, 2048, 512),), val_windows=(), seq_len=16_384, micro_batch_tokens=32_768,
        max_doc_len=2048, tokens_per_step=batch, num_iterations=num_iterations, matrix_rule=rule,
        matrix_lr=matrix_lr * batch_scale, scalar_lr=0.04 * batch_scale, gain_lr=0.1 * batch_scale,
        adam_eps=1e-10 * GRAD_TOKENS)}


def parse_value(field: dataclasses.Field, text: str):
    """Turn the text of --name=text into the field's type; InputError says what was expected."""
    try:
        kind = TYPES[field.name]
        if kind in (int, float, str):
            return kind(text)
        element = typing.get_args(kind)[0]
        if not dataclasses.is_dataclass(element):
            first, second = text.split(",") if text else (None, None)
            return (element(first), element(second)) if text else ()

        # LayerSpecs or Stages from plain JSON
        items, hints = json.loads(text), typing.get_type_hints(element)
        if not isinstance(items, list):
            raise ValueError("a list is needed")
        for item in items:
            if not isinstance(item, dict):
                raise ValueError(f"{item} is not an object")
            for name, value in item.items():
                hint = int | float if hints.get(name) is float else hints.get(name, object)
                is_boolean = isinstance(value, bool) and hint is not bool
                if is_boolean or not isinstance(value, hint) or value in (math.inf, math.nan):
                    raise ValueError(f"{name}={value!r}")
        return tuple(element(**item) for item in items)
    except (ValueError, TypeError, RecursionError) as error:
        name, example = {int: "whole number", float: "number"}.get(kind, "list"), field.default
        if field.name in ("layers", "stages"):  # an object's first three entries show what they are like
            entries = dataclasses.asdict(example[0] if example else LayerSpec())
            example = json.dumps([dict(itertools.islice(entries.items(), 3))])
        text = text if len(text) < 100 else f"{text[:100]}..."
        reason = f" ({str(error)[:200]})" if name == "list" else ""
        raise InputError(f"--{field.name}={text} is not a {name}{reason}: give one like "
                         f"{show_value(example)}") from None


def show_value(value) -> str:
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return json.dumps([dataclasses.asdict(item) for item in value])
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def list_choices(field: dataclasses.Field) -> tuple[str, ...]:
    choices = field.metadata["choices"] or ()
    return choices() if callable(choices) else choices


def check_value(name: str, value) -> None:
    """Raise InputError where a value leaves its option's type, range or choices."""
    low, high = (OPTIONS[name].metadata[key] for key in ("low", "high"))
    choices, kind = list_choices(OPTIONS[name]), TYPES[name]
    if kind in (int, float, str) and not isinstance(value, int | float if kind is float else kind):
        raise InputError(f"--{name}={str(value)[:60]} is not of type {kind.__name__}: give one that is")
    if choices and value not in choices:
        raise InputError(f"--{name}={value} is not one of {', '.join(choices)}: choose one of them")
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, (int, float)):
            continue
        for problem, remedy in ((not math.isfinite(number), "is not finite: give an ordinary number"),
                                (low is not None and number < low, f"is too small: give at least {low}"),
                                (high is not None and number > high, f"is too large: give at most {high}")):
            if problem:
                raise InputError(f"--{name}={show_value(value)[:50]} {remedy}")


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    matches = [prefix + match for match in difflib.get_close_matches(name, list(known), n=3)]
    return f"did you mean {' or '.join(matches)}?" if matches else "see --help"


class Parser(argparse.ArgumentParser):
    """One whose errors are InputErrors."""

    def error(self, message: str) -> typing.NoReturn:
        raise InputError(f"{message}: see --help")


def parse_argv(argv: list[str]) -> tuple[dict, set[str]]:
    """Split a command line into ({option: value}, {flags among list_presets, print_config}). The parser is
    made of the fields of the config."""
    parser = Parser("train_gpt.py", "%(prog)s [--option=value ...]    (or torchrun ..., or ./run.sh)",
                    "Defaults are those of --preset=track_1. '-' and '_' are the same in names.",
                    argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--list_presets", action="store_true", help="the presets and what they are")
    parser.add_argument("--print_config", action="store_true",
                        help="the resolved config as JSON; touches no data")
    for part in CONFIG_PARTS:
        section = parser.add_argument_group(part.__doc__.strip().rstrip("."))
        for field in dataclasses.fields(part):
            meta, is_json = field.metadata, field.name in ("layers", "stages")
            kind = {int: "INT", float: "FLOAT", str: "TEXT"}.get(TYPES[field.name], "A,B")
            kind = "|".join(list_choices(field)) or kind
            shown = [] if is_json or field.default == "" else [f"[{show_value(field.default)}]"]
            bounds = (("at least", meta["low"]), ("at most", meta["high"]))
            shown += [f"{word} {bound}" for word, bound in bounds if bound not in (None, 2**31 - 1)]
            section.add_argument(f"--{field.name}", type=functools.partial(parse_value, field),
                                 metavar="JSON" if is_json else kind, help=" ".join((meta["help"], *shown)))

    # '-' and '_' are the same in names.
    words = []
    for word in argv:
        name, equals, text = word.partition("=")
        words.append(f"--{name[2:].replace('-', '_')}{equals}{text}" if word.startswith("--") else word)
    values, unknown = parser.parse_known_args(words)
    for word in unknown:
        name = word.partition("=")[0]
        raise InputError(f"{name} is not an option: {suggest(name.lstrip('-'), OPTIONS, '--')}")
    flags = {flag for flag in ("list_presets", "print_config") if flag in values}
    return {name: value for name, value in vars(values).items() if name not in flags}, flags


def make_config(overrides: dict) -> Config:
    """Preset, overrides, what --without takes away, layers by pattern; InputError where they do not fit."""
    name = overrides.get("preset", "auto")
    for key, value in overrides.items():
        check_value(key, value)
    if name == "auto":
        use_cuda = overrides.get("device", "auto") != "cpu" and torch.cuda.is_available()
        name = "track_1" if use_cuda else "laptop"
    if name not in PRESETS:
        raise InputError(f"--preset={name} is not a preset: {suggest(name, PRESETS)} (--list_presets)")
    preset, ancestor = {}, name
    while ancestor:  # its parents' changes, where it makes none of its own
        ancestor, _, changes = PRESETS[ancestor]
        preset = {**changes, **preset}
    preset = {**vars(Config()), **preset}
    values = {**preset, **overrides, "preset": name}
    if values["depth"]:
        if values["tokens_per_param"] != Config.tokens_per_param and "num_iterations" in overrides:
            raise InputError(f"--tokens_per_param={values['tokens_per_param']} and --num_iterations="
                             f"{values['num_iterations']} both say how long to train: give one of them")
        preset = {**preset, **scale_by_depth(values, overrides.get("tokens_per_step"))}
        values = {**preset, **overrides, "preset": name}
    elif "matrix_lr" not in overrides:
        # Where no rate is given: that of the preset, or where the rule is another, one that suits it. Of
        # rules that keep norms it is smaller the deeper the model (MuonH).
        rule, old_rule, num_layers = values["matrix_rule"], preset["matrix_rule"], values["num_layers"]
        is_like = rule == old_rule or {rule, old_rule} == {"muon", "normuon"}
        values["matrix_lr"] = preset["matrix_lr"] if is_like else RULES[rule].lr
        if RULES[rule].keeps_norm:
            values["matrix_lr"] *= preset["num_layers"] / num_layers if is_like else min(1, 12 / num_layers)
    if values["layers"] and "layers" not in overrides and len(values["layers"]) != values["num_layers"]:
        raise InputError(f"--num_layers={values['num_layers']}: preset {name} has {len(values['layers'])} "
                         "layers, each with mechanisms of its own: give the others with --layers, too")
    values["layers"] = values["layers"] or build_layers(values["num_layers"], values["num_value_embeds"])

    # What --without and --only_with switch off. An option that is given beside them wins.
    named = {field: split_names(values[field]) for field in ("without", "only_with")}
    for field, names in named.items():
        for mechanism in set(names) - set(MECHANISMS):
            raise InputError(f"--{field}={values[field]}: {mechanism} is not a mechanism: "
                             f"{suggest(mechanism, MECHANISMS)} (--list_presets)")
    kept, before = named["only_with"] or MECHANISMS, dict(values)
    for mechanism in MECHANISMS:
        is_kept = mechanism in kept and mechanism not in named["without"]
        if is_kept and mechanism not in named["only_with"]:
            continue
        changes = {key: new if callable(new) else lambda _value, new=new: new
                   for key, new in MECHANISMS[mechanism].items()
                   if key not in overrides or key in ("layers", "stages")}
        if len(changes) == len(MECHANISMS[mechanism]) and all(
                change(before[key]) == before[key] for key, change in changes.items()):
            for field in [field for field, names in named.items() if mechanism in names]:
                raise InputError(f"--{field}={values[field]}: preset {name} has no {mechanism}: leave it "
                                 "out")
            continue
        if is_kept:
            continue
        values.update({key: change(values[key]) for key, change in changes.items()})
    for key, value in values.items():
        check_value(key, value)
    cfg = Config(**values)
    check_config(cfg)
    return cfg


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples on both sides of a value, for an error message."""
    around = value // unit * unit, -(-value // unit) * unit
    return f"the nearest are {' and '.join(str(v) for v in around if v > 0)}"


def check_config(cfg: Config) -> None:
    """Raise InputError for options that cannot work together, or that would do nothing."""
    matrix, width = cfg.groups["matrix"], cfg.num_heads * cfg.head_dim
    keeps_norm, rule = RULES[matrix.rule].keeps_norm, f"--matrix_rule={matrix.rule} keeps norms"
    lengths = [("seq_len", stage.seq_len) for stage in (cfg, *cfg.full_stages)]
    multiples = [("head_dim", cfg.head_dim, 4, "4 (half of the rotary pairs rotate)"),
                 ("num_heads", cfg.num_heads, cfg.qk_group_heads or 1,
                  f"qk_group_heads={cfg.qk_group_heads}"),
                 ("value_gate_dim", cfg.value_gate_dim or 2, 2, "2 (half reads the table)"),
                 *((name, length, BLOCK, "128 tokens (one attention block)")
                   for name, length in (*lengths, ("val_seq_len", cfg.val_seq_len))),
                 ("val_tokens", cfg.val_tokens, cfg.val_seq_len, f"val_seq_len={cfg.val_seq_len}"),
                 *(("tokens_per_step", stage.tokens_per_step, stage.seq_len, f"seq_len={stage.seq_len}")
                   for stage in cfg.full_stages)]
    longest = max((stage.seq_len for stage in cfg.full_stages), default=0)
    checks = [
        (cfg.extension_steps == 0 or cfg.extension_steps < cfg.num_iterations and len(cfg.stages) > 1,
         f"--extension_steps={cfg.extension_steps} are those of the last of several stages, and the last of "
         f"--num_iterations={cfg.num_iterations}: give fewer, and two stages or more"),
        (cfg.bigram_rows not in (1, 2), f"--bigram_rows={cfg.bigram_rows} is no table: give 0, or many"),
        (cfg.model_dim == width, f"--model_dim={cfg.model_dim} is not num_heads * head_dim = "
                                 f"{cfg.num_heads} * {cfg.head_dim}: set --model_dim={width}"),
        (cfg.attention_gate_dim <= cfg.model_dim, f"--attention_gate_dim={cfg.attention_gate_dim} is wider "
                                                  f"than the model: give at most {cfg.model_dim}"),
        *((re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,99}", name) is not None,
           f"--{field}={name[:100]} is not a plain name: use at most 100 lower-case letters, digits, '_', "
           "'-' and '.'") for field, name in (("record", cfg.record or "none"), ("track", cfg.track))),
        *((value > 0 and value % unit == 0,
           f"--{name}={value} is not a multiple of {what}: {nearest_multiples(value, unit)}")
          for name, value, unit, what in multiples),
        (not (keeps_norm and matrix.weight_decay), f"--matrix_weight_decay={matrix.weight_decay} has no "
                                                   f"effect, {rule}: give --matrix_weight_decay=0"),
        (cfg.zero_init != "off" or not cfg.has_output_gain,
         "--zero_init=off has no effect where layers begin with zero gains: give --output_gain=off"),
        (cfg.depth > 0 or cfg.tokens_per_param == Config.tokens_per_param,
         f"--tokens_per_param={cfg.tokens_per_param} has no effect without --depth: give --depth too"),
        (math.frexp(cfg.grad_grid)[0] in (0.0, 0.5), f"--grad_grid={cfg.grad_grid} is not a power of two: "
                                                     f"give {2.0 ** round(math.log2(cfg.grad_grid or 1))}"),
        (cfg.micro_batch_tokens >= longest,
         f"--micro_batch_tokens={cfg.micro_batch_tokens} is less than one packed sequence, seq_len={longest}"
         + (f": give --micro_batch_tokens={longest}, or shorten seq_len in --stages" if longest > cfg.seq_len
            else f": shorten it too: --seq_len={cfg.micro_batch_tokens // BLOCK * BLOCK}")),
        (len(cfg.stages) > 0, "--stages is empty: give at least one stage"),
        *((len(group.betas) == 2, f"--{name}_betas is empty: give two numbers as a,b")
          for name, group in cfg.groups.items()),
        (cfg.val_windows == tuple(sorted(cfg.val_windows, reverse=True)),
         f"--val_windows={show_value(cfg.val_windows)} has the short window first: give long,short"),
    ]
    for stage in cfg.stages:
        try:
            are_ramps = parse_ramps(stage.loss_weights) and len(parse_ramps(stage.prefix_weight)) == 1
        except ValueError:
            are_ramps = False
        checks += [
            (bool(are_ramps), f"--stages has loss_weights={stage.loss_weights!r}, prefix_weight="
                              f"{stage.prefix_weight!r}: give numbers, or a:b, with spaces between; one to "
                              "prefix_weight"),
            (0 < stage.duration < 1e9 and 0 <= stage.lr_factor < 1e9,
             f"--stages has a duration or lr_factor out of range: {stage}: give a positive one"),
            (1 <= stage.window_short <= stage.window_long < 2**31,
             f"--stages has windows short {stage.window_short}, long {stage.window_long}: give 1 <= short "
             "<= long")]
        for name, least in (("max_doc_len", 2), ("tokens_per_step", BLOCK), ("seq_len", BLOCK)):
            value = getattr(stage, name)
            checks += [(value is None or least <= value < 2**31,
                        f"--stages has {name}={value}: give {least} or more")]

    checks += [(len(cfg.layers) == cfg.num_layers, f"--layers has {len(cfg.layers)} layers, num_layers is "
                f"{cfg.num_layers}: set --num_layers={len(cfg.layers)}"),
               (cfg.segments <= cfg.num_layers, f"--segments={cfg.segments} is more than the "
                f"{cfg.num_layers} layers: give at most --segments={cfg.num_layers}")]
    used = {f"ve{spec.value_embed}" for spec in cfg.layers if spec.value_embed is not None}
    for i, spec in enumerate(cfg.layers):
        has, known = f"--layers: layer {i} has", {"x_in", *(f"h{earlier}" for earlier in range(i)), *used}
        for name, last in (("skip_from", i - 1), ("attention_from", i - 1), ("gates_at", i)):
            value = getattr(spec, name)
            checks += [(value is None or 0 <= value <= last, f"{has} {name}={value}: name an earlier layer")]
        checks += [
            (spec.attention in ("long", "short", "none"),
             f"{has} attention={spec.attention}: choose long, short or none"),
            (spec.value_embed is None or 0 <= spec.value_embed < cfg.num_value_embeds,
             f"{has} value_embed={spec.value_embed}: num_value_embeds is {cfg.num_value_embeds}"),
            (not spec.paired or cfg.num_heads % 2 == 0,
             f"{has} paired heads: num_heads is {cfg.num_heads}, give an even number"),
            (not spec.mudd_in or spec.attention != "none",
             f"{has} mudd_in={spec.mudd_in} and no attention, whose values it enters: give one of them"),
            (known.issuperset(split_names(f"{spec.mudd_in},{spec.mudd_out}")),
             f"{has} mudd_in={spec.mudd_in}, mudd_out={spec.mudd_out}: choose among "
             f"{', '.join(sorted(known))}")]
    for holds, message in checks:
        if not holds:
            raise InputError(message)


def split_rows(cfg: Config, world_size: int, tokens_per_step: int, seq_len: int | None = None
               ) -> tuple[int, int]:
    """Split a step's packed sequences over ranks: (micro-batches per rank, sequences per micro-batch).

    The sequences themselves never depend on this split, so neither ranks nor accumulation change what a step
    sees.
    """
    seq_len = seq_len or cfg.seq_len
    rows = tokens_per_step // seq_len
    if rows % world_size:
        per_rank, left = divmod(tokens_per_step, world_size)
        shorter = [n for n in range(BLOCK, min(seq_len, per_rank) + 1, BLOCK) if per_rank % n == 0]
        remedy = "" if left or not shorter else f"; or keep it and give --seq_len={shorter[-1]}"
        raise InputError(
            f"--tokens_per_step={tokens_per_step} is {rows} packed sequences of seq_len={seq_len}, "
            f"which {world_size} ranks cannot share: "
            f"{nearest_multiples(tokens_per_step, seq_len * world_size)}{remedy}")
    rows_per_rank = rows // world_size
    most = cfg.micro_batch_tokens // seq_len
    rows_per_micro = max(r for r in range(1, min(most, rows_per_rank) + 1) if rows_per_rank % r == 0)
    return rows_per_rank // rows_per_micro, rows_per_micro


def check_ranks_fit(cfg: Config, world_size: int) -> tuple[int, int]:
    """Raise InputError where the ranks cannot share some stage's step; returns split_rows() of the last."""
    return [split_rows(cfg, world_size, stage.tokens_per_step, stage.seq_len)
            for stage in cfg.full_stages][-1]


def derive(cfg: Config, world_size: int) -> dict:
    """Numbers that follow from the config: --print_config and the run record show them."""
    grad_accum_steps, rows_per_micro = check_ranks_fit(cfg, world_size)
    with torch.device("meta"):
        num_params = sum(p.numel() for name, p in GPT(cfg).named_parameters()
                         if name != "embed" or cfg.tie_head == "off" or cfg.untie_frac < 1)
    schedule = Schedule(cfg)
    return dict(num_params=num_params, flops_per_token=count_flops(cfg), grad_accum_steps=grad_accum_steps,
                ranks=world_size, tokens_per_rank=cfg.tokens_per_step // world_size,
                tokens_per_micro_batch=rows_per_micro * cfg.full_stages[-1].seq_len,
                padded_vocab_size=cfg.padded_vocab_size, train_tokens=schedule.total_tokens(),
                scheduled_steps=schedule.scheduled, stage_ends=[end for _, _, end in schedule.spans()])


def count_flops(cfg: Config) -> int:
    """FLOPs of forward and backward per training token: 6 per matmul weight, 12 per channel and key."""
    attending = [spec for spec in cfg.layers if spec.attention != "none"]
    num_mlp = sum(spec.mlp for spec in cfg.layers)
    weights = cfg.model_dim * (4 * cfg.model_dim * len(attending)
                               + 2 * cfg.mlp_ratio * cfg.model_dim * num_mlp + cfg.padded_vocab_size)
    keys = tokens = 0.0
    for stage, start, end in Schedule(cfg).spans():
        weight, longest = (end - start) * stage.tokens_per_step, stage.seq_len
        if cfg.row_start == "document" and cfg.document_mask == "on":
            longest = min(longest, stage.max_doc_len)
        keys += weight * sum(min(getattr(stage, f"window_{spec.attention}"), longest) for spec in attending)
        tokens += weight
    return round(6 * weights + 12 * cfg.model_dim * keys / tokens)


def plain_dict(cfg: ModelConfig) -> dict:
    """Every option of a config, or of a part of it, as plain JSON types."""
    return json.loads(json.dumps({name: getattr(cfg, name) for name in OPTIONS if hasattr(cfg, name)},
                                 default=vars))


def config_from_dict(values: dict) -> Config:
    """The inverse of plain_dict(), for what a checkpoint or a result says: names that are no options here
    are left out, options that were not there yet have their defaults; InputError for what is no value."""
    known = {name: parse_value(OPTIONS[name], json.dumps(value)) if name in ("layers", "stages") else
             tuple(value) if isinstance(value, list) else value
             for name, value in values.items() if name in OPTIONS}
    for name, value in known.items():
        check_value(name, value)
    return Config(**known)

# ==== RUN RECORD ===========================================================================================
# What a run leaves: the script, a log, a json of its result, and measurements on request. Rank 0 alone
# writes. Files appear under their name only when they are whole, and nothing is replaced that this program
# did not write. The formats are in records/README.md.

# Facts of the machine that seeds of a record have in common: times are compared, and on a CPU bits
MACHINE_FACTS = ("device", "ranks", "cpu", "threads", "gpu", "activations", "simd", "torch")
# Options that change neither weights nor losses: they may differ between the seeds of a record
FREE_OPTIONS = {"seed", "records_dir", "logs_dir", "checkpoint_dir", "checkpoint_every", "resume",
                "time_limit", "telemetry_every"}


@contextmanager
def lock_folder(folder: Path, message: str, is_patient: bool = False):
    """Make a folder and keep other processes from locking it, too; InputError, or patience, where one has. A
    folder made here that is left empty is taken away again.

    The lock ends with the process, however it ends. Where there are no locks, as on Windows, nobody waits.
    """
    made, is_same = [path for path in (folder, *folder.parents) if not path.exists()], False
    while not is_same:  # another process may take an empty folder away before it is locked
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY) if fcntl else None
        with suppress(OSError):  # of a file system without locks
            try:
                if fcntl:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if is_patient else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                raise InputError(message, of_one_rank=True) from None
        is_same = not fcntl or folder.exists() and os.path.samestat(os.fstat(descriptor), os.stat(folder))
        if not is_same:
            os.close(descriptor)
    try:
        yield
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        if fcntl:
            os.close(descriptor)


def show_bar() -> bool:
    return sys.stderr.isatty() and env_int("RANK", 0) == 0


def write_atomic(path: Path, data: bytes | Callable[[typing.BinaryIO], None]) -> None:
    """Write a file, by bytes or a function, under a temporary name, sync it, rename it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            data(file) if callable(data) else file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # the new name survives a power cut only once the folder is synced
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def check_writable(folder: Path, remedy: str) -> None:
    """Raise InputError where a folder cannot be made: tries it beside its place, and leaves nothing."""
    folder = Path(os.path.abspath(folder))  # ".." behind what is not there yet
    place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    try:
        with tempfile.TemporaryDirectory(dir=place) as trial:
            Path(trial, folder.relative_to(place), "a file").mkdir(parents=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{str(folder)[:200]} cannot be written ({reason}): {remedy}") from None


@functools.cache
def read_script() -> bytes:
    """This file as it was when the run began: it may be edited meanwhile."""
    return Path(__file__).read_bytes()


def hash_script() -> str:
    return hashlib.sha256(read_script()).hexdigest()


def check_record(cfg: Config, folder: Path, machine: dict | None = None) -> str:
    """Raise InputError where a record folder holds runs of another script, or of other options or another
    machine than these; returns the type of its activations, or nothing where there is no run yet."""
    script = folder / "train_gpt.py"
    if script.exists() and script.read_bytes() != read_script():
        raise InputError(f"--record={cfg.record} is taken by another script ({script}): choose another name")
    for path in sorted(folder.glob("*.json"))[:1]:
        try:
            result = json.loads(path.read_text())
            others = list_differences(config_from_dict(result["config"]), cfg, FREE_OPTIONS)
            theirs, activations = result["hardware"], result["hardware"]["activations"]
            if machine:
                if result.get("corpus_fingerprint") != machine.get("corpus_fingerprint"):
                    others.append("its data were others")
                ours = {**machine["hardware"], "torch": machine["versions"]["torch"]}
                theirs = {**theirs, "torch": result["versions"]["torch"]}
                others += [f"{name} was {theirs[name]}, here {ours.get(name)}" for name in MACHINE_FACTS
                           if name in theirs and theirs[name] != ours.get(name)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path} is no result of a run ({type(error).__name__}: {error}): mend it, or "
                             f"choose another name than --record={cfg.record}") from None
        if others:
            raise InputError(f"--record={cfg.record} is taken by other runs than this one ({path}: "
                             f"{', '.join(others)}): choose another name, or do as they did")
        return activations
    return ""


def list_differences(earlier: Config, cfg: Config, but: Iterable[str], of: Iterable[str] = OPTIONS
                     ) -> list[str]:
    """'head_lr was 0.008, here 0.01' for all options in which this config differs from an earlier one."""
    ours, theirs = plain_dict(cfg), plain_dict(earlier)
    return [f"{name} were others" if name in ("layers", "stages") else
            f"{name} was {str(theirs[name])[:60]}, here {str(ours[name])[:60]}"
            for name in of if name not in but and ours[name] != theirs[name]]


def choose_folder(cfg: Config) -> Path:
    if not cfg.record:
        return Path(cfg.logs_dir)
    root = Path(cfg.records_dir, cfg.track)
    taken = sorted(root.glob(f"????-??-??_{glob.escape(cfg.record)}"))
    return taken[0] if taken else Path(root, f"{datetime.date.today()}_{cfg.record}")


def describe_machine(rt: Runtime) -> dict:
    """Versions and hardware, as far as they decide a result or its speed."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    hardware = dict(device=rt.device.type, ranks=rt.world_size, cpu_count=os.cpu_count(),
                    threads=torch.get_num_threads(), cpu=platform.processor() or platform.machine(),
                    simd=torch.backends.cpu.get_cpu_capability(), activations=str(rt.dtype)[6:])
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        hardware["cpu"] = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    if rt.device.type == "cuda":
        properties = torch.cuda.get_device_properties(rt.device)
        hardware.update(gpu=properties.name, gpu_memory_mib=properties.total_memory >> 20)
        versions.update(cuda=torch.version.cuda, cudnn=str(torch.backends.cudnn.version()))
    return dict(versions=versions, hardware=hardware)


def ensure_corpus(cfg: Config, rt: Runtime) -> None:
    """Have data/text.py make the embedded corpus, where a run asks for it and it is missing, damaged, or of
    another PyTorch. A lone copy of this file goes on without: find_shards() says how to get data."""
    if not cfg.train_files.startswith(EMBEDDED_CORPUS):
        return
    tools = [Path(folder, "data/text.py") for folder in (Path(__file__).resolve().parent, Path.cwd())]
    for is_turn in (rt.rank == 0, rt.local_rank == 0):  # nodes that share the folder find it made
        try:
            info = json.loads(Path(EMBEDDED_CORPUS, "corpus.json").read_text())
            sizes = [Path(EMBEDDED_CORPUS, name).stat().st_size for name in info["files"]]
            is_whole = (info["source"] == f"torch {torch.__version__.partition('+')[0]}"
                        and sum(sizes) == 2 * sum(info["tokens"].values()) + SHARD_HEADER_BYTES * len(sizes))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # never made, or damaged
            is_whole = False
        for tool in [path for path in tools if path.exists()][:1] if is_turn and not is_whole else ():
            sys.modules.setdefault("train_gpt", sys.modules[__name__])  # which the tool imports
            spec = importlib.util.spec_from_file_location("text", tool)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.make_embedded_corpus()
        barrier(rt)


def print0(text: str, rt: Runtime) -> None:
    """Print a line on rank 0, flushed, above the progress bar. Who reads it may go: training goes on."""
    for write in (functools.partial(tqdm.write, file=sys.stdout), print) if rt.rank == 0 else ():
        try:
            write(text)
            sys.stdout.flush()
            return
        except OSError:  # at first perhaps only of the terminal that shows the bar
            pass
    if rt.rank == 0:
        sys.stdout = open(os.devnull, "w")


def flatten_numbers(facts: dict, prefix: str) -> dict[str, float]:
    """Numbers in nested dicts as {prefix/key/...: number}; lists of layers by their position."""
    flat = {}
    for key, value in facts.items():
        value = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(value, dict):
            flat |= flatten_numbers(value, f"{prefix}/{key}")
        elif not isinstance(value, str):
            flat[f"{prefix}/{key}"] = value
    return flat


class RunLog:
    """Log lines and events of a run, appended while it runs; on ranks other than 0 nothing is written."""

    BAR_SECONDS = 0.5  # between two losses on the progress bar

    def __init__(self, cfg: Config, rt: Runtime, argv: list[str], resumed: dict | None = None):
        self.cfg, self.rt, self.bar, self.files = cfg, rt, None, {}
        self.shown_at, self.shown_loss = 0.0, None  # of the bar
        self.track = self.end_tracking = None
        self.val_points = resumed["val_points"] if resumed else []
        self.facts = dict(script_sha256=hash_script(), argv=argv, **describe_machine(rt))
        self.run_id = f"{time.strftime('%Y%m%d-%H%M%S')}_seed{cfg.seed}_{os.urandom(2).hex()}"
        self.folder = choose_folder(cfg)
        is_same = bool(resumed) and resumed["script_sha256"] == self.facts["script_sha256"]
        self.is_continued = is_same and not any(Path(place, f"{resumed['run_id']}.json").exists()
                                                for place in (self.folder, cfg.logs_dir))
        if self.is_continued:  # the same run: its log continues
            self.run_id = resumed["run_id"]

    def __enter__(self) -> RunLog:
        if self.rt.is_main and self.cfg.record:
            check_record(self.cfg, self.folder, self.facts)
        tracker, cfg = self.cfg.tracker if self.rt.is_main else "off", self.cfg
        try:
            if tracker == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter
                writer = SummaryWriter(str(Path(cfg.logs_dir, "tensorboard", self.run_id)))
                self.track = lambda numbers, step: [writer.add_scalar(name, number, step)
                                                    for name, number in numbers.items()]
                self.end_tracking = writer.close
            elif tracker != "off":
                module = importlib.import_module(tracker)
                module.init(project="train_gpt", name=self.run_id, config=plain_dict(cfg))
                self.track = lambda numbers, step: module.log(numbers, step=step)
                self.end_tracking = module.finish
        except Exception as error:  # whatever a package raises that is not there, or not logged in
            reason = " ".join(str(error).split())[:100] or type(error).__name__
            raise InputError(f"--tracker={tracker} does not start ({reason}): pip install {tracker}, or "
                             "leave it out", of_one_rank=True) from None
        suffixes = (".txt", ".jsonl") if self.cfg.telemetry_every or self.cfg.guard == "on" else (".txt",)
        for suffix in suffixes if self.rt.is_main else ():
            Path(self.cfg.logs_dir).mkdir(parents=True, exist_ok=True)
            self.files[suffix] = open(Path(self.cfg.logs_dir, self.run_id + suffix), "ab", buffering=0)
        self.made = [file.name for file in self.files.values() if not file.tell()]  # not continued
        if self.files and not self.files[".txt"].tell():
            self._append(".txt", f"{json.dumps(self.facts, indent=1)}\n{'=' * 100}")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _trace) -> None:
        """Take the bar off the screen, and log why a run ends early; bad input leaves nothing new."""
        self.close_bar()
        if self.end_tracking:
            self.end_tracking()
        if isinstance(error, RunError) and not (isinstance(error, InputError) and self.made):
            self._append(".txt", str(error))
        for file in self.files.values():
            file.close()
            if isinstance(error, InputError) and file.name in self.made:
                Path(file.name).unlink(missing_ok=True)

    def close_bar(self) -> None:
        with suppress(OSError):  # its terminal may be gone
            if self.bar is not None:
                self.bar.close()

    def _append(self, suffix: str, line: str) -> None:
        """Write a line; a full disk is reported once, and training goes on."""
        file = self.files.get(suffix)
        try:
            if file:
                file.write((line + "\n").encode())
        except OSError as error:
            del self.files[suffix]
            print0(f"{file.name} cannot be written ({error.strerror}): training goes on without it", self.rt)

    def start_training(self, progress: Progress) -> None:
        """From here on files stay, whatever ends the run; and the bar is shown."""
        self.progress, self.made = progress, []
        if show_bar():
            self.bar = tqdm(total=self.cfg.num_iterations, initial=progress.step, unit="step",
                            dynamic_ncols=True)

    def print(self, text: str, to_console: bool = True) -> None:
        self._append(".txt", text)
        if to_console:
            print0(text, self.rt)

    def write_event(self, event: str, step: int, **facts) -> None:
        self._append(".jsonl", json.dumps(dict(event=event, step=step, **facts)))
        try:
            if self.track:
                self.track(flatten_numbers(facts, event), step)
        except Exception as error:  # whatever a package raises: training must not depend on it
            self.track = None
            self.print(f"--tracker={self.cfg.tracker} has failed ({error}): training goes on without it")

    def log_step(self, loss: Tensor, _probe: Probe | None, train_time: float) -> None:
        """The line of a step, counted from 1, and the bar, which shows the loss of a step before."""
        step, num_iterations = self.progress.step, self.cfg.num_iterations
        self.print(f"step:{step}/{num_iterations} train_time:{train_time * 1000:.0f}ms "
                   f"step_avg:{train_time * 1000 / step:.2f}ms", to_console=False)
        try:
            if self.bar is not None:
                if time.monotonic() - self.shown_at >= self.BAR_SECONDS or step == num_iterations:
                    speed = f"{self.progress.tokens / train_time:,.0f} tok/s"
                    shown = f"loss {self.shown_loss.read().item():.3f}, " if self.shown_loss else ""
                    self.bar.set_postfix_str(shown + speed, refresh=False)
                    # shown the next time: by then it is there, and nobody waits for the device
                    self.shown_at, self.shown_loss = time.monotonic(), HostCopy(loss)
                self.bar.update()
        except OSError:  # its terminal is gone
            self.bar = None

    def finish(self, result: dict) -> None:
        """Leave the result: script, log and json in one folder; and print the card."""
        if not self.rt.is_main:
            return
        commit = ""
        with suppress(OSError):  # outside a repository it is empty
            commit = subprocess.run(["git", "rev-parse", "-q", "--verify", "HEAD"], capture_output=True,
                                    text=True, cwd=Path(__file__).resolve().parent).stdout.strip()
        config, derived, rt = result["config"], result["config"]["derived"], self.rt
        result = dict(**result, **self.facts, track=self.cfg.track, preset=self.cfg.preset,
                      seed=self.cfg.seed, val_points=self.val_points, final_val_loss=self.val_points[-1][1],
                      git_commit=commit)
        self.close_bar()
        problem = self._leave(self.folder, result)
        name = f"{self.run_id}.json"
        if problem and self.cfg.record and not self._leave(Path(self.cfg.logs_dir), result):
            problem += f"; it is left in {Path(self.cfg.logs_dir, name)} instead"
        rows = {
            "preset": f"{result['preset']}, seed {result['seed']}, "
                      f"{derived['num_params'] / 1e6:.2f} M parameters",
            "validation loss": f"{result['final_val_loss']:.4f} after {config['num_iterations']} steps",
            "training time": f"{result['train_time_ms'] / 1000:.2f} s",
            "before the clock": f"{result['data_setup_s']:.1f} s to check and plan the data, "
                                f"{result['compile_time_s']:.1f} s of warm-up",
            "speed": f"{result['tokens_per_s']:,} tokens/s",
            "MFU": f"{100 * result['mfu']:.1f} % of {rt.peak_flops * rt.world_size / 1e12:.2f} TFLOP/s, the "
                   "matmul rate measured here",
            "peak memory": f"{result['peak_memory_mib']:,} MiB",
            "sent per step": f"{result['bytes_per_step'] / 1e6:,.2f} MB by each rank; the least possible is "
                             f"{result['minimum_bytes_per_step'] / 1e6:,.2f} MB",
            "left in": "nowhere: see below" if problem else str(self.folder / name)}
        if rt.world_size == 1:
            del rows["sent per step"]
        width = max(map(len, rows.values()))
        rule = f"+{'-' * 18}+{'-' * (width + 2)}+"
        lines = [f"| {head:<16} | {row:<{width}} |" for head, row in rows.items()]
        print0("\n".join((rule, *lines, rule)), rt)
        if problem:
            raise RunError(f"this run is not recorded: {problem}", of_one_rank=True)

    def leave_script(self, folder: Path) -> None:
        """Write the script into a record folder, or under a name with its hash into that of other runs."""
        is_record = folder != Path(self.cfg.logs_dir)
        path = folder / ("train_gpt.py" if is_record else f"train_gpt_{self.facts['script_sha256'][:12]}.py")
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomic(path, read_script())

    def _leave(self, folder: Path, result: dict) -> str:
        """Write script and json into a folder, and move the log of a record run there; returns what went
        wrong. Other runs may have taken the record's name while this one trained."""
        is_record = folder != Path(self.cfg.logs_dir)
        try:
            with lock_folder(folder, "", is_patient=True):
                if is_record:
                    check_record(self.cfg, folder, self.facts)
                self.leave_script(folder)
                for suffix, file in self.files.items() if is_record else ():
                    shutil.move(file.name, folder / f"{self.run_id}{suffix}")
                write_atomic(folder / f"{self.run_id}.json", (json.dumps(result, indent=1) + "\n").encode())
        except OSError as error:
            return (f"{folder} cannot be written ({error.strerror}); the log, as far as the disk took it, "
                    f"is in {self.cfg.logs_dir}")
        except InputError as error:
            return str(error)
        return ""


# ==== CHECKPOINTS ==========================================================================================
# All that a run needs to go on as if it had never stopped, on any number of ranks. Files are written in the
# background while training goes on. Nothing in a checkpoint is executed when it is read; one that does not
# fit this script or these options is refused in one line. To keep something more, add it to collect_state()
# and load_state(), and raise CHECKPOINT_FORMAT where older files lack it.

CHECKPOINT_FORMAT = "train_gpt 6"


def name_checkpoints(cfg: Config) -> Path:
    return Path(cfg.checkpoint_dir, f"{cfg.record or cfg.preset}_seed{cfg.seed}")


def list_checkpoints(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step_*.pt") if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def read_checkpoint(path: Path, remedy: str = "name another one", is_checked: bool = True
                    ) -> tuple[dict, dict[str, Tensor]]:
    """(facts, tensors) of a checkpoint; InputError where it is damaged. Nothing in the file is executed. Its
    checksums, which need all of it, are checked unless told not to."""
    try:
        if not path.is_file():
            raise OSError("it is no file" if path.exists() else "it does not exist")
        damaged = is_checked and zipfile.ZipFile(path).testzip()  # torch.save() keeps one of every member
        if damaged:
            raise OSError(f"it is damaged: the checksum of {damaged} differs")
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(content, dict) or content.get("format") != CHECKPOINT_FORMAT:
            raise ValueError(f"it is not of format {CHECKPOINT_FORMAT!r}")
        facts, tensors = json.loads(content["facts"]), dict(content["tensors"])
        progress, kinds = Progress(**facts["progress"]), dict(
            config=dict, optimizer_steps=int, world_size=int, script_sha256=str, val_points=list, run_id=str,
            is_tied=bool, bos=int)
        for name, value in {**{name: facts[name] for name in kinds}, "step": progress.step}.items():
            if not isinstance(value, kinds.get(name, int)) or isinstance(value, int) and value < 0:
                raise ValueError(f"its {name} is {str(value)[:40]!r}")
        if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise ValueError("not all that it holds are tensors")
        if facts.get("activations", "float32") not in ("float32", "bfloat16"):
            raise ValueError(f"its activations are {facts['activations']!r}")
        for option in ("layers", "stages"):
            if not all(isinstance(item, dict) for item in facts["config"].get(option, ())):
                raise ValueError(f"its {option} are no list of objects")
        for step, val_loss, time_ms in facts["val_points"]:
            float(step + val_loss + time_ms)
        return facts, tensors
    except Exception as error:  # whatever a damaged file makes its readers raise
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise InputError(f"{str(path)[:200]} cannot be read as a checkpoint ({reason.splitlines()[0][:100]})"
                         f": {remedy}") from None


def read_config(path: Path, facts: dict, is_sample: bool = False) -> Config:
    """The config of a checkpoint; InputError where it has an option, a field of a layer or stage, or a
    value that this script lacks, unless it is at its default. For sampling only the model counts."""
    values, defaults = dict(facts["config"]), facts.get("defaults", {})
    counting = facts.get("model_options", ()) if is_sample else defaults
    lacking = [f"--{name}={str(values.get(name))[:60]}" for name in counting
               if name not in OPTIONS and name in values and values[name] != defaults.get(name)]
    for option, kind in (("layers", LayerSpec), ("stages", Stage)):
        known = {field.name for field in dataclasses.fields(kind)}
        for item in values.get(option, ()):
            lacking += [f"{name}={str(value)[:60]} in --{option}" for name, value in item.items()
                        if name not in known and value != facts.get("item_defaults", {}).get(name)]
        values[option] = [{name: value for name, value in item.items() if name in known}
                          for item in values.get(option, ())]
    try:
        if lacking:
            raise InputError(lacking[0])
        cfg = config_from_dict(values)
    except InputError as error:
        raise InputError(f"{path} is of a script that has what this one lacks ({error}): use that script, "
                         "which lies beside its log") from None
    if len(cfg.layers) != cfg.num_layers:
        raise InputError(f"{path} cannot be read as a checkpoint (it has {len(cfg.layers)} of "
                         f"{cfg.num_layers} layers): name another one")
    return cfg


def check_model(path: Path, facts: dict, tensors: dict[str, Tensor], cfg: Config, is_sample: bool = False
                ) -> None:
    """Raise InputError where a checkpoint holds another model than this config's."""
    names = [field.name for field in dataclasses.fields(ModelConfig) if not field.name.startswith("fp8_")]
    others = list_differences(read_config(path, facts, is_sample), cfg, (), [*names, "matrix_rule"])
    if others:
        raise InputError(f"{path} is a checkpoint of another model: {', '.join(others)}: give that run's "
                         "options, or start anew without --resume")
    with torch.device("meta"):
        ours = {name: f"of shape {tuple(param.shape)}" for name, param in GPT(cfg).named_parameters()}
    held = {name: f"of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()
            if "/" not in name and tensor.is_floating_point()}
    for name in sorted(ours.keys() | held.keys() | {name for name in tensors if "/" not in name}):
        has, needs = held.get(name, "not at all"), ours.get(name, "not at all")
        if has != needs:
            raise InputError(f"{path} has {name} {has}, the model here {needs}: use the script that left "
                             "it, which lies beside its log")


def find_checkpoint(cfg: Config) -> tuple[Path, dict, dict[str, Tensor]] | None:
    """What --resume names: (path, facts, tensors); for auto the newest that is whole, or None."""
    paths = list_checkpoints(name_checkpoints(cfg)) if cfg.resume == "auto" else [Path(cfg.resume)]
    for i, path in enumerate(paths):
        try:
            facts, tensors = read_checkpoint(path, "name another one, or give --resume=auto for the newest "
                                                   "that can")
        except InputError:
            if i == len(paths) - 1:
                raise
        else:
            check_model(path, facts, tensors, cfg)
            step, result = facts["progress"]["step"], find_result(facts, cfg)
            if step > cfg.num_iterations:
                raise InputError(f"{path} has made {step} steps, more than --num_iterations="
                                 f"{cfg.num_iterations}: give at least --num_iterations={step}")
            if cfg.record and facts["script_sha256"] != hash_script():
                raise InputError(f"{path} was left by another script, which a record does not allow: start "
                                 f"--record={cfg.record} anew without --resume")
            others = list_differences(read_config(path, facts), cfg, FREE_OPTIONS - {"seed"})
            if result and others:
                raise InputError(f"{path} is the end of a finished run with other options ({result}: "
                                 f"{', '.join(others)}): leave --resume out to start anew, or give theirs")
            return path, facts, tensors
    return None


def find_result(facts: dict, cfg: Config) -> str:
    """The json of the run that left a checkpoint after its last step; empty where there is none yet."""
    places = (Path(cfg.logs_dir), *Path(cfg.records_dir, cfg.track).glob("*"))
    paths = [path for place in places if (path := place / f"{facts['run_id']}.json").exists()]
    return str(paths[0]) if paths and facts["progress"]["step"] == cfg.num_iterations else ""


def collect_state(trainer: Trainer) -> tuple[dict, dict[str, HostCopy]]:
    """What a checkpoint holds: plain facts, and on rank 0 tensors being copied, which must have been read
    before this is called again.

    Parameters by name, their states as name/key; none depends on the ranks. All must call it.
    """
    rt, optimizer, cfg, copies = trainer.rt, trainer.optimizer, trainer.cfg, {}
    optimizer.finish()
    trainer.scales.finish()
    for bucket in optimizer.buckets:
        for key in ("", *bucket.state):
            full = bucket.read(key)  # (M, ...)
            for name, param in bucket.params.items() if rt.is_main else ():
                tensor, entry = full[bucket.slices[name]], f"{name}/{key}".removesuffix("/")
                tensor = tensor if key else tensor.view(param.shape)
                copies[entry] = HostCopy(tensor, trainer.staging.get(entry))
    if rt.is_main:
        copies |= {f"fp8/{i}": HostCopy(scale) for i, scale in enumerate(trainer.scales.scales)}
        copies["random/cpu"] = HostCopy(torch.get_rng_state())
        if rt.device.type == "cuda":
            copies["random/cuda"] = HostCopy(torch.cuda.get_rng_state(rt.device))
    items = {**dataclasses.asdict(Stage(1, 1, 1)), **dataclasses.asdict(LayerSpec())}
    return dict(config=plain_dict(cfg), defaults=plain_dict(Config()), item_defaults=items,
                model_options=[field.name for field in dataclasses.fields(ModelConfig)],
                progress=dataclasses.asdict(trainer.progress), optimizer_steps=optimizer.step_count,
                is_tied=optimizer.bucket_of["head.weight"].tied is not None, world_size=rt.world_size,
                script_sha256=hash_script()), copies


def make_staging(trainer: Trainer) -> None:
    """Take the memory for copies of the parameters and their states now, and not when the first checkpoint
    is due. All ranks must call it."""
    for name, copy in collect_state(trainer)[1].items():
        if not name.startswith(("fp8/", "random/")):
            copy = copy.read()
            trainer.staging[name] = copy.pin_memory() if trainer.rt.device.type == "cuda" else copy


def load_state(trainer: Trainer, facts: dict, tensors: dict[str, Tensor]) -> None:
    """Continue where collect_state() was called, by any number of ranks; only rank 0 needs the tensors."""
    rt, optimizer, left = trainer.rt, trainer.optimizer, dict(tensors)
    optimizer.step_count = facts["optimizer_steps"]
    if facts["is_tied"]:  # and stays so until the head's next update at least, however long the run is now
        last = max(optimizer.last_tied_step, optimizer.step_count)
        optimizer.last_tied_step = last + -(last + 1) % trainer.cfg.groups["head"].every
    else:
        optimizer.last_tied_step = min(optimizer.last_tied_step, optimizer.step_count - 1)
    optimizer.tie()
    for bucket in optimizer.buckets:
        for key in ("", *bucket.state):
            full = bucket.read(key).clone()
            for name in bucket.params if rt.is_main else ():
                part = full[bucket.slices[name]]
                part.copy_(left.pop(f"{name}/{key}".removesuffix("/")).view(part.shape))
            broadcast(full, rt)
            if key:
                bucket.state[key].copy_(local_shard(full, rt))
            else:
                bucket.values.copy_(full)
        bucket.clear()
    for name in left:
        if name.partition("/")[0] in optimizer.bucket_of:  # state of a rule that this script does not have
            raise KeyError(name)
    for i, scale in enumerate(trainer.scales.scales):
        scale.copy_(tensors.get(f"fp8/{i}", scale))
        broadcast(scale, rt)
    if "random/cpu" in tensors:
        torch.set_rng_state(tensors["random/cpu"])
    if "random/cuda" in tensors and rt.device.type == "cuda":
        torch.cuda.set_rng_state(tensors["random/cuda"], rt.device)
    trainer.progress = Progress(**facts["progress"])
    for name in trainer.progress.lowered:
        lower_precision(trainer, [name])


class Checkpoints:
    """Writes checkpoints in the background, and keeps the newest two of this run, earlier lives included.

    A folder belongs to one run at a time. A second one that is to write or to go on there is refused; one
    that was stopped, and had not asked for checkpoints, leaves it in a folder of its own.
    """

    KEPT = 2

    def __init__(self, cfg: Config, log: RunLog, bos: int):
        self.folder, self.log, self.bos, self.is_broken = name_checkpoints(cfg), log, bos, False
        self.executor, self.writing = ThreadPoolExecutor(1, "checkpoint"), None
        self.locks, self.own = ExitStack(), []  # files that this run has written, the newest first
        self.is_expected = bool(cfg.checkpoint_every or cfg.time_limit or cfg.resume)

    def __enter__(self) -> Checkpoints:
        if self.log.rt.is_main and self.is_expected:
            self._lock(self.folder)
        for path in list_checkpoints(self.folder) if self.log.rt.is_main and self.log.is_continued else ():
            with suppress(InputError):  # damaged: nobody's
                facts, _ = read_checkpoint(path, is_checked=False)
                self.own += [path] * (facts["run_id"] == self.log.run_id)
        return self

    def __exit__(self, *_) -> None:
        self.executor.shutdown()
        self.locks.close()

    def _lock(self, folder: Path) -> None:
        self.locks.enter_context(lock_folder(folder, (
            f"{folder} is in use by another run of this name and seed: wait for it, or give another "
            "--checkpoint_dir")))
        self.is_expected = True

    def save(self, step: int, facts: dict, copies: dict[str, HostCopy]) -> None:
        self.wait()
        facts.update(val_points=self.log.val_points, run_id=self.log.run_id, bos=self.bos,
                     activations=self.log.facts["hardware"]["activations"])
        if copies:  # on rank 0
            self.writing = self.executor.submit(self._write, step, json.dumps(facts), copies)

    def wait(self) -> Path | None:
        """Wait for the last one; its path, or None where it could not be written."""
        return self.writing and self.writing.result()

    def _write(self, step: int, facts: str, copies: dict[str, HostCopy]) -> Path | None:
        start = time.perf_counter()
        try:
            if not self.is_expected:
                try:
                    self._lock(self.folder)
                except InputError:
                    self.folder = self.folder.with_name(f"{self.folder.name}_{self.log.run_id}")
                    self._lock(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step_{step:06d}.pt"
            content = dict(format=CHECKPOINT_FORMAT, facts=facts,
                           tensors={name: copy.read() for name, copy in copies.items()})
            write_atomic(path, lambda file: torch.save(content, file))
            with suppress(OSError):  # of a disk that the log has named
                self.log.leave_script(Path(self.log.cfg.logs_dir))  # with which it can be read for ever
            self.own = [path, *(other for other in self.own if other != path)]
            for old in (*self.own[self.KEPT :], *self.folder.glob(".step_*.partial")):  # of killed runs
                old.unlink(missing_ok=True)
            del self.own[self.KEPT :]
        except (OSError, RuntimeError) as error:
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
            if not self.is_broken:
                self.log.print(f"no checkpoint of step {step}: {self.folder} cannot be written ({reason}); "
                               "training goes on")
            self.is_broken = True
            return None
        self.is_broken = False
        self.log.write_event("checkpoint", step, path=str(path), seconds=time.perf_counter() - start)
        return path


def prepare_outputs(cfg: Config, rt: Runtime
                    ) -> tuple[tuple[Path, dict, dict[str, Tensor]] | None, str]:
    """Check on rank 0 what this run will write, and read what it resumes: (what find_checkpoint() returns,
    type of activations of the run it continues or of its record's first). Facts reach all ranks, tensors
    only rank 0."""
    def check() -> tuple[str, tuple[Path, dict, dict[str, Tensor]] | None]:
        folders, activations = {"logs_dir": Path(cfg.logs_dir)}, ""
        if cfg.record:
            folders["records_dir"] = choose_folder(cfg)
            activations = check_record(cfg, folders["records_dir"])
        if cfg.checkpoint_every or cfg.time_limit or cfg.checkpoint_dir != Config.checkpoint_dir:
            folders["checkpoint_dir"] = name_checkpoints(cfg)
        for field, folder in folders.items():
            check_writable(folder, f"choose another folder with --{field}")
        return activations, find_checkpoint(cfg) if cfg.resume else None

    activations, found = share_errors(check if rt.is_main else lambda: ("", None), rt)
    path, facts, activations = broadcast_object((*(found or (None, None))[:2], activations), rt)
    saved = (path, facts, found[2] if found else {}) if path else None
    return saved, (facts.get("activations", "") if saved else "") or activations


def resume(trainer: Trainer, saved: tuple[Path, dict, dict[str, Tensor]]) -> str:
    """Load a checkpoint; returns a line that says so, and which options are others now."""
    path, facts, tensors = saved
    try:
        load_state(trainer, facts, tensors)
    except (KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} cannot be read as a checkpoint (nothing in it fits {str(error)[:100]}): "
                         "name another one", of_one_rank=True) from error
    trainer.progress.resumed_at.append(trainer.progress.step)
    others = list_differences(read_config(path, facts), trainer.cfg, FREE_OPTIONS - {"seed"})
    others += [f"{LOW_PRECISIONS.get(name, name)}, as before" for name in trainer.progress.lowered]
    return f"resumed {path} after step {trainer.progress.step}{': ' if others else ''}{', '.join(others)}"


# ==== TELEMETRY AND GUARD ==================================================================================
# What looks on while training. Telemetry measures every so many steps into a file. The guard notices that
# training goes wrong, restores what was before, and continues more carefully. check_ranks() finds ranks that
# have drifted apart. All are off by default. To measure something more, add it to Probe.note() or to
# Telemetry.inspect(); to look on in another way, add a function to the list in Trainer.run().

class Probe:
    """Measures one step, where it is asked to: seconds of its parts, sums of squares by parameter group."""

    PARTS = ("data wait", "forward and backward", "communication", "optimizer", "measuring")
    SUMS = ("grad", "weight", "update", "momentum")

    def __init__(self, groups: Iterable[str], rt: Runtime, is_full: bool = False):
        self.rows, self.rt, self.is_full = {group: i for i, group in enumerate(groups)}, rt, is_full
        self.sums = torch.zeros(len(self.rows), len(self.SUMS), device=rt.device)
        self.seconds, self.part, self.since = dict.fromkeys(self.PARTS, 0.0), "", 0.0

    def mark(self, part: str) -> None:
        """From here on time belongs to this part; "" ends the step. Waits for the device, once measured."""
        if self.is_full:
            now = clock(self.rt.device)
            if self.part:
                self.seconds[self.part] += now - self.since
            self.part, self.since = part, now

    def note(self, bucket: Bucket, grad: Tensor, before: Tensor | None) -> None:
        """Add a bucket's gradient, for the mean loss of a token; its weights, their change, its momentum."""
        tensors = [grad]
        if before is not None:
            momentum = next(iter(bucket.state.values()))
            tensors += [bucket.shard, bucket.shard.float() - before.float(), momentum]
        squares = torch.stack([torch.linalg.vector_norm(x, dtype=wide_dtype(x)).square() for x in tensors])
        squares[0] /= bucket.tokens**2
        self.sums[self.rows[bucket.group_name]][: len(tensors)] += squares


def measure_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> dict[str, float]:
    """Fractions of the values that to_fp8() would saturate, and flush to zero."""
    is_zero = to_fp8(x, dtype, scale)[0].float() == 0
    return dict(saturated=(x.float().abs() > scale * torch.finfo(dtype).max).float().mean().item(),
                flushed=((x != 0) & is_zero).float().mean().item())


class Telemetry:
    """Measures every telemetry_every-th step into <run_id>.jsonl.

    What layers and head see is taken from another forward pass over the step's first micro-batch, so that
    the graph which trains is the same with and without.
    """

    SAMPLE = 256  # tokens, and head rows, of which logits and FP8 casts are measured
    EMA_DECAY = 0.98  # of the training loss, per step

    def __init__(self, trainer: Trainer, log: RunLog):
        self.trainer, self.log, self.every = trainer, log, trainer.cfg.telemetry_every
        self.losses: list[Tensor] = []  # since the last measurement
        self.measured: dict = {}  # of layers and head
        self.measure_layers = trainer.rt.compile(self._measure_layers)

    def start_step(self) -> bool:
        """Return True, and have the first micro-batch measured, if the coming step is one to measure."""
        is_measuring = bool(self.every) and (self.trainer.progress.step + 1) % self.every == 0
        self.trainer.inspect = self.inspect if is_measuring else None
        return is_measuring

    @torch.no_grad()
    def inspect(self, batch: Batch, stage: StageInputs) -> None:
        """Measure layers and head on a micro-batch, before it is trained on."""
        optimizer = self.trainer.optimizer
        if optimizer.probe:
            optimizer.probe.mark("communication")
        optimizer.finish()  # the pass reads parameters that others may still be sending
        if optimizer.probe:
            optimizer.probe.mark("measuring")
        x, layers = self.measure_layers(batch.inputs, batch.doc_ids, stage)
        head, every = self.trainer.model.head, max(1, len(x) // self.SAMPLE)
        x, targets, w = x[::every], batch.targets[::every, None], head.weight.type_as(x)
        logits = head.cap(x @ w.T)  # (T, V)
        _, grads = softcapped_cross_entropy(x @ w.T, targets, x.new_ones(1), head.cap, torch.float32,
                                            FP8_GRAD_SCALE)
        self.measured = dict(
            layers=[dict(zip(("mean", "std", "max"), layer)) for layer in layers.tolist()],
            logits=dict(mean=logits.mean().item(), std=logits.std().item(), max=logits.max().item()),
            fp8=dict(x=measure_fp8(x, math.sqrt(x.size(1)) / 448, E4M3),
                     w=measure_fp8(w[:: max(1, len(w) // self.SAMPLE)], head.fp8_max / 448, E4M3),
                     grad=measure_fp8(grads, 1.0, E5M2)))
        if optimizer.probe:
            optimizer.probe.mark("forward and backward")
        self.trainer.inspect = None

    def _measure_layers(self, inputs: Tensor, doc_ids: Tensor, stage: StageInputs) -> tuple[Tensor, Tensor]:
        """What the head sees (T, D), and mean, std, largest of each layer's output (layers, 3)."""
        model = self.trainer.model
        x, saved = model.run_layers(inputs, doc_ids, stage, save_all=True)
        outputs = (saved.layers[layer].float() for layer in range(len(model.blocks)))
        return x, torch.stack([torch.stack((y.mean(), y.std(), y.abs().max())) for y in outputs])

    def end_step(self, loss: Tensor, probe: Probe | None, train_time: float) -> None:
        """Remember the loss, a mean over this rank's tokens; write the line if this step was measured."""
        self.losses.append(loss)
        if probe is None or not probe.is_full:
            return
        rt, progress = self.trainer.rt, self.trainer.progress
        losses = (all_reduce_sum(torch.stack(self.losses), rt) / rt.world_size).tolist()
        norms = all_reduce_sum(probe.sums, rt).sqrt().tolist()
        self.losses = []
        for value in losses:
            ema = value if math.isnan(progress.loss_ema) else progress.loss_ema
            progress.loss_ema = ema + (1 - self.EMA_DECAY) * (value - ema)
        slope = 1000 * np.polyfit(range(len(losses)), losses, 1)[0] if len(losses) > 1 else 0.0
        groups = {group: dict(grad_norm=grad, weight_norm=weight, update_ratio=update / max(weight, 1e-30),
                              momentum_norm=momentum)
                  for group, (grad, weight, update, momentum) in zip(probe.rows, norms)}
        self.log.write_event("telemetry", progress.step, train_time_ms=round(train_time * 1000),
                             loss=losses[-1], loss_ema=progress.loss_ema, loss_slope_per_1000_steps=slope,
                             groups=groups, **self.measured, seconds=probe.seconds)


def check_ranks(optimizer: Optimizer) -> None:
    """Raise RunError, on every rank, where a rank does not hold the bits of rank 0's parameters."""
    optimizer.finish()
    digests = [hashlib.sha256(bucket.values.flatten().view(torch.uint8).cpu().numpy()).digest()
               for bucket in optimizer.buckets]
    hashes = torch.tensor([[int.from_bytes(digest[:7]) for digest in digests]], device=optimizer.rt.device)
    hashes = gather_shards(hashes, optimizer.rt)  # (N, buckets)
    for rank, i in (hashes != hashes[0]).nonzero().tolist():
        raise RunError(f"after step {optimizer.step_count} rank {rank} holds other parameters than rank 0 "
                       f"in {optimizer.buckets[i].name}: a collective went wrong, or a GPU is faulty")


LOW_PRECISIONS = {"fp8_head": "the head leaves FP8", "fp8": "the linears leave FP8",
                  "bfloat16": "activations become float32"}


def lower_precision(trainer: Trainer, names: Iterable[str] = LOW_PRECISIONS) -> str:
    """Give up the first of these low precisions that is in use; says so, or nothing where none is."""
    model, progress = trainer.model, trainer.progress
    in_use = {*(name if name == "fp8_head" else "fp8" for name in model.fp8), str(trainer.rt.dtype)[6:]}
    name = next((name for name in names if name in in_use), "")
    if name == "bfloat16":
        trainer.rt = trainer.optimizer.rt = dataclasses.replace(trainer.rt, dtype=torch.float32)
        model.dtype = torch.float32
        trainer.stage_inputs.clear()
    elif name:
        model.set_fp8(model.fp8 - {"fp8_head"} if name == "fp8_head" else model.fp8 & {"fp8_head"})
    if name and name not in progress.lowered:
        progress.lowered.append(name)
    return LOW_PRECISIONS.get(name, "")


class Guard:
    """Notices that training goes wrong, and restores weights and optimizer state from before it did.

    Step and data keep advancing, so that what did harm is not seen again and the run ends when it should.
    All ranks judge the same sums, one step late: no GPU waits.
    """

    LOSS_FACTOR, GRAD_FACTOR = 1.5, 10.0  # times the median of the last good steps: too much
    MEDIAN_STEPS, LEAST_STEPS = 64, 16  # in that median, at most and at least
    VAL_RISE = 0.05  # fraction by which validation loss may exceed its best
    SNAPSHOT_EVERY, TRIAL_STEPS = 10, 5  # steps; a snapshot is trusted after so many good ones
    LR_FACTOR, LR_STEPS = 0.5, 20  # after an action, for so many steps
    MOST_ACTIONS, STATUS = 6, Stop.GUARD  # then the run stops with this exit status

    def __init__(self, trainer: Trainer, log: RunLog, stop: Stop):
        self.trainer, self.log, self.stop = trainer, log, stop
        # groups that are not updated in every step make no norm to compare from step to step
        self.steady = torch.tensor([float(trainer.cfg.groups[name].every == 1)
                                    for name in trainer.optimizer.groups], device=trainer.rt.device)
        self.best_val_loss = min((val_loss for _, val_loss, _ in log.val_points), default=math.inf)
        self.pending: list[tuple[int, HostCopy]] = []  # (step, its sums): not yet judged
        self.is_snapshot_due = False
        self.snapshots = [(trainer.progress.step, trainer.snapshot())]

    def end_step(self, loss: Tensor, probe: Probe, _elapsed: float = 0.0) -> None:
        """Judge the step before this one; take a snapshot where one is due."""
        trainer, step, squares = self.trainer, self.trainer.progress.step, probe.sums[:, 0]  # by group
        weight = sum(trainer.schedule.at(step - 1).loss_weights) or 1.0  # of all targets: stages differ
        sums = torch.stack((loss / (weight * trainer.rt.world_size), squares @ self.steady, squares.sum()))
        self.pending.append((step, HostCopy(all_reduce_sum(sums, trainer.rt))))
        self.is_snapshot_due |= step % self.SNAPSHOT_EVERY == 0
        if not self.is_snapshot_due or not trainer.optimizer.is_settled():
            self.judge(but=1)
        elif self.judge():
            self.snapshots = [*self.snapshots[-1:], (step, trainer.snapshot())]
            self.is_snapshot_due = False
            if not (trainer.progress.lowered and trainer.rt.use_compile):  # later stages are compiled anew
                set_timeout(trainer.rt, datetime.timedelta(seconds=trainer.cfg.comm_timeout))

    def judge(self, but: int = 0) -> bool:
        """Judge all steps but the last few; True if no judged step was bad."""
        while len(self.pending) > but:
            step, sums = self.pending.pop(0)
            loss, square, all_squares = sums.read().tolist()
            grad_norm = math.sqrt(square) if math.isfinite(all_squares) else all_squares
            fault = self._find_fault(loss, grad_norm)
            if fault:
                self._act(step, fault)
                return False
            good = self.trainer.progress.good_steps
            good[:] = [*good, [loss, grad_norm]][-self.MEDIAN_STEPS :]
        return True

    def judge_validation(self, step: int, val_loss: float) -> None:
        if not val_loss <= self.best_val_loss * (1 + self.VAL_RISE):
            self._act(step, f"validation loss {val_loss:.4f} after {self.best_val_loss:.4f}", to_oldest=True)
        self.best_val_loss = min(self.best_val_loss, val_loss)

    def _find_fault(self, loss: float, grad_norm: float) -> str:
        good = np.array(self.trainer.progress.good_steps)
        medians = np.median(good, axis=0) if len(good) >= self.LEAST_STEPS else (math.inf, math.inf)
        for name, value, limit in (("loss", loss, self.LOSS_FACTOR * medians[0]),
                                   ("gradient norm", grad_norm, self.GRAD_FACTOR * medians[1])):
            if not math.isfinite(value):
                return f"{name} is {value}"
            if value > limit:
                return f"{name} {value:.4g} exceeds {limit:.4g}"
        return ""

    def _act(self, step: int, fault: str, to_oldest: bool = False) -> None:
        trainer, progress = self.trainer, self.trainer.progress
        trusted = [i for i, (made, _) in enumerate(self.snapshots)
                   if progress.step - made >= self.TRIAL_STEPS]
        index = 0 if to_oldest or not trusted else trusted[-1]
        made, snapshot = self.snapshots[index]
        trainer.restore(snapshot)
        self.pending, self.snapshots = [], self.snapshots[: index + 1]
        progress.num_actions += 1
        if progress.num_actions > self.MOST_ACTIONS:
            self.stop.wish, progress.num_actions = self.STATUS, 0  # anew for those who resume it
            measures = [f"{self.MOST_ACTIONS} actions were not enough"]
        else:
            in_force = progress.lr_scale if progress.step < progress.lr_scale_until else 1.0
            progress.lr_scale = in_force * self.LR_FACTOR
            progress.lr_scale_until = progress.step + self.LR_STEPS
            set_timeout(trainer.rt, PATIENCE)  # another precision may have to be compiled
            measures = [lower_precision(trainer), f"learning rates times {progress.lr_scale:g} until step "
                                                   f"{progress.lr_scale_until}"]
        text = ", ".join(filter(None, (f"weights of step {made}", *measures)))
        self.log.print(f"guard: step {step}: {fault}: {text}")
        self.log.write_event("guard", step, fault=fault, measures=text, action=progress.num_actions)

# ==== SAMPLING =============================================================================================
# Text from a trained model, token by token. Each token is computed from all before it, as in training: there
# is no cache of keys, so that the model is the same code.

class Tokenizer(typing.NamedTuple):
    """Text to tokens and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], bytes]
    bos: int


def find_tokenizer(vocab_size: int) -> Tokenizer | None:
    """The tokenizer that belongs to a vocabulary, if it is at hand."""
    if vocab_size == BYTE_VOCAB_SIZE:
        return Tokenizer(lambda text: list(text.encode()), bytes, BYTE_BOS)
    try:
        import tiktoken  # optional: only text needs it
        gpt2 = tiktoken.get_encoding("gpt2")  # from its cache, or downloaded
    except (ImportError, OSError):
        return None
    if vocab_size != gpt2.n_vocab:
        return None
    return Tokenizer(gpt2.encode_ordinary, gpt2.decode_bytes, gpt2.eot_token)


def sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    probs = ((logits.double() - logits.max()) / temperature).softmax(-1)
    return int(torch.multinomial(probs, 1, generator=generator))


@torch.no_grad()
def generate(model: GPT, prompt: list[int], bos: int, cfg: Config, rt: Runtime) -> Iterator[int]:
    """Continue a prompt until the next document or cfg.max_new_tokens.

    Windows and rotary are those of the final validation. The model sees BOS and what follows it, as far back
    as a training document reaches (max_doc_len).
    """
    state, generator = Schedule(cfg).at(cfg.num_iterations), torch.Generator().manual_seed(cfg.seed)
    text = list(prompt)
    for _ in range(cfg.max_new_tokens):
        tokens = torch.tensor([bos, *text[-(cfg.max_doc_len - 1) :]], dtype=torch.int32, device=rt.device)
        inputs = F.pad(tokens, (0, -len(tokens) % BLOCK))  # whole blocks; nobody sees what comes after
        stage = make_stage_inputs(state, len(inputs), len(inputs), rt, cfg)
        x, _ = model.run_layers(inputs, torch.zeros_like(inputs), stage)  # (T, D)
        logits = model.head.logits(x[len(tokens) - 1][None])[0, : cfg.vocab_size].cpu()  # (V,)
        if not logits.isfinite().all():  # a model that diverged has nothing to say
            return
        token = sample_token(logits, cfg.temperature, cfg.top_k, generator)
        if token == bos:
            return
        yield token
        text.append(token)


def print_sample(model: GPT, cfg: Config, rt: Runtime) -> None:
    """A short text under the result card, where a tokenizer is at hand; shapes vary, so uncompiled."""
    tokenizer = find_tokenizer(cfg.vocab_size)
    if tokenizer is None or not rt.is_main:
        return
    model.eval().use_flex = False
    model.make_segments(1)
    cfg, rt = dataclasses.replace(cfg, max_new_tokens=80), dataclasses.replace(rt, use_flex=False)
    with torch.compiler.set_stance("force_eager") if rt.use_compile else nullcontext():
        text = tokenizer.decode(list(generate(model, [], tokenizer.bos, cfg, rt)))
    print0(f"sample: {text.decode(errors='replace').strip()}", rt)


def load_model(path: Path, values: dict) -> tuple[GPT, Config, Runtime, dict]:
    """(model in plain PyTorch, config with these values, runtime, facts) of a checkpoint."""
    facts, tensors = read_checkpoint(path)
    plain = dict(kernels="off", compile="off", fp8_head="off", fp8_linear="off", fp8_mlp="off",
                 device="auto", dtype="float32")
    cfg = dataclasses.replace(read_config(path, facts, is_sample=True), **{**plain, **values})
    check_model(path, facts, tensors, cfg, is_sample=True)
    dtype = torch.bfloat16 if cfg.dtype == "bfloat16" else torch.float32
    rt = dataclasses.replace(start_runtime(cfg, is_alone=True), dtype=dtype)
    with torch.device("meta"):
        model = GPT(cfg, rt)
    model.load_state_dict({name: tensors[name] for name, _ in model.named_parameters()}, strict=False,
                          assign=True)  # buffers are made below
    model.make_tables()
    return model.to(rt.device).eval(), cfg, rt, facts


def write_sample(values: dict) -> None:
    """--sample: print the prompt and what the checkpoint makes of it, as it comes."""
    allowed = {field.name for field in dataclasses.fields(SampleConfig)} | {"seed", "device", "dtype"}
    if set(values) - allowed:
        raise InputError(f"--{min(set(values) - allowed)} has no meaning with --sample: give only "
                         f"{', '.join('--' + name for name in sorted(allowed))}")
    for name, value in values.items():
        check_value(name, value)
    model, cfg, rt, facts = load_model(Path(values["sample"]), {"seed": 0, **values})
    tokenizer = find_tokenizer(cfg.vocab_size)
    try:
        prompt = tokenizer.encode(cfg.prompt) if tokenizer else [int(word) for word in cfg.prompt.split()]
        if any(not 0 <= token < cfg.vocab_size for token in prompt):
            raise ValueError
    except ValueError:
        raise InputError(f"--prompt={cfg.prompt} is not a list of token ids below {cfg.vocab_size}, and no "
                         "tokenizer is at hand: pip install tiktoken, or give ids") from None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(cfg.prompt, end="" if tokenizer else " ", flush=True)
    for token in generate(model, prompt, facts["bos"], cfg, rt):
        print(decoder.decode(tokenizer.decode([token])) if tokenizer else f"{token} ", end="", flush=True)
    print()

# ==== MAIN =================================================================================================
# From a command line to an exit status. Errors that concern the user become one line here, and nowhere else:
# 2 for bad input, 1 for a run that failed, 128 + n for a signal.

def run(argv: list[str]) -> int:
    """Obey a command line; returns the exit status."""
    values, flags = parse_argv(argv)
    for field in dataclasses.fields(SampleConfig):
        if field.name in values and "sample" not in values:
            raise InputError(f"--{field.name} has no meaning without --sample: leave it out, or name a "
                             "checkpoint with --sample")
    if "list_presets" in flags:
        for name, (parent, meaning, _) in PRESETS.items():
            print(f"{name:<15}{meaning}{f' (from {parent})' if parent else ''}")
        names = textwrap.fill(", ".join(MECHANISMS), 109)
        print(f"\nmechanisms of --without and --only_with; docs/inside.md says what each is:\n{names}")
    elif "print_config" in flags:
        cfg = make_config(values)
        print(json.dumps({**plain_dict(cfg), "derived": derive(cfg, env_int("WORLD_SIZE", 1))}, indent=1))
    elif "sample" in values:
        if env_int("RANK", 0) == 0:
            write_sample(values)
    else:
        train(make_config(values), argv)
    return 0


def report(error: RunError, program: str) -> int:
    """Print the line of an error, once on each node; returns the exit status."""
    if error.of_one_rank or env_int("LOCAL_RANK", 0) == 0:
        kind = "" if isinstance(error, RunStopped) else "error: "
        with suppress(OSError):  # its reader may be gone
            print(f"{program}: {kind}{' '.join(str(error).split())}", file=sys.stderr, flush=True)
    else:  # torchrun ends all ranks when the first one leaves: not before the one that speaks has spoken
        time.sleep(1 if isinstance(error, RunStopped) else 5)
    return error.status


def run_guarded(body: Callable[[], int], program: str = "train_gpt.py") -> int:
    """Do it, and turn errors that concern the user into one line; returns the exit status.

    Where other ranks may be gone it does not return: an orderly shutdown would wait for them.
    """
    try:
        check_environment()
        status = body()
        sys.stdout.flush()
    except RunError as error:
        status = report(error, program)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # who read the output has read enough
        status = 128 + 13  # SIGPIPE
    except Exception as error:
        status = 1
        # whether a collective failed because another rank is gone, or has not come within the timeout
        is_lost = isinstance(error, dist.DistError) or bool(re.search("gloo|pair closure", str(error), re.I))
        is_training = any(frame.f_code is Trainer.run.__code__
                          for frame, _ in traceback.walk_tb(error.__traceback__))
        if not is_lost and isinstance(error, (OSError, UnicodeError if is_training else ValueError)):
            name, reason = getattr(error, "filename", None), getattr(error, "strerror", None) or error
            status = report(InputError(f"{f'{name}: ' if name else ''}{reason}: check the path, its "
                                       "permissions and the room on its disk", of_one_rank=True), program)
        elif not dist.is_initialized():
            raise
        elif not is_lost:
            traceback.print_exc()
        elif is_first_to_say("lost contact"):
            print(f"{program}: stopped: rank {dist.get_rank()} lost contact with another rank: it failed, "
                  "was killed, or has stood still for --comm_timeout; torchrun's report below names it "
                  f"({re.sub(r'^.*?[]] ', '', ' '.join(str(error).split()))[:100]})", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):  # Python's own last flush would change the status
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if dist.is_initialized():
        if status:
            os._exit(status)
        dist.destroy_process_group()
    return status


def open_standard_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr an empty one; what the encoding of a
    console lacks is shown as '?'."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def main(argv: list[str] | None = None) -> int:
    open_standard_streams()
    return run_guarded(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
