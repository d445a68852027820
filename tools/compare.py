#!/usr/bin/env python3
"""Is my change better? Compare versions of the training by pairs of runs on this machine.

    ./run.sh tools/compare.py HEAD train_gpt.py                   # what I edited, against the last commit
    ./run.sh tools/compare.py laptop 'laptop --matrix_lr=0.03'    # two settings
    ./run.sh tools/compare.py laptop --parts                      # without each of its parts
    ./run.sh tools/compare.py A B -- --num_iterations=60          # options after -- are for all

A side is a script, the folder of a record, a git revision, a preset, or options. In quotes it is one of the
first four, and options. The first side is the base. All others are compared with it.

A pair is one run of each side with one seed, in random order, one after the other. ONE FIGURE DECIDES: the
seconds that a side needs for the base's loss. It is the time of its run, corrected by the difference of the
losses. What a nat is worth follows from runs of the base with 0.9 and 1.1 of its steps, in the first three
pairs. These also show the noise of this machine.

It stops when it is decided. After each pair from the 3rd to the 12th, a t-test of the logarithms of the
ratios is made at 0.1 %, for several sides with Holm's correction. Ten looks at 0.1 % have an error of at
most 1 % together. Finished runs are kept in logs/compare: the same command goes on.
"""

import hashlib
import json
import math
import os
import random
import re
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import (
    ROOT,
    Parser,
    Progress,
    RecordError,
    at_least,
    list_visible,
    output_file,
    require_packages,
    run_guarded,
)

with require_packages():
    from scipy import stats

    import train_gpt as gpt
    from tools import results

FIRST_LOOK, MOST_PAIRS, ERROR = 3, 12, 0.01  # error: of all looks together
SCALES = (0.9, 1.1)  # of the base's steps, for the worth of a nat
OWN_OPTIONS = {"seed", "out", "record", "resume"}


class Side(NamedTuple):
    """What is compared: a script, and its options."""

    name: str
    source: bytes
    options: tuple[str, ...]


class Run(NamedTuple):
    """The figures of a finished run."""

    seconds: float  # of training
    loss: float
    step_ms: float  # without the first step
    processor: float  # seconds of all threads, with the setup
    switches: int  # voluntary context switches
    others: float  # cores that other processes have used
    load: tuple[float, float]  # load average before and after
    clock: float  # MHz of the processor. On a GPU of its multiprocessors
    choices: dict  # of the run: dtype, fast forms, threads, ...
    steps: int
    val_points: list  # [step, loss, milliseconds]


# ---- sides ------------------------------------------------------------------------------------------------

def read_side(text: str, common: list[str]) -> Side:
    """A side of the command line. RecordError if it is none. common: options of all sides."""
    words = shlex.split(text)
    word, options = "", words
    if words and not words[0].startswith("-"):
        word, *options = words
    path = Path(word)
    preset = []
    source = (ROOT / "train_gpt.py").read_bytes()
    if word in gpt.PRESETS or (ROOT / f"presets/{word}.json").exists():
        preset = [f"--preset={word}"]
    elif word and path.is_dir() and list_visible(path, "*.json"):
        result = results.read_record(path).results[0]
        if "key" not in result:
            raise RecordError(f"{word}: its json is too old for a preset: give its script, and its options")
        source = results.find_script(path).read_bytes()
        preset = [f"--preset={path.resolve() / result['run_id']}.json"]
    elif word and path.is_file():
        source = path.read_bytes()
    elif word:
        shown = subprocess.run(["git", "show", f"{word}:train_gpt.py"], cwd=ROOT, capture_output=True)
        if shown.returncode:
            raise RecordError(f"{word} is no preset, script, folder of a record or git revision")
        source = shown.stdout
    options = [*preset, *common, *options]  # the last one of a name wins
    for option in options:
        name = option.removeprefix("--").partition("=")[0].replace("-", "_")
        if name in OWN_OPTIONS:
            raise RecordError(f"--{name}: compare.py gives this option itself")
    return Side(text, source, tuple(options))


def find_parts(cfg: gpt.Config) -> list[str]:
    """The parts that a config has and can leave out, see --without."""
    names = []
    for name, changes in sorted(gpt.list_parts().items()):
        changed = gpt.change_options(cfg, changes)
        if changed != cfg and not any(is_wrong for is_wrong, _ in gpt.find_problems(changed)):
            names.append(name)
    return names


def list_parts(base: Side) -> list[Side]:
    """The base without each of its parts."""
    cfg = gpt.make_config(gpt.parse_argv(list(base.options)))
    options = [f"--without={name}" for name in find_parts(cfg)]
    return [Side(option, base.source, (*base.options, option)) for option in options]


