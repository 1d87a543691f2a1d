"""Latents drawn from exact conditionals: against linear algebra, and where there are none."""

from __future__ import annotations

import copy
import functools
import io

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import amortized
from pyro import poutine
from pyro.infer import CSIS, SVI, JitTrace_ELBO, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide
from pyro_nami.inference import InferenceCompilation

COUNTY = torch.tensor([0, 0, 0, 1, 1, 2, 4, 4, 4, 4])
FLOOR = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0, 1.0, 0.5, 1.5, 0.0, 1.0], dtype=torch.float64)


@pytest.fixture(autouse=True)
def double_precision_and_own_parameters():
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    with pyro.settings.context(module_local_params=True):
        yield
    torch.set_default_dtype(torch.float32)


def slopes(county, floor, y=None, counties=5, weight=1.0, seen=None):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(())))
    with pyro.plate("counties", counties):
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        beta = pyro.sample("beta", dist.Normal(-1.0 + 0.5 * alpha, 0.7))
    with pyro.plate("houses", len(county)), poutine.scale(scale=weight):
        fn = dist.Normal(alpha[..., county] + beta[..., county] * floor, 0.5)
        return pyro.sample("y", fn if seen is None else fn.mask(seen), obs=y)


def exact(county, floor, y, mu, tau, weight=1.0, counties=5):
    """Returns p(alpha, beta | mu, tau, y): all counties' alphas first."""
    one = torch.nn.functional.one_hot(county, counties).to(floor)
    design = torch.cat([one, one * floor[:, None]], 1)
    eye = torch.eye(counties)
    # alpha = mu + tau e, beta - alpha / 2 = -1 + 0.7 f
    mixing = torch.cat([torch.cat([eye, 0 * eye], 1), torch.cat([-0.5 * eye, eye], 1)])
    noise = torch.cat([tau.expand(counties) ** -2, torch.full((counties,), 0.7**-2)])
    center = torch.cat([mu.expand(counties), torch.full((counties,), -1.0)])
    precision = mixing.t() @ (noise[:, None] * mixing) + weight * design.t() @ design / 0.25
    information = mixing.t() @ (noise * center) + weight * design.t() @ y / 0.25
    return dist.MultivariateNormal(torch.linalg.solve(precision, information), precision_matrix=precision)


def data(seed=0, county=COUNTY):
    y = torch.randn(len(county), generator=torch.Generator().manual_seed(seed)) * 2
    return county, FLOOR[: len(county)].to(y), y


def density_of(guide, names, *args, shape=(), **kwargs):
    """Returns the guide's log density of some latents at a draw, and the draw."""
    with pyro.plate_stack("particles", shape, rightmost_dim=-2), torch.no_grad():
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
    values = {name: trace.nodes[name]["value"] for name in ("mu", "tau", "alpha", "beta")}
    total = sum(
        trace.nodes[name]["fn"].log_prob(values[name]).reshape(*shape, -1).sum(-1) for name in names
    )
    return total, values


# ---- against linear algebra


def test_two_latents_of_a_plate_have_their_exact_conditional():
    args = data()
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    guide(*args)
    assert guide.conjugate == ("alpha", "beta")
    for seed in (0, 1):
        args = data(seed)
        found, values = density_of(guide, guide.conjugate, *args)
        joint = torch.cat([values["alpha"], values["beta"]])
        assert torch.allclose(found, exact(*args, values["mu"], values["tau"]).log_prob(joint))


def test_particles_and_the_dense_pass_agree_with_it():
    args = data()
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    guide(*args)
    found, values = density_of(guide, guide.conjugate, *args, shape=(3,))
    for i in range(3):
        joint = torch.cat([values[name][i].flatten() for name in ("alpha", "beta")])
        expected = exact(*args, values["mu"][i].flatten(), values["tau"][i].flatten()).log_prob(joint)
        assert torch.allclose(found[i], expected)
    all_of_it, values = density_of(guide, values, *args, shape=(3,))
    assert torch.allclose(guide.log_prob(values, *args), all_of_it)


def test_other_numbers_of_rows_and_groups_are_exact_too():
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    guide(*data())
    args = data(3, torch.tensor([2, 6, 1, 1, 0, 5]))
    found, values = density_of(guide, guide.conjugate, *args, counties=7)
    joint = torch.cat([values["alpha"], values["beta"]])
    assert torch.allclose(found, exact(*args, values["mu"], values["tau"], counties=7).log_prob(joint))


