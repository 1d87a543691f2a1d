"""Binary trees of Gaussian sites with their leaves observed, as a Pyro model.

X_0 ~ N(0, 1) and X_i ~ N(w_i X_parent, 1) with parent (i - 1) // 2 and fixed w_i ~ U(1/2, 2) (Webb et al. 2018,
supplement D.2).
"""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from linear_gaussian import LinearGaussian
from torch import Tensor


class GaussianTree(LinearGaussian):
    """One tree; an instance is a Pyro model, called with the leaves ``(*batch, leaves)``, its observed sites.

    Args:
        depth: number of levels.
        seed: of the weights w.
    """

    def __init__(self, depth: int, seed: int) -> None:
        count, inner = 2**depth - 1, 2 ** (depth - 1) - 1
        generator = torch.Generator().manual_seed(seed)
        self.weights = (
            0.5 + 1.5 * torch.rand(count, generator=generator, dtype=torch.float64)
        ).tolist()
        names = [f"x_{i}" for i in range(count)]
        regression = torch.zeros(count, count, dtype=torch.float64)
        for i in range(1, count):
            regression[i, (i - 1) // 2] = self.weights[i]
        super().__init__(
            names[:inner], names[inner:], regression, torch.ones(count, dtype=torch.float64)
        )

    def __call__(self, leaves: Tensor) -> None:
        inner = len(self.latents)
        values = [pyro.sample("x_0", dist.Normal(leaves.new_zeros(()), 1.0))]
        for i in range(1, len(self.index)):
            mean = self.weights[i] * values[(i - 1) // 2]
            obs = None if i < inner else leaves[..., i - inner]
            values.append(pyro.sample(f"x_{i}", dist.Normal(mean, 1.0), obs=obs))

    def example(self) -> Tensor:
        """Returns leaves to call the model with; zeros."""
        return torch.zeros(len(self.observed))
