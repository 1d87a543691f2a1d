"""Inference compilation: its speed, how close guides come to exact posteriors, and importance sampling with them.

Three sections, all by default:

- ``throughput``: joint simulations consumed per second on a binary tree of 31 Gaussian sites with its 16 leaves
  observed, batch 500, by `InferenceCompilation`, by `pyro.infer.CSIS` and by `ReweightedWakeSleep` with sleep particles
  only. All three train the same guide with the same optimizer, and take turns in one run.
- ``tree``: KL(p(z | x) || q(z | x)) in nats, averaged over the model's own data, on such trees for five inverses: in
  all, the least that the structure allows (exact, by linear algebra), and the gap between the two, which is what the
  networks cost. 2,000 steps of batch 250, separate networks with about 160,000 parameters (Webb et al. 2018, D.2).
- ``schools``: eight schools (centered) compiled on simulations alone; importance sampling on the real data.

Run with::

    python benchmarks/compilation.py [--smoke] [--only throughput,tree,schools] [--trees 10]
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import CSIS, SVI, ReweightedWakeSleep
from pyro.optim import ClippedAdam
from svi_step import EFFECTS, ERRORS, eight_schools

from pyro_nami import (
    AutoNaMIGuide,
    BayesNet,
    InferenceCompilation,
    Inverse,
    fully_connected,
    importance_sample,
    mean_field,
    nami,
    stuhlmueller,
)

sys.path.append(str(Path(__file__).parent.parent / "examples" / "paper"))

from gaussian_tree import GaussianTree  # noqa: E402
from tree_training import closest_width, divergence, network_of  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "compilation.json"
INVERSES: dict[str, Callable[[BayesNet], Inverse]] = {
    "reverse": functools.partial(nami, direction="reverse"),
    "forward": functools.partial(nami, direction="forward"),
    "fully_connected": fully_connected,
    "stuhlmueller": stuhlmueller,
    "mean_field": mean_field,
}
TARGETS = {"CSIS": 100.0, "ReweightedWakeSleep": 1.5}
KL_TARGETS = {"reverse": 0.03, "forward": 0.06}
NUM_PARAMETERS = 160_000
LEARNING_RATE, STEPS = 1e-2, 2000
TREE_BATCH, SCHOOLS_BATCH = 250, 250
SCHOOLS_OPTIONS = {"learning_rate": 5e-3, "clip_norm": 10.0}
LOG_EVIDENCE = -31.3113  # of eight schools, by quadrature


def compiler(
    model: Callable, guide: Callable, steps: int, batch_size: int, **options: Any
) -> InferenceCompilation:
    """Adam with a learning rate that goes from ``learning_rate`` to zero along half a cosine."""
    learning_rate = options.pop("learning_rate", LEARNING_RATE)
    return InferenceCompilation(
        model,
        guide,
        functools.partial(torch.optim.Adam, lr=learning_rate),
        batch_size=batch_size,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        **options,
    )


# ---- throughput


def throughput(smoke: bool) -> dict:
    """Simulations a second of CPU time of each way of training, and ratios, medians over rounds.

    CPU time of the one thread that works is wall time on an idle machine, and nearly so on a busy one.
    """
    rounds, depth, batch = (1, 3, 10) if smoke else (5, 5, 500)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    tree = GaussianTree(depth, seed=0)
    leaves = tree.example()
    guide, optim = AutoNaMIGuide(tree), ClippedAdam({"lr": 1e-3})
    sleep = ReweightedWakeSleep(
        insomnia=0.0,
        num_particles=2,
        num_sleep_particles=batch,
        max_plate_nesting=0,
        model_has_params=False,
    )
    ours = InferenceCompilation(tree, guide, optim, batch_size=batch)
    fast: dict[str, Any] = {
        "InferenceCompilation": ours,
        "ReweightedWakeSleep": SVI(tree, guide, optim, sleep),
    }
    slow = CSIS(tree, guide, optim, training_batch_size=batch)
    times: dict[str, list[float]] = {name: [] for name in (*fast, "CSIS")}

    def take(name: str, way: Any, calls: int) -> None:
        start = time.process_time()
        for _ in range(calls):
            way.step(leaves)
        times[name].append((time.process_time() - start) / calls)

    for turn in range(rounds + 1):
        for _ in range(1 if smoke else 10):
            for name, way in fast.items():
                take(name, way, 5)
        if turn == 0:  # a warm-up
            times = {name: [] for name in times}
        else:
            take("CSIS", slow, 1)
    mine = times["InferenceCompilation"]
    ratios = {
        "ReweightedWakeSleep": statistics.median(
            b / a for a, b in zip(mine, times["ReweightedWakeSleep"])
        ),
        "CSIS": statistics.median(times["CSIS"]) / statistics.median(mine),
    }
    rates = {name: batch / statistics.median(values) for name, values in times.items()}
    print(
        f"{2**depth - 1}-site tree, batch {batch}: simulations a second, and times fewer than compilation"
    )
    for name, rate in rates.items():
        against = f"{ratios[name]:8.2f}  at least {TARGETS[name]:g}" if name in ratios else ""
        print(f"  {name:<22}{rate:10,.0f}{against}")
    return {
        "sites": 2**depth - 1,
        "batch": batch,
        "simulations_per_second": rates,
        "ratios": ratios,
        "targets": TARGETS,
    }


# ---- trees


def compile_tree(
    tree: GaussianTree, inverse: Inverse, steps: int, num_parameters: int, num: int
) -> dict:
    """Compiles one tree on one inverse, and measures the guide on ``num`` simulations."""
    width = closest_width(tree, inverse, num_parameters, shared=False, skip=True).width
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoNaMIGuide(
        tree,
        inverse=inverse,
        hidden_features=(width, width),
        shared=False,
        anchor=False,
        init_scale=1.0,
    )
    start = time.perf_counter()
    compiler(tree, guide, steps, TREE_BATCH).fit(steps, (tree.example(),), progress=False)
    seconds = time.perf_counter() - start
    kl, error = divergence(tree, guide, num)
    limit = tree.limit(inverse)
    return {
        "kl": kl,
        "kl_standard_error": error,
        "limit": limit,
        "gap": kl - limit,
        "parameters": guide.num_parameters,
        "width": width,
        "seconds": seconds,
    }


def compile_trees(
    seeds: Iterable[int],
    depth: int = 5,
    steps: int = STEPS,
    num_parameters: int = NUM_PARAMETERS,
    num: int = 50_000,
) -> dict[str, list[dict]]:
    """Returns inverse -> a record for every tree."""
    runs: dict[str, list[dict]] = {name: [] for name in INVERSES}
    for seed in seeds:
        tree = GaussianTree(depth, seed)
        net = network_of(tree)
        for name, inversion in INVERSES.items():
            runs[name].append(compile_tree(tree, inversion(net), steps, num_parameters, num))
    return runs


def report_trees(runs: dict[str, list[dict]], steps: int = STEPS) -> dict:
    """Prints means and standard deviations over trees; returns the section's record."""
    count = len(runs["reverse"])
    print(f"KL(p(z|x) || q) in nats on {count} trees, mean (sd), {steps:,} steps of {TREE_BATCH}")
    print(
        f"  {'inverse':<16}{'KL':>16}{'limit':>16}{'gap':>16}{'parameters':>12}{'seconds':>9}  target"
    )
    for name, records in runs.items():
        line = f"  {name:<16}"
        for key in ("kl", "limit", "gap"):
            values = [record[key] for record in records]
            line += f"{statistics.mean(values):8.4f} ({statistics.pstdev(values):.3f})".rjust(16)
        seconds = statistics.median(record["seconds"] for record in records)
        target = f"at most {KL_TARGETS[name]}" if name in KL_TARGETS else ""
        print(f"{line}{records[0]['parameters']:12,}{seconds:9.0f}  {target}".rstrip())
    return {"steps": steps, "batch": TREE_BATCH, "learning_rate": LEARNING_RATE, "trees": runs}


