#!/usr/bin/env python3
"""Two versions of train_gpt.py, step against step: is a change of the code faster?

    git show 6aa2415:train_gpt.py > /tmp/before.py
    python benchmarks/against.py /tmp/before.py --preset=laptop --num_iterations=200  # and the file here
    OMP_NUM_THREADS=1 python benchmarks/against.py /tmp/before.py --preset=laptop --dtype=float32

Other options go to both scripts. Both train all steps in one process, in turn: a few steps of one, a few of
the other, from equal weights on equal tokens. Each chooses precision and kernels as it does for a run.
Prints the time of both per token: the median step of each stage times its number of steps, summed over the
stages. Also prints the ratio of both, in each stage too, the range of the ratios of the turns, and how far
apart the losses are.
"""

import argparse
import importlib.util
import inspect
import statistics
import sys
from pathlib import Path
from types import ModuleType

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt as gpt  # noqa: E402


def load_script(path: Path) -> ModuleType:
    """A train_gpt.py from anywhere, as a separate module."""
    spec = importlib.util.spec_from_file_location("other_train_gpt", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Version:
    """One script, ready to step through its schedule."""

    def __init__(self, script: ModuleType, words: list[str]):
        try:
            cfg = script.make_config({"warmup_iterations": 0, **script.parse_argv(words)[0]})
            rt = script.choose_precision(cfg, script.start_runtime(cfg, is_alone=True))
            script.ensure_corpus(cfg, rt)
            self.trainer = script.Trainer(cfg, rt)
            data = script.TrainData(cfg, self.trainer.schedule)
        except script.RunError as error:  # its own class, which run_guarded() does not know
            raise gpt.InputError(f"{script.__file__}: {error}") from None
        # until ce47886 batches() took the config
        first = (cfg, rt) if "cfg" in inspect.signature(data.batches).parameters else (rt,)
        self.cfg, self.rt = cfg, rt
        self.batches = script.Prefetcher(data.batches(*first, 0, cfg.num_iterations), rt.device)
        self.losses, self.seconds = [], []

    def step(self) -> None:
        start, progress = gpt.clock(self.rt.device), self.trainer.progress
        loss = self.trainer.train_step(self.batches, self.trainer.schedule.at(progress.step))
        self.seconds.append(gpt.clock(self.rt.device) - start)
        self.losses.append(loss.item())
        progress.step += 1


def sum_stages(seconds: list[float], ranges: list[tuple]) -> list[float]:
    """Seconds of each stage: its median step times its number of steps. ranges: Schedule.stage_ranges()."""
    return [statistics.median(seconds[start:end]) * (end - start) for _, start, end in ranges]


def compare(before: Version, after: Version, num_steps: int) -> str:
    """Run both, in turns of num_steps steps. Returns the line to print."""
    schedule, num_iterations = after.trainer.schedule, after.cfg.num_iterations
    turns = [1, *[num_steps] * ((num_iterations - 1) // num_steps)]  # the first one is a warm-up
    turns += [num_iterations - sum(turns)] if sum(turns) < num_iterations else []
    ratios = []
    with tqdm(total=num_iterations, unit="step", disable=None) as bar:
        for number, count in enumerate(turns):
            for version in (before, after) if number % 2 else (after, before):
                for _ in range(count):
                    version.step()
            ratios.append(sum(after.seconds[-count:]) / sum(before.seconds[-count:]))
            bar.update(count)
    ratios, tokens = ratios[1:] or ratios, schedule.count_tokens()
    stages = [sum_stages(version.seconds, schedule.stage_ranges()) for version in (before, after)]
    apart = max(abs(a - b) for a, b in zip(before.losses, after.losses))
    by_stage = ", ".join(f"{new / old:.3f}" for old, new in zip(*stages))
    us = [1e6 * sum(stage) / tokens for stage in stages]
    return (f"{after.cfg.preset}, {str(after.rt.dtype)[6:]}, {torch.get_num_threads()} threads, "
            f"{num_iterations} steps: {us[0]:.2f} us a token before, {us[1]:.2f} after: {us[1] / us[0]:.3f} "
            f"(stages {by_stage}, turns {min(ratios):.3f} to {max(ratios):.3f}); losses at most "
            f"{apart:.1e} apart, the last {before.losses[-1]:.4f} and {after.losses[-1]:.4f}")


def main() -> int:
    """Parse, run both in turn, print. Bad input ends with status 2 and one line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another train_gpt.py")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn (default %(default)s)")
    args, words = parser.parse_known_args()

    def body() -> int:
        if not args.before.is_file() or args.steps < 1:
            raise gpt.InputError(f"{args.before}, --steps={args.steps}: give a file, and turns of at least "
                                 "one step")
        before, after = (Version(script, words) for script in (load_script(args.before), gpt))
        try:
            if before.rt.dtype != after.rt.dtype:
                raise gpt.InputError(f"activations would be {str(before.rt.dtype)[6:]} before and "
                                     f"{str(after.rt.dtype)[6:]} after: give --dtype")
            if before.trainer.schedule.ends != after.trainer.schedule.ends:
                raise gpt.InputError(f"the stages of {args.before} have other steps: give both the same "
                                     "recipe")
            print(compare(before, after, args.steps))
        finally:
            for version in (before, after):
                version.batches.executor.shutdown(cancel_futures=True)
        return 0

    return gpt.run_guarded(body, "against.py")


if __name__ == "__main__":
    sys.exit(main())
