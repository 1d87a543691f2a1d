"""Whatever simulates, trains, samples or weighs does so on the device of the model."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import conjugate_normal, conjugate_normal_evidence, conjugate_normal_guide
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide, amortize, from_simulator
from pyro_nami.annealing.annealing import annealed_importance_sampling
from pyro_nami.checking.calibration import calibrate
from pyro_nami.inference.compilation import InferenceCompilation
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.simulate import Simulator

pytestmark = pytest.mark.cuda
DATA_SETS = torch.tensor([[0.3, -1.2, 2.0, 0.7], [1.0, 1.5, 0.5, 2.5], [-4.0, -3.0, -3.5, -2.0]])


@pytest.fixture
def y():
    return torch.zeros(4, device="cuda")


def test_annealing():
    y = DATA_SETS[0].cuda()
    options = {"num_chains": 1000, "num_temperatures": 25, "num_leapfrog_steps": 5}
    result = annealed_importance_sampling(conjugate_normal, None, y, **options)
    assert result.log_weights.is_cuda
    off = abs(result.log_evidence.item() - conjugate_normal_evidence(DATA_SETS[0]))
    assert off < 3 * result.log_evidence_error + 0.03 and result.log_evidence_error < 0.12


def test_importance_sampling(y):
    options = {"num_samples": 500, "observations": {"y": DATA_SETS}}
    draws = importance_sample(conjugate_normal, conjugate_normal_guide, y, **options)
    exact = torch.tensor([conjugate_normal_evidence(row) for row in DATA_SETS])
    assert (
        draws.log_weights.is_cuda and draws.mean("mu").is_cuda and draws.resample(5)["mu"].is_cuda
    )
    torch.testing.assert_close(draws.log_evidence.cpu(), exact, rtol=1e-5, atol=1e-5)


def test_simulation(y):
    state = torch.cuda.get_rng_state()
    simulator = Simulator(conjugate_normal, (y,))
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert simulator.draw(3).observed["y"].is_cuda


def test_compilation(y):
    adam = functools.partial(torch.optim.Adam, lr=0.02)
    guide = AutoNaMIGuide(conjugate_normal, exact=False)
    compilation = InferenceCompilation(conjugate_normal, guide, adam, batch_size=50)
    history = compilation.fit(50, (y,), validation=100, progress=False)
    assert history.losses[-1] < history.losses[0]
    assert all(parameter.is_cuda for parameter in compilation.guide.parameters())
    host = [{"mu": torch.zeros(10, 1), "y": torch.zeros(10, 4)}]
    assert compilation.fit(52, (y,), data=host, progress=False).losses


def ring():
    theta = pyro.sample("theta", dist.Uniform(torch.zeros(2, device="cuda") - 1, 1.0).to_event(1))
    pyro.sample("x", dist.Normal(theta.square(), 0.1).to_event(1))


@pytest.mark.parametrize("has_density", [False, True])
def test_one_call(has_density):
    model, options = ring, {"simulations": 400, "steps": 20, "progress": False}
    if not has_density:
        prior = dist.Uniform(torch.zeros(2, device="cuda") - 1, 1.0).to_event(1)
        model = from_simulator(prior, lambda theta: theta.square() + 0.1 * torch.randn_like(theta))
    posterior = amortize(model, observed=["x"], **options)
    assert all(parameter.is_cuda for parameter in posterior.guide.parameters())
    for x in (torch.full((2,), 0.5), torch.full((3, 2), 0.5), torch.full((2,), 50.0)):
        drawn = posterior({"x": x.cuda()}, 100)
        assert (
            drawn.samples["theta"].is_cuda
            and drawn.log_weights.is_cuda
            and drawn.resample(5)["theta"].is_cuda
        )


def test_simulations_from_the_host_in_one_call():
    theta = torch.rand(100, 2) * 2 - 1
    given = {"theta": theta, "x": theta.square() + 0.1 * torch.randn(100, 2)}
    posterior = amortize(ring, observed=["x"], simulations=given, steps=5, progress=False)
    assert posterior({"x": torch.ones(2, device="cuda")}, 20).samples["theta"].is_cuda


def test_conditionals_that_are_derived_in_one_call():
    def model():
        scale = pyro.sample("scale", dist.HalfCauchy(torch.tensor(1.0, device="cuda")))
        with pyro.plate("rows", 8):
            z = pyro.sample("z", dist.Normal(torch.zeros((), device="cuda"), scale))
            pyro.sample("x", dist.Normal(z, 1.0))

    posterior = amortize(model, observed=["x"], simulations=100, progress=False)
    drawn = posterior({"x": torch.ones(2, 8, device="cuda")}, 100)
    assert drawn.log_weights.is_cuda and bool((drawn.effective_sample_size > 95).all())


def linear(w):
    return torch.linspace(-1, 2, 12, device="cuda").sin().reshape(6, 2) @ w


def slopes(y):
    """A regression as it is written for one draw: by `torch.vmap` the scale has a grid, and counts have modes."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), device="cuda"), 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2, device="cuda"), 1.0).to_event(1))
    with pyro.plate("rows", 6):
        pyro.sample("y", dist.Normal(linear(w), scale), obs=y)


