"""Predict the least time of a training step and its parts from compiled code, without the GPU.

    ./run.sh benchmarks/roofline.py [--folder=FOLDER] [--cards=h200,h100,a100,4090] [--launches=1106]
                                  [--us_per_launch=41] [train_gpt.py options]

Compiles the step for each GPU (tests/cuda_without_gpu/cuda_compile.py, 2 to 10 minutes each) and keeps the
results in FOLDER.
Each kernel and library call takes the longer of bytes / bandwidth and FLOPs / peak. Each buffer is read or
written once. Gaps between kernels and overlap are ignored, and all kernels run at the attainable rates. The
order of the parts and the ratio of two versions are useful, the milliseconds are not.

The host takes --us_per_launch for each of the --launches of a micro-batch. A step takes the longer of the
times of host and GPU. The defaults were measured with `record_92` on one H100. A replayed CUDA graph is one
launch.
"""

import collections
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import (
    ROOT,
    Parser,
    RecordError,
    at_least,
    keep_saying,
    require_packages,
    run_guarded,
    warn,
)

sys.path.append(str(ROOT / "tests/cuda_without_gpu"))

with require_packages():
    import fake_cuda

    import train_gpt as gpt
    from benchmarks import simulate_ranks
    from benchmarks.common import parse_known

ATTAINABLE = dict(bandwidth=0.9, bf16=0.8, fp8=0.76, link=0.8)  # of the data sheets, by large kernels


class Device(NamedTuple):
    """Dense rates of a data sheet: bytes/s, FLOP/s in bfloat16 and FP8 (0: none), bytes/s to other GPUs."""

    code: str  # the GPU for which its code is compiled
    bandwidth: float
    bf16: float
    fp8: float
    link: float


DEVICES = {
    # NVIDIA H200 datasheet: 4.8 TB/s, 1,979 / 3,958 TFLOP/s with sparsity, NVLink 900 GB/s both ways
    "h200": Device("h200", 4.8e12, 989e12, 1979e12, 450e9),
    # NVIDIA H100 datasheet (SXM): 3.35 TB/s, the rest as above
    "h100": Device("h200", 3.35e12, 989e12, 1979e12, 450e9),
    # NVIDIA A100 80GB datasheet (SXM): 2,039 GB/s, 312 TFLOP/s, NVLink 600 GB/s both ways
    "a100": Device("a100", 2.039e12, 312e12, 0, 300e9),
    # NVIDIA Ada GPU Architecture whitepaper: 1,008 GB/s, 165 and 330 TFLOP/s with float32 sums, PCIe 4.0 x16
    "4090": Device("4090", 1.008e12, 165e12, 330e12, 32e9),
}


def load(card: str, folder: Path, options: list[str]) -> dict:
    """Read the file of cuda_compile.py for a GPU. Compile if the folder does not have it."""
    words = [re.sub("[^a-z0-9]+", "-", option[2:]) for option in options]
    path = folder / f"{'_'.join([card, *words])}.json"
    if not path.exists():
        script = ROOT / "tests" / "cuda_without_gpu" / "cuda_compile.py"
        command = [sys.executable, str(script), card, f"--json={path}", *options]
        warn(f"compiling code for {card}, minutes (--cards chooses)")
        with keep_saying("still compiling"):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"roofline.py: {card}: {json.loads(done.stdout or '{}').get('error', 'see above')}")
    return json.loads(path.read_text())


KERNELS = {"cross_entropy_kernel": "head: cross-entropy kernel",
           "qkv_kernel": "blocks: norm, RoPE, packing (our kernel)",
           "transpose_kernel": "FP8 transposes (our kernel)"}


def find_part(graph: dict, node: dict) -> str:
    """The row of the table for a kernel."""
    if graph["name"].startswith("Rule."):
        return "optimizer"
    if node["call"].startswith("relu2_matmul_kernel"):
        return "blocks: matmuls with ReLU^2 (our kernel)"
    if "mm" in node["call"]:
        # the matmuls of the head are the largest, those with V, the gates' the smallest
        sizes = (5e11, "head: matmuls"), (2e10, "blocks: matmuls"), (0, "blocks: matmuls of gates")
        return next(name for least, name in sizes if node["flops"] >= least)
    if node["is_template"]:
        return f"blocks: FlexAttention {graph['direction']}"
    if node["call"] in KERNELS:
        return KERNELS[node["call"]]
    if any("relu" in operation for operation in node["operations"]):
        return "blocks: ReLU^2"
    return f"pointwise {graph['direction']}"


