"""Is it a record? Statistics of record folders over their seeds.

    ladder=records/laptop/2026-11-21_ladder
    python records/validate.py $ladder/sigmoid_skips
    python records/validate.py $ladder/muon --baseline=$ladder/adamw_rotary

Per folder: runs, mean, standard deviation and best of the final validation loss, the one-sided t-test of the
mean against the track's target, training time. With --baseline also the difference to that folder, paired by
seed, with its 95 % confidence interval; both must have run on the same machine. Exits with status 1 where a
folder's mean is not below the target at p < 0.01.
"""

import statistics
import sys
from pathlib import Path

import results


def format_record(record: results.Record, target: float | None) -> tuple[str, bool]:
    """The line of a folder, and whether it is below its target at p < 0.01."""
    summary = results.summarize(list(record.losses.values()), target)
    seconds = statistics.mean(result["train_time_ms"] / 1000 for result in record.results)
    is_claim = summary.p < 0.01  # False for nan
    verdict = "no target yet" if target is None else (
        f"target {target:g}, p = {summary.p:.2g}: {'below' if is_claim else 'not shown to be below'}")
    replays = f", {record.num_replays} replays left out" if record.num_replays else ""
    return (f"{record.folder}: n = {summary.n}{replays}, loss {summary.mean:.4f} +- {summary.sd:.4f} "
            f"(best {min(record.losses.values()):.4f}), {seconds:.1f} s; {verdict}"), is_claim


def format_comparison(record: results.Record, baseline: results.Record) -> str:
    """The line of a paired comparison; RecordError where the machines differ."""
    here, there = (results.describe_machine(r.results[0]) for r in (record, baseline))
    if here != there:
        others = ", ".join(f"{key} {here[key]} and {there[key]}" for key in here if here[key] != there[key])
        raise results.RecordError(f"{record.folder} and the baseline ran on different machines ({others}): "
                                  "run both on one")
    effect = results.compare(record.losses, baseline.losses)
    times = [{r["seed"]: r["train_time_ms"] for r in x.results} for x in (record, baseline)]
    ratio = statistics.mean(times[0][seed] / times[1][seed] for seed in times[0].keys() & times[1].keys())
    return (f"    against {baseline.folder}: loss {effect.mean:+.4f} "
            f"[{effect.low:+.4f}, {effect.high:+.4f}] over {effect.n} seeds, p = {effect.p:.2g}; "
            f"{ratio:.3f} of its time")


def main() -> None:
    """Print a line for each folder."""
    parser = results.make_parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="record folders")
    parser.add_argument("--baseline", type=Path, help="record folder to compare with")
    parser.add_argument("--target", type=float, help="loss to be below, instead of the track's")
    args = parser.parse_args()
    records = [results.read_record(folder) for folder in args.folders]
    baseline = args.baseline and results.read_record(args.baseline)
    is_claim = True
    for record in records:
        line, is_below = format_record(record, args.target or results.find_own_target(record))
        is_claim &= is_below
        print(line)
        if baseline:
            print(format_comparison(record, baseline))
    sys.exit(0 if is_claim else 1)


if __name__ == "__main__":
    results.run_guarded(main)
