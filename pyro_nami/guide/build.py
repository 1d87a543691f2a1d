"""`assemble`: from a guide's first call to its plan and its networks at their initial values."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_nami.deriving.expansion import operations_of
from pyro_nami.factors.bounds import bound_for
from pyro_nami.factors.joint import to_sequence
from pyro_nami.guide.call import Call, Derived
from pyro_nami.guide.columns import covariate_values
from pyro_nami.guide.draw import start_pass
from pyro_nami.guide.first_call import FirstCall, first_call
from pyro_nami.guide.first_latents import FEW_NUMBERS, check_first, log_modes
from pyro_nami.guide.mode import Mode
from pyro_nami.guide.one_pass import Pass
from pyro_nami.guide.options import Options
from pyro_nami.guide.order import Search, find_order, search_forms
from pyro_nami.guide.plan import Plan, SamplingOrder
from pyro_nami.guide.planner import make_plan
from pyro_nami.guide.rules import Learned
from pyro_nami.guide.series import (
    NotASeriesError,
    make_series_network,
    reads_inputs,
    summaries,
)
from pyro_nami.messages import quoted, warn
from pyro_nami.networks.pooling import make_encoder
from pyro_nami.parameters.additions import initial_expert, initial_rows
from pyro_nami.parameters.conditioning import covariates_of, nodes_of
from pyro_nami.parameters.factor_groups import Factor
from pyro_nami.parameters.group_network import TooLargeError
from pyro_nami.parameters.inverse_network import InverseNetwork, as_pyro_module
from pyro_nami.parameters.network_state import NetworkState
from pyro_nami.parameters.regression import standardization
from pyro_nami.parameters.series import SeriesNetwork
from pyro_nami.program.isolation import random_layers, untouched
from pyro_nami.program.masks import log_density_of
from pyro_nami.program.plate_dims import frames_of, own_dims
from pyro_nami.program.program import Program
from pyro_nami.program.series_sites import SeriesSites

__all__ = ["Assembled", "assemble"]

# features that a set is encoded as, each an input of networks; ten times as many cost more than they give
POOLED_FEATURES = 16
# Operations of a run, from which a small model is searched as a whole before forms are tried. Programs of posteriordb
# have at most 170; at a tenth of this number some would be searched that have closed forms. Loops of 100 steps have
# more: searched first, an ARMA(1, 1) of 200 steps takes `fit` 1.4 s in place of 8.2, a GARCH(1, 1) 2.5 in place of 6.3.
LONG_RUN = 500
# Steps of a loop from which networks learn its states in a guide for any data, though each state may have a derived
# conditional. One by one, 25 states take 2 s, 50 take 4 s, and 100 take 13 s; at a tenth, loops of 3 are not exact.
SHORTEST_LEARNED = 32


class Assembled(NamedTuple):
    """The parts of a guide.

    Attributes:
        plan: the plan.
        network: the networks of all factors at their initial values.
        tables: what was derived for the latents that come first; see `Derived`.
        prototype: a run at the initial values.
        series: latents that are innovations of a series, whether the plan holds them as its states or as a block.
    """

    plan: Plan
    network: InverseNetwork
    tables: dict[Any, Any]
    prototype: poutine.Trace
    series: Mapping[str, SeriesSites] = {}


def assemble(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    options: Options,
    subsampled: Collection[str],
) -> Assembled:
    """Returns the parts of a guide, from its first call; see `first_call`."""
    layers = random_layers(model, *args, *kwargs.values())
    with untouched(model), poutine.block(), own_dims(), torch.no_grad():
        program = Program(model, args, kwargs)
        read = functools.partial(first_call, program, options, subsampled, layers)
        site_by_site = functools.cache(functools.partial(read, lifted=False))
        lifted, learned = _loops_held(options)
        first = read(lifted=lifted, learned=learned)
        innovations = first.program.loops.series.values()
        is_series = first.program.loops.is_learned
        found = _of_series(first, site_by_site) if is_series else _found(first)
        if found is None:
            first, is_series = site_by_site(), False
            found = _found(first)
        assert found is not None
        if found.plan.covariates.columns.keys() & found.plan.program.computed and found.plan.learns:
            # Covariates are found once, and these move with the model's parameters; values are read in each call.
            first = read(lifted=False, located_data=False)
            found = _found(first)
            assert found is not None
        if first.program.loops.series and _num_underived(found)[0]:
            # innovations as one block with what is learned beside them, where fewer latents are learned so
            whole = _found(site_by_site())
            if whole is not None and _num_underived(whole) < _num_underived(found):
                first, found = site_by_site(), whole
        mapped = first.mapped() if found.plan.sampling.lost and not is_series else None
        further = None if mapped is None else _found(mapped)
        # steps are faster without vmap, where it derives no more
        found = min(found, further or found, key=_num_underived)
        log_modes(found.tables)
        for name, reason in found.plan.sampling.doubts.items():
            warn(
                f"The prior of '{name}' is improper, and its posterior may be, too: {reason}. The usual causes are too "
                f"few data, and a covariate that separates the outcomes without an error. '{name}' is learned as if "
                "its posterior were proper; give it a proper prior."
            )
        return found._replace(series={name: held for held in innovations for name in held.sites})


def _loops_held(options: Options) -> tuple[bool, bool]:
    """Returns whether the sites of a loop may be held as one, and whether networks may say what its states are.

    Both need default options as far as they say how latents depend on each other. Networks serve data that differ from
    call to call.
    """
    is_free = options.inverse == "auto" and options.blocks is None and options.anchor
    if not is_free or options.embeddings or options.rules:
        return False, False
    if options.mode in (None, Mode.FIXED):
        named = options.observed or options.families
        return options.exact and not named, False
    learned = isinstance(options.families or {}, Mapping)  # and may be those of other latents
    return learned, learned


def _of_series(first: FirstCall, site_by_site: Callable[[], FirstCall]) -> Assembled | None:
    """Returns the parts of a guide that learns the states of a loop of any length, or None.

    It is None where these read what its networks cannot, where states of minibatches are of no minibatch alone, and
    where a loop is short and its states have derived conditionals one by one.
    """
    (states,) = first.program.loops.states.values()
    if set(first.options.families or ()).intersection(states.sites):
        return None
    if not first.options.simulated and first.plates.partial.isdisjoint(first.frames[states.name]):
        return None
    if first.options.exact and len(states.sites) < SHORTEST_LEARNED:
        derived = search_forms(site_by_site(), {}, {}).order.groups
        if derived.keys() >= set(states.sites):
            return None
    if reads_inputs(first):
        return None
    try:
        return _found_beside(first, {})
    except NotASeriesError:
        return None


def _found_in_loops(first: FirstCall) -> Assembled | None:
    """Returns the plan of a model with loops; None if their states have no derived conditional, or several modes."""
    search = search_forms(first, {}, {})
    states = first.program.loops.states.keys()
    if search.finder is None or not search.order.groups.keys() >= states:
        return None
    found = _found_beside(first, {}, search)
    located = {
        group for name, group in found.plan.groups.items() if name in states and group.is_located
    }
    for group, kept in itertools.product(located, found.tables.values()):
        # which is nearer to the posterior than the draws that forms were tested at
        near = {name: found.plan.first_of(name, both) for name, both in kept.values.items()}
        draw = {**first.draws[0], **near}
        if search.finder.tests.several_modes(group, draw):
            return None
    return found


def _num_underived(found: Assembled) -> tuple[int, int]:
    return found.plan.num_underived


def _found(first: FirstCall) -> Assembled | None:
    """Returns the plan that leaves fewest latents to be learned, whose first latents are checked, and its networks.

    None if the states of a loop have no derived conditional, or several modes: it is to be read site by site.

    A small model is planned in two ways: by forms, and by one search for all its numbers. The search is the first way
    where a run of the model is long, and is made at all only where forms leave a latent to be learned.
    """
    if first.program.loops:
        return _found_in_loops(first)
    if not _is_small(first):
        return _found_beside(first, {})
    count = _num_operations(first)
    reason = f"its model has few numbers, and a run takes {count:,} operations: no form is tried"
    skipped = dict.fromkeys(first.net.latent, reason)
    ways = [skipped, {}] if count > LONG_RUN else [{}, skipped]
    found = _found_beside(first, ways[0])
    if not found.plan.num_underived[0]:
        return found
    return min(found, _found_beside(first, ways[1]), key=_num_underived)


def _is_small(first: FirstCall) -> bool:
    """Whether draws are weighted, and the latents are few numbers, all real: some dozens of runs find their mode."""
    values = [first.nodes[name]["value"] for name in first.latents]
    numbers = sum(value.numel() for value in values)
    is_real = all(value.is_floating_point() for value in values)
    return first.options.is_weighted and is_real and numbers <= FEW_NUMBERS


def _num_operations(first: FirstCall) -> int:
    """Returns how many operations have gradients in a run of the model."""
    values = {name: first.nodes[name]["value"].detach().clone() for name in first.latents}
    with torch.enable_grad(), pyro.validation_enabled(False):
        sites = first.run({name: value.requires_grad_() for name, value in values.items()})
        densities = [log_density_of(sites[name]) for name in first.data if name in sites]
    return sum(1 for _ in operations_of(*densities))


def _found_beside(
    first: FirstCall, skipped: Mapping[str, str], search: Search | None = None
) -> Assembled:
    """Returns a plan and its networks, after a check of the latents that come first.

    Args:
        first: the first call.
        skipped: see `search_forms`.
        search: what `search_forms` has found, if that was called.
    """
    cut = dict[str, str]()  # latents whose priors turn out not to be flat, and why
    flaws = dict[str, str]()  # forms that do not hold of the latents that come first, and why
    search = search or search_forms(first, cut, skipped)
    while True:
        plan, network = _planned(first, find_order(first, search, flaws))
        current = _first_pass(first, plan, network)
        more, found = check_first(current)
        if not (more or found):
            return Assembled(plan, network, current.call.derived.tables, first.prototype)
        flaws.update(more)
        if found:
            cut.update(found)
            search = search_forms(first, cut, skipped)


def _first_pass(first: FirstCall, plan: Plan, network: InverseNetwork) -> Pass:
    """Returns a pass over the latents for the first call's data, before any latent has a value."""
    # What the model samples has one value everywhere at the first call, which says nothing; draws are like data.
    drawn = first.draws[0] if first.draws else {}
    observed = first.program.loops.wholes_of(first.options.observed)
    held = {name: drawn[name] for name in observed if name in drawn}
    values = {name: held.get(name, first.nodes[name]["value"]) for name in plan.read}
    call = Call(first.program, values=values, held=held, derived=Derived(None, {}, {}))
    return start_pass(plan, NetworkState(network, call.maps), call)


