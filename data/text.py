#!/usr/bin/env python3
"""Turn text on this machine into token shards that train_gpt.py reads.

    python data/text.py                                   # the PyTorch source -> data/torch_source
    python data/text.py ~/notes book.txt --out data/mine  # your own files and folders, one token per byte
    python data/text.py ~/notes --out data/mine --tokenizer gpt2    # GPT-2 tokens. Needs tiktoken
    python data/text.py dump.jsonl.gz ~/notes --out data/mine --exclude='*.log' --exclude='old/*'

A text is a file, or the key "text" of a line in a .jsonl file. Files that end with .gz are unpacked. Long
texts are cut into documents. Equal documents of several texts count once. Validation gets 5 to 10 % of the
tokens: whole texts, chosen by the hash of their names, or the end of the longest text. Hidden files, hidden
folders, node_modules, .json, .csv and .tsv files, Jupyter notebooks and files with NUL bytes are skipped.

The last line of the output is a command that trains on the shards. DIR/corpus.json describes the corpus and
lists its shards. Another call with --out=DIR replaces these shards. A DIR with unlisted shards is refused.
"""

import codecs
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
import zlib
from argparse import ArgumentTypeError
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, NamedTuple

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import ROOT, Parser, RecordError, at_least, find_launcher, require_packages, run_guarded

with require_packages():
    import numpy as np
    import torch
    from tqdm import tqdm

EMBEDDED_CORPUS = "data/torch_source"
BYTE_VOCAB_SIZE, BYTE_BOS = 257, 256  # byte tokens: 256 values and BOS
GPT2_VOCAB_SIZE, GPT2_BOS = 50257, 50256
SHARD_HEADER_BYTES = 1024
SHARD_TOKENS = 100_000_000
BLOCK = 128  # sequence lengths are multiples of it. Each split needs more tokens
LEAST_BYTES, LEAST_TOKENS = 2000, 10 * BLOCK  # of a corpus. Validation is then at most 20 %
READ_ERRORS = OSError, EOFError, zlib.error  # the last two: a damaged .gz
# preset: tokens of its run, epochs, seq_len, val_tokens, val_seq_len. A test compares them with train_gpt.py
PRESETS = {
    "quick": (337_920, 100, 1024, 40_960, 8192),
    "laptop": (337_920, 1, 1024, 131_072, 8192),
    "track_1": (656_670_720, 1, 49_152, 10_485_760, 262_144),
}
# A document: the hash that orders it, its place in the file of all tokens, the number of its text
DOCUMENT = np.dtype([("key", "i8"), ("begin", "i8"), ("size", "i8"), ("text", "i8")])
Text = tuple[str, Path | str, BinaryIO]  # name, source for messages, content


class Tokenizer(NamedTuple):
    encode: Callable[[bytes], np.ndarray]
    decode: Callable[[np.ndarray], bytes]
    vocab_size: int
    bos: int
    doc_bytes: int  # default of the option


class UnusableError(Exception):
    """A text that is skipped, and the reason."""


SKIPPED: Counter[str] = Counter()  # files by reason
LISTED = 5  # printed files of one reason


def skip(source: Path | str, reason: object, named: Container[Path]) -> None:
    """Print a skipped file. RecordError if the command line names it."""
    if source in named:
        raise RecordError(f"{source} is not used ({reason}): use UTF-8 text or JSON lines, or leave it out")
    kind = getattr(reason, "strerror", None) or str(reason)
    SKIPPED[kind] += 1
    if SKIPPED[kind] <= LISTED:
        tqdm.write(f"skipped: {source} ({reason})")


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


