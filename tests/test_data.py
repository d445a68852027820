"""Shards, packed sequences, batches, prefetch, downloads. Ranks do not change the tokens of a step."""

import dataclasses
import hashlib
import json
import re
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import BOS, ROOT, VOCAB, gpt, make_documents, make_runtime, smoke_config, write_shard
from huggingface_hub import constants, repo_info

sys.path.insert(0, str(ROOT / "data"))
import cached_fineweb10B  # noqa: E402


def write_raw(path, header, tokens):
    full = np.zeros(256, dtype="<i4")
    full[: len(header)] = header
    path.write_bytes(full.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return str(path)


def test_the_share_of_tokens_that_are_read(tmp_path):
    """Documents of 1,001 tokens, cut to 256: a sequence of 512 passes three of them, and reads 17.0 %. A line says so
    below a half."""
    document = [BOS, *[1] * 1000]
    write_shard(tmp_path / "train_0.bin", np.array(document * 100, np.uint16), VOCAB, BOS)
    lines = []
    for options in (dict(max_doc_len=256), dict(max_doc_len=1001), dict(sequence_start="anywhere")):
        cfg = smoke_config(tmp_path, num_iterations=4, **options)
        lines.append(gpt.TrainData(cfg, gpt.Schedule(cfg)).describe_share())
    assert lines[0].startswith(f"{1 - 512 / 3003:.1%} of the tokens are passed over") and lines[1:] == ["", ""]


def test_validation_keeps_only_its_own_tokens(tmp_path):
    """The shards are two, and the second is read in part. No array of all tokens stays behind the slice."""
    tokens = [np.array([BOS, *range(199)], np.uint16), np.array([BOS, *range(100)] * 90, np.uint16)]
    for i, part in enumerate(tokens):
        write_shard(tmp_path / f"val_{i}.bin", part, VOCAB, BOS)
    data = gpt.ValData(smoke_config(tmp_path, val_tokens=256, val_seq_len=128))
    assert data.tokens.tolist() == np.concatenate(tokens)[:257].tolist() and data.tokens.base is None


GOOD = (20240520, 1, 4, VOCAB, BOS)


@pytest.mark.parametrize("header, tokens", [
    ((1, 1, 4, VOCAB, BOS), [BOS, 1, 2, 3]), ((20240520, 2, 4, VOCAB, BOS), [BOS, 1, 2, 3]),
    ((20240520, 1, 9, VOCAB, BOS), [BOS, 1, 2, 3]), ((20240520, 1, 0, VOCAB, BOS), []),
    (GOOD, [BOS, 1, 2, 300]), (GOOD, [0, 1, 2, 3]), ((20240520, 1, 4), [50256, 1, 2, 3]), (None, [])])
def test_bad_shards_are_refused_by_name(tmp_path, header, tokens):
    """The last header but one has no vocabulary, the last file has no header."""
    path = tmp_path / "odd.bin"
    write_raw(path, header, tokens) if header else path.write_bytes(b"abc")
    with pytest.raises(gpt.RunError, match="odd.bin") as caught:
        gpt.open_shard(str(path), VOCAB)
    assert caught.value.status == 2


def test_a_header_without_vocabulary_means_gpt2(tmp_path):
    path = write_raw(tmp_path / "fineweb.bin", (20240520, 1, 3), [50256, 1, 2])
    shard = gpt.open_shard(path, 50257)
    assert shard.bos == 50256 and shard.bounds.tolist() == [0, len(shard.tokens)]


def test_a_shard_that_changed_is_refused(tmp_path):
    """corpus.json has the SHA-256 of its tokens. A listing of an older data/text.py has none."""
    path = write_raw(tmp_path / "train_000000.bin", (20240520, 1, 4, VOCAB, BOS), [BOS, 1, 2, 3])
    listing = dict(files=["train_000000.bin"])
    for listed in (listing, listing | dict(sha256={"train_000000.bin": gpt.open_shard(path, VOCAB).sha256})):
        (tmp_path / "corpus.json").write_text(json.dumps(listed))
        assert gpt.open_shard(path, VOCAB).tokens.tolist() == [BOS, 1, 2, 3]
    write_raw(tmp_path / "train_000000.bin", (20240520, 1, 4, VOCAB, BOS), [BOS, 1, 2, 4])
    with pytest.raises(gpt.RunError, match="train_000000.bin does not fit the SHA-256"):
        gpt.open_shard(path, VOCAB)


def all_sequences(cfg):
    data = gpt.TrainData(cfg, gpt.Schedule(cfg))
    return data, [data.read_tokens(i) for i in range(len(data.sequences))]


def read_step(data, step=0, rank=0, num_ranks=1):
    """The micro-batches of a rank in one step."""
    return list(data.batches(gpt.Comm(rank, num_ranks), step, step + 1, sweep_from=0))


def test_sequences_follow_the_published_packing(shards):
    """The packing of record 32, as a slow reference: a document is cut to fit, and its rest is dropped."""
    cfg = smoke_config(shards, num_iterations=40)
    data, sequences = all_sequences(cfg)
    expected = []
    for name in ("train_0", "train_1"):
        tokens = np.fromfile(shards / f"{name}.bin", dtype="<u2")[512:]
        starts = np.flatnonzero(tokens == BOS).tolist()
        buffer = []
        for begin, end in zip(starts, [*starts[1:], len(tokens)]):
            last = min(end, begin + cfg.max_doc_len, begin + cfg.seq_len + 1 - len(buffer))
            buffer += tokens[begin:last].tolist()
            if len(buffer) == cfg.seq_len + 1:
                expected.append(buffer)
                buffer = []
    assert len({sequence.shard for sequence in data.sequences}) == 2  # the run crosses a shard boundary
    assert [tokens.tolist() for tokens in sequences] == expected[: len(sequences)]
    for tokens in sequences:
        lengths = np.diff(np.flatnonzero(tokens == BOS))
        assert tokens[0] == BOS and lengths.max() <= cfg.max_doc_len


def test_sequences_that_start_anywhere_are_the_stream(tmp_path):
    rng = np.random.default_rng(1)
    tokens = [make_documents(rng, size) for size in (5_000, 30_000)]
    for i, part in enumerate(tokens):
        write_shard(tmp_path / f"train_{i}.bin", part, VOCAB, BOS)
    cfg = smoke_config(train_files=f"{tmp_path}/train_*.bin", sequence_start="anywhere")
    data = gpt.TrainData(cfg, gpt.Schedule(cfg))
    expected = [part[i : i + 513] for part in tokens for i in range(0, len(part) - 512, 512)]
    assert len(data.sequences) == 48 > (len(tokens[0]) - 1) // 512
    for index in range(48):
        assert data.read_tokens(index).tolist() == expected[index].tolist()


def test_a_sequence_that_a_document_fills_exactly_takes_no_other(tmp_path):
    """Documents of 257 and 256 tokens: two fill seq_len + 1 = 513 tokens. The next sequence begins with the third."""
    document = [BOS, *[1] * 256, BOS, *[2] * 255]
    write_shard(tmp_path / "train_0.bin", np.array(document * 60, np.uint16), VOCAB, BOS)
    cfg = smoke_config(tmp_path, max_doc_len=1024)
    sequences = gpt.TrainData(cfg, gpt.Schedule(cfg)).sequences
    assert [(sequence.first, sequence.last) for sequence in sequences[:3]] == [(0, 1), (2, 3), (4, 5)]


def test_sequences_and_documents_are_apart():
    sequences = np.array([[5, BOS, 6, 7], [8, 9, BOS, 1]])
    made = gpt.make_batch(sequences, BOS)
    assert made.doc_ids.tolist() == [1, 2, 2, 3, 3, 4]
    assert made.inputs.tolist() == [5, BOS, 6, 8, 9, BOS]
    assert made.targets.tolist() == [BOS, 6, 7, 9, BOS, 1]
    assert [x.dtype for x in made[:3]] == [torch.int32, torch.int64, torch.int32]


@pytest.mark.parametrize("micro_batch_tokens", [512, 1024, 2048])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_see_what_one_rank_sees(shards, world_size, micro_batch_tokens):
    """The tokens of a step, and a new document at the start of each packed sequence."""
    data, sequences = all_sequences(smoke_config(shards, micro_batch_tokens=micro_batch_tokens))
    for step in (0, 5, 11):
        batches = [batch for rank in range(world_size) for batch in read_step(data, step, rank, world_size)]
        seen = [batch.inputs for batch in batches]
        assert all((batch.doc_ids[511:-1:512] < batch.doc_ids[512::512]).all() for batch in batches)
        expected = np.concatenate([tokens[:-1] for tokens in sequences[step * 4 : step * 4 + 4]])
        assert torch.cat(seen).tolist() == expected.tolist()


def test_stages_change_sequences_per_step_and_lengths(shards):
    stages = (gpt.Stage(1, 64, 64, tokens_per_step=512, max_doc_len=50, seq_len=256), gpt.Stage(1, 64, 64))
    cfg = smoke_config(shards, stages=stages)
    data, sequences = all_sequences(cfg)
    # ceil(13 / 2) = 7 steps of 2 sequences, 5 steps of 4
    assert [data.count_sequences(step) for step in range(13)] == [*range(0, 14, 2), *range(14, 35, 4)]
    assert len(data.sequences) == 34
    assert [sequence.max_doc_len for sequence in data.sequences] == [50] * 14 + [256] * 20
    assert [len(tokens) for tokens in sequences] == [257] * 14 + [513] * 20
    # two sequences of 256 in step 6, then twice two of 512
    assert [len(batch.inputs) for step in (6, 7) for batch in read_step(data, step)] == [512, 1024, 1024]


def test_classes_do_not_depend_on_ranks_micro_batches_and_resumption(shards):
    """Each sequence has all its targets among its classes. The other classes change from step to step. From the second
    stage on the first of two ranks also has the second sequence of a step."""
    stages = (gpt.Stage(1, 64, 64, tokens_per_step=512, seq_len=256, num_classes=200),
              gpt.Stage(1, 64, 64, num_classes=250), gpt.Stage(1, 64, 64, num_classes=384))

    def collect(micro_batch_tokens: int, start: int, end: int, num_ranks: int = 1) -> list[list[int]]:
        """Classes of the sequences of these steps, rank by rank."""
        cfg = smoke_config(shards, stages=stages, micro_batch_tokens=micro_batch_tokens)
        data, found = gpt.TrainData(cfg, gpt.Schedule(cfg)), []
        for rank in range(num_ranks):
            for batch in data.batches(gpt.Comm(rank, num_ranks), start, end, sweep_from=0):
                rows = batch.classes.tolist() if batch.classes is not None else []
                for row, targets in zip(rows, batch.targets.chunk(len(rows) or 1)):
                    assert set(targets.tolist()) <= set(row) and row == sorted(row)
                found += rows
        return found

    whole = [collect(2048, step, step + 1) for step in range(12)]  # a resumed run begins anywhere
    sizes = [[len(row) for row in rows] for rows in whole]
    assert sizes == [[200] * 2] * 5 + [[250] * 4] * 4 + [[384] * 4] * 3
    assert all(rows[0] != rows[1] for rows in whole[:9]) and whole[0] != whole[1]
    for micro_batch_tokens in (512, 1024, 2048):
        assert collect(micro_batch_tokens, 0, 12) == sum(whole, [])
        assert [collect(micro_batch_tokens, step, step + 1, num_ranks=2) for step in range(12)] == whole
    halves = [rows[len(rows) // 2 * rank :][: len(rows) // 2] for rank in (0, 1) for rows in whole]
    assert collect(1024, 0, 12, num_ranks=2) == sum(halves, [])


def test_too_few_tokens_are_counted(shards):
    """1,000 steps of 2,048 tokens, and 12,000 validation tokens in the shard."""
    cfg = smoke_config(shards, num_iterations=1000)
    short = smoke_config(shards, num_iterations=100)
    found = gpt.TrainData(short, gpt.Schedule(short))
    with pytest.raises(gpt.RunError) as error:
        gpt.TrainData(cfg, gpt.Schedule(cfg))
    has = int(re.search(r"fills (\d+) of the 2048000 tokens", str(error.value))[1])
    assert len(found.sequences) * 512 < has < 440_000 and has % 512 == 0
    assert str(error.value).endswith(f"give --epochs={-(-2_048_000 // has)}")  # reading all tokens is not enough
    cfg = smoke_config(shards, num_iterations=has // 2048 + 1)
    with pytest.raises(gpt.RunError, match="give --epochs=2, or --sequence_start=anywhere"):
        gpt.TrainData(cfg, gpt.Schedule(cfg))
    with pytest.raises(gpt.RunError, match="is 1011\\d\\d\\d tokens too short for --val_tokens=1024000 "):
        gpt.ValData(smoke_config(shards, val_tokens=1_024_000))
    with pytest.raises(gpt.RunError, match="give --val_tokens=11264$"):  # 11 sequences of 12,180 tokens
        gpt.ValData(smoke_config(shards, val_tokens=1_024_000))
    with pytest.raises(gpt.RunError, match="matches no file"):
        gpt.ValData(smoke_config(shards, val_files="nowhere/*.bin"))


@pytest.mark.parametrize("start, steps", [("document", 150), ("anywhere", 220)])
def test_a_second_epoch_repeats_the_sequences(shards, start, steps):
    """Without a second epoch the run is refused, with --epochs as the remedy."""
    changes = dict(num_iterations=steps, sequence_start=start)
    cfg = smoke_config(shards, epochs=2, **changes)
    data = gpt.TrainData(cfg, gpt.Schedule(cfg))
    first = next(i for i in range(1, len(data.sequences)) if data.sequences[i] == data.sequences[0])
    tokens = sum(gpt.sum_documents(shard, 256 if start == "document" else 1 << 20)[-1] for shard in data.shards)
    # the rest of each sequence's last document is dropped, here a quarter
    assert 0.7 * tokens // 512 < first <= tokens // 512
    assert data.sequences[first:] == data.sequences[: len(data.sequences) - first]
    assert np.array_equal(data.read_tokens(first + 1), data.read_tokens(1))
    with pytest.raises(gpt.RunError, match="give --epochs=2"):
        cfg = smoke_config(shards, **changes)
        gpt.TrainData(cfg, gpt.Schedule(cfg))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_share_the_validation_batches(shards, num_ranks):
    """Each of four batches counts once. Three ranks read two each, because they read the tables together."""
    data = gpt.ValData(smoke_config(shards, val_seq_len=256, micro_batch_tokens=1024))
    assert (data.batch_tokens, data.num_batches) == (1024, 4)
    found = [list(data.batches(gpt.Comm(rank, num_ranks), 4)) for rank in range(num_ranks)]
    assert {len(batches) for batches in found} == {-(-4 // num_ranks)}
    counted = [batch for batches in zip(*found) for batch, counts in batches if counts]
    stream = np.fromfile(shards / "val_0.bin", dtype="<u2")[512:].astype(np.int64)
    assert torch.cat([batch.inputs for batch in counted]).tolist() == stream[:4096].tolist()
    assert torch.cat([batch.targets for batch in counted]).tolist() == stream[1:4097].tolist()


def test_short_validation_sequences_travel_together(shards):
    """With masked documents and short windows only the cuts between sequences can matter."""
    cfg = smoke_config(shards, val_seq_len=256, micro_batch_tokens=1024)
    data = gpt.ValData(cfg)
    trainer = gpt.Trainer(cfg, make_runtime())
    one_by_one = gpt.ValData(dataclasses.replace(cfg, micro_batch_tokens=512, seq_len=512, val_seq_len=256))
    state = trainer.schedule.at(0)
    assert trainer.validate(data, state) == pytest.approx(trainer.validate(one_by_one, state), rel=1e-6)


@pytest.mark.parametrize("device, num_threads", [("cpu", 0), ("cuda", 1)])
def test_prefetched_batches(device, num_threads, monkeypatch):
    """Batches arrive in order. For CUDA a thread builds them (here without pinned memory, the copy and the device). Its
    errors reach the caller, and no thread is left."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(gpt, "move_batch", lambda batch, device: batch)
    before = {*threading.enumerate()}

    def count_threads():
        return sum(thread.name.startswith("prefetch") for thread in {*threading.enumerate()} - before)

    def fail():
        yield from batches
        raise ValueError("disk on fire")

    batches = [gpt.make_batch(np.array([[BOS, i, 2]]), BOS) for i in range(7)]
    prefetched = gpt.prefetch(fail(), torch.device(device))
    assert [next(prefetched).inputs[1].item() for _ in batches] == list(range(7))
    assert count_threads() == num_threads
    with pytest.raises(ValueError, match="disk on fire"):
        next(prefetched)
    assert count_threads() == 0


@pytest.fixture
def fetch(monkeypatch, capsys):
    """Run the tool in this process, offline. Returns its status, its output and its error line."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # otherwise the client retries for half a minute

    def run(*args):
        capsys.readouterr()
        status = cached_fineweb10B.main([*map(str, args)])
        out, err = capsys.readouterr()
        assert err.count("\n") == (status != 0)
        return status, out, err

    return run


def test_complete_files_are_not_fetched_again(tmp_path, fetch):
    """A shard is complete if its size agrees with its header, a vocabulary if it is JSON."""
    shards, vocabulary = tmp_path / "it's [1]", tmp_path / "gpt2_vocab.json"
    status, _, said = fetch("1", "--out", shards)
    assert status == 2 and "fineweb_val_000000.bin cannot be downloaded" in said
    shards.mkdir(exist_ok=True)
    for name in ("fineweb_val_000000.bin", "fineweb_train_000001.bin"):
        write_raw(shards / name, (20240520, 1, 3), [50256, 1, 2])
    vocabulary.write_text("{}")
    status, out, _ = fetch("1", "--out", shards)
    line = next(line for line in out.splitlines() if line.startswith("record 92: "))
    options = dict(word[2:].split("=", 1) for word in shlex.split(line.partition("train_gpt.py ")[2]))
    assert status == 0 and options["vocab_file"] == str(vocabulary)
    for split, name in (("train", "train_000001"), ("val", "val_000000")):  # the pattern finds these files
        assert gpt.find_shards(options[f"{split}_files"], "x") == [f"{shards}/fineweb_{name}.bin"]
    vocabulary.write_text("{")
    status, _, said = fetch("1", "--out", shards)
    assert status == 2 and "vocab.json cannot be downloaded" in said
    with open(shards / "fineweb_train_000001.bin", "ab") as file:
        file.write(b"x")  # longer than its header says
    status, _, said = fetch("1", "--out", shards)
    assert status == 2 and "fineweb_train_000001.bin" in said


VAL, TRAIN, VOCABULARY = "fineweb_val_000000.bin", "fineweb_train_000001.bin", "vocab.json"


def test_a_repeated_command_keeps_complete_files(tmp_path, fetch, monkeypatch):
    """Connections that break end the command. Its next run fetches the incomplete file, and the rest."""
    broken, asked, metadata = {TRAIN, VOCABULARY}, [], SimpleNamespace(etag=None)

    def answer(filename, local_dir, **_):
        asked.append(filename)
        if filename in broken:
            broken.remove(filename)
            raise ConnectionError("reset by peer")
        path = Path(local_dir, filename)
        if filename == VOCABULARY:
            path.write_text("{}")
        else:
            write_raw(path, (20240520, 1, 3), [50256, 1, 2])
        metadata.etag = hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setattr(cached_fineweb10B, "get_hf_file_metadata", lambda url: metadata)
    monkeypatch.setattr(cached_fineweb10B, "hf_hub_download", answer)
    assert [fetch("1", "--out", tmp_path / "shards")[0] for _ in range(3)] == [2, 2, 0]
    assert asked == [VAL, TRAIN, TRAIN, VOCABULARY, VOCABULARY]
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {VAL, TRAIN, "gpt2_vocab.json"}


@pytest.fixture
def hub(tmp_path, fetch, monkeypatch):
    """A local hub: the bytes of its files, the bytes that it sends instead, its requests, whether it lists
    checksums. The vocabulary is not in LFS: its checksum is that of git hash-object."""
    right = {name: Path(write_raw(tmp_path / "right.bin", (20240520, 1, 4), [50256, 1, 2, last])).read_bytes()
             for name, last in ((VAL, 3), (TRAIN, 4))} | {VOCABULARY: b'{"a": 0}'}
    checksums = {name: hashlib.sha256(body).hexdigest() for name, body in right.items()} | {
        VOCABULARY: "ac1121d84e8d3115b222bcfaeb858637d4bcbbf6"}
    hub = SimpleNamespace(files=right, checksums=checksums, sent={}, asked=[], has_list=True)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            name, listed = self.path.rpartition("/")[2], []
            for file, body in hub.files.items():
                found = dict(blobId=hub.checksums[file])
                if file != VOCABULARY:  # the blob has a pointer to the file
                    found = dict(blobId="0" * 40, lfs=dict(size=len(body), sha256=hub.checksums[file], pointerSize=130))
                listed.append(dict(rfilename=file, **found))
            is_list = self.path.startswith("/api/")
            hub.asked += [name.partition("?")[0]] * (self.command == "GET")
            body = json.dumps(dict(id="x", siblings=listed)).encode() if is_list else hub.files[name]
            self.send_response(200 if hub.has_list or not is_list else 404)
            self.send_header("ETag", f'"{hub.checksums.get(name)}"')
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(hub.sent.get(name, body))

        do_HEAD, log_message = do_GET, lambda *_: None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(repo_info.__self__, "endpoint", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")
    yield hub
    server.shutdown()


def read_files(folder):
    """The files of the tool by name, and nothing else: no temporary file is left."""
    return {path.name.removeprefix("gpt2_"): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("has_list", [True, False])
def test_a_download_is_compared_with_the_checksum_of_the_hub(has_list, tmp_path, fetch, hub):
    """A wrong last byte in the second shard: the download is removed. The next run downloads it again."""
    out, hub.has_list = tmp_path / "data/shards", has_list
    hub.sent[TRAIN] = hub.files[TRAIN][:-1] + b"\1"
    status, _, said = fetch("1", "--out", out)
    found = hashlib.sha256(hub.sent.pop(TRAIN)).hexdigest()
    assert status == 2 and f"{TRAIN} has checksum {found}, but the hub has {hub.checksums[TRAIN]}" in said
    assert read_files(out.parent) == {VAL: hub.files[VAL]}
    status, said, _ = fetch("1", "--out", out)
    assert status == 0 and ("not compared with the hub: 1 (" in said) == (not has_list)
    assert read_files(out.parent) == hub.files and hub.asked.count(TRAIN) == 2 and hub.asked.count(VAL) == 1


def test_kept_files_are_compared_with_the_checksum_of_the_hub(tmp_path, fetch, hub, monkeypatch):
    """Two requests list the checksums. Zeros in the second half of a shard of the right size, and JSON that is not
    the hub's, are replaced once the download is complete. Without the hub they are kept, and a line says so."""
    out = tmp_path / "data/shards"
    lists = ["fineweb10B-gpt2", "gpt2"]
    assert fetch("1", "--out", out)[0] == 0 and hub.asked == [*lists, VAL, TRAIN, VOCABULARY]
    size, kept = len(hub.files[TRAIN]), (out / VAL).stat()
    bad = {**hub.files, TRAIN: hub.files[TRAIN][: size - 4] + bytes(4), VOCABULARY: b"{}"}
    (out / TRAIN).write_bytes(bad[TRAIN])
    (out.parent / "gpt2_vocab.json").write_bytes(bad[VOCABULARY])

    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        status, said, _ = fetch("1", "--out", out)
    lines = [line for line in said.splitlines() if "not compared" in line]
    assert status == 0 and len(lines) == 1 and "with the hub: 3 (OfflineModeIsEnabled: " in lines[0]
    assert read_files(out.parent) == bad

    hub.sent[TRAIN] = bytes(size)
    assert fetch("1", "--out", out)[0] == 2 and read_files(out.parent) == bad
    hub.sent.clear()
    hub.asked.clear()
    status, said, _ = fetch("1", "--out", out)
    again = [Path(line.split()[0]).name for line in said.splitlines() if line.endswith("downloading it again")]
    assert status == 0 and again == [TRAIN, "gpt2_vocab.json"] and "not compared" not in said
    assert hub.asked == [*lists, TRAIN, VOCABULARY] and read_files(out.parent) == hub.files
    hub.asked.clear()
    assert fetch("1", "--out", out)[0] == 0 and hub.asked == lists
    assert ((out / VAL).stat().st_ino, (out / VAL).stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)


def test_only_training_documents_have_pieces(shards):
    """Attention pieces of 100 tokens. Training documents have at most 256, validation documents 600."""
    cfg = smoke_config(shards, max_attention_len=100)
    training = read_step(gpt.TrainData(cfg, gpt.Schedule(cfg)))[0]
    validation, _ = next(gpt.ValData(cfg).batches(gpt.Comm(), 1))
    longest = [batch.doc_ids.unique_consecutive(return_counts=True)[1].max() for batch in (training, validation)]
    assert longest[0] == 100 and longest[1] > 256


def test_sweeps_of_a_step_begin_at_equal_distances(shards, monkeypatch):
    """At most four sequences a step, 4,096 classes. A sweep goes on where its last step has ended: 1.7 times the missing
    classes and 256 further. The first stage has two sequences a step."""
    stages = gpt.Stage(1, 64, 64, tokens_per_step=1024, num_classes=300), gpt.Stage(1e6, 64, 64, num_classes=300)
    cfg = smoke_config(shards, vocab_multiple=4096, stages=stages)
    data, offsets, real = gpt.TrainData(cfg, gpt.Schedule(cfg)), [], gpt.choose_classes
    monkeypatch.setattr(gpt, "choose_classes", lambda *args: offsets.append(args[-1]) or real(*args))
    for slot in range(4):
        sweeps, offset = gpt.Sweeps(data, 0), 1024 * slot
        for step in range(1 if slot > 1 else 0, 12):
            first = max(0, 4 * step - 2)
            num_missing = 300 - len(set(data.read_tokens(first + slot)[1:].tolist()))
            classes = sweeps.choose_classes(step, slot)
            assert len(classes) == 300 and offsets.pop() == offset
            offset = (offset + int(1.7 * num_missing) + 256) % 4096


@pytest.mark.parametrize("num_ranks, calls", [(1, 48), (2, 24), (4, 12)])
def test_a_rank_computes_only_the_classes_of_its_sequences(shards, num_ranks, calls, monkeypatch):
    """Twelve steps of four sequences. A run that resumes at step 9 reads the earlier steps again."""
    cfg, found = smoke_config(shards, stages=(gpt.Stage(1, 64, 64, num_classes=300),)), []
    real = gpt.choose_classes
    monkeypatch.setattr(gpt, "choose_classes", lambda *args: found.append(0) or real(*args))
    data = gpt.TrainData(cfg, gpt.Schedule(cfg))
    for start in (0, 9):
        assert list(data.batches(gpt.Comm(num_ranks - 1, num_ranks), start, 12, sweep_from=0))
        assert len(found) == calls
        found.clear()
