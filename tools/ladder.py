"""Run a laptop ladder: each rung over several seeds, with the frozen script of its folder.

    ./run.sh tools/ladder.py                 # missing runs of the committed ladder. All take two hours
    ./run.sh tools/ladder.py --only=adamw_rotary,sigmoid_skips --end_seeds=12
    ./run.sh tools/ladder.py --ladder=records/laptop/2026-11-22_frontier

    ./run.sh tools/ladder.py --only=muon --extra='--matrix_lr=0.03'    # a trial, in logs/trials

The order is seed by seed over all rungs, so that a drift of the machine's speed affects all rungs equally.
Finished runs are kept. After an interruption the command continues with the interrupted run. Runs with
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
from tools.common import Parser, RecordError, at_least, list_visible, require_packages, run_guarded

with require_packages():
    from tools import replay, results

LADDER = results.RECORDS / "laptop" / "2026-11-21_ladder"


def read_presets(ladder: Path) -> tuple[dict[str, str], set[str]]:
    """(preset of each rung in order, rungs with more seeds), from ladder.toml or from the script's LADDER.

    In a LADDER the first and the last rung have more seeds.
    """
    rungs = results.read_ladder(ladder)
    if rungs:
        return ({name: rung["preset"] for name, rung in rungs.items()},
                {name for name, rung in rungs.items() if rung.get("has_more_seeds")})
    presets = {name[11:]: f"laptop_{name}" for name in results.load_script(ladder).LADDER}
    return {"target": "laptop_target", **presets}, {next(iter(presets)), list(presets)[-1]}


def plan_runs(presets: dict[str, str], ends: set[str], seeds: int, end_seeds: int
              ) -> list[tuple[str, str, int]]:
    """(rung, preset, seed) of each run in order. The rungs in ends have more seeds."""
    return [(name, preset, seed) for seed in range(max(seeds, end_seeds))
            for name, preset in presets.items() if seed < (end_seeds if name in ends else seeds)]


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
                        help="seeds of the first and the last rung")
    parser.add_argument("--only", default="", help="rungs, as a,b: their names without date")
    parser.add_argument("--ladder", type=Path, default=LADDER, help="folder of a script with a LADDER")
    parser.add_argument("--extra", type=shlex.split, default="",
                        help="further options of train_gpt.py, for trials")
    parser.add_argument("--logs_dir", type=Path, default=results.ROOT / "logs" / "trials",
                        help="folder of the trials (default %(default)s)")
    args = parser.parse_args()
    script = args.ladder / "train_gpt.py"
    frozen = results.load_script(args.ladder) if script.exists() else None
    if frozen is None or not results.read_ladder(args.ladder) and not hasattr(frozen, "LADDER"):
        raise RecordError(f"--ladder={args.ladder} has no train_gpt.py with a LADDER: give {LADDER}")
    presets, ends = read_presets(args.ladder)
    only = {name for name in args.only.split(",") if name} or set(presets)
    for name in only - set(presets):
        raise RecordError(f"--only={name} is not a rung: choose among {', '.join(sorted(presets))}")
    ladder, source = args.ladder.resolve(), script.read_bytes()
    if args.extra:
        digest = hashlib.sha256(source + shlex.join(args.extra).encode()).hexdigest()[:8]
        ladder = args.logs_dir.resolve() / ladder.parent.name / f"{ladder.name}_{digest}"
        ladder.mkdir(parents=True, exist_ok=True)
        for file in (script, args.ladder / "ladder.toml"):
            if file.exists():
                shutil.copy(file, ladder)
    done = {name: results.find_done(ladder / name) for name in only}
    runs = [(name, seed, [f"--preset={preset}", f"--record={name}", *args.extra])
            for name, preset, seed in plan_runs(presets, ends, args.seeds, args.end_seeds)
            if name in only]
    for name in sorted({name for name, seed, _ in runs if done[name] and seed not in done[name]}):
        differences = replay.find_differences(results.read_record(ladder / name).results[0])
        if differences:
            raise RecordError(f"{ladder / name} is of another machine ({differences}): copy "
                                      f"{script} into a folder for this one and give --ladder=FOLDER")
    # on the file system of the rungs, so that a move is atomic. The script reads data/ and writes records/
    with tempfile.TemporaryDirectory(dir=ladder, suffix=".partial") as place:
        Path(place, "records").mkdir()
        Path(place, "data").symlink_to(results.ROOT / "data")
        Path(place, "records", "presets").symlink_to(results.ROOT / "presets")  # where its script looks
        results.run_missing(runs, done.__getitem__, source, "ladder.py", Path(place),
                            lambda name, _: keep_run(Path(place), ladder / name))
    if args.extra:
        print(f"the trial: ./run.sh tools/validate.py {shlex.quote(str(ladder))}/*/")


if __name__ == "__main__":
    sys.exit(run_guarded(main, "interrupted. The same command goes on with the next run"))
