r"""Moves of the latents of simulations to draws of the guide, which leave the joint distribution unchanged.

The latents z of a simulation (z, x) are a draw from p(z | x). They still are if a draw z' of the
guide replaces them with probability

.. math:: \min(1, w(z') / w(z)), \quad w(z) = p(z, x) / q(z \mid x),

for any guide. A guide that is trained on few simulations thus sees other latents in each epoch, and
overfits none of them. The data stay, so no simulation is added. Near an exact guide one draw moves
nearly all.

References:
    Tierney 1994, "Markov chains for exploring posterior distributions", for the move (an
    independence chain); Naesseth, Lindsten and Blei 2020, "Markovian score climbing", for guides
    that learn from what they move.
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
from pyro_nami.inference.cost import elements_of_a_draw
from pyro_nami.inference.importance import Proposal
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.target import Target
from pyro_nami.program.isolation import bounded_indices, forked_rng

__all__ = ["LatentMoves"]

_ELEMENTS = 2**20  # of all sites' values that are in memory at a time
# at a time and in all, as what is derived may be off by rounding at draws of a poor guide
_TRIES = 2, 10
_MOVED = 0.8  # share of draws after whose move no further draws of the guide are made
# share of draws that are moved first, and of these that have to move, or others are left
_FIRST, _WORTH = 0.1, 0.1
# draws that are moved first, as fewer take as long, and for which draws of the guide are made at once
_FEWEST = 1000
# elements of all tensors computed for a draw of the guide, of more of which moves are rarer
_WORK = 2**15


class LatentMoves:
    """Moves latents of joint draws, where model and guide can be run for all of them at once.

    Where they cannot, or where the model's density is not that of its simulations (scales, factors, masked latents),
    draws are left as they are; most of them also as long as the guide is so poor that hardly any move. Where a draw of
    the guide takes long, as where conditionals are found by quadrature, draws move in a share of the calls.

    Args:
        simulator: of the draws.
        guide: any guide with densities that accepts ``observations=``.
        num: draws of the guide for each of the joint draws, at most; fewer where these have moved most.

    Example:
        >>> import pyro.distributions as dist
        >>> def model():
        ...     pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0))
        >>> def guide(observations):
        ...     pyro.sample("z", dist.Normal(observations["x"] / 2, 0.5**0.5))  # exact
        >>> simulator = Simulator(model, observed=["x"])
        >>> draws = simulator.draw(1000)
        >>> moved = LatentMoves(simulator, guide, 4)(draws).latents["z"] != draws.latents["z"]
        >>> moved.float().mean()
        tensor(1.)
    """

    def __init__(self, simulator: Simulator, guide: Callable, num: int) -> None:
        self.simulator = simulator
        self.guide = guide
        self.num = num
        self._proposal: Proposal | None = None  # for any data; none where latents cannot be moved
        self._state: dict[str, Any] = {}

    @torch.no_grad()
    def __call__(self, draws: JointDraws, state: dict[str, Any] | None = None) -> JointDraws:
        """Returns the draws with latents moved; ``state`` is what another such is to know to go on alike.

        It tells what share of the draws ``moved`` the last time.
        """
        state = self._state if state is None else state
        if self._proposal is None and state.setdefault("tries", _TRIES[1]):
            with forked_rng(), bounded_indices(), pyro.validation_enabled(False):
                few = draws.select(torch.arange(min(3, draws.num)))
                self._proposal = self._found(few.to(self.simulator.device), state)
        if self._proposal is None:
            return draws
        state["due"] += state["share"]
        if state["due"] < 1:
            return draws
        state["due"] -= 1
        with pyro.validation_enabled(False):
            one = sum(
                value[0].numel() for value in (*draws.latents.values(), *draws.observed.values())
            )
            first = max(math.ceil(_FIRST * draws.num), min(_FEWEST, draws.num))
            rest = (
                torch.arange(first, draws.num).split(max(1, _ELEMENTS // one))
                if first < draws.num
                else ()
            )
            found, moved = [], 0.0
            for rows in (torch.arange(first), *rest):
                at_once = self.num if len(rows) <= _FEWEST and state["share"] == 1 else 1
                latents, share = self._moved(
                    self._proposal, draws.select(rows).to(self.simulator.device), at_once
                )
                found.append(latents)
                moved += share * len(rows) / draws.num
                if share < _WORTH:
                    found.append(draws.select(torch.arange(int(rows[-1]) + 1, draws.num)).latents)
                    break
        state["moved"] = moved
        latents = {
            name: torch.cat([part[name].to(old) for part in found])
            for name, old in draws.latents.items()
        }
        return draws._replace(latents=latents)

    def _found(self, few: JointDraws, state: dict[str, Any]) -> Proposal | None:
        """Returns what proposes, if draws can be moved at once, and have the density that the model simulates; notes in
        what share of the calls, and how often that is to be tried again.
        """
        target = Target(
            self.simulator.model, self.guide, self.simulator.args, self.simulator.kwargs
        )
        try:
            proposal = Proposal.of(target, few.observed)
            if not all(map(_is_simulated, proposal.single.model.values())):
                state["tries"] = 0
            elif any(proposal.at_once(2)[1] is None for _ in range(_TRIES[0])):
                state.setdefault("share", min(1.0, _WORK / elements_of_a_draw(proposal)))
                state.setdefault("due", 0.0)
                return proposal
        except Exception:  # noqa: BLE001  whatever a model does with batch dims that it was not written for
            pass
        state["tries"] = max(0, state["tries"] - 1)
        return None

    def _moved(
        self, proposal: Proposal, draws: JointDraws, at_once: int
    ) -> tuple[dict[str, Tensor], float]:
        """Returns the latents after the move, as they were where the model fails at one of the guide's draws, and the
        share that moved; so many draws are made at a time.
        """
        latents, share = draws.latents, 0.0
        try:
            proposal = proposal.on(draws.observed)
            now = {
                name: latents[name].reshape((1, draws.num) + shape)
                for name, shape in proposal.shapes.items()
            }
            weights = proposal.log_weights(now).nan_to_num(nan=-math.inf)
            weights = weights.clamp(min=torch.finfo(weights.dtype).min)  # it was drawn
            moved = torch.zeros_like(weights, dtype=torch.bool)
            for made in range(self.num):
                if made % at_once == 0:
                    new, _ = proposal.at_once(at_once, checked=False)
                this = slice(made % at_once, made % at_once + 1)
                its = new.log_weights[this]
                better = (its - weights > torch.rand_like(weights).log()) & its.isfinite()
                weights, moved = torch.where(better, its, weights), moved | better
                for name, value in now.items():
                    taken = better.reshape(better.shape + (1,) * (value.dim() - better.dim()))
                    now[name] = torch.where(taken, new.values[name][this], value)
                latents = {name: value.reshape(latents[name].shape) for name, value in now.items()}
                share = float(moved.double().mean())
                if share >= _MOVED or share < _WORTH:
                    break
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            pass
        return latents, share


def _is_simulated(site: Any) -> bool:
    """Whether a site counts in the joint density as it does in simulations."""
    masked = site["mask"] is not None or any(
        isinstance(fn, MaskedDistribution) for fn in layers(site["fn"])
    )
    whole = bool(torch.as_tensor(site["scale"]).eq(1).all())
    return whole and not site_is_factor(site) and (site["is_observed"] or not masked)
