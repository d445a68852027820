"""The validation loss without tokens that the tokenizer never emits (record 91), against the second reading."""

import json
import random

import numpy as np
import pytest
import record92_reference as reference
import torch
from conftest import gpt, smoke_run

MERGES = "th,he, t, th,the, the,in,an,er,and, a, an, and,'s,\n\n,re,ther,12,123,  ".split(",")
TOY = [*(bytes([i]) for i in range(256)), *(text.encode() for text in MERGES)]


def make_vocabulary(size):
    """Tokens of random merges of a few bytes: letters, numbers, spaces, an apostrophe, a letter of two bytes."""
    rng, pool = random.Random(0), [bytes([byte]) for byte in b"abcd '12s\n,t\xc3\xa9"]
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < size:
        text = rng.choice(pool) + rng.choice(pool)
        if len(text) < 8 and text not in tokens:
            tokens.append(text)
            pool.append(text)
    return tokens


def read_pairs(bits, size):
    table = np.unpackbits(bits.numpy(), axis=1, bitorder="little")[:size, :size]
    return {tuple(pair) for pair in np.argwhere(table).tolist()}


@pytest.mark.parametrize("tokens, num_pairs", [(TOY, 38), (make_vocabulary(900), None)], ids=["toy", "random"])
def test_pairs(tokens, num_pairs):
    """All pairs of a vocabulary. The toy has the published number."""
    size = -(-len(tokens) // 8) * 8
    bits = gpt.find_impossible_tokens({text: i for i, text in enumerate(tokens)}, size)
    assert bits.shape == (size, size // 8)
    ours, expected = read_pairs(bits, len(tokens)), reference.impossible_pairs(tokens)
    assert ours == expected and len(ours) == (num_pairs or len(expected)) > 30
    if num_pairs:
        assert (bits > 0).sum() == 34


def write_vocabulary(path, tokens):
    """A file in the format of the hub."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    names = ["".join(chars[byte] for byte in text) for text in tokens]
    path.write_text(json.dumps({name: i for i, name in enumerate(names)}))


def test_the_masked_loss_stands_beside_the_loss(shards, tmp_path, capsys):
    """A run whose tokens are single bytes. No pair of bytes is impossible, so both losses are equal."""
    write_vocabulary(tmp_path / "vocab.json", TOY[:256])
    options = ("--num_iterations=2", f"--vocab_file={tmp_path / 'vocab.json'}", "--val_mask=on")
    result = smoke_run(shards, tmp_path, *options)
    assert result["masked_val_loss"] == pytest.approx(result["final_val_loss"], abs=1e-6)  # bytes alone have no merges
    log = result["path"].with_suffix(".txt").read_text()
    assert f"validation loss without impossible tokens: {result['masked_val_loss']:.4f}" in log


def test_the_masked_loss_by_hand(shards, tmp_path, monkeypatch):
    """Logits of marked tokens are -60, in the row of the token before: against a loop over all tokens."""
    pairs = {(101, 32), (101, 97), (32, 116), (32, 32)}
    bits = np.zeros((384, 384), dtype=np.uint8)
    for before, after in pairs:
        bits[before, after] = 1
    packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
    monkeypatch.setattr(gpt, "find_impossible_tokens", lambda *_: packed)
    measure, seen = gpt.measure_masked_loss, []

    def compare(trainer, data, ids):
        ours = measure(trainer, data, ids)
        total, state = 0.0, trainer.schedule.at(trainer.cfg.num_iterations)
        step_inputs = trainer.get_step_inputs(state, data.batch_tokens, trainer.cfg.val_seq_len)
        for index in range(data.num_batches):
            tokens, targets, doc_ids, _ = data.batch(index)
            with torch.no_grad():
                x, _ = trainer.model.eval().run_layers(tokens, doc_ids, step_inputs)
                logits = trainer.model.head.compute_logits(x)
            for row, (before, target) in enumerate(zip(tokens.tolist(), targets.tolist())):
                for token, after in pairs:
                    if token == before:
                        logits[row, after] = -60
                total -= logits[row].double().log_softmax(0)[target].item()
        seen.append((ours, total / (data.num_batches * data.batch_tokens)))
        return ours

    monkeypatch.setattr(gpt, "measure_masked_loss", compare)
    write_vocabulary(tmp_path / "vocab.json", TOY[:256])
    options = ("--num_iterations=2", f"--vocab_file={tmp_path / 'vocab.json'}", "--val_mask=on")
    result = smoke_run(shards, tmp_path, *options)
    ((ours, expected),) = seen
    assert ours == pytest.approx(expected, rel=1e-6) and abs(ours - result["final_val_loss"]) > 1e-3
