"""The log density of a joint Gaussian block to second order about a reference, compared with it at other points.

For offsets x from the reference the children's log density is c + g . x - x . H x / 2. The prior of
a member says x_k = B (x of earlier members) + d + S u with u ~ N(0, I). Slopes at the reference
give g; slopes at unit offsets give H; prior locations there give B. For a flat prior u has infinite
variance.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import (
    TOLERANCE,
    Changed,
    Expansion,
    agree,
    broadcast,
    derivatives,
    irregular,
)
from pyro_nami.deriving.gaussian_levels import (
    Level,
    along_units,
    inverse_root,
    is_quadratic,
    times,
    without_gaps,
)
from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.flat_priors import Flat, flat_prior

__all__ = ["SecondOrder"]

_NEAR = 3.0  # prior standard deviations


class SecondOrder(Expansion):
    """What the children say of a block, and the priors, to second order: as rows of the levels of its elimination.

    Args:
        group, leading, nesting, differentiable, away: as for `Expansion`.
        sizes: member -> number of its elements, where they are not those of the group; is kept up to date.
    """

    def __init__(
        self, group: ConjugateGroup, *args: Any, sizes: dict[str, int] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(group, *args, **kwargs)
        self.sizes = dict(zip(group.members, group.elements)) if sizes is None else sizes
        self._depth = dict(zip(group.members, group.depths))
        # in order of elimination, of each level the last drawn first
        self._first, self._end = {}, 0
        backwards = list(reversed(group.members))
        for name in sorted(backwards, key=self._depth.__getitem__):
            self._first[name] = self._end
            self._end += self.sizes[name]
        self.count = 1 + self._end if group.vectorized and self.away is None else None
        self.references: dict[str, Tensor] = {}  # values that offsets are from
        self.flat: dict[str, Flat] = {}  # of members with flat priors
        self._units: dict[str, Tensor] = {}
        self._steps: dict[str, Tensor] = {}  # lengths of unit offsets, which suit the priors
        self._levels: list[Level] = []

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        """Returns the reference and all unit offsets from it, those of a lifted level's instances together."""
        if (flat := flat_prior(prior)) is not None:
            self.flat[name] = flat
            loc, step = flat.center(torch.Size(prior.batch_shape) + prior.event_shape), flat.step()
        else:
            loc, step = prior.mean.detach(), prior.stddev.detach().mean()
            loc = loc[0] if self._has_points(prior, shape) else loc
        reference = self.references[name] = self.reference(name, loc, step)
        # a flat prior may not say on which device it is
        loc, step = loc.to(reference), step.to(reference)
        if self.away is not None:
            return reference + self.away * step * irregular(shape, loc, len(self.values))
        held = self._held(name, shape, prior)
        if held.numel() != self.sizes[name]:
            self.sizes[name] = held.numel()
            raise Changed
        first = 1 + self._first[name]
        unit = (
            torch.eye(1 + self._end, dtype=loc.dtype, device=loc.device)[
                :, first : first + held.numel()
            ]
            * step
        )
        unit = unit.flip(-1) if held.numel() > 1 else unit
        lead = shape if self.count is None else shape[1:]
        unit = unit.reshape((-1,) + (1,) * (len(lead) - len(held)) + held).expand((-1, *lead))
        self._units[name] = unit
        self._steps[name] = step.expand(held.numel())
        return reference + (unit[0] if self.count is None else unit)

    @property
    def num_offsets(self) -> int:
        """Number of points at which slopes are taken: none away, and one for each element."""
        return 1 + self._end

    def reference(self, name: str, loc: Tensor, step: Tensor) -> Tensor:
        """Returns what a member's offsets are from, given its prior's location and some deviation."""
        return loc

    def _read(self, sites: Mapping[str, Any], whole: bool) -> None:
        """Takes H and g from the run, and what priors say, anew."""
        self._levels = []
        slopes = self.take(sites, again=self.differentiable or self.count is None, whole=whole)
        locs = {name: self._base(name).loc for name in self.priors}
        moved = {
            name
            for name, prior in self.priors.items()
            if self._has_points(prior, self.shapes[name])
        }
        if self.count is None:
            moved = (
                {name for name, loc in locs.items() if loc.requires_grad}
                if len(locs) > 1
                else set()
            )
            slopes, locs = self._at_units(slopes, {name: locs[name] for name in moved}, locs)
        self._lengths = torch.cat([self._steps[name] for name in self._first]).double()
        for names in self._by_level():
            begin, size = self._first[names[0]], sum(self.sizes[name] for name in names)
            frames = sites[names[0]]["cond_indep_stack"] if self._is_lifted(names[0]) else ()
            dims = frozenset(frame.dim for frame in frames if frame.vectorized)
            rows = [
                self._differences(self._flat(name, slopes[name]), begin, sign=-1) for name in names
            ]
            priors = [self._whitening(name, locs[name], name in moved, begin) for name in names]
            own, prior = (
                each[0] if len(each) == 1 else torch.cat(each, -2) for each in (rows, priors)
            )
            proper = [
                own.new_full((self.sizes[name],), float(name not in self.flat)) for name in names
            ]
            self._levels.append(Level(begin, size, dims, own, prior, torch.cat(proper)))
        self._levels, finite = without_gaps(self._levels)
        for names, each in zip(self._by_level(), finite):
            self.finite.update(zip(names, each.split([self.sizes[name] for name in names], -1)))

    def _differences(self, flat: Tensor, begin: int, sign: int) -> Tensor:
        """Returns derivatives by all offsets from ``begin`` on, and behind them the value at 0: ``(..., E, columns)``.

        Both times ``sign``; of ``flat`` values at 0 and all unit offsets, ``(points, ..., E)``.
        """
        flat = (flat if self.differentiable else flat.detach()).double()
        steps, zero = self._lengths[begin:].reshape((-1,) + (1,) * (flat.dim() - 1)), flat[:1]
        return sign * torch.cat([(flat[1 + begin :] - zero) / steps, zero]).movedim(0, -1)

    def _whitening(self, name: str, loc: Tensor, moved: bool, begin: int) -> Tensor:
        """Returns S^-1 (x_k - B x - d), which has the prior N(0, I): ``(*batch, *plates, E, columns)``."""
        shape = self.shapes[name]
        size = self.sizes[name]
        base = self._base(name)
        own, after = self._first[name], self._first[name] + size
        points = shape if self.count is not None else (1, *shape)
        loc = loc - self.references[name]
        if moved:
            mean = self._differences(
                self._flat(name, loc.expand((1 + self._end, *points[1:]))), after, sign=1
            )
        else:
            mean = self._flat(name, loc.expand(points[1:])).double().unsqueeze(-1)
            mean = mean if self.differentiable else mean.detach()
            still = self._end - after
            mean = (
                torch.cat([mean.new_zeros(mean.shape[:-1] + (still,)), mean], -1) if still else mean
            )
        if isinstance(base, dist.Normal):
            scale = self._flat(name, base.scale.expand(points)[0]).double()
            scale = (scale if self.differentiable else scale.detach()).reciprocal().unsqueeze(-1)
            inverse = scale if size == 1 else torch.diag_embed(scale.squeeze(-1))
            mean = mean * scale
        else:
            root = (
                base.scale_tril.double()
                if self.differentiable
                else base.scale_tril.detach().double()
            )
            inverse = inverse_root(root, points, None if self._is_lifted(name) else self.nesting)
            mean = inverse @ mean
        before = [inverse.new_zeros(inverse.shape[:-1] + (own - begin,))] if own > begin else []
        return torch.cat([*before, inverse, -mean], -1)

    def _base(self, name: str) -> Any:
        """Returns a member's Normal or multivariate Normal prior; of a flat one where offsets begin, and their unit."""
        if name not in self.flat:
            return innermost(self.priors[name])
        reference = self.references[name].detach()
        return dist.Normal(
            reference,
            self._steps[name][0].to(reference).expand(reference.shape),
            validate_args=False,
        )

    def _at_units(
        self, slopes: Mapping[str, Tensor], moved: Mapping[str, Tensor], locs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns slopes, and locations of priors, at 0 and all unit offsets, given those at 0.

        All of them are linear in the offsets, so derivatives at 0 tell, where the model cannot be run at all at once.
        """
        leaves, names = list(self.values.values()), list(self.values)
        weights = {name: torch.ones_like(loc, requires_grad=True) for name, loc in moved.items()}
        totals = [(loc * weights[name]).sum() for name, loc in moved.items()]
        total = torch.stack(totals).sum() if totals else torch.zeros(())
        backward = (
            torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
            if totals
            else ()
        )

        def stacked(starts: Mapping[str, Tensor], changes: Sequence[Tensor]) -> dict[str, Tensor]:
            found = {}
            for (name, start), change in zip(starts.items(), changes):
                # zeros
                change = (
                    change
                    if change.dim() > start.dim()
                    else change.expand(1 + self._end, *start.shape)
                )
                idle = (1,) * (self.values[name].dim() - start.dim())
                # In doubles, as far from the mean changes are small beside slopes.
                points = (start.double() + change.double()).reshape(
                    (1 + self._end,) + idle + start.shape
                )
                points = points.expand((-1, *self.values[name].shape))
                found[name] = points.reshape((-1, *self.shapes[name]))
            return found

        graph, weighed = self.differentiable, list(weights.values())
        gone = (
            along_units(dict(zip(names, backward)), self._units, weighed, graph) if totals else ()
        )
        bent = along_units(slopes, self._units, leaves, graph)
        return stacked(slopes, bent), {**locs, **stacked(moved, gone)}

    def _whole(self, name: str, value: Tensor) -> Tensor:
        return value.expand(self.values[name].shape).reshape(self.shapes[name])

    def _moved(self, name: str, value: Tensor) -> Tensor:
        """Returns the offset of a member's value, ``(*batch, *plates, E)``."""
        return self._flat(name, value - self.references[name]).double()

    # ---- probing

    def measure(self, sites: Mapping[str, Any]) -> None:
        if self.away is None:
            with derivatives():
                self._read(sites, whole=True)
        else:
            super().measure(sites)

    def is_finite(self) -> bool:
        return super().is_finite() and all(
            bool(level.prior.isfinite().all()) for level in self._levels
        )

    def reaches(self, sites: Mapping[str, Any]) -> bool:
        """Whether each child's log density moves at all, and that of no element is curved the wrong way."""
        for level in self._levels:
            own = [
                each[..., : level.size].diagonal(dim1=-2, dim2=-1)
                for each in (level.rows, level.prior)
            ]
            # What is flat may be told by members that it moves alone.
            if not torch.where(level.proper > 0, own[0] > -own[1].square(), own[0] >= 0).all():
                return False
        return all(self._curves(sites, child) for child in self.group.children)

    def _curves(self, sites: Mapping[str, Any], child: str) -> bool:
        if self.count is not None:
            there = self.density(sites, child)
            if there.dim() <= len(self.leading):
                raise RuntimeError(f"'{child}' has no dim of the points.")
            return bool((there != there[:1]).any())
        leaves = list(self.values.values())
        # as few of many are read
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        with derivatives():
            density = self.density(sites, child).sum()
            slopes = (
                torch.autograd.grad(density, leaves, create_graph=True, **options)
                if density.requires_grad
                else ()
            )
            moving = [slope for slope in slopes if slope is not None and slope.requires_grad]
            along = [irregular(slope.shape, slope, i) for i, slope in enumerate(moving)]
            bends = torch.autograd.grad(moving, leaves, along, **options) if moving else ()
        return any(bend is not None and bool((bend != 0).any()) for bend in bends)

    def explains(self, far: SecondOrder) -> bool:
        names, steps = self._by_level(), self._steps_to(far)
        for i, (each, level) in enumerate(zip(names, self._levels)):
            found = torch.cat([self._flat(name, far.slopes[name]).double() for name in each], -1)
            terms = [
                times(level.columns(other), step)
                for other, step in zip(self._levels[i:], steps[i:])
            ]
            terms += [other.summed(level, step) for other, step in zip(self._levels[:i], steps[:i])]
            off = (found + level.rows[..., -1] + sum(terms)).abs()
            # Where data are precise, what is small beside their pull may be large beside what they leave open.
            own = [
                each[..., : level.size].diagonal(dim1=-2, dim2=-1)
                for each in (level.rows, level.prior)
            ]
            precision = (own[0] + level.proper * own[1].square()).clamp(min=0)
            rounded = bool((off <= self.noise * precision.sqrt()).all())
            if not rounded and not agree(
                found, -level.rows[..., -1], [-term for term in terms], torch.float32
            ):
                return False
            rounding = (
                100 * torch.finfo(far.values[each[0]].dtype).eps * sum(term.abs() for term in terms)
            )
            least = (0.05 + self.noise) * precision.sqrt() + rounding
            if abs(far.away or 0.0) <= _NEAR and not (off <= least).all():
                return False
        return self.explains_priors(far)

    def explains_priors(self, far: SecondOrder) -> bool:
        """Whether the priors' noise at another point is what their rows say of the offsets."""
        steps = self._steps_to(far)
        for i, (each, level) in enumerate(zip(self._by_level(), self._levels)):
            noise = [self._noise(name, far) for name in each]
            terms = [
                times(level.columns(other, prior=True), step)
                for other, step in zip(self._levels[i:], steps[i:])
            ]
            if not agree(torch.cat(noise, -1), level.prior[..., -1], terms, torch.float32):
                return False
        return True

    def _steps_to(self, far: SecondOrder) -> list[Tensor]:
        """Returns the offsets of another point, by level."""
        values = {name: value.detach() for name, value in far.values.items()}
        return [
            torch.cat([self._moved(name, values[name]) for name in each], -1)
            for each in self._by_level()
        ]

    def _noise(self, name: str, far: SecondOrder) -> Tensor:
        """Returns S^-1 (z - loc) of a member at another point, by its prior there; flat ones are all the same."""
        prior = (self if name in self.flat else far)._base(name)
        error = far.values[name].detach() - prior.loc.detach()
        if isinstance(prior, dist.Normal):
            error = error / prior.scale.detach()
        else:
            root = prior.scale_tril.detach()
            error = torch.linalg.solve_triangular(root, error.unsqueeze(-1), upper=False).squeeze(
                -1
            )
        return self._flat(name, error).double()

    def fits(self, others: Sequence[SecondOrder]) -> bool:
        """Whether each child's log density by itself is quadratic along a line: what one hides, others show."""
        return is_quadratic({other.away or 0.0: other.totals for other in others}, TOLERANCE)

    def gain(self, near: SecondOrder, far: SecondOrder) -> tuple[Tensor, Tensor]:
        """Returns (g0 + g1) . (x1 - x0) / 2, which a quadratic gains, but not where autograd does not see slopes."""
        steps = {name: (far.values[name] - near.values[name]).detach() for name in self._first}
        terms = [
            (step * (near.slopes[name] + far.slopes[name]) / 2).sum()
            for name, step in steps.items()
        ]
        sizes = [
            (step * each.slopes[name]).abs().sum()
            for name, step in steps.items()
            for each in (near, far)
        ]
        return torch.stack(terms).sum(), torch.stack(sizes).sum()

    # ---- shapes

    def _has_points(self, prior: Any, shape: Sequence[int]) -> bool:
        """Whether a prior moves with other members, and so has the dim of the points."""
        dims = len(shape) - len(prior.event_shape)
        return (
            self.count is not None
            and len(prior.batch_shape) == dims
            and prior.batch_shape[0] == self.count
        )

    def _held(self, name: str, shape: Sequence[int], prior: Any = None) -> torch.Size:
        """Returns those dims of a member's values that its elements lie along."""
        prior = self.priors[name] if prior is None else prior
        dims = len(prior.event_shape) + (0 if self._is_lifted(name) else self.nesting)
        return torch.Size(shape[len(shape) - dims :])

    def _is_lifted(self, name: str) -> bool:
        return self._depth[name] < self.group.num_lifted

    def _by_level(self) -> list[list[str]]:
        return [list(names) for _, names in itertools.groupby(self._first, self._depth.__getitem__)]

    def _flat(self, name: str, value: Tensor) -> Tensor:
        """Returns values with elements along the last dim, ``(*batch, *plates, E)``, size 1 in plates that E counts.

        The last comes first, as it is eliminated first.
        """
        shape = self.shapes[name]
        value = value.expand(broadcast(value.shape, shape if self.count is None else shape[1:]))
        held = self._held(name, shape)
        batch = value.shape[: value.dim() - len(held)]
        value = value.reshape(
            batch + (() if self._is_lifted(name) else (1,) * self.nesting) + (held.numel(),)
        )
        return value.flip(-1) if held.numel() > 1 else value
