"""Shared by the tools for records: results, their comparison and statistics, and missing runs.

Results of older scripts are read, too. Functions that need SciPy import it themselves, so replay.py runs
without it.
"""

import hashlib
import importlib.util
import json
import math
import re
import shlex
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import train_gpt as gpt
from tools.common import ROOT, Progress, RecordError, list_visible, run_training, warn

RECORDS = ROOT / "records"
PUBLISHED_TARGETS = {"track_1": 3.28, "one_gpu": 3.28, "track_2": 2.92, "shakespeare": 1.4697}
DROPPED = {"resume", "time_limit", "checkpoint_every", "tracker"}  # options that no tool repeats
FACTS = ("seed", "track", "config", "hardware", "versions", "train_time_ms")  # that each result has
MACHINE_FIELDS = ("device", "ranks", "cpu", "threads", "gpu", "simd")
# Options that change no weight, loss or time. The first ones are of older scripts
RESTART_OPTIONS = {f"options.{name}" for name in (
    "records_dir", "logs_dir", "checkpoint_dir", "save_model", "time_limit", "print_every", *gpt.NOT_IN_KEY)}
# {kind of comparison: entries of identify() that may differ}. "options" stands for all options.NAME
MAY_DIFFER = {
    "record": {*RESTART_OPTIONS, "options.seed"},  # runs of one record
    "replay": {*RESTART_OPTIONS, "options.record"},  # a result as a preset leaves it out
    "base": {*RESTART_OPTIONS, "options.record", "options.seed", "options.num_iterations", "options.epochs",
             "machine", "choices"},  # a record's runs, and those with which a claim against it was measured
    "losses": {"options", "script", "choices", "machine"},  # losses of two records
    "times": {"options", "script", "choices"},  # times of two records
}


class Record(NamedTuple):
    """The results of a folder: one script, one config, several seeds."""

    folder: Path
    results: list[dict]  # one per seed, in order of the seeds
    num_replays: int  # further results of these seeds

    @property
    def name(self) -> str:
        """The folder below records/, as laptop/2026-11-21_first or laptop/2026-11-21_ladder/muon."""
        return self.folder.resolve().relative_to(find_script(self.folder).parents[2]).as_posix()

    @property
    def losses(self) -> dict[int, float]:
        """Final validation loss by seed."""
        return {result["seed"]: result["final_val_loss"] for result in self.results}

    @property
    def seconds(self) -> dict[int, float]:
        """Training time by seed."""
        return {result["seed"]: result["train_time_ms"] / 1000 for result in self.results}

    @property
    def incidents(self) -> str:
        """Runs that were resumed and runs in which the guard acted, as 'seed 1 resumed at [4]'."""
        found = []
        for result in self.results:
            if result.get("resumed_at"):
                found.append(f"seed {result['seed']} resumed at {result['resumed_at']}")
            if result.get("guard_actions"):
                found.append(f"seed {result['seed']} with {result['guard_actions']} guard actions")
        return ", ".join(found)


def find_script(folder: Path) -> Path:
    """The script of a record folder. All rungs of a ladder, and runs of an ablation, share one above."""
    places = [place / "train_gpt.py" for place in (folder.resolve(), *folder.resolve().parents[:2])]
    return next(filter(Path.exists, places), places[1])


def read_ladder(folder: Path) -> dict[str, dict]:
    """The rungs of a folder's ladder.toml as {name: preset, change, has_more_seeds, sets_target}. Empty if
    the folder has none. One without a change is no rung: it only sets the target."""
    path = folder / "ladder.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}


