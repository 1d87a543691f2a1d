"""Models that look conjugate, or Gaussian, and are not; and some that are, in spite of their looks.

What is taken for exact has no parameters to mend it, so each of the first must be refused. The oracle knows nothing of
forms: given the latents that are not exact, log p - log q must be the same at all values of those that are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions.transforms as transforms
from pyro import poutine
from pyro.infer.autoguide import init_to_value
from pyro.ops.indexing import Vindex

from pyro_nami import AutoNaMIGuide

pytestmark = pytest.mark.usefixtures("double", "own_parameters")


class Case(NamedTuple):
    """A model, what it is called with first, and later."""

    model: Callable
    args: tuple = ()
    others: tuple = ()
    options: dict = {}


def double(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


Y, COUNTS, BITS = double(0.3, -1.2, 2.0, 0.7), double(3, 0, 5, 2), double(1, 0, 1, 1)
CLASSES = torch.tensor([0, 2, 2, 1])


def of(prior: Any, likelihood: Callable, y: Any = Y, *others: Any) -> Case:
    """One latent z of a prior, and rows of data; ``others`` are data of later calls."""

    def model(y):
        z = pyro.sample(
            "z", prior() if callable(prior) and not isinstance(prior, dist.Distribution) else prior
        )
        with pyro.plate("rows", len(y)):
            pyro.sample("y", likelihood(z), obs=y)

    return Case(model, (y,), tuple((other,) for other in others))


def normal(loc: float = 0.0, scale: float = 1.0) -> Callable:
    return lambda: dist.Normal(torch.tensor(loc), torch.tensor(scale))


def gamma(a: float = 2.0, b: float = 1.0) -> Callable:
    return lambda: dist.Gamma(torch.tensor(a), torch.tensor(b))


def beta(a: float = 2.0, b: float = 2.0) -> Callable:
    return lambda: dist.Beta(torch.tensor(a), torch.tensor(b))


def simplex() -> Any:
    return dist.Dirichlet(torch.ones(3))


def improper() -> Any:
    return dist.ImproperUniform(dist.constraints.real, (), ())


def flat_vector(bound: float) -> Callable:
    return lambda: dist.Uniform(-bound * torch.ones(2), bound).to_event(1)


def log_normal() -> Any:
    return dist.LogNormal(torch.zeros(()), 1.0)


def unit(size: int) -> Callable:
    return lambda: dist.Normal(torch.zeros(size), 1.0).to_event(1)


def mean(function: Callable) -> Callable:
    """A likelihood that is Normal around a function of the latent."""
    return lambda z: dist.Normal(function(z), 1.0)


def spiked(narrow: float) -> Callable:
    """A likelihood that is Normal but for what is near the data."""
    return lambda z: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)),
        dist.Normal(z.unsqueeze(-1), torch.tensor([1.0, narrow]).to(z)),
    )


def shifted(noise: Any) -> Callable:
    return lambda z: dist.TransformedDistribution(noise, [transforms.AffineTransform(z, 1.0)])


class Huber(dist.TorchDistribution):
    """Quadratic near its location, linear beyond."""

    arg_constraints: dict = {}
    support = dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def expand(self, batch_shape, _instance=None):
        return Huber(self.loc.expand(batch_shape))

    def sample(self, sample_shape=torch.Size()):
        return self.loc.detach() + torch.randn(torch.Size(sample_shape) + self.batch_shape)

    def log_prob(self, value):
        off = (value - self.loc).abs()
        return -torch.where(off < 1, off.square() / 2, off - 0.5)


# ---- one latent


def half_detached(z):
    return 0.5 * z + 0.5 * z.detach()


def without_gradient(z):
    with torch.no_grad():
        return 2 * z


def straight_through(z):
    return z + (z.round() - z).detach()


def of_a_branch(z):
    return 2 * z if (z > 0).all() else z


def tiny_quartic(z):
    pyro.factor("quartic", -1e-3 * z**4)
    return dist.Normal(z, 1.0)


def half_line(z):
    pyro.factor("half line", torch.where(z > 0, 0.0, -torch.inf))
    return dist.Normal(z, 1.0)


def rewarded(z):
    pyro.factor("reward", torch.where(z > -0.5, 1.0, 0.0))
    return dist.Normal(z, 1.0)


relu, softplus = torch.nn.functional.relu, torch.nn.functional.softplus
NOT_QUADRATIC = {
    "StudentT": of(normal(), lambda z: dist.StudentT(4.0, z, 1.0)),
    "StudentT of many degrees": of(normal(), lambda z: dist.StudentT(1e3, z, 1.0)),
    "Laplace": of(normal(), lambda z: dist.Laplace(z, 1.0)),
    "Cauchy": of(normal(), lambda z: dist.Cauchy(z, 1.0)),
    "AsymmetricLaplace": of(normal(), lambda z: dist.AsymmetricLaplace(z, 1.0, 2.0)),
    "Gumbel": of(normal(), lambda z: dist.Gumbel(z, 1.0)),
    "Huber": of(normal(), Huber),
    "Huber beside a strong prior": of(normal(0.0, 0.01), Huber, 0.1 * Y, 10 * Y),
    "probit": of(normal(), lambda z: dist.Bernoulli(torch.special.ndtr(z)), BITS),
    "probit far off": of(
        normal(5.0), lambda z: dist.Bernoulli(torch.special.ndtr(z)), 0 * BITS + 1, BITS
    ),
    "logit far off": of(
        normal(0.0, 10.0), lambda z: dist.Bernoulli(logits=z + 12), 0 * BITS + 1, 0 * BITS
    ),
    "Poisson of exp": of(normal(), lambda z: dist.Poisson(z.exp()), COUNTS),
    "von Mises": of(normal(), lambda z: dist.VonMises(z, 2.0), Y),
    "clamped 50 deviations away": of(normal(), mean(lambda z: z.clamp(-50, 50)), Y, 100 * Y),
    "clamped below": of(normal(), mean(lambda z: z.clamp(min=-2)), Y, Y - 5),
    "clamped above": of(normal(), mean(lambda z: z.clamp(max=2)), Y, Y + 5),
    "relu": of(normal(), mean(relu), Y, Y - 5),
    "relu at -1": of(normal(), mean(lambda z: relu(z + 1)), Y, Y - 5),
    "relu at 1": of(normal(), mean(lambda z: relu(1 - z)), Y, Y - 5),
    "leaky far below": of(normal(), mean(lambda z: torch.where(z > -3, z, 0.1 * z)), Y, Y - 5),
    "softplus": of(normal(), mean(softplus)),
    "softplus far up": of(normal(20.0), mean(softplus), Y, Y - 10),
    "elu": of(normal(2.0), mean(torch.nn.functional.elu), Y, Y - 5),
    "a window": of(
        normal(), mean(lambda z: torch.where((z > 0.2) & (z < 1.5), 1.3 * z, z)), Y, Y + 1
    ),
    "a window below": of(
        normal(), mean(lambda z: torch.where((z < -0.2) & (z > -1.5), 1.3 * z, z)), Y, Y - 1
    ),
    "where": of(normal(), mean(lambda z: torch.where(z > 0, z, 2 * z))),
    "a branch": of(normal(), mean(of_a_branch), Y, Y - 3),
    "a branch at -1": of(normal(), mean(lambda z: of_a_branch(z + 1)), Y, Y - 5),
    "a branch, prior at 1": of(normal(1.0), mean(of_a_branch), Y, Y - 5),
    "abs": of(normal(), mean(torch.abs)),
    "abs far off": of(normal(3.0), mean(torch.abs), Y, Y - 1),
    "exp": of(normal(), mean(torch.exp)),
    "square": of(normal(), mean(torch.square)),
    "weak cube": of(normal(), mean(lambda z: z + 1e-3 * z**3)),
    "weak square": of(normal(), mean(lambda z: z + 1e-4 * z**2)),
    "tanh": of(normal(), mean(torch.tanh)),
    "wave": of(normal(), mean(lambda z: z + 0.1 * (2 * math.pi * z).sin())),
    "weak wave, precise data": of(normal(), lambda z: dist.Normal(z + 2e-4 * z.sin(), 1e-5), Y[:1]),
    "rounded": of(normal(), mean(straight_through)),
    "quantized": of(normal(), mean(lambda z: z + ((4 * z).floor() / 4 - z).detach())),
    "detached": of(normal(), mean(torch.detach)),
    "half detached": of(normal(), mean(half_detached)),
    "without gradient": of(normal(), mean(without_gradient)),
    "modulo": of(normal(), mean(lambda z: z.remainder(3.0)), Y, Y + 3),
    "scale of z": of(normal(), lambda z: dist.Normal(z, z.exp())),
    "scale hardly of z": of(normal(), lambda z: dist.Normal(z, (1e-3 * z).exp())),
    "scale of z detached": of(normal(), lambda z: dist.Normal(z, 1 + z.detach() ** 2)),
    "scale of z alone": of(normal(), lambda z: dist.Normal(0.0, z.exp())),
    "scale by a comparison": of(
        normal(), lambda z: dist.Normal(z, torch.where(z > -1, 1.0, 3.0)), Y, Y - 5
    ),
    "covariance of z": of(
        normal(),
        lambda z: dist.MultivariateNormal(z * torch.ones(2), torch.eye(2) * z.cosh()),
        torch.stack([Y, Y + 1], -1),
    ),
    "a mask of z": of(normal(), lambda z: dist.Normal(z, 1.0).mask(z.detach() > -1), Y, Y - 5),
    "a mixture": of(
        normal(),
        lambda z: dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)), dist.Normal(torch.stack([z, 0 * z], -1), torch.ones(2))
        ),
    ),
    "a spike in a bell": of(lambda: dist.Normal(torch.tensor(0.0), 10.0), spiked(0.1)),
    "a needle in a bell": of(lambda: dist.Normal(torch.tensor(0.0), 100.0), spiked(0.01), Y[:1]),
    "exponential noise": of(normal(), shifted(dist.Exponential(torch.tensor(1.0))), Y + 3),
    "half-normal noise": of(normal(), shifted(dist.HalfNormal(torch.tensor(1.0))), Y + 3),
    "gamma noise": of(normal(), shifted(dist.Gamma(torch.tensor(2.0), 1.0)), Y + 3),
    "uniform noise": of(normal(), lambda z: dist.Uniform(z - 5, z + 5), Y),
    "no noise": of(normal(), lambda z: dist.Delta(z), 0 * Y),
    "a masked likelihood": of(normal(), lambda z: dist.Normal(z, 1.0).mask(False)),
    "a quartic factor": of(normal(), tiny_quartic),
    "a half line": of(normal(1.0), half_line, Y, Y - 3),
    "a reward": of(normal(), rewarded, Y, Y - 3),
    "norm": of(unit(3), mean(lambda z: z.norm(dim=-1))),
    "max": of(unit(3), mean(lambda z: z.max(-1).values)),
    "min": of(unit(3), mean(lambda z: z.min(-1).values)),
    "median": of(unit(3), mean(lambda z: z.median(-1).values)),
    "sorted": of(unit(3), mean(lambda z: (z.sort(-1).values * double(1, 2, 3)).sum(-1))),
    "product of elements": of(unit(2), mean(lambda z: z[..., 0] * z[..., 1])),
    "one element squared": of(unit(2), mean(lambda z: z[..., 0] + z[..., 1] ** 2)),
    "norm of a MultivariateNormal": of(
        lambda: dist.MultivariateNormal(torch.zeros(2), torch.eye(2)),
        mean(lambda z: z.square().sum(-1)),
    ),
}

NOT_OF_THAT_FORM = {
    "Gamma, square": of(gamma(), lambda z: dist.Poisson(z**2), COUNTS),
    "Gamma, plus one": of(gamma(), lambda z: dist.Poisson(z + 1), COUNTS),
    "Gamma, plus a hundredth": of(gamma(), lambda z: dist.Poisson(z + 0.01), COUNTS),
    "Gamma, clamped below": of(
        gamma(), lambda z: dist.Poisson(z.clamp(min=0.5)), COUNTS, 0 * COUNTS
    ),
    "Gamma, clamped above": of(
        gamma(), lambda z: dist.Poisson(z.clamp(max=5.0)), COUNTS, 9 + COUNTS
    ),
    "Gamma, bent below 1": of(
        gamma(), lambda z: dist.Poisson(torch.where(z > 1, z, z**2)), COUNTS, 0 * COUNTS
    ),
    "Gamma, a branch": of(
        gamma(), lambda z: dist.Poisson(z if z > 0.5 else z**2), COUNTS, 0 * COUNTS
    ),
    "Gamma, detached": of(
        gamma(), lambda z: dist.Gamma(1.5, z.sqrt() * z.detach().sqrt()), Y.exp()
    ),
    "Gamma, LogNormal": of(gamma(), lambda z: dist.LogNormal(z, 1.0), Y.exp()),
    "Gamma, Normal of that sd": of(gamma(), lambda z: dist.Normal(0.0, z)),
    "Gamma, Normal of that variance": of(gamma(), lambda z: dist.Normal(z, z.sqrt())),
    "Gamma, location and precision": of(gamma(), lambda z: dist.Normal(z, z.rsqrt())),
    "Gamma, shape": of(gamma(), lambda z: dist.Gamma(z, 1.0), Y.exp()),
    "Gamma, NegativeBinomial": of(
        gamma(), lambda z: dist.NegativeBinomial(10.0, logits=z.log()), COUNTS
    ),
    "Gamma, zero-inflated": of(
        gamma(), lambda z: dist.ZeroInflatedPoisson(z, gate=torch.tensor(0.3)), COUNTS
    ),
    "Gamma, zero-inflated, without zeros yet": of(
        gamma(),
        lambda z: dist.ZeroInflatedPoisson(z, gate=torch.tensor(0.01)),
        COUNTS + 1,
        0 * COUNTS,
    ),
    "Gamma, Uniform up to z": of(gamma(9.0), lambda z: dist.Uniform(0.0, z), double(1.0, 3.0)),
    "Gamma, Pareto from z": of(gamma(9.0), lambda z: dist.Pareto(z, 2.0), double(10.0, 30.0)),
    "Gamma, exponential noise": of(
        gamma(9.0, 4.0), shifted(dist.Exponential(torch.tensor(1.0))), double(4.0, 9.0)
    ),
    "Gamma, Weibull scale": of(gamma(), lambda z: dist.Weibull(z, 1.5), Y.exp()),
    "Gamma, StudentT precision": of(gamma(), lambda z: dist.StudentT(5.0, 0.0, z.rsqrt())),
    "Gamma, location by its log": of(gamma(), lambda z: dist.Normal(z.log(), 1.0)),
    "InverseGamma, Normal of that sd": of(
        lambda: dist.InverseGamma(2.0, 3.0), lambda z: dist.Normal(0.0, z)
    ),
    "InverseGamma, variance plus one": of(
        lambda: dist.InverseGamma(2.0, 3.0), lambda z: dist.Normal(0.0, (z + 1).sqrt())
    ),
    "InverseGamma, clamped": of(
        lambda: dist.InverseGamma(3.0, 3.0),
        lambda z: dist.Normal(0.0, z.clamp(min=0.4).sqrt()),
        Y,
        0.01 * Y,
    ),
    "Exponential, Poisson plus one": of(
        lambda: dist.Exponential(torch.tensor(1.0)), lambda z: dist.Poisson(z + 1), COUNTS
    ),
    "Beta, square": of(beta(), lambda z: dist.Binomial(9, z**2), COUNTS),
    "Beta, lapses": of(beta(), lambda z: dist.Bernoulli(0.02 + 0.96 * z), BITS),
    "Beta, clamped below": of(beta(), lambda z: dist.Bernoulli(z.clamp(min=0.3)), BITS, 0 * BITS),
    "Beta, clamped above": of(
        beta(), lambda z: dist.Bernoulli(z.clamp(max=0.7)), BITS, 0 * BITS + 1
    ),
    "Beta, half": of(beta(), lambda z: dist.Bernoulli(z / 2), BITS),
    "Beta, logits": of(beta(), lambda z: dist.Bernoulli(logits=z), BITS),
    "Beta, Normal": of(beta(), lambda z: dist.Normal(z, 1.0)),
    "Beta, ContinuousBernoulli": of(beta(), dist.ContinuousBernoulli, double(0.2, 0.3, 0.9, 0.5)),
    "Beta, gate": of(beta(), lambda z: dist.ZeroInflatedPoisson(torch.tensor(2.0), gate=z), COUNTS),
    "Beta, group testing": of(beta(), lambda z: dist.Bernoulli(1 - (1 - z) ** 5 * 0.9), BITS),
    "Uniform up to 2": of(
        lambda: dist.Uniform(torch.zeros(()), 2.0), lambda z: dist.Bernoulli(z / 2), BITS
    ),
    "Uniform, square": of(
        lambda: dist.Uniform(torch.zeros(()), 1.0), lambda z: dist.Bernoulli(z**2), BITS
    ),
    "Dirichlet, powers": of(simplex, lambda z: dist.Categorical(z**2), CLASSES),
    "Dirichlet, logits": of(simplex, lambda z: dist.Categorical(logits=z), CLASSES),
    "Dirichlet, confusion": of(simplex, lambda z: dist.Categorical(0.1 / 3 + 0.9 * z), CLASSES),
    "Dirichlet, weights": of(simplex, lambda z: dist.Categorical(z * double(1, 2, 3)), CLASSES),
    "Dirichlet, one element": of(simplex, lambda z: dist.Bernoulli(z[..., 0]), BITS),
    "Dirichlet, a mean": of(simplex, mean(lambda z: (z * double(0, 1, 2)).sum(-1))),
    "Dirichlet, a rate": of(simplex, lambda z: dist.Exponential(3 * z[..., 0]), Y.exp()),
    "Dirichlet, rates of exposures": of(
        simplex, lambda z: dist.Poisson(z * double(1, 5, 20)).to_event(1), COUNTS[:3].expand(2, 3)
    ),
    "Dirichlet, top-coded": of(
        simplex, lambda z: dist.Categorical(z.clamp(max=0.6)), CLASSES, 0 * CLASSES
    ),
    "LogNormal, Normal": of(log_normal, lambda z: dist.Normal(z, 1.0)),
    "LogNormal, Poisson": of(log_normal, dist.Poisson, COUNTS),
    "LogNormal, relu of its log": of(log_normal, mean(lambda z: relu(z.log() + 1)), Y, Y - 4),
    "LogNormal, StudentT of its log": of(
        log_normal, lambda z: dist.StudentT(500.0, z.log(), 1.0), Y, Y + 40
    ),
    "LogNormal, log1p": of(log_normal, mean(torch.log1p)),
}

OTHER_PRIORS = {
    "HalfNormal": of(lambda: dist.HalfNormal(torch.tensor(1.0)), mean(lambda z: z.square())),
    "HalfNormal of a spike": of(lambda: dist.HalfNormal(torch.tensor(10.0)), spiked(0.01)),
    "Uniform of a spike": of(lambda: dist.Uniform(torch.tensor(-10.0), 10.0), spiked(0.01)),
    "HalfNormal of a scale": of(
        lambda: dist.HalfNormal(torch.tensor(1.0)), lambda z: dist.Normal(0.0, z)
    ),
    "HalfNormal of a tiny quartic": of(lambda: dist.HalfNormal(torch.tensor(1.0)), tiny_quartic),
    "HalfCauchy": of(lambda: dist.HalfCauchy(torch.tensor(1.0)), mean(lambda z: z)),
    "Exponential": of(lambda: dist.Exponential(torch.tensor(1.0)), mean(torch.sqrt)),
    "FoldedDistribution": of(
        lambda: dist.FoldedDistribution(dist.Normal(torch.tensor(1.0), 1.0)), mean(lambda z: z)
    ),
    "Laplace": of(lambda: dist.Laplace(torch.tensor(0.0), 1.0), mean(lambda z: z)),
    "StudentT": of(lambda: dist.StudentT(3.0, torch.tensor(0.0), 1.0), mean(lambda z: z)),
    "Uniform": of(lambda: dist.Uniform(torch.tensor(-1.0), 1.0), mean(torch.sin)),
    "Uniform on (0, 1)": of(lambda: dist.Uniform(torch.tensor(0.0), 1.0), mean(torch.log)),
    "Uniform of a precision": of(
        lambda: dist.Uniform(torch.tensor(1.0), 2.0), lambda z: dist.Normal(0.0, z.rsqrt())
    ),
    "Uniform whose elements hang together": of(
        lambda: dist.Uniform(torch.zeros(3), 1.0).to_event(1), mean(lambda z: z.sum(-1))
    ),
    "Uniform of a detached one": of(
        lambda: dist.Uniform(torch.tensor(-1.0), 1.0), mean(lambda z: z + z.detach())
    ),
    "improper, of a bend": of(improper, mean(lambda z: z + torch.tanh(z))),
    "improper, positive": of(
        lambda: dist.ImproperUniform(dist.constraints.positive, (), ()), mean(lambda z: z)
    ),
    "flat, of its size": of(
        lambda: dist.Uniform(torch.tensor(-1000.0), 1000.0), mean(torch.abs), Y + 5
    ),
    "improper, of its size": of(improper, mean(torch.abs), Y + 5),
    "flat vector, of one that bends": of(
        flat_vector(1000.0), mean(lambda z: z[..., 0] + torch.tanh(z[..., 1]))
    ),
    "flat vector that bounds cut": of(
        flat_vector(0.5), mean(lambda z: z[..., 0] + 0.1 * z[..., 1]), Y + 3
    ),
    "flat vector, of a sum alone": of(flat_vector(1000.0), mean(lambda z: z.sum(-1))),
    "unit": of(
        lambda: dist.TransformedDistribution(
            dist.Normal(torch.tensor(0.0), 1.0), [transforms.TanhTransform()]
        ),
        mean(torch.atanh),
    ),
    "masked": of(lambda: dist.Normal(torch.tensor(0.0), 1.0).mask(False), mean(lambda z: z)),
    "relaxed": of(
        lambda: dist.RelaxedBernoulli(torch.tensor(0.5), torch.tensor(0.3)), mean(lambda z: z)
    ),
    "mixture": of(
        lambda: dist.MixtureSameFamily(
            dist.Categorical(torch.ones(2)), dist.Normal(double(-1, 1), 1.0)
        ),
        mean(lambda z: z),
    ),
    "Poisson": of(lambda: dist.Poisson(torch.tensor(3.0)), mean(lambda z: z)),
    "Binomial": of(lambda: dist.Binomial(3, torch.tensor(0.3)), mean(lambda z: z)),
    "65 values": of(lambda: dist.Categorical(torch.ones(65)), mean(lambda z: z / 10)),
}


# ---- several latents, or data in a role of their own


def precise_and_robust(precise, robust):
    """One sensor is precise, another has a likelihood of its own, that is lost beside it."""
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    pyro.sample("precise", dist.Normal(z, 1e-4), obs=precise)
    pyro.sample("robust", dist.Normal(300 * z.tanh(), 1.0), obs=robust)


def outliers(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        far = pyro.sample("far", dist.Bernoulli(torch.tensor(0.1)))
        pyro.sample("y", dist.Normal(z, 1 + 9 * far), obs=y)


def summed_out(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        far = pyro.sample("far", dist.Bernoulli(torch.tensor(0.1)), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(z, 1 + 9 * far), obs=y)


def through_a_latent(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        w = pyro.sample("w", dist.Laplace(z, 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def through_a_scale(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    w = pyro.sample("w", dist.LogNormal(z, 1.0))
    pyro.sample("y", dist.Normal(z + w, 1.0), obs=y[0])


def minibatch(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y), subsample_size=2) as index:
        pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])


def minibatch_of_counts(y):
    z = pyro.sample("z", dist.Gamma(torch.tensor(2.0), 1.0))
    with pyro.plate("rows", len(y), subsample_size=2) as index:
        pyro.sample("y", dist.Poisson(z), obs=y[index])


def masked_latent(y):
    with poutine.mask(mask=False):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    pyro.sample("y", dist.Normal(z, 1.0), obs=y[0])


def bounded_by_another(count):
    """At the guide's initial values, the bound is 1."""
    bound = pyro.sample("bound", dist.Uniform(torch.zeros(()), 2.0))
    z = pyro.sample("z", dist.Uniform(torch.zeros(()), bound))
    pyro.sample("count", dist.Binomial(10, z / 2), obs=count)


