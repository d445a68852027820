"""The pages: links lead to a file and a heading, commands have valid options, named code exists."""

import collections
import csv
import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT, gpt

FOLDERS = [ROOT, *(ROOT / name for name in ("benchmarks", "data", "docs", "records", "tools", "tests"))]
PAGES = [path for folder in [*FOLDERS, ROOT / "benchmarks/h100_2026-11-27"] for path in sorted(folder.glob("*.md"))]
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
    names = ("options", "resume", "differences")
    options, resume, differences = ((ROOT / "docs" / f"{name}.md").read_text() for name in names)
    assert f"| {record_92.ngram_rows:,} |" in options and f"{record_92.ngram_rows:,} rows" in resume
    steps = f"{record_92.num_iterations:,} steps"
    assert f"after {steps} |" in options and f"all {steps}" in differences


def test_names_in_the_table_of_mechanisms_exist():
    text = (ROOT / "docs" / "inside.md").read_text().partition("| `--without` |")[2].partition("## How")[0]
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) >= 12
    parts = {*gpt.list_parts()}
    for code, names in rows:
        assert set(re.findall(r"`(\w+)`", names)) <= parts
        for name in re.findall(r"`(\w+)(?:\.\w+)?`", code):
            assert hasattr(gpt, name), name


PUBLISHED = ROOT / "docs" / "published_records.md"


def read_published_records() -> dict[str, list[str]]:
    """The cells of the page's first table, by the number of the record."""
    rows = re.findall(r"^\| (\d{1,3}) \| (.*) \|$", PUBLISHED.read_text(), flags=re.MULTILINE)
    return {number: cells.split(" | ") for number, cells in rows}


def test_published_records_have_their_dates_and_times():
    with open(ROOT / "records" / "published.csv") as file:
        known = {row["record"]: row for row in csv.DictReader(file)}
    rows = read_published_records()
    assert len(rows) >= 45 and rows.keys() - known.keys() == {"23"}
    for number in rows.keys() & known.keys():
        date, seconds, *_ = rows[number]
        assert date == known[number]["date"]
        assert float(seconds.replace(",", "")) == pytest.approx(60 * float(known[number]["minutes"]))


def test_cited_records_have_a_row():
    """By number or by date, in train_gpt.py and in the pages."""
    text = PUBLISHED.read_text()
    rows, other_dates = read_published_records(), text.partition("## Other dates")[2]
    pages = [page for folder in (ROOT, ROOT / "docs", ROOT / "records", ROOT / "benchmarks")
             for page in folder.glob("*.md") if page != PUBLISHED]
    numbers, dates = set(), set()
    for path in [ROOT / "train_gpt.py", *pages]:
        cited = re.findall(r"\b[Rr]ecords? (\d{1,3}(?:(?:, | and )\d{1,3})*)\b", path.read_text())
        numbers |= {number for text in cited for number in re.findall(r"\d+", text)}
        dates |= set(re.findall(r"\b20\d\d-\d\d-\d\d\b", path.read_text()))
    assert numbers - rows.keys() == set()
    listed = {cells[0] for cells in rows.values()} | set(re.findall(r"20\d\d-\d\d-\d\d", other_dates))
    assert {date for date in dates - listed if date < "2026-11-21"} == set()


def find_code(name: str):
    """Whether train_gpt.py has a function, class, field, option, scalar, preset or part of this name."""
    first, _, rest = name.partition(".")
    if not hasattr(gpt, first):
        fields = {field.name for part in (gpt.LayerSpec, gpt.Stage, gpt.Group, gpt.Config)
                  for field in dataclasses.fields(part)}
        record_92 = gpt.make_config({"preset": "record_92"})
        scalars = {scalar.name for layer in range(record_92.num_layers)
                   for scalar in gpt.layer_scalars(record_92, layer)}
        parameters = {word for layer in (gpt.Attention, gpt.MLP) for word in layer.__init__.__code__.co_names}
        return not rest and first in {*fields, *scalars, *parameters, "v_scale", "ve_scale", *gpt.PRESETS,
                                      *gpt.RECORD_32_GROUPS, *gpt.FORMS, *gpt.list_parts()}
    place = getattr(gpt, first)
    return not rest or hasattr(place, rest) or rest in getattr(place, "__dataclass_fields__", ())


@pytest.mark.parametrize("page, heading", [("published_records", "# Published"), ("record_32_layer", "## 8.")])
def test_names_in_the_last_table_of_a_page_exist(page, heading):
    text = (ROOT / "docs" / f"{page}.md").read_text().partition(heading)[2].partition("\n## ")[0]
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| "))
    names = set(re.findall(r"`(?:--)?(\w+(?:\.\w+)?)(?:=\w+|\[.*?\])?`", rows))
    assert len(names) >= 60
    assert {name for name in names if not find_code(name)} == {"is_sparse"} & names


def test_functions_in_the_drawing_exist():
    """Of one training step."""
    drawing = (ROOT / "docs" / "inside.md").read_text().partition("```\n")[2].partition("```")[0]
    names = re.findall(r"([\w.]+)\(\)", drawing)
    assert len(names) >= 20
    assert [name for name in names if not find_code(name) and name != "loss.backward"] == []
