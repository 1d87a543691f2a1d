"""What a call of the model has other than a guide's first call, as sentences: two structures compared.

Change this module when a guide's structure holds something more that calls may differ in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pyro_nami.guide.structure import Assembly

__all__ = ["differences"]


def differences(before: Assembly, now: Assembly) -> Iterator[str]:
    """Yields one sentence for each difference between the structures of two calls of one model."""
    old, new = before.bayesnet, now.bayesnet
    yield from (f"Site '{name}' is new." for name in sorted(now.names - before.names))
    yield from (f"Site '{name}' is missing." for name in sorted(before.names - now.names))
    shared = old.sites.keys() & new.sites.keys()
    for name in [name for name in old.sites if name in shared]:
        if old.sites[name].observed != new.sites[name].observed:
            yield f"Site '{name}' is {'observed' if new.sites[name].observed else 'latent'} now."
        if before.event_dims.get(name) != now.event_dims.get(name):
            yield f"Site '{name}' has {now.event_dims.get(name)} event dims, not {before.event_dims.get(name)}."
        if before.frames.get(name) != now.frames.get(name):
            yield f"Site '{name}' is in plates {_names(now.frames.get(name, ()))}, not {_names(before.frames[name])}."
        shapes = [each.families[name].event_shape for each in (before, now) if name in each.families]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            yield f"Site '{name}' has the event shape {tuple(shapes[1])}, not {tuple(shapes[0])}."
    edges = [{(u, v) for u, v in net.graph.edges if {u, v} <= shared} for net in (old, new)]
    for u, v in sorted(edges[1] - edges[0]):
        yield f"Site '{v}' reads '{u}' now, which the guide takes no account of."
    for u, v in sorted(edges[0] - edges[1]):
        yield f"Site '{v}' does not read '{u}' any more."
    for name in sorted(shared & before.conjugate.keys() - now.conjugate.keys()):
        yield f"The conditional of '{name}' is not Gaussian any more, which the guide takes it for."
    for plate in sorted(before.flattened.keys() & now.sizes.keys()):
        if before.sizes[plate] != now.sizes[plate]:
            yield (
                f"Plate '{plate}' has {now.sizes[plate]} instances, not {before.sizes[plate]}; those of "
                f"'{before.flattened[plate]}' are one block of fixed size."
            )


def _names(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
