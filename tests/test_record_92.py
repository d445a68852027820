"""Record 92: the published check values, computed from the independent reading in record92_reference.py."""
import math
import re
from dataclasses import replace

import frontier_reference as r89
import pytest
import record92_reference as r92
import torch
from record92_reference import F64, MINIATURE, RECORD_92


def printed(values, text, least=0):
    """Whether the values round to the printed ones, each to within half of its last digit.

    least: digits after the point that count where the print leaves zeros out.
    """
    values = values.flatten().tolist() if torch.is_tensor(values) else list(values)
    expected = text.split()
    assert len(values) == len(expected)
    for value, one in zip(values, expected):
        digits = max(least, len(one.partition(".")[2]))
        assert abs(value - float(one)) <= 0.5000001 * 10.0 ** -digits, (value, one)


def test_stages_tokens_and_events():
    steps = range(RECORD_92.steps)
    assert [RECORD_92.first(stage) for stage in range(1, 6)] == [320, 681, 1107, 1174, 1194]
    assert sum(8 * RECORD_92.stage_tokens[RECORD_92.stage(step)] for step in steps) == 328663040
    assert RECORD_92.split_step == min(s for s in steps if s >= RECORD_92.first(4) and s % 2)
    events = [s for s in steps if r92.table_event(RECORD_92, s)]
    assert len(events) == 382 and events[167:170] == [335, 339, 343] and events[-1] == 1191
    assert len([s for s in steps if s % 2]) == 597
    counts = [r92.candidate_count(RECORD_92, s) for s in steps]
    assert [(s, counts[s]) for s in steps if s == 0 or counts[s] != counts[s - 1]] == [
        (0, 10240), (681, 14336), (965, 24576), (1107, None)]


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


def test_schedules():
    steps = [234, 235, 319, 320, 514, 680, 681, 965, 1106, 1107, 1173, 1174]
    printed([r92.lr_factor(RECORD_92, s) for s in steps],
            "1 0.999255 0.936702 1.408383 1.156596 0.941149 1.049989 0.617947 0.403447 0.391182 0.301361 "
            "0.3", least=6)
    printed([r92.lookahead(RECORD_92, s) for s in (119, 239, 1144, 1145, 1174, 1193)],
            "0.889667 0.929667 0.93 0.9284 0.882 0.8516", 6)
    printed([r92.loss_weights(RECORD_92, 119)[0][2], r92.loss_weights(RECORD_92, 514)[0][1]],
            "0.157031 0.231302")
    prefix = [r92.loss_weights(RECORD_92, s)[1] for s in range(RECORD_92.steps)]
    assert [(s, prefix[s]) for s in range(1, len(prefix)) if prefix[s] != prefix[s - 1]] == [
        (320, 0.20), (411, 0.15), (501, 0.10), (591, 0.05), (681, 0)]


def test_table_rates():
    steps = (1, 335, 339, 681, 1191)
    rates = [0.008 * 70 * r92.lr_factor(RECORD_92, s) for s in steps]
    printed(rates, "0.56 0.777792 0.774885 0.587994 0.168", 6)
    printed([lr * lr * 0.005 * r92.table_settings(RECORD_92, s)[2] for s, lr in zip(steps, rates)],
            "0.00784 0.0151240 0.0300223464 0.0172868497 0.0014112", 7)


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


def test_six_maps():
    values = [0.0001, 0.001, 0.003, 0.01, 0.1, 0.3, 0.6, 0.9, 1 / 1.05, 0.9525]
    printed([float(r92.six_maps(torch.tensor([[value]], dtype=F64))) for value in values],
            "0.06425008 0.58454118 0.99506720 1.00026686 0.99959977 0.99960094 1.00007966 1.00009960 "
            "1.00040139 23.176")
    a, b, c = r92.MAPS[0]
    x = 1 / 1.05
    printed([a * x + b * x ** 3 + c * x ** 5], "1.531691")
    printed([math.prod(a for a, _, _ in r92.MAPS)], "643.13")


