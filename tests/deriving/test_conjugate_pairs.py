"""Every textbook conjugate pair: the guide's conditional is the textbook's posterior, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_nami import AutoNaMIGuide
from pyro_nami.factors.truncated_normal import TruncatedNormal

pytestmark = pytest.mark.usefixtures("double", "own_parameters")


class Pair(NamedTuple):
    """A prior, a likelihood, and the posterior that a book gives for it.

    Attributes:
        prior: a hyperparameter, 2 where nothing draws it -> the prior.
        likelihood: the latent -> that of each row.
        rows: (seed, size) -> rows of data, some of them extreme.
        posterior: hyperparameter, rows ``(n, *batch)``, how much each counts -> the posterior.
    """

    prior: Callable[[Any], Any]
    likelihood: Callable[[Tensor], Any]
    rows: Callable[[torch.Generator, tuple], Tensor]
    posterior: Callable[[Tensor, Tensor, Tensor], Any]
    event: int = 0  # dims of the latent


def counts(generator, shape):
    return torch.poisson(torch.full(shape, 3.0), generator)


def positive(generator, shape):
    return torch.randn(shape, generator=generator).exp()


def real(generator, shape):
    return torch.randn(shape, generator=generator)


def binary(generator, shape):
    return (torch.rand(shape, generator=generator) < 0.4).double()


def upto(most):
    return lambda generator, shape: torch.randint(0, most + 1, shape, generator=generator).double()


def multinomial(generator, shape):
    chosen = torch.randint(0, 3, (*shape, 4), generator=generator)
    return torch.nn.functional.one_hot(chosen, 3).sum(-2).double()


def total(x, w):
    return (x * w).sum(0)


def number(y, w):
    return w.sum(0)


def normal(h, y, w, noise, spread=2.0):
    precision = spread**-2 + number(y, w) / noise**2
    return (h / spread**2 + total(y, w) / noise**2) / precision, precision.rsqrt()


def dirichlet(h):
    return dist.Dirichlet(torch.stack([h, torch.ones_like(h), 0.5 * torch.ones_like(h)], -1))


def more(h, extra):
    return dist.Dirichlet(dirichlet(h).concentration + extra)


def cut(slope, precision, low, high):
    precision = precision.clamp(min=1e-10)  # where there are no rows
    return TruncatedNormal(
        slope / precision, precision.rsqrt(), torch.as_tensor(low), torch.as_tensor(high)
    )


one_hot = torch.nn.functional.one_hot
two = torch.tensor(2.0, dtype=torch.float64)
PAIRS = {
    "Gamma-Poisson": Pair(
        lambda h: dist.Gamma(h, 3.0),
        dist.Poisson,
        counts,
        lambda h, y, w: dist.Gamma(h + total(y, w), 3 + number(y, w)),
    ),
    "Gamma-Poisson with exposure": Pair(
        lambda h: dist.Gamma(h, 3.0),
        lambda z: dist.Poisson(0.3 * z),
        counts,
        lambda h, y, w: dist.Gamma(h + total(y, w), 3 + 0.3 * number(y, w)),
    ),
    "Gamma-Exponential": Pair(
        lambda h: dist.Gamma(2.0, h),
        dist.Exponential,
        positive,
        lambda h, y, w: dist.Gamma(2 + number(y, w), h + total(y, w)),
    ),
    "Gamma-Gamma rate": Pair(
        lambda h: dist.Gamma(h, 3.0),
        lambda z: dist.Gamma(1.5, z),
        positive,
        lambda h, y, w: dist.Gamma(h + 1.5 * number(y, w), 3 + total(y, w)),
    ),
    "Gamma-Normal precision": Pair(
        lambda h: dist.Gamma(h, 3.0),
        lambda z: dist.Normal(0.4, z.rsqrt()),
        real,
        lambda h, y, w: dist.Gamma(h + number(y, w) / 2, 3 + total((y - 0.4) ** 2, w) / 2),
    ),
    "Gamma-LogNormal precision": Pair(
        lambda h: dist.Gamma(h, 3.0),
        lambda z: dist.LogNormal(0.4, z.rsqrt()),
        positive,
        lambda h, y, w: dist.Gamma(h + number(y, w) / 2, 3 + total((y.log() - 0.4) ** 2, w) / 2),
    ),
    "Gamma-InverseGamma rate": Pair(
        lambda h: dist.Gamma(h, 3.0),
        lambda z: dist.InverseGamma(2.5, z),
        positive,
        lambda h, y, w: dist.Gamma(h + 2.5 * number(y, w), 3 + total(1 / y, w)),
    ),
    "Gamma-Weibull": Pair(
        lambda h: dist.Gamma(h, 3.0),
        lambda z: dist.Weibull(z ** (-1 / 1.5), 1.5),
        positive,
        lambda h, y, w: dist.Gamma(h + number(y, w), 3 + total(y**1.5, w)),
    ),
    "Gamma-Pareto shape": Pair(
        lambda h: dist.Gamma(h, 3.0),
        lambda z: dist.Pareto(torch.tensor(0.5), z),
        lambda generator, shape: 0.5 + positive(generator, shape),
        lambda h, y, w: dist.Gamma(h + number(y, w), 3 + total((y / 0.5).log(), w)),
    ),
    "Exponential-Poisson": Pair(
        dist.Exponential,
        dist.Poisson,
        counts,
        lambda h, y, w: dist.Gamma(1 + total(y, w), h + number(y, w)),
    ),
    "Chi2-Poisson": Pair(
        dist.Chi2,
        dist.Poisson,
        counts,
        lambda h, y, w: dist.Gamma(h / 2 + total(y, w), 0.5 + number(y, w)),
    ),
    "InverseGamma-Normal variance": Pair(
        lambda h: dist.InverseGamma(h, 3.0),
        lambda z: dist.Normal(0.4, z.sqrt()),
        real,
        lambda h, y, w: dist.InverseGamma(h + number(y, w) / 2, 3 + total((y - 0.4) ** 2, w) / 2),
    ),
    "InverseGamma-Exponential mean": Pair(
        lambda h: dist.InverseGamma(h, 3.0),
        lambda z: dist.Exponential(1 / z),
        positive,
        lambda h, y, w: dist.InverseGamma(h + number(y, w), 3 + total(y, w)),
    ),
    "Beta-Bernoulli": Pair(
        lambda h: dist.Beta(h, 3.0),
        dist.Bernoulli,
        binary,
        lambda h, y, w: dist.Beta(h + total(y, w), 3 + total(1 - y, w)),
    ),
    "Beta-Bernoulli of the other side": Pair(
        lambda h: dist.Beta(h, 3.0),
        lambda z: dist.Bernoulli(1 - z),
        binary,
        lambda h, y, w: dist.Beta(h + total(1 - y, w), 3 + total(y, w)),
    ),
    "Beta-Bernoulli by logits": Pair(
        lambda h: dist.Beta(h, 3.0),
        lambda z: dist.Bernoulli(logits=z.logit()),
        binary,
        lambda h, y, w: dist.Beta(h + total(y, w), 3 + total(1 - y, w)),
    ),
    "Beta-Binomial": Pair(
        lambda h: dist.Beta(h, 3.0),
        lambda z: dist.Binomial(9, z),
        upto(9),
        lambda h, y, w: dist.Beta(h + total(y, w), 3 + total(9 - y, w)),
    ),
    "Beta-Geometric": Pair(
        lambda h: dist.Beta(h, 3.0),
        dist.Geometric,
        counts,
        lambda h, y, w: dist.Beta(h + number(y, w), 3 + total(y, w)),
    ),
    "Beta-NegativeBinomial": Pair(
        lambda h: dist.Beta(h, 3.0),
        lambda z: dist.NegativeBinomial(5.0, probs=z),
        counts,
        lambda h, y, w: dist.Beta(h + total(y, w), 3 + 5 * number(y, w)),
    ),
    "Uniform-Bernoulli": Pair(
        lambda h: dist.Uniform(torch.zeros(()), torch.ones(())),
        dist.Bernoulli,
        binary,
        lambda h, y, w: dist.Beta(1 + total(y, w), 1 + total(1 - y, w)),
    ),
    "Dirichlet-Categorical": Pair(
        dirichlet,
        dist.Categorical,
        lambda generator, shape: torch.randint(0, 3, shape, generator=generator),
        lambda h, y, w: more(h, total(one_hot(y, 3), w.unsqueeze(-1))),
        event=1,
    ),
    "Dirichlet-OneHotCategorical": Pair(
        dirichlet,
        dist.OneHotCategorical,
        lambda generator, shape: one_hot(
            torch.randint(0, 3, shape, generator=generator), 3
        ).double(),
        lambda h, y, w: more(h, total(y, w.unsqueeze(-1))),
        event=1,
    ),
    "Dirichlet-Multinomial": Pair(
        dirichlet,
        lambda z: dist.Multinomial(4, z),
        multinomial,
        lambda h, y, w: more(h, total(y, w.unsqueeze(-1))),
        event=1,
    ),
    "LogNormal-LogNormal": Pair(
        lambda h: dist.LogNormal(h, 2.0),
        lambda z: dist.LogNormal(z.log(), 1.5),
        positive,
        lambda h, y, w: dist.LogNormal(*normal(h, y.log(), w, 1.5)),
    ),
    "LogNormal-Normal of its log": Pair(
        lambda h: dist.LogNormal(h, 2.0),
        lambda z: dist.Normal(3 * z.log() - 1, 1.5),
        real,
        lambda h, y, w: dist.LogNormal(*normal(h, (y + 1) / 3, w, 0.5)),
    ),
    "Normal-Normal": Pair(
        lambda h: dist.Normal(h, 2.0),
        lambda z: dist.Normal(z, 1.5),
        real,
        lambda h, y, w: dist.Normal(*normal(h, y, w, 1.5)),
    ),
    "Normal-LogNormal": Pair(
        lambda h: dist.Normal(h, 2.0),
        lambda z: dist.LogNormal(z, 1.5),
        positive,
        lambda h, y, w: dist.Normal(*normal(h, y.log(), w, 1.5)),
    ),
    "Uniform-Normal": Pair(
        lambda h: dist.Uniform(-h, 1.5 * h),
        lambda z: dist.Normal(1 - 2 * z, 1.5),
        real,
        lambda h, y, w: cut(total((1 - y) / 2, w) / 0.75**2, number(y, w) / 0.75**2, -h, 1.5 * h),
    ),
    "HalfNormal-Normal": Pair(
        dist.HalfNormal,
        lambda z: dist.Normal(z, 1.5),
        real,
        lambda h, y, w: cut(total(y, w) / 1.5**2, h**-2 + number(y, w) / 1.5**2, 0, torch.inf),
    ),
    "Exponential-Normal": Pair(
        dist.Exponential,
        lambda z: dist.Normal(-z, 1.5),
        real,
        lambda h, y, w: cut(-h - total(y, w) / 1.5**2, number(y, w) / 1.5**2, 0, torch.inf),
    ),
}
GROUP = torch.tensor([3, 0, 0, 1, 4, 4, 4, 1, 2, 3])  # of ten rows, in five groups
OF_ALL_PAIRS = pytest.mark.parametrize("pair", list(PAIRS.values()), ids=list(PAIRS))


def data(pair: Pair, seed: int, *shape: int) -> Tensor:
    return pair.rows(torch.Generator().manual_seed(seed), shape)


def rows(pair: Pair, y: Tensor, mask: Any = True, weight: float = 1.0) -> None:
    """One latent of all rows."""
    z = pyro.sample("z", pair.prior(two))
    with pyro.plate("rows", len(y)), poutine.scale(scale=weight), poutine.mask(mask=mask):
        pyro.sample("y", pair.likelihood(z), obs=y)


def grouped(pair: Pair, y: Tensor, mask: Any = True) -> None:
    """A latent a group, with a row of groups below each other; what they share is drawn before."""
    h = pyro.sample("h", dist.Weibull(torch.tensor(2.0), 3.0))
    with pyro.plate("groups", y.shape[1], dim=-1):
        z = pyro.sample("z", pair.prior(h))
        with pyro.plate("rows", y.shape[0], dim=-2), poutine.mask(mask=mask):
            pyro.sample("y", pair.likelihood(z), obs=y)


def indexed(pair: Pair, group: Tensor, y: Tensor) -> None:
    """A latent a group, that each row reads through its index."""
    h = pyro.sample("h", dist.Weibull(torch.tensor(2.0), 3.0))
    with pyro.plate("groups", 5):
        z = pyro.sample("z", pair.prior(h))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", pair.likelihood(z[..., group, :] if pair.event else z[..., group]), obs=y)


def made(model: Callable, *args: Any) -> AutoNaMIGuide:
    guide = AutoNaMIGuide(model)
    guide(*args)
    assert guide.conjugate == ("z",)
    return guide


def drawn(guide: Any, *args: Any) -> tuple[Any, Tensor, Tensor]:
    """Returns z's distribution in a run of a guide, its value, and that of the hyperparameter."""
    nodes = poutine.trace(guide).get_trace(*args).nodes
    return (
        nodes["z"]["fn"],
        nodes["z"]["value"].detach(),
        nodes["h"]["value"].detach() if "h" in nodes else two,
    )


