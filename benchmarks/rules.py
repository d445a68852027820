#!/usr/bin/env python3
"""Compare the update rules on the data of track laptop, each with a tuned learning rate.

    ./run.sh benchmarks/rules.py              # 46 minutes on two cores: tunes, then runs the best rates

All rules have equal numbers of steps, tokens and learning rates. A rate is chosen on seeds 0 and 1, and the
rules are compared on other seeds. The model is that of preset laptop. Finished runs
are kept in logs/rules. Prints tables for RESULTS.md and draws rules.png and rules.svg. Seconds are only
valid on an idle machine.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import Parser, at_least, require_packages, run_guarded

with require_packages():
    import scipy.stats  # noqa: F401  # results.compare() imports it after all runs

    from records import ablate, plot, results

HERE, LOGS = Path(__file__).resolve().parent, results.ROOT / "logs" / "rules"
BUDGET = ["--preset=laptop", "--val_tokens=40960", "--val_loss_every=35", "--matrix_rule=muon",
          "--orthogonalize=newton_schulz"]
RULES = {  # name: options, learning rate in the middle of its grid
    "muon": ([], 0.05),
    "muon, Polar Express": (["--orthogonalize=polar_express"], 0.05),
    "muon, cautious decay": (
        ["--decay=cautious", "--matrix_weight_decay=0.06", "--decay_schedule=lr"], 0.05),
    "normuon": (["--matrix_rule=normuon"], 0.05),
    "muonh": (["--matrix_rule=muonh"], 0.04),
    "normuonh": (["--matrix_rule=normuonh", "--matrix_betas=0.9,0.95"], 0.04),
    "adamw": (["--matrix_rule=adamw", "--matrix_betas=0.9,0.95", "--matrix_weight_decay=0.1"], 0.008),
}
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
TUNING_SEEDS = range(2)


def list_runs(rules: list[str], seeds: range, rates: dict[str, list[float]], extra: list[str], kind: str
              ) -> list[tuple[str, int, list[str]]]:
    """(folder, seed, options) of each run, seed by seed. rates: of each rule."""
    return [(f"{kind}_{name.replace(', ', '_').replace(' ', '_')}_{rate:g}", seed,
             [*BUDGET, *RULES[name][0], f"--matrix_lr={rate}", *extra])
            for seed in seeds for name in rules for rate in rates[name]]


def run(runs: list[tuple[str, int, list[str]]], folder: Path) -> dict[str, results.Record]:
    """Run the missing ones. Returns the records by folder name, with only the seeds of these runs.

    RecordError if the records are not of one machine and one text.
    """
    source, seeds = (folder / "train_gpt.py").read_bytes(), {seed for _, seed, _ in runs}
    results.run_missing([(name, seed, [*options, f"--out={folder / name}"])
                         for name, seed, options in runs],
                        lambda name: results.find_done(folder / name / "logs"), source, "rules.py",
                        keep=lambda name, seed: results.remove_models(folder / name, seed))
    records = {}
    for name in dict.fromkeys(name for name, _, _ in runs):
        record = results.read_record(folder / name / "logs")
        records[name] = record._replace(results=[one for one in record.results if one["seed"] in seeds])
        results.check_comparable(record, next(iter(records.values())), "times")
    return records


def choose_rates(names: list[str], extra: list[str], kind: str, seeds: range, folder: Path
                 ) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """(the best rate of each rule, its mean losses by rate) on these seeds."""
    rates = {name: [RULES[name][1] * factor for factor in GRID] for name in names}
    found, losses = run(list_runs(names, seeds, rates, extra, kind), folder), {}
    for name in names:
        folders = [made[0] for made in list_runs([name], range(1), rates, extra, kind)]
        losses[name] = {rate: statistics.mean(found[path].losses.values())
                        for rate, path in zip(rates[name], folders)}
    return {name: min(losses[name], key=losses[name].get) for name in names}, losses


def time_step(record: results.Record) -> float:
    """Milliseconds of an average step in the fastest run, which other work slowed the least."""
    return min(result["val_points"][-1][2] / result["val_points"][-1][0] for result in record.results)


def compare_rules(num_seeds: int, folder: Path) -> None:
    """Tune on two seeds, run the best rates on others, print and draw."""
    names = list(RULES)
    best, grids = choose_rates(names, [], "rule", TUNING_SEEDS, folder)
    chosen = {name: [best[name]] for name in names}
    seeds = range(TUNING_SEEDS.stop, TUNING_SEEDS.stop + num_seeds)
    found = run(list_runs(names, seeds, chosen, [], "rule"), folder)
    by_name = dict(zip(names, found.values()))
    base, base_step = by_name["muon"], time_step(by_name["muon"])
    print("\n| rule | rate | loss | sd | against muon | ms per step | of muon's |")
    print("|---|---|---|---|---|---|---|")
    for name, record in by_name.items():
        summary, effect = results.summarize(list(record.losses.values())), results.compare(record, base)
        step = time_step(record)
        difference = f"{effect.mean:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]" if name != "muon" else ""
        edge = " (edge of the grid)" if best[name] in (min(grids[name]), max(grids[name])) else ""
        print(f"| {name} | {best[name]:g}{edge} | {summary.mean:.3f} | {summary.sd:.3f} | {difference} "
              f"| {step:.0f} | {step / base_step:.3f} |")
    draw(grids, by_name)


def draw(grids: dict[str, dict[float, float]], by_name: dict[str, results.Record]) -> None:
    """Plot loss against learning rate, and loss against time at the best rate."""
    figure, panels = plot.plt.subplots(1, 2, figsize=(9, 3.6), sharey=False, layout="constrained")
    for index, (name, record) in enumerate(by_name.items()):
        middle = RULES[name][1]
        panels[0].plot([rate / middle for rate in grids[name]], list(grids[name].values()), "o-",
                       color=f"C{index}", markersize=3, linewidth=1)
        steps, losses = ([statistics.mean(values) for values in zip(*(
            [point[axis] for point in one["val_points"]] for one in record.results))] for axis in (0, 1))
        panels[1].plot([step * time_step(record) / 1000 for step in steps[1:]], losses[1:],
                       color=f"C{index}", linewidth=1, label=name)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks(GRID, [f"{factor:g}" for factor in GRID])
    panels[0].set(xlabel="learning rate over the middle of its grid",
                  ylabel="validation loss at the end")
    panels[1].set(xlabel="training time (s), best rate, mean over seeds")
    panels[1].legend(frameon=False, fontsize=7)
    plot.save(figure, HERE / "rules")


def main() -> None:
    """Compare rules."""
    parser = Parser(__doc__)
    parser.add_argument("--seeds", type=at_least(2), default=5,
                        help="seeds of each rule at its best rate")
    args = parser.parse_args()
    source = (results.ROOT / "train_gpt.py").read_bytes()
    folder = ablate.find_folder(LOGS, source, "rules", [], jobs=1)
    compare_rules(args.seeds, folder)


if __name__ == "__main__":
    sys.exit(run_guarded(main, "interrupted. The same command goes on with the next run"))
