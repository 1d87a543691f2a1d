"""How chains move along a `TemperedPath`: the choice of temperatures, resampling, and Hamiltonian transitions.

All chains of all data sets move at once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.annealing.tempering import PathValue, TemperedPath
from pyro_nami.inference.site_messages import Values
from pyro_nami.inference.weighted_samples import (
    WeightedSamples,
    log_mean,
    log_mean_error,
    resampled,
)

__all__ = [
    "ChainState",
    "Reached",
    "chains_from",
    "correlation",
    "hamiltonian_step",
    "next_temperatures",
    "resampled_chains",
    "sigmoid_temperatures",
    "spread_of",
    "variance_of_lineages",
]


class ChainState(NamedTuple):
    """Positions of all chains, ``(chains, data sets, size)``, and the log densities there."""

    position: Tensor
    value: PathValue


def hamiltonian_step(
    path: TemperedPath,
    state: ChainState,
    temperature: float | Tensor,
    step_size: Tensor,
    num_steps: int,
) -> tuple[ChainState, Tensor]:
    """Makes one transition with a fresh momentum of unit mass, and steps of sizes ``(data sets, size or 1)``.

    The integrator moves position first (Neal 2011, section 2.3, with the roles of position and momentum exchanged), so
    the densities that the state holds serve at every temperature, and a transition costs ``num_steps`` gradients and
    one density. A trajectory that leaves the finite numbers is rejected.

    Returns:
        The new state, and the acceptance probability of every chain, ``(chains, data sets)``.

    Example:
        >>> from types import SimpleNamespace
        >>> density = lambda z: PathValue(-z.square().sum(-1) / 2, torch.zeros(z.shape[:-1]))  # standard normal
        >>> path, z = SimpleNamespace(value=density, gradient=lambda z, temperature: -z), torch.zeros(100, 1, 1)
        >>> state, acceptance = hamiltonian_step(path, ChainState(z, density(z)), 1.0, torch.tensor([[0.1]]), 10)
        >>> state.position.shape, bool(acceptance.min() > 0.9)
        (torch.Size([100, 1, 1]), True)
    """
    momentum = torch.randn_like(state.position)
    energy = state.value.at(temperature) - momentum.square().sum(-1) / 2
    position = state.position + step_size / 2 * momentum
    for i in range(num_steps):
        position = _finite(position, state.position)
        momentum = momentum + step_size * path.gradient(position, temperature)
        position = position + (step_size if i < num_steps - 1 else step_size / 2) * momentum
    position = _finite(position, state.position)
    value = path.value(position)
    change = value.at(temperature) - momentum.square().sum(-1) / 2 - energy
    # Bad trajectories are rejected; a chain that finds its way out of density zero, change inf, is not.
    change = change.nan_to_num(nan=-torch.inf)
    probability = change.clamp(max=0.0).exp()
    accepted = torch.rand_like(probability) < probability
    position = torch.where(accepted.unsqueeze(-1), position, state.position)
    value = PathValue(*(torch.where(accepted, new, old) for new, old in zip(value, state.value)))
    return ChainState(position, value), probability


def _finite(position: Tensor, origin: Tensor) -> Tensor:
    """Returns the positions, of a chain that has left the finite numbers its origin; its momentum stays bad."""
    return torch.where(position.isfinite().all(-1, keepdim=True), position, origin)


def sigmoid_temperatures(num: int) -> Tensor:
    """Returns inverse temperatures that are dense at both ends, ``(num,)`` in float64.

    They are the logistic function on equal steps from -4 to 4, rescaled to [0, 1], as in Wu et al. 2017, section 5.

    Example:
        >>> sigmoid_temperatures(5).round(decimals=1).tolist()
        [0.0, 0.1, 0.5, 0.9, 1.0]
    """
    values = torch.linspace(-4, 4, num, dtype=torch.float64).sigmoid()
    return (values - values[0]) / (values[-1] - values[0])


def next_temperatures(
    now: Tensor, share: float, log_weights: Tensor, ratio: Tensor, *, growth: float = 0.01
) -> Tensor:
    """Returns the temperatures ``(data sets,)`` up to which this share of the chains that can go on stays effective.

    Args:
        now: temperatures now.
        share: conditional effective sample size, that of chains of one weight, as a share of them.
        log_weights, ratio: of the chains, ``(chains, data sets)``; see `PathValue`.
        growth: least relative growth of a temperature, and the precision of the search.

    Example:
        >>> ratio = torch.tensor([[0.0], [4.0], [-torch.inf]])
        >>> later = next_temperatures(torch.zeros(1), 0.9, torch.zeros(3, 1), ratio)
        >>> weights = (later * ratio[:2]).exp()
        >>> (weights.mean().square() / weights.square().mean()).round(decimals=2)
        tensor(0.9000)
    """
    weights = log_weights.log_softmax(0)
    alive = weights.where(ratio > -torch.inf, -torch.inf).logsumexp(0)

    def enough(step: Tensor) -> Tensor:
        once = weights + step * ratio
        return 2 * once.logsumexp(0) - (once + step * ratio).logsumexp(0) >= alive + math.log(share)

    low, high = torch.finfo(now.dtype).tiny + growth * now, 1 - now
    done = (low >= high) | alive.isneginf() | enough(high)
    while (~done & (high > (1 + growth) * low)).any():
        middle = (low * high).sqrt()
        found = enough(middle)
        low, high = middle.where(found, low), high.where(found, middle)
    return (now + low).where(~done, 1.0)


class Reached(NamedTuple):
    """How far data sets have come: temperatures, the log evidence so far, and its variance, ``(data sets,)``."""

    temperature: Tensor
    log_evidence: Tensor
    variance: Tensor


def chains_from(draws: WeightedSamples, num_chains: int) -> tuple[Values, Reached]:
    """Draws chains by weights of the highest temperature that leaves as many effective."""
    ratio = draws.log_weights
    zeros, share = torch.zeros_like(ratio), num_chains / draws.num_samples
    temperature = next_temperatures(zeros[0], share, zeros, ratio)
    tempered = WeightedSamples(draws.samples, temperature * ratio)
    parts = temperature, tempered.log_evidence, tempered.log_evidence_error.square()
    return tempered.resample(num_chains, smoothed=False), Reached(
        *(part.reshape(-1) for part in parts)
    )


def resampled_chains(
    state: ChainState, log_weights: Tensor, ancestors: Tensor
) -> tuple[ChainState, Tensor, Tensor, Tensor]:
    """Draws chains anew by their weights, in data sets where fewer than half are effective.

    Returns:
        The chains' state and log weights, the variance of the log evidence by this step, and the ancestors.

    ``ancestors`` are the chains at the start that they come from, ``(chains, data sets)``.
    """
    weights = log_weights.softmax(0)
    few = weights.square().sum(0) * len(weights) > 2
    variance = log_mean_error(log_weights).square().where(few, 0.0)
    if not few.any():
        return state, log_weights, variance, ancestors
    same = torch.arange(len(weights), device=weights.device).unsqueeze(-1).expand(weights.shape)
    index = resampled(weights, len(weights)).where(few, same)
    parts = (part.gather(0, index) for part in state.value)
    position = state.position.gather(0, index.unsqueeze(-1).expand(state.position.shape))
    mean = log_mean(log_weights).expand(log_weights.shape)
    return (
        ChainState(position, PathValue(*parts)),
        mean.where(few, log_weights),
        variance,
        ancestors.gather(0, index),
    )


def variance_of_lineages(ancestors: Tensor, log_weights: Tensor) -> Tensor:
    """Returns the variance of the log evidence by the weights of the first chains' descendants, ``(data sets,)``.

    It is the part beyond the variance of the log weights themselves, see `log_mean_error`.

    References:
        Chan and Lai 2013, "A general theory of particle filters in hidden Markov models and some applications"; Lee and
        Whiteley 2018, "Variance estimation in the particle filter".

    Example:
        >>> variance_of_lineages(torch.tensor([[0], [0], [0], [3]]), torch.zeros(4, 1))  # (3/4)^2 + (1/4)^2 - 1/4
        tensor([0.3750])
    """
    weights = log_weights.softmax(0)
    shares = torch.zeros_like(weights).scatter_add(0, ancestors, weights)
    own = log_mean_error(log_weights).square()
    return shares.square().sum(0) - 1 / len(weights) - own


def spread_of(position: Tensor, log_weights: Tensor) -> Tensor:
    """Returns the chains' standard deviations ``(data sets, size)``; 1 where all chains are at one place."""
    weights = log_weights.softmax(0).unsqueeze(-1)
    away = position - (weights * position).sum(0)
    spread = (weights * away.square()).sum(0).sqrt()
    return spread.where(spread > 0, 1.0)


def correlation(before: Tensor, after: Tensor, log_weights: Tensor) -> Tensor:
    """Returns the correlation ``(data sets,)`` of two numbers of weighted chains, ``(chains, data sets)`` each.

    Example:
        >>> correlation(torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([[3.0], [5.0], [-1.0]]), torch.zeros(3, 1))
        tensor([-0.9011], dtype=torch.float64)
    """
    weights = log_weights.double().softmax(0)
    # infinite where a density is zero
    parts = [part.double().clamp(min=-1e30) for part in (before, after)]
    x, y = (part - (weights * part).sum(0) for part in parts)
    return (weights * x * y).sum(0) / ((weights * x * x).sum(0) * (weights * y * y).sum(0)).sqrt()
