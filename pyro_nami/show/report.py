"""Reports on a network, an inverse or a verification: as text, as JSON, and as a drawing.

JSON names sites and plates in the order of the network. Keys may be added, not changed; ``--help``
lists them.
"""

from __future__ import annotations

__all__ = ["COMMENTS", "Report", "inverse_report", "network_report", "verdict_report"]

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.min_fill import Step
from pyro_nami.graph.network import BayesNet, label, plate_list
from pyro_nami.graph.verification import Verification
from pyro_nami.reading.extraction import Extraction
from pyro_nami.show.render import render

Object = dict[str, Any]
COMMENTS = {"mermaid": "%%", "dot": "//"}


class Report(NamedTuple):
    """A report in all formats: a JSON object, lines of text, and a drawing with comments above it."""

    object: Object
    lines: Iterable[str]
    drawn: BayesNet | Inverse
    comments: Sequence[str] = ()

    def written(self, format: str, header: Object) -> str:
        """The report as text; JSON begins with the header."""
        if format == "json":
            return json.dumps(header | self.object, indent=2)
        if format == "text":
            return "\n".join(self.lines)
        comments = [f"{COMMENTS[format]} {line}" for line in self.comments]
        return "\n".join([*comments, str(render(self.drawn, format))])


def network_report(extraction: Extraction) -> Report:
    """Returns the report on a network, its index maps, and the sites that extraction could not see through."""
    net = extraction.bayesnet
    notes = {
        "index_maps": [
            {"plate": inner, "outer": outer, "map": index.tolist()}
            for (inner, outer), index in extraction.index_maps.items()
        ],
        "escaped": _sorted(extraction.escaped, net.sites),
        "hidden_randomness": _sorted(extraction.hidden_randomness, net.sites),
    }
    return Report(_network_object(net) | notes, _network_lines(extraction), net)


def inverse_report(
    name: str,
    inverse: Inverse,
    steps: Sequence[Step] | None,
    rules: Mapping[str, Any] | None = None,
) -> Report:
    """Returns the report on an inverse: its factors and levels, a guide's rules, and the steps of its elimination.

    Example:
        >>> from pyro_nami.graph.inversion_methods import nami
        >>> print(inverse_report("nami", nami(BayesNet.from_edges(["zx"], observed="x")), None).written("text", {}))
        Inverse: latents 1, edges 1, levels 1
          z | x
        Sampled in turn: z
    """
    found = _inverse_object(name, inverse)
    if rules is not None:
        found["rules"] = {site: note._asdict() for site, note in rules.items()}
    if steps is not None:
        found["steps"] = list(map(_step_object, steps))
    return Report(found, _inverse_lines(inverse, steps or (), rules or {}), inverse)


def verdict_report(title: str, name: str, inverse: Inverse, verdict: Verification) -> Report:
    """Returns the report on a verification: every missing and every redundant dependence of the inverse."""
    found = _inverse_object(name, inverse)
    found["faithful"], found["minimal"] = bool(verdict), verdict.minimal
    for key, pairs in (("missing", verdict.missing), ("redundant", verdict.redundant)):
        found[key] = []
        for (u, v), plates in pairs.items():
            across = _sorted(plates, inverse.net.plate_sizes)
            found[key].append({"parent": _name(u), "latent": _name(v), "across": across})
    lines = [f"{title}: {verdict.verdict}", *_verdict_lines(inverse, verdict)]
    return Report(found, lines, inverse, lines)


def _network_lines(extraction: Extraction) -> Iterator[str]:
    net = extraction.bayesnet
    yield str(net)
    for (inner, outer), index in extraction.index_maps.items():
        entries = np.array2string(index.cpu().numpy(), sys.maxsize, separator=", ", threshold=12)[
            1:-1
        ]
        yield f"Index map {label(inner)} -> {label(outer)}: {entries}"
    for what, names in (
        ("Values left torch; edges from here are found by intervention", extraction.escaped),
        ("Hidden randomness; taken to depend on all latents before", extraction.hidden_randomness),
    ):
        if names:
            yield f"{what}: {_labels(name for name in net.sites if name in names)}"


