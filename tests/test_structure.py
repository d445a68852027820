"""The file: importable without side effects, few imports, three parts, sections in order."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPT

ALLOWED = {"torch", "numpy", "tqdm", "triton"}
PARTS = {
    "PART ONE: THE RECIPE": "CONFIG, SCHEDULES, DATA, OPERATIONS, MODEL, UPDATE RULES, OPTIMIZER, TABLES, TRAINING",
    "PART TWO: FAST FORMS OF PART ONE":
        "FAST FORMS, STEP GRAPHS, FAST NORM AND ATTENTION, FP8, FUSED OPERATIONS, TRITON KERNELS",
    "PART THREE: INFRASTRUCTURE":
        "DEVICE, COMM, SHARD FILES, COMMAND LINE, RUN RECORD, CHECKPOINTS, TELEMETRY AND GUARD, MAIN",
}  # and their sections


def imported_packages(path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def test_imports_are_the_closed_list():
    """And tiktoken, which one function imports if it is there."""
    assert imported_packages(SCRIPT) - set(sys.stdlib_module_names) <= ALLOWED | {"tiktoken"}
    top = ast.parse(SCRIPT.read_text()).body
    assert not any("tiktoken" in ast.unparse(node) for node in top if isinstance(node, (ast.Import, ast.Try)))


def test_import_has_no_side_effects(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_gpt; import torch; "
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized(); "
        "assert train_gpt.derived_numbers(train_gpt.make_config({'preset': 'laptop'}), 1)['num_params'] > 0; "
        "assert 'torch._dynamo' not in sys.modules"  # takes more than a second, and only compilation needs it
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def split_at(prefix: str) -> dict[str, list[str]]:
    """The lines of the file from each banner with this prefix to the next one, by the banner's name."""
    parts, name = {}, "start"
    for line in SCRIPT.read_text().splitlines():
        if line.startswith(prefix):
            name = line.strip("# =")
            assert name not in parts, f"two banners {name}"
        parts.setdefault(name, []).append(line)
    return parts


def test_sections_stand_in_order():
    """In three parts. The docstring of the file names all of them."""
    found, docstring = {}, ast.get_docstring(ast.parse(SCRIPT.read_text()))
    for line in SCRIPT.read_text().splitlines():
        if line.startswith("# ##########"):
            found[line.strip("# ")] = []
        elif line.startswith("# ==== "):
            list(found.values())[-1].append(line.strip("# ="))
    assert [(part, ", ".join(names)) for part, names in found.items()] == list(PARTS.items())
    words = " ".join(docstring.split())
    assert [name for names in found.values() for name in names if name not in words] == []


def test_the_config_is_plain_code():
    """Options are written as fields. No class is made at run time, so that a reader finds each one."""
    assert "make_dataclass" not in SCRIPT.read_text()


def test_the_model_knows_no_device_and_no_rank():
    """It gets its operations and a function that waits. Devices, ranks, FP8 and validation are elsewhere."""
    text = "\n".join(split_at("# ==== ")["MODEL"]).lower()
    assert len(text) > 5000
    for word in ("fp8", "cuda", "rank", "world_size", "validat", "bucket", "gather", "runtime"):
        assert word not in text, word


@pytest.mark.house
def test_lines_and_functions_stay_readable():
    lines = SCRIPT.read_text().splitlines()
    assert max(map(len, lines)) < 110
    functions = [n for n in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(n, ast.FunctionDef)]
    assert max(n.end_lineno - n.lineno + 1 for n in functions) <= 100  # one idea, from top to bottom
    long = [n for n in functions if n.end_lineno - n.lineno >= 8 and not n.name.startswith("_")]
    assert [n.name for n in long if not ast.get_docstring(n)] == []


def test_lint():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
