"""Shared by the tests: the module, small shards, short runs in this process, and the script in its own process."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads slow down other processes

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

if not torch.cuda.is_available():  # before train_gpt imports Triton: its kernels then run on CPU tensors
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_gpt.py"
sys.path.insert(0, str(ROOT))
import train_gpt as gpt  # noqa: E402
from data.text import BYTE_BOS, BYTE_VOCAB_SIZE, make_embedded_corpus, write_shard  # noqa: E402

VOCAB, BOS = BYTE_VOCAB_SIZE, BYTE_BOS
# begin with these files
LONGEST = """cuda_compile edits fast_forms options step_graphs kernel_benchmark cuda_compile_cards distributed tune records
    benchmarks compare whole_run_92 whole_run checkpoint""".split()


def pytest_configure(config):
    """Make the text of the small presets, as run.sh does, before the workers start."""
    if not hasattr(config, "workerinput") and not (ROOT / "data/torch_source/corpus.json").exists():
        with chdir(ROOT):
            make_embedded_corpus()


def pytest_collection_modifyitems(config, items):
    """Skip tests marked gpu without a GPU. Deselect tests marked slow or cards unless -m names the marker."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for kind in ("slow", "cards"):
        if kind not in config.option.markexpr:
            left_out = [item for item in items if item.get_closest_marker(kind)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True, scope="session")
def compute_little():
    """One thread, because with small tensors more threads only add noise and time. A measured matmul of size 256 on
    CPUs, because in bfloat16 size 1,024 takes half a minute on some processors."""
    torch.set_num_threads(1)
    real = gpt.measure_matmul
    gpt.measure_matmul = lambda device, dtype, size: real(device, dtype, size if device.type == "cuda" else 256)
    yield
    gpt.measure_matmul = real


@pytest.fixture(autouse=True)
def keep_matmul_precision():
    """choose_dtype() sets it for the whole process. In a run in float64 it cannot see whether oneDNN rounds float32."""
    setting = torch.backends.mkldnn.matmul
    precision = setting.fp32_precision
    yield
    setting.fp32_precision = precision


def slow_but(values, *quick) -> list:
    """Parameters of a test. All values except `quick` are marked slow."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in quick else pytest.param(*row, marks=pytest.mark.slow) for value, row in rows]


@contextmanager
def at_most(seconds: int):
    """Raise TimeoutError if the body takes longer. The limit only guards against an endless wait."""

    def give_up(*_):
        raise TimeoutError(f"not done after {seconds} seconds")

    old = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def make_documents(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Documents of arithmetic progressions of bytes, learnable in a few steps. uint16, each starts with BOS."""
    parts, total = [], 0
    while total < num_tokens:
        length = int(rng.integers(20, 600))
        text = int(rng.integers(97, 117)) + np.arange(length) * int(rng.integers(1, 3)) % 6
        parts += [np.array([BOS], np.uint16), text.astype(np.uint16)]
        total += length + 1
    return np.concatenate(parts)


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """A folder with two training shards and one validation shard."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    for name, size in (("train_0", 40_000), ("train_1", 400_000), ("val_0", 12_000)):
        write_shard(folder / f"{name}.bin", make_documents(rng, size), VOCAB, BOS)
    return folder


def data_args(shards: Path) -> list[str]:
    """Options that make a run read the test shards."""
    return [f"--train_files={shards}/train_*.bin", f"--val_files={shards}/val_*.bin"]


def smoke_config(shards: Path | None = None, **changes) -> gpt.Config:
    """The smoke preset on the test shards, with changes."""
    files = dict(train_files=f"{shards}/train_*.bin", val_files=f"{shards}/val_*.bin") if shards else {}
    return gpt.make_config({"preset": "smoke", "device": "cpu", **files, **changes})


def make_runtime(rank: int = 0, world_size: int = 1, **changes) -> gpt.Runtime:
    """A float32 CPU runtime with plain forms. With several ranks no collective may be called."""
    return gpt.Runtime(comm=gpt.Comm(rank, world_size), **{"peak_flops": 1e9, **changes})


def call_tool(capsys, main, *args) -> tuple[int, str, str]:
    """Run a tool in this process. Returns (status, stdout, stderr)."""
    capsys.readouterr()
    try:
        status = main(*args)
    except SystemExit as end:  # of argparse
        status = end.code
    return status, *capsys.readouterr()


def launch(command: list[str], cwd: Path, nproc: int = 1, env: dict | None = None):
    """Run a script in a child process, or under torchrun if nproc > 1. Returns the finished process."""
    launcher = [sys.executable]
    if nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run([*launcher, *command], cwd=cwd, capture_output=True, text=True, timeout=3000, env=env)


def run_script(args: list[str], cwd: Path, script: Path = SCRIPT, nproc: int = 1):
    """Run the trainer as a user would, by default on the CPU."""
    return launch([str(script), "--device=cpu", *args], cwd, nproc)


def smoke_run(shards: Path, cwd: Path, *args: str, nproc: int = 1) -> dict:
    """A smoke run that must succeed. One rank runs in this process. Returns its json with "stdout" and "path"."""
    before, words = set(cwd.rglob("*.json")), ["--preset=smoke", *data_args(shards), *args]
    if nproc > 1:
        done = run_script(words, cwd, nproc=nproc)
        assert done.returncode == 0, done.stderr[-2000:]
        text = done.stdout
    else:
        with chdir(cwd), redirect_stdout(io.TextIOWrapper(io.BytesIO(), write_through=True)) as out:
            assert gpt.main(["--device=cpu", *words]) == 0
        text = out.buffer.getvalue().decode()
    (result,) = set(cwd.rglob("*_seed*.json")) - before
    return {**json.loads(result.read_text()), "stdout": text, "path": result}


TIMES = r"train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
VAL_LINE = re.compile(rf"^step:(\d+)/(\d+) val_loss:(\d+\.\d{{4}}) {TIMES}$", re.M)
STEP_LINE = re.compile(rf"^step:(\d+)/(\d+) {TIMES} train_loss:(\d+\.\d{{4}}|nan)$", re.M)
CPU_FORMS = frozenset({"rms_norm", "block_attention", "head_loss"})  # those that a CPU chooses
TINY = ["--preset=smoke", "--device=cpu", "--num_layers=2", "--tokens_per_step=512", "--warmup_iterations=0"]
TINY += ["--val_tokens=1024"]
AT_THE_END = "--val_loss_every=0"  # the only validation


@pytest.fixture(name="here")
def enter_folder(tmp_path, monkeypatch):
    """A new folder, in which the test runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(name="eager_flex")
