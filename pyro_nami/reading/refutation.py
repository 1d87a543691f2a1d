"""Whether a group's log density has the form that is taken for it: refuted, if not, by probing the model.

Change this module to look at further points, or for further flaws.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_nami.reading.bounded import LinearBernoulli
from pyro_nami.reading.conjugate_forms import FORMS, ByStatistics
from pyro_nami.reading.conjugate_group import ConjugateGroup
from pyro_nami.reading.enumeration import Enumeration
from pyro_nami.reading.expansion import TOLERANCE, Expansion, expanding, irregular, parameters_of
from pyro_nami.reading.first_run import is_node
from pyro_nami.reading.joint_gaussian import JointGaussian
from pyro_nami.reading.newton import Newton, has_one_mode, is_concave
from pyro_nami.reading.runner import RunModel
from pyro_nami.reading.tabulated import Tabulated

__all__ = ["Refutation", "expansion_of"]

# In prior standard deviations, to both sides; far, to see slow bends as well.
_PROBED_AT = {"Gaussian": (0.0, 1.0, -1.0, 3.0, -3.0, 300.0, -300.0)}
_OTHERS_PROBED_AT = (0.0, 1.0, -1.0, 4.0, -4.0)
_LINE = (-6.0, -3.0, -1.0, 1.0, 3.0, 6.0)  # about the mode, in deviations of the Normals there
_ACROSS = tuple(side * place for place in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0) for side in (-1, 1))  # in those of the priors
_MOST_STEPS, _MOST_ROUNDING = 60, 1e4  # to a mode; nats there, in a density
# Points, or offsets, times rows of data: of more, steps of training take too long beside those of other guides. Of the
# latter, each element of a latent counts as some rows.
_MOST_TABLE, _MOST_WORK, _ROWS = 5e5, 4e5, 10
_PROBED_DRAWS = 2  # beside the data themselves
_MOST_BY_ONE = 64  # elements of a block, if the model cannot be run at several points of them at once
_AT_ONCE = "the model cannot be run at the points that this takes"
_FLAT = "the log density of a child does not move with it, or is curved the wrong way"
_NOT_FINITE = "its log density, or a derivative of it, is not finite"
_NOT_CONCAVE = "the log density of a child is not concave"
_TOO_MANY = "are too many"
_NOT_LINEAR = "the prior of one is not linear in the others"
_SCALED_APART = "latents that hang together are scaled by themselves"
_ASKED = {"Gaussian": "stay quadratic in latents with Gaussian priors"}


@dataclass(frozen=True, kw_only=True)
class Refutation:
    """Tests the forms of groups.

    Args:
        nesting: number of plate dims.
        run: runs the model with values at its latents.
        draws: values of all sites, at which densities are probed: with data of the same draw, as far from the data
            many a density looks quadratic. Those that lack a latent are passed over.

    Attributes:
        refused: latent -> why its conditional is not exact, as last found.
        lost: latents with a form that was refused as the model cannot be run at several points at once.
        tested: form and members of groups, with levels -> the form that holds, and whether all points fit a run.
    """

    nesting: int
    run: RunModel
    draws: Sequence[Mapping[str, Tensor]]
    refused: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    tested: dict[tuple[str, frozenset], tuple[str, bool]] = field(default_factory=dict)

    def holding(self, group: ConjugateGroup) -> ConjugateGroup | None:
        """Returns the group as it can be derived, if its form holds at all draws: by one run, or point by point."""
        key = group.form, frozenset(zip(group.members, group.depths or (0,)))
        if key not in self.tested:
            self.tested[key] = self._found(group)
        form, vectorized = self.tested[key]
        return group._replace(form=form, vectorized=vectorized) if form else None

    def _found(self, group: ConjugateGroup) -> tuple[str, bool]:
        """Returns the form that holds, and whether all points fit a run; no form if none does."""
        reason = ""
        for each in (group, group._replace(vectorized=False)) if group.vectorized else (group,):
            if group.form == "Gaussian" and not each.vectorized and sum(each.elements) > _MOST_BY_ONE:
                break
            reason = self._reason(each)
            if not group.is_tabulated:
                self.refused.update(dict.fromkeys(group.members, reason))
            if not reason:
                return each.form, each.vectorized
            if not reason.startswith(_AT_ONCE):
                break
        if reason.startswith(_AT_ONCE):
            self.lost.update(group.members)
        near, takes = group._replace(form="Newton", vectorized=False), group.form == "Gaussian" and not group.bound
        reason = self._reason(near) if takes else _FLAT
        if reason.endswith(_TOO_MANY):
            self.refused.update(dict.fromkeys(group.members, reason))
        return ("", False) if reason else (near.form, False)

    def _reason(self, group: ConjugateGroup) -> str:
        """Returns why the form does not hold at some draw; empty if it does."""
        told, flat = 0, ""
        for draw in self.draws:
            closed = group.form in ("Gaussian", *FORMS) and not group.bound and draw is not self.draws[0]
            own = {name: draw[name] for name in group.members} if closed and draw.keys() >= {*group.members} else {}
            if draw.keys() >= group.needed and (told <= _PROBED_DRAWS or own):
                given = draw.keys() & {*group.children, *group.needed}
                reason = self._flaw(group, {name: draw[name] for name in given}, own, told > _PROBED_DRAWS)
                # A draw at which numbers overflow says nothing; the first is the data themselves.
                if reason and reason != _FLAT and (reason != _NOT_FINITE or draw is self.draws[0]):
                    return reason
                told, flat = told + (not reason), reason if reason == _FLAT else flat
                reason = self._flaw_elsewhere(group, {name: draw[name] for name in given}) if told == 1 else ""
                if reason and reason != _FLAT:
                    return reason
        return "" if told else flat or _NOT_FINITE

    def parameters(self, group: ConjugateGroup, drawn: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the model's parameters that a group's density moves with."""
        probe = expansion_of(group)(group, (1,) * self.nesting, self.nesting, False)
        with expanding():
            sites = self.run({**drawn, **probe.points}, probe.until)
            densities = [probe.density(sites, name) for name in (*group.children, *group.members)]
        own = {id(leaf) for leaf in probe.values.values()}
        return [leaf for leaf in parameters_of(*densities) if id(leaf) not in own]

    def _flaw_elsewhere(self, group: ConjugateGroup, drawn: Mapping[str, Tensor]) -> str:
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
        drawn: Mapping[str, Tensor],
        own: Mapping[str, Tensor] | None = None,
        only: bool = False,
    ) -> str:
        """Returns in what the log density is not of the form; empty if it is.

        Args:
            group: the group.
            drawn: values of its children and what else it needs.
            own: those of its members in the same draw; where data say most, many a density is bent most.
            only: whether to look there and nowhere else.
        """

        def run(expansion: Expansion) -> Mapping[str, Any]:
            with expanding():
                return self.run({**drawn, **expansion.points}, expansion.until)

        try:
            if group.has_mode:
                return self._flaw_about_mode(group, run)
            return self._flaw_at_points(group, run, own or {}, only)
        except Exception as error:  # noqa: BLE001  whatever a model does at values far out
            return f"{_AT_ONCE}, or fails there, with {type(error).__name__}: {error}"

    def _flaw_at_points(
        self,
        group: ConjugateGroup,
        run: Callable[[Expansion], Mapping[str, Any]],
        own: Mapping[str, Tensor],
        only: bool,
    ) -> str:
        """Returns the flaw that shows far from the prior's mean.

        The density is looked at as well as its slopes, since what the model detaches, or compares, has no slope.
        """
        kind, distances = expansion_of(group), _PROBED_AT.get(group.form, _OTHERS_PROBED_AT)[: 1 if only else None]
        children = ", ".join(map(repr, group.children))
        of = "a bound on " if group.bound else ""
        what = f"{of}the log density of {children} does not {_ASKED.get(group.form, f'add to a {group.form} prior')}"
        here = kind(group, (1,) * self.nesting, self.nesting, False)
        flat = False
        line = [kind(group, (1,) * self.nesting, self.nesting, False, away=away) for away in distances]
        others = [*line, *([kind(group, (1,) * self.nesting, self.nesting, False, 0.0, own)] if own else [])]
        places = ["at the prior's mean", *(f"{away:g} deviations away" for away in distances[1:])]
        places.append("at a draw and its own data")
        for each in (here, *others):
            each.measure(sites := run(each))
            if not (here.is_finite() if each is here else each.totals.isfinite().all()):
                return _NOT_FINITE
            if _is_scaled_apart(sites, group):
                return _SCALED_APART
            if each is here and here.count is not None and (wide := self._wide(sites, group)):
                return wide
            flat = flat or each is here and not here.reaches(sites)
        for other, place in zip(others, places):
            if not here.explains(other):
                at_once = here.count is not None and other is others[0]
                return f"{_AT_ONCE}: {what}" if at_once else f"{what}: its slopes are others {place}"
        first, *rest = others
        for other, place in zip(rest, places[1:]):
            gain, size = here.gain(first, other)
            off = (other.totals.sum() - first.totals.sum() - gain).abs()
            if not off <= TOLERANCE**2 * first.totals.sum().abs() + TOLERANCE * size:
                return f"{what}: it is off by {off:.2g} nats {place}"
        if not only and not here.fits(line):
            return f"{what}: not every one of them by itself"
        return _FLAT if flat else ""

    def _flaw_about_mode(self, group: ConjugateGroup, run: Callable[[Expansion], Mapping[str, Any]]) -> str:
        """Returns what speaks against Newton's method, or quadrature behind it; empty if nothing does."""
        kind = functools.partial(Newton, group._replace(form="Newton"), (1,) * self.nesting, self.nesting, False)
        near: Any = kind()
        sites = run(near)
        rows = max(sites[name]["fn"].batch_shape.numel() for name in group.children if name in sites)
        own = sum(value.numel() for value in near.values.values())
        if near.num_offsets * rows + _ROWS * own > _MOST_WORK:
            return f"{near.num_offsets} derivatives for each of {rows:,} rows of data, or {own:,} elements {_TOO_MANY}"
        if len(group.members) > 1:  # which takes less than a search
            near.measure(sites)
            run(far := kind(away=1.0))
            if not near.explains_priors(far):
                return _NOT_LINEAR
        while (following := near.solve(sites)) is not None:
            near = following
            if not near.has_converged(_MOST_STEPS):  # as numbers are too large, or there are edges
                return _NOT_FINITE
            sites = run(near)
        here = near.mode()
        line = {0.0: here.densities(sites := run(here))}
        errors = here.rounding(sites)
        if any((each > _MOST_ROUNDING).any() for each in errors):
            return _NOT_FINITE
        for place in _ACROSS:
            far = near.across(place)
            line[place] = far.densities(run(far))
        if not has_one_mode(line, errors):
            return "the log density of a child has more than one mode"
        if group.is_tabulated:
            grid = Tabulated(group, near.leading, self.nesting, False, near=near, finer=2)
            if grid.count * rows > _MOST_TABLE:
                return "a grid for all rows of data is too large"
            rounding = sum(float(each.sum()) for each in near.rounding(sites))
            grid.solve(sites := run(grid))
            if wide := self._wide(sites, group):
                return wide
            one = near.moved_to(grid.third())
            alone = one.joint_slopes(run(one))
            return grid.flaw(sites, alone, rounding) if grid.is_finite() else _NOT_FINITE
        here = near.mode()
        here.measure(sites := run(here))
        if not here.is_finite():
            return _NOT_FINITE
        if _is_scaled_apart(sites, group):
            return _SCALED_APART
        if not here.reaches(sites):
            return _FLAT
        line, errors = {0.0: here.densities(sites)}, here.rounding(sites)
        for place in _LINE:
            far = near.line(place)
            line[place] = far.densities(run(far))
            if not here.explains_priors(far):
                return _NOT_LINEAR
            if here.is_wider(far):
                return _NOT_CONCAVE
        return "" if is_concave(line, errors) else _NOT_CONCAVE

    def _wide(self, sites: Mapping[str, Any], group: ConjugateGroup) -> str:
        """Returns the flaw that a node has the dim of the points by their shape, and does not depend on them."""
        outside = (name for name in sites if name not in group.members and name not in group.children)
        others = filter(lambda name: is_node(sites[name]), outside)
        dims = ((name, len(getattr(sites[name]["fn"], "batch_shape", ()))) for name in others)
        wide = next((name for name, count in dims if count > self.nesting), "")
        return f"{_AT_ONCE}: '{wide}', which is no part of it, takes their dim" if wide else ""


def _is_scaled_apart(sites: Mapping[str, Any], group: ConjugateGroup) -> bool:
    first, *rest = (torch.as_tensor(sites[name]["scale"]) for name in group.members)
    return not all(scale.shape == first.shape and bool((scale == first).all()) for scale in rest)


def expansion_of(group: ConjugateGroup) -> type[Expansion]:
    """Returns the class that derives a group's conditionals."""
    kinds = {"Gaussian": JointGaussian, "Newton": Newton, "quadrature": Newton, "enumeration": Enumeration}
    return {**kinds, "Bernoulli": LinearBernoulli}.get(group.form, ByStatistics)