def _planned(first: FirstCall, order: SamplingOrder) -> tuple[Plan, InverseNetwork]:
    """Returns a plan and its networks; latents whose networks would be too large are independent, with a warning."""
    plan = make_plan(first, order)
    try:
        return plan, _network(first, plan)
    except TooLargeError as error:
        if first.options.simulated or first.apart.issuperset(error.largest):
            raise
        names = quoted(error.largest)
        warn(
            f"Networks that say how {names} depend on all else would take too much memory; their elements are drawn "
            "independently, as AutoNormal draws them, and no other latent reads them."
        )
        return _planned(first._replace(apart=first.apart.union(error.largest)), order)


def _network(first: FirstCall, plan: Plan) -> InverseNetwork:
    options = first.options
    encoder = functools.partial(
        make_encoder,
        options.pooling,
        num_outputs=POOLED_FEATURES,
        activation=options.activation or nn.functional.silu,
        **plan.factory,
    )
    varying = options.mode is None and bool(plan.semi_observed)
    standard = _standard(first, plan)
    series = None if plan.series is None else _series(first, plan, standard)
    network = InverseNetwork(
        [*plan.bounds.values(), *(rule.factor for rule in plan.learned.values())],
        standard,
        plan.plates,
        hidden_features=options.hidden_features,
        shared=options.shared,
        make_encoder=encoder,
        adding=[
            name
            for name, rule in plan.learned.items()
            if options.evidence and rule.family.takes_evidence
        ],
        latents=_positions(plan),
        simulated=options.simulated,
        varying=varying,
        skip=options.skip,
        activation=options.activation or torch.tanh,
        factory=plan.factory,
        series=series,
        series_reads=plan.series.given if plan.series is not None else (),
    )
    initial: dict[Hashable, Tensor] = {}
    for name, rule in plan.learned.items():
        initial[name], anchor = _initial(first, rule, network)
        if not network.simulated:
            network.places[name].set_units(options.init_scale, anchor)
    if not (network.simulated or varying):
        network.set_offsets(_offset_plates(first, network))
    bounds = {factor.name: initial_bounds(first, child) for child, factor in plan.bounds.items()}
    network.starts = [{**initial, **dict(zip(bounds, each))} for each in zip(*bounds.values())]
    network.set_initial(network.starts[0] if bounds else initial)
    return network


