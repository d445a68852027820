#!/usr/bin/env python3
"""Write a preset for a model of any depth. All other sizes follow from the depth.

    ./run.sh tools/scale_by_depth.py 24      # as nanochat scales it. Writes presets/d24.json
    ./run.sh tools/scale_by_depth.py 24 --rule=normuonh --name=d24_muonh  # with the recipe of preset muonh
    python train_gpt.py --preset=d24

A model has 64 * depth channels, rounded up to a multiple of 128. Batch, learning rates and decay are scaled
from a model of 12 layers. Rules that keep norms have the schedules of preset muonh, and learning rates times
12 / depth. Sources: MuonH of 2026-02-03, and nanochat without its betas and decays.
"""

import json
import math
import os
import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import ROOT, Parser, RecordError, at_least, require_packages, run_guarded

RATES = dict(muon=0.02, normuon=0.02, anvil=0.02, muonh=0.02, normuonh=0.02, adamw=0.0018)


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("depth", type=at_least(1), help="number of layers")
    parser.add_argument("--rule", choices=RATES, default="muon",
                        help="of the matrices (default %(default)s)")
    parser.add_argument("--tokens_per_param", type=at_least(0.1, float), default=12.0,
                        help="training tokens per parameter of matrices and head, for num_iterations "
                             "(default %(default)g)")
    parser.add_argument("--tokens_per_step", type=at_least(128), help="default: by the depth")
    parser.add_argument("--vocab_size", type=at_least(2), default=50_257, help="(default %(default)s)")
    parser.add_argument("--name", help="of the preset (default: d<depth>)")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()  # help and typos do not wait for PyTorch

with require_packages():
    import train_gpt as gpt


def scale_by_depth(depth: int, rule: str = "muon", tokens_per_param: float = 12.0,
                   tokens_per_step: int | None = None, vocab_size: int = 50_257) -> dict:
    """The preset: its parent, and the options that differ from it."""
    widths = {layers: -(-64 * layers // 128) * 128 for layers in (depth, 8, 12)}
    sizes = {layers: width * (12 * layers * width + vocab_size) for layers, width in widths.items()}
    width, num_params, least = widths[depth], sizes[depth], max(sizes[depth], sizes[8])
    batch, least_batch = (tokens_per_step or 2 ** round(math.log2(2**19 * (size / sizes[12]) ** 0.383))
                          for size in (num_params, least))
    decay = 0.28 * (least_batch / 2**19) ** 0.5 * sizes[12] / least  # fixed below 8 layers, or it explodes
    batch_scale, width_scale = (batch / 2**19) ** 0.5, (width / 768) ** -0.5
    num_iterations = max(1, int(tokens_per_param * num_params / batch))
    keeps_norm, is_muon = gpt.RULES[rule].keeps_norm, "muon" in rule or rule == "anvil"
    muonh = json.loads((ROOT / "presets/muonh.json").read_text())
    del muonh["parent"]
    recipe = muonh if keeps_norm else dict(
        lr_warmup_frac=min(0.1, 40 / num_iterations), cooldown_frac=0.65, final_lr_frac=0.05,
        momentum=[0.85, 0.97], momentum_warmup_steps=400, decay="cautious", decay_schedule="cosine",
        mlp_lr_mul=[2.0 if is_muon else 1.0, 1.0],
        groups=dict(embed=dict(lr=0.3), value_embed=dict(lr=0.15), ngram=dict(lr=0.15), head=dict(lr=0.008)))
    groups = {name: dict(lr=recipe["groups"][name]["lr"] * width_scale * batch_scale)
              for name in ("embed", "value_embed", "ngram", "head")}
    matrix_lr = RATES[rule] * (12 / depth if keeps_norm else 1) * batch_scale
    decay = 0.0 if keeps_norm or not is_muon else decay
    groups |= dict(matrix=dict(rule=rule, lr=matrix_lr, weight_decay=decay),
                   scalar=dict(lr=0.04 * batch_scale), gain=dict(lr=0.1 * batch_scale))
    layers = [dict(attention="long" if i % 4 == 3 or i == depth - 1 else "short",
                   value_embed=i if (depth - 1 - i) % 2 == 0 else None) for i in range(depth)]
    seq_len = math.gcd(batch, 16_384)
    options = {**recipe, **dict(
        num_layers=depth, model_dim=width, head_dim=128, num_heads=width // 128,
        layers=[leave_out(layer, gpt.LayerSpec()) for layer in layers],
        stages=[dict(duration=1, window_long=2048, window_short=512)], val_windows=[], seq_len=seq_len,
        micro_batch_tokens=2 * seq_len, max_doc_len=2048, tokens_per_step=batch,
        num_iterations=num_iterations, adam_eps=1e-10 * gpt.GRAD_TOKENS, vocab_size=vocab_size)}
    if vocab_size != 50_257:  # a text of one's own, whose validation part is short
        options["val_seq_len"] = 8192
    parent = gpt.load_preset("record_32")
    rows = {name: leave_out(row, parent.groups[name]) for name, row in groups.items()}
    return {"parent": "record_32", **leave_out(options, parent),
            "groups": {name: row for name, row in rows.items() if row}}


def leave_out(values: dict, parent: object) -> dict:
    """The values that differ from the parent's."""
    same = json.loads(json.dumps(vars(parent), default=vars))
    return {name: value for name, value in values.items() if value != same[name]}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)

    def body() -> None:
        preset = scale_by_depth(args.depth, args.rule, args.tokens_per_param, args.tokens_per_step,
                                args.vocab_size)
        options = {name: value for name, value in preset.items() if name != "parent"}
        gpt.check(gpt.change_options(gpt.load_preset("record_32"), options))
        path = ROOT / "presets" / f"{args.name or f'd{args.depth}'}.json"
        if args.name and Path(args.name).name != args.name:
            raise RecordError(f"--name={args.name} is no name of a file in presets/")
        rows = re.compile(r"{[^][{}]*}|\[[^][{}]*\]")  # innermost objects and lists: one line each
        text = rows.sub(lambda row: re.sub(r"\n\s*", "", re.sub(r",\n\s*", ", ", row[0])),
                        json.dumps(preset, indent=1)) + "\n"
        if path.stem in gpt.PRESETS or path.exists() and json.loads(path.read_text()) != json.loads(text):
            raise RecordError(f"presets/{path.name} is another preset: give another --name, or remove it")
        gpt.write_atomic(path, text.encode())
        print(f"wrote {os.path.relpath(path)}: train with --preset={shlex.quote(path.stem)}")

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
