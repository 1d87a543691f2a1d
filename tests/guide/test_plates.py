"""Plates, covariates and pooling: shared weights, exchangeable instances, other sizes, minibatches."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    CASES,
    amortized,
    beta_bernoulli,
    conjugate_normal,
    coupled_instances,
    crossed,
    discrete_locals,
    eight_schools,
    independent_locals,
    local_normals,
    nested,
    ready,
    regression,
    steps,
)
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO

pytestmark = [
    pytest.mark.filterwarnings("error", "ignore:Failed to verify mean field restriction"),
    pytest.mark.usefixtures("double"),
]
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])


def names_of_shapes(guide):
    return {name: tuple(value.shape) for name, value in guide.named_parameters()}


def schools(**options):
    """Returns a guide of eight schools, data and a draw."""
    y, sigma = CASES["eight_schools"].arguments()
    values = {"mu": torch.tensor(0.3), "tau": torch.tensor(1.2), "theta": torch.randn(8)}
    return ready(eight_schools, y, sigma, **options), y, sigma, values


def log_prob_of(name, guide, values, *args):
    """Returns log q of every instance of a latent, at fixed values."""
    trace = poutine.trace(poutine.condition(guide, values)).get_trace(*args)
    trace.compute_log_prob()
    return trace.nodes[name]["log_prob"]


def both_traces(guide, model, *args):
    """Returns the traces of a guide and of the model replayed in it."""
    run = poutine.trace(guide).get_trace(*args)
    return run, poutine.trace(poutine.replay(model, run)).get_trace(*args)


# ---- exchangeability


def test_nested_plates_are_exchangeable_on_both_levels():
    y = torch.randn(3, 4)
    guide = ready(nested, y, inverse="reverse")
    values = {"top": torch.randn(()), "group": torch.randn(3, 1), "member": torch.randn(3, 4)}
    expected = guide.log_prob(values, y)
    groups, members = torch.randperm(3), torch.stack([torch.randperm(4) for _ in range(3)])
    within = {**values, "member": values["member"].gather(1, members)}
    across = {**values, "group": values["group"][groups], "member": values["member"][groups]}
    assert torch.allclose(guide.log_prob(within, y.gather(1, members)), expected)
    assert torch.allclose(guide.log_prob(across, y[groups]), expected)
    mixed = y.flatten()[torch.randperm(12)].reshape(3, 4)
    assert not torch.allclose(guide.log_prob(values, mixed), expected)


@DIRECTIONS
def test_local_latents_have_one_law(inverse):
    """Equal data in two rows: equal densities; other data: other densities."""
    y, z = torch.randn(4, 2), torch.randn(4, 2)
    y[1], z[1] = y[0], z[0]
    guide = ready(independent_locals, y, inverse=inverse)
    log_prob = log_prob_of("z", guide, {"z": z}, y)
    assert log_prob[0] == log_prob[1] and len(log_prob.unique()) == 3


def test_a_local_latent_reads_its_own_row_only():
    """Given the globals, rows are independent in the model, and in the guide."""
    guide, y, sigma, values = schools(inverse="reverse")
    moved = y.clone()
    moved[2] += 5
    before, after = (log_prob_of("theta", guide, values, data, sigma) for data in (y, moved))
    assert (before != after).tolist() == [i == 2 for i in range(8)]


# ---- sizes


@pytest.mark.parametrize(
    "model, data, inverse",
    [
        (conjugate_normal, lambda n: (torch.randn(n),), "reverse"),
        (conjugate_normal, lambda n: (torch.randn(n),), "forward"),
        (independent_locals, lambda n: (torch.randn(n, 2),), "reverse"),
        (independent_locals, lambda n: (torch.randn(n, 2),), "forward"),
        (eight_schools, lambda n: (torch.randn(n), torch.rand(n) + 1), "reverse"),
        (eight_schools, lambda n: (torch.randn(n), torch.rand(n) + 1), "mean_field"),
        (discrete_locals, lambda n: (torch.randn(n),), "reverse"),
        (nested, lambda n: (torch.randn(n, n + 1),), "reverse"),
    ],
)
def test_another_size_at_call_time(model, data, inverse):
    guide = ready(model, *data(5), inverse=inverse)
    before = names_of_shapes(guide)
    for size in (2, 20, 1):
        args = data(size)
        trace = poutine.trace(guide).get_trace(*args)
        trace.compute_log_prob()
        latents = {name: trace.nodes[name]["value"] for name in guide.bayesnet.latent}
        assert torch.allclose(guide.log_prob(latents, *args), trace.log_prob_sum())
        steps(model, guide, *args, count=1)
    assert names_of_shapes(guide) == before


@pytest.mark.parametrize("inverse", ["reverse", "mean_field"])
def test_parameters_do_not_grow_with_a_plate(inverse):
    shapes = []
    for size in (4, 40):
        pyro.clear_param_store()
        guide = ready(eight_schools, torch.randn(size), torch.rand(size) + 1, inverse=inverse)
        shapes.append(names_of_shapes(guide))
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("inverse", ["forward", "reverse", "free", "mean_field"])
def test_a_crossed_design_runs_in_every_direction(inverse):
    y = torch.randn(3, 2)
    values = ready(crossed, y, inverse=inverse)(y)
    assert values["a"].shape == (3, 1) and values["b"].shape == (2,)


def test_negative_and_positive_dims_agree():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("outer_plate", 3):  # dim -1 by default
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            with pyro.plate("inner_plate", 2):  # dim -2
                pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    guide = ready(model, torch.randn(2, 3))
    assert guide(torch.randn(2, 3))["z"].shape == (3,)


@DIRECTIONS
def test_sequential_plates_are_separate_sites(inverse):
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", 3):
            z = pyro.sample(f"z_{i}", dist.Normal(mu, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(z, 1.0), obs=y[i])

    y = torch.randn(3)
    guide = ready(model, y, inverse=inverse)
    assert list(guide(y)) == ["mu", "z_0", "z_1", "z_2"]
    steps(model, guide, y, count=1)


def test_a_vectorized_plate_in_a_sequential_one():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        for i in pyro.plate("outer_plate", 2):
            with pyro.plate(f"inner_{i}", 3):
                pyro.sample(f"z_{i}", dist.Normal(mu, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(mu, 1.0), obs=y[i])

    guide = ready(model, torch.randn(2))
    assert guide(torch.randn(2))["z_1"].shape == (3,)


# ---- joint blocks


@DIRECTIONS
@pytest.mark.parametrize("exact", [True, False])
def test_coupled_instances_form_one_block(inverse, exact):
    y = torch.tensor(2.0)
    guide = ready(coupled_instances, y, inverse=inverse, exact=exact)
    assert guide.inverse.joint["z"] == {"parts"}

    def elements(z):
        return log_prob_of("z", guide, {"scale": torch.tensor(1.0), "z": z}, y)

    base = elements(torch.zeros(4))
    for j, moved in enumerate(torch.eye(4)):
        reads = elements(moved) != base
        assert all(reads[i] == (j < i) for i in range(4) if i != j)


# ---- covariates


@DIRECTIONS
def test_known_scales_are_found_and_read(inverse):
    """eight schools: sigma is no site, but differs between schools."""
    guide, y, sigma, values = schools(inverse=inverse)
    before = guide.log_prob(values, y, sigma)
    assert not torch.allclose(guide.log_prob(values, y, sigma * 2), before)
    if inverse == "reverse":
        assert guide(y[:5], sigma[:5])["theta"].shape == (5,)
    steps(eight_schools, guide, y, sigma, count=1)
    before = guide.log_prob(values, y, sigma)
    sigma *= 2
    assert not torch.allclose(guide.log_prob(values, y, sigma), before), (
        "what was changed in place is read"
    )


@DIRECTIONS
def test_design_matrices_are_found_and_read_row_by_row(inverse):
    x, y = torch.randn(9, 2), torch.randn(9)
    guide = ready(regression, x, y, inverse=inverse)
    values, order = {"w": torch.randn(2), "s": torch.tensor(0.7)}, torch.randperm(9)
    expected = guide.log_prob(values, x, y)
    assert torch.allclose(guide.log_prob(values, x[order], y[order]), expected)
    assert not torch.allclose(guide.log_prob(values, x[order], y), expected)
    assert not torch.allclose(guide.log_prob(values, x * 2, y), expected)


def test_no_covariates_where_nothing_differs():
    guide = ready(beta_bernoulli, torch.tensor([1.0, 0.0, 1.0]))
    assert guide._plan.covariates.columns == {}


# ---- minibatches


def subsampled(y, size=3):
    local_normals(y, size)


def minibatch(batch, indices, size):
    """The model is told which instances it holds."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", size, subsample=indices):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=batch)


