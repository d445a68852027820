#!/usr/bin/env python3
"""Compare preset quick with nanoGPT's recipe for CPUs by whole-process time, on your texts.

    ./run.sh benchmarks/compare_nanogpt.py notes.txt novel.txt  # prints a table for RESULTS.md
    ./run.sh benchmarks/compare_nanogpt.py --shakespeare  # preset shakespeare on tiny Shakespeare

That recipe: 4 layers, width 128, 4 heads, context 64, 12 sequences a step, 2000 steps, AdamW (lr 1e-3, betas
0.9, 0.99), float32: gpt2_baseline.py at this size. quick runs in float32, and in bfloat16 if it is fast. Of
each text the first 1.1 MB are used, and the last tenth of that is for validation. Both models are timed from
the start of the process to its end. A run of the recipe takes one to five minutes.

--shakespeare compares the training time to a validation loss of 1.88. nanoGPT's README has this loss at the
end of the recipe. data/tiny_shakespeare.py makes the shards. nanoGPT's recipe draws from the whole training
part, and ours reads its last 70 % once. Both run in both dtypes and validate on the same tokens, nanoGPT's
in blocks of its context. Only the last column includes start-up and validations. If nanoGPT's recipe misses
the loss, the ratio is to its whole training time, and marked with <.
"""

import hashlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import (
    ROOT,
    Parser,
    RecordError,
    at_least,
    keep_saying,
    list_visible,
    require_packages,
    run_guarded,
)

with require_packages():
    import numpy as np
    import torch
    from tqdm import tqdm

    import train_gpt as gpt
    from data.text import BYTE_BOS, BYTE_VOCAB_SIZE, split_text, write_shard
    from data.tiny_shakespeare import OUT as SHAKESPEARE
    from tools.results import find_crossing

MOST_BYTES = 1_115_394  # of tiny Shakespeare
LEAST_BYTES = 100_000  # validation reads 8,192 of the last tenth
SHAKESPEARE_PRESET, TARGET = "shakespeare", 1.88


