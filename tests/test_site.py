"""The site's settings: links out of `docs` lead to pages or name files, and code on pages is code that is run."""

import re
import runpy

import pytest
from scripts import ROOT

# Pages whose Python blocks are run by tests, and not by the site.
NOT_CELLS = {"guide.md"}


@pytest.fixture(scope="module")
def settings():
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (
            "[b](../benchmarks/README.md#large-programs)",
            "[b](/reference/benchmarks.md#large-programs)",
        ),
        ("[c](../CHANGELOG.md)", "[c](/reference/changelog.md)"),
        ("[the tests](../tests/README.md)", "the tests (`tests/README.md`)"),
        ("[examples/paper](../examples/paper)", "`examples/paper`"),
        ("[page](start.md#install)", "[page](start.md#install)"),
        ("[nothing](../nothing.md)", "[nothing](../nothing.md)"),  # stays, for Sphinx to warn of
        ("![picture](../docs/network.png)", "![picture](../docs/network.png)"),
        ("[web](https://pyro.ai)", "[web](https://pyro.ai)"),
    ],
)
def test_links_out_of_docs_lead_to_pages_or_name_files(settings, written, shown):
    assert settings["_with_links_inside"](f"See {written}.", ROOT / "docs") == f"See {shown}."


def test_stars_of_arguments_are_no_markup(settings):
    lines = ["    model, *args, **kwargs: as `fit` was given them.", "    a * b, args"]
    settings["_read_docstring"](None, "function", "name", None, None, lines)
    assert lines == [r"    model, \*args, \*\*kwargs: as `fit` was given them.", "    a * b, args"]


def test_code_on_pages_is_in_cells_which_the_site_runs():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in NOT_CELLS]
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        assert not re.search(r"^```(python|py|pycon)\b", text, re.MULTILINE), page
        assert ("{code-cell}" in text) == text.startswith("---\nfile_format: mystnb"), page
