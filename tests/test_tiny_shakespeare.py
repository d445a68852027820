"""data/tiny_shakespeare.py, and runs whose number of steps follows from their data."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from conftest import TINY, call_tool, gpt, run, smoke_config

from data import text, tiny_shakespeare
from tools import results
from tools.common import RecordError

CONTENT = bytes(range(32, 127)) * 30  # 2850 bytes


@pytest.fixture(name="book")
def write_book(here, monkeypatch):
    """A file that stands for the text, whose real bytes are on the network."""
    (here / "input.txt").write_bytes(CONTENT)
    monkeypatch.setattr(tiny_shakespeare, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return here / "input.txt"


def test_shards_are_nanogpts_parts(book, here, capsys):
    """Training has the first 90 % of the bytes. Its first shard has 30 % of them. A second call changes nothing."""
    for _ in range(2):
        status, out, err = call_tool(capsys, tiny_shakespeare.main, ["input.txt", "--out=mine"])
        assert (status, err) == (0, "") and "2,567 training and 286 validation tokens" in out
    parts = [gpt.open_shard(f"mine/{name}.bin", 257).tokens for name in ("train_000000", "train_000001", "val_000000")]
    assert [len(part) for part in parts] == [769 + 1, 1796 + 1, 285 + 1] and all(part[0] == 256 for part in parts)
    assert bytes(np.concatenate([part[1:] for part in parts]).astype(np.uint8)) == CONTENT
    assert text.read_corpus(here / "mine")[0] == tiny_shakespeare.URL


@pytest.mark.parametrize("case", ["other text", "missing", "own shards", "other shards"])
def test_what_is_refused(book, here, capsys, case):
    """One line, status 2, and no file is touched."""
    (here / "mine").mkdir()
    args = ["input.txt", "--out=mine"]
    if case == "other text":
        book.write_bytes(CONTENT[:-1])
    elif case == "missing":
        book.unlink()
    else:
        (here / "mine/train_000000.bin").write_bytes(b"mine")
        if case == "own shards":
            (here / "mine/corpus.json").write_text(json.dumps(dict(files=["train_000000.bin"], source="notes")))
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    status, out, err = call_tool(capsys, tiny_shakespeare.main, args)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def test_the_track_fixes_data_and_validation(tmp_path):
    """The preset's record has them. Another block length is another loss."""
    (folder,) = (results.RECORDS / "shakespeare").glob("2026-11-29_last_70_percent")
    record = results.read_record(folder)
    results.check_track(record)
    assert len(record.results) == 8 and results.summarize([*record.losses.values()], 1.4697).p < 0.01
    for change in (dict(val_seq_len=512), dict(val_tokens=111_104)):
        other = {**record.results[0], "config": record.results[0]["config"] | change}
        with pytest.raises(RecordError, match="give a new --track"):
            results.check_track(record._replace(results=[other]))
    other = {**record.results[0], "corpus_fingerprint": "0" * 16}
    with pytest.raises(RecordError, match="other data"):
        results.check_track(record._replace(results=[other]))


def test_steps_follow_from_the_files(shards, here):
    """Two passes over all whole sequences of both shards, ten validations, and the resolved numbers in the result."""
    sizes = [len(gpt.open_shard(str(shards / f"{name}.bin"), 257).tokens) for name in ("train_0", "train_1")]
    cfg = smoke_config(shards, num_iterations=0, epochs=2, sequence_start="anywhere", val_loss_every=-1)
    fitted, sequences = gpt.fit_steps(cfg), sum((size - 1) // 512 for size in sizes)
    assert fitted.num_iterations == 2 * sequences * 512 // 2048 and fitted.val_loss_every == -(-fitted.num_iterations // 10)
    plan = gpt.TrainData(fitted, gpt.Schedule(fitted)).sequences
    assert len(plan) == fitted.num_iterations * 4
    more = dataclasses.replace(fitted, num_iterations=fitted.num_iterations + 1)
    with pytest.raises(gpt.RunError, match="--epochs=3"):
        gpt.TrainData(more, gpt.Schedule(more))
    assert gpt.fit_steps(fitted) == fitted
    result = run(shards, "--num_iterations=0", "--sequence_start=anywhere", "--val_loss_every=-1",
                 f"--train_files={shards}/train_0.bin", preset=TINY)
    assert result["config"]["num_iterations"] == (sizes[0] - 1) // 512 == result["train_points"][-1][0]
    num_steps = result["config"]["num_iterations"]
    every = -(-num_steps // 10)
    assert [step for step, *_ in result["val_points"]] == [*range(0, num_steps, every), num_steps]
    run(shards, "--num_iterations=0", status=2)  # documents are cut, so their tokens cannot be counted
