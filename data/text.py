#!/usr/bin/env python3
"""Turn text on this machine into token shards that train_gpt.py reads.

    ./run.sh data/text.py                                   # the PyTorch source -> data/torch_source
    ./run.sh data/text.py ~/notes book.txt --out data/mine  # your own files and folders, one token per byte
    ./run.sh data/text.py ~/notes --out data/mine --tokenizer gpt2    # GPT-2 tokens. Needs tiktoken
    ./run.sh data/text.py dump.jsonl.gz ~/notes --out data/mine --exclude='*.log' --exclude='old/*'

A text is a file, the key "text" of a line in a .jsonl file, or the column "text" of a row in a .csv, .tsv or
.parquet file. --key names another key or column. Files that end with .gz are unpacked. UTF-16 with a byte
order mark becomes UTF-8. Long texts are cut into documents. Equal documents of several texts count once.
Validation gets 5 to 10 % of the tokens: whole texts, chosen by the hash of their names, or the end of the
longest text. Hidden files, hidden folders, node_modules, .json files, Jupyter notebooks and files with NUL
bytes are skipped.

The last line of the output is a command that trains on the shards. DIR/corpus.json describes the corpus and
lists its shards. Another call with --out=DIR replaces these shards. A DIR with unlisted shards is refused.
"""

import codecs
import csv
import glob
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import zlib
from argparse import ArgumentTypeError
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import BinaryIO, NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import ROOT, Parser, RecordError, at_least, find_launcher, require_packages, run_guarded

with require_packages():
    import numpy as np
    import torch
    from tqdm import tqdm

    import train_gpt as gpt

EMBEDDED_CORPUS = gpt.EMBEDDED_CORPUS
BYTE_VOCAB_SIZE, BYTE_BOS = 257, 256  # byte tokens: 256 values and BOS
GPT2_VOCAB_SIZE, GPT2_BOS = 50257, 50256
SHARD_HEADER_BYTES = gpt.SHARD_HEADER_BYTES
SHARD_TOKENS = 100_000_000
BLOCK = gpt.BLOCK  # sequence lengths are multiples of it. Each split needs more tokens
SHORT_TOKENS, TINY_TOKENS = 300_000, 8_000  # training tokens of a text, see choose_epochs()
MOST_PASSES = 16  # over a short text
LEAST_BYTES, LEAST_TOKENS = 2000, 10 * BLOCK  # of a corpus. Validation is then at most 20 %
MOST_CHARACTERS = 2**28  # of a cell in a .csv. An open quote could take the rest of the file
PROGRESS_SECONDS = 1  # between two lines of progress
READ_ERRORS = OSError, EOFError, zlib.error  # the last two: a damaged .gz
GPU_SIZE = dict(num_layers=12, model_dim=768, tokens_per_step=32_768, micro_batch_tokens=32_768)
# A document: the hash that orders it, its place in the file of all tokens, the number of its text
DOCUMENT = np.dtype([("key", "i8"), ("begin", "i8"), ("size", "i8"), ("text", "i8")])
Text = tuple[str, Path | str, BinaryIO]  # name, source for messages, content


class Tokenizer(NamedTuple):
    encode: Callable[[bytes], np.ndarray]
    decode: Callable[[np.ndarray], bytes]
    vocab_size: int
    bos: int
    doc_bytes: int  # default of the option


class Size(NamedTuple):
    """A size of preset quick."""

    options: dict
    least_steps: int  # fewer learn too little of a short text
    passes: int  # over a short text. After more the model knows it by heart


SIZES = (Size({}, 24, 2), Size(dict(num_layers=3, model_dim=192), 20, 1),
         Size(dict(num_layers=6, model_dim=256), 16, 1))


class Plan(NamedTuple):
    """A run of one size that reads all of a text."""

    options: dict
    num_steps: int
    step_seconds: float
    share: str  # of the text, for people


class UnusableError(Exception):
    """A text that is skipped, and the reason."""


REPORTED: Counter[tuple[str, str]] = Counter()  # files by what happens to them and the reason
LISTED = 5  # printed files of one reason


