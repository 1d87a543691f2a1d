"""Pareto-smoothed importance sampling: replaces the largest weights by quantiles of the fitted tail.

The tail's shape k says how far the weights can be trusted: below 0.5 their variance is finite;
above 0.7 no practical number of draws gives a stable estimate.
"""

from __future__ import annotations

import math

import torch
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

__all__ = ["check_log_weights", "smooth"]

# Share of all weights by which a tail has to exceed the other weights. At ten times more, bad weights may pass for good
# ones; at ten times less, rounding may pass for a tail.
MIN_EXCESS = 1e-3


def smooth(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns smoothed log weights and the Pareto shape k-hat of their tail.

    The largest :math:`M = \lceil\min(S / 5, 3 \sqrt S)\rceil` of S weights are replaced by the expected order
    statistics of a generalized Pareto distribution fitted to what they exceed the next smaller weight by, and cut off
    at the largest raw weight. They stay on the scale of the raw ones. The arithmetic is in double precision.

    Args:
        log_weights: ``(*batch, draws)`` in nats, of any scale; -inf is a weight of zero.

    Returns:
        Smoothed log weights ``(*batch, draws)`` and k-hat ``(*batch)``. Weights stay as they are, and k-hat is -inf,
        where the tail exceeds the next smaller weight by less than 0.1% of all weights, as that of a proposal that is
        exact but for rounding, or where most of the tail weighs the same. Where fewer than five weights exceed the rest
        by more, no tail can be fitted: k-hat is inf (with 20 draws or fewer, for example).

    Raises:
        ValueError: NaN, inf, or a row with no weight above zero.

    References:
        Vehtari, Simpson, Gelman, Yao & Gabry 2024, "Pareto Smoothed Importance Sampling".

    Example:
        >>> below = (torch.arange(1000) + 0.5) / 1000
        >>> smooth(-0.5 * (1 - below).log())[1].round(decimals=1)  # quantiles of a Pareto distribution of shape 0.5
        tensor(0.5000)
    """
    check_log_weights(log_weights)
    draws = log_weights.shape[-1]
    length = min(math.ceil(min(draws / 5, 3 * math.sqrt(draws))), draws - 1)
    rows = log_weights.detach().reshape(-1, draws).double().cpu()
    smoothed, shapes = zip(*(_smooth_row(row, length) for row in rows))
    shape = torch.tensor(shapes, dtype=torch.float64, device="cpu").reshape(log_weights.shape[:-1])
    return torch.stack(smoothed).reshape(log_weights.shape).to(log_weights), shape.to(log_weights)


def check_log_weights(log_weights: Tensor) -> None:
    """Raises ValueError for log weights ``(*batch, draws)`` that are no weights: NaN, inf, all zero, or none at all."""
    if log_weights.dim() == 0 or log_weights.numel() == 0:
        raise ValueError(
            f"Expected log weights of at least one draw; got shape {tuple(log_weights.shape)}."
        )
    if not log_weights.is_floating_point():
        raise TypeError(f"Expected log weights of a floating dtype; got {log_weights.dtype}.")
    bad = torch.isnan(log_weights) | (log_weights == math.inf)
    if bad.any():
        raise ValueError(
            f"Expected log weights below inf; got NaN or inf in {int(bad.sum())} of {bad.numel()}."
        )
    lost = (log_weights == -math.inf).all(-1)
    if lost.any():
        which = f" in {int(lost.sum())} of {lost.numel()} data sets" if lost.dim() else ""
        raise ValueError(
            f"Expected at least one draw of positive weight; all weights are zero{which}. The proposal never meets the "
            "support of the posterior: check the data and the supports, or draw more."
        )


def _smooth_row(row: Tensor, length: int) -> tuple[Tensor, float]:
    """Returns a smoothed row and its k-hat, with a tail of up to ``length`` draws."""
    largest = row.max()
    top, index = (row - largest).topk(length + 1)
    tiny = torch.finfo(row.dtype).tiny
    cutoff = top[-1].exp().clamp(min=tiny)
    excess = top.exp() - cutoff
    in_tail = excess > tiny  # ties with the cutoff are not in it
    excess, index = excess[in_tail], index[in_tail]
    if length > 0 and excess.sum() / (row - largest).exp().sum() < MIN_EXCESS:
        return row, -math.inf
    if len(excess) < 5:  # as in the paper; a fit to fewer says nothing
        return row, math.inf
    if excess[-1 - int(len(excess) / 4 - 0.5)] == excess[0]:  # in order, the largest first
        return row, -math.inf
    with torch.device("cpu"):  # where the rows are, whatever the default
        k, scale = fit_generalized_pareto(excess)
    if not math.isfinite(k):
        return row, math.inf
    # probabilities
    above = (torch.arange(len(excess), dtype=row.dtype, device="cpu") + 0.5) / len(excess)
    quantiles = cutoff + scale * torch.expm1(-k * above.log()) / k
    smoothed = quantiles.log().clamp(max=0.0) + largest
    return row.scatter(-1, index, torch.where(smoothed.isnan(), row[index], smoothed)), k
