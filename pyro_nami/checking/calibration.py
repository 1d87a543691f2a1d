"""Simulation-based calibration: whether a guide's posteriors are right on average over the model's own data sets.

If the guide is the posterior, the true latents of a simulated data set are one more draw from the
guide, so their ranks among its draws are uniform. `rank_tests` judges the ranks.
"""

from __future__ import annotations

__all__ = ["JOINT_DENSITY", "JOINT_TARP", "Calibration", "calibrate", "listed"]

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyro_nami.amortize.posterior import AmortizedPosterior
from pyro_nami.checking.plots import RANK_PLOTS, RankPanel, plot_all
from pyro_nami.checking.rank_tests import (
    JOINT_DENSITY,
    JOINT_TARP,
    RankVerdict,
    ecdf_tests,
    verdicts,
)
from pyro_nami.checking.simulations import finite_draws, guide_and_arguments, seeded
from pyro_nami.inference.observations import observed_names
from pyro_nami.inference.ranks import below, density_ranks, guide_draws, ranks_among
from pyro_nami.inference.scaled_coordinates import Coordinates, SiteForm, site_forms
from pyro_nami.inference.simulate import JointDraws, Simulator
from pyro_nami.inference.simulator_model import with_drawn_data
from pyro_nami.inference.site_messages import Values, joined
from pyro_nami.inference.target import Extent, Target, bind, in_one_line
from pyro_nami.messages import aligned, check_counts, quoted
from pyro_nami.program.runner import Runner, takes_observations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Draws of the guide at once, of all data sets together. Ten times more may not fit into memory; ten times fewer make
# many short runs, which take longer.
DRAWS_AT_ONCE = 2**15


@dataclass(frozen=True)
class Calibration:
    """Ranks of true values among a guide's draws, over data sets simulated from the model.

    Attributes:
        ranks: latent -> integers ``(num_datasets, *plates, *event)`` from 0 to ``num_draws``: the number of draws below
            the true value, ties broken at random.
        joint: ranks ``(num_datasets,)`` of all latents together: ``"joint density"``, the number of draws of higher
            density than the truth (where the guide has a density); ``"joint TARP"``, the number of draws nearer than
            the truth to a random reference point.
        num_draws: draws of the guide for each data set.
        level: the family-wise level of `verdicts` and `passed`.
        skipped: simulated data sets left out for NaN or infinite values.
        absent: latents of the model that the guide does not draw; they have no ranks.
    """

    ranks: Values
    joint: Values
    num_draws: int
    level: float = 0.01
    skipped: int = 0
    absent: tuple[str, ...] = ()

    @property
    def num_datasets(self) -> int:
        """Number of data sets with ranks."""
        return len(next(iter(self.ranks.values())))

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: ranks.cpu().numpy() for name, ranks in {**self.ranks, **self.joint}.items()}

    @cached_property
    def verdicts(self) -> dict[str, RankVerdict]:
        """Site, or joint test -> its verdict.

        Ranks are tested element by element by the exact simultaneous envelope of their empirical distribution function
        (Säilynoja et al. 2022), and by that of their distance from the middle (the coverage of central intervals);
        joint tests, by the first.
        """
        return verdicts(self._arrays, self.num_draws, self.level)

    @property
    def failed(self) -> list[str]:
        """Sites, and joint tests, that are not calibrated."""
        return [name for name, verdict in self.verdicts.items() if not verdict.passed]

    @property
    def passed(self) -> bool:
        """Whether every site and joint test is calibrated. A right guide passes with a probability of 1 - level."""
        return not self.failed

    def coverage(self, levels: Sequence[float]) -> Values:
        """Returns site -> share of true values inside the guide's central intervals of given probabilities.

        Args:
            levels: probabilities between 0 and 1.

        Returns:
            Site -> ``(levels, *plates, *event)``; joint tests -> ``(levels,)``: regions of highest density (Hermans et
            al. 2022), and balls around the reference points.
        """
        if not all(0 <= level <= 1 for level in levels):
            raise ValueError(f"Expected levels between 0 and 1; got {list(levels)}.")
        result = {}
        for name, ranks in {**self.ranks, **self.joint}.items():
            shares = []
            for level in levels:
                low = (1 - level) / 2 if name in self.ranks else 0.0
                inside = below(ranks, low + level, self.num_draws)
                shares.append((inside - below(ranks, low, self.num_draws)).mean(0))
            result[name] = torch.stack(shares)
        return result

    @property
    def _title(self) -> str:
        verdict = "passed" if self.passed else f"failed at {listed(self.failed)}"
        return f"Calibration: {self.num_datasets:,} data sets, {self.num_draws:,} draws each: {verdict}"

    @property
    def panels(self) -> dict[str, RankPanel]:
        """Site, or joint test -> its ranks and verdict, for figures."""
        panels = {}
        for name, ranks in self._arrays.items():
            tests = len(ecdf_tests(name, len(ranks), self.num_draws)) * self.verdicts[name].elements
            level = self.level / (len(self.verdicts) * tests)
            panels[name] = RankPanel(name, ranks, self.num_draws, self.verdicts[name], level)
        return panels

    def plot(self, kind: str = "ecdf", *, sites: Sequence[str] | None = None) -> Figure:
        """Draws the ranks of the worst element of some sites, with the bands that calibrated ones stay in.

        Args:
            kind: ``"ecdf"``, the distribution function of ranks less that of uniform ones, or ``"coverage"`` of central
                intervals (of ``sites=["joint TARP"]``, of balls around reference points).
            sites: which to draw; by default the 12 with the smallest p-values, in model order.

        Raises:
            ImportError: matplotlib is missing (the extra ``viz``).
        """
        if kind not in RANK_PLOTS:
            raise ValueError(f"Expected kind to be one of {', '.join(RANK_PLOTS)}; got {kind!r}.")
        panels = self.panels
        if sites is None:
            least = sorted(panels, key=lambda name: panels[name].verdict.p_value)[:12]
            sites = [name for name in panels if name in least]
        for name in sites:
            if name not in panels:
                raise ValueError(f"Expected sites with ranks, {quoted(panels)}; got '{name}'.")
        return plot_all(self._title, [panels[name] for name in sites], kind)

    def __str__(self) -> str:
        coverage = self.coverage([0.5, 0.9])
        rows = [("site", "elements", "verdict", "p", "off by", "bias", "spread", "50%", "90%")]
        for name, v in self.verdicts.items():
            shown = name + (str(list(v.worst)) if v.worst else "")
            p_value = "<1e-12" if v.p_value < 1e-12 else f"{v.p_value:.2g}"
            bias, spread = ("", "") if np.isnan(v.bias) else (f"{v.bias:+.3f}", f"{v.spread:.3f}")
            half, most = (f"{float(share[v.worst]):.3f}" for share in coverage[name])
            numbers = (p_value, f"{v.deviation:.3f}", bias, spread, half, most)
            rows.append((shown, str(v.elements), v.verdict, *numbers))
        notes = [_LEGEND.format(level=self.level)]
        if self.skipped:
            notes.append(
                f"Left out for NaN or infinite values: {self.skipped:,} simulated data sets."
            )
        if self.absent:
            notes.append(f"Not drawn by the guide: {', '.join(self.absent)}.")
        return "\n".join([self._title, "", *aligned(rows, words=(0, 2)), "", *notes])


