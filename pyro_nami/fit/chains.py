"""Hamiltonian chains that begin at weighted draws: exact in the limit, where the weights of a guide are bad.

Many short chains run at once, in coordinates that are whitened by the covariance of the draws. They begin near the
posterior, so that they only have to mend what the guide gets wrong.

References:
    Vehtari et al. 2021, Rank-normalization, folding, and localization: an improved R-hat.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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

__all__ = ["Chains", "run_chains"]

CHAINS = 128  # that run at once; a run of the model for 128 draws takes hardly longer than for one
# Effective share of the draws that chains begin at. Where all began at one, the R-hat of 388 numbers was 3.9 after
# as many seconds, in place of 1.9.
DIVERSE = 0.25
FEWEST = 16  # transitions of a round
COMPARED = 2  # rounds in both coordinates, after which chains run in the better ones alone
MOST_R_HAT = 1.05  # of chains that agree
ACCEPTANCE = 0.8  # of a transition, that the step size is chosen for
FIRST_STEP = 0.3  # in standard deviations
ADAPTATION = 0.5  # change of the log step size by an acceptance that is off by 1
# length of a trajectory, in standard deviations, at which both ends are independent, of a Normal
QUARTER = math.pi / 2
MOST_STEPS = 32  # of a trajectory
SHRINKAGE = 0.05  # of correlations towards zero: what few draws tell of a matrix


class _Whitened(NamedTuple):
    """A path of densities in other coordinates w: position = center + root w."""

    path: TemperedPath
    center: Tensor
    root: Tensor

    def state(self, position: Tensor) -> ChainState:
        """Returns chains at positions, in the other coordinates."""
        off = (position - self.center)[:, 0].mT
        whitened = torch.linalg.solve_triangular(self.root, off, upper=False).mT[:, None]
        return ChainState(whitened, self.value(whitened))

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
    tick: Callable[[], Any],
) -> Chains:
    """Returns chains that began at weighted draws, and went on until they agreed, or time was up.

    They move in latents as the model has them, or in units of their priors' locations and scales, which other latents
    may move (a non-centred parameterization): in the coordinates in which chains agree better after some rounds.

    Args:
        target: the model and its data.
        drawn: weighted draws of its latents.
        num: of draws, at least.
        seconds: of processor time, after which no more transitions begin.
        tick: called after each transition.

    Raises:
        NotImplementedError: discrete latents, or a support that no bijection is known to.
        ValueError: a model that does not run for many draws.
    """
    target = replace(target, guide=None, prior_share=0.0)
    given = _spread(drawn).resample(max(num, CHAINS), smoothed=False)
    few = {name: value[:FEWEST_DRAWS] for name, value in given.items()}
    start = Start.of(target, {}, few).checked(FEWEST_DRAWS, slice(0, 1))
    start = replace(start, given=given)
    runs = [Chains.of(start, max(num, CHAINS), each, tick) for each in (True, False)]
    begun = time.process_time()
    while True:
        chains = min(runs, key=lambda each: (each.rounds >= COMPARED, each.r_hat))
        chains.run()
        if chains.agree or time.process_time() - begun > seconds:
            break
    return min(runs, key=lambda each: (not each.agree, each.r_hat))


@dataclass
class Chains:
    """Chains in some coordinates.

    They run in rounds, each twice as long as the one before, and in coordinates that are whitened by it. In the first
    half of a round the step size is found.

    Attributes:
        path: of the densities.
        now: where the chains are, ``(chains, 1, numbers)``.
        seen: the positions that whiten the next round, ``(positions, numbers)``.
        length: transitions that are kept of the next round.
        tick: called after each transition.
        kept: positions after each transition of the last round.
        rounds: that were run.
        r_hat: the largest split R-hat of a number in the last round, by ranks.
        effective: how many draws of the last round are effective, of the number that has fewest.
    """

    path: TemperedPath
    now: Tensor
    seen: Tensor
    length: int
    tick: Callable[[], Any]
    kept: list[Tensor] = field(default_factory=list)
    rounds: int = 0
    r_hat: float = math.inf
    effective: float = 0.0

    @classmethod
    def of(cls, start: Start, num: int, standardized: bool, tick: Callable[[], Any]) -> Chains:
        """Returns chains at a start of ``num`` draws, in units of the priors' scales if ``standardized``."""
        rows, length = slice(0, 1), max(FEWEST, math.ceil(num / CHAINS))
        path, position = start.path(num, rows, standardized)
        path = replace(path, extent=start.target.extent(CHAINS, rows))
        return cls(path, position[:CHAINS], position[:, 0], length, tick)

    @property
    def agree(self) -> bool:
        """Whether the chains do, with enough effective draws."""
        return self.r_hat <= MOST_R_HAT and self.effective >= LEAST_EFFECTIVE

    def run(self) -> None:
        """Runs the next round."""
        path = _Whitened(self.path, *_moments(self.seen))
        state, log_step, self.kept = path.state(self.now), math.log(FIRST_STEP), []
        for i in range(2 * self.length):
            size = math.exp(log_step) * torch.ones_like(self.now[0, :, :1])
            most = min(MOST_STEPS, max(1, round(QUARTER / math.exp(log_step))))
            # lengths differ, against resonance
            count = int(torch.randint(max(1, most // 2), most + 1, ()))
            state, accepted = hamiltonian_step(path, state, 1.0, size, count)  # type: ignore[arg-type]
            if i < self.length:
                log_step += ADAPTATION * (float(accepted.mean()) - ACCEPTANCE)
            else:
                self.kept.append(path.position(state.position))
            self.tick()
        self.now, self.seen = self.kept[-1], torch.cat(self.kept)[:, 0]
        numbers = torch.stack(self.kept)[:, :, 0].double()
        folded = (numbers - numbers.flatten(0, 1).median(0).values).abs()
        self.r_hat = max(_r_hat(numbers), _r_hat(folded))
        self.effective = float(effective_sample_size(numbers, chain_dim=1, sample_dim=0).min())
        self.rounds += 1
        self.length *= 2

    @torch.no_grad()
    def draws(self, drawn: WeightedSamples, num: int) -> WeightedSamples:
        """Returns the last draws, of equal weight and at least ``num``, in place of weighted ones."""
        kept = self.kept[-math.ceil(num / CHAINS) :]
        parts = [self.path.at(each).values for each in kept]
        samples = {
            name: torch.cat([part[name] for part in parts]).reshape(-1, *value.shape[1:])
            for name, value in drawn.samples.items()
        }
        count = len(kept) * CHAINS
        effective = min(self.effective, float(count))
        own = torch.full_like(drawn.log_evidence, 1 / effective - 1 / count)
        pool = Pool.unknown(drawn.log_evidence)._replace(draws=own)
        weights = drawn.log_evidence.expand(count)
        return WeightedSamples(samples, weights, drawn.plates, pool)


def _spread(drawn: WeightedSamples) -> WeightedSamples:
    """Returns the draws with tempered weights, under which enough of them are effective.

    Chains that all begin at one draw have no spread to be whitened by, and do not leave it for long.
    """
    while float(drawn.effective_sample_size) < DIVERSE * drawn.num_samples:
        drawn = WeightedSamples(drawn.samples, drawn.log_weights / 2, drawn.plates)
    return drawn


def _moments(position: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean of positions ``(draws, numbers)``, and a Cholesky factor of their covariance."""
    center = position.mean(0)
    off = position - center
    covariance = off.mT @ off / len(off)
    scale = covariance.diagonal().clamp(min=torch.finfo(off.dtype).tiny)
    shrinkage = max(SHRINKAGE, min(1.0, len(scale) / len(off)))
    covariance = (1 - shrinkage) * covariance + shrinkage * scale.diag_embed()
    return center, torch.linalg.cholesky(covariance)


def _r_hat(numbers: Tensor) -> float:
    """Returns the largest split R-hat of ``(transitions, chains, numbers)``, of Normal scores: tails may be heavy."""
    ranks = numbers.flatten(0, 1).argsort(0).argsort(0).double()
    scores = torch.special.ndtri((ranks + 0.625) / (len(ranks) + 0.25))  # as of Blom 1958
    scores = scores.reshape(numbers.shape)
    return float(split_gelman_rubin(scores, chain_dim=1, sample_dim=0).max())