def load_script(folder: Path) -> ModuleType:
    """Import the script of a record folder once. The import has no side effects."""
    path = find_script(folder)
    name = f"_{hashlib.sha256(path.read_bytes()).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def identify(run: dict) -> dict[str, Any]:
    """The identity of a run as one flat dict: script, data, options.NAME, machine.NAME, choices.NAME.

    run: a result of any script. Missing entries are left out. Older scripts had a flat config.
    """
    hardware, versions, config = run.get("hardware", {}), run.get("versions", {}), run.get("config", {})
    options = {name: value for name, value in gpt.flatten_groups(config).items() if name != "derived"}
    old_choices = {"dtype": hardware["activations"]} if "activations" in hardware else {}
    parts = dict(
        options=options,
        machine={**{name: hardware[name] for name in MACHINE_FIELDS if name in hardware},
                 **{name: versions[name] for name in ("torch", "cuda", "cudnn") if name in versions}},
        choices=run.get("choices", old_choices))
    single = dict(script=run.get("script_sha256"), data=run.get("corpus_fingerprint"))
    return {**{name: value for name, value in single.items() if value},
            **{f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}}


def differences(earlier: dict, now: dict, kind: str) -> list[str]:
    """Differences of two runs outside of MAY_DIFFER[kind], for example 'head_lr was 0.008, here 0.01'.

    Entries that one of the runs lacks are not compared.
    """
    lines, theirs, ours = [], identify(earlier), identify(now)
    for key in [key for key in theirs if key in ours and theirs[key] != ours[key]]:
        part, _, name = key.rpartition(".")
        if not {key, part} & MAY_DIFFER[kind]:
            label, old, new = f"{name} in use" if part == "choices" else name, theirs[key], ours[key]
            lines.append(f"other {name}" if name in ("script", "data", "layers", "stages") else
                         f"{label} was {str(old)[:60]}, here {str(new)[:60]}")
    return lines


def read_result(path: Path) -> dict:
    """Read the json of a run. Older scripts wrote the dtype of the activations only to the log."""
    result, log = json.loads(path.read_bytes()), path.with_suffix(".txt")
    chosen = re.search(r"^activations: (\w+)", log.read_text(), re.MULTILINE) if log.exists() else None
    result.setdefault("run_id", path.stem)
    if chosen and "choices" not in result:
        result["hardware"].setdefault("activations", chosen[1])
    return result


def fail(line: str) -> NoReturn:
    raise RecordError(line)


def leave_out(line: str) -> None:
    """Name a run that the tool ignores."""
    warn(f"left out: {line}")


