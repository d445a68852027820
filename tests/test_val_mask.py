"""The validation loss without tokens that the tokenizer never emits (record 91), against another reading."""

import json
import random

import numpy as np
import pytest
import record92_reference as reference
import torch
from conftest import TINY, gpt, smoke_run

from benchmarks import val_mask

MERGES = "th,he, t, th,the, the,in,an,er,and, a, an, and,'s,\n\n,re,ther,12,123,  ".split(",")
TOY = [*(bytes([i]) for i in range(256)), *(text.encode() for text in MERGES)]


def make_vocabulary(size):
    """Tokens of random merges: letters, numbers, spaces, an apostrophe, and a letter of two bytes."""
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


@pytest.mark.parametrize("tokens, num_pairs", [(TOY, 38), (make_vocabulary(900), None)], ids=["toy", ""])
def test_pairs(tokens, num_pairs):
    """All pairs of a vocabulary. The toy has the published number."""
    size = -(-len(tokens) // 8) * 8
    bits = val_mask.find_impossible_tokens({text: i for i, text in enumerate(tokens)}, size)
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


def test_the_masked_loss_by_hand(shards, tmp_path, monkeypatch, capsys):
    """Logits of marked tokens are -60, in the row of the token before: against a loop over all tokens.

    No pair of bytes is impossible, so both losses of the command line are equal.
    """
    write_vocabulary(tmp_path / "vocab.json", TOY[:256])
    result = smoke_run(shards, tmp_path, *TINY, "--num_iterations=2")
    (path,) = tmp_path.glob("checkpoints/*/*/model.pt")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert val_mask.main([str(path), "--vocab_file=vocab.json"]) == 0
    loss = f"{result['final_val_loss']:.4f}"
    assert capsys.readouterr().out == f"validation loss {loss}, without impossible tokens {loss}\n"

    pairs = {(101, 32), (101, 97), (32, 116), (32, 32)}
    bits = np.zeros((384, 384), dtype=np.uint8)
    for before, after in pairs:
        bits[before, after] = 1
    model, cfg, ops, _ = val_mask.load_model(path, device="cpu")
    packed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little"))
    plain, masked = val_mask.measure_losses(model, cfg, ops, packed)
    data, state, total = gpt.ValData(cfg), gpt.Schedule(cfg).at(cfg.num_iterations), 0.0
    step_inputs = gpt.make_step_inputs(state, data.batch_tokens, cfg.val_seq_len, cfg, packed.device)
    for index in range(data.num_batches):
        batch = gpt.make_batch(data.read_batch(index), data.bos)
        with torch.no_grad():
            logits = model.head.compute_logits(model.run_layers(batch, step_inputs, gpt.Operations()))
        for row, (before, target) in enumerate(zip(batch.inputs.tolist(), batch.targets.tolist())):
            for token, after in pairs:
                if token == before:
                    logits[row, after] = -60
            total -= logits[row].double().log_softmax(0)[target].item()
    expected = total / (data.num_batches * data.batch_tokens)
    assert masked == pytest.approx(expected, rel=1e-6) and abs(masked - plain) > 1e-3
    assert plain == pytest.approx(result["final_val_loss"], rel=1e-5)
