"""Block Gaussian elimination, level by level: the linear algebra of `joint_gaussian`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "FEWEST_TOGETHER",
    "Level",
    "along_units",
    "cholesky",
    "inverse_root",
    "solved",
    "times",
    "without_gaps",
]

# Derivatives from which one pass backward takes all of them, by vmap, whose first use costs 0.2 s. A season of 12 steps
# reads 22 elements back, and takes 18 times as long one by one.
FEWEST_TOGETHER = 5


class Level(NamedTuple):
    """Elements that are eliminated at once, x, and those left behind them, r.

    Attributes:
        names: the members that x are the elements of, the last drawn first.
        start, size: which elements x are.
        dims: plate dims, negative, that these are repeated along.
        rows: [H_x, H_xr, -g], ``(*batch, *plates, size, elements from start on + 1)``.
        prior: [Q_x, Q_r, q] with Q_x x + Q_r r + q = u ~ N(0, D); of the posterior once the level is eliminated, and
            then with D = I.
        proper: the diagonal of D's inverse, ``(size,)``: 0 for elements whose prior is flat, else 1.
        open: once eliminated, which elements neither the prior nor data tell, ``(*batch, *plates, size)``; None if no
            prior is flat.
    """

    names: Sequence[str]
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

    @property
    def precision(self) -> Tensor:
        """The diagonal of the posterior's precision, ``(*batch, *plates, size)``, until the level is eliminated."""
        own, prior = self.rows[..., : self.size], self.prior[..., : self.size]
        return own.diagonal(dim1=-2, dim2=-1) + (self.proper.unsqueeze(-1) * prior.square()).sum(-2)

    def columns(self, level: Level, prior: bool = False) -> Tensor:
        """Returns the columns of a later level, or of this one."""
        first = level.start - self.start
        return (self.prior if prior else self.rows)[..., first : first + level.size]

    def summed(self, level: Level, step: Tensor) -> Tensor:
        """Returns the terms that steps of this level, ``(*batch, *plates, size)``, add to the slopes of a later one."""
        term = (self.columns(level) * step.unsqueeze(-1)).sum(-2)
        dims = [dim - 1 for dim in self.dims - level.dims]
        return term.sum(dims, keepdim=True) if dims else term

    def eliminated(self, rounding: float = 0.0) -> tuple[Level, tuple[Tensor, Tensor]]:
        """Returns the level with its posterior, and two factors whose product is what it adds to the rows left.

        With x = M r + S u by the prior, where r ends in a 1: C = H_x M + H_xr, P = D^-1 + S^T H_x S = L L^T and
        T = L^-1 S^T the posterior is L^T (Q_x x + Q_r r) + T C r ~ N(0, I), and the rows left get
        M^T C + H_xr^T M - (T C)^T (T C). Where P is not positive, as the log density is not concave, H_x is another,
        such that it is. Of flat priors D^-1 is 0; there a pivot of P that is no more than ``rounding``, relative to
        its diagonal, says nothing.
        """
        rows, prior = torch.broadcast_tensors(self.rows, self.prior)
        own, rest = rows[..., : self.size], rows[..., self.size :]
        whitening, others = prior[..., : self.size], prior[..., self.size :]
        root = solved(whitening, torch.eye(self.size, dtype=own.dtype, device=own.device))
        precision = self.proper.diag() + _product(root.mT, _product(own, root))
        lower, failed = cholesky(precision)
        undecided = None
        if not bool(self.proper.all()):
            pivots = lower.diagonal(dim1=-2, dim2=-1).square()
            told = pivots > rounding * precision.diagonal(dim1=-2, dim2=-1)
            undecided = ~(told & ~failed.unsqueeze(-1)) & (self.proper == 0)
        if not torch.jit.is_tracing() and bool(failed.any()):
            lack = _lack(precision, failed)
            own = own + whitening.mT @ lack @ whitening
            lower, _ = cholesky(precision + lack)
        mean = -_product(root, others)
        moved = _product(own, mean) + rest
        gain = solved(lower, _product(root.mT, moved), upper=False)
        posterior = _product(lower.mT, prior) + F.pad(gain, (self.size, 0))
        left = torch.cat([mean, rest, -gain], -2), torch.cat([moved, mean, gain], -2)
        return self._replace(prior=posterior, open=undecided), left

    def updated(self, factors: tuple[Tensor, Tensor], level: Level) -> Level:
        """Returns the level with its rows updated by the elimination of a deeper level."""
        first = self.start - level.start - level.size
        rows, columns = factors[0][..., first : first + self.size], factors[1][..., first:]
        # One product over instances and elements, as a product for each instance would take more memory.
        *batch, across, down, out = range(rows.dim() + 1)
        kept = [dim for dim in batch if dim - len(batch) not in level.dims - self.dims]
        added = torch.einsum(
            rows, [*batch, across, down], columns, [*batch, across, out], [*kept, down, out]
        )
        shape = [rows.shape[dim] if dim in kept else 1 for dim in batch]
        return self._replace(rows=self.rows + added.reshape(*shape, *added.shape[-2:]))


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Returns a product of matrices; an inner size of one is multiplied elementwise, which is faster."""
    return first * second if first.shape[-1] == 1 else first @ second


def solved(root: Tensor, right: Tensor, upper: bool = True) -> Tensor:
    """Returns the inverse of triangular matrices times others; matrices of one element divide elementwise."""
    if root.shape[-1] == 1:
        return right / root
    return torch.linalg.solve_triangular(root, right, upper=upper)


def cholesky(precision: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Cholesky factors, and which matrices have none; of one element many times as fast."""
    if precision.shape[-1] == 1:
        positive = precision > 0
        return torch.where(positive, precision, 1.0).sqrt(), ~positive[..., 0, 0]
    lower, failed = torch.linalg.cholesky_ex(precision)
    return lower, failed > 0


