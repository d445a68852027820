#!/usr/bin/env python3
"""Compare sampled text with held-out text, at several temperatures and top_p.

    python train_gpt.py --preset=shakespeare
    ./run.sh benchmarks/sampling.py checkpoints/*/*/model.pt

Prompts are 64 characters of the validation text, and 256 are sampled after each. The table has percentages
of words of three or more letters that are in the text the run read, of distinct 4-grams of words that occur
again in the sample, and of those in the text the run read. "held-out" is the text that really follows the
prompts. distance: the sum of the differences of the first two columns from it.
"""

import itertools
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, at_least, require_packages, run_guarded

with require_packages():
    import numpy as np
    import torch
    from tqdm import tqdm

    import train_gpt as gpt
    from benchmarks.gpt2_baseline import read_tokens
    from tools.sample import generate, load_model, sample_token

TEMPERATURES, TOP_P, TOP_K = (0.6, 0.7, 0.8, 0.9, 1.0), (0.9, 0.95, 1.0), 50
PROMPT, SAMPLED = 64, 256


def find_words(tokens: list[int]) -> list[str]:
    """The words of byte tokens, in lower case. BOS is no letter."""
    return re.findall("[a-z]+", "".join(map(chr, tokens)).lower())


def find_grams(words: list[str]) -> list[tuple[str, ...]]:
    return list(zip(*(words[start:] for start in range(4))))


def measure(samples: list[list[int]], read: list[str]) -> list[float]:
    """Percentages of known words, repeated and copied 4-grams. Words at the ends of a sample may be cut."""
    parts, known = [find_words(sample)[1:-1] for sample in samples], {*read}
    words, copied = [word for part in parts for word in part if len(word) > 2], {*find_grams(read)}
    grams = Counter(gram for part in parts for gram in find_grams(part))
    return [100 * sum(found) / max(1, len(found)) for found in (
        [word in known for word in words], [count > 1 for count in grams.values()],
        [gram in copied for gram in grams])]


def compare(path: Path, num_samples: int) -> None:
    """Sample with all settings and print the table."""
    model, cfg, ops, metadata = load_model(path, device="cpu")
    read = find_words(read_tokens(cfg)[: gpt.Schedule(cfg).count_tokens()].tolist())
    val, size = gpt.ValData(cfg).tokens, PROMPT + SAMPLED
    free = np.lib.stride_tricks.sliding_window_view(val != metadata["bos"], size).all(1).nonzero()[0]
    places = free.searchsorted(np.arange(num_samples) * (len(val) // num_samples)).clip(max=len(free) - 1)
    pieces = [val[start : start + size].tolist() for start in free[places]]
    real = measure([piece[PROMPT:] for piece in pieces], read)
    print(f"\n{path.parent.parent.name}\n\n| temperature, top_p | known | repeated | copied | distance |\n"
          f"|---|---:|---:|---:|---:|\n| held-out | {' | '.join(f'{share:.1f}' for share in real)} | |")
    for temperature, top_p in tqdm([*itertools.product(TEMPERATURES, TOP_P)], leave=False):
        generator = torch.Generator().manual_seed(0)
        choose = lambda logits: sample_token(logits, temperature, TOP_K, top_p, generator)  # noqa: B023, E731
        found = measure([[*generate(model, cfg, ops, piece[:PROMPT], metadata["bos"], SAMPLED, choose)]
                         for piece in pieces], read)
        print(f"| {temperature}, {top_p} | {' | '.join(f'{share:.1f}' for share in found)} | "
              f"{abs(found[0] - real[0]) + abs(found[1] - real[1]):.1f} |", flush=True)


def main() -> int:
    """Parse, sample and print."""
    parser = Parser(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="model.pt of runs on byte tokens")
    parser.add_argument("--num_samples", type=at_least(1), default=16, help="prompts (default %(default)s)")
    args = parser.parse_args()
    return run_guarded(lambda: [compare(path, args.num_samples) for path in args.models] and None)


if __name__ == "__main__":
    sys.exit(main())
