"""The optimizer: arguments of update rules, multipliers, buckets, row-sparse gradients, tied tables."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import gpt, make_runtime, make_trainer, smoke_config
from run_ranks import run_ranks
from test_update_rules import RULES_AND_METHODS, SPHERES, Ends, first_state, update_by_hand
from torch import nn


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
        model.stack.grad = torch.tensor(grad).float() / 2
        optimizer.step(first_state(cfg))
    for i in range(2):
        *_, (expected, _) = update_by_hand(name, method, weights[i], grads[:, i], 0.05, 0.02)
        assert np.abs(model.stack[i].detach().numpy() - expected).max() < 2e-6


class Pair(Ends):
    """Two equal matrices and two equal vectors, each with separate multipliers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        matrix, vector = torch.randn(4, 8), torch.randn(5)
        self.a = gpt.parameter(matrix.clone(), "matrix")
        self.b = gpt.parameter(matrix.clone(), "matrix", lr_mul=2.0, wd_mul=3.0)
        self.c = gpt.parameter(vector.clone(), "scalar")
        self.d = gpt.parameter(vector.clone(), "scalar", lr_mul=0.5)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
def test_multipliers(rule):
    """Each matrix and each element of a bucket has a separate multiplier."""
    cfg = smoke_config(matrix_rule=rule, matrix_lr=0.1, matrix_weight_decay=0.2)
    model = Pair()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    assert [list(bucket.params) for bucket in optimizer.buckets] == [["head.weight"], ["d", "c"], ["b", "a"], ["embed"]]
    matrix, vector = torch.randn(4, 8), torch.randn(5)
    for name in "abcd":
        param = getattr(model, name)
        param.grad = (matrix if param.dim() == 2 else vector).to(param.dtype).expand_as(param).clone()
    optimizer.step(first_state(cfg))
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    # without decay, b would move by twice the update of a. Its decay is lr_mul * wd_mul = 6 times as strong
    decay = 0.1 * 0.2
    update = moved["a"] - decay * before["a"]
    assert update.abs().max() > 0.01
    assert torch.allclose(moved["b"] - 6 * decay * before["b"], 2 * update, atol=1e-5)
    assert torch.allclose(moved["d"], 0.5 * moved["c"], atol=1e-6)


@pytest.mark.parametrize("decay, acts", [("decoupled", 1), ("cautious", 0)])
def test_decay_along_the_rate_is_along_each_groups_own(decay, acts):
    """LR factors f of 1/2 for Adam's groups and 1/4 for matrices, without gradients: W (1 - lr f wd f).

    Cautious decay does not act on Adam's parameters then, but it acts on Muon's.
    """
    cfg = smoke_config(decay=decay, decay_schedule="lr", matrix_lr=0.1, matrix_weight_decay=0.5,
                       groups={"head": dict(lr=0.1, weight_decay=0.5)}, zero_init="off", cooldown_frac=0.5, matrix_cooldown_frac=1.0,
                       final_lr_frac=0.0)
    model = gpt.GPT(cfg)
    model.head.weight.data.fill_(1.0)
    optimizer = gpt.Optimizer(model, cfg, make_runtime())
    matrix = model.blocks[1].mlp.up_down
    before = matrix.clone()
    optimizer.step(gpt.Schedule(cfg).at(9))  # a quarter of the 12 steps remains
    assert torch.allclose(model.head.weight, torch.tensor(1 - acts * 0.1 * 0.5 * 0.5 * 0.5))
    assert torch.allclose(matrix, before * (1 - 0.1 * 0.25 * 0.5 * 0.25))


def test_a_learning_rate_for_the_first_matrix_of_the_mlp():
    moved = {}
    for factor in (1.0, 2.0):
        for rule in ("muon", "adamw"):
            torch.manual_seed(0)
            cfg = smoke_config(mlp_lr_mul=(factor, 1.0), matrix_rule=rule, matrix_lr=0.01)
            model = gpt.GPT(cfg)
            optimizer, param = gpt.Optimizer(model, cfg, make_runtime()), model.blocks[1].mlp.up_down
            before = param.detach().clone()
            param.grad = torch.randn(param.shape)
            optimizer.step(gpt.Schedule(cfg).at(0))
            moved[factor, rule] = param.detach() - before
    for rule in ("muon", "adamw"):
        once, twice = moved[1.0, rule], moved[2.0, rule]
        assert torch.allclose(twice[0], 2 * once[0], atol=1e-6) and torch.equal(twice[1], once[1])