def write_text(text: bytes, folder: Path) -> list[str]:
    """Write a text as two shards, with training documents in random order. Returns the options for them."""
    text = text[:MOST_BYTES]
    cut = len(text) * 9 // 10
    for name, part in (("train_0", text[:cut]), ("val_0", text[cut:])):
        pieces = list(split_text(part, 2047))
        if name == "train_0":
            pieces.sort(key=lambda piece: hashlib.sha256(piece).digest())
        stream = np.concatenate([[BYTE_BOS, *piece] for piece in pieces]).astype(np.uint16)
        write_shard(folder / f"{name}.bin", stream, BYTE_VOCAB_SIZE, BYTE_BOS)
    val_tokens = min(40_960, (len(stream) - 1) // 8192 * 8192)
    return [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin",
            f"--val_tokens={val_tokens}"]


def time_process(command: list[str]) -> tuple[float, str]:
    """(seconds of a whole process, its output)."""
    start = time.perf_counter()
    with keep_saying(f"{command[0]} goes on"):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def run_nanogpt(data: list[str], seed: int, dtype: str, *more: str) -> tuple[float, str]:
    """(whole-process seconds, output) of nanoGPT's recipe. more: options of gpt2_baseline.py."""
    size = ["--num_layers=4", "--model_dim=128", "--num_heads=4", "--head_dim=32", f"--dtype={dtype}"]
    options = shlex.join([*size, *data, f"--seed={seed}"])
    return time_process(
        ["benchmarks/gpt2_baseline.py", "--steps=2000", "--lr=1e-3", "--beta2=0.99", "--warmup=0.05",
         "--context=64", "--tokens_per_step=768", *more, f"--options={options}"])


def find_number(pattern: str, text: str) -> float | None:
    """The number behind a pattern, or None."""
    found = re.search(rf"{pattern} ([\d.]+)", text)
    return float(found[1]) if found else None


def run_preset(preset: str, data: list[str], seed: int, dtype: str) -> tuple[float, dict]:
    """(whole-process seconds, result) of a preset."""
    with tempfile.TemporaryDirectory() as out:
        seconds, _ = time_process(["train_gpt.py", f"--preset={preset}", f"--seed={seed}", f"--out={out}",
                                   f"--dtype={dtype}", *data])
        (path,) = Path(out).glob("logs/*.json")
        return seconds, json.loads(path.read_text())


def list_dtypes() -> list[str]:
    """The dtypes to compare: float32, and bfloat16 if it is fast."""
    best = gpt.choose_dtype(gpt.make_config({"device": "cpu"}), torch.device("cpu"))[0]
    return ["float32", *(["bfloat16"] if best == torch.bfloat16 else [])]


def compare(paths: list[Path], seeds: int) -> str:
    """Run both over texts and seeds, interleaved. Returns the table."""
    for path in paths:
        if not path.is_file():
            raise RecordError(f"{path} is no file: give text files")
        if path.stat().st_size < LEAST_BYTES:
            raise RecordError(f"{path} has less than {LEAST_BYTES:,} bytes: give a longer text")
    texts = [path.read_bytes() for path in paths]
    dtypes, rows = list_dtypes(), []
    for seed, index in tqdm([(seed, index) for seed in range(seeds) for index in range(len(texts))],
                            unit="text", disable=None):
        with tempfile.TemporaryDirectory() as folder:
            data = write_text(texts[index], Path(folder))
            seconds, output = run_nanogpt(data, seed, "float32")
            ours = [run_preset("quick", data, seed, dtype) for dtype in dtypes]
            rows.append((index, seed, seconds, find_number("val_loss", output),
                         [(seconds, result["final_val_loss"]) for seconds, result in ours]))
    heads = "".join(f" quick in {dtype}: s, loss | | ratio |" for dtype in dtypes)
    lines = [f"| text | seed | nanoGPT: s, loss | |{heads}",
             f"|---|---|---|---|{'---|---|---|' * len(dtypes)}"]
    for index, seed, their_seconds, their_loss, ours in sorted(rows):
        cells = "".join(f" {seconds:.1f} | {loss:.4f} | {seconds / their_seconds:.2f} |"
                        for seconds, loss in ours)
        lines.append(f"| {paths[index].name} | {seed} | {their_seconds:.1f} | {their_loss:.4f} |{cells}")
    return "\n".join(lines)


class Timing(NamedTuple):
    """A run on tiny Shakespeare. Times in seconds. to_target: None if it is not reached."""

    to_target: float | None
    loss: float
    training: float
    process: float


def time_nanogpt(data: list[str], seed: int, dtype: str) -> Timing:
    """Time nanoGPT's recipe, validated every 100 steps on as many tokens as ours."""
    cfg = gpt.make_config({"preset": SHAKESPEARE_PRESET})
    val = [f"--val_tokens={cfg.val_tokens}", f"--val_seq_len={cfg.val_seq_len}"]
    process, output = run_nanogpt([*data, *val], seed, dtype, "--val_every=100", f"--target={TARGET}")
    return Timing(find_number(f"loss {TARGET} after", output), find_number("val_loss", output),
                  find_number("tokens in", output), process)


def time_ours(data: list[str], seed: int, dtype: str) -> Timing:
    """Time the preset, validated every 20 steps."""
    process, result = run_preset(SHAKESPEARE_PRESET, [*data, "--val_loss_every=20"], seed, dtype)
    crossing = find_crossing(result, TARGET)
    return Timing(crossing[1] if crossing else None, result["final_val_loss"],
                  result["train_time_ms"] / 1000, process)


def compare_shakespeare(folder: Path, seeds: int) -> str:
    """Run both on tiny Shakespeare over seeds and dtypes, interleaved. Returns the table."""
    if not all(list_visible(folder, f"{split}_*.bin") for split in ("train", "val")):
        out = "" if folder == SHAKESPEARE else f" --out={shlex.quote(str(folder))}"
        raise RecordError(f"{folder} has no shards: run ./run.sh data/tiny_shakespeare.py{out}")
    data = [f"--{split}_files={folder.absolute()}" for split in ("train", "val")]
    late = [f"--train_files={folder.absolute()}/train_000001.bin", data[1]]  # as the preset: the last 70 %
    lines = [f"| seed | recipe | dtype | s to {TARGET} | ratio | final loss | s in all | process, s |",
             "|---|---|---|---|---|---|---|---|"]
    dtypes = list_dtypes()
    for seed, dtype in tqdm([(seed, dtype) for seed in range(seeds) for dtype in dtypes], unit="pair",
                            disable=None):
        theirs, ours = time_nanogpt(data, seed, dtype), time_ours(late, seed, dtype)
        for recipe, run in (("nanoGPT", theirs), (SHAKESPEARE_PRESET, ours)):
            reached = f"{run.to_target:.1f}" if run.to_target else "not reached"
            ratio = ""
            if run.to_target:
                ratio = f"{run.to_target / (theirs.to_target or theirs.training):.2f}"
                ratio = ratio if theirs.to_target else f"< {ratio}"
            lines.append(f"| {seed} | {recipe} | {dtype} | {reached} | {ratio} | {run.loss:.4f} | "
                         f"{run.training:.1f} | {run.process:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Parse, compare and print."""
    parser = Parser(__doc__)
    parser.add_argument("--seeds", type=at_least(1), default=3,
                        help="runs of each (default %(default)s)")
    parser.add_argument("texts", type=Path, nargs="*", help=f"text files of at least {LEAST_BYTES:,} bytes")
    parser.add_argument("--shakespeare", type=Path, nargs="?", const=SHAKESPEARE, metavar="FOLDER",
                        help="compare on these shards instead (default folder %(const)s)")
    args = parser.parse_args()

    def body() -> int:
        if args.shakespeare:
            print(compare_shakespeare(args.shakespeare, args.seeds))
            return 0
        if not args.texts:
            raise RecordError("there is no text: give text files, or --shakespeare")
        print(compare(args.texts, args.seeds))
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
