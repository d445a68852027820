"""data/text.py: text becomes shards, files are skipped, shards are replaced, and bad input is refused."""

import hashlib
import json
import multiprocessing
import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BOS, ROOT, VOCAB, at_most, gpt

from data import text

TWO_SHARDS = ["train_000000.bin", "val_000000.bin"]


def make(capsys, *args, status: int = 0) -> str:
    """Run the tool in this process. Returns its output, or the line of its refusal."""
    capsys.readouterr()
    try:
        ended = text.main([*map(str, args)])
    except SystemExit as end:
        ended = end.code
    out, err = capsys.readouterr()
    assert ended == status, err
    assert err.count("\n") == (status != 0) and "Traceback" not in err
    return err if status else out


def make_texts(folder):
    (folder / "sub").mkdir(parents=True)
    rng = np.random.default_rng(1)
    for name in ("d\u00e9.py", *map(str, range(60))):
        content = b"\n".join(bytes(rng.integers(32, 127, 190, dtype=np.uint8)) for _ in range(20))
        (folder / "sub" / name).write_bytes(content)
    (folder / "image.png").write_bytes(b"\x89PNG\0\0")
    return folder


def write_book(path, size: int):
    """Write a file of lines with `size` bytes."""
    lines = "".join(f"{i} times {i} is {i * i}.\n" for i in range(size // 10))
    path.write_text(lines[:size])
    return path


def read_shards(folder) -> dict[str, bytes]:
    """Name and content of every file except corpus.json. No partial file is left."""
    assert not list(folder.rglob("*.partial"))
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "corpus.json"}


def read_info(folder) -> dict:
    return json.loads((folder / "corpus.json").read_text())


def documents(folder, split: str) -> list[bytes]:
    tokens = [gpt.open_shard(str(path), VOCAB).tokens for path in sorted(folder.glob(f"{split}_*.bin"))]
    stream = np.concatenate(tokens)
    return [bytes(part[1:].astype(np.uint8)) for part in np.split(stream, np.flatnonzero(stream == BOS))[1:]]


def test_text_becomes_shards_with_every_byte_in_order(tmp_path, capsys):
    """Files are divided by the hash of their name, and documents are in the order of a hash."""
    texts, out, expected = make_texts(tmp_path / "texts"), tmp_path / "mine", {"train": [], "val": []}
    said = make(capsys, texts, "--out", out, "--shard_tokens", "50000")
    info = read_info(out)
    assert info["fingerprint"] in said and sorted(info["files"]) == sorted(read_shards(out))
    assert len(list(out.glob("train_*"))) > 1
    for file in (texts / "sub").iterdir():
        name = f"sub/{file.name}"
        split = "val" if hashlib.sha256(name.encode()).digest()[0] < 16 else "train"
        for number, piece in enumerate(text.split_text(file.read_bytes(), 2047)):
            expected[split].append((hashlib.sha256(f"{number} {name}".encode()).digest(), piece))
    for split, pieces in expected.items():
        assert documents(out, split) == [piece for _, piece in sorted(pieces)] and len(pieces) > 1
        assert info["tokens"][split] == sum(len(piece) + 1 for _, piece in pieces)


def test_a_shard_without_a_bos_is_joined_to_the_previous_one(tmp_path, capsys):
    """Documents of 30,001 tokens in shards of 20,000: every second shard would have no BOS."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "20000", "--doc_bytes", "30000")
    found = documents(out, "train") + documents(out, "val")
    assert sum(map(len, found)) == 200_000 and max(map(len, found)) > 29_900
    assert len(list(out.glob("train_*"))) == 6


@pytest.mark.parametrize("size, doc_bytes", [(2 * 2047 + 512, 2047), (9_000, 2047), (712, 100)])
def test_the_size_that_always_suffices_fits_every_name(size, doc_bytes):
    """Both splits have an attention block under 300 names, also if a small second file is all of the validation."""
    content = ((b"x" * 58 + b"\n") * (size // 59 + 1))[:size]
    for number in range(300):
        for texts in ([(f"book{number}", content)], [(f"book{number}", content), ("1.txt", b"short")]):
            splits = text.split_documents(texts, text.encode_bytes, BOS, doc_bytes)
            assert min(sum(map(len, docs)) for docs in splits.values()) > gpt.BLOCK
    assert hashlib.sha256(b"1.txt").digest()[0] < 16


@pytest.mark.parametrize("size, epochs, doc_bytes", [
    (60_000, 100, 2047), (5_000, 260, 2047), (3_000, 520, 2047), (600, 2080, 44)])
def test_the_printed_command_trains(size, epochs, doc_bytes, here, capsys):
    """5,000 bytes leave 2,953 training tokens: two sequences per epoch. Of fewer tokens sequences are shorter."""
    said = make(capsys, write_book(here / "book.txt", size), "--out", "mine", f"--doc_bytes={doc_bytes}")
    command = shlex.split(said.splitlines()[-1].partition("train_gpt.py ")[2])
    cfg = gpt.make_config(gpt.parse_argv(command))
    sequences = gpt.TrainData(cfg, gpt.Schedule(cfg)).sequences
    assert cfg.epochs == epochs and len(sequences) == 520 * 1024 // cfg.seq_len  # enough for the whole run
    if size == 600:
        assert gpt.main([*command, "--num_iterations=2", "--device=cpu"]) == 0
        assert "step:2/2 val_loss" in capsys.readouterr().out


def test_splitting_keeps_every_byte_and_prefers_line_ends():
    content = b"aa\n" * 10 + b"x" * 25 + b"\nlast"
    pieces = list(text.split_text(content, 10))
    assert b"".join(pieces) == content and max(map(len, pieces)) <= 10 and pieces[0] == b"aa\n" * 3


def test_what_is_skipped(tmp_path, capsys):
    """Hidden files, pipes, links, NUL bytes, a file given twice. Bytes that are not UTF-8 are kept."""
    texts = tmp_path / ".texts"
    for name in (".git/config", "sub/.venv/a.py", "sub/node_modules/b.js", ".env", "sub/.c"):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_text("password\n" * 1000)
    book = write_book(texts / "sub" / "book.txt", 20_000)
    (texts / "latin.txt").write_bytes(b"caf\xe9 na\xefve")
    (texts / "other.txt").write_text("words " * 9000, encoding="utf-16")
    (texts / "empty.txt").touch()
    (book.parent / "again.txt").symlink_to("book.txt")
    (texts / "broken").symlink_to("nowhere")
    (texts / "folder").symlink_to(tmp_path)
    os.mkfifo(texts / "pipe")
    with at_most(300):
        said = make(capsys, texts, book, "--out", tmp_path / "mine")
    assert said.startswith("files and folders skipped: 5 hidden or node_modules, 1 links to folders, "
                           "2 not regular, 2 given twice, 1 empty, 1 with a NUL byte\n")
    assert "latin.txt: 2 bytes are not UTF-8 and kept" in said
    found = documents(tmp_path / "mine", "train") + documents(tmp_path / "mine", "val")
    assert b"caf\xe9 na\xefve" in found and sum(map(len, found)) == 20_000 + 10


@pytest.mark.parametrize("args", [
    "missing_folder --out=x", "pipe --out=x", "nul.txt --out=x", "short.txt --out=x", "empty --out=x",
    f"book.txt --out={'a' * 300}", ".", ". --out=", ". '' --out=x", ".. --out=x --shard_tokens=5",
    ". --out=x --doc_bytes=some", ". --out=x --tokenizer=words", f"book.txt --out={gpt.EMBEDDED_CORPUS}",
    f"book.txt --out={ROOT / gpt.EMBEDDED_CORPUS}", "book.txt --out=notes", "texts --out=texts",
    "texts --out=texts/../texts/sub/shards", "texts --out=link/shards", "texts --out=texts/.shards",
    ". --out=.", "notes/corpus.json --out=notes"])
def test_text_tool_refuses_in_one_line(here, args, capsys):
    """And changes nothing. The output cannot become the next input: corpus.json is text."""
    write_book(here / "book.txt", 20_000)
    make_texts(here / "texts")
    (here / "link").symlink_to("texts/sub")
    (here / "nul.txt").write_bytes(b"a\0" * 9000)
    (here / "short.txt").write_text("one line\n" * 9)
    for name in ("empty", "notes"):
        (here / name).mkdir()
    (here / "notes/corpus.json").write_text('{"my": "notes"}')
    os.mkfifo("pipe")
    before = sorted(here.rglob("*"))
    with at_most(300):
        make(capsys, *shlex.split(args), status=2)
    assert sorted(here.rglob("*")) == before
    assert (here / "notes/corpus.json").read_text() == '{"my": "notes"}'


def test_only_what_corpus_json_lists_is_replaced(tmp_path, capsys):
    """A folder with another shard is refused before any text is read, and stays unchanged."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "50000")
    assert len(read_shards(out)) == 5
    make(capsys, book, "--out", out)  # removes the shards that it does not replace
    assert sorted(read_shards(out)) == sorted(read_info(out)["files"]) == TWO_SHARDS
    for name in ("train_notes.bin", "val_000001.bin"):
        (out / name).write_text("a user's own")
        before = read_shards(out), read_info(out)
        said = make(capsys, tmp_path / "missing", "--out", out, status=2)
        assert f"{out}/{name} is in the way" in said and "choose another folder, or move it away" in said
        assert (read_shards(out), read_info(out)) == before
        (out / name).unlink()
    (out / "notes.bin").write_text("a user's own")
    make(capsys, write_book(tmp_path / "book.txt", 30_000), "--out", out)
    assert (out / "notes.bin").read_text() == "a user's own"


@pytest.mark.parametrize("left", ["", "[]", "{", '{"files": 3, "tokens": []}'])
def test_shards_without_a_list_are_refused(left, tmp_path, capsys):
    """Without a corpus.json, and with one that lists nothing."""
    out = tmp_path / "mine"
    out.mkdir()
    (out / "train_000000.bin").write_text("a user's own")
    if left:
        (out / "corpus.json").write_text(left)
    said = make(capsys, write_book(tmp_path / "book.txt", 20_000), "--out", out, status=2)
    assert "train_000000.bin is in the way" in said
    assert (out / "train_000000.bin").read_text() == "a user's own"
    (out / "train_000000.bin").unlink()
    make(capsys, tmp_path / "book.txt", "--out", out)
    assert read_info(out)["files"] == TWO_SHARDS


def test_an_interrupted_call_can_be_repeated(tmp_path, capsys, monkeypatch):
    """Between the first and the last new shard, corpus.json lists the old and the new ones."""
    book, out, replace = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine", os.replace
    make(capsys, book, "--out", out, "--shard_tokens", "20000")

    def stop(source, target):
        if Path(target) == out / "val_000000.bin":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        text.write_corpus([("a", book.read_bytes() * 2)], out, "x", text.encode_bytes, VOCAB, BOS, 200_000)
    monkeypatch.undo()
    assert text.read_corpus(out)[0] is None and read_info(out)["files"] == sorted(read_shards(out))
    assert len(read_shards(out)) > 10
    make(capsys, book, "--out", out)
    assert sorted(read_shards(out)) == sorted(read_info(out)["files"]) == TWO_SHARDS


def test_a_second_call_waits_for_the_first(tmp_path, capfd):
    """The partial folder of a call that still runs is not removed. Later it is."""
    book, out, said = write_book(tmp_path / "book.txt", 20_000), tmp_path / "mine", ""
    is_locked = multiprocessing.Event()

    def call():
        is_locked.wait()
        sys.exit(text.main([str(book), f"--out={out}"]))

    second = multiprocessing.Process(target=call)
    second.start()
    with at_most(300):
        with text.lock_folder(out):
            (out / "tmpabcdefgh.partial").mkdir()
            is_locked.set()
            while not said.endswith("\n"):  # it may come in pieces
                said += capfd.readouterr().err
            assert said == f"text.py: waiting for another process, which writes {out}\n"
            assert sorted(out.iterdir()) == [out / "tmpabcdefgh.partial"]
        second.join()
    assert second.exitcode == 0 and sorted(read_shards(out)) == TWO_SHARDS


def test_the_embedded_corpus_leaves_out_what_differs_between_builds():
    names = dict(text.read_torch_source())
    assert "nn/functional.py" in names and "version.py" not in names and list(names) == sorted(names)
    assert "+" not in text.torch_source_name()


@pytest.mark.parametrize("damage", ["null", "{}", "train", "val", "short", "source"])
def test_an_incomplete_corpus_is_built_again(damage, here, monkeypatch):
    """A complete corpus stays unchanged. It has two files of PyTorch's source."""
    source, small_source = Path(gpt.torch.__file__).parent / "nn", Path("data", "torch_source")
    (here / "torch/nn").mkdir(parents=True)
    for name in ("functional.py", "init.py"):
        shutil.copy(source / name, here / "torch/nn")
    monkeypatch.setattr(gpt.torch, "__file__", str(here / "torch/__init__.py"))
    text.make_embedded_corpus()
    before, info = read_shards(small_source), read_info(small_source)
    old = {path: path.stat().st_mtime_ns for path in small_source.iterdir()}
    text.make_embedded_corpus()
    assert {path: path.stat().st_mtime_ns for path in small_source.iterdir()} == old
    if damage in ("train", "val"):
        (small_source / f"{damage}_000000.bin").unlink()
    elif damage == "short":
        os.truncate(small_source / "train_000000.bin", 5000)
    elif damage == "source":
        (small_source / "corpus.json").write_text(json.dumps({**info, "source": "torch 1.0"}))
    else:
        for path in small_source.glob("*.bin"):
            path.unlink()
        (small_source / "corpus.json").write_text(damage)
    text.make_embedded_corpus()
    assert (read_shards(small_source), read_info(small_source)) == (before, info)


@pytest.mark.parametrize("preset", text.PRESETS)
def test_the_sizes_of_presets(preset):
    cfg = gpt.make_config({"preset": preset})
    tokens = gpt.Schedule(cfg).count_tokens()
    assert text.PRESETS[preset] == (tokens, cfg.epochs, cfg.seq_len, cfg.val_tokens, cfg.val_seq_len)
