"""What a call of the model has other than a guide's first call, as sentences: two structures compared.

Change this module when a guide's structure holds something more that calls may differ in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pyro_nami.guide.structure import Plan

__all__ = ["differences"]


def differences(before: Plan, now: Plan) -> Iterator[str]:
    """Yields one sentence for each difference between the structures of two calls of one model."""
    old, new = before.bayesnet, now.bayesnet
    yield from (f"Site '{name}' is new." for name in sorted(now.names - before.names))
    yield from (f"Site '{name}' is missing." for name in sorted(before.names - now.names))
    shared = old.sites.keys() & new.sites.keys()
    for name in [name for name in old.sites if name in shared]:
        if old.sites[name].observed != new.sites[name].observed:
            yield f"Site '{name}' is {'observed' if new.sites[name].observed else 'latent'} now."
        a, b = before.sites.get(name), now.sites.get(name)
        if a is None or b is None:
            continue
        if a.event_dim != b.event_dim:
            yield f"Site '{name}' has {b.event_dim} event dims, not {a.event_dim}."
        if a.plates != b.plates:
            yield f"Site '{name}' is in plates {_names(b.plates)}, not {_names(a.plates)}."
        shapes = [each.sites[name].encoding.event_shape for each in (before, now) if name in each.order]
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            yield f"Site '{name}' has the event shape {tuple(shapes[1])}, not {tuple(shapes[0])}."
    edges = [{(u, v) for u, v in net.graph.edges if {u, v} <= shared} for net in (old, new)]
    for u, v in sorted(edges[1] - edges[0]):
        yield f"Site '{v}' reads '{u}' now, which the guide takes no account of."
    for u, v in sorted(edges[0] - edges[1]):
        yield f"Site '{v}' does not read '{u}' any more."
    for name in sorted(shared & before.groups.keys() - now.groups.keys()):
        yield f"The conditional of '{name}' is not Gaussian any more, which the guide takes it for."
    sizes, others = before.plates.sizes, now.plates.sizes
    for plate in sorted(before.blocks.keys() & others.keys()):
        if sizes[plate] != others[plate]:
            yield (
                f"Plate '{plate}' has {others[plate]} instances, not {sizes[plate]}; those of "
                f"'{before.blocks[plate]}' are one block of fixed size."
            )


def _names(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
