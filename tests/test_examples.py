"""The examples run as a user runs them, and write what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(script: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_quickstart_prints_network_inverse_and_table_and_writes_plots(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run("examples/quickstart.py", "--smoke", "--out", str(tmp_path))
    assert "theta[schools]: latent, given mu, tau" in printed
    assert "theta[schools] | mu, tau, y" in printed
    for guide in (
        "AutoNormal",
        "AutoMultivariateNormal",
        "AutoStructured",
        "AutoNaMIGuide",
        'families="flow"',
    ):
        assert guide in printed
    assert "-31.3113 nats" in printed  # by an independent adaptive quadrature
    assert (tmp_path / "network.md").read_text().count("```mermaid") == 2
    for name in ("network.png", "funnels.png"):
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "benchmarks").glob("*.py")))
def test_benchmark_runs_and_leaves_results_alone(script):
    results = ROOT / "benchmarks" / "results"
    before = {path: path.read_bytes() for path in results.glob("*.json")}
    try:
        assert run(f"benchmarks/{script}", "--smoke").strip()
        assert {path: path.read_bytes() for path in results.glob("*.json")} == before
    finally:
        for path, content in before.items():
            path.write_bytes(content)
