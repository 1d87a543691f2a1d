"""The examples run as a user runs them, and write what they say."""

import importlib
import importlib.util
import json
import linecache
import math

import pytest
import scripts
import torch
from scipy import integrate, special, stats
from scripts import ROOT
from torch.distributions import MultivariateNormal, Normal, Poisson


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
        "pyro_nami.fit",
        "exact: conditionals",
    ):
        assert guide in printed
    assert "-31.3113 nats" in printed  # by an independent adaptive quadrature
    assert (tmp_path / "network.md").read_text().count("```mermaid") == 2
    for name in ("network.png", "funnels.png"):
        assert (tmp_path / name).stat().st_size > 10_000


@pytest.mark.slow
def test_series_prints_verdicts_and_forecasts_and_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run("examples/series.py", "--smoke", "--out", str(tmp_path))
    assert printed.count(": checked") + printed.count(": exact") == 3
    assert "level[time] | move, noise, start, flow[time:], level[time - 1]" in printed
    assert "dry from 1899 on" in printed  # as Cobb (1978) found
    assert (tmp_path / "series.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "lines"),
    [
        ("radon", ["--nuts"], ["alpha[counties] |", "sigma |", "NUTS"]),
        ("penicillin", [], ["a[plates] |", "b[samples] |"]),
        ("sparse", ["--sparse", "30", "8", "90"], ["a[plates] |", "b[samples] |"]),
        ("seeds", ["--nuts"], ["effect[plates] |", "of_both |", "NUTS"]),
        ("epilepsy", ["--rate", "0.03"], ["own[patients] |", "beta[5]"]),
    ],
)
def test_mixed_models_print_inverse_and_tables_and_write_plots(tmp_path, name, options, lines):
    pytest.importorskip("matplotlib")
    printed = run("examples/mixed_models.py", name, "--smoke", "--out", str(tmp_path), *options)
    for text in (
        "exact draws",
        "AutoLowRankMultivariateNormal",
        "AutoNaMIGuide",
        "sd ratio",
        *lines,
    ):
        assert text in printed
    for plot in ("errors.png", "effects.png"):
        assert (tmp_path / name / plot).stat().st_size > 10_000
    assert json.loads((tmp_path / name / "results.json").read_text())["globals"]["AutoNormal"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "plot", "lines"),
    [
        ([], "mixture.png", ["locs |", "weights |", "sd ratio"]),
        (
            ["--faithful"],
            "faithful.png",
            ["z: exact, reads locs, scales, weights, y", "AutoNormal, rate 0.03, seed 1"],
        ),
    ],
    ids=["amortized", "faithful"],
)
def test_mixture_prints_inverse_or_rules_and_tables_and_writes_plot(tmp_path, options, plot, lines):
    pytest.importorskip("matplotlib")
    printed = run("examples/mixture.py", "--smoke", "--out", str(tmp_path), *options)
    for text in ("NUTS", "AutoNaMIGuide", *lines):
        assert text in printed
    assert (tmp_path / plot).stat().st_size > 10_000
    assert json.loads((tmp_path / "results.json").read_text())