def test_it_is_differentiable_in_what_was_drawn_before():
    args = data()
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    values = guide(*args)
    start = {name: values[name].detach().requires_grad_() for name in ("mu", "tau")}
    fixed = {name: values[name].detach() for name in ("alpha", "beta")}
    held = poutine.trace(poutine.condition(guide, {**start, **fixed})).get_trace(*args)
    found = sum(held.nodes[name]["fn"].log_prob(fixed[name]).sum() for name in fixed)
    expected = exact(*args, start["mu"], start["tau"]).log_prob(torch.cat([fixed["alpha"], fixed["beta"]]))
    for ours, theirs in zip(*(torch.autograd.grad(total, list(start.values())) for total in (found, expected))):
        assert torch.allclose(ours, theirs)


def test_scales_and_masks_of_the_likelihood_count():
    county, floor, y = data()
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    guide(county, floor, y, weight=0.3)
    found, values = density_of(guide, guide.conjugate, county, floor, y, weight=0.3)
    joint = torch.cat([values["alpha"], values["beta"]])
    assert torch.allclose(found, exact(county, floor, y, values["mu"], values["tau"], 0.3).log_prob(joint))
    seen = torch.arange(10) % 3 != 0
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    guide(county, floor, y, seen=seen)
    assert guide.conjugate == ("alpha", "beta")
    found, values = density_of(guide, guide.conjugate, county, floor, y, seen=seen)
    joint = torch.cat([values["alpha"], values["beta"]])
    expected = exact(county[seen], floor[seen], y[seen], values["mu"], values["tau"]).log_prob(joint)
    assert torch.allclose(found, expected)


def test_importance_weights_depend_on_the_globals_alone():
    args = data()
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    globals_alone = poutine.trace(guide).get_trace(*args)
    for name in ("alpha", "beta"):
        globals_alone.remove_node(name)
    weights = []
    for _ in range(3):
        trace = poutine.trace(poutine.replay(guide, globals_alone)).get_trace(*args)
        model = poutine.trace(poutine.replay(slopes, trace)).get_trace(*args)
        weights.append(model.log_prob_sum() - trace.log_prob_sum())
    assert torch.allclose(torch.stack(weights), weights[0])


def test_single_precision_is_near():
    torch.set_default_dtype(torch.float32)
    args = data()
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    guide(*args)
    assert guide.conjugate == ("alpha", "beta")
    found, values = density_of(guide, guide.conjugate, *args)
    assert found.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    joint = torch.cat([values["alpha"], values["beta"]]).double()
    county, floor, y = args
    expected = exact(county, floor.double(), y.double(), values["mu"].double(), values["tau"].double())
    assert torch.allclose(found.double(), expected.log_prob(joint), atol=1e-3)


