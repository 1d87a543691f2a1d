"""The states of a loop that networks learn: what these networks are, what they read of a call, and where they start.

q(z_t | z_(t-1), data from t on, other latents) is proportional to the model's own p(z_t | z_(t-1), other latents) times
a message, which `pyro_nami.parameters.series` gives. That family holds the posterior of linear Gaussian chains and of
hidden Markov models. A call may have any number of steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_nami.factors.potentials import NormalPotential
from pyro_nami.factors.registry import features_of
from pyro_nami.factors.wrappers import innermost
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.networks.running import center_and_spread
from pyro_nami.parameters.conditioning import (
    Direct,
    Flattened,
    Plates,
    Pooled,
    Read,
    Source,
    nodes_of,
    parts_of,
    plan_sources,
    site_of,
)
from pyro_nami.parameters.series import SeriesInputs, SeriesNetwork, SeriesSizes, SeriesStart
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.loops import Loops, LoopSites, family_of, step_of
from pyro_nami.program.masks import unmasked
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner

__all__ = [
    "NotASeriesError",
    "SeriesPlan",
    "make_series_network",
    "plan_series",
    "potentials_of",
    "reads_inputs",
    "series_inputs",
    "summaries",
]

RIDGE = 1e-3  # added to the variances of standardized data in the regression that messages start at
OTHER = 0.7  # times one more are numbers among the arguments, to see whether sites read them
LEAST_LEFT = 0.1  # share of a state's spread that the regression leaves at least, as draws are few


class NotASeriesError(Exception):
    """The states of a loop read what networks of a series cannot."""


class SeriesPlan(NamedTuple):
    """The states of a loop that networks learn.

    Attributes:
        name: of the states as a whole.
        data: names of the families of data, as a whole each; the first holds the summary that latents outside read.
        encodings: family of data -> what gives the features of one step's value.
        sources: what the states read of other latents.
        nesting: plate dims of the model.
    """

    name: str
    data: tuple[str, ...]
    encodings: Mapping[str, Any]
    sources: tuple[Source, ...]
    nesting: int

    @property
    def given(self) -> frozenset[Any]:
        """The latents that the states read."""
        return frozenset().union(*map(nodes_of, self.sources))


class _Layout(NamedTuple):
    """Where the sites of a call's loops are.

    Attributes:
        num_steps: of the states.
        width: elements of a step's states; of discrete ones, their number.
        order: element of all states in program order -> its place among steps times elements; None: its own.
        data: family of data -> the step of each of its sites; None: one each.
    """

    num_steps: int
    width: int
    order: tuple[int, ...] | None
    data: dict[str, tuple[int, ...] | None]


def plan_series(first: FirstCall, reads: Mapping[Any, Read], plates: Plates) -> SeriesPlan:
    """Returns the plan of a first call's states, of which the inverse says what they read.

    Raises:
        NotASeriesError: they read latents in plates of which the model takes a part.
    """
    states, *data = first.program.loops.parts
    names = {held.name for held in data}
    reads = {node: read for node, read in reads.items() if site_of(node) not in names}
    frames = {node: first.frames[site_of(node)] for node in reads}
    batch = plates.closure(first.frames[states.name])
    fixed = frozenset(plates.order) - plates.partial - batch
    sources = plan_sources(batch, reads, frames, plates._replace(fixed=fixed))
    if any(isinstance(part, Pooled) for source in sources for part in parts_of(source)):
        raise NotASeriesError
    nodes: Mapping[str, Any] = first.prototype.nodes
    encodings = {}
    for held in data:
        site = nodes[held.sites[0]]
        encodings[held.name] = features_of(held.sites[0], site["fn"], site["value"])
    nesting = plates.nesting
    return SeriesPlan(states.name, tuple(held.name for held in data), encodings, sources, nesting)


def reads_inputs(first: FirstCall) -> bool:
    """Whether sites of a loop read more than states and latents: a step's number, data of other steps, other arguments.

    Networks do not, so that messages would be wrong at other inputs. Steps are compared where all states are alike,
    and with a run at other numbers among the arguments.
    """
    states, *data = first.program.loops.parts
    known = {**first.draws[0], states.name: torch.zeros_like(first.nodes[states.name]["value"])}
    here, there = _sites_at(first.program, known), None
    for changed in (_changed, _changed_but_masks):
        args, kwargs = tree_map(changed, (first.program.args, dict(first.program.kwargs)))
        with suppress(Exception):  # whatever a model does at other arguments
            there = there or _sites_at(first.program._replace(args=args, kwargs=kwargs), known)
    if there is None:
        return True
    for held in (states, *data):
        for family in {family_of(site): None for site in held.sites}:
            # the first steps may have no states before
            sites = [site for site in held.sites if family_of(site) == family][states.back :]
            if not sites:
                continue
            value, logs = here[sites[0]]["value"], []
            for found in (here, there):
                logs += [unmasked(found[site]["fn"]).log_prob(value) for site in sites]
            if any(not torch.allclose(each, logs[0], rtol=1e-3, atol=1e-4) for each in logs):
                return True
    return False


def _sites_at(program: Program, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the sites of a run, those of loops by themselves."""
    runner = Runner(dict(values), broadcast=True)
    with forked_rng(), pyro.validation_enabled(False):
        program.play(runner)
    return runner.sites


