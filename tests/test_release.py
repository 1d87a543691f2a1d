"""What a release says of itself: one version everywhere, and files that a user of the package needs."""

import re

import pytest
from scripts import ROOT

import pyro_nami


def test_version_is_one_in_package_citation_and_changelog():
    assert re.fullmatch(r"\d+\.\d+\.\d+", pyro_nami.__version__)
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {pyro_nami.__version__}\n" in citation
    date = re.search(r"\ndate-released: (\S+)\n", citation)[1]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## [{pyro_nami.__version__}] - {date}\n" in changelog


def test_package_says_that_it_is_typed():
    assert (ROOT / "pyro_nami" / "py.typed").is_file()


def test_workflows_and_forms_are_yaml():
    yaml = pytest.importorskip("yaml")
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "CITATION.cff"]
    assert len(files) > 5
    for file in files:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file
