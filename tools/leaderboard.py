"""Write records/README.md, its pictures and the marked blocks of README.md and docs/*.md.

    ./run.sh tools/leaderboard.py

Run it after adding a record or changing a preset. A test fails if the pages are out of date. The numbers
come from the json files of the runs and from the presets, and the published minutes from published.csv. A
run that does not fit the rest of its folder is named and left out, as is a record on other data than its
track. The exit status is then 1.
"""

import dataclasses
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, RecordError, list_visible, require_packages, run_guarded, warn

with require_packages():
    from scipy import stats

    import train_gpt as gpt
    from tools import plot, results

HEAD = """# Records

`./run.sh tools/leaderboard.py` writes this page from the json files in these folders. Edits are lost.
A folder holds the script that ran, and the log and the result of each run. A ladder has a folder for each of
its rungs. `./run.sh tools/replay.py FOLDER` repeats a record and compares the losses. To repeat it manually,
with its files in `logs/`, run `python records/<track>/<folder>/train_gpt.py <argv of its json> --record=`.

Verdicts on changes are "helps" and "hurts" if p < 0.05 after Holm's correction for the number of rows in the
table. Intervals and other p-values are not corrected. Choose the number of seeds before you see a result:
p loses its meaning if seeds are added until it is small.
"""
TARGET_NOTE = """The target is {target:g} nats per byte. It is the mean loss of [{name}]({name}) over
{n} seeds, rounded to two decimals, with a standard deviation of {sd:.3f}. This record is not tested against
its own target. The tests of other records treat the target as exact. Machine: {machine}.

{claims}
"""
PUBLISHED_NOTES = {"shakespeare": """\
The text is tiny Shakespeare. The target is {target:g} nats per character. It is the loss that nanoGPT's
README gives for its baby GPT. Here the loss is the mean over {val_tokens:,} characters: the last 10 %
of the text, in blocks of {val_seq_len} without overlap. A model sees nothing before a block. This is
nanoGPT's context. Training reads the last 70 % of the other characters once, in their order. So a run
ends with the text that is nearest to the validation text, and shares its speakers. nanoGPT draws
training sequences at random. Its figures, as published:

| model | machine | training | loss |
|---|---|---|---|
| 6 layers, width 384, 10.65 M parameters | one A100 | 5,000 steps of 16,384 tokens, 3 minutes | 1.4697 |
| 4 layers, width 128 | CPU of a MacBook | 2,000 steps of 768 tokens, 3 minutes | 1.88 |

{claims}
"""}
LADDER_NOTE = """### {title}

Every rung is a preset of the ladder's script. `<date>_<name>` is the published record.
`laptop_<date>_<name>` applies its change to the laptop's sizes and takes a minute on two cores.

```
python records/{ladder}/train_gpt.py --list_presets
python records/{ladder}/train_gpt.py --preset=2024-11-10_unet_skips
python records/{ladder}/train_gpt.py --preset=laptop_2024-11-10_unet_skips
./run.sh tools/replay.py records/{ladder}/unet_skips
./run.sh tools/ladder.py --only=unet_skips --seeds=4
```

The fourth line repeats a rung's record, and the fifth gives the rung a fourth seed. On another machine than
the rung's, both stop with an error before any run. With `--extra`, which adds options, `ladder.py` makes
a trial in `logs/trials` and does not change the ladder. The script reads `data/` and writes `logs/` in the
current folder. On eight GPUs use `torchrun --standalone --nproc_per_node=8` instead of `python`.

The script has an error: in 2024-12-08 and 2024-12-17 the cooldown takes 580 and 584 steps instead of the
published 600. `--cooldown_frac=0.4054` and `0.4027` correct it.

All rungs train on {tokens:,} tokens of the source of PyTorch. Machine: {machine}.
The ladder has a separate target, {target:g}: the mean loss of the first rung after {target_tokens:,} tokens,
rounded to two decimals. This takes {target_minutes:.1f} minutes of training. It is measured with the preset
`laptop_target` over {n} seeds, with a standard deviation of {sd:.3f}.

- Losses are in nats per byte.
- p is a one-sided t-test of the mean against the ladder's target.
- "Against the rung before" is paired by seed, and has a 95 % confidence interval.
- "To target" is interpolated between validations. It is the median if all seeds reach the target.
- "Here" is the verdict for this small model, corrected for the {num_effects} effects of the table: {helps}
  help, {hurts} hurt, and no effect is shown for the rest. A change can help a model a hundred times larger,
  on eight hundred times the tokens, and not this one. Three seeds only show effects of several standard
  deviations.
"""
LADDER_HEAD = """
| rung | published change | min on 8xH100 | n | loss | sd | p | against the rung before \
| steps to target | s to target | here |
|---|---|---|---|---|---|---|---|---|---|---|
"""
OTHERS_HEAD = """
The preset is the one in the record's script. Today a preset of this name may have another recipe.

| folder | preset | parameters | steps | n | loss | sd | p | s to target | training time |
|---|---|---|---|---|---|---|---|---|---|
"""
INCIDENTS_HEAD = """
Some runs were interrupted or corrected. They count as all runs do:

"""
BLOCKS_HEAD = """### {title}

This is record 89 at a small size, block by block. Every rung is a preset of
[its script](laptop/{folder}/train_gpt.py) and contains all earlier rungs. Machine: {machine}.

A run of `{first_name}` takes {first:.0f} s of training, and a run of `{last_name}` {last:.0f} s.
Paired by seed, the loss of `{last_name}` is lower by {effect}. It is lower for {num_lower} seeds of {n}:
p = {signed_rank:.4f} by Wilcoxon's signed-rank test, and {p} by the t-test, which assumes normal values.
The standard deviation of its loss is {sd:.3f}.
It reaches the mean loss of `{first_name}` after {crossing:.0f} s (median).

In the table, p is a one-sided t-test of the mean against the track's target. "Here" is the verdict against
the rung before, corrected for the {num_effects} effects of the table.

```
./run.sh tools/ladder.py --ladder=records/laptop/{folder}
```

![record 89, block by block](frontier.svg)

| rung | preset | what it adds | n | loss | sd | p | training s | s to the target \
| against the rung before | here |
|---|---|---|---|---|---|---|---|---|---|---|
"""
README_PICTURE = """\
The picture above. Left: the published records on 8xH100, where `train_gpt.py` has not been timed. The last
one is record {last}. Right: small recipes on two cores, median and range of the seeds. The colors mark the
published records {numbers}, and the small recipe with the mechanisms of each. The processors differ.
"""
LADDER_PICTURE = """
![Left: published minutes to 3.28, by day. Right: validation loss against seconds, of recipes in miniature](\
ladder.svg)

Left: the [published](published.csv) records of the short track with a known day, in minutes on 8xH100.
Right: median and range of the seeds of a record. Three of frontier's four blocks are drawn, `constants` to
`tables`. The fourth shows no effect at this size.

"""
CURVES = {  # of the picture: label, its place (seconds, loss), number and label of the published record
    "2026-11-21_ladder/target": ("AdamW of 2024", (117, 1.84), 2, "AdamW of 2024:\n{:.2g} min"),
    "2026-11-22_frontier/record_32": ("record 32", (97, 1.18), 32, "record 32: {:.2g} min\nhere: record_32"),
    "2026-11-22_frontier/tables": ("with record 89's blocks", (91, 0.885), 89, ""),
    "2026-11-28_six_grams": ("laptop now", (5, 0.93), 92, "record 92: {:.2g} min\nhere: record_92"),
}
CHAIN_HEAD = """
### Record against record

A claim is a ratio: the time that a record needs for the loss of the record before it, measured by pairs of
runs on one machine, with its 95 % interval. The product is the ratio to the first record of its chain.
`./run.sh tools/replay.py FOLDER --against` measures a ratio on your machine.

| record | of the time of the record before | product | training of the record |
|---|---|---|---|
"""
EMPTY_TRACKS = {"one_gpu": """\
Data and target are those of `track_1`, 3.28 on FineWeb, and the machine has one GPU. The base is `record_92`
with the n-gram table that fits the card. No run has ended yet, so there is no record.
"""}
BLOCK = re.compile(r"(<!-- (\w+): written by tools/leaderboard.py -->\n)(.*?)(?=<!-- end of \2 -->)",
                   re.DOTALL)
