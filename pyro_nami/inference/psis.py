"""Pareto-smoothed importance sampling: replaces the largest weights by quantiles of the tail that they come from.

The tail's shape k, fitted on the way, says how far the weights can be trusted: where it is below 0.5 their variance is
finite, and above 0.7 no practical number of draws gives a stable estimate. Change this module when the fit of the tail
changes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["check_log_weights", "smooth"]

_FEWEST = 5  # draws in a tail that can be fitted
_FLAT = 1e-3  # nats: weights that differ by less are equal
_PRIOR_COUNT, _PRIOR_SHAPE = 10, 0.5  # the paper's prior of k: worth 10 draws, mean 0.5
_ELEMENTS = 2**22  # of the grid of one fit in memory


def smooth(log_weights: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns smoothed log weights and the Pareto shape k-hat of their tail.

    The largest :math:`M = \lceil\min(S / 5, 3 \sqrt S)\rceil` of S weights are replaced by the expected order
    statistics of a generalized Pareto distribution fitted to what they exceed the next smaller weight by, and cut off
    at the largest raw weight. Smoothed weights stay on the scale of the raw ones. The arithmetic is in double
    precision.

    Args:
        log_weights: ``(*batch, draws)`` in nats, of any scale; -inf is a weight of zero.

    Returns:
        Smoothed log weights ``(*batch, draws)`` and k-hat ``(*batch)``. Where fewer than five weights exceed the rest,
        no tail can be fitted, and weights stay as they are: k-hat is then -inf if the largest weights are equal within
        0.1%, as those of an exact proposal, and inf if not (with 20 draws or fewer, for example).

    Raises:
        ValueError: NaN, inf, or a row with no weight above zero.

    References:
        Vehtari, Simpson, Gelman, Yao & Gabry 2024, "Pareto Smoothed Importance Sampling"; Zhang & Stephens 2009, "A New
        and Efficient Estimation Method for the Generalized Pareto Distribution".
    """
    check_log_weights(log_weights)
    draws = log_weights.shape[-1]
    rows = log_weights.detach().reshape(-1, draws).double()
    length = math.ceil(min(draws / 5, 3 * math.sqrt(draws)))
    at_once = max(1, _ELEMENTS // (length * (30 + math.isqrt(length))))
    done = [_smooth_rows(part, min(length, draws - 1)) for part in rows.split(at_once)]
    smoothed, shape = (torch.cat(parts).to(log_weights.dtype) for parts in zip(*done))
    return smoothed.reshape(log_weights.shape), shape.reshape(log_weights.shape[:-1])


def check_log_weights(log_weights: Tensor) -> None:
    """Raises ValueError for log weights ``(*batch, draws)`` that are no weights: NaN, inf, all zero, or none at all."""
    if log_weights.dim() == 0 or log_weights.numel() == 0:
        raise ValueError(f"Expected log weights of at least one draw; got shape {tuple(log_weights.shape)}.")
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


def _smooth_rows(rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns smoothed rows ``(rows, draws)`` and k-hat ``(rows,)``, with tails of up to ``length`` draws."""
    largest = rows.amax(-1, keepdim=True)
    top, index = (rows - largest).topk(length + 1, dim=-1)  # descending
    cutoff = top[:, -1:].clamp(min=math.log(torch.finfo(rows.dtype).tiny))
    raw, index = top[:, :-1], index[:, :-1]
    in_tail = raw > cutoff  # ties with the cutoff are not in it
    counts = in_tail.sum(-1)
    fitted = counts >= _FEWEST
    flat = (cutoff[:, 0] > -_FLAT) & (length > 0)
    shape = torch.where(flat, -math.inf, math.inf).to(rows)
    result = rows.clone()
    if fitted.any():
        raw, cutoff, in_tail, counts = raw[fitted], cutoff[fitted], in_tail[fitted], counts[fitted]
        excess = (raw.exp() - cutoff.exp()).masked_fill(~in_tail, 0.0)
        k, scale = _fit(excess, in_tail, counts)
        ranks = torch.arange(length, dtype=rows.dtype, device=rows.device)
        upper = (ranks + 0.5) / counts[:, None]  # 1 - probability; descending, as the tail is
        quantiles = _quantile(upper.clamp(max=1.0), k[:, None], scale[:, None])
        tail = (quantiles + cutoff.exp()).log().clamp(max=0.0) + largest[fitted]
        changed = in_tail & torch.isfinite(k[:, None]) & ~torch.isnan(tail)
        part, place = result[fitted], index[fitted]
        result[fitted] = part.scatter(-1, place, torch.where(changed, tail, part.gather(-1, place)))
        shape[fitted] = torch.where(torch.isfinite(k), k, math.inf)
    return result, shape


def _fit(excess: Tensor, in_tail: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns shape k and scale of generalized Pareto distributions fitted to tails of different lengths.

    Zhang & Stephens' empirical Bayes estimate: an average over a grid of b = -k / scale, weighted by the profile
    likelihood; k is then drawn towards its prior, the scale is not.

    Args:
        excess: ``(rows, length)``, descending, 0 outside the tail.
        in_tail: of the same shape.
        counts: ``(rows,)``, draws in each tail.
    """
    grid = 30 + counts.double().sqrt().floor()  # its size, row by row
    points = torch.arange(1, int(grid.max()) + 1, dtype=excess.dtype, device=excess.device)
    quartile = excess.gather(-1, (counts - (counts / 4 + 0.5).long())[:, None])
    b = (1 - (grid[:, None] / (points - 0.5)).sqrt()) / (3 * quartile) + 1 / excess[:, :1]
    k = torch.log1p(-b[..., None] * excess[:, None, :]).sum(-1) / counts[:, None]
    n = counts[:, None].to(excess)
    likelihood = n * ((-b / k).log() - k - 1)
    likelihood = likelihood.masked_fill(points > grid[:, None], -math.inf)
    weights = likelihood.softmax(-1)
    weights = weights.masked_fill(weights < 10 * torch.finfo(excess.dtype).eps, 0.0)
    mean = (b * weights).sum(-1) / weights.sum(-1)
    shape = torch.log1p(-mean[:, None] * excess).masked_fill(~in_tail, 0.0).sum(-1) / counts
    scale = -shape / mean
    return (counts * shape + _PRIOR_COUNT * _PRIOR_SHAPE) / (counts + _PRIOR_COUNT), scale


def _quantile(upper: Tensor, k: Tensor, scale: Tensor) -> Tensor:
    """Returns the value that a generalized Pareto variable exceeds with probability ``upper``."""
    small = k.abs() < torch.finfo(upper.dtype).eps
    k = torch.where(small, 1.0, k)
    log_upper = upper.log()
    return scale * torch.where(small, -log_upper, torch.expm1(-k * log_upper) / k)
