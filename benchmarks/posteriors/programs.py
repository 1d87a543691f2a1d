"""The models of posteriordb's reference posteriors as Pyro programs, with plates, as a user would write them.

Priors that are flat in the source are made by ``flat``: `wide`, which gives `Uniform`s beyond all that data allow, or
`improper`, which gives `ImproperUniform`s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from torch import Tensor

__all__ = [
    "ark",
    "dogs",
    "eight_schools",
    "garch",
    "gaussian_process",
    "glmm_poisson",
    "hmm",
    "improper",
    "kilpisjarvi",
    "lotka_volterra",
    "mixture",
    "noise_scale",
    "radon_intercepts",
    "radon_slopes",
    "rats",
    "regression",
    "proper_regression",
    "seeds",
    "surgical",
    "wide",
]

Flat = Callable[..., Any]  # (bound, low) -> a flat prior of a number between low and bound
STEP = 0.1  # years of a Runge-Kutta step; populations are off by 1e-6 of themselves after 20 years


def wide(bound: float, low: float | None = None) -> dist.Distribution:
    """Returns a uniform prior that ends at ``bound``, and begins at ``low`` or at ``-bound``."""
    return dist.Uniform(-bound if low is None else low, bound)


def improper(bound: float, low: float | None = None) -> dist.Distribution:
    """Returns a flat prior on the real line, or on the positive half if ``low`` is given."""
    return dist.ImproperUniform(constraints.real if low is None else constraints.positive, (), ())


def regression(
    flat: Flat, x: Tensor, bound: float, half_cauchy: bool, y: Tensor | None = None
) -> None:
    """A linear regression; flat coefficients, and a scale that is flat or half-Cauchy."""
    beta = pyro.sample("beta", flat(bound).expand([x.shape[-1]]).to_event(1))
    sigma = noise_scale(flat, bound, half_cauchy)
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal((x * beta).sum(-1), sigma), obs=y)


def noise_scale(flat: Flat, bound: float, half_cauchy: bool) -> Tensor:
    """Samples the scale of a regression's noise."""
    prior = dist.HalfCauchy(2.5) if half_cauchy else flat(bound, 0.0)
    sigma: Tensor = pyro.sample("sigma", prior)
    return sigma


def proper_regression(x: Tensor, y: Tensor | None = None) -> None:
    """A linear regression under proper priors."""
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([x.shape[-1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(10.0))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal((x * beta).sum(-1), sigma), obs=y)


def kilpisjarvi(
    flat: Flat, x: Tensor, of_alpha: tuple, of_beta: tuple, y: Tensor | None = None
) -> None:
    """A linear trend in years that are not centred."""
    alpha = pyro.sample("alpha", dist.Normal(*of_alpha))
    beta = pyro.sample("beta", dist.Normal(*of_beta))
    sigma = pyro.sample("sigma", flat(1e3, 0.0))
    with pyro.plate("years", len(x)):
        pyro.sample("y", dist.Normal(alpha + beta * x, sigma), obs=y)


def eight_schools(errors: Tensor, y: Tensor | None = None) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(errors)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, errors), obs=y)


