#!/usr/bin/env python3
"""Is my change better? Compare versions of the training by pairs of runs on this machine.

    ./run.sh tools/compare.py HEAD train_gpt.py                   # what I edited, against the last commit
    ./run.sh tools/compare.py laptop 'laptop --matrix_lr=0.03'    # two settings
    ./run.sh tools/compare.py laptop --parts                      # without each of its parts
    ./run.sh tools/compare.py A B -- --num_iterations=60          # options after -- are for all
    ./run.sh tools/compare.py records/TRACK/NEWEST train_gpt.py --record=my_idea    # leave a record

A side is a script, the folder of a record, a git revision, a preset or its json. In quotes options may
follow it: 'train_gpt.py --preset=smoke --track=mine'. They win over the options after --. The first side is
the base. All others are compared with it.

A pair is one run of each side with one seed, in random order, one after the other. ONE FIGURE DECIDES: the
seconds that a side needs for the base's loss. It is the time of its run, corrected by the difference of the
losses. What a nat is worth follows from runs of the base with 0.9 and 1.1 of its steps, in the first three
pairs. These also show the noise of this machine.

It stops when it is decided. After each pair from the 3rd to the 12th, a t-test of the logarithms of the
ratios is made at 0.1 %, for several sides with Holm's correction. Ten looks at 0.1 % have an error of at
most 1 % together. Finished runs are kept in logs/compare: the same command goes on.

--record makes all pairs, and leaves a record of the second side. The first side must be the folder of the
record before it. The folder against_BASE in the new one has the runs of the base. NPROC=8 runs each side on
eight GPUs.
"""

import contextlib
import functools
import hashlib
import json
import math
import operator
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
    find_run_sh,
    keep_options,
    list_visible,
    note,
    output_file,
    require_packages,
    run_guarded,
    run_training,
    warn,
)

FIRST_LOOK, MOST_PAIRS, ERROR = 3, 12, 0.01  # error: of all looks together


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("sides", nargs="+", help="the base, and what is compared with it")
    parser.add_argument("--parts", action="store_true", help="the base without each of its parts")
    parser.add_argument("--pairs", type=int, default=MOST_PAIRS, choices=range(2, MOST_PAIRS + 1),
                        metavar=f"2..{MOST_PAIRS}", help="most pairs (default %(default)s)")
    parser.add_argument("--first_seed", type=at_least(0), default=0,
                        help="seed of the first pair (default %(default)s)")
    parser.add_argument("--target", type=at_least(0, float), help="also the time to this validation loss")
    parser.add_argument("--record", metavar="NAME", help="leave a record of the second side. The first side "
                        "is the folder of the record before it")
    parser.add_argument("--json", type=output_file, help="file for the figures")
    parser.add_argument("--plot", type=output_file, help="file for a picture of the curves (svg)")
    return parser


def split_words() -> tuple[list[str], list[str]]:
    """The words of the command line before -- and after it."""
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


if __name__ == "__main__":
    make_parser().parse_args(split_words()[0])  # help and typos do not wait for PyTorch

with require_packages():
    import scipy.stats  # noqa: F401  # results.py imports it later

    import train_gpt as gpt
    from tools import results
    from tools.results import estimate

SCALES = (0.9, 1.1)  # of the base's steps, for the worth of a nat
OWN_OPTIONS = {"seed", "out", "record", "resume"}
GPU_QUERY = "clocks.sm,temperature.gpu,clocks_throttle_reasons.active"
UNLINKED = {"train_gpt.py", "logs", "records", "checkpoints", ".git"}  # of the project, in a run's folder


class Side(NamedTuple):
    """What is compared: a script, and its options."""

    name: str
    source: bytes
    options: tuple[str, ...]


class Run(NamedTuple):
    """The figures of a finished run."""

    seconds: float  # of training
    loss: float
    steps: int
    step_ms: float  # without the first step
    processor: float  # seconds of all threads, with the setup
    switches: int  # voluntary context switches
    others: float  # cores that other processes have used
    load: tuple[float, float]  # load average before and after
    clock: float  # MHz of the processor, or of a GPU's multiprocessors. The mean over the run
    celsius: float  # the most of a GPU, nan without
    throttled: int  # bits of the reasons of GPUs
    choices: dict  # of the run: dtype, fast forms, threads, ...
    val_points: list  # [step, loss, milliseconds]
    run_id: str


