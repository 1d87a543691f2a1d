"""Conditionals of latents that are jointly linear and Gaussian given the rest, by exact elimination.

Members are eliminated one after another. They are expressed in the noise u of their priors
(`second_order`), so that nothing cancels, however small a scale is.

Lifted levels come first, all instances at once, as instances are independent given the rest; then
one dense vector. This is a block Cholesky factorization, from which q(x_k | members sampled
earlier) is read off (`gaussian_levels`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.expansion import (
    ROUNDING,
    TOLERANCE,
    Expansion,
    derivatives,
    squeezed,
    trimmed,
)
from pyro_nami.deriving.gaussian_levels import solved, times
from pyro_nami.deriving.second_order import SecondOrder
from pyro_nami.factors.boxed_normal import BoxedNormal
from pyro_nami.factors.joint_normal import JointNormal
from pyro_nami.program.runner import Sites, Values

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = ["JointGaussian"]

# Times that a block is taken anew; after one, one of 280 posteriors in float32 is 45 deviations off.
MOST_CLOSER = 3


class JointGaussian(SecondOrder):
    """The exact conditionals of a block, each given those before it and with those behind integrated out.

    Far from where the posterior is, slopes are rounded by more than it is wide: from there it is taken anew.

    Args:
        group, leading, nesting, differentiable, away, sizes, at: as for `SecondOrder`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # member -> the value at which later conditionals were last computed, and its offset
        self._offsets: dict[str, tuple[Tensor, Tensor]] = {}
        self._order = list(reversed(self._first))  # of drawing

    @property
    def has_moved(self) -> bool:
        """Whether it ended elsewhere than where it was made to start."""
        return self.runs > 1

    def apart(self) -> Self:
        other = super().apart()
        other._offsets = {}
        return other

    def means(
        self, values: Values | None = None, names: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Returns the means of members, by default of all, each given the values or means of members before it."""
        names = self.group.members if names is None else names
        given = (values or {}).items()
        known = {name: value.detach() for name, value in given if name not in names}
        found = self.drawn(lambda name, fn: fn.mean, known)
        return {name: found[name] for name in names}

    def drawn(
        self, choose: Callable[[str, Any], Tensor], known: Values | None = None
    ) -> dict[str, Tensor]:
        """Returns the members' values, each chosen by its name and its conditional, but for some that are known."""
        found = dict(known or {})
        for name in self._order:
            if name not in found:
                found[name] = choose(name, self.conditional(name, found))
        return found

    def solve(self, sites: Sites) -> Expansion | None:
        self.expand(sites, self.take(sites, again=True))
        return self._closer()

    def expand(self, sites: Sites, slopes: Mapping[str, Tensor]) -> None:
        """Derives the conditionals about the references."""
        with derivatives():
            self._read(sites, slopes)
            self._eliminate()

    def _eliminate(self) -> None:
        """Turns the rows of the levels into the posterior's."""
        rounding = ROUNDING * self._eps
        for i, level in enumerate(self.levels):
            self.levels[i], update = level.eliminated(rounding)
            self.levels[i + 1 :] = [later.updated(update, level) for later in self.levels[i + 1 :]]

    @property
    def _eps(self) -> float:
        """The rounding error of the members' values."""
        return torch.finfo(next(iter(self.references.values())).dtype).eps

    def widths(self) -> dict[str, Tensor]:
        """Returns posterior deviations for members with flat priors, of each element given all others."""
        found = {}
        for level in self.levels:
            prior = level.prior[..., : level.size]
            # None until the level is eliminated, where there are flat priors
            whole = (level.precision if level.open is None else prior.square().sum(-2)).detach()
            wide = whole.clamp(min=torch.finfo(whole.dtype).tiny).rsqrt()
            for name, each in self._by_name(level, wide).items():
                if name in self.flat:
                    found[name] = self._shaped(name, each).to(self.references[name])
        return found

    def _shaped(self, name: str, flat: Tensor) -> Tensor:
        """Returns numbers of a member's elements, ``(*batch, *plates, E)`` as `_flat` has them, in its shape."""
        held = self._held(name)
        plates = len(held) - len(self.priors[name].event_shape)
        return flat.flip(-1).reshape(flat.shape[: flat.dim() - 1 - plates] + held)

    def lost(self, draws: int = 256) -> dict[str, Tensor]:
        """Returns the share of each conditional that lies outside of a flat prior's bounds, by member and instance."""
        found: dict[str, Tensor] = {}

        def choose(name: str, fn: Any) -> Tensor:
            value = fn.rsample((draws,) if name == self._order[0] else ())
            if isinstance(fn, BoxedNormal):  # which notes it as it draws
                found[name] = fn.lost.mean(0) if fn.lost.dim() else fn.lost
            return value

        self.drawn(choose)
        return found

    def undecided(self) -> list[str]:
        """Returns the members with flat priors of which data leave an element open, of one that is solved."""
        found = []
        for level in self.levels:
            if level.open is not None:
                each = self._by_name(level, level.open)
                found += [name for name in each if bool(each[name].any())]
        return found

    def _closer(self) -> Self | None:
        """Returns the expansion about the means, if rounding at the references may have moved the means; else None."""
        if self.runs > MOST_CLOSER or torch.jit.is_tracing():
            return None
        # Ten times as far, means are off by a hundredth of a deviation where covariates are collinear.
        farthest = TOLERANCE / (ROUNDING * self._eps)
        means = self.means()
        for level, moved in zip(self.levels, self._steps_to(means)):
            roots = level.prior[..., : level.size].detach().diagonal(dim1=-2, dim2=-1)
            far = (moved * roots).abs()
            if bool(((far > farthest) & (far < torch.inf)).any()):
                return self.anew(at=means)
        return None

    def conditional(self, name: str, values: Values, dims: int | None = None) -> Any:
        size, event_shape = self.sizes[name], self.priors[name].event_shape
        place = next(i for i, level in enumerate(self.levels) if name in level.names)
        level, *later = self.levels[place:]
        first = self._first[name] - level.start
        rows = level.prior[..., first : first + size, :]
        upper, error = rows[..., first : first + size], -rows[..., -1]
        beside = level.names[level.names.index(name) + 1 :]
        begin = first + size
        for before in (beside, *(other.names for other in later)):
            if before:
                offsets = self._offsets_at(before, values)
                end = begin + offsets.shape[-1]
                error = error - times(rows[..., begin:end], offsets)
                begin = end
        reference = self._flat(name, self.references[name])
        like = reference.dtype
        loc = reference + solved(upper, error.unsqueeze(-1)).squeeze(-1).to(like)
        bounds = self._bounds(name)
        if size == 1 and bounds is None:
            shape = trimmed(loc.shape[:-1], dims) + event_shape  # of size 1
            scale = upper[..., 0].reciprocal().to(like).expand(loc.shape)
            normal = dist.Normal(loc.reshape(shape), scale.reshape(shape), validate_args=False)
            return normal.to_event(len(event_shape))
        held = self._held(name)
        plates = len(held) - len(event_shape)
        lead = None if dims is None else max(0, dims - plates)
        # plates that elements lie along have size 1 here
        loc = squeezed(loc.flatten(-1 - plates).flip(-1), lead, 1)
        lead = loc.dim() - 1
        lower = squeezed(upper.flatten(-2 - plates, -2).flip(-1, -2).to(like), lead, 2)
        if dims is not None and not lead:
            held = held[max(0, plates - dims) :]
        if bounds is None:
            return JointNormal(loc, lower, held, len(event_shape))
        low, high = (squeezed(each.flatten(-1 - plates), lead, 1) for each in bounds)
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

    def _offsets_at(self, names: Sequence[str], values: Values) -> Tensor:
        """Returns offsets of members at their values, ``(*batch, *plates, elements)``."""
        for name in names:
            if name not in self._offsets or self._offsets[name][0] is not values[name]:
                self._offsets[name] = values[name], self._moved(name, values[name])
        return torch.cat([self._offsets[name][1] for name in names], -1)
