"""Normals about the mode of latents with Gaussian priors and children of concave log density, by Newton's method.

At each point `joint_gaussian` takes the log density to second order; the mean of the resulting
Normals is the next point. A step is shortened where the log density falls again on the way.
`quadrature` replaces the Normals by a grid about the mode where members have a single element.

The mode is differentiable in latents sampled earlier: the derivative is that of one more Newton
step. The curvature is taken at the mode once more, with its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pyro_nami.deriving.expansion import TOLERANCE, Expansion, irregular, parameters_of
from pyro_nami.deriving.joint_gaussian import JointGaussian
from pyro_nami.deriving.quadrature import Tabulated
from pyro_nami.factors.joint_normal import joint_normal
from pyro_nami.program.masks import without_gaps

__all__ = ["Newton", "has_one_mode", "is_concave"]

_MOST_RUNS = 200
_CLOSE = 0.03  # nats, times the root of the rounding error: a step that gains as little is the last
_NEAR = 0.05  # nats: the same where a grid follows
_ASIDE = 1e-4  # prior deviations from the mean to the first point
_SHORTEST, _LONGEST = 0.1, 0.7  # to what part a step is cut
_LEAST = 1e-6  # of a step; shorter, it leads back to where it began, for good
_WIDER = 1.05  # times the deviations of priors, squared: what is left to rounding
_LOST = 1e4  # nats: where a step would still gain as much, the mode is nowhere near
# of the most by which rounding is told to take log densities, what it takes them by
_OF_TERMS = 1e-2
_GROWTH, _GAINED = 2, 0.2  # of steps that fell short; of what a line would gain, what is enough


class LineStep(NamedTuple):
    """From where a point was reached: in which direction, with which slope and log density there, and how far.

    The last three are of each set of instances that are solved by themselves.
    """

    start: Mapping[str, Tensor]
    along: Mapping[str, Tensor]
    slope: Tensor
    total: Tensor
    length: Tensor


class Newton(JointGaussian):
    """Normals about the mode of a block, each given those before it and with those behind integrated out.

    Args:
        group, leading, nesting, differentiable, sizes: as for `JointGaussian`.
        at: values of the members to start from; by default near the means of their priors.

    References:
        Rue, Martino and Chopin 2009, Approximate Bayesian inference for latent Gaussian models.
    """

    concave = False
    # rather than one to draw from, where priors stand in for modes that were not found
    is_probe = True
    length = 0.0  # of the way on a line from the mode to here, in deviations, squared

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step: LineStep | None = None  # that led here
        self._is_last = False
        # sets of instances whose mode was not found: their priors stand in
        self._lost: Tensor | None = None
        self._slopes: dict[str, Tensor] | None = None  # of the children, taken once
        self._densities: dict[str, Tensor] = {}
        # how far the data let rounding take log densities, the same in all runs
        self._of_terms: Tensor | None = None

    def reference(self, name: str, loc: Tensor, step: Tensor) -> Tensor:
        at = self._at.get(name)
        if at is not None and self._runs > 1:
            return at
        # Not at the mean itself: at logits of 0 some densities have no curvature by their implementation.
        first = loc + _ASIDE * step * irregular(loc.shape, loc, len(self.values))
        # where it is not known where to start
        return first if at is None else torch.where(at.isnan(), first, at)

    # ---- steps

    def solve(self, sites: Mapping[str, Any]) -> Expansion | None:
        if self._is_last:
            return super().solve(sites)
        frames = (
            sites[self._order[0]]["cond_indep_stack"]
            if all(map(self._is_lifted, self._order))
            else ()
        )
        # of instances by themselves
        self._apart = {frame.name: frame.dim for frame in frames if frame.vectorized}
        differentiable, self.differentiable = self.differentiable, False
        slopes, (total, rounding) = self.joint_slopes(sites), self._joint(sites)
        over, stalled, shorter, longer = self._cut(slopes, total, rounding)
        if over.all() and self._runs < _MOST_RUNS:
            return self._reached(shorter)
        super().solve(sites)
        along = {
            name: _beyond_rounding(mean, self.references[name])
            for name, mean in self.means().items()
        }
        slope = self._along(slopes, along)
        going = (slope > 2 * self._enough()) & ~stalled
        if self._runs < _MOST_RUNS and bool((going | over).any()):
            step = LineStep(dict(self.references), along, slope, total, longer.where(going, 0.0))
            return self._reached(self._either(over, shorter, step))
        if not self.is_probe and (slope > _LOST).any():  # again, with nothing known of these
            self._lost, self._slopes = slope > _LOST, None
            super().solve(sites)
        differentiable = differentiable and self._is_differentiable()
        if self.group.is_tabulated:
            return Tabulated(self.group, *self._args[:2], differentiable, near=self)
        if not differentiable:
            self._levels = [level.detached() for level in self._levels]
            return None
        self.differentiable = True
        super().solve(sites)
        last = self.moved_to({})
        last._at, last._is_last, last._lost = self.means(), True, self._lost  # with their gradients
        return last

    def _is_differentiable(self) -> bool:
        """Whether there are gradients to anything but the members: to what was drawn before, or the model's weights."""
        own = set(map(id, self.values.values()))
        return any(id(leaf) not in own for leaf in parameters_of(*self._densities.values()))

    def _enough(self) -> float:
        """Returns what the last step may gain, in nats."""
        if self.group.is_tabulated:
            return _NEAR
        return _CLOSE * torch.finfo(next(iter(self.references.values())).dtype).eps ** 0.5

    @property
    def has_moved(self) -> bool:
        return not self._at or self._runs > 2

    def moved_to(self, at: Mapping[str, Tensor]) -> Newton:
        other = super().moved_to(at)
        other.is_probe = self.is_probe
        return other

    def _closer(self) -> None:
        """Does nothing, as steps lead there."""

    def _reached(self, step: LineStep) -> Newton:
        """Returns the expansion about the point that a step leads to."""
        lengths = {name: self._beside(name, step.length) for name in step.start}
        other = self.moved_to(
            {name: start + lengths[name] * step.along[name] for name, start in step.start.items()}
        )
        other._step, other._of_terms = step, self._of_terms
        return other

    def _cut(
        self, slopes: Mapping[str, Tensor], total: Tensor, rounding: Tensor
    ) -> tuple[Tensor, Tensor, LineStep, Tensor]:
        """Returns where the log density falls again on the way to this point, where it hardly rose, the step cut at the
        first, and the next length.

        Steps grow where the slope hardly changes on their way, as they do where curvatures of both signs meet.
        """
        one = torch.ones_like(total)
        if self._step is None:
            nowhere = torch.zeros_like(total, dtype=torch.bool)
            return nowhere, nowhere, LineStep({}, {}, one, one, one), one
        before, now = self._step.slope, self._along(slopes, self._step.along)
        gained = total - self._step.total
        # Where it is not concave it may be lower though its slope is not, and much higher though its slope is.
        over = ~(now >= -before / 2 - self._enough()) | (gained < -rounding - self._enough())
        if total.shape == before.shape:
            over &= ~(gained > rounding + _GAINED * self._step.length * before)
        # If the slope falls all the way, its zero is near that of the chord; what overflows is no number.
        cut = (before / (before - now)).nan_to_num(0.0).clamp(_SHORTEST, _LONGEST)
        longer = torch.where(now > before / 2, _GROWTH * self._step.length, 1.0).clamp(min=1.0)
        length = self._step.length * cut
        shorter = self._step._replace(length=length.where(length > _LEAST, 0.0))
        return over & (self._step.length > 0), ~(gained > self._enough()), shorter, longer

    def _either(self, over: Tensor, shorter: LineStep, step: LineStep) -> LineStep:
        """Returns a step that is the first one where that had led too far, of each set of instances by itself."""
        if not over.any():
            return step
        parts = [torch.where(over, first, second) for first, second in zip(shorter[2:], step[2:])]
        start, along = (
            {
                name: torch.where(self._beside(name, over), first[name], value)
                for name, value in second.items()
            }
            for first, second in zip(shorter[:2], step[:2])
        )
        return LineStep(start, along, *parts)

    def density(self, sites: Mapping[str, Any], name: str) -> Tensor:
        """Returns a site's log density, as `Expansion.density` does; of one run all that is asked of this is."""
        if name in self._densities:
            return self._densities[name]
        found = super().density(sites, name)
        if found.requires_grad:
            self._densities[name] = found
        return found

    def joint_slopes(self, sites: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the slopes of the joint log density, members' own included, ``(*batch, *plates, *event)``."""
        own = self.take(sites, whole=True, parts=self.group.members)
        return {
            name: self._whole(name, (own[name] + slope).detach())
            for name, slope in self.take(sites).items()
        }

    def take(
        self, sites: Mapping[str, Any], *, parts: Sequence[str] = (), **options: Any
    ) -> dict[str, Tensor]:
        if parts:
            return super().take(sites, parts=parts, **options)
        if self._slopes is None:
            self._slopes = super().take(sites, again=True, whole=True)
            if (lost := self._lost) is not None:
                found = self._slopes.items()
                gone = {
                    name: each.masked_fill(self._beside(name, lost), torch.nan)
                    for name, each in found
                }
                self._slopes = {
                    name: each.reshape(self._slopes[name].shape) for name, each in gone.items()
                }
        return self._slopes

    def _along(self, slopes: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
        """Returns the slope along a direction, of each set of instances that are solved by themselves."""
        total: Any = 0.0
        for name, step in direction.items():
            product, events = (slopes[name] * step).double(), len(self.priors[name].event_shape)
            product = product.sum(tuple(range(-events, 0))) if events else product
            total = total + self._summed(product, self._apart.values())
        return total

    def _joint(self, sites: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the joint log density in nats, and how far rounding may take it, of each set; of all of them where a
        child is in other plates.
        """
        names = [name for name in (*self.group.members, *self.group.children) if name in sites]
        within = [{frame.name for frame in sites[name]["cond_indep_stack"]} for name in names]
        apart = [
            dim for plate, dim in self._apart.items() if all(plate in frames for frames in within)
        ]
        parts = [self._summed(self.density(sites, name).detach().double(), apart) for name in names]
        if any(part.dim() > len(self.leading) for part in parts):  # the model mixes up its dims
            return (torch.zeros_like(parts[0].sum()),) * 2
        total = torch.stack(torch.broadcast_tensors(*parts)).sum(0)
        if self._of_terms is None:
            own = [
                self._summed(each, apart)
                for each in self.rounding(sites)
                if each.dim() <= len(self.leading)
            ]
            self._of_terms = _OF_TERMS * torch.stack(
                torch.broadcast_tensors(torch.zeros_like(total), *own)
            ).sum(0)
        eps = torch.finfo(next(iter(self.references.values())).dtype).eps
        return total, 100 * eps * total.abs() + self._of_terms

    def _summed(self, parts: Tensor, apart: Collection[int]) -> Tensor:
        """Returns sums over plates of numbers ``(*batch, *plates)``, but for some dims."""
        plates = [dim for dim in range(-min(self.nesting, parts.dim()), 0) if dim not in apart]
        return parts.sum(plates, keepdim=True) if plates else parts

    def _beside(self, name: str, each: Tensor) -> Tensor:
        """Returns what is told of sets of instances as it belongs to a member's values."""
        each = each.to(self.references[name]) if each.is_floating_point() else each
        return each.reshape(each.shape + (1,) * len(self.priors[name].event_shape))

    # ---- probing

    def mode(self) -> Newton:
        """Returns the expansion about the mode, of one that is solved."""
        return self.moved_to(self.means())

    def line(self, place: float) -> Newton:
        """Returns the expansion about a point some deviations from the mode, on a line, of one that is solved."""
        found: dict[str, Tensor] = {}
        length = 0.0
        self._offsets.clear()
        for i, name in enumerate(self._order):
            fn = joint_normal(self.conditional(name, found))
            deviations = place * irregular(fn.loc.shape, fn.loc, i)
            found[name] = fn.at(deviations).reshape(fn.batch_shape + fn.event_shape)
            length += float(deviations.double().square().sum())
        self._offsets.clear()
        other = self.moved_to(found)
        other.length = length
        return other

    def is_wider(self, far: Newton) -> bool:
        """Whether Normals are wider than priors, on a line to another point; concave densities only narrow them."""
        names = [name for name in self._order if name not in self.flat]
        way = sum(
            float((self._noise(name, far) - self._noise(name, self)).square().sum())
            for name in names
        )
        return not way <= _WIDER * far.length

    def across(self, place: float) -> Newton:
        """Returns the expansion about a point some deviations of the priors from the mode, of one that is solved."""
        ways = self._ways()
        return self.moved_to(
            {name: mean + place * ways[name] for name, mean in self.means().items()}
        )

    def room(self) -> float:
        """Returns the most such deviations that are within the bounds of flat priors."""
        ways, means = self._ways(), self.means()
        return min(
            (flat.room(means[name], ways[name]) for name, flat in self.flat.items()),
            default=math.inf,
        )

    def _ways(self) -> dict[str, Tensor]:
        """Returns where a deviation of the priors leads, by member; of flat ones, a few of those that data leave."""
        found, wide = {}, self.widths()
        for i, (name, mean) in enumerate(self.means().items()):
            spread = (
                wide[name]
                if name in wide
                else self.priors[name].stddev.detach().nan_to_num(posinf=0.0)
            )
            found[name] = spread.expand(mean.shape) * irregular(mean.shape, mean, i)
        return found

    def has_converged(self, most: int) -> bool:
        return self._runs < most

    def densities(self, sites: Mapping[str, Any]) -> list[Tensor]:
        """Returns the log densities of the children, row by row."""
        return [self.density(sites, name).detach() for name in self.group.children]

    def rounding(self, sites: Mapping[str, Any]) -> list[Tensor]:
        """Returns how far rounding may take these: constants that cancel in a count's are as large as log(count!)."""
        found, names = [], [name for name in self.group.children if name in sites]
        for name in names:
            density = self.density(sites, name).detach()
            value = without_gaps(sites[name]).detach().abs()
            value, events = value.double().nan_to_num(), len(sites[name]["fn"].event_shape)
            # a factor's has no elements
            value = pad(value.flatten(-events), (0, 1)).amax(-1) if events else value
            terms = 10 + value * value.log1p() + 0.1 * density.abs().double().nan_to_num()
            found.append(1e3 * torch.finfo(density.dtype).eps * terms)
        return found


def _beyond_rounding(value: Tensor, start: Tensor) -> Tensor:
    """Returns the way to a value, 0 where it is as short as rounding."""
    way = value - start
    return torch.where(way.abs() > 4 * torch.finfo(start.dtype).eps * start.abs(), way, 0.0)


def has_one_mode(line: Mapping[float, Sequence[Tensor]], rounding: Sequence[Tensor]) -> bool:
    """Whether functions of a place on a line do not fall and rise again, by a nat, on the way from 0 to either side.

    Concave ones do not, wherever their modes are.
    """
    for side in (1, -1):
        places = sorted((place for place in line if place * side >= 0), key=abs)
        for *values, error in zip(*(line[place] for place in places), rounding):
            top, low = values[0], torch.full_like(values[0], torch.inf)
            for value in values[1:]:
                off = 1 + error + TOLERANCE * (top - value).abs()
                low = torch.where(value < top - off, torch.minimum(low, value), low)
                if ((value > low + off) & value.isfinite()).any():
                    return False
                top = torch.maximum(top, value)
    return True


def is_concave(line: Mapping[float, Sequence[Tensor]], rounding: Sequence[Tensor]) -> bool:
    """Whether functions of a place on a line are concave, given what each is at some places, where that is finite."""
    places = sorted(line)
    for first, middle, last in zip(places, places[1:], places[2:]):
        share = (middle - first) / (last - first)
        for low, here, high, error in zip(line[first], line[middle], line[last], rounding):
            off = (
                TOLERANCE * (high - low).abs()
                + 10 * torch.finfo(here.dtype).eps * here.abs()
                + error
            )
            bent = here < low + share * (high - low) - off
            if (bent & low.isfinite() & high.isfinite()).any():
                return False
    return True
