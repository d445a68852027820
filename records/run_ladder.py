"""Run the laptop ladder: every rung over several seeds, each run a record in records/laptop.

    python records/run_ladder.py                 # all of it: about two hours on two cores
    python records/run_ladder.py --only=adamw_rotary,sigmoid_skips --end_seeds=12

Seed by seed over all rungs, so that a machine whose speed drifts is unfair to none. What records_dir already
holds is not run again: after an interruption the same command goes on.
"""

import json
import shlex
from pathlib import Path

import results

import train_gpt as gpt


def plan_runs(seeds: int, end_seeds: int, only: list[str]) -> list[tuple[str, int]]:
    """(preset, seed) of every run in order: the first and the last rung over more seeds than the others."""
    rungs = [f"laptop_{name}" for name in gpt.LADDER]
    counts = {**dict.fromkeys([results.TARGET_PRESET, *rungs], seeds),
              rungs[0]: end_seeds, rungs[-1]: end_seeds}
    names = [results.name_rung(preset) for preset in counts]
    for name in set(only) - set(names):
        raise results.RecordError(f"--only={name} is not a rung: {gpt.suggest(name, names)} "
                                  f"(choose among {', '.join(names)})")
    counts = {preset: count for preset, count in counts.items()
              if not only or results.name_rung(preset) in only}
    return [(preset, seed) for seed in range(max(counts.values(), default=0))
            for preset, count in counts.items() if seed < count]


def find_folders(records_dir: Path, name: str) -> list[Path]:
    """The record folders of a rung."""
    return sorted(records_dir.glob(f"laptop/????-??-??_{name}"))


def find_done(records_dir: Path, name: str) -> set[int]:
    """Seeds of which a rung has a result."""
    return {json.loads(path.read_text())["seed"]
            for folder in find_folders(records_dir, name) for path in folder.glob("*.json")}


def main() -> None:
    """Run what is missing."""
    parser = results.make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every rung")
    parser.add_argument("--end_seeds", type=int, default=8, help="seeds of the first and the last rung")
    parser.add_argument("--only", default="", help="rungs, as a,b: their names without date")
    parser.add_argument("--script", type=Path, default=results.ROOT / "train_gpt.py", help="what to run")
    parser.add_argument("--records_dir", type=Path, default=results.RECORDS, help="where records go")
    parser.add_argument("--extra", default="", help="further options of train_gpt.py, for trials")
    args = parser.parse_args()
    runs = plan_runs(args.seeds, args.end_seeds, [name for name in args.only.split(",") if name])
    runs = [(results.name_rung(preset), preset, seed) for preset, seed in runs]
    source, records_dir = args.script.read_bytes(), args.records_dir.resolve()
    names = {name for name, _, _ in runs}
    for folder in (folder for name in names for folder in find_folders(records_dir, name)):
        if (folder / "train_gpt.py").read_bytes() != source:
            raise results.RecordError(f"{folder} is of another script: go on with "
                                      f"--script={folder}/train_gpt.py, or start anew with --records_dir")
    extra = shlex.split(args.extra)
    if records_dir != results.RECORDS:  # else it need not stand in the records
        extra.append(f"--records_dir={records_dir}")
    results.run_missing([(name, seed, [f"--preset={preset}", f"--record={name}", *extra])
                         for name, preset, seed in runs],
                        lambda name: find_done(records_dir, name), source, "run_ladder.py")


if __name__ == "__main__":
    results.run_guarded(main)
