"""Reference implementation of a whole training run for tests: float64, one packed sequence at a time.

Written only from descriptions: of record 32, of mechanisms of later records, and of the command line. It
trains the presets record_32 (record 32) and laptop. A run is described by the options that --print_config
prints. What record 92 shares with them (documents in a sequence, n-grams, their update, attention, YaRN,
orthogonalization, lanes, Adam) is in record92_reference.py. Parameters are one flat dict of float64 tensors.
Their names, where V is the padded vocabulary, D = model_dim, H = heads, F = MLP hidden, R = rows:
  embed (V,D)  head (V,D)  ve.{i} (V,D)  ngram (R,D)
  q.{l} k.{l} v.{l} o.{l} (D,D)  gate.{l} (H,12)  s0.{l} ()  s1.{l} ()   s1 in layers with a value embedding
  up.{l} (D,F), used transposed  down.{l} (D,F)                          MLP(u) = down relu(up^T u)^2
  a.{l} b.{l} c.{l} ()  skip.{l} ()                             skip in layers that add a skip connection
"""
import functools
import glob
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import record92_reference as r92
import torch
from record92_reference import F64
from record92_reference import rms as rms_norm


def read_shards(pattern):
    """The token arrays of the files in sorted order, and the document-start token."""
    shards = []
    for name in sorted(glob.glob(pattern)):
        with open(name, "rb") as file:
            raw = file.read()
        header = np.frombuffer(raw[:1024], dtype="<i4")
        assert header[0] == 20240520 and header[1] == 1 and len(raw) == 1024 + 2 * header[2], name
        document_start = int(header[4]) or 50256
        shards.append(np.frombuffer(raw[1024:], dtype="<u2").astype(np.int64))
    assert shards, pattern
    return shards, document_start


def pack(shards, document_start, take, sizes):
    """Packed sequences of one shard after the other: (inputs, targets, document number of each input).

    sizes: (number of inputs, longest document) of each sequence. A tail that fills no sequence is dropped.
    """
    shard = place = 0
    for size in sizes:
        while (found := take(shards[shard], document_start, place, *size)) is None:
            shard, place = shard + 1, 0
        row, numbers, place = found
        yield row[:-1], row[1:], numbers


def take_documents(tokens, document_start, document, length, max_doc_len):
    """(tokens, document numbers of the inputs, next document), None if too few tokens are left."""
    begins = np.flatnonzero(tokens == document_start).tolist()
    filled = r92.fill(tokens.tolist(), begins, document, length, max_doc_len)
    if filled is None:
        return None
    row, ends, document = filled
    return np.array(row), np.searchsorted(ends, np.arange(length), side="right"), document


def take_stream(tokens, document_start, place, length, _):
    """All tokens in their order. The first one begins a document, whatever it is."""
    row = tokens[place:place + length + 1]
    return (row, np.cumsum(row[:-1] == document_start), place + length) if len(row) > length else None


TAKES = {"document": take_documents, "anywhere": take_stream}


def validation_rows(config):
    """The validation tokens in order, in chunks. Each chunk and each start token begins a document."""
    shards, document_start = read_shards(config["val_files"])
    tokens = np.concatenate(shards)
    rows = []
    for at in range(0, config["val_tokens"], config["val_seq_len"]):
        length = min(config["val_seq_len"], config["val_tokens"] - at)
        inputs = tokens[at:at + length]
        rows.append((inputs, tokens[at + 1:at + length + 1], np.cumsum(inputs == document_start)))
    return rows


