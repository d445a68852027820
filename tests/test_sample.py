"""Text from a checkpoint: its tokens against a forward pass, its options, checkpoints that do not fit."""

import json
import os
import sys
import types
from contextlib import chdir

import numpy as np
import pytest
import torch
from conftest import (
    AT_THE_END,
    BOS,
    ROOT,
    TINY,
    call_tool,
    data_args,
    find_saved,
    gpt,
    launch,
    smoke_config,
    write_shard,
)

from tools import sample as tool

TRAIN, PLAIN = [*TINY, AT_THE_END], gpt.Operations()


@pytest.fixture(scope="module")
def checkpoint(shards, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    with chdir(folder):
        assert gpt.main([*TRAIN, *data_args(shards), "--num_iterations=20", "--checkpoint_every=20"]) == 0
        return find_saved(20).absolute()


def sample(capsys, checkpoint, *args, status=0) -> str:
    ended, out, errors = call_tool(capsys, tool.main, [str(checkpoint), "--device=cpu", *args])
    assert ended == status
    return errors if status else out


def test_options_of_sampling(checkpoint, capsys, here):
    def write(*args, most=30):
        return sample(capsys, checkpoint, "--prompt=abcabc", f"--max_new_tokens={most}", *args)

    plain, greedy = write(), write("--temperature=0")
    assert plain.startswith("abcabc") and len(plain) <= 6 + 30 + 1
    assert write() == plain != write("--seed=1") == write(f"--seed={2**64 + 1}")
    assert write("--top_k=1", "--seed=3") == write("--top_p=0.01", "--seed=3") == greedy != plain
    assert write("--temperature=1", "--top_p=0.95") == plain != write("--top_p=0.5", "--temperature=2")
    for bad in ("0", "-0.5", "1.01", "nan", "inf", "half"):
        error = sample(capsys, checkpoint, f"--top_p={bad}", status=2)
        assert "--top_p" in error and bad in error and error.count("\n") == 1
    assert write("--temperature=0", most=5)[:-1] == greedy[:11]
    assert not list(here.iterdir())


def test_a_folder_is_its_newest_model(checkpoint, capsys, tmp_path):
    """The model of the run and its last checkpoint write equal texts."""
    model = checkpoint.with_name("model.pt")
    for newest, oldest in ((model, checkpoint), (checkpoint, model)):
        os.utime(oldest, (1, 1))
        os.utime(newest, (2, 2))
        assert tool.main([str(model.parents[2]), "--device=cpu", "--max-new-tokens=20"]) == 0
        out, errors = capsys.readouterr()
        assert errors == f"sampling from {newest}\n"
        assert out == sample(capsys, model, "--max_new_tokens=20")
    assert "has no model" in sample(capsys, tmp_path, status=2)


@pytest.mark.parametrize("prompt", ["fgh", "abcdefgh" * 40], ids=len)
def test_greedy_text_has_the_largest_logits(prompt, checkpoint, capsys):
    """Each token has the largest logit of a forward pass over BOS and 255 earlier tokens."""
    args = f"--prompt={prompt}", "--max_new_tokens=20", "--temperature=0"
    text = sample(capsys, checkpoint, *args)[:-1].encode()
    content = torch.load(checkpoint.with_name("model.pt"), weights_only=True)
    cfg = gpt.config_from_dict(json.loads(content["metadata"])["config"])
    model, state = gpt.GPT(cfg), gpt.Schedule(cfg).at(cfg.num_iterations)
    model.load_state_dict(content["tensors"])
    assert len(text) > len(prompt) + 9 and state.windows == (320, 128)
    for end in range(len(prompt), len(text)):
        seen = [BOS, *text[max(0, end - 255) : end]]  # max_doc_len is 256
        batch = gpt.make_batch(np.array([[*seen, 0]]), BOS)
        step_inputs = gpt.make_step_inputs(state, len(seen), len(seen), cfg, torch.device("cpu"))
        with torch.no_grad():
            logits = model.head.compute_logits(model.run_layers(batch, step_inputs, PLAIN))
        assert logits[len(seen) - 1, : cfg.vocab_size].argmax() == text[end]


def test_sampling_has_the_windows_of_the_final_validation():
    """The last of 200 tokens depends on tokens at most 96 earlier. Training has a window of 32."""
    layers, stages = (gpt.LayerSpec("short"),), (gpt.Stage(1, 64, 32),)
    cfg = smoke_config(num_layers=1, layers=layers, stages=stages, val_windows=(160, 96), zero_init="off")
    torch.manual_seed(0)
    model, seen = gpt.GPT(cfg), []
    model.head.weight.data.normal_()
    text = [i * i % 251 for i in range(199)]  # and BOS before it
    for changed in (None, 198 - 97, 198 - 96, 198 - 33):
        prompt = [token + (i == changed) for i, token in enumerate(text)]
        list(tool.generate(model, cfg, PLAIN, prompt, BOS, 1, lambda logits: seen.append(logits) or 0))
    assert [torch.equal(logits, seen[0]) for logits in seen[1:]] == [True, False, False]


@pytest.mark.parametrize("untie_frac", [1.0, 0.3])
def test_a_model_that_was_tied_reads_its_embedding(untie_frac, shards, here):
    """Tied until the end, or only in the first steps. An untied embedding differs from the head."""
    args = ["--num_iterations=6", "--checkpoint_every=6", "--tie_head=on", "--ngram_rows=600"]
    assert gpt.main([*TRAIN, *data_args(shards), *args, f"--untie_frac={untie_frac}"]) == 0
    path = find_saved(6)
    metadata, tensors = tool.read_tensors(path)
    assert metadata["is_tied"] == torch.equal(tensors["embed"], tensors["head.weight"]) == (untie_frac == 1)
    model, cfg, ops, _ = tool.load_model(path, device="cpu")
    batch, inputs = gpt.make_batch(np.arange(129)[None], BOS), []
    step_inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(6), 128, 128, cfg, torch.device("cpu"))
    model.blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args[1]["x0"]))
    model.run_layers(batch, step_inputs, ops)
    assert torch.equal(inputs[0], gpt.rms_norm(tensors["embed"].view(-1, cfg.model_dim)[:128]))
    assert model.ngram.shape == (600, 64) and model.ngram.any()