def _series(
    first: FirstCall, plan: Plan, standard: dict[Hashable, tuple[Tensor, Tensor]]
) -> SeriesNetwork:
    """Returns the networks of a series. If a factor reads its summary, adds the summary's scale to ``standard``."""
    assert plan.series is not None
    summarized = plan.series.data[0]
    sources = [source for rule in plan.learned.values() for source in rule.factor.sources]
    is_read = any(summarized in nodes_of(source) for source in sources)
    widths = {node: len(shift) for node, (shift, _) in standard.items()}
    series = make_series_network(
        first, plan.series, widths, is_read, plan.learns, as_pyro_module, plan.factory
    )
    if is_read:
        rows = summaries(first, plan.series, series)
        standard[summarized] = standardization(rows, plan.factory)
    return series


def _positions(plan: Plan) -> list[Hashable]:
    """Returns the outputs of networks in the order of their use: latents, and before a group its children's bounds."""
    found: list[Hashable] = []
    for name in plan.order:
        children = plan.groups[name].children if name in plan.groups else ()
        bounds = [plan.bounds[child].name for child in children if child in plan.bounds]
        found += [*(each for each in bounds if each not in found), name]
    return found


def _initial(first: FirstCall, rule: Learned, network: InverseNetwork) -> tuple[Tensor, Tensor]:
    """Returns raw parameters ``(elements, raw)``, and scales of the anchor ``(elements,)``, at the initial value.

    They are averaged over batch plates. A factor is no wider than its prior at first, as first losses of SVI would be
    large. Scales are ones if there is no anchor, and at least the factor's own first scale, so that steps fit that.
    """
    site, scale, family = first.nodes[rule.name], first.options.init_scale, rule.family
    factor, value = network.places[rule.name].factor, site["value"]
    anchor = family.anchor(site["fn"]) if rule.anchored else None
    unit = torch.ones(factor.num_elements)
    if anchor is None or not factor.locations:
        raw = family.initial(value, scale, anchor)
    elif rule.expert:
        raw = initial_expert(family, value, scale, anchor)
    else:
        raw = family.initial(value, anchor[..., 1].clamp(max=scale), anchor)
        unit = _averaged(first, anchor.log(), factor)[:, 1].exp().clamp(min=scale)
    raw = _averaged(first, raw, factor)
    if not factor.pseudo:
        return raw, unit
    location = _averaged(first, family.initial(value, scale), factor)[:, 0]
    sizes = first.plates.sizes
    sets = [each.pooled for each in factor.pseudo]  # and the mean number of instances in one
    counts = [sizes[each.plate] / math.prod(sizes[p] for p in each.onto) for each in sets]
    rows = initial_rows(location, scale, counts, factor.pseudo, network.affine(rule.name))
    return torch.cat((raw, rows), -1), unit


