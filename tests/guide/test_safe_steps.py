"""Steps that are safe at any width, and data that never change left to constants."""

from __future__ import annotations

import copy
import functools
import gc
import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import (
    amortized,
    conjugate_normal,
    conjugate_normal_posterior,
    learned,
    pair,
    steps,
    unobserved,
)
from pyro import poutine
from pyro.infer import JitTrace_ELBO, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal

from pyro_nami import AutoNaMIGuide, InferenceCompilation
from pyro_nami.parameters.network_state import NetworkState

RATE = 0.01
Y, COUNTS = torch.tensor([1.0, 2.0, 0.5]), torch.tensor([0.0, 3.0, 20.0])
FAMILIES = ["normal", "flow", None, "mixture"]
SIZES, SCALES = [(1, 2), (40, 3), (3, 60)], [0.01, 1.0, 100.0]
# Every pair of a family, a size and a scale.
STEPS = [
    (family, *size, SCALES[(i + j) % 3])
    for (i, family), (j, size) in itertools.product(enumerate(FAMILIES), enumerate(SIZES))
]


def regression(features: int, groups: int, scale: float = 1.0):
    """A vector of weights, a global scale, and effects of groups, all of which the data tell of."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5 * groups, features, generator=generator)
    index = torch.arange(5 * groups) % groups

    def model(y):
        weights = pyro.sample("weights", dist.Normal(torch.zeros(features), scale).to_event(1))
        spread = pyro.sample("spread", dist.Gamma(2.0, 2.0))
        with pyro.plate("groups", groups):
            effect = pyro.sample("effect", dist.Gamma(3.0, 1.0 + spread))
        with pyro.plate("rows", 5 * groups):
            pyro.sample(
                "y", dist.StudentT(4.0, (weights * x).sum(-1) + effect[..., index], spread), obs=y
            )

    return model, torch.randn(5 * groups, generator=generator)


def locations_and_scales(guide, *args):
    """Location and log scale of every element at the same random numbers, from the draws' quantiles."""
    with torch.no_grad(), torch.random.fork_rng(()), pyro.plate("draws", 4000, dim=-2):
        torch.manual_seed(1)
        values = poutine.trace(guide).get_trace(*args)
    found = {}
    for name, site in values.nodes.items():
        if site["type"] == "sample" and name != "draws":
            free = dist.transforms.biject_to(site["fn"].support).inv(site["value"]).flatten(1)
            low, middle, high = torch.quantile(free, torch.tensor([0.16, 0.5, 0.84]), 0)
            found[name] = torch.stack((middle, ((high - low) / 2).log()))
    return found


def train(model, guide, rate, count, *args, objective=Trace_ELBO, **options):
    return steps(model, guide, *args, count=count, lr=rate, elbo=objective(**options))


def afresh(kind, model):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    return kind(model)


@pytest.mark.parametrize(("families", "features", "groups", "scale"), STEPS)
def test_a_step_of_adam_moves_locations_and_log_scales_by_about_its_rate(
    families, features, groups, scale
):
    """Whatever the number of inputs, elements and instances and the prior's scale; 0.1 is the first scale."""
    model, y = regression(features, groups, scale)
    guide = AutoNaMIGuide(model, families=families)
    guide(y)
    before = locations_and_scales(guide, y)
    train(model, guide, RATE, 1, y)
    for name, now in locations_and_scales(guide, y).items():
        location, log_scale = (now - before[name]).abs().amax(-1)
        assert location < 6 * RATE, name
        # The components of a mixture move apart, which is more than each of them moves.
        assert log_scale < (15 if families == "mixture" else 8) * RATE, name


@pytest.mark.parametrize(("rate", "count"), [(0.001, 150), (0.05, 300)])
def test_training_ends_no_worse_than_auto_normal(rate, count):
    """On a model that nothing was tuned for, at a low rate and at a high one, and where the loss is compiled."""
    model, y = regression(4, 6)

    def bound(kind, objective, **options):
        guide = afresh(kind, model)
        train(model, guide, rate, count, y, objective=objective, **options)
        elbo = Trace_ELBO(num_particles=500, vectorize_particles=True, max_plate_nesting=1)
        return -elbo.loss(model, guide, y)

    least = bound(AutoNormal, Trace_ELBO) - 0.3  # three standard errors
    assert bound(AutoNaMIGuide, Trace_ELBO) > least
    if rate > 0.01:
        assert bound(AutoNaMIGuide, JitTrace_ELBO, ignore_jit_warnings=True) > least


