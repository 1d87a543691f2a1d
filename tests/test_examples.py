"""The examples run as a user runs them, and write what they say."""

import importlib
import importlib.util
import json
import linecache
import math

import pytest
import scripts
import torch
from scripts import ROOT
from torch.distributions import MultivariateNormal


def run(script: str, *arguments: str, own_process: bool = False) -> str:
    done = scripts.run(script, *arguments, own_process=own_process)
    assert done.code == 0, done.errors[-2000:]
    return done.printed


@pytest.mark.slow
def test_quickstart_prints_network_inverse_and_table_and_writes_plots(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run("examples/quickstart.py", "--smoke", "--out", str(tmp_path), own_process=True)
    assert "theta[schools]: latent, given mu, tau" in printed
    assert "theta[schools] | mu, tau, y" in printed
    for guide in (
        "AutoNormal",
        "AutoMultivariateNormal",
        "AutoStructured",
        "AutoNaMIGuide",
        "exact=False",
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
        ("radon", [], ["errors.png", "counties.png"], ["alpha[counties] |", "sigma |"]),
        ("crossed", [], ["errors.png", "effects.png"], ["a[plates] |", "b[samples] |"]),
        (
            "crossed",
            ["--sparse", "30", "8", "90"],
            ["errors.png", "effects.png"],
            ["a[plates] |", "b[samples] |"],
        ),
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
def test_compiled_inference_diagnoses_weighs_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run("examples/compiled_inference.py", "--smoke", "--out", str(tmp_path))
    for text in ("Diagnosis:", "Calibration:", "-31.3113 exact", "annealed importance sampling", "guide, weighted"):
        assert text in printed
    assert (tmp_path / "diagnosis.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "results.json").read_text())["passed"] is False


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
    found = torch.stack(
        [(samples * rows.var() - rest) / samples, (plates * columns.var() - rest) / plates, rest]
    )
    assert torch.allclose(found, torch.tensor([0.716908, 3.73092, 0.302415]).double(), rtol=1e-5)


def test_radon_evidence_given_sds_is_the_normal_density_of_the_data(example):
    radon = example("radon")
    county, floor, y = radon.read_data()
    sds = torch.tensor([[0.3, 0.2, 0.7], [1.0, 0.05, 0.9]]).double()
    found = radon.linear_model(county, floor, y).log_likelihood(sds)
    same, slope = (county[:, None] == county).double(), (floor[:, None] * floor).double()
    for (tau_a, tau_b, sigma), value in zip(sds, found):
        cov = 100 * (1 + slope) + same * (tau_a**2 + tau_b**2 * slope) + sigma**2 * torch.eye(len(y))
        expected = MultivariateNormal(torch.zeros(len(y)).double(), cov).log_prob(y.double())
        assert abs(value - expected) < 1e-5  # the data are float32


def test_crossed_evidence_given_sds_is_the_normal_density_of_the_data(example):
    crossed = example("crossed")
    for first, second, sizes, y in (crossed.read_data(), crossed.simulate(30, 8, 90)):
        sds = torch.tensor([[0.8, 2.0, 0.5]]).double()
        found = crossed.linear_model(first, second, sizes, y).log_likelihood(sds)
        cov = (
            25.0
            + 0.64 * (first[:, None] == first)
            + 4.0 * (second[:, None] == second)
            + 0.25 * torch.eye(len(y))
        )
        expected = MultivariateNormal(torch.zeros(len(y)).double(), cov.double()).log_prob(y.double())
        assert abs(found.item() - expected) < 1e-4


def test_exact_draws_of_radon_given_sds_have_the_moments_of_conditioning_on_the_data(example):
    radon = example("radon")
    county, floor, y = radon.read_data()
    tau_a, tau_b, sigma, count = 0.3, 0.2, 0.7, 4000
    torch.manual_seed(0)
    draws = radon.linear_model(county, floor, y).sample(
        torch.tensor([[tau_a, tau_b, sigma]]).double().expand(count, 3)
    )
    same, floor = (county[:, None] == county).double(), floor.double()
    slope = floor[:, None] * floor
    precision = torch.linalg.inv(
        100 * (1 + slope) + same * (tau_a**2 + tau_b**2 * slope) + sigma**2 * torch.eye(len(y))
    )
    own = (torch.arange(85)[:, None] == county).double()
    for site, tau, scale in (("alpha", tau_a, torch.ones_like(floor)), ("beta", tau_b, floor)):
        cov = (100 + tau**2 * own) * scale
        mean, variance = cov @ precision @ y.double(), 100 + tau**2 - ((cov @ precision) * cov).sum(-1)
        assert ((draws[site].mean(0) - mean) / (variance / count).sqrt()).abs().max() < 4.5
        assert (draws[site].var(0) / variance - 1).abs().max() < 4.5 * math.sqrt(2 / count)


@pytest.mark.slow
def test_draws_of_nuts_are_read_back_only_for_the_same_model_data_and_settings(example, tmp_path, capsys):
    """A temporary module is the model's; changing its source, a constant, a datum or the seed samples anew."""
    references = example("references")
    source = """
import pyro, pyro.distributions as dist
SCALE = 1.0
def model(y):
    m = pyro.sample("m", dist.Normal(0.0, SCALE))
    pyro.sample("y", dist.Normal(m, 1.0).expand(y.shape).to_event(1), obs=y)
"""

    def drawn_anew(text: str = source, y: float = 0.5, seed: int = 0) -> bool:
        path = tmp_path / "written.py"
        path.write_text(text)
        linecache.checkcache()
        spec = importlib.util.spec_from_file_location("written", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        problem = references.Problem(module.model, (torch.tensor([y, 1.0]),), ("m",))
        draws, _ = references.run_nuts(problem, tmp_path, seed=seed, smoke=True)
        assert draws["m"].shape == (20,)
        return "of an earlier run" not in capsys.readouterr().out

    assert drawn_anew()
    assert not drawn_anew()
    assert drawn_anew(source.replace("0.0, SCALE", "0.1, SCALE"))
    assert drawn_anew(source.replace("SCALE = 1.0", "SCALE = 2.0"))
    assert drawn_anew(y=0.6)
    assert drawn_anew(seed=1)
    assert not drawn_anew()


BENCHMARKS = sorted(
    path.name for path in (ROOT / "benchmarks").glob("*.py") if "def main" in path.read_text()
)


@pytest.mark.slow
@pytest.mark.parametrize("script", BENCHMARKS)
def test_benchmark_runs_and_leaves_results_alone(script):
    results = ROOT / "benchmarks" / "results"
    before = {path: path.read_bytes() for path in results.glob("*.json")}
    try:
        assert run(f"benchmarks/{script}", "--smoke").strip()
        assert {path: path.read_bytes() for path in results.glob("*.json")} == before
    finally:
        for path, content in before.items():
            path.write_bytes(content)
