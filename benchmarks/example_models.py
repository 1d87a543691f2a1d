"""Models of the kinds that Pyro's examples and tutorials show, with small data: what `pyro_examples` trains.

Every model is stated as Pyro's example states it (its sites, plates, priors, masks, loops, and what is enumerated),
because it is these forms that a drop-in guide meets; the data are small and drawn from seeded generators, or stand
here as tuples. An `Example` also says how the example trains: its rate, its ELBO, and which sites the guide is shown.
Add a model here when a form of model is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.forecast import ForecastingModel
from pyro.infer import Trace_ELBO, TraceEnum_ELBO
from pyro.infer.reparam import DiscreteCosineReparam, LocScaleReparam, StableReparam
from pyro.nn import PyroModule, PyroSample
from pyro.ops.indexing import Vindex
from torch import Tensor, nn
from torch.nn.functional import one_hot, softplus

__all__ = ["EXAMPLES", "Example"]

AT_BATS, HITS = 45.0, (18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7)
EFFECTS = (28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0)
ERRORS = (15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0)
FAILURES = (5, 1, 5, 14, 3, 19, 1, 1, 4, 22)
HOURS = (94.3, 15.7, 62.9, 126.0, 5.24, 31.4, 1.05, 1.05, 2.1, 10.5)
HIDDEN_STATES = 4


def unchanged(model: Callable) -> Callable:
    """The model itself."""
    return model


def exposing(*prefixes: str) -> Callable[[Callable], Callable]:
    """A wrapper that shows only the sites whose names start with one of ``prefixes``."""
    return partial(poutine.block, expose_fn=lambda site: site["name"].startswith(prefixes))


@dataclass(frozen=True)
class Example:
    """A model with its data, and how its example trains it.

    Attributes:
        model: makes the model; anew for every run, as some hold modules.
        data: makes the model's positional arguments.
        rate: Adam's rate in the example, or 0.01 where the example runs MCMC.
        kwargs: the model's keyword arguments in training.
        scored: what differs in ``kwargs`` when scoring (all of the data in place of minibatches).
        elbo: makes the ELBO.
        guided: wraps the model for the guide, to hide what is enumerated.
        plates: ``create_plates`` of the guides that take it.
        steps: default number of steps.
    """

    model: Callable[[], Callable]
    data: Callable[[], tuple]
    rate: float = 0.01
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    scored: Mapping[str, Any] = field(default_factory=dict)
    elbo: Callable[..., Any] = Trace_ELBO
    guided: Callable[[Callable], Callable] = unchanged
    plates: Callable | None = None
    steps: int = 700

    @property
    def args(self) -> tuple:
        """The model's positional arguments, drawn anew."""
        return self.data()


# --- Regressions and hierarchies -------------------------------------------------------------------------------------


def eight_schools(sigma: Tensor, y: Tensor) -> None:
    """Treatment effects of eight schools, noncentered, as vectors without a plate."""
    eta = pyro.sample("eta", dist.Normal(torch.zeros(len(y)), 1.0).to_event(1))
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    pyro.sample("obs", dist.Normal(mu + tau * eta, sigma).to_event(1), obs=y)


def eight_schools_centered(sigma: Tensor, y: Tensor) -> None:
    """The same with the effects themselves as latents of a plate."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("obs", dist.Normal(theta, sigma), obs=y)


def schools() -> tuple[Tensor, Tensor]:
    """Standard errors and estimated effects, ``(8,)``."""
    return torch.tensor(ERRORS), torch.tensor(EFFECTS)


class Regression(PyroModule):
    """A linear layer with priors on its weights, and a uniform scale of the noise."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = PyroModule[nn.Linear](features, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, features]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


def rows(features: int, number: int) -> tuple[Tensor, Tensor]:
    """Features ``(number, features)``, and a linear response with noise 0.5, ``(number,)``."""
    generator = torch.Generator().manual_seed(1)
    x, weights = (
        torch.randn(number, features, generator=generator),
        torch.linspace(-1.0, 1.0, features),
    )
    return x, 1.0 + x @ weights + 0.5 * torch.randn(number, generator=generator)


