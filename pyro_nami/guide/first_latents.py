"""Latents that are sampled first, from their marginal posterior on a grid: their choice, density and check."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import (
    MAX_ERROR,
    broadcast,
    leading_shape,
    parameters_of,
    plate_shape,
)
from pyro_nami.deriving.grid_search import Box
from pyro_nami.deriving.grids import MOST_ON_GRID
from pyro_nami.deriving.marginal_quadrature import Marginal, points_of
from pyro_nami.factors.bijections import has_tensor_bounds, support_of
from pyro_nami.graph.inverse import Inverse
from pyro_nami.guide.arguments import Arguments
from pyro_nami.guide.call import Call
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.guide.one_pass import Pass, sum_plates
from pyro_nami.guide.plan import Plan
from pyro_nami.program.flat_priors import CUT, MOST_LOST
from pyro_nami.program.initial_values import PRIOR_DRAWS
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.many_draws import of_rank
from pyro_nami.program.masks import log_density_of, own_mask, rounding_of
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.site_values import any_value

__all__ = ["CHECKED_DRAWS", "check_tables", "first_ones", "marginal"]

CHECKED_DRAWS = 64  # draws by which a table is compared with the log density
# nats more, where data are so large beside their noise that single precision tells no better
MAX_ROUNDING = 0.3


def first_ones(
    first: FirstCall, inverse: Inverse, order: Sequence[str], groups: Mapping[str, ConjugateGroup]
) -> ConjugateGroup | None:
    """Returns one or two latents to sample first from a grid, if all others are exact given them; else None."""
    rest = [name for name in order if name not in groups]
    options, nodes = first.options, first.nodes
    is_searched = (
        options.inverse == "auto"
        and options.blocks is None
        and options.rules.keys().isdisjoint(rest)
        and not first.semi_observed
    )
    if not is_searched or not groups or not 0 < len(rest) <= MOST_ON_GRID:
        return None
    if first.plates.partial or first.unread or first.found.hidden_randomness:
        return None
    if not all(group.is_exact for group in groups.values()):
        return None
    if options.simulated and any(group.is_tabulated for group in groups.values()):
        return None  # grids of grids take seconds for one data set
    if any(bool((torch.as_tensor(nodes[n]["scale"]) != 1).any()) for n in (*order, *first.data)):
        return None
    known = {*first.net.observed, *rest}
    if all(known.issuperset(inverse.parents[name]) and _fits_grid(first, name) for name in rest):
        return ConjugateGroup(tuple(rest), tuple(first.data), form="marginal")
    return None


def _fits_grid(first: FirstCall, name: str) -> bool:
    """Whether a latent is one continuous number, whose bounds no latent moves, and whose family is not chosen."""
    site = first.nodes[name]
    support = support_of(site["fn"])
    parents = set(first.net.graph.predecessors(name))
    is_number = not first.frames[name] and math.prod(site["fn"].event_shape) == 1
    are_known = not has_tensor_bounds(support) or parents <= set(first.net.observed)
    is_free = name not in (first.options.families or ()) and own_mask(site) is None
    return is_number and not support.is_discrete and are_known and is_free


def marginal(plan: Plan, call: Call, current: Pass, group: ConjugateGroup) -> Marginal:
    """Returns the grid's conditionals for a call; a kept grid is used while data and arguments are the same."""
    leaves = [*call.program.leaves(), *tree_leaves([call.values, call.held])]
    known, found, seen = call.derived.tables.get(group, (None, None, None))
    joint = _Joint(plan, call, current)
    same = known is not None and known.are(leaves)
    sites = joint.sites_if_same(seen) if same else None
    if sites is None:
        try:
            known, found = Arguments(leaves, kept=True), joint.table(group)
        except ValueError as error:
            learned = dict.fromkeys(group.members, "learned")
            raise ValueError(
                f"At these data {error}. A guide with rules={learned} takes them."
            ) from error
        call.derived.tables[group] = known, found, joint.seen(found)
    else:
        current.derived.sites.update({name: sites[name] for name in group.members})
    return found


