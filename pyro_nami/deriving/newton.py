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

__all__ = ["LOST", "Newton", "has_one_mode", "is_concave"]

# Of the model, in a search; with ten times more, data without a mode hold up all others for a minute.
MOST_RUNS = 200
# Nats, times the root of the rounding error: a step that gains less is the last. Ten times more shows in gradients.
CLOSE = 0.03
CLOSE_FOR_GRID = 0.05  # nats, where a grid follows; ten times more moves the grid off the mass
SHORTEST_CUT = 0.1  # of a step that leads too far, at least; half of it at most
# Nats that a step would still gain, or that rounding takes, where no mode is found. Ten times less is met near modes.
LOST = 1e4
# What rounding usually takes log densities by, of the most that `Newton.rounding` tells. Ten times more ends searches
# early.
USUAL_ROUNDING = 1e-2
# Squared deviations of priors, for each of the Normals: concave densities leave 1, rounding this.
WIDER = 1.05


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
        is_probe: whether modes that are not found are to show, and not to be replaced by priors.

    References:
        Rue, Martino and Chopin 2009, Approximate Bayesian inference for latent Gaussian models.
    """

    has_constants = False

    def __init__(self, *args: Any, is_probe: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kwargs = {**self._kwargs, "is_probe": is_probe}
        self._is_probe = is_probe
        self._step: LineStep | None = None  # that led here
        self._is_last = False
        # sets of instances whose mode was not found: their priors stand in
        self._lost: Tensor | None = None
        self._densities: dict[str, Tensor] = {}
        # how far the data let rounding take log densities, the same in all runs
        self._of_terms: Tensor | None = None

    def reference(self, name: str, loc: Tensor, step: Tensor) -> Tensor:
        at = self._at.get(name)
        if at is not None and self.runs > 1:
            return at
        # Not at the mean itself: at logits of 0 some densities have no curvature by their implementation.
        first = loc + TOLERANCE * step * irregular(loc.shape, loc, len(self.values))
        # where it is not known where to start
        return first if at is None else torch.where(at.isnan(), first, at)

    # ---- steps

    def solve(self, sites: Mapping[str, Any]) -> Expansion | None:
        if self._is_last:
            self.expand(sites, self._children_slopes(sites))
            return None
        frames = (
            sites[self._order[0]]["cond_indep_stack"]
            if all(map(self._is_lifted, self._order))
            else ()
        )
        # of instances by themselves
        self._apart = {frame.name: frame.dim for frame in frames if frame.vectorized}
        differentiable, self.differentiable = self.differentiable, False
        children = self._children_slopes(sites)
        slopes, (total, rounding) = self.joint_slopes(sites, children), self._joint(sites)
        over, stalled, shorter = self._cut(slopes, total, rounding)
        if over.all() and self.runs < MOST_RUNS:
            return self._reached(shorter)
        self.expand(sites, children)
        along = {
            name: _beyond_rounding(mean, self.references[name])
            for name, mean in self.means().items()
        }
        slope = self._along(slopes, along)
        going = (slope > 2 * self._enough()) & ~stalled
        if self.runs < MOST_RUNS and bool((going | over).any()):
            step = LineStep(dict(self.references), along, slope, total, going.double())
            return self._reached(self._either(over, shorter, step))
        if not self._is_probe and (slope > LOST).any():
            self._lost = slope > LOST
            children = self._children_slopes(sites)
            self.expand(sites, children)
        differentiable = differentiable and self._is_differentiable()
        if self.group.is_tabulated:
            return Tabulated(self.group, *self._args[:2], differentiable, near=self)
        if not differentiable:
            self._levels = [level.detached() for level in self._levels]
            return None
        self.differentiable = True
        self.expand(sites, children)
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
            return CLOSE_FOR_GRID
        return CLOSE * torch.finfo(next(iter(self.references.values())).dtype).eps ** 0.5

    @property
    def has_moved(self) -> bool:
        return not self._at or self.runs > 2

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
    ) -> tuple[Tensor, Tensor, LineStep]:
        """Returns where the step to this point led too far, where it gained too little to go on, and it cut."""
        if self._step is None:
            nowhere, one = torch.zeros_like(total, dtype=torch.bool), torch.ones_like(total)
            return nowhere, nowhere, LineStep({}, {}, one, one, one)
        before, now = self._step.slope, self._along(slopes, self._step.along)
        gained = total - self._step.total
        # Where it is not concave it may be lower though its slope is not.
        over = ~(now >= -before / 2 - self._enough()) | (gained < -rounding - self._enough())
        # If the slope falls all the way, its zero is near that of the chord; what overflows is no number.
        cut = (before / (before - now)).nan_to_num(0.0).clamp(SHORTEST_CUT, 0.5)
        shorter = self._step._replace(length=self._step.length * cut)
        return over & (self._step.length > 0), ~(gained > self._enough()), shorter

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

    def joint_slopes(
        self, sites: Mapping[str, Any], children: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Returns the slopes of the joint log density, members' own included, ``(*batch, *plates, *event)``."""
        children = self.take(sites) if children is None else children
        own = self.take(sites, parts=self.group.members)
        return {
            name: (own[name] + slope).detach().expand(self.shape_of(name))
            for name, slope in children.items()
        }

    def _children_slopes(self, sites: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the slopes of the children's log density, no numbers where the mode was not found."""
        slopes = self.take(sites, again=True)
        if self._lost is None:
            return slopes
        return {
            name: each.masked_fill(self._beside(name, self._lost), torch.nan).reshape(each.shape)
            for name, each in slopes.items()
        }

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
            self._of_terms = USUAL_ROUNDING * torch.stack(
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

    def line(self, place: float) -> tuple[Newton, float]:
        """Returns the expansion about a point on a line from the mode, of one that is solved, and its squared distance.

        Both are in deviations: ``place`` is the largest of an element.
        """
        lengths: list[float] = []

        def choose(name: str, fn: Any) -> Tensor:
            normal = joint_normal(fn)
            deviations = place * irregular(normal.loc.shape, normal.loc, len(lengths))
            lengths.append(float(deviations.double().square().sum()))
            return normal.at(deviations).reshape(normal.batch_shape + normal.event_shape)

        return self.moved_to(self.drawn(choose)), sum(lengths)

    def is_wider(self, far: Newton, length: float) -> bool:
        """Whether Normals are wider than priors, on a line of a squared length; concave densities only narrow them."""
        names = [name for name in self._order if name not in self.flat]
        moves = [self._noise(name, far) - self._noise(name, self) for name in names]
        return not sum(float(move.square().sum()) for move in moves) <= WIDER * length

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