@pytest.mark.parametrize("size, first, second", [
    ((4, 6), ("0.430795 0.655441 0.404026", "0.351734 0.535187 0.468610", "-0.001025 -0.053924 -0.090892",
              "0.354581"),
     ("0.660079 -0.191819 -0.097498", "-0.016206 -0.049512 -0.088542", "0.341779",
      "0.036507 0.046968 0.023353 0.028872 0.029747 0.024571")),
    ((6, 4), ("0.430795 0.657423 0.575803", "0.351734 0.536770 0.470130", "-0.002845 -0.056735 -0.093358",
              "0.362386"),
     ("0.253460 0.076627 -0.346547", "-0.009984 -0.058894 -0.083459", "0.372705",
      "0.029457 0.041447 0.029371 0.029833 0.030857 0.029043"))])
def test_anvil(size, first, second):
    i = torch.arange(1, size[0] + 1, dtype=F64)[:, None]
    j = torch.arange(1, size[1] + 1, dtype=F64)
    W = 0.1 * torch.cos(i + 0.5 * j)
    gradients = [torch.sin(0.7 * i * j), torch.cos(0.3 * i + 0.9 * j)]
    state = r92.anvil_start(W, size)
    for G, weight, expected in zip(gradients, (1.0, 0.4385), (first, second)):
        settings = (0.93, 0.85, weight)
        X = r92.whiten(r92.rails(G, state, *settings)[0])
        scaled = r92.equalise(X, state.energy, size)[0]
        W, state = r92.anvil(W, G, state, settings, 0.023, size)
        if weight == 1.0:
            printed(X[0, :3], expected[0])
            expected = expected[1:]
        printed(scaled[0, :3], expected[0])
        printed(W[0, :3], expected[1])
        printed([torch.linalg.norm(W)], expected[2])
    printed(state.energy, second[3])


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


def test_shape_factors():
    hidden, dim = r92.padded_size(RECORD_92, "mlp.8b.in")
    printed([math.sqrt(hidden / dim), 2 * math.sqrt(hidden / dim)], "1.914854 3.829708")
    W, G = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(2), dtype=F64)
    for name, step, settings, multiplier in [("mlp.3.out", 3, (0.898, 0.898, 1), 2),
                                             ("mlp.3.in", 12, (0.93, 0.85, 0.4385), 1)]:
        lr = 0.023 * r92.lr_factor(MINIATURE, step)
        expected = r92.anvil(W, G, r92.anvil_start(W, (48, 32)), settings, lr, (48, 32), multiplier)[0]
        new = r92.anvil_step(MINIATURE, step, name, W, G, None)[0]
        torch.testing.assert_close(new, expected, rtol=1e-12, atol=1e-14)
    assert r92.padded_size(RECORD_92, "qk.5") == (256, 768)
    assert r92.padded_size(RECORD_92, "v.1") == r92.padded_size(RECORD_92, "o.8") == (768, 768)


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


def test_table_update():
    p, v = torch.zeros(1, 4, dtype=F64), torch.zeros(1, dtype=F64)
    events = [([0.3, -0.2, 0.1, 0.05], 0.95, 5, "-0.890086 0.593390 -0.296695 -0.148348", "0.00178125"),
              ([0, 0, 0, 0], 0.95, 5, "-0.890086 0.593390 -0.296695 -0.148348", None),
              ([-0.1, -0.2, 0.4, 0], 0.95, 5, "-0.558033 1.243540 -1.596995 -0.148348", "0.00423258"),
              ([0.2, 0.2, -0.2, 0.1], 0.9025, 10, "-1.335291 0.446783 -0.794696 -0.536977", "0.00698865")]
    for t, (g, beta2, decay, rows, second) in enumerate(events, 1):
        p, v = r92.table_update(p, v, torch.tensor([g], dtype=F64), t, 0.56, beta2, decay)
        printed(p, rows)
        if second:
            printed(v, second)


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


