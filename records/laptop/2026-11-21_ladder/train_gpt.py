#!/usr/bin/env python3
"""Train a GPT-2-class language model to a target loss in the least wall-clock time. One file, any machine.

Result card
    track_1  271 M parameters, 656.7 M tokens of FineWeb, to 3.28 validation loss on 8xH100: not yet run here
    laptop   2.06 M parameters, byte tokens of the PyTorch source, two CPU cores, two minutes: records/laptop

Launch
    python train_gpt.py                                            # CUDA: track_1; else: laptop, two minutes
    torchrun --standalone --nproc_per_node=8 train_gpt.py          # the record setting (or ./run.sh)
    python train_gpt.py --preset=laptop --record=my_idea --seed=1  # leaves a folder in records/
    python train_gpt.py --checkpoint_every=250 --resume=auto       # goes on where it was interrupted
    python train_gpt.py --sample=CHECKPOINT --prompt='def '        # text from a trained model
    python train_gpt.py --help | --list_presets | --print_config

Sections (search for the name after "# ====")
    CONFIG       dataclasses, presets, command line  DATA       shards, packing, validation, prefetch, corpus
    RUNTIME      device, ranks, collectives, probes  SCHEDULES  learning rate, momentum, windows, YaRN
    KERNELS      attention, rotary, norm, loss       RUN RECORD log, result, record folder, checkpoints
    FP8          head and loss, low precision        TRAINING   trainer, telemetry, guard, the timed loop
    UPDATE RULES Muon and Adam on local tensors      SAMPLING   text from a checkpoint
    OPTIMIZER    banks, reduce-scatter, all-gather   MAIN
    MODEL        blocks, GPT, initialisation

Shape letters: B batch, T tokens, D model_dim, H num_heads, K head_dim, V padded vocabulary, N ranks,
    U units of a bank.
"""
import codecs
import ctypes
import dataclasses
import datetime
import difflib
import faulthandler
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from tqdm import tqdm

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

# ==== CONFIG ===============================================================================================
# Every number of a run, one line each: type, default, meaning, range. The defaults are the track_1 record
# recipe; a preset is a difference from another preset. To add a knob, add a line here and use it; CLI, help
# and checks follow.


class RunError(Exception):
    """A run that cannot go on: main() prints one line and exits with the status."""

    status = 1

    def __init__(self, message: str, of_one_rank: bool = False):
        super().__init__(message)
        self.of_one_rank = of_one_rank  # other ranks may not have met it, so this one must speak


class InputError(RunError):
    """Bad input; the line names value and remedy."""

    status = 2


class RunStopped(RunError):
    """An end before the last step, on purpose: the status says why, the line how to go on."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def option(default, meaning: str, low=None, high=None, choices=None):
    """Declare a config field; low and high are inclusive."""
    return dataclasses.field(default=default,
                             metadata=dict(help=meaning, low=low, high=high, choices=choices))


def switch(default: str, meaning: str):
    """Declare a config field that is on or off."""
    return option(default, meaning, choices=("on", "off"))


@dataclass(frozen=True)
class LayerSpec:
    """What one layer slot contains. Layers are data: forward never asks for a layer's number."""

    attention: str = "short"  # long | short: which scheduled window; none: no attention in this slot
    mlp: bool = True
    value_embed: int | str | None = None  # table mixed into the values; "first": the first slot's values
    skip_from: int | None = None  # earlier slot whose output enters here (U-Net skip)


@dataclass(frozen=True)
class Stage:
    """A stretch of the run. A stage of share 0 holds only at the very end: the final validation."""

    share: float  # of the steps, relative to the other stages
    window_long: int  # tokens a query looks back in long layers
    window_short: int  # the same in short layers
    tokens_per_step: int | None = None  # None: the run's
    max_doc_len: int | None = None  # None: the run's
    lr_factor: float = 1.0  # on every learning rate


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the network."""

    num_layers: int = option(12, "layer slots", low=1)
    num_heads: int = option(6, "attention heads per layer", low=1)
    head_dim: int = option(128, "channels per head", low=8)
    model_dim: int = option(768, "residual channels = num_heads * head_dim", low=8)
    mlp_ratio: int = option(4, "MLP hidden channels per residual channel", low=1)
    vocab_size: int = option(50257, "tokens of the vocabulary", low=2, high=65536)
    vocab_multiple: int = option(128, "the vocabulary is padded to a multiple of this", low=1)
    tie_head: str = switch("off", "the head multiplies by the token embedding instead of its own matrix")
    embed_norm: str = switch("on", "normalise the token embedding")
    embed_dtype: str = option("bfloat16", "embedding, head, gate storage", choices=("bfloat16", "float32"))
    init_std: float = option(0.5, "standard deviation of matrices at first, times sqrt(inputs)", low=0.0)
    zero_init: str = switch("on", "matrices that write into the residual stream begin at zero")
    activation: str = option("relu_squared", "of the MLP", choices=("relu_squared", "gelu"))
    qk_norm: str = switch("on", "normalise each head's queries and keys")
    rotary: str = option("half", "channels that turn with position; half: the others never do",
                         choices=("half", "full"))
    rotary_base: int = option(1024, "lowest rotary frequency is about 1/base", low=2)
    attention_scale: float = option(0.1, "softmax scale at first; 0: 1/sqrt(head_dim)", low=0.0)
    yarn_max_window: int = option(65_536, "YaRN stretches rotary and grows the softmax scale with the long "
                                  "window, as far as this; 0: not at all", low=0)
    attention_gate_dim: int = option(12, "input channels of the per-head attention gate; 0: no gate", low=0)
    depth_scale: str = switch("off", "multiply attention's output by 1/sqrt(2 * num_layers)")
    fuse_qkv: str = switch("off", "one matrix for Q, K and V, which the optimizer sees as one")
    value_pattern: str = option("ends", "slots with value embeddings: the first and last few; all, each its "
                                "own; all, upper as lower half; all, from the first slot's values instead",
                                choices=("ends", "all", "mirrored", "first"))
    num_value_embeds: int = option(3, "value-embedding tables; 0 switches them off", low=0)
    value_mix: str = option("scales", "of values v and value embeddings e: a v + b e, or (1 - a) v + a e",
                            choices=("scales", "lerp"))
    x0_shortcut: str = switch("on", "mix the embedding into the input of every slot, by learned numbers")
    skips: str = option("sigmoid", "weights of the U-Net skips", choices=("sigmoid", "plain", "off"))
    skip_init: float = option(-1.5, "U-Net skip weight at first, before the sigmoid")
    window_pattern: str = option("mixed", "slots with the long window: four or all",
                                 choices=("mixed", "long"))
    drop_attention: str = switch("on", "one slot of the upper half has no attention")
    drop_mlp: str = switch("on", "the first slot has no MLP")
    softcap: float = option(15.0, "logits stay between -softcap and softcap, by tanh; 0: as they are", low=0)
    fp8_head: str = option("auto", "FP8 matmuls in the head while training", choices=("auto", "on", "off"))
    layers: tuple[LayerSpec, ...] = option((), "JSON layer slots; empty: from the patterns above")


@dataclass(frozen=True)
class OptimConfig:
    """Update rules and their learning rates."""

    matrix_rule: str = option("muon", "update rule of the matrices in the blocks", choices=("muon", "adamw"))
    matrix_lr: float = option(0.05, "peak learning rate of block matrices (muon: in spectral norm)", low=0.0)
    mlp_up_lr_mul: float = option(1.0, "factor on the learning rate of the MLP's first matrix", low=0.0)
    muon_scale: str = option("spectral", "size of a step: spectral norm sqrt(max(1, rows/columns)); rms 1 "
                             "if all singular values are; rms 1 as measured",
                             choices=("spectral", "rms", "measured_rms"))
    momentum_form: str = option("ema", "of Muon: m = mu m + (1 - mu) g, or m = mu m + g",
                                choices=("ema", "sum"))
    matrix_weight_decay: float = option(0.0, "decoupled decay of block matrices, per learning rate", low=0.0)
    adam_weight_decay: float = option(0.0, "the same of embeddings and head", low=0.0)
    momentum_start: float = option(0.85, "Muon momentum at step 0", low=0.0, high=0.9999)
    momentum_end: float = option(0.95, "Muon momentum after its warm-up", low=0.0, high=0.9999)
    momentum_warmup_steps: int = option(300, "steps over which momentum rises", low=0)
    embed_lr: float = option(0.6, "peak Adam learning rate of the token embedding", low=0.0)
    value_embed_lr: float = option(0.6, "peak Adam learning rate of the value embeddings", low=0.0)
    head_lr: float = option(0.008, "peak Adam learning rate of the head", low=0.0)
    scalar_lr: float = option(0.04, "peak Adam learning rate of lambdas and skip weights", low=0.0)
    adam_betas: tuple[float, float] = option((0.8, 0.95), "Adam betas, as a,b", low=0.0, high=0.9999)
    grad_grid: float = option(0.0, "round gradients to multiples of this: sums are then exact, and the same "
                                   "to the last bit on any number of ranks; 0: off", low=0.0)
    adam_every: int = option(1, "steps from one Adam update to the next; gradients are summed", low=1)
    adam_eps: float = option(1e-8, "Adam epsilon, for a loss summed over 49,152 tokens", low=0.0)
    lr_warmup_frac: float = option(0.0, "share of the run where rates rise linearly", low=0.0, high=1.0)
    cooldown_frac: float = option(0.5, "share of the run where rates fall linearly", low=0.0, high=1.0)
    final_lr_frac: float = option(0.1, "learning rate at the end, as a share of its peak", low=0.0, high=1.0)


@dataclass(frozen=True)
class TrainConfig:
    """Data, budget, devices and output."""

    preset: str = option("auto", "starting point (--list_presets); auto: track_1 with CUDA, laptop without")
    without: str = option("", "mechanisms to switch off, as a,b (--list_presets names them)")
    only_with: str = option("", "switch off all mechanisms but these, as a,b")
    track: str = option("track_1", "folder under records/ in which this run may compete")
    record: str = option("", "name of a record run; its script, log and result go to records_dir")
    seed: int = option(0, "seed of the initial weights", low=0)
    device: str = option("auto", "where to train", choices=("auto", "cuda", "cpu"))
    dtype: str = option("auto", "activations; auto: bfloat16 where it multiplies fast, else float32",
                        choices=("auto", "bfloat16", "float32"))
    residual_dtype: str = option("auto", "of the stream between the layers; auto: that of activations",
                                 choices=("auto", "float32"))
    kernels: str = option("auto", "our Triton kernels; auto: on CUDA, where they prove right at start",
                          choices=("auto", "on", "off"))
    compile: str = option("auto", "torch.compile the model; auto: on CUDA", choices=("auto", "on", "off"))
    train_files: str = option("data/fineweb10B/fineweb_train_*.bin", "pattern of the training shards")
    val_files: str = option("data/fineweb10B/fineweb_val_*.bin", "pattern of the validation shards")
    val_tokens: int = option(10_485_760, "validation tokens", low=1)
    val_seq_len: int = option(262_144, "tokens of one validation sequence", low=128)
    val_loss_every: int = option(125, "steps between validations; 0: only at the end", low=0)
    num_iterations: int = option(1670, "optimizer steps", low=1)
    tokens_per_step: int = option(393_216, "training tokens of one optimizer step, over all ranks", low=128)
    seq_len: int = option(49_152, "tokens of a packed row of documents; rows never depend on ranks", low=128)
    micro_batch_tokens: int = option(49_152, "most tokens per forward-backward: the memory knob", low=128)
    row_start: str = option("document", "where training rows begin; anywhere: where the last one ended",
                            choices=("document", "anywhere"))
    document_mask: str = switch("on", "a token sees its own document only, not the whole row")
    max_doc_len: int = option(2048, "training documents are cut to this many tokens", low=2)
    warmup_iterations: int = option(3, "untimed steps per stage before the clock starts; then undone", low=0)
    comm_bin_mb: float = option(64.0, "most MB of like parameters in one message between ranks", low=0.0)
    comm_timeout: float = option(60.0, "seconds until a dead or stalled rank has ended the run", low=1.0)
    check_ranks_every: int = option(
        0, "debug: steps between checks that all ranks hold the same bits; 0: never", low=0)
    checkpoint_every: int = option(0, "steps between checkpoints; 0: only when a run is stopped", low=0)
    checkpoint_dir: str = option("checkpoints", "where checkpoints go, each run in a folder of its own")
    resume: str = option("", "checkpoint to go on from; auto: the newest of this run, if there is one")
    time_limit: float = option(0.0, "seconds until the run saves a checkpoint and stops; 0: never", low=0.0)
    telemetry_every: int = option(0, "steps between measurements, left in <run_id>.jsonl; 0: never", low=0)
    guard: str = option("off", "roll back and go on more carefully when training goes wrong",
                        choices=("on", "off"))
    print_every: int = option(0, "steps between training lines on the console; 0: only in the log", low=0)
    records_dir: str = option("records", "where record runs go")
    logs_dir: str = option("logs", "where all other runs go")
    stages: tuple[Stage, ...] = option(
        (Stage(1, 384, 128), Stage(1, 896, 384), Stage(1, 1408, 640), Stage(0, 1664, 768)),
        "stages as JSON: share, window_long, window_short, tokens_per_step, max_doc_len, lr_factor")


@dataclass(frozen=True)
class SampleConfig:
    """Text instead of training."""

    sample: str = option("", "checkpoint to write text with")
    prompt: str = option("", "what the text begins with; token ids where no tokenizer is at hand")
    max_new_tokens: int = option(256, "tokens to write at most; a document end stops earlier", low=1)
    temperature: float = option(0.8, "0: always the likeliest token", low=0.0)
    top_k: int = option(50, "choose among so many of the likeliest tokens; 0: among all", low=0)


@dataclass(frozen=True)
class Config(TrainConfig, OptimConfig, ModelConfig, SampleConfig):
    """All fields of a run, flat: names are unique, so --field=value needs no path."""

    @property
    def padded_vocab_size(self) -> int:
        """V: the vocabulary rounded up."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


CONFIG_PARTS = (TrainConfig, ModelConfig, OptimConfig, SampleConfig)  # in the order of --help
GRAD_TOKENS = 49_152  # gradients are scaled to a loss summed over so many tokens: the unit of Adam's epsilon
EMBEDDED_CORPUS = "data/torch_source"  # built on first use from the installed PyTorch: no download needed



def grow_window(block: int, num_stages: int, last: float, short: float = 1.0) -> tuple[Stage, ...]:
    """Windows of 1, 2, ... blocks, each as long, the last for a share `last` of that (records 13 to 28).

    Short layers see the share `short` of it, in whole blocks.
    """
    return tuple(Stage(1.0 if k < num_stages else last, block * k, block * max(1, int(k * short)))
                 for k in range(1, num_stages + 1))


class Rung(typing.NamedTuple):
    """A published record that changed what is learned, as a difference from the one before it."""

    minutes: float  # on eight H100
    change: str
    differences: dict
    laptop: dict = {}  # noqa: RUF012 - what stands in the laptop's model and data for these


# Left out are records that only made the same mathematics faster: 6 (2024-10-18, orthogonalisation shared
# out over the ranks), 7 and 25 (newer PyTorch), 16 (2024-12-10, windows in blocks: with record 17 here), 22
# to 24 (2025-05, gradients reduced and scattered during backward; the loss becomes a sum over tokens, the
# unit of adam_eps here). Record 1 (45 minutes) is GPT-2 as it was: learned positions, LayerNorm, biases.
# Record 2 also divided each gradient by its norm, soon found useless. Records 22 to 27 divided logits by
# sqrt(768) more and gave the head as much higher a learning rate: the same steps.
LADDER: dict[str, Rung] = {
    "2024-06-06_adamw_rotary": Rung(
        31.4, "AdamW, rotary, RMSNorm without gain, trapezoidal learning rate", dict(
            num_iterations=9536, tokens_per_step=524_288, seq_len=1024, micro_batch_tokens=65_536,
            max_doc_len=65_537, val_seq_len=1024, row_start="anywhere", document_mask="off",
            stages=(Stage(1, 1024, 1024),), window_pattern="long", num_heads=12, head_dim=64,
            vocab_multiple=1, tie_head="on", embed_norm="off", embed_dtype="float32", init_std=3**-0.5,
            residual_dtype="float32", zero_init="off", activation="gelu", qk_norm="off", rotary="full",
            rotary_base=10_000, attention_scale=0.0, yarn_max_window=0, attention_gate_dim=0,
            depth_scale="on", fuse_qkv="on", num_value_embeds=0, value_mix="lerp", x0_shortcut="off",
            skips="off", drop_attention="off", drop_mlp="off", softcap=0.0, fp8_head="off",
            matrix_rule="adamw", matrix_lr=0.0018, matrix_weight_decay=0.1, embed_lr=0.0018,
            adam_weight_decay=0.1, adam_betas=(0.9, 0.95), adam_eps=1e-8 * GRAD_TOKENS,
            muon_scale="measured_rms", momentum_form="sum", momentum_warmup_steps=0,
            lr_warmup_frac=256 / 9536, cooldown_frac=2048 / 9536, final_lr_frac=0.0), dict(
            tokens_per_step=5120, seq_len=256, micro_batch_tokens=5120, val_seq_len=256,
            stages=(Stage(1, 256, 256),), num_heads=4, head_dim=48, adam_eps=1e-2)),
    "2024-10-04_muon": Rung(
        24.9, "Muon for the matrices of the blocks", dict(
            num_iterations=7000, matrix_rule="muon", matrix_lr=3.6e-4, matrix_weight_decay=0.0,
            embed_lr=0.0036, adam_weight_decay=0.0, lr_warmup_frac=0.0, cooldown_frac=2000 / 7000)),
    "2024-10-11_split_qkv": Rung(
        22.3, "Q, K and V orthogonalised one by one, the scale of a step by formula", dict(
            num_iterations=6200, fuse_qkv="off", muon_scale="rms", cooldown_frac=1800 / 6200)),
    "2024-10-14_modern_blocks": Rung(
        15.2, "ReLU^2, QK-norm, zero-initialised projections, padded vocabulary, heads of 128", dict(
            num_iterations=5100, vocab_multiple=128, activation="relu_squared", qk_norm="on", zero_init="on",
            depth_scale="off", num_heads=6, head_dim=128, cooldown_frac=1450 / 5100),
        dict(num_heads=2, head_dim=96)),
    "2024-11-03_untied_head": Rung(
        10.8, "a head of its own, zero at first; normalised embedding", dict(
            num_iterations=4578, tie_head="off", embed_norm="on", embed_lr=0.3, head_lr=0.002,
            matrix_lr=0.02, muon_scale="spectral", mlp_up_lr_mul=2.0, cooldown_frac=1308 / 4578)),
    "2024-11-06_shortcuts": Rung(
        8.2, "value residual, embedding shortcut, momentum warm-up, softcap 30", dict(
            num_iterations=3200, value_pattern="first", x0_shortcut="on", scalar_lr=0.02, softcap=30.0,
            momentum_warmup_steps=500, cooldown_frac=914 / 3200)),
    "2024-11-08_bfloat16": Rung(
        7.8, "bfloat16 between the layers too", dict(
            num_iterations=3242, residual_dtype="auto", cooldown_frac=926 / 3242)),
    "2024-11-10_unet_skips": Rung(
        7.2, "U-Net skips, doubled learning rates", dict(
            num_iterations=3000, skips="plain", skip_init=1.0, embed_lr=0.6, head_lr=0.008, matrix_lr=0.04,
            scalar_lr=0.04, cooldown_frac=900 / 3000)),
    "2024-11-19_flex_attention": Rung(
        5.03, "rows of 64K tokens, documents masked, a sliding window", dict(
            num_iterations=1875, seq_len=65_536, document_mask="on", val_seq_len=65_536,
            cooldown_frac=562 / 1875), dict(seq_len=1024, val_seq_len=8192)),
    "2024-11-24_window_warmup": Rung(
        4.66, "the window grows", dict(
            num_iterations=1750, stages=grow_window(64, 28, last=0.0), adam_betas=(0.8, 0.95),
            matrix_lr=0.05, momentum_warmup_steps=300, cooldown_frac=640 / 1750),
        dict(stages=grow_window(64, 5, last=0.0))),
    "2024-12-04_value_embeds": Rung(
        4.41, "a value embedding for every layer", dict(
            num_iterations=1530, value_pattern="all", num_value_embeds=12, value_embed_lr=0.6,
            cooldown_frac=600 / 1530)),
    "2024-12-08_mirrored_values": Rung(
        3.95, "upper and lower half share value embeddings, two weights; momentum as an average", dict(
            num_iterations=1480, value_pattern="mirrored", num_value_embeds=6, value_mix="scales",
            momentum_form="ema")),
    "2024-12-17_sparse_values": Rung(
        3.57, "three value embeddings, half of rotary, a slot without attention, windows in blocks", dict(
            num_iterations=1490, value_pattern="ends", num_value_embeds=3, rotary="half", rotary_base=1024,
            drop_attention="on", stages=grow_window(128, 14, last=0.5)),
        dict(stages=grow_window(64, 5, last=0.5))),
    "2025-01-04_softcap_15": Rung(
        3.4, "softcap 15, bfloat16 embeddings", dict(
            num_iterations=1390, softcap=15.0, embed_dtype="bfloat16", cooldown_frac=0.4),
        dict(embed_dtype="float32")),
    "2025-01-13_fp8_head": Rung(
        3.142, "FP8 head, smaller initial matrices, learning rate to a tenth", dict(
            num_iterations=1395, fp8_head="auto", init_std=0.5, final_lr_frac=0.1)),
    "2025-01-16_long_short": Rung(
        2.992, "long and short windows, a constant softmax scale, smaller Adam epsilon", dict(
            num_iterations=1393, window_pattern="mixed", stages=grow_window(128, 14, last=0.5, short=0.5),
            attention_scale=0.12, adam_eps=1e-10 * GRAD_TOKENS),
        dict(stages=grow_window(64, 5, last=0.5, short=0.5), adam_eps=1e-2)),
    "2025-01-26_smaller_batch": Rung(
        2.933, "a smaller batch", dict(
            num_iterations=1770, tokens_per_step=393_216, seq_len=49_152, micro_batch_tokens=49_152,
            val_seq_len=262_144),
        dict(tokens_per_step=4096, seq_len=1024, micro_batch_tokens=2048, val_seq_len=8192)),
    "2025-07-13_document_rows": Rung(
        2.863, "rows begin with a document", dict(
            num_iterations=1750, row_start="document", adam_eps=1e-8, cooldown_frac=0.45,
            final_lr_frac=0.05), dict(adam_eps=1e-2)),
    "2025-07-18_transposed_mlp": Rung(
        2.817, "the MLP's first matrix stored like its second, so with the same learning rate", dict(
            mlp_up_lr_mul=1.0, final_lr_frac=0.1)),
    "2025-08-23_attention_gate": Rung(
        2.812, "a sparse gate on every head", dict(num_iterations=1695, attention_gate_dim=12)),
    "2025-09-03_short_documents": Rung(
        2.731, "documents cut to 2,048 tokens, windows in three stages", dict(
            num_iterations=1670, max_doc_len=2048,
            stages=(Stage(1, 384, 128), Stage(1, 896, 384), Stage(1, 1408, 640))),
        dict(max_doc_len=1024, stages=(Stage(1, 128, 64), Stage(1, 192, 64), Stage(1, 256, 128)))),
    "2025-09-05_no_first_mlp": Rung(
        2.717, "no MLP in the first slot", dict(num_iterations=1705, drop_mlp="on")),
    "2025-09-10_yarn": Rung(
        2.656, "YaRN and a growing softmax scale when the window grows; a longer one to validate", dict(
            num_iterations=1670, yarn_max_window=65_536, attention_scale=0.1, cooldown_frac=0.5,
            stages=(Stage(1, 384, 128), Stage(1, 896, 384), Stage(1, 1408, 640), Stage(0, 1664, 768))),
        dict(stages=(Stage(1, 128, 64), Stage(1, 192, 64), Stage(1, 256, 128), Stage(0, 320, 128)))),
    "2025-09-11_sigmoid_skips": Rung(
        2.625, "skip weights through a sigmoid", dict(skips="sigmoid", skip_init=-1.5)),
}
LAPTOP_TOKENS = 819_200  # a laptop rung trains on as many, whatever its batch


