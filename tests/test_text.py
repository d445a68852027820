"""data/text.py: text becomes shards, files are skipped, shards are replaced, and bad input is refused."""

import codecs
import csv
import gzip
import hashlib
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import sys
import termios
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import BOS, ROOT, VOCAB, at_most, call_tool, gpt

from data import text

TIME_STEP = text.time_step
TWO_SHARDS = ["train_000000.bin", "val_000000.bin"]


@pytest.fixture(autouse=True)
def print_no_progress(monkeypatch):
    """Its lines depend on the speed of the machine. So do the printed sizes, see test_the_printed_command_trains."""
    monkeypatch.setattr(text, "PROGRESS_SECONDS", 1e9)
    monkeypatch.setattr(text, "time_step", lambda options: 0.01)


def make(capsys, *args, status: int = 0) -> str:
    """Run the tool in this process. Returns its output, or the line of its refusal."""
    ended, out, err = call_tool(capsys, text.main, [*map(str, args)])
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


def documents(folder, split: str = "*") -> list[bytes]:
    tokens = [gpt.open_shard(str(path), VOCAB).tokens for path in sorted(folder.glob(f"{split}_*.bin"))]
    stream = np.concatenate(tokens)
    return [bytes(part[1:].astype(np.uint8)) for part in np.split(stream, np.flatnonzero(stream == BOS))[1:]]


@pytest.fixture(name="gpt2")
def fake_tiktoken(monkeypatch):
    """Up to four letters are a token, and so is every other character. Returns the function that decodes."""
    ids = {}
    encode = lambda content: [ids.setdefault(part, len(ids)) for part in re.findall("[a-z]{1,4}|.", content, re.DOTALL)]

    def decode(tokens) -> bytes:
        parts = [*ids]
        return "".join(parts[token] for token in tokens).encode()

    encoding = SimpleNamespace(encode_ordinary=encode, decode_bytes=decode)
    monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(get_encoding=lambda name: encoding))
    return decode


def test_text_becomes_shards_with_every_byte_in_order(tmp_path, capsys):
    """Texts are divided by the hash of their name, and documents are in the order of a hash."""
    texts, out, found = make_texts(tmp_path / "texts"), tmp_path / "mine", {}
    said = make(capsys, texts, "--out", out, "--shard_tokens", "50000")
    info = read_info(out)
    assert info["fingerprint"] in said and sorted(info["files"]) == sorted(read_shards(out))
    assert len(list(out.glob("train_*"))) > 1
    hashes = {name: gpt.open_shard(str(out / name), VOCAB).sha256 for name in info["files"]}
    assert info["sha256"] == hashes
    for file in (texts / "sub").iterdir():
        for number, piece in enumerate(text.split_text(file.read_bytes(), 2047)):
            name = f"sub/{file.name}"
            found[piece] = hashlib.sha256(f"{number} {name}".encode()).digest(), name
    names = []
    for split, tokens in info["tokens"].items():
        pieces = documents(out, split)
        assert pieces == sorted(pieces, key=lambda piece: found[piece][0])
        assert tokens == sum(len(piece) + 1 for piece in pieces)
        names += {found[piece][1] for piece in pieces}
    assert len(names) == len({*names}) == 61  # each text is on one side


