"""How a factor reads its parents.

The guide keeps one feature tensor for each *node* (a latent or observed site, or a site's
covariates), of shape ``(*left, *plates, features)`` with Pyro's plate dims in place. A factor reads
a node

- aligned on the plates that both share, and broadcast over plates that the node lacks;
- gathered where an index map says which instance belongs to a row;
- pooled over plates that the factor lacks or reads across: nodes that meet in the same instances
  jointly, nested plates from the inside out;
- flattened over plates of fixed size, those of joint blocks.

A plate *determines* another where an index map leads from it there. A node lies in all plates that
its own plates determine, but its tensor has dims for its own only, its *frames*.

To add a way of reading, plan it here and compute it in `inputs`; networks and families do not know
of it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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
    "parts_of",
    "plan_sources",
    "pooled_part",
    "site_of",
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


def parts_of(source: Source) -> Iterator[Source]:
    """Yields all sources that one is made of: before each what it reads, so itself last."""
    if isinstance(source, Pooled):
        for part in source.inputs:
            yield from parts_of(part)
    elif not isinstance(source, Direct):
        yield from parts_of(source.source)
    yield source


def nodes_of(source: Source) -> frozenset:
    """Returns the nodes that a source reads."""
    return frozenset(part.node for part in parts_of(source) if isinstance(part, Direct))


def pooled_part(source: Source) -> Pooled | None:
    """Returns the sets of instances that a factor reads by a source, None if it reads single ones."""
    return next((part for part in reversed([*parts_of(source)]) if isinstance(part, Pooled)), None)


def flattened(source: Source, plates: tuple[str, ...]) -> Source:
    """Returns a source with plates flattened; itself if there are none."""
    return Flattened(source, plates) if plates else source


def covariates_of(site: Hashable) -> Hashable:
    """Returns the name of the node that holds the covariates of ``site``."""
    return ("covariates", site)


def site_of(node: Hashable) -> Any:
    """Returns the site of a node: itself, or the site that the node holds the covariates of."""
    return node[1] if isinstance(node, tuple) and node[:1] == ("covariates",) else node


class Read(NamedTuple):
    """How elimination joins a factor and one of its parents."""

    # shared plates that the parent is read across (``Inverse.parents``)
    across: frozenset = frozenset()
    # plates of the model factors that join the two (``Elimination.rows``)
    rows: frozenset = frozenset()


class Plates(NamedTuple):
    """What a plan must know of a model's plates."""

    order: tuple[str, ...]  # all of them, outermost first
    fixed: frozenset[str] = frozenset()  # those of fixed size: flattened rather than pooled
    subsampled: frozenset[str] = frozenset()  # of which the model or `create_plates` takes a part
    minibatched: frozenset[str] = frozenset()  # of which the data of a call are a part
    # plate -> those that index maps lead to, closed transitively
    determined: Mapping[str, frozenset[str]] = {}
    dims: Mapping[str, int] = {}  # plate -> its (negative) batch dim
    sizes: Mapping[str, int] = {}  # plate -> its size at the guide's first call

    @property
    def partial(self) -> frozenset[str]:
        """Those of which a call may see a part; no node is read across one of them."""
        return self.subsampled | self.minibatched

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


def plan_sources(
    batch: Collection[str],
    reads: Mapping[Hashable, Read],
    frames: Mapping[Hashable, Collection[str]],
    plates: Plates,
    joint: Collection[str] = (),
) -> tuple[Source, ...]:
    """Returns what a factor reads of its parents, in a canonical order.

    A parent is aligned on the plates that it shares with ``batch`` and is not read across, and read across all of its
    other plates: at the rows of the model factor that joins the two, where it meets the other parents of that factor.
    Where it is read across shared plates the factor also reads its own instance, which an average does not tell.

    Args:
        batch: plates that are batch dims of its network, with all that they determine; ``joint`` are in its elements.
        reads: parent node -> how it is read.
        frames: node -> the plates that its tensor has dims for.
        plates: the model's.

    Example:
        >>> plan_sources(batch=[], reads={"y": Read()}, frames={"y": ["i"]}, plates=Plates(("i",)))
        (Pooled(plate='i', inputs=(Direct(node='y'),), onto=()),)
    """
    plan = _SourcePlan(plates.closure(batch), plates.closure(joint), plates)
    streams: dict[_Stream, set[Source]] = {_DONE: set()}
    for node, read in reads.items():
        own = frozenset(frames[node])
        aligned = plates.closure((own & plan.batch) - read.across)
        for across in {frozenset(), read.across - aligned}:
            for stream, source in plan.read(node, own, across, read.rows):
                streams.setdefault(stream, set()).add(source)
    while len(streams) > 1:
        # The innermost plate first; what comes out joins the reads across the plates that are left.
        plate = max(
            frozenset().union(*(stream.pooled for stream in streams)), key=plates.order.index
        )
        for stream in [stream for stream in streams if plate in stream.pooled]:
            rest, source = plan.pool(plate, stream, _canonical(streams.pop(stream)))
            streams.setdefault(rest, set()).add(source)
    return _canonical(streams[_DONE])


