"""Maxima of log densities, from several starts at once, by quasi-Newton steps; and the curvature there.

A point is a row of numbers. All starts take their steps in the same runs of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import MAX_ERROR, MOST_RUNS, ROUNDING, TOLERANCE
from pyro_nami.deriving.gaussian_levels import times

__all__ = [
    "LONGEST",
    "SHARES",
    "Ascent",
    "ascend",
    "curvature_at",
    "measured",
    "polish",
    "root_of",
]

Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]

# Nats that a further step would gain at a mode, which is off by 0.008 deviations then.
ENOUGH = TOLERANCE * MAX_ERROR
# Length of a first step, in units of the start or deviations, at most; longer ones end where models overflow.
LONGEST = 3.0
# Shares of a Newton step, tried until one rises.
SHARES = (1.0, 0.3, 0.1, 0.03)


class Ascent(NamedTuple):
    """Where a search has led.

    Attributes:
        place: the points, ``(*lead, numbers)``.
        height: the log density there in nats, ``(*lead)``; -inf where no step could be taken.
        slope: its derivatives, ``(*lead, numbers)``.
        inverse: an estimate of the negative inverse Hessian, ``(*lead, numbers, numbers)``.
    """

    place: Tensor
    height: Tensor
    slope: Tensor
    inverse: Tensor

    @property
    def gain(self) -> Tensor:
        """The nats that a Newton step would gain, ``(*lead)``."""
        return _dot(self.slope, times(self.inverse, self.slope)) / 2

    def moved(self, taken: Tensor, place: Tensor, height: Tensor, slope: Tensor) -> Ascent:
        """Returns the searches at other points where these are ``taken``, ``(*lead)``."""
        return self._replace(
            place=torch.where(taken[..., None], place, self.place),
            height=torch.where(taken, height, self.height),
            slope=torch.where(taken[..., None], slope, self.slope),
        )

    def at(self, index: int) -> Ascent:
        """Returns one of several searches along the first dim."""
        return Ascent(*(each[index] for each in self))


def ascend(
    slopes: Slopes,
    start: Tensor,
    unit: Tensor,
    eps: float,
    *,
    enough: float = 1e-2,
) -> Ascent:
    """Returns where quasi-Newton steps (BFGS) lead that rise from some starts.

    Args:
        slopes: from points ``(*lead, numbers)`` to log densities ``(*lead)`` in nats and their derivatives.
        start: ``(*lead, numbers)``.
        unit: the order of a number's first step, ``(numbers,)``.
        eps: the rounding error of the model's numbers.
        enough: nats that a further step may still gain at the end, from where Newton steps (`polish`) take fewer runs;
            at 0.03 mixtures about modes have larger weights.

    References:
        Nocedal and Wright 2006, Numerical Optimization, chapter 6.

    Example:
        >>> slopes = lambda x: (-(x - 3).square().sum(-1) / 2, 3 - x)
        >>> ascend(slopes, torch.zeros(1, 2), torch.ones(2), 1e-7).place
        tensor([[3., 3.]])
    """
    at = Ascent(start, *slopes(start), unit.square().diag_embed().expand(*start.shape, -1))
    way = times(at.inverse, at.slope)
    length = (LONGEST / (way / unit).norm(dim=-1)).clamp(max=1.0)
    is_first = torch.ones_like(at.height, dtype=torch.bool)
    for _ in range(MOST_RUNS):
        way, rise = times(at.inverse, at.slope), 2 * at.gain
        # a step that rounding leaves nothing of leads nowhere
        long = length > torch.finfo(length.dtype).eps
        going = at.height.isfinite() & (at.gain > enough) & long
        if not bool(going.any()):
            break
        length = length.where(going, 0.0)
        step, expected = length[..., None] * way, length * rise
        moved = going.reshape(len(going), -1).any(-1)
        now, below = at.height.clone(), at.slope.clone()
        now[moved], below[moved] = slopes((at.place + step)[moved])
        rounding = ROUNDING * eps * at.height.abs().nan_to_num()
        # Armijo's condition (Nocedal and Wright 2006, 3.1)
        is_higher = going & (now >= at.height + 1e-4 * expected - rounding)
        # the maximum of the parabola through both heights with the slope at the first
        cut = expected / (2 * (at.height + expected - now).clamp(min=1e-300))
        shorter = length * cut.nan_to_num(0.1).clamp(0.1, 0.5)
        changed = _updated(at.inverse, step, at.slope - below, is_first & is_higher)
        inverse = torch.where(is_higher[..., None, None], changed, at.inverse)
        at = at.moved(is_higher, at.place + step, now, below)._replace(inverse=inverse)
        is_first &= ~is_higher
        length = torch.where(is_higher, 1.0, shorter)
    return at


def _updated(inverse: Tensor, step: Tensor, bend: Tensor, is_first: Tensor) -> Tensor:
    """Returns the inverse Hessian after a step, from the change of the slope; as it was where that is not concave."""
    product = _dot(step, bend)
    curved = product > 1e-10 * step.norm(dim=-1) * bend.norm(dim=-1)
    inner = _dot(bend, times(inverse, bend))
    # the first one has the units of the start, not of the density
    scale = torch.where(is_first & curved, product / inner, 1.0)[..., None, None]
    inverse, inner = inverse * scale, inner * scale[..., 0, 0]
    weight = 1 / product.where(curved, 1.0)
    across = times(inverse, bend)
    outer = step[..., :, None] * across[..., None, :]
    own = step[..., :, None] * step[..., None, :]
    both = ((1 + inner * weight) * weight)[..., None, None] * own
    changed = inverse + both - weight[..., None, None] * (outer + outer.mT)
    return torch.where(curved[..., None, None], changed, inverse)


def curvature_at(slopes: Slopes, place: Tensor, root: Tensor, *, aside: float = 0.3) -> Tensor:
    """Returns the negative Hessian by differences of slopes, in units of a root's columns.

    Args:
        slopes: as for `ascend`.
        place: one point for each data set, ``(*batch, numbers)``.
        root: ``(*batch, numbers, numbers)``; its columns are the ways to go.
        aside: how far to go, in columns; at a tenth of it rounding errors show.
    """
    ways = aside * root.mT.movedim(-2, 0)
    points = torch.cat([place + ways, place - ways])
    _, found = slopes(points)
    ahead, behind = found.chunk(2)
    change = (behind - ahead).movedim(0, -2) / (2 * aside)
    curvature = change @ root
    return (curvature + curvature.mT) / 2


def measured(heights: Callable[[Tensor], Tensor], found: Ascent) -> Ascent:
    """Returns the end of a search with the columns of its root scaled to deviations: there the density falls by 1/2.

    Lengths from a hundredth to a hundred times the estimate are tried.

    Args:
        heights: from points ``(points, *batch, numbers)`` to log densities in nats.
        found: of one search for each data set.
    """
    root = root_of(found.inverse)
    lengths = torch.logspace(-2, 2, 9).to(root)
    ways = root.mT.movedim(-2, 0)
    steps = torch.tensordot(lengths, ways, 0).flatten(0, 1)
    table = heights(torch.cat([found.place + steps, found.place - steps]))
    # in units of what a Normal's falls by at a deviation, half a nat
    drop = 2 * (found.height - table).unflatten(0, (2, len(lengths), -1)).mean(0)
    best = drop.log().abs().nan_to_num(torch.inf).argmin(0)  # (ways, *batch)
    at = drop.gather(0, best[None])[0]
    length = lengths[best] * at.rsqrt().nan_to_num(1.0).clamp(1 / 3, 3)
    root = root * length.movedim(0, -1)[..., None, :]
    return found._replace(inverse=root @ root.mT)


def polish(slopes: Slopes, found: Ascent, *, steps: int = 8) -> tuple[Ascent, Tensor]:
    """Returns a mode after Newton steps, and the eigenvalues of the curvature in units of the last estimate.

    Args:
        slopes: as for `ascend`.
        found: of one search for each data set.
        steps: number of Newton steps, at most; each doubles the digits that are right.
    """
    values = torch.ones_like(found.place)
    for _ in range(steps):
        root = root_of(found.inverse)
        curvature = curvature_at(slopes, found.place, root)
        if not bool(curvature.isfinite().all()):
            return found, torch.zeros_like(values)
        values, vectors = torch.linalg.eigh(curvature)
        size = values.abs().clamp(min=1e-6)
        spread = root @ vectors / size.sqrt()[..., None, :]
        found = found._replace(inverse=spread @ spread.mT)
        if bool((found.gain < ENOUGH).all()):
            break
        first, step = found, times(found.inverse, found.slope)
        for share in SHARES:
            trial = first.place + share * step
            height, slope = (each[0] for each in slopes(trial[None]))
            left = found.height == first.height
            found = found.moved(left & (height > first.height), trial, height, slope)
            if bool((found.height > first.height).all()):
                break
        if not bool((found.height > first.height).any()):
            break
    return found, values


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def root_of(inverse: Tensor) -> Tensor:
    """Returns a lower triangular root of a matrix that rounding may have made indefinite."""
    inverse = inverse.nan_to_num()
    root, failed = torch.linalg.cholesky_ex(inverse)
    diagonal = inverse.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt().diag_embed()
    return torch.where((failed > 0)[..., None, None], diagonal, root)
