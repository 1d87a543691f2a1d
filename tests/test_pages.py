"""The pages beside the package: their code runs, their links lead somewhere, their tables are those of the results."""

import contextlib
import io
import re

import pytest
from scripts import ROOT

PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
    "tests/README.md",
    "docs/guide.md",
]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(?:#([^)]+))?\)")
BLOCK = re.compile(r"```python\n(.*?)```\n\n?((?:    [^\n]*\n|\n)*)", re.DOTALL)
NUMBER = re.compile(r"-?\d[\d.,]*(?:e-?\d+)?")  # figures depend on the machine in their last digits


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    for target, anchor in LINK.findall(text_of(page)):
        place = (ROOT / page).parent / target
        if ROOT / "docs" in place.resolve().parents and not (ROOT / "docs" / "index.md").exists():
            continue  # pages of the site come with it
        assert place.exists(), target
        if anchor:
            assert anchor in anchors(place.resolve().relative_to(ROOT).as_posix()), (
                f"{target}#{anchor}"
            )


def run(names: dict, code: str) -> list[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return words(printed.getvalue())


def words(text: str) -> list[str]:
    """Returns the lines that are not empty, each number as ``#`` and each gap as one space."""
    lines = (re.sub(" +", " ", NUMBER.sub("#", line)).strip() for line in text.splitlines())
    return [line for line in lines if line]


def test_code_of_readme_and_guide_runs_and_prints_what_they_show():
    names: dict = {}
    compared = 0
    for page in ("README.md", "docs/guide.md"):
        for code, shown in BLOCK.findall(text_of(page)):
            if "steps = 4000" in code:
                continue  # a minute; test_examples.py runs compiled_inference.py, which does the same
            printed = run(names, code)
            for line in words(shown):
                assert line == "..." or line in printed, line
                compared += 1
    assert compared > 15
    assert names["posterior"].verdict.kind == "exact"
