"""The states of a loop that networks learn: what these networks are, what they read of a call, and where they start.

q(z_t | z_(t-1), data from t on, other latents) is proportional to the model's own p(z_t | z_(t-1), other latents) times
a message, which `pyro_nami.parameters.series` gives. That family holds the posterior of linear Gaussian chains and of
hidden Markov models. A call may have any number of steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
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
from pyro_nami.parameters.conditioning import (
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
from pyro_nami.parameters.inputs import concatenate
from pyro_nami.parameters.regression import least_squares, standardization
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
    "messages_of",
    "plan_series",
    "reads_inputs",
    "series_inputs",
    "summaries",
]

# Least residual of the regression that messages start at, as a share of a state's spread. With ten times less, a level
# with three data a step, of noise 0.02, starts 195 nats a step worse; with ten times more, data say nothing at first.
LEAST_LEFT = 0.1


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
        num_steps: number of steps of the states.
        width: number of elements of a step's states.
        order: the place of each element of all states, which are in program order, among steps times elements.
        data: family of data -> the step of each of its sites.
    """

    num_steps: int
    width: int
    order: list[int]
    data: dict[str, list[int]]


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
    loops = first.program.loops
    states = loops.parts[0]
    known = {**first.draws[0], states.name: torch.zeros_like(first.nodes[states.name]["value"])}
    here, there = _sites_at(first.program, known), None
    for changed in (_changed, _changed_but_masks):
        args, kwargs = tree_map(changed, (first.program.args, dict(first.program.kwargs)))
        with suppress(Exception):  # whatever a model does at other arguments
            there = there or _sites_at(first.program._replace(args=args, kwargs=kwargs), known)
    if there is None:
        return True
    for held in loops.parts:
        for family in dict.fromkeys(map(family_of, held.sites)):
            # the first steps may have no states before
            sites = [site for site in held.sites if family_of(site) == family][states.back :]
            fns = [unmasked(run[site]["fn"]) for run in (here, there) for site in sites]
            logs = [fn.log_prob(here[sites[0]]["value"]) for fn in fns]
            if not all(torch.allclose(each, logs[0], rtol=1e-3, atol=1e-4) for each in logs):
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
    # any other number would do, but zero changes as well, and what is positive stays positive
    return 0.7 * (1 + leaf) if is_real or isinstance(leaf, float) else leaf


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
    places = {step: t for t, step in enumerate(sorted(set(map(step_of, states.sites))))}
    starts, width = {}, 0
    for family, event in states.families:
        starts[family] = width
        width += event.numel()
    order: list[int] = []
    for site, event in zip(states.sites, states.events):
        start = places[step_of(site)] * width + starts[family_of(site)]
        order += range(start, start + event.numel())
    found = {}
    for held in data:
        steps = {site: step_of(site) + held.shift for site in held.sites}
        for site, step in steps.items():
            if step not in places:
                raise ValueError(
                    f"Expected states at the step of '{site}', as at the guide's first call; this call has none."
                )
        found[held.name] = [places[step] for step in steps.values()]
    return _Layout(len(places), width, order, found)


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
    layout, data, there = _layout_of(loops), [], []
    for held in loops.parts[1:]:
        value, steps = values[held.name], layout.data[held.name]
        _check_steps(held, value)
        features = plan.encodings[held.name].features(value).flatten(-2)
        here = features.isfinite().all(-1, keepdim=True).to(features)
        if held.name in counted:
            here = here * counted[held.name].unsqueeze(-1).to(here)
        data.append(_placed(features, steps, layout.num_steps, -2))
        there.append(_placed(here, steps, layout.num_steps, -2))
    widths = [part.shape[-1] for part in data]
    whole = _steps_first(concatenate([*data, *there]), plan)
    features, families = whole.split([sum(widths), len(widths)], -1)
    seen = families.repeat_interleave(torch.tensor(widths, device=whole.device), -1)
    exists = None
    if plan.name in counted:
        by_step = _by_step(counted[plan.name], layout).any(-1, keepdim=True)
        exists = _steps_first(by_step, plan).squeeze(-1)
    return SeriesInputs(features, seen, families, exists)


