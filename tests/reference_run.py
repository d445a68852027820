"""Reference implementation of a whole training run for tests: float64, one packed sequence at a time.

Written only from the description of the two recipes and of the command line. A run is described by the options
that --print_config prints. Parameters are one flat dict of float64 tensors, trained in place. The newest recipe
uses the model and the parameter names of frontier_reference. Parameter names of record 32:
  embed (V,D)  head (V,D)  ve.{i} (V,D)       V = padded vocabulary, D = model_dim, H = heads, F = MLP hidden
  q.{l} k.{l} v.{l} o.{l} (D,D)  gate.{l} (H,12)  s0.{l} ()  s1.{l} ()   s1 in layers with a value embedding
  up.{l} (D,F), used transposed  down.{l} (D,F)                          MLP(u) = down relu(up^T u)^2
  a.{l} b.{l} ()  skip.{l} ()                                            skip in layers that add a skip connection
"""
import glob
import json
import math
from fractions import Fraction

import frontier_reference as frontier
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


def prefix_of(config, vocab, document_start):
    """The longest proper prefix of each token id that is also a token, else -1. The file is {token: id}."""
    ids = json.load(open(config["vocab_file"], encoding="utf-8"))
    out = [-1] * vocab
    for token, number in ids.items():
        if number != document_start:
            for length in range(1, len(token)):                 # the longest prefix is found last
                found = ids.get(token[:length])
                if found is not None and found != document_start:
                    out[number] = found
    return torch.tensor(out)


# ---------------------------------------------------------------- schedule

class Schedule:
    def __init__(self, config):
        self.config, self.stages = config, config["stages"]
        self.steps = config["num_iterations"]
        self.scheduled = self.steps - config["extension_steps"]
        timed = self.stages[:-1] if config["extension_steps"] else self.stages
        total, done, self.first = sum(Fraction(s["duration"]) for s in timed), Fraction(0), []
        for stage in timed:                     # the stage of step s contains s / (scheduled + 1)
            self.first.append(min(math.ceil((self.scheduled + 1) * done / total), self.scheduled))
            done += Fraction(stage["duration"])
        if config["extension_steps"]:
            self.first.append(self.scheduled)
        self.end = self.first[1:] + [self.steps]
        assert config["lr_warmup_frac"] == 0

    def number(self, step):
        return max(i for i, first in enumerate(self.first) if step >= first)

    def of_stage(self, step, name):
        value = self.stages[self.number(step)][name]
        return self.config[name] if value is None else value

    def lr_factor(self, step, cooldown):
        floor = self.config["final_lr_frac"]
        if step >= self.scheduled:
            return floor
        value, x = self.stages[self.number(step)]["lr_factor"], step / self.scheduled
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

    def loss_weights(self, step):
        """Loss weights of the next tokens, and of the prefix-token target."""
        i = self.number(step)
        done = (step - self.first[i]) / (self.end[i] - self.first[i])

        def now(text):
            first, _, last = text.partition(":")
            return float(first) + ((float(last) - float(first)) * done if last else 0.0)
        stage = self.stages[i]
        return [now(text) for text in stage["loss_weights"].split()], now(stage["prefix_weight"])

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

    def untie_step(self):
        """The last step with tied embedding and head. -1 means never tied."""
        if self.config["tie_head"] == "off":
            return -1
        if self.config["untie_frac"] == 1:
            return self.steps
        step = math.ceil(Fraction(self.config["untie_frac"]).limit_denominator(10 ** 6) * self.scheduled)
        while (step + 1) % self.config["head_every"]:           # the first step that updates them
            step += 1
        return step


# ---------------------------------------------------------------- model of record 32

def record_32(config, p, tokens, documents, windows):
    """Softcapped logits of one packed sequence."""
    short, long_, frequencies, scale = windows
    T, H, K = len(tokens), config["num_heads"], config["head_dim"]
    norm = frontier.rms_norm
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
            y = torch.stack([frontier.probabilities(q[:, h], k[:, h], documents, window, scale) @ v[:, h]
                             for h in range(H)], dim=1)
            y = y * torch.sigmoid(u[:, :12] @ p["gate.%d" % i].T)[:, :, None]
            x = x + y.reshape(T, H * K) @ p["o.%d" % i].T
        if layer["mlp"]:
            x = x + torch.relu(norm(x) @ p["up.%d" % i]) ** 2 @ p["down.%d" % i].T
        outputs.append(x)
    logits = norm(x) @ p["head"].T
    return config["softcap"] * torch.sigmoid((logits + config["softcap_shift"]) / config["softcap_width"])


