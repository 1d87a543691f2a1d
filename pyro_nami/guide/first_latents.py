"""Latents that are sampled first, from their marginal posterior: their choice, density and check.

One or two numbers have it on a grid (`marginal_quadrature`), more of them about its mode (`collapsed`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_nami.deriving.collapsed import Collapsed
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import (
    MAX_ERROR,
    broadcast,
    irregular,
    parameters_of,
    plate_shape,
)
from pyro_nami.deriving.grid_search import Box
from pyro_nami.deriving.grids import MOST_ON_GRID, SIZE, points_of
from pyro_nami.deriving.latent_vector import LatentVector
from pyro_nami.deriving.marginal_quadrature import Marginal
from pyro_nami.factors.bijections import has_tensor_bounds, support_of
from pyro_nami.factors.wrappers import innermost
from pyro_nami.graph.inverse import Inverse
from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.call import Call, Kept, reference_values
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.guide.mode import Mode
from pyro_nami.guide.one_pass import Pass, sum_plates
from pyro_nami.guide.plan import Plan
from pyro_nami.messages import quoted, warn
from pyro_nami.program.flat_priors import CUT, MOST_LOST, is_improper
from pyro_nami.program.initial_values import PRIOR_DRAWS
from pyro_nami.program.isolation import forked_rng, seed_rng
from pyro_nami.program.many_draws import FEWEST_DRAWS, MANY_DRAWS, of_rank
from pyro_nami.program.masks import log_density_of, own_mask, rounding_of
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.runner import Sites, Values
from pyro_nami.program.site_values import any_value

__all__ = [
    "CHECKED_DRAWS",
    "FAILED_SEARCH",
    "FEW_NUMBERS",
    "check_first",
    "first_conditionals",
    "first_ones",
    "log_modes",
]

# Draws by which a table is compared with the log density: they tell the standard deviation of its error to 9%. Ten
# times fewer tell it to 28%; ten times more are more points than a table of one latent has.
CHECKED_DRAWS = 64
# Numbers that are searched for together. For 200 the search takes 5 to 10 s, and leaves 1 to 5 nats where networks
# begin with hundreds; at a tenth, networks learn what a search finds.
MOST_NUMBERS = 200
# Numbers whose mode, and a bent Normal about it, some 40 runs find: few enough where a run is long, and where each
# point takes many runs, as others have modes of their own. More numbers take more of these runs.
FEW_NUMBERS = 12
# Numbers of data from which one or two latents alone have a grid, at a second or less for each data set. At ten times
# less, networks are as good, and take no time at new data; at ten times more, they are off by a nat.
MANY_DATA = 100
# Nats by which the log density of a grid may be off, where a search for a mode fails, as at a time of change, or where
# data are so large beside their noise that single precision tells no better. Networks are off by dozens there, so ten
# times more would leave little of what a grid gains.
MOST_ROUGH = 1.0
FAILED_SEARCH = "a search for its mode fails"


def first_ones(
    first: FirstCall,
    inverse: Inverse,
    order: Sequence[str],
    groups: Mapping[str, ConjugateGroup],
    flaws: Mapping[str, str],
) -> ConjugateGroup | None:
    """Returns the latents to sample first, if the model gives the conditionals of all others given them; else None.

    Args:
        first: the first call.
        inverse: what each latent may read.
        order: latents in sampling order.
        groups: latent -> the group that its conditional is derived with.
        flaws: form -> why the latents cannot be found by it.
    """
    rest = [name for name in order if name not in groups]
    options, nodes = first.options, first.nodes
    is_searched = all(options.rules.get(name, "located") == "located" for name in rest)
    if not rest or not is_searched or options.inverse != "auto" or first.semi_observed:
        return None
    if first.plates.partial or first.unread or first.found.hidden_randomness:
        return None
    if len(first.data) < len(first.net.observed):
        return None  # some evidence is hidden, as by `pyro.poutine.block`
    if any(bool((torch.as_tensor(nodes[n]["scale"]) != 1).any()) for n in (*order, *first.data)):
        return None
    known = {*first.net.observed, *rest}
    if not all(known.issuperset(inverse.parents[name]) and _is_free(first, name) for name in rest):
        return None
    is_on_grid = _fits_grid(first, rest, groups.values())
    fits = {
        "marginal": is_on_grid,
        "collapsed": _fits_search(first, rest, groups.values()),
        "rough grid": is_on_grid,
    }
    form = next((form for form in fits if fits[form] and form not in flaws), None)
    if form is None:
        return None
    # a rough search where each point takes many runs; elsewhere it costs more draws than it saves
    is_weighted = options.is_weighted and any(group.has_mode for group in groups.values())
    return ConjugateGroup(tuple(rest), tuple(first.data), form=form, is_weighted=is_weighted)


def _is_free(first: FirstCall, name: str) -> bool:
    """Whether a latent is continuous, with bounds that no latent moves, and with a family that is not chosen."""
    site = first.nodes[name]
    support = support_of(site["fn"])
    parents = set(first.net.graph.predecessors(name))
    are_known = not has_tensor_bounds(support) or parents <= set(first.net.observed)
    is_chosen = name in (first.options.families or ())
    is_relaxed = hasattr(innermost(site["fn"]), "temperature")  # with a mode at each class
    is_left = support.is_discrete or is_relaxed or is_chosen
    return are_known and not is_left and own_mask(site) is None


def _fits_grid(first: FirstCall, rest: Sequence[str], groups: Collection[ConjugateGroup]) -> bool:
    """Whether a grid for the first latents is small, and all others are exact given them, if there are others.

    Guides for any data have a grid without others, too, where data are many: networks would be off by a nat.
    """
    numbers = sum(math.prod(first.nodes[name]["fn"].shape()) for name in first.data)
    is_alone = first.options.simulated and numbers >= MANY_DATA
    if (
        not (groups or is_alone)
        or len(rest) > MOST_ON_GRID
        or not all(group.is_exact for group in groups)
    ):
        return False
    if first.options.simulated and any(group.is_tabulated for group in groups):
        return False  # grids of grids take seconds for one data set
    shapes = [first.nodes[name]["fn"].event_shape for name in rest]
    return not any(first.frames[name] for name in rest) and set(map(math.prod, shapes)) == {1}


def _fits_search(first: FirstCall, rest: Sequence[str], groups: Collection[ConjugateGroup]) -> bool:
    """Whether a search for the posterior mode of the first latents pays: few numbers, searched once.

    Where others have modes, these are searched for at each point, so that there are to be few rows, too.
    """
    options = first.options
    if any(first.nodes[name]["value"].dtype.itemsize < 4 for name in rest):
        return False  # in half precision no triangular system is solved
    is_once = options.mode in (None, Mode.FIXED) and not first.is_compiled
    numbers = sum(math.prod(first.nodes[name]["fn"].shape()) for name in rest)
    derived = not any(group.bound or group.in_turn for group in groups)
    most = MOST_NUMBERS
    iterating = {group for group in groups if group.has_mode}
    if iterating:
        rows = max(math.prod(first.nodes[name]["fn"].shape()) for name in first.data)
        elements = sum(sum(group.elements) for group in iterating)
        # that all data are held in memory for each element; with 590,000 numbers the search takes 10 s
        most = FEW_NUMBERS if rows_in_memory(rows * elements) > FEWEST_DRAWS else 0
    return is_once and derived and numbers <= most and options.anchor and options.exact


def first_conditionals(current: Pass, group: ConjugateGroup) -> Any:
    """Returns the first latents' conditionals for a call; they are kept while its data and arguments stay the same."""
    joint, call = _Joint(current), current.call
    kept: Kept | None = call.derived.tables.get(group)
    if kept is not None and kept.arguments.are(call.sources):
        sites = joint.sites_if_same(group, kept)
        if sites is not None:
            current.derived.sites.update(sites)
            return kept.conditionals
    remedy = f"A guide with rules={dict.fromkeys(group.members, 'learned')} can be trained on them."
    try:
        found = joint.found(group)
    except ValueError as error:
        raise ValueError(f"At these data {error}. {remedy}") from error
    flaw = found.flaw if isinstance(found, Collapsed) else ""
    if flaw and current.state.network.tells(flaw):
        warn(
            f"At these data {flaw}, so draws are rough; importance weights say by how much. {remedy}"
        )
    return found


