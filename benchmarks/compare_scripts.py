#!/usr/bin/env python3
"""Compare the speed of two versions of train_gpt.py, step against step.

    git show 6aa2415:train_gpt.py > /tmp/before.py
    python benchmarks/compare_scripts.py /tmp/before.py --preset=laptop --num_iterations=200
    OMP_NUM_THREADS=1 python benchmarks/compare_scripts.py /tmp/before.py --preset=laptop --dtype=float32

The second version is the file here. Other options go to both scripts. Both train all steps in one process,
in turns of a few steps, from equal weights on equal tokens. Each chooses precision and kernels as in a run.
Prints the time per token of both over all stages (common.py), their ratio, the ratio in each stage, the
quartiles of the turns' ratios, and the largest difference of the losses.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import Parser, RecordError, at_least, require_packages, run_guarded

with require_packages():
    import torch
    from tqdm import tqdm

    import train_gpt as gpt
    from benchmarks import common


def load_script(path: Path) -> ModuleType:
    """Import a train_gpt.py as a separate module."""
    spec = importlib.util.spec_from_file_location("other_train_gpt", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def takes(function: Callable, name: str) -> bool:
    """Whether a function has this parameter."""
    return name in inspect.signature(function).parameters


class Version:
    """One script, ready to step through its schedule."""

    def __init__(self, script: ModuleType, words: list[str]):
        values = script.parse_argv(words)
        values = values if isinstance(values, dict) else values[0]  # scripts until 78c3572 return a tuple
        cfg = script.make_config({"warmup_iterations": 0, **values})
        alone = dict(is_alone=True) if takes(script.start_runtime, "is_alone") else {}  # also until 78c3572
        rt = script.choose_precision(cfg, script.start_runtime(cfg, **alone))
        self.trainer = script.Trainer(cfg, rt)
        self.rt, self.cfg = rt, self.trainer.cfg
        data = script.TrainData(self.cfg, self.trainer.schedule)
        # batches() took the config until ce47886, and the runtime until e324cd9
        kinds = dict(cfg=cfg, rt=rt, comm=getattr(rt, "comm", None))
        first = [value for name, value in kinds.items() if takes(data.batches, name)]
        prefetch = getattr(script, "prefetch", None) or script.Prefetcher  # a class until 4af6f45
        self.batches = prefetch(data.batches(*first, 0, cfg.num_iterations), rt.device)
        self.losses, self.seconds = [], []

    def list_stages(self) -> list[tuple[int, int]]:
        """(first step after it, tokens per step) of each stage."""
        schedule = self.trainer.schedule
        return [(end, stage.tokens_per_step) for end, stage in zip(schedule.ends, schedule.stages)]

    def step(self) -> None:
        """Train one step on the clock."""
        start, progress = gpt.clock(self.rt.device), self.trainer.progress
        loss = self.trainer.train_step(self.batches, self.trainer.schedule.at(progress.step))
        self.seconds.append(gpt.clock(self.rt.device) - start)
        self.losses.append(loss.item())
        progress.step += 1


def compare(before: Version, after: Version, num_steps: int) -> str:
    """Run both in turns of num_steps steps. Returns the line to print."""
    schedule, num_iterations = after.trainer.schedule, after.cfg.num_iterations
    turns = [1, *[num_steps] * ((num_iterations - 1) // num_steps)]  # the first turn is a warm-up
    turns += [num_iterations - sum(turns)] if sum(turns) < num_iterations else []
    ratios = []
    with tqdm(total=num_iterations, unit="step", disable=None) as bar:
        for number, count in enumerate(turns):
            for version in (before, after) if number % 2 else (after, before):
                for _ in range(count):
                    version.step()
            ratios.append(sum(after.seconds[-count:]) / sum(before.seconds[-count:]))
            bar.update(count)
    low, _, high = common.find_quartiles(ratios[1:] or ratios)
    stages, tokens = (
        [measure(enumerate(one.seconds), schedule, one.cfg.adam_every) for one in (before, after)]
        for measure in (common.time_stages, common.time_token))
    apart = max(abs(a - b) for a, b in zip(before.losses, after.losses))
    by_stage = ", ".join(f"{new / old:.3f}" for old, new in zip(*stages))
    return (f"{after.cfg.preset}, {str(after.rt.dtype)[6:]}, {torch.get_num_threads()} threads, "
            f"{num_iterations} steps: {1e6 * tokens[0]:.2f} us a token before, {1e6 * tokens[1]:.2f} after: "
            f"{tokens[1] / tokens[0]:.3f} (stages {by_stage}, quartiles of turns {low:.3f} to {high:.3f}). "
            f"Losses at most {apart:.1e} apart, the last {before.losses[-1]:.4f} and {after.losses[-1]:.4f}")


def main() -> int:
    """Parse, run both in turn, print."""
    parser = Parser(__doc__)
    parser.add_argument("before", type=Path, help="another train_gpt.py")
    parser.add_argument("--steps", type=at_least(1), default=8, help="steps of a turn (default %(default)s)")
    args, words = parser.parse_known_args()

    def body() -> int:
        before, after = (Version(script, words) for script in (load_script(args.before), gpt))
        if before.rt.dtype != after.rt.dtype:
            raise RecordError(f"activations would be {str(before.rt.dtype)[6:]} before and "
                              f"{str(after.rt.dtype)[6:]} after: give --dtype")
        if before.list_stages() != after.list_stages():
            raise RecordError(f"the stages of {args.before} have other steps or tokens: give both one "
                              "recipe")
        print(compare(before, after, args.steps))
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