@pytest.mark.parametrize("plate", [0, 20])
def test_at_a_high_rate_a_bounded_latent_moves_as_auto_normals(plate):
    """The width of its prior, and what its instances have in common, must not make another rate of this one."""
    data = torch.ones((plate,) if plate else ())
    model, found = pair(dist.Beta(0.01, 0.01), dist.Bernoulli, data, plate), []
    for kind in (AutoNormal, functools.partial(AutoNaMIGuide, exact=False, families="normal")):
        guide = afresh(kind, model)
        train(model, guide, 0.05, 100)
        with torch.no_grad(), pyro.plate("draws", 500, dim=-2):
            draws = guide()["z"].logit()
        found.append([draws.mean(0).mean().item(), draws.std(0).mean().item()])
    assert found[1] == pytest.approx(found[0], rel=0.4)


def test_what_auto_normal_lacks_does_not_diverge_where_draws_from_a_tail_throw_it():
    """A small deep exponential family: sparse gammas, at a rate at which AutoNormal loses as well."""
    x = torch.poisson(torch.full((20, 16), 3.0), generator=torch.Generator().manual_seed(0))

    def model(x):
        with pyro.plate("top", 6):
            upper = pyro.sample("upper", dist.Gamma(0.1, 0.3).expand([4]).to_event(1))
        with pyro.plate("middle", 4):
            lower = pyro.sample("lower", dist.Gamma(0.1, 0.3).expand([16]).to_event(1))
        with pyro.plate("rows", 20):
            high = pyro.sample("high", dist.Gamma(0.1, 0.1).expand([6]).to_event(1))
            low = pyro.sample(
                "low", dist.Gamma(torch.tensor(0.1), 0.1 / (high @ upper + 1e-3)).to_event(1)
            )
            pyro.sample("x", dist.Poisson(low @ lower + 1e-3).to_event(1), obs=x)

    for options in {}, {"inverse": "mean_field"}:
        guide = afresh(functools.partial(AutoNaMIGuide, **options), model)
        train(model, guide, 0.5, 200, x)
        with torch.no_grad():
            losses = torch.tensor([Trace_ELBO().loss(model, guide, x) for _ in range(50)])
        assert losses.median() < 2500  # 1,700 at the start, 1,150 where AutoNormal ends


@pytest.mark.parametrize("objective", [Trace_ELBO, JitTrace_ELBO])
def test_a_latent_that_another_reads_stays_where_it_belongs(objective):
    """Also where a loss is compiled, so that what networks read is not centered as training goes on."""
    model = unobserved(x=dist.Normal(0.0, 1.0), y=dist.LogNormal(0.0, 1.0), z=dist.Beta(2.0, 2.0))
    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["x"])))
    guide.append(AutoNaMIGuide(poutine.block(model, hide=["x"])))
    options = {"num_particles": 500, "vectorize_particles": True, "ignore_jit_warnings": True}
    train(model, guide, 0.02, 70, objective=objective, **options)
    # 0.2 where z pulls it along
    assert guide[1].median()["y"].log() == pytest.approx(0.0, abs=0.08)


@pytest.mark.parametrize("rate", [0.003, 0.1])
def test_a_rate_far_from_the_best_still_finds_the_posterior(rate):
    """150 steps of 0.003 are a way of 0.45, and the log scale starts 1.7 off."""
    y = torch.tensor([0.3, 0.8, 1.9])
    guide = learned(conjugate_normal)
    train(conjugate_normal, guide, rate, 150, y)
    with torch.no_grad():
        found = poutine.trace(guide).get_trace(y).nodes["mu"]["fn"]
        draws = found.expand((4000,)).sample()
        exact = dist.Normal(*conjugate_normal_posterior(y))
        assert (found.log_prob(draws) - exact.log_prob(draws)).mean() < 0.1


def test_a_pass_is_freed_once_it_is_trained_on():
    """A graph whose hook holds what holds the graph stays for good, which no garbage collector sees."""
    model, y = regression(4, 6)
    guide = AutoNaMIGuide(model)
    gc.collect()
    # that tests before have left
    others = [thing for thing in gc.get_objects() if isinstance(thing, NetworkState)]
    train(model, guide, RATE, 8, y)
    gc.collect()
    assert sum(isinstance(thing, NetworkState) for thing in gc.get_objects()) <= len(others) + 2


def test_a_global_factor_does_not_learn_from_data_that_never_change():
    """Its constants do; what would read the data is as it was, and gets no gradient, until the data vary."""
    guide = learned(conjugate_normal)
    guide(Y)
    before = {name: value.detach().clone() for name, value in guide.named_parameters()}
    train(conjugate_normal, guide, RATE, 5, Y)
    (name,) = (
        name for name, value in guide.named_parameters() if not torch.equal(value, before[name])
    )
    assert name == "network.networks.0.output_unconstrained"
    output = guide.get_parameter(name)
    assert torch.equal(output[:, :-1], torch.zeros_like(output[:, :-1]))


