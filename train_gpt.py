#!/usr/bin/env python3
"""Train a GPT-2-class language model to a target loss in the least wall-clock time. One file, any machine.

Launch
    python train_gpt.py                                            # CUDA: record_32. CPU: laptop
    torchrun --standalone --nproc_per_node=8 train_gpt.py          # the record setting (or ./run.sh)
    python train_gpt.py --preset=laptop --record=my_idea --seed=1  # leaves a folder in records/
    python train_gpt.py --checkpoint_every=250 --resume=auto       # continues after an interruption
    python train_gpt.py --help                                     # also --print_config

Part one, the recipe. It decides the loss.
    CONFIG, SCHEDULES, DATA, OPERATIONS, MODEL, UPDATE RULES, OPTIMIZER, TABLES, TRAINING: one step, train()
Part two, the same mathematics, faster. A check at startup compares the fast forms with part one.
    FAST FORMS, STEP GRAPHS, FAST NORM AND ATTENTION, FP8, FUSED OPERATIONS, TRITON KERNELS
Part three, infrastructure.
    DEVICE, COMM, SHARD FILES, COMMAND LINE, RUN RECORD, CHECKPOINTS, TELEMETRY AND GUARD, MAIN

Shapes: T tokens, D model_dim, H num_heads, K channels of a query or key, L of a value, F hidden channels of
    an MLP, V padded vocabulary, N ranks, M matrices or elements of a bucket. Matmuls and attention by blocks
    use M, N, K, B and C for their own sizes.
Sources: a number or a date names a record of the modded-nanogpt benchmark, see docs/published_records.md.
"""
from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import difflib
import functools
import gc
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
import threading
import time
import traceback
import typing
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).read_bytes()  # the bytes that run, even if the file is edited during the run
if __name__ == "__main__":  # as run.sh, before PyTorch loads OpenMP: its waiting threads free their core
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if importlib.util.find_spec("torch") is None:
        sys.exit("train_gpt.py: error: PyTorch is not installed: start with ./run.sh, which installs it")
    interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while PyTorch loads

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before a process group exists: its defaults would hold the group
import torch.nn.functional as F
import torch.utils.benchmark as benchmark
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only
from tqdm import tqdm

try:
    import fcntl
    import resource
except ImportError:
    sys.exit("train_gpt.py: error: this needs Linux, macOS, or on Windows WSL")
try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch
    triton = None
if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupt)

# ############################## PART ONE: THE RECIPE #######################################################

# ==== CONFIG ===============================================================================================
# Every option has one entry: name, default, meaning, range. The defaults are preset record_32. Every other
# preset lists only its changes to a parent preset. Layers, stages and parameter groups are rows of data, so
# the code has no special case for a middle layer. To add an option, add it here. The command line, its
# help, its checks and --without follow from it. Each parameter group has an option such as --embed_lr. The
# matrices also have --matrix_rule, --matrix_betas and --matrix_weight_decay.

AUTO = ("auto", "on", "off")


def option(default, meaning: str, low=-2**31, high=2**31 - 1, choices=(), off=None):
    """Declare an option. low and high are inclusive. off: the value that --without=NAME sets, if the option
    is a part of the recipe that can be left out."""
    metadata = dict(help=meaning, low=low, high=high, choices=choices, off=off)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class LayerSpec:
    attention: str = "short"  # window of the attention: long or short. none: no attention
    mlp: bool = True
    second_mlp: bool = False  # another MLP, with the same input
    v_dim: int | None = None  # channels per head of the values. None: head_dim
    x0: bool = True  # add the normalized embedding. With mudd_in x_in, see layer_scalars()
    ngram: bool = True  # add the n-gram embedding
    value_embed: int | None = None  # index of the value-embedding table that is added to the values
    skip_from: int | None = None  # earlier layer whose output is added to the input (U-Net skip)
    attention_from: int | None = None  # earlier layer whose output attention reads. None: this layer's input
    paired: bool = False  # two heads become one head of 2T positions, two for each token. So they see each
    #   other's keys, and a window of w positions has w / 2 tokens. See Attention.forward(), step 3
    key_offset: bool = False  # the channels of a key that do not rotate come from the previous token
    xsa: bool = False  # exclusive self attention: subtract a part along the token's value
    head_gate: bool = False  # scale of each head's output, from 0.25: learned, or per token with gates_from
    gates_from: int | None = None  # a layer from whose input scalars of this layer are computed, per token:
    #   - the scales of head_gate and xsa. Without gates_from they are learned, in group mix
    #   - a factor of the U-Net skip. Without gates_from it has none
    #   - with x0_mix=after_attention the weights of x0 and n-grams. Without gates_from they are learned. A
    #     layer with mudd_in computes them itself, as the weights of its dense connections
    mudd_in: tuple[str, ...] = ()  # activations added to input and values with per-token weights
    mudd_out: tuple[str, ...] = ()  # as mudd_in, added to the output. Also attn_in, mlp_in: normed inputs

    def inputs(self):
        """Names of activations that this layer reads, except its input, x0 and n-grams."""
        names = {*self.mudd_in, *self.mudd_out} - {"attn_in", "mlp_in"}
        if self.skip_from is not None:
            names.add(f"h{self.skip_from}")
        if self.attention_from is not None:
            names.add(f"h{self.attention_from}")
        if self.value_embed is not None:
            names.add(f"ve{self.value_embed}")
        if self.mudd_in:  # layer_scalars() may have a weight for it
            names.add("x_in")
        return names


@dataclass(frozen=True)
class Stage:
    """A range of steps with constant windows and batch."""

    duration: float  # relative length. Ignored for the last stage if extension_steps > 0
    window_long: int  # in long layers: number of earlier tokens that a query sees
    window_short: int  # in short layers
    tokens_per_step: int | None = None  # None: --tokens_per_step
    max_doc_len: int | None = None  # None: --max_doc_len
    lr_factor: float = 1.0  # multiplies every learning rate, except the one at the end of a cooldown
    seq_len: int | None = None  # None: --seq_len
    loss_weights: tuple[tuple[float, float], ...] = ((1, 1),)  # (start, end) per target, nearest first
    prefix_weight: tuple[float, ...] = ()  # loss weight of one more target, the longest token that is a
    #   prefix of the next token. (0.2, 0.1): 0.2 in the first half of the stage, then 0.1. (): no target
    num_classes: int | None = None  # classes in the sampled softmax of a packed sequence. None: all


@dataclass(frozen=True)
class Group:
    lr: float = option(0.0, "learning rate. Stages and schedules multiply it", 0.0)
    rule: str = option("adamw", "update rule: muon, normuon, muonh, normuonh, anvil (matrices), row_adam "
                       "(n-gram table), or adamw")
    betas: tuple[float, float] = option((0.8, 0.95), "Adam betas. Row variances use the second", 0.0,
                                        0.9999)
    weight_decay: float = option(0.0, "weight decay, times the learning rate. Not of muonh, normuonh", 0.0)
    every: int = option(1, "steps between updates. Gradients are summed in between", 1)
    late_every: int = option(0, "steps between updates after --late_start. 0: as before", 0)

    def period(self, step: int, late_step: int):
        """Steps between updates. Updates follow steps period - 1, 2 * period - 1, ..., counted from 0."""
        return self.late_every if self.late_every and step >= late_step else self.every

    def is_due(self, step: int, late_step: int = sys.maxsize):
        return (step + 1) % self.period(step, late_step) == 0

    def count_updates(self, num_steps: int, late_step: int):
        """Number of updates in the first num_steps steps. A period p has num_steps // p updates."""
        if not self.late_every or num_steps <= late_step:
            return num_steps // self.every
        num_early = late_step // self.every
        num_late = num_steps // self.late_every - late_step // self.late_every
        return num_early + num_late


RECORD_32_GROUPS = dict(
    # Matrices of blocks. lr: about the spectral norm of an update, see matrix_step(). adamw reads both
    # betas, normuon, normuonh and anvil only the second one, and muon and muonh none
    matrix=Group(rule="muon", lr=0.05, betas=(0.9, 0.95)),
    embed=Group(lr=0.6),
    value_embed=Group(lr=0.6),
    head=Group(lr=0.008),  # also trains the embedding while they are tied
    scalar=Group(lr=0.04),  # learned scalars
    # Record 32 has no parameters in the groups below
    ngram=Group(lr=0.6),  # n-gram embedding
    residual=Group(lr=0.04, betas=(0.9, 0.95)),  # residual_init's scales of the residual stream
    mix=Group(lr=0.008, betas=(0.9, 0.95)),  # scales of outputs, and learned scalars in place of gates_from
    gate=Group(lr=0.008, betas=(0.9, 0.99)),  # token gates, smear, and gates of value embeddings
    gain=Group(lr=0.1),  # gains of norms and outputs
)


@dataclass(frozen=True)
class Config:
    # Data, budget, devices and output
    preset: str = option("auto", "a name, or a .json file of a preset or result. auto: record_32 or laptop")
    without: tuple[str, ...] = option((), "parts to leave out. --print_config lists them, in derived")
    track: str = option("track_1", "folder under records/ for comparable runs")
    record: str = option("", "name of a record run. Its script, log and result go to records/")
    seed: int = option(0, "seed of the initial weights", 0)
    device: str = option("auto", "device", choices=("auto", "cuda", "cpu"))
    dtype: str = option("auto", "dtype of activations. auto: bfloat16 if the device has bfloat16 matmuls",
                        choices=("auto", "bfloat16", "float32"))
    fast: tuple[str, ...] = option(("auto",), "fast forms of operations: auto, off, or names a,b")
    compile: str = option("auto", "torch.compile. auto: on GPUs of capability 7.0 or more", choices=AUTO)
    fp8: str = option("auto", "FP8 matmuls of fp8_parts. auto: with bfloat16, if the GPU has them",
                      choices=AUTO, off="off")
    train_files: str = option("data/fineweb10B/fineweb_train_*.bin", "pattern of the training shards")
    epochs: int = option(1, "largest number of passes over the training files", 1)
    val_files: str = option("data/fineweb10B/fineweb_val_*.bin", "pattern of the validation shards")
    val_tokens: int = option(10_485_760, "validation tokens", 1)
    val_seq_len: int = option(262_144, "tokens per validation sequence", 128)
    val_windows: tuple[int, ...] = option((1664, 768), "long,short at the end. (): last stage's", 1)
    val_loss_every: int = option(125, "steps between validations. 0: only the last. -1: a tenth of all", -1)
    num_iterations: int = option(1670, "optimizer steps. 0: those of --epochs passes over the data", 0)
    extension_steps: int = option(0, "final steps, included in num_iterations, that run the last stage", 0)
    tokens_per_step: int = option(393_216, "training tokens of one optimizer step, over all ranks. A "
                                  "stage may have its own", 128)
    seq_len: int = option(49_152, "tokens per packed sequence, on any number of ranks. A stage may have "
                          "its own", 128)
    micro_batch_tokens: int = option(49_152, "most tokens of a forward pass, but a validation sequence may "
                                     "have more", 128)
    sequence_start: str = option("document", "start of packed sequences: a document, or the previous end",
                                 choices=("document", "anywhere"), off="anywhere")
    max_doc_len: int = option(2048, "tokens of a document, with sequence_start=document. A stage may have "
                              "its own", 2)
    max_attention_len: int = option(0, "longest piece of a training document in attention. 0: all", 0, off=0)
    stages: tuple[Stage, ...] = option((
        Stage(duration=1, window_long=384, window_short=128),
        Stage(duration=1, window_long=896, window_short=384),
        Stage(duration=1, window_long=1408, window_short=640)), "rows as JSON, or a .json file. An object: "
                                                                "fields of all stages")
    vocab_file: str = option("data/gpt2_vocab.json", "token ids as JSON, for prefix_weight")
    warmup_iterations: int = option(3, "untimed warmup updates in each stage, of the group with the most "
                                    "steps between updates", 0)
    out: str = option(".", "folder of logs/, records/ and checkpoints/")
    checkpoint_every: int = option(0, "steps between checkpoints. One waits until all gradients are used in "
                                   "updates. 0: the last step, until the result is written, if it has at "
                                   "most 8 GB", 0)
    resume: str = option("", "checkpoint to continue from. auto: the furthest with the same script, options "
                             "and data, if any. A model.pt: begin at step 0 with its weights")
    telemetry_every: int = option(0, "steps between measurements in <run_id>.jsonl. 0: never", 0)
    tracker: str = option("off", "also send losses and measurements to this tool. Needs its package",
                          choices=("off", "trackio", "wandb", "tensorboard"))
    guard: bool = option(False, "if training diverges, roll back and raise the precision. It keeps copies "
                         "of model and optimizer state, so an n-gram table above 2 GB is refused")

    # Shape of the network
    layers: tuple[LayerSpec, ...] = option((), "layers as JSON, or a .json file. (): layer_pattern. "
                                             "An object: fields of all layers")
    layer_pattern: str = option("record_32", "layers of any depth", choices=("record_32", "laptop"))
    num_layers: int = option(12, "layers", 1, 1000)
    num_heads: int = option(6, "attention heads per layer, model_dim / head_dim", 1, 4096)
    head_dim: int = option(128, "channels per head", 8, 4096)
    model_dim: int = option(768, "residual channels = num_heads * head_dim", 8, 65536)
    mlp_ratio: float = option(4.0, "MLP hidden channels per residual channel", 0.1, 64)
    vocab_size: int = option(50257, "vocabulary size", 2, 65536)
    vocab_multiple: int = option(128, "the vocabulary is padded to a multiple of this", 1, 65536)
    tie_head: bool = option(False, "one table for embedding and head, in group head", off=False)
    embed_dtype: str = option("bfloat16", "storage of embeddings, head and gates",
                              choices=("bfloat16", "float32"))
    matrix_dtype: str = option("float32", "storage of matrices", choices=("float32", "bfloat16"),
                               off="float32")
    init_std: float = option(0.5, "std of initial matrices: this / sqrt(fan-in or model_dim)", 0.0)
    embed_std: tuple[float, float] = option((1.0, 1.0), "initial std of embedding, value embeddings", 0.0)
    zero_init: str = option("on", "output projections that start at 0: all (on), of MLPs (mlp), none (off). "
                                 "With gains=output none",
                            choices=("on", "mlp", "off"), off="off")
    gains: tuple[str, ...] = option((), "learned gains of sublayers: norm (inputs, from 1), output (from 0)",
                                    choices=("norm", "output"))
    qk_norm: bool = option(True, "normalize each head's queries and keys", off=False)
    equal_qk_init: bool = option(False, "queries and keys start with equal weights", off=False)
    qk_group_heads: int = option(0, "heads per matrix of queries and keys in Muon. 0: all", 0, off=0)
    attention_scale: tuple[float, float] = option((0.1, 0.1), "initial softmax scale. The second: of short "
                                                  "layers if short_qk_dim > 0", 0.0)
    short_qk_dim: int = option(0, "channels per head of queries and keys in short layers. All rotate, and "
                               "YaRN follows the short window. 0: head_dim", 0, 4096, off=0)
    yarn_max_window: int = option(65_536, "limit on the windows in YaRN's formula. 0: no YaRN", 0, off=0)
    attention_gate_dim: int = option(12, "input channels of the attention gate. 0: no gate", 0, off=0)
    value_gate_dim: int = option(0, "inputs of the value-embedding gate. 0: a learned scalar", 0, 24, off=0)
    x0_mix: str = option("before", "where x0, and in layers above 0 n-grams, are added. off: no x0",
                         choices=("off", "before", "after_attention"), off="off")
    residual_init: float = option(0.0, "initial learned scale of the residual stream, with scales of the "
                                  "sublayers' matrices and outputs. 0: none", 0, off=0.0)
    smear: bool = option(False, "add the previous token's embedding, scaled by a gate", off=False)
    ngram_rows: int = option(0, "rows of the hashed n-gram embedding, over all ranks. 0: none", 0, off=0)
    ngram_order: int = option(2, "the embedding's n-grams have 2 to this many tokens", 2, 6, off=2)
    mudd_groups: int = option(1, "groups of channels with their own mudd_out weights", 1, 4096, off=1)
    softcap: tuple[float, float, float] = option(
        (30.0, 0.0, 7.5), "cap, shift, width: logits become cap * sigmoid((logit + shift) / width). The "
        "values 30,0,7.5 give 15 tanh(logit / 15) + 15. cap 0: no softcap", off=(0.0, 0.0, 7.5))
    fp8_parts: tuple[str, ...] = option(("head",), "matmuls in FP8 during training",
                                        choices=("head", "logits", "mlp", "qkv"))
    fp8_head_amax: float = option(0.875, "largest head weight that FP8 represents", 1e-6)

    # Update rules and schedules
    orthogonalize: str = option("newton_schulz", "polynomial of the orthogonalization",
                                choices=("newton_schulz", "polar_express", "six_maps"),
                                off="newton_schulz")
    mlp_lr_mul: tuple[float, float] = option((1.0, 1.0), "learning-rate multipliers of MLP matrices", 0.0)
    decay: str = option("decoupled", "cautious: decay only weights that the update, or anvil's slow "
                        "momentum, shrinks",
                        choices=("decoupled", "cautious"), off="decoupled")
    decay_schedule: str = option("constant", "factor of the weight decay: 1 (constant), the learning rate's "
                                 "factor (lr), or a cosine to 0", choices=("constant", "lr", "cosine"))
    momentum: tuple[float, float] = option((0.85, 0.95), "Muon momentum at step 0, later", 0.0, 0.9999)
    momentum_warmup_steps: int = option(300, "steps of the momentum warmup", 0, off=0)
    momentum_cooldown_steps: int = option(0, "final steps of the momentum cooldown", 0, off=0)
    slow_momentum_start: float = option(1.0, "fraction of the schedule before anvil's slow momentum acts",
                                        0.0, 1.0, off=1.0)
    adam_eps: float = option(1e-8, "Adam epsilon, for gradients of a sum over 49,152 tokens", 1e-30)
    state_dtype: str = option("storage", "dtype of optimizer state: the parameter's (storage), or float32 "
                              "with low bits of bfloat16 matrices", choices=("storage", "float32"))
    late_start: float = option(1.0, "fraction of the schedule before late_every acts", 0.0, 1.0, off=1.0)
    averages: bool = option(False, "in the end, move weights towards their running averages", off=False)
    untie_frac: float = option(1.0, "fraction of the schedule after which a tied head is untied", 0.0, 1.0)
    lr_warmup_frac: float = option(0.0, "fraction of the schedule with rising lr", 0.0, 1.0)
    cooldown_frac: float = option(0.5, "fraction of the schedule with falling lr", 0.0, 1.0, off=0.0)
    matrix_cooldown_frac: float = option(-1.0, "cooldown_frac of matrices. -1: cooldown_frac", -1.0, 1.0,
                                         off=-1.0)
    final_lr_frac: float = option(0.1, "final learning rate divided by the group's lr", 0.0, 1.0)
    groups: dict[str, Group] = option(RECORD_32_GROUPS, "fields of parameter groups, JSON or a .json file")

    @property
    def has_output_gain(self):
        """Whether sublayers begin with zero gains instead of zero matrices."""
        return "output" in self.gains

    @property
    def padded_vocab_size(self):
        """V: the vocabulary size, rounded up."""
        return round_up(self.vocab_size, self.vocab_multiple)

    @property
    def mlp_hidden(self):
        return round(self.mlp_ratio * self.model_dim)

    def qk_dim(self, spec: LayerSpec):
        """Channels per head of a layer's queries and keys."""
        return self.short_qk_dim if self.short_qk_dim and spec.attention == "short" else self.head_dim

    @property
    def longest_period(self):
        """Largest number of steps between two updates of a group."""
        return max(max(group.every, group.late_every) for group in self.groups.values())

    @property
    def scheduled_steps(self):
        return self.num_iterations - self.extension_steps

    def step_at(self, fraction: float):
        """First step after a fraction of the schedule. 1: never."""
        if fraction >= 1:
            return sys.maxsize
        return math.ceil(fraction * self.scheduled_steps - 1e-6)  # 1e-6 absorbs rounding of the product

    @property
    def full_stages(self):
        return tuple(dataclasses.replace(
            stage, tokens_per_step=stage.tokens_per_step or self.tokens_per_step,
            max_doc_len=stage.max_doc_len or self.max_doc_len, seq_len=stage.seq_len or self.seq_len)
            for stage in self.stages)