def _offset_plates(
    first: FirstCall, network: InverseNetwork
) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns factor -> plate -> (dim, full size), for factors whose instances get parameters of their own."""
    found = {}
    for name, place in network.places.items():
        factor = place.factor
        if not first.plates.minibatched.isdisjoint(factor.batch):
            continue
        # of a bound's parameters, that of the child
        site = first.nodes[name if name in first.nodes else name[1]]
        plates = {
            frame.name: (frame.dim, frame.full_size or frame.size)
            for frame in frames_of(site)
            if frame.name in factor.batch
        }
        if plates and math.prod(size for _, size in plates.values()) <= first.options.max_offsets:
            found[name] = plates
    return found


def _averaged(first: FirstCall, raw: Tensor, factor: Factor) -> Tensor:
    """Returns a factor's parameters ``(elements, params)``: those of its site, averaged over batch plates."""
    count = raw.shape[-1]
    raw = raw.expand(first.nodes[factor.name]["fn"].batch_shape + raw.shape[-2:]).flatten(-2)
    raw = raw[(None,) * (1 + first.plates.nesting - raw.dim())]
    raw = to_sequence(raw, factor.dims)
    return raw.reshape(-1, raw.shape[-1]).mean(0).reshape(factor.num_elements, count)


def _standard(first: FirstCall, plan: Plan) -> dict[Hashable, tuple[Tensor, Tensor]]:
    """Returns shift and scale of every node's features, such that shift + scale * features is of order one."""
    standard: dict[Hashable, tuple[Tensor, Tensor]] = {}
    whole = {held.name for held in plan.loops.parts} if plan.loops.is_learned else set()
    for name in (*plan.order, *plan.read):
        if name in whole:
            continue
        if name in first.options.embeddings:
            width = plan.features(name, first.nodes[name]["value"]).shape[-1]
            standard[name] = torch.zeros(width, **plan.factory), torch.ones(width, **plan.factory)
        else:
            standard[name] = _site_standard(first, plan, name)
    values = covariate_values(plan.covariates, first.program, first.run)
    for name, chosen in plan.columns.items():
        rows = values[name].reshape(-1, len(chosen))
        standard[covariates_of(name)] = standardization(rows, plan.factory)
    return standard