def is_newest(config):
    return config["bigram_rows"] > 0


def cross_entropies(config, params, row, windows, weights, prefix_weight, prefixes):
    """The loss of one packed sequence, summed over its tokens."""
    inputs, targets, documents = (torch.tensor(z) for z in row)
    if is_newest(config):
        assert (config["softcap"], config["softcap_shift"], config["softcap_width"]) == (23, 5, 7.5)
        shape = frontier.Shape(len(params["head"]), config["model_dim"], config["num_heads"],
                               config["head_dim"], config["mlp_ratio"] * config["model_dim"],
                               config["bigram_rows"], len(params["signs"]), config["gate_hidden"])
        logits = frontier.forward(params, shape, inputs, [0], documents, windows)
    else:
        logits = record_32(config, params, inputs, documents, windows)
    logp = torch.log_softmax(logits, dim=-1)
    total = torch.zeros((), dtype=F64)
    for k, weight in enumerate(weights):                        # no targets beyond the end of the sequence
        total = total - weight * logp[:len(targets) - k].gather(1, targets[k:, None]).sum()
    if prefix_weight:
        prefix = prefixes[targets]
        there = prefix >= 0
        total = total - prefix_weight * logp[there].gather(1, prefix[there][:, None]).sum()
    return total


# ---------------------------------------------------------------- update rules