# ---- sides ------------------------------------------------------------------------------------------------

def read_side(text: str, common: list[str]) -> Side:
    """A side of the command line. RecordError if it is none. common: options of all sides."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RecordError(f"{text}: {error}") from None
    if not words:
        raise RecordError("a side is empty: give a script, record, revision or preset")
    word, options = "", words
    if not words[0].startswith("-"):
        word, *options = words
    path = Path(word)
    preset = []
    source = (ROOT / "train_gpt.py").read_bytes()
    if word in gpt.PRESETS or (ROOT / f"presets/{word}.json").exists():
        preset = [f"--preset={word}"]
    elif word and path.is_dir() and list_visible(path, "*.json"):
        result = results.read_record(path).results[0]
        source = results.find_script(path).read_bytes()
        preset = keep_options(result["argv"], results.DROPPED | OWN_OPTIONS)
        if "key" in result:
            preset = [f"--preset={path.resolve() / result['run_id']}.json"]
    elif word and path.is_file() and path.suffix == ".json":
        preset = [f"--preset={path.resolve()}"]
    elif word and path.is_file():
        source = path.read_bytes()
    elif word:
        shown = subprocess.run(["git", "show", f"{word}:train_gpt.py"], cwd=ROOT, capture_output=True)
        if shown.returncode:
            raise RecordError(f"{word} is no preset, script, folder of a record or git revision")
        source = shown.stdout
    if any(option.startswith("--preset=") for option in preset):
        common = [option for option in common if not option.startswith("--preset=")]
    options = [*preset, *common, *options]  # the last one of a name wins
    for option in options:
        name = option.removeprefix("--").partition("=")[0].replace("-", "_")
        if name in OWN_OPTIONS:
            raise RecordError(f"--{name} is no option of a side of compare.py")
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


def read_clocks() -> list[tuple[float, float, int]]:
    """(MHz, degrees Celsius, bits of throttle reasons) of each GPU, or else MHz of the processor's cores."""
    try:
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
            lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
            rows = [line.split(", ") for line in lines]
            return [(float(clock), float(celsius), int(reasons, 16)) for clock, celsius, reasons in rows]
        found = re.findall(r"^cpu MHz\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        return [(float(clock), math.nan, 0) for clock in found]
    except (OSError, ValueError):
        return []


def read_config(side: Side) -> str:
    """The config of a side as JSON. RecordError if its script refuses its options, before hours of runs."""
    if side.source == (ROOT / "train_gpt.py").read_bytes():
        try:
            with contextlib.chdir(ROOT):
                cfg = gpt.fit_steps(gpt.make_config(gpt.parse_argv(list(side.options))))
            return json.dumps(gpt.plain_dict(cfg))
        except gpt.RunError as error:
            raise RecordError(f"{side.name}: {error}") from None
    with tempfile.TemporaryDirectory() as place:
        script = make_place(side, Path(place))
        command = [sys.executable, str(script), *side.options, "--print_config"]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    if done.returncode or not done.stdout.startswith("{"):
        *_, line = done.stderr.strip().splitlines() or ["this is no train_gpt.py"]
        raise RecordError(f"{side.name}: {line.removeprefix('train_gpt.py: error: ')}")
    return done.stdout


def read_num_ranks() -> int:
    text = os.environ.get("NPROC") or "1"
    if not re.fullmatch("[1-9][0-9]*", text):
        raise RecordError(f"NPROC={text}: give the number of processes, 1 or more")
    return int(text)


def make_place(side: Side, place: Path) -> Path:
    """A folder with the script and the files of the project. Returns the script."""
    script = place / "train_gpt.py"
    script.write_bytes(side.source)
    (place / "records").mkdir()
    (place / "records" / "presets").symlink_to(ROOT / "presets")  # where older scripts look
    for entry in ROOT.iterdir():
        if entry.name not in UNLINKED:
            (place / entry.name).symlink_to(entry)
    return script


def train(side: Side, seed: int, extra: list[str], folder: Path, show: Callable[[str], None]) -> Run:
    """One run of a side, as a process of its own. RecordError if it fails. folder gets its json and log, and
    show() the step."""
    with tempfile.TemporaryDirectory() as place:
        script = make_place(side, Path(place))
        num_ranks = read_num_ranks()
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        command = [sys.executable, *(torchrun if num_ranks > 1 else []), str(script), *side.options, *extra,
                   f"--seed={seed}"]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "cache")}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = read_busy_seconds()
        load = os.getloadavg()[0]
        clocks = []
        started = time.perf_counter()

        def observe(step: str) -> None:
            clocks.extend(read_clocks())
            show(step)

        done = run_training(command, Path(place), observe, cwd=place, env=environment)
        wall = time.perf_counter() - started
        busy = read_busy_seconds() - busy
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [""]
            own = [line for line in lines if line.startswith("train_gpt.py: ")] or lines
            line = own[-1].removeprefix("train_gpt.py: error: ")
            if "Traceback" in done.stderr:
                (folder / "error.txt").write_text(done.stderr)
                line += f" (the traceback is in {folder / 'error.txt'})"
            raise RecordError(f"{side.name}, seed {seed} ends with status {done.returncode}: {line}")
        (path,) = list_visible(Path(place), "logs/*.json")
        log = path.with_suffix(".txt")
        result, lines = json.loads(path.read_text()), log.read_text()
        for file in (log, path):
            shutil.copy(file, folder)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    times = [float(ms) for ms in re.findall(r"^step:\d+/\d+ train_time:([\d.]+)ms", lines, re.MULTILINE)]
    return Run(
        *results.Finish.read(result), step_ms=(times[-1] - times[0]) / max(1, len(times) - 1),
        processor=processor, switches=after.ru_nvcsw - before.ru_nvcsw,
        others=max(0.0, busy - processor) / wall, load=(load, os.getloadavg()[0]),
        clock=statistics.mean(clock for clock, *_ in clocks) if clocks else math.nan,
        celsius=max((celsius for _, celsius, _ in clocks), default=math.nan),
        throttled=functools.reduce(operator.or_, (reasons for *_, reasons in clocks), 0),
        choices={**result.get("choices", {}), "threads": result["hardware"].get("threads")},
        val_points=result["val_points"], run_id=path.stem)


