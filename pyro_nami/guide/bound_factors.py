"""Networks that give the parameters of likelihood bounds: what they read, and their initial values.

A bound has one parameter xi for each element of the child: softplus of a network's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.deriving.bounded import LinearBernoulli
from pyro_nami.deriving.derived_group import ConjugateGroup
from pyro_nami.deriving.expansion import TOLERANCE, Expansion, expanding
from pyro_nami.deriving.in_turn import InTurn, Order
from pyro_nami.factors.bounds import bound_for
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.messages import warn
from pyro_nami.parameters.conditioning import Plates, Read, plan_sources, site_of
from pyro_nami.parameters.factor_groups import Factor

__all__ = ["bound_factors", "in_turn", "initial_bounds", "is_corrected"]

_RANGE = 1e-3, 1e3  # of xi at first
# of a latent's and a datum's elements, of one instance, for latents to be drawn in turn
_MOST_PAIRS = 2e4


def bound_factors(
    first: FirstCall,
    groups: Mapping[str, ConjugateGroup],
    reads: Mapping[str, Mapping[Any, Read]],
    plates: Plates,
) -> dict[str, Factor]:
    """Returns observed child -> the factor whose network gives its bound's parameters, one for each element.

    They read what all latents read whose conditionals are by that bound.
    """
    found = {}
    for group in groups.values():
        for child in group.children if group.bound == "bounded" else ():
            fn = first.nodes[child]["fn"]
            members = [name for name in group.members if first.net.graph.has_edge(name, child)]
            nodes = set.intersection(*(set(reads[name]) for name in members)) - set(group.members)
            if bound_for(fn) is None:
                continue
            batch = plates.closure(first.frames[child])
            frames = {node: first.frames[site_of(node)] for node in nodes}
            sources = plan_sources(batch, {node: Read() for node in nodes}, frames, plates)
            found[child] = Factor(
                ("bound", child), batch, (), fn.event_shape.numel(), 1, 1, sources
            )
    return found


def is_corrected(first: FirstCall, group: ConjugateGroup) -> bool:
    """Whether networks correct conditionals by a bound: where the inverse lets latents depend on each other."""
    options = first.options
    return (
        group.bound == "bounded"
        and options.inverse != "mean_field"
        and options.within == "autoregressive"
    )


def in_turn(
    first: FirstCall, group: ConjugateGroup, factors: Mapping[str, Factor]
) -> ConjugateGroup:
    """Returns the group with its binary members drawn in turn, if the conditions below hold; else the group as it is.

    Conditionals have to be corrected, instances to be told apart where children tell them apart, elements and data to
    be few enough, and the model to run at all unit vectors at once, with predictors linear in them.
    """
    if group.form != "Bernoulli" or not is_corrected(first, group):
        return group
    frames, own = first.frames, [factors[name] for name in group.members]
    apart = all(
        frames[factor.name] - set(factor.joint) <= frames[child]
        and frames[child].isdisjoint(factor.joint)
        for factor in own
        for child in group.children
    )
    events = sum(first.nodes[child]["fn"].event_shape.numel() for child in group.children)
    if not apart or events * sum(factor.num_elements for factor in own) > _MOST_PAIRS:
        return group
    dims, sizes = first.plates.dims, first.plates.sizes
    orders = {
        factor.name: Order(
            factor.num_elements, [dims[p] for p in factor.joint], [sizes[p] for p in factor.joint]
        )
        for factor in own
    }
    nesting, draw = first.plates.nesting, first.draws[0]
    bounded: Expansion = LinearBernoulli(group, (1,) * nesting, nesting, False, orders=orders)
    try:
        with expanding():
            units = bounded.solve(first.run({**draw, **bounded.points}, bounded.until))
            assert isinstance(units, InTurn)
            units.solve(first.run({**draw, **units.points}, units.until))
        return group._replace(in_turn=units.error() < TOLERANCE)
    except Exception:  # noqa: BLE001  whatever a model does at several points
        return group


def initial_bounds(first: FirstCall, child: str) -> tuple[Tensor, ...]:
    """Returns two candidates for a bound's raw parameters ``(elements, 1)``, each tightest over draws of the prior.

    For the first all draws of the prior count; for the second those at which the parameters make a difference to what
    is seen: where a noisy-OR is present. Where others are most, the former are too large; where few are, the latter are
    too sure. It warns of data that the model cannot give at any of some draws of its latents.
    """
    latents = [name for name in first.net.latent if name in first.nodes]
    draws = [{name: draw[name] for name in latents if name in draw} for draw in first.draws]
    runs = [first.run(draw)[child] for draw in draws] or [first.nodes[child]]
    value = runs[0]["value"]
    bound = bound_for(runs[0]["fn"])
    event = runs[0]["fn"].event_shape
    assert bound is not None
    if all(bool((site["fn"].log_prob(value) == -torch.inf).any()) for site in runs):
        warn(
            f"Some data of site '{child}' have log-probability -inf at each of {len(runs)} draws of its parents: where "
            "no parent that is active leads to an element, as a leak of zero leaves it, a 1 there is impossible. Give "
            "such elements a small leak."
        )
    s = torch.cat(
        [bound.predictor(site["fn"]).detach().reshape(-1, event.numel()) for site in runs]
    )
    found = []
    for weights in (torch.ones_like(s), bound.relevance(s) + torch.finfo(s.dtype).tiny):
        mean, square = ((weights * each).sum(0) / weights.sum(0) for each in (s, s.square()))
        xi = bound.tightest(value, mean.reshape(event), square.reshape(event)).expand(value.shape)
        xi = xi.reshape(-1, event.numel()).clamp(*_RANGE).log().mean(0).exp()
        found.append((xi + (-torch.expm1(-xi)).log()).unsqueeze(-1))
    return tuple(found)