def bounded_by_another_in_part(count):
    bound = pyro.sample("bound", dist.LogNormal(torch.zeros(()), 1.0))
    z = pyro.sample("z", dist.Uniform(torch.zeros(()), bound))
    pyro.sample("count", dist.Binomial(10, z.clamp(max=1.0)), obs=count)


def bounded_by_an_argument(count, bound):
    z = pyro.sample("z", dist.Uniform(torch.zeros(()), bound))
    pyro.sample("count", dist.Binomial(10, z), obs=count)


def dirichlet_factor():
    z = pyro.sample("z", simplex())
    pyro.factor("cost", (z * double(0, 1, 5)).sum(-1))


def dirichlet_and_rates(counts, exposure):
    z = pyro.sample("z", simplex())
    with pyro.plate("classes", 3):
        pyro.sample("counts", dist.Poisson(exposure * z), obs=counts)


WEIGHT = torch.zeros((), requires_grad=True)


def weight_in_waiting(y):
    """A residual network whose last weights are zero as yet, and will be learned."""
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(z + WEIGHT * z.tanh(), 1.0), obs=y)


def two_scales(y):
    """Parts of a block are scaled on their own, so that there is no one density."""
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y)), poutine.scale(scale=0.3):
        w = pyro.sample("w", dist.Normal(z, 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def rate_of_a_rate(y):
    """A Gamma whose child is a latent: exact given that, but not given the data alone."""
    z = pyro.sample("z", dist.Gamma(torch.tensor(2.0), 1.0))
    with pyro.plate("rows", len(y)):
        w = pyro.sample("w", dist.Gamma(2.0, z))
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def neighbours(y):
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0).expand([len(y)]))
    pyro.sample("y", dist.Normal(z[..., 1:] * z[..., :-1], 1.0).to_event(1), obs=y[1:])


