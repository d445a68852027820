"""A second, independent reading of record 92 (2026-08-30) in float64, written only from its description.

For a reader who checks the recipe: plain PyTorch on the CPU, loops and dense masks, no fast forms. It has
neither FP8 nor bfloat16: nothing is rounded, and the two halves of a matrix weight are one number. One
consequence changes the recipe: large biases of the generators never move in bfloat16, but learn in float64.

Topology says which layer has what, Shape has sizes and constants. Their defaults are the record (RECORD_92).
MINIATURE is a small one, and `shape_of` reads the options of a run of the command line, which `run` repeats.
Storage is compact: rows and slots that nothing reads are not stored. Matrices are outputs x inputs, but both
MLP matrices are hidden x dim. Names and sizes of all parameters: `parameter_sizes`. They live in flat dicts;
no function changes its arguments, all return new values.
"""
import json
import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

import torch

F64 = torch.float64
EPS = 2.0 ** -23
BASE_LR, BASE_DECAY = 0.008, 0.005      # of Adam, multiplied by the numbers of Rates
RECORD_STEPS = 1194


class Rates(NamedTuple):
    """Constants of parameters that Adam trains: learning rate, betas, decay."""
    lr: float
    betas: tuple
    decay: float


RATES = {"head": Rates(1, (0.5, 0.95), 150), "embed": Rates(1, (0.5, 0.95), 150),
         "ve": Rates(70, (0.75, 0.95), 5), "table": Rates(70, (0, 0.95), 5),
         "scalar": Rates(5, (0.9, 0.99), 0), "residual": Rates(5, (0.9, 0.95), 0),
         "output": Rates(1, (0.9, 0.95), 0), "gate": Rates(1, (0.9, 0.99), 1)}


@dataclass(frozen=True)
class Topology:
    """Which layer has what. The last layer also has the dense connections (mudd and end)."""
    layers: int = 11
    attention: tuple = (0, 2, 5, 1, 8, 3, 10)       # layers with attention, in the order of the banks
    paired: tuple = (0, 2, 5)
    wide: tuple = (3, 10)                           # wide Q and K, long window, key offset, attention gate
    half_v: tuple = (1, 8)
    xsa: tuple = (1, 3)
    value: tuple = (1, 2, 8, 10)                    # layers with a value embedding; the last learns no gate
    shared: int = 7                                 # h7: this layer's output, which the last layer reads
    from_shared: tuple = (8, 10)                    # attention reads RMSn(h7)
    x0: tuple = (0, 1, 2, 4, 5, 7)                  # injections of x0 and of n-grams after attention
    ngram: tuple = (1, 4, 5, 9)
    skip: tuple = (3, 6)                            # from the output of a layer into one without attention
    post: int = 4                                   # its input gives the gates of it and of later layers
    mlps: tuple = ("0", "1", "2", "3", "4", "5", "6", "8", "8b", "9", "10")     # 8b: the second of layer 8
    end: tuple = ("x_in", "h7", "h9", "ve1", "h3", "ve2", "ve10", "ve8", "mlp_in", "attn_in")   # sources

    def __post_init__(self):
        assert self.last in self.attention and self.value[-1] == self.last and str(self.last) in self.mlps
        assert self.skip[1] not in self.attention + self.x0 + self.ngram

    @property
    def last(self):
        return self.layers - 1


ROOT = math.sqrt(1.1)


class Ramp(NamedTuple):
    """A number of a stage that moves linearly towards its end, which the next stage would reach."""
    begin: float
    end: float


@dataclass(frozen=True)
class Shape:
    """Sizes and constants. The schedule's single steps have no formula: a miniature sets them by hand.

    A tuple of numbers for a stage has one for each of its equal parts.
    """
    topology: Topology = Topology()
    tokenizer: int = 50257              # its last id begins a document
    vocab: int = 50304                  # padded
    dim: int = 768
    heads: int = 6
    qk_group: int = 2                   # neighbouring heads in one matrix of Q or K
    qk_narrow: int = 64                 # also the number of rotating dims in wide heads
    qk_wide: int = 128
    v_half: int = 64
    v_full: int = 128
    hidden: int = 2816
    table_rows: int = 84602880
    sign_rows: int = 8192
    gate_hidden: int = 64
    groups: int = 12                    # channel groups of the end's coefficients
    ranks: int = 8
    block: int = 128                    # tokens per block of a window
    # per stage: 1, 2, 3, taper, extension. The last stage is always the extension. Of 1,122 + 52 + 20 steps,
    # durations 0.2854, 0.3209, 0.3931, whose last 0.06 is the taper
    stage_steps: tuple = (320, 361, 374 + 52, 67, 20)
    stage_tokens: tuple = (16384, 32768, 49152, 40960, 16384)           # of a rank
    stage_caps: tuple = (896, 2048, 3072, 3072, 3072)                   # longest document
    stage_blocks: tuple = ((1, 3), (3, 7), (5, 11), (5, 11), (6, 13))   # short, long window
    stage_lr: tuple = (1, 1.52, 1.73, 1.73 * math.sqrt(20 / 24), 1.73 * math.sqrt(20 / 24))
    token_weights: tuple = ((1, 0.5, Ramp(0.25, 0)), (1, Ramp(0.5, 0)), (1,), (1,), (1,))
    prefix_weights: tuple = ((0.25,), (0.20, 0.15, 0.10, 0.05), (0,), (0,), (0,))
    candidates: tuple = ((10240,), (10240,), (14336, 14336, 24576), (None,), (None,))   # None: all classes
    validation_blocks: tuple = (6, 20)
    yarn_blocks: int = 13               # limit of windows in YaRN's formula
    attention_cap: int = 2560
    matrix_lr: float = 0.023
    matrix_decay: float = 2.25          # times the learning rate
    rates: dict = field(default_factory=lambda: RATES)
    adam_eps: float = 1e-10
    gradient_scale: float = 1.0         # of the mean over ranks
    lr_floor: float = 0.30
    lr_decay_from: float = 234          # until the extension begins
    momentum_ramp: int = 240
    momentum_cooldown: int = 50         # last steps
    slow_rail_from: int = 514
    rare_events_from: int = 336         # table events: odd steps, from here on steps = 3 mod 4
    split_step: int = 1175              # last tied update
    tail_ema_from: int = 896
    blend_from: int = 897
    tail_avg_from: int = 945
    value_from: int = 947
    tail_ema_rate: float = 2 / 299      # of one step
    tail_ema_odd_rate: float = 1 - (1 - 2 / 299) ** 2   # of two
    tail_avg_rate: float = 4 / 53       # also of the value embeddings
    blend_rate: float = 2 / 75
    attention_scale: tuple = (0.13, 0.085)      # narrow, wide heads at the start
    missing_targets_count: bool = True  # False: a target beyond the end has no weight in the gradient
    calls_end_with_shards: bool = True  # False: only a buffer that a shard cannot fill begins in the next

    def __post_init__(self):
        assert self.heads % 2 == 0 and self.heads * self.v_full == self.dim >= 12
        assert self.qk_narrow % 4 == 0 and self.dim % self.groups == 0 and self.table_rows % 2 == 0
        assert self.steps % 4 == 2 and self.split_step % 2 == 1 and self.tail_ema_from % 2 == 0

    @property
    def steps(self):
        return sum(self.stage_steps)

    @property
    def bos(self):
        return self.tokenizer - 1

    def first(self, stage):
        return sum(self.stage_steps[:stage])

    @property
    def extension(self):
        """First step of the extension."""
        return self.first(len(self.stage_steps) - 1)

    def stage(self, step):
        return sum(step >= self.first(stage) for stage in range(1, len(self.stage_steps)))


