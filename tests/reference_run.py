"""Reference implementation of a whole training run for tests: float64, one packed sequence at a time.

Written only from the description of record 32 and of the command line. A run is described by the options that
--print_config prints. Parameters are one flat dict of float64 tensors, trained in place. Their names:
  embed (V,D)  head (V,D)  ve.{i} (V,D)       V = padded vocabulary, D = model_dim, H = heads, F = MLP hidden
  q.{l} k.{l} v.{l} o.{l} (D,D)  gate.{l} (H,12)  s0.{l} ()  s1.{l} ()   s1 in layers with a value embedding
  up.{l} (D,F), used transposed  down.{l} (D,F)                          MLP(u) = down relu(up^T u)^2
  a.{l} b.{l} ()  skip.{l} ()                                            skip in layers that add a skip connection
"""
import glob
import math
from fractions import Fraction

import numpy as np
import torch

F64 = torch.float64


# ---------------------------------------------------------------- data

def read_shards(pattern):
    """The token arrays of the files in sorted order, and the document-start token."""
    shards, document_start = [], None
    for name in sorted(glob.glob(pattern)):
        raw = open(name, "rb").read()
        header = np.frombuffer(raw[:1024], dtype="<i4")
        assert header[0] == 20240520 and header[1] == 1 and len(raw) == 1024 + 2 * header[2], name
        document_start = int(header[4]) or 50256
        shards.append(np.frombuffer(raw[1024:], dtype="<u2").astype(np.int64))
    assert shards, pattern
    return shards, document_start


class Packer:
    """Packed sequences of documents. Documents are cut to the maximum length, and the rest is discarded."""

    def __init__(self, shards, document_start):
        self.shards, self.document_start = shards, document_start
        self.shard, self.document = 0, 0

    def next(self, length, max_doc_len):
        """(inputs, targets, document number of each input) of one sequence with `length` inputs."""
        while True:
            tokens = self.shards[self.shard]
            begins = [int(i) for i in np.flatnonzero(tokens == self.document_start)]
            ends = begins[1:] + [len(tokens)]
            pieces, held = [], 0
            while held < length + 1 and self.document < len(begins):
                begin, end = begins[self.document], ends[self.document]
                piece = tokens[begin:min(end, begin + max_doc_len, begin + length + 1 - held)]
                pieces.append(piece)
                held += len(piece)
                self.document += 1
            if held == length + 1:
                row = np.concatenate(pieces)
                numbers = np.concatenate([np.full(len(piece), i) for i, piece in enumerate(pieces)])
                return row[:-1], row[1:], numbers[:-1]
            self.shard, self.document = self.shard + 1, 0       # too few documents left: drop the tail


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


# ---------------------------------------------------------------- schedule

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
        low, high = self.config["momentum_start"], self.config["momentum_end"]
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
        scale = config["attention_scale"]
        for old, new in zip(long_windows, long_windows[1:]):
            old, new = min(old, config["yarn_max_window"]), min(new, config["yarn_max_window"])
            if old == new:
                continue
            for i, f in enumerate(frequencies):
                g = min(max((old * f / (2 * math.pi) - 1) / (32 - 1), 0.0), 1.0)
                frequencies[i] = f * (old / new + g * (1 - old / new))
            scale *= 0.2 * math.log(new / old) + 1
        return short, long_windows[-1], torch.tensor(frequencies, dtype=F64), scale


# ---------------------------------------------------------------- model

def rms_norm(x):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 2.0 ** -23)


def probabilities(q, k, documents, distance, scale):
    """Softmax (rows x rows) over the keys of a query's document at distance 0..distance."""
    rows = torch.arange(len(documents))
    back = rows[:, None] - rows[None, :]
    seen = (back >= 0) & (back <= distance) & (documents[:, None] == documents[None, :])
    logits = (scale * (q @ k.T)).masked_fill(~seen, -math.inf)
    return torch.softmax(logits, dim=-1)


