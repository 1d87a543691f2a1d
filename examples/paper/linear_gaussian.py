"""Linear-Gaussian networks: what is known of them exactly, in float64.

All sites are jointly Gaussian, so posterior, conditional entropies and the least KL divergence of an inverse are linear
algebra. Subclasses are the Pyro models.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from pyro_nami import Inverse


class LinearGaussian:
    """A network x = B x + noise, of which some sites are observed.

    Args:
        latents, observed: names of the sites, in the order of the rows.
        regression: B, ``(sites, sites)``.
        deviations: of the noise, ``(sites,)``.

    Attributes:
        latents, observed: names of the sites.
        covariance: of all sites, ``(sites, sites)``.
        posterior_covariance: of the latents given the observed ones, the same for all values.
    """

    def __init__(
        self,
        latents: Sequence[str],
        observed: Sequence[str],
        regression: Tensor,
        deviations: Tensor,
    ) -> None:
        self.latents, self.observed = list(latents), list(observed)
        self.index: dict[Hashable, int] = {name: i for i, name in enumerate((*latents, *observed))}
        spread = (
            torch.linalg.inv(torch.eye(len(self.index), dtype=torch.float64) - regression)
            * deviations
        )
        self.covariance = spread @ spread.t()
        inner = len(self.latents)
        cross, own = self.covariance[:inner, inner:], self.covariance[inner:, inner:]
        self._from_observed = torch.linalg.solve(own, cross, left=False)
        self.posterior_covariance = (
            self.covariance[:inner, :inner] - self._from_observed @ cross.t()
        )
        self._precision = torch.linalg.inv(self.posterior_covariance)

    def posterior_mean(self, x: Tensor) -> Tensor:
        """Returns E[latents | x] of data ``(*batch, observed)``, ``(*batch, latents)``, float64."""
        return x.double() @ self._from_observed.t().to(x.device)

    def posterior_log_prob(
        self, latents: Mapping[str, Tensor], observed: Mapping[str, Tensor]
    ) -> Tensor:
        """Returns log p(latents | observed) of values ``(batch,)`` by site, ``(batch,)``, float64."""
        z = torch.stack([latents[name].double() for name in self.latents], -1)
        x = torch.stack([observed[name].double() for name in self.observed], -1)
        residual = z - self.posterior_mean(x)
        energy = ((residual @ self._precision.to(z.device)) * residual).sum(-1)
        return 0.5 * (
            torch.logdet(self._precision) - energy - len(self.latents) * math.log(2 * math.pi)
        )

    def posterior_entropy(self) -> float:
        """Returns H(z | x) in nats, the same for all x."""
        return self._entropy(self.index) - self._entropy(self.observed)

    def limit(self, inverse: Inverse) -> float:
        """Returns the least E_x KL(p(z | x) || q(z | x)) of all q that factorize as an inverse, in nats.

        It is attained by q(v | Pa(v)) = p(v | Pa(v)) and is sum_v H(v | Pa(v)) - H(z | x).
        """
        entropies = [
            self._entropy([v, *inverse.parents[v]]) - self._entropy(inverse.parents[v])
            for v in self.latents
        ]
        return max(0.0, sum(entropies) - self.posterior_entropy())

    def _entropy(self, names: Iterable[Hashable]) -> float:
        rows = [self.index[name] for name in names]
        block = self.covariance[rows][:, rows]
        return 0.5 * float(torch.logdet(2 * math.pi * math.e * block)) if rows else 0.0