def messages_of(
    plan: SeriesPlan, loops: Loops, found: NormalPotential | Tensor
) -> dict[str, NormalPotential | Tensor]:
    """Returns the message about all states in program order, by the name of the whole, and about each, by its site.

    About all states, potentials are ``(*left, *plates, elements)``, logits ``(*left, *plates, sites, values)``.

    Args:
        plan: of the series.
        loops: of the call.
        found: the messages by step, as `NetworkState.messages` returns them.
    """
    layout, states = _layout_of(loops), loops.parts[0]
    whole: NormalPotential | Tensor
    single: Sequence[NormalPotential | Tensor]

    def in_order(part: Tensor) -> Tensor:
        return part[..., torch.tensor(layout.order, device=part.device)]

    if isinstance(found, NormalPotential):
        whole = found.map(lambda part: in_order(part.flatten(-2)))
        sizes = [event.numel() for event in states.events]
        parts = [part.split(sizes, -1) for part in whole if part is not None]
        single = [NormalPotential(*each) for each in zip(*parts)]
    else:
        by_value = found.unflatten(-1, (layout.width, states.values)).flatten(-3, -2)
        whole = in_order(by_value.mT).mT
        single = whole.unbind(-2)
    return {plan.name: whole, **dict(zip(states.sites, single))}


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
    inputs = _first_inputs(first, plan)
    features = torch.cat([_flat(each.features) for each in inputs]).to(**factory)
    seen = torch.cat([_flat(each.seen) for each in inputs]).to(features)
    draws = [_flat(_steps_first(_by_step(draw[states.name], layout), plan)) for draw in first.draws]
    shift, scale = _standard(features, seen > 0, factory)
    number = 0 if states.values else layout.width  # of Normal elements
    zeros, ones = torch.zeros(number), torch.ones(number)
    start = SeriesStart(shift, scale, zeros, ones, ones, zeros, zeros)
    if not states.values:
        own = len(features) - sum(map(len, draws))
        x = torch.where(seen > 0, torch.addcmul(shift, features, scale), 0.0)[own:]
        start = _at_regression(start, x, torch.cat(draws).to(features) if draws else x[:, :0])
        fn: Any = innermost(first.nodes[states.name]["fn"])
        unit = _by_step(fn.scale, layout).reshape(-1, number).nanmedian(0).values
        start = start._replace(unit=unit.to(features))
    sizes = SeriesSizes(
        num_families=len(plan.data),
        num_given=sum(_width(source, widths, first.plates) for source in plan.sources),
        num_outputs=layout.width * (states.values or 1),
        is_normal=not states.values,
        is_summarized=is_summarized,
        is_bounded=is_bounded,
    )
    return SeriesNetwork(sizes, start, register, factory)


def summaries(first: FirstCall, plan: SeriesPlan, network: SeriesNetwork) -> Tensor:
    """Returns the first summaries of draws of the model, ``(rows, features)``; of the data if there are no draws."""
    own, *drawn = _first_inputs(first, plan)
    return torch.cat([_flat(network.start(each).summary()) for each in drawn or [own]])


def _first_inputs(first: FirstCall, plan: SeriesPlan) -> list[SeriesInputs]:
    """Returns what networks read of the first call's data, then of each draw of the model."""
    own = {name: first.nodes[name]["value"] for name in plan.data}
    return [series_inputs(plan, first.program.loops, each, {}) for each in (own, *first.draws)]


def _check_steps(held: LoopSites, value: Tensor) -> None:
    """Raises where a value has other steps than a call's loop."""
    steps = value.shape[value.dim() - 1 - len(held.events[0])]
    if steps != len(held.sites):
        last = held.sites[min(steps, len(held.sites) - 1)]
        raise ValueError(
            f"Expected data for each of {len(held.sites)} steps of '{held.name}', such as '{last}'; got {steps}."
        )


def _placed(part: Tensor, places: list[int], size: int, dim: int, gap: float = 0.0) -> Tensor:
    """Returns a tensor of some size along a dim, with the entries at given places, and ``gap`` at all others."""
    shape = [*part.shape]
    shape[dim] = size
    index = torch.tensor(places, device=part.device)
    return part.new_full(shape, gap).index_copy(dim, index, part)


def _by_step(value: Tensor, layout: _Layout) -> Tensor:
    """Returns ``(*batch, elements)`` of all states by step, ``(*batch, steps, width)``; NaN, or False, in gaps."""
    gap = math.nan if value.is_floating_point() else 0
    placed = _placed(value, layout.order, layout.num_steps * layout.width, -1, gap)
    return placed.unflatten(-1, (layout.num_steps, layout.width))


def _steps_first(part: Tensor, plan: SeriesPlan) -> Tensor:
    """Returns ``(*batch, steps, features)`` as ``(steps, *left, *plates, features)``."""
    part = part[(None,) * max(0, plan.nesting + 2 - part.dim())]
    return part.movedim(-2, 0)


def _flat(part: Tensor) -> Tensor:
    return part.reshape(-1, part.shape[-1])


def _standard(features: Tensor, seen: Tensor, factory: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns shift and scale of each column of ``(rows, features)`` by the rows where it is seen."""
    columns = zip(features.split(1, -1), (seen & features.isfinite()).unbind(-1))
    shift, scale = zip(*(standardization(rows[there], factory) for rows, there in columns))
    return torch.cat(shift), torch.cat(scale)


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
        goal = ((goal - center[e]) / spread[e]).double()
        found, residual = least_squares(x[fine].double(), goal, len(goal) - x.shape[-1])
        if residual < 1:
            slope[e], left[e] = found, residual.clamp(min=LEAST_LEFT)
    return start._replace(center=center, spread=spread, slope=slope, left=left)


def _width(source: Source, widths: Mapping[Any, int], plates: Plates) -> int:
    """Returns the number of features that a source gives, which is not pooled."""
    (node,) = nodes_of(source)
    flat = [part.plates for part in parts_of(source) if isinstance(part, Flattened)]
    return widths[node] * math.prod(plates.sizes[plate] for each in flat for plate in each)