def test_attention_boundaries():
    ends = r92.attention_boundaries([3072, 3100, 8220, 8221], RECORD_92.attention_cap)
    assert ends == [2560, 3072, 3100, 5660, 8220, 8221]


TOY = [bytes([i]) for i in range(256)] + [
    b"th", b"he", b" t", b" th", b"the", b" the", b"in", b"an", b"er", b"and", b" a", b" an", b" and", b"'s",
    b"\n\n", b"re", b"ther", b"12", b"123", b"  "]


def encode(text):
    """Tokens of ASCII text by the toy vocabulary, with the pre-tokeniser's pattern."""
    number, out = {token: i for i, token in enumerate(TOY)}, []
    pattern = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    for word in re.findall(pattern, text):
        pieces = [word[i:i + 1].encode() for i in range(len(word))]
        while True:
            ranks = [number.get(a + b, 999) for a, b in zip(pieces, pieces[1:])]
            if min(ranks, default=999) == 999:
                break
            i = ranks.index(min(ranks))
            pieces[i:i + 2] = [pieces[i] + pieces[i + 1]]
        out += [number[piece] for piece in pieces]
    return out


def test_prefixes_and_mask():
    prefixes = r92.prefix_table(TOY)
    assert len(TOY) == 276 and prefixes[:256] == [-1] * 256
    assert [TOY[i] for i in prefixes[256:]] == [
        b"t", b"h", b" ", b" t", b"th", b" th", b"i", b"a", b"e", b"an", b" ", b" a", b" an", b"'", b"\n",
        b"r", b"the", b"1", b"12", b" "]
    pairs = r92.impossible_pairs(TOY)
    assert len(pairs) == 38 and len({(before, after >> 3) for before, after in pairs}) == 34
    number = {token: i for i, token in enumerate(TOY)}
    for before, after in [(b" ", b"the"), (b"a", b"n"), (b"th", b"er"), (b"12", b"3"), (b"re", b"re"),
                          (b"  ", b"and")]:
        assert (number[before], number[after]) in pairs
    ascii_tokens = [i for i, token in enumerate(TOY) if token.isascii() and i > 0]
    lost = {(before, after) for before in ascii_tokens for after in ascii_tokens
            if encode((TOY[before] + TOY[after]).decode()) != [before, after]}
    assert (len(ascii_tokens) ** 2, len(lost)) == (21609, 353) and pairs <= lost


def test_averages():
    ticks = r92.average_ticks(RECORD_92)
    names = ["tail-ema", "tail-avg", "value", "bank-blend"]
    assert [len(ticks[name]) for name in names] == [150, 63, 62, 76]
    printed([ticks["tail-ema"][897]], "0.0133332")
    ages, firsts = [], []
    for name in names:
        weight, age = 1.0, 0.0
        for step in sorted(ticks[name], reverse=True):      # weight: what later ticks leave of this one
            age += weight * ticks[name][step] * (1193 - step)
            first, weight = weight, weight * (1 - ticks[name][step])
        ages.append(age)
        firsts.append(first)
    printed(ages, "128.7 48.6 50.6 122.9")
    printed(firsts, "0.136 0.0077 0.0083 0.132")


def boundaries_of(T):
    return [5, 6, T - 3, T]