class Runs:
    """Finished runs, kept in a file."""

    def __init__(self, folder: Path):
        self.folder = folder / "logs"  # their json files and logs
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "runs.json"
        self.rows: dict[str, dict] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def get(self, side: Side, seed: int, scale: float = 1.0) -> Run | None:
        """The run of a side with a seed, and with this multiple of its steps."""
        row = self.rows.get(f"{side.name} seed {seed} x{scale:g}")
        return row and Run(**row)

    def add(self, side: Side, seed: int, progress: Progress, scale: float = 1.0) -> None:
        """Make this run, unless it is there."""
        if self.get(side, seed, scale):
            return
        label = f"seed {seed}, {side.name}" + f" with {scale:g} of its steps" * (scale != 1)
        progress.show(label)
        extra = []
        if scale != 1:
            extra = [f"--num_iterations={round(scale * self.get(side, seed).steps)}"]
        if scale > 1 and b"epochs" in side.source:  # the text may be read once
            extra.append("--epochs=2")
        run = train(side, seed, extra, self.folder, lambda step: progress.show(f"{label}, {step}"))
        self.rows[f"{side.name} seed {seed} x{scale:g}"] = run._asdict()
        gpt.write_atomic(self.path, (json.dumps(self.rows, indent=1) + "\n").encode())
        progress.finish(f"{label}: loss {run.loss:.4f} after {run.seconds:.1f} s")


# ---- statistics -------------------------------------------------------------------------------------------

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


# ---- a comparison -----------------------------------------------------------------------------------------

