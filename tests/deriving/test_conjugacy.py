"""Latents drawn from exact conditionals: against linear algebra, and where there are none."""

from __future__ import annotations

import copy
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import Counted, amortized, local_normals, noise, through_file, told
from pyro import poutine
from pyro.infer import CSIS, SVI, JitTrace_ELBO, Predictive, Trace_ELBO
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide
from pyro_nami.inference import InferenceCompilation

pytestmark = pytest.mark.usefixtures("double", "own_parameters")
COUNTY = torch.tensor([0, 0, 0, 1, 1, 2, 4, 4, 4, 4])
FLOOR = torch.tensor([0.0, 1.0, 1.0, 0.0, 2.0, 1.0, 0.5, 1.5, 0.0, 1.0], dtype=torch.float64)
Y = torch.tensor([0.3, -1.2, 4.0], dtype=torch.float64)
LEARNED_MEAN = {"mu": "learned"}
BOTH = pytest.mark.parametrize(
    "rules, conjugate", [(LEARNED_MEAN, ("z",)), ({}, ("mu", "z"))], ids=["local", "all"]
)


def made(model, *args, conjugate=("z",), inverse="reverse", learned=("mu",), **kwargs):
    """Returns a guide that was called once, whose exact conditionals are those of ``conjugate``.

    By default its global mean is learned, such that the locals' conditionals are those given any value of it.
    """
    guide = AutoNaMIGuide(model, inverse=inverse, rules=dict.fromkeys(learned, "learned"))
    guide(*args, **kwargs)
    assert guide.conjugate == conjugate
    return guide


def trained(model, *args, **options):
    """Returns a guide that was trained for a step."""
    guide = amortized(model, inverse="reverse", **options)
    SVI(model, guide, Adam({"lr": 1e-3}), Trace_ELBO()).step(*args)
    return guide


def slopes(county, floor, y=None, counties=5, weight=1.0, seen=None):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(())))
    with pyro.plate("counties", counties):
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
        beta = pyro.sample("beta", dist.Normal(-1.0 + 0.5 * alpha, 0.7))
    with pyro.plate("houses", len(county)), poutine.scale(scale=weight):
        fn = dist.Normal(alpha[..., county] + beta[..., county] * floor, 0.5)
        return pyro.sample("y", fn if seen is None else fn.mask(seen), obs=y)


def exact(values, county, floor, y, counties=5, weight=1.0, seen=slice(None)):
    """Returns log p(alpha, beta | mu, tau, y), with all counties' alphas first, and y those rows that are seen."""
    county, floor, y = county[seen], floor[seen], y[seen]
    one = torch.nn.functional.one_hot(county, counties).to(floor)
    design = torch.cat([one, one * floor[:, None]], 1)
    eye = torch.eye(counties)
    # alpha = mu + tau e, beta - alpha / 2 = -1 + 0.7 f
    mixing = torch.cat([torch.cat([eye, 0 * eye], 1), torch.cat([-0.5 * eye, eye], 1)])
    noise = torch.cat([values["tau"].expand(counties) ** -2, torch.full((counties,), 0.7**-2)])
    center = torch.cat([values["mu"].expand(counties), torch.full((counties,), -1.0)])
    precision = mixing.t() @ (noise[:, None] * mixing) + weight * design.t() @ design / 0.25
    information = mixing.t() @ (noise * center) + weight * design.t() @ y / 0.25
    joint = dist.MultivariateNormal(
        torch.linalg.solve(precision, information), precision_matrix=precision
    )
    return joint.log_prob(torch.cat([values["alpha"], values["beta"]]))


def data(seed=0, county=COUNTY):
    y = torch.randn(len(county), generator=torch.Generator().manual_seed(seed)) * 2
    return county, FLOOR[: len(county)].to(y), y


def made_of_slopes(**kwargs):
    return made(slopes, *data(), conjugate=("alpha", "beta"), learned=(), **kwargs)