SHOWN_PRESETS = "record_32", "record_92", "track_2", "laptop_32", "laptop", "shakespeare", "quick"
PRESETS_HEAD = """\
| preset | track | layers, width | parameters | n-gram table, in rows | steps | training tokens |
|---|---|---|---|---|---|---|
"""


class Rung(NamedTuple):
    """A rung of the laptop ladder as it was run."""

    name: str
    change: str
    minutes: float  # published
    record: results.Record
    summary: results.Summary
    effect: results.Estimate | None  # against the rung before
    verdict: str  # on the effect
    num_reached: int  # runs that reached the target
    steps: float  # to the target, median. nan if a run does not reach it
    seconds: float


def find_arrival(record: results.Record, target: float | None) -> tuple[int, float, float]:
    """(runs that reach the target, median step and seconds to it). nan if a run does not reach it."""
    if target is None:
        return 0, math.nan, math.nan
    crossings = [results.find_crossing(result, target) for result in record.results]
    reached = [crossing for crossing in crossings if crossing]
    if len(reached) < len(crossings):
        return len(reached), math.nan, math.nan
    steps, seconds = map(statistics.median, zip(*reached))
    return len(reached), steps, seconds


def compare_rungs(records: list[results.Record]) -> tuple[list[results.Estimate | None], list[str]]:
    """(effect of each record against its predecessor, verdicts corrected for all effects)."""
    effects = [None, *(results.compare(record, before) for before, record in itertools.pairwise(records))]
    return effects, ["the start" if effect is None else results.judge(effect, p)
                     for effect, p in zip(effects, results.holm(effects))]


