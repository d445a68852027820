#!/usr/bin/env python3
"""Turn text on this machine into token shards that train_gpt.py reads.

    python data/text.py                                   # the PyTorch source -> data/torch_source
    python data/text.py ~/notes book.txt --out data/mine  # your own files and folders, one token per byte
    python data/text.py ~/notes --out data/mine --tokenizer gpt2    # GPT-2 tokens. Needs tiktoken

The last line of the output is a command that trains on the shards. One file in sixteen, chosen by the hash
of its path, is for validation. With few files it is one document in sixteen. Hidden files, hidden folders
and node_modules are skipped. DIR/corpus.json describes the corpus and lists its shards. Another call with
--out=DIR replaces these shards. A DIR with unlisted shards is refused.
"""

import glob
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import sys
import tempfile
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

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
BLOCK = 128  # sequence lengths are multiples of it
# preset: tokens of its run, epochs, seq_len, val_tokens, val_seq_len. A test compares them with train_gpt.py
PRESETS = {
    "quick": (532_480, 100, 1024, 40_960, 8192),
    "laptop": (696_320, 1, 1024, 131_072, 8192),
    "track_1": (656_670_720, 1, 49_152, 10_485_760, 262_144),
}


def refuse_unreadable(error: OSError, path: Path | None = None) -> NoReturn:
    raise RecordError(f"{path or error.filename} cannot be read ({error.strerror or error}): check the "
                         "path and its permissions, or give other files") from None


def find_files(paths: list[Path], skipped: Counter) -> list[tuple[str, Path]]:
    """(name, path) of each file in files and folders. Counts skipped entries by their reason.

    The name is the path inside the given folder.
    """
    found, files = [], {}
    for path in sorted(paths, key=os.path.isdir):  # named files first: their content is not skipped
        try:
            mode = path.stat().st_mode
        except OSError as error:
            refuse_unreadable(error, path)
        if stat.S_ISREG(mode):
            found.append((path.name, path))
        elif not stat.S_ISDIR(mode):
            raise RecordError(f"{path} is neither a file nor a folder: give files or folders of text")
        for folder, folders, names in os.walk(path, onerror=refuse_unreadable) if stat.S_ISDIR(mode) else ():
            hidden = {name for name in (*folders, *names) if name[0] == "." or name == "node_modules"}
            skipped["hidden or node_modules"] += len(hidden)
            folders[:] = sorted({*folders} - hidden)
            skipped["links to folders"] += sum(os.path.islink(Path(folder, name)) for name in folders)
            inside = [Path(folder, name) for name in sorted({*names} - hidden)]
            found += [(file.relative_to(path).as_posix(), file) for file in inside]
    for name, file in found:
        status = file.stat() if os.path.isfile(file) else None
        if status is None:  # a broken link, or a pipe or device, whose content may have no end
            skipped["not regular"] += 1
        elif (status.st_dev, status.st_ino) in files:
            skipped["given twice"] += 1
        else:
            files[status.st_dev, status.st_ino] = name, file
    return list(files.values())


def read_files(files: list[Path], label: str) -> Iterator[bytes]:
    """The contents of files, with a progress bar that counts bytes."""
    total = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=None) as bar:
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                refuse_unreadable(error, file)
            bar.update(len(content))
            yield content


def read_texts(paths: list[Path], skipped: Counter, foreign: Counter) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each text file in files and folders. Counts skipped entries by their reason.
    Counts bytes that are not UTF-8 by their file.

    A file with a NUL byte is not UTF-8 text. It is skipped in a folder and refused if paths has it.
    """
    files, is_empty = find_files(paths, skipped), True
    for (name, file), content in zip(files, read_files([file for _, file in files], "read")):
        if not content:
            skipped["empty"] += 1
        elif b"\0" not in content:
            is_empty = False
            if number := count_foreign(content):
                foreign[file] = number
            yield name, content
        elif file in paths:
            raise RecordError(f"{file} has a NUL byte, so it is not UTF-8 text: convert it (for example "
                                 "with iconv) or leave it out")
        else:
            skipped["with a NUL byte"] += 1
    if is_empty:
        reason = format_skipped(skipped) or "no files"
        raise RecordError(f"{' '.join(map(str, paths))} has no text ({reason}): give files or folders of "
                             "UTF-8 text")


def count_foreign(content: bytes) -> int:
    """The number of bytes that are not UTF-8."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return len(content) - len(content.decode(errors="ignore").encode())
    return 0


