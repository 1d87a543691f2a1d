"""Which elements of vectors a factor reads: elimination once more, with every element of a vector as a site.

Vectors may hide what plates would show: that each element has data of its own. ``to_event`` says
which elements are independent given the parents; runs of the model show which elements of a child
move with one element of a parent. Elimination in the inverse's order then says which elements of
data and latents each element needs.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Independent

from pyro_nami.factors.wrappers import without
from pyro_nami.graph.elimination import eliminate
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet
from pyro_nami.guide.first_call import FirstCall
from pyro_nami.program.runner import Message, Values
from pyro_nami.program.site_values import redraw
from pyro_nami.reading.changes import moved

__all__ = ["ElementRows", "element_reads", "without_predictive"]

# for each element of a factor, which elements of a node it reads
ElementRows = tuple[tuple[bool, ...], ...]


def element_reads(
    first: FirstCall, inverse: Inverse, order: Collection[str], *, most_elements: int = 256
) -> dict[str, dict[Hashable, ElementRows]]:
    """Returns factor -> node -> boolean rows, one for each element of the factor: which elements of the node it reads.

    Left out is what reads all, and the elements of blocks; nothing is found for an inverse that elimination in its
    order would not give, or where arguments other than data, a design matrix say, may bring another structure in
    another call. A site whose elements depend on each other in the model counts as one.

    Args:
        first: the first call.
        inverse: what each latent reads.
        order: the latents that are not drawn from the model.
        most_elements: of all sites together. Each takes some runs of the model, so ten times as many take minutes.
    """
    data = {id(first.nodes[name]["value"]) for name in first.data}
    leaves = first.program.leaves()
    if any(isinstance(leaf, (Tensor, np.ndarray)) and id(leaf) not in data for leaf in leaves):
        return {}
    net, eliminated = without_predictive(first.net, inverse, order)
    whole = first.options.embeddings
    counts = {name: 1 if name in whole else _count(first.nodes.get(name)) for name in net.sites}
    plain = eliminate(net, eliminated).parents
    is_known = all(plain[name].keys() == inverse.parents[name].keys() for name in order)
    total = sum(counts.values())
    if total == len(counts) or total > most_elements or not is_known:
        return {}
    found = {(u, t): torch.ones(counts[t], counts[u], dtype=torch.bool) for u, t in net.edges}
    for name in net.sites:
        children = [t for u, t in net.edges if u == name]
        if any(counts[name] * counts[t] > 1 for t in children):
            reads = _reads(first, name, children, counts)
            found.update({(name, t): each for t, each in reads.items()})
    sites = [
        replace(site, name=(name, i), support_parents=frozenset())
        for name, site in net.sites.items()
        for i in range(counts[name])
    ]
    pairs = [
        ((u, j), (t, i)) for (u, t), reads in found.items() for i, j in reads.nonzero().tolist()
    ]
    elements = [(name, i) for name in eliminated for i in reversed(range(counts[name]))]
    parents = eliminate(BayesNet(sites, pairs, net.plate_sizes, net.nesting), elements).parents
    result: dict[str, dict[Hashable, ElementRows]] = {}
    for name in order:
        for node in () if inverse.joint[name] else (*inverse.parents[name], name):
            own = [(name, i) for i in range(counts[name])]
            rows = tuple(tuple((node, j) in parents[i] for j in range(counts[node])) for i in own)
            everything = all(all(row[:i] if node == name else row) for i, row in enumerate(rows))
            if not everything:
                result.setdefault(name, {})[node] = rows
    return result


def without_predictive(
    net: BayesNet, inverse: Inverse, order: Collection[str]
) -> tuple[BayesNet, list[str]]:
    """Returns the network without latents that are drawn from the model, and what to eliminate from it, in order."""
    sites = {
        name: site
        for name, site in net.sites.items()
        if name in order or site.observed or site.marginalized
    }
    edges = [(u, v) for u, v in net.edges if u in sites and v in sites]
    hidden = [name for name in net.latent if net.sites[name].marginalized]
    eliminated = [*hidden, *(name for name in inverse.order if name in order)]
    return BayesNet(sites, edges, net.plate_sizes, net.nesting), eliminated


def _count(site: Message | None) -> int:
    """Returns how many elements a site has that are independent given its parents; 1 if they are not."""
    if site is None or without(site["fn"], Independent).event_shape != ():
        return 1
    return int(site["fn"].event_shape.numel())


def _reads(
    first: FirstCall, name: str, children: Sequence[str], counts: Mapping[str, int]
) -> dict[str, Tensor]:
    """Returns child -> boolean ``(child's elements, site's elements)``: whether the one depends on the other."""
    reads = {t: torch.zeros(counts[t], counts[name], dtype=torch.bool) for t in children}
    held = {*first.net.latent, *first.options.observed}
    num_found = -1
    for draw in first.draws:
        # every element while draws show something new; from then on those that nothing seems to read
        all_reads = torch.cat([*reads.values()])
        is_new, num_found = int(all_reads.sum()) > num_found, int(all_reads.sum())
        looked = torch.arange(counts[name])[~all_reads.any(0) | is_new].tolist()
        values = {u: value for u, value in draw.items() if u in held}
        try:
            if looked:
                _note_moves(first, name, values, reads, looked)
        except (ValueError, RuntimeError, ArithmeticError, KeyError):
            return {}  # the model does not run at these values, or without the site
    # what shows nothing, as it has no density, reads all
    return {t: rows for t, rows in reads.items() if rows.any()}


def _note_moves(
    first: FirstCall,
    name: str,
    values: Values,
    reads: Mapping[str, Tensor],
    looked: Sequence[int],
) -> None:
    """Notes which elements of children move with single elements of a site, at values of all sites.

    Elements that nothing is seen to read are changed all together once more; a child that then moves reads all.

    Raises:
        KeyError: a run lacks the site.
    """
    before = first.run(values)
    base = before[name]["value"]
    other = redraw(before[name]["fn"], base)
    count = len(next(iter(reads.values()))[0])

    def moves(changed: Tensor) -> Values:
        """Returns which elements of children move with the ``changed`` elements, ``(elements,)``, of the site."""
        event = before[name]["fn"].event_shape if count > 1 else ()
        mixed = torch.where(changed.to(base.device).reshape(event), other, base)
        after = first.run({**values, name: mixed})
        found = {}
        for t, rows in reads.items():
            each = moved(before[t], after.get(t), by_element=len(rows) > 1)
            found[t] = each.reshape(-1, len(rows)).any(0).cpu()
        return found

    for j in looked:
        for t, rows in moves(torch.arange(count) == j).items():
            reads[t][:, j] |= rows
    for kept in torch.cat([*reads.values()]).unique(dim=0):
        for t, rows in moves(~kept).items():
            if (rows & (reads[t] == kept).all(-1)).any():
                reads[t][:] = True
