"""Text from a checkpoint: token by token it is what a forward pass says, and the options do what they say."""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BOS, at_most, data_args, gpt, make_runtime, smoke_config

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_precision_of_sampling(dtype, checkpoint, capsys):
    few = ["--prompt=abc", "--max_new_tokens=40"]
    plain, text = (sample(capsys, checkpoint, *few, *args) for args in ([], [f"--dtype={dtype}"]))
    assert text == plain or dtype != "float32" and text.startswith("abc")


@pytest.mark.parametrize("prompt", ["fgh", "abcdefgh" * 40], ids=len)
def test_greedy_text_is_what_the_model_finds_likeliest(prompt, checkpoint, capsys):
    """Each token is the largest logit of a forward pass over BOS and the 255 before it (max_doc_len=256)."""
    args = f"--prompt={prompt}", "--max_new_tokens=20", "--temperature=0"
    text = sample(capsys, checkpoint, *args)[:-1].encode()
    facts, tensors = gpt.read_checkpoint(checkpoint)
    cfg = gpt.config_from_dict(facts["config"])
    model, state = gpt.GPT(cfg), gpt.Schedule(cfg).at(cfg.num_iterations)
    model.load_state_dict({name: tensors[name] for name, _ in model.named_parameters()})
    assert len(text) > len(prompt) + 9 and state.windows == (320, 128)
    for end in range(len(prompt), len(text)):
        seen = [BOS, *text[max(0, end - 255) : end]]
        tokens = torch.tensor(seen + [0] * (-len(seen) % 64)).int()  # whole attention blocks
        step_inputs = gpt.make_step_inputs(state, len(tokens), len(tokens), make_runtime(), cfg)
        with torch.no_grad():
            logits = model.head.compute_logits(model.run_layers(tokens, torch.zeros_like(tokens), step_inputs)[0])
        assert logits[len(seen) - 1, : cfg.vocab_size].argmax() == text[end]


@pytest.mark.parametrize("untie_frac", [1.0, 0.3])
def test_a_model_whose_head_was_tied_reads_its_own_embedding(untie_frac, shards, tmp_path, monkeypatch):
    """Tied until the end, or in the first steps only. Then the embedding is another tensor than the head."""
    monkeypatch.chdir(tmp_path)
    args = ["--num_iterations=6", "--checkpoint_every=6", "--tie_head=on", f"--untie_frac={untie_frac}"]
    assert gpt.main([*TRAIN, *data_args(shards), *args]) == 0
    path = tmp_path / "checkpoints/smoke_seed0/step_000006.pt"
    facts, tensors = gpt.read_checkpoint(path)
    assert facts["is_tied"] == torch.equal(tensors["embed"], tensors["head.weight"]) == (untie_frac == 1)
    model, cfg, rt, _ = gpt.load_model(path, dict(device="cpu"))
    tokens = torch.arange(128, dtype=torch.int32)
    step_inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(6), 128, 128, rt, cfg)
    _, acts = model.run_layers(tokens, torch.zeros_like(tokens), step_inputs)
    assert torch.equal(acts["x0"], gpt.rms_norm(tensors["embed"][:128]))


def test_a_prompt_longer_than_a_document_is_cut(checkpoint, capsys):
    """Its end is read: 20 tokens cost 20 forward passes over 256 tokens, of some milliseconds each."""
    prompt = "".join(chr(97 + i * i % 23) for i in range(100_000))
    with at_most(10):
        long = sample(capsys, checkpoint, f"--prompt={prompt}", "--max_new_tokens=20")
    short = sample(capsys, checkpoint, f"--prompt={prompt[-255:]}", "--max_new_tokens=20")
    assert long[:100_000] == prompt and long[100_000:] == short[255:] and len(short) > 255 + 5


