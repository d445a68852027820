"""Write records/README.md, its pictures and their lines in the README, from the json files of the runs.

    python records/make_leaderboard.py

The published minutes are in published.csv. No result is typed by hand: add a record and run this again. A
test fails where they are out of date. A run that is not of one kind with the others of its folder is named
and left out; the exit status is then 1.
"""

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import plot
import results
from scipy import stats

HEAD = """# Records

`python records/make_leaderboard.py` writes this page from the json files in these folders, over any edits.
A folder holds the script that ran, and the log and the result of each run. A ladder has a folder for each of
its rungs. `python records/replay.py FOLDER` runs a record again and compares the losses. By hand, and into
`logs/`, the same is `python records/<track>/<folder>/train_gpt.py <argv of its json> --record=`.
"""
TARGET_NOTE = """The target is {target:g} nats per byte. That is the mean loss, to two decimals, of
[{name}]({name}) over {n} seeds, whose standard deviation is {sd:.3f}. Machine: {machine}.

{claims}
"""
LADDER_NOTE = """### {title}

Every rung is a preset of the ladder's own script. `<date>_<name>` is the published record;
`laptop_<date>_<name>` is its change in the laptop's sizes, and takes a minute on two cores.

```
python records/{ladder}/train_gpt.py --list_presets
python records/{ladder}/train_gpt.py --preset=2024-11-10_unet_skips
python records/{ladder}/train_gpt.py --preset=laptop_2024-11-10_unet_skips
python records/replay.py records/{ladder}/unet_skips
python records/run_ladder.py --only=unet_skips --seeds=4
```

The fourth line runs a rung's record again, and the fifth gives the rung a fourth seed. On another machine
than the rung's, both say so and run nothing. With `--extra`, which adds options, `run_ladder.py` makes a
trial in `logs/trials` and leaves the ladder as it is. The script reads `data/` and writes `logs/` where it
is started. On eight GPUs write `torchrun --standalone --nproc_per_node=8` in place of `python`.

The script has a slip: in 2024-12-08 and 2024-12-17 rates fall over 580 and 584 steps, where 600 are
published. `--cooldown_frac=0.4054` and `0.4027` put that right.

All rungs train on {tokens:,} tokens of the source of PyTorch. Machine: {machine}.
The ladder has its own target, {target:g}: the mean loss, to two decimals, of the first rung after
{target_tokens:,} tokens. These take {target_minutes:.1f} minutes of training. The target is the preset
`laptop_target`, run with {n} seeds, whose standard deviation is {sd:.3f}.

- Losses are in nats per byte.
- p is a one-sided t-test of the mean against the ladder's target.
- "Against the rung before" is paired by seed, and has a 95 % confidence interval.
- "To target" is interpolated between validations; it is the median, where all seeds reach the target.
- "Here" says what was seen on this small model. What helped a model a hundred times larger, on eight hundred
  times the tokens, need not help it. Few seeds can only show an effect of several standard deviations.
"""
LADDER_HEAD = """
| rung | published change | min on 8xH100 | n | loss | sd | p | against the rung before \
| steps to target | s to target | here |
|---|---|---|---|---|---|---|---|---|---|---|
"""
OTHERS_HEAD = """
| folder | preset | n | loss | sd | p | s to target | training time |
|---|---|---|---|---|---|---|---|
"""
BLOCKS_HEAD = """### {title}

This is the newest recipe in miniature, block by block. Every rung is a preset of
[its script](laptop/{folder}/train_gpt.py), and has all that the rungs before it have. Machine: {machine}.

A run of `{first_name}` takes {first:.0f} s of training, one of `{last_name}` {last:.0f} s.
Paired by seed, the latter ends {effect} lower. It is lower for {num_lower} seeds of {n}:
p = {signed_rank:.4f} by Wilcoxon's signed-rank test, and {p} by the t-test, which expects no outliers.
The standard deviation of its loss is {sd:.3f}.
It reaches the mean loss of `{first_name}` after {crossing:.0f} s (median).

In the table, p is a one-sided t-test of the mean against the track's target. "Here" is judged against the
rung before.

```
python records/run_ladder.py --ladder=records/laptop/{folder}
```

![the newest recipe, block by block](frontier.svg)

| rung | preset | what it adds | n | loss | sd | p | training s | s to the target \
| against the rung before | here |
|---|---|---|---|---|---|---|---|---|---|---|
"""
README_PICTURE = """\
![Left: published minutes to 3.28, by day. Right: validation loss against seconds, of recipes in miniature](\
records/ladder.svg)

Left: the benchmark's published records on 8xH100. This file holds the two marked in colour; it has not been
timed on 8xH100. Right: recipes in miniature, the median of the seeds in a band of all of them. Solid lines
ran on two cores with bfloat16. The dashed one ran on two without, which are
[slower](benchmarks/RESULTS.md#on-any-processor-before-and-after).
"""
LADDER_PICTURE = """
![Left: published minutes to 3.28, by day. Right: validation loss against seconds, of recipes in miniature](\
ladder.svg)

Left: the [published](published.csv) records of the short track whose day is known, in minutes on 8xH100.
Right: the median of the seeds of a record, in a band that holds all of them. A dashed line ran on another
machine than the first one, so their seconds are not comparable. Of frontier's four blocks three are drawn,
`constants` to `tables`; of the fourth no effect is shown at this size.

"""
CURVES = {  # of the picture: label, its place in seconds and loss; number and words of what is published
    "2026-11-21_ladder/target": ("AdamW of 2024", (117, 1.84), 2, "AdamW of 2024:\n{:.2g} min"),
    "2026-11-22_frontier/record_32": ("record 32", (97, 1.18), 32, "record 32: {:.2g} min\nhere: track_1"),
    "2026-11-22_frontier/tables": ("with frontier's blocks", (91, 0.885), 89,
                                   "the newest: {:.2g} min\nhere: frontier"),
    "2026-11-22_narrow": ("laptop now, slower cores", (99, 0.957)),
}
MARKS = "<!-- ladder: written by records/make_leaderboard.py -->", "<!-- end of ladder -->"


