"""The paper's small graphs: what the script finds is what the paper says, but for one claim of its own."""

import pytest


@pytest.mark.slow
def test_structure_traces_table_1_and_draws_the_figures(run_script, tmp_path):
    pytest.importorskip("matplotlib")
    done = run_script("structure")
    assert done.code == 0, done.errors[-2000:]
    assert "  G | L, J, H" in done.printed and "missing: D -> C, C -> B" in done.printed
    assert [row["v"] for row in done.results["table_1"]] == list("DISGL")
    assert done.results["figure_5"]["edges"]["NaMI, forward"] == {"3": 9, "4": 35, "5": 135}
    failed = [claim["claim"] for claim in done.results["claims"] if not claim["holds"]]
    assert not failed
    for name in ("structure", "structure_counterexample", "structure_natural", "structure_trees"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000


def test_a_device_that_is_not_there_is_refused(run_script):
    done = run_script("structure", "--device", "cuda:99")
    assert done.code == 2 and "Expected a device that is there" in done.errors
