"""Hamiltonian chains that begin at weighted draws: exact in the limit, where the weights of a guide are bad.

Many short chains run at once, in coordinates that are whitened by the covariance of the draws. They begin near the
posterior, so that they only have to mend what the guide gets wrong.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyro
import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor

from pyro_nami.annealing.tempering import PathValue, Start, TemperedPath
from pyro_nami.annealing.transitions import ChainState, hamiltonian_step
from pyro_nami.fit.verdict import LEAST_EFFECTIVE
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import Pool, WeightedSamples
from pyro_nami.program.many_draws import FEWEST_DRAWS

__all__ = ["Chained", "run_chains"]

CHAINS = 128  # that run at once; a run of the model for 128 draws takes hardly longer than for one
FEWEST = 16  # transitions after which chains are compared
MOST_R_HAT = 1.05  # of chains that agree
ACCEPTANCE = 0.8  # of a transition, that the step size is chosen for
FIRST_STEP = 0.3  # in standard deviations
ADAPTATION = 0.5  # change of the log step size by an acceptance that is off by 1
# length of a trajectory, in standard deviations, at which both ends are independent, of a Normal
QUARTER = math.pi / 2
MOST_STEPS = 32  # of a trajectory
SHRINKAGE = 0.05  # of correlations towards zero: what few draws tell of a matrix


class Chained(NamedTuple):
    """Draws of chains.

    Attributes:
        drawn: the draws, of equal weight.
        effective: how many are effective, of the number that has fewest.
        r_hat: the largest split R-hat of a number.
        agree: whether the chains agree, with enough effective draws.
    """

    drawn: WeightedSamples
    effective: float
    r_hat: float
    agree: bool


class _Whitened(NamedTuple):
    """A path of densities in other coordinates w: position = center + root w."""

    path: TemperedPath
    center: Tensor
    root: Tensor

    def position(self, whitened: Tensor) -> Tensor:
        return self.center + whitened @ self.root.mT

    def value(self, whitened: Tensor) -> PathValue:
        value = self.path.value(self.position(whitened))
        return PathValue(*(part.nan_to_num(-torch.inf, -torch.inf, -torch.inf) for part in value))

    def gradient(self, whitened: Tensor, temperature: float | Tensor) -> Tensor:
        slope = self.path.gradient(self.position(whitened), temperature) @ self.root
        return slope.nan_to_num(0.0, 0.0, 0.0)


# Without validation a trajectory may leave the support of a distribution, where it is rejected.
@torch.no_grad()
@pyro.validation_enabled(False)
def run_chains(
    target: Target,
    drawn: WeightedSamples,
    num: int,
    seconds: float,
    tick: Callable[[int], None],
) -> Chained:
    """Returns draws of chains that begin at weighted draws, and go on until they agree.

    Args:
        target: the model and its data.
        drawn: weighted draws of its latents.
        num: of draws, at least.
        seconds: of processor time, after which no more transitions begin.
        tick: called after each transition, with the number made.

    Raises:
        NotImplementedError: discrete latents, or a support that no bijection is known to.
        ValueError: a model that does not run for many draws.
    """
    target = replace(target, guide=None, prior_share=0.0)
    given = drawn.resample(max(num, CHAINS))
    few = {name: value[:FEWEST_DRAWS] for name, value in given.items()}
    start = Start.of(target, {}, few).checked(FEWEST_DRAWS, slice(0, 1))
    start = replace(start, given=given)
    many, position = start.path(max(num, CHAINS), slice(0, 1))
    path = _Whitened(
        replace(many, extent=start.target.extent(CHAINS, slice(0, 1))), *_moments(position[:, 0])
    )
    first = torch.linalg.solve_triangular(
        path.root, (position[:CHAINS] - path.center).mT, upper=False
    ).mT
    state = ChainState(first, path.value(first))
    length, log_step = max(FEWEST, math.ceil(num / CHAINS)), math.log(FIRST_STEP)
    kept, begun, found = list[Tensor](), time.process_time(), None
    while found is None or not found.agree and time.process_time() - begun < seconds:
        for _ in range(length):
            size = math.exp(log_step) * torch.ones_like(first[0, :, :1])
            most = min(MOST_STEPS, max(1, round(QUARTER / math.exp(log_step))))
            # lengths differ, against resonance
            count = int(torch.randint(max(1, most // 2), most + 1, ()))
            state, accepted = hamiltonian_step(path, state, 1.0, size, count)  # type: ignore[arg-type]
            if len(kept) < length:
                log_step += ADAPTATION * (float(accepted.mean()) - ACCEPTANCE)
            kept.append(state.position)
            tick(len(kept))
        if len(kept) > length:  # of which the first half is forgotten
            found = _Diagnosed.of(torch.stack(kept[len(kept) // 2 :])[:, :, 0])
    return _chained(path, kept[-length:], found, drawn)


def _moments(position: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean of positions ``(draws, numbers)``, and a Cholesky factor of their covariance."""
    center = position.mean(0)
    off = position - center
    covariance = off.mT @ off / len(off)
    scale = covariance.diagonal().clamp(min=torch.finfo(off.dtype).tiny)
    shrinkage = max(SHRINKAGE, min(1.0, len(scale) / len(off)))
    covariance = (1 - shrinkage) * covariance + shrinkage * scale.diag_embed()
    return center, torch.linalg.cholesky(covariance)


class _Diagnosed(NamedTuple):
    """How well chains agree."""

    effective: float
    r_hat: float

    @classmethod
    def of(cls, numbers: Tensor) -> _Diagnosed:
        """Returns the worst of several numbers, ``(transitions, chains, numbers)``."""
        numbers = numbers.double()
        r_hat = split_gelman_rubin(numbers, chain_dim=1, sample_dim=0)
        effective = effective_sample_size(numbers, chain_dim=1, sample_dim=0)
        return cls(float(effective.min()), float(r_hat.max()))

    @property
    def agree(self) -> bool:
        """Whether the chains do."""
        return self.r_hat <= MOST_R_HAT and self.effective >= LEAST_EFFECTIVE


def _chained(
    path: _Whitened, kept: Sequence[Tensor], found: _Diagnosed, drawn: WeightedSamples
) -> Chained:
    """Returns the draws of positions ``(chains, 1, numbers)`` after each transition."""
    parts = [path.path.at(path.position(each)).values for each in kept]
    samples = {
        name: torch.cat([part[name] for part in parts]).reshape(-1, *value.shape[1:])
        for name, value in drawn.samples.items()
    }
    count = len(kept) * CHAINS
    effective = min(found.effective, float(count))
    own = torch.full_like(drawn.log_evidence, 1 / effective - 1 / count)
    pool = Pool.unknown(drawn.log_evidence)._replace(draws=own)
    weights = drawn.log_evidence.expand(count)
    result = WeightedSamples(samples, weights, drawn.plates, pool)
    return Chained(result, effective, found.r_hat, found.agree)
