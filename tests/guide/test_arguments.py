"""Arguments of a call that are no tensors, that are written to in place, or that change in every call."""

from __future__ import annotations

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Counted, amortized, local_normals, noise, pair, scatter, unobserved
from models import varying_intercept as of_groups
from pyro.infer import SVI, JitTrace_ELBO, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide
from pyro_nami.networks import Segments

Y = torch.tensor([0.3, -1.2, 0.8, 2.0, -0.4, 0.1])


def regression(x, y):
    """w, then z_n | w x_n with heavy tails, then y_n | z_n."""
    local_normals(y, prior=lambda w: dist.Cauchy(w * torch.as_tensor(x), 1.0))


def ready(model, *args, **options):
    guide = amortized(model, **options)
    guide(*args)
    scatter(guide)
    return guide, {name: value.detach() for name, value in guide(*args).items()}


def test_arrays_are_told_apart_by_what_they_hold():
    x = np.linspace(-1.0, 1.0, 6, dtype="float32")
    guide, values = ready(regression, x, Y)
    assert torch.equal(guide.log_prob(values, x.copy(), Y), guide.log_prob(values, x, Y))
    other = guide.log_prob(values, x[::-1].copy(), Y)
    assert other != guide.log_prob(values, x, Y)
    x[:] = x[::-1].copy()
    assert torch.equal(guide.log_prob(values, x, Y), other)
    assert torch.equal(guide.log_prob(values, torch.tensor(x), Y), other)


def varying_intercept(county, y):
    """mu, alpha_j | mu, then z_n | alpha[county_n] with heavy tails, then y_n | z_n."""
    of_groups(
        county, 4, y, likelihood=lambda a: dist.Normal(pyro.sample("z", dist.Cauchy(a, 1.0)), 1.0)
    )


def test_sums_over_sets_go_by_one_index_whatever_is_written_to_it():
    index, x = torch.tensor([0, 1, 0, 1]), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    segments = Segments(index, 2, -1)
    assert segments.sum(x).tolist() == [[4.0], [6.0]]
    index.copy_(torch.tensor([1, 1, 0, 0]))
    assert segments.sum(x).tolist() == [[4.0], [6.0]] and segments.amax(x).tolist() == [
        [3.0],
        [4.0],
    ]


def test_a_number_that_changes_in_every_call_does_not_double_the_runs():
    def annealed(y, beta):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.poutine.scale(scale=beta), pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    model = Counted(annealed)
    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    counts = [model.runs_of(svi.step, Y, 0.01 * step + 0.1) for step in range(30)]
    # one run each of guide and model
    assert counts[-1] == 2 and sum(counts[1:]) < 2 * len(counts) + 10
    assert sum(map(len, guide._reader.own._looks._table.values())) < 20


def test_a_flag_that_comes_late_is_seen_at_once():
    def model(y, second):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)
            if second:
                pyro.sample("w", dist.Normal(z, 1.0), obs=y)

    guide = AutoNaMIGuide(model, mode="amortized")
    guide(Y, True)
    for _ in range(20):
        guide(Y, True)
    scatter(guide)
    values = {"z": torch.tensor(0.3)}
    assert guide.log_prob(values, Y, False) != guide.log_prob(values, Y, True)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_traced_guide_reads_the_arguments_of_its_calls():
    x = torch.linspace(-1.0, 1.0, 6)
    guide, _ = ready(regression, x, Y)
    guide.requires_grad_(False)

    def drawn(x, y):
        return guide(x, y)["z"]

    traced = torch.jit.trace(drawn, (x, Y), check_trace=False)
    for args in ((x, Y), (x.flip(0), Y), (x, 2 * Y)):
        pyro.set_rng_seed(0)
        expected = drawn(*args)
        pyro.set_rng_seed(0)
        assert torch.allclose(traced(*args), expected, atol=1e-5)


@pytest.mark.parametrize("elbo", [Trace_ELBO, JitTrace_ELBO])
def test_a_guide_with_nothing_to_learn_trains_as_others_do(elbo):
    model = unobserved(x=dist.Normal(0.0, 1.0), y=dist.LogNormal(0.0, 1.0))
    guide = AutoNaMIGuide(model)
    svi = SVI(
        model,
        guide,
        Adam({"lr": 0.1}),
        elbo(num_particles=3, vectorize_particles=True, max_plate_nesting=0),
    )
    assert [svi.step() for _ in range(3)] == pytest.approx([0.0] * 3, abs=1e-5)
    loss = Trace_ELBO()(model, guide)()
    loss.backward()
    assert all(parameter.grad == 0 for parameter in guide.parameters())


def test_an_observation_that_no_factor_reads_reaches_the_models_own_conditionals():
    guide = AutoNaMIGuide(pair(dist.Normal(0.0, 1.0), noise(0.01)), observed=["z"])
    data = {"z": torch.tensor(5.0)}
    y = torch.stack([guide(observations=data)["y"] for _ in range(20)])
    assert (y - 5).abs().max() < 0.1
    expected = dist.Normal(5.0, 0.01).log_prob(torch.tensor(5.01))
    assert torch.allclose(
        guide.log_prob({"y": torch.tensor(5.01)}, observations=data), expected, rtol=1e-3
    )


def test_a_guide_says_what_it_is_made_of():
    assert "not called yet" in repr(AutoNaMIGuide(regression))
    guide, _ = ready(regression, torch.linspace(-1.0, 1.0, 6), Y)
    assert f"2 latents; {guide.num_parameters} weights" in repr(guide)
    assert "MaskedMLP(" in repr(guide) and "-> 64 ->" in repr(guide)
    assert Predictive(regression, guide=guide, num_samples=2)(torch.linspace(-1.0, 1.0, 6), Y)[
        "mu"
    ].shape == (2, 1)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("inside", [True, False], ids=["an argument", "in a closure"])
def test_a_traced_guide_reads_the_index_of_its_calls(inside):
    index, other = torch.tensor([0, 1, 2, 3, 0, 3]), torch.tensor([3, 3, 2, 1, 0, 1])

    guide, _ = ready(lambda index, y: varying_intercept(index if inside else other, y), index, Y)
    guide.requires_grad_(False)

    def drawn(index, y):
        return guide(index, y)["alpha"]

    traced = torch.jit.trace(drawn, (index, Y), check_trace=False)
    for args in ((index, Y), (other, Y)):
        pyro.set_rng_seed(0)
        expected = drawn(*args)
        pyro.set_rng_seed(0)
        assert torch.allclose(traced(*args), expected, atol=1e-5)


def test_an_argument_may_make_attributes_of_any_name():
    """A dict whose items are attributes raises KeyError where Python expects AttributeError."""

    class Data(dict):
        __getattr__ = dict.__getitem__

    def model(data):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 6):
            pyro.sample("y", dist.Normal(slope * data.x, 1.0), obs=data.y)

    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    assert all(math.isfinite(svi.step(Data(x=Y, y=Y))) for _ in range(2))