class Comparison:
    """The base against other sides, by pairs of runs."""

    def __init__(self, sides: list[Side], folder: Path, first_seed: int):
        self.base, *self.others = sides
        self.first_seed = first_seed
        self.runs = Runs(folder)
        self.seeds: dict[Side, list[int]] = {side: [] for side in self.others}
        self.decided: set[Side] = set()

    def run_pairs(self, num_pairs: int, runs_all: bool = False) -> None:
        """Run pairs until all sides are decided, at most num_pairs. runs_all: run all of them."""
        order = random.Random(0)  # equal if the command goes on
        seeds = range(self.first_seed, self.first_seed + num_pairs)
        wanted = [(side, seed, 1.0) for side in (self.base, *self.others) for seed in seeds]
        wanted += [(self.base, seed, scale) for scale in SCALES for seed in seeds[:FIRST_LOOK]]
        num_kept = sum(self.runs.get(*run) is not None for run in wanted)
        print(f"at most {len(wanted)} runs. {num_kept} of them are kept in {self.runs.folder}",
              file=sys.stderr, flush=True)
        with Progress(len(wanted), num_kept) as progress:
            for seed in seeds:
                waiting = [side for side in self.others if runs_all or side not in self.decided]
                shuffled = [self.base, *waiting]
                order.shuffle(shuffled)
                for side in shuffled:
                    self.runs.add(side, seed, progress)
                for scale in SCALES if seed < self.first_seed + FIRST_LOOK else ():
                    self.runs.add(self.base, seed, progress, scale)
                for side in waiting:
                    self.seeds[side].append(seed)
                logs = {side: self.list_ratios(side) for side in waiting}
                self.decided |= {waiting[index] for index in decide(list(logs.values()))}
                known = [f"{side.name} {estimate(values).format(3)}" for side, values in logs.items()]
                note(f"pairs so far: {seed - self.first_seed + 1}. {', '.join(known)}")
                if len(self.decided) == len(self.others) and not runs_all:
                    break

    def list_base_runs(self) -> list[tuple[Run, Run, Run]]:
        """The runs of the base in the first pairs, with fewer, all and more steps."""
        seeds = max(self.seeds.values(), key=len)
        return [tuple(self.runs.get(self.base, seed, scale) for scale in (SCALES[0], 1.0, SCALES[1]))
                for seed in seeds[:FIRST_LOOK]]

    def list_pairs(self, side: Side) -> list[tuple[Run, Run]]:
        return [(self.runs.get(self.base, seed), self.runs.get(side, seed)) for seed in self.seeds[side]]

    def list_ratios(self, side: Side) -> list[float]:
        """For each pair: logarithm of the ratio of the seconds that the side needs for the base's loss."""
        rate = results.find_nat_rate([(fewer, more) for fewer, _, more in self.list_base_runs()])
        return results.list_ratios(self.list_pairs(side), rate)

    def measure(self, side: Side, target: float | None) -> dict[str, list[float]]:
        """What a side has in place of the base: [mean, low, high] of ratios, and of the difference of the
        loss. Times to the target are of the pairs that reach it."""
        pairs = self.list_pairs(side)
        logs = {"seconds at equal loss": self.list_ratios(side)}
        for name, field in (("seconds", "seconds"), ("a step", "step_ms"), ("processor time", "processor"),
                            ("context switches", "switches")):
            logs[name] = [math.log(max(1e-9, getattr(run, field)) / max(1e-9, getattr(base, field)))
                          for base, run in pairs]
        if target is not None:
            crossings = [[results.find_crossing(run._asdict(), target) for run in pair] for pair in pairs]
            found = [math.log(other[1] / base[1]) for base, other in crossings if base and other]
            logs[f"seconds to {target:g}, {len(found)} pairs"] = found
        measured = {name: [*map(math.exp, estimate(values)[1:4])] if values else []
                    for name, values in logs.items()}
        measured["loss, difference"] = [*estimate([run.loss - base.loss for base, run in pairs])[1:4]]
        return measured

    def describe_machine(self) -> list[str]:
        """Lines about the noise, and about what disturbed the runs."""
        squares = []
        for runs in self.list_base_runs():  # equal steps, so the spread is noise
            mean = statistics.mean(run.step_ms for run in runs)
            squares.append(statistics.variance([run.step_ms / mean for run in runs]))
        pairs = [pair for side in self.others for pair in self.list_pairs(side)]
        runs = list({run.run_id: run for pair in pairs for run in pair}.values())  # each run once
        loads = [load for run in runs for load in run.load]
        clocks = [run.clock for run in runs if math.isfinite(run.clock)]
        lines = [f"noise: the time of a step varies by {math.sqrt(statistics.mean(squares)):.1%} (standard "
                 "deviation) between the runs of the base with 0.9, 1 and 1.1 of its steps",
                 f"load average {min(loads):.1f} to {max(loads):.1f}"]
        if clocks:
            lines.append(f"clock {min(clocks):.0f} to {max(clocks):.0f} MHz")
        degrees = [run.celsius for run in runs if math.isfinite(run.celsius)]
        if degrees:
            throttled = functools.reduce(operator.or_, (run.throttled for run in runs))
            lines.append(f"GPU at most {max(degrees):.0f} degrees Celsius, throttle reasons {throttled:#x}")
        disturbed = [run.others for run in runs if run.others > 0.2]
        if disturbed:
            lines.append(f"in {len(disturbed)} of the {len(runs)} runs of the pairs other processes used up "
                         f"to {max(disturbed):.1f} cores")
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
        ratio, low, high = map(math.exp, found[1:4])
        return dict(side=side.name, ratio=ratio, low=low, high=high, pairs=found.n, verdict=verdict)

    def draw(self, path: Path) -> None:
        """Validation loss against seconds of training, a line for each run."""
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        base_seeds = max(self.seeds.values(), key=len)
        for number, (side, seeds) in enumerate({self.base: base_seeds, **self.seeds}.items()):
            for seed in seeds:
                points = self.runs.get(side, seed).val_points
                axes.plot([ms / 1000 for _, _, ms in points], [loss for _, loss, _ in points], alpha=0.6,
                          color=f"C{number % 10}", linestyle=("-", "--", ":", "-.")[number // 10 % 4],
                          label=side.name if seed == self.first_seed else None)
        axes.set(xlabel="seconds of training", ylabel="validation loss")
        axes.legend()
        figure.savefig(path, bbox_inches="tight")


    def report(self, target: float | None = None) -> dict:
        """The figures for --json, which a record keeps of other machines."""
        run = self.runs.get(self.base, self.first_seed)
        result = results.read_result(self.runs.folder / f"{run.run_id}.json")
        sides = [{**self.judge(side), "measured": self.measure(side, target)} for side in self.others]
        return dict(date=time.strftime("%Y-%m-%d", time.gmtime()), machine=results.format_machine(result),
                    base=self.base.name, sides=sides)

    def leave_record(self, folder: Path, base: Path) -> None:
        """Make the folder of a record: the second side, and the runs of the base in against_BASE."""
        (side,) = self.others
        pairs = self.list_pairs(side)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as place:
            made = Path(place, folder.name)
            against = made / f"against_{base.resolve().name}"
            against.mkdir(parents=True)
            (made / "train_gpt.py").write_bytes(side.source)
            name = results.read_result(self.runs.folder / f"{pairs[0][1].run_id}.json")["preset"]
            while (preset := ROOT / "presets" / f"{name}.json").exists():  # the script looks beside itself
                (made / "presets").mkdir(exist_ok=True)
                shutil.copy(preset, made / "presets")
                name = json.loads(preset.read_text()).get("parent")
            for target, runs in ((made, [run for _, run in pairs]),
                                 (against, [run for row in self.list_base_runs() for run in row]
                                  + [run for run, _ in pairs[FIRST_LOOK:]])):
                for run in runs:
                    for suffix in (".txt", ".json"):
                        shutil.copy(self.runs.folder / f"{run.run_id}{suffix}", target)
            made.rename(folder)


def compare_sides(sides: list[Side], num_pairs: int, first_seed: int = 0, record: str | None = None
                  ) -> Comparison:
    """Run the pairs of sides. For a record all of them, and without runs of another comparison."""
    machine = json.dumps(gpt.describe_machine(gpt.Runtime()), sort_keys=True)
    warn(f"reading the options of {len(sides)} sides")
    configs = [read_config(sides[0])]
    steps = json.loads(configs[0]).get("num_iterations")
    if steps and len({round(scale * steps) for scale in (1, *SCALES)}) < 3:
        raise RecordError(f"{sides[0].name}: --num_iterations={steps} is too few for runs with 0.9 and 1.1 "
                          "of the steps: give 5 or more")
    configs += map(read_config, sides[1:])
    counts = [json.loads(config).get("val_tokens") for config in configs]
    for side, count in zip(sides, counts):
        if count != counts[0]:
            raise RecordError(f"{side.name} has val_tokens={count}, and {sides[0].name} has {counts[0]}: "
                              "give both one --val_tokens, or their losses cannot be compared")
    facts = [sides, configs, machine, read_num_ranks()]
    if record:
        facts += [record, num_pairs, first_seed]
    digest = hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:12]
    folder = ROOT / "logs" / "compare" / digest
    comparison = Comparison(sides, folder, first_seed)
    comparison.run_pairs(num_pairs, runs_all=bool(record))
    return comparison


