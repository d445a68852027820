"""A simulated CUDA device. torch, Inductor and Triton compile for it, and no kernel runs.

Call `pretend(card)` before torch is imported. It may start the process again with a preloaded library. Then fake
tensors can be on "cuda", Inductor generates CUDA code, and Triton compiles it to cubins. The docstring of each mock
gives its reason. Requires g++ and Triton on x86-64 Linux, and torch 2.11 to 2.13.
"""

import atexit
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple


class Card(NamedTuple):
    """Properties of a GPU that compilers query."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int  # maximum bytes of a block (CUDA C++ Programming Guide, compute capabilities)
    gib: int
    gb_per_s: float  # Inductor uses it to choose fusions


CARDS = {"t4": Card("Tesla T4", (7, 5), 40, 64 << 10, 15, 290),
         "a100": Card("NVIDIA A100", (8, 0), 108, 163 << 10, 80, 1830),
         "4090": Card("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 << 10, 24, 900),
         "h100": Card("NVIDIA H100", (9, 0), 132, 227 << 10, 80, 3000),
         "h200": Card("NVIDIA H200", (9, 0), 132, 227 << 10, 139, 4300),
         "5090": Card("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 << 10, 32, 1600)}


def find_obstacle() -> str:
    """The missing requirement of this machine, or ""."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "needs Linux on x86-64"
    if importlib.util.find_spec("triton") is None:
        return "needs Triton"
    return "" if shutil.which("g++") else "needs g++"


def pretend(card: Card) -> None:
    """Load the libraries and install the mocks."""
    preload = build("preload", ["-DPRELOAD"])
    if os.environ.get("FAKE_CUDA") != str(preload):
        os.environ.update(FAKE_CUDA=str(preload), LD_PRELOAD=str(preload))
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os.environ.pop("LD_PRELOAD")  # compilers must not load it
    scratch = tempfile.mkdtemp(prefix="fake_cuda_")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    # no caches and no worker processes, so each compilation is observed
    os.environ.update(TORCHINDUCTOR_FORCE_DISABLE_CACHES="1", TORCHINDUCTOR_COMPILE_THREADS="1",
                      TORCHINDUCTOR_CACHE_DIR=f"{scratch}/inductor", TRITON_CACHE_DIR=f"{scratch}/triton",
                      TRITON_DEFAULT_FP_FUSION="1")
    os.environ.pop("TRITON_INTERPRET", None)
    import torch  # noqa: F401 - the library links to it

    ctypes.CDLL(str(build("guard", torch_flags()))).pretend()
    pretend_device(card)
    pretend_driver(card)
    pretend_to_inductor(card)


def torch_flags() -> list[str]:
    """g++ options for the headers and libraries of torch."""
    folder = Path(importlib.util.find_spec("torch").origin).parent
    include, lib = folder / "include", folder / "lib"
    return [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}",
            f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu"]


def build(name: str, flags: list[str]) -> Path:
    """Compile fake_cuda.cpp. The library is cached in the temporary folder by source date and torch version."""
    source = Path(__file__).with_suffix(".cpp")
    version = importlib.metadata.version("torch")
    stamp = f"{os.getuid()}_{version}_{int(source.stat().st_mtime)}"
    library = Path(tempfile.gettempdir(), f"fake_cuda_{name}_{stamp}.so")
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", *flags[:1], str(source), "-o",
                   str(partial)]
        made = subprocess.run([*command, *flags[1:]], capture_output=True, text=True)
        if made.returncode:
            sys.exit(f"fake_cuda.cpp does not compile against torch {version}: {made.stderr[:400]}")
        partial.replace(library)
    return library


def always(answer):
    """A function that always returns this answer."""
    return lambda *_args, **_kwargs: answer


