"""Normals about the mode of latents with Gaussian priors and children of concave log density, by Newton's method.

At each point `joint_gaussian` takes the log density to second order; the mean of the resulting
Normals is the next point. A step is shortened where the log density falls again on the way.
`quadrature` replaces the Normals by a grid about the mode where members have a single element.

The mode is differentiable in latents sampled earlier: the derivative is that of one more Newton
step. The curvature is taken at the mode once more, with its gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.deriving.expansion import (
    MAX_ERROR,
    MOST_RUNS,
    ROUNDING,
    TOLERANCE,
    Expansion,
    derivatives,
    irregular,
    parameters_of,
)
from pyro_nami.deriving.joint_gaussian import JointGaussian
from pyro_nami.deriving.quadrature import Tabulated
from pyro_nami.factors.joint_normal import joint_normal
from pyro_nami.program.masks import without_gaps
from pyro_nami.program.runner import Message, Sites, Values

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = ["LOST", "MODES_AT", "Newton", "has_one_mode", "is_concave", "rounding_of_rows"]

# Where further modes are looked for about a mode, in deviations of the priors, of which 4 have nearly all mass.
MODES_AT = tuple(side * place for place in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0) for side in (-1, 1))
# Nats that a step would still gain, or that rounding takes, where no mode is found. Ten times less is met near modes.
LOST = 1e4


class LineStep(NamedTuple):
    """From where a point was reached: in which direction, with which slope and log density there, and how far.

    The last three are of each set of instances that are solved by themselves.
    """

    start: Values
    along: Mapping[str, Tensor]
    slope: Tensor
    total: Tensor
    length: Tensor


class Newton(JointGaussian):
    """Normals about the mode of a block, each given those before it and with those behind integrated out.

    Args:
        group, leading, nesting, differentiable, sizes: as for `JointGaussian`.
        at: values of the members to start from; by default near the means of their priors.

    Attributes:
        unfound: sets of instances whose mode was not found, where their priors stand in; None if there are none.

    References:
        Rue, Martino and Chopin 2009, Approximate Bayesian inference for latent Gaussian models.
    """

    # deviations of the Normals about the mode; further out the log density overflows
    probed_at = (-6.0, -3.0, -1.0, 1.0, 3.0, 6.0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step: LineStep | None = None  # that led here
        self._is_last = False
        self.unfound: Tensor | None = None
        self._densities: dict[str, Tensor] = {}

    def apart(self) -> Self:
        other = super().apart()
        other._densities = {}
        return other

    def reference(self, name: str, loc: Tensor, step: Tensor) -> Tensor:
        at = self._at.get(name)
        if at is not None and self.runs > 1:
            return at
        # Not at the mean itself: at logits of 0 some densities have no curvature by their implementation.
        first = loc + TOLERANCE * step * irregular(loc.shape, loc, len(self.values))
        # where it is not known where to start
        return first if at is None else torch.where(at.isnan(), first, at)

    # ---- steps

    def solve(self, sites: Sites) -> Expansion | None:
        if self._is_last:
            self.expand(sites, self._children_slopes(sites))
            return None
        lifted = all(map(self._is_lifted, self._order))
        frames = sites[self._order[0]]["cond_indep_stack"] if lifted else ()
        # of instances by themselves
        self._apart = {frame.name: frame.dim for frame in frames if frame.vectorized}
        differentiable, self.differentiable = self.differentiable, False
        children = self._children_slopes(sites)
        slopes = {
            name: (children[name] + own).detach().expand(self.shapes[name])
            for name, own in self.take(sites, parts=self.group.members).items()
        }
        total, rounding = self._joint(sites)
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
        if (slope > LOST).any():
            self.unfound = slope > LOST
            children = self._children_slopes(sites)
            self.expand(sites, children)
        if differentiable:  # by latents drawn before, or the model's weights
            differentiable = bool(
                parameters_of(*self._densities.values(), but=self.values.values())
            )
        if self.group.is_tabulated:
            return Tabulated(self.group, self.leading, self.nesting, differentiable, near=self)
        if not differentiable:
            return None
        self.differentiable = True
        self.expand(sites, children)
        last = self.anew(at={})
        last._at = self.means()  # with their gradients
        last._is_last, last.unfound = True, self.unfound
        return last

    def _enough(self) -> float:
        """Returns the nats that the last step may still gain: fewer for Normals, as gradients show them."""
        return MAX_ERROR if self.group.is_tabulated else MAX_ERROR * self._eps**0.5

    @property
    def has_moved(self) -> bool:
        return not self._at or self.runs > 2

    def _reached(self, step: LineStep) -> Newton:
        """Returns the expansion about the point that a step leads to."""
        lengths = {name: self._beside(name, step.length) for name in step.start}
        other = self.anew(
            at={name: at + lengths[name] * step.along[name] for name, at in step.start.items()}
        )
        other._step = step
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
        # If the slope falls all the way, its zero is near that of the chord (Dennis and Schnabel 1983, 6.3.2).
        cut = (before / (before - now)).nan_to_num(0.0).clamp(0.1, 0.5)
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

    def density(self, sites: Sites, name: str) -> Tensor:
        """Returns a site's log density, as `Expansion.density` does; computed once for the run that this expands."""
        if name in self._densities:
            return self._densities[name]
        found = super().density(sites, name)
        if found.requires_grad:
            self._densities[name] = found
        return found

    def _children_slopes(self, sites: Sites) -> dict[str, Tensor]:
        """Returns the slopes of the children's log density, no numbers where the mode was not found."""
        slopes = self.take(sites, again=True)
        if self.unfound is None:
            return slopes
        with derivatives():  # curvatures of the other instances follow
            return {
                name: each.masked_fill(self._beside(name, self.unfound), torch.nan).reshape(
                    each.shape
                )
                for name, each in slopes.items()
            }

    def _along(self, slopes: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensor:
        """Returns the slope along a direction, of each set of instances that are solved by themselves."""
        total: Any = 0.0
        for name, step in direction.items():
            product, events = (slopes[name] * step).double(), len(self.priors[name].event_shape)
            product = product.sum(tuple(range(-events, 0))) if events else product
            total = total + self.summed(product, self._apart.values())
        return total

    def _joint(self, sites: Sites) -> tuple[Tensor, Tensor]:
        """Returns the joint log density in nats, and how far rounding may take it, of each set; of all of them where a
        child is in other plates.
        """
        names = [name for name in self.until if name in sites]
        within = [{frame.name for frame in sites[name]["cond_indep_stack"]} for name in names]
        apart = [
            dim for plate, dim in self._apart.items() if all(plate in frames for frames in within)
        ]
        parts = [self.summed(self.density(sites, name).detach().double(), apart) for name in names]
        if any(part.dim() > len(self.leading) for part in parts):  # the model mixes up its dims
            return (torch.zeros_like(parts[0].sum()),) * 2
        total: Any = sum(parts)
        variances = (self.summed(each.square(), apart) for each in self.rounding(sites))
        deviation = sum(variances, torch.zeros_like(total)).sqrt()
        return total, ROUNDING * self._eps * total.abs() + deviation

    def _beside(self, name: str, each: Tensor) -> Tensor:
        """Returns numbers of sets of instances in a shape that broadcasts with a member's values."""
        each = each.to(self.references[name]) if each.is_floating_point() else each
        return each.reshape(each.shape + (1,) * len(self.priors[name].event_shape))

    # ---- probing

    def mode(self) -> Newton:
        """Returns the expansion about the mode, of one that is solved."""
        return self.anew(at=self.means())

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

        return self.anew(at=self.drawn(choose)), sum(lengths)

    def is_wider(self, far: Newton, length: float) -> bool:
        """Whether Normals are wider than priors, on a line of a squared length; concave densities only narrow them."""
        names = [name for name in self._order if name not in self.flat]
        moves = [self._noise(name, far) - self._noise(name, self) for name in names]
        # rounding widens some; `MAX_ERROR` is the error that counts as none
        return not sum(float(move.square().sum()) for move in moves) <= (1 + MAX_ERROR) * length

    def across(self, place: float) -> Newton:
        """Returns the expansion about a point some deviations of the priors from the mode, of one that is solved."""
        ways = self._ways()
        return self.anew(
            at={name: mean + place * ways[name] for name, mean in self.means().items()}
        )

    def room(self) -> float:
        """Returns how many deviations, as in `across`, lie within the bounds of flat priors."""
        ways, means = self._ways(), self.means()
        return min(
            (flat.room(means[name], ways[name]) for name, flat in self.flat.items()),
            default=math.inf,
        )

    def _ways(self) -> dict[str, Tensor]:
        """Returns a deviation of the prior for each element, by member; for flat priors one of the posterior."""
        found, wide = {}, self.widths()
        for i, (name, mean) in enumerate(self.means().items()):
            spread = wide[name] if name in wide else self.steps[name].nan_to_num(posinf=0.0)
            found[name] = spread.expand(mean.shape) * irregular(mean.shape, mean, i)
        return found

    def densities(self, sites: Sites) -> list[Tensor]:
        """Returns the log densities of the children, row by row."""
        return [self.density(sites, name).detach() for name in self.group.children]

    def rounding(self, sites: Sites) -> list[Tensor]:
        """Returns bounds on the rounding error of these; in a count's, constants as large as log(count!) cancel."""
        names = filter(sites.__contains__, self.group.children)
        return [rounding_of_rows(self.density(sites, name), sites[name]) for name in names]


def rounding_of_rows(density: Tensor, site: Message) -> Tensor:
    """Returns how far rounding may take the log densities of rows of data, in nats, as `Newton.rounding` has it.

    Args:
        density: the log density of each row.
        site: the site of the data.
    """
    value = without_gaps(site).detach().double().nan_to_num().abs()
    events = len(site["fn"].event_shape)
    value = value.flatten(-events).norm(dim=-1) if events else value
    terms = 10 + value * value.log1p() + 0.1 * density.detach().abs().double().nan_to_num()
    return ROUNDING * torch.finfo(density.dtype).eps * terms


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
            heights = torch.stack(values)
            top = heights.cummax(0).values
            off = 1 + error + TOLERANCE * (top - heights)
            low = heights.where(heights < top - off, torch.inf).cummin(0).values
            if ((heights > low + off) & heights.isfinite()).any():
                return False
    return True


def is_concave(line: Mapping[float, Sequence[Tensor]], rounding: Sequence[Tensor]) -> bool:
    """Whether functions on a line are concave, given their values at some places; infinite values count for nothing."""
    places = sorted(line)
    for first, middle, last in zip(places, places[1:], places[2:]):
        share = (middle - first) / (last - first)
        for low, here, high, error in zip(line[first], line[middle], line[last], rounding):
            rise = high - low
            rounded = ROUNDING * torch.finfo(here.dtype).eps * here.abs() + error
            bent = here < low + share * rise - TOLERANCE * rise.abs() - rounded
            if (bent & low.isfinite() & high.isfinite()).any():
                return False
    return True