@DIRECTIONS
def test_guide_and_model_share_the_minibatch_and_its_scale(inverse):
    y = torch.arange(10.0)
    guide = ready(subsampled, y, inverse=inverse)
    seen = set()
    for _ in range(10):
        run, model_run = both_traces(guide, subsampled, y)
        for trace in (run, model_run):
            assert abs(trace.nodes["z"]["scale"] - 10 / 3) < 1e-6
        assert torch.equal(model_run.nodes["z"]["value"], run.nodes["z"]["value"])
        indices = model_run.nodes["data"]["value"]
        assert torch.equal(model_run.nodes["y"]["value"], y[indices])
        # the guide's factor of z reads the very rows that the model observes
        held = {"data": indices, **{name: run.nodes[name]["value"] for name in ("mu", "z")}}
        run.compute_log_prob()
        assert torch.allclose(run.nodes["z"]["log_prob"], log_prob_of("z", guide, held, y))
        seen.add(tuple(indices.tolist()))
    assert len(seen) > 1


@DIRECTIONS
def test_instances_that_the_model_names_are_kept(inverse):
    """AutoGuide overrides them without a word (pyro issue 3468)."""
    y, indices = torch.arange(10.0), torch.tensor([7, 2, 5])
    args = y[indices], indices, 10
    guide = ready(minibatch, *args, inverse=inverse)
    run, model_run = both_traces(guide, minibatch, *args)
    frame = model_run.nodes["y"]["cond_indep_stack"][0]
    assert frame.name == "data" and model_run.nodes["y"]["value"].tolist() == [7.0, 2.0, 5.0]
    if "data" in model_run.nodes:
        assert torch.equal(model_run.nodes["data"]["value"], indices)
    assert abs(run.nodes["z"]["scale"] - 10 / 3) < 1e-6
    steps(minibatch, guide, *args, count=1)