class Progress(tqdm):
    """Progress in bytes on stderr: a bar on a terminal, else a line each second."""

    def __init__(self, work: str, total: int | None = None):
        super().__init__(desc=work, total=total, unit="B", unit_scale=True, disable=None)
        self.work, self.last = work, time.monotonic()

    def update(self, size: int) -> None:
        super().update(size)
        if self.disable:  # no terminal
            self.n += size
            if time.monotonic() >= self.last + PROGRESS_SECONDS:
                self.last = time.monotonic()
                total = f" of {self.total / 1e6:,.1f}" if self.total else ""
                print(f"{self.work} {self.n / 1e6:,.1f}{total} MB", file=sys.stderr, flush=True)


class Utf16File(io.RawIOBase):
    """A file of UTF-16 with a byte order mark, read as UTF-8."""

    def __init__(self, file: BinaryIO):
        self.text, self.rest = io.TextIOWrapper(file, "utf-16", newline=""), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        try:
            self.rest = self.rest or self.text.read(io.DEFAULT_BUFFER_SIZE).encode()
        except UnicodeDecodeError:
            raise UnusableError("damaged UTF-16") from None
        piece, self.rest = self.rest[:len(buffer)], self.rest[len(buffer):]
        buffer[:len(piece)] = piece
        return len(piece)


def report(fate: str, source: Path | str, reason: object) -> None:
    """Print what happens to a file, and why. After some files of one reason they are only counted."""
    kind = fate, getattr(reason, "strerror", None) or str(reason).partition(" among ")[0]
    REPORTED[kind] += 1
    if REPORTED[kind] <= LISTED:
        tqdm.write(f"{fate}: {source} ({reason})")


def skip(source: Path | str, reason: object, named: Container[Path]) -> None:
    """Print a skipped file. RecordError if the command line names it."""
    if source in named:
        remedy = "use UTF-8 text or JSON lines"
        if "(--key)" in str(reason):
            remedy = "give --key=NAME with one of these names"
        raise RecordError(f"{source} is not used ({reason}): {remedy}, or leave it out")
    report("skipped", source, reason)


def find_files(paths: list[Path], excluded: list[str]) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file in files and folders. The name is the path inside the given folder.

    RecordError at the end if a pattern has excluded nothing: its files would be in the corpus.
    """
    unused = {*excluded}
    for top in paths:
        if os.path.isfile(top):
            yield top.name, top
            continue
        for folder, folders, files in os.walk(
                top, onerror=lambda error: skip(Path(error.filename), error.strerror, paths)):
            entries, folders[:] = sorted(folders + files), []
            for path in (Path(folder, entry) for entry in entries):
                name = path.relative_to(top).as_posix()
                matching = {pattern for pattern in excluded if fnmatch(name, pattern)}
                unused -= matching
                if path.name[0] == "." or matching:
                    continue
                if os.path.isfile(path):
                    yield name, path
                elif os.path.isdir(path) and not path.is_symlink():
                    folders += {path.name} - {"node_modules"}
                else:  # a pipe may have no end
                    skip(path, "no file or folder, or a link to a folder", paths)
    for pattern in unused:
        raise RecordError(f"--exclude={pattern} matches nothing: give a path inside a folder, as in 'old/*' "
                          "or '*/name'")


def check_key(key: str, kind: str, found: Iterable[str]) -> None:
    """Raise UnusableError, which names the found keys, if the key is not one of them."""
    if key not in found:
        names = shorten(repr(", ".join(found))[1:-1], 200) or "(none)"
        raise UnusableError(f'no "{key}" among the {kind} {names} (--key)')


def read_json_lines(file: BinaryIO, key: str) -> Iterator[tuple[int, bytes]]:
    """(number, text) of each line that is not empty."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if isinstance(row, dict):
                check_key(key, "keys", row)
            text = row[key].encode(errors="replace")  # halves of surrogates
        except UnusableError as error:
            raise UnusableError(f"line {number} and the rest: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise UnusableError(f'line {number} and the rest: no JSON with a "{key}" (--key)') from None
        yield number, text


def read_table(file: BinaryIO, key: str, delimiter: str = ",") -> Iterator[tuple[int, bytes]]:
    """(number, text) of each row below the header."""
    csv.field_size_limit(MOST_CHARACTERS)
    lines = io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="")
    rows, end = csv.DictReader(lines, restval="", delimiter=delimiter, strict=True), 0
    try:
        check_key(key, "columns", rows.fieldnames or ())
        end = rows.line_num
        for number, row in enumerate(rows, 1):
            yield number, row[key].encode(errors="surrogateescape")
            end = rows.line_num
    except csv.Error as error:
        raise UnusableError(f"line {end + 1} and the rest: {error}") from None


