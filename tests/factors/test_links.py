"""Link functions: slopes on the very bounds at which parameters may start."""

import math

import pytest
import torch

from pyro_nami.factors.links import RANGE, positive, raw_scale, relative_scale, within


def slope(fn, value):
    value = torch.tensor(value, requires_grad=True)
    return torch.autograd.grad(fn(value).sum(), value)[0]


@pytest.mark.parametrize("bound", ["number", "tensor"])
def test_the_slope_is_one_within_and_on_bounds_and_zero_beyond(bound):
    low, high = (-1.0, 2.0) if bound == "number" else (torch.tensor(-1.0), torch.tensor([2.0]))
    value = torch.tensor([-2.0, -1.0, 0.0, 2.0, 3.0, math.nan])
    torch.testing.assert_close(within(value, low, high), value.clamp(-1.0, 2.0), equal_nan=True)
    assert slope(lambda x: within(x, low, high), value.tolist()[:5]).tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("extreme", [RANGE, -RANGE])
def test_what_starts_as_far_out_as_may_be_can_come_back(extreme):
    value = positive(torch.tensor(extreme))
    torch.testing.assert_close(slope(positive, extreme), value, rtol=1e-6, atol=0)


def test_a_scale_that_starts_at_its_least_can_grow():
    raw = raw_scale(torch.tensor(0.0))
    assert raw == -RANGE
    torch.testing.assert_close(slope(relative_scale, float(raw)), raw.sigmoid(), rtol=1e-6, atol=0)


def test_raw_scales_have_a_slope_where_their_two_forms_meet():
    # 1 / (1 - exp(-20)), in single precision
    torch.testing.assert_close(slope(raw_scale, [RANGE / 2]), torch.ones(1))
