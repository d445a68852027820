"""Reference implementation of the record of 2026-07-17 in float64: model, loss, optimizers, schedules.

Written for tests, only from a description of this record. Loops and dense masks, no fast forms, no low precision.
V = vocab (padded), D = dim, H = heads, K = head_dim (H * K = D), F = hidden, G = gate_hidden.
Matrices are outputs x inputs. Parameters, one flat dict of float64 leaf tensors:
  embed (V,D)  head (V,D)  ve.{0..4} (V,D)  bigram (bigram_rows,D)
  signs (sign_rows,D) of +-1, not trained
  q.{l} k.{l} v.{l} o.{l} (D,D), s0.{l} s1.{l} ()     layer in 0..10 without 6 (attention layers)
  up.{l} down.{l} (F,D)                               layer in 0..10, MLP(u) = down^T relu(up u)^2
  attn_residual.{l} attn_out.{l} ()                   layer in 0..9 without 6 (r and p of attention)
  mlp_residual.{l} mlp_out.{l} ()                     layer in 0..9 (r and p of the MLP)
  smear ()  smear_gate (12,)  skip ()  gate_scale () (common scale of pre and post)
  ve_gate.{1,2,8,9} (H,12)
  {pre,post,mudd,out}.w1 (G,D), .w2 (n,G), .bias (n,)   outputs in the order of GENERATORS
A stage is (short window, long window, frequencies (K/4), attention scale), windows in tokens.
"""
import math
from dataclasses import dataclass

import torch

LAYERS = range(11)
ATTENTION = [layer for layer in LAYERS if layer != 6]
PAIRED = (0, 2, 5, 9)
LONG = (3, 10)                                  # long windows and key offset
VE_TABLE = {1: 0, 2: 1, 8: 2, 9: 3, 10: 4}      # layer -> table
VE_GATED = (1, 2, 8, 9)
GATED = (3, 10)
XSA = (1, 3, 4, 7)
FROM_H7 = (8, 9, 10)
EPS = 2.0 ** -23
F64 = torch.float64

# (layer, coefficient, size, initial value). 'H' is the number of heads.
PRE = [(1, "xsa", "H", 0.0), (3, "xsa", "H", 0.0), (3, "gate", "H", 0.25),
       (0, "x0", 1, 0.0), (0, "bigram", 1, 0.05), (1, "x0", 1, 0.0), (1, "bigram", 1, 0.05),
       (2, "x0", 1, 0.0), (2, "bigram", 1, 0.05), (3, "x0", 1, 0.0), (3, "bigram", 1, 0.05)]
POST = [(4, "xsa", "H", 0.0), (7, "xsa", "H", 0.0), (10, "gate", "H", 0.25),
        (4, "x0", 1, 0.0), (4, "bigram", 1, 0.05), (5, "x0", 1, 0.0), (5, "bigram", 1, 0.05),
        (7, "x0", 1, 0.0), (7, "bigram", 1, 0.05), (8, "x0", 1, 0.0), (8, "bigram", 1, 0.05),
        (9, "x0", 1, 0.0), (9, "bigram", 1, 0.05), (6, "skip", 1, 0.5),
        (10, "dc_w1", "H", 1.0), (10, "dc_w2", "H", 0.0)]
ROOT = math.sqrt(1.1)
MUDD_INIT = [0, 0, 0, 0, 0, 0, 2, 2, ROOT, 1, 0, 0.05, ROOT, 1]
MUDD = [(10, "m%d" % i, 1, float(value)) for i, value in enumerate(MUDD_INIT)]
OUT = [(10, "n%d" % i, 1, value) for i, value in enumerate([0.0, -0.5, 0.0, 0.0, 0.0])]
GENERATORS = {"pre": PRE, "post": POST, "mudd": MUDD, "out": OUT}


@dataclass
class Shape:
    vocab: int
    dim: int
    heads: int
    head_dim: int
    hidden: int
    bigram_rows: int
    sign_rows: int = 8192
    gate_hidden: int = 64

    def __post_init__(self):
        assert self.heads % 2 == 0 and self.heads * self.head_dim == self.dim
        assert self.head_dim % 4 == 0 and self.dim >= 12 and self.bigram_rows >= 3


