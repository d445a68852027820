#!/usr/bin/env python3
"""Train a GPT-2-class language model to a target loss in the least wall-clock time. One file, any machine.

Result card
    track_1   record 32: 271 M parameters, 656.7 M tokens of FineWeb, to 3.28 on 8xH100: not yet run there
    frontier  the newest recipe: 636 M parameters, 338.8 M tokens, to 3.28 on 8xH100: not yet run there
    laptop    1.12 M parameters, byte tokens of the PyTorch source, two CPU cores, two minutes

Launch
    python train_gpt.py                                            # CUDA: track_1, else laptop, two minutes
    torchrun --standalone --nproc_per_node=8 train_gpt.py          # the record setting (or ./run.sh)
    python train_gpt.py --preset=laptop --record=my_idea --seed=1  # leaves a folder in records/
    python train_gpt.py --checkpoint_every=250 --resume=auto       # continues after an interruption
    python train_gpt.py --sample=CHECKPOINT --prompt='def '        # text from a trained model
    python train_gpt.py --help                                     # also --list_presets, --print_config

Part one, the recipe. It decides the loss and the time.
    CONFIG           options, and the layers, stages and parameter groups of both recipes
    MODEL            GPT, Segment, Block, Attention, MLP, Head, and the scalars of a layer
    OPERATIONS       each operation as its equation
    UPDATE RULES     Muon, NorMuon, Hyperball, Adam
    OPTIMIZER        buckets: reduce-scatter, update, all-gather
    SCHEDULES        windows, learning rates, momentum and loss weights at each step
    DATA             packed sequences and batches
    TRAINING         one step, the timed loop, the whole run
Part two, fast forms of the operations. Each one in use is compared with part one at startup.
    FAST FORMS       the table, and the comparison
    FAST ATTENTION, FAST NORMS AND ADAM, FP8, FUSED LOSS AND MLP, TRITON KERNELS, ROW-SPARSE GRADIENTS
Part three, infrastructure. It decides nothing about the loss.
    DEVICE, CHOICE OF FAST FORMS, COMM, SHARD FILES, PRESETS AND ABLATIONS, COMMAND LINE, RUN RECORD,
    CHECKPOINTS, TELEMETRY AND GUARD, SAMPLING, MAIN

Shapes: B batch, T tokens, D model_dim, H num_heads, K head_dim, V padded vocabulary, N ranks, M matrices (or
    elements) of a bucket. Dates in sources are those of records of the modded-nanogpt benchmark.
"""
from __future__ import annotations

import argparse
import ast
import codecs
import ctypes
import dataclasses
import datetime
import difflib
import functools
import glob
import hashlib
import importlib.util
import inspect
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
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and "OMP_WAIT_POLICY" not in os.environ:  # before PyTorch loads OpenMP
    # Waiting threads release their core soon if other processes run. Alone they spin longer.
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
except ImportError:  # CPU builds of PyTorch
    triton = None

# ############################## PART ONE: THE RECIPE #######################################################

# ==== CONFIG ===============================================================================================
# Every option has one line: name, default, meaning, range. The defaults are record 32, preset track_1. Every
# other preset lists only its changes to a parent preset. Layers, stages and parameter groups are rows of
# data. No code has a special case for a layer in the middle. To add an option, add a line here and use it:
# command line, help and checks are derived from it. Presets for small machines are in part three.

AUTO, ON_OFF = ("auto", "on", "off"), ("on", "off")


def option(default, meaning: str, low=None, high=None, choices=None):
    """Declare an option. low and high are inclusive. choices is a tuple or a function that returns one."""
    high = 2**31 - 1 if isinstance(default, int) and high is None else high
    return dataclasses.field(default=default,
                             metadata=dict(help=meaning, low=low, high=high, choices=choices))


def split_names(text: str) -> list[str]:
    return list(filter(None, text.split(",")))


@dataclass(frozen=True)
class LayerSpec:
    """The parts of one layer."""

    attention: str = "short"  # long or short: which window. none: no attention
    mlp: bool = True
    value_embed: int | None = None  # table of value embeddings that is added to the values
    skip_from: int | None = None  # earlier layer whose output is added to the input (U-Net skip)
    attention_from: int | None = None  # earlier layer whose output attention reads. None: this layer's input
    paired: bool = False  # two heads see each other's keys. This makes 2T positions and halves the windows
    key_offset: bool = False  # half of each key's channels come from the previous token
    xsa: bool = False  # exclusive self attention: subtract the token's value from the output
    gate: bool = False  # per-token scale of each head's output
    dc: bool = False  # dynamically composed heads over the nearest tokens
    gates_from: int | None = None  # layer whose input feeds the token gates. None: learned scalars
    mudd_in: str = ""  # activations ("a,b") added to input and values with per-token weights
    mudd_out: str = ""  # activations ("a,b") added to the output with per-token weights

    def inputs(self) -> set[str]:
        """Names of activations that this layer reads besides its input: ve<table>, h<layer> or x_in."""
        layers = {f"h{i}" for i in (self.skip_from, self.attention_from) if i is not None}
        tables = {f"ve{self.value_embed}"} if self.value_embed is not None else set()
        mudd = {*split_names(self.mudd_in), *split_names(self.mudd_out), *(["x_in"] if self.mudd_in else [])}
        return layers | tables | mudd


@dataclass(frozen=True)
class Stage:
    """A range of steps with constant windows and batch."""

    duration: float  # relative length. Ignored for the last stage if extension_steps > 0
    window_long: int  # tokens that a query sees before it, in long layers
    window_short: int  # in short layers
    tokens_per_step: int | None = None  # None: the option of this name
    max_doc_len: int | None = None  # None: the option
    lr_factor: float = 1.0  # multiplies every learning rate, but not the final value of a cooldown
    seq_len: int | None = None  # None: the option
    loss_weights: str = "1"  # one per target, nearest first. "a:b" is a linear ramp over the stage
    prefix_weight: str = "0"  # loss weight of the longest token that is a prefix of the next token

    @property
    def has_prefix_target(self) -> bool:
        return self.prefix_weight != "0"

    @property
    def num_targets(self) -> int:
        """Number of targets per token, including the prefix-token target."""
        return len(self.loss_weights.split()) + self.has_prefix_target


@dataclass(frozen=True)
class Group:
    """How the parameters of one group are trained."""

    rule: str = option("adamw", "update rule of the matrices", choices=lambda: tuple(RULES))
    lr: float = option(0.0, "learning rate. Stages and schedules multiply it", 0.0)
    betas: tuple[float, float] = option((0.8, 0.95), "Adam betas as a,b. normuon uses b", 0.0, 0.9999)
    weight_decay: float = option(0.0, "weight decay. 0: none", 0.0)
    every: int = option(1, "steps between updates. Gradients are summed in between", 1)

    def is_due(self, step: int) -> bool:
        """Whether the group is updated in a step, counted from 0."""
        return (step + 1) % self.every == 0


TRACK_1_GROUPS = dict(
    matrix=Group(rule="muon", lr=0.05, betas=(0.9, 0.95)),  # matrices of the blocks. lr is a spectral norm
    embed=Group(lr=0.6),
    value_embed=Group(lr=0.6),  # also the bigram embedding
    head=Group(lr=0.008),  # also trains the embedding while they are tied
    scalar=Group(lr=0.04),  # learned scalars
    residual=Group(lr=0.04, betas=(0.9, 0.95)),  # scales of the residual stream
    mix=Group(lr=0.008, betas=(0.9, 0.95)),  # scales of the terms added to it
    gate=Group(lr=0.008, betas=(0.9, 0.99)),  # weights of the gates
    gain=Group(lr=0.1),  # gains of norms and outputs
)


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network."""

    depth: int = option(0, "number of layers from which all other sizes follow. 0: use the options", 0, 64)
    tokens_per_param: float = option(12.0, "training tokens per parameter with --depth", 0.1, 1e6)
    num_layers: int = option(12, "layers", 1, 1000)
    num_heads: int = option(6, "attention heads per layer", 1, 4096)
    head_dim: int = option(128, "channels per head", 8, 4096)
    model_dim: int = option(768, "residual channels = num_heads * head_dim", 8, 65536)
    mlp_ratio: int = option(4, "MLP hidden channels per residual channel", 1, 64)
    vocab_size: int = option(50257, "vocabulary size", 2, 65536)
    vocab_multiple: int = option(128, "the vocabulary is padded to a multiple of this", 1, 65536)
    tie_head: str = option("off", "one table for embedding and head, trained as the head", choices=ON_OFF)
    embed_dtype: str = option("bfloat16", "storage of embeddings, head and gates",
                              choices=("bfloat16", "float32"))
    matrix_dtype: str = option("float32", "storage of matrices", choices=("float32", "bfloat16"))
    init_std: float = option(0.5, "initial standard deviation of matrices times sqrt(fan-in)", 0.0)
    embed_std: float = option(1.0, "initial standard deviation of the embedding", 0.0)
    value_embed_std: float = option(1.0, "initial standard deviation of the value embeddings", 0.0)
    zero_init: str = option("on", "zero-initialize output projections: all (on), of MLPs (mlp), none (off)",
                            choices=("on", "mlp", "off"))
    output_gain: str = option("auto", "gains of the outputs of attention and MLP, initialized to 0. auto: "
                              "on with norm-preserving update rules", choices=AUTO)
    norm_gain: str = option("off", "gains, initialized to 1, of the norms before attention and MLP",
                            choices=ON_OFF)
    qk_norm: str = option("on", "normalize each head's queries and keys", choices=ON_OFF)
    qk_group_heads: int = option(0, "heads per matrix in the orthogonalization of queries and keys. "
                                 "0: all heads", 0)
    rotary_pairs: str = option("halves", "channels that rotate together: j and j + K/2 (halves), or 2j and "
                               "2j + 1 (adjacent)", choices=("halves", "adjacent"))
    attention_scale: float = option(0.1, "initial softmax scale", 0.0)
    yarn_max_window: int = option(65_536, "largest long window in YaRN's formula. 0: no YaRN", 0)
    attention_gate_dim: int = option(12, "input channels of the attention gate. 0: no gate", 0)
    num_value_embeds: int = option(3, "value-embedding tables. 0: none", 0)
    value_gate_dim: int = option(0, "input channels of the value-embedding gate. 0: a learned scalar", 0, 24)
    x0_mix: str = option("before", "add the normalized embedding to each layer's input (before), to its "
                         "residual stream after attention (after_attention), or nowhere (off)",
                         choices=("off", "before", "after_attention"))
    residual_init: float = option(0.0, "initial learned residual scale of each sublayer. 0: none", 0)
    smear: str = option("off", "add a gated part of the previous token's embedding", choices=ON_OFF)
    bigram_rows: int = option(0, "rows of the hashed bigram embedding. 0: none", 0)
    gate_hidden: int = option(64, "hidden channels of the token gates", 1)
    softcap: float = option(30.0, "logits become softcap * sigmoid((logit + shift) / width). The defaults "
                            "give 15 tanh(logit / 15) + 15. 0: no softcap", 0)
    softcap_shift: float = option(0.0, "shift of the softcap")
    softcap_width: float = option(7.5, "width of the softcap", 1e-3)
    fp8_head: str = option("auto", "FP8 matmuls in the head during training", choices=AUTO)
    fp8_head_amax: float = option(0.875, "largest head weight that FP8 represents", 1e-6)
    fp8_mlp: str = option("off", "FP8 matmuls in the MLP's forward", choices=AUTO)
    fp8_linear: str = option("auto", "FP8 in all linears of the layers. auto: from 1536 channels",
                             choices=AUTO)
    layers: tuple[LayerSpec, ...] = option((), "layers as JSON. Empty: record 32's pattern")


@dataclass(frozen=True)
class OptimConfig:
    """Update rules and schedules."""

    orthogonalize: str = option("newton_schulz", "polynomial of the orthogonalization",
                                choices=("newton_schulz", "polar_express", "precise"))
    mlp_up_lr_mul: float = option(1.0, "learning-rate multiplier of the MLP's first matrix", 0.0)
    mlp_down_lr_mul: float = option(1.0, "learning-rate multiplier of the MLP's second matrix", 0.0)
    decay: str = option("decoupled", "cautious: decay only if it agrees with the update",
                        choices=("decoupled", "cautious"))
    decay_schedule: str = option("constant", "factor of the weight decay: 1 (constant), the learning rate's "
                                 "factor (lr), or a cosine to 0", choices=("constant", "lr", "cosine"))
    momentum_start: float = option(0.85, "Muon momentum at step 0", 0.0, 0.9999)
    momentum_end: float = option(0.95, "Muon momentum after the warmup", 0.0, 0.9999)
    momentum_warmup_steps: int = option(300, "steps of the momentum warmup", 0)
    momentum_cooldown_steps: int = option(0, "last steps, in which momentum returns to momentum_start", 0)
    adam_eps: float = option(1e-8, "Adam epsilon. Gradients are first rescaled to 49,152 tokens", 1e-30)
    state_dtype: str = option("storage", "dtype of optimizer state: the parameter's (storage), or float32, "
                              "which also keeps the low 16 bits of bfloat16 matrices",
                              choices=("storage", "float32"))
    untie_frac: float = option(1.0, "fraction of the schedule after which a tied head is untied", 0.0, 1.0)
    grad_grid: float = option(0.0, "debug: round gradients to multiples of this, so that sums are exact on "
                              "any number of ranks. 0: off", 0.0)
    lr_warmup_frac: float = option(0.0, "fraction of the run in which learning rates rise", 0.0, 1.0)
    cooldown_frac: float = option(0.5, "fraction of the run in which learning rates fall", 0.0, 1.0)
    matrix_cooldown_frac: float = option(-1.0, "cooldown of the matrices. -1: cooldown_frac", -1.0, 1.0)
    final_lr_frac: float = option(0.1, "final learning rate divided by the group's lr", 0.0, 1.0)


@dataclass(frozen=True)
class TrainConfig:
    """Data, budget, devices and output."""

    preset: str = option("auto", "starting point (--list_presets). auto: track_1 with CUDA, else laptop")
    without: str = option("", "mechanisms to switch off, comma-separated (see --list_presets). Explicit "
                          "options take precedence")
    only_with: str = option("", "mechanisms to keep, comma-separated. All others are switched off")
    track: str = option("track_1", "folder under records/ for comparable runs")
    record: str = option("", "name of a record run. Its script, log and result go to records_dir")
    seed: int = option(0, "seed of the initial weights", 0)
    device: str = option("auto", "device", choices=("auto", "cuda", "cpu"))
    dtype: str = option("auto", "dtype of activations. auto: bfloat16 if the device multiplies it",
                        choices=("auto", "bfloat16", "float32"))
    fast: str = option("auto", "fast forms of operations: all that work here (auto), none (off), or names, "
                       "comma-separated")
    compile: str = option("auto", "torch.compile. auto: on CUDA with Triton", choices=AUTO)
    compile_mode: str = option("default", "search effort of the compiler", choices=(
        "default", "max-autotune-no-cudagraphs", "coordinate-descent"))
    segments: int = option(0, "number of compiled graphs for the layers. More graphs overlap more "
                           "communication. 0: 1 on one rank, else 4", 0)
    train_files: str = option("data/fineweb10B/fineweb_train_*.bin", "pattern of the training shards")
    epochs: int = option(1, "passes over the training files, if one is too short", 1)
    val_files: str = option("data/fineweb10B/fineweb_val_*.bin", "pattern of the validation shards")
    val_tokens: int = option(10_485_760, "validation tokens", 1)
    val_seq_len: int = option(262_144, "tokens per validation sequence", 128)
    val_windows: tuple[int, ...] = option((1664, 768), "final windows long,short. Empty: last stage's", 1)
    val_loss_every: int = option(125, "steps between validations. 0: only at the end", 0)
    num_iterations: int = option(1670, "optimizer steps", 1)
    extension_steps: int = option(0, "final steps of num_iterations that run the last stage", 0)
    tokens_per_step: int = option(393_216, "training tokens of one optimizer step, over all ranks", 128)
    seq_len: int = option(49_152, "tokens per packed sequence of documents, on any number of ranks", 128)
    micro_batch_tokens: int = option(49_152, "most tokens per forward-backward. Sets the peak memory", 128)
    sequence_start: str = option("document", "packed sequences begin with a document, or anywhere (at the "
                                 "end of the previous one)", choices=("document", "anywhere"))
    document_mask: str = option("on", "tokens see only their document, not the whole packed sequence",
                                choices=ON_OFF)
    max_doc_len: int = option(2048, "training documents are cut to this many tokens", 2)
    warmup_iterations: int = option(3, "untimed warmup steps per stage, whose updates are undone", 0)
    comm_bucket_mb: float = option(64.0, "MB of parameters per collective", 0.0)
    comm_timeout: float = option(20.0, "seconds that a collective may take before the run ends", 1.0)
    check_ranks_every: int = option(0, "debug: steps between comparisons of all ranks' bits. 0: never", 0)
    checkpoint_every: int = option(0, "steps between checkpoints. 0: only if a run is stopped", 0)
    checkpoint_dir: str = option("checkpoints", "folder of the checkpoints, one subfolder per run")
    resume: str = option("", "checkpoint to continue from. auto: the newest of this run, if any")
    time_limit: float = option(0.0, "seconds until the run saves a checkpoint and stops. 0: never", 0.0)
    telemetry_every: int = option(0, "steps between measurements in <run_id>.jsonl. 0: never", 0)
    tracker: str = option("off", "also send losses and measurements to this tool. Needs its package",
                          choices=("off", "tensorboard", "trackio", "wandb"))
    guard: str = option("off", "roll back and continue with more care if training diverges", choices=ON_OFF)
    records_dir: str = option("records", "folder of record runs")
    logs_dir: str = option("logs", "folder of all other runs")
    stages: tuple[Stage, ...] = option((
        Stage(duration=1, window_long=384, window_short=128),
        Stage(duration=1, window_long=896, window_short=384),
        Stage(duration=1, window_long=1408, window_short=640)),
        "stages as JSON: duration, window_long, window_short, tokens_per_step, max_doc_len, lr_factor, "
        "seq_len, loss_weights, prefix_weight")
    vocab_file: str = option("data/gpt2_vocab.json", "token ids as JSON, for stages with a prefix_weight")


@dataclass(frozen=True)
class SampleConfig:
    """Text instead of training."""

    sample: str = option("", "checkpoint to sample from")
    prompt: str = option("", "start of the text. Token ids if there is no tokenizer")
    max_new_tokens: int = option(256, "largest number of new tokens. A document end stops earlier", 1)
    temperature: float = option(0.8, "softmax temperature. 0: greedy", 0.0)
    top_k: int = option(50, "sample from this many likeliest tokens. 0: from all", 0)


@dataclass(frozen=True)
class Config(TrainConfig, OptimConfig, ModelConfig, SampleConfig):
    """All options of a run. Option GROUP_FIELD, for example embed_lr, sets field FIELD of groups[GROUP]."""

    groups: dict[str, Group] = dataclasses.field(default_factory=lambda: dict(TRACK_1_GROUPS))

    @property
    def has_output_gain(self) -> bool:
        """Whether sublayers begin with zero gains instead of zero matrices."""
        keeps_norm = RULES[self.groups["matrix"].rule].keeps_norm
        return self.output_gain == "on" or self.output_gain == "auto" and keeps_norm

    @property
    def padded_vocab_size(self) -> int:
        """V: the vocabulary size, rounded up."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def adam_every(self) -> int:
        """Every group is updated at least once in this many steps."""
        return max(group.every for group in self.groups.values())

    @property
    def full_stages(self) -> tuple[Stage, ...]:
        """The stages, with unset fields filled from the options."""
        names = ("tokens_per_step", "max_doc_len", "seq_len")
        return tuple(dataclasses.replace(stage, **{
            name: getattr(stage, name) or getattr(self, name) for name in names}) for stage in self.stages)


GRAD_TOKENS = 49_152  # gradients are rescaled from tokens_per_step to this number: the unit of adam_eps


def build_layers(num_layers: int, num_value_embeds: int, drop_attention: bool = True
                 ) -> tuple[LayerSpec, ...]:
    """The layers of record 32 at any depth.

    Four evenly spaced layers have long windows. The third of them has no attention. Layer 0 has no MLP. The
    upper half adds the outputs of the lower half in reverse order. The first and the last layers share the
    value embeddings 0, 1, 2, ...
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


FRONTIER_LAYERS = (  # record 89, 2026-07-17
    LayerSpec(attention="short", gates_from=0, paired=True),
    LayerSpec(attention="short", gates_from=0, value_embed=0, xsa=True),
    LayerSpec(attention="short", gates_from=0, value_embed=1, paired=True),
    LayerSpec(attention="long", gates_from=0, key_offset=True, xsa=True, gate=True),
    LayerSpec(attention="short", gates_from=4, xsa=True),
    LayerSpec(attention="short", gates_from=4, paired=True),
    LayerSpec(attention="none", gates_from=4, skip_from=3),
    LayerSpec(attention="short", gates_from=4, xsa=True),
    LayerSpec(attention="short", gates_from=4, value_embed=2, attention_from=7),
    LayerSpec(attention="short", gates_from=4, value_embed=3, attention_from=7, paired=True),
    LayerSpec(attention="long", gates_from=4, value_embed=4, attention_from=7, key_offset=True, gate=True,
              dc=True, mudd_in="x_in,h7", mudd_out="x_in,h7,h9,ve0,h3"),
)

FRONTIER_STAGES = (
    Stage(duration=423, window_long=384, window_short=128, tokens_per_step=131_072, max_doc_len=896,
          seq_len=16_384, loss_weights="1 0.5 0.25:0", prefix_weight="0.25"),
    Stage(duration=424, window_long=896, window_short=384, tokens_per_step=262_144, lr_factor=1.52,
          seq_len=32_768, loss_weights="1 0.5:0", prefix_weight="0.25:0"),
    Stage(duration=424, window_long=1408, window_short=640, lr_factor=1.73),
    Stage(duration=15, window_long=1664, window_short=768, lr_factor=1.73),
)

# In steps 0 to 847 the embedding is head.weight, and the row head trains it. every=2: updates in steps 1, 3,
# 5, ..., with gradients of two steps
FRONTIER_GROUPS = dict(
    matrix=Group(rule="normuon", lr=0.023, betas=(0.9, 0.9), weight_decay=0.023 * 1.2),
    embed=Group(lr=0.008, betas=(0.5, 0.95), weight_decay=0.008 * 0.005 * 150, every=2),  # from step 848 on
    head=Group(lr=0.008, betas=(0.5, 0.95), weight_decay=0.008 * 0.005 * 150, every=2),  # and tied embedding
    value_embed=Group(lr=0.6, betas=(0.75, 0.95), weight_decay=0.6 * 0.005 * 5, every=2),
    scalar=Group(lr=0.04, betas=(0.9, 0.99), every=2),
    residual=Group(lr=0.04, betas=(0.9, 0.95), every=2),
    mix=Group(lr=0.008, betas=(0.9, 0.95), every=2),
    gate=Group(lr=0.008, betas=(0.9, 0.99), weight_decay=0.008 * 0.005, every=2),
    gain=Group(lr=0.1, every=2),
)

# name: (parent, description, differences from the parent). Rows of groups replace the parent's rows
PRESETS: dict[str, tuple[str | None, str, dict]] = {
    "track_1": (None, "the record recipe: 271 M parameters, FineWeb, 3.28 on 8xH100", {}),
    "frontier": ("track_1", "the newest recipe, of 2026-07-17: 636 M parameters, half the time", dict(
        num_layers=11, layers=FRONTIER_LAYERS, attention_gate_dim=0, num_value_embeds=5, value_gate_dim=12,
        qk_group_heads=2, rotary_pairs="adjacent", yarn_max_window=1664, x0_mix="after_attention",
        residual_init=1.1**0.5, smear="on", bigram_rows=377_280, zero_init="mlp",
        tie_head="on", untie_frac=2 / 3, embed_std=0.005, value_embed_std=0.01,
        softcap=23.0, softcap_shift=5.0, fp8_head_amax=1.6, fp8_mlp="auto", matrix_dtype="bfloat16",
        groups=FRONTIER_GROUPS, state_dtype="float32", adam_eps=1e-10, orthogonalize="polar_express",
        decay="cautious", decay_schedule="lr", mlp_up_lr_mul=2.0, mlp_down_lr_mul=4.0,
        momentum_cooldown_steps=50, cooldown_frac=0.6, final_lr_frac=0.15,
        num_iterations=1285, extension_steps=15, stages=FRONTIER_STAGES,
        val_loss_every=250, val_windows=(2560, 768))),
}

# ==== MODEL ================================================================================================
# A pre-norm transformer on T tokens. There is no batch dimension: doc_ids separate the documents. Matrices
# are stored as (outputs, inputs), except those of the MLP. ops holds the operations of the next section, or
# fast forms of them. Every scalar multiplier of a layer is a row of layer_scalars(): learned, or computed
# per token. To add one, add its row there and its use in Block or Attention. acts holds the activations that
# later layers read, by the names that LayerSpec uses.

class Rope(typing.NamedTuple):
    """RoPE tables: (T, P, K/4) for the channel pairs that rotate and P positions per token, or expanded to
    all channels of queries and keys by expand_rope()."""

    cos: Tensor
    sin: Tensor


class StepInputs(typing.NamedTuple):
    """Inputs of the model that change with the stage."""

    windows: Tensor | tuple[int, int]  # (long, short) in positions. FlexAttention needs a tensor
    rope: Rope
    paired_rope: Rope | None  # for paired layers, in which a token has two positions
    softmax_scale: Tensor  # ()
    is_unrotated: Tensor  # (T, 1, K) 1 on channels without RoPE, except at sequence starts. Else 0
    is_sequence_start: Tensor  # (T,) first token of a packed sequence
    has_prefix_target: bool = False


class GPT(nn.Module):
    """The language model, initialized on the CPU: a seed gives equal weights on every device."""

    def __init__(self, cfg: Config, rt: Runtime | None = None):
        super().__init__()
        rt = rt or Runtime()
        self.cfg, self.dtype, self.fast = cfg, rt.dtype, rt.fast
        storage, shape = getattr(torch, cfg.embed_dtype), (cfg.padded_vocab_size, cfg.model_dim)
        used_tables = {spec.value_embed for spec in cfg.layers} - {None}
        self.embed = parameter(normal(shape, cfg.embed_std).to(storage), "embed")  # (V, D)
        self.value_embeds = nn.ParameterDict({
            str(i): parameter(normal(shape, cfg.value_embed_std).to(storage), "value_embed", is_table=True)
            for i in sorted(used_tables)})
        self.layer_scalars = [s for layer in range(cfg.num_layers) for s in layer_scalars(cfg, layer)]
        self.blocks = nn.ModuleList(Block(cfg, i, self.layer_scalars) for i in range(cfg.num_layers))

        # Learned scalars of all layers: one parameter per group
        self.scalars = nn.ParameterDict()
        for group in cfg.groups:
            init = [value for s in self.layer_scalars if s.source == group for value in s.init]
            if init:
                self.scalars[group] = parameter(torch.tensor(init), group)
        if any(block.gates is not None for block in self.blocks):
            self.scalars["gates_scale"] = parameter(torch.tensor([TokenGates.SCALE]), "gate", 0.1, 0.0)

        self.head = Head(cfg)
        self.is_tied = cfg.tie_head == "on"  # the optimizer unties
        if self.is_tied:
            self.head.weight.data.copy_(self.embed.data)
        self.bigram = None
        if cfg.bigram_rows:
            zeros = torch.zeros(cfg.bigram_rows, cfg.model_dim, dtype=storage)
            self.bigram = parameter(zeros, "value_embed", is_table=True)
        if not self.embed.is_meta:
            self.make_buffers()
        self.split_layers(1)
        self.use_fp8(rt.fp8)

    def make_buffers(self) -> None:
        """Constants: bigram signs, and prefix tokens, which are filled when training starts."""
        rows = NUM_SIGN_ROWS if self.cfg.bigram_rows else 0
        signs = make_bigram_signs(rows, self.cfg.model_dim).to(self.embed.dtype)
        self.register_buffer("bigram_signs", signs, persistent=False)
        self.head.prefix_tokens = torch.full((self.cfg.padded_vocab_size,), -1)  # (V,)

    def use_fp8(self, fp8: frozenset[str]) -> None:
        """Choose the operations. FP8 is for training only."""
        self.fp8 = fp8
        self.ops = make_operations(self.cfg, self.fast | fp8, self.dtype)
        self.eval_ops = make_operations(self.cfg, self.fast & EVAL_FORMS, self.dtype)

    def forward(self, tokens: Tensor, targets: Tensor, doc_ids: Tensor, step_inputs: StepInputs,
                loss_weights: Tensor | None = None) -> Tensor:
        """tokens, targets, doc_ids (T,) -> loss summed over the T tokens, float32.

        loss_weights (n,): of the next token, the token after it, ..., the prefix of the next token.
        """
        x, _ = self.run_layers(tokens, doc_ids, step_inputs)
        ops = self.ops if self.training else self.eval_ops
        return self.head(x, targets, step_inputs, loss_weights, ops)

    def run_layers(self, tokens: Tensor, doc_ids: Tensor, step_inputs: StepInputs, save_all: bool = False
                   ) -> tuple[Tensor, dict[str, Tensor]]:
        """tokens, doc_ids (T,) -> final normalized activations (T, D), and activations by name.

        Look-ups in tables are not compiled. PyTorch's kernel sums the gradients of a row in a fixed order,
        but Inductor would add them atomically, in a float32 copy of the table. Source: record 32.
        """
        ops, acts, scalars = self.ops if self.training else self.eval_ops, {}, {}
        x = F.embedding(tokens, self.head.weight if self.is_tied else self.embed)  # (T, D)
        if self.bigram is not None:  # Hashed bigram embedding with signs (2026-01-19, 2026-05-20)
            is_start = step_inputs.is_sequence_start
            rows = bigram_hash(tokens, is_start, len(self.bigram))  # (T,)
            sign_rows = ((tokens ^ shift_right(tokens, is_start)) % NUM_SIGN_ROWS).masked_fill(is_start, 0)
            acts["bigram"] = ops.embedding(rows, self.bigram).to(self.dtype) * F.embedding(
                sign_rows, self.bigram_signs).to(self.dtype)  # (T, D)
        learned = dict(self.scalars.items())
        if "gates_scale" in learned:  # several segments read it: one sum over tokens, in one order
            learned["gates_scale"] = learned["gates_scale"].expand(len(tokens), 1)
        for segment in self.segments:
            x, acts, scalars = segment(x, tokens, doc_ids, acts, scalars, learned, step_inputs, ops,
                                       self.dtype, save_all)
        return x, acts

    def split_layers(self, num_segments: int) -> None:
        """Divide the layers into segments. The first is one layer, so that tables can arrive during it."""
        rest = len(self.blocks) - 1
        starts = [0, *(1 + rest * i // max(1, num_segments - 1) for i in range(num_segments - 1))]
        remaining, self.segments = dict(self.value_embeds.items()), []
        for start, end in itertools.pairwise([*starts, len(self.blocks)]):
            inputs = set().union(*(spec.inputs() for spec in self.cfg.layers[start:end]))
            tables = {i: remaining.pop(i) for i in list(remaining) if f"ve{i}" in inputs}
            self.segments.append(Segment(self.cfg, range(start, end), self.blocks[start:end], tables,
                                         self.layer_scalars))


class Segment(nn.Module):
    """Consecutive layers that are compiled as one graph, and the value embeddings that no earlier one reads.

    With several ranks there is one graph per segment, so that its gradients are reduced as soon as its
    backward ends.
    """

    def __init__(self, cfg: Config, layers: range, blocks: nn.ModuleList, tables: dict[str, nn.Parameter],
                 scalars: list[Scalar]):
        super().__init__()
        self.layers, self.blocks, self.tables = layers, blocks, nn.ParameterDict(tables)
        self.scalars, self.rotary_pairs = scalars, cfg.rotary_pairs
        self.is_first, self.is_last = layers.start == 0, layers.stop == cfg.num_layers
        self.saved = set().union(*(spec.inputs() for spec in cfg.layers))  # names that some layer reads

    def forward(self, x: Tensor, tokens: Tensor, doc_ids: Tensor, acts: dict[str, Tensor],
                scalars: dict[int, dict[str, Tensor]], learned: dict[str, Tensor], step_inputs: StepInputs,
                ops: Operations, dtype: torch.dtype, save_all: bool):
        """Look up this segment's value embeddings, then run its layers."""
        acts = dict(acts)
        for i, table in self.tables.items():
            acts[f"ve{i}"] = ops.embedding(tokens, table).to(dtype)  # (T, D)
        return self.run_blocks(x, doc_ids, acts, scalars, learned, step_inputs, ops, dtype, save_all)

    def run_blocks(self, x: Tensor, doc_ids: Tensor, acts: dict[str, Tensor],
                   scalars: dict[int, dict[str, Tensor]], learned: dict[str, Tensor],
                   step_inputs: StepInputs, ops: Operations, dtype: torch.dtype, save_all: bool
                   ) -> tuple[Tensor, dict[str, Tensor], dict[int, dict[str, Tensor]]]:
        """x, acts (T, D) by name, scalars (T, n) by layer and name, learned (n,) by group."""
        acts, scalars = dict(acts), {layer: dict(values) for layer, values in scalars.items()}

        # Expand learned scalars to (T, n). Their gradients are then summed over tokens in the parameter's
        # dtype, and in an order that does not depend on the segments.
        learned = {group: param.expand(x.size(0), -1) for group, param in learned.items()}
        for group, param in learned.items():
            rows = [scalar for scalar in self.scalars if scalar.source == group]
            columns = param.split([len(scalar.init) for scalar in rows], dim=1) if rows else ()
            for scalar, column in zip(rows, columns):
                if scalar.layer in self.layers:
                    scalars.setdefault(scalar.layer, {})[scalar.name] = column.to(dtype)
        gates_scale = learned.get("gates_scale")

        # Embedding: smear (2025-09-18), then norm
        if self.is_first:
            x, smear_gate = x.to(dtype), self.blocks[0].smear_gate
            if smear_gate is not None:
                gate = torch.sigmoid(x[:, : len(smear_gate)] @ smear_gate.type_as(x)[:, None])  # (T, 1)
                x = add_scaled(x, scalars[0]["smear"] * gate, shift_right(x, step_inputs.is_sequence_start))
            x = acts["x0"] = ops.rms_norm(x)

        # RoPE of all channels. If nothing is compiled, make_step_inputs() has expanded the tables.
        rope, paired_rope = step_inputs.rope, step_inputs.paired_rope
        if rope.cos.dim() == 3:
            rope = expand_rope(rope, step_inputs.softmax_scale, self.rotary_pairs)
            if paired_rope is not None:
                paired_rope = expand_rope(paired_rope, step_inputs.softmax_scale, self.rotary_pairs)

        masks = {}  # one for each kind of layer in this segment
        for layer, block in zip(self.layers, self.blocks):
            spec = block.spec
            for gates, output_scale in ((block.gates, gates_scale), (block.mudd, TokenGates.SCALE)):
                for scalar, column in gates(x, output_scale) if gates is not None else ():
                    scalars.setdefault(scalar.layer, {})[scalar.name] = column
            s = scalars.get(layer, {})
            if layer == 0:
                x = add_scaled(x, s["bigram_in"], acts["bigram"]) if "bigram_in" in s else x
                if "x_in" in self.saved:
                    acts["x_in"] = x
            kind = (spec.attention, spec.paired)
            if spec.attention != "none" and kind not in masks:
                ids = doc_ids.repeat_interleave(2) if spec.paired else doc_ids
                masks[kind] = ops.make_mask(ids, step_inputs.windows[0 if spec.attention == "long" else 1])
            layer_rope = paired_rope if spec.paired else rope
            x = block(x, acts, s, masks.get(kind), doc_ids, layer_rope, step_inputs, ops)
            if save_all or f"h{layer}" in self.saved:
                acts[f"h{layer}"] = x
        return ops.rms_norm(x) if self.is_last else x, acts, scalars


