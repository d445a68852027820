#!/usr/bin/env python3
"""Write text with a trained model.

    ./run.sh tools/sample.py checkpoints --prompt='def '        # the newest model or checkpoint of a folder
    ./run.sh tools/sample.py checkpoints/*/<run_id>/model.pt --num_samples=3
    ./run.sh tools/sample.py checkpoints --prompt=- < story.txt # the prompt from standard input

The tokenizer follows from the vocabulary size: bytes, or GPT-2's if tiktoken is installed. Without one the
prompt and the text are token ids. Each new token recomputes the whole text, in float32.
"""

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, at_least, list_visible, require_packages, run_guarded


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("model", type=Path, help="a model.pt or step_*/, or a folder with one")
    parser.add_argument("--prompt", default="", help="start of the text. -: from standard input")
    parser.add_argument("--num_samples", type=at_least(1), default=1, help="(default %(default)s)")
    parser.add_argument("--max_new_tokens", type=at_least(1), default=256, help="(default %(default)s)")
    parser.add_argument("--temperature", type=at_least(0, float), default=1.0,
                        help="0: greedy (default %(default)s)")
    parser.add_argument("--top_k", type=at_least(0), default=50, help="draw from the likeliest. 0: all "
                        "(default %(default)s)")
    parser.add_argument("--top_p", type=float, default=0.95,
                        help="draw from the fewest tokens whose probability reaches this. 1: all "
                             "(default %(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="(default %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()  # help and typos do not wait for PyTorch

with require_packages():
    import torch
    import torch.nn.functional as F

    import train_gpt as gpt
    from data.text import BYTE_VOCAB_SIZE


class Tokenizer(NamedTuple):
    """Text to tokens and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], bytes]


def find_tokenizer(vocab_size: int) -> Tokenizer | None:
    """The tokenizer for a vocabulary size, or None if none is available."""
    if vocab_size == BYTE_VOCAB_SIZE:
        return Tokenizer(lambda text: list(os.fsencode(text)), bytes)
    try:
        import tiktoken  # optional
        gpt2 = tiktoken.get_encoding("gpt2")  # from tiktoken's cache, or downloaded
    except (ImportError, OSError):
        return None
    if vocab_size != gpt2.n_vocab:
        return None
    return Tokenizer(lambda text: gpt2.encode_ordinary(os.fsencode(text).decode(errors="replace")),
                     gpt2.decode_bytes)


def find_model(path: Path) -> Path:
    """The path of a model or of a checkpoint, or the newest one of either below a folder."""
    if path.is_file() or gpt.is_whole(path, gpt.Runtime()):
        return path
    paths = [*list_visible(path, "**/model.pt"), *list_visible(path, "**/step_*")]
    paths.sort(key=os.path.getmtime, reverse=True)
    for newest in paths:
        if newest.name == "model.pt" or gpt.is_whole(newest, gpt.Runtime()):  # a step may still be written
            print(f"sampling from {newest}", file=sys.stderr)
            return newest
    fault = "has no model.pt and no complete step_*/" if path.exists() else "does not exist"
    raise gpt.RunError(f"{path} {fault}", 2)


def read_tensors(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """(metadata, parameters by name) of a model.pt, or of a checkpoint's folder, whose rows may be flat."""
    if not path.is_dir():
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # of a file of another kind, or one that is cut short
            content = None
        if not isinstance(content, dict) or "metadata" not in content:
            raise gpt.RunError(f"{path} is no whole model.pt: give one, or a folder step_*/", 2)
        return json.loads(content["metadata"]), content["tensors"]
    metadata, entries = gpt.read_metadata(path), gpt.open_tensors(path)
    return metadata, {entry[:-1]: torch.cat([rows for _, rows in sorted(parts, key=lambda part: part[0])])
                      for entry, parts in entries.items() if entry.endswith("/")}  # values have an empty key


def load_model(path: Path, device: str = "auto") -> tuple[gpt.GPT, gpt.Config, gpt.Operations, dict]:
    """Read a model or checkpoint: (model, its config, operations in float32, metadata)."""
    metadata, tensors = read_tensors(path)
    script = f"train_gpt_{metadata['script_sha256'][:12]}.py"
    refusal = (f"{path} is of another script, {script} beside the log of its run, or train_gpt.py in its "
               "record's folder: sample with this file in the place of train_gpt.py")
    try:
        cfg = gpt.config_from_dict(metadata["config"])
    except gpt.RunError:
        raise gpt.RunError(refusal, 2) from None
    model = gpt.GPT(cfg, ngram_table=tensors.get("ngram"))
    params = dict(model.named_parameters())
    if {name: param.numel() for name, param in params.items()} != {
            name: tensor.numel() for name, tensor in tensors.items()}:
        raise gpt.RunError(refusal, 2)
    tensors = {name: tensor.view(params[name].shape) for name, tensor in tensors.items()}
    model.load_state_dict(tensors, assign=True)
    model.is_tied = metadata["is_tied"]
    ops = gpt.make_operations(cfg, ["block_attention"], torch.float32)  # its memory is linear in the tokens
    return model.to("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"), cfg, ops, metadata


def keep_nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all of probs (..., V) except the smallest set of likely tokens whose sum reaches top_p."""
    likeliest, order = probs.sort(-1, descending=True)
    sums_before = F.pad(likeliest.cumsum(-1)[..., :-1], (1, 0))
    return probs.scatter(-1, order, likeliest.masked_fill(sums_before >= top_p, 0))


def sample_token(logits: torch.Tensor, temperature: float, top_k: int, top_p: float,
                 generator: torch.Generator) -> int:
    """Draw a token from logits (V,). temperature=0: the largest logit. top_k=0, top_p=1: from all tokens.

    top_k filters first. top_p then counts the probabilities of what is left, at this temperature.
    """
    if temperature == 0:
        return int(logits.argmax())
    if top_k:
        least = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = ((logits.double() - logits.max()) / temperature).softmax(-1)
    if top_p < 1:
        probs = keep_nucleus(probs, top_p)
    return int(torch.multinomial(probs, 1, generator=generator))


@torch.no_grad()
def generate(model: gpt.GPT, cfg: gpt.Config, ops: gpt.Operations, prompt: list[int], bos: int,
             max_new_tokens: int, choose: Callable[[torch.Tensor], int]) -> Iterator[int]:
    """Yield the tokens after a prompt, until BOS or max_new_tokens tokens. choose() draws from logits (V,).

    Windows and RoPE are as in the final validation. The model sees BOS and the last max_doc_len - 1 tokens.
    """
    state, device, text = gpt.Schedule(cfg).at(cfg.num_iterations), model.embed.device, list(prompt)
    for _ in range(max_new_tokens):
        tokens = torch.tensor([bos, *text[-(cfg.max_doc_len - 1) :]], dtype=torch.int32, device=device)
        inputs = F.pad(tokens, (0, -len(tokens) % gpt.BLOCK))  # causal attention does not see the padding
        step_inputs = gpt.make_step_inputs(state, len(inputs), len(inputs), cfg, device)
        x = model.run_layers(gpt.Batch(inputs, inputs, torch.zeros_like(inputs)), step_inputs, ops)  # (T, D)
        logits = model.head.compute_logits(x[len(tokens) - 1][None])[0, : cfg.vocab_size].cpu()  # (V,)
        if not logits.isfinite().all():
            raise gpt.RunError("the model's logits are not finite: its training has diverged", 2)
        token = choose(logits)
        if token == bos:
            return
        yield token
        text.append(token)


def escape_controls(text: str) -> str:
    """Replace control characters, which could act on a terminal, by escapes. Newlines and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def read_prompt(text: str, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    tokens = tokenizer.encode(text) if tokenizer else [int(word) for word in text.split() if word.isdigit()]
    if not tokenizer and len(tokens) < len(text.split()) or not all(token < vocab_size for token in tokens):
        fault = "without tiktoken" if vocab_size == 50_257 else "without a tokenizer for this vocabulary"
        raise gpt.RunError(f"--prompt={text[:60]}: {fault} give token ids below {vocab_size}", 2)
    return tokens


def main(argv: list[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if not 0 < args.top_p <= 1:
        parser.error(f"--top_p={args.top_p:g} is not above 0 and at most 1")

    def body() -> int:
        model, cfg, ops, metadata = load_model(find_model(args.model), args.device)
        tokenizer = find_tokenizer(cfg.vocab_size)
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        text = text.encode(errors="surrogateescape").decode(errors="replace")  # bytes that are no text
        prompt = read_prompt(text, tokenizer, cfg.vocab_size)
        generator = torch.Generator().manual_seed(args.seed % 2**64)
        choose = lambda logits: sample_token(  # noqa: E731
            logits, args.temperature, args.top_k, args.top_p, generator)
        for index in range(args.num_samples):
            print("-" * 60 + "\n" if index else "", end=text + ("" if tokenizer else " "), flush=True)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            for token in generate(model, cfg, ops, prompt, metadata["bos"], args.max_new_tokens, choose):
                new = f"{token} "
                if tokenizer:
                    new = escape_controls(decoder.decode(tokenizer.decode([token])))
                print(new, end="", flush=True)
            print()
        return 0

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
