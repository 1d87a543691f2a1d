"""Conditionals of latents that are jointly linear and Gaussian given the rest, by exact elimination.

Members are eliminated one after another. They are expressed in the noise u of their priors
(`second_order`), so that nothing cancels, however small a scale is.

Lifted levels come first, all instances at once, as instances are independent given the rest; then
one dense vector. This is a block Cholesky factorization, from which q(x_k | members sampled
earlier) is read off (`gaussian_levels`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import Expansion, derivatives, trimmed
from pyro_nami.deriving.gaussian_levels import Level, solved, times
from pyro_nami.deriving.second_order import SecondOrder
from pyro_nami.factors.boxed_normal import BoxedNormal
from pyro_nami.factors.joint_normal import JointNormal

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = ["JointGaussian"]

# deviations: what rounding may move a mean by, and the way there, of which more is taken anew
_OFF, _FAR = 0.01, 30.0
# times that more is taken anew; after one, one of 280 posteriors in float32 is 45 deviations off
_MOST_CLOSER = 3
# by how much what offsets under flat priors share may multiply rounding, as no prior's width says
_COLLINEAR = 1e3
_WIDE = 10.0  # deviations, within which, or some times as far, a density is looked at
# times the rounding error: of a relative pivot that is no more, rounding leaves no digit
_PIVOT = 50.0


class JointGaussian(SecondOrder):
    """The exact conditionals of a block, each given those before it and with those behind integrated out.

    Far from where the posterior is, slopes are rounded by more than it is wide: from there it is taken anew.

    Args:
        group, leading, nesting, differentiable, away, sizes: as for `SecondOrder`.
        at: values of the members that offsets are from; by default the means of their priors.
    """

    concave = True  # whether log densities are known to be so

    def __init__(
        self,
        group: ConjugateGroup,
        *args: Any,
        at: Mapping[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(group, *args, **kwargs)
        self._args, self._kwargs = args, kwargs
        self._at: Mapping[str, Tensor] = {
            name: value.detach() for name, value in (at or {}).items()
        }
        self._runs = 1
        # level -> number of members drawn, and their offsets
        self._offsets: dict[int, tuple[int, Tensor | None]] = {}
        self._order = list(reversed(self._first))  # of drawing

    def reference(self, name: str, loc: Tensor, step: Tensor) -> Tensor:
        at = self._at.get(name)
        # where it is not known where to start
        at = loc if at is None else torch.where(at.isnan(), loc.to(at), at)
        return self.flat[name].within(at) if name in self.flat else at

    @property
    def has_moved(self) -> bool:
        """Whether it ended elsewhere than where it was made to start."""
        return self._runs > 1

    def moved_to(self, at: Mapping[str, Tensor]) -> Self:
        """Returns the expansion about another point."""
        other = type(self)(self.group, *self._args, **self._kwargs, at=at)
        other._runs, other.xi = self._runs + 1, self.xi
        return other

    def means(
        self, values: Mapping[str, Tensor] | None = None, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Returns the means of members, by default of all, each given values of those before it: others' are means."""
        found = {name: value.detach() for name, value in (values or {}).items()}
        names = self.group.members if names is None else names
        self._offsets.clear()
        for name in self._order:
            if name in names or name not in found:
                found[name] = self.conditional(name, found).mean
        self._offsets.clear()
        return {name: found[name] for name in names}

    def renewed(self) -> Self:
        """Forgets at which values of members conditionals were asked for, which come in order; returns itself."""
        self._offsets.clear()
        return self

    def solve(self, sites: Mapping[str, Any]) -> Expansion | None:
        with derivatives():
            self._read(sites, whole=False)
            rounding = self._rounding()
            for i, level in enumerate(self._levels):
                self._levels[i], update = level.eliminated(self.concave, rounding)
                self._levels[i + 1 :] = [
                    later.updated(update, level, self.nesting) for later in self._levels[i + 1 :]
                ]
            return self._closer()

    def _rounding(self) -> float:
        """Returns the least pivot of a precision, relative to its diagonal, that rounding leaves a digit of."""
        return _PIVOT * torch.finfo(next(iter(self.references.values())).dtype).eps

    def widths(self) -> dict[str, Tensor]:
        """Returns for members with flat priors some deviations that data leave each element, given all others."""
        found = {}
        for names, level in zip(self._by_level(), self._levels):
            own, prior = (each[..., : level.size].detach() for each in (level.rows, level.prior))
            # which it is until the level is eliminated, where there are flat priors
            if level.open is None:
                whole = own.diagonal(dim1=-2, dim2=-1) + (
                    level.proper.unsqueeze(-1) * prior.square()
                ).sum(-2)
            else:
                whole = prior.square().sum(-2)
            wide = _WIDE * whole.clamp(min=torch.finfo(whole.dtype).tiny).rsqrt()
            for name, each in zip(names, wide.split([self.sizes[name] for name in names], -1)):
                if name in self.flat:
                    found[name] = self._shaped(name, each).to(self.references[name])
        return found

    def _shaped(self, name: str, flat: Tensor) -> Tensor:
        """Returns numbers of a member's elements, ``(*batch, *plates, E)`` as `_flat` has them, in its shape."""
        held = self._held(name, self.shapes[name])
        plates = 0 if self._is_lifted(name) else self.nesting
        flat = flat.flip(-1)
        return flat.reshape(flat.shape[: flat.dim() - 1 - plates] + held)

    def lost(self, draws: int) -> dict[str, Tensor]:
        """Returns what share of each member with a flat prior lies outside of its bounds, instance by instance."""
        found: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        for name in self._order:
            fn = self.conditional(name, values)
            values[name] = fn.rsample((draws,) if not values else ())
            if isinstance(fn, BoxedNormal):
                found[name] = fn.lost.mean(0) if fn.lost.dim() else fn.lost
        self._offsets.clear()
        return found

    def undecided(self) -> list[str]:
        """Returns the members with flat priors of which data leave an element open, of one that is solved."""
        found = []
        for names, level in zip(self._by_level(), self._levels):
            if level.open is None or not bool(level.open.any()):
                continue
            elements = [self.sizes[name] for name in names]
            found += [
                name
                for name, each in zip(names, level.open.split(elements, -1))
                if bool(each.any())
            ]
        return found

    def _closer(self) -> Self | None:
        """Returns the expansion about the means, where rounding at the references may have moved these."""
        eps = torch.finfo(next(iter(self.references.values())).dtype).eps
        if (
            eps < torch.finfo(torch.float32).eps
            or self._runs > _MOST_CLOSER
            or torch.jit.is_tracing()
        ):
            return None
        means = self.means()
        steps = self._lengths
        away = []
        narrower = []
        for names, level in zip(self._by_level(), self._levels):
            roots = level.prior[..., : level.size].detach().diagonal(dim1=-2, dim2=-1)
            moved = torch.cat([self._moved(name, means[name].detach()) for name in names], -1)
            inner = tuple(range(-1 - self.nesting, 0))
            narrow = steps[level.start : level.start + level.size] * roots
            narrow = torch.where(level.proper > 0, narrow, _COLLINEAR)
            away.append((moved * roots).abs().amax(inner))
            narrower.append(narrow.abs().amax(inner))
        far, narrow = (
            torch.stack(torch.broadcast_tensors(*each)).amax(0) for each in (away, narrower)
        )
        off = eps * far * narrow
        return (
            self.moved_to(means)
            if bool(((off > _OFF) & (off < torch.inf) & (far > _FAR)).any())
            else None
        )

    def conditional(self, name: str, values: Mapping[str, Tensor], dims: int | None = None) -> Any:
        size, event_shape = self.sizes[name], self.priors[name].event_shape
        level = next(
            each for each in self._levels if 0 <= self._first[name] - each.start < each.size
        )
        first = self._first[name] - level.start
        rows = level.prior[..., first : first + size, :]
        upper, error = rows[..., first : first + size], -rows[..., -1]
        known = self._drawn(level, values, until=name)
        if known is not None:
            error = error - times(rows[..., first + size : level.size], known)
        for later in self._levels[self._levels.index(level) + 1 :]:
            whole = self._drawn(later, values)
            begin = later.start - level.start
            error = error - times(rows[..., begin : begin + later.size], whole)
        reference = self._flat(name, self.references[name])
        like = reference.dtype
        loc = reference + solved(upper, error).to(like)
        bounds = self._bounds(name)
        if size == 1 and bounds is None:
            shape = trimmed(loc.shape[:-1], dims) + event_shape  # of size 1
            scale = upper[..., 0].reciprocal().to(like).expand(loc.shape)
            normal = dist.Normal(loc.reshape(shape), scale.reshape(shape), validate_args=False)
            return normal.to_event(len(event_shape))
        held = self._held(name, self.shapes[name])
        plates = len(held) - len(event_shape)
        loc, lower = loc.flip(-1), upper.flip(-1, -2).to(like)
        lead = loc.shape[: loc.dim() - 1 - plates]
        rows_lead = lower.shape[: lower.dim() - 2 - plates]
        lead = trimmed(lead, None if dims is None else max(0, dims - plates))
        held = held[max(0, plates - dims) :] if dims is not None and not lead else held
        rows_lead = rows_lead[max(0, len(rows_lead) - len(lead)) :]
        loc, lower = loc.reshape(lead + loc.shape[-1:]), lower.reshape(rows_lead + lower.shape[-2:])
        if bounds is None:
            return JointNormal(loc, lower, held, len(event_shape))
        low, high = (
            each.reshape(trimmed(each.shape[: -1 - plates], len(lead)) + each.shape[-1:])
            for each in bounds
        )
        return BoxedNormal(loc, lower, held, len(event_shape), None, low, high)

    def _bounds(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Returns the bounds of a member with a flat prior, ``(*batch, *plates, E)``; None if it has none."""
        flat = self.flat.get(name)
        if flat is None or not flat.is_bounded:
            return None
        like = self.references[name]
        shape = self.priors[name].batch_shape + self.priors[name].event_shape
        low, high = (self._flat(name, each.to(like).expand(shape)).flip(-1) for each in flat)
        return low, high

    def _drawn(self, level: Level, values: Mapping[str, Tensor], until: str = "") -> Any:
        """Returns offsets of a level's members that are drawn before one, ``(*batch, *plates, elements)``; or None."""
        names = [
            name for name in self.group.members if 0 <= self._first[name] - level.start < level.size
        ]
        stop = names.index(until) if until else len(names)
        count, offsets = self._offsets.get(level.start, (0, None))
        for name in names[count:stop]:
            own = self._moved(name, values[name])
            offsets = own if offsets is None else torch.cat([own, offsets], -1)
        self._offsets[level.start] = max(count, stop), offsets
        size = sum(self.sizes[name] for name in names[:stop])
        return offsets[..., offsets.shape[-1] - size :] if offsets is not None and size else None