def find_record_folder(name: str, base: Path, side: Side) -> Path:
    """The folder of a new record of a side against a base. RecordError if it exists, if the base is no
    record, or if their tracks differ."""
    track = results.read_record(base).results[0]["track"]
    if base.resolve().parents[1].name != "records" or base.resolve().parent.name != track:
        raise RecordError(f"--record={name}: {base} is not records/{track}/RECORD")
    own_track = json.loads(read_config(side))["track"]
    if own_track != track:
        raise RecordError(f"--record={name}: {side.name} has track {own_track}, and {base} has {track}")
    cfg = gpt.make_config(dict(preset="smoke", record=name, track=track, out=str(base.resolve().parents[2])))
    folder = base.resolve().parent / gpt.find_result_folder(cfg).name
    if folder.exists():
        raise RecordError(f"--record={name}: {folder} exists: give another name")
    return folder


def main() -> int:
    words, common = split_words()
    parser = make_parser()
    args = parser.parse_args(words)

    def body() -> int:
        sides = [read_side(text, common) for text in args.sides]
        if args.parts:
            sides += list_parts(sides[0])
        names = [side.name for side in sides]
        if len(names) < 2 or len(set(names)) < len(names):
            raise RecordError(f"{names}: give two or more sides with different names, or --parts")
        folder = None
        if args.record:
            if len(sides) != 2:
                raise RecordError(f"--record={args.record}: give two sides, the old record and the new one")
            if not Path(args.sides[0]).is_dir():
                raise RecordError(f"--record={args.record}: {args.sides[0]} is no folder: the first side "
                                  "must be the folder of the record before the new one")
            if common:
                raise RecordError(f"--record={args.record}: the old record has its own options: give none "
                                  "after --")
            folder = find_record_folder(args.record, Path(args.sides[0]), sides[1])
        comparison = compare_sides(sides, args.pairs, args.first_seed, args.record)
        report = comparison.report(args.target)
        tables = [row["measured"] for row in report["sides"]]
        print(f"| ratios to the base | {' | '.join(tables[0])} |\n|{'---|' * (1 + len(tables[0]))}")
        for side, table in zip(comparison.others, tables):
            cells = ["{:.4f} ({:.4f} to {:.4f})".format(*row) if row else "" for row in table.values()]
            print(f"| {side.name} | {' | '.join(cells)} |")
        print("", *comparison.describe_machine(), sep="\n")
        if args.json:
            gpt.write_atomic(args.json, f"{json.dumps(report, indent=1)}\n".encode())
        if args.plot:
            comparison.draw(args.plot)
        if folder:
            comparison.leave_record(folder, Path(args.sides[0]))
            print(f"record: {folder}. Check it with {find_run_sh()} tools/validate.py "
                  f"{shlex.quote(str(folder))}")
        for row in report["sides"]:
            print(f"{row['side']} needs {row['ratio']:.3f} of the time of {comparison.base.name} at equal "
                  f"loss ({row['low']:.3f} to {row['high']:.3f}, {row['pairs']} pairs): {row['verdict']}")
        return 0

    return run_guarded(body, "interrupted. Give the same command again to go on")


if __name__ == "__main__":
    sys.exit(main())
