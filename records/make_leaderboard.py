"""Write records/README.md, the picture of the ladder and its lines in the README, from json alone.

    python records/make_leaderboard.py

Nothing in them is typed by hand: add a record and run this again. A test fails where they are out of date.
"""

import math
import statistics
from pathlib import Path
from typing import NamedTuple

import plot
import results

import train_gpt as gpt

HEAD = """# Records

Written by `python records/make_leaderboard.py` from the json files in these folders; edits are overwritten.
Every folder holds the script that ran, and for each run its log and its result. To run one again:
`cp records/<track>/<folder>/train_gpt.py . && ./run.sh <argv of its json>`, or
`python records/replay.py FOLDER`.
"""
LADDER_NOTE = """Every rung is a preset, `laptop_<date>_<name>`: the published change in the laptop's sizes.
All rungs train on {tokens:,} tokens of the source of PyTorch; {machine}.
The target, {target:g}, is the mean loss, to two decimals, of the first rung after {target_tokens:,}
tokens, which take it {target_minutes:.1f} minutes of training (`laptop_target`, {n} seeds, sd {sd:.3f}).
Loss in nats per byte;
p: one-sided t-test of the mean against the target; "against the rung before": paired by seed, with the 95 %
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
| folder | preset | n | loss | sd | p | training time |
|---|---|---|---|---|---|---|
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


def read_rungs(records: list[results.Record], target: float) -> list[Rung]:
    """The rungs among a track's records, in the order of the ladder."""
    rungs, before = [], None
    for name, rung in gpt.LADDER.items():
        record = results.find_rung(f"laptop_{name}", records)
        if record is None:
            continue
        machine = results.describe_machine(record.results[0])
        if before and machine != results.describe_machine(before.results[0]):
            raise results.RecordError(f"{record.folder} ran on another machine than {before.folder}: "
                                      "run the whole ladder on one")
        crossings = [results.find_crossing(result, target) for result in record.results]
        reached = [crossing for crossing in crossings if crossing]
        steps, seconds = (statistics.median(values) for values in zip(*reached)) if (
            len(reached) == len(crossings)) else (math.nan, math.nan)
        rungs.append(Rung(
            name, rung.change, rung.minutes, record, results.summarize(list(record.losses.values()), target),
            before and results.compare(record.losses, before.losses), len(reached), steps, seconds))
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
        f"[{rung.name}]({rung.record.folder.relative_to(rung.record.folder.parents[1])})", rung.change,
        f"{rung.minutes:g}", rung.summary.n, f"{rung.summary.mean:.3f}", f"{rung.summary.sd:.3f}",
        format_p(rung.summary.p),
        format_effect(effect) if effect else "",
        f"{rung.num_reached} of {rung.summary.n} reach it" if misses else f"{rung.steps:.0f}",
        "" if misses else f"{rung.seconds:.1f}", judge(effect))
    return f"| {' | '.join(map(str, cells))} |\n"


def format_other(record: results.Record, target: float | None) -> str:
    """A row of a record that is no rung."""
    summary = results.summarize(list(record.losses.values()), target)
    seconds = statistics.mean(result["train_time_ms"] / 1000 for result in record.results)
    sd = "" if math.isnan(summary.sd) else f"{summary.sd:.3f}"
    return (f"| [{record.folder.name}]({record.folder.parent.name}/{record.folder.name}) "
            f"| {record.results[0]['preset']} | {summary.n} | {summary.mean:.3f} | {sd} "
            f"| {format_p(summary.p)} | {seconds:.1f} s |\n")


def format_machine(result: dict) -> str:
    """Where a record ran."""
    facts = results.describe_machine(result)
    return f"{facts['threads']} threads of {facts['cpu']}, PyTorch {facts['torch']}"


def make_readme(records_dir: Path) -> tuple[str, str, list[Rung], results.Record | None, float | None]:
    """(records/README.md, the lines for the README, and what the picture of the ladder needs)."""
    text, lines, rungs, setting, ladder_target = HEAD, "", [], None, None
    for track in sorted(path.name for path in records_dir.iterdir() if list(path.glob("*/train_gpt.py"))):
        records = results.read_track(track, records_dir)
        target = results.find_target(track, records)
        found = read_rungs(records, target) if target is not None else []
        text += f"\n## {track}\n\n"
        if found:
            rungs, ladder_target = found, target
            setting = results.find_rung(results.TARGET_PRESET, records)
            text += format_ladder(rungs, setting, target)
            lines = format_lines(rungs, setting, target)
        others = [r for r in records if r not in [rung.record for rung in rungs]]
        text += "### Other records\n" if found else ""
        text += OTHERS_HEAD + "".join(format_other(record, target) for record in others)
    return text, lines, rungs, setting, ladder_target


def format_ladder(rungs: list[Rung], setting: results.Record, target: float) -> str:
    """The note, the picture and the table of the ladder."""
    tokens = [record.results[0]["config"]["derived"]["train_tokens"]
              for record in (rungs[-1].record, setting)]
    summary = results.summarize(list(setting.losses.values()))
    minutes = statistics.median(result["train_time_ms"] for result in setting.results) / 60_000
    note = LADDER_NOTE.format(tokens=tokens[0], target=target, target_tokens=tokens[1], n=summary.n,
                              sd=summary.sd, target_minutes=minutes,
                              machine=format_machine(setting.results[0]))
    return f"{note}\n![the ladder](ladder.svg)\n{LADDER_HEAD}{''.join(map(format_rung, rungs))}\n"


def format_lines(rungs: list[Rung], setting: results.Record, target: float) -> str:
    """What the README says of the ladder."""
    seconds = statistics.median(result["train_time_ms"] / 1000 for result in setting.results)
    last, counts = rungs[-1], [judge(rung.effect) for rung in rungs]
    fastest = min((rung for rung in rungs if not math.isnan(rung.seconds)), key=lambda rung: rung.seconds,
                  default=None)
    reached = (f"the last rung reaches it in {last.seconds:.0f} s (n = {last.summary.n})"
               if not math.isnan(last.seconds) else
               f"{last.num_reached} of {last.summary.n} runs of the last rung reach it")
    fast = f"; the fastest is `{fastest.name}` with {fastest.seconds:.0f} s" if fastest else ""
    return (f"{MARKS[0]}\n![The ladder of records, run again on two CPU cores](records/ladder.svg)\n\n"
            f"On two CPU cores the first rung (AdamW with rotary) takes {seconds:.0f} s to {target:g}; "
            f"{reached}{fast}.\n"
            f"Against the rung before it, {counts.count('helps')} rungs help at this scale, "
            f"{counts.count('hurts')} hurt, of {counts.count('no effect shown')} no effect is shown: "
            f"[records/README.md](records/README.md).\n{MARKS[1]}")


def replace_marked(readme: str, lines: str) -> str:
    """The README with the lines between its marks."""
    before, rest = readme.split(MARKS[0])
    return before + lines + rest.split(MARKS[1])[1]


def main() -> None:
    """Write all of it."""
    parser = results.make_parser(__doc__)
    parser.add_argument("--records_dir", type=Path, default=results.RECORDS)
    parser.add_argument("--readme", type=Path, default=results.ROOT / "README.md")
    args = parser.parse_args()
    text, lines, rungs, setting, target = make_readme(args.records_dir)
    (args.records_dir / "README.md").write_text(text)
    if rungs:
        plot.plot_ladder(rungs, setting, target, args.records_dir / "ladder")
        args.readme.write_text(replace_marked(args.readme.read_text(), lines))


if __name__ == "__main__":
    results.run_guarded(main)