class Rung(NamedTuple):
    """A rung of the laptop ladder as it was run."""

    name: str
    change: str
    minutes: float  # published
    record: results.Record
    summary: results.Summary
    effect: results.Effect | None  # against the rung before
    num_reached: int  # runs that reached the target
    steps: float  # to the target, median; nan where not all reached it
    seconds: float


def find_arrival(record: results.Record, target: float | None) -> tuple[int, float, float]:
    """(runs that reach the target, median step and seconds at which; nan where not all do)."""
    if target is None:
        return 0, math.nan, math.nan
    crossings = [results.find_crossing(result, target) for result in record.results]
    reached = [crossing for crossing in crossings if crossing]
    if len(reached) < len(crossings):
        return len(reached), math.nan, math.nan
    steps, seconds = map(statistics.median, zip(*reached))
    return len(reached), steps, seconds


def read_rungs(records: list[results.Record], ladder: Path, target: float,
               refuse: Callable[[str], None] = results.fail) -> list[Rung]:
    """The rungs of a ladder among a track's records, in the order of the ladder's own script; refuse gets a
    line for each that ran on another machine than the first."""
    by_folder, rungs, before = {record.folder: record for record in records}, [], None
    for name, rung in results.load_script(ladder).LADDER.items():
        record = by_folder.get(ladder / name[11:])  # without its date
        if record is None:
            continue
        machine = results.describe_machine(record.results[0])
        if before and machine != results.describe_machine(before.results[0]):
            refuse(f"{record.folder} ran on another machine than {before.folder}: run the whole ladder on "
                   "one")
            continue
        rungs.append(Rung(
            name, rung.change, rung.minutes, record, results.summarize(list(record.losses.values()), target),
            before and results.compare(record.losses, before.losses), *find_arrival(record, target)))
        before = record
    return rungs


def judge(effect: results.Effect | None) -> str:
    """What a rung did here, in words."""
    if effect is None:
        return "the start"
    if effect.high < 0:
        return "helps"
    return "hurts" if effect.low > 0 else "no effect shown"


def format_p(p: float) -> str:
    """A p-value for people."""
    return "" if math.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.4f}" if p < 0.1 else f"{p:.2f}"


