"""Run a function on every rank of a job. The ranks are forks of one process, so PyTorch is imported only once.

python tests/run_ranks.py FUNCTION N ARGUMENT...   prints a JSON list [[exit status or -signal, seconds], ...] by rank
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from cpu_graphs import graphs_on_cpu  # noqa: E402

import train_gpt as gpt  # noqa: E402
from benchmarks import comm  # noqa: E402

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # of child processes


def round_to_multiple(x, unit: float):
    """Round to multiples of a power of two, so that sums are exact and independent of their order. Sums are exact below
    2^24 units in float32, 2^8 in bfloat16."""
    shift = 1.5 * unit / torch.finfo(x.dtype).eps  # neighboring floats around this value are one unit apart
    return (x + shift).sub_(shift)


@contextmanager
def exact_sums(unit: float = 2.0**-12):
    """Round all gradients to multiples of a unit. Then any number of ranks has equal bits. 0: no rounding."""
    store, add = gpt.Bucket.store, gpt.Table.add

    def store_with_hooks(bucket, cfg, rt):
        store(bucket, cfg, rt)
        for param in bucket.params.values():
            param.register_hook(functools.partial(round_to_multiple, unit=unit))

    def add_rounded(table, plan, leaf):
        leaf.grad = round_to_multiple(leaf.grad, unit)
        add(table, plan, leaf)

    with patch.object(gpt.Bucket, "store", store_with_hooks), patch.object(gpt.Table, "add", add_rounded):
        yield


def run_ranks(function: str, num_ranks: int, *arguments, cwd=None) -> tuple[list, str, str]:
    """Run a function of this file. Returns [[status or -signal, seconds], ...] by rank, stdout and stderr."""
    command = [sys.executable, __file__, function, str(num_ranks), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=3000, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr


def check_ranks(optimizer: gpt.Optimizer) -> None:
    """Raise AssertionError on every rank if a rank's parameters differ from rank 0's in any bit."""
    optimizer.finish()
    values = [bucket.values for bucket in optimizer.buckets if bucket not in optimizer.tables]
    hashes = [hashlib.sha256(value.flatten().view(torch.uint8).numpy()).hexdigest() for value in values]
    found = optimizer.comm.gather_objects(hashes)
    assert found == found[:1] * len(found)


class OtherModel(gpt.GPT):
    """Every second parameter has other multipliers, so that multipliers differ inside the buckets. Rank 0 must send
    its parameters, because they differ from those of the other ranks."""

    def __init__(self, *args):
        super().__init__(*args)
        for param in list(self.parameters())[1::2]:
            lr_mul = param.spec.lr_mul if isinstance(param.spec.lr_mul, tuple) else 0.5
            param.spec = param.spec._replace(lr_mul=lr_mul, wd_mul=2)
        for param in self.parameters() if int(os.environ["RANK"]) else ():
            param.data += not param.spec.is_table


def leave(result: object, out: str, rt: gpt.Runtime) -> None:
    """Rank 0 saves the result. All ranks leave together."""
    if rt.is_main:
        torch.save(result, out)
    rt.comm.barrier()
    rt.comm.close()


def equality(out: str, cases: str, num_threads: str = "1") -> None:
    """Train half of the steps of each case. Save the parameters, and the bytes that each rank sends in a step."""
    torch.set_num_threads(int(num_threads))
    cases = json.loads(cases)
    units = {name: changes.pop("unit", 2.0**-12) for name, changes in cases.items()}
    cfgs = {name: gpt.make_config(changes) for name, changes in cases.items()}
    rt, results, gpt.GPT = gpt.start_runtime(next(iter(cfgs.values()))), {}, OtherModel
    for name, cfg in cfgs.items():
        with exact_sums(units[name]):
            results[name] = train_half(cfg, rt)
    leave(results, out, rt)


def train_half(cfg: gpt.Config, rt: gpt.Runtime) -> dict:
    steps = cfg.num_iterations // 2
    forms = frozenset({"rms_norm", "block_attention", "head_loss"})  # those that a CPU chooses
    trainer = gpt.Trainer(cfg, dataclasses.replace(rt, fast=forms))
    batches = gpt.prefetch(gpt.TrainData(cfg, trainer.schedule).batches(rt.comm, 0, steps), rt.device)
    sent = Counter()
    for step in range(steps):
        with comm.count_bytes() as counted:
            trainer.train_step(batches, trainer.schedule.at(step))
        sent += counted
        if step % 2:  # the other steps begin with pending all-gathers
            check_ranks(trainer.optimizer)
    batches.close()
    check_ranks(trainer.optimizer)
    params = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    params |= {table.name: table.gather().clone() for table in trainer.optimizer.tables}
    minimum = comm.count_minimum_bytes(trainer.optimizer, 0, steps) / steps
    rows = rt.comm.gather_objects(sent.pop("all_to_all", 0) / steps)
    others = rt.comm.gather_objects(sum(sent.values()) / steps)
    return dict(params=params, rows=rows, others=others, minimum=minimum)


def scales(out: str) -> None:
    """Save the FP8 scales of both ranks after a step in which rank r has amax values of 5 + 2 r and 3 - r."""
    cfg = gpt.make_config({"preset": "smoke", "device": "cpu", "seq_len": 128, "num_layers": 2})
    rt = gpt.start_runtime(cfg)
    scales = gpt.DelayedScales(gpt.GPT(cfg), rt.comm)
    scales.amax = torch.tensor([5.0 + 2 * rt.comm.rank, 3.0 - rt.comm.rank])
    scales.update()
    leave(torch.stack(rt.comm.gather_objects(scales.read())), out, rt)


def fail(mode: str, at_rank: str, *argv: str) -> int:
    """A real run in which one rank fails, or gets a signal, in a step, or cannot save it ("full disk"). "none": no
    failure. "late": none, but while rank 0 locks the run, an older process adds the steps in late/. "term in
    validation": all ranks get a signal in the final one. at_rank: RANK or RANK@STEP, without the steps of the warm-up.
    The default is step 5."""
    torch.set_num_threads(1)
    gpt.STEP_TIMEOUT = datetime.timedelta(seconds=20)  # a sixth of the real one
    real, write, end_step, catch_signals, lock, validate = (
        gpt.Trainer.train_step, gpt.write_atomic, gpt.Guard.end_step, gpt.Stop.catch_signals, gpt.lock_run,
        gpt.Trainer.validate)
    at_rank, _, at_step = at_rank.partition("@")
    signals, is_warm = dict(kill=signal.SIGKILL, freeze=signal.SIGSTOP, term=signal.SIGTERM, int=signal.SIGINT), []

    def end_step_and_compare(guard, *args, **options):
        end_step(guard, *args, **options)
        counts = guard.trainer.rt.comm.broadcast_object(guard.trainer.progress.num_actions)
        assert counts == guard.trainer.progress.num_actions, "rank 0 has acted otherwise"

    def write_slowly(path, *more):
        time.sleep(21 if path.name == "rank1.pt" else 0)  # longer than STEP_TIMEOUT
        write(path, *more)

    def refuse(path, *more):
        if path.match(f"step_{int(at_step or 5):06d}/rank{at_rank}.pt"):
            raise OSError(28, "No space left on device", str(path))
        write(path, *more)

    def train_step(trainer, *args):
        if is_warm and trainer.progress.step + 1 == int(at_step or 5) and trainer.rt.comm.rank == int(at_rank):
            if mode == "raise":
                raise ValueError("one step too many")
            if mode == "nan":
                trainer.model.embed.grad.fill_(float("nan"))
            if mode in signals:
                os.kill(os.getpid(), signals[mode])
            while mode == "freeze":  # something has continued this process
                os.kill(os.getpid(), signal.SIGSTOP)
        return real(trainer, *args)

    def validate_and_stop(trainer, *args):
        if is_warm and trainer.progress.step == trainer.cfg.num_iterations:
            os.kill(os.getpid(), signal.SIGTERM)
        return validate(trainer, *args)

    if mode == "term in validation":
        gpt.Trainer.validate = validate_and_stop
    if mode == "slow disk":
        gpt.write_atomic = write_slowly
    if mode == "full disk":
        gpt.write_atomic = refuse
    if mode == "late":
        gpt.lock_run = lambda folder: lock(shutil.copytree("late", folder, dirs_exist_ok=True))
    if mode == "nan":
        gpt.Guard.end_step = end_step_and_compare
    gpt.Trainer.train_step = train_step
    gpt.Stop.catch_signals = lambda stop: (is_warm.append(True), catch_signals(stop))
    with exact_sums():
        return gpt.main(list(argv))


def train_with_graphs(*argv: str) -> int:
    torch.set_num_threads(1)
    with graphs_on_cpu():
        return gpt.main(list(argv))


def leak(function, size: float = 0.05, is_on=lambda: True):
    """Segments that add a part of the previous token's activations to those of each token."""
    def run(*args):
        x, *more = function(*args)
        return x + is_on() * size * x.roll(1, 0), *more

    return run


