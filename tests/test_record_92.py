"""Record 92: the published check values, computed from the independent reading in record92_reference.py."""
import math
from dataclasses import replace

import pytest
import record92_reference as r92
import torch
from record92_reference import F64, MINIATURE, RECORD_92


def printed(values, text, least=0):
    """Whether the values round to the printed ones. least: digits that count where the print leaves zeros out."""
    values = values.flatten().tolist() if torch.is_tensor(values) else list(values)
    expected = text.split()
    assert len(values) == len(expected)
    for value, one in zip(values, expected):
        digits = max(least, len(one.partition(".")[2]))
        assert abs(value - float(one)) <= 0.5000001 * 10.0 ** -digits, (value, one)


def test_events():
    steps = range(RECORD_92.steps)
    assert RECORD_92.split_step == min(s for s in steps if s >= RECORD_92.first(4) and s % 2)
    events = [s for s in steps if r92.table_event(RECORD_92, s)]
    assert len(events) == 382 and events[167:170] == [335, 339, 343] and events[-1] == 1191
    assert len([s for s in steps if s % 2]) == 597


def test_sizes():
    sizes = r92.parameter_sizes(RECORD_92)
    total = {}
    for name, size in sizes.items():
        kind = r92.bank_of(name) or name.split(".")[0]
        total[kind] = total.get(kind, 0) + math.prod(size)
    printed([(total["qk"] + total["vo"]) / 1e6, total["mlp"] / 1e6, total["head"] / 1e6, total["ve"] / 1e6,
             total["table"] / 1e9], "12.4 47.6 38.6 154.5 65.0")
    outputs = [len(r92.bias_start(RECORD_92, name)) for name in ("pre", "post", "mudd", "end")]
    assert outputs == [23, 13, 14, 10]
    root = math.sqrt(1.1)
    starts = [r92.outputs_of(RECORD_92, name) for name in ("pre", "post", "mudd", "end")]
    assert [value for outputs in starts for _, _, value in outputs] == [
        0, 0, 0.25, 0, 0, 0, 0.05, 0.05, 0.25, 0, 0, 0, 0.05, 0.05, 0.05, 0.5,
        0, 0, 0, 0, 0, 0, 2, 2, root, 1, 0, 0.05, root, 1, 0, -0.5, 0, 0, 0, 0, 0, 0, 0, 0]


def test_loss_weights():
    printed([r92.loss_weights(RECORD_92, 119)[0][2], r92.loss_weights(RECORD_92, 514)[0][1]],
            "0.157031 0.231302")


def test_table_rates():
    steps = (1, 335, 339, 681, 1191)
    rates = [0.008 * 70 * r92.lr_factor(RECORD_92, s) for s in steps]
    printed(rates, "0.56 0.777792 0.774885 0.587994 0.168", 6)
    printed([lr * lr * 0.005 * r92.table_settings(RECORD_92, s)[2] for s, lr in zip(steps, rates)],
            "0.00784 0.0151240 0.0300223464 0.0172868497 0.0014112", 7)
    assert [r92.adam_settings(RECORD_92, "ve.1", step) for step in (335, 339)] == [
        (70, (0.75, 0.95), 5), (70, (0.5625, 0.9025), 10)]


def test_hashes():
    tokens = [50256, 464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290]
    assert r92.ngram_rows(RECORD_92, tokens) == (
        [42301439, 30057605, 36955973, 25891877, 38010350, 32090293, 11042845, 26377297, 24990447, 11672922],
        [84602879, 84602879, 79010554, 60889994, 59548946, 49495447, 46783416, 46526008, 71524462, 72952911])
    assert r92.sign_rows(RECORD_92, tokens) == (
        [0, 3392, 2524, 1506, 6399, 4494, 1744, 3921, 8175, 6359],
        [0, 0, 6652, 794, 191, 3560, 4955, 4636, 4146, 1137])
    tokens = [(7919 * i * i + 13 * i) % 50257 for i in range(4096)]
    assert [sum(rows) for rows in r92.ngram_rows(RECORD_92, tokens)] == [87194377233, 260398221617]
    assert [sum(rows) for rows in r92.sign_rows(RECORD_92, tokens)] == [16689613, 16812704]


@pytest.mark.parametrize("rank, sums, offsets", [
    (0, [192415444, 191891985, 293267340, 569846160], [516, 994, 6076, 28583]),
    (3, [192582335, 191930429, 292450529, 569986423], [19380, 19858, 24940, 47447])])