def orthogonalize(config, U):
    if config["orthogonalize"] == "polar_express":
        return frontier.polar_express(U)
    X = U.T if U.shape[0] > U.shape[1] else U
    X = X / (torch.linalg.norm(X) + 1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * (A @ X) + 2.0315 * (A @ A @ X)
    return X.T if U.shape[0] > U.shape[1] else X


def update_matrix(config, W, G, state, factor, decay_factor, momentum, lr_mul):
    """Update one matrix or one group of heads in place with Muon or NorMuon."""
    M = state["M"] = momentum * state.get("M", 0.0) + (1 - momentum) * G
    X = orthogonalize(config, (1 - momentum) * G + momentum * M)
    if config["matrix_rule"] == "normuon":
        beta = config["matrix_betas"][1]
        r = (X * X).mean(dim=1 if X.shape[0] >= X.shape[1] else 0, keepdim=True)
        v = state["v"] = beta * state.get("v", 0.0) + (1 - beta) * r
        Y = X / torch.sqrt(torch.clamp(v, min=1e-10))
        X = Y * torch.linalg.norm(X) / torch.clamp(torch.linalg.norm(Y), min=1e-10)
    else:
        lr_mul = lr_mul * max(1, W.shape[0] / W.shape[1]) ** 0.5
    eta = config["matrix_lr"] * factor * lr_mul
    W -= eta * X + eta * config["matrix_weight_decay"] * decay_factor * W * decay_mask(config, X * W >= 0)


def update_adam(config, p, G, state, name, factor, decay_factor):
    group, lr_mul, decays = adam_group(config, name)
    b1, b2 = config[group + "_betas"]
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * G
    v = state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * G * G
    lr = config[group + "_lr"] * lr_mul * factor
    u = lr * math.sqrt(1 - b2 ** t) / (1 - b1 ** t) * m / (torch.sqrt(v) + config["adam_eps"])
    decay = config[group + "_weight_decay"] * lr_mul * decays * decay_factor
    p -= u + lr * decay * p * decay_mask(config, u * p > 0)


def decay_mask(config, towards):
    return towards.to(F64) if config["decay"] == "cautious" else 1.0


def adam_group(config, name):
    """(group of options, multiplier of learning rate and decay, 1 if it decays else 0) of a parameter."""
    first, last = name.split(".")[0], name.split(".")[-1]
    decays = 0 if last in ("bias", "gate_scale") else 1
    if first in ("embed", "head"):
        return first, 1.0, 1
    if first in ("ve", "bigram"):
        return "value_embed", 1.0, 1
    if first in ("s0", "s1", "smear", "skip", "a", "b"):
        return "scalar", 1.0, 1
    if first in ("attn_residual", "mlp_residual"):
        return "residual", 1.0, 1
    if first in ("attn_out", "mlp_out"):
        return "mix", 1.0, 1
    if first == "smear_gate":
        return "gate", 0.01, 0
    if first == "ve_gate":
        return "gate", 1.0, 1
    if first in ("mudd", "out"):
        return "gate", 0.25, decays
    assert first in ("pre", "post", "gate_scale"), name
    return "gate", 0.1, decays


def is_matrix(name):
    """Whether matrix_rule trains the parameter. In record 32 it also trains the attention gates."""
    first = name.split(".")[0]
    return first in frontier.LR_MATRIX or first == "gate"


def lr_factor_of_matrix(config, name):
    factors = {"up": config["mlp_up_lr_mul"], "down": config["mlp_down_lr_mul"]}
    return factors.get(name.split(".")[0], 1.0)


def parts_of(config, name, W):
    """The matrices of a parameter. Queries and keys are split into groups of heads."""
    heads = config["qk_group_heads"] or config["num_heads"]
    if name.split(".")[0] not in ("q", "k"):
        return [W]
    return torch.split(W, heads * config["head_dim"])


# ---------------------------------------------------------------- the run

def train(config, params):
    """Train in place. Returns the training loss per token of each step, and [step, loss] of each validation."""
    schedule, (shards, document_start) = Schedule(config), read_shards(config["train_files"])
    packer, untie_step = Packer(shards * config["epochs"], document_start), schedule.untie_step()
    prefixes = None
    if any(stage["prefix_weight"] != "0" for stage in config["stages"]):
        prefixes = prefix_of(config, len(params["head"]), document_start)
    names = [name for name in params if name != "signs"]
    params = {name: value.detach().requires_grad_(name != "signs") for name, value in params.items()}
    states, sums, losses, points = {}, {}, [], []
    if untie_step >= 0:
        params["embed"].detach().copy_(params["head"].detach())

    for step in range(schedule.steps + 1):
        every = config["val_loss_every"]
        if step == schedule.steps or every and step % every == 0:
            with torch.no_grad():
                total = sum(cross_entropies(config, params, row, schedule.windows(step), [1.0], 0.0, None)
                            for row in validation_rows(config))
            points.append([step, float(total) / config["val_tokens"]])
        if step == schedule.steps:
            break

        length, tokens = schedule.of_stage(step, "seq_len"), schedule.of_stage(step, "tokens_per_step")
        weights, prefix_weight = schedule.loss_weights(step)
        grads, total = [torch.zeros_like(params[name]) for name in names], 0.0
        for _ in range(tokens // length):
            row = packer.next(length, schedule.of_stage(step, "max_doc_len"))
            loss = cross_entropies(config, params, row, schedule.windows(step), weights, prefix_weight,
                                   prefixes)
            found = torch.autograd.grad(loss, [params[name] for name in names], allow_unused=True)
            for grad, new in zip(grads, found):
                if new is not None:                             # Adam's epsilon is for 49,152 tokens
                    grad += new * 49152 / config["tokens_per_step"]
            total += float(loss.detach())
        losses.append(total / tokens)

        (matrix_factor, factor), momentum = schedule.lr_factors(step), schedule.momentum(step)
        for name, grad in zip(names, grads):                    # gradients are summed between two updates
            sums[name] = sums[name] + grad if name in sums else grad
        tied = step <= untie_step
        if tied and (step + 1) % config["head_every"] == 0:     # the head gets both gradients and is copied
            sums["head"] = sums["head"] + sums.pop("embed")
        for name in list(sums):
            group = "matrix" if is_matrix(name) else adam_group(config, name)[0]
            if (step + 1) % config[group + "_every"] or tied and name == "embed":
                continue
            value, grad = params[name].detach(), sums.pop(name)
            if group == "matrix":
                for i, (W, G) in enumerate(zip(parts_of(config, name, value), parts_of(config, name, grad))):
                    update_matrix(config, W, G, states.setdefault((name, i), {}), matrix_factor,
                                  schedule.decay_factor(step, matrix_factor), momentum,
                                  lr_factor_of_matrix(config, name))
            else:
                update_adam(config, value, grad, states.setdefault(name, {}), name, factor,
                            schedule.decay_factor(step, factor))
        if tied and "head" not in sums:
            params["embed"].detach().copy_(params["head"].detach())
        if step == untie_step:
            states["embed"] = dict(states["head"])
    return {"train_losses": losses, "val_points": points}