def test_a_shard_has_whole_documents(tmp_path, capsys):
    """Documents of 15,001 tokens in shards of 20,000, and of 30,001 tokens, which exceed a shard."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    for size in (15_000, 30_000):
        make(capsys, book, "--out", out, "--shard_tokens", "20000", "--doc_bytes", size)
        shards = [gpt.open_shard(str(path), VOCAB) for path in sorted(out.glob("train_*"))]
        assert [len(shard.bounds) for shard in shards] == [2] * len(shards) and len(shards) > 5
        assert all(shard.tokens[0] == BOS for shard in shards)
    assert sum(map(len, documents(out))) == 200_000


SIZES = {"a long and a short text": [237_438, 3_002], "one": [243_000], "five": [5_000] * 5, "just enough": [2_000],
         "nineteen": [9_999] * 19, "small": [3_000], "tiny ones": [90] * 400, "three and tiny ones": [90] * 200 + [9_000] * 3,
         "a few tiny ones": [50] * 100, "one in sixteen is too long": [60] * 400 + [30_000] * 8}


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
@pytest.mark.parametrize("doc_bytes", [100, 2047, 30_000])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_validation_has_5_to_10_percent(sizes, doc_bytes, tokenizer, tmp_path, capsys, gpt2):
    """At most 20 % of less than 20 kB. Both splits have more than a block, and every byte is in one of them."""
    (tmp_path / "texts").mkdir()
    for number, size in enumerate(sizes):
        lines = "".join(f"text {number}: {i} times {i} is {i * i}.\n" for i in range(size // 10))
        (tmp_path / f"texts/{number}.txt").write_text(lines[:size])
    out = tmp_path / "mine"
    make(capsys, tmp_path / "texts", "--out", out, f"--doc_bytes={doc_bytes}", f"--tokenizer={tokenizer}")
    tokens = read_info(out)["tokens"]
    share = tokens["val"] / sum(tokens.values())
    assert 0.05 <= share <= (0.1 if sum(sizes) > 20_000 else 0.2)
    assert min(tokens.values()) > gpt.BLOCK
    if tokenizer == "bytes":
        assert sum(map(len, documents(out))) == sum(sizes)


def test_one_text_in_sixteen_is_for_validation(tmp_path, capsys):
    """1,000 lines of JSON, by the hash of the file's name and the line's number."""
    rows = [f"{number:03d}" * 30 for number in range(1000)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    make(capsys, tmp_path / "a.jsonl", "--out", tmp_path / "mine")
    hashes = [hashlib.sha256(f"a.jsonl:{number}".encode()).digest() for number in range(1, 1001)]
    expected = {row.encode() for row, key in zip(rows, hashes) if key[0] < 16}
    assert {*documents(tmp_path / "mine", "val")} == expected and len(expected) == 57


def test_the_cut_of_a_long_text_counts_tokens(tmp_path, capsys, gpt2):
    """The last part has four times as many tokens per byte. Validation is the end of the text."""
    content = "abcd" * 25_000 + "12345" * 4_000
    (tmp_path / "a.txt").write_text(content)
    make(capsys, tmp_path / "a.txt", "--out", tmp_path / "mine", "--tokenizer=gpt2", f"--doc_bytes={10**20}")
    tokens = read_info(tmp_path / "mine")["tokens"]
    assert 0.05 < tokens["val"] / sum(tokens.values()) < 0.1
    stream = gpt.open_shard(str(tmp_path / "mine/val_000000.bin"), text.GPT2_VOCAB_SIZE).tokens
    assert content.endswith(gpt2(stream[1:]).decode())


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
@pytest.mark.parametrize("doc_bytes", [4, 100, 2047])
def test_characters_are_not_cut(tokenizer, doc_bytes, tmp_path, capsys, gpt2):
    """One line of 60 kB in Japanese: every document is UTF-8, and together they are the text."""
    content = "".join(chr(0x3041 + i * i % 83) for i in range(20_000))
    (tmp_path / "a.txt").write_text(content)
    out = tmp_path / "mine"
    make(capsys, tmp_path / "a.txt", "--out", out, f"--doc_bytes={doc_bytes}", f"--tokenizer={tokenizer}")
    pieces, bos, decode = [], BOS, bytes
    if tokenizer == "gpt2":
        bos, decode = text.GPT2_BOS, gpt2
    for path in out.glob("*.bin"):
        stream = np.fromfile(path, "<u2")[512:]
        pieces += [decode(part[1:].tolist()).decode() for part in np.split(stream, np.flatnonzero(stream == bos))[1:]]
    assert sorted("".join(pieces)) == sorted(content)
    assert all(piece in content for piece in pieces) and max(len(piece.encode()) for piece in pieces) <= doc_bytes


def test_equal_documents_count_once(tmp_path, capsys):
    """40 copies of each of 50 texts, under two names, in a list of JSON and as a link."""
    texts, contents = tmp_path / "texts", [f"{i} is a number. ".encode() * 30 for i in range(50)]
    for number in range(39):
        (texts / str(number)).mkdir(parents=True)
        for i, content in enumerate(contents):
            (texts / f"{number}/{i}.txt").write_bytes(content)
    (texts / "link.txt").symlink_to("0/0.txt")
    (texts / "skipped.txt").write_bytes(contents[0] + b"\0")  # it has no documents
    rows = "".join(json.dumps({"text": content.decode()}) + "\n" for content in contents)
    (texts / "a.JSONL").write_text(rows)
    (tmp_path / "versions").mkdir()
    said = make(capsys, texts, texts / "3/7.txt", "--out", tmp_path / "mine")
    assert f"documents with the content of another one: {39 * 50 + 2:,}. Equal documents count once\n" in said
    found = documents(tmp_path / "mine")
    assert sorted(found) == sorted(contents)
    for number in range(40):  # versions of one file, each with one more line
        write_book(tmp_path / f"versions/{number}.txt", 9_000 + 50 * number)
    make(capsys, tmp_path / "versions", "--out", tmp_path / "mine")
    assert not {*documents(tmp_path / "mine", "train")} & {*documents(tmp_path / "mine", "val")}
    found = documents(tmp_path / "mine")
    assert len({*found}) == len(found) > 40


def test_formats(tmp_path, capsys):
    """Packed files, lists of JSON and plain files. What is no text is skipped with a line."""
    texts, out = tmp_path / "texts", tmp_path / "mine"
    texts.mkdir()
    rows = [f"{i}\u00e9\n" * 400 for i in range(8)]
    lines = ["".join(json.dumps({"id": 1, "text": row}) + "\n" for row in part) for part in (rows[:4], rows[4:])]
    (texts / "a.jsonl").write_text(lines[0])
    (texts / "b.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    (texts / "c.txt.gz").write_bytes(gzip.compress(b"packed\n" * 100))
    (texts / "d.jsonl").write_text('{"text": "first"}\n\n{"content": "second"}\n{"text": "third"}\n')
    (texts / "nul.txt").write_bytes(b"words " * 900 + b"\0")
    (texts / "damaged.gz").write_bytes(gzip.compress(os.urandom(9000))[:-2000])
    (texts / "table.csv").write_text("1,2\n")
    (texts / "array.json").write_text("[1, 2]")
    for i in range(8):
        (texts / f"{i}.tsv").write_text("1\t2\n")
    (texts / "notes.ipynb").write_text('{"cells": []}')
    (texts / "old/er").mkdir(parents=True)
    (texts / "old/er/x.txt").write_text("old text")
    said = make(capsys, texts, "--out", out, "--exclude=*.csv", "--exclude=old/*")
    assert said.count('.tsv (no "text" among the columns 1, 2 (--key))') == 5 and 'skipped: 3 more (no "text")\n' in said
    assert 'array.json (JSON or a table: write its texts as {"text": "..."} lines of a .jsonl)' in said
    said = re.sub(r"skipped: (.*\.tsv|3 more) .*\n", "", said)
    skipped = [line for line in said.splitlines() if line.startswith("skipped: ")]
    names = [re.search(r"texts/(\S+) \(", line)[1] for line in skipped]
    assert sorted(names) == ["array.json", "d.jsonl", "damaged.gz", "notes.ipynb", "nul.txt"]
    assert 'd.jsonl (line 3 and the rest: no "text" among the keys content (--key))' in said
    found = documents(out)
    assert {b"first", b"packed\n" * 100} < {*found}
    assert len(b"".join(found)) == 5 + 700 + len("".join(rows).encode())
    for name in ("nul.txt", "damaged.gz", "d.jsonl", "notes.ipynb", "array.json"):  # named files are not skipped
        said = make(capsys, texts, texts / name, "--out", tmp_path / "new", status=2)
        assert f"texts/{name} is not used (" in said and not (tmp_path / "new").exists()


ROWS = [f"row {i}, \u00e9 \"quoted\"\tand\r\ncut; " * 40 for i in range(8)]


@pytest.mark.parametrize("suffix, delimiter", [("csv", ","), ("TSV", "\t")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tables(suffix, delimiter, encoding, tmp_path, capsys):
    """Each row of a column is a text. Cells have quotes, delimiters, line ends, more than 131,072 characters, or nothing."""
    long, out = "x" * 200_000, tmp_path / "mine"
    with open(tmp_path / "a", "w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([["id", "body"], *enumerate(ROWS), [8, ""], [9], [], [10, long]])
    (tmp_path / f"a.{suffix}.gz").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    (tmp_path / "a").rename(table := tmp_path / f"a.{suffix}")
    for path in (table, tmp_path / f"a.{suffix}.gz"):
        make(capsys, path, "--out", out, "--key=body", "--doc_bytes=300000")
        found = documents(out)
        assert {row.encode() for row in ROWS} < {*found}
        assert len(b"".join(found)) == len("".join([*ROWS, long]).encode())  # validation may cut a row in two
    names = [(name, source) for name, source, _ in text.read_texts([(table.name, table)], (), "body")]
    assert names == [(f"a.{suffix}:{number}", f"{table}:{number}") for number in range(1, 12)]
    said = make(capsys, table, "--out", tmp_path / "new", status=2)
    assert f'{table} is not used (no "text" among the columns id, body (--key)): ' in said


def test_damaged_tables(tmp_path, capsys):
    """The line is named. Bytes that are not UTF-8 are kept, and the first rows with them are named."""
    (tmp_path / "texts").mkdir()
    write_book(tmp_path / "texts/book.txt", 20_000)
    (tmp_path / "texts/open.csv").write_text('text,id\nfirst,1\n"second,2\n3\n')
    (tmp_path / "texts/quote.csv").write_text('text\n"a"b\n')
    (tmp_path / "texts/empty.csv").touch()
    (tmp_path / "texts/nul.csv").write_bytes(b"text\na\0b\n")
    (tmp_path / "texts/odd.csv").write_bytes(b"\x1b[31m\n\xff," + b"name " * 100)
    (tmp_path / "texts/latin.csv").write_bytes(b"text\n" + b"".join(b"caf\xe9 %d\n" % i for i in range(8)))
    said = make(capsys, tmp_path / "texts", "--out", tmp_path / "mine")
    assert "open.csv (line 3 and the rest: unexpected end of data)\n" in said
    assert "quote.csv (line 2 and the rest: ',' expected after '\"')\n" in said
    assert 'empty.csv (no "text" among the columns (none) (--key))\n' in said
    assert "nul.csv:1 (NUL bytes: no UTF-8 text)\n" in said
    assert 'odd.csv (no "text" among the columns \\x1b[31m (--key))\n' in said  # no bytes for the terminal
    assert said.count("not UTF-8: ") == 6 and "latin.csv:5 (iconv converts a file of another encoding)\n" in said
    assert "not UTF-8: 3 more (iconv converts a file of another encoding)\n" in said
    assert {b"first", *(b"caf\xe9 %d" % i for i in range(8))} < {*documents(tmp_path / "mine")}


def test_keys_of_json_lines(tmp_path, capsys):
    """A line without the key names its keys, in one line of output. Other lines are named."""
    path = tmp_path / "a.jsonl"
    for row, reason in (('{"content": "a", "id\\n": 3}', 'no "text" among the keys content, id\\n (--key)'),
                        ("{}", 'no "text" among the keys (none) (--key)'),
                        (json.dumps({f"key {i}": i for i in range(1000)}), 'no "text" among the keys key 0, key 1, '),
                        ('{"text": ["a"]}', 'no JSON with a "text" (--key)'), ('"a"', 'no JSON with a "text" (--key)'),
                        ("{", 'no JSON with a "text" (--key)')):
        path.write_text(f'{{"text": "a"}}\n{row}\n')
        said = make(capsys, path, "--out", tmp_path / "mine", status=2)
        assert f"{path} is not used (line 2 and the rest: {reason}" in said and len(said) < 600


def test_parquet_without_pyarrow(tmp_path, capsys):
    """A line has the command that installs it."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("pyarrow is installed")
    (tmp_path / "texts").mkdir()
    write_book(tmp_path / "texts/book.txt", 20_000)
    (tmp_path / "texts/a.parquet").write_bytes(b"PAR1")
    reason = f"a.parquet (Parquet needs pyarrow: {shlex.quote(sys.executable)} -m pip install pyarrow)\n"
    assert reason in make(capsys, tmp_path / "texts", "--out", tmp_path / "mine")
    said = make(capsys, tmp_path / "texts/a.parquet", "--out", tmp_path / "new", status=2)
    assert reason.replace(" (", " is not used (").strip() in said


