"""Block Gaussian elimination, level by level: the linear algebra of `joint_gaussian`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Level",
    "along_units",
    "in_noise",
    "inverse_root",
    "is_quadratic",
    "solved",
    "times",
    "without_gaps",
]


# precision relative to the prior's, which is 1 at least where a log density is concave, but for rounding
_LEAST = 0.5


class Level(NamedTuple):
    """Elements that are eliminated at once, x, and those left behind them, r.

    Attributes:
        start, size: which elements x are.
        dims: plate dims, negative, that these are repeated along.
        rows: [H_x, H_xr, -g], ``(*batch, *plates, size, elements from start on + 1)``.
        prior: [Q_x, Q_r, q] with Q_x x + Q_r r + q = u ~ N(0, D); of the posterior once the level is eliminated, and
            then with D = I.
        proper: the diagonal of D's inverse, ``(size,)``: 0 for elements whose prior is flat, else 1.
        open: once eliminated, which elements neither the prior nor data tell, ``(*batch, *plates, size)``; None if no
            prior is flat.
    """

    start: int
    size: int
    dims: frozenset[int]
    rows: Tensor
    prior: Tensor
    proper: Tensor
    open: Tensor | None = None

    def detached(self) -> Level:
        """Returns the level without gradients."""
        return self._replace(rows=self.rows.detach(), prior=self.prior.detach())

    def columns(self, level: Level, prior: bool = False) -> Tensor:
        """Returns the columns of a later level, or of this one."""
        first = level.start - self.start
        return (self.prior if prior else self.rows)[..., first : first + level.size]

    def summed(self, level: Level, step: Tensor) -> Tensor:
        """Returns what steps of this one, ``(*batch, *plates, size)``, add to the slopes of a later level."""
        term = (self.columns(level) * step.unsqueeze(-1)).sum(-2)
        dims = [dim - 1 for dim in self.dims - level.dims]
        return term.sum(dims, keepdim=True) if dims else term

    def eliminated(
        self, concave: bool, rounding: float = 0.0
    ) -> tuple[Level, tuple[Tensor, Tensor]]:
        """Returns the level with its posterior, and two factors whose product is what it adds to the rows left.

        With x = M r + S u by the prior, where r ends in a 1: C = H_x M + H_xr, P = D^-1 + S^T H_x S = L L^T and
        T = L^-1 S^T the posterior is L^T (Q_x x + Q_r r) + T C r ~ N(0, I), and the rows left get
        M^T C + H_xr^T M - (T C)^T (T C). Where P may not be positive, as the log density is not ``concave``, H_x is
        another, such that it is. Of flat priors D^-1 is 0; there a pivot of P that is no more than ``rounding``,
        relative to its diagonal, says nothing.
        """
        own, rest = self.rows[..., : self.size], self.rows[..., self.size :]
        whitening, others = self.prior[..., : self.size], self.prior[..., self.size :]
        single, eps = self.size == 1, torch.finfo(own.dtype).eps
        if single:
            root = whitening.reciprocal()
            precision = self.proper + root * own * root
        else:
            eye = torch.eye(self.size, dtype=own.dtype, device=own.device)
            root = torch.linalg.solve_triangular(whitening, eye, upper=True)
            precision = self.proper.diag() + root.mT @ own @ root
        told = precision.detach()
        if not concave and (lack := _lack(precision)) is not None:
            precision, own = precision + lack, own + whitening.mT @ lack @ whitening
        mean = -root * others if single else -root @ others
        moved = own * mean + rest if single else own @ mean + rest
        if single:
            least = torch.where(
                self.proper > 0, _LEAST if concave else eps, torch.finfo(own.dtype).tiny ** 0.5
            )
            lower = precision.clamp(min=least).sqrt()
            gain = root / lower * moved
        else:
            # What is below this is rounding.
            ridge = 4 * eps * precision.detach().diagonal(dim1=-2, dim2=-1).abs()
            lower, failed = torch.linalg.cholesky_ex(precision + torch.diag_embed(ridge))
            if concave and not torch.jit.is_tracing() and failed.any():
                # By the rounding of what a model computes in single precision.
                return self.eliminated(concave=False, rounding=rounding)
            gain = torch.linalg.solve_triangular(lower, root.mT @ moved, upper=False)
        posterior = lower.mT @ whitening if self.size > 1 else lower * whitening
        after = (lower.mT @ others if self.size > 1 else lower * others) + gain
        left = torch.cat([mean, rest, -gain], -2), torch.cat([moved, mean, gain], -2)
        undecided = self._undecided(told, rounding)
        return self._replace(prior=torch.cat([posterior, after], -1), open=undecided), left

    def _undecided(self, precision: Tensor, rounding: float) -> Tensor | None:
        """Returns which elements with a flat prior data say nothing of, but for rounding, given those behind them."""
        if bool(self.proper.all()):
            return None
        size = precision.diagonal(dim1=-2, dim2=-1)
        root = size.clamp(min=torch.finfo(size.dtype).tiny).rsqrt()
        lower, failed = torch.linalg.cholesky_ex(
            root.unsqueeze(-1) * precision * root.unsqueeze(-2)
        )
        pivots = lower.diagonal(dim1=-2, dim2=-1).square()
        told = (size > 0) & (pivots > rounding) & (failed == 0).unsqueeze(-1)
        return ~told & (self.proper == 0)

    def spread(self, level: Level, matrix: Tensor) -> Tensor:
        """Returns the columns of a later level times a matrix, at the place of that one's columns and those behind."""
        return F.pad(self.columns(level) @ matrix, (level.start - self.start, 0))

    def without_noise(self, scale: Tensor, rounding: float) -> tuple[Tensor, Level]:
        """Returns W and G of the level's posterior W e + G r ~ N(0, I), where its rows are by e ~ N(0, S D S).

        G is a level behind this one; G^T G is what elimination takes from the rows left. ``scale`` is the diagonal of
        S, ``(*batch, *plates, size or 1, 1)``; ``rounding`` as for `eliminated`.
        """
        own, rest = self.rows[..., : self.size], self.rows[..., self.size :]
        precision = scale * own * scale.mT + self.proper.diag()
        eps = torch.finfo(own.dtype).eps
        if self.size == 1:
            least = eps if bool(self.proper) else torch.finfo(own.dtype).tiny ** 0.5
            lower = precision.clamp(min=least).sqrt()
            whitening, gain = lower / scale, scale / lower * rest
        else:
            ridge = 4 * eps * precision.detach().diagonal(dim1=-2, dim2=-1).abs()
            lower = torch.linalg.cholesky_ex(precision + torch.diag_embed(ridge))[0]
            whitening = lower.mT / scale.mT
            gain = torch.linalg.solve_triangular(lower, scale * rest, upper=False)
        undecided = self._undecided(precision.detach(), rounding)
        return whitening, self._replace(start=self.start + self.size, rows=gain, open=undecided)

    def reduced(self, gain: Level, nesting: int) -> Level:
        """Returns the level without what elimination of a deeper one by its noise takes from its rows."""
        columns = gain.rows[..., self.start - gain.start :]
        return self._replace(
            rows=self.rows - self._product(columns[..., : self.size], columns, gain, nesting)
        )

    def updated(self, factors: tuple[Tensor, Tensor], level: Level, nesting: int) -> Level:
        """Returns the level with what elimination of a deeper one adds to its rows."""
        first = self.start - level.start - level.size
        rows, columns = factors[0][..., first : first + self.size], factors[1][..., first:]
        return self._replace(rows=self.rows + self._product(rows, columns, level, nesting))

    def _product(self, rows: Tensor, columns: Tensor, level: Level, nesting: int) -> Tensor:
        """Returns the product of two factors of a deeper level, summed along plates that it alone has."""
        summed = [dim - 2 for dim in level.dims - self.dims]
        if not self.dims and summed:
            cut = rows.dim() - 2 - nesting
            rows, columns = rows.flatten(cut, -2), columns.flatten(cut, -2)
            return (rows.mT @ columns).reshape(
                rows.shape[:cut] + (1,) * nesting + (self.size, columns.shape[-1])
            )
        product = rows * columns if rows.shape[-2:] == (1, 1) else rows.mT @ columns
        return product.sum(summed, keepdim=True) if summed else product


