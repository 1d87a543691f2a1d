"""Mixtures of Normal vectors: their density, by plain Normals; which modes searches have found, and how many not."""

import math

import pytest
import torch
from models import slopes_of
from torch.distributions import MultivariateNormal

from pyro_nami.deriving.ascent import Ascent
from pyro_nami.deriving.bent_vector import unbent
from pyro_nami.deriving.vector_mixture import adapted_mixture, modes_of, shares_of
from pyro_nami.factors.joint_normal import JointNormal, MixedNormals

SHARES = torch.tensor([0.2, 0.8], dtype=torch.float64)


def vectors():
    """Two Normal vectors of six numbers."""
    torch.manual_seed(0)
    lower = torch.randn(2, 6, 6, dtype=torch.float64).tril() + 3 * torch.eye(6)
    return torch.randn(2, 6, dtype=torch.float64), lower


def mixed(lead=()):
    loc, lower = vectors()
    parts = [
        JointNormal(x.expand(*lead, 6), root, torch.Size([3, 2]), 1) for x, root in zip(loc, lower)
    ]
    return MixedNormals(SHARES.log(), parts)


def test_the_density_of_all_instances_is_that_of_the_vector():
    loc, lower = vectors()
    fn, x = mixed((5,)), torch.randn(5, 3, 2, dtype=torch.float64)
    assert fn.batch_shape == (5, 3) and fn.event_shape == (2,)
    flat = x.reshape(5, 6)
    each = [
        MultivariateNormal(m, precision_matrix=root.T @ root).log_prob(flat)
        for m, root in zip(loc, lower)
    ]
    expected = (torch.stack(each) + SHARES.log()[:, None]).logsumexp(0)
    torch.testing.assert_close(fn.log_prob(x).sum(-1), expected)


def test_draws_are_of_the_parts_by_their_shares():
    loc, lower = vectors()
    draws = mixed().sample((50_000,)).reshape(-1, 6)
    mean = SHARES @ loc
    covariances = (
        torch.linalg.inv(lower.mT @ lower) + (loc - mean)[:, :, None] * (loc - mean)[:, None]
    )
    covariance = (SHARES[:, None, None] * covariances).sum(0)
    sd = covariance.diagonal().sqrt()
    assert ((draws.mean(0) - mean) / sd).abs().max() < 0.02
    assert ((draws.T.cov() - covariance) / sd / sd[:, None]).abs().max() < 0.03


def two_modes(x):
    """Normals of one deviation about 0 and 8, with a third of the mass at 8."""
    far = math.log(0.5) - (x - 8.0).square().sum(-1) / 2
    return torch.logaddexp(-x.square().sum(-1) / 2, far)


def ends(places):
    """Searches that have ended at places."""
    place = torch.tensor(places, dtype=torch.float64)[:, None]
    unit = torch.ones(len(place), 1, 1, dtype=torch.float64)
    return Ascent(place, two_modes(place), torch.zeros_like(place), unit)


@pytest.mark.parametrize(
    ("places", "modes", "unseen"),
    [
        ([0.0, 0.0, 8.0, 8.0], [0.0, 8.0], 0.0),
        ([0.0, 0.01, 0.0, 8.0], [0.0, 8.0], 0.25),  # one search of four has found a mode alone
        ([0.0, 8.0], [0.0, 8.0], 1.0),
        ([0.0], [0.0], 0.0),
    ],
)
def test_modes_that_one_search_alone_has_found_tell_of_others(places, modes, unseen):
    found = modes_of(two_modes, slopes_of(two_modes), ends(places))
    assert [float(each.center) for each in found.vectors] == modes
    assert found.unseen == unseen
    if len(modes) > 1:
        assert found.lower == pytest.approx([0.0, math.log(2.0)], abs=1e-3)


def test_masses_about_modes_do_not_trust_what_searches_estimate():
    """The estimate of the second search is 20 times as wide as its mode, which would be 3 nats of mass."""
    found = ends([0.0, 8.0])
    inverse = found.inverse * torch.tensor([1.0, 400.0])[:, None, None]
    found = modes_of(two_modes, slopes_of(two_modes), found._replace(inverse=inverse))
    assert found.lower == pytest.approx([0.0, math.log(2.0)], abs=0.02)
    assert [float(each.root) for each in found.vectors] == pytest.approx([1.0, 1.0], abs=0.02)


def test_modes_without_mass_do_not_count():
    def low(x):
        return torch.logaddexp(-x.square().sum(-1) / 2, -20 - (x - 8.0).square().sum(-1) / 2)

    place = torch.tensor([[0.0], [0.0], [8.0]], dtype=torch.float64)
    unit = torch.ones(3, 1, 1, dtype=torch.float64)
    found = modes_of(low, slopes_of(low), Ascent(place, low(place), torch.zeros_like(place), unit))
    assert [float(each.center) for each in found.vectors] == [0.0] and found.unseen == 0.0


def test_a_mixture_covers_a_tail_that_its_first_part_lacks():
    """A bent ridge, at which a Normal has weights without bound; the evidence is that of a grid."""

    def ridge(x):
        a, b = x.unbind(-1)
        return -a.square() / 2 - (b - a.square()).square() / 0.5

    first = unbent(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    parts, log_shares = adapted_mixture(ridge, [first])
    assert len(parts) > 2
    count = torch.distributions.Multinomial(40_000, logits=log_shares).sample().long().tolist()
    normal = torch.randn(40_000, 2, dtype=torch.float64).split(count)
    points = torch.cat([part.at(each)[0] for part, each in zip(parts, normal)])
    log_q = torch.stack([part.log_prob(points) for part in parts])
    weights = (ridge(points) - (log_shares[:, None] + log_q).logsumexp(0)).exp()
    evidence = math.sqrt(2 * math.pi) * math.sqrt(0.5 * math.pi)
    assert float(weights.mean()) == pytest.approx(evidence, rel=0.03)
    effective = float(weights.sum().square() / weights.square().sum()) / 40_000
    alone = (ridge(x := torch.randn(40_000, 2, dtype=torch.float64)) - first.log_prob(x)).exp()
    assert effective > 0.4 > float(alone.sum().square() / alone.square().sum()) / 40_000
    assert shares_of(ridge, [first]).tolist() == [0.0]
