"""`diagnose`: one call that says whether a trained guide can be trusted, and on what data.

It runs the checks that have modules of their own (`calibration`, `importance`, `misspecification`) on simulations of
its own, puts them beside the losses of training, and says what to do about what it finds. Change this module to change
what belongs to a diagnosis, or the advice.
"""

from __future__ import annotations

__all__ = ["Diagnosis", "diagnose"]

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_nami.checking.calibration import Calibration, calibrate, listed
from pyro_nami.checking.misspecification import Misspecification, misspecification, observed_data
from pyro_nami.inference.importance import importance_sample
from pyro_nami.inference.observations import as_mapping, observed_names
from pyro_nami.inference.simulate import Simulator, forked_rng
from pyro_nami.inference.weights import K_MAX

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pyro_nami.inference.history import History

_TOLERATED = 0.1  # share of data sets whose k-hat may be above the limit


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What `diagnose` found.

    Attributes:
        calibration: of the guide, over simulated data sets.
        effective_sample_size, pareto_k: of importance sampling, for each of some simulated data sets,
            ``(data sets,)``.
        num_samples: draws of importance sampling for each of them.
        losses, validation: of training, in nats: of every step, and pairs of steps and held-out losses; None and empty
            without a history.
        misspecification: of the real data; None if there are none.
    """

    calibration: Calibration
    effective_sample_size: Tensor
    pareto_k: Tensor
    num_samples: int
    losses: Sequence[float] | None = None
    validation: Sequence[tuple[int, float]] = ()
    misspecification: Misspecification | None = None

    @property
    def unreliable(self) -> float:
        """Share of data sets for which importance sampling is unreliable: k-hat above 0.7."""
        return float((self.pareto_k > K_MAX).double().mean())

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong -> what to do about it; empty if nothing is."""
        found = {}
        failed = self.calibration.failed
        if failed:
            found[f"calibration of {listed(failed)}"] = _REMEDY
        if self.unreliable > _TOLERATED:
            share = f"k-hat above {K_MAX} for {self.unreliable:.0%} of data sets"
            found[f"importance weights ({share})"] = _REMEDY
        if self.misspecification is not None and not self.misspecification.passed:
            found["data far outside the simulations"] = _DATA
        return found

    @property
    def passed(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems

    @property
    def summary(self) -> str:
        """What was found, in a line."""
        share = float((self.effective_sample_size / self.num_samples).median())
        verdict = f"wrong are {'; '.join(self.problems)}" if self.problems else "passed"
        return f"Diagnosis: {verdict}. Median effective sample size {share:.0%} of the draws."

    def plot(self) -> Figure:
        """Draws all of it: losses, ranks, coverage, weights, and the data among simulations.

        Raises:
            ImportError: matplotlib is missing (the extra ``viz``).
        """
        from pyro_nami.checking.plots import plot_diagnosis

        return plot_diagnosis(self)

    def __str__(self) -> str:
        parts = [self.summary, *(f"- {problem}: {advice}" for problem, advice in self.problems.items())]
        if self.losses is not None:
            tail = max(1, len(self.losses) // 10)
            last, before = self.losses[-tail:], self.losses[-2 * tail : -tail]
            text = f"Loss: {_mean(last):.3f} nats over the last {tail:,} of {len(self.losses):,} steps"
            if before:
                text += f", {_mean(before):.3f} over as many before"
            if self.validation:
                best = min(loss for _, loss in self.validation)
                text += f"; held out {self.validation[-1][1]:.3f}, at best {best:.3f}"
            parts += ["", text + "."]
        shares = self.effective_sample_size / self.num_samples
        parts += [
            "",
            str(self.calibration),
            "",
            f"Importance sampling: {len(shares):,} data sets, {self.num_samples:,} draws each",
            f"  effective sample size / draws: median {float(shares.median()):.0%}, lowest {float(shares.min()):.0%}",
            f"  Pareto k-hat: median {float(self.pareto_k.median()):.2f}, above {K_MAX} for {self.unreliable:.0%}",
        ]
        if self.misspecification is not None:
            parts += ["", str(self.misspecification)]
        return "\n".join(parts)


_REMEDY = (
    "Train longer, on fresh simulations in every step, with wider networks (hidden_features=) or richer families "
    "(families='flow')."
)
_DATA = "The guide extrapolates: check units and outliers, and the model's priors and likelihood."


def diagnose(
    guide: Callable,
    *args: Any,
    model: Callable | None = None,
    history: History | None = None,
    observations: Mapping[str, Any] | None = None,
    observed: Sequence[str] = (),
    num_datasets: int = 1000,
    num_draws: int = 99,
    num_weighted: int = 100,
    num_samples: int = 1000,
    seed: int | None = None,
    **kwargs: Any,
) -> Diagnosis:
    """Checks a trained guide: calibration, importance weights, and whether the real data are like the simulations.

    Args:
        guide: of the model; takes ``observations={site: value}``.
        *args, **kwargs: the model's arguments. Data among them are the real data.
        model: by default the guide's own, ``guide.model``.
        history: of training, as ``InferenceCompilation(...).history``.
        observations: the real data, in place of what the model observes itself; without any, the data are not checked.
        observed: sites that the model samples when no data is given, but that the guide conditions on; those of a
            guide with an attribute ``observed`` need not be named.
        num_datasets, num_draws: of calibration; see `calibrate`.
        num_weighted: simulated data sets that importance sampling is tried on.
        num_samples: draws of importance sampling for each of them.
        seed: of all random numbers; None goes on from the current state. The state outside stays as it was.

    Returns:
        A `Diagnosis`; ``print`` it, or ``plot()`` it.

    Raises:
        TypeError: no model is given, and the guide has none.
    """
    model = getattr(guide, "model", None) if model is None else model
    if not callable(model):
        raise TypeError("Expected a guide with a model, or model=...; got neither.")
    given = as_mapping(observations)
    names = observed_names(observed, guide, given)
    with forked_rng(), torch.no_grad():
        if seed is not None:
            pyro.set_rng_seed(seed)
        simulator = Simulator(model, args, kwargs, names)
        found = None
        if {*observed_data(simulator), *given} >= set(simulator.observed):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The data lie far outside")  # the diagnosis says so itself
                found = misspecification(model, *args, observations=given, observed=names, **kwargs)
        calibration = calibrate(
            model, guide, *args, num_datasets=num_datasets, num_draws=num_draws, observed=names, **kwargs
        )
        simulated = simulator.draw(num_weighted).finite()[0].observed  # calibrate has judged how many are not
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The importance weights are")
            weighted = importance_sample(
                model, guide, *args, num_samples=num_samples, observations=simulated, **kwargs
            )
    return Diagnosis(
        calibration=calibration,
        effective_sample_size=weighted.effective_sample_size,
        pareto_k=weighted.pareto_k,
        num_samples=num_samples,
        losses=list(history.losses) if history is not None and history.losses else None,
        validation=() if history is None else tuple(history.validation),
        misspecification=found,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.nanmean(values))