def ladder_presets() -> dict[str, tuple[str, str, dict]]:
    """Two presets for every rung: the record's own, and laptop_..., its difference in the laptop's sizes.

    All laptop rungs see equally many tokens; what a record counts in steps they have in proportion.
    """
    presets, parent, full, small = {}, "track_1", {"momentum_warmup_steps": 0}, {}
    for name, rung in LADDER.items():
        presets[name] = parent, rung.change, rung.differences
        full.update(rung.differences)
        small.update({**rung.differences, **rung.laptop})
        steps = LAPTOP_TOKENS // small["tokens_per_step"]
        warmup = round(full["momentum_warmup_steps"] * steps / full["num_iterations"])
        presets[f"laptop_{name}"] = (
            f"laptop_{parent}".removesuffix("_track_1"), f"the same in the laptop's sizes, {steps} steps",
            dict({**rung.differences, **rung.laptop}, num_iterations=steps, momentum_warmup_steps=warmup,
                 val_loss_every=steps // 5))
        parent = name
    presets["laptop_target"] = (f"laptop_{next(iter(LADDER))}", "the target of track laptop: the first rung "
                                "for four minutes", dict(num_iterations=640, val_loss_every=128))
    return presets


# name: (parent, what it is, differences from the parent)
PRESETS: dict[str, tuple[str | None, str, dict]] = {
    "track_1": (None, "the record recipe: 271 M parameters, FineWeb, 3.28 on 8xH100", {}),
    "laptop": ("track_1", "the same recipe in miniature: byte tokens, two CPU cores, two minutes", dict(
        track="laptop",
        train_files=f"{EMBEDDED_CORPUS}/train_*.bin", val_files=f"{EMBEDDED_CORPUS}/val_*.bin",
        vocab_size=257, num_layers=5, num_heads=2, head_dim=96, model_dim=192, embed_dtype="float32",
        num_iterations=480, tokens_per_step=4096, seq_len=1024, micro_batch_tokens=2048, max_doc_len=1024,
        val_tokens=131_072, val_seq_len=8192, val_loss_every=80, warmup_iterations=1,
        momentum_warmup_steps=100, adam_eps=1e-2,  # small batches: below it a gradient is rounding noise
        grad_grid=2.0**-12,
        stages=(Stage(1, 128, 64), Stage(1, 192, 64), Stage(1, 256, 128), Stage(0, 320, 128)))),
    "smoke": ("laptop", "seconds on any machine: what the tests run", dict(
        num_layers=4, num_heads=2, head_dim=32, model_dim=64, num_iterations=12, tokens_per_step=2048,
        seq_len=512, micro_batch_tokens=1024, max_doc_len=256, val_tokens=4096, val_seq_len=1024,
        val_loss_every=6, dtype="float32", momentum_warmup_steps=10)),
    # constants of the medium track's record 18 for what exists here, of its record 2 for all else
    "track_2": ("track_1", "the medium track: 16 slots of 1024 channels, FineWeb, 2.92 on 8xH100", dict(
        track="track_2", num_layers=16, num_heads=8, model_dim=1024, attention_gate_dim=16,
        num_value_embeds=5, fp8_head="off", yarn_max_window=1664,
        layers=tuple(LayerSpec(attention="long" if i in (0, 4, 11, 15) else "short",
                               value_embed=i if i < 5 else i - 11 if i > 10 else None,
                               skip_from={9: 6, 10: 4, 11: 2}.get(i)) for i in range(16)),
        num_iterations=7500, tokens_per_step=524_288, seq_len=16_384, micro_batch_tokens=65_536,
        max_doc_len=4096, val_seq_len=65_536, cooldown_frac=0.7,
        matrix_lr=0.025, embed_lr=0.3, value_embed_lr=0.3, head_lr=0.003,
        stages=(Stage(1, 384, 128, 131_072), Stage(1, 896, 384, 262_144, lr_factor=1.52),
                Stage(1, 1408, 640, 393_216, lr_factor=1.73),
                *(Stage(1, 128 * blocks, 128 * min(11, blocks // 2), lr_factor=2.0)
                  for blocks in (13, 15, 17, 19, 21, 23, 23, 23, 23)),
                Stage(0, 3456, 1408, lr_factor=2.0)))),
    **ladder_presets(),
}


def hold_window(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Give all training stages the windows of the last one."""
    last = [stage for stage in stages if stage.share > 0][-1]
    return tuple(dataclasses.replace(stage, window_long=last.window_long, window_short=last.window_short)
                 if stage.share > 0 else stage for stage in stages)


def change_slots(**changes) -> Callable:
    """A function that changes every slot of a tuple of LayerSpec."""
    return lambda layers: tuple(dataclasses.replace(spec, **changes) for spec in layers)


# What --without switches off, and how; a function is applied to the field's value
MECHANISMS: dict[str, dict] = {
    "muon": dict(matrix_rule="adamw", matrix_lr=0.0018),
    "momentum_warmup": dict(momentum_warmup_steps=0),
    "cooldown": dict(cooldown_frac=0.0),
    "untied_head": dict(tie_head="on", embed_lr=0.0036),
    "embed_norm": dict(embed_norm="off"),
    "zero_init": dict(zero_init="off"),
    "relu_squared": dict(activation="gelu"),
    "qk_norm": dict(qk_norm="off"),
    "half_rotary": dict(rotary="full", rotary_base=10_000),
    "yarn": dict(yarn_max_window=0),
    "attention_gate": dict(attention_gate_dim=0),
    "value_embeds": dict(num_value_embeds=0, value_pattern="ends", layers=change_slots(value_embed=None)),
    "x0_shortcut": dict(x0_shortcut="off"),
    "skips": dict(skips="off", layers=change_slots(skip_from=None)),
    "short_windows": dict(window_pattern="long", layers=lambda layers: tuple(
        dataclasses.replace(spec, attention=spec.attention.replace("short", "long")) for spec in layers)),
    "window_warmup": dict(stages=hold_window),
    "dropped_attention": dict(drop_attention="off"),
    "dropped_mlp": dict(drop_mlp="off"),
    "document_mask": dict(document_mask="off"),
    "document_rows": dict(row_start="anywhere"),
    "softcap": dict(softcap=0.0),
    "fp8_head": dict(fp8_head="off"),
}


def switch_off(cfg: "Config") -> dict:
    """Field values that take away what --without names, or all that --only_with does not."""
    named = {field: getattr(cfg, field).split(",") if getattr(cfg, field) else []
             for field in ("without", "only_with")}
    for field, names in named.items():
        for name in set(names) - set(MECHANISMS):
            raise InputError(f"--{field}={getattr(cfg, field)}: {name} is not a mechanism: "
                             f"{suggest(name, MECHANISMS)} (--list_presets)")
    taken = set(named["without"]) | (set(MECHANISMS) - set(named["only_with"]) if cfg.only_with else set())
    changes = {}
    for name in MECHANISMS:
        for field, value in MECHANISMS[name].items() if name in taken else ():
            before = changes.get(field, getattr(cfg, field))
            changes[field] = value(before) if callable(value) else value
    return changes


def build_layers(cfg: ModelConfig) -> tuple[LayerSpec, ...]:
    """Lay out the patterns of the config at any depth (the defaults at 12 slots: exactly record 32).

    Four evenly spaced slots look far; the third of them has no attention. Slot 0 has no MLP. The upper half
    takes the outputs of the lower half in reverse. The first and the last slots share value embeddings
    0, 1, 2, ...
    """
    last = cfg.num_layers - 1
    long_slots = range(last + 1) if cfg.window_pattern == "long" else {round(i * last / 3) for i in range(4)}
    no_attention = round(2 * last / 3) if cfg.num_layers >= 4 and cfg.drop_attention == "on" else None
    layers = []
    for i in range(cfg.num_layers):
        from_end, has_skip = last - i, cfg.skips != "off" and last - i < min(i, cfg.num_layers // 2)
        layers.append(LayerSpec(
            attention="none" if i == no_attention else "long" if i in long_slots else "short",
            mlp=i > 0 or cfg.num_layers == 1 or cfg.drop_mlp == "off",
            value_embed=None if i == no_attention else choose_value_embed(cfg, i),
            skip_from=from_end if has_skip else None))
    return tuple(layers)


def choose_value_embed(cfg: ModelConfig, slot: int) -> int | str | None:
    """What cfg.value_pattern mixes into the values of a slot."""
    from_end = cfg.num_layers - 1 - slot
    if cfg.value_pattern == "first":
        return "first" if slot else None
    if cfg.num_value_embeds == 0:
        return None
    if cfg.value_pattern == "all":
        return slot % cfg.num_value_embeds
    if cfg.value_pattern == "mirrored":
        return min(slot, from_end) % cfg.num_value_embeds
    num_values = min(cfg.num_value_embeds, cfg.num_layers // 2)
    return slot if slot < num_values else num_values - 1 - from_end if from_end < num_values else None


def config_fields() -> dict[str, dataclasses.Field]:
    """All fields by name, in the order of --help."""
    return {f.name: f for part in CONFIG_PARTS for f in dataclasses.fields(part)}


def parse_value(field: dataclasses.Field, text: str):
    """Turn the text of --field=text into the field's type; InputError says what was expected."""
    try:
        if field.type in (int, float):
            return field.type(text)
        if field.type is str:
            return text
        element = typing.get_args(field.type)[0]
        if element is float:
            low, high = text.split(",")
            return float(low), float(high)
        return tuple(element(**item) for item in json.loads(text))
    except (ValueError, TypeError) as error:
        kind = getattr(field.type, "__name__", "value")
        kind = {"int": "whole number", "float": "number", "tuple": "list"}.get(kind, kind)
        raise InputError(f"--{field.name}={text} is not a {kind}: give one like {show_value(field.default)}"
                         f" ({' '.join(str(error).split())})") from None


def show_value(value) -> str:
    """The command-line spelling of a field's value."""
    if isinstance(value, tuple) and value and dataclasses.is_dataclass(value[0]):
        return json.dumps([dataclasses.asdict(item) for item in value])
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def check_value(field: dataclasses.Field, value) -> None:
    """Raise InputError where a value leaves the field's range or choices."""
    meta = field.metadata
    if meta["choices"] and value not in meta["choices"]:
        raise InputError(f"--{field.name}={value} is not one of {', '.join(meta['choices'])}: "
                         "choose one of them")
    for number in value if isinstance(value, tuple) else (value,):
        if not isinstance(number, (int, float)):
            continue
        if not math.isfinite(number):
            raise InputError(f"--{field.name}={show_value(value)} is not finite: give an ordinary number")
        if meta["low"] is not None and number < meta["low"]:
            raise InputError(f"--{field.name}={show_value(value)} is too small: give at least {meta['low']}")
        if meta["high"] is not None and number > meta["high"]:
            raise InputError(f"--{field.name}={show_value(value)} is too large: give at most {meta['high']}")


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The nearest known names, for an error message."""
    near = [prefix + match for match in difflib.get_close_matches(name, list(known), n=3)]
    return f"did you mean {' or '.join(near)}?" if near else "see --help"


def parse_argv(argv: list[str]) -> tuple[dict, set[str]]:
    """Split a command line into ({field: value}, {flags among help, list_presets, print_config})."""
    fields, values, flags, rest = config_fields(), {}, set(), list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help", "--list_presets", "--list-presets", "--print_config", "--print-config"):
            flags.add(word.lstrip("-").replace("-", "_").replace("h", "help", word == "-h"))
            continue
        name, equals, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in fields:
            raise InputError(f"{word.partition('=')[0]} is not an option: "
                             f"{suggest(name, fields, '--')}")
        if not equals:
            if not rest:
                raise InputError(f"--{name} has no value: give --{name}={show_value(fields[name].default)}")
            text = rest.pop(0)
        values[name] = parse_value(fields[name], text)
        check_value(fields[name], values[name])
    return values, flags


def preset_overrides(name: str) -> dict:
    """Merge a preset with its parents into one dict of field values."""
    if name not in PRESETS:
        raise InputError(f"--preset={name} is not a preset: {suggest(name, PRESETS)} (--list_presets)")
    parent, _, changes = PRESETS[name]
    return {**(preset_overrides(parent) if parent else {}), **changes, "preset": name}


def format_presets() -> str:
    """The text of --list_presets: all presets, those of the ladder with what was published, mechanisms."""
    lines, width = [], max(map(len, PRESETS))
    for name, (parent, meaning, _) in PRESETS.items():
        if name in LADDER:
            cfg = make_config({"preset": name})
            tokens = cfg.num_iterations * cfg.tokens_per_step / 1e9
            meaning = (f"{LADDER[name].minutes:6.3f} min {cfg.num_iterations:,} steps "
                       f"{tokens:.2f} B tokens: {meaning}")
        lines.append(f"{name:<{width}} {meaning}{f' (from {parent})' if parent else ''}")
    return "\n".join([*lines, "", f"mechanisms of --without and --only_with: {', '.join(MECHANISMS)}"])


def make_config(overrides: dict) -> Config:
    """Preset, then overrides, then derived layers; every impossibility is an InputError."""
    name = overrides.get("preset", "auto")
    if name == "auto":
        use_cuda = overrides.get("device", "auto") != "cpu" and torch.cuda.is_available()
        name = "track_1" if use_cuda else "laptop"
    values = {**preset_overrides(name), **overrides, "preset": name}
    cfg = Config(**values)
    if cfg.without or cfg.only_with:
        cfg = Config(**{**values, **switch_off(cfg), **overrides})
    if not cfg.layers:
        cfg = dataclasses.replace(cfg, layers=build_layers(cfg))
    check_config(cfg)
    return cfg


def check_config(cfg: Config) -> None:
    """Raise InputError for geometry that cannot work."""
    def demand(condition: bool, problem: str, remedy: str) -> None:
        if not condition:
            raise InputError(f"{problem}: {remedy}")

    def demand_multiple(name: str, value: int, of: str, unit: int) -> None:
        down, up = value // unit * unit, -(-value // unit) * unit
        demand(value % unit == 0 and value > 0, f"--{name}={value} is not a multiple of {of}",
               f"the nearest are {' and '.join(str(v) for v in (down, up) if v > 0)}")

    demand(cfg.model_dim == cfg.num_heads * cfg.head_dim,
           f"--model_dim={cfg.model_dim} is not num_heads * head_dim = {cfg.num_heads} * {cfg.head_dim}",
           f"set --model_dim={cfg.num_heads * cfg.head_dim}")
    demand_multiple("head_dim", cfg.head_dim, "4 (half of the rotary pairs turn)", 4)
    demand(cfg.attention_gate_dim <= cfg.model_dim,
           f"--attention_gate_dim={cfg.attention_gate_dim} is wider than the model",
           f"give at most {cfg.model_dim}")
    for name in ("record", "track"):
        demand(re.fullmatch(r"[a-z0-9][a-z0-9_.-]*|", getattr(cfg, name)) is not None,
               f"--{name}={getattr(cfg, name)} is not a plain name",
               "use lower-case letters, digits, '_', '-' and '.'")
    check_layers(cfg, demand)
    demand(math.frexp(cfg.grad_grid)[0] in (0.0, 0.5), f"--grad_grid={cfg.grad_grid} is not a power of two",
           f"give {2.0 ** round(math.log2(cfg.grad_grid or 1))}")
    demand(any(stage.share > 0 for stage in cfg.stages),
           "--stages has no stage with a share", "give one a share above 0")
    demand_multiple("seq_len", cfg.seq_len, "128 tokens (one attention block)", 128)
    demand_multiple("val_seq_len", cfg.val_seq_len, "128 tokens (one attention block)", 128)
    demand_multiple("val_tokens", cfg.val_tokens, f"val_seq_len={cfg.val_seq_len}", cfg.val_seq_len)
    demand(cfg.micro_batch_tokens >= cfg.seq_len,
           f"--micro_batch_tokens={cfg.micro_batch_tokens} is less than one row, seq_len={cfg.seq_len}",
           f"shorten the rows too: --seq_len={cfg.micro_batch_tokens // 128 * 128}")
    for stage in cfg.stages:
        demand(stage.share >= 0 and stage.lr_factor >= 0,
               f"--stages has a negative share or lr_factor: {stage}", "give 0 or more")
        demand(1 <= stage.window_short <= stage.window_long,
               f"--stages has windows short {stage.window_short}, long {stage.window_long}",
               "give 1 <= short <= long")
        demand((stage.max_doc_len or 2) >= 2,
               f"--stages has max_doc_len={stage.max_doc_len}", "give 2 or more")
        demand_multiple("tokens_per_step", stage.tokens_per_step or cfg.tokens_per_step,
                        f"seq_len={cfg.seq_len}", cfg.seq_len)


def check_layers(cfg: Config, demand: Callable[[bool, str, str], None]) -> None:
    """Check that every layer slot refers to things that exist."""
    demand(len(cfg.layers) == cfg.num_layers,
           f"--layers has {len(cfg.layers)} slots, num_layers is {cfg.num_layers}",
           f"set --num_layers={len(cfg.layers)}")
    for i, spec in enumerate(cfg.layers):
        demand(spec.attention in ("long", "short", "none"),
               f"--layers slot {i} has attention={spec.attention}", "choose long, short or none")
        demand(spec.skip_from is None or 0 <= spec.skip_from < i,
               f"--layers slot {i} has skip_from={spec.skip_from}", "name an earlier slot")
        demand(spec.value_embed in (None, "first" if i and cfg.layers[0].attention != "none" else None,
                                    *range(cfg.num_value_embeds)),
               f"--layers slot {i} has value_embed={spec.value_embed}",
               f"num_value_embeds is {cfg.num_value_embeds}")


def split_rows(cfg: Config, world_size: int, tokens_per_step: int) -> tuple[int, int]:
    """Split a step's packed rows over ranks: (micro-batches per rank, rows per micro-batch).

    The rows themselves never depend on this split, so neither ranks nor accumulation change what a step
    sees.
    """
    rows = tokens_per_step // cfg.seq_len
    if rows % world_size:
        unit = cfg.seq_len * world_size
        near = [v for v in (tokens_per_step // unit * unit, -(-tokens_per_step // unit) * unit) if v]
        raise InputError(f"--tokens_per_step={tokens_per_step} is {rows} rows of seq_len={cfg.seq_len}, "
                         f"which {world_size} ranks cannot share: the nearest are "
                         f"{' and '.join(map(str, near))}{suggest_rows(cfg, world_size, tokens_per_step)}")
    rows_per_rank = rows // world_size
    most = cfg.micro_batch_tokens // cfg.seq_len
    rows_per_micro = max(r for r in range(1, min(most, rows_per_rank) + 1) if rows_per_rank % r == 0)
    return rows_per_rank // rows_per_micro, rows_per_micro


def suggest_rows(cfg: Config, world_size: int, tokens_per_step: int) -> str:
    """The longest shorter rows that these ranks can share, for an error message; empty if none are."""
    per_rank, left = divmod(tokens_per_step, world_size)
    fitting = [n for n in range(128, min(cfg.seq_len, per_rank) + 1, 128) if per_rank % n == 0]
    if left or not fitting:
        return ""
    return f"; or keep the batch and shorten the rows: --seq_len={fitting[-1]}"


def check_ranks_fit(cfg: Config, world_size: int) -> tuple[int, int]:
    """Raise InputError where the ranks cannot share some stage's step; returns the run's split_rows."""
    for stage in cfg.stages:
        split_rows(cfg, world_size, stage.tokens_per_step or cfg.tokens_per_step)
    return split_rows(cfg, world_size, cfg.tokens_per_step)


def derive(cfg: Config, world_size: int) -> dict:
    """Numbers that follow from the config: --print_config and the run record show them."""
    grad_accum_steps, rows_per_micro = check_ranks_fit(cfg, world_size)
    with torch.device("meta"):
        num_params = sum(p.numel() for p in GPT(cfg).parameters())
    return dict(num_params=num_params, flops_per_token=count_flops(cfg), grad_accum_steps=grad_accum_steps,
                ranks=world_size, tokens_per_rank=cfg.tokens_per_step // world_size,
                tokens_per_micro_batch=rows_per_micro * cfg.seq_len, padded_vocab_size=cfg.padded_vocab_size,
                train_tokens=Schedule(cfg).total_tokens())


def count_flops(cfg: Config) -> int:
    """FLOPs of forward and backward per training token: 6 per matmul weight, 12 per channel and key."""
    num_attention = sum(spec.attention != "none" for spec in cfg.layers)
    num_mlp = sum(spec.mlp for spec in cfg.layers)
    weights = cfg.model_dim * (4 * cfg.model_dim * num_attention
                               + 2 * cfg.mlp_ratio * cfg.model_dim * num_mlp + cfg.padded_vocab_size)
    schedule = Schedule(cfg)
    keys = tokens = 0.0
    for stage, start, end in schedule.spans():
        weight = (end - start) * (stage.tokens_per_step or cfg.tokens_per_step)
        longest = stage.max_doc_len or cfg.max_doc_len
        windows = [getattr(stage, f"window_{spec.attention}")
                   for spec in cfg.layers if spec.attention != "none"]
        keys += weight * sum(min(window, longest, cfg.seq_len) for window in windows)
        tokens += weight
    return round(6 * weights + 12 * cfg.model_dim * keys / tokens)


def resolved_dict(cfg: Config, world_size: int) -> dict:
    """The resolved config as plain JSON types, with the derived numbers."""
    return {**json.loads(json.dumps(dataclasses.asdict(cfg))), "derived": derive(cfg, world_size)}


def config_from_dict(values: dict) -> Config:
    """A Config from its plain JSON types, as a checkpoint gives them; unknown ones are left out."""
    fields = config_fields()
    return Config(**{name: parse_value(fields[name], json.dumps(value)) if name in ("layers", "stages")
                     else tuple(value) if isinstance(value, list) else value
                     for name, value in values.items() if name in fields})


def format_help() -> str:
    """The text of --help: every field with type, default, range and meaning."""
    lines = ["usage: train_gpt.py [--field=value ...]    (or torchrun ... train_gpt.py, or ./run.sh)", "",
             "  --help           this text", "  --list_presets   the presets and what they are",
             "  --print_config   the resolved config as JSON; touches no data", "",
             "Defaults are those of --preset=track_1. '-' and '_' are the same in names."]
    for part in CONFIG_PARTS:
        lines += ["", part.__doc__.strip().rstrip(".") + ":"]
        for field in dataclasses.fields(part):
            meta = field.metadata
            kind = ("|".join(meta["choices"]) if meta["choices"]
                    else getattr(field.type, "__name__", "str").upper())
            kind = "JSON" if field.name in ("layers", "stages") else kind
            bounds = [f"{word} {meta[key]}" for key, word in (("low", "at least"), ("high", "at most"))
                      if meta[key] is not None]
            default = "" if kind == "JSON" or field.default == "" else f"[{show_value(field.default)}]"
            lines.append(f"  --{field.name}={kind} {default}\n        "
                         f"{field.metadata['help']}{' (' + ', '.join(bounds) + ')' if bounds else ''}")
    return "\n".join(lines)


# ==== RUNTIME ==============================================================================================
# Which device, which rank, what is fast here. The only section that reads the environment, and the only one
# that talks to other processes: every collective below does nothing on one rank.


@dataclass
class Traffic:
    """What this rank has sent to the others."""

    num_messages: int = 0
    num_bytes: float = 0.0

    def add(self, num_bytes: float) -> None:
        """Count one message, before it starts: a rank that falls behind the others is one they wait for."""
        self.num_messages += 1
        self.num_bytes += num_bytes


class Stop:
    """A wish to end early, at the next step boundary: the exit status it asks for, else 0."""

    def __init__(self):
        self.status = 0
        self.is_heeded = False  # while steps are made; before and after, a signal ends the process at once

    @contextmanager
    def catch_signals(self):
        """Turn the first SIGINT and SIGTERM into a wish; the second SIGINT interrupts."""
        seen = set()

        def ask(signum: int, _frame) -> None:
            """A signal handler."""
            if signum == signal.SIGINT and signum in seen:
                raise KeyboardInterrupt
            seen.add(signum)
            self.status = self.status or 128 + signum

        old = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM)}
        self.is_heeded = True
        try:
            yield
            self.is_heeded = False  # not where the run ends as it was asked to
        finally:
            for signum, handler in old.items():
                signal.signal(signum, handler)


@dataclass(frozen=True)
class Runtime:
    """Where and how this process computes."""

    device: torch.device
    rank: int
    local_rank: int
    world_size: int
    dtype: torch.dtype  # of activations and of the orthogonalisation
    use_compile: bool
    use_flex: bool  # FlexAttention (compiled CUDA) or block-wise scaled_dot_product_attention
    use_fp8: bool  # FP8 matmuls in the head while training
    use_kernels: bool  # our Triton kernels, else their plain forms
    peak_flops: float  # FLOP/s of a large matmul measured here: the ceiling MFU is stated against
    notes: tuple[str, ...]  # choices made here, printed once
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    watch: "Watch | None" = None  # several ranks only
    stop: Stop = dataclasses.field(default_factory=Stop)
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def agree_to_stop(self, step: int) -> int:
        """The exit status with which all ranks stop after so many steps, or 0: go on."""
        if self.watch is None:
            return self.stop.status
        if self.stop.status and self.watch.agree(step):
            return self.stop.status
        self.watch.begun = (step + 1, False)  # what follows the boundary needs the other ranks
        return 0

    def compile(self, fn):
        """torch.compile fn where this run compiles; shapes are static by design."""
        return torch.compile(fn, dynamic=False) if self.use_compile else fn


def env_int(name: str, default: int) -> int:
    """An integer torchrun sets in the environment."""
    return int(os.environ.get(name, default))


def start_runtime(cfg: Config, is_alone: bool = False) -> Runtime:
    """Choose device and precision by trying them, and join the process group unless told to stay alone."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device=cuda but PyTorch sees no CUDA device: use --device=cpu, "
                         "or install a CUDA build of torch")
    use_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    rank, local_rank, world_size = env_int("RANK", 0), env_int("LOCAL_RANK", 0), env_int("WORLD_SIZE", 1)
    if is_alone:
        rank, local_rank, world_size = 0, 0, 1
    check_ranks_fit(cfg, world_size)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        if local_rank >= torch.cuda.device_count():
            raise InputError(f"local rank {local_rank} has no GPU of its own: start at most "
                             f"{torch.cuda.device_count()} processes per node, or use --device=cpu")
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        keep_freed_memory()
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # on CPU too: bfloat16 stays bfloat16
    watch, traffic, stop = None, Traffic(), Stop()
    if world_size > 1:
        dist.init_process_group("nccl" if use_cuda else "gloo", device_id=device if use_cuda else None,
                                timeout=datetime.timedelta(hours=1))  # Watch is what notices failures
        watch = Watch(rank, world_size, cfg.comm_timeout, traffic, stop)
    choices = [probe_device(cfg, device)]
    if world_size > 1:  # all measured at once, as they will work; rank 0 decides, lest choices differ
        dist.broadcast_object_list(choices, src=0, device=device if use_cuda else None)
    if choices[0]["use_compile"]:  # all blocks share one piece of code, which has a graph for each make-up
        torch._dynamo.config.recompile_limit = 64
    return Runtime(device, rank, local_rank, world_size, **choices[0], traffic=traffic, watch=watch,
                   stop=stop)


def keep_freed_memory() -> None:
    """Let glibc keep freed activations for the next step: no page faults in the hot loop."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # not glibc; only speed is lost
        return
    libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: allocate from the heap up to 1 GiB
    libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: keep up to 2 GiB of free heap


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square matmul, best of five."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(6):  # the first is warm-up
        start = clock(device)
        a @ b
        best = min(best, clock(device) - start)
    return 2 * size**3 / best


def clock(device: torch.device) -> float:
    """Seconds, after all queued work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def probe_device(cfg: Config, device: torch.device) -> dict:
    """Decide precision, compilation and FP8 for this device by measuring; returns Runtime fields."""
    notes = []
    rates = {dtype: measure_matmul(device, dtype) for dtype in (torch.float32, torch.bfloat16)}
    if cfg.dtype == "auto":
        faster = device.type == "cuda" or rates[torch.bfloat16] > 1.5 * rates[torch.float32]
        dtype = torch.bfloat16 if faster else torch.float32
    else:
        dtype = getattr(torch, cfg.dtype)
    notes.append(f"activations: {str(dtype).removeprefix('torch.')} (matmul measured at "
                 f"{rates[torch.bfloat16] / 1e12:.2f} TFLOP/s in bfloat16, "
                 f"{rates[torch.float32] / 1e12:.2f} in float32)")
    use_compile = cfg.compile == "on" or cfg.compile == "auto" and device.type == "cuda"
    use_flex = use_compile and device.type == "cuda"
    notes.append(f"attention: {'FlexAttention' if use_flex else 'block-wise scaled_dot_product_attention'}; "
                 f"torch.compile {'on' if use_compile else 'off'}")
    use_fp8, fp8_note = choose_fp8(cfg, device)
    use_kernels, kernels_note = choose_kernels(cfg, device)
    return dict(dtype=dtype, use_compile=use_compile, use_flex=use_flex, use_fp8=use_fp8,
                use_kernels=use_kernels, peak_flops=rates[dtype], notes=(*notes, fp8_note, kernels_note))


def all_reduce_sum(tensor: Tensor, rt: Runtime) -> Tensor:
    """Sum a tensor over all ranks, in place."""
    if rt.world_size > 1:
        rt.traffic.add(2 * tensor.nbytes * (rt.world_size - 1) / rt.world_size)
        dist.all_reduce(tensor)
    return tensor


def broadcast_from_main(tensor: Tensor, rt: Runtime) -> None:
    """Overwrite a tensor with rank 0's."""
    if rt.world_size > 1:
        rt.traffic.add(tensor.nbytes * (rt.world_size - 1) / rt.world_size)
        dist.broadcast(tensor, src=0)


def count_units(num_units: int, rt: Runtime) -> list[int]:
    """How many units each rank owns: equally many, or one each as far as they go where ranks are more."""
    if num_units < rt.world_size:
        return [1] * num_units + [0] * (rt.world_size - num_units)
    assert num_units % rt.world_size == 0, f"{num_units} units cannot be split over {rt.world_size} ranks"
    return [num_units // rt.world_size] * rt.world_size


def local_shard(full: Tensor, rt: Runtime) -> Tensor:
    """This rank's (U/N, ...) view of (U, ...); empty for ranks beyond the last unit."""
    counts = count_units(full.size(0), rt)
    start = sum(counts[: rt.rank])
    return full[start : start + counts[rt.rank]]


def find_collective(name: str, old_name: str) -> Callable:
    """A collective under the name that PyTorch 2.13 gave it, or else under its older one."""
    return getattr(dist, name, None) or getattr(dist, old_name)


def start_reduce_scatter(full: Tensor, rt: Runtime) -> Callable[[], Tensor]:
    """Start summing (U, ...) over ranks; the returned function waits and gives this rank's (U/N, ...).

    Where units are fewer than ranks, their owners get them from every rank and add: a collective with equal
    parts would send padding.
    """
    if rt.world_size == 1:
        return lambda: full
    counts = count_units(full.size(0), rt)
    own = counts[rt.rank]
    rt.traffic.add(full.nbytes - full[:own].nbytes)
    if full.size(0) >= rt.world_size:
        shard = torch.empty_like(full[:own])  # (U/N, ...) of (U, ...)
        work = find_collective("reduce_scatter_single", "reduce_scatter_tensor")(shard, full, async_op=True)
        return lambda: (work.wait(), shard)[1]
    parts = full.new_empty(rt.world_size, own, *full.shape[1:])  # (N, 1 or 0, ...)
    work = dist.all_to_all_single(parts.flatten(0, 1), full, [own] * rt.world_size, counts, async_op=True)
    return lambda: (work.wait(), parts.sum(0))[1]


def start_all_gather(full: Tensor, rt: Runtime) -> Callable[[], object]:
    """Start filling (U, ...) with every rank's own units, in place; the returned function waits."""
    if rt.world_size == 1:
        return lambda: None
    shard = local_shard(full, rt)
    rt.traffic.add(shard.nbytes * (rt.world_size - 1))
    if full.size(0) >= rt.world_size:
        gather = find_collective("all_gather_single", "all_gather_into_tensor")
        return gather(full, shard, async_op=True).wait
    copies = shard.repeat(rt.world_size, *[1] * (shard.dim() - 1))  # (N or 0, ...)
    return dist.all_to_all_single(full, copies, count_units(full.size(0), rt),
                                  [shard.size(0)] * rt.world_size, async_op=True).wait


def gather_units(shard: Tensor, num_units: int, rt: Runtime) -> Tensor:
    """All ranks' (U/N, ...) as (U, ...), on every rank."""
    full = shard.new_empty(num_units, *shard.shape[1:])
    local_shard(full, rt).copy_(shard)
    start_all_gather(full, rt)()
    return full


def share_from_main(value, rt: Runtime):
    """Rank 0's value, a plain Python object, on every rank."""
    box = [value]
    if rt.world_size > 1:
        rt.traffic.add(0)
        dist.broadcast_object_list(box, src=0, device=rt.device if rt.device.type == "cuda" else None)
    return box[0]


def copy_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Start copying a tensor to the CPU, so that it may change at once; the returned function waits."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        copy = tensor.clone()
        return lambda: copy
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return lambda: (event.synchronize(), copy)[1]


def wait_for_ranks(rt: Runtime) -> None:
    """Return when every rank has come here."""
    if rt.world_size > 1:
        rt.traffic.add(0)
        dist.barrier(device_ids=[rt.local_rank] if rt.device.type == "cuda" else None)


class Watch(threading.Thread):
    """Ends this process when another rank has failed, died or stalled, and says which, and why.

    Twice a second every rank writes a sign of life to the job's store and reads the others'. A collective
    that times out would only tell that somebody is missing, and not before the longest compilation could be
    over. Here a stalled rank is one that has started fewer messages than another, and is not compiling.
    """

    GRACE = 3.0  # seconds of silence that tell the dead from the living once something is known to be wrong
    STOP_SECONDS = 25.0  # from a signal to the end, checkpoint included: launchers kill after 30
    COMPILERS = ("convert_frame.py", "compile_fx.py")  # on the stack while TorchDynamo or Inductor compile

    def __init__(self, rank: int, world_size: int, timeout: float, traffic: Traffic, stop: Stop):
        super().__init__(daemon=True, name="watch")
        self.rank, self.traffic, self.stop, self.patience = rank, traffic, stop, 0.8 * timeout  # seconds
        local_rank, local_size = env_int("LOCAL_RANK", rank), env_int("LOCAL_WORLD_SIZE", world_size)
        self.neighbours = range(rank - local_rank, rank - local_rank + local_size)  # ranks of this node
        self.store = dist.TCPStore(os.environ["MASTER_ADDR"], env_int("MASTER_PORT", 0), is_master=False,
                                   wait_for_workers=False, timeout=datetime.timedelta(seconds=timeout))
        self.has_launcher = "TORCHELASTIC_RUN_ID" in os.environ  # else the store lives in rank 0
        attempt = env_int("TORCHELASTIC_RESTART_COUNT", 0)
        self.keys = [f"train_gpt/{attempt}/{other}" for other in range(world_size)]
        self.main_thread, self.beat = threading.get_ident(), 0
        self.is_strict = False  # set once all ranks have equal work
        self.is_alarmed = self.is_over = False
        self.begun = (0, False)  # steps begun, and whether this rank waits there to stop with the others
        self.verdict: tuple[int, str, float] | None = None  # (rank, its fate, seconds to wait before acting)
        self.signs: list[dict] = []
        self.seen, self.moved = ([time.monotonic()] * world_size for _ in range(2))
        self.inbox, self.outbox = socket.socketpair()
        self.inbox.settimeout(min(0.5, timeout / 10))
        self.outbox.setblocking(False)

    def __enter__(self) -> "Watch":
        """Start watching. Signals reach this thread even while the main one is stuck in a collective."""
        signal.set_wakeup_fd(self.outbox.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._write_sign()
        self.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _) -> None:
        """Tell the others that this rank has ended, or why; learn from them who broke a collective."""
        lost_contact = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, RunStopped):
            pass  # they all have
        elif lost_contact:
            self.is_alarmed = True
            self.join(4 * self.GRACE)  # does not return if the culprit is found
        elif isinstance(error, Exception):
            is_common = isinstance(error, RunError) and not error.of_one_rank  # others should meet it, too
            self.verdict = (self.rank, f"failed: {kind.__name__}: {' '.join(str(error).split())[:200]}",
                            self.GRACE if is_common else 0.0)
        self.is_over = True
        self.outbox.send(b"\0")
        self.join()
        faulthandler.cancel_dump_traceback_later()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._write_last_sign()

    def run(self) -> None:
        """The thread: tell, look, judge, until the run is over or lost."""
        status, deadline = 1, math.inf
        while not self.is_over:
            signum = self._receive_signal()
            if signum is not None:
                is_orderly = self.stop.is_heeded and not self.is_alarmed
                status, self.is_alarmed = 128 + signum, True
                self.stop.status = self.stop.status or status
                deadline = time.monotonic() + (self.STOP_SECONDS if is_orderly else
                                               1 if signum == signal.SIGINT else 2 * self.GRACE)
            try:
                self._write_sign()
                self._read_signs()
            except RuntimeError:
                self.verdict = ((-1, "the launcher of this job is gone", 0.0) if self.has_launcher
                                else (0, "is gone, and with it the store of this job", 0.0))
            faulthandler.dump_traceback_later(self.patience * 1.15, exit=True)  # should the store hang
            verdict = self.verdict or self._judge()
            if verdict and not self.is_over:
                self._leave(verdict, f"rank {verdict[0]} {verdict[1]}".removeprefix("rank -1 "), 1)
            is_told = (status == 128 + signal.SIGTERM and not self.stop.is_heeded
                       and all(sign["alarmed"] for sign in self.signs))
            if is_told or time.monotonic() > deadline:
                self._leave(None, f"by signal {signal.Signals(status - 128).name}", status)

    def _receive_signal(self) -> int | None:
        try:
            byte = self.inbox.recv(1)
        except TimeoutError:
            return None
        return byte[0] if byte and byte[0] in (signal.SIGINT, signal.SIGTERM) else None

    def _write_sign(self) -> None:
        stack, frame = [], sys._current_frames().get(self.main_thread)
        while frame is not None:
            stack.append((os.path.basename(frame.f_code.co_filename), frame.f_code.co_name, frame.f_lineno))
            frame = frame.f_back
        own = next((entry for entry in stack if entry[0] == os.path.basename(__file__)), (*stack, None)[0])
        is_excused = not self.is_strict or any(
            entry[0] in self.COMPILERS or entry[1] == "wait_for_disk" for entry in stack)
        self.beat += 1
        self.store.set(self.keys[self.rank], json.dumps(dict(
            beat=self.beat, messages=self.traffic.num_messages, alarmed=self.is_alarmed, over=self.is_over,
            excused=is_excused, verdict=self.verdict, stop=self.stop.status,
            begun=self.begun, place=f"{own[1]}() at {own[0]}:{own[2]}" if own else "no code")))

    def _read_signs(self) -> None:
        if not self.store.check(self.keys):
            return  # some rank has not begun to write
        signs, now = list(map(json.loads, self.store.multi_get(self.keys))), time.monotonic()
        front = max(sign["messages"] for sign in signs)
        for rank, (sign, old) in enumerate(zip(signs, self.signs or signs)):
            if sign != old:
                self.seen[rank] = now
            if sign["messages"] != old["messages"] or sign["messages"] == front or sign["excused"]:
                self.moved[rank] = now
        self.signs = signs
        self.stop.status = self.stop.status or max(sign["stop"] for sign in signs)

    def agree(self, step: int) -> bool:
        """Whether all ranks stop after so many steps; else one has begun the next one and needs this.

        Called by the main thread of each rank that knows of the wish. Nobody passes a step at which all are
        seen to wait: the first to do so would never have waited there.
        """
        self.begun = (step, True)
        while True:
            begun = [tuple(sign["begun"]) for sign in self.signs]
            if begun and max(begun)[0] > step:
                return False
            if begun and min(begun) == (step, True):
                return True
            time.sleep(0.02)

    def _judge(self) -> tuple[int, str, float] | None:
        now, limit = time.monotonic(), self.GRACE if self.is_alarmed else self.patience
        for rank, sign in enumerate(self.signs):
            if sign["verdict"] and now - self.seen[rank] >= sign["verdict"][2]:
                return (*sign["verdict"][:2], 0.0)
        for rank, sign in enumerate(self.signs):
            if sign["over"]:
                continue
            if now - self.seen[rank] > limit:
                return rank, ("gives no sign of life: killed, out of memory, or its machine or network is "
                              f"down (for {now - self.seen[rank]:.0f} s)"), 0.0
            if now - self.moved[rank] > self.patience:
                return rank, (f"has stood still for {now - self.moved[rank]:.0f} s, the others waiting for "
                              f"it, in {sign['place']}"), 0.0
        return None

    def _leave(self, verdict: tuple[int, str, float] | None, text: str, status: int) -> typing.NoReturn:
        self.verdict, self.is_over = verdict, True
        now = time.monotonic()
        living = [rank for rank in self.neighbours
                  if now - self.seen[rank] <= self.GRACE and (verdict is None or rank != verdict[0])]
        if self.rank == min(living, default=self.rank):  # one line per node
            os.write(2, f"\ntrain_gpt.py: stopped: {text}\n".encode())
        self._write_last_sign()
        os._exit(status)

    def _write_last_sign(self) -> None:
        with suppress(RuntimeError):  # without the store there is nobody to tell
            self._write_sign()
        if self.verdict and self.rank == 0 and not self.has_launcher:  # let the others read it
            time.sleep(3 * self.inbox.gettimeout() + self.verdict[2])


# ==== KERNELS ==============================================================================================
# Mathematics on local tensors. Each operation that has a fast and a plain form has one dispatcher; both
# forms follow the same mask function, and a test proves that they agree.

BLOCK = 128  # tokens of one attention block: windows and documents are tested block by block first
DENSE_BLOCK = 64  # the same for the plain form, where smaller blocks waste fewer masked products


def rms_norm(x: Tensor) -> Tensor:
    """Divide the last dimension by its root mean square. No gain; float32 epsilon for every dtype."""
    return x * torch.rsqrt(
        (x * x).mean(dim=-1, keepdim=True, dtype=torch.float32) + 1.1920929e-07).type_as(x)


def relu_squared(x: Tensor) -> Tensor:
    """max(0, x)^2, as a product: its backward needs no power."""
    return x * F.relu(x)


def scale_by(x: Tensor, factor: Tensor) -> Tensor:
    """x (T, ...) times one learned number, in x.dtype.

    Its gradient is summed row by row, then over rows in the number's own precision: more exact than one sum
    in bfloat16, and the same to the last bit on any number of CPU threads.
    """
    return x * factor.expand(x.size(0), *[1] * (x.dim() - 1)).type_as(x)  # by (T, 1, ...)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel j against channel j + K/2 by the angle of each position, in the precision of the tables.

    x (T, ..., K); cos, sin broadcast against it, sin with the sign of each half (make_rotary).
    Source: record 32.
    """
    return (x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin).type_as(x)


def make_mask_mod(doc_ids: Tensor, window: Tensor | int) -> Callable:
    """The one definition of who sees whom. doc_ids (T,); window in tokens, itself excluded."""
    def mask_mod(_batch, _head, q_idx: Tensor, kv_idx: Tensor) -> Tensor:  # causal, near, of one document
        return (kv_idx <= q_idx) & (q_idx - kv_idx <= window) & (doc_ids[q_idx] == doc_ids[kv_idx])

    return mask_mod


def build_block_mask(doc_ids: Tensor, window: Tensor) -> BlockMask:
    """Block mask for FlexAttention from the document range of each block; never a T x T matrix.

    doc_ids (T,) never decreases; window is a 0-d tensor, so that one compiled graph serves every window.
    Blocks in which all pairs are visible skip the mask function. Source: records 12 and 16.
    """
    first, last = doc_ids.view(-1, BLOCK)[:, 0], doc_ids.view(-1, BLOCK)[:, -1]  # (T/128,) document range
    block = torch.arange(first.size(0), device=doc_ids.device, dtype=torch.int32)
    distance = (block[:, None] - block) * BLOCK  # (T/128, T/128) tokens from query block to key block
    overlap = (first[:, None] <= last) & (first <= last[:, None])
    visible = (distance >= 0) & (distance - (BLOCK - 1) <= window) & overlap
    full = ((distance > 0) & (distance + (BLOCK - 1) <= window)
            & (first[:, None] == last) & (first == last[:, None]))

    def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
        counts = chosen.sum(dim=-1, dtype=torch.int32)  # (T/128,)
        order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()  # chosen key blocks first
        return counts[None, None].contiguous(), order[None, None].contiguous()  # (1, 1, T/128[, T/128])

    return BlockMask.from_kv_blocks(*ordered(visible & ~full), *ordered(full), BLOCK_SIZE=BLOCK,
                                    mask_mod=make_mask_mod(doc_ids, window))


def build_dense_mask(doc_ids: Tensor, window: int) -> Tensor:
    """Mask for attend_dense (T/C, 1, C, M * C): a query block, and its own and M - 1 earlier key blocks."""
    num_tokens = doc_ids.size(0)
    size = math.gcd(num_tokens, DENSE_BLOCK)  # C
    num_blocks = num_tokens // size
    spans = min(num_blocks, 1 + -(-window // size))  # M: key blocks a query block can reach
    q_idx = torch.arange(num_tokens, device=doc_ids.device).view(num_blocks, 1, size, 1)
    start = (torch.arange(num_blocks, device=doc_ids.device) - (spans - 1)) * size
    kv_idx = start.view(-1, 1, 1, 1) + torch.arange(spans * size, device=doc_ids.device)  # (T/C, 1, 1, M*C)
    mask_mod = make_mask_mod(doc_ids, window)
    return (kv_idx >= 0) & mask_mod(None, None, q_idx, kv_idx.clamp(min=0))


def attend_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in blocks of C queries over M * C keys with a dense mask. q, k, v (T, H, K) -> (T, H, K)."""
    num_blocks, _, size, num_keys = mask.shape
    spans = num_keys // size

    def blocks(x: Tensor) -> Tensor:
        return x.unflatten(0, (num_blocks, size)).transpose(1, 2)  # (T/C, H, C, K)

    def widen(x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, (spans - 1) * size, 0)).unflatten(0, (-1, size))  # (T/C + M - 1, C, H, K)
        x = torch.cat([x[i : i + num_blocks] for i in range(spans)], dim=1)  # (T/C, M * C, H, K)
        return x.transpose(1, 2)  # (T/C, H, M * C, K)

    # on the CPU the plain products of the MATH form beat the fused kernel at this block size
    backends = ([SDPBackend.MATH] if q.device.type == "cpu"
                else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    with sdpa_kernel(backends):
        y = F.scaled_dot_product_attention(blocks(q), widen(k), widen(v), attn_mask=mask, scale=1.0)
    return y.transpose(1, 2).flatten(0, 1)  # (T, H, K)


def attend_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Attention through FlexAttention. q, k, v (T, H, K) -> (T, H, K). Only fast when compiled."""
    q, k, v = (x[None].transpose(1, 2).contiguous() for x in (q, k, v))  # (1, H, T, K)
    return flex_attention(q, k, v, block_mask=mask, scale=1.0)[0].transpose(0, 1)  # (T, H, K)


class KeyValues:
    """Keys and values (S, H, K) of the last tokens that one layer slot still sees while text is written."""

    def __init__(self, window: int):
        self.window, self.keys, self.values = window, None, None


def attend_cached(q: Tensor, k: Tensor, v: Tensor, cache: KeyValues) -> Tensor:
    """Attention of T new tokens over the cache and themselves, who then join it. (T, H, K) -> (T, H, K)."""
    if cache.keys is not None:
        k, v = torch.cat((cache.keys, k)), torch.cat((cache.values, v))  # (S + T, H, K)
    kv_idx = torch.arange(k.size(0), device=k.device)
    mask = make_mask_mod(torch.zeros_like(kv_idx), cache.window)(
        None, None, kv_idx[-q.size(0) :, None], kv_idx)  # (T, S + T)
    cache.keys, cache.values = k[-cache.window :], v[-cache.window :]
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # (H, T or S + T, K)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0).transpose(0, 1)  # (T, H, K)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor | KeyValues) -> Tensor:
    """Windowed document attention with the softmax scale already in q. q, k, v (T, H, K) -> (T, H, K)."""
    if isinstance(mask, KeyValues):
        return attend_cached(q, k, v, mask)
    return attend_flex(q, k, v, mask) if isinstance(mask, BlockMask) else attend_dense(q, k, v, mask)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap) + cap, as a sigmoid, in float32; a cap of 0 leaves logits as they are.

    Source: records 9 and 19.
    """
    return 2 * cap * torch.sigmoid(logits.float() / (cap / 2)) if cap else logits.float()


if triton is not None:

    @triton.jit
    def symmetric_kernel(x_ptr, add_ptr, out_ptr, M, K, alpha, beta, HAS_ADD: tl.constexpr,
                         BLOCK: tl.constexpr, DEPTH: tl.constexpr):
        """One tile on or above the diagonal of alpha X X^T + beta A, stored there and mirrored."""
        i, j, unit = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        if j < i:
            return
        rows, cols = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
        x_ptr += unit * M * K
        total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for start in range(0, K, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            left = tl.load(x_ptr + rows[:, None] * K + depth[None, :],
                           mask=(rows[:, None] < M) & (depth[None, :] < K), other=0.0)
            right = tl.load(x_ptr + cols[None, :] * K + depth[:, None],
                            mask=(cols[None, :] < M) & (depth[:, None] < K), other=0.0)
            total += tl.dot(left, right)
        total *= alpha
        inside = (rows[:, None] < M) & (cols[None, :] < M)
        here = unit * M * M + rows[:, None] * M + cols[None, :]
        if HAS_ADD:
            total += beta * tl.load(add_ptr + here, mask=inside, other=0.0).to(tl.float32)
        total = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + here, total, mask=inside)
        if j > i:  # a tile on the diagonal is whole as it is
            tl.store(out_ptr + unit * M * M + cols[None, :] * M + rows[:, None], total, mask=inside)

    @triton.jit
    def cross_entropy_kernel(logits_ptr, targets_ptr, losses_ptr, grads_ptr, V, grad_scale, cap,
                             BLOCK: tl.constexpr):
        """One token: its loss and d loss / d logits. Capped logits are at most 2 cap: it serves as max."""
        row = tl.program_id(0).to(tl.int64)
        logits_ptr += row * V
        grads_ptr += row * V
        target = tl.load(targets_ptr + row)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=-float("inf")).to(tl.float32)
            total += tl.where(at < V, tl.exp(2 * cap / (1 + tl.exp(-2 * logits / cap)) - 2 * cap), 0.0)
        log_total = tl.log(tl.sum(total, axis=0)) + 2 * cap
        aim = tl.load(logits_ptr + target).to(tl.float32)
        tl.store(losses_ptr + row, log_total - 2 * cap / (1 + tl.exp(-2 * aim / cap)))
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + at, mask=at < V, other=0.0).to(tl.float32)
            gate = 1 / (1 + tl.exp(-2 * logits / cap))
            grad = tl.exp(2 * cap * gate - log_total) - tl.where(at == target, 1.0, 0.0)
            grad = grad * 4 * gate * (1 - gate) / grad_scale  # the slope of the cap, whatever it is
            tl.store(grads_ptr + at, grad.to(grads_ptr.dtype.element_ty), mask=at < V)


def symmetric_product(x: Tensor, add: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0,
                      use_kernels: bool = False) -> Tensor:
    """X X^T for each X of x (U, M, K) -> (U, M, M); with add (U, M, M), symmetric, alpha X X^T + beta A.

    The kernel computes one triangle: half the FLOPs. Source: record 27.
    """
    if not use_kernels:
        if add is None:
            return torch.bmm(x, x.mT)
        return torch.baddbmm(add, x, x.mT, beta=beta, alpha=alpha)
    x = x.contiguous()
    num_units, size, depth = x.shape
    out = x.new_empty(num_units, size, size)
    tiles = triton.cdiv(size, 128)
    symmetric_kernel[tiles, tiles, num_units](x, x if add is None else add.contiguous(), out, size, depth,
                                              alpha, beta, add is not None, BLOCK=128, DEPTH=64,
                                              num_warps=8, num_stages=4)
    return out


def choose_kernels(cfg: Config, device: torch.device) -> tuple[bool, str]:
    """(whether to use the Triton kernels, one line saying why), by comparing each with its plain form."""
    if cfg.kernels == "off" or cfg.kernels == "auto" and device.type == "cpu":
        return False, "kernels: plain PyTorch"
    try:
        if triton is None:
            raise RuntimeError("Triton is not installed")
        # Triton's interpreter, which is what a CPU has, cannot multiply bfloat16
        x = torch.randn(2, 200, 300, device=device).to(
            torch.bfloat16 if device.type == "cuda" else torch.float32)
        logits, targets = x[0].contiguous() * 5, torch.arange(200, device=device)
        gram = symmetric_product(x)
        pairs = [(symmetric_product(x, use_kernels=True), gram),
                 (symmetric_product(gram, gram, 0.5, 2.0, True), symmetric_product(gram, gram, 0.5, 2.0)),
                 *zip(softcapped_cross_entropy(logits, targets, 15.0, x.dtype, use_kernels=True),
                      softcapped_cross_entropy(logits, targets, 15.0, x.dtype))]
        for ours, plain in pairs:
            error = (ours.float() - plain.float()).norm() / plain.float().norm()
            if not error < 0.01:  # bfloat16 rounds to 0.002 rms
                raise RuntimeError(f"a kernel differs from its plain form by {error:.3g}")
    except Exception as error:  # whatever a compiler raises: training must not depend on it
        reason = " ".join(str(error).split())[:120]
        if cfg.kernels == "on":
            raise InputError(f"--kernels=on but they fail on this device ({reason}): "
                             "use --kernels=auto or off") from None
        return False, f"kernels: plain PyTorch ({reason})"
    return True, "kernels: Triton"


def softcapped_cross_entropy(logits: Tensor, targets: Tensor, cap: float, grad_dtype: torch.dtype,
                             grad_scale: float = 1.0, use_kernels: bool = False) -> tuple[Tensor, Tensor]:
    """Losses (T,) float32 of logits (T, V) once softcapped, and d loss / d logits (T, V) over grad_scale.

    The gradient comes with the loss, in the precision in which it will be multiplied. No entry exceeds 1
    over grad_scale. Without a cap always in plain form. Source: the fused kernel of 2026-01-16.
    """
    if use_kernels and cap:
        losses = torch.empty_like(targets, dtype=torch.float32)
        grads = torch.empty_like(logits, dtype=grad_dtype)
        cross_entropy_kernel[(logits.size(0),)](logits, targets, losses, grads, logits.size(1), grad_scale,
                                                cap, BLOCK=4096, num_warps=8)
        return losses, grads
    capped = softcap(logits, cap)  # (T, V)
    log_total = torch.logsumexp(capped, dim=-1, keepdim=True)  # (T, 1)
    grads = torch.exp(capped - log_total)
    at_target = targets[:, None]
    losses = (log_total - capped.gather(1, at_target))[:, 0]
    grads.scatter_add_(1, at_target, torch.full_like(log_total, -1.0))
    if cap:
        grads = grads * capped * (2 * cap - capped) / cap**2  # the slope of the cap
    return losses, (grads / grad_scale).to(grad_dtype)


# ==== FP8 ==================================================================================================
# The head and its loss, in 8 bits where the device multiplies them: e4m3 for activations and weights, e5m2
# for gradients, divided by static scales before the cast. Training only; validation always multiplies in the
# activation dtype. Source: record 32.

FP8_WEIGHT_SCALE = 2.0**-9
FP8_GRAD_SCALE = 1 / 448  # belongs to a loss summed over tokens: an entry of d loss / d logits is at most 1


def fp8_x_scale(dim: int) -> float:
    """Scale of activations with unit root mean square: their entries are at most sqrt(D)."""
    return math.sqrt(dim) / 448


def measure_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> dict[str, float]:
    """Shares of the values that to_fp8() would saturate, and flush to zero."""
    is_zero = to_fp8(x.float(), scale, dtype).float() == 0
    return dict(saturated=(x.float().abs() > scale * torch.finfo(dtype).max).float().mean().item(),
                flushed=((x != 0) & is_zero).float().mean().item())


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Divide by a static scale and cast, saturating at the largest finite value."""
    limit = torch.finfo(dtype).max
    return (x / scale).clamp_(-limit, limit).to(dtype)


def scaled_matmul(a: Tensor, b: Tensor, scale_a: float, scale_b: float, out_dtype: torch.dtype,
                  fast: bool) -> Tensor:
    """(a * scale_a) @ (b * scale_b).T in FP8. a (M, K), b (N, K), both row-major -> (M, N)."""
    scales = (torch.full((), s, dtype=torch.float32, device=a.device) for s in (scale_a, scale_b))
    return torch._scaled_mm(a, b.T, *scales, out_dtype=out_dtype, use_fast_accum=fast)


class HeadLoss(torch.autograd.Function):
    """Head, softcap and cross-entropy in one, whose gradients are made together with the loss.

    Logits exist for LOGITS_CHUNK tokens at a time and never in float32; their gradient has the precision in
    which it is multiplied. FP8 is for x of unit root mean square, whose entries are at most sqrt(D).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, cap: float, use_fp8: bool,
                use_kernels: bool) -> Tensor:
        """x (T, D), weight (V, D), targets (T,) -> loss summed over tokens, float32."""
        w = weight.type_as(x)
        multiply = multiply_fp8(w, x.size(1)) if use_fp8 else multiply_plain(w)
        loss, grad_xs, grad_w = torch.zeros((), device=x.device), [], None
        for part, target in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)):
            part_loss, grad_x, part_grad_w = multiply(part, target, cap, use_kernels)
            loss = loss + part_loss
            grad_xs.append(grad_x)
            grad_w = part_grad_w if grad_w is None else grad_w + part_grad_w  # (V, D)
        ctx.save_for_backward(torch.cat(grad_xs), grad_w.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        """The saved gradients times that of the loss."""
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.type_as(grad_x), grad_w * grad.type_as(grad_w), None, None, None, None


LOGITS_CHUNK = 16_384  # tokens whose logits exist at once


def multiply_plain(w: Tensor) -> Callable:
    """The head's matmuls and loss in the activation dtype."""
    def multiply(x: Tensor, targets: Tensor, cap: float, use_kernels: bool) -> tuple[Tensor, ...]:
        """One chunk x (T, D), targets (T,) -> loss (), grad_x (T, D), grad_w (V, D) float32."""
        losses, grads = softcapped_cross_entropy(x @ w.T, targets, cap, x.dtype, use_kernels=use_kernels)
        return losses.sum(), grads @ w, (grads.T @ x).float()

    return multiply


def multiply_fp8(w: Tensor, dim: int) -> Callable:
    """The same in FP8; the weight is cast once for all chunks."""
    x_scale = fp8_x_scale(dim)
    w8 = to_fp8(w, FP8_WEIGHT_SCALE, torch.float8_e4m3fn)  # (V, D)
    w8_turned = w8.T.contiguous()  # (D, V)

    def multiply(x: Tensor, targets: Tensor, cap: float, use_kernels: bool) -> tuple[Tensor, ...]:
        """As in multiply_plain."""
        x8 = to_fp8(x, x_scale, torch.float8_e4m3fn)
        logits = scaled_matmul(x8, w8, x_scale, FP8_WEIGHT_SCALE, x.dtype, fast=True)  # (T, V)
        losses, grad8 = softcapped_cross_entropy(logits, targets, cap, torch.float8_e5m2, FP8_GRAD_SCALE,
                                                 use_kernels)
        grad_x = scaled_matmul(grad8, w8_turned, FP8_GRAD_SCALE, FP8_WEIGHT_SCALE, x.dtype, fast=False)
        grad_w = scaled_matmul(grad8.T.contiguous(), x8.T.contiguous(), FP8_GRAD_SCALE, x_scale,
                               torch.float32, fast=False)
        return losses.sum(), grad_x, grad_w

    return multiply


def choose_fp8(cfg: Config, device: torch.device) -> tuple[bool, str]:
    """(whether the head trains in FP8, one line saying why), by running the real matmuls once."""
    if cfg.fp8_head == "off":
        return False, "fp8 head: off (--fp8_head=off)"
    if cfg.fp8_head == "auto" and device.type == "cpu":
        return False, "fp8 head: off (no CPU multiplies FP8 faster than bfloat16; --fp8_head=on forces it)"
    try:
        if cfg.model_dim % 16:
            raise RuntimeError(f"model_dim={cfg.model_dim} is not a multiple of 16")
        x = torch.randn(32, cfg.model_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        w = torch.zeros(128, cfg.model_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(32, device=device, dtype=torch.int64)
        HeadLoss.apply(x, w, targets, cfg.softcap, True, False).backward()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:120]
        if cfg.fp8_head == "on":
            raise InputError(f"--fp8_head=on but FP8 matmuls fail on this device ({reason}): "
                             "use --fp8_head=auto or off") from None
        return False, f"fp8 head: off, {device.type} multiplies in the activation dtype ({reason})"
    return True, "fp8 head: on"


# ==== UPDATE RULES =========================================================================================
# One step of one bank shard, in place, on local tensors: no ranks, no schedules, no module. To add a rule,
# write a function of the same signature and name it in RULES.


class Knobs(typing.NamedTuple):
    """What schedule and config tell a rule; tensors are 0-d on the CPU, so that no value recompiles."""

    momentum: Tensor
    grad_scale: Tensor  # makes gradients those of a loss summed over GRAD_TOKENS tokens
    bias_correction1: Tensor  # 1 - beta1^t
    bias_correction2: Tensor  # 1 - beta2^t
    betas: tuple[float, float]
    eps: float
    dtype: torch.dtype  # of the orthogonalisation
    use_kernels: bool = False
    muon_scale: str = "spectral"
    momentum_form: str = "ema"


def orthogonalize(x: Tensor, dtype: torch.dtype, num_steps: int = 5, use_kernels: bool = False) -> Tensor:
    """Newton-Schulz: push the singular values of each matrix of x (U, rows, columns) to about 0.7 - 1.2.

    The quintic a X + b (X X^T) X + c (X X^T)^2 X in `dtype`, on the wide side. Returns x.shape in `dtype`.
    Source: Muon; the form of record 11.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(-2) > x.size(-1)
    x = x.to(dtype)
    x = x.mT if tall else x  # (U, short, long)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(dtype)
    for _ in range(num_steps):
        gram = symmetric_product(x, use_kernels=use_kernels)  # (U, short, short)
        gram = symmetric_product(gram, gram, c, b, use_kernels)
        x = torch.baddbmm(x, gram, x, beta=a)  # (U, short, long)
    return x.mT if tall else x


def scale_step(step: Tensor, muon_scale: str) -> Tensor | float:
    """What an orthogonalised step (U, rows, columns) is multiplied by, as a number or (U, 1, 1)."""
    rows, columns = step.shape[-2:]
    if muon_scale == "measured_rms":  # record 3
        return (rows * columns) ** 0.5 / step.float().norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    return max(rows, columns) ** 0.5 if muon_scale == "rms" else max(1, rows / columns) ** 0.5


def init_muon(param: Tensor) -> dict[str, Tensor]:
    """State of update_muon: the momentum, like the parameter."""
    return dict(momentum=torch.zeros_like(param))


def update_muon(param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: Tensor, decay: Tensor,
                knobs: Knobs) -> None:
    """Orthogonalised Nesterov momentum, and decoupled decay.

    param, grad (U, rows, columns); lr (U or 1, 1, 1) per step, in spectral norm or as knobs.muon_scale says;
    decay like lr, a share of the weight. Source: Muon, and records 3 to 32.
    """
    momentum = state["momentum"]
    grad = (grad * knobs.grad_scale).to(momentum.dtype)
    if knobs.momentum_form == "ema":
        grad = grad * (1 - knobs.momentum)
    momentum.mul_(knobs.momentum).add_(grad)
    direction = momentum * knobs.momentum + grad
    step = orthogonalize(direction, knobs.dtype, use_kernels=knobs.use_kernels)
    param.mul_(1 - decay).sub_(step * (lr * scale_step(step, knobs.muon_scale)))


def init_adam(param: Tensor) -> dict[str, Tensor]:
    """State of update_adam: both moments, like the parameter."""
    return dict(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))


def update_adam(param: Tensor, grad: Tensor, state: dict[str, Tensor], lr: Tensor, decay: Tensor,
                knobs: Knobs) -> None:
    """Adam with bias correction and decoupled decay (AdamW), computed in float32.

    param, grad of one shape; lr broadcasts against them, in parameter units per step; decay like lr, a share
    of the weight. Source: record 32.
    """
    beta1, beta2 = knobs.betas
    grad = grad.float() * knobs.grad_scale
    exp_avg = state["exp_avg"].float() * beta1 + grad * (1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].float() * beta2 + grad.square() * (1 - beta2)
    state["exp_avg"].copy_(exp_avg)
    state["exp_avg_sq"].copy_(exp_avg_sq)
    step = exp_avg / knobs.bias_correction1 / ((exp_avg_sq / knobs.bias_correction2).sqrt() + knobs.eps)
    param.copy_(param.float() * (1 - decay) - step * lr)


class Rule(typing.NamedTuple):
    """An update rule: how to start, how to step, and whether it must see whole matrices."""

    init: Callable
    update: Callable
    per_matrix: bool


RULES = {"muon": Rule(init_muon, update_muon, True), "adamw": Rule(init_adam, update_adam, False)}

# ==== OPTIMIZER ============================================================================================
# Parameters live in banks: one tensor per group of like parameters, a second one for their gradients. A bank
# is cut into bins, the messages: as soon as all gradients of a bin are final it is reduce-scattered, each
# rank updates its share of the units in one batched call, and an all-gather brings the new parameters back,
# waited for where the model next uses them. On one rank the share is the bank and nothing is copied or sent.
# Source: records 23, 24 and 32.

BIG_PARAMETER = 2**20  # elements from which an elementwise parameter gets a bank of its own
ALIGNMENT = 32  # elements: parameters of elementwise banks begin on 64 bytes at least


@dataclass(frozen=True)
class ParamSpec:
    """How one parameter is trained; set beside the parameter by declare()."""

    group: str  # matrix | embed | value_embed | head | scalar: learning rate and rule come from the config
    lr_mul: float | tuple[float, ...] = 1.0  # or of each matrix of a stack
    wd_mul: float = 1.0


@dataclass(frozen=True)
class GroupHyper:
    """What all parameters of a group share."""

    rule: str
    lr: float
    weight_decay: float = 0.0
    every: int = 1  # steps from one update to the next


def declare(data: Tensor, group: str, lr_mul: float | tuple[float, ...] = 1.0,
            wd_mul: float = 1.0) -> nn.Parameter:
    """A parameter with its ParamSpec."""
    param = nn.Parameter(data)
    param.spec = ParamSpec(group, lr_mul, wd_mul)
    return param


def group_hypers(cfg: OptimConfig) -> dict[str, GroupHyper]:
    """The group table: rule, peak learning rate, decay and steps between updates."""
    decay, every = cfg.adam_weight_decay, cfg.adam_every
    return {
        "matrix": GroupHyper(cfg.matrix_rule, cfg.matrix_lr, cfg.matrix_weight_decay),
        "embed": GroupHyper("adamw", cfg.embed_lr, decay, every),
        "value_embed": GroupHyper("adamw", cfg.value_embed_lr, decay, every),
        "head": GroupHyper("adamw", cfg.head_lr, decay, every),
        "scalar": GroupHyper("adamw", cfg.scalar_lr, every=every),
    }


class Bin:
    """Units of a bank that travel as one message: parameters (U, *unit), gradients, this rank's state.

    A unit is what must not be split over ranks: a matrix for per-matrix rules, else one element.
    """

    def __init__(self, name: str, params: Tensor, grads: Tensor, multipliers: Tensor, group: str,
                 hyper: GroupHyper, rt: Runtime):
        self.name, self.group, self.hyper, self.rt = name, group, hyper, rt
        self.params, self.grads = params, grads
        self.shard = local_shard(params, rt)  # (U/N, *unit)
        self.state = RULES[hyper.rule].init(self.shard)
        self.lr_mul, self.wd_mul = (  # (U/N, 1, 1) or (U/N,), or of one element where all are equal
            m[:1].clone() if bool((m == m.flatten()[0]).all()) else local_shard(m, rt).clone()
            for m in multipliers)
        self.num_params = self.missing = 0  # parameters with units here; those whose gradient is not final
        self.tokens = 0  # whose gradients have been summed since the last update
        self.wait_reduced: Callable | None = None
        self.wait_gathered: Callable | None = None

    def start_reduce(self) -> None:
        """Send the gradients; called as soon as the last of them is final."""
        self.wait_reduced = start_reduce_scatter(self.grads, self.rt)

    def update(self, update: Callable, lr_factor: float, knobs: Knobs, probe: "Probe") -> None:
        """Wait for the summed gradients, step this rank's units, start gathering all, clear gradients."""
        probe.mark("communication")
        grad = self.wait_reduced()  # (U/N, *unit)
        probe.mark("optimizer")
        lr = self.lr_mul * (self.hyper.lr * lr_factor)
        before = probe.note_gradient(self, grad)
        if len(self.shard):
            update(self.shard, grad, self.state, lr, lr * self.wd_mul * self.hyper.weight_decay, knobs)
        probe.note_update(self, before)
        self.wait_gathered = start_all_gather(self.params, self.rt)
        self.clear()

    def clear(self) -> None:
        """Forget gradients, sent or not."""
        self.grads.zero_()
        self.wait_reduced, self.missing, self.tokens = None, self.num_params, 0

    def finish(self) -> None:
        """Wait until all ranks' units have arrived."""
        if self.wait_gathered is not None:
            self.wait_gathered()
            self.wait_gathered = None

    def read(self, key: str) -> Tensor:
        """The parameters, or all ranks' part of a state: (U, ...)."""
        return self.params if key == "" else gather_units(self.state[key], len(self.params), self.rt)

    def write(self, key: str, full: Tensor) -> None:
        """Put rank 0's (U, ...) back where read() found it."""
        broadcast_from_main(full, self.rt)
        if key == "":
            self.params.copy_(full)
        else:
            self.state[key].copy_(local_shard(full, self.rt))


@dataclass(frozen=True)
class Bank:
    """Parameters of one rule, dtype and unit shape, one behind the other, cut into bins."""

    params: dict[str, nn.Parameter]
    extents: dict[str, slice]  # units of each parameter
    bins: dict[tuple[int, int], Bin]  # by first unit and one past the last

    def owners(self, name: str) -> list[Bin]:
        """The bins that hold units of a parameter."""
        units = self.extents[name]
        return [bin for (start, end), bin in self.bins.items() if start < units.stop and units.start < end]

    def keys(self) -> list[str]:
        """What there is of every unit: the parameter (""), and the rule's state."""
        return ["", *next(iter(self.bins.values())).state]


class Probe:
    """Measures one step, where it is asked to: seconds of its parts, sums of squares by parameter group."""

    PARTS = ("data wait", "forward and backward", "communication", "optimizer")
    SUMS = ("grad", "weight", "update", "momentum")

    def __init__(self, groups: Iterable[str] = (), device: torch.device | None = None,
                 is_full: bool = False):
        self.rows, self.is_full, self.marks = {group: i for i, group in enumerate(groups)}, is_full, []
        self.sums = torch.zeros(len(self.rows), len(self.SUMS), device=device) if self.rows else None

    def mark(self, part: str) -> None:
        """From here on time belongs to this part."""
        if self.is_full and self.sums.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        elif self.is_full:
            self.marks.append((part, time.perf_counter()))

    def note_gradient(self, bin: Bin, grad: Tensor) -> Tensor | None:
        """Add a bin's gradient, for the mean loss of a token; returns what note_update() will want."""
        if self.rows and len(bin.shard):
            self.sums[self.rows[bin.group], 0] += sum_squares(grad) / bin.tokens**2
            return bin.shard.clone() if self.is_full else None
        return None

    def note_update(self, bin: Bin, before: Tensor | None) -> None:
        """Add a bin's weights, their last change, and its momentum."""
        if before is not None:
            momentum = next(iter(bin.state.values()))
            parts = (bin.shard, bin.shard.float() - before.float(), momentum)
            self.sums[self.rows[bin.group], 1:] += torch.stack([sum_squares(x) for x in parts])

    def read_seconds(self) -> dict[str, float]:
        """Seconds of each part since the first mark; the last mark, of whatever name, is the end."""
        seconds = dict.fromkeys(self.PARTS, 0.0)
        if self.marks and self.sums.device.type == "cuda":
            torch.cuda.synchronize(self.sums.device)
        for (part, start), (_, end) in itertools.pairwise(self.marks):
            seconds[part] += end - start if isinstance(end, float) else start.elapsed_time(end) / 1000
        return seconds


def sum_squares(x: Tensor) -> Tensor:
    """Sum of squares in float32 ()."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).square()


def round_to_grid(x: Tensor, grid: float) -> Tensor:
    """Round to multiples of a power of two. Sums of such numbers are exact, so free of order and grouping.

    They are as long as none exceeds 2^24 times the grid in float32, 2^8 times in bfloat16.
    """
    shift = 1.5 * grid / torch.finfo(x.dtype).eps  # around it, neighbouring numbers are one step apart
    return (x + shift) - shift


def split_units(num_units: int, multiple: int, most: float) -> list[tuple[int, int]]:
    """Cut units into (start, end) bins of at most `most` where a multiple allows it, of like sizes.

    What is left over below one multiple is a bin of its own.
    """
    whole = num_units // multiple
    pieces = min(max(1, math.ceil(whole * multiple / max(most, 1))), max(1, whole))
    bounds = [*(whole * i // pieces * multiple for i in range(pieces + 1)), num_units]
    return [(start, end) for start, end in zip(bounds, bounds[1:]) if start < end]


def build_bank(named: list[tuple[str, nn.Parameter]], group: str, hyper: GroupHyper, bin_bytes: float,
               rt: Runtime) -> Bank:
    """Move parameters of one rule, dtype and unit shape into a bank.

    Backward finishes the last layers first, so they come first. Elementwise banks are padded to a multiple
    of the ranks; padding has zero gradient and stays zero.
    """
    named, first = named[::-1], named[0][1]
    unit = tuple(first.shape[-2:]) if RULES[hyper.rule].per_matrix else ()
    align = 1 if unit else ALIGNMENT
    multiple = align * rt.world_size
    sizes = [-(-p.numel() // math.prod(unit) // align) * align for _, p in named]
    total = sum(sizes) if unit else -(-sum(sizes) // multiple) * multiple
    params = torch.zeros(total, *unit, dtype=first.dtype, device=rt.device)
    grads = torch.zeros_like(params)
    multipliers = torch.ones(2, total, *[1] * len(unit), device=rt.device)  # (2, U, 1, 1) or (2, U)
    extents, offset = {}, 0
    for (name, param), size in zip(named, sizes):
        units = extents[name] = slice(offset, offset + param.numel() // math.prod(unit))
        params[units].view(param.shape).copy_(param.data)
        param.data, param.grad = params[units].view(param.shape), grads[units].view(param.shape)
        lr_mul = torch.tensor(param.spec.lr_mul).view(-1, *[1] * len(unit))  # of all, or each matrix's
        multipliers[0, units] = lr_mul.repeat_interleave((units.stop - units.start) // len(lr_mul), dim=0)
        multipliers[1, units] = param.spec.wd_mul
        offset += size
    broadcast_from_main(params, rt)
    most = bin_bytes / (math.prod(unit) * first.element_size()) if rt.world_size > 1 else math.inf
    bins = {(start, end): Bin(f"{named[0][0]}:{start}", params[start:end], grads[start:end],
                              multipliers[:, start:end], group, hyper, rt)
            for start, end in split_units(total, multiple, most)}
    bank = Bank(dict(named), extents, bins)
    for bin in itertools.chain(*map(bank.owners, extents)):
        bin.num_params = bin.missing = bin.num_params + 1
    return bank


class Optimizer:
    """All bins of a model, stepped together. Owns the storage of every parameter and gradient."""

    def __init__(self, model: nn.Module, cfg: Config, rt: Runtime):
        self.cfg, self.rt, self.step_count, self.is_armed = cfg, rt, 0, False
        hypers, self.probe = group_hypers(cfg), Probe()
        self.banks = [build_bank(named, group, hypers[group], cfg.comm_bin_mb * 1e6, rt)
                      for group, named in group_parameters(model, hypers)]
        self.owners = {name: bank.owners(name) for bank in self.banks for name in bank.extents}
        self.bins = [bin for bank in self.banks for bin in bank.bins.values()]
        # a rank must send all gradients and all parameters once, but for its own share of either
        self.minimum_bytes = 2 * sum(p.nbytes for p in model.parameters()) * (1 - 1 / rt.world_size)
        self.updates = {rule: rt.compile(RULES[rule].update)
                        for rule in {bin.hyper.rule for bin in self.bins}}
        self.launched: list[Bin] = []
        for name, param in model.named_parameters():
            if cfg.grad_grid:
                param.register_hook(functools.partial(round_to_grid, grid=cfg.grad_grid))
            if rt.world_size > 1:
                param.register_post_accumulate_grad_hook(
                    functools.partial(self._on_gradient, self.owners[name]))

    def wait_before(self, module: nn.Module, names: Iterable[str]) -> None:
        """Have every call of a module wait for these parameters, and no others, of the last step."""
        bins = list(dict.fromkeys(bin for name in names for bin in self.owners[name]))

        def finish_bins(*_) -> None:
            """A forward pre-hook."""
            self.probe.mark("communication")
            for bin in bins:
                bin.finish()
            self.probe.mark("forward and backward")

        if self.rt.world_size > 1:
            module.register_forward_pre_hook(finish_bins)

    def arm(self) -> None:
        """Announce the last backward of the step: from now on a complete bin is sent at once."""
        self.is_armed = True

    def _is_due(self, bin: Bin) -> bool:
        return (self.step_count + 1) % bin.hyper.every == 0

    def _on_gradient(self, bins: list[Bin], _param: Tensor) -> None:
        for bin in bins:
            if self.is_armed and self._is_due(bin):
                bin.missing -= 1
                if bin.missing == 0:
                    self._launch(bin)

    def _launch(self, bin: Bin) -> None:
        bin.start_reduce()
        self.launched.append(bin)

    @torch.no_grad()
    def step(self, lr_factor: float, momentum: float, tokens_per_step: int) -> None:
        """Update every parameter that is due from gradients summed over tokens_per_step tokens of all ranks.

        Bins are updated in the order in which their gradients left; parameters are valid after finish().
        """
        for bin in self.bins:
            bin.tokens += tokens_per_step
            if self._is_due(bin) and bin not in self.launched:
                self._launch(bin)
        self.step_count += 1
        for bin in self.launched:
            bin.update(self.updates[bin.hyper.rule], lr_factor, self._make_knobs(bin, momentum),
                       self.probe)
        self.launched, self.is_armed = [], False

    def _make_knobs(self, bin: Bin, momentum: float) -> Knobs:
        (beta1, beta2), num_updates = self.cfg.adam_betas, self.step_count // bin.hyper.every
        scalars = momentum, GRAD_TOKENS / bin.tokens, 1 - beta1**num_updates, 1 - beta2**num_updates
        return Knobs(*map(torch.tensor, scalars), self.cfg.adam_betas, self.cfg.adam_eps, self.rt.dtype,
                     self.rt.use_kernels, self.cfg.muon_scale, self.cfg.momentum_form)

    def finish(self) -> None:
        """Wait for all parameters of the last step."""
        for bin in self.bins:
            bin.finish()

    def check_ranks(self) -> None:
        """Raise RunError, on every rank, where a rank does not hold the bits of rank 0's parameters."""
        self.finish()
        hashes = torch.zeros(self.rt.world_size, len(self.bins), dtype=torch.int64, device=self.rt.device)
        for i, bin in enumerate(self.bins):
            digest = hashlib.sha256(bin.params.flatten().view(torch.uint8).cpu().numpy())
            hashes[self.rt.rank, i] = int.from_bytes(digest.digest()[:7])
        start_all_gather(hashes, self.rt)()
        for rank, i in (hashes != hashes[0]).nonzero().tolist():
            raise RunError(f"after step {self.step_count} rank {rank} holds other parameters than rank 0 "
                           f"in {self.bins[i].name}: a collective went wrong, or a GPU is faulty")

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor a step changes, by name: parameters (all units) and this rank's rule state."""
        return {f"{bin.name}/{key}": tensor for bin in self.bins
                for key, tensor in {"params": bin.params, **bin.state}.items()}

    def is_settled(self) -> bool:
        """Whether no gradients wait for a later step: only then a snapshot holds everything."""
        return not any(bin.tokens for bin in self.bins)

    def state_dict(self) -> dict[str, Callable[[], Tensor]]:
        """Parameters by name, and rule states of their units as name/key; on rank 0 alone, being copied.

        It does not depend on the ranks. All must call it; the tensors are those of now.
        """
        self.finish()
        copies = {}
        for bank in self.banks:
            for key in bank.keys():
                full = torch.cat([bin.read(key) for bin in bank.bins.values()])  # (U, ...)
                for name, units in bank.extents.items() if self.rt.is_main else ():
                    tensor = full[units] if key else full[units].view_as(bank.params[name])
                    copies[f"{name}/{key}".removesuffix("/")] = copy_to_host(tensor)
        return copies

    def load_state_dict(self, tensors: dict[str, Tensor], step_count: int) -> None:
        """Take over what state_dict() of any number of ranks has left; only rank 0 needs the tensors."""
        self.step_count = step_count
        for bank in self.banks:
            for key in bank.keys():
                full = torch.cat([bin.read(key) for bin in bank.bins.values()])
                for name, units in bank.extents.items() if self.rt.is_main else ():
                    saved = tensors[f"{name}/{key}".removesuffix("/")]
                    full[units] = saved.to(full.device).view_as(full[units])
                for (start, end), bin in bank.bins.items():
                    bin.write(key, full[start:end])
        for bin in self.bins:
            bin.clear()

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """A copy of everything step() changes."""
        self.finish()
        return self.step_count, {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, snapshot: tuple[int, dict[str, Tensor]]) -> None:
        """Return to a snapshot exactly; gradients are cleared."""
        self.finish()
        self.step_count, saved = snapshot
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])
        for bin in self.bins:
            bin.clear()


