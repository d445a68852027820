"""tools/runs.py: it lists what runs left, and removes nothing else than their checkpoints and models."""

import io
import signal
import sys
from pathlib import Path

import pytest
from conftest import AT_THE_END, before_call, gpt, run

from tools import runs


def call(monkeypatch, capsys, *words: str, answer: str = "", status: int = 0) -> str:
    monkeypatch.setattr(sys, "argv", ["runs.py", *words])
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    capsys.readouterr()
    assert runs.main() == status
    return "".join(capsys.readouterr())


@pytest.fixture
def names(shards, here, monkeypatch) -> list[str]:
    """A run that has ended, and one that was stopped at step 4 of 6. A record of another machine is not listed."""
    other = Path("records/try/2026-01-01_other/20260101-000000_seed0_0.json")
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    ended = run(shards, "--num_iterations=2", "--record=mine", AT_THE_END)
    with monkeypatch.context() as patch:
        before_call(patch, gpt.Trainer, "train_step", lambda trainer, *_: (
            trainer.progress.step == 3 and signal.raise_signal(signal.SIGTERM)))
        run(shards, "--num_iterations=6", "--seed=1", "--warmup_iterations=0", status=143)
    (stopped,) = Path().glob("checkpoints/*seed1*/*_seed1_*")
    return [ended["run_id"], stopped.name]


def test_it_lists_runs_and_removes_their_files(names, monkeypatch, capsys):
    ended, stopped = names
    lines = call(monkeypatch, capsys).splitlines()
    row = {line.split(" | ")[0][2:]: line.split(" | ")[1:] for line in lines[2:]}
    assert row.keys() == set(names) and row[stopped] == ["smoke", "6", "", row[stopped][3], "step 4", row[stopped][5]]
    assert row[ended][:2] == ["smoke", "2"] and float(row[ended][2]) > 1 and row[ended][4] == ""
    assert "--device=cpu" in row[stopped][5] and "--seed" not in row[stopped][5]
    Path("checkpoints/mine.txt").write_text("not of a run")
    assert "nothing was removed" in call(monkeypatch, capsys, "--keep=0", answer="n\n")
    files = lambda: sorted(path.name for path in Path("checkpoints").rglob("[!.]*") if path.is_file())
    assert files() == ["mine.txt", "model.pt", "rank0.pt", "state.json"]
    assert f"removed the files of {ended}" in call(monkeypatch, capsys, f"--remove={ended}", "--yes")
    assert files() == ["mine.txt", "rank0.pt", "state.json"]
    (folder,) = Path().glob(f"checkpoints/*/{stopped}")
    with gpt.lock_run(folder):
        assert "is in use" in call(monkeypatch, capsys, "--keep=0", answer="y\n")
    assert len(files()) == 3
    call(monkeypatch, capsys, "--keep=0", answer="y\n")
    assert files() == ["mine.txt"] and len(list(Path("records/try").glob("*_mine/*.json"))) == 1


def test_a_step_without_the_file_of_a_rank_is_none(names, monkeypatch, capsys):
    """A killed process leaves such a step. train_gpt.py does not continue it."""
    (folder,) = Path().glob(f"checkpoints/*/{names[1]}")
    (folder / "step_000009").mkdir()
    (folder / "step_000009/state.json").write_bytes((folder / "step_000004/state.json").read_bytes())
    assert "| step 4 |" in call(monkeypatch, capsys)


def test_options_are_listed_in_both_forms():
    words = ["--preset", "laptop", "--num-iterations=90", "--seed", "5", "--guard", "on"]
    row = runs.Run("a", dict(argv=words, config=dict(preset="laptop", num_iterations=90)), None).describe()
    assert row == "| a | laptop | 90 |  | 0 |  | --guard=on |"
    result = dict(argv=["--preset", "logs/b.json"], config=dict(preset="laptop"))
    assert runs.Run("a", result, None).describe() == "| a | laptop |  |  | 0 |  | --preset=logs/b.json |"


def test_an_unknown_run_is_named(here, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["runs.py", "--remove=nothing"])
    assert runs.main() == 2 and "--remove=nothing" in capsys.readouterr().err


def test_nobody_answers(names, monkeypatch, capsys):
    assert names
    assert "nobody answers: give --yes" in call(monkeypatch, capsys, "--keep=0", answer="", status=2)
    assert len(list(Path("checkpoints").rglob("model.pt"))) == 1
    assert "--out=nowhere is no folder" in call(monkeypatch, capsys, "--out=nowhere", status=2)
