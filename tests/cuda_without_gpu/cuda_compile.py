"""Compile the training step and validation of train_gpt.py for a simulated GPU and print the figures as JSON.

    python tests/cuda_without_gpu/cuda_compile.py CARD [--micros=2] [--ranks=1] [--own] [--json=FILE] [options]

The options are options of train_gpt.py. The real Trainer runs on fake tensors, which have shapes and no values.
TorchDynamo traces, Inductor and Triton compile to cubins, and the generated code runs without launching kernels.
benchmarks/roofline.py reads the file. The printed line is the part "figures" of the file, or {"error": ...} with
status 1.
"""

import dataclasses
import sys

import fake_cuda

if __name__ == "__main__":
    fake_cuda.pretend(fake_cuda.CARDS[sys.argv[1]])

import argparse
import collections
import contextlib
import functools
import gc
import json
import logging
import re
import subprocess
import tempfile
import time
import traceback
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.runtime.triton_heuristics as heuristics
import triton
from torch._dynamo.utils import counters
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.dont_write_bytecode = True
import train_gpt as gpt  # noqa: E402
from benchmarks import simulate_ranks  # noqa: E402

DEVICE = torch.device("cuda", 0)
MOVES_NOTHING = re.compile(  # views, allocations, reads of one value
    r"(view|as_strided|_?reshape|transpose|permute|slice|select|(un)?squeeze|expand|alias|detach|split|unbind|t\.|"
    r"(new_)?empty|_local_scalar|lift)"
)
READS_ROWS, ADDS_ROWS = re.compile(r"embedding\.|index\."), re.compile(r"index_(add|put)_")
READS_NOTHING = re.compile(r"(new_)?(zero|fill|ones|full|arange)")