def test_top_k_and_temperature():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    draw = lambda **options: tool.sample_token(logits, generator=generator, **options)
    generator = torch.Generator().manual_seed(0)
    assert {draw(temperature=1.0, top_k=2, top_p=1) for _ in range(100)} == {1, 2}
    assert {draw(temperature=0, top_k=0, top_p=1) for _ in range(5)} == {1}
    counts = torch.tensor([draw(temperature=2.0, top_k=0, top_p=1) for _ in range(4000)]).bincount() / 4000
    assert torch.allclose(counts, (logits / 2).softmax(0), atol=0.03)  # four standard errors


def test_top_p_keeps_the_nucleus():
    """The token that crosses top_p is kept. Its sum can be equal to top_p. Rows of a batch differ."""
    probs = torch.tensor([[0.125, 0.5, 0.0625, 0.25, 0.0625], [0.0625, 0.0625, 0.125, 0.125, 0.625]])

    def keep(top_p):
        return tool.keep_nucleus(probs, top_p).tolist()

    most_likely = [[0, 0.5, 0, 0, 0], [0, 0, 0, 0, 0.625]]
    assert keep(0.01) == keep(0.5) == most_likely
    assert keep(0.51) == [[0, 0.5, 0, 0.25, 0], most_likely[1]]
    assert keep(0.75)[0] == [0, 0.5, 0, 0.25, 0]
    assert keep(0.875) == [[0.125, 0.5, 0, 0.25, 0], [0, 0, 0.125, 0.125, 0.625]]
    assert keep(1.0) == probs.tolist()


def test_top_p_counts_after_temperature_and_top_k():
    """At temperature 2 probabilities are as 4:2:1:0.5, at temperature 1 as 16:4:1:0.25."""
    logits = 2 * torch.tensor([0.5, 4.0, 2.0, 1.0]).log()
    generator = torch.Generator().manual_seed(0)

    def share(**options):
        tokens = [tool.sample_token(logits, generator=generator, **options) for _ in range(2000)]
        return (torch.tensor(tokens).bincount(minlength=4) / 2000).tolist()

    assert share(temperature=2.0, top_k=0, top_p=0.7) == pytest.approx([0, 2 / 3, 1 / 3, 0], abs=0.04)
    assert share(temperature=1.0, top_k=0, top_p=0.7) == [0, 1, 0, 0]
    assert share(temperature=2.0, top_k=2, top_p=0.66) == [0, 1, 0, 0]  # 4/6 of two, 4/7.5 of all
    assert share(temperature=2.0, top_k=3, top_p=0.9)[0] == 0 < share(temperature=2.0, top_k=0, top_p=0.94)[0]


def test_the_model_has_the_averages(shards, here):
    """Its loss is that of the final validation. Without the averages it is 0.02 lower."""
    assert gpt.main([*TRAIN, *data_args(shards), "--averages=on", "--num_iterations=16", "--dtype=float32"]) == 0
    (path,), (result,) = here.rglob("model.pt"), here.rglob("logs/*.json")
    model, cfg, _, _ = tool.load_model(path, "cpu")
    data, state = gpt.ValData(cfg), gpt.Schedule(cfg).at(cfg.num_iterations)
    step_inputs = gpt.make_step_inputs(state, data.batch_tokens, cfg.val_seq_len, cfg, torch.device("cpu"))
    losses = [model(batch._replace(token_plan=None), step_inputs, PLAIN).item()
              for batch, _ in data.batches(gpt.Comm(), data.num_batches)]
    expected = json.loads(result.read_text())["final_val_loss"]
    assert sum(losses) / cfg.val_tokens == pytest.approx(expected, abs=1e-5)


