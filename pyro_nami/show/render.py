"""`render`: drawings of a `BayesNet` or an `Inverse` as text, Mermaid, DOT, or Graphviz images.

A network is laid out once (nested boxes of nodes, and edges) and written in the requested format.
Only images and the graphviz object need the extra ``viz``.
"""

from __future__ import annotations

__all__ = ["IMAGE_FORMATS", "render"]

import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet, label, plate_list

if TYPE_CHECKING:
    import graphviz

IMAGE_FORMATS = ("png", "svg", "pdf", "ps", "eps", "jpg", "gif", "webp")
_INSTALL = "pip install pyro_nami[viz]"


def render(
    structure: BayesNet | Inverse, format: str = "text", path: str | PathLike[str] | None = None
) -> str | bytes | graphviz.Source:
    """Draws a network or an inverse.

    Plates are drawn as Pyro's `render_model` draws them, as nested boxes with their name and, here, their size;
    a plate that crosses another without being nested in it is drawn once inside and once outside. Observed sites are
    shaded. In an inverse, edges between sites that are not adjacent in the model (fill-in) are dashed, edges that
    read all instances of a plate name it, joint blocks name their plates, and latents that keep the model's own
    conditional (predictive ones) have a dotted border and say so.

    Args:
        structure: a `BayesNet` or an `Inverse`.
        format: ``"text"``, ``"mermaid"``, ``"dot"``; ``"graphviz"`` (for notebooks); or of `IMAGE_FORMATS` (bytes).
        path: a file to write the result to as well.

    Raises:
        TypeError: the structure is of another type.
        ValueError: the format is not known.
        ImportError: the format needs the graphviz package, which is missing.
        RuntimeError: the format needs the Graphviz program ``dot``, which is missing.

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
    writers: dict[str, Callable[[BayesNet | Inverse], str | bytes | graphviz.Source]] = {
        "text": str,
        "mermaid": _mermaid,
        "dot": _dot,
        "graphviz": _source,
        **{image: partial(_image, format=image) for image in IMAGE_FORMATS},
    }
    if format not in writers:
        raise ValueError(f"Expected format to be one of {', '.join(writers)}; got {format!r}.")
    drawn = writers[format](structure)
    if path is not None:
        content = drawn if isinstance(drawn, (str, bytes)) else drawn.source
        Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())
    return drawn


class Node(NamedTuple):
    """A site as it is drawn; ``lines`` are its name and what there is to say about it."""

    id: str
    lines: tuple[str, ...]
    observed: bool
    border: str  # "solid", "dashed" (marginalized) or "dotted" (predictive)


class Edge(NamedTuple):
    """An arrow; ``text`` is empty where there is nothing to say."""

    source: str
    target: str
    dashed: bool
    text: str


@dataclass
class Box:
    """A plate, or the whole drawing: the nodes in it and the plates nested in it."""

    title: str = ""
    nodes: list[Node] = field(default_factory=list)
    boxes: dict[Hashable, Box] = field(default_factory=dict)


def _draw(structure: BayesNet | Inverse) -> tuple[Box, list[Edge]]:
    net = structure if isinstance(structure, BayesNet) else structure.net
    shown = [name for name, site in net.sites.items() if structure is net or not site.marginalized]
    ids = {name: f"n{i}" for i, name in enumerate(shown)}
    # A plate whose sites are among another's is drawn inside it.
    count = Counter(itertools.chain.from_iterable(net.plates.values()))
    nesting = sorted(
        net.plate_sizes, key=lambda plate: (-count[plate], len(net.nesting.get(plate, ())))
    )
    outer = Box()
    for name in shown:
        box = outer
        for plate in nesting:
            if plate in net.plates[name]:
                # The size of a ragged nested plate is its number of instances in all outer ones together.
                size = f"{net.plate_sizes[plate]}{' in all' if plate in net.nesting else ''}"
                box = box.boxes.setdefault(plate, Box(f"{label(plate)} ({size})"))
        box.nodes.append(_node(structure, net, name, ids[name]))
    return outer, list(_edges(structure, ids))


def _node(structure: BayesNet | Inverse, net: BayesNet, name: Hashable, id: str) -> Node:
    lines = [label(name)]
    border = "solid"
    site = net.sites[name]
    if site.marginalized:
        lines, border = [*lines, "marginalized"], "dashed"
    if isinstance(structure, Inverse) and structure.joint.get(name):
        lines.append(f"jointly over {plate_list(net, structure.joint[name])}")
    if isinstance(structure, Inverse) and name in structure.predictive:
        lines, border = [*lines, "from the model"], "dotted"
    return Node(id, tuple(lines), site.observed, border)


def _edges(structure: BayesNet | Inverse, ids: Mapping[Hashable, str]) -> Iterator[Edge]:
    if isinstance(structure, BayesNet):
        yield from (Edge(ids[u], ids[t], False, "") for u, t in structure.edges)
        return
    adjacent = {frozenset(edge) for edge in structure.net.edges}
    for v in reversed(structure.order):
        for u in structure.parents[v]:
            pooled = plate_list(structure.net, structure.pooled(v, u))
            yield Edge(
                ids[u],
                ids[v],
                frozenset((u, v)) not in adjacent,
                f"over {pooled}" if pooled else "",
            )


def _mermaid(structure: BayesNet | Inverse) -> str:
    outer, edges = _draw(structure)
    body = list(_mermaid_box(outer, "  ", itertools.count()))
    for edge in edges:
        text = f'|"{_mermaid_text(edge.text)}"|' if edge.text else ""
        body.append(f"  {edge.source} {'-.->' if edge.dashed else '-->'}{text} {edge.target}")
    styles = {
        "observed": "fill:#bbb",
        "dashed": "stroke-dasharray:6 4",
        "dotted": "stroke-dasharray:2 2",
    }
    used = [
        f"  classDef {name} {style}"
        for name, style in styles.items()
        if any(f":::{name}" in b for b in body)
    ]
    return "\n".join(["flowchart TD", *body, *used])


def _mermaid_box(box: Box, indent: str, numbers: Iterator[int]) -> Iterator[str]:
    for node in box.nodes:
        style = "observed" if node.observed else node.border
        text = "<br>".join(map(_mermaid_text, node.lines))
        yield f'{indent}{node.id}(["{text}"])' + (f":::{style}" if style != "solid" else "")
    for inner in box.boxes.values():
        yield f'{indent}subgraph p{next(numbers)}["{_mermaid_text(inner.title)}"]'
        yield from _mermaid_box(inner, indent + "  ", numbers)
        yield f"{indent}end"


def _mermaid_text(text: str) -> str:
    """Text for a quoted Mermaid label, everything that could be markup as a character code."""
    return re.sub(r"[^\w .,:()\[\]'/-]", lambda found: f"#{ord(found[0])};", text)


def _dot(structure: BayesNet | Inverse) -> str:
    outer, edges = _draw(structure)
    body = list(_dot_box(outer, "  ", itertools.count()))
    for edge in edges:
        options = ["style=dashed"] * edge.dashed + [f"label={_dot_text(edge.text)}"] * bool(
            edge.text
        )
        body.append(
            f"  {edge.source} -> {edge.target}" + (f" [{', '.join(options)}]" if options else "")
        )
    return "\n".join(["digraph {", *body, "}"])


def _dot_box(box: Box, indent: str, numbers: Iterator[int]) -> Iterator[str]:
    for node in box.nodes:
        fill = "gray" if node.observed else "white"
        style = "filled" if node.border == "solid" else f'"filled,{node.border}"'
        yield f"{indent}{node.id} [label={_dot_text(*node.lines)}, style={style}, fillcolor={fill}]"
    for inner in box.boxes.values():
        yield f"{indent}subgraph cluster_{next(numbers)} {{"
        yield f"{indent}  label={_dot_text(inner.title)}; labeljust=r; labelloc=b"
        yield from _dot_box(inner, indent + "  ", numbers)
        yield f"{indent}}}"


def _dot_text(*lines: str) -> str:
    """Lines as one quoted DOT string; ``&`` would otherwise start an entity, and a backslash an escape."""
    escaped = (
        line.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for line in lines
    )
    return '"' + "\\n".join(escaped) + '"'


def _source(structure: BayesNet | Inverse) -> graphviz.Source:
    try:
        import graphviz
    except ImportError as error:
        raise ImportError(
            f"Expected the graphviz package for this format; got none. Run `{_INSTALL}`."
        ) from error
    return graphviz.Source(_dot(structure))


def _image(structure: BayesNet | Inverse, format: str) -> bytes:
    source = _source(structure)
    import graphviz

    try:
        return source.pipe(format=format)
    except graphviz.ExecutableNotFound as error:
        raise RuntimeError(
            f"Expected the Graphviz program `dot` on the PATH to draw {format!r}; got none. `{_INSTALL}` brings the "
            "Python package; install the program with `apt install graphviz`, `brew install graphviz` or "
            "`conda install graphviz`. Formats text, mermaid and dot need neither."
        ) from error
