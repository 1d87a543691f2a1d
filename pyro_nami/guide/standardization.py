"""What networks read of a node: embeddings, scales, and values that are the same in all instances.

Change this module to standardize features differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Embedding", "first_instance", "standardization"]

_MOST_ROWS = 100_000


class Embedding(NamedTuple):
    """Features of an observed site by a module of the user's."""

    module: nn.Module
    event_dim: int

    def features(self, value: Tensor) -> Tensor:
        """Returns ``(*batch, 1, features)``; the module sees the batch as its only leading dim."""
        cut = value.dim() - self.event_dim
        return self.module(value.reshape((-1,) + value.shape[cut:])).reshape(value.shape[:cut] + (1, -1))


def first_instance(value: Tensor, site: Mapping[str, Any]) -> Tensor:
    """Returns a value with its first instance only, size 1, in the plates of its site."""
    for frame in site["cond_indep_stack"]:
        if frame.vectorized:
            dim = frame.dim - site["fn"].event_dim
            value = value.narrow(dim, 0, 1) if value.dim() >= -dim else value
    return value


def standardization(rows: Tensor, here: Tensor, factory: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns (shift, scale) from rows of raw features; zeros and ones (categories) are left as they are."""
    rows, here = rows.to(**factory), here.to(**factory)
    if len(rows) > 1:
        low, center, high = torch.quantile(rows[:_MOST_ROWS], torch.tensor([0.16, 0.5, 0.84]).to(rows), dim=0)
        spread = (high - low) / 2
        flat = ~(spread > 1e-6 * center.abs()) | ~spread.isfinite()
        spread = torch.where(flat, rows.std(0), spread)
    else:
        center, spread = here.mean(0), torch.ones_like(here[0])
    usable = spread.isfinite() & (spread > 1e-6 * center.abs()) & (spread > 0)
    left = ((rows == 0) | (rows == 1)).all(0)
    scale = torch.where(usable & ~left, 1 / spread, torch.ones_like(spread))
    return torch.where(left | ~center.isfinite(), torch.zeros_like(center), -center * scale), scale
