"""From the network of a model to the inverse that its guide is built on.

The guide's options are applied here: semi-observed sites, data behind ``poutine.block``, and the
choice of an inversion (`pyro_nami.graph.inversion_methods`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import networkx as nx

from pyro_nami.graph.elimination import eliminate
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.inversion_methods import DIRECTIONS, INVERSIONS, nami
from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import Site
from pyro_nami.parameters.conditioning import Read, covariates_of

__all__ = ["invert", "plan_reads", "with_hidden_evidence", "with_latent_blocks"]


def invert(
    net: BayesNet,
    inverse: Any,
    blocks: Sequence[Sequence[str]] | None,
    parts: Sequence[Sequence[str]] = (),
) -> Inverse:
    """Returns the inverse that an option ``inverse`` stands for.

    ``parts`` are blocks that ``"auto"`` prefers, as more conditionals are known exactly then.
    """
    if parts:
        return nami(net, direction="reverse", blocks=parts)
    if isinstance(inverse, str) and inverse in DIRECTIONS:
        return nami(net, direction=inverse, blocks=blocks)
    if blocks is not None:
        raise ValueError(
            f"Expected an inverse that honours `blocks`, one of {', '.join(map(repr, DIRECTIONS))}; got {inverse!r}."
        )
    if isinstance(inverse, str):
        if inverse not in INVERSIONS:
            names = ", ".join(map(repr, (*DIRECTIONS, *INVERSIONS)))
            raise ValueError(
                f"Expected `inverse` to be one of {names}, an Inverse or a callable; got {inverse!r}."
            )
        return INVERSIONS[inverse](net)
    result = inverse if isinstance(inverse, Inverse) else inverse(net)
    if not isinstance(result, Inverse):
        raise TypeError(
            f"Expected `inverse` to be, or to return, an Inverse; got {type(result).__name__}."
        )
    missing = set(net.latent).symmetric_difference(result.net.latent)
    if missing:
        raise ValueError(
            f"Expected an inverse over the model's latent sites {list(net.latent)}; got one that differs in "
            f"{sorted(map(str, missing))}. Invert `extract_bayesnet(model, ...)` of the same model."
        )
    return result


def with_latent_blocks(net: BayesNet, blocks: Sequence[Sequence[str]] | None) -> BayesNet:
    """Returns the network with the observed sites that ``blocks`` names latent: they are semi-observed."""
    named: set[Any] = {name for block in blocks or () for name in block}
    if not named & set(net.observed):
        return net
    sites = {
        name: dataclasses.replace(site, observed=False) if name in named else site
        for name, site in net.sites.items()
    }
    return BayesNet(sites, net.edges, plate_sizes=net.plate_sizes, nesting=net.nesting)


def with_hidden_evidence(net: BayesNet) -> BayesNet:
    """Returns the network of a blocked model, with evidence that the guide cannot see on its barren latents.

    ``poutine.block`` may hide data, so a latent without observed descendants need not be without evidence. All such
    latents get an observed child in common for each set of plates that they lie in.
    """
    seen = set(net.observed)
    for name in net.observed:
        seen |= nx.ancestors(net.graph, name)
    barren = [name for name in net.latent if name not in seen]
    sites, edges = dict(net.sites), list(net.edges)
    for plates in {net.plates[name] for name in barren}:
        node = ("hidden", *sorted(plates))
        sites[node] = Site(node, plates=plates, observed=True)
        edges.extend((name, node) for name in barren if net.plates[name] <= plates)
    return BayesNet(sites, edges, plate_sizes=net.plate_sizes, nesting=net.nesting)


def plan_reads(
    net: BayesNet,
    inverse: Inverse,
    order: Sequence[str],
    columns: Collection[str],
    empty: Collection[str],
) -> dict[str, dict[Hashable, Read]]:
    """Returns factor -> what it reads: its parents in the inverse, and covariates that elimination connects it with.

    Covariates are observed roots with an edge to their site, so the algebra of the inverse says who reads them. Latents
    come in sampling order, ``columns`` are sites with covariates, ``empty`` those without values to read.
    """
    kept = {
        name: site
        for name, site in net.sites.items()
        if name in order or site.observed or site.marginalized
    }
    sites = dict(kept)
    edges = [(u, v) for u, v in net.edges if u in kept and v in kept]
    for name in columns:
        if name in kept:
            node = covariates_of(name)
            sites[node] = Site(node, plates=kept[name].plates, observed=True)
            edges.append((node, name))
    hidden = [name for name in net.latent if net.sites[name].marginalized]
    eliminated = [*hidden, *(name for name in inverse.order if name in order)]
    parents, _, rows = eliminate(BayesNet(sites, edges, net.plate_sizes, net.nesting), eliminated)
    reads = {}
    for name in order:
        found = {u: label for u, label in parents[name].items() if u not in net.sites}
        own = {u: label for u, label in inverse.parents[name].items() if u not in empty}
        reads[name] = {
            u: Read(label, rows[name].get(u, frozenset())) for u, label in {**own, **found}.items()
        }
    return reads