def assert_is(found: Any, expected: Any, z: Tensor) -> None:
    torch.testing.assert_close(
        found.log_prob(z).detach(), expected.log_prob(z), rtol=1e-8, atol=1e-8
    )


@OF_ALL_PAIRS
def test_the_posterior_is_the_textbooks_at_any_data(pair):
    guide = made(lambda y: rows(pair, y), data(pair, 0, 4))
    for seed, size in ((0, 4), (1, 4), (2, 9), (3, 1)):
        y = data(pair, seed, size)
        fn, z, h = drawn(guide, y)
        expected = pair.posterior(h, y, torch.ones(size))
        assert_is(fn, expected, z)
        with torch.no_grad():
            assert_is(drawn(guide, y)[0], expected, z)
            torch.testing.assert_close(
                guide.log_prob({"z": z}, y), expected.log_prob(z), rtol=1e-8, atol=1e-8
            )


@OF_ALL_PAIRS
def test_rows_count_as_far_as_their_mask_and_scale_say(pair):
    mask, y = torch.tensor([True, False, False, True]), data(pair, 0, 4)
    guide = made(lambda y: rows(pair, y, mask, 0.3), y)
    for seed in range(2):
        fn, z, h = drawn(guide, data(pair, seed, 4))
        assert_is(fn, pair.posterior(h, data(pair, seed, 4), 0.3 * mask), z)


