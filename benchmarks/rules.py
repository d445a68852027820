#!/usr/bin/env python3
"""The update rules side by side on the laptop track: each with its learning rate tuned on a grid of its own.

    ./run.sh benchmarks/rules.py              # 40 minutes on two cores: tunes, then the best over seeds
    ./run.sh benchmarks/rules.py --depths     # 15 minutes: how the best rate moves from 4 to 12 layers
    ./run.sh benchmarks/rules.py --laptop     # half an hour: every rule on preset laptop_32, no rate given

Every rule gets the same steps, tokens and number of rates. The first two train the model of preset quick on
the data of track laptop. Runs are kept in logs/rules and not run again. Prints tables for RESULTS.md and
draws rules.png and rules.svg. Seconds only mean something on a machine that does nothing else.
"""

import hashlib
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "records"))
import plot  # noqa: E402
import results  # noqa: E402

import train_gpt as gpt  # noqa: E402

HERE, LOGS = Path(__file__).resolve().parent, results.ROOT / "logs" / "rules"
BUDGET = ["--preset=quick", "--val_loss_every=35", "--matrix_rule=muon",
          "--orthogonalize=newton_schulz"]
RULES = {  # name: options, learning rate in the middle of its grid
    "muon": ([], 0.05),
    "muon, Polar Express": (["--orthogonalize=polar_express"], 0.05),
    "muon, cautious decay": (
        ["--decay=cautious", "--matrix_weight_decay=0.06", "--decay_schedule=lr"], 0.05),
    "normuon": (["--matrix_rule=normuon"], 0.05),
    "muonh": (["--matrix_rule=muonh"], 0.04),
    "normuonh": (["--matrix_rule=normuonh"], 0.04),
    "adamh": (["--matrix_rule=adamh"], 0.01),
    "adamw": (["--matrix_rule=adamw"], 0.008),
}
GRID = (0.25, 0.5, 1.0, 2.0, 4.0)
DEPTHS = (4, 8, 12)


def list_runs(rules: list[str], seeds: range, rates: dict[str, list[float]], extra: list[str], kind: str
              ) -> list[tuple[str, int, list[str]]]:
    """(folder, seed, options) of the runs of rules at rates, seed by seed."""
    return [(f"{kind}_{name.replace(', ', '_').replace(' ', '_')}_{rate:g}", seed,
             [*BUDGET, *RULES[name][0], f"--matrix_lr={rate}", *extra])
            for seed in seeds for name in rules for rate in rates[name]]


def run(runs: list[tuple[str, int, list[str]]], folder: Path) -> dict[str, list[dict]]:
    """Run what is missing; the results by folder name, in the order of their seeds."""
    def read(name: str) -> list[dict]:
        found = [json.loads(path.read_text()) for path in (folder / name).glob("*.json")]
        return sorted(found, key=lambda result: result["seed"])

    source = (results.ROOT / "train_gpt.py").read_bytes()
    results.run_missing([(name, seed, [*options, f"--logs_dir={folder / name}"])
                         for name, seed, options in runs],
                        lambda name: {result["seed"] for result in read(name)}, source, "rules.py")
    return {name: read(name) for name, _, _ in runs}


def choose_rates(names: list[str], extra: list[str], kind: str, seeds: range, folder: Path
                 ) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """The best rate of every rule, and the mean loss at all rates of its grid."""
    rates = {name: [RULES[name][1] * factor for factor in GRID] for name in names}
    runs = list_runs(names, seeds, rates, extra, kind)
    found, losses = run(runs, folder), {}
    for name in names:
        folders = [made[0] for made in list_runs([name], range(1), rates, extra, kind)]
        losses[name] = {rate: statistics.mean(result["final_val_loss"] for result in found[path])
                        for rate, path in zip(rates[name], folders)}
    return {name: min(losses[name], key=losses[name].get) for name in names}, losses


def time_step(made: list[dict]) -> float:
    """Milliseconds of an average step of the fastest of some runs: other work can only have slowed them."""
    return min(result["val_points"][-1][2] / result["val_points"][-1][0] for result in made)