def outputs_of(name, shape):
    """The outputs of a generator in order: (layer, coefficient, size, initial value)."""
    return [(layer, c, shape.heads if n == "H" else n, value) for layer, c, n, value in GENERATORS[name]]


def init_params(shape, generator):
    """Random values with which each path has an effect. In the recipe many initial values are zero."""
    def normal(std, *size):
        return std * torch.randn(size, generator=generator, dtype=F64)

    def uniform(bound, *size):
        return bound * (2 * torch.rand(size, generator=generator, dtype=F64) - 1)

    D, H, F, V = shape.dim, shape.heads, shape.hidden, shape.vocab
    bound = math.sqrt(3) * 0.5 * D ** -0.5
    p = {"embed": normal(0.5, V, D), "head": normal(2 * D ** -0.5, V, D)}
    for i in range(5):
        p["ve.%d" % i] = normal(0.3, V, D)
    p["bigram"] = normal(0.5, shape.bigram_rows, D)
    for layer in ATTENTION:
        for name in "qkvo":
            p["%s.%d" % (name, layer)] = uniform(bound, D, D)
        p["s0.%d" % layer] = 0.5 + normal(0.1)
        p["s1.%d" % layer] = 1.0 + normal(0.1)
    for layer in LAYERS:
        p["up.%d" % layer] = uniform(bound, F, D)
        p["down.%d" % layer] = uniform(bound, F, D)
    for layer in range(10):
        for part in ("attn", "mlp") if layer != 6 else ("mlp",):
            p["%s_residual.%d" % (part, layer)] = ROOT + normal(0.1)
            p["%s_out.%d" % (part, layer)] = 1.0 + normal(0.1)
    p["smear"] = 0.4 + normal(0.1)
    p["smear_gate"] = normal(0.5, 12)
    p["skip"] = -1.5 + normal(0.2)
    for layer in VE_GATED:
        p["ve_gate.%d" % layer] = normal(0.5, H, 12)
    for name in GENERATORS:
        start = [value / 0.1 for _, _, n, value in outputs_of(name, shape) for _ in range(n)]
        p[name + ".w1"] = uniform(D ** -0.5, shape.gate_hidden, D)
        p[name + ".w2"] = normal(0.25, len(start), shape.gate_hidden)
        p[name + ".bias"] = torch.tensor(start, dtype=F64) + normal(1.0, len(start))
    p["gate_scale"] = 0.1 + normal(0.02)
    for value in p.values():
        value.requires_grad_(True)
    p["signs"] = torch.where(normal(1.0, shape.sign_rows, D) >= 0, 1.0, -1.0).to(F64)
    return p


# ---------------------------------------------------------------- indices

def positions_of(total, starts):
    """Position of each index in its buffer."""
    starts, out = set(int(s) for s in starts), []
    for t in range(total):
        out.append(0 if t in starts else out[-1] + 1)
    return out


def int32(value):
    return (value + 2 ** 31) % 2 ** 32 - 2 ** 31


def bigram_rows_of(tokens, starts, rows):
    """Rows of the bigram table. Position 0 reads row rows - 1. Position 1 uses rows - 1 instead of token 0."""
    tokens, out = [int(t) for t in tokens], []
    for t, position in enumerate(positions_of(len(tokens), starts)):
        if position == 0:
            out.append(rows - 1)
            continue
        before = rows - 1 if position == 1 else tokens[t - 1]
        out.append((int32(36313 * tokens[t]) ^ int32(27191 * before)) % (rows - 1))
    return out


def sign_rows_of(tokens, starts, n):
    """Rows of the bigram signs, from the true tokens. Position 0 takes row 0."""
    tokens = [int(t) for t in tokens]
    where = positions_of(len(tokens), starts)
    return [0 if where[t] == 0 else (tokens[t - 1] ^ tokens[t]) % n for t in range(len(tokens))]