def test_parquet(tmp_path, capsys):
    """A column of text, also large or of repeated values, with missing values. 600 rows in groups of 250."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, path, out = [f"{i}\u00e9 is a number. " * 9 for i in range(600)], tmp_path / "a.parquet", tmp_path / "mine"
    rows[300], rows[301] = None, ""
    strings = pyarrow.array(rows)
    columns = dict(id=pyarrow.array(range(600)), text=strings, large=strings.cast(pyarrow.large_string()),
                   repeated=strings.dictionary_encode())
    parquet.write_table(pyarrow.table(columns), path, row_group_size=250)
    for key in ("text", "large", "repeated"):
        make(capsys, path, "--out", out, f"--key={key}")
        assert sorted(documents(out)) == sorted(row.encode() for row in rows if row)
    found = {name: file.read() for name, _, file in text.read_texts([("a.parquet", path)], ())}
    assert [*found] == [f"a.parquet:{number}" for number in range(1, 601)]
    assert found["a.parquet:301"] == b"" and found["a.parquet:600"] == rows[599].encode()
    refuse = lambda *args: make(capsys, path, "--out", tmp_path / "new", *args, status=2)
    assert '(no "body" among the columns id, text, large, repeated (--key))' in refuse("--key=body")
    assert '(row 1 and the rest: no text in "id" (--key))' in refuse("--key=id")
    os.truncate(path, 9_000)
    assert f"{path} is not used (Parquet" in refuse()
    path.write_bytes(b"")
    assert f"{path} is not used (Parquet" in refuse()


@pytest.mark.parametrize("mark, encoding", [(codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")])
def test_utf16(mark, encoding, tmp_path, capsys):
    """With a byte order mark it becomes UTF-8: plain, packed, and as JSON lines. Two characters take four bytes in both."""
    content = "".join(f"{i} \u00e9\u3042\U0001f600\u2028\r\n" for i in range(20_000))
    (tmp_path / "a.txt").write_bytes(mark + content.encode(encoding))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(mark + content.encode(encoding)))
    rows = "".join(json.dumps({"text": row + "\u2028"}, ensure_ascii=False) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_bytes(mark + rows.encode(encoding))
    read = lambda name: [b"".join(text.split_text(file, 2047)) for _, _, file in text.read_texts([(name, tmp_path / name)], ())]
    assert read("a.txt") == read("a.txt.gz") == [content.encode()]
    assert read("a.jsonl") == [(row + "\u2028").encode() for row in ROWS]
    assert "not UTF-8" not in make(capsys, tmp_path / "a.txt", "--out", tmp_path / "mine")
    assert len(b"".join(documents(tmp_path / "mine"))) == len(content.encode())
    for name, damaged, reason in (("odd", mark + content.encode(encoding)[:-1], "damaged UTF-16"),
                                  ("half", mark + "\ud83d a".encode(encoding, "surrogatepass"), "damaged UTF-16"),
                                  ("no mark", content.encode(encoding), "NUL bytes: no UTF-8 text"),
                                  ("UTF-32", codecs.BOM_UTF32_LE + b"a\0\0\0", "NUL bytes: no UTF-8 text")):
        (tmp_path / name).write_bytes(damaged)
        assert f"{name} is not used ({reason})" in make(capsys, tmp_path / name, "--out", tmp_path / "new", status=2)


def test_progress(tmp_path, capsys, monkeypatch):
    """A line for each piece if there is no time between lines, and none for short work. On a terminal a bar, which ends
    with a line end."""
    paths = [write_book(tmp_path / "book.txt", 300_000), "--out", tmp_path / "mine", "--doc_bytes=100000"]
    make(capsys, *paths)  # asserts that stderr is empty
    monkeypatch.setattr(text, "PROGRESS_SECONDS", 0)
    status, _, err = call_tool(capsys, text.main, [*map(str, paths)])
    sizes = re.findall(r"^read (\S+) MB$", err, re.M)
    assert status == 0 and sizes == ["0.1", "0.2", "0.3", "0.3"]
    assert re.findall(r"^write (.*)$", err, re.M)[-1] == "0.6 of 0.6 MB" and err.count("\n") > len(sizes)
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    with monkeypatch.context() as patch, open(slave, "w") as terminal, at_most(300):
        patch.setattr(sys, "stderr", terminal)
        assert text.main([*map(str, paths)]) == 0
        print("end", end="", file=terminal, flush=True)
        said = os.read(master, 4096).decode()
        while not said.endswith("end"):
            said += os.read(master, 4096).decode()
    os.close(master)
    assert re.search(r"\rread: 300kB \[[^\r]*\r\n", said) and re.search(r"\rwrite: 100%[^\r]*\r\n", said)
    assert "MB\r\n" not in said


def test_memory_does_not_grow_with_the_text(tmp_path):
    """2 MB in one file and 1 MB in a list of JSON, in shards of 100 kB."""
    write_book(tmp_path / "a.txt", 2_000_000)
    row = json.dumps({"text": "word " * 200}) + "\n"
    (tmp_path / "b.jsonl").write_text("".join(row.replace("w", str(i)) for i in range(1000)))
    (out := tmp_path / "mine").mkdir()
    tracemalloc.start()
    files = [(path.name, path) for path in sorted(tmp_path.glob("*.*"))]
    info = text.write_corpus(text.read_texts(files, ()), (), out, "x", text.choose_tokenizer("bytes"),
                             shard_tokens=50_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(info["tokens"].values()) > 3_000_000 and peak < 1_000_000


def test_readers_keep_no_file_in_memory(tmp_path):
    """3 MB in a table, and 3 MB of UTF-16, plain and packed."""
    (tmp_path / "a.csv").write_text("id,text\n" + "".join(f'{i},"{"word " * 200}{i}"\n' for i in range(3000)))
    (tmp_path / "b.txt").write_text("".join(f"{i} words\n" for i in range(250_000)), encoding="utf-16")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress((tmp_path / "b.txt").read_bytes()))
    for name in ("a.csv", "b.txt", "c.txt.gz"):
        tracemalloc.start()
        texts = text.read_texts([(name, tmp_path / name)], ())
        size = sum(len(piece) for _, _, file in texts for piece in text.split_text(file, 2047))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert size > 2_900_000 and peak < 400_000, name


@pytest.mark.parametrize("size, sequences, doc_bytes", [
    (60_000, 53, 2047), (4_000, 3, 2047), (3_000, 2, 2047), (2_000, 1, 44)])
def test_the_printed_command_trains(size, sequences, doc_bytes, here, capsys, monkeypatch):
    """4,000 bytes leave three sequences for training, 3,000 bytes leave two, and 2,000 bytes one. The run reads the
    text twice, and as often as 24 steps need, at most 16 times."""
    monkeypatch.setattr(text, "time_step", TIME_STEP)
    monkeypatch.setattr(text, "SIZES", text.SIZES[:1])
    said = make(capsys, write_book(here / "book.txt", size), "--out", "mine", f"--doc_bytes={doc_bytes}")
    command = shlex.split(said.splitlines()[-1].partition("train_gpt.py ")[2])
    cfg = gpt.fit_steps(gpt.make_config(gpt.parse_argv(command)))
    assert cfg.epochs == max(2, min(16, math.ceil(24 * 2048 / (sequences * cfg.seq_len))))
    assert cfg.num_iterations == cfg.epochs * sequences * cfg.seq_len // 2048 >= 8
    assert len(gpt.TrainData(cfg, gpt.Schedule(cfg)).sequences) == cfg.num_iterations * 2048 // cfg.seq_len
    if size == 2_000:
        assert gpt.main([*command, "--num_iterations=2", "--device=cpu"]) == 0
        assert "step:2/2 val_loss" in capsys.readouterr().out


def test_the_size_follows_from_the_time_of_a_step():
    """The largest size whose run fits. If none does, the smallest one reads a part of the text."""
    plans = [text.Plan({}, steps, seconds, "") for steps, seconds in ((490, 0.03), (480, 0.1), (470, 0.5))]
    assert text.choose_run(60, plans) == (plans[1], 480) and text.choose_run(600, plans) == (plans[2], 470)
    long = text.Plan({}, 15_000, 0.03, "")
    assert text.choose_run(60, [long]) == (long, 2000)
    small, *_, large = text.SIZES
    assert [text.choose_epochs(n, small) for n in (1024, 2048, 4096, 28_672, 299_999, 300_000)] == [16, 16, 12, 2, 2, 1]
    assert [text.choose_epochs(n, large) for n in (8192, 28_672, 40_960, 299_999)] == [4, 2, 1, 1]


def test_the_share_that_is_read(tmp_path, capsys, monkeypatch):
    """A command that reads a part says so, and for a long text there is one for a GPU."""
    monkeypatch.setattr(text, "time_step", lambda options: 0.04 if "num_layers" not in options else 1.2)
    text.print_commands(tmp_path, VOCAB, dict(train=10_000_001, val=500_000))
    lines = capsys.readouterr().out.splitlines()
    steps = 10_000_001 // 1024 * 1024 // 2048
    assert [line.partition(":")[0] for line in lines] == [
        "on a GPU (never timed, reads all)", *(f"timing five steps of size {size} of 3 ..." for size in (1, 2)),
        f"train on it ({0.04 * steps:.0f} s of training here, reads 100%)",
        "train on it (60 s of training here, reads 31%)"]
    assert "--num_iterations=1500 " in lines[4] and "num_iterations" not in lines[3]


def test_splitting_keeps_every_byte_and_prefers_line_ends():
    content = b"aa\n" * 10 + b"x" * 25 + b"\nlast"
    pieces = list(text.split_text(content, 10))
    assert b"".join(pieces) == content and max(map(len, pieces)) <= 10 and pieces[0] == b"aa\n" * 3


def test_what_is_skipped(tmp_path, capsys):
    """Hidden files, pipes, links, NUL bytes, the mark at the start of a Windows file. Bytes that are not UTF-8 are kept, and each file is named."""
    texts = tmp_path / ".texts"
    for name in (".git/config", "sub/.venv/a.py", "sub/node_modules/b.js", ".env", "sub/.c"):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_text("password\n" * 1000)
    book = write_book(texts / "sub" / "book.txt", 20_000)
    (texts / "windows.txt").write_bytes(codecs.BOM_UTF8 + b"windows")
    (texts / "latin.txt").write_bytes(b"caf\xe9 na\xefve")
    (texts / "sub/latin.txt").write_bytes(b"na\xefve")
    (texts / "nul.txt").write_text("words " * 9000, encoding="utf-16-le")
    (texts / "empty.txt").touch()
    (book.parent / "again.txt").symlink_to("book.txt")
    (texts / "broken").symlink_to("nowhere")
    (texts / "folder").symlink_to(tmp_path)
    os.mkfifo(texts / "pipe")
    with at_most(300):
        said = make(capsys, texts, book, "--out", tmp_path / "mine")
    find_names = lambda kind: re.findall(rf"^{kind}: {texts}/(\S+) ", said, re.M)
    assert find_names("skipped") == ["broken", "folder", "nul.txt", "pipe"]
    assert find_names("not UTF-8") == ["latin.txt", "sub/latin.txt"]
    assert "documents with the content of another one: 20. " in said
    found = documents(tmp_path / "mine")
    assert {b"caf\xe9 na\xefve", b"windows"} <= set(found) and sum(map(len, found)) == 20_000 + 10 + 5 + 7


def test_the_example_of_the_readme(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = ROOT / "records/laptop/2026-11-25_long_windows/train_gpt.py"
    said, page = make(capsys, path, "--out=data/mine"), (ROOT / "README.md").read_text()
    facts, *_, command = said.strip().split("\n")
    assert "data/*.bin" in (ROOT / ".gitignore").read_text().splitlines()
    assert facts in page and command.partition(" --train_files")[0].partition("run.sh")[2] in page


NO_LISTS = ["", "[]", "{", '{"files": 3, "tokens": []}']  # contents of corpus.json, of which "" is missing


@pytest.mark.parametrize("args", [
    "missing_folder --out=x", "pipe --out=x", "nul.txt --out=x", "short.txt --out=x", "empty --out=x",
    f"book.txt --out={'a' * 300}", ".", ". --out=", ". '' --out=x", ".. --out=x --shard_tokens=5",
    "--tokenizer=gpt2", "--doc_bytes=500", "--out=x", "--exclude=x", "--shard_tokens=90000", "book.txt --out=x --doc_bytes=3",
    ". --out=x --doc_bytes=some", ". --out=x --tokenizer=words", f"book.txt --out={gpt.EMBEDDED_CORPUS}",
    f"book.txt --out={ROOT / gpt.EMBEDDED_CORPUS}", "book.txt --out=notes", "texts --out=texts",
    "texts --out=texts/../texts/sub/shards", "texts --out=link/shards", "texts --out=texts/.shards",
    ". --out=.", "notes/corpus.json --out=notes", "texts --out=x --exclude=sub/",
    "texts --out=x --exclude=texts/sub/*", "texts --out=x --exclude=*.csv",
    *(f"book.txt --out=own{number}" for number in range(len(NO_LISTS)))])
def test_text_tool_refuses_in_one_line(here, args, capsys):
    """And changes nothing. The output cannot become the next input: corpus.json is text. Shards that it does
    not list are a user's own. 2,000 bytes suffice. Files of an --exclude without a match would be used."""
    write_book(here / "book.txt", 20_000)
    make_texts(here / "texts")
    (here / "link").symlink_to("texts/sub")
    (here / "nul.txt").write_bytes(b"a\0" * 9000)
    write_book(here / "short.txt", 1_999)
    for name in ("empty", "notes"):
        (here / name).mkdir()
    for number, content in enumerate(NO_LISTS):
        (here / f"own{number}").mkdir()
        (here / f"own{number}/train_000000.bin").write_text("a user's own")
        (here / f"own{number}" / ("corpus.json" if content else "x")).write_text(content)
    (here / "notes/corpus.json").write_text('{"my": "notes"}')
    os.mkfifo("pipe")
    read_all = lambda: {path: path.is_file() and path.read_bytes() for path in here.rglob("*")}
    before = read_all()
    with at_most(300):
        make(capsys, *shlex.split(args), status=2)
    assert read_all() == before


