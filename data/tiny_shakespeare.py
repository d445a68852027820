#!/usr/bin/env python3
"""Download tiny Shakespeare (1.1 MB), the text of nanoGPT's first example, and write it as shards.

    ./run.sh data/tiny_shakespeare.py              # from the char-rnn repository on GitHub, as nanoGPT does
    ./run.sh data/tiny_shakespeare.py input.txt    # from a file, for a machine without network

The first 90 % of the bytes are for training, and the rest for validation, as in nanoGPT. One token per byte.
Training has two shards: the first 30 % of its bytes, which preset shakespeare leaves out, and the rest. The
text must have the known SHA-256. The last line of the output is a command that trains on the shards.
"""

import glob
import hashlib
import shlex
import sys
import tempfile
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import ROOT, Parser, RecordError, find_launcher, require_packages, run_guarded

with require_packages():
    import numpy as np

    from data import text

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
OUT = ROOT / "data" / "tiny_shakespeare"


def read_text(path: Path | None) -> bytes:
    """The text, from a file or from the network. RecordError if it cannot be read, or is another text."""
    source = path or URL
    try:
        if path:
            content = path.read_bytes()
        else:
            with urllib.request.urlopen(URL, timeout=30) as answer:
                content = answer.read()
    except OSError as error:
        raise RecordError(f"{source} cannot be read ({error}): get input.txt in another way, and give its "
                          "path: data/tiny_shakespeare.py PATH") from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        raise RecordError(f"{source} has SHA-256 {found}, but tiny Shakespeare has {SHA256}: give the path "
                          "of an unchanged input.txt")
    return content


def write_shards(content: bytes, out: Path) -> dict:
    """Write the shards and corpus.json. Each shard is one document. Returns the content of corpus.json.
    RecordError if the folder has shards of another origin."""
    source, own, others = text.read_corpus(out)
    if others or own and source != URL:
        raise RecordError(f"{(own + others)[0]} is in the way: move it away, or give --out")
    num_train = len(content) * 9 // 10
    num_early = num_train * 3 // 10
    parts = {"train_000000.bin": content[:num_early], "train_000001.bin": content[num_early:num_train],
             "val_000000.bin": content[num_train:]}
    tokens = {name: np.array([text.BYTE_BOS, *part], "<u2") for name, part in parts.items()}
    sha256 = {name: hashlib.sha256(part).hexdigest() for name, part in tokens.items()}
    num_val = len(tokens["val_000000.bin"])
    info = dict(source=URL, vocab_size=text.BYTE_VOCAB_SIZE, documents=len(parts),
                tokens=dict(train=sum(map(len, tokens.values())) - num_val, val=num_val), files=[*sha256],
                fingerprint=hashlib.sha256("".join(sha256.values()).encode()).hexdigest()[:16],
                sha256=sha256)
    with text.lock_folder(out), tempfile.TemporaryDirectory(dir=out, suffix=".partial") as folder:
        text.replace_json(out / "corpus.json", dict(files=[*sha256]))
        for name, part in tokens.items():
            text.write_shard(Path(folder, name), part, text.BYTE_VOCAB_SIZE, text.BYTE_BOS)
            Path(folder, name).replace(out / name)
        text.replace_json(out / "corpus.json", info)
    return info


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("path", nargs="?", type=Path, help="input.txt (default: download it)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default %(default)s)")
    args = parser.parse_args(argv)

    def body() -> int:
        tokens = write_shards(read_text(args.path), args.out)["tokens"]
        print(f"{args.out}: {tokens['train']:,} training and {tokens['val']:,} validation tokens")
        options = ["--preset=shakespeare"]
        if args.out != OUT:
            folder = glob.escape(str(args.out))
            options += [f"--train_files={folder}/train_000001.bin", f"--val_files={args.out}"]
        print(f"train on it: {find_launcher(is_alone=True)} {shlex.join(options)}")
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
