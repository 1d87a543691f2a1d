"""The semi-supervised VAE, and the classes that its one guide enumerates."""

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.slow


def test_the_script_runs_with_the_blocks_order_and_finished_runs_are_read_not_run_again(run_script, tmp_path):
    finished = run_script("semi_supervised")
    assert finished.code == 0, finished.errors
    assert (tmp_path / "semi_supervised.png").exists()
    error, structure = finished.results["claims"]
    assert structure["holds"] and structure["ours"] == {"y": ["x"], "z": ["x", "y"]}
    assert 0 <= error["ours"]["with"][0] <= 1
    assert all(len(runs) == 1 for runs in finished.results["runs"].values())
    again = run_script("semi_supervised")
    assert "3 of 3 runs are kept" in again.printed
    assert again.results == finished.results


def test_a_missing_folder_of_images_is_told(run_script, tmp_path):
    finished = run_script("semi_supervised", "--data", str(tmp_path / "none"))
    assert finished.code == 1 and "Expected a folder of images" in finished.errors
    assert "Traceback" not in finished.errors
