#!/usr/bin/env python3
"""Two versions of train_gpt.py, step against step: is a change of the code faster?

    git show 6aa2415:train_gpt.py > /tmp/before.py
    python benchmarks/against.py /tmp/before.py --preset=laptop              # before, and the file here
    OMP_NUM_THREADS=1 python benchmarks/against.py /tmp/before.py --preset=laptop --dtype=float32

Other options are those of train_gpt.py. Both train in one process, in turn: a few steps of one, a few of the
other, from the same weights on the same tokens. Prints the medians of both, their ratio in every round, and
how far apart the losses are.
"""

import argparse
import dataclasses
import importlib.util
import statistics
import sys
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt as gpt  # noqa: E402


def load_script(path: Path) -> ModuleType:
    """A train_gpt.py from anywhere, as a module of its own."""
    spec = importlib.util.spec_from_file_location("other_train_gpt", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Version:
    """One script, ready to step through its schedule."""

    def __init__(self, script: ModuleType, options: dict, dtype: torch.dtype):
        cfg = script.make_config(options)
        rt = dataclasses.replace(script.start_runtime(cfg, is_alone=True), dtype=dtype)
        script.ensure_corpus(cfg, rt)
        self.trainer = script.Trainer(cfg, rt)
        batches = script.TrainData(cfg, self.trainer.schedule).batches(cfg, rt, 0, cfg.num_iterations)
        self.device, self.batches = rt.device, script.Prefetcher(batches, rt.device)
        self.losses, self.seconds = [], []

    def step(self) -> None:
        start, progress = gpt.clock(self.device), self.trainer.progress
        loss = self.trainer.train_step(self.batches, self.trainer.schedule.at(progress.step))
        self.seconds.append(gpt.clock(self.device) - start)
        self.losses.append(loss.item())
        progress.step += 1


def main() -> int:
    """Parse, run both in turn, print; bad input ends with status 2 and one line."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another train_gpt.py")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each (default %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a turn (default %(default)s)")
    args, words = parser.parse_known_args()

    def body() -> int:
        if not args.before.is_file() or min(args.rounds, args.steps) < 1:
            raise gpt.InputError(f"{args.before}, --rounds={args.rounds}, --steps={args.steps}: give a "
                                 "file, and at least one round of one step")
        options = {"warmup_iterations": 0, **gpt.parse_argv(words)[0]}
        cfg = gpt.make_config(options)
        if args.rounds * args.steps >= cfg.num_iterations:
            raise gpt.InputError(f"--rounds={args.rounds} times --steps={args.steps} are as many as the "
                                 f"{cfg.num_iterations} steps of the preset: give fewer")
        dtype = gpt.choose_dtype(cfg, gpt.start_runtime(cfg, is_alone=True).device)[0]
        versions = [Version(script, options, dtype) for script in (load_script(args.before), gpt)]
        ratios = []
        for turn in range(args.rounds + 1):  # the first one is a warm-up
            for version in versions if turn % 2 else reversed(versions):
                for _ in range(args.steps if turn else 1):
                    version.step()
            before, after = (statistics.median(version.seconds[-args.steps :]) for version in versions)
            ratios.append(after / before)
        medians = [1000 * statistics.median(version.seconds[1:]) for version in versions]
        apart = max(abs(a - b) for a, b in zip(*(version.losses for version in versions)))
        print(f"{cfg.preset}, {str(dtype)[6:]}, {torch.get_num_threads()} threads, "
              f"{len(versions[0].seconds) - 1} steps: {medians[0]:.1f} ms before, {medians[1]:.1f} after: "
              f"{medians[1] / medians[0]:.3f} (rounds {min(ratios[1:]):.3f} to {max(ratios[1:]):.3f}); "
              f"losses at most {apart:.1e} apart, the last {versions[0].losses[-1]:.4f} and "
              f"{versions[1].losses[-1]:.4f}")
        for version in versions:
            version.batches.executor.shutdown(cancel_futures=True)
        return 0

    return gpt.run_guarded(body, "against.py")


if __name__ == "__main__":
    sys.exit(main())
