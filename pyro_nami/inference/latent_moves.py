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
from pyro.poutine.util import site_is_factor
from torch import Tensor

from pyro_nami.inference.cost import elements_of_a_draw
from pyro_nami.inference.importance import Proposal
from pyro_nami.inference.simulate import Batch, JointDraws, Simulator
from pyro_nami.inference.site_messages import Values
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import over
from pyro_nami.program.isolation import bounded_indices, forked_rng
from pyro_nami.program.many_draws import FEWEST_DRAWS
from pyro_nami.program.masks import is_masked
from pyro_nami.program.memory import rows_in_memory

__all__ = ["GroupMoves", "LatentMoves"]

# Share of draws that have to move for further steps of the chain. By one less this share, too few are left to move. At
# ten times more, every chain has one step.
WORTH = 0.1
# Most joint draws whose chains get all draws of the guide in one run. At ten times more, a poor guide makes most of
# them in vain; at ten times less, a few joint draws take as many runs as many do.
FEW = 1000
# Elements of all tensors computed for a draw of the guide; latents move every k-th call where there are k times
# as many. At ten times more, moves by quadrature take most of the time of training.
WORK = 2**15


class LatentMoves:
    """Moves latents of joint draws, where model and guide can be run for all of them at once.

    Draws are left as they are where the model cannot be run so, or where its density is not that of its simulations
    (scales, factors, masked latents). Where a draw of the guide takes long, as by quadrature,
    latents move in a share of the calls.

    Args:
        simulator: the simulator that made the draws.
        guide: any guide with densities that accepts ``observations=``.
        num: most steps of the chain for each joint draw, with one draw of the guide each.

    Attributes:
        moved: the share of the draws that the latest call moved.

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
        self.moved = 0.0
        self._proposal: Proposal | None = None  # for any data; None where latents cannot be moved
        self._calls, self._period = 0, 1

    @torch.no_grad()
    def __call__(self, draws: JointDraws) -> JointDraws:
        """Returns draws of the simulator with latents moved."""
        if self._proposal is None:
            few = next(draws.in_batches(FEWEST_DRAWS)).to(self.simulator.device)
            with forked_rng(), bounded_indices(), pyro.validation_enabled(False):
                self._proposal = self._checked(few)
        if self._proposal is None:
            return draws
        self._calls += 1
        if self._calls % self._period:
            return draws
        values = (*draws.latents.values(), *draws.observed.values())
        chunks = draws.in_batches(rows_in_memory(sum(value[0].numel() for value in values)))
        at_once = self.num if draws.num <= FEW and self._period == 1 else 1
        with pyro.validation_enabled(False):
            found = [self._chain(self._proposal, chunk, at_once) for chunk in chunks]
        self.moved = torch.cat([moved for _, moved in found]).double().mean().item()
        latents = {
            name: torch.cat([part[name].to(old) for part, _ in found])
            for name, old in draws.latents.items()
        }
        return draws._replace(latents=latents)

    def _checked(self, few: JointDraws) -> Proposal | None:
        """Returns the proposal, if it draws at once, and by the density that the model simulates; None otherwise."""
        target = Target(self.simulator.program, self.guide)
        try:
            proposal = Proposal.of(target, few.observed)
            is_simulated = all(map(_is_simulated, proposal.single.model.values()))
            if not is_simulated or proposal.difference(2) is not None:
                return None
            self._period = math.ceil(elements_of_a_draw(proposal) / WORK)
        except Exception:  # noqa: BLE001  whatever a model does with batch dims that it was not written for
            return None
        return proposal

    def _chain(self, proposal: Proposal, draws: JointDraws, at_once: int) -> tuple[Values, Tensor]:
        """Returns the latents after steps of the chain, and which of the draws moved; none if the model fails.

        Args:
            proposal: the guide.
            draws: joint draws.
            at_once: draws of the guide in one run.
        """
        draws = draws.to(self.simulator.device)
        moved = torch.zeros(draws.num, dtype=torch.bool, device=self.simulator.device)
        try:
            proposal = proposal.on(draws.observed)
            now = {
                name: draws.latents[name].reshape((draws.num,) + shape)
                for name, shape in proposal.shapes.items()
            }
            weights = proposal.log_weights({name: value[None] for name, value in now.items()})[0]
            # A draw whose density underflows was drawn all the same.
            weights = weights.nan_to_num(nan=torch.finfo(weights.dtype).min)
            for i in range(self.num):
                if i % at_once == 0:
                    new = proposal.at_once(at_once)
                proposed = new.log_weights[i % at_once]
                accepted = proposed - weights > torch.rand_like(weights).log()
                accepted &= proposed.isfinite()
                weights = torch.where(accepted, proposed, weights)
                for name, value in now.items():
                    there = new.values[name][i % at_once]
                    now[name] = torch.where(over(accepted, value), there, value)
                moved |= accepted
                if not WORTH <= moved.double().mean() <= 1 - WORTH:
                    break
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            return draws.latents, torch.zeros_like(moved)
        return {n: value.reshape(draws.latents[n].shape) for n, value in now.items()}, moved


class GroupMoves:
    """Moves the latents of groups of simulations, each made at its own arguments; see `LatentMoves`.

    Attributes:
        moved: the share of all draws that the latest call moved.
    """

    def __init__(self, simulator: Simulator, guide: Callable, num: int) -> None:
        self.simulator = simulator
        self.guide = guide
        self.num = num
        self.moved = 0.0
        self._moves: list[LatentMoves] = []  # of the groups

    def __call__(self, groups: list[Batch]) -> list[Batch]:
        """Returns the groups, always the same ones, with latents moved."""
        if not self._moves:
            here = [self.simulator.at(*group.args, **group.kwargs) for group in groups]
            self._moves = [LatentMoves(each, self.guide, self.num) for each in here]
        pairs = list(zip(self._moves, groups))
        found = [group._replace(draws=moves(group.draws)) for moves, group in pairs]
        shares = [moves.moved * group.draws.num for moves, group in pairs]
        self.moved = sum(shares) / sum(group.draws.num for group in groups)
        return found


def _is_simulated(site: Any) -> bool:
    """Whether a site counts in the joint density as it does in simulations."""
    unscaled = bool(torch.as_tensor(site["scale"]).eq(1).all())
    return unscaled and not site_is_factor(site) and (site["is_observed"] or not is_masked(site))