@pytest.mark.parametrize("layer, narrow", [(0, 8), (1, 8), (2, 8), (5, 8), (3, 4), (10, 4)])
def test_attention_as_in_record_89(layer, narrow):
    """With heads of one width the attention of a layer is that of record 89's reading, up to the gate."""
    shape = replace(MINIATURE, qk_narrow=narrow, v_half=8)
    generator = torch.Generator().manual_seed(layer)
    normal = lambda *size: torch.randn(size, generator=generator, dtype=F64)
    T, D, H, K = 19, shape.dim, shape.heads, shape.v_full
    old = {"%s.%d" % (name, layer): 0.3 * normal(D, D) for name in "qkv"}
    old.update({"o.%d" % layer: torch.eye(D, dtype=F64), "s0.%d" % layer: 0.7, "s1.%d" % layer: 1.0})
    gate, u, table, extra = normal(H, 12), normal(T, D), normal(T, D), normal(T, D)
    p = {"scales": torch.full((r92.LAYERS, 2), 0.7, dtype=F64), "v.%d" % layer: old["v.%d" % layer],
         "qk.%d" % layer: torch.stack([old["q.%d" % layer], old["k.%d" % layer]]).reshape(H, 2 * K, D),
         "ve_gate.%d" % layer: gate}
    old["ve_gate.%d" % layer] = gate
    c = {"xsa.%d" % layer: normal(T, H), "gate.%d" % layer: normal(T, H)}
    c.update(m6=normal(T, 1), m7=normal(T, 1))
    c89 = {(layer, name.split(".")[0]): value for name, value in c.items()}
    c89.update({(10, "dc_w1"): normal(T, H), (10, "dc_w2"): torch.zeros(T, H, dtype=F64)})
    frequencies, others = normal(2, K // 4).abs()
    windows = r92.Windows(6, 9, frequencies, others, 0.9, 0.9)
    if layer in r92.WIDE:
        windows = windows._replace(narrow=others, wide=frequencies, narrow_scale=5.0)
    else:
        windows = windows._replace(wide_scale=5.0)
    ends = boundaries_of(T)
    segments = torch.tensor([sum(t >= end for end in ends) for t in range(T)])
    y = r92.attention(shape, p, layer, u, {layer: table}, extra, c, segments, windows)
    old_shape = r89.Shape(vocab=64, dim=D, heads=H, head_dim=K, hidden=8, bigram_rows=9)
    expected = r89.attention(old, old_shape, layer, u, table if layer in r92.VALUE else None, extra, c89,
                             list(range(T)), segments, (6, 9, frequencies, 0.9), 3)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)


