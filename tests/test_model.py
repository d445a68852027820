"""The model against a plain reading of the records, and its invariants."""

import functools

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU_FORMS, gpt, make_runtime, smoke_config

PLAIN_AND_FAST = pytest.mark.parametrize("fast", [frozenset(), CPU_FORMS], ids=["plain", "fast"])
CPU = torch.device("cpu")


class Example:
    """A model with every parameter away from zero, and a batch of one packed sequence."""

    def __init__(self, fast=frozenset(), **changes):
        self.cfg = cfg = smoke_config(**changes)
        torch.manual_seed(0)
        self.model, self.ops = gpt.GPT(cfg), gpt.make_operations(cfg, fast, torch.float32)
        for param in self.model.parameters():
            param.data.add_(torch.randn_like(param) * 0.3 / max(param.shape[-1], 4) ** 0.5)
        tokens = torch.randint(256, (cfg.seq_len + 1,))
        doc_ids = (torch.rand(cfg.seq_len) < 0.02).cumsum(0).int()
        self.batch = gpt.Batch(tokens[:-1].int(), tokens[1:], doc_ids)

    def step_inputs(self, step=0) -> gpt.StepInputs:
        state = gpt.Schedule(self.cfg).at(step)
        return gpt.make_step_inputs(state, self.cfg.seq_len, self.cfg.seq_len, self.cfg, CPU)

    def loss(self, step=0) -> torch.Tensor:
        return self.model(self.batch, self.step_inputs(step), self.ops)

    def run(self, step=0, **changes) -> torch.Tensor:
        """The activations of the batch with other inputs or documents."""
        return self.model.run_layers(self.batch._replace(**changes), self.step_inputs(step), self.ops)

    def change_token(self, place: int) -> torch.Tensor:
        inputs = self.batch.inputs.clone()
        inputs[place] = (inputs[place] + 1) % 256
        return inputs


