"""What the tools share: their command line; reading results, their statistics, running what is missing.

SciPy is imported where it is used: tools that need only the command line run without it.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # train_gpt.py
PUBLISHED_TARGETS = {"track_1": 3.28, "track_2": 2.92}


class RecordError(Exception):
    """Records that cannot be used as asked: the line says which and what to do."""


class Record(NamedTuple):
    """The results of a folder: one script, one config, several seeds."""

    folder: Path
    results: list[dict]  # one for each seed, in their order
    num_replays: int  # further results of the same seeds

    @property
    def name(self) -> str:
        """The folder below records/: laptop/2026-11-21_first, or laptop/2026-11-21_ladder/muon."""
        return self.folder.resolve().relative_to(find_script(self.folder).parents[2]).as_posix()

    @property
    def losses(self) -> dict[int, float]:
        """Final validation loss by seed."""
        return {result["seed"]: result["final_val_loss"] for result in self.results}


def find_script(folder: Path) -> Path:
    """The script of a record folder; that of a rung stands once, in the folder of its ladder."""
    own = folder.resolve() / "train_gpt.py"
    return own if own.exists() else own.parents[1] / "train_gpt.py"


def read_ladder(folder: Path) -> dict[str, dict]:
    """The rungs that a folder's ladder.toml lists, {name: preset, change, has_more_seeds, sets_target};
    empty where it has none."""
    path = folder / "ladder.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}


def load_script(folder: Path) -> ModuleType:
    """The script of a record folder as a module, loaded once; it does nothing at import."""
    path = find_script(folder)
    name = f"_{hashlib.sha256(path.read_bytes()).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def read_result(path: Path) -> dict:
    """The json of a run; older scripts left the type of its activations only in its log."""
    result, log = json.loads(path.read_bytes()), path.with_suffix(".txt")
    chosen = re.search(r"^activations: (\w+)", log.read_text(), re.MULTILINE) if log.exists() else None
    if chosen:
        result["hardware"].setdefault("activations", chosen[1])
    return result


def fail(line: str) -> NoReturn:
    raise RecordError(line)


def leave_out(line: str) -> None:
    """Say which run a tool goes on without."""
    print(f"{Path(sys.argv[0]).name}: left out: {line}", file=sys.stderr)


def read_record(folder: Path, refuse: Callable[[str], None] = fail) -> Record:
    """Read a record folder or a rung's; RecordError if there is none. refuse gets a line for each run that
    is not of the first one's kind, and is left out where that returns."""
    script, kept, paths = find_script(folder), [], sorted(folder.glob("*.json"))
    digest = hashlib.sha256(script.read_bytes()).hexdigest() if script.exists() else None
    for path in paths if digest else ():
        try:
            result = read_result(path)
            misfit = find_misfit(result, kept[0] if kept else result, digest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            misfit = f"holds what is no result ({type(error).__name__}: {error})"
        if not misfit:
            kept.append(result)
            continue
        refuse(f"{folder} {misfit}: {path.name}; put its files into a folder of their own")
    if not kept:
        raise RecordError(f"{folder} holds no result: give a folder that a run with --record has left, "
                          "or that of a rung")
    by_seed: dict[int, dict] = {}
    for result in kept:
        by_seed.setdefault(result["seed"], result)
    return Record(folder, [by_seed[seed] for seed in sorted(by_seed)], len(kept) - len(by_seed))


def find_misfit(result: dict, first: dict, digest: str) -> str:
    """Why a run is not of the kind of a folder's first run and script; empty where it is."""
    if result["script_sha256"] != digest:
        return f"mixes scripts: seed {result['seed']} is of another train_gpt.py than the folder's"
    for what, facts in (("configs", settings), ("machines", describe_machine), ("data", describe_data)):
        here, there = facts(result), facts(first)
        others = sorted(key for key in here | there if here.get(key) != there.get(key))
        if others:
            return (f"mixes {what}: seed {result['seed']} differs from seed {first['seed']} in "
                    f"{', '.join(others[:5])}")
    return ""


def describe_data(result: dict) -> dict:
    return {"corpus_fingerprint": result.get("corpus_fingerprint")}


def settings(result: dict) -> dict:
    """What runs of one record share: the config but for the seed and for what a run leaves behind."""
    free = {"seed", "records_dir", "logs_dir", "checkpoint_dir", "checkpoint_every", "resume", "time_limit",
            "telemetry_every", "print_every"}  # the last is of older scripts
    return {name: value for name, value in result["config"].items() if name not in free}


def read_track(track: str, records_dir: Path = RECORDS, refuse: Callable[[str], None] = fail
               ) -> list[Record]:
    """All records of a track (of all tracks: *), rungs among them, by folder name; refuse as in
    read_record(), for a whole folder too."""
    paths, records = [*records_dir.glob(f"{track}/*/*.json"), *records_dir.glob(f"{track}/*/*/*.json")], []
    for folder in sorted({path.parent for path in paths}):
        try:
            records.append(read_record(folder, refuse))
        except RecordError as error:
            refuse(str(error))
    return records


def find_target(track: str, records: list[Record]) -> float | None:
    """The loss to reach: published, or the mean of the runs that set it, to two decimals."""
    if track in PUBLISHED_TARGETS:
        return PUBLISHED_TARGETS[track]
    setting = find_setting(records)
    return round(statistics.mean(setting.losses.values()), 2) if setting else None


def find_setting(records: list[Record]) -> Record | None:
    """The record that sets its track's target: the rung marked sets_target, or named target, in the newest
    ladder that has either."""
    return next((record for record in reversed(records) if record.folder.name == "target"
                 or read_ladder(record.folder.parent).get(record.folder.name, {}).get("sets_target")), None)


def find_own_target(record: Record) -> float | None:
    """The loss for a record to reach: its ladder's, where that has a target, or its track's."""
    track, folder = record.results[0]["track"], record.folder.resolve()
    records = read_track(track, find_script(folder).parents[2], leave_out)
    siblings = [other for other in records if other.folder.resolve().parent == folder.parent]
    return find_target(track, siblings if find_setting(siblings) else records)


class Summary(NamedTuple):
    """Statistics of a sample."""

    n: int
    mean: float
    sd: float  # of one run; nan of one
    p: float  # one-sided t-test: the chance of so low a mean if the true one were the target


def summarize(values: list[float], target: float | None = None) -> Summary:
    """Mean, standard deviation and, against a target, the p of a mean below it."""
    sd = statistics.stdev(values) if len(values) > 1 else math.nan
    p = math.nan
    if target is not None and len(values) > 1:
        from scipy import stats

        p = float(stats.ttest_1samp(values, target, alternative="less").pvalue)
    return Summary(len(values), statistics.mean(values), sd, p)


class Effect(NamedTuple):
    """A paired difference over the seeds two records share, with its 95 % confidence interval."""

    n: int
    mean: float
    low: float
    high: float
    p: float  # two-sided


def compare(ours: dict[int, float], theirs: dict[int, float]) -> Effect:
    """Ours minus theirs, paired by seed; bounds are nan for a single pair."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        raise RecordError("the two records share no seed: run the same seeds of both")
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    mean = statistics.mean(differences)
    if len(seeds) == 1:
        return Effect(1, mean, math.nan, math.nan, math.nan)
    from scipy import stats

    test = stats.ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(0.95)
    return Effect(len(seeds), mean, float(interval.low), float(interval.high), float(test.pvalue))


def find_crossing(result: dict, target: float) -> tuple[float, float] | None:
    """(step, seconds) at which a run's validation loss falls to the target, interpolated; or None."""
    points = result["val_points"]
    for (step0, loss0, ms0), (step1, loss1, ms1) in zip(points, points[1:]):
        if loss1 <= target < loss0:
            share = (loss0 - target) / (loss0 - loss1)
            return step0 + share * (step1 - step0), (ms0 + share * (ms1 - ms0)) / 1000
    return None


def describe_machine(result: dict) -> dict:
    """What must agree for times to be comparable, and on a CPU for losses to be the same bits."""
    keys = ("device", "ranks", "cpu", "threads", "gpu", "activations", "simd")
    hardware = {key: result["hardware"].get(key) for key in keys}
    return {**hardware, "torch": result["versions"]["torch"]}


def run_missing(runs: list[tuple[str, int, list[str]]], find_done: Callable[[str], set[int]],
                source: bytes, program: str, cwd: Path = ROOT, keep: Callable[[str], None] | None = None,
                jobs: int = 1) -> None:
    """Run a script for every (name, seed, options) whose seed is not done yet, with a bar.

    The script is run from a copy: an edit meanwhile must not change the later runs. After each run its name
    goes to keep. So many jobs at a time share the processors: for losses, not for times.
    """
    missing = [run for run in runs if run[1] not in find_done(run[0])]
    environment, has_failed = dict(os.environ), threading.Event()
    if jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))

    def run(name: str, seed: int, options: list[str]) -> None:
        if has_failed.is_set():  # nothing runs after that
            return
        command = [sys.executable, str(script), *options, f"--seed={seed}"]
        bar.set_description(f"{name}, seed {seed}")
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
        if done.returncode:
            has_failed.set()
            raise RecordError(f"{shlex.join(command)} ended with status {done.returncode}; the same command "
                              f"of {program} goes on from here. It said: {' '.join(done.stderr.split())}")
        if keep:
            keep(name)
        bar.update()

    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(missing), unit="run", disable=None) as bar:
        script = Path(folder, "train_gpt.py")
        script.write_bytes(source)
        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(run, *one) for one in missing]
            try:
                for future in futures:
                    future.result()
            finally:
                pool.shutdown(cancel_futures=True)