def test_networks_of_rows_learn_once_the_data_vary():
    guide = learned(local)
    for y in (
        Y,
        torch.tensor([0.0, 2.0, 5.0]),
        torch.tensor([4.0, 1.0, 1.0]),
        torch.tensor([1.0, 1.0, 7.0]),
    ):
        train(local, guide, RATE, 1, y.abs().round())
    assert guide.mode == "minibatches"
    train(local, guide, RATE, 2, COUNTS)
    assert (guide.get_parameter("network.networks.0.output_unconstrained")[:, :-1] != 0).any()


local = pair(dist.LogNormal(0.0, 1.0), dist.Poisson, rows=3)


def test_instances_have_offsets_of_their_own_for_the_data_that_they_were_trained_on():
    guide, other = AutoNaMIGuide(local), torch.tensor([1.0, 3.0, 20.0])
    train(local, guide, 0.1, 60, COUNTS, num_particles=8, vectorize_particles=True)
    assert guide.network.offsets.start({})["z"].abs().max() > 0.3
    assert all("offset" in name for name, _ in guide.network.offsets.named_parameters())
    latents = guide(COUNTS)
    before = guide.log_prob(latents, COUNTS)
    # a call with other data has the trained posterior
    assert torch.equal(guide.log_prob(latents, other), before)
    with torch.no_grad():
        for value in guide.network.offsets.parameters():
            value.add_(1.0)
    assert not torch.allclose(guide.log_prob(latents, COUNTS), before)


def test_a_look_at_other_data_is_no_training_on_them():
    guide, other = AutoNaMIGuide(local), torch.tensor([1.0, 3.0, 20.0])
    train(local, guide, 0.1, 10, COUNTS)
    latents = guide(COUNTS)
    expected = guide.log_prob(latents, COUNTS)
    for look in (
        lambda: guide(other),
        lambda: guide.log_prob(latents, other),
        lambda: guide(other + 1),
    ):
        look()
        assert torch.equal(guide.log_prob(latents, COUNTS), expected)
    for data in (other, other + 1, other):
        train(local, guide, 0.1, 1, data)
    guide(COUNTS)
    assert guide.mode == "minibatches" and not torch.equal(
        guide.log_prob(latents, COUNTS), expected
    )


@pytest.mark.parametrize("make", [AutoNaMIGuide, amortized])
def test_the_first_draws_are_auto_normals_in_both_modes(make):
    guide = make(local, rules={"z": "learned"})
    guide(COUNTS)
    location, log_scale = locations_and_scales(guide, COUNTS)["z"]
    assert location.abs().max() < 0.05  # the most that a first location is off the origin
    torch.testing.assert_close(log_scale, torch.full((3,), 0.1).log(), rtol=0, atol=0.05)


def test_replaying_a_draw_in_the_middle_of_training_gives_its_density():
    model, y = regression(3, 4)
    guide = AutoNaMIGuide(model)
    for _ in range(12):
        train(model, guide, 0.05, 1, y)
        trace = poutine.trace(guide).get_trace(y)
        latents = {
            name: site["value"].detach()
            for name, site in trace.nodes.items()
            if site["type"] == "sample"
        }
        torch.testing.assert_close(
            guide.log_prob(latents, y), trace.log_prob_sum(), rtol=1e-4, atol=1e-3
        )
    expected, state = guide.log_prob(latents, y), copy.deepcopy(guide.state_dict())
    pyro.clear_param_store()
    loaded = AutoNaMIGuide(model)
    loaded.load_state_dict(state)
    torch.testing.assert_close(loaded.log_prob(latents, y), expected)


def test_draws_at_the_edge_of_a_support_stay_inside_and_gradients_finite():
    """A Dirichlet with weights far below 1: draws underflow in single precision."""
    model = pair(
        dist.Gamma(0.01, 1.0), lambda weight: dist.Dirichlet(torch.full((4,), 0.001) + weight)
    )
    guide = AutoNaMIGuide(model)
    train(model, guide, 0.05, 100)
    assert all(value.isfinite().all() for value in guide.parameters())


def linear(y=None):
    mu = pyro.sample("mu", dist.Normal(3.0, 10.0))
    x = pyro.sample("x", dist.Normal(2 * mu, 0.5))
    pyro.sample("y", dist.Normal(torch.stack((x, x - mu), -1), 1.0).to_event(1), obs=y)


