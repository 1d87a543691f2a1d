"""Plates at scale: cost against rows and groups, cost of a new size, and posteriors at sizes never trained on.

    python benchmarks/plates.py             # prints tables, writes results/plates.json
    python benchmarks/plates.py --smoke
    python benchmarks/plates.py --only scale,sizes

Three questions:

* ``scale``: varying intercepts with 1e2 to 1e4 groups and ten rows each: set-up, an SVI step beside `AutoNormal`'s on
  the same model in the same run (medians of interleaved steps), peak memory.
* ``sizes``: a guide's call with new data of a new size beside a call with new data of the old size.
* ``sets``: the hierarchy m, z_n | m, y_n | z_n, trained on joint draws with N drawn log-uniformly from 5 to 50; errors
  of the posterior of m against the exact one, averaged over data sets, with evidence that adds and without.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from tqdm import tqdm

from pyro_nami import AutoNaMIGuide

RESULTS = Path(__file__).parent / "results" / "plates.json"
NOISE = 0.5


def intercepts(group, num_groups, x, y=None):
    """Varying intercepts by group, one slope."""
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfNormal(5.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 10.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(5.0))
    with pyro.plate("groups", num_groups):
        alpha = pyro.sample("alpha", dist.Normal(mu, tau))
    with pyro.plate("rows", len(x)):
        pyro.sample("y", dist.Normal(alpha[..., group] + slope * x, sigma), obs=y)


def grouped_data(rows):
    groups = rows // 10
    group, x = torch.randint(groups, (rows,)), torch.randn(rows)
    return group, groups, x, torch.randn(groups)[group] + 0.5 * x + 0.7 * torch.randn(rows)


def hierarchy(size, y=None):
    """A conjugate hierarchy: the exact posterior of m has a closed form."""
    m = pyro.sample("m", dist.Normal(0.0, 1.0))
    with pyro.plate("data", size):
        z = pyro.sample("z", dist.Normal(m, 1.0))
        pyro.sample("y", dist.Normal(z, NOISE), obs=y)


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def scale(rows, steps):
    """Returns set-up, step times and memory at one number of rows."""
    args = grouped_data(rows)
    pyro.clear_param_store()
    svis = {
        name: SVI(intercepts, guide(intercepts), pyro.optim.ClippedAdam({"lr": 0.01}), Trace_ELBO())
        for name, guide in (("AutoNormal", AutoNormal), ("AutoNaMIGuide", AutoNaMIGuide))
    }
    setup = {name: seconds(lambda svi=svi: svi.step(*args)) for name, svi in svis.items()}
    times = {name: [] for name in svis}
    for step in range(steps + 5):
        for name, svi in svis.items():
            took = seconds(lambda svi=svi: svi.step(*args))
            if step >= 5:
                times[name].append(1e3 * took)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "rows": rows,
        "groups": rows // 10,
        "setup_seconds": setup["AutoNaMIGuide"],
        "step_ms": medians,
        "ratio": medians["AutoNaMIGuide"] / medians["AutoNormal"],
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


@torch.no_grad()
def sizes(rows, calls):
    """Returns milliseconds of calls with new data, of the size before and of new sizes."""
    pyro.clear_param_store()
    guide = AutoNaMIGuide(intercepts)
    guide(*grouped_data(rows))
    guide(*grouped_data(rows))
    old, new = [], []
    for call in range(calls):
        same, other = grouped_data(rows), grouped_data(rows + 10 * (call + 1))
        old.append(1e3 * seconds(lambda same=same: guide(*same)))
        new.append(1e3 * seconds(lambda other=other: guide(*other)))
    old_ms, new_ms = statistics.median(old), statistics.median(new)
    return {"rows": rows, "old_size_ms": old_ms, "new_size_ms": new_ms, "ratio": new_ms / old_ms}


def joint_draws(size, count):
    m = torch.randn(count, 1)
    z = m + torch.randn(count, size)
    return {"m": m, "z": z}, z + NOISE * torch.randn(count, size)


def sets(evidence, steps, batch, datasets, seed, exact=False):
    """Returns errors of the posterior of m at N = 20, 200 and 2,000 after training at N = 5 to 50."""
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    guide = AutoNaMIGuide(hierarchy, evidence=evidence, exact=exact, mode="amortized")
    guide(10, torch.randn(10))
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=steps)
    # nothing is left to learn
    for _ in tqdm(range(0 if exact else steps), desc=f"evidence={evidence}", disable=None):
        size = round(math.exp(math.log(5) + math.log(10) * torch.rand(()).item()))
        latents, y = joint_draws(size, batch)
        optimizer.zero_grad()
        (-guide.log_prob(latents, size, observations={"y": y}).mean()).backward()
        optimizer.step()
        schedule.step()
    errors = {}
    with torch.no_grad():
        for size in (20, 200, 2000):
            variance = (1 + NOISE**2) / size
            mean_errors, sd_ratios = [], []
            for _ in range(datasets):
                _, y = joint_draws(size, 1)
                factor = poutine.trace(guide).get_trace(size, y[0]).nodes["m"]["fn"]
                m = factor.sample((10_000,)).flatten()
                exact_mean, exact_sd = y.mean() / (1 + variance), (1 + 1 / variance) ** -0.5
                mean_errors.append(abs(float(m.mean() - exact_mean)) / exact_sd)
                sd_ratios.append(abs(float(m.std()) / exact_sd - 1))
            errors[size] = {
                "mean_error_in_sds": statistics.mean(mean_errors),
                "sd_error": statistics.mean(sd_ratios),
            }
    return {
        "exact": exact,
        "evidence": evidence,
        "steps": steps,
        "batch": batch,
        "seed": seed,
        "errors": errors,
    }


def print_scale(rows):
    print("    rows   groups  set-up s  AutoNormal ms  AutoNaMIGuide ms  ratio     MB")
    for row in rows:
        normal, nami = row["step_ms"].values()
        print(
            f"{row['rows']:>8} {row['groups']:>8} {row['setup_seconds']:>9.2f} {normal:>14.2f} {nami:>17.2f} "
            f"{row['ratio']:>6.2f} {row['peak_memory_mb']:>6.0f}"
        )


def print_sizes(rows):
    for row in rows:
        print(
            f"{row['rows']:>8} rows: old size {row['old_size_ms']:.1f} ms, new size {row['new_size_ms']:.1f} ms"
        )


def print_sets(rows):
    for row in rows:
        for size, error in row["errors"].items():
            print(
                f"exact={row['exact']}, evidence={row['evidence']}, N = {size}: mean off by "
                f"{error['mean_error_in_sds']:.3f} exact sds, sd by {error['sd_error']:.3f}"
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="seconds rather than minutes; writes nothing"
    )
    parser.add_argument("--only", default="scale,sizes,sets", help="questions, separated by commas")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    counts = (100, 300) if options.smoke else (1000, 10_000, 100_000)
    repeats, calls = (2, 2) if options.smoke else (30, 9)
    steps, batch, datasets = (3, 16, 2) if options.smoke else (5000, 128, 100)
    questions = {
        "scale": (lambda: [scale(rows, repeats) for rows in counts], print_scale),
        "sizes": (lambda: [sizes(rows, calls) for rows in counts], print_sizes),
        "sets": (
            lambda: [
                *(sets(evidence, steps, batch, datasets, seed=0) for evidence in (True, False)),
                sets(True, steps, batch, datasets, seed=0, exact=True),
            ],
            print_sets,
        ),
    }
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    result["threads"] = options.threads
    for name in options.only.split(","):
        if name not in questions:
            parser.error(
                f"Expected --only to name questions, of {', '.join(questions)}; got {name}."
            )
        pyro.set_rng_seed(0)
        measure, show = questions[name]
        result[name] = measure()
        show(result[name])
    if not options.smoke:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