def drawn(guide, *args, shape=(), **kwargs):
    """Returns a draw of ``slopes`` and the guide's log density of each of its latents."""
    with pyro.plate_stack("particles", shape, rightmost_dim=-2), torch.no_grad():
        nodes = poutine.trace(guide).get_trace(*args, **kwargs).nodes
    values = {name: nodes[name]["value"] for name in ("mu", "tau", "alpha", "beta")}
    return values, {
        name: nodes[name]["fn"].log_prob(value).reshape(*shape, -1).sum(-1)
        for name, value in values.items()
    }


def rows(y=None, draw=pyro.sample, mean=lambda z: 2 * z, power=1.0):
    """z_n ~ N(mu, 1.5) and y_n ~ N(2 z_n, 0.5)."""
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
    with pyro.plate("rows", len(Y if y is None else y)):
        z = mean(draw("z", dist.Normal(mu, 1.5)))
        with poutine.scale(scale=power):
            return pyro.sample("y", dist.Normal(z, 0.5), obs=y)


def check_rows(trace, y, power=1.0):
    """Checks z given mu and y in a trace of a guide of ``rows``."""
    mu, fn = trace.nodes["mu"]["value"], trace.nodes["z"]["fn"]
    precision = 1.5**-2 + power * 4 / 0.25
    mean = (mu / 1.5**2 + power * 2 * y / 0.25) / precision
    torch.testing.assert_close(fn.mean.detach(), mean.detach())
    torch.testing.assert_close(fn.stddev.detach(), torch.full(fn.batch_shape, precision**-0.5))


def below(likelihood, prior=lambda mu: dist.Normal(mu, 1.0), size=None, chosen_rows=None):
    """A model of a latent a group with three rows each, of some likelihood and prior."""

    def model(y):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("groups", y.shape[1], subsample_size=size, dim=-1) as group:
            z = pyro.sample("z", prior(mu))
            with pyro.plate("rows", y.shape[0], subsample_size=chosen_rows, dim=-2) as row:
                pyro.sample("y", likelihood(z), obs=y[row][:, group])

    return model


# ---- against linear algebra


@pytest.mark.parametrize(
    "seed, county, shape, options",
    [
        (0, COUNTY, (), {}),
        (1, COUNTY, (), {}),
        (0, COUNTY, (3,), {}),
        (3, torch.tensor([2, 6, 1, 1, 0, 5]), (), {"counties": 7}),
        (0, COUNTY, (), {"weight": 0.3}),
        (0, COUNTY, (), {"seen": torch.arange(10) % 3 != 0}),
    ],
    ids=["made on", "other data", "particles", "other sizes", "scaled", "masked"],
)
def test_two_latents_of_a_plate_have_their_exact_conditional(seed, county, shape, options):
    args = data(seed, county)
    guide = made_of_slopes(**({} if "counties" in options else options))
    values, found = drawn(guide, *args, shape=shape, **options)
    assert torch.allclose(guide.log_prob(values, *args, **options), sum(found.values()))
    for i in range(3) if shape else [...]:
        one = {name: value[i].flatten() for name, value in values.items()}
        assert torch.allclose(found["alpha"][i] + found["beta"][i], exact(one, *args, **options))


def test_it_is_differentiable_in_what_was_drawn_before():
    args, guide = data(), made_of_slopes()
    values = {name: value.detach() for name, value in guide(*args).items()}
    start = {name: values[name].requires_grad_() for name in ("mu", "tau")}
    held = poutine.trace(poutine.condition(guide, values)).get_trace(*args)
    found = sum(held.nodes[name]["fn"].log_prob(values[name]).sum() for name in guide.conjugate)
    expected = exact(values, *args)
    for ours, theirs in zip(
        *(torch.autograd.grad(total, list(start.values())) for total in (found, expected))
    ):
        assert torch.allclose(ours, theirs)


def test_importance_weights_depend_on_the_globals_alone():
    args, guide = data(), made_of_slopes()
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
    values, found = drawn(made_of_slopes(), *args)
    total = found["alpha"] + found["beta"]
    assert total.dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    values = {name: value.double() for name, value in values.items()}
    expected = exact(values, args[0], *(arg.double() for arg in args[1:]))
    assert torch.allclose(total.double(), expected, atol=1e-3)