def _lack(precision: Tensor) -> Tensor | None:
    """Returns what precisions relative to the prior's lack where they are not positive; None if they all are.

    Eigenvalues become absolute, and at least the prior's: steps along their directions then go as far as the curvature
    tells, in the tail of a density to its mode (Dauphin et al. 2014).
    """
    if precision.shape[-1] == 1:
        bad = precision <= torch.finfo(precision.dtype).eps
        return torch.where(bad, precision.abs().clamp(min=1.0) - precision, 0.0).detach()
    bad = (torch.linalg.cholesky_ex(precision)[1] > 0) & precision.isfinite().all(-1).all(-1)
    if not bad.any():
        return None
    bad = bad[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(bad, precision, 0.0).detach())
    lack = (vectors * (values.abs().clamp(min=1.0) - values).unsqueeze(-2)) @ vectors.mT
    return torch.where(bad, lack, 0.0)


def in_noise(levels: Sequence[Level], i: int, nesting: int) -> list[Level]:
    """Returns levels with their rows by the noise e of the prior of the i-th in place of its x = M r + U e."""
    level = levels[i]
    own, rest = level.rows[..., : level.size], level.rows[..., level.size :]
    eye = torch.eye(level.size, dtype=own.dtype, device=own.device)
    root = torch.linalg.solve_triangular(level.prior[..., : level.size], eye, upper=True)
    mean = -root @ level.prior[..., level.size :]
    before = [
        each._replace(rows=each.rows + each.spread(level, torch.cat([root - eye, mean], -1)))
        for each in levels[:i]
    ]
    moved = own @ mean + rest
    here = level._replace(rows=torch.cat([root.mT @ own @ root, root.mT @ moved], -1))
    mean = mean.expand_as(moved)
    factors = torch.cat([mean, rest], -2), torch.cat([moved, mean], -2)
    return [*before, here, *(each.updated(factors, level, nesting) for each in levels[i + 1 :])]