def format_effect(effect: results.Effect) -> str:
    """A difference and, of several seeds, its interval."""
    interval = "" if math.isnan(effect.low) else f" [{effect.low:+.3f}, {effect.high:+.3f}]"
    return f"{effect.mean:+.3f}{interval}"


def format_rung(rung: Rung) -> str:
    """A row of the ladder's table."""
    effect, misses = rung.effect, math.isnan(rung.steps)
    cells = (
        f"[{rung.name}]({rung.record.name})", rung.change,
        f"{rung.minutes:g}", rung.summary.n, f"{rung.summary.mean:.3f}", f"{rung.summary.sd:.3f}",
        format_p(rung.summary.p),
        format_effect(effect) if effect else "",
        f"{rung.num_reached} of {rung.summary.n} reach it" if misses else f"{rung.steps:.0f}",
        "" if misses else f"{rung.seconds:.1f}", judge(effect))
    return f"| {' | '.join(map(str, cells))} |\n"


def format_other(record: results.Record, target: float | None) -> str:
    """A row of a record that is no rung."""
    summary = results.summarize(list(record.losses.values()), target)
    sd = "" if math.isnan(summary.sd) else f"{summary.sd:.3f}"
    arrival = math.nan if target is None else find_arrival(record, target)[2]
    return (f"| [{record.name}]({record.name}) | {record.results[0]['preset']} | {summary.n} "
            f"| {summary.mean:.3f} | {sd} | {format_p(summary.p)} "
            f"| {'' if math.isnan(arrival) else f'{arrival:.1f}'} | {time_runs(record):.1f} s |\n")


def format_machine(result: dict) -> str:
    """Where a record ran."""
    facts = results.describe_machine(result)
    known = [facts["cpu"], *(facts[key] for key in ("simd", "activations") if facts[key])]
    return f"{facts['threads']} threads of {', '.join(known)}, PyTorch {facts['torch']}"


def make_readme(records_dir: Path, refuse: Callable[[str], None] = results.fail) -> tuple[str, str, tuple]:
    """(records/README.md, the lines for the README, and for the picture of a ladder its curves and the
    track's target); refuse gets a line for each run that is left out."""
    text, lines, picture = HEAD, "", ()
    for track in sorted(path.name for path in records_dir.iterdir() if list(path.glob("*/train_gpt.py"))):
        records = results.read_track(track, records_dir, refuse)
        target = results.find_target(track, records)
        ladder_setting = next((r for r in reversed(records) if r.folder.name == "target"), None)
        ladder_target = ladder_setting and results.find_target(track, [ladder_setting])
        found = []
        if ladder_setting:
            found = read_rungs(records, ladder_setting.folder.parent, ladder_target, refuse)
        text += f"\n## {track}\n\n"
        track_setting = results.find_setting(records)
        if track_setting and track not in results.PUBLISHED_TARGETS:
            text += format_target(track_setting, target, records)
        if found:
            picture = choose_curves(records), target
            text += format_ladder(found, ladder_setting, ladder_target, picture[0])
            lines = format_lines(found, ladder_setting, ladder_target, target, records)
        blocks = read_blocks(records)
        if blocks:
            text += format_blocks(*blocks, target)
        shown = [rung.record for rung in found] + list(blocks[1].values() if blocks else ())
        others = [r for r in records if r not in shown]
        text += "### Other records\n" if found else ""
        text += OTHERS_HEAD + "".join(format_other(record, target) for record in others)
    return text, lines, picture


def read_blocks(records: list[results.Record]) -> tuple[Path, dict[str, results.Record]] | None:
    """The newest ladder with a ladder.toml: (its folder, records by rung in its order)."""
    by_folder = {record.folder: record for record in records}
    for folder in sorted({record.folder.parent for record in records}, reverse=True):
        rungs = {name: by_folder[folder / name] for name in results.read_ladder(folder)
                 if folder / name in by_folder}
        if len(rungs) > 1:
            return folder, rungs
    return None