def check_tables(plan: Plan, call: Call, current: Pass) -> tuple[str, dict[str, str]]:
    """Checks draws of the first latents from a grid, and of all others given them.

    Returns:
        Why the first latents cannot be sampled from the grid, empty if they can: draws have to have the log density
        that the grid says, up to a constant. And latent -> reason, for latents with flat priors whose bounds cut off
        part of the posterior: `Refutation` knows no values of the first latents.
    """
    group = next((group for group in plan.groups.values() if group.form == "marginal"), None)
    if group is None:
        return "", {}
    joint = _Joint(plan, call, current)
    if points_of(group) > rows_in_memory(joint.rows()):
        return "a grid for all rows of data is too large", {}
    try:
        joint.check_runs_for_many(group)
        with _hidden():
            values, given = joint.table(group).draw(CHECKED_DRAWS, joint.leading)
            if any(each.flat for each in plan.groups.values()):
                lost = joint.with_others(values)[0].derived.lost()
                cut = {name: CUT.format(share) for name, share in lost.items() if share > MOST_LOST}
                if cut:
                    return "", cut
            spread = float((joint.log_density(values) - given).std(0).max())
        with torch.enable_grad():
            sites = call.run({**call.held, **{name: value[:1] for name, value in values.items()}})
            densities = [
                log_density_of(sites[name]) for name in (*plan.order, *plan.read) if name in sites
            ]
        if next(parameters_of(*densities), None) is not None:
            return "the model has parameters, which are still to be learned", {}
        rounding = _rounding(sites[name] for name in plan.read if name in sites)
        is_exact = spread < MAX_ERROR + min(MAX_ROUNDING, rounding)
        return "" if is_exact else f"by quadrature it would be off by {spread:.2g} nats", {}
    except Exception as error:  # noqa: BLE001  whatever a model does at values far out
        return f"quadrature fails with {type(error).__name__}: {error}", {}


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
    """Makes runs of the model without gradients, with random numbers of a seed, and without validation."""
    with torch.no_grad(), pyro.validation_enabled(False), forked_rng():
        pyro.set_rng_seed(0)
        yield