def format_foreign(foreign: Counter, is_kept: bool) -> str:
    """A line that names the first file, the number of further ones, and all of their bytes."""
    more, number = len(foreign) - 1, sum(foreign.values())
    files = f"{next(iter(foreign))}{f' and {more} more' * bool(more)}"
    return (f"{files}: {number:,} byte{'s are' if number > 1 else ' is'} not UTF-8 and "
            f"{'kept' if is_kept else 'replaced by U+FFFD'}. iconv converts a file of another encoding")


def format_skipped(skipped: Counter) -> str:
    numbers = ", ".join(f"{number} {reason}" for reason, number in skipped.items() if number)
    return numbers and f"files and folders skipped: {numbers}"


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


def write_corpus(texts: Iterable[tuple[str, bytes]], out: Path, source: str,
                 encode: Callable[[bytes], np.ndarray], vocab_size: int, bos: int,
                 shard_tokens: int = 100_000_000, doc_bytes: int = 2047) -> dict:
    """Write (name, text) pairs as train_*.bin and val_*.bin shards. Returns the content of corpus.json.

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
    splits = split_documents(texts, encode, bos, doc_bytes)
    sizes = {split: sum(map(len, documents)) for split, documents in splits.items()}
    if min(sizes.values()) <= BLOCK:
        needed = 2 * doc_bytes + 4 * BLOCK
        smaller = min(doc_bytes - 1, (sum(sizes.values()) - 4 * BLOCK) // 2)  # this text suffices for it
        raise RecordError(
            f"{source} has {sum(sizes.values())} tokens, too few for training and validation with documents "
            f"of {doc_bytes} byte{'s' * (doc_bytes > 1)}: give more text "
            f"({needed} tokens always suffice){f' or --doc_bytes={smaller}' if smaller > 0 else ''}")
    info = dict(source=source, vocab_size=vocab_size, documents=sum(map(len, splits.values())), tokens=sizes,
                files=[], fingerprint="")
    with tempfile.TemporaryDirectory(dir=out, suffix=".partial") as folder:
        for split, documents in splits.items():
            stream = np.concatenate(documents)
            begins = [begin for begin in range(0, len(stream), shard_tokens)
                      if bos in stream[begin : begin + shard_tokens]]  # each shard needs a BOS
            for number, tokens in enumerate(np.split(stream, begins[1:])):
                info["files"].append(f"{split}_{number:06d}.bin")
                write_shard(Path(folder, info["files"][-1]), tokens, vocab_size, bos)
        info["fingerprint"] = hash_shards(Path(folder, name) for name in info["files"])
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


def write_shard(path: Path, tokens: np.ndarray, vocab_size: int, bos: int) -> None:
    """Write tokens (uint16, beginning with BOS) to a shard. data/README.md describes the format."""
    header = np.zeros(SHARD_HEADER_BYTES // 4, dtype="<i4")
    header[:5] = 20240520, 1, len(tokens), vocab_size, bos  # magic, version
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def hash_shards(paths: Iterable[Path]) -> str:
    """The fingerprint of a corpus: SHA-256 of the SHA-256 of each shard's tokens."""
    hashes = [hashlib.sha256(path.read_bytes()[SHARD_HEADER_BYTES:]).hexdigest() for path in paths]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def replace_json(path: Path, content: dict) -> None:
    """Write a file under a temporary name and rename it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def split_documents(texts: Iterable[tuple[str, bytes]], encode: Callable[[bytes], np.ndarray], bos: int,
                    doc_bytes: int) -> dict[str, list[np.ndarray]]:
    """The documents for training and for validation, each behind BOS, in the order of a hash.

    One file in sixteen, by the hash of its name, is for validation. If one split then has less than an
    attention block, validation takes the first sixteenth of all documents, and at least a block.
    """
    entries: list[tuple[bytes, str, np.ndarray]] = []
    for name, text in texts:
        split = "val" if hashlib.sha256(os.fsencode(name)).digest()[0] < 16 else "train"
        for number, piece in enumerate(split_text(text, doc_bytes)):
            tokens = np.concatenate([np.array([bos], dtype=np.uint16), encode(piece)])
            entries.append((hashlib.sha256(os.fsencode(f"{number} {name}")).digest(), split, tokens))
    entries.sort(key=lambda entry: entry[0])
    splits = {split: [tokens for _, place, tokens in entries if place == split]
              for split in ("train", "val")}
    if min(sum(map(len, documents)) for documents in splits.values()) <= BLOCK:
        documents = [tokens for _, _, tokens in entries]
        ends = np.cumsum([len(tokens) for tokens in documents])
        cut = 1 + np.searchsorted(ends, max(BLOCK + 1, ends.max(initial=0) // 16))
        splits = dict(train=documents[cut:], val=documents[:cut])
    return splits


def split_text(text: bytes, limit: int) -> Iterator[bytes]:
    """Cut a text at line ends into pieces of at most `limit` bytes. A longer line is cut at the limit."""
    begin = 0
    while begin < len(text):
        end = begin + limit
        if end < len(text):
            end = text.rfind(b"\n", begin, end) + 1 or end
        yield text[begin:end]
        begin = end


def encode_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def torch_source_name() -> str:
    """The source of the embedded corpus. CPU and CUDA builds of a version have equal Python files."""
    return f"torch {torch.__version__.partition('+')[0]}"


def read_torch_source() -> Iterator[tuple[str, bytes]]:
    """(path, content) of the installed PyTorch's Python files, without those that differ between builds."""
    root = Path(torch.__file__).parent
    left_out = {"version.py", "testing/_internal/generated/annotated_fn_args.py"}
    names = sorted({path.relative_to(root).as_posix() for path in root.rglob("*.py")} - left_out)
    yield from zip(names, read_files([root / name for name in names], "read the PyTorch source"))


