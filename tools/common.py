"""Shared by tools: command line, missing packages, errors, progress. Imports only the standard library."""

import argparse
import glob
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
# Waiting threads free their core after 1000 spins. glibc keeps freed activations for the next step
ENVIRONMENT = dict(GOMP_SPINCOUNT="1000", MALLOC_MMAP_THRESHOLD_="1073741824",
                   MALLOC_TRIM_THRESHOLD_="2147483647")


class RecordError(Exception):
    """Bad input of a tool, as RunError of train_gpt.py."""

    status = 2


def warn(line: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {line}", file=sys.stderr)


def note(line: str) -> None:
    """Print a line on stderr, above a progress bar."""
    from tqdm import tqdm

    tqdm.write(line, file=sys.stderr)


def list_visible(folder: Path, pattern: str) -> list[Path]:
    """The paths of a glob pattern below a folder, sorted. Hidden ones are left out: macOS makes ._a.json."""
    return sorted(folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True))


def keep_options(argv: list[str], dropped: set[str]) -> list[str]:
    """A command line without the dropped options, in the form --name=value."""
    return [f"--{name}={value}" for name, value in read_options(argv).items() if name not in dropped]


def read_options(argv: list[str]) -> dict[str, str]:
    """The options of a command line by name, in the forms --name=value and --name value."""
    options, name = {}, ""
    for word in argv:
        if word.startswith("--"):
            name, _, word = word[2:].partition("=")
            name = name.replace("-", "_")
        options[name] = word
    return options


@contextmanager
def require_packages() -> Iterator[None]:
    """Wrap the imports of a tool: a package that is not installed ends it with status 2 and one line.

    Set the environment as run.sh does, for runs that the tool starts.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    handler = signal.getsignal(signal.SIGINT)
    is_default = (handler is signal.default_int_handler
                  and threading.current_thread() is threading.main_thread())
    if is_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of Ctrl-C while PyTorch loads
    try:
        yield
    except ModuleNotFoundError as error:
        name, file = error.name.partition(".")[0], "requirements-tools.txt"
        if name in ("fcntl", "resource"):
            warn("error: train_gpt.py needs Linux, macOS, or on Windows WSL")
            sys.exit(2)
        if not re.search(rf"^{re.escape(name)}\b", (ROOT / file).read_text(), re.MULTILINE):
            file = "requirements.txt"
        if name == "triton":  # CUDA builds of PyTorch bring it, and run.sh installs it for tests only
            warn("error: triton is not installed: run pip install triton")
            sys.exit(2)
        tool = os.path.relpath(sys.argv[0], ROOT)
        warn(f"error: {name} is not installed: start with ./run.sh {tool}, or first run pip install "
             f"-r {file}")
        sys.exit(2)
    finally:
        if is_default:
            signal.signal(signal.SIGINT, handler)


class Parser(argparse.ArgumentParser):
    """A command line with a module's docstring as its help. Errors are one line."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter,
                         allow_abbrev=False)

    def parse_known_args(self, args: list[str] | None = None, namespace=None):
        """'-' and '_' are equivalent in names, as in train_gpt.py."""
        words = [re.sub("^--[^=]*", lambda name: "--" + name[0][2:].replace("-", "_"), word)
                 for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        hint = ""
        if message.startswith("unrecognized") and "--extra" in self._option_string_actions:
            hint = " (--extra='--name=value' passes options to train_gpt.py)"
        elif message.startswith("unrecognized") and "--parts" in self._option_string_actions:
            hint = " (options of a side stand in its quotes: 'smoke --name=value', those of all after --)"
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}{hint} (see --help)\n")


def at_least(low: float, kind: type = int) -> Callable[[str], float]:
    """The type of an option with a lower bound."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value < math.inf:
            raise argparse.ArgumentTypeError(
                f"{text} is not a {'whole ' if kind is int else ''}number of at least {low:g}")
        return value

    return parse


def output_file(text: str) -> Path:
    """The type of an option that names a file to write. Its folder must exist."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text} does not exist: make it, or choose another")
    if Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: give the name of a file")
    return Path(text)