def _changed(leaf: Any) -> Any:
    """Returns another number, or tensor, of the same kind; integers stay, which may count steps."""
    is_real = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return OTHER * (1 + leaf) if is_real or isinstance(leaf, float) else leaf


def _changed_but_masks(leaf: Any) -> Any:
    is_mask = isinstance(leaf, Tensor) and bool(((leaf == 0) | (leaf == 1)).all())
    return leaf if is_mask else _changed(leaf)


@functools.lru_cache(maxsize=64)  # lengths that calls have in turn; others are found anew
def _layout_of(loops: Loops) -> _Layout:
    """Returns where the sites of loops are.

    Raises:
        ValueError: data have no state at their step, naming the site.
    """
    states, *data = loops.parts
    place = {step: t for t, step in enumerate(sorted(set(map(step_of, states.sites))))}
    starts, width = {}, 0
    for family, event in states.families:
        starts[family] = width
        width += 1 if states.values else event.numel()
    index: list[int] = []
    for site, event in zip(states.sites, states.events):
        at = place[step_of(site)] * width + starts[family_of(site)]
        index += range(at, at + (1 if states.values else event.numel()))
    found: dict[str, tuple[int, ...] | None] = {}
    for held in data:
        for site in held.sites:
            if step_of(site) + held.shift not in place:
                raise ValueError(
                    f"Expected states at the step of '{site}', as at the guide's first call; this call has none."
                )
        steps = tuple(place[step_of(site) + held.shift] for site in held.sites)
        found[held.name] = None if steps == tuple(range(len(place))) else steps
    is_own = index == list(range(len(place) * width))
    return _Layout(len(place), width, None if is_own else tuple(index), found)


def series_inputs(
    plan: SeriesPlan, loops: Loops, values: Mapping[str, Tensor], counted: Mapping[str, Tensor]
) -> SeriesInputs:
    """Returns what networks read of a call's series.

    Args:
        plan: of the series.
        loops: of the call.
        values: of the data as a whole, ``(*batch, steps, *event)``.
        counted: which elements the model counts, of states ``(*plates, elements)``, of data ``(*plates, steps)``; of
            those that are left out all.

    Raises:
        ValueError: data have no state at their step, or a value for a step is missing.
    """
    layout, parts = _layout_of(loops), []
    for held in loops.parts:
        if not held.is_observed:
            continue
        value, event_dim = values[held.name], len(held.events[0])
        _check_steps(held, value)
        features = plan.encodings[held.name].features(value).flatten(-2)
        assert features.dim() == value.dim() - event_dim + 1
        here = torch.ones_like(features[..., :1])
        if held.name in counted:
            here = here * counted[held.name].unsqueeze(-1).to(here)
        gap = ~features.isfinite().all(-1, keepdim=True)
        here = torch.where(gap, 0.0, here)
        steps = layout.data[held.name]
        parts.append((_at_steps(features, steps, layout), _at_steps(here, steps, layout)))
    batch = torch.broadcast_shapes(*(part.shape[:-1] for both in parts for part in both))
    whole = [[part.expand(*batch, part.shape[-1]) for part in both] for both in parts]
    features = torch.cat([features for features, _ in whole], -1)
    families = torch.cat([here for _, here in whole], -1)
    seen = torch.cat([here.expand_as(features) for features, here in whole], -1)
    exists = None
    if plan.name in counted:
        exists = _steps_first(_by_step(counted[plan.name], layout).any(-1, keepdim=True), plan)
        exists = exists.squeeze(-1)
    features, seen, families = (_steps_first(part, plan) for part in (features, seen, families))
    return SeriesInputs(features, seen, families, exists)