def prefix_table(vocab):
    """Longest proper byte prefix that is a token, else -1. Special and padding tokens: b''."""
    number = {}
    for i, token in enumerate(vocab):
        if len(token) > 0:
            number.setdefault(token, i)
    out = []
    for token in vocab:
        found = -1
        for length in range(1, len(token)):     # the longest prefix is found last
            found = number.get(token[:length], found)
        out.append(found)
    return out


# ---------------------------------------------------------------- forward

def rms_norm(x, eps=EPS):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def coefficients(params, shape, name, x, scale):
    """scale * (W2 gelu(W1 x) + b), cut into a dict (layer, coefficient) -> (T, size)."""
    hidden = x @ params[name + ".w1"].T
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    c = scale * (hidden @ params[name + ".w2"].T + params[name + ".bias"])
    out, at = {}, 0
    for layer, coefficient, size, _ in outputs_of(name, shape):
        out[layer, coefficient] = c[:, at:at + size]
        at += size
    assert at == c.shape[1]
    return out


def rotate(x, positions, frequencies):
    """x (T, K): the first K/2 dims rotate in adjacent pairs, with one frequency per pair."""
    y = [None] * x.shape[1]
    for j in range(x.shape[1] // 4):
        angle = positions * frequencies[j]
        y[2 * j] = x[:, 2 * j] * torch.cos(angle) + x[:, 2 * j + 1] * torch.sin(angle)
        y[2 * j + 1] = x[:, 2 * j + 1] * torch.cos(angle) - x[:, 2 * j] * torch.sin(angle)
    for j in range(x.shape[1] // 2, x.shape[1]):
        y[j] = x[:, j]
    return torch.stack(y, dim=1)


def probabilities(q, k, documents, distance, scale):
    """Softmax (rows x rows) over the keys of a query's document at distance 0..distance."""
    rows = torch.arange(len(documents))
    back = rows[:, None] - rows[None, :]
    seen = (back >= 0) & (back <= distance) & (documents[:, None] == documents[None, :])
    logits = (scale * (q @ k.T)).masked_fill(~seen, -math.inf)
    return torch.softmax(logits, dim=-1)


def attention(params, shape, layer, u, table, extra, c, positions, documents, stage, dc_band):
    """Attention of u. table is the raw VE rows or None, extra is v' of layer 10, c are the coefficients."""
    short, long_, frequencies, scale = stage
    T, H, K = u.shape[0], shape.heads, shape.head_dim
    half = H // 2
    s0, s1 = params["s0.%d" % layer], params["s1.%d" % layer]
    q = (u @ (s0 * params["q.%d" % layer]).T).reshape(T, H, K)
    k = (u @ (s0 * params["k.%d" % layer]).T).reshape(T, H, K)
    v = (u @ (s0 * params["v.%d" % layer]).T).reshape(T, H, K)
    q, k = rms_norm(q), rms_norm(k)
    if table is not None:
        rows = table.reshape(T, H, K)
        if layer == 10:
            gate = torch.cat([c[10, "m6"]] * half + [c[10, "m7"]] * half, dim=1)
            v = v + gate[:, :, None] * rows + extra.reshape(T, H, K)
        else:
            source = torch.cat([u[:, 0:6], table[:, 0:6]], dim=1)
            gate = 2 * torch.sigmoid(source @ params["ve_gate.%d" % layer].T)
            v = v + gate[:, :, None] * rows
    at = torch.tensor(positions, dtype=F64)
    turned_q, turned_k = [], []
    for h in range(H):
        where = 2 * at + h % 2 if layer in PAIRED else at
        turned_q.append(rotate(q[:, h], where, frequencies))
        turned_k.append(rotate(k[:, h], where, frequencies))
    q, k = torch.stack(turned_q, dim=1), torch.stack(turned_k, dim=1)
    if layer in LONG:                               # key offset, inside the buffer
        k = torch.stack([k[t] if positions[t] == 0 else
                         torch.cat([k[t, :, :K // 2], k[t - 1, :, K // 2:]], dim=1) for t in range(T)])
    if layer in PAIRED:                             # rows 2t and 2t + 1: first and second half of the heads
        q2, k2, v2 = [torch.stack([z[:, :half], z[:, half:]], dim=1).reshape(2 * T, half, K)
                      for z in (q, k, v)]
        documents2 = documents.repeat_interleave(2)
        y2 = torch.stack([probabilities(q2[:, s], k2[:, s], documents2, short, scale) @ v2[:, s]
                          for s in range(half)], dim=1)
        y = torch.cat([y2[0::2], y2[1::2]], dim=1)
    else:
        window = long_ if layer in LONG else short
        y = torch.stack([probabilities(q[:, h], k[:, h], documents, window, scale) @ v[:, h]
                         for h in range(H)], dim=1)
    if layer == 10:                                 # dynamic head composition over the nearest tokens
        w1, w2 = rms_norm(c[10, "dc_w1"], 1e-6), c[10, "dc_w2"]
        mixed = sum(w1[:, g:g + 1] * probabilities(q[:, g], k[:, g], documents, dc_band - 1, scale)
                    for g in range(H))
        y = torch.stack([y[:, h] + w2[:, h:h + 1] * (mixed @ v[:, h]) for h in range(H)], dim=1)
    if layer in XSA:
        along = (y * v).sum(dim=-1) / torch.clamp((v * v).sum(dim=-1), min=1e-8)
        y = y - (torch.tanh(c[layer, "xsa"]) * along)[:, :, None] * v
    if layer in GATED:
        y = y * c[layer, "gate"][:, :, None]
    return y.reshape(T, H * K) @ (s1 * params["o.%d" % layer]).T


def mlp(params, layer, u):
    return torch.relu(u @ params["up.%d" % layer].T) ** 2 @ params["down.%d" % layer]


def forward(params, shape, tokens, starts, doc_ids, stage, dc_band=112):
    """Softcapped logits z (T, V) of one or more concatenated packed buffers."""
    tokens = torch.as_tensor(tokens, dtype=torch.long)
    documents = torch.as_tensor(doc_ids, dtype=torch.long)
    positions = positions_of(len(tokens), starts)
    table = {layer: params["ve.%d" % i][tokens] for layer, i in VE_TABLE.items()}
    e = params["embed"][tokens]
    amount = params["smear"] * torch.sigmoid(e[:, :12] @ params["smear_gate"])
    e = torch.stack([e[t] if positions[t] == 0 else e[t] + amount[t] * e[t - 1]
                     for t in range(len(tokens))])
    x0 = rms_norm(e)
    b = params["bigram"][torch.tensor(bigram_rows_of(tokens, starts, shape.bigram_rows))]
    b = b * params["signs"][torch.tensor(sign_rows_of(tokens, starts, shape.sign_rows))]
    c = coefficients(params, shape, "pre", x0, params["gate_scale"])
    x_in = x0 + c[0, "bigram"] * b
    x, h3, h7, x9, extra = x_in, None, None, None, None
    for layer in LAYERS:
        if layer == 4:
            c.update(coefficients(params, shape, "post", x, params["gate_scale"]))
        if layer == 6:
            x = x + torch.sigmoid(params["skip"]) * c[6, "skip"] * h3
        if layer == 10:
            x9 = x
            c.update(coefficients(params, shape, "mudd", x, 0.1))
            extra = c[10, "m0"] * x_in + c[10, "m1"] * h7 + c[10, "m2"] * x
            x = (1 + c[10, "m5"]) * x + c[10, "m3"] * x_in + c[10, "m4"] * h7
        if layer != 6:
            u = rms_norm(h7) if layer in FROM_H7 else rms_norm(x)
            y = attention(params, shape, layer, u, table.get(layer), extra, c, positions, documents,
                          stage, dc_band)
            if layer == 10:
                x = c[10, "m8"] * x + c[10, "m9"] * y + c[10, "m10"] * x_in + c[10, "m11"] * b
            else:
                x = params["attn_residual.%d" % layer] * x + params["attn_out.%d" % layer] * y
                x = x + c[layer, "x0"] * x0
                if layer != 0:
                    x = x + c[layer, "bigram"] * b
        if layer == 10:
            x = c[10, "m12"] * x + c[10, "m13"] * mlp(params, layer, rms_norm(x))
        else:
            x = params["mlp_residual.%d" % layer] * x + params["mlp_out.%d" % layer] * mlp(params, layer, rms_norm(x))
        if layer == 3:
            h3 = x
        if layer == 7:
            h7 = x
    n = coefficients(params, shape, "out", x, 0.1)
    x = (x + n[10, "n0"] * x_in + n[10, "n1"] * h7 + n[10, "n2"] * x9
         + n[10, "n3"] * table[1] + n[10, "n4"] * h3)       # table[1] is VE table 0
    return 23 * torch.sigmoid((rms_norm(x) @ params["head"].T + 5) / 7.5)


def loss(params, shape, tokens, targets, starts, doc_ids, stage, weights, prefix_weight, prefix_of,
         dc_band=112):
    """Training loss summed over all tokens. prefix_of is a list of V prefix tokens or -1."""
    logp = torch.log_softmax(forward(params, shape, tokens, starts, doc_ids, stage, dc_band), dim=-1)
    targets = [int(t) for t in targets]
    positions = positions_of(len(targets), starts)
    total = torch.zeros((), dtype=F64)
    for t in range(len(targets)):
        for k, weight in enumerate(weights):    # t + k is in the buffer of t if its position is k larger
            if weight != 0 and t + k < len(targets) and positions[t + k] == positions[t] + k:
                total = total - weight * logp[t, targets[t + k]]
        prefix = int(prefix_of[targets[t]]) if prefix_of is not None else -1
        if prefix_weight != 0 and prefix >= 0:
            total = total - prefix_weight * logp[t, prefix]
    return total


def val_loss(params, shape, tokens, targets, starts, doc_ids, stage, dc_band=112):
    """Mean of the plain cross-entropy."""
    return loss(params, shape, tokens, targets, starts, doc_ids, stage, (1.0,), 0.0, None,
                dc_band) / len(targets)


# ---------------------------------------------------------------- schedules

STEPS, EXTENSION = 1270, 15
BLOCKS = [(1, 3), (3, 7), (5, 11), (6, 13)]
TOKENS = [131072, 262144, 393216, 393216]
LR_STAGE = [1.0, 1.52, 1.73]


def edges(n=STEPS):
    """First steps of stages 0, 1, 2 and of the extension (stage 3)."""
    return [0, round(n / 3), round(2 * n / 3), n]


def stage_of(step, n=STEPS):
    return sum(step >= first for first in edges(n)) - 1


def lr_factor(step, n=STEPS):
    if step >= n:
        return 0.15
    value, start = LR_STAGE[stage_of(step, n)], round(0.4 * n)
    if step < start:
        return value
    t = (step - start) / (n - start)
    return value * (1 - t) + 0.15 * t


def momentum(step, n=STEPS, extension=EXTENSION):
    last = n + extension - 50
    if step > last:
        return 0.95 - 0.1 * (step - last) / 50
    return 0.85 + 0.1 * step / 300 if step < 300 else 0.95


def loss_weights(step, n=STEPS):
    """(w0, w1, w2, prefix weight)."""
    stage, first = stage_of(step, n), edges(n)
    if stage >= 2:
        return (1.0, 0.0, 0.0, 0.0)
    done = (step - first[stage]) / (first[stage + 1] - first[stage])
    if stage == 0:
        return (1.0, 0.5, 0.25 * (1 - done), 0.25)
    return (1.0, 0.5 * (1 - done), 0.0, 0.25 * (1 - done))


def windows(step, n=STEPS, final_validation=False):
    """(short, long) in tokens."""
    short, long_ = (6, 20) if final_validation else BLOCKS[stage_of(step, n)]
    return 128 * short, 128 * long_


def yarn(step, head_dim, n=STEPS):
    """(frequencies, attention scale). The final validation uses the values of the last step."""
    count = head_dim // 4
    frequencies = [(1 / 1024) ** (i / (count - 1)) if count > 1 else 1.0 for i in range(count)]
    scale = 0.1
    for stage in range(1, stage_of(step, n) + 1):
        old, new = 128 * BLOCKS[stage - 1][1], 128 * BLOCKS[stage][1]
        for i, frequency in enumerate(frequencies):
            rotations = old * frequency / (2 * math.pi)
            g = min(max((rotations - 1) / 31, 0.0), 1.0)
            frequencies[i] = frequency * (old / new + g * (1 - old / new))
        scale = scale * (0.2 * math.log(new / old) + 1)
    return torch.tensor(frequencies, dtype=F64), scale


def stage_at(step, head_dim, n=STEPS, final_validation=False):
    """The stage tuple that forward takes."""
    return (*windows(step, n, final_validation), *yarn(step, head_dim, n))


def total_tokens(n=STEPS, extension=EXTENSION):
    return sum(TOKENS[stage_of(step, n)] for step in range(n + extension))


# ---------------------------------------------------------------- optimizers

POLAR = [(8.156554524902461, -22.48329292557795, 15.878769915207462),
         (4.042929935166739, -2.808917465908714, 0.5000178451051316),
         (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
         (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
         (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]
LR_MATRIX = {"q": 1.0, "k": 1.0, "v": 1.0, "o": 1.0, "up": 2.0, "down": 4.0}


class MatrixState:
    def __init__(self):
        self.momentum, self.variance = None, None


class AdamState:
    def __init__(self):
        self.m, self.v, self.t = None, None, 0


def polar_express(U):
    X = U.T if U.shape[0] > U.shape[1] else U
    X = X / (1.02 * torch.linalg.norm(X) + 1e-6)
    for a, b, c in POLAR:
        A = X @ X.T
        X = a * X + b * (A @ X) + c * (A @ A @ X)
    return X.T if U.shape[0] > U.shape[1] else X


@torch.no_grad()
def matrix_update(W, G, state, lr_factor, momentum, lr_mul, per_column=False):
    """NorMuon in place for one matrix or QK group. per_column is True for QK groups, else one value per row."""
    if state.momentum is None:
        state.momentum = torch.zeros_like(G)
        size = (1, G.shape[1]) if per_column else (G.shape[0], 1)
        state.variance = torch.zeros(size, dtype=G.dtype)
    state.momentum = momentum * state.momentum + (1 - momentum) * G
    X = polar_express((1 - momentum) * G + momentum * state.momentum)
    r = (X * X).mean(dim=0 if per_column else 1, keepdim=True)
    state.variance = 0.9 * state.variance + 0.1 * r
    Y = X / torch.sqrt(torch.clamp(state.variance, min=1e-10))
    Y = Y * torch.linalg.norm(X) / torch.clamp(torch.linalg.norm(Y), min=1e-10)
    lr = 0.023 * lr_factor
    eta = lr * lr_mul
    mask = (Y * W >= 0).to(W.dtype)
    W.copy_(W - eta * Y - eta * (1.2 * lr) * W * mask)


@torch.no_grad()
def adam_update(p, G, state, lr_mul, betas, wd_mul, lr_factor):
    """Adam in place for one parameter."""
    if state.m is None:
        state.m, state.v = torch.zeros_like(G), torch.zeros_like(G)
    state.t += 1
    b1, b2 = betas
    state.m = b1 * state.m + (1 - b1) * G
    state.v = b2 * state.v + (1 - b2) * G * G
    lr = 0.008 * lr_mul * lr_factor
    u = lr * math.sqrt(1 - b2 ** state.t) / (1 - b1 ** state.t) * state.m / (torch.sqrt(state.v) + 1e-10)
    mask = (u * p > 0).to(p.dtype)
    p.copy_(p - u - lr * lr * 0.005 * wd_mul * p * mask)


def adam_settings(name):
    """(lr multiplier, betas, wd multiplier) of a parameter."""
    first, last = name.split(".")[0], name.split(".")[-1]
    if first in ("head", "embed"):
        return 1.0, (0.5, 0.95), 150.0
    if first in ("ve", "bigram"):
        return 75.0, (0.75, 0.95), 5.0
    if first in ("s0", "s1", "smear", "skip"):
        return 5.0, (0.9, 0.99), 0.0
    if first in ("attn_residual", "mlp_residual"):
        return 5.0, (0.9, 0.95), 0.0
    if first in ("attn_out", "mlp_out"):
        return 1.0, (0.9, 0.95), 0.0
    if first == "smear_gate":
        return 0.01, (0.9, 0.99), 0.0
    if first == "ve_gate":
        return 1.0, (0.9, 0.99), 1.0
    decay = 0.0 if last in ("bias", "gate_scale") else 1.0
    if first in ("mudd", "out"):
        return 0.25, (0.9, 0.99), decay
    if first in ("pre", "post", "gate_scale"):
        return 0.1, (0.9, 0.99), decay
    raise KeyError(name)


def split_mantissa(w):
    """float32 -> (bf16 high half by truncation, uint16 low half)."""
    bits = w.contiguous().view(torch.int32)
    high = (bits >> 16).to(torch.int16).view(torch.bfloat16)
    return high, (bits & 0xFFFF).to(torch.uint16)


def join(high, low):
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) | low.to(torch.int32)
    return bits.view(torch.float32)


def train(params, shape, batches, untie_step, prefix_of, stage_for=None, lr_for=lr_factor,
          momentum_for=momentum, weights_for=loss_weights, dc_band=112):
    """Train in place from step 0, one step for each (tokens, targets, starts, doc_ids) of batches.

    The *_for arguments are functions of the step. Embedding and head are tied up to and including
    untie_step, an odd step, and the embedding starts as a copy of the head. A negative step means never tied.
    Returns (losses, states). A loss is the sum of a step divided by its number of buffers.
    """
    assert untie_step < 0 or untie_step % 2 == 1
    stage_for = stage_for or (lambda step: stage_at(step, shape.head_dim))
    names = [name for name in params if name != "signs"]
    matrices = [name for name in names if name.split(".")[0] in LR_MATRIX]
    others = [name for name in names if name not in matrices]
    states, summed, losses = {}, {}, []
    group = 2 * shape.head_dim
    for name in others:
        states[name] = AdamState()
    if untie_step >= 0:
        with torch.no_grad():
            params["embed"].copy_(params["head"])
    for step, (tokens, targets, starts, doc_ids) in enumerate(batches):
        w0, w1, w2, prefix_weight = weights_for(step)
        value = loss(params, shape, tokens, targets, starts, doc_ids, stage_for(step), (w0, w1, w2),
                     prefix_weight, prefix_of, dc_band) / len(starts)
        losses.append(float(value.detach()))
        grads = dict(zip(names, torch.autograd.grad(value, [params[name] for name in names])))
        factor, mu = lr_for(step), momentum_for(step)
        for name in matrices:
            kind, W, G = name.split(".")[0], params[name].detach(), grads[name]
            if kind in ("q", "k"):              # groups of two neighbouring heads
                for g in range(shape.heads // 2):
                    part = slice(g * group, (g + 1) * group)
                    state = states.setdefault((name, g), MatrixState())
                    matrix_update(W[part], G[part], state, factor, mu, LR_MATRIX[kind], per_column=True)
            else:
                state = states.setdefault(name, MatrixState())
                matrix_update(W, G, state, factor, mu, LR_MATRIX[kind])
        for name in others:
            summed[name] = summed[name] + grads[name] if name in summed else grads[name]
        if step % 2 == 0:
            continue
        tied = step <= untie_step
        for name in others:
            G = summed[name]
            if tied and name == "embed":
                continue
            if tied and name == "head":
                G = G + summed["embed"]
            adam_update(params[name].detach(), G, states[name], *adam_settings(name), factor)
        if tied:
            params["embed"].detach().copy_(params["head"].detach())
        if step == untie_step:
            head = states["head"]
            states["embed"].m, states["embed"].v = head.m.clone(), head.v.clone()
            states["embed"].t = head.t
        summed = {}
    return losses, states
