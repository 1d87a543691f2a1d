"""Covariates: what differs between the instances of a plate without being a sample site.

Known standard deviations, design matrices and exposures enter through the distribution of a site. A
network that is shared between instances cannot be right without them. They are found by probing:
with every latent at the same value in all instances of a plate, the distribution's parameters that
still differ between instances are covariates, and so is a site's mask.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, transform_to

from pyro_nami.factors.completed import constraints_of_parameters
from pyro_nami.factors.wrappers import named_layers
from pyro_nami.program.plate_dims import spread
from pyro_nami.program.runner import Message

__all__ = ["MASK", "Argument", "Column", "ColumnSearch", "columns_of", "parameters"]

MASK = "mask"


class Column(NamedTuple):
    """One covariate: an entry of a parameter of a site's distribution, at one of the reference draws."""

    draw: int
    parameter: str
    entry: int


class Argument(NamedTuple):
    """One covariate: a column of an argument of the model that has a row for each instance.

    Attributes:
        leaf: position of the argument among the leaves of all arguments.
        column: of its rows, flattened.
        dim: batch dim of the instances.
    """

    leaf: int
    column: int
    dim: int


def plain_column(column: Column | Argument) -> tuple:
    """Returns a covariate as ``torch.load`` reads it with ``weights_only=True``."""
    return type(column).__name__, *column


def column_of(plain: Sequence[Any]) -> Column | Argument:
    """Returns the covariate that `plain_column` made plain."""
    kinds: dict[str, Any] = {kind.__name__: kind for kind in (Column, Argument)}
    return kinds[plain[0]](*plain[1:])


def columns_of(
    columns: Sequence[Column | Argument],
    at_draw: Callable[[int], Message],
    leaves: Sequence[Any] = (),
) -> Tensor:
    """Returns the values of columns, ``(*batch, columns)``.

    They come from the site at reference draws (``at_draw``), or from the model's arguments (``leaves``); ValueError if
    these lack what they had at the first call.
    """

    names = {column.parameter for column in columns if isinstance(column, Column)}

    @functools.lru_cache(None)
    def at(draw: int) -> dict[str, Tensor]:
        return parameters(at_draw(draw)["fn"], names) | {MASK: _mask_of(at_draw(draw))}

    def values(column: Column | Argument) -> Tensor:
        if isinstance(column, Argument):
            leaf = leaves[column.leaf]
            return spread(leaf.reshape(len(leaf), -1)[:, column.column], column.dim)
        if column.parameter in at(column.draw):
            return at(column.draw)[column.parameter][..., column.entry]
        site = at_draw(column.draw)
        raise ValueError(
            f"Expected site '{site['name']}' to have the parameter '{column.parameter}', as at the guide's first "
            f"call; got {type(site['fn']).__name__}. Make a new guide."
        )

    return torch.stack(torch.broadcast_tensors(*map(values, columns)), -1)


def _mask_of(site: Message) -> Tensor:
    """Returns a site's mask as numbers, ``(*batch, 1)``; ones where it has none."""
    fn, mask = site["fn"], site["mask"]
    like = next((value for _, value in _tensors(fn) if value.is_floating_point()), torch.empty(0))
    mask = torch.as_tensor(True if mask is None else mask, device=like.device).to(like.dtype)
    return mask.expand(torch.broadcast_shapes(mask.shape, fn.batch_shape)).unsqueeze(-1)


def parameters(fn: Distribution, names: Collection[str] = ()) -> dict[str, Tensor]:
    """Returns the tensors that parameterize a distribution, ``(*batch, entries)`` each, in unconstrained space.

    One that has no more dims than the batch has no event dims. What a distribution computes only where somebody asks,
    as probabilities from logits, is among them if it has been, or is one of ``names``.
    """
    found, batch = {}, fn.batch_shape
    for name, value in _tensors(fn, names):
        shape = batch + (value.shape[len(batch) :] or (1,))
        value = value if value.dim() > len(batch) else value.unsqueeze(-1)
        with suppress(RuntimeError):  # of a parameter that is not one of the instances
            found[name] = value.expand(shape).flatten(len(batch))
    return found


