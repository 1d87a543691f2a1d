"""The order of rooms is a law: a module imports from its own room and from earlier ones."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "pyro_nami"
ROOMS = [
    "graph",
    "factors",
    "networks",
    "program",
    "reading",
    "deriving",
    "parameters",
    "guide",
    "inference",
    "annealing",
    "fit",
    "amortize",
    "checking",
    "show",
]
RANK = {"messages": -1, **{room: rank for rank, room in enumerate(ROOMS)}}
# room -> packages that it reaches by no way
KEPT_OUT = {"graph": {"torch", "pyro"}, "networks": {"pyro"}}


def module_of(path: Path) -> str:
    """Returns a file's dotted name below the package, a folder's for its ``__init__``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


# The package's own __init__ and __main__ stand above all rooms.
CODE = {
    module_of(path): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.parent != PACKAGE or path.name == "messages.py"
}


def imported(code: str) -> list[tuple[str, bool]]:
    """Returns the dotted names that a file imports, and whether it does so inside a function."""
    tree = ast.parse(code)
    top = set(map(id, tree.body))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, id(node) not in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names += [(f"{module}.{alias.name}", id(node) not in top) for alias in node.names]
    return names


def source_of(name: str) -> str | None:
    """Returns the module of ours that an imported name comes from."""
    parts = name.split(".")[1:]
    prefixes = [".".join(parts[:stop]) for stop in range(len(parts), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in CODE), None)


def violations(module: str, code: str) -> list[str]:
    """Returns the imports of a module's code that are against the order of rooms."""
    room = module.split(".")[0]
    wrong = []
    for name, is_inside in imported(code):
        if name.startswith("."):
            wrong.append(f"{name} is relative")
        if name.split(".")[0] != "pyro_nami":
            continue
        if is_inside:
            wrong.append(f"{name} is imported inside a function")
        source = source_of(name)
        if source is None:
            wrong.append(f"{name} is in none of our modules")
        elif RANK[source.split(".")[0]] > RANK[room]:
            wrong.append(f"{module} imports {source}, of a later room")
    return wrong


def dependencies(code: dict[str, str]) -> dict[str, set[str]]:
    """Returns module -> the modules of ours that it imports, and packages of others."""
    found = {}
    for module, text in code.items():
        names = [name for name, _ in imported(text)]
        found[module] = {source_of(name) or name.split(".")[0] for name in names}
    return found


@functools.cache
def package_graph() -> dict[str, set[str]]:
    """Returns the dependencies of the package's own modules."""
    return dependencies(CODE)


def packages_reached(module: str, graph: dict[str, set[str]]) -> set[str]:
    """Returns the packages of others that importing a module brings in, directly or through our modules."""
    seen, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph.get(name, ())
    return seen - graph.keys()


def test_every_module_is_in_a_room():
    assert {module.split(".")[0] for module in CODE} == RANK.keys()


@pytest.mark.parametrize("module", CODE)
def test_a_module_imports_from_its_own_room_and_earlier_ones(module):
    assert violations(module, CODE[module]) == []


def test_no_modules_import_each_other():
    graphlib.TopologicalSorter(package_graph()).prepare()  # raises CycleError


@pytest.mark.parametrize("module", [module for module in CODE if module.split(".")[0] in KEPT_OUT])
def test_a_room_of_torch_or_of_graphs_alone_reaches_nothing_else(module):
    assert not packages_reached(module, package_graph()) & KEPT_OUT[module.split(".")[0]]


def test_only_one_module_follows_what_a_distribution_wraps():
    assert [module for module, code in CODE.items() if "base_dist" in code] == ["factors.wrappers"]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("graph.inverse", "from ..guide import nami"),
        ("graph.network", "from pyro_nami.factors.links import squash"),
        ("guide.nami", "from pyro_nami.inference.target import Target"),
        ("inference.simulate", "from pyro_nami.amortize import amortize"),
        ("factors.family", "import pyro_nami.guide.nami"),
        ("guide.nami", "def f():\n    from pyro_nami.graph.inverse import Inverse"),
        ("reading.extraction", "from pyro_nami.unheard_of import x"),
    ],
)
def test_an_import_against_the_order_is_found(module, code):
    assert len(violations(module, code)) == 1


def test_a_circle_is_found():
    circle = {
        "graph.sites": "import pyro_nami.graph.network",
        "graph.network": "import pyro_nami.graph.sites",
    }
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(dependencies(circle)).prepare()


def test_a_package_that_comes_in_through_another_module_is_found():
    through = {
        "networks.masks": "from pyro_nami.factors.links import x",
        "factors.links": "import pyro",
    }
    assert packages_reached("networks.masks", dependencies(through)) == {"pyro"}
