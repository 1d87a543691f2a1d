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
    nested,
    ready,
    regression,
)
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam

pytestmark = [
    pytest.mark.filterwarnings("error", "ignore:Failed to verify mean field restriction"),
    pytest.mark.usefixtures("double"),
]
DIRECTIONS = pytest.mark.parametrize("inverse", ["forward", "reverse"])


def names_of_shapes(guide):
    return {name: tuple(value.shape) for name, value in guide.named_parameters()}


# ---- exchangeability


@DIRECTIONS
def test_a_global_latent_does_not_see_the_order_of_instances(inverse):
    y = torch.randn(7)
    guide = ready(conjugate_normal, y, inverse=inverse)
    values, order = {"mu": torch.tensor(0.3)}, torch.randperm(7)
    assert torch.allclose(guide.log_prob(values, y), guide.log_prob(values, y[order]))
    assert not torch.allclose(guide.log_prob(values, y), guide.log_prob(values, y.roll(1) * 2))


def test_permuted_instances_have_permuted_latents():
    """In reverse direction; forward couples the instances in one block, which has an order."""
    y, sigma = CASES["eight_schools"].arguments()
    guide = ready(eight_schools, y, sigma, inverse="reverse", conjugate=False)
    values = {"mu": torch.tensor(0.3), "tau": torch.tensor(1.2), "theta": torch.randn(8)}
    order = torch.randperm(8)
    moved = {**values, "theta": values["theta"][order]}
    expected = guide.log_prob(values, y, sigma)
    assert torch.allclose(guide.log_prob(moved, y[order], sigma[order]), expected)
    assert not torch.allclose(guide.log_prob(moved, y, sigma), expected)


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
    y = torch.randn(4, 2)
    y[1] = y[0]
    guide = ready(independent_locals, y, inverse=inverse)
    z = torch.randn(4, 2)
    z[1] = z[0]
    trace = poutine.trace(poutine.condition(guide, {"z": z})).get_trace(y)
    trace.compute_log_prob()
    log_prob = trace.nodes["z"]["log_prob"]
    assert log_prob[0] == log_prob[1] and len(log_prob.unique()) == 3


def test_a_local_latent_reads_its_own_row_only():
    """Given the globals, rows are independent in the model, and in the guide."""
    y, sigma = CASES["eight_schools"].arguments()
    guide = ready(eight_schools, y, sigma, inverse="reverse")
    fixed = {"mu": torch.tensor(0.3), "tau": torch.tensor(1.2), "theta": torch.zeros(8)}

    def theta(y):
        trace = poutine.trace(poutine.condition(guide, fixed)).get_trace(y, sigma)
        trace.compute_log_prob()
        return trace.nodes["theta"]["log_prob"]

    moved = y.clone()
    moved[2] += 5
    changed = theta(moved) != theta(y)
    assert changed.tolist() == [i == 2 for i in range(8)]


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
    svi = SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO())
    for size in (2, 20, 1):
        args = data(size)
        trace = poutine.trace(guide).get_trace(*args)
        trace.compute_log_prob()
        latents = {name: trace.nodes[name]["value"] for name in guide.bayesnet.latent}
        assert torch.allclose(guide.log_prob(latents, *args), trace.log_prob_sum())
        assert torch.tensor(svi.step(*args)).isfinite()
    assert names_of_shapes(guide) == before


@pytest.mark.parametrize("inverse", ["reverse", "mean_field"])
def test_parameters_do_not_grow_with_a_plate(inverse):
    shapes = []
    for size in (4, 40):
        pyro.clear_param_store()
        shapes.append(
            names_of_shapes(ready(eight_schools, torch.randn(size), torch.rand(size) + 1, inverse=inverse))
        )
    assert shapes[0] == shapes[1]


def test_a_crossed_design_runs_in_every_direction():
    y = torch.randn(3, 2)
    for inverse in ("forward", "reverse", "free", "mean_field"):
        pyro.clear_param_store()
        guide = ready(crossed, y, inverse=inverse)
        values = guide(y)
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


