"""What the guide can represent: the exact posterior, wherever linear algebra says that its inverse can.

A guide without hidden layers whose scales are held constant has log q(z | y) quadratic in z, so that its mean and
precision are read off by differentiation, and the KL divergence to the exact posterior is a formula. It is minimized
over the guide's parameters by L-BFGS, without noise; what is left is what the inverse cannot represent.
"""

from __future__ import annotations

import math

import pyro
import pytest
import torch
from models import (
    CASES,
    CHAIN,
    COLLIDER,
    DIAMOND,
    NETWORKS,
    TREE,
    amortized,
    conjugate_normal,
    conjugate_normal_posterior,
    eight_schools,
    eight_schools_evidence,
    minimize,
)
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

from pyro_nami import AutoNaMIGuide

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("double")]


def hold_scales(guide):
    """Keeps the rows that give log scales, every second one, from reading anything: biases are the last column."""
    for parameter in guide.network.networks.parameters():
        free = torch.ones_like(parameter)
        free[..., 1::2, :-1] = 0
        parameter.register_hook(free.mul)


def divergence(guide, network, data, at=0.0):
    """Returns KL(q || exact posterior) in nats, the mean over data sets ``(sets, observed)``; derivatives ``at`` z."""
    names = network.latent
    z = torch.full((len(data), len(names)), at, requires_grad=True)
    observations = dict(zip(network.observed, data.unbind(-1)))
    log_q = guide.log_prob(dict(zip(names, z.unbind(-1))), *data[0], observations=observations)
    slope = torch.autograd.grad(log_q.sum(), z, create_graph=True)[0]
    rows = [torch.autograd.grad(part.sum(), z, create_graph=True)[0] for part in slope.unbind(-1)]
    precision = -torch.stack(rows, -2)
    mean = z + torch.linalg.solve(precision, slope)
    exact = [network.posterior(*row.tolist()) for row in data]
    exact_precision = torch.linalg.inv(exact[0][1])
    gap = torch.stack([part[0] for part in exact]) - mean
    trace = (exact_precision @ torch.linalg.inv(precision)).diagonal(dim1=-2, dim2=-1).sum(-1)
    distance = ((gap @ exact_precision) * gap).sum(-1)
    return (
        0.5
        * (
            trace + distance - len(names) - torch.logdet(exact_precision @ precision.inverse())
        ).mean()
    )


def least(parameters, loss):
    options = {"max_iter": 200, "tolerance_change": 1e-6, "line_search_fn": "strong_wolfe"}
    minimize(torch.optim.LBFGS(parameters, **options), loss)


def fitted(network, inverse, **options):
    """Returns a linear guide at the least mean KL over several data sets, and its KL at data it was not fitted to."""
    count = len(network.observed)
    data = torch.cat([torch.zeros(1, count), 2 * torch.eye(count)])
    guide = amortized(network, inverse=inverse, hidden_features=(), init_scale=0.5, **options)
    guide(*data[0])
    hold_scales(guide)
    least(guide.parameters(), lambda: divergence(guide, network, data))
    fresh = torch.tensor([[1.3, -0.7, 0.4, 2.1]])[:, :count]
    left = divergence(guide, network, fresh).item()
    assert abs(left - divergence(guide, network, fresh, at=0.7).item()) < 1e-6, "q is not Gaussian"
    return guide, left


def representable(network, inverse):
    """Returns the least KL of a Gaussian q with the inverse's dependencies, by an optimizer of its own.

    q is a product of z_v ~ N(sum_u w_uv z_u + c_v, s_v) over the latent parents u. Taking its mean to be exact, what is
    left depends on the covariance alone: a lower bound.
    """
    names = network.latent
    _, exact = network.posterior(*[0.0] * len(network.observed))
    target = torch.linalg.inv(exact)
    order = {name: i for i, name in enumerate(names)}
    pattern = torch.zeros(len(names), len(names))
    for v in names:
        for u in inverse.parents[v]:
            if u in order:
                pattern[order[v], order[u]] = 1
    weights = torch.zeros(len(names), len(names), requires_grad=True)
    scales = torch.zeros(len(names), requires_grad=True)

    def loss():
        whiten = (torch.eye(len(names)) - weights * pattern) / scales.exp().unsqueeze(-1)
        precision = whiten.T @ whiten
        trace = (target @ torch.linalg.inv(precision)).trace()
        return 0.5 * (trace - len(names) + torch.logdet(precision) - torch.logdet(target))

    least([weights, scales], loss)
    return loss().item()


@pytest.mark.parametrize("inverse", ["auto", "forward", "reverse", "free", "fully_connected"])
@pytest.mark.parametrize("name", NETWORKS)
def test_faithful_inverses_reach_the_exact_posterior_for_all_data(name, inverse):
    _, left = fitted(NETWORKS[name], inverse)
    assert left < 1e-2