def states_of_neighbours(y):
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.4)))
    pyro.sample("y", dist.Normal(z[..., 1:] + z[..., :-1], 1.0).to_event(1), obs=y[1:])


def failing(how: Callable) -> Callable:
    """A model that fails far from its prior, or at several values at once, as Python does."""

    def model(y):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 10.0))
        how(z)
        pyro.sample("y", dist.Normal(z, 1.0), obs=y[0])

    return model


def limited(z):
    assert (z.abs() < 500).all()


def chosen_from_a_list(y):
    z = pyro.sample("z", dist.Categorical(torch.ones(2)))
    pyro.sample("y", dist.Normal([0.0, 1.0][z], 1.0), obs=y[0])


def chosen_from_a_dict(y):
    z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.5)))
    pyro.sample("y", dist.Normal({0: 0.0, 1: 1.0}[int(z)], 1.0), obs=y[0])


SEVERAL = {
    "an assertion": Case(failing(limited), (Y,)),
    "an overflow": Case(failing(lambda z: math.exp(float(z.max()))), (Y,)),
    "a division": Case(failing(lambda z: 1 / float(z.abs().max() < 500)), (Y,)),
    "a lookup": Case(failing(lambda z: {True: 0}[bool((z.abs() < 500).all())]), (Y,)),
    "a list": Case(chosen_from_a_list, (Y,)),
    "a dict": Case(chosen_from_a_dict, (Y,)),
    "a precise sensor hides another": Case(precise_and_robust, (number(3.0), number(299.0))),
    "outliers": Case(outliers, (Y,)),
    "outliers that are summed out": Case(summed_out, (Y,)),
    "through a latent": Case(through_a_latent, (Y,)),
    "through a scale": Case(through_a_scale, (Y,)),
    "minibatch": Case(minibatch, (Y,)),
    "minibatch of counts": Case(minibatch_of_counts, (COUNTS,)),
    "masked": Case(masked_latent, (Y,)),
    "a bound that is drawn": Case(bounded_by_another, (number(3.0),)),
    "a bound that is drawn, clamped": Case(bounded_by_another_in_part, (number(3.0),)),
    "a factor of a simplex": Case(dirichlet_factor),
    "exposures of a simplex": Case(dirichlet_and_rates, (COUNTS[:3], double(1, 5, 20))),
    "weights that are zero as yet": Case(weight_in_waiting, (Y,)),
    "two scales": Case(two_scales, (Y,)),
    "a rate of a rate": Case(rate_of_a_rate, (Y.exp(),)),
    "products of neighbours": Case(neighbours, (Y,)),
    "states of neighbours": Case(states_of_neighbours, (Y,)),
}
REFUSED = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("Normal", NOT_QUADRATIC),
        ("form", NOT_OF_THAT_FORM),
        ("prior", OTHER_PRIORS),
        ("model", SEVERAL),
    )
    for name, case in cases.items()
}