def trees(smoke: bool, count: int) -> dict:
    """Every inverse on the same trees."""
    if smoke:
        return report_trees(compile_trees([0], 3, 3, 200, 100), 3)
    return report_trees(compile_trees(range(count)))


# ---- eight schools


def compile_schools(seed: int, steps: int, num_samples: int) -> dict:
    """Compiles eight schools on simulations alone, and samples the posterior of the real data by importance."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    sigma, y = torch.tensor(ERRORS), torch.tensor(EFFECTS)
    guide = AutoNaMIGuide(eight_schools, families="flow")
    start = time.perf_counter()
    compiler(eight_schools, guide, steps, SCHOOLS_BATCH, **SCHOOLS_OPTIONS).fit(
        steps, (sigma, y), progress=False
    )
    seconds = time.perf_counter() - start
    result = importance_sample(eight_schools, guide, sigma, y, num_samples=num_samples)
    return {
        "seed": seed,
        "ess": (result.effective_sample_size / num_samples).item(),
        "pareto_k": result.pareto_k.item(),
        "log_evidence": result.log_evidence.item(),
        "seconds": seconds,
    }


def schools(smoke: bool, steps: int = 2 * STEPS, num_samples: int = 20_000) -> dict:
    """Three seeds."""
    if smoke:
        steps, num_samples = 3, 200
    print(
        f"eight schools, {steps:,} steps of {SCHOOLS_BATCH} simulations; {num_samples:,} draws for the real data"
    )
    print(
        f"  seed  ESS of draws (at least 40%)  k-hat (under 0.5)  log evidence (exact {LOG_EVIDENCE})  seconds"
    )
    records = []
    for seed in range(1 if smoke else 3):
        records.append(record := compile_schools(seed, steps, num_samples))
        print(
            f"  {seed:4}{record['ess']:28.0%}{record['pareto_k']:19.2f}{record['log_evidence']:31.4f}"
            f"{record['seconds']:9.0f}"
        )
    return {
        "steps": steps,
        "batch": SCHOOLS_BATCH,
        **SCHOOLS_OPTIONS,
        "draws": num_samples,
        "runs": records,
    }


def main() -> None:
    """Measures, prints, and writes the sections measured to ``results/compilation.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps, to see that it runs; writes no results"
    )
    parser.add_argument(
        "--only", default="throughput,tree,schools", help="sections, separated by commas"
    )
    parser.add_argument("--trees", type=int, default=10, help="number of trees")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sections: dict[str, Callable[[], dict]] = {
        "throughput": lambda: throughput(arguments.smoke),
        "tree": lambda: trees(arguments.smoke, arguments.trees),
        "schools": lambda: schools(arguments.smoke),
    }
    chosen = arguments.only.split(",")
    for name in chosen:
        if name not in sections:
            parser.error(f"Expected --only to name sections, of {', '.join(sections)}; got {name}.")
    for name in chosen:
        record = sections[name]()
        if arguments.smoke:
            continue
        versions = {
            "torch": torch.__version__,
            "pyro": pyro.__version__,
            "python": platform.python_version(),
        }
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({**results, **versions, name: record}, indent=2) + "\n")


if __name__ == "__main__":
    main()
