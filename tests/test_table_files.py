"""A table that is too large for one file: pieces beside the checkpoint, for any number of ranks."""

import pytest
from conftest import gpt, smoke_run

from records import sample

FRONTIER = ("--preset=smoke_frontier", "--micro_batch_tokens=512")


@pytest.fixture(scope="module")
def whole_run(shards, tmp_path_factory):
    return smoke_run(shards, tmp_path_factory.mktemp("whole"), *FRONTIER)


@pytest.fixture
def saved(shards, tmp_path, monkeypatch):
    """The folder of a run with checkpoints of steps 4, 8 and 12, of which two are kept, and the pieces of 100 KB."""
    monkeypatch.setattr(gpt.ShardedTable, "PIECE_BYTES", 100_000)
    folder = tmp_path / "first"
    folder.mkdir()
    smoke_run(shards, folder, *FRONTIER, "--checkpoint_every=4")
    (run,) = (folder / "checkpoints").iterdir()
    return run


def test_pieces_of_a_checkpoint(shards, tmp_path, saved, whole_run, capsys):
    """1,024 rows of 64 values and two moments, 264 bytes each, are three files. A run continues from them exactly."""
    names = sorted(path.name for path in saved.glob("*.pt"))
    steps = [f"step_0000{step}" for step in (12, 14)]
    assert names == sorted(f"{step}{part}.pt" for step in steps for part in ("", "_table0", "_table1", "_table2"))
    metadata, tensors = gpt.read_checkpoint(saved / "step_000012.pt")
    assert list(metadata["tables"]) == [f"step_000012_table{k}.pt" for k in range(3)]
    assert tensors["ngram"].shape == (1024, 64) and tensors["ngram"].any(1).sum() > 200
    resumed = smoke_run(shards, tmp_path, *FRONTIER, f"--resume={saved / 'step_000012.pt'}")
    assert resumed["final_val_loss"] == whole_run["final_val_loss"]
    capsys.readouterr()
    assert sample.main([str(saved / "step_000012.pt"), "--prompt=abc", "--max_new_tokens=5", "--device=cpu"]) == 0
    assert capsys.readouterr().out.startswith("abc")


@pytest.mark.slow
def test_pieces_are_of_no_number_of_ranks(shards, tmp_path, saved, whole_run):
    """Two ranks, each with half of the rows in one file, continue from the pieces of one rank."""
    resumed = smoke_run(shards, tmp_path, *FRONTIER, f"--resume={saved / 'step_000012.pt'}", nproc=2)
    assert resumed["final_val_loss"] == whole_run["final_val_loss"]


@pytest.mark.parametrize("fault", ["damaged", "missing"])
def test_an_incomplete_set_is_not_taken(saved, fault):
    """A piece with another bit or without its file. The checkpoint before it is read."""
    piece = saved / "step_000014_table1.pt"
    if fault == "missing":
        piece.unlink()
    else:
        data = bytearray(piece.read_bytes())
        data[len(data) // 2] ^= 1
        piece.write_bytes(data)
    with pytest.raises(gpt.InputError, match="step_000014_table1.pt"):
        gpt.read_checkpoint(saved / "step_000014.pt")
    assert gpt.read_newest(saved).path.name == "step_000012.pt"


def test_a_piece_that_cannot_be_written(shards, tmp_path, monkeypatch, capsys):
    """The run goes on, says that there is no checkpoint, and ends with status 1."""
    monkeypatch.setattr(gpt.ShardedTable, "PIECE_BYTES", 100_000)
    write = gpt.write_atomic

    def fail(path, *args):
        if "_table1" in path.name:
            raise OSError(28, "No space left on device")
        write(path, *args)

    monkeypatch.setattr(gpt, "write_atomic", fail)
    options = (f"--train_files={shards}/train_*.bin", f"--val_files={shards}/val_*.bin", "--device=cpu")
    folders = (f"--logs_dir={tmp_path}/logs", f"--checkpoint_dir={tmp_path}/checkpoints", "--save_model=off")
    assert gpt.main([*FRONTIER, *options, *folders, "--checkpoint_every=14"]) == 1
    assert "no checkpoint of step 14" in capsys.readouterr().out
    assert not list(tmp_path.glob("checkpoints/*/step_000014.pt"))