def test_top_k_and_temperature():
    logits, draw = (
        torch.tensor([0.0, 3.0, 2.0, 1.0]),
        lambda **o: gpt.sample_token(logits, generator=generator, **o),
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
    assert list(gpt.generate(model, [1, 2], BOS, cfg, make_runtime())) == []
    tiny = gpt.sample_token(torch.tensor([1.0, 3.0, 2.0]), 1e-40, 0, torch.Generator())
    assert tiny == 1


@pytest.mark.sample
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


def test_a_vocabulary_of_its_own_begins_with_its_own_bos(tmp_path, monkeypatch, capsys):
    """300 tokens, of which the last is BOS, and no tokenizer: as its shards say, and not GPT-2's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    for name, size in (("train_0", 30_000), ("val_0", 5_000)):
        tokens = np.random.default_rng(0).integers(0, 299, size).astype(np.uint16)
        tokens[::200] = 299
        gpt.write_shard(tmp_path / f"{name}.bin", tokens, 300, 299)
    args = [*TRAIN, "--vocab_size=300", "--num_layers=2", "--num_iterations=2", "--checkpoint_every=2"]
    assert gpt.main([*args, "--val_tokens=1024", *data_args(tmp_path)]) == 0
    capsys.readouterr()
    assert gpt.main(["--sample=checkpoints/smoke_seed0/step_000002.pt", "--prompt=1 2", "--max_new_tokens=5"]) == 0
    words = [int(word) for word in capsys.readouterr().out.split()]
    assert words[:2] == [1, 2] and 2 < len(words) <= 7 and max(words) < 299


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
        (["--dtype=float16"], "--dtype=float16 is not one of"),
        (["--temperature=warm"], "--temperature=warm is not a number"),
    ],
)
def test_sampling_refuses(checkpoint, capsys, args, words):
    errors = sample(capsys, checkpoint, *args, status=2)
    assert words in errors and errors.count("\n") == 1


def rewrite(path, out, change) -> None:
    """A copy of a checkpoint whose facts and tensors a function has changed."""
    content = torch.load(path, weights_only=True)
    facts, tensors = json.loads(content["facts"]), content["tensors"]
    change(facts, tensors)
    torch.save({**content, "facts": json.dumps(facts), "tensors": tensors}, out)


def add_option(facts, default, value, name="gears") -> None:
    """As a script leaves it that has one option of the model more."""
    facts["defaults"][name], facts["config"][name] = default, value
    facts["model_options"].append(name)


MISFITS = {  # what is done to facts and tensors: words of the message, of sampling and of a resumed run
    "another option of the model": (
        lambda facts, _: add_option(facts, default=1, value=2),
        "is of a script that has what this one lacks (--gears=2)",
    ),
    "another parameter": (
        lambda _, tensors: tensors.update({"blocks.0.gear": torch.ones(2)}),
        "has blocks.0.gear of shape (2,), the model here not at all",
    ),
    "a parameter less": (
        lambda _, tensors: tensors.pop("blocks.1.attention.qk"),
        "has blocks.1.attention.qk not at all, the model here of shape",
    ),
    "another field of the layers": (
        lambda facts, _: facts["config"]["layers"][0].update(gear=True),
        "is of a script that has what this one lacks (gear=True in --layers)",
    ),
    "another update rule": (
        lambda facts, _: facts["config"].update(matrix_rule="gears"),
        "is of a script that has what this one lacks (--matrix_rule=gears is not one of",
    ),
    "weights that are no numbers": (
        lambda _, tensors: tensors.update({"embed": tensors["embed"].long()}),
        "has embed not at all, the model here of shape",
    ),
    **{
        f"{key} is {value}": (lambda facts, _, k=key, v=value: facts.update({k: v}), f"(its {key} is")
        for key, value in dict(config=[], optimizer_steps="x", run_id=None, val_points=3, world_size=-1).items()
    },
    "no step": (lambda facts, _: facts["progress"].update(step=-4), "(its step is '-4')"),
    "no points": (lambda facts, _: facts.update(val_points=["a"]), "cannot be read as a checkpoint ("),
    "no layers": (lambda facts, _: facts.update(config={}), "it has 0 of 12 layers"),
    "an option of another type": (
        lambda facts, _: facts["config"].update(num_layers="x"),
        "(--num_layers=x is not of type int",
    ),
    "no precision": (lambda facts, _: facts.update(activations="floaty"), "its activations are 'floaty'"),
    "no tensor": (lambda _, tensors: tensors.update(embed="x"), "not all that it holds are tensors"),
    "no config": (lambda facts, _: facts.pop("config"), "cannot be read as a checkpoint (it has no 'config')"),
    "another progress": (
        lambda facts, _: facts["progress"].update(gears=3),
        "cannot be read as a checkpoint (Progress.__init__() got an unexpected",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_this_script_lacks_is_not_dropped(name, checkpoint, shards, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, words = MISFITS[name]
    rewrite(checkpoint, "other.pt", change)
    errors = sample(capsys, "other.pt", status=2)
    assert words in errors and errors.count("\n") == 1 and "--resume" not in errors
    assert gpt.main([*TRAIN, *data_args(shards), "--num_iterations=40", "--resume=other.pt"]) == 2
    errors = capsys.readouterr().err
    assert words in errors and errors.count("\n") == 1


def test_an_option_of_training_stops_a_resumed_run_but_no_sample(checkpoint, shards, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def change(facts, _):
        add_option(facts, default=1, value=2)
        facts["model_options"].remove("gears")

    rewrite(checkpoint, "other.pt", change)
    assert sample(capsys, "other.pt", "--prompt=abc", "--max_new_tokens=9").startswith("abc")
    assert gpt.main([*TRAIN, *data_args(shards), "--num_iterations=40", "--resume=other.pt"]) == 2
    assert "lacks (--gears=2)" in capsys.readouterr().err


def test_options_at_their_defaults_are_no_other_model(checkpoint, shards, capsys, tmp_path, monkeypatch):
    """Of a script that had one more, or one less, of the model or of a layer."""
    monkeypatch.chdir(tmp_path)

    def change(facts, _):
        add_option(facts, default=1, value=1)
        facts["item_defaults"]["wheel"] = facts["config"]["layers"][0]["wheel"] = False
        del facts["config"]["gate_hidden"], facts["config"]["layers"][0]["xsa"]

    rewrite(checkpoint, "other.pt", change)
    few = ["--prompt=abc", "--max_new_tokens=9"]
    assert sample(capsys, "other.pt", *few) == sample(capsys, checkpoint, *few)
    args = ["--num_iterations=31", "--checkpoint_every=0", "--resume=other.pt"]
    assert gpt.main([*TRAIN, *data_args(shards), *args]) == 0
    assert "resumed other.pt after step 30" in capsys.readouterr().out


def test_state_that_does_not_fit_is_named(checkpoint, shards, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for change in (
        lambda _, t: t.pop("embed/exp_avg"),
        lambda _, t: t.update({"embed/exp_avg": torch.ones(3)}),
        lambda _, t: t.update({"embed/gears": torch.ones(3)}),  # of a rule that this script does not have
    ):
        rewrite(checkpoint, "other.pt", change)
        assert gpt.main([*TRAIN, *data_args(shards), "--num_iterations=40", "--resume=other.pt"]) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1 and "other.pt cannot be read as a checkpoint (nothing in it fits" in errors


def test_a_checkpoint_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")  # which would be waited for
    for name, words in (
        ("nowhere.pt", "nowhere.pt cannot be read"),
        ("pipe", "pipe cannot be read"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "a\0b cannot be read"),
    ):
        with at_most(60):
            errors = sample(capsys, Path(name), status=2)
        assert words in errors and errors.count("\n") == 1