def test_subsampled_groups_bring_their_own_rows_at_their_own_scale():
    def model(y, size=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("groups", 6, subsample_size=size, dim=-1) as chosen:
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            with pyro.plate("rows", 3, dim=-2):
                pyro.sample("y", dist.Normal(z, 0.5), obs=y[:, chosen])

    y = torch.randn(3, 6)
    guide = AutoNaMIGuide(model, inverse="reverse")
    guide(y, 2)
    assert guide.conjugate == ("z",)
    trace = poutine.trace(guide).get_trace(y, 2)
    chosen, fn = trace.nodes["groups"]["value"], trace.nodes["z"]["fn"]
    precision = 1 + 3 / 0.25
    mean = (trace.nodes["mu"]["value"] + y[:, chosen].sum(0) / 0.25) / precision
    assert torch.allclose(fn.loc.flatten(), mean)
    assert torch.allclose(fn.scale.flatten(), torch.full((2,), precision**-0.5))


def test_data_sets_side_by_side_are_separate():
    """Also where they come as an argument of the model, whose plate does not tell of them."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", 4):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    y = torch.randn(3, 4)
    guide = amortized(model, inverse="reverse")
    guide(y[0])
    assert guide.conjugate == ("z",)
    values = {"mu": torch.randn(3, 1), "z": torch.randn(3, 4)}
    one_by_one = [guide.log_prob({name: v[i].squeeze() for name, v in values.items()}, y[i]) for i in range(3)]
    assert torch.allclose(guide.log_prob(values, y), torch.stack(one_by_one))
    assert torch.allclose(guide.log_prob(values, y[0], observations={"y": y}), torch.stack(one_by_one))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_elbo_is_the_plain_one():
    y, losses = torch.randn(3, 4), []

    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", 4, dim=-1):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            with pyro.plate("rows", 3, dim=-2):
                pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    with pyro.settings.context(module_local_params=False):
        for objective in (Trace_ELBO, JitTrace_ELBO):
            pyro.clear_param_store()
            guide = AutoNaMIGuide(model, inverse="reverse")
            guide(y)
            assert guide.conjugate == ("z",)
            elbo = objective(num_particles=5, vectorize_particles=True, max_plate_nesting=2)
            svi = SVI(model, guide, Adam({"lr": 0.0}), elbo)
            svi.step(y)  # which compiles
            pyro.set_rng_seed(1)
            losses.append([svi.step(y) for _ in range(3)])
        pyro.clear_param_store()
    assert losses[0] == pytest.approx(losses[1])


def test_data_that_the_model_samples_itself():
    def model(y=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", 4):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            return pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    guide, y = AutoNaMIGuide(model, inverse="reverse", observed=["y"]), torch.randn(4)
    guide(observations={"y": torch.randn(4)})
    assert guide.conjugate == ("z",)
    trace = poutine.trace(guide).get_trace(observations={"y": y})
    assert torch.allclose(trace.nodes["z"]["fn"].loc, (trace.nodes["mu"]["value"] + 4 * y) / 5)


def test_without_gradients_and_in_inference_mode():
    args = data()
    guide = AutoNaMIGuide(slopes, inverse="reverse")
    guide(*args)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            trace = poutine.trace(guide).get_trace(*args)
            assert not trace.nodes["alpha"]["fn"].loc.requires_grad
        values = {name: trace.nodes[name]["value"].clone() for name in ("mu", "tau", "alpha", "beta")}
        found = sum(trace.nodes[name]["fn"].log_prob(values[name]).sum() for name in ("alpha", "beta"))
        joint = torch.cat([values["alpha"], values["beta"]])
        assert torch.allclose(found, exact(*args, values["mu"], values["tau"]).log_prob(joint))


def test_in_inference_mode_where_a_drawn_number_multiplies_a_member():
    def model(y):
        slope = pyro.sample("slope", dist.LogNormal(torch.zeros(()), 0.5))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.5))
            pyro.sample("y", dist.Normal(slope * z + slope, 0.5), obs=y)

    y = torch.tensor([0.3, -1.2, 4.0])
    guide = AutoNaMIGuide(model, inverse="reverse")
    guide(y)
    assert guide.conjugate == ("z",)
    with torch.inference_mode():
        trace = poutine.trace(guide).get_trace(y)
        values = {name: trace.nodes[name]["value"] for name in ("slope", "z")}
        torch.testing.assert_close(guide.log_prob(values, y), trace.log_prob_sum())
    slope, fn = values["slope"].clone(), poutine.condition(guide, {"slope": values["slope"]})
    precision = 1.5**-2 + slope**2 / 0.25
    for given in (trace, poutine.trace(fn).get_trace(y)):
        found = given.nodes["z"]["fn"]
        torch.testing.assert_close(found.mean.clone().detach(), slope * (y - slope) / 0.25 / precision)


@pytest.mark.parametrize("kind", ["a block with gradients", "a view that is added to"])
def test_models_that_mind_the_mode_of_gradients(kind):
    @torch.enable_grad()
    def with_gradients(mu):
        return pyro.sample("z", dist.Normal(mu, 1.5))

    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        mean = (0.0 * y + 1.0)[...]
        with pyro.plate("rows", len(y)):
            if kind == "a block with gradients":
                mean = mean + 2 * with_gradients(mu)
            else:
                mean += 2 * pyro.sample("z", dist.Normal(mu, 1.5))
            pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    y = torch.tensor([0.3, -1.2, 4.0])
    guide = AutoNaMIGuide(model)
    guide(y)
    assert guide.conjugate == ("z",)
    with torch.no_grad():
        trace = poutine.trace(guide).get_trace(y)
    mu, fn = trace.nodes["mu"]["value"], trace.nodes["z"]["fn"]
    precision = 1.5**-2 + 4 / 0.25
    torch.testing.assert_close(fn.mean, (mu / 1.5**2 + 2 * (y - 1) / 0.25) / precision)
    assert not fn.mean.requires_grad


def test_an_earlier_member_that_a_call_observes():
    def model(y, a=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("rows", len(y)):
            a = pyro.sample("a", dist.Normal(mu, 1.0), obs=a)
            b = pyro.sample("b", dist.Normal(a, 1.0))
            pyro.sample("y", dist.Normal(a + b, 0.5), obs=y)

    y, a = torch.tensor([0.3, -1.2, 4.0]), torch.tensor([3.0, -3.0, 0.0])
    guide = AutoNaMIGuide(model)
    guide(y)
    assert guide.conjugate == ("a", "b")
    fn = poutine.trace(guide).get_trace(y, a=a).nodes["b"]["fn"]
    torch.testing.assert_close(fn.mean.detach(), (a + (y - a) / 0.25) / 5)


def test_predictive_children_do_not_matter():
    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(mu, 1.5))
            pyro.sample("new", dist.Normal(2 * z, 0.5))
            pyro.sample("y", dist.Normal(2 * z, 0.5), obs=y)
        pyro.sample("count", dist.Poisson(z.square().sum()))

    y = torch.tensor([0.3, -1.2, 4.0])
    guide = AutoNaMIGuide(model)
    guide(y)
    assert guide.conjugate == ("z",) and guide.inverse.predictive == {"new", "count"}
    nodes = poutine.trace(guide).get_trace(y).nodes
    precision = 1.5**-2 + 4 / 0.25
    mean = (nodes["mu"]["value"] / 1.5**2 + 2 * y / 0.25) / precision
    torch.testing.assert_close(nodes["z"]["fn"].mean.detach(), mean.detach())
    torch.testing.assert_close(nodes["new"]["fn"].mean, 2 * nodes["z"]["value"])


def test_scales_of_more_dims_than_the_likelihood_has():
    def model(y, power):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(mu, 1.5))
            with poutine.scale(scale=power):
                pyro.sample("y", dist.Normal(2 * z, 0.5), obs=y)

    y, power = torch.tensor([0.3, -1.2, 4.0]), torch.tensor([[0.5], [1.0]])
    guide = AutoNaMIGuide(model)
    guide(y, torch.ones(()))
    assert guide.conjugate == ("z",)
    trace = poutine.trace(guide).get_trace(y, power)
    precision = 1.5**-2 + 4 * 1.5 / 0.25  # summed, as the log density is
    torch.testing.assert_close(trace.nodes["z"]["fn"].stddev.detach(), torch.full((3,), precision**-0.5))


def test_deriving_goes_on_in_the_run_that_draws_and_leaves_no_switch_behind():
    runs = []

    def model(y):
        runs.append(1)
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("rows", len(y)):
            with pyro.validation_enabled(False):
                z = pyro.sample("z", dist.Normal(mu, 1.5))
            pyro.sample("y", dist.Normal(2 * z, 0.5), obs=y)

    y = torch.tensor([0.3, -1.2, 4.0])
    guide = AutoNaMIGuide(model)
    for gradients, count in ((True, 1), (False, 2)):  # to z and on; without gradients up to z, and one with them behind
        with torch.set_grad_enabled(gradients):
            guide(y)
            runs.clear()
            trace = poutine.trace(guide).get_trace(y)
            assert len(runs) == count
            assert torch.is_grad_enabled() == gradients and dist.is_validation_enabled()
        mu, fn = trace.nodes["mu"]["value"].detach(), trace.nodes["z"]["fn"]
        precision = 1.5**-2 + 4 / 0.25
        torch.testing.assert_close(fn.mean.detach(), (mu / 1.5**2 + 2 * y / 0.25) / precision)
        torch.testing.assert_close(fn.stddev.detach(), torch.full((3,), precision**-0.5))


def test_an_error_while_deriving_leaves_no_switch_behind():
    broken = []

    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(mu, 1.5))
            if broken:
                raise RuntimeError("not now")
            pyro.sample("y", dist.Normal(2 * z, 0.5), obs=y)

    y = torch.tensor([0.3, -1.2, 4.0])
    guide = AutoNaMIGuide(model)
    guide(y)
    broken.append(True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="not now"):
        guide(y)
    assert torch.is_grad_enabled() and dist.is_validation_enabled()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="not now"):
            guide(y)
        assert not torch.is_grad_enabled()


def test_a_mask_that_comes_later():
    y = torch.randn(4)

    def model(y, seen=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", 4), poutine.mask(mask=torch.ones(4).bool() if seen is None else seen):
            z = pyro.sample("z", dist.Normal(mu, 1.0).mask(True))
            pyro.sample("y", dist.Normal(z, 0.5), obs=y)

    guide = AutoNaMIGuide(model, inverse="reverse")
    guide(y)
    seen = torch.tensor([True, False, True, True])
    values = guide(y, seen)
    assert all(value.isfinite().all() for value in values.values())


def test_members_that_can_hardly_be_told_apart_stay_finite():
    torch.set_default_dtype(torch.float32)

    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", 4, dim=-1):
            a = pyro.sample("a", dist.Normal(mu, 1000.0))
            b = pyro.sample("b", dist.Normal(0.0 * mu, 1000.0))
            with pyro.plate("rows", 3, dim=-2):
                pyro.sample("y", dist.Normal(a + 0.7 * b, 0.1), obs=y)

    guide = AutoNaMIGuide(model, inverse="reverse")
    for _ in range(20):
        values = guide(torch.randn(3, 4))
        assert all(value.isfinite().all() for value in values.values())


# ---- where there are none


def below(likelihood, prior=None, *, scaled=False):
    """A model of a latent a group with three rows each, of some likelihood and prior."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", 4, dim=-1):
            z = pyro.sample("z", dist.Normal(mu, 1.0) if prior is None else prior(mu))
            with pyro.plate("rows", 3, dim=-2):
                pyro.sample("y", likelihood(z), obs=y)

    return model


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda z: dist.Poisson(z.exp()),
        lambda z: dist.Bernoulli(logits=z),
        lambda z: dist.StudentT(torch.tensor(4.0), z, 1.0),
        lambda z: dist.Normal(z.tanh(), 1.0),
        lambda z: dist.Normal(z, (0.1 * z).exp()),
        lambda z: dist.Normal(z.detach(), 1.0),
        lambda z: dist.Normal((z > 0).to(z), 1.0),
    ],
)
def test_other_likelihoods_keep_their_networks(likelihood):
    guide = AutoNaMIGuide(below(likelihood), inverse="reverse")
    guide(torch.ones(3, 4))
    assert guide.conjugate == () and "z" in guide.network.factors


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize(
    "likelihood",
    [
        lambda z: dist.Laplace(z, 0.5),
        lambda z: dist.StudentT(torch.tensor(4.0), z, 0.5),
        lambda z: dist.Bernoulli(logits=torch.tensor(0.1) * z),
        lambda z: dist.Normal((torch.tensor(0.05) * z).tanh(), 1.0),
        lambda z: dist.Normal(torch.tensor(0.0) * z.tanh(), 1.0),
    ],
)
def test_what_looks_quadratic_at_first_is_seen_through(likelihood, offset):
    """Far from the data, by weights that have not learned yet, or beside a much stronger prior."""
    y = offset + torch.randn(3, 4)
    y = (y > offset).to(y) if isinstance(likelihood(y), dist.Bernoulli) else y
    for prior in (None, lambda mu: dist.Normal(mu, 0.05)):
        guide = AutoNaMIGuide(below(likelihood, prior), inverse="reverse")
        guide(y)
        assert guide.conjugate == ()