def train_compiled(wrong_rank: str, *argv: str) -> int:
    """A real run whose compiler changes nothing, except on one rank, where segments leak in validation: gradients would
    tell the other rank. Rank 1 prints whether it has switched off the compiler."""
    torch.set_num_threads(1)
    rank, check = os.environ["RANK"], gpt.check_compiler

    def check_and_print(trainer, *args):
        lines = check(trainer, *args)
        if rank == "1" and not trainer.use_compile:
            print("rank 1: no compiler", file=sys.stderr)
        return lines

    gpt.check_compiler = check_and_print
    wrong = functools.partial(leak, is_on=lambda: not torch.is_grad_enabled())
    torch.compile = lambda fn, **_: wrong(fn) if rank == wrong_rank and fn.__name__ == "run_segment" else fn
    return gpt.main(list(argv))


def train_corrupted(what: str, *argv: str) -> int:
    """A real run in which rank 1 receives other numbers: all parameters of rank 0 after a step ("half", "swap": in
    exchange with its own), one bit of one of them ("bit"), the first ones ("first"), or rows of tables ("rows")."""
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1":
        gpt.time.sleep = lambda _: None  # its line must not wait
        name = dict(first="broadcast", rows="all_to_all").get(what, "all_gather")
        real, calls = getattr(gpt.Comm, name), []

        def receive(comm, tensor, *args):
            before = tensor.clone()
            result = real(comm, tensor, *args)
            work = result[1] if what == "rows" else result
            calls.append(work and work.wait())
            size = len(tensor) // 2  # of a shard
            if what == "first":
                tensor.copy_(before + 1)
            elif what == "rows":
                result[0].mul_(0.5)
            elif what == "half":
                tensor[:size] *= 0.5
            elif what == "swap":
                tensor.copy_(tensor.roll(size, 0))
            elif len(calls) == 1:
                tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
            return result

        setattr(gpt.Comm, name, receive)
    return gpt.main(list(argv))