def _lack(precision: Tensor, failed: Tensor) -> Tensor:
    """Returns the matrices to be added to precisions, relative to the prior's, that are not positive.

    Eigenvalues become absolute, and at least the prior's: steps along their directions then go as far as the curvature
    tells, in the tail of a density to its mode (Dauphin et al. 2014).
    """
    bad = failed & precision.isfinite().all(-1).all(-1)
    values, vectors = torch.linalg.eigh(precision[bad].detach())
    lack = torch.zeros_like(precision)
    lack[bad] = (vectors * (values.abs().clamp(min=1.0) - values).unsqueeze(-2)) @ vectors.mT
    return lack


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
) -> list[Tensor]:
    """Returns derivatives of parts along units, ``(units, ...)``, by each input; graph: of which more may be taken."""
    count = len(next(iter(units.values())))
    moving = {name: part for name, part in parts.items() if part.requires_grad}
    if not moving:
        return [torch.zeros_like(leaf).expand(count, *leaf.shape) for leaf in inputs]
    # As single numbers, since a traced tensor's shape is none that autograd can compare.
    totals = [units[name].reshape(count, -1) @ part.flatten() for name, part in moving.items()]
    total = torch.stack(totals).sum(0)
    take = functools.partial(
        torch.autograd.grad, create_graph=graph, retain_graph=True, materialize_grads=True
    )
    if count >= FEWEST_TOGETHER:
        eye = torch.eye(count, dtype=total.dtype, device=total.device)
        with suppress(RuntimeError):  # an operation that vmap does not know
            found = take(total.unbind(), inputs, eye.unbind(), is_grads_batched=True)
            # zeros, of inputs that no part depends on, lack the dim of the units
            return [each.expand(count, *leaf.shape) for each, leaf in zip(found, inputs)]
    return [torch.stack(rows) for rows in zip(*(take(each, inputs) for each in total.unbind()))]


def times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix * x.unsqueeze(-2)).sum(-1)


def inverse_root(root: Tensor, shape: Sequence[int], nesting: int | None) -> Tensor:
    """Returns the inverse of a scale, ``(*batch, *plates, E, E)``, upper triangular as the last element comes first.

    Args:
        root: lower triangular, ``(*plates, D, D)``.
        shape: of the member's values, ``(*batch, *plates, D)``.
        nesting: number of plate dims whose instances are elements as well; None if they are eliminated side by side.
    """
    size = root.shape[-1]
    eye = torch.eye(size, dtype=root.dtype, device=root.device)
    inverse = torch.linalg.solve_triangular(root, eye, upper=False).expand((*shape, size))
    if nesting is not None:  # one instance below the other
        cut = inverse.dim() - 2 - nesting
        inverse = inverse.reshape(inverse.shape[:cut] + (-1,) + inverse.shape[-2:])
        count = inverse.shape[cut]
        many = torch.eye(count, dtype=root.dtype, device=root.device)[:, None, :, None]
        inverse = (many * inverse.unsqueeze(-2)).reshape(
            inverse.shape[:cut] + (1,) * nesting + (count * size,) * 2
        )
    return inverse.flip(-1, -2)
