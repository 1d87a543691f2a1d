"""Bounds on a child's log density: true everywhere, equal where they touch, tightest where they say; a user's own."""

import math
import sys

import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import minimize_scalar
from scripts import ROOT

import pyro_nami
from pyro_nami import Bound, register_bound
from pyro_nami.factors import bounds
from pyro_nami.factors.bounds import JaakkolaJordan, bound_for

sys.path.append(str(ROOT / "examples" / "noisy_or"))

from noisy_or_distribution import NoisyOr, NoisyOrDual  # noqa: E402

EPS = torch.finfo(torch.float64).eps


class PoissonTangent(Bound):
    """A user's own: -exp(s) is concave, so below its tangent at s = log xi."""

    side = "upper"

    def leaf_predictor(self, leaf):
        return leaf.rate.log()

    def coefficients(self, value, xi):
        return -xi * (1 - xi.log()) - torch.lgamma(value + 1), value - xi, 0.0

    def tightest(self, value, mean, square):
        return mean.exp()


def noisy_or(s):
    """One effect for each number, of which the leak is the rate."""
    return NoisyOr(s.new_zeros(1, 1), s.unsqueeze(-1), s.new_zeros(1))


def exact(name, s, value):
    """The log density in nats, by formulas of its own."""
    if name == "noisy-or":
        return torch.where(
            value == 1, torch.where(s < 0.5, (-(-s).expm1()).log(), (-(-s).exp()).log1p()), -s
        )
    if name == "bernoulli":
        return -torch.logaddexp(torch.zeros(()), torch.where(value == 1, -s, s))
    return value * s - s.exp() - torch.lgamma(value + 1)


# name -> (bound, predictors, values)
SYMMETRIC = torch.cat(
    [torch.logspace(-12, 2.8, 60), -torch.logspace(-12, 2.8, 60), torch.zeros(1)]
).double()
CASES = {
    "noisy-or": (NoisyOrDual(), torch.logspace(-12, 3, 121, dtype=torch.float64), [0.0, 1.0]),
    "bernoulli": (JaakkolaJordan(), SYMMETRIC, [0.0, 1.0]),
    "poisson": (
        PoissonTangent(),
        torch.linspace(-20, 5, 101, dtype=torch.float64),
        [0.0, 1.0, 7.0],
    ),
}
cases = pytest.mark.parametrize(
    ("name", "value"), [(name, torch.tensor(x)) for name, case in CASES.items() for x in case[2]]
)


def elements(bound, s, value, xi):
    """The bound, and the size of its terms, which says what rounding leaves of it."""
    constant, linear, quadratic = bound.coefficients(value, xi)
    terms = [torch.as_tensor(constant), linear * s, quadratic * s.square()]
    return sum(terms), 1 + sum(term.abs() for term in terms)


@cases
def test_a_bound_is_one_at_every_xi(double, name, value):
    bound, s, _ = CASES[name]
    xi = torch.cat([torch.zeros(int(name != "poisson")), torch.logspace(-20, 15, 141)])
    found, size = elements(bound, s, value, xi.unsqueeze(-1))
    excess = (found - exact(name, s, value)) * {"upper": 1, "lower": -1}[bound.side]
    assert excess.shape == (len(xi), len(s)) and (excess >= -64 * EPS * size).all()
    # It is no bound of the other side, so that the sign is tested.
    assert (excess > 1e-3).any() or (name == "noisy-or" and value == 0)


@cases
def test_a_bound_is_equal_where_it_is_tightest(double, name, value):
    bound, s, _ = CASES[name]
    found, size = elements(bound, s, value, bound.tightest(value, s, s.square()))
    assert ((found - exact(name, s, value)).abs() <= 64 * EPS * size).all()


@cases
def test_minimization_finds_the_tightest_xi(double, name, value):
    """At predictors with a spread, where the bound touches nowhere: of the expected gap, by a scalar minimizer."""
    if name == "noisy-or" and value == 0:
        return
    bound, sign = CASES[name][0], {"upper": 1, "lower": -1}[CASES[name][0].side]
    for mean, variance in [(0.3, 0.02), (1.5, 0.4), (4.0, 1.0)]:
        mean, square = torch.tensor(mean), torch.tensor(mean**2 + variance)

        def expected(log_xi, mean=mean, square=square):
            constant, linear, quadratic = bound.coefficients(value, torch.tensor(log_xi).exp())
            return sign * float(constant + linear * mean + quadratic * square)

        best = minimize_scalar(
            expected, bounds=(-10, 10), method="bounded", options={"xatol": 1e-9}
        )
        # A minimum is known to the square root of the precision of values.
        assert math.log(bound.tightest(value, mean, square)) == pytest.approx(best.x, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["noisy-or", "bernoulli"])
@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(1.0)])
def test_coefficients_and_gradients_are_finite_at_any_size(name, value, dtype):
    bound = CASES[name][0]
    s = torch.logspace(-30, 2, 65, dtype=dtype).requires_grad_()
    xi = torch.cat([torch.zeros(1), torch.logspace(-30, 15, 65)]).to(dtype).requires_grad_()
    for parameter in (xi, bound.tightest(value.to(dtype), s, s.square())):
        total = sum(
            torch.as_tensor(term).sum() for term in bound.coefficients(value.to(dtype), parameter)
        )
        assert total.isfinite() and total.dtype == dtype
        if parameter is xi and total.requires_grad:
            assert torch.autograd.grad(total, xi)[0].isfinite().all()
    if name != "noisy-or" or value == 1:
        assert torch.autograd.grad(total, s)[0].isfinite().all()


