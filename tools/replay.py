"""Repeat runs of records and compare. On the recorded CPU and PyTorch all losses are equal bits.

    ./run.sh tools/replay.py records/laptop/2026-11-21_ladder/muon    # each run of the folder
    ./run.sh tools/replay.py --random=1 --most_seconds=45    # one of the runs in records/ of at most 45 s
    ./run.sh tools/replay.py --all                           # all of records/, takes hours
    ./run.sh tools/replay.py records/TRACK/RECORD --against  # its pairs with the record before it

The record's script runs in the root of the repository with the recorded options, always from the first step.
The result goes to a temporary folder. A result with a key is repeated by --preset=<run_id>.json, an older
one by its argv without --resume, --time_limit, --checkpoint_every and --tracker. If a record was started in
another folder, its options must contain absolute paths of the data.

Bits may differ on another machine or with another PyTorch. A line names these runs, and only --force runs
them. A run on other data is always passed over. The exit status is 1 if a loss differs, and if nothing was
replayed.

--against repeats a claim on this machine: at most as many pairs of the record and of the record before it.
If the intervals of the two machines do not overlap, the exit status is 1. With --json the leaderboard lists
this machine.
"""

import functools
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import (
    ROOT,
    Parser,
    Progress,
    RecordError,
    at_least,
    keep_options,
    list_visible,
    note,
    require_packages,
    run_guarded,
    run_training,
    warn,
)


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders")
    parser.add_argument("--random", type=at_least(1), default=0,
                        help="number of random runs of records/ that fit this machine")
    parser.add_argument("--most_seconds", type=at_least(0, float), default=math.inf,
                        help="longest recorded training time")
    parser.add_argument("--all", action="store_true", help="every run of records/")
    parser.add_argument("--force", action="store_true", help="also run records of other machines")
    parser.add_argument("--against", action="store_true", help="repeat the pairs with the record before it")
    parser.add_argument("--json", type=Path, help="file for the figures of --against")
    parser.add_argument("--records_dir", type=Path, default=ROOT / "records", help="instead of records/")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()  # help and typos do not wait for PyTorch

with require_packages():
    from tqdm import tqdm

    import train_gpt as gpt
    from tools import results


@functools.cache
def describe_here(device: str, dtype: str) -> dict:
    """Metadata of a run with these options on this machine. The dtype is the choice of this checkout.

    The script of a record may choose another one, so replay() compares the choices of its run again.
    """
    cfg = gpt.make_config(dict(device=device, dtype=dtype))
    rt = gpt.start_runtime(cfg)
    choices = dict(dtype=str(gpt.choose_dtype(cfg, rt.device)[0]).removeprefix("torch."))
    return {**gpt.describe_machine(rt), "choices": choices}


def find_differences(result: dict) -> str:
    """Differences between the recorded machine and this one that can change bits."""
    try:
        here = describe_here(result["config"]["device"], result["config"]["dtype"])
    except gpt.RunError as error:
        return str(error)
    began = [f"it began with {result['resumed_from']}"] if result.get("resumed_from") else []
    return ", ".join(began + results.differences(result, here, "replay"))


def make_options(folder: Path, result: dict, out: str) -> list[str]:
    """The options that repeat a run, with its output in another folder."""
    if "key" in result:
        path = folder.resolve() / f"{result['run_id']}.json"
        return [f"--preset={path}", f"--out={out}", "--checkpoint_every=0", "--tracker=off"]
    return [*keep_options(result["argv"], results.DROPPED), *(f"--{name}={out}" for name in (
        "records_dir", "logs_dir", "checkpoint_dir") if name in result["config"])]