def round_up(number: int, unit: int):
    return -(-number // unit) * unit


# The loss is a sum over tokens. Update rules see gradients that are rescaled from tokens_per_step to this
# number of tokens, as on a rank of record 32. So adam_eps keeps its meaning if tokens_per_step changes
GRAD_TOKENS = 49_152


def build_layers(num_layers: int, pattern: str):
    """The layers of record 32, and alike at other depths. Layer 0 has no MLP, unless it is alone. Four
    evenly spaced layers have long windows, but the third of them has no attention. Models with fewer layers
    have only long windows. The upper half adds outputs of the lower half in reverse order. The last layers
    reuse value embeddings of the first."""
    if pattern == "laptop":
        return build_laptop_layers(num_layers)
    last = num_layers - 1
    num_values = min(3, num_layers // 2)  # tables of value embeddings
    long_layers = {round(i * last / 3) for i in range(4)}
    layers = []
    for i in range(num_layers):
        mirror = last - i  # as far from the first layer as i is from the last
        attention = "long" if i in long_layers else "short"
        value_embed = skip_from = None
        if i < num_values:
            value_embed = i
        elif mirror < num_values:
            value_embed = num_values - 1 - mirror
        if mirror < i and mirror < num_layers // 2:
            skip_from = mirror
        if num_layers >= 4 and i == round(2 * last / 3):
            attention = "none"
            value_embed = None
        has_mlp = i > 0 or num_layers == 1
        layers.append(LayerSpec(attention, mlp=has_mlp, value_embed=value_embed, skip_from=skip_from))
    return tuple(layers)


def build_laptop_layers(num_layers):
    """Every fourth and the last layer have long windows. A layer has a skip from the layer that is as far
    from the start as it is from the end, if that one is at least two layers earlier. All layers have key
    offset, and by turns one of two tables of value embeddings."""
    last = num_layers - 1
    layers = []
    for i in range(num_layers):
        mirror = last - i
        attention = "long" if i == last or i % 4 == 3 else "short"
        skip_from = mirror if mirror < i - 1 else None
        layers.append(LayerSpec(attention, key_offset=True, value_embed=i % 2, skip_from=skip_from))
    return tuple(layers)


RECORD_92_LAYERS = (  # record 92, 2026-08-30
    LayerSpec(attention="short", gates_from=0, paired=True),
    LayerSpec(attention="short", gates_from=0, v_dim=64, value_embed=0, xsa=True),
    LayerSpec(attention="short", gates_from=0, value_embed=1, paired=True, ngram=False),
    LayerSpec(attention="long", gates_from=0, key_offset=True, xsa=True, head_gate=True, x0=False,
              ngram=False),
    LayerSpec(attention="none", gates_from=4),
    LayerSpec(attention="short", gates_from=4, paired=True),
    LayerSpec(attention="none", gates_from=4, skip_from=3, x0=False, ngram=False),
    LayerSpec(attention="none", gates_from=4, mlp=False, ngram=False),
    LayerSpec(attention="short", gates_from=4, v_dim=64, value_embed=2, attention_from=7, second_mlp=True,
              x0=False, ngram=False),
    LayerSpec(attention="none", gates_from=4, x0=False),
    LayerSpec(attention="long", gates_from=4, value_embed=3, attention_from=7, key_offset=True,
              head_gate=True, mudd_in=("x_in", "h7"),
              mudd_out=("x_in", "h7", "h9", "ve0", "h3", "ve1", "ve3", "ve2", "mlp_in", "attn_in")),
)

# The first five durations are numbers of steps, because they add up to scheduled_steps + 1 = 1175, by which
# Schedule multiplies the shares of the durations. The last stage is the extension. It begins with step 1174,
# which cuts the fifth stage by one step
RECORD_92_STAGES = (
    Stage(duration=320, window_long=384, window_short=128, tokens_per_step=131_072, max_doc_len=896,
          seq_len=16_384, loss_weights=((1, 1), (0.5, 0.5), (0.25, 0)), prefix_weight=(0.25,),
          num_classes=10_240),
    Stage(duration=361, window_long=896, window_short=384, tokens_per_step=262_144, max_doc_len=2048,
          lr_factor=1.52, seq_len=32_768, loss_weights=((1, 1), (0.5, 0)),
          prefix_weight=(0.2, 0.15, 0.1, 0.05), num_classes=10_240),
    Stage(duration=284, window_long=1408, window_short=640, lr_factor=1.73, num_classes=14_336),
    Stage(duration=142, window_long=1408, window_short=640, lr_factor=1.73, num_classes=24_576),
    Stage(duration=68, window_long=1408, window_short=640, tokens_per_step=327_680, seq_len=40_960,
          lr_factor=1.73 * (20 / 24) ** 0.5),
    Stage(duration=20, window_long=1664, window_short=768, tokens_per_step=131_072, seq_len=16_384),
)

# The embedding is tied to head.weight up to the update in step 1175, and group head trains it. every=2:
# updates in steps 1, 3, 5, ..., with the gradients of two steps. The published decay of a weight has the lr
# twice: lr * lr * wd * wd_mul. The update multiplies weight_decay by lr, so a row here has lr * wd * wd_mul
RECORD_92_GROUPS = dict(
    matrix=Group(rule="anvil", lr=0.023, betas=(0.9, 0.9), weight_decay=0.023 * 2.25),
    embed=Group(lr=0.008, betas=(0.5, 0.95), weight_decay=0.008 * 0.005 * 150, every=2),  # once untied
    head=Group(lr=0.008, betas=(0.5, 0.95), weight_decay=0.008 * 0.005 * 150, every=2),  # and tied embedding
    value_embed=Group(lr=0.56, betas=(0.75, 0.95), weight_decay=0.56 * 0.005 * 5, every=2, late_every=4),
    ngram=Group(rule="row_adam", lr=0.56, betas=(0.0, 0.95), weight_decay=0.56 * 0.005 * 5, every=2,
                late_every=4),
    scalar=Group(lr=0.04, betas=(0.9, 0.99), every=2),
    residual=Group(lr=0.04, betas=(0.9, 0.95), every=2),
    mix=Group(lr=0.008, betas=(0.9, 0.95), every=2),
    gate=Group(lr=0.008, betas=(0.9, 0.99), weight_decay=0.008 * 0.005, every=2),
    gain=Group(lr=0.1, every=2),
)

EMBEDDED_CORPUS = "data/torch_source"  # run.sh makes it from the installed PyTorch: no download needed

# name: (parent, description, differences). Rows of groups replace the parent's. More: presets/
PRESETS: dict[str, tuple[str | None, str, dict]] = {
    "record_32": (None, "record 32: 271 M parameters, FineWeb, loss 3.28 on 8xH100", {}),
    "record_92": ("record_32", "record 92, of 2026-08-30: the fastest recipe", dict(
        num_layers=11, layers=RECORD_92_LAYERS, mlp_ratio=11 / 3, attention_gate_dim=0,
        value_gate_dim=12, qk_group_heads=2, yarn_max_window=1664,
        attention_scale=(0.085, 0.13), short_qk_dim=64, x0_mix="after_attention", residual_init=1.1**0.5,
        smear=True, ngram_rows=84_602_880, ngram_order=3, mudd_groups=12, zero_init="mlp",
        # untie_frac means step ceil(1173.5) = 1174. 1 would mean never. The head's next update unties, in
        # step 1175
        tie_head=True, untie_frac=1173.5 / 1174, embed_std=(0.005, 0.01), softcap=(23.0, 5.0, 7.5),
        fp8_parts=("head", "logits", "mlp", "qkv"), fp8_head_amax=2.0, matrix_dtype="bfloat16",
        groups=RECORD_92_GROUPS, late_start=336 / 1174, state_dtype="float32", adam_eps=1e-10,
        orthogonalize="six_maps", slow_momentum_start=514 / 1174, averages=True, decay="cautious",
        decay_schedule="lr", mlp_lr_mul=((11 / 3) ** 0.5, 2 * (11 / 3) ** 0.5),
        momentum=(0.85, 0.93), momentum_warmup_steps=240, momentum_cooldown_steps=50,
        cooldown_frac=940 / 1174, final_lr_frac=0.3, num_iterations=1194, extension_steps=20,
        stages=RECORD_92_STAGES, max_doc_len=3072, max_attention_len=2560, val_loss_every=0,
        val_windows=(2560, 768))),
    "laptop": ("record_32", "the mechanisms of records 89 and 92 that pay at this size. Two CPU cores", dict(
        track="laptop", train_files=f"{EMBEDDED_CORPUS}/train_*.bin", vocab_size=257, vocab_multiple=16,
        val_files=f"{EMBEDDED_CORPUS}/val_*.bin", num_layers=2, head_dim=64, model_dim=128, mlp_ratio=2.0,
        layer_pattern="laptop", attention_gate_dim=0, equal_qk_init=True, ngram_rows=163_840, ngram_order=6,
        zero_init="mlp", embed_dtype="float32", x0_mix="after_attention", softcap=(23.0, 5.0, 7.5),
        momentum=(0.7, 0.7), momentum_warmup_steps=0, adam_eps=1e-2,  # smaller gradients are rounding noise
        groups=dict(
            matrix=Group(rule="normuon", lr=0.05, betas=(0.9, 0.9)),
            embed=Group(lr=0.3, betas=(0.5, 0.95)),
            head=Group(lr=0.02, betas=(0.5, 0.95)),
            value_embed=Group(lr=0.3, betas=(0.75, 0.95)),
            ngram=Group(rule="row_adam", lr=0.4, betas=(0.0, 0.95))),
        warmup_iterations=0, num_iterations=165, tokens_per_step=2048, seq_len=1024, micro_batch_tokens=2048,
        max_doc_len=1024, sequence_start="anywhere", val_tokens=131_072, val_seq_len=8192, val_loss_every=40,
        val_windows=(1280, 32), stages=(
            Stage(duration=1, window_long=384, window_short=32),
            Stage(duration=1, window_long=512, window_short=32),
            Stage(duration=1, window_long=768, window_short=32)))),
    "quick": ("laptop", "a text of your own, read once", dict(
        track="try", num_layers=1, num_iterations=0, val_tokens=40_960, val_loss_every=-1,
        val_windows=(256, 16), stages=(Stage(duration=1, window_long=256, window_short=16),),
        cooldown_frac=1.0,
        groups=dict(  # slow second betas: rates of rare rows and tokens fall with their number of updates
            embed=Group(lr=0.3, betas=(0.5, 0.999)),
            head=Group(lr=0.012, betas=(0.5, 0.999)),
            value_embed=Group(lr=0.3, betas=(0.75, 0.999)),
            ngram=Group(rule="row_adam", lr=0.5, betas=(0.0, 0.999))))),
    "smoke": ("record_32", "record 32 in seconds on any machine, for tests", dict(
        track="try", train_files=f"{EMBEDDED_CORPUS}/train_*.bin", val_files=f"{EMBEDDED_CORPUS}/val_*.bin",
        vocab_size=257, num_layers=4, num_heads=2, head_dim=32, model_dim=64, embed_dtype="float32",
        dtype="float32", num_iterations=12, tokens_per_step=2048, seq_len=512, micro_batch_tokens=1024,
        max_doc_len=256, val_tokens=4096, val_seq_len=1024, val_loss_every=6, warmup_iterations=1,
        momentum_warmup_steps=10, adam_eps=1e-2, val_windows=(320, 128), stages=(
            Stage(duration=1, window_long=128, window_short=64),
            Stage(duration=1, window_long=192, window_short=64),
            Stage(duration=1, window_long=256, window_short=128)))),
}

# ==== SCHEDULES ============================================================================================
# Hyperparameters that change during training, as pure functions of the step (record 32). To add one, add a
# field to StepState, compute it in Schedule.at(), and use it in compute_hyper() or Trainer.train_step().

ROTARY_BASE = 1024  # 1 / the lowest RoPE frequency before YaRN


class RopeSetting(typing.NamedTuple):
    """RoPE of one kind of layers in one stage."""

    frequencies: np.ndarray  # (K/2,) RoPE frequencies after YaRN, radians per position. 0: no rotation
    softmax_scale: float


class StepState(typing.NamedTuple):
    stage_index: int  # of the stage whose windows and RoPE are used. After the last one: final validation
    stage: Stage
    windows: tuple[int, int]  # long, short
    lr: dict[str, float]  # by parameter group
    weight_decay: dict[str, float]  # by parameter group, before the multiplication by lr
    momentum: float
    has_slow_momentum: bool  # whether anvil's slow momentum acts
    loss_weights: tuple[float, ...]  # of the targets, see Head.forward()
    rope: dict[str, RopeSetting]  # by attention, long or short


class Schedule:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        self.stages = cfg.full_stages
        self.num_iterations = cfg.num_iterations
        self.scheduled_steps = cfg.scheduled_steps
        self.slow_momentum_step = cfg.step_at(cfg.slow_momentum_start)

        # As published, a stage ends at the first step where step / (scheduled_steps + 1) reaches the summed
        # share of the durations. Ends of three equal stages in a run of 9 steps:
        #   without an extension        4, 7, 10. The methods below cut the last stage at step 9
        #   with extension_steps=2      4, 7, 9. Two equal stages of 7 + 1 steps end at 4 and 8, and 8 is cut
        #                               to 7. The third stage is the extension
        durations = np.array([stage.duration for stage in self.stages])
        if cfg.extension_steps:
            durations = durations[:-1]
        ends = np.ceil(np.cumsum(durations) * (self.scheduled_steps + 1) / durations.sum())
        self.ends = ends.astype(int).tolist()
        if cfg.extension_steps:
            self.ends = [*self.ends[:-1], self.scheduled_steps, self.num_iterations]

        # Windows and RoPE of each stage, and of the final validation
        self.windows = [(stage.window_long, stage.window_short) for stage in self.stages]
        self.windows.append(cfg.val_windows or self.windows[-1])
        long_windows = [long for long, _ in self.windows]
        short_windows = [short for _, short in self.windows]
        # Half of the channel pairs do not rotate (record 17). RoPE of short layers also follows long windows
        num_pairs = cfg.head_dim // 2
        long_ropes = self._adapt_rope(num_pairs, num_pairs // 2, long_windows, cfg.attention_scale[0])
        short_ropes = long_ropes
        if cfg.short_qk_dim:  # all pairs of short heads rotate, and follow short windows (record 92)
            short_ropes = self._adapt_rope(cfg.short_qk_dim // 2, 0, short_windows, cfg.attention_scale[1])
        self.ropes = [dict(long=long, short=short) for long, short in zip(long_ropes, short_ropes)]

    def _adapt_rope(self, num_pairs: int, num_fixed: int, windows: Iterable[int], softmax_scale: float):
        """RoPE setting for each entry of windows (YaRN, arXiv 2309.00071). num_fixed pairs do not rotate."""
        exponents = np.concatenate((np.linspace(0, 1, num_pairs - num_fixed), np.full(num_fixed, np.inf)))
        frequencies = (1 / ROTARY_BASE) ** exponents
        old_window = None
        settings = []
        for window in windows:
            window = max(1, min(window, self.cfg.yarn_max_window))  # yarn_max_window=0: 1 in all stages
            if old_window is None:
                old_window = window
            rotations = old_window * frequencies / (2 * math.pi)
            keep = np.clip((rotations - 1) / (32 - 1), 0, 1)  # high frequencies do not change
            frequencies = frequencies * (old_window / window + keep * (1 - old_window / window))
            softmax_scale *= 0.2 * math.log(window / old_window) + 1
            old_window = window
            settings.append(RopeSetting(frequencies, softmax_scale))
        return settings

    def stage_ranges(self):
        """List (stage, start, end) of all stages with steps. A stage has the steps start to end - 1."""
        ranges = []
        start = 0
        for stage, end in zip(self.stages, self.ends):
            end = min(end, self.num_iterations)
            if start < end:
                ranges.append((stage, start, end))
            start = end
        return ranges

    def count_tokens(self):
        return sum(stage.tokens_per_step * (end - start) for stage, start, end in self.stage_ranges())

    def at(self, step: int):
        """The scheduled values at a step. Step num_iterations is the final validation."""
        cfg = self.cfg
        index, fraction = self.find_stage(step)
        stage = self.stages[index]
        if step == self.num_iterations:
            index = len(self.stages)

        # Learning rates and weight decay
        lr, weight_decay = {}, {}
        for name, group in cfg.groups.items():
            lr_factor = self.compute_lr_factor(step, name)
            decay_factor = 1.0
            if cfg.decay_schedule == "lr":
                decay_factor = lr_factor
            elif cfg.decay_schedule == "cosine":
                decay_factor = 0.5 + 0.5 * math.cos(math.pi * step / self.num_iterations)
            lr[name] = group.lr * lr_factor
            weight_decay[name] = group.weight_decay * decay_factor

        # Muon momentum: linear warmup in the first steps, linear cooldown in the last
        t = 1.0
        if step < cfg.momentum_warmup_steps:
            t = step / cfg.momentum_warmup_steps
        if step > self.num_iterations - cfg.momentum_cooldown_steps:
            t = min(t, (self.num_iterations - step) / cfg.momentum_cooldown_steps)
        first, last = cfg.momentum
        momentum = first + t * (last - first)
        # Weights of the targets: linear in the fraction of the stage, or constant in its parts (prefix)
        loss_weights = [first + (last - first) * fraction for first, last in stage.loss_weights]
        if stage.prefix_weight:
            num_parts = len(stage.prefix_weight)
            loss_weights.append(stage.prefix_weight[min(int(fraction * num_parts), num_parts - 1)])
        return StepState(
            stage_index=index, stage=stage, windows=self.windows[index], lr=lr, weight_decay=weight_decay,
            momentum=momentum, has_slow_momentum=step >= self.slow_momentum_step,
            loss_weights=tuple(loss_weights), rope=self.ropes[index])

    def find_stage(self, step: int):
        """Find the stage of a step. Returns (its index, fraction of the stage that is done)."""
        index = min(int(np.searchsorted(self.ends, step, side="right")), len(self.ends) - 1)
        start = [0, *self.ends][index]
        end = min(self.ends[index], self.num_iterations)
        return index, (step - start) / max(1, end - start)

    def compute_lr_factor(self, step: int, group: str):
        """Linear warmup to the stage's lr_factor, then linear cooldown to final_lr_frac."""
        cfg = self.cfg
        peak = self.stages[self.find_stage(step)[0]].lr_factor
        cooldown_frac = cfg.cooldown_frac
        if group == "matrix" and cfg.matrix_cooldown_frac >= 0:
            cooldown_frac = cfg.matrix_cooldown_frac
        warmup_steps = cfg.lr_warmup_frac * self.scheduled_steps
        if step + 1 < warmup_steps:
            return peak * (step + 1) / warmup_steps
        remaining = max(0.0, 1 - step / self.scheduled_steps)  # fraction of the schedule
        if cooldown_frac == 0 or remaining > cooldown_frac:
            return peak
        t = remaining / cooldown_frac  # from 1 to 0
        return peak * t + cfg.final_lr_frac * (1 - t)

# ==== DATA =================================================================================================
# Shards become packed sequences, which become batches. A packed sequence has seq_len inputs and one more
# token, the last target. They come from documents cut to max_doc_len, or from any place in the stream. A run
# plans all sequences before its first step. Ranks and micro-batches divide this plan, so their number does
# not change the loss. To change the packing, change plan_sequences(). Source: record 32.

class Batch(typing.NamedTuple):
    """Tokens of one forward pass (T,): int32 inputs, int64 targets, int32 doc_ids that never decrease."""

    inputs: Tensor
    targets: Tensor
    doc_ids: Tensor
    classes: Tensor | None = None  # (sequences, C) int64, classes in the loss of each sequence. None: all
    token_plan: RowPlan | None = None  # of value embeddings. None: read whole tables
    ngram_plan: RowPlan | None = None
    sign_rows: Tensor | None = None  # (n, T) int32, signs of n-grams. With ngram_plan


SWEEP_STEP = 20_011  # prime
PREFETCHED = 4  # batches that a thread prepares in advance for a GPU


class PackedSequence(typing.NamedTuple):
    """Documents `first` to `last` of a shard, each cut to max_doc_len. Together cut to seq_len + 1 tokens.
    With --sequence_start=anywhere, first and last are positions of tokens in the shard."""

    shard: int
    first: int
    last: int
    seq_len: int
    max_doc_len: int


def plan_sequences(schedule: Schedule, shards: Iterator[tuple[int, Shard]], anywhere: bool):
    """Yield the packed sequences of the whole run in order. Ends early if the shards run out. A sequence
    takes the next documents, cut to max_doc_len, until they have seq_len + 1 tokens. The rest of its last
    document is dropped. With anywhere, it begins with the last target of the previous sequence. The end of a
    shard is dropped, too, if it is shorter than a sequence."""
    find_last = find_last_token if anywhere else find_last_document
    index, shard = next(shards)
    first = 0
    for stage, first_step, end_step in schedule.stage_ranges():
        for _ in range((end_step - first_step) * stage.tokens_per_step // stage.seq_len):
            last = find_last(shard, first, stage)
            while last is None:
                index, shard = next(shards, (-1, None))
                if shard is None:
                    return
                first = 0
                last = find_last(shard, first, stage)
            yield PackedSequence(index, first, last, stage.seq_len, stage.max_doc_len)
            first = last if anywhere else last + 1


def find_last_document(shard, first: int, stage):
    """The last document of a sequence that begins with document `first`. None if too few tokens remain."""
    token_sums = sum_documents(shard, stage.max_doc_len)
    tokens_before = token_sums[first - 1] if first else 0
    last = int(np.searchsorted(token_sums, tokens_before + stage.seq_len + 1))
    return last if last < len(token_sums) else None


@functools.lru_cache(maxsize=1)  # the plan reads one shard after the other
def sum_documents(shard, max_doc_len: int):
    """Running sum over the documents of a shard of min(length, max_doc_len)."""
    return np.minimum(np.diff(shard.bounds), max_doc_len).cumsum()


def find_last_token(shard, first: int, stage):
    """The last target of a sequence that begins with token `first`. None if too few tokens remain."""
    last = first + stage.seq_len
    return last if last < len(shard.tokens) else None


def divide_step(cfg: Config, world_size: int, stage):
    """Divide a step. Returns (micro-batches per rank, sequences per micro-batch)."""
    num_sequences = stage.tokens_per_step // stage.seq_len // world_size
    per_micro_batch = find_divisor(num_sequences, cfg.micro_batch_tokens // stage.seq_len)
    return num_sequences // per_micro_batch, per_micro_batch


def find_divisor(number: int, limit: int):
    """The largest divisor up to a limit, at least 1."""
    return max(n for n in range(1, max(1, min(limit, number)) + 1) if number % n == 0)


class TrainData:
    """The packed sequences of a whole run. Every rank can read every sequence."""

    def __init__(self, cfg: Config, schedule: Schedule):
        """Plan all sequences and open the shards that they need. RunError if tokens are missing."""
        self.cfg, self.schedule = cfg, schedule
        self.shards: list[Shard] = []  # scan_shards() appends to it
        plan = plan_sequences(schedule, scan_shards(cfg, self.shards), cfg.sequence_start == "anywhere")
        self.sequences = list(plan)
        self.bos = self.shards[0].bos  # BOS token, equal in all shards
        if len(self.sequences) < self.count_sequences(cfg.num_iterations):
            needed, found = schedule.count_tokens(), sum(sequence.seq_len for sequence in self.sequences)
            remedy = f"--epochs={-(-needed * cfg.epochs // found)}" if found else "a shorter --seq_len"
            num_tokens = cfg.epochs * sum(len(shard.tokens) for shard in self.shards)
            if cfg.sequence_start != "anywhere" and num_tokens > needed:
                remedy += ", or --sequence_start=anywhere, which passes over no tokens"
            raise RunError(f"--train_files={cfg.train_files} fills {found} of the {needed} tokens of this "
                           f"run: get more files, lower --num_iterations, or give {remedy}", 2)

    def describe_share(self):
        """A line if sequences read less than half of the tokens that they pass, or ""."""
        if self.cfg.sequence_start == "anywhere":
            return ""
        passed = read = 0
        for sequence in self.sequences:
            bounds = self.shards[sequence.shard].bounds
            passed += int(bounds[sequence.last + 1] - bounds[sequence.first])
            read += sequence.seq_len
        if read >= passed / 2:
            return ""
        return (f"{1 - read / passed:.1%} of the tokens are passed over, because documents are cut to "
                "max_doc_len and at the end of a sequence: --sequence_start=anywhere reads all, a larger "
                "--max_doc_len more of them")

    def count_sequences(self, step: int):
        """Number of packed sequences before a step."""
        return sum((min(end, step) - start) * (stage.tokens_per_step // stage.seq_len)
                   for stage, start, end in self.schedule.stage_ranges() if start < step)

    def read_tokens(self, index: int):
        """The seq_len + 1 tokens of a packed sequence, uint16."""
        sequence = self.sequences[index]
        shard = self.shards[sequence.shard]
        if self.cfg.sequence_start == "anywhere":
            return shard.tokens[sequence.first : sequence.last + 1]
        bounds = shard.bounds[sequence.first : sequence.last + 2]
        documents = [shard.tokens[start : min(end, start + sequence.max_doc_len)]
                     for start, end in itertools.pairwise(bounds)]
        return np.concatenate(documents)[: sequence.seq_len + 1]

    def read_batch(self, indices: range):
        """Packed sequences (sequences, seq_len + 1), uint16."""
        return np.stack([self.read_tokens(index) for index in indices])

    def batches(self, comm: Comm, start: int, end: int, sweep_from: int | None = None):
        """This rank's micro-batches of steps start..end-1. The ranks share the sequences of a step in order.
        The sweeps through the classes begin at step sweep_from (None: start)."""
        cfg = self.cfg
        sweeps = Sweeps(self, start if sweep_from is None else sweep_from)
        for step in range(start, end):
            stage = self.schedule.stages[self.schedule.find_stage(step)[0]]
            num_micro_batches, size = divide_step(cfg, comm.world_size, stage)
            first = self.count_sequences(step)
            for i in range(num_micro_batches):
                # The first slot of each rank. A slot is the place of a sequence in its step
                slots = [(rank * num_micro_batches + i) * size for rank in range(comm.world_size)]
                tokens = [self.read_batch(range(first + slot, first + slot + size)) for slot in slots]
                batch = make_batch(tokens[comm.rank], self.bos, cfg.max_attention_len)
                if stage.num_classes:
                    own = range(slots[comm.rank], slots[comm.rank] + size)
                    classes = np.stack([sweeps.choose_classes(step, slot) for slot in own])
                    batch = batch._replace(classes=torch.from_numpy(classes))
                yield add_plans(batch, tokens, comm.rank, cfg)


class Sweeps:
    """Classes of the sampled softmax: all targets of a sequence, and the next negatives of a sweep. A sweep
    is a cyclic order of all classes, also of the vocabulary's padding: 0, SWEEP_STEP, 2 * SWEEP_STEP, ...,
    modulo V. Slot i is the i-th sequence of every step. Each slot has its own sweep, and goes on where its
    last step has ended. So the classes are equal for any number of ranks. Record 92."""

    def __init__(self, data, first_step: int):
        """first_step: step in which all sweeps begin."""
        self.data = data
        self.first_step = first_step
        self.positions: dict[int, tuple[int, int]] = {}  # by slot: its next step, and the sweep's offset

    def choose_classes(self, step: int, slot: int):
        """Classes (C,) of the sequence of a step in a slot, sorted. Steps of a slot must ascend. If a rank
        reads a slot for the first time, e.g. in a resumed run, the choices of all steps since first_step
        are made again, because offsets depend on the targets."""
        data, schedule = self.data, self.data.schedule
        vocab_size = data.cfg.padded_vocab_size
        num_slots = max(stage.tokens_per_step // stage.seq_len for stage in schedule.stages)
        start = (self.first_step, vocab_size * slot // num_slots)
        next_step, offset = self.positions.get(slot, start)
        for earlier in range(next_step, step + 1):
            stage = schedule.stages[schedule.find_stage(earlier)[0]]
            if stage.num_classes and slot < stage.tokens_per_step // stage.seq_len:
                targets = data.read_tokens(data.count_sequences(earlier) + slot)[1:]
                classes, offset = choose_classes(targets, stage.num_classes, vocab_size, offset)
        self.positions[slot] = (step + 1, offset)
        return classes


def choose_classes(targets: np.ndarray, num_classes: int, vocab_size: int, offset: int):
    """Classes of one sequence, sorted: its targets, and negatives from a sweep that starts at offset. It
    draws 1.7 times the missing number plus 256, as published, because some of them are targets. If it still
    draws too few, every k-th class that is no target is taken, where k is the number of these classes // the
    missing number. Returns (classes (C,), new offset)."""
    is_chosen = np.zeros(vocab_size, dtype=bool)
    is_chosen[targets] = True
    num_missing = num_classes - np.count_nonzero(is_chosen)
    if num_missing < 0:
        raise RunError(f"a packed sequence has {is_chosen.sum()} distinct targets, but its stage has "
                       f"num_classes={num_classes}: give a larger one, or a shorter seq_len, in --stages")
    if num_missing:
        num_drawn = min(vocab_size, int(1.7 * num_missing) + 256)
        drawn = SWEEP_STEP * (offset + np.arange(num_drawn, dtype=np.int64)) % vocab_size
        offset = (offset + num_drawn) % vocab_size
        negatives = drawn[~is_chosen[drawn]]
        if len(negatives) < num_missing:
            negatives = np.flatnonzero(~is_chosen)
            negatives = negatives[:: max(1, len(negatives) // num_missing)]
        is_chosen[negatives[:num_missing]] = True
    return np.flatnonzero(is_chosen), offset


def make_batch(tokens: np.ndarray, bos: int, max_attention_len: int = 0):
    """Packed sequences (sequences, 1 + seq_len) of any integer dtype -> one Batch on the CPU. Attention
    stays within a document of a sequence, and with max_attention_len within a piece of it."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:].ravel()
    is_start = inputs == bos
    is_start[:, 0] = True
    is_start = is_start.ravel()
    if max_attention_len:
        starts = np.flatnonzero(is_start).tolist()
        for start, end in itertools.pairwise([*starts, len(is_start)]):
            is_start[start:end:max_attention_len] = True
    doc_ids = is_start.cumsum(dtype=np.int32)  # (T,) over all sequences
    inputs = inputs.ravel().astype(np.int32)
    return Batch(*map(torch.from_numpy, (inputs, targets.astype(np.int64), doc_ids)))


class ValData:
    """The first val_tokens validation tokens in sequences of val_seq_len, without max_doc_len."""

    def __init__(self, cfg: Config):
        self.cfg = cfg
        num_sequences = cfg.val_tokens // cfg.val_seq_len
        size = find_divisor(num_sequences, cfg.micro_batch_tokens // cfg.val_seq_len)
        self.batch_tokens = size * cfg.val_seq_len
        self.num_batches = num_sequences // size
        self.shards = [open_shard(path, cfg.vocab_size) for path in find_shards(cfg.val_files, "val_files")]
        self.bos = self.shards[0].bos  # BOS token, equal in all shards
        missing = cfg.val_tokens + 1  # the tokens, and the last target
        parts = []
        for shard in self.shards:
            parts.append(shard.tokens[:missing])  # slices read no more of a file than they need
            missing -= len(parts[-1])
        self.tokens = np.concatenate(parts)
        if missing:
            fitting = max(0, cfg.val_tokens - missing) // cfg.val_seq_len * cfg.val_seq_len
            remedy = f"give --val_tokens={fitting}" if fitting else "lower --val_seq_len, too"
            raise RunError(f"--val_files={cfg.val_files} is {missing} tokens too short for --val_tokens="
                           f"{cfg.val_tokens} and one more target: {remedy}", 2)

    def read_batch(self, index: int):
        """Sequences (sequences, val_seq_len + 1), uint16."""
        first, size = index * self.batch_tokens, self.cfg.val_seq_len
        starts = range(first, first + self.batch_tokens, size)
        return np.stack([self.tokens[start : start + size + 1] for start in starts])

    def batches(self, comm: Comm, num_batches: int):
        """Yield (batch of this rank, whether it counts) of the first num_batches. Ranks get equally many."""
        for first in range(0, num_batches, comm.world_size):
            tokens = [self.read_batch(min(first + rank, num_batches - 1)) for rank in range(comm.world_size)]
            batch = make_batch(tokens[comm.rank], self.bos)
            yield add_plans(batch, tokens, comm.rank, self.cfg), first + comm.rank < num_batches


def read_vocabulary(cfg: Config):
    """Read the map from each token's bytes to its id, without <|endoftext|>."""
    # In GPT-2's file a printable byte is its own character. The others are the characters from 256 on
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    byte_of = {chr(byte): byte for byte in printable}
    others = sorted({*range(256)} - printable)
    for code, byte in enumerate(others, 256):
        byte_of[chr(code)] = byte
    try:
        ids = json.loads(Path(cfg.vocab_file).read_text())
        return {bytes(byte_of[char] for char in text): index for text, index in ids.items()
                if text != "<|endoftext|>" and index < cfg.vocab_size}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"--vocab_file={cfg.vocab_file} is no map from tokens to ids ({error!r}): ./run.sh "
                       "data/cached_fineweb10B.py 0 gets data/gpt2_vocab.json in the project's folder. "
                       "--without=prefix_weight needs none", 2) from None


def find_prefix_tokens(ids: dict[bytes, int], vocab_size: int):
    """Return (V,): for each token, the id of the longest other token that is its prefix, or -1. Visits
    tokens in sorted order, with a stack of the prefixes of the current token. Source: 2026-07-13."""
    prefixes = np.full(vocab_size, -1)
    stack = []
    for text in sorted(filter(None, ids)):
        while stack and not text.startswith(stack[-1]):
            stack.pop()
        if stack:
            prefixes[ids[text]] = ids[stack[-1]]
        stack.append(text)
    return torch.from_numpy(prefixes)


def prefetch(batches: Iterator[Batch], device):
    """Yield batches on the device. For a GPU a thread builds and pins them in advance. On a CPU OpenMP would
    give the thread its own team: four threads on two cores, and training waits for those that sleep."""
    def build():
        torch.cuda.set_device(device)  # a new thread uses device 0, so pinning would allocate there
        return tree_map_only(Tensor, pin, next(batches, None))

    if device.type != "cuda":
        yield from batches
        return
    with ThreadPoolExecutor(1, "prefetch") as executor:
        pending = deque(executor.submit(build) for _ in range(PREFETCHED))
        while batch := pending.popleft().result():
            pending.append(executor.submit(build))
            yield move_batch(batch, device)


def move_batch(batch: Batch, device):
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch)

# ==== OPERATIONS ===========================================================================================
# The equations of the model, on local tensors. Part two has fast forms of the functions in Operations. After
# an edit of a function its fast forms are off, FP8 too, and a line says so. With micro-batches or validation
# sequences above 8,192 tokens a fast form of attention() always runs: edit that one.

RMS_EPS = 1.1920929e-07  # float32's machine epsilon, for every dtype
BLOCK = 128  # tokens. Sequence lengths are multiples of BLOCK, because masks are tested block by block
NUM_SIGN_ROWS = 8192  # rows in the table of n-gram signs
LOGITS_CHUNK = 24_576  # tokens whose logits are computed at once


def at_least_fp32(x):
    return torch.promote_types(x.dtype, torch.float32)


def linear(x, weight):
    """x (T, D) @ weight (F, D)^T -> (T, F)."""
    return x @ weight.type_as(x).T


def scale(x, weight: Tensor | float | None):
    """x * weight. weight=None means 1."""
    if weight is None:
        return x
    if isinstance(weight, Tensor):
        weight = weight.type_as(x)
    return x * weight


def add_scaled(x, weight, y):
    """x + weight * y. weight=None means 1."""
    if weight is None:
        return x + y
    return torch.addcmul(x, weight, y)


def add_embeddings(x, acts, s, names: list[str]):
    """For each name add s[name] * acts[name] to x. Names are ngram, x0 and x_in."""
    for name in names:
        x = add_scaled(x, s[name], acts[name])
    return x


def rms_norm(x):
    """x (..., D) / root mean square over D."""
    return F.rms_norm(x, x.shape[-1:], eps=RMS_EPS)


def relu2_mlp(x, up, down, _scales=None):
    """relu(x up)^2 down^T. x (T, D), up and down (D, F) -> (T, D). Only the FP8 form reads _scales."""
    hidden = F.relu(x @ up).square()  # (T, F)
    return hidden @ down.T


def rotate(x, cos, sin):
    """RoPE: rotate each pair of channels j and j + K/2 by an angle proportional to the position. x (T, ...,
    P, K), cos and sin (T, ..., P, K/2). Source: record 32."""
    cos = torch.cat((cos, cos), dim=-1)
    sin = torch.cat((sin, -sin), dim=-1)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, -1), sin)


class Heads(typing.NamedTuple):
    """Shape and options of the heads of an attention layer."""

    num_heads: int  # H
    qk_dim: int  # K, channels of a query or key
    v_dim: int  # L, channels of a value
    num_positions: int  # P, RoPE positions of a token: 2 in paired layers (2026-01-07), else 1
    key_offset: bool
    has_norm: bool  # QK-norm


def make_qkv(x, weight, rope: Rope, heads: Heads, step_inputs: StepInputs, ops: Operations):
    """x (T, D), weight (2HK + HL, D) -> queries and keys (T, H, K) with QK-norm and RoPE, values (T, HL).
    Key offset (2025-12-14): the channels of a key that do not rotate come from the previous token."""
    H = heads.num_heads
    K = heads.qk_dim
    P = heads.num_positions
    qk, v = linear(x, weight).split((2 * H * K, H * heads.v_dim), dim=1)
    qk = qk.unflatten(1, (2, H // P, P, K))
    if heads.has_norm:
        qk = ops.rms_norm(qk)
    cos, sin = (table[:, None, None].type_as(x) for table in (rope.cos, rope.sin))  # (T, 1, 1, P, K/2)
    q, k = rotate(qk, cos, sin).flatten(2, 3).unbind(1)  # (T, H, K)
    q = q * rope.softmax_scale
    if heads.key_offset:  # torch.lerp is five times faster than torch.where
        k = torch.lerp(k, k.roll(1, 0), rope.takes_previous.type_as(k))
    return q, k, v


def is_visible(query, key, doc_ids, window):
    """Whether a query sees a key: equal documents, and the key is 0 to `window` positions earlier."""
    return (key <= query) & (query - key <= window) & (doc_ids[query] == doc_ids[key])


def make_mask(doc_ids, window):
    """doc_ids (T,) -> visible (T, T), queries by keys."""
    positions = torch.arange(doc_ids.size(0), device=doc_ids.device)
    return is_visible(positions[:, None], positions, doc_ids, window)


def attention(q, k, v, mask):
    """Softmax attention. q includes the softmax scale. q, k (T, H, K), v (T, H, L), mask (T, T) -> as v."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (H, T, K)
    scores = (q @ k.mT).masked_fill(~mask, -math.inf)  # (H, T, T)
    return (scores.softmax(-1) @ v).transpose(0, 1)


# Factors of a token, of the one before it, and so on, in n-grams of three and more tokens. The first three
# are record 92's. Pairs have other factors, see hash_ngrams()
HASH_FACTORS = 17351, 60961, 45259, 50131, 23677, 41333


def hash_ngrams(tokens, is_sequence_start, num_rows: int, order: int):
    """Rows of the n-grams of 2 to `order` tokens that end at each token: order - 1 times (T,). Each length
    has its own part of the table, of equal size. N-grams that begin before their sequence get the last row
    of a part. tokens: int32, an array or a tensor."""
    size = num_rows // (order - 1)
    pair_tokens = 1 * tokens  # a copy of an array or a tensor
    # As published, in pairs a sequence's first token has the id size - 1. Longer n-grams see the token
    pair_tokens[is_sequence_start] = size - 1
    rows = [hash_tokens(pair_tokens, is_sequence_start, size - 1, size - 1, (36313, 27191))]
    for length in range(3, order + 1):
        part = length - 2
        hashed = hash_tokens(tokens, is_sequence_start, size - 1, size - 1, HASH_FACTORS[:length])
        rows.append(hashed + size * part)
    return rows


def hash_signs(tokens, is_sequence_start, order: int):
    """Rows of the table of signs, order - 1 times (T,): by the last two tokens for pairs, by the last three
    for all longer n-grams. If these two or three begin before their sequence, it is row 0."""
    pairs = hash_tokens(tokens, is_sequence_start, NUM_SIGN_ROWS, 0, (48271, 30011))
    if order == 2:
        return [pairs]
    triples = hash_tokens(tokens, is_sequence_start, NUM_SIGN_ROWS, 0, (58699, 39779, 26801))
    return [pairs] + [triples] * (order - 2)


def hash_tokens(tokens, is_sequence_start, num_rows: int, cut_row: int, factors: tuple[int, ...]):
    """XOR of each factor times its token, modulo num_rows (T,): factors[0] * the token, factors[1] * the
    previous one, ... Integers wrap around. N-grams that begin before their sequence get cut_row."""
    mixed = factors[0] * tokens
    for distance, factor in enumerate(factors[1:], 1):
        mixed[distance:] ^= factor * tokens[:-distance]
    mixed -= mixed // num_rows * num_rows  # as %=, but fast in NumPy
    for distance in range(len(factors) - 1):
        mixed[distance:][is_sequence_start[: len(mixed) - distance]] = cut_row
    return mixed


def make_ngram_signs(num_rows: int, dim: int):
    """Pseudo-random signs (num_rows, D), +1 or -1. They separate n-grams that share a row. 2026-05-20."""
    bits = torch.arange(num_rows * dim)
    for _ in range(2):
        bits = (bits ^ bits >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return ((bits >> 15 & 1) * 2 - 1).view(-1, dim)


class Softcap(typing.NamedTuple):
    """Bounds logits: cap * sigmoid((logit + shift) / width). cap=0: no bound. Records 9, 19, 2025-12-26."""

    cap: float
    shift: float
    width: float

    def __call__(self, logits):
        logits = logits.to(at_least_fp32(logits))
        if self.shift:
            logits = logits + self.shift
        if self.cap:
            logits = self.cap * torch.sigmoid(logits / self.width)
        return logits


def head_loss(x, weight, targets, target_weights, softcap: Softcap):
    """Weighted cross-entropy of all targets, summed over tokens. A target of -1 is ignored. x (T, D), weight
    (V, D), targets (T, n), target_weights (n,) -> (), float32."""
    loss = torch.zeros((), dtype=at_least_fp32(x), device=x.device)
    for x_chunk, target_chunk in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
        logits = softcap(linear(x_chunk, weight))  # (T, V)
        for target, target_weight in zip(target_chunk.unbind(1), target_weights):
            cross_entropy = F.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
            loss = loss + target_weight * cross_entropy
    return loss


def val_loss(x, weight, targets, softcap: Softcap):
    """The metric: summed cross-entropy of the next token. x (T, D), weight (V, D), targets (T,) -> ()."""
    loss = 0.0
    for x_chunk, target in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
        logits = softcap(linear(x_chunk, weight))  # (T, V)
        loss = loss + F.cross_entropy(logits, target, reduction="sum")
    return loss


class Calls(typing.NamedTuple):
    """What a step calls: the functions as they are written, compiled, or as CUDA graphs. See Trainer."""

    run_segment: Callable  # GPT.run_segment()
    sum_ngrams: Callable  # GPT.sum_ngrams()
    run_head: Callable  # Head.forward()
    rules: dict[str, Callable]  # by name: Rule.update()
    update_shard: Callable  # update_shard() with these rules


def keep_function(function: Callable):
    return function


def do_not_wait(segment: int):
    """The wait_for() of a model without an optimizer: nothing changes its parameters."""


def make_calls(model: GPT, compile: Callable = keep_function):
    """The calls of a model. compile: applied to each function."""
    rules = {name: compile(rule.update) for name, rule in RULES.items()}
    return Calls(compile(model.run_segment), compile(model.sum_ngrams), compile(model.head.forward), rules,
                 functools.partial(update_shard, rules))


class Head(nn.Module):
    """Logits and loss. Source: records 18 and 32."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.softcap = Softcap(*cfg.softcap)
        self.weight = parameter(torch.zeros(  # (V, D)
            cfg.padded_vocab_size, cfg.model_dim, dtype=getattr(torch, cfg.embed_dtype)), "head")
        self.register_buffer("prefix_tokens", torch.full((cfg.padded_vocab_size,), -1), persistent=False)

    def forward(self, x, targets, step_inputs: StepInputs, loss_weights, classes, ops: Operations):
        """x (T, D), targets (T,) -> cross-entropy summed over tokens, float32. See GPT.forward()."""
        if loss_weights is None:
            return val_loss(x, self.weight, targets, self.softcap)

        # A column for each kind of target: the next token, later tokens of its sequence (2025-12-22), and a
        # prefix of the next token (2026-07-13). -1: none. A sequence a b c d has the targets b c d e. They
        # are the first column. The second column is c d e -1
        columns = [targets]
        is_last = step_inputs.is_sequence_start.roll(-1)
        for _ in range(len(loss_weights) - step_inputs.has_prefix_target - 1):
            columns.append(columns[-1].roll(-1).masked_fill(is_last, -1))
        if step_inputs.has_prefix_target:
            # A target of -1, which only FormCheck has, reads the last prefix. This does no harm
            columns.append(self.prefix_tokens[targets])
        targets = torch.stack(columns, dim=1)  # (T, n)
        if classes is None:
            return ops.head_loss(x, self.weight, targets, loss_weights, self.softcap)

        # Sampled softmax over C classes of each sequence, without a correction (record 92). All next tokens
        # are among them. A prefix outside of them has no loss
        losses = []
        num_sequences, num_classes = classes.shape
        weights = F.embedding(classes, self.weight)  # (sequences, C, D)
        logit_indices = torch.arange(num_classes, device=classes.device)
        for i, (x_part, tokens) in enumerate(zip(x.chunk(num_sequences), targets.chunk(num_sequences))):
            logit_of_token = torch.full_like(self.prefix_tokens, -1)  # (V,)
            logit_of_token = logit_of_token.scatter(0, classes[i], logit_indices)
            logit_targets = logit_of_token[tokens.clamp(min=0)].masked_fill(tokens < 0, -1)
            losses.append(ops.head_loss(x_part, weights[i], logit_targets, loss_weights, self.softcap))
        return torch.stack(losses).sum()

    def compute_logits(self, x):
        return self.softcap(linear(x, self.weight))


class Operations(typing.NamedTuple):
    """The operations that have fast forms, and the dtype of activations. See make_operations()."""

    dtype: torch.dtype = torch.float32
    rms_norm: Callable = rms_norm
    relu2_mlp: Callable = relu2_mlp
    make_qkv: Callable = make_qkv
    make_mask: Callable = make_mask
    attention: Callable = attention
    head_loss: Callable = head_loss

# ==== MODEL ================================================================================================
# A pre-norm transformer on T tokens. There is no batch dimension: doc_ids separate the documents. Matrices
# are stored as (outputs, inputs), except the MLP's first one. ops holds the operations of the section above,
# or their fast forms. acts maps the names of LayerSpec to the activations that later layers read. Scalars of
# a layer are rows of layer_scalars(). Their values s[name] are learned (n,), or computed per token (T, n).
# To add a scalar, add a field of LayerSpec, a row there, and its use in Block or Attention.

class Rope(typing.NamedTuple):
    """RoPE tables (T, P, K/2) of a head's pairs of channels, for P positions per token."""

    cos: Tensor
    sin: Tensor
    softmax_scale: Tensor  # ()
    num_rotating: int  # pairs that rotate. The other ones have cos 1 and sin 0
    takes_previous: Tensor  # (T, 1, K) for key_offset: 1 on channels without RoPE, except in the first token
    #   of a sequence. Else 0


class StepInputs(typing.NamedTuple):
    """Inputs of the model that change with the stage."""

    windows: Tensor  # (2,) of long and short layers, in positions
    ropes: dict[tuple[str, bool], Rope]  # by (attention, paired). Paired: two positions per token
    is_sequence_start: Tensor  # (T,) first token of a packed sequence
    has_prefix_target: bool = False


def make_step_inputs(state, num_tokens: int, seq_len: int, cfg: Config, device):
    """Model inputs for num_tokens tokens in the stage of `state`. Positions restart every seq_len tokens."""
    positions = torch.arange(num_tokens, device=device) % seq_len

    ropes = {}
    keys = {(spec.attention, spec.paired) for spec in cfg.layers if spec.attention != "none"}
    for attention_window, is_paired in sorted(keys):
        rope_positions = positions[:, None]  # (T, P)
        if is_paired:  # each token has the positions 2t and 2t + 1
            rope_positions = 2 * rope_positions + torch.arange(2, device=device)
        frequencies, softmax_scale = state.rope[attention_window]
        angles = rope_positions[..., None].double() * torch.tensor(frequencies, device=device)  # (T, P, K/2)
        is_unrotated = torch.tensor(frequencies == 0, device=device).repeat(2)  # (K,)
        takes_previous = is_unrotated & (positions > 0)[:, None, None]  # (T, 1, K)
        ropes[attention_window, is_paired] = Rope(
            angles.cos().to(torch.float32), angles.sin().to(torch.float32),
            torch.tensor(softmax_scale, dtype=torch.float32, device=device), int((frequencies > 0).sum()),
            takes_previous.to(torch.float32))
    windows = torch.tensor(state.windows, dtype=torch.int32, device=device)
    return StepInputs(windows, ropes, positions == 0, has_prefix_target=bool(state.stage.prefix_weight))


class GPT(nn.Module):
    """The language model, initialized on the CPU, so that a seed gives equal weights on every device."""

    def __init__(self, cfg: Config, segments: list[range] | None = None, ngram_table=None):
        """segments: layers of each graph. None: one. ngram_table: zeros for local rows. None: all rows."""
        super().__init__()
        self.cfg = cfg
        self.segments = segments or [range(cfg.num_layers)]
        storage = getattr(torch, cfg.embed_dtype)
        shape = (cfg.padded_vocab_size, cfg.model_dim)
        used_tables = {spec.value_embed for spec in cfg.layers} - {None}
        self.embed = parameter(normal(shape, cfg.embed_std[0]).to(storage), "embed")  # (V, D)
        self.value_embeds = nn.ParameterDict({
            str(i): parameter(normal(shape, cfg.embed_std[1]).to(storage), "value_embed", is_table=True)
            for i in sorted(used_tables)})
        self.blocks = nn.ModuleList(Block(cfg, i) for i in range(cfg.num_layers))
        # Names in acts that each layer reads
        self.acts_read = [{*block.embeddings, *block.spec.inputs()} for block in self.blocks]
        self.gates_scale = None  # learned output scale of the gates of all layers. MUDD's is constant
        if any(block.gates is not None for block in self.blocks):
            self.gates_scale = parameter(torch.tensor([TokenGates.SCALE]), "gate", lr_mul=0.1, wd_mul=0.0)

        self.head = Head(cfg)
        self.is_tied = cfg.tie_head  # until Optimizer.untie()
        if self.is_tied:
            self.head.weight.data.copy_(self.embed.data)
        self.ngram = None
        if cfg.ngram_rows:
            if ngram_table is None:
                ngram_table = torch.zeros(cfg.ngram_rows, cfg.model_dim, dtype=storage)
            self.ngram = parameter(ngram_table, "ngram", is_table=True)
            if not ngram_table.is_meta:  # integers on meta tensors import the compiler
                signs = make_ngram_signs(NUM_SIGN_ROWS, cfg.model_dim)
                self.register_buffer("ngram_signs", signs.to(storage), persistent=False)

        # Trainer and Optimizer replace these. wait_for(i) waits for the new values of segment i's
        # parameters. An untied head is the last segment. tables: by name of the parameter
        self.calls = make_calls(self)
        self.wait_for = do_not_wait
        self.tables: dict[str, Table] = {}

    def forward(self, batch: Batch, step_inputs: StepInputs, ops: Operations, loss_weights=None):
        """T tokens -> loss summed over them, float32. loss_weights (n,) of the targets: next token, token
        after the next, ..., prefix of the next token. None: only the next token, among all classes."""
        x = self.run_layers(batch, step_inputs, ops)
        self.wait_for(len(self.segments))
        return self.calls.run_head(x, batch.targets, step_inputs, loss_weights, batch.classes, ops)

    def run_layers(self, batch: Batch, step_inputs: StepInputs, ops: Operations):
        """T tokens -> final normalized activations (T, D). Look-ups in tables are not compiled, because
        Inductor would add the gradients of a row atomically, in a float32 copy of the table."""
        self.wait_for(0)  # the embedding. The loop below repeats it
        table = self.head.weight if self.is_tied else self.embed
        x = F.embedding(batch.inputs, table).to(ops.dtype)  # (T, D)

        # Begin to read the tables. N-grams come first, because layer 0 needs them
        acts: dict[str, Tensor] = {}
        token_scalars: dict[int, dict[str, Tensor]] = {}
        read_ngrams = None
        if self.ngram is not None:  # hashed n-gram embedding with signs (2026-01-19, 2026-05-20, record 92)
            if batch.ngram_plan is None:
                order, is_start = self.cfg.ngram_order, step_inputs.is_sequence_start
                rows = torch.cat(hash_ngrams(batch.inputs, is_start, self.cfg.ngram_rows, order))
                sign_rows = torch.stack(hash_signs(batch.inputs, is_start, order))
            else:
                rows = None
                sign_rows = batch.sign_rows
            read_ngrams = self.start_reading("ngram", self.ngram, rows, batch.ngram_plan)
        read_values = {}  # by name in acts
        for i, table in self.value_embeds.items():
            read_values[f"ve{i}"] = self.start_reading(
                f"value_embeds.{i}", table, batch.inputs, batch.token_plan)
        if read_ngrams is not None:
            acts["ngram"] = self.calls.sum_ngrams(read_ngrams(), sign_rows, ops.dtype)  # (T, D)

        # Each segment waits for its parameters, and for the value embeddings that no earlier one has read
        for segment, layers in enumerate(self.segments):
            self.wait_for(segment)
            needed = set().union(*self.acts_read[layers.start : layers.stop])
            for name in sorted(read_values):
                if name in needed and name not in acts:
                    finish_reading = read_values[name]
                    acts[name] = finish_reading().to(ops.dtype)  # (T, D)
            x, acts, token_scalars = self.calls.run_segment(
                layers, x, acts, token_scalars, batch.doc_ids, step_inputs, ops)
        return x

    def start_reading(self, name: str, table: nn.Parameter, rows, plan: RowPlan | None):
        """Begin to read rows (T,) of a parameter, or the rows of a plan from their owners. Returns a
        function () -> (T, D)."""
        if plan is None:
            return functools.partial(F.embedding, rows, table)
        return self.tables[name].start_reading(plan)

    def sum_ngrams(self, rows, sign_rows, dtype):
        """Rows (n * T, D) of n kinds of n-grams times their signs, by sign_rows (n, T) -> sum (T, D)."""
        signs = F.embedding(sign_rows, self.ngram_signs).to(dtype)  # (n, T, D)
        return sum(rows.to(dtype).view_as(signs) * signs)  # Python's sum over n: faster than Tensor.sum()

    def run_segment(self, layers: range, x, acts, token_scalars, doc_ids, step_inputs: StepInputs,
                    ops: Operations):
        """Run consecutive layers. Returns x, and what later layers need: acts {name: (T, D)}, and scalars
        per token {layer: {name: (T, n)}}."""
        acts = dict(acts)
        token_scalars = dict(token_scalars)

        # Embedding: smear (2025-09-18), then norm
        if layers.start == 0:
            first = self.blocks[0]
            if first.smear_gate is not None:
                gate_inputs = x[:, : len(first.smear_gate)]
                gate = torch.sigmoid(gate_inputs @ first.smear_gate.type_as(x)[:, None])  # (T, 1)
                previous = x.roll(1, 0).masked_fill(step_inputs.is_sequence_start[:, None], 0)
                x = add_scaled(x, first.scalars["smear"].type_as(x) * gate, previous)
            x = ops.rms_norm(x)
            acts["x0"] = x

        masks = {}  # one for each (attention, paired) in this segment
        for layer in layers:
            block = self.blocks[layer]
            spec = block.spec
            for generator, output_scale in ((block.gates, self.gates_scale), (block.mudd, TokenGates.SCALE)):
                if generator is not None:
                    for user, values in generator(x, output_scale).items():  # this layer, or a later one
                        token_scalars[user] = token_scalars.get(user, {}) | values
            s = {name: value.to(ops.dtype) for name, value in block.scalars.items()}
            s |= token_scalars.pop(layer, {})
            if "ngram_in" in s:  # as published, layer 0's gates do not see its n-grams
                x = add_scaled(x, s["ngram_in"], acts["ngram"])
            if layer == 0:
                acts["x_in"] = x
            mask_key = (spec.attention, spec.paired)
            if spec.attention != "none" and mask_key not in masks:
                window = step_inputs.windows[int(spec.attention == "short")]
                masks[mask_key] = ops.make_mask(doc_ids.repeat_interleave(1 + spec.paired), window)
            x = block(x, acts, s, masks.get(mask_key), step_inputs, ops)
            acts[f"h{layer}"] = x
        if layers.stop == len(self.blocks):
            x = ops.rms_norm(x)
        read_later = set().union(*self.acts_read[layers.stop :])
        acts = {name: act for name, act in acts.items() if name in read_later}
        return x, acts, token_scalars


class Scalar(typing.NamedTuple):
    """A multiplier in a layer, with n values. source: the parameter group of learned ones (n,), or which
    TokenGates compute its values per token (T, n): gates, mudd or mudd_out."""

    name: str
    source: str
    init: tuple[float, ...]  # n values


# Names of scalars, by where they act
#   x0, ngram, ngram_in, x_in    weights of the embeddings that are added to the residual stream
#   smear                        weight of the previous token's embedding, times a gate
#   skip, skip_gate              logit of the U-Net skip's weight, and a factor
#   resid                        scale of the residual stream, in record 32
#   resid_attn, resid_mlp        scales of the residual stream past attention and MLP, in record 92
#   v_scale, qkv_scale           scale of the values, or of the matrix of queries, keys and values
#   ve_scale, ve_gate            weight of the value embedding, or one for each half of the heads
#   xsa, head_gate               for each head: part that exclusive self attention subtracts, output's scale
#   proj_scale, proj_out         learned scales of attention's output matrix
#   down_out                     learned scale of the MLP's output matrix
#   attn_out, mlp_out            scales of the outputs per token, in place of proj_out and down_out
#   mudd_v, mudd_x, mudd_out     weights of dense connections into values, input and output


def layer_scalars(cfg: Config, layer: int):
    """The scalars of a layer. Sources: records 9, 15, 32, and 62 to 92."""
    spec = cfg.layers[layer]
    scalars = []
    has_attention = spec.attention != "none"
    has_mudd = bool(spec.mudd_in)
    is_after = cfg.x0_mix == "after_attention"

    # Sources of scalars that are learned in one layer, and computed per token in another
    head_source = "mix" if spec.gates_from is None else "gates"  # of xsa and head_gate
    stream_source = "mudd" if has_mudd else "residual"  # of resid_attn and resid_mlp
    output_source = "mudd" if has_mudd else "mix"  # of the sublayers' outputs
    embedding_source = "scalar"  # of x0, x_in and n-grams
    if is_after:
        embedding_source = "mudd" if has_mudd else head_source

    def add(name: str, source: str, *init: float):
        scalars.append(Scalar(name, source, init))

    # Scale of the residual stream in record 32. In record 92 it is resid_attn and resid_mlp
    if cfg.x0_mix == "before":
        add("resid", "scalar", 1.0)
    # Embeddings that enter the residual stream, before attention or after it
    if spec.x0 and cfg.x0_mix != "off":
        # In place of x0 a layer with MUDD adds x_in: layer 0's input after its n-grams. In record 92 it is
        # added twice, with this weight and as one of mudd_in
        add("x_in" if has_mudd and is_after else "x0", embedding_source, 0.0)
    if spec.ngram and cfg.ngram_rows:
        add("ngram_in" if is_after and layer == 0 else "ngram", embedding_source, 0.05)

    # U-Net skip: the logit of its weight, and with gates_from a factor per token
    if spec.skip_from is not None:
        add("skip", "scalar", -1.5)
        if spec.gates_from is not None:
            add("skip_gate", "gates", 0.5)

    # Values and value embeddings
    if has_attention:
        # Record 32 scales the values, record 92 the whole matrix of queries, keys and values
        add("qkv_scale" if cfg.residual_init else "v_scale", "scalar", 0.5)
        if spec.value_embed is not None and has_mudd:
            add("ve_gate", "mudd", 2.0, 2.0)
        elif spec.value_embed is not None and not cfg.value_gate_dim:
            add("ve_scale", "scalar", 0.5)

    # Residual stream and outputs of the sublayers in record 92. Attention's projection has two learned
    # scales, in groups with different learning rates
    if cfg.residual_init:
        if has_attention:
            add("proj_scale", "scalar", 1.0)
            add("attn_out" if has_mudd else "proj_out", output_source, 1.0)
        if has_attention or spec.x0 or spec.ngram:  # else resid_mlp scales the same x
            add("resid_attn", stream_source, cfg.residual_init)
        add("resid_mlp", stream_source, cfg.residual_init)
        if spec.mlp:
            add("mlp_out" if has_mudd else "down_out", output_source, 1.0)

    # Scalars of heads
    if has_attention and spec.xsa:
        add("xsa", head_source, *[0.0] * cfg.num_heads)
    if has_attention and spec.head_gate:
        add("head_gate", head_source, *[0.25] * cfg.num_heads)

    if layer == 0 and cfg.smear:
        add("smear", "scalar", 0.0)

    # Dense connections
    num_sources = 1 + len(spec.mudd_in)
    if has_attention and has_mudd:
        add("mudd_v", "mudd", *[0.0] * num_sources)
    if has_mudd:
        add("mudd_x", "mudd", *[0.0] * num_sources)
    if spec.mudd_out:  # as published, the weight of attention's source starts at -0.5
        init = [0.0] * len(spec.mudd_out)
        if f"h{spec.attention_from}" in spec.mudd_out:
            init[spec.mudd_out.index(f"h{spec.attention_from}")] = -0.5
        add("mudd_out", "mudd_out", *init)
    return scalars


class Block(nn.Module):
    def __init__(self, cfg: Config, layer: int):
        super().__init__()
        self.layer = layer
        self.spec = cfg.layers[layer]
        self.x0_mix = cfg.x0_mix
        self.attention = self.attn_gain_in = self.attn_gain_out = None
        self.mlp = self.mlp_gain_in = self.mlp_gain_out = self.second_mlp = None
        if self.spec.attention != "none":
            self.attention = Attention(cfg, self.spec)
            self.attn_gain_in, self.attn_gain_out = make_gains(cfg)
        if self.spec.mlp:
            self.mlp = MLP(cfg)
            self.mlp_gain_in, self.mlp_gain_out = make_gains(cfg)
        if self.spec.second_mlp:
            self.second_mlp = MLP(cfg)

        # Learned scalars (n,), and the names of the embeddings that they add to x
        scalars = layer_scalars(cfg, layer)
        self.scalars = nn.ParameterDict()
        for scalar in scalars:
            if scalar.source in cfg.groups:
                self.scalars[scalar.name] = parameter(torch.tensor(scalar.init), scalar.source)
        names = [scalar.name for scalar in scalars]
        self.embeddings = [name for name in ("ngram", "x0", "x_in") if name in names]

        # Scalars per token. gates (of this and later layers) and mudd run before the layer, mudd_out after
        gates = []
        for user in range(layer, cfg.num_layers):
            if cfg.layers[user].gates_from == layer:
                gates += [(user, scalar) for scalar in layer_scalars(cfg, user) if scalar.source == "gates"]
        mudd = [(layer, scalar) for scalar in scalars if scalar.source == "mudd"]
        mudd_out = [(layer, scalar) for scalar in scalars if scalar.source == "mudd_out"]
        self.gates = TokenGates(cfg, gates, 0.1) if gates else None
        self.mudd = TokenGates(cfg, mudd, 0.25) if mudd else None
        self.mudd_out = TokenGates(cfg, mudd_out, 0.25, cfg.mudd_groups) if mudd_out else None
        self.smear_gate = None
        if layer == 0 and cfg.smear:
            weight = torch.zeros(min(12, cfg.model_dim), dtype=getattr(torch, cfg.embed_dtype))
            self.smear_gate = parameter(weight, "gate", lr_mul=0.01, wd_mul=0.0)

    def forward(self, x, acts, s, mask, step_inputs: StepInputs, ops: Operations):
        """x (T, D) -> (T, D). s: this layer's scalars, (n,) or (T, n)."""
        spec = self.spec
        acts = dict(acts)

        # U-Net skip (record 11)
        if spec.skip_from is not None:
            skip = torch.sigmoid(s["skip"])
            if "skip_gate" in s:
                skip = skip * s["skip_gate"]
            x = add_scaled(x, skip, acts[f"h{spec.skip_from}"])

        # x0 (record 32) and n-gram embedding enter before attention ...
        if self.x0_mix != "after_attention":
            x = add_embeddings(scale(x, s.get("resid")), acts, s, self.embeddings)

        # Dense connections (MUDD, 2026-04-22): earlier activations, and x as it is here, enter values and x
        mudd_v = None
        if spec.mudd_in:
            sources = [*(acts[name] for name in spec.mudd_in), x]
            if self.attention is not None:
                mudd_v = sum(source * weight for source, weight in zip(sources, s["mudd_v"].split(1, dim=1)))
            for source, weight in zip(sources, s["mudd_x"].split(1, dim=1)):
                x = add_scaled(x, weight, source)

        # Attention. Sublayers read x before its residual scale
        source = x if spec.attention_from is None else acts[f"h{spec.attention_from}"]
        x = scale(x, s.get("resid_attn"))
        if self.attention is not None:
            acts["attn_in"] = scale(ops.rms_norm(source), self.attn_gain_in)
            output = self.attention(acts["attn_in"], mudd_v, acts, s, mask, step_inputs, ops)
            x = add_scaled(x, s.get("attn_out"), scale(output, self.attn_gain_out))
        # ... or after attention (record 73, 2026-02-12)
        if self.x0_mix == "after_attention":
            x = add_embeddings(x, acts, s, self.embeddings)

        # MLP
        mlp_source = x
        x = scale(x, s.get("resid_mlp"))
        if self.mlp is not None:
            acts["mlp_in"] = scale(ops.rms_norm(mlp_source), self.mlp_gain_in)
            output = self.mlp(acts["mlp_in"], s.get("down_out"), ops)
            if self.second_mlp is not None:
                output = output + self.second_mlp(acts["mlp_in"], s.get("down_out"), ops)
            x = add_scaled(x, s.get("mlp_out"), scale(output, self.mlp_gain_out))

        # Dense connections into the output, with weights (T, 1) or, for G groups of channels, (T, 1, G)
        if self.mudd_out is not None:
            weights = self.mudd_out(x, TokenGates.SCALE)[self.layer]["mudd_out"]
            for name, weight in zip(spec.mudd_out, weights.split(1, dim=1)):
                if weight.dim() == 3:
                    weight = weight[:, 0].repeat_interleave(x.size(1) // weight.size(2), dim=1)  # (T, D)
                x = add_scaled(x, weight, acts[name])
        return x


class Attention(nn.Module):
    """Multi-head attention with QK-norm, RoPE, value embeddings, and the mechanisms of its LayerSpec."""

    def __init__(self, cfg: Config, spec: LayerSpec):
        super().__init__()
        self.spec = spec
        D, H, K, L = cfg.model_dim, cfg.num_heads, cfg.qk_dim(spec), spec.v_dim or cfg.head_dim
        self.heads = Heads(H, K, L, 1 + spec.paired, spec.key_offset, cfg.qk_norm)
        storage, gate_storage = getattr(torch, cfg.matrix_dtype), getattr(torch, cfg.embed_dtype)
        std = cfg.init_std * D**-0.5
        qk = uniform((2, H * K, D), std).to(storage)
        if cfg.equal_qk_init:  # with key_offset an induction head from step 0
            qk[1] = qk[0]
        group_rows = (cfg.qk_group_heads or H) * K
        self.qk = parameter(qk.view(-1, group_rows, D), "matrix", kind="qk")  # (2H / group, group * K, D)
        # If HL < D, v and proj are trained like square matrices (D, D) that are padded with zeros. So v has
        # variances of rows, as a square matrix, while other wide matrices have variances of columns
        v = uniform((H * L, D), std).to(storage)
        self.v = parameter(v, "matrix", kind="vo", by_row=H * L < D)  # (HL, D)
        # lr_mul undoes the factor sqrt(D / HL) that matrix_step() gives to tall matrices
        proj = uniform((D, H * L), output_std(cfg, "attention") * D**-0.5).to(storage)
        self.proj = parameter(proj, "matrix", lr_mul=(H * L / D) ** 0.5, kind="vo")  # (D, HL)
        self.attention_gate_weight = self.ve_gate_weight = None
        if cfg.attention_gate_dim:  # starts at zero, so a norm-preserving rule could not train it in matrix
            group = "scalar" if RULES[cfg.groups["matrix"].rule].keeps_norm else "matrix"
            self.attention_gate_weight = parameter(
                torch.zeros(H, cfg.attention_gate_dim, dtype=gate_storage), group)
        if cfg.value_gate_dim and spec.value_embed is not None and not spec.mudd_in:
            self.ve_gate_weight = parameter(torch.zeros(H, cfg.value_gate_dim, dtype=gate_storage), "gate")

    def forward(self, x, mudd_v, acts, s, mask, step_inputs: StepInputs, ops: Operations):
        """x (T, D) normalized, mudd_v (T, D) dense connections into the values -> (T, D)."""
        spec = self.spec
        H = self.heads.num_heads
        L = self.heads.v_dim

        # 1. Queries, keys and values in one matmul, QK-norm and RoPE
        w_qkv = scale(torch.cat((self.qk.flatten(0, 1), self.v)).type_as(x), s.get("qkv_scale"))
        rope = step_inputs.ropes[spec.attention, spec.paired]
        q, k, v = ops.make_qkv(x, w_qkv, rope, self.heads, step_inputs, ops)  # (T, H, K), same, (T, H L)

        # 2. Value embeddings (record 14) and dense connections
        v = scale(v, s.get("v_scale")).unflatten(1, (H, L))  # (T, H, L)
        if spec.value_embed is not None:
            ve = acts[f"ve{spec.value_embed}"]  # (T, D)
            if self.ve_gate_weight is not None:  # inputs: half from x, half from ve (2025-12-29, 2026-02-03)
                half = self.ve_gate_weight.size(1) // 2
                gate_inputs = torch.cat((x[:, :half], ve[:, :half]), dim=1)
                gate = 2 * torch.sigmoid(linear(gate_inputs, self.ve_gate_weight))  # (T, H)
            elif "ve_gate" in s:  # (T, 2): one scale for each half of the heads
                gate = s["ve_gate"].repeat_interleave(-(-H // 2), dim=1)[:, :H]  # (T, H)
            else:
                gate = s["ve_scale"]  # (1,)
            v = torch.addcmul(v, gate[..., None], ve.unflatten(1, (H, -1))[..., :L])
        if mudd_v is not None:
            v = v + mudd_v.unflatten(1, (H, -1))[..., :L]

        # 3. Attention. In a paired layer two heads become one head of 2T positions, so they see each other's
        # keys. As published, RoPE and attention number the positions of a token's heads differently. With
        # four heads, token t has
        #   head                     0       1       2        3
        #   head of 2T positions     first   second  first    second
        #   its position there       2t      2t      2t + 1   2t + 1
        #   position in RoPE         2t      2t + 1  2t       2t + 1
        if spec.paired:
            pairs = (x.reshape(-1, H // 2, x.size(-1)) for x in (q, k, v))  # (2T, H/2, K or L)
            y = ops.attention(*pairs, mask).reshape(v.shape)
        else:
            y = ops.attention(q, k, v, mask)  # (T, H, L)

        # 4. Exclusive self attention (2026-04-29): subtract a part of the projection onto the token's value
        if spec.xsa:
            projection = (y * v).sum(-1) / (v * v).sum(-1).clamp(min=1e-8)  # (T, H)
            y = y - (projection * s["xsa"].tanh())[..., None] * v

        # 5. Head gates: from the first channels of x (record 28), and the scalars head_gate
        if self.attention_gate_weight is not None:
            gate_inputs = x[:, : self.attention_gate_weight.size(1)]
            y = y * torch.sigmoid(linear(gate_inputs, self.attention_gate_weight))[..., None]
        if spec.head_gate:
            y = y * s["head_gate"][..., None]

        # 6. Output projection. Record 92 has two learned scales of it: proj_scale in group scalar, proj_out
        # in group mix, which has another learning rate
        w_proj = scale(scale(self.proj.type_as(x), s.get("proj_scale")), s.get("proj_out"))
        return linear(y.flatten(1), w_proj)  # (T, D)


class MLP(nn.Module):
    """Two matrices (D, F), stacked for the optimizer."""

    def __init__(self, cfg: Config):
        super().__init__()
        dim, hidden = cfg.model_dim, cfg.mlp_hidden
        fan_in = dim if cfg.has_output_gain else hidden  # with gains both start with one std, as in MuonH
        up_down = torch.zeros(2, dim, hidden)  # (2, D, F)
        fill_uniform(up_down[0], cfg.init_std * dim**-0.5)
        fill_uniform(up_down[1], output_std(cfg, "mlp") * fan_in**-0.5)
        up_down = up_down.to(getattr(torch, cfg.matrix_dtype))
        self.up_down = parameter(up_down, "matrix", lr_mul=cfg.mlp_lr_mul, kind="up_down")
        self.scales: tuple[Tensor, Tensor] | None = None  # of a fast form, see DelayedScales

    def forward(self, x, down_out, ops: Operations):
        """x (T, D) normalized -> (T, D)."""
        up, down = self.up_down.type_as(x).unbind()
        return ops.relu2_mlp(x, up, scale(down, down_out), self.scales)


class TokenGates(nn.Module):
    """Scalars per token, by a two-layer MLP: output_scale * (proj gelu(fc x) + bias). With groups of
    channels, group_proj gelu(fc x) is added to proj gelu(fc x). Source: MUDD, arXiv 2502.12170,
    2026-04-22."""

    SCALE, HIDDEN = 0.1, 64  # output scale (constant for MUDD, initial for gates), hidden channels

    def __init__(self, cfg: Config, outputs: list[tuple[int, Scalar]], lr_mul: float, num_groups: int = 1):
        """outputs: scalars, each with the layer that uses it. num_groups > 1: each scalar has a value for
        each of num_groups groups of channels (record 92)."""
        super().__init__()
        self.outputs = outputs
        self.num_groups = num_groups
        init = [value / self.SCALE for _, scalar in outputs for value in scalar.init]
        hidden, dim, storage = self.HIDDEN, cfg.model_dim, getattr(torch, cfg.embed_dtype)
        decays = dict(lr_mul=lr_mul, wd_mul=lr_mul)  # as published, the decay has the square of lr_mul
        fc = uniform((hidden, dim), (3 * dim) ** -0.5).to(storage)
        self.fc = parameter(fc, "gate", **decays)  # (hidden, D)
        self.proj = parameter(torch.zeros(len(init), hidden, dtype=storage), "gate", **decays)
        self.bias = parameter(torch.tensor(init).to(storage), "gate", lr_mul=lr_mul, wd_mul=0.0)
        self.group_proj = None
        if num_groups > 1:
            zeros = torch.zeros(len(init) * num_groups, hidden, dtype=storage)
            self.group_proj = parameter(zeros, "gate", **decays)

    def forward(self, x, output_scale: Tensor | float):
        """x (T, D) -> {layer: {name: (T, n), or (T, n, num_groups)}}."""
        hidden = F.gelu(linear(x, self.fc))  # (T, hidden)
        y = scale(linear(hidden, self.proj) + self.bias.type_as(x), output_scale)  # (T, sum of all n)
        if self.group_proj is not None:
            per_group = scale(linear(hidden, self.group_proj), output_scale)
            y = y[..., None] + per_group.unflatten(1, (-1, self.num_groups))
        values: dict[int, dict[str, Tensor]] = {}
        sizes = [len(scalar.init) for _, scalar in self.outputs]
        for (layer, scalar), part in zip(self.outputs, y.split(sizes, dim=1)):
            values.setdefault(layer, {})[scalar.name] = part
        return values


def make_gains(cfg: Config):
    """Gains (D,) of a sublayer's normalized input and of its output, if it has them."""
    gain_in = gain_out = None
    if "norm" in cfg.gains:
        gain_in = parameter(torch.ones(cfg.model_dim), "gain")
    if cfg.has_output_gain:
        gain_out = parameter(torch.zeros(cfg.model_dim), "gain")
    return gain_in, gain_out


def parameter(data, group: str, **options):
    """A parameter with a ParamSpec of these fields."""
    param = nn.Parameter(data)
    param.spec = ParamSpec(group, **options)
    return param


class ParamSpec(typing.NamedTuple):
    group: str
    lr_mul: float | tuple[float, ...] = 1.0  # or one value per stacked matrix
    wd_mul: float = 1.0
    kind: str = ""  # of a matrix. With --averages each kind has its own average
    is_table: bool = False  # a value or n-gram embedding, see TABLES
    by_row: bool = False  # a wide matrix with one second moment per row


def normal(shape: tuple[int, ...], std: float):
    x = torch.empty(shape)
    if not x.is_meta:  # random numbers on meta tensors import the compiler
        x.normal_(0.0, std)
    return x


def uniform(shape: tuple[int, ...], std: float):
    """Uniform numbers with mean 0 and this standard deviation."""
    x = torch.zeros(shape)
    fill_uniform(x, std)
    return x


def fill_uniform(x, std: float):
    """Fill x as uniform() does. std=0 leaves it, and draws no random numbers. Source: record 19."""
    if std and not x.is_meta:
        x.uniform_(-(3**0.5) * std, 3**0.5 * std)


def output_std(cfg: Config, part: str):
    """init_std of the output projection of attention or mlp."""
    return 0.0 if cfg.zero_init in ("on", part) and not cfg.has_output_gain else cfg.init_std

# ==== UPDATE RULES =========================================================================================
# A rule computes the new weights of a shard from the gradient, and updates the state in place. It sees local
# tensors only. To add a rule, write a function and a row of RULES, and --matrix_rule knows it. Its state is
# sharded, and saved in checkpoints. Rules of whole matrices are for group matrix. ngram also has row_adam.

class Hyper(typing.NamedTuple):
    """Hyperparameters that may change in every step: tensors (), else each value would be compiled."""

    lr: Tensor  # Rule.update() multiplies it by lr_mul
    weight_decay: Tensor  # Rule.update() multiplies it by wd_mul and the new lr
    momentum: Tensor
    grad_scale: Tensor  # rescales the gradient from tokens_per_step to GRAD_TOKENS tokens
    bias_correction1: Tensor  # 1 - beta1^t
    bias_correction2: Tensor  # 1 - beta2^t
    beta1: Tensor
    beta2: Tensor
    decay_time: Tensor  # sum of -log(beta2) over all updates so far, for row_adam
    has_slow_momentum: Tensor  # 1 once anvil's slow momentum acts, before that 0


class UpdateOptions(typing.NamedTuple):
    """What stays the same in all updates of a parameter."""

    eps: float
    lr_mul: Tensor | float = 1.0  # broadcasts against the weight
    wd_mul: Tensor | float = 1.0
    dtype: torch.dtype = torch.float32  # of the orthogonalization
    polynomial: str = "newton_schulz"
    cautious: bool = False  # decay only where the update, or anvil's slow momentum, shrinks the weight


@dataclass(frozen=True)
class Rule:
    """An update rule: its function, and the state that it needs."""

    function: Callable  # (float32 weight, grad, state, hyper, options) -> new weight. Applies grad_scale
    moments: tuple[str, ...]  # names of state tensors with the parameter's shape, initially zero
    whole_matrix: bool = False  # whether the rule needs whole matrices. Else elements, or rows of a table
    has_variance: bool = False  # state "second_momentum": one value per row, or per column (see init_state)
    row_state: tuple[str, ...] = ()  # names of state tensors with one value per row, for tables only
    keeps_norm: bool = False  # each matrix keeps its initial norm, which is the state "radius"

    def init_state(self, param, fp32_state: bool = False, by_row: bool = False):
        """State of parameters (M, ...). fp32_state: float32 moments, and low_bits of bfloat16 matrices."""
        dtype = at_least_fp32(param) if fp32_state else param.dtype
        state = {name: torch.zeros_like(param, dtype=dtype) for name in self.moments}
        if fp32_state and self.whole_matrix and param.dtype == torch.bfloat16:
            state["low_bits"] = torch.zeros_like(param, dtype=torch.int16)
        if self.has_variance:
            rows, columns = param.shape[-2:]
            shape = (len(param), rows, 1) if rows >= columns or by_row else (len(param), 1, columns)
            state["second_momentum"] = param.new_zeros(shape, dtype=at_least_fp32(param))
        for name in self.row_state:
            state[name] = param.new_zeros(len(param), 1, dtype=at_least_fp32(param))
        if self.keeps_norm:
            state["radius"] = matrix_norm(param)
        return state

    def update(self, param, grad, state, hyper: Hyper, options: UpdateOptions):
        """Update param (M, ...) and its state in place. The function gets and returns float32 weights."""
        lr = options.lr_mul * hyper.lr
        hyper = hyper._replace(lr=lr, weight_decay=lr * options.wd_mul * hyper.weight_decay)
        if "low_bits" not in state:
            param.copy_(self.function(param.to(at_least_fp32(param)), grad, state, hyper, options))
            return
        # A bfloat16 parameter is the upper half of its float32 value. The lower half is state (2026-01-04).
        exact = join_bits(param, state["low_bits"])
        bits = self.function(exact, grad, state, hyper, options).view(torch.int32)
        param.view(torch.int16).copy_(bits >> 16)
        state["low_bits"].copy_(bits)


def join_bits(param, low_bits):
    """float32 values from their upper halves (bfloat16) and lower halves (int16)."""
    return (param.view(torch.int16).int() << 16 | low_bits.int() & 0xFFFF).view(torch.float32)


def muon(weight, grad, state, hyper: Hyper, options: UpdateOptions):
    """Muon (record 3): orthogonalized Nesterov momentum."""
    update = orthogonal_momentum(grad, state, hyper, options)
    return matrix_step(weight, update, hyper, options)


def normuon(weight, grad, state, hyper: Hyper, options: UpdateOptions):
    """NorMuon (2025-10-24): Muon with a variance for each row or column."""
    update = orthogonal_momentum(grad, state, hyper, options)
    update = normalize_rows(update, state, hyper)
    return matrix_step(weight, update, hyper, options)


def muonh(weight, grad, state, hyper: Hyper, options: UpdateOptions):
    """MuonH: the direction of Muon, a step on the sphere of each matrix's initial norm."""
    update = orthogonal_momentum(grad, state, hyper, options)
    return sphere_step(weight, update, state, hyper)


def normuonh(weight, grad, state, hyper: Hyper, options: UpdateOptions):
    """NorMuonH: the direction of NorMuon, a step on the sphere."""
    update = orthogonal_momentum(grad, state, hyper, options)
    update = normalize_rows(update, state, hyper)
    return sphere_step(weight, update, state, hyper)


def orthogonal_momentum(grad, state, hyper: Hyper, options: UpdateOptions):
    """Nesterov momentum of the gradient, orthogonalized."""
    momentum = state["momentum"]
    beta = hyper.momentum.to(momentum.dtype)
    grad = (grad * hyper.grad_scale).to(momentum.dtype)
    momentum.lerp_(grad, 1 - beta)
    update = grad.lerp(momentum, beta)
    return orthogonalize(update, options.polynomial, options.dtype)


def matrix_step(weight, update, hyper: Hyper, options: UpdateOptions):
    """Decay and update of matrices. lr: spectral norm of a square matrix's update. Tall matrices move
    sqrt(rows / columns) times as far (record 8)."""
    rows, columns = update.shape[-2:]
    decay = hyper.weight_decay
    if options.cautious:
        decay = decay * (update * weight >= 0)
    return weight * (1 - decay) - update * (hyper.lr * max(1, rows / columns) ** 0.5)


def anvil(weight, grad, state, hyper: Hyper, options: UpdateOptions):
    """ANVIL (record 92): NorMuon with a fast and a slow momentum, whose mean is 0.4385 fast + 0.5615 slow. A
    cautious decay follows the slow one. Before slow_momentum_start the mean is the fast one alone, which is
    Nesterov momentum. Meant for orthogonalize=six_maps."""
    is_late = hyper.has_slow_momentum > 0
    fast_beta = torch.where(is_late, FAST_BETA, hyper.momentum)
    fast_weight = torch.where(is_late, FAST_WEIGHT, torch.ones_like(hyper.momentum))
    fast = state["momentum"]
    slow = state["slow_momentum"]
    grad = (grad * hyper.grad_scale).to(fast.dtype)
    fast.lerp_(grad, 1 - fast_beta.to(fast.dtype))
    slow.lerp_(grad, SLOW_MOMENTUM_RATE)
    mean = slow.lerp(fast, fast_weight.to(fast.dtype))
    update = grad.lerp(mean, hyper.momentum.to(fast.dtype))
    update = orthogonalize(update, options.polynomial, options.dtype)
    update = normalize_rows(update, state, hyper)
    decay = hyper.weight_decay
    if options.cautious:
        decay = decay * (slow * weight >= 0)
    rows, columns = weight.shape[-2:]
    size = max(1, rows / columns) ** 0.5  # of tall matrices. It multiplies the decay, too
    return weight * (1 - decay * size) - update * (hyper.lr * size)


def adamw(weight, grad, state, hyper: Hyper, options: UpdateOptions):
    """AdamW, elementwise, in float32. eps is added before the bias correction, as in record 32."""
    grad = grad.to(at_least_fp32(grad)) * hyper.grad_scale
    exp_avg = state["exp_avg"].to(grad.dtype).lerp(grad, 1 - hyper.beta1)
    exp_avg_sq = state["exp_avg_sq"].to(grad.dtype).lerp(grad.square(), 1 - hyper.beta2)
    state["exp_avg"].copy_(exp_avg)
    state["exp_avg_sq"].copy_(exp_avg_sq)
    update = exp_avg / (exp_avg_sq.sqrt() + options.eps)
    lr = hyper.lr * hyper.bias_correction2.sqrt() / hyper.bias_correction1
    decay = hyper.weight_decay
    if options.cautious:
        decay = decay * (update * weight > 0)
    return weight * (1 - decay) - update * lr


def row_adam(weight, grad, state, hyper: Hyper, options: UpdateOptions):
    """Adam for the rows of a table (R, D), without a first moment. Each row has one second moment. A row
    whose gradient is zero or not finite does not change. At its next gradient the second moment decays for
    all updates since its last one: with updates 3 and 7 by beta2^4. This is exp(last_update - decay_time),
    because the state last_update is the decay_time of update 3. Source: record 92."""
    grad = grad.to(at_least_fp32(grad)) * hyper.grad_scale
    mean_square = grad.square().mean(-1, keepdim=True)
    has_grad = (mean_square > 0) & mean_square.isfinite()
    exp_avg_sq = state["exp_avg_sq"] * torch.exp(state["last_update"] - hyper.decay_time)
    exp_avg_sq = exp_avg_sq + mean_square * (1 - hyper.beta2)
    update = grad / (exp_avg_sq.sqrt() + options.eps)
    lr = hyper.lr * hyper.bias_correction2.sqrt()
    decay = hyper.weight_decay
    if options.cautious:
        decay = decay * (update * weight > 0)
    state["exp_avg_sq"].copy_(torch.where(has_grad, exp_avg_sq, state["exp_avg_sq"]))
    state["last_update"].copy_(torch.where(has_grad, hyper.decay_time, state["last_update"]))
    return torch.where(has_grad, weight * (1 - decay) - update * lr, weight)


RULES = {
    "muon": Rule(muon, moments=("momentum",), whole_matrix=True),
    "normuon": Rule(normuon, moments=("momentum",), whole_matrix=True, has_variance=True),
    "muonh": Rule(muonh, moments=("momentum",), whole_matrix=True, keeps_norm=True),
    "normuonh": Rule(normuonh, moments=("momentum",), whole_matrix=True, has_variance=True, keeps_norm=True),
    "anvil": Rule(anvil, moments=("momentum", "slow_momentum"), whole_matrix=True, has_variance=True),
    "adamw": Rule(adamw, moments=("exp_avg", "exp_avg_sq")),
    "row_adam": Rule(row_adam, moments=(), row_state=("exp_avg_sq", "last_update")),
}


class Polynomial(typing.NamedTuple):
    """An odd polynomial, iterated on matrices that are divided by margin * norm + addend."""

    coefficients: tuple[tuple[float, float, float], ...]  # a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X
    margin: float = 1.0
    addend: float = 1e-7


POLYNOMIALS = {
    "newton_schulz": Polynomial(((3.4445, -4.7750, 2.0315),) * 5),  # Muon: 0.01 and more become 0.68 to 1.13
    "polar_express": Polynomial((  # 2025-09-29
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)), margin=1.02, addend=1e-6),
    # Record 92. A singular value of 0.9525 diverges. With the margin of 1.05 the singular value of a matrix
    # of rank one is 1 / 1.05 = 0.9524
    "six_maps": Polynomial((
        (3.923798038567, -6.095026865488, 3.905234618423), (3.278126713798, -3.328923386476, 0.989127286973),
        (3.505298394150, -5.137358782410, 1.968325560615), (2.815058591845, -3.685181239622, 1.417196497642),
        (2.245503932403, -2.443826979899, 0.963091710461),
        (2.256537145403, -2.166840097229, 0.929501253245)), margin=1.05, addend=1e-6),
}
BF16_MARGIN = 1 + 2.0**-6  # of six_maps. bfloat16 rounds a norm by up to 2^-8, and each product likewise
FAST_BETA, FAST_WEIGHT, SLOW_MOMENTUM_RATE = 0.85, 0.4385, 0.02  # of anvil. The rate acts in all steps


def orthogonalize(x, polynomial: str, dtype):
    """Move the singular values of each matrix of x (M, rows, columns) towards 1, in dtype. Tall matrices are
    transposed first. Sources: Muon, record 11, Polar Express."""
    coefficients, margin, addend = POLYNOMIALS[polynomial]
    if polynomial == "six_maps" and dtype == torch.bfloat16:
        margin *= BF16_MARGIN
    is_tall = x.size(-2) > x.size(-1)
    x = x.to(dtype)
    if is_tall:
        x = x.mT  # (M, short, long)
    x = x / (matrix_norm(x) * margin + addend).to(x.dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT  # (M, short, short)
        gram = torch.baddbmm(gram, gram, gram.mT, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.baddbmm(x, gram, x, beta=a)  # (M, short, long)
    if is_tall:
        x = x.mT
    return x


def normalize_rows(update, state, hyper: Hyper):
    """Divide rows, or columns (see init_state), by their running RMS, then restore the matrix norm."""
    exact = update.to(at_least_fp32(update))  # (M, rows, columns)
    second_momentum = state["second_momentum"]
    axis = -1 if second_momentum.size(-1) == 1 else -2
    second_momentum.lerp_(exact.square().mean(dim=axis, keepdim=True), 1 - hyper.beta2)
    normalized = exact * second_momentum.clamp(min=1e-10).rsqrt()
    return (normalized * (matrix_norm(exact) / matrix_norm(normalized).clamp(min=1e-10))).type_as(update)


def sphere_step(weight, update, state, hyper: Hyper):
    """W <- R N(W - lr R N(update)). N(X) = X / |X|, and R is the initial norm of each matrix. An update
    orthogonal to W rotates W by arctan(lr). Source: Hyperball, arXiv 2606.16899."""
    radius = state["radius"]
    update = update.to(at_least_fp32(update))
    weight = weight - update * (hyper.lr * radius / matrix_norm(update).clamp(min=1e-10))
    return weight * (radius / matrix_norm(weight).clamp(min=1e-10))


def matrix_norm(x):
    """Frobenius norm of each matrix of x (M, rows, columns), float32 (M, 1, 1)."""
    return torch.linalg.matrix_norm(x, keepdim=True, dtype=at_least_fp32(x))

# ==== OPTIMIZER ============================================================================================
# A bucket is one tensor. Its views are parameters of one segment and group. Each rank updates a shard of
# every bucket. A hook counts the gradients of a bucket, and the last one starts its reduce-scatter, while
# backward goes on. After its update a bucket is gathered, and the next forward waits for it before its
# segment. The buckets of TABLES send rows instead. Sources: records 23, 24, 32.

LARGE_PARAMETER = 2**20  # elements. Elementwise parameters of this size, and tables, have their own buckets
ALIGNMENT = 32  # elements: parameters in elementwise buckets are aligned to at least 64 bytes


def plan_buckets(model: GPT, cfg: Config):
    """Divide the parameters into buckets of (name, parameter), last layers first, like backward. Those of a
    bucket have one segment, group and dtype. Matrices have one shape and by_row, and with averages one
    kind."""
    buckets: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, param in reversed(list(model.named_parameters())):
        spec = param.spec
        divided_by = None  # small elementwise parameters share a bucket
        if RULES[cfg.groups[spec.group].rule].whole_matrix:
            divided_by = (cfg.averages and spec.kind, spec.by_row, param.shape[-2:])
        elif param.numel() >= LARGE_PARAMETER or spec.is_table:
            divided_by = name
        bucket_key = (find_segment(name, model), spec.group, param.dtype, divided_by)
        buckets.setdefault(bucket_key, []).append((name, param))
    return list(buckets.values())


def find_segment(name: str, model: GPT):
    """Number of the segment that waits for a parameter. An untied head is the last one. The first one also
    has the tables, and the learned scalars of all layers, so that these share a bucket for each group."""
    if name == "head.weight":
        return 0 if model.is_tied else len(model.segments)
    words = name.split(".")
    layer = 0
    if words[0] == "blocks" and words[2] != "scalars":
        layer = int(words[1])
    return next(number for number, layers in enumerate(model.segments) if layer in layers)


class Bucket:
    """Parameters in one tensor, values (M, *unit). A unit is a matrix, or an element. This rank updates a
    shard (M/N, *unit) with its state. Padding has zero gradient."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], cfg: Config, model: GPT, rt: Runtime):
        self.name, first = named[0]
        self.params = dict(named)
        self.comm = rt.comm
        self.group_name = first.spec.group
        self.kind = first.spec.kind or self.group_name
        self.group = cfg.groups[self.group_name]
        self.rule = RULES[self.group.rule]
        self.segment = find_segment(self.name, model)
        self.store(cfg, rt)
        self.state = self.rule.init_state(self.shard, cfg.state_dtype == "float32", first.spec.by_row)
        self.options = UpdateOptions(
            cfg.adam_eps, self.make_multipliers("lr_mul"), self.make_multipliers("wd_mul"), rt.dtype,
            cfg.orthogonalize, cautious=cfg.decay == "cautious")
        self.hyper: Hyper | None = None  # until Optimizer sets it
        self.num_pending = 0  # gradients that are missing in this step
        self.reducing = self.gathering = None

    def store(self, cfg: Config, rt: Runtime):
        """Parameters become views of values, with hooks. All ranks begin with the values of rank 0."""
        first = self.params[self.name]
        self.unit = ()  # an element
        align = ALIGNMENT
        if self.rule.whole_matrix:
            self.unit = first.shape[-2:]
            align = 1
        self.slices: dict[str, slice] = {}
        size = 0
        for name, param in self.params.items():
            self.slices[name] = slice(size, size + param.numel() // math.prod(self.unit))
            size = round_up(self.slices[name].stop, align)
        size = round_up(size, align * self.comm.world_size)  # shards of all ranks have equal size
        self.values = torch.zeros(size, *self.unit, dtype=first.dtype, device=first.device)
        self.total = torch.zeros_like(self.values)  # backward adds gradients in place
        for name, param in self.params.items():
            values = self.values[self.slices[name]].view(param.shape)
            values.copy_(param.data)
            param.data = values
            param.grad = self.total[self.slices[name]].view(param.shape)
            if self.comm.world_size > 1:
                param.register_post_accumulate_grad_hook(self.count_down)
        self.comm.broadcast(self.values)
        self.shard = self.comm.local_shard(self.values)
        self.grad = self.comm.local_shard(self.total)

    def make_multipliers(self, field: str):
        """This rank's multipliers: (M/N, 1, 1) of matrices. Of elements (M/N,), or (1,) if all are equal."""
        values = {name: getattr(param.spec, field) for name, param in self.params.items()}
        like = dict(dtype=at_least_fp32(self.values), device=self.values.device)
        distinct = {number for value in values.values() for number in np.atleast_1d(value).tolist()}
        if len(self.unit) < 2 and len(distinct) == 1:
            return torch.tensor([*distinct], **like)
        multipliers = torch.ones(len(self.values), **like)
        for name, value in values.items():  # value: one number, or one for each stacked matrix
            value = torch.tensor(value, **like).view(-1, 1)
            multipliers[self.slices[name]].view(len(value), -1).copy_(value)
        return self.comm.local_shard(multipliers.view(-1, *[1] * len(self.unit)))

    def read_shard(self):
        """Copy of this rank's values, in float32."""
        if "low_bits" in self.state:
            return join_bits(self.shard, self.state["low_bits"])
        return self.shard.to(at_least_fp32(self.shard), copy=True)

    def count_down(self, _param):
        """The last gradient starts the reduce-scatter. If the bucket is not due, num_pending begins at 0 and
        becomes negative, so nothing starts."""
        self.num_pending -= 1
        if self.num_pending == 0:
            self.start_reduce()

    def start_reduce(self):
        if self.comm.world_size > 1:
            self.reducing = self.comm.reduce_scatter(self.total)

    def wait_for_gradient(self):
        if self.reducing is not None:
            self.reducing.wait()

    def update(self, calls: Calls):
        """Update this rank's shard, and clear the gradients."""
        calls.update_shard(self)
        self.clear()

    def compute_update(self, calls: Calls):
        """What an update would change, if its moments were zero, for check_compiler(): the change of this
        rank's values (float32), and the new state, by name. It works on copies."""
        new = self.shard.clone()
        state = {key: tensor.clone() for key, tensor in self.state.items()}
        for name in self.rule.moments:
            state[name].zero_()
        calls.rules[self.group.rule](new, self.grad, state, self.hyper, self.options)
        if "low_bits" in state:
            new = join_bits(new, state.pop("low_bits"))
        return {"values": new - self.read_shard(), **state}

    def start_gather(self):
        """Start to send the new values to all ranks."""
        if self.comm.world_size > 1:
            self.gathering = self.comm.all_gather(self.values, self.shard)

    def finish(self):
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def clear(self):
        self.reducing = None
        self.total.zero_()

    def sum_bits(self):
        """Checksum () of the values, int64. Each rank's shard has its own weight."""
        shards = self.values.flatten().view(torch.int16).view(self.comm.world_size, -1)
        weights = torch.arange(1, self.comm.world_size + 1, device=shards.device)
        return (shards.sum(1, dtype=torch.int64) * weights).sum()

    def local_parts(self):
        """Yield (name, this rank's first unit of the parameter, slice of the shard) for each parameter."""
        start = self.comm.rank * len(self.shard)
        for name, part in self.slices.items():
            low, high = max(part.start, start), min(part.stop, start + len(self.shard))
            if low < high:
                yield name, low - part.start, slice(low - start, high - start)

    def count_units(self, name: str):
        return self.slices[name].stop - self.slices[name].start

    def tensors(self):
        """This rank's values, as "", and state by its key: (M/N, ...) each."""
        return {"": self.shard, **self.state}


def update_shard(rules: dict[str, Callable], bucket: Bucket):
    """Update this rank's shard of a bucket by its rule. CUDA graphs need a result."""
    rules[bucket.group.rule](bucket.shard, bucket.grad, bucket.state, bucket.hyper, bucket.options)
    return bucket.shard


class Average(typing.NamedTuple):
    """A running average of parameters over the last part of the run. In the end they move towards it."""

    kinds: tuple[str, ...]  # of the parameters
    start: float  # fraction of the run before the first averaged step
    every: int  # steps from one averaged step to the next
    rate: float  # weight of a new value in a run of AVERAGES_STEPS, see update_averages()
    weight: float  # 1: the average replaces the parameter
    num_last: int = 1  # final steps that are always averaged


# Record 92. vo and up_down have two averages: the first replaces them, then they move to the second. Embed
# and head change in every second step. The record averages them in these steps, with the weight
# 1 - (1 - rate)^2. Here they are averaged in every step with the weight `rate`: two averagings of one value
# have this weight. Only the change of the last step is averaged once.
AVERAGES_STEPS = 1194
AVERAGES = (
    Average(("embed", "head"), 896 / 1194, 1, 2 / 299, 0.65),
    Average(("vo", "up_down"), 945 / 1194, 4, 4 / 53, 1.0),
    Average(("value_embed",), 947 / 1194, 4, 4 / 53, 1.0, num_last=0),
    Average(("qk",), 897 / 1194, 4, 2 / 75, 0.55, num_last=2),
    Average(("vo", "up_down"), 897 / 1194, 4, 2 / 75, 0.3493, num_last=2),
)
RESTORED_NORMS = "embed", "head", "qk", "vo", "up_down"  # kinds whose joint norm apply_averages() keeps


def list_averages(buckets: list[Bucket]):
    """Yield (key of its state, average, bucket) for each average and each of its buckets."""
    for i, average in enumerate(AVERAGES):
        for bucket in buckets:
            if bucket.kind in average.kinds:
                yield f"average{i}", average, bucket


class Optimizer:
    """All buckets of a model. Owns the storage of every parameter."""

    def __init__(self, model: GPT, cfg: Config, rt: Runtime):
        self.model, self.cfg, self.comm = model, cfg, rt.comm
        self.step_count = 0  # finished steps. In step k, counted from 0, updates run with step_count k + 1
        self.buckets: list[Bucket] = []
        for named in plan_buckets(model, cfg):
            make_bucket = Table if named[0][1].spec.is_table else Bucket
            self.buckets.append(make_bucket(named, cfg, model, rt))
        self.tables = [bucket for bucket in self.buckets if isinstance(bucket, Table)]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.params}
        # Hyperparameters of all buckets: one copy to the device in each step
        first = self.buckets[0].values
        self.hypers = torch.zeros(len(self.buckets), len(Hyper._fields), dtype=at_least_fp32(first),
                                  device=first.device)
        for bucket, row in zip(self.buckets, self.hypers):
            bucket.hyper = Hyper(*row.unbind())

        # The embedding is untied after the head's first update in step untie_step or later
        self.untie_step = cfg.step_at(cfg.untie_frac)
        self.late_step = cfg.step_at(cfg.late_start)
        self.set_tied(model.is_tied)
        if cfg.averages:
            for key, _, bucket in list_averages(self.buckets):
                bucket.state[key] = torch.zeros_like(bucket.shard, dtype=at_least_fp32(bucket.shard))
        model.wait_for = self.wait_for
        model.tables = {table.name: table for table in self.tables}

    def set_tied(self, is_tied: bool):
        """Tie or untie. If tied, the model reads head.weight in place of embed, and embed is not updated."""
        embed, head = self.bucket_of["embed"], self.bucket_of["head.weight"]
        self.model.is_tied = is_tied
        head.segment = find_segment("head.weight", self.model)
        self.updated = sorted((bucket for bucket in self.buckets if not (is_tied and bucket is embed)),
                              key=lambda bucket: bucket.segment)  # forward reads the segments in this order

    def untie(self):
        """Copy the head and its optimizer state to the embedding, and untie them (2025-12-22)."""
        head, embed = self.bucket_of["head.weight"], self.bucket_of["embed"]
        head.finish()
        embed.values.copy_(head.values)
        for key, tensor in embed.state.items():
            tensor.copy_(head.state[key])
        self.set_tied(False)

    def list_due(self):
        """The buckets that are updated in this step. The other ones keep their gradients."""
        return [bucket for bucket in self.updated if bucket.group.is_due(self.step_count, self.late_step)]

    def start_step(self, num_micro_batches: int):
        """Let the hooks of due buckets count down from the number of their gradients in this step."""
        for bucket in self.buckets:
            bucket.num_pending = 0  # above 0 before, if a parameter got no gradient in an earlier step
        for bucket in self.list_due():
            bucket.num_pending = num_micro_batches * len(bucket.params)

    def wait_for(self, segment: int):
        for bucket in self.buckets:
            if bucket.segment == segment:
                bucket.finish()

    @torch.no_grad()
    def check_ranks(self):
        """Wait for all new values. RunError on all ranks if one of them has other bits in parameters that
        all have, or in rows that all read."""
        self.finish()
        if self.comm.world_size == 1:
            return
        checksum = torch.zeros((), dtype=torch.int64, device=self.hypers.device)
        for bucket in self.buckets:
            checksum = 31 * checksum + bucket.sum_bits()
        checksums = self.comm.gather_objects(checksum.item())
        for rank, found in enumerate(checksums):
            if found != checksums[0]:
                raise RunError(f"rank {rank} has other parameters than rank 0 after step {self.step_count}: "
                               "a GPU or the network is at fault. --resume=PATH continues an earlier step")

    @torch.no_grad()
    def step(self, state, norms: UpdateNorms | None = None):
        """Update every due bucket. The next forward waits for the new values. norms measures updates."""
        due = self.list_due()
        self.step_count += 1
        # 1. Start the reduce-scatters that no hook has started
        for bucket in due:
            if bucket.reducing is None:
                bucket.start_reduce()
        self.set_hypers(state)
        # 2. Last segment first, like its gradients: update this rank's shard, and send the new values
        for bucket in reversed(due):
            bucket.wait_for_gradient()
            if norms is None:
                bucket.update(self.model.calls)
            else:
                norms.update(bucket, self.model.calls)
            bucket.start_gather()
        if self.cfg.averages:
            self.update_averages()
        if self.model.is_tied and self.step_count > self.untie_step and self.bucket_of["head.weight"] in due:
            self.untie()

    def set_hypers(self, state):
        """Set the hyperparameters of all buckets."""
        rows = [self.compute_hyper(bucket, state) for bucket in self.buckets]
        self.hypers.copy_(torch.tensor(rows, dtype=self.hypers.dtype), non_blocking=True)

    def compute_hyper(self, bucket, state):
        """The Hyper of a bucket as numbers. step_count has counted this step."""
        group, name = bucket.group, bucket.group_name
        num_updates = group.count_updates(self.step_count, self.late_step)
        num_early = group.count_updates(min(self.step_count, self.late_step), self.late_step)
        ratio = group.period(self.step_count - 1, self.late_step) / group.every  # 1, later e.g. 2
        # A late update covers `ratio` early periods, so it has the betas to this power. Example: 100 updates
        # with period 2, then 10 with period 4 are num_updates 110 and num_periods 120. Bias corrections use
        # num_updates, because they are about 1 by then. decay_time uses num_periods, and is exact
        beta1, beta2 = (beta**ratio for beta in group.betas)
        num_periods = num_early + (num_updates - num_early) * ratio
        return Hyper(
            lr=state.lr[name], weight_decay=state.weight_decay[name] * ratio, momentum=state.momentum,
            grad_scale=GRAD_TOKENS / self.cfg.tokens_per_step,  # as published, not the stage's tokens
            bias_correction1=1 - beta1**num_updates, bias_correction2=1 - beta2**num_updates,
            beta1=beta1, beta2=beta2, decay_time=-math.log(max(group.betas[1], 1e-30)) * num_periods,
            has_slow_momentum=state.has_slow_momentum)

    def finish(self):
        """Wait for all new values. A tied embedding equals the head, for checkpoints and samples."""
        for bucket in self.buckets:
            bucket.finish()
        if self.model.is_tied:
            self.bucket_of["embed"].values.copy_(self.bucket_of["head.weight"].values)

    def update_averages(self):
        """Add the parameters after this step to their averages. Not of a tied embedding."""
        step, num_steps = self.step_count, self.cfg.num_iterations  # step and first are counted from 1
        for key, average, bucket in list_averages(self.updated):
            first = min(num_steps, math.ceil(average.start * num_steps - 1e-6) + 1)
            is_final = step > num_steps - average.num_last
            is_averaged = is_final or (step - first) % average.every == 0
            if step < first or not is_averaged:
                continue
            mean = bucket.state[key]
            weight = torch.full_like(mean[:1], min(1.0, average.rate * AVERAGES_STEPS / num_steps))
            has_values = mean.any()  # else this is the first one, which is copied
            mean.lerp_(bucket.read_shard(), torch.where(has_values, weight, 1.0))

    @torch.no_grad()
    def apply_averages(self):
        """After the last step: move parameters towards their averages, and restore the joint norms."""
        self.finish()  # an all-gather of the last step reads the shards
        if not self.cfg.averages:
            return
        new = {bucket: bucket.read_shard() for _, _, bucket in list_averages(self.updated)}
        old_norms = self.measure_joint_norms(new)
        for key, average, bucket in list_averages(self.updated):
            new[bucket] += (bucket.state[key] - new[bucket]) * average.weight
        new_norms = self.measure_joint_norms(new)
        for bucket, values in new.items():
            if bucket.kind in RESTORED_NORMS:
                values *= old_norms[bucket.kind] / new_norms[bucket.kind].clamp(min=1e-30)
            bucket.shard.copy_(values)
            if "low_bits" in bucket.state:
                bucket.state["low_bits"].zero_()
            bucket.start_gather()
        self.finish()

    def measure_joint_norms(self, new: dict[Bucket, Tensor]):
        """Norm () of the values of all buckets of a kind, over all ranks, for each of RESTORED_NORMS."""
        zero = torch.zeros((), dtype=torch.float64, device=self.buckets[0].shard.device)
        squares = {kind: zero.clone() for kind in RESTORED_NORMS}
        for bucket, values in new.items():
            if bucket.kind in squares:
                squares[bucket.kind] += values.square().sum(dtype=torch.float64)
        norms = self.comm.all_reduce(torch.stack([*squares.values()])).sqrt()
        return dict(zip(RESTORED_NORMS, norms))

    def has_no_pending_gradients(self):
        """Whether the last step applied all gradients. Checkpoints do not include gradients."""
        return all(bucket.group.is_due(self.step_count - 1, self.late_step) for bucket in self.updated)

# ==== TABLES ===============================================================================================
# The rows of value and n-gram embeddings are divided among the ranks. add_plans() finds the distinct rows
# that each rank reads in a micro-batch, and their order. Forward fetches them from their owners. What
# the tokens read is a leaf of autograd. Its hook sums the gradients of equal rows, and sends them back. So
# no row numbers are sent, and neither counts nor sums depend on the order of arrival.

class RowPlan(typing.NamedTuple):
    """The rows of a table that all ranks read in a micro-batch, as this rank sees them. Example: a table of
    8 rows, so rank 0 owns rows 0 to 3, and rank 1 rows 4 to 7. Rank 0 reads 5 1 5 2 1, and rank 1 reads
    2 6 2 2 6. The plan of rank 0:

        distinct rows 1 2 5, inverse 2 0 2 1 0, order 1 4 3 0 2
        requested 1 2 (by rank 0) and 2 (by rank 1), num_sent 2 1
        num_received 2 (rows 1 and 2 from rank 0) and 1 (row 5 from rank 1)
    """

    inverse: Tensor  # (T,) index of each row that this rank reads among the distinct ones
    order: Tensor  # (T,) indices of its reads, sorted by row
    requested: Tensor  # (n,) rows of this rank's part that ranks read, distinct for each reader, by reader
    num_sent: tuple[int, ...]  # requested rows, by reader
    num_received: tuple[int, ...]  # distinct rows that this rank reads, by owner


def plan_rows(reads: list[np.ndarray], rank: int, num_rows: int):
    """reads: the rows (T,) that each rank reads, of a table (num_rows, D)."""
    size = -(-num_rows // len(reads))  # rows of a rank
    distinct, inverse, order = find_distinct(reads[rank])
    by_owner = np.split(distinct, np.searchsorted(distinct, size * np.arange(1, len(reads))))
    by_reader = []  # rows of this rank
    for reader, rows in enumerate(reads):
        if reader == rank:
            by_reader.append(by_owner[rank])
        else:
            own_rows = rows.compress(rows // size == rank)  # faster than rows[...]
            by_reader.append(find_distinct(own_rows)[0])
    requested = np.concatenate(by_reader) - rank * size
    return RowPlan(torch.from_numpy(inverse), torch.from_numpy(order), torch.from_numpy(requested),
                   num_sent=tuple(len(rows) for rows in by_reader),
                   num_received=tuple(len(rows) for rows in by_owner))


def find_distinct(rows):
    """Returns (distinct rows in ascending order, index of each row among them, order that sorts `rows`)."""
    keys = np.sort((rows.astype(np.int64) << 32) + np.arange(len(rows)))  # faster than argsort()
    ordered = keys >> 32
    order = keys & 0xFFFFFFFF
    is_new = np.diff(ordered, prepend=-1) > 0
    inverse = np.empty_like(keys)
    inverse[order] = is_new.cumsum() - 1
    return ordered.compress(is_new), inverse, order


def add_plans(batch: Batch, tokens: list[np.ndarray], rank: int, cfg: Config):
    """Add the plans of the tables. tokens: the sequences (sequences, seq_len + 1) of each rank."""
    inputs = [x[:, :-1].astype(np.int32).ravel() for x in tokens]
    if any(spec.value_embed is not None for spec in cfg.layers):
        batch = batch._replace(token_plan=plan_rows(inputs, rank, cfg.padded_vocab_size))
    if not cfg.ngram_rows:
        return batch
    order = cfg.ngram_order
    is_start = np.arange(len(inputs[0])) % (tokens[0].shape[1] - 1) == 0
    rows = [np.concatenate(hash_ngrams(x, is_start, cfg.ngram_rows, order)) for x in inputs]
    sign_rows = torch.from_numpy(np.stack(hash_signs(inputs[rank], is_start, order)))
    return batch._replace(ngram_plan=plan_rows(rows, rank, cfg.ngram_rows), sign_rows=sign_rows)


def make_ngram_table(cfg: Config, rt: Runtime):
    """Zeros for this rank's rows of the n-gram embedding, if only rows with a gradient are updated."""
    if not cfg.ngram_rows or not RULES[cfg.groups["ngram"].rule].row_state:
        return None
    num_rows = -(-cfg.ngram_rows // rt.world_size) + 1  # and one of padding
    return torch.zeros(num_rows, cfg.model_dim, dtype=getattr(torch, cfg.embed_dtype), device=rt.device)


class Table(Bucket):
    """A table whose rows (R, D) are divided among the ranks. Source: record 92. There are two kinds:

        dense     an update visits all rows, and `total` has their gradient
        sparse    the rule has state per row. An update visits rows with a gradient, and `pieces` has it. The
                  last row of the shard is padding
    """

    ROWS_AT_ONCE = 2**17  # largest number of rows in one call of the update rule
    CHECKED_ROWS = 128  # rows that all ranks compare

    def store(self, cfg: Config, rt: Runtime):
        """The parameter becomes this rank's rows."""
        ((name, param),) = self.params.items()
        comm = self.comm
        self.is_sparse = bool(self.rule.row_state)
        self.num_rows = cfg.ngram_rows if name == "ngram" else len(param)
        size = -(-self.num_rows // comm.world_size)
        if name != "ngram" or not self.is_sparse:  # else GPT has only this rank's rows
            param.data = param.data[comm.rank * size :][:size].clone()
        self.values = self.shard = param.data
        self.unit, self.first_row = param.shape[1:], comm.rank * size
        self.has_kernel = rt.use_compile and rt.device.type == "cuda" and cfg.fast != ("off",)
        self.discards_updates = False  # updates change nothing, for the warm-up
        self.pieces: list[tuple[Tensor, Tensor]] = []  # rows (n,) and gradients (n, D)
        self.arriving: list[tuple[RowPlan, Tensor, dist.Work | None]] = []
        self.total = self.grad = None if self.is_sparse else torch.zeros_like(self.shard)

    def sum_rows(self, grad, inverse, order, num_rows: int):
        sum_equal = launch_row_sums if self.has_kernel else sum_rows
        return sum_equal(grad, inverse, order, num_rows)

    def start_reading(self, plan):
        """Fetch the rows of a micro-batch. Returns a function that waits for them, and reads them."""
        own_rows = F.embedding(plan.requested, self.shard)
        rows, work = self.comm.all_to_all(own_rows, plan.num_sent, plan.num_received)

        def read():
            if work is not None:
                work.wait()
            leaf = F.embedding(plan.inverse, rows)  # (T, D)
            if torch.is_grad_enabled():
                leaf.requires_grad_().register_post_accumulate_grad_hook(functools.partial(self.add, plan))
            return leaf
        return read

    def add(self, plan, leaf):
        """Sum the gradients of equal rows, and send them to the owners of the rows."""
        self.collect()  # of earlier micro-batches: the pieces of a dense table are then free
        grad = self.sum_rows(leaf.grad, plan.inverse, plan.order, sum(plan.num_received))
        leaf.grad = None
        self.arriving.append((plan, *self.comm.all_to_all(grad, plan.num_received, plan.num_sent)))

    def start_reduce(self):
        """The hooks of the leaves have sent the gradients."""

    def collect(self):
        """Add the gradients that arrive, by micro-batch and sender."""
        for plan, grad, work in self.arriving:
            if work is not None:
                work.wait()
            self.pieces += zip(plan.requested.split(plan.num_sent), grad.split(plan.num_sent))
        self.arriving = []
        if not self.is_sparse:
            for rows, grad in self.pieces:
                self.total[rows] += grad  # index_add_() is six times slower
            self.pieces = []

    def wait_for_gradient(self):
        """Sum the gradients of equal rows. No size depends on the data: the sum stands where the first of
        the equal rows is, in sorted order, and the others become the row of padding. Example:

            rows of two pieces 3 7, 2 7     sorted 2 3 7 7, result 2 3 7 padding
        """
        self.collect()
        if not self.is_sparse:
            return
        self.rows, self.grad = self.pieces[0]  # distinct rows
        if len(self.pieces) > 1:
            rows, grads = map(torch.cat, zip(*self.pieces))
            ordered, order = rows.sort(stable=True)
            first = torch.searchsorted(ordered, ordered)  # index of the first equal row
            inverse = torch.empty_like(order).scatter_(0, order, first)
            self.rows = torch.full_like(ordered, len(self.shard) - 1).scatter_(0, first, ordered)
            self.grad = self.sum_rows(grads, inverse, order, len(rows))

    def update(self, calls: Calls):
        """Update all rows, or those whose gradient is finite and not zero. Clear the gradients."""
        if not self.is_sparse:
            super().update(calls)
            return
        for part, grad in self.split_rows():
            new, state = self.read_rows(part)
            calls.rules[self.group.rule](new, grad, state, self.hyper, self.options)  # changes them in place
            if not self.discards_updates:
                self.shard[part] = new
                for key, values in state.items():
                    self.state[key][part] = values
        self.clear()

    def split_rows(self):
        """Rows and gradients of an update in parts. Their size is a power of 2: few shapes compile."""
        num_rows = len(self.rows)
        size = min(self.ROWS_AT_ONCE, 1 << (num_rows - 1).bit_length())
        padding = -num_rows % size
        rows = F.pad(self.rows, (0, padding), value=len(self.shard) - 1)
        grad = F.pad(self.grad, (0, 0, 0, padding))
        return zip(rows.split(size), grad.split(size))

    def read_rows(self, rows):
        """Copies of these rows (n, D) and of their state."""
        return self.shard[rows], {key: tensor[rows] for key, tensor in self.state.items()}

    def compute_update(self, calls: Calls):
        if not self.is_sparse:
            return super().compute_update(calls)
        rows, grad = next(self.split_rows())
        new, state = self.read_rows(rows)
        calls.rules[self.group.rule](new, grad, state, self.hyper, self.options)
        return {"values": new - self.shard[rows], **state}

    def start_gather(self):
        """Forward fetches the rows that it needs."""

    def sum_bits(self):
        """Checksum () of rows that every rank reads from their owners, int64."""
        rows = np.linspace(0, self.num_rows - 1, self.CHECKED_ROWS).astype(np.int64)
        plan = plan_rows([rows] * self.comm.world_size, self.comm.rank, self.num_rows)
        read = self.start_reading(move_batch(plan, self.shard.device))
        return read().view(torch.int16).sum(dtype=torch.int64)

    def gather(self):
        """The whole table (R, D), on the CPU."""
        ((_, _, own_rows),) = self.local_parts()
        return torch.cat(self.comm.gather_objects(self.shard[own_rows].cpu()))

    def clear(self):
        self.pieces = []
        self.arriving = []
        if self.is_sparse:
            self.rows = self.grad = None  # they can be gigabytes
        else:
            self.total.zero_()

    def local_parts(self):
        num_rows = min(len(self.shard) - self.is_sparse, self.num_rows - self.first_row)
        yield self.name, self.first_row, slice(0, max(0, num_rows))

    def count_units(self, _name: str):
        return self.num_rows


def sum_rows(grad, inverse, _order, num_rows: int):
    """Sum the gradients (T, D) of equal rows, given by inverse (T,) -> (num_rows, D), in float32."""
    exact = grad.to(at_least_fp32(grad))
    return torch.ops.aten.embedding_dense_backward(exact, inverse, num_rows, -1, False).type_as(grad)

# ==== TRAINING =============================================================================================

MULTI_RANK_SEGMENTS = 4  # number of segments if ranks > 1, to start reduce-scatters during backward


def split_layers(num_layers: int, num_ranks: int):
    """The segments of a model. Several ranks reduce the gradients of a segment while backward goes on. The
    first segment then has one layer, so few matrices are reduced last. The others are about equal."""
    num_rest = min(MULTI_RANK_SEGMENTS, num_layers) - 1
    if num_ranks == 1 or num_rest == 0:
        return [range(num_layers)]
    starts = [1 + (num_layers - 1) * i // num_rest for i in range(num_rest + 1)]
    return [range(1), *(range(start, end) for start, end in itertools.pairwise(starts))]


class Trainer:
    """Model, optimizer and schedule of a run. One step, validation and the warm-up."""

    def __init__(self, cfg: Config, rt: Runtime):
        if not supports_bfloat16(rt.device):
            cfg = dataclasses.replace(cfg, embed_dtype="float32")
        self.cfg, self.rt = cfg, rt
        self.schedule = Schedule(cfg)
        torch.manual_seed(cfg.seed)
        segments = split_layers(cfg.num_layers, rt.world_size)
        self.model = GPT(cfg, segments, make_ngram_table(cfg, rt)).to(rt.device)
        self.graphs: list[StepGraphs] = []
        self.choose_operations(rt.dtype, rt.fast)
        self.optimizer = Optimizer(self.model, cfg, rt)
        self.fp8_scales = DelayedScales(self.model, rt.comm)
        self.use_compile = rt.use_compile
        self.model.calls = make_calls(self.model, rt.compile)
        if "step_graphs" in rt.fast:
            self.model.calls, self.graphs = make_graphs(self.model)
        self.progress = Progress()
        self.step_inputs: dict[int, tuple[tuple[int, int], StepInputs]] = {}  # by number of tokens

    def choose_operations(self, dtype, fast: frozenset[str]):
        """Use these forms. Validation has no FP8, and no fused loss and MLP."""
        self.fast, self.ops = fast, make_operations(self.cfg, fast, dtype)
        self.val_ops = make_operations(self.cfg, fast & VAL_FORMS, dtype)
        for graphs in self.graphs:  # of the earlier forms
            graphs.graphs.clear()

    def train_step(self, batches: Iterator[Batch], state, norms: UpdateNorms | None = None):
        """One optimizer step. norms measures its updates. Returns this rank's weighted loss per token, on
        the device."""
        device, stage, world_size = self.rt.device, state.stage, self.rt.world_size
        num_micro_batches, size = divide_step(self.cfg, world_size, stage)
        step_inputs = self.get_step_inputs(state, size * stage.seq_len, stage.seq_len)
        loss_weights = torch.tensor(state.loss_weights).to(device, non_blocking=True)
        total_loss = torch.zeros((), device=device)
        self.optimizer.start_step(num_micro_batches)

        # Forward and backward. Hooks reduce the gradients during the last backward
        for _ in range(num_micro_batches):
            loss = self.model(next(batches), step_inputs, self.ops, loss_weights)
            loss.backward()
            self.fp8_scales.record_amax()
            total_loss += loss.detach()

        # Update
        self.fp8_scales.update()
        self.optimizer.step(state, norms)
        return total_loss / (stage.tokens_per_step // world_size)

    @torch.no_grad()
    def validate(self, data, state, num_batches: int | None = None):
        """Mean loss of the first num_batches batches (None: all)."""
        self.optimizer.check_ranks()
        rt, num_batches = self.rt, num_batches or data.num_batches
        batches = data.batches(rt.comm, num_batches)
        total = torch.zeros((), dtype=torch.float64, device=rt.device)
        step_inputs = self.get_step_inputs(state, data.batch_tokens, self.cfg.val_seq_len)
        for batch, counts in report_progress(batches, -(-num_batches // rt.world_size), "validation", rt):
            total += self.model(move_batch(batch, rt.device), step_inputs, self.val_ops) * counts
        return rt.comm.all_reduce(total).item() / (num_batches * data.batch_tokens)

    def get_step_inputs(self, state, num_tokens: int, seq_len: int):
        """The model's inputs in a stage. Later stages copy theirs to the tensors of the first one with as
        many tokens, because the addresses in CUDA graphs are fixed."""
        stage_key = (state.stage_index, seq_len)
        old_key, old = self.step_inputs.get(num_tokens, (None, None))
        if old_key == stage_key:
            return old
        new = make_step_inputs(state, num_tokens, seq_len, self.cfg, self.rt.device)
        if old is not None:
            new = tree_map(lambda x, y: x.copy_(y) if isinstance(x, Tensor) else y, old, new)
        self.step_inputs[num_tokens] = (stage_key, new)
        return new

    def warm_up(self, train_data, val_data):
        """Train in every stage for warmup_iterations times the longest period, at most all its steps, and
        compare compiled code with the code that it was made from. Then restore parameters and optimizer
        state exactly. Returns lines for the log."""
        if not self.cfg.warmup_iterations and not self.use_compile:
            return []
        saved = Snapshot(self, with_tables=False)
        lines = []
        for table in self.optimizer.tables:  # a snapshot has no sparse tables
            table.discards_updates = True
        # Large steps first, so that CUDA graphs of small ones reuse their memory. Batches come from this
        # thread, because a call of CUDA by another one would break a capture
        stages = self.schedule.stage_ranges()
        stages.sort(key=lambda stage_range: stage_range[0].tokens_per_step, reverse=True)
        for stage, start, end in stages:
            print_phase(f"warm-up with {stage.tokens_per_step:,} tokens per step", self.rt)
            num_steps = min(self.cfg.warmup_iterations * self.cfg.longest_period, end - start)
            num_batches = num_steps * divide_step(self.cfg, self.rt.world_size, stage)[0]
            batches = train_data.batches(self.rt.comm, start, start + num_steps)
            moved = (move_batch(batch, self.rt.device)
                     for batch in report_progress(batches, num_batches, "warm-up", self.rt))
            for _ in range(num_steps):
                self.train_step(moved, self.schedule.at(start))
        print_phase("warm-up of the validation", self.rt)
        if self.use_compile:
            try:
                lines = check_compiler(self, train_data, val_data)
            except torch.OutOfMemoryError:
                lines = ["compiled code was not compared, because the memory does not suffice"]
        else:
            num_batches = min(self.rt.world_size, val_data.num_batches)
            self.validate(val_data, self.schedule.at(self.cfg.num_iterations), num_batches)
        saved.restore()
        for table in self.optimizer.tables:
            table.discards_updates = False
        for graphs in self.graphs:
            graphs.can_capture = False
        del saved
        if self.rt.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.rt.device)
        return lines


def train(cfg: Config, rt: Runtime, argv: list[str]):
    """The whole run, from the data to the result. RunError if it cannot go on."""
    # Data, and the checkpoint to continue from
    train_data = TrainData(cfg, Schedule(cfg))
    val_data = ValData(cfg)
    vocabulary = read_vocabulary(cfg) if any(stage.prefix_weight for stage in cfg.stages) else {}
    run = describe_run(cfg, rt, argv, train_data.shards, val_data.shards)
    data_setup_s = round(time.perf_counter() - rt.started, 2)
    folder, saved, resume_line = find_start(cfg, run, rt)
    result = find_result_folder(cfg) / f"{run['run_id']}.json"
    if rt.comm.broadcast_object(result.exists()):
        print0(f"{result} is the result of this run: nothing to do. Another --seed is another run", rt)
        return

    # Model: dtype, compiler and fast forms are chosen for this machine
    rt = choose_precision(keep_choices(cfg, run, saved), rt)
    run["choices"] = describe_choices(rt)
    trainer = Trainer(cfg, rt)
    optimizer, schedule, progress = trainer.optimizer, trainer.schedule, trainer.progress
    log = RunLog(cfg, rt, run, saved, progress)
    stop = Stop(rt)
    if folder:
        load_state(trainer, folder, saved)
    checkpoints = Checkpoints(cfg, log, rt, train_data.bos, folder if saved else None)

    # Off the clock: lock the run (else the first save does), and warm up
    started = clock(rt.device)
    if cfg.checkpoint_every or cfg.resume:
        checkpoints.start()
    with log, checkpoints, stop:
        log.print_start(train_data.describe_share(), resume_line)
        gc.set_threshold(100_000, 20, 100)  # the compilers make many objects
        for line in trainer.warm_up(train_data, val_data):
            log.print(line)
        if rt.use_compile and not trainer.use_compile:
            run["choices"]["compile"] = "off"
        gc.freeze()  # the garbage collector ignores all objects of the setup
        setup = dict(compile_time_s=round(clock(rt.device) - started, 2), data_setup_s=data_setup_s)
        monitor = Monitor(trainer, log)
        stop.catch_signals()
        optimizer.check_ranks()  # they also wait for each other
        rt.comm.set_timeout(STEP_TIMEOUT)

        # On the clock, as published: prefix tokens, batches, steps, averages
        train_clock = TrainClock(rt.device, progress, clock(rt.device))
        save_is_due = False  # True from a step with a checkpoint until it can be saved
        if vocabulary:
            trainer.model.head.prefix_tokens.copy_(find_prefix_tokens(vocabulary, cfg.padded_vocab_size))
        batches = prefetch(
            train_data.batches(rt.comm, progress.step, cfg.num_iterations, sweep_from=0), rt.device)
        while progress.step < cfg.num_iterations:
            # 1. Validation
            state = schedule.at(progress.step)
            if cfg.val_loss_every and progress.step % cfg.val_loss_every == 0:
                with train_clock.paused():
                    log.log_validation(trainer.validate(val_data, state))

            # 2. One step
            loss = trainer.train_step(batches, state, monitor.start_step())
            progress.step += 1
            progress.tokens += state.stage.tokens_per_step
            log.log_step(loss, train_clock.read())

            # 3. Save or stop, once no gradient waits for a later update
            is_last = progress.step == cfg.num_iterations
            if cfg.checkpoint_every and (is_last or progress.step % cfg.checkpoint_every == 0):
                save_is_due = True
            status = stop.exchange()  # exit status of a stop request to any rank, else 0
            can_save = is_last or optimizer.has_no_pending_gradients()
            must_save = can_save and bool(status or save_is_due)
            monitor.end_step(loss, state, must_wait=must_save or is_last)
            if must_save:
                save_is_due = False
                log.flush_losses()
                with train_clock.paused():
                    checkpoints.save(trainer)
                if status:
                    checkpoints.end(status)  # raises RunError

        # The last step is saved before the final validation, which may need more memory than all before
        log.flush_losses()
        status = stop.finish_exchange()
        with train_clock.paused():
            checkpoints.save_last(trainer, must_save=bool(status))
            if status:
                checkpoints.end(status)

        # Final weights, validation and result
        optimizer.apply_averages()
        with train_clock.paused():
            with checkpoints.name_weights(), stop.at_once():
                val_loss = trainer.validate(val_data, schedule.at(progress.step))
            log.log_validation(val_loss)
        measured = {**setup, **measure_run(trainer, run)}
        checkpoints.write_model(trainer)
        log.finish(measured)  # last, because a run with a result is finished
        checkpoints.remove_last()
        if checkpoints.problem:
            raise RunError(checkpoints.problem)

# ############################## PART TWO: FAST FORMS OF PART ONE ###########################################

# ==== FAST FORMS ===========================================================================================
# A fast form is a faster implementation of operations of part one. It is off if one of these operations was
# edited. At startup FormCheck computes loss and gradients of a small model with these layers and random
# parameters, by fast and by plain forms. A form with other results is off. A line says so. To add a fast
# form, add a row to FORMS and a line to make_operations(), its condition to list_fast_forms(), and its
# functions to DIGESTS.
# The compiler is compared at the end of the warm-up, see check_compiler().

FORMS = {  # name: functions of part one that it computes in another way
    "rms_norm": ("rms_norm",),
    "qkv_kernel": ("make_qkv", "rotate", "rms_norm", "linear"),
    "flex_attention": ("attention", "make_mask", "is_visible"),
    "block_attention": ("attention", "make_mask", "is_visible"),
    "head_loss": ("head_loss", "Softcap", "linear"),
    "cross_entropy": ("head_loss", "Softcap", "linear"),
    "relu2_mlp": ("relu2_mlp",),
    "step_graphs": (),
    "fp8_head": ("head_loss", "Softcap", "linear"),
    "fp8_mlp": ("relu2_mlp",),
    "fp8_qkv": ("make_qkv", "rotate", "rms_norm", "linear"),
}
FP8_FORMS = ("fp8_head", "fp8_mlp", "fp8_qkv")  # --fp8 and --fp8_parts choose them
DIGESTS = dict(  # of the code that the fast forms compute, see compute_digests()
    linear="14b495f7", rms_norm="45595a91", relu2_mlp="852450c1", rotate="033821d4", make_qkv="6eb712a2",
    is_visible="a0344112", make_mask="71a613e4", attention="c5808774", Softcap="ebe96bc1",
    head_loss="b3a1b4b7")
ZERO_GRADIENT = 1e-4  # of the largest gradient norm: smaller gradients are compared as if they had this norm
VAL_FORMS = frozenset({"rms_norm", "qkv_kernel", "flex_attention", "block_attention"})
FLEX_CAPABILITY = (7, 0)  # least CUDA capability of FlexAttention, and of torch.compile on GPUs
PLAIN_ATTENTION_TOKENS = 8192  # longest sequence for the T x T masks of part one


def make_operations(cfg: Config, names: Iterable[str], dtype):
    """Operations with the named fast forms."""
    names = {*names}
    ops = Operations(dtype)
    if "rms_norm" in names:
        ops = ops._replace(rms_norm=RMSNorm.apply)
    if names & {"qkv_kernel", "fp8_qkv"}:
        fp8_dtype = E4M3 if "fp8_qkv" in names else None
        ops = ops._replace(make_qkv=functools.partial(fused_qkv, fp8_dtype=fp8_dtype))
    if "block_attention" in names:
        make_mask = functools.partial(build_dense_mask, dtype=dtype)
        ops = ops._replace(make_mask=make_mask, attention=BlockAttention.apply)
    elif "flex_attention" in names:
        ops = ops._replace(make_mask=build_block_mask, attention=attend_flex)
    if names & {"relu2_mlp", "fp8_mlp"}:
        ops = ops._replace(relu2_mlp=functools.partial(
            fused_relu2_mlp, use_kernel="relu2_mlp" in names, use_fp8="fp8_mlp" in names))
    if names & {"head_loss", "cross_entropy", "fp8_head"}:
        use_kernel = "cross_entropy" in names
        scales = head_fp8_scales(cfg) if "fp8_head" in names else None
        ops = ops._replace(head_loss=functools.partial(FusedHeadLoss.apply, use_kernel, scales))
    return ops


def get_capability(device):
    """CUDA capability of a device that compiles Triton kernels, else (0, 0)."""
    if device.type != "cuda" or triton is None:
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def list_fast_forms(cfg: Config, rt: Runtime):
    """Names of the fast forms that --fast and --fp8 ask for. auto: those that suit this device and
    recipe."""
    capability = get_capability(rt.device)
    has_kernels = capability >= (8, 0)  # their tiles need registers
    has_flex = capability >= FLEX_CAPABILITY
    has_loss_kernel = has_kernels and 0 < cfg.softcap[0] <= 80  # its sums need the softcap
    has_tiles = cfg.model_dim % 128 == cfg.mlp_hidden % 128 == 0
    suits = dict(
        rms_norm=True, qkv_kernel=has_kernels, flex_attention=has_flex, block_attention=not has_flex,
        head_loss=not has_loss_kernel, cross_entropy=has_loss_kernel,
        relu2_mlp=has_kernels and has_tiles and capability == (9, 0),  # measured on Hopper only
        step_graphs=has_flex)  # block_attention reads a number from the GPU
    if cfg.fast == ("auto",):
        names = [name for name in suits if suits[name]]
    else:
        names = [name for name in suits if name in cfg.fast]
    has_fp8 = capability >= (8, 9) and rt.dtype == torch.bfloat16  # no CPU multiplies FP8 faster
    if cfg.fp8 == "on" or cfg.fp8 == "auto" and has_fp8:
        names += [name for name in FP8_FORMS if name.removeprefix("fp8_") in cfg.fp8_parts]
    return names


def choose_fast_forms(cfg: Config, rt: Runtime):
    """Choose fast forms for rt, and check them. Returns (their names, lines for the log)."""
    names = list_fast_forms(cfg, rt)
    check = FormCheck(cfg, rt.device)
    lines = check.lines

    # Forms of edited functions are off
    for function, digest in compute_digests().items():
        if digest == DIGESTS[function]:
            continue
        off = [name for name in names if function in FORMS[name]]
        names = [name for name in names if name not in off]
        effect = f"without fast forms {', '.join(off)}" if off else "it had no fast form here"
        lines.append(f"{function} was edited: {effect}")

    # Forms with other results are off: first in float32 up to 1 %, then in this run's dtype and with FP8
    fp8_names = [name for name in names if name in FP8_FORMS]
    names = check.keep_equal([name for name in names if name not in FP8_FORMS], torch.float32, 0.01)
    if fp8_names or rt.dtype != torch.float32:
        names = check.keep_equal([*names, *fp8_names], rt.dtype, 0.4)

    # The plain attention needs too much memory for long sequences
    longest = max(cfg.val_seq_len, cfg.micro_batch_tokens)
    if longest > PLAIN_ATTENTION_TOKENS and not {"flex_attention", "block_attention"} & {*names}:
        has_flex = get_capability(rt.device) >= FLEX_CAPABILITY
        names.append("flex_attention" if has_flex else "block_attention")
        lines.append(f"attention() needs masks of {longest} x {longest} tokens: {names[-1]} replaces it")
    if "step_graphs" in names:
        error = "warmup_iterations is 0"
        if cfg.warmup_iterations:
            error = check.find_graph_error(names, rt.dtype)
        if error:
            names.remove("step_graphs")
            lines.append(f"fast form step_graphs: off ({error})")
    return frozenset(names), [f"fast forms: {', '.join(names) or 'none'}", *lines]


def compute_digests():
    """Digests of the functions in DIGESTS. Comments, layout and a function's docstring do not count."""
    digests = {}
    for node in ast.parse(SCRIPT).body:
        if getattr(node, "name", "") in DIGESTS:
            if ast.get_docstring(node):
                del node.body[0]
            digests[node.name] = hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:8]
    return digests


def add_noise(params: Iterable[Tensor]):
    """Change all parameters at random, because zeros would hide faults. Equal on all ranks."""
    for i, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 + i)
        std = 0.2 if param.dim() < 2 else param.size(-1) ** -0.5
        param.data += std * torch.randn(param.shape, generator=generator).to(param.device)


class FormCheck:
    """A model with the layers of this run, a small vocabulary and n-gram table, and random float32
    parameters. 768 tokens in four documents, and its plain results."""

    def __init__(self, cfg: Config, device):
        self.lines: list[str] = []  # for the log
        stage = dataclasses.replace(cfg.full_stages[0], window_long=255, window_short=140, seq_len=384,
                                    tokens_per_step=768, num_classes=None)
        self.cfg = cfg = dataclasses.replace(
            cfg, vocab_size=min(cfg.vocab_size, 1024), ngram_rows=600 if cfg.ngram_rows else 0,
            stages=(stage,), extension_steps=0, embed_dtype="float32", matrix_dtype="float32")
        torch.manual_seed(0)
        self.model = GPT(cfg).to(device)
        self.model.is_tied = False  # the gradient of a tied embedding would hide faults in that of the head
        add_noise(self.model.parameters())
        scales = DelayedScales(self.model, Comm())
        if scales.leaves:
            scales.set(0.5 * scales.read())
        bos = cfg.vocab_size - 1
        tokens = torch.randint(bos, (2, 385)).numpy()
        for sequence, start in ((0, 0), (0, 60), (1, 0), (1, 300)):  # two documents exceed the windows
            tokens[sequence, start] = bos
        tokens[:, 200:220] = 1  # equal targets
        batch = make_batch(tokens, bos, cfg.max_attention_len)
        batch.targets[::5] = -1  # no target
        batch = move_batch(batch, device)
        state = Schedule(cfg).at(0)
        step_inputs = make_step_inputs(state, 768, 384, cfg, device)
        loss_weights = torch.tensor(state.loss_weights, device=device)
        # The second inputs are for step_graphs: other tokens, windows and loss weights
        other_batch = batch._replace(inputs=batch.inputs.flip(0), targets=batch.targets.flip(0))
        other_step_inputs = step_inputs._replace(windows=step_inputs.windows.flip(0))
        self.inputs = (batch, step_inputs, loss_weights), (other_batch, other_step_inputs, -loss_weights)
        self.operations: dict[tuple, Operations] = {}  # by names and dtype: a graph belongs to one object
        self.plain = self.run([], torch.float32)

    def get_operations(self, names: list[str], dtype):
        key = (*names, dtype)
        if key not in self.operations:
            self.operations[key] = make_operations(self.cfg, names, dtype)
        return self.operations[key]

    def run(self, names: list[str], dtype, case: int = 0):
        """Loss and all gradients by the named forms. case: which inputs."""
        batch, step_inputs, loss_weights = self.inputs[case]
        self.model.zero_grad()
        loss = self.model(batch, step_inputs, self.get_operations(names, dtype), loss_weights)
        loss.backward()
        named = self.model.named_parameters()
        grads = {name: param.grad for name, param in named if param.grad is not None}
        return {"loss": loss.detach(), **grads}

    def find_error(self, names: list[str], dtype, limit: float, case: int = 0, expected: dict | None = None):
        """Why the named forms cannot be used, or "". limit: of the relative error of loss and gradients. If
        it is above 0.1, vectors are left out, because most terms of their gradients cancel."""
        try:
            results = self.run(names, dtype, case)
            expected = expected or self.plain
            largest = max(plain.norm() for name, plain in expected.items() if name != "loss")
            for name, plain in expected.items():
                error = float((results[name] - plain).norm())
                if limit > 0.1 and plain.dim() == 1 and math.isfinite(error):
                    continue
                if not error <= limit * max(plain.norm(), ZERO_GRADIENT * largest):  # also of NaN
                    return f"{name} differs from its plain form by {error / plain.norm():.3g}"
        except Exception as failure:  # a compiler error must not stop training
            return f"it fails on this {self.plain['loss'].device.type} device: {str(failure).strip()[:120]}"
        return ""

    def find_graph_error(self, names: list[str], dtype):
        """Why step_graphs cannot be used with these forms, or "". Two replays, the second with other inputs,
        must have the bits of runs without graphs."""
        expected = [self.run(names, dtype, case) for case in range(2)]
        self.model.calls, _ = make_graphs(self.model)
        errors = [self.find_error(names, dtype, 0.0, case, expected[case]) for case in range(2)]
        return errors[0] or errors[1]

    def keep_equal(self, names: list[str], dtype, limit: float):
        """The names without forms whose results differ. Those get a line."""
        if not self.find_error(names, dtype, limit):
            return names
        kept = []
        for name in names:
            error = self.find_error([*kept, name], dtype, limit)
            if error:
                self.lines.append(f"fast form {name}: off ({error})")
            else:
                kept.append(name)
        return kept


# Largest relative errors that rounding explains, in float32 and in bfloat16. With FP8 four times as large
COMPILER_LIMITS = dict(activations=(1e-3, 0.04), loss=(1e-4, 0.01), gradient=(1e-3, 0.1), update=(1e-2, 0.3))


def check_compiler(trainer: Trainer, train_data, val_data):
    """Compare compiled code with the code that it was made from, on a validation batch and a training batch:
    activations, losses, the gradient of each bucket and its update. If they differ on any rank, the compiler
    is off on all ranks. Changes parameters and state. Returns lines for the log."""
    model, optimizer = trainer.model, trainer.optimizer
    comm, device = trainer.rt.comm, trainer.rt.device
    optimizer.finish()
    add_noise(param for param in model.parameters() if not param.spec.is_table)
    state = trainer.schedule.at(0)  # the first stage has most kinds of targets
    batch = move_batch(next(train_data.batches(comm, 0, 1)), device)
    val_batch, _ = next(val_data.batches(comm, 1))
    val_batch = move_batch(val_batch, device)

    # Compiled and plain results by (kind, name)
    compiled_calls, plain_calls = model.calls, make_calls(model)
    compiled = run_batches(trainer, state, batch, val_batch, val_data)
    plain = {}
    optimizer.step_count = max(optimizer.step_count, trainer.cfg.longest_period)  # all groups have an update
    optimizer.set_hypers(state)
    for bucket in optimizer.buckets:  # random gradients have full rank, so rounding changes updates little
        bucket.grad.normal_(generator=torch.Generator(device).manual_seed(0))
        for results, calls in ((compiled, compiled_calls), (plain, plain_calls)):
            for key, tensor in bucket.compute_update(calls).items():
                results["update", f"{bucket.name}/{key}"] = tensor
    lines = []
    comm.set_timeout(STEP_TIMEOUT)  # of ranks that wait for one that runs out of memory
    model.calls = plain_calls
    for has_gradients, what in ((True, "gradients"), (False, "activations and losses")):
        try:
            with torch.set_grad_enabled(has_gradients):
                plain |= run_batches(trainer, state, batch, val_batch, val_data)
            break
        except torch.OutOfMemoryError:
            lines.append(f"{what} of compiled code were not compared, because they need too much memory")
        torch.cuda.empty_cache()

    problem = max(comm.gather_objects(find_difference(trainer, compiled, plain)))
    if problem:
        trainer.use_compile = False
        for graphs in trainer.graphs:
            graphs.graphs.clear()
        lines.append(f"torch.compile: off ({problem} against the code without it)")
    else:
        model.calls = compiled_calls
    return lines


def find_difference(trainer: Trainer, compiled: dict, plain: dict):
    """A line about the first result that rounding does not explain, or ""."""
    largest = max((measure_norm(x) for (kind, _), x in plain.items() if kind == "gradient"), default=0.0)
    for (kind, name), expected in plain.items():
        limit = COMPILER_LIMITS[kind][trainer.ops.dtype != torch.float32]
        if trainer.fast & {*FP8_FORMS} and name != "validation":
            limit *= 4
        norm = measure_norm(expected)
        if kind == "gradient":
            norm = max(norm, ZERO_GRADIENT * largest)
        error = measure_norm(compiled[kind, name] - expected)
        if not error <= limit * norm:
            return f"{kind} of {name}: relative error {error / norm:.2g}"
    return ""


def run_batches(trainer: Trainer, state, batch: Batch, val_batch, val_data):
    """Activations and losses of both batches, and the gradient of each bucket if gradients are enabled."""
    model, cfg, buckets = trainer.model, trainer.cfg, trainer.optimizer.buckets
    for bucket in buckets:
        bucket.clear()
    results = {}
    with torch.no_grad():
        val_state = trainer.schedule.at(cfg.num_iterations)
        step_inputs = trainer.get_step_inputs(val_state, val_data.batch_tokens, cfg.val_seq_len)
        x = model.run_layers(val_batch, step_inputs, trainer.val_ops)
        loss = model.calls.run_head(x, val_batch.targets, step_inputs, None, None, trainer.val_ops)
    results["activations", "validation"] = x
    results["loss", "validation"] = loss
    if model.ngram is not None:  # the table may still be zero
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(batch.sign_rows.numel(), cfg.model_dim, generator=generator)
        rows = rows.to(model.ngram).requires_grad_()
        ngrams = model.calls.sum_ngrams(rows, batch.sign_rows, trainer.ops.dtype)
        results["activations", "n-grams"] = ngrams.detach()
    step_inputs = trainer.get_step_inputs(state, len(batch.inputs), state.stage.seq_len)
    loss_weights = torch.tensor(state.loss_weights, device=trainer.rt.device)
    x = model.run_layers(batch, step_inputs, trainer.ops)
    loss = model.calls.run_head(x, batch.targets, step_inputs, loss_weights, batch.classes, trainer.ops)
    results["activations", "training"] = x.detach().clone()
    results["loss", "training"] = loss.detach()
    if loss.requires_grad:
        loss.backward()
        for bucket in buckets:
            bucket.wait_for_gradient()
            gradient = bucket.grad if bucket.total is None else bucket.total
            results["gradient", bucket.name] = gradient.clone()
        for scale in trainer.fp8_scales.leaves:
            scale.grad = None
    return results

# ==== STEP GRAPHS ==========================================================================================
# With step_graphs the segments, the head and the updates of buckets are CUDA graphs. A replay is one launch,
# so the GPU does not wait for Python. Look-ups in tables, sums of n-grams, updates of sparse tables,
# communication and validation have no graphs.

class StepGraphs:
    """CUDA graphs of a function, forward and backward, one pair for each signature: shape, dtype and
    requires_grad of the tensors among the arguments, and values of the others. Tensors are copied into the
    graph. The addresses of all other tensors that the function uses are constants: parameters, state and
    scales never move. The graphs of one object share memory, because each forward is followed by its
    backward before the next forward."""

    def __init__(self, function: Callable, params: Iterable[Tensor] = ()):
        """params: leaves that may get a gradient. (): there is no backward."""
        self.function = function
        self.params = list(params)
        self.graphs = {}  # by signature: the graph, and the leaves that get a gradient
        self.pool = None
        self.can_capture = True  # during the warm-up. Later another thread uses CUDA

    def __call__(self, *args):
        leaves, spec = tree_flatten(args)
        signature = spec, *((x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else x
                            for x in leaves)
        is_training = torch.is_grad_enabled() or not self.params
        if self.can_capture and is_training and signature not in self.graphs:
            self.graphs[signature] = self.capture(args)
        if signature not in self.graphs:
            return self.function(*args)
        graph, params = self.graphs[signature]
        return graph(*filter(torch.is_tensor, leaves), *params)

    def capture(self, args: tuple):
        """Capture a graph. Returns it and the leaves that get a gradient."""
        args = tree_map_only(  # replays copy their tensors to these
            Tensor, lambda x: x.detach().clone().requires_grad_() if x.requires_grad else x, args)
        outputs = [x for x in tree_leaves(self.function(*args)) if x.requires_grad]
        grads = []
        if outputs:  # any gradients of the outputs will do: which parameters get one is the question
            grads = torch.autograd.grad(outputs, self.params, outputs, allow_unused=True)
        params = [param for param, grad in zip(self.params, grads) if grad is not None]
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        # The lambda is called with the very tensors that args has, so it ignores what it is given
        graph = torch.cuda.make_graphed_callables(
            lambda *_: self.function(*args), (*filter(torch.is_tensor, tree_leaves(args)), *params),
            allow_unused_input=True, pool=self.pool)
        return graph, params


def make_graphs(model: GPT):
    """StepGraphs of a model's segments and head, and of the updates of buckets. Returns (calls of the model
    with graphs in place of these functions, list of the graphs)."""
    calls = model.calls
    params = list(model.parameters())
    for module in model.modules():
        params += getattr(module, "scales", None) or ()  # the gradient of an FP8 scale is an amax
    segments = {layers: StepGraphs(calls.run_segment, params) for layers in model.segments}
    head = StepGraphs(calls.run_head, params)
    updates = StepGraphs(calls.update_shard)

    def run_segment(layers, *args):
        return segments[layers](layers, *args)

    calls = calls._replace(run_segment=run_segment, run_head=head, update_shard=updates)
    return calls, [*segments.values(), head, updates]

# ==== FAST NORM AND ATTENTION ==============================================================================
# Attention without T x T masks. On a GPU FlexAttention skips invisible blocks. Elsewhere each block of
# queries reads the blocks of keys in its window. Masks agree with is_visible() if doc_ids never decrease.

class RMSNorm(torch.autograd.Function):
    """rms_norm(). Its gradient (g - y mean(g y)) / rms takes a third of autograd's passes over memory."""

    @staticmethod
    def forward(ctx, x):
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32(x))
        scale = torch.rsqrt(norm.square() / x.size(-1) + RMS_EPS).type_as(x)  # (..., 1)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        total = torch.linalg.vecdot(grad, y)[..., None]  # (..., 1)
        return torch.addcmul(grad, y, total, value=-1 / y.size(-1)) * scale


# FlexAttention's tiles in float32. They fit into 64 KiB of shared memory. PyTorch's defaults do not fit
FLEX_FLOAT32 = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_M1=16, BLOCK_N1=32, BLOCK_M2=32, BLOCK_N2=16, num_stages=1,
                    num_warps=4)
# Hopper's tiles by channels (K, L). PyTorch's defaults spill registers. Chosen by compilation, not measured
FLEX_HOPPER = {
    (64, 128): dict(fwd_BLOCK_M=128, fwd_BLOCK_N=128, fwd_num_warps=8, fwd_num_stages=2),
    (64, 64): dict(fwd_BLOCK_M=64, fwd_BLOCK_N=64, fwd_num_warps=4, fwd_num_stages=2, bwd_BLOCK_M1=32,
                   bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64, bwd_num_warps=4, bwd_num_stages=2)}


def build_block_mask(doc_ids, window):
    """make_mask() for FlexAttention, from the range of documents in each block. window is a tensor, so one
    compiled graph serves all windows. The visible key blocks of a query block are contiguous, and the last
    one is the block itself. Blocks without masked pairs ("full") are contiguous, too, and end one block
    earlier. Therefore the lists need no sort. Sources: records 12 and 16."""
    first = doc_ids.view(-1, BLOCK)[:, 0]  # (T/128,) document at the start of each block
    last = doc_ids.view(-1, BLOCK)[:, -1]  # (T/128,)
    num_blocks = first.size(0)
    column = torch.arange(num_blocks, device=doc_ids.device, dtype=torch.int32)  # place in a list, key block
    row = column[:, None]  # query block, or key block in lists by key
    distance = (row - column) * BLOCK  # (T/128, T/128), tokens from the key block to the query block
    overlap = (first[:, None] <= last) & (first <= last[:, None])
    visible = (distance >= 0) & (distance - (BLOCK - 1) <= window) & overlap
    full = ((distance > 0) & (distance + (BLOCK - 1) <= window)
            & (first[:, None] == last) & (first == last[:, None]))

    # For each query block: full blocks end at row - 1. Partial ones are earlier visible blocks, then row.
    # Only the first num_full or num_visible - num_full entries of a list count. Example, p partial, f full:
    #   key blocks       0 1 2 3 4 5     num_visible 4, num_full 2, earlier 1 2 3 ..., full_start 2
    #   query block 4    . p f f p .     partial keys 1 4 ..., full keys 2 3 ...
    num_visible = visible.sum(1, dtype=torch.int32)  # (T/128,)
    num_full = full.sum(1, dtype=torch.int32)
    earlier = row + 1 - num_visible[:, None] + column
    full_start = row - num_full[:, None]
    partial_keys = torch.where(earlier < full_start, earlier, row)
    by_query = [num_visible - num_full, partial_keys, num_full, full_start + column]

    # For each key block: full blocks start at row + 1. Partial ones are row, then those behind the full ones
    num_visible = visible.sum(0, dtype=torch.int32)
    num_full = full.sum(0, dtype=torch.int32)
    partial_queries = torch.where(column == 0, row, row + num_full[:, None] + column)
    by_key = [num_visible - num_full, partial_queries, num_full, row + 1 + column]

    # Counts (1, 1, T/128), and lists (1, 1, T/128, T/128) in the order of BlockMask
    lists = [x.clamp(max=num_blocks - 1)[None, None] if x.dim() == 2 else x[None, None]
             for x in by_query + by_key]

    def mask_mod(_batch, _head, query, key):
        return is_visible(query, key, doc_ids, window)

    return BlockMask(doc_ids.shape * 2, *lists, (BLOCK, BLOCK), mask_mod)


def attend_flex(q, k, v, mask):
    """attention() by FlexAttention, which never stores the scores."""
    options = None
    if q.dtype == torch.float32:
        options = FLEX_FLOAT32
    elif q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0):
        options = FLEX_HOPPER.get((q.size(-1), v.size(-1)))
    attend = flex_attention if torch.compiler.is_compiling() else compile_flex_attention()
    q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))  # (1, H, T, K)
    y = attend(q, k, v, block_mask=mask, scale=1.0, kernel_options=options)
    return y[0].transpose(0, 1)  # (T, H, L)


@functools.cache
def compile_flex_attention():
    return torch.compile(flex_attention, dynamic=False)


def build_dense_mask(doc_ids, window, dtype):
    """make_mask() by blocks of C queries and M * C keys -> (T/C, C, M * C), 0 if visible, else -inf. A block
    of queries reads its own block of keys and the M - 1 blocks before it."""
    num_tokens = doc_ids.size(0)
    size = math.gcd(num_tokens, 128 if window >= 512 else 64)  # small blocks waste less, large are faster
    positions = torch.arange(num_tokens, device=doc_ids.device)
    first = torch.maximum(torch.searchsorted(doc_ids, doc_ids), positions - window)  # first visible key
    first = first.view(-1, size) - positions[::size, None]  # (T/C, C), relative to the block
    num_before = -(int(first.min()) // size) * size  # number of keys before the block
    earlier = hide_earlier_keys(num_before + size, dtype, doc_ids.device)
    mask = F.embedding(first + num_before, earlier)  # faster than comparisons
    mask[:, :, num_before:] += earlier[:size, :size].T  # hides later keys of the query's own block
    return mask


@functools.lru_cache(maxsize=8)
def hide_earlier_keys(num_keys: int, dtype, device):
    """(num_keys, num_keys): row i hides the keys before i, by -inf."""
    return torch.full((num_keys, num_keys), -math.inf, dtype=dtype, device=device).tril(-1)


class BlockAttention(torch.autograd.Function):
    """attention() by blocks, mask (T/C, C, M * C). Memory is linear in T. Each of B = H * T/C blocks of
    queries reads M blocks of keys, up to its own. Autograd's own backward takes longer. The blocks of all
    heads stand in one row. With M = 3:

        query block    0        1        2        3
        key blocks     . . 0    . 0 1    0 1 2    1 2 3      . : a block that the mask hides
    """

    @staticmethod
    def forward(ctx, q, k, v, mask):
        """q, k (T, H, K), v (T, H, L) -> (T, H, L)."""
        _, size, num_keys = mask.shape
        q, k, v = (split_blocks(x, size) for x in (q, k, v))  # (B, C, K or L)
        k, v = (F.pad(x.flatten(0, 1), (0, 0, num_keys - size, 0)) for x in (k, v))  # ((B + M - 1) * C, ...)
        k, v = (x.unfold(0, num_keys, size).mT.contiguous() for x in (k, v))  # (B, M * C, K or L)
        ctx.num_heads = len(q) // len(mask)
        probs = torch.baddbmm(mask.repeat(ctx.num_heads, 1, 1), q, k.mT).softmax(-1)  # (B, C, M * C)
        ctx.save_for_backward(q, k, v, probs)
        return join_blocks(probs @ v, ctx.num_heads)

    @staticmethod
    def backward(ctx, grad):
        """grad (T, H, L) -> gradients of q, k (T, H, K), v (T, H, L)."""
        q, k, v, probs = ctx.saved_tensors
        grad = split_blocks(grad, q.size(1))
        grad_scores = torch._softmax_backward_data(grad @ v.mT, probs, -1, probs.dtype)
        grads = [grad_scores @ k]  # of q, k, v
        for grad_keys in (grad_scores.mT @ q, probs.mT @ grad):
            parts = grad_keys.unflatten(1, (-1, q.size(1)))  # (B, M, C, K or L)
            total = parts[:, -1].clone()
            for i in range(1, parts.size(1)):  # the i-th block before
                total[:-i] += parts[i:, -1 - i]
            grads.append(total)
        return *(join_blocks(x, ctx.num_heads) for x in grads), None


def split_blocks(x, size: int):
    """(T, H, K) -> blocks of tokens of all heads (H * T/C, C, K)."""
    return x.transpose(0, 1).reshape(-1, size, x.size(-1))


def join_blocks(x, num_heads: int):
    return x.reshape(num_heads, -1, x.size(-1)).transpose(0, 1)

# ==== FP8 ==================================================================================================
# Matmuls of 8-bit values with one scale per tensor: value = scale * FP8 value. e4m3 has values up to 448,
# and e5m2, for gradients of head and MLP, up to 57344. A scale is constant, or it is amax / limit of this
# tensor (current scaling), or of the previous step, with headroom (delayed scaling). Validation has no FP8.
# The loss is a sum over tokens. Records divide it by 8 ranks, so their scales of gradients are those here
# divided by 8.

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
QKV_LIMIT = 8.0  # inputs and gradients of queries, keys and values saturate beyond it (record 90)


class Scaled(typing.NamedTuple):
    """A tensor values * scale. scale=None: not FP8."""

    values: Tensor
    scale: Tensor | None = None  # ()


class HeadScales(typing.NamedTuple):
    """Scales of the FP8 head, and the dtype of its logits."""

    x: float = 1.0
    weight: float = 1.0
    grad: float = 1.0
    logits_dtype: torch.dtype | None = None  # None: dtype of x


def head_fp8_scales(cfg: Config):
    """Constant scales. Normalized rows have no entry above sqrt(D). Weights above fp8_head_amax saturate.
    With one target of loss weight 1, and a softcap of cap <= 4 width, |d loss / d logit| is at most 1.
    Gradients saturate above 57344 / 448 = 128."""
    return HeadScales(x=math.sqrt(cfg.model_dim) / 448, weight=cfg.fp8_head_amax / 448, grad=1 / 448,
                      logits_dtype=E4M3 if "logits" in cfg.fp8_parts else None)


def quantize(x, dtype, scale=None):
    """Quantize x / scale to FP8, saturating. The default scale is amax / limit. dtype=None: x stays."""
    if dtype is None:
        return Scaled(x)
    limit = torch.finfo(dtype).max
    if scale is None:
        scale = x.abs().max().float().clamp(min=1e-12) / limit
    elif not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    return Scaled((x.float() / scale).clamp_(-limit, limit).to(dtype).contiguous(), scale)


def matmul(a: Scaled, b: Scaled, out_dtype, fast: bool = False):
    """a (M, K) @ b (N, K)^T. fast: FP8 accumulates less precisely. FP8 results have scale 1 and saturate."""
    if a.scale is None:
        return (a.values @ b.values.T).to(out_dtype)
    if a.values.device.type == "cpu":  # FP8 matmuls on CPUs can take a thousand times longer than float32
        out = a.values.float() @ b.values.float().T * (a.scale * b.scale)
        return out.clamp(-448, 448).to(E4M3) if out_dtype == E4M3 else out.to(out_dtype)
    return torch._scaled_mm(a.values, b.values.T, a.scale, b.scale, out_dtype=out_dtype, use_fast_accum=fast)


def transpose(x: Scaled, use_kernel: bool = False):
    """x (M, N) -> (N, M), row-major in FP8. The kernel takes a ninth of Inductor's time."""
    values, scale = x
    if scale is None:
        return Scaled(values.T)
    if not use_kernel:
        return Scaled(values.T.contiguous(), scale)
    rows, columns = values.shape
    out = values.new_empty(columns, rows, dtype=torch.uint8)
    transpose_kernel[triton.cdiv(columns, 128), triton.cdiv(rows, 128)](
        values.view(torch.uint8), out, rows, columns, BLOCK=128, num_warps=8)
    return Scaled(out.view(values.dtype), scale)


class DelayedScales:
    """FP8 scales of MLPs, from the amax of the previous step, so that a kernel can quantize its own result.
    FusedMLP.backward() returns an amax as the gradient of its scale."""

    # Of hidden activations (e4m3), and of gradients (e5m2). scale = amax * factor, with headroom for growth
    # between steps, and at least floor
    FACTORS = (1.03 / 448, 1.25 / 57344)
    FLOORS = (1e-6, 1e-12)

    def __init__(self, model: GPT, comm: Comm):
        self.comm, self.amax, device = comm, None, model.embed.device
        self.leaves: list[Tensor] = []  # scales () of each MLP's hidden activation, and gradient of x @ up
        for module in model.modules():
            if isinstance(module, MLP):
                module.scales = tuple(torch.tensor(value, device=device, requires_grad=True)
                                      for value in (1.0, 2.0**-3))
                self.leaves += module.scales
        self.factors, self.floors = torch.tensor((self.FACTORS, self.FLOORS), device=device)

    def record_amax(self):
        """After each backward: keep the largest amax of all micro-batches. Autograd would add them."""
        if self.leaves and self.leaves[0].grad is not None:
            found = torch.stack([leaf.grad for leaf in self.leaves]).view(-1, 2)  # (MLPs, 2)
            self.amax = found if self.amax is None else torch.maximum(self.amax, found)
            for leaf in self.leaves:
                leaf.grad = None

    def update(self):
        """Set the scales of the next step, from the amax over all ranks. An amax of 0, inf or NaN leaves
        its scale as it is."""
        if self.amax is not None:
            amax = self.comm.all_reduce(self.amax, dist.ReduceOp.MAX)
            new = (amax * self.factors).maximum(self.floors)
            is_usable = amax.isfinite() & (amax > 0)
            self.set(new.where(is_usable, self.read().view_as(new)).flatten())
            self.amax = None

    @torch.no_grad()
    def set(self, scales):
        torch._foreach_copy_(self.leaves, list(scales.unbind()))

    def read(self):
        return torch.stack(self.leaves).detach()

# ==== FUSED OPERATIONS =====================================================================================
# Fused QKV runs one kernel after the matmul, and in backward one before the matmuls. The fused loss (head,
# softcap, cross-entropy) computes its gradients in forward. The fused MLP's kernel does not store x @ up.

class FusedQKV(torch.autograd.Function):
    """make_qkv() by one kernel each in forward and backward. With FP8 backward also stores a transpose."""

    @staticmethod
    def forward(ctx, x, weight, cos, sin, softmax_scale, num_rotating: int, is_start, heads: Heads,
                fp8_dtype):
        """x (T, D), weight (2HK + HL, D), cos and sin (T, P, K/2), is_start (T,) -> q, k, v."""
        tables = cos, sin, softmax_scale, is_start
        H, K, *_ = heads
        scaled_x = quantize(x, fp8_dtype, QKV_LIMIT / 448)
        scaled_w = quantize(weight.type_as(x), fp8_dtype)
        packed = matmul(scaled_x, scaled_w, x.dtype, fast=True)  # (T, 2HK + HL)
        q = x.new_empty(len(x), H, K)
        k = torch.empty_like(q)
        launch_qkv(packed, tables, num_rotating, heads, q, k)
        ctx.options = num_rotating, heads, fp8_dtype, weight.dtype
        ctx.save_for_backward(packed, *scaled_x, *scaled_w, *tables)
        return q, k, packed[:, 2 * H * K :]

    @staticmethod
    def backward(ctx, *grads):
        """Gradients of queries, keys and values -> gradients of x (T, D) and weight (2HK + HL, D)."""
        packed, x, x_scale, w, w_scale, *tables = ctx.saved_tensors
        num_rotating, heads, fp8_dtype, weight_dtype = ctx.options
        grads = [grad.contiguous() for grad in grads]
        grad = torch.empty_like(packed, dtype=fp8_dtype or packed.dtype)
        grad_t = scale = None
        if fp8_dtype:
            grad_t = grad.new_empty(grad.T.shape)
            scale = torch.full_like(x_scale, QKV_LIMIT / 448)
        launch_qkv(packed, tables, num_rotating, heads, *grads, grad, grad_t)
        if not fp8_dtype:
            grad_t = grad.T
        grad_x = matmul(Scaled(grad, scale), transpose(Scaled(w, w_scale)), packed.dtype)
        grad_w = matmul(Scaled(grad_t, scale), transpose(Scaled(x, x_scale), bool(fp8_dtype)), packed.dtype)
        return grad_x, grad_w.to(weight_dtype), *[None] * 7


def fused_qkv(x, weight, rope: Rope, heads: Heads, step_inputs: StepInputs, _ops, fp8_dtype=None):
    """make_qkv() by FusedQKV. fp8_dtype: of its matmuls."""
    return FusedQKV.apply(x, weight, *rope[:4], step_inputs.is_sequence_start, heads, fp8_dtype)


def launch_qkv(packed, tables, num_rotating: int, heads: Heads, q, k, v=None, grad=None, grad_t=None):
    """Launch qkv_kernel: packed (T, 2HK + HL) -> q, k. With grad: gradients q, k, v -> grad, and grad_t."""
    num_tokens, width = packed.shape
    H, K, _, P, key_offset, has_norm = heads
    cos, sin, softmax_scale, is_start = tables
    num_slots = 2 * H
    if grad is not None:
        num_slots = triton.cdiv(width, K)
    fp8_scale = 0.0
    if grad_t is not None:
        fp8_scale = 448 / QKV_LIMIT
    block = max(16, min(64, 8192 // K))  # a tile fits into the registers
    qkv_kernel[triton.cdiv(num_tokens, block), num_slots](
        packed, cos, sin, softmax_scale, is_start, q, k, v, grad, grad_t, num_tokens, width, H=H, K=K, P=P,
        N=num_rotating, IS_BACKWARD=grad is not None, FP8_SCALE=fp8_scale, EPS=RMS_EPS, HAS_NORM=has_norm,
        HAS_OFFSET=key_offset, BLOCK=block, num_warps=8)


def softcapped_cross_entropy(logits, targets, weights, softcap: Softcap, grad_dtype, grad_scale: float = 1.0,
                             use_kernel: bool = False):
    """Losses (T,) of logits (T, V) and targets (T, n), and d loss / d logits / grad_scale (T, V). A target
    of -1 is ignored. With one target of weight 1, and a softcap of cap <= 4 width, no entry of the gradient
    exceeds 1 / grad_scale. Source: the fused kernel of 2026-01-16."""
    if use_kernel:
        losses = torch.empty_like(logits[:, 0], dtype=torch.float32)
        grads = torch.empty_like(logits, dtype=grad_dtype)
        cross_entropy_kernel[(logits.size(0),)](
            logits, targets, weights, losses, grads, logits.size(1), NUM_TARGETS=targets.size(1),
            CAP=softcap.cap, SHIFT=softcap.shift, WIDTH=softcap.width, GRAD_SCALE=grad_scale,
            IS_APPROXIMATE=logits.is_cuda and grad_dtype == E5M2, BLOCK=4096, num_warps=8)
        return losses, grads
    if logits.dtype == E4M3:
        logits = logits.float()
    capped = softcap(logits)  # (T, V)
    log_probs = torch.log_softmax(capped, dim=-1)  # (T, V)
    weights = weights.type_as(capped) * (targets >= 0)  # (T, n)
    targets = targets.clamp(min=0)
    losses = -(log_probs.gather(1, targets) * weights).sum(1)  # (T,)
    if softcap.cap:
        grad_scale = grad_scale * softcap.width
    weights = weights / grad_scale
    grads = log_probs.exp_().mul_(weights.sum(1, keepdim=True)).scatter_add_(1, targets, -weights)  # (T, V)
    if softcap.cap:  # softcap derivative. 1/width is applied above
        grads.mul_(torch.addcmul(capped, capped, capped, value=-1 / softcap.cap))
    return losses, grads.to(grad_dtype)


class FusedHeadLoss(torch.autograd.Function):
    """head_loss() that computes its gradients in forward, by LOGITS_CHUNK tokens. FP8 needs normalized x."""

    @staticmethod
    def forward(ctx, use_kernel: bool, scales, x, weight, targets, target_weights, softcap: Softcap):
        """x (T, D), weight (V, D), targets (T, n), target_weights (n,) -> (). scales: for FP8 matmuls."""
        dtype = grad_scale = None
        grad_dtype = x.dtype
        if scales:
            dtype = E4M3
            grad_dtype = E5M2
            grad_scale = torch.full((), scales.grad, device=x.device)
        else:
            scales = HeadScales()
        loss = grad_w = 0.0
        grad_xs = []
        w = quantize(weight.type_as(x), dtype, scales.weight)  # (V, D)
        w_t = transpose(w, use_kernel)  # (D, V)
        for x_chunk, target in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
            chunk = quantize(x_chunk, dtype, scales.x)
            logits = matmul(chunk, w, scales.logits_dtype or x.dtype, fast=True)  # (T, V)
            losses, grads = softcapped_cross_entropy(logits, target, target_weights, softcap, grad_dtype,
                                                     scales.grad, use_kernel)
            grads = Scaled(grads, grad_scale)
            loss = loss + losses.sum()
            grad_xs.append(matmul(grads, w_t, x.dtype))
            grad_w = grad_w + matmul(transpose(grads, use_kernel), transpose(chunk, use_kernel),
                                     at_least_fp32(x))  # (V, D)
        ctx.save_for_backward(torch.cat(grad_xs), grad_w.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_w = ctx.saved_tensors
        return None, None, grad_x * grad.type_as(grad_x), grad_w * grad.type_as(grad_w), None, None, None


class FusedMLP(torch.autograd.Function):
    """relu2_mlp() of normalized x, with scales in FP8. Sources: 2026-01-10, 2026-06-11, record 92."""

    @staticmethod
    def forward(ctx, x, up, down, hidden_scale, pre_grad_scale, use_kernel: bool):
        """x (T, D), up and down (D, F) -> (T, D). hidden_scale (), pre_grad_scale (): of the hidden
        activation, and of the gradient of x @ up, or None. Their gradients are the amax of these two."""
        dtype = None
        if hidden_scale is not None:
            dtype = E4M3
        # Normalized rows have no entry above sqrt(D). The scale is the next power of two
        x_scale = 2.0 ** math.ceil(math.log2(x.size(1) ** 0.5 / 448))
        scaled_x = quantize(x.contiguous(), dtype, x_scale)
        up = quantize(up, dtype)
        down = quantize(down, dtype)
        multiply = relu2_matmul
        if use_kernel:
            multiply = launch_relu2_matmul
        hidden, hidden_t, hidden_amax = multiply(scaled_x, up, hidden_scale, x.dtype)  # (T, F), (F, T), ()
        ctx.multiply = multiply
        ctx.use_kernel = use_kernel
        ctx.save_for_backward(*scaled_x, *up, *down, *hidden, hidden_t.values, hidden_amax, pre_grad_scale)
        return matmul(hidden, down, x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad):
        """grad (T, D) -> gradients of x (T, D), up and down (D, F), and two amax ()."""
        (x, x_scale, up, up_scale, down, down_scale, hidden, hidden_scale, hidden_t, hidden_amax,
         pre_grad_scale) = ctx.saved_tensors
        dtype = None
        if hidden_scale is not None:
            dtype = E5M2
        scaled_grad = quantize(grad.contiguous(), dtype, 2.0**-3)
        pre, pre_t, pre_amax = ctx.multiply(
            scaled_grad, Scaled(down, down_scale), pre_grad_scale, grad.dtype, Scaled(hidden, hidden_scale))
        grad_x = matmul(pre, Scaled(up, up_scale), grad.dtype)
        grad_up = matmul(transpose(Scaled(x, x_scale), ctx.use_kernel), pre_t, grad.dtype)
        grad_t = transpose(scaled_grad, ctx.use_kernel)
        grad_down = matmul(grad_t, Scaled(hidden_t, hidden_scale), grad.dtype)
        return grad_x, grad_up, grad_down, hidden_amax, pre_amax, None


def fused_relu2_mlp(x, up, down, scales, use_kernel: bool = True, use_fp8: bool = False):
    """relu2_mlp() by FusedMLP. use_fp8: FP8 matmuls with these scales."""
    if not use_fp8:
        scales = None, None
    return FusedMLP.apply(x, up, down, *scales, use_kernel)


def relu2_matmul(x: Scaled, w: Scaled, out_scale, dtype, hidden: Scaled | None = None):
    """x (T, D), w (D, F) -> relu(x w)^2 (T, F). With hidden: (x w) * 2 sqrt(hidden). The second form is the
    gradient of backward, if x is the gradient of the output and hidden is the first form's result. dtype: of
    the product x w. Returns the result in the dtype of x, its transpose (F, T), and its amax (). It is
    called with FP8 only, because without FP8 there is no fused MLP but the kernel."""
    y = matmul(x, transpose(w), dtype, fast=hidden is None).float()
    if hidden is None:
        y = F.relu(y).square()
    else:
        y = y * 2 * (hidden.values.float() * hidden.scale).sqrt()
    out = quantize(y, x.values.dtype, out_scale)
    return out, transpose(out), y.abs().max()


def launch_relu2_matmul(x: Scaled, w: Scaled, out_scale, _dtype, hidden: Scaled | None = None):
    """relu2_matmul() by one kernel, which does not store x w."""
    rows, inner = x.values.shape
    columns = w.values.size(1)
    depth = 128 // x.values.element_size()
    width = 128
    num_stages = 3
    if columns % 256 == 0 and depth > 32:  # four stages fit Hopper's memory
        width = 256
        num_stages = 4
    assert rows % 128 == columns % width == inner % depth == 0, "the tiles do not divide the matrices"

    weight = w.values
    saved = None if hidden is None else hidden.values
    out = x.values.new_empty(rows, columns)
    out_t = scales = amax = None  # of FP8
    limit = 0.0
    if out_scale is not None:
        weight = transpose(w).values.T  # the layout of FP8 tensor cores
        limit = torch.finfo(out.dtype).max
        product_scale = x.scale * w.scale
        if hidden is not None:
            product_scale = product_scale * hidden.scale.sqrt()
        out_t = out.new_empty(columns, rows)
        scales = torch.stack((product_scale, 1 / out_scale))
        amax = torch.zeros_like(product_scale)
    relu2_matmul_kernel[columns // width, rows // 128](
        x.values, weight, saved, out, out_t, scales, amax, rows, columns, inner, *weight.stride(),
        IS_BACKWARD=hidden is not None, LIMIT=limit, BLOCK_M=128, BLOCK_N=width, BLOCK_K=depth, num_warps=8,
        num_stages=num_stages)
    if out_t is None:
        out_t = out.T
    return Scaled(out, out_scale), Scaled(out_t, out_scale), amax


def launch_row_sums(grad, inverse, order, num_rows: int):
    """sum_rows() by one kernel without a sort, in a fixed order. order (T,) sorts inverse."""
    starts = torch.searchsorted(inverse[order], torch.arange(num_rows + 1, device=grad.device))
    width = grad.size(1)
    sums = grad.new_empty(num_rows, width)
    block = min(128, width & -width)  # it divides the width
    row_sums_kernel[num_rows, width // block](grad, order, starts, sums, width, block, 16, num_warps=1)
    return sums

# ==== TRITON KERNELS =======================================================================================
# Each program computes one tile or one row. Sums are in float32. Tests run them by Triton's interpreter.

if triton is not None:
    @triton.jit
    def split_halves(x):
        """x (T, K) -> first and second channel of each pair, (T, K/2) each."""
        return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))

    @triton.jit
    def join_halves(first, second):
        x = tl.permute(tl.join(first, second), (0, 2, 1))
        return tl.reshape(x, (first.shape[0], 2 * first.shape[1]))

    @triton.jit
    def qkv_kernel(packed_ptr, cos_ptr, sin_ptr, softmax_scale_ptr, is_start_ptr, q_ptr, k_ptr, v_ptr,
                   grad_ptr, grad_t_ptr, T, WIDTH, H: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
                   N: tl.constexpr, IS_BACKWARD: tl.constexpr, FP8_SCALE: tl.constexpr, EPS: tl.constexpr,
                   HAS_NORM: tl.constexpr, HAS_OFFSET: tl.constexpr, BLOCK: tl.constexpr):
        """One head of q or k for BLOCK tokens: norm, rotation, key offset. Only the first N pairs rotate. In
        backward q, k and v are gradients, and the gradient of packed (T, WIDTH) is written to grad. The last
        slots copy the gradient of v. If FP8_SCALE > 0, grad is multiplied by it, and grad_t is its
        transpose. K is a power of 2."""
        slot = tl.program_id(1)
        tokens = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        HALF: tl.constexpr = K // 2
        columns = tl.arange(0, K)
        pairs = tl.arange(0, HALF)
        inside = (tokens[:, None] < T) & (slot * K + columns[None, :] < WIDTH)
        packed = tokens[:, None] * WIDTH + slot * K + columns[None, :]
        if slot < 2 * H:
            head, is_key = slot % H, slot >= H
            x = tl.load(packed_ptr + packed, mask=inside, other=0.0).to(tl.float32)
            inverse_rms = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / K + EPS) if HAS_NORM else 1.0
            x *= inverse_rms
            table = (tokens[:, None] * P + head % P) * HALF + pairs[None, :]
            rotates = (tokens[:, None] < T) & (pairs[None, :] < N)
            scale = tl.where(is_key, 1.0, tl.load(softmax_scale_ptr).to(tl.float32))
            cos = tl.load(cos_ptr + table, mask=rotates, other=1.0).to(tl.float32) * scale
            sin = tl.load(sin_ptr + table, mask=rotates, other=0.0).to(tl.float32) * scale

            # Key offset: unrotated channels go to the next token. The first of a sequence also keeps them
            stays = inside
            if HAS_OFFSET:
                is_moved = ((columns % HALF >= N) & is_key)[None, :]
                is_start = tl.load(is_start_ptr + tokens, mask=tokens < T, other=0)[:, None] != 0
                has_next = tl.load(is_start_ptr + tokens + 1, mask=tokens + 1 < T, other=1)[:, None] == 0
                stays = inside & tl.where(is_moved, is_start, True)
                moves = inside & tl.where(is_moved, has_next, False)
            here = tokens[:, None] * (H * K) + head * K + columns[None, :]
            out_ptr = q_ptr
            if is_key:
                out_ptr = k_ptr
            if IS_BACKWARD:
                grad = tl.load(out_ptr + here, mask=stays, other=0.0).to(tl.float32)
                if HAS_OFFSET:
                    grad += tl.load(out_ptr + here + H * K, mask=moves, other=0.0).to(tl.float32)
                first, second = split_halves(grad)
                grad = join_halves(first * cos - second * sin, second * cos + first * sin)
                if HAS_NORM:
                    grad = (grad - x * (tl.sum(grad * x, axis=1, keep_dims=True) / K)) * inverse_rms
            else:
                first, second = split_halves(x)
                y = join_halves(first * cos + second * sin, second * cos - first * sin)
                y = y.to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + here, y, mask=stays)
                if HAS_OFFSET:
                    tl.store(out_ptr + here + H * K, y, mask=moves)
        elif IS_BACKWARD:  # forward has no such slots
            place = tokens[:, None] * (WIDTH - 2 * H * K) + (slot - 2 * H) * K + columns[None, :]
            grad = tl.load(v_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if IS_BACKWARD:
            if FP8_SCALE > 0:
                grad = tl.clamp(grad * FP8_SCALE, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
            grad = grad.to(grad_ptr.dtype.element_ty)
            tl.store(grad_ptr + packed, grad, mask=inside)
            if FP8_SCALE > 0:
                columns_t = (slot * K + columns).to(tl.int64)
                tl.store(grad_t_ptr + columns_t[:, None] * T + tokens[None, :], grad.T, mask=inside.T)

    @triton.jit
    def compute_tanh(x, IS_APPROXIMATE: tl.constexpr):
        """tanh of float32 x. NVIDIA GPUs have an instruction with an error of 2^-11."""
        if IS_APPROXIMATE:
            return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32,
                                             is_pure=True, pack=1)
        else:
            return 1 - 2 / (1 + tl.exp(2 * x))

    @triton.jit
    def cross_entropy_kernel(logits_ptr, targets_ptr, weights_ptr, losses_ptr, grads_ptr, V,
                             NUM_TARGETS: tl.constexpr, CAP: tl.constexpr, SHIFT: tl.constexpr,
                             WIDTH: tl.constexpr, GRAD_SCALE: tl.constexpr, IS_APPROXIMATE: tl.constexpr,
                             BLOCK: tl.constexpr):
        """Loss of one token and d loss / d logits. Capped logits are 0 to CAP, so softmax needs no maximum.
        With t = tanh((logit + SHIFT) / (2 WIDTH)) the capped logit is CAP / 2 (1 + t), and its derivative is
        CAP / (4 WIDTH) (1 - t^2). The gradients of the targets are corrected at the end."""
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * V
        grads_ptr += row * V
        targets_ptr += row * NUM_TARGETS
        LOG2E: tl.constexpr = 1.4426950408889634
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=0.0,
                             eviction_policy="evict_last").to(tl.float32)  # the loop below reads them again
            t = compute_tanh((logits + SHIFT) * (0.5 / WIDTH), IS_APPROXIMATE)
            total += tl.where(at < V, tl.exp2((t - 1) * (CAP / 2 * LOG2E)), 0.0)
        log_total = tl.log2(tl.sum(total, axis=0))  # log2 of sum exp(capped - CAP)
        loss = log_total * 0.0
        all_weights = log_total * 0.0
        for i in tl.static_range(NUM_TARGETS):
            target = tl.load(targets_ptr + i)
            weight = tl.where(target >= 0, tl.load(weights_ptr + i), 0.0)
            logit = tl.load(logits_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
            t_target = compute_tanh((logit + SHIFT) * (0.5 / WIDTH), IS_APPROXIMATE)
            loss += weight * (log_total / LOG2E - (t_target - 1) * (CAP / 2))
            all_weights += weight
        tl.store(losses_ptr + row, loss)
        factor = CAP / (4 * WIDTH) / GRAD_SCALE
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=0.0,
                             eviction_policy="evict_first").to(tl.float32)
            t = compute_tanh((logits + SHIFT) * (0.5 / WIDTH), IS_APPROXIMATE)
            grad = all_weights * factor * (1 - t * t) * tl.exp2((t - 1) * (CAP / 2 * LOG2E) - log_total)
            tl.store(grads_ptr + at, grad.to(grads_ptr.dtype.element_ty), mask=at < V)
        tl.debug_barrier()  # the stores above come first
        for i in tl.static_range(NUM_TARGETS):
            target = tl.load(targets_ptr + i)
            weight = log_total * 0.0
            for j in tl.static_range(NUM_TARGETS):
                weight += tl.where(tl.load(targets_ptr + j) == target, tl.load(weights_ptr + j), 0.0)
            logit = tl.load(logits_ptr + target, mask=target >= 0, other=0.0).to(tl.float32)
            t_target = compute_tanh((logit + SHIFT) * (0.5 / WIDTH), IS_APPROXIMATE)
            target_grad = all_weights * tl.exp2((t_target - 1) * (CAP / 2 * LOG2E) - log_total) - weight
            target_grad *= factor * (1 - t_target * t_target)
            tl.store(grads_ptr + target, target_grad.to(grads_ptr.dtype.element_ty), mask=target >= 0)

    @triton.jit
    def row_sums_kernel(grad_ptr, order_ptr, starts_ptr, sums_ptr, WIDTH, BLOCK: tl.constexpr,
                        READS: tl.constexpr):
        """BLOCK channels of sums[i], the sum of rows order[starts[i] : starts[i + 1]] of grad (T, WIDTH)."""
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        end = tl.load(starts_ptr + row + 1)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(tl.load(starts_ptr + row), end, READS):
            at = start + tl.arange(0, READS)
            read = tl.load(order_ptr + at, mask=at < end, other=0)
            tile = tl.load(grad_ptr + read[:, None] * WIDTH + columns, mask=at[:, None] < end, other=0.0)
            total += tl.sum(tile.to(tl.float32), axis=0)
        tl.store(sums_ptr + row * WIDTH + columns, total)

    @triton.jit
    def transpose_kernel(x_ptr, out_ptr, ROWS, COLUMNS, BLOCK: tl.constexpr):
        rows = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        columns = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
        tile = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :], mask=inside)
        tl.store(out_ptr + columns[:, None] * ROWS + rows[None, :], tile.T, mask=inside.T)

    @triton.jit
    def relu2_matmul_kernel(x_ptr, w_ptr, hidden_ptr, out_ptr, out_t_ptr, scales_ptr, amax_ptr, ROWS,
                            COLUMNS, INNER, STRIDE_K, STRIDE_N, IS_BACKWARD: tl.constexpr,
                            LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                            BLOCK_K: tl.constexpr):
        """One tile of relu(X W)^2, or of X W * 2 sqrt(hidden) in backward. Tiles must divide the matrices.
        If LIMIT > 0, X W is multiplied by scales[0], amax is updated, the result is multiplied by scales[1]
        and clamped to LIMIT, and its transpose is stored, too. NaN stays NaN, and its amax is infinite. The
        cache holds all of W, so tiles that run together share rows of X."""
        rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + rows[:, None] * INNER + depth[None, :]
        w_ptrs = w_ptr + depth[:, None] * STRIDE_K + columns[None, :] * STRIDE_N
        here = rows[:, None] * COLUMNS + columns[None, :]
        if IS_BACKWARD and LIMIT > 0:  # before the loop, else Triton 3.6 computes the roots twice
            hidden = tl.load(hidden_ptr + here)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for _ in range(0, INNER, BLOCK_K):
            total = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), total)
            x_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * STRIDE_K
        if LIMIT > 0:
            total *= tl.load(scales_ptr)
        if IS_BACKWARD:
            if LIMIT == 0:
                hidden = tl.load(hidden_ptr + here)
            total *= 2 * tl.sqrt(hidden.to(tl.float32))
        else:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total *= total
        if LIMIT > 0:
            tl.atomic_max(amax_ptr, tl.max(tl.where(total == total, tl.abs(total), float("inf"))))
            total = tl.maximum(total * tl.load(scales_ptr + 1), -LIMIT, propagate_nan=tl.PropagateNan.ALL)
            total = tl.minimum(total, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + here, total)
        if LIMIT > 0:
            tl.store(out_t_ptr + columns.to(tl.int64)[:, None] * ROWS + rows[None, :], total.T)

# ############################## PART THREE: INFRASTRUCTURE #################################################

# ==== DEVICE ===============================================================================================
# The device, the process group, and rank 0's choices at startup, which the run stores as options.

class RunError(Exception):
    """A run that cannot continue. main() prints the message as one line and exits with `status`."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status  # 1: failed, 2: bad input, 128 + n: stopped by signal n


@contextmanager
def file_errors():
    """Turn an error of the file system, e.g. of a full disk, into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(str(error)) from None


@dataclass(frozen=True)
class Runtime:
    """Device and choices of a process. The default is one CPU rank, float32, and the code of part one."""

    device: torch.device = torch.device("cpu")
    comm: Comm = dataclasses.field(default_factory=lambda: Comm())
    dtype: torch.dtype = torch.float32  # of activations and of the orthogonalization
    use_compile: bool = False
    fast: frozenset[str] = frozenset()  # names in FORMS that replace code of part one
    peak_flops: float = 0.0  # measured FLOP/s of a large matmul. MFU is relative to this rate
    notes: tuple[str, ...] = ()  # lines about the choices, printed once
    started: float = dataclasses.field(default_factory=lambda: time.perf_counter())

    @property
    def world_size(self):
        return self.comm.world_size

    @property
    def is_main(self):
        return self.comm.rank == 0

    def compile(self, fn):
        """torch.compile fn if this run compiles. All shapes are static."""
        if not self.use_compile:
            return fn
        torch._dynamo.config.recompile_limit = 64  # of one code object, which all segments share
        return torch.compile(fn, dynamic=False)


def env_int(name: str, default: int):
    return int(os.environ.get(name, default))


LAUNCHERS = {"srun": "SLURM_NTASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}  # and their number of processes


def start_runtime(cfg: Config):
    """Select the device and join the process group of torchrun, if there is one."""
    for launcher, variable in LAUNCHERS.items():
        if env_int(variable, 1) > 1 and "RANK" not in os.environ:
            raise RunError(f"{variable}={os.environ[variable]} without torchrun: each process would train "
                           f"alone. Write {launcher} ... torchrun --nnodes=... (docs/nodes.md), or unset "
                           f"{variable} for one process", 2)
    use_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    if cfg.device == "cuda" and not use_cuda:
        raise RunError("--device=cuda, but PyTorch sees no CUDA device: use --device=cpu", 2)
    rank, local_rank, world_size = env_int("RANK", 0), env_int("LOCAL_RANK", 0), env_int("WORLD_SIZE", 1)
    check_world_size(cfg, world_size)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        check_gpu(device)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if world_size == 1:
        return Runtime(device)
    networks = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in networks:
            raise RunError(f"GLOO_SOCKET_IFNAME={name}: choose among {', '.join(networks)}", 2)
    dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None,
                            timeout=LONG_TIMEOUT)
    return Runtime(device, Comm(rank, world_size, dist.new_group(backend="gloo", timeout=LONG_TIMEOUT),
                                dist.new_group(timeout=LONG_TIMEOUT)))


def check_gpu(device):
    """Raise RunError if this rank has no GPU, or if this PyTorch has no kernels for it."""
    num_gpus = torch.cuda.device_count()
    if device.index >= num_gpus:
        raise RunError(f"{env_int('LOCAL_WORLD_SIZE', 1)} ranks on this machine, but PyTorch sees "
                       f"{num_gpus} GPUs: start at most {num_gpus}", 2)
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        major, minor = torch.cuda.get_device_capability(device)
        raise RunError(
            f"{torch.cuda.get_device_name(device)} has capability {major}.{minor}, and PyTorch "
            f"{torch.__version__} was built for {', '.join(torch.cuda.get_arch_list())}: install another "
            f"build of PyTorch (docs/trouble.md), or use --device=cpu ({str(error).splitlines()[0]})",
            2) from None


def choose_precision(cfg: Config, rt: Runtime):
    """Choose dtype, compiler and fast forms by short trials. All ranks use rank 0's choices."""
    print_phase("check of the fast forms", rt)
    dtype, peak_flops, dtype_line = choose_dtype(cfg, rt.device)
    has_compiler = get_capability(rt.device) >= FLEX_CAPABILITY
    use_compile = cfg.compile == "on" or cfg.compile == "auto" and has_compiler
    rt = dataclasses.replace(rt, dtype=dtype, use_compile=use_compile)
    fast, lines = choose_fast_forms(cfg, rt)
    lines[0] = f"{dtype_line}, torch.compile {'on' if use_compile else 'off'}, {lines[0]}"
    choices = dict(dtype=dtype, use_compile=use_compile, fast=fast, peak_flops=peak_flops,
                   notes=tuple(lines))
    return dataclasses.replace(rt, **rt.comm.broadcast_object(choices))


def describe_choices(rt: Runtime):
    fp8 = rt.fast & {*FP8_FORMS}
    return dict(dtype=str(rt.dtype)[6:], compile="on" if rt.use_compile else "off",
                fast=sorted(rt.fast - fp8) or ["off"], fp8="on" if fp8 else "off")


def clock(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure_matmul(device, dtype, size: int):
    a = torch.randn(size, size, device=device).to(dtype)
    timer = benchmark.Timer("a @ a.T", globals=dict(a=a), num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.timeit(6).median


def supports_bfloat16(device):
    """Whether the device supports bfloat16, fast or slow."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 0)


def choose_dtype(cfg: Config, device):
    """Choose the dtype of activations. Returns (dtype, FLOP/s of a large matmul, a line for the log)."""
    is_cuda, has_bf16 = device.type == "cuda", supports_bfloat16(device)
    if cfg.dtype == "bfloat16" and not has_bf16:
        raise RunError("--dtype=bfloat16 needs a GPU of capability 8.0 (Ampere): use --dtype=auto", 2)
    if not is_cuda:
        # oneDNN multiplies float32 matrices in half of MKL's time on AMD. This setting makes PyTorch use it,
        # but also allows rounding to bfloat16. It is reset if oneDNN rounds, as with AMX
        setting = torch.backends.mkldnn.matmul
        setting.fp32_precision = "bf16"
        a = torch.full((256, 256), 1 + 2.0**-12)  # 1 in bfloat16
        if (a @ a)[0, 0] == 256:
            setting.fp32_precision = "ieee"
        # PyTorch before 2.13 does not report the features of a processor
        features = getattr(torch.cpu, "get_capabilities", dict)()
        has_bf16 = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    chosen = "bfloat16" if has_bf16 else "float32"
    dtype = getattr(torch, chosen if cfg.dtype == "auto" else cfg.dtype)
    rate = measure_matmul(device, dtype, 8192 if is_cuda else 512)
    speed = f"{rate / 1e12:.0f} TFLOP/s" if is_cuda else f"{rate / 1e9:.0f} GFLOP/s"
    warning = ", slow on this processor" if dtype == torch.bfloat16 and not has_bf16 else ""
    return dtype, rate, f"activations: {str(dtype)[6:]}{warning} (matmul: {speed})"


def read_peak_memory_mib(rt: Runtime):
    """Peak memory in MiB of training on a GPU, or of the whole process on a CPU."""
    if rt.device.type == "cuda":
        return torch.cuda.max_memory_allocated(rt.device) >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> (20 if sys.platform == "darwin" else 10)


def record_event(device):
    """An event behind the copies that have been started on a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def pin(tensor):
    """The tensor in pinned memory. If the system has too little of it, as WSL2, the tensor itself."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        print_once(f"copies to the GPU are slow: pin_memory fails ({str(error).splitlines()[0]})")
        return tensor


@functools.cache
def print_once(line: str):
    print(line, flush=True)


class Stop(AbstractContextManager):
    """A request to stop. All ranks follow it after the same step. If ranks > 1, this is one step later."""

    def __init__(self, rt: Runtime):
        self.rt, self.work, self.flag = rt, None, torch.zeros(1, dtype=torch.int64)
        self.requested = 0  # exit status that this rank asks for. 0: go on
        self.is_immediate = False
        self.old_handlers = {}

    def catch_signals(self):
        """Turn SIGINT, SIGTERM and SIGUSR1 into requests. On one rank the same signal acts as in Python the
        next time. Outside the main thread nothing is caught. A signal that is ignored stays ignored."""
        def handle(signum: int, _frame):
            self.requested = self.requested or 128 + signum
            if self.is_immediate:
                self.follow()
            if self.rt.world_size == 1:  # a terminal and torchrun may both send a signal to several ranks
                signal.signal(signum, self.old_handlers[signum])

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self.old_handlers[number] = signal.signal(number, handle)

    def __exit__(self, *_):
        for number, handler in self.old_handlers.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self):
        """A signal, also an earlier one that no exchange() has seen, ends this block: RunError."""
        self.is_immediate = True
        try:
            self.follow()
            yield
        finally:
            self.is_immediate = False

    def follow(self):
        if self.requested:
            raise RunError(f"stopped by {signal.Signals(self.requested - 128).name}", self.requested)

    def exchange(self):
        """The exit status that any rank asks for, or 0. All ranks call it after each step."""
        if self.rt.world_size == 1:
            return self.requested
        status = self.finish_exchange()
        self.flag = torch.tensor([self.requested])
        self.work = self.rt.comm.start_max(self.flag)
        return status

    def finish_exchange(self):
        """Finish the last exchange(). Returns the exit status that any rank asks for, or 0."""
        if self.rt.world_size == 1:
            return self.requested
        if self.work is not None:
            self.work.wait()
        return self.flag.item()


@dataclass
class TrainClock:
    """Counts the seconds of training in progress.train_time, up to the time `started`. Inside paused() it
    stands still. read(), outside of paused(), adds the seconds since `started`, without waiting for the
    GPU."""

    device: torch.device
    progress: Progress
    started: float  # time of the start, or of the end of the last pause

    def read(self):
        return self.progress.train_time + time.perf_counter() - self.started

    @contextmanager
    def paused(self):
        self.progress.train_time += clock(self.device) - self.started
        yield
        self.started = clock(self.device)

# ==== COMM =================================================================================================
# torchrun ends all ranks when one dies. If one stalls, the timeout of a collective ends the waiting ranks.

STEP_TIMEOUT = datetime.timedelta(minutes=2)  # of a collective in a step. The guard may compile in one
LONG_TIMEOUT = datetime.timedelta(hours=1)  # for waits during compilation and file access


@dataclass
class Comm:
    """Collectives of one rank. A separate group keeps all-gathers from queueing behind reduce-scatters."""

    rank: int = 0
    world_size: int = 1
    gloo_group: dist.ProcessGroup | None = None  # on the CPU, for stop requests and objects
    all_gather_group: dist.ProcessGroup | None = None

    def reduce_scatter(self, full):
        """Sum this rank's shard (M/N, ...) of (M, ...) over ranks, in place. Returns work to wait for."""
        return reduce_scatter_single(self.local_shard(full), full, async_op=True)

    def all_gather(self, full, shard):
        """Fill (M, ...) from the shards (M/N, ...) of all ranks. Returns work to wait for."""
        return all_gather_single(full, shard, group=self.all_gather_group, async_op=True)

    def all_to_all(self, sent, send_counts: Iterable[int], receive_counts: Iterable[int]):
        """Send the next send_counts[i] rows to rank i. Returns the received rows, and work to wait for."""
        if self.world_size == 1:
            return sent, None
        received = sent.new_empty(sum(receive_counts), *sent.shape[1:])
        work = dist.all_to_all_single(received.view(torch.uint8), sent.contiguous().view(torch.uint8),
                                      receive_counts, send_counts, async_op=True)
        return received, work

    def all_reduce(self, tensor, operation=dist.ReduceOp.SUM):
        """Sum, or another operation, in place over ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor, operation)
        return tensor

    def start_max(self, tensor):
        """Start the maximum over ranks of a tensor on the CPU, in place."""
        return dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.gloo_group, async_op=True)

    def local_shard(self, full):
        """This rank's (M/N, ...) view of (M, ...)."""
        return full.unflatten(0, (self.world_size, -1))[self.rank]

    def broadcast(self, tensor):
        if self.world_size > 1:
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)  # bytes, for any dtype

    def broadcast_object(self, value):
        """Return rank 0's plain Python object on every rank."""
        return self.gather_objects(value)[0]

    def gather_objects(self, value):
        """List all ranks' plain Python objects in the order of ranks, on every rank."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.gloo_group)
        return values

    def barrier(self):
        self.gather_objects(None)

    def set_timeout(self, timeout: datetime.timedelta):
        for group in (dist.group.WORLD, self.all_gather_group) if self.world_size > 1 else ():
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def close(self):
        """Leave the process groups at the end of a run. References to them are dropped first, because a
        group ends its threads when nothing holds it. A gloo thread that outlives Python's shutdown would
        abort the process."""
        self.gloo_group = None
        self.all_gather_group = None
        if self.world_size > 1:
            dist.destroy_process_group()


# PyTorch 2.13 renamed these two functions
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def share_problem(problem, rt: Runtime):
    """Raise RunError on all ranks if one of them has a problem."""
    for found in filter(None, rt.comm.gather_objects(problem)):
        raise RunError(found, 2)

# ==== SHARD FILES ==========================================================================================
# Token files: reading and checking. data/README.md describes the format.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
SHARD_REMEDY = "fetch or build it again, or change the options (data/README.md)"


@dataclass(frozen=True, eq=False)
class Shard:
    tokens: np.ndarray  # uint16, mapped from the file. No np.memmap, because its slices are slow
    bounds: np.ndarray  # index of the first token of each document, and the number of tokens
    bos: int
    sha256: str


@file_errors()
def read_shard_header(path: str):
    """Read (number of tokens, vocabulary size, BOS) of a shard. RunError if header or size is wrong."""
    header = np.fromfile(path, dtype="<i4", count=SHARD_HEADER_BYTES // 4)
    if len(header) * 4 < SHARD_HEADER_BYTES or header[0] != SHARD_MAGIC or header[1] != SHARD_VERSION:
        raise RunError(f"{path} is not a token shard (magic {SHARD_MAGIC}, version {SHARD_VERSION}): "
                       "convert text with ./run.sh data/text.py PATH --out FOLDER", 2)
    size, needed = os.path.getsize(path), SHARD_HEADER_BYTES + 2 * max(1, int(header[2]))
    if size != needed:
        raise RunError(f"{path} has {size} bytes, but needs {needed} by its header: {SHARD_REMEDY}", 2)
    return int(header[2]), int(header[3]) or 50257, int(header[4]) or 50256


@file_errors()
def open_shard(path: str, vocab_size: int):
    """Map and check a .bin shard. RunError names the file and the problem."""
    num_tokens, shard_vocab, bos = read_shard_header(path)
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=num_tokens)
    bounds = np.append(np.flatnonzero(tokens == bos), num_tokens)
    sha256 = hashlib.sha256(tokens).hexdigest()
    listing = Path(path).with_name("corpus.json")
    listed = {}
    try:
        if listing.exists():
            listed = json.loads(listing.read_text()).get("sha256", {})
    except ValueError as error:
        raise RunError(f"{listing} is damaged ({error}): {SHARD_REMEDY}", 2) from None
    problem = ""
    if shard_vocab != vocab_size:
        problem = f"is for --vocab_size={shard_vocab}, but this run has --vocab_size={vocab_size}"
    elif tokens.max() >= vocab_size:
        problem = f"has token {tokens.max()}, but its vocabulary size is {vocab_size}"
    elif len(bounds) == 1:
        problem = f"has no BOS (token {bos})"
    elif listed.get(os.path.basename(path), sha256) != sha256:
        problem = f"does not fit the SHA-256 in {listing}, which data/text.py wrote"
    if problem:
        raise RunError(f"{path} {problem}: {SHARD_REMEDY}", 2)
    return Shard(np.asarray(tokens), bounds, bos, sha256)


def find_shards(pattern: str, field: str):
    """List files of a glob pattern, or shards of a folder, sorted. A relative one means the current folder,
    else the folder of this script. RunError says how to get them."""
    paths = []
    for folder in (Path(), Path(__file__).resolve().parent):
        place = str(folder / pattern)
        if os.path.isdir(place):
            place = f"{glob.escape(place)}/{field.removesuffix('_files')}_*.bin"
        paths = paths or sorted(glob.glob(place))
    if not paths:
        raise RunError(f"--{field}={pattern} matches no file: get FineWeb with ./run.sh "
                       "data/cached_fineweb10B.py 10 (--vocab_size=50257), the PyTorch source with ./run.sh "
                       "data/text.py (257), tiny Shakespeare with ./run.sh data/tiny_shakespeare.py (257), "
                       "or your own text with ./run.sh data/text.py PATH --out FOLDER (257)", 2)
    return paths


def scan_shards(cfg: Config, shards: list[Shard]):
    """Yield (index, shard) of the training shards, once per epoch. New ones are appended to shards."""
    paths = find_shards(cfg.train_files, "train_files")
    for _ in range(cfg.epochs):
        for index, path in enumerate(paths):
            if index == len(shards):  # opened when the first epoch needs it
                shards.append(open_shard(path, cfg.vocab_size))
            yield index, shards[index]


def fit_steps(cfg: Config):
    """cfg with the numbers that follow from the training files: num_iterations, if it is 0, and
    val_loss_every, if it is -1. Reads only the headers of the files."""
    if not cfg.num_iterations:
        seq_len = max(stage.seq_len for stage in cfg.full_stages)
        num_tokens = 0
        for path in find_shards(cfg.train_files, "train_files"):
            size, *_ = read_shard_header(path)
            num_tokens += (size - 1) // seq_len * seq_len  # a sequence shares a token with the next
        num_steps = cfg.epochs * num_tokens // max(stage.tokens_per_step for stage in cfg.full_stages)
        cfg = dataclasses.replace(cfg, num_iterations=max(1, num_steps))
    if cfg.val_loss_every < 0:
        cfg = dataclasses.replace(cfg, val_loss_every=-(-cfg.num_iterations // 10))
    return cfg


def fingerprint(shards: Iterable[Shard]):
    return hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()[:16]

# ==== COMMAND LINE =========================================================================================
# From a command line to a Config: preset, options, --without. To add a check, add it to find_problems().

# Parts of a recipe that --without leaves out, and the options that leave each one out. More parts are
# options with an `off` value, and fields of LayerSpec that are off by default, see list_parts(). Fields of
# `layers` and `stages` are set in all rows
PARTS = {
    "muon": dict(matrix_rule="adamw", matrix_lr=0.0018, matrix_betas=(0.9, 0.95), matrix_weight_decay=0.1,
                 mlp_lr_mul=(1.0, 1.0)),  # AdamW of record 2
    "row_adam": dict(groups=dict(ngram=dict(rule="adamw"))),
    "weight_decay": dict(groups={name: dict(weight_decay=0.0) for name in RECORD_32_GROUPS}),
    "late_every": dict(groups={name: dict(late_every=0) for name in RECORD_32_GROUPS}),
    "adam_odd_steps": dict(groups={name: dict(every=1) for name in RECORD_32_GROUPS}),
    "batch_warmup": dict(stages=dict(tokens_per_step=None, seq_len=None, lr_factor=1.0)),
    "multi_token": dict(stages=dict(loss_weights=((1, 1),))),
    "prefix_weight": dict(stages=dict(prefix_weight=())),
    "num_classes": dict(stages=dict(num_classes=None)),
    "dropped_mlp": dict(layers=dict(mlp=True)),
}


def list_parts():
    """{name: options that leave out this part of a recipe}, for --without."""
    parts = dict(PARTS)
    for field in dataclasses.fields(Config):
        if field.metadata["off"] is not None:
            parts[field.name] = {field.name: field.metadata["off"]}
    for field in dataclasses.fields(LayerSpec):
        if not field.default:  # a mechanism that is off by default
            parts[field.name] = dict(layers={field.name: field.default})
    return parts


GROUP_OPTIONS = {f"{group}_lr": (group, "lr") for group in RECORD_32_GROUPS} | {
    f"matrix_{field}": ("matrix", field) for field in ("rule", "betas", "weight_decay")}
get_types = functools.cache(typing.get_type_hints)


def look_up(table, name):
    if name not in table:
        near = difflib.get_close_matches(name, table, 1, cutoff=0.8)
        remedy = f"did you mean {near[0]}?" if near else f"choose among {', '.join(table)}"
        raise ValueError(f"unknown name {name!r}: {remedy}")
    return table[name]


def parse_text(text: str, kind: type):
    """Text of the command line -> a value as JSON has it, for an option of this type."""
    if kind is str:
        return text
    if text == "()":  # as --help shows an empty list
        return []
    if kind is bool:
        return dict(on=True, true=True, off=False, false=False).get(text.lower(), text)
    if kind == tuple[str, ...]:
        return text.split(",") if text else []
    if kind in (tuple[LayerSpec, ...], tuple[Stage, ...], dict[str, Group]):
        try:
            return json.loads(Path(text).read_text() if text.endswith(".json") else text)
        except ValueError as error:
            raise ValueError(f"this is no JSON ({error}): give JSON, or a .json file") from None
    with suppress(ValueError, SyntaxError):  # convert() refuses text that is no number
        return ast.literal_eval(text or "()")
    return text


def convert(value, kind: type):
    """A value of JSON -> an annotated type. ValueError and others: no fit."""
    if kind is bool and isinstance(value, str):  # on and off are allowed in JSON, too
        value = parse_text(value, bool)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        kinds = arguments
        if arguments[-1] is Ellipsis:
            kinds = arguments[:1] * len(value)
        if len(kinds) != len(value):
            raise ValueError(f"{list(value)} has length {len(value)} instead of {len(kinds)}")
        return tuple(map(convert, value, kinds))
    if type(None) in arguments:
        return None if value is None else convert(value, arguments[0])
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        types = get_types(kind)
        missing = [field.name for field in dataclasses.fields(kind)
                   if field.default is dataclasses.MISSING and field.name not in value]
        if missing:
            raise ValueError(f"the row {value} needs {', '.join(missing)}")
        return kind(**{name: convert(item, look_up(types, name)) for name, item in value.items()})
    if kind is int and isinstance(value, float) and value.is_integer():  # 1e3
        return int(value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        names = {bool: "on or off", int: "a whole number", float: "a number",
                 tuple: "a list: give values separated by commas"}
        expected = names.get(getattr(kind, "__origin__", kind), getattr(kind, "__name__", kind))
        raise ValueError(f"{value!r} is not {expected}")
    return value


def set_option(cfg: Config, name: str, value):
    """cfg with one option set to text, or to a value as JSON has it."""
    if name in GROUP_OPTIONS:
        group, field = GROUP_OPTIONS[name]
        return change_groups(cfg, {group: {field: value}})
    kind = look_up({**get_types(Config), **GROUP_OPTIONS}, name)
    if isinstance(value, str):
        value = parse_text(value, kind)
    if name == "groups":
        return change_groups(cfg, value)
    if name in ("layers", "stages") and isinstance(value, dict):  # fields of all rows
        rows = getattr(cfg, name) or build_layers(cfg.num_layers, cfg.layer_pattern)
        value = [{**vars(row), **value} for row in rows]
    return dataclasses.replace(cfg, **{name: convert(value, kind)})


def change_groups(cfg: Config, rows: dict[str, Group | dict]):
    """cfg with other parameter groups. A Group replaces a group, a dict some of its fields."""
    groups = dict(cfg.groups)
    for name, row in convert(rows, dict).items():
        values = dict(vars(look_up(groups, name)))
        for field, value in (row if isinstance(row, dict) else vars(row)).items():
            kind = look_up(get_types(Group), field)
            values[field] = parse_text(value, kind) if isinstance(value, str) else value
        groups[name] = convert(values, Group)
    return dataclasses.replace(cfg, groups=groups)


def change_options(cfg: Config, values: dict):
    """Set options to text, or to values as JSON has them. RunError if one is unknown or of another type."""
    for name in sorted(values, key=lambda name: name == "layers"):  # layers follow from num_layers
        try:
            cfg = set_option(cfg, name, values[name])
        except (ValueError, TypeError, OSError) as error:
            raise RunError(f"--{name}={str(values[name])[:100]}: {error}", 2) from None
    if values.keys() & {"model_dim", "head_dim"} and "num_heads" not in values:
        cfg = dataclasses.replace(cfg, num_heads=max(1, cfg.model_dim // cfg.head_dim))
    return cfg


OLD_PRESETS = {"track_1": "record_32", "frontier": "record_92", "smoke_frontier": "smoke_92"}  # new names


def load_preset(name: str):
    """A preset with its parents' values: of PRESETS, presets/NAME.json, or a .json file. The file is a
    preset, the output of --print_config, or the result of a run. With the last two, cfg.preset is the name
    that they contain."""
    folders = Path(__file__).resolve().parent, Path.cwd()
    places = [folder / "presets" / f"{name}.json" for folder in folders]
    path = None
    with suppress(OSError):  # of a name that is too long for a file
        path = next(filter(Path.is_file, [*places, Path(name)]), None)
    if name in PRESETS:
        if path in places:
            raise RunError(f"{path} has the name of a preset of train_gpt.py: give the file another name", 2)
        parent, _, changes = PRESETS[name]
        return change_options(load_preset(parent) if parent else Config(), {**changes, "preset": name})
    if path is None:
        old_name = f"now named {OLD_PRESETS[name]}" if name in OLD_PRESETS else "no preset and no file"
        files = sorted(path.stem for path in folders[0].glob("presets/*.json"))
        raise RunError(f"--preset={name} is {old_name}: give {', '.join([*PRESETS, *files])}, or the "
                       "path of a .json file", 2)
    try:
        content = json.loads(path.read_text())
        if "config" in content or "derived" in content:
            cfg = config_from_dict(content.get("config", content))
            return dataclasses.replace(cfg, record="", out=".",
                                       resume="" if cfg.resume == "auto" else cfg.resume)
        parent = content.pop("parent")
        return change_options(load_preset(parent), {**content, "preset": path.stem})
    except RunError as error:
        raise RunError(f"{path}: {error}", 2) from None
    except json.JSONDecodeError as error:
        raise RunError(f"{path} is no JSON: {error}", 2) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is no result, and no preset with a parent, as {{\"parent\": \"laptop\", "
                       f"\"num_layers\": 6}}: {error!r}", 2) from None


def choose_preset(name: str, device: str | None):
    """The preset that auto means on this device."""
    if name != "auto":
        return name
    return "record_32" if device != "cpu" and torch.cuda.is_available() else "laptop"


def make_config(values: dict):
    """The config of values["preset"] with the other values and --without. RunError if they contradict."""
    options = {key: value for key, value in values.items() if key != "preset"}
    name = choose_preset(values.get("preset", "auto"), values.get("device"))
    cfg = change_options(load_preset(name), options)
    if not cfg.layers:
        cfg = dataclasses.replace(cfg, layers=build_layers(cfg.num_layers, cfg.layer_pattern))
    if "without" in options:
        parts = dict(sorted(list_parts().items()))
        for part in cfg.without:
            try:
                cfg = change_options(cfg, look_up(parts, part))
            except ValueError as error:
                raise RunError(f"--without={part[:100]}: {error}", 2) from None
        cfg = change_options(cfg, {key: value for key, value in options.items()  # given options win
                                   if key not in ("layers", "stages")})
    check(cfg)
    return cfg


class Parser(argparse.ArgumentParser):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._negative_number_matcher = re.compile(r"-[.\d]")  # by default -1e-3 is an option

    def error(self, message: str):
        raise RunError(message, 2)


def parse_argv(argv: list[str]):
    """Split a command line into {option: text}. '-' and '_' are equivalent in names."""
    argv = [re.sub("^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in argv]
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="auto")
    first.add_argument("--device")
    given = first.parse_known_args(argv)[0]
    cfg = load_preset(choose_preset(given.preset, given.device))

    parser = Parser("train_gpt.py", "%(prog)s [--option=value ...]    (or torchrun ..., or ./run.sh)",
                    f"Presets: {', '.join(PRESETS)}, and files in presets/. Defaults of {cfg.preset}:",
                    argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--print_config", action="store_true",
                        help="the config as JSON. Needs no device, and data only for num_iterations=0")
    options = {name: row for name, row in list_values(cfg).items()
               if hasattr(cfg, name) or name in GROUP_OPTIONS}
    for name, (field, default) in options.items():
        text = field.metadata["help"]
        if name not in ("layers", "stages", "groups"):
            text += f" [{default}]"
        if "int" in field.type or "float" in field.type:
            text += f", {field.metadata['low']} to {field.metadata['high']}"
        kind = re.sub(r"tuple\[[a-z].*", "a,b", field.type)  # not of rows, which are JSON
        parser.add_argument(f"--{name}", help=text, metavar="|".join(field.metadata["choices"]) or kind)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        names = [*options, *PRESETS]
        near = difflib.get_close_matches(unknown[0].partition("=")[0].lstrip("-"), names, 1, cutoff=0.8)
        hint = f"did you mean --{'preset=' * (near[0] in PRESETS)}{near[0]}? " if near else ""
        raise RunError(f"{unknown[0][:100]} is not an option: {hint}docs/from_nanogpt.md translates others, "
                       "such as --learning_rate to --matrix_lr", 2)
    return vars(values)


def list_values(cfg: Config):
    """{name: (field, value)} of all options and of all fields of groups."""
    owners = {"": cfg} | {f"{name}_": group for name, group in cfg.groups.items()}
    return {prefix + field.name: (field, getattr(owner, field.name))
            for prefix, owner in owners.items() for field in dataclasses.fields(owner)}


def check(cfg: Config):
    """Raise RunError for the first option that is out of range, and for the first contradiction. Fields of
    layers and stages are checked by find_problems()."""
    for name, (field, value) in list_values(cfg).items():
        low, high, choices = (field.metadata[key] for key in ("low", "high", "choices"))
        items = value if isinstance(value, tuple) else (value,)
        if choices and not set(items) <= set(choices):
            raise RunError(f"--{name}={value}: choose among {', '.join(choices)}", 2)
        if not all(low <= item <= high for item in items if isinstance(item, (int, float))):
            raise RunError(f"--{name}={value} is not in the range {low} to {high}", 2)
    for is_wrong, line in find_problems(cfg):
        if is_wrong:
            raise RunError(line, 2)


def find_problems(cfg: Config):
    """Yield (condition, error line). A condition may rely on the ones before it."""
    yield not cfg.stages, "--stages is empty: give at least one"
    for name, unit in dict(head_dim=4, short_qk_dim=4, value_gate_dim=2, val_seq_len=BLOCK,
                           tokens_per_step=BLOCK).items():
        value = getattr(cfg, name)
        yield value % unit != 0, f"--{name}={value} is not a multiple of {unit}"
    for name, unit_name in dict(val_tokens="val_seq_len", num_heads="qk_group_heads",
                                model_dim="mudd_groups").items():
        value = getattr(cfg, name)
        unit = getattr(cfg, unit_name) or 1  # 0: the mechanism is off
        yield value % unit != 0, f"--{name}={value} is not a multiple of {unit_name}={unit}"
    width = cfg.num_heads * cfg.head_dim
    longest = cfg.micro_batch_tokens
    yield cfg.attention_gate_dim > width, f"--attention_gate_dim={cfg.attention_gate_dim} exceeds {width}"
    yield (cfg.model_dim != width,
           f"--model_dim={cfg.model_dim} is not --num_heads={cfg.num_heads} * --head_dim={cfg.head_dim}: "
           f"without --num_heads give a multiple of {cfg.head_dim}")
    for name, group in cfg.groups.items():
        rules = [key for key, rule in RULES.items() if not (
            rule.row_state and name != "ngram" or rule.whole_matrix and name != "matrix")]
        label = "--matrix_rule=" if name == "matrix" else f"--groups: {name} has rule="
        yield group.rule not in rules, f"{label}{group.rule}: choose among {', '.join(rules)}"
    has_zeros = cfg.zero_init != "off" and not cfg.has_output_gain
    rule = cfg.groups["matrix"].rule
    yield (RULES[rule].keeps_norm and has_zeros,
           f"--matrix_rule={rule} keeps the norm of every matrix: give --gains=output or --zero_init=off")
    for name in (cfg.track, cfg.record or "none"):
        yield not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,99}", name), (
            f"--record or --track={name[:100]}: at most 100 lower-case letters, digits, '_', '-' and '.'")
    forms = ["auto", "off", *(name for name in FORMS if name not in FP8_FORMS)]
    yield not set(cfg.fast) <= set(forms), f"--fast={','.join(cfg.fast)}: choose among {', '.join(forms)}"
    for stage in cfg.full_stages:
        yield (min(stage.window_long, stage.window_short, stage.lr_factor) < 0 or stage.duration <= 0,
               f"--stages: durations must be above 0, windows and lr_factor at least 0: {stage}")
        yield (not 0 < stage.seq_len <= min(longest, stage.tokens_per_step) or stage.seq_len % BLOCK != 0
               or stage.tokens_per_step % stage.seq_len != 0,
               f"seq_len={stage.seq_len}: give a multiple of {BLOCK} that divides tokens_per_step="
               f"{stage.tokens_per_step}, at most --micro_batch_tokens={longest}")
    table_bytes = cfg.ngram_rows * cfg.model_dim * getattr(torch, cfg.embed_dtype).itemsize
    yield (cfg.guard and table_bytes > 2 * 10**9,
           f"--guard=on copies the n-gram table, which has {table_bytes / 1e9:.1f} GB: give --guard=off")
    least_rows = 2 * (cfg.ngram_order - 1)  # two for each length
    yield 0 < cfg.ngram_rows < least_rows, f"--ngram_rows={cfg.ngram_rows}: give 0, or at least {least_rows}"
    yield len(cfg.val_windows) not in (0, 2), f"--val_windows={cfg.val_windows}: give long,short"
    yield (not cfg.num_iterations and cfg.sequence_start != "anywhere",
           "--num_iterations=0 needs --sequence_start=anywhere, which reads all tokens of a file")
    yield (cfg.extension_steps and (cfg.extension_steps >= cfg.num_iterations or len(cfg.stages) == 1),
           f"--extension_steps={cfg.extension_steps} must be below --num_iterations="
           f"{cfg.num_iterations}, and needs two stages")
    yield (len(cfg.layers) != cfg.num_layers,
           f"--layers has {len(cfg.layers)} rows, but --num_layers={cfg.num_layers}")
    for i, layer in enumerate(cfg.layers):
        known = {"x_in", *(f"h{j}" for j in range(i)), *(f"ve{other.value_embed}" for other in cfg.layers)}
        lacking = sorted(layer.inputs() - known)
        yield (bool(lacking), f"--layers: layer {i} reads {', '.join(lacking)}, not known there: "
               "change the row, or leave out what reads it, too, as in --without=mudd_out,value_embed")
        yield (layer.attention not in ("long", "short", "none"),
               f"--layers: layer {i} has attention={layer.attention}: give long, short or none")
        yield (layer.gates_from not in (None, *range(i + 1)),
               f"--layers: layer {i} has gates_from={layer.gates_from}: give a layer of 0 to {i}")
        yield ("attn_in" in layer.mudd_out and layer.attention == "none",
               f"--layers: layer {i} has attn_in in mudd_out, but no attention")
        yield (not layer.mlp and (layer.second_mlp or "mlp_in" in layer.mudd_out),
               f"--layers: layer {i} has second_mlp, or mlp_in in mudd_out, but no mlp")
        yield (layer.paired and cfg.num_heads % 2 != 0,
               f"--layers: layer {i} is paired, but --num_heads={cfg.num_heads} is odd")
        yield (layer.v_dim is not None and not 0 < layer.v_dim <= cfg.head_dim,
               f"--layers: layer {i} has v_dim={layer.v_dim}: give 1 to --head_dim={cfg.head_dim}")


def check_world_size(cfg: Config, world_size: int):
    """Raise RunError if ranks cannot share a step."""
    for stage in cfg.full_stages:
        num_sequences = stage.tokens_per_step // stage.seq_len
        if num_sequences % world_size:
            raise RunError(f"--tokens_per_step={stage.tokens_per_step}: {world_size} ranks cannot share "
                           f"{num_sequences} sequences: the number of ranks must divide it", 2)


def derived_numbers(cfg: Config, world_size: int):
    """Numbers that follow from the config, for --print_config and the run record. Numbers of a step belong
    to the last stage."""
    check_world_size(cfg, world_size)
    last = cfg.full_stages[-1]
    num_micro_batches, sequences = divide_step(cfg, world_size, last)
    with torch.device("meta"):
        model = GPT(cfg)
        num_params = sum(p.numel() for name, p in model.named_parameters()
                         if name != "embed" or not cfg.tie_head or cfg.untie_frac < 1)
    schedule = Schedule(cfg)
    return dict(num_params=num_params, flops_per_token=count_flops(cfg, model, schedule),
                grad_accum_steps=num_micro_batches, ranks=world_size,
                tokens_per_rank=last.tokens_per_step // world_size,
                tokens_per_micro_batch=sequences * last.seq_len,
                padded_vocab_size=cfg.padded_vocab_size, train_tokens=schedule.count_tokens(),
                scheduled_steps=schedule.scheduled_steps,
                stage_ends=[end for _, _, end in schedule.stage_ranges()])


def count_flops(cfg: Config, model: GPT, schedule: Schedule):
    """FLOPs of forward and backward per training token: 6 per weight of a block's matrices and of the head,
    and 6 per channel and key. Gates are left out."""
    weights = sum(param.numel() for param in model.parameters() if param.spec.kind)
    flops = 0
    for stage, start, end in schedule.stage_ranges():
        longest = stage.seq_len
        if cfg.sequence_start == "document":
            longest = min(longest, stage.max_doc_len)
        per_token = weights + cfg.model_dim * (stage.num_classes or cfg.padded_vocab_size)
        for block in model.blocks:
            if block.attention is not None:
                H, K, L, *_ = block.attention.heads
                per_token += H * (K + L) * min(longest, getattr(stage, f"window_{block.spec.attention}"))
        flops += 6 * per_token * stage.tokens_per_step * (end - start)
    return round(flops / schedule.count_tokens())


def plain_dict(cfg: Config):
    return json.loads(json.dumps(vars(cfg), default=vars))


def config_from_dict(values: dict):
    return change_options(Config(), {name: value for name, value in values.items() if name != "derived"})

# ==== RUN RECORD ===========================================================================================
# The identity of a run, and its files: script, and, named by the unique run_id, log, result (json) and
# events. Only rank 0 writes. records/README.md describes the formats.

# Options that change neither weights nor losses. The checkpoint of --resume=PATH is in the key, by itself
NOT_IN_KEY = ("out", "resume", "checkpoint_every", "telemetry_every", "tracker")
TRACK_DATA = {"laptop": "fd405a8b3e48e7ca", "shakespeare": "096b3533110f2759"}  # corpus fingerprints
# Options that a track fixes. nanoGPT reads Shakespeare in blocks of 256
TRACK_VALIDATION = {"laptop": dict(val_tokens=131_072),
                    "shakespeare": dict(val_tokens=111_360, val_seq_len=256)}


def make_key(run: dict, *ignored: str):
    """The identity of a run: script, config as it was asked for, data, and the checkpoint it began with.
    run: the description or result of a run. ignored: further options that may differ."""
    config = {name: value for name, value in run["config"].items()
              if name not in ("derived", *NOT_IN_KEY, *ignored)}
    facts = (run["script_sha256"], run["corpus_fingerprint"], run["resumed_from"], config)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def describe_run(cfg: Config, rt: Runtime, argv: list[str], train_shards: list[Shard],
                 val_shards: list[Shard]):
    """Metadata of a run, made at its start. RunError if the ranks have other scripts, options or data."""
    started = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    shards = [*train_shards, *val_shards]
    if len({shard.bos for shard in shards}) > 1:
        raise RunError(f"the shards of --train_files={cfg.train_files} and --val_files={cfg.val_files} have "
                       f"other BOS tokens: {sorted({shard.bos for shard in shards})}", 2)
    if {shard.sha256 for shard in train_shards} & {shard.sha256 for shard in val_shards}:
        raise RunError(f"a shard of --val_files={cfg.val_files} is in --train_files={cfg.train_files}", 2)
    run = dict(run_id=f"{started}_seed{cfg.seed}_{os.urandom(4).hex()}",
               script_sha256=hashlib.sha256(SCRIPT).hexdigest(), corpus_fingerprint=fingerprint(shards),
               git_commit=find_commit(), argv=argv, **describe_machine(rt),
               config={**plain_dict(cfg), "derived": derived_numbers(cfg, rt.world_size)}, resumed_from="")
    if cfg.resume not in ("", "auto"):
        run["resumed_from"] = read_metadata(Path(cfg.resume))["run_id"] + "/" + Path(cfg.resume).name
    run["key"] = make_key(run)
    first = rt.comm.broadcast_object(run)
    share_problem(f"rank {rt.comm.rank} has another script, config or data than rank 0"
                  if first["key"] != run["key"] else "", rt)
    share_problem(find_conflict(cfg, first) if rt.is_main else "", rt)
    return first


def find_commit():
    """HEAD commit of the script's repository, with -dirty if a tracked file differs. "" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with suppress(OSError):  # git is not installed
        folder = Path(__file__).resolve().parent
        return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout.strip()
    return ""


def describe_machine(rt: Runtime):
    """Versions and hardware."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, cuda=torch.version.cuda,
                    numpy=np.__version__)
    hardware = dict(device=rt.device.type, ranks=rt.world_size,
                    threads=torch.get_num_threads(), cpu=platform.machine(),
                    simd=torch.backends.cpu.get_cpu_capability())
    with suppress(OSError):
        for name in re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()):
            hardware["cpu"] = name
    if rt.device.type == "cuda":
        properties = torch.cuda.get_device_properties(rt.device)
        hardware.update(gpu=properties.name, gpu_memory_mib=properties.total_memory >> 20)
    return dict(versions=versions, hardware=hardware)


def print0(text, rt: Runtime):
    """Print and flush a line on rank 0, above the progress bar."""
    if rt.is_main:
        try:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()
        except OSError:  # nobody reads it any more
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.close(devnull)


def print_phase(name, rt: Runtime):
    print0(f"{time.perf_counter() - rt.started:.0f} s: {name}", rt)


def report_progress(batches: Iterable, num_batches: int, name, rt: Runtime):
    """Yield the batches. Every ten seconds print how many have been computed."""
    printed = time.perf_counter()
    for done, batch in enumerate(batches):
        if time.perf_counter() > printed + 10:
            printed = time.perf_counter()
            print_phase(f"{name}: {done} of {num_batches} batches", rt)
        yield batch


def write_atomic(path: Path, data: bytes | Callable[[typing.BinaryIO], None]):
    """Write bytes, or call data(file), under a temporary name. Then sync and rename the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            data(file) if callable(data) else file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        cause = error
        if isinstance(error, RuntimeError) and error.__context__:  # torch.save() replaces e.g. a Ctrl-C
            cause = error.__context__
        if isinstance(cause, OSError):  # e.g. of a full disk. It does not always name its file
            cause = OSError(cause.errno, cause.strerror, str(path))
        raise cause from None
    finally:
        partial.unlink(missing_ok=True)


def find_result_folder(cfg: Config):
    """Folder of the results of this run. A record's folder name has the date of its first result."""
    if not cfg.record:
        return Path(cfg.out, "logs")
    root = Path(cfg.out, "records", cfg.track)
    existing = sorted(root.glob(f"????-??-??_{glob.escape(cfg.record)}"))
    return existing[0] if existing else root / f"{time.strftime('%Y-%m-%d', time.gmtime())}_{cfg.record}"


def flatten_groups(config: dict):
    """The config of a result, with entries such as matrix_lr in place of its parameter groups."""
    fields = {f"{group}_{field}": value for group, row in config.get("groups", {}).items()
              for field, value in row.items()}
    return {name: value for name, value in config.items() if name != "groups"} | fields


@file_errors()
def find_conflict(cfg: Config, run: dict):
    """The reason why this run's folders or record's results do not fit it, or ""."""
    results = find_result_folder(cfg)
    for folder in (Path(cfg.out, "logs"), results.parent, Path(cfg.out, "checkpoints")):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(f"{folder}/.", os.W_OK):
            return f"--out={cfg.out}: {folder} is no folder that can be written"
    if cfg.record and run["corpus_fingerprint"] != TRACK_DATA.get(cfg.track, run["corpus_fingerprint"]):
        return f"--record={cfg.record}: these are not the data of track {cfg.track}: give another --track"
    for name, value in TRACK_VALIDATION.get(cfg.track, {}).items():
        if cfg.record and getattr(cfg, name) != value:
            return f"--record={cfg.record}: track {cfg.track} has --{name}={value}: give another --track"
    for path in sorted(results.glob("[0-9]*_seed*.json"))[-1:] if cfg.record else ():
        result = json.loads(path.read_text())
        has_key = "key" in result and make_key(result, "seed") == make_key(run, "seed")
        if not has_key or result["hardware"] != run["hardware"]:
            ours = flatten_groups(json.loads(json.dumps(run["config"])))  # without tuples
            theirs = flatten_groups(result["config"])
            found = [f"{name}={str(theirs.get(name))[:40]}" for name in ours
                     if name not in ("seed", "derived", *NOT_IN_KEY) and ours[name] != theirs.get(name)]
            facts = dict(script="script_sha256", data="corpus_fingerprint", start="resumed_from",
                         hardware="hardware")
            found += [f"another {name}" for name, key in facts.items() if result.get(key) != run[key]]
            return (f"--record={cfg.record} has a result with {', '.join(found[:5])} ({path}): choose "
                    "another name")
    return ""


def measure_run(trainer: Trainer, run: dict):
    """Speed and memory of a finished run, for its result."""
    rt, progress = trainer.rt, trainer.progress
    tokens_per_s = progress.tokens / progress.train_time
    flops = tokens_per_s * run["config"]["derived"]["flops_per_token"]
    return dict(
        train_time_ms=round(progress.train_time * 1000), tokens_per_s=round(tokens_per_s),
        mfu=round(flops / (rt.peak_flops * rt.world_size), 4),
        peak_memory_mib=read_peak_memory_mib(rt),
        resumed_at=progress.resumed_at, guard_actions=progress.num_actions)


class TensorBoard:
    """TensorBoard with the interface of trackio and wandb. It writes logs/tensorboard/RUN_ID."""

    def __init__(self, out: str):
        self.folder = Path(out, "logs", "tensorboard")

    def init(self, name: str, **_):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(self.folder / name)

    def log(self, values: dict, step: int):
        for name, value in values.items():
            if isinstance(value, dict):
                self.log({f"{name}/{key}": entry for key, entry in value.items()}, step)
            elif isinstance(value, int | float):
                self.writer.add_scalar(name, value, step)

    def finish(self):
        self.writer.close()


class RunLog:
    """Log lines, events, progress and result of a run. Without a terminal it prints at most 19 progress
    lines."""

    LOSSES_AT_ONCE = 20  # losses that a GPU keeps before it hands them over. A printed mean has no more

    def __init__(self, cfg: Config, rt: Runtime, run: dict, saved: dict, progress):
        """run: description of this run. saved: metadata of the checkpoint from which it continues, or {}."""
        self.cfg, self.rt, self.run, self.progress = cfg, rt, run, progress
        self.bar = self.tracker = None
        self.files = {}  # by suffix, open from __enter__() on
        self.val_points = list(saved.get("val_points", ()))  # [step, loss, milliseconds]
        self.train_points = list(saved.get("train_points", ()))  # [step, loss], the mean of all ranks
        self.waiting = []  # (step, loss of this rank, seconds on the clock)

    @file_errors()
    def __enter__(self):
        name = self.cfg.tracker if self.rt.is_main else "off"  # trackio and wandb have one interface
        if name != "off":
            try:
                self.tracker = importlib.import_module(name)
            except ImportError as error:
                raise RunError(f"--tracker={name} needs its package ({error}): "
                               f"{shlex.quote(sys.executable)} -m pip install {name}", 2) from None
            if name == "tensorboard":
                self.tracker = TensorBoard(self.cfg.out)
        suffixes = (".txt", ".jsonl") if self.cfg.telemetry_every or self.cfg.guard else (".txt",)
        for suffix in suffixes if self.rt.is_main else ():
            path = Path(self.cfg.out, "logs", self.run["run_id"] + suffix)
            self.files[suffix] = open(path, "ab", buffering=0)
        if self.files and not self.files[".txt"].tell():
            self.write(".txt", f"{json.dumps(self.run)}\n{'=' * 100}")
        self.call_tracker("init", project="train_gpt", name=self.run["run_id"], config=self.run["config"])
        return self

    def call_tracker(self, function: str, *args, **options):
        """Call the tracker, if there is one. If it raises, the run goes on without it, with a line."""
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, function)(*args, **options)
        except Exception as error:  # e.g. of its network
            self.tracker = None
            self.print(f"--tracker={self.cfg.tracker} is off: {function}() raises {error!r}"[:200])

    def __exit__(self, _kind, error, _trace):
        if self.bar is not None:
            self.bar.close()
        self.call_tracker("finish")
        if isinstance(error, RunError):
            self.write(".txt", str(error))
        for file in self.files.values():
            file.close()

    def write(self, suffix: str, line: str):
        with suppress(KeyError, OSError):  # a full disk does not end a run
            self.files[suffix].write(f"{line}\n".encode())

    def print(self, text: str):
        self.write(".txt", text)
        print0(text, self.rt)

    def write_event(self, event: str, step: int, **entries):
        if self.cfg.tracker != "off":
            self.flush_losses()  # trackers drop steps before the last one
        self.write(".jsonl", json.dumps(dict(event=event, step=step, **entries)))
        self.call_tracker("log", {event: entries}, step=step)

    def print_start(self, *lines: str):
        """Print sizes, choices and further lines, and begin to show progress."""
        cfg, derived = self.cfg, self.run["config"]["derived"]
        line = (f"preset {cfg.preset}: {derived['num_params'] / 1e6:.2f} M parameters, "
                f"{self.rt.world_size} x {self.rt.device.type}, "
                f"{derived['train_tokens'] / 1e6:.2f} M training tokens")
        for text in filter(None, (line, *self.rt.notes, *lines)):
            self.print(text)
        is_terminal = sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).lines > 0
        if is_terminal and self.rt.is_main:  # a terminal without a size shows no bar
            self.bar = tqdm(total=cfg.num_iterations, initial=self.progress.step, unit="step",
                            mininterval=0.5, dynamic_ncols=True)

    def log_validation(self, val_loss: float):
        step, num_iterations = self.progress.step, self.cfg.num_iterations
        time_ms = 1000 * self.progress.train_time
        self.val_points.append([step, val_loss, round(time_ms)])
        self.write_event("validation", step, val_loss=val_loss, train_time_ms=round(time_ms))
        self.print(f"step:{step}/{num_iterations} val_loss:{val_loss:.4f} train_time:{time_ms:.0f}ms "
                   f"step_avg:{time_ms / max(step, 1):.2f}ms")
        self.check_loss("validation", step, val_loss)

    def log_step(self, loss, seconds: float):
        """Show progress, and log the mean loss of ranks, on a GPU LOSSES_AT_ONCE together. RunError: see
        check_loss()."""
        step, num_iterations = self.progress.step, self.cfg.num_iterations
        self.waiting.append((step, loss, seconds))
        if self.rt.device.type == "cpu" or len(self.waiting) == self.LOSSES_AT_ONCE:
            self.flush_losses()
        text = f"{self.progress.tokens / seconds:,.0f} tokens/s"
        steps_per_line = -(-num_iterations // 20)
        if self.train_points:
            num_steps = min(steps_per_line, self.LOSSES_AT_ONCE)
            mean = np.mean([loss for _, loss in self.train_points[-num_steps:]])
            text = f"loss {mean:.4f}, {text}"
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update()
        elif step < num_iterations and step % steps_per_line == 0:
            self.print(f"step {step}/{num_iterations}: {text}")

    def flush_losses(self):
        """Log all steps so far. All ranks must call it."""
        if not self.waiting:
            return
        steps, losses, times = zip(*self.waiting)
        self.waiting = []
        mean = self.rt.comm.all_reduce(torch.stack(losses)) / self.rt.world_size
        for step, loss, seconds in zip(steps, mean.tolist(), times):
            self.train_points.append([step, loss])
            self.call_tracker("log", dict(train_loss=loss), step=step)
            self.write(".txt", f"step:{step}/{self.cfg.num_iterations} train_time:{1000 * seconds:.0f}ms "
                               f"step_avg:{1000 * seconds / step:.2f}ms train_loss:{loss:.4f}")
            self.check_loss("training", step, loss)

    def check_loss(self, kind: str, step: int, loss: float):
        """Raise RunError if a loss is not finite. With --guard only the final validation is checked."""
        is_last = kind == "validation" and step == self.cfg.num_iterations
        if not math.isfinite(loss) and (not self.cfg.guard or is_last):
            remedy = "lower the learning rates" if step else "no step was made, so look at the last edit"
            raise RunError(f"the {kind} loss of step {step} is {loss}: {remedy}")

    @file_errors()
    def finish(self, measured: dict):
        """Write the script and the result, and print a summary."""
        if not self.rt.is_main:
            return
        cfg, run, folder = self.cfg, self.run, find_result_folder(self.cfg)
        points = [[step, loss if math.isfinite(loss) else None] for step, loss in self.train_points]
        result = dict(track=cfg.track, preset=cfg.preset, seed=cfg.seed, **run, train_points=points,
                      val_points=self.val_points, final_val_loss=self.val_points[-1][1], **measured)
        script = folder / ("train_gpt.py" if cfg.record else f"train_gpt_{run['script_sha256'][:12]}.py")
        write_atomic(script, SCRIPT)
        for suffix, file in self.files.items() if cfg.record else ():
            shutil.move(file.name, folder / f"{run['run_id']}{suffix}")
        path = folder / f"{run['run_id']}.json"
        write_atomic(path, (json.dumps(result, indent=1) + "\n").encode())
        compile_time = ("compile_time_s",) * self.rt.use_compile
        for name in ("preset", "seed", "final_val_loss", "train_time_ms", *compile_time, "tokens_per_s",
                     "mfu", "peak_memory_mib"):
            print0(f"{name + ':':<17}{result[name]}", self.rt)
        print0(f"result:          {path}", self.rt)

# ==== CHECKPOINTS ==========================================================================================
# checkpoints/<preset>_seed<seed>_<key>/<run_id>/step_000250/ has a state.json, and one file for each rank,
# with the rows that the rank owns. So no rank gathers, and any number of ranks can continue. A run changes
# only its own folder. Loading executes no code. To store more, extend collect_rows(), or Progress.

@dataclass
class Progress:
    """State of a run except its tensors."""

    step: int = 0
    tokens: int = 0
    train_time: float = 0.0  # seconds on the clock
    resumed_at: list[int] = dataclasses.field(default_factory=list)
    good_steps: list[list[float]] = dataclasses.field(default_factory=list)  # guard: [loss, gradient norm]
    num_actions: int = 0  # rollbacks by the guard


def list_steps(folder: Path):
    """Checkpoints in the folder of a run, the highest step first. Some may be incomplete, see is_whole()."""
    steps = [path for path in folder.glob("step_*") if path.name[5:].isdecimal()]
    return sorted(steps, key=read_step, reverse=True)


def read_step(path: Path):
    """The step of a checkpoint's folder. From step 1,000,000 on names have seven digits."""
    return int(path.name[5:])


def read_metadata(step: Path):
    """Read what a checkpoint, or a model.pt, stores besides tensors. RunError if it is neither."""
    try:
        if step.is_file():
            return json.loads(read_model(step)["metadata"])
        return json.loads((step / "state.json").read_text())
    except Exception as error:  # another file can raise any error
        fault = "does not exist"
        if step.exists():
            fault = f"is no folder step_... of a checkpoint, and no model.pt ({error})"
        raise RunError(f"{step} {fault}. --resume=auto finds the furthest checkpoint of this command",
                       2) from None


def read_model(path: Path):
    """Map a model.pt: its metadata, and its tensors by name of the parameter."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def list_files(step):
    return [step / f"rank{rank}.pt" for rank in range(read_metadata(step)["hardware"]["ranks"])]


def is_whole(step: Path, rt: Runtime):
    """Whether this rank's part of the files of a checkpoint exists and fits its checksums."""
    try:
        for path in list_files(step)[rt.comm.rank :: rt.world_size]:
            torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            assert not zipfile.ZipFile(path).testzip()
        return True
    except Exception:  # damage can raise any error
        return False


def open_tensors(step: Path):
    """Map the tensors of a checkpoint as {NAME/KEY: [(first row, rows)]}. Values have an empty key."""
    entries: dict[str, list[tuple[int, Tensor]]] = {}
    for path in list_files(step):
        for entry, rows in torch.load(path, map_location="cpu", mmap=True, weights_only=True).items():
            name, _, first = entry.rpartition("/")
            entries.setdefault(name, []).append((int(first), rows))
    return entries


def lock_run(folder: Path):
    """Lock the folder of a run until the returned file is closed. None if another process keeps the lock."""
    file = open(folder / ".lock", "a+b")  # network file systems need a file that is open for writing
    for second in range(60):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if second == 0:
                print(f"waiting up to 60 s for another process that trains {folder}", file=sys.stderr)
            time.sleep(1)
    file.close()
    return None


def remove_step(folder):
    """Remove a checkpoint. Without state.json it is none. So an interruption leaves no damaged one."""
    with suppress(OSError):
        (folder / "state.json").unlink()
    shutil.rmtree(folder, ignore_errors=True)


def find_key_folder(cfg: Config, run: dict):
    return Path(cfg.out, "checkpoints", f"{cfg.preset}_seed{cfg.seed}_{run['key']}")


def find_start(cfg: Config, run: dict, rt: Runtime):
    """Returns (checkpoint to continue from, its metadata, log line). The first of these that exists:

        1. None, if a run with this key has a result. It gives its name to this run. --resume=PATH is in the
           key, so such a run has begun with PATH, too
        2. The furthest whole step of all runs with this key: the run goes on
        3. The step --resume=PATH of another run
        4. The model.pt --resume=PATH. Its metadata are {}, because its run is over
        5. None: the run starts anew

    A run that goes on keeps its name: run["run_id"] becomes that of the checkpoint. All ranks must call
    it."""
    if not cfg.resume:
        return None, {}, ""
    finished = []
    for path in sorted(find_result_folder(cfg).glob(f"*_seed{cfg.seed}_*.json")) if rt.is_main else ():
        with suppress(OSError, ValueError, AttributeError):  # it may be of another program
            if json.loads(path.read_text()).get("key") == run["key"]:
                finished.append(path.stem)
    finished = rt.comm.broadcast_object(finished)
    if finished:
        run["run_id"] = finished[0]
        return None, {}, ""
    folder = find_key_folder(cfg, run)
    steps = []
    for run_folder in sorted(folder.glob("*_seed*"), reverse=True):
        steps += list_steps(run_folder)
    steps.sort(key=read_step, reverse=True)
    given = Path(cfg.resume)
    if cfg.resume != "auto" and not given.is_file():
        steps.append(given)
    steps = rt.comm.broadcast_object(steps)  # other nodes may see other folders
    for step in steps:
        if not all(rt.comm.gather_objects(is_whole(step, rt))):
            continue
        saved = read_metadata(step)
        if saved["key"] == run["key"]:
            run["run_id"] = step.parent.name
        if cfg.record and saved["hardware"] != run["hardware"]:
            raise RunError(f"--record={cfg.record}: {step} is of other hardware or ranks", 2)
        if saved["progress"]["step"] > cfg.num_iterations:
            raise RunError(f"{step} is beyond --num_iterations={cfg.num_iterations}", 2)
        line = f"resumed {step}"
        if step != steps[0]:
            line += f" ({steps[0]} is not whole)"
        if saved["corpus_fingerprint"] != run["corpus_fingerprint"]:
            line += (f". It has read {saved['progress']['tokens']:,} tokens of other data: this run skips "
                     "as many at the start of its own")
        return step, saved, line
    if given.is_file():
        return given, {}, f"begins with the weights of {given}"
    if cfg.resume != "auto":
        raise RunError(f"{cfg.resume} is damaged: give another --resume=PATH, or start without it", 2)
    return None, {}, f"starting anew: no whole checkpoint in {folder}"


def keep_choices(cfg: Config, run: dict, saved: dict):
    """cfg with the choices of a checkpoint. A run that goes on keeps all of them. A run that begins with the
    checkpoint of another run keeps those of options that are auto."""
    kept = {}
    for name, value in saved.get("choices", {}).items():
        if saved["key"] == run["key"] or getattr(cfg, name) in ("auto", ("auto",)):
            kept[name] = value
    return change_options(cfg, kept)


def collect_rows(trainer: Trainer):
    """This rank's rows as {NAME/KEY/FIRST_ROW: tensor}. Training draws no random numbers, so there is no
    state of a generator."""
    trainer.optimizer.finish()
    rows = {f"{name}/{key}/{first}": tensor[part] for bucket in trainer.optimizer.buckets
            for name, first, part in bucket.local_parts() for key, tensor in bucket.tensors().items()}
    if trainer.fp8_scales.leaves and trainer.rt.is_main:
        rows["fp8/scales/0"] = trainer.fp8_scales.read()
    return rows


def load_state(trainer: Trainer, step: Path, metadata: dict):
    """Restore a checkpoint of any number of ranks. Without metadata: the weights of a model.pt. RunError if
    an entry is missing, or does not fit."""
    if not metadata:
        load_weights(trainer, step)
        return
    optimizer, entries = trainer.optimizer, open_tensors(step)
    optimizer.step_count = metadata["optimizer_steps"]
    optimizer.set_tied(metadata["is_tied"])
    stored = {entry: (sum(len(rows) for _, rows in pieces), *pieces[0][1].shape[1:])
              for entry, pieces in entries.items()}
    needed = {f"{name}/{key}": (bucket.count_units(name), *tensor.shape[1:]) for bucket in optimizer.buckets
              for name in bucket.params for key, tensor in bucket.tensors().items()}
    stored.pop("fp8/scales", None)
    if differing := sorted(needed.items() ^ stored.items()):
        entry, shape = differing[0]
        raise RunError(f"{step} and this run differ in parameters or optimizer state, first in {entry} of "
                       f"shape {shape}: give the layers, sizes and update rules of its run", 2)

    for entry, rows in collect_rows(trainer).items():
        name, _, first = entry.rpartition("/")
        for start, piece in entries.get(name, ()):  # fp8/scales are optional
            low, high = max(start, int(first)), min(start + len(piece), int(first) + len(rows))
            if low < high:
                rows[low - int(first) : high - int(first)] = piece[low - start : high - start]
    for bucket in optimizer.buckets:
        bucket.start_gather()
        bucket.clear()
    optimizer.finish()
    for _, scales in entries.get("fp8/scales", ()):
        trainer.fp8_scales.set(scales)
    vars(trainer.progress).update(metadata["progress"])
    trainer.progress.resumed_at.append(trainer.progress.step)


def load_weights(trainer: Trainer, path: Path):
    """Begin with the weights of a model.pt. The optimizer state stays fresh."""
    optimizer, tensors = trainer.optimizer, read_model(path)["tensors"]
    optimizer.set_tied(trainer.model.is_tied and read_metadata(path)["is_tied"])
    stored = {name: tensor.numel() for name, tensor in tensors.items()}
    needed = {name: bucket.count_units(name) * math.prod(bucket.unit)
              for bucket in optimizer.buckets for name in bucket.params}
    if differing := sorted(needed.items() ^ stored.items()):
        name = differing[0][0]
        raise RunError(f"{name} has {stored.get(name, 0)} numbers in {path}, but {needed.get(name, 0)} in "
                       "this run: give the options of its run", 2)
    for bucket in optimizer.buckets:
        for name, first, part in bucket.local_parts():
            units = tensors[name].reshape(-1, *bucket.unit)
            bucket.shard[part] = units[first : first + part.stop - part.start].to(bucket.shard)
        if bucket.rule.keeps_norm:
            bucket.state["radius"].copy_(matrix_norm(bucket.shard))
        bucket.start_gather()
    optimizer.finish()


class Checkpoints(AbstractContextManager):
    """Writes a checkpoint file per rank, and keeps the two highest steps of this run."""

    KEPT = 2
    MODEL_BYTES = 10**9  # limit of model.pt
    LAST_BYTES = 8 * 10**9  # limit of a checkpoint of the last step without --checkpoint_every

    def __init__(self, cfg: Config, log, rt: Runtime, bos: int, loaded: Path | None):
        """loaded: the checkpoint that the run continues."""
        self.folder = find_key_folder(cfg, log.run) / log.run["run_id"]
        self.newest = loaded  # the last checkpoint that was loaded or saved
        self.newest_step = log.progress.step if loaded else -1
        self.is_extra = False  # whether `newest` is removed once the result is written
        self.log, self.rt, self.bos, self.lock = log, rt, bos, None
        self.has_started = False
        self.found = list_steps(self.folder)  # before the folder is locked
        self.problem = ""  # of the last save, e.g. a full disk

    def __exit__(self, *_):
        if self.lock:
            self.lock.close()

    def start(self):
        """Make and lock the folder, unless this is done. All ranks must call it."""
        if self.has_started:
            return
        problem = ""
        if self.rt.is_main:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self.lock = lock_run(self.folder)
                if self.lock is None:
                    problem = f"{self.folder} is in use by another process: wait for its end"
            except OSError as error:
                problem = str(error)
        share_problem(problem, self.rt)
        share_problem("" if self.folder.exists() else f"{self.folder} is not shared by all nodes", self.rt)
        if self.rt.is_main:
            for step in list_steps(self.folder):
                if read_step(step) > self.log.progress.step and not is_whole(step, Runtime()):
                    remove_step(step)
                elif self.newest and step not in self.found:
                    problem = f"{self.folder} was trained by another process meanwhile: start again"
        share_problem(problem, self.rt)
        self.has_started = True

    def save(self, trainer: Trainer):
        """Write step_<step>/, then remove old steps, or print what failed. All ranks must call it. The step
        is complete when the file of each rank has its name."""
        self.start()
        rt = self.rt
        self.newest_step = trainer.progress.step
        self.newest = folder = self.folder / f"step_{self.newest_step:06d}"
        if rt.is_main:
            remove_step(folder)  # of a run that was continued from an older step
        rt.comm.barrier()
        metadata = dict(
            self.log.run, progress=dataclasses.asdict(trainer.progress), is_tied=trainer.model.is_tied,
            optimizer_steps=trainer.optimizer.step_count, bos=self.bos, val_points=self.log.val_points,
            train_points=self.log.train_points)
        copies = {entry: rows.to("cpu", copy=True)  # a file of a view would have its whole bucket
                  for entry, rows in collect_rows(trainer).items()}
        problem = ""
        try:
            if rt.is_main:
                write_atomic(folder / "state.json", json.dumps(metadata).encode())
            write_atomic(folder / f"rank{rt.comm.rank}.pt", functools.partial(torch.save, copies))
        except OSError as error:
            problem = f"{folder} was not written: {error}"
        self.problem = max(rt.comm.gather_objects(problem))
        if self.problem:
            remove_step(folder)
            self.log.print(self.problem)
        if rt.is_main:
            for step in list_steps(self.folder)[self.KEPT :]:
                remove_step(step)

    def count_bytes(self, tensors: Iterable[Tensor]):
        """Bytes of the tensors of all ranks. All ranks must call it."""
        return sum(self.rt.comm.gather_objects(sum(tensor.nbytes for tensor in tensors)))

    def save_last(self, trainer: Trainer, must_save: bool):
        """Save the last step, unless it is saved, or large and not must_save. All ranks must call it."""
        step = trainer.progress.step
        if self.newest_step == step:  # saved for --checkpoint_every, or loaded
            self.is_extra = not self.log.cfg.checkpoint_every and self.newest.parent == self.folder
            return
        num_bytes = self.count_bytes(collect_rows(trainer).values())
        if num_bytes > self.LAST_BYTES and not must_save:
            size = f"{num_bytes / 1e9:.0f} GB"
            self.log.print(f"no checkpoint, because it has {size}: --checkpoint_every={step} writes it")
            return
        try:
            self.save(trainer)
            self.is_extra = not must_save and not self.problem
        except RunError as error:  # e.g. another process writes this run
            if must_save:
                raise
            self.log.print(str(error))
        if not must_save and not self.is_extra:  # the run goes on as if nothing had been tried
            self.problem = ""
            self.newest_step = -1

    def remove_last(self):
        if self.is_extra and self.rt.is_main:
            remove_step(self.newest)

    @contextmanager
    def name_weights(self):
        """If the final validation fails or is stopped, say where the weights are."""
        try:
            yield
        except Exception as error:
            status = getattr(error, "status", 1)
            is_saved = self.newest_step == self.log.progress.step and not self.problem
            if not is_saved or isinstance(error, RunError) and status < 128:
                raise
            reason = str(error).strip().splitlines() or [repr(error)]
            line = (f"in the final validation: {reason[0]}. {self.newest} has the weights. "
                    f"{self.name_way_on()} validates them, and --resume=PATH with another --val_seq_len "
                    "needs less memory")
            if isinstance(error, (RunError, torch.OutOfMemoryError)):
                raise RunError(line, status) from None
            raise RunError(line, status) from error

    def end(self, status: int):
        """End the run after a checkpoint. All ranks must call it."""
        if self.problem:
            raise RunError(self.problem)
        log = self.log
        self.rt.comm.barrier()  # torchrun ends all ranks when the first one exits
        name = signal.Signals(status - 128).name
        raise RunError(f"stopped by {name} after step {log.progress.step} of {log.cfg.num_iterations}: "
                       f"{self.newest}. {self.name_way_on()} continues", status)

    def name_way_on(self):
        """The option that continues this run. If other runs have its key, auto could choose one of them."""
        if self.log.cfg.resume:
            return f"--resume={shlex.quote(self.log.cfg.resume)}"
        is_alone = list(self.folder.parent.glob("*_seed*")) == [self.folder]
        return "--resume=auto" if is_alone else f"--resume={shlex.quote(str(self.newest))}"

    def write_model(self, trainer: Trainer):
        """Write model.pt: config and parameters, if they are small. All ranks must call it."""
        buckets = trainer.optimizer.buckets
        if self.count_bytes(bucket.shard for bucket in buckets) > self.MODEL_BYTES:
            return
        tensors = {name: (bucket.gather() if isinstance(bucket, Table) else param).detach().cpu()
                   for bucket in buckets for name, param in bucket.params.items()}
        if self.rt.is_main:
            path = self.folder / "model.pt"
            metadata = json.dumps(dict(self.log.run, is_tied=trainer.model.is_tied, bos=self.bos))
            with file_errors():
                write_atomic(path, functools.partial(torch.save, dict(metadata=metadata, tensors=tensors)))
            folders = Path(__file__).resolve().parents  # a record's script lies deeper in the project
            project = next((folder for folder in folders if (folder / "tools/sample.py").exists()), None)
            if project:
                run_sh = os.environ.get("RUN_SH", f"{os.path.relpath(project)}/run.sh")  # as typed
                command = shlex.join([run_sh, "tools/sample.py", str(path)])
                print0(f"sample:          {command}", self.rt)


def list_tensors(trainer: Trainer, with_tables: bool):
    """All tensors that training changes. Tables with sparse updates are among them only if with_tables."""
    buckets = [bucket for bucket in trainer.optimizer.buckets if with_tables or not bucket.rule.row_state]
    tensors = [tensor for bucket in buckets for tensor in (bucket.values, *bucket.state.values())]
    return [*tensors, *trainer.fp8_scales.leaves]


class Snapshot:
    """A copy in memory of parameters and optimizer state at one step. Tables with sparse updates are part of
    it only with_tables."""

    def __init__(self, trainer: Trainer, with_tables: bool = True):
        self.trainer = trainer
        self.with_tables = with_tables
        trainer.optimizer.finish()
        self.step_count, self.is_tied = trainer.optimizer.step_count, trainer.model.is_tied
        self.copies = [tensor.clone() for tensor in list_tensors(trainer, with_tables)]

    def restore(self):
        """Restore all bits of the snapshot, and discard all gradients."""
        optimizer = self.trainer.optimizer
        optimizer.finish()
        optimizer.step_count = self.step_count
        optimizer.set_tied(self.is_tied)
        for tensor, copy in zip(list_tensors(self.trainer, self.with_tables), self.copies):
            tensor.data.copy_(copy)
        for bucket in optimizer.buckets:
            bucket.clear()

# ==== TELEMETRY AND GUARD ==================================================================================
# Telemetry writes measurements into <run_id>.jsonl. The guard restores an earlier state if training
# diverges. train() calls them before and after a step. Telemetry reads norms of gradients, weights, updates
# and momentum, and the guard those of gradients.

def measure_norm(x):
    return torch.linalg.vector_norm(x, dtype=at_least_fp32(x))


class UpdateNorms:
    """Squared norms of this rank's part of one step, by parameter group: sums (groups, 4) of gradients, and
    if is_full of weights, updates and momentum. Of sparse tables it has only gradients."""

    def __init__(self, optimizer: Optimizer, is_full: bool):
        self.optimizer = optimizer
        self.is_full = is_full
        self.groups = sorted({bucket.group_name for bucket in optimizer.buckets})
        self.sums = torch.zeros(len(self.groups), 4, device=optimizer.buckets[0].shard.device)

    def update(self, bucket, calls: Calls):
        """Update a bucket and add its sums: gradient, weight, update, momentum. A gradient is a sum over the
        steps of a period, and divided by their number."""
        is_full = self.is_full and not bucket.rule.row_state
        if is_full:
            before = bucket.read_shard()
        last_step, late_step = self.optimizer.step_count - 1, self.optimizer.late_step
        norms = [measure_norm(bucket.grad) / bucket.group.period(last_step, late_step)]
        bucket.update(calls)  # clears the gradient
        if is_full:
            weight = bucket.read_shard()
            momentum = next(iter(bucket.state.values()))
            norms += [measure_norm(weight), measure_norm(weight - before), measure_norm(momentum)]
        self.sums[self.groups.index(bucket.group_name), : len(norms)] += torch.stack(norms).square()


class Monitor:
    """Telemetry of every telemetry_every-th step, and the guard."""

    def __init__(self, trainer: Trainer, log):
        self.trainer, self.log = trainer, log
        self.guard = Guard(trainer, log) if trainer.cfg.guard else None
        self.norms: UpdateNorms | None = None  # of this step
        self.started = 0.0

    def start_step(self):
        """Returns the UpdateNorms that this step fills, or None."""
        every = self.trainer.cfg.telemetry_every
        is_measured = every > 0 and (self.trainer.progress.step + 1) % every == 0
        self.norms = None
        if is_measured or self.guard:
            self.norms = UpdateNorms(self.trainer.optimizer, is_full=is_measured)
        if is_measured:
            self.started = clock(self.trainer.rt.device)
        return self.norms

    def end_step(self, loss, state, must_wait: bool):
        """After a step: log its measurements, and let the guard check it, later unless must_wait."""
        if self.norms is not None and self.norms.is_full:
            self.write_telemetry(loss, state)
        if self.guard:
            self.guard.end_step(loss, state, self.norms, must_wait)

    def write_telemetry(self, loss, state):
        """One line of <run_id>.jsonl. Groups without an update in this step are left out."""
        rt, step = self.trainer.rt, self.trainer.progress.step
        seconds = clock(rt.device) - self.started
        mean_loss = rt.comm.all_reduce(loss.clone()).item() / rt.world_size
        sums = rt.comm.all_reduce(self.norms.sums.clone()).sqrt().tolist()
        groups = {}
        for group, (grad, weight, update, momentum) in zip(self.norms.groups, sums):
            if grad:
                groups[group] = dict(
                    grad_norm=grad / state.stage.tokens_per_step, weight_norm=weight, momentum_norm=momentum,
                    update_ratio=update / max(weight, 1e-30))
        self.log.write_event("telemetry", step, loss=mean_loss, groups=groups, seconds=dict(step=seconds))


def raise_precision(trainer: Trainer, run: dict):
    """Switch off FP8, or else bfloat16. run: its choices change, too. Returns a description, or ""."""
    fp8 = trainer.fast & {*FP8_FORMS}
    if fp8:
        trainer.choose_operations(trainer.ops.dtype, trainer.fast - fp8)
        run["choices"]["fp8"] = "off"
        return "matmuls no longer use FP8"
    if trainer.ops.dtype == torch.bfloat16:
        trainer.choose_operations(torch.float32, trainer.fast)
        for bucket in trainer.optimizer.buckets:
            bucket.options = bucket.options._replace(dtype=torch.float32)
        run["choices"]["dtype"] = "float32"
        return "activations become float32"
    return ""


class Guard:
    """Restores an earlier state and raises the precision if a step's loss or gradient is out of range. Step
    and data go on. All ranks read the same all-reduced sums, one step late, so that no GPU waits."""

    LOSS_FACTOR, GRAD_FACTOR = 1.5, 10.0  # limits relative to the median of the last good steps
    MEDIAN_STEPS = 64  # most steps in that median
    LEAST_STEPS = 16  # good steps before gradients have a limit
    SNAPSHOT_EVERY = 10  # least number of steps between snapshots
    TRIAL_STEPS = 5  # a snapshot is trusted once it is this many steps old

    def __init__(self, trainer: Trainer, log):
        self.trainer, self.log = trainer, log
        self.pending = []  # (step, its sums on the CPU, event), not checked yet
        self.snapshots = [(trainer.progress.step, Snapshot(trainer))]

    def end_step(self, loss, state, norms: UpdateNorms, must_wait: bool):
        """Check the previous step, and with must_wait this step. Take a snapshot if it is time."""
        trainer, step = self.trainer, self.trainer.progress.step
        squares = norms.sums[:, 0] / state.stage.tokens_per_step**2  # by group
        weight = sum(state.loss_weights) or 1.0  # makes losses of stages comparable
        matrix_square = squares[norms.groups.index("matrix")]  # other groups may skip steps
        sums = torch.stack((loss / (weight * trainer.rt.world_size), matrix_square, squares.sum()))
        sums = trainer.rt.comm.all_reduce(sums).to("cpu", non_blocking=True)  # to pinned memory
        self.pending.append((step, sums, record_event(trainer.rt.device)))
        while len(self.pending) > (0 if must_wait else 1):
            number, sums, copied = self.pending.pop(0)
            if copied:
                copied.synchronize()
            fault = self.find_fault(*sums.tolist())
            if fault:
                self.roll_back(number, fault)
                return
        is_due = step - self.snapshots[-1][0] >= self.SNAPSHOT_EVERY
        if is_due and trainer.optimizer.has_no_pending_gradients():
            self.snapshots = [self.snapshots[-1], (step, Snapshot(trainer))]

    def find_fault(self, loss: float, square: float, all_squares: float):
        """Compare a step with the last good steps. A good one joins them."""
        good = self.trainer.progress.good_steps
        grad_norm = math.sqrt(square) if math.isfinite(all_squares) else math.nan
        medians = np.median(good, axis=0) if good else (math.inf, math.inf)
        if len(good) < self.LEAST_STEPS:  # gradients begin near zero, because output projections do
            medians = medians[0], math.inf
        for name, value, limit in (("loss", loss, self.LOSS_FACTOR * medians[0]),
                                   ("gradient norm", grad_norm, self.GRAD_FACTOR * medians[1])):
            if not math.isfinite(value) or value > limit:
                return f"{name} {value:.4g} exceeds {limit:.4g}"
        good[:] = [*good, [loss, grad_norm]][-self.MEDIAN_STEPS :]
        return ""

    def roll_back(self, step: int, fault: str):
        """Restore the newest trusted snapshot, and raise the precision. RunError if it is the highest."""
        trainer, progress = self.trainer, self.trainer.progress
        if len(self.snapshots) > 1 and progress.step - self.snapshots[-1][0] < self.TRIAL_STEPS:
            self.snapshots.pop()
        made, snapshot = self.snapshots[-1]
        snapshot.restore()
        trainer.optimizer.step_count = progress.step  # the schedule goes on, so updates do, too
        self.pending = []
        progress.num_actions += 1
        measure = raise_precision(trainer, self.log.run)
        line = f"guard: step {step}: {fault}: restored weights of step {made}, {measure or 'and ends'}"
        self.log.write_event("guard", step, fault=fault, measure=measure, action=progress.num_actions)
        if not measure:
            raise RunError(line)
        self.log.print(line)

# ==== MAIN =================================================================================================
# Exit status: 0 done, 1 failed, 2 bad input, 128 + n for signal n. Unexpected errors keep their traceback.

def main(argv: list[str]):
    """Run a command line. Returns the exit status, and prints a RunError as one line."""
    status = 0
    line = ""  # for standard error
    cause = None  # an unexpected error
    rank = env_int("RANK", 0)
    try:
        values = parse_argv(argv)
        print_config = values.pop("print_config", False)
        cfg = make_config(values)
        if not print_config:
            rt = start_runtime(cfg)
            train(fit_steps(cfg), rt, argv)
            rt.comm.close()
        elif rank == 0:
            cfg = fit_steps(cfg)
            derived = derived_numbers(cfg, env_int("WORLD_SIZE", 1))
            derived["mechanisms"] = sorted(list_parts())
            with file_errors():
                handler = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
                print(json.dumps({**plain_dict(cfg), "derived": derived}, indent=1), flush=True)
                signal.signal(signal.SIGPIPE, handler)
    except RunError as error:
        cause = error.__cause__
        status, line = error.status, f"{'error: ' if error.status < 128 else ''}{error}"
    except KeyboardInterrupt:
        status, line = 130, "stopped by SIGINT"
    except Exception as error:
        cause = error
        status = 1
    if isinstance(cause, dist.DistError) or "gloo" in str(cause):  # another rank is gone
        time.sleep(3)  # torchrun sees its end first, and ends this rank
    if cause is not None:
        traceback.print_exception(cause)
    # A signal ends all ranks, and rank 0 prints it. Errors are printed by all ranks, the others after three
    # seconds: if rank 0 has the error, too, torchrun has ended them by then
    if line and (rank == 0 or status < 128):
        if rank != 0:
            time.sleep(3)
        print(f"train_gpt.py: {line}", file=sys.stderr, flush=True)
    if status and dist.is_initialized():
        os._exit(status)  # a shutdown would wait for other ranks
    gc.unfreeze()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
