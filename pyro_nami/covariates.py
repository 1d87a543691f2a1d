"""Finding what differs between the instances of a plate without being a sample site.

A known standard deviation, a design matrix, an exposure: such covariates enter through the distribution of a site, and
a network that is shared between instances cannot be right without them. They are found by probing: with every latent
at the same value in all instances of a plate, the parameters of a site's distribution that still differ between
instances are features of the instance. Change this module when covariates are missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Distribution, TransformedDistribution, transform_to

__all__ = ["Column", "ColumnSearch", "columns_of", "parameters"]

_TOLERANCE = 1e-3
_MOST_ROWS = 4096


class Column(NamedTuple):
    """One covariate: an entry of a parameter of a site's distribution, at one of the reference draws."""

    draw: int
    parameter: str
    entry: int


def parameters(fn: Distribution) -> dict[str, Tensor]:
    """Returns the tensors that parameterize a distribution, ``(*batch, entries)`` each, in unconstrained space."""
    batch = fn.batch_shape
    return {name: _entries(value, batch) for name, value in _tensors(fn, "") if _broadcasts(value, batch)}


def _tensors(fn: Distribution, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of the parameters of a distribution and of what it wraps; event dims rightmost."""
    if isinstance(fn, TransformedDistribution):
        for i, transform in enumerate(fn.transforms):
            for key, value in vars(transform).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    yield f"{prefix}transforms.{i}.{key}", value.detach()
    base = getattr(fn, "base_dist", None)
    if isinstance(base, Distribution):
        yield from _tensors(base, f"{prefix}base_dist.")
        return
    for key, constraint in fn.arg_constraints.items():
        value = vars(fn).get(key)
        if isinstance(value, Tensor):
            yield prefix + key, _unconstrained(value.detach(), constraint)


def _unconstrained(value: Tensor, constraint: Any) -> Tensor:
    value = value if value.is_floating_point() else value.to(torch.get_default_dtype())
    try:
        free = transform_to(constraint).inv(value)
    except (NotImplementedError, RuntimeError, ValueError):
        return value
    return free if free.isfinite().all() else value


def _broadcasts(value: Tensor, batch: torch.Size) -> bool:
    leading = value.shape[: len(batch)] if value.dim() >= len(batch) else value.shape
    try:
        return torch.broadcast_shapes(leading, batch[len(batch) - len(leading) :]) is not None
    except RuntimeError:
        return False


def _entries(value: Tensor, batch: torch.Size) -> Tensor:
    """Returns a parameter as ``(*batch, entries)``; one that has no more dims than the batch has no event dims."""
    if value.dim() <= len(batch):
        return value.expand(batch).unsqueeze(-1)
    event = value.shape[len(batch) :]
    return value.expand(batch + event).flatten(len(batch))


class ColumnSearch:
    """Collects the covariates of one site, reference draw by reference draw.

    Attributes:
        columns: those that differ between instances and are no linear function of the ones before, at most ``most``.
    """

    def __init__(self, most: int) -> None:
        self.columns: list[Column] = []
        self._most = most
        self._basis: list[Tensor] = []

    def add(self, draw: int, fn: Distribution) -> bool:
        """Looks at the site's distribution at one more draw; returns whether it had anything new."""
        before = len(self.columns)
        for name, value in parameters(fn).items():
            rows = value.reshape(-1, value.shape[-1]).double()
            if rows.shape[0] > 1:
                rows = rows[:: -(-rows.shape[0] // _MOST_ROWS)]
                entries = _independent(rows, self._basis, self._most - len(self.columns))
                self.columns.extend(Column(draw, name, entry) for entry in entries)
        return len(self.columns) > before


def _independent(rows: Tensor, basis: list[Tensor], most: int) -> list[int]:
    """Returns entries of ``rows`` that add to the basis, those that add most first; extends the basis."""
    centered = rows - rows.mean(0)
    size = centered.norm(dim=0)
    magnitude = rows.abs().amax(0).clamp(min=torch.finfo(torch.float32).tiny) * rows.shape[0] ** 0.5
    varying = size > 1e-5 * magnitude
    rest = torch.where(varying, centered / size.clamp(min=1e-30), torch.zeros_like(centered))
    for direction in basis:
        rest = rest - direction.unsqueeze(-1) * (direction @ rest)
    chosen: list[int] = []
    while len(chosen) < most:
        left = rest.norm(dim=0)
        entry = int(left.argmax())
        if not left[entry] > _TOLERANCE:
            break
        direction = rest[:, entry] / left[entry]
        rest = rest - direction.unsqueeze(-1) * (direction @ rest)
        basis.append(direction)
        chosen.append(entry)
    return chosen


def columns_of(columns: Sequence[Column], at_draw: Callable[[int], Distribution]) -> Tensor:
    """Returns the values of columns, ``(*batch, columns)``; ``at_draw`` gives the distribution at a reference draw."""
    found: dict[int, dict[str, Tensor]] = {}
    for column in columns:
        if column.draw not in found:
            found[column.draw] = parameters(at_draw(column.draw))
    parts = [found[column.draw][column.parameter][..., column.entry] for column in columns]
    return torch.stack(torch.broadcast_tensors(*parts), -1)
