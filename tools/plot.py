"""Draw record folders, results of any runs, or their telemetry, as SVG.

    ./run.sh tools/plot.py records/laptop/*_ladder/{target,sigmoid_skips} --out=curves
    ./run.sh tools/plot.py logs/*.json --out=curves
    ./run.sh tools/plot.py logs/*.jsonl --out=runs

Folders and results: validation loss, and thin the training loss, against training time and against tokens. A
folder has one color, and the target is dashed. Single results are named by the options of their command
lines in which they differ. val_files and options that change no loss, such as out, are left out.
Runs with --telemetry_every: four panels each, with losses, gradient norms and update ratios by parameter
group, and the time of a step, which older scripts divided into parts.
leaderboard.py draws its picture with plot_ladder().
"""

import csv
import io
import itertools
import json
import math
import statistics
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, RecordError, output_file, read_options, require_packages, run_guarded, warn


def make_parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("paths", nargs="+", type=Path,
                        help="record folders of one track, or only json, or only jsonl files")
    parser.add_argument("--out", type=output_file, default=Path("curves"),
                        help="path of the picture. .svg is added (default %(default)s)")
    return parser


if __name__ == "__main__":
    make_parser().parse_args()  # help and typos do not wait for PyTorch

with require_packages():
    import matplotlib
    import matplotlib.dates

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    import train_gpt as gpt
    from tools import results

plt.rcParams.update({
    "svg.hashsalt": "records", "font.size": 9, "lines.linewidth": 1.6, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#6b7280",
    "axes.labelcolor": "#4b5563", "xtick.color": "#4b5563", "ytick.color": "#4b5563",
    "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": "#e5e7eb"})
INK, GREY = "#1f2937", "#6b7280"
ON_WHITE = dict(facecolor="white", edgecolor="none", pad=0.5)  # labels hide the grid
COLOURS = BLUE, RED, GREEN, ORANGE, PINK, SKY = (  # safe for color blindness
    "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9")
TITLES = "Loss", "Gradient norm", "Update over weight", "Milliseconds of a step"
WINDOW = 5  # measured steps in a mean of the training loss
LOSSES = 20  # training losses in a mean, as the trainer prints them
PUBLISHED = results.RECORDS / "published.csv"


class Published(NamedTuple):
    """A published record of the short track, on 8xH100."""

    record: int
    day: date
    minutes: float


class Curve(NamedTuple):
    """A recipe in the picture at the top of the README: its record here and its published record."""

    record: results.Record
    label: str
    colour: str
    place: tuple[float, float]  # of the label: seconds, loss
    published: int | None = None  # number of the published record
    name: str = ""  # label of the published record, with a placeholder for its minutes


def read_published() -> list[Published]:
    """The published records with a known day, in order."""
    with PUBLISHED.open(newline="") as file:
        return [Published(int(row["record"]), date.fromisoformat(row["date"]), float(row["minutes"]))
                for row in csv.DictReader(file)]


def count_tokens(result: dict, steps: list[int]) -> list[float]:
    """Millions of training tokens before each of these steps. Stages of older results have one size."""
    config = result["config"]
    ends = config["derived"].get("stage_ends") or [config["num_iterations"]]
    sizes = [stage["tokens_per_step"] or config["tokens_per_step"] for stage in config["stages"]]
    ranges = list(zip(sizes, [0, *ends], ends))
    return [sum(size * max(0, min(end, step) - start) for size, start, end in ranges) / 1e6
            for step in steps]


def save(figure: plt.Figure, out: Path) -> None:
    """Write a figure as SVG. The bytes are reproducible."""
    picture = io.BytesIO()
    figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None})
    gpt.write_atomic(out.with_name(f"{out.name}.svg"), picture.getvalue())
    plt.close(figure)