def test_subsampled_groups_bring_their_own_rows_at_their_own_scale():
    y = torch.randn(3, 6)
    trace = poutine.trace(made(below(noise(0.5), size=2), y)).get_trace(y)
    chosen, fn = trace.nodes["groups"]["value"], trace.nodes["z"]["fn"]
    precision = 1 + 3 / 0.25
    mean = (trace.nodes["mu"]["value"] + y[:, chosen].sum(0) / 0.25) / precision
    assert torch.allclose(fn.loc.flatten(), mean)
    assert torch.allclose(fn.scale.flatten(), torch.full((2,), precision**-0.5))


@BOTH
def test_data_sets_side_by_side_are_separate(rules, conjugate):
    """Also where they come as an argument of the model, whose plate does not tell of them."""
    y = torch.randn(3, 4)
    model = functools.partial(local_normals, rows=4, likelihood=noise(0.5))
    guide = amortized(model, inverse="reverse", rules=rules)
    guide(y[0])
    assert guide.conjugate == conjugate
    values = {"mu": torch.randn(3, 1), "z": torch.randn(3, 4)}
    one_by_one = [
        guide.log_prob({name: v[i].squeeze() for name, v in values.items()}, y[i]) for i in range(3)
    ]
    assert torch.allclose(guide.log_prob(values, y), torch.stack(one_by_one))
    assert torch.allclose(
        guide.log_prob(values, y[0], observations={"y": y}), torch.stack(one_by_one)
    )


@pytest.mark.filterwarnings("ignore")
@BOTH
def test_a_compiled_elbo_is_the_plain_one(rules, conjugate):
    model, y, losses = below(noise(0.5)), torch.randn(3, 4), []
    with pyro.settings.context(module_local_params=False):
        for objective in (Trace_ELBO, JitTrace_ELBO):
            pyro.clear_param_store()
            pyro.set_rng_seed(0)
            guide = made(model, y, conjugate=conjugate, learned=rules)
            elbo = objective(num_particles=5, vectorize_particles=True, max_plate_nesting=2)
            svi = SVI(model, guide, Adam({"lr": 0.0}), elbo)
            svi.step(y)  # which compiles
            pyro.set_rng_seed(1)
            losses.append([svi.step(y) for _ in range(3)])
        pyro.clear_param_store()
    assert losses[0] == pytest.approx(losses[1])


@BOTH
def test_data_that_the_model_samples_itself(rules, conjugate):
    guide = AutoNaMIGuide(rows, inverse="reverse", observed=["y"], rules=rules)
    guide(observations={"y": torch.randn(3)})
    assert guide.conjugate == conjugate
    check_rows(poutine.trace(guide).get_trace(observations={"y": Y}), Y)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_in_inference_mode(mode):
    args, guide = data(), made_of_slopes()
    with mode():
        nodes = poutine.trace(guide).get_trace(*args).nodes
        assert not nodes["alpha"]["fn"].loc.requires_grad
    values = {name: nodes[name]["value"].clone() for name in ("mu", "tau", "alpha", "beta")}
    found = sum(nodes[name]["fn"].log_prob(values[name]).sum() for name in guide.conjugate)
    assert torch.allclose(found, exact(values, *args))


def test_in_inference_mode_where_a_drawn_number_multiplies_a_member():
    def model(y):
        slope = pyro.sample("slope", dist.LogNormal(torch.zeros(()), 0.5))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.5))
            pyro.sample("y", dist.Normal(slope * z + slope, 0.5), obs=y)

    guide = made(model, Y, learned=())
    with torch.inference_mode():
        trace = poutine.trace(guide).get_trace(Y)
        values = {name: trace.nodes[name]["value"] for name in ("slope", "z")}
        torch.testing.assert_close(guide.log_prob(values, Y), trace.log_prob_sum())
    slope, fn = values["slope"].clone(), poutine.condition(guide, {"slope": values["slope"]})
    precision = 1.5**-2 + slope**2 / 0.25
    for given in (trace, poutine.trace(fn).get_trace(Y)):
        found = given.nodes["z"]["fn"]
        torch.testing.assert_close(
            found.mean.clone().detach(), slope * (Y - slope) / 0.25 / precision
        )