class Parser(argparse.ArgumentParser):
    """A command line whose help is a module's docstring, and whose errors are one line."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}: see --help\n")


def at_least(low: float, kind: type = int) -> Callable[[str], float]:
    """A type of an option: a number of this kind that is not below the least one."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not value >= low:
            raise argparse.ArgumentTypeError(
                f"{text} is not a {'whole ' if kind is int else ''}number of at least {low:g}")
        return value

    return parse


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; RecordError names it where that fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be written ({error.strerror}): choose another place, make its "
                          "folder, or free space") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def run_guarded(body: Callable[[], int | None]) -> int:
    """Do it; returns the exit status. What concerns the user ends with status 2 and one line, a reader that
    has enough of the output, such as head, with 141 and none, as SIGPIPE would end it."""
    status, line = 0, ""
    try:
        try:
            status = body() or 0
        except SystemExit as end:  # argparse's: of --help, or with its line printed
            status = end.code
        sys.stdout.flush()
    except RecordError as error:
        status, line = 2, str(error)
    except BrokenPipeError:
        status = 141
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        status, line = 2, f"{name}{error.strerror}: check the path, its permissions and the space left"
    except UnicodeError as error:
        status, line = 2, f"{error}: give names and files in UTF-8, and set PYTHONIOENCODING=utf-8"
    if line:
        print(f"{Path(sys.argv[0]).name}: error: {line}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:  # what is left cannot be written; the interpreter would try again, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status