def read_record(folder: Path, refuse: Callable[[str], None] = fail) -> Record:
    """Read a record folder or a rung. RecordError if it is none.

    refuse() gets a line for each result that does not fit the rest. If it returns, the result is left out.
    """
    script, kept, paths = find_script(folder), {}, list_visible(folder, "*.json")
    has_script = script.exists() and script != ROOT / "train_gpt.py"  # that one lies above logs/
    digest = hashlib.sha256(script.read_bytes()).hexdigest() if has_script else None
    for path in paths if digest else ():
        try:
            result = read_result(path)
            misfit = find_misfit(path.name, result, kept, digest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            misfit = f"holds a file that is no result ({type(error).__name__}: {error})"
        if misfit:
            refuse(f"{folder} {misfit}: {path.name} does not belong to the other files of the folder")
        else:
            kept[path.name] = result
    if not kept:
        fault = "is no record" if folder.exists() else "does not exist"
        if digest and paths:
            fault = "has no run that fits its script"
        raise RecordError(f"{folder} {fault}: give the folder of a run with --record, or of a rung")
    by_seed: dict[int, dict] = {}
    for result in kept.values():
        first = by_seed.setdefault(result["seed"], result)
        if first["final_val_loss"] != result["final_val_loss"]:  # only on a GPU: see find_misfit()
            warn(f"warning: {folder} has two losses of seed {result['seed']}, {first['final_val_loss']!r} "
                 f"and {result['final_val_loss']!r}: the first one counts")
    return Record(folder, [by_seed[seed] for seed in sorted(by_seed)], len(kept) - len(by_seed))


def find_misfit(name: str, result: dict, kept: dict[str, dict], digest: str) -> str:
    """The reason why a result does not belong to a folder with these results and this script, or "".

    name and the keys of kept are the names of files.
    """
    facts = {name: result[name] for name in FACTS}  # a KeyError names a missing one
    seed, loss = facts["seed"], result["final_val_loss"]
    if not math.isfinite(loss):
        return f"holds a diverged run: seed {seed} ends at a loss of {loss}"
    if result["script_sha256"] != digest:
        return f"mixes scripts: seed {seed} ran another train_gpt.py than the folder's"
    for place, other in kept.items():  # all, because facts that one of two results lacks are not compared
        found = differences(other, result, "record")
        if found:
            return (f"mixes runs: {name} (seed {seed}) differs from {place} (seed {other['seed']}): "
                    f"{', '.join(found[:5])}")
        is_equal, is_gpu = other["final_val_loss"] == loss, result["hardware"].get("device") == "cuda"
        if other["seed"] != seed and is_equal:
            return f"holds one run under two seeds: {other['seed']} and {seed} both end at {loss!r}"
        if other["seed"] == seed and not is_equal and not is_gpu:
            return (f"has two losses of seed {seed}, {other['final_val_loss']!r} and {loss!r}, which are "
                    "equal bits on a CPU")
    return ""


def read_track(track: str, records_dir: Path = RECORDS, refuse: Callable[[str], None] = fail
               ) -> list[Record]:
    """All records and rungs of a track (of all tracks: *), by folder name.

    refuse() is called as in read_record(), and for whole folders.
    """
    paths = [path for pattern in ("*/*.json", "*/*/*.json")
             for path in list_visible(records_dir, f"{track}/{pattern}")
             if not re.match("against_|presets$", path.parent.name)]
    records = []
    for folder in sorted({path.parent for path in paths}):
        try:
            record = read_record(folder, refuse)
            check_track(record)
            records.append(record)
        except RecordError as error:
            refuse(str(error))
    return records


def check_track(record: Record) -> None:
    """RecordError if the data of a record are not the data of its track, so that it is not comparable."""
    result = record.results[0]
    data = result.get("corpus_fingerprint")
    if data != gpt.TRACK_DATA.get(result["track"], data):
        raise RecordError(f"{record.folder} has other data than track {result['track']}: give a new --track")
    for name, value in gpt.TRACK_VALIDATION.get(result["track"], {}).items():
        if result["config"].get(name) != value:
            raise RecordError(f"{record.folder} has {name}={result['config'].get(name)}, but track "
                              f"{result['track']} has {value}: give a new --track")


def find_done(folder: Path) -> set[int]:
    """Seeds with a result in a folder."""
    return set(read_record(folder).losses) if list_visible(folder, "*.json") else set()


def find_target(track: str, records: list[Record]) -> float | None:
    """The loss to reach: published, or the mean of the record that sets it, rounded to two decimals."""
    if track in PUBLISHED_TARGETS:
        return PUBLISHED_TARGETS[track]
    setting = find_setting(records)
    return round(statistics.mean(setting.losses.values()), 2) if setting else None


def find_setting(records: list[Record]) -> Record | None:
    """The record that sets the target of its track: marked sets_target in the newest ladder that has one.
    None if the target is published."""
    return next((record for record in reversed(records)
                 if record.results[0]["track"] not in PUBLISHED_TARGETS
                 and read_ladder(record.folder.parent).get(record.folder.name, {}).get("sets_target")), None)


def find_own_target(record: Record) -> tuple[float | None, bool]:
    """(loss for a record to reach, whether the record itself sets it): its ladder's, else its track's.

    RecordError if the record that sets it ran on other data.
    """
    track, folder = record.results[0]["track"], record.folder.resolve()
    records = read_track(track, find_script(folder).parents[2], lambda line: None)
    siblings = [other for other in records if other.folder.resolve().parent == folder.parent]
    setting = find_setting(siblings) or find_setting(records)
    if setting is None:
        return find_target(track, []), False
    if find_differences(record, setting, "losses"):
        raise RecordError(f"{record.folder} ran on other data than {setting.folder}, which sets the target: "
                          "give --target=LOSS")
    return find_target(track, [setting]), setting.folder.resolve() == folder


class Summary(NamedTuple):
    """Statistics of a sample."""

    n: int
    mean: float
    sd: float  # nan if n is 1
    p: float  # one-sided t-test: the probability of a mean this low if the true mean is the target


def summarize(values: list[float], target: float | None = None) -> Summary:
    """Mean, standard deviation and, with a target, p of a mean below it. Equal values have no p."""
    sd = statistics.stdev(values) if len(values) > 1 else math.nan
    p = math.nan
    if target is not None and sd > 0:
        from scipy import stats

        p = float(stats.ttest_1samp(values, target, alternative="less").pvalue)
    return Summary(len(values), statistics.mean(values), sd, p)


class Estimate(NamedTuple):
    """A mean, with its 95 % confidence interval and the two-sided p-value of zero. nan from one value."""

    n: int
    mean: float
    low: float
    high: float
    p: float

    def format(self, digits: int, convert: Callable[[float], float] = math.exp) -> str:
        """The mean and its interval. By default they are logarithms of ratios."""
        mean, low, high = (f"{convert(value):.{digits}f}" for value in self[1:4])
        return f"{mean} ({low} to {high})" if self.n > 1 else mean


def estimate(values: list[float]) -> Estimate:
    """Mean, interval and t-test. Equal values differ from zero with p = 0, or are zero with p = 1."""
    n, mean = len(values), statistics.mean(values)
    if n == 1:
        return Estimate(n, mean, math.nan, math.nan, math.nan)
    error = statistics.stdev(values) / math.sqrt(n)
    if error < 1e-12:
        return Estimate(n, mean, mean, mean, float(abs(mean) < 1e-12))
    from scipy import stats

    margin = float(stats.t.ppf(0.975, n - 1)) * error
    return Estimate(n, mean, mean - margin, mean + margin, float(2 * stats.t.sf(abs(mean) / error, n - 1)))


def find_differences(ours: Record, theirs: Record, kind: str) -> list[str]:
    """differences() between two records. kind: losses or times.

    A dtype chosen by auto counts as a property of the machine: processors of one name differ in whether they
    multiply bfloat16.
    """
    runs = theirs.results[0], ours.results[0]
    found = differences(*runs, kind)
    before, here = (identify(run).get("choices.dtype") for run in runs)
    is_auto = all(run["config"].get("dtype", "auto") == "auto" for run in runs)
    if kind == "times" and is_auto and before and here and before != here:
        found.append(f"the machine's dtype was {before}, here {here}")
    return found


def check_comparable(ours: Record, theirs: Record, kind: str) -> None:
    """RecordError if their losses or times (kind) are not comparable: losses on other data, times also on
    another machine."""
    found = find_differences(ours, theirs, kind)
    ours_tokens, their_tokens = (record.results[0]["config"].get("val_tokens") for record in (ours, theirs))
    if kind == "losses" and ours_tokens != their_tokens:
        found.append(f"val_tokens was {their_tokens}, here {ours_tokens}")
    if found:
        remedy = "run both on one machine" if kind == "times" else "give both equal data and --val_tokens"
        raise RecordError(f"{ours.folder} is not comparable with {theirs.folder} ({', '.join(found)}): "
                          f"{remedy}")


def compare(ours: Record, theirs: Record) -> Estimate:
    """Our final validation losses minus theirs, paired by seed. RecordError if they are not comparable."""
    check_comparable(ours, theirs, "losses")
    seeds = sorted(ours.losses.keys() & theirs.losses.keys())
    if not seeds:
        raise RecordError(f"{ours.folder} and {theirs.folder} share no seed ({sorted(ours.losses)} and "
                          f"{sorted(theirs.losses)}): run one seed of both")
    return estimate([ours.losses[seed] - theirs.losses[seed] for seed in seeds])


def holm(effects: list[Estimate | None]) -> list[float]:
    """Adjust the p-values of a table by Holm's method. nan for rows without a test."""
    values = [effect.p if effect else math.nan for effect in effects]
    order = sorted((row for row, p in enumerate(values) if not math.isnan(p)), key=values.__getitem__)
    adjusted, largest = [math.nan] * len(values), 0.0
    for place, row in enumerate(order):
        adjusted[row] = largest = max(largest, min(1.0, (len(order) - place) * values[row]))
    return adjusted


def judge(effect: Estimate, p: float) -> str:
    """The verdict on a change of the loss, from a p that is adjusted for the whole table by holm()."""
    if math.isnan(p):
        return "one seed: no test possible" if effect.n == 1 else "no test possible"
    if p >= 0.05:
        return "no effect shown"
    return "helps" if effect.mean < 0 else "hurts"


class Finish(NamedTuple):
    """The end of a run."""

    seconds: float
    loss: float
    steps: int

    @classmethod
    def read(cls, result: dict) -> "Finish":
        return cls(result["train_time_ms"] / 1000, result["final_val_loss"], result["val_points"][-1][0])


class Link(NamedTuple):
    """What a record needs of the time of the record before it at equal loss, on one machine."""

    ratio: float
    low: float
    high: float
    pairs: int
    machine: str

    def format(self) -> str:
        """The ratio with its 95 % interval."""
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}, {self.pairs} pairs)"


