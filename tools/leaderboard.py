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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import Parser, RecordError, list_visible, require_packages, run_guarded, warn

with require_packages():
    import scipy.stats  # noqa: F401  # results.py imports it later

    import train_gpt as gpt
    from tools import plot, results

HEAD = """# Records

`./run.sh tools/leaderboard.py` writes this page from the files in these folders. Edits are lost.
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

{claim}
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

{claim}
"""}
LADDER_HEAD = """
The target of this ladder is {target:g}: the mean loss of [{name}]({name}) over {n} seeds, rounded to two
decimals, with a standard deviation of {sd:.3f}. p is a one-sided t-test of the mean against it. "Against
the rung before" is paired by seed. "Here" is the verdict on it, corrected for the {num_effects} effects of
the table. Seconds to the target are interpolated between validations, and the median if all seeds reach it.
Machine: {machine}.

| rung | preset | what it adds | n | loss | sd | p | training s | s to the target \
| against the rung before | here |
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
README_PICTURE = """\
The picture above. Left: the published records on 8xH100, where `train_gpt.py` has not been timed. The last
one is record {last}. Right: small recipes on two cores, median and range of the seeds. The colors mark the
published records {numbers}, and the small recipe with the mechanisms of each. The processors differ.
"""
PICTURE = """\
![Left: published minutes to 3.28, by day. Right: validation loss against seconds, of recipes in miniature](\
ladder.svg)

Left: the [published](published.csv) records of the short track with a known day, in minutes on 8xH100.
Right: median and range of the seeds of a record.

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

| record | the record before it | of its time | product | training of the record |
|---|---|---|---|---|
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
        try:
            base = results.find_base(record.folder)
            if base is None:
                continue
            links_of[record.folder] = results.read_links(record, results.read_record(base))
        except RecordError as error:
            refuse(str(error))
            continue
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
        base_name = bases[folder].name if folder in bases else ""
        cells = (f"[{folder.name}]({record.name})", base_name, measured, f"{product:.3f}", seconds)
        text += f"| {' | '.join(cells)} |\n"
    return text + "\n"


def format_p(p: float) -> str:
    """A p-value with few digits."""
    return "" if math.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def format_effect(effect: results.Estimate) -> str:
    """A difference and, with several seeds, its interval."""
    interval = "" if math.isnan(effect.low) else f" [{effect.low:+.3f}, {effect.high:+.3f}]"
    return f"{effect.mean:+.3f}{interval}"


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
        text += f"\n## {track}\n\n"
        if setting:
            text += format_target(setting, target, records)
        elif track in PUBLISHED_NOTES:
            text += PUBLISHED_NOTES[track].format(target=target, claim=format_claim(records, target),
                                                  **gpt.TRACK_VALIDATION[track])
        text += format_chain(records, refuse)
        curves = choose_curves(records)
        if curves:
            picture = curves, target
            text += format_picture(curves)
            blocks_of_pages["ladder"] = format_lines(target, records, curves)
        ladders = list_ladders(records, refuse)
        for folder, rungs in ladders.items():
            of_ladder = [record for record in records if record.folder.parent == folder]
            text += format_ladder(folder, rungs, results.find_setting(of_ladder) or setting)
        others = [record for record in records if not any(record in rungs for rungs in ladders.values())]
        text += "### Other records\n" if ladders else ""
        text += OTHERS_HEAD + "".join(format_other(record, target, setting) for record in others)
        incidents = [f"- {record.name}: {record.incidents}.\n" for record in records if record.incidents]
        text += INCIDENTS_HEAD * bool(incidents) + "".join(incidents)
    for track, note in EMPTY_TRACKS.items():
        if not (records_dir / track).exists():
            text += f"\n## {track}\n\n{note}"
    return text, blocks_of_pages, picture


def list_ladders(records: list[results.Record], refuse: Callable[[str], None] = results.fail
                 ) -> dict[Path, list[results.Record]]:
    """The rungs of each ladder by its folder, in the order of its ladder.toml.

    refuse() gets a line for each rung on another machine or other data than the first.
    """
    by_folder = {record.folder: record for record in records}
    ladders = {}
    for folder in sorted({record.folder.parent for record in records}):
        names = [name for name, rung in results.read_ladder(folder).items() if "change" in rung]
        rungs = [by_folder[folder / name] for name in names if folder / name in by_folder]
        if rungs:
            ladders[folder] = keep_comparable(rungs, "times", refuse)
    return ladders