class Schedule:
    def __init__(self, config):
        self.config, self.stages = config, config["stages"]
        self.steps = config["num_iterations"]
        total, done, self.first = sum(Fraction(s["duration"]) for s in self.stages), Fraction(0), []
        for stage in self.stages:               # the stage of step s contains s / (steps + 1)
            self.first.append(min(math.ceil((self.steps + 1) * done / total), self.steps))
            done += Fraction(stage["duration"])
        assert config["lr_warmup_frac"] == config["extension_steps"] == 0

    def number(self, step):
        return max(i for i, first in enumerate(self.first) if step >= first)

    def of_stage(self, step, name):
        value = self.stages[self.number(step)][name]
        return self.config[name] if value is None else value

    def sizes(self, step):
        """(number of inputs, longest document) of each sequence of a step."""
        names = "tokens_per_step", "seq_len", "max_doc_len"
        tokens, length, longest = (self.of_stage(step, name) for name in names)
        return [(length, longest)] * (tokens // length)

    def lr_factor(self, step, cooldown):
        floor = self.config["final_lr_frac"]
        value, x = self.stages[self.number(step)]["lr_factor"], step / self.steps
        if x < 1 - cooldown:
            return value
        w = (1 - x) / cooldown
        return value * w + floor * (1 - w)

    def lr_factors(self, step):
        """LR factors of matrices and of all other parameters."""
        cooldown, of_matrices = self.config["cooldown_frac"], self.config["matrix_cooldown_frac"]
        of_matrices = cooldown if of_matrices == -1 else of_matrices
        return self.lr_factor(step, of_matrices), self.lr_factor(step, cooldown)

    def decay_factor(self, step, lr_factor):
        kind = self.config["decay_schedule"]
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return {"constant": 1.0, "lr": lr_factor, "cosine": cosine}[kind]

    def momentum(self, step):
        low, high = self.config["momentum"]
        rise, fall = self.config["momentum_warmup_steps"], self.config["momentum_cooldown_steps"]
        if fall and step > self.steps - fall:
            return high - (high - low) * (step - (self.steps - fall)) / fall
        return low + (high - low) * step / rise if step < rise else high

    def windows(self, step):
        """(short, long, frequencies, attention scale) of a step. Step `steps` is the final validation."""
        config, last = self.config, min(step, self.steps - 1)
        long_windows = [s["window_long"] for s in self.stages[:self.number(last) + 1]]
        short = self.stages[self.number(last)]["window_short"]
        if step == self.steps and config["val_windows"]:
            long_windows, short = long_windows + [config["val_windows"][0]], config["val_windows"][1]
        count = config["head_dim"] // 4
        frequencies = [(1 / 1024) ** (i / (count - 1)) for i in range(count)]
        scale, _ = config["attention_scale"]
        windows = [min(window, config["yarn_max_window"]) for window in long_windows]
        return short, long_windows[-1], *r92.lengthen(frequencies, scale, windows)


def rotate(x, frequencies):
    """Rotate channels j and j + K/2 of each head, for j < K/4. The other half does not rotate."""
    T, _, K = x.shape
    still = torch.zeros(K // 4, dtype=F64)
    angle = torch.arange(T, dtype=F64)[:, None, None] * torch.cat([frequencies, still])
    cos, sin = torch.cos(angle), torch.sin(angle)               # (T, 1, K / 2)
    first, second = x[..., :K // 2], x[..., K // 2:]
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


def offset_keys(k):
    """The channels that are not rotated come from the previous token. The first token keeps its own."""
    K = k.shape[-1]
    is_still = torch.arange(K) % (K // 2) >= K // 4
    return torch.where(is_still, torch.cat([k[:1], k[:-1]]), k)


def attention(config, p, i, x, tokens, documents, windows):
    """The attention of layer i on the normalized input."""
    layer, (short, long_, frequencies, scale) = config["layers"][i], windows
    T, H, K = len(tokens), config["num_heads"], config["head_dim"]
    u = rms_norm(x)
    q = rotate(rms_norm((u @ p[f"q.{i}"].T).reshape(T, H, K)), frequencies)
    k = rotate(rms_norm((u @ p[f"k.{i}"].T).reshape(T, H, K)), frequencies)
    if layer["key_offset"]:
        k = offset_keys(k)
    v = p[f"s0.{i}"] * (u @ p[f"v.{i}"].T).reshape(T, H, K)
    if layer["value_embed"] is not None:
        v = v + p[f"s1.{i}"] * p[f"ve.{layer['value_embed']}"][tokens].reshape(T, H, K)
    window = long_ if layer["attention"] == "long" else short
    y = r92.attend(q, k, v, documents, window, scale)
    if config["attention_gate_dim"]:
        y = y * torch.sigmoid(u[:, :config["attention_gate_dim"]] @ p[f"gate.{i}"].T)[:, :, None]
    return y.reshape(T, H * K) @ p[f"o.{i}"].T


@functools.cache
def ngram_signs(dim):
    """8,192 rows of pseudo-random signs."""
    bits = torch.arange(8192 * dim)
    for _ in range(2):
        bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return (((bits >> 15) & 1) * 2 - 1).view(8192, dim).to(F64)


def forward(config, p, tokens, documents, windows):
    """Softcapped logits of one packed sequence."""
    x = x0 = rms_norm(p["embed"][tokens])
    if config["ngram_rows"]:
        table, signs = p["ngram"], ngram_signs(config["model_dim"])
        shape = replace(r92.RECORD_92, table_rows=len(table))
        ngrams = r92.ngram_vectors(shape, dict(table=table, signs=signs), tokens, config["ngram_order"])
    outputs = []
    for i, layer in enumerate(config["layers"]):
        has_ngrams = config["ngram_rows"] and layer["ngram"]
        if has_ngrams and i == 0:
            x = x + p["c.0"] * ngrams
        if layer["skip_from"] is not None:
            x = x + torch.sigmoid(p[f"skip.{i}"]) * outputs[layer["skip_from"]]
        if config["x0_mix"] == "before":
            x = p[f"a.{i}"] * x + p[f"b.{i}"] * x0
        if layer["attention"] != "none":
            x = x + attention(config, p, i, x, tokens, documents, windows)
        if config["x0_mix"] == "after_attention" and layer["x0"]:
            x = x + p[f"b.{i}"] * x0
        if has_ngrams and i > 0:
            x = x + p[f"c.{i}"] * ngrams
        if layer["mlp"]:
            x = x + torch.relu(rms_norm(x) @ p[f"up.{i}"]) ** 2 @ p[f"down.{i}"].T
        outputs.append(x)
    logits = rms_norm(x) @ p["head"].T
    cap, shift, width = config["softcap"]
    return cap * torch.sigmoid((logits + shift) / width)


def cross_entropy(config, params, row, windows):
    """The loss of one packed sequence, summed over its tokens."""
    inputs, targets, documents = (torch.tensor(z) for z in row)
    logp = torch.log_softmax(forward(config, params, inputs, documents, windows), dim=-1)
    return -logp.gather(1, targets[:, None]).sum()


NEWTON_SCHULZ = [(3.4445, -4.7750, 2.0315)] * 5
POLAR_EXPRESS = [(8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]
# the polynomials, and two numbers of the first division: by factor * norm + epsilon
ORTHOGONALIZATIONS = {"newton_schulz": (NEWTON_SCHULZ, 1.0, 1e-7),
                      "polar_express": (POLAR_EXPRESS, 1.02, 1e-6)}


def update_matrix(config, W, G, state, factor, decay_factor, momentum):
    """Update one matrix in place with Muon or NorMuon."""
    options = config["groups"]["matrix"]
    M = state["M"] = momentum * state.get("M", 0.0) + (1 - momentum) * G
    X = r92.whiten((1 - momentum) * G + momentum * M, *ORTHOGONALIZATIONS[config["orthogonalize"]])
    if options["rule"] == "normuon":
        X, state["v"] = r92.equalise(X, state.get("v", 0.0), X.shape, 1 - options["betas"][1])
    eta = options["lr"] * factor * max(1, W.shape[0] / W.shape[1]) ** 0.5
    W -= eta * X + eta * options["weight_decay"] * decay_factor * W


def update_adam(config, p, G, state, name, factor, decay_factor):
    options = config["groups"][adam_group(config, name)]
    lr, before = options["lr"] * factor, state.get("adam", r92.adam_start(p))
    new, state["adam"] = r92.adam(p, G, before, lr, options["betas"], 0, config["adam_eps"])
    p.copy_(new - lr * options["weight_decay"] * decay_factor * p)


def update_rows(config, p, G, state, factor):
    """The n-gram table: t counts its updates, also those in which a row has no gradient."""
    options = config["groups"]["ngram"]
    b1, b2 = options["betas"]
    assert b1 == options["weight_decay"] == 0
    t, v = state.get("t", 0) + 1, state.get("v", torch.zeros(len(p), dtype=F64))
    new, state["v"] = r92.table_update(p, v, G, t, options["lr"] * factor, b2, 0, config["adam_eps"])
    state["t"] = t
    p.copy_(new)


def adam_group(config, name):
    """The group of a parameter."""
    mix = "mix" if config["x0_mix"] == "after_attention" else "scalar"
    groups = dict(embed="embed", head="head", ve="value_embed", b=mix, c=mix)
    return (dict.fromkeys(("s0", "s1", "skip", "a"), "scalar") | groups)[name.split(".")[0]]


def is_matrix(name):
    """Whether matrix_rule trains the parameter. In record 32 it also trains the attention gates."""
    return name.split(".")[0] in ("q", "k", "v", "o", "up", "down", "gate")


def run(config, params):
    """A run from params on: (parameters, training loss per token of each step, validations [step, loss])."""
    schedule, (shards, document_start) = Schedule(config), read_shards(config["train_files"])
    sizes = [schedule.sizes(step) for step in range(schedule.steps)]
    rows = pack(shards * config["epochs"], document_start, TAKES[config["sequence_start"]], sum(sizes, []))
    params = {name: value.clone().requires_grad_() for name, value in params.items()}
    states, losses, points = {}, [], []
    for step in range(schedule.steps + 1):
        every = config["val_loss_every"]
        if step == schedule.steps or every and step % every == 0:
            with torch.no_grad():
                total = sum(cross_entropy(config, params, row, schedule.windows(step))
                            for row in validation_rows(config))
            points.append([step, float(total) / config["val_tokens"]])
        if step == schedule.steps:
            break

        total = sum(cross_entropy(config, params, next(rows), schedule.windows(step)) for _ in sizes[step])
        losses.append(float(total.detach()) / sum(length for length, _ in sizes[step]))
        scaled = total * 49152 / config["tokens_per_step"]      # Adam's epsilon is for 49,152 tokens
        grads = torch.autograd.grad(scaled, list(params.values()), materialize_grads=True)

        (matrix_factor, factor), momentum = schedule.lr_factors(step), schedule.momentum(step)
        for (name, param), grad in zip(params.items(), grads):
            value, state = param.detach(), states.setdefault(name, {})
            if is_matrix(name):
                update_matrix(config, value, grad, state, matrix_factor,
                              schedule.decay_factor(step, matrix_factor), momentum)
            elif name == "ngram":
                update_rows(config, value, grad, state, factor)
            else:
                update_adam(config, value, grad, state, name, factor, schedule.decay_factor(step, factor))
    tokens = sum(length for length, _ in sum(sizes, []))
    assert config["epochs"] == 1 or tokens > sum(map(len, shards))       # the second epoch begins
    return {name: value.detach() for name, value in params.items()}, losses, points