def _inverse_lines(
    inverse: Inverse, steps: Sequence[Step], rules: Mapping[str, Any]
) -> Iterator[str]:
    yield str(inverse)
    yield f"Sampled in turn: {'; '.join(map(_labels, inverse.levels))}"
    if rules:
        yield "Drawn by:"
    yield from (f"  {site}: {note}" for site, note in rules.items())
    if steps:
        yield "Eliminated in turn:"
    for number, step in enumerate(steps, 1):
        line = f"  {number}. {label(step.site)} among {_labels(step.frontier)}: reads "
        line += _labels(step.parents) or "nothing"
        if step.joint:
            line += f"; jointly over {plate_list(inverse.net, step.joint)}"
        if step.fill:
            line += f"; fill-in {', '.join(' - '.join(map(label, pair)) for pair in step.fill)}, cost {step.cost}"
        yield line + ("; from the model" if step.predictive else "")


def _verdict_lines(inverse: Inverse, verdict: Verification) -> Iterator[str]:
    net = inverse.net
    for (u, v), across in verdict.missing.items():
        others = f" at other instances of {plate_list(net, across)}" if across else ""
        given = f"given {_labels(inverse.parents[v])}" if inverse.parents[v] else "of all else"
        independence = f"{label(v)} is taken to be independent of {label(u)}{others}, {given}"
        yield f"  missing {label(u)} -> {label(v)}: {independence}"
    for (u, v), across in verdict.redundant.items():
        where = f" across {plate_list(net, across)}" if across else ""
        yield f"  redundant {label(u)} -> {label(v)}{where}"


def _network_object(net: BayesNet) -> Object:
    return {
        "sites": [
            {
                "name": _name(name),
                "plates": _sorted(site.plates, net.plate_sizes),
                "observed": site.observed,
                "marginalized": site.marginalized,
                "support_parents": _sorted(site.support_parents, net.sites),
            }
            for name, site in net.sites.items()
        ],
        "edges": [list(map(_name, edge)) for edge in net.edges],
        "plate_sizes": dict(net.plate_sizes),
        "nesting": {plate: _sorted(outer, net.plate_sizes) for plate, outer in net.nesting.items()},
    }


def _inverse_object(name: str, inverse: Inverse) -> Object:
    """Returns the JSON object of a network and its inverse, factor by factor in sampling order."""
    plates = inverse.net.plate_sizes
    return _network_object(inverse.net) | {
        "inverse": name,
        "factors": [
            {
                "latent": _name(v),
                "parents": [
                    {"site": _name(u), "over": _sorted(inverse.pooled(v, u), plates)}
                    for u in inverse.parents[v]
                ],
                "joint": _sorted(inverse.joint[v], plates),
                "predictive": v in inverse.predictive,
            }
            for v in reversed(inverse.order)
        ],
        "levels": [list(map(_name, level)) for level in inverse.levels],
        "num_edges": inverse.num_edges,
        "num_grounded_edges": inverse.num_grounded_edges,
    }


def _step_object(step: Step) -> Object:
    return step._asdict() | {
        "site": _name(step.site),
        "frontier": list(map(_name, step.frontier)),
        "parents": list(map(_name, step.parents)),
        "joint": sorted(step.joint),
        "fill": [list(map(_name, pair)) for pair in step.fill],
    }


def _labels(names: Iterable[Any]) -> str:
    return ", ".join(map(label, names))


def _name(name: Any) -> str:
    """Returns a site's name as a string; the hidden evidence of a blocked model has another kind of name."""
    return name if isinstance(name, str) else label(name)


def _sorted(names: Collection[Any], order: Iterable[Any]) -> list[str]:
    return [_name(name) for name in order if name in names]