class Block(nn.Module):
    """One layer."""

    def __init__(self, cfg: Config, layer: int, scalars: list[Scalar]):
        super().__init__()
        self.spec, self.x0_mix = cfg.layers[layer], cfg.x0_mix
        has_attention, has_mlp = self.spec.attention != "none", self.spec.mlp
        self.attention = Attention(cfg, self.spec) if has_attention else None
        self.mlp = MLP(cfg) if has_mlp else None

        # Gains of norms and outputs
        ones, zeros = torch.ones(cfg.model_dim), torch.zeros(cfg.model_dim)
        has_in, has_out = cfg.norm_gain == "on", cfg.has_output_gain
        self.attn_gain_in = parameter(ones.clone(), "gain") if has_in and has_attention else None
        self.attn_gain_out = parameter(zeros.clone(), "gain") if has_out and has_attention else None
        self.mlp_gain_in = parameter(ones.clone(), "gain") if has_in and has_mlp else None
        self.mlp_gain_out = parameter(zeros.clone(), "gain") if has_out and has_mlp else None

        # Per-token scalars: gates (also for later layers) and mudd run before the layer, mudd_out at its end
        for name, lr_mul in (("gates", 0.1), ("mudd", 0.25), ("mudd_out", 0.25)):
            rows = [s for s in scalars if s.source == f"{name}{layer}"]
            setattr(self, name, TokenGates(cfg, rows, lr_mul) if rows else None)
        self.smear_gate = None
        if layer == 0 and cfg.smear == "on":
            weight = torch.zeros(min(12, cfg.model_dim), dtype=getattr(torch, cfg.embed_dtype))
            self.smear_gate = parameter(weight, "gate", 0.01, 0.0)

    def forward(self, x: Tensor, acts: dict[str, Tensor], s: dict[str, Tensor], mask, doc_ids: Tensor,
                rope: Rope, step_inputs: StepInputs, ops: Operations) -> Tensor:
        """x (T, D) -> (T, D). s: this layer's scalars (T, n)."""
        spec, mudd_v = self.spec, None

        # U-Net skip (record 11)
        if spec.skip_from is not None:
            skip = torch.sigmoid(s["skip"])
            skip = skip * s["skip_gate"] if "skip_gate" in s else skip
            x = add_scaled(x, skip, acts[f"h{spec.skip_from}"])

        # x0 and bigram embedding enter before attention (record 32) ...
        if self.x0_mix != "after_attention":
            x = add_embeddings(scale(x, s.get("resid")), acts, s)

        # Dense connections (MUDD, 2026-04-22): earlier activations enter values and residual stream
        if spec.mudd_in:
            sources = [*(acts[name] for name in split_names(spec.mudd_in)), x]
            mudd_v = sum(y * weight for y, weight in zip(sources, s["mudd_v"].split(1, dim=1)))
            for y, weight in zip(sources, s["mudd_x"].split(1, dim=1)):
                x = add_scaled(x, weight, y)

        # Attention
        if self.attention is not None:
            source = x if spec.attention_from is None else acts[f"h{spec.attention_from}"]
            y = scale(ops.rms_norm(source), self.attn_gain_in)
            y = self.attention(y, mudd_v, acts, s, mask, doc_ids, rope, step_inputs, ops)
            x = add_scaled(scale(x, s.get("resid_attn")), s.get("attn_out"), scale(y, self.attn_gain_out))
            # ... or after it (2026)
            if self.x0_mix == "after_attention":
                x = add_embeddings(x, acts, s)

        # MLP
        if self.mlp is not None:
            y = self.mlp(scale(ops.rms_norm(x), self.mlp_gain_in), ops)
            x = add_scaled(scale(x, s.get("resid_mlp")), s.get("mlp_out"), scale(y, self.mlp_gain_out))

        # Dense connections into the output
        if self.mudd_out is not None:
            ((_, weights),) = self.mudd_out(x, TokenGates.SCALE)
            for name, weight in zip(split_names(spec.mudd_out), weights.split(1, dim=1)):
                x = add_scaled(x, weight, acts[name])
        return x


class Attention(nn.Module):
    """Multi-head attention with QK-norm, RoPE, value embeddings, and the mechanisms of its LayerSpec."""

    def __init__(self, cfg: Config, spec: LayerSpec):
        super().__init__()
        self.spec, self.num_heads, self.head_dim, dim = spec, cfg.num_heads, cfg.head_dim, cfg.model_dim
        self.has_qk_norm, self.rotary_pairs = cfg.qk_norm == "on", cfg.rotary_pairs
        storage, gate_storage = getattr(torch, cfg.matrix_dtype), getattr(torch, cfg.embed_dtype)
        std, group_rows = cfg.init_std * dim**-0.5, (cfg.qk_group_heads or cfg.num_heads) * cfg.head_dim
        matrices = uniform((dim, dim), std, std, std, output_std(cfg, "attention") * dim**-0.5).to(storage)
        qk = matrices[:2].reshape(-1, group_rows, dim)  # (2H / group, group * K, D)
        self.qk = parameter(qk, "matrix")
        self.v_proj = parameter(matrices[2:].clone(), "matrix")  # (2, D, D) values and output projection
        self.head_gate_weight = self.ve_gate_weight = None
        if cfg.attention_gate_dim:  # zero at first, so a norm-preserving rule could not train it
            group = "scalar" if RULES[cfg.groups["matrix"].rule].keeps_norm else "matrix"
            zeros = torch.zeros(cfg.num_heads, cfg.attention_gate_dim, dtype=gate_storage)
            self.head_gate_weight = parameter(zeros, group)
        if cfg.value_gate_dim and spec.value_embed is not None and not spec.mudd_in:
            zeros = torch.zeros(cfg.num_heads, cfg.value_gate_dim, dtype=gate_storage)
            self.ve_gate_weight = parameter(zeros, "gate")

    def forward(self, x: Tensor, mudd_v: Tensor | None, acts: dict[str, Tensor], s: dict[str, Tensor], mask,
                doc_ids: Tensor, rope: Rope, step_inputs: StepInputs, ops: Operations) -> Tensor:
        """x (T, D) normalized, mudd_v (T, D) dense connections into the values -> (T, D)."""
        spec, H, K, D = self.spec, self.num_heads, self.head_dim, x.size(1)

        # 1. Queries, keys and values in one matmul
        w_v, w_proj = self.v_proj.type_as(x).unbind()
        w_qkv = torch.cat((self.qk.type_as(x).flatten(0, 1), w_v))  # (3D, D)
        if "qkv_scale" in s:  # learned scales of the matrices (2025-12-10, 2025-12-11)
            w_qkv, w_proj = w_qkv * s["qkv_scale"][:1], w_proj * s["proj_scale"][:1]
        qk, v = ops.linear(x, w_qkv).split((2 * D, D), dim=1)  # (T, 2D), (T, D)

        # 2. QK-norm and RoPE. The tables of q include the softmax scale. A paired layer (2026-01-07) gives
        # token t two positions: 2t for its even heads, 2t + 1 for its odd heads.
        heads_per_position = 2 if spec.paired else 1
        qk = qk.unflatten(1, (2, H // heads_per_position, heads_per_position, K))
        qk = ops.norm_rotate(qk, rope.cos, rope.sin, self.rotary_pairs, self.has_qk_norm)
        q, k = qk.flatten(2, 3).unbind(1)  # (T, H, K) each

        # 3. Key offset (2025-12-14): the unrotated half of a key comes from the previous token. torch.where
        # would take five times longer.
        if spec.key_offset:
            k = torch.lerp(k, k.roll(1, 0), step_inputs.is_unrotated.type_as(k))

        # 4. Value embeddings (record 14) and dense connections
        v = scale(v, s.get("v_scale")).unflatten(1, (H, K))  # (T, H, K)
        if spec.value_embed is not None:
            ve = acts[f"ve{spec.value_embed}"]  # (T, D)
            v = torch.addcmul(v, self.compute_ve_gate(x, ve, s)[..., None], ve.unflatten(1, (H, K)))
        if mudd_v is not None:
            v = v + mudd_v.unflatten(1, (H, K))

        # 5. Attention. In a paired layer heads h and h + H/2 become two positions of one head, so they see
        # each other's keys. RoPE pairs heads 2h and 2h + 1. The published code has this difference.
        if spec.paired:
            pairs = (y.reshape(-1, H // 2, K) for y in (q, k, v))  # (2T, H/2, K)
            y = ops.attention(*pairs, mask).reshape(v.shape)
        else:
            y = ops.attention(q, k, v, mask)  # (T, H, K)

        # 6. Dynamically composed heads (2026-05-27)
        if spec.dc:
            y = y + ops.compose_heads(q, k, v, doc_ids, s["dc_pre"], s["dc_post"])

        # 7. Exclusive self attention (2026-04-29): subtract a part of the projection onto the token's value
        if spec.xsa:
            projection = (y * v).sum(-1) / (v * v).sum(-1).clamp(min=1e-8)  # (T, H)
            y = y - (projection * s["xsa"].tanh())[..., None] * v

        # 8. Head gates: from the first channels of x (record 28), or per-token scalars
        if self.head_gate_weight is not None:
            gate_inputs = x[:, : self.head_gate_weight.size(1)]
            y = y * torch.sigmoid(linear(gate_inputs, self.head_gate_weight))[..., None]
        if spec.gate:
            y = y * s["head_gate"][..., None]

        # 9. Output projection
        return ops.linear(y.flatten(1), w_proj)  # (T, D)

    def compute_ve_gate(self, x: Tensor, ve: Tensor, s: dict[str, Tensor]) -> Tensor:
        """Scale of the value embedding: (T, H), or (T, 1) if it is a learned scalar."""
        if self.ve_gate_weight is not None:  # from half of its inputs each (2025-12-29, 2026-02-03)
            half = self.ve_gate_weight.size(1) // 2
            gate_inputs = torch.cat((x[:, :half], ve[:, :half]), dim=1)
            return 2 * torch.sigmoid(linear(gate_inputs, self.ve_gate_weight))
        if "ve_gate" in s:  # (T, 2): one scale for each half of the heads
            return s["ve_gate"].repeat_interleave(-(-self.num_heads // 2), dim=1)[:, : self.num_heads]
        return s["ve_scale"]


class MLP(nn.Module):
    """Two matrices (D, 4D), stacked for the optimizer."""

    def __init__(self, cfg: Config):
        super().__init__()
        dim, hidden = cfg.model_dim, cfg.mlp_ratio * cfg.model_dim
        down_inputs = dim if cfg.has_output_gain else hidden
        matrices = uniform((dim, hidden), cfg.init_std * dim**-0.5,
                           output_std(cfg, "mlp") * down_inputs**-0.5)
        self.up_down = parameter(matrices.to(getattr(torch, cfg.matrix_dtype)), "matrix",  # (2, D, 4D)
                                 lr_mul=(cfg.mlp_up_lr_mul, cfg.mlp_down_lr_mul))
        self.scaling = DelayedScaling() if cfg.fp8_mlp != "off" else None

    def forward(self, x: Tensor, ops: Operations) -> Tensor:
        """x (T, D) normalized -> (T, D)."""
        up, down = self.up_down.type_as(x).unbind()
        return ops.relu2_mlp(x, up, down, self.scaling)


class TokenGates(nn.Module):
    """Per-token scalars of layers, computed from an activation by a two-layer MLP.

    Source: multiway dynamic dense connections (MUDD), arXiv 2502.12170, 2026-04-22.
    """

    SCALE = 0.1  # initial scale of the output

    def __init__(self, cfg: Config, outputs: list[Scalar], lr_mul: float):
        super().__init__()
        self.outputs, init = outputs, [value / self.SCALE for s in outputs for value in s.init]
        hidden, dim, storage = cfg.gate_hidden, cfg.model_dim, getattr(torch, cfg.embed_dtype)
        fc = uniform((hidden, dim), (3 * dim) ** -0.5)[0].to(storage)
        self.fc = parameter(fc, "gate", lr_mul, lr_mul)
        self.proj = parameter(torch.zeros(len(init), hidden, dtype=storage), "gate", lr_mul, lr_mul)
        self.bias = parameter(torch.tensor(init).to(storage), "gate", lr_mul, 0.0)

    def forward(self, x: Tensor, output_scale: Tensor | float) -> Iterator[tuple[Scalar, Tensor]]:
        """x (T, D) -> each of its scalars, (T, n)."""
        y = F.gelu(linear(x, self.fc))  # (T, hidden)
        y = scale(linear(y, self.proj) + self.bias.type_as(x), output_scale)  # (T, sum of all n)
        return zip(self.outputs, y.split([len(s.init) for s in self.outputs], dim=1))


class Head(nn.Module):
    """Logits and loss. Source: records 18 and 32."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.softcap = Softcap(cfg.softcap, cfg.softcap_shift, cfg.softcap_width)
        self.weight = parameter(torch.zeros(  # (V, D)
            cfg.padded_vocab_size, cfg.model_dim, dtype=getattr(torch, cfg.embed_dtype)), "head")
        none = torch.full((cfg.padded_vocab_size,), -1)  # (V,)
        self.register_buffer("prefix_tokens", none, persistent=False)

    def forward(self, x: Tensor, targets: Tensor, step_inputs: StepInputs, loss_weights: Tensor | None,
                ops: Operations) -> Tensor:
        """x (T, D), targets (T,) -> cross-entropy summed over tokens, float32. Eval: next token only."""
        if loss_weights is None or not self.training:
            loss_weights = x.new_ones(1, dtype=at_least_fp32(x))
            return ops.head_loss(x, self.weight, targets[:, None], loss_weights, self.softcap)

        # Targets of a token: the next token, later tokens of its packed sequence (2025-12-22), and the
        # prefix of the next token (2026-07-13). -1 is ignored.
        columns = [targets]
        for _ in range(len(loss_weights) - step_inputs.has_prefix_target - 1):
            columns.append(columns[-1].roll(-1).masked_fill(step_inputs.is_sequence_start.roll(-1), -1))
        if step_inputs.has_prefix_target:
            columns.append(self.prefix_tokens[targets])
        return ops.head_loss(x, self.weight, torch.stack(columns, dim=1), loss_weights, self.softcap)

    def compute_logits(self, x: Tensor) -> Tensor:
        """x (T, D) -> softcapped logits (T, V), float32."""
        return self.softcap(linear(x, self.weight))


class Scalar(typing.NamedTuple):
    """A multiplier in a layer: its initial values, and its source.

    The source is a group of learned scalars, or token gates: gates<layer>, mudd<layer>, mudd_out<layer>.
    """

    layer: int
    name: str
    source: str
    init: tuple[float, ...]


def layer_scalars(cfg: Config, layer: int) -> list[Scalar]:
    """The multipliers of a layer. Sources: records 9, 15 and 32, and those of 2026."""
    spec, scalars = cfg.layers[layer], []
    has_attention, has_mudd = spec.attention != "none", bool(spec.mudd_in)
    gates = "mix" if spec.gates_from is None else f"gates{spec.gates_from}"
    resid, mix = (f"mudd{layer}",) * 2 if has_mudd else ("residual", "mix")

    def add(name: str, source: str, *init: float) -> None:
        scalars.append(Scalar(layer, name, source, init))

    # Embeddings that enter the residual stream, before attention or after it
    is_after = cfg.x0_mix == "after_attention"
    source = (resid if has_mudd else gates) if is_after else "scalar"
    if cfg.x0_mix == "before":
        add("resid", "scalar", 1.0)
    if has_attention or not is_after:
        if cfg.x0_mix != "off":
            add("x_in" if has_mudd and is_after else "x0", source, 0.0)
        if cfg.bigram_rows:
            add("bigram_in" if is_after and layer == 0 else "bigram", source, 0.05)

    # U-Net skip: the logit of its weight
    if spec.skip_from is not None:
        add("skip", "scalar", -1.5)
        if gates != "mix":
            add("skip_gate", gates, 0.5)

    # Values and value embeddings
    if has_attention:
        add("qkv_scale" if cfg.residual_init else "v_scale", "scalar", 0.5)
        if spec.value_embed is not None and has_mudd:
            add("ve_gate", resid, 2.0, 2.0)
        elif spec.value_embed is not None and not cfg.value_gate_dim:
            add("ve_scale", "scalar", 0.5)

    # Residual stream and outputs of the sublayers
    if cfg.residual_init and has_attention:
        add("proj_scale", "scalar", 1.0)
        add("resid_attn", resid, cfg.residual_init)
        add("attn_out", mix, 1.0)
    if cfg.residual_init and spec.mlp:
        add("resid_mlp", resid, cfg.residual_init)
        add("mlp_out", mix, 1.0)

    # Heads
    if has_attention and spec.xsa:
        add("xsa", gates, *[0.0] * cfg.num_heads)
    if has_attention and spec.gate:
        add("head_gate", gates, *[0.25] * cfg.num_heads)
    if has_attention and spec.dc:
        add("dc_pre", gates, *[1.0] * cfg.num_heads)
        add("dc_post", gates, *[0.0] * cfg.num_heads)

    if layer == 0 and cfg.smear == "on":
        add("smear", "scalar", 0.0)

    # Dense connections
    num_sources = 1 + len(split_names(spec.mudd_in))
    if has_attention and has_mudd:
        add("mudd_v", resid, *[0.0] * num_sources)
    if has_mudd:
        add("mudd_x", resid, *[0.0] * num_sources)
    if spec.mudd_out:
        add("mudd_out", f"mudd_out{layer}", *(
            -0.5 if name == f"h{spec.attention_from}" else 0.0 for name in split_names(spec.mudd_out)))
    return scalars


def parameter(data: Tensor, group: str, lr_mul: float | tuple[float, ...] = 1.0, wd_mul: float = 1.0,
              is_table: bool = False) -> nn.Parameter:
    """A parameter with its training group and multipliers. lr_mul may have one value per stacked matrix.

    is_table: value embeddings and bigram embedding, whose gradients are row-sparse.
    """
    param = nn.Parameter(data)
    param.spec = ParamSpec(group, lr_mul, wd_mul, is_table)
    return param


class ParamSpec(typing.NamedTuple):
    """Training options of a parameter, see parameter()."""

    group: str
    lr_mul: float | tuple[float, ...] = 1.0
    wd_mul: float = 1.0
    is_table: bool = False


def normal(shape: tuple[int, ...], std: float) -> Tensor:
    x = torch.empty(shape)
    return x if x.is_meta else x.normal_(0.0, std)  # random numbers on meta would import the compiler


def uniform(shape: tuple[int, ...], *stds: float) -> Tensor:
    """Uniform matrices (M, *shape) with these standard deviations. Source: record 19."""
    x = torch.empty(len(stds), *shape)
    for matrix, std in zip(x, stds):
        if std and not x.is_meta:
            matrix.uniform_(-(3**0.5) * std, 3**0.5 * std)
        else:
            matrix.zero_()
    return x


def output_std(cfg: Config, part: str) -> float:
    """init_std of the output projection of attention or mlp."""
    return 0.0 if cfg.zero_init in ("on", part) and not cfg.has_output_gain else cfg.init_std

# ==== OPERATIONS ===========================================================================================
# Each operation as its equation, on local tensors. A function of Operations can be replaced by a fast form
# of part two, which is compared with it at startup. If you edit a function, its fast form is off. Constants,
# as eps and the window, are arguments, so that both forms read them from one place.

RMS_EPS = 1.1920929e-07  # float32's machine epsilon, for every dtype
BLOCK = 128  # tokens. Sequences are multiples of it, because attention masks are tested block by block
DC_WINDOW = 111  # tokens before a query over which composed heads mix
NUM_SIGN_ROWS = 8192  # of the bigram signs
LOGITS_CHUNK = 24_576  # tokens whose logits exist at one time


def at_least_fp32(x: Tensor) -> torch.dtype:
    """float32, or the dtype of x if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, D) @ weight (N, D)^T -> (T, N)."""
    return x @ weight.type_as(x).T


def scale(x: Tensor, weight: Tensor | float | None) -> Tensor:
    """x * weight. weight=None means 1."""
    weight = weight.type_as(x) if isinstance(weight, Tensor) else weight
    return x if weight is None else x * weight


def add_scaled(x: Tensor, weight: Tensor | None, y: Tensor) -> Tensor:
    """x + weight * y. weight=None means 1."""
    return x + y if weight is None else torch.addcmul(x, weight, y)


def add_embeddings(x: Tensor, acts: dict[str, Tensor], s: dict[str, Tensor]) -> Tensor:
    """Add the bigram embedding, x0 and the first layer's input, each if the layer has a scalar for it."""
    for name in ("bigram", "x0", "x_in"):
        x = add_scaled(x, s[name], acts[name]) if name in s else x
    return x


def embedding(rows: Tensor, table: Tensor) -> Tensor:
    """Rows (T,) of a table (R, D) -> (T, D)."""
    return F.embedding(rows, table)


def rms_norm(x: Tensor, eps: float = RMS_EPS) -> Tensor:
    """x (..., D) / root mean square over D."""
    wide = x.to(at_least_fp32(x))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).type_as(x)


def relu2_mlp(x: Tensor, up: Tensor, down: Tensor, scaling: DelayedScaling | None = None) -> Tensor:
    """relu(x up)^2 down^T. x (T, D), up and down (D, 4D) -> (T, D). scaling: only for FP8."""
    hidden = F.relu(x @ up).square()  # (T, 4D)
    return hidden @ down.T


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, inverse: bool = False) -> Tensor:
    """RoPE: rotate the two channels of each pair by the angle of their position.

    x (T, ..., K), cos and sin as expand_rope() returns them. Sources: record 32, and 2026-01-07 for adjacent
    pairs.
    """
    if pairs == "halves":
        partner = x.roll(x.size(-1) // 2, dims=-1)
    else:
        partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x * cos, partner, sin, value=-1 if inverse else 1)


def norm_rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, has_norm: bool, eps: float = RMS_EPS
                ) -> Tensor:
    """QK-norm (if has_norm), then RoPE. x (T, ..., K) -> (T, ..., K)."""
    x_normed = rms_norm(x, eps) if has_norm else x
    return rotate(x_normed, cos, sin, pairs).type_as(x)


def expand_rope(rope: Rope, softmax_scale: Tensor, pairs: str) -> Rope:
    """Tables (T, P, K/4) of the rotated pairs -> (T, 2, 1, P, K) for all channels of stacked q and k.

    The tables of q include the softmax scale (), sin has the sign of its channel.
    """
    cos = F.pad(rope.cos, (0, rope.cos.size(-1)), value=1.0)  # (T, P, K/2): half of the pairs do not rotate
    sin = F.pad(rope.sin, (0, rope.sin.size(-1)))
    if pairs == "halves":
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, -sin), dim=-1)
    else:
        cos, sin = torch.stack((cos, cos), -1).flatten(-2), torch.stack((sin, -sin), -1).flatten(-2)
    scales = torch.stack((softmax_scale, torch.ones_like(softmax_scale))).view(2, 1, 1, 1)
    return Rope(cos[:, None, None] * scales, sin[:, None, None] * scales)


