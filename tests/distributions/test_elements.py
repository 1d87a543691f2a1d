"""Densities of single elements against quadrature, torch's own types and finite differences."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch.nn.functional import softplus
from torch.special import ndtr

from pyro_nami.distributions.elements import (
    ExpRelaxedElements,
    FlowElements,
    LogisticElements,
    MixtureElements,
    NormalElements,
    positive,
    raw_positive,
)

DTYPE = torch.float64
ONE = torch.Size((1,))


def mixture_cdf(x, params, anchor):
    logits, location, raw = params.chunk(3, -1)
    prior_loc, prior_scale = (0.0, 1.0) if anchor is None else anchor.unbind(-1)
    return (logits.softmax(-1) * ndtr((x - prior_loc - prior_scale * location) / (prior_scale * softplus(raw)))).sum(-1)


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_draw_moves_with_its_parameters_as_its_quantile_does(seed, anchored):
    """Finite differences: solve F(x'; p + h) = F(x; p) for x' by bisection."""
    torch.manual_seed(seed)
    params = torch.randn(1, 9, dtype=DTYPE).requires_grad_()
    anchor = torch.tensor([[1.5, 2.0]], dtype=DTYPE) if anchored else None
    x = MixtureElements(params, anchor).draw(ONE)
    (gradient,) = torch.autograd.grad(x.sum(), params)
    level = mixture_cdf(x.detach(), params.detach()[0], None if anchor is None else anchor[0])
    step = 1e-5
    for index in range(9):
        solved = []
        for sign in (1, -1):
            moved = params.detach()[0].clone()
            moved[index] += sign * step
            low, high = torch.tensor(-200.0, dtype=DTYPE), torch.tensor(200.0, dtype=DTYPE)
            for _ in range(100):
                middle = (low + high) / 2
                below = mixture_cdf(middle, moved, None if anchor is None else anchor[0]) < level
                low, high = (middle, high) if below else (low, middle)
            solved.append(low)
        oracle = (solved[0] - solved[1]) / (2 * step)
        torch.testing.assert_close(gradient[0, index], oracle, rtol=1e-5, atol=1e-6)


def test_a_mixture_gives_the_gradient_of_an_expectation():
    """d/dp E[x^2] is known in closed form."""
    torch.manual_seed(0)
    params = torch.tensor([[0.3, -0.2, -1.0, 2.0, 0.1, -0.5]], dtype=DTYPE, requires_grad=True)
    logits, location, raw = params.chunk(3, -1)
    oracle = torch.autograd.grad((logits.softmax(-1) * (location**2 + softplus(raw) ** 2)).sum(), params)[0]
    draws = MixtureElements(params).draw(torch.Size((40_000, 1)))
    parts = [torch.autograd.grad((part**2).mean(), params, retain_graph=True)[0] for part in draws.chunk(40)]
    parts = torch.stack(parts)
    error = parts.std(0) / math.sqrt(40)
    assert ((parts.mean(0) - oracle).abs() < 5 * error).all()


def test_a_mixture_gradient_is_finite_in_single_precision_tails():
    params = torch.tensor([[0.0, 0.0, -30.0, 30.0, -2.0, 1.0]], requires_grad=True)
    draws = MixtureElements(params).draw(torch.Size((5000, 1)))
    (gradient,) = torch.autograd.grad(draws.sum(), params)
    assert gradient.isfinite().all()


def test_a_flow_at_zero_is_its_normal_and_bends_elsewhere():
    pytest.importorskip("zuko")
    torch.manual_seed(0)
    x = torch.linspace(-20, 20, 101, dtype=DTYPE)[:, None]
    params = torch.zeros(1, 25, dtype=DTYPE)
    params[0, :2] = torch.tensor([0.7, -0.4])
    oracle = NormalElements(params[:, :2]).log_prob(x)
    torch.testing.assert_close(FlowElements(params).log_prob(x), oracle, rtol=1e-9, atol=1e-9)
    bent = FlowElements(params + torch.randn_like(params)).log_prob(x)
    assert (bent - oracle).abs().max() > 0.1


@pytest.mark.parametrize("kind", [NormalElements, MixtureElements, FlowElements])
def test_densities_integrate_to_one_under_large_parameters(kind):
    width = {NormalElements: 2, MixtureElements: 6, FlowElements: 25}[kind]
    line = torch.linspace(-20, 20, 400_001, dtype=DTYPE)[:, None]
    for seed in range(3):
        torch.manual_seed(seed)
        params = torch.randn(1, width, dtype=DTYPE) * 2.0
        elements = kind(params)
        center, spread = elements.loc.mean(), elements.scale.max()
        x = center + spread * line + 0.0 if kind is not MixtureElements else 3 * line
        total = (elements.log_prob(x).exp() * (x[1] - x[0])).sum()
        torch.testing.assert_close(total.item(), 1.0, rtol=0, atol=2e-3)


def test_a_logistic_element_is_torchs_relaxed_bernoulli():
    logits, temperature = torch.tensor([0.7], dtype=DTYPE), torch.tensor(0.4, dtype=DTYPE)
    x = torch.linspace(-5, 5, 21, dtype=DTYPE)[:, None]
    oracle = torch.distributions.relaxed_bernoulli.LogitRelaxedBernoulli(temperature, logits=logits)
    torch.testing.assert_close(LogisticElements(logits, temperature).log_prob(x), oracle.log_prob(x))
    far = LogisticElements(torch.tensor([800.0]), torch.tensor(0.1)).log_prob(torch.tensor([[-8e3], [8e3]]))
    assert far.isfinite().all()


def test_a_relaxed_one_hot_element_is_torchs():
    logits, temperature = torch.tensor([[0.7, -0.2, 0.1]], dtype=DTYPE), torch.tensor(0.4, dtype=DTYPE)
    oracle = dist.RelaxedOneHotCategorical(temperature, logits=logits)
    value = oracle.sample((20,))
    torch.testing.assert_close(ExpRelaxedElements(logits, temperature).log_prob(value.log()), oracle.log_prob(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positive_is_finite_with_finite_gradient_everywhere_and_has_an_inverse(dtype):
    raw = torch.tensor([-1e3, -40.0, -1.0, 0.0, 3.0, 40.0, 1e3], dtype=dtype, requires_grad=True)
    value = positive(raw)
    (gradient,) = torch.autograd.grad(value.sum(), raw)
    for number in (value, value * value):
        assert (number > 0).all() and number.isfinite().all()
    assert gradient.isfinite().all()
    torch.testing.assert_close(raw_positive(value)[1:-1], raw.detach()[1:-1])
