"""Densities of single elements against quadrature, torch's own types and finite differences."""

import functools
import math

import pyro.distributions as dist
import pytest
import torch
from models import minimize
from torch.nn.functional import softplus
from torch.special import ndtr

from pyro_nami.factors.elements import LogisticElements
from pyro_nami.factors.knots import NeuralSpline
from pyro_nami.factors.links import positive
from pyro_nami.factors.normals import MixtureElements, NormalElements, SinhArcsinh

DTYPE = torch.float64
FlowElements = functools.partial(NormalElements, bend=NeuralSpline)
SinhArcsinhElements = functools.partial(NormalElements, bend=SinhArcsinh)


def mixture_cdf(x, params, anchor):
    logits, location, raw = params.chunk(3, -1)
    loc, scale = (0.0, 1.0) if anchor is None else anchor[0]
    standard = (x[:, None] - loc - scale * location) / (scale * softplus(raw))
    return (logits.softmax(-1) * ndtr(standard)).sum(-1)


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_draw_moves_with_its_parameters_as_its_quantile_does(seed, anchored):
    """Finite differences: solve F(x'; p + h) = F(x; p) for x' by bisection."""
    torch.manual_seed(seed)
    params = torch.randn(1, 9, dtype=DTYPE).requires_grad_()
    anchor = torch.tensor([[1.5, 2.0]], dtype=DTYPE) if anchored else None
    x = MixtureElements(params, anchor).rsample()
    (gradient,) = torch.autograd.grad(x.sum(), params)
    step, signs = 1e-5, torch.tensor([[1.0], [-1.0]], dtype=DTYPE)
    moved = params.detach() + step * (signs[:, :, None] * torch.eye(9, dtype=DTYPE)).flatten(0, 1)
    level = mixture_cdf(x.detach(), params.detach(), anchor)
    low, high = torch.full((18,), -200.0, dtype=DTYPE), torch.full((18,), 200.0, dtype=DTYPE)
    for _ in range(100):
        middle = (low + high) / 2
        below = mixture_cdf(middle, moved, anchor) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    oracle = (low[:9] - low[9:]) / (2 * step)
    torch.testing.assert_close(gradient[0], oracle, rtol=1e-5, atol=1e-6)


def test_a_mixture_gives_the_gradient_of_an_expectation():
    """d/dp E[x^2] is known in closed form."""
    params = torch.tensor([[0.3, -0.2, -1.0, 2.0, 0.1, -0.5]], dtype=DTYPE, requires_grad=True)
    logits, location, raw = params.chunk(3, -1)
    oracle = torch.autograd.grad(
        (logits.softmax(-1) * (location**2 + softplus(raw) ** 2)).sum(), params
    )[0]
    draws = MixtureElements(params).rsample((40_000,))
    parts = [
        torch.autograd.grad((part**2).mean(), params, retain_graph=True)[0]
        for part in draws.chunk(40)
    ]
    parts = torch.stack(parts)
    error = parts.std(0) / math.sqrt(40)
    assert ((parts.mean(0) - oracle).abs() < 5 * error).all()


def test_a_mixture_gradient_is_finite_in_single_precision_tails():
    params = torch.tensor([[0.0, 0.0, -30.0, 30.0, -2.0, 1.0]], requires_grad=True)
    draws = MixtureElements(params).rsample((5000,))
    (gradient,) = torch.autograd.grad(draws.sum(), params)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("kind", "width"), [(FlowElements, 25), (SinhArcsinhElements, 4)])
def test_flexible_elements_at_zero_are_normal_and_bend_elsewhere(kind, width):
    x = torch.linspace(-20, 20, 101, dtype=DTYPE)[:, None]
    params = torch.zeros(1, width, dtype=DTYPE)
    params[0, :2] = torch.tensor([0.7, -0.4])
    oracle = NormalElements(params[:, :2]).log_prob(x)
    torch.testing.assert_close(kind(params).log_prob(x), oracle, rtol=1e-9, atol=1e-9)
    bent = kind(params + torch.randn_like(params)).log_prob(x)
    assert (bent - oracle).abs().max() > 0.1


def bent(left, right, dtype=DTYPE):
    """Returns sinh-arcsinh elements with these slopes (from 1/2 to 2), location 0.7 and scale 1.6."""
    tails = [8 * math.atanh(math.log2(slope)) for slope in (left, right)]
    raw = math.log(math.expm1(1.6))
    return SinhArcsinhElements(torch.tensor([[0.7, raw, *tails]], dtype=dtype))


