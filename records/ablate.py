"""What is a mechanism worth? A preset without it, over seeds, against the preset as it is.

    python records/ablate.py --preset=laptop --mechanisms=value_embeds,softcap --seeds=5
    python records/ablate.py --preset=laptop                # all that it has (train_gpt.py --list_presets)

Prints, for every mechanism, the change of the final validation loss when it is switched off, paired by seed,
with its 95 % confidence interval: above zero, the mechanism helps. Runs are kept in logs/ablate and not run
again.
"""

import hashlib
import json
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import results

import train_gpt as gpt

OWN_OPTIONS = {"preset", "without", "only_with", "seed", "logs_dir", "record", "records_dir"}


def read_losses(folder: Path) -> dict[int, float]:
    """Final validation loss by seed."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {result["seed"]: result["final_val_loss"] for result in found}


def list_mechanisms(preset: str) -> list[str]:
    """The mechanisms of a preset: those without which it is another."""
    try:
        gpt.make_config(dict(preset=preset))
    except gpt.InputError as error:
        raise results.RecordError(str(error)) from None
    found = []
    for name in gpt.MECHANISMS:
        with suppress(gpt.InputError):  # which a preset raises that does not have it
            gpt.make_config(dict(preset=preset, without=name))
            found.append(name)
    return found


def judge(effect: results.Effect) -> str:
    if effect.n == 1:
        return "one seed: no test possible"
    return "helps" if effect.low > 0 else "hurts" if effect.high < 0 else "no effect shown"


def main() -> None:
    """Run what is missing, print the table."""
    parser = results.Parser(__doc__)
    parser.add_argument("--preset", default="laptop")
    parser.add_argument("--mechanisms", default="", help="as a,b (default: all of the preset)")
    parser.add_argument("--seeds", type=results.at_least(1), default=3)
    parser.add_argument("--jobs", type=results.at_least(1), default=1,
                        help="runs at a time, which share the processors")
    parser.add_argument("--extra", type=shlex.split, default="",
                        help="further options of train_gpt.py for all runs")
    parser.add_argument("--logs_dir", type=Path, default=results.ROOT / "logs" / "ablate")
    args = parser.parse_args()
    source = (results.ROOT / "train_gpt.py").read_bytes()
    names = args.mechanisms.split(",") if args.mechanisms else list_mechanisms(args.preset)
    for name in set(names) - set(gpt.MECHANISMS):
        raise results.RecordError(f"--mechanisms={name} is not a mechanism: "
                                  f"{gpt.suggest(name, gpt.MECHANISMS)} (train_gpt.py --list_presets)")
    for word in args.extra:  # of these each run has its own, and the last one of a command line counts
        if (name := word.partition("=")[0].lstrip("-").replace("-", "_")) in OWN_OPTIONS:
            raise results.RecordError(f"--extra={word} would replace what a run here is told: leave it out"
                                      + ", and name mechanisms with --mechanisms" * (name == "without"))
    # runs of another script, options or machine, whose PyTorch is also the text, have a folder of their own
    machine = json.dumps(gpt.describe_machine(gpt.Runtime()), sort_keys=True)
    kind = "\n".join([args.preset, shlex.join(args.extra), machine]).encode()
    kind = hashlib.sha256(source + kind).hexdigest()[:12]
    folders = {name: args.logs_dir.resolve() / kind / name for name in ("nothing", *names)}
    options = {name: [f"--preset={args.preset}", f"--logs_dir={folder}", *args.extra,
                      *([f"--without={name}"] if name in names else [])] for name, folder in folders.items()}
    results.run_missing([(name, seed, options[name]) for seed in range(args.seeds) for name in folders],
                        lambda name: set(read_losses(folders[name])), source, "ablate.py",
                        jobs=args.jobs)
    losses = {name: read_losses(folder) for name, folder in folders.items()}
    base = results.summarize(list(losses["nothing"].values()))
    spread = f" +- {base.sd:.4f}" if base.n > 1 else ""
    print(f"{args.preset}: loss {base.mean:.4f}{spread} over {base.n} seed{'s' * (base.n > 1)}\n")
    print("| without | loss changes by | 95 % interval | n | p | it |\n|---|---|---|---|---|---|")
    effects = {name: results.compare(losses[name], losses["nothing"]) for name in names}
    for name, effect in sorted(effects.items(), key=lambda item: -item[1].mean):
        interval, p = ((f"{effect.low:+.4f} to {effect.high:+.4f}", f"{effect.p:.2g}") if effect.n > 1
                       else ("", ""))
        print(f"| {name} | {effect.mean:+.4f} | {interval} | {effect.n} | {p} | {judge(effect)} |")


if __name__ == "__main__":
    sys.exit(results.run_guarded(main))