def as_record_89(shape, p, tokens):
    """Parameters of record 89's model that computes the same: what it has besides acts with zeros."""
    D, H, K = shape.dim, shape.heads, shape.v_full
    old = {name: p[name] for name in ("embed", "head", "smear", "smear_gate", "skip", "gate_scale")}
    old.update({"ve.%d" % i: p["ve.%d" % layer] for layer, i in r89.VE_TABLE.items() if layer != 9})
    old.update({"ve_gate.%d" % layer: p["ve_gate.%d" % layer] for layer in (1, 2, 8)})
    old.update({"ve.3": torch.zeros(shape.vocab, D, dtype=F64), "ve_gate.9": torch.zeros(H, 12, dtype=F64)})
    old.update(bigram=r92.ngram_vectors(shape, p, tokens), signs=torch.ones(1, D, dtype=F64))
    for layer in range(11):
        old["s0.%d" % layer], old["s1.%d" % layer] = p["scales"][layer]
        old["attn_residual.%d" % layer], old["mlp_residual.%d" % layer] = p["residual"][layer]
        old["attn_out.%d" % layer], old["mlp_out.%d" % layer] = p["output"][layer]
        slots = [slot for slot in r92.MLPS if slot.rstrip("b") == str(layer)]
        for part, name in (("in", "up"), ("out", "down")):      # two MLPs of one input are a wider one
            matrices = [p["mlp.%s.%s" % (slot, part)] for slot in slots] or [torch.zeros(4, D, dtype=F64)]
            old["%s.%d" % (name, layer)] = torch.cat(matrices)
        old.update({"%s.%d" % (name, layer): torch.zeros(D, D, dtype=F64) for name in "qkvo"})
        if layer in r92.ATTENTION:
            width, v_dim = r92.qk_width(shape, layer), r92.v_width(shape, layer)
            qk = p["qk.%d" % layer].reshape(2, H, width, D)
            v, o = p["v.%d" % layer].reshape(H, v_dim, D), p["o.%d" % layer].reshape(D, H, v_dim)
            grow = lambda x, n, axis: torch.cat([x, torch.zeros_like(x)][:K // n], dim=axis)
            for name, matrix in zip("qk", grow(qk, width, 2)):
                old["%s.%d" % (name, layer)] = matrix.reshape(D, D)
            old["v.%d" % layer] = grow(v, v_dim, 1).reshape(D, D)
            old["o.%d" % layer] = grow(o, v_dim, 2).reshape(D, D)
    for name, new_name in [("pre", "pre"), ("post", "post"), ("mudd", "mudd"), ("out", "end")]:
        w2, bias, at = {}, {}, 0
        for output, size, _ in r92.outputs_of(shape, new_name):
            w2[output] = p[new_name + ".w2"][at:at + size]
            bias[output] = p[new_name + ".bias"][at:at + size]
            at += size
            if new_name == "end":                   # the same for all groups
                w2[output] = w2[output] + p["end.groups"][int(output[1:]), :1]
        outputs = [(c if c[0] in "mn" or c == "skip" else "%s.%d" % (c.replace("bigram", "ngram"), layer),
                    size) for layer, c, size, _ in r89.outputs_of(name, r89.Shape(64, D, H, K, 8, 9))]
        old[name + ".w1"] = p[new_name + ".w1"]
        old[name + ".w2"] = torch.cat([w2.get(c, torch.zeros(size, shape.gate_hidden, dtype=F64))
                                       for c, size in outputs])
        old[name + ".bias"] = torch.cat([bias.get(c, torch.zeros(size, dtype=F64)) for c, size in outputs])
    return old


def test_forward_as_in_record_89(monkeypatch):
    """The whole model as record 89's reading of a model with zeros where record 92 has nothing.

    Not compared: the last five sources of the end and coefficients that differ between groups.
    """
    shape, T = MINIATURE, 19
    p = r92.init_params(shape, 11, spread=0.2)
    generator = torch.Generator().manual_seed(12)
    tokens = torch.randint(0, 60, (T,), generator=generator)
    half = torch.arange(shape.dim) % shape.v_full < shape.v_half
    for name in p:
        if name.startswith("qk."):
            p[name] = 1000 * p[name]                # so that the norm's epsilon does not matter
        elif name.startswith("ve."):
            p[name] = 30 * p[name] * (half if int(name[3:]) in r92.HALF_V else 1)
        elif name in ("head", "embed"):
            p[name] = 50 * p[name]
    p["end.groups"] = p["end.groups"][:, :1].expand(-1, shape.groups, -1).clone()
    for name in ("end.w2", "end.bias", "end.groups"):
        p[name][5:] = 0
    frequencies = torch.tensor([0.7, 0.2], dtype=F64)
    ends = boundaries_of(T)
    segments = [sum(t >= end for end in ends) for t in range(T)]
    windows = r92.Windows(6, 9, frequencies, frequencies, 1.8, 0.9)
    z = r92.forward(shape, p, tokens, ends, windows)[1]
    monkeypatch.setattr(r89, "bigram_rows_of", lambda tokens, starts, rows: list(range(T)))
    monkeypatch.setattr(r89, "sign_rows_of", lambda tokens, starts, rows: [0] * T)
    old_shape = r89.Shape(vocab=64, dim=32, heads=4, head_dim=8, hidden=48, bigram_rows=T, gate_hidden=6)
    expected = r89.forward(as_record_89(shape, p, tokens), old_shape, tokens, [0], segments,
                           (6, 9, frequencies, 0.9))
    assert expected.std() > 0.5
    torch.testing.assert_close(z, expected, rtol=1e-8, atol=1e-8)
    classes = [3, 50, 63]
    part = r92.forward(shape, p, tokens, ends, windows, classes)
    torch.testing.assert_close(part[1], z[:, classes], rtol=1e-12, atol=1e-12)


def test_sources_of_the_end():
    """Logits are the normalised stream. A source of a single coefficient moves it along that source only."""
    shape, tokens = MINIATURE, [3, 5, 4, 9, 11, 2]
    p = r92.init_params(shape, 13, spread=0.2)
    p["head"] = torch.eye(shape.vocab, shape.dim, dtype=F64)
    p["mlp.10.out"] = 0 * p["mlp.10.out"]               # so that x is proportional to z10
    for name in ("end.w2", "end.bias", "end.groups"):
        p[name] = 0 * p[name]

    def stream(**changes):
        return r92.forward(shape, {**p, **changes}, tokens, [6], r92.windows_at(shape, 0))[0][:, :shape.dim]

    def moved(source):
        bias = torch.zeros(10, dtype=F64)
        bias[source] = 9.0
        return stream(**{"end.bias": bias})

    def check(stretch, directions):
        for row, *basis in zip(stretch, *directions):
            basis = torch.stack(basis, dim=1)
            rest = row - basis @ torch.linalg.lstsq(basis, row[:, None]).solution[:, 0]
            assert rest.abs().max() < 1e-8

    plain = stream()
    for source, layer in [(3, 1), (5, 2), (6, 10), (7, 8)]:
        assert (moved(source) - plain).abs().max() > 1e-4
        check(moved(source), [plain, p["ve.%d" % layer][tokens]])
    assert (moved(1) - plain).abs().max() > 1e-2
    check(moved(9), [plain, moved(1)])                  # h7 and RMSn(h7)
    torch.testing.assert_close(moved(8), plain, rtol=0, atol=1e-6)
    groups = torch.zeros_like(p["end.groups"])
    groups[1, 2] = 5.0
    grown = stream(**{"end.groups": groups})
    ratio = grown / plain
    width = shape.dim // shape.groups
    outside = torch.cat([ratio[:, :2 * width], ratio[:, 3 * width:]], dim=1)
    torch.testing.assert_close(outside, outside[:, :1].expand_as(outside), rtol=1e-9, atol=1e-9)
    assert (ratio[:, 2 * width:3 * width] - outside[:, :1]).abs().max() > 0.1


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


def random_batches(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shard = []
    while len(shard) < 6000:
        size = int(torch.randint(3, 30, (1,), generator=generator))
        shard += [shape.bos] + torch.randint(0, 12, (size,), generator=generator).tolist()
    return list(r92.packed_batches(shape, [shard]))


PREFIXES = [-1 if i % 3 else i // 2 for i in range(MINIATURE.vocab)]


def large_gradients(shape, step):
    """Parameters whose paths all act, a batch of the step, the gradients."""
    p, batch = r92.init_params(shape, 3, spread=0.3), random_batches(shape)[step]
    p["head"] = 50 * p["head"]
    return p, batch, r92.gradients(shape, p, batch, step, PREFIXES, [5, 9])[1]


@pytest.mark.parametrize("step", [1, 14, 22])
def test_gradients_against_differences(step):
    """Gradients along random directions. One target per token, so that the loss has this gradient."""
    shape = replace(MINIATURE, token_weights=((1,),) * 5)
    p, batch, grads = large_gradients(shape, step)
    generator = torch.Generator().manual_seed(4)
    along = {name: torch.randn(p[name].shape, generator=generator, dtype=F64) for name in grads}

    def loss(names, h):
        moved = {**p, **{name: p[name] + h * along[name] for name in names}}
        return r92.gradients(shape, moved, batch, step, PREFIXES, [5, 9])[0]

    for names in [grads, ["table"], ["ve.8"], ["end.groups"], ["scales"], ["output"], ["pre.w2"]]:
        slope = (loss(names, 1e-6) - loss(names, -1e-6)) / 2e-6
        expected = sum(float((grads[name] * along[name]).sum()) for name in names)
        assert abs(expected) > 1e-4 and slope == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_unused_entries():
    """All parameters act, but some entries of the per-layer scalars do not."""
    grads = large_gradients(MINIATURE, 14)[2]
    assert all(g.abs().max() > 0 for g in grads.values())
    unused = {name: [[layer for layer in range(11) if grads[name][layer, i] == 0] for i in range(2)]
              for name in ("scales", "residual", "output")}
    assert unused == {"scales": [[4, 6, 7, 9]] * 2, "residual": [[6, 10], [10]],
                      "output": [[4, 6, 7, 9, 10], [7, 10]]}


def test_adam_as_in_record_89():
    """Rule and settings, which differ only for the value embeddings and what is not in record 89."""
    generator = torch.Generator().manual_seed(5)
    p = torch.randn(3, 5, generator=generator, dtype=F64)
    q, old, new = p.clone(), r89.AdamState(), r92.adam_start(p)
    for _ in range(3):
        g = torch.randn(3, 5, generator=generator, dtype=F64)
        p, new = r92.adam(p, g, new, 0.008 * 5 * 1.3, (0.9, 0.95), 150)
        r89.adam_update(q, g, old, 5, (0.9, 0.95), 150, 1.3)
    torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    for name, other in [(name, name) for name in r92.parameter_sizes(RECORD_92)] + [
            ("scales", "s0"), ("residual", "attn_residual"), ("output", "mlp_out"), ("end.w1", "out.w1"),
            ("end.w2", "out.w2"), ("end.bias", "out.bias"), ("end.groups", "out.w1")]:
        kind = name.split(".")[0]
        if kind in ("ve", "table", "signs") or r92.bank_of(name):
            continue
        if name != other or kind not in ("scales", "residual", "output", "end"):
            assert r92.adam_settings(RECORD_92, name, 600) == r89.adam_settings(other), name
    assert [r92.adam_settings(RECORD_92, "ve.1", step) for step in (335, 339)] == [
        (70, (0.75, 0.95), 5), (70, (0.5625, 0.9025), 10)]


def test_updates_sum_the_gradients_since_the_last():
    """Table and value embeddings from 8 to 11, the rest on odd steps; the tied head takes both gradients."""
    p, generator = r92.init_params(MINIATURE, 1, spread=0.1), torch.Generator().manual_seed(6)
    p["embed"] = p["head"].clone()
    names = ["table", "ve.1", "ve.2", "ve.8", "ve.10", "skip", "head", "embed"]
    old, state, sums = p, r92.start_state(MINIATURE, p), {}
    for step in range(8, 12):
        grads = {name: torch.randn(p[name].shape, generator=generator, dtype=F64) for name in names}
        sums = {name: sums.get(name, 0) + g for name, g in grads.items()}
        new, state = r92.update(MINIATURE, p, grads, state, step)
        factor = r92.lr_factor(MINIATURE, step)
        for name in ("table", "ve.2"):
            assert torch.equal(new[name], p[name]) == (step < 11)
        if step % 2:
            g, start = sums["head"] + sums["embed"], r92.adam_start(p["head"])
            if step == 9:
                expected = r92.adam(p["head"], g, start, 0.008 * factor, (0.5, 0.95), 150)[0]
                torch.testing.assert_close(new["head"], expected, rtol=1e-12, atol=1e-14)
            sums["head"], sums["embed"] = 0, 0
        assert torch.equal(new["head"], p["head"]) == (step % 2 == 0)
        assert torch.equal(new["embed"], new["head"])
        p = new
    lr = 0.008 * 70 * factor
    rows = r92.table_update(old["table"], 0, sums["table"], 1, lr, 0.9025, 10)[0]
    torch.testing.assert_close(p["table"], rows, rtol=1e-12, atol=1e-14)
    rows = r92.adam(old["ve.2"], sums["ve.2"], r92.adam_start(old["ve.2"]), lr, (0.5625, 0.9025), 10)[0]
    torch.testing.assert_close(p["ve.2"], rows, rtol=1e-12, atol=1e-14)


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


@pytest.fixture(scope="module")
def trained():
    p = r92.init_params(MINIATURE, 0)
    return p, *r92.train(MINIATURE, p, random_batches(MINIATURE), prefix_of=PREFIXES)


def test_training(trained):
    start, p, state, losses = trained
    per_token = [loss / MINIATURE.stage_tokens[MINIATURE.stage(step)] for step, loss in enumerate(losses)]
    assert per_token[-1] < 3.0 < 4.5 < per_token[0]
    assert state["table_t"] == state["adam"]["ve.8"].t == 8 and state["adam"]["skip"].t == 13
    assert state["adam"]["embed"].t == state["adam"]["head"].t == 13      # the split copied the count 11
    assert set(state["sums"]) == {"table"} | {"ve.%d" % layer for layer in r92.VALUE}   # the last two steps'
    last = state["last"]
    assert not torch.equal(last["embed"], last["head"])
    touched = {row for batch in random_batches(MINIATURE)[:24] for buffer, _ in batch
               for rows in r92.ngram_rows(MINIATURE, buffer[:-1]) for row in rows}
    moved = {i for i, row in enumerate(last["table"]) if row.abs().sum() > 0}
    assert moved == touched and len(moved) < MINIATURE.table_rows
    assert torch.equal(start["table"], torch.zeros_like(start["table"]))    # arguments stay as they are
    changed = {name for name in p if not torch.equal(p[name], last[name])}
    bank_of = lambda name: r92.bank_of(name) or name.split(".")[0]
    assert changed == {name for name in p if bank_of(name) in ("qk", "vo", "mlp", "head", "embed", "ve")}
    norm = lambda q, bank: sum(float((q[name] ** 2).sum()) for name in q if bank_of(name) == bank)
    for bank in ("qk", "vo", "mlp", "head", "embed"):
        assert norm(p, bank) == pytest.approx(norm(last, bank), rel=1e-12)


def test_tied_until_the_split(trained):
    start, batches = trained[0], random_batches(MINIATURE)
    steps = MINIATURE.split_step + 1
    p, state, losses = r92.train(MINIATURE, start, batches, steps=steps, prefix_of=PREFIXES)
    assert torch.equal(p["embed"], p["head"]) and losses == trained[3][:steps]
    assert state["adam"]["embed"] is state["adam"]["head"]


def test_held_biases(trained):
    start, batches = trained[0], random_batches(MINIATURE)
    p, _, _ = r92.train(MINIATURE, start, batches, steps=4, prefix_of=PREFIXES, hold_biases=True)
    moved = {name: (p[name] != start[name]).tolist() for name in p if name.endswith(".bias")}
    assert moved == {"pre.bias": [True] * 8 + [False] * 4 + [True] * 5,
                     "post.bias": [False] * 4 + [True] * 6 + [False],
                     "mudd.bias": [i not in (6, 7, 8, 9, 12, 13) for i in range(14)],
                     "end.bias": [i != 1 for i in range(10)]}


def test_mask_in_validation(trained):
    p, chunk = trained[1], [MINIATURE.bos, 3, 4, 3, 5]
    plain = r92.validation_loss(MINIATURE, p, [chunk])
    windows = r92.Windows(24, 80, *r92.windows_at(MINIATURE, 25)[2:])
    z = r92.forward(MINIATURE, p, chunk[:-1], [4], windows)[1]
    loss = lambda z: float(torch.nn.functional.cross_entropy(z, torch.tensor(chunk[1:])))
    assert plain == pytest.approx(loss(z), rel=1e-12)
    z[2, 5] = -60
    assert r92.validation_loss(MINIATURE, p, [chunk, chunk], {(4, 5)}) == pytest.approx(loss(z), rel=1e-12)
    assert r92.validation_loss(MINIATURE, p, [chunk], {(4, 5)}) < plain         # the target after 4 is 3
    assert r92.validation_loss(MINIATURE, p, [chunk], {(4, 3)}) > plain + 10
    assert r92.validation_loss(MINIATURE, p, [chunk], {(5, 3)}) == plain
