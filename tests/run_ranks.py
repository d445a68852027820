"""Run a function on every rank of a job. The ranks are forks of one process, so PyTorch is imported only once.

python tests/run_ranks.py FUNCTION N ARGUMENT...   prints a JSON list [[exit status or -signal, seconds], ...] by rank
"""

import dataclasses
import hashlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as gpt  # noqa: E402
from benchmarks import comm  # noqa: E402

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # of child processes


def run_ranks(function: str, num_ranks: int, *arguments, cwd=None) -> tuple[list, str, str]:
    """Run a function of this file. Returns [[exit status or -signal, seconds], ...] by rank, stdout and stderr.

    There is no launcher, so only train_gpt.py can end the ranks.
    """
    done = subprocess.run(
        [sys.executable, __file__, function, str(num_ranks), *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=3000,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout, done.stderr


def count_bytes(sent: dict[str, float], rt: gpt.Runtime, groups: set[str]) -> None:
    """Count the bytes that this rank sends in each collective, from the sizes of the tensors.

    Also collect the groups of the all-gathers.
    """

    def wrap(owner, name, size):
        real = getattr(owner, name)

        def counted(*args, **kwargs):
            if name == "all_gather_single" and "group" in kwargs:
                groups.add("all_gather" if kwargs["group"] is rt.comm.all_gather_group else "others")
            if name != "all_gather_single" or "group" in kwargs:  # without a group: the row counts of a RowPlan
                sent[name] += size(*args)
            return real(*args, **kwargs)

        setattr(owner, name, counted)

    others = rt.world_size - 1
    wrap(gpt, "reduce_scatter_single", lambda shard, full: full.nbytes - shard.nbytes)
    wrap(gpt, "all_gather_single", lambda full, shard: shard.nbytes * others)
    wrap(dist, "all_to_all_single", lambda _out, given, _to, counts:
         given[0].nbytes * (sum(counts) - counts[rt.rank]) if len(given) else 0)
    for name in ("all_reduce", "broadcast"):  # a step calls no further collectives
        wrap(dist, name, lambda tensor, *_: tensor.nbytes * others)


def check_ranks(optimizer: gpt.Optimizer) -> None:
    """Raise AssertionError on every rank if a rank's parameters differ from rank 0's in any bit."""
    optimizer.finish()
    values = [bucket.values for bucket in optimizer.buckets if bucket not in optimizer.tables]
    digests = [hashlib.sha256(value.flatten().view(torch.uint8).numpy()).digest() for value in values]
    hashes = torch.tensor([[int.from_bytes(digest[:7]) for digest in digests]])
    hashes = optimizer.rt.comm.gather_shards(hashes)  # (N, buckets)
    assert (hashes == hashes[0]).all(), (hashes != hashes[0]).nonzero().tolist()


def use_multipliers(model: torch.nn.Module) -> None:
    """Give every second parameter different multipliers, so that multipliers differ inside the buckets."""
    for param in list(model.parameters())[1::2]:
        lr_mul = param.spec.lr_mul if isinstance(param.spec.lr_mul, tuple) else 0.5
        param.spec = param.spec._replace(lr_mul=lr_mul, wd_mul=2)


def choose_forms(cfg: gpt.Config, rt: gpt.Runtime) -> gpt.Runtime:
    """Choose the fast forms of a real run on this device. All ranks take the choice of rank 0."""
    fast, _ = gpt.choose_fast_forms(cfg, rt.device, rt.dtype, False)
    return dataclasses.replace(rt, fast=rt.comm.broadcast_object(fast))


def note_overlap(trainer: gpt.Trainer, last_step: int) -> dict:
    """Record the order of communication and updates in the last step.

    sent, places: buckets that hooks reduced before the end of backward, in their order, and their first readers.
    updated, gathered: the order of updates and all-gathers.
    awaited: pending all-gathers of the first block, the last block and the head when the first block starts.
    """
    optimizer, notes, sent = trainer.optimizer, {}, []
    first, last, head = (
        {bucket for name, bucket in optimizer.bucket_of.items() if name.startswith(prefix)}
        for prefix in ("blocks.0.", f"blocks.{len(trainer.model.blocks) - 1}.", "head.")
    )
    start_reduce, update, gather = gpt.Bucket.start_reduce, gpt.Bucket.update, gpt.Bucket.start_gather
    step = optimizer.step

    def note_sent(bucket):
        if bucket in optimizer.buckets and optimizer.step_count == last_step:
            sent.append(bucket)
        start_reduce(bucket)

    def note_end_of_backward(state):
        if optimizer.step_count == last_step:
            notes["sent"] = [bucket.name for bucket in sent]
            notes["places"] = [bucket.first_reader for bucket in sent]
        step(state)

    def note_awaited(*_):  # registered after the hook that waits for the parameters of the first block
        if optimizer.step_count == last_step:
            parts = (first, last - first, head)
            counts = [sum(bucket.gathering is not None for bucket in part) for part in parts]
            notes.setdefault("awaited", counts)  # of the first micro-batch

    def note_update(bucket, *args):
        if bucket in optimizer.buckets and optimizer.step_count == last_step + 1:
            notes["updated"] = [*notes.get("updated", ()), (bucket.group_name, bucket.first_reader)]
        update(bucket, *args)

    def note_gather(bucket):
        if bucket in optimizer.buckets and optimizer.step_count == last_step + 1:
            notes["gathered"] = [*notes.get("gathered", ()), bucket.first_reader]
        gather(bucket)

    gpt.Bucket.start_reduce, gpt.Bucket.update, gpt.Bucket.start_gather = note_sent, note_update, note_gather
    optimizer.step = note_end_of_backward
    trainer.model.blocks[0].register_forward_pre_hook(note_awaited)
    return notes


def copy_parameters(trainer: gpt.Trainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name, with the rows of all ranks of a sharded table."""
    params = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    comm = trainer.rt.comm
    return params | {table.name: comm.gather_shards(params[table.name][:-1])[: table.sparse.num_rows]
                     for table in trainer.optimizer.tables}  # fmt: skip


def equality(out: str, cases: str, num_threads: str = "1") -> None:
    """Train the steps of each case. Rank 0 saves the parameters, the bytes sent by each rank, and the overlap."""
    torch.set_num_threads(int(num_threads))
    cfgs = {name: gpt.make_config(changes) for name, changes in json.loads(cases).items()}
    rt, results, sent = gpt.start_runtime(next(iter(cfgs.values()))), {}, defaultdict(float)
    groups = set()
    if rt.world_size > 1:
        count_bytes(sent, rt, groups)
    build = gpt.GPT.__init__

    def build_with_multipliers(self, *args):
        build(self, *args)
        use_multipliers(self)

    gpt.GPT.__init__ = build_with_multipliers
    for name, cfg in cfgs.items():
        cfg, steps = dataclasses.replace(cfg, seed=rt.rank), cfg.num_iterations // 2  # rank 0 must broadcast its weights
        trainer = gpt.Trainer(cfg, choose_forms(cfg, rt))
        notes = note_overlap(trainer, steps - 1) if rt.world_size > 1 else {}
        data = gpt.TrainData(cfg, trainer.schedule)
        batches = gpt.Prefetcher(data.batches(rt, 0, steps), rt.device)
        counts = torch.zeros(rt.world_size, 3, dtype=torch.float64)  # bytes: counted, reported, of rows
        rows = 0
        for step in range(steps):
            sent.clear()
            with comm.count_bytes() as reported:
                trainer.train_step(batches, trainer.schedule.at(step))
            rows += reported["all_to_all"]
            counts[rt.rank] += torch.tensor([sum(sent.values()), sum(reported.values()), sent["all_to_all_single"]])
            if step < steps - 2:  # the recorded last step must start with pending all-gathers
                check_ranks(trainer.optimizer)
        batches.executor.shutdown(cancel_futures=True)
        rt.comm.all_reduce(counts)
        check_ranks(trainer.optimizer)
        results[name] = dict(
            params=copy_parameters(trainer),
            sent=(counts[:, 0] / steps).tolist(),
            reported=(counts[:, 1] / steps).tolist(),
            rows=(counts[:, 2] / steps).tolist(),
            groups=sorted(groups),
            minimum=(rows + comm.count_minimum_bytes(trainer.optimizer, 0, steps)) / steps,
            buckets=[bucket.name for bucket in trainer.optimizer.updated],
            notes=notes,
        )
    if rt.is_main:
        torch.save(results, out)
    rt.comm.barrier()
    if rt.world_size > 1:
        dist.destroy_process_group()


def scales(out: str) -> None:
    """Save the FP8 scales of both ranks after a step in which rank r has amax values of 5 + 2 r and 3 - r."""
    rt = gpt.start_runtime(gpt.make_config({"preset": "smoke", "device": "cpu", "seq_len": 128}))
    module = gpt.DelayedScaling()
    scales = gpt.DelayedScales(torch.nn.ModuleList([module]), rt.comm)
    module.amax.grad = torch.tensor([5.0 + 2 * rt.rank, 3.0 - rt.rank])
    scales.collect()
    scales.start()
    scales.finish()
    found = rt.comm.gather_shards(torch.stack(scales.scales))
    if rt.is_main:
        torch.save(found, out)
    rt.comm.barrier()
    dist.destroy_process_group()


def scale_steps(out: str, changes: str) -> None:
    """Train three steps with FP8 scales. The order of calls on rank 0 goes to the file."""
    torch.set_num_threads(1)
    calls, all_reduce, update = [], dist.all_reduce, gpt.Bucket.update

    class Noted:
        def __init__(self, work):
            self.work = work

        def wait(self):
            calls.append("await scales")
            self.work.wait()

    def send(tensor, op=dist.ReduceOp.SUM, **options):
        work = all_reduce(tensor, op, **options)
        if op == dist.ReduceOp.MAX:
            calls.append("send scales")
            return Noted(work)
        return work

    def note_update(*args):
        if calls[-1] != "update":
            calls.append("update")
        update(*args)

    cfg = gpt.make_config(json.loads(changes))
    trainer = gpt.Trainer(cfg, dataclasses.replace(gpt.start_runtime(cfg), fp8=frozenset({"fp8_mlp"})))
    dist.all_reduce, gpt.Bucket.update = send, note_update
    trainer.model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    data = gpt.TrainData(cfg, trainer.schedule)
    batches = gpt.Prefetcher(data.batches(trainer.rt, 0, 3), trainer.rt.device)
    for step in range(3):
        trainer.train_step(batches, trainer.schedule.at(step))
    batches.executor.shutdown(cancel_futures=True)
    trainer.optimizer.finish()
    if trainer.rt.is_main:
        Path(out).write_text(json.dumps(calls))
    trainer.rt.comm.barrier()
    dist.destroy_process_group()


def rows(out: str) -> None:
    """Save the row-sparse gradient of a table (37, 6), gathered from its shards, and the dense gradient of all tokens.

    Each rank has two micro-batches. Gradients are multiples of 1/16, so sums do not depend on their order. Also save
    the gradient of an equal sharded table, and by rank whether its forward pass has the rows of the whole table.
    """
    num_ranks = int(os.environ["WORLD_SIZE"])
    changes = dict(preset="smoke", device="cpu", seq_len=128, tokens_per_step=128 * num_ranks)
    rt = gpt.start_runtime(gpt.make_config(changes))
    whole = torch.arange(37 * 6).view(37, 6).double()
    param = gpt.parameter(whole.clone(), "value_embed", is_table=True)
    bucket = gpt.Bucket([("table", param)], "value_embed", gpt.Group(), rt, False)
    param.sparse_grad, dense = gpt.RowSparseGradient(bucket.shard, 37, 6, rt.comm), torch.zeros(37, 6, dtype=torch.float64)
    per_rank = -(-37 // num_ranks)
    part = torch.zeros(per_rank + 1, 6, dtype=torch.float64)  # and a row of padding
    own = whole[rt.rank * per_rank :][:per_rank]
    part[: len(own)] = own
    sharded = gpt.parameter(part, "ngram", is_table=True)
    table = gpt.ShardedTable([("ngram", sharded)], "ngram", gpt.Group(rule="row_adam"), rt, False)
    sharded.sparse_grad, is_fetched = gpt.SparseRows(table.shard, 37, 6, rt.comm), True
    torch.manual_seed(rt.rank)
    for least in (0, 20 + rt.rank):  # in the second micro-batch rank 0 receives no rows
        tokens = torch.cat((torch.randint(least, 30, (50,)), torch.tensor([36, least, 36])))
        grad = torch.randint(-99, 99, (len(tokens), 6)) / 16.0
        gpt.sparse_embedding(tokens, param).backward(grad.double())
        fetched = gpt.sparse_embedding(tokens, sharded)
        is_fetched &= torch.equal(fetched, whole[tokens])
        fetched.backward(grad.double())
        dense.index_add_(0, tokens, grad.double())
    found, sums = sharded.sparse_grad.wait()
    full = torch.zeros(per_rank + 1, 6, dtype=torch.float64).index_add_(0, found, sums)
    dense, shards, full = rt.comm.all_reduce(dense), *map(
        rt.comm.gather_shards, (param.sparse_grad.wait().view(-1, 6), full[:-1]))
    is_fetched = rt.comm.gather_shards(torch.tensor([int(is_fetched)]))
    if rt.is_main:
        torch.save((shards, full, dense, is_fetched), out)
    rt.comm.barrier()
    dist.destroy_process_group()


def fail(mode: str, at_rank: str, *argv: str) -> int:
    """A real run in which one rank fails, or gets a signal, in a step. Mode "none" has no failure.

    at_rank: RANK or RANK@STEP, without the steps of the warm-up. The default is step 5.
    """
    torch.set_num_threads(1)
    real, write, end_step = gpt.Trainer.train_step, gpt.write_atomic, gpt.Guard.end_step
    at_rank, _, at_step = at_rank.partition("@")

    def end_step_and_compare(self, *args):
        end_step(self, *args)
        counts = self.trainer.rt.comm.broadcast_object(self.trainer.progress.num_actions)
        assert counts == self.trainer.progress.num_actions, "rank 0 has acted otherwise"

    def write_slowly(path, *more):
        time.sleep(21 if path.suffix == ".pt" else 0)  # the timeout of a step is 20
        write(path, *more)

    exchange = gpt.Checkpoints.exchange

    def write_then_exchange(self, stop):
        """A slow disk skips no save, so that the saved steps are known."""
        if self.writing is not None:
            self.writing.result()
        return exchange(self, stop)

    if mode == "slow disk":
        gpt.write_atomic = write_slowly
    else:
        gpt.Checkpoints.exchange = write_then_exchange
    if mode == "pieces":
        gpt.Checkpoints.PIECE_BYTES = 100_000
    if mode == "nan":
        gpt.Guard.end_step = end_step_and_compare
    signals = dict(kill=signal.SIGKILL, freeze=signal.SIGSTOP, term=signal.SIGTERM, int=signal.SIGINT, usr1=signal.SIGUSR1)

    def train_step(self, *args):
        is_due = hasattr(self, "log") and self.progress.step + 1 == int(at_step or 5)
        if is_due and self.rt.rank == int(at_rank):
            if mode == "raise":
                raise ValueError("one step too many")
            if mode == "nan":
                self.model.embed.grad = torch.full_like(self.model.embed, float("nan"))
            if mode in signals:
                os.kill(os.getpid(), signals[mode])
        return real(self, *args)

    gpt.Trainer.train_step = train_step
    return gpt.main(list(argv))


def train_mixed(what: str, folder: str, options: str, *argv: str) -> int:
    """A real run in which rank 1 has other options, data (from another folder) or script."""
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1":
        argv = [*argv, *shlex.split(options)]
        if what == "data":  # like a stale file on the local disk of a node
            find = gpt.find_shards
            gpt.find_shards = lambda *args: [str(Path(folder, Path(path).name)) for path in find(*args)]
        if what == "script":
            gpt.SCRIPT += b"\n"
    return gpt.main(list(argv))


def start_ranks(num_ranks: int, run) -> list[int]:
    """Fork the ranks of a job, which call run() and exit with its status. Returns their process ids."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = dict(MASTER_ADDR="localhost", MASTER_PORT=str(probe.getsockname()[1]))
    pids = []
    for rank in range(num_ranks):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks),
                              LOCAL_WORLD_SIZE=str(num_ranks))  # fmt: skip
            sys.exit(run())
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
