"""Tests whether a group's log density has an assumed form, by running the model at other points."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_nami.deriving.bounded import LinearBernoulli
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.discrete_states import DiscreteStates
from pyro_nami.deriving.enumeration import Enumeration
from pyro_nami.deriving.expansion import (
    MOST_RUNS,
    ROUNDING,
    TOLERANCE,
    Expansion,
    Run,
    derivatives,
    irregular,
    parameters_of,
    solved,
)
from pyro_nami.deriving.exponential_families import ByStatistics
from pyro_nami.deriving.joint_gaussian import JointGaussian
from pyro_nami.deriving.loop_modes import NearestStates, NonlinearStates, StatesAboutMode
from pyro_nami.deriving.loop_states import LoopStates
from pyro_nami.deriving.newton import LOST, MODES_AT, Newton, has_one_mode, is_concave
from pyro_nami.deriving.quadrature import INACCURATE, Tabulated
from pyro_nami.program.first_run import is_node
from pyro_nami.program.flat_priors import CUT, MOST_LOST
from pyro_nami.program.isolation import forked_rng, seed_rng
from pyro_nami.program.masks import rounding_of
from pyro_nami.program.runner import Message, RunModel, Sites, Values

__all__ = ["OPEN", "Refutation", "expansion_of"]

# Where further modes are looked for, as at `MODES_AT`, where priors are flat: deviations that data leave, up to 3,000.
FAR_MODES_AT = tuple(side * 1.6**i for i in range(4, 18) for side in (-1, 1))
# Points of a grid, or derivatives, times rows of data. With ten times more, a training step takes seconds.
MOST_WORK = 4e5
# Deviations that data leave, up to which flat priors are looked at; further out rounding hides one of them.
FAR_OUT = 1 / (ROUNDING * torch.finfo(torch.float32).eps)
# Draws of the prior from which a mode is searched for once more under flat priors: one of two equal modes is missed by
# all of 4 (and the first) in 1 of 32 models. Ten times more take ten times as long; none sees the start's mode alone.
FURTHER_STARTS = 4
# Deviations that data leave, by which another mode is apart. At ten times less, ends of the same search count as two.
MODES_APART = 10.0
# Nats below the mode that was found, up to which another one counts: a thousandth of the mass. At ten times more, modes
# without mass count; at ten times less, half of the mass may be lost.
LEAST_OF_MODE = 7.0
_AT_ONCE = "the model cannot be run at the points that this takes"
_FLAT = "the log density of a child does not move with it, or is curved the wrong way"
_NOT_FINITE = "its log density, or a derivative of it, is not finite"
_SEVERAL_MODES = "the log density of a child has more than one mode"
_NOT_CONCAVE = "the log density of a child is not concave"
_TOO_MANY = "are too many"
_NOT_LINEAR = "the prior of one is not linear in the others"
OPEN = "its prior is flat, and data leave it, or a sum with others, open"
_LOOSE = "its prior is flat, and data hardly tell it: within a deviation of the mode their curvature is another"
_SCALED_APART = "latents that hang together are scaled by themselves"

KINDS: dict[str, type[Expansion]] = {  # form -> the class that derives conditionals of that form
    "Gaussian": JointGaussian,
    "Newton": Newton,
    "quadrature": Newton,
    "enumeration": Enumeration,
    "states": LoopStates,
    "states about a mode": StatesAboutMode,
    "states nearest": NearestStates,
    "states nonlinear": NonlinearStates,
    "states enumerated": DiscreteStates,
    "Bernoulli": LinearBernoulli,
}


@dataclass(frozen=True)
class Refutation:
    """Tests the forms of groups.

    Args:
        nesting: number of plate dims.
        run: runs the model with values at its latents.
        draws: values of all sites, at which densities are probed: with data of the same draw, as far from the data
            many a density looks quadratic. Those that lack a latent are passed over.
        is_given: whether conditionals are for the data of the first draw alone.
        is_weighted: whether weights correct draws, so that a grid in a plate may be inaccurate far from the data.
        probed: draws beside the data at which densities are compared at all distances; of further draws only the
            density of their own data is.

    Attributes:
        refused: latent -> why its conditional is not exact, as last found.
        lost: latents with a form that was refused as the model cannot be run at several points at once.
        open: latents with flat priors that data may leave open: no mode was found, or no end to the density.
        tested: form and members of groups, with levels -> why the form does not hold; "" if it does.
    """

    nesting: int
    run: RunModel
    draws: Sequence[Values]
    is_given: bool = False
    is_weighted: bool = False
    probed: int = 2
    refused: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    open: set[str] = field(default_factory=set)
    tested: dict[tuple[str, frozenset], str] = field(default_factory=dict)

    def holding(self, group: ConjugateGroup, near: bool = True) -> ConjugateGroup | None:
        """Returns the group as it can be derived, if its form holds at all draws.

        ``near`` says that a Gaussian block may be one about a mode instead, or, where draws are weighted, a latent in
        plates on grids.
        """
        forms = [group.form]
        if group.form == "states":
            forms += ["states about a mode", "states nonlinear"]
        if group.form == "Gaussian" and near and not group.bound:
            forms.append("Newton")
            if self.is_weighted and group.num_lifted and group.elements == (1,):
                forms.append("quadrature")  # which needs one mode, but no concave density
        tested = (self._tested(group._replace(form=form)) for form in forms)
        return next(filter(None, tested), None)

    def _tested(self, group: ConjugateGroup) -> ConjugateGroup | None:
        """Returns the group if its form holds at all draws."""
        key = group.form, frozenset(itertools.zip_longest(group.members, group.depths))
        if key not in self.tested:
            reason = self.tested[key] = self._reason(group)
            if not group.has_mode or reason.endswith(_TOO_MANY):
                self.refused.update(dict.fromkeys(group.members, reason))
            if group.form != "Newton" and reason.startswith(_AT_ONCE):
                self.lost.update(group.members)
            if reason in (OPEN, _LOOSE, _NOT_FINITE):
                self.open.update(group.flat)
        return None if self.tested[key] else group

    def _reason(self, group: ConjugateGroup) -> str:
        """Returns why the form does not hold at some draw; empty if it does."""
        told, flat = 0, ""
        closed = not (group.bound or group.has_mode or group.form == "enumeration")
        for draw in self.draws:
            is_first, own = draw is self.draws[0], {}
            if closed and not is_first and draw.keys() >= {*group.members}:
                own = {name: draw[name] for name in group.members}
            if group.is_loop and told:
                break  # provenance says what states read, and a run takes long
            if not draw.keys() >= group.needed or told > self.probed and not own:
                continue
            given = _given(group, draw)
            reason = self._flaw(group, given, own, told > self.probed)
            # A simulated draw refutes nothing where numbers overflow, or where its data lie at bounds or leave a latent
            # open; nor where a grid for other data is inaccurate. The first draw holds the data themselves.
            mute = reason.startswith((_NOT_FINITE, OPEN, _LOOSE, CUT[: CUT.index("{")]))
            is_one_of_many = self.is_weighted and group.num_lifted > 0
            mute |= reason == INACCURATE and self.is_given and (not group.needed or is_one_of_many)
            if reason and reason != _FLAT and (is_first or not mute):
                return reason
            told, flat = told + (not reason), reason if reason == _FLAT else flat
            if told == 1:
                reason = self._flaw_elsewhere(group, given)
                if reason and reason != _FLAT:
                    return reason
        return "" if told else flat or _NOT_FINITE

    def parameters(self, group: ConjugateGroup, drawn: Values) -> list[Tensor]:
        """Returns the model's parameters that a group's density moves with."""
        probe = self._about(group)()
        sites = probe.sites(self.run, drawn)
        with derivatives():
            densities = [probe.density(sites, name) for name in probe.until]
        return parameters_of(*densities, but=probe.values.values())

    def several_modes(self, group: ConjugateGroup, draw: Values) -> str:
        """Returns why the states of a loop may have several modes, given a draw of the other sites; "" if not."""
        run = self._at(_given(group, draw))

        def test() -> str:
            states = self._about(group)()
            states, sites = solved(states, run(states), run)
            return states.several_modes(sites, run)

        return _or_error(test)

    def _flaw_elsewhere(self, group: ConjugateGroup, drawn: Values) -> str:
        """Returns the flaw that the model has with other parameters, which may be zero as yet and will be learned."""
        parameters = self.parameters(group, drawn)
        before = [parameter.detach().clone() for parameter in parameters]
        try:
            with torch.no_grad():
                for parameter in parameters:
                    parameter += 0.1 * irregular(parameter.shape, parameter, 1)
            return self._flaw(group, drawn) if parameters else ""
        finally:
            with torch.no_grad():
                for parameter, value in zip(parameters, before):
                    parameter.copy_(value)

    def _flaw(
        self,
        group: ConjugateGroup,
        drawn: Values,
        own: Values | None = None,
        only: bool = False,
    ) -> str:
        """Returns how the log density departs from the form; empty if it does not.

        Args:
            group: the group.
            drawn: values of its children, and of the latents drawn before it.
            own: values of its members in the same draw; many a density is bent most where its data are most likely.
            only: whether to compare densities there alone.
        """
        run = self._at(drawn)

        def test() -> str:
            if group.is_loop:
                return self._about(group)().flaw(run)
            if group.has_mode:
                return self._flaw_about_mode(group, run)
            return self._flaw_at_points(group, run, own or {}, only)

        return _or_error(test)

    def _flaw_at_points(self, group: ConjugateGroup, run: Run, own: Values, only: bool) -> str:
        """Returns the flaw that shows far from the prior's mean.

        The density is looked at as well as its slopes, since what the model detaches, or compares, has no slope.
        """
        at = self._about(group)
        form: Any = expansion_of(group)
        distances = form.probed_at[:1] if only else form.probed_at
        if group.form == "Gaussian" and group.flat:
            here, others, reason = self._about_flat(group, run, distances, is_data=not own)
            if reason == _NOT_FINITE:
                return _NOT_FINITE
        else:
            here, reason = at(), ""
            others = {f"{away:g} deviations away": at(away) for away in distances}
        if own:
            others["at a draw and its own data"] = at(0.0, own)
        here.fit(sites := run(here))
        flaw = self._flaw_of_fit(group, here, sites)
        if flaw and flaw != _FLAT:
            return flaw
        if here.count is not None and (wide := self._wide(sites, group)):
            return wide
        reason = reason or flaw
        for other in others.values():
            other.measure(run(other))
            if not other.total.isfinite():
                return _NOT_FINITE
        return self._unexplained(group, here, others) or reason

    def _flaw_of_fit(self, group: ConjugateGroup, here: Any, sites: Sites) -> str:
        """Returns the flaw of a form at the point where it was fitted; empty if it has none."""
        if not here.is_finite():
            return _NOT_FINITE
        scales = [torch.as_tensor(sites[name]["scale"]) for name in group.members]
        if not all(torch.equal(scale, scales[0]) for scale in scales):
            return _SCALED_APART
        return "" if here.reaches(sites) else _FLAT

    def _unexplained(self, group: ConjugateGroup, here: Any, others: Mapping[str, Any]) -> str:
        """Returns where a form has other slopes, or gains another log density, than the model; empty if nowhere."""
        children = ", ".join(map(repr, group.children))
        of = "a bound on " if group.bound else ""
        what = f"{of}the log density of {children} does not {here.asked.format(group.form)}"
        first, *_ = others.values()
        for place, other in others.items():
            if not here.explains(other):
                at_once = here.count is not None and other is first
                return f"{_AT_ONCE}: {what}" if at_once else f"{what}: it has other slopes {place}"
            gain, size = here.gain(first, other)
            off = (other.total - first.total - gain).abs()
            rounded = here.noise * (1 + size.sqrt())
            if not off <= TOLERANCE**2 * first.total.abs() + TOLERANCE * size + rounded:
                return f"{what}: it is off by {off:.2g} nats {place}"
        return ""

    def _about_flat(
        self, group: ConjugateGroup, run: Run, distances: Sequence[float], is_data: bool
    ) -> tuple[JointGaussian, dict[str, Any], str]:
        """Returns where a block with flat priors is looked at: about its mean, and elsewhere; and any flaw.

        All points lie within the bounds. Deviations are those that data leave, as a flat prior tells none.

        Args:
            group, run, distances: as elsewhere.
            is_data: whether these are the data that the guide is made for, so that its bounds are to hold the result.
        """
        at = self._about(group)
        here = at(at=self._starts(group))
        here, sites = solved(here, run(here), run)
        if not here.is_finite():
            return here, {}, _NOT_FINITE
        reason = OPEN if here.undecided() else ""
        if not reason:
            here = here.anew(at=here.means())
            here, sites = solved(here, run(here), run)
            told = [sites[name] for name in group.children if name in sites]
            here.noise = ROUNDING * max(map(_rounding, told))
            if not is_data and here.noise > 1.0:  # as rounding is all that there is to see
                return here, {}, _NOT_FINITE
            reason = self._cut(here) if is_data else ""
        width = max(1.0, here.noise / TOLERANCE)
        ways = {
            name: width * each * irregular(each.shape, each, i)
            for i, (name, each) in enumerate(here.widths().items())
        }

        def moved(place: float, past: float = 0.0) -> JointGaussian:
            values = {}
            for name, way in ways.items():
                center = here.references[name]
                values[name] = here.flat[name].within(center + place * way + past * center.abs())
            return at(place, values)

        line = {f"{place:g} deviations away": moved(place) for place in distances}
        for far in (-FAR_OUT, FAR_OUT) if len(distances) > 1 else ():
            line[f"{far:g} deviations away"] = moved(far, math.copysign(3.0, far))
        return here, line, reason

    def _at(self, drawn: Values) -> Run:
        """Returns the function that runs the model for an expansion, given values of all other sites it needs."""
        return lambda expansion: expansion.sites(self.run, drawn)

    def _about(self, group: ConjugateGroup) -> functools.partial[Any]:
        """Returns the constructor of an expansion of a group's density, which takes the point."""
        kind = expansion_of(group)
        return functools.partial(kind, group, (1,) * self.nesting, self.nesting, False)

    def _starts(self, group: ConjugateGroup) -> dict[str, Tensor]:
        """Returns the values at which the search for a mode begins, for members with flat priors."""
        return {name: self.draws[0][name] for name in group.flat if name in self.draws[0]}

    def _cut(self, here: JointGaussian) -> str:
        """Returns the flaw that bounds of flat priors cut off some of the result.

        Where the result depends on latents whose values are not known yet, scales say, all that is asked of it is to
        have its means within bounds; see `pyro_nami.guide.build`.
        """
        means = here.means()
        for name, flat in here.flat.items():
            if not ((flat.low <= means[name]) & (means[name] <= flat.high)).all():
                return CUT.format(1.0)
        if here.group.needed:
            return ""
        with torch.no_grad(), forked_rng():
            seed_rng(0)
            lost = max((float(each.max()) for each in here.lost().values()), default=0.0)
        return CUT.format(lost) if lost > MOST_LOST else ""

    def _flaw_about_mode(self, group: ConjugateGroup, run: Run) -> str:
        """Returns the flaw of Newton's method, or of a grid about the mode it finds; empty if it has none."""
        at = functools.partial(self._about(group._replace(form="Newton")), at=self._starts(group))
        near = at()
        sites = run(near)
        rows = max(
            sites[name]["fn"].batch_shape.numel() for name in group.children if name in sites
        )
        own = sum(value.numel() for value in near.values.values())
        count = 1 + near.num_offsets
        if count * max(rows, own) > MOST_WORK:
            return f"{count} derivatives for each of {rows:,} rows of data, or {own:,} elements {_TOO_MANY}"
        if len(group.members) > 1:  # which takes less than a search
            near.fit(sites)
            run(far := at(away=1.0))
            if not near.explains_priors(far):
                return _NOT_LINEAR
        near, sites = solved(near, sites, run)
        # as numbers are too large, or there are edges
        if near.runs >= MOST_RUNS or near.unfound is not None:
            return _NOT_FINITE
        if group.flat and (reason := OPEN if near.undecided() else self._cut(near)):
            return reason
        if group.flat and self._other_mode(at, near, run):
            return _SEVERAL_MODES
        here = near.mode()
        line = {0.0: here.densities(sites := run(here))}
        errors = here.rounding(sites)
        if any((10 * each > LOST).any() for each in errors):  # ``each`` is a typical error
            return _NOT_FINITE
        room = 0.9 * near.room()
        for place in (*MODES_AT, *(FAR_MODES_AT if group.flat else ())):
            place = max(-room, min(room, place))
            if place not in line:
                line[place] = (far := near.across(place)).densities(run(far))
        if not has_one_mode(line, errors):
            return _SEVERAL_MODES
        if group.is_tabulated:
            return self._flaw_of_grid(group, near, run, rows)
        return self._flaw_of_normals(group, near, run)

    def _other_mode(self, at: Callable[..., Newton], near: Newton, run: Run) -> bool:
        """Whether searches from further draws of the prior end at another mode that counts.

        A flat prior tells nothing of where the mode is, and no line through one mode need lead to another.

        Args:
            at: makes the expansion at a start.
            near: the expansion that was solved.
            run: the model.
        """
        here = near.mode()
        height = _total(here, run)
        for draw in self.draws[1 : 1 + FURTHER_STARTS]:
            start = at(at={name: draw[name] for name in near.flat if name in draw})
            far, _ = solved(start, run(start), run)
            if far.runs >= MOST_RUNS or far.unfound is not None:
                continue
            means, widths = far.means(), near.widths()
            is_apart = any(
                bool(((means[name] - mean).abs() > MODES_APART * widths[name]).any())
                for name, mean in near.means().items()
                if name in widths
            )
            if is_apart and _total(far.mode(), run) > height - LEAST_OF_MODE:
                return True
        return False

    def _flaw_of_grid(self, group: ConjugateGroup, near: Newton, run: Run, rows: int) -> str:
        """Returns the flaw of a grid about a mode; empty if it has none."""
        fine = group._replace(is_weighted=False)
        grid: Any = Tabulated(fine, near.leading, self.nesting, False, near=near, finer=2)
        if grid.count * rows > MOST_WORK:
            return "a grid for all rows of data is too large"
        rounding = sum(float(each.sum()) for each in near.rounding(run(near.mode())))
        grid.solve(sites := run(grid))
        if wide := self._wide(sites, group):
            return wide
        return grid.flaw(sites, rounding) if grid.is_finite() else _NOT_FINITE

    def _flaw_of_normals(self, group: ConjugateGroup, near: Newton, run: Run) -> str:
        """Returns the flaw of Normals about a mode; empty if they have none."""
        here = near.mode()
        here.fit(sites := run(here))
        if flaw := self._flaw_of_fit(group, here, sites):
            return flaw
        if group.flat and self._is_loose(near, run):
            return _LOOSE
        line, errors = {0.0: here.densities(sites)}, here.rounding(sites)
        for place in near.probed_at:
            far, length = near.line(place)
            line[place] = far.densities(run(far))
            if not here.explains_priors(far):
                return _NOT_LINEAR
            if here.is_wider(far, length):
                return _NOT_CONCAVE
        return "" if is_concave(line, errors) else _NOT_CONCAVE

    def _is_loose(self, near: Newton, run: Run, *, most: float = 30.0) -> bool:
        """Whether data hardly inform elements with flat priors, as where a density rises for ever.

        Their curvature then differs by a factor of more than ``most`` within a deviation of the mode.
        """
        widths = near.widths()
        for place in (-1.0, 1.0):
            far, _ = near.line(place)
            far.fit(run(far))
            for name, width in far.widths().items():
                times = (width / widths[name]).square()
                if not ((times < most) & (times > 1 / most)).all():
                    return True
        return False

    def _wide(self, sites: Sites, group: ConjugateGroup) -> str:
        """Returns the flaw that a node has the dim of the points by their shape, and does not depend on them."""
        for name in sites.keys() - {*group.members, *group.children}:
            site = sites[name]
            if is_node(site) and len(getattr(site["fn"], "batch_shape", ())) > self.nesting:
                return f"{_AT_ONCE}: '{name}', which is no part of it, takes their dim"
        return ""


def _total(expansion: Newton, run: Run) -> float:
    """Returns the log density of all data at an expansion's point, in nats."""
    return sum(float(each.double().sum()) for each in expansion.densities(run(expansion)))


def _given(group: ConjugateGroup, draw: Values) -> Values:
    """Returns the values of a group's children, and of the latents drawn before it, in a draw."""
    return {name: draw[name] for name in (*group.children, *group.needed) if name in draw}


def _or_error(test: Callable[[], str]) -> str:
    """Returns the result of a test, or the error if the model fails at the values that the test takes."""
    try:
        return test()
    except Exception as error:  # noqa: BLE001  whatever a model does at values far out
        return f"{_AT_ONCE}, or fails there, with {type(error).__name__}: {error}"


def _rounding(site: Message) -> float:
    """Returns by how many deviations rounding of a Normal child's values may move a mean; 0 for other children."""
    off = rounding_of(site)
    return 0.0 if off is None else float(off.double().square().sum().sqrt())


def expansion_of(group: ConjugateGroup) -> type[Expansion]:
    """Returns the class that derives a group's conditionals."""
    return KINDS.get(group.form, ByStatistics)