def keep_comparable(records: list[results.Record], kind: str, refuse: Callable[[str], None],
                    reference: results.Record | None = None) -> list[results.Record]:
    """The records whose losses or times (kind) are comparable with the reference, by default the first one.

    refuse() gets a line for each other record.
    """
    kept = []
    for record in records:
        try:
            results.check_comparable(record, reference or records[0], kind)
            kept.append(record)
        except RecordError as error:
            refuse(str(error))
    return kept


def format_chain(records: list[results.Record], refuse: Callable[[str], None] = results.fail) -> str:
    """The table of the records that were measured against the one before. refuse() gets a line for each
    record whose pairs cannot be read."""
    by_folder = {record.folder: record for record in records}
    links_of: dict[Path, list[results.Link]] = {}
    bases = {}
    for record in records:
        base = results.find_base(record.folder)
        if base is None:
            continue
        try:
            links_of[record.folder] = results.read_links(record, results.read_record(base))
        except RecordError as error:
            refuse(str(error))
        if links_of.get(record.folder) and base in by_folder:
            bases[record.folder] = base
    if not bases:
        return ""

    def list_chain(folder: Path) -> list[Path]:
        """From the first record to this one."""
        return [*(list_chain(bases[folder]) if folder in bases else ()), folder]

    text = CHAIN_HEAD
    for folder in sorted({*bases, *bases.values()}, key=list_chain):
        record, links = by_folder[folder], links_of.get(folder, [])
        product = math.prod(links_of[other][0].ratio for other in list_chain(folder)[1:])
        measured = "<br>".join(
            f"{link.format()}{', not shown to be faster' * (link.high >= 1)}: {link.machine}"
            for link in links)
        seconds = f"{time_runs(record):.1f} s: {results.format_machine(record.results[0])}"
        text += f"| [{folder.name}]({record.name}) | {measured} | {product:.3f} | {seconds} |\n"
    return text + "\n"


