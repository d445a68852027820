"""Whole runs of train() against an independent implementation in float64 (reference_run.py)."""

import dataclasses
import json

import numpy as np
import pytest
import reference_run
import torch
from conftest import gpt

VOCAB, BOS, HEADS, HEAD_DIM = 50, 49, 4, 12
COMMON = dict(
    device="cpu",
    dtype="float32",
    fp8_head="off",
    fp8_mlp="off",
    embed_dtype="float32",
    matrix_dtype="float32",
    vocab_size=VOCAB,
    vocab_multiple=4,
    num_heads=HEADS,
    head_dim=HEAD_DIM,
    model_dim=48,
    mlp_ratio=2,
    tokens_per_step=512,
    seq_len=256,
    max_doc_len=90,
    micro_batch_tokens=256,
    val_tokens=512,
    val_seq_len=128,
    val_loss_every=3,
    val_windows=(64, 32),
    momentum_warmup_steps=5,
    adam_eps=1.0,  # large enough to matter
    telemetry_every=1,
    epochs=2,
)
RECORD_32 = dict(
    preset="track_1",
    num_layers=6,
    num_iterations=10,
    matrix_cooldown_frac=0.8,
    matrix_weight_decay=0.5,
    embed_weight_decay=0.1,
    decay_schedule="cosine",
    warmup_iterations=2,
    stages=(
        gpt.Stage(3, 20, 8, tokens_per_step=256, max_doc_len=30, seq_len=128),
        gpt.Stage(4, 30, 12, tokens_per_step=512, lr_factor=1.5, seq_len=128),
        gpt.Stage(3, 44, 20, max_doc_len=60),
    ),
)
def write_data(folder):
    """Write four training shards and two validation shards."""
    rng = np.random.default_rng(0)
    for name, size in (("train_0", 1500), ("train_1", 900), ("train_2", 1900), ("train_3", 2200),
                       ("val_0", 300), ("val_1", 400)):  # fmt: skip
        documents = [[BOS, *np.cumsum(rng.integers(0, 4, rng.integers(2, 150))) % BOS] for _ in range(100)]
        tokens = np.concatenate(documents)[:size].astype(np.uint16)
        gpt.write_shard(folder / f"{name}.bin", tokens, VOCAB, BOS)


def make_record_32(cfg, generator):
    """Parameters of record 32 by the reference's names. None is zero, so every path has a gradient."""
    def normal(mean, std, *size):
        return mean + std * torch.randn(size, generator=generator, dtype=torch.float64)

    dim, hidden, table = cfg.model_dim, cfg.mlp_hidden, (cfg.padded_vocab_size, cfg.model_dim)
    p = {"embed": normal(0, 1, *table), "head": normal(0, 0.3, *table)}
    for i in range(cfg.num_value_embeds):
        p[f"ve.{i}"] = normal(0, 1, *table)
    for i, layer in enumerate(cfg.layers):
        p[f"a.{i}"], p[f"b.{i}"] = normal(1, 0.1), normal(0, 0.1)
        if layer.skip_from is not None:
            p[f"skip.{i}"] = normal(-1.5, 0.3)
        if layer.attention != "none":
            p.update({f"{name}.{i}": normal(0, 0.5 * dim**-0.5, dim, dim) for name in "qkvo"})
            p[f"gate.{i}"], p[f"s0.{i}"] = normal(0, 0.3, cfg.num_heads, 12), normal(0.5, 0.1)
            if layer.value_embed is not None:
                p[f"s1.{i}"] = normal(0.5, 0.1)
        if layer.mlp:
            p.update({f"{name}.{i}": normal(0, 0.5 * dim**-0.5, dim, hidden) for name in ("up", "down")})
    return p


def read_record_32(model, p):
    """These parameters by the model's names, in its layout."""
    values = {"embed": p["embed"], "head.weight": p["head"]}
    values.update({f"value_embeds.{i}": p[f"ve.{i}"] for i in model.value_embeds})
    numbers = dict(resid="a", x0="b", skip="skip", v_scale="s0", ve_scale="s1")
    values["scalars.scalar"] = torch.stack([p[f"{numbers[s.name]}.{s.layer}"] for s in model.layer_scalars])
    for i, block in enumerate(model.blocks):
        if block.attention is not None:
            values[f"blocks.{i}.attention.qk"] = torch.stack((p[f"q.{i}"], p[f"k.{i}"]))
            values[f"blocks.{i}.attention.v_proj"] = torch.stack((p[f"v.{i}"], p[f"o.{i}"]))
            values[f"blocks.{i}.attention.head_gate_weight"] = p[f"gate.{i}"]
        if block.mlp is not None:
            values[f"blocks.{i}.mlp.up_down"] = torch.stack((p[f"up.{i}"], p[f"down.{i}"]))
    return values


@pytest.fixture
def float64(monkeypatch):
    """New tensors and activations in float64. Other choices of the start are unchanged."""
    choose_precision = gpt.choose_precision
    monkeypatch.setattr(gpt, "choose_precision", lambda *args: dataclasses.replace(
        choose_precision(*args), dtype=torch.float64))  # fmt: skip
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run_both(cfg, p, monkeypatch):
    """(training losses, validation points) of train() and of the reference, from equal parameters."""
    make_model = gpt.GPT

    def make_same_model(*args):
        model = make_model(*args).double()
        if not model.embed.is_meta:  # on which parameters are only counted
            values = read_record_32(model, p)
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(values[name])
        return model

    monkeypatch.setattr(gpt, "GPT", make_same_model)
    gpt.train(cfg, [])
    (result,) = gpt.Path("logs").glob("*.json")
    result = json.loads(result.read_text())
    events = [json.loads(line) for line in next(gpt.Path("logs").glob("*.jsonl")).read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "telemetry"]
    theirs = reference_run.train(json.loads(json.dumps(gpt.plain_dict(cfg))), p)
    points = [point[:2] for point in result["val_points"]]
    return (losses, points), (theirs["train_losses"], theirs["val_points"])


@pytest.mark.recipe
@pytest.mark.parametrize("fast", ["off", "auto"])
def test_whole_run(fast, tmp_path, monkeypatch, float64):
    """The training loss of every step and every validation loss, to 1e-8."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)
    files = dict(train_files="train_*.bin", val_files="val_*.bin")
    cfg = gpt.make_config({**COMMON, **files, **RECORD_32, "fast": fast})
    p = make_record_32(cfg, torch.Generator().manual_seed(0))
    shards = [sequence.shard for sequence in gpt.TrainData(cfg, gpt.Schedule(cfg)).sequences]
    assert shards[-1] < max(shards) == 3  # the second epoch has begun
    (losses, points), (expected_losses, expected_points) = run_both(cfg, p, monkeypatch)
    assert [step for step, _ in points] == [step for step, _ in expected_points]
    assert losses == pytest.approx(expected_losses, abs=1e-8)
    assert [loss for _, loss in points] == pytest.approx([loss for _, loss in expected_points], abs=1e-8)
