#!/usr/bin/env python3
"""Download FineWeb shards of 100 M GPT-2 tokens each (hub dataset kjj0/fineweb10B-gpt2), and GPT-2's
vocabulary (hub model openai-community/gpt2), which preset record_92 reads.

    ./run.sh data/cached_fineweb10B.py 10    # the validation shard and 10 training shards: all of record 32
    ./run.sh data/cached_fineweb10B.py       # all 103

A broken connection is resumed a few times. If the command fails, repeat it: it keeps complete files. Each
file, also a kept one, is compared with the hub's checksum. If the hub cannot be asked, complete files are
kept, and a line says that they are not compared. Shards of 200 MB go into data/fineweb10B. The vocabulary of
1 MB goes into data. The last line of the output is a command that trains on the shards.
"""

import glob
import hashlib
import json
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import ROOT, Parser, RecordError, find_launcher, require_packages, run_guarded

with require_packages():
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, repo_info
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from tqdm import tqdm

    import train_gpt as gpt

REPOSITORY, NUM_SHARDS = dict(repo_id="kjj0/fineweb10B-gpt2", repo_type="dataset"), 103
DEFAULT = ROOT / "data" / "fineweb10B"
VOCABULARY = dict(repo_id="openai-community/gpt2")


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"


def read_checksums(repository: dict) -> dict[str, str]:
    """The hub's checksum by file name: SHA-256 of a file in LFS, as a shard is, else the SHA-1 of git."""
    files = repo_info(files_metadata=True, timeout=10, **repository).siblings
    return {file.rfilename: file.lfs.sha256 if file.lfs else file.blob_id for file in files}


def compute_checksum(path: Path, expected: str) -> str:
    """The checksum of a file, of the same kind as the expected one."""
    is_sha256 = len(expected) == 64
    digest = hashlib.sha256() if is_sha256 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: digest).hexdigest()


def is_whole(path: Path, expected: str) -> bool:
    """Whether a file is a shard whose size agrees with its header, or JSON, and has the checksum, if any."""
    try:
        json.loads(path.read_text()) if path.suffix == ".json" else gpt.read_shard_header(str(path))
        return not expected or compute_checksum(path, expected) == expected
    except (OSError, ValueError, gpt.RunError):
        return False


def download(name: str, path: Path, repository: dict, expected: str) -> None:
    """Replace path by the hub's file once this is complete. RecordError if the hub fails, or sends another
    file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as place:
            hf_hub_download(filename=name, local_dir=place, force_download=path.exists(), **repository)
            expected = expected or get_hf_file_metadata(hf_hub_url(filename=name, **repository)).etag
            found = compute_checksum(Path(place, name), expected)
            if found == expected:
                Path(place, name).replace(path)
    except Exception as error:  # the hub client raises the errors of several HTTP libraries
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            shards = f". Its training shards are 1 to {NUM_SHARDS}" * (repository is REPOSITORY)
            raise RecordError(f"{name} does not exist in {repository['repo_id']} on the hub (404)"
                              f"{shards}: ask for fewer, check HF_ENDPOINT, or train without a download: "
                              "./run.sh --preset=laptop") from None
        raise RecordError(f"{name} cannot be downloaded from the hub ({describe(error)}): check network, "
                          "token and disk, and repeat the command, which keeps complete files, or train "
                          "without a download: ./run.sh --preset=laptop") from None
    if found != expected:
        raise RecordError(f"{name} has checksum {found}, but the hub has {expected}: the download is "
                          "removed. Repeat the command, which downloads it again")


def fetch(files: dict[Path, tuple[str, dict]]) -> None:
    """Download files, (name, repository) by path, except those that are complete."""
    checksums, reason, num_unknown = {}, "the hub does not list them", 0
    try:
        for repository in (REPOSITORY, VOCABULARY):
            checksums |= read_checksums(repository)
    except Exception as error:  # as in download(), which names it if a file is missing
        reason = describe(error)
    for path, (name, repository) in tqdm(files.items(), desc="files", unit="file", disable=None):
        expected = checksums.get(name, "")
        if is_whole(path, expected):
            num_unknown += not expected
            continue
        if path.exists():
            tqdm.write(f"{path} is not the hub's file: downloading it again")
        download(name, path, repository, expected)
        if repository is REPOSITORY:
            gpt.read_shard_header(str(path))
    if num_unknown:
        print(f"complete files that are kept, but not compared with the hub: {num_unknown} ({reason})")


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
        shards = {args.out / name: (name, REPOSITORY) for name in ["fineweb_val_000000.bin", *names]}
        fetch({**shards, args.out.parent / "gpt2_vocab.json": ("vocab.json", VOCABULARY)})
        folder = glob.escape(str(args.out))
        files = [f"--train_files={folder}/fineweb_train_*.bin", f"--val_files={folder}/fineweb_val_*.bin"]
        vocabulary = [f"--vocab_file={args.out.parent / 'gpt2_vocab.json'}"]
        if args.out == DEFAULT and Path.cwd() == ROOT:  # the defaults of these options
            files, vocabulary = [], []
        launcher = find_launcher()
        print("train on it:", launcher, shlex.join(files))
        print("record 92:", launcher, "--preset=record_92", shlex.join([*files, *vocabulary]))
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