@pytest.mark.parametrize("slope", [0.6, 1.0, 1.9])
def test_sinh_arcsinh_of_equal_tails_is_that_of_jones_and_pewsey(slope):
    """Theirs without skew, delta the reciprocal slope: delta cosh(delta u) phi(sinh(delta u)) / cosh u."""
    x = torch.linspace(-30, 30, 201, dtype=DTYPE)[:, None]
    u = ((x - 0.7) / 1.6).asinh()
    inner = (u / slope).sinh()
    oracle = (
        (u / slope).cosh().log()
        - math.log(slope)
        + dist.Normal(0.0, 1.0).log_prob(inner)
        - u.cosh().log()
    )
    torch.testing.assert_close(
        bent(slope, slope).log_prob(x), oracle - math.log(1.6), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("left,right", [(0.55, 1.9), (1.9, 0.55), (1.7, 1.2), (1.0, 1.0)])
def test_sinh_arcsinh_draws_have_its_density(left, right):
    """The histogram of draws against the integral of the density; and both ways to a density of a draw agree."""
    elements = bent(left, right)
    draws = elements.rsample((200_000,))
    kept = elements.log_prob(draws)
    torch.testing.assert_close(elements.log_prob(draws.clone()), kept, rtol=1e-7, atol=1e-7)
    line = torch.linspace(-80, 80, 400_001, dtype=DTYPE)
    mass = elements.log_prob(line[:, None]).exp().flatten() * (line[1] - line[0])
    torch.testing.assert_close(mass.sum().item(), 1.0, rtol=0, atol=1e-5)
    cumulative = mass.cumsum(0)
    for level in (0.01, 0.1, 0.5, 0.9, 0.99):
        quantile = line[(cumulative < level).sum()]
        share = (draws < quantile).double().mean().item()
        assert abs(share - level) < 4 * (level * (1 - level) / len(draws)) ** 0.5


def test_sinh_arcsinh_tails_fall_off_as_their_slopes_say():
    """Slope 2: an exponential tail, twice as far down at twice the distance. Slope 1: a Normal's, four times."""
    far = torch.tensor([[1e4], [2e4]], dtype=DTYPE)
    near_right, far_right = bent(1.0, 1.999).log_prob(far).flatten().tolist()
    near_left, far_left = bent(1.0, 1.999).log_prob(-far).flatten().tolist()
    assert far_right / near_right == pytest.approx(2, rel=0.02)
    assert far_left / near_left == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinh_arcsinh_is_finite_with_finite_gradients_everywhere(dtype):
    params = (
        torch.randn(200, 1, 4, dtype=dtype) * torch.tensor([1, 3, 50, 50], dtype=dtype)
    ).requires_grad_()
    for size in (0.0, 1.0, 1e10, 1e30):
        x = (torch.randn(200, 1, dtype=dtype) * size).requires_grad_()
        log_prob = SinhArcsinhElements(params).log_prob(x)
        gradients = torch.autograd.grad(log_prob.sum(), (params, x))
        assert all(part.isfinite().all() for part in (log_prob, *gradients)), size


def test_sinh_arcsinh_holds_the_skew_of_a_log_variance():
    """The logarithm of a Gamma variable (a variance's inverse, say), to a thousandth of a nat; a Normal is far off."""
    noise = dist.Normal(0.0, 1.0).icdf((torch.arange(1000, dtype=DTYPE) + 0.5) / 1000)[:, None]
    gaps = {}
    for kind, width in ((NormalElements, 2), (SinhArcsinhElements, 4)):
        params = torch.zeros(1, width, dtype=DTYPE, requires_grad=True)
        optimizer = torch.optim.LBFGS([params], max_iter=300, line_search_fn="strong_wolfe")

        def divergence(kind=kind, params=params):
            elements = kind(params)
            x = elements.at(noise)
            return (elements.log_prob(x) - (x - x.exp())).mean()

        minimize(optimizer, divergence)
        gaps[kind] = divergence().item()
    assert gaps[SinhArcsinhElements] < 1e-3 and gaps[NormalElements] > 0.05, gaps


@pytest.mark.parametrize(
    ("kind", "width"), [(NormalElements, 2), (MixtureElements, 6), (FlowElements, 25)]
)
def test_densities_integrate_to_one_under_large_parameters(kind, width):
    line = torch.linspace(-20, 20, 400_001, dtype=DTYPE)[:, None]
    for seed in range(3):
        torch.manual_seed(seed)
        elements = kind(torch.randn(1, width, dtype=DTYPE) * 2.0)
        x = (
            3 * line
            if kind is MixtureElements
            else elements.loc.mean() + elements.scale.max() * line
        )
        total = (elements.log_prob(x).exp() * (x[1] - x[0])).sum()
        torch.testing.assert_close(total.item(), 1.0, rtol=0, atol=2e-3)


def test_a_logistic_element_is_torchs_relaxed_bernoulli():
    logits, temperature = torch.tensor([0.7], dtype=DTYPE), torch.tensor(0.4, dtype=DTYPE)
    x = torch.linspace(-5, 5, 21, dtype=DTYPE)[:, None]
    oracle = torch.distributions.relaxed_bernoulli.LogitRelaxedBernoulli(temperature, logits=logits)
    torch.testing.assert_close(
        LogisticElements(logits, temperature).log_prob(x), oracle.log_prob(x)
    )
    far = LogisticElements(torch.tensor([800.0]), torch.tensor(0.1)).log_prob(
        torch.tensor([[-8e3], [8e3]])
    )
    assert far.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positive_is_finite_with_finite_gradient_everywhere(dtype):
    raw = torch.tensor([-1e3, -40.0, -1.0, 0.0, 3.0, 40.0, 1e3], dtype=dtype, requires_grad=True)
    value = positive(raw)
    (gradient,) = torch.autograd.grad(value.sum(), raw)
    for number in (value, value * value):
        assert (number > 0).all() and number.isfinite().all()
    assert gradient.isfinite().all()
