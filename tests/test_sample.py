"""Text from a checkpoint: its tokens against a forward pass, its options, and checkpoints that do not fit."""

import json
import os
import sys
import types

import numpy as np
import pytest
import torch
from conftest import BOS, at_most, data_args, find_saved, gpt, make_runtime, smoke_config, write_shard

from records import sample as tool

TRAIN = ["--preset=smoke", "--device=cpu", "--num_iterations=30", "--val_loss_every=0", "--checkpoint_every=30"]


@pytest.fixture(scope="module")
def checkpoint(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert gpt.main([*TRAIN, *data_args(shards)]) == 0
        return find_saved(30).absolute()


def sample(capsys, checkpoint, *args, status=0) -> str:
    capsys.readouterr()
    try:
        ended = tool.main([str(checkpoint), "--device=cpu", *args])
    except SystemExit as end:  # from argparse
        ended = end.code
    assert ended == status
    out, errors = capsys.readouterr()
    return errors if status else out


def test_options_of_sampling(checkpoint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40")
    assert plain.startswith("abcabc") and len(plain) <= 6 + 40 + 1
    assert sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40") == plain
    assert sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40", "--seed=1") != plain
    greedy = sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40", "--temperature=0")
    only = sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40", "--top_k=1", "--seed=3")
    assert only == greedy != plain
    short = sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=5", "--temperature=0")
    assert short[:-1] == greedy[:11]
    assert not list(tmp_path.iterdir())


def test_a_folder_is_its_newest_model(checkpoint, capsys, tmp_path):
    """The model of the run and its last checkpoint write equal texts."""
    model = checkpoint.with_name("model.pt")
    for newest, oldest in ((model, checkpoint), (checkpoint, model)):
        os.utime(oldest, (1, 1))
        os.utime(newest, (2, 2))
        assert tool.main([str(model.parents[2]), "--device=cpu", "--max_new_tokens=20"]) == 0
        out, errors = capsys.readouterr()
        assert errors == f"sampling from {newest}\n"
        assert out == sample(capsys, model, "--max_new_tokens=20")
    assert "has no model" in sample(capsys, tmp_path, status=2)


@pytest.mark.parametrize("prompt", ["fgh", "abcdefgh" * 40], ids=len)
def test_greedy_text_has_the_largest_logits(prompt, checkpoint, capsys):
    """Each token has the largest logit of a forward pass over BOS and 255 earlier tokens (max_doc_len=256)."""
    args = f"--prompt={prompt}", "--max_new_tokens=20", "--temperature=0"
    text = sample(capsys, checkpoint, *args)[:-1].encode()
    content = torch.load(checkpoint.with_name("model.pt"), weights_only=True)
    cfg = gpt.config_from_dict(json.loads(content["metadata"])["config"])
    model, state = gpt.GPT(cfg), gpt.Schedule(cfg).at(cfg.num_iterations)
    model.load_state_dict(content["tensors"])
    assert len(text) > len(prompt) + 9 and state.windows == (320, 128)
    for end in range(len(prompt), len(text)):
        seen = [BOS, *text[max(0, end - 255) : end]]
        tokens = torch.tensor(seen + [0] * (-len(seen) % 64)).int()  # whole attention blocks
        step_inputs = gpt.make_step_inputs(state, len(tokens), len(tokens), make_runtime(), cfg)
        with torch.no_grad():
            logits = model.head.compute_logits(model.run_layers(tokens, torch.zeros_like(tokens), step_inputs))
        assert logits[len(seen) - 1, : cfg.vocab_size].argmax() == text[end]


@pytest.fixture
def windowed():
    """(model, cfg): random weights of one layer, the layer's mask, and windows of the last validation."""
    layers, stages = (gpt.LayerSpec("short"),), (gpt.Stage(1, 64, 32),)
    cfg = smoke_config(num_layers=1, layers=layers, stages=stages, val_windows=(160, 96), zero_init="off")
    torch.manual_seed(0)
    model = gpt.GPT(cfg).eval()
    model.head.weight.data.normal_()
    return model, cfg


def test_sampling_has_the_windows_of_the_final_validation(windowed):
    """The last of 200 tokens depends on tokens at most 96 earlier. Training has a window of 32."""
    model, cfg = windowed
    seen = []
    text = [i * i % 251 for i in range(199)]  # and BOS before it
    for changed in (None, 198 - 97, 198 - 96, 198 - 33):
        prompt = [token + (i == changed) for i, token in enumerate(text)]
        list(tool.generate(model, cfg, make_runtime(), prompt, BOS, 1, lambda logits: seen.append(logits) or 0))
    assert [torch.equal(logits, seen[0]) for logits in seen[1:]] == [True, False, False]


@pytest.mark.parametrize("untie_frac", [1.0, 0.3])
def test_a_model_that_was_tied_reads_its_embedding(untie_frac, shards, tmp_path, monkeypatch):
    """Tied until the end, or only in the first steps. An untied embedding differs from the head."""
    monkeypatch.chdir(tmp_path)
    args = ["--num_iterations=6", "--checkpoint_every=6", "--tie_head=on", f"--untie_frac={untie_frac}"]
    assert gpt.main([*TRAIN, *data_args(shards), *args]) == 0
    path = find_saved(6)
    metadata, tensors = tool.read_tensors(path)
    assert metadata["is_tied"] == torch.equal(tensors["embed"], tensors["head.weight"]) == (untie_frac == 1)
    model, cfg, rt, _ = tool.load_model(path, device="cpu")
    tokens = torch.arange(128, dtype=torch.int32)
    step_inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(6), 128, 128, rt, cfg)
    inputs = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args[1]["x0"]))
    model.run_layers(tokens, torch.zeros_like(tokens), step_inputs)
    assert torch.equal(inputs[0], gpt.rms_norm(tensors["embed"].view(-1, cfg.model_dim)[:128]))