def test_a_group_with_a_late_period_has_the_betas_and_the_decay_of_its_length():
    """Every second step, and from step 8 on every sixth, with the cubes of both betas and three times the decay.

    Bias corrections count updates. Row Adam's time is the sum of -log(beta2) over all updates.
    """
    head = dict(every=2, late_every=6, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    cfg = smoke_config(num_iterations=20, late_start=0.4, cooldown_frac=0.0, groups={"head": head})
    model = Ends()
    optimizer, schedule = gpt.Optimizer(model, cfg, make_runtime()), gpt.Schedule(cfg)
    assert optimizer.late_step == 8
    bucket, steps, num_updates, time = optimizer.bucket_of["head.weight"], [], 0, 0.0
    for step in range(20):
        optimizer.step_count = step
        is_due = bucket.group.is_due(optimizer.step_count, optimizer.late_step)
        steps += [step] if is_due else []
        optimizer.step_count, power = step + 1, 3 if step >= 8 else 1  # as in Optimizer.step()
        num_updates, time = num_updates + is_due, time - is_due * power * np.log(0.9)
        assert bucket.group.count_updates(step + 1, 8) == num_updates
        if is_due:
            args, betas = optimizer.make_args(bucket, schedule.at(step)), (0.8**power, 0.9**power)
            ours = (*args.betas, args.bias_correction1, args.bias_correction2, args.decay_time, args.weight_decay[0])
            expected = (*betas, 1 - betas[0]**num_updates, 1 - betas[1]**num_updates, time, 0.1 * 0.3 * power)
            assert [x.item() for x in ours] == pytest.approx(expected, rel=1e-6)
    assert steps == [1, 3, 5, 7, 11, 17]


class Scalars(Ends):
    """Parameters of one group, in one bucket."""

    def __init__(self, group, *shape, dtype=torch.float32, lr_muls=(1.0,), wd_muls=(1.0,)):
        super().__init__()
        pairs = [(lr_mul, wd_mul) for lr_mul in lr_muls for wd_mul in wd_muls]
        self.params = nn.ParameterList(
            gpt.parameter(torch.ones(shape, dtype=dtype), group, *multipliers) for multipliers in pairs)


@pytest.mark.parametrize("group, fits, model, changes", [
    ("scalar", True, dict(), {}),
    ("scalar", False, dict(), dict(decay="cautious", groups={"scalar": dict(weight_decay=0.1)})),
    ("scalar", False, dict(lr_muls=(1.0, 0.5)), {}),
    ("scalar", False, dict(wd_muls=(1.0, 0.5)), {}),
    ("scalar", False, dict(dtype=torch.bfloat16), {}),
    ("scalar", False, dict(dtype=torch.bfloat16), dict(state_dtype="float32", matrix_dtype="bfloat16")),
    ("scalar", False, dict(dtype=torch.float64), {}),
    ("matrix", False, dict(), dict(matrix_rule="muon")),
    ("matrix", True, dict(), dict(matrix_rule="adamw", matrix_weight_decay=0.1)),
], ids=str)
def test_the_fused_form_of_adam_is_used_only_if_it_fits(group, fits, model, changes, monkeypatch):
    """In float32, with one learning rate and one decay in the bucket, and without cautious decay."""
    calls, cfg = [], smoke_config(**changes)
    monkeypatch.setattr(gpt, "fused_adamw", lambda param, *_: calls.append(param))
    for fast in ((), ("fused_adamw",)):
        optimizer = gpt.Optimizer(Scalars(group, 8, 8, **model), cfg, make_runtime(fast=frozenset(fast)))
        bucket = optimizer.bucket_of["params.0"]
        assert all(name.startswith("params.") for name in bucket.params)
        for param in bucket.params.values():
            param.grad = torch.ones_like(param)
        optimizer.step(first_state(cfg))
        assert any(param is bucket.shard for param in calls) == (fits and bool(fast))


# ---- buckets -------------------------------------------------------------------------------------------------------


def test_parameters_live_in_buckets_and_gradients_are_autograds_own():
    """A bucket of one parameter uses its gradient without a copy. Several gradients are packed into one buffer."""
    model = gpt.GPT(smoke_config())
    optimizer = gpt.Optimizer(model, smoke_config(), make_runtime())
    for name, param in model.named_parameters():
        bucket = optimizer.bucket_of[name]
        assert param.untyped_storage().data_ptr() == bucket.values.untyped_storage().data_ptr()
        assert torch.equal(param.flatten(), bucket.values[bucket.slices[name]].flatten())
        assert param.grad is None
        param.grad = torch.randn_like(param)
    kinds = set()
    for bucket in optimizer.buckets:
        is_table = any(param.spec.is_table for param in bucket.params.values())
        bucket.start_reduce()
        packed, params = bucket.grad, bucket.params
        is_own = len(params) == 1 and packed.numel() == sum(param.numel() for param in params.values())
        kinds.add((is_own, is_table))
        for name, param in params.items():
            assert torch.equal(packed[bucket.slices[name]].flatten(), param.grad.flatten())
            assert (packed.data_ptr() == param.grad.data_ptr()) == is_own
    assert kinds == {(True, True), (True, False), (False, False)}
    assert sorted(optimizer.bucket_of) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize("spec", [None, gpt.ParamSpec("misc")])
def test_a_parameter_without_a_group_is_named(spec):
    model = gpt.GPT(smoke_config())
    model.extra = nn.Parameter(torch.zeros(3))
    if spec:
        model.extra.spec = spec
    with pytest.raises(AssertionError, match=r"parameter extra \(3,\) has no group.*matrix, embed"):
        gpt.Optimizer(model, smoke_config(), make_runtime())


def test_padding_stays_zero():
    cfg = smoke_config()
    optimizer = gpt.Optimizer(Pair(), cfg, make_runtime())
    for bucket in optimizer.buckets:
        for param in bucket.params.values():
            param.grad = torch.ones_like(param)
    optimizer.step(first_state(cfg))
    bucket = optimizer.bucket_of["c"]
    assert bucket is optimizer.bucket_of["d"] and len(bucket.values) == 64
    for part in bucket.values.view(2, 32):
        assert part[:5].all() and not part[5:].any()


# ---- row-sparse gradients ------------------------------------------------------------------------------------------


def test_a_table_has_a_gradient_by_rows_only_with_its_fast_form():
    """A dense gradient of a row-sparse table would be lost, so it is an error that names the table."""
    cfg, rt = smoke_config(), make_runtime(fast=frozenset({"sparse_embedding"}))
    plain = gpt.Optimizer(gpt.GPT(cfg), cfg, make_runtime())
    assert not any(bucket.sparse for bucket in plain.buckets)
    model = gpt.GPT(cfg, rt)
    optimizer = gpt.Optimizer(model, cfg, rt)
    tables = {name for name, param in model.named_parameters() if param.spec.is_table}
    assert tables == {"value_embeds.0", "value_embeds.1"}
    assert {bucket.name for bucket in optimizer.buckets if bucket.sparse} == tables
    assert all(len(optimizer.bucket_of[name].params) == 1 for name in tables)
    model.value_embeds["0"].grad = torch.zeros_like(model.value_embeds["0"])
    with pytest.raises(AssertionError, match="table value_embeds.0 has a dense gradient"):
        optimizer.step(first_state(cfg))


def test_a_row_sparse_gradient_equals_the_dense_one():
    """Two micro-batches, bit for bit in float64. Some rows repeat, some are never read. Both ends are read."""
    torch.manual_seed(0)
    param, rt = gpt.parameter(torch.randn(37, 6, dtype=torch.float64), "value_embed", is_table=True), make_runtime()
    bucket = gpt.Bucket([("table", param)], "value_embed", gpt.Group(), rt, False)
    param.sparse_grad = gpt.RowSparseGradient(bucket.shard, 37, 6, rt.comm)
    dense, total = param.detach().clone().requires_grad_(), torch.zeros(37, 6, dtype=torch.float64)
    for rows in ([36, 0, 36, 0, 0, *torch.randint(3, 30, (90,)).tolist()], [36, 36, 5, 36]):
        rows = torch.tensor(rows, dtype=torch.int32)[torch.randperm(len(rows))]
        grad = torch.randn(len(rows), 6, dtype=torch.float64)
        ours = gpt.sparse_embedding(rows, param)
        plain = F.embedding(rows, dense)
        assert torch.equal(ours, plain)
        ours.backward(grad)
        total += torch.autograd.grad(plain, dense, grad)[0]
    sums = param.sparse_grad.wait()
    assert param.grad is None and sums.shape == bucket.shard.shape and torch.equal(sums[: 37 * 6].view(37, 6), total)
    assert total[0].any() and total[36].any() and not total[30:36].any()
    param.sparse_grad.clear()
    assert not param.sparse_grad.wait().any()


class Table(Ends):
    """An n-gram table (37, 6). With its fast form on one rank it has a row of padding."""

    def __init__(self, fast):
        super().__init__()
        values, self.ngram_rows = torch.randn(37, 6, generator=torch.Generator().manual_seed(0)), 37
        self.ngram = gpt.parameter(F.pad(values, (0, 0, 0, 1)) if fast else values, "ngram", is_table=True)


def make_table(fast):
    ngram = dict(rule="row_adam", lr=0.1, betas=(0.0, 0.9), weight_decay=0.1, every=2, late_every=4)
    cfg = smoke_config(groups={"ngram": ngram}, late_start=0.3, grad_grid=0.0, decay="cautious")
    rt = make_runtime(fast=frozenset({"sparse_embedding"} if fast else ()))
    model = Table(fast)
    return model, gpt.Optimizer(model, cfg, rt), gpt.Schedule(cfg)


def train_table(model, optimizer, schedule, steps):
    """Steps with different rows, of which two have row 0 and none have rows 30 to 36."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(1, 30, (12,), generator=generator)
        rows[0] *= step not in (1, 6)
        grad = torch.randn(12, 6, generator=generator)
        lookup = gpt.sparse_embedding if optimizer.tables else gpt.embedding
        lookup(rows, model.ngram).backward(grad)
        optimizer.step(schedule.at(step))


def test_a_sharded_table_is_updated_like_an_ordinary_one(monkeypatch):
    """Parameters and state after each update, in parts of 8 rows. Padding and rows that nobody reads stay as they were."""
    monkeypatch.setattr(gpt.ShardedTable, "ROWS_AT_ONCE", 8)
    (ours, sharded, schedule), (plain, dense, _) = make_table(True), make_table(False)
    (table,), bucket = sharded.tables, dense.bucket_of["ngram"]
    assert isinstance(table, gpt.ShardedTable) and not dense.tables and table.state.keys() == bucket.state.keys()
    start = plain.ngram.detach().clone()
    for step in range(12):
        train_table(ours, sharded, schedule, [step])
        train_table(plain, dense, schedule, [step])
        assert torch.allclose(ours.ngram[:37], plain.ngram, rtol=0, atol=1e-6)
        for key, state in table.state.items():
            assert torch.allclose(state[:37], bucket.state[key], rtol=1e-5, atol=1e-7), key
    assert not ours.ngram[37].any() and torch.equal(ours.ngram[30:37], start[30:])
    assert (ours.ngram != F.pad(start, (0, 0, 0, 1))).any(1).sum() > 25 and (ours.ngram[0] != start[0]).all()


def test_a_sharded_table_returns_to_its_marks():
    """take_back() undoes the updates after a mark, bit for bit. forget() frees the updates before a mark, or all."""
    model, optimizer, schedule = make_table(True)
    (table,) = optimizer.tables
    marks, copies = [], []
    for steps in (range(2), range(2, 4), range(4, 8)):
        train_table(model, optimizer, schedule, steps)
        marks.append(table.mark())
        copies.append([table.shard.clone(), *(state.clone() for state in table.state.values())])
    assert marks == [0, 1, 2] and len(table.undo) == 2  # the first mark begins the list of updates

    def is_at(i):
        return all(map(torch.equal, [table.shard, *table.state.values()], copies[i]))

    train_table(model, optimizer, schedule, range(8, 12))
    assert len(table.undo) == 3 and not is_at(2)
    table.take_back(2)
    assert is_at(2) and len(table.undo) == 2
    table.forget(1)
    assert (table.first_undo, len(table.undo)) == (1, 1)
    table.take_back(1)
    assert is_at(1) and table.mark() == 1
    table.forget(None)
    train_table(model, optimizer, schedule, range(8, 12))
    assert table.undo is None


def test_ranks_share_a_table_that_does_not_divide(tmp_path):
    """37 rows on 3 ranks. Each rank has the sums of its 13 rows over the tokens of all ranks.

    A sharded table has equal sums, and its rows are fetched from their owners.
    """
    ends, _, errors = run_ranks("rows", 3, tmp_path / "rows.pt")
    assert all(status == 0 for status, _ in ends), errors[-2000:]
    ours, sharded, dense, is_fetched = torch.load(tmp_path / "rows.pt", weights_only=True)
    for sums in (ours, sharded):
        assert sums.shape == (39, 6) and torch.equal(sums[:37], dense) and not sums[37:].any()
    assert dense[0].any() and dense[36].any() and is_fetched.tolist() == [1, 1, 1]


def test_without_the_fast_form_a_table_has_an_ordinary_gradient(shards):
    """On one rank it trains bit for bit like the fast form, because both add in one order."""
    params = []
    for fast in (frozenset(), frozenset({"sparse_embedding"})):
        cfg = smoke_config(shards, tokens_per_step=1024, micro_batch_tokens=512, num_layers=2)
        trainer = gpt.Trainer(cfg, make_runtime(fast=fast))
        assert bool(trainer.optimizer.bucket_of["value_embeds.0"].sparse) == bool(fast)
        before = trainer.model.value_embeds["0"].detach().clone()
        batches = gpt.Prefetcher(gpt.TrainData(cfg, trainer.schedule).batches(trainer.rt, 0, 3), trainer.rt.device)
        for step in range(3):
            trainer.train_step(batches, trainer.schedule.at(step))
        batches.executor.shutdown(cancel_futures=True)
        params.append(dict(trainer.model.named_parameters()))
        assert not torch.equal(before, trainer.model.value_embeds["0"])
    assert all(torch.equal(param, params[1][name]) for name, param in params[0].items())


# ---- averages ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 2, 4, 5, 14])
def test_averages_are_of_steps_of_the_run(shards, num_steps, monkeypatch):
    """Also in a run that ends before the first counted step of an average. The norms stay, and averages are no zeros."""
    monkeypatch.setattr(gpt, "AVERAGES_STEPS", 14)  # else each average is the last value
    changes = dict(preset="smoke_frontier", num_iterations=num_steps, extension_steps=0, untie_frac=1.0)
    trainer, step, close = make_trainer(shards, **changes)
    for _ in range(num_steps):
        step()
    trainer.optimizer.finish()
    named = dict(trainer.model.named_parameters())
    before = {name: param.detach().clone() for name, param in named.items()}
    trainer.optimizer.apply_averages()
    close()
    assert [name for name, param in named.items() if not param.isfinite().all()] == []
    for part in ("head", "qk", "up_down"):
        ours, theirs = ([params[name].norm() for name in params if part in name] for params in (named, before))
        assert torch.stack(ours).norm().item() == pytest.approx(torch.stack(theirs).norm().item(), rel=1e-5)
    for name in ("value_embeds.0", "value_embeds.1"):
        assert (named[name] - before[name]).norm() <= before[name].norm() / 2
    if num_steps == 14:  # the last step alone has counted at least once
        assert [name for name in named if ".qk" in name and torch.equal(named[name], before[name])] == []


def test_an_average_that_begins_late_copies_its_first_value(shards):
    """A resumed run with fewer steps may begin after the first counted step."""
    trainer, _, close = make_trainer(shards, preset="smoke_frontier", untie_frac=1.0)
    close()
    averages, updated = trainer.optimizer.averages, trainer.optimizer.updated
    averages.update(12, updated)
    for key, average, selected in averages.rows:
        for bucket in set(selected) & set(updated) if average.num_last == 2 else ():
            assert torch.equal(bucket.state[key], bucket.read_shard()) and bucket.state[key].any()
