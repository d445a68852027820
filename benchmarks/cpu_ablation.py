#!/usr/bin/env python3
"""Measure the effect of each CPU choice of train_gpt.py on a step of preset laptop.

    python benchmarks/cpu_ablation.py            # about three minutes, prints a table for RESULTS.md

Each variant undoes one choice and runs in a separate process. All variants run in turn, twice, so that noise
affects all of them. The figure is the median time of a training step of the first stage. The ratio is to
"as is".
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import Parser, at_least, require_packages, run_guarded

with require_packages():
    from tqdm import tqdm

    import train_gpt as gpt

VARIANTS = {  # name: changes of the config
    "as is": {},
    "float32 activations": {"dtype": "float32"},
    "torch.compile": {"compile": "on"},
    "two micro-batches of 1024": {"micro_batch_tokens": 1024},
}


def measure(variant: str, num_steps: int) -> dict:
    """Seconds of the first three steps together, and of each later step, with one choice undone."""
    cfg = gpt.make_config({"preset": "laptop", "device": "cpu", **VARIANTS[variant]})
    rt = gpt.choose_precision(cfg, gpt.start_runtime(cfg))
    trainer = gpt.Trainer(cfg, rt)
    data = gpt.TrainData(cfg, trainer.schedule)
    batches = gpt.prefetch(data.batches(rt.comm, 0, num_steps + 3), rt.device)
    start = time.perf_counter()
    for _ in range(3):
        trainer.train_step(batches, trainer.schedule.at(0))
    first, seconds = time.perf_counter() - start, []
    for _ in range(num_steps):
        start = time.perf_counter()
        trainer.train_step(batches, trainer.schedule.at(0))
        seconds.append(time.perf_counter() - start)
    batches.close()
    return {"first": first, "seconds": seconds}


def compare(num_steps: int) -> None:
    """Measure all variants, interleaved, and print the table."""
    results: dict[str, list[dict]] = {variant: [] for variant in VARIANTS}
    for variant in tqdm([*VARIANTS] * 2, desc="measure"):
        command = [sys.executable, __file__, "--variant", variant, "--num_steps", str(num_steps)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise gpt.RunError(f"{variant} ended with status {done.returncode}: see above")
        results[variant].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {v: statistics.median(s for run in runs for s in run["seconds"]) for v,
               runs in results.items()}
    print("| variant | ms per step | ratio | s for the first three steps |\n|---|---|---|---|")
    for variant, median in medians.items():
        first = results[variant][0]["first"]
        print(f"| {variant} | {1000 * median:.0f} | {median / medians['as is']:.2f} | {first:.1f} |")


def main() -> int:
    """Parse and compare."""
    parser = Parser(__doc__)
    parser.add_argument("--num_steps", type=at_least(1), default=40,
                        help="steps per process (default %(default)s)")
    parser.add_argument("--variant", choices=VARIANTS, help="measure one in this process, print JSON")
    args = parser.parse_args()

    def body() -> int:
        if args.variant:
            print(json.dumps(measure(args.variant, args.num_steps)))
        else:
            compare(args.num_steps)
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