def test_sequential_plates_are_separate_sites():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        for i in pyro.plate("data", 3):
            z = pyro.sample(f"z_{i}", dist.Normal(mu, 1.0))
            pyro.sample(f"y_{i}", dist.Normal(z, 1.0), obs=y[i])

    for inverse in ("forward", "reverse"):
        pyro.clear_param_store()
        y = torch.randn(3)
        guide = ready(model, y, inverse=inverse)
        assert list(guide(y)) == ["mu", "z_0", "z_1", "z_2"]
        assert torch.tensor(SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(y)).isfinite()


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
def test_coupled_instances_form_one_block(inverse):
    guide = ready(coupled_instances, torch.tensor(2.0), inverse=inverse)
    assert guide.inverse.joint["z"] == {"parts"}
    base = {"scale": torch.tensor(1.0), "z": torch.zeros(4)}

    def element(i, z):
        trace = poutine.trace(poutine.condition(guide, {**base, "z": z})).get_trace(torch.tensor(2.0))
        trace.compute_log_prob()
        return trace.nodes["z"]["log_prob"][i]

    for i in range(4):
        for j in range(4):
            moved = torch.zeros(4)
            moved[j] = 1.0
            if i != j:
                assert (element(i, moved) != element(i, torch.zeros(4))) == (j < i)


# ---- covariates


@DIRECTIONS
def test_known_scales_are_found_and_read(inverse):
    """eight schools: sigma is no site, but differs between schools."""
    y, sigma = CASES["eight_schools"].arguments()
    guide = ready(eight_schools, y, sigma, inverse=inverse)
    values = {"mu": torch.tensor(0.3), "tau": torch.tensor(1.2), "theta": torch.randn(8)}
    assert not torch.allclose(guide.log_prob(values, y, sigma), guide.log_prob(values, y, sigma * 2))


@DIRECTIONS
def test_design_matrices_are_found_and_read_row_by_row(inverse):
    x, y = torch.randn(9, 2), torch.randn(9)
    guide = ready(regression, x, y, inverse=inverse)
    values, order = {"w": torch.randn(2), "s": torch.tensor(0.7)}, torch.randperm(9)
    expected = guide.log_prob(values, x, y)
    assert torch.allclose(guide.log_prob(values, x[order], y[order]), expected)
    assert not torch.allclose(guide.log_prob(values, x[order], y), expected)
    assert not torch.allclose(guide.log_prob(values, x * 2, y), expected)


def test_covariates_changed_in_place_are_read():
    y, sigma = CASES["eight_schools"].arguments()
    guide = ready(eight_schools, y, sigma)
    values = {"mu": torch.tensor(0.3), "tau": torch.tensor(1.2), "theta": torch.randn(8)}
    before = guide.log_prob(values, y, sigma)
    sigma *= 2
    assert not torch.allclose(guide.log_prob(values, y, sigma), before)


def test_no_covariates_where_nothing_differs():
    guide = ready(beta_bernoulli, torch.tensor([1.0, 0.0, 1.0]))
    assert guide._plan.covariates.columns == {}


def test_covariates_can_be_turned_off():
    y, sigma = CASES["eight_schools"].arguments()
    guide = ready(eight_schools, y, sigma, covariates=None, conjugate=False)
    values = {"mu": torch.tensor(0.3), "tau": torch.tensor(1.2), "theta": torch.randn(8)}
    assert torch.equal(guide.log_prob(values, y, sigma), guide.log_prob(values, y, sigma * 2))


@DIRECTIONS
def test_covariates_can_be_given(inverse):
    y, sigma = CASES["eight_schools"].arguments()

    def covariates(y, sigma):
        return {"y": sigma.log().unsqueeze(-1)}

    guide = ready(eight_schools, y, sigma, covariates=covariates, inverse=inverse)
    values = {"mu": torch.tensor(0.3), "tau": torch.tensor(1.2), "theta": torch.randn(8)}
    assert not torch.allclose(guide.log_prob(values, y, sigma), guide.log_prob(values, y, sigma * 2))
    if inverse == "reverse":
        trace = poutine.trace(guide).get_trace(y[:5], sigma[:5])
        assert trace.nodes["theta"]["value"].shape == (5,)
    assert torch.tensor(SVI(eight_schools, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(y, sigma)).isfinite()


# ---- minibatches


def subsampled(y, size=3):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=size) as indices:
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y[indices])


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
        run = poutine.trace(guide).get_trace(y)
        model_run = poutine.trace(poutine.replay(subsampled, run)).get_trace(y)
        for trace in (run, model_run):
            assert abs(trace.nodes["z"]["scale"] - 10 / 3) < 1e-6
        assert torch.equal(model_run.nodes["z"]["value"], run.nodes["z"]["value"])
        model_indices = model_run.nodes["data"]["value"]
        assert torch.equal(model_run.nodes["y"]["value"], y[model_indices])
        # the guide's factor of z reads the very rows that the model observes
        values = {name: run.nodes[name]["value"] for name in ("mu", "z")}
        again = poutine.trace(poutine.condition(guide, {**values, "data": model_indices})).get_trace(y)
        run.compute_log_prob()
        again.compute_log_prob()
        assert torch.allclose(run.nodes["z"]["log_prob"], again.nodes["z"]["log_prob"])
        seen.add(tuple(model_indices.tolist()))
    assert len(seen) > 1