def counts(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, device="cuda"), 1.0).to_event(1))
    with pyro.plate("rows", 6):
        pyro.sample("y", dist.Poisson(linear(w).exp()), obs=y)


@pytest.mark.parametrize(("model", "rule"), [(slopes, "quadrature"), (counts, "newton")])
def test_models_that_are_written_for_one_draw(model, rule):
    y = torch.tensor([0.0, 1.0, 3.0, 0.0, 2.0, 1.0], device="cuda")
    guide = AutoNaMIGuide(model)
    losses = [SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(y) for _ in range(3)]
    found = {note.rule for note in guide.rules.values()}
    assert rule in found and all(value.is_cuda for value in guide(y).values())
    drawn = importance_sample(model, guide, y, num_samples=500)
    assert drawn.log_weights.is_cuda and bool(drawn.effective_sample_size > 400)
    assert losses[-1] == pytest.approx(-float(drawn.log_evidence), abs=1.0)


def test_a_model_that_is_written_for_one_draw_in_one_call():
    """With moves of its latents between epochs."""

    def model():
        w = pyro.sample(
            "w", dist.StudentT(torch.full((2,), 5.0, device="cuda"), 0.0, 1.0).to_event(1)
        )
        pyro.sample(
            "y", dist.StudentT(torch.full((), 4.0, device="cuda"), linear(w), 0.5).to_event(1)
        )

    posterior = amortize(model, observed=["y"], simulations=500, steps=40, progress=False)
    drawn = posterior({"y": torch.ones(6, device="cuda")}, 200)
    assert drawn.log_weights.is_cuda and drawn.effective_sample_size > 20


def test_offsets_of_groups_with_a_design():
    """Runs for many draws read ``offset[group]`` out of bounds, and the design is found among the arguments."""
    design = torch.randn(300, 8, device="cuda")
    group = torch.arange(300, device="cuda") % 40

    def model(design, group, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(8, device="cuda"), 1.0).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(torch.ones((), device="cuda")))
        with pyro.plate("groups", 40):
            offset = pyro.sample("offset", dist.Normal(0.0, scale))
        with pyro.plate("rows", 300):
            return pyro.sample("y", dist.Gamma(2.0, (design @ w + offset[group]).exp()), obs=y)

    y = model(design, group).detach()
    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    assert all(svi.step(design, group, y) < 1e6 for _ in range(3))
    assert importance_sample(model, guide, design, group, y, num_samples=50).log_weights.is_cuda


def test_calibration(y):
    result = calibrate(conjugate_normal, conjugate_normal_guide, y, seed=0)
    assert result.ranks["mu"].is_cuda
    assert result.passed
