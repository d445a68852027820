#!/usr/bin/env python3
"""The laptop recipe against the customary small GPT-2, by whole-process time, on text neither was tuned on.

    python benchmarks/peer.py            # about six minutes on two cores; prints a table for RESULTS.md

The peer: 4 layers, width 128, 4 heads, context 64, 12 sequences a step, 2000 steps, AdamW (lr 1e-3, betas
0.9, 0.99), float32: gpt2_baseline.py at that size. The text: Python's reference documentation as every
CPython brings it (pydoc_data), 0.5 MB, its last tenth for validation. Both are timed from start to end.
"""

import argparse
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
sys.path.insert(0, str(ROOT))
import train_gpt as gpt  # noqa: E402


def write_text(folder: Path) -> list[str]:
    """Write the documentation as two shards; returns the options that name them."""
    tokens = gpt.encode_bytes("\n\n".join(topics[name] for name in sorted(topics)).encode())
    cut = len(tokens) * 9 // 10
    for name, part in (("train_0", tokens[:cut]), ("val_0", tokens[cut:])):
        part = np.concatenate(([gpt.BYTE_DOCUMENT_START], part)).astype(np.uint16)
        gpt.write_shard(folder / f"{name}.bin", part, gpt.BYTE_VOCAB_SIZE, gpt.BYTE_DOCUMENT_START)
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


def run_laptop(data: list[str], seed: int, num_steps: int) -> tuple[float, float]:
    """The same of the laptop preset, which reads the text as one stream, for so many steps."""
    with tempfile.TemporaryDirectory() as logs:
        options = [f"--num_iterations={num_steps}", f"--momentum_warmup_steps={num_steps // 5}",
                   "--val_loss_every=0", f"--seed={seed}", f"--logs_dir={logs}", "--row_start=anywhere"]
        seconds, _ = time_process(["train_gpt.py", "--preset=laptop", *options, *data])
        (path,) = Path(logs).glob("*.json")
        return seconds, json.loads(path.read_text())["final_val_loss"]


def main() -> None:
    """Run both over seeds, interleaved, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--steps", default="70,80,90", help="of the laptop preset (default %(default)s)")
    args = parser.parse_args()
    counts = [int(word) for word in args.steps.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_text(Path(folder))
        for seed in tqdm(range(args.seeds), unit="seed"):
            peer = run_peer(data, seed)
            rows.append(("peer, 2000 steps", seed, *peer, 1.0))
            for count in counts:
                ours = run_laptop(data, seed, count)
                rows.append((f"laptop, {count} steps", seed, *ours, ours[0] / peer[0]))
    print("| run | seed | seconds, whole process | validation loss | of the peer's time |")
    print("|---|---|---|---|---|")
    for name, seed, seconds, loss, ratio in rows:
        print(f"| {name} | {seed} | {seconds:.1f} | {loss:.4f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
