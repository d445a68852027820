"""The model against a plain reading of the records, and its invariants."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU_FORMS, gpt, make_runtime, smoke_config
from test_frontier import WITHOUT_OPTIMIZER

PLAIN_AND_FAST = pytest.mark.parametrize("fast", [frozenset(), WITHOUT_OPTIMIZER], ids=["plain", "fast"])


def make_model(seed=0, noise=0.3, fast=frozenset(), **changes):
    """A model with every parameter away from zero, its config, and inputs of one packed sequence."""
    cfg = smoke_config(**changes)
    torch.manual_seed(seed)
    model = gpt.GPT(cfg, make_runtime(fast=fast))
    for param in model.parameters():
        param.data.add_(torch.randn_like(param) * noise / max(param.shape[-1], 4) ** 0.5)
    tokens = torch.randint(256, (cfg.seq_len + 1,))
    doc_ids = (torch.rand(cfg.seq_len) < 0.02).cumsum(0).int()
    return cfg, model, tokens, doc_ids


def step_inputs(cfg, step=0):
    return gpt.make_step_inputs(gpt.Schedule(cfg).at(step), cfg.seq_len, cfg.seq_len, make_runtime(), cfg)


def reference_logits(cfg, model, inputs, doc_ids, windows, frequencies, scale):
    """Records 2 to 32, token pair by token pair, float64, no shared code with the model."""
    p = {name: param.detach().double() for name, param in model.named_parameters()}
    num_tokens, heads, width = len(inputs), cfg.num_heads, cfg.head_dim
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + 1.1920929e-07).sqrt()
    head_norm = norm if cfg.qk_norm else lambda x: x
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
    x = x0 = norm(p["embed"][inputs])
    outputs, scalars, one = [], iter(p.get("scalars.scalar", ())), torch.ones(1)
    for i, spec in enumerate(cfg.layers):
        mix = [next(scalars), next(scalars)] if cfg.x0_mix == "before" else [1, 0]
        if spec.skip_from is not None:
            x = x + torch.sigmoid(next(scalars)) * outputs[spec.skip_from]
        x = mix[0] * x + mix[1] * x0
        if spec.attention != "none":
            own = f"blocks.{i}.attention"
            u = norm(x) * p.get(f"blocks.{i}.attn_gain_in", one)
            (wq, wk), (wv, wo) = p[f"{own}.qk"].view(2, heads * width, -1), p[f"{own}.v_proj"]
            q, k, v = ((u @ w.T).view(num_tokens, heads, width) for w in (wq, wk, wv))
            v = next(scalars) * v
            if spec.value_embed is not None:
                v = v + next(scalars) * p[f"value_embeds.{spec.value_embed}"][inputs].view(v.shape)
            seen = causal & (place[:, None] - place <= windows[spec.attention])
            scores = torch.einsum("qhk,shk->hqs", rotate(head_norm(q)), rotate(head_norm(k))) * scale
            y = torch.einsum("hqs,shk->qhk", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
            if cfg.attention_gate_dim:
                gate = torch.sigmoid(u[:, : cfg.attention_gate_dim] @ p[f"{own}.head_gate_weight"].T)
                y = y * gate[..., None]
            x = x + y.flatten(1) @ wo.T * p.get(f"blocks.{i}.attn_gain_out", one)
        if spec.mlp:
            own = f"blocks.{i}.mlp"
            up, down = p[f"{own}.up_down"]
            h = (norm(x) * p.get(f"blocks.{i}.mlp_gain_in", one)) @ up
            x = x + h.clamp(min=0) ** 2 @ down.T * p.get(f"blocks.{i}.mlp_gain_out", one)
        outputs.append(x)
    logits = norm(x) @ p["head.weight"].T
    return 15 * torch.tanh(logits / 15) + 15 if cfg.softcap[0] else logits


@pytest.mark.recipe
@PLAIN_AND_FAST
@pytest.mark.parametrize(
    "step, changes",
    [
        *((step, {}) for step in (0, 9, 12)),
        *(
            (9, change)
            for change in (
                dict(num_layers=6),
                dict(attention_gate_dim=0),
                dict(qk_norm="off"),
                dict(qk_group_heads=1),
                dict(x0_mix="off"),
                dict(without="softcap"),
                dict(yarn_max_window=0),
                dict(gains="norm,output"),
                dict(without="skip_from,value_embed,dropped_attention,dropped_mlp"),
            )
        ),
    ],
    ids=str,
)
def test_the_model_is_the_recipe(step, changes, fast):
    """And so is the rest of it when a mechanism is switched off."""
    cfg, model, tokens, doc_ids = make_model(fast=fast, **changes)
    state = gpt.Schedule(cfg).at(step)
    expected = reference_logits(
        cfg,
        model,
        tokens[:-1],
        doc_ids,
        dict(zip(("long", "short"), state.windows)),
        *state.rope["long"],  # short layers have equal frequencies and softmax scales
    )
    x = model.run_layers(tokens[:-1].int(), doc_ids, step_inputs(cfg, step))
    assert torch.allclose(
        model.head.compute_logits(x).double(), expected, atol=2e-4
    )  # float32 against float64 on logits of 0..30
    loss = model(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg, step))
    exact = torch.nn.functional.cross_entropy(expected, tokens[1:], reduction="sum")
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize("rms_norm", [gpt.rms_norm, gpt.RMSNorm.apply])
def test_the_norm_and_its_gradient(rms_norm):
    """x / sqrt(mean(x^2) + eps), differentiated by autograd. float64, so that only the formula can differ."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 16, dtype=torch.float64).requires_grad_()
    plain = x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    grad = torch.randn_like(x)
    (expected,) = torch.autograd.grad(plain, x, grad)
    y = rms_norm(x)
    assert torch.allclose(y, plain, rtol=0, atol=1e-13)
    assert torch.allclose(torch.autograd.grad(y, x, grad)[0], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("norm_rotate", [gpt.norm_rotate, gpt.NormRotary.apply])
@pytest.mark.parametrize("pairs", ["halves", "adjacent"])
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("is_paired", [True, False])
def test_norm_and_rotary_and_their_gradient(pairs, has_norm, is_paired, norm_rotate):
    """Each step by itself, differentiated by autograd, in float64. q has a softmax scale of 0.1, k has none."""
    torch.manual_seed(0)
    cfg = smoke_config(rotary_pairs=pairs, num_heads=2, layers=(gpt.LayerSpec(paired=is_paired),), num_layers=1)
    inputs = gpt.make_step_inputs(gpt.Schedule(cfg).at(0), 12, 12, make_runtime(dtype=torch.float64), cfg)
    cos, sin, softmax_scale = inputs.ropes["short", is_paired]
    assert softmax_scale == 0.1
    shape = (12, 2, 1, 2, 32) if is_paired else (12, 2, 2, 1, 32)
    x, grad = torch.randn(2, *shape, dtype=torch.float64)
    x.requires_grad_()
    normed = x / (x.square().mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() if has_norm else x
    plain = gpt.rotate(normed, cos, sin, pairs)
    y = norm_rotate(x, cos, sin, pairs, has_norm)
    assert torch.allclose(y, plain, rtol=0, atol=1e-13) and (y[5, 0] - 0.1 * normed[5, 0]).abs().max() > 0.01
    expected, ours = (torch.autograd.grad(out, x, grad)[0] for out in (plain, y))
    assert torch.allclose(ours, expected, rtol=0, atol=1e-13) and expected.abs().max() > 0.1


@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 3, 2)], ids=str)
def test_shift_right_and_its_gradient(shape):
    """Nothing comes before the first token of a packed sequence, and no gradient returns from there."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, *shape)
    is_start = torch.tensor([1, 0, 0, 1, 1, 0, 0]).bool()
    x.requires_grad_()
    y = gpt.shift_right(x, is_start)
    y.backward(grad)
    zero = torch.zeros(shape[1:])
    assert torch.equal(y, torch.stack([zero, x[0], x[1], zero, zero, x[4], x[5]]))
    assert torch.equal(x.grad, torch.stack([grad[1], grad[2], zero, zero, grad[5], grad[6], zero]))


@pytest.mark.parametrize("fast", [frozenset(), CPU_FORMS], ids=["plain", "fast"])
def test_a_tied_head_is_updated_with_the_sum_of_both_gradients(shards, fast):
    """Adam's first step by hand, g / (|g| + eps / sqrt(1 - beta2)), with the options of the head. g is the sum of
    the gradients of two equal tables. While tied, the model reads only the head, and finish() copies it."""
    cfg = smoke_config(
        shards, tie_head="on", embed_std=(0.1, 1.0), grad_grid=0.0, head_lr=0.01, micro_batch_tokens=2048
    )
    trainer = gpt.Trainer(cfg, make_runtime(fast=fast))
    data, model = gpt.TrainData(cfg, trainer.schedule), trainer.model
    first, embed, head = next(data.batches(trainer.rt, 0, 1)), model.embed, model.head.weight
    assert embed.std().item() == pytest.approx(0.1, rel=0.02) and torch.equal(embed, head)
    before = embed.detach().clone()
    inputs = trainer.get_step_inputs(trainer.schedule.at(0), 2048, 512)
    model.is_tied = False
    loss = model(*first[:3], inputs)
    parts = torch.autograd.grad(loss, (embed, head))
    assert all(part.abs().sum() > 0 for part in parts)
    model.is_tied = True
    tied_loss = model(*first[:3], inputs)
    unused, whole = torch.autograd.grad(tied_loss, (embed, head), allow_unused=True)
    assert unused is None and torch.allclose(whole, sum(parts), rtol=1e-5, atol=1e-5) and tied_loss == loss
    grad = sum(parts) * gpt.GRAD_TOKENS / 2048
    batches = gpt.Prefetcher(data.batches(trainer.rt, 0, 3), trainer.rt.device)
    for step in range(3):
        old = head.detach().clone()
        embed.data.fill_(torch.nan)  # nobody reads it
        trainer.train_step(batches, trainer.schedule.at(step))
        trainer.optimizer.finish()
        if step == 0:
            eps = cfg.adam_eps / (1 - cfg.groups["head"].betas[1]) ** 0.5
            assert torch.allclose(head, before - 0.01 * grad / (grad.abs() + eps), atol=1e-5)
        assert torch.equal(embed, head) and not torch.equal(head, old)
        assert embed.grad is None and head.grad is None
    batches.executor.shutdown(cancel_futures=True)


@PLAIN_AND_FAST
def test_a_future_token_changes_no_earlier_output(fast):
    cfg, model, tokens, doc_ids = make_model(fast=fast)
    first = model.run_layers(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    tokens[300] = (tokens[300] + 1) % 256
    second = model.run_layers(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    assert torch.equal(first[:300], second[:300]) and not torch.equal(first[300], second[300])


@PLAIN_AND_FAST
def test_documents_do_not_see_each_other(fast):
    cfg, model, tokens, _ = make_model(fast=fast)
    doc_ids = (torch.arange(cfg.seq_len) >= 200).int() + 1
    first = model.run_layers(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    tokens[:200] = torch.randint(256, (200,))
    second = model.run_layers(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    assert torch.equal(first[200:], second[200:]) and not torch.equal(first[:200], second[:200])


@PLAIN_AND_FAST
def test_the_window_ends_where_it_says(fast):
    spec = (gpt.LayerSpec(attention="short"),)
    cfg, model, tokens, _ = make_model(fast=fast, layers=spec, num_layers=1, stages=(gpt.Stage(1, 100, 70),))
    doc_ids = torch.zeros(cfg.seq_len, dtype=torch.int32)
    first = model.run_layers(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    tokens[100] = (tokens[100] + 1) % 256
    second = model.run_layers(tokens[:-1].int(), doc_ids, step_inputs(cfg))
    changed = (first != second).any(-1).nonzero().flatten()
    assert changed.min() == 100 and changed.max() == 170  # 70 tokens back, itself included


def test_initial_loss_and_statistics():
    cfg = smoke_config(model_dim=256, num_heads=2, head_dim=128)
    torch.manual_seed(0)
    model = gpt.GPT(cfg)
    assert model.embed.std().item() == pytest.approx(1, abs=0.02)
    assert not model.head.weight.any()
    attention, up_down = model.blocks[1].attention, model.blocks[1].mlp.up_down
    for weight in (attention.qk, attention.v_proj[0], up_down[0]):
        assert weight.std().item() == pytest.approx(0.5 * 256**-0.5, rel=0.02)
        assert weight.abs().max().item() <= 3**0.5 * 0.5 * 256**-0.5
    assert not attention.v_proj[1].any() and not up_down[1].any()
    own = [(s.layer, s.name, *s.init) for s in model.layer_scalars]
    assert (3, "skip", -1.5) in own and (0, "x0", 0.0) in own
    assert [name for name, _ in model.scalars.items()] == ["scalar"]
    assert model.scalars["scalar"].tolist() == [init for _, _, init in own]
    tokens = torch.randint(256, (513,))
    loss = model(tokens[:-1].int(), tokens[1:], torch.zeros(512, dtype=torch.int32), step_inputs(cfg)) / 512
    assert loss.item() == pytest.approx(math.log(cfg.padded_vocab_size), abs=1e-5)  # zero head: uniform


@PLAIN_AND_FAST
def test_every_parameter_gets_a_gradient(fast):
    cfg, model, tokens, doc_ids = make_model(fast=fast, num_layers=6)
    model(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg)).backward()
    assert [
        name for name, param in model.named_parameters() if param.grad is None or not param.grad.any()
    ] == []


@PLAIN_AND_FAST
def test_validation_in_chunks_changes_nothing(monkeypatch, fast):
    cfg, model, tokens, doc_ids = make_model(fast=fast)
    whole = model.eval()(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg))
    monkeypatch.setattr(gpt, "LOGITS_CHUNK", 100)
    parts = model(tokens[:-1].int(), tokens[1:], doc_ids, step_inputs(cfg))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)


def make_block():
    """A layer without attention, with gains, and a function that returns its change of 16 tokens."""
    cfg = smoke_config(num_layers=1, layers=(gpt.LayerSpec(attention="none"),), gains="norm,output")
    torch.manual_seed(0)
    block, x = gpt.Block(cfg, 0, gpt.layer_scalars(cfg, 0)), torch.randn(16, 64)
    scalars = dict(resid=torch.ones(16, 1), x0=torch.zeros(16, 1))
    return block, lambda: block(x, dict(x0=x), scalars, None, None, gpt.Operations()) - x


@pytest.mark.recipe
def test_a_zero_gain_trains_after_relu_squared_and_not_before_it():
    """The branch is quadratic in the first gain, whose gradient at 0 is exactly 0. It is linear in the second."""
    block, run = make_block()
    for sleeper, other in (("mlp_gain_in", "mlp_gain_out"), ("mlp_gain_out", "mlp_gain_in")):
        named = dict(block.named_parameters())
        named[sleeper].data.zero_()
        named[other].data.fill_(1.0)
        grad, _ = torch.autograd.grad(run().sum(), (named[sleeper], named[other]))
        assert (grad == 0).all() == (sleeper == "mlp_gain_in")


def test_flops_count_the_keys_that_can_be_seen():
    """Documents are cut to 100 tokens. Without a mask a key may be anywhere in the window."""
    flops = {
        mask: gpt.count_flops(
            smoke_config(max_doc_len=100, document_mask=mask, num_layers=1, stages=(gpt.Stage(1, 256, 256),))
        )
        for mask in ("on", "off")
    }
    assert flops["off"] - flops["on"] == 12 * 64 * (256 - 100)


@pytest.mark.parametrize("form", ["plain", "head_loss"])
def test_a_stage_has_the_targets_with_weights(form):
    """One column if only the next token has a weight.

    Loss and gradients equal four columns with three zero weights, and a sum of separate cross-entropies.
    """
    torch.manual_seed(0)
    rich = gpt.Stage(1, 128, 64, loss_weights=((1, 1), (0.5, 0.5), (0.25, 0)), prefix_weight=(0.5, 0.25))
    cfg = smoke_config(stages=(gpt.Stage(1, 128, 64), rich), num_layers=1)
    rt, schedule = make_runtime(dtype=torch.float64, fast=frozenset({form} - {"plain"})), gpt.Schedule(cfg)
    model = gpt.GPT(cfg, rt)
    head, ops = model.head, model.ops
    assert ops.head_loss is (gpt.head_loss if form == "plain" else gpt.fused_head_loss)
    head.prefix_tokens = torch.where(torch.arange(257) % 3 > 0, torch.arange(257) // 2, -1)
    head.weight.data = torch.randn(*head.weight.shape, dtype=torch.float64)
    states = [schedule.at(step) for step in (0, cfg.num_iterations - 1)]
    assert [state.stage_index for state in states] == [0, 1]
    plain, rich = (gpt.make_step_inputs(state, 64, 32, rt, cfg) for state in states)
    weights = [torch.tensor(state.loss_weights) for state in states]
    assert [len(given) for given in weights] == [1, 4]
    targets = torch.randint(256, (64,))
    given = []  # to the loss, as columns (T, n)
    noting = ops._replace(head_loss=lambda x, w, columns, *rest: given.append(columns.T) or torch.zeros(()))
    for step_inputs, loss_weights in zip((plain, rich), weights):
        head(torch.zeros(64, cfg.model_dim), targets, step_inputs, loss_weights, noting)
    (first,), columns = given
    assert columns.shape == (4, 64) and torch.equal(first, targets) and torch.equal(columns[0], targets)
    for ahead, missing in ((1, [31, 63]), (2, [30, 31, 62, 63])):  # the ends of two packed sequences
        column = columns[ahead]
        assert (column == -1).nonzero().ravel().tolist() == missing
        assert torch.equal(column[column >= 0], targets.roll(-ahead)[column >= 0])
    assert torch.equal(columns[3], head.prefix_tokens[targets])
    x = gpt.rms_norm(torch.randn(64, cfg.model_dim, dtype=torch.float64)).requires_grad_()

    def differentiate(loss):
        return loss.detach(), *torch.autograd.grad(loss, (x, head.weight))

    ours = differentiate(head(x, targets, plain, weights[0], ops))
    padded = differentiate(head(x, targets, rich, torch.tensor([1.0, 0, 0, 0]), ops))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, padded))
    exact = sum(
        weight * F.cross_entropy(head.compute_logits(x), column, ignore_index=-1, reduction="sum")
        for weight, column in zip(weights[1].double(), columns)
    )
    ours = differentiate(head(x, targets, rich, weights[1], ops))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, differentiate(exact)))
    given.clear()
    head.eval()  # validation uses only the next token, in every stage
    head(x.detach(), targets, rich, weights[1], noting)
    assert torch.equal(given[0], targets[None])


@pytest.mark.parametrize("form", ["plain", "head_loss"])
def test_the_sampled_loss_is_over_the_classes_of_each_sequence(form):
    """Cross-entropy over the logits of its classes, without targets that are no class. All classes: the whole loss."""
    torch.manual_seed(0)
    cfg = smoke_config(stages=(gpt.Stage(1, 128, 64, loss_weights=((1, 1), (0.5, 0.5))),), num_layers=1)
    rt = make_runtime(dtype=torch.float64, fast=frozenset({form} - {"plain"}))
    model, state = gpt.GPT(cfg, rt), gpt.Schedule(cfg).at(0)
    head, num_classes = model.head, cfg.padded_vocab_size
    head.weight.data = torch.randn(*head.weight.shape, dtype=torch.float64)
    inputs = gpt.make_step_inputs(state, 64, 32, rt, cfg)
    x = gpt.rms_norm(torch.randn(64, cfg.model_dim, dtype=torch.float64)).requires_grad_()
    targets, weights = torch.randint(256, (64,)), torch.tensor(state.loss_weights).double()

    def differentiate(loss):
        return loss.detach(), *torch.autograd.grad(loss, (x, head.weight))

    whole = differentiate(head(x, targets, inputs, weights, model.ops))
    ours = differentiate(head(x, targets, inputs, weights, model.ops, torch.arange(num_classes).expand(2, -1)))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, whole))

    classes = torch.stack([torch.randperm(num_classes)[:90].sort().values for _ in range(2)])
    logits, exact, num_left_out = head.compute_logits(x), 0, 0
    for i, chosen in enumerate(classes):
        places = {int(label): place for place, label in enumerate(chosen)}
        for t in range(32 * i, 32 * i + 32):
            for weight, ahead in zip(weights, (0, 1)):
                place = places.get(int(targets[t + ahead])) if t % 32 + ahead < 32 else None
                num_left_out += place is None
                if place is not None:
                    exact = exact - weight * logits[t, chosen].log_softmax(-1)[place]
    assert 1 < num_left_out < 127
    ours = differentiate(head(x, targets, inputs, weights, model.ops, classes))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, differentiate(exact)))
