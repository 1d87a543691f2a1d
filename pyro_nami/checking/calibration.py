"""Whether a guide's posteriors are right on average over the model's own data sets.

`calibrate` draws data sets with their true latents from the model and asks the guide for draws given each; where the
guide is the posterior, a true value is as any other draw, so its rank among them is uniform. The result holds the
ranks; `verdicts` tests them and `plots` draws them. Change this module to change what is compared with what.
"""

from __future__ import annotations

__all__ = [
    "JOINT_DENSITY",
    "JOINT_TARP",
    "Calibration",
    "Verdict",
    "calibrate",
    "listed",
    "without_non_finite",
]

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_nami.checking.verdicts import CALIBRATED, Finding, holm, judge, judge_joint
from pyro_nami.inference.coordinates import Coordinates, SiteForm, site_forms
from pyro_nami.inference.observations import observed_names
from pyro_nami.inference.simulate import JointDraws, Simulator, forked_rng
from pyro_nami.reading.runner import takes_observations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JOINT_DENSITY, JOINT_TARP = "joint density", "joint TARP"
_ROWS_A_CALL = 2**15  # draws of the guide in one call, over data sets, unless the caller says how many
_REFERENCE_FEATURES = 256  # coordinates of the data, at most, that a reference point depends on
_TOLERATED = 0.1  # share of simulations that may be NaN or infinite
_FEW, _TOLERATED_OF_FEW = 100, 0.5  # a tenth of few simulations may be chance


