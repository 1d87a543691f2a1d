"""Binary trees of Gaussian sites with their leaves observed: the model, and what is known of it exactly.

X_0 ~ N(0, 1) and X_i ~ N(w_i X_parent, 1) with parent (i - 1) // 2 and fixed w_i ~ U(1/2, 2) (Webb et al. 2018,
supplement D.2). All sites are jointly Gaussian, so posterior and conditional entropies are linear algebra, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.graph import Inverse


class GaussianTree:
    """One tree; an instance is a Pyro model, called with the leaves ``(*batch, leaves)``.

    Args:
        depth: number of levels.
        seed: of the weights w.

    Attributes:
        latents, leaves: names of the sites.
        covariance: of all sites, ``(sites, sites)``, float64.
    """

    def __init__(self, depth: int, seed: int) -> None:
        count, inner = 2**depth - 1, 2 ** (depth - 1) - 1
        generator = torch.Generator().manual_seed(seed)
        self.weights = (0.5 + 1.5 * torch.rand(count, generator=generator, dtype=torch.float64)).tolist()
        names = [f"x_{i}" for i in range(count)]
        self.index: dict[Hashable, int] = {name: i for i, name in enumerate(names)}
        self.latents, self.leaves = names[:inner], names[inner:]
        regression = torch.eye(count, dtype=torch.float64)
        for i in range(1, count):
            regression[i, (i - 1) // 2] = -self.weights[i]
        precision = regression.t() @ regression
        self.covariance = torch.linalg.inv(precision)
        self._precision = precision[:inner, :inner]
        self._from_leaves = -torch.linalg.solve(self._precision, precision[:inner, inner:])

    def __call__(self, leaves: Tensor) -> None:
        inner = len(self.latents)
        values = [pyro.sample("x_0", dist.Normal(leaves.new_zeros(()), 1.0))]
        for i in range(1, len(self.index)):
            mean = self.weights[i] * values[(i - 1) // 2]
            obs = None if i < inner else leaves[..., i - inner]
            values.append(pyro.sample(f"x_{i}", dist.Normal(mean, 1.0), obs=obs))

    def example(self) -> Tensor:
        """Returns leaves to call the model with; zeros."""
        return torch.zeros(len(self.leaves))

    def posterior_log_prob(self, latents: Mapping[str, Tensor], leaves: Mapping[str, Tensor]) -> Tensor:
        """Returns log p(latents | leaves) of values ``(batch,)`` by site, ``(batch,)``, float64."""
        z = torch.stack([latents[name].double() for name in self.latents], -1)
        x = torch.stack([leaves[name].double() for name in self.leaves], -1)
        residual = z - x @ self._from_leaves.t().to(x.device)
        energy = ((residual @ self._precision.to(z.device)) * residual).sum(-1)
        return 0.5 * (torch.logdet(self._precision) - energy - len(self.latents) * math.log(2 * math.pi))

    def posterior_entropy(self) -> float:
        """Returns H(z | x) in nats, the same for all x."""
        return self._entropy(self.index) - self._entropy(self.leaves)

    def limit(self, inverse: Inverse) -> float:
        """Returns the least E_x KL(p(z | x) || q(z | x)) of all q that factorize as an inverse, in nats.

        It is attained by q(v | Pa(v)) = p(v | Pa(v)) and is sum_v H(v | Pa(v)) - H(z | x).
        """
        entropies = [
            self._entropy([v, *inverse.parents[v]]) - self._entropy(inverse.parents[v]) for v in self.latents
        ]
        return max(0.0, sum(entropies) - self.posterior_entropy())

    def _entropy(self, names: Iterable[Hashable]) -> float:
        rows = [self.index[name] for name in names]
        block = self.covariance[rows][:, rows]
        return 0.5 * float(torch.logdet(2 * math.pi * math.e * block)) if rows else 0.0
