"""Run a laptop ladder: every rung over several seeds, with the script that its folder has frozen.

    python records/run_ladder.py                 # what the committed ladder lacks; all of it takes two hours
    python records/run_ladder.py --only=adamw_rotary,sigmoid_skips --end_seeds=12
    python records/run_ladder.py --ladder=records/laptop/2026-11-22_frontier

    python records/run_ladder.py --only=muon --extra='--matrix_lr=0.03'    # a trial, in logs/trials

Seed by seed over all rungs, so that a machine whose speed drifts is unfair to none. What a rung already has
is not run again: after an interruption, which costs the run it meets, the same command goes on. A run that
would not fit goes into no rung: runs with --extra make a ladder of their own below --logs_dir, and a rung of
another machine is refused before anything is run.
"""

import hashlib
import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import replay
import results

LADDER = results.RECORDS / "laptop" / "2026-11-21_ladder"


def read_presets(ladder: Path) -> tuple[dict[str, str], set[str]]:
    """(preset of each rung in order, rungs over more seeds): of ladder.toml; or of the script's LADDER, the
    first and the last."""
    rungs = results.read_ladder(ladder)
    if rungs:
        return ({name: rung["preset"] for name, rung in rungs.items()},
                {name for name, rung in rungs.items() if rung.get("has_more_seeds")})
    presets = {name[11:]: f"laptop_{name}" for name in results.load_script(ladder).LADDER}
    return {"target": "laptop_target", **presets}, {next(iter(presets)), list(presets)[-1]}


def plan_runs(presets: dict[str, str], ends: set[str], seeds: int, end_seeds: int
              ) -> list[tuple[str, str, int]]:
    """(rung, preset, seed) of every run in order: some rungs over more seeds."""
    return [(name, preset, seed) for seed in range(max(seeds, end_seeds))
            for name, preset in presets.items() if seed < (end_seeds if name in ends else seeds)]


def find_done(rung: Path) -> set[int]:
    """Seeds of which a rung has a result."""
    return set(results.read_record(rung).losses) if list(rung.glob("*.json")) else set()


def strip_log(log: str, result: dict) -> str:
    """A log with the facts of its run in the place of the script, where it begins with that."""
    rule = f"\n{'=' * 100}\n"
    head, *facts, lines = log.split(rule)
    if not facts:
        return log
    if hashlib.sha256(head.encode()).hexdigest() != result["script_sha256"]:
        raise results.RecordError("a log begins with another script than its result names: run it again")
    facts = {key: result[key] for key in ("script_sha256", "argv")} | json.loads(*facts)
    return f"{json.dumps(facts, indent=1)}{rule}{lines}"


def keep_run(place: Path, rung: Path) -> None:
    """Move the run that a place holds to its rung: first the log, then the json, with which it counts."""
    (path,) = place.glob("records/*/*/*.json")
    log = path.with_suffix(".txt")
    log.write_text(strip_log(log.read_text(), json.loads(path.read_text())))
    rung.mkdir(exist_ok=True)
    measured = path.with_suffix(".jsonl")
    for file in (log, *([measured] if measured.exists() else []), path):
        file.replace(rung / file.name)


def main() -> None:
    """Run what is missing."""
    parser = results.Parser(__doc__)
    parser.add_argument("--seeds", type=results.at_least(1), default=3, help="seeds of every rung")
    parser.add_argument("--end_seeds", type=results.at_least(1), default=8,
                        help="seeds of the first and the last rung")
    parser.add_argument("--only", default="", help="rungs, as a,b: their names without date")
    parser.add_argument("--ladder", type=Path, default=LADDER, help="folder of a script with a LADDER")
    parser.add_argument("--extra", type=shlex.split, default="",
                        help="further options of train_gpt.py, for trials")
    parser.add_argument("--logs_dir", type=Path, default=results.ROOT / "logs" / "trials",
                        help="where trials go (default %(default)s)")
    args = parser.parse_args()
    script = args.ladder / "train_gpt.py"
    frozen = results.load_script(args.ladder) if script.exists() else None
    if frozen is None or not results.read_ladder(args.ladder) and not hasattr(frozen, "LADDER"):
        raise results.RecordError(f"--ladder={args.ladder} has no train_gpt.py with a LADDER: give {LADDER}")
    presets, ends = read_presets(args.ladder)
    only = {name for name in args.only.split(",") if name} or set(presets)
    for name in only - set(presets):
        raise results.RecordError(f"--only={name} is not a rung: {frozen.suggest(name, presets)} "
                                  f"(choose among {', '.join(sorted(presets))})")
    ladder, source = args.ladder.resolve(), script.read_bytes()
    if args.extra:
        digest = hashlib.sha256(source + shlex.join(args.extra).encode()).hexdigest()[:8]
        ladder = args.logs_dir.resolve() / ladder.parent.name / f"{ladder.name}_{digest}"
        ladder.mkdir(parents=True, exist_ok=True)
        for file in (script, args.ladder / "ladder.toml"):
            if file.exists():
                shutil.copy(file, ladder)
    done = {name: find_done(ladder / name) for name in only}
    runs = [(name, seed, [f"--preset={preset}", f"--record={name}", *args.extra])
            for name, preset, seed in plan_runs(presets, ends, args.seeds, args.end_seeds)
            if name in only and seed not in done[name]]
    for name in sorted({name for name, _, _ in runs if done[name]}):
        differences = replay.find_differences(results.read_record(ladder / name).results[0])
        if differences:
            raise results.RecordError(f"{ladder / name} is of another machine ({differences}): copy "
                                      f"{script} into a folder for this one and give --ladder=FOLDER")
    # beside the rungs, so that a move is one step; the script finds data/ and leaves its records below
    with tempfile.TemporaryDirectory(dir=ladder, suffix=".partial") as place:
        Path(place, "data").symlink_to(results.ROOT / "data")
        results.run_missing(runs, done.__getitem__, source, "run_ladder.py", Path(place),
                            lambda name: keep_run(Path(place), ladder / name))
    if args.extra:
        print(f"the trial: python records/validate.py {shlex.quote(str(ladder))}/*/")


if __name__ == "__main__":
    sys.exit(results.run_guarded(main))