class _Joint(NamedTuple):
    """The marginal log density of the first latents and the data of a call."""

    plan: Plan
    call: Call
    current: Pass

    @property
    def leading(self) -> torch.Size:
        """Sizes of the data's batch dims, and 1 for each plate dim."""
        plan = self.plan
        return leading_shape(self.call.values, plan.event_dims, plan.plates.nesting)

    def rows(self) -> int:
        """Returns the number of values of the site that has most, at all points of further grids."""
        grids = {each for each in self.plan.groups.values() if each.form == "quadrature"}
        values = max((value.numel() for value in self.call.values.values()), default=1)
        return values * math.prod(map(points_of, grids))

    def check_runs_for_many(self, group: ConjugateGroup) -> None:
        """Raises ValueError if the model pairs every draw with every other, which takes too much memory on a grid."""
        with _hidden():
            sites = self.call.run(self.call.held, until=group.members)
            few = {
                name: any_value(sites[name]["fn"].expand((2, *self.leading)))
                for name in group.members
            }
            values = self.with_others(few)[0].values
            self.call.run({**self.call.held, **values}, note=of_rank(1 + len(self.leading)))

    def table(self, group: ConjugateGroup) -> Marginal:
        """Returns the conditionals of a group, from runs of the model at points of a grid."""
        with _hidden():
            sites = self.call.run(self.call.held, until=group.members)
            layouts = {
                name: self.plan.families[name].at(sites[name]["fn"]).layout
                for name in group.members
            }
            middle, half = [], []
            for name in group.members:  # the spread of the prior
                draws = self._draws(layouts[name], name, sites[name]["fn"])
                center = draws.median()
                reach = (draws - center).abs().max().clamp(min=torch.finfo(draws.dtype).eps ** 0.5)
                middle.append(center.expand(self.leading))
                half.append(reach.expand(self.leading))
            like = self.plan.initial[group.members[0]]
            box = Box.upright(middle, half)
            return Marginal(group, layouts, like, box, self.log_density)

    def _draws(self, layout: Any, name: str, prior: Any) -> Tensor:
        """Returns draws from a prior in unconstrained space, or numbers about the initial value if it is improper."""
        try:
            return layout.elements(prior.sample((PRIOR_DRAWS,))).flatten().double()
        except NotImplementedError:
            start = layout.elements(self.plan.initial[name]).flatten().double()
            return start + torch.linspace(
                -1, 1, PRIOR_DRAWS, dtype=start.dtype, device=start.device
            )

    def seen(self, table: Marginal) -> tuple[dict[str, Tensor], Tensor]:
        """Returns two draws of a table, and their log density, which changes with data besides the arguments."""
        with _hidden():
            values, _ = table.draw(2, self.leading)
            values = self.with_others(values)[0].values
            return values, self._log_density_of(self._sites(values), values)

    def sites_if_same(self, seen: tuple[dict[str, Tensor], Tensor]) -> dict[str, Any] | None:
        """Returns the sites of a run at these draws; None if the log density is another by more than rounding."""
        values, before = seen
        with torch.no_grad(), pyro.validation_enabled(False):  # of a run that draws nothing
            sites = self._sites(values)
            now = self._log_density_of(sites, values)
        same = torch.isclose(now, before, rtol=1e-4, atol=MAX_ERROR, equal_nan=True)
        return sites if bool(same.all()) else None

    def log_density(self, at: Mapping[str, Tensor]) -> Tensor:
        """Returns the log density in nats at values ``(points, *leading, *event)``, ``(points, *leading)``."""
        parts = zip(*(value.split(rows_in_memory(self.rows())) for value in at.values()))
        return torch.cat([self._log_weights(dict(zip(at, part))) for part in parts])

    def _log_weights(self, at: Mapping[str, Tensor]) -> Tensor:
        """Returns log p(values, others, data) - log q(others), of others that are drawn given the values."""
        inner, log_q = self.with_others(at)
        total = self._log_density_of(self._sites(inner.values), inner.values) - log_q
        batch = self.leading[: len(self.leading) - self.plan.plates.nesting]
        return total.expand((len(next(iter(at.values()))), *batch)).reshape((-1, *self.leading))

    def with_others(self, at: Mapping[str, Tensor]) -> tuple[Pass, Tensor]:
        """Returns a pass in which all others are drawn given values, and the log density of the others."""
        inner = self.current.beside(self.plan.rules, at)
        passed = {*at, *self.call.lacking, *self.call.from_prior, *self.call.held}
        terms = [torch.zeros((), dtype=torch.float64, device=next(iter(at.values())).device)]
        for name in (name for name in self.plan.order if name not in passed):
            rule = inner.rules[name]
            fn = rule.distribution(inner, torch.Size(), None)
            site = inner.derived.sites[name]  # of the run that it was derived by
            fn = fn.expand(broadcast(fn.batch_shape, plate_shape(site)))
            value = inner.values[name] = fn.rsample() if fn.has_rsample else fn.sample()
            inner.note_bounds(name, fn)
            log_prob = rule.masked(fn.log_prob(value), site)
            terms.append(sum_plates(log_prob.double(), self.plan.plates.nesting))
        return inner, torch.stack(torch.broadcast_tensors(*terms)).sum(0)

    def _sites(self, values: Mapping[str, Tensor]) -> dict[str, Any]:
        return self.call.run({**self.call.held, **values})

    def _log_density_of(self, sites: Mapping[str, Any], values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log density in nats of values and data, ``(points, *batch)``, at the sites of their run."""
        known = values.keys() | set(self.plan.bayesnet.observed)
        terms = [
            sum_plates(log_density_of(sites[name]).double(), self.plan.plates.nesting)
            for name in sites
            if name in known
        ]
        return torch.stack(torch.broadcast_tensors(*terms)).sum(0)
