"""run.sh: a bad number of processes, and the processes that it starts."""

import os
import shutil
import subprocess

import pytest
from conftest import ROOT, data_args


@pytest.mark.parametrize("count", ["0", "abc", "-1", "1.5", "07", "a b\nc", "99999999"])
def test_a_process_count_that_is_none(count, tmp_path):
    """One line and status 2, before it looks for a Python. There is none on this PATH."""
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / "run.sh").symlink_to(ROOT / "run.sh")  # its folder has no .venv either
    done = subprocess.run(["/bin/bash", str(tmp_path / "run.sh"), "--preset=quick"], capture_output=True, text=True,
                          cwd=tmp_path, env={"PATH": str(tmp_path), "NPROC": count})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("run.sh: error: NPROC=") and "give NPROC=1 or more, or leave it out" in done.stderr


@pytest.fixture
def calls_of(tmp_path):
    """A function that runs run.sh in four processes with a Python that only notes its calls, and returns them."""
    python, notes = tmp_path / ".venv/bin/python", tmp_path / "calls"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\n[[ $1 == - ]] || echo "${{WORLD_SIZE:-}}|$*" >> "{notes}"\n'
                      f'[[ $1 == - ]] || [[ ${{RUN_SH:-}} == {tmp_path}/run.sh ]] || [[ $2 == pytest ]]\n')
    python.chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / "run.sh").symlink_to(ROOT / "run.sh")
    (tmp_path / "data/torch_source").mkdir(parents=True)
    corpus = tmp_path / "data/torch_source/corpus.json"

    def run(*args, nproc="4", cwd=tmp_path, has_corpus=True):
        notes.write_text("")
        corpus.touch() if has_corpus else corpus.unlink(missing_ok=True)
        done = subprocess.run(["/bin/bash", str(tmp_path / "run.sh"), *args], capture_output=True, text=True,
                              env={"PATH": str(tmp_path), "NPROC": nproc}, cwd=cwd)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == ("" if cwd.samefile(tmp_path) else f"run.sh: it works in its own folder, {tmp_path}: "
                               f"relative paths start there, and not in {cwd}\n")
        return notes.read_text().splitlines()

    return run


@pytest.mark.parametrize("flag", ["-h", "--help", "--list_presets", "--list-presets", "--print_config", "--print-config"])
def test_one_process_prints(flag, calls_of):
    """Also if the number of processes is given."""
    assert calls_of("--preset=frontier", flag) == [f"|train_gpt.py --preset=frontier {flag}"]


def test_tools_and_tests_are_started(calls_of, tmp_path):
    """RUN_SH is set for a tool, and not for the tests, which start runs without run.sh."""
    (tmp_path / "tool.py").touch()
    assert calls_of("tool.py", "x", nproc="1") == ["|tool.py x"]
    assert calls_of("test", "-k", "x") == ["|-m pytest -k x"]


def test_a_missing_corpus_is_made_first(calls_of, tmp_path):
    (tmp_path / "tool.py").touch()
    for words, call in ((["tool.py"], "|tool.py"), (["--seed=1"], "|train_gpt.py --seed=1"), (["test"], "|-m pytest")):
        made, started = calls_of(*words, nproc="1", has_corpus=False)
        assert "make_embedded_corpus" in made and started == call
    assert len(calls_of("--help", nproc="1", has_corpus=False)) == 1


def test_a_call_from_another_folder_says_where_relative_paths_start(calls_of, tmp_path):
    """The fixture checks the line. A link to the folder is no other folder."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in ("elsewhere", "link"):
        assert calls_of("--preset=quick", nproc="1", cwd=tmp_path / folder) == ["|train_gpt.py --preset=quick"]


def test_a_tool_that_does_not_exist_is_named():
    done = subprocess.run([ROOT / "run.sh", "config/train_gpt2.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("run.sh: error: config/train_gpt2.py does not exist: tools are")


def test_a_tool_takes_no_number_of_processes():
    done = subprocess.run([ROOT / "run.sh", "benchmarks/comm.py"], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "NPROC": "2"})
    assert done.returncode == 2 and done.stderr.startswith("run.sh: error: NPROC=2 is for training runs")


@pytest.mark.slow
def test_two_processes_train(tmp_path, shards):
    """The check of the options, torchrun and the run, with the real programs."""
    done = subprocess.run(
        [ROOT / "run.sh", "--preset=smoke", "--device=cpu", "--num_iterations=2", "--tokens_per_step=1024",
         "--save_model=off", f"--logs_dir={tmp_path}", *data_args(shards)],
        capture_output=True, text=True, env={**os.environ, "NPROC": "2", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert ", 2 x cpu, " in done.stdout and "step:2/2 val_loss:" in done.stdout
    done = subprocess.run([ROOT / "run.sh", "--preset=nope"], capture_output=True, text=True, cwd=ROOT,
                          env={**os.environ, "NPROC": "2"})
    assert done.returncode == 2 and done.stderr.startswith("train_gpt.py: error: --preset=nope is not a preset")


def test_a_run_of_several_processes_checks_its_options_first(calls_of):
    assert calls_of("--preset=quick", "--seed=1") == [
        "4|train_gpt.py --preset=quick --seed=1 --print_config",
        "|-m torch.distributed.run --standalone --nproc_per_node=4 train_gpt.py --preset=quick --seed=1"]
