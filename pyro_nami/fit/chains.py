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
from pyro_nami.deriving.bent_vector import tempered
from pyro_nami.fit.verdict import LEAST_EFFECTIVE
from pyro_nami.inference.cost import Count
from pyro_nami.inference.site_messages import joined
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import Pool, WeightedSamples
from pyro_nami.program.many_draws import FEWEST_DRAWS

__all__ = ["MOST_R_HAT", "Chains", "largest_r_hat", "run_chains"]

# Elements that take as long to compute as an operation takes by itself. A run of more elements takes longer for more
# chains, and fewer chains make more transitions in a time: an item response model has an R-hat of 1.02 after 30 s by 26
# chains, and of 1.06 by 88, as 10,000 elements would give it.
AN_OPERATION = 3_000
# Largest R-hat of chains that agree. At 1.5, the means of chains differ by a standard deviation; for 1.005, it takes a
# hundred effective draws of each chain.
MOST_R_HAT = 1.05
# Factors for the size of a step and for the number of steps, of transitions in turn. Where the density is narrow, only
# small steps are accepted (2 of 84 chains did not move at all without). Along tails, chains move by long trajectories:
# a model of 147 numbers comes to an R-hat of 1.05 in 16 s, where it is 1.12 after 20 s without.
VARIED = (0.25, 1), (1, 1), (1, 4), (1, 1)
# Most steps of a trajectory. At ten times more, a round of small steps takes all the time that there is; at ten times
# less, chains move by random walks.
MOST_STEPS = 32
# Share of the draws that is effective where chains begin, at least. If all begin at one draw, they have no spread to be
# whitened by, and do not leave it for long: the R-hat of 388 numbers was 3.9, and 1.9 from draws with this share.
SPREAD = 0.25
_ROWS = slice(0, 1)  # of data sets


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

    Args:
        target: the model and its data.
        drawn: weighted draws of its latents.
        num: of draws, at least.
        seconds: of processor time, in which the last round is to end.
        tick: called after each transition.

    Raises:
        NotImplementedError: discrete latents, or a support that no bijection is known to.
        ValueError: a model that does not run for many draws.
    """
    target = replace(target, guide=None, prior_share=0.0)
    weights = tempered(drawn.log_weights, SPREAD)
    wide = WeightedSamples(drawn.samples, weights, drawn.plates)
    given = wide.resample(drawn.num_samples, smoothed=False)
    few = {name: value[:FEWEST_DRAWS] for name, value in given.items()}
    start = Start.of(target, {}, few).checked(FEWEST_DRAWS, _ROWS)
    count = _number_of_chains(*start.path(FEWEST_DRAWS, _ROWS))
    chains = Chains(replace(start, given=given), count, num, tick)
    end = time.process_time() + seconds
    while True:
        before = time.process_time()
        try:
            chains.run()
        except ValueError:  # draws at the edge of a support have no place in other coordinates
            if not chains.kept:
                raise
            return chains
        now = time.process_time()
        # the next round takes twice as long
        if chains.agree or now + 2 * (now - before) > end:
            return chains


@dataclass
class Chains:
    """Chains that run in rounds, each twice as long as the one before, in coordinates that the draws so far tell.

    In the first half of a round the step size is found.

    Attributes:
        start: with draws of the last round, of which chains go on from the last.
        count: number of chains.
        num: number of draws that are asked for.
        tick: called after each transition.
        length: transitions that are kept of the next round. The first round is short, as it whitens little yet.
        step_size: in standard deviations of the draws that the round began with.
        acceptance: probability of a transition that the step size is chosen for; that of Pyro's samplers.
        path: the densities in the coordinates of the last round.
        standardized: latents in units of their priors' locations and scales; see `TemperedPath`.
        kept: positions after each transition of the last round.
        r_hat: the largest split R-hat of a number in the last round, by ranks.
        effective: how many draws of the last round are effective, of the number that has fewest.
    """

    start: Start
    count: int
    num: int
    tick: Callable[[], Any]
    length: int = 16
    step_size: float = 0.3
    acceptance: float = 0.8
    path: TemperedPath | None = None
    standardized: frozenset[str] = frozenset()
    kept: list[Tensor] = field(default_factory=list)
    r_hat: float = math.inf
    effective: float = 0.0

    @property
    def agree(self) -> bool:
        """Whether the chains do, with enough draws, and enough effective ones."""
        is_enough = min(self.effective / LEAST_EFFECTIVE, len(self.kept) * self.count / self.num)
        return self.r_hat <= MOST_R_HAT and is_enough >= 1

    def run(self) -> None:
        """Runs the next round."""
        self.standardized = self._standardized()
        path, seen = self._coordinates(self.standardized)
        self.path = replace(path, extent=self.start.target.extent(self.count, _ROWS))
        whitened = _Whitened(self.path, *_moments(seen[:, 0]))
        state, self.kept = whitened.state(seen[-self.count :]), []
        for i in range(2 * self.length):
            shrunk, longer = VARIED[i % len(VARIED)]
            size = torch.full_like(seen[0, :, :1], shrunk * self.step_size)
            # The ends of a quarter of a turn are independent, of a Normal. Lengths differ, against resonance.
            most = min(MOST_STEPS, max(1, round(math.pi / 2 / self.step_size)))
            count = longer * int(torch.randint(max(1, most // 2), most + 1, ()))
            state, accepted = hamiltonian_step(whitened, state, 1.0, size, count)  # type: ignore[arg-type]
            if i >= self.length:
                self.kept.append(whitened.position(state.position))
            elif shrunk == 1:
                self.step_size *= math.exp(float(accepted.mean()) - self.acceptance)
            self.tick()
        numbers = torch.stack(self.kept)[:, :, 0].double()
        folded = (numbers - numbers.flatten(0, 1).median(0).values).abs()
        self.r_hat = max(largest_r_hat(numbers), largest_r_hat(folded))
        self.effective = float(effective_sample_size(numbers, chain_dim=1, sample_dim=0).min())
        self.length *= 2
        self.start = replace(self.start, given=self._last())

    def _standardized(self) -> frozenset[str]:
        """Returns the latents to be moved in units of their priors: in these units a Normal fits the draws better."""
        chosen = self.standardized
        best = self._fit(chosen)
        for name in self.start.scaled:
            other = chosen ^ {name}
            fit = self._fit(other)
            if fit > best:
                chosen, best = other, fit
        return chosen

    def _fit(self, standardized: frozenset[str]) -> float:
        """Returns how well a Normal fits the start's draws: their mean log density in nats, up to a constant."""
        path, position = self._coordinates(standardized)
        jacobian: Any = sum(path.at(position).log_jacobian.values())
        _, root = _moments(position[:, 0])
        return float(-root.diagonal().log().sum() - jacobian.mean())

    def _coordinates(self, standardized: frozenset[str]) -> tuple[TemperedPath, Tensor]:
        """Returns the densities in some coordinates, and the start's draws, ``(draws, 1, numbers)``."""
        given = self.start.given or {}
        return self.start.path(len(next(iter(given.values()))), _ROWS, standardized)

    def _last(self, num: int = 2048) -> dict[str, Tensor]:
        """Returns the last draws ``(draws, *site shape)`` of a number, or a few more; by default for the next round."""
        assert self.path is not None
        last = self.kept[-math.ceil(num / self.count) :]
        values = joined([self.path.at(each).values for each in last])
        return {
            name: values[name].reshape(-1, *site["fn"].shape())
            for name, site in self.start.latents.items()
        }

    @torch.no_grad()
    @pyro.validation_enabled(False)
    def draws(self, drawn: WeightedSamples) -> WeightedSamples:
        """Returns the last draws, of equal weight, in place of weighted draws."""
        last = self._last(self.num)
        samples = {name: last[name] for name in drawn.samples}
        count = len(next(iter(samples.values())))
        effective = min(self.effective, float(count))
        own = torch.full_like(drawn.log_evidence, 1 / effective - 1 / count)
        pool = Pool.unknown(drawn.log_evidence)._replace(draws=own)
        weights = drawn.log_evidence.expand(count)
        return WeightedSamples(samples, weights, drawn.plates, pool)