def is_visible(query: Tensor, key: Tensor, doc_ids: Tensor, window: Tensor | int) -> Tensor:
    """Who sees whom: a query position sees keys of its document, itself and up to `window` tokens before."""
    return (key <= query) & (query - key <= window) & (doc_ids[query] == doc_ids[key])


def make_mask(doc_ids: Tensor, window: Tensor | int) -> Tensor:
    """doc_ids (T,) -> visible (T, T), queries by keys."""
    positions = torch.arange(doc_ids.size(0), device=doc_ids.device)
    return is_visible(positions[:, None], positions, doc_ids, window)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention. q includes the softmax scale. q, k, v (T, H, K), mask (T, T) -> (T, H, K)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (H, T, K)
    scores = (q @ k.mT).masked_fill(~mask, -math.inf)  # (H, T, T)
    return (scores.softmax(-1) @ v).transpose(0, 1)


def compose_heads(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, dc_pre: Tensor, dc_post: Tensor,
                  window: int = DC_WINDOW) -> Tensor:
    """Dynamically composed heads: attention probabilities of all heads, mixed with weights dc_pre, read each
    head's values with weight dc_post.

    q, k, v (T, H, K), dc_pre and dc_post (T, H) -> (T, H, K). Source: arXiv 2405.08553, 2026-05-27.
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (H, T, K)
    probs = (q @ k.mT).masked_fill(~make_mask(doc_ids, window), -math.inf).softmax(-1)  # (H, T, T)
    dc_pre = dc_pre * (dc_pre.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    mixed = (probs * dc_pre.T[..., None]).sum(0)  # (T, T)
    return ((mixed @ v) * dc_post.T[..., None]).transpose(0, 1)


def shift_right(x: Tensor, is_sequence_start: Tensor) -> Tensor:
    """x (T, ...) of the previous token. Zero at sequence starts, is_sequence_start (T,)."""
    return x.roll(1, 0).masked_fill(is_sequence_start.view(-1, *[1] * (x.dim() - 1)), 0)


def bigram_hash(tokens: Tensor, is_sequence_start: Tensor, num_rows: int) -> Tensor:
    """Row (T,) of each token and its predecessor in the bigram embedding. int32, which may overflow.

    The last row is for sequence starts, and stands for their token. Source: 2026-01-19.
    """
    tokens = tokens.int().masked_fill(is_sequence_start, num_rows - 1)
    rows = (36313 * tokens ^ 27191 * shift_right(tokens, is_sequence_start)) % (num_rows - 1)
    return rows.masked_fill(is_sequence_start, num_rows - 1)


def make_bigram_signs(num_rows: int, dim: int) -> Tensor:
    """Pseudo-random signs (num_rows, D), +1 or -1. They separate bigrams that share a row. 2026-05-20."""
    bits = torch.arange(num_rows * dim)
    for _ in range(2):
        bits = (bits ^ bits >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return ((bits >> 15 & 1) * 2 - 1).view(-1, dim)


class Softcap(typing.NamedTuple):
    """Bounds logits: cap * sigmoid((logit + shift) / width). cap=0: no bound.

    Sources: records 9 and 19, and 2025-12-26 for the shift.
    """

    cap: float
    shift: float
    width: float

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits.to(at_least_fp32(logits))
        logits = logits + self.shift if self.shift else logits
        return self.cap * torch.sigmoid(logits / self.width) if self.cap else logits


def head_loss(x: Tensor, weight: Tensor, targets: Tensor, target_weights: Tensor, softcap: Softcap
              ) -> Tensor:
    """Weighted cross-entropy of all targets, summed over tokens. A target of -1 is ignored.

    x (T, D), weight (V, D), targets (T, n), target_weights (n,) -> (), float32.
    """
    loss = torch.zeros((), dtype=at_least_fp32(x), device=x.device)
    for x_chunk, target_chunk in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
        logits = softcap(linear(x_chunk, weight))  # (T, V)
        for target, target_weight in zip(target_chunk.unbind(1), target_weights):
            cross_entropy = F.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
            loss = loss + target_weight * cross_entropy
    return loss


def symmetric_matmul(x: Tensor, add: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0) -> Tensor:
    """alpha x x^T + beta add. x (M, rows, columns), add symmetric -> (M, rows, rows)."""
    return torch.bmm(x, x.mT) if add is None else torch.baddbmm(add, x, x.mT, beta=beta, alpha=alpha)


class Operations(typing.NamedTuple):
    """The operations that have fast forms. make_operations() of part two replaces them."""

    linear: Callable = linear
    embedding: Callable = embedding
    rms_norm: Callable = rms_norm
    relu2_mlp: Callable = relu2_mlp
    norm_rotate: Callable = norm_rotate
    make_mask: Callable = make_mask
    attention: Callable = attention
    compose_heads: Callable = compose_heads
    head_loss: Callable = head_loss
    symmetric_matmul: Callable = symmetric_matmul

# ==== UPDATE RULES =========================================================================================
# A rule returns the new weight of a shard, given its gradient, and updates its state in place. It sees local
# tensors only. To add a rule, write a function with @rule. --matrix_rule then offers it with the defaults in
# its decorator, and checkpoints and all ranks handle its state. Other groups than matrix use adamw.

class UpdateArgs(typing.NamedTuple):
    """Hyperparameters of one update. Those that change are tensors, so that new values do not recompile."""

    lr: Tensor  # broadcasts against the weight
    weight_decay: Tensor  # broadcasts against the weight, already multiplied by lr
    momentum: Tensor  # (), on the CPU
    grad_scale: Tensor  # (), rescales the gradient to a loss summed over GRAD_TOKENS tokens
    bias_correction1: Tensor  # (), 1 - beta1^t
    bias_correction2: Tensor  # (), 1 - beta2^t
    betas: tuple[float, float]
    eps: float
    dtype: torch.dtype = torch.float32  # of the orthogonalization
    polynomial: str = "newton_schulz"
    cautious: bool = False  # decay only if it agrees with the update
    symmetric_matmul: Callable = symmetric_matmul


@dataclass(frozen=True)
class Rule:
    """An update rule: its function, the state that it needs, and its default options."""

    function: Callable  # (weight in float32, grad, state, args) -> new weight. Multiplies by grad_scale
    moments: tuple[str, ...]  # state of the parameter's shape, initially zero
    lr: float  # a default option, as betas, weight_decay and the multipliers
    whole_matrix: bool = False  # whether it must see whole matrices. Else it is elementwise
    row_variance: bool = False  # state "second_momentum": one value per row, or per column of a wide matrix
    keeps_norm: bool = False  # state "radius": weights stay on the sphere of their initial norm
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    mlp_up_lr_mul: float = 1.0
    mlp_down_lr_mul: float = 1.0

    def init_state(self, param: Tensor, fp32_state: bool = False) -> dict[str, Tensor]:
        """State of parameters (M, ...). fp32_state: float32 moments, and low_bits of bfloat16 matrices."""
        dtype = at_least_fp32(param) if fp32_state else param.dtype
        state = {name: torch.zeros_like(param, dtype=dtype) for name in self.moments}
        if fp32_state and self.whole_matrix and param.dtype == torch.bfloat16:
            state["low_bits"] = torch.zeros_like(param, dtype=torch.int16)
        if self.row_variance:
            rows, columns = param.shape[-2:]
            shape = (len(param), rows, 1) if rows >= columns else (len(param), 1, columns)
            state["second_momentum"] = param.new_zeros(shape, dtype=at_least_fp32(param))
        if self.keeps_norm:
            state["radius"] = matrix_norm(param)
        return state

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> None:
        """Update param (M, ...) and its state in place, in float32."""
        if "low_bits" not in state:
            param.copy_(self.function(param.to(at_least_fp32(param)), grad, state, args))
            return
        # A bfloat16 parameter is the upper half of its float32 value. The lower half is state (2026-01-04).
        bits = param.view(torch.int16).int() << 16 | state["low_bits"].int() & 0xFFFF
        bits = self.function(bits.view(torch.float32), grad, state, args).view(torch.int32)
        param.view(torch.int16).copy_(bits >> 16)
        state["low_bits"].copy_(bits)


RULES: dict[str, Rule] = {}


def rule(name: str, **properties) -> Callable:
    """Register a function as an update rule, with fields of Rule."""
    def register(function: Callable) -> Callable:
        RULES[name] = Rule(function, **properties)
        return function

    return register


@rule("muon", moments=("momentum",), whole_matrix=True, lr=0.05)
def muon(weight: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """Muon (2024-10): orthogonalized Nesterov momentum. lr is the spectral norm of a square update."""
    update = orthogonalize(nesterov_momentum(grad, state, args), args)
    return spectral_step(weight, update, args)


@rule("normuon", moments=("momentum",), whole_matrix=True, row_variance=True, lr=0.05)
def normuon(weight: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """NorMuon (2025-10-24): Muon whose rows are divided by their running root mean square."""
    update = orthogonalize(nesterov_momentum(grad, state, args), args)
    return spectral_step(weight, normalize_rows(update, state, args), args)


@rule("muonh", moments=("momentum",), whole_matrix=True, keeps_norm=True, lr=0.02)
def muonh(weight: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """MuonH: Muon on a sphere (Hyperball, arXiv 2606.16899). lr is the rotation angle."""
    update = orthogonalize(nesterov_momentum(grad, state, args), args)
    return sphere_step(weight, update, state, args)


@rule("normuonh", moments=("momentum",), whole_matrix=True, row_variance=True, keeps_norm=True, lr=0.02)
def normuonh(weight: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """NorMuon on a sphere."""
    update = orthogonalize(nesterov_momentum(grad, state, args), args)
    return sphere_step(weight, normalize_rows(update, state, args), state, args)


@rule("adamh", moments=("exp_avg", "exp_avg_sq"), whole_matrix=True, keeps_norm=True, lr=0.005)
def adamh(weight: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """Adam on a sphere."""
    return sphere_step(weight, adam_direction(grad, state, args), state, args)


@rule("adamw", moments=("exp_avg", "exp_avg_sq"), lr=0.0018, weight_decay=0.1)
def adamw(weight: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """AdamW, elementwise. The defaults are record 2's."""
    update = adam_direction(grad, state, args)
    decay = args.weight_decay * (update * weight > 0) if args.cautious else args.weight_decay
    return weight * (1 - decay) - update * args.lr


def nesterov_momentum(grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    momentum = state["momentum"]
    grad = (grad * args.grad_scale).to(momentum.dtype) * (1 - args.momentum)
    momentum.mul_(args.momentum).add_(grad)
    return momentum * args.momentum + grad


# a, b, c of each iteration X = a X + b (X X^T) X + c (X X^T)^2 X
POLYNOMIALS = {
    "newton_schulz": ((3.4445, -4.7750, 2.0315),) * 5,  # Muon: singular values become 0.7 to 1.2
    "polar_express": (  # 2025-09-29, for inputs divided by 1.02 times their norm
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)),
    "precise": ((2.0, -1.5, 0.5),) * 12,  # slow: singular values approach 1 from below
}


def orthogonalize(x: Tensor, args: UpdateArgs) -> Tensor:
    """Move the singular values of each matrix of x (M, rows, columns) towards 1, in args.dtype.

    An odd polynomial in X, iterated on the short side. Sources: Muon, record 11, Polar Express.
    """
    is_tall, matmul = x.size(-2) > x.size(-1), args.symmetric_matmul
    x = x.to(args.dtype)
    x = x.mT if is_tall else x  # (M, short, long)
    norm = x.to(at_least_fp32(x)).norm(dim=(-2, -1), keepdim=True)
    x = x / (norm * 1.02 + 1e-6 if args.polynomial == "polar_express" else norm + 1e-7).to(x.dtype)
    for a, b, c in POLYNOMIALS[args.polynomial]:
        gram = matmul(x)  # (M, short, short)
        gram = matmul(gram, gram, c, b)
        x = torch.baddbmm(x, gram, x, beta=a)  # (M, short, long)
    return x.mT if is_tall else x


