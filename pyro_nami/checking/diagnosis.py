"""`diagnose`: whether a trained guide can be trusted, on which data, and what to do if it cannot."""

from __future__ import annotations

__all__ = ["Diagnosis", "diagnose"]

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from pyro_nami.amortize.posterior import AmortizedPosterior
from pyro_nami.checking.calibration import Calibration, calibrate, listed
from pyro_nami.checking.misspecification import Misspecification, compare
from pyro_nami.checking.plots import draw_histogram, draw_losses, draw_ranks, plot_all
from pyro_nami.checking.simulations import guide_and_arguments, seeded
from pyro_nami.inference.history import History
from pyro_nami.inference.importance import weighted_draws
from pyro_nami.inference.observations import as_mapping, observed_names
from pyro_nami.inference.simulate import Simulator
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import K_MAX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_UNRELIABLE = 0.1  # share of data sets whose k-hat may be above 0.7
_REMEDY = (
    "Train longer, on fresh simulations in every step, with wider networks (hidden_features=) or richer families "
    "(families='flow')."
)
_EXTRAPOLATED = (
    "The guide extrapolates: check units and outliers, and the model's priors and likelihood."
)


class Check(NamedTuple):
    """A part of a diagnosis: its text and drawings; if it failed, the problem and the advice."""

    text: str
    drawings: Mapping[str, Callable[[Axes], None]]
    problem: str = ""
    advice: str = ""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The result of `diagnose`, to ``print`` or to ``plot()``.

    Attributes:
        calibration: of the guide, over simulated data sets.
        effective_sample_size, pareto_k: of importance sampling on some simulated data sets, ``(data sets,)``; None
            where data have no density.
        num_samples: draws of importance sampling for each of them.
        losses, validation: of training, in nats: of every step, and pairs of steps and held-out losses; None and empty
            without a history.
        misspecification: of the real data; None if there are none.
    """

    calibration: Calibration
    effective_sample_size: Tensor | None
    pareto_k: Tensor | None
    num_samples: int
    losses: Sequence[float] | None = None
    validation: Sequence[tuple[int, float]] = ()
    misspecification: Misspecification | None = None

    @property
    def unreliable(self) -> float:
        """Share of data sets for which importance sampling is unreliable: k-hat above 0.7; NaN without weights."""
        return math.nan if self.pareto_k is None else float((self.pareto_k > K_MAX).double().mean())

    @cached_property
    def checks(self) -> list[Check]:
        """The parts of the diagnosis, in order."""
        checks = [_calibration(self.calibration)]
        if self.losses is not None:
            checks.insert(0, _training(self.losses, self.validation))
        if self.effective_sample_size is not None and self.pareto_k is not None:
            shares = self.effective_sample_size / self.num_samples
            checks.append(_weights(shares, self.pareto_k, self.num_samples, self.unreliable))
        if self.misspecification is not None:
            checks.append(_data(self.misspecification))
        return checks

    @property
    def problems(self) -> dict[str, str]:
        """Problem -> advice; empty if nothing is wrong."""
        return {check.problem: check.advice for check in self.checks if check.problem}

    @property
    def passed(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problems

    @property
    def summary(self) -> str:
        """The verdict, in one line."""
        verdict = f"wrong are {'; '.join(self.problems)}" if self.problems else "passed"
        if self.effective_sample_size is None:
            return f"Diagnosis: {verdict}. The data have no density, so draws have no weights."
        share = float((self.effective_sample_size / self.num_samples).median())
        return f"Diagnosis: {verdict}. Median effective sample size {share:.0%} of the draws."

    def plot(self) -> Figure:
        """Draws losses, ranks, coverage, weights, and the data among simulations.

        Raises:
            ImportError: matplotlib is missing (the extra ``viz``).
        """
        drawings = [drawing for check in self.checks for drawing in check.drawings.items()]
        return plot_all(self.summary, dict(drawings))

    def __str__(self) -> str:
        advice = "".join(f"\n- {problem}: {advice}" for problem, advice in self.problems.items())
        return "\n\n".join([self.summary + advice, *(check.text for check in self.checks)])


def _training(losses: Sequence[float], validation: Sequence[tuple[int, float]]) -> Check:
    tail = max(1, len(losses) // 10)
    last, before = losses[-tail:], losses[-2 * tail : -tail]
    text = f"Loss: {np.nanmean(last):.3f} nats over the last {tail:,} of {len(losses):,} steps"
    if before:
        text += f", {np.nanmean(before):.3f} over as many before"
    if validation:
        best = min(loss for _, loss in validation)
        text += f"; held out {validation[-1][1]:.3f}, at best {best:.3f}"
    return Check(f"{text}.", {"Loss": partial(draw_losses, losses=losses, validation=validation)})


def _calibration(found: Calibration) -> Check:
    panels = list(found.panels.values())
    drawings = {
        "Distribution of ranks": partial(draw_ranks, panels=panels, kind="ecdf"),
        "Expected coverage": partial(draw_ranks, panels=panels, kind="coverage"),
    }
    problem = f"calibration of {listed(found.failed)}" if found.failed else ""
    return Check(str(found), drawings, problem, _REMEDY)


def _weights(shares: Tensor, k: Tensor, num_samples: int, unreliable: float) -> Check:
    """Returns the check of importance weights: the share of draws that are effective, and k-hat, by data set."""
    median = float(shares.median())
    text = (
        f"Importance sampling: {len(k):,} data sets, {num_samples:,} draws each\n"
        f"  effective sample size / draws: median {median:.0%}, lowest {float(shares.min()):.0%}\n"
        f"  Pareto k-hat: median {float(k.median()):.2f}, above {K_MAX} for {unreliable:.0%}"
    )
    drawings = {
        "Importance sampling: efficiency": partial(
            draw_histogram,
            values=shares.cpu().numpy(),
            x_label="effective sample size / draws",
            place=median,
            label=f"median {median:.0%}",
            limits=(0.0, 1.0),
        ),
        "Importance sampling: Pareto k": partial(
            draw_histogram,
            values=k.clamp(-0.5, 1.5).cpu().numpy(),
            x_label="Pareto k (ends of the axis: and beyond)",
            place=K_MAX,
            label=f"above {K_MAX}: {unreliable:.0%}",
            limits=(-0.5, 1.5),
        ),
    }
    problem = f"importance weights (k-hat above {K_MAX} for {unreliable:.0%} of data sets)"
    return Check(text, drawings, problem if unreliable > MAX_UNRELIABLE else "", _REMEDY)


def _data(found: Misspecification) -> Check:
    draw = partial(
        draw_histogram,
        values=found.simulated.cpu().numpy(),
        x_label="distance from the simulations' center",
        place=found.distance,
        label=f"the data, p = {found.p_value:.2g}",
    )
    problem = "" if found.passed else "data far outside the simulations"
    return Check(str(found), {"Data against simulations": draw}, problem, _EXTRAPOLATED)


def diagnose(
    guide: Callable | AmortizedPosterior,
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
    progress: bool = True,
    **kwargs: Any,
) -> Diagnosis:
    """Checks a trained guide: calibration, importance weights, and whether the real data are like the simulations.

    Args:
        guide: of the model; takes ``observations={site: value}``. Or a posterior of `amortize`, which has model,
            arguments and history with it, and is calibrated by its weighted draws (`calibrate`).
        *args, **kwargs: the model's arguments. Data among them are the real data.
        model: by default the guide's own, ``guide.model``.
        history: of training, as ``InferenceCompilation(...).history``.
        observations: the real data, in place of what the model observes itself; without any, the data are not checked.
        observed: sites to condition on that the model samples without data, beside those of ``guide.observed``.
        num_datasets, num_draws: of calibration; see `calibrate`.
        num_weighted: simulated data sets that importance sampling is tried on.
        num_samples: draws of importance sampling for each of them.
        seed: of all random numbers; None goes on from the current state. The state outside stays as it was.
        progress: whether to show a progress bar where calibration takes more than a second.

    Raises:
        TypeError: no model is given, and the guide has none.
    """
    model = getattr(guide, "model", None) if model is None else model
    if not callable(model):
        raise TypeError("Expected a guide with a model, or model=...; got neither.")
    if history is None:
        history = guide.history if isinstance(guide, AmortizedPosterior) else History()
    proposal, args, kwargs = guide_and_arguments(guide, args, kwargs)
    given = as_mapping(observations)
    names = observed_names(observed, proposal, given)
    with seeded(seed):
        simulator = Simulator(model, args, kwargs, names)
        data = {**simulator.data, **given}
        compared = compare(simulator, data) if data.keys() >= set(simulator.observed) else None
        options: dict[str, Any] = {"num_datasets": num_datasets, "num_draws": num_draws}
        options |= {"observed": names, "progress": progress, **kwargs}
        calibration = calibrate(model, guide, *args, **options)
        size, k = _importance(simulator, proposal, num_weighted, num_samples)
    losses = list(history.losses) or None
    validation = tuple(history.validation)
    return Diagnosis(calibration, size, k, num_samples, losses, validation, compared)


def _importance(
    simulator: Simulator, guide: Callable, num_datasets: int, num_samples: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns effective sample sizes and k-hats on simulated data sets; None if data have no density."""
    if isinstance(simulator.model, SimulatorModel):
        return None, None
    # calibrate has judged how many are not finite
    data = simulator.draw(num_datasets).finite()[0].observed
    target = Target(simulator.program, guide)
    drawn = weighted_draws(target, data, num_samples)
    return drawn.effective_sample_size, drawn.pareto_k