def log_modes(tables: Mapping[ConjugateGroup, Any]) -> None:
    """Logs which groups that come first have a posterior with several modes.

    That is no warning of Python's, as Pyro's own guides take one of the modes in silence.
    """
    for group, kept in tables.items():
        found = kept.conditionals
        if isinstance(found, Collapsed) and len(found.others) and not found.flaw:
            logging.getLogger(__name__).warning(
                "The posterior of %s has several modes, and the guide draws about the highest; another one is %.1f "
                "nats below it. If the others matter, give these latents priors, or an order, that tell modes apart.",
                quoted(group.members),
                min(found.others),
            )


def check_first(current: Pass) -> tuple[dict[str, str], dict[str, str]]:
    """Checks draws of the first latents, and of all others given them.

    Returns:
        The form by which the first latents cannot be sampled -> why; empty if they can. Draws from a grid have to have
        the log density that the grid says, up to a constant. And latent -> reason, for latents with flat priors whose
        bounds cut off part of the posterior: `Refutation` knows no values of the first latents.
    """
    group = next((group for group in current.plan.groups.values() if group.comes_first), None)
    if group is None:
        return {}, {}
    flaw, cut = _checked(group, _Joint(current))
    return {group.form: flaw} if flaw else {}, cut


def _checked(group: ConjugateGroup, joint: _Joint) -> tuple[str, dict[str, str]]:
    """Returns why the first latents cannot be sampled by their form, and latent -> why its prior is not flat."""
    plan, call = joint.plan, joint.call
    if group.form == "collapsed" and joint.leading.numel() > 1:
        return "a search for its mode is made for one data set", {}
    if group.is_tabulated and points_of(group) > rows_in_memory(joint.runs_on_grids()):
        return "a grid for all rows of data is too large", {}
    try:
        joint.check_runs_for_many(group)
        with _hidden(), torch.enable_grad():
            sites = call.run({**reference_values(plan), **call.held})
            densities = [
                log_density_of(sites[name]) for name in (*plan.order, *plan.read) if name in sites
            ]
        if parameters_of(*densities):
            return "the model has parameters, which are still to be learned", {}
        with _hidden():
            found = joint.found(group)
            values, given = found.draw(CHECKED_DRAWS, joint.leading)
            if any(each.flat for each in plan.groups.values()):
                lost = joint.with_others(values)[0].derived.lost()
                cut = {name: CUT.format(share) for name, share in lost.items() if share > MOST_LOST}
                if cut:
                    return "", cut
            if isinstance(found, Collapsed):
                return found.flaw, {}
            spread = float((joint.log_density(values) - given).std(0).max())
            one = {name: value[:1] for name, value in values.items()}
            sites = joint.current.beside(one).run()
        rounding = _rounding(sites[name] for name in plan.read if name in sites)
        most = min(MAX_ERROR + rounding, MOST_ROUGH) if group.is_exact else MOST_ROUGH
        return "" if spread < most else f"by quadrature it is off by {spread:.2g} nats", {}
    except Exception as error:  # noqa: BLE001  whatever a model does at values far out
        how = "quadrature fails" if group.is_tabulated else FAILED_SEARCH
        return f"{how} with {type(error).__name__}: {error}", {}