def read_parquet(file: BinaryIO, key: str) -> Iterator[tuple[int, bytes]]:
    """(number, text) of each row. A missing value is an empty text."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        install = f"{shlex.quote(sys.executable)} -m pip install pyarrow"
        raise UnusableError(f"Parquet needs pyarrow: {install}") from None
    try:
        # The defaults load the whole column of a row group
        table = pyarrow.parquet.ParquetFile(file, buffer_size=2**20, pre_buffer=False)
        check_key(key, "columns", table.schema_arrow.names)
        batches = table.iter_batches(batch_size=256, columns=[key])
        texts = (text for batch in batches for text in batch.column(0).to_pylist())
        for number, text in enumerate(texts, 1):
            if not isinstance(text, str | None):
                raise UnusableError(f'row {number} and the rest: no text in "{key}" (--key)')
            yield number, (text or "").encode(errors="replace")
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        raise UnusableError(shorten(str(error), 200)) from None


READERS = {".jsonl": read_json_lines, ".csv": read_table, ".tsv": partial(read_table, delimiter="\t"),
           ".parquet": read_parquet}  # by suffix, of files with several texts


def read_texts(files: Iterable[tuple[str, Path]], named: Container[Path],
               key: str = "text") -> Iterator[Text]:
    """The texts of files (name, path). key: the key of a text in JSON lines, or its column in a table.

    The caller reads each file to its end before the next text.
    """
    for name, path in files:
        suffix, is_gzip = Path(name.lower().removesuffix(".gz")).suffix, name.lower().endswith(".gz")
        try:
            if suffix == ".ipynb":
                raise UnusableError("a Jupyter notebook")
            if suffix == ".json":
                raise UnusableError('JSON or a table: write its texts as {"text": "..."} lines of a .jsonl')
            with gzip.open(path) if is_gzip else path.open("rb") as file:
                is_utf16 = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                file.seek(0)
                content = io.BufferedReader(Utf16File(file)) if is_utf16 else file
                if suffix not in READERS:
                    yield name, path, content
                    continue
                for number, text in READERS[suffix](content, key):
                    yield f"{name}:{number}", f"{path}:{number}", io.BytesIO(text)
        except (UnusableError, *READ_ERRORS) as error:
            skip(path, error, named)


def split_text(text: bytes | BinaryIO, limit: int) -> Iterator[bytes]:
    """Cut a text at line ends into pieces of at most `limit` bytes, and longer lines between characters."""
    file, rest = io.BytesIO(text) if isinstance(text, bytes) else text, b""
    try:
        while rest := rest + file.read(limit + 1 - len(rest)):
            end = find_cut(rest, 0, limit) if len(rest) > limit else len(rest)
            yield rest[:end]
            rest = rest[end:]
    except READ_ERRORS as error:
        raise UnusableError(error) from None


def find_cut(text: bytes, first: int, last: int) -> int:
    """The last line end in text[first:last]. Without one, the last end of a UTF-8 character."""
    ends = (end for end in range(last, max(last - 4, 0), -1) if text[end] & 0xC0 != 0x80)
    return text.rfind(b"\n", first, last) + 1 or next(ends, last)


def hash_bytes(content: bytes) -> int:
    """The first 63 bits of the SHA-256."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") >> 1


def read_listing(out: Path) -> dict:
    """The content of corpus.json. Empty if it is missing or damaged."""
    try:
        info = json.loads((out / "corpus.json").read_text())
    except (OSError, ValueError):
        info = None
    return info if isinstance(info, dict) else {}