def reference_logits(cfg, model, inputs, doc_ids, windows, frequencies, scale):
    """Records 2 to 32, token pair by token pair, float64, no shared code with the model."""
    p = {name: param.detach().double() for name, param in model.named_parameters()}
    num_tokens, heads, width = len(inputs), cfg.num_heads, cfg.head_dim
    norm = lambda x: x / (x.square().mean(-1, keepdim=True) + 1.1920929e-07).sqrt()
    head_norm = norm if cfg.qk_norm else lambda x: x
    angle = torch.arange(num_tokens)[:, None].double() * torch.tensor(frequencies)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)

    place = torch.arange(num_tokens)
    causal = (place[:, None] >= place) & (doc_ids[:, None] == doc_ids)
    x = x0 = norm(p["embed"][inputs])
    outputs, one = [], torch.ones(1)
    for i, spec in enumerate(cfg.layers):
        s = {name: p.get(f"blocks.{i}.scalars.{name}") for name in ("resid", "x0", "skip", "v_scale", "ve_scale")}
        mix = [s["resid"], s["x0"]] if cfg.x0_mix == "before" else [1, 0]
        if spec.skip_from is not None:
            x = x + torch.sigmoid(s["skip"]) * outputs[spec.skip_from]
        x = mix[0] * x + mix[1] * x0
        if spec.attention != "none":
            own = f"blocks.{i}.attention"
            u = norm(x) * p.get(f"blocks.{i}.attn_gain_in", one)
            (wq, wk), wv = p[f"{own}.qk"].view(2, heads * width, -1), p[f"{own}.v"]
            q, k, v = ((u @ w.T).view(num_tokens, heads, width) for w in (wq, wk, wv))
            v = s["v_scale"] * v
            if spec.value_embed is not None:
                v = v + s["ve_scale"] * p[f"value_embeds.{spec.value_embed}"][inputs].view(v.shape)
            seen = causal & (place[:, None] - place <= windows[spec.attention])
            scores = torch.einsum("qhk,shk->hqs", rotate(head_norm(q)), rotate(head_norm(k))) * scale
            y = torch.einsum("hqs,shk->qhk", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
            if cfg.attention_gate_dim:
                gate = torch.sigmoid(u[:, : cfg.attention_gate_dim] @ p[f"{own}.attention_gate_weight"].T)
                y = y * gate[..., None]
            x = x + y.flatten(1) @ p[f"{own}.proj"].T * p.get(f"blocks.{i}.attn_gain_out", one)
        if spec.mlp:
            own = f"blocks.{i}.mlp"
            up, down = p[f"{own}.up_down"]
            h = (norm(x) * p.get(f"blocks.{i}.mlp_gain_in", one)) @ up
            x = x + h.clamp(min=0) ** 2 @ down.T * p.get(f"blocks.{i}.mlp_gain_out", one)
        outputs.append(x)
    logits = norm(x) @ p["head.weight"].T
    return 15 * torch.tanh(logits / 15) + 15 if cfg.softcap[0] else logits


SWITCHES = (
    dict(num_layers=6), dict(attention_gate_dim=0), dict(qk_norm="off"), dict(qk_group_heads=1),
    dict(x0_mix="off"), dict(without="softcap"), dict(yarn_max_window=0), dict(gains="norm,output"),
    dict(without="skip_from,value_embed,dropped_mlp", layers='{"attention": "long"}'),
)  # fmt: skip


@pytest.mark.recipe
@PLAIN_AND_FAST
@pytest.mark.parametrize("step, changes", [(0, {}), (9, {}), (12, {}), *((9, x) for x in SWITCHES)], ids=str)
def test_the_model_is_the_recipe(step, changes, fast):
    """And so is its rest when a mechanism is switched off. Float32 against float64 on logits of 0 to 30."""
    example = Example(fast, **changes)
    cfg, model, batch = example.cfg, example.model, example.batch
    state = gpt.Schedule(cfg).at(step)
    windows = dict(zip(("long", "short"), state.windows))  # RoPE is equal in both kinds of layers
    expected = reference_logits(cfg, model, batch.inputs, batch.doc_ids, windows, *state.rope["long"])
    logits = model.head.compute_logits(example.run(step))
    assert torch.allclose(logits.double(), expected, atol=2e-4)
    exact = F.cross_entropy(expected, batch.targets, reduction="sum")
    assert example.loss(step).item() == pytest.approx(exact.item(), rel=1e-5)


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


@PLAIN_AND_FAST
def test_a_tied_head_is_updated_with_the_sum_of_both_gradients(shards, fast):
    """Adam's first step by hand, g / (|g| + eps / sqrt(1 - beta2)), with the options of the head. g is the sum of
    the gradients of two equal tables. While tied, the model reads only the head, and finish() copies it."""
    size = dict(tokens_per_step=512, micro_batch_tokens=512)
    cfg = smoke_config(shards, tie_head="on", embed_std=(0.1, 1.0), head_lr=0.01, **size)
    trainer = gpt.Trainer(cfg, make_runtime(fast=fast))
    data, model, comm = gpt.TrainData(cfg, trainer.schedule), trainer.model, trainer.rt.comm
    first, embed, head = next(data.batches(comm, 0, 1)), model.embed, model.head.weight
    assert embed.std().item() == pytest.approx(0.1, rel=0.02) and torch.equal(embed, head)
    before = embed.detach().clone()
    inputs = trainer.get_step_inputs(trainer.schedule.at(0), 512, 512)
    model.is_tied = False
    loss = model(first, inputs, trainer.ops)
    parts = torch.autograd.grad(loss, (embed, head))
    assert all(part.abs().sum() > 0 for part in parts)
    model.is_tied = True
    tied_loss = model(first, inputs, trainer.ops)
    unused, whole = torch.autograd.grad(tied_loss, (embed, head), allow_unused=True)
    assert unused is None and torch.allclose(whole, sum(parts), rtol=1e-5, atol=1e-5) and tied_loss == loss
    grad = sum(parts) * gpt.GRAD_TOKENS / 512
    batches = gpt.prefetch(data.batches(comm, 0, 3), trainer.rt.device)
    for step in range(3):
        old = head.detach().clone()
        embed.data.fill_(torch.nan)  # nobody reads it
        trainer.train_step(batches, trainer.schedule.at(step))
        trainer.optimizer.finish()
        if step == 0:
            eps = cfg.adam_eps / (1 - cfg.groups["head"].betas[1]) ** 0.5
            assert torch.allclose(head, before - 0.01 * grad / (grad.abs() + eps), atol=1e-5)
        assert torch.equal(embed, head) and not torch.equal(head, old)
        assert not embed.grad.any() and not head.grad.any()
    batches.close()


@PLAIN_AND_FAST
def test_what_an_output_depends_on(fast):
    """No bit of it on a future token, on another document, or on a token before its window of 70."""
    example = Example(fast)
    first, second = example.run(), example.run(inputs=example.change_token(300))
    assert torch.equal(first[:300], second[:300]) and not torch.equal(first[300], second[300])
    doc_ids = (torch.arange(example.cfg.seq_len) >= 200).int() + 1
    inputs = torch.cat((torch.randint(256, (200,)).int(), example.batch.inputs[200:]))
    first, second = example.run(doc_ids=doc_ids), example.run(doc_ids=doc_ids, inputs=inputs)
    assert torch.equal(first[200:], second[200:]) and not torch.equal(first[:200], second[:200])
    layers, doc_ids = (gpt.LayerSpec(attention="short"),), torch.zeros(512, dtype=torch.int32)
    example = Example(fast, layers=layers, num_layers=1, stages=(gpt.Stage(1, 100, 70),))
    first, second = (example.run(doc_ids=doc_ids, inputs=x) for x in (example.batch.inputs, example.change_token(100)))
    changed = (first != second).any(-1).nonzero().flatten()
    assert changed.min() == 100 and changed.max() == 170  # 70 tokens back, itself included


def test_training_and_validation_of_one_length_keep_their_own_positions(shards):
    """Each packed sequence restarts positions. A validation sequence does not, even of an equal length."""
    trainer = gpt.Trainer(smoke_config(shards), make_runtime())
    state = trainer.schedule.at(0)
    training = trainer.get_step_inputs(state, 1024, 512)
    table = training.ropes["long", False].cos
    own = table.clone()
    assert trainer.get_step_inputs(state, 1024, 512) is training  # made once
    validation = trainer.get_step_inputs(state, 1024, 1024)
    assert torch.equal(own[:512], own[512:]) and not torch.equal(table[:512], table[512:])
    assert validation.ropes["long", False].cos is table  # step_graphs read it there
    assert trainer.get_step_inputs(trainer.schedule.at(9), 1024, 512).windows.tolist() == [256, 128]
    assert validation.windows.tolist() == [256, 128]
    trainer.get_step_inputs(state, 1024, 512)
    assert torch.equal(table, own) and validation.windows.tolist() == [128, 64]


def test_initial_scalars():
    """Of record 32. test_published_values has the other initial values."""
    blocks = gpt.GPT(smoke_config()).blocks
    own = {name: param.tolist() for name, param in blocks[3].scalars.items()}
    assert own == {"resid": [1.0], "x0": [0.0], "skip": [-1.5], "v_scale": [0.5], "ve_scale": [0.5]}
    assert {param.spec.group for block in blocks for param in block.scalars.values()} == {"scalar"}


@PLAIN_AND_FAST
def test_every_parameter_gets_a_gradient(fast):
    example = Example(fast, num_layers=6)
    example.loss().backward()
    grads = {name: param.grad for name, param in example.model.named_parameters()}
    assert [name for name, grad in grads.items() if grad is None or not grad.any()] == []


def test_flops_count_the_keys_that_can_be_seen():
    """Documents are cut to 100 tokens. Sequences that start anywhere have keys anywhere in the window."""
    options = dict(max_doc_len=100, num_layers=1, stages=(gpt.Stage(1, 256, 256),))
    cut, whole = (gpt.derived_numbers(smoke_config(sequence_start=start, **options), 1)["flops_per_token"]
                  for start in ("document", "anywhere"))
    assert whole - cut == 12 * 64 * (256 - 100)


def assert_close(ours, theirs):
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, theirs, strict=True))