@pytest.mark.parametrize("xi", [1e-6, 5e-3, 0.00999, 0.01001, 0.5, 30.0])
def test_the_slope_of_lambda_is_its_derivative(double, xi):
    xi = torch.tensor(xi).requires_grad_()
    quadratic = JaakkolaJordan().coefficients(torch.tensor(1.0), xi)[2]
    # d/dx tanh(x / 2) / (4 x), by its own series near zero.
    x = xi.item()
    expected = (
        (0.5 / math.cosh(x / 2) ** 2 - math.tanh(x / 2) / x) / (4 * x)
        if x > 0.1
        else -x / 48 + x**3 / 240
    )
    assert torch.autograd.grad(quadratic, xi)[0].item() == pytest.approx(-expected, rel=1e-8)


def test_the_slope_of_the_dual_is_where_it_touches(double):
    psi = torch.logspace(-300, 15, 64).requires_grad_()
    constant = NoisyOrDual().coefficients(torch.tensor(1.0), psi)[0]
    # g'(psi) is the s with f'(s) = psi: log(1 + 1 / psi).
    touched = [math.log1p(1 / x) for x in psi.tolist()]
    assert torch.autograd.grad(-constant.sum(), psi)[0].tolist() == pytest.approx(
        touched, rel=1e-6, abs=1e-14
    )


def test_a_users_bound_is_found_after_one_registration(monkeypatch, double):
    monkeypatch.setattr(bounds, "_BOUNDS", dict(bounds._BOUNDS))
    fn = dist.Poisson(torch.tensor([0.5, 3.0])).to_event(1)
    assert bound_for(fn) is None
    register_bound(torch.distributions.Poisson, PoissonTangent())
    bound, x = bound_for(fn), torch.tensor([2.0, 1.0])
    torch.testing.assert_close(bound.log_bound(fn, x, torch.tensor([0.5, 3.0])), fn.log_prob(x))
    assert bound.log_bound(fn, x, torch.tensor([1.0, 3.0])) > fn.log_prob(x) + 0.1


def test_bounds_look_below_wrappers(double):
    logits = torch.randn(3, 1, 2)
    leaf = dist.Bernoulli(logits=logits)
    mask = torch.tensor([[True], [False], [True]])
    inner = torch.tensor([True, False])
    wrapped = {
        "plain": leaf,
        "event": leaf.to_event(1),
        "all": leaf.to_event(3),
        "expanded": dist.torch_distribution.ExpandedDistribution(
            leaf.to_event(1), torch.Size([5, 3, 4])
        ),
        "masked": leaf.to_event(1).mask(mask),
        "mask-inside": leaf.mask(inner).to_event(1),
        "off": leaf.to_event(1).mask(False),
        "mask-expanded": leaf.to_event(1).mask(mask).expand([5, 3, 4]),
        "deep": leaf.mask(inner).to_event(1).mask(mask).expand([3, 4]).to_event(1),
    }
    for name, fn in wrapped.items():
        bound, x = bound_for(fn), fn.sample()
        assert type(bound) is JaakkolaJordan, name
        s = bound.predictor(fn)
        assert s.shape == fn.batch_shape + fn.event_shape, name
        # At xi = |s| the bound is the density, masks included.
        found = bound.log_bound(fn, x, s.abs())
        torch.testing.assert_close(found, fn.log_prob(x).expand(fn.batch_shape), msg=name)
    fn = noisy_or(torch.rand(3)).mask(torch.tensor([True, False, True]))
    assert type(bound_for(fn)) is NoisyOrDual and bound_for(dist.Normal(0.0, 1.0)) is None


def test_bayes_rule_with_the_dual_gives_independent_causes(double):
    """Yan et al. 2019, equation 13: by enumeration of all causes under the bound."""
    weights, leak, psi = torch.rand(5, 3), torch.rand(5), torch.rand(5)
    x, prior = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]), torch.tensor([0.2, 0.5, 0.3])
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    log_joint = NoisyOrDual().log_bound(NoisyOr(weights, leak, states), x, psi)
    log_joint = log_joint + dist.Bernoulli(prior).log_prob(states).sum(-1)
    logits = (torch.where(x == 1, psi, -1.0).unsqueeze(-1) * weights).sum(0) + prior.logit()
    torch.testing.assert_close(
        log_joint.log_softmax(0), dist.Bernoulli(logits=logits).log_prob(states).sum(-1)
    )


def test_bad_registrations():
    with pytest.raises(TypeError, match="Expected a type of distribution"):
        register_bound(dist.Poisson(1.0), PoissonTangent())
    with pytest.raises(TypeError, match="give an instance"):
        register_bound(dist.Poisson, PoissonTangent)
    sideless = type("Sideless", (PoissonTangent,), {"side": "above"})()
    with pytest.raises(ValueError, match='"lower" or "upper"; got \'above\''):
        register_bound(dist.Poisson, sideless)
    assert {"Bound", "register_bound"} <= set(pyro_nami.__all__)
