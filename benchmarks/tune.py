#!/usr/bin/env python3
"""Which options make a step faster on this machine, at equal mathematics.

    ./run.sh benchmarks/tune.py                                # under 8 minutes; with GPUs: track_1 on all
    ./run.sh benchmarks/tune.py --preset=laptop --seconds=300 --json=tune.json
    ./run.sh benchmarks/tune.py --alternative='NPROC=2 OMP_NUM_THREADS=1' --alternative=--segments=3

Other options are those of train_gpt.py; with the environment they are the plain config. An alternative is
the plain config with variables of the environment, as ./run.sh takes them, or options changed. Each runs in
a process of its own: 20 steps through all stages, the same as the plain one's, then turns of a second
interleaved with its. It is refused where the validation loss after the 20 steps differs by more than
rounding. It is faster where the upper quartile of the ratios of its turns to the plain ones is below 0.98.
The fastest that go together are timed together once more. FP8 and --dtype are other numerics by intent:
listed apart, and never recommended.
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
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "records"), str(ROOT / "benchmarks")]
import step  # noqa: E402
from results import Parser, at_least  # noqa: E402

import train_gpt as gpt  # noqa: E402

NUM_STEPS = 20  # of the run, whose schedule is shortened to them
TURN_SECONDS, GRACE_SECONDS = 1.0, 60.0  # of a turn; after the end, for a turn that has begun
FASTER, SLOWER = 0.98, 1.02  # ratios to plain
TOLERANCE = {"float32": 2e-3, "bfloat16": 4e-3}  # of the loss, relative: RESULTS.md says why
OTHER_NUMERICS = {"--dtype", *(f"--{field}" for field in gpt.FP8_FORMS)}
Words = tuple[str, ...]  # of an alternative: NAME=value for the environment, --option=value


class Failed(Exception):
    """A worker that gave no answer; the text says why."""


def parse_words(text: str) -> Words:
    words = tuple(re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word)
                  for word in shlex.split(text))
    for word in words:
        if not re.match(r"([A-Z_]+|--\w+)=", word):
            raise ArgumentTypeError(f"{word} is neither NAME=value nor --option=value")
    return words


def names(words: Words) -> set[str]:
    return {word.partition("=")[0] for word in words}


class Worker:
    """A config in a process of its own, or in the ranks of a torchrun, which steps when told to."""

    def __init__(self, options: list[str], words: Words, env: dict[str, str]):
        env = env | dict(word.split("=", 1) for word in words if not word.startswith("--"))
        launcher = [] if env["NPROC"] == "1" else [
            "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={env['NPROC']}"]
        command = [sys.executable, *launcher, __file__, "--worker", *options,
                   *(word for word in words if word.startswith("--"))]
        self.errors = tempfile.TemporaryFile("w+", errors="replace")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=self.errors, env=env)

    def read(self, seconds: float) -> dict:
        """Its next answer; Failed where it ends, or needs more than these seconds and is ended."""
        start, timer = time.monotonic(), threading.Timer(max(0.0, seconds), self.process.terminate)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        self.process.wait()
        if time.monotonic() - start >= seconds:
            raise Failed("the time was up")
        self.errors.seek(0)
        text, last = self.errors.read(), f"ended with status {self.process.returncode}"
        said = re.findall(r"tune\.py: error: (.*)", text)  # the line for the user; or that of a traceback
        said = said or re.findall(r"([\w.]*(?:Error|Exception): .*)", text)
        raise Failed((said or [last])[-1][:300])

    def step(self, first: int, count: int, seconds: float) -> float:
        """Median seconds of a step in a turn of these steps, but for its first."""
        with suppress(OSError):  # it has ended: read() says why
            print(first, count, file=self.process.stdin, flush=True)
        return statistics.median(self.read(seconds)["seconds"][1:])

    def close(self) -> None:
        """End it, and wait until its memory is free."""
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
    """A worker's life: the 20 steps and what came of them, then a turn for every line of stdin."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a run prints is no answer
    with suppress(OSError, AttributeError):  # PR_SET_PDEATHSIG, on Linux: none outlives who started it
        ctypes.CDLL("libc.so.6").prctl(1, signal.SIGTERM)

    def take_turn(first: int, count: int) -> list[float]:
        subject.batches.batches.executor.shutdown(cancel_futures=True)
        batches = gpt.Prefetcher(subject.data.batches(rt, first, first + count), rt.device)
        subject.batches = step.TimedBatches(batches)
        subject.trainer.progress.step, subject.seconds = first, []
        for _ in range(count):
            subject.step()
        return subject.seconds

    def answer(**facts) -> None:
        if rt.device.type == "cuda":
            torch.cuda.empty_cache()  # for the others on this GPU, while this one waits
        if rt.is_main:
            print(json.dumps(facts), file=answers, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        cfg, rt, data = step.prepare([*options, "--warmup_iterations=1"], NUM_STEPS, folder, None)
        cfg = dataclasses.replace(cfg, val_tokens=cfg.val_seq_len)  # the same tokens on any number of ranks
        with gpt.explain_memory(cfg):
            subject = step.Subject(cfg, rt)
            seconds = take_turn(0, NUM_STEPS)
            loss = subject.trainer.validate(subject.val_data, subject.trainer.schedule.at(NUM_STEPS))
            hardware = gpt.describe_machine(rt)["hardware"]
            peak = gpt.read_peak_memory_mib(rt) or 1
            answer(loss=loss, seconds=seconds, data=data, dtype=str(rt.dtype)[6:], fp8=sorted(rt.fp8),
                   compiles=rt.use_compile, threads=torch.get_num_threads(), device=rt.device.type,
                   machine=f"{rt.world_size} x {hardware.get('gpu', hardware['cpu'])}",
                   room=int(0.9 * hardware.get("gpu_memory_mib", peak) / peak))  # for so many at a time
            while line := rt.comm.broadcast_object(sys.stdin.readline() if rt.is_main else ""):
                answer(seconds=take_turn(*map(int, line.split())))
            subject.batches.batches.executor.shutdown(cancel_futures=True)
    return 0


def list_alternatives(cfg: gpt.Config, plain: dict, env: dict[str, str]) -> list[Words]:
    """What may be worth it on this machine, the likeliest first; plain: the plain worker's first answer."""
    ranks, is_cuda, compiles = int(env["NPROC"]), plain["device"] == "cuda", plain["compiles"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    now = {**env, **{f"--{name}": str(value) for name, value in gpt.flatten_groups(vars(cfg)).items()},
           "OMP_NUM_THREADS": str(plain["threads"])}
    num_segments = 0 if ranks == 1 else min(gpt.MULTI_RANK_SEGMENTS, cfg.num_layers)
    now["--segments"] = str(cfg.segments or num_segments)
    micro, longest = cfg.micro_batch_tokens, max(stage.seq_len for stage in cfg.full_stages)
    splits, found = set(), []
    for tokens in (micro, *(n - n % longest for n in (2 * micro, micro // 2, 4 * micro) if n >= longest)):
        changed = dataclasses.replace(cfg, micro_batch_tokens=tokens)
        split = tuple(gpt.sequences_per_rank(changed, ranks, stage.tokens_per_step, stage.seq_len)
                      for stage in cfg.full_stages)
        found += [] if split in splits else [f"--micro_batch_tokens={tokens}"]
        splits.add(split)
    if is_cuda:
        device = torch.device("cuda")
        found += [f"--fast={step.list_forms(cfg, device, compiles, kernels)}"
                  for kernels in (*((name,) for name in gpt.TRITON_FORMS), ())]
    else:
        found += [f"GOMP_SPINCOUNT={n}" for n in (100_000, 1000) if plain["threads"] > 1]
        found += [f"OMP_NUM_THREADS={n}" for n in (cores // ranks, cores // ranks // 2, 1) if n]
        for n in (1, 2, 4, 8):
            with suppress(gpt.InputError):
                gpt.check_world_size(cfg, n)
                found += [f"NPROC={n} OMP_NUM_THREADS={cores // n}"] if n <= cores and n != ranks else []
    if ranks > 1:
        found += [f"--comm_bucket_mb={cfg.comm_bucket_mb * factor}" for factor in (0.25, 4)]
    if ranks > 1 or compiles:
        found += [f"--segments={n}" for n in ((1, 2, 6) if ranks > 1 else (3,)) if n <= cfg.num_layers]
    modes = [f"--compile_mode={mode}" for mode in gpt.OPTIONS["compile_mode"].choices[::-1]]
    found += modes[0::2] if compiles else ["--compile=on"]  # all but that which takes longest
    if is_cuda:
        found += [f"--{field}={'off' if field in plain['fp8'] else 'on'}" for field in gpt.FP8_FORMS]
    else:
        found += [f"--dtype={name}" for name in TOLERANCE if name != plain["dtype"]]
    found += modes[1:2] if compiles else []
    return [words for words in map(parse_words, dict.fromkeys(found))
            if any(now.get(name) != value for name, value in (word.split("=", 1) for word in words))]


class Tuner:
    """The plain worker, and the alternatives that are held against it."""

    def __init__(self, args: Namespace, options: list[str], stack: ExitStack):
        self.args, self.options, self.stack, self.start = args, options, stack, time.monotonic()
        self.cfg = gpt.make_config(gpt.parse_argv(options)[0])
        num_gpus = min(8, torch.cuda.device_count()) if self.cfg.device != "cpu" else 0
        self.env = {"NPROC": str(1 << max(0, num_gpus.bit_length() - 1)), **os.environ}  # as run.sh has it
        if not re.fullmatch("[1-9][0-9]{0,4}", self.env["NPROC"]) or "RANK" in os.environ:
            raise gpt.InputError(f"NPROC={self.env['NPROC']}: give a whole number of processes, or leave it "
                                 "out, and start without torchrun", of_one_rank=True)
        if "OMP_WAIT_POLICY" not in os.environ:  # train_gpt.py's choice beside other work
            self.env.setdefault("GOMP_SPINCOUNT", "1000")
        try:
            self.plain = self.launch(())
            self.facts = self.plain.read(self.left())
        except Failed as error:
            raise gpt.InputError(f"the plain config fails: {error}") from None
        seconds = statistics.median(self.facts["seconds"])
        self.count = min(NUM_STEPS, 1 + max(1, round(TURN_SECONDS / seconds)))  # steps of a turn
        self.race_s = 2 * args.rounds * self.count * seconds
        self.needs = time.monotonic() - self.start + self.race_s  # seconds of the next alternatives
        self.reserve = 0.0  # seconds for the winners together
        self.plain_ms: list[float] = []

    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.start)

    def launch(self, words: Words) -> Worker:
        worker = Worker(self.options, words, self.env)
        self.stack.callback(worker.close)
        return worker

    def measure(self, wave: list[Words]) -> list[dict]:
        """What comes of these alternatives, which start, and mostly compile, side by side."""
        start, workers, rows = time.monotonic(), [self.launch(words) for words in wave], []
        for words, worker in zip(wave, workers):
            row = describe(words, "")
            rows.append(row)
            try:
                row["loss"] = worker.read(self.left() - self.reserve - self.race_s)["loss"]
            except Failed as error:
                row.update(verdict="failed", reason=str(error))
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
        self.needs = time.monotonic() - start
        for row in rows:
            row["seconds"] = self.needs  # what it takes at most to do it again
            if row["verdict"] == "faster" and self.needs < self.left():
                self.reserve = max(self.reserve, self.needs)
        return rows

    def race(self, other: Worker) -> dict:
        """Turns of the plain worker and of another in turn, over the same steps: how their times compare."""
        ratios, seconds, timeout = [], [], self.left() + GRACE_SECONDS
        for number in range(self.args.rounds):
            first = number * (NUM_STEPS - self.count) // (self.args.rounds - 1)  # through all stages
            times = {}
            for worker in (self.plain, other) if number % 2 else (other, self.plain):
                try:
                    times[worker] = worker.step(first, self.count, timeout)
                except Failed as error:
                    whose = "beside it the plain config failed: " if worker is self.plain else ""
                    return dict(verdict="failed", reason=f"{whose}{error}")
            ratios.append(times[other] / times[self.plain])
            seconds.append(times[other])
            self.plain_ms.append(1e3 * times[self.plain])
            if number and (self.left() < 0 or number > 1 and min(ratios) > 1.1):  # it will not win any more
                break
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        verdict = "faster" if high < FASTER else "slower" if low > SLOWER else "no difference"
        return dict(ms_per_step=1e3 * statistics.median(seconds), ratio=ratio, quartiles=[low, high],
                    rounds=len(ratios), verdict=verdict)


def describe(words: Words, verdict: str, **more) -> dict:
    """A row of the table."""
    return dict(words=words, other_numerics=bool(OTHER_NUMERICS & names(words)), verdict=verdict, **more)


def combine(rows: list[dict]) -> list[Words]:
    """The winners, fastest first, each where none before it sets the same."""
    chosen: list[Words] = []
    for row in sorted((row for row in rows if row["verdict"] == "faster"), key=lambda row: row["ratio"]):
        if not (row["other_numerics"] or any(names(words) & names(row["words"]) for words in chosen)):
            chosen.append(row["words"])
    return chosen


def tune(args: Namespace, options: list[str]) -> dict:
    """Everything there is time for, as plain JSON types."""
    rows: list[dict] = []
    with ExitStack() as stack:
        tuner = Tuner(args, options, stack)
        queue = args.alternative or list_alternatives(tuner.cfg, tuner.facts, tuner.env)
        jobs = args.jobs or max(1, min(4, tuner.facts["room"]))
        with tqdm(total=len(queue), unit="alternative", disable=None) as bar:
            while queue and tuner.left() > tuner.needs + tuner.reserve:
                wave, queue = queue[:jobs], queue[jobs:]
                bar.set_description("; ".join(map(" ".join, wave)))
                found = tuner.measure(wave)
                if len(wave) > 1 and any("out of memory" in row.get("reason", "") for row in found):
                    jobs, queue = 1, [row["words"] for row in found if row["verdict"] == "failed"] + queue
                    found = [row for row in found if row["verdict"] != "failed"]
                rows += found
                bar.update(len(found))
        chosen, together = combine([row for row in rows if 1.5 * row["seconds"] < tuner.left()]), None
        if chosen:
            tuner.reserve = tuner.race_s = 0.0
            together = tuner.measure([sum(chosen, ())])[0]
            if together["verdict"] != "faster":  # then the best of several by itself
                chosen = chosen[:1] if len(chosen) > 1 else []
        else:
            chosen = combine(rows)
    rows += [describe(words, "not tried", reason="the time was up") for words in queue]
    plain = {key: tuner.facts[key] for key in ("machine", "threads", "dtype", "data", "loss")}
    return dict(date=time.strftime("%Y-%m-%d"), torch=torch.__version__, options=options, **plain,
                ms_per_step=statistics.median(tuner.plain_ms or [1e3 * s for s in tuner.facts["seconds"]]),
                seconds=round(time.monotonic() - tuner.start), alternatives=rows, chosen=sum(chosen, ()),
                together=together)


def format_report(result: dict) -> str:
    """A table, and the line to paste."""
    def show(row: dict) -> str:
        low, high = row.get("quartiles", (0, 0))
        cells = [f"`{' '.join(row['words'])}`", f"{row['ms_per_step']:.1f}" if low else "",
                 f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})" if low else "",
                 f"{row['loss']:.5f}" if "loss" in row else "",
                 ": ".join(filter(None, (row["verdict"], row.get("reason"))))]
        return f"| {' | '.join(cells)} |"

    chosen, together = result["chosen"], result["together"]
    lines = [f"{result['machine']}, {result['threads']} threads, {result['dtype']}, PyTorch "
             f"{result['torch']}, {result['data']}; {result['seconds']} s", "",
             f"| alternative | ms per step | to plain (quartiles) | loss, {NUM_STEPS} steps | verdict |",
             "|---|---:|---|---:|---|",
             f"| plain | {result['ms_per_step']:.1f} | | {result['loss']:.5f} | |",
             *(show(row) for row in result["alternatives"] if not row["other_numerics"])]
    if others := [show(row) for row in result["alternatives"] if row["other_numerics"]]:
        lines += ["| **other numerics** | | | | |", *others]
    if together:
        lines += ["| **the winners, once more** | | | | |", show(together)]
    command = shlex.join([*(word for word in chosen if not word.startswith("--")), "./run.sh",
                          *result["options"], *(word for word in chosen if word.startswith("--"))])
    last = f"To paste{'' if together else ' (there was no time to time it once more)'}: {command}"
    if not chosen:
        last = "Nothing is faster than the plain config" + (", timed once more." if together else ".")
    elif together and together["verdict"] != "faster":
        last = f"The winners together: {together['verdict']}; so the best alone. {last}"
    return "\n".join([*lines, "", last])


def main() -> int:
    """Parse, measure, print; bad input ends with status 2 and one line."""
    if sys.argv[1:2] == ["--worker"]:
        return gpt.run_guarded(lambda: work(sys.argv[2:]), "tune.py")
    parser = Parser(__doc__)
    parser.add_argument("--seconds", type=at_least(1, float), default=470.0,
                        help="after which nothing new begins (default %(default)g)")
    parser.add_argument("--rounds", type=at_least(2), default=7, help="turns of each (default %(default)s)")
    parser.add_argument("--alternative", type=parse_words, action="append", metavar="WORDS",
                        help="time this instead of what suits the machine; may be repeated")
    parser.add_argument("--jobs", type=at_least(1), metavar="N", help="alternatives that start side by side "
                        "(default: on GPUs as many as fit their memory, at most 4; else 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything as JSON")
    args, options = parser.parse_known_args()

    def body() -> int:
        if args.json:
            gpt.check_writable(args.json.parent, "choose another folder")
        result = tune(args, options)
        print(format_report(result), flush=True)
        if args.json:
            gpt.write_atomic(args.json, (json.dumps(result, indent=1) + "\n").encode())
        return 0

    return gpt.run_guarded(body, "tune.py")


if __name__ == "__main__":
    sys.exit(main())
