"""Loops as distributions: against a dense Normal, and against the sum over all states."""

import itertools

import pyro.distributions as dist
import pytest
import torch

from pyro_nami.factors.markov_categorical import MarkovCategorical
from pyro_nami.factors.markov_normal import MarkovNormal


def normal(n, m, size, batch=()):
    torch.manual_seed(0)
    loc, along = torch.randn(*batch, n, m), 0.5 * torch.randn(*batch, n, m, m)
    lower = torch.randn(*batch, n, m, m).tril(-1) + torch.rand(*batch, n, m).add(0.5).diag_embed()
    return MarkovNormal(loc.double(), along.double(), lower.double(), size)


def dense(fn):
    """Returns the same distribution with a dense covariance."""
    n, m = fn.loc.shape[-2:]
    maps = torch.zeros(n * m, n * m, dtype=torch.float64)  # from noise to offsets
    for t in range(n):
        own, before = slice(t * m, (t + 1) * m), slice((t - 1) * m, t * m)
        maps[own, own] = fn.lower[t]
        if t:
            maps[own] += fn.along[t] @ maps[before]
    cov = (maps @ maps.mT)[: fn.size, : fn.size]
    return dist.MultivariateNormal(fn.loc.flatten()[: fn.size], cov)


@pytest.mark.parametrize(
    ("n", "m", "size"), [(1, 1, 1), (5, 1, 5), (3, 2, 6), (3, 2, 5), (2, 3, 4)]
)
def test_normal_density(n, m, size):
    fn = normal(n, m, size)
    value = torch.randn(7, size, dtype=torch.float64)
    torch.testing.assert_close(fn.log_prob(value), dense(fn).log_prob(value))
    wide = fn.expand((7,))
    torch.testing.assert_close(wide.log_prob(value), dense(fn).log_prob(value))
    assert wide.rsample((3,)).shape == (3, 7, size)


def test_normal_draws():
    fn = normal(3, 2, 5)
    draws = fn.rsample((100_000,))
    whole = dense(fn)
    torch.testing.assert_close(draws.mean(0), whole.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(draws.T.cov(), whole.covariance_matrix, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("events", [[()] * 6, [(2,)] * 3, [(), (), (2,), (), ()], [()] * 5])
def test_normal_in_sequence(events):
    sizes = [torch.Size(event) for event in events]
    fn = normal(3, 2, sum(each.numel() for each in sizes), batch=(4,))
    in_turn, values, total = fn.in_sequence(), [], 0.0
    for event in sizes:
        own = in_turn.next(event)
        value = own.sample()
        total = total + own.log_prob(value)
        in_turn.take(value)
        values.append(value.reshape(4, -1))
    torch.testing.assert_close(total, fn.log_prob(torch.cat(values, -1)))


@pytest.fixture
def states():
    torch.manual_seed(0)
    first, logits = torch.randn(2, 3), torch.randn(2, 4, 3, 3).log_softmax(-1)
    return MarkovCategorical(first, logits, torch.arange(3), lambda p: dist.Categorical(logits=p))


def test_probabilities_of_states_sum_to_one(states):
    every = torch.tensor(list(itertools.product(range(3), repeat=5)))
    total = states.log_prob(every[:, None]).logsumexp(0)
    torch.testing.assert_close(total, torch.zeros(2), rtol=0, atol=1e-5)


def test_states_in_sequence(states):
    value = states.rsample((6,))
    in_turn, total = states.in_sequence(), 0.0
    for each in value.unbind(-1):
        total = total + in_turn.next().log_prob(each)
        in_turn.take(each)
    torch.testing.assert_close(total, states.log_prob(value))
    frequency = (states.rsample((20_000,))[..., 0, None] == torch.arange(3)).double().mean(0)
    torch.testing.assert_close(frequency, states.first.exp().double(), rtol=0, atol=0.02)