def _rounding(sites: Iterable[Mapping[str, Any]]) -> float:
    """Returns the typical rounding error, in nats, of the log density of Normal data."""
    total = 0.0
    for site in sites:
        if (off := rounding_of(site)) is not None:
            error = (site["value"] - site["fn"].loc).abs() / site["fn"].scale
            total += float((off * (1 + error)).double().nan_to_num().square().sum())
    return total**0.5


@contextmanager
def _hidden() -> Iterator[None]:
    """Makes runs of the model without gradients and validation, from a fixed seed."""
    with torch.no_grad(), pyro.validation_enabled(False), forked_rng():
        seed_rng(0)
        yield


class _Joint:
    """The marginal log density of the first latents and the data of a call.

    Attributes:
        leading: sizes of the data's batch dims, and 1 for each plate dim.
        batch: of the data's batch dims alone.
    """

    def __init__(self, current: Pass) -> None:
        self.current = current
        self.plan: Plan = current.plan
        self.call: Call = current.call
        self.leading = self.plan.leading(self.call.values)
        self.batch = self.leading[: len(self.leading) - self.plan.plates.nesting]

    def rows(self) -> int:
        """Returns the number of values of the largest observed site, times the points of the largest further grid."""
        return self._values() * max(self._further_grids(), default=1)

    def runs_on_grids(self) -> int:
        """Returns the number of values of the largest observed site, times the points of all further grids.

        That is how long a search takes, as each grid is made anew for every point of the grids before it.
        """
        return self._values() * math.prod(self._further_grids())

    def _values(self) -> int:
        return max((value.numel() for value in self.call.values.values()), default=1)

    def _further_grids(self) -> list[int]:
        groups = set(self.plan.groups.values())
        return [SIZE ** len(each.members) for each in groups if each.form == "quadrature"]

    def check_runs_for_many(self, group: ConjugateGroup) -> None:
        """Raises ValueError if the model pairs every draw with every other, which takes too much memory on a grid."""
        with _hidden():
            sites = self.call.run(self.call.held, until=group.members)
            few = {
                name: any_value(
                    sites[name]["fn"].expand(
                        torch.broadcast_shapes((2, *self.leading), sites[name]["fn"].batch_shape)
                    )
                )
                for name in group.members
            }
            inner, _ = self.with_others(few)
            inner.run(note=of_rank(1 + len(self.leading)))

    def found(self, group: ConjugateGroup) -> Any:
        """Returns the conditionals of a group, and keeps them for calls with the same data."""
        known = Arguments(self.call.sources, kept=True)
        found = self._conditionals(group)
        with _hidden():
            values, _ = found.draw(2, self.leading)
            inner, _ = self.with_others(values)
            height = self._log_density_of(inner.run(), inner.values)
        self.call.derived.tables[group] = Kept(known, found, values=inner.values, height=height)
        return found

    def _conditionals(self, group: ConjugateGroup) -> Any:
        """Returns the conditionals of a group, from runs of the model at many points."""
        with _hidden():
            sites = self.call.run(self.call.held, until=group.members)
            layouts = {
                name: self.plan.families[name].at(sites[name]["fn"]).layout
                for name in group.members
            }
            draws = {name: self._draws(layouts[name], name, sites[name]["fn"]) for name in layouts}
            like = self.plan.initial[group.members[0]]
            if group.form == "collapsed":
                return self._collapsed(group, layouts, like, draws, sites)
            middle, half = [], []
            for each in draws.values():  # the spread of the prior
                center = each.median()
                reach = (each - center).abs().max().clamp(min=torch.finfo(each.dtype).eps ** 0.5)
                middle.append(center.expand(self.leading))
                half.append(reach.expand(self.leading))
            box = Box.upright(middle, half)
            no_plates = dict.fromkeys(layouts, torch.Size())
            return Marginal(group, LatentVector(layouts, no_plates, like), box, self.log_density)

    def _collapsed(
        self,
        group: ConjugateGroup,
        layouts: Mapping[str, Any],
        like: Tensor,
        draws: Values,
        sites: Sites,
    ) -> Collapsed:
        """Returns the conditionals of a group about the highest mode that searches from prior draws find."""
        nesting, plates = self.plan.plates.nesting, {}
        for name in layouts:
            own = plate_shape(sites[name])
            plates[name] = torch.Size((1,) * (nesting - len(own))) + own
        points = torch.cat([each.reshape(PRIOR_DRAWS, -1) for each in draws.values()], -1)
        others = [group for group in self.plan.groups.values() if not group.comes_first]
        iterates = any(group.has_mode for group in others)
        points = points[points.isfinite().all(-1)][: MANY_DRAWS if iterates else None]
        if len(points) < FEWEST_DRAWS:
            raise ValueError(f"draws of {quoted(group.members)} from their priors are not finite")
        unit = points.std(0).clamp(min=torch.finfo(points.dtype).eps ** 0.5)
        batch = self.batch
        # of starts, where each run takes long; four find four of sixteen modes
        few: dict[str, Any] = {"searches": 4} if iterates else {}
        return Collapsed(
            group,
            LatentVector(layouts, plates, like),
            points.reshape(len(points), *(1,) * len(batch), -1).expand(-1, *batch, -1),
            unit,
            self.log_density,
            is_proper=not any(is_improper(sites[name]["fn"]) for name in layouts),
            weighs=all(group.is_exact for group in others),
            at_once=rows_in_memory(self.rows()),
            **few,
        )

    def _draws(self, layout: Any, name: str, prior: Any) -> Tensor:
        """Returns draws from a prior in unconstrained space; from an improper prior, numbers about the initial value.

        They are ``(draws, *plates, elements)``; the first is the initial value.
        """
        start = layout.elements(self.plan.initial[name]).double()
        try:
            draws = layout.elements(prior.sample((PRIOR_DRAWS,))).double()
            draws[0] = start
            return draws
        except NotImplementedError:
            shape = (PRIOR_DRAWS, *prior.batch_shape, start.shape[-1])
            return start + 2 * irregular(torch.Size(shape), start, 0)

    def sites_if_same(self, group: ConjugateGroup, kept: Kept) -> dict[str, Any] | None:
        """Returns the sites of a group; None if the log density has changed by more than rounding.

        A run of the model tells, where its surroundings may have changed.
        """
        around = None if self.plan.learns else self.call.derived.surroundings
        if around is not None and around is kept.surroundings:
            return dict(kept.sites)
        with _hidden():  # as a blocked model draws what it hides
            sites = self.current.beside(kept.values).run()
            now = self._log_density_of(sites, kept.values)
        same = torch.isclose(now, kept.height, rtol=1e-4, atol=MAX_ERROR, equal_nan=True)
        if not bool(same.all()):
            return None
        own = {name: sites[name] for name in group.members}
        self.call.derived.tables[group] = kept._replace(sites=own, surroundings=around)
        return own

    def log_density(self, at: Values) -> Tensor:
        """Returns the log density in nats at values ``(points, *leading, *event)``, ``(points, *leading)``."""
        parts = zip(*(value.split(rows_in_memory(self.rows())) for value in at.values()))
        return torch.cat([self._log_weights(dict(zip(at, part))) for part in parts])

    def _log_weights(self, at: Values) -> Tensor:
        """Returns log p(values, others, data) - log q(others), of others that are drawn given the values."""
        inner, log_q = self.with_others(at)
        total = self._log_density_of(inner.run(), inner.values) - log_q
        points = len(next(iter(at.values())))
        return total.expand((points, *self.batch)).reshape((-1, *self.leading))

    def with_others(self, at: Values) -> tuple[Pass, Tensor]:
        """Returns a pass in which all others are drawn given values, and the log density of the others."""
        inner = self.current.beside(at)
        passed = {*at, *self.call.lacking, *self.call.from_prior, *self.call.held}
        total = torch.zeros((), dtype=torch.float64, device=next(iter(at.values())).device)
        for name in self.plan.order:
            if name in passed:
                continue
            rule = inner.rules[name]
            fn, is_exact = rule.derived(inner)
            site = inner.derived.sites[name]  # of the run that it was derived by
            fn = fn.expand(broadcast(fn.batch_shape, plate_shape(site)))
            if not is_exact:
                value = fn.mean  # a mode, where Laplace's approximation is taken
            else:
                value = fn.rsample() if fn.has_rsample else fn.sample()
            inner.values[name] = value
            inner.note_bounds(name, fn)
            log_prob = rule.masked(fn.log_prob(value), site)
            total = total + sum_plates(log_prob.double(), self.plan.plates.nesting)
        return inner, total

    def _log_density_of(self, sites: Sites, values: Values) -> Tensor:
        """Returns the log density in nats of values and data, ``(points, *batch)``, at the sites of their run."""
        known = values.keys() | set(self.plan.bayesnet.observed)
        total = torch.zeros((), dtype=torch.float64)
        for name, site in sites.items():
            if name in known:
                density = log_density_of(site).double()
                total = total + sum_plates(density, self.plan.plates.nesting)
        return total
