"""The Bayesian Gaussian mixture of the paper's Figure 7: its models, its simulations, and a real data set for it.

The models are one and the same with the points in a plate, with a site for each, and with every z_n summed out.

Webb et al. 2018 (section 3.3, supplement D.3) name its variables: K = 3 components in the plane with locations mu_k,
scales sigma_1k and sigma_2k and correlation rho_k, weights phi, and z_n, which component point n is of. The paper does
not say the priors; these are ours. Data are taken to be about standardized.

    phi ~ Dirichlet(2, 2, 2)           sigma_1k, sigma_2k ~ InverseGamma(5, 2), mean 0.5 and sd 0.3
    mu_k ~ N(0, 1.5^2) each            rho_k = 2 r_k - 1, r_k ~ Kumaraswamy(2, 2.5), with its mode at rho_k = 0

A Kumaraswamy variable lies between 0 and 1, so the site ``rho`` is r_k. Every component has the same prior: nothing
orders them, so that posteriors have up to six copies of every mode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from pyro_nami import InferenceCompilation
from pyro_nami.inference import Simulator

COMPONENTS = 3
EPOCH, BATCH = 10, 200  # mini-batches, and simulations in each
FAITHFUL = Path(__file__).parent.parent / "data" / "faithful.csv"
GLOBALS = ("phi", "rho", "sigma_1", "sigma_2", "mu")


class Components(NamedTuple):
    """Weights ``(*batch, 3)``, locations ``(*batch, 3, 2)``, Cholesky factors of covariances ``(*batch, 3, 2, 2)``."""

    weights: Tensor
    locs: Tensor
    trils: Tensor

    def of(self, z: Tensor) -> dist.MultivariateNormal:
        """Returns the distribution of points of components ``z``, whose shape broadcasts with the batch."""
        code = one_hot(z, COMPONENTS).to(self.locs.dtype)
        loc = (code[..., None] * self.locs).sum(-2)
        tril = (code[..., None, None] * self.trils).sum(-3)
        return dist.MultivariateNormal(loc, scale_tril=tril, validate_args=False)

    def log_density(self, points: Tensor) -> Tensor:
        """Returns log p(x | all but z) of points ``(points, 2)``, ``(*batch, points)``, in nats."""
        # Two rows of forward substitution, in the open: triangular solves of many small matrices are slow.
        offsets = points[:, None, :] - self.locs[..., None, :, :]  # (*batch, points, components, 2)
        trils = self.trils[..., None, :, :, :]
        first = offsets[..., 0] / trils[..., 0, 0]
        second = (offsets[..., 1] - trils[..., 1, 0] * first) / trils[..., 1, 1]
        log_det = (trils[..., 0, 0] * trils[..., 1, 1]).log() + math.log(2 * math.pi)
        parts = -0.5 * (first.square() + second.square()) - log_det
        return torch.logsumexp(parts + self.weights[..., None, :].log(), -1)


def components_of(values: Mapping[str, Tensor]) -> Components:
    """Returns the components at values of the sites in `GLOBALS`, ``(*batch, *event)``."""
    correlation = 2 * values["rho"] - 1
    first, second = values["sigma_1"], values["sigma_2"]
    rest = second * (1 - correlation.square()).clamp(min=1e-6).sqrt()
    rows = torch.stack([first, torch.zeros_like(first), correlation * second, rest], -1)
    return Components(values["phi"], values["mu"], rows.unflatten(-1, (2, 2)))


def sample_components(like: Tensor) -> Components:
    """Samples everything but the points, on the device and of the type of ``like``."""
    ones = like.new_ones(COMPONENTS)
    spread = dist.InverseGamma(5 * ones, 2 * ones).to_event(1)
    values = {
        "phi": pyro.sample("phi", dist.Dirichlet(2 * ones)),
        "rho": pyro.sample("rho", dist.Kumaraswamy(2 * ones, 2.5 * ones).to_event(1)),
        "sigma_1": pyro.sample("sigma_1", spread),
        "sigma_2": pyro.sample("sigma_2", spread),
        "mu": pyro.sample("mu", dist.Normal(like.new_zeros(COMPONENTS, 2), 1.5).to_event(2)),
    }
    return components_of(values)


def plated(x: Tensor) -> None:
    """The mixture with its points ``x``, ``(N, 2)``, in a plate."""
    components = sample_components(x)
    with pyro.plate("points", x.shape[-2]):
        z = pyro.sample("z", dist.Categorical(components.weights))
        pyro.sample("x", components.of(z), obs=x)


def grounded(x: Tensor) -> None:
    """The same without a plate: a site ``z_n`` and a site ``x_n`` for every point."""
    components = sample_components(x)
    for n in range(x.shape[-2]):
        z = pyro.sample(f"z_{n}", dist.Categorical(components.weights))
        pyro.sample(f"x_{n}", components.of(z), obs=x[..., n, :])


def summed(x: Tensor) -> None:
    """The same with every z_n summed out, for NUTS."""
    components = sample_components(x)
    pyro.factor("x", components.log_density(x).sum(-1))


# ---- simulations


class Simulations:
    """Mini-batches of 2,000 data sets, in a new order in every epoch; an iterable for `InferenceCompilation.fit`.

    Other data sets are drawn whenever validation has stopped improving. Which ones follows from a seed and the history
    alone, so that an interrupted run goes on with the same.
    """

    def __init__(
        self, simulator: Simulator, compilation: InferenceCompilation, seed: int, plate: bool
    ) -> None:
        self.simulator, self.compilation, self.seed, self.plate = (
            simulator,
            compilation,
            seed,
            plate,
        )
        self.number, self.kept = -1, self.simulator.draw(1)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        number = self.times()
        if number != self.number:
            self.number, self.kept = (
                number,
                draw(self.simulator, EPOCH * BATCH, 1000 * self.seed + number),
            )
        order = torch.randperm(EPOCH * BATCH, device=self.kept.latents["phi"].device)
        for index in order.split(BATCH):
            yield by_site(self.kept.select(index), self.plate)

    def times(self) -> int:
        """Returns how many epochs so far ended without a new lowest validation loss."""
        losses = [loss for _, loss in self.compilation.history.validation]
        return sum(now >= min(losses[:i]) for i, now in enumerate(losses) if i)


class OrderedSimulations:
    """Simulations whose size changes from step to step, their components in the order of the first coordinate of mu.

    The prior does not tell the labels apart, so the posterior of components in this order says all, and has one mode
    for the six of the other. An iterable for `InferenceCompilation.fit`.
    """

    def __init__(
        self,
        simulator: Simulator,
        arguments: Callable[[int], tuple[tuple, dict[str, Any]]],
        batch: int,
    ) -> None:
        self.simulator, self.arguments, self.batch = simulator, arguments, batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in itertools.count():
            args, kwargs = self.arguments(step)
            draws = self.simulator.at(*args, **kwargs).draw(self.batch)
            yield {**in_order(draws.latents), **draws.observed}


def in_order(latents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns latents of `plated`, ``(draws, *plates, *event)``, with components sorted by mu's first coordinate."""
    order = latents["mu"][..., 0].argsort(-1)
    found = {name: latents[name].gather(-1, order) for name in GLOBALS if name != "mu"}
    found["mu"] = latents["mu"].gather(-2, order.unsqueeze(-1).expand(latents["mu"].shape))
    ranks = order.argsort(-1).squeeze(1)
    return {**found, "z": ranks.gather(-1, latents["z"].long())}