def check_end(result: dict, path: Path) -> None:
    """RecordError if the curve of a run does not end at its step, loss and time."""
    end = [result["config"]["num_iterations"], result["final_val_loss"], result["train_time_ms"]]
    if result["val_points"][-1] != end:
        raise RecordError(f"{path}: the curve ends at step, loss and milliseconds {result['val_points'][-1]}"
                          f", and the result has {end}")


def find_nat_rate(runs: list[tuple[Any, Any]]) -> float:
    """The change of the logarithm of the time for each nat, at the end of the base: below zero. runs: the
    base with fewer and with more steps. Time is taken as proportional to steps, because steps have no noise.
    RecordError if more steps do not lower the loss."""
    nats = sum(more.loss - fewer.loss for fewer, more in runs)
    if nats >= 0:
        raise RecordError("more steps of the base do not end at a lower loss: give another number of steps")
    return sum(math.log(more.steps / fewer.steps) for fewer, more in runs) / nats


def list_ratios(pairs: list[tuple[Any, Any]], nat_rate: float) -> list[float]:
    """For each pair (base, other): the logarithm of the ratio of the seconds that the other needs for the
    base's loss. A run has seconds and loss."""
    return [math.log(run.seconds / base.seconds) - (run.loss - base.loss) * nat_rate for base, run in pairs]