def radon_intercepts(county: Tensor, floor: Tensor, y: Tensor | None = None) -> None:
    """Intercepts that vary by county, and one slope for the floor."""
    mu_alpha = pyro.sample("mu_alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0))
    sigma_alpha = pyro.sample("sigma_alpha", dist.HalfNormal(1.0))
    sigma_y = pyro.sample("sigma_y", dist.HalfNormal(1.0))
    with pyro.plate("counties", int(county.max()) + 1):
        alpha = pyro.sample("alpha", dist.Normal(mu_alpha, sigma_alpha))
    with pyro.plate("houses", len(county)):
        pyro.sample("y", dist.Normal(alpha[..., county] + beta * floor, sigma_y), obs=y)


def radon_slopes(county: Tensor, floor: Tensor, y: Tensor | None = None) -> None:
    """Intercepts and slopes that vary by county."""
    mu_alpha = pyro.sample("mu_alpha", dist.Normal(0.0, 10.0))
    mu_beta = pyro.sample("mu_beta", dist.Normal(0.0, 10.0))
    sigma_alpha = pyro.sample("sigma_alpha", dist.HalfNormal(1.0))
    sigma_beta = pyro.sample("sigma_beta", dist.HalfNormal(1.0))
    sigma_y = pyro.sample("sigma_y", dist.HalfNormal(1.0))
    with pyro.plate("counties", int(county.max()) + 1):
        alpha = pyro.sample("alpha", dist.Normal(mu_alpha, sigma_alpha))
        beta = pyro.sample("beta", dist.Normal(mu_beta, sigma_beta))
    with pyro.plate("houses", len(county)):
        mean = alpha[..., county] + beta[..., county] * floor
        pyro.sample("y", dist.Normal(mean, sigma_y), obs=y)


def rats(flat: Flat, rat: Tensor, days: Tensor, y: Tensor | None = None) -> None:
    """Growth of rats: intercepts and slopes that vary by rat."""
    mu_alpha = pyro.sample("mu_alpha", dist.Normal(0.0, 100.0))
    mu_beta = pyro.sample("mu_beta", dist.Normal(0.0, 100.0))
    sigma_y = pyro.sample("sigma_y", flat(1e3, 0.0))
    sigma_alpha = pyro.sample("sigma_alpha", flat(1e3, 0.0))
    sigma_beta = pyro.sample("sigma_beta", flat(1e3, 0.0))
    with pyro.plate("rats", int(rat.max()) + 1):
        alpha = pyro.sample("alpha", dist.Normal(mu_alpha, sigma_alpha))
        beta = pyro.sample("beta", dist.Normal(mu_beta, sigma_beta))
    with pyro.plate("weighings", len(rat)):
        mean = alpha[..., rat] + beta[..., rat] * days
        pyro.sample("y", dist.Normal(mean, sigma_y), obs=y)


def seeds(total: Tensor, x1: Tensor, x2: Tensor, y: Tensor | None = None) -> None:
    """Germination on plates: a binomial regression with an effect of each plate."""
    alpha0, alpha1, alpha2, alpha12 = (
        pyro.sample(name, dist.Normal(0.0, 1.0))
        for name in ("alpha0", "alpha1", "alpha2", "alpha12")
    )
    sigma = pyro.sample("sigma", dist.HalfCauchy(1.0))
    with pyro.plate("plates", len(total)):
        b = pyro.sample("b", dist.Normal(0.0, sigma))
        logits = alpha0 + alpha1 * x1 + alpha2 * x2 + alpha12 * x1 * x2 + b
        pyro.sample("y", dist.Binomial(total, logits=logits), obs=y)


def surgical(operations: Tensor, y: Tensor | None = None) -> None:
    """Deaths in hospitals."""
    mu = pyro.sample("mu", dist.Normal(0.0, 1000.0))
    sigmasq = pyro.sample("sigmasq", dist.InverseGamma(0.001, 0.001))
    with pyro.plate("hospitals", len(operations)):
        b = pyro.sample("b", dist.Normal(mu, sigmasq.sqrt()))
        pyro.sample("y", dist.Binomial(operations, logits=b), obs=y)


def glmm_poisson(year: Tensor, y: Tensor | None = None) -> None:
    """Counts over years: a cubic trend and an effect of each year."""
    alpha = pyro.sample("alpha", dist.Uniform(-20.0, 20.0))
    beta1, beta2, beta3 = (
        pyro.sample(name, dist.Uniform(-10.0, 10.0)) for name in ("beta1", "beta2", "beta3")
    )
    sigma = pyro.sample("sigma", dist.Uniform(0.0, 5.0))
    with pyro.plate("years", len(year)):
        eps = pyro.sample("eps", dist.Normal(0.0, sigma))
        log_rate = alpha + beta1 * year + beta2 * year**2 + beta3 * year**3 + eps
        pyro.sample("y", dist.Poisson(log_rate.exp()), obs=y)


def dogs(avoided: Tensor, shocked: Tensor, y: Tensor | None = None) -> None:
    """Shocks of dogs by the trials before, avoided and not."""
    beta = pyro.sample("beta", dist.Normal(0.0, 100.0).expand([3]).to_event(1))
    intercept, slope, other = beta.unbind(-1)
    with (
        pyro.plate("dogs", avoided.shape[0], dim=-2),
        pyro.plate("trials", avoided.shape[1], dim=-1),
    ):
        logits = intercept + slope * avoided + other * shocked
        pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def ark(lags: Tensor, y: Tensor | None = None) -> None:
    """An autoregression, given the first values; ``lags`` are the values before each, ``(T, K)``."""
    alpha = pyro.sample("alpha", dist.Normal(0.0, 10.0))
    beta = pyro.sample("beta", dist.Normal(0.0, 10.0).expand([lags.shape[-1]]).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfCauchy(2.5))
    with pyro.plate("times", len(lags)):
        pyro.sample("y", dist.Normal(alpha + (lags * beta).sum(-1), sigma), obs=y)


def garch(flat: Flat, series: Tensor, first_scale: float, y: Tensor | None = None) -> None:
    """Volatility that depends on the latest value and volatility; ``series`` are the values before each."""
    mu = pyro.sample("mu", flat(1e2))
    alpha0 = pyro.sample("alpha0", flat(1e2, 0.0))
    # flat on the triangle where both coefficients and the rest are positive
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    alpha1 = pyro.deterministic("alpha1", weights[..., 0])
    beta1 = pyro.deterministic("beta1", weights[..., 1])
    scales = [torch.full((1,), first_scale)]
    for value in series:
        variance = alpha0 + alpha1 * (value - mu) ** 2 + beta1 * scales[-1] ** 2
        scales.append(variance.sqrt())
    with pyro.plate("times", len(scales)):
        batch = variance.shape[:-1]
        scale = torch.cat([each.expand(*batch, 1) for each in scales], -1)
        pyro.sample("y", dist.Normal(mu, scale), obs=y)


def gaussian_process(x: Tensor, y: Tensor | None = None) -> None:
    rho = pyro.sample("rho", dist.Gamma(25.0, 4.0))[..., None, None]
    alpha = pyro.sample("alpha", dist.HalfNormal(2.0))[..., None, None]
    noise = pyro.sample("sigma", dist.HalfNormal(1.0))[..., None, None]
    distance = (x - x[:, None]) / rho
    cov = alpha**2 * (-0.5 * distance**2).exp() + noise * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), cov), obs=y)