def read_corpus(out: Path) -> tuple[str | None, list[Path], list[Path]]:
    """(source of the corpus in a folder, its shards, other shards in the folder). source is None unless the
    corpus is complete.

    corpus.json lists the shards. An older version wrote no list. Then the shards are the files with the
    names of write_corpus(), if their number of tokens agrees with corpus.json.
    """
    # The folder is read before the list, because write_corpus() lists new shards before it adds them
    shards = sorted((*out.glob("train_*.bin"), *out.glob("val_*.bin")))
    info = read_listing(out)
    files = info.get("files")
    is_listed = isinstance(files, list)
    own = [path for path in shards
           if (path.name in files if is_listed else re.fullmatch(r"(train|val)_\d{6}\.bin", path.name))]
    sizes = {split: sum((path.stat().st_size - SHARD_HEADER_BYTES) // 2 for path in own
                        if path.name.startswith(split) and path.is_file()) for split in ("train", "val")}
    is_complete = sizes == info.get("tokens")
    own = own if is_listed or is_complete else []
    return info.get("source") if is_complete else None, own, [path for path in shards if path not in own]


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Make a folder and hold its lock, for which other calls wait. Remove partial folders of killed calls.

    A folder that is made here and left empty is removed. An OSError of the body becomes a RecordError. If
    the file system has no locks, calls do not wait and partial folders stay.
    """
    remedy = "free space or fix its permissions, or choose another folder (--out DIR)"
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    descriptor, is_locked, is_current = None, False, False
    try:
        while not is_current:  # another call may remove its empty folder while this one waits
            folder.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                break
            descriptor = os.open(folder, os.O_RDONLY)
            is_locked = wait_for_lock(descriptor, folder)
            is_current = os.path.exists(folder) and os.path.samestat(os.fstat(descriptor), folder.stat())
            if not is_current:
                os.close(descriptor)
        for path in folder.glob("tmp????????.partial") if is_locked else ():
            shutil.rmtree(path, ignore_errors=True)
        yield
    except OSError as error:
        raise RecordError(f"{folder} cannot be written ({error.strerror or error}): {remedy}") from None
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()
        if is_current:
            os.close(descriptor)


def wait_for_lock(descriptor: int, folder: Path) -> bool:
    """Lock an open folder. False if its file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"text.py: waiting for another process, which writes {folder}", file=sys.stderr, flush=True)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def write_corpus(texts: Iterable[Text], named: Container[Path], out: Path, source: str,
                 tokenizer: Tokenizer, doc_bytes: int | None = None, shard_tokens: int = SHARD_TOKENS,
                 keeps_copies: bool = False) -> dict:
    """Write texts as train_*.bin and val_*.bin shards. Returns the content of corpus.json.

    Replaces the shards of an earlier corpus after all new ones are written. Refuses a folder with other
    shards. Documents are ordered by a hash, which mixes folders. Equal texts give equal bytes. The caller
    holds lock_folder(out).
    """
    _, own, others = read_corpus(out)
    info, problem = read_listing(out), ""
    if others:
        problem = f"{others[0]} is in the way: {out}/corpus.json does not list it"
    elif info and not {"files", "tokens", "source"} & info.keys():
        problem = f"{out}/corpus.json is in the way: it does not describe a corpus"
    if problem:
        raise RecordError(f"{problem}, so it is not replaced: choose another folder, or move it away")
    with tempfile.TemporaryDirectory(dir=out, suffix=".partial") as folder:
        with open(Path(folder, "tokens"), "w+b") as store:
            documents, keys, num_bytes = encode_texts(texts, named, tokenizer, store,
                                                      doc_bytes or tokenizer.doc_bytes, keeps_copies)
            num_tokens = documents["size"].sum()
            if num_bytes < LEAST_BYTES or num_tokens < LEAST_TOKENS:
                raise RecordError(f"{source} has {num_bytes:,} bytes of text, {num_tokens:,} tokens: give "
                                  f"more, at least {LEAST_BYTES:,} bytes and {LEAST_TOKENS:,} tokens")
            splits = split_documents(documents, keys, tokenizer, store)
            sha256 = {}
            with Progress("write", 2 * sum(int(rows["size"].sum()) for rows in splits.values())) as bar:
                for split, rows in splits.items():
                    sha256 |= write_shards(Path(folder), split, rows, tokenizer, store, shard_tokens,
                                           bar.update)
        fingerprint = hashlib.sha256("".join(sha256.values()).encode()).hexdigest()[:16]
        info = dict(source=source, vocab_size=tokenizer.vocab_size, documents=sum(map(len, splits.values())),
                    tokens={split: int(rows["size"].sum()) for split, rows in splits.items()},
                    files=[*sha256], fingerprint=fingerprint, sha256=sha256)
        # From here on corpus.json lists all shards that may be in the folder, so an interrupted call can be
        # repeated
        listed = sorted({*info["files"], *(path.name for path in own)})
        replace_json(out / "corpus.json", dict(files=listed))
        for name in info["files"]:
            os.replace(Path(folder, name), out / name)
    for path in own:
        if path.name not in info["files"]:
            path.unlink(missing_ok=True)
    replace_json(out / "corpus.json", info)
    return info


