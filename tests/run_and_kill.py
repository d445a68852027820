"""Kill a run again and again: python tests/run_and_kill.py KILLS ARGUMENT...

It forks, so PyTorch is imported only once. Each life continues with --resume=auto and is killed (SIGKILL) at a random
moment. The last life ends without a kill. Prints JSON: the exit statuses, and the step at which each life resumed.
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


def live(number: int, argv: list[str], num_lines: int | None, seconds: float) -> int:
    """Run one life, with its console in life_NUMBER.txt. Returns its exit status.

    The kill comes `seconds` after the console has num_lines lines of times. num_lines=None means no kill.
    """
    pid = os.fork()
    if pid == 0:
        console = os.open(f"life_{number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(console, 1)
        os.dup2(console, 2)
        torch.set_num_threads(1)
        os._exit(gpt.main([*argv, "--resume=auto"]))
    if num_lines is not None:
        console = Path(f"life_{number}.txt")
        while not console.exists() or console.read_text().count("train_time") < num_lines:
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise SystemExit(f"life {number} ended before its kill")
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    kills, *argv = sys.argv[1:]
    moments = random.Random(0)
    ends = []
    for i in range(int(kills)):
        is_start = i % 5 == 4  # each fifth kill hits the start, all others hit training and saving
        num_lines = 0 if is_start else moments.randint(2, 9)
        seconds = moments.uniform(0.0, 0.5 if is_start else 0.03)
        ends.append(live(i, argv, num_lines, seconds))
    ends.append(live(int(kills), argv, None, 0))
    lives = [Path(f"life_{i}.txt").read_text() for i in range(len(ends))]
    resumed = [
        int(found[1]) if (found := re.search(r"^resumed \S+ after step (\d+)", life, re.M)) else 0 for life in lives
    ]
    print(json.dumps(dict(ends=ends, resumed=resumed, last=lives[-1])))


if __name__ == "__main__":
    main()
