"""Measure the effect of mechanisms: a preset without each of them against the whole preset, over seeds.

    python records/ablate.py --preset=laptop --mechanisms=value_embed,softcap --seeds=5
    python records/ablate.py --preset=laptop                # all parts that it has

Prints for each mechanism the change of the final validation loss if it is switched off, paired by seed, with
its 95 % confidence interval. A mechanism whose change is above zero helps. The verdicts are corrected by
Holm's method for the number of mechanisms, the intervals are not. Finished runs are kept in logs/ablate.
"""

import hashlib
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from records.common import Parser, RecordError, at_least, require_packages, run_guarded

with require_packages():
    import scipy.stats  # noqa: F401  # results.compare() imports it after all runs

    import train_gpt as gpt
    from records import results

OWN_OPTIONS = {"preset", "without", "seed", "out", "record"}
BASE = "whole_preset"  # name and folder of its runs


def find_folder(logs_dir: Path, source: bytes, preset: str, extra: list[str], jobs: int) -> Path:
    """The folder for runs of this script, preset, options and machine, with a copy of the script.

    The thread count is the one that the runs get, which depends on jobs.
    """
    machine = gpt.describe_machine(gpt.Runtime())
    machine["hardware"]["threads"] = results.count_threads(jobs) or machine["hardware"]["threads"]
    kind = "\n".join([preset, shlex.join(extra), json.dumps(machine, sort_keys=True)])
    folder = logs_dir.resolve() / hashlib.sha256(source + kind.encode()).hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    gpt.write_atomic(folder / "train_gpt.py", source)
    return folder


def find_parts(cfg: gpt.Config) -> dict[str, gpt.Config]:
    """{name: the config without this part}, for the parts that this config has and can leave out."""
    found = {}
    for name, changes in gpt.list_parts().items():
        changed = gpt.change_options(cfg, changes)
        if changed != cfg and not any(is_wrong for is_wrong, _ in gpt.find_problems(changed)):
            found[name] = changed
    return found


def keep_seeds(record: results.Record, seeds: int) -> results.Record:
    """A record without the seeds that only an earlier call asked for."""
    return record._replace(results=[result for result in record.results if result["seed"] < seeds])


def main() -> None:
    """Run the missing seeds and print the table."""
    parser = Parser(__doc__)
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--mechanisms", default="", help="as a,b (default: all of the preset)")
    parser.add_argument("--seeds", type=at_least(1), default=3)
    parser.add_argument("--jobs", type=at_least(1), default=1,
                        help="parallel runs, which share the processors")
    parser.add_argument("--extra", type=shlex.split, default="",
                        help="further options of train_gpt.py for all runs")
    parser.add_argument("--logs_dir", type=Path, default=results.ROOT / "logs" / "ablate")
    args = parser.parse_args()
    source = (results.ROOT / "train_gpt.py").read_bytes()
    options = gpt.parse_argv([f"--preset={args.preset}", *args.extra])
    for name in OWN_OPTIONS & options.keys() - {"preset"}:
        raise RecordError(f"--extra=--{name} would replace an option of ablate.py: leave it out")
    parts = find_parts(gpt.make_config(options))
    names = args.mechanisms.split(",") if args.mechanisms else sorted(parts)
    for name in set(names) - set(parts):
        raise RecordError(f"--mechanisms={name} is not a part of this recipe: {', '.join(parts)}")
    folder = find_folder(args.logs_dir, source, args.preset, args.extra, args.jobs)
    runs = [(name, seed, [f"--preset={args.preset}", f"--out={folder / name}", *args.extra,
                          *([f"--without={name}"] if name != BASE else [])])
            for seed in range(args.seeds) for name in (BASE, *names)]
    results.run_missing(runs, lambda name: results.find_done(folder / name / "logs"), source, "ablate.py",
                        keep=lambda name, seed: results.remove_models(folder / name, seed), jobs=args.jobs)
    base, *others = (keep_seeds(results.read_record(folder / name / "logs"), args.seeds)
                     for name in (BASE, *names))
    summary = results.summarize(list(base.losses.values()))
    spread = f" +- {summary.sd:.4f}" if summary.n > 1 else ""
    print(f"{args.preset}: loss {summary.mean:.4f}{spread} over {summary.n} seed{'s' * (summary.n > 1)}\n")
    print("| without | loss changes by | 95 % interval | n | Holm's p | it |\n|---|---|---|---|---|---|")
    effects = [results.compare(other, base) for other in others]
    rows = sorted(zip(names, effects, results.holm(effects)), key=lambda row: -row[1].mean)
    for name, effect, p in rows:
        interval, shown = (f"{effect.low:+.4f} to {effect.high:+.4f}", f"{p:.2g}") if p <= 1 else ("", "")
        verdict = results.judge(effect._replace(mean=-effect.mean), p)  # with it, against without it
        print(f"| {name} | {effect.mean:+.4f} | {interval} | {effect.n} | {shown} | {verdict} |")


if __name__ == "__main__":
    sys.exit(run_guarded(main, "interrupted. The same command goes on with the next run"))