def find_launcher(is_alone: bool = False) -> str:
    """The command that trains, without options: run.sh if it started this tool, else python.

    is_alone: in one process. Without NPROC, run.sh starts a process for each GPU.
    """
    if run_sh := os.environ.get("RUN_SH"):
        return f"{'NPROC=1 ' if is_alone else ''}{shlex.quote(run_sh)}"
    return f"python {shlex.quote(os.path.relpath(ROOT / 'train_gpt.py'))}"


def find_run_sh() -> str:
    """run.sh as it was typed, for printed commands of tools."""
    return shlex.quote(os.environ.get("RUN_SH", "./run.sh"))


@contextmanager
def keep_saying(line: str, say: Callable[[str], None] = note) -> Iterator[None]:
    """Print a line on stderr every ten seconds, while something works that prints nothing. say() prints."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(10):
            say(line)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def read_step(folder: Path) -> str:
    """The last step in the log of a run below a folder."""
    lines = [line for path in folder.rglob("*_seed*.txt") for line in path.read_text().splitlines()]
    steps = [line.split(" ")[0] for line in lines if line.startswith("step:")]
    return steps[-1] if steps else "before the first step"


def run_training(command: list[str], out: Path, show: Callable[[str], None], **options
                 ) -> subprocess.CompletedProcess:
    """Run a process that trains. Every five seconds show() gets the last step of its log below out."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    try:
        while process.returncode is None:
            try:
                output, errors = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                show(read_step(out))
    finally:
        if process.poll() is None:
            note("waiting until the run ends, which may finish its step first")
        process.terminate()  # torchrun ends its ranks
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


class Progress:
    """Progress of long work on stderr: a bar on a terminal, else a line for each finished run."""

    def __init__(self, total: int, done: int = 0, unit: str = "run"):
        from tqdm import tqdm

        self.total, self.done, self.unit, self.lock = total, done, unit, threading.Lock()
        columns, rows = shutil.get_terminal_size()  # 80 and 24 if the terminal does not say
        self.bar = tqdm(total=total, initial=done, unit=unit, disable=None, ncols=columns, nrows=rows)
        self.printed = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()

    def show(self, label: str) -> None:
        """Name the work that goes on. Without a terminal at most one line in ten seconds."""
        self.bar.set_description(label)
        if self.bar.disable and time.monotonic() >= self.printed + 10:
            self.printed = time.monotonic()
            print(f"{self.unit} {self.done + 1}/{self.total} goes on: {label}", file=sys.stderr, flush=True)

    def finish(self, label: str) -> None:
        """Count a finished run. Several threads may call it."""
        with self.lock:
            self.done += 1
            self.bar.update()
            if self.bar.disable:
                self.printed = time.monotonic()
                print(f"{self.unit} {self.done}/{self.total}: {label}", file=sys.stderr, flush=True)


def run_guarded(body: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Run a tool and return its exit status. An error with a status, or of a file, is one line. Others are
    tracebacks.

    SIGTERM acts as Ctrl-C does, so that a tool ends its child processes.
    """
    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    old = signal.signal(signal.SIGTERM, interrupt)
    sys.stdout.reconfigure(errors="backslashreplace")  # escapes of what the terminal cannot show
    try:
        status = body() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # of `| head`. Python writes the rest when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as stop:
        warn(interrupted)
        return 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except OSError as error:
        if not error.filename or not error.strerror:
            raise
        line, status = f"error: {error.filename}: {error.strerror}", 1
    except Exception as error:
        if not hasattr(error, "status"):
            raise
        line, status = f"error: {error}", error.status
    finally:
        signal.signal(signal.SIGTERM, old)
    if int(os.environ.get("RANK", 0)):  # rank 0 prints, and torchrun then ends this rank
        time.sleep(3)
    warn(line)
    return status