def read_rungs(records: list[results.Record], ladder: Path, target: float,
               refuse: Callable[[str], None] = results.fail) -> list[Rung]:
    """The rungs of a ladder among a track's records, in the order of the ladder's script.

    refuse() gets a line for each rung on another machine or other data than the first.
    """
    by_folder = {record.folder: record for record in records}
    rungs = {ladder / name[11:]: (name, rung)  # without its date
             for name, rung in results.load_script(ladder).LADDER.items()}
    kept = keep_comparable([by_folder[folder] for folder in rungs if folder in by_folder], "times", refuse)
    return [Rung(name, rung.change, rung.minutes, record,
                 results.summarize(list(record.losses.values()), target), effect, verdict,
                 *find_arrival(record, target))
            for record, effect, verdict in zip(kept, *compare_rungs(kept))
            for name, rung in [rungs[record.folder]]]


def format_p(p: float) -> str:
    """A p-value with few digits."""
    return "" if math.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def format_effect(effect: results.Estimate) -> str:
    """A difference and, with several seeds, its interval."""
    interval = "" if math.isnan(effect.low) else f" [{effect.low:+.3f}, {effect.high:+.3f}]"
    return f"{effect.mean:+.3f}{interval}"


def format_rung(rung: Rung) -> str:
    """A row of the ladder's table."""
    misses = math.isnan(rung.steps)
    cells = (
        f"[{rung.name}]({rung.record.name})", rung.change,
        f"{rung.minutes:g}", rung.summary.n, f"{rung.summary.mean:.3f}", f"{rung.summary.sd:.3f}",
        format_p(rung.summary.p),
        format_effect(rung.effect) if rung.effect else "",
        f"{rung.num_reached} of {rung.summary.n} reach it" if misses else f"{rung.steps:.0f}",
        "" if misses else f"{rung.seconds:.1f}", rung.verdict)
    return f"| {' | '.join(map(str, cells))} |\n"


def format_test(record: results.Record, target: float | None, setting: results.Record | None) -> str:
    """p of a record against a target that it does not set itself."""
    if record is setting:
        return "sets the target"
    return format_p(results.summarize(list(record.losses.values()), target).p)


def format_other(record: results.Record, target: float | None, setting: results.Record | None) -> str:
    """A row of a record outside the ladders."""
    summary = results.summarize(list(record.losses.values()))
    sd = "" if math.isnan(summary.sd) else f"{summary.sd:.3f}"
    arrival = find_arrival(record, target)[2]
    sizes = record.results[0]["config"]["derived"]
    return (f"| [{record.name}]({record.name}) | {record.results[0]['preset']} "
            f"| {sizes['num_params'] / 1e6:.2f} M | {record.results[0]['val_points'][-1][0]} | {summary.n} "
            f"| {summary.mean:.3f} | {sd} | {format_test(record, target, setting)} "
            f"| {'' if math.isnan(arrival) else f'{arrival:.1f}'} | {time_runs(record):.1f} s |\n")