@OF_ALL_PAIRS
def test_instances_have_their_own_posterior(pair):
    mask = torch.arange(15).reshape(3, 5) % 4 > 0
    guide = made(lambda y, mask: grouped(pair, y, mask), data(pair, 0, 3, 5), mask)
    for seed, groups, seen in (
        (0, 5, mask),
        (1, 5, ~mask),
        (2, 2, torch.ones(3, 2, dtype=torch.bool)),
    ):
        y = data(pair, seed, 3, groups)
        fn, z, h = drawn(guide, y, seen)
        assert_is(fn, pair.posterior(h.expand(groups), y, seen.double()), z)


@OF_ALL_PAIRS
def test_instances_that_are_read_through_an_index(pair):
    guide = made(lambda group, y: indexed(pair, group, y), GROUP, data(pair, 0, 10))
    for seed, group in ((0, GROUP), (1, GROUP), (2, GROUP.flip(0)), (3, GROUP[:7])):
        y = data(pair, seed, len(group))
        fn, z, h = drawn(guide, group, y)
        assert_is(fn, pair.posterior(h.expand(5), y.unsqueeze(1), one_hot(group, 5).double()), z)


@OF_ALL_PAIRS
def test_particles_have_their_own_posterior(pair):
    y = data(pair, 0, 3, 5)
    guide = made(lambda y: grouped(pair, y), y)
    with pyro.plate("particles", 4, dim=-3):
        fn, z, h = drawn(guide, y)
    assert h.shape == (4, 1, 1) and z.shape[:3] == (4, 1, 5)
    assert_is(fn, pair.posterior(h.expand(4, 1, 5), y[:, None, None], torch.ones(3, 1, 1, 5)), z)
    guide = made(lambda y: rows(pair, y), y[:, 0])
    with pyro.plate("particles", 4, dim=-2):
        fn, z, h = drawn(guide, y[:, 0])
    assert z.shape[:2] == (4, 1)
    assert_is(fn, pair.posterior(h, y[:, 0], torch.ones(3)), z)


@OF_ALL_PAIRS
def test_gradients_reach_what_was_drawn_before(pair):
    if pair is PAIRS["Uniform-Bernoulli"]:
        pytest.skip("its prior has no hyperparameter")
    y = data(pair, 0, 3, 5)
    guide = made(lambda y: grouped(pair, y), y)
    _, z, h = drawn(guide, y)
    given = {"z": z, "h": h.requires_grad_()}
    fn = poutine.trace(poutine.condition(guide, given)).get_trace(y).nodes["z"]["fn"]
    expected = pair.posterior(h.expand(5), y, torch.ones(3, 5))
    for log_prob in (fn.log_prob(z).sum(), guide.log_prob(given, y) - _of_h(guide, h, y)):
        (found,) = torch.autograd.grad(log_prob, h)
        (exact,) = torch.autograd.grad(expected.log_prob(z).sum(), h, retain_graph=True)
        torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-8)


def _of_h(guide: AutoNaMIGuide, h: Tensor, y: Tensor) -> Tensor:
    nodes = poutine.trace(poutine.condition(guide, {"h": h})).get_trace(y).nodes
    return nodes["h"]["fn"].log_prob(h)