def find_base(folder: Path) -> Path | None:
    """The record before this one, against which it was measured. None if the folder does not name one.
    RecordError if it is missing."""
    against = next(iter(list_visible(folder, "against_*")), None)
    if against is None:
        return None
    base = folder.parent / against.name.removeprefix("against_")
    if not base.is_dir():
        raise RecordError(f"{folder} was measured against {base}, which does not exist")
    return base


def read_claim(record: Record, base: Record) -> Link | None:
    """The claim of a record: the pairs of its runs and of the base's runs in its folder against_BASE. None
    without such runs. RecordError if they do not belong together."""
    by_seed: dict[int, dict[int, dict]] = {}
    for path in list_visible(record.folder, f"against_{base.folder.name}/*.json"):
        result = read_result(path)
        check_end(result, path)
        found = differences(base.results[0], result, "base")
        found += differences(record.results[0], result, "times")
        if found:
            raise RecordError(f"{path} does not belong to the pairs of {record.folder}: {', '.join(found)}")
        by_seed.setdefault(result["seed"], {})[result["config"]["num_iterations"]] = result
    if not by_seed:
        return None
    runs = {seed: [Finish.read(found[steps]) for steps in sorted(found)] for seed, found in by_seed.items()}
    rate = find_nat_rate([(found[0], found[-1]) for found in runs.values() if len(found) == 3])
    for result in record.results:
        check_end(result, record.folder / f"{result['run_id']}.json")
    ours = {result["seed"]: Finish.read(result) for result in record.results}
    steps = base.results[0]["config"]["num_iterations"]
    whole = {seed: Finish.read(found[steps]) for seed, found in by_seed.items() if steps in found}
    seeds = sorted(whole.keys() & ours)
    if not seeds:
        raise RecordError(f"{record.folder} and the runs of {base.folder} in it share no seed")
    found = estimate(list_ratios([(whole[seed], ours[seed]) for seed in seeds], rate))
    return Link(*map(math.exp, found[1:4]), found.n, format_machine(record.results[0]))