def make_readme(records_dir: Path, refuse: Callable[[str], None] = results.fail
                ) -> tuple[str, dict[str, str], tuple]:
    """(records/README.md, blocks of other pages by name, curves and target of the ladder's picture).

    refuse() gets a line for each run and record that is left out.
    """
    text, blocks_of_pages, picture = HEAD, {"presets": format_presets()}, ()
    for track in sorted({path.parents[1].name for path in list_visible(records_dir, "*/*/train_gpt.py")}):
        records = results.read_track(track, records_dir, refuse)
        setting = results.find_setting(records)
        records = keep_comparable(records, "losses", refuse, setting)
        target = results.find_target(track, records)
        ladder_setting = next((r for r in reversed(records) if r.folder.name == "target"), None)
        ladder_target = ladder_setting and results.find_target(track, [ladder_setting])
        found = []
        if ladder_setting:
            found = read_rungs(records, ladder_setting.folder.parent, ladder_target, refuse)
        text += f"\n## {track}\n\n"
        if setting:
            text += format_target(setting, target, records)
        elif track in PUBLISHED_NOTES:
            text += PUBLISHED_NOTES[track].format(target=target, claims=format_claims(records, target),
                                                  **results.TRACK_VALIDATION[track])
        text += format_chain(records, refuse)
        if found:
            picture = choose_curves(records), target
            text += format_ladder(found, ladder_setting, ladder_target, picture[0])
            blocks_of_pages["ladder"] = format_lines(target, records, picture[0])
        blocks = read_blocks(records, refuse)
        if blocks:
            text += format_blocks(*blocks, target)
        shown = [rung.record for rung in found] + list(blocks[1].values() if blocks else ())
        others = [r for r in records if r not in shown]
        text += "### Other records\n" if found else ""
        text += OTHERS_HEAD + "".join(format_other(record, target, setting) for record in others)
        incidents = [f"- {record.name}: {record.incidents}.\n" for record in records if record.incidents]
        text += INCIDENTS_HEAD * bool(incidents) + "".join(incidents)
    for track, note in EMPTY_TRACKS.items():
        if not (records_dir / track).exists():
            text += f"\n## {track}\n\n{note}"
    return text, blocks_of_pages, picture


def read_blocks(records: list[results.Record], refuse: Callable[[str], None] = results.fail
                ) -> tuple[Path, dict[str, results.Record]] | None:
    """(folder, records by rung in its order) of the newest ladder with a ladder.toml.

    refuse() gets a line for each rung on another machine or other data than the first.
    """
    by_folder = {record.folder: record for record in records}
    for folder in sorted({record.folder.parent for record in records}, reverse=True):
        folders = [folder / name for name in results.read_ladder(folder)]
        rungs = [by_folder[rung] for rung in folders if rung in by_folder]
        if len(rungs) > 1:
            return folder, {record.folder.name: record for record in keep_comparable(rungs, "times", refuse)}
    return None


def format_blocks(folder: Path, blocks: dict[str, results.Record], target: float | None) -> str:
    """The note and the table of a ladder with a ladder.toml, and the ablation.md of its folder."""
    rungs, text, ablation = results.read_ladder(folder), "", folder / "ablation.md"
    first_name, first = next(iter(blocks.items()))
    last_name, last = [(name, record) for name, record in blocks.items()
                       if rungs[name].get("has_more_seeds")][-1]
    setting = results.find_setting(list(blocks.values()))
    effects, verdicts = compare_rungs(list(blocks.values()))
    for (name, record), effect, verdict in zip(blocks.items(), effects, verdicts):
        summary = results.summarize(list(record.losses.values()))
        num_reached, _, seconds = find_arrival(record, target)
        cells = (f"[{name}]({record.name})", f"`{rungs[name]['preset']}`", rungs[name]["change"], summary.n,
                 f"{summary.mean:.3f}", f"{summary.sd:.3f}", format_test(record, target, setting),
                 f"{time_runs(record):.0f}",
                 f"{num_reached} of {summary.n} reach it" if math.isnan(seconds) else f"{seconds:.0f}",
                 format_effect(effect) if effect else "", verdict)
        text += f"| {' | '.join(map(str, cells))} |\n"
    goal = statistics.mean(first.losses.values())
    crossings = [results.find_crossing(result, goal) for result in last.results]
    effect = results.compare(first, last)
    gains = [first.losses[seed] - last.losses[seed] for seed in sorted(first.losses.keys() & last.losses)]
    return BLOCKS_HEAD.format(
        title=folder.name, folder=folder.name, machine=results.format_machine(first.results[0]),
        first_name=first_name, first=time_runs(first), last=time_runs(last),
        last_name=last_name, effect=format_effect(effect).replace("+", ""),
        n=effect.n, p=format_p(effect.p), num_lower=sum(gain > 0 for gain in gains),
        signed_rank=stats.wilcoxon(gains).pvalue, sd=results.summarize(list(last.losses.values())).sd,
        crossing=statistics.median(crossing[1] if crossing else math.inf for crossing in crossings),
        num_effects=len(blocks) - 1
    ) + text + (f"\n{ablation.read_text()}" if ablation.exists() else "") + "\n"


