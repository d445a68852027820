"""run.sh: the processes that it starts."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, data_args


@pytest.fixture
def calls_of(tmp_path):
    """A function that runs run.sh in four processes with a Python that only notes its calls."""
    python, notes = tmp_path / ".venv/bin/python", tmp_path / "calls"
    python.parent.mkdir(parents=True)
    python.write_text(f'''#!/bin/bash
[[ $2 == *importlib* ]] || echo "${{RUN_SH:-}}|$*" >> "{notes}"
[[ $* != *laptop*--print_config ]] || echo '"train_files": "data/torch_source/train_*.bin"'
''')
    python.chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / "run.sh").symlink_to(ROOT / "run.sh")
    (tmp_path / "data/torch_source").mkdir(parents=True)
    corpus = tmp_path / "data/torch_source/corpus.json"
    for name in ("tool.py", "tools/plot.py", "tools/sample.py", "benchmarks/step.py", "data/text.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def run(*args, nproc="4", has_corpus=True):
        notes.write_text("")
        corpus.touch() if has_corpus else corpus.unlink(missing_ok=True)
        done = subprocess.run(["/bin/bash", str(tmp_path / "run.sh"), *args], capture_output=True, text=True,
                              env={"PATH": str(tmp_path), "NPROC": nproc}, cwd=tmp_path)
        assert done.returncode == 0 and done.stderr.count("\n") <= (args[0] == "test") + (not has_corpus)
        return notes.read_text().replace(str(tmp_path), "").splitlines()

    return run


def test_what_is_started(calls_of):
    """RUN_SH is set for runs and tools, and not for the tests, which start runs without run.sh."""
    assert calls_of("tool.py", "x") == ["/run.sh|/tool.py x"]
    assert calls_of("test", "-k", "x") == ["|-m pytest -k x"]
    assert calls_of("--seed=1", nproc="1") == ["/run.sh|/train_gpt.py --seed=1"]
    assert calls_of("--seed=1", "--help") == ["/run.sh|/train_gpt.py --seed=1 --help"]
    torchrun = "--standalone --local-addr=127.0.0.1 --nproc_per_node=4 /train_gpt.py"
    assert calls_of("--seed=1")[-1].endswith(f" {torchrun} --seed=1")


def test_paths_start_where_the_user_stands(tmp_path, shards):
    """Of tools, of runs, and of printed commands. A default pattern that matches nothing there means the project's
    files."""
    shutil.copytree(shards, tmp_path / "data/mine")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/text").write_text("A text of one line.\n" * 300)
    tool = [ROOT / "run.sh", "data/text.py", "docs", "--out=here"]
    words = [ROOT / "run.sh", *TINY, "--num_iterations=2", "--train_files=data/mine", "--val_files=data/mine"]
    for command in (tool, words, [ROOT / "run.sh", *TINY, "--num_iterations=1", "--out=what's here"]):
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True,
                              env=os.environ | {"NPROC": "1"})
    assert json.loads((tmp_path / "here/corpus.json").read_text())["source"] == "docs"
    assert len(list(tmp_path.glob("logs/*.json"))) == len(list(tmp_path.glob("what's here/logs/*.json"))) == 1
    (sample,) = re.findall("^sample: (.*)", done.stdout, re.MULTILINE)
    run_sh, script, model = shlex.split(sample)
    assert (run_sh, script) == (str(ROOT / "run.sh"), "tools/sample.py") and (tmp_path / model).exists()


def test_torchrun_adds_no_traceback_to_the_line_of_a_run():
    """The status of the ranks remains, too."""
    done = subprocess.run([ROOT / "run.sh", "--preset=smoke", "--val_files=none"], capture_output=True, text=True,
                          env=os.environ | {"NPROC": "2"})
    assert done.returncode == 2 and "--val_files=none" in done.stderr and done.stderr.count("\n") == 1


def test_checkouts_have_unix_line_ends():
    """With core.autocrlf=true as well. bash and the hashes of the scripts of records need them."""
    names = ["run.sh", "records/laptop/2026-11-21_ladder/train_gpt.py"]
    done = subprocess.run(["git", "check-attr", "eol", *names], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode or done.stdout.split("\n")[:-1] == [f"{name}: eol: lf" for name in names]


def test_a_missing_corpus_is_made_first(calls_of):
    for word, call in (("benchmarks/step.py", "/run.sh|/benchmarks/step.py"), ("--preset=laptop", "/run.sh|/train_gpt.py --preset=laptop"),
                       ("test", "|-m pytest")):
        *_, made, started = calls_of(word, nproc="1", has_corpus=False)
        assert "make_embedded_corpus" in made and started == call
    for word in ("--preset=shakespeare", "data/text.py", "--print_config", "tools/plot.py"):  # these read another text, or none
        assert "make_embedded_corpus" not in " ".join(calls_of(word, nproc="1", has_corpus=False))


def test_a_tool_has_its_path_from_any_folder():
    for folder, path in (("docs", "../tools/plot.py"), ("tools", "plot.py"), ("/", f"{ROOT}/tools/plot.py"), ("docs", "tools/plot.py")):
        done = subprocess.run([ROOT / "run.sh", path, "--help"], capture_output=True, text=True, cwd=ROOT / folder)
        assert done.returncode == 0 and done.stdout.startswith("usage: plot.py"), done.stderr


@pytest.mark.parametrize("old, new", [
    ("records/sample.py", "sample"), ("records/make_leaderboard.py", "leaderboard"), ("records/run_ladder.py", "ladder"),
    ("records/ablate.py", "compare"), ("benchmarks/compare_scripts.py", "compare"), ("benchmarks/rules.py", "compare")])
def test_an_old_path_ends_with_the_new_one(old, new):
    done = subprocess.run([ROOT / "run.sh", old], capture_output=True, text=True, env=os.environ | {"NPROC": "1"})
    assert (done.returncode, done.stderr) == (2, f"run.sh: error: {old} is now tools/{new}.py\n")


@pytest.mark.parametrize("name", ["tools/common.py", "tools/results.py", "benchmarks/common.py", "benchmarks/simulate_ranks.py"])
def test_a_library_runs_nothing(name):
    done = subprocess.run([ROOT / "run.sh", name], capture_output=True, text=True, env=os.environ | {"NPROC": "1"})
    assert (done.returncode, done.stderr) == (2, f"run.sh: error: {name} has functions for the tools and runs nothing\n")


@pytest.mark.parametrize("word, has_tools, has_tests", [
    ("test", True, True), ("tools/plot.py", True, False), ("benchmarks/step.py", True, False),
    ("tools/sample.py", False, False), ("data/text.py", False, False), ("--seed=1", False, False)])
def test_a_command_needs_only_its_packages(calls_of, tmp_path, word, has_tools, has_tests):
    python = tmp_path / ".venv/bin/python"
    python.write_text(python.read_text() + f'[[ $2 == *find_spec* ]] && echo "$*" > "{tmp_path}/packages"; true\n')
    calls_of(word, nproc="1")
    packages = (tmp_path / "packages").read_text().split()
    assert ("scipy" in packages, "pytest" in packages) == (has_tools, has_tests) and "numpy" in packages


def test_an_interruption_ends_it(tmp_path):
    """Although the Python that looks for packages ignores it. Nothing is started after it."""
    python, notes, begun = tmp_path / ".venv/bin/python", tmp_path / "calls", tmp_path / "begun"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\ntrap "" INT\n[[ $2 == *find_spec* ]] || echo "$*" >> "{notes}"\n'
                      f'touch "{begun}"\nuntil [[ -e "{tmp_path}/sent" ]]; do sleep 0.1; done\n')
    python.chmod(0o755)
    (tmp_path / "run.sh").symlink_to(ROOT / "run.sh")
    running = subprocess.Popen(["/bin/bash", str(tmp_path / "run.sh")], cwd=tmp_path, start_new_session=True,
                               env=os.environ | {"NPROC": "1"},  # a job in the background inherits an ignored signal
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not begun.exists():
        assert running.poll() is None
    os.killpg(running.pid, signal.SIGINT)
    (tmp_path / "sent").touch()
    assert running.wait(60) == 130 and not notes.exists()


@pytest.mark.parametrize("has_venv", [False, True])
def test_an_unusable_python_is_named(tmp_path, has_venv):
    """It fails each check, as Python 3.8 or a .venv without pip does. Nothing is installed or left behind."""
    for name in ("run.sh", ".venv/bin/python" if has_venv else "python3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "run.sh").symlink_to(ROOT / "run.sh")
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / name).write_text('#!/bin/bash\n[[ $1 == -c ]] && exit 1\ntouch "$0.called"\n')
    (tmp_path / name).chmod(0o755)
    before = sorted(tmp_path.rglob("*"))
    done = subprocess.run(["/bin/bash", str(tmp_path / "run.sh")], capture_output=True, text=True,
                          env={"PATH": str(tmp_path)}, cwd=tmp_path)
    words = "remove .venv and start again" if has_venv else "python3 is not Python 3.11 or later with venv"
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and words in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


FAILING = """if __name__ == "__main__":
    real_step = Trainer.train_step
    def train_step(trainer, *args):
        if trainer.rt.comm.rank == 1 and trainer.progress.step == 2:
            CALL
        return real_step(trainer, *args)
    Trainer.train_step = train_step
