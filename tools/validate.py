"""Test record folders over their seeds.

    ladder=records/laptop/2026-11-21_ladder
    ./run.sh tools/validate.py $ladder/sigmoid_skips
    ./run.sh tools/validate.py $ladder/muon --baseline=$ladder/adamw_rotary

Prints for each folder the number of runs, mean, standard deviation and minimum of the final validation loss,
the one-sided t-test of the mean against the track's target, and the training time. Resumed runs and runs in
which the guard acted are named. --baseline adds the differences to that folder in loss and time, paired by
seed, with 95 % confidence intervals. Both must have run on one corpus. On different machines only the
losses are compared, and the line names the machines' differences.

The exit status is 1 if the mean of a folder is not below the target at p < 0.01. It is 0 if a folder cannot
be tested: one seed, no target, or the record that sets the target.
"""

import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, at_least, require_packages, run_guarded

with require_packages():
    import scipy.stats  # noqa: F401  # results.py imports it later

    from tools import results


def format_record(record: results.Record, target: float | None, sets_target: bool = False
                  ) -> tuple[str, bool | None]:
    """The line of a folder, and whether its mean is below the target at p < 0.01. None without a test."""
    summary = results.summarize(list(record.losses.values()), target)
    spread = "" if summary.n == 1 else f" +- {summary.sd:.4f} (best {min(record.losses.values()):.4f})"
    is_below, verdict = None, "no target yet" if target is None else f"target {target:g}"
    if sets_target:
        verdict = f"sets the target {target:g}, its mean to two decimals, so it is not tested against it"
    elif summary.n == 1:
        verdict += ", one seed: no test possible"
    elif target is not None:
        is_below = summary.p < 0.01
        verdict += f", p = {summary.p:.2g}: {'below' if is_below else 'not shown to be below'}"
    replays = ""
    if record.num_replays:
        replays = f", {record.num_replays} replay{'s' * (record.num_replays > 1)} left out"
    incidents = f" ({record.incidents})" if record.incidents else ""
    return (f"{record.folder}: n = {summary.n}{replays}{incidents}, loss {summary.mean:.4f}{spread}, "
            f"{statistics.mean(record.seconds.values()):.1f} s, {verdict}"), is_below


def format_effect(effect: results.Effect, digits: int) -> str:
    """A difference with its interval and p."""
    if math.isnan(effect.p):
        return f"{effect.mean:+.{digits}f} over {effect.n} seed{'s' * (effect.n > 1)}: no test possible"
    return (f"{effect.mean:+.{digits}f} [{effect.low:+.{digits}f}, {effect.high:+.{digits}f}] over "
            f"{effect.n} seeds, p = {effect.p:.2g}")


def format_comparison(record: results.Record, baseline: results.Record) -> str:
    """The line of a paired comparison. RecordError if the data differ."""
    effect = results.compare(record, baseline)
    time = f"no comparison of times on other machines ({effect.machines})" if effect.machines else (
        f"seconds {format_effect(results.compare(record, baseline, 'times'), 1)}")
    return f"    against {baseline.folder}: loss {format_effect(effect, 4)}, {time}"


def main() -> int:
    """Print a line for each folder."""
    parser = Parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="record folders")
    parser.add_argument("--baseline", type=Path, help="record folder to compare with")
    parser.add_argument("--target", type=at_least(0, float),
                        help="loss to be below (default: the track's)")
    args = parser.parse_args()
    baseline = args.baseline and results.read_record(args.baseline)
    verdicts = []
    for folder in args.folders:
        record = results.read_record(folder)
        target = results.find_own_target(record) if args.target is None else (args.target, False)
        line, is_below = format_record(record, *target)
        verdicts.append(is_below)
        print(line, flush=True)
        if baseline:
            print(format_comparison(record, baseline))
    below, above, untested = map(verdicts.count, (True, False, None))
    print(f"{below} below the target at p < 0.01, {above} not shown to be, {untested} not tested")
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
