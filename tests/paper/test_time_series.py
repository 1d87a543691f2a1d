"""The time series: structures and limits are exact whatever the training; a run resumes."""

import pytest


@pytest.mark.slow
def test_time_series_compares_orders_and_resumes(run_script, tmp_path):
    pytest.importorskip("matplotlib")
    done = run_script("time_series")
    assert done.code == 0, done.errors[-2000:]
    assert "level_1 | x_1, x_2, x_3, x_4" in done.printed
    assert "slope_4 | slope_3; from the model" in done.printed
    assert (tmp_path / "time_series.png").stat().st_size > 10_000
    structure, floors = done.results["claims"][:2]  # the others are about training, of which there is none
    assert structure["holds"] and floors["holds"]
    again = run_script("time_series")
    assert again.code == 0 and "8 of 8 runs are kept" in again.printed
    assert again.results["systems"] == done.results["systems"]