def adds_to_a_view(y):
    mean = (0.0 * y + 1.0)[...]
    rows(y, mean=lambda z: mean.add_(2 * z))


sample_with_gradients = torch.enable_grad()(pyro.sample)


def has_a_block_with_gradients(y):
    rows(y, draw=sample_with_gradients, mean=lambda z: 2 * z + 1)


@BOTH
@pytest.mark.parametrize("model", [adds_to_a_view, has_a_block_with_gradients])
def test_models_that_mind_the_mode_of_gradients(model, rules, conjugate):
    guide = made(model, Y, conjugate=conjugate, inverse="auto", learned=rules)
    with torch.no_grad():
        trace = poutine.trace(guide).get_trace(Y)
    check_rows(trace, Y - 1)
    assert not trace.nodes["z"]["fn"].mean.requires_grad


@pytest.mark.parametrize("learned", [("mu",), ()])
def test_an_earlier_member_that_a_call_observes(learned):
    def model(y, a=None):
        mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
        with pyro.plate("rows", len(y)):
            a = pyro.sample("a", dist.Normal(mu, 1.0), obs=a)
            b = pyro.sample("b", dist.Normal(a, 1.0))
            pyro.sample("y", dist.Normal(a + b, 0.5), obs=y)

    a = torch.tensor([3.0, -3.0, 0.0])
    conjugate = ("a", "b") if learned else ("mu", "a", "b")
    guide = made(model, Y, conjugate=conjugate, inverse="auto", learned=learned)
    fn = poutine.trace(guide).get_trace(Y, a=a).nodes["b"]["fn"]
    torch.testing.assert_close(fn.mean.detach(), (a + (Y - a) / 0.25) / 5)


@BOTH
def test_predictive_children_do_not_matter(rules, conjugate):
    def model(y):
        def draw(name, prior):
            z = pyro.sample(name, prior)
            pyro.sample("new", dist.Normal(2 * z, 0.5))
            drawn.append(z)
            return z

        drawn = []
        rows(y, draw)
        pyro.sample("count", dist.Poisson(drawn[0].square().sum()))

    guide = made(model, Y, conjugate=conjugate, inverse="auto", learned=rules)
    assert guide.inverse.predictive == {"new", "count"}
    trace = poutine.trace(guide).get_trace(Y)
    check_rows(trace, Y)
    torch.testing.assert_close(trace.nodes["new"]["fn"].mean, 2 * trace.nodes["z"]["value"])


@BOTH
def test_scales_of_more_dims_than_the_likelihood_has(rules, conjugate):
    model = lambda y, power: rows(y, power=power)  # noqa: E731
    guide = made(model, Y, torch.ones(()), conjugate=conjugate, inverse="auto", learned=rules)
    trace = poutine.trace(guide).get_trace(Y, torch.tensor([[0.5], [1.0]]))
    check_rows(trace, Y, 1.5)  # summed, as the log density is


def test_deriving_takes_one_run_behind_the_run_that_draws_and_leaves_no_switch_behind():
    def draw(*site):
        with pyro.validation_enabled(False):
            return pyro.sample(*site)

    model = Counted(lambda y: rows(y, draw))
    guide = made(model, Y, inverse="auto")
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            guide(Y)
            before = model.runs
            trace = poutine.trace(guide).get_trace(Y)
            assert model.runs == before + 2  # one up to z, and one with gradients
            assert torch.is_grad_enabled() == gradients and dist.is_validation_enabled()
        check_rows(trace, Y)


