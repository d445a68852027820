#!/usr/bin/env python3
"""List the runs of a folder, and remove their checkpoints and models on request.

    ./run.sh tools/runs.py                   # runs that left files in the current folder, the newest first
    ./run.sh tools/runs.py --keep=3          # asks, then removes the checkpoints and models of all but three
    ./run.sh tools/runs.py --remove=RUN_ID   # of one run. With --yes it does not ask

Logs and results stay. A run that is in use stays as it is. "resume" is the newest step from which a run can
be continued. "options" are those of its command, without preset, seed, steps, val_files and out.
"""

import fcntl
import json
import shutil
import sys
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, RecordError, at_least, list_visible, read_options, run_guarded

UNLISTED = {"preset", "seed", "val_files", "out", "num_iterations"}


class Run(NamedTuple):
    """What a run has left."""

    run_id: str  # begins with date and time
    result: dict  # {} if it has not ended
    folder: Path | None  # of its checkpoints and model.pt

    def list_files(self) -> list[Path]:
        """Checkpoints and models that train_gpt.py has written."""
        if not self.folder:
            return []
        return [*list_visible(self.folder, "step_*"), *list_visible(self.folder, "model.pt")]

    def count_bytes(self) -> int:
        files = [file for path in self.list_files() for file in (path, *path.rglob("*")) if file.is_file()]
        return sum(file.stat().st_size for file in files)

    def find_step(self) -> int | None:
        """The newest step with the files of all ranks. None after the end of a run."""
        if self.result:
            return None
        return max((int(state.parent.name[5:]) for state in self.list_states()), default=None)

    def describe(self) -> str:
        metadata = self.result or self.read_state()
        config = metadata.get("config", {})
        loss, step = self.result.get("final_val_loss"), self.find_step()
        options = read_options(metadata.get("argv", []))
        words = [f"--{name}={value}" for name, value in options.items()
                 if name not in UNLISTED or value.endswith(".json")]
        cells = [self.run_id, config.get("preset", ""), f"{config.get('num_iterations', '')}",
                 "" if loss is None else f"{loss:.4f}", f"{self.count_bytes() / 1e6:,.0f}",
                 "" if step is None else f"step {step}", shorten(" ".join(words), 120, placeholder=" ...")]
        if self.is_used():
            cells[5] = "in use"
        return f"| {' | '.join(cells)} |"

    def list_states(self) -> list[Path]:
        """The state.json of each checkpoint that has the files of all ranks."""
        states = list_visible(self.folder, "step_*/state.json") if self.folder else []
        return [path for path in states if len(list_visible(path.parent, "rank*.pt"))
                == json.loads(path.read_text())["hardware"]["ranks"]]

    def read_state(self) -> dict:
        """Metadata of a checkpoint, {} without one."""
        states = self.list_states()
        return json.loads(states[-1].read_text()) if states else {}

    def is_used(self) -> bool:
        """Whether a process has locked its folder."""
        if not self.folder or not (self.folder / ".lock").exists():
            return False
        with open(self.folder / ".lock", "a+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def remove(self) -> None:
        """Remove its checkpoints and its model."""
        for path in self.list_files():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def list_runs(root: Path) -> list[Run]:
    """All runs with a result in logs/ or a folder in checkpoints/, the newest first. A record's result is in
    records/."""
    results = {}
    folders = {path.name: path for path in root.glob("checkpoints/*/*_seed*") if path.is_dir()}
    of_records = [path for path in root.glob("records/*/*/*_seed*.json") if path.stem in folders]
    for path in [*root.glob("logs/*_seed*.json"), *of_records]:
        try:
            results[path.stem] = json.loads(path.read_text())
        except ValueError as error:
            raise RecordError(f"{path} is no result ({error}): remove it") from None
    return [Run(name, results.get(name, {}), folders.get(name))
            for name in sorted({*results, *folders}, reverse=True)]


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="--out of the runs (default: this folder)")
    parser.add_argument("--keep", type=at_least(0), help="number of runs that keep their files")
    parser.add_argument("--remove", action="append", default=[], metavar="RUN_ID", help="of this run")
    parser.add_argument("--yes", action="store_true", help="remove without a question")
    args = parser.parse_args()

    def body() -> int:
        if not args.out.is_dir():
            raise RecordError(f"--out={args.out} is no folder")
        runs = list_runs(args.out)
        print("| run | preset | steps | loss | MB | resume | options |\n|---|---|---|---|---|---|---|")
        for run in runs:
            print(run.describe())
        for name in set(args.remove) - {run.run_id for run in runs}:
            raise RecordError(f"--remove={name}: there is no such run in {args.out.resolve()}")
        with_files = [run for run in runs if run.list_files()]
        chosen = [run for run in with_files if run.run_id in args.remove]
        if args.keep is not None:
            chosen += [run for run in with_files[args.keep :] if run not in chosen]
        if not chosen:
            return 0
        size = sum(run.count_bytes() for run in chosen) / 1e6
        question = f"remove {size:,.0f} MB of checkpoints and models (runs: {len(chosen)})? (y/n) "
        try:
            answer = "y" if args.yes else input(question)
        except EOFError:
            raise RecordError("nobody answers: give --yes") from None
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 0
        for run in chosen:
            if run.is_used():
                print(f"{run.run_id} is in use: its files stay")
            else:
                run.remove()
                print(f"removed the files of {run.run_id}")
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
