"""Maps through knots: their inverses and slopes, and zuko's splines of the same parameters."""

import pytest
import torch

from pyro_nami.factors.knots import KnotTransform, NeuralSpline


def test_a_map_through_knots_is_its_own_inverse_and_knows_its_slope():
    knots = torch.linspace(-3, 3, 9)
    bend = KnotTransform(torch.stack([knots, knots.sinh(), knots.cosh()]))
    x = torch.linspace(-5, 5, 100, requires_grad=True)
    y = bend(x)
    assert (y.diff() > 0).all()
    torch.testing.assert_close(
        KnotTransform(torch.stack([knots, knots.sinh(), knots.cosh()])).inv(y), x
    )
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(bend.log_abs_det_jacobian(x, y), slope.log())
    assert ((y - x.sinh()).abs()[x.abs() < 3] < 0.05).all()


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_splines_are_those_of_zuko(scale):
    transforms = pytest.importorskip("zuko.transforms")
    params = scale * torch.randn(500, 23, dtype=torch.double)
    x = 3 * torch.randn(500, dtype=torch.double)
    ours, zuko = (
        NeuralSpline(params),
        transforms.MonotonicRQSTransform(*params.split([8, 8, 7], -1)),
    )
    torch.testing.assert_close(ours.bend(x), zuko.call_and_ladj(x))
    noise, log_slope = ours.straighten(x)
    torch.testing.assert_close(noise, zuko.inv(x))
    torch.testing.assert_close(log_slope, zuko.log_abs_det_jacobian(noise, x))


@pytest.mark.parametrize("way", ["bend", "straighten"])
@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_splines(way, shared):
    params = torch.randn(1 if shared else 4, 5, dtype=torch.double, requires_grad=True)
    # beyond the knots, and between
    x = torch.tensor([-7.0, -2.0, 1.0, 6.0], dtype=torch.double, requires_grad=True)

    def mapped(params, x):
        return getattr(NeuralSpline(params), way)(x)

    assert torch.autograd.gradcheck(mapped, (params, x))
    assert torch.autograd.gradgradcheck(mapped, (params, x))


def test_splines_start_at_the_identity():
    x = torch.linspace(-8, 8, 50)
    for y, log_slope in (
        NeuralSpline(torch.zeros(50, 14)).bend(x),
        NeuralSpline(torch.zeros(50, 14)).straighten(x),
    ):
        torch.testing.assert_close(y, x)
        torch.testing.assert_close(log_slope, torch.zeros(50), atol=1e-6, rtol=0)


@pytest.mark.parametrize("way", ["bend", "straighten"])
def test_slopes_at_knots_count_once(way):
    x = torch.tensor([-5.0, 0.0, 5.0], requires_grad=True)
    (slope,) = torch.autograd.grad(getattr(NeuralSpline(torch.zeros(3, 23)), way)(x)[0].sum(), x)
    torch.testing.assert_close(slope, torch.ones(3))


@pytest.mark.parametrize(("axis", "way"), [(0, "bend"), (1, "straighten")])
def test_a_knot_has_the_gradients_of_the_piece_that_starts_there(axis, way):
    knots = torch.linspace(-3, 3, 9, dtype=torch.double)
    knots = torch.stack([knots, knots.sinh(), knots.cosh()]).requires_grad_()

    def slopes(places):
        places = places.detach().requires_grad_()
        _, log_slope = getattr(KnotTransform(knots), way)(places)
        return torch.autograd.grad(log_slope.sum(), (places, knots))

    inner = knots[axis, 1:-1]
    for on, beside in zip(slopes(inner), slopes(inner + 1e-9)):
        torch.testing.assert_close(on, beside, atol=1e-6, rtol=1e-6)
