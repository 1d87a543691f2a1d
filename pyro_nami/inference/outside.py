"""How far data lie outside of simulations, where amortized inference has never been.

Data sets become features, of each site: its standardized values where they are few, and summaries of them over plates.
Half of the simulations say where data sets are and how they vary, the other half how far away they usually are. Change
this module to change what counts as unusual data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.inference.coordinates import Coordinates, SiteForm

__all__ = ["ADVICE", "SimulatedData"]

ADVICE = (
    "A guide trained on simulations was never trained on such data. Check units and outliers, and whether the model's "
    "priors and likelihood allow for what the data show."
)

_LEAST_SHRINKAGE = 1e-3  # so that features which never vary have some variance
_MARGIN = 10.0  # over the number of simulations
_FEW = 64  # elements of a site, or columns of its events, that are features one by one


class SimulatedData:
    """Where a model's data are, and how far they usually are from there.

    Distances are Mahalanobis', by all features, and by those of each site alone: ``(data sets, 1 + sites)``.

    Args:
        observed: site -> simulated values ``(data sets, ...)``.
        forms: of the sites.

    Attributes:
        others: distances of the second half of the simulations.

    Example:
        >>> form = SiteForm(torch.Size([2]), 1, lambda value: value)
        >>> simulated = SimulatedData({"x": torch.randn(1000, 2)}, {"x": form})
        >>> simulated.outside(simulated.distances({"x": torch.tensor([[0.0, 1.0], [9.0, -9.0]])}))
        tensor([False,  True])
    """

    def __init__(self, observed: Mapping[str, Tensor], forms: Mapping[str, SiteForm]) -> None:
        self.forms = {name: forms[name] for name in observed}
        usual, others = ({name: value[start::2] for name, value in observed.items()} for start in (0, 1))
        self._coordinates = Coordinates(usual, self.forms)
        features = self._features(usual)
        self._spaces = [_Space(sample) for sample in features]
        center = self.distances(usual)
        self._mean, self._sd = center.mean(0), center.std(0).clamp(min=1e-6)
        self.others = self.distances(others)

    def distances(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the distances of data sets ``(data sets, ...)`` from the center of the simulations."""
        return torch.stack([space.distances(x) for space, x in zip(self._spaces, self._features(values))], -1)

    def batch(self, data: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Returns values of one data set, or of several, as those of several; None where not all are there."""
        found = {}
        for name, form in self.forms.items():
            value = torch.as_tensor(data.get(name, []), device=self.others.device)
            size = max(1, form.shape.numel())
            if not value.numel() or value.numel() % size:
                return None
            found[name] = value.reshape(-1, *form.shape)
        num = max(map(len, found.values()), default=0)
        return {name: value.expand(num, *value.shape[1:]) for name, value in found.items()}

    def p_value(self, distances: Tensor) -> float:
        """The share of simulations as far out as one data set: by all features, or by the site that is furthest out."""
        others, here = self._measures(self.others), self._measures(distances[None])
        p_values = (1 + (others >= here).sum(0).double()) / (1 + len(others))
        return float(p_values[0]) if self.others.shape[1] == 2 else min(1.0, 2 * float(p_values.min()))

    def outside(self, distances: Tensor) -> Tensor:
        """Returns which data sets ``(data sets,)`` are further out than all simulations, by either measure.

        Of few simulations by some more, as each further one may be the furthest.
        """
        furthest = self._measures(self.others).amax(0)
        return (self._measures(distances) > (1 + _MARGIN / len(self.others)) * furthest).any(-1)

    def ratios(self, distances: Tensor) -> dict[str, float]:
        """Returns how many times as far one data set is as the median simulation, site by site, the largest first."""
        ratios = (distances[1:] / self.others[:, 1:].median(0).values.clamp(min=1e-6)).tolist()
        return dict(sorted(zip(self.forms, ratios), key=lambda item: -item[1]))

    def place(self, distances: Tensor) -> str:
        """Says in a sentence or two where one data set is."""
        usual, sites = self.others[:, 0], list(self.ratios(distances).items())[:3]
        return (
            f"at distance {float(distances[0]):.3g}, where {float(usual.median()):.3g} is the median of {len(usual):,} "
            f"and {float(usual.max()):.3g} the largest. Times the median distance, most unusual sites first: "
            + ", ".join(f"'{name}' {ratio:.1f}" for name, ratio in sites)
            + "."
        )

    def _measures(self, distances: Tensor) -> Tensor:
        """Distances in sds of usual ones, by all features and by the site that is furthest out, ``(data sets, 2)``."""
        standard = (distances - self._mean) / self._sd
        return torch.stack((standard[:, 0], standard[:, 1:].amax(1)), 1)

    def _features(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        own = self._coordinates({name: values[name] for name in self.forms}).double()
        sites = [_features(own[:, place], self.forms[name]) for name, place in self._coordinates.columns.items()]
        return [torch.cat(sites, -1), *sites]


def _features(elements: Tensor, form: SiteForm) -> Tensor:
    """A site's elements ``(data sets, elements)``, if few, and how they are distributed over plates."""
    rows = form.shape[: len(form.shape) - form.event_dim].numel()
    table = elements.reshape(len(elements), rows, -1)
    if table.shape[2] > _FEW:
        table = elements.unsqueeze(-1)
    features = [elements] if elements.shape[1] <= _FEW else []
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
        self.scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        x = (sample - self.center) / self.scale
        num, size = x.shape
        covariance = x.T @ x / num
        mean = covariance.diagonal().mean()
        identity = torch.eye(size, dtype=x.dtype, device=x.device)
        error = (x.square().sum(1).square().mean() - covariance.square().sum()) / num
        departure = (covariance - mean * identity).square().sum().clamp(min=1e-12)
        share = (error / departure).clamp(_LEAST_SHRINKAGE, 1)
        self.factor = torch.linalg.cholesky(
            (1 - share) * covariance + share * mean.clamp(min=_LEAST_SHRINKAGE) * identity
        )

    def distances(self, values: Tensor) -> Tensor:
        x = (values - self.center) / self.scale
        return torch.linalg.solve_triangular(self.factor, x.T, upper=False).square().sum(0).sqrt()
