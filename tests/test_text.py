"""Corpora: text becomes shards, what stays out of them, what is replaced, and what the tool refuses."""

import contextlib
import hashlib
import io
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BOS, ROOT, VOCAB, at_most, gpt, make_runtime, smoke_config

sys.path.insert(0, str(ROOT / "data"))
import text  # noqa: E402


def make(capsys, *args, status: int = 0) -> str:
    """Run the tool here; its output, or the one line of its refusal."""
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
    """A file of lines with so many bytes."""
    lines = "".join(f"{i} times {i} is {i * i}.\n" for i in range(size // 10))
    path.write_text(lines[:size])
    return path


def read_shards(folder) -> dict[str, bytes]:
    """Name and content of every file but corpus.json, and nothing unfinished."""
    assert not list(folder.rglob("*.partial"))
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "corpus.json"}


def read_info(folder) -> dict:
    return json.loads((folder / "corpus.json").read_text())


def documents(folder, split: str) -> list[bytes]:
    """The documents of a split, in order."""
    tokens = [gpt.open_shard(str(path), VOCAB).read() for path in sorted(folder.glob(f"{split}_*.bin"))]
    stream = np.concatenate(tokens)
    return [bytes(part[1:].astype(np.uint8)) for part in np.split(stream, np.flatnonzero(stream == BOS))[1:]]


# ---- what is made ---------------------------------------------------------------------------------------------------


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


def test_the_same_texts_give_the_same_bytes(tmp_path, capsys):
    texts = make_texts(tmp_path / "texts")
    for out in ("one", "two"):
        make(capsys, texts, "--out", tmp_path / out)
    assert read_shards(tmp_path / "one") == read_shards(tmp_path / "two")


def test_documents_stand_in_the_order_of_their_hash():
    """Of number and name; both splits as they were before few files were shared out by document."""
    names = ["a/b.py", "c.py", "d\u00e9.py", "e.py", "f.py", "g.py", *map(str, range(60))]
    splits = text.split_documents([(name, (name + " ").encode() * 200) for name in names], text.encode_bytes, BOS, 2047)
    is_val = {name: hashlib.sha256(name.encode()).digest()[0] < 16 for name in names}
    for split, docs in splits.items():
        mine = [name for name in names if is_val[name] == (split == "val")]
        mine.sort(key=lambda name: hashlib.sha256(f"0 {name}".encode()).digest())
        assert [bytes(tokens[1:].astype(np.uint8)).split()[0].decode() for tokens in docs] == mine and mine


def test_a_shard_without_a_documents_start_is_joined_to_the_one_before(tmp_path, capsys):
    """Documents of 30,001 tokens in shards of 20,000: every second shard begins and ends inside one."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "20000", "--doc_bytes", "30000")
    found = documents(out, "train") + documents(out, "val")
    assert sum(map(len, found)) == 200_000 and max(map(len, found)) > 29_900
    assert len(list(out.glob("train_*"))) == 6


@pytest.mark.parametrize("number", range(8))
def test_one_small_file_is_enough_whatever_its_name(number, tmp_path, capsys):
    """Names whose documents all hash to one side gave one split nothing: 13 of 40 at this size."""
    book = write_book(tmp_path / f"book{number}.txt", 40_000)
    make(capsys, book, "--out", tmp_path / "mine")
    tokens = read_info(tmp_path / "mine")["tokens"]
    assert tokens["val"] >= 2500 and tokens["val"] < tokens["train"] / 6  # a sixteenth, and a document more at most
    assert sum(map(len, documents(tmp_path / "mine", "val"))) + sum(map(len, documents(tmp_path / "mine", "train"))) == 40_000


@pytest.mark.parametrize("size, doc_bytes", [(2 * 2047 + 512, 2047), (9_000, 2047), (30_000, 2047), (712, 100)])
def test_what_suffices_suffices_for_every_name(size, doc_bytes):
    """Both splits have an attention block: of the size that the refusal names, under 300 names; also where a
    second file, too small for a split of its own, is the only one for validation."""
    content = ((b"x" * 58 + b"\n") * (size // 59 + 1))[:size]
    for number in range(300):
        for texts in ([(f"book{number}", content)], [(f"book{number}", content), ("1.txt", b"short")]):
            splits = text.split_documents(texts, text.encode_bytes, BOS, doc_bytes)
            assert min(sum(map(len, docs)) for docs in splits.values()) > gpt.BLOCK
    assert hashlib.sha256(b"1.txt").digest()[0] < 16


@pytest.mark.parametrize("size, epochs", [(60_000, 100), (5_000, 260)])
def test_the_command_it_prints_trains(size, epochs, tmp_path, capsys, monkeypatch):
    """5,000 bytes are one document for validation and a rest of 2,953 tokens: two packed sequences an epoch, for 260 steps of two."""
    monkeypatch.chdir(tmp_path)
    said = make(capsys, write_book(tmp_path / "book.txt", size), "--out", "mine")
    command = shlex.split(said.splitlines()[-1].partition("./run.sh ")[2])
    cfg = gpt.make_config(gpt.parse_argv(command)[0])
    assert cfg.epochs == epochs and len(gpt.TrainData(cfg, gpt.Schedule(cfg)).sequences) == 520  # enough for all of it
    assert gpt.main([*command, "--num_iterations=10", "--device=cpu"]) == 0
    assert "step:10/10 val_loss" in capsys.readouterr().out


def test_a_list_of_somebody_elses_is_not_replaced(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/corpus.json").write_text('{"my": "notes"}')
    said = make(capsys, write_book(tmp_path / "book.txt", 60_000), "--out", tmp_path / "mine", status=2)
    assert "corpus.json is in the way: it is no list of a corpus" in said
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ['{"my": "notes"}']


def test_a_named_file_that_is_no_text_is_refused(tmp_path, capsys):
    book = write_book(tmp_path / "book.txt", 60_000)
    (tmp_path / "other.txt").write_text("words " * 9000, encoding="utf-16")
    said = make(capsys, book, tmp_path / "other.txt", "--out", tmp_path / "mine", status=2)
    assert "other.txt has a NUL byte" in said and not (tmp_path / "mine").exists()
    make(capsys, tmp_path, "--out", tmp_path / "mine")  # in a folder it is passed over
    assert sum(read_info(tmp_path / "mine")["tokens"].values()) == 60_030  # 30 documents, each behind BOS


def test_too_little_text_leaves_nothing(tmp_path, capsys):
    (tmp_path / "note.txt").write_text("one line\n" * 9)
    said = make(capsys, tmp_path / "note.txt", "--out", tmp_path / "mine", status=2)
    assert "82 tokens" in said and "give more text (4606 tokens always suffice)" in said
    assert not (tmp_path / "mine").exists()


def test_splitting_keeps_every_byte_and_prefers_line_ends():
    content = b"aa\n" * 10 + b"x" * 25 + b"\nlast"
    pieces = list(text.split_text(content, 10))
    assert b"".join(pieces) == content and max(map(len, pieces)) <= 10 and pieces[0] == b"aa\n" * 3


def test_gpt2_tokens_need_an_optional_package(tmp_path, capsys, monkeypatch):
    """Either tiktoken is missing or its vocabulary cannot be fetched here: both are explained. With both it works."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text("hello world " * 50)
    args = [str(tmp_path / "texts"), "--out", str(tmp_path / "x"), "--tokenizer", "gpt2"]
    if text.main(args) == 0:
        assert gpt.open_shard(str(tmp_path / "x" / "train_000000.bin"), 50257).bos == 50256
    else:
        assert "--tokenizer=bytes" in capsys.readouterr().err and not (tmp_path / "x").exists()


# ---- names and kinds of files ---------------------------------------------------------------------------------------


def test_a_name_need_not_be_text(tmp_path):
    """Latin-1 in a file's name and in the folder's: the command that is printed holds the very bytes."""
    folder, out = (os.fsencode(tmp_path / name) for name in ("t", "o"))
    folder, out = folder + b"\xe9", out + b"\xfc"
    os.mkdir(folder)
    write_book(Path(os.fsdecode(folder + b"/caf\xe9.txt")), 20_000)
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(printed):
        assert text.main([os.fsdecode(folder), "--out", os.fsdecode(out)]) == 0
    printed.flush()
    assert b"--train_files='" + out + b"/train_*.bin'" in printed.buffer.getvalue()
    assert sum(map(len, documents(Path(os.fsdecode(out)), "train"))) > 10_000


@pytest.mark.parametrize("name", ["it's mine", "my [first] corpus", "what?*", 'a "b" $HOME `id`'])
def test_the_command_stands_for_any_folder(name, tmp_path, capsys):
    """The shell hands it on as it is meant, and as a pattern it finds the shards."""
    out = tmp_path / name
    said = make(capsys, write_book(tmp_path / "book.txt", 20_000), "--out", out)
    command = "set -- " + said.splitlines()[-1].partition("./run.sh ")[2] + "; printf '%s\\0' \"$@\""
    words = subprocess.run(["sh", "-c", command], capture_output=True, text=True).stdout.split("\0")
    values = dict(word[2:].split("=", 1) for word in words[:-1])
    for split in ("train", "val"):
        assert gpt.find_shards(values[f"{split}_files"], "x") == [str(out / f"{split}_000000.bin")]


def test_a_pipe_is_refused_and_one_in_a_folder_passed_over(tmp_path, capsys):
    """Either would be waited for."""
    (tmp_path / "texts").mkdir()
    os.mkfifo(tmp_path / "texts" / "pipe")
    write_book(tmp_path / "texts" / "book.txt", 20_000)
    with at_most(20):
        said = make(capsys, tmp_path / "texts" / "pipe", "--out", tmp_path / "x", status=2)
        assert "pipe is neither a file nor a folder: give files or folders" in said and not (tmp_path / "x").exists()
        make(capsys, tmp_path / "texts", "--out", tmp_path / "mine")


@pytest.mark.parametrize(
    "args, complaint",
    [
        (["missing_folder", "--out", "x"], "missing_folder does not exist"),
        (["."], "--out"),
        ([".", "--out", "x", "--shard_tokens", "5"], "--shard_tokens: 5 is not a whole number of at least 20000"),
        ([".", "--out", "x", "--doc_bytes", "some"], "--doc_bytes: some is not a whole number of at least 1"),
        ([".", "--out", "x", "--tokenizer", "words"], "invalid choice: 'words'"),
    ],
)
def test_text_tool_refuses_in_one_line(tmp_path, args, complaint, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complaint in make(capsys, *args, status=2)
    assert not (tmp_path / "x").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys, monkeypatch):
    book = write_book(tmp_path / "book.txt", 20_000)

    def fail(self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    said = make(capsys, book, "--out", tmp_path / "mine", status=2)
    assert f"{book} cannot be read (Input/output error): " in said and not (tmp_path / "mine").exists()


# ---- what is replaced -----------------------------------------------------------------------------------------------


def test_only_what_corpus_json_lists_is_replaced(tmp_path, capsys):
    """A folder with any other shard is refused before anything is read, and stays as it is."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "50000")
    assert len(read_shards(out)) == 5
    make(capsys, book, "--out", out)  # takes away those it no longer has
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
def test_shards_of_nobodys_corpus_are_refused(left, tmp_path, capsys):
    """Without a corpus.json, and with one that says nothing."""
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


def test_a_corpus_of_before_is_known_by_its_names_and_sizes(tmp_path, capsys):
    """It listed no files: its own are replaced, not one that is longer or called otherwise."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "50000")
    info = read_info(out)
    del info["files"]
    (out / "corpus.json").write_text(json.dumps(info))
    assert text.read_corpus(out)[0] == str(book)  # whole: a run does not build it again
    with open(out / "train_000001.bin", "ab") as file:
        file.write(b"12")
    assert "is in the way" in make(capsys, book, "--out", out, status=2)
    os.truncate(out / "train_000001.bin", (out / "train_000001.bin").stat().st_size - 2)
    make(capsys, book, "--out", out)
    assert sorted(read_shards(out)) == ["train_000000.bin", "val_000000.bin"]


def test_what_is_broken_off_can_be_made_again(tmp_path, capsys, monkeypatch):
    """Between the first new shard and the last: corpus.json lists the old ones and the new ones then."""
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


def test_a_full_disk_keeps_what_was_there(tmp_path, capsys):
    """No file may grow beyond 30,000 bytes, as on a disk with no more left: the folder is named, with the reason."""
    out = tmp_path / "mine"
    make(capsys, write_book(tmp_path / "book.txt", 9_000), "--out", out)
    before = read_shards(out), read_info(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write_book(tmp_path / "book.txt", 40_000)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        said = make(capsys, tmp_path / "book.txt", "--out", out, status=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{out} cannot be written (File too large): free space or mend its permissions" in said
    assert (read_shards(out), read_info(out)) == before


# ---- the embedded corpus --------------------------------------------------------------------------------------------


def test_the_embedded_corpus_leaves_out_what_differs_between_builds():
    names = dict(text.read_torch_source())
    assert "nn/functional.py" in names and "version.py" not in names and list(names) == sorted(names)
    assert "+" not in text.torch_source_name()


@pytest.fixture
def small_source(tmp_path, monkeypatch):
    """A few files of PyTorch's source as the embedded corpus, in a folder of its own."""
    torch_folder = Path(gpt.torch.__file__).parent
    files = [(f"nn/{name}.py", (torch_folder / f"nn/{name}.py").read_bytes()) for name in ("functional", "init")]
    for name, content in files:
        path = tmp_path / "torch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(gpt.torch, "__file__", str(tmp_path / "torch/__init__.py"))
    monkeypatch.chdir(tmp_path)
    return Path("data", "torch_source")


def ensure():
    gpt.ensure_corpus(smoke_config(), make_runtime())


@pytest.mark.parametrize("damage", ["null", "[]", '"x"', "{}", "train", "val", "short", "source"])
def test_a_corpus_that_is_not_whole_is_built_again(damage, small_source):
    """Where corpus.json is no such thing, and where shards are gone or cut; what is whole stays as it is."""
    ensure()
    before, info = read_shards(small_source), read_info(small_source)
    old = {path: path.stat().st_mtime_ns for path in small_source.iterdir()}
    ensure()
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
    ensure()
    assert (read_shards(small_source), read_info(small_source)) == (before, info)


@pytest.mark.parametrize("kind", ["full disk", "no folder"])
def test_a_corpus_that_cannot_be_written(kind, small_source):
    """The folder, the reason and what to do, in one line; and nothing half-written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if kind == "no folder":
        Path("data").write_text("a file, as a folder that takes none")
    reason = "File too large" if kind == "full disk" else "Not a directory"
    advice = r"free space or mend its permissions, or choose another folder \(data/text.py --out DIR\)"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        with pytest.raises(gpt.InputError, match=rf"data/torch_source cannot be written \({reason}\): {advice}"):
            ensure()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in Path("data").rglob("*") if path != small_source]