def time_nodes(run: dict, graph: dict, device: Device) -> Iterator[tuple[str, float, float, float]]:
    """(part, ms, bytes, FLOPs) of every kernel and library call of a graph."""
    for node in graph["nodes"]:
        if node["kind"] == "NopKernel":
            continue
        flops = node["flops"]
        is_fp8 = device.fp8 and ("_scaled_mm" in node["call"] or node["call"].endswith("_fp8"))
        if node["is_template"]:  # 2 matmuls in forward. Backward has 5 and repeats these 2
            matmuls = 7 if graph["direction"] == "backward" else 2
            flops = matmuls * 2 * run["model_dim"] * run["mean_window"] * run["micro_tokens"]
        peak = device.fp8 * ATTAINABLE["fp8"] if is_fp8 else device.bf16 * ATTAINABLE["bf16"]
        seconds = max(node["bytes"] / device.bandwidth / ATTAINABLE["bandwidth"], flops / peak)
        yield find_part(graph, node), 1e3 * seconds, node["bytes"], flops


def play_messages(run: dict, device: Device) -> dict:
    """simulate_ranks.play() of the computation and collectives of a rank in a cycle of steps."""
    graphs = {graph["label"]: sum(row[1] for row in time_nodes(run, graph, device))
              for graph in run["graphs"]}
    events = []
    for kind, *facts in run["sequence"]:
        if kind == "event":
            events.append(simulate_ranks.Event(*facts))
        else:
            ms = graphs[facts[0]] if kind == "graph" else (
                1e3 * facts[0] / device.bandwidth / ATTAINABLE["bandwidth"])
            events.append(simulate_ranks.Event("compute", kind, ms=ms))
    return simulate_ranks.play(events)


def format_messages(run: dict, device: Device, host: simulate_ranks.Host) -> str:
    """The results of play_messages() per step as Markdown, with the longest waits."""
    found, steps = play_messages(run, device), run["updates"]
    host_ms, ms, idle = host.limit(found["ms"] / steps, run["micros"] / steps)
    lines = [f"each of {run['ranks']} GPUs, {run['micro_tokens']:,} tokens a step on each: "
             f"{found['ms'] / steps:.2f} ms a step, {found['computing_ms'] / steps:.2f} of computing, "
             f"{found['exposed_ms'] / steps:.2f} of waiting for {found['sent_mb'] / steps:,.0f} MB "
             f"(of {simulate_ranks.BUS_GB_PER_S:g} GB/s and {1e3 * simulate_ranks.LATENCY_MS:g} us)",
             f"with the host, which takes {host_ms:.2f} ms: {ms:.2f} ms a step, GPU idle {idle:.0f} %", "",
             f"| waits for, in {steps} steps | ms |", "|---|---:|"]
    longest = sorted(found["exposed"].items(), key=lambda row: -row[1])
    return "\n".join([*lines, *(f"| {name} | {ms:.2f} |" for name, ms in longest[:12])])


SENT = "sent, if nothing hid it"


def tabulate(run: dict, device: Device, ranks: int) -> dict[str, list[float]]:
    """{part: [ms, GB, TFLOP, kernels]} of a step on each of these GPUs."""
    share = run["micros_per_step"] / run["micros"] / ranks
    scales = {"measured": share, "measured update": 1 / run["updates"] / ranks}
    parts = collections.defaultdict(lambda: [0.0] * 4)

    def add(part: str, count: float, ms: float, num_bytes: float, flops: float = 0.0) -> None:
        for i, amount in enumerate((ms, num_bytes / 1e9, flops / 1e12, 1)):
            parts[part][i] += count * amount

    for graph in run["graphs"]:
        count = sum(scale * graph["calls"].get(phase, 0) for phase, scale in scales.items())
        for part, *amounts in time_nodes(run, graph, device) if count else ():
            add(part, count, *amounts)
    for phase, scale in scales.items():
        for count, num_bytes in run["eager"].get(phase, {}).values():
            ms = 1e3 * num_bytes / count / device.bandwidth / ATTAINABLE["bandwidth"]
            add("eager: look-ups, sums of gradients", scale * count, ms, num_bytes / count)
    if ranks > 1:
        sent = run["bytes_per_rank"] * (ranks - 1) / ranks
        parts[SENT] = [1e3 * sent / device.link / ATTAINABLE["link"], sent / 1e9, 0, 0]
    return parts