HEADS = pytest.mark.parametrize("head_loss", [gpt.head_loss, functools.partial(gpt.FusedHeadLoss.apply, False, None)], ids=["plain", "fast"])


@HEADS
def test_a_stage_has_the_targets_with_weights(head_loss):
    """Loss and gradients of one column are those of four with three zero weights, and a sum of cross-entropies."""
    torch.manual_seed(0)
    rich = gpt.Stage(1, 128, 64, loss_weights=((1, 1), (0.5, 0.5), (0.25, 0)), prefix_weight=(0.5, 0.25))
    cfg = smoke_config(stages=(gpt.Stage(1, 128, 64), rich), num_layers=1)
    schedule, head, ops = gpt.Schedule(cfg), gpt.Head(cfg), gpt.Operations(head_loss=head_loss)
    head.prefix_tokens = torch.where(torch.arange(257) % 3 > 0, torch.arange(257) // 2, -1)
    head.weight.data = torch.randn(*head.weight.shape, dtype=torch.float64)
    states = [schedule.at(step) for step in (0, cfg.num_iterations - 1)]
    assert [state.stage_index for state in states] == [0, 1]
    plain, rich = (gpt.make_step_inputs(state, 64, 32, cfg, CPU) for state in states)
    weights = [torch.tensor(state.loss_weights) for state in states]
    assert [len(given) for given in weights] == [1, 4]
    targets = torch.randint(256, (64,))
    given = []  # to the loss, as columns (T, n)
    noting = ops._replace(head_loss=lambda x, w, columns, *rest: given.append(columns.T) or torch.zeros(()))
    for step_inputs, loss_weights in zip((plain, rich), weights):
        head(torch.zeros(64, cfg.model_dim), targets, step_inputs, loss_weights, None, noting)
    (first,), columns = given
    assert columns.shape == (4, 64) and torch.equal(first, targets) and torch.equal(columns[0], targets)
    for ahead, missing in ((1, [31, 63]), (2, [30, 31, 62, 63])):  # the ends of two packed sequences
        column = columns[ahead]
        assert (column == -1).nonzero().ravel().tolist() == missing
        assert torch.equal(column[column >= 0], targets.roll(-ahead)[column >= 0])
    assert torch.equal(columns[3], head.prefix_tokens[targets])
    x = gpt.rms_norm(torch.randn(64, cfg.model_dim, dtype=torch.float64)).requires_grad_()

    differentiate = lambda loss: (loss.detach(), *torch.autograd.grad(loss, (x, head.weight)))
    padded = differentiate(head(x, targets, rich, torch.tensor([1.0, 0, 0, 0]), None, ops))
    assert_close(differentiate(head(x, targets, plain, weights[0], None, ops)), padded)
    exact = sum(weight * F.cross_entropy(head.compute_logits(x), column, ignore_index=-1, reduction="sum")
                for weight, column in zip(weights[1].double(), columns))  # fmt: skip
    assert_close(differentiate(head(x, targets, rich, weights[1], None, ops)), differentiate(exact))
    given.clear()
    metric = head(x.detach(), targets, rich, None, None, noting)  # validation: only the next token, in every stage
    exact = F.cross_entropy(head.compute_logits(x.detach()), targets, reduction="sum")
    assert not given and metric.item() == pytest.approx(exact.item(), rel=1e-12)


@HEADS
def test_the_sampled_loss_is_over_the_classes_of_each_sequence(head_loss):
    """Cross-entropy over the logits of its classes, without targets that are no class. All classes: the whole loss."""
    torch.manual_seed(0)
    cfg = smoke_config(stages=(gpt.Stage(1, 128, 64, loss_weights=((1, 1), (0.5, 0.5))),), num_layers=1)
    head, num_classes, ops = gpt.Head(cfg), cfg.padded_vocab_size, gpt.Operations(head_loss=head_loss)
    head.weight.data = torch.randn(*head.weight.shape, dtype=torch.float64)
    state = gpt.Schedule(cfg).at(0)
    inputs = gpt.make_step_inputs(state, 64, 32, cfg, CPU)
    x = gpt.rms_norm(torch.randn(64, cfg.model_dim, dtype=torch.float64)).requires_grad_()
    targets, weights = torch.randint(256, (64,)), torch.tensor(state.loss_weights).double()

    differentiate = lambda loss: (loss.detach(), *torch.autograd.grad(loss, (x, head.weight)))
    whole = differentiate(head(x, targets, inputs, weights, None, ops))
    every = torch.arange(num_classes).expand(2, -1)
    assert_close(differentiate(head(x, targets, inputs, weights, every, ops)), whole)

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
    assert_close(differentiate(head(x, targets, inputs, weights, classes, ops)), differentiate(exact))


def test_initial_std_of_the_mlp():
    """0.5 / sqrt(fan-in) of both matrices, if none starts at zero."""
    torch.manual_seed(0)
    cfg = smoke_config(zero_init="off", init_std=0.5)
    up, down = gpt.GPT(cfg).blocks[1].mlp.up_down
    assert up.std().item() == pytest.approx(0.5 * cfg.model_dim**-0.5, rel=0.03)
    assert down.std().item() == pytest.approx(0.5 * cfg.mlp_hidden**-0.5, rel=0.03)
