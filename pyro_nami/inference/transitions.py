"""Markov transitions that leave a density of `TemperedPath` as it is: Hamiltonian Monte Carlo.

All chains and data sets move at once. Change this module for another kernel or another rule for its step size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.inference.tempering import PathValue, TemperedPath

__all__ = ["ChainState", "adapted", "hamiltonian_step"]

_LEAST_RATE = 0.05  # of adaptation


class ChainState(NamedTuple):
    """Positions of all chains, ``(chains, data sets, size)``, and the log densities there."""

    position: Tensor
    value: PathValue


def hamiltonian_step(
    path: TemperedPath, state: ChainState, temperature: float, step_size: Tensor, num_steps: int
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


def adapted(step_size: Tensor, count: int, acceptance: Tensor, target: float | None) -> Tensor:
    """Returns the step sizes ``(data sets,)`` after ``count`` transitions; without a ``target``, as they were.

    log step += rate * (acceptance - target), with a rate that falls to a floor, as densities change all the way.
    """
    if target is None:
        return step_size
    rate = max(_LEAST_RATE, count**-0.5)
    return step_size * torch.exp(rate * (acceptance - target))