def run_flex_attention_on_a_cpu(monkeypatch):
    """Not compiled. It refuses gradients on a CPU, where only the eager form has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(gpt, "compile_flex_attention", lambda: flex_attention)


@pytest.fixture(name="now")
def replace_clock(monkeypatch):
    """The time in seconds, in a list. Only the test advances it."""
    seconds = [1000.0]
    monkeypatch.setattr(gpt.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(gpt, "measure_matmul", lambda *_: 1e9)
    return seconds


def before_call(monkeypatch, owner, name, do) -> None:
    """Call do(*arguments) before the real function."""
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        do(*args)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


def at_step(monkeypatch, step, act) -> None:
    """Call act() once, before this step of a run in this process. Steps count from 1, without the warm-up."""
    is_ready, calls = [], []

    def do(trainer, *_):
        if is_ready and trainer.progress.step + 1 == step and not calls:
            calls.append(step)
            act()

    before_call(monkeypatch, gpt.Trainer, "train_step", do)
    before_call(monkeypatch, gpt.Stop, "catch_signals", lambda _stop: is_ready.append(True))


def advance(monkeypatch, now, owner, name, seconds) -> None:
    """Advance the time by these seconds, or a function of the arguments, in each call of a function."""
    before_call(monkeypatch, owner, name, lambda *args: now.__setitem__(
        0, now[0] + (seconds(*args) if callable(seconds) else seconds)))


def run(shards, *args, preset=TINY, status: int = 0) -> dict | None:
    """A run in this process. Returns its json, None without a new one."""
    before = set(Path().rglob("*_seed*.json"))
    assert gpt.main([*preset, *data_args(shards), *args]) == status
    new = set(Path().rglob("*_seed*.json")) - before
    return json.loads(new.pop().read_text()) if new else None


def list_logged(log: Path) -> list[int]:
    """The steps that a log has, in its order."""
    return [int(match[1]) for match in STEP_LINE.finditer(log.read_text())]


def read_events(*kinds: str, folder: Path = Path()) -> list[dict]:
    """The events of the only run in a folder: of these kinds, or all."""
    (path,) = folder.rglob("*.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if not kinds or event["event"] in kinds]


def find_saved(step: int) -> Path:
    """The only checkpoint of a step in this folder."""
    (path,) = Path().glob(f"checkpoints/*/*/step_{step:06d}")
    return path


def read_tensors(step: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by NAME/KEY, each with the rows of all ranks."""
    entries = {name: sorted(parts, key=lambda part: part[0]) for name, parts in gpt.open_tensors(step).items()}
    return {name: torch.cat([rows for _, rows in parts]) for name, parts in entries.items()}


def copy_rows(trainer) -> dict[str, torch.Tensor]:
    """Copies of what a checkpoint holds."""
    return {entry: rows.clone() for entry, rows in gpt.collect_rows(trainer).items()}


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.double() - exact.double()).norm() / exact.double().norm()).item()


def assert_same_bits(ours: dict, theirs: dict) -> None:
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def make_trainer(shards, **changes):
    """A new trainer, a function that makes one step, and a function that ends its thread."""
    cfg = smoke_config(shards, tokens_per_step=1024, micro_batch_tokens=512, **changes)
    fp8 = {f"fp8_{part}" for part in cfg.fp8_parts if cfg.fp8 == "on" and part != "logits"}
    trainer = gpt.Trainer(cfg, make_runtime(fast=CPU_FORMS | fp8))
    batches = start_prefetcher(trainer)

    def step(norms=None):
        loss = trainer.train_step(batches, trainer.schedule.at(trainer.progress.step), norms)
        trainer.progress.step += 1
        return loss

    return trainer, step, lambda: batches.close()


def start_prefetcher(trainer):
    data, rt = gpt.TrainData(trainer.cfg, trainer.schedule), trainer.rt
    return gpt.prefetch(data.batches(rt.comm, 0, trainer.cfg.num_iterations), rt.device)


def train_steps(trainer, num_steps: int, first: int = 0) -> list[float]:
    """The losses of steps with this part of the schedule, on the first data."""
    batches, steps = start_prefetcher(trainer), range(first, first + num_steps)
    losses = [trainer.train_step(batches, trainer.schedule.at(step)).item() for step in steps]
    batches.close()
    return losses
