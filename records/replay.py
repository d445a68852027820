"""Run a record's script again and compare: on the recorded CPU and PyTorch the losses are the same bits.

    python records/replay.py records/laptop/2026-11-21_ladder/muon    # every run of the folder
    python records/replay.py --random=1 --most_seconds=45    # one of all that took no longer; CI does this
    python records/replay.py --all                           # all, hours

The script runs where it lies, with the argv of its json; its new result goes to a temporary folder. On
another machine, or another version, bits may differ, so the record is passed over with a line that says why;
--force runs it all the same. Exits with status 1 where a loss differs.
"""

import dataclasses
import functools
import json
import random
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


def main() -> None:
    """Replay what is asked for."""
    parser = results.make_parser(__doc__)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders")
    parser.add_argument("--random", type=int, default=0, help="so many runs, chosen among all records")
    parser.add_argument("--most_seconds", type=float, default=float("inf"), help="of recorded training time")
    parser.add_argument("--all", action="store_true", help="every run of every record")
    parser.add_argument("--force", action="store_true", help="also where the machine is another")
    args = parser.parse_args()
    if not (args.folders or args.all or args.random):
        raise results.RecordError("nothing to replay: give folders, --random=1 or --all")
    records = map(results.read_record, args.folders) if args.folders else results.read_track("*")
    runs = [(record, result) for record in records for result in record.results
            if result["train_time_ms"] <= 1000 * args.most_seconds]
    if args.random:
        runs = random.sample(runs, min(args.random, len(runs)))
    failed = 0
    for record, result in tqdm(runs, unit="run", disable=len(runs) == 1):
        differences = find_differences(result)  # of processor, activations, threads or version
        if differences and not args.force:
            line = f"passed over ({differences})"
        else:
            is_same, line = replay(record.folder, result)
            failed += not is_same
        tqdm.write(f"{record.name}, seed {result['seed']}: {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    results.run_guarded(main)