def test_only_what_corpus_json_lists_is_replaced(tmp_path, capsys):
    """A folder with another shard is refused before any text is read, and stays unchanged."""
    book, out = write_book(tmp_path / "book.txt", 200_000), tmp_path / "mine"
    make(capsys, book, "--out", out, "--shard_tokens", "50000")
    assert len(read_shards(out)) == 5
    make(capsys, book, "--out", out)  # removes the shards that it does not replace
    assert sorted(read_shards(out)) == sorted(read_info(out)["files"]) == TWO_SHARDS
    (tmp_path / "nul.txt").write_bytes(b"\0")
    for name in ("train_notes.bin", "val_000001.bin"):
        (out / name).write_text("a user's own")
        before = read_shards(out), read_info(out)
        said = make(capsys, tmp_path / "nul.txt", "--out", out, status=2)
        assert f"{out}/{name} is in the way" in said and "choose another folder, or move it away" in said
        assert (read_shards(out), read_info(out)) == before
        (out / name).unlink()
    (out / "notes.bin").write_text("a user's own")
    make(capsys, write_book(tmp_path / "book.txt", 30_000), "--out", out)
    assert (out / "notes.bin").read_text() == "a user's own"


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
        text.write_corpus(text.read_texts([("a", book)], ()), (), out, "x", text.choose_tokenizer("bytes"))
    monkeypatch.undo()
    assert text.read_corpus(out)[0] is None and read_info(out)["files"] == sorted(read_shards(out))
    assert len(read_shards(out)) > 10
    make(capsys, book, "--out", out)
    assert sorted(read_shards(out)) == sorted(read_info(out)["files"]) == TWO_SHARDS