def potentials_of(
    plan: SeriesPlan, loops: Loops, found: NormalPotential | Tensor
) -> NormalPotential | Tensor:
    """Returns the potentials of all states in program order, ``(*left, *plates, elements)``.

    Logits are ``(*left, *plates, sites, values)``.

    Args:
        plan: of the series.
        loops: of the call.
        found: by step, as `NetworkState.messages` gives them.
    """
    layout, states = _layout_of(loops), loops.parts[0]

    def in_order(part: Tensor) -> Tensor:
        if layout.order is None:
            return part
        return part[..., torch.tensor(layout.order, device=part.device)]

    if isinstance(found, NormalPotential):
        return found.map(lambda part: in_order(part.flatten(-2)))
    by_value = found.unflatten(-1, (layout.width, states.values)).flatten(-3, -2)
    return in_order(by_value.mT).mT


def make_series_network(
    first: FirstCall,
    plan: SeriesPlan,
    widths: Mapping[Any, int],
    is_summarized: bool,
    is_bounded: bool,
    register: Any,
    factory: Mapping[str, Any],
) -> SeriesNetwork:
    """Returns the networks of a series, whose messages start at a regression on draws of the model.

    Args:
        first: the first call.
        plan: of the series.
        widths: latent -> the number of its features.
        is_summarized: whether latents outside read the series.
        is_bounded: whether the chain is kept within bounds, as its transitions are learned.
        register: turns a module's parameters into Pyro's.
        factory: device and dtype.
    """
    loops = first.program.loops
    states, layout = loops.parts[0], _layout_of(loops)
    inputs = [series_inputs(plan, loops, draw, {}) for draw in [_own(first, plan), *first.draws]]
    features = torch.cat([_flat(each.features) for each in inputs]).to(**factory)
    seen = torch.cat([_flat(each.seen) for each in inputs]).to(features)
    draws = [_flat(_steps_first(_by_step(draw[states.name], layout), plan)) for draw in first.draws]
    shift, scale = _standard(features, seen > 0)
    number = layout.width
    zeros, ones = torch.zeros(number), torch.ones(number)
    start = SeriesStart(shift, scale, zeros, ones, ones, zeros, zeros)
    if not states.values:
        own = len(features) - sum(map(len, draws))
        x = torch.where(seen > 0, torch.addcmul(shift, features, scale), 0.0)[own:]
        start = _at_regression(start, x, torch.cat(draws).to(features) if draws else x[:, :0])
        fn: Any = innermost(first.nodes[states.name]["fn"])
        unit = _by_step(fn.scale, layout).reshape(-1, number).nanmedian(0).values
        start = start._replace(unit=unit.to(features))
    given = sum(_width(source, widths, first.plates) for source in plan.sources)
    outputs = number * states.values if states.values else number
    sizes = SeriesSizes(
        len(plan.data), given, outputs, not states.values, is_summarized, is_bounded
    )
    if states.values:
        start = start._replace(
            center=start.center[:0], spread=start.spread[:0], unit=start.unit[:0]
        )
    return SeriesNetwork(sizes, start, register, factory)


def summaries(first: FirstCall, plan: SeriesPlan, network: SeriesNetwork) -> Tensor:
    """Returns what the summaries of draws of the model are at first, ``(rows, features)``."""
    loops = first.program.loops
    inputs = [series_inputs(plan, loops, draw, {}) for draw in first.draws or [_own(first, plan)]]
    return torch.cat([_flat(network.start(each).summary()) for each in inputs])


def _own(first: FirstCall, plan: SeriesPlan) -> dict[str, Tensor]:
    """Returns the data of the first call."""
    return {name: first.nodes[name]["value"] for name in plan.data}