def draw(simulator: Simulator, count: int, seed: int) -> Any:
    """Returns simulations from a seed of their own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return simulator.draw(count)


def by_site(draws: Any, plate: bool) -> dict[str, Tensor]:
    """Returns simulations as site -> values, of the model with a plate or of the one without."""
    values = {**draws.latents, **draws.observed}
    return values if plate else ground(values)


def ground(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns simulations of `plated`, ``(draws, *plates, *event)`` by site, as those of `grounded`."""
    result = {name: values[name].squeeze(1) for name in GLOBALS}
    for name in ("z", "x"):
        result |= {f"{name}_{n}": part for n, part in enumerate(values[name].unbind(1))}
    return result


# ---- real data


def load_faithful() -> Tensor:
    """Returns Old Faithful's eruptions and waiting times, standardized, ``(272, 2)``."""
    raw = torch.from_numpy(np.loadtxt(FAITHFUL, delimiter=",", skiprows=1))
    return ((raw - raw.mean(0)) / raw.std(0)).float()


def summarize(draws: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Returns quantities ``(draws,)`` that do not depend on how components are labelled.

    Args:
        draws: of the sites in `GLOBALS`, ``(draws, *event)``.
        x: data, ``(points, 2)``.
    """
    components = components_of(draws)
    weights, order = components.weights.sort(-1, descending=True)
    largest = order[:, :1]
    mean = (components.weights[..., None] * components.locs).sum(-2)
    between = (components.weights * (components.locs - mean[:, None]).prod(-1)).sum(-1)
    within = (components.weights * components.trils[..., 0, 0] * components.trils[..., 1, 0]).sum(
        -1
    )
    return {
        "largest weight": weights[:, 0],
        "second weight": weights[:, 1],
        "least weight": weights[:, 2],
        "eruption of the largest": components.locs[..., 0].gather(1, largest)[:, 0],
        "waiting of the largest": components.locs[..., 1].gather(1, largest)[:, 0],
        "correlation in the largest": 2 * draws["rho"].gather(1, largest)[:, 0] - 1,
        "mean of eruptions": mean[:, 0],
        "mean of waiting": mean[:, 1],
        "covariance of the two": between + within,
        "log likelihood a point": components.log_density(x).mean(-1),
    }
