"""The order of modules is a law: each imports only from modules before it (DESIGN, section 2)."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Rooms in order, and in each its modules in order. A room's __init__ comes behind its modules.
ORDER = {
    "": "messages",
    "graph": "sites network elimination min_fill inverse inversions verification",
    "factors": "wrappers completed links sparse noisy_or bounds joint bijections layout gumbel_softmax elements "
    "truncated_normal knots path_scored joint_normal boxed_normal normals types anchors distribution family own_type "
    "unconstrained registry",
    "networks": "masks pace reductions running pooling precision_sums stepped masked "
    "separate stack",
    "reading": "isolation provenance group_testing draws flat runner parts vectorized first_run starts covariates "
    "changes masks probe interventions index_maps.finder index_maps.nesting index_maps.given index_maps.search network "
    "conjugate_group expansion batched conjugate_forms in_turn bounded enumeration gaussian_levels second_order "
    "joint_gaussian gaussian_constants grids modes tabulated newton refutation forms marginal",
    "guide": "arguments ahead mode options conditioning free_parameters store_names parameters groups group_network "
    "inputs inversion inverse_network network_state regression one_pass rules plan target shapes first_call columns "
    "element_reads placing bound_factors call starts marginals planner deriving build maps memory own_data reader "
    "observed draw exchangeable lazy misfits densities nami",
    "inference": "site_messages simulator_model observations target checkpoint history psis processes trackers "
    "optimizers soap summaries weights weighing importance work simulate coordinates outside moves batches losses "
    "relaxation trainer compilation tempering transitions annealing refining estimates iterative "
    "iterative_elbo gaps rounds posterior amortizing",
    "checking": "rank_tests plots simulations calibration misspecification diagnosis",
    "show": "render report model_file commands",
}
MODULES = [f"{room}.{name}".strip(".") for room, names in ORDER.items() for name in names.split()]
RANK = {name: rank for rank, name in enumerate(MODULES)}
FORBIDDEN = {"graph": {"torch", "pyro"}, "networks": {"pyro"}}


def imports(code: str) -> list[tuple[str, bool]]:
    """What a file imports, ``module.name``, and whether it does so inside a function."""
    tree = ast.parse(code)
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(f"{module}.{alias.name}", id(node) not in top) for alias in node.names]
    return found


def violations(module: str, code: str) -> list[str]:
    """What the code of a module (named below the package) imports against the rule."""
    wrong, room = [], module.split(".")[0]
    for name, inside in imports(code):
        first, *rest = name.split(".")
        if first in FORBIDDEN.get(room, ()):
            wrong.append(f"{room} imports {first}")
        if first == "":
            wrong.append(f"{name} is relative")
        if first != "pyro_nami":
            continue
        if inside:
            wrong.append(f"{name} is imported inside a function")
        source = next((".".join(rest[:n]) for n in range(len(rest), 0, -1) if ".".join(rest[:n]) in RANK), None)
        if source is None:
            wrong.append(f"{name} is in no module that has a place in the order")
        elif RANK[source] >= RANK[module]:
            wrong.append(f"{module} imports {source}, which comes behind it")
    return wrong


def test_every_module_has_a_place():
    files = (ROOT / "pyro_nami").rglob("*.py")
    found = {".".join(path.relative_to(ROOT / "pyro_nami").with_suffix("").parts) for path in files}
    assert {name for name in found if not name.endswith("__")} == RANK.keys()
    assert len(RANK) == len(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_modules_before_it(module):
    code = (ROOT / "pyro_nami" / (module.replace(".", "/") + ".py")).read_text()
    assert violations(module, code) == []


def test_only_one_module_follows_what_a_distribution_wraps():
    files = (ROOT / "pyro_nami").rglob("*.py")
    assert [path.name for path in files if "base_dist" in path.read_text()] == ["wrappers.py"]


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("graph.inverse", "import torch"),
        ("networks.masked", "def f():\n    from pyro.nn import PyroModule"),
        ("graph.inverse", "from ..guide import nami"),
        ("graph.network", "from pyro_nami.graph.inverse import Inverse"),
        ("networks.masks", "from pyro_nami import graph"),
        ("guide.nami", "from pyro_nami.guide import AutoNaMIGuide"),
        ("factors.family", "import pyro_nami.guide.nami"),
        ("guide.nami", "def f():\n    from pyro_nami.graph.inverse import Inverse"),
        ("reading.network", "from pyro_nami.unheard_of import x"),
    ],
)
def test_an_import_against_the_order_is_found(module, code):
    assert len(violations(module, code)) == 1
