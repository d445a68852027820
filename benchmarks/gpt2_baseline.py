#!/usr/bin/env python3
"""Train a plain GPT-2 on the laptop track's data, as a baseline for preset laptop.

    ./run.sh benchmarks/gpt2_baseline.py --seconds 80 --lr 3e-3
    ./run.sh benchmarks/gpt2_baseline.py --val_every=100 --target=2   # also print when it reaches this loss

LayerNorm, GELU, learned positions, biases, tied head, AdamW (decay 0.1), clipping, warm-up and cosine over
the budget: nanoGPT's recipe, with bfloat16 autocast. Uses the width, depth, shards, validation tokens and
allocator settings of the preset. Prints the final loss. The learning rate is not tuned here.
compare_nanogpt.py runs it at nanoGPT's size for CPUs.
"""

import math
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, Progress, at_least, require_packages, run_guarded, warn

with require_packages():
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    import train_gpt as gpt
    from tools.results import find_crossing


class PlainBlock(nn.Module):
    """GPT-2's block."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"),
                                 nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, D) -> (B, T, D)."""
        q, k, v = (t.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class PlainGPT(nn.Module):
    """GPT-2 with a tied head."""

    def __init__(self, cfg: gpt.Config, context: int, num_heads: int):
        super().__init__()
        self.embed, self.position = (nn.Embedding(cfg.vocab_size, cfg.model_dim),
                                     nn.Embedding(context, cfg.model_dim))
        self.blocks = nn.Sequential(*(PlainBlock(cfg.model_dim, num_heads) for _ in range(cfg.num_layers)))
        self.norm = nn.LayerNorm(cfg.model_dim)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * cfg.num_layers) if residual else 0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets (B, T) -> mean loss."""
        x = self.embed(inputs) + self.position.weight[: inputs.size(1)]  # (B, T, D)
        logits = self.norm(self.blocks(x)) @ self.embed.weight.T  # (B, T, V)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def read_tokens(cfg: gpt.Config) -> np.ndarray:
    """The tokens of all training shards."""
    paths = gpt.find_shards(cfg.train_files, "train_files")
    return np.concatenate([gpt.open_shard(path, cfg.vocab_size).tokens for path in paths])


@torch.no_grad()
def average_loss(loss_of: Callable[[Tensor], Tensor], tokens: np.ndarray, context: int) -> float:
    """Mean loss of a token over all whole rows of this many tokens."""
    rows = np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context].copy()
    parts = torch.from_numpy(rows).split(16)
    return sum(loss_of(part).item() * len(part) for part in parts) / len(rows)


def check_sizes(args: Namespace, cfg: gpt.Config, most_tokens: int) -> None:
    """Raise RunError for sizes that do not fit. most_tokens: of a sequence, for these data."""
    if cfg.model_dim % args.num_heads:
        raise gpt.RunError(f"--num_heads={args.num_heads} does not divide the width {cfg.model_dim}", 2)
    if args.context > min(args.tokens_per_step, most_tokens):
        raise gpt.RunError(f"--context={args.context}: give at most --tokens_per_step="
                           f"{args.tokens_per_step}, and {most_tokens} for these data", 2)
    if args.beta2 >= 1:
        raise gpt.RunError(f"--beta2={args.beta2:g} is not below 1", 2)


def measure(args: Namespace) -> int:
    """Train for the given seconds or steps, validate on the tokens of the preset, print the loss."""
    cfg = gpt.make_config({"preset": "laptop", "device": "cpu",
                           **gpt.parse_argv(args.options)})
    train, val = read_tokens(cfg), gpt.ValData(cfg).tokens.astype(np.int64)
    check_sizes(args, cfg, min(len(train) - 2, len(val) - 1))
    rt = gpt.choose_precision(cfg, gpt.start_runtime(cfg))
    torch.manual_seed(cfg.seed)
    rng = np.random.default_rng(cfg.seed)
    model = PlainGPT(cfg, args.context, args.num_heads)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.beta2), fused=True)

    def sample() -> Tensor:
        starts = rng.integers(0, len(train) - args.context - 1, args.tokens_per_step // args.context)
        rows = [train[start : start + args.context + 1].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(rows))  # (B, T + 1)

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=rt.dtype == torch.bfloat16):
            return model(tokens[:, :-1], tokens[:, 1:])

    loss_of(sample()).backward()  # untimed warm-up
    budget = f"{args.steps} steps" if args.steps else f"{args.seconds:g} s"
    warn(f"training for {budget}, then validating on {cfg.val_tokens:,} tokens")
    start, steps, progress = time.perf_counter(), 0, Progress(10, unit="tenth")
    val_points: list[tuple[int, float, float]] = []  # step, loss, milliseconds

    def validate() -> None:
        """Add a validation. Moves the start, so that the clock does not count it."""
        nonlocal start
        began = time.perf_counter()
        val_points.append((steps, average_loss(loss_of, val, args.context), 1000 * (began - start)))
        start += time.perf_counter() - began

    def share_done() -> float:
        return steps / args.steps if args.steps else (time.perf_counter() - start) / args.seconds

    while (done := share_done()) < 1:
        if args.val_every and steps % args.val_every == 0:
            validate()
        factor = min((done + 1e-4) / args.warmup, 0.1 + 0.45 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * factor
        optimizer.zero_grad()
        loss_of(sample()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if 10 * share_done() >= progress.done + 1:
            progress.finish(f"step {steps}")
    progress.bar.close()
    validate()
    val_loss, seconds = val_points[-1][1], val_points[-1][2] / 1000
    crossing = None if args.target is None else find_crossing(dict(val_points=val_points), args.target)
    params = sum(p.numel() for p in model.parameters())
    print(f"plain GPT-2, {params / 1e6:.2f} M parameters, AdamW lr {args.lr:g}, seed {cfg.seed}: "
          f"val_loss {val_loss:.4f}, {steps} steps of {args.tokens_per_step} tokens in {seconds:.2f} s")
    if args.target is not None:
        print(f"loss {args.target:g} " + (f"after {crossing[1]:.2f} s" if crossing else "not reached"))
    if not math.isfinite(val_loss):
        raise gpt.RunError(f"the loss is {val_loss}: give less than --lr={args.lr:g}")
    return 0


def main() -> int:
    """Parse and train."""
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=at_least(1, float), default=80.0,
                        help="training time (default %(default)s)")
    parser.add_argument("--steps", type=at_least(1), help="train for this number of steps instead")
    parser.add_argument("--lr", type=at_least(0, float), default=3e-3,
                        help="peak learning rate (default %(default)s)")
    parser.add_argument("--context", type=at_least(1), default=512,
                        help="tokens of one sequence (default %(default)s)")
    parser.add_argument("--tokens_per_step", type=at_least(1), default=4096,
                        help="tokens of one step (default %(default)s)")
    parser.add_argument("--num_heads", type=at_least(1), default=4,
                        help="attention heads (default %(default)s)")
    parser.add_argument("--warmup", type=at_least(1e-6, float), default=0.03,
                        help="fraction of the budget (default %(default)s)")
    parser.add_argument("--beta2", type=at_least(0, float), default=0.95,
                        help="of AdamW (default %(default)s)")
    parser.add_argument("--val_every", type=at_least(0), default=0,
                        help="steps between validations, which are not timed. 0: only at the end")
    parser.add_argument("--target", type=at_least(0, float),
                        help="also print after how many seconds the validation loss is this low")
    parser.add_argument("--options", type=shlex.split, default="",
                        help="of train_gpt.py: width, depth, data, seed")
    args = parser.parse_args()
    return run_guarded(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
