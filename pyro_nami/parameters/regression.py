"""Where networks start: units of what they read, and regressions on simulations.

The location of a latent as a linear function of what its factor reads needs no gradient steps. Row
by row, within the mask of the network, `regress` writes regression coefficients to the direct
weights, and the intercept and residual scale to the biases. A linear-Gaussian posterior is then
nearly exact before the first step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.factors.joint import to_sequence
from pyro_nami.factors.links import raw_scale
from pyro_nami.networks.running import center_and_spread
from pyro_nami.parameters.conditioning import Direct
from pyro_nami.parameters.inputs import concatenate
from pyro_nami.parameters.inverse_network import InverseNetwork
from pyro_nami.parameters.network_state import NetworkState

__all__ = ["least_squares", "regress", "standardization"]


@torch.no_grad()
def regress(
    network: InverseNetwork,
    state: NetworkState,
    targets: Mapping[Any, Tensor],
    moving: Collection[Any] = (),
    learned: Mapping[Any, int] = {},
    *,
    rows_per_input: int = 4,
) -> None:
    """Standardizes inputs, and writes regressions of all factors whose locations are one an element.

    Args:
        network: whose weights are written.
        state: knows all values of a batch of simulations.
        targets: factor -> its elements relative to the anchor, ``(*batch, elements)``.
        moving: nodes whose features are learned.
        learned: node -> how many of its features, the first, are learned; regressions are on the others.
        rows_per_input: simulations for each coefficient; with fewer, a row would be overfit and is left as it is.
    """
    for group in network.groups:
        if group.mlp.is_trained():
            continue
        group.standardize(state.inputs(group, 0, len(group.steps)), moving)
        if not group.mlp.skip:
            continue
        inputs, reads = state.inputs(group, 0, len(group.steps)), group.reads.clone()
        for column in group.columns(0, len(group.steps)):
            if isinstance(column.source, Direct):
                count = learned.get(column.source.node, 0) - column.first
                reads[:, column.where][:, : max(count, 0)] = False
        numbers = torch.arange(group.mlp.out_features)
        for place in group.places.values():
            factor = place.factor
            if len(factor.locations) != 1 or factor.name not in targets or factor.pseudo:
                # a regression on a set of one size would be taken for what instances say at any size
                continue
            goal = to_sequence(targets[factor.name], factor.dims)
            both = concatenate([inputs, goal]).flatten(0, -2)
            rows = place.locations(numbers).tolist()
            x, y = both[:, : -len(rows)], both[:, -len(rows) :]
            _regress_rows(group.mlp, rows, x, y, reads, rows_per_input)


def _regress_rows(
    mlp: Any, rows: list[int], x: Tensor, y: Tensor, kept: Tensor, rows_per_input: int
) -> None:
    bias = mlp.output_bias().clone()
    for row, goal in zip(rows, y.unbind(-1)):
        columns, fine = kept[row].nonzero().flatten().to(x.device), goal.isfinite()
        count = int(fine.sum())
        if count < rows_per_input * (len(columns) + 1):
            continue
        design, goal = x[fine][:, columns].double(), goal[fine].double()
        center, middle = design.mean(0), goal.mean()
        free = max(count - len(columns) - 1, 1)
        slope, spread = least_squares(design - center, goal - middle, free)
        if not (slope.isfinite().all() and spread.isfinite() and spread > 0):
            continue
        mlp.units[row] = spread.to(bias)
        mlp.set_direct(row, columns, slope.to(bias))
        bias[row] = (middle - center @ slope).to(bias)
        bias[row + 1] = raw_scale(spread.to(bias))
    mlp.set_output_bias(bias)


def least_squares(design: Tensor, goal: Tensor, free: int) -> tuple[Tensor, Tensor]:
    """Returns the slope ``(columns,)`` of a goal ``(rows,)`` on a design ``(rows, columns)``, and its residual scale.

    Columns that single precision hardly tells apart share their slope. ``free`` are the degrees of freedom of the
    residuals, without which those of many columns would tell too little.
    """
    rtol = torch.finfo(torch.float32).eps
    inverse = torch.linalg.pinv(design.mT @ design, hermitian=True, rtol=rtol)
    slope = inverse @ (design.mT @ goal)
    return slope, ((goal - design @ slope).square().sum() / free).sqrt()


def standardization(rows: Tensor, factory: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns shift and scale of the columns of ``(rows, features)``; zeros and ones (categories) stay as they are."""
    rows = rows.to(**factory)
    center = rows.mean(0)
    spread = torch.ones_like(center)
    if len(rows) > 1:
        center, spread = center_and_spread(rows)
    usable = spread.isfinite() & (spread > 1e-6 * center.abs())
    left = ((rows == 0) | (rows == 1)).all(0)
    scale = torch.where(usable & ~left, 1 / spread, torch.ones_like(spread))
    return torch.where(left | ~center.isfinite(), torch.zeros_like(center), -center * scale), scale
