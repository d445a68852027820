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
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "records")]
from results import Parser, at_least  # noqa: E402

import train_gpt as gpt  # noqa: E402

GPT2_VOCAB_SIZE, GPT2_BOS = 50257, 50256


def read_texts(paths: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Name and content of every text file in files and folders; files with a NUL byte are not text.

    Pipes and devices, which may never end, are passed over in folders and refused by themselves.
    """
    files = []
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
        if text and b"\0" not in text:
            yield name, text


def choose_tokenizer(name: str) -> tuple[Callable[[bytes], np.ndarray], int, int]:
    """(encode, vocabulary size, BOS)."""
    if name == "bytes":
        return gpt.encode_bytes, gpt.BYTE_VOCAB_SIZE, gpt.BYTE_BOS
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
        texts = read_texts(args.paths) if args.paths else gpt.read_torch_source()
        source = " ".join(map(str, args.paths)) or gpt.torch_source_name()
        out = args.out or Path(gpt.EMBEDDED_CORPUS)
        info = gpt.write_corpus(texts, out, source, encode, vocab_size, bos, args.shard_tokens,
                                args.doc_bytes or (2047 if args.tokenizer == "bytes" else 16384))
        tokens = info["tokens"]
        # names of files are printed as the bytes they are: they need not be text
        sys.stdout.reconfigure(encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors())
        print(f"{out}: {info['documents']:,} documents, {tokens['train']:,} training and {tokens['val']:,} "
              f"validation tokens, fingerprint {info['fingerprint']}")
        preset = "quick" if tokens["train"] < 2_000_000 else "auto"
        cfg = gpt.make_config({"preset": preset})
        seq_len = min(cfg.val_seq_len, (tokens["val"] - 1) // gpt.BLOCK * gpt.BLOCK)
        val_tokens = min(cfg.val_tokens, (tokens["val"] - 1) // seq_len * seq_len)
        files = " ".join(f"--{split}_files={shlex.quote(f'{glob.escape(str(out))}/{split}_*.bin')}"
                         for split in tokens)
        print(f"train on it: ./run.sh --preset={preset} --vocab_size={vocab_size} --val_seq_len={seq_len} "
              f"--val_tokens={val_tokens} {files}")
        return 0

    return gpt.run_guarded(body, "text.py")


if __name__ == "__main__":
    sys.exit(main())