class Network(PyroModule):
    """One hidden layer of five units, all weights with standard priors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = PyroModule[nn.Linear](1, 5), PyroModule[nn.Linear](5, 1)
        for layer in (self.first, self.second):
            for name, value in list(layer.named_parameters()):
                prior = (
                    dist.Normal(torch.tensor(0.0), 1.0).expand(value.shape).to_event(value.dim())
                )
                setattr(layer, name, PyroSample(prior))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        mean = self.second(torch.tanh(self.first(x))).squeeze(-1)
        sigma = pyro.sample("sigma", dist.Gamma(0.5, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, sigma**2), obs=y)
        return mean


def wave() -> tuple[Tensor, Tensor]:
    """A noisy sine, ``(60, 1)`` and ``(60,)``."""
    x = torch.linspace(-2.0, 2.0, 60)[:, None]
    noise = 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(2))
    return x, torch.sin(2 * x).squeeze(-1) + noise


def logistic_regression(x: Tensor, y: Tensor) -> None:
    """Bernoulli responses, with coefficients and an intercept."""
    weights = pyro.sample("weights", dist.Normal(torch.zeros(x.shape[-1]), 1.0).to_event(1))
    intercept = pyro.sample("intercept", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Bernoulli(logits=intercept + x @ weights), obs=y)


def labelled_rows() -> tuple[Tensor, Tensor]:
    """Five features of 500 rows, and whether a noisy linear response is positive."""
    x, y = rows(5, 500)
    return x, (y > 0).float()


def horseshoe(x: Tensor, y: Tensor) -> None:
    """Sparse regression: a half-Cauchy scale of all coefficients, and of each."""
    tau = pyro.sample("tau", dist.HalfCauchy(1.0))
    with pyro.plate("features", x.shape[-1]):
        scale = pyro.sample("lambda", dist.HalfCauchy(1.0))
        beta = pyro.sample("beta", dist.Normal(0.0, tau * scale))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(x @ beta, sigma), obs=y)


def sparse_rows() -> tuple[Tensor, Tensor]:
    """Twelve features of 80 rows, of which two matter."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, 12, generator=generator)
    return x, 2.0 * x[:, 0] - x[:, 1] + 0.5 * torch.randn(80, generator=generator)


def fully_pooled(at_bats: Tensor, hits: Tensor) -> None:
    """One batting average of all players."""
    phi = pyro.sample("phi", dist.Beta(1.0, 1.0))
    with pyro.plate("num_players", len(hits)):
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def not_pooled(at_bats: Tensor, hits: Tensor) -> None:
    """An average of each player's own."""
    with pyro.plate("num_players", len(hits)):
        phi = pyro.sample("phi", dist.Beta(1.0, 1.0))
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def partially_pooled(at_bats: Tensor, hits: Tensor) -> None:
    """Averages of a Beta with a mean and a concentration of its own."""
    m = pyro.sample("m", dist.Uniform(0.0, 1.0))
    kappa = pyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with pyro.plate("num_players", len(hits)):
        phi = pyro.sample("phi", dist.Beta(m * kappa, (1 - m) * kappa))
        pyro.sample("obs", dist.Binomial(at_bats, phi), obs=hits)


def partially_pooled_logit(at_bats: Tensor, hits: Tensor) -> None:
    """The same with normal logits."""
    loc = pyro.sample("loc", dist.Normal(-1.0, 1.0))
    scale = pyro.sample("scale", dist.HalfCauchy(1.0))
    with pyro.plate("num_players", len(hits)):
        alpha = pyro.sample("alpha", dist.Normal(loc, scale))
        pyro.sample("obs", dist.Binomial(at_bats, logits=alpha), obs=hits)


def players() -> tuple[Tensor, Tensor]:
    """At-bats and hits of Efron and Morris's 18 players."""
    hits = torch.tensor(HITS, dtype=torch.float)
    return torch.full_like(hits, AT_BATS), hits


def pumps(hours: Tensor, failures: Tensor) -> None:
    """Poisson failures of pumps whose rates share a Gamma prior (George, Makov and Smith 1993)."""
    alpha = pyro.sample("alpha", dist.Exponential(1.0))
    beta = pyro.sample("beta", dist.Gamma(0.1, 1.0))
    with pyro.plate("pumps", len(hours)):
        rate = pyro.sample("rate", dist.Gamma(alpha, beta))
        pyro.sample("obs", dist.Poisson(rate * hours), obs=failures)


def pump_failures() -> tuple[Tensor, Tensor]:
    """Thousands of hours and failures of ten pumps."""
    return torch.tensor(HOURS), torch.tensor(FAILURES, dtype=torch.float)


