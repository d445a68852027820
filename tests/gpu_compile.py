"""Compile the Triton kernels for GPUs that are not here, and trace their launches as torch.compile does.

Run as a script, since Triton decides at import whether it interprets; prints one JSON object.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from torch.utils import _triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1]))
CAPABILITIES = (80, 89, 90, 120)  # Ampere, Ada, Hopper, consumer Blackwell


class HopperDriver:
    """The part of Triton's driver that is asked when a launch is traced."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


_triton.has_triton = lambda *_: True  # before TorchDynamo asks
triton.runtime.driver.set_active(HopperDriver())

from torch._dynamo.backends.common import aot_autograd  # noqa: E402

import train_gpt  # noqa: E402


def compile_kernel(kernel, pointers: str, constants: dict, **options) -> dict:
    """PTX for each capability: bytes of shared memory, and counts of the instructions that matter.

    As a launch does, it tells the compiler that pointers and sizes are multiples of 16.
    """
    types = iter(pointers.split())
    signature = {name: next(types) if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    signature.update({name: "fp32" for name in ("alpha", "beta", "grad_scale", "cap") if name in signature})
    signature.update({name: "constexpr" for name in constants})
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind not in ("fp32", "constexpr")
    }
    found = {}
    for capability in CAPABILITIES:
        made = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", capability, 32),
            options=options,
        )
        ptx = made.asm["ptx"]
        found[capability] = dict(
            shared=made.metadata.shared,
            **{word: ptx.count(word) for word in ("wgmma.mma_async", "mma.sync", "cp.async.cg")},
            wide_loads=ptx.count("ld.global.v"),
        )
    return found


def trace(function, *args) -> dict:
    """Take `function` through TorchDynamo and AOTAutograd without a graph break; what its launches write."""
    graphs = []

    def record(graph, _inputs):
        graphs.append(graph)
        raise InterruptedError  # nothing here could run it

    try:
        torch.compile(function, backend=aot_autograd(fw_compiler=record), fullgraph=True)(*args)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        assert isinstance(error.inner_exception, InterruptedError), error
    launches = [node for node in graphs[0].graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    return dict(
        launches=len(launches), writes=sorted({n for x in launches for n in x.kwargs["tensors_to_clone"]})
    )


def main() -> None:
    symmetric = dict(BLOCK=128, DEPTH=64)
    report = dict(
        symmetric=compile_kernel(
            train_gpt.symmetric_kernel,
            "*bf16 *bf16 *bf16",
            dict(HAS_ADD=True, **symmetric),
            num_warps=8,
            num_stages=4,
        ),
        cross_entropy=compile_kernel(
            train_gpt.cross_entropy_kernel, "*bf16 *i64 *fp32 *bf16", dict(BLOCK=4096), num_warps=8
        ),
        cross_entropy_fp8=compile_kernel(
            train_gpt.cross_entropy_kernel, "*bf16 *i64 *fp32 *fp8e5", dict(BLOCK=4096), num_warps=8
        ),
    )
    train_gpt.LOGITS_CHUNK = 128
    x, weight = (torch.randn(size, 64, dtype=torch.bfloat16, requires_grad=True) for size in (256, 512))
    for name, use_fp8 in (("head", False), ("head_fp8", True)):
        report[name] = trace(
            train_gpt.HeadLoss.apply, x, weight, torch.zeros(256).long(), 15.0, use_fp8, True
        )
    scalars = map(torch.tensor, (0.9, 1.0, 1.0, 1.0))
    knobs = train_gpt.Knobs(*scalars, (0.9, 0.95), 1e-8, torch.bfloat16, True)
    with torch.no_grad():
        report["muon"] = trace(
            lambda p, g, m, lr: train_gpt.update_muon(p, g, dict(momentum=m), lr, lr * 0, knobs),
            *torch.randn(3, 4, 64, 96),
            torch.full((1, 1, 1), 0.1),
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
