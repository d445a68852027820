#!/usr/bin/env python3
"""Everything that only a GPU can tell, in one command of less than nine minutes.

    python benchmarks/gpu.py                                  # on FineWeb, or --train_files and --val_files
    python benchmarks/gpu.py --rehearse --out=/tmp/rehearsal  # the same on the CPU at toy size, a minute

Runs the tests marked gpu, times track_1 with our kernels against plain PyTorch and at a third of the memory,
and trains 300 steps with the kernels and without: their losses must agree within 0.01. After each part
OUT.json holds its figures and OUT.md the rows for RESULTS.md, so that an end in the middle loses nothing.
Exit status 0: all parts ran and agreed; 1: not. Other options are those of train_gpt.py.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
from results import Parser  # noqa: E402

import train_gpt as gpt  # noqa: E402

SECONDS = 530  # for everything; a part begins only if its least time is left
TOLERANCE = 0.01  # between the losses of fused and plain training


class Day:
    """The parts that ran, and what they found."""

    def __init__(self, args: Namespace, options: list[str], scratch: Path):
        self.args, self.options, self.scratch, self.start = args, options, scratch, time.monotonic()
        self.env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        device = torch.device("cpu" if args.rehearse else "cuda")
        rt = gpt.Runtime(device, peak_flops=1.0)
        self.result: dict = dict(date=time.strftime("%Y-%m-%d"), parts={}, **gpt.describe_machine(rt),
                                 command=["benchmarks/gpu.py", *sys.argv[1:]])
        del self.result["hardware"]["activations"]  # the parts choose theirs

    def left(self) -> float:
        """Seconds that are left."""
        return SECONDS - (time.monotonic() - self.start)

    def run(self, *command: str) -> subprocess.CompletedProcess:
        """Run a Python script of this repository within the time that is left."""
        try:
            return subprocess.run([sys.executable, *command], cwd=ROOT, env=self.env, text=True,
                                  capture_output=True, timeout=max(1.0, self.left()))
        except subprocess.TimeoutExpired as error:
            text = (error.stdout or b"").decode(errors="replace")
            return subprocess.CompletedProcess(command, 124, text, "the time was up")

    def note(self, name: str, facts: dict) -> None:
        """Write what a part found at once."""
        facts["ended_at_s"] = round(time.monotonic() - self.start)
        self.result["parts"][name] = facts
        for suffix, text in (".json", json.dumps(self.result, indent=1)), (".md", format_rows(self.result)):
            gpt.write_atomic(Path(f"{self.args.out}{suffix}"), (text + "\n").encode())


def run_tests(day: Day) -> dict:
    """The tests marked gpu; without a GPU they are collected and skipped."""
    done = day.run("-m", "pytest", "-m", "gpu", "-n", "0", "tests")
    found = re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)
    counts = {word: int(number) for number, word in found}
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return dict(ok=done.returncode == 0, counts=counts, failed=failed, tail=done.stdout[-1500:])


def time_steps(*options: str) -> Callable[[Day], dict]:
    """benchmarks/step.py with these options."""

    def measure(day: Day) -> dict:
        path = day.scratch / "step.json"
        path.unlink(missing_ok=True)
        done = day.run("benchmarks/step.py", *day.options, *options, f"--json={path}")
        if done.returncode:
            return dict(ok=False, error=done.stderr[-1500:])
        report = json.loads(path.read_text())
        keys = ("flags", "ms_per_step", "quartiles_ms", "ms_by_stage", "tokens_per_s", "mfu",
                "matmul_tflops", "peak_memory_mib", "warm_up_s", "num_graphs", "num_recompiles",
                "data_wait_ms", "parts")
        runs = [{key: run[key] for key in keys} for run in report["runs"]]
        return dict(ok=all(run["num_recompiles"] == 0 for run in runs), runs=runs, ratio=report.get("ratio"))

    return measure


def train(kernels: str) -> Callable[[Day], dict]:
    """A run of one micro-batch a step on the token files, and its losses."""

    def measure(day: Day) -> dict:
        folder = day.scratch / f"kernels_{kernels}"
        size = (["--num_iterations=12", "--val_loss_every=4"] if day.args.rehearse
                else ["--num_iterations=300", "--val_loss_every=100", "--tokens_per_step=49152",
                      "--val_tokens=1048576"])
        done = day.run("train_gpt.py", *day.options, *size, f"--kernels={kernels}", f"--logs_dir={folder}")
        if done.returncode:
            return dict(ok=False, error=done.stderr[-1500:])
        result = json.loads(next(folder.glob("*.json")).read_text())
        return dict(ok=True, val_points=result["val_points"], compile_time_s=result["compile_time_s"],
                    train_time_ms=result["train_time_ms"], peak_memory_mib=result["peak_memory_mib"])

    return measure


def compare(day: Day) -> dict:
    """Fused against plain: the same losses, but for rounding."""
    curves = [dict((step, loss) for step, loss, _ in day.result["parts"][name].get("val_points", ()))
              for name in ("train, kernels auto", "train, kernels off")]
    if not all(curves):
        return dict(ok=False, error="one of the runs is missing")
    differences = {step: loss - curves[1][step] for step, loss in curves[0].items()}
    return dict(ok=abs(differences[max(differences)]) < TOLERANCE, differences=differences)


def list_parts(is_rehearsal: bool) -> list[tuple[str, float, Callable[[Day], dict]]]:
    """(name, seconds it needs at least, what it does)."""
    small = (["--seq_len=512", "--micro_batch_tokens=512"] if is_rehearsal
             else ["--seq_len=16384", "--micro_batch_tokens=16384", "--val_seq_len=16384"])
    steps = "--num_steps=6" if is_rehearsal else "--num_steps=24"
    return [("tests", 60, run_tests),
            ("step, kernels off beside auto", 100, time_steps(steps, "--compare=--kernels=off")),
            ("train, kernels auto", 30, train("auto")),
            ("train, kernels off", 30, train("off")),
            ("fused against plain", 0, compare),
            ("step, micro-batch 16,384", 60, time_steps(steps, *small))]


def format_rows(result: dict) -> str:
    """Markdown for RESULTS.md."""
    machine = result["hardware"].get("gpu", result["hardware"]["cpu"])
    lines = [f"`python {' '.join(result['command'])}`, {result['date']}, {machine}, PyTorch "
             f"{result['versions']['torch']}", "", "| part | result |", "|---|---|"]
    for name, part in result["parts"].items():
        if part.get("skipped"):
            cell = part["skipped"]
        elif "error" in part:
            cell = f"failed: {' '.join(part['error'].split())[-200:]}"
        elif "counts" in part:
            cell = ", ".join(f"{count} {word}" for word, count in part["counts"].items())
            cell += "".join(f"; {test}" for test in part["failed"])
        elif "runs" in part:
            cell = "; ".join(
                f"{run['ms_per_step']:.1f} ms a step (quartiles {run['quartiles_ms'][0]:.1f} and "
                f"{run['quartiles_ms'][1]:.1f}), {run['tokens_per_s']:,} tokens/s, "
                f"MFU {100 * run['mfu']:.1f} %, {run['peak_memory_mib']:,} MiB, "
                f"warm-up {run['warm_up_s']:.0f} s, {run['num_recompiles']} recompiles"
                for run in part["runs"])
            cell += f"; ratio {part['ratio']:.3f}" if part["ratio"] else ""
        elif "differences" in part:
            cell = ", ".join(f"step {step}: {value:+.4f}" for step, value in part["differences"].items())
        else:
            cell = (f"{', '.join(f'step {step}: {loss:.4f}' for step, loss, _ in part['val_points'])}; "
                    f"{part['train_time_ms'] / 1000:.1f} s, compilation {part['compile_time_s']:.0f} s")
        lines.append(f"| {name} | {'' if part.get('ok') else '**not right:** '}{cell} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """All parts in order of what would be missed most."""
    parser = Parser(__doc__)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU at toy size")
    parser.add_argument("--out", type=Path, default=Path("gpu_day"),
                        help="where, without ending (default %(default)s)")
    args, options = parser.parse_known_args()

    def body() -> int:
        if not args.rehearse and not torch.cuda.is_available():
            raise gpt.InputError("PyTorch sees no CUDA device: use --rehearse to try it on the CPU")
        gpt.check_writable(args.out.parent, "choose another place with --out")
        args.out = args.out.absolute()
        preset = ["--preset=smoke", "--device=cpu"] if args.rehearse else ["--preset=track_1"]
        gpt.make_config(gpt.parse_argv([*preset, *options])[0])  # bad options end here
        with tempfile.TemporaryDirectory() as scratch:
            day = Day(args, [*preset, *options], Path(scratch))
            for name, seconds, measure in tqdm(list_parts(args.rehearse), desc="parts", disable=None):
                has_time = day.left() >= seconds
                day.note(name, measure(day) if has_time
                         else dict(ok=False, skipped="not run: the time was up"))
        print(Path(f"{args.out}.md").read_text())
        return 0 if all(part["ok"] for part in day.result["parts"].values()) else 1

    return gpt.run_guarded(body, "gpu.py")


if __name__ == "__main__":
    sys.exit(main())