def _number_of_chains(
    path: TemperedPath, position: Tensor, *, fewest: int = 16, most: int = 128
) -> int:
    """Returns how many chains take about twice as long as one, by the elements that a gradient computes.

    Args:
        path: the densities.
        position: of a few chains.
        fewest, most: bounds on the number.
    """
    with Count() as cost:
        path.gradient(position, 1.0)
    few = len(position) * AN_OPERATION * cost.operations // cost.elements
    return max(fewest, min(most, few))


def _moments(position: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean of positions ``(draws, numbers)``, and a Cholesky factor of their covariance."""
    center = position.mean(0)
    off = position - center
    covariance = off.mT @ off / len(off)
    scale = covariance.diagonal().clamp(min=torch.finfo(off.dtype).tiny).sqrt()
    correlation = covariance / scale / scale[:, None]
    # Correlations of few draws are noise, and of many are to be kept: they may be near 1.
    rounding = torch.finfo(off.dtype).eps ** 0.5
    shrinkage = max(rounding, min(1.0, len(scale) / len(off)) ** 2)
    correlation = (1 - shrinkage) * correlation + shrinkage * torch.eye(len(scale)).to(off)
    return center, scale[:, None] * torch.linalg.cholesky(correlation)


def largest_r_hat(numbers: Tensor) -> float:
    """Returns the largest split R-hat of ``(transitions, chains, numbers)``, of Normal scores: tails may be heavy."""
    ranks = numbers.flatten(0, 1).argsort(0).argsort(0).double()
    scores = torch.special.ndtri((ranks + 0.625) / (len(ranks) + 0.25))  # as of Blom 1958
    scores = scores.reshape(numbers.shape)
    return float(split_gelman_rubin(scores, chain_dim=1, sample_dim=0).max())