@torch.no_grad()
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("inverse", ["auto", "forward", "reverse", "mean_field"])
def test_what_is_called_exact_has_the_same_weight_at_every_draw(inverse, own_parameters):
    """log p(z, y) - log q(z | y) is log p(y), whatever z; in grids up to their error."""
    found = 0
    for name, case in CASES.items():
        args = case.arguments()
        guide = AutoNaMIGuide(case.model, inverse=inverse)
        guide(*args)
        rules = {note.rule for note in guide.rules.values()}
        if not rules <= {"exact", "quadrature"}:
            continue
        weights = []
        for _ in range(5):
            drawn = poutine.trace(guide).get_trace(*args)
            joint = poutine.trace(poutine.replay(case.model, drawn)).get_trace(*args)
            weights.append(float(joint.log_prob_sum() - drawn.log_prob_sum()))
        spread = max(weights) - min(weights)
        assert spread < (0.2 if "quadrature" in rules else 1e-3), (name, spread)
        found += 1
    assert found >= 3


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_neither_anchors_nor_sharing_take_it_away(anchor, shared):
    """Every pair of two of anchors, sharing and an inverse."""
    inverse = "forward" if anchor == shared else "reverse"
    _, left = fitted(COLLIDER, inverse, anchor=anchor, shared=shared)
    assert left < 1e-2


@pytest.mark.parametrize("name", NETWORKS)
def test_mean_field_stays_where_linear_algebra_puts_it(name):
    """The best factorized q has the precision's diagonal: KL = (sum log P_ii - log det P) / 2."""
    network = NETWORKS[name]
    _, exact = network.posterior(*[0.0] * len(network.observed))
    precision = torch.linalg.inv(exact)
    bound = 0.5 * (precision.diagonal().log().sum() - torch.logdet(precision)).item()
    _, left = fitted(network, "mean_field", anchor=False)
    assert bound > 0.1
    assert abs(left - bound) < 0.02


def test_the_stochastic_inverse_of_stuhlmueller_stays_short_where_it_lacks_edges():
    """In the tree, s and t are coupled through r, which is sampled after them: an edge that it lacks."""
    guide, left = fitted(TREE, "stuhlmueller", anchor=False)
    bound = representable(TREE, guide.inverse)
    assert bound > 0.1, "an example on which it must fall short"
    assert left > bound - 1e-3


def test_the_oracle_agrees_with_the_model():
    """Joint density of the model at random points against the oracle's covariance."""
    for network in (CHAIN, COLLIDER, TREE, DIAMOND):
        joint = torch.distributions.MultivariateNormal(
            torch.zeros(len(network.sites)), network.covariance()
        )
        values = torch.randn(len(network.sites))
        point = dict(zip(network.sites, values))
        model = pyro.poutine.condition(network, {name: point[name] for name in network.latent})
        trace = pyro.poutine.trace(model).get_trace(*(point[name] for name in network.observed))
        assert torch.allclose(trace.log_prob_sum(), joint.log_prob(values))


def particles(count, nesting=0):
    return Trace_ELBO(num_particles=count, vectorize_particles=True, max_plate_nesting=nesting)


def train(model, guide, count, rate, decay, data, nesting=0):
    """Takes steps of 16 particles at data that a function of the step returns."""
    svi = SVI(model, guide, ClippedAdam({"lr": rate, "lrd": decay}), particles(16, nesting))
    for step in range(count):
        svi.step(*data(step))


def test_training_by_svi_reaches_the_exact_posterior_of_one_data_set():
    """Fill-in is needed; AutoStructured ends 0.06 nats short (contract 6). The KL is exact, not estimated."""
    y = torch.tensor(2.0)
    guide = AutoNaMIGuide(COLLIDER, hidden_features=())
    guide(y)
    hold_scales(guide)
    train(COLLIDER, guide, 1000, 0.05, 0.996, lambda _: (y,))
    assert divergence(guide, COLLIDER, y.reshape(1, 1)).item() < 1e-2


@pytest.mark.parametrize("inverse", ["forward", "reverse"])
def test_training_by_svi_with_hidden_layers(inverse):
    """The log evidence is known, so the bound's gap is the KL; 0.03 is six standard errors of the last estimate."""
    y = torch.tensor(2.0)
    guide = AutoNaMIGuide(COLLIDER, inverse=inverse)
    train(COLLIDER, guide, 800, 0.05, 0.995, lambda _: (y,))
    assert COLLIDER.log_evidence(2.0) + particles(20_000).loss(COLLIDER, guide, y) < 0.03


def test_a_pooled_posterior_is_right_at_other_sizes_after_training_on_them():
    """mu | y_1..y_n: trained on several data sets of sizes 2 to 8, asked for another of size 5."""

    def data(step):
        with torch.random.fork_rng(()):
            torch.manual_seed(step % 40)
            return (2 * torch.randn(()) + torch.randn(2 + step % 7),)

    guide = amortized(conjugate_normal, init_scale=0.5)
    train(conjugate_normal, guide, 200, 0.03, 0.99, data, nesting=1)
    y = torch.tensor([1.0, 2.0, 0.5, 1.5, 0.0])
    mean, sd = conjugate_normal_posterior(y)
    with torch.no_grad(), pyro.plate("outer", 4000, dim=-2):
        draws = guide(y)["mu"]
    assert abs(draws.mean() - mean) < 0.5 * sd
    assert 0.5 < draws.std() / sd < 2


def test_the_evidence_of_eight_schools_is_the_published_one():
    assert abs(eight_schools_evidence() + 31.3113) < 1e-3


@pytest.mark.slow
def test_eight_schools_comes_close_to_its_evidence():
    """Default settings; a fifth of the demo's steps, of more particles. The demo itself asks for 0.15 nats."""
    args = CASES["eight_schools"].arguments()
    guide = AutoNaMIGuide(eight_schools)
    train(eight_schools, guide, 300, 0.05, 0.99, lambda _: args, nesting=1)
    loss = particles(10_000, nesting=1).loss(eight_schools, guide, *args)
    assert math.isfinite(loss) and eight_schools_evidence() + loss < 0.4