def format_blocks(folder: Path, blocks: dict[str, results.Record], target: float | None) -> str:
    """The note and the table of a ladder with a ladder.toml, and what ablate.py has left there."""
    rungs, text, before, ablation = results.read_ladder(folder), "", None, folder / "ablation.md"
    first_name, first = next(iter(blocks.items()))
    last_name, last = [(name, record) for name, record in blocks.items()
                       if rungs[name].get("has_more_seeds")][-1]
    for name, record in blocks.items():
        summary = results.summarize(list(record.losses.values()), target)
        effect = before and results.compare(record.losses, before.losses)
        num_reached, _, seconds = find_arrival(record, target)
        cells = (f"[{name}]({record.name})", f"`{rungs[name]['preset']}`", rungs[name]["change"], summary.n,
                 f"{summary.mean:.3f}", f"{summary.sd:.3f}", format_p(summary.p), f"{time_runs(record):.0f}",
                 f"{num_reached} of {summary.n} reach it" if math.isnan(seconds) else f"{seconds:.0f}",
                 format_effect(effect) if effect else "", judge(effect))
        text += f"| {' | '.join(map(str, cells))} |\n"
        before = record
    goal = statistics.mean(first.losses.values())
    crossings = [results.find_crossing(result, goal) for result in last.results]
    effect = results.compare(first.losses, last.losses)
    gains = [first.losses[seed] - last.losses[seed] for seed in sorted(first.losses.keys() & last.losses)]
    return BLOCKS_HEAD.format(
        title=folder.name, folder=folder.name, machine=format_machine(first.results[0]),
        first_name=first_name, first=time_runs(first), last=time_runs(last),
        last_name=last_name, effect=format_effect(effect).replace("+", ""),
        n=effect.n, p=format_p(effect.p), num_lower=sum(gain > 0 for gain in gains),
        signed_rank=stats.wilcoxon(gains).pvalue, sd=results.summarize(list(last.losses.values())).sd,
        crossing=statistics.median(crossing[1] if crossing else math.inf for crossing in crossings)
    ) + text + (f"\n{ablation.read_text()}" if ablation.exists() else "") + "\n"


def format_ladder(rungs: list[Rung], setting: results.Record, target: float, curves: list[plot.Curve]
                  ) -> str:
    """The note, the picture and the table of the ladder."""
    picture = LADDER_PICTURE + "".join(
        f"- {curve.label}: [{curve.record.name}]({curve.record.name}), {len(curve.record.results)} seeds; "
        f"{format_machine(curve.record.results[0])}.\n" for curve in curves)
    tokens = [record.results[0]["config"]["derived"]["train_tokens"]
              for record in (rungs[-1].record, setting)]
    summary = results.summarize(list(setting.losses.values()))
    note = LADDER_NOTE.format(tokens=tokens[0], target=target, target_tokens=tokens[1], n=summary.n,
                              sd=summary.sd, target_minutes=time_runs(setting) / 60,
                              machine=format_machine(setting.results[0]),
                              title=setting.folder.parent.name, ladder=setting.name.removesuffix("/target"))
    return f"{note}{picture}{LADDER_HEAD}{''.join(map(format_rung, rungs))}\n"


def time_runs(record: results.Record) -> float:
    """Training seconds of a record, the median over its runs."""
    return statistics.median(result["train_time_ms"] for result in record.results) / 1000


def choose_curves(records: list[results.Record]) -> list[plot.Curve]:
    """Those of CURVES that are among a track's records."""
    by_name = {record.name.partition("/")[2]: record for record in records}
    return [plot.Curve(by_name[name], label, colour, *rest)
            for colour, (name, (label, *rest)) in zip((plot.GREY, plot.BLUE, plot.RED, plot.GREEN),
                                                      CURVES.items()) if name in by_name]


def find_fastest(records: list[results.Record], target: float) -> list[results.Record]:
    """For each kind of machine the record whose runs all reach the target first, with a mean below it at
    p < 0.01; seconds of different machines are not compared."""
    fastest: dict[tuple, tuple[float, results.Record]] = {}
    for record in records:
        seconds = find_arrival(record, target)[2]
        if not math.isnan(seconds) and results.summarize(list(record.losses.values()), target).p < 0.01:
            machine = tuple(results.describe_machine(record.results[0]).values())
            fastest[machine] = min(fastest.get(machine, (math.inf, record)), (seconds, record),
                                   key=lambda pair: pair[0])
    return [record for _, record in fastest.values()]


