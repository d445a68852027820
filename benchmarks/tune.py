#!/usr/bin/env python3
"""Find the options that make a step faster on this machine, at equal mathematics.

    ./run.sh benchmarks/tune.py                        # less than 8 minutes, on GPUs with preset record_32
    ./run.sh benchmarks/tune.py --preset=laptop --seconds=300 --json=tune.json
    ./run.sh benchmarks/tune.py --alternative='NPROC=2 OMP_NUM_THREADS=1' --alternative=--compile=on

Takes the options of train_gpt.py. These and the environment are the plain config. An alternative changes
options, or variables of the environment that ./run.sh reads. Each config runs in a separate process. It
trains 20 steps through all stages. Then it and the plain config train in turn, each for about a second. An
alternative is refused if its validation loss after the 20 steps differs by more than rounding. It is faster
if the upper quartile of its ratios of time per token is below 0.98. Winners that set different options are
timed once more in combination. FP8 and --dtype change the numerics. They are listed separately and never
recommended.
"""

import ctypes
import dataclasses
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.common import (
    Parser,
    Progress,
    at_least,
    keep_saying,
    output_file,
    require_packages,
    run_guarded,
    warn,
)

with require_packages():
    import torch

    import train_gpt as gpt
    from benchmarks import common, step

NUM_STEPS = 20  # length of the shortened schedule
TURN_SECONDS = 1.0  # about the length of a turn
GRACE_SECONDS = 60.0  # limit for a turn that began before the time was up
FASTER, SLOWER = 0.98, 1.02  # ratios to plain
TOLERANCE = {"float32": 2e-3, "bfloat16": 4e-3}  # relative, of the loss, see RESULTS.md
OTHER_NUMERICS = {"--dtype", "--fp8", "--fp8_parts"}
Words = tuple[str, ...]  # an alternative: NAME=value for the environment, --option=value


class Failed(Exception):
    """A worker gave no answer, for the reason in the text."""

    verdict = "failed"


class Late(Failed):
    """A worker gave no answer before the time was up."""

    verdict = "no verdict"


def parse_words(text: str) -> Words:
    words = tuple(re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word)
                  for word in shlex.split(text))
    for word in words:
        if not re.match(r"([A-Z_]+|--\w+)=", word):
            raise ArgumentTypeError(f"{word} is neither NAME=value nor --option=value")
    return words


def names(words: Words) -> set[str]:
    return {word.partition("=")[0] for word in words}


UNTIMED = {Late.verdict, "not tried"}  # the time was up


