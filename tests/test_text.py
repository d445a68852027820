"""data/text.py: text becomes shards, files are skipped, shards are replaced, and bad input is refused."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BOS, ROOT, VOCAB, at_most, gpt

from data import text


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
    for i in range(60):
        content = b"\n".join(bytes(rng.integers(32, 127, 190, dtype=np.uint8)) for _ in range(20))
        (folder / "sub" / f"{i}.txt").write_bytes(content)
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
    """The documents of a split, in order."""
    tokens = [gpt.open_shard(str(path), VOCAB).tokens for path in sorted(folder.glob(f"{split}_*.bin"))]
    stream = np.concatenate(tokens)
    return [bytes(part[1:].astype(np.uint8)) for part in np.split(stream, np.flatnonzero(stream == BOS))[1:]]


# ---- the shards ----------------------------------------------------------------------------------------------------


def test_text_becomes_shards_with_every_byte_in_order(tmp_path, capsys):
    texts, out = make_texts(tmp_path / "texts"), tmp_path / "mine"
    said = make(capsys, texts, "--out", out, "--shard_tokens", "50000")
    info = read_info(out)
    assert info["fingerprint"] in said and sorted(info["files"]) == sorted(read_shards(out))
    assert len(list(out.glob("train_*"))) > 1
    found = {split: documents(out, split) for split in ("train", "val")}
    assert {split: sum(len(d) + 1 for d in docs) for split, docs in found.items()} == info["tokens"]
    for split, docs in found.items():
        pieces = set(docs)
        assert max(map(len, pieces)) <= 2047
        for file in (texts / "sub").iterdir():
            is_validation = hashlib.sha256(f"sub/{file.name}".encode()).digest()[0] < 16
            is_here = {piece in pieces for piece in text.split_text(file.read_bytes(), 2047)}
            assert is_here == {is_validation == (split == "val")}


def test_documents_are_in_the_order_of_their_hash():
    """The hash is of number and name. With many files the splits are by file."""
    names = ["a/b.py", "c.py", "d\u00e9.py", "e.py", "f.py", "g.py", *map(str, range(60))]
    splits = text.split_documents([(name, (name + " ").encode() * 200) for name in names], text.encode_bytes, BOS, 2047)
    is_val = {name: hashlib.sha256(name.encode()).digest()[0] < 16 for name in names}
    for split, docs in splits.items():
        mine = [name for name in names if is_val[name] == (split == "val")]
        mine.sort(key=lambda name: hashlib.sha256(f"0 {name}".encode()).digest())
        assert [bytes(tokens[1:].astype(np.uint8)).split()[0].decode() for tokens in docs] == mine and mine


def test_a_shard_without_a_bos_is_joined_to_the_previous_one(tmp_path, capsys):
    """Documents of 30,001 tokens in shards of 20,000: every second shard would have no BOS."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "20000", "--doc_bytes", "30000")
    found = documents(out, "train") + documents(out, "val")
    assert sum(map(len, found)) == 200_000 and max(map(len, found)) > 29_900
    assert len(list(out.glob("train_*"))) == 6