def group_parameters(model: nn.Module, hypers: dict[str, GroupHyper]
                     ) -> list[tuple[str, list[tuple[str, nn.Parameter]]]]:
    """Sort parameters into banks; ValueError names a parameter that no rule, or no group, claims."""
    groups: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        spec = getattr(param, "spec", None)
        if spec is None:
            raise ValueError(f"parameter {name} {tuple(param.shape)} has no update rule: "
                             "create it with declare()")
        if spec.group not in hypers:
            raise ValueError(f"parameter {name} is in group {spec.group!r}: "
                             f"group_hypers() has {', '.join(hypers)}")
        if RULES[hypers[spec.group].rule].per_matrix:
            key = (spec.group, param.dtype, param.shape[-2:])
        else:
            key = (spec.group, param.dtype, name if param.numel() >= BIG_PARAMETER else "small")
        groups.setdefault(key, []).append((name, param))
    return [(key[0], named) for key, named in groups.items()]


# ==== MODEL ================================================================================================
# Pre-norm transformer on one packed row of T tokens: no batch dimension, documents are told apart by
# doc_ids. Matrices are (outputs, inputs). To add a gate or a scalar: a config field or LayerSpec entry, a
# declare() line, its use.


class StepInputs(typing.NamedTuple):
    """What the schedule tells the model, beside the tokens."""

    # (long, short) tokens, for FlexAttention a tensor (2,), so that it can change; or every slot's cache
    windows: Tensor | tuple[int, int] | list[KeyValues]
    cos: Tensor  # (T, 2, 1, K) for q, which carries the softmax scale, and k
    sin: Tensor  # (T, 2, 1, K)
    dtype: torch.dtype = torch.float32  # of activations


