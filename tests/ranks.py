"""Run a function as every rank of a job: forks of one process, so that PyTorch is imported only once.

python tests/ranks.py FUNCTION N ARGUMENT...   prints a JSON list [[exit status or -signal, seconds], ...] by rank
"""

import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt as gpt  # noqa: E402


def count_bytes(sent: dict[str, float]) -> None:
    """Replace the collectives by ones that also count what this rank gives to others, from the tensors themselves."""

    def wrap(name, size):
        real = getattr(dist, name, None)

        def counted(*args, **kwargs):
            sent[name] += size(*args)
            return real(*args, **kwargs)

        setattr(dist, name, counted)

    rank, others = dist.get_rank(), dist.get_world_size() - 1
    old = not hasattr(dist, "all_gather_single")  # PyTorch 2.13 renamed these two
    wrap(
        "reduce_scatter_tensor" if old else "reduce_scatter_single",
        lambda shard, full: full.nbytes - shard.nbytes,
    )
    wrap(
        "all_gather_into_tensor" if old else "all_gather_single",
        lambda full, shard: shard.nbytes * others,
    )
    wrap(
        "all_to_all_single",
        lambda _, given, __, counts: (
            given.nbytes - (given[0].nbytes * counts[rank] if counts[rank] else 0) if sum(counts) else 0
        ),
    )


def use_multipliers(model: torch.nn.Module) -> None:
    """Give every other parameter a learning rate and a decay of its own: they then differ inside the stacks."""
    for i, param in enumerate(model.parameters()):
        param.spec = gpt.ParamSpec(param.spec.group, lr_mul=1 - 0.5 * (i % 2), wd_mul=1 + i % 3)


def note_overlap(trainer: gpt.Trainer) -> dict:
    """Note in the last step what was sent, in which order, when backward reached the embedding, and how many bins of
    the first block, the last block and the head are still on their way back when the first block begins."""
    optimizer, notes = trainer.optimizer, {}
    first, last, head = (
        {bin for name, bins in optimizer.owners.items() if name.startswith(prefix) for bin in bins}
        for prefix in ("blocks.0.", f"blocks.{len(trainer.model.blocks) - 1}.", "head.")
    )

    def note_sent(_):
        if optimizer.is_armed:
            notes["sent"] = [bin.name for bin in optimizer.launched]

    def note_awaited(*_):  # registered later than the hook that waits for the first block's own parameters
        if optimizer.step_count == 9:
            counts = [
                sum(bin.wait_gathered is not None for bin in bins) for bins in (first, last - first, head)
            ]
            notes.setdefault("awaited", counts)  # of the first micro-batch

    trainer.model.embed.register_post_accumulate_grad_hook(note_sent)
    trainer.model.blocks[0].register_forward_pre_hook(note_awaited)
    return notes


def equality(out: str, cases: str) -> None:
    """Ten steps of each case; rank 0 saves the parameters, what was sent, and what overlapped."""
    torch.set_num_threads(1)
    cfgs = {name: gpt.make_config(changes) for name, changes in json.loads(cases).items()}
    rt, results, sent = gpt.start_runtime(next(iter(cfgs.values()))), {}, defaultdict(float)
    if rt.world_size > 1:
        count_bytes(sent)
    build = gpt.GPT.__init__

    def build_with_multipliers(self, *args):
        build(self, *args)
        use_multipliers(self)

    gpt.GPT.__init__ = build_with_multipliers
    for name, cfg in cfgs.items():
        cfg = dataclasses.replace(cfg, seed=rt.rank)  # rank 0's weights must reach all
        trainer = gpt.Trainer(cfg, rt)
        notes = note_overlap(trainer) if rt.world_size > 1 else {}
        data = gpt.TrainData(cfg, trainer.schedule)
        batches = gpt.Prefetcher(data.batches(cfg, rt, 0, 10), rt.device)
        totals = torch.zeros(2, dtype=torch.float64)
        for step in range(10):
            sent.clear()
            before = rt.traffic.num_bytes
            trainer.train_step(batches, trainer.schedule.at(step))
            totals += torch.tensor([sum(sent.values()), rt.traffic.num_bytes - before], dtype=torch.float64)
            if step < 8:  # the check waits for all parameters, and overlap is noted in the last step
                trainer.optimizer.check_ranks()
        batches.close()
        gpt.all_reduce_sum(totals, rt)
        trainer.optimizer.check_ranks()
        results[name] = dict(
            params={n: p.detach().clone() for n, p in trainer.model.named_parameters()},
            sent=totals[0].item() / 10 / rt.world_size,
            reported=totals[1].item() / 10 / rt.world_size,
            minimum=trainer.optimizer.minimum_bytes,
            owned=[len(bin.shard) for bin in trainer.optimizer.bins],
            notes=notes,
        )
    if rt.is_main:
        torch.save(results, out)
    gpt.wait_for_ranks(rt)
    if rt.world_size > 1:
        dist.destroy_process_group()