# ---- what is exact in spite of its looks


def product(y):
    """Given one of them the other is Gaussian."""
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(z * w, 1.0), obs=y)


def scale_of_another(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(()), z.exp()))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def shared_child(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    w = pyro.sample("w", dist.Gamma(torch.tensor(2.0), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(z, w.rsqrt()), obs=y)


def squared_mean(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    w = pyro.sample("w", dist.Normal(z**2, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def partly_missing(y):
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=y, obs_mask=BITS.bool())


def quadratic_factor(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    pyro.factor("penalty", -2 * (z - 1) ** 2)
    pyro.sample("y", dist.Normal(z, 1.0), obs=y[0])


def residual(y):
    """The data are a residual."""
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y - z)


def rest_of_a_line(y):
    z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
    pyro.deterministic("square", z**2)
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal((z - 1) * (z + 1) - z**2 + 3 * z, 1.0), obs=y)


def state_and_location(y):
    z = pyro.sample("z", dist.Categorical(torch.ones(3)))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(Vindex(w)[..., z], 1.0), obs=y)


def zero_inflated(y):
    rate = pyro.sample("rate", dist.Gamma(torch.tensor(2.0), 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.3)))
        pyro.sample("y", dist.Poisson(rate * (1 - z) + 1e-9), obs=y)


def impossible_state(y):
    z = pyro.sample("z", dist.Categorical(double(0.5, 0.0, 0.5)))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(z * 1.0, 1.0), obs=y)