RECORD_92 = Shape()
MINIATURE = Shape(
    tokenizer=60, vocab=64, dim=32, heads=4, qk_narrow=4, qk_wide=8, v_half=4, v_full=8, hidden=48,
    table_rows=400, sign_rows=16, gate_hidden=6, groups=4, ranks=2, block=4,
    stage_steps=(6, 6, 6, 2, 6), stage_tokens=(16, 24, 32, 28, 16), stage_caps=(7, 12, 18, 18, 18),
    candidates=((24,), (32,), (40, 40, 48), (None,), (None,)),
    attention_cap=13, lr_decay_from=5, momentum_ramp=5, momentum_cooldown=4, slow_rail_from=10,
    rare_events_from=8, split_step=21, tail_ema_from=16, blend_from=17, tail_avg_from=21, value_from=19,
    tail_ema_rate=0.3, tail_ema_odd_rate=0.51, tail_avg_rate=0.5, blend_rate=0.4)


# ---------------------------------------------------------------- record 92, parameters and start

def outputs_of(shape, name):
    """Outputs of a generator in order: (name, size, value at the start)."""
    topology, H = shape.topology, shape.heads
    if name == "mudd":
        values = [0, 0, 0, 0, 0, 0, 2, 2, ROOT, 1, 0, 0.05, ROOT, 1]
        return [("m%d" % i, 1, float(value)) for i, value in enumerate(values)]
    if name == "end":
        h7 = "h%d" % topology.shared
        return [("n%d" % i, 1, -0.5 if source == h7 else 0.0) for i, source in enumerate(topology.end)]
    own = range(topology.post) if name == "pre" else range(topology.post, topology.layers)
    gates = [("xsa", topology.xsa, H, 0.0), ("gate", topology.wide, H, 0.25), ("x0", topology.x0, 1, 0.0),
             ("ngram", (0, *topology.ngram), 1, 0.05)]      # ngram.0: before the first layer
    outputs = [("%s.%d" % (gate, layer), size, value) for gate, layers, size, value in gates
               for layer in layers if layer in own]
    return outputs + [("skip", 1, 0.5)] * (topology.skip[1] in own)


def bias_start(shape, name):
    """Biases of a generator at the start: values divided by the scale 0.1."""
    values = [value / 0.1 for _, size, value in outputs_of(shape, name) for _ in range(size)]
    return torch.tensor(values, dtype=F64)


def qk_width(shape, layer):
    return shape.qk_wide if layer in shape.topology.wide else shape.qk_narrow


def v_width(shape, layer):
    return shape.v_half if layer in shape.topology.half_v else shape.v_full


