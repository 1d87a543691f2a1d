"""Sites whose elements are jointly Normal: against torch's multivariate normal."""

import pytest
import torch
from torch.distributions import MultivariateNormal, constraints

from pyro_nami.factors.distribution import SiteDistribution
from pyro_nami.factors.layout import UnconstrainedLayout
from pyro_nami.factors.normals import Coupling, LinearMap, NormalElements


def factor(batch: tuple[int, ...], dims=(), sizes=(), elements: int = 3):
    torch.manual_seed(0)
    params = torch.randn(*batch, elements, 2, dtype=torch.double, requires_grad=True)
    count = elements
    for size in sizes:
        count *= size
    coupling = torch.randn(count, count, dtype=torch.double).tril(-1)
    layout = UnconstrainedLayout(constraints.real_vector, torch.Size([elements]))
    elements = NormalElements(params, coupling=Coupling(LinearMap(coupling), dims, sizes))
    return SiteDistribution(elements, layout), coupling


def test_the_density_is_that_of_a_multivariate_normal():
    fn, coupling = factor((4,))
    root = fn._elements.scale.unsqueeze(-1) * (torch.eye(3) + coupling)
    x = torch.randn(4, 3, dtype=torch.double)
    torch.testing.assert_close(
        fn.log_prob(x), MultivariateNormal(fn._elements.loc, scale_tril=root).log_prob(x)
    )


@pytest.mark.parametrize(
    ("batch", "dims", "sizes"),
    [((2,), (-1,), (2,)), ((5, 2), (-1,), (2,)), ((2, 3), (-2, -1), (2, 3))],
)
def test_instances_of_plates_are_coupled_and_their_densities_add_up(batch, dims, sizes):
    fn, coupling = factor(batch, dims, sizes)
    whole = len(coupling)

    def in_a_row(x):
        # the last plate slowest
        return x.movedim(0, 1).reshape(-1, whole) if len(dims) > 1 else x.reshape(-1, whole)

    loc, scale = in_a_row(fn._elements.loc), in_a_row(fn._elements.scale)
    root = scale.unsqueeze(-1) * (torch.eye(whole) + coupling)
    x = torch.randn(*batch, 3, dtype=torch.double)
    total = fn.log_prob(x).reshape(len(loc), -1).sum(-1)
    torch.testing.assert_close(
        total, MultivariateNormal(loc, scale_tril=root).log_prob(in_a_row(x))
    )


def test_a_draw_is_scored_as_any_value():
    fn, _ = factor((4,))
    x = fn.rsample()
    torch.testing.assert_close(fn.log_prob(x), fn.log_prob(x.detach().clone()))
    assert fn.rsample((7,)).shape == (7, 4, 3)
    assert fn.expand((6, 4)).rsample().shape == (6, 4, 3)


def test_the_score_of_a_draw_made_without_gradients_has_them():
    fn, _ = factor((4,))
    with torch.no_grad():
        x = fn.sample()
    (direct,) = torch.autograd.grad(
        fn.log_prob(x.clone()).sum(), fn._elements.loc, retain_graph=True
    )
    (kept,) = torch.autograd.grad(fn.log_prob(x).sum(), fn._elements.loc)
    torch.testing.assert_close(kept, direct)