RIGHT = {
    "product": Case(product, (Y,)),
    "scale of another": Case(scale_of_another, (Y,)),
    "shared child": Case(shared_child, (Y,)),
    "squared mean": Case(squared_mean, (Y,)),
    "partly missing": Case(partly_missing, (Y,)),
    "quadratic factor": Case(quadratic_factor, (Y,)),
    "residual": Case(residual, (Y,), ((Y + 3,),)),
    "polynomial that is a line": Case(rest_of_a_line, (Y,), ((Y + 3,),)),
    "state and location": Case(state_and_location, (Y,)),
    "zero-inflated by a state": Case(zero_inflated, (COUNTS,)),
    "impossible state": Case(impossible_state, (Y,), ((Y + 3,),)),
    "through a transform": of(normal(), shifted(dist.Normal(torch.tensor(0.0), 1.0)), Y, Y + 3),
    "log-linear": of(normal(), lambda z: dist.LogNormal(2 * z, 1.0), Y.exp(), (Y + 3).exp()),
    "log of exp": of(normal(), mean(lambda z: z.exp().log()), Y, Y + 3),
    "improper": of(improper, mean(lambda z: z), Y, Y + 3),
    "improper, started elsewhere": of(improper, mean(lambda z: z), Y, Y + 3)._replace(
        options={"init_loc_fn": init_to_value(values={"z": number(0.5)})}
    ),
    "flat vector": of(
        flat_vector(1000.0),
        lambda z: dist.Normal(z[..., :1] + z[..., 1:] * Y, 1.0).to_event(1),
        Y.expand(3, 4),
        Y.expand(2, 4),
    ),
    "flat, in log space": of(
        lambda: dist.Uniform(torch.tensor(-50.0), 50.0), mean(lambda z: z.exp().log()), Y, Y + 3
    ),
    "logits of a Gamma": of(gamma(), lambda z: dist.Poisson(z.log().exp()), COUNTS, COUNTS + 5),
    "weights that a Categorical normalizes": of(
        simplex, lambda z: dist.Categorical(5 * z), CLASSES, 0 * CLASSES
    ),
    "rates of a simplex": of(
        simplex, lambda z: dist.Poisson(4 * z).to_event(1), COUNTS[:3].expand(2, 3)
    ),
    "64 values": of(lambda: dist.Categorical(torch.ones(64)), mean(lambda z: z / 10), Y, Y + 3),
}