# ---- runs -------------------------------------------------------------------------------------------------

def read_busy_seconds() -> float:
    """Seconds that all processes have used the cores of this machine. 0 if the system does not say."""
    try:
        user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def read_clock() -> float:
    """MHz of a GPU, or the mean of the processor's cores. NaN if the system does not say."""
    try:
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
            found = subprocess.run(query, capture_output=True, text=True).stdout.split()
        else:
            found = re.findall(r"^cpu MHz\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return statistics.mean(map(float, found))
    except (OSError, ValueError):
        return math.nan


def train(side: Side, seed: int, extra: list[str], cache: Path) -> Run:
    """One run of a side, as a process of its own. RecordError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train_gpt.py")
        script.write_bytes(side.source)
        for name, target in dict(data="data", presets="presets", **{"records/presets": "presets"}).items():
            link = Path(folder, name)
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(ROOT / target)
        command = [sys.executable, str(script), *side.options, *extra, f"--seed={seed}"]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = read_busy_seconds()
        load = os.getloadavg()[0]
        started = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
        wall = time.perf_counter() - started
        busy = read_busy_seconds() - busy
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            *_, line = done.stderr.strip().splitlines() or [""]
            raise RecordError(f"{shlex.join(command[1:])} ends with status {done.returncode}: {line}")
        (path,) = list_visible(Path(folder), "logs/*.json")
        result, log = json.loads(path.read_text()), path.with_suffix(".txt").read_text()
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times = [float(ms) for ms in re.findall(r"train_time:([\d.]+)ms.* train_loss:", log)]
    return Run(
        seconds=result["train_time_ms"] / 1000, loss=result["final_val_loss"],
        step_ms=(times[-1] - times[0]) / max(1, len(times) - 1), processor=processor,
        switches=after.ru_nvcsw - before.ru_nvcsw, others=max(0.0, busy - processor) / wall,
        load=(load, os.getloadavg()[0]), clock=read_clock(),
        choices={**result.get("choices", {}), "threads": result["hardware"].get("threads")},
        steps=result["config"]["num_iterations"], val_points=result["val_points"])


class Runs:
    """Finished runs, kept in a file."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "runs.json"
        self.rows: dict[str, dict] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def get(self, side: Side, seed: int, scale: float = 1.0) -> Run | None:
        """The run of a side with a seed, and with this multiple of its steps."""
        row = self.rows.get(f"{side.name} seed {seed} x{scale:g}")
        return row and Run(**row)

    def add(self, side: Side, seed: int, scale: float = 1.0) -> None:
        """Make this run, unless it is there."""
        if self.get(side, seed, scale):
            return
        extra = []
        if scale != 1:
            extra = [f"--num_iterations={round(scale * self.get(side, seed).steps)}"]
        if scale > 1:
            extra.append("--epochs=2")  # if the text is read once
        run = train(side, seed, extra, self.folder / "cache")
        self.rows[f"{side.name} seed {seed} x{scale:g}"] = run._asdict()
        gpt.write_atomic(self.path, (json.dumps(self.rows, indent=1) + "\n").encode())


# ---- statistics -------------------------------------------------------------------------------------------

class Estimate(NamedTuple):
    """A mean over pairs, with its 95 % confidence interval, and the two-sided p-value of zero."""

    mean: float
    low: float
    high: float
    p: float
    n: int

    def format(self, digits: int, convert: Callable[[float], float] = math.exp) -> str:
        """The mean and its interval. By default they are logarithms of ratios."""
        mean, low, high = (f"{convert(x):.{digits}f}" for x in self[:3])
        return f"{mean} ({low} to {high})" if self.n > 1 else mean


def estimate(values: list[float]) -> Estimate:
    """Equal values differ from zero with p = 0, or are zero with p = 1."""
    mean, n = statistics.mean(values), len(values)
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1.0, n)
    error = statistics.stdev(values) / math.sqrt(n)
    if error < 1e-12:
        return Estimate(mean, mean, mean, float(abs(mean) < 1e-12), n)
    margin = float(stats.t.ppf(0.975, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    return Estimate(mean, mean - margin, mean + margin, p, n)


def decide(samples: list[list[float]]) -> set[int]:
    """Look at the logarithms of the ratios after a pair. samples: of the sides that are not decided. Returns
    the indices of those that differ from the base. Bonferroni divides the error among the looks, and Holm
    among the sides."""
    decided: set[int] = set()
    if len(samples[0]) < FIRST_LOOK:
        return decided
    error = ERROR / (MOST_PAIRS - FIRST_LOOK + 1)
    for p, index in sorted((estimate(sample).p, index) for index, sample in enumerate(samples)):
        if p > error / (len(samples) - len(decided)):
            break
        decided.add(index)
    return decided


def find_nat_rate(runs: list[tuple[Run, Run]]) -> float:
    """The change of the logarithm of the time for each nat, at the end of the base: below zero. runs: the
    base with fewer and with more steps. RecordError if more steps do not lower the loss."""
    nats = sum(more.loss - fewer.loss for fewer, more in runs)
    if nats >= 0:
        raise RecordError(f"{SCALES[1]} of the base's steps do not end at a lower loss than {SCALES[0]} of "
                          "them: give it another number of steps")
    return sum(math.log(more.seconds / fewer.seconds) for fewer, more in runs) / nats


# ---- a comparison -----------------------------------------------------------------------------------------

class Comparison:
    """The base against other sides, by pairs of runs."""

    def __init__(self, sides: list[Side], folder: Path):
        self.base, *self.others = sides
        self.runs = Runs(folder)
        self.seeds: dict[Side, list[int]] = {side: [] for side in self.others}
        self.decided: set[Side] = set()

    def run_pairs(self, num_pairs: int) -> None:
        """Run pairs until all sides are decided, at most num_pairs."""
        order = random.Random(0)  # equal if the command goes on
        with Progress(num_pairs, unit="pair") as progress:
            for seed in range(num_pairs):
                waiting = [side for side in self.others if side not in self.decided]
                shuffled = [self.base, *waiting]
                order.shuffle(shuffled)
                for side in shuffled:
                    progress.show(f"seed {seed}, {side.name}")
                    self.runs.add(side, seed)
                for scale in SCALES if seed < FIRST_LOOK else ():
                    self.runs.add(self.base, seed, scale)
                for side in waiting:
                    self.seeds[side].append(seed)
                logs = {side: self.list_ratios(side) for side in waiting}
                self.decided |= {waiting[index] for index in decide(list(logs.values()))}
                progress.finish(", ".join(f"{side.name} {estimate(values).format(3)}"
                                          for side, values in logs.items()))
                if len(self.decided) == len(self.others):
                    break

    def list_base_runs(self) -> list[tuple[Run, Run, Run]]:
        """The runs of the base in the first pairs, with fewer, all and more steps."""
        return [tuple(self.runs.get(self.base, seed, scale) for scale in (SCALES[0], 1.0, SCALES[1]))
                for seed in range(min(FIRST_LOOK, max(map(len, self.seeds.values()))))]

    def list_pairs(self, side: Side) -> list[tuple[Run, Run]]:
        return [(self.runs.get(self.base, seed), self.runs.get(side, seed)) for seed in self.seeds[side]]

    def list_ratios(self, side: Side) -> list[float]:
        """For each pair: logarithm of the ratio of the seconds that the side needs for the base's loss."""
        nat_rate = find_nat_rate([(fewer, more) for fewer, _, more in self.list_base_runs()])
        return [math.log(run.seconds / base.seconds) - (run.loss - base.loss) * nat_rate
                for base, run in self.list_pairs(side)]

    def describe_side(self, side: Side, target: float | None) -> str:
        """The row of a side: what it has in place of the base, as ratios, and the difference of the loss."""
        pairs = self.list_pairs(side)
        cells = [side.name, estimate(self.list_ratios(side)).format(3)]
        for field, digits in (("seconds", 3), ("step_ms", 3), ("processor", 2), ("switches", 2)):
            logs = [math.log(max(1e-9, getattr(run, field)) / max(1e-9, getattr(base, field)))
                    for base, run in pairs]
            cells.append(estimate(logs).format(digits))
        cells.append(estimate([run.loss - base.loss for base, run in pairs]).format(4, float))
        if target is not None:
            crossings = [[results.find_crossing(run._asdict(), target) for run in pair] for pair in pairs]
            logs = [math.log(other[1] / base[1]) for base, other in crossings if base and other]
            cells.append(f"{estimate(logs).format(3)}, {len(logs)} pairs" if logs else "not reached")
        return f"| {' | '.join(cells)} |"

    def describe_machine(self) -> list[str]:
        """Lines about the noise, and about what disturbed the runs."""
        squares = []
        for runs in self.list_base_runs():  # equal steps, so the spread is noise
            mean = statistics.mean(run.step_ms for run in runs)
            squares.append(statistics.variance([run.step_ms / mean for run in runs]))
        runs = [run for side in self.others for pair in self.list_pairs(side) for run in pair]
        loads = [load for run in runs for load in run.load]
        clocks = [run.clock for run in runs if math.isfinite(run.clock)]
        lines = [f"noise: the time of a step varies by {math.sqrt(statistics.mean(squares)):.1%} (standard "
                 "deviation) between runs of the base",
                 f"load average {min(loads):.1f} to {max(loads):.1f}"]
        if clocks:
            lines.append(f"clock {min(clocks):.0f} to {max(clocks):.0f} MHz")
        disturbed = [run.others for run in runs if run.others > 0.2]
        if disturbed:
            lines.append(f"in {len(disturbed)} of {len(runs)} runs other processes used up to "
                         f"{max(disturbed):.1f} cores")
        for side in self.others:
            base, run = self.list_pairs(side)[0]
            for name, ours in base.choices.items():
                theirs = run.choices.get(name)
                if theirs != ours:
                    lines.append(f"{side.name} has {name} {theirs}, and the base has {ours}")
        return lines

    def judge(self, side: Side) -> dict:
        """The figures of the last line."""
        found = estimate(self.list_ratios(side))
        verdict = "not decided"
        if side in self.decided:
            verdict = "faster" if found.mean < 0 else "slower"
        ratio, low, high = map(math.exp, found[:3])
        return dict(side=side.name, ratio=ratio, low=low, high=high, pairs=found.n, verdict=verdict)

    def draw(self, path: Path) -> None:
        """Validation loss against seconds of training, a line for each run."""
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        base_seeds = range(max(map(len, self.seeds.values())))
        for number, (side, seeds) in enumerate({self.base: base_seeds, **self.seeds}.items()):
            for seed in seeds:
                points = self.runs.get(side, seed).val_points
                axes.plot([ms / 1000 for _, _, ms in points], [loss for _, loss, _ in points], alpha=0.6,
                          color=f"C{number % 10}", linestyle=("-", "--", ":", "-.")[number // 10 % 4],
                          label=None if seed else side.name)
        axes.set(xlabel="seconds of training", ylabel="validation loss")
        axes.legend()
        figure.savefig(path, bbox_inches="tight")


def main() -> int:
    words = sys.argv[1:]
    common: list[str] = []
    if "--" in words:
        place = words.index("--")
        words, common = words[:place], words[place + 1 :]
    parser = Parser(__doc__)
    parser.add_argument("sides", nargs="+", help="the base, and what is compared with it")
    parser.add_argument("--parts", action="store_true", help="the base without each of its parts")
    parser.add_argument("--pairs", type=int, default=MOST_PAIRS, choices=range(2, MOST_PAIRS + 1),
                        metavar=f"2..{MOST_PAIRS}", help="most pairs (default %(default)s)")
    parser.add_argument("--target", type=at_least(0, float), help="also the time to this validation loss")
    parser.add_argument("--json", type=output_file, help="file for the figures")
    parser.add_argument("--plot", type=output_file, help="file for a picture of the curves (svg)")
    args = parser.parse_args(words)

    def body() -> int:
        sides = [read_side(text, common) for text in args.sides]
        if args.parts:
            sides += list_parts(sides[0])
        names = [side.name for side in sides]
        if len(names) < 2 or len(set(names)) < len(names):
            raise RecordError(f"{names}: give two or more sides with different names, or --parts")
        machine = json.dumps(gpt.describe_machine(gpt.Runtime()), sort_keys=True)
        digest = hashlib.sha256(repr((sides, machine)).encode()).hexdigest()[:12]
        folder = ROOT / "logs" / "compare" / digest
        (folder / "cache").mkdir(parents=True, exist_ok=True)
        comparison = Comparison(sides, folder)
        comparison.run_pairs(args.pairs)
        header = ["side", "seconds at equal loss", "seconds", "a step", "processor", "context switches",
                  "loss", *(["seconds to target"] if args.target is not None else [])]
        print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
        for side in comparison.others:
            print(comparison.describe_side(side, args.target))
        print("", *comparison.describe_machine(), sep="\n")
        rows = [comparison.judge(side) for side in comparison.others]
        for row in rows:
            print(f"{row['side']} needs {row['ratio']:.3f} of the time of {comparison.base.name} at equal "
                  f"loss ({row['low']:.3f} to {row['high']:.3f}, {row['pairs']} pairs): {row['verdict']}")
        if args.json:
            content = json.dumps(dict(base=comparison.base.name, sides=rows), indent=1)
            gpt.write_atomic(args.json, f"{content}\n".encode())
        if args.plot:
            comparison.draw(args.plot)
        return 0

    return run_guarded(body, "interrupted. The same command goes on with the next run")


if __name__ == "__main__":
    sys.exit(main())
