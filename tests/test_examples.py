"""The examples run as a user runs them, and write what they say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributions import MultivariateNormal

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
@pytest.mark.parametrize(
    ("script", "options", "plots", "latents"),
    [
        ("radon", [], ["scatter.png", "counties.png"], ["alpha[counties] |", "sigma |"]),
        ("crossed", [], ["scatter.png", "effects.png"], ["a[plates] |", "b[samples] |"]),
        ("crossed", ["--sparse", "30", "8", "90"], ["scatter.png", "effects.png"], ["a[plates] |", "b[samples] |"]),
        ("mixture", [], ["mixture.png"], ["locs |", "weights |"]),
    ],
    ids=["radon", "penicillin", "sparse", "mixture"],
)
def test_example_prints_inverse_and_tables_and_writes_plots(tmp_path, script, options, plots, latents):
    pytest.importorskip("matplotlib")
    printed = run(f"examples/{script}.py", "--smoke", "--out", str(tmp_path), *options)
    for text in ("NUTS", "AutoNaMIGuide", "sd ratio", *latents):
        assert text in printed
    for name in plots:
        assert (tmp_path / name).stat().st_size > 10_000
    assert json.loads((tmp_path / "results.json").read_text())


@pytest.mark.slow
def test_nuts_draws_are_kept_and_read_back(tmp_path):
    pytest.importorskip("matplotlib")
    first, second = (run("examples/crossed.py", "--smoke", "--out", str(tmp_path)) for _ in range(2))
    assert "draws of an earlier run" in second and "draws of an earlier run" not in first
    assert "draws of an earlier run" not in run("examples/crossed.py", "--smoke", "--seed", "1", "--out", str(tmp_path))


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name, as Python does when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def test_radon_data_is_posteriordbs(example):
    county, floor, y = example("radon").read_data()
    assert len(y) == 919 and county.unique().tolist() == list(range(85)) and floor.sum() == 153
    assert county.bincount().max() == 116 and county.bincount().min() == 1
    assert torch.allclose(y[:3], torch.tensor([0.0953101798, 0.8329091229, 1.0986122887]))


def test_penicillin_data_has_the_published_variance_components(example):
    """By REML, as in the tests of Metida.jl; a balanced design has them in closed form."""
    _, _, (plates, samples), y = example("crossed").read_data()
    table = y.double().reshape(plates, samples)
    rows, columns = table.mean(1), table.mean(0)
    rest = (table - rows[:, None] - columns + table.mean()).square().sum() / ((plates - 1) * (samples - 1))
    found = torch.stack([(samples * rows.var() - rest) / samples, (plates * columns.var() - rest) / plates, rest])
    assert torch.allclose(found, torch.tensor([0.716908, 3.73092, 0.302415]).double(), rtol=1e-5)


def test_radon_evidence_given_sds_is_the_normal_density_of_the_data(example):
    radon = example("radon")
    county, floor, y = radon.read_data()
    sds = torch.tensor([[0.3, 0.2, 0.7], [1.0, 0.05, 0.9]]).double()
    found = radon.exact_posterior(county, floor, y).log_likelihood(sds)
    same, slope = (county[:, None] == county).double(), (floor[:, None] * floor).double()
    for (tau_a, tau_b, sigma), value in zip(sds, found):
        cov = 100 * (1 + slope) + same * (tau_a**2 + tau_b**2 * slope) + sigma**2 * torch.eye(len(y))
        expected = MultivariateNormal(torch.zeros(len(y)).double(), cov).log_prob(y.double())
        assert abs(value - expected) < 1e-5  # the data are float32


def test_crossed_evidence_given_sds_is_the_normal_density_of_the_data(example):
    crossed = example("crossed")
    for first, second, sizes, y in (crossed.read_data(), crossed.simulate(30, 8, 90)):
        sds = torch.tensor([[0.8, 2.0, 0.5]]).double()
        found = crossed.exact_posterior(first, second, sizes, y).log_likelihood(sds)
        cov = 25.0 + 0.64 * (first[:, None] == first) + 4.0 * (second[:, None] == second) + 0.25 * torch.eye(len(y))
        expected = MultivariateNormal(torch.zeros(len(y)).double(), cov.double()).log_prob(y.double())
        assert abs(found.item() - expected) < 1e-4


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