def mixture(y: Tensor) -> None:
    """Two Normals, in the order of their means."""
    mu = pyro.sample("mu", dist.ImproperUniform(constraints.ordered_vector, (), (2,)))
    pyro.factor("prior_of_mu", dist.Normal(0.0, 2.0).log_prob(mu).sum(-1))
    sigma = pyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = pyro.sample("theta", dist.Beta(5.0, 5.0))
    weights = dist.Categorical(torch.stack([theta, 1 - theta], -1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), obs=y)


def hmm(y: Tensor) -> None:
    """A hidden Markov model of two states, with Normals at known scales."""
    theta1 = pyro.sample("theta1", dist.Dirichlet(torch.ones(2)))
    theta2 = pyro.sample("theta2", dist.Dirichlet(torch.ones(2)))
    mu = pyro.sample("mu", dist.Normal(torch.tensor([3.0, 10.0]), 1.0).to_event(1))
    rows = torch.stack([theta1, theta2], -2).log().unsqueeze(-3)
    # a transition leads to the first value as well, of which the state is uniform
    first = torch.full((1, 2, 2), 0.5).log().expand(rows.shape)
    transitions = torch.cat([first, *[rows] * (len(y) - 1)], -3)
    observation = dist.Normal(mu.unsqueeze(-2), 1.0)
    pyro.sample("y", dist.DiscreteHMM(torch.zeros(2), transitions, observation), obs=y)


def lotka_volterra(years: Tensor, y: Tensor | None = None) -> None:
    """Hares and lynxes by a differential equation; ``y`` holds the first year too."""
    of_rates = (1.0, 0.5), (0.05, 0.05), (1.0, 0.5), (0.05, 0.05)
    theta = [_positive_normal(f"theta{i}", *numbers) for i, numbers in enumerate(of_rates, 1)]
    initial = pyro.sample("z_init", dist.LogNormal(torch.full((2,), 10.0).log(), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(-torch.ones(2), 1.0).to_event(1))
    paths = _solved([each.unsqueeze(-1) for each in theta], initial, len(years))
    with pyro.plate("years", len(years) + 1):
        pyro.sample("y", dist.LogNormal(paths.log(), sigma).to_event(1), obs=y)


def _positive_normal(name: str, loc: float, scale: float) -> Tensor:
    """Samples a Normal that is cut off at zero."""
    value = pyro.sample(name, dist.ImproperUniform(constraints.positive, (), ()))
    pyro.factor(f"prior_of_{name}", dist.Normal(loc, scale).log_prob(value))
    return value


def _solved(theta: list[Tensor], initial: Tensor, steps: int) -> Tensor:
    """Returns both populations at the first time and after each year, ``(years + 1, 2)``."""
    grow, eaten, die, fed = theta

    def slope(z: Tensor) -> Tensor:
        hare, lynx = z.split(1, -1)
        return torch.cat([(grow - eaten * lynx) * hare, (fed * hare - die) * lynx], -1)

    z = initial + torch.zeros(1, 2)
    found, h = [z], STEP
    for _ in range(steps):
        for _ in range(round(1 / h)):
            one = slope(z)
            two = slope(z + h / 2 * one)
            three = slope(z + h / 2 * two)
            z = z + h / 6 * (one + 2 * two + 2 * three + slope(z + h * three))
        found.append(z)
    return torch.cat([each.expand(z.shape) for each in found], -2)