def test_candidate_sets(rank, sums, offsets):
    offset, distinct = r92.sweep_start(RECORD_92, rank), []
    for c, (size, count) in enumerate([(16384, 10240), (16384, 10240), (49152, 14336), (49152, 24576)]):
        a = [(31 * i * i + 7 * i + 1009 * c) % 50257 for i in range(size)]
        targets = [min(one, one * one // 50257) for one in a]
        classes, offset = r92.candidate_set(RECORD_92, targets, offset, count)
        assert len(set(classes)) == count and set(targets) <= set(classes) and classes == sorted(classes)
        assert (sum(classes), offset) == (sums[c], offsets[c])
        distinct.append(len(set(targets)))
    assert distinct == [10087, 10109, 11497, 11487]


def test_candidate_fallback():
    """All classes of the sweep's draw are targets: the negatives are every 33rd of the other 300 classes."""
    shape = replace(MINIATURE, vocab=600)
    targets = [20011 * i % 600 for i in range(300)]         # the first 271 of them are the whole draw
    classes, offset = r92.candidate_set(shape, targets, 0, 309)
    others = sorted(set(range(600)) - set(targets))
    assert offset == 271 and classes == sorted(targets + others[::33][:9])
    assert r92.candidate_set(shape, targets, 7, 300) == (sorted(targets), 7)
    assert r92.columns_of([9, 4, 3], [3, 9]) == [1, -1, 0]


@pytest.mark.parametrize("name", ["qk.0", "v.1", "o.1"])
def test_anvil_of_compact_storage(name):
    """Matrices without the rows or columns that nothing reads change as within the recipe's larger ones."""
    padded = r92.padded_size(MINIATURE, name)
    generator = torch.Generator().manual_seed(1)
    small = r92.parameter_sizes(MINIATURE)[name][-2:]
    W, *Gs = [torch.randn(small, generator=generator, dtype=F64) for _ in range(4)]
    grow = lambda x: torch.nn.functional.pad(x, (0, padded[1] - small[1], 0, padded[0] - small[0]))
    state, large, large_state = r92.anvil_start(W, padded), grow(W), r92.anvil_start(grow(W), padded)
    for G in Gs:
        W, state = r92.anvil(W, G, state, (0.9, 0.85, 0.44), 0.02, padded)
        large, large_state = r92.anvil(large, grow(G), large_state, (0.9, 0.85, 0.44), 0.02, padded)
    torch.testing.assert_close(grow(W), large, rtol=1e-9, atol=1e-11)


def test_loss():
    i, j = torch.arange(4, dtype=F64)[:, None], torch.arange(8, dtype=F64)
    raw = (4 * torch.sin(0.9 * (i + 1) * (j + 2))).requires_grad_(True)
    targets, prefixes, weights = [1, 5, 5, 7], [-1, 2, 1, 5], [1, 0.5, 0.2]
    rows, gradient = r92.loss_and_gradient(raw.detach(), targets, prefixes, weights, 0.25)
    printed(rows, "4.859126 5.770134 5.838379 2.146781")
    printed([rows.sum()], "18.614419")
    printed(gradient[0], "0.304868 -0.535431 0.010243 0.002144 0.003949 -0.444442 0.213391 0.302564")
    printed(gradient[3], "0.271379 0.002699 0.381673 0.005355 0.109937 -0.118700 0.011015 -0.277686")
    auto, = torch.autograd.grad(r92.loss_and_gradient(raw, targets, prefixes, weights, 0.25)[0].sum(), raw)
    torch.testing.assert_close(gradient[:2], auto[:2], rtol=1e-12, atol=1e-14)
    printed((gradient - auto)[2:].abs().max(dim=1).values, "0.052769 0.137011")


def test_yarn():
    def significant(values, text):
        for value, one in zip(values.tolist(), text.split(), strict=True):
            assert "%.7g" % value == "%.7g" % float(one)

    index = [0, 8, 16, 31]
    significant(r92.yarn(RECORD_92, 0, 1)[0][index], "0.7499319 0.06436969 0.009314843 0.0003255208")
    significant(r92.yarn(RECORD_92, 0, 4)[0][index], "0.7499319 0.03491806 0.004657422 0.0001627604")
    significant(r92.yarn(RECORD_92, 1, 1)[0][index], "1 0.1000422 0.01234084 0.0004185268")
    significant(r92.yarn(RECORD_92, 1, 4)[0][index], "1 0.07363021 0.006769144 0.0002253606")
    scales = [r92.yarn(RECORD_92, kind, stage)[1] for kind in (0, 1) for stage in (0, 1, 2, 4)]
    printed(scales, "0.13 0.158564 0.174764 0.181136 0.085 0.099404 0.108390 0.112011", least=6)


TOY = [bytes([i]) for i in range(256)] + [
    b"th", b"he", b" t", b" th", b"the", b" the", b"in", b"an", b"er", b"and", b" a", b" an", b" and", b"'s",
    b"\n\n", b"re", b"ther", b"12", b"123", b"  "]


def test_prefixes():
    prefixes = r92.prefix_table(TOY)
    assert len(TOY) == 276 and prefixes[:256] == [-1] * 256
    assert [TOY[i] for i in prefixes[256:]] == [
        b"t", b"h", b" ", b" t", b"th", b" th", b"i", b"a", b"e", b"an", b" ", b" a", b" an", b"'", b"\n",
        b"r", b"the", b"1", b"12", b" "]


def test_packing():
    """Two ranks, 16 tokens, documents cut at 7. A call that the shard cannot fill is dropped."""
    shape, bos = replace(MINIATURE, attention_cap=5), MINIATURE.bos
    document = lambda first, size: [bos, *range(first, first + size - 1)]
    shard = [1, 2, *document(0, 3), *document(10, 9), *document(20, 7), *document(30, 12), *document(40, 1),
             *document(40, 20), *document(20, 8), *document(10, 9)]
    call, = r92.packed_batches(shape, [shard])
    first = document(0, 3) + document(10, 7) + document(20, 7)
    second = document(30, 7) + [bos] + document(40, 7) + document(20, 2)
    assert call == [(first, [3, 8, 10, 15, 16]), (second, [5, 7, 8, 13, 15, 16])]
    assert len(list(r92.packed_batches(shape, [shard, shard]))) == 2
    tail = [*document(0, 9), *document(10, 4), *document(20, 6)]           # used up to its last token
    one = [(document(0, 7) + document(10, 4) + document(20, 6), [5, 7, 11, 16])]
    assert list(r92.packed_batches(replace(shape, ranks=1), [tail])) == [one]
    assert r92.validation_boundaries(shape, shard[:-1]) == [2, 5, 14, 21, 33, 34, 54, 62, len(shard) - 1]


def test_unused_entries():
    """All parameters act, but some entries of the per-layer scalars do not."""
    p, generator, shard = r92.init_params(MINIATURE, 3, spread=0.3), torch.Generator().manual_seed(0), []
    p["head"] = 50 * p["head"]
    while len(shard) < 6000:
        size = int(torch.randint(3, 30, (1,), generator=generator))
        shard += [MINIATURE.bos] + torch.randint(0, 12, (size,), generator=generator).tolist()
    batch = list(r92.packed_batches(MINIATURE, [shard]))[14]
    grads = r92.gradients(MINIATURE, p, batch, 14, [-1] * MINIATURE.vocab, [5, 9])[1]
    assert all(g.abs().max() > 0 for g in grads.values())
    unused = {name: [[layer for layer in range(11) if grads[name][layer, i] == 0] for i in range(2)]
              for name in ("scales", "residual", "output")}
    assert unused == {"scales": [[4, 6, 7, 9]] * 2, "residual": [[6, 10], [10]],
                      "output": [[4, 6, 7, 9, 10], [7, 10]]}


def test_write_back():
    """Weights at each tick are the step's number times a pattern, so that averages are of known size."""
    shape, averages = MINIATURE, {}
    base, other = r92.init_params(shape, 2, spread=0.1), r92.init_params(shape, 7, spread=0.1)
    base = {name: value for name, value in base.items() if r92.averages_of(name)}
    for step in range(shape.steps):
        p = {name: value + step * other[name] for name, value in base.items()}
        averages = r92.tick(shape, step, p, averages)
    new = r92.write_back(shape, p, averages)

    def mean(steps, rates):
        value = float(steps[0])
        for step, rate in zip(steps[1:], rates):
            value = (1 - rate) * value + rate * step
        return value

    ema = mean([16, 17, 19, 21, 23, 25], [0.51] * 4 + [0.3])
    tail, value, blend = mean([21, 25], [0.5]), mean([19, 23], [0.5]), mean([17, 21, 24, 25], [0.4] * 3)
    at = {"head": 25 + 0.65 * (ema - 25), "qk": 25 + 0.55 * (blend - 25), "ve": value,
          "vo": tail + 0.3493 * (blend - tail)}
    at["embed"], at["mlp"] = at["head"], at["vo"]
    factors = {}
    for name in base:
        bank = r92.bank_of(name) or name.split(".")[0]
        plain = base[name] + at[bank] * other[name]
        factor = float((new[name] * plain).sum() / (plain * plain).sum())
        torch.testing.assert_close(new[name], factor * plain, rtol=1e-9, atol=1e-11)
        assert factors.setdefault(bank, factor) == pytest.approx(factor, rel=1e-9)
    assert factors.pop("ve") == pytest.approx(1, rel=1e-9)
    assert min(abs(factor - 1) for factor in factors.values()) > 0.01
