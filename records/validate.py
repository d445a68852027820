"""Is it a record? Statistics of record folders over their seeds.

    ladder=records/laptop/2026-11-21_ladder
    python records/validate.py $ladder/sigmoid_skips
    python records/validate.py $ladder/muon --baseline=$ladder/adamw_rotary

Per folder: runs, mean, standard deviation and best of the final validation loss, the one-sided t-test of the
mean against the track's target, training time. With --baseline also the difference to that folder, paired by
seed, with its 95 % confidence interval; both must have run on the same machine. Exits with status 1 where a
folder's mean is not below the target at p < 0.01; where there is nothing to test, of one seed or without a
target, it says so and ends with 0.
"""

import statistics
import sys
from pathlib import Path

import results


def format_record(record: results.Record, target: float | None) -> tuple[str, bool | None]:
    """The line of a folder, and whether it is below its target at p < 0.01, None where nothing is tested."""
    summary = results.summarize(list(record.losses.values()), target)
    seconds = statistics.mean(result["train_time_ms"] / 1000 for result in record.results)
    is_claim, spread = None, f" +- {summary.sd:.4f} (best {min(record.losses.values()):.4f})"
    verdict = "no target yet" if target is None else f"target {target:g}"
    if summary.n == 1:
        verdict, spread = f"{verdict}; one seed: no test possible", ""
    elif target is not None:
        is_claim = summary.p < 0.01
        verdict += f", p = {summary.p:.2g}: {'below' if is_claim else 'not shown to be below'}"
    replays = f", {record.num_replays} replays left out" if record.num_replays else ""
    return (f"{record.folder}: n = {summary.n}{replays}, loss {summary.mean:.4f}{spread}, {seconds:.1f} s; "
            f"{verdict}"), is_claim


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
    test = "over one seed: no test possible" if effect.n == 1 else (
        f"[{effect.low:+.4f}, {effect.high:+.4f}] over {effect.n} seeds, p = {effect.p:.2g}")
    return (f"    against {baseline.folder}: loss {effect.mean:+.4f} {test}; {ratio:.3f} of its time")


def main() -> int:
    """Print a line for each folder."""
    parser = results.Parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="record folders")
    parser.add_argument("--baseline", type=Path, help="record folder to compare with")
    parser.add_argument("--target", type=results.at_least(0, float),
                        help="loss to be below, instead of the track's")
    args = parser.parse_args()
    records = [results.read_record(folder) for folder in args.folders]
    baseline = args.baseline and results.read_record(args.baseline)
    status = 0
    for record in records:
        target = results.find_own_target(record) if args.target is None else args.target
        line, is_below = format_record(record, target)
        status |= is_below is False
        print(line)
        if baseline:
            print(format_comparison(record, baseline))
    return int(status)


if __name__ == "__main__":
    sys.exit(results.run_guarded(main))
