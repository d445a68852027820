#!/usr/bin/env python3
"""Time and error of each kernel at the sizes of the record, and its share of the limit.

    ./run.sh benchmarks/kernels.py --variants --json=kernels.json         # on a GPU: a table for RESULTS.md
    ./run.sh benchmarks/kernels.py --only=relu2,head --num_tokens=49152   # some kernels, one size
    ./run.sh benchmarks/kernels.py --variants --card=h100                 # without a GPU: registers, spills

Takes the options of train_gpt.py, by default of `record_92`. --variants adds candidates that train_gpt.py
does not use. The limit is the longer of two times: FLOPs at the rate of a large matmul, and bytes (each
tensor once) at the rate of a large copy. Both rates are measured first. The cache is flushed before each
call.

Errors are relative to float64 with equal inputs, for the first tokens. `rounding` is the error of the exact
result in the dtype of the output. `sums` is the error of an FP8 kernel with float32 output.

Without a GPU nothing is timed: the kernels are compiled for --card. With TRITON_INTERPRET=1 Triton's
interpreter computes errors on the CPU, with float32 in place of bfloat16. It halves FP8 numbers that round
up to a power of two.
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import ROOT, Parser, at_least, note, output_file, require_packages, run_guarded

card_parser = ArgumentParser(add_help=False, allow_abbrev=False)
card_parser.add_argument("--card", default="")
CARD = card_parser.parse_known_args()[0].card
if __name__ == "__main__" and CARD:  # before torch is imported
    sys.path.append(str(ROOT / "tests/cuda_without_gpu"))
    import fake_cuda

    obstacle = "" if CARD in fake_cuda.CARDS else f"choose one of {', '.join(fake_cuda.CARDS)}"
    if obstacle := obstacle or fake_cuda.find_obstacle():
        print(f"kernels.py: error: --card={CARD}: {obstacle}", file=sys.stderr)
        sys.exit(2)
    fake_cuda.pretend(fake_cuda.CARDS[CARD])

with require_packages():
    import numpy as np
    import torch
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import triton
    import triton.language as tl
    from torch import Tensor

    import train_gpt as gpt
    from benchmarks import common
    from train_gpt import E4M3, E5M2

KERNELS = ("qkv_kernel", "cross_entropy_kernel", "transpose_kernel", "relu2_matmul_kernel",
           "row_sums_kernel")
CHECKED = 1024  # tokens whose results are compared with float64
CALLS, WAIT_CYCLES = 20, 4_000_000  # timed calls. Before each the GPU waits 2 ms, so the host is ahead
MICRO_BATCHES = 8  # whose gradients of n-grams are summed
DOCUMENTS = math.log(403), 1.04  # mean and sigma of the logarithm of FineWeb's document lengths
NARROW = dict(BLOCK_N=128, num_stages=3)  # of relu2_matmul_kernel: two programs fit a multiprocessor
SUMS = (256, 8), (64, 32)  # channels and reads at once of row_sums_kernel
TILES = [  # of FlexAttention. PyTorch's have 128, 128 and 4 warps for heads of 64, and 64, 128, 128, 64
    dict(zip(("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_warps", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2",
              "bwd_BLOCK_N2", "bwd_num_warps", "bwd_num_stages"), sizes))
    for sizes in ((128, 128, 8, 32, 128, 128, 32, 8, 3), (128, 64, 8, 64, 64, 64, 64, 8, 2),
                  (128, 64, 4, 64, 64, 64, 64, 4, 2))]


@triton.jit
def relu2_backward_kernel(product_ptr, hidden_ptr, out_ptr, out_t_ptr, scales_ptr, amax_ptr, ROWS, COLUMNS,
                          LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One tile of product * 2 sqrt(hidden), its transpose and amax, quantized as by relu2_matmul_kernel."""
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = rows[:, None] * COLUMNS + columns[None, :]
    total = tl.load(product_ptr + here).to(tl.float32) * (2 * tl.load(scales_ptr))
    total *= tl.sqrt(tl.load(hidden_ptr + here).to(tl.float32))
    tl.atomic_max(amax_ptr, tl.max(tl.where(total == total, tl.abs(total), float("inf"))))
    total = tl.maximum(total * tl.load(scales_ptr + 1), -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    total = tl.minimum(total, LIMIT, propagate_nan=tl.PropagateNan.ALL).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + here, total)
    tl.store(out_t_ptr + columns.to(tl.int64)[:, None] * ROWS + rows[None, :], total.T)


