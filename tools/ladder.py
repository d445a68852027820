"""Run a laptop ladder: each rung over several seeds, with the frozen script of its folder.

    ./run.sh tools/ladder.py                 # missing runs of the committed ladder. All take two hours
    ./run.sh tools/ladder.py --only=adamw_rotary,sigmoid_skips --end_seeds=12
    ./run.sh tools/ladder.py --ladder=records/laptop/2026-11-22_frontier

    ./run.sh tools/ladder.py --only=muon --extra='--matrix_lr=0.03'    # a trial, in logs/trials

The order is seed by seed over all rungs, so that a drift of the machine's speed affects all rungs equally.
Finished runs are kept. After an interruption the same command begins with the interrupted run. Runs with
--extra make a separate ladder below --logs_dir. A rung of another machine is refused before the first run.
Choose the number of seeds before you see a result.
"""

import hashlib
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import (
    Parser,
    RecordError,
    at_least,
    find_run_sh,
    list_visible,
    require_packages,
    run_guarded,
)

with require_packages():
    from tools import replay, results

LADDER = results.RECORDS / "laptop" / "2026-11-21_ladder"


def plan_runs(rungs: dict[str, dict], seeds: int, end_seeds: int) -> list[tuple[str, str, int]]:
    """(rung, preset, seed) of each run in order. rungs: of a ladder.toml."""
    return [(name, rung["preset"], seed) for seed in range(max(seeds, end_seeds))
            for name, rung in rungs.items() if seed < (end_seeds if rung.get("has_more_seeds") else seeds)]


def strip_log(log: str, result: dict) -> str:
    """Replace a script at the start of a log by the metadata of the run."""
    rule = f"\n{'=' * 100}\n"
    head, *facts, lines = log.split(rule)
    if not facts:
        return log
    if hashlib.sha256(head.encode()).hexdigest() != result["script_sha256"]:
        raise RecordError("the script in a log is not the script of its result: run it again")
    facts = {key: result[key] for key in ("script_sha256", "argv")} | json.loads(*facts)
    return f"{json.dumps(facts, indent=1)}{rule}{lines}"


def keep_run(place: Path, rung: Path) -> None:
    """Move the run in a folder to its rung. The json is last, because a run counts once it exists."""
    (path,) = list_visible(place, "records/*/*/*.json")
    log = path.with_suffix(".txt")
    log.write_text(strip_log(log.read_text(), json.loads(path.read_text())))
    rung.mkdir(exist_ok=True)
    measured = path.with_suffix(".jsonl")
    for file in (log, *([measured] if measured.exists() else []), path):
        file.replace(rung / file.name)


def main() -> None:
    """Run the missing seeds."""
    parser = Parser(__doc__)
    parser.add_argument("--seeds", type=at_least(1), default=3, help="seeds of each rung")
    parser.add_argument("--end_seeds", type=at_least(1), default=8,
                        help="seeds of rungs with has_more_seeds in ladder.toml")
    parser.add_argument("--only", default="", help="rungs, as a,b: their names without date")
    parser.add_argument("--ladder", type=Path, default=LADDER,
                        help="folder of a train_gpt.py and a ladder.toml")
    parser.add_argument("--extra", type=shlex.split, default="",
                        help="further options of train_gpt.py, for trials")
    parser.add_argument("--logs_dir", type=Path, default=results.ROOT / "logs" / "trials",
                        help="folder of the trials (default %(default)s)")
    args = parser.parse_args()
    script = args.ladder / "train_gpt.py"
    rungs = results.read_ladder(args.ladder)
    if not rungs:
        raise RecordError(f"--ladder={args.ladder} has no ladder.toml: give {LADDER}")
    only = {name for name in args.only.split(",") if name} or set(rungs)
    for name in only - set(rungs):
        raise RecordError(f"--only={name} is not a rung: choose among {', '.join(sorted(rungs))}")
    ladder, source = args.ladder.resolve(), script.read_bytes()
    if args.extra:
        digest = hashlib.sha256(source + shlex.join(args.extra).encode()).hexdigest()[:8]
        ladder = args.logs_dir.resolve() / ladder.parent.name / f"{ladder.name}_{digest}"
        ladder.mkdir(parents=True, exist_ok=True)
        for name in ("train_gpt.py", "ladder.toml"):
            shutil.copy(args.ladder / name, ladder)
    done = {name: results.find_done(ladder / name) for name in only}
    runs = [(name, seed, [f"--preset={preset}", f"--record={name}", *args.extra])
            for name, preset, seed in plan_runs(rungs, args.seeds, args.end_seeds) if name in only]
    for name in sorted({name for name, seed, _ in runs if done[name] and seed not in done[name]}):
        differences = replay.find_differences(results.read_record(ladder / name).results[0])
        if differences:
            raise RecordError(f"{ladder / name} is of another machine ({differences}): copy "
                              f"train_gpt.py and ladder.toml of {args.ladder} into a folder for this one "
                              "and give --ladder=FOLDER")
    # on the file system of the rungs, so that a move is atomic. The script reads data/ and writes records/
    with tempfile.TemporaryDirectory(dir=ladder, suffix=".partial") as place:
        Path(place, "records").mkdir()
        Path(place, "data").symlink_to(results.ROOT / "data")
        Path(place, "records", "presets").symlink_to(results.ROOT / "presets")  # where its script looks
        results.run_missing(runs, done.__getitem__, source, "ladder.py", Path(place),
                            lambda name, _: keep_run(Path(place), ladder / name))
    if args.extra:
        print(f"the trial: {find_run_sh()} tools/validate.py {shlex.quote(str(ladder))}/*/")


if __name__ == "__main__":
    sys.exit(run_guarded(main, "interrupted. Give the same command again to go on"))