@pytest.mark.parametrize("shared", [True, False])
def test_a_compiled_guide_starts_at_the_regression_on_simulations(shared):
    """The gap of a linear Gaussian model before the first step; without, it is above 100 nats."""
    guide = AutoNaMIGuide(linear, observed=["y"], shared=shared)
    compilation = InferenceCompilation(
        linear, guide, lambda p: torch.optim.Adam(p, lr=1e-3), batch_size=100
    )
    reads = torch.tensor([[0.0, 1.0], [-1.0, 1.0]])  # of (mu, x); x = 2 mu + 0.5 e
    precision = (
        torch.tensor([[1.0 / 100 + 4 / 0.25, -2 / 0.25], [-2 / 0.25, 1 / 0.25]]) + reads.T @ reads
    )
    entropy = dist.MultivariateNormal(torch.zeros(2), precision_matrix=precision).entropy().item()
    assert compilation.evaluate_loss(num=4000) < entropy + 0.1


def test_offsets_of_large_plates_are_asked_for():
    model, y = regression(3, 4)
    for most, given in ((2, False), (100_000, True)):
        pyro.clear_param_store()
        guide = AutoNaMIGuide(model, max_offsets=most, exact=False)
        guide(y)
        assert bool([*guide.network.offsets.parameters()]) == given


def test_modes_and_numbers_of_offsets_are_checked():
    with pytest.raises(
        ValueError, match="mode to be one of 'auto', 'fixed', 'minibatches', 'amortized'; got 'on'"
    ):
        AutoNaMIGuide(local, mode="on")
    with pytest.raises(ValueError, match="max_offsets >= 0; got -1"):
        AutoNaMIGuide(local, max_offsets=-1)


@pytest.mark.filterwarnings("error")
def test_data_that_move_with_the_models_parameters_are_the_same_if_its_arguments_are():
    """As in Pyro's forecasting models, whose data are residuals of a prediction with parameters."""

    def residual(y):
        shift = pyro.param("shift", torch.tensor(0.5))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.StudentT(4.0, 0.0, 1.0))
            pyro.sample("residual", dist.StudentT(4.0, 0.0, 0.5), obs=y - shift - z)

    guide = AutoNaMIGuide(residual)
    steps(residual, guide, Y, count=10)
    assert pyro.param("shift") != 0.5 and guide.mode == "fixed"
    values = {"z": torch.zeros(3)}
    log_prob = guide.log_prob(values, Y)
    assert torch.equal(guide.log_prob(values, Y.clone()), log_prob)
    again = AutoNaMIGuide(residual)
    again(Y)
    again.load_state_dict(guide.state_dict())
    # residuals of another start
    torch.testing.assert_close(again.log_prob(values, Y), log_prob, atol=0.05, rtol=0.0)
    with torch.no_grad():
        torch.testing.assert_close(guide.log_prob(values, Y + 1.0), log_prob)
    for shift in (1.0, 0.0, 1.0):
        steps(residual, guide, Y + shift, count=1)
    assert guide.mode == "minibatches"


@pytest.mark.parametrize("rows", [30, 17])
@pytest.mark.parametrize("rate", [0.1, 0.02])
def test_training_goes_on_with_other_data_as_auto_normals_does(rate, rows):
    """Where they come twice in a row: networks do not begin to read them, which takes losses up to 1e6 and NaN."""
    x, group = torch.randn(30), torch.arange(30) % 6
    y = torch.randn(6)[group] + 0.5 * x + 0.3 * torch.randn(30)

    def model(x, group, y):
        mu, s = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("s", dist.HalfNormal(1.0))
        nu, b = pyro.sample("nu", dist.Gamma(2.0, 0.2)), pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 6):
            a = pyro.sample("a", dist.Normal(mu, s))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.StudentT(1 + nu, a[..., group] + b * x, 0.4), obs=y)

    losses = {}
    for kind in (AutoNormal, AutoNaMIGuide):
        pyro.set_rng_seed(0)
        guide = kind(model)
        steps(model, guide, x, group, y, count=40, lr=rate)
        losses[kind] = steps(model, guide, x[:rows], group[:rows], y[:rows] + 3, count=100, lr=rate)
    assert guide.mode == "fixed"
    # after two steps, by which it is known that these data stay
    assert losses[AutoNaMIGuide][2:].max() < 2 * losses[AutoNormal].max()
    assert losses[AutoNaMIGuide][-60:].mean() < losses[AutoNormal][-60:].mean() + 1


@pytest.mark.filterwarnings("ignore:Hidden randomness")
def test_data_that_a_model_draws_anew_vary():
    def drawn():
        with pyro.plate("rows", 3):
            z = pyro.sample("z", dist.StudentT(4.0, 0.0, 1.0))
            pyro.sample("y", dist.StudentT(4.0, z, 0.5), obs=torch.randn(3))

    guide = AutoNaMIGuide(drawn)
    steps(drawn, guide, count=4)
    assert guide.mode == "minibatches"