class Launch(NamedTuple):
    """A launch of a Triton kernel. A call repeats it."""

    kernel: "Recorder"
    grid: tuple
    args: tuple
    options: dict

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)


class Recorder:
    """A Triton kernel that keeps its last launch. If `compiled` is a list, launches only compile into it."""

    compiled: list | None = None

    def __init__(self, kernel):
        self.kernel, self.last = kernel, None

    def __getitem__(self, grid: tuple) -> Callable:
        def launch(*args, **options) -> None:
            self.last = Launch(self, grid, args, options)
            if self.compiled is None:
                return self.kernel[grid](*args, **options)
            args = [x.dtype if isinstance(x, Tensor) else x for x in args]
            made = self.kernel.warmup(*args, grid=grid, **options)
            self.compiled.append((self.kernel.fn.__name__, made))

        return launch


class Case(NamedTuple):
    """A function at one size. flops, num_bytes and the dtype of its matmuls give its limit."""

    name: str
    shape: str
    run: Callable
    find_errors: Callable[[], dict[str, float]]  # after run()
    num_bytes: float
    flops: float = 0.0
    dtype: torch.dtype = torch.bfloat16


def compare(exact: Tensor, scale: Tensor | float, *ours: Tensor) -> dict[str, float]:
    """Relative errors: of ours * scale, the largest, and of the exact values in the dtype of ours."""
    rounded = (exact / scale).float().to(ours[0].dtype)
    errors = [float((x.float().double() * scale - exact).norm() / exact.norm()) for x in (rounded, *ours)]
    return dict(error=max(errors[1:]), rounding=errors[0])


class Sizes:
    """A config at a number of tokens, with the windows of the stage of this length, else of the third."""

    def __init__(self, cfg: gpt.Config, num_tokens: int, device: torch.device, has_variants: bool):
        self.cfg, self.num_tokens, self.device, self.has_variants = cfg, num_tokens, device, has_variants
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.num_checked = min(num_tokens, CHECKED)
        schedule = gpt.Schedule(cfg)
        starts = [start for _, start, _ in schedule.stage_ranges()]
        fitting = [at for at, stage in zip(starts, cfg.full_stages) if stage.seq_len == num_tokens]
        self.state = schedule.at((fitting or starts[:3][-1:])[0])
        self.step_inputs = gpt.make_step_inputs(self.state, num_tokens, num_tokens, cfg, device)
        lengths = np.random.default_rng(0).lognormal(*DOCUMENTS, num_tokens)
        lengths = lengths.clip(1, cfg.max_attention_len or cfg.max_doc_len).astype(int)
        self.doc_ids = np.arange(num_tokens, dtype=np.int32).repeat(lengths)[:num_tokens]
        specs = [spec for spec in cfg.layers if spec.attention != "none"]
        self.kinds = list({gpt.Attention(cfg, spec).heads: spec for spec in specs}.items())

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)


def list_relu2(s: Sizes) -> Iterator[Case]:
    """relu2_matmul_kernel forward and backward, in bfloat16 and FP8, as FusedMLP calls it."""
    T, D, F = s.num_tokens, s.cfg.model_dim, s.cfg.mlp_hidden
    x, grad, *weights = s.randn(T, D), s.randn(T, D), s.randn(D, F) * D**-0.5, s.randn(D, F) * D**-0.5
    given = (gpt.rms_norm(x), 2.0 ** math.ceil(math.log2(D**0.5 / 448))), (grad, 2.0**-3)
    for is_fp8 in (False, True):
        hidden = out_scale = None
        for is_backward, ((x, scale), w) in enumerate(zip(given, weights)):
            dtype = (E4M3, E5M2)[is_backward] if is_fp8 else None
            x, w = gpt.quantize(x, dtype, scale), gpt.quantize(w, E4M3 if is_fp8 else None)
            if is_fp8:
                *_, amax = gpt.launch_relu2_matmul(x, w, torch.ones_like(w.scale), s.dtype, hidden)
                out_scale = amax * gpt.DelayedScales.FACTORS[is_backward]
            out, out_t, _ = gpt.launch_relu2_matmul(x, w, out_scale, s.dtype, hidden)
            yield from list_forms(s, x, w, hidden, out, out_t, gpt.relu2_matmul_kernel.last)
            hidden = out


