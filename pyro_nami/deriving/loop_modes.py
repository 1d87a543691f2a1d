"""The states of a loop under data that are not Normal: about the mode, and the nearest Normal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

from pyro_nami.deriving.block_tridiagonal import solved_blocks
from pyro_nami.deriving.expansion import (
    MAX_ERROR,
    MOST_RUNS,
    NEGLIGIBLE,
    ROUNDING,
    TOLERANCE,
    Expansion,
    Run,
    derivatives,
    irregular,
    solved,
)
from pyro_nami.deriving.loop_states import (
    Banded,
    LoopStates,
    Quadratic,
    banded_derivatives,
    blocks,
    quadratic_of,
    vector,
)
from pyro_nami.deriving.newton import MODES_AT, has_one_mode, is_concave
from pyro_nami.factors.wrappers import base_of
from pyro_nami.program.runner import Sites

if TYPE_CHECKING:
    from typing_extensions import Self  # noqa: UP035  for Python 3.10

__all__ = ["NEAREST_POINTS", "NearestStates", "StatesAboutMode", "NonlinearStates"]

# Points of each state, and rounds, by which the nearest Normal is found from the one about the mode: of 4,000 draws of
# 400 volatilities 2,200 count then, 170 without; seven points and six rounds are as good.
NEAREST_POINTS, NEAREST_ROUNDS = 3, 2
# Where data are compared with their expansion about a mode, in deviations: so near that slopes and curvatures tell all
# but that share.
NEARBY = 0.1
# Times that the first round may narrow a state: 1.05 for counts and volatilities; at 2 the Normal about the mode is
# several nats off, at 10 thousands, as of states that their data hardly tell.
MOST_NARROWED = 1.6
# How far apart two searches that have found one mode may end, in deviations: on the way a Normal density falls by an
# error that does not matter.
MOST_APART = (2 * MAX_ERROR) ** 0.5
_FAR_FROM_NORMAL = "data hardly tell some states, whose posterior is far from Normal"


class _ModeStep(NamedTuple):
    """A step of each batch of states, by a share of the way that their expansion says."""

    start: Tensor
    way: Tensor
    total: Tensor  # log density at its start
    length: Tensor  # the share; 0 where the mode is found


class _RowGains(NamedTuple):
    """What the log densities of rows gain from one value of the states to the next, beside their slopes.

    A row is a step of the data, or a state given the states before it.

    Attributes:
        gains: of the log density in each interval, in nats, ``(intervals, *batch, rows)``.
        slopes: at the ends of intervals, times their length.
        rounding: by how much gains may be off.
        reads: of each row, the state that it reads; None where rows read several.
    """

    gains: Tensor
    slopes: Tensor
    rounding: Tensor
    reads: Sequence[int] | slice | None


class StatesAboutMode(LoopStates):
    """The Normal about the mode of the states of a loop, with the curvature there.

    Args:
        group, leading, nesting, differentiable, away, given, at: as for `LoopStates`.
    """

    unsolved = "no mode of the states was found"
    has_linear_prior = True  # whether each state is linear in those before it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._before: _ModeStep | None = None  # that led here
        self._is_last = False

    def solve(self, sites: Sites) -> Expansion | None:
        if self._is_last:
            self.step(self.quadratic(sites, True))
            return None
        total = self._height(sites)
        if (shorter := self._shortened(total)) is not None:
            return self._reached(shorter)
        value, parts = self.values[self.first], self.quadratic(sites, False)
        way = self.step(parts)
        known = way.isfinite().all(-1, keepdim=True)
        if not bool(known.all()):
            uphill = self.step(parts._replace(curvature=_positive(parts.curvature)))
            way = torch.where(known, way, uphill)
        gain = self.summed((way * vector(parts.whole_slope(), value)).sum(-1)) / 2
        going = gain > self._enough()
        if bool(going.any()) and self.runs < MOST_RUNS:
            return self._reached(_ModeStep(value.detach(), way, total, going.to(way)))
        self.unfound = not bool((gain <= MAX_ERROR).all())
        if not self.moves(sites):
            return None
        # once more, with gradients
        last = self.moved(value.detach() + self.step(self.quadratic(sites, True)).to(value))
        last._is_last, last.unfound = True, self.unfound
        return last

    def _enough(self) -> float:
        """Returns the nats that a last step may still gain; fewer where gradients are taken, which show them."""
        eps = torch.finfo(self.values[self.first].dtype).eps
        return MAX_ERROR * eps**0.5 if self.differentiable else MAX_ERROR**2

    # ---- probing

    def refuted(self, sites: Sites, run: Run) -> str:
        flaw = self.flaw_nearby(sites, run) or self.several_modes(sites, run)
        if flaw or self.group.drawn is self.group:
            return flaw
        mode = {self.first: self.mean().detach().to(self.values[self.first])}
        rest = self.nesting, self.differentiable
        near: Any = NearestStates(self.group.drawn, self.leading, *rest, at=mode)
        near, _ = solved(near, run(near), run)
        return "" if near.is_near else _FAR_FROM_NORMAL

    def flaw_nearby(self, sites: Sites, run: Run) -> str:
        """Returns how data, or states, differ from their expansions near the mode; "" if they do not."""
        flaw = self.differs(sites, run, (NEARBY,), share=NEARBY)
        return flaw or self.differs(sites, run, self.probed_at, [self.first])

    def several_modes(self, sites: Sites, run: Run) -> str:
        """Returns why the posterior of the states may have several modes; "" if it has one.

        A sum of concave log densities has one mode. A sum of others may have several, though each has one: then
        searches begin at states over the width of the prior.

        Args:
            sites: of the run that the expansion is of.
            run: makes a run of the model for an expansion.
        """
        parts, mean = self.quadratic(sites, False), self.mean().detach()
        wide = solved_blocks(*parts.prior_precision(), torch.zeros_like(parts.slope)).diagonal
        deviations = vector(wide.diagonal(dim1=-2, dim2=-1), mean).sqrt()
        places = sorted((0.0, *MODES_AT))
        line = torch.tensor(places, dtype=mean.dtype, device=mean.device)
        line = line.reshape(-1, *(1,) * mean.dim())
        signs = irregular(deviations.shape, deviations, 1)
        # rows that read several states see them move apart
        offsets = line * deviations * (signs if self._span > 1 else torch.ones_like(signs))
        states = self.given((mean + offsets).to(self.values[self.first]), len(places))
        rows = states.rows(run(states))
        del rows[self.first]
        rounding = [each.nan_to_num(0.0, 0.0, 0.0).amax(0) for _, each in rows.values()]
        heights = {place: [row[i] for row, _ in rows.values()] for i, place in enumerate(places)}
        if self.has_linear_prior and is_concave(heights, rounding):
            return ""
        if not has_one_mode(heights, rounding):
            return "the log density of a row of data has several modes"
        if not self._is_smooth(run, mean + line[0] * deviations, mean + line[-1] * deviations):
            return "the log density of the data is not concave in the states, and may jump"
        starts = torch.cat((mean + line * deviations, mean + line * deviations * signs))
        leading, rest = (len(starts), *self.leading), (self.nesting, self.differentiable)
        others: Any = StatesAboutMode(self.group, leading, *rest, at={self.first: starts})
        others, there = solved(others, run(others), run)
        apart = ((others.mean() - mean) / self.deviations()).abs()
        is_elsewhere = self.summed((apart > MOST_APART).any(-1).double()) > 0
        counts = others._height(there) > self._height(sites) - NEGLIGIBLE
        if bool((is_elsewhere & counts).any()):
            return "searches for the mode of the states end at several"
        return ""

    def _is_smooth(
        self,
        run: Run,
        low: Tensor,
        high: Tensor,
        *,
        intervals: int = 100,
        jump: float = 0.1,
        most_odd: int = 2,
    ) -> bool:
        """Whether the log density of each row gains what its slopes say, between two values of the states.

        Where it does not, a second look at the intervals tells a narrow peak from a jump, for rows that read one state.

        Args:
            run: makes a run of the model for an expansion.
            low, high: the values of the states.
            intervals: number of intervals in which gains and slopes are compared.
            jump: nats that a row may gain in an interval beyond twice what the slopes at its ends say.
            most_odd: number of neighbouring intervals with larger gains that a narrow peak has, at most.
        """
        for _ in range(2):
            odd = torch.zeros((intervals, *low.shape), dtype=torch.bool, device=low.device)
            for row in self._rows_between(run, low, high, intervals):
                most = torch.maximum(row.slopes[:-1].abs(), row.slopes[1:].abs())
                is_odd = row.gains.abs() > 2 * most + jump + row.rounding
                if row.reads is not None:
                    odd[..., row.reads] |= is_odd
                elif bool(is_odd.any()):
                    return False
            if not bool(odd.any()):
                return True
            first, last = odd.double().argmax(0), intervals - odd.flip(0).double().argmax(0)
            if bool(((last - first > most_odd) & odd.any(0)).any()):
                return False
            way = (high - low) / intervals
            low, high = low + way * first, low + way * last
        return False

    def _rows_between(self, run: Run, low: Tensor, high: Tensor, count: int) -> Iterator[_RowGains]:
        """Yields the gains of rows in ``count`` equal intervals between two values of the states."""
        way = (high - low) / count
        share = torch.arange(1.0 + count).to(low).reshape(-1, *(1,) * low.dim())
        states = self.given((low + share * way).to(self.values[self.first]), len(share))
        sites = run(states)
        rows = states.rows(sites)
        with derivatives():
            densities = states.row_densities(sites)
        for name, (site, density) in densities.items():
            heights, rounding = rows[name]
            slopes = self.by_step(site, _along(density, states.values[self.first], way))
            reads = None if name == self.first else self.reads(site)
            yield _RowGains(heights.diff(dim=0), slopes, rounding.nan_to_num()[1:], reads)

    # ---- steps

    def _height(self, sites: Sites) -> Tensor:
        """Returns the joint log density in nats of each batch, plates summed."""
        total: Any = sum(map(self.summed, self.joint_terms(sites)))
        return total

    def _shortened(self, total: Tensor) -> _ModeStep | None:
        """Returns a shorter step, where the one that led here lost height."""
        step = self._before
        if step is None or self.runs >= MOST_RUNS:
            return None
        rounding = ROUNDING * torch.finfo(torch.float32).eps * step.total.abs()
        over = ~(total >= step.total - rounding) & (step.length > 0)
        if not bool(over.any()):
            return None
        # halves would take twice as many runs, tenths waste good steps
        return step._replace(length=torch.where(over, step.length / 4, step.length))

    def _reached(self, step: _ModeStep) -> Self:
        length = step.length.unsqueeze(-1)
        value = torch.where(length > 0, step.start + length * step.way, step.start)
        other = self.moved(value.to(step.start))
        other._before = step
        return other


class NearestStates(StatesAboutMode):
    """The Normal nearest to the posterior of states of which each datum reads one: that of least KL(q || p).

    Its precision and mean are those about a mode, with the slopes and curvatures of the data averaged over itself.
    Both averages follow from slopes at a few points of each state, as E[f''] = E[(z - mean) f'] / variance.

    Args:
        group, leading, nesting, differentiable, away, given, at: as for `LoopStates`.

    Attributes:
        is_near: whether the first round changed deviations by little, as far as is known.

    References:
        Opper and Archambeau 2009, The variational Gaussian approximation revisited.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._about: tuple[Tensor, Tensor] | None = None  # means and deviations to average over
        self._rounds, self.is_near = 0, True

    def start(self, name: str, prior: Any, shape: torch.Size) -> Tensor:
        if self._about is None:
            return super().start(name, prior, shape)
        mean, deviation = self._about
        points, _ = _hermite(mean)
        return (mean + points * deviation).to(prior.mean).expand(shape)

    def solve(self, sites: Sites) -> Expansion | None:
        if self._about is None:
            return super().solve(sites) or self._spread()
        mean, deviation = self._about
        graph = self.moves(sites)
        value, normal = self.values[self.first], base_of(sites[self.first]["fn"])
        points, weights = _hermite(mean)
        slope = self.take(sites, again=graph)[self.first].double()
        with derivatives():
            loc = (weights * normal.loc.expand(value.shape)).sum(0)
            along = banded_derivatives(loc.to(value), value, (1, self._back), self._width, graph)
            along = Banded(*(each.sum(0) for each in along))
            average, curvature = (
                (weights * slope).sum(0),
                -(weights * points * slope).sum(0) / deviation,
            )
            scale = normal.scale.expand(value.shape)[0].double()
            error = (mean - loc) / scale
        is_proper = torch.ones_like(curvature[..., :1], dtype=torch.bool)
        for _ in range(2):
            with derivatives():
                curvature = torch.where(is_proper, curvature, curvature.clamp(min=0.0))
                parts = quadratic_of(average, curvature, along, error, scale, self._width)
            self.step(parts if graph else parts.detached(), mean)
            is_proper = self.deviations().detach().isfinite().all(-1, keepdim=True)
            if bool(is_proper.all()):
                break
        if self._rounds == 1:
            change = (self.deviations().detach() / deviation).log().abs()
            self.is_near = bool((change <= math.log(MOST_NARROWED)).all())
        return None if self._rounds == NEAREST_ROUNDS else self._spread()

    def _enough(self) -> float:
        # as further rounds follow, which gradients go through
        return super()._enough() if self.differentiable else MAX_ERROR

    def _spread(self) -> NearestStates:
        """Returns the next round, which averages over what was found."""
        other = self.anew(at=None)
        other._about = self.mean().double(), self.deviations().double()
        other._rounds, other.unfound = self._rounds + 1, self.unfound
        other.count, other.is_near = NEAREST_POINTS, self.is_near
        return other


class NonlinearStates(StatesAboutMode):
    """The Normal about the mode of states with nonlinear transitions, as of a population that saturates.

    Its precision is minus the second derivatives of the joint log density of states and data.

    Args:
        group, leading, nesting, differentiable, away, given, at: as for `LoopStates`.
    """

    has_linear_prior = False

    def flaw_nearby(self, sites: Sites, run: Run) -> str:
        if not self.differs(sites, run, self.probed_at, [self.first]):
            return "states are linear in those before"
        mean, deviations = self.mean().detach(), self.deviations().detach()
        offset = NEARBY * deviations * irregular(deviations.shape, deviations, 1)
        for row in self._rows_between(run, mean, mean + offset, 1):
            off = (row.gains - (row.slopes[:-1] + row.slopes[1:]) / 2).abs()
            size = row.slopes[:-1].abs() + row.slopes[1:].abs()
            if not bool((off <= NEARBY * size + row.rounding + TOLERANCE).all()):
                return f"the log density of the states, or of data, is off its slopes by {float(off.max()):.2g} nats"
        return ""

    def quadratic(self, sites: Sites, graph: bool) -> Quadratic:
        parts, value = super().quadratic(sites, graph), self.values[self.first]
        with derivatives():
            prior = sites[self.first]["fn"].log_prob(value).sum()
            (slope,) = torch.autograd.grad(prior, value, create_graph=True)
            ends = (-self._back, self._back)
            second = banded_derivatives(slope, value, ends, self._width, graph)
            linear = parts.prior_precision()
            known = blocks(torch.ones_like(value, dtype=torch.float64), self._width)
            rows, cols = known.unsqueeze(-1), known.unsqueeze(-2)
            own = -0.5 * (second.diagonal + second.diagonal.mT) - linear.diagonal
            lower = -second.lower - linear.lower
            curvature = Banded(
                parts.curvature.diagonal + rows * own * cols,
                parts.curvature.lower + rows[..., 1:, :, :] * lower * cols[..., :-1, :, :],
            )
            told = parts._replace(slope=torch.zeros_like(parts.slope)).whole_slope()
            more = blocks(slope.double(), self._width) - told * known
            found = parts._replace(slope=parts.slope + more, curvature=curvature)
        return found if graph else found.detached()


def _along(density: Tensor, value: Tensor, way: Tensor) -> Tensor:
    """Returns the directional derivative of each row's log density, for one direction of the states."""
    with derivatives():
        weights = torch.zeros_like(density, requires_grad=True)
        slopes = torch.autograd.grad(
            (density * weights).sum(), value, create_graph=True, materialize_grads=True
        )
        total = (slopes[0] * way).sum()
        if not total.requires_grad:
            return torch.zeros_like(density)
        return torch.autograd.grad(total, weights, materialize_grads=True)[0].double()


def _positive(curvature: Banded) -> Banded:
    """Returns blocks (t, t) with the absolute values of their eigenvalues, such that steps lead uphill.

    References:
        Dauphin et al. 2014, Identifying and attacking the saddle point problem (saddle-free Newton).
    """
    values, vectors = torch.linalg.eigh(curvature.diagonal)
    return Banded(
        (vectors * values.abs().unsqueeze(-2)) @ vectors.mT,
        torch.zeros_like(curvature.lower),
    )


def _hermite(like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns points and weights, ``(points, 1, ...)``, of a standard Normal by Gauss-Hermite quadrature."""
    found = torch.as_tensor(numpy.stack(hermegauss(NEAREST_POINTS))).to(like)
    points, weights = found.reshape(2, -1, *(1,) * like.dim())
    return points, weights / weights.sum()
