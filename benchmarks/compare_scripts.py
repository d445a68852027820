#!/usr/bin/env python3
"""Compare the speed of versions of train_gpt.py by whole runs in turn, in bfloat16 and in float32.

    git show 1d40ca5:train_gpt.py > /tmp/before.py
    python benchmarks/compare_scripts.py /tmp/before.py --preset=laptop --num_iterations=60

The file here is the last version. Other options go to all scripts. Each run is a process. Prints a table for
RESULTS.md, with the medians of the rounds: the mean time of a step after the first one, its ratio to the
first version in the same round, and of the whole process the processor time and the voluntary context
switches. The last column is the largest difference of a training loss from the first version's.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import ROOT, Parser, Progress, RecordError, at_least, require_packages, run_guarded

with require_packages():
    import numpy as np
    import torch

    import train_gpt as gpt


def run_script(script: Path, words: list[str]) -> tuple[list[float], list[float]]:
    """Train. Returns (ms of a step, seconds of processor time, context switches) and the training losses."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as out:
        for name in ("data", "records/presets"):  # scripts until 78c3572 have no --out
            link = Path(out, name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(ROOT / name)
        command = [sys.executable, str(script.resolve()), *words]
        done = subprocess.run(command, cwd=out, capture_output=True, text=True)
        if done.returncode:
            raise RecordError(f"{script} ends with status {done.returncode}: {done.stderr.strip()[-300:]}")
        (log,) = Path(out).glob("logs/*.txt")
        (result,) = Path(out).glob("logs/*.json")
        times = [float(line.split("train_time:")[1].split("ms")[0])
                 for line in log.read_text().splitlines() if " train_loss:" in line]
        losses = [loss for _, loss in json.loads(result.read_text())["train_points"]]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ms = (times[-1] - times[0]) / max(1, len(times) - 1)
    return [ms, processor, after.ru_nvcsw - before.ru_nvcsw], losses


def compare(scripts: list[Path], dtypes: list[str], num_rounds: int, words: list[str]) -> str:
    """Run all scripts in all dtypes in each round. Returns the table."""
    measured, losses = {}, {}
    with Progress(num_rounds * len(dtypes) * len(scripts)) as progress:
        for _ in range(num_rounds):
            for dtype in dtypes:
                for script in scripts:
                    figures, losses[dtype, script] = run_script(script, [*words, f"--dtype={dtype}"])
                    measured.setdefault((dtype, script), []).append(figures)
                    progress.finish(f"{script} in {dtype}: {figures[0]:.1f} ms a step")
    lines = ["| activations | version | ms a step | ratio (range) | processor, s | context switches | last "
             "loss | apart |", "|---|---|---:|---|---:|---:|---:|---:|"]
    for (dtype, script), rounds in measured.items():
        first, loss = measured[dtype, scripts[0]], losses[dtype, script]
        ratios = [figures[0] / base[0] for figures, base in zip(rounds, first)]
        low, ratio, high = min(ratios), statistics.median(ratios), max(ratios)
        ms, processor, switches = map(statistics.median, zip(*rounds))
        apart = np.abs(np.subtract(loss, losses[dtype, scripts[0]])).max()
        lines.append(f"| {dtype} | {script.name} | {ms:.1f} | {ratio:.3f} ({low:.3f} to {high:.3f}) | "
                     f"{processor:.1f} | {switches:,.0f} | {loss[-1]:.4f} | {apart:.1e} |")
    return "\n".join(lines)


def main() -> int:
    """Parse, run all in turn, print."""
    parser = Parser(__doc__)
    parser.add_argument("before", type=Path, nargs="+", help="other versions of train_gpt.py")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of activations (default %(default)s)")
    args, words = parser.parse_known_args()

    def body() -> int:
        cfg = gpt.make_config(gpt.parse_argv(words))
        device = gpt.start_runtime(cfg).device
        dtypes = args.dtypes.split(",")
        print(f"{cfg.preset}, {cfg.num_iterations} steps, {args.rounds} rounds, {torch.get_num_threads()} "
              f"threads, {gpt.describe_machine(gpt.Runtime(device))['hardware']['cpu']}")
        best = gpt.choose_dtype(gpt.change_options(cfg, dict(dtype="auto")), device)[0]
        if "bfloat16" in dtypes and best == torch.float32:
            print("this processor has no bfloat16: it emulates these matmuls")
        print(compare([*args.before, ROOT / "train_gpt.py"], dtypes, args.rounds, words))
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