def train_mixed(what: str, folder: str, options: str, *argv: str) -> int:
    """A real run in which rank 1 has other options, data (from another folder) or script, or runs in that folder."""
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1":
        argv = [*argv, *shlex.split(options)]
        if what == "data":  # like a stale file on the local disk of a node
            find = gpt.find_shards
            gpt.find_shards = lambda *args: [str(Path(folder, Path(path).name)) for path in find(*args)]
        if what == "folder":
            os.chdir(folder)
        if what == "script":
            gpt.SCRIPT += b"\n"
    return gpt.main(list(argv))


def train_with_limits(limits: str, *argv: str) -> None:
    """Real runs, one after the other. Each has its folder and its limits {folder: [MODEL_BYTES, LAST_BYTES]}."""
    torch.set_num_threads(1)
    rt = gpt.start_runtime(gpt.make_config(gpt.parse_argv(argv)))
    for folder, (gpt.Checkpoints.MODEL_BYTES, gpt.Checkpoints.LAST_BYTES) in json.loads(limits).items():
        gpt.train(gpt.make_config(gpt.parse_argv([*argv, f"--out={folder}"])), rt, list(argv))
    rt.comm.close()


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def count_gloo_threads() -> int:
    """Threads of this process that wait for collectives. Python's shutdown can abort a process that has one."""
    return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop\n")


def start_ranks(num_ranks: int, run) -> list[int]:
    """Fork the ranks of a job, which call run() and exit with its status. Returns their process ids. A rank that ends
    in the normal way has left no thread of gloo."""
    def run_and_count():
        status = run()
        return f"{count_gloo_threads()} threads of gloo are left" if count_gloo_threads() else status

    pids, address = [], dict(MASTER_ADDR="localhost", MASTER_PORT=str(find_port()))
    for rank in range(num_ranks):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks),
                              LOCAL_WORLD_SIZE=str(num_ranks))  # fmt: skip
            sys.exit(run_and_count())
    return pids


def main() -> None:
    """Fork the ranks, wait for all of them and print their exit statuses."""
    function, num_ranks, *arguments = sys.argv[1:]
    if "RANK" in os.environ:  # torchrun has started this process as a rank
        sys.exit(globals()[function](*arguments))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    pids, start, ends = start_ranks(int(num_ranks), lambda: globals()[function](*arguments)), time.monotonic(), {}
    while len(ends) < len(pids):
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):  # a frozen rank, killed below after all other ranks have ended
            ends[pid] = [-os.WSTOPSIG(status), round(time.monotonic() - start, 1)]
        else:
            ends[pid] = [os.waitstatus_to_exitcode(status), round(time.monotonic() - start, 1)]
    for pid in pids:
        if ends[pid][0] == -signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
    print(json.dumps([ends[pid] for pid in pids]))


if __name__ == "__main__":
    main()
