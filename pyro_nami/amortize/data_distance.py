"""How far a data set lies from the model's simulations, where the guide was never trained.

A data set is described by features of each site: its standardized values if there are few of them,
summaries over plates otherwise. Half of the simulations fix the center and spread of the features;
the other half give the usual distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_nami.inference.scaled_coordinates import Coordinates, SiteForm
from pyro_nami.inference.site_messages import Values

__all__ = ["ADVICE", "Misspecification", "SimulatedData"]

ADVICE = (
    "A guide trained on simulations was never trained on such data. Check units and outliers, and whether the model's "
    "priors and likelihood allow for what the data show."
)


@dataclass(frozen=True, eq=False)
class Misspecification:
    """A data set's distance from the center of a model's simulations.

    Attributes:
        distance: Mahalanobis distance of the data's features.
        simulated: distances of simulated data sets, ``(data sets,)``.
        p_value: share of simulations that are as far out, by all features or by those of the site that is furthest out
            for the data; at least ``1 / (data sets + 1)``.
        sites: observed site -> how many times as far the data are from the center as the median simulation, by the
            features of this site alone; the most unusual first.
        level: p-values below it were warned of.
    """

    distance: float
    simulated: Tensor
    p_value: float
    sites: Mapping[str, float]
    level: float = 0.01

    @property
    def percentile(self) -> float:
        """Share of simulated data sets that are nearer to the center than the data, in percent."""
        return 100 * float((self.simulated < self.distance).double().mean())

    @property
    def passed(self) -> bool:
        """Whether the data could be a simulation."""
        return self.p_value >= self.level

    def __str__(self) -> str:
        where = "inside" if self.passed else "far outside"
        usual = float(self.simulated.median())
        sites = ", ".join(f"'{name}' {ratio:.1f}" for name, ratio in list(self.sites.items())[:3])
        return (
            f"The data lie {where} the model's simulations (p = {self.p_value:.2g}, by all sites together or by one): "
            f"at distance {self.distance:.3g}, where {usual:.3g} is the median of {len(self.simulated):,} simulations "
            f"and {self.percentile:.1f}% are nearer. Times the median distance, most unusual sites first: {sites}."
        )


class SimulatedData:
    """The center of a model's simulated data, and the distances of simulations from it.

    Distances are Mahalanobis', by all features, and by those of each site alone: ``(data sets, 1 + sites)``.

    Args:
        observed: site -> simulated values ``(data sets, ...)``.
        forms: of the sites.

    Attributes:
        others: distances of the second half of the simulations.

    Example:
        >>> form = SiteForm(torch.Size([2]), 1, lambda value: value)
        >>> simulated = SimulatedData({"x": torch.randn(1000, 2)}, {"x": form})
        >>> simulated.outside({"x": torch.tensor([[0.0, 1.0], [9.0, -9.0]])})
        tensor([False,  True])
    """

    def __init__(self, observed: Values, forms: Mapping[str, SiteForm]) -> None:
        self.forms = {name: forms[name] for name in observed}
        usual = {name: value[0::2] for name, value in observed.items()}
        others = {name: value[1::2] for name, value in observed.items()}
        self._coordinates = Coordinates(usual, self.forms)
        self._spaces = [_Space(features) for features in self._features(usual)]
        center = self.distances(usual)
        self._mean, self._sd = center.mean(0), center.std(0).clamp(min=1e-6)
        self.others = self.distances(others)

    def distances(self, values: Values) -> Tensor:
        """Returns the distances of data sets ``(data sets, ...)`` from the center of the simulations."""
        pairs = zip(self._spaces, self._features(values))
        return torch.stack([space.distances(features) for space, features in pairs], -1)

    def batch(self, data: Mapping[str, Any]) -> Values | None:
        """Returns the values of data sets ``(data sets, *shape)``; None if a site lacks them, or has another shape."""
        found = {}
        for name, form in self.forms.items():
            value = torch.as_tensor(data.get(name, []), device=self.others.device)
            size = max(1, form.shape.numel())
            if not value.numel() or value.numel() % size:
                return None
            found[name] = value.reshape(-1, *form.shape)
        num = max(map(len, found.values()), default=0)
        return {name: value.expand(num, *value.shape[1:]) for name, value in found.items()}

    def judged(self, values: Values, level: float) -> Misspecification:
        """Returns the distance of one data set ``(1, ...)``, with its p-value."""
        here = self.distances(values)
        further = self._measures(self.others) >= self._measures(here)
        p_values = (1 + further.sum(0).double()) / (1 + len(self.others))
        # of one site, both measures are the same
        p_value = min(1.0, min(len(self.forms), 2) * float(p_values.min()))
        ratios = (here[0, 1:] / self.others[:, 1:].median(0).values.clamp(min=1e-6)).tolist()
        sites = dict(sorted(zip(self.forms, ratios), key=lambda item: -item[1]))
        return Misspecification(float(here[0, 0]), self.others[:, 0], p_value, sites, level)

    def outside(self, values: Values) -> Tensor:
        """Returns which data sets ``(data sets,)`` are further out than all simulations, by either measure."""
        furthest = self._measures(self.others).amax(0)
        return (self._measures(self.distances(values)) > furthest).any(-1)

    def _measures(self, distances: Tensor) -> Tensor:
        """Standardized distances by all features, and by the features of the furthest site, ``(data sets, 2)``."""
        standard = (distances - self._mean) / self._sd
        return torch.stack((standard[:, 0], standard[:, 1:].amax(1)), 1)

    def _features(self, values: Values) -> list[Tensor]:
        own = self._coordinates({name: values[name] for name in self.forms}).double()
        parts = own.split(list(self._coordinates.sizes.values()), -1)
        sites = [_features(part, form) for part, form in zip(parts, self.forms.values())]
        return [torch.cat(sites, -1), *sites]


def _features(elements: Tensor, form: SiteForm, *, few: int = 64) -> Tensor:
    """Returns a site's elements if they are few, and their mean, log sd and extremes over plates.

    Args:
        elements: ``(data sets, elements)``.
        form: of the site.
        few: most elements of a site, or of an event, that are features one by one; more take long.
    """
    rows = form.shape[: len(form.shape) - form.event_dim].numel()
    table = elements.reshape(len(elements), rows, -1)
    if table.shape[2] > few:
        table = elements.unsqueeze(-1)
    features = [elements] if elements.shape[1] <= few else []
    if table.shape[1] > 1:
        mean, sd = table.mean(1), table.std(1) + 1e-3
        features += [mean, sd.log(), (table.amax(1) - mean) / sd, (mean - table.amin(1)) / sd]
    return torch.cat(features, -1)


class _Space:
    """The center and the covariance of a sample ``(data sets, features)``, shrunk towards independence.

    References:
        Ledoit & Wolf 2004, "A well-conditioned estimator for large-dimensional covariance matrices".
    """

    def __init__(self, sample: Tensor) -> None:
        self.center, scale = sample.mean(0), sample.std(0)
        self.scale = torch.where(scale > 0, scale, 1.0)
        x = (sample - self.center) / self.scale
        num = len(x)
        covariance = x.T @ x / num
        # features that never vary get some variance
        target = covariance.diagonal().mean().clamp(min=1e-3) * torch.eye(x.shape[1]).to(x)
        error = (x.square().sum(1).square().mean() - covariance.square().sum()) / num
        departure = (covariance - target).square().sum().clamp(min=1e-12)
        share = (error / departure).clamp(1e-3, 1)
        self.factor = torch.linalg.cholesky(torch.lerp(covariance, target, share))

    def distances(self, values: Tensor) -> Tensor:
        x = (values - self.center) / self.scale
        return torch.linalg.solve_triangular(self.factor, x.T, upper=False).norm(dim=0)
