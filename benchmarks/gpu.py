#!/usr/bin/env python3
"""Run all measurements that need a GPU, in one command of less than nine minutes.

    ./run.sh benchmarks/gpu.py  # on FineWeb, or --train_files and --val_files
    ./run.sh benchmarks/gpu.py --seconds=1700  # all parts, of which half fit in nine minutes
    ./run.sh benchmarks/gpu.py --parts=record_92,tune  # only these
    ./run.sh benchmarks/gpu.py --rehearse --out=/tmp/rehearsal  # on the CPU at toy size, two minutes

The parts run in order of their value. A part that needs more than the remaining seconds is skipped. Parts:
PARTS
A large matmul is timed before and after each timed part. If its rate has fallen, the GPU was throttled and
the times do not count. After each part its figures are written to OUT.json and its row for RESULTS.md to
OUT.md. Exit status 0 if all parts ran and agreed, else 1. Takes the options of train_gpt.py.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import ROOT, Parser, RecordError, at_least, keep_saying, require_packages, run_guarded

with require_packages():
    import torch
    from tqdm import tqdm

    import train_gpt as gpt
    from benchmarks import common, step

SECONDS = 530  # for everything
TOLERANCE = 0.01  # between the losses of fused and plain training
THROTTLED = 0.85  # of the best rate: below it the GPU was throttled


class Day:
    """The finished parts and their results."""

    def __init__(self, args: Namespace, options: list[str], scratch: Path):
        self.args, self.options, self.scratch, self.start = args, options, scratch, monotonic()
        self.env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        device = torch.device("cpu" if args.rehearse else "cuda")
        rt = gpt.Runtime(device, peak_flops=1.0)
        self.result: dict = dict(date=time.strftime("%Y-%m-%d"), parts={}, product_tflops=[],
                                 **gpt.describe_machine(rt), command=["benchmarks/gpu.py", *sys.argv[1:]])
        self.result["hardware"].pop("activations", None)  # each part chooses a dtype

    def left(self) -> float:
        """Seconds that are left."""
        return self.args.seconds - (monotonic() - self.start)

    def measure_rate(self) -> float:
        """TFLOP/s of a large matmul: the median of repetitions of five matmuls during a second."""
        size, dtype, device = 8192, torch.bfloat16, "cuda"
        if self.args.rehearse:
            size, dtype, device = 256, torch.float32, "cpu"
        elif torch.cuda.get_device_capability() < (8, 0):
            dtype = torch.float16
        x, rates, end = torch.randn(size, size, device=device).to(dtype), [], time.perf_counter() + 1
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(5):
                product = x @ x
            product[0, 0].item()  # waits for all five
            rates.append(5 * 2 * size**3 / (time.perf_counter() - start) / 1e12)
        del x, product
        torch.cuda.empty_cache()  # the parts are other processes
        return statistics.median(rates)

    def run_part(self, name: str, part: "Part") -> None:
        """Run a part and note its result, for a timed part with the rate of the GPU before and after."""
        if self.left() < part.least:
            return self.note(name, dict(ok=False, skipped=f"not run: {max(0, self.left()):.0f} s are left, "
                                                          f"it needs {part.least:.0f}"))
        if not part.is_timed:
            return self.note(name, part.measure(self))
        before = self.measure_rate()
        facts = part.measure(self)
        rates = self.result["product_tflops"] = [*self.result["product_tflops"], before, self.measure_rate()]
        self.note(name, facts | dict(product_tflops=rates[-2:],
                                     is_throttled=min(rates[-2:]) < THROTTLED * max(rates)))

    def run(self, *command: str) -> subprocess.CompletedProcess:
        """Run a Python script of this repository within the time that is left."""
        try:
            with keep_saying(f"{' '.join(command[:2])} goes on"):
                return subprocess.run([sys.executable, *command], cwd=ROOT, env=self.env, text=True,
                                      capture_output=True, timeout=max(1.0, self.left()))
        except subprocess.TimeoutExpired as error:
            text = (error.stdout or b"").decode(errors="replace")
            return subprocess.CompletedProcess(command, 124, text, "the time was up")

    def note(self, name: str, facts: dict) -> None:
        """Print and write the result of a part."""
        facts["ended_at_s"] = round(monotonic() - self.start)
        self.result["parts"][name] = facts
        print(format_row(name, facts), flush=True)
        for suffix, text in (".json", json.dumps(self.result, indent=1)), (".md", format_rows(self.result)):
            gpt.write_atomic(Path(f"{self.args.out}{suffix}"), (text + "\n").encode())


def run_tests(day: Day) -> dict:
    """Run the tests marked gpu. Without a GPU they are skipped."""
    workers = ["-n", "0"] if day.args.rehearse else ["-n", "6", "--dist", "load"]
    done = day.run("-m", "pytest", "-m", "gpu", *workers, "tests")
    found = re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)
    counts = {word: int(number) for number, word in found}
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return dict(ok=done.returncode == 0, counts=counts, failed=failed, tail=done.stdout[-1500:])


def time_steps(*options: str) -> Callable[[Day], dict]:
    """Run benchmarks/step.py with these options."""

    def measure(day: Day) -> dict:
        path = day.scratch / "step.json"
        path.unlink(missing_ok=True)
        done = day.run("benchmarks/step.py", *day.options, *options, f"--json={path}")
        if done.returncode:
            return dict(ok=False, error=done.stderr[-1500:])
        report = json.loads(path.read_text())
        runs = report["runs"]
        return dict(ok=all(run["num_recompiles"] == 0 for run in runs), runs=runs, ratio=report.get("ratio"))

    return measure


def train(day: Day) -> dict:
    """Train with our kernels and without, one micro-batch a step. Losses must differ only by rounding."""
    size = (["--num_iterations=12", "--val_loss_every=4"] if day.args.rehearse
            else ["--num_iterations=300", "--val_loss_every=100", "--tokens_per_step=49152",
                  "--val_tokens=1048576"])
    facts: dict = dict(ok=False, curves={})
    for name, forms in ("with", "auto"), ("without", step.list_forms(not day.args.rehearse)):
        folder = day.scratch / f"{name}_kernels"
        done = day.run("train_gpt.py", *day.options, *size, f"--fast={forms}", f"--out={folder}")
        if done.returncode:
            return facts | dict(error=f"--fast={forms}: {done.stderr[-1500:]}")
        result = json.loads(next(folder.glob("logs/*.json")).read_text())
        facts["curves"][name] = {key: result[key] for key in (
            "val_points", "compile_time_s", "train_time_ms", "peak_memory_mib")}
    fused, plain = (dict((step, loss) for step, loss, _ in curve["val_points"])
                    for curve in facts["curves"].values())
    differences = {step: loss - plain[step] for step, loss in fused.items()}
    return facts | dict(ok=abs(differences[max(differences)]) < TOLERANCE, differences=differences)


def tune(day: Day) -> dict:
    """Run benchmarks/tune.py in the remaining time. A refused alternative is an error."""
    path = day.scratch / "tune.json"
    few = (["--rounds=2", "--alternative=--micro_batch_tokens=512",
            f"--alternative=--fast={step.list_forms(False)}"] if day.args.rehearse else [])
    done = day.run("benchmarks/tune.py", *day.options, *few, f"--seconds={max(1, day.left() - 45):.0f}",
                   f"--json={path}")
    if done.returncode:
        return dict(ok=False, error=(done.stderr + done.stdout)[-1500:])
    result = json.loads(path.read_text())
    return dict(ok=all(row["verdict"] != "refused" for row in result["alternatives"]), tuned=result,
                report=done.stdout)


class Part(NamedTuple):
    """A measurement that needs a GPU."""

    meaning: str
    least: float  # seconds that it needs, measured on one H100
    measure: Callable[[Day], dict]
    is_timed: bool = True


def list_parts(is_rehearsal: bool) -> dict[str, Part]:
    """All parts by name, in order of their value."""
    small = (["--seq_len=512", "--micro_batch_tokens=512"] if is_rehearsal
             else ["--seq_len=16384", "--micro_batch_tokens=16384", "--val_seq_len=16384"])
    newest = ["--preset=smoke_92"] if is_rehearsal else ["--preset=record_92", "--ngram_rows=21150720"]
    plain = step.list_forms(not is_rehearsal)
    steps = "--num_steps=6" if is_rehearsal else "--num_steps=18"
    parts = dict(
        tests=Part("the tests marked gpu, six at a time", 90, run_tests, is_timed=False),
        record_32=Part("a step of preset record_32: its time, memory and kernels", 120, time_steps(steps)),
        train=Part("300 steps with our kernels and without: losses within 0.01", 150, train),
        record_92=Part("a step of preset record_92", 290, time_steps(steps, *newest)),
        kernels=Part("a step of record_32 without our kernels beside one with them", 180,
                     time_steps(steps, f"--compare=--fast={plain}")),
        memory=Part("a step of record_32 in micro-batches of 16,384 tokens", 120, time_steps(steps, *small)),
        tune=Part("faster options: benchmarks/tune.py in the remaining time", 120, tune))
    return {name: part._replace(least=0) for name, part in parts.items()} if is_rehearsal else parts


def choose_parts(text: str) -> list[str]:
    """Names of parts, in order of their value. ArgumentTypeError for an unknown one."""
    names, asked = list(list_parts(False)), text.split(",")
    if wrong := [name for name in asked if name not in names]:
        raise ArgumentTypeError(f"{wrong[0] or 'nothing'} is no part: choose among {', '.join(names)}")
    return [name for name in names if name in asked]


def format_row(name: str, part: dict) -> str:
    """The result of a part as a row of Markdown."""
    cells = []
    if part.get("skipped"):
        cells.append(part["skipped"])
    elif "error" in part:
        cells.append(f"failed: {' '.join(part['error'].split())[-200:]}")
    elif "counts" in part:
        cells += [", ".join(f"{count} {word}" for word, count in part["counts"].items()), *part["failed"]]
    elif "runs" in part:
        for run in part["runs"]:
            stages = " / ".join(f"{ms:.1f}" for ms in run["ms_by_stage"].values())
            memory = f"{run['peak_memory_mib']:,} MiB, " if "peak_memory_mib" in run else ""
            cells.append(f"{stages} ms per step of the stages, {run['tokens_per_s']:,} tokens/s, "
                         f"MFU {100 * run['mfu']:.1f} %, {memory}warm-up {run['warm_up_s']:.0f} s, "
                         f"{run['num_recompiles']} recompiles")
        cells += [f"time per token {part['ratio']:.3f} of the first"] if part["ratio"] else []
    elif "tuned" in part:
        for row in part["tuned"]["alternatives"]:
            ratio = f" ({row['ratio']:.3f})" if "ratio" in row else ""
            cells.append(f"`{' '.join(row['words'])}` {row['verdict']}{ratio}")
        cells.append(part["report"].splitlines()[-1])
    else:
        for kind, curve in part["curves"].items():
            losses = ", ".join(f"{loss:.4f} at step {step}" for step, loss, _ in curve["val_points"])
            cells.append(f"{kind} our kernels: {losses}, {curve['train_time_ms'] / 1000:.1f} s, compilation "
                         f"{curve['compile_time_s']:.0f} s")
        cells.append(f"differences {', '.join(f'{value:+.4f}' for value in part['differences'].values())}")
    if "product_tflops" in part:
        before, after = part["product_tflops"]
        cells.append(f"a large product before and after: {before:.4g} and {after:.4g} TFLOP/s")
        cells += ["**throttled: these times do not count**"] if part["is_throttled"] else []
    return f"| {name} | {'' if part.get('ok') else '**not right:** '}{'; '.join(cells)} |"


def format_rows(result: dict) -> str:
    """Markdown for RESULTS.md."""
    machine = result["hardware"].get("gpu", result["hardware"]["cpu"])
    lines = [f"`python {' '.join(result['command'])}`, {result['date']}, {machine}, PyTorch "
             f"{result['versions']['torch']}", "", "| part | result |", "|---|---|"]
    return "\n".join([*lines, *(format_row(name, part) for name, part in result["parts"].items())])


def main() -> int:
    """Run the chosen parts in order of their value."""
    parts = list_parts(False)
    parser = Parser(__doc__.replace("PARTS", "\n".join(
        f"    {name:9} {part.meaning}; from {part.least:.0f} s on" for name, part in parts.items())))
    parser.add_argument("--parts", type=choose_parts, default=list(parts), metavar="NAME,NAME",
                        help="names from the list above (default: all)")
    parser.add_argument("--seconds", type=at_least(1, float), default=SECONDS,
                        help="for everything (default %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU at toy size")
    parser.add_argument("--out", type=Path, default=Path("gpu_day"),
                        help="path without suffix (default %(default)s)")
    args, options = common.parse_known(parser)

    def body() -> int:
        if not args.rehearse and not torch.cuda.is_available():
            raise RecordError("PyTorch sees no CUDA device: use --rehearse to try it on the CPU")
        args.out = args.out.absolute()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        preset = ["--preset=smoke", "--device=cpu"] if args.rehearse else ["--preset=record_32"]
        gpt.make_config(gpt.parse_argv([*preset, *options]))  # bad options end here
        with tempfile.TemporaryDirectory() as scratch:
            day = Day(args, [*preset, *options], Path(scratch))
            parts = list_parts(args.rehearse)
            for name in tqdm(args.parts, desc="parts", disable=None):
                day.run_part(name, parts[name])
        print(f"\n{Path(f'{args.out}.md').read_text()}")
        return 0 if all(part["ok"] for part in day.result["parts"].values()) else 1

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
