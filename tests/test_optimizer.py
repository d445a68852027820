"""The optimizer: arguments of update rules, multipliers, buckets, tables divided among ranks, averages."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import gpt, make_runtime, smoke_config
from test_update_rules import RULES_AND_METHODS, SPHERES, Ends, first_state, update_by_hand


@pytest.mark.parametrize("name, method", RULES_AND_METHODS)
def test_the_optimizer_tells_every_rule_its_numbers(name, method):
    """Three steps of 24,576 tokens. Gradients are scaled to 49,152 tokens. Weight decay is 0.4, times the rate."""
    rng, model = np.random.default_rng(0), Ends()
    weights, grads = rng.standard_normal((2, 6, 14)), rng.standard_normal((3, 2, 6, 14))
    model.stack = gpt.parameter(torch.tensor(weights).float(), "matrix")
    cfg = smoke_config(matrix_rule=name, orthogonalize=method, matrix_lr=0.05, adam_eps=1e-8,
                       tokens_per_step=24_576, matrix_betas=(0.9, 0.95),
                       matrix_weight_decay=0.0 if name in SPHERES else 0.4, gains="output")
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    for grad in grads:
        model.stack.grad += torch.tensor(grad).float() / 2
        optimizer.step(first_state(cfg))
    for i in range(2):
        *_, (expected, _) = update_by_hand(name, method, weights[i], grads[:, i], 0.05, 0.02)
        assert np.abs(model.stack[i].detach().numpy() - expected).max() < 2e-6


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_multipliers(rule):
    """Each matrix and each element of a bucket has its own multiplier. Padding stays zero. Averages count
    the values after the update."""
    groups = {"scalar": dict(lr=0.1, weight_decay=0.2)}
    cfg, model = smoke_config(matrix_rule=rule, matrix_lr=0.1, matrix_weight_decay=0.2, groups=groups,
                              averages=True, num_iterations=1), Ends()
    torch.manual_seed(0)
    matrix, vector = torch.randn(4, 8), torch.randn(5)  # four equal matrices and two equal vectors
    model.a = gpt.parameter(matrix.clone(), "matrix")
    model.b = gpt.parameter(matrix.clone(), "matrix", lr_mul=2.0, wd_mul=3.0)
    model.c = gpt.parameter(vector.clone(), "scalar", wd_mul=0.0)
    model.d = gpt.parameter(vector.clone(), "scalar", lr_mul=0.5, wd_mul=3.0)
    model.e = gpt.parameter(torch.stack((matrix, matrix)), "matrix", lr_mul=(3.0, 1.0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    buckets = [list(bucket.params) for bucket in optimizer.buckets]
    assert buckets == [["head.weight"], ["e", "b", "a"], ["d", "c"], ["embed"]]
    matrix, vector = torch.randn(4, 8), torch.randn(5)
    for name in "abcde":
        param = getattr(model, name)
        param.grad += vector if param.dim() == 1 else matrix
    model.head.weight.grad += 1
    optimizer.step(first_state(cfg))
    head = optimizer.bucket_of["head.weight"]
    assert head.shard[:3].all() and torch.equal(head.state["average0"], head.shard)  # the first is copied
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    # without decay, b would move by twice the update of a. Its decay is lr_mul * wd_mul = 6 times as strong
    decay = 0.1 * 0.2
    update = moved["a"] - decay * before["a"]
    assert update.abs().max() > 0.01
    assert torch.allclose(moved["e"], moved["a"] * torch.tensor([3.0, 1.0]).view(2, 1, 1), atol=1e-5)
    assert torch.allclose(moved["b"] - 6 * decay * before["b"], 2 * update, atol=1e-5)
    undecayed = moved["d"] - 1.5 * decay * before["d"]
    assert torch.allclose(undecayed, 0.5 * moved["c"], atol=1e-6) and moved["c"].all()
    vectors = optimizer.bucket_of["c"].values.view(2, 32)
    assert vectors[:, :5].all() and not vectors[:, 5:].any()


@pytest.mark.recipe
@pytest.mark.parametrize("decay, acts", [("decoupled", 1), ("cautious", 0)])
def test_decay_along_the_rate_is_along_each_groups_own(decay, acts):
    """LR factors f of 1/2 for Adam's groups and 1/4 for matrices, without gradients: W (1 - lr f wd f). Cautious decay
    does not act on Adam's parameters then, but it acts on Muon's."""
    cfg = smoke_config(decay=decay, decay_schedule="lr", matrix_lr=0.1, matrix_weight_decay=0.5,
                       groups={"head": dict(lr=0.1, weight_decay=0.5)}, zero_init="off", cooldown_frac=0.5,
                       matrix_cooldown_frac=1.0, final_lr_frac=0.0)
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(1.0)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    matrix = model.blocks[1].mlp.up_down
    before = matrix.clone()
    optimizer.step(gpt.Schedule(cfg).at(9))  # a quarter of the 12 steps remains
    assert torch.allclose(model.head.weight, torch.tensor(1 - acts * 0.1 * 0.5 * 0.5 * 0.5))
    assert torch.allclose(matrix, before * (1 - 0.1 * 0.25 * 0.5 * 0.25))


def test_a_group_with_a_late_period_has_the_betas_and_the_decay_of_its_length():
    """Every second step, and from step 8 on every sixth, with the cubes of both betas and three times the decay. Bias
    corrections count updates. Row Adam's time is the sum of -log(beta2) over all updates."""
    head = dict(every=2, late_every=6, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    cfg = smoke_config(num_iterations=20, late_start=0.4, cooldown_frac=0.0, groups={"head": head})
    model = Ends()
    optimizer, schedule = gpt.Optimizer(model, cfg, make_runtime()), gpt.Schedule(cfg)
    assert optimizer.late_step == 8
    bucket, steps, num_updates, time = optimizer.bucket_of["head.weight"], [], 0, 0.0
    for step in range(20):
        optimizer.step_count = step
        is_due = bucket in optimizer.list_due()
        steps += [step] if is_due else []
        optimizer.step_count, power = step + 1, 3 if step >= 8 else 1  # as in Optimizer.step()
        num_updates, time = num_updates + is_due, time - is_due * power * np.log(0.9)
        assert bucket.group.count_updates(step + 1, 8) == num_updates
        if is_due:
            hyper = optimizer.compute_hyper(bucket, schedule.at(step))
            betas = 0.8**power, 0.9**power
            expected = (1 - betas[0]**num_updates, 1 - betas[1]**num_updates, *betas, time)
            ours = hyper.bias_correction1, hyper.bias_correction2, hyper.beta1, hyper.beta2, hyper.decay_time
            assert ours == pytest.approx(expected, rel=1e-6)
            assert (hyper.lr, hyper.weight_decay) == pytest.approx((0.1, 0.3 * power))
    assert steps == [1, 3, 5, 7, 11, 17]


def test_parameters_live_in_buckets_and_gradients_are_autograds_own():
    """Gradients are parts of one tensor, too. Backward adds to them, and an update of the bucket clears them."""
    model = gpt.GPT(smoke_config())
    optimizer = gpt.Optimizer(model, smoke_config(), make_runtime())
    assert sorted(optimizer.bucket_of) == sorted(name for name, _ in model.named_parameters())
    assert {table.name for table in optimizer.tables} == {"value_embeds.0", "value_embeds.1"}
    for bucket in set(optimizer.buckets) - set(optimizer.tables):
        for name, param in bucket.params.items():
            part = bucket.values[bucket.slices[name]]
            assert param.data_ptr() == part.data_ptr() and param.numel() == part.numel() and param.is_contiguous()
            grad = torch.randn_like(param)
            for _ in range(2):
                (param * grad).sum().backward()
            assert torch.equal(bucket.grad[bucket.slices[name]].flatten(), 2 * grad.flatten())
        bucket.clear()
        assert not bucket.grad.any() and not param.grad.any()


@pytest.mark.parametrize("num_rows, num_ranks", [(37, 1), (37, 3), (40, 4), (5 * 2**20, 2)])
def test_a_plan_of_rows(num_rows, num_ranks):
    """Against Python's sets. One rank reads only the end of the table. Rows of a large table are sorted."""
    rng = np.random.default_rng(0)
    least = [0, 0, num_rows - 3, 0][:num_ranks]
    num_reads = 70_000 if num_rows > 2**17 else 60
    reads = [rng.integers(low, num_rows, num_reads, dtype=np.int32) for low in least]
    plans = [gpt.plan_rows(reads, rank, num_rows) for rank in range(num_ranks)]
    size = -(-num_rows // num_ranks)
    for rank, plan in enumerate(plans):
        distinct = sorted({*reads[rank].tolist()})
        assert [distinct[place] for place in plan.inverse.tolist()] == reads[rank].tolist()
        owners = [row // size for row in distinct]
        assert plan.num_received == tuple(owners.count(owner) for owner in range(num_ranks))
        assert plan.num_received == tuple(owner.num_sent[rank] for owner in plans)
        own = range(rank * size, (rank + 1) * size)
        wanted = [sorted(row - own.start for row in {*rows.tolist()} if row in own) for rows in reads]
        assert [part.tolist() for part in plan.requested.split(plan.num_sent)] == wanted


def test_the_plan_of_the_docstring():
    """Two ranks, five tokens each."""
    reads = [np.array([5, 1, 5, 2, 1], np.int32), np.array([2, 6, 2, 2, 6], np.int32)]
    plan = gpt.plan_rows(reads, 0, 8)
    assert [x.tolist() for x in plan[:3]] == [[2, 0, 2, 1, 0], [1, 4, 3, 0, 2], [1, 2, 2]]
    assert plan[3:] == ((2, 1), (2, 1))


def test_plans_of_a_batch():
    """Value embeddings read the inputs. N-grams read two rows for each token, as the model computes them. It computes
    rows and signs of this rank, from tensors, only without a plan."""
    cfg = gpt.make_config(dict(preset="smoke_92"))
    tokens = [np.random.default_rng(rank).integers(0, 257, (2, 65)).astype(np.uint16) for rank in range(2)]
    batch = gpt.add_plans(gpt.make_batch(tokens[1], 256), tokens, 1, cfg)
    inputs, is_start = [x[:, :-1].ravel().astype(np.int32) for x in tokens], np.arange(128) % 64 == 0
    rows = [np.concatenate(gpt.hash_ngrams(x, is_start, 1024, 3)) for x in inputs]
    signs = gpt.hash_signs(batch.inputs, torch.tensor(is_start), 3)
    assert torch.equal(batch.sign_rows, torch.stack(signs)) and signs[0].dtype == torch.int32
    for plan, reads, num_rows in ((batch.token_plan, inputs, 384), (batch.ngram_plan, rows, 1024)):
        expected = gpt.plan_rows(reads, 1, num_rows)
        assert all(map(torch.equal, plan[:3], expected[:3])) and plan[3:] == expected[3:] and min(plan.num_sent) > 0
        assert torch.equal(plan.order, plan.inverse.argsort(stable=True))
    assert batch.ngram_plan.inverse.shape == (2 * 128,)


def test_a_model_without_value_embeddings_has_no_plan_of_them():
    tokens = [np.arange(129).reshape(1, -1).astype(np.uint16)]
    batch = gpt.make_batch(tokens[0], 256)
    without = smoke_config(layers='{"value_embed": null}')
    assert gpt.add_plans(batch, tokens, 0, without).token_plan is None
    assert gpt.add_plans(batch, tokens, 0, smoke_config()).token_plan is not None


def test_a_missing_gradient_leaves_no_count(shards):
    """A parameter without a gradient leaves a rest. In the next step, in which its group is not due, the rest must not
    count to 0, because that would reduce half-summed gradients."""
    trainer = gpt.Trainer(smoke_config(shards, groups={"embed": {"every": 2}}), make_runtime())
    optimizer, started = trainer.optimizer, []
    bucket = optimizer.bucket_of["embed"]
    bucket.start_reduce = lambda: started.append(optimizer.step_count)
    counts = []
    for optimizer.step_count in (1, 2, 3):
        optimizer.start_step(2)
        counts.append(bucket.num_pending)
        for _ in range(1 if optimizer.step_count == 1 else 2):  # one of two gradients is missing in step 1
            bucket.count_down(None)
    assert counts == [2, 0, 2] and started == [3]


def test_multipliers_of_a_bucket_that_has_only_an_mlp(shards):
    """AdamW puts a large stack of two matrices into a bucket of its own, as in record_32 with --matrix_rule=adamw."""
    for mul, shape in ((1.0, (1,)), ((1.0, 1.0), (1,)), ((2.0, 1.0), (2048,))):
        cfg = smoke_config(shards, matrix_rule="adamw", mlp_lr_mul=mul if isinstance(mul, tuple) else (mul, mul))
        param = gpt.parameter(torch.ones(2, 32, 32), "matrix", lr_mul=mul)
        model = Ends()
        model.mlp = param
        bucket = gpt.Bucket([("mlp", param)], cfg, model, gpt.Runtime())
        lr_mul = bucket.options.lr_mul
        assert lr_mul.shape == shape and lr_mul[0] == (2.0 if shape == (2048,) else 1.0) and lr_mul.min() == 1.0


def exchange(rank: int, shared: list, barrier: threading.Barrier, sent, send_counts, receive_counts):
    """all_to_all() of ranks that are threads of this process."""
    shared[rank] = sent.split(send_counts)
    barrier.wait(60)
    received = [parts[rank] for parts in shared]
    barrier.wait(60)
    assert [len(part) for part in received] == list(receive_counts)
    return torch.cat(received), None


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("name", ["value_embeds.0", "ngram"])
def test_a_table_reads_and_sums_like_a_dense_embedding(name, num_ranks):
    """38 rows, two micro-batches. Gradients are multiples of 1/16, so their sums do not depend on the order. Some rows
    repeat, some are never read. In the second micro-batch nobody reads rows of rank 0 of 3. An n-gram table has one
    more row, and only its rows with a gradient are summed."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(38, 6, generator=generator, dtype=torch.float64)
    dense, size = whole.clone().requires_grad_(), -(-38 // num_ranks)
    shared, barrier = [()] * num_ranks, threading.Barrier(num_ranks)
    reads = [[torch.tensor([37, least, 37, *torch.randint(least, 30, (50,), generator=generator)])
              for _ in range(num_ranks)] for least in (0, 13)]
    grads = [[torch.randint(-99, 99, (53, 6), generator=generator) / 16 for _ in rows] for rows in reads]
    cfg = smoke_config(ngram_rows=38, groups={"ngram": dict(rule="row_adam")})

    def sum_shard(rank: int) -> torch.Tensor:
        values = F.pad(whole, (0, 0, 0, size * num_ranks + 1 - 38))[rank * size :][: size + 1]
        data = values.clone() if name == "ngram" else whole.clone()
        param = gpt.parameter(data, name.removesuffix("s.0"), is_table=True)
        comm = gpt.Comm(rank, num_ranks)
        comm.all_to_all = functools.partial(exchange, rank, shared, barrier)
        table = gpt.Table([(name, param)], cfg, Ends(), gpt.Runtime(comm=comm))
        for rows, grad in zip(reads, grads):
            plan = gpt.plan_rows([x.numpy() for x in rows], rank, 38)
            found = table.start_reading(plan)()
            assert torch.equal(found, whole[rows[rank]])
            found.backward(grad[rank].double())
        table.wait_for_gradient()
        assert table.is_sparse == (name == "ngram") and param.grad is None
        sums = torch.zeros(size + 1, 6, dtype=torch.float64)
        sums.index_add_(0, table.rows if table.is_sparse else torch.arange(len(table.grad)), table.grad)
        table.clear()
        assert table.is_sparse or not table.total.any()
        return sums[:size]

    for rows, grad in zip(reads, grads):
        F.embedding(torch.cat(rows), dense).backward(torch.cat(grad).double())
    with ThreadPoolExecutor(num_ranks) as pool:
        sums = torch.cat(list(pool.map(sum_shard, range(num_ranks))))
    assert torch.equal(sums[:38], dense.grad) and not sums[38:].any()
    assert dense.grad[0].any() and dense.grad[37].any() and not dense.grad[30:37].any()


def test_equal_rows_are_summed_in_their_order():
    """Of two pieces. Distinct rows in ascending order, each followed by its padding. The order matters: 1 + 1e16 - 1e16
    is 0 in float64."""
    cfg = smoke_config(ngram_rows=9, groups={"ngram": dict(rule="row_adam")})
    table = gpt.Table([("ngram", gpt.parameter(torch.zeros(10, 2), "ngram", is_table=True))], cfg, Ends(), gpt.Runtime())
    rows, grad = torch.tensor([7, 2, 7, 0, 7, 2]), torch.tensor([1.0, 5, 1e16, 4, -1e16, 6]).double()
    grad = torch.stack((grad, 2 * grad), dim=1)
    table.pieces = [(rows[:2], grad[:2]), (rows[2:], grad[2:])]
    table.wait_for_gradient()
    assert table.rows.tolist() == [0, 2, 9, 7, 9, 9]
    assert table.grad.tolist() == [[4, 8], [11, 22], [0, 0], [0, 0], [0, 0], [0, 0]]


def test_a_sparse_table_is_updated_like_all_of_its_rows(monkeypatch):
    """Parameters and state after each update, in parts of 8 rows. Padding and rows that nobody reads stay. Row 5 has a
    NaN in step 9, and is not updated then. The period of updates changes in step 4."""
    monkeypatch.setattr(gpt.Table, "ROWS_AT_ONCE", 8)
    ngram = dict(rule="row_adam", lr=0.1, betas=(0.0, 0.9), weight_decay=0.1, every=2, late_every=4)
    cfg = smoke_config(groups={"ngram": ngram}, ngram_rows=38, late_start=0.3,
                       decay="cautious")
    model, schedule = Ends(), gpt.Schedule(cfg)
    values = torch.randn(38, 6, generator=torch.Generator().manual_seed(0))
    model.ngram = gpt.parameter(F.pad(values, (0, 0, 0, 1)), "ngram", is_table=True)  # with a row of padding
    optimizer, rule = gpt.Optimizer(model, cfg, make_runtime()), gpt.RULES["row_adam"]
    (table,) = optimizer.tables
    start = model.ngram[:38].detach().clone()
    dense, total = start.clone(), torch.zeros(38, 6)
    state = rule.init_state(dense)
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(1, 30, (12,), generator=generator)
        rows[0] *= step not in (1, 6)  # so two steps read row 0
        grad = torch.randn(12, 6, generator=generator)
        if step == 9:
            rows, grad = torch.tensor([*rows, 5]), F.pad(grad, (0, 0, 0, 1), value=torch.nan)
        table.start_reading(gpt.plan_rows([rows.numpy()], 0, 38))().backward(grad)
        total.index_add_(0, rows, grad)
        optimizer.step(schedule.at(step))
        if table.group.is_due(step, optimizer.late_step):
            total = total.where(total.isfinite(), 0.0)
            rule.update(dense, total, state, table.hyper, table.options)
            total = torch.zeros(38, 6)
        assert torch.allclose(model.ngram[:38], dense, rtol=0, atol=1e-6)
        for key, expected in state.items():
            assert torch.allclose(table.state[key][:38], expected, rtol=1e-5, atol=1e-7), key
    assert not model.ngram[38].any() and torch.equal(model.ngram[30:38], start[30:])
    assert (model.ngram[:38] != start).any(1).sum() > 25 and (model.ngram[0] != start[0]).all()


@pytest.mark.parametrize("num_steps, first", [(1, 0), (2, 0), (5, 0), (14, 0), (14, 12), (1194, 0)])
def test_averages_of_the_last_steps(num_steps, first):
    """By hand in float64. A resumed run may begin after the first counted step. It copies its first values."""
    cfg = smoke_config(averages=True, num_iterations=num_steps, state_dtype="float32")
    model, rng = Ends(), np.random.default_rng(0)
    for name, shape, group, kind in (
            ("qk", (2, 4, 8), "matrix", "qk"), ("v", (8, 8), "matrix", "vo"),
            ("mlp", (2, 8, 16), "matrix", "up_down"), ("ve", (5, 8), "value_embed", "")):
        zeros = torch.zeros(shape, dtype=torch.bfloat16 if kind == "vo" else torch.float32)
        setattr(model, name, gpt.parameter(zeros, group, kind=kind, is_table=name == "ve"))
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    buckets = {bucket.kind: bucket for bucket in optimizer.buckets}
    values = {kind: rng.standard_normal((num_steps, *b.shard.shape)) for kind, b in buckets.items()}
    for step in range(first, num_steps):
        for kind, bucket in buckets.items():
            new = torch.tensor(values[kind][step]).float()
            if kind == "vo":
                bucket.state["low_bits"].copy_(new.view(torch.int32))
                new = (new.view(torch.int32) >> 16).short().view(torch.bfloat16)
            bucket.shard.copy_(new)
        optimizer.step_count = step + 1
        optimizer.update_averages()
    optimizer.apply_averages()
    factor = 1194 / num_steps  # of the rates, up to 1
    for kind, bucket in buckets.items():
        last = expected = values[kind][-1]
        for kinds, start, every, rate, weight, num_last in gpt.AVERAGES:
            begin, mean = min(num_steps - 1, int(np.ceil(start * num_steps - 1e-6))), None
            counted = {*range(begin, num_steps, every), *range(num_steps - num_last, num_steps)}
            for step in sorted(step for step in counted if step >= max(first, begin)):
                share = min(1, factor * rate)
                mean = values[kind][step] if mean is None else mean + share * (values[kind][step] - mean)
            if kind in kinds:
                expected = expected + weight * ((0 if mean is None else mean) - expected)
        norm = np.linalg.norm(last) / np.linalg.norm(expected) if kind != "value_embed" else 1
        expected = norm * expected
        rounding = np.abs(expected).max() * (2.0**-8 if kind == "vo" else 1e-5)
        assert np.abs(bucket.shard.float().numpy() - expected).max() < rounding, kind
    assert not buckets["vo"].state["low_bits"].any()


def test_an_untied_embedding_has_the_state_of_the_head():
    """Values, moments and running average."""
    cfg = smoke_config(averages=True, tie_head=True, untie_frac=0.5)
    optimizer = gpt.Optimizer(gpt.GPT(cfg), cfg, make_runtime())
    head, embed = (optimizer.bucket_of[name].tensors() for name in ("head.weight", "embed"))
    for tensor in head.values():
        tensor.copy_(torch.rand(tensor.shape))
    optimizer.untie()
    assert "average0" in head and head.keys() == embed.keys() and not optimizer.model.is_tied
    for key, tensor in head.items():
        assert torch.equal(tensor, embed[key]) and tensor.any(), key


def test_a_bucket_of_matrices_has_one_kind():
    """Averages choose kinds. In smoke qk, v and proj have one shape."""
    cfg = smoke_config(averages="on")
    for bucket in gpt.Optimizer(gpt.GPT(cfg), cfg, make_runtime()).buckets:
        if bucket.rule.whole_matrix:
            assert len({param.spec.kind for param in bucket.params.values()}) == 1


@pytest.mark.parametrize("row", [0, -1])
def test_the_checksum_of_a_table_has_its_first_and_its_last_row(row):
    """A change of one bit. The table has more rows than are compared."""
    trainer = gpt.Trainer(smoke_config(), make_runtime())
    table = trainer.optimizer.bucket_of["value_embeds.0"]
    assert table.num_rows > table.CHECKED_ROWS
    before = table.sum_bits()
    table.shard.view(torch.int32)[row, 0] ^= 1
    assert (table.sum_bits() - before).abs() == 1