def ragged_groups(y: Tensor, present: Tensor) -> None:
    """Groups of different sizes, padded and masked, the noise of each at half weight."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfNormal(2.0))
    groups = pyro.plate("groups", y.shape[0], dim=-1)
    with groups:
        theta = pyro.sample("theta", dist.Normal(mu, tau))
    with (
        groups,
        pyro.plate("members", y.shape[1], dim=-2),
        poutine.mask(mask=present.T),
        poutine.scale(scale=0.5),
    ):
        pyro.sample("obs", dist.Normal(theta, 1.0), obs=y.T)


def padded_groups() -> tuple[Tensor, Tensor]:
    """Eight groups of 1 to 12 members, ``(8, 12)``, and which members exist."""
    generator = torch.Generator().manual_seed(4)
    sizes = torch.tensor([1, 2, 3, 5, 7, 9, 11, 12])
    theta = 2.0 + torch.randn(8, 1, generator=generator)
    present = torch.arange(12) < sizes[:, None]
    return (theta + torch.randn(8, 12, generator=generator)) * present, present


def coin(flips: Tensor) -> None:
    """The fairness of a coin, flip by flip."""
    fairness = pyro.sample("latent_fairness", dist.Beta(10.0, 10.0))
    for i in range(len(flips)):
        pyro.sample(f"obs_{i}", dist.Bernoulli(fairness), obs=flips[i])


def flips() -> tuple[Tensor]:
    """Six heads, then four tails."""
    return (torch.tensor([1.0] * 6 + [0.0] * 4),)


def sequential_plate(y: Tensor, batch_size: int | None = None) -> None:
    """Log odds of each item, in a Python loop over a plate."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    for i in pyro.plate("data", len(y), subsample_size=batch_size):
        logits = pyro.sample(f"z_{int(i)}", dist.Normal(mu, sigma))
        pyro.sample(f"obs_{int(i)}", dist.Binomial(10, logits=logits), obs=y[i])


def successes() -> tuple[Tensor]:
    """Successes of ten items in ten trials each."""
    return (torch.tensor([2.0, 7.0, 5.0, 9.0, 4.0, 6.0, 8.0, 3.0, 7.0, 6.0]),)


def covariance(y: Tensor) -> None:
    """Normal rows with half-Cauchy variances and an LKJ prior on their correlations."""
    features = y.shape[-1]
    theta = pyro.sample("theta", dist.HalfCauchy(torch.ones(features)).to_event(1))
    omega = pyro.sample("L_omega", dist.LKJCholesky(features, torch.ones(())))
    scale_tril = theta.sqrt().diag_embed() @ omega
    with pyro.plate("observations", len(y)):
        pyro.sample(
            "obs", dist.MultivariateNormal(torch.zeros(features), scale_tril=scale_tril), obs=y
        )


def correlated_rows() -> tuple[Tensor]:
    """A hundred rows of four correlated features."""
    noise = torch.randn(100, 4, generator=torch.Generator().manual_seed(5))
    return (noise + 0.7 * noise[:, :1],)


# --- Time series -----------------------------------------------------------------------------------------------------


