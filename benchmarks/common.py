"""Functions of several benchmarks: seconds per token, and the head and output of a report.

All comparisons of speed use seconds per token of the whole run. tokens/s, MFU and ratios follow from it.
"""

import argparse
import dataclasses
import difflib
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import train_gpt as gpt


def time_step(seconds: list[float], every: int) -> float:
    """Average seconds per step: the mean of each `every` consecutive steps, then the median of these means.

    `every` is Config.longest_period or a multiple of it. A mean over fewer steps counts some kinds of steps
    too often.
    """
    means = [statistics.mean(seconds[i : i + every]) for i in range(len(seconds) - every + 1)]
    return statistics.median(means or [statistics.mean(seconds)])


def time_stages(timed: Iterable[tuple[int, float]], schedule: gpt.Schedule, every: int) -> list[float]:
    """Average seconds per step of each stage. timed: (step number, seconds), with steps of all stages."""
    timed = list(timed)
    return [time_step([seconds for step, seconds in timed if start <= step < end], every)
            for _, start, end in schedule.stage_ranges()]


def time_token(timed: Iterable[tuple[int, float]], schedule: gpt.Schedule, every: int) -> float:
    """Seconds per token of the whole run. Each stage counts by its number of steps."""
    stages = zip(time_stages(timed, schedule, every), schedule.stage_ranges())
    return sum(seconds * (end - start) for seconds, (_, start, end) in stages) / schedule.count_tokens()


def find_quartiles(ratios: list[float]) -> list[float]:
    """The lower quartile, the median and the upper quartile."""
    return statistics.quantiles(ratios if len(ratios) > 1 else 2 * ratios, n=4, method="inclusive")


def parse_known(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """(a benchmark's own options, those for train_gpt.py). A typo of one of its own ends it."""
    args, rest = parser.parse_known_args()
    own = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
    known = {field.name for field in dataclasses.fields(gpt.Config)} | gpt.GROUP_OPTIONS.keys()
    for word in rest:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        near = difflib.get_close_matches(name, own, 1, cutoff=0.8)
        if word.startswith("--") and near and name not in known:
            parser.error(f"--{name} is not an option: did you mean --{near[0]}?")
    return args, rest


def describe_run(rt: gpt.Runtime) -> dict:
    """Date, PyTorch version, device and number of ranks."""
    hardware = gpt.describe_machine(rt)["hardware"]
    return dict(date=time.strftime("%Y-%m-%d"), torch=torch.__version__, ranks=rt.world_size,
                hardware=hardware.get("gpu", hardware["cpu"]))


def write_report(text: str, result: dict, path: Path | None) -> None:
    """Print the text. Write the result as JSON, if a path is given."""
    print(text, flush=True)
    if path:
        gpt.write_atomic(path, (json.dumps(result, indent=1) + "\n").encode())