@pytest.mark.parametrize(
    "prior", [lambda mu: dist.Laplace(mu, 1.0), lambda mu: dist.LogNormal(mu, 1.0), lambda mu: dist.Cauchy(mu, 1.0)]
)
def test_other_priors_keep_their_networks(prior):
    guide = AutoNaMIGuide(below(lambda z: dist.Normal(z, 1.0), prior), inverse="reverse")
    guide(torch.ones(3, 4))
    assert guide.conjugate == ()


@pytest.mark.parametrize(
    "options", [{"conjugate": False}, {"anchor": False}, {"inverse": "mean_field"}, {"families": {"z": "flow"}}]
)
def test_options_that_exclude_them(options):
    model = below(lambda z: dist.Normal(z, 1.0))
    plain = AutoNaMIGuide(model, inverse="reverse")
    plain(torch.ones(3, 4))
    guide = AutoNaMIGuide(model, **{"inverse": "reverse", **options})
    guide(torch.ones(3, 4))
    assert plain.conjugate == ("z",) and guide.conjugate == ()


def test_rows_that_are_subsampled_are_not_taken_for_the_data():
    def model(y, size):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", 4, dim=-1):
            z = pyro.sample("z", dist.Normal(mu, 1.0))
            with pyro.plate("rows", 30, subsample_size=size, dim=-2) as chosen:
                pyro.sample("y", dist.Normal(z, 1.0), obs=y[chosen])

    guide = AutoNaMIGuide(model, inverse="reverse")
    guide(torch.randn(30, 4), 5)
    assert guide.conjugate == ()