def _site_standard(
    first: FirstCall, plan: Plan, name: str, *, enough_rows: int = 5
) -> tuple[Tensor, Tensor]:
    """Returns shift and scale of one site's features.

    Args:
        first, plan: the first call and its plan.
        name: of the site.
        enough_rows: instances from which an observed site is standardized by its own data. Fewer have no spread to
            speak of: draws from the prior stand in.
    """
    site = first.nodes[name]

    def rows(value: Tensor) -> Tensor:
        return torch.atleast_2d(plan.features(name, value)).flatten(0, -2)

    here, mask = rows(site["value"]), site["mask"]
    if isinstance(mask, Tensor) and name in first.net.observed:
        seen = here[mask.expand(site["fn"].batch_shape).reshape(-1)]
        here = seen if len(seen) else torch.zeros_like(here)
    drawn = [rows(draw[name]) for draw in first.draws if name in draw]
    plenty = site["is_observed"] and len(here) >= enough_rows
    return standardization(here if plenty or not drawn else torch.cat(drawn), plan.factory)


def initial_bounds(first: FirstCall, child: str) -> tuple[Tensor, ...]:
    """Returns two candidates for a bound's raw parameters ``(elements, 1)``, each tightest over draws of the prior.

    For the first all draws of the prior count; for the second those at which the parameters make a difference to what
    is seen: where a noisy-OR is present. Where others are most, the former are too large; where few are, the latter are
    too sure. It warns of data that the model cannot give at any of some draws of its latents.
    """
    draws = [{name: draw[name] for name in first.latents if name in draw} for draw in first.draws]
    runs = [first.run(draw)[child] for draw in draws] or [first.nodes[child]]
    value = runs[0]["value"]
    bound = bound_for(runs[0]["fn"])
    event = runs[0]["fn"].event_shape
    assert bound is not None
    if all(bool((site["fn"].log_prob(value) == -torch.inf).any()) for site in runs):
        warn(
            f"Some data of site '{child}' are impossible (log probability -inf) at all of {len(runs)} draws of its "
            "parents. An element without a leak cannot be 1 where none of its parents is active: give such elements a "
            "small leak."
        )
    s = torch.cat(
        [bound.predictor(site["fn"]).detach().reshape(-1, event.numel()) for site in runs]
    )
    found = []
    least = torch.finfo(torch.float32).eps ** 0.5
    for weights in (torch.ones_like(s), bound.relevance(s) + torch.finfo(s.dtype).tiny):
        mean, square = ((weights * each).sum(0) / weights.sum(0) for each in (s, s.square()))
        xi = bound.tightest(value, mean.reshape(event), square.reshape(event)).expand(value.shape)
        xi = xi.reshape(-1, event.numel()).clamp(least, 1 / least).log().mean(0).exp()
        found.append((xi + (-torch.expm1(-xi)).log()).unsqueeze(-1))
    return tuple(found)