def record_32(config, p, tokens, documents, windows):
    """Softcapped logits of one packed sequence."""
    short, long_, frequencies, scale = windows
    T, H, K = len(tokens), config["num_heads"], config["head_dim"]
    norm = rms_norm
    still = torch.zeros(K // 4, dtype=F64)                      # half of the channel pairs are not rotated
    angle = torch.arange(T, dtype=F64)[:, None, None] * torch.cat([frequencies, still])
    cos, sin = torch.cos(angle), torch.sin(angle)               # (T, 1, K / 2)

    def rotate(x):
        first, second = x[..., :K // 2], x[..., K // 2:]
        return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)

    x = x0 = norm(p["embed"][tokens])
    outputs = []
    for i, layer in enumerate(config["layers"]):
        if layer["skip_from"] is not None:
            x = x + torch.sigmoid(p["skip.%d" % i]) * outputs[layer["skip_from"]]
        x = p["a.%d" % i] * x + p["b.%d" % i] * x0
        if layer["attention"] != "none":
            u = norm(x)
            q = rotate(norm((u @ p["q.%d" % i].T).reshape(T, H, K)))
            k = rotate(norm((u @ p["k.%d" % i].T).reshape(T, H, K)))
            v = p["s0.%d" % i] * (u @ p["v.%d" % i].T).reshape(T, H, K)
            if layer["value_embed"] is not None:
                v = v + p["s1.%d" % i] * p["ve.%d" % layer["value_embed"]][tokens].reshape(T, H, K)
            window = long_ if layer["attention"] == "long" else short
            y = torch.stack([probabilities(q[:, h], k[:, h], documents, window, scale) @ v[:, h]
                             for h in range(H)], dim=1)
            y = y * torch.sigmoid(u[:, :12] @ p["gate.%d" % i].T)[:, :, None]
            x = x + y.reshape(T, H * K) @ p["o.%d" % i].T
        if layer["mlp"]:
            x = x + torch.relu(norm(x) @ p["up.%d" % i]) ** 2 @ p["down.%d" % i].T
        outputs.append(x)
    logits = norm(x) @ p["head"].T
    return config["softcap"] * torch.sigmoid((logits + config["softcap_shift"]) / config["softcap_width"])


def cross_entropy(config, params, row, windows):
    """The loss of one packed sequence, summed over its tokens."""
    inputs, targets, documents = (torch.tensor(z) for z in row)
    logp = torch.log_softmax(record_32(config, params, inputs, documents, windows), dim=-1)
    return -logp.gather(1, targets[:, None]).sum()


# ---------------------------------------------------------------- update rules

def newton_schulz(U):
    X = U.T if U.shape[0] > U.shape[1] else U
    X = X / (torch.linalg.norm(X) + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * (A @ X) + 2.0315 * (A @ A @ X)
    return X.T if U.shape[0] > U.shape[1] else X


def update_matrix(config, W, G, state, factor, decay_factor, momentum):
    """Update one matrix in place with Muon."""
    M = state["M"] = momentum * state.get("M", 0.0) + (1 - momentum) * G
    X = newton_schulz((1 - momentum) * G + momentum * M)
    eta = config["matrix_lr"] * factor * max(1, W.shape[0] / W.shape[1]) ** 0.5
    W -= eta * X + eta * config["matrix_weight_decay"] * decay_factor * W


def update_adam(config, p, G, state, name, factor, decay_factor):
    group = adam_group(name)
    b1, b2 = config[group + "_betas"]
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * G
    v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * G * G
    lr = config[group + "_lr"] * factor
    u = lr * math.sqrt(1 - b2 ** t) / (1 - b1 ** t) * m / (torch.sqrt(v) + config["adam_eps"])
    p -= u + lr * config[group + "_weight_decay"] * decay_factor * p


def adam_group(name):
    """The group of options of a parameter."""
    first = name.split(".")[0]
    if first in ("embed", "head"):
        return first
    if first == "ve":
        return "value_embed"
    assert first in ("s0", "s1", "skip", "a", "b"), name
    return "scalar"


def is_matrix(name):
    """Whether matrix_rule trains the parameter. In record 32 it also trains the attention gates."""
    return name.split(".")[0] in ("q", "k", "v", "o", "up", "down", "gate")


# ---------------------------------------------------------------- the run

def train(config, params):
    """Train in place. Returns the training loss per token of each step, and [step, loss] of each validation."""
    schedule, (shards, document_start) = Schedule(config), read_shards(config["train_files"])
    packer = Packer(shards * config["epochs"], document_start)
    params = {name: value.detach().requires_grad_() for name, value in params.items()}
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

        length, tokens = schedule.of_stage(step, "seq_len"), schedule.of_stage(step, "tokens_per_step")
        grads, total = [torch.zeros_like(value) for value in params.values()], 0.0
        for _ in range(tokens // length):
            row = packer.next(length, schedule.of_stage(step, "max_doc_len"))
            loss = cross_entropy(config, params, row, schedule.windows(step))
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            for grad, new in zip(grads, found):
                if new is not None:                             # Adam's epsilon is for 49,152 tokens
                    grad += new * 49152 / config["tokens_per_step"]
            total += float(loss.detach())
        losses.append(total / tokens)

        (matrix_factor, factor), momentum = schedule.lr_factors(step), schedule.momentum(step)
        for (name, param), grad in zip(params.items(), grads):
            value, state = param.detach(), states.setdefault(name, {})
            if is_matrix(name):
                update_matrix(config, value, grad, state, matrix_factor,
                              schedule.decay_factor(step, matrix_factor), momentum)
            else:
                update_adam(config, value, grad, state, name, factor, schedule.decay_factor(step, factor))
    return {"train_losses": losses, "val_points": points}
