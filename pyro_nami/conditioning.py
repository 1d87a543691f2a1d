"""How a factor reads its parents.

The guide keeps one feature tensor a *node* (a latent or observed site, or a site's covariates), of shape
``(*left, *plates, features)`` with Pyro's plate dims in place. A factor that lies in some plates reads a node

* *aligned* on the plates that both share, *broadcast* over the plates that the node lacks;
* *pooled* over the plates that the factor lacks or reads across: a permutation-invariant encoder, nodes that are
  read across the same plates jointly and instance by instance, nested plates from the inside out;
* *flattened* over plates of fixed size, those over which a latent's own instances form a joint block.

Change this module to add a way of reading (an index map, say); networks and families do not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Direct",
    "Pooled",
    "Source",
    "concatenate",
    "covariates_of",
    "evaluate",
    "flatten",
    "nodes_of",
    "plan_sources",
]


class Direct(NamedTuple):
    """Read a node instance by instance, with the plates ``flatten`` moved into its features."""

    node: Hashable
    flatten: tuple[str, ...] = ()


class Pooled(NamedTuple):
    """Encode the instances of ``plate`` one by one from ``inputs`` and average over them."""

    plate: str
    inputs: tuple[Source, ...]


Source = Direct | Pooled


def covariates_of(site: Hashable) -> Hashable:
    """Returns the name of the node that holds the covariates of ``site``."""
    return ("covariates", site)


def nodes_of(source: Source) -> frozenset:
    """Returns the nodes that a source reads."""
    if isinstance(source, Direct):
        return frozenset([source.node])
    return frozenset().union(*map(nodes_of, source.inputs))


def plan_sources(
    batch: Collection[str],
    parents: Mapping[Hashable, Collection[str]],
    plates: Mapping[Hashable, Collection[str]],
    *,
    nesting: Sequence[str],
    fixed: Collection[str] = (),
    subsampled: Collection[str] = (),
) -> tuple[Source, ...]:
    """Returns what a factor with batch plates ``batch`` reads of its ``parents``.

    A parent u with shared plates S = plates[u] & batch and label R = parents[u] is aligned on S - R and read across
    all of its other plates. Where R is not empty the factor also reads its own instance, since an average over
    instances does not say which of them is its own.

    Args:
        batch: plates of the factor that are batch dims of its network.
        parents: parent node -> shared plates that it is read across (``Inverse.parents``).
        plates: node -> its plates.
        nesting: all plates, outermost first.
        fixed: plates of fixed size: flattened rather than pooled.
        subsampled: plates of which a call may see a part only; a node is never read across one of them.

    Returns:
        Sources in a canonical order, so that factors with the same reads have equal sources.
    """
    batch, fixed, subsampled = frozenset(batch), frozenset(fixed), frozenset(subsampled)
    rank = {plate: i for i, plate in enumerate(nesting)}
    direct: set[Direct] = set()
    streams: dict[frozenset, set[Source]] = {}
    for node, label in parents.items():
        own = frozenset(plates[node]) - batch
        for across in {own, own | frozenset(label)}:
            if across & subsampled:
                continue
            read = Direct(node, _ordered(across & fixed, rank))
            pooled = across - fixed
            if pooled:
                streams.setdefault(pooled, set()).add(read)
            else:
                direct.add(read)
    return (*_canonical(direct), *_canonical(_pool(streams, rank)))


def _pool(streams: dict[frozenset, set[Source]], rank: Mapping[str, int]) -> set[Source]:
    """Pools the innermost plate first; what comes out joins the reads across the plates that are left."""
    while any(streams):
        plate = max(frozenset().union(*streams), key=rank.__getitem__)
        for left in [key for key in streams if plate in key]:
            stage = Pooled(plate, _canonical(streams.pop(left)))
            streams.setdefault(left - {plate}, set()).add(stage)
    return streams.get(frozenset(), set())


def _ordered(plates: Collection[str], rank: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(plates, key=rank.__getitem__))


def _canonical(sources: Collection[Source]) -> tuple[Source, ...]:
    return tuple(sorted(sources, key=repr))


def evaluate(
    source: Source,
    features: Mapping[Hashable, Tensor],
    dims: Mapping[str, int],
    encoders: Mapping[Source, Callable[[Tensor, int], Tensor]],
    cache: dict[Source, Tensor],
) -> Tensor:
    """Returns the features that a factor reads from a source, of shape ``(*left, *plates, features)``.

    Args:
        features: node -> features with plate dims in place (size 1 where a node lacks a plate).
        dims: plate -> its (negative) batch dim.
        encoders: pooled source -> its encoder.
        cache: pooled sources evaluated so far in this call; filled in.
    """
    if isinstance(source, Direct):
        value = features[source.node]
        for plate in source.flatten:
            value = flatten(value, dims[plate] - 1)
        return value
    if source not in cache:
        inputs = [evaluate(part, features, dims, encoders, cache) for part in source.inputs]
        cache[source] = encoders[source](concatenate(inputs), dims[source.plate])
    return cache[source]


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the last dim after broadcasting the others."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].shape[:-1]
    if any(part.shape[:-1] != first for part in parts):
        batch = _broadcast([part.shape[:-1] for part in parts])
        parts = [part if part.shape[:-1] == batch else part.expand(batch + part.shape[-1:]) for part in parts]
    return torch.cat(list(parts), dim=-1)


def _broadcast(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    """Returns the shape that shapes broadcast to; `torch.broadcast_shapes` takes as long as a small network."""
    ndims = max(map(len, shapes))
    padded = [(1,) * (ndims - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded))


def flatten(value: Tensor, dim: int) -> Tensor:
    """Moves a plate dim into the features, instances in order, and leaves size 1 in its place."""
    moved = value.movedim(dim, -2)
    return moved.reshape(moved.shape[:-2] + (-1,)).unsqueeze(dim)