class Verdict(NamedTuple):
    """What the ranks of one site (or of a joint test) say; see `Calibration.verdicts`.

    Attributes:
        verdict: ``"calibrated"``, ``"overconfident"``, ``"underconfident (conservative)"``, ``"biased"``, or
            ``"miscalibrated"`` where the ranks are not uniform but none of these says why.
        p_value: that the guide is calibrated here, adjusted for the site's elements and tests and for all other sites.
        elements: number of the site's scalar elements.
        worst: index of the element with the smallest p-value, in ``(*plates, *event)``; the rest is about it.
        deviation: largest difference between the distribution functions of its ranks and of uniform ones.
        bias: how far the truth lies above the guide's location, in sds of the guide; 0 is right. NaN for joint tests.
        spread: sd of the truth around the guide's location, in sds of the guide; 1 is right. NaN for joint tests.
    """

    verdict: str
    p_value: float
    elements: int
    worst: tuple[int, ...]
    deviation: float
    bias: float
    spread: float


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

    ranks: Mapping[str, Tensor]
    joint: Mapping[str, Tensor]
    num_draws: int
    level: float = 0.01
    skipped: int = 0
    absent: tuple[str, ...] = ()

    @property
    def num_datasets(self) -> int:
        """Number of data sets that there are ranks for."""
        return len(next(iter(self.ranks.values())))

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Site, or joint test -> its verdict.

        Ranks are tested element by element by the exact simultaneous envelope of their empirical distribution function
        (Säilynoja et al. 2022), and by that of their distance from the middle (the coverage of central intervals);
        joint tests, by the first. A site's p-value is Bonferroni's over all tests of its elements; those of all sites
        are adjusted by Holm's method.
        """
        findings: dict[str, Finding] = {}
        for name, ranks in self.ranks.items():
            findings[name] = judge(ranks.reshape(self.num_datasets, -1).cpu().numpy(), self.num_draws)
        for name, ranks in self.joint.items():
            findings[name] = judge_joint(ranks.cpu().numpy(), self.num_draws, distances=name == JOINT_TARP)
        adjusted = holm([finding.p_value for finding in findings.values()])
        result = {}
        for (name, finding), p_value in zip(findings.items(), adjusted):
            shape = tuple(self.ranks[name].shape[1:]) if name in self.ranks else ()
            result[name] = Verdict(
                verdict=CALIBRATED if p_value >= self.level else finding.kind,
                p_value=float(p_value),
                elements=int(np.prod(shape, dtype=int)),
                worst=tuple(int(i) for i in np.unravel_index(finding.element, shape)) if shape else (),
                deviation=finding.deviation,
                bias=finding.bias,
                spread=finding.spread,
            )
        return result

    @property
    def failed(self) -> list[str]:
        """Sites, and joint tests, that are not calibrated."""
        return [name for name, verdict in self.verdicts.items() if verdict.verdict != CALIBRATED]

    @property
    def passed(self) -> bool:
        """Whether every site and joint test is calibrated. A right guide passes with a probability of 1 - level."""
        return not self.failed

    def coverage(self, levels: Sequence[float]) -> dict[str, Tensor]:
        """Returns site -> share of true values inside the guide's central intervals of given probabilities.

        Args:
            levels: probabilities between 0 and 1.

        Returns:
            Site -> ``(levels, *plates, *event)``; joint tests -> ``(levels,)``: regions of highest density (Hermans et
            al. 2022), and balls around the reference points.
        """
        if not all(0 <= level <= 1 for level in levels):
            raise ValueError(f"Expected levels between 0 and 1; got {list(levels)}.")
        spans = {name: [((1 - level) / 2, (1 + level) / 2) for level in levels] for name in self.ranks}
        spans.update({name: [(0.0, level) for level in levels] for name in self.joint})
        return {
            name: torch.stack(
                [self._below(ranks, high) - self._below(ranks, low) for low, high in spans[name]]
            )
            for name, ranks in {**self.ranks, **self.joint}.items()
        }

    def _below(self, ranks: Tensor, level: float) -> Tensor:
        """Share of ranks below a level, each spread evenly over its cell: unbiased at every level."""
        return (level * (self.num_draws + 1) - ranks).clamp(0, 1).mean(0)

    def plot(self, kind: str = "ranks", *, sites: Sequence[str] | None = None) -> Figure:
        """Draws the ranks of some sites, with the bands that calibrated ones stay in.

        Args:
            kind: ``"ranks"`` (histograms), ``"ecdf"`` (difference to the uniform distribution function),
                ``"coverage"`` (of central intervals) or ``"tarp"`` (all latents together).
            sites: which to draw; by default the 12 with the smallest p-values, in model order.

        Raises:
            ImportError: matplotlib is missing (the extra ``viz``).
        """
        from pyro_nami.checking.plots import plot_calibration

        return plot_calibration(self, kind, sites)

    def __str__(self) -> str:
        half, most = (self.coverage([level]) for level in (0.5, 0.9))
        rows: list[tuple[str, ...]] = [
            ("site", "elements", "verdict", "p", "off by", "bias", "spread", "50%", "90%")
        ]
        for name, v in self.verdicts.items():
            shown = name + (str(list(v.worst)) if v.worst else "")
            p_value = "<1e-12" if v.p_value < 1e-12 else f"{v.p_value:.2g}"
            bias = ("", "") if np.isnan(v.bias) else (f"{v.bias:+.3f}", f"{v.spread:.3f}")
            cover = [f"{float(shares[name][0][v.worst]):.3f}" for shares in (half, most)]
            rows.append((shown, str(v.elements), v.verdict, p_value, f"{v.deviation:.3f}", *bias, *cover))
        widths = [max(map(len, column)) for column in zip(*rows)]
        aligned = [
            f"{'<' if i in (0, 2) else '>'}{width}" for i, width in enumerate(widths)
        ]  # words to the left
        lines = ["  ".join(map(format, row, aligned)).rstrip() for row in rows]
        title = f"Calibration: {self.num_datasets:,} data sets, {self.num_draws:,} draws each: "
        title += "passed" if self.passed else f"failed at {listed(self.failed)}"
        notes = [_LEGEND.format(level=self.level)]
        if self.skipped:
            notes.append(f"Left out for NaN or infinite values: {self.skipped:,} simulated data sets.")
        if self.absent:
            notes.append(f"Not drawn by the guide: {', '.join(self.absent)}.")
        return "\n".join([title, "", *lines, "", *notes])


_LEGEND = """\
p: adjusted for all elements, tests and sites; below {level:g} fails. The element shown is the one with the smallest.
off by: largest difference between the distribution functions of its ranks and of uniform ones.
bias, spread: location and sd of the truth relative to the guide's, in the guide's sds; 0 and 1 are right.
50%, 90%: share of true values inside the guide's intervals of these probabilities."""


