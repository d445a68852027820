"""Run the laptop ladder: every rung over several seeds, each run a record in records/laptop.

    python records/run_ladder.py                 # all of it: about two hours on two cores
    python records/run_ladder.py --seeds=3 --end_seeds=8 --only=target,sigmoid_skips

Seed by seed over all rungs, so that a machine whose speed drifts is unfair to none. What records_dir already
holds is not run again: after an interruption the same command goes on.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt as gpt  # noqa: E402


def slug(preset: str) -> str:
    """The name of a rung's records: its preset without track and date."""
    return preset.removeprefix("laptop_").lstrip("0123456789-").lstrip("_")


def plan_runs(seeds: int, end_seeds: int, only: list[str]) -> list[tuple[str, int]]:
    """(preset, seed) of every run in order: the target and the last rung over more seeds than the others."""
    rungs = [f"laptop_{name}" for name in gpt.LADDER]
    counts = {"laptop_target": end_seeds, **dict.fromkeys(rungs, seeds), rungs[-1]: end_seeds}
    counts = {preset: count for preset, count in counts.items() if not only or slug(preset) in only}
    return [(preset, seed) for seed in range(max(counts.values(), default=0))
            for preset, count in counts.items() if seed < count]


def find_folders(records_dir: Path, preset: str) -> list[Path]:
    """The record folders of a rung."""
    return sorted(records_dir.glob(f"laptop/????-??-??_{slug(preset)}"))


def find_done(records_dir: Path, preset: str) -> set[int]:
    """Seeds of which a rung has a result."""
    return {json.loads(path.read_text())["seed"]
            for folder in find_folders(records_dir, preset) for path in folder.glob("*.json")}


def check_script(source: bytes, records_dir: Path, runs: list[tuple[str, int]]) -> None:
    """End with one line where a rung's records are of another script."""
    for preset in dict.fromkeys(preset for preset, _ in runs):
        for folder in find_folders(records_dir, preset):
            if (folder / "train_gpt.py").read_bytes() != source:
                sys.exit(f"run_ladder.py: {folder} is of another script: go on with "
                         f"--script={folder}/train_gpt.py, or start anew with --records_dir")


def main() -> None:
    """Run what is missing, with a bar that knows how long each rung takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of every rung")
    parser.add_argument("--end_seeds", type=int, default=8, help="seeds of the target and the last rung")
    parser.add_argument("--only", default="", help="rungs, as a,b: their names without date")
    parser.add_argument("--script", type=Path, default=ROOT / "train_gpt.py", help="what to run")
    parser.add_argument("--records_dir", type=Path, default=ROOT / "records", help="where records go")
    parser.add_argument("--extra", default="", help="further options of train_gpt.py, for trials")
    args = parser.parse_args()
    runs = plan_runs(args.seeds, args.end_seeds, [name for name in args.only.split(",") if name])
    if not runs:
        sys.exit(f"run_ladder.py: --only={args.only} names no rung: "
                 f"choose among target, {', '.join(map(slug, gpt.LADDER))}")
    source = args.script.read_bytes()
    check_script(source, args.records_dir, runs)
    missing = [(preset, seed) for preset, seed in runs if seed not in find_done(args.records_dir, preset)]
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:  # an edit meanwhile must not change the later runs
        script = Path(folder, "train_gpt.py")
        script.write_bytes(source)
        bar = tqdm(missing, unit="run", dynamic_ncols=True)
        for index, (preset, seed) in enumerate(bar):
            bar.set_description(f"{slug(preset)}, seed {seed}")
            command = [sys.executable, str(script), f"--preset={preset}", f"--record={slug(preset)}",
                       f"--seed={seed}", *shlex.split(args.extra)]
            if args.records_dir != ROOT / "records":
                command.append(f"--records_dir={args.records_dir}")
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"run_ladder.py: {shlex.join(command)} ended with status {done.returncode}:\n"
                         f"{done.stderr.strip()}\nthe same command of run_ladder.py goes on from here")
            seconds.setdefault(preset, []).append(bar.format_dict["elapsed"] - sum(map(sum, seconds.values())))
            usual = statistics.mean(map(statistics.mean, seconds.values()))
            left = sum(statistics.mean(seconds.get(name, [usual])) for name, _ in missing[index + 1 :])
            bar.set_postfix_str(f"about {left / 60:.0f} min left")


if __name__ == "__main__":
    main()
