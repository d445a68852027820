#!/usr/bin/env python3
"""Preset quick against the customary small GPT-2, by whole-process time, on little text of two kinds.

    python benchmarks/peer.py            # about twelve minutes on two cores; prints a table for RESULTS.md

The peer: 4 layers, width 128, 4 heads, context 64, 12 sequences a step, 2000 steps, AdamW (lr 1e-3, betas
0.9, 0.99), float32: gpt2_baseline.py at that size. The texts: Python's reference documentation as every
CPython brings it (pydoc_data), on which quick was chosen, and the docstrings of NumPy, on which nothing was.
The last tenth of each is for validation. Both are timed from the start of the process to its end.
"""

import argparse
import ast
import hashlib
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data")]
import text as text_tool  # noqa: E402

import train_gpt as gpt  # noqa: E402

MOST_BYTES = 1_115_394  # of tiny Shakespeare


def read_docstrings() -> str:
    """The docstrings of the installed NumPy, file by file."""
    root = Path(np.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        if "tests" not in path.parts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    found.append(ast.get_docstring(node) or "")
    return "\n\n".join(filter(None, found))


def write_text(text: str, folder: Path) -> list[str]:
    """Write a text as two shards, the training one in documents in random order; the options naming them."""
    text = text.encode()[:MOST_BYTES]
    cut = len(text) * 9 // 10
    for name, part in (("train_0", text[:cut]), ("val_0", text[cut:])):
        pieces = list(text_tool.split_text(part, 2047))
        if name == "train_0":
            pieces.sort(key=lambda piece: hashlib.sha256(piece).digest())
        stream = np.concatenate([[gpt.BYTE_BOS, *piece] for piece in pieces]).astype(np.uint16)
        text_tool.write_shard(folder / f"{name}.bin", stream, gpt.BYTE_VOCAB_SIZE, gpt.BYTE_BOS)
    return [f"--train_files={folder}/train_*.bin", f"--val_files={folder}/val_*.bin", "--val_tokens=40960"]


def time_process(command: list[str]) -> tuple[float, str]:
    """Seconds of a whole process, and what it printed."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def run_peer(data: list[str], seed: int) -> tuple[float, float]:
    """(whole-process seconds, validation loss) of the peer."""
    size = ["--num_layers=4", "--model_dim=128", "--num_heads=4", "--head_dim=32", "--dtype=float32"]
    options = shlex.join([*size, *data, f"--seed={seed}"])
    seconds, text = time_process(
        ["benchmarks/gpt2_baseline.py", "--steps=2000", "--lr=1e-3", "--beta2=0.99", "--warmup=0.05",
         "--context=64", "--tokens_per_step=768", f"--options={options}"])
    return seconds, float(text.split("val_loss ")[1].split(",")[0])


def run_quick(data: list[str], seed: int) -> tuple[float, float]:
    """The same of preset quick."""
    with tempfile.TemporaryDirectory() as logs:
        seconds, _ = time_process(["train_gpt.py", "--preset=quick", f"--seed={seed}", f"--logs_dir={logs}",
                                   *data])
        (path,) = Path(logs).glob("*.json")
        return seconds, json.loads(path.read_text())["final_val_loss"]


def main() -> None:
    """Run both over texts and seeds, interleaved, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default %(default)s)")
    args = parser.parse_args()
    texts = {"pydoc_data": "\n\n".join(topics[name] for name in sorted(topics)),
             f"NumPy {np.__version__}": read_docstrings()}
    rows = []
    for seed in tqdm(range(args.seeds), unit="seed"):
        for name, text in texts.items():
            with tempfile.TemporaryDirectory() as folder:
                data = write_text(text, Path(folder))
                peer, ours = run_peer(data, seed), run_quick(data, seed)
            rows.append((name, seed, *peer, *ours, ours[0] / peer[0]))
    print("| text | seed | peer: seconds, loss | | quick: seconds, loss | | of the peer's time |")
    print("|---|---|---|---|---|---|---|")
    for name, seed, peer_seconds, peer_loss, seconds, loss, ratio in sorted(rows):
        print(f"| {name} | {seed} | {peer_seconds:.1f} | {peer_loss:.4f} | {seconds:.1f} | {loss:.4f} "
              f"| {ratio:.2f} |")


if __name__ == "__main__":
    main()
