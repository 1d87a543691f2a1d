"""How a factor reads its parents.

The guide keeps one feature tensor a *node* (a latent or observed site, or a site's covariates), of shape
``(*left, *plates, features)`` with Pyro's plate dims in place. A factor that lies in some plates reads a node

* *aligned* on the plates that both share, *broadcast* over the plates that the node lacks;
* *gathered* where an index map says which instance belongs to a row: row n of ``obs`` reads ``alpha[county[n]]``;
* *pooled* over the plates that the factor lacks or reads across: a permutation-invariant encoder, nodes that meet in
  the same instances jointly and instance by instance, nested plates from the inside out; ragged ones, those nested by
  an index map, by segments;
* *flattened* over plates of fixed size, those over which a latent's own instances form a joint block.

A plate *determines* another where an index map leads from it there. A node lies in all plates that its own determine,
but its tensor has dims for its own only, its *frames*.

Change this module to add a way of reading; networks and families do not know of it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

__all__ = [
    "Direct",
    "Flattened",
    "Gathered",
    "Plates",
    "Pooled",
    "Read",
    "Source",
    "covariates_of",
    "flattened",
    "nodes_of",
    "plan_sources",
]


class Direct(NamedTuple):
    """Read a node instance by instance."""

    node: Hashable


class Flattened(NamedTuple):
    """Read a source with some plates moved into its features, instances in order."""

    source: Source
    plates: tuple[str, ...]


class Gathered(NamedTuple):
    """Read a source at the rows of plate ``rows``, each row the instance of ``plates`` that its index maps name."""

    source: Source
    rows: str
    plates: tuple[str, ...]


class Pooled(NamedTuple):
    """Encode the instances of ``plate`` one by one from ``inputs``, and reduce those that share an index of ``onto``.

    With nothing in ``onto`` all instances form one set.
    """

    plate: str
    inputs: tuple[Source, ...]
    onto: tuple[str, ...] = ()


Source = Direct | Flattened | Gathered | Pooled


class Read(NamedTuple):
    """How elimination joins a factor and one of its parents.

    Attributes:
        across: shared plates that the parent is read across (``Inverse.parents``).
        rows: plates of which every model factor that joins the two has one copy an index (``Elimination.rows``).
    """

    across: frozenset = frozenset()
    rows: frozenset = frozenset()


class Plates(NamedTuple):
    """What a plan must know of a model's plates.

    Attributes:
        order: all plates, outermost first.
        fixed: plates of fixed size: flattened rather than pooled.
        subsampled: plates of which a call may see a part only; a node is never read across one of them.
        determined: plate -> the plates that index maps lead to from it, closed transitively.
        dims: plate -> its (negative) batch dim.
        sizes: plate -> its size at the guide's first call.
    """

    order: tuple[str, ...]
    fixed: frozenset[str] = frozenset()
    subsampled: frozenset[str] = frozenset()
    determined: Mapping[str, frozenset[str]] = {}
    dims: Mapping[str, int] = {}
    sizes: Mapping[str, int] = {}

    @property
    def nesting(self) -> int:
        """The number of plate dims."""
        return -min(self.dims.values(), default=0)

    def closure(self, plates: Iterable[str]) -> frozenset[str]:
        """Returns plates with all that they determine."""
        plates = frozenset(plates)
        return plates.union(*(self.determined.get(plate, ()) for plate in plates))

    def generators(self, plates: Iterable[str]) -> frozenset[str]:
        """Returns those plates that no other one determines: the dims that a tensor needs."""
        plates = frozenset(plates)
        return plates.difference(*(self.determined.get(plate, ()) for plate in plates))

    def sort(self, plates: Iterable[str]) -> tuple[str, ...]:
        """Returns plates in order, outermost first."""
        return tuple(sorted(plates, key=self.order.index))


def covariates_of(site: Hashable) -> Hashable:
    """Returns the name of the node that holds the covariates of ``site``."""
    return ("covariates", site)


def nodes_of(source: Source) -> frozenset:
    """Returns the nodes that a source reads."""
    if isinstance(source, Direct):
        return frozenset([source.node])
    if isinstance(source, Pooled):
        return frozenset().union(*map(nodes_of, source.inputs))
    return nodes_of(source.source)


def flattened(source: Source, plates: tuple[str, ...]) -> Source:
    """Returns a source with plates flattened; itself if there are none."""
    return Flattened(source, plates) if plates else source


def plan_sources(
    batch: Collection[str],
    reads: Mapping[Hashable, Read],
    frames: Mapping[Hashable, Collection[str]],
    plates: Plates,
    joint: Collection[str] = (),
) -> tuple[Source, ...]:
    """Returns what a factor reads of its parents.

    A parent is aligned on the plates that it shares with ``batch`` and is not read across, and read across all of its
    other plates: at the rows of the model factor that joins the two, where it meets the other parents of that factor.
    Where it is read across shared plates the factor also reads its own instance, since an average over instances does
    not say which of them is its own.

    Args:
        batch: plates of the factor that are batch dims of its network, with all that they determine.
        reads: parent node -> how it is read.
        frames: node -> the plates that its tensor has dims for.
        plates: the model's.
        joint: plates of the factor that are flattened into its elements.

    Returns:
        Sources in a canonical order, so that factors with the same reads have equal sources.
    """
    return _Plan(plates.closure(batch), plates.closure(joint), plates).sources(reads, frames)


class _Stream(NamedTuple):
    """What is pooled together: over ``pooled``, keeping apart the instances of ``kept``."""

    pooled: frozenset[str]
    kept: frozenset[str]


class _Plan:
    """The sources of one factor under construction."""

    def __init__(self, batch: frozenset[str], joint: frozenset[str], plates: Plates) -> None:
        self.batch, self.joint, self.plates = batch, joint, plates
        self.found: set[Source] = set()
        self.streams: dict[_Stream, set[Source]] = {}

    def sources(self, reads: Mapping[Hashable, Read], frames: Mapping[Hashable, Collection[str]]) -> tuple[Source, ...]:
        for node, read in reads.items():
            own = frozenset(frames[node])
            aligned = self.plates.closure((own & self.batch) - read.across)
            for across in {frozenset(), read.across - aligned}:
                self._add(node, own, across, read.rows)
        self._pool()
        return _canonical(self.found)

    def _add(self, node: Hashable, frames: frozenset[str], across: frozenset[str], rows: frozenset[str]) -> None:
        """Adds one way of reading a node: aligned on the shared plates that are not in ``across``."""
        lies = self.plates.closure(frames)
        if lies <= self.batch - across:
            self.found.add(self._at(Direct(node), frames, self.plates.generators(self.batch)))
            return
        there = frames <= self.plates.closure(rows)  # else the rows do not say which of its instances they read
        if there and not self.plates.generators(lies | rows) - frames & (self.plates.subsampled | self.plates.fixed):
            lies |= rows
        dims = self.plates.generators(lies)
        read = lies - (self.batch - across)
        if read & self.plates.subsampled:
            return
        aligned = lies - read
        # A block is flattened, but not where the factor has rows of its own in it.
        flat = frozenset(
            plate
            for plate in dims & read & self.plates.fixed & frames
            if not self.plates.determined.get(plate, frozenset()) & aligned
        )
        source, frames = flattened(Direct(node), self.plates.sort(flat)), frames - flat
        gone = self.plates.closure(flat)
        pooled = read - gone - (self.joint - dims)
        if not pooled:
            self.found.add(self._at(source, frames, self.plates.generators(self.batch)))
            return
        key = _Stream(pooled, lies - pooled - gone)
        self.streams.setdefault(key, set()).add(self._at(source, frames, dims - flat))

    def _pool(self) -> None:
        """Pools the innermost plate first; what comes out joins the reads across the plates that are left."""
        while self.streams:
            plate = max(frozenset().union(*(key.pooled for key in self.streams)), key=self.plates.order.index)
            for key in [key for key in self.streams if plate in key.pooled]:
                inputs = _canonical(self.streams.pop(key))
                determined = self.plates.determined.get(plate, frozenset())
                kept, left = key.kept & determined, key.pooled & determined
                onto = self.plates.generators(kept | left)
                if len(onto) > 1 and onto != self.plates.generators(kept):
                    # Crossed plates: one set for each of their combinations would be a set for hardly any row.
                    onto, left = self.plates.generators(kept), frozenset()
                stage = Pooled(plate, inputs, self.plates.sort(onto))
                rest = _Stream(key.pooled - {plate} - (determined - left), key.kept)
                if rest.pooled:
                    self.streams.setdefault(rest, set()).add(stage)
                else:
                    self._finish(stage, key.kept)

    def _finish(self, stage: Pooled, kept: frozenset[str]) -> None:
        """Adds a pooled source, flattened over a block's plates and at the factor's own rows."""
        flat = self.plates.sort(self.plates.generators(kept) & self.joint)
        dims = self.plates.generators(kept) - set(flat)
        self.found.add(self._at(flattened(stage, flat), dims, self.plates.generators(self.batch)))

    def _at(self, source: Source, frames: frozenset[str], dims: frozenset[str]) -> Source:
        """Returns a source that has dims ``frames`` as it is read at dims ``dims``."""
        for rows in self.plates.sort(dims - frames):
            mapped = frames & self.plates.determined.get(rows, frozenset()) - dims
            if mapped:
                source = Gathered(source, rows, self.plates.sort(mapped))
                frames = frames - mapped
        return source


def _canonical(sources: Collection[Source]) -> tuple[Source, ...]:
    return tuple(sorted(sources, key=repr))