def _tensors(fn: Distribution, names: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of the parameters of a distribution and of what it wraps; event dims rightmost."""
    for path, layer in named_layers(fn):
        for i, transform in enumerate(getattr(layer, "transforms", ())):
            for key, value in vars(transform).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield f"{path}transforms.{i}.{key}", value.detach()
    # The last of them wraps nothing.
    for key, constraint in constraints_of_parameters(layer).items():
        value = vars(layer).get(key)
        if value is None and path + key in names:
            value = getattr(copy.copy(layer), key)
        if isinstance(value, Tensor):
            yield path + key, _unconstrained(value.detach(), constraint)


def _unconstrained(value: Tensor, constraint: Any) -> Tensor:
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    try:
        free = transform_to(constraint).inv(value)
    except (NotImplementedError, RuntimeError, ValueError):
        return value
    if free.shape == value.shape:
        # without a branch on a value, which would wait for the device
        return torch.where(free.isfinite().all(), free, value)
    return free if free.isfinite().all() else value


class ColumnSearch:
    """Collects the covariates of one site, reference draw by reference draw.

    Args:
        most: the most columns.
        rows: the most instances that columns are compared in; with ten times fewer, rare levels may be missed.
        tolerance: share of a column's norm that other columns have to leave, if it is to be a column of its own. At ten
            times more, nearly collinear columns are lost; at ten times less, rounding in single precision makes some.

    Attributes:
        columns: those that differ between instances and are no linear function of the ones before, at most ``most``.

    Example:
        >>> search = ColumnSearch(most=4)
        >>> search.add(0, {"fn": torch.distributions.Normal(0.0, torch.tensor([1.0, 2.0, 5.0])), "mask": None})
        True
        >>> search.columns  # the scales differ
        [Column(draw=0, parameter='scale', entry=0)]
    """

    def __init__(self, most: int, *, rows: int = 4096, tolerance: float = 1e-3) -> None:
        self.columns: list[Column | Argument] = []
        self._most = most
        self._rows = rows
        self._tolerance = tolerance
        self._basis: list[Tensor] = []
        self._found: list[Tensor] = []

    def add(self, draw: int, site: Message) -> bool:
        """Looks at the site, as a trace holds it, at one more draw; returns whether it had anything new.

        A mask is a covariate whatever it is: it may vary in a later call.
        """
        before = len(self.columns)
        if draw == 0 and isinstance(site["mask"], Tensor):
            self.columns.append(Column(draw, MASK, 0))
        for name, value in parameters(site["fn"]).items():
            rows = self._some(value.reshape(-1, value.shape[-1]).double())
            if len(rows) > 1:
                entries = self._independent(rows)
                self.columns.extend(Column(draw, name, entry) for entry in entries)
                self._found.extend(rows[:, entry] for entry in entries)
        return len(self.columns) > before

    def explain(self, leaves: Sequence[Any], size: int, dim: int) -> bool:
        """Takes columns of the model's arguments in place of those found, if the latter are linear functions of them.

        Of a linear predictor every draw shows one more column, a design matrix all. The instances lie along ``dim``.
        """
        arguments: dict[Argument, Tensor] = {}
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or leaf.shape[:1] != (size,):
                continue
            rows = self._some(leaf.detach().reshape(size, -1).double())
            fits = leaf.is_floating_point() and rows.shape[1] <= self._most
            if fits and rows.isfinite().all():
                arguments |= {Argument(i, k, dim): column for k, column in enumerate(rows.T)}
        if not arguments or not self._found:
            return False
        wanted, design = torch.stack(self._found, 1), torch.stack([*arguments.values()], 1)
        if len(design) <= 2 * design.shape[1]:
            return False
        scale = design.std(0).clamp(min=1e-12)
        design, wanted = (design - design.mean(0)) / scale, wanted - wanted.mean(0)
        # not on CUDA
        weights = torch.linalg.lstsq(design.cpu(), wanted.cpu(), driver="gelsd").solution.to(design)
        if (wanted - design @ weights).norm() > self._tolerance * wanted.norm():
            return False
        used = (weights.abs() > 1e-6 * weights.abs().amax(0)).any(1).tolist()
        columns: list[Column | Argument] = [
            column for column in self.columns if column == Column(0, MASK, 0)
        ]
        columns += itertools.compress(arguments, used)
        if len(columns) > self._most:
            return False
        self.columns = columns
        return True

    def _some(self, rows: Tensor) -> Tensor:
        """Returns rows at equal distances, as many as are compared."""
        return rows[:: max(1, math.ceil(len(rows) / self._rows))]

    def _independent(self, rows: Tensor) -> list[int]:
        """Returns entries of ``rows`` that add to the basis, those that add most first; extends the basis."""
        centered = rows - rows.mean(0)
        size = centered.norm(dim=0)
        # below a constant's rounding error in single precision, which grows with the root of the number of rows
        floor = 1e-5 * len(rows) ** 0.5 * rows.abs().amax(0)
        rest = torch.where(size > floor, centered / size, 0.0)
        for direction in self._basis:
            rest = _without(rest, direction)
        chosen: list[int] = []
        while len(self.columns) + len(chosen) < self._most:
            left, index = rest.norm(dim=0).max(0)
            # one transfer, as each waits for the device
            left, entry = torch.stack([left, index.to(left)]).tolist()
            if not left > self._tolerance:
                break
            direction = rest[:, int(entry)] / left
            rest = _without(rest, direction)
            self._basis.append(direction)
            chosen.append(int(entry))
        return chosen


def _without(rest: Tensor, direction: Tensor) -> Tensor:
    """Returns columns less their parts along a unit vector."""
    return rest - direction.unsqueeze(-1) * (direction @ rest)