def format_ladder(rungs: list[Rung], setting: results.Record, target: float, curves: list[plot.Curve]
                  ) -> str:
    """The note, the picture and the table of the ladder."""
    picture = LADDER_PICTURE + "".join(
        f"- {curve.label}: [{curve.record.name}]({curve.record.name}), {len(curve.record.results)} seeds; "
        f"{results.format_machine(curve.record.results[0])}.\n" for curve in curves)
    tokens = [record.results[0]["config"]["derived"]["train_tokens"]
              for record in (rungs[-1].record, setting)]
    summary, verdicts = results.summarize(list(setting.losses.values())), [rung.verdict for rung in rungs]
    note = LADDER_NOTE.format(tokens=tokens[0], target=target, target_tokens=tokens[1], n=summary.n,
                              sd=summary.sd, target_minutes=time_runs(setting) / 60,
                              machine=results.format_machine(setting.results[0]),
                              title=setting.folder.parent.name, ladder=setting.name.removesuffix("/target"),
                              num_effects=len(rungs) - 1, helps=verdicts.count("helps"),
                              hurts=verdicts.count("hurts"))
    return f"{note}{picture}{LADDER_HEAD}{''.join(map(format_rung, rungs))}\n"


def time_runs(record: results.Record) -> float:
    """Training seconds of a record, the median over its runs."""
    return statistics.median(result["train_time_ms"] for result in record.results) / 1000


def choose_curves(records: list[results.Record]) -> list[plot.Curve]:
    """The CURVES whose records exist in a track."""
    by_name = {record.name.partition("/")[2]: record for record in records}
    return [plot.Curve(by_name[name], label, colour, *rest)
            for colour, (name, (label, *rest)) in zip((plot.GREY, plot.BLUE, plot.RED, plot.GREEN),
                                                      CURVES.items()) if name in by_name]


def find_fastest(records: list[results.Record], target: float) -> list[results.Record]:
    """For each machine the record that reaches the target first, with a mean below it at p < 0.01.

    All of its runs reach the target. The record that sets the target makes no claim.
    """
    fastest: list[tuple[float, results.Record]] = []  # one per machine
    setting = results.find_setting(records)
    for record in records:
        seconds = find_arrival(record, target)[2]
        p = results.summarize(list(record.losses.values()), target).p
        if record is setting or math.isnan(seconds) or not p < 0.01:
            continue
        for place, (least, other) in enumerate(fastest):
            if not results.find_differences(record, other, "times"):
                fastest[place] = min((least, other), (seconds, record), key=lambda pair: pair[0])
                break
        else:
            fastest.append((seconds, record))
    return [record for _, record in fastest]


def format_claims(records: list[results.Record], target: float, prefix: str = "") -> str:
    """The records that reach the target first, a line for each machine."""
    lines = []
    for record in find_fastest(records, target):
        summary = results.summarize(list(record.losses.values()), target)
        p, seconds = format_p(summary.p), find_arrival(record, target)[2]
        lines.append(f"- [`{record.folder.name}`]({prefix}{record.name}) reaches it after "
                     f"{seconds:.0f} s of training (median) and ends at {summary.mean:.3f} after "
                     f"{time_runs(record):.0f} s. It has {summary.n} seeds with a standard deviation of "
                     f"{summary.sd:.3f}, p {p if p.startswith('<') else f'= {p}'}. Machine: "
                     f"{results.format_machine(record.results[0])}.\n")
    return "".join(lines) or "No record reaches it yet with p < 0.01.\n"


