"""`AmortizedPosterior`: weighted draws from the posterior of any data set, by a compiled guide.

Data sets with few effective draws get more draws of the guide, then annealed importance sampling.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_nami.amortize.data_distance import ADVICE, SimulatedData
from pyro_nami.annealing.annealing import annealed_importance_sampling
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.cost import elements_of_a_draw
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import Proposal, importance_sample
from pyro_nami.inference.observations import Observations
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX, Pool, WeightedSamples, warn_of_bad
from pyro_nami.messages import OneByOne, warn

__all__ = ["AmortizedPosterior"]

_DEFENSIVE = 0.05  # share of draws that are the prior's, where a guide had to learn
# shares of effective draws: below which there are to be others, and what annealing leaves
_FEW, _KEPT = 1 / 3, 0.95
_POOLS = 1, 4, 16, 64, 256  # as many times as many draws are made to resample from
_ROWS, _ELEMENTS = 2**21, 2**25  # draws to resample from at a time, and elements of theirs
_OUTSIDE = 0.02  # share of data sets that may lie outside of all simulations by chance
_WORK = 2**34  # elements of tensors computed for these of a data set: some 20 seconds of a core


@dataclass(frozen=True)
class AmortizedPosterior:
    """A guide that was compiled for a model: weighted draws of the posterior given any data.

    Attributes:
        model, args, kwargs: as given; a model that is written for one draw is wrapped to take many.
        guide: the trained guide; history: what happened in training.
        simulated: where the data of the simulations are; None where nothing was learned from them.
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    guide: AutoNaMIGuide
    history: History
    simulated: SimulatedData | None = None

    def __call__(
        self,
        data: Mapping[str, Any],
        num_samples: int = 1000,
        *,
        num_temperatures: int | None = None,
        defensive: float | None = None,
        progress: bool = True,
    ) -> WeightedSamples:
        """Returns draws with importance weights, and a warning where these are bad.

        The guide's draws are weighted, or, with more than two temperatures, carried to the posterior on the way that
        `annealed_importance_sampling` describes, with ``resample=True``.

        If a factor was learned, one draw in twenty is the prior's, so that modes which the guide misses show in the
        weights. If data have no known density (`from_simulator`; data of a `pyro.deterministic` site or a `Delta`), all
        weights are one, and evidence and k-hat are NaN.

        Args:
            data: observed site -> value, of one data set or of several; see `importance_sample`. Of other shapes, as
                they are at other arguments of the model: see `at`.
            num_samples: draws for each data set.
            num_temperatures: of annealing, for all data sets; 2 to leave draws where they are. By default data sets of
                which less than a third of the draws are effective, or k-hat is above 0.7, have theirs resampled from 4,
                16, 64 or 256 times as many, of fewer where a draw takes long. If fewer are effective then than are
                asked for, they are annealed from there, if the model can be, by as many temperatures as they need.
            defensive: another share of the prior's draws; 0 for the guide's alone.
            progress: whether to show a progress bar where this takes more than a second.

        Raises:
            ValueError: data that are not finite, where they have no known density; as `importance_sample` does.

        Warns:
            UserWarning: data further out than all simulations that the guide was trained on; k-hat above 0.7.
        """
        if defensive is None:
            learned = any(note.rule == "learned" for note in self.guide.rules.values())
            defensive = _DEFENSIVE * learned
        options: dict[str, Any] = {"defensive": defensive, **self.kwargs}
        if isinstance(self.model, SimulatorModel):
            self._check_finite(data)
            given = {"num_samples": num_samples, "observations": data, **self.kwargs}
            drawn = _unwarned(self.model.without_data(), self.guide, *self.args, **given)
            self._outside(data)
            none = torch.zeros_like(drawn.log_weights)
            return WeightedSamples(drawn.samples, none, drawn.plates, Pool.unknown(none[0]))
        given = {**options, "observations": data}
        if num_temperatures in (None, 2):
            given["num_samples"] = num_samples
            drawn = _unwarned(self.model, self.guide, *self.args, **given)
            good = (drawn.pareto_k <= K_MAX) & (drawn.effective_sample_size >= _FEW * num_samples)
            outside = self._outside(data)
            if num_temperatures is None and not good.all():
                drawn = self._improved(~good, outside, data, drawn, options, progress)
        else:
            given["progress"] = progress
            drawn = self._annealed(
                num_samples, given, self.guide, num_temperatures=num_temperatures
            )
            self._outside(data)
        warn_of_bad(drawn, "amortize with more simulations, or draw more samples.")
        return drawn

    def at(self, *args: Any, **kwargs: Any) -> AmortizedPosterior:
        """Returns the posterior of the same model at other arguments: other numbers of rows, covariates or masks."""
        return replace(self, args=args, kwargs=kwargs, simulated=None)

    def _check_finite(self, data: Mapping[str, Any]) -> None:
        assert isinstance(self.model, SimulatorModel)
        for name in self.model.data.keys() & data.keys():
            if not torch.as_tensor(data[name]).isfinite().all():
                raise ValueError(
                    f"Expected data without NaN and infinite values; got some at site '{name}'. The guide has seen "
                    "none, as simulations with them are left out."
                )

    def _outside(self, data: Mapping[str, Any]) -> Tensor:
        """Returns which data sets lie further out than all simulations, ``(data sets or 1,)``, and warns of them."""
        values = None if self.simulated is None else self.simulated.batch(data)
        if self.simulated is None or values is None:
            return torch.zeros(1, dtype=torch.bool)
        outside = self.simulated.outside(values)
        if outside.sum() > _OUTSIDE * len(outside):
            num, first = len(outside), int(outside.long().argmax())
            several = (
                f"{int(outside.sum())} of {num} data sets lie outside. Of data set {first}: "
                if num > 1
                else ""
            )
            found = self.simulated.judged(
                {name: value[first : first + 1] for name, value in values.items()}, level=1.0
            )
            warn(f"{several}{found} {ADVICE}")
        return outside

    def _annealed(
        self, num_chains: int, options: Mapping[str, Any], guide: Callable | None, **path: Any
    ) -> WeightedSamples:
        chains = {"num_chains": num_chains, "num_leapfrog_steps": 5, "resample": True, **path}
        return annealed_importance_sampling(
            self.model, guide, *self.args, **{**chains, **options}
        ).weighted()

    def _improved(
        self,
        bad: Tensor,
        outside: Tensor,
        data: Mapping[str, Any],
        drawn: WeightedSamples,
        options: Mapping[str, Any],
        progress: bool,
    ) -> WeightedSamples:
        """Returns draws of which those of bad data sets are resampled from more, and annealed where these are few.

        They are annealed from the prior where data lie outside of the simulations, as the guide is anywhere there.
        """
        if bad.dim() == 0:
            several = {name: torch.as_tensor(value)[None] for name, value in data.items()}
            batch = _changed(drawn, lambda part: part.unsqueeze(1))
            found = self._improved(bad[None], outside, several, batch, options, progress)
            return _changed(found, lambda part: part.squeeze(1))
        target, _ = Target(self.model, None, self.args, self.kwargs).observing(data)
        num = drawn.num_samples
        elements = sum(value[0, 0].numel() for value in drawn.samples.values())
        drawn = WeightedSamples(
            drawn.samples, drawn.log_weights, drawn.plates, Pool.none(drawn.log_evidence)
        )
        at_once = min(_ROWS, _ELEMENTS // max(1, elements), self._affordable(target.data))
        most = max(power for power in _POOLS if power == 1 or power * num <= at_once)
        unknown = (bad & outside.to(bad.device)).nonzero().squeeze(-1)
        for rows in filter(len, unknown.split(max(1, at_once // num))):
            given = {
                **options,
                "observations": target.data.batch(rows),
                "defensive": 0.0,
                "progress": progress,
            }
            with contextlib.suppress(NotImplementedError, ValueError):
                drawn = _replaced(
                    drawn, rows, self._annealed(num, given, None, conditional_ess=_KEPT)
                )
                bad = bad.index_fill(0, rows, False)
        # how many times as many draws there are to be
        factors = bad.double() * min(_POOLS[1], most)
        with tqdm(
            total=int(bad.sum()), desc="resampling", delay=1, leave=False, disable=not progress
        ) as bar:
            for factor in _POOLS:
                size = max(1, at_once // (factor * num))
                for rows in filter(len, (factors == factor).nonzero().squeeze(-1).split(size)):
                    # Draws one by one would take long.
                    with contextlib.suppress(OneByOne, ValueError), warnings.catch_warnings():
                        warnings.simplefilter("error", OneByOne)
                        found, factors[rows] = self._pooled(
                            num, (factor, most), target.data, rows, options, progress
                        )
                        drawn = _replaced(drawn, rows, found)
                    bar.update(int((factors[rows] <= factor).sum()))
        return drawn

    def _affordable(self, data: Observations) -> int:
        """Returns how many draws of the guide may be made to improve those of a data set."""
        with contextlib.suppress(RuntimeError, ValueError):
            proposal = Proposal.of(
                Target(self.model, self.guide, self.args, self.kwargs), data.one()
            )
            return max(1, int(_WORK / elements_of_a_draw(proposal)))
        return _ROWS  # for a model that is mapped over draws

    def _pooled(
        self,
        num: int,
        factors: tuple[int, int],
        data: Observations,
        rows: Tensor,
        options: Mapping[str, Any],
        progress: bool,
    ) -> tuple[WeightedSamples, Tensor]:
        """Returns draws out of more, by the first factor, and the factor to go on with; 0: these will do.

        At the last factor they are annealed where too few of them are effective, if the model can be.
        """
        factor, last = factors
        many = _unwarned(
            self.model,
            self.guide,
            *self.args,
            num_samples=factor * num,
            **options,
            observations=data.batch(rows),
        )
        short = num / many.effective_sample_size
        few, found = (short > 1) | (many.pareto_k > K_MAX), many.equally_weighted(num)
        if factor < last:
            pools = short.new_tensor(_POOLS)
            wanted = pools[torch.bucketize((factor * short).clamp(min=factor + 1, max=last), pools)]
            return found, wanted.where(few, 0.0).double()
        if few.any():
            here = few.nonzero().squeeze(-1)
            path = {
                "conditional_ess": _KEPT,
                "draws": _changed(many, lambda part: part[:, here]),
                "progress": progress,
            }
            with contextlib.suppress(NotImplementedError, ValueError):
                given = {**options, "observations": data.batch(rows[here])}
                annealed = self._annealed(num, given, self.guide, **path)
                found = _replaced(found, here, annealed)
        return found, torch.zeros_like(short).double()


def _changed(drawn: WeightedSamples, change: Callable[[Tensor], Tensor]) -> WeightedSamples:
    """Returns draws of which tensors ``(draws, data sets, ...)`` are changed, and what is told of pools likewise."""
    pool = drawn.pool and Pool(*(change(part[None])[0] for part in drawn.pool))
    samples = {name: change(value) for name, value in drawn.samples.items()}
    return WeightedSamples(samples, change(drawn.log_weights), drawn.plates, pool)


def _replaced(drawn: WeightedSamples, rows: Tensor, found: WeightedSamples) -> WeightedSamples:
    """Returns draws of which those of some data sets are others."""
    samples = {
        name: value.index_copy(1, rows, found.samples[name])
        for name, value in drawn.samples.items()
    }
    pool = Pool(
        *(old.index_copy(0, rows, new) for old, new in zip(drawn.pool or (), found.pool or ()))
    )
    return WeightedSamples(
        samples, drawn.log_weights.index_copy(1, rows, found.log_weights), drawn.plates, pool
    )


def _unwarned(*args: Any, **kwargs: Any) -> WeightedSamples:
    """Returns what `importance_sample` does, without a warning of the weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The importance weights are")
        return importance_sample(*args, **kwargs)