def _check_steps(held: LoopSites, value: Tensor) -> None:
    """Raises where a value has other steps than a call's loop."""
    steps = value.shape[value.dim() - 1 - len(held.events[0])]
    if steps != len(held.sites):
        last = held.sites[min(steps, len(held.sites) - 1)]
        raise ValueError(
            f"Expected data for each of {len(held.sites)} steps of '{held.name}', such as '{last}'; got {steps}."
        )


def _at_steps(part: Tensor, steps: tuple[int, ...] | None, layout: _Layout) -> Tensor:
    """Returns ``(*batch, sites, features)`` at the steps of the states, zeros at those without a site."""
    if steps is None:
        return part
    whole = part.new_zeros(*part.shape[:-2], layout.num_steps, part.shape[-1])
    return whole.index_copy(-2, torch.tensor(steps, device=part.device), part)


def _by_step(value: Tensor, layout: _Layout) -> Tensor:
    """Returns ``(*batch, elements)`` of all states by step, ``(*batch, steps, width)``; NaN, or False, in gaps."""
    size = layout.num_steps * layout.width
    if layout.order is not None:
        gap = math.nan if value.is_floating_point() else 0
        whole = value.new_full((*value.shape[:-1], size), gap)
        value = whole.index_copy(-1, torch.tensor(layout.order, device=value.device), value)
    return value.unflatten(-1, (layout.num_steps, layout.width))


def _steps_first(part: Tensor, plan: SeriesPlan) -> Tensor:
    """Returns ``(*batch, steps, features)`` as ``(steps, *left, *plates, features)``."""
    part = part[(None,) * max(0, plan.nesting + 2 - part.dim())]
    return part.movedim(-2, 0)


def _flat(part: Tensor) -> Tensor:
    return part.reshape(-1, part.shape[-1])


def _standard(features: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns shift and scale of each column of ``(rows, features)``; one of zeros and ones is left as it is."""
    shift, scale = [], []
    for column, there in zip(features.unbind(-1), seen.unbind(-1)):
        rows = column[there]
        rows = rows[rows.isfinite()]
        center, spread = column.new_zeros(()), column.new_ones(())
        if len(rows) > 1 and not bool(((rows == 0) | (rows == 1)).all()):
            center, spread = (part[0] for part in center_and_spread(rows.unsqueeze(-1)))
        usable = bool(spread.isfinite() and spread > 1e-6 * center.abs() and spread > 0)
        scale.append(1 / spread if usable else torch.ones_like(spread))
        shift.append(-center * scale[-1])
    return torch.stack(shift), torch.stack(scale)


def _at_regression(start: SeriesStart, x: Tensor, z: Tensor) -> SeriesStart:
    """Returns a start at the regression of states ``(rows, elements)`` on a step's data ``(rows, features)``."""
    number = len(start.center)
    slope, left = x.new_zeros(number, x.shape[-1]), x.new_ones(number)
    center, spread = x.new_zeros(number), x.new_ones(number)
    for e in range(z.shape[-1]):
        fine = z[:, e].isfinite() & x.isfinite().all(-1)
        goal = z[fine, e]
        if len(goal) <= x.shape[-1] + 1:
            continue
        center[e], spread[e] = goal.mean(), goal.std().clamp(min=1e-6)
        design = x[fine].double()
        goal = ((goal - center[e]) / spread[e]).double()
        gram = design.mT @ design + RIDGE * len(goal) * torch.eye(
            x.shape[-1], dtype=design.dtype, device=x.device
        )
        found = torch.linalg.solve(gram, design.mT @ goal)
        # degrees of freedom, without which residuals of many features would tell too little
        free = len(goal) - x.shape[-1]
        residual = ((goal - design @ found).square().sum() / free).sqrt()
        if residual < 1:
            slope[e], left[e] = found.to(x), residual.clamp(min=LEAST_LEFT).to(x)
    return start._replace(center=center, spread=spread, slope=slope, left=left)


def _width(source: Source, widths: Mapping[Any, int], plates: Plates) -> int:
    """Returns the number of features that a source gives."""
    if isinstance(source, Direct):
        return widths[source.node]
    assert not isinstance(source, Pooled)
    members = source.plates if isinstance(source, Flattened) else ()
    return _width(source.source, widths, plates) * math.prod(plates.sizes[p] for p in members)