"""


@pytest.mark.slow
@pytest.mark.parametrize("call, status", [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("raise ValueError(7)", 1)])
def test_the_rank_that_ended_first_is_named(tmp_path, shards, call, status):
    """The other rank loses its connection, and ends later."""
    (tmp_path / "run.sh").symlink_to(ROOT / "run.sh")
    before, main = (ROOT / "train_gpt.py").read_text().rsplit('if __name__ == "__main__":\n', 1)
    (tmp_path / "train_gpt.py").write_text(before + FAILING.replace("CALL", call) + main)
    words = [tmp_path / "run.sh", *TINY, "--tokens_per_step=1024", f"--out={tmp_path}", *data_args(shards)]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # with this Python no packages are missing
    env = os.environ | {"NPROC": "2", "OMP_NUM_THREADS": "1", "PATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == status and ("ValueError: 7" in done.stderr) == (status == 1)
    assert done.stderr.splitlines()[-1] == f"run.sh: rank 1 ended first, with status {status}"


@pytest.mark.slow
def test_two_processes_train_and_stop(tmp_path, shards):
    """SIGUSR1 of the launcher reaches the ranks, which write a checkpoint and end."""
    env = {**os.environ, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    words = [ROOT / "run.sh", *TINY, "--tokens_per_step=1024", f"--out={tmp_path}", *data_args(shards)]
    done = subprocess.run([*words, "--num_iterations=2"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert ", 2 x cpu, " in done.stdout and "step:2/2 val_loss:" in done.stdout
    running = subprocess.Popen([*words, "--num_iterations=9999", "--epochs=999"], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=env)
    while "val_loss" not in running.stdout.readline():
        assert running.poll() is None
    running.send_signal(signal.SIGUSR1)
    assert "stopped by SIGUSR1 after step " in running.communicate(timeout=300)[1]
    assert len(list(tmp_path.glob("checkpoints/*/*/step_*/rank1.pt"))) == 1
