"""`AmortizedPosterior`: weighted draws from the posterior of any data set, by a compiled guide."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_nami.amortize.coverage import Coverage
from pyro_nami.amortize.data_distance import ADVICE, SimulatedData
from pyro_nami.amortize.first_guide import TOLERATED
from pyro_nami.amortize.improvement import Budget, annealed, improved
from pyro_nami.amortize.sizes import sizes_of
from pyro_nami.amortize.within_priors import within_priors
from pyro_nami.fit.fitting import DEFENSIVE
from pyro_nami.fit.posterior import Posterior, learned
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import weighted_draws
from pyro_nami.inference.observations import as_mapping
from pyro_nami.inference.simulator_model import SimulatorModel, as_floating
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX, Pool, WeightedSamples, warn_of_bad
from pyro_nami.messages import quoted, warn
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner

__all__ = ["AmortizedPosterior"]

# Seconds of a data set for better draws, about as long as users wait before they ask what is going on.
SECONDS = 60.0


@dataclass(frozen=True, repr=False)
class AmortizedPosterior:
    """A guide that was compiled for a model: weighted draws of the posterior given any data.

    Attributes:
        model, args, kwargs: as given; a model that is written for one draw is wrapped to take many.
        guide: the trained guide; history: what happened in training.
        simulated: where the data of the simulations are; None where nothing was learned from them.
        coverage: how often the guide's intervals hold the latents of held-out simulations; None where nothing was
            learned, or the guide cannot be run for many data sets at once.
        sizes: plate, or loop -> its smallest and largest size in the simulations.
        progress: whether calls show progress bars by default.
        more: from further simulations to the posterior by all of them; see `append`.
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    guide: AutoNaMIGuide
    history: History
    simulated: SimulatedData | None = None
    coverage: Coverage | None = None
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    progress: bool = True
    more: Callable[[Any], AmortizedPosterior] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        model = self.model.model if isinstance(self.model, SimulatorModel) else self.model
        name = getattr(model, "__name__", type(model).__name__)
        names = learned(self.guide)
        found = [f"learned {quoted(names)}" if names else "nothing had to be learned"]
        if self.sizes:
            found.append(f"simulated with {_told(self.sizes)}")
        if self.coverage is not None:
            found.append(str(self.coverage))
        return f"AmortizedPosterior({name}: {'; '.join(found)})"

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
        seconds: float = SECONDS,
        progress: bool | None = None,
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
            seconds: budget of each data set for better draws by default. Draws that are expected to take longer are
                left out; the verdict is on those that were reached.
            progress: whether to show a progress bar where this takes more than a second; by default as `amortize` did.

        Raises:
            ValueError: data that are not finite, where they have no known density; as `importance_sample` does.

        Warns:
            UserWarning: data further out than all simulations that the guide was trained on; k-hat above 0.7; draws
                that are still bad where the budget of seconds ended.
        """
        if isinstance(self.model, SimulatorModel):
            return self._unweighted(self.model, data, num_samples)
        progress = self.progress if progress is None else progress
        if defensive is None:
            defensive = DEFENSIVE if learned(self.guide) else 0.0
        target = Target(
            Program(self.model, self.args, self.kwargs), self.guide, prior_share=defensive
        )
        if num_temperatures in (None, 2):
            budget = None if num_temperatures else seconds
            drawn = self._weighted(target, data, num_samples, budget, progress)
        else:
            drawn = annealed(
                target, data, num_samples, num_temperatures=num_temperatures, progress=progress
            )
            self._outside(data)
        warn_of_bad(drawn, "amortize with more simulations, or draw more samples.")
        return Posterior.of(drawn, target.observing(data)[0])

    def _weighted(
        self,
        target: Target,
        data: Mapping[str, Any],
        num: int,
        seconds: float | None,
        progress: bool,
    ) -> WeightedSamples:
        """Returns weighted draws of the guide; better ones, in a budget of seconds of each data set if there is one."""
        start = time.monotonic()
        drawn = weighted_draws(target, data, num)
        pace = (time.monotonic() - start) / drawn.log_weights.numel()
        outside = self._outside(data)
        bad = _are_bad(drawn)
        if seconds is not None and bad.any():
            budget = Budget(seconds * int(bad.sum()), pace)
            drawn = improved(target, data, drawn, bad, outside, progress, budget)
            if budget.refused and _are_bad(drawn).any():
                warn(
                    f"Draws were not improved further than seconds={seconds:g} for a data set allow. Their verdict "
                    "says what was reached; more seconds may reach more."
                )
        return drawn

    def at(self, *args: Any, **kwargs: Any) -> AmortizedPosterior:
        """Returns the posterior of the same model at other arguments: other numbers of rows, covariates or masks.

        Warns:
            UserWarning: a plate or loop of a size that the guide has not learned from, where data have no density, so
                that weights do not tell how far off the guide is.
        """
        if isinstance(self.model, SimulatorModel):
            self._check_sizes(self.model, args, kwargs)
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

    def _check_sizes(self, model: SimulatorModel, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Warns of sizes that the guide has not learned from."""
        with forked_rng(), torch.no_grad(), pyro.validation_enabled(False):
            sites = Program(model, args, kwargs).run(Runner({}, simulated=True))
        now = sizes_of(sites, frozenset(name for name in self.sizes if "#" in name))
        for name, size in now.items():
            least, most = self.sizes.get(name, (size, size))
            if not least <= size <= most:
                low, high = min(least, size), max(most, size)
                warn(
                    f"'{name}' is of size {size} here, and the guide has learned from {_told({name: (least, most)})}. "
                    "Its posteriors are wrong at other sizes, and data without a density give no weights to repair "
                    f"that. Use amortize(..., sizes={{'{name}': ({low}, {high})}}), if an integer argument of the "
                    "model gives the size, or else arguments=, a function that draws the model's arguments."
                )

    def _unweighted(
        self, model: SimulatorModel, data: Mapping[str, Any], num_samples: int
    ) -> Posterior:
        """Returns draws of the guide, with weights of one, for data without a density."""
        data = dict(as_mapping(data))
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


def _are_bad(drawn: WeightedSamples) -> Tensor:
    """Returns for which data sets too few draws are effective, or weights have a tail that is too heavy."""
    few = drawn.effective_sample_size < drawn.num_samples / 3
    return few | ~(drawn.pareto_k <= K_MAX)


def _told(sizes: Mapping[str, tuple[int, int]]) -> str:
    """Returns sizes of plates in words."""
    return ", ".join(
        f"{least:,} '{name}'" if least == most else f"{least:,} to {most:,} '{name}'"
        for name, (least, most) in sizes.items()
    )