def format_claims(records: list[results.Record], target: float, prefix: str = "") -> str:
    """What reaches the target first, a line for each kind of machine."""
    lines = []
    for record in find_fastest(records, target):
        summary = results.summarize(list(record.losses.values()), target)
        p, seconds = format_p(summary.p), find_arrival(record, target)[2]
        lines.append(f"- [`{record.folder.name}`]({prefix}{record.name}) reaches it after "
                     f"{seconds:.0f} s of training (median) and ends at {summary.mean:.3f} after "
                     f"{time_runs(record):.0f} s. It has {summary.n} seeds with a standard deviation of "
                     f"{summary.sd:.3f}, p {p if p.startswith('<') else f'= {p}'}. Machine: "
                     f"{format_machine(record.results[0])}.\n")
    return "".join(lines) or "No record reaches it yet with p < 0.01.\n"


def format_target(setting: results.Record, target: float, records: list[results.Record]) -> str:
    """How a track's target came about, and what reaches it."""
    summary = results.summarize(list(setting.losses.values()))
    return TARGET_NOTE.format(target=target, name=setting.name, n=summary.n, sd=summary.sd,
                              machine=format_machine(setting.results[0]),
                              claims=format_claims(records, target))


def format_lines(rungs: list[Rung], setting: results.Record, ladder_target: float, target: float,
                 records: list[results.Record]) -> str:
    """What the README says of the ladder."""
    ladder_tokens, target_tokens = (record.results[0]["config"]["derived"]["train_tokens"]
                                    for record in (rungs[-1].record, setting))
    ratio = target_tokens / ladder_tokens
    helps, hurts, others = map([judge(rung.effect) for rung in rungs].count,
                               ("helps", "hurts", "no effect shown"))
    return (f"{MARKS[0]}\n{README_PICTURE}\n"
            f"Track `{setting.results[0]['track']}` asks for a loss of {target:g} nats per byte.\n\n"
            f"{format_claims(records, target, 'records/')}\n"
            f"The recipe of the ladder's first rung, AdamW with rotary positions, takes "
            f"{time_runs(setting):.0f} s to {ladder_target:g},\nwith {ratio:.0f} times the tokens of the "
            f"rungs. At equal tokens its loss is {rungs[0].summary.mean:.2f}, and that of "
            f"the last rung is {rungs[-1].summary.mean:.2f}.\nOf the rungs after it {helps} help at this "
            f"scale and {hurts} {'hurts' if hurts == 1 else 'hurt'}, each against the one before. Of the "
            f"other {others} no effect is shown\n([records/README.md](records/README.md)).\n{MARKS[1]}")


def replace_marked(readme: str, lines: str) -> str:
    """The README with the lines between its marks."""
    before, rest = readme.split(MARKS[0])
    return before + lines + rest.split(MARKS[1])[1]


def main() -> int:
    """Write all of it."""
    parser = results.Parser(__doc__)
    parser.add_argument("--records_dir", type=Path, default=results.RECORDS)
    parser.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    args, refused = parser.parse_args(), []
    if not args.readme.exists() or any(args.readme.read_text().count(mark) != 1 for mark in MARKS):
        raise results.RecordError(f"--readme={args.readme} has no place for the lines: put a line "
                                  f"{MARKS[0]} and a line {MARKS[1]} into it")
    text, lines, picture = make_readme(args.records_dir, refused.append)
    for line in refused:
        results.leave_out(line)
    results.write_file(args.records_dir / "README.md", text.encode())
    if picture:
        plot.plot_ladder(*picture, args.records_dir / "ladder")
        results.write_file(args.readme, replace_marked(args.readme.read_text(), lines).encode())
    blocks = read_blocks(results.read_track("*", args.records_dir, lambda line: None))
    if blocks:
        plot.plot_times(blocks[1], args.records_dir / "frontier")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(results.run_guarded(main))
