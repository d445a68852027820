"""run.sh: what it refuses before it sets anything up."""

import shutil
import subprocess

import pytest
from conftest import ROOT


@pytest.mark.parametrize("count", ["0", "abc", "-1", "1.5", "07", "a b\nc", "99999999"])
def test_a_process_count_that_is_none(count, tmp_path):
    """One line and status 2, before any Python is looked for: there is none on this PATH."""
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / "run.sh").symlink_to(ROOT / "run.sh")  # the folder that holds it has no .venv either
    done = subprocess.run(["/bin/bash", str(tmp_path / "run.sh"), "--preset=quick"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path), "NPROC": count})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("run.sh: error: NPROC=") and "give NPROC=1 or more, or leave it out" in done.stderr
