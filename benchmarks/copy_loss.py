#!/usr/bin/env python3
"""Split the loss of a model into tokens that it could copy from its context, and the rest.

    python train_gpt.py --preset=laptop_32 --seed=1 --checkpoint_every=240
    ./run.sh benchmarks/copy_loss.py checkpoints/*/*/step_*

Prints for each checkpoint the validation loss (nats per token, first 65,536 tokens), the loss on repeats,
and the loss on the rest. A token is a repeat if the 8 tokens before it also occur earlier in its document,
within the long window of the final validation. A model that has learned to copy continues the earlier
occurrence.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, require_packages, run_guarded

with require_packages():
    import numpy as np
    import torch
    import torch.nn.functional as F
    from tqdm import tqdm

    import train_gpt as gpt
    from tools.sample import load_model

MATCH, MOST_TOKENS = 8, 65_536


def find_repeats(batch: gpt.Batch, window: int) -> np.ndarray:
    """(T,): whether the MATCH inputs up to here also occur earlier in the document, within the window."""
    tokens, docs = batch.inputs.numpy(), batch.doc_ids.numpy()
    grams = np.lib.stride_tricks.sliding_window_view(tokens, MATCH)
    last_seen: dict[tuple[int, bytes], int] = {}
    repeats = np.zeros(len(tokens), bool)
    for start, gram in enumerate(grams):
        end, key = start + MATCH - 1, (int(docs[start]), gram.tobytes())
        if docs[start] == docs[end]:
            repeats[end] = end - last_seen.get(key, -window - 1) <= window
            last_seen[key] = end
    return repeats


@torch.no_grad()
def split_loss(path: Path) -> tuple[int, float, float, float, float]:
    """(step, loss, share of repeats, loss on them, loss on the rest) of a checkpoint."""
    model, cfg, ops, facts = load_model(path, device="cpu")
    data, step = gpt.ValData(cfg), facts.get("progress", {}).get("step", cfg.num_iterations)
    state, window = gpt.Schedule(cfg).at(step), gpt.Schedule(cfg).at(cfg.num_iterations).windows[0]
    num_tokens, losses, repeats = data.batch_tokens, [], []
    for index in tqdm(range(min(data.num_batches, max(1, MOST_TOKENS // num_tokens))), leave=False):
        batch = gpt.make_batch(data.read_batch(index), data.bos)
        step_inputs = gpt.make_step_inputs(state, num_tokens, cfg.val_seq_len, cfg, batch.inputs.device)
        x = model.run_layers(batch, step_inputs, ops)
        logits = model.head.compute_logits(x)
        losses.append(F.cross_entropy(logits.float(), batch.targets, reduction="none"))
        repeats.append(find_repeats(batch, window))
    loss, repeated = torch.cat(losses).numpy(), np.concatenate(repeats)
    return step, loss.mean(), repeated.mean(), loss[repeated].mean(), loss[~repeated].mean()


def main() -> int:
    """Parse, measure and print."""
    parser = Parser(__doc__)
    parser.add_argument("checkpoints", type=Path, nargs="+")
    paths = parser.parse_args().checkpoints

    def body() -> int:
        head = "| checkpoint | step | loss | on repeats (share) | on the rest |\n|---|---:|---:|---:|---:|\n"
        for path in paths:
            step, loss, share, repeated, others = split_loss(path)
            print(head if path is paths[0] else "", end="")
            print(f"| {path.parent.name} | {step} | {loss:.3f} | {repeated:.3f} ({share:.0%}) | "
                  f"{others:.3f} |", flush=True)
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