def compare_rules(num_seeds: int, folder: Path) -> None:
    """Tune on two seeds, run the best on all, print and draw."""
    names = list(RULES)
    best, grids = choose_rates(names, [], "rule", range(2), folder)
    chosen = {name: [best[name]] for name in names}
    found = run(list_runs(names, range(num_seeds), chosen, [], "rule"), folder)
    by_name = dict(zip(names, found.values()))
    base = by_name["muon"]
    base_losses = {result["seed"]: result["final_val_loss"] for result in base}
    base_step = time_step(base)
    print("\n| rule | rate | loss | sd | against muon | ms per step | of muon's |")
    print("|---|---|---|---|---|---|---|")
    for name, made in by_name.items():
        losses = {result["seed"]: result["final_val_loss"] for result in made}
        summary, effect = results.summarize(list(losses.values())), results.compare(losses, base_losses)
        step = time_step(made)
        difference = f"{effect.mean:+.3f} [{effect.low:+.3f}, {effect.high:+.3f}]" if name != "muon" else ""
        edge = " (edge of the grid)" if best[name] in (min(grids[name]), max(grids[name])) else ""
        print(f"| {name} | {best[name]:g}{edge} | {summary.mean:.3f} | {summary.sd:.3f} | {difference} "
              f"| {step:.0f} | {step / base_step:.3f} |")
    draw(grids, by_name)


def draw(grids: dict[str, dict[float, float]], by_name: dict[str, list[dict]]) -> None:
    """Loss against the rate, and against time at the best rate."""
    figure, panels = plot.plt.subplots(1, 2, figsize=(9, 3.6), sharey=False, layout="constrained")
    for index, (name, made) in enumerate(by_name.items()):
        middle = RULES[name][1]
        panels[0].plot([rate / middle for rate in grids[name]], list(grids[name].values()), "o-",
                       color=f"C{index}", markersize=3, linewidth=1)
        steps, losses = ([statistics.mean(values) for values in zip(*(
            [point[axis] for point in result["val_points"]] for result in made))] for axis in (0, 1))
        panels[1].plot([step * time_step(made) / 1000 for step in steps[1:]], losses[1:], color=f"C{index}",
                       linewidth=1, label=name)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xticks(GRID, [f"{factor:g}" for factor in GRID])
    panels[0].set(xlabel="learning rate over the middle of its grid",
                  ylabel="validation loss at the end")
    panels[1].set(xlabel="training time (s), best rate, mean over seeds")
    panels[1].legend(frameon=False, fontsize=7)
    plot.save(figure, HERE / "rules")


def compare_depths(folder: Path) -> None:
    """The best rate of Muon and MuonH at several depths, and what the rate of another depth would cost."""
    print_rows = []
    for depth in DEPTHS:
        best, grids = choose_rates(["muon", "muonh"], [f"--num_layers={depth}"], f"depth{depth}", range(1),
                                   folder)
        print_rows += [f"| {depth} | {name} | {' | '.join(f'{loss:.3f}' for loss in grids[name].values())} "
                       f"| {best[name]:g} |" for name in grids]
    print(f"\n| layers | rule | {' | '.join(f'rate x {factor:g}' for factor in GRID)} | best rate |")
    print("|---|---|" + "---|" * (len(GRID) + 1))
    print("\n".join(print_rows))


def compare_on_laptop(num_seeds: int, folder: Path) -> None:
    """Every rule of the file on preset laptop_32, as --matrix_rule=RULE alone runs it."""
    runs = [(f"laptop_{rule}", seed, ["--preset=laptop_32", f"--matrix_rule={rule}"])
            for seed in range(num_seeds) for rule in gpt.RULES]
    found = {name: statistics.mean(result["final_val_loss"] for result in made)
             for name, made in run(runs, folder).items()}
    print("\n| rule | loss of preset laptop_32 | of muon's |")
    print("|---|---|---|")
    for rule in gpt.RULES:
        loss = found[f"laptop_{rule}"]
        print(f"| {rule} | {loss:.3f} | {loss / found['laptop_muon']:.3f} |")


def main() -> None:
    """Compare rules, depths, or the whole preset."""
    parser = results.Parser(__doc__)
    parser.add_argument("--seeds", type=results.at_least(2), default=5,
                        help="runs of every rule at its best rate")
    parser.add_argument("--depths", action="store_true", help="compare depths instead")
    parser.add_argument("--laptop", action="store_true", help="run preset laptop_32 instead")
    args = parser.parse_args()
    folder = LOGS / hashlib.sha256((results.ROOT / "train_gpt.py").read_bytes()).hexdigest()[:12]
    if args.depths:
        compare_depths(folder)
    elif args.laptop:
        compare_on_laptop(args.seeds, folder)
    else:
        compare_rules(args.seeds, folder)


if __name__ == "__main__":
    sys.exit(results.run_guarded(main))