def format_target(setting: results.Record, target: float, records: list[results.Record]) -> str:
    """The origin of a track's target, and the claims on it."""
    summary = results.summarize(list(setting.losses.values()))
    return TARGET_NOTE.format(target=target, name=setting.name, n=summary.n, sd=summary.sd,
                              machine=results.format_machine(setting.results[0]),
                              claims=format_claims(records, target))


def format_lines(target: float, records: list[results.Record], curves: list[plot.Curve]) -> str:
    """The lines of the main README on records."""
    *numbers, last = [str(curve.published) for curve in curves]
    intro = README_PICTURE.format(last=plot.read_published()[-1].record,
                                  numbers=f"{', '.join(numbers)} and {last}")
    track = records[0].results[0]["track"]
    return (f"{intro}Track `{track}` has a target of {target:g} nats per byte:\n"
            f"{format_claims(records, target, 'records/')}")


def format_presets() -> str:
    """The table of presets."""
    text = PRESETS_HEAD
    for name in SHOWN_PRESETS:
        cfg = gpt.make_config(dict(preset=name))
        steps, tokens = "those of one pass", ""
        if cfg.num_iterations:
            steps = f"{cfg.num_iterations:,}"
            tokens = f"{gpt.Schedule(cfg).count_tokens() / 1e6:,.2f} M"
        sizes = gpt.derived_numbers(dataclasses.replace(cfg, num_iterations=cfg.num_iterations or 100), 1)
        num_ngram = cfg.ngram_rows * cfg.model_dim
        table = f"{num_ngram / 1e6:,.2f} M in {cfg.ngram_rows:,}" if num_ngram else ""
        cells = (f"`{name}`", f"`{cfg.track}`", f"{cfg.num_layers}, {cfg.model_dim}",
                 f"{(sizes['num_params'] - num_ngram) / 1e6:.2f} M", table, steps, tokens)
        text += f"| {' | '.join(cells)} |\n"
    return text


def fill_blocks(page: str, blocks: dict[str, str]) -> str:
    """A page with these texts in its blocks."""
    return BLOCK.sub(lambda block: block[1] + blocks.get(block[2], block[3]), page)


def main() -> int:
    """Write the pages and pictures."""
    parser = Parser(__doc__)
    parser.add_argument("--records_dir", type=Path, default=results.RECORDS)
    args, refused = parser.parse_args(), []
    warn(f"reading the runs in {args.records_dir}")
    text, blocks_of_pages, picture = make_readme(args.records_dir, refused.append)
    for line in refused:
        results.leave_out(line)
    gpt.write_atomic(args.records_dir / "README.md", text.encode())
    records = results.read_track("*", args.records_dir, lambda line: None)
    written = [f"{args.records_dir / 'README.md'} ({len(records)} records and rungs)"]
    if picture:
        warn("drawing ladder")
        plot.plot_ladder(*picture, args.records_dir / "ladder")
        written += [f"{args.records_dir / 'ladder'}.svg"]
    blocks = read_blocks(records, lambda line: None)
    if blocks:
        warn("drawing frontier")
        plot.plot_times(blocks[1], args.records_dir / "frontier")
        written.append(f"{args.records_dir / 'frontier'}.svg")
    root = args.records_dir.resolve().parent
    for page in [*list_visible(root, "README.md"), *list_visible(root, "docs/*.md")]:
        filled = fill_blocks(page.read_text(), blocks_of_pages)
        if filled != page.read_text():
            gpt.write_atomic(page, filled.encode())
            written.append(str(page))
    print("written:", ", ".join(written))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