def compile_slowly(seconds: float) -> None:
    """A real TorchDynamo compilation that takes this long."""

    def backend(graph, _):
        time.sleep(seconds)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))


def fail(mode: str, at_rank: str, *argv: str) -> int:
    """A real run in which one rank fails (mode "none": does not), in the second step after the three of the warm-up.

    at_rank may be RANK@STEP, where STEP counts those of the warm-up, too.
    """
    torch.set_num_threads(1)
    real, steps = gpt.Trainer.train_step, iter(range(1, 10**6))
    at_rank, _, at_step = at_rank.partition("@")
    end_step = gpt.Guard.end_step

    def end_step_and_compare(self, *args):
        end_step(self, *args)
        counts = gpt.share_from_main(self.trainer.progress.num_actions, self.trainer.rt)
        assert counts == self.trainer.progress.num_actions, "rank 0 has acted otherwise"

    write = gpt.write_atomic

    def write_slowly(path, data):
        time.sleep(5.5 if path.suffix == ".pt" else 0)
        write(path, data)

    if mode == "slow disk":
        gpt.write_atomic = write_slowly
    if mode == "nan":
        gpt.Guard.end_step = end_step_and_compare

    def train_step(self, *args):
        if self.rt.rank == int(at_rank) and next(steps) == int(at_step or 5):
            if mode == "raise":
                raise ValueError("one step too many")
            if mode == "input":
                raise gpt.InputError("this node has no such file: copy it there")
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if mode == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if mode == "nan":
                self.optimizer.owners["embed"][0].grads[:3] = float("nan")
            if mode in ("term", "int"):
                os.kill(os.getpid(), signal.SIGTERM if mode == "term" else signal.SIGINT)
            if mode == "stall":
                time.sleep(1000)
            if mode == "compile":
                compile_slowly(8)
            if mode == "compile_backward":  # which autograd does in a thread of its own
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(compile_slowly, 8).result()
            if mode == "differ":
                loss = real(self, *args)
                self.optimizer.finish()
                self.model.scalars.data[0] += 1e-6
                return loss
        return real(self, *args)

    gpt.Trainer.train_step = train_step
    return gpt.main(list(argv))


def main() -> None:
    """Fork, wait for all, print how each ended."""
    function, num_ranks, *arguments = sys.argv[1:]
    if "RANK" in os.environ:  # torchrun has started this process as a rank
        sys.exit(globals()[function](*arguments))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    start, pids, ends = time.monotonic(), [], {}
    for rank in range(int(num_ranks)):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(
                MASTER_ADDR="localhost",
                MASTER_PORT=str(port),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=num_ranks,
                LOCAL_WORLD_SIZE=num_ranks,
            )
            sys.exit(globals()[function](*arguments))
    while len(ends) < len(pids):
        pid, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):  # a frozen rank: put an end to it once the others have left
            ends[pid] = [-os.WSTOPSIG(status), round(time.monotonic() - start, 1)]
        else:
            ends[pid] = [os.waitstatus_to_exitcode(status), round(time.monotonic() - start, 1)]
    for pid in pids:
        if ends[pid][0] == -signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
    print(json.dumps([ends[pid] for pid in pids]))


if __name__ == "__main__":
    main()
