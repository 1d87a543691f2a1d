"""A module imports only from lower layers; within a layer, only from its own package (DESIGN, section 2)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pyro_nami"
LAYERS = {
    "graph": 0,
    "nn": 0,
    "distributions": 0,
    "families": 0,
    "infer": 0,
    "extraction": 1,
    "given_maps": 1,
    "group_testing": 1,
    "index_maps": 1,
    "isolation": 1,
    "messages": 1,
    "map_search": 1,
    "nesting": 1,
    "provenance": 1,
    "replay": 1,
    "simulation": 1,
    "conditioning": 2,
    "covariates": 1,
    "render": 2,
    "sources": 2,
    "guides": 3,
    "cli": 4,
    "__main__": 5,
    "__init__": 6,
}
WITHIN_A_LAYER = {0: {("families", "distributions")}, 2: {("sources", "conditioning")}}
TOGETHER = {1}  # layer 1 is one part in several modules: extraction and what it runs models with
FORBIDDEN = {"graph": {"torch", "pyro"}, "nn": {"pyro"}}


def unit(module: str) -> str:
    """The part that a module of the package belongs to: ``pyro_nami.guides.nami`` -> ``guides``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path, package: Path = PACKAGE) -> list[str]:
    """Absolute names of all modules that a file imports, at any depth of its code."""
    here = list(path.relative_to(package.parent).with_suffix("").parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            whole = module in ("pyro_nami", "")
            found += [f"{module}.{alias.name}" for alias in node.names] if whole else [module]
    return found


def violations(path: Path, package: Path = PACKAGE) -> list[str]:
    """What a file imports against the rule."""
    own = path.relative_to(package).with_suffix("").parts[0]
    wrong = []
    for module in imports(path, package):
        top = module.split(".")[0]
        if top in FORBIDDEN.get(own, ()):
            wrong.append(f"{own} imports {module}")
        if top != "pyro_nami" or unit(module) == own:
            continue
        other = unit(module)
        if other not in LAYERS:
            wrong.append(f"{own} imports {module}, which is in no layer")
            continue
        mine, theirs = LAYERS[own], LAYERS[other]
        beside = mine == theirs and (mine in TOGETHER or (own, other) in WITHIN_A_LAYER.get(mine, ()))
        if theirs >= mine and not beside:
            wrong.append(f"{own} (layer {mine}) imports {module} (layer {theirs})")
    return wrong


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_lower_layers(path):
    assert path.relative_to(PACKAGE).with_suffix("").parts[0] in LAYERS, "a new part needs a layer"
    assert violations(path) == []


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ("graph/a.py", "import torch"),
        ("nn/a.py", "def f():\n    from pyro.nn import PyroModule"),
        ("graph/a.py", "from ..guides import nami"),
        ("nn/a.py", "from pyro_nami import graph"),
        ("conditioning.py", "from .guides.nami import AutoNaMIGuide"),
        ("distributions/a.py", "import pyro_nami.families.base"),
        ("extraction.py", "from pyro_nami.unheard_of import x"),
    ],
)
def test_upward_import_is_found(tmp_path, part, code):
    path = tmp_path / "pyro_nami" / part
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert len(violations(path, tmp_path / "pyro_nami")) == 1