def logistic_growth(years: Tensor, population: Tensor) -> None:
    """A population that grows to its capacity, observed with log-normal noise."""
    start = pyro.sample("start", dist.LogNormal(0.0, 1.0))
    capacity = pyro.sample("capacity", dist.LogNormal(2.0, 1.0))
    growth = pyro.sample("growth", dist.LogNormal(-1.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(0.5))
    size = capacity / (1 + (capacity / start - 1) * torch.exp(-growth * years))
    with pyro.plate("years", len(years)):
        pyro.sample("obs", dist.LogNormal(size.clamp(min=1e-6).log(), noise), obs=population)


def populations() -> tuple[Tensor, Tensor]:
    """Populations in 25 years, with capacity 12."""
    years = torch.arange(25.0)
    noise = 0.1 * torch.randn(25, generator=torch.Generator().manual_seed(6))
    return years, noise.exp() * 12.0 / (1 + 11.0 * torch.exp(-0.35 * years))


def random_walk(y: Tensor) -> None:
    """An autoregressive walk in a Python loop, z_0 to z_19, each observed."""
    rho = pyro.sample("rho", dist.Uniform(-1.0, 1.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    z = torch.zeros(())
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(rho * z, sigma))
        pyro.sample(f"y_{t}", dist.Normal(z, 0.5), obs=y[t])


def walk() -> tuple[Tensor]:
    """Twenty noisy observations of a walk."""
    noise = torch.randn(2, 20, generator=torch.Generator().manual_seed(7))
    return (noise[0].cumsum(0) * 0.7 + 0.5 * noise[1],)


class LocalLevel(ForecastingModel):
    """A level that drifts, a linear effect of covariates, and Gaussian noise; the drift is reparametrized."""

    def model(self, zero_data: Tensor, covariates: Tensor) -> None:
        drift_scale = pyro.sample("drift_scale", dist.LogNormal(-2.0, 1.0))
        bias = pyro.sample("bias", dist.Normal(0.0, 10.0))
        weight = pyro.sample(
            "weight", dist.Normal(0.0, 0.1).expand([covariates.shape[-1]]).to_event(1)
        )
        noise_scale = pyro.sample("noise_scale", dist.LogNormal(-1.0, 1.0))
        with self.time_plate, poutine.reparam(config={"drift": LocScaleReparam()}):
            drift = pyro.sample(
                "drift", dist.Normal(zero_data, drift_scale[..., None, None]).to_event(1)
            )
        effect = (weight[..., None, :] * covariates).sum(-1, keepdim=True)
        level = drift.cumsum(-2) + bias[..., None, None]
        self.predict(dist.Normal(0.0, noise_scale[..., None, None]), level + effect)


def level_series() -> tuple[Tensor, Tensor]:
    """A drifting series of 60 times, ``(60, 1)``, and two periodic covariates."""
    noise = torch.randn(2, 60, generator=torch.Generator().manual_seed(8))
    times = torch.arange(60.0)
    series = 3.0 + 0.2 * noise[0].cumsum(0) + 0.3 * noise[1]
    return series[:, None], torch.stack([torch.sin(times / 2), torch.cos(times / 2)], -1)


def volatility(returns: Tensor) -> None:
    """Returns of a stable distribution whose log scale walks at random."""
    start = pyro.sample("h_0", dist.Normal(0.0, 1.0))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    v = pyro.sample("v", dist.Normal(0.0, 1.0).expand(returns.shape).to_event(1))
    log_h = start[..., None] + sigma[..., None] * v.cumsum(-1)
    scale = (0.5 * log_h).exp().clamp(min=1e-8, max=1e8)
    stability = pyro.sample("r_stability", dist.Uniform(0.0, 2.0))[..., None]
    skew = pyro.sample("r_skew", dist.Uniform(-1.0, 1.0))[..., None]
    loc = pyro.sample("r_loc", dist.Normal(0.0, 0.01))[..., None]
    pyro.sample("r", dist.Stable(stability, skew, scale, loc * scale).to_event(1), obs=returns)


def reparametrized_volatility() -> Callable:
    """The model whose likelihood is an auxiliary one, and whose noise is in the frequency domain."""
    return poutine.reparam(volatility, {"v": DiscreteCosineReparam(), "r": StableReparam()})


def returns() -> tuple[Tensor]:
    """Two hundred returns with volatility that changes."""
    noise = torch.randn(2, 200, generator=torch.Generator().manual_seed(9))
    return (noise[1] * torch.exp(0.05 * noise[0].cumsum(0)),)


class Dynamics(PyroModule):
    """A deep Markov model: a gated transition of Gaussian states, Bernoulli emissions, and masked minibatches."""

    def __init__(self, states: int = 3, data_dim: int = 8) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(states))
        self.transition = nn.Sequential(nn.Linear(states, 8), nn.ReLU(), nn.Linear(8, 2 * states))
        self.emission = nn.Sequential(nn.Linear(states, 8), nn.ReLU(), nn.Linear(8, data_dim))

    def forward(self, sequences: Tensor, mask: Tensor) -> None:
        pyro.module("dmm", self)
        z = self.start.expand(len(sequences), -1)
        with pyro.plate("z_minibatch", len(sequences)):
            for t in pyro.markov(range(sequences.shape[1])):
                loc, raw = self.transition(z).chunk(2, -1)
                here = mask[:, t : t + 1]
                z = pyro.sample(
                    f"z_{t}", dist.Normal(z + loc, softplus(raw) + 1e-3).mask(here).to_event(1)
                )
                emitted = dist.Bernoulli(logits=self.emission(z)).mask(here).to_event(1)
                pyro.sample(f"obs_x_{t}", emitted, obs=sequences[:, t])


def tones(number: int, longest: int, data_dim: int) -> tuple[Tensor, Tensor]:
    """Binary sequences ``(number, longest, data_dim)`` of a hidden Markov chain, and their lengths (half and more)."""
    generator = torch.Generator().manual_seed(10)
    probs = 0.05 + 0.6 * (torch.rand(HIDDEN_STATES, data_dim, generator=generator) < 0.3)
    jumps = torch.rand(number, longest, generator=generator) < 0.2
    states = torch.randint(HIDDEN_STATES, (number, longest), generator=generator)
    for t in range(1, longest):
        states[:, t] = torch.where(jumps[:, t], states[:, t], states[:, t - 1])
    lengths = torch.linspace(longest / 2, longest, number).long()
    sequences = torch.bernoulli(probs[states], generator=generator)
    return sequences * (torch.arange(longest) < lengths[:, None])[..., None], lengths


def masked_tones() -> tuple[Tensor, Tensor]:
    """Sequences ``(8, 6, 8)`` and which of their times exist, ``(8, 6)``."""
    sequences, lengths = tones(8, 6, 8)
    return sequences, torch.arange(6) < lengths[:, None]


# --- Hidden Markov models --------------------------------------------------------------------------------------------

PARALLEL = {"enumerate": "parallel"}


def transitions(name: str, states: int, *rows: int) -> Tensor:
    """Transition probabilities that favour staying, ``(*rows, states, states)``."""
    prior = dist.Dirichlet(0.9 * torch.eye(states) + 0.1)
    return pyro.sample(name, prior.expand([*rows, states]).to_event(1 + len(rows)))


def emissions(*shape: int) -> Tensor:
    """Probabilities of tones, mostly small."""
    return pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand(shape).to_event(len(shape)))


