"""Run a record's script again and compare: on the recorded CPU and PyTorch the losses are the same bits.

    python records/replay.py records/laptop/2026-11-21_ladder/muon    # every run of the folder
    python records/replay.py --random=1 --most_seconds=45    # one of records/ that took no longer
    python records/replay.py --all                           # all of records/, hours

The script runs where it lies, with the argv of its json; its new result goes to a temporary folder. On
another machine, or another version, bits may differ, so the record is passed over with a line that says why,
and --random chooses among the others; --force runs it all the same. Exits with status 1 where a loss
differs, and where nothing was replayed.
"""

import dataclasses
import functools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import results
from tqdm import tqdm

import train_gpt as gpt


@functools.cache
def describe_here(device: str, dtype: str) -> dict:
    """This machine as results.describe_machine() has it, with the activations that such a config gets."""
    cfg = gpt.make_config(dict(device=device, dtype=dtype))
    rt = gpt.start_runtime(cfg, is_alone=True)
    rt = dataclasses.replace(rt, dtype=gpt.choose_dtype(cfg, rt.device)[0])
    return results.describe_machine(gpt.describe_machine(rt))


def find_differences(result: dict) -> str:
    """What of this machine is not as recorded, where that may change bits. What an older result does not
    say, its SIMD, is passed over."""
    try:
        here = describe_here(result["config"]["device"], result["config"]["dtype"])
    except gpt.InputError as error:
        return str(error)
    there = results.describe_machine(result)
    unknown = {key for key in ("activations", "simd") if there[key] is None}
    return ", ".join(f"{key} {there[key]}, here {here[key]}" for key in here
                     if here[key] != there[key] and key not in unknown)


def replay(folder: Path, result: dict) -> tuple[bool, str]:
    """(whether all validation losses came out as recorded, a line that says so)."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, str(results.find_script(folder)), *result["argv"],
                   *(f"--{name}={out}" for name in ("records_dir", "logs_dir", "checkpoint_dir")
                     if name in result["config"])]
        done = subprocess.run(command, cwd=results.ROOT, capture_output=True, text=True)
        if done.returncode:
            return False, f"ended with status {done.returncode}: {done.stderr.strip()}"
        (path,) = Path(out).rglob("*.json")
        ours = [[step, loss] for step, loss, _ in json.loads(path.read_text())["val_points"]]
    theirs = [[step, loss] for step, loss, _ in result["val_points"]]
    if ours == theirs:
        return True, f"{theirs[-1][1]!r} again, bit for bit"
    step = next((a[0] for a, b in zip(ours, theirs) if a != b), min(len(ours), len(theirs)))
    return False, f"ends at {ours[-1][1]!r} instead of {theirs[-1][1]!r}; they part at step {step} or before"


def main() -> int:
    """Replay what is asked for."""
    parser = results.Parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders")
    parser.add_argument("--random", type=results.at_least(1), default=0,
                        help="so many runs of records/, chosen among those that this machine can replay")
    parser.add_argument("--most_seconds", type=results.at_least(0, float), default=math.inf,
                        help="of recorded training time")
    parser.add_argument("--all", action="store_true", help="every run of records/")
    parser.add_argument("--force", action="store_true", help="also where the machine is another")
    parser.add_argument("--records_dir", type=Path, default=results.RECORDS, help="instead of records/")
    args = parser.parse_args()
    if not (args.folders or args.all or args.random):
        raise results.RecordError("nothing to replay: give folders, --random=1 or --all")

    def list_runs(records: list[results.Record]) -> list[tuple[results.Record, dict, str]]:
        """(record, result, what of this machine differs) of every run that was short enough."""
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
    num_replayed = num_failed = 0
    for record, result, differences in tqdm(chosen, unit="run", disable=len(chosen) <= 1 or None):
        if differences:
            line = f"passed over ({differences})"
        else:
            is_same, line = replay(record.folder, result)
            num_replayed, num_failed = num_replayed + 1, num_failed + (not is_same)
        tqdm.write(f"{record.name}, seed {result['seed']}: {line}")
    if not num_replayed:
        reasons = [differences for *_, differences in chosen or kept]
        why = (f"none of {len(reasons)} runs is of this machine and version ({statistics.mode(reasons)}): "
               "--force runs them all the same" if reasons else
               f"no run took at most {args.most_seconds:g} s: give more with --most_seconds")
        print(f"replay.py: error: nothing was replayed: {why}", file=sys.stderr)
    return 1 if num_failed or not num_replayed else 0


if __name__ == "__main__":
    sys.exit(results.run_guarded(main))