def list_forms(s: Sizes, x, w, hidden, out, out_t, launch: Launch) -> Iterator[Case]:
    """A launch of relu2_matmul_kernel, and with variants other forms of FP8 backward. All are Scaled."""
    (T, D), F, n, is_fp8 = x.values.shape, w.values.size(1), s.num_checked, x.scale is not None
    name = f"ReLU^2 {'backward' if hidden else 'forward'}, {'FP8' if is_fp8 else 'bfloat16'}"
    num_bytes = x.values.element_size() * (T * D + D * F + T * F * (1 + is_fp8 + bool(hidden)))

    def find_errors(launch: Launch | None) -> dict[str, float]:
        def widen(y: gpt.Scaled, rows: int) -> Tensor:
            return y.values[:rows].float().double() * (y.scale if is_fp8 else 1)

        exact = widen(x, n) @ widen(w, D)
        exact = exact * 2 * widen(hidden, n).sqrt() if hidden else exact.relu().square()
        found = compare(exact, out.scale if is_fp8 else 1, out.values[:n], out_t.values[:, :n].T)
        if is_fp8 and launch:  # once more, with float32 output
            args, wide = list(launch.args), torch.empty(T, F, device=s.device)
            args[3:6] = wide, wide.new_empty(F, T), torch.stack((args[5][0], torch.ones_like(args[5][1])))
            launch._replace(args=args, options=launch.options | dict(LIMIT=torch.finfo(torch.float32).max))()
            found["sums"] = compare(exact, 1, wide[:n])["error"]
        return found

    def make_case(variant: str, run: Callable, launch: Launch | None) -> Case:
        return Case(name + variant, f"{T} x {D} x {F}", run, lambda: find_errors(launch), num_bytes,
                    2.0 * T * D * F, x.values.dtype)

    yield make_case("", launch, launch)
    if not (is_fp8 and s.has_variants):
        return
    variant = launch._replace(grid=(F // 128, T // 128), options=launch.options | NARROW)
    yield make_case(", variant: 128 columns", variant, variant)
    if not hidden:
        return
    w_t, kernel = gpt.transpose(w), Recorder(relu2_backward_kernel)
    scales, limit = torch.stack((hidden.scale.sqrt(), 1 / out.scale)), launch.options["LIMIT"]

    def run_two(is_fast: bool) -> None:
        product = gpt.matmul(x, w_t, s.dtype, is_fast)
        kernel[F // 64, T // 128](product, hidden.values, out.values, out_t.values, scales, launch.args[6],
                                  T, F, LIMIT=limit, BLOCK_M=128, BLOCK_N=64, num_warps=8)

    yield make_case(", variant: cuBLAS, pointwise kernel", lambda: run_two(False), None)
    yield make_case(", variant: fast cuBLAS, pointwise kernel", lambda: run_two(True), None)


def list_qkv(s: Sizes, heads: gpt.Heads, spec: gpt.LayerSpec) -> Iterator[Case]:
    """qkv_kernel forward, and backward with FP8."""
    (H, K, L, P, offset, _), T, n = heads, s.num_tokens, s.num_checked
    rope = s.step_inputs.ropes[spec.attention, spec.paired]
    packed, grads = s.randn(T, 2 * H * K + H * L), [s.randn(T, H, K), s.randn(T, H, K), s.randn(T, H * L)]
    q, k, grad = torch.empty_like(grads[0]), torch.empty_like(grads[0]), torch.empty_like(packed, dtype=E4M3)
    grad_t, tables = torch.empty_like(grad.T.contiguous()), (*rope[:3], s.step_inputs.is_sequence_start)

    def run(*outputs: Tensor) -> None:
        gpt.launch_qkv(packed, tables, rope.num_rotating, heads, *outputs)

    def find_errors(is_backward: bool) -> dict[str, float]:
        x, eye = packed[:n].double().requires_grad_(), torch.eye(packed.size(1), device=s.device).double()
        first = rope._replace(cos=rope.cos[:n], sin=rope.sin[:n], takes_previous=rope.takes_previous[:n])
        exact = gpt.make_qkv(x, eye, first, heads, None, gpt.Operations())
        if not is_backward:
            return compare(torch.stack(exact[:2]).detach(), 1, torch.stack((q, k))[:, :n])
        (exact,) = torch.autograd.grad(exact, x, [y[:n].double() for y in grads])
        n_exact = n - 1  # an offset reads the next token
        return compare(exact[:n_exact], gpt.QKV_LIMIT / 448, grad[:n_exact], grad_t[:, :n_exact].T)

    shape = f"{T} x {packed.size(1)}, {H} x {K}{', paired' * (P > 1)}{', offset' * offset}"
    read, backward = 2 * q.nbytes + T * P * rope.num_rotating * 8, (*grads, grad, grad_t)
    yield Case("QKV forward", shape, lambda: run(q, k), lambda: find_errors(False), read + 2 * q.nbytes)
    yield Case("QKV backward, FP8", shape, lambda: run(*backward), lambda: find_errors(True),
               read + sum(y.nbytes for y in backward))


def list_head(s: Sizes) -> Iterator[Case]:
    """cross_entropy_kernel with FP8 logits and gradients, and transpose_kernel."""
    T, cap, scale = min(s.num_tokens, gpt.LOGITS_CHUNK), gpt.Softcap(*s.cfg.softcap), 1 / 448
    for stage in {stage.num_classes: stage for stage in s.cfg.full_stages}.values():
        V, weights = stage.num_classes or s.cfg.padded_vocab_size, [x for x, _ in stage.loss_weights]
        weights = torch.tensor(weights + [0.1] * bool(stage.prefix_weight), device=s.device)
        targets = torch.randint(V, (T, len(weights)), device=s.device)
        targets[::3, 1:] = -1
        logits = gpt.quantize(8 * s.randn(T, V), E4M3, 1.0).values
        yield make_cross_entropy(logits, targets, weights, cap, scale)
        yield make_transpose(logits)
    yield make_transpose(gpt.quantize(s.randn(s.num_tokens, s.cfg.model_dim), E4M3, 1.0).values)


def make_cross_entropy(logits, targets, weights, cap, scale: float) -> Case:
    (T, V), n = logits.shape, CHECKED

    def run() -> Tensor:
        return gpt.softcapped_cross_entropy(logits, targets, weights, cap, E5M2, scale, True)[1]

    def find_errors() -> dict[str, float]:
        given = logits[:n].float().double(), targets[:n], weights.double(), cap, torch.float64
        return compare(gpt.softcapped_cross_entropy(*given)[1], scale, run()[:n])

    return Case("cross-entropy", f"{T} x {V}, {len(weights)} targets", run, find_errors, 2 * T * V)


def make_transpose(x: Tensor) -> Case:
    def run() -> Tensor:
        return gpt.transpose(gpt.Scaled(x, x), True).values

    def find_errors() -> dict[str, float]:
        return compare(x[:CHECKED].T.float().double(), 1, run()[:, :CHECKED])

    return Case("transpose", f"{x.size(0)} x {x.size(1)}", run, find_errors, 2 * x.nbytes)


def list_attention(s: Sizes, heads: gpt.Heads, spec: gpt.LayerSpec, tiles: dict | None) -> Iterator[Case]:
    """FlexAttention, with documents as long as FineWeb's. In paired layers a token has two positions."""
    (H, K, L, P, *_), doc_ids = heads, s.doc_ids.repeat(heads.num_positions)
    window = s.state.windows[int(spec.attention == "short")]
    starts, at = np.searchsorted(doc_ids, doc_ids), np.arange(len(doc_ids))
    num_pairs = H // P * int((1 + np.minimum(window, at - starts)).sum())
    ends = np.append(np.unique(starts)[1:], len(at))
    end = int(ends[ends <= max(ends[0], 2 * CHECKED)][-1])  # of a document: no later token sees these
    ids, size = torch.tensor(doc_ids, device=s.device), torch.tensor(window, device=s.device).int()
    leaves = [s.randn(1, len(at), H // P, width) for width in (K, K, L)]
    leaves[0] *= 0.1
    mask, grad = gpt.build_block_mask(ids, size), torch.randn_like(leaves[2])

    def run() -> Tensor:
        given = (x.transpose(1, 2) for x in leaves)
        return gpt.compile_flex_attention()(
            *given, block_mask=mask, scale=1.0, kernel_options=tiles).transpose(1, 2)

    def run_backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, grad, retain_graph=True)

    def find_errors(is_backward: bool) -> dict[str, float]:
        wide = [x[0, :end].detach().double().requires_grad_() for x in leaves]
        exact, ours = (gpt.attention(*wide, gpt.make_mask(ids[:end], size)),), (y,)
        if is_backward:
            exact, ours = torch.autograd.grad(exact, wide, grad[0, :end].double()), run_backward()
        ours = torch.cat([x[0, :end].detach().flatten() for x in ours])
        return compare(torch.cat([x.detach().flatten() for x in exact]), 1, ours)

    for x in leaves:
        x.requires_grad_()
    y, shape = run(), f"{len(at)} x {H // P} x {K}/{L}, window {window}"
    variant = f", variant: {tuple(tiles.values())}" if tiles else ""
    num_bytes = sum(x.nbytes for x in (*leaves, y))
    yield Case(f"FlexAttention forward{variant}", shape, run, lambda: find_errors(False), num_bytes,
               num_pairs * 2 * (K + L))
    yield Case(f"FlexAttention backward{variant}", shape, run_backward, lambda: find_errors(True),
               2 * num_bytes, num_pairs * 2 * (3 * K + 2 * L))


def list_sums(s: Sizes) -> Iterator[Case]:
    """Gradients of rows: of leaves of tokens and n-grams, and of the n-grams of all micro-batches. Tokens
    follow Zipf's law, and are independent. So n-grams repeat less often than in text."""
    chance = 1 / (np.arange(s.cfg.padded_vocab_size) + 2.7)
    shape = MICRO_BATCHES, s.num_tokens
    tokens = np.random.default_rng(0).choice(len(chance), shape, p=chance / chance.sum()).astype(np.int32)
    ngrams = [np.concatenate(gpt.hash_ngrams(x, np.arange(len(x)) == 0, s.cfg.ngram_rows, s.cfg.ngram_order))
              for x in tokens]
    yield from make_sums(s, "tokens", tokens[0])
    yield from make_sums(s, "n-grams", ngrams[0])
    yield from make_sums(s, "n-grams of an update", np.concatenate([np.unique(x) for x in ngrams]))


def make_sums(s: Sizes, name: str, numbers: np.ndarray) -> Iterator[Case]:
    """row_sums_kernel, and with variants other tiles and PyTorch's sort and kernels."""
    rows, places, order = (torch.tensor(x, device=s.device) for x in gpt.find_distinct(numbers))
    grad = s.randn(len(places), s.cfg.model_dim)
    given = grad, places, order, len(rows)
    gpt.launch_row_sums(*given)
    launch = gpt.row_sums_kernel.last

    def make_case(variant: str, run: Callable[[], Tensor]) -> Case:
        def find_errors() -> dict[str, float]:
            exact = torch.zeros(len(rows), grad.size(1), device=s.device, dtype=torch.float64)
            return compare(exact.index_add_(0, places, grad.double()), 1, run())

        return Case(f"sums of {name}{variant}", f"{len(grad)} x {grad.size(1)}, {len(rows)} distinct", run,
                    find_errors, grad.nbytes * (1 + len(rows) / len(grad)) + order.nbytes)

    yield make_case("", lambda: gpt.launch_row_sums(*given))
    if s.has_variants:
        yield make_case(", variant: PyTorch", lambda: gpt.sum_rows(*given))
        for block, reads in SUMS:
            variant = launch._replace(grid=(len(rows), grad.size(1) // block),
                                      args=(*launch.args[:5], block, reads))
            yield make_case(f", variant: {block} channels, {reads} reads",
                            lambda variant=variant: variant() or variant.args[3])


LISTS = dict(
    relu2=lambda s: [list_relu2(s)],
    qkv=lambda s: (list_qkv(s, *kind) for kind in s.kinds),
    head=lambda s: [list_head(s)],
    attention=lambda s: (list_attention(s, *kind, tiles) for kind in s.kinds * (s.device.type == "cuda")
                         for tiles in [None, *TILES][: None if s.has_variants else 1]),
    sums=lambda s: [list_sums(s)])


def list_cases(args: Namespace, cfg: gpt.Config, device: torch.device) -> Iterator[Case]:
    """Each distinct case, one after the other, so that memory is freed."""
    seen = set()
    for num_tokens in args.num_tokens:
        sizes = Sizes(cfg, num_tokens, device, args.variants)
        for cases in (cases for name in args.only for cases in LISTS[name](sizes)):
            with report_failure(f"{cases.__name__}, {num_tokens} tokens"):
                for case in cases:
                    if case[:2] not in seen:
                        seen.add(case[:2])
                        yield case


@contextmanager
def report_failure(name: str) -> Iterator[None]:
    """Continue after an error. A kernel that does not compile must not end a measurement."""
    try:
        yield
    except Exception as error:
        print(f"{name} failed: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)


def time_us(run: Callable) -> float:
    """Median microseconds on the GPU."""
    cache, times = torch.empty(2**28, dtype=torch.uint8, device="cuda"), []
    run()
    for _ in range(CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(WAIT_CYCLES)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)


def measure_rates(size: int = 8192) -> dict[str, float]:
    """FLOP/s of matmuls in bfloat16 and FP8, and bytes/s of a copy."""
    a, source = torch.randn(size, size, device="cuda").bfloat16(), torch.ones(2**28, device="cuda")
    target, rates = torch.empty_like(source), dict(bfloat16=2e6 * size**3 / time_us(lambda: a @ a))
    if torch.cuda.get_device_capability() >= (8, 9):
        a8 = gpt.quantize(a, E4M3)
        rates["fp8"] = 2e6 * size**3 / time_us(lambda: gpt.matmul(a8, a8, torch.bfloat16, fast=True))
    return rates | dict(copy=2e6 * source.nbytes / time_us(lambda: target.copy_(source)))


def rate(case: Case, us: float, rates: dict[str, float]) -> dict[str, float | str]:
    """A time, its rate, the limit, and the limit's share of the time."""
    compute_us = 1e6 * case.flops / rates["fp8" if case.dtype in (E4M3, E5M2) else "bfloat16"]
    memory_us = 1e6 * case.num_bytes / rates["copy"]
    amount, unit = (case.flops, "TFLOP/s") if compute_us > memory_us else (case.num_bytes, "TB/s")
    limit_us = max(compute_us, memory_us)
    return dict(us=us, rate=amount / us / 1e6, unit=unit, limit_us=limit_us, share=limit_us / us)


def measure(args: Namespace, cfg: gpt.Config) -> dict:
    """Errors of all cases, and times on a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, rates = [], measure_rates() if device.type == "cuda" else {}
    for case in list_cases(args, cfg, device):
        with report_failure(f"{case.name}, {case.shape}"):
            case.run()
            rows.append(dict(name=case.name, shape=case.shape, **case.find_errors()))
            rows[-1] |= rate(case, time_us(case.run), rates) if rates else {}
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)  # in case the command is ended
    return dict(common.describe_run(gpt.Runtime(device)), triton=triton.__version__, rates=rates,
                kernels=rows)


def describe_code(name: str, compiled) -> dict:
    """Registers, bytes of stack and shared memory of a kernel, and instructions of matrix units."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (subprocess.check_output([tool, option, file.name], text=True)
                       for option in ("-res-usage", "-sass"))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return dict(kernel=name, warps=compiled.metadata.num_warps, registers=registers, stack=stack,
                shared=compiled.metadata.shared, hgmma=code.count("HGMMA."), qgmma=code.count("QGMMA."))


def compile_all(args: Namespace, cfg: gpt.Config) -> dict:
    """Compile the cases for a simulated GPU."""
    import cuda_compile

    warnings.simplefilter("ignore")
    card, rows, Recorder.compiled = fake_cuda.CARDS[CARD], [], []
    observer = cuda_compile.Observer(card)
    torch.compile = lambda function, **_: cuda_compile.real_compile(
        function, dynamic=False, backend=observer.backend("FlexAttention"))
    cuda_compile.describe_kernel = lambda tuner, made, _card: dict(
        describe_code(tuner.inductor_meta.get("kernel_name", ""), made.kernel),
        name="", fits=made.kernel.metadata.shared <= card.shared_memory)
    with cuda_compile.ObservedMode(observer), cuda_compile.values_are(True):
        for case in list_cases(args, cfg, cuda_compile.DEVICE):
            Recorder.compiled = []
            print(f"{case.name}, {case.shape}", file=sys.stderr, flush=True)
            case.run()
            found = [describe_code(*made) for made in Recorder.compiled]
            found += [row for row in observer.kernels if row["kernel"].startswith("triton_tem")]
            rows += [row | dict(name=case.name, shape=case.shape) for row in found]
            observer.kernels.clear()
    return dict(hardware=card.name, torch=torch.__version__, triton=triton.__version__, kernels=rows)


def format_table(result: dict) -> str:
    """Markdown for RESULTS.md."""
    show = dict(us="{:.1f}", rate="{:.3g}", unit="{}", limit_us="{:.1f}", share="{:.0%}", error="{:.1e}",
                rounding="{:.1e}", sums="{:.1e}") if "rates" in result else dict.fromkeys(
        ("kernel", "warps", "registers", "stack", "shared", "hgmma", "qgmma"), "{}")
    rates = [f"{name} {value / 1e12:.4g}e12/s" for name, value in result.get("rates", {}).items()]
    lines = [f"{result['hardware']}, PyTorch {result['torch']}, Triton {result['triton']}. Rates: "
             f"{', '.join(rates) or 'none, nothing was timed'}", "",
             f"| case | size | {' | '.join(show)} |", "|---|---|" + "---:|" * len(show)]
    for row in result["kernels"]:
        cells = [form.format(row[name]) if name in row else "" for name, form in show.items()]
        lines.append(f"| {row['name']} | {row['shape']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def list_tokens(text: str) -> list[int]:
    numbers = [at_least(128)(number) for number in text.split(",")]
    if wrong := [number for number in numbers if number % 128]:
        raise ArgumentTypeError(f"{wrong[0]} is not a multiple of 128")
    return numbers


def list_names(text: str) -> list[str]:
    if wrong := [name for name in text.split(",") if name not in LISTS]:
        raise ArgumentTypeError(f"{wrong[0] or 'nothing'} is not one of {', '.join(LISTS)}")
    return text.split(",")


def main() -> int:
    """Parse, measure or compile, and print."""
    parser = Parser(__doc__)
    parser.add_argument("--num_tokens", default=[49_152, 32_768, 16_384], metavar="N,N",
                        type=list_tokens, help="multiples of 128 (default: 49152,32768,16384)")
    parser.add_argument("--only", type=list_names, default=[*LISTS], metavar="NAME,NAME",
                        help=f"of {', '.join(LISTS)}")
    parser.add_argument("--variants", action="store_true", help="also candidates")
    parser.add_argument("--card", help="compile for this GPU, without having it (default: h100)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything as JSON")
    args, options = common.parse_known(parser)
    if not (CARD or torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
        note("no GPU: compiling for an H100 (--card). Nothing is timed")
        return subprocess.run([sys.executable, __file__, *sys.argv[1:], "--card=h100"]).returncode

    def body() -> None:
        dynamo_config.recompile_limit = 100  # a mask is a constant of its graph
        functorch_config.donated_buffer = False  # a backward runs several times
        cfg = gpt.make_config(gpt.parse_argv(["--preset=record_92", *options]))
        for name in KERNELS:
            setattr(gpt, name, Recorder(getattr(gpt, name)))
        torch.manual_seed(0)
        result = (compile_all if CARD else measure)(args, cfg)
        common.write_report(format_table(result), result, args.json)

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
