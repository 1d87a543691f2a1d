r"""Moves of simulations' latents, to draws of the guide or not at all, after which they are simulations still.

The latents z of a joint draw (z, x) are a draw of p(z | x). So is one of z and k draws of the guide, if it is chosen by

.. math:: \Pr(z_j) \propto p(z_j, x) / q(z_j \mid x),

whatever the guide. A guide that is trained on few simulations thus sees other latents in each epoch, and learns none of
them by heart; no simulation is added, as the data stay.

References:
    Andrieu, Lee and Vihola 2018, "Uniform ergodicity of the iterated conditional SMC and geometric ergodicity of
    particle Gibbs samplers", for the move (iterated sampling importance resampling); Naesseth, Lindsten and Blei 2020,
    "Markovian score climbing", for guides that learn from what they move.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.distributions import MaskedDistribution
from pyro.poutine.util import site_is_factor
from torch import Tensor

from pyro_nami.factors.wrappers import layers
from pyro_nami.inference.importance import Proposal
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.target import Target
from pyro_nami.reading.isolation import forked_rng

__all__ = ["LatentMoves"]

_ELEMENTS = 2**20  # of all sites' values that are in memory at a time


class LatentMoves:
    """Moves latents of joint draws, where model and guide can be run for all of them at once.

    Where they cannot, or where the model's density is not that of its simulations (scales, factors, masked latents),
    draws are left as they are.

    Args:
        simulator: of the draws.
        guide: any guide with densities that accepts ``observations=``.
        num: draws of the guide for each of the joint draws.

    Example:
        >>> import pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0))
        >>> def guide(observations):
        ...     pyro.sample("z", dist.Normal(observations["x"] / 2, 0.5**0.5))  # exact
        >>> simulator = Simulator(model, observed=["x"])
        >>> draws = simulator.draw(1000)
        >>> moved = LatentMoves(simulator, guide, 4)(draws).latents["z"] != draws.latents["z"]
        >>> bool(abs(moved.float().mean() - 0.8) < 0.05)
        True
    """

    def __init__(self, simulator: Simulator, guide: Callable, num: int) -> None:
        self.simulator, self.guide, self.num = simulator, guide, num
        self._able: bool | None = None  # until the first call

    @torch.no_grad()
    def __call__(self, draws: JointDraws) -> JointDraws:
        """Returns the draws with latents moved."""
        if not self.can_move(draws):
            return draws
        with pyro.validation_enabled(False):
            one = sum(value[0].numel() for value in (*draws.latents.values(), *draws.observed.values()))
            parts = torch.arange(draws.num).split(max(1, _ELEMENTS // (self.num + 1) // one))
            moved = [self._moved(draws.select(rows).to(self.simulator.device)) for rows in parts]
        latents = {name: torch.cat([part[name].to(old) for part in moved]) for name, old in draws.latents.items()}
        return draws._replace(latents=latents)

    @torch.no_grad()
    def can_move(self, draws: JointDraws) -> bool:
        """Whether latents of draws like these can be moved, found out once."""
        if self._able is None:
            with forked_rng(), pyro.validation_enabled(False):
                few = draws.select(torch.arange(min(3, draws.num)))
                self._able = self._is_able(few.to(self.simulator.device))
        return self._able

    def _is_able(self, few: JointDraws) -> bool:
        """Whether draws can be moved at once, and have the density that the model simulates."""
        try:
            proposal = self._proposal(few)
            _, difference = proposal.at_once(2)
        except Exception:  # noqa: BLE001  whatever a model does with batch dims that it was not written for
            return False
        return difference is None and all(map(_is_simulated, proposal.single.model.values()))

    def _proposal(self, draws: JointDraws) -> Proposal:
        target = Target(self.simulator.model, self.guide, self.simulator.args, self.simulator.kwargs)
        return Proposal.of(target, draws.observed)

    def _moved(self, draws: JointDraws) -> dict[str, Tensor]:
        """Returns the latents after the move; as they were, where the model fails at one of the guide's draws."""
        try:
            proposal = self._proposal(draws)
            new, _ = proposal.at_once(self.num, checked=False)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            return draws.latents
        old = {name: draws.latents[name].reshape(value[:1].shape) for name, value in new.values.items()}
        log_weights = torch.cat((proposal.log_weights(old), new.log_weights))
        log_weights = log_weights.nan_to_num(nan=-math.inf, neginf=-math.inf)
        log_weights[0] = log_weights[0].clamp(min=torch.finfo(log_weights.dtype).min)  # it was drawn
        chosen = torch.distributions.Categorical(logits=log_weights.T).sample()
        rows = torch.arange(draws.num, device=chosen.device)
        return {
            name: torch.cat((old[name], value))[chosen, rows].reshape(draws.latents[name].shape)
            for name, value in new.values.items()
        }


def _is_simulated(site: Any) -> bool:
    """Whether a site counts in the joint density as it does in simulations."""
    masked = site["mask"] is not None or any(isinstance(fn, MaskedDistribution) for fn in layers(site["fn"]))
    whole = bool(torch.as_tensor(site["scale"]).eq(1).all())
    return whole and not site_is_factor(site) and (site["is_observed"] or not masked)
