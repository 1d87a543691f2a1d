"""`render`: drawings of a `BayesNet` or an `Inverse` as text or Mermaid."""

from __future__ import annotations

__all__ = ["render"]

import itertools
import re
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet, label, plate_list


def render(structure: BayesNet | Inverse, format: str = "text") -> str:
    """Draws a network or an inverse.

    Plates are drawn as Pyro's `render_model` draws them, as nested boxes with their name and, here, their size;
    a plate that crosses another without being nested in it is drawn once inside and once outside. Observed sites are
    shaded. In an inverse, edges between sites that are not adjacent in the model (fill-in) are dashed, edges that
    read all instances of a plate name it, joint blocks name their plates, and latents that keep the model's own
    conditional (predictive ones) have a dotted border and say so.

    Args:
        structure: a `BayesNet` or an `Inverse`.
        format: ``"text"`` or ``"mermaid"``.

    Raises:
        TypeError: the structure is of another type.
        ValueError: the format is not known.

    Example:
        >>> net = BayesNet.from_edges([("z", "x")], observed=["x"])
        >>> print(render(net, "mermaid"))
        flowchart TD
          n0(["z"])
          n1(["x"]):::observed
          n0 --> n1
          classDef observed fill:#bbb
    """
    if not isinstance(structure, (BayesNet, Inverse)):
        raise TypeError(f"Expected a BayesNet or an Inverse; got {type(structure).__name__}.")
    if format not in ("text", "mermaid"):
        raise ValueError(f"Expected format to be 'text' or 'mermaid'; got {format!r}.")
    return str(structure) if format == "text" else _mermaid(structure)


@dataclass
class NodeBox:
    """A plate, or the whole drawing: Mermaid's text of the nodes in it, and the plates nested in it."""

    title: str = ""
    nodes: list[str] = field(default_factory=list)
    boxes: dict[Hashable, NodeBox] = field(default_factory=dict)

    def lines(self, indent: str, numbers: Iterator[int]) -> Iterator[str]:
        """Yields the lines of all nodes; each nested box takes the next of the numbers."""
        for node in self.nodes:
            yield indent + node
        for inner in self.boxes.values():
            yield f'{indent}subgraph p{next(numbers)}["{_escaped(inner.title)}"]'
            yield from inner.lines(indent + "  ", numbers)
            yield f"{indent}end"


_STYLES = {
    "observed": "fill:#bbb",
    "dashed": "stroke-dasharray:6 4",
    "dotted": "stroke-dasharray:2 2",
}


def _mermaid(structure: BayesNet | Inverse) -> str:
    inverse = structure if isinstance(structure, Inverse) else None
    net = structure.net if isinstance(structure, Inverse) else structure
    shown = [name for name, site in net.sites.items() if not (inverse and site.marginalized)]
    ids = {name: f"n{i}" for i, name in enumerate(shown)}
    # A plate whose sites are among another's is drawn inside it.
    count = Counter(itertools.chain.from_iterable(net.plates.values()))
    nesting = sorted(
        net.plate_sizes, key=lambda plate: (-count[plate], len(net.nesting.get(plate, ())))
    )
    outer = NodeBox()
    for name in shown:
        box = outer
        for plate in nesting:
            if plate in net.plates[name]:
                # The size of a ragged nested plate is its number of instances in all outer ones together.
                size = f"{net.plate_sizes[plate]}{' in all' if plate in net.nesting else ''}"
                box = box.boxes.setdefault(plate, NodeBox(f"{label(plate)} ({size})"))
        box.nodes.append(ids[name] + _node(net, inverse, name))
    edges = _inverse_edges(inverse) if inverse else ((u, "-->", v) for u, v in net.edges)
    body = list(outer.lines("  ", itertools.count()))
    body += [f"  {ids[u]} {arrow} {ids[v]}" for u, arrow, v in edges]
    for name, style in _STYLES.items():
        if any(line.endswith(f":::{name}") for line in body):
            body.append(f"  classDef {name} {style}")
    return "\n".join(["flowchart TD", *body])


def _node(net: BayesNet, inverse: Inverse | None, name: Hashable) -> str:
    """Returns the shape of a site: its lines of text, and its style, if it has one of `_STYLES`."""
    site = net.sites[name]
    lines = [label(name)]
    style = ":::observed" if site.observed else ""
    if site.marginalized:
        lines.append("marginalized")
        style = ":::dashed"
    if inverse and inverse.joint.get(name):
        lines.append(f"jointly over {plate_list(net, inverse.joint[name])}")
    if inverse and name in inverse.predictive:
        lines.append("from the model")
        style = ":::dotted"
    return f'(["{"<br>".join(map(_escaped, lines))}"]){style}'


def _inverse_edges(inverse: Inverse) -> Iterator[tuple[Hashable, str, Hashable]]:
    """Yields parent, arrow and child: arrows of fill-in are dashed, and name the plates that they pool."""
    adjacent = {frozenset(edge) for edge in inverse.net.edges}
    for v in reversed(inverse.order):
        for u in inverse.parents[v]:
            arrow = "-->" if frozenset((u, v)) in adjacent else "-.->"
            pooled = plate_list(inverse.net, inverse.pooled(v, u))
            text = f'|"{_escaped("over " + pooled)}"|' if pooled else ""
            yield u, arrow + text, v


def _escaped(text: str) -> str:
    """Returns quoted text of Mermaid's, with a character code for everything that could be markup."""
    return re.sub(r"[^\w .,:()\[\]'/-]", lambda found: f"#{ord(found[0])};", text)
