"""Kill a run again and again: python tests/run_and_kill.py KILLS SEED MOST_RANKS ARGUMENT...

It forks, so PyTorch is imported only once. Each life has a random number of ranks and continues with --resume=auto.
SIGKILL hits all ranks or one of them, at a random moment or inside a write. The last life ends without a kill. Prints
JSON: for each life its ranks, kill and exit statuses, and the step at which it resumed.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from run_ranks import exact_sums, start_ranks  # noqa: E402

import train_gpt as gpt  # noqa: E402

WRITES = "write", "remove"  # what a kill interrupts


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in(what: str, count: int) -> None:
    """This process dies in the middle of the count-th such call for a checkpoint."""
    counts, write, rmtree = iter(range(1, 10**6)), gpt.write_atomic, shutil.rmtree

    def is_due(path: Path) -> bool:
        return "checkpoints" in path.parts and next(counts) == count

    def write_half(path, data):
        def put_half(file):
            data(file) if callable(data) else file.write(data)
            file.truncate(file.tell() // 2)
            file.flush()
            die()

        write(path, put_half if is_due(path) else data)

    def remove_one(path, *more, **options):
        if Path(path).exists() and is_due(Path(path)):
            next(Path(path).iterdir()).unlink()
            die()
        rmtree(path, *more, **options)

    owner, name, function = dict(write=(gpt, "write_atomic", write_half), remove=(shutil, "rmtree", remove_one))[what]
    setattr(owner, name, function)


def live(number: int, argv: list[str], num_ranks: int, what: str, victim: int | None, lines: int, seconds: float) -> list:
    """Run one life, with its console in life_NUMBER.txt. Returns the exit statuses of its ranks.

    victim: rank that is killed in its lines-th call of `what`. With what="moment" it is killed `seconds` after this
    number of steps, and None means all ranks. what="" means no kill.
    """
    console, count_steps = Path(f"life_{number}.txt"), lambda: sum(
        path.read_text().count("train_loss:") for path in Path("logs").glob("*.txt"))
    console.touch()
    lines += count_steps() if what == "moment" else 0

    def run() -> int:
        output = os.open(console, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        torch.set_num_threads(1)
        if what in WRITES and int(os.environ["RANK"]) == victim:
            die_in(what, lines)
        with exact_sums():
            return gpt.main([*argv, "--resume=auto"])

    pids, deadline, ends = start_ranks(num_ranks, run), time.monotonic() + 300, {}
    if what == "moment":
        while count_steps() < lines:
            assert time.monotonic() < deadline and "result:" not in (text := console.read_text()), text
            time.sleep(0.001)
        time.sleep(seconds)
        for pid in pids if victim is None else [pids[victim]]:
            os.kill(pid, signal.SIGKILL)
    for pid in pids:  # the others of a lost rank end by themselves
        ends[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return list(ends.values())


def main() -> None:
    kills, seed, most_ranks, *argv = sys.argv[1:]
    choice, lives = random.Random(int(seed)), []
    for number in range(int(kills) + 1):
        ranks = choice.randint(1, int(most_ranks))
        what = "" if number == int(kills) else choice.choice(("moment", "moment", *WRITES))
        victim = choice.choice((None, *range(ranks))) if what == "moment" else choice.randrange(ranks)
        if what == "remove":  # done by rank 0
            victim = 0
        is_start = what == "moment" and choice.random() < 0.3
        lines = 0 if is_start else choice.randint(1, 12 if what == "moment" else 5)
        if is_start:  # a rank that waits for the others to start waits long. Launchers end it
            victim = None
        start = time.monotonic()
        ends = live(number, argv, ranks, what, victim, lines, choice.uniform(0.0, 1.0 if is_start else 0.05))
        found = re.search(r"^resumed \S+/step_(\d+)", console := Path(f"life_{number}.txt").read_text(), re.M)
        lives.append(dict(ranks=ranks, what=what, victim=victim, lines=lines, ends=ends, console=console[-2000:],
                          resumed=int(found[1]) if found else 0, seconds=time.monotonic() - start))  # fmt: skip
    print(json.dumps(lives))


if __name__ == "__main__":
    main()
