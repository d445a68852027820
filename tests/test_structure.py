"""The file itself: importable without side effects, few imports, sections in order."""

import ast
import itertools
import subprocess
import sys

from conftest import ROOT, SCRIPT

ALLOWED = {"torch", "numpy", "tqdm", "triton"}
SECTIONS = [
    "CONFIG",  # part one, the recipe
    "MODEL",
    "LOSS AND KERNELS",
    "UPDATE RULES",
    "OPTIMIZER",
    "DATA",
    "SCHEDULES",
    "TRAINING",
    "RUNTIME",  # part two, the workshop
    "COMMAND LINE",
    "RUN RECORD",
    "CHECKPOINTS",
    "TELEMETRY AND GUARD",
    "SAMPLING",
    "MAIN",
]


def imported_packages(path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def test_imports_are_the_closed_list():
    """And tiktoken, where one function finds it."""
    assert imported_packages(SCRIPT) - set(sys.stdlib_module_names) <= ALLOWED | {"tiktoken"}
    top = ast.parse(SCRIPT.read_text()).body
    assert not any("tiktoken" in ast.unparse(node) for node in top if isinstance(node, (ast.Import, ast.Try)))


def test_import_has_no_side_effects(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train_gpt; import torch; "
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized(); "
        "assert train_gpt.derive(train_gpt.make_config({'preset': 'quick'}), 1)['num_params'] > 0; "
        "assert 'torch._dynamo' not in sys.modules"  # more than a second, for who does not compile
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_sections_stand_in_order():
    banners = [line.strip("# =") for line in SCRIPT.read_text().splitlines() if line.startswith("# ==== ")]
    assert banners == SECTIONS


def test_lines_and_functions_stay_readable():
    lines = SCRIPT.read_text().splitlines()
    assert max(map(len, lines)) < 110
    functions = [n for n in ast.walk(ast.parse(SCRIPT.read_text())) if isinstance(n, ast.FunctionDef)]
    assert max(n.end_lineno - n.lineno + 1 for n in functions) <= 100  # one idea, which reads from top to bottom
    tree = ast.parse(SCRIPT.read_text())
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef)]
    public = [
        n
        for n in itertools.chain(tree.body, *(c.body for c in classes))
        if isinstance(n, ast.ClassDef) or isinstance(n, ast.FunctionDef) and n.end_lineno - n.lineno >= 8
        if not n.name.startswith("_")
    ]
    assert [n.name for n in public if not ast.get_docstring(n)] == []


def test_lint():
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
