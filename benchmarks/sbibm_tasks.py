"""Tasks of the simulation-based inference benchmark (Lueckmann et al. 2021) as Pyro models, for `sbibm.py`.

Each has a vector of latents, ``theta``, and data ``x``. Beside them the exact log densities of latents given data,
where these are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

SPREAD = 0.1**0.5  # of the linear tasks


class Crescent(dist.TorchDistribution):
    """A noisy half circle of radius 0.1 to the right of a place ``(*batch, 2)``."""

    arg_constraints: dict = {}
    support = dist.constraints.real_vector
    has_rsample = True

    def __init__(self, place: Tensor) -> None:
        self.place = place
        super().__init__(place.shape[:-1], place.shape[-1:], validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: Any = None) -> Crescent:
        return Crescent(self.place.expand(torch.Size(batch_shape) + self.event_shape))

    def rsample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))[:-1]
        angle = math.pi * (torch.rand(shape).to(self.place) - 0.5)
        radius = 0.1 + 0.01 * torch.randn(shape).to(self.place)
        return self.place + torch.stack([radius * angle.cos(), radius * angle.sin()], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        away = value - self.place
        radius = away.norm(dim=-1)
        found = dist.Normal(0.1, 0.01).log_prob(radius) - math.log(math.pi) - radius.log()
        return torch.where(away[..., 0] > 0, found, torch.full_like(found, -math.inf))


def two_moons() -> None:
    theta = pyro.sample("theta", dist.Uniform(-torch.ones(2), 1.0).to_event(1))
    a, b = theta.unbind(-1)
    pyro.sample("x", Crescent(torch.stack([0.25 - (a + b).abs() / 2**0.5, (b - a) / 2**0.5], -1)))


def gaussian_mixture() -> None:
    theta = pyro.sample("theta", dist.Uniform(-10 * torch.ones(2), 10.0).to_event(1))
    both = dist.Normal(theta.unsqueeze(-2), torch.tensor([[1.0], [0.1]])).to_event(1)
    pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), both))


def plane_scale(theta: Tensor) -> Tensor:
    """Cholesky factors ``(*batch, 2, 2)`` of the covariance in slcp by its last three latents."""
    first, second, correlation = (
        theta[..., 0].square(),
        theta[..., 1].square(),
        theta[..., 2].tanh(),
    )
    rest = (1 - correlation.square()).clamp(min=1e-12).sqrt()
    rows = [first + 1e-6, torch.zeros_like(first)], [correlation * second, second * rest + 1e-6]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def slcp() -> None:
    """Four points of a plane, their mean, scales and correlation by five numbers."""
    theta = pyro.sample("theta", dist.Uniform(-3 * torch.ones(5), 3.0).to_event(1))
    scale = plane_scale(theta[..., 2:])
    points = dist.MultivariateNormal(theta[..., None, :2], scale_tril=scale[..., None, :, :])
    pyro.sample("x", points.expand(theta.shape[:-1] + (4,)).to_event(1))


def gaussian_linear() -> None:
    theta = pyro.sample("theta", dist.Normal(torch.zeros(10), SPREAD).to_event(1))
    pyro.sample("x", dist.Normal(theta, SPREAD).to_event(1))


def gaussian_linear_uniform() -> None:
    theta = pyro.sample("theta", dist.Uniform(-torch.ones(10), 1.0).to_event(1))
    pyro.sample("x", dist.Normal(theta, SPREAD).to_event(1))


def stimulus() -> Tensor:
    """A constant, and the last nine values of white noise, at 100 bins, ``(100, 10)``."""
    noise = torch.randn(108, generator=torch.Generator().manual_seed(42), device="cpu").to(
        torch.get_default_device()
    )
    return torch.stack([torch.ones(100), *(noise[8 - i : 108 - i] for i in range(9))], -1)


def bernoulli_glm() -> None:
    """Spikes of a neuron in 100 bins by an offset and a smooth filter over the last nine values of a stimulus."""
    difference = torch.eye(9) - torch.ones(8).diag(-1)
    rough = difference @ difference + (torch.arange(9) / 9).sqrt().diag()
    precision = torch.block_diag(torch.tensor([[0.5]]), rough.T @ rough)
    theta = pyro.sample(
        "theta", dist.MultivariateNormal(torch.zeros(10), precision_matrix=precision)
    )
    pyro.sample("x", dist.Bernoulli(logits=theta @ stimulus().T).to_event(1))


def solved(
    rates: list[Tensor], effects: list[Tensor], start: list[float], step: float, every: int
) -> Tensor:
    """States ``(*batch, 10, 2)`` after each of ten times ``every`` Runge-Kutta steps from ``start``.

    States are logs of two numbers; the slope of each is its rate, plus the other number times its effect. Logs are held
    within 20, so that all draws of a prior end somewhere.
    """
    rate, effect = (torch.stack(torch.broadcast_tensors(*each)) for each in (rates, effects))

    def slope(state: Tensor) -> Tensor:
        return torch.addcmul(rate, effect, state.exp().flip(0))

    state, states = torch.tensor(start).reshape((2,) + (1,) * (rate.dim() - 1)), []
    for count in range(10 * every):
        a = slope(state)
        b = slope(torch.add(state, a, alpha=step / 2))
        c = slope(torch.add(state, b, alpha=step / 2))
        d = slope(torch.add(state, c, alpha=step))
        state = torch.add(state, a + d + 2 * (b + c), alpha=step / 6).clamp(-20.0, 20.0)
        if count % every == every - 1:
            states.append(state)
    return torch.stack(states).movedim((0, 1), (-2, -1))


def sir() -> None:
    """An epidemic of a million: contacts and recoveries a day, by 1,000 tests on each of ten days."""
    theta = pyro.sample(
        "theta",
        dist.LogNormal(torch.tensor([0.4, 0.125]).log(), torch.tensor([0.5, 0.2])).to_event(1),
    )
    contact, recovery = theta.unbind(-1)
    start = [0.0, -math.log(1e6)]  # shares that are susceptible and infected
    logs = solved([torch.zeros(()), -recovery], [-contact, contact], start, 2.0, 8)
    pyro.sample("x", dist.Binomial(1000, logs[..., 1].exp().clamp(1e-7, 1 - 1e-6)).to_event(1))


def lotka_volterra() -> None:
    """Prey and predators: growth, losses, and gains of both, by counts with errors of a tenth at ten times."""
    loc = torch.tensor([-0.125, -3.0, -0.125, -3.0])
    theta = pyro.sample("theta", dist.LogNormal(loc, 0.5).to_event(1))
    growth, eaten, loss, gain = theta.unbind(-1)
    logs = solved([growth, -loss], [-eaten, gain], [math.log(30.0), 0.0], 0.1, 20)
    pyro.sample("x", dist.LogNormal(logs, 0.1).to_event(2))


# ---- exact log densities of latents given data


def exact_moons(theta: Tensor, x: Tensor) -> Tensor:
    """Both signs of the sum are as likely; how much of the half circles is in the square 4,000 draws say."""
    a, b = theta.unbind(-1)
    place = torch.stack([0.25 - (a + b).abs() / 2**0.5, (b - a) / 2**0.5], -1)
    total, difference = ((x - Crescent(torch.zeros(2)).sample((4000, 1))) * 2**0.5).unbind(-1)
    total = 0.25 * 2**0.5 - total
    inside = (total > 0) & ((total - difference).abs() < 2) & ((total + difference).abs() < 2)
    share = inside.float().mean(0).clamp(min=1 / 8000)  # of a data set in which it is nearly none
    return Crescent(place).log_prob(x) - math.log(2) - share.log()


def exact_mixture(theta: Tensor, x: Tensor) -> Tensor:
    parts = [dist.Normal(x.double(), scale) for scale in (1.0, 0.1)]
    inside = [
        (part.cdf(torch.tensor(10.0)) - part.cdf(torch.tensor(-10.0))).log().sum(-1)
        for part in parts
    ]
    at = [part.log_prob(theta.double()).sum(-1) for part in parts]
    return torch.stack(at).logsumexp(0) - torch.stack(inside).logsumexp(0)


def exact_linear(theta: Tensor, x: Tensor) -> Tensor:
    return dist.Normal(x / 2, SPREAD / 2**0.5).log_prob(theta).sum(-1)


def exact_uniform(theta: Tensor, x: Tensor) -> Tensor:
    parts = dist.Normal(x.double(), SPREAD)
    inside = parts.cdf(torch.tensor(1.0)) - parts.cdf(torch.tensor(-1.0))
    return (parts.log_prob(theta.double()) - inside.log()).sum(-1)


# ---- exact draws


def draw_slcp(x: Tensor, num: int) -> Tensor:
    """Draws of the posterior ``(num, data sets, 5)``, without chains.

    Given the covariance the mean is Normal within its bounds. So the covariance is drawn without these, by importance
    sampling from its prior, and what has its mean outside is rejected.
    """
    found = []
    for points in x:
        kept, theta = [], 6 * torch.rand(2**23, 3) - 3
        center, scale = points.mean(0), plane_scale(theta)
        white = torch.linalg.solve_triangular(scale, (points - center).T, upper=False)
        log_weight = (
            -3 * scale.diagonal(dim1=-2, dim2=-1).log().sum(-1) - white.square().sum((-2, -1)) / 2
        )
        weight = log_weight.double().softmax(0)
        if weight.square().sum() * num > 1:
            raise ValueError(
                "Expected as many effective draws as are asked for; got fewer. Draw more of the prior."
            )
        while sum(map(len, kept)) < num:
            rows = torch.multinomial(weight, num, replacement=True)
            mean = center + (scale[rows] @ torch.randn(num, 2, 1)).squeeze(-1) / 2
            kept.append(torch.cat((mean, theta[rows]), -1)[mean.abs().amax(-1) < 3])
        found.append(torch.cat(kept)[:num])
    return torch.stack(found, 1)


class Task(NamedTuple):
    model: Callable
    exact: Callable[[Tensor, Tensor], Tensor] | None
    temperatures: int = 200  # of the references
    # what methods for black boxes are given of the data
    statistics: Callable[[Tensor], Tensor] = torch.clone
    # exact draws of the posterior, in place of the references
    draw: Callable[[Tensor, int], Tensor] | None = None


TASKS = {
    "two_moons": Task(two_moons, exact_moons),
    "gaussian_mixture": Task(gaussian_mixture, exact_mixture),
    "slcp": Task(slcp, None, draw=draw_slcp),
    "gaussian_linear": Task(gaussian_linear, exact_linear),
    "gaussian_linear_uniform": Task(gaussian_linear_uniform, exact_uniform),
    "bernoulli_glm": Task(bernoulli_glm, None, statistics=lambda x: x @ stimulus()),  # sufficient
    "sir": Task(sir, None, 40),
    "lotka_volterra": Task(lotka_volterra, None, 40, torch.log),
}