@pytest.mark.parametrize("size, doc_bytes", [(2 * 2047 + 512, 2047), (9_000, 2047), (30_000, 2047), (712, 100)])
def test_the_size_that_always_suffices_fits_every_name(size, doc_bytes):
    """Both splits have an attention block under 300 names, with the size that the refusal names. So do they if
    a small second file is the only one for validation."""
    content = ((b"x" * 58 + b"\n") * (size // 59 + 1))[:size]
    for number in range(300):
        for texts in ([(f"book{number}", content)], [(f"book{number}", content), ("1.txt", b"short")]):
            splits = text.split_documents(texts, text.encode_bytes, BOS, doc_bytes)
            assert min(sum(map(len, docs)) for docs in splits.values()) > gpt.BLOCK
    assert hashlib.sha256(b"1.txt").digest()[0] < 16


@pytest.mark.parametrize("size, epochs, doc_bytes", [
    (60_000, 100, 2047), pytest.param(5_000, 260, 2047, marks=pytest.mark.slow), pytest.param(3_000, 520, 2047, marks=pytest.mark.slow), (600, 2080, 44)])
def test_the_printed_command_trains(size, epochs, doc_bytes, tmp_path, capsys, monkeypatch):
    """5,000 bytes are one document for validation and 2,953 tokens for training: two packed sequences per epoch, for 260 steps of two.
    With fewer tokens than one packed sequence, sequences are shorter."""
    monkeypatch.chdir(tmp_path)
    said = make(capsys, write_book(tmp_path / "book.txt", size), "--out", "mine", f"--doc_bytes={doc_bytes}")
    command = shlex.split(said.splitlines()[-1].partition("train_gpt.py ")[2])
    cfg = gpt.make_config(gpt.parse_argv(command))
    assert cfg.epochs == epochs and len(gpt.TrainData(cfg, gpt.Schedule(cfg)).sequences) == 520 * 1024 // cfg.seq_len  # enough for the whole run
    assert gpt.main([*command, "--num_iterations=10", "--device=cpu"]) == 0
    assert "step:10/10 val_loss" in capsys.readouterr().out


def test_splitting_keeps_every_byte_and_prefers_line_ends():
    content = b"aa\n" * 10 + b"x" * 25 + b"\nlast"
    pieces = list(text.split_text(content, 10))
    assert b"".join(pieces) == content and max(map(len, pieces)) <= 10 and pieces[0] == b"aa\n" * 3


# ---- what is read, and what is refused ------------------------------------------------------------------------------


def test_what_is_skipped(tmp_path, capsys):
    """Hidden files, as a token in .git/config, pipes, broken links, files with a NUL byte, a file given twice, and folders
    behind links. Bytes that are not UTF-8 are kept."""
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
    assert said.startswith("files and folders skipped: 5 hidden or node_modules, 1 links to folders, 2 not regular, "
                           "2 given twice, 1 empty, 1 with a NUL byte\n"), said
    assert "latin.txt: 2 bytes are not UTF-8 and kept" in said
    found = documents(tmp_path / "mine", "train") + documents(tmp_path / "mine", "val")
    assert b"caf\xe9 na\xefve" in found and sum(map(len, found)) == 20_000 + 10


@pytest.mark.parametrize("args", [
    ["missing_folder", "--out", "x"], ["pipe", "--out", "x"], ["nul.txt", "--out", "x"], ["short.txt", "--out", "x"],
    ["empty", "--out", "x"], ["book.txt", "--out", "a" * 300], ["."], [".", "--out", ""], [".", "", "--out", "x"],
    ["..", "--out", "x", "--shard_tokens", "5"], [".", "--out", "x", "--doc_bytes", "some"],
    [".", "--out", "x", "--tokenizer", "words"], ["book.txt", "--out", gpt.EMBEDDED_CORPUS],
    ["book.txt", "--out", str(ROOT / gpt.EMBEDDED_CORPUS)], ["book.txt", "--out", "notes"]])
def test_text_tool_refuses_in_one_line(tmp_path, args, capsys, monkeypatch):
    """And changes nothing. notes/corpus.json describes no corpus."""
    monkeypatch.chdir(tmp_path)
    write_book(tmp_path / "book.txt", 20_000)
    (tmp_path / "nul.txt").write_bytes(b"a\0" * 9000)
    (tmp_path / "short.txt").write_text("one line\n" * 9)
    for name in ("empty", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes/corpus.json").write_text('{"my": "notes"}')
    os.mkfifo("pipe")
    before = sorted(tmp_path.rglob("*"))
    with at_most(300):
        make(capsys, *args, status=2)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "notes/corpus.json").read_text() == '{"my": "notes"}'


def test_the_output_cannot_become_input(tmp_path, capsys, monkeypatch):
    """corpus.json is text: each call read the file of the previous call, and the corpus grew."""
    monkeypatch.chdir(tmp_path)
    texts = make_texts(tmp_path / "texts")
    (tmp_path / "link").symlink_to("texts/sub")
    for out in ("texts", "texts/../texts/sub/shards", "link/shards", ".", "texts/.shards"):
        assert f"--out={Path(out)}" in make(capsys, "." if out == "." else "texts", "--out", out, status=2)
    make(capsys, "texts", "--out", "texts_shards")
    assert "texts_shards" in make(capsys, "texts_shards/corpus.json", "--out", "texts_shards", status=2)
    assert sorted(path.name for path in texts.iterdir()) == ["image.png", "sub"]


def test_only_what_corpus_json_lists_is_replaced(tmp_path, capsys):
    """A folder with another shard is refused before any text is read, and stays unchanged."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "50000")
    assert len(read_shards(out)) == 5
    make(capsys, book, "--out", out)  # removes the shards that it does not replace
    assert sorted(read_shards(out)) == ["train_000000.bin", "val_000000.bin"] == sorted(read_info(out)["files"])
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


@pytest.mark.parametrize("left", ["", "null", "[]", '"x"', "{", '{"files": 3, "tokens": []}'])
def test_shards_without_a_list_are_refused(left, tmp_path, capsys):
    """Without a corpus.json, and with one that lists nothing."""
    out = tmp_path / "mine"
    out.mkdir()
    (out / "train_000000.bin").write_text("a user's own")
    if left:
        (out / "corpus.json").write_text(left)
    said = make(capsys, write_book(tmp_path / "book.txt", 20_000), "--out", out, status=2)
    assert "train_000000.bin is in the way" in said and (out / "train_000000.bin").read_text() == "a user's own"
    (out / "train_000000.bin").unlink()
    make(capsys, tmp_path / "book.txt", "--out", out)
    assert read_info(out)["files"] == ["train_000000.bin", "val_000000.bin"]


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
    assert sorted(read_shards(out)) == ["train_000000.bin", "val_000000.bin"] == sorted(read_info(out)["files"])


def test_the_next_call_removes_the_partial_folder_of_a_killed_one(tmp_path, capsys):
    """The call is killed with all shards written and none in place. A user's folder of a similar name stays."""
    book, out = write_book(tmp_path / "book.txt", 20_000), tmp_path / "mine"
    code = (f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom data import text\n"
            "text.hash_shards = lambda _: os.kill(os.getpid(), 9)\ntext.main(sys.argv[1:])")
    killed = subprocess.run([sys.executable, "-c", code, book, "--out", out], capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    (partial,) = out.glob("*.partial")
    assert sorted(path.name for path in partial.iterdir()) == ["train_000000.bin", "val_000000.bin"]
    (out / "tmp.partial").mkdir()
    make(capsys, book, "--out", out)
    assert list(out.glob("*.partial")) == [out / "tmp.partial"]


def test_a_second_call_waits_for_the_first(tmp_path):
    """The partial folder of a call that still runs is not removed."""
    book, out = write_book(tmp_path / "book.txt", 20_000), tmp_path / "mine"
    with at_most(300):
        with text.lock_folder(out):
            (out / "tmpabcdefgh.partial").mkdir()
            command = [sys.executable, ROOT / "data/text.py", book, "--out", out]
            second = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            assert second.stderr.readline() == f"text.py: waiting for another process, which writes {out}\n"
            assert sorted(out.iterdir()) == [out / "tmpabcdefgh.partial"]
        assert second.communicate() == (None, "") and second.returncode == 0
    assert sorted(read_shards(out)) == ["train_000000.bin", "val_000000.bin"]


# ---- the embedded corpus --------------------------------------------------------------------------------------------


def test_the_embedded_corpus_leaves_out_what_differs_between_builds():
    names = dict(text.read_torch_source())
    assert "nn/functional.py" in names and "version.py" not in names and list(names) == sorted(names)
    assert "+" not in text.torch_source_name()


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """An embedded corpus of two files of PyTorch's source, in a temporary folder."""
    torch_folder = Path(gpt.torch.__file__).parent
    files = [(f"nn/{name}.py", (torch_folder / f"nn/{name}.py").read_bytes()) for name in ("functional", "init")]
    for name, content in files:
        path = tmp_path / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(gpt.torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.chdir(tmp_path)
    return Path("data", "torch_source")


@pytest.mark.parametrize("damage", ["null", "[]", '"x"', "{}", "train", "val", "short", "source"])
def test_an_incomplete_corpus_is_built_again(damage, small_source):
    """If corpus.json is damaged, or shards are missing or cut. A complete corpus stays unchanged."""
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