@DIRECTIONS
def test_instances_that_the_model_names_are_kept(inverse):
    """AutoGuide overrides them without a word (pyro issue 3468)."""
    y, indices = torch.arange(10.0), torch.tensor([7, 2, 5])
    guide = ready(minibatch, y[indices], indices, 10, inverse=inverse)
    run = poutine.trace(guide).get_trace(y[indices], indices, 10)
    model_run = poutine.trace(poutine.replay(minibatch, run)).get_trace(y[indices], indices, 10)
    frame = model_run.nodes["y"]["cond_indep_stack"][0]
    assert frame.name == "data" and model_run.nodes["y"]["value"].tolist() == [7.0, 2.0, 5.0]
    if "data" in model_run.nodes:
        assert torch.equal(model_run.nodes["data"]["value"], indices)
    assert abs(run.nodes["z"]["scale"] - 10 / 3) < 1e-6
    assert torch.tensor(
        SVI(minibatch, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(y[indices], indices, 10)
    ).isfinite()


@DIRECTIONS
def test_a_global_latent_does_not_read_a_minibatch(inverse):
    """A minibatch is not the data set (DESIGN 5.1)."""
    guide = ready(subsampled, torch.randn(10), inverse=inverse)
    mu = guide._plan.learned["mu"].factor
    assert not mu.sources
    first, second = (
        poutine.trace(poutine.condition(guide, {"mu": torch.tensor(0.3)})).get_trace(y)
        for y in (torch.zeros(10), torch.ones(10))
    )
    for trace in (first, second):
        trace.compute_log_prob()
    assert torch.equal(first.nodes["mu"]["log_prob"], second.nodes["mu"]["log_prob"])


@DIRECTIONS
@pytest.mark.parametrize("vectorized", [False, True])
def test_training_with_minibatches(inverse, vectorized):
    y = torch.randn(20)
    guide = amortized(subsampled, inverse=inverse)
    options = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 1} if vectorized else {}
    svi = SVI(subsampled, guide, Adam({"lr": 0.02}), Trace_ELBO(**options))
    losses = torch.tensor([svi.step(y, 5) for _ in range(100)])
    assert losses.isfinite().all() and losses[-30:].mean() < losses[:30].mean()
    if inverse == "reverse":
        assert torch.tensor(svi.step(y, 7)).isfinite()  # another batch size


@DIRECTIONS
def test_create_plates(inverse):
    """The plate is made by the user, once a call, for guide and model."""

    def create_plates(y):
        return pyro.plate("data", len(y), subsample_size=4)

    def model(y):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=4) as indices:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[indices])

    y = torch.arange(10.0)
    guide = amortized(model, inverse=inverse, create_plates=create_plates)
    run = poutine.trace(guide).get_trace(y)
    model_run = poutine.trace(poutine.replay(model, run)).get_trace(y)
    assert torch.equal(model_run.nodes["y"]["value"], y[run.nodes["data"]["value"]])
    assert run.nodes["z"]["scale"] == 2.5
    assert torch.tensor(SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO()).step(y)).isfinite()


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
    svi = SVI(model, guide, Adam({"lr": 0.01}), objective())
    assert torch.tensor([svi.step(y) for _ in range(3)]).isfinite().all()
    run = poutine.trace(guide).get_trace(y)
    model_run = poutine.trace(poutine.replay(model, run)).get_trace(y)
    assert torch.equal(model_run.nodes["x"]["value"], model_run.nodes["y"]["value"])
    assert all(trace.nodes[name]["scale"] == 3 for trace in (run, model_run) for name in ("a", "b"))


@DIRECTIONS
@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO])
def test_crossed_plates_train(inverse, objective):
    guide = amortized(crossed, inverse=inverse)
    assert torch.tensor(
        SVI(crossed, guide, Adam({"lr": 0.01}), objective()).step(torch.randn(3, 3))
    ).isfinite()


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


def test_predictive_with_the_full_data_after_minibatches():
    y = torch.randn(20)
    guide = amortized(subsampled, inverse="reverse")
    svi = SVI(subsampled, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(3):
        svi.step(y, 5)
    draws = Predictive(subsampled, guide=guide, num_samples=4, return_sites=["mu", "z"])(y, 20)
    assert draws["z"].shape == (4, 20)