def parameter_sizes(shape):
    """Name -> size. qk: groups of neighbouring heads, those of Q first, then those of K.

    scales: s0 (Q, K, V) and s1 (O) per layer; residual and output: r and p of attention and MLP per layer.
    """
    V, D, H, topology = shape.vocab, shape.dim, shape.heads, shape.topology
    sizes = {"embed": (V, D), "head": (V, D), "table": (shape.table_rows, D), "signs": (shape.sign_rows, D)}
    sizes.update({"ve.%d" % layer: (V, D) for layer in topology.value})
    for layer in topology.attention:
        group = shape.qk_group
        sizes["qk.%d" % layer] = (2 * H // group, group * qk_width(shape, layer), D)
        sizes["v.%d" % layer] = (H * v_width(shape, layer), D)
        sizes["o.%d" % layer] = (D, H * v_width(shape, layer))
    for slot in topology.mlps:
        sizes["mlp.%s.in" % slot] = sizes["mlp.%s.out" % slot] = (shape.hidden, D)
    sizes.update(dict.fromkeys(("scales", "residual", "output"), (topology.layers, 2)))
    sizes.update(smear=(), smear_gate=(12,), skip=(), gate_scale=())
    sizes.update({"ve_gate.%d" % layer: (H, 12) for layer in topology.value[:-1]})
    for name in ("pre", "post", "mudd", "end"):
        count = len(bias_start(shape, name))
        sizes[name + ".w1"], sizes[name + ".w2"] = (shape.gate_hidden, D), (count, shape.gate_hidden)
        sizes[name + ".bias"] = (count,)
    sizes["end.groups"] = (len(topology.end), shape.groups, shape.gate_hidden)
    return sizes


def bank_of(name):
    """Bank of a matrix (qk, vo, mlp), None for other parameters."""
    return {"qk": "qk", "v": "vo", "o": "vo", "mlp": "mlp"}.get(name.split(".")[0])


def init_params(shape, seed=0, spread=0.0):
    """Start of the recipe. A positive spread adds noise to what starts constant, so that every path acts."""
    generator = torch.Generator().manual_seed(seed)
    p = {}
    for name, size in parameter_sizes(shape).items():
        kind, last = name.split(".")[0], name.split(".")[-1]
        normal = torch.randn(size, generator=generator, dtype=F64)
        uniform = 2 * torch.rand(size, generator=generator, dtype=F64) - 1
        if name == "signs":
            p[name] = torch.sign(uniform)
        elif name == "head":
            p[name] = 0.005 * normal
        elif kind == "ve":
            p[name] = 0.01 * normal
        elif kind in ("qk", "v", "o") or kind == "mlp" and last == "in":
            p[name] = math.sqrt(3) * 0.5 * shape.dim ** -0.5 * uniform
        elif last == "w1":
            p[name] = shape.dim ** -0.5 * uniform
        else:
            start = {"skip": -1.5, "residual": ROOT, "output": 1.0, "gate_scale": 0.1}.get(name, 0.0)
            if last == "bias":
                start = bias_start(shape, kind)
            p[name] = start + torch.zeros(size, dtype=F64) + spread * normal
            if name == "scales":
                p[name] = p[name] + torch.tensor([0.5, 1.0], dtype=F64)
    p["embed"] = p["head"].clone()
    return p


# ---------------------------------------------------------------- record 92, table of n-grams

def int32(value):
    return (value + 2 ** 31) % 2 ** 32 - 2 ** 31


# of a token, of the one before it, ... The last three are not record 92's, which has no longer n-grams
FACTORS = 17351, 60961, 45259, 50131, 23677, 41333


def ngram_rows(shape, tokens, order=3):
    """(bigram rows, trigram rows, ...) of a packed buffer. Position 1 reads H - 1 as token 0."""
    x, size = [int(t) for t in tokens], shape.table_rows // (order - 1)
    bigrams = []
    for t in range(len(x)):
        if t == 0:
            bigrams.append(size - 1)
        else:
            before = size - 1 if t == 1 else x[t - 1]
            bigrams.append((int32(36313 * x[t]) ^ int32(27191 * before)) % (size - 1))
    kinds = [bigrams]
    for length in range(3, order + 1):
        rows = [size - 1] * min(length - 1, len(x))
        for t in range(length - 1, len(x)):
            mixed = 0
            for back in range(length):
                mixed ^= int32(FACTORS[back] * x[t - back])
            rows.append(mixed % (size - 1))
        kinds.append([size * (length - 2) + row for row in rows])
    return tuple(kinds)


def sign_rows(shape, tokens, order=3):
    """(rows of the bigram signs, of the trigram signs), from the true tokens. Longer ones have the latter."""
    x, last = [int(t) for t in tokens], shape.sign_rows - 1
    bigrams = [0 if t < 1 else (int32(48271 * x[t]) ^ int32(30011 * x[t - 1])) & last for t in range(len(x))]
    trigrams = [0 if t < 2 else
                (int32(58699 * x[t]) ^ int32(39779 * x[t - 1]) ^ int32(26801 * x[t - 2])) & last
                for t in range(len(x))]
    return (bigrams, *[trigrams] * (order - 2))


def ngram_vectors(shape, p, tokens, order=3):
    total = 0
    for rows, signs in zip(ngram_rows(shape, tokens, order), sign_rows(shape, tokens, order)):
        total = total + p["table"][torch.tensor(rows)] * p["signs"][torch.tensor(signs)]
    return total


def table_event(shape, step):
    return step % 2 == 1 if step < shape.rare_events_from else step % 4 == 3


def table_settings(shape, step, name="table"):
    """(beta1, beta2, decay multiplier) of an event of the table, or of ve. The table has no first moment."""
    steps = 1 if step < shape.rare_events_from else 2       # twice as many since the last event
    _, (beta1, beta2), decay = shape.rates[name]
    return beta1 ** steps, beta2 ** steps, decay * steps


def table_update(rows, v, g, t, lr, beta2, decay, eps=1e-10):
    """(rows, v) after event number t (from 1). g: gradients summed over the cycle, averaged over ranks.

    Applied to all rows (R, D): a row without gradient does not move, and its v falls by this event's beta2,
    which is what the recipe does later, when the row comes back.
    """
    v = beta2 * v + (1 - beta2) * (g * g).mean(dim=1)
    u = g / (torch.sqrt(v) + eps)[:, None] * lr * math.sqrt(1 - beta2 ** t)
    u = u + (u * rows > 0) * rows * (lr * lr * BASE_DECAY * decay)
    return rows - u, v


# ---------------------------------------------------------------- record 92, forward pass

class Windows(NamedTuple):
    """Windows in tokens; frequencies of the rotary tables and attention scales of narrow and wide heads."""
    short: int
    long: int
    narrow: torch.Tensor
    wide: torch.Tensor
    narrow_scale: float
    wide_scale: float


def rms(x):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + EPS)


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def coefficients(shape, p, name, x, scale):
    """scale * (W2 gelu(W1 x) + bias), cut into named coefficients (T, size)."""
    c = scale * (gelu(x @ p[name + ".w1"].T) @ p[name + ".w2"].T + p[name + ".bias"])
    outputs = outputs_of(shape, name)
    return dict(zip([output[0] for output in outputs], c.split([output[1] for output in outputs], dim=1)))


def rotate(x, positions, frequencies):
    """x (T, H, d) at positions (T, H): adjacent pairs rotate, the dims beyond the pairs stay."""
    angle = positions[:, :, None] * frequencies
    turning = 2 * len(frequencies)
    even, odd = x[:, :, 0:turning:2], x[:, :, 1:turning:2]
    turned = torch.stack([even * torch.cos(angle) + odd * torch.sin(angle),
                          odd * torch.cos(angle) - even * torch.sin(angle)], dim=-1)
    return torch.cat([turned.flatten(2), x[:, :, turning:]], dim=2)


def attend(q, k, v, segments, distance, scale):
    """Attention of each head or slot, (T, H, d), to the keys of the own segment at distance 0..distance."""
    rows = torch.arange(len(segments))
    back = rows[:, None] - rows[None, :]
    seen = (back >= 0) & (back <= distance) & (segments[:, None] == segments[None, :])
    logits = scale * torch.einsum("ihd,jhd->hij", q, k)
    return torch.einsum("hij,jhd->ihd", torch.softmax(logits.masked_fill(~seen, -math.inf), dim=-1), v)