def read_texts(files: Iterable[tuple[str, Path]], named: Container[Path],
               key: str = "text") -> Iterator[Text]:
    """The texts of files (name, path). key: of a text in JSON lines. The caller reads each file to its end
    before the next text."""
    for name, path in files:
        suffix, is_gzip = Path(name.lower().removesuffix(".gz")).suffix, name.lower().endswith(".gz")
        try:
            if suffix == ".ipynb":
                raise UnusableError("a Jupyter notebook")
            if suffix in (".json", ".csv", ".tsv"):
                raise UnusableError('JSON or a table: write its texts as {"text": "..."} lines of a .jsonl')
            with gzip.open(path) if is_gzip else path.open("rb") as file:
                if suffix != ".jsonl":
                    yield name, path, file
                    continue
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    try:
                        text = json.loads(line)[key].encode(errors="replace")  # halves of surrogates
                    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                        reason = f'line {number} and the rest: no JSON with a "{key}" (--key)'
                        raise UnusableError(reason) from None
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
    remedy = "free space or fix its permissions, or choose another folder (data/text.py --out DIR)"
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
            for split, rows in splits.items():
                sha256 |= write_shards(Path(folder), split, rows, tokenizer, store, shard_tokens)
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
    with tqdm(desc="read", unit="B", unit_scale=True, disable=None) as bar:
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
                tqdm.write(f"not UTF-8: {source} (iconv converts a file of another encoding)")
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


def read_tokens(store: BinaryIO, documents: Iterable[np.void]) -> np.ndarray:
    tokens = bytearray()
    for document in documents:
        store.seek(2 * int(document["begin"]))
        tokens += store.read(2 * int(document["size"]))
    return np.frombuffer(tokens, "<u2")


def write_shards(folder: Path, split: str, documents: np.ndarray, tokenizer: Tokenizer, store: BinaryIO,
                 shard_tokens: int) -> dict[str, str]:
    """Write documents in the order of their hash. A shard has at most shard_tokens, or one document.

    Returns the SHA-256 of the tokens by shard.
    """
    documents, sha256 = documents[np.argsort(documents["key"], kind="stable")], {}
    while len(documents):
        number = max(1, np.searchsorted(np.cumsum(documents["size"]), shard_tokens, side="right"))
        name = f"{split}_{len(sha256):06d}.bin"
        tokens = read_tokens(store, documents[:number])
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


def print_command(out: Path, vocab_size: int, tokens: dict[str, int]) -> None:
    """Print the command that trains on these shards."""
    preset = "quick" if tokens["train"] < 2_000_000 else "laptop"
    if tokens["train"] >= PRESETS["track_1"][0]:
        preset = "track_1"
    run_tokens, most_epochs, full_len, val_tokens, val_len = PRESETS[preset]
    seq_len = min(val_len, (tokens["val"] - 1) // BLOCK * BLOCK)
    val_tokens = min(val_tokens, (tokens["val"] - 1) // seq_len * seq_len)
    train_len = full_len
    while train_len >= tokens["train"]:  # a step stays a whole number of packed sequences
        train_len //= 2
    sequences = (tokens["train"] - 1) // train_len  # of one epoch
    epochs = -(-run_tokens // (sequences * train_len))
    more = f"--seq_len={train_len} " if train_len < full_len else ""
    more += f"--epochs={epochs} " if epochs > most_epochs else ""
    if epochs > most_epochs:
        print(f"this text is short: preset {preset} repeats it {epochs} times and learns it by heart")
    # A step of a small preset has too few sequences for several ranks
    launcher = find_launcher(is_alone=preset != "track_1")
    files = " ".join(f"--{split}_files={shlex.quote(f'{glob.escape(str(out))}/{split}_*.bin')}"
                     for split in tokens)
    print(f"train on it: {launcher} --preset={preset} --vocab_size={vocab_size} --val_seq_len={seq_len} "
          f"--val_tokens={val_tokens} {more}{files}")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("paths", nargs="*", type=parse_input,
                        help="files and folders (default: the source of the installed PyTorch)")
    parser.add_argument("--out", help="folder for the shards")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN",
                        help="skip matching paths inside a given folder, as in '*.log'. May be repeated")
    parser.add_argument("--key", default="text", help="of the text in .jsonl files (default: %(default)s)")
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
        SKIPPED.clear()
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
        for reason, number in SKIPPED.items():
            if number > LISTED:
                print(f"skipped: {number - LISTED:,} more ({reason})")
        info = read_listing(out)
        tokens = info["tokens"]
        print(f"{out}: {info['documents']:,} documents, {tokens['train']:,} training and {tokens['val']:,} "
              f"validation tokens, fingerprint {info['fingerprint']}")
        print_command(out, info["vocab_size"], tokens)
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
