"""The scripts of iterative inference run, and write their figures and numbers."""

import json

import pytest
from scripts import ROOT, run

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow


def finished(folder, name, *arguments):
    done = run(f"examples/iterative/{name}.py", "--smoke", "--out", str(folder), *arguments)
    assert done.code == 0, done.errors[-2000:]
    assert (folder / f"{name}.png").stat().st_size > 10_000
    return done.printed, json.loads((folder / f"{name}.json").read_text())


def test_the_toy_has_a_surface_and_ways_on_it(tmp_path):
    printed, results = finished(tmp_path, "toy")
    assert len(results["surface"]) == len(results["axes"][1]) and "learned" in results["ways"]
    assert "steps to" in printed and len(results["claims"]) == 3


def test_explaining_away_has_gaps_to_the_exact_evidence(tmp_path):
    _, results = finished(tmp_path, "explaining_away")
    gaps = {(row["base"], row["steps"]): row["runs"][0]["gap"] for row in results["rows"]}
    # but for the noise of draws
    assert len(gaps["faithful", 5]) == 26 and min(map(min, gaps.values())) > -0.5


def test_autoencoders_are_compared_by_steps_and_with_optimizers(tmp_path):
    pytest.importorskip("sklearn")
    _, results = finished(tmp_path, "vae")
    rows = {(row["model"], row["system"]): row["runs"][0] for row in results["rows"]}
    assert len(rows) == 6 and len(rows["single", "standard"]["negative ELBO"]) == 1
    found = rows["hierarchical", "iterative, errors"]["negative ELBO"]
    assert len(found) == 26 and all(claim["holds"] or claim["why"] for claim in results["claims"])
    special = rows["single", "iterative, gradients"]
    assert set(special["optimizers"]) == {"learned", "SGD", "momentum", "RMSProp", "Adam"}


def test_titles_have_a_perplexity(tmp_path):
    folder = ROOT.parent / "shared" / "data" / "nips_titles"
    if not folder.exists():
        pytest.skip("titles of NeurIPS papers are not here")
    pytest.importorskip("sklearn")
    printed, results = finished(tmp_path, "vae", "--titles", str(folder))
    assert {row["model"] for row in results["rows"]} == {
        "single",
        "hierarchical",
        "text",
    } and "perplexity" in printed
