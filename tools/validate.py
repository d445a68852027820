"""Check the folders of records: what they claim, and that their files belong together.

    ./run.sh tools/validate.py records/laptop/2026-11-28_six_grams
    ./run.sh tools/validate.py records/laptop/2026-11-21_ladder/*/

Prints for each folder the number of runs, mean, standard deviation and minimum of the final validation loss,
the one-sided t-test of the mean against the track's target, and the training time. Resumed runs and runs in
which the guard acted are named. A record with pairs has a second line, what it needs of the time of the
record before it. Script, config, data, log and curve of each of its runs must belong together. Of the runs
of the record before it the script, config, data and machine are compared, and not the logs.

The exit status is 2 if a folder is wrong, after the lines of the others. It is 1 if the mean of a folder is
not below the target at p < 0.01, or if the pairs do not show that a record is faster. It is 0 if a folder
cannot be tested: one seed, no target, no pairs, or the record that sets the target.
"""

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, RecordError, at_least, require_packages, run_guarded, warn


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="record folders")
    parser.add_argument("--target", type=at_least(0, float),
                        help="loss to be below (default: the track's)")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()  # help and typos do not wait for PyTorch

with require_packages():
    import scipy.stats  # noqa: F401  # results.py imports it later

    from tools import results

LOG_RULE = f"\n{'=' * 100}\n"  # below the facts of the run


def check_files(record: results.Record) -> None:
    """RecordError if a log is not that of its result, or the curve not that of the config. read_record() has
    compared the results with the script and with each other."""
    for result in record.results:
        path = record.folder / f"{result['run_id']}.txt"
        results.check_end(result, path.with_suffix(".json"))
        step, loss, milliseconds = result["val_points"][-1]
        config = result["config"]
        if not path.exists():
            raise RecordError(f"{record.folder} has no log of {result['run_id']}")
        facts, _, lines = path.read_text().partition(LOG_RULE)
        try:
            facts = json.loads(facts)
        except ValueError:
            raise RecordError(f"{path} is no whole log of a run") from None
        end = f"step:{step}/{step} val_loss:{loss:.4f} train_time:{milliseconds}ms"
        hardware = {name: result["hardware"].get(name) for name in facts["hardware"]}
        wrong = [name for name in ("script_sha256", "argv", "versions") if facts[name] != result[name]]
        wrong += ["hardware"] * (facts["hardware"] != hardware)
        wrong += ["config"] * ("config" in facts and facts["config"] != config)
        wrong += ["the last validation"] * (end not in lines)
        if wrong:
            raise RecordError(f"{path}: {', '.join(wrong)} of the log and of the json differ")


def format_record(record: results.Record, target: float | None, sets_target: bool = False
                  ) -> tuple[str, bool | None]:
    """The line of a folder, and whether its mean is below the target at p < 0.01. None without a test."""
    summary = results.summarize(list(record.losses.values()), target)
    spread = "" if summary.n == 1 else f" +- {summary.sd:.4f} (best {min(record.losses.values()):.4f})"
    is_below, verdict = None, "no target (--target gives one)" if target is None else f"target {target:g}"
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
            f"{statistics.median(record.seconds.values()):.1f} s of training (median), {verdict}"), is_below


def main() -> int:
    """Print the lines of each folder."""
    parser = make_parser()
    args = parser.parse_args()
    verdicts = []
    num_slower = 0
    for folder in args.folders:
        try:
            record = results.read_record(folder)
            if args.target is None:
                results.check_track(record)
            check_files(record)
            target = results.find_own_target(record) if args.target is None else (args.target, False)
            base = results.find_base(folder)
            links = results.read_links(record, results.read_record(base)) if base else []
        except RecordError as error:
            warn(f"error: {error}")
            continue
        line, is_below = format_record(record, *target)
        verdicts.append(is_below)
        print(line, flush=True)
        if links:
            is_faster = links[0].high < 1
            print(f"    needs {links[0].format()} of the time of {base.name} at equal loss "
                  f"({links[0].machine}): {'faster' if is_faster else 'not shown to be faster'}")
            num_slower += not is_faster
    if len(verdicts) < len(args.folders):
        return 2
    below, above, untested = map(verdicts.count, (True, False, None))
    print(f"target: {below} below it at p < 0.01, {above} not shown to be below it, {untested} not tested"
          + f". Record before: {num_slower} not shown to be faster" * (num_slower > 0))
    return int(above + num_slower > 0)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
