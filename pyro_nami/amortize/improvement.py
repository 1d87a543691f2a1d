"""Better draws for data sets for which few weighted draws of a guide are effective.

The draws are resampled from more draws of the guide. Where too few of these are effective as well, annealed importance
sampling carries them to the posterior. Both have a budget of seconds; what was reached in it is returned.
"""

from __future__ import annotations

__all__ = ["Budget", "annealed", "improved"]

import contextlib
import math
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from tqdm import tqdm

from pyro_nami.annealing.annealing import annealed_importance_sampling
from pyro_nami.inference.cost import elements_of_a_draw
from pyro_nami.inference.importance import Proposal, weighted_draws
from pyro_nami.inference.observations import Observations
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX, Pool, WeightedSamples
from pyro_nami.messages import OneByOne
from pyro_nami.program.memory import rows_in_memory

# Tensor elements that are computed for the draws of one data set, which take some 20 seconds of one core. At ten times
# more, a call takes minutes; at ten times less, few draws are effective where a draw takes long.
MAX_WORK = 2**34
# Seconds that annealing is expected to take, in those of as many weighted draws of the guide: some 30 temperatures of
# 5 leapfrog steps, less what a first call takes once. At ten times less, a call may take ten times its budget; at ten
# times more, a first call that took a second leaves it out.
ANNEALING = 50.0


class Budget:
    """The seconds that better draws may take, and how long a draw took so far.

    Args:
        seconds: of all data sets together.
        pace: seconds of a weighted draw for one data set.

    Attributes:
        refused: whether something was left out as it would have taken longer.
    """

    def __init__(self, seconds: float, pace: float) -> None:
        self.end = time.monotonic() + seconds
        self.pace = pace
        self.refused = False

    def allows(self, draws: float) -> bool:
        """Whether as many draws are expected to be made in time; notes if not."""
        in_time = time.monotonic() + self.pace * draws <= self.end
        self.refused |= not in_time
        return in_time

    @contextlib.contextmanager
    def timing(self, draws: int) -> Iterator[None]:
        """Takes the pace from what is run: as many draws."""
        start = time.monotonic()
        yield
        self.pace = (time.monotonic() - start) / draws


def improved(
    target: Target,
    data: Mapping[str, Any],
    drawn: WeightedSamples,
    bad: Tensor,
    unknown: Tensor,
    progress: bool,
    budget: Budget,
) -> WeightedSamples:
    """Returns the draws with better draws for bad data sets, as far as the budget goes.

    Args:
        target: the model and the guide, and the share of the draws that are the prior's.
        data: observed site -> value.
        drawn: weighted draws of the guide.
        bad: which data sets to improve, ``(*data sets)``.
        unknown: which data sets the guide knows nothing of, ``(data sets or 1,)``; they are annealed from the prior.
        progress: whether to show a progress bar where this takes more than a second.
        budget: of seconds.
    """
    if bad.dim() == 0:
        several = {name: torch.as_tensor(value)[None] for name, value in data.items()}
        batch = _changed(drawn, lambda part: part.unsqueeze(1))
        found = improved(target, several, batch, bad[None], unknown, progress, budget)
        return _changed(found, lambda part: part.squeeze(1))
    data_sets = target.observing(data)[0].data
    # The weights and their order take as much memory as 16 elements. Nothing else is held of the draws, so that there
    # may be eight times as many as where intermediate results are held.
    elements = max(16, sum(value[0, 0].numel() for value in drawn.samples.values()))
    most_draws = int(min(8 * rows_in_memory(elements), _affordable(target, data_sets)))
    search = _Improvement(target, data_sets, drawn.num_samples, most_draws, progress, budget)
    drawn = replace(drawn, pool=Pool.none(drawn.log_evidence))
    for rows in search.parts(bad & unknown.to(bad.device), 1):
        before, drawn = drawn, search.annealed(drawn, rows, None)
        bad[rows] = drawn is before
    return search.resampled(drawn, bad)