def test_an_error_while_deriving_leaves_no_switch_behind():
    broken = []

    def mean(z):
        if broken:
            raise RuntimeError("not now")
        return 2 * z

    guide = made(lambda y: rows(y, mean=mean), Y, inverse="auto")
    broken.append(True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="not now"):
        guide(Y)
    assert torch.is_grad_enabled() and dist.is_validation_enabled()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="not now"):
            guide(Y)
        assert not torch.is_grad_enabled()


def test_a_mask_that_comes_later():
    def model(y, seen=None):
        mask = poutine.mask(mask=torch.ones(4).bool() if seen is None else seen)
        local_normals(
            y, around=mask, prior=lambda mu: dist.Normal(mu, 1.0).mask(True), likelihood=noise(0.5)
        )

    y = torch.randn(4)
    guide = AutoNaMIGuide(model, inverse="reverse")
    guide(y)
    values = guide(y, torch.tensor([True, False, True, True]))
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


exact_likelihood = noise()


@pytest.mark.parametrize(
    "likelihood, prior",
    [
        (lambda z: dist.Poisson(z.exp()), dist.Normal),
        (lambda z: dist.Bernoulli(logits=z), dist.Normal),
        (lambda z: dist.StudentT(torch.tensor(4.0), z, 1.0), dist.Normal),
        (lambda z: dist.Normal(z.tanh(), 1.0), dist.Normal),
        (lambda z: dist.Normal(z, (0.1 * z).exp()), dist.Normal),
        (lambda z: dist.Normal(z.detach(), 1.0), dist.Normal),
        (lambda z: dist.Normal((z > 0).to(z), 1.0), dist.Normal),
        (exact_likelihood, dist.Laplace),
        (exact_likelihood, dist.LogNormal),
        (exact_likelihood, dist.Cauchy),
    ],
)
def test_other_likelihoods_and_priors_are_not_taken_for_exact(likelihood, prior):
    guide = made(
        below(likelihood, lambda mu: prior(mu, 1.0)), torch.ones(3, 4), conjugate=(), learned=()
    )
    assert guide.rules["z"].rule != "exact"


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
    for sd in (1.0, 0.05):
        made(below(likelihood, lambda mu, sd=sd: dist.Normal(mu, sd)), y, conjugate=(), learned=())


@pytest.mark.parametrize(
    "options",
    [
        {"exact": False},
        {"anchor": False},
        {"inverse": "mean_field"},
        {"families": {"z": "flow"}},
        {"families": "normal"},
        {"rules": {"z": "learned"}},
    ],
    ids=str,
)
def test_options_that_exclude_them(options):
    model = below(exact_likelihood)
    made(model, torch.ones(3, 4), conjugate=("mu", "z"), learned=())
    made(model, torch.ones(3, 4))
    guide = AutoNaMIGuide(model, **{"inverse": "reverse", **options})
    guide(torch.ones(3, 4))
    assert guide.conjugate == ()


def test_rows_that_are_subsampled_are_not_taken_for_the_data():
    made(below(exact_likelihood, chosen_rows=5), torch.randn(30, 4), conjugate=(), learned=())


# ---- data that this call does not bring


class Setting:
    """An argument that no state dict holds."""


def regression(x, y=None, setting=None):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 2.0))
    with pyro.plate("counties", 5):
        alpha = pyro.sample("alpha", dist.Normal(mu, 1.0))
    with pyro.plate("houses", len(x)):
        pyro.sample("y", dist.Normal(alpha[..., COUNTY[: len(x)]] * x, 0.5), obs=y)


X = 1 + FLOOR  # a row that is multiplied by 0 could read any county


@pytest.mark.parametrize(
    "rules, conjugate", [(LEARNED_MEAN, ("alpha",)), ({}, ("mu", "alpha"))], ids=["local", "all"]
)
def test_new_rows_are_predicted_from_the_arguments_of_the_data(rules, conjugate):
    y = torch.randn(10)
    guide = trained(regression, X, y, save_data=True, rules=rules)
    assert guide.conjugate == conjugate
    values = {name: value.detach() for name, value in guide(X, y).items()}
    expected = guide.log_prob(values, X, y)
    for new in (X[:3], X.flip(0)):
        assert torch.equal(guide.log_prob(values, new), expected)
    assert Predictive(regression, guide=guide, num_samples=4, parallel=True)(X[:3])["y"].shape == (
        4,
        3,
    )
    other = amortized(regression, inverse="reverse", rules=rules)
    other(X, torch.randn(10))
    other.load_state_dict(through_file(guide.state_dict()))
    assert torch.equal(other.log_prob(values, X[:3]), expected)


