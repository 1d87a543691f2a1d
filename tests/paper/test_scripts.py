"""The paper's scripts run, write their claims and figures, and a second run reads what the first has kept."""

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.slow


@pytest.fixture
def paper(run_script, tmp_path):
    """Runs a script that must succeed, and looks at its claims and figures."""

    def paper(name, *figures):
        done = run_script(name)
        assert done.code == 0, done.errors[-2000:]
        assert all(
            {"claim", "paper", "ours", "holds"} <= claim.keys() for claim in done.results["claims"]
        )
        for figure in (name, *figures):
            assert (tmp_path / f"{figure}.png").stat().st_size > 10_000
        return done

    return paper


def test_structure_traces_table_1_and_draws_the_figures(paper):
    done = paper("structure", "structure_counterexample", "structure_natural", "structure_trees")
    assert "  G | L, J, H" in done.printed and "missing: D -> C, C -> B" in done.printed
    assert [row["v"] for row in done.results["table_1"]] == list("DISGL")
    assert done.results["figure_5"]["edges"]["NaMI, forward"] == {"3": 9, "4": 35, "5": 135}
    assert all(claim["holds"] for claim in done.results["claims"])


def test_time_series_compares_orders_and_resumes(paper, run_script):
    done = paper("time_series")
    assert "level_1 | x_1, x_2, x_3, x_4" in done.printed
    assert "slope_4 | slope_3; from the model" in done.printed
    # the others are about training, of which there is little
    structure, floors = done.results["claims"][:2]
    assert structure["holds"] and floors["holds"]
    again = run_script("time_series")
    assert again.code == 0 and "8 of 8 runs are kept" in again.printed
    assert again.results["systems"] == done.results["systems"]


def test_the_semi_supervised_vae_has_the_blocks_order_and_finished_runs_are_not_run_again(
    paper, run_script
):
    done = paper("semi_supervised")
    error, structure = done.results["claims"]
    assert structure["holds"] and structure["ours"] == {"y": ["x"], "z": ["x", "y"]}
    assert 0 <= error["ours"]["with"][0] <= 1
    assert all(len(runs) == 1 for runs in done.results["runs"].values())
    again = run_script("semi_supervised")
    assert "3 of 3 runs are kept" in again.printed
    assert again.results == done.results


def test_the_mixture_compares_three_networks_and_a_posterior_of_real_data(paper):
    done = paper("gaussian_mixture")
    for text in ("fully connected", "reverse NaMI", "plate-aware", "Old Faithful", "NUTS"):
        assert text in done.printed
    assert len(done.results["claims"]) == 3
    for system in done.results["systems"].values():
        assert torch.tensor(system["curves"]).shape == (1, 2)


def test_the_vae_writes_its_figure_and_claims(paper):
    done = paper("vae")
    assert len(done.results["claims"]) == 6
    assert {run["kind"] for run in done.results["runs"]} == {"mean field", "faithful"}
    assert "digits" in done.results["settings"]["data"]
    gaps = [run["negative_elbo_of_images"] - run["negative_ais"] for run in done.results["runs"]]
    assert gaps == pytest.approx([run["gap"] for run in done.results["runs"]])


@pytest.mark.parametrize("name", ["trees", "minimality", "tree_depths"])
def test_trees_give_reasons_for_claims_that_do_not_hold(paper, run_script, name):
    assert all(claim["holds"] or claim["why"] for claim in paper(name).results["claims"])
    if name == "minimality":
        assert "6 of 6 runs are kept" in run_script(name).printed


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("structure", "--device", "cuda:99"), 2, ["Expected a device that is there"]),
        (("semi_supervised", "--data", "absent"), 1, ["Expected a folder of images"]),
        (("vae", "--data", "absent"), 2, ["none at absent", "Without --data"]),
    ],
)
def test_what_is_missing_is_told_without_a_traceback(run_script, arguments, code, words):
    done = run_script(*arguments)
    assert done.code == code and all(text in done.errors for text in words)
    assert "Traceback" not in done.errors