def test_a_prompt_longer_than_a_document_is_cut(checkpoint, capsys):
    """The model sees its end, in 20 forward passes over 256 tokens."""
    prompt = "".join(chr(97 + i * i % 23) for i in range(100_000))
    with at_most(300):
        long = sample(capsys, checkpoint, f"--prompt={prompt}", "--max_new_tokens=20")
    short = sample(capsys, checkpoint, f"--prompt={prompt[-255:]}", "--max_new_tokens=20")
    assert long[:100_000] == prompt and long[100_000:] == short[255:] and len(short) > 255 + 5


def test_top_k_and_temperature():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    draw = lambda **options: tool.sample_token(logits, generator=generator, **options)
    generator = torch.Generator().manual_seed(0)
    assert {draw(temperature=1.0, top_k=2) for _ in range(100)} == {1, 2}
    assert {draw(temperature=0, top_k=0) for _ in range(5)} == {1}
    counts = torch.tensor([draw(temperature=2.0, top_k=0) for _ in range(4000)]).bincount() / 4000
    assert torch.allclose(counts, (logits / 2).softmax(0), atol=0.03)  # four standard errors


def test_a_model_that_diverged_ends_its_text():
    cfg = smoke_config()
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(float("nan"))
    assert list(tool.generate(model, cfg, make_runtime(), [1, 2], BOS, 5, torch.argmax)) == []
    tiny = tool.sample_token(torch.tensor([1.0, 3.0, 2.0]), 1e-40, 0, torch.Generator())
    assert tiny == 1


class FakeEncoding:
    """A result of tiktoken.get_encoding, whose tokens are written as numbers."""

    n_vocab, eot_token = 50257, 50256

    def encode_ordinary(self, text):
        return [int(word) for word in text.split("|")]

    def decode_bytes(self, tokens):
        return "".join(f"<{token}>" for token in tokens).encode()


@pytest.fixture
def train_on(tmp_path, monkeypatch, capsys):
    """A function that trains two steps on random tokens below BOS, without a tokenizer. Returns the checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)

    def train(bos, *options):
        for name, size in (("train_0", 30_000), ("val_0", 5_000)):
            tokens = np.random.default_rng(0).integers(0, bos, size).astype(np.uint16)
            tokens[::200] = bos
            write_shard(tmp_path / f"{name}.bin", tokens, bos + 1, bos)
        few = ["--num_iterations=2", "--checkpoint_every=2", "--num_layers=2", "--val_tokens=1024"]
        assert gpt.main([*TRAIN, *few, f"--vocab_size={bos + 1}", *options, *data_args(tmp_path)]) == 0
        return find_saved(2)

    return train


def test_another_vocabulary_begins_with_the_bos_of_its_shards(train_on, capsys):
    """300 tokens and no tokenizer. BOS is 299."""
    ids = [int(word) for word in sample(capsys, train_on(299), "--prompt=1 2", "--max_new_tokens=5").split()]
    assert ids[:2] == [1, 2] and 2 < len(ids) <= 7 and max(ids) < 299


def test_gpt2_tokens_with_and_without_a_tokenizer(train_on, capsys, monkeypatch):
    small = ["--model_dim=16", "--num_heads=1", "--head_dim=16", "--attention_gate_dim=8", "--tokens_per_step=512"]
    checkpoint = train_on(50_256, *small)
    ids = sample(capsys, checkpoint, "--prompt=15496 11", "--max_new_tokens=3").split()
    assert ids[:2] == ["15496", "11"] and 3 <= len(ids) <= 5 and all(0 <= int(token) < 50257 for token in ids)
    errors = sample(capsys, checkpoint, "--prompt=Hello", status=2)
    assert "--prompt=Hello" in errors and errors.count("\n") == 1
    tiktoken = types.SimpleNamespace(get_encoding=lambda name: FakeEncoding() if name == "gpt2" else None)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    text = sample(capsys, checkpoint, "--prompt=15496|11", "--max_new_tokens=3")
    assert text == "15496|11" + "".join(f"<{token}>" for token in ids[2:]) + "\n"


@pytest.mark.parametrize("option", ["--num_layers=3", "--temperature=-1", "--top_k=-1", "--max_new_tokens=0"])
def test_sampling_refuses(checkpoint, capsys, option):
    errors = sample(capsys, checkpoint, option, status=2)
    assert option.partition("=")[0] in errors and errors.count("\n") == 1


@pytest.mark.parametrize("change", [
    lambda metadata, tensors: metadata["config"].update(gears=2),
    lambda metadata, tensors: metadata["config"].update(num_layers="x"),
    lambda metadata, tensors: metadata["config"]["layers"][0].update(gear=True),
    lambda metadata, tensors: metadata["config"].update(mlp_ratio=2.0),
    lambda metadata, tensors: tensors.pop("embed"),
    lambda metadata, tensors: tensors.update(gear=torch.ones(2)),
])
def test_a_model_of_another_script_is_refused(change, checkpoint, capsys, tmp_path):
    content = torch.load(checkpoint.with_name("model.pt"), weights_only=True)
    metadata, tensors = json.loads(content["metadata"]), content["tensors"]
    change(metadata, tensors)
    torch.save(dict(metadata=json.dumps(metadata), tensors=tensors), tmp_path / "model.pt")
    assert sample(capsys, tmp_path / "model.pt", status=2).count("\n") == 1


def test_control_characters_are_escaped():
    """A terminal would obey them. Text and whitespace of a program stay."""
    text = "def f(x):\n\treturn 'é'\x1b[2J\x00\x07\r"
    assert tool.escape_controls(text) == "def f(x):\n\treturn 'é'\\x1b[2J\\x00\\x07\\r"