def hmm_0(
    sequences: Tensor, lengths: Tensor, batch_size: int | None = None, include_prior: bool = True
) -> None:
    """A hidden Markov model, one sequence after the other."""
    with poutine.mask(mask=include_prior):
        probs_x = transitions("probs_x", HIDDEN_STATES)
        probs_y = emissions(HIDDEN_STATES, sequences.shape[-1])
    tones_plate = pyro.plate("tones", sequences.shape[-1], dim=-1)
    for i in pyro.plate("sequences", len(sequences), batch_size):
        x = 0
        for t in pyro.markov(range(int(lengths[i]))):
            x = pyro.sample(f"x_{i}_{t}", dist.Categorical(probs_x[x]), infer=PARALLEL)
            with tones_plate:
                pyro.sample(
                    f"y_{i}_{t}", dist.Bernoulli(probs_y[x.squeeze(-1)]), obs=sequences[i, t]
                )


def hmm_1(
    sequences: Tensor, lengths: Tensor, batch_size: int | None = None, include_prior: bool = True
) -> None:
    """The same with a plate of sequences, masked to their lengths."""
    with poutine.mask(mask=include_prior):
        probs_x = transitions("probs_x", HIDDEN_STATES)
        probs_y = emissions(HIDDEN_STATES, sequences.shape[-1])
    tones_plate = pyro.plate("tones", sequences.shape[-1], dim=-1)
    with pyro.plate("sequences", len(sequences), batch_size, dim=-2) as batch:
        lengths = lengths[batch]
        x = 0
        for t in pyro.markov(range(int(lengths.max()))):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                x = pyro.sample(f"x_{t}", dist.Categorical(probs_x[x]), infer=PARALLEL)
                with tones_plate:
                    pyro.sample(
                        f"y_{t}", dist.Bernoulli(probs_y[x.squeeze(-1)]), obs=sequences[batch, t]
                    )


