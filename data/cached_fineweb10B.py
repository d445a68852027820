#!/usr/bin/env python3
"""Download FineWeb shards of 100 M GPT-2 tokens each (hub dataset kjj0/fineweb10B-gpt2), and GPT-2's
vocabulary (hub model openai-community/gpt2), which preset frontier reads.

    python data/cached_fineweb10B.py 10    # the validation shard and 10 training shards: enough for track_1
    python data/cached_fineweb10B.py       # all 103

A broken connection is resumed a few times. If the command fails, repeat it: it keeps complete files. A
downloaded shard is compared with the hub's SHA-256. Shards of 200 MB go into data/fineweb10B. The vocabulary
of 1 MB goes into data. The last line of the output is a command that trains on the shards.
"""

import glob
import hashlib
import json
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import ROOT, Parser, RecordError, find_launcher, require_packages, run_guarded

with require_packages():
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from tqdm import tqdm

    import train_gpt as gpt

REPOSITORY, NUM_SHARDS = dict(repo_id="kjj0/fineweb10B-gpt2", repo_type="dataset"), 103
DEFAULT = ROOT / "data" / "fineweb10B"
VOCABULARY = dict(repo_id="openai-community/gpt2")


def is_whole(path: Path) -> bool:
    """Whether a shard exists and its size agrees with its header."""
    try:
        gpt.read_shard_header(str(path))
    except (OSError, gpt.RunError):
        return False
    return True


def download(name: str, folder: Path, repository: dict) -> str | None:
    """Returns the hub's checksum: SHA-256 for a shard. RecordError if the hub cannot be reached."""
    try:
        hf_hub_download(filename=name, local_dir=folder, force_download=(folder / name).exists(),
                        **repository)
        return get_hf_file_metadata(hf_hub_url(filename=name, **repository)).etag
    except Exception as error:  # the hub client raises the errors of several HTTP libraries
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            shards = f". Its training shards are 1 to {NUM_SHARDS}" * (repository is REPOSITORY)
            raise RecordError(f"{name} does not exist in {repository['repo_id']} on the hub (404)"
                              f"{shards}: ask for fewer, check HF_ENDPOINT, or train without a download: "
                              "./run.sh --preset=laptop") from None
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        raise RecordError(f"{name} cannot be downloaded from the hub ({type(error).__name__}: {reason}): "
                          "check network, token and disk, and repeat the command, which keeps complete "
                          "files, or train without a download: ./run.sh --preset=laptop") from None


def fetch(name: str, folder: Path) -> None:
    """Download a shard unless it is complete. An error if the hub fails or sends another file."""
    path = folder / name
    if is_whole(path):
        return
    expected = download(name, folder, REPOSITORY)
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.unlink()  # the next call would keep it if its size is right
        raise RecordError(f"{name} has SHA-256 {found}, but the hub has {expected}: the file is removed. "
                          "Repeat the command, which downloads it again")
    gpt.read_shard_header(str(path))


def fetch_vocabulary(folder: Path) -> None:
    """Download GPT-2's ids by token, the default of --vocab_file, unless the file is valid JSON."""
    path = folder / "gpt2_vocab.json"
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        with tempfile.TemporaryDirectory(dir=folder) as place:  # an existing vocab.json is not ours
            download("vocab.json", Path(place), VOCABULARY)
            Path(place, "vocab.json").replace(path)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("num_shards", nargs="?", type=int, default=NUM_SHARDS,
                        help="training shards (default %(default)s)")
    parser.add_argument("--out", type=Path, default=DEFAULT, help="folder (default %(default)s)")
    args = parser.parse_args(argv)

    def body() -> int:
        if not 0 <= args.num_shards <= NUM_SHARDS:
            raise RecordError(f"num_shards={args.num_shards} does not exist: give 0 to {NUM_SHARDS}")
        names = [f"fineweb_train_{i:06d}.bin" for i in range(1, args.num_shards + 1)]
        for name in tqdm(["fineweb_val_000000.bin", *names], desc="shards", unit="file", disable=None):
            fetch(name, args.out)
        fetch_vocabulary(args.out.parent)
        folder = glob.escape(str(args.out))
        files = [f"--train_files={folder}/fineweb_train_*.bin", f"--val_files={folder}/fineweb_val_*.bin"]
        vocabulary = [f"--vocab_file={args.out.parent / 'gpt2_vocab.json'}"]
        if args.out == DEFAULT and Path.cwd() == ROOT:  # the defaults of these options
            files, vocabulary = [], []
        launcher = find_launcher()
        print("train on it:", launcher, shlex.join(files))
        print("record 92:", launcher, "--preset=frontier", shlex.join([*files, *vocabulary]))
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