def plot_curves(groups: list[tuple[str, list[dict]]], target: float | None, out: Path) -> None:
    """Validation and training loss against time and against tokens: one color for each group of runs."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    if len(groups) > 2 * len(COLOURS):
        warn(f"the first {2 * len(COLOURS)} of {len(groups)} lines have colours, the others are grey")
    styles = [(style, colour) for style in (".-", ".:") for colour in COLOURS]
    styles += [(".-", GREY)] * len(groups)
    for (name, runs), (style, colour) in zip(groups, styles):
        for result in runs:
            steps, losses, milliseconds = zip(*(point for point in result["val_points"] if point[0]))
            numbers, values = zip(*result.get("train_points") or [(0, None)])  # older results have none
            values = [math.nan if value is None else value for value in values]  # a gap
            size = min(LOSSES, len(values))
            means = [statistics.mean(values[end - size : end]) for end in range(size, len(values) + 1)]
            numbers = numbers[size - 1 :]
            times = np.interp(numbers, [0, *steps], [0, *milliseconds]) / 1000
            for panel, xs, train_xs in (
                    (panels[0], np.array(milliseconds) / 1000, times),
                    (panels[1], count_tokens(result, steps), count_tokens(result, numbers))):
                panel.plot(train_xs, means, color=colour, linewidth=0.6, alpha=0.6)
                panel.plot(xs, losses, style, color=colour, linewidth=1.2,
                           label=name if result is runs[0] else None)
    for panel, label in zip(panels, ("training time (s)", "training tokens (millions)")):
        panel.set_xlabel(label)
        if target is not None:
            panel.axhline(target, color=GREY, linestyle="--", linewidth=1)
    panels[0].set_ylabel("loss: validation, and training (thin)")
    lines, names = panels[1].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", frameon=False, fontsize=7)
    save(figure, out)


def read_result(path: Path) -> dict:
    try:
        result = json.loads(path.read_text())
        return result if result["train_points"] and result["final_val_loss"] else {}[path]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fault = (f"is no result with training losses ({error!r}): give logs/*.json" if path.exists()
                 else "does not exist")
        raise RecordError(f"{path} {fault}") from None


def name_runs(runs: list[dict]) -> list[str]:
    """A name for each run: the given options in which it differs from others, and its run_id if that is not
    enough."""
    options = [read_options(run["argv"]) for run in runs]
    values_of = {name: {row.get(name) for row in options} for row in options for name in row}
    unnamed = {"val_files", *gpt.NOT_IN_KEY} - {"resume"}  # those files follow the training files
    differing = sorted((name for name in values_of if len(values_of[name]) > 1 and name not in unnamed),
                       key=lambda name: -len(values_of[name]))  # what tells most runs apart
    words = [", ".join(f"{name}={row[name][:30]}" for name in differing if name in row) for row in options]
    return [name if name and words.count(name) == 1 else f"{name} {run['run_id']}".strip()
            for name, run in zip(words, runs)]


def read_events(path: Path) -> dict[str, list[dict]]:
    """The events in the jsonl of a run, by kind."""
    found = {"telemetry": {}, "validation": {}}  # by step: a run that was killed repeats some steps
    try:
        for line in path.read_text().splitlines():
            event = json.loads(line)
            found.setdefault(event["event"], {})[event["step"]] = event
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} cannot be read as the jsonl of a run ({type(error).__name__}: {error}): "
                          "give the jsonl of a run with --telemetry_every") from None
    return {kind: list(events.values()) for kind, events in found.items()}


def plot_runs(paths: list[Path], out: Path) -> None:
    """Telemetry of runs: four panels for each run, with common scales. Runs without it are left out."""
    events = {path: read_events(path) for path in paths}
    paths = [path for path in events if events[path]["telemetry"]]
    if not paths:
        raise RecordError(f"{', '.join(map(str, events))}: no telemetry: give the jsonl of a run with "
                          "--telemetry_every")
    for path in events.keys() - paths:
        results.leave_out(f"{path} has no telemetry: it is written with --telemetry_every")
    figure, rows = plt.subplots(2 * len(paths), 2, figsize=(8, 5.6 * len(paths)), squeeze=False,
                                layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    first = list(rows[:2].flat)
    for index, path in enumerate(paths):
        losses, norms, ratios, seconds = panels = list(rows[2 * index : 2 * index + 2].flat)
        for panel, start in zip(panels, first if index else ()):  # before drawing
            panel.sharex(start)
            panel.sharey(start)
        measured, validations = events[path]["telemetry"], events[path]["validation"]
        steps = [event["step"] for event in measured]
        size = min(WINDOW, max(1, len(measured) // 4))
        marker = "" if len(measured) > 1 else "."
        windows = [measured[end - size : end] for end in range(size, len(measured) + 1)]
        losses.plot([window[size // 2]["step"] for window in windows],
                    [statistics.mean(event["loss"] for event in window) for window in windows],
                    "-" if len(windows) > 1 else ".", color=BLUE,
                    label=f"training, mean of {size} measured steps" if size > 1 else "training")
        losses.plot([event["step"] for event in validations], [event["val_loss"] for event in validations],
                    ".-", color=RED, label="validation")
        for panel, key in ((norms, "grad_norm"), (ratios, "update_ratio")):
            groups = dict.fromkeys(group for event in measured for group in event["groups"])
            styles = [(style, colour) for style in ("-", ":") for colour in COLOURS]
            for group, (style, colour) in zip(groups, styles):
                # a step measures the groups that it updates. Zero is a gap in a logarithmic panel
                points = [(event["step"], event["groups"][group].get(key) or math.nan) for event in measured
                          if group in event["groups"]]
                if any(math.isfinite(value) for _, value in points):  # some tables have only a gradient norm
                    panel.plot(*zip(*points), style, color=colour, label=group, marker=marker)
            panel.set_yscale("log")
        for part, colour in zip(measured[0]["seconds"], itertools.cycle(COLOURS)):
            seconds.plot(steps, [1000 * event["seconds"][part] for event in measured], color=colour,
                         label=part, marker=marker)
        seconds.set_yscale("log")
        for panel, title, columns in zip(panels, TITLES, (3, 3, 3, 2)):
            num_rows = -(-len(panel.get_lines()) // columns)
            panel.set_title(title, pad=6 + 11 * num_rows)  # leaves space for the legend
            panel.set_xlabel("step")
            if panel.get_lines():
                add_legend(panel, columns).set_in_layout(False)  # a wide legend does not shrink the panel
        if len(paths) > 1:
            losses.set_ylabel(path.stem)
    save(figure, out)


def draw_seeds(panel: plt.Axes, record: results.Record, colour: str, linestyle: str) -> None:
    """Loss against training time: the median of the seeds, in a band that contains all of them."""
    validations = list(zip(*(result["val_points"] for result in record.results)))[1:]  # without step 0
    losses = [[loss for _, loss, _ in seeds] for seeds in validations]
    seconds = [statistics.median(ms / 1000 for _, _, ms in seeds) for seeds in validations]
    panel.fill_between(seconds, [min(seeds) for seeds in losses], [max(seeds) for seeds in losses],
                       color=colour, alpha=0.18, linewidth=0)
    panel.plot(seconds, [statistics.median(seeds) for seeds in losses], color=colour,
               linestyle=linestyle)


def add_legend(panel: plt.Axes, columns: int = 3) -> matplotlib.legend.Legend:
    """Add a legend above the panel."""
    return panel.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, fontsize=8,
                        borderaxespad=0.1, labelspacing=0.2, columnspacing=1.2, handlelength=1.1,
                        handletextpad=0.5)


def plot_ladder(curves: list[Curve], target: float, out: Path) -> None:
    """Two panels: published minutes against the day of the record, and loss against training time here.

    Curves of another machine than the first curve's are dashed.
    """
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.9), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    draw_published(panels[0], curves)
    for curve in curves:
        is_elsewhere = results.find_differences(curve.record, curves[0].record, "times")
        draw_seeds(panels[1], curve.record, curve.colour, "--" if is_elsewhere else "-")
        panels[1].text(*curve.place, curve.label, color=curve.colour, va="center", fontweight="bold",
                       bbox=ON_WHITE)
    panels[1].axhline(target, color=INK, linestyle=":", linewidth=1.2)
    panels[1].annotate(f"target {target:g}", (1, target), (0, 3), color=INK, textcoords="offset points",
                       xycoords=panels[1].get_yaxis_transform(), ha="right", va="bottom",
                       bbox=ON_WHITE)
    panels[1].set(title="In miniature, on two CPU cores: validation loss", xlabel="seconds of training",
                  xlim=(0, 230), ylim=(0.8, None))
    save(figure, out)


def draw_published(panel: plt.Axes, curves: list[Curve]) -> None:
    """Minutes to 3.28 by day. Records with a preset in this repository are marked."""
    published = read_published()
    days, minutes = [record.day for record in published], [record.minutes for record in published]
    panel.step(days, minutes, where="post", color=GREY)
    panel.plot(days, minutes, ".", color=GREY, markersize=4)
    panel.set(yscale="log", title="Published: minutes to a loss of 3.28 on 8xH100", ylim=(0.5, 85),
              xlim=(days[0] - timedelta(30), days[-1] + timedelta(60)))
    panel.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    panel.set_yticks([], minor=True)
    panel.xaxis.set_major_locator(matplotlib.dates.MonthLocator((1, 7)))
    panel.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%Y-%m"))
    by_number = {record.record: record for record in published}
    for curve in curves:
        if curve.published:
            _, day, minutes = by_number[curve.published]
            panel.plot(day, minutes, "o", color=curve.colour, markersize=8, markeredgecolor="white")
            is_last = (days[-1] - day).days < 90  # its label is to the left
            panel.annotate(curve.name.format(minutes), (day, minutes), color=curve.colour,
                           xytext=(-9, 0) if is_last else (3, 9), textcoords="offset points",
                           ha="right" if is_last else "left", va="center" if is_last else "bottom",
                           fontweight="bold", linespacing=1.3, bbox=ON_WHITE)


def main() -> None:
    """Draw folders or runs."""
    parser = make_parser()
    args = parser.parse_args()
    if not args.out.name:
        raise RecordError(f"--out={args.out} is no name for a picture: give one like --out=curves")
    out = args.out.with_suffix("") if args.out.suffix == ".svg" else args.out
    if all(path.suffix == ".jsonl" for path in args.paths):
        plot_runs(args.paths, out)
    elif all(path.suffix == ".json" for path in args.paths):
        runs = [read_result(path) for path in args.paths]
        plot_curves([(name, [run]) for name, run in zip(name_runs(runs), runs)], None, out)
    else:
        for path in args.paths:
            if not path.is_dir():
                raise RecordError(f"{path}: give only .json, only .jsonl, or only folders of records")
            if path.resolve().name == "logs":
                raise RecordError(f"{path} has single runs: give {path}/*.json")
        records = [results.read_record(folder) for folder in args.paths]
        for record in records[1:]:
            results.check_comparable(record, records[0], "losses")
            if machines := ", ".join(results.find_differences(record, records[0], "times")):
                warn(f"seconds of {record.folder} are of another machine ({machines})")
        target = None
        try:
            target, _ = results.find_own_target(records[0])
        except RecordError as error:
            warn(f"no target is drawn: {error}")
        plot_curves([(record.name, record.results) for record in records], target, out)
    print(f"{out}.svg")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