class Observer:
    """Record of compiled graphs, launches and live memory. phase is the current part of a run."""

    def __init__(self, card: fake_cuda.Card, is_own_only: bool = False):
        self.is_own_only = is_own_only
        self.card, self.phase, self.running = card, "setup", ""  # running: label of the current graph
        self.exit_stack = contextlib.ExitStack()
        self.graphs: list[dict] = []
        self.kernels: list[dict] = []  # one for each compiled config of each kernel
        self.eager = collections.defaultdict(lambda: collections.defaultdict(lambda: [0, 0]))  # count, bytes
        self.peaks = collections.defaultdict(int)  # bytes of live storages by phase
        self.live, self.seen = 0, weakref.WeakKeyDictionary()
        self.waits: list[str] = []  # operations of a measured step for which Python waits until the GPU is idle
        self.sequence: list[tuple] = []  # graphs, eager operations and collectives, in their order
        self._watch_inductor()

    @functools.cache  # noqa: B019 - functions of one name share a backend and its graphs, as on a GPU
    def backend(self, name: str):
        """Inductor as a backend of torch.compile. Its graphs run on fake tensors."""

        def compile_traced(module, inputs):
            with _disable_current_modes():
                return compile_fx.compile_fx(module, inputs,
                                             inner_compile=functools.partial(self._compile, name))

        return compile_traced

    def _compile(self, name: str, module, inputs, **options):
        direction = "backward" if options.get("is_backward") else "forward"
        graph = dict(label=f"{len(self.graphs)} {name} {direction}", name=name, direction=direction,
                     nodes=[], calls=collections.Counter(), phase=self.phase)
        self.graphs.append(graph)
        start = time.time()
        made = compile_fx.compile_fx_inner(module, inputs, **options)
        graph["seconds"] = time.time() - start
        code = getattr(made, "current_callable", made)

        def run(arguments: list):
            """Run the generated code. The list is emptied, so inputs are freed early, as on a GPU."""
            own, self.running = list(arguments), graph["label"]
            arguments.clear()
            graph["calls"][self.phase] += 1
            self.sequence.append(("graph", graph["label"]))
            try:
                return code(own)
            finally:
                self.running = ""

        run._boxed_call = True
        return run

    def _watch_inductor(self) -> None:
        observer, codegen = self, GraphLowering.codegen

        def codegen_and_note(lowering):
            code = codegen(lowering)
            observer.graphs[-1]["nodes"] = [describe_node(lowering, node)
                                            for node in lowering.scheduler.nodes]
            return code

        def note_kernel(tuner):
            """Describe the cubins instead of loading them. Like Inductor, drop a config that does not fit."""
            made = [describe_kernel(tuner, result, observer.card) for result in tuner.compile_results]
            observer.kernels += made
            if not any(kernel["fits"] for kernel in made):
                raise RuntimeError(f"{made[0]['name']} does not fit: {min(k['shared'] for k in made):,} bytes of "
                                   f"shared memory, {observer.card.name} has {observer.card.shared_memory:,}")
            tuner.launchers = [fake_cuda.always(None) for kernel in made if kernel["fits"]]

        precompile = heuristics.CachingAutotuner.precompile

        def precompile_own(tuner, *args, **options):
            """Skip Triton's compilation of kernels that Inductor generated, which are nearly all kernels."""
            if not tuner.inductor_meta.get("kernel_name", tuner.fn.__name__).startswith("triton_"):
                precompile(tuner, *args, **options)

        if self.is_own_only:
            heuristics.CachingAutotuner.precompile = precompile_own
        GraphLowering.codegen, GraphLowering.count_bytes = codegen_and_note, fake_cuda.always((0, [], []))
        heuristics.CachingAutotuner._make_launchers = note_kernel
        heuristics.CachingAutotuner._dynamic_scale_rblock = fake_cuda.always(None)  # needs a loaded kernel
        heuristics.CachingAutotuner.run = fake_cuda.always(None)

    def note_operation(self, name: str, inputs: list, outputs: list) -> None:
        """Count an eager operation, and the memory of its results until they are freed."""
        for tensor in outputs if not ADDS_ROWS.match(name) else ():  # these write into an input
            storage = tensor.untyped_storage()
            if storage not in self.seen:
                self.seen[storage] = True
                size = -(-storage.nbytes() // 512) * 512  # the rounding of the allocator
                self.live += size
                weakref.finalize(storage, self._free, size)
                self.peaks[self.phase] = max(self.peaks[self.phase], self.live)
        if outputs and not self.running and not MOVES_NOTHING.match(name):
            entry = self.eager[self.phase][name]
            entry[0] += 1
            if READS_ROWS.match(name):  # the read rows have the size of the output
                inputs = [*inputs[1:], *outputs]
            elif ADDS_ROWS.match(name):  # reads and writes one row of the table for each input row
                inputs, outputs = inputs[1:], 2 * inputs[-1:]
            num_bytes = sum(t.nbytes for t in (outputs if READS_NOTHING.match(name) else inputs + outputs))
            entry[1] += num_bytes
            self.sequence.append(("eager", num_bytes))

    def _free(self, size: int) -> None:
        self.live -= size


class ObservedMode(FakeTensorMode):
    """Fake tensors. An observer notes each of their operations."""

    def __init__(self, observer: Observer):
        super().__init__(allow_non_fake_inputs=True)
        self.observer, self.is_nested = observer, False

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if operation is torch.ops.aten._scaled_mm.out:  # called by generated code, and without a fake form
            others = {name: value for name, value in kwargs.items() if name != "out"}
            made = super().__torch_dispatch__(torch.ops.aten._scaled_mm.default, types, args, others)
            assert made.shape == kwargs["out"].shape and made.dtype == kwargs["out"].dtype, "FP8 buffer"
            return kwargs["out"]
        before, self.is_nested = self.is_nested, True
        try:
            result = super().__torch_dispatch__(operation, types, args, kwargs)
        finally:
            self.is_nested = before
        if not self.is_nested and self.observer.phase.startswith("measured") and is_wait(operation, args, kwargs):
            self.observer.waits.append(str(operation))
        if not self.is_nested:  # a fake form makes tensors that a GPU does not make
            self.observer.note_operation(str(operation).removeprefix("aten."), list_cuda((args, kwargs)),
                                         list_cuda(result))
        return result


def is_wait(operation, args, kwargs) -> bool:
    """Whether an operation waits for the GPU: it reads a number, or copies to or from it without non_blocking."""
    aten = torch.ops.aten
    if operation is aten._local_scalar_dense.default:
        return args[0].is_cuda
    if operation is aten.copy_.default:
        target, source, *is_asynchronous = args
        target = target.device
    elif operation is aten._to_copy.default:
        source, *is_asynchronous = args
        target = kwargs.get("device") or source.device
    else:
        return False
    is_asynchronous = any(is_asynchronous) or kwargs.get("non_blocking", False)
    return torch.device(target).type != source.device.type and not is_asynchronous


def list_cuda(tree) -> list[torch.Tensor]:
    """The CUDA tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)
            and leaf.device.type == "cuda"]


def describe_node(lowering: GraphLowering, node) -> dict:
    """Bytes and FLOPs of a kernel or library call, if each buffer is read or written once."""
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    kind, call, flops = type(node).__name__.removesuffix("SchedulerNode"), "", 0
    if kind == "ExternKernel":
        names = (getattr(parts[0], key, None) for key in ("python_kernel_name", "op_overload"))
        call = str(next(filter(None, names), type(parts[0]).__name__))
        # of views the visible part. The inputs of our Triton kernels include their outputs
        tensors = [*parts[0].inputs, *([parts[0]] if "mm" in call else [])]
        distinct = {getattr(tensor, "get_name", tensor.__repr__)(): tensor for tensor in tensors}
        num_bytes = sum(count_bytes(tensor) for tensor in (tensors if "mm" in call else distinct.values()))
        call = find_kernel(parts[0]) or call
        if call == "relu2_matmul_kernel":
            (rows, inner), columns = tensors[0].get_size(), tensors[1].get_size()[1]
            flops = 2 * int(rows) * int(inner) * int(columns)
            call += "_fp8" if tensors[0].get_dtype().itemsize == 1 else ""
        if call == "qkv_kernel":  # of the packed matrix it reads the queries and keys
            packed, q = tensors[0], tensors[5]
            num_bytes += 2 * count_bytes(q) - count_bytes(packed)
    else:
        touched = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
        real = lowering.scheduler.mutation_real_name  # of buffers that are written in place
        num_bytes = sum(min(size, int(lowering.get_numel(name)) * lowering.get_dtype(name).itemsize)
                        for name, size in ((real.get(name, name), size) for name, size in touched.items()))
    origins = [origin for part in parts for origin in getattr(part, "origins", ())]
    traces = "".join(origin.meta.get("stack_trace") or "" for origin in origins)
    return dict(kind=kind, call=call, is_template=any(part.is_template() for part in node.get_nodes()),
                bytes=num_bytes, flops=flops or int(node.estimate_flops() or 0),
                lines=sorted(set(map(int, re.findall(r'train_gpt.py", line (\d+)', traces)))),
                operations=sorted({str(o.target) for o in origins if o.op == "call_function"}))


def find_kernel(part) -> str:
    """The name of a Triton kernel of train_gpt.py, or ""."""
    if not hasattr(part, "kernel_idx"):
        return ""
    return triton_kernel_wrap.kernel_side_table.get_kernel(part.kernel_idx).fn.__name__


def count_bytes(tensor) -> int:
    """Bytes of an Inductor tensor."""
    size = 1
    for length in tensor.get_size():
        size *= int(length)
    return size * tensor.get_dtype().itemsize


def describe_kernel(tuner, result, card: fake_cuda.Card) -> dict:
    """Figures of one config of a Triton kernel: instructions from its PTX, registers and spills from its cubin."""
    kernel, name = result.kernel, tuner.inductor_meta.get("kernel_name", tuner.fn.__name__)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True,
                               check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    ptx = kernel.asm["ptx"]
    return dict(name=name, registers=int(registers), stack=int(stack), shared=kernel.metadata.shared,
                fits=kernel.metadata.shared <= card.shared_memory, fp64=ptx.count(".f64"),
                wgmma=ptx.count("wgmma.mma_async"),
                wide_loads=ptx.count("ld.global.v") + ptx.count(".v4.b32"))


class EagerKernel:
    """A Triton kernel that no compiled graph launches. Its last argument that is a tensor is the result."""

    def __init__(self, kernel, observer: Observer):
        self.kernel, self.observer, self.is_compiled = kernel, observer, False

    def __getitem__(self, grid: tuple):
        def launch(*args, **options) -> None:
            *inputs, output = list_cuda(args)
            self.observer.note_operation(self.kernel.fn.__name__, inputs, [output])
            if not self.is_compiled:
                args = [x.dtype if isinstance(x, torch.Tensor) else x for x in args]
                made = SimpleNamespace(kernel=self.kernel.warmup(*args, grid=grid, **options))
                tuner = SimpleNamespace(fn=self.kernel.fn, inductor_meta=dict(
                    kernel_name=f"{self.kernel.fn.__name__}_0"))
                self.observer.kernels.append(describe_kernel(tuner, made, self.observer.card))
                self.is_compiled = True

        return launch


@contextlib.contextmanager
def values_are(value):
    """Return this value whenever a fake tensor is converted to a number or a bool."""
    names = ("__bool__", "item")
    before = {name: FakeTensor.__dict__.get(name) for name in names}
    for name in names:
        setattr(FakeTensor, name, lambda _tensor: value)
    yield
    for name in names:
        delattr(FakeTensor, name) if before[name] is None else setattr(FakeTensor, name, before[name])


class FakeBatches:
    """Batches without values, for prefetch() and ValData. No token is read twice, so tables send the most rows."""

    def __init__(self, batch_tokens: int, cfg: gpt.Config, num_ranks: int = 1, num_batches: int = 0,
                 num_classes: int | None = None, seq_len: int = 1):
        self.batch_tokens, self.num_batches = batch_tokens, num_batches
        plan, num_kinds = functools.partial(self.plan_rows, num_ranks=num_ranks), cfg.ngram_order - 1
        types = torch.int32, torch.int64, torch.int32
        shape = batch_tokens // seq_len, num_classes or 0
        self.batch = gpt.Batch(
            *(torch.empty(batch_tokens, dtype=kind, device=DEVICE) for kind in types),
            classes=torch.empty(shape, dtype=torch.int64, device=DEVICE) if num_classes else None,
            token_plan=plan(batch_tokens),
            ngram_plan=plan(num_kinds * batch_tokens) if cfg.ngram_rows else None,
            sign_rows=torch.empty(num_kinds, batch_tokens, dtype=torch.int32, device=DEVICE))

    def plan_rows(self, num_rows: int, num_ranks: int) -> gpt.RowPlan:
        rows = torch.empty(num_rows, dtype=torch.int64, device=DEVICE)
        return gpt.RowPlan(rows, rows, rows, *[(num_rows // num_ranks,) * num_ranks] * 2)

    def __next__(self) -> gpt.Batch:
        return self.batch

    def batches(self, _comm: gpt.Comm, num_batches: int):
        return ((self.batch, True) for _ in range(num_batches))


class NotingRecorder(simulate_ranks.Recorder):
    """Add collectives to the sequence of an observer."""

    def __init__(self, rt: gpt.Runtime, observer: Observer):
        super().__init__(rt)
        self.sequence = observer.sequence

    def add(self, event: simulate_ranks.Event) -> None:
        self.sequence.append(("event", *event))


def make_trainer(cfg: gpt.Config, observer: Observer, num_ranks: int) -> gpt.Trainer:
    """The real Trainer, with the fast forms of a GPU on which all are right."""
    gpt.measure_matmul = lambda *_: 1e15  # a fake GPU has no time
    gpt.row_sums_kernel = EagerKernel(gpt.row_sums_kernel, observer)
    gpt.print_phase = fake_cuda.always(None)  # it prints, and stdout is for the figures
    gpt.FormCheck = lambda *_: SimpleNamespace(keep_equal=lambda names, *_: names, lines=[],
                                               find_graph_error=lambda *_: "nothing can be captured here")
    comm = gpt.Comm(0, num_ranks)
    rt = dataclasses.replace(gpt.choose_precision(cfg, gpt.Runtime(DEVICE)), comm=comm)
    init = gpt.GPT.__init__

    def init_on_card(model, *args, **kwargs) -> None:
        """Create the parameters on the GPU, because fake tensors cannot be moved."""
        with DEVICE:
            init(model, *args, **kwargs)

    gpt.GPT.__init__, gpt.GPT.to = init_on_card, lambda model, _device: model
    if num_ranks > 1:
        observer.exit_stack.enter_context(NotingRecorder(rt, observer).replace_collectives())
    trainer = gpt.Trainer(cfg, rt)
    trainer.optimizer.check_ranks = trainer.optimizer.finish  # there are no other ranks to compare with
    step = trainer.optimizer.step

    def step_in_own_phase(*args, **kwargs) -> None:
        before, observer.phase = observer.phase, observer.phase + " update"
        step(*args, **kwargs)
        observer.phase = before

    trainer.optimizer.step = step_in_own_phase
    return trainer


def drive(cfg: gpt.Config, observer: Observer, micros: int, num_ranks: int) -> dict:
    """Compile each part of a run, then run all parts again, which must compile nothing. Returns metadata."""
    torch.compile = lambda f, **_: real_compile(
        f, dynamic=False, backend=observer.backend(getattr(f, "func", f).__qualname__)
    )
    with ObservedMode(observer), values_are(True):
        trainer = make_trainer(cfg, observer, num_ranks)
    accum, rows = gpt.divide_step(cfg, 1, cfg)  # stages without values of their own
    micro_tokens, last = rows * cfg.seq_len, cfg.num_iterations - 1
    val_tokens = max(1, cfg.micro_batch_tokens // cfg.val_seq_len) * cfg.val_seq_len

    def run_step(at: int) -> None:
        state = trainer.schedule.at(at)
        stage = dataclasses.replace(state.stage, tokens_per_step=micros * micro_tokens * num_ranks)
        batches = FakeBatches(micro_tokens, cfg, num_ranks, num_classes=stage.num_classes, seq_len=stage.seq_len)
        for _ in range(cfg.longest_period):
            trainer.train_step(batches, state._replace(stage=stage))

    def validate(at: int) -> None:
        with values_are(1.0):
            trainer.validate(FakeBatches(val_tokens, cfg, num_ranks, num_batches=2), trainer.schedule.at(at))

    again = []
    for phase, action, at, is_first in (
        ("training", run_step, 0, True), ("training", run_step, last, False),
        ("validation", validate, cfg.num_iterations, True), ("validation", validate, 0, False),
        ("training", run_step, 0, False), ("measured", run_step, 0, False)):
        num_graphs, observer.phase = len(observer.graphs), phase
        # the head has a separate graph for each number of targets
        first_stage, last_stage = cfg.stages[0], cfg.stages[-1]
        is_first |= at == last and len(first_stage.loss_weights) != len(last_stage.loss_weights)
        observer.sequence.clear()
        gc.collect()  # reference cycles of the compiler keep activations alive
        with ObservedMode(observer):
            action(at)
        if is_first:  # during compilation live memory depends on garbage collection
            for name in (phase, f"{phase} update"):
                observer.peaks.pop(name, None)
        again += [] if is_first else [graph["label"] for graph in observer.graphs[num_graphs:]]
        print(f"{phase} at step {at}: {len(observer.graphs) - num_graphs} graphs", file=sys.stderr,
              flush=True)
    spans = [(stage.duration, getattr(stage, f"window_{spec.attention}")) for stage in cfg.stages
             for spec in cfg.layers if spec.attention != "none"]
    return dict(recompiled=again, micros=micros * cfg.longest_period, updates=cfg.longest_period,
                sequence=list(observer.sequence), ranks=num_ranks,
                micros_per_step=accum, micro_tokens=micro_tokens, model_dim=cfg.model_dim,
                mean_window=sum(duration * window for duration, window in spans)
                / sum(duration for duration, _ in spans),
                bytes_per_rank=2 * sum(p.nbytes for bucket in trainer.optimizer.buckets
                                       if bucket not in trainer.optimizer.tables for p in bucket.params.values()))


def summarize(observer: Observer, facts: dict) -> dict:
    """The figures that the tests assert."""
    used = {}
    for kernel in observer.kernels:
        most = used.setdefault(kernel["name"], dict(stack=0, fp64=0, wgmma=0, wide_loads=0, fits=True))
        for key in most:
            most[key] = (min if key == "fits" else max)(most[key], kernel[key])
    eager, training = observer.eager["measured"], ("training", "training update", "measured")
    peaks = dict(training=max(observer.peaks[phase] for phase in training) / 1e9,
                 validation=observer.peaks["validation"] / 1e9)
    return dict(card=observer.card.name, torch=torch.__version__, triton=triton.__version__,
                graphs=dict(collections.Counter(graph["phase"] for graph in observer.graphs)),
                graph_breaks=dict(counters["graph_break"]), recompiled=facts["recompiled"],
                fp64={name: k["fp64"] for name, k in used.items() if k["fp64"]},
                spills={name: k["stack"] for name, k in used.items() if k["stack"]},
                too_large=sorted(name for name, k in used.items() if not k["fits"]),
                own={name: k for name, k in used.items() if not name.startswith("triton_")},
                launches_per_micro=sum(count_launches(graph) * graph["calls"]["measured"]
                                       for graph in observer.graphs) // facts["micros"],
                waits=observer.waits,
                eager_per_micro=sum(count for count, _ in eager.values()) // facts["micros"],
                additions_per_micro=eager["add_.Tensor"][0] // facts["micros"],
                eager_gb_per_micro=sum(size for _, size in eager.values()) / facts["micros"] / 1e9,
                peak_gb=peaks, compile_seconds=round(sum(graph["seconds"] for graph in observer.graphs)))


def count_launches(graph: dict) -> int:
    """Number of kernels and library calls of a graph."""
    return sum(node["kind"] != "NopKernel" for node in graph["nodes"])


def explain(error: Exception) -> str:
    """The innermost reason of an error, and the kernel if a compiler names one."""
    lines = [line.strip() for line in str(error).splitlines() if "Error" in line or "does not fit" in line]
    kernel = re.search(r"^def (\w+)\(", str(error), re.MULTILINE)
    return f"{kernel[1] if kernel else type(error).__name__}: {(lines or [str(error)[:300]])[-1][:300]}"


real_compile = torch.compile


def main(argv: list[str]) -> int:
    """Compile and print the figures. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", choices=fake_cuda.CARDS)
    parser.add_argument("--micros", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks. Rank 0 is compiled")
    parser.add_argument("--own", action="store_true", help="compile only Triton kernels of train_gpt.py")
    parser.add_argument("--json", help="file for the figures, graphs and kernels")
    args, options = parser.parse_known_args(argv)
    warnings.simplefilter("ignore")
    for name in ("torch._inductor", "torch._inductor.runtime.triton_heuristics"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are reported below
    torch.set_float32_matmul_precision("high")  # like start_runtime()
    observer = Observer(fake_cuda.CARDS[args.card], args.own)
    try:
        cfg = gpt.make_config({"preset": "record_32", **gpt.parse_argv(options)})
        facts = drive(cfg, observer, args.micros, args.ranks)
    except Exception as error:  # compilers raise many types
        traceback.print_exc()
        print(json.dumps(dict(error=explain(error))))
        return 1
    figures = summarize(observer, facts)
    if args.json:
        result = dict(figures=figures, options=options, **facts, graphs=observer.graphs,
                      eager=observer.eager, kernels=observer.kernels)
        Path(args.json).write_text(json.dumps(result))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
