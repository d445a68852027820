"""Text from a checkpoint: token by token it is what the whole forward pass says, and the options do what they say."""

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import data_args, gpt, make_runtime, smoke_config

TRAIN = [
    "--preset=smoke",
    "--device=cpu",
    "--num_iterations=30",
    "--val_loss_every=0",
    "--checkpoint_every=30",
]


@pytest.fixture(scope="module")
def checkpoint(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert gpt.main([*TRAIN, *data_args(shards)]) == 0
    return folder / "checkpoints/smoke_seed0/step_000030.pt"


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_cached_attention_is_attention(dtype, bound):
    """Logits of each position, fed one token, and in pieces, against one forward pass over all, far beyond the windows.

    float32: 4 layers of sums over at most 48 keys. bfloat16 has 8 bits of logits up to 30.
    """
    stages = (gpt.Stage(1, 48, 16), gpt.Stage(0, 40, 20))
    cfg = smoke_config(seq_len=256, stages=stages)
    torch.manual_seed(0)
    rt = make_runtime(dtype=dtype)
    model = gpt.GPT(cfg, dtype=dtype)
    for param in model.parameters():  # projections begin at zero
        param.data.add_(0.1 * torch.randn_like(param))
    tokens, state = torch.randint(256, (256,)).int(), gpt.Schedule(cfg).at(cfg.num_iterations)
    with torch.no_grad():
        whole = gpt.StepInputs((40, 20), *gpt.make_rotary(state, 256, 256, rt))
        expected = model.head.logits(model.encode(tokens, torch.zeros_like(tokens), whole))
        for sizes in ([1] * 256, [100, 1, 1, 50, 104], [256]):
            windows = {"long": 40, "short": 20}
            caches = [gpt.KeyValues(windows.get(spec.attention, 1)) for spec in cfg.layers]
            first, made = 0, []
            for part in tokens.split(sizes):
                rotary = gpt.make_rotary(state, len(part), 10**6, rt, first)
                made.append(
                    model.head.logits(
                        model.encode(part, torch.zeros_like(part), gpt.StepInputs(caches, *rotary))
                    )
                )
                first += len(part)
                assert all(cache.keys is None or len(cache.keys) <= cache.window for cache in caches)
            assert (torch.cat(made) - expected).abs().max() < bound
    assert expected.std() > 0.5  # not a constant


def sample(capsys, checkpoint, *args, status=0) -> str:
    capsys.readouterr()
    assert gpt.main([f"--sample={checkpoint}", "--device=cpu", *args]) == status
    out, errors = capsys.readouterr()
    return errors if status else out


def test_options_of_sampling(checkpoint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40")
    assert plain.startswith("abcabc") and len(plain) <= 6 + 40 + 1
    assert sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40") == plain
    assert sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40", "--seed=1") != plain
    greedy = sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40", "--temperature=0")
    assert (
        sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=40", "--top_k=1", "--seed=3")
        == greedy
        != plain
    )
    assert (
        sample(capsys, checkpoint, "--prompt=abcabc", "--max_new_tokens=5", "--temperature=0")[:-1]
        == greedy[:11]
    )
    assert not list(tmp_path.iterdir())


def test_greedy_text_is_what_the_model_finds_likeliest(checkpoint, capsys):
    """Each greedy token is the largest logit of a whole forward pass over the text before it."""
    text = sample(capsys, checkpoint, "--prompt=fgh", "--max_new_tokens=30", "--temperature=0")[:-1].encode()
    facts, tensors = gpt.read_checkpoint(checkpoint)
    cfg = gpt.config_from_dict(facts["config"])
    model, state = gpt.GPT(cfg), gpt.Schedule(cfg).at(cfg.num_iterations)
    model.load_state_dict({name: tensors[name] for name, _ in model.named_parameters()})
    tokens = torch.tensor(
        [gpt.BYTE_DOCUMENT_START, *text, *[0] * (63 - len(text))]
    ).int()  # whole attention blocks
    inputs = gpt.StepInputs(
        (state.stage.window_long, state.stage.window_short), *gpt.make_rotary(state, 64, 64, make_runtime())
    )
    with torch.no_grad():
        likeliest = model.head.logits(model.encode(tokens, torch.zeros_like(tokens), inputs))[
            :, : cfg.vocab_size
        ].argmax(-1)
    assert bytes(likeliest[3 : len(text)].tolist()) == text[3:] and len(text) > 10


def test_top_k_and_temperature():
    logits, draw = (
        torch.tensor([0.0, 3.0, 2.0, 1.0]),
        lambda **o: gpt.choose_token(logits, generator=generator, **o),
    )
    generator = torch.Generator().manual_seed(0)
    assert {draw(temperature=1.0, top_k=2) for _ in range(100)} == {1, 2}
    assert {draw(temperature=0, top_k=0) for _ in range(5)} == {1}
    counts = torch.tensor([draw(temperature=2.0, top_k=0) for _ in range(4000)]).bincount() / 4000
    assert torch.allclose(counts, (logits / 2).softmax(0), atol=0.03)  # 4 standard errors of a share: 0.03


def test_sampling_needs_no_other_ranks(checkpoint, capsys, monkeypatch):
    """./run.sh --sample on eight GPUs starts eight processes: the first one writes, alone."""
    alone = sample(capsys, checkpoint, "--max_new_tokens=8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sample(capsys, checkpoint, "--max_new_tokens=8") == alone
    monkeypatch.setenv("RANK", "1")
    assert sample(capsys, checkpoint, "--max_new_tokens=8") == ""


def test_a_model_that_diverged_has_nothing_to_say():
    cfg = smoke_config()
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(float("nan"))
    assert list(gpt.generate(model, [1, 2], gpt.BYTE_DOCUMENT_START, cfg, make_runtime())) == []
    tiny = gpt.choose_token(torch.tensor([1.0, 3.0, 2.0]), 1e-40, 0, torch.Generator())
    assert tiny == 1


def test_a_run_ends_with_a_sample(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert gpt.main(["--preset=smoke", "--device=cpu", *data_args(shards)]) == 0
    card, _, text = capsys.readouterr().out.partition("\nsample: ")
    assert card.endswith("-+") and 20 < len(text) <= 121


class FakeEncoding:
    """What tiktoken.get_encoding gives, of a vocabulary whose tokens are the letters of their numbers."""

    n_vocab, eot_token = 50257, 50256

    def encode_ordinary(self, text):
        return [int(word) for word in text.split("|")]

    def decode_bytes(self, tokens):
        return "".join(f"<{token}>" for token in tokens).encode()


@pytest.fixture(scope="module")
def gpt2_checkpoint(tmp_path_factory):
    """Two steps on random GPT-2 tokens."""
    folder = tmp_path_factory.mktemp("gpt2")
    for name, size in (("train_0", 30_000), ("val_0", 5_000)):
        tokens = np.random.default_rng(0).integers(0, 50256, size).astype(np.uint16)
        tokens[::200] = 50256
        gpt.write_shard(folder / f"{name}.bin", tokens, 50257, 50256)
    args = ["--vocab_size=50257", "--num_layers=2", "--model_dim=16", "--num_heads=1", "--head_dim=16"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "tiktoken", None)  # not installed
        assert (
            gpt.main(
                [
                    *TRAIN,
                    "--num_iterations=2",
                    "--checkpoint_every=2",
                    "--attention_gate_dim=8",
                    "--dtype=float32",
                    "--tokens_per_step=512",
                    "--val_tokens=1024",
                    *args,
                    *data_args(folder),
                ]
            )
            == 0
        )
    return folder / "checkpoints/smoke_seed0/step_000002.pt"


def test_gpt2_tokens_with_and_without_a_tokenizer(gpt2_checkpoint, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    ids = sample(capsys, gpt2_checkpoint, "--prompt=15496 11", "--max_new_tokens=3").split()
    assert (
        ids[:2] == ["15496", "11"] and 3 <= len(ids) <= 5 and all(0 <= int(token) < 50257 for token in ids)
    )
    errors = sample(capsys, gpt2_checkpoint, "--prompt=Hello", status=2)
    assert "pip install tiktoken" in errors and errors.count("\n") == 1
    tiktoken = types.SimpleNamespace(get_encoding=lambda name: FakeEncoding() if name == "gpt2" else None)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    text = sample(capsys, gpt2_checkpoint, "--prompt=15496|11", "--max_new_tokens=3")
    assert text == "15496|11" + "".join(f"<{token}>" for token in ids[2:]) + "\n"


@pytest.mark.parametrize(
    "args, words",
    [
        (["--num_layers=3"], "--num_layers has no meaning with --sample"),
        (["--temperature=-1"], "--temperature=-1.0 is too small"),
        (["--top_k=-1"], "--top_k=-1 is too small"),
        (["--max_new_tokens=0"], "--max_new_tokens=0 is too small"),
        (["--temperature=warm"], "--temperature=warm is not a number"),
    ],
)
def test_sampling_refuses(checkpoint, capsys, args, words):
    errors = sample(capsys, checkpoint, *args, status=2)
    assert words in errors and errors.count("\n") == 1


def test_a_checkpoint_that_is_not_there(capsys):
    assert "nowhere.pt cannot be read" in sample(capsys, Path("nowhere.pt"), status=2)