def test_arguments_that_no_state_holds_are_asked_for():
    y = torch.randn(10)
    guide = trained(regression, X, y, Setting(), save_data=True, mode="auto")
    guide(X[:3])
    other = AutoNaMIGuide(regression, inverse="reverse")
    other(X, y + 1)
    other.load_state_dict(guide.state_dict())
    with pytest.raises(
        ValueError, match="data for the observed site 'y'.*only if it was saved with save_data=True"
    ):
        other(X[:3])


@BOTH
@pytest.mark.parametrize("use", ["compilation", "CSIS"])
def test_a_model_that_takes_observations_has_exact_conditionals_too(use, rules, conjugate):
    model = told(functools.partial(local_normals, rows=8, sd=5.0, prior=noise(2.0)))
    if use == "CSIS":
        guide = AutoNaMIGuide(model, rules=rules)
        CSIS(model, guide, Adam({"lr": 1e-3})).step(observations={"y": torch.zeros(8)})
    else:
        guide = AutoNaMIGuide(model, observed=["y"], rules=rules)
        adam = functools.partial(torch.optim.Adam, lr=1e-3)
        InferenceCompilation(model, guide, adam, batch_size=20).fit(2, progress=False)
    assert guide.conjugate == conjugate
    y = torch.linspace(-3.0, 3.0, 8)
    assert guide(observations={"y": y})["z"].shape == (8,)


def two_children(w, y=None):
    mu = pyro.sample("mu", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("data", len(w)):
        z = pyro.sample("z", dist.Normal(mu, 1.0))
        pyro.sample("w", dist.Normal(z, 0.3), obs=w)
    pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@BOTH
def test_data_of_one_outcome_do_not_change_what_both_said_in_training(rules, conjugate):
    w, y = torch.randn(5), torch.tensor(0.3)
    guide = trained(two_children, w, y, mode="auto", rules=rules)
    assert guide.conjugate == conjugate
    trace = poutine.trace(guide).get_trace(w + 10)
    expected = (trace.nodes["mu"]["value"] + w / 0.09) / (1 + 1 / 0.09)
    assert torch.allclose(trace.nodes["z"]["fn"].loc, expected)


def test_copies_of_guides_whose_arguments_have_a_graph_or_no_tensors():
    y = torch.randn(10)
    slope = torch.ones((), requires_grad=True)
    guide = trained(regression, slope * X, y, Setting(), mode="auto")
    values = {name: value.detach() for name, value in guide(X, y).items()}
    other = copy.deepcopy(guide)
    assert torch.equal(other.log_prob(values, X[:3]), guide.log_prob(values, X[:3]))


def test_priors_so_vague_that_draws_of_the_model_overflow_refute_nothing():
    """Variances as BUGS has them: nearly all draws of these are 0 or infinite, in single precision."""
    group = torch.arange(60) % 6

    def effects(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1000.0))
        precision = pyro.sample("precision", dist.Gamma(0.001, 0.001))
        variance = pyro.sample("variance", dist.InverseGamma(0.001, 0.001))
        with pyro.plate("groups", 6):
            effect = pyro.sample("effect", dist.Normal(0.0, precision.rsqrt()))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean + effect[..., group], variance.sqrt()), obs=y)

    torch.set_default_dtype(torch.float32)
    guide = AutoNaMIGuide(effects)
    guide(torch.linspace(-1, 2, 60))
    assert set(guide.conjugate) == {"mean", "effect"}
    assert {
        name: note.rule for name, note in guide.rules.items() if name not in guide.conjugate
    } == dict.fromkeys(("precision", "variance"), "quadrature")