def hmm_2(
    sequences: Tensor, lengths: Tensor, batch_size: int | None = None, include_prior: bool = True
) -> None:
    """Tones that also depend on the tones before."""
    with poutine.mask(mask=include_prior):
        probs_x = transitions("probs_x", HIDDEN_STATES)
        probs_y = emissions(HIDDEN_STATES, 2, sequences.shape[-1])
    tones_plate = pyro.plate("tones", sequences.shape[-1], dim=-1)
    with pyro.plate("sequences", len(sequences), batch_size, dim=-2) as batch:
        lengths = lengths[batch]
        x, y = 0, 0
        for t in pyro.markov(range(int(lengths.max()))):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                x = pyro.sample(f"x_{t}", dist.Categorical(probs_x[x]), infer=PARALLEL)
                with tones_plate as tone:
                    likelihood = dist.Bernoulli(probs_y[x, y, tone])
                    y = pyro.sample(f"y_{t}", likelihood, obs=sequences[batch, t]).long()


def hmm_4(
    sequences: Tensor, lengths: Tensor, batch_size: int | None = None, include_prior: bool = True
) -> None:
    """Two chains, the second of which reads the first."""
    states = int(HIDDEN_STATES**0.5)
    with poutine.mask(mask=include_prior):
        probs_w = transitions("probs_w", states)
        probs_x = transitions("probs_x", states, states)
        probs_y = emissions(states, states, sequences.shape[-1])
    tones_plate = pyro.plate("tones", sequences.shape[-1], dim=-1)
    with pyro.plate("sequences", len(sequences), batch_size, dim=-2) as batch:
        lengths = lengths[batch]
        w = x = torch.tensor(0)
        for t in pyro.markov(range(int(lengths.max()))):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                w = pyro.sample(f"w_{t}", dist.Categorical(probs_w[w]), infer=PARALLEL)
                x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(probs_x)[w, x]), infer=PARALLEL)
                with tones_plate as tone:
                    pyro.sample(
                        f"y_{t}", dist.Bernoulli(probs_y[w, x, tone]), obs=sequences[batch, t]
                    )


class ToneNetwork(nn.Module):
    """Logits of tones ``(..., data_dim)`` given one-hot states and the tones before."""

    def __init__(self, data_dim: int, width: int = 8, channels: int = 2) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, channels, 3, padding=1)
        self.of_state = nn.Linear(HIDDEN_STATES, width)
        self.of_tones = nn.Linear(channels * data_dim, width)
        self.logits = nn.Linear(width, data_dim)

    def forward(self, state: Tensor, before: Tensor) -> Tensor:
        convolved = self.convolution(before.reshape(-1, 1, before.shape[-1])).relu()
        convolved = convolved.reshape(before.shape[:-1] + (-1,))
        return self.logits((self.of_state(state) + self.of_tones(convolved)).relu())


def hmm_5() -> Callable:
    """Tones by a network of the state and the tones before; in a plate of each time's own."""
    network = ToneNetwork(10)

    def model(
        sequences: Tensor,
        lengths: Tensor,
        batch_size: int | None = None,
        include_prior: bool = True,
    ) -> None:
        pyro.module("tones_generator", network)
        with poutine.mask(mask=include_prior):
            probs_x = transitions("probs_x", HIDDEN_STATES)
        with pyro.plate("sequences", len(sequences), batch_size, dim=-2) as batch:
            lengths = lengths[batch]
            x, y = 0, torch.zeros(sequences.shape[-1])
            for t in pyro.markov(range(int(lengths.max()))):
                with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                    x = pyro.sample(f"x_{t}", dist.Categorical(probs_x[x]), infer=PARALLEL)
                    logits = network(one_hot(x.squeeze(-1), HIDDEN_STATES).float(), y)
                    with pyro.plate(f"tones_{t}", sequences.shape[-1], dim=-1):
                        y = pyro.sample(
                            f"y_{t}", dist.Bernoulli(logits=logits), obs=sequences[batch, t]
                        )

    return model


def hmm_7() -> Callable:
    """The same with all times in one `DiscreteHMM`."""
    network = ToneNetwork(10)

    def model(
        sequences: Tensor,
        lengths: Tensor,
        batch_size: int | None = None,
        include_prior: bool = True,
    ) -> None:
        pyro.module("tones_generator", network)
        with poutine.mask(mask=include_prior):
            probs_x = transitions("probs_x", HIDDEN_STATES)
        start = torch.full((HIDDEN_STATES,), -torch.inf)
        start[0] = 0.0
        with pyro.plate("sequences", len(sequences), batch_size, dim=-1) as batch:
            y, lengths = sequences[batch], lengths[batch]
            before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
            logits = network(torch.eye(HIDDEN_STATES), before.unsqueeze(-2))
            here = torch.arange(y.shape[1]) < lengths.unsqueeze(-1)
            likelihood = dist.Bernoulli(logits=logits).to_event(1).mask(here.unsqueeze(-1))
            pyro.sample("y", dist.DiscreteHMM(start, probs_x.log(), likelihood), obs=y)

    return model