def test_a_model_that_diverged_is_refused():
    cfg = smoke_config()
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(float("nan"))
    with pytest.raises(gpt.RunError, match="logits are not finite"):
        list(tool.generate(model, cfg, PLAIN, [1, 2], BOS, 5, torch.argmax))
    assert tool.sample_token(torch.tensor([1.0, 3.0, 2.0]), 1e-40, 0, 1, torch.Generator()) == 1


def test_another_vocabulary_with_and_without_a_tokenizer(here, capsys, monkeypatch):
    """300 random tokens, with 299 as BOS. Without a tokenizer prompt and text are numbers."""
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    tokens = np.random.default_rng(0).integers(0, 299, 2000).astype(np.uint16)
    tokens[::200] = 299
    write_shard(here / "train_0.bin", tokens, 300, 299)
    write_shard(here / "val_0.bin", tokens[::-1], 300, 299)
    few = ["--num_iterations=1", "--checkpoint_every=1", "--vocab_size=300"]
    assert gpt.main([*TRAIN, *few, *data_args(here)]) == 0
    ids = sample(capsys, find_saved(1), "--prompt=1 2", "--max_new_tokens=3").split()
    assert ids[:2] == ["1", "2"] and 2 < len(ids) <= 5 and all(0 <= int(token) < 299 for token in ids)
    assert "--prompt=Hello" in sample(capsys, find_saved(1), "--prompt=Hello", status=2)
    encoding = types.SimpleNamespace(  # its tokens are written as numbers
        n_vocab=300, encode_ordinary=lambda text: [int(word) for word in text.split("|")],
        decode_bytes=lambda tokens: "".join(f"<{token}>" for token in tokens).encode())  # fmt: skip
    tiktoken = types.SimpleNamespace(get_encoding=lambda name: encoding if name == "gpt2" else None)
    monkeypatch.setitem(sys.modules, "tiktoken", tiktoken)
    text = sample(capsys, find_saved(1), "--prompt=1|2", "--max_new_tokens=3")
    assert text == "1|2" + "".join(f"<{token}>" for token in ids[2:]) + "\n"
    assert tool.find_tokenizer(50257) is None  # of another size than this encoding


@pytest.mark.parametrize("change", [
    lambda metadata, tensors: metadata["config"].update(gears=2),
    lambda metadata, tensors: metadata["config"]["layers"][0].update(gear=True),
    lambda metadata, tensors: metadata["config"].update(mlp_ratio=2.0),
    lambda metadata, tensors: tensors.update(gear=torch.ones(2))])
def test_a_model_of_another_script_is_refused(change, checkpoint, capsys, tmp_path):
    content = torch.load(checkpoint.with_name("model.pt"), weights_only=True)
    metadata, tensors = json.loads(content["metadata"]), content["tensors"]
    change(metadata, tensors)
    torch.save(dict(metadata=json.dumps(metadata), tensors=tensors), tmp_path / "model.pt")
    assert sample(capsys, tmp_path / "model.pt", status=2).count("\n") == 1


def test_a_prompt_of_any_bytes(checkpoint, capsys, tmp_path):
    """Python holds bytes that are not UTF-8 as surrogates. A file that is no model ends with one line."""
    assert tool.find_tokenizer(257).encode("Gr\udcfcn") == [*b"Gr\xfcn"]
    torch.save({"model": {}}, tmp_path / "ckpt.pt")
    (tmp_path / "short.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:-9])
    for path in (tmp_path / "ckpt.pt", tmp_path / "short.pt", ROOT / "README.md"):
        assert sample(capsys, path, status=2).endswith(f"{path} is no whole model.pt: give one, or a folder step_*/\n")


def test_a_terminal_without_unicode(here):
    """It gets escapes."""
    code = "from tools import common; common.run_guarded(lambda: print('Gr\\xfcn'))"
    done = launch(["-c", code], ROOT, env={"PYTHONIOENCODING": "ascii"})
    assert (done.stdout, done.stderr) == ("Gr\\xfcn\n", "")


def test_control_characters_are_escaped():
    """A terminal would obey them. Text and whitespace of a program stay."""
    text = "def f(x):\n\treturn 'é'\x1b[2J\x00\x07\r"
    assert tool.escape_controls(text) == "def f(x):\n\treturn 'é'\\x1b[2J\\x00\\x07\\r"
