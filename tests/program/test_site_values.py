"""Values in a support: any, and one that differs from another."""

import pyro.distributions as dist
import pytest
import torch

from pyro_nami.program.site_values import any_value, redraw


@pytest.mark.parametrize("noise", [torch.randn, torch.zeros], ids=["drawn", "at zero"])
@pytest.mark.parametrize(
    "support",
    [dist.constraints.real, dist.constraints.positive, dist.constraints.interval(2, 3)],
    ids=str,
)
def test_what_cannot_be_drawn_has_a_value_in_its_support(support, noise):
    like = torch.zeros((), dtype=torch.float64)
    value = any_value(dist.ImproperUniform(support, (4,), ()), like, noise)
    assert value.shape == (4,) and value.dtype == torch.float64 and support.check(value).all()


def test_what_no_bijection_reaches_has_the_value_given():
    sphere, like = (
        dist.ImproperUniform(dist.constraints.sphere, (), (3,)),
        torch.tensor([1.0, 0.0, 0.0]),
    )
    assert any_value(sphere, like) is like and any_value(sphere) is None


@pytest.mark.parametrize(
    "fn",
    [
        dist.Normal(torch.zeros(50), 1.0),
        dist.Bernoulli(torch.full((50,), 1e-3)),
        dist.Categorical(torch.tensor([0.998, 1e-3, 1e-3])).expand([50]).to_event(1),
        dist.OneHotCategorical(torch.tensor([0.998, 1e-3, 1e-3])).expand([50]),
        dist.Poisson(torch.ones(50)),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_another_value_differs_in_every_element(fn):
    base = fn.sample()
    same = redraw(fn, base) == base
    assert not (same.all(-1) if base.dim() > 1 else same).any()


def test_what_can_be_nothing_else_stays():
    base = torch.zeros(5, dtype=torch.long)
    assert torch.equal(redraw(dist.Categorical(torch.ones(1)).expand([5]), base), base)


def test_a_value_has_the_dtype_of_the_bounds_of_its_support():
    bound = torch.tensor(-5.0, dtype=torch.float64)
    for support in (dist.constraints.greater_than(bound), dist.constraints.interval(bound, -bound)):
        for event in ((), (2,)):
            fn = dist.ImproperUniform(support, (3,), event)
            assert any_value(fn).dtype is torch.float64