def attention(shape, p, layer, u, ve, extra, c, segments, windows):
    """Output before the output matrix, (T, heads * width of V). extra: v' of the last layer."""
    T, H, D, topology = len(u), shape.heads, shape.dim, shape.topology
    width, v_dim, s0 = qk_width(shape, layer), v_width(shape, layer), p["scales"][layer, 0]
    wide = layer in topology.wide
    q, k = (u @ (s0 * p["qk.%d" % layer]).reshape(2 * H * width, D).T).reshape(T, 2, H, width).unbind(dim=1)
    v = (u @ (s0 * p["v.%d" % layer]).T).reshape(T, H, v_dim)
    q, k = rms(q), rms(k)
    at = torch.arange(T, dtype=F64)[:, None].expand(T, H)
    if layer in topology.paired:                # even heads turn by 2t, odd heads by 2t + 1
        at = 2 * at + torch.arange(H) % 2
    frequencies = windows.wide if wide else windows.narrow
    q, k = rotate(q, at, frequencies), rotate(k, at, frequencies)
    if wide:                                    # key offset: stationary dims from the token before
        still = k[:, :, shape.qk_narrow:]
        k = torch.cat([k[:, :, :shape.qk_narrow], torch.cat([still[:1], still[:-1]])], dim=2)
    if layer in topology.value:                 # half V adds the first half of each head's part
        rows = ve[layer].reshape(T, H, shape.v_full)[:, :, :v_dim]
        if layer == topology.last:
            gate = torch.cat([c["m6"]] * (H // 2) + [c["m7"]] * (H // 2), dim=1)
            v = v + extra.reshape(T, H, v_dim)
        else:
            source = torch.cat([u[:, :6], ve[layer][:, :6]], dim=1)
            gate = 2 * torch.sigmoid(source @ p["ve_gate.%d" % layer].T)
        v = v + gate[:, :, None] * rows
    scale = windows.wide_scale if wide else windows.narrow_scale
    if layer in topology.paired:    # rows 2t, 2t + 1 hold the halves of the heads; the window counts rows
        pairs = [z.reshape(2 * T, H // 2, -1) for z in (q, k, v)]
        y = attend(*pairs, segments.repeat_interleave(2), windows.short, scale).reshape(T, H, v_dim)
    else:
        y = attend(q, k, v, segments, windows.long if wide else windows.short, scale)
    if layer in topology.xsa:
        along = (y * v).sum(dim=-1) / torch.clamp((v * v).sum(dim=-1), min=1e-8)
        y = y - (torch.tanh(c["xsa.%d" % layer]) * along)[:, :, None] * v
    if wide:
        y = y * c["gate.%d" % layer][:, :, None]
    return y.reshape(T, H * v_dim)


def mlp(p, slot, z):
    return torch.relu(z @ p["mlp.%s.in" % slot].T) ** 2 @ p["mlp.%s.out" % slot]


def forward(shape, p, tokens, boundaries, windows, classes=None):
    """(logits before the softcap, after it) of one packed buffer, (T, classes in the order given or vocab).

    boundaries: ends of the attention segments, the last is T.
    """
    tokens = torch.as_tensor(tokens, dtype=torch.long)
    segments = torch.bucketize(torch.arange(len(tokens)), torch.tensor(boundaries), right=True)
    topology, r, out = shape.topology, p["residual"], p["output"]
    ve = {layer: p["ve.%d" % layer][tokens] for layer in topology.value}
    e = p["embed"][tokens]
    amount = p["smear"] * torch.sigmoid(e[:, :12] @ p["smear_gate"])
    x0 = rms(torch.cat([e[:1], e[1:] + amount[1:, None] * e[:-1]]))
    b = ngram_vectors(shape, p, tokens)
    c = coefficients(shape, p, "pre", x0, p["gate_scale"])
    x = x_in = x0 + c["ngram.0"] * b
    h, extra = {}, None                             # h: outputs of the layers
    for layer in range(topology.layers):
        last = layer == topology.last
        if layer == topology.post:
            c.update(coefficients(shape, p, "post", x, p["gate_scale"]))
        if last:
            c.update(coefficients(shape, p, "mudd", x, 0.1))
            h7 = h[topology.shared]
            extra = c["m0"] * x_in + c["m1"] * h7 + c["m2"] * x
            x = (1 + c["m5"]) * x + c["m3"] * x_in + c["m4"] * h7
        if layer in topology.attention:
            u = rms(h[topology.shared] if layer in topology.from_shared else x)
            y = attention(shape, p, layer, u, ve, extra, c, segments, windows)
            factor = p["scales"][layer, 1] * (1 if last else out[layer, 0])
            y = y @ (factor * p["o.%d" % layer]).T
        if layer == topology.skip[1]:
            x = x + torch.sigmoid(p["skip"]) * c["skip"] * h[topology.skip[0]]
        elif last:
            x = c["m8"] * x + c["m9"] * y + c["m10"] * x_in + c["m11"] * b
        else:
            x = r[layer, 0] * x
            x = x + y if layer in topology.attention else x
            x = x + c["x0.%d" % layer] * x0 if layer in topology.x0 else x
            x = x + c["ngram.%d" % layer] * b if layer in topology.ngram else x
        z = rms(x)
        y = sum(mlp(p, slot, z) for slot in topology.mlps if slot.rstrip("b") == str(layer))
        x = c["m12"] * x + c["m13"] * y if last else r[layer, 1] * x + out[layer, 1] * y
        h[layer] = x
    sources = {"x_in": x_in, "mlp_in": z, "attn_in": u}
    sources.update({"h%d" % layer: value for layer, value in h.items()})
    sources.update({"ve%d" % layer: value for layer, value in ve.items()})
    n = coefficients(shape, p, "end", x, 0.1)
    hidden = gelu(x @ p["end.w1"].T)
    for i, source in enumerate(topology.end):
        by_group = n["n%d" % i] + 0.1 * hidden @ p["end.groups"][i].T           # (T, groups)
        x = x + by_group.repeat_interleave(shape.dim // shape.groups, dim=1) * sources[source]
    head = p["head"] if classes is None else p["head"][torch.as_tensor(classes)]
    raw = rms(x) @ head.T
    return raw, 23 * torch.sigmoid((raw + 5) / 7.5)


# ---------------------------------------------------------------- record 92, training loss

def sweep_start(shape, rank):
    return shape.vocab * rank // shape.ranks


def candidate_set(shape, targets, offset, count):
    """(ascending classes, new offset of the rank): a micro-batch's targets, then negatives up to count."""
    marked = set(int(t) for t in targets)
    need = count - len(marked)
    assert 0 <= need and count <= shape.vocab
    if need == 0:
        return sorted(marked), offset
    draw = min(shape.vocab, 17 * need // 10 + 256)
    drawn = [20011 * (offset + i) % shape.vocab for i in range(draw)]
    negatives = [q for q in drawn if q not in marked][:need]
    if len(negatives) < need:
        unmarked = [q for q in range(shape.vocab) if q not in marked]
        negatives = unmarked[::len(unmarked) // need][:need]
    return sorted(marked.union(negatives)), (offset + draw) % shape.vocab


def columns_of(ids, classes):
    """Column of each id in the list of classes, -1 for one that is not there."""
    where = {int(q): i for i, q in enumerate(classes)}
    return [where.get(int(q), -1) for q in ids]


def loss_and_gradient(raw, targets, prefixes, weights, prefix_weight, missing_count=True):
    """(loss of each row, gradient of their sum to raw). targets, prefixes: columns, -1 for no prefix.

    raw: logits before the softcap. The gradient is the recipe's: a target beyond the end is no term of the
    loss, but with missing_count its weight counts in the softmax part of the gradient. A missing prefix
    counts nowhere.
    """
    T, s = len(raw), torch.sigmoid((raw + 5) / 7.5)
    z = 23 * s
    lse = 23 + torch.log(torch.exp(z - 23).sum(dim=1))
    rows, mass, hit = torch.zeros(T, dtype=F64), torch.zeros(T, dtype=F64), torch.zeros_like(z)
    terms = [(weight, range(T - k), targets[k:]) for k, weight in enumerate(weights)]
    if prefix_weight != 0:
        found = [t for t in range(T) if prefixes[t] >= 0]
        terms.append((prefix_weight, found, [prefixes[t] for t in found]))
    for weight, at, columns in terms:
        at, columns = torch.tensor(at, dtype=torch.long), torch.tensor(columns, dtype=torch.long)
        rows = rows.index_add(0, at, weight * (lse[at] - z[at, columns]))
        mass[at] += weight
        hit[at, columns] += weight
    if missing_count:
        for k, weight in enumerate(weights):
            mass[T - k:] += weight
    gradient = mass[:, None] * torch.exp(z - lse[:, None]) - hit
    return rows, gradient * (23 / 7.5) * s * (1 - s)


def validation_loss(shape, p, chunks, step=None):
    """Mean cross-entropy of chunks of T + 1 tokens before a step, or after training."""
    is_end = step is None
    windows = windows_at(shape, shape.steps - 1 if is_end else step, validation=is_end)
    total, count = 0.0, 0
    for chunk in chunks:
        chunk = [int(t) for t in chunk]
        tokens, targets = chunk[:-1], chunk[1:]
        z = forward(shape, p, tokens, validation_boundaries(shape, tokens), windows)[1]
        total -= float(torch.log_softmax(z, dim=1)[torch.arange(len(tokens)), targets].sum())
        count += len(tokens)
    return total / count


# ---------------------------------------------------------------- record 92, schedules

def value_at(value, done, steps):
    """Value for step number `done` of a stage: a ramp, equal parts, or a constant."""
    if isinstance(value, Ramp):
        return value.begin + (value.end - value.begin) * done / steps
    return value[len(value) * done // steps] if isinstance(value, tuple) else value


def lr_factor(shape, step):
    value = shape.stage_lr[shape.stage(step)]
    t = min(1.0, max(0.0, (step - shape.lr_decay_from) / (shape.extension - shape.lr_decay_from)))
    return value * (1 - t) + shape.lr_floor * t


def lookahead(shape, step):
    """m(s) of the matrix update."""
    last = shape.steps - shape.momentum_cooldown
    if step < shape.momentum_ramp:
        return 0.85 + 0.08 * step / shape.momentum_ramp
    return 0.93 - 0.08 * max(0, step - last) / shape.momentum_cooldown


def rail_settings(shape, step):
    """(m, factor of the fast rail, weight of the fast rail)."""
    m = lookahead(shape, step)
    return (m, m, 1.0) if step < shape.slow_rail_from else (m, 0.85, 0.4385)


def loss_weights(shape, step):
    """(weights of the targets 0, 1, 2 ahead, prefix weight)."""
    stage = shape.stage(step)
    done, steps = step - shape.first(stage), shape.stage_steps[stage]
    weights = [value_at(weight, done, steps) for weight in shape.token_weights[stage]]
    return weights, value_at(shape.prefix_weights[stage], done, steps)


def candidate_count(shape, step):
    """Number of classes in the loss, None for all of them."""
    stage = shape.stage(step)
    return value_at(shape.candidates[stage], step - shape.first(stage), shape.stage_steps[stage])


def lengthen(frequencies, scale, windows):
    """(frequencies, attention scale) after the windows of several stages, by YaRN."""
    for old, new in zip(windows, windows[1:]):
        for i, frequency in enumerate(frequencies):
            turns = old * frequency / (2 * math.pi)
            g = min(max((turns - 1) / 31, 0.0), 1.0)
            frequencies[i] = frequency * (old / new + g * (1 - old / new))
        scale *= 0.2 * math.log(new / old) + 1
    return torch.tensor(frequencies, dtype=F64), scale


def yarn(shape, kind, stage):
    """(frequencies, attention scale) of narrow (0) or wide (1) heads: they follow the short, long window.

    The final validation is the stage after the last. The limit of windows keeps its tables as they were.
    """
    count = shape.qk_narrow // 2
    frequencies = [(1 / 1024) ** (i / (count - 1)) for i in range(count)]
    scale, blocks = shape.attention_scale[kind], [*shape.stage_blocks, shape.validation_blocks]
    windows = [shape.block * min(pair[kind], shape.yarn_blocks) for pair in blocks[:stage + 1]]
    return lengthen(frequencies, scale, windows)


def windows_at(shape, step, validation=False):
    stage = len(shape.stage_steps) if validation else shape.stage(step)
    short, long = shape.validation_blocks if validation else shape.stage_blocks[stage]
    (narrow, narrow_scale), (wide, wide_scale) = yarn(shape, 0, stage), yarn(shape, 1, stage)
    return Windows(short * shape.block, long * shape.block, narrow, wide, narrow_scale, wide_scale)


# ---------------------------------------------------------------- record 92, data

def attention_boundaries(ends, cap):
    """Ends of attention segments: the documents' ends and, inside a document, every `cap` tokens."""
    out, start = [], 0
    for end in ends:
        out += [*range(start + cap, end, cap), end]
        start = end
    return out


def validation_boundaries(shape, tokens):
    """In validation documents are neither cut nor split."""
    return [t for t in range(1, len(tokens)) if int(tokens[t]) == shape.bos] + [len(tokens)]


def fill(shard, begins, document, size, cap):
    """(buffer of size + 1 tokens, ends of its documents, next document), None if the shard ends before."""
    buffer, ends = [], []
    while len(buffer) <= size:
        if document == len(begins):
            return None
        begin = begins[document]
        end = begins[document + 1] if document + 1 < len(begins) else len(shard)
        buffer += shard[begin:min(end, begin + cap, begin + size + 1 - len(buffer))]
        ends.append(len(buffer))
        document += 1
    ends[-1] -= 1                           # the last token is only a target
    return buffer, ends, document


def packed_batches(shape, shards, first=0):
    """Yields for each step from `first` on one (T + 1 tokens, boundaries) per rank."""
    step, call = first, []
    for shard in shards:
        shard = [int(t) for t in shard]
        begins, document = [i for i, t in enumerate(shard) if t == shape.bos], 0
        while step < shape.steps:
            stage = shape.stage(step)
            filled = fill(shard, begins, document, shape.stage_tokens[stage], shape.stage_caps[stage])
            if filled is None:
                break
            buffer, ends, document = filled
            call.append((buffer, attention_boundaries(ends, shape.attention_cap)))
            if len(call) == shape.ranks:
                yield call
                step, call = step + 1, []
        if shape.calls_end_with_shards:         # this call's buffers are dropped with the shard's tail
            call = []


def prefix_table(vocabulary):
    """Longest proper byte prefix that is a token, else -1. Special and padding tokens are b''."""
    number = {token: i for i, token in enumerate(vocabulary) if token}
    return [max((number[token[:n]] for n in range(1, len(token)) if token[:n] in number),
                key=lambda i: len(vocabulary[i]), default=-1) for token in vocabulary]


def write_vocabulary(path, tokens):
    """A file of token ids in the hub's format: bytes that do not print are characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    names = ["".join(characters[byte] for byte in token) for token in tokens]
    path.write_text(json.dumps({name: i for i, name in enumerate([*names, "<|endoftext|>"])}))


# ---------------------------------------------------------------- record 92, ANVIL

MAPS = [(3.923798038567, -6.095026865488, 3.905234618423), (3.278126713798, -3.328923386476, 0.989127286973),
        (3.505298394150, -5.137358782410, 1.968325560615), (2.815058591845, -3.685181239622, 1.417196497642),
        (2.245503932403, -2.443826979899, 0.963091710461), (2.256537145403, -2.166840097229, 0.929501253245)]


class Anvil(NamedTuple):
    """State of one matrix: fast and slow rail, lane energy."""
    fast: torch.Tensor
    slow: torch.Tensor
    energy: torch.Tensor


def padded_size(shape, name):
    """Size of a matrix as the recipe stores it. Lanes, their means and shape factors follow it."""
    kind = name.split(".")[0]
    return {"qk": shape.qk_group * shape.qk_wide, "mlp": shape.hidden}.get(kind, shape.dim), shape.dim


def anvil_start(W, padded):
    lanes = (W.shape[0], 1) if padded[0] >= padded[1] else (1, W.shape[1])
    return Anvil(torch.zeros_like(W), torch.zeros_like(W), torch.zeros(lanes, dtype=W.dtype))


def rails(G, state, m, keep, weight):
    """(direction U, state with new rails)."""
    fast = state.fast + (1 - keep) * (G - state.fast)
    slow = state.slow + 0.02 * (G - state.slow)
    D = weight * fast + (1 - weight) * slow
    return G + m * (D - G), state._replace(fast=fast, slow=slow)


def whiten(U, maps=MAPS, margin=1.05, eps=1e-6):
    """Singular values to about 1. The margin 1.05 is part of the maps, which diverge just above 1 / 1.05."""
    X = U.T if len(U) > U.shape[1] else U
    X = X / (margin * torch.linalg.norm(X) + eps)
    for a, b, c in maps:
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if len(U) > U.shape[1] else X


def equalise(X, energy, padded, rate=0.1):
    """(X with equal lanes and unchanged norm, new lane energy). Lane: row, or column of a wide matrix."""
    axis = 1 if padded[0] >= padded[1] else 0
    energy = energy + rate * ((X * X).sum(dim=axis, keepdim=True) / padded[axis] - energy)
    gain = torch.clamp(energy, min=1e-10) ** -0.5
    return X * gain * torch.linalg.norm(X) / torch.clamp(torch.linalg.norm(X * gain), min=1e-10), energy


def anvil(W, G, state, settings, lr, padded, multiplier=1.0, decay=2.25):
    """(new W, new state) of one matrix. settings: (m, fast rail's factor, fast rail's weight)."""
    U, state = rails(G, state, *settings)
    X, energy = equalise(whiten(U), state.energy, padded)
    eta = lr * multiplier * math.sqrt(max(1.0, padded[0] / padded[1]))
    W = W - W * (state.slow * W >= 0) * (decay * lr * eta) - eta * X    # decay by the slow rail's sign
    return W, state._replace(energy=energy)


def anvil_step(shape, step, name, W, G, states):
    """(new W, new states) of a named matrix; qk are several. states: list or None at the start."""
    settings, lr = rail_settings(shape, step), shape.matrix_lr * lr_factor(shape, step)
    padded = padded_size(shape, name)
    multiplier = 2.0 if name.startswith("mlp") and name.endswith("out") else 1.0
    Ws, Gs = (W, G) if W.ndim == 3 else ([W], [G])
    states = states or [anvil_start(one, padded) for one in Ws]
    new = [anvil(*args, settings, lr, padded, multiplier, shape.matrix_decay)
           for args in zip(Ws, Gs, states)]
    return torch.stack([one for one, _ in new]).reshape(W.shape), [state for _, state in new]


# ---------------------------------------------------------------- record 92, Adam

class Adam(NamedTuple):
    m: torch.Tensor
    v: torch.Tensor
    t: int


def adam_start(p):
    return Adam(torch.zeros_like(p), torch.zeros_like(p), 0)


def adam(p, g, state, lr, betas, decay, eps=1e-10):
    """(new p, new state). The decay has the schedule squared and acts where the update shrinks p."""
    b1, b2 = betas
    t, m, v = state.t + 1, b1 * state.m + (1 - b1) * g, b2 * state.v + (1 - b2) * g * g
    u = lr * math.sqrt(1 - b2 ** t) / (1 - b1 ** t) * m / (torch.sqrt(v) + eps)
    return p - u - (u * p > 0) * p * (lr * lr * BASE_DECAY * decay), Adam(m, v, t)


def adam_settings(shape, name, step):
    """(learning rate multiplier, betas, decay multiplier)."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if first == "ve":
        beta1, beta2, decay = table_settings(shape, step, "ve")
        return shape.rates["ve"].lr, (beta1, beta2), decay
    shares = {"smear_gate": 0.01, "ve_gate": 1, "mudd": 0.25, "end": 0.25, "pre": 0.1, "post": 0.1,
              "gate_scale": 0.1}
    if first in shares:
        lr, betas, decay = shape.rates["gate"]
        return lr * shares[first], betas, 0 if last in ("bias", "gate_scale", "smear_gate") else decay
    return shape.rates["scalar" if first in ("scales", "smear", "skip") else first]


# ---------------------------------------------------------------- record 92, final averages

def average_ticks(shape):
    """Name -> {step: rate} of the ticks, after the update of a step. The first one copies, its rate is 1."""
    steps = shape.steps
    odd = dict.fromkeys(range(shape.tail_ema_from + 1, steps, 2), shape.tail_ema_odd_rate)
    ticks = {"tail-ema": {shape.tail_ema_from: 1.0, **odd, steps - 1: shape.tail_ema_rate},
             "tail-avg": dict.fromkeys([*range(shape.tail_avg_from, steps - 1, 4), steps - 1],
                                       shape.tail_avg_rate),
             "value": dict.fromkeys(range(shape.value_from, steps, 4), shape.tail_avg_rate),
             "bank-blend": dict.fromkeys([*range(shape.blend_from, steps - 2, 4), steps - 2, steps - 1],
                                         shape.blend_rate)}
    for rates in ticks.values():
        rates[min(rates)] = 1.0
    return ticks


def averages_of(name):
    """Averages that a parameter takes part in."""
    if name in ("head", "embed"):
        return ["tail-ema"]
    if name.startswith("ve."):
        return ["value"]
    return {"qk": ["bank-blend"], "vo": ["tail-avg", "bank-blend"],
            "mlp": ["tail-avg", "bank-blend"]}.get(bank_of(name), [])


def tick(shape, step, p, averages):
    """New averages {(name of the average, parameter): value} after the update of a step."""
    averages, ticks = dict(averages), average_ticks(shape)
    for name, W in p.items():
        for kind in averages_of(name):
            if step in ticks[kind]:
                before = averages.get((kind, name), W)
                averages[kind, name] = before + ticks[kind][step] * (W - before)
    return averages


def write_back(shape, p, averages):
    """Parameters at the end: the averages, then the norms of before for embedding, head and each bank.

    The recipe's norms of the banks contain unused rows and dead slots, which are not stored here. The banks'
    factors therefore differ slightly.
    """
    new, members = dict(p), {}
    for name in p:
        kind = averages_of(name)
        if kind == ["tail-ema"]:
            new[name] = p[name] + 0.65 * (averages["tail-ema", name] - p[name])
        elif kind == ["value"]:
            new[name] = averages["value", name]
        elif kind == ["bank-blend"]:
            new[name] = p[name] + 0.55 * (averages["bank-blend", name] - p[name])
        elif kind:
            tail = averages["tail-avg", name]
            new[name] = tail + 0.3493 * (averages["bank-blend", name] - tail)
        if kind and kind != ["value"]:
            members.setdefault(bank_of(name) or name, []).append(name)
    for names in members.values():
        before, after = (math.sqrt(sum(float((q[n] * q[n]).sum()) for n in names)) for q in (p, new))
        for name in names:
            new[name] = new[name] * (before / after)
    return new


# ---------------------------------------------------------------- record 92, training

def gradients(shape, p, batch, step, prefix_of, offsets):
    """(mean over ranks of the summed loss, {name: gradient * gradient_scale}, new offsets of the sweep)."""
    assert len(batch) == shape.ranks
    leaves = {name: value.clone().requires_grad_(True) for name, value in p.items() if name != "signs"}
    weights, prefix_weight = loss_weights(shape, step)
    count, loss, raws, to_raws, offsets = candidate_count(shape, step), 0.0, [], [], list(offsets)
    for rank, (buffer, boundaries) in enumerate(batch):
        tokens, targets, classes = buffer[:-1], [int(t) for t in buffer[1:]], range(shape.vocab)
        if count is not None:
            classes, offsets[rank] = candidate_set(shape, targets, offsets[rank], count)
        raw = forward(shape, {**p, **leaves}, tokens, boundaries, windows_at(shape, step), list(classes))[0]
        rows, to_raw = loss_and_gradient(raw.detach(), columns_of(targets, classes),
                                         columns_of([prefix_of[t] for t in targets], classes),
                                         weights, prefix_weight, shape.missing_targets_count)
        loss += float(rows.sum()) / shape.ranks
        raws.append(raw)
        to_raws.append(to_raw * (shape.gradient_scale / shape.ranks))
    return loss, dict(zip(leaves, torch.autograd.grad(raws, list(leaves.values()), to_raws))), offsets


def start_state(shape, p):
    """State before step 0. `sums` are the gradients that wait for the next update or event."""
    learned = [name for name in p if name not in ("signs", "table") and not bank_of(name)]
    return {"anvil": {}, "adam": {name: adam_start(p[name]) for name in learned}, "sums": {}, "averages": {},
            "table_v": torch.zeros(shape.table_rows, dtype=F64), "table_t": 0,
            "offsets": [sweep_start(shape, rank) for rank in range(shape.ranks)]}


def update(shape, p, grads, state, step):
    """(new parameters, new state) after the gradients of a step, its average ticks included."""
    p, state = dict(p), dict(state, **{key: dict(state[key]) for key in ("anvil", "adam", "sums")})
    factor, tied = lr_factor(shape, step), step <= shape.split_step
    for name, g in grads.items():
        if bank_of(name):
            states = state["anvil"].get(name)
            p[name], state["anvil"][name] = anvil_step(shape, step, name, p[name], g, states)
        else:
            state["sums"][name] = state["sums"].get(name, 0) + g
    sums = {}
    if table_event(shape, step):
        embeddings = ["ve.%d" % layer for layer in shape.topology.value]
        sums = {name: state["sums"].pop(name) for name in ["table"] + embeddings}
        state["table_t"] += 1
        _, beta2, decay = table_settings(shape, step)
        lr = BASE_LR * shape.rates["table"].lr * factor
        p["table"], state["table_v"] = table_update(p["table"], state["table_v"], sums.pop("table"),
                                                    state["table_t"], lr, beta2, decay, shape.adam_eps)
    if step % 2 == 1:
        others = [name for name in state["sums"] if name != "table" and not name.startswith("ve.")]
        sums.update({name: state["sums"].pop(name) for name in others})
        if tied:
            sums["head"] = sums["head"] + sums.pop("embed")
    for name, g in sums.items():
        multiplier, betas, decay = adam_settings(shape, name, step)
        args = BASE_LR * multiplier * factor, betas, decay, shape.adam_eps
        p[name], state["adam"][name] = adam(p[name], g, state["adam"][name], *args)
    if tied and step % 2 == 1:
        p["embed"] = p["head"].clone()
        if step == shape.split_step:
            state["adam"]["embed"] = state["adam"]["head"]
    state["averages"] = tick(shape, step, p, state["averages"])
    return p, state


# ---------------------------------------------------------------- a run of the command line

ADAM_GROUPS = {"head": "head", "embed": "embed", "ve": "value_embed", "table": "ngram", "scalar": "scalar",
               "residual": "residual", "output": "mix", "gate": "gate"}
FIXED = dict(        # options with the only values that this reading has
    sequence_start="document", epochs=1, qk_norm=True, smear=True,
    x0_mix="after_attention", attention_gate_dim=0, value_gate_dim=12, gains=[], ngram_order=3,
    softcap=[23.0, 5.0, 7.5], tie_head=True, orthogonalize="six_maps", decay="cautious", decay_schedule="lr",
    momentum=[0.85, 0.93], lr_warmup_frac=0.0, matrix_cooldown_frac=-1.0, averages=True)
FIXED_GROUPS = dict(
    matrix=dict(rule="anvil", betas=[0.9, 0.9], every=1), **{
        group: dict(rule="row_adam" if group == "ngram" else "adamw", every=2,
                    late_every=4 * (group in ("value_embed", "ngram"))) for group in ADAM_GROUPS.values()})


def topology_of(layers):
    """The topology of a run's layers."""
    which = lambda condition: tuple(i for i, layer in enumerate(layers) if condition(layer))
    having = lambda name: which(lambda layer: layer[name])
    given = lambda name: which(lambda layer: layer[name] is not None)
    narrow, wide = (which(lambda layer, kind=kind: layer["attention"] == kind) for kind in ("short", "long"))
    half_v, last = given("v_dim"), layers[-1]
    layer_of = {layers[i]["value_embed"]: i for i in given("value_embed")}      # of a table
    (shared,) = {layers[i]["attention_from"] for i in given("attention_from")}
    (skip_to,) = given("skip_from")
    (post,) = {layer["gates_from"] for layer in layers} - {0}
    assert having("key_offset") == having("head_gate") == wide and having("mudd_in") == having("mudd_out")
    assert layers[0]["ngram"] and last["ngram"] and last["x0"]
    assert last["mudd_in"] == ["x_in", "h%d" % shared]
    assert [layer["gates_from"] for layer in layers] == [0] * post + [post] * (len(layers) - post)
    mlps = [(i, slot) for slot, name in (("%d", "mlp"), ("%db", "second_mlp")) for i in having(name)]
    return Topology(
        layers=len(layers), attention=tuple(sorted(narrow, key=lambda i: i in half_v)) + wide,
        paired=having("paired"), wide=wide, half_v=half_v, xsa=having("xsa"),
        value=tuple(sorted(layer_of.values())), shared=shared, from_shared=given("attention_from"),
        x0=having("x0")[:-1], ngram=having("ngram")[1:-1], post=post,
        skip=(layers[skip_to]["skip_from"], skip_to), mlps=tuple(slot % i for i, slot in sorted(mlps)),
        end=tuple("ve%d" % layer_of[int(name[2:])] if name.startswith("ve") else name
                  for name in last["mudd_out"]))


def shape_of(config):
    """The shape of a run, from its options as --print_config prints them.

    Constants of the averages that have no option: steps keep their share of the run, and rates grow as the
    number of steps falls.
    """
    other = {name: config[name] for name, value in FIXED.items() if config[name] != value}
    other |= {(group, name): config["groups"][group][name] for group, values in FIXED_GROUPS.items()
              for name, value in values.items() if config["groups"][group][name] != value}
    assert not other, other
    layers, stages, head_dim, ratio = map(config.get, ("layers", "stages", "head_dim", "mlp_ratio"))
    assert config["short_qk_dim"] == head_dim // 2
    assert {layer["v_dim"] for layer in layers} == {None, head_dim // 2}
    up, down = config["mlp_lr_mul"]
    assert math.isclose(up, ratio ** 0.5) and math.isclose(down, 2 * ratio ** 0.5)
    matrix = config["groups"]["matrix"]
    steps, multiple = config["num_iterations"], config["vocab_multiple"]
    scheduled = steps - config["extension_steps"]

    # Stages. The last one, the extension, has no duration
    of_stages = lambda name: tuple(config[name] if stage[name] is None else stage[name] for stage in stages)
    lengths = of_stages("seq_len")
    (ranks,) = {tokens // length for tokens, length in zip(of_stages("tokens_per_step"), lengths)}
    durations = [Fraction(stage["duration"]) for stage in stages[:-1]]
    shares = [sum(durations[:i + 1]) / sum(durations) for i in range(len(durations))]
    ends = [min(scheduled, math.ceil((scheduled + 1) * share)) for share in shares] + [steps]

    step_at = lambda share: math.ceil(share * scheduled - 1e-6)
    average_from = lambda step: math.ceil(Fraction(step * steps, RECORD_STEPS))
    average_rate = lambda rate: min(1.0, rate * RECORD_STEPS / steps)
    rates = {}
    for name, group in ADAM_GROUPS.items():
        lr, betas, decay = (config["groups"][group][part] for part in ("lr", "betas", "weight_decay"))
        rates[name] = Rates(lr / BASE_LR, tuple(betas), decay / (lr * BASE_DECAY))
    return Shape(
        topology=topology_of(layers), tokenizer=config["vocab_size"],
        vocab=math.ceil(config["vocab_size"] / multiple) * multiple, dim=config["model_dim"],
        heads=config["num_heads"], qk_group=config["qk_group_heads"], qk_narrow=head_dim // 2,
        qk_wide=head_dim, v_half=head_dim // 2, v_full=head_dim, hidden=round(ratio * config["model_dim"]),
        table_rows=config["ngram_rows"], gate_hidden=64, groups=config["mudd_groups"],
        ranks=ranks, block=1, stage_steps=tuple(end - first for first, end in zip([0] + ends, ends)),
        stage_tokens=lengths, stage_caps=of_stages("max_doc_len"), stage_lr=of_stages("lr_factor"),
        stage_blocks=tuple((stage["window_short"], stage["window_long"]) for stage in stages),
        token_weights=tuple([Ramp(*ends) for ends in stage["loss_weights"]] for stage in stages),
        prefix_weights=tuple(tuple(stage["prefix_weight"]) or (0,) for stage in stages),
        candidates=tuple(stage["num_classes"] for stage in stages),
        validation_blocks=tuple(config["val_windows"][::-1]), yarn_blocks=config["yarn_max_window"],
        attention_cap=config["max_attention_len"], matrix_lr=matrix["lr"],
        matrix_decay=matrix["weight_decay"] / matrix["lr"], rates=rates,
        adam_eps=config["adam_eps"], gradient_scale=49152 * ranks / config["tokens_per_step"],
        lr_floor=config["final_lr_frac"], lr_decay_from=scheduled * (1 - config["cooldown_frac"]),
        momentum_ramp=config["momentum_warmup_steps"], momentum_cooldown=config["momentum_cooldown_steps"],
        slow_rail_from=step_at(config["slow_momentum_start"]),
        rare_events_from=step_at(config["late_start"]),
        split_step=step_at(config["untie_frac"]) // 2 * 2 + 1,                  # an odd step
        tail_ema_from=math.ceil(average_from(896) / 2) * 2, blend_from=average_from(897),
        tail_avg_from=average_from(945), value_from=average_from(947), tail_ema_rate=average_rate(2 / 299),
        tail_ema_odd_rate=1 - (1 - average_rate(2 / 299)) ** 2, tail_avg_rate=average_rate(4 / 53),
        blend_rate=average_rate(2 / 75), attention_scale=tuple(config["attention_scale"][::-1]),
        missing_targets_count=False, calls_end_with_shards=False)


def run(config, p, shards, chunks, prefix_of):
    """A run from p on, which is tied: (parameters, training loss per token of each step, validations).

    Validations are [step, loss]. shards: arrays of tokens. chunks: see validation_loss.
    """
    shape, every, points, losses = shape_of(config), config["val_loss_every"], [], []
    state = start_state(shape, p)
    assert torch.equal(p["embed"], p["head"])
    for step, batch in zip(range(shape.steps), packed_batches(shape, shards)):
        if every and step % every == 0:
            points.append([step, validation_loss(shape, p, chunks, step=step)])
        loss, grads, state["offsets"] = gradients(shape, p, batch, step, prefix_of, state["offsets"])
        p, state = update(shape, p, grads, state, step)
        losses.append(loss / shape.stage_tokens[shape.stage(step)])
    assert len(losses) == shape.steps
    p = write_back(shape, p, state["averages"])
    points.append([shape.steps, validation_loss(shape, p, chunks)])
    return p, losses, points