def normalize_rows(update: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """Divide rows, or columns of wide matrices, by their running RMS. The norm of the update stays."""
    rows, columns = update.shape[-2:]
    wide = update.to(at_least_fp32(update))  # (M, rows, columns)
    mean_square = wide.square().mean(dim=-1 if rows >= columns else -2, keepdim=True)
    state["second_momentum"].lerp_(mean_square, 1 - args.betas[1])
    normalized = wide * state["second_momentum"].clamp(min=1e-10).rsqrt()
    return (normalized * (matrix_norm(wide) / matrix_norm(normalized).clamp(min=1e-10))).type_as(update)


def adam_direction(grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """Adam's update in float32. eps is added before the bias correction, as in record 32."""
    beta1, beta2 = args.betas
    grad = grad.to(at_least_fp32(grad)) * args.grad_scale
    exp_avg = state["exp_avg"].to(grad.dtype) * beta1 + grad * (1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].to(grad.dtype) * beta2 + grad.square() * (1 - beta2)
    state["exp_avg"].copy_(exp_avg)
    state["exp_avg_sq"].copy_(exp_avg_sq)
    return exp_avg / (exp_avg_sq.sqrt() + args.eps) * (args.bias_correction2.sqrt() / args.bias_correction1)


def spectral_step(weight: Tensor, update: Tensor, args: UpdateArgs) -> Tensor:
    """Weight decay and a step of spectral norm lr for square matrices, more for tall ones (record 4)."""
    rows, columns = update.shape[-2:]
    decay = args.weight_decay * (update * weight >= 0) if args.cautious else args.weight_decay
    return weight * (1 - decay) - update * (args.lr * max(1, rows / columns) ** 0.5)


def sphere_step(weight: Tensor, update: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> Tensor:
    """W <- R N(W - lr R N(update)), with N(X) = X / |X| and the initial norm R of each matrix.

    An update at a right angle to W rotates it by arctan(lr). Source: Hyperball, arXiv 2606.16899.
    """
    radius, update = state["radius"], update.to(at_least_fp32(update))
    weight = weight - update * (args.lr * radius / matrix_norm(update).clamp(min=1e-10))
    return weight * (radius / matrix_norm(weight).clamp(min=1e-10))


def matrix_norm(x: Tensor) -> Tensor:
    """Frobenius norm of each matrix of x (M, rows, columns), float32 (M, 1, 1)."""
    return x.to(at_least_fp32(x)).square().sum(dim=(-2, -1), keepdim=True).sqrt()

# ==== OPTIMIZER ============================================================================================
# Parameters of one kind are views of a bucket, one tensor. In the last micro-batch before a group's update,
# a gradient hook starts the reduce-scatter of each bucket whose gradients are all final. step() then updates
# this rank's shard and starts an all-gather of the new values. In the next forward, a pre-hook of each
# module waits for the parameters that it reads first. With sparse_embedding, tables send their rows in every
# micro-batch instead, see ROW-SPARSE GRADIENTS. One rank does not communicate. Sources: records 23, 24, 32.

LARGE_PARAMETER = 2**20  # elements. Larger elementwise parameters have a separate bucket
ALIGNMENT = 32  # elements: parameters in elementwise buckets are aligned to 64 bytes


def plan_buckets(model: nn.Module, cfg: Config, world_size: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Divide the named parameters into buckets of about cfg.comm_bucket_mb, last layers first.

    Parameters of a bucket have equal group, dtype and, for matrix rules, shape. If possible, a bucket ends
    if its matrices divide evenly among the ranks. On one rank each kind has one bucket.
    """
    kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, param in reversed(list(model.named_parameters())):  # in the order in which backward ends
        spec = getattr(param, "spec", None)
        assert spec and spec.group in cfg.groups, (
            f"parameter {name} {tuple(param.shape)} has no group: create it with parameter() in one of "
            f"{', '.join(cfg.groups)}")
        if RULES[cfg.groups[spec.group].rule].whole_matrix:
            kind = param.shape[-2:]
        else:
            kind = name if param.numel() >= LARGE_PARAMETER or spec.is_table else "small"
        kinds.setdefault((spec.group, param.dtype, kind), []).append((name, param))
    buckets = []
    for (group, dtype, kind), named in kinds.items():
        unit_size = math.prod(kind) if RULES[cfg.groups[group].rule].whole_matrix else 1
        limit = cfg.comm_bucket_mb * 1e6 / (unit_size * dtype.itemsize) if world_size > 1 else math.inf
        bucket, num_units = [], 0
        for name, param in named:
            if bucket and num_units >= limit and num_units % world_size == 0:
                buckets.append(bucket)
                bucket, num_units = [], 0
            bucket.append((name, param))
            num_units += param.numel() // unit_size
        buckets.append(bucket)
    return buckets


class Bucket:
    """Parameters as one tensor: values (M, *unit), and this rank's shard (M/N, *unit) of values and state.

    A unit is a matrix for rules that need whole matrices, else one element. Padding has no gradient.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], group_name: str, group: Group, rt: Runtime,
                 fp32_state: bool):
        first = named[0][1]
        self.name, self.group_name, self.group, self.comm = named[0][0], group_name, group, rt.comm
        self.params, self.rule, num_ranks = dict(named), RULES[group.rule], rt.world_size

        # Layout: parameters are aligned, and the bucket is padded to a multiple of the ranks. Each rank owns
        # whole rows of a table.
        unit = tuple(first.shape[-2:]) if self.rule.whole_matrix else ()
        row_size = first.size(-1) if first.spec.is_table else 0  # D
        align, self.slices, size = 1 if unit else row_size or ALIGNMENT, {}, 0
        for name, param in named:
            self.slices[name] = slice(size, size + param.numel() // math.prod(unit))
            size += -(-(self.slices[name].stop - size) // align) * align
        size = -(-size // (align * num_ranks)) * align * num_ranks

        # Storage: parameters become views of values, which begin as those of rank 0
        self.values = torch.zeros(size, *unit, dtype=first.dtype, device=rt.device)
        for name, param in named:
            values = self.values[self.slices[name]].view(param.shape)
            values.copy_(param.data)
            param.data = values
        self.comm.broadcast(self.values)
        self.shard = self.comm.local_shard(self.values)
        self.state = self.rule.init_state(self.shard, fp32_state)
        self.lr_mul = self._make_multipliers({name: param.spec.lr_mul for name, param in named}, size, unit)
        self.wd_mul = self._make_multipliers({name: param.spec.wd_mul for name, param in named}, size, unit)

        # Communication
        self.sparse: RowSparseGradient | None = None  # of a table, if its gradient is row-sparse
        self.first_reader = 0  # index of the first module that reads it: GPT, the segments, the head
        self.num_pending_grads = len(named)  # parameters whose gradient is not final
        self.num_tokens = 0  # of the gradients since the last update
        self.is_reduced = self.needs_gather = False
        self.grad = self.reducing = self.gathering = None

    def _make_multipliers(self, values: dict[str, float | tuple], size: int, unit: tuple) -> Tensor:
        """This rank's multipliers: (M/N, 1, 1) of matrices, (M/N,) of elements, or (1,) if all are equal."""
        like = dict(dtype=at_least_fp32(self.values), device=self.values.device)
        if not unit and len(set(values.values())) == 1 and not isinstance(values[self.name], tuple):
            return torch.tensor([values[self.name]], **like)
        multipliers = torch.ones(size, **like)
        for name, value in values.items():  # one for a parameter, or one for each of its matrices
            value = torch.tensor(value, **like).view(-1, 1)
            multipliers[self.slices[name]].view(len(value), -1).copy_(value)
        return self.comm.local_shard(multipliers.view(-1, *[1] * len(unit)))

    def start_reduce(self) -> None:
        """Pack the gradients as (M, *unit) and start their reduce-scatter."""
        self.is_reduced = True
        if self.sparse:  # its rows were sent during backward
            return
        grads = [param.grad for param in self.params.values()]
        if len(grads) == 1 and grads[0] is not None and grads[0].numel() == self.values.numel():
            packed = grads[0].view(self.values.shape)
        else:
            packed = torch.zeros_like(self.values)
            pairs = [(packed[part].view(grad.shape), grad)
                     for part, grad in zip(self.slices.values(), grads) if grad is not None]
            torch._foreach_copy_(*map(list, zip(*pairs))) if pairs else None
        self.grad = packed
        if self.comm.world_size > 1:
            self.grad, self.reducing = self.comm.reduce_scatter(packed)

    def update(self, update: Callable, args: UpdateArgs, probe: Probe | None) -> None:
        """Wait for the gradients, update this rank's shard, clear the gradients."""
        if probe:
            probe.mark("communication")
        if self.reducing is not None:
            self.reducing.wait()
        if self.sparse:
            assert all(param.grad is None for param in self.params.values()), (
                f"{self.name} is a table with an ordinary gradient: read it with ops.embedding()")
            self.grad = self.sparse.wait()
        if probe:
            probe.mark("optimizer")
        before = self.shard.clone() if probe and probe.is_full else None
        update(self.shard, self.grad, self.state, args)
        if probe:
            probe.note(self, self.grad, before)
        self.clear()
        self.needs_gather = True

    def start_gather(self) -> None:
        self.needs_gather = False
        if self.comm.world_size > 1:
            self.gathering = self.comm.all_gather(self.values, self.shard)

    def finish(self) -> None:
        """Wait for the new values."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def clear(self) -> None:
        """Discard the gradients."""
        self.grad = self.reducing = None
        self.num_pending_grads, self.num_tokens, self.is_reduced = len(self.params), 0, False
        if self.sparse:
            self.sparse.clear()
        for param in self.params.values():
            param.grad = None

    def full_tensor(self, key: str) -> Tensor:
        """The values (key ""), or the state of all ranks: (M, ...)."""
        return self.values if key == "" else self.comm.gather_shards(self.state[key])


class Optimizer:
    """All buckets of a model. Owns the storage of every parameter."""

    def __init__(self, model: nn.Module, cfg: Config, rt: Runtime):
        self.model, self.cfg, self.rt, self.step_count = model, cfg, rt, 0
        self.probe: Probe | None = None  # measures the current step
        self.is_last_micro_batch = False
        self.buckets: list[Bucket] = []
        for named in plan_buckets(model, cfg, rt.world_size):
            group = named[0][1].spec.group
            self.buckets.append(Bucket(named, group, cfg.groups[group], rt, cfg.state_dtype == "float32"))
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.params}
        for bucket in self.buckets:
            for name in bucket.params if bucket.rule.keeps_norm else ():
                if not matrix_norm(bucket.values[bucket.slices[name]]).all():
                    raise InputError(f"--matrix_rule={bucket.group.rule} keeps the norm of every matrix, "
                                     f"and one of {name} is zero: give --output_gain=on or --zero_init=off, "
                                     "and --init_std above 0")
        names = {bucket.group_name for bucket in self.buckets}
        self.groups = [name for name in cfg.groups if name in names]
        self.symmetric_matmul = make_operations(cfg, rt.fast, rt.dtype).symmetric_matmul
        compiled = {name: rt.compile(RULES[name].update) for name in {b.group.rule for b in self.buckets}}
        self.updates = {bucket: fused_adamw if "fused_adamw" in rt.fast and can_fuse_adamw(bucket, cfg)
                        else compiled[bucket.group.rule] for bucket in self.buckets}

        # The head's first update in a step of at least untie_step is the last one that is tied
        self.untie_step = sys.maxsize
        if cfg.untie_frac < 1:
            self.untie_step = math.ceil(cfg.untie_frac * (cfg.num_iterations - cfg.extension_steps))
        self.set_tied(model.is_tied)

        # A hook starts each reduce-scatter, and a hook waits for each all-gather
        for name, param in model.named_parameters():
            hook = functools.partial(self._on_gradient, self.bucket_of[name]) if rt.world_size > 1 else None
            if param.spec.is_table and "sparse_embedding" in rt.fast:
                param.sparse_grad = self.bucket_of[name].sparse = RowSparseGradient(
                    self.bucket_of[name].shard, param.size(1), rt.comm, cfg.grad_grid, hook)
                continue
            if cfg.grad_grid:
                param.register_hook(functools.partial(round_to_multiple, unit=cfg.grad_grid))
            if hook:
                param.register_post_accumulate_grad_hook(hook)
        for index, module in enumerate((model, *model.segments, model.head) if rt.world_size > 1 else ()):
            module.register_forward_pre_hook(functools.partial(self.wait_for_parameters, index))

    def set_tied(self, is_tied: bool) -> None:
        """While tied, the model reads head.weight in place of embed, and embed is not updated."""
        model, embed = self.model, self.bucket_of["embed"]
        model.is_tied = is_tied
        self.updated = [bucket for bucket in self.buckets if not (is_tied and bucket is embed)]
        first_reader = {}
        for index, module in enumerate((*model.segments, model.head), start=1):
            for param in module.parameters():
                first_reader.setdefault(param, index)
        if is_tied:
            first_reader[model.head.weight] = 0
        for bucket in self.buckets:
            bucket.first_reader = min(first_reader.get(param, 0) for param in bucket.params.values())

    def untie(self) -> None:
        """The embedding becomes a copy of the head, including state (2025-12-22)."""
        head, embed = self.bucket_of["head.weight"], self.bucket_of["embed"]
        head.finish()
        embed.values.copy_(head.values)
        for key, state in embed.state.items():
            state.copy_(head.state[key])
        self.set_tied(False)

    def _on_gradient(self, bucket: Bucket, _param: Tensor | None = None) -> None:
        """Gradient hook: reduce-scatter a complete bucket, in the last micro-batch of a due step."""
        if self.is_last_micro_batch and bucket.group.is_due(self.step_count):
            bucket.num_pending_grads -= 1
            if bucket.num_pending_grads == 0:
                bucket.start_reduce()

    def wait_for_parameters(self, reader: int, *_) -> None:
        """Forward pre-hook: wait for the all-gathers of the parameters that this module reads first."""
        if torch.compiler.is_compiling():
            return
        if self.probe:
            self.probe.mark("communication")
        for bucket in self.buckets:
            if bucket.first_reader == reader:
                bucket.finish()
        if self.probe:
            self.probe.mark("forward and backward")

    @torch.no_grad()
    def step(self, state: StepState) -> None:
        """Update every bucket that is due. Parameters are valid after wait_for_parameters() or finish()."""
        for bucket in self.updated:
            bucket.num_tokens += state.stage.tokens_per_step
        due = [bucket for bucket in self.updated if bucket.group.is_due(self.step_count)]
        self.step_count += 1

        # Phase 1: reduce-scatter the gradients that no hook has sent. One rank has no such hooks.
        for bucket in due:
            if not bucket.is_reduced:
                bucket.start_reduce()

        # Phase 2: update this rank's shards. Matrices of the last segments are first, because their
        # gradients arrived first. Gradients of tables may still be in flight.
        # Phase 3: all-gather new values in the order in which forward reads them. A bucket
        # that is updated early waits for the buckets that forward reads before it.
        in_reading_order = sorted(due, key=lambda bucket: bucket.first_reader)
        late = [bucket for bucket in due if bucket.group_name == "matrix" and bucket.first_reader > 1]
        to_gather = deque(in_reading_order)
        for bucket in (*late, *(bucket for bucket in in_reading_order if bucket not in late)):
            bucket.update(self.updates[bucket], self.make_args(bucket, state), self.probe)
            while to_gather and to_gather[0].needs_gather:
                to_gather.popleft().start_gather()
        self.is_last_micro_batch = False
        if self.model.is_tied and self.step_count > self.untie_step and self.bucket_of["head.weight"] in due:
            self.untie()

    def make_args(self, bucket: Bucket, state: StepState) -> UpdateArgs:
        """The hyperparameters of a bucket's update."""
        cfg, group, dtype = self.cfg, bucket.group, at_least_fp32(bucket.values)
        num_updates, (beta1, beta2) = self.step_count // group.every, group.betas
        lr = bucket.lr_mul * state.lr[bucket.group_name]
        return UpdateArgs(
            lr=lr,
            weight_decay=lr * bucket.wd_mul * state.weight_decay[bucket.group_name],
            momentum=torch.tensor(state.momentum, dtype=dtype),
            grad_scale=torch.tensor(GRAD_TOKENS / cfg.tokens_per_step, dtype=dtype),  # not the stage's
            bias_correction1=torch.tensor(1 - beta1**num_updates, dtype=dtype),
            bias_correction2=torch.tensor(1 - beta2**num_updates, dtype=dtype),
            betas=group.betas, eps=cfg.adam_eps, dtype=self.rt.dtype, polynomial=cfg.orthogonalize,
            cautious=cfg.decay == "cautious", symmetric_matmul=self.symmetric_matmul)

    def finish(self) -> None:
        """Wait for all parameters."""
        for bucket in self.buckets:
            if bucket.gathering is not None:
                bucket.finish()
        if self.model.is_tied:
            self.bucket_of["embed"].values.copy_(self.bucket_of["head.weight"].values)

    def has_no_pending_gradients(self) -> bool:
        """Whether no gradient waits for a later update. Only then a snapshot is complete."""
        return not any(bucket.num_tokens for bucket in self.updated)

# ==== SCHEDULES ============================================================================================
# Everything that changes with the step, as pure functions of the step. StepState is the result, and
# --print_schedule prints it. To add a schedule, add a method and its field in StepState, and pass the field
# on in Trainer.train_step(). Source: record 32.

ROTARY_BASE = 1024  # the lowest RoPE frequency is 1 / ROTARY_BASE


class StepState(typing.NamedTuple):
    """The schedule at one step."""

    stage_index: int
    stage: Stage
    windows: tuple[int, int]  # long, short
    lr: dict[str, float]  # by parameter group
    weight_decay: dict[str, float]  # by parameter group, before the multiplication by lr
    momentum: float
    loss_weights: tuple[float, ...]  # of the targets, see Head.forward()
    frequencies: np.ndarray  # (K/2,) RoPE, radians per token, after YaRN
    softmax_scale: float


def parse_ramps(text: str) -> list[tuple[float, float]]:
    """'1 0.5:0' -> [(1, 1), (0.5, 0)]: weights at the start and at the end of a stage. Raises ValueError."""
    ramps = [tuple(map(float, word.split(":"))) for word in text.split()]
    if not all(len(ramp) <= 2 and all(0 <= value < 1e6 for value in ramp) for ramp in ramps):
        raise ValueError
    return [(ramp[0], ramp[-1]) for ramp in ramps]


class Schedule:
    """The schedules of a run."""

    def __init__(self, cfg: Config):
        self.cfg, self.num_iterations, self.stages = cfg, cfg.num_iterations, cfg.full_stages
        self.scheduled_steps = cfg.num_iterations - cfg.extension_steps

        # First step after each stage: frontier has 423, 847, 1270 and 1285. The extension is the last stage.
        durations = [stage.duration for stage in cfg.stages][: len(cfg.stages) - bool(cfg.extension_steps)]
        ends = np.cumsum(durations) * (self.scheduled_steps + 1) / sum(durations)
        self.ends = [math.ceil(end) for end in ends]
        if cfg.extension_steps:
            self.ends = [*self.ends[:-1], self.scheduled_steps, self.num_iterations]

        # Windows of each stage, and of the final validation
        self.windows = [(stage.window_long, stage.window_short) for stage in cfg.stages]
        self.windows.append(cfg.val_windows or self.windows[-1])
        self.loss_weight_ramps = [
            parse_ramps(f"{stage.loss_weights} {stage.prefix_weight}")[: stage.num_targets]
            for stage in cfg.stages]
        self.rope_settings = self._adapt_rope()

    def _adapt_rope(self) -> list[tuple[np.ndarray, float]]:
        """RoPE frequencies (K/2,) and softmax scale for each entry of windows (YaRN, arXiv 2309.00071).

        Half of the channel pairs have frequency 0: they do not rotate (record 17).
        """
        cfg, quarter, settings = self.cfg, self.cfg.head_dim // 4, []
        exponents = np.concatenate((np.linspace(0, 1, quarter), np.full(quarter, np.inf)))
        frequencies, softmax_scale = (1 / ROTARY_BASE) ** exponents, cfg.attention_scale
        old_window = None
        for window_long, _ in self.windows:
            window = min(window_long, cfg.yarn_max_window) or 1
            old_window = old_window or window
            rotations = old_window * frequencies / (2 * math.pi)
            keep = np.clip((rotations - 1) / (32 - 1), 0, 1)  # high frequencies stay
            frequencies = frequencies * (old_window / window + keep * (1 - old_window / window))
            softmax_scale *= 0.2 * math.log(window / old_window) + 1
            old_window = window
            settings.append((frequencies, softmax_scale))
        return settings

    def stage_ranges(self) -> list[tuple[Stage, int, int]]:
        """(stage, first step, first step after it) of every stage that has steps."""
        ranges = [(stage, start, min(end, self.num_iterations))
                  for stage, start, end in zip(self.stages, [0, *self.ends], self.ends)]
        return [(stage, start, end) for stage, start, end in ranges if start < end]

    def count_tokens(self, first_step: int = 0) -> int:
        """Training tokens of the whole run, or from a step on."""
        return sum(stage.tokens_per_step * max(0, end - max(start, first_step))
                   for stage, start, end in self.stage_ranges())

    def at(self, step: int) -> StepState:
        """The state at a step. At num_iterations: the final validation."""
        assert 0 <= step <= self.num_iterations, f"step {step} is outside 0..{self.num_iterations}"
        index, fraction = self.find_stage(step)
        window_index = len(self.stages) if step == self.num_iterations else index
        frequencies, softmax_scale = self.rope_settings[window_index]
        groups, ones = self.cfg.groups, dict.fromkeys(self.cfg.groups, 1.0)
        lr_factors = {name: self.compute_lr_factor(step, name) for name in groups}
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.num_iterations)
        decay_factors = dict(constant=ones, lr=lr_factors, cosine=dict.fromkeys(groups, cosine))[
            self.cfg.decay_schedule]
        return StepState(
            stage_index=window_index, stage=self.stages[index], windows=self.windows[window_index],
            lr={name: group.lr * lr_factors[name] for name, group in groups.items()},
            weight_decay={name: group.weight_decay * decay_factors[name] for name, group in groups.items()},
            momentum=self.compute_momentum(step),
            loss_weights=tuple(a + (b - a) * fraction for a, b in self.loss_weight_ramps[index]),
            frequencies=frequencies, softmax_scale=softmax_scale)

    def find_stage(self, step: int) -> tuple[int, float]:
        """(index of the stage, fraction of it before this step)."""
        index = next((i for i, end in enumerate(self.ends) if step < end), len(self.ends) - 1)
        start, end = self.ends[index - 1] if index else 0, min(self.ends[index], self.num_iterations)
        return index, (step - start) / max(1, end - start)

    def compute_lr_factor(self, step: int, group: str) -> float:
        """Linear warmup to the stage's lr_factor, then linear cooldown to final_lr_frac."""
        cfg, peak = self.cfg, self.stages[self.find_stage(step)[0]].lr_factor
        has_cooldown = group == "matrix" and cfg.matrix_cooldown_frac >= 0
        cooldown_frac = cfg.matrix_cooldown_frac if has_cooldown else cfg.cooldown_frac
        warmup_steps = cfg.lr_warmup_frac * self.scheduled_steps
        if step + 1 < warmup_steps:
            return peak * (step + 1) / warmup_steps
        remaining = max(0.0, 1 - step / self.scheduled_steps)  # fraction of the schedule
        if cooldown_frac == 0 or remaining > cooldown_frac:
            return peak
        t = remaining / cooldown_frac  # from 1 to 0
        return peak * t + cfg.final_lr_frac * (1 - t)

    def compute_momentum(self, step: int) -> float:
        """Muon momentum: linear warmup in the first steps, linear cooldown in the last."""
        cfg, t = self.cfg, 1.0
        if step < cfg.momentum_warmup_steps:
            t = step / cfg.momentum_warmup_steps
        if step > self.num_iterations - cfg.momentum_cooldown_steps:
            t = min(t, (self.num_iterations - step) / cfg.momentum_cooldown_steps)
        return cfg.momentum_start + t * (cfg.momentum_end - cfg.momentum_start)

    def scale_lr(self, state: StepState, factor: float) -> StepState:
        """Scale all learning rates by a factor, for the guard. Weight decays that follow them scale, too."""
        decay_factor = factor if self.cfg.decay_schedule == "lr" else 1.0
        return state._replace(
            lr={name: lr * factor for name, lr in state.lr.items()},
            weight_decay={name: decay * decay_factor for name, decay in state.weight_decay.items()})


def make_step_inputs(state: StepState, num_tokens: int, seq_len: int, rt: Runtime, cfg: Config
                     ) -> StepInputs:
    """Inputs of the model for num_tokens tokens at a schedule state. Positions restart every seq_len tokens.

    RoPE tables are float32 on CUDA. Without a compiler they are expanded here, once per stage.
    """
    dtype = torch.float32 if rt.device.type == "cuda" else rt.dtype
    positions = torch.arange(num_tokens, device=rt.device) % seq_len
    frequencies = torch.tensor(state.frequencies[: cfg.head_dim // 4], device=rt.device)  # (K/4,)
    softmax_scale = torch.tensor(state.softmax_scale, dtype=torch.float64, device=rt.device)

    def make_rope(positions: Tensor) -> Rope:
        """positions (T, P) -> tables. P = 2 for paired layers."""
        angles = positions[..., None].double() * frequencies  # (T, P, K/4)
        rope = Rope(angles.cos(), angles.sin())
        if not rt.use_compile:
            is_cpu = rt.device.type == "cpu"  # broadcasting is slow on CPUs
            heads = cfg.num_heads // positions.size(1) if is_cpu else 1
            rope = expand_rope(rope, softmax_scale, cfg.rotary_pairs)
            rope = Rope(*(x.expand(-1, -1, heads, -1, -1) for x in rope))
        return Rope(*(x.to(dtype).contiguous() for x in rope))

    paired_rope = None
    if any(spec.paired for spec in cfg.layers):
        paired_rope = make_rope(2 * positions[:, None] + torch.arange(2, device=rt.device))
    is_fixed = torch.tensor(state.frequencies == 0, device=rt.device)  # (K/2,) pairs that do not rotate
    is_fixed = is_fixed.repeat(2) if cfg.rotary_pairs == "halves" else is_fixed.repeat_interleave(2)  # (K,)
    windows = state.windows
    if "flex_attention" in rt.fast:
        windows = torch.tensor(windows, dtype=torch.int32, device=rt.device)
    return StepInputs(
        windows=windows, rope=make_rope(positions[:, None]), paired_rope=paired_rope,
        softmax_scale=softmax_scale.to(dtype),
        is_unrotated=(is_fixed & (positions > 0)[:, None, None]).to(dtype),
        is_sequence_start=positions == 0, has_prefix_target=state.stage.has_prefix_target)

# ==== DATA =================================================================================================
# Shards become packed sequences, and these become batches. A packed sequence is seq_len tokens of documents,
# each of which is cut to max_doc_len. All sequences of a run are planned before the first step. Ranks and
# micro-batches divide the plan, so the loss does not depend on their numbers. To change the packing, change
# plan_sequences(). Source: record 32. data/README.md describes the shard files.

class Batch(typing.NamedTuple):
    """Tokens of one forward pass (T,): int32 inputs, int64 targets, increasing int32 document numbers."""

    inputs: Tensor
    targets: Tensor
    doc_ids: Tensor


class PackedSequence(typing.NamedTuple):
    """The first seq_len + 1 tokens of documents first..last of a shard, each cut to max_doc_len.

    With --sequence_start=anywhere: tokens first..last.
    """

    shard: int
    first: int
    last: int
    seq_len: int
    max_doc_len: int


def plan_sequences(schedule: Schedule, shards: Iterator[tuple[int, Shard]]) -> Iterator[PackedSequence]:
    """The packed sequences of the whole run in order, as far as the shards suffice.

    A sequence takes the next documents, the fewest that have seq_len + 1 tokens after the cut to
    max_doc_len. The excess of the last one is dropped. Too few tokens at the end of a shard are skipped.
    """
    (index, shard), next_document = next(shards), 0
    for stage, first_step, end_step in schedule.stage_ranges():
        usable = shard.usable_tokens(stage.max_doc_len)  # running sum over documents
        for _ in range((end_step - first_step) * stage.tokens_per_step // stage.seq_len):
            while (last := find_last_document(usable, next_document, stage.seq_len)) is None:
                (index, shard), next_document = next(shards, (-1, None)), 0
                if shard is None:
                    return
                usable = shard.usable_tokens(stage.max_doc_len)
            yield PackedSequence(index, next_document, last, stage.seq_len, stage.max_doc_len)
            next_document = last + 1


def find_last_document(usable: np.ndarray, first: int, seq_len: int) -> int | None:
    """Last document of the sequence that begins with document `first`. None if too few tokens remain."""
    tokens_before = usable[first - 1] if first else 0
    last = int(np.searchsorted(usable, tokens_before + seq_len + 1))
    return last if last < len(usable) else None


def plan_sequences_anywhere(schedule: Schedule, shards: Iterator[tuple[int, Shard]]
                            ) -> Iterator[PackedSequence]:
    """As plan_sequences(), but each sequence begins with the last target of the previous one."""
    (index, shard), position = next(shards), 0
    for stage, first_step, end_step in schedule.stage_ranges():
        for _ in range((end_step - first_step) * stage.tokens_per_step // stage.seq_len):
            while position + stage.seq_len >= shard.num_tokens:
                (index, shard), position = next(shards, (-1, None)), 0
                if shard is None:
                    return
            last = position + stage.seq_len
            yield PackedSequence(index, position, last, stage.seq_len, stage.max_doc_len)
            position = last


def sequences_per_rank(cfg: Config, world_size: int, tokens_per_step: int, seq_len: int) -> tuple[int, int]:
    """The share of a rank in a step: (number of micro-batches, sequences per micro-batch)."""
    num_sequences = tokens_per_step // seq_len // world_size
    limit = min(cfg.micro_batch_tokens // seq_len, num_sequences)
    per_micro_batch = max(n for n in range(1, limit + 1) if num_sequences % n == 0)
    return num_sequences // per_micro_batch, per_micro_batch


class TrainData:
    """The packed sequences of a whole run. Every rank can build each of them."""

    def __init__(self, cfg: Config, schedule: Schedule):
        """Plan all sequences and open the shards that they need. InputError if tokens are missing."""
        self.cfg, self.schedule, self.shards = cfg, schedule, []
        paths = find_shards(cfg.train_files, "train_files")
        self.bar = tqdm(total=len(paths), desc="scan shards", unit="file", disable=not show_bar(),
                        leave=False)
        plan = plan_sequences if cfg.sequence_start == "document" else plan_sequences_anywhere
        self.sequences = list(plan(schedule, self._open_shards(paths)))
        self.bar.close()
        if len(self.sequences) < self.count_sequences(cfg.num_iterations):
            report_missing_tokens(cfg, schedule, self.sequences, self.count_sequences(cfg.num_iterations))

    def _open_shards(self, paths: list[str]) -> Iterator[tuple[int, Shard]]:
        """(index, shard) in order, once per epoch. Each is opened when it is first needed."""
        for _ in range(self.cfg.epochs):
            for index, path in enumerate(paths):
                if index == len(self.shards):
                    self.shards.append(open_shard(path, self.cfg.vocab_size))
                    self.bar.update()
                yield index, self.shards[index]

    def count_sequences(self, step: int) -> int:
        """Packed sequences before a step."""
        return sum((min(end, step) - start) * (stage.tokens_per_step // stage.seq_len)
                   for stage, start, end in self.schedule.stage_ranges() if start < step)

    def read_tokens(self, index: int) -> np.ndarray:
        """The seq_len + 1 tokens of a packed sequence, uint16."""
        sequence = self.sequences[index]
        shard = self.shards[sequence.shard]
        if self.cfg.sequence_start == "anywhere":
            return shard.read(sequence.first, sequence.last + 1)
        starts = shard.starts[sequence.first : sequence.last + 2].tolist()
        ends = [*starts[1:], shard.num_tokens][: sequence.last + 1 - sequence.first]
        tokens = shard.read(starts[0], min(ends[-1], starts[len(ends) - 1] + sequence.max_doc_len))
        documents = [tokens[start - starts[0] : min(end, start + sequence.max_doc_len) - starts[0]]
                     for start, end in zip(starts, ends)]
        return np.concatenate(documents)[: sequence.seq_len + 1]

    def batch(self, indices: range) -> Batch:
        tokens = np.stack([self.read_tokens(index) for index in indices])  # (sequences, seq_len + 1)
        return make_batch(tokens, self.shards[0].bos, self.cfg.document_mask == "on")

    def batches(self, rt: Runtime, start: int, end: int) -> Iterator[Batch]:
        """This rank's micro-batches of steps start..end-1.

        The sequences of a step are divided among the ranks in order: the first ones belong to rank 0.
        """
        for step in range(start, end):
            stage = self.schedule.stages[self.schedule.find_stage(step)[0]]
            num_micro_batches, size = sequences_per_rank(
                self.cfg, rt.world_size, stage.tokens_per_step, stage.seq_len)
            first = self.count_sequences(step) + rt.rank * num_micro_batches * size
            for i in range(first, first + num_micro_batches * size, size):
                yield self.batch(range(i, i + size))


def make_batch(tokens: np.ndarray, bos: int, has_document_mask: bool = True) -> Batch:
    """Packed sequences (sequences, 1 + seq_len) of any integer dtype -> one Batch on the CPU.

    Attention never crosses sequences. It crosses documents only without a document mask.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].ravel()
    is_start = (inputs == bos) & has_document_mask
    is_start[:, 0] = True
    doc_ids = is_start.cumsum(dtype=np.int32)
    inputs = inputs.ravel().astype(np.int32)
    return Batch(*map(torch.from_numpy, (inputs, targets.astype(np.int64), doc_ids)))


class ValData:
    """The first val_tokens of the validation files in sequences of val_seq_len, with whole documents."""

    def __init__(self, cfg: Config):
        self.cfg, num_sequences = cfg, cfg.val_tokens // cfg.val_seq_len
        limit = min(num_sequences, max(1, cfg.micro_batch_tokens // cfg.val_seq_len))
        size = next(n for n in range(limit, 0, -1) if num_sequences % n == 0)  # sequences per batch
        self.batch_tokens, self.num_batches = size * cfg.val_seq_len, num_sequences // size
        self.shards = [open_shard(path, cfg.vocab_size) for path in find_shards(cfg.val_files, "val_files")]
        pieces, missing = [], cfg.val_tokens + 1
        for shard in self.shards:
            pieces.append(shard.read(0, missing))
            missing -= len(pieces[-1])
        if missing:
            limit = (cfg.val_tokens - missing) // cfg.val_seq_len * cfg.val_seq_len
            remedy = f"at most --val_tokens={limit}" if limit else "more text, or a shorter --val_seq_len"
            raise InputError(f"--val_files={cfg.val_files} is {missing} tokens short of "
                             f"--val_tokens={cfg.val_tokens} + 1: give {remedy}")
        self.tokens = np.concatenate(pieces)

    def batch(self, index: int) -> Batch:
        tokens = self.tokens[index * self.batch_tokens :]
        sequences = np.lib.stride_tricks.sliding_window_view(tokens, self.cfg.val_seq_len + 1)
        sequences = sequences[: self.batch_tokens : self.cfg.val_seq_len]  # (sequences, val_seq_len + 1)
        return make_batch(sequences, self.shards[0].bos, self.cfg.document_mask == "on")


class Prefetcher:
    """Builds batches ahead in a thread, pinned for CUDA. next() raises errors of the thread."""

    DEPTH = 4

    def __init__(self, batches: Iterator[Batch], device: torch.device):
        self.batches, self.device = batches, device
        self.executor = ThreadPoolExecutor(1, "prefetch")
        self.pending = deque(self.executor.submit(self._build) for _ in range(self.DEPTH))

    def _build(self) -> Batch | None:
        batch = next(self.batches, None)
        if batch is None or self.device.type != "cuda":
            return batch
        torch.cuda.set_device(self.device)  # a new thread is on device 0, and pinning would allocate there
        return Batch(*(t.pin_memory() for t in batch))

    def __next__(self) -> Batch:
        batch = self.pending.popleft().result()
        assert batch is not None, "there are no more planned batches"
        self.pending.append(self.executor.submit(self._build))
        return Batch(*(t.to(self.device, non_blocking=True) for t in batch))

# ==== TRAINING =============================================================================================
# One step, the loop around it, and the run around the loop. The clock runs during training and stands during
# validation. Callbacks (log, telemetry, guard, rank check) run after each step. To measure or react after
# each step, add a callback in Trainer.run().

MULTI_RANK_SEGMENTS = 4  # graphs with several ranks, so that gradients are reduced during backward


@dataclass
class Progress:
    """State of a run besides its tensors."""

    step: int = 0
    tokens: int = 0
    train_time: float = 0.0  # seconds on the clock
    resumed_at: list[int] = dataclasses.field(default_factory=list)
    good_steps: list[list[float]] = dataclasses.field(default_factory=list)  # guard: last [loss, gradient]
    loss_ema: float = math.nan  # telemetry
    num_actions: int = 0  # of the guard
    lowered: list[str] = dataclasses.field(default_factory=list)  # low precisions that the guard gave up
    lr_scale: float = 1.0  # of the guard
    lr_scale_until: int = 0  # step


@dataclass
class TrainClock:
    """Seconds of training. The clock stands inside paused(). read() does not synchronize the GPU."""

    device: torch.device
    seconds: float  # before `started`
    started: float  # time of the last start, lap or pause

    def read(self) -> float:
        return self.seconds + time.perf_counter() - self.started

    def lap(self) -> float:
        """The exact seconds, after a synchronization."""
        now = clock(self.device)
        self.seconds, self.started = self.seconds + now - self.started, now
        return self.seconds

    @contextmanager
    def paused(self):
        self.seconds += clock(self.device) - self.started
        yield
        self.started = clock(self.device)


class Trainer:
    """Model, optimizer and schedule of a run, one step of it, and the timed loop."""

    def __init__(self, cfg: Config, rt: Runtime):
        self.cfg, self.rt, self.schedule = cfg, rt, Schedule(cfg)
        torch.manual_seed(cfg.seed)
        storage = {} if computes_bfloat16(rt.device) else dict(embed_dtype="float32")
        self.model = GPT(dataclasses.replace(cfg, **storage), rt).to(rt.device)
        num_segments = 1 if rt.world_size == 1 else min(MULTI_RANK_SEGMENTS, cfg.num_layers)
        self.model.split_layers(cfg.segments or num_segments)
        self.optimizer, self.scales = Optimizer(self.model, cfg, rt), DelayedScales(self.model, rt.comm)
        for segment in self.model.segments:
            segment.run_blocks = rt.compile(segment.run_blocks)
        self.model.head.forward = rt.compile(self.model.head.forward)
        self.progress = Progress()
        self.staging: dict[str, Tensor] = {}  # reusable memory for copies of a checkpoint
        self.step_inputs: dict[tuple[int, int], tuple[int, StepInputs]] = {}  # the last stage's, by sizes
        self.inspect: Callable[[Batch, StepInputs], None] | None = None  # telemetry of the next batch

    def train_step(self, batches: Prefetcher, state: StepState) -> Tensor:
        """One optimizer step. Returns the mean loss of this rank's tokens, on the device."""
        rt, progress, optimizer, probe = self.rt, self.progress, self.optimizer, self.optimizer.probe
        num_tokens = state.stage.tokens_per_step // rt.comm.world_size  # of this rank
        loss_weights = torch.tensor(state.loss_weights).to(rt.device, non_blocking=True)
        total_loss, remaining = torch.zeros((), device=rt.device), num_tokens
        if self.scales.reduced is not None:
            self.scales.finish()

        # Forward and backward of each micro-batch. Hooks reduce the gradients during the last backward.
        while remaining:
            if probe:
                probe.mark("data wait")
            batch = next(batches)
            if probe:
                probe.mark("forward and backward")
            remaining -= len(batch.inputs)
            optimizer.is_last_micro_batch = remaining == 0
            step_inputs = self.get_step_inputs(state, len(batch.inputs), state.stage.seq_len)
            if self.inspect:
                self.inspect(batch, step_inputs)
            loss = self.model(*batch, step_inputs, loss_weights)
            loss.backward()
            total_loss += loss.detach()

        # Update
        if "fp8_mlp" in self.model.fp8:
            self.scales.start()
        if progress.step < progress.lr_scale_until:
            state = self.schedule.scale_lr(state, progress.lr_scale)
        optimizer.step(state)
        if probe:
            probe.mark("")
        return total_loss / num_tokens

    @torch.no_grad()
    def validate(self, data: ValData, state: StepState, num_batches: int | None = None) -> float:
        """Mean loss over the validation tokens, or some of them. The ranks share the batches."""
        self.optimizer.finish()
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.rt.device)
        comm, num_batches = self.rt.comm, num_batches or data.num_batches
        for index in range(comm.rank, num_batches, comm.world_size):
            batch = Batch(*(x.to(self.rt.device, non_blocking=True) for x in data.batch(index)))
            total += self.model(*batch, self.get_step_inputs(state, data.batch_tokens, self.cfg.val_seq_len))
        self.model.train()
        return comm.all_reduce(total).item() / (num_batches * data.batch_tokens)

    def get_step_inputs(self, state: StepState, num_tokens: int, seq_len: int) -> StepInputs:
        """The model's inputs at a schedule state, made once per stage."""
        stage_index, step_inputs = self.step_inputs.get((num_tokens, seq_len), (None, None))
        if stage_index != state.stage_index:
            step_inputs = make_step_inputs(state, num_tokens, seq_len, self.rt, self.cfg)
            self.step_inputs[num_tokens, seq_len] = (state.stage_index, step_inputs)
        return step_inputs

    def warm_up(self, train_data: TrainData, val_data: ValData, inspect: Callable | None = None) -> None:
        """Run every shape and window at least once, then restore parameters and optimizer state exactly.

        inspect: telemetry, which compiles a graph for every length.
        """
        if not self.cfg.warmup_iterations:
            return
        saved, num_batches = self.snapshot(), min(self.rt.world_size, val_data.num_batches)
        for _, start, end in self.schedule.stage_ranges():
            self.inspect = inspect
            num_steps = min(self.cfg.warmup_iterations * self.cfg.adam_every, end - start)
            batches = Prefetcher(train_data.batches(self.rt, start, start + num_steps), self.rt.device)
            with batches.executor:
                for _ in range(num_steps):
                    self.train_step(batches, self.schedule.at(start))
            self.validate(val_data, self.schedule.at(start), num_batches)
        self.validate(val_data, self.schedule.at(self.cfg.num_iterations), num_batches)
        self.restore(saved)
        del saved
        if self.rt.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.rt.device)

    def run(self, train_data: TrainData, val_data: ValData, log: RunLog, checkpoints: Checkpoints,
            stop: Stop, telemetry: Telemetry, token_ids: dict[bytes, int]) -> None:
        """All steps from progress.step on. RunStopped after a signal, the time limit or the guard."""
        cfg, rt, optimizer, progress = self.cfg, self.rt, self.optimizer, self.progress
        guard = Guard(self, log, stop) if cfg.guard == "on" else None
        self.log, callbacks = log, [log.log_step]  # called with loss, probe and seconds on the clock
        if cfg.check_ranks_every:
            callbacks.insert(0, lambda *_: progress.step % cfg.check_ranks_every or check_ranks(optimizer))
        callbacks += [x.end_step for x in (guard, telemetry if cfg.telemetry_every else None) if x]

        # ON THE CLOCK from here, as in the published runs: prefix tokens, first batches, all steps and
        # callbacks, the blocking part of checkpoints. OFF THE CLOCK: validation, and all before run()
        timer, save_is_due = TrainClock(rt.device, progress.train_time, clock(rt.device)), False
        if token_ids:
            self.model.head.prefix_tokens.copy_(find_prefix_tokens(token_ids, cfg.padded_vocab_size))
        batches = Prefetcher(train_data.batches(rt, progress.step, cfg.num_iterations), rt.device)
        with batches.executor:
            while progress.step < cfg.num_iterations:
                # 1. Validation
                state = self.schedule.at(progress.step)
                if cfg.val_loss_every and progress.step % cfg.val_loss_every == 0:
                    val_loss = self.log_validation(val_data, state, timer)
                    if guard:
                        guard.judge_validation(progress.step, val_loss)

                # 2. One step
                is_measured = bool(cfg.telemetry_every) and telemetry.start_step()
                if is_measured or guard:
                    optimizer.probe = Probe(optimizer.groups, rt, is_measured)
                loss = self.train_step(batches, state)
                probe, optimizer.probe = optimizer.probe, None
                progress.step += 1
                progress.tokens += state.stage.tokens_per_step
                elapsed = timer.read()
                for callback in callbacks:
                    callback(loss, probe, elapsed)

                # 3. Save or stop, when no gradient waits for a later update
                status, is_last = stop.agree(), progress.step == cfg.num_iterations
                if cfg.checkpoint_every and (is_last or progress.step % cfg.checkpoint_every == 0):
                    save_is_due = True
                if guard and is_last:
                    guard.judge()
                if (status or save_is_due) and (is_last or optimizer.has_no_pending_gradients()):
                    if guard:
                        guard.judge()
                    checkpoints.wait()
                    rt.comm.barrier()  # with a long timeout: a slow disk is not a stalled rank
                    if status:  # staging buffers may be missing, then this save is slow
                        rt.comm.set_timeout(LONG_TIMEOUT)
                    optimizer.finish()
                    progress.train_time, save_is_due = timer.lap(), False
                    checkpoints.save(progress.step, *collect_state(self))
                    if status:
                        stop.end(status, f"step {progress.step} of {cfg.num_iterations}", checkpoints)
        self.log_validation(val_data, self.schedule.at(progress.step), timer)

    def log_validation(self, val_data: ValData, state: StepState, timer: TrainClock) -> float:
        """Validate off the clock and log the loss."""
        step, log = self.progress.step, self.log
        self.optimizer.finish()
        with timer.paused():
            start = time.perf_counter()
            val_loss = self.validate(val_data, state)
            log.val_seconds = time.perf_counter() - start
            self.progress.train_time, time_ms = timer.seconds, timer.seconds * 1000
            log.val_points.append([step, val_loss, round(time_ms)])
            log.write_event("validation", step, val_loss=val_loss, train_time_ms=round(time_ms))
            log.print(f"step:{step}/{self.cfg.num_iterations} val_loss:{val_loss:.4f} "
                      f"train_time:{time_ms:.0f}ms step_avg:{time_ms / max(step, 1):.2f}ms")
        return val_loss

    def tensors(self) -> list[Tensor]:
        """All that training changes: parameters, optimizer state, FP8 scales."""
        return [*(tensor for bucket in self.optimizer.buckets
                  for tensor in (bucket.values, *bucket.state.values())), *self.scales.scales]

    def snapshot(self) -> tuple[int, bool, list[Tensor]]:
        self.optimizer.finish()
        self.scales.finish()
        copies = [tensor.clone() for tensor in self.tensors()]
        return self.optimizer.step_count, self.model.is_tied, copies

    def restore(self, snapshot: tuple[int, bool, list[Tensor]]) -> None:
        """Return to a snapshot exactly. Gradients are discarded."""
        self.optimizer.finish()
        self.scales.finish()
        self.optimizer.step_count, is_tied, copies = snapshot
        self.optimizer.set_tied(is_tied)
        for tensor, copy in zip(self.tensors(), copies):
            tensor.copy_(copy)
        for part in (*self.optimizer.buckets, self.scales):
            part.clear()


def train(cfg: Config, argv: list[str]) -> None:
    """The whole run: inputs, model, warm-up, loop, result."""
    # 1. Find every error in outputs, checkpoint and data before training
    rt = start_runtime(cfg)
    stop, derived = Stop(rt, argv, cfg.time_limit), derived_numbers(cfg, rt.world_size)
    intro = (f"preset {cfg.preset}: {derived['num_params'] / 1e6:.2f} M parameters, {rt.world_size} x "
             f"{rt.device.type}, {derived['train_tokens'] / 1e6:.2f} M training tokens")
    saved, activations = prepare_outputs(cfg, rt)
    print0(f"{intro}, in {Path.cwd()}", rt)  # the log, which records publish, does not name the folder
    if saved and (result := rt.comm.broadcast_object(find_result(saved[1], cfg))):
        print0(f"{saved[0]} is the end of a finished run, see {result}: nothing to do (without --resume it "
               "starts anew)", rt)
        return
    ensure_corpus(cfg, rt)
    setup_start = time.perf_counter()
    train_data, val_data = TrainData(cfg, Schedule(cfg)), ValData(cfg)
    token_ids = read_vocabulary(cfg) if any(stage.has_prefix_target for stage in cfg.stages) else {}
    data_setup_s = round(time.perf_counter() - setup_start, 2)
    with explain_memory(cfg):
        rt = choose_precision(cfg, rt, activations)

    # 2. Log, checkpoints and model
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

        # 3. Warm-up off the clock, and memory for checkpoints
        start, telemetry = clock(rt.device), Telemetry(trainer, log)
        trainer.warm_up(train_data, val_data, telemetry.inspect if cfg.telemetry_every else None)
        if cfg.checkpoint_every or cfg.time_limit:
            make_staging(trainer)
        setup = dict(config={**plain_dict(cfg), "derived": derived},
                     compile_time_s=round(clock(rt.device) - start, 2), data_setup_s=data_setup_s)

        # 4. Training
        log.start_training(trainer.progress, trainer.schedule.count_tokens(trainer.progress.step))
        first_step, bytes_before = trainer.progress.step, rt.comm.step_bytes()
        with stop.catch_signals():
            rt.comm.barrier()
            rt.comm.set_timeout(datetime.timedelta(seconds=cfg.comm_timeout))
            trainer.run(train_data, val_data, log, checkpoints, stop, telemetry, token_ids)
            stop.collect()
        checkpoints.wait()  # its last line belongs into the log

        # 5. Result
        rt, progress, num_steps = trainer.rt, trainer.progress, max(1, cfg.num_iterations - first_step)
        sent = {name: count - bytes_before[name] for name, count in rt.comm.step_bytes().items()}
        minimum = sent["all_to_all"] + count_minimum_bytes(trainer.optimizer, first_step, progress.step)
        tokens_per_s = derived["train_tokens"] / progress.train_time
        flops = tokens_per_s * derived["flops_per_token"]
        log.finish(dict(
            **setup, train_time_ms=round(progress.train_time * 1000), tokens_per_s=round(tokens_per_s),
            mfu=round(flops / (rt.peak_flops * rt.world_size), 4),
            bytes_per_step=round(sum(sent.values()) / num_steps),
            minimum_bytes_per_step=round(minimum / num_steps), peak_memory_mib=read_peak_memory_mib(rt),
            resumed_at=progress.resumed_at, guard_actions=progress.num_actions))
    print_sample(trainer.model, cfg, trainer.rt)

# ############################## PART TWO: FAST FORMS OF PART ONE ###########################################

# ==== FAST FORMS ===========================================================================================
# A fast form is a faster implementation of an operation. Its plain form is the equation in part one. At
# startup verify() compares those in use, forward and backward. It refuses a fast form if the results differ
# or if the code of the plain form was edited. Then the plain form runs, so an edit takes effect. To add a
# fast form, add a row to list_fast_forms(), with the hash that its test prints. Tests compare every row.

TRITON_FORMS = ("cross_entropy", "relu2_mlp", "symmetric_matmul")
EVAL_FORMS = frozenset({"flex_attention", "cpu_attention", "block_attention", "rms_norm", "norm_rotate",
                        "compose_heads"})


class Fast(typing.NamedTuple):
    """A fast form, its plain form, and how to compare them."""

    plain: dict[str, Callable]  # functions of part one by name, mostly fields of Operations
    fast: dict[str, Callable]  # their replacements
    inputs: Callable  # (cfg, device, dtype) -> (differentiable tensors, constants)
    run: Callable  # (functions by name, *tensors, *constants) -> list of results
    tolerance: float  # largest relative error of results and gradients
    code: str  # hash_code() of the plain form for which the fast form was written
    helpers: tuple[Callable, ...] = ()  # other functions that the hash covers
    needs: str = ""  # a key of find_obstacle()
    is_compiled: bool = True  # whether to compile the fast form when the model is compiled


@functools.cache
def list_fast_forms() -> dict[str, Fast]:
    """The table. If rows replace one operation, the first that works is used. FP8 forms have options."""
    masked_attention = dict(make_mask=make_mask, attention=attention)
    loss, loss_helpers = dict(head_loss=head_loss), (linear, Softcap.__call__)
    mlp = dict(relu2_mlp=relu2_mlp)
    return {
        "rms_norm": Fast(
            dict(rms_norm=rms_norm), dict(rms_norm=fused_rms_norm),
            random_inputs((BLOCK, "model_dim")), run_function, 0.01, "fcc3a7e88e55"),
        "norm_rotate": Fast(
            dict(norm_rotate=norm_rotate), dict(norm_rotate=fused_norm_rotate),
            norm_rotate_inputs, run_function, 0.02, "f22c5b3f0285", (rms_norm, rotate)),
        "flex_attention": Fast(
            masked_attention, dict(make_mask=build_block_mask, attention=attend_flex),
            attention_inputs, run_attention, 0.02, "4326e73e8fbf", (is_visible,), "compiled GPU"),
        "cpu_attention": Fast(
            masked_attention, dict(make_mask=build_cpu_mask, attention=attend_cpu),
            attention_inputs, run_attention, 0.02, "4326e73e8fbf", (is_visible,), "eager CPU"),
        "block_attention": Fast(
            masked_attention, dict(make_mask=build_dense_mask, attention=attend_blocks),
            attention_inputs, run_attention, 0.02, "4326e73e8fbf", (is_visible,)),
        "compose_heads": Fast(
            dict(compose_heads=compose_heads), dict(compose_heads=compose_heads_blocked),
            attention_inputs, run_compose_heads, 0.02, "dcffabcdc5ae", (make_mask, is_visible),
            "composed heads"),
        "cross_entropy": Fast(
            loss, dict(head_loss=functools.partial(fused_head_loss, use_kernel=True)),
            head_loss_inputs, run_function, 0.02, "00b545205faf", loss_helpers, "GPU and softcap"),
        "head_loss": Fast(
            loss, dict(head_loss=fused_head_loss),
            head_loss_inputs, run_function, 0.02, "00b545205faf", loss_helpers),
        "relu2_mlp": Fast(
            mlp, dict(relu2_mlp=fused_relu2_mlp),
            mlp_inputs, run_function, 0.02, "0f47cfe2dcdc", needs="Hopper"),
        "symmetric_matmul": Fast(
            dict(symmetric_matmul=symmetric_matmul), dict(symmetric_matmul=triton_symmetric_matmul),
            random_inputs((2, 256, 304)), run_symmetric_matmul, 0.01, "a10feee9059c", needs="GPU"),
        "sparse_embedding": Fast(
            dict(embedding=embedding), dict(embedding=sparse_embedding),
            embedding_inputs, run_embedding, 0.01, "741266a29c9d", is_compiled=False),
        "fused_adamw": Fast(
            dict(adamw=RULES["adamw"].update), dict(adamw=fused_adamw),
            random_inputs(*[(100,)] * 4), run_adamw, 0.01, "61b4f3e19a7f", (adamw, adam_direction), "CPU",
            is_compiled=False),
        "fp8_head": Fast(
            loss, dict(head_loss=functools.partial(  # scales for the comparison only
                fused_head_loss, scales=FP8Scales(64 / 448, 1 / 448, 1 / 448))),
            head_loss_inputs, run_function, 0.2, "00b545205faf", loss_helpers, "fp8_head"),
        "fp8_mlp": Fast(
            mlp, dict(relu2_mlp=relu2_mlp_fp8),
            mlp_inputs, run_fp8_mlp, 0.2, "0f47cfe2dcdc", needs="fp8_mlp"),
        "fp8_linear": Fast(
            dict(linear=linear) | mlp, dict(linear=linear_fp8, relu2_mlp=relu2_mlp_fp8_linear),
            fp8_linear_inputs, run_fp8_linear, 0.2, "611568d4bcf3", needs="fp8_linear"),
    }


def hash_code(*functions: Callable) -> str:
    """Hash of functions' syntax trees without comments and docstrings, equal in all versions of Python."""
    def describe(node) -> str:
        if isinstance(node, ast.AST):
            entries = [f"{name}={describe(value)}" for name, value in ast.iter_fields(node)
                       if value not in (None, []) and name not in ("kind", "type_comment")]
            return f"{type(node).__name__}({','.join(entries)})"
        return f"[{','.join(map(describe, node))}]" if isinstance(node, list) else repr(node)

    trees = []
    for function in functions:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if ast.get_docstring(tree) is not None:
            del tree.body[0]
        trees.append(describe(tree))
    return hashlib.sha256("".join(trees).encode()).hexdigest()[:12]


def make_operations(cfg: Config, names: Iterable[str], dtype: torch.dtype) -> Operations:
    """Operations with these fast forms. dtype: of the activations."""
    ops = Operations()
    for name in (name for name in list_fast_forms() if name in names):
        fast = list_fast_forms()[name].fast
        ops = ops._replace(**{key: fast[key] for key in Operations._fields if key in fast})
    if "cpu_attention" in names or "block_attention" in names:
        ops = ops._replace(make_mask=functools.partial(ops.make_mask, dtype=dtype))
    if "compose_heads" in names and "cpu_attention" in names:
        ops = ops._replace(compose_heads=functools.partial(compose_heads_blocked, build_mask=build_cpu_mask))
    if "fp8_head" in names:
        ops = ops._replace(head_loss=functools.partial(
            fused_head_loss, use_kernel="cross_entropy" in names, scales=head_fp8_scales(cfg)))
    if "fp8_mlp" in names and "relu2_mlp" in names and "fp8_linear" not in names:
        ops = ops._replace(relu2_mlp=functools.partial(relu2_mlp_fp8, use_kernel=True))
    return ops


def compare_forms(row: Fast, cfg: Config, device: torch.device, dtype: torch.dtype, use_compile: bool
                  ) -> list[Tensor]:
    """Relative error () of each result and of each input gradient of a fast form."""
    leaves, constants = row.inputs(cfg, device, dtype)
    results = []
    for forms in (row.fast, row.plain):
        inputs = [x.detach().clone().requires_grad_() for x in leaves]
        run = functools.partial(row.run, forms)
        if use_compile and row.is_compiled and forms is row.fast:
            run = torch.compile(run, dynamic=False)
        outputs = run(*inputs, *constants)
        if any(output.requires_grad for output in outputs):
            sum((output.float() * (output.detach().float() + 1)).sum() for output in outputs).backward()
        results.append([*(output.detach() for output in outputs), *(x.grad for x in inputs)])
    pairs = list(zip(*results, strict=True))
    if any((ours is None) != (plain is None) for ours, plain in pairs):
        raise RuntimeError("it and its plain form give gradients to different inputs")
    return [(ours.float() - plain.float()).norm() / plain.float().norm()
            for ours, plain in pairs if plain is not None]


def verify(name: str, cfg: Config, device: torch.device, dtype: torch.dtype, use_compile: bool,
           others: frozenset[str] = frozenset()) -> str:
    """The reason against a form, or "". FP8 forms call the Triton kernels among `others`."""
    row, kernels = list_fast_forms()[name], others & set(TRITON_FORMS)
    if name in FP8_FORMS and kernels:
        ops = make_operations(cfg, {name, *kernels}, dtype)
        row = row._replace(fast={key: getattr(ops, key) for key in row.fast})
    if hash_code(*row.plain.values(), *row.helpers) != row.code:
        return f"the code of {', '.join(row.plain)} or of its helpers was edited, so the plain form runs"
    if name in TRITON_FORMS and triton is None:
        return "Triton is not installed"
    if name in TRITON_FORMS and not computes_bfloat16(device):
        return "its tiles need more registers than a GPU below capability 8.0 has"
    try:
        for error in compare_forms(row, cfg, device, dtype, use_compile):
            if not error < row.tolerance:
                return f"it differs from its plain form by {float(error):.3g}"
    except Exception as error:  # a compiler error must not stop training
        return f"it fails on this {device.type} device: {' '.join(str(error).split())[:120]}"
    return ""

# ==== FAST ATTENTION =======================================================================================
# Attention without T x T masks, by blocks of queries and keys. On compiled GPUs FlexAttention skips
# invisible blocks. Elsewhere each block of queries reads the blocks of keys in its window. All masks equal
# is_visible(). They require that doc_ids never decrease.

DENSE_BLOCK = {"cpu": 64, "cuda": 256}  # tokens. Small blocks waste less, large ones multiply faster
# FlexAttention's tiles in float32. They fit into 64 KiB of shared memory. PyTorch's defaults do not
FLEX_FLOAT32 = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_M1=16, BLOCK_N1=32, BLOCK_M2=32, BLOCK_N2=16, num_stages=1,
                    num_warps=4)


def build_block_mask(doc_ids: Tensor, window: Tensor) -> BlockMask:
    """make_mask() for FlexAttention, from the range of documents in each block.

    window is a tensor, so one compiled graph serves all windows. The visible key blocks of a query block
    are contiguous and end with that block. Blocks without masked pairs are also contiguous. So the lists
    need no sort. Sources: records 12 and 16.
    """
    first, last = doc_ids.view(-1, BLOCK)[:, 0], doc_ids.view(-1, BLOCK)[:, -1]  # (T/128,)
    block = torch.arange(first.size(0), device=doc_ids.device, dtype=torch.int32)
    row = block[:, None]  # query block, or key block in the lists by key
    distance = (row - block) * BLOCK  # (T/128, T/128) tokens from key block to query block
    overlap = (first[:, None] <= last) & (first <= last[:, None])
    visible = (distance >= 0) & (distance - (BLOCK - 1) <= window) & overlap
    full = ((distance > 0) & (distance + (BLOCK - 1) <= window)
            & (first[:, None] == last) & (first == last[:, None]))
    lists = []  # counts (1, 1, T/128) and blocks (1, 1, T/128, T/128): partial, full
    for is_by_query, dim in ((True, 1), (False, 0)):
        num_visible, num_full = (x.sum(dim, dtype=torch.int32) for x in (visible, full))  # (T/128,)
        start, length = row + 1 - num_visible[:, None], num_full[:, None]
        if is_by_query:
            partial = torch.where(start + block < row - length, start + block, row)
            unmasked = row - length + block
        else:
            partial, unmasked = torch.where(block == 0, row, row + length + block), row + 1 + block
        for counts, blocks in ((num_visible - num_full, partial), (num_full, unmasked)):
            lists += [counts[None, None], blocks.clamp(max=block.size(0) - 1)[None, None]]

    def mask_mod(_batch, _head, query: Tensor, key: Tensor) -> Tensor:
        return is_visible(query, key, doc_ids, window)

    return BlockMask(doc_ids.shape * 2, *lists, (BLOCK, BLOCK), mask_mod)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """attention() by FlexAttention, which never stores the scores."""
    options = FLEX_FLOAT32 if q.dtype == torch.float32 else None
    q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))  # (1, H, T, K)
    y = flex_attention(q, k, v, block_mask=mask, scale=1.0, kernel_options=options)
    return y[0].transpose(0, 1)  # (T, H, K)


def choose_blocks(doc_ids: Tensor, window: int, size: int | None) -> tuple[int, int]:
    """(C, M): a query block of C tokens reads M key blocks, the last of which is its own."""
    num_tokens = doc_ids.size(0)
    size = math.gcd(num_tokens, size or DENSE_BLOCK[doc_ids.device.type])
    num_blocks = 1 + -(-window // size)
    return (size, num_blocks) if num_blocks * size < num_tokens else (num_tokens, 1)


def build_dense_mask(doc_ids: Tensor, window: int, dtype: torch.dtype = torch.float32,
                     size: int | None = None) -> Tensor:
    """make_mask() by blocks: 0 or -inf, added to the scores of C queries and M * C keys. (T/C, C, M * C)."""
    size, num_blocks = choose_blocks(doc_ids, window, size)
    starts = torch.arange(0, doc_ids.size(0), size, device=doc_ids.device).view(-1, 1, 1)
    queries = starts + torch.arange(size, device=doc_ids.device)[:, None]  # (T/C, C, 1)
    keys = starts + torch.arange((1 - num_blocks) * size, size, device=doc_ids.device)  # (T/C, 1, M * C)
    visible = (keys >= 0) & is_visible(queries, keys.clamp(min=0), doc_ids, window)
    return torch.zeros(visible.shape, dtype=dtype, device=doc_ids.device).masked_fill(~visible, -math.inf)


def build_cpu_mask(doc_ids: Tensor, window: int, dtype: torch.dtype = torch.float32, size: int | None = None
                   ) -> Tensor:
    """build_dense_mask() in a sixth of the time without a compiler. The window hides equal pairs in every
    block, and the keys before the query's document are a row of a triangle."""
    size, num_blocks = choose_blocks(doc_ids, window, size)
    num_keys, num_before = num_blocks * size, (num_blocks - 1) * size
    square = torch.full((num_keys, num_keys), -math.inf, dtype=dtype, device=doc_ids.device)
    hidden = square[:size].triu(num_before + 1) + square[:size].tril(num_before - window - 1)  # (C, M * C)
    starts = torch.arange(0, doc_ids.size(0), size, device=doc_ids.device)[:, None]
    first = torch.searchsorted(doc_ids, doc_ids).view(-1, size) - (starts - num_before)  # (T/C, C)
    return F.embedding(first.clamp(min=0), square.tril(-1)).add_(hidden)


def split_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (T, H, K) -> query blocks (T/C, H, C, K), and their keys and values (T/C, H, M * C, K)."""
    num_blocks, size, num_keys = mask.shape
    blocks = [q.unflatten(0, (num_blocks, size)).transpose(1, 2)]
    for x in (k, v):
        x = F.pad(x, (0, 0, 0, 0, num_keys - size, 0)).unflatten(0, (-1, size))  # (T/C + M - 1, C, H, K)
        x = torch.cat([x[i : i + num_blocks] for i in range(num_keys // size)], dim=1)  # (T/C, M * C, H, K)
        blocks.append(x.transpose(1, 2))
    return tuple(blocks)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """attention() by blocks, on any device. Memory is linear in T."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        y = F.scaled_dot_product_attention(*split_blocks(q, k, v, mask), attn_mask=mask[:, None], scale=1.0)
    return y.transpose(1, 2).flatten(0, 1)  # (T, H, K)


def attend_cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """attention() by blocks on a CPU: a third less time, as keys and values are not copied."""
    return BlockAttention.apply(q, k, v, mask)


class BlockAttention(torch.autograd.Function):
    """attend_cpu() with its gradient."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q, k, v (T, H, K), mask (T/C, C, M * C) -> (T, H, K)."""
        num_blocks, size, num_keys = mask.shape
        q = q.transpose(0, 1).contiguous().unflatten(1, (num_blocks, size))  # (H, T/C, C, K)
        k, v = (F.pad(x.transpose(0, 1), (0, 0, num_keys - size, 0)) for x in (k, v))  # (H, T + (M-1) C, K)
        scores, y = q.new_empty(q.size(0), *mask.shape), torch.empty_like(q)  # (H, T/C, C, M * C)
        for head, keys in enumerate(k):  # unfold: overlapping views (T/C, K, M * C)
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
                blocks = (weights[head].mT @ x[head]).unflatten(1, (-1, size))  # (T/C, M, C, K)
                sums = total[head].unflatten(0, (-1, size))  # (T/C + M - 1, C, K)
                for i in range(num_keys // size):
                    sums[i : i + num_blocks] += blocks[:, i]
        grads = (x[:, num_keys - size :].transpose(0, 1) for x in (grad_k, grad_v))
        return grad_q.flatten(1, 2).transpose(0, 1), *grads, None


def compose_heads_blocked(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, dc_pre: Tensor, dc_post: Tensor,
                          window: int = DC_WINDOW, build_mask: Callable = build_dense_mask) -> Tensor:
    """compose_heads() by blocks of 128 tokens."""
    mask = build_mask(doc_ids, window, q.dtype, BLOCK)  # (T/C, C, 2C)
    q, k, v = split_blocks(q, k, v, mask)
    probs = (q @ k.mT + mask[:, None]).softmax(-1)  # (T/C, H, C, 2C)
    dc_pre = dc_pre * (dc_pre.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    dc_pre, dc_post = (x.unflatten(0, mask.shape[:2]).mT[..., None] for x in (dc_pre, dc_post))
    mixed = (probs * dc_pre).sum(1, keepdim=True)  # (T/C, 1, C, 2C)
    return ((mixed @ v) * dc_post).transpose(1, 2).flatten(0, 1)  # (T, H, K)

# ==== FAST NORMS AND ADAM ==================================================================================
# Without a compiler, closed-form gradients take fewer passes over memory than autograd. With one, each is a
# single kernel. They replace only the plain forms rms_norm(), norm_rotate() and adamw().

def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of x: (..., D) -> (..., 1)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32(x))
    return torch.rsqrt(norm.square() / x.size(-1) + eps).type_as(x)


class RMSNorm(torch.autograd.Function):
    """rms_norm() with gradient scale * (g - y mean(g y)): a third of autograd's passes over memory."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        scale = inverse_rms(x, eps)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        mean = torch.linalg.vecdot(grad, y)[..., None] / y.size(-1)  # (..., 1)
        return torch.addcmul(grad, y, mean, value=-1) * scale, None


def fused_rms_norm(x: Tensor, eps: float = RMS_EPS) -> Tensor:
    return RMSNorm.apply(x, eps)


class NormRotary(torch.autograd.Function):
    """norm_rotate() with its gradient: a third less time on a CPU. Rotation and norm commute. An eager
    backward needs only the output, a compiled one recomputes from the input in one pass."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, pairs: str, has_norm: bool, eps: float) -> Tensor:
        scale = inverse_rms(x, eps) if has_norm else None
        y = rotate(x, cos, sin, pairs)
        y = y * scale if has_norm else y
        y = y.type_as(x) if y.dtype != x.dtype else y  # PyTorch 2.11 loses the gradient of a cast to itself
        ctx.pairs, ctx.saves_input = pairs, torch.compiler.is_compiling()
        ctx.save_for_backward(x if ctx.saves_input else y, cos, sin, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        """grad (T, ..., K) -> gradient of x."""
        saved, cos, sin, scale = ctx.saved_tensors
        if ctx.saves_input:  # rotate back, then the gradient of the norm
            grad = rotate(grad, cos, sin, ctx.pairs, inverse=True)
            if scale is not None:
                x_normed = saved.type_as(grad) * scale
                mean = torch.linalg.vecdot(grad, x_normed)[..., None] / saved.size(-1)
                grad = torch.addcmul(grad, x_normed, mean.type_as(grad), value=-1) * scale
            return grad.type_as(saved), None, None, None, None, None
        if scale is not None:  # the gradient of the norm, in rotated channels of mean square cos^2 + sin^2
            square = (cos[:1, ..., :1].square() + sin[:1, ..., :1].square()) * saved.size(-1)
            mean = torch.linalg.vecdot(grad, saved)[..., None] / square
            grad = torch.addcmul(grad, saved, mean.type_as(grad), value=-1) * scale
        grad = rotate(grad, cos, sin, ctx.pairs, inverse=True).type_as(saved)
        return grad, None, None, None, None, None


def fused_norm_rotate(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, has_norm: bool, eps: float = RMS_EPS
                      ) -> Tensor:
    return NormRotary.apply(x, cos, sin, pairs, has_norm, eps)


def can_fuse_adamw(bucket: Bucket, cfg: Config) -> bool:
    """Whether fused_adamw() can update a bucket: float32, one learning rate, no cautious decay."""
    dtypes = {bucket.values.dtype, *(state.dtype for state in bucket.state.values())}
    return (bucket.group.rule == "adamw" and cfg.decay == "decoupled" and dtypes == {torch.float32}
            and bucket.lr_mul.numel() == bucket.wd_mul.numel() == 1)


def fused_adamw(param: Tensor, grad: Tensor, state: dict[str, Tensor], args: UpdateArgs) -> None:
    """The update of rule adamw by PyTorch's kernel, in an eighth of the time on a CPU.

    A huge step count disables its bias correction. Ours is folded into lr, because eps is added before it.
    """
    lr = float(args.lr * args.bias_correction2.sqrt() / args.bias_correction1)
    torch._fused_adamw_(
        [param], [grad * args.grad_scale], [state["exp_avg"]], [state["exp_avg_sq"]], [],
        [torch.tensor(1e9)], lr=lr, beta1=args.betas[0], beta2=args.betas[1], eps=args.eps, amsgrad=False,
        maximize=False, weight_decay=float(args.weight_decay) / lr if lr else 0.0)

# ==== FP8 ==================================================================================================
# Matmuls of 8-bit values with one scale per tensor: value = scale * FP8 value. e4m3 holds weights and
# activations up to 448, e5m2 gradients up to 57344. Scales are constants in the head, else amax / limit.
# Only the MLP's hidden activation takes the amax of the previous step (delayed scaling). FP8 is for training
# only: validation multiplies in the activations' dtype. CPUs multiply the rounded values in float32.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class FP8Scales(typing.NamedTuple):
    """Scales of the FP8 head."""

    x: float
    weight: float
    grad: float


def head_fp8_scales(cfg: Config) -> FP8Scales:
    """Constants: an RMS-normalized row has no entry above sqrt(D), weights saturate at fp8_head_amax.

    |d loss / d logit| is at most 1 with one target of weight 1. e5m2 reaches 128 at this scale.
    """
    return FP8Scales(x=math.sqrt(cfg.model_dim) / 448, weight=cfg.fp8_head_amax / 448, grad=1 / 448)


def quantize_fp8(x: Tensor, dtype: torch.dtype, scale: Tensor | float | None = None
                 ) -> tuple[Tensor, Tensor | float]:
    """Quantize x / scale to FP8, saturating. Returns (x8, scale). The default scale is amax / limit."""
    limit = torch.finfo(dtype).max
    scale = x.abs().max().float().clamp(min=1e-12) / limit if scale is None else scale
    return (x.float() / scale).clamp_(-limit, limit).to(dtype).contiguous(), scale


def scaled_matmul(a: Tensor, b: Tensor, scale_a: float | Tensor, scale_b: float | Tensor,
                  out_dtype: torch.dtype, fast: bool) -> Tensor:
    """(a * scale_a) @ (b * scale_b)^T of FP8 tensors. a (M, K), b (N, K), both row-major -> (M, N).

    fast: accumulate with less precision. A CPU's FP8 matmul can take a thousand times longer than float32.
    """
    if a.device.type == "cpu":
        return (a.float() @ b.float().T * (scale_a * scale_b)).to(out_dtype)
    scales = (scale if isinstance(scale, Tensor) else torch.full(
        (), scale, dtype=torch.float32, device=a.device) for scale in (scale_a, scale_b))
    return torch._scaled_mm(a, b.T, *scales, out_dtype=out_dtype, use_fast_accum=fast)


class LinearFP8(torch.autograd.Function):
    """x W^T in FP8. Backward matmuls are in FP8 if fp8_backward, else in x's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, x_scale: Tensor | None, fp8_backward: bool) -> Tensor:
        """x (T, K), weight (N, K) -> (T, N)."""
        x8, x_scale = quantize_fp8(x, E4M3, x_scale)
        w8, w_scale = quantize_fp8(weight, E4M3)
        ctx.save_for_backward(*((x8, x_scale, w8, w_scale) if fp8_backward else (x, weight)))
        ctx.weight_dtype = weight.dtype
        return scaled_matmul(x8, w8, x_scale, w_scale, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """grad (T, N) -> gradients of x (T, K) and weight (N, K)."""
        if len(ctx.saved_tensors) == 2:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.T @ x, None, None
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        grad8, scale = quantize_fp8(grad, E5M2)
        grad_x = scaled_matmul(grad8, w8.T.contiguous(), scale, w_scale, grad.dtype, fast=False)
        grad_w = scaled_matmul(grad8.T.contiguous(), x8.T.contiguous(), scale, x_scale, grad.dtype, False)
        return grad_x, grad_w.to(ctx.weight_dtype), None, None


def linear_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """linear() in FP8, forward and backward."""
    return LinearFP8.apply(x, weight, None, True)


def relu2_mlp_fp8_linear(x: Tensor, up: Tensor, down: Tensor, _scaling: DelayedScaling | None = None
                         ) -> Tensor:
    """relu2_mlp() with linear_fp8()."""
    return linear_fp8(F.relu(linear_fp8(x, up.T)).square(), down)


def relu2_mlp_fp8(x: Tensor, up: Tensor, down: Tensor, scaling: DelayedScaling, use_kernel: bool = False
                  ) -> Tensor:
    """relu2_mlp() with FP8 forward matmuls (2026-07-17). use_kernel: on a GPU, by FusedMLP."""
    if use_kernel and x.is_cuda:
        y, amax = FusedMLP.apply(x, up, down, scaling.scale.clone())
        scaling.update_amax(amax.detach())
        return y
    hidden = F.relu(LinearFP8.apply(x, up.T, None, False)).square()  # (T, 4D)
    return LinearFP8.apply(hidden, down, scaling(hidden), False)


class DelayedScaling(nn.Module):
    """FP8 scale of an activation, from its amax in the previous step, so casting needs no second pass."""

    MARGIN = 1.8  # for growth from step to step

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("amax", torch.zeros(()), persistent=False)  # of this step so far

    def forward(self, x: Tensor) -> Tensor:
        """Update amax from x, which must be nonnegative, and return the scale."""
        self.update_amax(x.detach().max().float())
        return self.scale.clone()

    @torch.no_grad()
    def update_amax(self, amax: Tensor) -> None:
        self.amax.copy_(torch.maximum(self.amax, amax))


class DelayedScales:
    """The delayed scaling of a whole model. The amax over all ranks becomes the scale of the next step."""

    def __init__(self, model: nn.Module, comm: Comm):
        modules = [module for module in model.modules() if isinstance(module, DelayedScaling)]
        self.scales, self.amax = [m.scale for m in modules], [m.amax for m in modules]
        self.comm, self.reduced, self.work = comm, None, None

    def start(self) -> None:
        """After the last backward: start the asynchronous amax all-reduce."""
        if self.scales:
            self.reduced = torch.stack(self.amax)
            self.work = self.comm.start_max(self.reduced)

    def finish(self) -> None:
        """Before the next forward: set the new scales, if they are finite."""
        if self.work is not None:
            self.work.wait()
        if self.reduced is not None:
            new = self.reduced.clamp(min=1e-12) * (DelayedScaling.MARGIN / 448)
            new = torch.where(new.isfinite(), new, torch.stack(self.scales))
            torch._foreach_copy_(self.scales, list(new.unbind()))
            self.clear()

    def clear(self) -> None:
        if self.scales:
            torch._foreach_zero_(self.amax)
        self.reduced = self.work = None

# ==== FUSED LOSS AND MLP ===================================================================================
# Head, softcap and cross-entropy with gradients that are computed in forward, and an MLP that does not store
# its first product. Neither stores logits or products in float32. With use_kernel they call the Triton
# kernels of the next section.

def softcapped_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor, softcap: Softcap,
                             grad_dtype: torch.dtype, grad_scale: float = 1.0, use_kernel: bool = False
                             ) -> tuple[Tensor, Tensor]:
    """Losses (T,) of logits (T, V) and targets (T, n), and d loss / d logits / grad_scale (T, V).

    A target of -1 is ignored. With one target of weight 1 no entry of the gradient exceeds 1 / grad_scale.
    Source: the fused kernel of 2026-01-16.
    """
    if use_kernel:
        losses = torch.empty_like(logits[:, 0], dtype=torch.float32)
        grads = torch.empty_like(logits, dtype=grad_dtype)
        cross_entropy_kernel[(logits.size(0),)](
            logits, targets, weights, losses, grads, logits.size(1), targets.size(1), *softcap, grad_scale,
            BLOCK=4096, num_warps=8)
        return losses, grads
    capped = softcap(logits)  # (T, V)
    log_probs = torch.log_softmax(capped, dim=-1)  # (T, V)
    weights, targets = weights.type_as(capped) * (targets >= 0), targets.clamp(min=0)  # (T, n)
    losses = -(log_probs.gather(1, targets) * weights).sum(1)  # (T,)
    weights = weights / (grad_scale * softcap.width if softcap.cap else grad_scale)
    grads = log_probs.exp_().mul_(weights.sum(1, keepdim=True)).scatter_add_(1, targets, -weights)  # (T, V)
    if softcap.cap:  # softcap derivative. 1/width is applied above
        grads.mul_(torch.addcmul(capped, capped, capped, value=-1 / softcap.cap))
    return losses, grads.to(grad_dtype)


class FusedHeadLoss(torch.autograd.Function):
    """head_loss(), with gradients computed in forward. Logits exist for LOGITS_CHUNK tokens at a time, in
    x's dtype. In FP8 x must be RMS-normalized."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, target_weights: Tensor, softcap: Softcap,
                use_kernel: bool, scales: FP8Scales | None) -> Tensor:
        """x (T, D), weight (V, D), targets (T, n), target_weights (n,) -> (). scales: multiply in FP8."""
        w, loss, grad_xs, grad_w = weight.type_as(x), torch.zeros((), device=x.device), [], None
        if scales:  # cast once for all chunks
            w, _ = quantize_fp8(w, E4M3, scales.weight)  # (V, D)
            w_t = transpose(w, use_kernel)  # (D, V)
        for x_chunk, target in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
            if scales:
                x8, _ = quantize_fp8(x_chunk, E4M3, scales.x)
                logits = scaled_matmul(x8, w, scales.x, scales.weight, x.dtype, fast=True)  # (T, V)
                losses, grad8 = softcapped_cross_entropy(logits, target, target_weights, softcap, E5M2,
                                                         scales.grad, use_kernel)
                grad_x = scaled_matmul(grad8, w_t, scales.grad, scales.weight, x.dtype, fast=False)
                grad_w_chunk = scaled_matmul(transpose(grad8, use_kernel), transpose(x8, use_kernel),
                                             scales.grad, scales.x, torch.float32, fast=False)  # (V, D)
            else:
                losses, grads = softcapped_cross_entropy(x_chunk @ w.T, target, target_weights, softcap,
                                                         x.dtype, use_kernel=use_kernel)
                grad_x, grad_w_chunk = grads @ w, (grads.T @ x_chunk).to(at_least_fp32(x))  # (T, D), (V, D)
            loss = loss + losses.sum()
            grad_xs.append(grad_x)
            grad_w = grad_w_chunk if grad_w is None else grad_w + grad_w_chunk
        ctx.save_for_backward(torch.cat(grad_xs), grad_w.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.type_as(grad_x), grad_w * grad.type_as(grad_w), None, None, None, None, None


def fused_head_loss(x: Tensor, weight: Tensor, targets: Tensor, target_weights: Tensor, softcap: Softcap,
                    use_kernel: bool = False, scales: FP8Scales | None = None) -> Tensor:
    return FusedHeadLoss.apply(x, weight, targets, target_weights, softcap, use_kernel, scales)


def transpose(x: Tensor, use_kernel: bool = False) -> Tensor:
    """FP8 x (M, N) -> (N, M), for row-major factors. The kernel takes a ninth of the time of Inductor's."""
    if not use_kernel:
        return x.T.contiguous()
    out = x.new_empty(x.size(1), x.size(0), dtype=torch.uint8)
    transpose_kernel[triton.cdiv(x.size(1), 128), triton.cdiv(x.size(0), 128)](
        x.view(torch.uint8), out, *x.shape, BLOCK=128, num_warps=8)
    return out.view(x.dtype)


class FusedMLP(torch.autograd.Function):
    """relu2_mlp() by a kernel, which does not store x @ up. With hidden_scale, forward is in FP8."""

    @staticmethod
    def forward(ctx, x: Tensor, up: Tensor, down: Tensor, hidden_scale: Tensor | None
                ) -> Tensor | tuple[Tensor, Tensor]:
        """x (T, D), up and down (D, 4D) -> (T, D). In FP8 also the amax of the hidden activation."""
        if hidden_scale is None:
            hidden = relu2_matmul(x, up)  # (T, 4D)
            result = hidden @ down.T
        else:
            (x8, x_scale), (up8, up_scale), (down8, down_scale) = (
                quantize_fp8(t, E4M3) for t in (x, up.T, down))
            hidden, hidden8, amax = relu2_matmul_fp8(x8, up8.T, x_scale * up_scale, hidden_scale, x.dtype)
            result = scaled_matmul(hidden8, down8, hidden_scale, down_scale, x.dtype, fast=True), amax
        ctx.save_for_backward(x, up, down, hidden)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor, *_) -> tuple[Tensor, Tensor, Tensor, None]:
        """grad (T, D) -> gradients of x (T, D), up and down (D, 4D)."""
        x, up, down, hidden = ctx.saved_tensors
        grad_pre = relu2_matmul(grad, down, hidden)  # (T, 4D)
        return grad_pre @ up.T, x.T @ grad_pre, grad.T @ hidden, None


def fused_relu2_mlp(x: Tensor, up: Tensor, down: Tensor, _scaling: DelayedScaling | None = None) -> Tensor:
    return FusedMLP.apply(x, up, down, None)


def relu2_matmul(x: Tensor, w: Tensor, hidden: Tensor | None = None) -> Tensor:
    """relu(x w)^2 (T, H) of x (T, D), w (D, H). With hidden, an earlier result: (x w) * 2 sqrt(hidden), the
    gradient of the pre-activation if x is the output gradient. Sources: 2026-01-14, 2026-06-11."""
    out = x.new_empty(len(x), w.size(1))
    launch_relu2_matmul(x.contiguous(), w.contiguous(), out, hidden)
    return out


def relu2_matmul_fp8(x: Tensor, w: Tensor, scale: Tensor, out_scale: Tensor, dtype: torch.dtype,
                     fp8_dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor]:
    """relu2_matmul() of FP8 x (T, D) and w (D, H). scale () multiplies the product. Returns the output in
    dtype, output / out_scale in FP8, and the amax () of the output."""
    out = torch.empty(len(x), w.size(1), dtype=dtype, device=x.device)
    out8, amax = torch.empty_like(out, dtype=fp8_dtype), out.new_zeros((), dtype=torch.float32)
    launch_relu2_matmul(x, w, out, None, torch.stack((scale, 1 / out_scale)), out8, amax)
    return out, out8, amax


def launch_relu2_matmul(x: Tensor, w: Tensor, out: Tensor, hidden: Tensor | None,
                        scales: Tensor | None = None, out8: Tensor | None = None, amax: Tensor | None = None
                        ) -> None:
    """Launch relu2_matmul_kernel. It writes out, and also out8 and amax if they are given."""
    (rows, inner), columns, num_bytes = x.shape, w.size(1), x.element_size()
    is_wide = (columns % 256 == 0 and num_bytes < 4 and x.device.type == "cuda"
               and torch.cuda.get_device_capability(x.device)[0] in (9, 10))  # four stages fit
    width, depth = 256 if is_wide else 128, 128 // num_bytes
    depth = depth if inner % depth == 0 else 64
    if rows % 128 or columns % width or inner % depth:
        raise ValueError(f"its tiles do not divide matrices of {rows} x {inner} x {columns}")
    limit = 0.0 if out8 is None else 448.0 if out8.dtype == E4M3 else 65504.0  # largest values
    relu2_matmul_kernel[(rows // 128 * (columns // width),)](
        x, w, out if hidden is None else hidden, out, out if scales is None else scales,
        out if out8 is None else out8, out if amax is None else amax, rows, columns, inner,
        w.stride(0), w.stride(1), hidden is not None, limit, BLOCK_M=128, BLOCK_N=width, BLOCK_K=depth,
        GROUP=8, num_warps=8, num_stages=4 if is_wide else 3)


def triton_symmetric_matmul(x: Tensor, add: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
                            ) -> Tensor:
    """symmetric_matmul() with half of the FLOPs: the kernel computes one triangle (record 27)."""
    if x.size(-2) <= 128:  # one tile
        return symmetric_matmul(x, add, alpha, beta)
    x = x.contiguous()
    num_matrices, size, depth = x.shape
    out = x.new_empty(num_matrices, size, size)
    tiles = triton.cdiv(size, 128)
    symmetric_kernel[tiles, tiles, num_matrices](
        x, x if add is None else add.contiguous(), out, size, depth, alpha, beta, add is not None, BLOCK=128,
        DEPTH=64, num_warps=8, num_stages=4 if x.element_size() == 2 else 2)  # stages that fit shared memory
    return out

# ==== TRITON KERNELS =======================================================================================
# Each program computes one tile or one row. Sums are in float32. Tests run the kernels on a CPU, by Triton's
# interpreter.

if triton is not None:
    @triton.jit
    def symmetric_kernel(x_ptr, add_ptr, out_ptr, SIZE, INNER, ALPHA: tl.constexpr, BETA: tl.constexpr,
                         HAS_ADD: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
        """One tile on or above the diagonal of alpha X X^T + beta A, stored twice."""
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
        if j > i:
            tl.store(out_ptr + cols[None, :] * SIZE + rows[:, None], total, mask=inside)

    @triton.jit
    def cross_entropy_kernel(logits_ptr, targets_ptr, weights_ptr, losses_ptr, grads_ptr, V,
                             NUM_TARGETS: tl.constexpr, CAP: tl.constexpr, SHIFT: tl.constexpr,
                             WIDTH: tl.constexpr, GRAD_SCALE: tl.constexpr, BLOCK: tl.constexpr):
        """Loss of one token and d loss / d logits. CAP bounds the logits, so it replaces their maximum."""
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * V
        grads_ptr += row * V
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=-float("inf"),
                             eviction_policy="evict_last").to(tl.float32)  # is read again
            total += tl.where(at < V, tl.exp(CAP / (1 + tl.exp(-(logits + SHIFT) / WIDTH)) - CAP), 0.0)
        log_total = tl.log(tl.sum(total, axis=0)) + CAP
        loss = log_total * 0.0
        all_weights = log_total * 0.0
        for i in tl.static_range(NUM_TARGETS):
            target = tl.load(targets_ptr + row * NUM_TARGETS + i)
            weight = tl.where(target >= 0, tl.load(weights_ptr + i), 0.0)
            target_logit = tl.load(logits_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
            loss += weight * (log_total - CAP / (1 + tl.exp(-(target_logit + SHIFT) / WIDTH)))
            all_weights += weight
        tl.store(losses_ptr + row, loss)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=0.0,
                             eviction_policy="evict_first").to(tl.float32)
            gate = 1 / (1 + tl.exp(-(logits + SHIFT) / WIDTH))
            grad = all_weights * tl.exp(CAP * gate - log_total)
            for i in tl.static_range(NUM_TARGETS):
                target = tl.load(targets_ptr + row * NUM_TARGETS + i)
                grad -= tl.where(at == target, tl.load(weights_ptr + i), 0.0)
            grad = grad * (CAP / WIDTH) * gate * (1 - gate) / GRAD_SCALE  # softcap derivative
            tl.store(grads_ptr + at, grad.to(grads_ptr.dtype.element_ty), mask=at < V)

    @triton.jit
    def transpose_kernel(x_ptr, out_ptr, ROWS, COLUMNS, BLOCK: tl.constexpr):
        """Transpose one tile of bytes."""
        rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
        tile = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :], mask=inside)
        tl.store(out_ptr + columns[:, None] * ROWS + rows[None, :], tile.T, mask=inside.T)

    @triton.jit
    def relu2_matmul_kernel(x_ptr, w_ptr, hidden_ptr, out_ptr, scales_ptr, out8_ptr, amax_ptr, ROWS,
                               COLUMNS, INNER, STRIDE_K, STRIDE_N, IS_BACKWARD: tl.constexpr,
                               LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                               BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
        """One tile of relu(X W)^2, or of X W * 2 sqrt(hidden). Matrix sizes are multiples of its size.

        If LIMIT > 0, it multiplies the product by scales[0], tracks the amax of the result, and writes a
        copy that is multiplied by scales[1] and clamped to LIMIT.
        Neighboring tiles share rows of X and columns of W in the cache.
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
            total *= 2 * tl.sqrt(tl.load(hidden_ptr + here).to(tl.float32))
        else:
            if LIMIT > 0:
                total *= tl.load(scales_ptr)
            total = tl.maximum(total, 0.0)
            total *= total
        tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty))
        if LIMIT > 0:
            tl.atomic_max(amax_ptr, tl.max(total))
            total = tl.minimum(total * tl.load(scales_ptr + 1), LIMIT)
            tl.store(out8_ptr + here, total.to(out8_ptr.dtype.element_ty))

# ==== ROW-SPARSE GRADIENTS =================================================================================
# Few rows of value and bigram embeddings have a gradient. Each rank adds the gradients of equal rows and
# sends (row, sum) pairs to the owners of the rows, at a tenth of the bytes of the dense gradient. The order
# of additions is fixed. RowPlan is made in forward, so the host has its counts before backward.

class RowPlan:
    """The distinct rows of a table that the tokens of a micro-batch read, and the ranks that own them."""

    def __init__(self, rows: Tensor, num_rows: int, comm: Comm):
        """rows (T,) of a table (num_rows, D). [7, 3, 7] gives .rows [3, 7, padding], .places [1, 0, 1]."""
        self.comm, self.rows_per_rank, self.received_rows = comm, -(-num_rows // comm.world_size), None
        ordered, order = rows.long().sort(stable=True)  # (T,)
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[1:] = ordered[1:] != ordered[:-1]
        places = is_new.cumsum(0) - 1
        self.places = torch.empty_like(places).scatter_(0, order, places)  # (T,) of each token's row in rows
        # (T,) distinct rows in order, padded with a row after the table
        padding = self.rows_per_rank * comm.world_size
        self.rows = torch.full_like(ordered, padding).scatter_(0, places, ordered)
        if comm.world_size > 1:
            first = torch.arange(1 + comm.world_size, device=rows.device) * self.rows_per_rank
            counts = torch.searchsorted(self.rows, first).diff()  # (N,) rows of each rank
            self.counts = HostCopy(comm.gather_shards(counts[None]))  # (N, N) from rank to rank

    def send(self, sums: Tensor) -> ReceivedRows:
        """Send sums (T, D) of the rows to their owners."""
        counts, rank = self.counts.read().tolist(), self.comm.rank
        sent, received = counts[rank], [row[rank] for row in counts]
        if self.received_rows is None:  # shared by all tables that are read with this plan
            self.received_rows = self.comm.all_to_all(self.rows[: sum(sent), None], sent, received)
        return ReceivedRows(*self.received_rows, *self.comm.all_to_all(sums[: sum(sent)], sent, received),
                            received, self.rows_per_rank * rank)


class ReceivedRows(typing.NamedTuple):
    """Rows of a gradient that arrive on this rank, ordered by sender."""

    rows: Tensor  # (n, 1)
    rows_work: dist.Work
    sums: Tensor  # (n, D)
    sums_work: dist.Work
    counts: list[int]  # by sender
    first_row: int  # of this rank's shard

    def wait(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows of the shard (n,), sums (n, D)) from each sender."""
        self.rows_work.wait()
        self.sums_work.wait()
        rows = self.rows[:, 0] - self.first_row
        return zip(rows.split(self.counts), self.sums.split(self.counts))


class RowSparseGradient:
    """Gradient of a table as sums of rows, of this rank's shard."""

    def __init__(self, shard: Tensor, row_size: int, comm: Comm, grid: float = 0.0,
                 on_added: Callable[[], None] | None = None):
        self.shard, self.row_size, self.comm = shard, row_size, comm
        self.grid, self.on_added = grid, on_added
        self.sums: Tensor | None = None  # (rows of the shard + 1 of padding, D)
        self.received: ReceivedRows | None = None

    def add(self, plan: RowPlan, sums: Tensor) -> None:
        """Add sums (T, D) of a micro-batch. With several ranks: send them, and add rows received earlier."""
        sums = round_to_multiple(sums, self.grid) if self.grid else sums
        if self.comm.world_size == 1:
            self._accumulate([(plan.rows, sums)])
        else:
            received, self.received = self.received, plan.send(sums)
            self._accumulate(received.wait() if received else ())
        if self.on_added:
            self.on_added()

    def wait(self) -> Tensor:
        """The gradient of the shard (M/N,), after all communication."""
        if self.received:
            received, self.received = self.received, None
            self._accumulate(received.wait())
        return torch.zeros_like(self.shard) if self.sums is None else self.sums[:-1].flatten()

    def clear(self) -> None:
        self.received = None
        if self.sums is not None:
            self.sums.zero_()

    def _accumulate(self, pieces: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add sums (n, D) of rows (n,), distinct except for padding. index_add_() takes six times longer."""
        for rows, sums in pieces:
            if self.sums is None:
                self.sums = self.shard.new_zeros(len(self.shard) // self.row_size + 1, self.row_size)
            self.sums[rows] = self.sums[rows] + sums


class SparseEmbedding(torch.autograd.Function):
    """embedding() whose gradient goes to table.sparse_grad and never has the size of the table."""

    @staticmethod
    def forward(ctx, table: nn.Parameter, rows: Tensor, plan: RowPlan) -> Tensor:
        """table (R, D), rows (T,) -> (T, D)."""
        ctx.table, ctx.plan = table, plan
        return F.embedding(rows, table)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None, None]:
        """Sum grad (T, D) over the tokens of each row, in a fixed order."""
        sums = torch.ops.aten.embedding_dense_backward(grad, ctx.plan.places, len(grad), -1, False)
        ctx.table.sparse_grad.add(ctx.plan, sums)
        return None, None, None


def sparse_embedding(rows: Tensor, table: Tensor) -> Tensor:
    """embedding() by SparseEmbedding. All tables that read these rows share one plan, kept on rows."""
    if not torch.is_grad_enabled():
        return F.embedding(rows, table)
    if not hasattr(rows, "plan"):
        rows.plan = RowPlan(rows, len(table), table.sparse_grad.comm)
    return SparseEmbedding.apply(table, rows, rows.plan)

# ############################## PART THREE: INFRASTRUCTURE #################################################

# ==== DEVICE ===============================================================================================
# The device, its precision, and what is fast on it. Choices are made once, by short real launches, in
# choose_precision(). Errors that concern the user are RunErrors, which main() prints as one line.

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
    """Where and how a process computes. The default is one rank on a CPU, in float32, with plain forms."""

    device: torch.device = torch.device("cpu")
    comm: Comm = dataclasses.field(default_factory=lambda: Comm())
    local_rank: int = 0
    dtype: torch.dtype = torch.float32  # of activations and of the orthogonalization
    use_compile: bool = False
    compile_mode: str = "default"
    fast: frozenset[str] = frozenset()  # fast forms in use
    fp8: frozenset[str] = frozenset()  # FP8 forms in use during training
    peak_flops: float = 0.0  # FLOP/s of a large matmul, measured here. MFU is relative to it
    notes: tuple[str, ...] = ()  # choices of the start, printed once

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def world_size(self) -> int:
        return self.comm.world_size

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
    check_world_size(cfg, world_size)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    gloo_group = all_gather_group = None
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
                                    timeout=LONG_TIMEOUT)
            gloo_group = dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
            all_gather_group = dist.new_group(timeout=LONG_TIMEOUT)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"rank {rank} does not find the others at MASTER_ADDR="
                             f"{os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']} "
                             f"({str(error)[:200]}): start with torchrun, and with GLOO_SOCKET_IFNAME=the "
                             "network interface where there are several nodes", of_one_rank=True) from None
    return Runtime(device, Comm(rank, world_size, gloo_group, all_gather_group), local_rank)


def choose_precision(cfg: Config, rt: Runtime, activations: str = "") -> Runtime:
    """Decide precision, compilation, fast forms and FP8 by short real launches. Rank 0 decides for all.

    activations: their type in the run that this one continues, or in the first one of its record.
    """
    dtype, peak_flops, *notes = choose_dtype(cfg, rt.device, activations)
    use_compile, note = choose_compile(cfg, rt.device)
    fast, lines = choose_fast_forms(cfg, rt.device, dtype, use_compile)
    fp8 = {name: choose_fp8(cfg, rt.device, name, dtype, use_compile, fast) for name in FP8_FORMS}
    return dataclasses.replace(rt, **rt.comm.broadcast_object(dict(
        dtype=dtype, use_compile=use_compile, compile_mode=cfg.compile_mode, fast=fast,
        fp8=frozenset(name for name, (works, _) in fp8.items() if works), peak_flops=peak_flops,
        notes=(*notes, note, *lines, *(line for _, line in fp8.values())))))


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


def share_errors(body: Callable, rt: Runtime):
    """Do what rank 0 may find impossible; its InputError is raised on every rank, which else would wait."""
    result, problem = None, ""
    try:
        result = body()
    except InputError as error:
        problem = str(error)
    problem = rt.comm.broadcast_object(problem)
    if problem:
        raise InputError(problem)
    return result


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
        self.work = self.rt.comm.start_max(self.flag, on_cpu=True)
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
        path = rt.comm.broadcast_object(path)
        rt.comm.barrier()  # a launcher ends all ranks when the first one leaves
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

# ==== CHOICE OF FAST FORMS =================================================================================
# Which rows of list_fast_forms() are used on this device, and the inputs for their comparisons.

PLAIN_ATTENTION_TOKENS = 8192  # longest sequence for the T x T masks of part one
FP8_FORMS = ("fp8_head", "fp8_linear", "fp8_mlp")  # chosen by the options of these names
FP8_MIN_DIM = 128  # channels from which casting pays


def find_obstacle(needs: str, cfg: Config, device: torch.device, use_compile: bool) -> str:
    """Why --fast=auto, or an fp8 option that is auto, does not use a form here, or ""."""
    is_gpu = device.type == "cuda"
    if needs in ("GPU", "GPU and softcap") and not is_gpu:
        return "plain PyTorch is faster on a CPU"
    if needs == "GPU and softcap" and not cfg.softcap:
        return "there is no softcap"
    if needs == "compiled GPU" and not (is_gpu and use_compile):
        return "FlexAttention is fast only if it is compiled for a GPU"
    if needs in ("CPU", "eager CPU") and (is_gpu or use_compile and needs == "eager CPU"):
        return "it is for CPUs without a compiler"
    if needs == "composed heads" and not any(spec.dc for spec in cfg.layers):
        return "no layer has composed heads"
    if needs == "Hopper" and not (is_gpu and torch.cuda.get_device_capability(device) == (9, 0)):
        return "it was measured on Hopper GPUs only"
    if needs == "Hopper" and (cfg.model_dim % 64 or cfg.mlp_ratio * cfg.model_dim % 128):
        return "its tiles do not divide the matrices"
    if needs in FP8_FORMS and not is_gpu:
        return f"no CPU multiplies FP8 faster than bfloat16. --{needs}=on forces it"
    if needs in FP8_FORMS and cfg.dtype == "float32":
        return "--dtype=float32"
    if needs in ("fp8_mlp", "fp8_linear") and not use_compile:
        return "measuring amax costs more than it gains without a compiler"
    if needs == "fp8_linear" and cfg.model_dim < 1536:
        return "measuring amax costs more than it gains below 1536 channels"
    return ""


def random_inputs(*shapes: tuple[int, ...], scales: Iterable[float] = ()) -> Callable:
    """Normal tensors of these shapes. A dimension may be the name of an option."""
    def make(cfg: Config, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
        sizes = [[getattr(cfg, n) if isinstance(n, str) else n for n in shape] for shape in shapes]
        return [(torch.randn(size, device=device) * factor).to(dtype)
                for size, factor in zip(sizes, [*scales, *[1.0] * len(sizes)])], ()

    return make


def attention_inputs(cfg: Config, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
    """q, k, v (T, H, K), dc_pre and dc_post (T, H), doc_ids (T,)."""
    heads, gates = (4 * BLOCK, "num_heads", "head_dim"), (4 * BLOCK, "num_heads")
    make = random_inputs(heads, heads, heads, gates, gates, scales=[cfg.head_dim**-0.5])
    return make(cfg, device, dtype)[0], (torch.arange(4 * BLOCK, device=device) // 300,)


def run_attention(forms: dict[str, Callable], q: Tensor, k: Tensor, v: Tensor, _pre: Tensor, _post: Tensor,
                  doc_ids: Tensor) -> list[Tensor]:
    """FlexAttention has a window tensor, blocked masks have the dtype of the scores."""
    build_mask, window = forms["make_mask"], BLOCK
    if build_mask is build_block_mask:
        window = torch.full((), BLOCK, device=q.device)
    elif build_mask is not make_mask:
        build_mask = functools.partial(build_mask, dtype=q.dtype)
    return [forms["attention"](q, k, v, build_mask(doc_ids, window))]


def run_compose_heads(forms: dict[str, Callable], q: Tensor, k: Tensor, v: Tensor, dc_pre: Tensor,
                      dc_post: Tensor, doc_ids: Tensor) -> list[Tensor]:
    return [forms["compose_heads"](q, k, v, doc_ids, dc_pre, dc_post)]


def norm_rotate_inputs(cfg: Config, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
    leaves, _ = random_inputs((BLOCK, 2, "num_heads", 1, "head_dim"))(cfg, device, dtype)
    angles = torch.arange(BLOCK, device=device)[:, None, None] / (1.0 + torch.arange(
        cfg.head_dim // 4, device=device))
    rope = expand_rope(Rope(angles.cos(), angles.sin()), torch.tensor(0.1, device=device), cfg.rotary_pairs)
    table_dtype = torch.float32 if device.type == "cuda" else dtype
    return leaves, (*(x.to(table_dtype) for x in rope), cfg.rotary_pairs, cfg.qk_norm == "on")


def head_loss_inputs(cfg: Config, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
    """x (T, D) normalized, weight (V, D), targets (T, 2), some of them ignored, their weights, softcap."""
    make = random_inputs((64, "model_dim"), (256, "model_dim"), scales=[1.0, 0.1])
    (x, weight), _ = make(cfg, device, dtype)
    targets = torch.arange(128, device=device).view(64, 2)
    targets = targets.masked_fill(targets % 7 == 3, -1)
    softcap = Softcap(cfg.softcap, cfg.softcap_shift, cfg.softcap_width)
    return [rms_norm(x), weight], (targets, torch.tensor([1.0, 0.5], device=device), softcap)


def run_symmetric_matmul(forms: dict[str, Callable], x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        gram = symmetric_matmul(x)
        return [forms["symmetric_matmul"](x), forms["symmetric_matmul"](gram, gram, 0.5, 2.0)]


def mlp_inputs(cfg: Config, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
    """x (T, D), up and down (D, 4D), of the model's sizes."""
    matrix = cfg.model_dim, cfg.mlp_ratio * cfg.model_dim
    return random_inputs((BLOCK, cfg.model_dim), matrix, matrix, scales=[1.0, *[cfg.model_dim**-0.5] * 2])(
        cfg, device, dtype)


def embedding_inputs(cfg: Config, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
    rows = torch.arange(BLOCK, device=device) ** 2 % 50
    return [], (*random_inputs((64, "model_dim"), (BLOCK, "model_dim"))(cfg, device, dtype)[0], rows)


def run_embedding(forms: dict[str, Callable], table: Tensor, grad: Tensor, rows: Tensor) -> list[Tensor]:
    """Rows, and the gradient of the table."""
    table = nn.Parameter(table.clone())
    if forms["embedding"] is not embedding:
        table.sparse_grad = RowSparseGradient(table.detach().flatten(), table.size(1), Comm())
    y = forms["embedding"](rows, table)
    y.backward(grad)
    return [y.detach(), table.grad if table.grad is not None else table.sparse_grad.wait().view_as(table)]


def run_adamw(forms: dict[str, Callable], weight: Tensor, *grads: Tensor) -> list[Tensor]:
    """Change of the weight, and state, after three updates."""
    param, state = weight.detach().clone(), RULES["adamw"].init_state(weight.detach())
    for step, grad in enumerate(grads, 1):
        args = UpdateArgs(*map(torch.tensor, (0.02, 0.001, 0.0, 2.0, 1 - 0.8**step, 1 - 0.95**step)),
                          betas=(0.8, 0.95), eps=1e-8)
        forms["adamw"](param, grad.detach(), state, args)
    return [param - weight.detach(), *state.values()]


def fp8_linear_inputs(cfg: Config, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], tuple]:
    """x (T, D), weight (4D, D), and the inputs of an MLP."""
    (x, up, down), _ = mlp_inputs(cfg, device, dtype)
    return [x, up.T, x, up, down], ()


def run_fp8_linear(forms: dict[str, Callable], x: Tensor, weight: Tensor, *mlp: Tensor) -> list[Tensor]:
    return [forms["linear"](x, weight), forms["relu2_mlp"](*mlp)]


def run_fp8_mlp(forms: dict[str, Callable], x: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    return [forms["relu2_mlp"](x, up, down, DelayedScaling().to(x.device))]


def run_function(forms: dict[str, Callable], *inputs) -> list[Tensor]:
    """The result of a fast form that replaces one function."""
    (function,) = forms.values()
    return [function(*inputs)]


def choose_fast_forms(cfg: Config, device: torch.device, dtype: torch.dtype, use_compile: bool
                      ) -> tuple[frozenset[str], list[str]]:
    """(names of the fast forms to use, lines for the log)."""
    chosen, replaced, lines, wanted = [], set(), [], split_names(cfg.fast)
    names = [name for name in list_fast_forms() if name not in FP8_FORMS]
    for name in names:
        row = list_fast_forms()[name]
        is_replaced = replaced & row.fast.keys()
        obstacle = find_obstacle(row.needs, cfg, device, use_compile)
        if is_replaced or obstacle if wanted == ["auto"] else name not in wanted:
            continue
        reason = verify(name, cfg, device, dtype, use_compile)
        if is_replaced and not reason:
            reason = "another form of its operation is also named"
        if reason and wanted != ["auto"]:
            raise InputError(f"--fast={cfg.fast}: {name} cannot be used ({reason}): leave it out")
        if reason:
            lines.append(f"fast form {name}: off ({reason})")
        else:
            chosen.append(name)
            replaced |= row.fast.keys()
    longest = max(cfg.val_seq_len, cfg.micro_batch_tokens)
    quadratic = {"attention", *(["compose_heads"] if any(spec.dc for spec in cfg.layers) else [])} - replaced
    if quadratic and longest > PLAIN_ATTENTION_TOKENS:
        why = f" ({'; '.join(lines)})" if lines else ""
        raise InputError(f"{min(quadratic)} runs in its plain form{why}, and its masks of {longest} x "
                         f"{longest} tokens do not fit: give --seq_len, --micro_batch_tokens and "
                         f"--val_seq_len of at most {PLAIN_ATTENTION_TOKENS}")
    return frozenset(chosen), [f"fast forms: {', '.join(chosen) or 'none'}", *lines]


def choose_fp8(cfg: Config, device: torch.device, name: str, dtype: torch.dtype, use_compile: bool,
               fast: frozenset[str] = frozenset()) -> tuple[bool, str]:
    """(whether a form of FP8_FORMS is used, one line with the reason). fast: the other forms of this run."""
    wanted, label = getattr(cfg, name), name.replace("_", " ")
    reason = find_obstacle(name, cfg, device, use_compile)
    if wanted == "off" or wanted == "auto" and reason:
        return False, f"{label}: off ({reason if wanted == 'auto' else f'--{name}=off'})"
    sizes = ("model_dim", "padded_vocab_size") if name == "fp8_head" else ("model_dim",)
    problems = [f"{size}={getattr(cfg, size)} is not a multiple of 16" for size in sizes
                if getattr(cfg, size) % 16]
    if name != "fp8_head" and cfg.model_dim < FP8_MIN_DIM:
        problems.append(f"model_dim={cfg.model_dim} is below {FP8_MIN_DIM}")
    reason = problems[0] if problems else verify(name, cfg, device, dtype, use_compile, fast)
    if reason and wanted == "on":
        raise InputError(f"--{name}=on but it cannot be used ({reason}): use --{name}=auto or off")
    return not reason, f"{label}: off ({reason})" if reason else f"{label}: on"

# ==== COMM =================================================================================================
# Every collective of the program, counted in bytes by name. torchrun ends all ranks when one dies, and the
# timeout of a collective ends a rank that waits for a stalled one.

LONG_TIMEOUT = datetime.timedelta(hours=1)  # for compilation and disks


class Comm:
    """Collectives of one rank. All-gathers have a separate group, to not queue behind reduce-scatters."""

    def __init__(self, rank: int = 0, world_size: int = 1, gloo_group: dist.ProcessGroup | None = None,
                 all_gather_group: dist.ProcessGroup | None = None):
        self.rank, self.world_size = rank, world_size
        self.gloo_group = gloo_group  # on CPUs, with a long timeout: outside of training steps
        self.all_gather_group = all_gather_group
        self.bytes = Counter()  # that this rank has sent, by collective

    def step_bytes(self) -> dict[str, int]:
        """Bytes of gradients and parameters so far, by collective."""
        return {name: self.bytes[name] for name in ("reduce_scatter", "all_gather", "all_to_all")}

    def reduce_scatter(self, full: Tensor) -> tuple[Tensor, dist.Work]:
        """Sum (M, ...) over ranks. Returns this rank's shard (M/N, ...), and work to wait for."""
        shard = torch.empty_like(self.local_shard(full))
        self.bytes["reduce_scatter"] += full.nbytes - shard.nbytes
        return shard, reduce_scatter_single(shard, full, async_op=True)

    def all_gather(self, full: Tensor, shard: Tensor) -> dist.Work:
        """Fill (M, ...) from the shards (M/N, ...) of all ranks. Returns work to wait for."""
        self.bytes["all_gather"] += full.nbytes - shard.nbytes
        return all_gather_single(full, shard, group=self.all_gather_group, async_op=True)

    def all_to_all(self, sent: Tensor, send_counts: list[int], receive_counts: list[int]
                   ) -> tuple[Tensor, dist.Work]:
        """Send each rank its number of rows, in the order of ranks. Returns the received rows, and work."""
        received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
        row_bytes = sent.itemsize * math.prod(sent.shape[1:])
        self.bytes["all_to_all"] += (sum(send_counts) - send_counts[self.rank]) * row_bytes
        work = dist.all_to_all_single(received.view(torch.uint8), sent.contiguous().view(torch.uint8),
                                      receive_counts, send_counts, async_op=True)
        return received, work

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum in place over ranks."""
        if self.world_size > 1:
            self.bytes["all_reduce"] += tensor.nbytes * (self.world_size - 1)
            dist.all_reduce(tensor)
        return tensor

    def start_max(self, tensor: Tensor, on_cpu: bool = False) -> dist.Work | None:
        """Start the maximum over ranks, in place."""
        if self.world_size == 1:
            return None
        self.bytes["max"] += tensor.nbytes * (self.world_size - 1)
        group = self.gloo_group if on_cpu else None
        return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)

    def gather_shards(self, shard: Tensor) -> Tensor:
        """All ranks' (M/N, ...) as (M, ...), on every rank."""
        if self.world_size == 1:
            return shard
        full = shard.new_empty(self.world_size * len(shard), *shard.shape[1:])
        self.bytes["gather_shards"] += full.nbytes - shard.nbytes
        all_gather_single(full.view(torch.uint8), shard.contiguous().view(torch.uint8))
        return full

    def local_shard(self, full: Tensor) -> Tensor:
        """This rank's (M/N, ...) view of (M, ...)."""
        return full.unflatten(0, (self.world_size, -1))[self.rank]

    def broadcast(self, tensor: Tensor) -> None:
        """Replace by rank 0's tensor."""
        if self.world_size > 1:
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)  # NCCL lacks int16

    def broadcast_object(self, value):
        """Rank 0's plain Python object, on every rank."""
        box = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, group=self.gloo_group)
        return box[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.gloo_group)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Time that a collective of a training step may take."""
        for group in (dist.group.WORLD, self.all_gather_group) if self.world_size > 1 else ():
            dist.distributed_c10d._set_pg_timeout(timeout, group)


# PyTorch 2.13 renamed these two
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def count_minimum_bytes(optimizer: Optimizer, first_step: int, last_step: int) -> float:
    """Bytes that a rank must send in these steps: each gradient and parameter once, except its shards.

    Row-sparse gradients are not included.
    """
    total = 0.0
    for bucket in optimizer.buckets:
        every, num_bytes = bucket.group.every, sum(param.nbytes for param in bucket.params.values())
        first_update, last_update = first_step // every, last_step // every
        if bucket is optimizer.bucket_of["embed"] and optimizer.cfg.tie_head == "on":
            first_update = min(max(first_update, -(-(optimizer.untie_step + 1) // every)), last_update)
        total += (last_update - first_update) * num_bytes * (1 if bucket.sparse else 2)
    return total * (1 - 1 / optimizer.rt.world_size)


def round_to_multiple(x: Tensor, unit: float) -> Tensor:
    """Round to multiples of a power of two, so that sums are exact and independent of their order.

    Exact up to 2^24 times the unit in float32, 2^8 times in bfloat16.
    """
    shift = 1.5 * unit / torch.finfo(x.dtype).eps  # neighboring numbers around it are one unit apart
    return (x + shift).sub_(shift)

# ==== SHARD FILES ==========================================================================================
# Token files and GPT-2's vocabulary: reading, checking, writing. data/README.md describes the format.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
SHARD_REMEDY = "delete it and fetch or build it again (data/)"
BYTE_VOCAB_SIZE, BYTE_BOS = 257, 256  # byte tokens: 256 values and BOS


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

    def usable_tokens(self, max_doc_len: int) -> np.ndarray:
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


def report_missing_tokens(cfg: Config, schedule: Schedule, planned: list[PackedSequence], needed: int
                          ) -> typing.NoReturn:
    """Raise InputError with the number of missing tokens and the remedies."""
    missing = schedule.count_tokens() - sum(sequence.seq_len for sequence in planned)
    epochs = -(-cfg.epochs * needed // max(1, len(planned)))  # at least
    again = f", read it again (--epochs={epochs})" if planned else ""
    hint = "" if cfg.sequence_start == "anywhere" else (
        ". --sequence_start=anywhere uses all tokens of long documents")
    raise InputError(f"--train_files={cfg.train_files} is {missing} tokens short of this run: get more "
                     f"(data/cached_fineweb10B.py N, data/text.py PATH...){again} or lower "
                     f"--num_iterations{hint}")


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


def find_prefix_tokens(ids: dict[bytes, int], vocab_size: int) -> Tensor:
    """The longest other token that is a prefix of each token, or -1, (V,). ids: token ids by bytes.

    In sorted order the prefixes of a token are on a stack. Source: 2026-07-13.
    """
    prefixes, stack = np.full(vocab_size, -1), []
    for text in sorted(filter(None, ids)):
        while stack and not text.startswith(stack[-1]):
            stack.pop()
        if stack:
            prefixes[ids[text]] = ids[stack[-1]]
        stack.append(text)
    return torch.from_numpy(prefixes)

# ==== PRESETS AND ABLATIONS ================================================================================
# Presets for small machines and for the medium track, and the mechanisms of --without. To add a preset or a
# mechanism, add a row.

EMBEDDED_CORPUS = "data/torch_source"  # built on first use from the installed PyTorch: no download needed

LAPTOP_LAYERS = (  # no attention in layer 0: with it, some seeds learn copying there and stay worse
    LayerSpec(attention="none"),
    LayerSpec(attention="short", value_embed=1, key_offset=True),
    LayerSpec(attention="short", value_embed=0, skip_from=1, key_offset=True),
    LayerSpec(attention="long", value_embed=1, skip_from=0, key_offset=True),
)

SMOKE_FRONTIER_LAYERS = (  # every mechanism of frontier
    LayerSpec(attention="short", gates_from=0, paired=True),
    LayerSpec(attention="long", gates_from=0, value_embed=0, key_offset=True, xsa=True, gate=True),
    LayerSpec(attention="short", gates_from=2, value_embed=1, paired=True),
    LayerSpec(attention="none", gates_from=2, skip_from=1),
    LayerSpec(attention="long", gates_from=2, value_embed=2, attention_from=2, key_offset=True, gate=True,
              dc=True, mudd_in="x_in,h2", mudd_out="x_in,h2,h3,ve0,h1"),
)

TRACK_2_LAYERS = (
    LayerSpec(attention="long", value_embed=0),
    LayerSpec(attention="short", value_embed=1),
    LayerSpec(attention="short", value_embed=2),
    LayerSpec(attention="short", value_embed=3),
    LayerSpec(attention="long", value_embed=4),
    LayerSpec(attention="short"),
    LayerSpec(attention="short"),
    LayerSpec(attention="short"),
    LayerSpec(attention="short"),
    LayerSpec(attention="short", skip_from=6),
    LayerSpec(attention="short", skip_from=4),
    LayerSpec(attention="long", value_embed=0, skip_from=2),
    LayerSpec(attention="short", value_embed=1),
    LayerSpec(attention="short", value_embed=2),
    LayerSpec(attention="short", value_embed=3),
    LayerSpec(attention="long", value_embed=4),
)

TRACK_2_STAGES = (
    Stage(duration=1, window_long=384, window_short=128, tokens_per_step=131_072),
    Stage(duration=1, window_long=896, window_short=384, tokens_per_step=262_144, lr_factor=1.52),
    Stage(duration=1, window_long=1408, window_short=640, tokens_per_step=393_216, lr_factor=1.73),
    Stage(duration=1, window_long=1664, window_short=768, lr_factor=2.0),
    Stage(duration=1, window_long=1920, window_short=896, lr_factor=2.0),
    Stage(duration=1, window_long=2176, window_short=1024, lr_factor=2.0),
    Stage(duration=1, window_long=2432, window_short=1152, lr_factor=2.0),
    Stage(duration=1, window_long=2688, window_short=1280, lr_factor=2.0),
    Stage(duration=1, window_long=2944, window_short=1408, lr_factor=2.0),
    Stage(duration=1, window_long=2944, window_short=1408, lr_factor=2.0),
    Stage(duration=1, window_long=2944, window_short=1408, lr_factor=2.0),
    Stage(duration=1, window_long=2944, window_short=1408, lr_factor=2.0),
)

PRESETS |= {
    "laptop_32": ("track_1", "record 32 in miniature: byte tokens, two CPU cores", dict(
        track="laptop",
        train_files=f"{EMBEDDED_CORPUS}/train_*.bin", val_files=f"{EMBEDDED_CORPUS}/val_*.bin",
        vocab_size=257, num_layers=5, num_heads=2, head_dim=96, model_dim=192, embed_dtype="float32",
        num_iterations=480, tokens_per_step=4096, seq_len=1024, micro_batch_tokens=2048, max_doc_len=1024,
        val_tokens=131_072, val_seq_len=8192, val_loss_every=80, warmup_iterations=1,
        momentum_warmup_steps=100, adam_eps=1e-2,  # below it a gradient of a small batch is rounding noise
        grad_grid=2.0**-12, val_windows=(320, 128), stages=(
            Stage(duration=1, window_long=128, window_short=64),
            Stage(duration=1, window_long=192, window_short=64),
            Stage(duration=1, window_long=256, window_short=128)))),
    "laptop": ("laptop_32", "the mechanisms of the newest recipe that pay at this size", dict(
        num_layers=4, num_heads=2, head_dim=64, model_dim=128, mlp_ratio=2, layers=LAPTOP_LAYERS,
        attention_scale=0.15, attention_gate_dim=0, vocab_multiple=16, bigram_rows=4096, zero_init="mlp",
        x0_mix="after_attention", softcap=23.0, softcap_shift=5.0, orthogonalize="polar_express",
        momentum_start=0.8, momentum_end=0.8, momentum_warmup_steps=0, groups=dict(
            matrix=Group(rule="normuon", lr=0.07, betas=(0.9, 0.9)),
            embed=Group(lr=0.3, betas=(0.5, 0.95)),
            head=Group(lr=0.008, betas=(0.5, 0.95)),
            value_embed=Group(lr=0.3, betas=(0.75, 0.95)),
            scalar=Group(lr=0.04, betas=(0.9, 0.99))),
        warmup_iterations=0, num_iterations=720, tokens_per_step=2048, val_loss_every=120,
        sequence_start="anywhere")),
    "quick": ("laptop", "laptop in half a minute, also for a small text", dict(
        num_iterations=260, epochs=100, val_tokens=40_960, val_loss_every=0)),
    "smoke": ("laptop_32", "seconds on any machine, for tests", dict(
        num_layers=4, num_heads=2, head_dim=32, model_dim=64, num_iterations=12, tokens_per_step=2048,
        seq_len=512, micro_batch_tokens=1024, max_doc_len=256, val_tokens=4096, val_seq_len=1024,
        val_loss_every=6, dtype="float32", momentum_warmup_steps=10)),
    "smoke_frontier": ("smoke", "all mechanisms of the newest recipe, in seconds", dict(
        num_layers=5, layers=SMOKE_FRONTIER_LAYERS, bigram_rows=512, smear="on", softcap=23.0,
        softcap_shift=5.0, x0_mix="after_attention", residual_init=1.1**0.5, zero_init="mlp",
        attention_gate_dim=0, tie_head="on", untie_frac=2 / 3, embed_std=0.02, value_embed_std=0.01,
        value_gate_dim=12, qk_group_heads=1, orthogonalize="polar_express", decay="cautious",
        decay_schedule="lr", mlp_up_lr_mul=2.0, mlp_down_lr_mul=4.0, groups=dict(
            matrix=Group(rule="normuon", lr=0.06, betas=(0.9, 0.9), weight_decay=0.06 * 1.2),
            embed=Group(lr=0.02, betas=(0.5, 0.95), every=2),  # once untied
            head=Group(lr=0.02, betas=(0.5, 0.95), every=2),  # and tied embedding
            value_embed=Group(lr=0.6, betas=(0.75, 0.95), every=2),
            scalar=Group(lr=0.04, betas=(0.9, 0.99), every=2),
            residual=Group(lr=0.04, betas=(0.9, 0.95), every=2),
            mix=Group(lr=0.008, betas=(0.9, 0.95), every=2),
            gate=Group(lr=0.008, betas=(0.9, 0.99), every=2),
            gain=Group(lr=0.1, every=2)),
        extension_steps=2, momentum_warmup_steps=4, momentum_cooldown_steps=4, cooldown_frac=0.6,
        final_lr_frac=0.15, state_dtype="float32", stages=(
            Stage(duration=1, window_long=128, window_short=64, tokens_per_step=1024, seq_len=256,
                  loss_weights="1 0.5 0.25:0"),
            Stage(duration=1, window_long=192, window_short=64, lr_factor=1.5),
            Stage(duration=1, window_long=256, window_short=128)))),
    "muonh": ("track_1", "Hyperball: matrices keep their norm, layers begin with zero gains", dict(
        orthogonalize="polar_express", output_gain="on", norm_gain="on", init_std=1.0,
        matrix_cooldown_frac=1.0, cooldown_frac=0.3, final_lr_frac=0.0, groups=dict(
            matrix=Group(rule="normuonh", lr=0.02, betas=(0.9, 0.95)),
            embed=Group(lr=0.3),
            value_embed=Group(lr=0.3),
            head=Group(lr=0.004)))),
    **{f"d{depth}": ("track_1", f"{depth} layers, all sizes from --depth", dict(depth=depth))
       for depth in (12, 24, 26)},
    # Constants of the medium track's record 18 for the mechanisms that exist here, of its record 2 for all
    # else: matrices (there NorMuon), embedding and head (there tied at first). Record 18's stages double
    # their learning rates.
    "track_2": ("track_1", "the medium track: 16 layers of 1024 channels, FineWeb, 2.92 on 8xH100", dict(
        track="track_2", num_layers=16, num_heads=8, model_dim=1024, attention_gate_dim=16,
        num_value_embeds=5, fp8_head="off", yarn_max_window=1664, layers=TRACK_2_LAYERS,
        num_iterations=7500, tokens_per_step=524_288, seq_len=16_384, micro_batch_tokens=65_536,
        max_doc_len=4096, val_seq_len=65_536, cooldown_frac=0.7, groups=dict(
            matrix=Group(rule="muon", lr=0.025 / 2, betas=(0.9, 0.95)),
            embed=Group(lr=0.3 / 2),
            value_embed=Group(lr=0.3),
            head=Group(lr=0.003 / 2)),
        val_windows=(3456, 1408), stages=TRACK_2_STAGES)),
}


def change(where: str | None = None, **new) -> Callable:
    """A function that changes every LayerSpec or Stage of a tuple, or every layer with that attention."""
    return lambda items: tuple(dataclasses.replace(item, **new)
                               if where in (None, getattr(item, "attention", None)) else item
                               for item in items)


def rule_defaults(name: str) -> dict:
    """The options that a rule brings, see Rule."""
    rule = RULES[name]
    return dict(matrix_lr=rule.lr, matrix_betas=rule.betas, matrix_weight_decay=rule.weight_decay,
                mlp_up_lr_mul=rule.mlp_up_lr_mul, mlp_down_lr_mul=rule.mlp_down_lr_mul)


# Options that --without changes. A function is applied to the option's value
MECHANISMS: dict[str, dict] = {
    "muon": dict(matrix_rule="adamw", **rule_defaults("adamw")),
    "momentum_warmup": dict(momentum_warmup_steps=0),
    "momentum_cooldown": dict(momentum_cooldown_steps=0),
    "cooldown": dict(cooldown_frac=0.0, matrix_cooldown_frac=-1.0),
    "polar_express": dict(orthogonalize="newton_schulz"),
    "variance": dict(matrix_rule=lambda rule: rule.removeprefix("nor")),
    "decay": {f"{name}_weight_decay": 0.0 for name in TRACK_1_GROUPS},
    "cautious_decay": dict(decay="decoupled"),
    "adam_odd_steps": {f"{name}_every": 1 for name in TRACK_1_GROUPS},
    "low_bits": dict(matrix_dtype="float32"),
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
    "x0_mix": dict(x0_mix="off"),
    "residual_weights": dict(residual_init=0.0),
    "skips": dict(layers=change(skip_from=None)),
    "smear": dict(smear="off"),
    "key_offset": dict(layers=change(key_offset=False)),
    "bigram": dict(bigram_rows=0),
    "paired_heads": dict(layers=change(paired=False)),
    "attention_from": dict(layers=change(attention_from=None)),
    "xsa": dict(layers=change(xsa=False)),
    "mudd": dict(layers=change(mudd_in="", mudd_out="")),
    "mudd_gates": dict(layers=change(gates_from=None)),
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
    "document_start": dict(sequence_start="anywhere"),
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
    recipe = flatten_groups(PRESETS["muonh"][2]) if keeps_norm else dict(
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


# ==== COMMAND LINE =========================================================================================
# From words to a Config: parsing, presets, --without, and all checks of options that cannot work together.
# Every error is one line that names the value and a remedy.

class Option(typing.NamedTuple):
    """An option of the command line: a field of the config, or GROUP_FIELD."""

    name: str
    section: str  # of --help
    type: typing.Any
    default: typing.Any
    meaning: str
    low: float | None
    high: float | None
    choices: typing.Any


CONFIG_PARTS = (TrainConfig, ModelConfig, OptimConfig, Group, SampleConfig)  # in the order of --help
GROUP_OPTIONS = {f"{group}_{field.name}": (group, field.name) for group in TRACK_1_GROUPS
                 for field in dataclasses.fields(Group) if field.name != "rule" or group == "matrix"}


def list_options() -> dict[str, Option]:
    """All options by name."""
    options = {}
    for part in CONFIG_PARTS:
        types, section = typing.get_type_hints(part), part.__doc__.strip().rstrip(".")
        fields = {field.name: field for field in dataclasses.fields(part)}
        names = {name: (field, TRACK_1_GROUPS[group]) for name, (group, field) in GROUP_OPTIONS.items()
                 } if part is Group else {name: (name, None) for name in fields}
        for name, (field_name, group) in names.items():
            field = fields[field_name]
            default = getattr(group, field_name) if group else field.default
            meta = field.metadata
            options[name] = Option(name, section, types[field_name], default, meta["help"], meta["low"],
                                   meta["high"], meta["choices"])
    return options


OPTIONS = list_options()
RENAMED = {"kernels": "fast", "x0_shortcut": "x0_mix", "fp8_head_max": "fp8_head_amax",
           "row_start": "sequence_start", "gates_at": "gates_from", "mantissas": "low_bits",
           "document_rows": "document_start"}
RENAMED_FORMS = {"loss": "cross_entropy", "products": "symmetric_matmul", "mlp": "relu2_mlp"}


def flatten_groups(values: dict) -> dict:
    """Values with GROUP_FIELD entries in place of the rows of groups."""
    groups = values.get("groups", {})
    assert all(group.rule == "adamw" for name, group in groups.items() if name != "matrix"), (
        "only group matrix can choose its rule")
    flat = {name: getattr(groups[group], field) for name, (group, field) in GROUP_OPTIONS.items()
            if group in groups}
    return {**{name: value for name, value in values.items() if name != "groups"}, **flat}


def build_config(values: dict) -> Config:
    """A Config of values by option name. Missing options have their defaults."""
    values = {**flatten_groups(vars(Config())), **values}
    rows: dict[str, dict] = {group: {} for group in TRACK_1_GROUPS}
    for name, (group, field) in GROUP_OPTIONS.items():
        rows[group][field] = values.pop(name)
    return Config(**values, groups={group: Group(**row) for group, row in rows.items()})


def parse_value(option: Option, text: str):
    """Convert the text of --name=text. InputError says which type is expected."""
    kind = option.type
    try:
        if kind in (int, float, str):
            return kind(text)
        element = typing.get_args(kind)[0]
        if not dataclasses.is_dataclass(element):
            first, second = text.split(",") if text else (None, None)
            return (element(first), element(second)) if text else ()

        # LayerSpecs or Stages from JSON
        items, hints = json.loads(text), typing.get_type_hints(element)
        if not isinstance(items, list):
            raise ValueError("a list is needed")
        for item in items:
            if not isinstance(item, dict):
                raise ValueError(f"{item} is not an object")
            for name, value in item.items():
                if name in RENAMED:
                    raise ValueError(f"{name} is now {RENAMED[name]}")
                hint = int | float if hints.get(name) is float else hints.get(name, object)
                is_boolean = isinstance(value, bool) and hint is not bool
                if is_boolean or not isinstance(value, hint) or value in (math.inf, math.nan):
                    raise ValueError(f"{name}={value!r}")
        return tuple(element(**item) for item in items)
    except (ValueError, TypeError, RecursionError) as error:
        name, example = {int: "whole number", float: "number"}.get(kind, "list"), option.default
        if option.name in ("layers", "stages"):  # the first three entries of an object
            entries = dataclasses.asdict(example[0] if example else LayerSpec())
            example = json.dumps([dict(itertools.islice(entries.items(), 3))])
        text = text if len(text) < 100 else f"{text[:100]}..."
        reason = f" ({str(error)[:200]})" if name == "list" else ""
        raise InputError(f"--{option.name}={text} is not a {name}{reason}: give one like "
                         f"{show_value(example)}") from None


def show_value(value) -> str:
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return json.dumps([dataclasses.asdict(item) for item in value])
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def list_choices(option: Option) -> tuple[str, ...]:
    choices = option.choices or ()
    return choices() if callable(choices) else choices


def check_value(name: str, value) -> None:
    """Raise InputError if a value leaves its option's type, range or choices."""
    option, choices = OPTIONS[name], list_choices(OPTIONS[name])
    low, high, kind = option.low, option.high, option.type
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
    if RENAMED.get(name) in known:
        return f"its name is now {prefix}{RENAMED[name]}"
    matches = [prefix + match for match in difflib.get_close_matches(name, list(known), n=3)]
    return f"did you mean {' or '.join(matches)}?" if matches else "see --help"


class Parser(argparse.ArgumentParser):
    """One whose errors are InputErrors."""

    def error(self, message: str) -> typing.NoReturn:
        raise InputError(f"{message}: see --help")


FLAGS = dict(list_presets="the presets and mechanisms",
             print_config="the resolved config as JSON, without data or device",
             print_schedule="stage, windows, learning rates at the start and end of each stage, likewise")


def parse_argv(argv: list[str]) -> tuple[dict, set[str]]:
    """Split a command line into ({option: value}, flags). '-' and '_' are equivalent in names."""
    parser = Parser("train_gpt.py", "%(prog)s [--option=value ...]    (or torchrun ..., or ./run.sh)",
                    "Defaults are those of --preset=track_1. '-' and '_' are equivalent in names.",
                    argument_default=argparse.SUPPRESS, allow_abbrev=False)
    for flag, meaning in FLAGS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    sections = {}
    for option in OPTIONS.values():
        if option.section not in sections:
            sections[option.section] = parser.add_argument_group(option.section)
        is_json = option.name in ("layers", "stages")
        kind = {int: "INT", float: "FLOAT", str: "TEXT"}.get(option.type, "A,B")
        kind = "|".join(list_choices(option)) or kind
        shown = [] if is_json or option.default == "" else [f"[{show_value(option.default)}]"]
        bounds = (("at least", option.low), ("at most", option.high))
        shown += [f"{word} {bound}" for word, bound in bounds if bound not in (None, 2**31 - 1)]
        sections[option.section].add_argument(
            f"--{option.name}", type=functools.partial(parse_value, option),
            metavar="JSON" if is_json else kind, help=" ".join((option.meaning, *shown)))
    words = []
    for word in argv:
        name, equals, text = word.partition("=")
        words.append(f"--{name[2:].replace('-', '_')}{equals}{text}" if word.startswith("--") else word)
    values, unknown = parser.parse_known_args(words)
    for word in unknown:
        name = word.partition("=")[0]
        raise InputError(f"{name} is not an option: {suggest(name.lstrip('-'), OPTIONS, '--')}")
    flags = {flag for flag in FLAGS if flag in values}
    return {name: value for name, value in vars(values).items() if name not in flags}, flags


def resolve_preset(name: str) -> dict:
    """All options of a preset by name, with those of its parents."""
    preset, ancestor = {}, name
    while ancestor:
        ancestor, _, changes = PRESETS[ancestor]
        preset = {**flatten_groups(changes), **preset}
    return {**flatten_groups(vars(Config())), **preset}


def make_config(overrides: dict) -> Config:
    """The config of a preset with overrides, --depth and --without. InputError if they do not fit."""
    name = overrides.get("preset", "auto")
    for key, value in overrides.items():
        check_value(key, value)
    if name == "auto":
        use_cuda = overrides.get("device", "auto") != "cpu" and torch.cuda.is_available()
        name = "track_1" if use_cuda else "laptop"
    if name not in PRESETS:
        raise InputError(f"--preset={name} is not a preset: {suggest(name, PRESETS)} (--list_presets)")
    preset = resolve_preset(name)
    values = {**preset, **overrides, "preset": name}
    if values["depth"]:
        if values["tokens_per_param"] != Config.tokens_per_param and "num_iterations" in overrides:
            raise InputError(f"--tokens_per_param={values['tokens_per_param']} and --num_iterations="
                             f"{values['num_iterations']} both say how long to train: give one of them")
        preset = {**preset, **scale_by_depth(values, overrides.get("tokens_per_step"))}
        values = {**preset, **overrides, "preset": name}
    else:
        values = {**values, **choose_rule_options(preset, values), **overrides, "preset": name}
    if values["layers"] and "layers" not in overrides and len(values["layers"]) != values["num_layers"]:
        raise InputError(f"--num_layers={values['num_layers']}: preset {name} has {len(values['layers'])} "
                         "layers, each with mechanisms of its own: give the others with --layers, too")
    values["layers"] = values["layers"] or build_layers(values["num_layers"], values["num_value_embeds"])
    values = switch_off(values, overrides)
    for key, value in values.items():
        check_value(key, value)
    cfg = build_config(values)
    check_config(cfg)
    return cfg


def choose_rule_options(preset: dict, values: dict) -> dict:
    """The options that --matrix_rule brings if it is not the preset's rule. muon and normuon share theirs.

    Norm-preserving rules have smaller learning rates in deeper models (MuonH).
    """
    rule, preset_rule, num_layers = values["matrix_rule"], preset["matrix_rule"], values["num_layers"]
    is_alike = rule == preset_rule or {rule, preset_rule} == {"muon", "normuon"}
    options = dict(matrix_lr=preset["matrix_lr"]) if is_alike else rule_defaults(rule)
    if RULES[rule].keeps_norm:
        options["matrix_lr"] *= preset["num_layers"] / num_layers if is_alike else min(1, 12 / num_layers)
    return options


def switch_off(values: dict, overrides: dict) -> dict:
    """Apply --without and --only_with. Explicit options take precedence."""
    values = dict(values)
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
        if mechanism == "muon" and "matrix_rule" in overrides:  # the rule was chosen, with its options
            continue
        if len(changes) == len(MECHANISMS[mechanism]) and all(
                change(old[key]) == old[key] for old in (before, values) for key, change in changes.items()):
            for field in [field for field, names in named.items() if mechanism in names]:
                raise InputError(f"--{field}={values[field]}: preset {values['preset']} has no {mechanism}: "
                                 "leave it out")
            continue
        if not is_kept:
            values.update({key: change(values[key]) for key, change in changes.items()})
    return values


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
    forms = [name for name in list_fast_forms() if name not in FP8_FORMS]
    for name in split_names(cfg.fast) if cfg.fast not in ("auto", "off") else ():
        new_name = f"{name} is now {RENAMED_FORMS[name]}" if name in RENAMED_FORMS else ""
        checks += [(name in forms, f"--fast={cfg.fast}: {new_name or f'{name} is not a fast form'}: give "
                                   "auto, off, or some of "
                                   f"{','.join(forms)}")]
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
        for name, last in (("skip_from", i - 1), ("attention_from", i - 1), ("gates_from", i)):
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


def check_world_size(cfg: Config, world_size: int) -> tuple[int, int]:
    """sequences_per_rank() of the last stage. InputError if the ranks cannot share a stage's step."""
    for stage in cfg.full_stages:
        tokens, seq_len = stage.tokens_per_step, stage.seq_len
        if tokens // seq_len % world_size:
            per_rank, remainder = divmod(tokens, world_size)
            shorter = [n for n in range(BLOCK, min(seq_len, per_rank) + 1, BLOCK) if per_rank % n == 0]
            remedy = "" if remainder or not shorter else f", or keep it and give --seq_len={shorter[-1]}"
            raise InputError(
                f"--tokens_per_step={tokens} is {tokens // seq_len} packed sequences of seq_len={seq_len}, "
                f"which {world_size} ranks cannot share: "
                f"{nearest_multiples(tokens, seq_len * world_size)}{remedy}")
    return sequences_per_rank(cfg, world_size, tokens, seq_len)


def derived_numbers(cfg: Config, world_size: int) -> dict:
    """Numbers that follow from the config, for --print_config and the run record."""
    num_micro_batches, sequences = check_world_size(cfg, world_size)
    with torch.device("meta"):
        num_params = sum(p.numel() for name, p in GPT(cfg).named_parameters()
                         if name != "embed" or cfg.tie_head == "off" or cfg.untie_frac < 1)
    schedule = Schedule(cfg)
    return dict(num_params=num_params, flops_per_token=count_flops(cfg), grad_accum_steps=num_micro_batches,
                ranks=world_size, tokens_per_rank=cfg.tokens_per_step // world_size,
                tokens_per_micro_batch=sequences * cfg.full_stages[-1].seq_len,
                padded_vocab_size=cfg.padded_vocab_size, train_tokens=schedule.count_tokens(),
                scheduled_steps=schedule.scheduled_steps,
                stage_ends=[end for _, _, end in schedule.stage_ranges()])


def print_schedule(cfg: Config) -> None:
    """Print step, stage, windows, tokens, momentum and learning rates at the start and end of each stage."""
    schedule = Schedule(cfg)
    print(f"{'step':>6} {'stage':>5} {'windows':>9} {'tokens':>9} {'momentum':>8}",
          *(f"{name:>11}" for name in cfg.groups))
    for number, (stage, start, end) in enumerate(schedule.stage_ranges(), 1):
        for step in dict.fromkeys((start, end - 1)):
            state = schedule.at(step)
            lrs = [f"{state.lr[name]:.6g}" if group.is_due(step) else "-"
                   for name, group in cfg.groups.items()]
            print(f"{step:>6} {number:>5} {stage.window_long:>4}/{stage.window_short:<4} "
                  f"{stage.tokens_per_step:>9} {state.momentum:>8.4f}", *(f"{lr:>11}" for lr in lrs))
    print("-: the group is not updated in this step")
    if cfg.tie_head == "on":
        print("head also trains the embedding while it is tied")


def count_flops(cfg: Config) -> int:
    """FLOPs of forward and backward per training token: 6 per matmul weight, 12 per channel and key."""
    attending = [spec for spec in cfg.layers if spec.attention != "none"]
    num_mlp = sum(spec.mlp for spec in cfg.layers)
    weights = cfg.model_dim * (4 * cfg.model_dim * len(attending)
                               + 2 * cfg.mlp_ratio * cfg.model_dim * num_mlp + cfg.padded_vocab_size)
    keys = tokens = 0.0
    for stage, start, end in Schedule(cfg).stage_ranges():
        weight, longest = (end - start) * stage.tokens_per_step, stage.seq_len
        if cfg.sequence_start == "document" and cfg.document_mask == "on":
            longest = min(longest, stage.max_doc_len)
        keys += weight * sum(min(getattr(stage, f"window_{spec.attention}"), longest) for spec in attending)
        tokens += weight
    return round(6 * weights + 12 * cfg.model_dim * keys / tokens)


def plain_dict(cfg: Config) -> dict:
    """Every option as plain JSON types."""
    return json.loads(json.dumps({name: flatten_groups(vars(cfg))[name] for name in OPTIONS}, default=vars))


def config_from_dict(values: dict) -> Config:
    """The inverse of plain_dict(), for checkpoints and results. Unknown names are left out."""
    known = {name: parse_value(OPTIONS[name], json.dumps(value)) if name in ("layers", "stages") else
             tuple(value) if isinstance(value, list) else value
             for name, value in values.items() if name in OPTIONS}
    for name, value in known.items():
        check_value(name, value)
    return build_config(known)

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


# Folders and ends of a run. They change neither weights nor losses nor seconds. The last is of older scripts
RESTART_OPTIONS = {f"options.{name}" for name in (
    "records_dir", "logs_dir", "checkpoint_dir", "resume", "time_limit", "print_every")}
MACHINE_FIELDS = ("device", "ranks", "cpu", "threads", "gpu", "simd")
# Parts of identify() that may differ, by the kind of comparison. "options" stands for all options
MAY_DIFFER = {
    "ranks": {"machine.cpu", "machine.threads"},  # of one job
    "resume": {*RESTART_OPTIONS, "machine"},
    "resume of a record": RESTART_OPTIONS,
    "record": {*RESTART_OPTIONS, "options.seed"},  # runs of one record
    "replay": {*RESTART_OPTIONS, "options.checkpoint_every", "options.telemetry_every", "options.tracker"},
    "losses": {"options", "script", "choices", "machine"},  # of two records
    "times": {"options", "script", "choices"},  # of two records
}
OTHER = {"script": "another script", "data": "other data", "layers": "other layers", "stages": "other stages"}


def identify(run: dict) -> dict[str, typing.Any]:
    """The identity of a run as one flat dict: script, data, options.NAME, machine.NAME, choices.NAME.

    run: a result, or the metadata of a log or checkpoint. Entries that it lacks are left out.
    """
    hardware, versions = run.get("hardware", {}), run.get("versions", {})
    old_choices = {"dtype": hardware["activations"]} if "activations" in hardware else {}
    parts = dict(
        options={name: value for name, value in run.get("config", {}).items() if name != "derived"},
        machine={**{name: hardware[name] for name in MACHINE_FIELDS if name in hardware},
                 **{name: versions[name] for name in ("torch", "cuda", "cudnn") if name in versions}},
        choices=run.get("choices", old_choices))
    single = dict(script=run.get("script_sha256"), data=run.get("corpus_fingerprint"))
    return {**{name: value for name, value in single.items() if value},
            **{f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}}


def differences(earlier: dict, now: dict, kind: str) -> list[str]:
    """Forbidden differences of two runs, as 'head_lr was 0.008, here 0.01'. kind: a key of MAY_DIFFER.

    Entries that one of the runs lacks are passed over.
    """
    lines, theirs, ours = [], identify(earlier), identify(now)
    for key in [key for key in theirs if key in ours and theirs[key] != ours[key]]:
        part, _, name = key.partition(".")
        if {key, part} & MAY_DIFFER[kind]:
            continue
        label = "in use: " if part == "choices" else ""
        lines.append(OTHER.get(name or key) or f"{label}{name} was {str(theirs[key])[:60]}, here "
                                               f"{str(ours[key])[:60]}")
    return lines


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
        rt.comm.barrier()


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
    ANNOUNCE_AFTER = 5.0  # seconds of training until the remaining time is printed

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

    def start_training(self, progress: Progress, num_tokens: int) -> None:
        """From now on files stay, however the run ends. Show the progress bar."""
        self.progress, self.made, self.last_token = progress, [], progress.tokens + num_tokens
        self.first, self.val_seconds = (progress.train_time, progress.tokens), 0.0
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
        """Log a step, counted from 1, with the progress bar, and once the remaining time."""
        step, num_iterations = self.progress.step, self.cfg.num_iterations
        self.print(f"step:{step}/{num_iterations} train_time:{train_time * 1000:.0f}ms "
                   f"step_avg:{train_time * 1000 / step:.2f}ms", to_console=False)
        first_time, first_tokens = self.first or (math.inf, 0)
        if train_time - first_time >= self.ANNOUNCE_AFTER:
            self.first, num_validations = None, 1 + (num_iterations - step) // (
                self.cfg.val_loss_every or sys.maxsize)
            seconds_per_token = (train_time - first_time) / (self.progress.tokens - first_tokens)
            seconds = round((self.last_token - self.progress.tokens) * seconds_per_token
                            + num_validations * self.val_seconds)
            is_slow = self.cfg.preset == "laptop" and seconds > 120
            hint = ", --preset=quick takes a third of that" if is_slow else ""
            self.print(f"step {step}: about {seconds // 60} min {seconds % 60} s to go{hint}")
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

CHECKPOINT_FORMAT = "train_gpt 7"


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
            full = bucket.full_tensor(key)  # (M, ...)
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
                is_tied=trainer.model.is_tied, world_size=rt.world_size,
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
    optimizer.set_tied(facts["is_tied"])
    for bucket in optimizer.buckets:
        for key in ("", *bucket.state):
            full = bucket.full_tensor(key).clone()
            for name in bucket.params if rt.is_main else ():
                part = full[bucket.slices[name]]
                part.copy_(left.pop(f"{name}/{key}".removesuffix("/")).view(part.shape))
            rt.comm.broadcast(full)
            if key:
                bucket.state[key].copy_(rt.comm.local_shard(full))
            else:
                bucket.values.copy_(full)
        bucket.clear()
    for name in left:
        if name.partition("/")[0] in optimizer.bucket_of:  # state of a rule that this script does not have
            raise KeyError(name)
    for i, scale in enumerate(trainer.scales.scales):
        scale.copy_(tensors.get(f"fp8/{i}", scale))
        rt.comm.broadcast(scale)
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
    path, facts, activations = rt.comm.broadcast_object((*(found or (None, None))[:2], activations))
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
        norms = [torch.linalg.vector_norm(x, dtype=at_least_fp32(x)) for x in tensors]
        squares = torch.stack(norms).square()
        squares[0] /= bucket.num_tokens**2
        self.sums[self.rows[bucket.group_name]][: len(tensors)] += squares


def measure_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> dict[str, float]:
    """Fractions of the values that quantize_fp8() would saturate, and flush to zero."""
    is_zero = quantize_fp8(x, dtype, scale)[0].float() == 0
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
    def inspect(self, batch: Batch, step_inputs: StepInputs) -> None:
        """Measure layers and head on a micro-batch, before it is trained on."""
        optimizer = self.trainer.optimizer
        if optimizer.probe:
            optimizer.probe.mark("communication")
        optimizer.finish()  # the pass reads parameters that others may still be sending
        if optimizer.probe:
            optimizer.probe.mark("measuring")
        x, layers = self.measure_layers(batch.inputs, batch.doc_ids, step_inputs)
        head, every = self.trainer.model.head, max(1, len(x) // self.SAMPLE)
        x, targets, w = x[::every], batch.targets[::every, None], head.weight.type_as(x)
        logits = head.softcap(x @ w.T)  # (T, V)
        scales = head_fp8_scales(self.trainer.cfg)
        _, grads = softcapped_cross_entropy(x @ w.T, targets, x.new_ones(1), head.softcap, torch.float32,
                                            scales.grad)
        self.measured = dict(
            layers=[dict(zip(("mean", "std", "max"), layer)) for layer in layers.tolist()],
            logits=dict(mean=logits.mean().item(), std=logits.std().item(), max=logits.max().item()),
            fp8=dict(x=measure_fp8(x, scales.x, E4M3),
                     w=measure_fp8(w[:: max(1, len(w) // self.SAMPLE)], scales.weight, E4M3),
                     grad=measure_fp8(grads, 1.0, E5M2)))
        if optimizer.probe:
            optimizer.probe.mark("forward and backward")
        self.trainer.inspect = None

    def _measure_layers(self, inputs: Tensor, doc_ids: Tensor, step_inputs: StepInputs
                        ) -> tuple[Tensor, Tensor]:
        """What the head sees (T, D), and mean, std, largest of each layer's output (layers, 3)."""
        model = self.trainer.model
        x, acts = model.run_layers(inputs, doc_ids, step_inputs, save_all=True)
        outputs = (acts[f"h{layer}"].float() for layer in range(len(model.blocks)))
        return x, torch.stack([torch.stack((y.mean(), y.std(), y.abs().max())) for y in outputs])

    def end_step(self, loss: Tensor, probe: Probe | None, train_time: float) -> None:
        """Remember the loss, a mean over this rank's tokens; write the line if this step was measured."""
        self.losses.append(loss)
        if probe is None or not probe.is_full:
            return
        rt, progress = self.trainer.rt, self.trainer.progress
        losses = (rt.comm.all_reduce(torch.stack(self.losses)) / rt.world_size).tolist()
        norms = rt.comm.all_reduce(probe.sums).sqrt().tolist()
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
    hashes = optimizer.rt.comm.gather_shards(hashes)  # (N, buckets)
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
        model.use_fp8(model.fp8)
        trainer.step_inputs.clear()
    elif name:
        model.use_fp8(model.fp8 - {"fp8_head"} if name == "fp8_head" else model.fp8 & {"fp8_head"})
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
        self.pending.append((step, HostCopy(trainer.rt.comm.all_reduce(sums))))
        self.is_snapshot_due |= step % self.SNAPSHOT_EVERY == 0
        if not self.is_snapshot_due or not trainer.optimizer.has_no_pending_gradients():
            self.judge(but=1)
        elif self.judge():
            self.snapshots = [*self.snapshots[-1:], (step, trainer.snapshot())]
            self.is_snapshot_due = False
            if not (trainer.progress.lowered and trainer.rt.use_compile):  # later stages are compiled anew
                trainer.rt.comm.set_timeout(datetime.timedelta(seconds=trainer.cfg.comm_timeout))

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
            trainer.rt.comm.set_timeout(LONG_TIMEOUT)  # another precision may have to be compiled
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
        step_inputs = make_step_inputs(state, len(inputs), len(inputs), rt, cfg)
        x, _ = model.run_layers(inputs, torch.zeros_like(inputs), step_inputs)  # (T, D)
        logits = model.head.compute_logits(x[len(tokens) - 1][None])[0, : cfg.vocab_size].cpu()  # (V,)
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
    model.eval().fast = frozenset()
    model.use_fp8(frozenset())
    model.split_layers(1)
    cfg, rt = dataclasses.replace(cfg, max_new_tokens=80), dataclasses.replace(rt, fast=frozenset())
    with torch.compiler.set_stance("force_eager") if rt.use_compile else nullcontext():
        text = tokenizer.decode(list(generate(model, [], tokenizer.bos, cfg, rt)))
    print0(f"sample: {text.decode(errors='replace').strip()}", rt)


def load_model(path: Path, values: dict) -> tuple[GPT, Config, Runtime, dict]:
    """(model in plain PyTorch, config with these values, runtime, facts) of a checkpoint."""
    facts, tensors = read_checkpoint(path)
    plain = dict(fast="off", compile="off", fp8_head="off", fp8_linear="off", fp8_mlp="off",
                 device="auto", dtype="float32")
    cfg = dataclasses.replace(read_config(path, facts, is_sample=True), **{**plain, **values})
    check_model(path, facts, tensors, cfg, is_sample=True)
    dtype = torch.bfloat16 if cfg.dtype == "bfloat16" else torch.float32
    rt = dataclasses.replace(start_runtime(cfg, is_alone=True), dtype=dtype)
    with torch.device("meta"):
        model = GPT(cfg, rt)
    model.load_state_dict({name: tensors[name] for name, _ in model.named_parameters()}, strict=False,
                          assign=True)  # buffers are made below
    model.make_buffers()
    model.split_layers(1)  # of the loaded parameters
    model.is_tied = facts["is_tied"]
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
        derived = derived_numbers(cfg, env_int("WORLD_SIZE", 1))
        print(json.dumps({**plain_dict(cfg), "derived": derived}, indent=1))
    elif "print_schedule" in flags:
        print_schedule(make_config(values))
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
        else:
            reason = re.sub(r'^.*?[]] ', '', ' '.join(str(error).split()))[:100]
            sys.stderr.write(  # in one piece, because other ranks write, too
                f"{program}: stopped: rank {dist.get_rank()} lost contact with another rank: it failed, was "
                "killed, or has stood still for --comm_timeout. torchrun's report below names it "
                f"({reason})\n")
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