# ---- data that this call does not bring


class Setting:
    """An argument that no state dict holds."""


def regression(x, y=None, setting=None):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
    with pyro.plate("counties", 5):
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
    with pyro.plate("houses", len(x)):
        pyro.sample("y", dist.Normal(alpha[..., COUNTY[: len(x)]] * x, 0.5), obs=y)


def test_new_rows_are_predicted_from_the_arguments_of_the_data():
    x, y = 1 + FLOOR, torch.randn(10)  # a row that is multiplied by 0 could read any county
    guide = amortized(regression, inverse="reverse", save_data=True)
    SVI(regression, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(x, y)
    assert guide.conjugate == ("alpha",)
    values = {name: value.detach() for name, value in guide(x, y).items()}
    expected = guide.log_prob(values, x, y)
    for new in (x[:3], x.flip(0)):
        assert torch.equal(guide.log_prob(values, new), expected)
    assert Predictive(regression, guide=guide, num_samples=4, parallel=True)(x[:3])["y"].shape == (4, 3)
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    other = amortized(regression, inverse="reverse")
    other(x, torch.randn(10))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.log_prob(values, x[:3]), expected)


def test_arguments_that_no_state_holds_are_asked_for():
    x, y = 1 + FLOOR, torch.randn(10)  # a row that is multiplied by 0 could read any county
    guide = AutoNaMIGuide(regression, inverse="reverse", save_data=True)
    SVI(regression, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(x, y, Setting())
    guide(x[:3])
    other = AutoNaMIGuide(regression, inverse="reverse")
    other(x, y)
    other.load_state_dict(guide.state_dict())
    with pytest.raises(ValueError, match="data for the observed site 'y'.*alpha.*conjugate=False"):
        other(x[:3])


@pytest.mark.parametrize("use", ["compilation", "CSIS"])
def test_a_model_that_takes_observations_has_exact_conditionals_too(use):
    def model(observations=None):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        with pyro.plate("schools", 8):
            theta = pyro.sample("theta", dist.Normal(mu, 2.0))
            pyro.sample("y", dist.Normal(theta, 1.0), obs=None if observations is None else observations["y"])

    if use == "CSIS":
        guide = AutoNaMIGuide(model)
        CSIS(model, guide, Adam({"lr": 1e-3})).step(observations={"y": torch.zeros(8)})
    else:
        guide = AutoNaMIGuide(model, observed=["y"])
        adam = functools.partial(torch.optim.Adam, lr=1e-3)
        InferenceCompilation(model, guide, adam, batch_size=20).fit(2, progress=False)
    assert guide.conjugate == ("theta",)
    y = torch.linspace(-3.0, 3.0, 8)
    assert guide(observations={"y": y})["theta"].shape == (8,)


def two_children(w, y=None):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("data", len(w)):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("w", dist.Normal(z, 0.3), obs=w)
    pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_what_a_call_brings_is_used_beside_what_it_does_not():
    w, y = torch.randn(5), torch.tensor(0.3)
    guide = AutoNaMIGuide(two_children, inverse="reverse")
    SVI(two_children, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(w, y)
    assert guide.conjugate == ("z",)
    trace = poutine.trace(guide).get_trace(w + 10)
    expected = (trace.nodes["mu"]["value"] + (w + 10) / 0.09) / (1 + 1 / 0.09)
    assert torch.allclose(trace.nodes["z"]["fn"].loc, expected)


def test_copies_of_guides_whose_arguments_have_a_graph_or_no_tensors():
    x, y = 1 + FLOOR, torch.randn(10)
    slope = torch.ones((), requires_grad=True)
    guide = AutoNaMIGuide(regression, inverse="reverse")
    SVI(regression, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(slope * x, y, Setting())
    values = {name: value.detach() for name, value in guide(x, y).items()}
    other = copy.deepcopy(guide)
    assert torch.equal(other.log_prob(values, x[:3]), guide.log_prob(values, x[:3]))