@DIRECTIONS
@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO])
def test_dependent_plates(inverse, objective):
    """The guide draws the first plate's instances, and the second follows as in the model."""

    def model(y, size=3):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("origin", len(y), subsample_size=size) as indices:
            a = pyro.sample("a", dist.Normal(mu, 1.0))
            pyro.sample("x", dist.Normal(a, 1.0), obs=y[indices])
        with pyro.plate("destin", len(y), subsample=indices):
            b = pyro.sample("b", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(b, 1.0), obs=y[indices])

    y = torch.arange(9.0)
    guide = amortized(model, inverse=inverse)
    steps(model, guide, y, elbo=objective())
    run, model_run = both_traces(guide, model, y)
    assert torch.equal(model_run.nodes["x"]["value"], model_run.nodes["y"]["value"])
    assert all(trace.nodes[name]["scale"] == 3 for trace in (run, model_run) for name in ("a", "b"))


@DIRECTIONS
@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO])
def test_crossed_plates_train(inverse, objective):
    steps(
        crossed, amortized(crossed, inverse=inverse), torch.randn(3, 3), count=1, elbo=objective()
    )


@DIRECTIONS
def test_a_first_call_on_a_minibatch_inside_particles(inverse):
    """init_loc_fn is called in subsampled and particle plates; shapes must not take them in (contract 5)."""
    y = torch.randn(20)
    guide = amortized(subsampled, inverse=inverse)
    with pyro.plate("outer", 6, dim=-2):
        values = guide(y, 5)
    assert values["mu"].shape == (6, 1) and values["z"].shape == (6, 5)
    plain = amortized(subsampled, inverse=inverse)
    plain(y, 5)
    assert names_of_shapes(guide) == names_of_shapes(plain)