def test_a_second_call_waits_for_the_first(tmp_path):
    """The partial folder of a call that still runs is not removed. Later it is."""
    book, out, said = write_book(tmp_path / "book.txt", 20_000), tmp_path / "mine", tmp_path / "said.txt"
    is_locked = multiprocessing.Event()
    said.touch()

    def call():
        sys.stderr = open(said, "w", buffering=1)  # capfd loses what is written while it reads
        is_locked.wait()
        sys.exit(text.main([str(book), f"--out={out}"]))

    second = multiprocessing.Process(target=call)
    second.start()
    with at_most(300):
        with text.lock_folder(out):
            (out / "tmpabcdefgh.partial").mkdir()
            is_locked.set()
            while not said.read_text().endswith("\n"):
                time.sleep(0.01)
            assert said.read_text() == f"text.py: waiting for another process, which writes {out}\n"
            assert sorted(out.iterdir()) == [out / "tmpabcdefgh.partial"]
        second.join()
    assert second.exitcode == 0 and sorted(read_shards(out)) == TWO_SHARDS


def test_the_embedded_corpus_leaves_out_what_differs_between_builds():
    names = dict(text.find_torch_source())
    assert "nn/functional.py" in names and "version.py" not in names and list(names) == sorted(names)
    assert "+" not in text.torch_source_name()


@pytest.mark.parametrize("damage", ["null", "{}", *NO_LISTS[1:], "train", "val", "short", "zeros", "source"])
def test_an_incomplete_corpus_is_built_again(damage, here, monkeypatch, capsys):
    """A complete corpus stays unchanged. It has two files of PyTorch's source. A line names a shard of the right size
    with other tokens."""
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
    elif damage == "zeros":
        size = len(before["train_000000.bin"])
        (small_source / "train_000000.bin").write_bytes(before["train_000000.bin"][: size // 2].ljust(size, b"\0"))
    elif damage == "source":
        (small_source / "corpus.json").write_text(json.dumps({**info, "source": "torch 1.0"}))
    else:
        for path in small_source.glob("*.bin"):
            path.unlink()
        (small_source / "corpus.json").write_text(damage)
    capsys.readouterr()
    text.make_embedded_corpus()
    assert (read_shards(small_source), read_info(small_source)) == (before, info)
    assert capsys.readouterr().out.count("train_000000.bin does not fit its SHA-256") == (damage == "zeros")