def encode_texts(texts: Iterable[Text], named: Container[Path], tokenizer: Tokenizer, store: BinaryIO,
                 doc_bytes: int, keeps_copies: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """Write the tokens of all documents to store, without documents that an earlier text has.

    Returns the DOCUMENT rows, a hash of the name of each text, and the number of bytes.
    """
    rows, keys, seen, num_bytes, copies = array("q"), array("q"), set(), 0, 0
    with Progress("read") as bar:
        for name, source, file in texts:
            begin, first, size, own, is_utf8 = store.tell(), len(rows), 0, set(), True
            num_repeated = 0
            try:
                for number, piece in enumerate(split_text(file, doc_bytes)):
                    if b"\0" in piece:
                        raise UnusableError("NUL bytes: no UTF-8 text")
                    if number == 0:
                        piece = piece.removeprefix(codecs.BOM_UTF8)
                    is_utf8 = is_utf8 and piece.decode(errors="ignore").encode() == piece
                    bar.update(len(piece))
                    if not keeps_copies:
                        own.add(content := hash_bytes(piece))
                        if content in seen:
                            num_repeated += 1
                            continue
                    place = append_document(store, tokenizer, piece)
                    rows.extend((hash_bytes(os.fsencode(f"{number} {name}")), *place, len(keys)))
                    size += len(piece)
            except UnusableError as error:
                skip(source, error, named)
                del rows[first:]
                store.seek(begin)
                continue
            keys.append(hash_bytes(os.fsencode(name)))
            seen |= own
            num_bytes += size
            copies += num_repeated
            if not is_utf8:
                report("not UTF-8", source, "iconv converts a file of another encoding")
    if copies:
        print(f"documents with the content of another one: {copies:,}. Equal documents count once")
    return np.array(rows).view(DOCUMENT), np.array(keys), num_bytes


def append_document(store: BinaryIO, tokenizer: Tokenizer, piece: bytes) -> tuple[int, int]:
    """Write BOS and the tokens of a piece of text. Returns its place and its number of tokens."""
    begin, tokens = store.tell() // 2, np.append(np.uint16(tokenizer.bos), tokenizer.encode(piece))
    store.write(tokens.astype("<u2").tobytes())
    return begin, len(tokens)


def split_documents(documents: np.ndarray, keys: np.ndarray, tokenizer: Tokenizer,
                    store: BinaryIO) -> dict[str, np.ndarray]:
    """The documents for training and for validation, which has 5 to 10 % of the tokens and at least a block.

    Validation takes one text in sixteen by the hash of its name, more if these are short, and no text that
    is too long. If this is not enough, it also takes the end of the longest other text.
    """
    sizes = np.bincount(documents["text"], documents["size"], len(keys)).astype(int)
    low, high = max(-(-sizes.sum() // 20), BLOCK + 1), max(sizes.sum() // 10, 2 * BLOCK)
    chosen, num_val = np.zeros(len(sizes), bool), 0
    for text in np.argsort(keys, kind="stable"):
        if num_val + sizes[text] <= high and (num_val < low or keys[text] < 2**59):
            chosen[text] = True
            num_val += sizes[text]
    is_val = chosen[documents["text"]]
    if num_val < low:
        rows = np.flatnonzero(documents["text"] == np.argmax(np.where(chosen, 0, sizes)))[::-1]
        ends = num_val + np.cumsum(documents["size"][rows])
        last = np.searchsorted(ends, low)
        is_val[rows[: last + 1]] = True
        if ends[last] > high:
            rest = ends[last] - documents["size"][rows[last]]
            halves = cut_document(documents[rows[last]], low - rest, high - rest, tokenizer, store)
            documents[rows[last]] = halves[1]
            documents, is_val = np.append(documents, halves[0]), np.append(is_val, False)
    return dict(train=documents[~is_val], val=documents[is_val])


def cut_document(document: np.void, low: int, high: int, tokenizer: Tokenizer,
                 store: BinaryIO) -> np.ndarray:
    """Cut a document so that the second half has low to high tokens. Appends both halves to store."""
    tokens = read_tokens(store, [document])[1:]
    # the middle quarter of the range, because a cut can change the tokens around it
    first, last = (len(tokenizer.decode(tokens[: len(tokens) - size]))
                   for size in ((3 * low + 5 * high) // 8, (5 * low + 3 * high) // 8))
    text, halves = tokenizer.decode(tokens), np.repeat(document, 2)
    cut = find_cut(text, first, last)
    store.seek(0, os.SEEK_END)
    for half, piece in zip(halves, (text[:cut], text[cut:])):
        half["begin"], half["size"] = append_document(store, tokenizer, piece)
    return halves


def read_tokens(store: BinaryIO, documents: Iterable[np.void],
                update: Callable[[int], None] = lambda size: None) -> np.ndarray:
    """The tokens of documents. update() gets the bytes of each one."""
    tokens = bytearray()
    for document in documents:
        store.seek(2 * int(document["begin"]))
        tokens += store.read(2 * int(document["size"]))
        update(2 * int(document["size"]))
    return np.frombuffer(tokens, "<u2")


def write_shards(folder: Path, split: str, documents: np.ndarray, tokenizer: Tokenizer, store: BinaryIO,
                 shard_tokens: int, update: Callable[[int], None]) -> dict[str, str]:
    """Write documents in the order of their hash. A shard has at most shard_tokens, or one document.

    Returns the SHA-256 of the tokens by shard.
    """
    documents, sha256 = documents[np.argsort(documents["key"], kind="stable")], {}
    while len(documents):
        number = max(1, np.searchsorted(np.cumsum(documents["size"]), shard_tokens, side="right"))
        name = f"{split}_{len(sha256):06d}.bin"
        tokens = read_tokens(store, documents[:number], update)
        write_shard(folder / name, tokens, tokenizer.vocab_size, tokenizer.bos)
        sha256[name] = hashlib.sha256(tokens).hexdigest()
        documents = documents[number:]
    return sha256


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int, bos: int) -> None:
    """Write tokens (uint16, beginning with BOS) to a shard. data/README.md describes the format."""
    header = np.zeros(SHARD_HEADER_BYTES // 4, dtype="<i4")
    header[:5] = 20240520, 1, len(tokens), vocab_size, bos  # magic, version
    with path.open("wb") as file:
        file.write(header)
        file.write(np.ascontiguousarray(tokens, dtype="<u2"))


def replace_json(path: Path, content: dict) -> None:
    """Write a file under a temporary name and rename it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def torch_source_name() -> str:
    """The source of the embedded corpus. CPU and CUDA builds of a version have equal Python files."""
    return f"torch {torch.__version__.partition('+')[0]}"


def find_torch_source() -> list[tuple[str, Path]]:
    """(name, path) of the installed PyTorch's Python files, without those that differ between builds."""
    root = Path(torch.__file__).parent
    left_out = {"version.py", "testing/_internal/generated/annotated_fn_args.py"}
    names = sorted({path.relative_to(root).as_posix() for path in root.rglob("*.py")} - left_out)
    return [(name, root / name) for name in names]


def find_damage(out: Path) -> str:
    """The name of a shard whose tokens differ from the SHA-256 in corpus.json. Empty if there is none, or if
    an older version wrote no SHA-256."""
    for name, expected in read_listing(out).get("sha256", {}).items():
        with (out / name).open("rb") as file:
            file.seek(SHARD_HEADER_BYTES)
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                return name
    return ""


def make_embedded_corpus(is_forced: bool = False) -> None:
    """Make the corpus of the small presets, unless it is complete and undamaged. RecordError if the folder
    has a corpus of other text."""
    out, source = Path(EMBEDDED_CORPUS), torch_source_name()
    found = read_corpus(out)[0]
    if found == source and not is_forced:
        damaged = find_damage(out)
        if not damaged:  # also on a disk that cannot be written
            return
        print(f"{out / damaged} does not fit its SHA-256 in corpus.json: making the corpus again")
    if found and not found.startswith("torch "):
        raise RecordError(f"{out} has a corpus with source {found[:100]!r}, but this folder is "
                          "for the PyTorch source: move the files, and set --train_files and --val_files")
    with lock_folder(out):
        if is_forced or read_corpus(out)[0] != source or find_damage(out):
            files = find_torch_source()
            named = {path for _, path in files}  # an unreadable one is an error
            write_corpus(read_texts(files, named), named, out, source, choose_tokenizer("bytes"),
                         keeps_copies=True)


def choose_tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        return Tokenizer(lambda text: np.frombuffer(text, np.uint8).astype(np.uint16),
                         lambda tokens: tokens.astype(np.uint8).tobytes(), BYTE_VOCAB_SIZE, BYTE_BOS, 2047)
    try:
        import tiktoken
    except ImportError:
        install = f"{shlex.quote(sys.executable)} -m pip install tiktoken"
        raise RecordError(f"--tokenizer=gpt2 needs tiktoken: {install}, or use --tokenizer=bytes") from None
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # the download of the vocabulary raises errors of several libraries
        raise RecordError(f"tiktoken cannot load the GPT-2 vocabulary ({type(error).__name__}): connect "
                          "to the network for the first use, or use --tokenizer=bytes") from None
    return Tokenizer(
        lambda text: np.array(encoding.encode_ordinary(text.decode(errors="replace")), np.uint16),
        lambda tokens: encoding.decode_bytes(tokens.tolist()), GPT2_VOCAB_SIZE, GPT2_BOS, doc_bytes=16_384)


def parse_input(text: str) -> Path:
    if not os.path.isfile(text) and not os.path.isdir(text):
        raise ArgumentTypeError(f"{text or 'the empty path'} is no file and no folder (paths start in "
                                f"{os.getcwd()})")
    return Path(text)


def check_out(out: Path, paths: list[Path]) -> None:
    """Raise RecordError if a run would replace this corpus, or if the next call would read it as text."""
    place = os.path.realpath(out)
    if place in (os.path.realpath(EMBEDDED_CORPUS), os.path.realpath(ROOT / EMBEDDED_CORPUS)):
        raise RecordError(f"--out={out} is for the PyTorch source, and a run may replace its shards: "
                          "name another folder, as in --out data/mine")
    listing = Path(place, "corpus.json")
    for path in paths:
        if Path(os.path.realpath(path)) in (listing, *listing.parents):
            raise RecordError(f"--out={out} lies in {path}, so the next call would read its corpus.json "
                              "as text: name a folder outside of the given ones")


def choose_epochs(num_tokens: int, size: Size) -> int:
    """Passes over a text of which a pass has this number of tokens."""
    least = -(-size.least_steps * gpt.load_preset("quick").tokens_per_step // num_tokens)
    return max(min(least, MOST_PASSES), size.passes if num_tokens < SHORT_TOKENS else 1)


def time_step(options: dict) -> float:
    """Seconds of a training step of preset quick, with these options, on this machine: the mean of five."""
    cfg = gpt.make_config({"preset": "quick", **options, "num_iterations": 7, "epochs": 1000})
    rt = gpt.choose_precision(cfg, gpt.start_runtime(cfg))
    trainer = gpt.Trainer(cfg, rt)
    batches = gpt.TrainData(cfg, trainer.schedule).batches(rt.comm, 0, cfg.num_iterations)
    for step in range(cfg.num_iterations):
        if step == 2:
            started = gpt.clock(rt.device)
        trainer.train_step(batches, trainer.schedule.at(step))
    return (gpt.clock(rt.device) - started) / 5


def choose_run(budget: float, plans: list[Plan]) -> tuple[Plan, int]:
    """(plan, steps) of a run of at most `budget` seconds: the last plan that makes all of its steps in this
    time, else the first one, with fewer steps."""
    fitting = [plan for plan in plans if plan.step_seconds * plan.num_steps <= budget]
    if fitting:
        return fitting[-1], fitting[-1].num_steps
    return plans[0], int(budget / plans[0].step_seconds)


def print_commands(out: Path, vocab_size: int, tokens: dict[str, int]) -> None:
    """Print commands that train on these shards: for a GPU, and for ten minutes and a minute here."""
    cfg = gpt.load_preset("record_32")
    if tokens["train"] < gpt.Schedule(cfg).count_tokens():
        cfg = gpt.load_preset("quick")
    val_len = min(cfg.val_seq_len, (tokens["val"] - 1) // BLOCK * BLOCK)
    options = dict(vocab_size=vocab_size, val_seq_len=val_len,
                   val_tokens=min(cfg.val_tokens, (tokens["val"] - 1) // val_len * val_len))
    seq_len = cfg.seq_len
    while seq_len >= tokens["train"]:  # a step stays a whole number of packed sequences
        seq_len //= 2
    if seq_len < cfg.seq_len:
        options["seq_len"] = seq_len
    files = {f"{split}_files": f"{glob.escape(str(out))}/{split}_*.bin" for split in tokens}

    def show(label: str, **more) -> None:
        words = [f"--{name}={value}" for name, value in {**options, **more, **files}.items()]
        # A step of quick has too few sequences for several ranks
        launcher = find_launcher(is_alone=cfg.preset == "quick")
        print(f"{label}: {launcher} --preset={cfg.preset} {shlex.join(words)}")

    if cfg.preset == "record_32":
        show("train on it")
        return
    if tokens["train"] > 2_000_000:
        show("on a GPU (never timed, reads all)", **GPU_SIZE)
    pass_tokens = (tokens["train"] - 1) // seq_len * seq_len
    sizes = SIZES if pass_tokens >= TINY_TOKENS else SIZES[:1]
    plans = []
    for number, size in enumerate(sizes, 1):
        print(f"timing five steps of size {number} of {len(sizes)} ...", flush=True)
        epochs = choose_epochs(pass_tokens, size)
        num_steps = max(1, epochs * pass_tokens // cfg.tokens_per_step)
        step_seconds = time_step({**options, **size.options, **files})
        more = {"epochs": epochs} if epochs > 1 else {}
        share = f"it {epochs} times" if epochs > 1 else "100%"
        plans.append(Plan({**size.options, **more}, num_steps, step_seconds, share))
        if step_seconds * num_steps > 600:
            break
    runs = [choose_run(600, plans), choose_run(60, plans)]
    if runs[0] == runs[1]:
        runs.pop()
    for plan, steps in runs:
        more = dict(plan.options)
        share = plan.share
        if steps < plan.num_steps:
            more["num_iterations"] = steps
            share = f"{steps * cfg.tokens_per_step / pass_tokens:.0%}"
        show(f"train on it ({plan.step_seconds * steps:.0f} s of training here, reads {share})", **more)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("paths", nargs="*", type=parse_input,
                        help="files and folders (default: the source of the installed PyTorch)")
    parser.add_argument("--out", help="folder for the shards")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN",
                        help="skip matching paths inside a given folder, as in '*.log'. May be repeated")
    parser.add_argument("--key", default="text", help="key of the text in .jsonl files, and its column in "
                                                      "tables (default: %(default)s)")
    parser.add_argument("--shard_tokens", type=at_least(20_000), default=SHARD_TOKENS,
                        help="tokens per shard (default %(default)s)")
    parser.add_argument("--doc_bytes", type=at_least(4),
                        help="cut longer texts into documents of at most this many bytes (default: 2047 for "
                             "bytes, 16384 for gpt2; at most 2^30)")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)

    def body() -> int:
        # A file name is printed as its bytes, which need not be text
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())
        out = Path(args.out or EMBEDDED_CORPUS).expanduser()
        REPORTED.clear()
        if not args.paths:
            if argv:
                raise RecordError(f"{argv[0]} needs a path: give files or folders, or no option for "
                                  f"{EMBEDDED_CORPUS}")
            make_embedded_corpus(is_forced=True)
        else:
            if not args.out:
                raise RecordError("--out is missing: name a folder for the shards, as in --out data/mine")
            check_out(out, args.paths)
            texts = read_texts(find_files(args.paths, args.exclude), args.paths, args.key)
            tokenizer = choose_tokenizer(args.tokenizer)
            with lock_folder(out):
                write_corpus(texts, args.paths, out, " ".join(map(str, args.paths)), tokenizer,
                             args.doc_bytes and min(args.doc_bytes, 2**30), args.shard_tokens)
        for (fate, reason), number in REPORTED.items():
            if number > LISTED:
                print(f"{fate}: {number - LISTED:,} more ({reason})")
        info = read_listing(out)
        tokens = info["tokens"]
        print(f"{out}: {info['documents']:,} documents, {tokens['train']:,} training and {tokens['val']:,} "
              f"validation tokens, fingerprint {info['fingerprint']}")
        print_commands(out, info["vocab_size"], tokens)
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