def init_matrix(*shape: int, fan_in: int, std: float) -> Tensor:
    """Uniform with standard deviation std / sqrt(fan_in); 3^-0.5 is PyTorch's default. Source: record 19."""
    bound = 3**0.5 * std * fan_in**-0.5
    return torch.empty(*shape).uniform_(-bound, bound) if bound else torch.zeros(*shape)


class Attention(nn.Module):
    """Multi-head attention with QK-norm, rotary, value embeddings and a sparse gate. Source: record 32."""

    def __init__(self, cfg: ModelConfig, spec: LayerSpec):
        super().__init__()
        self.num_heads, self.head_dim, self.gate_dim = cfg.num_heads, cfg.head_dim, cfg.attention_gate_dim
        self.has_qk_norm, self.is_lerp = cfg.qk_norm == "on", cfg.value_mix == "lerp"
        self.depth_scale = (2 * cfg.num_layers) ** -0.5 if cfg.depth_scale == "on" else 1.0
        dim = cfg.model_dim
        qkv = init_matrix(3, dim, dim, fan_in=dim, std=cfg.init_std)
        out = init_matrix(1, dim, dim, fan_in=dim, std=cfg.init_std * (cfg.zero_init == "off"))
        if cfg.fuse_qkv == "on":
            self.qkv, self.out = declare(qkv.flatten(0, 1), "matrix"), declare(out[0], "matrix")
        else:
            self.qkvo = declare(torch.cat((qkv, out)), "matrix")  # (4, D, D)
        if spec.value_embed is not None or not self.is_lerp:
            num_lambdas = 1 if spec.value_embed is None or self.is_lerp else 2
            self.value_lambdas = declare(torch.full((num_lambdas,), 0.5), "scalar")
        if self.gate_dim:
            self.gate = declare(
                torch.zeros(self.num_heads, self.gate_dim, dtype=getattr(torch, cfg.embed_dtype)), "matrix")

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Those of Q, K and V (3D, D), and that of the output (D, D)."""
        if hasattr(self, "qkv"):
            return self.qkv.to(dtype), self.out.to(dtype)
        qkvo = self.qkvo.to(dtype)
        return qkvo[:3].flatten(0, 1), qkvo[3]

    def mix_values(self, v: Tensor, value_embed: Tensor | None) -> Tensor:
        """Values v (T, H, K) with the value embeddings (T, D) of this slot, where it has some."""
        if self.is_lerp:
            return v if value_embed is None else v + scale_by(value_embed.view_as(v) - v,
                                                              self.value_lambdas[0])
        v = scale_by(v, self.value_lambdas[0])
        return v if value_embed is None else v + scale_by(value_embed.view_as(v), self.value_lambdas[1])

    def make_values(self, x: Tensor) -> Tensor:
        """x (T, D) normalised -> values (T, D) before they are mixed with others."""
        return x @ self.matrices(x.dtype)[0][-x.size(1) :].T

    def forward(self, x: Tensor, value_embed: Tensor | None, mask: BlockMask | Tensor,
                step: StepInputs) -> Tensor:
        """x (T, D) normalised, value_embed (T, D) or None -> (T, D)."""
        to_qkv, to_out = self.matrices(x.dtype)
        qkv = (x @ to_qkv.T).unflatten(1, (3, self.num_heads, self.head_dim))  # (T, 3, H, K)
        qk = rms_norm(qkv[:, :2]) if self.has_qk_norm else qkv[:, :2]
        q, k = apply_rotary(qk, step.cos, step.sin).unbind(1)  # (T, H, K) each, q scaled
        y = attend(q, k, self.mix_values(qkv[:, 2], value_embed), mask)  # (T, H, K)
        if self.gate_dim:
            y = y * torch.sigmoid(x[:, : self.gate_dim] @ self.gate.type_as(x).T)[..., None]  # by (T, H, 1)
        y = y.flatten(1) @ to_out.T  # (T, D)
        return y * self.depth_scale if self.depth_scale != 1 else y


class MLP(nn.Module):
    """Linear, activation, linear; both matrices stored (D, hidden), one batch for the optimizer."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.activation = {"relu_squared": relu_squared, "gelu": F.gelu}[cfg.activation]
        dim, hidden = cfg.model_dim, cfg.mlp_ratio * cfg.model_dim
        up = init_matrix(dim, hidden, fan_in=dim, std=cfg.init_std)
        down = init_matrix(dim, hidden, fan_in=hidden, std=cfg.init_std * (cfg.zero_init == "off"))
        self.up_down = declare(torch.stack((up, down)), "matrix", lr_mul=(cfg.mlp_up_lr_mul, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        """x (T, D) normalised -> (T, D)."""
        up, down = self.up_down.type_as(x)
        return self.activation(x @ up) @ down.T  # (T, D)


class Block(nn.Module):
    """One layer slot: skip in, mix with the embedding, attention, MLP, each where its LayerSpec says so."""

    def __init__(self, cfg: ModelConfig, spec: LayerSpec):
        super().__init__()
        self.spec, self.has_plain_skip = spec, cfg.skips == "plain"
        self.lambdas = None  # of the stream and of x0
        if cfg.x0_shortcut == "on":
            self.lambdas = declare(torch.tensor([1.0, 0.0]), "scalar")
        self.skip = None if spec.skip_from is None else declare(torch.tensor([cfg.skip_init]), "scalar")
        self.attention = None if spec.attention == "none" else Attention(cfg, spec)
        self.mlp = MLP(cfg) if spec.mlp else None

    def forward(self, x: Tensor, x0: Tensor, skip: Tensor | None, value_embed: Tensor | None,
                mask: BlockMask | Tensor | None, step: StepInputs) -> Tensor:
        """x, x0, skip, value_embed (T, D) -> (T, D)."""
        x = self.mix_inputs(x, x0, skip)
        if self.attention is not None:
            x = x + self.attention(rms_norm(x).to(step.dtype), value_embed, mask, step)
        if self.mlp is not None:
            x = x + self.mlp(rms_norm(x).to(step.dtype))
        return x

    def mix_inputs(self, x: Tensor, x0: Tensor, skip: Tensor | None = None) -> Tensor:
        """x, x0, skip (T, D) -> the stream (T, D) that this slot reads."""
        if skip is not None:
            x = x + scale_by(skip, self.skip if self.has_plain_skip else torch.sigmoid(self.skip))
        if self.lambdas is None:
            return x
        return scale_by(x, self.lambdas[0]) + scale_by(x0, self.lambdas[1])


class Head(nn.Module):
    """Logits and loss. Source: records 18 and 32."""

    def __init__(self, cfg: Config, use_fp8: bool, use_kernels: bool, tied: nn.Parameter | None):
        super().__init__()
        self.use_fp8, self.use_kernels, self.cap = use_fp8, use_kernels, cfg.softcap
        self.weight = tied if tied is not None else declare(torch.zeros(  # (V, D)
            cfg.padded_vocab_size, cfg.model_dim, dtype=getattr(torch, cfg.embed_dtype)), "head")

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over tokens; in float32 and without FP8 where no gradient is wanted."""
        if self.training:
            return HeadLoss.apply(x, self.weight, targets, self.cap, self.use_fp8, self.use_kernels)
        return sum(F.cross_entropy(self.logits(part), target, reduction="sum")
                   for part, target in zip(x.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK)))

    def logits(self, x: Tensor) -> Tensor:
        """x (T, D) -> softcapped logits (T, V) in float32."""
        return softcap(x @ self.weight.type_as(x).T, self.cap)


class GPT(nn.Module):
    """The language model, initialised on the CPU from its generator: the same weights on every device."""

    def __init__(self, cfg: Config, use_flex: bool = False, use_fp8: bool = False,
                 dtype: torch.dtype = torch.float32, use_kernels: bool = False):
        super().__init__()
        self.specs, self.use_flex, self.dtype = cfg.layers, use_flex, dtype
        self.has_wide_stream, self.has_embed_norm = cfg.residual_dtype == "float32", cfg.embed_norm == "on"
        table, storage = (cfg.padded_vocab_size, cfg.model_dim), getattr(torch, cfg.embed_dtype)
        is_tied = cfg.tie_head == "on"  # then it begins as a matrix that multiplies, not as one to read
        embed = torch.randn(table) if not is_tied else init_matrix(
            *table, fan_in=cfg.model_dim, std=cfg.init_std)
        self.embed = declare(embed.to(storage), "embed")  # (V, D)
        used = {spec.value_embed for spec in cfg.layers}
        self.value_embeds = nn.ParameterDict({str(i): declare(torch.randn(table).to(storage), "value_embed")
                                              for i in sorted(used - {None, "first"})})
        self.blocks = nn.ModuleList(Block(cfg, spec) for spec in cfg.layers)
        self.head = Head(cfg, use_fp8, use_kernels, self.embed if is_tied else None)
        self.has_first_values = "first" in used

    def forward(self, inputs: Tensor, targets: Tensor, doc_ids: Tensor, step: StepInputs) -> Tensor:
        """inputs, targets, doc_ids (T,) -> loss summed over the T tokens, float32."""
        return self.head(self.encode(inputs, doc_ids, step), targets)

    def encode(self, inputs: Tensor, doc_ids: Tensor, step: StepInputs) -> Tensor:
        """inputs, doc_ids (T,) -> normalised final activations (T, D). Source: record 32."""
        masks, step = self.build_masks(doc_ids, step.windows), step._replace(dtype=self.dtype)
        x = F.embedding(inputs, self.embed).to(torch.float32 if self.has_wide_stream else self.dtype)
        x = x0 = rms_norm(x) if self.has_embed_norm else x  # (T, D)
        values = {int(i): F.embedding(inputs, table).to(self.dtype)
                  for i, table in self.value_embeds.items()}
        if self.has_first_values:  # record 9; computed twice, so that a block need not return them
            first = self.blocks[0]
            values["first"] = first.attention.make_values(
                rms_norm(first.mix_inputs(x, x0)).to(self.dtype))  # (T, D)
        outputs = []
        for block, spec, mask in zip(self.blocks, self.specs, masks):
            skip = None if spec.skip_from is None else outputs[spec.skip_from]
            x = block(x, x0, skip, values.get(spec.value_embed), mask, step)
            outputs.append(x)
        return rms_norm(x).to(self.dtype)

    def early_parameters(self) -> list[str]:
        """Names of the parameters that encode() itself uses, before any block is called."""
        names = [name for name, _ in self.named_parameters()]
        parts = ("blocks.", "head.") if not self.has_first_values else (
            *(f"blocks.{i}." for i in range(1, len(self.blocks))), "head.")
        return [name for name in names if not name.startswith(parts)]

    def compiled_parts(self) -> list[tuple[str, nn.Module]]:
        """What is compiled by itself, with the prefix of its parameters.

        Blocks of equal make-up share one graph, and the gradients of a block are final when its backward
        ends; those of one graph for everything all come at the very end.
        """
        return [*((f"blocks.{i}.", block) for i, block in enumerate(self.blocks)), ("head.", self.head)]

    def build_masks(self, doc_ids: Tensor, windows: Tensor | tuple[int, int] | list[KeyValues]) -> list:
        """What attend() wants to know in each slot; slots of one kind share a mask."""
        if isinstance(windows, list):
            return windows
        build = build_block_mask if self.use_flex else build_dense_mask
        masks = {kind: build(doc_ids, window) for kind, window in zip(("long", "short"), windows)}
        return [masks.get(spec.attention) for spec in self.specs]


# ==== DATA =================================================================================================
# Shards -> rows -> batches. A row is seq_len tokens of whole documents (cut to max_doc_len), each beginning
# with the document-start token. Which rows a step sees is decided once, for the whole run, before the first
# step; ranks and micro-batches only split them. Source: record 32; the file format is described in
# README.md.

SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER_BYTES = 20240520, 1, 1024
SHARD_REMEDY = "delete it and fetch or build it again (data/)"
BYTE_VOCAB_SIZE, BYTE_DOCUMENT_START = 257, 256  # byte tokens: 256 values and a document start


class Batch(typing.NamedTuple):
    """Tokens of one forward pass (T,): int32 inputs, int64 targets, int32 document numbers in order."""

    inputs: Tensor
    targets: Tensor
    doc_ids: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; does not wait for the copy."""
        return Batch(*(t.to(device, non_blocking=True) for t in self))


@dataclass(frozen=True)
class Shard:
    """A token file, memory-mapped and checked. starts: where its documents begin."""

    tokens: np.ndarray  # uint16
    starts: np.ndarray
    document_start: int
    sha256: str

    def ends(self, max_doc_len: int) -> np.ndarray:
        """Running count of usable tokens after each document, documents cut to max_doc_len."""
        lengths = np.diff(self.starts, append=len(self.tokens))
        return np.minimum(lengths, max_doc_len).cumsum()


def read_shard_header(path: str) -> tuple[int, int, int]:
    """(tokens, vocabulary size, document-start token) of a shard whose length agrees; else InputError."""
    problem = None
    try:
        size = os.path.getsize(path)
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
    """Map and check a .bin shard; InputError names the file and what is wrong with it."""
    num_tokens, shard_vocab, document_start = read_shard_header(path)
    if shard_vocab != vocab_size:
        raise InputError(f"{path} has a vocabulary of {shard_vocab}, the model of {vocab_size}: "
                         f"set --vocab_size={shard_vocab} or choose other files")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=SHARD_HEADER_BYTES, shape=(num_tokens,))
    if tokens.max() >= vocab_size:
        raise InputError(f"{path} has token {tokens.max()}, not below its vocabulary size {vocab_size}: "
                         f"{SHARD_REMEDY}")
    starts = np.flatnonzero(tokens == document_start)
    if not len(starts):
        raise InputError(f"{path} has no document start (token {document_start}): {SHARD_REMEDY}")
    return Shard(tokens, starts, document_start, hashlib.sha256(tokens).hexdigest())


def find_shards(pattern: str, field: str) -> list[str]:
    """Files of a glob pattern in sorted order; InputError says how to get them."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        raise InputError(f"--{field}={pattern} matches no file: run python data/cached_fineweb10B.py "
                         "for FineWeb, or python data/text.py for your own text")
    return paths


class Row(typing.NamedTuple):
    """Where one packed row lies in a shard: documents first..last, each cut to max_doc_len; or, where rows
    start anywhere, tokens first..last."""

    shard: int
    first: int
    last: int
    max_doc_len: int


class TrainData:
    """The rows of a whole run, planned exactly; any rank can build any of them."""

    def __init__(self, cfg: Config, schedule: "Schedule"):
        self.cfg, self.seq_len, self.shards, self.rows = cfg, cfg.seq_len, [], []
        paths = find_shards(cfg.train_files, "train_files")
        self.first_row, self.ends_of = [], None  # of each step; what self.ends were counted for
        demands = []
        for stage, start, end in schedule.spans():
            rows = (stage.tokens_per_step or cfg.tokens_per_step) // cfg.seq_len
            for _ in range(start, end):
                self.first_row.append(self.first_row[-1] + demands[-1][0] if demands else 0)
                demands.append((rows, stage.max_doc_len or cfg.max_doc_len))
        self.num_rows = sum(rows for rows, _ in demands)
        unopened = iter(tqdm(paths, desc="scan shards", unit="file", disable=not show_bar(), leave=False))
        self._plan(demands, (open_shard(path, cfg.vocab_size) for path in unopened))

    def _plan(self, demands: list[tuple[int, int]], shards: Iterator[Shard]) -> None:
        """Walk the shards in order; a row that a shard cannot fill begins anew in the next one."""
        find_row = self._find_tokens if self.cfg.row_start == "anywhere" else self._find_documents
        row = None
        for max_doc_len in (max_doc_len for rows, max_doc_len in demands for _ in range(rows)):
            row = row and find_row(row, max_doc_len)
            while row is None:
                shard = next(shards, None)
                if shard is None:
                    missing = (self.num_rows - len(self.rows)) * self.seq_len
                    raise InputError(
                        f"--train_files={self.cfg.train_files} is {missing} tokens short of this run: get "
                        "more (data/cached_fineweb10B.py N, data/text.py PATH...) or lower --num_iterations")
                self.shards.append(shard)
                row = find_row(Row(len(self.shards) - 1, 0, -1, 0), max_doc_len)
            self.rows.append(row)

    def _find_documents(self, before: Row, max_doc_len: int) -> Row | None:
        """The row after another, of documents that together hold a token more than it."""
        if self.ends_of != (before.shard, max_doc_len):
            self.ends_of = before.shard, max_doc_len
            self.ends = self.shards[before.shard].ends(max_doc_len)
        ends, first = self.ends, before.last + 1
        needed = (ends[first - 1] if first else 0) + self.seq_len + 1
        last = int(np.searchsorted(ends, needed))
        return Row(before.shard, first, last, max_doc_len) if last < len(ends) else None

    def _find_tokens(self, before: Row, max_doc_len: int) -> Row | None:
        """The row after another, whose first token is the last target of that one."""
        first = max(0, before.last)
        has_room = first + self.seq_len < len(self.shards[before.shard].tokens)
        return Row(before.shard, first, first + self.seq_len, max_doc_len) if has_room else None

    def tokens_of(self, index: int) -> np.ndarray:
        """The seq_len + 1 tokens of a row, uint16."""
        row = self.rows[index]
        shard = self.shards[row.shard]
        if self.cfg.row_start == "anywhere":
            return shard.tokens[row.first : row.last + 1]
        starts = shard.starts[row.first : row.last + 2].tolist()
        ends = [*starts[1:], len(shard.tokens)][: row.last + 1 - row.first]
        pieces = [shard.tokens[start : min(end, start + row.max_doc_len)]
                  for start, end in zip(starts, ends)]
        return np.concatenate(pieces)[: self.seq_len + 1]

    def batch(self, rows: range) -> Batch:
        """Whole rows, one after the other, as one sequence."""
        tokens = np.stack([self.tokens_of(index) for index in rows])  # (rows, seq_len + 1)
        return make_batch(tokens, self.shards[0].document_start, self.cfg.document_mask == "on")

    def batches(self, cfg: Config, rt: Runtime, start: int, end: int) -> Iterator[Batch]:
        """This rank's micro-batches of steps start..end-1."""
        bounds = [*self.first_row, self.num_rows]
        for step in range(start, end):
            accum, per_micro = split_rows(cfg, rt.world_size,
                                          (bounds[step + 1] - bounds[step]) * self.seq_len)
            first = bounds[step] + rt.rank * accum * per_micro
            for micro in range(accum):
                yield self.batch(range(first + micro * per_micro, first + (micro + 1) * per_micro))


def make_batch(tokens: np.ndarray, document_start: int, has_document_mask: bool = True) -> Batch:
    """Rows of tokens (rows, 1 + their inputs) of any integer type -> one Batch on the CPU.

    Rows never see each other; documents of a row do where has_document_mask is False.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:].ravel()
    is_start = (inputs == document_start) & has_document_mask
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
            pieces.append(shard.tokens[:missing])
            missing -= len(pieces[-1])
        if missing:
            most = (cfg.val_tokens - missing) // cfg.val_seq_len * cfg.val_seq_len
            raise InputError(f"--val_files={cfg.val_files} is {missing} tokens short of "
                             f"--val_tokens={cfg.val_tokens} + 1: give at most --val_tokens={most}")
        self.tokens = np.concatenate(pieces)

    def batch(self, index: int) -> Batch:
        """One validation sequence, or several short ones."""
        span = self.tokens[index * self.batch_tokens :]
        rows = np.lib.stride_tricks.sliding_window_view(span, self.cfg.val_seq_len + 1)
        rows = rows[: self.batch_tokens : self.cfg.val_seq_len]  # (rows, val_seq_len + 1)
        return make_batch(rows, self.shards[0].document_start, self.cfg.document_mask == "on")


class Prefetcher:
    """Build batches ahead in a thread, pinned for CUDA. An error in the thread is raised by next()."""

    DEPTH = 4

    def __init__(self, batches: Iterator[Batch], device: torch.device):
        self.device, self.queue, self.is_closed = device, queue.Queue(self.DEPTH), threading.Event()
        self.thread = threading.Thread(target=self._fill, args=(batches,), daemon=True, name="prefetch")
        self.thread.start()

    def _put(self, item) -> None:
        while not self.is_closed.is_set():
            try:
                return self.queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def _fill(self, batches: Iterator[Batch]) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # threads start on device 0, where pinning would allocate
        try:
            for batch in batches:
                self._put(Batch(*(t.pin_memory() for t in batch)) if self.device.type == "cuda" else batch)
                if self.is_closed.is_set():
                    return
            self._put(StopIteration("the planned batches are used up"))
        except Exception as error:  # handed to the thread that trains
            self._put(error)

    def __next__(self) -> Batch:
        item = self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item.to(self.device)

    def close(self) -> None:
        """Stop the thread."""
        self.is_closed.set()
        self.thread.join()


def fingerprint(shards: Iterable[Shard]) -> str:
    """What was trained on: a hash over the hashes of the shards, training shards first."""
    return hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()[:16]


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int, document_start: int) -> None:
    """Write a shard under a temporary name and rename it. tokens uint16, beginning with document_start."""
    header = np.zeros(SHARD_HEADER_BYTES // 4, dtype="<i4")
    header[:5] = SHARD_MAGIC, SHARD_VERSION, len(tokens), vocab_size, document_start
    write_atomic(path, header.tobytes() + tokens.astype("<u2").tobytes())


def is_validation(name: str) -> bool:
    """Whether a document belongs to validation: one in sixteen, by the hash of its name."""
    return hashlib.sha256(name.encode()).digest()[0] < 16


def write_corpus(texts: Iterable[tuple[str, bytes]], out: Path, source: str,
                 encode: Callable[[bytes], np.ndarray], vocab_size: int, document_start: int,
                 shard_tokens: int = 100_000_000, doc_bytes: int = 2047) -> dict:
    """Write (name, text) pairs as train_*.bin and val_*.bin shards; returns what corpus.json then says.

    Texts are cut into documents, and those ordered by a hash, which mixes folders; the same texts give the
    same bytes.
    """
    check_writable(out, "choose another folder, or mend its permissions")
    splits: dict[str, list[tuple[bytes, np.ndarray]]] = {"train": [], "val": []}
    for name, text in texts:
        for number, piece in enumerate(split_text(text, doc_bytes)):
            key = hashlib.sha256(f"{number} {name}".encode()).digest()
            splits["val" if is_validation(name) else "train"].append((key, encode(piece)))
    for split, entries in splits.items():
        if not entries:
            raise InputError(f"{source}: no document for the {split} split: give more documents")
    info = dict(source=source, vocab_size=vocab_size, documents=sum(map(len, splits.values())), tokens={},
                fingerprint="")
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("train_*.bin"), *out.glob("val_*.bin")):
        stale.unlink()
    written = []
    for split, entries in splits.items():
        starts = np.array([document_start], dtype=np.uint16)
        stream = np.concatenate([part for _, tokens in sorted(entries, key=lambda e: e[0])
                                 for part in (starts, tokens)])
        info["tokens"][split] = len(stream)
        for number, begin in enumerate(range(0, len(stream), shard_tokens)):
            path = out / f"{split}_{number:06d}.bin"
            write_shard(path, stream[begin : begin + shard_tokens], vocab_size, document_start)
            written.append(open_shard(str(path), vocab_size))
    info["fingerprint"] = fingerprint(written)
    write_atomic(out / "corpus.json", (json.dumps(info, indent=1) + "\n").encode())
    return info


def torch_source_name() -> str:
    """The source of the embedded corpus: CPU and CUDA builds of one version carry the same Python files."""
    return f"torch {torch.__version__.partition('+')[0]}"


def read_torch_source() -> Iterator[tuple[str, bytes]]:
    """The Python files of the installed PyTorch, by path; files that differ between builds are left out."""
    root = Path(torch.__file__).parent
    left_out = {"version.py", "testing/_internal/generated/annotated_fn_args.py"}
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in tqdm(paths, desc="read the PyTorch source", unit="file", disable=not show_bar(),
                     leave=False):
        if name not in left_out:
            yield name, (root / name).read_bytes()


def split_text(text: bytes, limit: int) -> Iterator[bytes]:
    """Cut a text at line ends into pieces of at most `limit` bytes."""
    while text:
        end = text.rfind(b"\n", 0, limit) + 1 if len(text) > limit else len(text)
        end = end or limit  # one line longer than the limit
        yield text[:end]
        text = text[end:]


def encode_bytes(text: bytes) -> np.ndarray:
    """One token per byte, uint16."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def ensure_embedded_corpus(cfg: Config, rt: Runtime) -> None:
    """Build the embedded corpus where a run asks for it and it is missing or of another PyTorch."""
    out = Path(EMBEDDED_CORPUS)
    for is_turn in (rt.rank == 0, rt.local_rank == 0):  # nodes that share the folder find it built
        if is_turn and cfg.train_files.startswith(EMBEDDED_CORPUS):
            try:
                source = json.loads((out / "corpus.json").read_text())["source"]
            except (OSError, ValueError, KeyError):  # never built, or broken off
                source = None
            if source != torch_source_name():
                write_corpus(read_torch_source(), out, torch_source_name(), encode_bytes, BYTE_VOCAB_SIZE,
                             BYTE_DOCUMENT_START)
        wait_for_ranks(rt)


# ==== SCHEDULES ============================================================================================
# Everything that changes with the step, as pure functions of the step. Source: record 32.


class StepState(typing.NamedTuple):
    """The schedule at one step."""

    stage_index: int
    stage: Stage
    lr_factor: float
    momentum: float
    frequencies: np.ndarray  # (K/2,) radians per token, after YaRN
    attention_scale: float


class Schedule:
    """The stages of a run and what follows from them."""

    def __init__(self, cfg: Config):
        self.cfg, self.num_iterations = cfg, cfg.num_iterations
        total = sum(stage.share for stage in cfg.stages)
        ends = np.cumsum([stage.share for stage in cfg.stages]) * (self.num_iterations + 1) / total
        self.ends = [math.ceil(end) for end in ends]  # first step after each stage
        self.rotary = list(self._extend_rotary())

    def _extend_rotary(self) -> Iterator[tuple[np.ndarray, float]]:
        """Frequencies and softmax scale of each stage: YaRN, where on, on every change of the window."""
        cfg, quarter = self.cfg, self.cfg.head_dim // 4
        if cfg.rotary == "half":  # half turn, the others have frequency 0
            exponents = np.concatenate((np.linspace(0, 1, quarter), np.full(quarter, np.inf)))
        else:
            exponents = np.arange(2 * quarter) / (2 * quarter)
        frequencies = (1 / cfg.rotary_base) ** exponents
        scale, old = cfg.attention_scale or cfg.head_dim**-0.5, cfg.stages[0].window_long
        for stage in cfg.stages:
            new = min(stage.window_long, cfg.yarn_max_window) or old
            rotations = old * frequencies / (2 * math.pi)
            weight = np.clip((rotations - 1) / (32 - 1), 0, 1)
            frequencies = frequencies * (old / new + weight * (1 - old / new))
            scale *= 0.2 * math.log(new / old) + 1
            old = new
            yield frequencies, scale

    def spans(self) -> list[tuple[Stage, int, int]]:
        """(stage, first training step, one past its last) of every stage that trains."""
        starts = [0, *self.ends[:-1]]
        spans = [(stage, start, min(end, self.num_iterations))
                 for stage, start, end in zip(self.cfg.stages, starts, self.ends)]
        return [span for span in spans if span[1] < span[2]]

    def total_tokens(self) -> int:
        """Training tokens of the whole run."""
        return sum((stage.tokens_per_step or self.cfg.tokens_per_step) * (end - start)
                   for stage, start, end in self.spans())

    def lr_factor(self, step: int, stage: Stage) -> float:
        """A linear rise over lr_warmup_frac of the run, the stage's value, a linear fall to final_lr_frac.

        The fall takes the last cooldown_frac of the run; its end is a share of the peak, not of the stage's.
        """
        left, warmup = 1 - step / self.num_iterations, self.cfg.lr_warmup_frac * self.num_iterations
        if step + 1 < warmup:
            return stage.lr_factor * (step + 1) / warmup
        if self.cfg.cooldown_frac == 0 or left > self.cfg.cooldown_frac:
            return stage.lr_factor
        weight = left / self.cfg.cooldown_frac
        return stage.lr_factor * weight + self.cfg.final_lr_frac * (1 - weight)

    def at(self, step: int) -> StepState:
        """The state at a step; at num_iterations, the final validation, a last stage of share 0 holds."""
        assert 0 <= step <= self.num_iterations, f"step {step} is outside 0..{self.num_iterations}"
        index = len(self.ends) - 1
        if step < self.num_iterations:
            index = next(i for i, end in enumerate(self.ends) if step < end)
        stage, cfg = self.cfg.stages[index], self.cfg
        rise = min(step / cfg.momentum_warmup_steps, 1.0) if cfg.momentum_warmup_steps else 1.0
        momentum = cfg.momentum_start + rise * (cfg.momentum_end - cfg.momentum_start)
        return StepState(index, stage, self.lr_factor(step, stage), momentum, *self.rotary[index])


def make_rotary(state: StepState, num_tokens: int, period: int, rt: Runtime,
                first: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin tables (T, 2, 1, K) for apply_rotary on stacked q and k; q's carry the softmax scale.

    Positions are first, first + 1, ... and start anew with every row of `period` tokens. Float32 on CUDA,
    where the compiler fuses the product.
    """
    dtype = torch.float32 if rt.device.type == "cuda" else rt.dtype
    positions = torch.arange(first, first + num_tokens, device=rt.device) % period
    angles = positions[:, None].double() * torch.tensor(state.frequencies, device=rt.device)  # (T, K/2)
    scales = torch.tensor([state.attention_scale, 1.0], device=rt.device).view(2, 1, 1)  # of q and of k
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1)[:, None, None] * scales  # (T, 2, 1, K)
    sin = torch.cat((angles.sin(), -angles.sin()), dim=-1)[:, None, None] * scales  # (T, 2, 1, K)
    return cos.to(dtype), sin.to(dtype)


# ==== RUN RECORD ===========================================================================================
# What a run leaves: a log that begins with the script itself, a json of its result, measurements on request,
# and checkpoints. Rank 0 alone writes.


def show_bar() -> bool:
    """Whether a progress bar would be seen: rank 0 on a terminal."""
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
    """Raise InputError where a folder, or the nearest existing one above it, does not take files."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"{folder} cannot be written: {remedy}")


def choose_folder(cfg: Config, source: bytes, today: str) -> Path:
    """Where this run's files go; InputError if the name is taken or nothing can be written there."""
    folder = Path(cfg.logs_dir)
    if cfg.record:
        root = Path(cfg.records_dir, cfg.track)
        taken = sorted(root.glob(f"????-??-??_{glob.escape(cfg.record)}"))
        folder = taken[0] if taken else Path(root, f"{today}_{cfg.record}")
        script = folder / "train_gpt.py"
        if script.exists() and script.read_bytes() != source:
            raise InputError(f"--record={cfg.record} is taken by another script ({script}): "
                             "choose another name")
    for path, field in ((folder, "records_dir" if cfg.record else "logs_dir"),
                        (Path(cfg.logs_dir), "logs_dir")):
        check_writable(path, f"choose another folder with --{field}")
    return folder


def describe_versions() -> dict:
    """Versions of everything that decides a result."""
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__)
    if torch.version.cuda:
        versions.update(cuda=torch.version.cuda, cudnn=str(torch.backends.cudnn.version()))
    return versions


def describe_hardware(rt: Runtime) -> dict:
    """The machine, as far as it decides speed."""
    hardware = dict(device=rt.device.type, ranks=rt.world_size, cpu=read_cpu_name(),
                    cpu_count=os.cpu_count(), threads=torch.get_num_threads())
    if rt.device.type == "cuda":
        properties = torch.cuda.get_device_properties(rt.device)
        hardware.update(gpu=properties.name, gpu_memory_mib=properties.total_memory >> 20)
    return hardware


def read_cpu_name() -> str:
    """The processor's name."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def read_git_commit() -> str:
    """The commit of the working tree, or an empty string outside one."""
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


class GrowingFile:
    """A text that is kept in memory, and on disk while it grows, as far as the disk takes it."""

    def __init__(self, path: Path):
        self.path, self.data, self.error = path, bytearray(), ""
        if path.exists():
            self.data += path.read_bytes()
        self.file = open(path, "ab", buffering=0)

    def add(self, text: bytes) -> str:
        """Append; returns what is wrong with the disk, the first time that something is."""
        self.data += text
        try:
            if not self.error:
                self.file.write(text)
        except OSError as error:
            self.error = error.strerror
            return self.error
        return ""

    def move(self, path: Path) -> None:
        """Write the whole text where it belongs, and remove the growing copy."""
        write_atomic(path, bytes(self.data))
        self.path.unlink(missing_ok=True)


class RunLog:
    """Log lines and events of a run. On ranks other than 0 every method does nothing."""

    def __init__(self, cfg: Config, rt: Runtime, resumed: dict | None = None):
        self.cfg, self.rt, self.bar, self.is_mute = cfg, rt, None, False
        self.val_points = resumed["val_points"] if resumed else []
        self.files: dict[str, GrowingFile] = {}  # by suffix
        self.run_id = ""
        if not rt.is_main:
            return
        now = datetime.datetime.now()
        self.source = Path(__file__).read_bytes()
        self.folder = choose_folder(cfg, self.source, now.strftime("%Y-%m-%d"))
        self.run_id = f"{now.strftime('%Y%m%d-%H%M%S')}_seed{cfg.seed}_{os.urandom(2).hex()}"
        if resumed and resumed["script_sha256"] == hashlib.sha256(self.source).hexdigest():
            if not Path(self.folder, f"{resumed['run_id']}.json").exists():
                self.run_id = resumed["run_id"]  # the same run: its log goes on

    def __enter__(self) -> "RunLog":
        if not self.rt.is_main:
            return self
        logs = Path(self.cfg.logs_dir)
        logs.mkdir(parents=True, exist_ok=True)
        has_events = self.cfg.telemetry_every or self.cfg.guard == "on"
        for suffix in (".txt", ".jsonl") if has_events else (".txt",):
            self.files[suffix] = GrowingFile(logs / f"{self.run_id}{suffix}.partial")
        facts = json.dumps(dict(versions=describe_versions(), hardware=describe_hardware(self.rt)), indent=1)
        if not self.files[".txt"].data:
            self._add(".txt", f"{self.source.decode()}\n{'=' * 100}\n{facts}\n{'=' * 100}")
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        """Take the bar off the screen. The log of a crash stays as .partial; bad input leaves nothing."""
        if self.bar is not None:
            self.bar.close()
        for file in self.files.values():
            file.file.close()
            if kind is not None and issubclass(kind, InputError):
                file.path.unlink(missing_ok=True)

    def open_bar(self, step: int) -> None:
        """Start the progress bar after so many steps, where it would be seen."""
        if show_bar():
            self.bar = tqdm(total=self.cfg.num_iterations, initial=step, unit="step", dynamic_ncols=True)

    def print(self, text: str, to_log: bool = True, to_console: bool = True) -> None:
        """Write a line, flushed."""
        if not self.rt.is_main:
            return
        if to_log:
            self._add(".txt", text)
        if to_console and not self.is_mute:
            try:
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()
            except OSError as error:
                self.is_mute, sys.stdout = True, open(os.devnull, "w")
                self._warn(f"the console cannot be written ({error.strerror})")

    def _add(self, suffix: str, line: str) -> None:
        problem = self.files[suffix].add((line + "\n").encode())
        if problem:
            self._warn(f"{self.files[suffix].path} cannot be written ({problem})")

    def _warn(self, problem: str) -> None:
        with suppress(OSError):
            tqdm.write(f"{problem}: training goes on, the text stays in memory until the end",
                       file=sys.stderr)

    def write_event(self, event: str, step: int, **facts) -> None:
        """One line of <run_id>.jsonl, where there is one."""
        if ".jsonl" in self.files:
            self._add(".jsonl", json.dumps(dict(event=event, step=step, **facts)))

    def log_validation(self, step: int, val_loss: float, train_time: float) -> None:
        """The line of a validation; the clock stands at train_time seconds."""
        self.val_points.append([step, val_loss, round(train_time * 1000)])
        self.write_event("validation", step, val_loss=val_loss, train_time_ms=round(train_time * 1000))
        self.print(f"step:{step}/{self.cfg.num_iterations} val_loss:{val_loss:.4f} "
                   f"train_time:{train_time * 1000:.0f}ms step_avg:{train_time * 1000 / max(step, 1):.2f}ms")

    def log_step(self, step: int, loss: Callable[[], float], tokens: int, train_time: float) -> None:
        """The line of a training step, counted from 1, and the bar. loss() is read only to be shown."""
        every = self.cfg.print_every
        self.print(f"step:{step}/{self.cfg.num_iterations} train_time:{train_time * 1000:.0f}ms "
                   f"step_avg:{train_time * 1000 / step:.2f}ms", to_console=every > 0 and step % every == 0)
        if self.bar is not None:
            if time.monotonic() - self.bar.last_print_t > 0.5 or step == self.cfg.num_iterations:
                self.bar.set_postfix_str(f"loss {loss():.3f}, {tokens / train_time:,.0f} tok/s",
                                         refresh=False)
            self.bar.update()

    def finish(self, result: dict) -> None:
        """Leave the result: log and json, in a record run also the script; and print the card."""
        if not self.rt.is_main:
            return
        if self.bar is not None:
            self.bar.close()
        result = dict(**result, track=self.cfg.track, preset=self.cfg.preset, seed=self.cfg.seed,
                      val_points=self.val_points, final_val_loss=self.val_points[-1][1],
                      script_sha256=hashlib.sha256(self.source).hexdigest(), git_commit=read_git_commit(),
                      versions=describe_versions(), hardware=describe_hardware(self.rt))
        path = self.folder / f"{self.run_id}.json"
        self.print(format_card(result, self.rt, path), to_log=False)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.cfg.record:
                write_atomic(self.folder / "train_gpt.py", self.source)
            for suffix, file in self.files.items():
                file.move(self.folder / f"{self.run_id}{suffix}")
            write_atomic(path, (json.dumps(result, indent=1) + "\n").encode())
        except OSError as error:
            raise RunError(f"the result could not be written to {self.folder} ({error.strerror}): this run "
                           f"is not recorded; what the disk took of its log is in {self.cfg.logs_dir}",
                           of_one_rank=True) from error


CHECKPOINT_FORMAT = "train_gpt 1"


def name_checkpoints(cfg: Config) -> Path:
    """The folder of this run's checkpoints."""
    return Path(cfg.checkpoint_dir, f"{cfg.record or cfg.preset}_seed{cfg.seed}")


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last written first."""
    found = [path for path in folder.glob("step_*.pt") if path.is_file()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def find_abandoned(folder: Path) -> Iterator[Path]:
    """Partial checkpoints whose writer no longer runs."""
    for path in folder.glob(".step_*.partial"):
        try:
            os.kill(int(path.name.split(".")[-2]), 0)
        except ProcessLookupError:
            yield path


def hash_checkpoint(meta: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over everything a checkpoint says."""
    digest = hashlib.sha256(meta.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def read_checkpoint(path: Path) -> tuple[dict, dict[str, Tensor]]:
    """(facts, tensors) of a checkpoint; InputError where it is damaged. Nothing in the file is executed.

    It is a torch.save() archive: PyTorch's distributed checkpoints keep their index as an unrestricted
    pickle in a folder of files, which no single rename makes complete, and safetensors is one more package.
    """
    try:
        content = dict(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        facts, is_ours = json.loads(content["meta"]), content["format"] == CHECKPOINT_FORMAT
        is_whole = content["sha256"] == hash_checkpoint(content["meta"], content["tensors"])
    except Exception as error:  # whatever a damaged file makes its readers raise
        reason = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise InputError(f"{path} cannot be read as a checkpoint ({reason}): name another one, or give "
                         "--resume=auto for the newest that can") from None
    if not is_ours or not is_whole:
        raise InputError(f"{path} is {'damaged: its SHA-256 differs' if is_ours else 'of another format'}: "
                         "name another checkpoint")
    return facts, content["tensors"]


def find_checkpoint(cfg: Config) -> tuple[Path, dict, dict[str, Tensor]] | None:
    """What --resume names: (path, facts, tensors); for auto the newest that is whole, or None."""
    paths, problem = [Path(cfg.resume)], None
    if cfg.resume == "auto":
        paths = list_checkpoints(name_checkpoints(cfg))
    for path in paths:
        try:
            facts, tensors = read_checkpoint(path)
        except InputError as error:
            problem = problem or error  # of the newest
        else:
            check_same_run(path, facts, cfg)
            return path, facts, tensors
    if problem:
        raise problem
    return None


def find_result(facts: dict, cfg: Config) -> str:
    """The json of the run that left a checkpoint after its last step; empty where there is none yet."""
    places = (Path(cfg.logs_dir), *Path(cfg.records_dir, cfg.track).glob("*"))
    paths = [path for place in places if (path := place / f"{facts['run_id']}.json").exists()]
    return str(paths[0]) if paths and facts["progress"]["step"] == cfg.num_iterations else ""


def check_same_run(path: Path, facts: dict, cfg: Config) -> None:
    """Raise InputError where a checkpoint does not fit this run."""
    theirs, ours = facts["config"], json.loads(json.dumps(dataclasses.asdict(cfg)))
    for name in (*(field.name for field in dataclasses.fields(ModelConfig)), "matrix_rule"):
        if name != "fp8_head" and ours[name] != theirs.get(name):
            shown = [value if name != "layers" else "others" for value in (theirs.get(name), ours[name])]
            raise InputError(f"{path} is a checkpoint of another model: --{name} is {shown[0]} there, "
                             f"{shown[1]} here: give that run's options, or start anew without --resume")
    step = facts["progress"]["step"]
    if step > cfg.num_iterations:
        raise InputError(f"{path} has made {step} steps, more than --num_iterations={cfg.num_iterations}: "
                         f"give at least --num_iterations={step}")
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if cfg.record and facts["script_sha256"] != script:
        raise InputError(f"{path} was left by another script, which a record does not allow: start --record="
                         f"{cfg.record} anew without --resume")


class Checkpoints:
    """Writes checkpoints in the background, and keeps the newest two of this run."""

    KEPT = 2

    def __init__(self, cfg: Config, log: RunLog):
        self.folder, self.log, self.thread, self.path = name_checkpoints(cfg), log, None, None
        self.is_broken = False

    def save(self, step: int, facts: dict, copies: dict[str, Callable[[], Tensor]]) -> None:
        """Write, on the rank that has the copies, as soon as the last checkpoint is out."""
        self.wait_for_disk()
        if copies:
            self.thread = threading.Thread(target=self._write, args=(step, json.dumps(facts), copies))
            self.thread.start()

    def wait_for_disk(self) -> Path | None:
        """Wait for the last one; its path, or None where it could not be written. Watch knows this name."""
        if self.thread is not None:
            self.thread.join()
        return self.path

    def _write(self, step: int, meta: str, copies: dict[str, Callable[[], Tensor]]) -> None:
        path, start = self.folder / f"step_{step:06d}.pt", time.perf_counter()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: wait() for name, wait in copies.items()}
            content = dict(format=CHECKPOINT_FORMAT, meta=meta, tensors=tensors,
                           sha256=hash_checkpoint(meta, tensors))
            write_atomic(path, lambda file: torch.save(content, file))
            others = [other for other in list_checkpoints(self.folder) if other != path]
            for old in (*others[self.KEPT - 1 :], *find_abandoned(self.folder)):
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            if not self.is_broken:
                cause = error.__context__ if isinstance(error.__context__, OSError) else error
                reason = getattr(cause, "strerror", None) or str(cause).splitlines()[0]
                self.log.print(f"no checkpoint of step {step}: {self.folder} cannot be written ({reason}); "
                               "training goes on")
            self.is_broken, self.path = True, None
            return
        self.is_broken, self.path = False, path
        self.log.write_event("checkpoint", step, path=str(path), seconds=time.perf_counter() - start)


def format_card(result: dict, rt: Runtime, path: Path) -> str:
    """The result card at the end of a run."""
    derived, seconds = result["config"]["derived"], result["train_time_ms"] / 1000
    rows = [
        ("preset", f"{result['preset']}, seed {result['seed']}, "
                   f"{derived['num_params'] / 1e6:.2f} M parameters"),
        ("validation loss", f"{result['final_val_loss']:.4f} after "
                            f"{result['config']['num_iterations']} steps"),
        ("training time", f"{seconds:.2f} s, and {result['compile_time_s']:.1f} s of warm-up "
                          "before the clock"),
        ("speed", f"{result['tokens_per_s']:,} tokens/s"),
        ("MFU", f"{100 * result['mfu']:.1f} % of {rt.peak_flops * rt.world_size / 1e12:.2f} TFLOP/s, "
                "the matmul rate measured here"),
        ("peak memory", f"{result['peak_memory_mib']:,} MiB"),
        ("sent per step", f"{result['bytes_per_step'] / 1e6:,.2f} MB by each rank; the least possible is "
                          f"{result['minimum_bytes_per_step'] / 1e6:,.2f} MB"),
        ("left in", str(path)),
    ]
    rows = [row for row in rows if row[0] != "sent per step" or rt.world_size > 1]
    width = max(len(value) for _, value in rows)
    body = [f"| {name:<15} | {value:<{width}} |" for name, value in rows]
    rule = f"+{'-' * 17}+{'-' * (width + 2)}+"
    return "\n".join((rule, *body, rule))


# ==== TRAINING =============================================================================================
# Set up, warm up and undo it, start the clock, loop. Guard and Telemetry look on.


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
    num_lowered: int = 0  # precisions given up
    lr_scale: float = 1.0
    lr_scale_until: int = 0  # step


class Trainer:
    """Model, optimizer and schedule of a run, and the steps that use them."""

    def __init__(self, cfg: Config, rt: Runtime):
        self.cfg, self.rt, self.schedule = cfg, rt, Schedule(cfg)
        torch.manual_seed(cfg.seed)
        model = GPT(cfg, rt.use_flex, rt.use_fp8, rt.dtype, rt.use_kernels).to(rt.device)
        self.optimizer = Optimizer(model, cfg, rt)
        for prefix, part in model.compiled_parts():
            self.optimizer.wait_before(
                part, [name for name, _ in model.named_parameters() if name.startswith(prefix)])
            part.forward = rt.compile(part.forward)
        self.optimizer.wait_before(model, model.early_parameters())
        self.model, self.progress = model, Progress()
        self.step_inputs: dict[tuple[int, int], tuple[int, StepInputs]] = {}  # of the stage last asked for

    def inputs_at(self, state: StepState, num_tokens: int, period: int) -> StepInputs:
        """The model's inputs at a schedule state; made anew only when the stage or the length changes."""
        stage_index, made = self.step_inputs.get((num_tokens, period), (None, None))
        if stage_index != state.stage_index:
            windows = (state.stage.window_long, state.stage.window_short)
            if self.rt.use_flex:
                windows = torch.tensor(windows, dtype=torch.int32, device=self.rt.device)
            made = StepInputs(windows, *make_rotary(state, num_tokens, period, self.rt))
            self.step_inputs[num_tokens, period] = (state.stage_index, made)
        return made

    def train_step(self, batches: Prefetcher, state: StepState) -> Tensor:
        """One optimizer step; returns the mean loss of this rank's tokens, still on the device."""
        tokens_per_step = state.stage.tokens_per_step or self.cfg.tokens_per_step
        accum, _ = split_rows(self.cfg, self.rt.world_size, tokens_per_step)
        total = torch.zeros((), device=self.rt.device)
        mark, progress = self.optimizer.probe.mark, self.progress
        for micro in range(accum):
            mark("data wait")
            batch = next(batches)
            mark("forward and backward")
            if micro == accum - 1:
                self.optimizer.arm()
            loss = self.model(*batch, self.inputs_at(state, batch.inputs.size(0), self.cfg.seq_len))
            loss.backward()
            total += loss.detach()
        lr_scale = progress.lr_scale if progress.step < progress.lr_scale_until else 1.0
        self.optimizer.step(state.lr_factor * lr_scale, state.momentum, tokens_per_step)
        mark("")
        return total / (tokens_per_step // self.rt.world_size)

    @torch.no_grad()
    def validate(self, data: ValData, state: StepState, num_batches: int | None = None) -> float:
        """Mean loss over the validation tokens, or some of them, shared out over the ranks."""
        self.optimizer.finish()
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.rt.device)
        num_batches = num_batches or data.num_batches
        for index in range(self.rt.rank, num_batches, self.rt.world_size):
            batch = data.batch(index).to(self.rt.device)
            total += self.model(*batch, self.inputs_at(state, data.batch_tokens, self.cfg.val_seq_len))
        self.model.train()
        return all_reduce_sum(total, self.rt).item() / (num_batches * data.batch_tokens)

    def lower_precision(self) -> str:
        """Give up the next low precision; says which, or nothing where none is left."""
        if self.model.head.use_fp8:
            self.model.head.use_fp8, lowered = False, "the head leaves FP8"
        elif self.rt.dtype == torch.bfloat16:
            self.rt = self.optimizer.rt = dataclasses.replace(self.rt, dtype=torch.float32)
            self.model.dtype, lowered = torch.float32, "activations become float32"
            self.step_inputs.clear()
        else:
            return ""
        self.progress.num_lowered += 1
        return lowered

    def state_dict(self) -> tuple[dict, dict[str, Callable[[], Tensor]]]:
        """What a checkpoint holds of this run: plain facts, and tensors being copied (rank 0)."""
        copies = self.optimizer.state_dict()
        copies["random/cpu"] = copy_to_host(torch.get_rng_state())
        if self.rt.device.type == "cuda":
            copies["random/cuda"] = copy_to_host(torch.cuda.get_rng_state(self.rt.device))
        facts = dict(config=dataclasses.asdict(self.cfg), progress=dataclasses.asdict(self.progress),
                     optimizer_steps=self.optimizer.step_count, world_size=self.rt.world_size,
                     script_sha256=hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
                     versions=describe_versions())
        return facts, copies if self.rt.is_main else {}

    def load_state_dict(self, facts: dict, tensors: dict[str, Tensor]) -> None:
        """Go on where state_dict() was called; only rank 0 needs the tensors."""
        self.optimizer.load_state_dict(tensors, facts["optimizer_steps"])
        self.progress = Progress(**facts["progress"])
        lowered, self.progress.num_lowered = self.progress.num_lowered, 0
        for _ in range(lowered):
            self.lower_precision()
        if "random/cpu" in tensors:
            torch.set_rng_state(tensors["random/cpu"])
        if "random/cuda" in tensors and self.rt.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random/cuda"], self.rt.device)

    def warm_up(self, train_data: TrainData, val_data: ValData) -> None:
        """Run every shape and window once or more, then put parameters and rule state back exactly."""
        saved = self.optimizer.snapshot()
        for _, start, end in self.schedule.spans():
            steps = min(self.cfg.warmup_iterations * self.cfg.adam_every, end - start)  # of every kind
            batches = Prefetcher(train_data.batches(self.cfg, self.rt, start, start + steps), self.rt.device)
            for _ in range(steps):
                self.train_step(batches, self.schedule.at(start))
            batches.close()
            self.validate(val_data, self.schedule.at(start), min(self.rt.world_size, val_data.num_batches))
        self.validate(val_data, self.schedule.at(self.cfg.num_iterations),
                      min(self.rt.world_size, val_data.num_batches))
        self.optimizer.restore(saved)
        del saved
        if self.rt.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.rt.device)


class Telemetry:
    """Measures every telemetry_every-th step, by hooks outside the compiled graphs, into <run_id>.jsonl."""

    SAMPLE = 256  # tokens, and head rows, of which logits and FP8 casts are measured
    EMA_DECAY = 0.98  # of the training loss, per step

    def __init__(self, trainer: Trainer, log: RunLog):
        self.trainer, self.log, self.every = trainer, log, trainer.cfg.telemetry_every
        self.losses: list[Tensor] = []  # since the last measurement
        self.is_measuring = False
        if self.every:
            for block in trainer.model.blocks:
                block.register_forward_hook(self._note_layer)
            trainer.model.head.register_forward_pre_hook(self._note_head)

    def start_step(self) -> bool:
        """Arm the hooks, and return True, if the coming step is one to measure."""
        self.is_measuring = bool(self.every) and (self.trainer.progress.step + 1) % self.every == 0
        self.layers, self.head = [], {}
        return self.is_measuring

    @torch.no_grad()
    def _note_layer(self, _block: nn.Module, _inputs: tuple, output: Tensor) -> None:
        if self.is_measuring and len(self.layers) < len(self.trainer.model.blocks):  # of one micro-batch
            x = output.float()
            self.layers.append(torch.stack((x.mean(), x.std(), x.abs().max())))

    @torch.no_grad()
    def _note_head(self, head: Head, inputs: tuple[Tensor, Tensor]) -> None:
        if not self.is_measuring or self.head:
            return
        x, targets = (t[:: max(1, len(t) // self.SAMPLE)] for t in inputs)
        w = head.weight.type_as(x)
        logits = softcap(x @ w.T, head.cap)  # (T, V)
        _, grads = softcapped_cross_entropy(x @ w.T, targets, head.cap, torch.float32, FP8_GRAD_SCALE)
        rows = w[:: max(1, len(w) // self.SAMPLE)]
        self.head = dict(
            logits=dict(mean=logits.mean().item(), std=logits.std().item(), max=logits.max().item()),
            fp8=dict(x=measure_fp8(x, fp8_x_scale(x.size(1)), torch.float8_e4m3fn),
                     w=measure_fp8(rows, FP8_WEIGHT_SCALE, torch.float8_e4m3fn),
                     grad=measure_fp8(grads, 1.0, torch.float8_e5m2)))

    def end_step(self, loss: Tensor, probe: Probe, train_time: float) -> None:
        """Remember the loss, a mean over this rank's tokens; write the line if this step was measured."""
        if not self.every:
            return
        self.losses.append(loss)
        if not self.is_measuring:
            return
        rt, progress = self.trainer.rt, self.trainer.progress
        losses = (all_reduce_sum(torch.stack(self.losses), rt) / rt.world_size).tolist()
        norms = all_reduce_sum(probe.sums, rt).sqrt().tolist()
        self.is_measuring, self.losses = False, []
        for value in losses:
            ema = progress.loss_ema
            progress.loss_ema = value if math.isnan(ema) else ema + (1 - self.EMA_DECAY) * (value - ema)
        slope = 1000 * np.polyfit(range(len(losses)), losses, 1)[0] if len(losses) > 1 else 0.0
        self.log.write_event(
            "telemetry", progress.step, train_time_ms=round(train_time * 1000),
            loss=losses[-1], loss_ema=progress.loss_ema, loss_slope_per_1000_steps=slope,
            groups={group: dict(grad_norm=grad, weight_norm=weight, update_ratio=update / max(weight, 1e-30),
                                momentum_norm=momentum)
                    for group, (grad, weight, update, momentum) in zip(probe.rows, norms)},
            layers=[dict(zip(("mean", "std", "max"), layer.tolist())) for layer in self.layers],
            **self.head, seconds=probe.read_seconds())


class Guard:
    """Notices that training goes wrong, and goes back to weights from before it did.

    Weights and rule states go back, time does not: data and schedule go on, so that what did harm is not
    seen again and the run ends when it should. All ranks judge the same sums, one step late: no GPU waits.
    """

    LOSS_FACTOR, GRAD_FACTOR = 1.5, 10.0  # times the median of the last good steps: too much
    MEDIAN_STEPS, LEAST_STEPS = 64, 16  # in that median, at most and at least
    VAL_RISE = 0.05  # share by which validation loss may exceed its best
    SNAPSHOT_EVERY, TRIAL_STEPS = 10, 5  # steps; a snapshot is trusted after so many good ones
    LR_FACTOR, LR_STEPS = 0.5, 20  # after an action, for so many steps
    MOST_ACTIONS, STATUS = 6, 3  # then the run stops with this exit status

    def __init__(self, trainer: Trainer, log: RunLog):
        self.trainer, self.log = trainer, log
        # groups that are not updated in every step make no norm to compare from step to step
        self.intervals = [hyper.every for hyper in group_hypers(trainer.cfg).values()]
        self.best_val_loss = min((val_loss for _, val_loss, _ in log.val_points), default=math.inf)
        self.is_on = trainer.cfg.guard == "on"
        self.pending: list[tuple[int, Callable[[], Tensor]]] = []  # (step, its sums): not yet judged
        self.is_snapshot_due = False
        self.snapshots = [(trainer.progress.step, trainer.optimizer.snapshot())] if self.is_on else []

    def end_step(self, loss: Tensor, probe: Probe) -> None:
        """Judge the step before this one; take a snapshot where one is due."""
        if not self.is_on:
            return
        trainer, step = self.trainer, self.trainer.progress.step
        squares = probe.sums[:, 0].unbind()  # by group
        steady = [square for square, every in zip(squares, self.intervals) if every == 1]
        sums = torch.stack((loss / trainer.rt.world_size, sum(steady), sum(squares)))
        self.pending.append((step, copy_to_host(all_reduce_sum(sums, trainer.rt))))
        self.is_snapshot_due |= step % self.SNAPSHOT_EVERY == 0
        if not self.is_snapshot_due or not trainer.optimizer.is_settled():
            self.judge(but=1)
        elif self.judge():
            self.snapshots = [*self.snapshots[-1:], (step, trainer.optimizer.snapshot())]
            self.is_snapshot_due = False

    def judge(self, but: int = 0) -> bool:
        """Judge all steps but the last few; whether all were good, as far as they can be bad."""
        while len(self.pending) > but:
            step, sums = self.pending.pop(0)
            loss, square, all_squares = sums().tolist()
            grad_norm = math.sqrt(square) if math.isfinite(all_squares) else all_squares
            fault = self._find_fault(loss, grad_norm)
            if fault:
                self._act(step, fault)
                return False
            good = self.trainer.progress.good_steps
            good[:] = [*good, [loss, grad_norm]][-self.MEDIAN_STEPS :]
        return True

    def judge_validation(self, step: int, val_loss: float) -> None:
        """The same for a validation loss, the same number on all ranks."""
        if self.is_on and not val_loss <= self.best_val_loss * (1 + self.VAL_RISE):
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
        trainer.optimizer.restore(snapshot)
        self.pending, self.snapshots = [], self.snapshots[: index + 1]
        progress.num_actions += 1
        if progress.num_actions > self.MOST_ACTIONS:
            trainer.rt.stop.status, progress.num_actions = self.STATUS, 0  # anew for those who resume it
            measures = [f"{self.MOST_ACTIONS} actions were not enough"]
        else:
            in_force = progress.lr_scale if progress.step < progress.lr_scale_until else 1.0
            progress.lr_scale = in_force * self.LR_FACTOR
            progress.lr_scale_until = progress.step + self.LR_STEPS
            measures = [trainer.lower_precision(), f"learning rates times {progress.lr_scale:g} until step "
                                                   f"{progress.lr_scale_until}"]
        text = ", ".join(filter(None, (f"weights of step {made}", *measures)))
        self.log.print(f"guard: step {step}: {fault}: {text}")
        self.log.write_event("guard", step, fault=fault, measures=text, action=progress.num_actions)


@contextmanager
def explain_memory(cfg: Config):
    """Turn an out-of-memory error into an InputError that names the knob."""
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


def open_checkpoint(cfg: Config, rt: Runtime) -> tuple[Path, dict, dict[str, Tensor]] | None:
    """What find_checkpoint() finds on rank 0, or its InputError, on all ranks; tensors on rank 0 alone."""
    found, problem = None, ""
    if rt.is_main and cfg.resume:
        try:
            found = find_checkpoint(cfg)
        except InputError as error:
            problem = str(error)
    if found:
        found[1]["result"] = find_result(found[1], cfg)
    shared, problem = share_from_main((found and found[:2], problem), rt)
    if problem:
        raise InputError(problem)
    return shared and (*shared, found[2] if found else {})


def resume(trainer: Trainer, saved: tuple[Path, dict, dict[str, Tensor]]) -> str:
    """Load a checkpoint; returns a line that says so, and which options that matter are others now."""
    path, facts, tensors = saved
    trainer.load_state_dict(facts, tensors)
    trainer.progress.resumed_at.append(trainer.progress.step)
    ours, theirs = json.loads(json.dumps(dataclasses.asdict(trainer.cfg))), facts["config"]
    fields = (*(field.name for field in dataclasses.fields(OptimConfig)), "dtype", "num_iterations", "seed",
              "tokens_per_step", "seq_len", "micro_batch_tokens", "max_doc_len", "train_files", "stages")
    others = [f"{name} was {theirs.get(name)}" for name in fields if ours[name] != theirs.get(name)]
    return f"resumed {path} after step {trainer.progress.step}{': ' if others else ''}{', '.join(others)}"


def train(cfg: Config, rt: Runtime, argv: list[str]) -> None:
    """The whole run: data, log, model, warm-up, loop, result."""
    ensure_embedded_corpus(cfg, rt)
    train_data, val_data = TrainData(cfg, Schedule(cfg)), ValData(cfg)
    resolved, saved = resolved_dict(cfg, rt.world_size), open_checkpoint(cfg, rt)
    if saved and saved[1]["result"]:
        if rt.is_main:
            print(f"{saved[0]} is the end of a finished run, see {saved[1]['result']}: nothing to do "
                  "(without --resume it starts anew)")
        return
    if cfg.checkpoint_every:
        check_writable(name_checkpoints(cfg), "choose another folder with --checkpoint_dir")
    with RunLog(cfg, rt, saved and saved[1]) as log, explain_memory(cfg):
        log.print(f"preset {cfg.preset}: {resolved['derived']['num_params'] / 1e6:.2f} M parameters, "
                  f"{rt.world_size} x {rt.device.type}, "
                  f"{resolved['derived']['train_tokens'] / 1e6:.2f} M training tokens")
        for note in rt.notes:
            log.print(note)
        trainer = Trainer(cfg, rt)
        if saved:
            log.print(resume(trainer, saved))
        elif cfg.resume:
            log.print(f"no checkpoint in {name_checkpoints(cfg)}: starting anew")
        if rt.watch is not None:
            rt.watch.is_strict = True
        start = clock(rt.device)
        trainer.warm_up(train_data, val_data)
        facts = dict(config=resolved, argv=argv, compile_time_s=round(clock(rt.device) - start, 2),
                     corpus_fingerprint=fingerprint((*train_data.shards, *val_data.shards)))
        with rt.stop.catch_signals():
            first_step, before = trainer.progress.step, rt.traffic.num_bytes
            Run(trainer, train_data, val_data, log, argv).run()
            sent = (rt.traffic.num_bytes - before) / max(1, cfg.num_iterations - first_step)
            log.finish({**facts, **measure_run(trainer, resolved["derived"], sent)})
    if rt.is_main:
        print_sample(trainer.model, cfg, trainer.rt)


def measure_run(trainer: Trainer, derived: dict, sent: float) -> dict:
    """The figures of a finished run; sent: bytes that this rank has given to others in each step."""
    rt, progress = trainer.rt, trainer.progress
    sent = torch.tensor(sent / rt.world_size, dtype=torch.float64, device=rt.device)
    tokens_per_s = derived["train_tokens"] / progress.train_time
    return dict(
        train_time_ms=round(progress.train_time * 1000), tokens_per_s=round(tokens_per_s),
        mfu=round(tokens_per_s * derived["flops_per_token"] / (rt.peak_flops * rt.world_size), 4),
        bytes_per_step=round(all_reduce_sum(sent, rt).item()),
        minimum_bytes_per_step=round(trainer.optimizer.minimum_bytes),
        peak_memory_mib=read_peak_memory_mib(rt), resumed_at=progress.resumed_at,
        guard_actions=progress.num_actions)


class Run:
    """The timed loop, from where trainer.progress stands; the clock stands while validating."""

    TIME_LIMIT_STATUS = 124
    CAUSES = {128 + signal.SIGINT: "by SIGINT", 128 + signal.SIGTERM: "by SIGTERM",
              TIME_LIMIT_STATUS: "at its time limit", Guard.STATUS: "by the guard"}

    def __init__(self, trainer: Trainer, train_data: TrainData, val_data: ValData, log: RunLog,
                 argv: list[str]):
        self.cfg, self.rt, self.trainer, self.progress = trainer.cfg, trainer.rt, trainer, trainer.progress
        self.val_data, self.log, self.argv = val_data, log, argv
        self.checkpoints = Checkpoints(self.cfg, log)
        batches = train_data.batches(self.cfg, self.rt, self.progress.step, self.cfg.num_iterations)
        self.batches = Prefetcher(batches, self.rt.device)
        self.guard, self.telemetry = Guard(trainer, log), Telemetry(trainer, log)
        self.is_checkpoint_due = False

    def run(self) -> None:
        """All steps; RunStopped where a signal, the time limit or the guard ends them early."""
        cfg, progress = self.cfg, self.progress
        self.log.open_bar(progress.step)
        wait_for_ranks(self.rt)
        self.start_clock()
        try:
            while progress.step < cfg.num_iterations:
                if cfg.val_loss_every and progress.step % cfg.val_loss_every == 0:
                    self.guard.judge_validation(progress.step, self.validate())
                self.train_step()
                self.save_or_stop()
            self.validate()
        finally:
            self.batches.close()
            self.checkpoints.wait_for_disk()

    def start_clock(self) -> None:
        """Training time counts from here."""
        self.started = clock(self.rt.device)

    def stop_clock(self) -> None:
        """Training time counts to here."""
        self.trainer.optimizer.finish()
        self.progress.train_time += clock(self.rt.device) - self.started

    def validate(self) -> float:
        """Validate, write the line."""
        self.stop_clock()
        val_loss = self.trainer.validate(self.val_data, self.trainer.schedule.at(self.progress.step))
        self.log.log_validation(self.progress.step, val_loss, self.progress.train_time)
        self.start_clock()
        return val_loss

    def train_step(self) -> None:
        """One step, and all that looks at it."""
        cfg, rt, progress = self.cfg, self.rt, self.progress
        state = self.trainer.schedule.at(progress.step)
        is_measured, optimizer = self.telemetry.start_step(), self.trainer.optimizer
        probe = optimizer.probe = Probe(group_hypers(cfg) if is_measured or self.guard.is_on else (),
                                        rt.device, is_measured)
        loss = self.trainer.train_step(self.batches, state)
        optimizer.probe = Probe()
        progress.step += 1
        progress.tokens += state.stage.tokens_per_step or cfg.tokens_per_step
        if cfg.check_ranks_every and progress.step % cfg.check_ranks_every == 0:
            optimizer.check_ranks()
        elapsed = progress.train_time + time.perf_counter() - self.started
        self.log.log_step(progress.step, loss.item, progress.tokens, elapsed)
        self.guard.end_step(loss, probe)
        self.telemetry.end_step(loss, probe, elapsed)
        if cfg.time_limit and time.monotonic() - rt.started > cfg.time_limit:
            rt.stop.status = rt.stop.status or self.TIME_LIMIT_STATUS
        self.is_checkpoint_due |= bool(cfg.checkpoint_every) and (
            progress.step % cfg.checkpoint_every == 0 or progress.step == cfg.num_iterations)

    def save_or_stop(self) -> None:
        """Save a checkpoint where one is due; where all ranks are to stop, save it and raise RunStopped."""
        step = self.progress.step
        is_last = step == self.cfg.num_iterations
        if is_last:
            self.guard.judge()
        if not (is_last or self.trainer.optimizer.is_settled()):  # else gradients would be lost
            return
        status = self.rt.agree_to_stop(step)
        if not (status or self.is_checkpoint_due):
            return
        self.guard.judge()
        self.stop_clock()
        self.start_clock()  # what saving costs is training time
        facts, copies = self.trainer.state_dict()
        facts.update(val_points=self.log.val_points, run_id=self.log.run_id)
        self.checkpoints.save(step, facts, copies)
        self.is_checkpoint_due = False
        if status:
            path = self.checkpoints.wait_for_disk()
            wait_for_ranks(self.rt)  # a launcher ends all ranks when the first one leaves
            remedy = f"go on with: {format_resume(self.argv, path, self.rt)}"
            raise RunStopped(f"stopped {self.CAUSES[status]} after step {step} of "
                             f"{self.cfg.num_iterations}: {remedy if path else 'no checkpoint'}", status)


def format_resume(argv: list[str], path: Path, rt: Runtime) -> str:
    """The command line that goes on from a checkpoint."""
    rest = [word for before, word in zip(("", *argv), argv)
            if not word.startswith("--resume") and before != "--resume"]
    launcher = ["python"] if rt.world_size == 1 else [
        "torchrun", "--standalone", f"--nproc_per_node={rt.world_size}"]
    return shlex.join([*launcher, os.path.relpath(__file__), *rest, f"--resume={path}"])


# ==== SAMPLING =============================================================================================
# Text from a trained model, token by token. Every slot keeps the keys and values its window can reach, so a
# token costs the same however long the text has become.


class Tokenizer(typing.NamedTuple):
    """Text to tokens and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], bytes]
    document_start: int


def find_tokenizer(vocab_size: int) -> Tokenizer | None:
    """The tokenizer that belongs to a vocabulary, if it is at hand."""
    if vocab_size == BYTE_VOCAB_SIZE:
        return Tokenizer(lambda text: list(text.encode()), bytes, BYTE_DOCUMENT_START)
    try:
        import tiktoken  # optional: only text needs it
        gpt2 = tiktoken.get_encoding("gpt2")  # from its cache, or downloaded
    except (ImportError, OSError):
        return None
    if vocab_size != gpt2.n_vocab:
        return None
    return Tokenizer(gpt2.encode_ordinary, gpt2.decode_bytes, gpt2.eot_token)


def choose_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw from logits (V,) on the CPU; at temperature 0 the largest."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -math.inf)
    shares = ((logits.double() - logits.max()) / temperature).softmax(-1)
    return int(torch.multinomial(shares, 1, generator=generator))


@torch.no_grad()
def generate(model: GPT, prompt: list[int], document_start: int, cfg: Config, rt: Runtime) -> Iterator[int]:
    """Go on from a document start and a prompt, until the next document or cfg.max_new_tokens.

    The windows and the rotary are those of the final validation.
    """
    state, generator = Schedule(cfg).at(cfg.num_iterations), torch.Generator().manual_seed(cfg.seed)
    windows = dict(long=state.stage.window_long, short=state.stage.window_short)
    caches = [None if spec.attention == "none" else KeyValues(windows[spec.attention])
              for spec in model.specs]
    position, given = 0, [document_start, *prompt]
    for _ in range(cfg.max_new_tokens):
        for part in torch.tensor(given, dtype=torch.int32, device=rt.device).split(256):
            end = position + len(part)
            step = StepInputs(caches, *make_rotary(state, len(part), end, rt, position))
            x, position = model.encode(part, torch.zeros_like(part), step), end  # (T, D)
        logits = model.head.logits(x[-1:])[0, : cfg.vocab_size].cpu()  # (V,)
        if not logits.isfinite().all():  # a model that diverged has nothing to say
            return
        token = choose_token(logits, cfg.temperature, cfg.top_k, generator)
        if token == document_start:
            return
        yield token
        given = [token]


def print_sample(model: GPT, cfg: Config, rt: Runtime) -> None:
    """A short text under the result card, where a tokenizer is at hand."""
    tokenizer = find_tokenizer(cfg.vocab_size)
    if tokenizer is None:
        return
    model.eval()
    cfg = dataclasses.replace(cfg, prompt="", max_new_tokens=120)
    with torch.compiler.set_stance("force_eager") if rt.use_compile else nullcontext():
        text = tokenizer.decode(list(generate(model, [], tokenizer.document_start, cfg, rt)))
    print(f"sample: {text.decode(errors='replace').strip()}", flush=True)


def write_sample(values: dict) -> None:
    """--sample: print the prompt and what the checkpoint makes of it, as it comes."""
    allowed = {field.name for field in dataclasses.fields(SampleConfig)} | {"seed", "device", "dtype"}
    if set(values) - allowed:
        raise InputError(f"--{min(set(values) - allowed)} has no meaning with --sample: give only "
                         f"{', '.join('--' + name for name in sorted(allowed))}")
    facts, tensors = read_checkpoint(Path(values["sample"]))
    plain = dict(kernels="off", compile="off", fp8_head="off", device="auto", dtype="float32")
    cfg = dataclasses.replace(config_from_dict(facts["config"]), **{**plain, "seed": 0, **values})
    tokenizer = find_tokenizer(cfg.vocab_size)
    try:
        prompt = tokenizer.encode(cfg.prompt) if tokenizer else [int(word) for word in cfg.prompt.split()]
        if any(not 0 <= token < cfg.vocab_size for token in prompt):
            raise ValueError
    except ValueError:
        raise InputError(f"--prompt={cfg.prompt} is not a list of token ids below {cfg.vocab_size}, and no "
                         "tokenizer is at hand: pip install tiktoken, or give ids") from None
    rt = start_runtime(cfg, is_alone=True)
    with torch.device("meta"):
        model = GPT(cfg, dtype=rt.dtype)
    model.load_state_dict({name: tensors[name] for name, _ in model.named_parameters()}, assign=True)
    model.to(rt.device).eval()
    document_start = tokenizer.document_start if tokenizer else 50256
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print(cfg.prompt, end="" if tokenizer else " ", flush=True)
    for token in generate(model, prompt, document_start, cfg, rt):
        print(decoder.decode(tokenizer.decode([token])) if tokenizer else f"{token} ", end="", flush=True)
    print()


# ==== MAIN =================================================================================================


def run(argv: list[str]) -> int:
    """Obey a command line; returns the exit status."""
    values, flags = parse_argv(argv)
    if "help" in flags:
        print(format_help())
    elif "list_presets" in flags:
        print(format_presets())
    elif "print_config" in flags:
        print(json.dumps(resolved_dict(make_config(values), env_int("WORLD_SIZE", 1)), indent=1))
    elif values.get("sample"):
        if env_int("RANK", 0) == 0:
            write_sample(values)
    else:
        cfg = make_config(values)
        rt = start_runtime(cfg)
        with rt.watch or nullcontext():
            train(cfg, rt, argv)
    return 0


def report(error: RunError, program: str) -> int:
    """Print the line of an error, once on each node; returns the exit status."""
    if env_int("LOCAL_RANK", 0) == 0 or error.of_one_rank:
        kind = "" if isinstance(error, RunStopped) else "error: "
        print(f"{program}: {kind}{error}", file=sys.stderr, flush=True)
    else:  # torchrun ends all ranks when the first one leaves: not before the one that speaks has spoken
        time.sleep(1 if isinstance(error, RunStopped) else 5)
    return error.status


def run_guarded(body: Callable[[], int], program: str = "train_gpt.py") -> int:
    """Do it, and turn errors that concern the user into one line; returns the exit status.

    Where other ranks may be gone it does not return: an orderly shutdown would wait for them.
    """
    try:
        status = body()
    except RunError as error:
        status = report(error, program)
    except KeyboardInterrupt:
        status = 130
    except Exception:
        if not dist.is_initialized():
            raise
        traceback.print_exc()
        status = 1
    if dist.is_initialized():
        if status:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        dist.destroy_process_group()
    return status


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says."""
    return run_guarded(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
