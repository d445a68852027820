"""The validation loss without tokens that the tokenizer never emits (record 91), against another reading."""

import random

import numpy as np
import pytest
import record92_reference as reference
import torch
from conftest import TINY, gpt, smoke_run
from test_record_92 import TOY

from benchmarks import val_mask


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


@pytest.mark.parametrize("tokens", [TOY, make_vocabulary(900)], ids=["toy", ""])
def test_pairs(tokens):
    """All pairs of a vocabulary. test_record_92 has the published number of the toy's pairs."""
    size = -(-len(tokens) // 8) * 8
    bits = val_mask.find_impossible_tokens({text: i for i, text in enumerate(tokens)}, size)
    assert bits.shape == (size, size // 8)
    table = np.unpackbits(bits.numpy(), axis=1, bitorder="little")[: len(tokens), : len(tokens)]
    ours, expected = {(p, x) for p, x in np.argwhere(table).tolist()}, reference.impossible_pairs(tokens)
    assert ours == expected and len(ours) > 30


def test_the_masked_loss_by_hand(shards, tmp_path, monkeypatch, capsys):
    """Logits of marked tokens are -60, in the row of the token before. No pair of bytes is impossible."""
    reference.write_vocabulary(tmp_path / "vocab.json", TOY[:256])
    result = smoke_run(shards, tmp_path, *TINY, "--num_iterations=2")
    (path,) = tmp_path.glob("checkpoints/*/*/model.pt")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert val_mask.main([str(path)]) == 2 and "give their --vocab_file" in capsys.readouterr().err
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