@pytest.mark.parametrize("inverse", ["auto", "reverse"])
@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_it_is_not_taken_for_exact(case, inverse):
    guide = made(case, inverse)
    assert "z" not in guide.conjugate
    assert_exact(guide, case)


@pytest.mark.parametrize("inverse", ["auto", "reverse"])
@pytest.mark.parametrize("case", RIGHT.values(), ids=list(RIGHT))
def test_what_is_taken_for_exact_is(case, inverse):
    assert_exact(made(case, inverse), case)


ONE_OF_TWO = {
    "product": ("z", "w"),
    "scale of another": ("w",),
    "shared child": ("z", "w"),
    "squared mean": ("w",),
}


@pytest.mark.parametrize("name", ONE_OF_TWO)
def test_one_of_two_is_exact_given_the_other(name):
    assert len(made(RIGHT[name]).conjugate) == 1
    assert made(RIGHT[name]).conjugate[0] in ONE_OF_TWO[name]


TAKEN = [
    name for name, case in RIGHT.items() if name not in (*ONE_OF_TWO, "partly missing", "residual")
]


@pytest.mark.parametrize("name", TAKEN)
def test_nothing_is_learned_that_is_exact(name):
    assert made(RIGHT[name]).conjugate


def made(case: Case, inverse: str = "auto") -> AutoNaMIGuide:
    guide = AutoNaMIGuide(case.model, inverse=inverse, **case.options)
    guide(*case.args)
    return guide