def replay(folder: Path, result: dict, is_forced: bool = False, show: Callable[[str], None] = print
           ) -> tuple[bool | None, str]:
    """(whether all validation losses are equal, a line that reports it). None if the runs differ in kind.
    show() gets the step."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(results.find_script(folder)), *make_options(folder, result, out)]
        done = run_training(command, Path(out), show, cwd=results.ROOT)
        if done.returncode:
            return False, f"ended with status {done.returncode}: {done.stderr.strip()}"
        (path,) = list_visible(Path(out), "**/*.json")
        new = results.read_result(path)
    found = results.differences(result, new, "replay")
    if "other data" in found or found and not is_forced:
        return None, f"passed over ({', '.join(found)})"
    if new.get("resumed_at"):
        return False, f"is no replay: the new run was resumed at {new['resumed_at']}"
    resumed = result.get("resumed_at")
    start = f"resumed at {resumed}: replayed from the start, " if resumed else ""
    ours, theirs = ([(step, loss) for step, loss, _ in run["val_points"]] for run in (new, result))
    if ours == theirs:
        return True, f"{start}{theirs[-1][1]!r} again, bit for bit"
    if len(ours) != len(theirs):
        return False, f"{start}has {len(ours)} validations instead of {len(theirs)}"
    step = next(a[0] for a, b in zip(ours, theirs) if a != b)
    return False, (f"{start}ends at {ours[-1][1]!r} instead of {theirs[-1][1]!r}, differs first in the "
                   f"validation at step {step}" + f" ({', '.join(found)})" * bool(found))


def repeat_claim(folder: Path, path: Path | None) -> int:
    """Run the pairs of a claim here, and compare the ratios. Write the figures to a path."""
    with require_packages():
        from tools import compare
    base = results.find_base(folder)
    if base is None:
        raise RecordError(f"{folder} has no pairs with another record. tools/compare.py --record=NAME makes "
                          "a record that has them")
    record = results.read_record(folder)
    links = results.read_links(record, results.read_record(base))
    sides = [compare.read_side(shlex.quote(str(side)), []) for side in (base, folder)]
    num_pairs = links[0].pairs if links else compare.MOST_PAIRS
    report = compare.compare_sides(sides, num_pairs, first_seed=min(record.losses)).report()
    (here,) = report["sides"]
    for number, link in enumerate(links):
        label = "repeated" if number else "claim"
        print(f"{label}: {link.format()} on {link.machine}")
    now = results.Link(*(here[name] for name in results.Link._fields[:4]), "this machine")
    print(f"now: {now.format()} on {now.machine}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        gpt.write_atomic(path, f"{json.dumps(report, indent=1)}\n".encode())
    if not links:
        return 0
    claim = links[0]
    overlaps = now.low <= claim.high and claim.low <= now.high
    print(f"The intervals of the claim and of this machine {'overlap' if overlaps else 'do not overlap'}")
    return int(not overlaps)


def main() -> int:
    """Replay the chosen runs."""
    parser = make_parser()
    args = parser.parse_args()
    if args.against:
        if len(args.folders) != 1:
            raise RecordError("--against: give the folder of one record")
        return repeat_claim(args.folders[0], args.json)
    if not (args.folders or args.all or args.random):
        raise RecordError("nothing to replay: give folders, --random=1 or --all")

    def list_runs(records: list[results.Record]) -> list[tuple[results.Record, dict, str]]:
        """(record, result, differences of this machine) of each run within --most_seconds."""
        return [(record, result, "" if args.force else find_differences(result)) for record in records
                for result in record.results if result["train_time_ms"] <= 1000 * args.most_seconds]

    chosen, kept = list_runs([results.read_record(folder) for folder in args.folders]), []
    if args.all or args.random:
        kept = list_runs(results.read_track("*", args.records_dir, results.leave_out))
        fitting = [run for run in kept if not run[2]]
        if not args.all and args.random > len(fitting):
            print(f"--random={args.random}: this machine can replay {len(fitting)} of {len(kept)} runs in "
                  f"{args.records_dir}")
        chosen += kept if args.all else random.sample(fitting, min(args.random, len(fitting)))
    outcomes, lines = [], [differences for *_, differences in kept if differences]
    with Progress(sum(not differences for *_, differences in chosen)) as progress:
        for record, result, differences in chosen:
            name = f"{record.name}, seed {result['seed']}"
            if differences:
                is_equal, line = None, f"passed over ({differences})"
            else:
                seconds = result["train_time_ms"] / 1000
                note(f"{name}: runs again. It took {seconds:.0f} s of training")
                is_equal, line = replay(record.folder, result, args.force,
                                        lambda step, name=name: progress.show(f"{name}, {step}"))
                progress.finish(name)
            outcomes.append(is_equal)
            lines.append(differences or line)
            tqdm.write(f"{name}: {line}")
    if all(is_equal is None for is_equal in outcomes):
        why = (f"none of {len(chosen or kept)} runs fits this machine and its data "
               f"({statistics.mode(lines)})" + ": --force runs them on another machine" * (not args.force)
               if lines else
               f"no run took at most {args.most_seconds:g} s: give more with --most_seconds")
        warn(f"error: nothing was replayed: {why}")
        return 1
    equal, other, passed = map(outcomes.count, (True, False, None))
    print(f"{equal} equal bit for bit, {other} not, {passed} passed over")
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(run_guarded(main, "interrupted. The next call begins again, or with --against goes on"))