# --- Other models with enumerated sites ------------------------------------------------------------------------------


def lda(words: Tensor, batch_size: int | None = None) -> None:
    """Topics of documents; ``words`` ``(words a document, documents)``, with four topics and a vocabulary of 40."""
    with pyro.plate("topics", 4):
        weights = pyro.sample("topic_weights", dist.Gamma(1.0 / 4, 1.0))
        topic_words = pyro.sample("topic_words", dist.Dirichlet(torch.ones(40) / 40))
    with pyro.plate("documents", words.shape[1], batch_size) as index:
        doc_topics = pyro.sample("doc_topics", dist.Dirichlet(weights))
        with pyro.plate("words", words.shape[0]):
            topic = pyro.sample("word_topics", dist.Categorical(doc_topics), infer=PARALLEL)
            pyro.sample("doc_words", dist.Categorical(topic_words[topic]), obs=words[:, index])


def lda_plates(words: Tensor, batch_size: int | None = None) -> list[pyro.plate]:
    """The subsampled plate."""
    return [pyro.plate("documents", words.shape[1], subsample_size=batch_size, dim=-1)]


def documents() -> tuple[Tensor]:
    """Twenty words of each of thirty documents."""
    generator = torch.Generator().manual_seed(11)
    topics = (torch.arange(40) // 10 == torch.arange(4)[:, None]).float() + 0.05
    mixed = torch.rand(30, 4, generator=generator) ** 4 @ topics
    return (torch.multinomial(mixed, 20, replacement=True, generator=generator).T.contiguous(),)


def mixture(data: Tensor) -> None:
    """A mixture of two Gaussians with one scale."""
    weights = pyro.sample("weights", dist.Dirichlet(0.5 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        assignment = pyro.sample("assignment", dist.Categorical(weights), infer=PARALLEL)
        pyro.sample("obs", dist.Normal(locs[assignment], scale), obs=data)


def mixture_data() -> tuple[Tensor]:
    """Five points in two clusters."""
    return (torch.tensor([0.0, 1.0, 10.0, 11.0, 12.0]),)


def recapture(history: Tensor, survival: Callable[[int], Any], rho: Tensor) -> None:
    """Whether animals live, z_t, and are seen again, y_t, from when each is first caught."""
    plate = pyro.plate("animals", len(history), dim=-1)
    z, caught = torch.ones(len(history)), torch.zeros(len(history), dtype=torch.bool)
    for t in pyro.markov(range(history.shape[1])):
        phi = survival(t)
        with plate, poutine.mask(mask=caught):
            alive = caught.float() * phi * z + (1 - caught.float())
            z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer=PARALLEL)
            pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=history[:, t])
        caught = caught | history[:, t].bool()


def cjs_1(history: Tensor, sex: Tensor) -> None:
    """One probability of survival."""
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    recapture(history, lambda t: phi, pyro.sample("rho", dist.Uniform(0.0, 1.0)))


def cjs_3(history: Tensor, sex: Tensor) -> None:
    """A random effect of each time."""
    mean = pyro.sample("phi_mean", dist.Uniform(0.0, 1.0))
    sigma = pyro.sample("phi_sigma", dist.Uniform(0.0, 10.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))

    def survival(t: int) -> Tensor:
        if t == 0:
            return torch.tensor(0.5)
        return pyro.sample(
            f"phi_logit_{t}", dist.Normal(mean.log() - (-mean).log1p(), sigma)
        ).sigmoid()

    recapture(history, survival, rho)


def cjs_5(history: Tensor, sex: Tensor) -> None:
    """Fixed effects of sex and of time."""
    beta = sex * pyro.sample("phi_beta", dist.Normal(0.0, 10.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))

    def survival(t: int) -> Tensor:
        gamma = pyro.sample(f"phi_gamma_{t}", dist.Normal(0.0, 10.0)) if t > 0 else 0.0
        return torch.sigmoid(beta + gamma)

    recapture(history, survival, rho)


def captures() -> tuple[Tensor, Tensor]:
    """Histories of 40 animals over 7 occasions, each caught at least once, and their sex."""
    generator = torch.Generator().manual_seed(12)
    first = torch.randint(6, (40, 1), generator=generator)
    died = torch.rand(40, 7, generator=generator) > 0.7
    alive = (died & (torch.arange(7) > first)).cumsum(1) == 0
    seen = (torch.rand(40, 7, generator=generator) < 0.85) & alive & (torch.arange(7) > first)
    sex = torch.bernoulli(torch.full((40,), 0.5), generator=generator)
    return (seen | (torch.arange(7) == first)).float(), sex


# --- The catalogue ---------------------------------------------------------------------------------------------------


def always(model: Callable) -> Callable[[], Callable]:
    """A factory of a model that holds no state."""
    return lambda: model


_ENUMERATED = partial(TraceEnum_ELBO, max_plate_nesting=1)
_ENUMERATED_2 = partial(TraceEnum_ELBO, max_plate_nesting=2)
_TONES = partial(tones, 6, 12, 10)
_HMM: dict[str, Any] = {
    "data": _TONES, "rate": 0.05, "elbo": _ENUMERATED_2, "guided": exposing("probs_"), "steps": 150
}  # fmt: skip
_LDA: dict[str, Any] = {
    "data": documents,
    "elbo": _ENUMERATED_2,
    "guided": exposing("topic_", "doc_topics"),
}
_CJS: dict[str, Any] = {
    "data": captures, "rate": 0.002, "elbo": _ENUMERATED, "guided": exposing("phi", "rho"), "steps": 400
}  # fmt: skip

EXAMPLES: dict[str, Example] = {
    "eight_schools": Example(always(eight_schools), schools),
    "eight_schools_centered": Example(always(eight_schools_centered), schools),
    "coin": Example(always(coin), flips, 0.0005),
    "gmm": Example(
        always(mixture),
        mixture_data,
        0.1,
        elbo=_ENUMERATED,
        guided=exposing("weights", "scale", "locs"),
    ),
    "lda": Example(always(lda), **_LDA),
    "hmm_1": Example(always(hmm_1), **_HMM),
    "cjs_1": Example(always(cjs_1), **_CJS),
    "volatility": Example(reparametrized_volatility, returns, 0.05),
    "forecast_level": Example(LocalLevel, level_series, 0.1),
    "regression_3": Example(partial(Regression, 3), partial(rows, 3, 170), 0.03),
    "regression_10": Example(partial(Regression, 10), partial(rows, 10, 1000), 0.03),
    "network": Example(Network, wave),
    "logistic_regression": Example(always(logistic_regression), labelled_rows),
    "horseshoe": Example(always(horseshoe), sparse_rows),
    "baseball_pooled": Example(always(fully_pooled), players),
    "baseball_not_pooled": Example(always(not_pooled), players),
    "baseball_partial": Example(always(partially_pooled), players),
    "baseball_logit": Example(always(partially_pooled_logit), players),
    "pumps": Example(always(pumps), pump_failures),
    "ragged_groups": Example(always(ragged_groups), padded_groups),
    "lkj": Example(always(covariance), correlated_rows),
    "logistic_growth": Example(always(logistic_growth), populations),
    "random_walk": Example(always(random_walk), walk),
    "sequential_plate": Example(always(sequential_plate), successes),
    "sequential_subsample": Example(
        always(sequential_plate), successes, kwargs={"batch_size": 5}, scored={"batch_size": None}
    ),
    "dmm": Example(Dynamics, masked_tones, 0.0003, steps=400),
    "lda_minibatch": Example(
        always(lda),
        **_LDA,
        kwargs={"batch_size": 10},
        scored={"batch_size": None},
        plates=lda_plates,
    ),
    "hmm_0": Example(always(hmm_0), **{**_HMM, "data": partial(tones, 3, 10, 10)}),
    "hmm_1_minibatch": Example(
        always(hmm_1), **_HMM, kwargs={"batch_size": 3}, scored={"batch_size": None}
    ),
    "hmm_2": Example(always(hmm_2), **_HMM),
    "hmm_4": Example(always(hmm_4), **_HMM),
    "hmm_5": Example(hmm_5, **_HMM),
    "hmm_7": Example(hmm_7, **_HMM),
    "cjs_3": Example(always(cjs_3), **_CJS),
    "cjs_5": Example(always(cjs_5), **_CJS),
}
