"""What the command line says of a network, an inverse and a verdict: lines of text, and objects for JSON.

Change this module to say more. Drawings are `render.py`'s, and keys of JSON are listed in the ``--help`` of
`commands.py`.
"""

from __future__ import annotations

__all__ = [
    "factors_object",
    "inverse_lines",
    "network_lines",
    "network_object",
    "notes_object",
    "steps_object",
    "verdict_lines",
    "verdict_object",
    "written",
]

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pyro_nami.graph.network import BayesNet, label, plate_list
from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.inversions import Step
from pyro_nami.graph.verification import Verification
from pyro_nami.reading.network import Extraction

Object = dict[str, Any]
_SHOWN = 12  # entries of an index map


def network_lines(extraction: Extraction) -> Iterator[str]:
    """The network, its index maps, and what extraction could not see."""
    net = extraction.bayesnet
    yield str(net)
    for (inner, outer), index in extraction.index_maps.items():
        more = ", ..." if len(index) > _SHOWN else ""
        yield f"Index map {label(inner)} -> {label(outer)}: {', '.join(map(str, index[:_SHOWN].tolist()))}{more}"
    for what, names in (
        ("Values left torch; edges from here are found by intervention", extraction.escaped),
        ("Runner randomness; taken to depend on all latents before", extraction.hidden_randomness),
    ):
        if names:
            yield f"{what}: {_labels(name for name in net.sites if name in names)}"


def inverse_lines(inverse: Inverse, steps: Sequence[Step]) -> Iterator[str]:
    """The inverse, its levels, and the steps of its elimination where there are any."""
    yield str(inverse)
    yield f"Sampled in turn: {'; '.join(_labels(level) for level in inverse.levels)}"
    if steps:
        yield "Eliminated in turn:"
    for number, step in enumerate(steps, 1):
        line = f"  {number}. {label(step.site)} among {_labels(step.frontier)}: reads "
        line += _labels(step.parents) or "nothing"
        if step.joint:
            line += f"; jointly over {plate_list(inverse.net, step.joint)}"
        if step.fill:
            line += (
                f"; fill-in {', '.join(f'{label(a)} - {label(b)}' for a, b in step.fill)}, cost {step.cost}"
            )
        yield line + ("; from the model" if step.predictive else "")


def verdict_lines(inverse: Inverse, verdict: Verification) -> Iterator[str]:
    """The verdict, then a line for every false independence and every idle dependence of the inverse."""
    yield "minimally faithful" if verdict.minimal else "faithful, not minimal" if verdict else "not faithful"
    net = inverse.net
    for (u, v), across in verdict.missing.items():
        others = f" at other instances of {plate_list(net, across)}" if across else ""
        given = f"given {_labels(inverse.parents[v])}" if inverse.parents[v] else "of all else"
        independence = f"{label(v)} is taken to be independent of {label(u)}{others}, {given}"
        yield f"  missing {label(u)} -> {label(v)}: {independence}"
    for (u, v), across in verdict.redundant.items():
        yield f"  redundant {label(u)} -> {label(v)}" + (
            f" across {plate_list(net, across)}" if across else ""
        )


def written(*parts: Mapping[str, Any]) -> str:
    """The parts as one JSON object."""
    return json.dumps({key: value for part in parts for key, value in part.items()}, indent=2)


def network_object(net: BayesNet) -> Object:
    """Sites, edges and plates: all that makes up a `BayesNet`."""
    return {
        "sites": [
            {
                "name": _name(name),
                "plates": _plates(net, site.plates),
                "observed": site.observed,
                "marginalized": site.marginalized,
                "support_parents": _sites(net, site.support_parents),
            }
            for name, site in net.sites.items()
        ],
        "edges": [[_name(u), _name(t)] for u, t in net.edges],
        "plate_sizes": dict(net.plate_sizes),
        "nesting": {plate: _plates(net, outer) for plate, outer in net.nesting.items()},
    }


def notes_object(extraction: Extraction) -> Object:
    """What extraction found besides the network."""
    net = extraction.bayesnet
    return {
        "index_maps": [
            {"plate": inner, "outer": outer, "map": index.tolist()}
            for (inner, outer), index in extraction.index_maps.items()
        ],
        "escaped": _sites(net, extraction.escaped),
        "hidden_randomness": _sites(net, extraction.hidden_randomness),
    }


def factors_object(name: str, inverse: Inverse) -> Object:
    """An inverse of this name, factor by factor in sampling order, and its size."""
    net = inverse.net
    return {
        "inverse": name,
        "factors": [
            {
                "latent": _name(v),
                "parents": [
                    {"site": _name(u), "over": _plates(net, inverse.pooled(v, u))} for u in inverse.parents[v]
                ],
                "joint": _plates(net, inverse.joint[v]),
                "predictive": v in inverse.predictive,
            }
            for v in reversed(inverse.order)
        ],
        "levels": [list(map(_name, level)) for level in inverse.levels],
        "num_edges": inverse.num_edges,
        "num_grounded_edges": inverse.num_grounded_edges,
    }


def steps_object(steps: Sequence[Step]) -> Object:
    """The steps of an elimination."""
    return {
        "steps": [
            {
                "site": _name(step.site),
                "frontier": list(map(_name, step.frontier)),
                "parents": list(map(_name, step.parents)),
                "joint": sorted(step.joint),
                "fill": [[_name(a), _name(b)] for a, b in step.fill],
                "cost": step.cost,
                "predictive": step.predictive,
            }
            for step in steps
        ]
    }


def verdict_object(net: BayesNet, verdict: Verification) -> Object:
    """Whether an inverse is faithful and minimal, and what is missing or too much."""
    found: Object = {"faithful": bool(verdict), "minimal": verdict.minimal}
    for key, pairs in (("missing", verdict.missing), ("redundant", verdict.redundant)):
        found[key] = [
            {"parent": _name(u), "latent": _name(v), "across": _plates(net, across)}
            for (u, v), across in pairs.items()
        ]
    return found


def _labels(names: Iterable[Any]) -> str:
    return ", ".join(map(label, names))


def _name(name: Any) -> str:
    """A site's name; that of the evidence which a blocked model hides is not a string."""
    return name if isinstance(name, str) else label(name)


def _sites(net: BayesNet, names: Iterable[Any]) -> list[str]:
    chosen = frozenset(names)
    return [_name(name) for name in net.sites if name in chosen]


def _plates(net: BayesNet, plates: Iterable[Any]) -> list[str]:
    chosen = frozenset(plates)
    return [plate for plate in net.plate_sizes if plate in chosen]