def listed(names: Sequence[str], most: int = 4) -> str:
    """Returns names in quotes, the first few of many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + rest


def calibrate(
    model: Callable,
    guide: Callable,
    *args: Any,
    num_datasets: int = 1000,
    num_draws: int = 99,
    observed: Sequence[str] = (),
    level: float = 0.01,
    seed: int | None = None,
    chunk_size: int | None = None,
    **kwargs: Any,
) -> Calibration:
    """Compares a guide with the exact posterior, on data sets that the model simulates.

    One vectorized run of the model draws data sets and latents; the guide then draws for many data sets at once.
    Ranks are taken of every scalar element of every latent, and twice for all latents together: by the guide's own
    density, and by distances to random reference points (TARP) in standardized unconstrained coordinates. The reference
    points are random projections of the data, so that a guide that ignores its data is found as well.

    Args:
        model, guide: of which the guide takes ``observations={site: value}``, with batch dims left of the plates.
        *args, **kwargs: the model's arguments. Data among them is simulated anew.
        num_datasets: data sets; 1000 find sds that are off by 10 to 20%, and locations off by 0.2 sds.
        num_draws: draws of the guide for each data set.
        observed: sites that the model samples when no data is given, but that the guide conditions on; those of a
            guide with an attribute ``observed`` need not be named.
        level: the probability with which a right guide is found wrong, over all sites.
        seed: of all random numbers; None goes on from the current state. The state outside stays as it was.
        chunk_size: data sets in one call of the guide, which bounds memory; by default 2**15 draws are made at once.

    Raises:
        ValueError: a number is not positive; the guide draws no latent of the model, or not under plates; more than
            10% of the simulations hold NaN or infinite values.
        TypeError: the guide does not take ``observations``.

    References:
        Talts et al. 2018, "Validating Bayesian inference algorithms with simulation-based calibration"; Hermans et al.
        2022, "A trust crisis in simulation-based inference?"; Lemos et al. 2023, "Sampling-based accuracy testing of
        posterior estimators for general inference".
    """
    counts = {"num_datasets": num_datasets, "num_draws": num_draws, "chunk_size": chunk_size}
    for option, number in counts.items():
        if number is not None and not (isinstance(number, int) and number > 0):
            raise ValueError(f"Expected {option} to be a positive integer; got {number!r}.")
    size = max(1, _ROWS_A_CALL // num_draws) if chunk_size is None else chunk_size
    if not 0 < level < 1:
        raise ValueError(f"Expected level between 0 and 1; got {level}.")
    if not takes_observations(guide, is_guide=True):
        raise TypeError(
            "Expected a guide that takes observations={site: value}, by which it is given simulated data; this one "
            "does not."
        )
    with forked_rng(), torch.no_grad(), poutine.block():
        if seed is not None:
            pyro.set_rng_seed(seed)
        simulator = Simulator(model, args, kwargs, observed_names(observed, guide))
        truth, skipped = without_non_finite(simulator.draw(num_datasets))
        forms = site_forms(simulator)
        coordinates = Coordinates(truth.latents, forms)
        points = _reference_points(truth.observed, forms, coordinates(truth.latents))
        parts = []
        for start in range(0, len(points), size):
            rows = slice(start, start + size)
            latents, data = (
                {k: v[rows] for k, v in part.items()} for part in (truth.latents, truth.observed)
            )
            call = {**kwargs, "observations": data}
            draws = _guide_draws(guide, args, call, latents, num_draws, truth.nesting)
            part = {name: _ranks(value, latents[name], name) for name, value in draws.items()}
            if len(draws) == len(latents):
                drawn, true = coordinates(draws, 2), coordinates(latents)
                drawn, true = ((x - points[rows]).square().sum(-1) for x in (drawn, true))
                part[JOINT_TARP] = _ranks(drawn, true, JOINT_TARP)
                if hasattr(guide, "log_prob"):
                    drawn, true = (guide.log_prob(values, *args, **call) for values in (draws, latents))
                    part[JOINT_DENSITY] = _ranks(-drawn, -true, JOINT_DENSITY)
            parts.append(part)
    ranks = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    joint = {name: ranks.pop(name) for name in (JOINT_DENSITY, JOINT_TARP) if name in ranks}
    ranks = {name: value.reshape(-1, *forms[name].shape) for name, value in ranks.items()}
    absent = tuple(name for name in truth.latents if name not in ranks)
    return Calibration(ranks, joint, num_draws, level, skipped, absent)


def _guide_draws(
    guide: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    latents: Mapping[str, Tensor],
    num_draws: int,
    nesting: int,
) -> dict[str, Tensor]:
    """Draws the latents that the guide has, ``(num_draws, data sets, *plates, *event)``."""
    num_datasets = len(next(iter(latents.values())))
    datasets = pyro.plate("_calibration_datasets", num_datasets, dim=-1 - nesting)
    with pyro.plate("_calibration_draws", num_draws, dim=-2 - nesting), datasets:
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
    draws = {}
    for name in latents:
        if name not in trace:
            continue
        site: Any = trace.nodes[name]
        value, shape = site["value"], (num_draws, *latents[name].shape)
        try:
            draws[name] = value.expand(shape)
        except RuntimeError:
            raise ValueError(
                f"Expected draws of '{name}' of shape {shape} from the guide, under plates for draws and data sets in "
                f"front of the model's own; got {tuple(value.shape)}."
            ) from None
    if not draws:
        raise ValueError(
            f"Expected a guide that draws latents of the model, {list(latents)}; it has none of them."
        )
    return draws


def _ranks(draws: Tensor, truth: Tensor, name: str) -> Tensor:
    """Returns the number of draws ``(num_draws, *shape)`` below the true values ``shape``, ties broken at random."""
    if draws.isnan().any() or truth.isnan().any():
        raise ValueError(f"Expected draws and densities without NaN from the guide; got some at '{name}'.")
    ties = (draws == truth).sum(0)
    chance = torch.rand(ties.shape, device=ties.device, dtype=torch.float64)
    return (draws < truth).sum(0) + (chance * (ties + 1)).long()


def _reference_points(data: Mapping[str, Tensor], forms: Mapping[str, SiteForm], latents: Tensor) -> Tensor:
    """Returns a random linear function of each data set, ``(data sets, coordinates)`` as ``latents`` are.

    TARP holds for any reference points that do not depend on the true latents.
    """
    features = Coordinates(data, forms)(data)
    features = features[:, torch.randperm(features.shape[1], device=features.device)[:_REFERENCE_FEATURES]]
    weights = torch.randn(features.shape[1], latents.shape[1], dtype=features.dtype, device=features.device)
    return features @ weights / features.shape[1] ** 0.5


def without_non_finite(draws: JointDraws) -> tuple[JointDraws, int]:
    """Returns the joint draws without NaN and infinite values, and how many had some; warns of them.

    Raises:
        ValueError: for more than 10% of them (half, of fewer than 100), naming the first site that has them.
    """
    kept, bad = draws.finite()
    if not bad:
        return draws, 0
    skipped = draws.num - kept.num
    share = (
        f"{skipped} of {draws.num} simulations with NaN or infinite values, first at site '{next(iter(bad))}'"
    )
    if skipped > (_TOLERATED if draws.num >= _FEW else _TOLERATED_OF_FEW) * draws.num:
        raise ValueError(f"Expected a model whose simulations are finite; got {share}.")
    warnings.warn(f"Left out {share}.", stacklevel=3)
    return kept, skipped
