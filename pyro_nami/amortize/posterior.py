"""`AmortizedPosterior`: weighted draws from the posterior of any data set, by a compiled guide."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_nami.amortize.data_distance import ADVICE, SimulatedData
from pyro_nami.amortize.first_guide import TOLERATED
from pyro_nami.amortize.improvement import annealed, improved
from pyro_nami.amortize.within_priors import within_priors
from pyro_nami.fit.fitting import DEFENSIVE
from pyro_nami.fit.posterior import Posterior, learned
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import as_data, weighted_draws
from pyro_nami.inference.simulator_model import SimulatorModel, as_floating
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX, Pool, warn_of_bad
from pyro_nami.messages import warn
from pyro_nami.program.program import Program

__all__ = ["AmortizedPosterior"]


@dataclass(frozen=True)
class AmortizedPosterior:
    """A guide that was compiled for a model: weighted draws of the posterior given any data.

    Attributes:
        model, args, kwargs: as given; a model that is written for one draw is wrapped to take many.
        guide: the trained guide; history: what happened in training.
        simulated: where the data of the simulations are; None where nothing was learned from them.
        more: from further simulations to the posterior by all of them; see `append`.
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    guide: AutoNaMIGuide
    history: History
    simulated: SimulatedData | None = None
    more: Callable[[Any], AmortizedPosterior] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled.

        Raises:
            PicklingError: the model cannot be.
        """
        try:
            pickle.dumps(self.model)
        except Exception as error:
            raise pickle.PicklingError(
                f"Expected a model that can be pickled; got {type(error).__name__}: {error}. Define the model, or the "
                "classes of its prior, by name in a module, not as a lambda or within a function."
            ) from error
        return vars(self)

    def __call__(
        self,
        data: Mapping[str, Any],
        num_samples: int = 1000,
        *,
        num_temperatures: int | None = None,
        defensive: float | None = None,
        progress: bool = True,
    ) -> Posterior:
        """Returns the posterior given data: draws with importance weights, and a verdict on them.

        If a factor was learned, one draw in twenty is the prior's, so that modes which the guide misses show in the
        weights. If data have no known density (`from_simulator`; data of a `pyro.deterministic` site or a `Delta`), all
        weights are one, and evidence and k-hat are NaN.

        Args:
            data: observed site -> value, of one data set or of several; see `importance_sample`.
            num_samples: draws for each data set.
            num_temperatures: 2 for weighted draws of the guide; with more, draws of all data sets are annealed. By
                default, where less than a third of the draws are effective or k-hat is above 0.7, draws are resampled
                from 4, 16, 64 or 256 times as many; from fewer if a draw takes long. If fewer of these are effective
                than are asked for, they are annealed, if the model can be.
            defensive: another share of the prior's draws; 0 for the guide's alone.
            progress: whether to show a progress bar where this takes more than a second.

        Raises:
            ValueError: data that are not finite, where they have no known density; as `importance_sample` does.

        Warns:
            UserWarning: data further out than all simulations that the guide was trained on; k-hat above 0.7.
        """
        if isinstance(self.model, SimulatorModel):
            return self._unweighted(self.model, data, num_samples)
        if defensive is None:
            defensive = DEFENSIVE if learned(self.guide) else 0.0
        target = Target(
            Program(self.model, self.args, self.kwargs), self.guide, prior_share=defensive
        )
        if num_temperatures in (None, 2):
            drawn = weighted_draws(target, data, num_samples)
            outside = self._outside(data)
            few = drawn.effective_sample_size < num_samples / 3
            bad = few | ~(drawn.pareto_k <= K_MAX)
            if num_temperatures is None and bad.any():
                drawn = improved(target, data, drawn, bad, outside, progress)
        else:
            drawn = annealed(
                target, data, num_samples, num_temperatures=num_temperatures, progress=progress
            )
            self._outside(data)
        warn_of_bad(drawn, "amortize with more simulations, or draw more samples.")
        return Posterior.of(drawn, target.observing(data)[0])

    def at(self, *args: Any, **kwargs: Any) -> AmortizedPosterior:
        """Returns the posterior of the same model at other arguments: other numbers of rows, covariates or masks."""
        return replace(self, args=args, kwargs=kwargs, simulated=None, more=None)

    def append(self, simulations: Any) -> AmortizedPosterior:
        """Returns the posterior by a new guide, trained on more simulations beside those that this one learned from.

        Args:
            simulations: how many to draw, or those drawn before, as for `amortize`.

        Raises:
            ValueError: as `amortize` does; a posterior at other arguments than those that its guide was trained at.
        """
        if self.more is None:
            raise ValueError(
                "Expected a posterior as `amortize` returned it, which has its simulations; got one at other arguments."
            )
        return self.more(simulations)

    def _unweighted(
        self, model: SimulatorModel, data: Mapping[str, Any], num_samples: int
    ) -> Posterior:
        """Returns draws of the guide, with weights of one, for data without a density."""
        data = dict(as_data(data))
        for name in model.data.keys() & data.keys():
            data[name] = as_floating(torch.as_tensor(data[name]))
            if not data[name].isfinite().all():
                raise ValueError(
                    f"Expected data without NaN and infinite values; got some at site '{name}'. The guide has seen "
                    "none, as simulations with them are left out."
                )
        target = Target(Program(model.without_data(), self.args, self.kwargs), self.guide)
        drawn = within_priors(target, model, data, num_samples)
        self._outside(data)
        none = torch.zeros_like(drawn.log_weights)
        unknown = replace(drawn, log_weights=none, pool=Pool.unknown(none[0]))
        observing, _ = target.observing(data)
        return Posterior.of(
            unknown, replace(observing, program=Program(model, *target.program[1:3]))
        )

    def _outside(self, data: Mapping[str, Any]) -> Tensor:
        """Returns which data sets lie further out than all simulations, ``(data sets or 1,)``, and warns of them."""
        values = None if self.simulated is None else self.simulated.batch(data)
        if self.simulated is None or values is None:  # of other arguments
            return torch.zeros(1, dtype=torch.bool)
        outside = self.simulated.outside(values)
        if outside.sum() > TOLERATED * len(outside):
            first = int(outside.long().argmax())
            one = {name: value[first : first + 1] for name, value in values.items()}
            text = f"{self.simulated.judged(one, level=1.0)} {ADVICE}"
            if len(outside) > 1:
                num = int(outside.sum())
                text = f"{num} of {len(outside)} data sets lie outside. Of data set {first}: {text}"
            warn(text)
        return outside