def _canonical(sources: Collection[Source]) -> tuple[Source, ...]:
    return tuple(sorted(sources, key=repr))


class _Stream(NamedTuple):
    """What is pooled together: over ``pooled``, keeping apart the instances of ``kept``."""

    pooled: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()


_DONE = _Stream()


class _SourcePlan(NamedTuple):
    """How one factor reads: its plates ``batch`` and ``joint``, with all that they determine, among all plates."""

    batch: frozenset[str]
    joint: frozenset[str]
    plates: Plates

    def read(
        self, node: Hashable, frames: frozenset[str], across: frozenset[str], rows: frozenset[str]
    ) -> Iterator[tuple[_Stream, Source]]:
        """Yields a node aligned on the shared plates that are not in ``across``, unless it cannot be read so."""
        plates, lies = self.plates, self.plates.closure(frames)
        if lies <= self.batch - across:
            yield _DONE, self._at(Direct(node), frames)
            return
        # else the rows do not say which of its instances they read
        there = frames <= plates.closure(rows)
        if there and not plates.generators(lies | rows) - frames & (plates.partial | plates.fixed):
            lies |= rows
        dims = plates.generators(lies)
        read = lies - (self.batch - across)
        if read & plates.partial:
            return
        # A block is flattened, but not where the factor has rows of its own in it.
        kept = lies - read
        flat = frozenset(
            plate
            for plate in dims & read & plates.fixed & frames
            if kept.isdisjoint(plates.determined.get(plate, ()))
        )
        source, frames = flattened(Direct(node), plates.sort(flat)), frames - flat
        gone = plates.closure(flat)
        pooled = read - gone - (self.joint - dims)
        if pooled:
            yield _Stream(pooled, lies - pooled - gone), self._at(source, frames, dims - flat)
        else:
            yield _DONE, self._at(source, frames)

    def pool(
        self, plate: str, stream: _Stream, inputs: tuple[Source, ...]
    ) -> tuple[_Stream, Source]:
        """Returns what comes out of a stream whose instances are pooled over a plate, and the stream that it joins."""
        plates, determined = self.plates, self.plates.determined.get(plate, frozenset())
        # One dim cannot be that of two plates at a time, now or when others are pooled onto theirs.
        others = (stream.pooled | stream.kept) - determined - {plate}
        taken = {plates.dims.get(other, other) for other in others}
        kept = stream.kept & determined
        left = frozenset(
            each for each in stream.pooled & determined if plates.dims.get(each, each) not in taken
        )
        onto = plates.generators(kept | left)
        if len(onto) > 1 and onto != plates.generators(kept):
            # Crossed plates: one set for each of their combinations would be a set for hardly any row.
            onto, left = plates.generators(kept), frozenset()
        source: Source = Pooled(plate, inputs, plates.sort(onto))
        rest = stream.pooled - {plate} - (determined - left)
        if rest:
            return _Stream(rest, stream.kept), source
        dims = plates.generators(stream.kept)
        return _DONE, self._at(flattened(source, plates.sort(dims & self.joint)), dims - self.joint)

    def _at(
        self, source: Source, frames: frozenset[str], dims: frozenset[str] | None = None
    ) -> Source:
        """Returns a source that has dims ``frames`` as it is read at dims ``dims``, by default the factor's own."""
        dims = self.plates.generators(self.batch) if dims is None else dims
        for rows in self.plates.sort(dims - frames):
            mapped = frames & self.plates.determined.get(rows, frozenset()) - dims
            if mapped:
                source = Gathered(source, rows, self.plates.sort(mapped))
                frames = frames - mapped
        return source
