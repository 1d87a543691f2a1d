"""What networks give for bounds on likelihoods: which parameters, what these read, and where they start.

The parameters xi of the bound on a child, one an element, are softplus of what networks give. Change this module to let
them start, or read, otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.factors.bounds import bound_for
from pyro_nami.guide.conditioning import Plates, Read, plan_sources
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.guide.groups import Factor
from pyro_nami.messages import warn
from pyro_nami.reading.conjugate_group import ConjugateGroup

__all__ = ["bound_factors", "initial_bound", "is_corrected"]

_RANGE = 1e-3, 1e3  # of xi at first


def bound_factors(
    first: FirstCall, groups: Mapping[str, ConjugateGroup], reads: Mapping[str, Mapping[Any, Read]], plates: Plates
) -> dict[str, Factor]:
    """Returns child -> the place in the networks of its bound's parameters, one an element.

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
            frames = {node: first.frames[node if node in first.frames else node[1]] for node in nodes}
            sources = plan_sources(batch, {node: Read() for node in nodes}, frames, plates)
            found[child] = Factor(("bound", child), batch, (), fn.event_shape.numel(), 1, 1, False, sources)
    return found


def is_corrected(first: FirstCall, group: ConjugateGroup) -> bool:
    """Whether networks correct conditionals by a bound: where the inverse lets latents depend on each other."""
    options = first.options
    return group.bound == "bounded" and options.inverse != "mean_field" and options.within == "autoregressive"


def initial_bound(first: FirstCall, child: str) -> Tensor:
    """Returns raw parameters ``(elements, 1)`` of a child's bound at which it is tightest over the prior.

    It warns of data that the model cannot give at any of some draws of its latents.
    """
    latents = [name for name in first.net.latent if name in first.nodes]
    draws = [{name: draw[name] for name in latents if name in draw} for draw in first.draws]
    runs = [first.run(draw)[child] for draw in draws] or [first.nodes[child]]
    value, bound, event = runs[0]["value"], bound_for(runs[0]["fn"]), runs[0]["fn"].event_shape
    assert bound is not None
    if all(bool((site["fn"].log_prob(value) == -torch.inf).any()) for site in runs):
        warn(
            f"Some data of site '{child}' have log-probability -inf at each of {len(runs)} draws of its parents: where "
            "no parent that is active leads to an element, as a leak of zero leaves it, a 1 there is impossible. Give "
            "such elements a small leak."
        )
    s = torch.stack([bound.predictor(site["fn"]) for site in runs])
    xi = bound.tightest(value, s.mean(0), s.square().mean(0)).expand(value.shape)
    xi = xi.reshape(-1, event.numel()).clamp(*_RANGE).log().mean(0).exp()
    return (xi + (-torch.expm1(-xi)).log()).unsqueeze(-1)