def read_links(record: Record, base: Record) -> list[Link]:
    """The claim of a record, and then what was measured on other machines, by the names of the files."""
    links = []
    for path in list_visible(record.folder, f"against_{base.folder.name}/repeats/*.json"):
        report = json.loads(path.read_text())
        (side,) = report["sides"]
        links.append(Link(*(side[name] for name in Link._fields[:4]), report["machine"]))
    claim = read_claim(record, base)
    return [claim, *links] if claim else links


def find_crossing(result: dict, target: float) -> tuple[float, float] | None:
    """(step, seconds) at which the validation loss of a run falls to the target, or None.

    It is interpolated between validations. Without a pair around the target, it is the last validation if
    its loss is not above the target.
    """
    points = result["val_points"]
    for (step0, loss0, ms0), (step1, loss1, ms1) in zip(points, points[1:]):
        if loss1 <= target < loss0:
            share = (loss0 - target) / (loss0 - loss1)
            return step0 + share * (step1 - step0), (ms0 + share * (ms1 - ms0)) / 1000
    step, loss, milliseconds = points[-1]
    return (step, milliseconds / 1000) if loss <= target else None


def format_machine(result: dict) -> str:
    """The machine of a run: '2 threads of AMD EPYC, bfloat16, PyTorch 2.13.0', or '8 x NVIDIA H100, ...'."""
    facts = identify(result)
    if "machine.gpu" in facts:
        known = [f"{facts['machine.ranks']} x {facts['machine.gpu']}"]
    else:
        known = [f"{facts['machine.threads']} threads of {facts['machine.cpu']}", facts.get("machine.simd")]
    return ", ".join(filter(None, [*known, facts.get("choices.dtype"), f"PyTorch {facts['machine.torch']}"]))


def run_missing(runs: list[tuple[str, int, list[str]]], find_done: Callable[[str], set[int]],
                source: bytes, program: str, cwd: Path = ROOT,
                keep: Callable[[str, int], None] | None = None) -> None:
    """Run a script for each (name, seed, options) whose seed is not done yet, and show the progress.

    A copy of the script runs, so that an edit in the meantime does not change later runs. keep() gets name
    and seed after each run.
    """
    missing = [run for run in runs if run[1] not in find_done(run[0])]
    if len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs are from an earlier call", file=sys.stderr)
    with (tempfile.TemporaryDirectory() as folder,
          Progress(len(runs), len(runs) - len(missing)) as progress):
        script = Path(folder, "train_gpt.py")
        script.write_bytes(source)
        for name, seed, options in missing:
            command = [sys.executable, str(script), *options, f"--seed={seed}"]
            command += ["--save_model=off"] if b"save_model" in source else []  # an option of older scripts
            label = f"{name}, seed {seed}"
            progress.show(label)
            done = run_training(
                command, cwd, lambda step, label=label: progress.show(f"{label}, {step}"), cwd=cwd)
            if done.returncode:
                raise RecordError(f"{shlex.join(command)} ended with status {done.returncode}: "
                                  f"{' '.join(done.stderr.split())} (start {program} again to go on)")
            if keep:
                keep(name, seed)
            progress.finish(label)