def format_table(runs: dict[str, dict], host: simulate_ranks.Host) -> str:
    """Markdown: ms of each part on each kind of GPU, GB, TFLOP and kernels of the first kind, sums, host."""
    tables = {name: tabulate(run, DEVICES[name], 1) for name, run in runs.items()}
    first = next(iter(tables))
    names = sorted(set().union(*tables.values()), key=lambda part: -tables[first].get(part, [0])[0])
    head = [*(f"{name} ms" for name in tables), "GB", "TFLOP", "kernels"]
    lines = [f"| part | {' | '.join(head)} |", "|---|" + "---:|" * len(head)]

    def add_line(title: str, rows: dict[str, list[float]]) -> None:
        cells = [f"{rows[name][0]:,.1f}" for name in tables]
        cells += [f"{rows[first][1]:,.1f}", f"{rows[first][2]:,.1f}", f"{rows[first][3]:,.0f}"]
        lines.append(f"| {title} | {' | '.join(cells)} |")

    for part in names:
        add_line(part, {name: table.get(part, [0.0] * 4) for name, table in tables.items()})
    eight = {name: tabulate(run, DEVICES[name], 8) for name, run in runs.items()}
    for title, found, ranks in (("one GPU", tables, 1), ("each of 8 GPUs", eight, 8)):
        sums = {name: list(map(sum, zip(*table.values()))) for name, table in found.items()}
        add_line(f"**sum, {title}**", sums)
        limits = [host.limit(sums[name][0], max(1, run["micros_per_step"] / ranks))
                  for name, run in runs.items()]
        for row, column in zip(("host", "**longer of host and GPU**", "GPU idle, %"), zip(*limits)):
            lines.append(f"| {row} | {' | '.join(f'{value:,.1f}' for value in column)} | | | |")
    add_line("of the last sum sent, if nothing hid it", {name: table[SENT] for name, table in eight.items()})
    return "\n".join(lines)


def main() -> int:
    """Print the table. Returns the exit status."""
    parser = Parser(__doc__)
    parser.add_argument("--cards", default="h200,h100,a100,4090", help=f"of {', '.join(DEVICES)}")
    parser.add_argument("--folder", type=Path, help="folder for the compiled results")
    parser.add_argument("--ranks", type=at_least(1), default=1,
                        help="simulate a step with communication on this number of GPUs")
    default = simulate_ranks.Host()
    parser.add_argument("--launches", type=at_least(1), default=default.launches,
                        help="kernels and copies that are launched in a micro-batch (default %(default)s)")
    parser.add_argument("--us_per_launch", type=at_least(0, float), default=default.us_per_launch,
                        help="the host's time for each of them (default %(default)g, measured on an H100)")
    args, options = parse_known(parser)
    if args.ranks > 1:
        options += [f"--ranks={args.ranks}", "--micros=1"]
    cards, host = args.cards.split(","), simulate_ranks.Host(args.launches, args.us_per_launch)
    if unknown := [card for card in cards if card not in DEVICES]:
        raise RecordError(f"--cards={args.cards}: {unknown[0]} is not one of {', '.join(DEVICES)}: "
                          "choose among them")
    if obstacle := fake_cuda.find_obstacle():
        raise RecordError(f"compiling for a GPU {obstacle}")
    own = ("--micros", "--own", "--ranks")  # options of cuda_compile.py
    gpt.make_config(gpt.parse_argv([option for option in options if not option.startswith(own)]))
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        runs = {card: load(DEVICES[card].code, folder, options) for card in cards}
        if args.ranks > 1:
            for card, run in runs.items():
                print(f"{card}: {format_messages(run, DEVICES[card], host)}\n")
        else:
            print(format_table(runs, host))
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