def make_embedded_corpus() -> None:
    """Make the corpus of the small presets, unless it is complete. RecordError if the folder has a corpus of
    other text."""
    out, source = Path(EMBEDDED_CORPUS), torch_source_name()
    found = read_corpus(out)[0]
    if found == source:  # also on a disk that cannot be written
        return
    if found and not found.startswith("torch "):
        raise RecordError(f"{out} has a corpus with source {found[:100]!r}, but this folder is "
                          "for the PyTorch source: move the files, and set --train_files and --val_files")
    with lock_folder(out):
        if read_corpus(out)[0] != source:
            write_corpus(read_torch_source(), out, source, encode_bytes, BYTE_VOCAB_SIZE, BYTE_BOS)


def choose_tokenizer(name: str) -> tuple[Callable[[bytes], np.ndarray], int, int]:
    """(encode, vocabulary size, BOS)."""
    if name == "bytes":
        return encode_bytes, BYTE_VOCAB_SIZE, BYTE_BOS
    try:
        import tiktoken
    except ImportError:
        raise RecordError("--tokenizer=gpt2 needs tiktoken, which is optional: pip install tiktoken, "
                             "or use --tokenizer=bytes") from None
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # the download of the vocabulary raises errors of several libraries
        raise RecordError(f"tiktoken cannot load the GPT-2 vocabulary ({type(error).__name__}): connect "
                             "to the network for the first use, or use --tokenizer=bytes") from None
    encode = lambda text: np.array(encoding.encode_ordinary(text.decode("utf-8", "replace")), np.uint16)  # noqa: E731
    return encode, GPT2_VOCAB_SIZE, GPT2_BOS


def parse_path(text: str) -> Path:
    if not text:  # Path("") is the current folder
        raise ArgumentTypeError("the path is empty: name a file or a folder")
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


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("paths", nargs="*", type=parse_path,
                        help="files and folders (default: the source of the installed PyTorch)")
    parser.add_argument("--out", type=parse_path,
                        help=f"folder for the shards (default without paths: {EMBEDDED_CORPUS})")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes")
    parser.add_argument("--shard_tokens", type=at_least(20_000), default=100_000_000,
                        help="tokens per shard (default %(default)s)")
    parser.add_argument("--doc_bytes", type=at_least(1),
                        help="cut longer texts into documents of at most this many bytes (default: 2047 for "
                             "bytes, 16384 for gpt2)")
    args = parser.parse_args(argv)

    def body() -> int:
        if args.paths and not args.out:
            raise RecordError("--out is missing: name a folder for the shards, as in --out data/mine")
        if args.paths:
            check_out(args.out, args.paths)
        encode, vocab_size, bos = choose_tokenizer(args.tokenizer)
        skipped, foreign = Counter(), Counter()
        texts = read_texts(args.paths, skipped, foreign) if args.paths else read_torch_source()
        source = " ".join(map(str, args.paths)) or torch_source_name()
        out = args.out or Path(EMBEDDED_CORPUS)
        with lock_folder(out):
            info = write_corpus(texts, out, source, encode, vocab_size, bos, args.shard_tokens,
                                args.doc_bytes or (2047 if args.tokenizer == "bytes" else 16384))
        tokens = info["tokens"]
        if any(skipped.values()):
            print(format_skipped(skipped))
        # A file name is printed as its bytes, which need not be text
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())
        if foreign:
            print(format_foreign(foreign, is_kept=args.tokenizer == "bytes"))
        print(f"{out}: {info['documents']:,} documents, {tokens['train']:,} training and {tokens['val']:,} "
              f"validation tokens, fingerprint {info['fingerprint']}")
        needed = PRESETS["track_1"][0]
        preset = ("quick" if tokens["train"] < 2_000_000 else "laptop" if tokens["train"] < needed else
                  "track_1")
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
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