class Worker:
    """A config in a separate process, or in the ranks of a torchrun, that takes turns on request."""

    def __init__(self, options: list[str], words: Words, env: dict[str, str]):
        env = env | dict(word.split("=", 1) for word in words if not word.startswith("--"))
        launcher = [] if env["NPROC"] == "1" else [
            "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
            f"--nproc_per_node={env['NPROC']}"]
        command = [sys.executable, *launcher, __file__, "--worker", *options,
                   *(word for word in words if word.startswith("--"))]
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=self.errors, env=env)

    def read(self, seconds: float) -> dict:
        """Read its next answer. Failed if it ends. After these seconds it is terminated."""
        start, timer = monotonic(), threading.Timer(max(0.0, seconds), self.process.terminate)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:  # after Ctrl-C the interpreter would wait for the timer
            timer.cancel()
        if line:
            return json.loads(line)
        self.process.wait()
        if monotonic() - start >= seconds:
            raise Late("the time was up")
        self.errors.seek(0)
        text, last = self.errors.read(), f"ended with status {self.process.returncode}"
        said = re.findall(r"tune\.py: error: (.*)", text)  # the error line, or the last line of a traceback
        said = said or re.findall(r"([\w.]*(?:Error|Exception): .*)", text)
        raise Failed((said or [last])[-1][:300])

    def take_turn(self, num_steps: int, seconds: float) -> float:
        """Seconds per token of a turn of about num_steps steps."""
        with suppress(OSError):  # the worker has ended: read() raises the reason
            print(num_steps, file=self.process.stdin, flush=True)
        return self.read(seconds)["seconds_per_token"]

    def close(self, error: type | None = None, *_) -> None:
        """End the process and wait until its memory is free. After an error do not wait for its turn."""
        if error:
            self.process.terminate()
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def work(options: list[str]) -> int:
    """Body of a worker: train the 20 steps and report them, then take a turn for each line of stdin."""
    answers, sys.stdout = sys.stdout, sys.stderr  # the prints of a run are no answers
    with suppress(OSError, AttributeError):  # PR_SET_PDEATHSIG, on Linux: end with the parent
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)

    def time_steps(numbers: Sequence[int]) -> list[float]:
        """Seconds of each of these steps."""
        subject.batches.batches.close()
        batches = (batch for number in numbers
                   for batch in subject.data.batches(rt.comm, number, number + 1))
        subject.batches = step.TimedBatches(gpt.prefetch(batches, rt.device))
        subject.seconds = []
        for number in numbers:
            subject.trainer.progress.step = number
            subject.step()
        return subject.seconds

    def answer(**facts) -> None:
        if rt.device.type == "cuda":
            torch.cuda.empty_cache()  # other workers may share this GPU
        if rt.is_main:
            print(json.dumps(facts), file=answers, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        cfg, rt, data = step.prepare([*options, "--warmup_iterations=1"], NUM_STEPS, folder, None)
        cfg = dataclasses.replace(cfg, val_tokens=cfg.val_seq_len)  # equal tokens on any number of ranks
        subject = step.Subject(cfg, rt)
        seconds, schedule = time_steps(range(NUM_STEPS)), subject.trainer.schedule
        loss = subject.trainer.validate(subject.val_data, schedule.at(NUM_STEPS))
        hardware = gpt.describe_machine(rt)["hardware"]
        peak = gpt.read_peak_memory_mib(rt) or 1
        answer(loss=loss, step_seconds=statistics.mean(seconds), data=data,
               seconds_per_token=common.time_token(enumerate(seconds), schedule, subject.every),
               dtype=str(rt.dtype)[6:], fp8=sorted(rt.fast & {*gpt.FP8_FORMS}),
               compiles=rt.use_compile, threads=torch.get_num_threads(), device=rt.device.type,
               machine=f"{rt.world_size} x {hardware.get('gpu', hardware['cpu'])}",
               room=int(0.9 * hardware.get("gpu_memory_mib", peak) / peak))  # how many workers fit
        while line := rt.comm.broadcast_object(sys.stdin.readline() if rt.is_main else ""):
            turn = list_turn(schedule, subject.every, int(line))
            seconds = time_steps([turn[0], *turn])[1:]  # the first one after a pause is slow
            answer(seconds_per_token=common.time_token(zip(turn, seconds), schedule, subject.every))
        subject.batches.batches.close()
        rt.comm.close()
    return 0


def list_alternatives(cfg: gpt.Config, plain: dict, env: dict[str, str]) -> list[Words]:
    """Alternatives for this machine, the most promising first. plain: first answer of the plain worker."""
    ranks, is_cuda, compiles = int(env["NPROC"]), plain["device"] == "cuda", plain["compiles"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    now = {**env, **{f"--{name}": str(value) for name, value in vars(cfg).items()},
           "OMP_NUM_THREADS": str(plain["threads"])}
    micro, longest = cfg.micro_batch_tokens, max(stage.seq_len for stage in cfg.full_stages)
    splits, found = set(), []
    for tokens in (micro, *(n - n % longest for n in (2 * micro, micro // 2, 4 * micro) if n >= longest)):
        changed = dataclasses.replace(cfg, micro_batch_tokens=tokens)
        split = tuple(gpt.divide_step(changed, ranks, stage) for stage in cfg.full_stages)
        found += [] if split in splits else [f"--micro_batch_tokens={tokens}"]
        splits.add(split)
    if is_cuda:
        found += [f"--fast={step.list_forms(True, name)}" for name in step.TRITON_FORMS]
        found += [f"--fast={step.list_forms(True)}"]
    else:
        found += [f"GOMP_SPINCOUNT={n}" for n in (100_000, 1000) if plain["threads"] > 1]
        found += [f"OMP_NUM_THREADS={n}" for n in (cores // ranks, cores // ranks // 2, 1) if n]
        for n in (1, 2, 4, 8):
            with suppress(gpt.RunError):
                gpt.check_world_size(cfg, n)
                found += [f"NPROC={n} OMP_NUM_THREADS={cores // n}"] if n <= cores and n != ranks else []
    if not compiles:
        found += ["--compile=on"]
    if is_cuda:
        used, logits = {form[4:] for form in plain["fp8"]}, {"logits"} & {*cfg.fp8_parts}
        changed = [used ^ {form[4:]} for form in gpt.FP8_FORMS]
        found += [f"--fp8=on --fp8_parts={','.join(sorted(parts | logits))}" if parts else "--fp8=off"
                  for parts in changed]
    else:
        found += [f"--dtype={name}" for name in TOLERANCE if name != plain["dtype"]]
    return [words for words in map(parse_words, dict.fromkeys(found))
            if any(now.get(name) != value for name, value in (word.split("=", 1) for word in words))]


class Tuner:
    """The plain worker, and the measurement of alternatives against it."""

    def __init__(self, args: Namespace, options: list[str], stack: ExitStack):
        self.args, self.options, self.stack, self.start = args, options, stack, monotonic()
        self.cfg = gpt.make_config(gpt.parse_argv(options))
        num_gpus = min(8, torch.cuda.device_count()) if self.cfg.device != "cpu" else 0
        self.env = {"NPROC": str(1 << max(0, num_gpus.bit_length() - 1)), **os.environ}  # as run.sh sets it
        if not re.fullmatch("[1-9][0-9]{0,4}", self.env["NPROC"]) or "RANK" in os.environ:
            raise gpt.RunError(f"NPROC={self.env['NPROC']}: give a whole number of processes, or none, and "
                               "start without torchrun", 2)
        warn(f"training {NUM_STEPS} steps with the options as given")
        try:
            self.plain = self.launch(())
            with keep_saying("the steps go on"):
                self.facts = self.plain.read(self.left())
        except Failed as error:
            more = f": give more than --seconds={args.seconds:g}" if isinstance(error, Late) else ""
            raise gpt.RunError(f"the plain config fails: {error}{more}", 2) from None
        seconds = self.facts["step_seconds"]
        self.num_steps = round(TURN_SECONDS / seconds)  # of a turn
        schedule = gpt.Schedule(step.shorten(self.cfg, NUM_STEPS))
        turn = list_turn(schedule, self.cfg.longest_period, self.num_steps)
        self.race_s = 2 * args.rounds * (1 + len(turn)) * seconds
        self.needs = monotonic() - self.start + self.race_s  # seconds for the next alternatives
        self.reserve = 0.0  # seconds for the combined winners
        self.plain_tokens: list[float] = []  # seconds per token of the plain worker's turns

    def left(self) -> float:
        """Seconds that are left."""
        return self.args.seconds - (monotonic() - self.start)

    def launch(self, words: Words) -> Worker:
        """Start a worker, which ends with the stack."""
        worker = Worker(self.options, words, self.env)
        self.stack.push(worker.close)
        return worker

    def measure(self, wave: list[Words]) -> list[dict]:
        """Rows of the table for these alternatives. Their workers start and compile in parallel."""
        start, workers, rows = monotonic(), [self.launch(words) for words in wave], []
        for words, worker in zip(wave, workers):
            row = describe(words, "")
            rows.append(row)
            try:
                row["loss"] = worker.read(self.left() - self.reserve - self.race_s)["loss"]
            except Failed as error:
                row.update(verdict=error.verdict, reason=str(error))
                continue
            difference = row["loss"] - self.facts["loss"]
            most = TOLERANCE[self.facts["dtype"]] * abs(self.facts["loss"])
            if not (row["other_numerics"] or abs(difference) <= most):
                row.update(verdict="refused", reason=f"its loss is {difference:+.2g} from the plain one, "
                                                     f"and rounding makes at most {most:.2g}")
        for row, worker in zip(rows, workers):
            if not row["verdict"]:
                row.update(self.race(worker))
            worker.close()
        self.needs = monotonic() - start
        for row in rows:
            row["seconds"] = self.needs  # upper limit for a repetition
            if row["verdict"] == "faster" and self.needs < self.left():
                self.reserve = max(self.reserve, self.needs)
        return rows

    def race(self, other: Worker) -> dict:
        """Compare the times per token of another worker and the plain one, in alternating turns."""
        ratios, timeout = [], self.left() + GRACE_SECONDS
        for number in range(self.args.rounds):
            tokens = {}
            for worker in (self.plain, other) if number % 2 else (other, self.plain):
                try:
                    tokens[worker] = worker.take_turn(self.num_steps, timeout)
                except Failed as error:
                    whose = "in parallel the plain config failed: " if worker is self.plain else ""
                    return dict(verdict=error.verdict, reason=f"{whose}{error}")
            ratios.append(tokens[other] / tokens[self.plain])
            self.plain_tokens.append(tokens[self.plain])
            if number and (self.left() < 0 or number > 1 and min(ratios) > 1.1):  # it cannot win
                break
        low, ratio, high = common.find_quartiles(ratios)
        timed = dict(ratio=ratio, quartiles=[low, high], rounds=len(ratios))
        if self.left() < 0 and len(ratios) < self.args.rounds:
            return dict(**timed, verdict=Late.verdict,
                        reason=f"the time was up after {len(ratios)} of {self.args.rounds} rounds")
        verdict = "faster" if high < FASTER else "slower" if low > SLOWER else "no difference"
        return dict(**timed, verdict=verdict)


def list_turn(schedule: gpt.Schedule, every: int, most: int) -> list[int]:
    """The steps of a turn: whole cycles of `every` steps in each stage, about `most` steps together.

    A turn visits all stages, so that its time per token stands for the whole run.
    """
    ranges = schedule.stage_ranges()
    count = max(1, round(most / every / len(ranges))) * every
    lengths = [end - start for _, start, end in ranges]
    return [number for (_, start, _), length in zip(ranges, lengths)
            for number in range(start, start + min(count, length - length % every or length))]


def describe(words: Words, verdict: str, **more) -> dict:
    """A row of the table."""
    return dict(words=words, other_numerics=bool(OTHER_NUMERICS & names(words)), verdict=verdict, **more)


def combine(rows: list[dict]) -> list[Words]:
    """The winners, fastest first, without those that set an option of a faster one."""
    chosen: list[Words] = []
    for row in sorted((row for row in rows if row["verdict"] == "faster"), key=lambda row: row["ratio"]):
        if not (row["other_numerics"] or any(names(words) & names(row["words"]) for words in chosen)):
            chosen.append(row["words"])
    return chosen


def tune(args: Namespace, options: list[str]) -> dict:
    """Measure the alternatives until the time is up. Returns plain JSON types."""
    rows: list[dict] = []
    with ExitStack() as stack:
        tuner = Tuner(args, options, stack)
        queue = args.alternative or list_alternatives(tuner.cfg, tuner.facts, tuner.env)
        jobs = args.jobs or max(1, min(4, tuner.facts["room"]))
        warn(f"timing {len(queue)} alternatives")
        with Progress(len(queue), unit="alternative") as progress:
            while queue and tuner.left() > tuner.needs + tuner.reserve:
                wave, queue = queue[:jobs], queue[jobs:]
                label = ", ".join(map(" ".join, wave))
                progress.show(label)
                with keep_saying(label, progress.show):
                    found = tuner.measure(wave)
                if len(wave) > 1 and any("out of memory" in row.get("reason", "") for row in found):
                    jobs, queue = 1, [row["words"] for row in found if row["verdict"] == "failed"] + queue
                    found = [row for row in found if row["verdict"] != "failed"]
                rows += found
                for row in found:
                    progress.finish(" ".join(row["words"]))
        chosen, together = combine([row for row in rows if 1.5 * row["seconds"] < tuner.left()]), None
        if chosen:
            tuner.reserve = tuner.race_s = 0.0
            together = tuner.measure([sum(chosen, ())])[0]
            if together["verdict"] == Late.verdict:
                chosen, together = chosen[:1], None
            elif together["verdict"] != "faster":  # then only the best one
                chosen = chosen[:1] if len(chosen) > 1 else []
        else:
            chosen = combine(rows)
    rows += [describe(words, "not tried", reason="too little time was left") for words in queue]
    plain = {key: tuner.facts[key] for key in ("machine", "threads", "dtype", "data", "loss")}
    return dict(date=time.strftime("%Y-%m-%d"), torch=torch.__version__, options=options, **plain,
                seconds_per_token=statistics.median(
                    tuner.plain_tokens or [tuner.facts["seconds_per_token"]]),
                seconds=round(monotonic() - tuner.start), alternatives=rows, chosen=sum(chosen, ()),
                together=together)


def is_open(result: dict) -> bool:
    """Whether the time was up before the first verdict."""
    verdicts = {row["verdict"] for row in result["alternatives"]}
    return bool(verdicts) and verdicts <= UNTIMED


def format_report(result: dict) -> str:
    """A table, and the line to paste."""
    def show(row: dict) -> str:
        low, high = row.get("quartiles", (0, 0))
        us = 1e6 * result["seconds_per_token"] * row.get("ratio", 0)
        cells = [f"`{' '.join(row['words'])}`", f"{us:.3f}" if low else "",
                 f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})" if low else "",
                 f"{row['loss']:.5f}" if "loss" in row else "",
                 ": ".join(filter(None, (row["verdict"], row.get("reason"))))]
        return f"| {' | '.join(cells)} |"

    chosen, together = result["chosen"], result["together"]
    lines = [f"{result['machine']}, {result['threads']} threads, {result['dtype']}, PyTorch "
             f"{result['torch']}, {result['data']}, {result['seconds']} s", "",
             f"| alternative | us per token | to plain (quartiles) | loss, {NUM_STEPS} steps | verdict |",
             "|---|---:|---|---:|---|",
             f"| plain | {1e6 * result['seconds_per_token']:.3f} | | {result['loss']:.5f} | |",
             *(show(row) for row in result["alternatives"] if not row["other_numerics"])]
    if others := [show(row) for row in result["alternatives"] if row["other_numerics"]]:
        lines += ["| **other numerics** | | | | |", *others]
    if together:
        lines += ["| **the combined winners** | | | | |", show(together)]
    settings = [word for word in chosen if not word.startswith("--")]
    for name, usual in dict(NPROC="1", OMP_NUM_THREADS="1", GOMP_SPINCOUNT="1000").items():
        given = os.environ.get(name, usual)
        if given != usual and not any(word.startswith(f"{name}=") for word in settings):
            settings.append(f"{name}={given}")
    command = shlex.join([*settings, os.environ.get("RUN_SH", "./run.sh"), *result["options"],
                          *(word for word in chosen if word.startswith("--"))])
    last = f"To paste{'' if together else ' (no time was left for a second measurement)'}: {command}"
    if is_open(result):
        last = "No verdict: the time was not enough for one alternative. Give more with --seconds."
    elif not chosen:
        is_partial = any(row["verdict"] in UNTIMED for row in result["alternatives"])
        last = (f"Nothing{' that was timed' * is_partial} is faster than the plain config"
                f"{' in a second measurement' if together else ''}.")
    elif together and together["verdict"] != "faster":
        last = f"The combined winners: {together['verdict']}. So only the best one. {last}"
    return "\n".join([*lines, "", last])


def main() -> int:
    """Parse, measure and print. The status is 1 without a verdict."""
    if sys.argv[1:2] == ["--worker"]:
        return run_guarded(lambda: work(sys.argv[2:]))
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=at_least(1, float), default=470.0,
                        help="no measurement begins after these seconds (default %(default)g)")
    parser.add_argument("--rounds", type=at_least(2), default=7,
                        help="turns of each config (default %(default)s)")
    parser.add_argument("--alternative", type=parse_words, action="append", metavar="WORDS",
                        help="time this instead of the alternatives for this machine, may be repeated")
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="alternatives that start in parallel "
                        "(default: 1 on CPUs, on GPUs up to 4 that fit the memory)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write everything as JSON")
    args, options = common.parse_known(parser)

    def body() -> int:
        result = tune(args, options)
        common.write_report(format_report(result), result, args.json)
        return int(is_open(result))

    return run_guarded(body)


if __name__ == "__main__":
    sys.exit(main())
