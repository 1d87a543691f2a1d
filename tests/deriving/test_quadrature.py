"""Conditionals of latents with one element by quadrature: against sums over a fine grid of the density by hand."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import called, conditional
from pyro import poutine
from torch import Tensor
from torch.special import log_ndtr

pytestmark = pytest.mark.usefixtures("double", "own_parameters")

ROWS = [0.0, 3, 1, 12], [0.0, 1, 1, 0], [0.2, 3, 1, 9]
COUNTS, BITS, SIZES = (torch.tensor(each, dtype=torch.float64) for each in ROWS)
LEVELS, ORDERED = torch.tensor([-1.0, 0.5], dtype=torch.float64), torch.tensor([0, 2, 1, 2])
LIKELIHOODS: dict[str, tuple[Callable, Tensor]] = {
    "Poisson": (lambda eta: dist.Poisson(eta.exp()), COUNTS),
    "Bernoulli": (lambda eta: dist.Bernoulli(logits=eta), BITS),
    "probit": (lambda eta: dist.Bernoulli(logits=log_ndtr(eta) - log_ndtr(-eta)), BITS),
    "Binomial": (lambda eta: dist.Binomial(20, logits=eta), COUNTS),
    "negative binomial": (lambda eta: dist.NegativeBinomial(2.5, logits=eta), COUNTS),
    "Gamma": (lambda eta: dist.Gamma(2.0, (-eta).exp()), SIZES),
    "Weibull": (lambda eta: dist.Weibull(eta.exp(), 1.5), SIZES),
    "ordinal": (lambda eta: dist.OrderedLogistic(eta, LEVELS), ORDERED),
    "Gumbel": (lambda eta: dist.Gumbel(eta, 1.0), SIZES),
}
GROUP, GRID = (
    torch.tensor([0, 1, 0, 2, 1, 2, 2, 0]),
    torch.linspace(-15, 15, 30001, dtype=torch.float64),
)


def effects(like: Callable) -> Callable:
    """An effect of each row, whose scale is learned."""

    def model(y):
        s = pyro.sample("s", dist.HalfNormal(torch.tensor(2.0)))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.tensor(0.3), s))
            pyro.sample("y", like(z), obs=y)

    return model


def groups(y, group=GROUP):
    """An intercept and effects of groups, which rows read by an index."""
    s = pyro.sample("s", dist.HalfNormal(torch.tensor(2.0)))
    a = pyro.sample("a", dist.Normal(torch.tensor(0.0), 2.0))
    with pyro.plate("groups", 3):
        b = pyro.sample("b", dist.Normal(torch.tensor(0.0), s))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson((a + b[..., group]).exp()), obs=y)


def divergence(log_joint: Tensor, log_prob: Tensor) -> Tensor:
    """KL(p || q) of densities on the grid, along the first dim; nats."""
    step = GRID[1] - GRID[0]
    log_p = log_joint - torch.logsumexp(log_joint, 0) - step.log()
    assert torch.allclose(log_prob.exp().sum(0) * step, torch.ones(()), atol=1e-4)
    return torch.where(log_p > -700, log_p.exp() * (log_p - log_prob), 0.0).sum(0) * step


# A log density may be off by 1e-2 (1 + f), with f its fall from the top: 0.5 on average, and 0.75 squared, of Normals.
DIVERGENCE = 1e-4 * (1 + 2 * 0.5 + 0.75) / 2


@pytest.mark.parametrize("s", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("like, y", LIKELIHOODS.values(), ids=list(LIKELIHOODS))
def test_rows_have_the_conditionals_that_sums_give(like, y, s):
    guide = called(effects(like), y)
    assert guide.rules["z"].rule == "quadrature"
    for data in (y, y.flip(0).repeat(2)):  # and of another size
        fn = conditional(guide, "z", data, s=torch.tensor(s))
        z = GRID.unsqueeze(-1).expand(-1, len(data))
        joint = dist.Normal(0.3, s).log_prob(z) + like(z).log_prob(data)
        assert (divergence(joint, fn.log_prob(z)) < DIVERGENCE).all()


def log_rest(a: Tensor, y: Tensor, s: Tensor) -> Tensor:
    """log p(a, y), ``(grid,)``, with the effects of the groups summed over a grid."""
    b = torch.linspace(-8, 8, 801, dtype=torch.float64)
    total = dist.Normal(0.0, 2.0).log_prob(a)
    for group in range(3):
        rows = (
            dist.Poisson((a[:, None] + b).exp().unsqueeze(-1)).log_prob(y[group == GROUP]).sum(-1)
        )
        total = total + torch.logsumexp(dist.Normal(0.0, s).log_prob(b) + rows, -1)
    return total


def test_a_latent_drawn_later_is_integrated_out():
    y, s = torch.tensor([0.0, 2, 5, 1, 0, 3, 9, 1]), torch.tensor(0.8)
    guide = called(groups, y)
    assert [guide.rules[name].rule for name in "ab"] == ["quadrature"] * 2
    fn, place = conditional(guide, "a", y, s=s), GRID[::10]
    log_p = log_rest(place, y, s)
    log_p = log_p - torch.logsumexp(log_p, 0) - (place[1] - place[0]).log()
    log_q = fn.log_prob(place.reshape((-1,) + (1,) * len(fn.batch_shape))).reshape(-1)
    assert (log_p.exp() * (log_p - log_q)).sum() * (place[1] - place[0]) < 1e-4
    fn, z = conditional(guide, "b", y, s=s, a=torch.tensor(0.7)), GRID.unsqueeze(-1).expand(-1, 3)
    rows = dist.Poisson((0.7 + z[:, GROUP]).exp()).log_prob(y)
    joint = dist.Normal(0.0, s).log_prob(z) + torch.zeros_like(z).index_add(1, GROUP, rows)
    assert (divergence(joint, fn.log_prob(z)) < 1e-4).all()


def test_particles_are_as_one_by_one():
    y, scales = COUNTS, torch.tensor([0.5, 1.0, 2.0])
    guide = called(effects(LIKELIHOODS["Poisson"][0]), y)
    with pyro.plate("particles", 3, dim=-2):
        together = conditional(guide, "z", y, s=scales.unsqueeze(-1)).log_prob(torch.ones(3, 4))
    alone = [conditional(guide, "z", y, s=s).log_prob(torch.ones(4)) for s in scales]
    # Each has a grid of its own, as the points that Newton's method ends at differ.
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-3, atol=1e-3)


def test_draws_follow_the_density():
    y = COUNTS
    guide = called(effects(LIKELIHOODS["Poisson"][0]), y)
    draws = conditional(guide, "z", y, s=torch.tensor(1.5)).sample((20_000,))
    z = GRID.unsqueeze(-1).expand(-1, 4)
    weight = (dist.Normal(0.3, 1.5).log_prob(z) + dist.Poisson(z.exp()).log_prob(y)).softmax(0)
    mean = (weight * z).sum(0)
    spread = (weight * (z - mean) ** 2).sum(0).sqrt()
    assert ((draws.mean(0) - mean).abs() < 4 * spread / 20_000**0.5).all()
    assert ((draws.std(0) / spread - 1).abs() < 0.03).all()


def test_gradients_are_those_of_the_density():
    y, s = COUNTS, torch.tensor(1.2, requires_grad=True)
    guide, value = (
        called(effects(LIKELIHOODS["Poisson"][0]), y),
        torch.tensor([-1.0, 1.2, 0.0, 2.5]),
    )

    def log_prob(s):
        return conditional(guide, "z", y, s=s).log_prob(value).sum()

    (found,) = torch.autograd.grad(log_prob(s), s)
    z = GRID.unsqueeze(-1).expand(-1, 4)

    def exact(s):
        joint = [
            dist.Normal(0.3, s).log_prob(x) + dist.Poisson(x.exp()).log_prob(y) for x in (z, value)
        ]
        return (joint[1] - torch.logsumexp(joint[0], 0)).sum()

    (expected,) = torch.autograd.grad(exact(s), s)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_rows_that_a_mask_hides_keep_their_prior():
    def model(y):
        s = pyro.sample("s", dist.HalfNormal(torch.tensor(2.0)))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.tensor(0.0), s))
            with poutine.mask(mask=~y.isnan()):
                pyro.sample("y", dist.Poisson(z.exp()), obs=y)

    y = torch.tensor([3.0, torch.nan, 0.0])
    with pyro.validation_enabled(False):
        fn = conditional(called(model, y), "z", y, s=torch.tensor(1.0))
        value = torch.tensor([1.0, 0.7, -2.0])
        torch.testing.assert_close(
            fn.log_prob(value)[1], dist.Normal(0.0, 1.0).log_prob(value[1]), atol=1e-3, rtol=0
        )


def test_a_row_whose_slopes_are_no_numbers_keeps_its_prior():
    def model(exposure, y):
        s = pyro.sample("s", dist.HalfNormal(torch.tensor(2.0)))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(torch.tensor(0.3), s))
            pyro.sample("y", dist.Poisson(exposure * z.exp()), obs=y)

    guide = called(model, torch.ones(4), COUNTS)
    exposure, value = torch.tensor([1.0, torch.nan, 1.0, 1.0]), torch.tensor([1.0, 0.7, 0.0, 2.0])
    with pyro.validation_enabled(False):
        found = conditional(guide, "z", exposure, COUNTS, s=torch.tensor(1.0)).log_prob(value)
        usual = conditional(guide, "z", torch.ones(4), COUNTS, s=torch.tensor(1.0)).log_prob(value)
    torch.testing.assert_close(
        found[1], dist.Normal(0.3, 1.0).log_prob(value[1]), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(found[[0, 2, 3]], usual[[0, 2, 3]], rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    "likelihood",
    [
        lambda z: dist.StudentT(2.0, z, 0.1),
        lambda z: dist.Poisson(z.square()),
        lambda z: dist.Bernoulli(logits=5 * z.sin()),
        lambda z: dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)), dist.Normal(torch.stack([z, -z], -1), torch.ones(2))
        ),
    ],
    ids=["heavy tails", "square", "wave", "two modes"],
)
def test_what_is_not_concave_has_no_grid(likelihood):
    guide = called(effects(likelihood), torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert guide.rules["z"].rule in ("learned", "collapsed")


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.filterwarnings("ignore:The exact conditional")
def test_a_grid_that_leaves_out_where_the_mass_is_gives_draws_that_are_numbers(far):
    """As where a likelihood is flat from some number on, by a clamp, and the search begins there."""

    def model(loc, scale):
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Normal(loc, scale))
            y = torch.tensor([30, 45], dtype=torch.float32)
            pyro.sample("y", dist.Poisson(0.9 * z.clamp(max=8.0).exp()), obs=y)

    torch.set_default_dtype(torch.float32)  # in which slopes overflow
    near, away = torch.tensor([0.0, 0.7]), torch.tensor([12.2, 16.0])
    with torch.no_grad():
        guide = called(model, *near)
        assert guide.rules["z"].rule == "quadrature"
        trace = poutine.trace(guide).get_trace(*(away if far else near))
        trace.compute_log_prob()
    assert trace.nodes["z"]["value"].isfinite().all() and trace.log_prob_sum().isfinite()