_LEGEND = """\
p: adjusted for all elements, tests and sites; below {level:g} fails. The element shown is the one with the smallest.
off by: largest difference between the distribution functions of its ranks and of uniform ones.
bias, spread: location and sd of the truth relative to the guide's, in the guide's sds; 0 and 1 are right.
50%, 90%: share of true values inside the guide's intervals of these probabilities."""


def listed(names: Sequence[str], most: int = 4) -> str:
    """Returns names in quotes; of many, the first ones and the number of the others."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + rest


def calibrate(
    model: Callable,
    guide: Callable | AmortizedPosterior,
    *args: Any,
    num_datasets: int = 1000,
    num_draws: int = 99,
    observed: Sequence[str] = (),
    level: float = 0.01,
    seed: int | None = None,
    chunk_size: int | None = None,
    progress: bool = True,
    **kwargs: Any,
) -> Calibration:
    """Compares a guide with the exact posterior, on data sets that the model simulates.

    Ranks are taken of every scalar element of every latent, and of all latents together: by the guide's own density,
    and by distances to reference points (TARP) in standardized unconstrained coordinates. These points are random
    projections of the data, so that a guide that ignores its data is found as well.

    Args:
        model: a Pyro model.
        guide: takes ``observations={site: value}``, with batch dims left of the plates. A posterior of `amortize` in
            place of a guide is judged by draws that are resampled from ten times as many weighted ones, at least 1,000.
        *args, **kwargs: the model's arguments, by default the posterior's. Data among them is simulated anew.
        num_datasets: data sets; 1000 find sds that are off by 10 to 20%, and locations off by 0.2 sds.
        num_draws: draws of the guide for each data set.
        observed: sites to condition on that the model samples without data, beside those of ``guide.observed``.
        level: the probability with which a right guide is found wrong, over all sites.
        seed: of all random numbers; None goes on from the current state. The state outside stays as it was.
        chunk_size: data sets in one call of the guide, which bounds memory; by default 2**15 draws are made at once.
        progress: whether to show a progress bar where this takes more than a second.

    Raises:
        ValueError: a number below 1; the guide draws no latent of the model, or not under plates; more than
            95% of the simulations hold NaN or infinite values; the guide runs a model that takes one draw at a time.
        TypeError: the guide does not take ``observations``.

    References:
        Talts et al. 2018, "Validating Bayesian inference algorithms with simulation-based calibration" (ranks); Lemos
        et al. 2023, "Sampling-based accuracy testing of posterior estimators for general inference" (TARP).
    """
    posterior = guide if isinstance(guide, AmortizedPosterior) else None
    guide, args, kwargs = guide_and_arguments(guide, args, kwargs)
    check_counts(num_datasets=num_datasets, num_draws=num_draws, chunk_size=chunk_size)
    _check_options(guide, level)
    with seeded(seed):
        names = observed_names(observed, guide)
        model = with_drawn_data(model, args, kwargs, names)
        simulator = Simulator(model, args, kwargs, names)
        bind(guide, simulator.model)
        truth, skipped = finite_draws(simulator, num_datasets)
        ranks = _ranks_of_all(simulator, guide, posterior, truth, num_draws, chunk_size, progress)
    joint = {name: ranks[name] for name in (JOINT_DENSITY, JOINT_TARP) if name in ranks}
    ranks = {name: ranks[name] for name in truth.latents if name in ranks}
    absent = tuple(name for name in truth.latents if name not in ranks)
    return Calibration(ranks, joint, num_draws, level, skipped, absent)


def _ranks_of_all(
    simulator: Simulator,
    guide: Callable,
    posterior: AmortizedPosterior | None,
    truth: JointDraws,
    num_draws: int,
    chunk_size: int | None,
    progress: bool,
) -> Values:
    """Returns the ranks of the latents ``(data sets, *site shape)`` and of the joint tests ``(data sets,)``."""
    forms = site_forms(simulator)
    coordinates = Coordinates(truth.latents, forms)
    points = _reference_points(truth.observed, forms, coordinates(truth.latents))
    target = replace(simulator.target, guide=guide)
    made = num_draws if posterior is None else _num_weighted(num_draws)  # of one data set
    size = chunk_size or max(1, DRAWS_AT_ONCE // made)
    chunks = torch.arange(truth.num, device=points.device).split(size)
    parts = []
    try:
        for rows in tqdm(chunks, "calibrating", delay=1, leave=False, disable=not progress):
            part = truth.select(rows)
            extent = target.extent(num_draws, slice(0, part.num))._replace(data=part.observed)
            if posterior is None:
                draws = guide_draws(target.run_guide(extent, Runner({})), num_draws, part)
            else:
                draws = _posterior_draws(posterior, num_draws, part)
            ranks = {name: ranks_among(draws[name], part.latents[name], name) for name in draws}
            if len(draws) == len(part.latents):
                ranks |= _joint_ranks(target, extent, draws, part, coordinates, points[rows])
            parts.append(ranks)
    except Exception as error:
        if simulator.vectorized:
            raise
        raise ValueError(
            "Expected a model that can be run for many draws at once, as this guide runs it for its own: "
            f"{in_one_line(error)}. Write the model for batch dims on the left, `w @ X.mT` for `X @ w` say, or "
            "make the guide with exact=False, anchor=False, which does without."
        ) from error
    return {
        name: ranks.reshape(-1, *forms[name].shape) if name in forms else ranks
        for name, ranks in joined(parts).items()
    }


def _check_options(guide: Callable, level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"Expected level between 0 and 1; got {level}.")
    if not takes_observations(guide, is_guide=True):
        raise TypeError(
            "Expected a guide that takes observations={site: value}, by which it is given simulated data; this one "
            "does not."
        )


def _joint_ranks(
    target: Target,
    extent: Extent,
    draws: Values,
    truth: JointDraws,
    coordinates: Coordinates,
    points: Tensor,
) -> Values:
    """Returns the ranks of all latents together, on some data sets, by TARP and, if it has one, the guide's density."""
    drawn = (coordinates(draws, 2) - points).square().sum(-1)
    true = (coordinates(truth.latents) - points).square().sum(-1)
    ranks = {JOINT_TARP: ranks_among(drawn, true, JOINT_TARP)}
    if hasattr(target.guide, "log_prob"):
        ranks[JOINT_DENSITY] = density_ranks(target, extent, draws, truth, JOINT_DENSITY)
    return ranks


def _num_weighted(num_draws: int) -> int:
    """Returns how many weighted draws to resample from: from few, the same ones would come up again and again."""
    return max(1000, 10 * num_draws)


def _posterior_draws(posterior: AmortizedPosterior, num_draws: int, truth: JointDraws) -> Values:
    """Returns draws of the latents, resampled from weighted ones, ``(num_draws, data sets, *plates, *event)``."""
    with warnings.catch_warnings():
        # of some data sets, by chance; the verdict tells of the others
        warnings.filterwarnings(
            "ignore", ".*outside the model's simulations|The importance weights"
        )
        found = posterior(truth.observed, _num_weighted(num_draws), progress=False)
    drawn = found.resample(num_draws)
    return {
        name: drawn[name].reshape(num_draws, *true.shape) for name, true in truth.latents.items()
    }


def _reference_points(data: Values, forms: Mapping[str, SiteForm], latents: Tensor) -> Tensor:
    """Returns a random linear function of each data set, ``(data sets, coordinates)`` as ``latents`` are.

    TARP holds for any reference points that do not depend on the true latents.
    """
    features = Coordinates(data, forms)(data)
    num = features.shape[1]
    return features @ features.new_empty(num, latents.shape[1]).normal_(std=num**-0.5)
