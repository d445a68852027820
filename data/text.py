#!/usr/bin/env python3
"""Turn text on this machine into token shards that train_gpt.py reads.

    python data/text.py                                   # the PyTorch source -> data/torch_source
    python data/text.py ~/notes book.txt --out data/mine  # your own files and folders, one token per byte
    python data/text.py ~/notes --out data/mine --tokenizer gpt2    # GPT-2 tokens; needs tiktoken

The last line it prints is a command that trains on it. One file in sixteen, chosen by the hash of its path,
becomes validation; of few files, one document in sixteen. DIR/corpus.json tells what was made and lists the
shards, which another call replaces; a DIR with other shards is refused.
"""

import glob
import hashlib
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "records")]
from results import Parser, at_least  # noqa: E402

import train_gpt as gpt  # noqa: E402

GPT2_VOCAB_SIZE, GPT2_BOS = 50257, 50256


def read_texts(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Name and content of every text file in files and folders; files with a NUL byte are not text: passed
    over in folders, and refused where they are named.

    Pipes and devices, which may never end, are passed over in folders and refused by themselves.
    """
    files, named = [], {path for path in paths if path.is_file()}
    for path in paths:
        if not path.is_dir() and not path.is_file():
            problem = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise gpt.InputError(f"{path} {problem}: give files or folders of text")
        inside = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files += [(file.relative_to(path).as_posix() if path.is_dir() else file.name, file)
                  for file in inside]
    for name, file in tqdm(files, desc="read", unit="file", disable=not sys.stderr.isatty()):
        try:
            text = file.read_bytes()
        except OSError as error:
            raise gpt.InputError(f"{file} cannot be read ({error.strerror}): mend its permissions, or give "
                                 "others") from None
        if b"\0" in text and file in named:
            raise gpt.InputError(f"{file} has a NUL byte, so it is no text in UTF-8: convert it, as with "
                                 "iconv, or leave it out")
        if text and b"\0" not in text:
            yield name, text


def read_corpus(out: Path) -> tuple[str | None, list[Path], list[Path]]:
    """(the source of a folder's corpus, None unless it is whole; its shards; other shards in the folder).

    Its shards are those that corpus.json lists. An older version listed none: then they are those with the
    names that write_corpus() gives, if they hold as many tokens as corpus.json says.
    """
    # found before the list is read: who builds a corpus writes the list first
    shards = sorted((*out.glob("train_*.bin"), *out.glob("val_*.bin")))
    try:
        info = json.loads((out / "corpus.json").read_text())
    except (OSError, ValueError):  # never built, or damaged
        info = None
    info = info if isinstance(info, dict) else {}
    files = info.get("files")
    is_listed = isinstance(files, list)
    own = [path for path in shards
           if (path.name in files if is_listed else re.fullmatch(r"(train|val)_\d{6}\.bin", path.name))]
    sizes = {split: sum((path.stat().st_size - gpt.SHARD_HEADER_BYTES) // 2 for path in own
                        if path.name.startswith(split)) for split in ("train", "val")}
    is_whole = sizes == info.get("tokens")
    own = own if is_listed or is_whole else []
    return info.get("source") if is_whole else None, own, [path for path in shards if path not in own]


def write_corpus(texts: Iterable[tuple[str, bytes]], out: Path, source: str,
                 encode: Callable[[bytes], np.ndarray], vocab_size: int, bos: int,
                 shard_tokens: int = 100_000_000, doc_bytes: int = 2047) -> dict:
    """Write (name, text) pairs as train_*.bin and val_*.bin shards; returns what corpus.json then says.

    Replaces the shards of the corpus that is there, once all new ones are written, and refuses a folder with
    any other. Documents are ordered by a hash, which mixes folders; the same texts give the same bytes.
    """
    _, own, others = read_corpus(out)
    if others:
        raise gpt.InputError(f"{others[0]} is in the way: {out}/corpus.json does not list it, so it is not "
                         "replaced: choose another folder, or move it away")
    listing = out / "corpus.json"
    if listing.is_file() and listing.stat().st_size and not own:
        try:
            content = json.loads(listing.read_text())
        except (OSError, ValueError):  # damaged
            content = None
        if isinstance(content, dict) and content and not {"files", "tokens", "source"} & content.keys():
            raise gpt.InputError(f"{listing} is in the way: it is no list of a corpus, so it is not "
                                 "replaced: choose another folder, or move it away")
    remedy = "free space or mend its permissions, or choose another folder (data/text.py --out DIR)"
    gpt.check_writable(out, remedy)
    splits = split_documents(texts, encode, bos, doc_bytes)
    sizes = {split: sum(map(len, documents)) for split, documents in splits.items()}
    if min(sizes.values()) <= gpt.BLOCK:
        raise gpt.InputError(f"{source}: {sum(sizes.values())} tokens cannot be shared out between training "
                             f"and validation in documents of {doc_bytes} bytes: give more text "
                             f"({2 * doc_bytes + 4 * gpt.BLOCK} tokens always suffice) or cut shorter "
                             "documents")
    info = dict(source=source, vocab_size=vocab_size, documents=sum(map(len, splits.values())), tokens=sizes,
                files=[], fingerprint="")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, suffix=".partial") as folder:
            for split, documents in splits.items():
                stream = np.concatenate(documents)
                begins = [begin for begin in range(0, len(stream), shard_tokens)
                          if bos in stream[begin : begin + shard_tokens]]  # some document's start
                for number, tokens in enumerate(np.split(stream, begins[1:])):
                    info["files"].append(f"{split}_{number:06d}.bin")
                    gpt.write_shard(Path(folder, info["files"][-1]), tokens, vocab_size, bos)
            written = (gpt.open_shard(f"{folder}/{name}", vocab_size) for name in info["files"])
            info["fingerprint"] = gpt.fingerprint(written)
            # what is broken off from here on can be written again: all that may then be there is listed
            listed = sorted({*info["files"], *(path.name for path in own)})
            gpt.write_atomic(out / "corpus.json", json.dumps(dict(files=listed)).encode())
            for name in info["files"]:
                os.replace(Path(folder, name), out / name)
        for path in own:
            if path.name not in info["files"]:
                path.unlink(missing_ok=True)
        gpt.write_atomic(out / "corpus.json", (json.dumps(info, indent=1) + "\n").encode())
    except OSError as error:
        raise gpt.InputError(f"{out} cannot be written ({error.strerror}): {remedy}") from None
    return info


def split_documents(texts: Iterable[tuple[str, bytes]], encode: Callable[[bytes], np.ndarray], bos: int,
                    doc_bytes: int) -> dict[str, list[np.ndarray]]:
    """The documents of texts, each behind BOS, in the order of a hash: for training, and for validation.

    One file in sixteen, by the hash of its name, is for validation. Where that leaves either less than one
    attention block, as of few files, validation has the first sixteenth of all documents, at least a block.
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
    if min(sum(map(len, documents)) for documents in splits.values()) <= gpt.BLOCK:
        documents = [tokens for _, _, tokens in entries]
        ends = np.cumsum([len(tokens) for tokens in documents])
        cut = 1 + np.searchsorted(ends, max(gpt.BLOCK + 1, ends.max(initial=0) // 16))
        splits = dict(train=documents[cut:], val=documents[:cut])
    return splits


def torch_source_name() -> str:
    """The source of the embedded corpus: CPU and CUDA builds of one version carry the same Python files."""
    return f"torch {torch.__version__.partition('+')[0]}"


def read_torch_source() -> Iterator[tuple[str, bytes]]:
    """The Python files of the installed PyTorch, by path; files that differ between builds are left out."""
    root = Path(torch.__file__).parent
    left_out = {"version.py", "testing/_internal/generated/annotated_fn_args.py"}
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    for name in tqdm(paths, desc="read the PyTorch source", unit="file", disable=not gpt.show_bar(),
                     leave=False):
        if name not in left_out:
            yield name, (root / name).read_bytes()


def split_text(text: bytes, limit: int) -> Iterator[bytes]:
    """Cut a text at line ends into pieces of at most `limit` bytes."""
    while text:
        end = text.rfind(b"\n", 0, limit) + 1 if len(text) > limit else len(text)
        end = end or limit  # one line longer than the limit
        yield text[:end]
        text = text[end:]


def encode_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def make_embedded_corpus() -> None:
    """Make the corpus of the presets without a download, unless it is there."""
    out, source = Path(gpt.EMBEDDED_CORPUS), torch_source_name()
    if read_corpus(out)[0] != source:
        write_corpus(read_torch_source(), out, source, encode_bytes, gpt.BYTE_VOCAB_SIZE, gpt.BYTE_BOS)


def choose_tokenizer(name: str) -> tuple[Callable[[bytes], np.ndarray], int, int]:
    """(encode, vocabulary size, BOS)."""
    if name == "bytes":
        return encode_bytes, gpt.BYTE_VOCAB_SIZE, gpt.BYTE_BOS
    try:
        import tiktoken
    except ImportError:
        raise gpt.InputError("--tokenizer=gpt2 needs tiktoken, which is optional: pip install tiktoken, "
                             "or use --tokenizer=bytes") from None
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever its download raises; the vocabulary is fetched on first use
        raise gpt.InputError(f"tiktoken cannot load the GPT-2 vocabulary ({type(error).__name__}): it is "
                             "downloaded once, so connect to the network or use --tokenizer=bytes") from None
    encode = lambda text: np.array(encoding.encode_ordinary(text.decode("utf-8", "replace")), np.uint16)  # noqa: E731
    return encode, GPT2_VOCAB_SIZE, GPT2_BOS


def main(argv: list[str] | None = None) -> int:
    """Parse, read, write, report; bad input ends with status 2 and one line."""
    parser = Parser(__doc__)
    parser.add_argument("paths", nargs="*", type=Path,
                        help="files and folders; none: the installed PyTorch's source")
    parser.add_argument("--out", type=Path,
                        help=f"folder for the shards (default without paths: {gpt.EMBEDDED_CORPUS})")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="bytes")
    parser.add_argument("--shard_tokens", type=at_least(20_000), default=100_000_000,
                        help="tokens per shard (default %(default)s)")
    parser.add_argument("--doc_bytes", type=at_least(1),
                        help="cut longer texts into documents of at most this many bytes (default: 2047 for "
                             "bytes, 16384 for gpt2)")
    args = parser.parse_args(argv)

    def body() -> int:
        if args.paths and not args.out:
            raise gpt.InputError("--out is missing: name a folder for the shards, such as --out data/mine")
        encode, vocab_size, bos = choose_tokenizer(args.tokenizer)
        texts = read_texts(args.paths) if args.paths else read_torch_source()
        source = " ".join(map(str, args.paths)) or torch_source_name()
        out = args.out or Path(gpt.EMBEDDED_CORPUS)
        info = write_corpus(texts, out, source, encode, vocab_size, bos, args.shard_tokens,
                                args.doc_bytes or (2047 if args.tokenizer == "bytes" else 16384))
        tokens = info["tokens"]
        # names of files are printed as the bytes they are: they need not be text
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())
        print(f"{out}: {info['documents']:,} documents, {tokens['train']:,} training and {tokens['val']:,} "
              f"validation tokens, fingerprint {info['fingerprint']}")
        needed = gpt.Schedule(gpt.make_config({"preset": "track_1"})).count_tokens()
        preset = ("quick" if tokens["train"] < 2_000_000 else "laptop" if tokens["train"] < needed else
                  "track_1")
        cfg = gpt.make_config({"preset": preset})
        seq_len = min(cfg.val_seq_len, (tokens["val"] - 1) // gpt.BLOCK * gpt.BLOCK)
        val_tokens = min(cfg.val_tokens, (tokens["val"] - 1) // seq_len * seq_len)
        sequences = max(1, (tokens["train"] - 1) // cfg.seq_len)  # at least, of one epoch
        epochs = -(-gpt.Schedule(cfg).count_tokens() // (sequences * cfg.seq_len))
        more = f"--epochs={epochs} " if epochs > cfg.epochs else ""
        launch = "./run.sh" if preset == "track_1" else "NPROC=1 ./run.sh"  # a step too small to share
        files = " ".join(f"--{split}_files={shlex.quote(f'{glob.escape(str(out))}/{split}_*.bin')}"
                         for split in tokens)
        print(f"train on it: {launch} --preset={preset} --vocab_size={vocab_size} --val_seq_len={seq_len} "
              f"--val_tokens={val_tokens} {more}{files}")
        return 0

    return gpt.run_guarded(body, "text.py")


if __name__ == "__main__":
    sys.exit(main())
