"""Times graph inversion against the time of writing the inverse's edges into an empty `networkx.DiGraph`.

    python benchmarks/inversion.py [--smoke] [--repeats 5] [--output benchmarks/results/inversion.json]

Prints a table, and writes it as JSON. A ratio is the best time of `nami` over the best time of adding the same edges.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import networkx as nx

from pyro_nami.graph import BayesNet, nami

OUTPUT = Path(__file__).parent / "results" / "inversion.json"


def binary_tree(depth: int) -> BayesNet:
    n = 2**depth - 1
    return BayesNet.from_edges(
        [((i - 1) // 2, i) for i in range(1, n)], observed=range(n // 2, n), nodes=range(n)
    )


def chain(n: int) -> BayesNet:
    return BayesNet.from_edges([(i, i + 1) for i in range(n - 1)], observed=[n - 1], nodes=range(n))


def hidden_markov(n: int) -> BayesNet:
    """One observation a state; its exact inverse has about n^2 / 2 edges, since no state forgets an observation."""
    edges = [(("z", i), ("z", i + 1)) for i in range(n - 1)] + [
        (("z", i), ("x", i)) for i in range(n)
    ]
    return BayesNet.from_edges(edges, observed=[("x", i) for i in range(n)])


def star(n: int) -> BayesNet:
    edges = [("mu", ("z", i)) for i in range(n)] + [(("z", i), ("x", i)) for i in range(n)]
    return BayesNet.from_edges(edges, observed=[("x", i) for i in range(n)])


def mixture(n: int, components: int = 10) -> BayesNet:
    edges = [("pi", ("z", i)) for i in range(n)] + [(("z", i), ("x", i)) for i in range(n)]
    edges += [(("mu", k), ("x", i)) for i in range(n) for k in range(components)]
    return BayesNet.from_edges(edges, observed=[("x", i) for i in range(n)])


def plated_hidden_markov(n: int) -> BayesNet:
    net = hidden_markov(n)
    edges = [*net.edges, *(("drift", ("z", i)) for i in range(n))]
    plates = {name: ["sequence"] for name in net.sites}
    return BayesNet.from_edges(
        edges, observed=net.observed, plates=plates, plate_sizes={"sequence": 1000}
    )


FULL = {
    "binary tree": (binary_tree, (5, 7, 9, 10), ("forward", "reverse", "free")),
    "chain": (chain, (10_000, 100_000), ("forward", "reverse")),
    "hidden Markov": (hidden_markov, (300, 1_000), ("forward", "reverse", "free")),
    "star": (star, (1_000, 30_000), ("reverse",)),
    "mixture": (mixture, (100, 400), ("forward", "reverse")),
    "plated hidden Markov": (plated_hidden_markov, (30, 100), ("forward", "reverse")),
}
SMOKE_SIZES = {"binary tree": (3, 5), "chain": (1_000,), "star": (100,)}


def best(call: Callable[[], object], repeats: int) -> float:
    """The least time of several calls, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(name: str, net: BayesNet, size: int, direction: str, repeats: int) -> dict[str, object]:
    inverse = nami(net, direction=direction)
    edges = list(inverse.to_networkx().edges)
    seconds = best(lambda: nami(net, direction=direction), repeats)
    writing = best(lambda: nx.DiGraph().add_edges_from(edges), repeats)
    return {
        "network": name,
        "size": size,
        "sites": len(net.sites),
        "direction": direction,
        "edges": inverse.num_edges,
        "grounded_edges": inverse.num_grounded_edges,
        "levels": len(inverse.levels),
        "seconds": seconds,
        "writing_seconds": writing,
        "ratio": seconds / writing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="small networks, to see that it runs; writes no results",
    )
    parser.add_argument("--repeats", type=int, default=5, help="calls per time; the best counts")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the JSON goes")
    options = parser.parse_args()

    rows = []
    print(
        f"{'network':22}{'sites':>8}{'direction':>11}{'edges':>10}{'seconds':>10}{'writing':>10}{'ratio':>8}"
    )
    for name, (build, sizes, directions) in FULL.items():
        for size in SMOKE_SIZES.get(name, ()) if options.smoke else sizes:
            net = build(size)
            for direction in directions:
                row = measure(name, net, size, direction, options.repeats)
                rows.append(row)
                print(
                    f"{name:22}{row['sites']:8}{direction:>11}{row['edges']:10}{row['seconds']:10.4f}"
                    f"{row['writing_seconds']:10.4f}{row['ratio']:8.1f}",
                    flush=True,
                )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "networkx": nx.__version__,
        "processor": platform.machine(),
    }
    if options.smoke:
        return
    options.output.write_text(
        json.dumps({"machine": machine, "smoke": options.smoke, "rows": rows}, indent=2) + "\n"
    )
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