class _Improvement(NamedTuple):
    """The data sets to improve, and how many draws may be made of them."""

    target: Target
    data_sets: Observations
    num: int  # draws of a data set
    most_draws: int  # to resample from, of all data sets at a time
    progress: bool
    budget: Budget

    def resampled(self, drawn: WeightedSamples, bad: Tensor) -> WeightedSamples:
        """Returns the draws with draws for bad data sets that are resampled from 4, 16, ... times as many.

        Data sets for which too few draws are effective at the largest factor are annealed, if the model can be.
        """
        factors = [each for each in (4, 16, 64, 256) if each * self.num <= self.most_draws] or [1]
        for factor in factors:
            parts, bad = self.parts(bad, factor), torch.zeros_like(bad)
            for rows in tqdm(parts, "resampling", delay=1, leave=False, disable=not self.progress):
                num = factor * self.num * len(rows)
                if not self.budget.allows(num):
                    continue
                try:
                    with self.budget.timing(num):
                        many = self.more_draws(rows, factor)
                except (OneByOne, ValueError):  # draws one by one would take long
                    continue
                drawn = _replaced(drawn, rows, many.equally_weighted(self.num))
                few = (many.effective_sample_size < self.num) | (many.pareto_k > K_MAX)
                bad[rows] = few
                if factor == factors[-1] and few.any():
                    start = _changed(many, operator.itemgetter((slice(None), few)))
                    drawn = self.annealed(drawn, rows[few], self.target.guide, start)
        return drawn

    def parts(self, chosen: Tensor, factor: int) -> Sequence[Tensor]:
        """Returns the indices of chosen data sets, of as many at a time as may be drawn together."""
        rows = chosen.nonzero().squeeze(-1)
        return rows.split(max(1, self.most_draws // (factor * self.num))) if len(rows) else ()

    def more_draws(self, rows: Tensor, factor: int) -> WeightedSamples:
        """Returns ``factor`` times as many weighted draws; raises `OneByOne` if they cannot be made at once."""
        with warnings.catch_warnings():
            warnings.simplefilter("error", OneByOne)
            return weighted_draws(self.target, self.data_sets.batch(rows), factor * self.num)

    def annealed(
        self,
        drawn: WeightedSamples,
        rows: Tensor,
        guide: Callable | None,
        draws: WeightedSamples | None = None,
    ) -> WeightedSamples:
        """Returns the draws with some data sets annealed from a guide, or from the prior, if the model can be."""
        if not self.budget.allows(ANNEALING * self.num * len(rows)):
            return drawn
        share = 0.0 if guide is None else self.target.prior_share
        target = replace(self.target, guide=guide, prior_share=share)
        options = {"conditional_ess": 0.95, "draws": draws, "progress": self.progress}
        with contextlib.suppress(NotImplementedError, ValueError):
            found = annealed(target, self.data_sets.batch(rows), self.num, **options)
            return _replaced(drawn, rows, found)
        return drawn


def annealed(target: Target, data: Mapping[str, Any], num: int, **options: Any) -> WeightedSamples:
    """Returns draws that are annealed from a guide, or from the prior, with weights."""
    return annealed_importance_sampling(
        target.program.model,
        target.guide,
        *target.program.args,
        num_chains=num,
        num_leapfrog_steps=5,
        resample=True,
        observations=data,
        defensive=target.prior_share,
        **options,
        **target.program.kwargs,
    )


def _affordable(target: Target, data: Observations) -> float:
    """Returns how many draws of the guide may be made to improve the draws of a data set."""
    try:
        work = elements_of_a_draw(Proposal.of(replace(target, prior_share=0.0), data.one()))
    except (RuntimeError, ValueError):  # of a model that is mapped over draws
        return math.inf
    return max(1, MAX_WORK / work)


def _changed(drawn: WeightedSamples, change: Callable[[Tensor], Tensor]) -> WeightedSamples:
    """Returns the draws with a function applied to their tensors, ``(draws, data sets, ...)``."""
    pool = drawn.pool and Pool(*(change(part[None])[0] for part in drawn.pool))
    samples, log_weights = tree_map(change, (drawn.samples, drawn.log_weights))
    return WeightedSamples(samples, log_weights, drawn.plates, pool)


def _replaced(drawn: WeightedSamples, rows: Tensor, found: WeightedSamples) -> WeightedSamples:
    """Returns the draws with the draws found for some data sets in place of their own."""
    samples, log_weights = tree_map(
        lambda old, new: old.index_copy(1, rows, new),
        (drawn.samples, drawn.log_weights),
        (found.samples, found.log_weights),
    )
    pool = tree_map(lambda old, new: old.index_copy(0, rows, new), drawn.pool, found.pool)
    return WeightedSamples(samples, log_weights, drawn.plates, pool)