def format_ladder(folder: Path, rungs: list[results.Record], setting: results.Record) -> str:
    """The table of a ladder, and the notes.md of its folder. setting: the record that sets its target."""
    target = results.find_target(setting.results[0]["track"], [setting])
    summary = results.summarize(list(setting.losses.values()))
    text, notes = f"### {folder.name}\n\n", folder / "notes.md"
    text += notes.read_text() if notes.exists() else ""
    text += LADDER_HEAD.format(target=target, name=setting.name, n=summary.n, sd=summary.sd,
                               num_effects=len(rungs) - 1,
                               machine=results.format_machine(rungs[0].results[0]))
    for record, effect, verdict in zip(rungs, *compare_rungs(rungs)):
        rung = results.read_ladder(folder)[record.folder.name]
        summary = results.summarize(list(record.losses.values()))
        num_reached, _, seconds = find_arrival(record, target)
        cells = (f"[{record.folder.name}]({record.name})", f"`{rung['preset']}`", rung["change"], summary.n,
                 f"{summary.mean:.3f}", f"{summary.sd:.3f}", format_test(record, target, setting),
                 f"{time_runs(record):.0f}",
                 f"{num_reached} of {summary.n} reach it" if math.isnan(seconds) else f"{seconds:.0f}",
                 format_effect(effect) if effect else "", verdict)
        text += f"| {' | '.join(map(str, cells))} |\n"
    return f"{text}\n"


def format_picture(curves: list[plot.Curve]) -> str:
    """The picture, and the record of each of its curves."""
    return PICTURE + "".join(
        f"- {curve.label}: [{curve.record.name}]({curve.record.name}), {len(curve.record.results)} seeds; "
        f"{results.format_machine(curve.record.results[0])}.\n" for curve in curves) + "\n"


def time_runs(record: results.Record) -> float:
    """Training seconds of a record, the median over its runs."""
    return statistics.median(result["train_time_ms"] for result in record.results) / 1000


def choose_curves(records: list[results.Record]) -> list[plot.Curve]:
    """The CURVES whose records exist in a track."""
    by_name = {record.name.partition("/")[2]: record for record in records}
    return [plot.Curve(by_name[name], label, colour, *rest)
            for colour, (name, (label, *rest)) in zip((plot.GREY, plot.BLUE, plot.RED, plot.GREEN),
                                                      CURVES.items()) if name in by_name]


def find_newest(records: list[results.Record], target: float) -> results.Record | None:
    """The newest record whose runs all reach the target, with a mean below it at p < 0.01. The record that
    sets the target makes no claim."""
    setting = results.find_setting(records)
    return next((record for record in reversed(records)
                 if record is not setting and not math.isnan(find_arrival(record, target)[2])
                 and results.summarize(list(record.losses.values()), target).p < 0.01), None)


def format_claim(records: list[results.Record], target: float, prefix: str = "") -> str:
    """The newest record that reaches the target."""
    record = find_newest(records, target)
    if record is None:
        return "No record reaches it yet with p < 0.01.\n"
    summary = results.summarize(list(record.losses.values()), target)
    seconds = find_arrival(record, target)[2]
    p = format_p(summary.p)
    return (f"The newest record, [`{record.folder.name}`]({prefix}{record.name}), reaches it after "
            f"{seconds:.1f} s of training (median) and ends at {summary.mean:.3f} after "
            f"{time_runs(record):.1f} s. It has {summary.n} seeds with a standard deviation of "
            f"{summary.sd:.3f}, p {p if p.startswith('<') else f'= {p}'}. Machine: "
            f"{results.format_machine(record.results[0])}.\n")


def format_target(setting: results.Record, target: float, records: list[results.Record]) -> str:
    """The origin of a track's target, and the record that reaches it."""
    summary = results.summarize(list(setting.losses.values()))
    return TARGET_NOTE.format(target=target, name=setting.name, n=summary.n, sd=summary.sd,
                              machine=results.format_machine(setting.results[0]),
                              claim=format_claim(records, target))


def format_lines(target: float, records: list[results.Record], curves: list[plot.Curve]) -> str:
    """The lines of the main README on records."""
    *numbers, last = [str(curve.published) for curve in curves]
    intro = README_PICTURE.format(last=plot.read_published()[-1].record,
                                  numbers=f"{', '.join(numbers)} and {last}")
    track = records[0].results[0]["track"]
    return (f"{intro}Track `{track}` has a target of {target:g} nats per byte.\n"
            f"{format_claim(records, target, 'records/')}")


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