def without_gaps(levels: Sequence[Level]) -> tuple[list[Level], list[Tensor]]:
    """Returns levels without evidence on elements whose rows are not finite, and for each level which rows are.

    Columns go with rows, so that what is left is a density's as before. Masks are ``(*batch, *plates, size)``.
    """
    finite, left = [level.rows.isfinite().all(-1) for level in levels], []
    for i, (level, own) in enumerate(zip(levels, finite)):
        columns = torch.cat(
            [each.expand(own.shape[:-1] + each.shape[-1:]) for each in finite[i:]], -1
        )
        both = own.unsqueeze(-1) & F.pad(columns, (0, 1), value=True).unsqueeze(-2)
        left.append(level._replace(rows=torch.where(both, level.rows, 0.0)))
    return left, finite


def along_units(
    parts: Mapping[str, Tensor], units: Mapping[str, Tensor], inputs: Sequence[Tensor], graph: bool
) -> Sequence[Tensor]:
    """Returns derivatives of parts along units, ``(units, ...)``, by each input; graph: of which more may be taken."""
    moving = {name: part for name, part in parts.items() if part.requires_grad}
    if not moving:
        return [torch.zeros_like(leaf) for leaf in inputs]
    options: Any = {"create_graph": graph, "retain_graph": True, "materialize_grads": True}
    if torch.jit.is_tracing():  # a traced tensor's shape is none that autograd can compare
        count = len(next(iter(units.values())))
        totals: list[Any] = [
            sum((p * units[name][i]).sum() for name, p in moving.items()) for i in range(count)
        ]
        each = [torch.autograd.grad(total, inputs, **options) for total in totals]
        return [torch.stack(found) for found in zip(*each)]
    along = [units[name].reshape(-1, *part.shape) for name, part in moving.items()]
    return torch.autograd.grad([*moving.values()], inputs, along, is_grads_batched=True, **options)


def times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix * x.unsqueeze(-2)).sum(-1)


def solved(upper: Tensor, x: Tensor) -> Tensor:
    """Returns U^-1 x."""
    if x.shape[-1] == 1:
        return x / upper[..., 0]
    return torch.linalg.solve_triangular(upper, x.unsqueeze(-1), upper=True).squeeze(-1)


def inverse_root(root: Tensor, points: Sequence[int], nesting: int | None) -> Tensor:
    """Returns the inverse of a scale, ``(*batch, *plates, E, E)``, upper triangular as the last element comes first.

    Args:
        root: lower triangular, ``(*plates, D, D)``.
        points: shape of the member's values, whose first dim is that of the points.
        nesting: number of plate dims whose instances are elements as well; None if they are eliminated side by side.
    """
    size = root.shape[-1]
    eye = torch.eye(size, dtype=root.dtype, device=root.device)
    inverse = torch.linalg.solve_triangular(root, eye, upper=False).expand((*points, size))[0]
    if nesting is not None:  # one instance below the other
        cut = inverse.dim() - 2 - nesting
        inverse = inverse.reshape(inverse.shape[:cut] + (-1,) + inverse.shape[-2:])
        count = inverse.shape[cut]
        many = torch.eye(count, dtype=root.dtype, device=root.device)[:, None, :, None]
        inverse = (many * inverse.unsqueeze(-2)).reshape(
            inverse.shape[:cut] + (1,) * nesting + (count * size,) * 2
        )
    return inverse.flip(-1, -2)


def is_quadratic(found: Mapping[float, Tensor], tolerance: float) -> bool:
    """Whether values ``(functions,)`` at places on a line, 0 and pairs about it, are those of quadratics."""
    zero, far = found[0.0].double(), max(found)
    up, down = found[far].double(), found[-far].double()
    slope, bend = (up - down) / 2 / far, ((up + down) / 2 - zero) / far**2
    rounding = 100 * torch.finfo(found[0.0].dtype).eps * zero.abs()
    for place, value in found.items():
        size = slope.abs() * abs(place) + bend.abs() * place**2
        if not (
            (value - zero - slope * place - bend * place**2).abs() <= tolerance * size + rounding
        ).all():
            return False
    return True
