"""The pages: links lead to a file and a heading, commands have valid options, named code exists."""

import collections
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT, gpt

FOLDERS = [ROOT, *(ROOT / name for name in ("benchmarks", "data", "docs", "records", "tests"))]
PAGES = [path for folder in FOLDERS for path in sorted(folder.glob("*.md"))]
SCRIPTS = [path for folder in FOLDERS[:-1] for path in sorted(folder.glob("*.py"))]


def remove_fenced_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def list_anchors(text: str) -> list[str]:
    """GitHub's anchors of the headings: lower case, no punctuation, hyphens for spaces, no duplicates."""
    anchors, counts = [], collections.Counter()
    for heading in re.findall(r"^#{1,6} +(.+?) *#* *$", remove_fenced_blocks(text), flags=re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.append(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return anchors


def list_broken(links: list[str], folder: Path) -> list[str]:
    """Links that do not lead from the folder to an existing file with the named heading."""
    broken = []
    for link in links:
        name, _, anchor = link.partition("#")
        path = folder / name
        if not path.exists() or anchor and anchor not in list_anchors(path.read_text()):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page(page):
    """Relative links and pictures."""
    text = re.sub(r"`[^`]*`", "", remove_fenced_blocks(page.read_text()))
    links = [link for link in re.findall(r"\[[^\]]*\]\(\s*([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]
    links = [page.name * link.startswith("#") + link for link in links]
    assert list_broken(links, page.parent) == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_named_in_a_script(script):
    """With a folder or an anchor."""
    names = r"(?<![\w./{}-])((?:[\w-]+/)+[\w-]+\.md(?:#[\w-]+)?|[\w-]+\.md#[\w-]+)"
    links = re.findall(names, script.read_text())
    broken = [link for link in list_broken(links, ROOT) if list_broken([link], script.parent)]
    assert broken == []


def test_commands_are_valid(monkeypatch):
    """Each training command in a block of the README or of docs/ has valid options."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    commands = [line for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
                for block in re.findall(r"^```\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
                for line in re.findall(r"^(?:\./run.sh|python train_gpt.py) (--(?!help).*)", block,
                                       flags=re.MULTILINE)]
    assert len(commands) >= 15
    for command in commands:
        words = shlex.split(command.partition("&&")[0], comments=True)
        values = gpt.parse_argv([word for word in words if "<run_id>" not in word])
        gpt.make_config({name: value for name, value in values.items() if value is not True})


def test_pages_have_the_numbers_of_the_presets():
    """Numbers outside of generated blocks."""
    record_92 = gpt.load_preset("record_92")
    options, resume, inside = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("options", "resume", "inside"))
    assert f"| {record_92.ngram_rows:,} |" in options and f"{record_92.ngram_rows:,} rows" in resume
    steps = f"{record_92.num_iterations:,} steps"
    assert f"after {steps} |" in options and f"all {steps}" in inside


def test_names_in_the_table_of_mechanisms_exist():
    text = (ROOT / "docs" / "inside.md").read_text().partition("| `--without` |")[2].partition("## How")[0]
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) >= 12
    parts = {*gpt.list_parts()}
    for code, names in rows:
        assert set(re.findall(r"`(\w+)`", names)) <= parts
        for name in re.findall(r"`(\w+)(?:\.\w+)?`", code):
            assert hasattr(gpt, name), name