def assert_exact(guide: AutoNaMIGuide, case: Case, draws: int = 30) -> None:
    """At each data, and at fixed values of what is learned, log p - log q is the same at all draws of the rest."""
    rules = {name: note.rule for name, note in guide.rules.items()}
    learned = [name for name, rule in rules.items() if rule in ("learned", "newton", "collapsed")]
    # Quadrature may be off by this, in nats and of what the log density falls by from the likeliest draw.
    error = 0.01 if "quadrature" in rules.values() else 0.0
    for args in (case.args, *case.others) if len(learned) < len(rules) else ():
        with torch.no_grad(), pyro.validation_enabled(False):
            values = guide(*args)
            fixed, weights, densities = {name: values[name] for name in learned}, [], []
            for _ in range(draws):
                trace = poutine.trace(poutine.condition(guide, fixed)).get_trace(*args)
                drawn = {
                    name: site["value"] for name, site in trace.nodes.items() if name in values
                }
                model = poutine.trace(poutine.condition(case.model, {**drawn, **fixed})).get_trace(
                    *args
                )
                trace.compute_log_prob()
                inside = [
                    site["log_prob_sum"]
                    for name, site in trace.nodes.items()
                    if name in drawn.keys() - fixed
                ]
                densities.append(sum(inside))
                weights.append(model.log_prob_sum() - densities[-1])
        weight, density = torch.stack(weights), torch.stack(densities)
        likeliest = density.argmax()
        allowed = 1e-6 * (1 + weight.abs()) + error * (1 + density[likeliest] - density)
        off = (weight - weight[likeliest]).abs()
        assert (off <= allowed).all(), (off.max(), (off / allowed).max())


def test_a_bound_that_changes_is_an_error():
    """The first call cannot tell that it will."""
    guide = AutoNaMIGuide(bounded_by_an_argument)
    guide(number(3.0), number(1.0))
    with pytest.raises(ValueError, match="'z' to be uniform on .0, 1.*rules={'z': 'learned'}"):
        guide(number(3.0), number(0.5))
