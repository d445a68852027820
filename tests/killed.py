"""A run that is killed again and again: python tests/killed.py KILLS ARGUMENT...

Forks, so that PyTorch is imported only once. Every life goes on with --resume=auto, and is killed (SIGKILL) at a
random moment; the last one may live. Prints JSON: the exit statuses, and the steps at which lives were resumed.
"""

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as gpt  # noqa: E402


def live(number: int, argv: list[str], from_where: str, seconds: float | None) -> int:
    """One life, its console in life_NUMBER.txt; killed so many seconds after the console says so; how it ended."""
    pid = os.fork()
    if pid == 0:
        console = os.open(f"life_{number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(console, 1)
        os.dup2(console, 2)
        torch.set_num_threads(1)
        os._exit(gpt.main([*argv, "--resume=auto"]))
    if seconds is not None:
        console = Path(f"life_{number}.txt")
        while not (console.exists() and re.search(from_where, console.read_text())):
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise SystemExit(f"life {number} ended by itself")
            time.sleep(0.01)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    kills, *argv = sys.argv[1:]
    moments = random.Random(0)
    ends = []
    for i in range(int(kills)):  # every fifth while it starts, the others while they train and write
        from_where = "" if i % 5 == 4 else "train_time"  # the first validation, of every step
        ends.append(live(i, argv, from_where, moments.uniform(0.1, 0.6)))
    ends.append(live(int(kills), argv, "", None))
    lives = [Path(f"life_{i}.txt").read_text() for i in range(len(ends))]
    resumed = [
        int(found[1]) if (found := re.search(r"after step (\d+)$", life, re.M)) else 0 for life in lives
    ]
    print(json.dumps(dict(ends=ends, resumed=resumed, last=lives[-1])))


if __name__ == "__main__":
    main()