def pretend_device(card: Card) -> None:
    """Replace torch.cuda: it raises without a driver, and CPU builds lack its C++ functions.

    Fake tensors would initialize it.
    """
    import torch
    import torch._subclasses.fake_tensor as fake_tensor
    import torch.cuda.random

    threads = 2048 if card.capability in ((8, 0), (9, 0)) else 1536
    properties = SimpleNamespace(
        name=card.name, major=card.capability[0], minor=card.capability[1], total_memory=card.gib << 30,
        multi_processor_count=card.multiprocessors, warp_size=32, regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=threads, max_threads_per_block=1024, L2_cache_size=50 << 20,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=card.shared_memory,
        shared_memory_per_multiprocessor=card.shared_memory + 1024, gcnArchName="", uuid="none",
        is_integrated=0, is_multi_gpu_board=0)
    stream = SimpleNamespace(device=torch.device("cuda", 0), device_index=0, device_type=1, stream_id=0,
                             cuda_stream=0)
    answers = dict(is_available=True, is_initialized=True, is_bf16_supported=card.capability >= (8, 0),
                   device_count=1, current_device=0, _exchange_device=0, _maybe_exchange_device=0,
                   set_device=None, _lazy_init=None, synchronize=None, manual_seed=None,
                   manual_seed_all=None, set_rng_state=None, get_rng_state=torch.random.get_rng_state(),
                   current_stream=stream, memory_allocated=0, reset_peak_memory_stats=None,
                   is_current_stream_capturing=False, get_device_name=card.name,
                   get_device_properties=properties, get_device_capability=card.capability,
                   mem_get_info=(card.gib << 30, card.gib << 30))
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name, answer in dict(getDevice=0, getDeviceCount=1, setDevice=None, exchangeDevice=0,
                             maybeExchangeDevice=0, getCurrentRawStream=0).items():
        setattr(torch._C, f"_cuda_{name}", always(answer))
    torch._C._ensureCUDADeviceGuardSet = always(None)
    torch.backends.cuda.is_built = always(True)
    torch.version.cuda = torch.version.cuda or "13.0"  # otherwise Inductor refuses FP8
    fake_tensor.init_gpu_context = always(None)
    fake_tensor.FakeTensorMode.avoid_device_init = property(always(True))


def pretend_driver(card: Card) -> None:
    """Replace the driver of Triton, which names the target. The real driver loads libcuda."""
    import torch
    import torch._inductor.runtime.triton_helpers as helpers
    import torch.utils._triton as torch_triton
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)
    limits = dict(max_shared_mem=card.shared_memory, multiprocessor_count=card.multiprocessors)
    triton.runtime.driver.set_active(SimpleNamespace(
        is_active=always(True), get_current_target=always(target), get_current_device=always(0),
        get_current_stream=always(0), get_device_capability=always(card.capability),
        get_active_torch_device=always(torch.device("cuda", 0)), map_python_to_cpp_type=str,
        utils=SimpleNamespace(get_device_properties=always(limits))))
    torch_triton.has_triton = functools.cache(always(True))
    helpers.set_driver_to_gpu = always(None)


def pretend_to_inductor(card: Card) -> None:
    """Replace the functions with which Inductor measures a GPU, loads kernels, or reads real tensors."""
    import torch
    import torch._inductor.config as config
    import torch._inductor.scheduler as scheduler
    import torch._inductor.utils as utils
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder

    config.shape_padding = False  # it times both shapes
    for name in ("use_static_cuda_launcher", "use_static_triton_launcher"):  # older and newer name (torch 2.13)
        if hasattr(config, name):
            setattr(config, name, False)
    utils.get_gpu_dram_gbps = scheduler.get_gpu_dram_gbps = always(card.gb_per_s)
    utils.copy_misaligned_inputs = always(([], []))

    def check_strides(tensor, size, stride, *_name) -> None:
        """Check the inputs of generated code. The real check refuses fake tensors."""
        assert tuple(tensor.shape) == tuple(size), f"shape {tuple(tensor.shape)}, compiled for {size}"
        wrong = [(a, b) for n, a, b in zip(size, tensor.stride(), stride) if n != 1 and a != b]
        assert not wrong, f"strides {tensor.stride()}, compiled for {stride}"

    guards = torch._C._dynamo.guards
    guards.assert_size_stride, guards.assert_alignment = check_strides, always(None)
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype,
                                                                                 device="cuda:0")
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: tensor.as_strided(
        size, stride, tensor.storage_offset() + offset)
    fold = Folder._deduce_value

    def fold_on_cpu(folder, node):
        """Compute constants of one element on the CPU."""
        before = node.kwargs
        if "cuda" in str(before.get("device")):
            node.kwargs = {**before, "device": torch.device("cpu")}
        try:
            return fold(folder, node)
        finally:
            node.kwargs = before

    Folder._deduce_value = fold_on_cpu
