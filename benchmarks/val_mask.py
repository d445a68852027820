#!/usr/bin/env python3
"""Measure a model's validation loss without tokens that the tokenizer never emits (record 91, 2026-08-06).

    ./run.sh benchmarks/val_mask.py checkpoints/<key>/<run_id>/model.pt

GPT-2's tokenizer never emits some tokens directly after some others. With probability 0 for them the loss of
record 91 is about 0.0017 lower. Prints both losses.
"""

import dataclasses
import itertools
import math
import re
import sys
import unicodedata
from collections import defaultdict
from contextlib import suppress
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


def list_merges(text: bytes, ids: dict[bytes, int]) -> list[tuple[bytes, bytes, int, bool, bool]]:
    """Merges of byte-pair encoding within a token: (left, right, id of the result, is it first, is it last).

    The pair whose result has the lowest id merges first, the leftmost of equal ones.
    """
    pieces, merges = [text[i : i + 1] for i in range(len(text))], []
    while True:
        results = [ids.get(left + right, math.inf) for left, right in itertools.pairwise(pieces)]
        if not results or min(results) == math.inf:
            return merges
        i = results.index(min(results))
        left, right = pieces[i : i + 2]
        merges.append((left, right, results[i], i == 0, i + 2 == len(pieces)))
        pieces[i : i + 2] = [left + right]


def classify_character(text: bytes, is_last: bool) -> str:
    """Class of the first or last character of a token: space, number, letter, other, or a part of one."""
    for n in range(1, min(4, len(text)) + 1):
        with suppress(UnicodeDecodeError):
            char = (text[-n:] if is_last else text[:n]).decode()[-1 if is_last else 0]
            if char.isspace() and not "\x1c" <= char <= "\x1f":
                return "space"
            return {"N": "number", "L": "letter"}.get(unicodedata.category(char)[0], "other")
    return "part"


def ends_in_contraction(text: bytes) -> bool:
    """Whether a token ends in 's, 't, ... after nothing, a letter or a number. Any token can follow it."""
    found = re.search(rb"'(s|t|re|ve|m|ll|d)$", text)
    before = text[: found.start()] if found else b""
    return bool(found) and (not before or classify_character(before, True) in ("letter", "number"))


def find_impossible_tokens(ids: dict[bytes, int], vocab_size: int) -> torch.Tensor:
    """Bits (V, V/8), uint8: bit x of row p is set if the tokenizer never emits token x directly after p.

    If a merge joins the last piece of p with the first piece of x while both exist, the pair would have been
    merged. The pre-tokenizer prevents merges in some cases. Source: record 91, 2026-08-06.
    """
    # For each piece: the tokens that have it as last (first) piece, and the span of merges in which they do
    lasts, firsts, rules = defaultdict(list), defaultdict(list), []
    for text, i in ids.items():
        merges = list_merges(text, ids)
        rules += [(*merges[-1][:2], i)] if merges else []
        for pieces, is_last in ((firsts, False), (lasts, True)):
            if is_last and ends_in_contraction(text) or not text:
                continue
            changes = [(left + right, result + (not is_last)) for left, right, result, first, last in merges
                       if (last if is_last else first)]
            history = [(text[-1:] if is_last else text[:1], 0), *changes]
            ends = [*(start for _, start in changes), 2**31]
            kind = classify_character(text, is_last)
            for (piece, start), end in zip(history, ends):
                if start < end and (is_last or kind != "part"):
                    is_special = kind == ("other" if is_last else "letter")
                    pieces[piece].append((i, start, end, kind == "space", is_special))
    lasts, firsts = ({piece: np.array(rows, dtype=np.int64).T for piece, rows in pieces.items()}
                     for pieces in (lasts, firsts))
    bits = np.zeros((vocab_size, vocab_size // 8), dtype=np.uint8)
    for left, right, merge in tqdm(rules, desc="impossible tokens", leave=False,
                                   disable=None):
        if left not in lasts or right not in firsts:
            continue
        before, after = (rows[:, (rows[1] <= merge) & (merge < rows[2])]
                         for rows in (lasts[left], firsts[right]))
        # The pre-tokenizer separates a space from a space, and a letter from another character before it
        for is_space, is_other in itertools.product((0, 1), repeat=2):
            rows = before[0, (before[3] == is_space) & (before[4] == is_other)]
            columns = after[0, (after[3] & is_space | after[4] & is_other) == 0]
            places, inverse = np.unique(columns >> 3, return_inverse=True)
            values = np.zeros(len(places), dtype=np.uint8)
            np.bitwise_or.at(values, inverse, (1 << (columns & 7)).astype(np.uint8))
            bits[np.ix_(rows, places)] |= values
    return torch.from_numpy(bits)


@torch.no_grad()
def measure_losses(model: gpt.GPT, cfg: gpt.Config, ops: gpt.Operations, bits: torch.Tensor
                   ) -> tuple[float, float]:
    """Validation loss with the windows of the final validation, and the loss without impossible tokens."""
    data, state, device = gpt.ValData(cfg), gpt.Schedule(cfg).at(cfg.num_iterations), model.embed.device
    step_inputs = gpt.make_step_inputs(state, data.batch_tokens, cfg.val_seq_len, cfg, device)
    bits, places = bits.to(device), torch.arange(8, device=device)
    plain = masked = 0.0
    for index in tqdm(range(data.num_batches), disable=None):
        batch = gpt.make_batch(data.read_batch(index), data.bos)
        batch = gpt.move_batch(batch, device)
        x = model.run_layers(batch, step_inputs, ops)
        tensors = (x, batch.inputs, batch.targets)
        for part, before, target in zip(*(x.split(gpt.LOGITS_CHUNK // 8) for x in tensors)):
            logits = model.head.compute_logits(part)
            plain += F.cross_entropy(logits, target, reduction="sum").item()
            is_impossible = (bits[before.long(), :, None] >> places & 1).flatten(1) > 0  # (T, V)
            logits = logits.masked_fill(is_impossible, -60.0)
            masked += F.cross_entropy(logits, target, reduction="sum").item()
    num_tokens = data.num_batches * data.batch_tokens
    return plain / num_tokens, masked / num_tokens


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--vocab_file", help="token ids as JSON (default: the run's)")
    args = parser.parse_args(argv)

    def body() -> int:
        model, cfg, ops, _ = load_model(args.model)
        if cfg.vocab_size != 50257 and not args.vocab_file:
            raise gpt.RunError(f"{args.model} has other tokens than GPT-2: give their --vocab_file", 2)
        cfg = dataclasses.replace(cfg, vocab_file=args.vocab_file or cfg.vocab_file)
        bits = find_impossible_tokens(gpt.read_vocabulary(cfg), cfg.padded_vocab_size)
        plain, masked = measure_losses(model, cfg, ops, bits)
        print(f"validation loss {plain:.4f}, without impossible tokens {masked:.4f}")
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