@pytest.mark.slow
def test_compiled_inference_checks_weighs_and_draws(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run("examples/compiled_inference.py", "--smoke", "--out", str(tmp_path))
    for text in (
        "Calibration:",
        "The data lie inside",
        "-31.3113 exact",
        "annealed importance sampling",
        "guide, weighted",
    ):
        assert text in printed
    assert (tmp_path / "calibration.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "results.json").read_text())["passed"] is False


@pytest.mark.slow
def test_simulator_is_a_black_box_and_a_model(tmp_path):
    pytest.importorskip("matplotlib")
    printed = run("examples/simulator.py", "--smoke", "--out", str(tmp_path))
    for text in ("black box", "Pyro model", "effective, k-hat", "log evidence on the grid"):
        assert text in printed
    assert (tmp_path / "simulator.png").stat().st_size > 10_000
    rows = json.loads((tmp_path / "simulator.json").read_text())
    assert "log evidence" in rows["Pyro model"] and "log evidence" not in rows["black box"]


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name, as Python does when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


def test_radon_data_is_posteriordbs(example):
    county, floor, y = example("mixed_models").read_radon()
    assert len(y) == 919 and county.unique().tolist() == list(range(85)) and floor.sum() == 153
    assert county.bincount().max() == 116 and county.bincount().min() == 1
    assert torch.allclose(y[:3], torch.tensor([0.0953101798, 0.8329091229, 1.0986122887]))


def test_penicillin_data_has_the_published_variance_components(example):
    """By REML, as in the tests of Metida.jl; a balanced design has them in closed form."""
    _, _, (plates, samples), y = example("mixed_models").read_penicillin()
    table = y.double().reshape(plates, samples)
    rows, columns = table.mean(1), table.mean(0)
    rest = (table - rows[:, None] - columns + table.mean()).square().sum() / (
        (plates - 1) * (samples - 1)
    )
    found = torch.stack(
        [(samples * rows.var() - rest) / samples, (plates * columns.var() - rest) / plates, rest]
    )
    assert torch.allclose(found, torch.tensor([0.716908, 3.73092, 0.302415]).double(), rtol=1e-5)


def test_radon_evidence_given_sds_is_the_normal_density_of_the_data(example):
    examples = example("mixed_models")
    county, floor, y = examples.read_radon()
    sds = torch.tensor([[0.3, 0.2, 0.7], [1.0, 0.05, 0.9]]).double()
    found = examples.linear_radon(county, floor, y).log_likelihood(sds)
    same, slope = (county[:, None] == county).double(), (floor[:, None] * floor).double()
    for (tau_a, tau_b, sigma), value in zip(sds, found):
        cov = (
            100 * (1 + slope) + same * (tau_a**2 + tau_b**2 * slope) + sigma**2 * torch.eye(len(y))
        )
        expected = MultivariateNormal(torch.zeros(len(y)).double(), cov).log_prob(y.double())
        assert abs(value - expected) < 1e-5  # the data are float32


def test_crossed_evidence_given_sds_is_the_normal_density_of_the_data(example):
    examples = example("mixed_models")
    for first, second, sizes, y in (examples.read_penicillin(), examples.simulate(30, 8, 90)):
        sds = torch.tensor([[0.8, 2.0, 0.5]]).double()
        found = examples.linear_crossed(first, second, sizes, y).log_likelihood(sds)
        cov = (
            25.0
            + 0.64 * (first[:, None] == first)
            + 4.0 * (second[:, None] == second)
            + 0.25 * torch.eye(len(y))
        )
        expected = MultivariateNormal(torch.zeros(len(y)).double(), cov.double()).log_prob(
            y.double()
        )
        assert abs(found.item() - expected) < 1e-4


def test_exact_draws_of_radon_given_sds_have_the_moments_of_conditioning_on_the_data(example):
    examples = example("mixed_models")
    county, floor, y = examples.read_radon()
    tau_a, tau_b, sigma, count = 0.3, 0.2, 0.7, 4000
    draws = examples.linear_radon(county, floor, y).sample(
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
        mean, variance = (
            cov @ precision @ y.double(),
            100 + tau**2 - ((cov @ precision) * cov).sum(-1),
        )
        assert ((draws[site].mean(0) - mean) / (variance / count).sqrt()).abs().max() < 4.5
        assert (draws[site].var(0) / variance - 1).abs().max() < 4.5 * math.sqrt(2 / count)


def test_seeds_and_epilepsy_data_have_the_known_sums(example):
    """Counts of BUGS, and of MASS since its correction of one visit; its centered logs."""
    seed, extract, total, germinated = example("mixed_models").read_seeds()
    assert (total.sum(), germinated.sum()) == (831, 424)
    assert [germinated[(seed == i) & (extract == j)].sum() for i in (0, 1) for j in (0, 1)] == [
        99,
        201,
        49,
        75,
    ]
    design, patient, seizures = example("mixed_models").read_epilepsy()
    assert seizures.sum() == 1950 and seizures[patient == 7].tolist() == [40, 20, 23, 12]
    assert torch.allclose(design[[0, 192], 1], torch.tensor([-0.7563538, 1.8630308]), atol=1e-6)
    assert torch.allclose(design[[0, 192], 4], torch.tensor([0.1142037, -0.2287411]), atol=1e-6)
    assert torch.allclose(design[:4, 5], torch.tensor([-0.25, -0.25, -0.25, 0.75]))


def test_seeds_evidence_given_globals_is_an_integral_over_each_plates_effect(example):
    examples = example("mixed_models")
    data = examples.read_seeds()
    values = torch.tensor([[-0.5, 0.1, 1.3, -0.8, 0.3], [-1.5, 1.0, 0.5, 0.3, 1.2]]).double()
    found = examples.generalized_seeds(*data).log_likelihood(values)

    def integrand(z: float, at: float, sigma: float, total: float, germinated: float) -> float:
        return stats.norm.pdf(z) * stats.binom.pmf(germinated, total, special.expit(at + sigma * z))

    for (a, b, c, d, sigma), value in zip(values.tolist(), found):
        expected = 0.0
        for seed, extract, *counts in zip(*(column.tolist() for column in data)):
            at = a + b * seed + c * extract + d * seed * extract
            expected += math.log(
                integrate.quad(integrand, -8, 8, (at, sigma, *counts), epsabs=0.0)[0]
            )
        assert abs(value - expected) < 5e-5  # what lies beyond 6 sds of a mode


def test_epilepsy_evidence_and_draws_given_globals_are_those_of_a_patients_dense_grid(example):
    """Patient 49, the one with most seizures, by sums over 400 values of its effect and 800 of each visit's."""
    examples = example("mixed_models")
    design, patient, seizures = examples.read_epilepsy()
    rows = patient == 48
    values = torch.tensor([1.6, 0.9, -0.95, 0.35, 0.48, -0.1, 0.5, 0.36]).double()
    only = examples.generalized_epilepsy(design[rows], torch.zeros(4).long(), seizures[rows])
    tau, sigma = values[6:]
    own, visit = torch.linspace(-4, 4, 400).double(), torch.linspace(-3, 3, 800).double()
    rate = (design[rows].double() @ values[:6])[:, None, None] + own[:, None] + visit
    inner = Poisson(rate.exp()).log_prob(seizures[rows, None, None].double()) + Normal(
        0.0, sigma
    ).log_prob(visit)
    joint = Normal(0.0, tau).log_prob(own) + (inner.logsumexp(-1) + math.log(6 / 799)).sum(0)
    assert abs(only.log_likelihood(values[None])[0] - joint.logsumexp(0) - math.log(8 / 399)) < 1e-3
    weights = joint.softmax(0)
    mean = weights @ own
    variance = weights @ (own - mean).square()
    draws = only.sample(values.expand(4000, -1))
    assert (draws["own"].mean() - mean).abs() < 4.5 * (variance / 4000).sqrt()
    assert (draws["own"].var() / variance - 1).abs() < 4.5 * math.sqrt(2 / 4000)
    given = inner.softmax(-1)  # of each visit's effect, for each value of the patient's
    means = ((given @ visit) * weights).sum(-1)
    variances = ((given @ visit.square()) * weights).sum(-1) - means.square()
    assert ((draws["visit"].mean(0) - means).abs() < 4.5 * (variances / 4000).sqrt()).all()
    assert ((draws["visit"].var(0) / variances - 1).abs() < 4.5 * math.sqrt(2 / 4000)).all()


@pytest.mark.slow
def test_draws_of_nuts_are_read_back_only_for_the_same_model_data_and_settings(
    example, tmp_path, capsys
):
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
