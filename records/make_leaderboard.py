"""Write records/README.md, the picture of the ladder and its lines in the README, from json alone.

    python records/make_leaderboard.py

Nothing in them is typed by hand: add a record and run this again. A test fails where they are out of date.
A run that is not of one kind with the others of its folder is named and left out; the exit status is then 1.
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

Written by `python records/make_leaderboard.py` from the json files in these folders; edits are overwritten.
A folder holds the script that ran, once, and for each run its log and its result; a ladder has a folder for
each of its rungs. To run one again, and compare the losses: `python records/replay.py FOLDER`; or by hand,
into `logs/`: `python records/<track>/<folder>/train_gpt.py <argv of its json> --record=`.
"""
TARGET_NOTE = """The target, {target:g} nats per byte, is the mean loss, to two decimals, of
[{name}]({name}) (n = {n}, standard deviation {sd:.3f}; {machine}).

{claims}
"""
LADDER_NOTE = """### {title}

Every rung is a preset of the ladder's own script: `<date>_<name>` is the published record,
`laptop_<date>_<name>` its change in the laptop's sizes, a minute on two cores.

```
python records/{ladder}/train_gpt.py --list_presets
python records/{ladder}/train_gpt.py --preset=2024-11-10_unet_skips
python records/{ladder}/train_gpt.py --preset=laptop_2024-11-10_unet_skips
python records/replay.py records/{ladder}/unet_skips
python records/run_ladder.py --only=unet_skips --seeds=4
```

The last two run what the rung has again, and give it a fourth seed; on another machine than the rung's both
say so, and run nothing. With `--extra`, for further options, `run_ladder.py` makes a trial in `logs/trials`,
and leaves the ladder as it is. The script reads `data/` and writes `logs/` where it is started; on eight
GPUs `torchrun --standalone --nproc_per_node=8` stands for `python`.
It has a slip: rates fall over 580 and 584 steps in 2024-12-08 and 2024-12-17, where 600 are published
(`--cooldown_frac=0.4054` and `0.4027`).

All rungs train on {tokens:,} tokens of the source of PyTorch; {machine}.
Its own target, {target:g}, is the mean loss, to two decimals, of the first rung after {target_tokens:,}
tokens, which take it {target_minutes:.1f} minutes of training (`laptop_target`, {n} seeds, sd {sd:.3f}).
Loss in nats per byte;
p: one-sided t-test of the mean against that target; "against the rung before": paired by seed, with the 95 %
confidence interval; "to the target": interpolated between validations, the median where all seeds reach it.
What helped a model a hundred times larger on eight hundred times the tokens need not help here: the last
column says what was seen. With few seeds only an effect of several standard deviations can be shown.
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

The newest recipe in miniature, block by block: every rung is a preset of
[its script](laptop/{folder}/train_gpt.py), and has all that the rungs before it have. {machine}; a run of
`{first_name}` takes {first:.0f} s of training, one of `{last_name}` {last:.0f} s. Paired by seed, that ends
{effect} lower, n = {n}: with {num_lower} seeds of {n} it is lower, p = {signed_rank:.4f} by Wilcoxon's
signed-rank test (by the t-test, which expects no outliers, {p}); standard deviation of its loss {sd:.3f}. It
reaches the mean loss of `{first_name}` after {crossing:.0f} s (median). p: one-sided t-test of the mean
against the track's target. "Here" is judged against the rung before.

```
python records/run_ladder.py --ladder=records/laptop/{folder}
```

![the newest recipe, block by block](frontier.svg)

| rung | preset | what it adds | n | loss | sd | p | training s | s to the target \
| against the rung before | here |
|---|---|---|---|---|---|---|---|---|---|---|
"""
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
    """(records/README.md, the lines for the README, and of the ladder with a picture its rungs, the record
    that sets its target, and the target); refuse gets a line for each run that is left out."""
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
            picture = rungs, setting, _ = found, ladder_setting, ladder_target
            text += format_ladder(*picture)
            lines = format_lines(*picture, target, records)
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


def format_ladder(rungs: list[Rung], setting: results.Record, target: float) -> str:
    """The note, the picture and the table of the ladder."""
    tokens = [record.results[0]["config"]["derived"]["train_tokens"]
              for record in (rungs[-1].record, setting)]
    summary = results.summarize(list(setting.losses.values()))
    note = LADDER_NOTE.format(tokens=tokens[0], target=target, target_tokens=tokens[1], n=summary.n,
                              sd=summary.sd, target_minutes=time_runs(setting) / 60,
                              machine=format_machine(setting.results[0]),
                              title=setting.folder.parent.name, ladder=setting.name.removesuffix("/target"))
    return f"{note}\n![the ladder](ladder.svg)\n{LADDER_HEAD}{''.join(map(format_rung, rungs))}\n"


def time_runs(record: results.Record) -> float:
    """Training seconds of a record, the median over its runs."""
    return statistics.median(result["train_time_ms"] for result in record.results) / 1000


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
                     f"{time_runs(record):.0f} s: n = {summary.n}, standard deviation {summary.sd:.3f}, "
                     f"p {p if p.startswith('<') else f'= {p}'}; "
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
    counts = [judge(rung.effect) for rung in rungs]
    return (f"{MARKS[0]}\n![The ladder of records, run again on two CPU cores](records/ladder.svg)\n\n"
            f"The target of track `{setting.results[0]['track']}` is {target:g}.\n\n"
            f"{format_claims(records, target, 'records/')}\n"
            f"The first rung of the ladder (AdamW with rotary) takes {time_runs(setting):.0f} s to "
            f"{ladder_target:g}.\nAt equal tokens its loss is {rungs[0].summary.mean:.2f}, that of the last "
            f"rung {rungs[-1].summary.mean:.2f}.\nAgainst the rung before it, {counts.count('helps')} rungs "
            f"help at this scale, {counts.count('hurts')} hurt, of {counts.count('no effect shown')} no "
            f"effect is shown: [records/README.md](records/README.md).\n{MARKS[1]}")


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
