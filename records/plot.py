"""Draw record folders, or what runs with --telemetry_every have measured, as PNG and SVG.

    python records/plot.py records/laptop/*_ladder/{target,sigmoid_skips} --out=curves
    python records/plot.py logs/*.jsonl --out=runs

Of folders: validation loss against training time and against tokens, a line for every run, a colour for
every folder, the target dashed. Of runs: a row for each, with losses, gradient norms and update ratios by
group of parameters, and where the time of a step goes. The picture of the ladder is drawn by
make_leaderboard.py with plot_ladder() of this file.
"""

import io
import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib
import results

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams.update({"svg.hashsalt": "records", "font.size": 8, "axes.spines.top": False,
                     "axes.spines.right": False})
GREY, BLUE, RED = "#8a8f98", "#2563eb", "#dc2626"


def count_tokens(folder: Path, result: dict) -> list[float]:
    """Millions of training tokens seen at each validation of a run, as its own script counts."""
    script = results.load_script(folder)
    if hasattr(script, "config_from_dict"):
        cfg = script.config_from_dict(result["config"])
    else:  # laptop/2026-11-21_first, the oldest
        cfg = script.make_config({**script.parse_argv(result["argv"])[0], "preset": result["preset"]})
    spans = script.Schedule(cfg).spans()
    return [sum((stage.tokens_per_step or cfg.tokens_per_step) * max(0, min(end, step) - start)
                for stage, start, end in spans) / 1e6 for step, _, _ in result["val_points"]]


def save(figure: plt.Figure, out: Path) -> None:
    """Write a figure as PNG and SVG: the same bytes whenever it is drawn."""
    for kind, options in (("svg", dict(metadata={"Date": None, "Creator": None})),
                          ("png", dict(metadata={"Software": None}, dpi=160))):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, **options)
        results.write_file(out.with_name(f"{out.name}.{kind}"), picture.getvalue())
    plt.close(figure)


