"""The model against a plain reading of the records, and its invariants."""

import math

import pytest
import torch
from conftest import gpt, make_runtime, smoke_config

SMALL = dict(num_layers=6, model_dim=192, vocab_size=257, embed_dtype="float32", compile="off")


def make_model(seed=0, noise=0.3, **changes):
    """A model with every parameter away from zero, its config, and inputs of one row."""
    cfg = smoke_config(**changes)
    torch.manual_seed(seed)
    model = gpt.GPT(cfg)
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * noise / max(param.shape[-1], 4) ** 0.5)
    tokens = torch.randint(256, (cfg.seq_len + 1,))
    doc_ids = (torch.rand(cfg.seq_len) < 0.02).cumsum(0).int()
    return cfg, model, tokens, doc_ids


def step_inputs(cfg, step=0):
    state = gpt.Schedule(cfg).at(step)
    return gpt.StepInputs(
        (state.stage.window_long, state.stage.window_short),
        *gpt.make_rotary(state, cfg.seq_len, cfg.seq_len, make_runtime()),
    )


def reference_logits(cfg, model, inputs, doc_ids, windows, frequencies, scale):
    """Records 2 to 32, token pair by token pair, float64, no shared code with the model."""
    p = {name: param.detach().double() for name, param in model.named_parameters()}
    num_tokens, heads, width = len(inputs), cfg.num_heads, cfg.head_dim
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + 1.1920929e-07).sqrt()
    gate = torch.sigmoid if cfg.skips == "sigmoid" else lambda weight: weight
    head_norm = norm if cfg.qk_norm == "on" else lambda x: x
    angle = torch.arange(num_tokens)[:, None].double() * torch.tensor(frequencies)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    rotate = lambda x: torch.cat(
        (
            x[..., : width // 2] * cos + x[..., width // 2 :] * sin,
            -x[..., : width // 2] * sin + x[..., width // 2 :] * cos,
        ),
        -1,
    )
    place = torch.arange(num_tokens)
    causal = (place[:, None] >= place) & (doc_ids[:, None] == doc_ids)
    x = x0 = norm(p["embed"][inputs]) if cfg.embed_norm == "on" else p["embed"][inputs]
    outputs, first_values, scalars = [], None, iter(p.get("scalars", ()))
    for i, spec in enumerate(cfg.layers):
        shortcut = [next(scalars), next(scalars)] if cfg.x0_shortcut == "on" else [1, 0]
        if spec.skip_from is not None:
            x = x + gate(next(scalars)) * outputs[spec.skip_from]
        x = shortcut[0] * x + shortcut[1] * x0
        if spec.attention != "none":
            u, own = norm(x), f"blocks.{i}.attention."
            if cfg.fuse_qkv == "on":
                wq, wk, wv, wo = *p[own + "qkv"].chunk(3), p[own + "out"]
            else:
                wq, wk, wv, wo = p[own + "qkvo"]
            q, k, v = ((u @ w.T).view(num_tokens, heads, width) for w in (wq, wk, wv))
            first_values = v if i == 0 else first_values
            extra = first_values
            if isinstance(spec.value_embed, int):
                extra = p[f"value_embeds.{spec.value_embed}"][inputs].view(num_tokens, heads, width)
            if cfg.value_mix == "lerp" and spec.value_embed is not None:
                share = next(scalars)
                v = (1 - share) * v + share * extra
            elif cfg.value_mix == "scales":
                v = next(scalars) * v + (0 if spec.value_embed is None else next(scalars) * extra)
            seen = causal & (place[:, None] - place <= windows[spec.attention])
            scores = torch.einsum("qhk,shk->hqs", rotate(head_norm(q)), rotate(head_norm(k))) * scale
            y = torch.einsum("hqs,shk->qhk", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
            if cfg.attention_gate_dim:
                y = (
                    y
                    * torch.sigmoid(u[:, : cfg.attention_gate_dim] @ p[f"blocks.{i}.attention.gate"].T)[
                        ..., None
                    ]
                )
            x = x + y.flatten(1) @ wo.T * (1 if cfg.depth_scale == "off" else (2 * cfg.num_layers) ** -0.5)
        if spec.mlp:
            up, down = p[f"blocks.{i}.mlp.up_down"]
            h = norm(x) @ up
            gelu = h * (1 + torch.erf(h / 2**0.5)) / 2
            x = x + (gelu if cfg.activation == "gelu" else h.clamp(min=0) ** 2) @ down.T
        outputs.append(x)
    logits = norm(x) @ p["embed" if cfg.tie_head == "on" else "head.weight"].T
    return cfg.softcap * torch.tanh(logits / cfg.softcap) + cfg.softcap if cfg.softcap else logits


OLD = [{"preset": f"laptop_{name}", **SMALL} for name in gpt.LADDER]


@pytest.mark.parametrize(
    "step, changes",
    [
        *((step, {}) for step in (0, 9, 12)),
        *(
            (9, change)
            for change in (dict(num_layers=6), dict(attention_gate_dim=0), dict(num_value_embeds=0))
        ),
        *((0, change) for change in OLD),
    ],
    ids=lambda value: value.get("preset", str(value)) if isinstance(value, dict) else str(value),
)
def test_the_model_is_the_recipe(step, changes):
    """Of today, and of every rung of the ladder."""
    cfg, model, tokens, doc_ids = make_model(**changes)
    state = gpt.Schedule(cfg).at(step)
    expected = reference_logits(
        cfg,
        model,
        tokens[:-1],
        doc_ids,
        dict(long=state.stage.window_long, short=state.stage.window_short),
        state.frequencies,
        state.attention_scale,
    )
    x = model.encode(tokens[:-1].int(), doc_ids, step_inputs(cfg, step))
    assert torch.allclose(
        model.head.logits(x).double(), expected, atol=2e-4
    )  # float32 against float64 on logits of 0..30
    loss = model(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg, step))
    exact = torch.nn.functional.cross_entropy(expected, tokens[1:], reduction="sum")
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


def test_the_norm_and_its_gradient():
    """x / sqrt(mean(x^2) + eps), differentiated by autograd; float64, so that only the formula can differ."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 16, dtype=torch.float64).requires_grad_()
    plain = x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    grad = torch.randn_like(x)
    (expected,) = torch.autograd.grad(plain, x, grad)
    for keeps_input in (False, True):
        y = gpt.rms_norm(x, keeps_input)
        assert torch.allclose(y, plain, atol=1e-6)  # the mean is taken in float32
        assert torch.allclose(torch.autograd.grad(y, x, grad)[0], expected, atol=1e-6)


def test_a_future_token_changes_no_earlier_output():
    cfg, model, tokens, doc_ids = make_model()
    first = model.encode(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    tokens[300] = (tokens[300] + 1) % 256
    second = model.encode(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    assert torch.equal(first[:300], second[:300]) and not torch.equal(first[300], second[300])


def test_documents_do_not_see_each_other():
    cfg, model, tokens, _ = make_model()
    doc_ids = (torch.arange(cfg.seq_len) >= 200).int() + 1
    first = model.encode(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    tokens[:200] = torch.randint(256, (200,))
    second = model.encode(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    assert torch.equal(first[200:], second[200:]) and not torch.equal(first[:200], second[:200])


def test_the_window_ends_where_it_says():
    spec = (gpt.LayerSpec(attention="short"),)
    cfg, model, tokens, _ = make_model(layers=spec, num_layers=1, stages=(gpt.Stage(1, 100, 70),))
    doc_ids = torch.zeros(cfg.seq_len, dtype=torch.int32)
    first = model.encode(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    tokens[100] = (tokens[100] + 1) % 256
    second = model.encode(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    changed = (first != second).any(-1).nonzero().flatten()
    assert changed.min() == 100 and changed.max() == 170  # 70 tokens back, itself included


def test_initial_loss_and_statistics():
    cfg = smoke_config(model_dim=256, num_heads=2, head_dim=128)
    torch.manual_seed(0)
    model = gpt.GPT(cfg)
    assert model.embed.std().item() == pytest.approx(1, abs=0.02)
    assert not model.head.weight.any()
    qkvo, up_down = model.blocks[1].attention.qkvo, model.blocks[1].mlp.up_down
    for weight in (qkvo[:3], up_down[0]):
        assert weight.std().item() == pytest.approx(0.5 * 256**-0.5, rel=0.02)
        assert weight.abs().max().item() <= 3**0.5 * 0.5 * 256**-0.5
    assert not qkvo[3].any() and not up_down[1].any()
    assert model.blocks[-1].scalars["skip"] == -1.5 and model.blocks[0].scalars["x0"] == 0
    assert model.scalars.tolist() == [value for block in model.blocks for value in block.scalars.values()]
    tokens = torch.randint(256, (513,))
    loss = model(tokens[:-1].int(), tokens[1:], torch.zeros(512, dtype=torch.int32), step_inputs(cfg)) / 512
    assert loss.item() == pytest.approx(math.log(cfg.padded_vocab_size), abs=1e-5)  # zero head: uniform


def test_every_parameter_gets_a_gradient():
    cfg, model, tokens, doc_ids = make_model(num_layers=6)
    model(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg)).backward()
    assert [
        name for name, param in model.named_parameters() if param.grad is None or not param.grad.any()
    ] == []


def test_validation_in_chunks_changes_nothing(monkeypatch):
    cfg, model, tokens, doc_ids = make_model()
    whole = model.eval()(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg))
    monkeypatch.setattr(gpt, "LOGITS_CHUNK", 100)
    parts = model(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)