def plot_curves(records: list[results.Record], target: float | None, out: Path) -> None:
    """Loss against time and against tokens."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for index, record in enumerate(records):
        for result in record.results:
            steps, losses, milliseconds = zip(*result["val_points"])
            name = record.name if result is record.results[0] else None
            seconds, tokens = [ms / 1000 for ms in milliseconds], count_tokens(record.folder, result)
            for panel, xs in zip(panels, (seconds, tokens)):
                panel.plot(xs[1:], losses[1:], color=f"C{index % 10}", linewidth=1, label=name)
    for panel, label in zip(panels, ("training time (s)", "training tokens (millions)")):
        panel.set_xlabel(label)
        if target is not None:
            panel.axhline(target, color=GREY, linestyle="--", linewidth=1)
    panels[0].set_ylabel("validation loss")
    panels[0].legend(frameon=False)
    save(figure, out)


def read_events(path: Path, kind: str) -> list[dict]:
    """The events of a kind in the jsonl of a run; RecordError if there is none."""
    try:
        events = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise results.RecordError(f"{path} cannot be read as the jsonl of a run ({error})") from None
    found = [event for event in events if event.get("event") == kind]
    if not found:
        raise results.RecordError(f"{path} has no {kind}: give the jsonl of a run with --telemetry_every")
    return found


def plot_runs(paths: list[Path], out: Path) -> None:
    """What telemetry has measured: a row for every run, columns with the same scale."""
    figure, rows = plt.subplots(len(paths), 4, figsize=(12, 2.4 * len(paths) + 0.4), sharex=True,
                                sharey="col", squeeze=False, layout="constrained")
    for path, row in zip(paths, rows):
        measured, validations = (read_events(path, kind) for kind in ("telemetry", "validation"))
        steps = [event["step"] for event in measured]
        row[0].plot(steps, [event["loss_ema"] for event in measured], color=BLUE, label="training")
        row[0].plot(*zip(*((event["step"], event["val_loss"]) for event in validations)), ".-", color=RED,
                    label="validation")
        for panel, key in ((row[1], "grad_norm"), (row[2], "update_ratio")):
            for group in measured[0]["groups"]:
                panel.plot(steps, [event["groups"][group][key] for event in measured], label=group)
            panel.set_yscale("log")
        for part in measured[0]["seconds"]:
            row[3].plot(steps, [1000 * event["seconds"][part] for event in measured], label=part)
        row[0].set_ylabel(path.stem)
    for panel, title in zip(rows[0], ("loss", "gradient norm", "update / weight", "milliseconds of a step")):
        panel.set_title(title, loc="left", fontsize=8)
        panel.legend(frameon=False, fontsize=6)
    for panel in rows[-1]:
        panel.set_xlabel("step")
    save(figure, out)


def plot_times(records: dict[str, results.Record], out: Path) -> None:
    """Loss against training time, a line for every run, a colour for every record, by name."""
    figure, panel = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for index, (name, record) in enumerate(records.items()):
        for result in record.results:
            _, losses, milliseconds = zip(*result["val_points"])
            panel.plot([ms / 1000 for ms in milliseconds[1:]], losses[1:], color=f"C{index}", linewidth=1,
                       label=name if result is record.results[0] else None)
    panel.set(xlabel="training time (s)", ylabel="validation loss")
    panel.legend(frameon=False)
    save(figure, out)


def plot_ladder(rungs: list, target_run: results.Record, target: float, out: Path) -> None:
    """Three columns over the rungs: published minutes, loss after equal tokens, seconds to the target.

    rungs: make_leaderboard.Rung; hollow points have not reached the target.
    """
    height = 0.2 * len(rungs) + 1.0
    figure, panels = plt.subplots(1, 3, figsize=(9.5, height), sharey=True, width_ratios=(1, 1.6, 1))
    figure.subplots_adjust(left=0.2, right=0.99, top=1 - 0.55 / height, bottom=0.3 / height, wspace=0.08)
    places = range(len(rungs))
    panels[0].barh(places, [rung.minutes for rung in rungs], color=GREY, height=0.6)
    panels[0].set(xscale="log", xlim=(2, None), yticks=places, yticklabels=[rung.name for rung in rungs],
                  ylim=(-0.7, len(rungs) - 0.3))
    panels[0].set_xticks([3, 10, 30], ["3", "10", "30"])
    panels[0].set_xticks([], minor=True)
    panels[0].set_title("published: minutes to 3.28\non 8xH100", loc="left", fontsize=8)
    for place, rung in enumerate(rungs):
        losses = list(rung.record.losses.values())
        is_below = rung.summary.mean <= target
        panels[1].plot(losses, [place] * len(losses), ".", color=BLUE, alpha=0.4, markersize=4)
        panels[1].plot(rung.summary.mean, place, "o", color=BLUE, markersize=5,
                       markerfacecolor=BLUE if is_below else "white")
        if not math.isnan(rung.seconds):
            panels[2].barh(place, rung.seconds, color=BLUE, height=0.6)
        else:
            panels[2].text(0.02, place, f"{rung.num_reached} of {rung.summary.n} seeds reach it", color=GREY,
                           va="center", fontsize=7, transform=panels[2].get_yaxis_transform())
    panels[1].axvline(target, color=RED, linestyle="--", linewidth=1)
    panels[1].set_title("laptop: validation loss after equal tokens\n(dots: seeds; dashed: the target)",
                        loc="left", fontsize=8)
    seconds = statistics.median(result["train_time_ms"] / 1000 for result in target_run.results)
    panels[2].axvline(seconds, color=RED, linestyle="--", linewidth=1)
    panels[2].set_xlim(0, None)
    panels[2].set_title("laptop: seconds to the target\n(dashed: the first rung)", loc="left", fontsize=8)
    panels[0].invert_yaxis()
    save(figure, out)


def main() -> None:
    """Draw the curves of folders or of runs."""
    parser = results.Parser(__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="record folders of one track, or jsonl files")
    parser.add_argument("--out", type=Path, default=Path("curves"), help="where, without ending")
    args = parser.parse_args()
    if not args.out.name:
        raise results.RecordError(f"--out={args.out} is no name for a picture: give one like --out=curves")
    out = args.out.with_suffix("") if args.out.suffix in (".png", ".svg") else args.out
    if all(path.suffix == ".jsonl" for path in args.paths):
        plot_runs(args.paths, out)
    else:
        records = [results.read_record(folder) for folder in args.paths]
        plot_curves(records, results.find_own_target(records[0]), out)
    print(f"{out}.png and {out}.svg")


if __name__ == "__main__":
    sys.exit(results.run_guarded(main))
