"""A large noisy-OR whose weights are sparse: one training step's time and memory against the number of entries.

    python benchmarks/noisy_or.py           # prints a table, writes results/noisy_or.json
    python benchmarks/noisy_or.py --smoke

As many causes as effects, entries at random, 128 points a step, weights that learn, one draw; the guide is the bound's
(`inverse="mean_field"`). Each size runs in a process of its own, whose memory is told above that of the imports.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO

from pyro_nami import AutoNaMIGuide

sys.path.append(str(Path(__file__).parent.parent / "examples" / "noisy_or"))

from noisy_or_distribution import NoisyOr  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "noisy_or.json"
BATCH = 128


def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(size, entries, steps):
    """Returns time of set-up and of steps, and peak memory, of a model with so many causes and entries."""
    before = megabytes()
    pyro.set_rng_seed(0)
    places, prior, leak = (
        torch.randint(size, (2, entries)),
        torch.full((size,), 0.01),
        torch.full((size,), 0.01),
    )

    def model(x):
        values = pyro.param(
            "weights", lambda: torch.rand(entries), constraint=dist.constraints.positive
        )
        weights = torch.sparse_coo_tensor(places, values, (size, size), check_invariants=True)
        with pyro.plate("points", len(x)):
            z = pyro.sample("z", dist.Bernoulli(prior).to_event(1))
            pyro.sample("x", NoisyOr(weights, leak, z), obs=x)

    x = torch.bernoulli(torch.full((2 * BATCH, size), 0.05))
    svi = SVI(
        model,
        AutoNaMIGuide(model, inverse="mean_field"),
        pyro.optim.Adam({"lr": 0.01}),
        Trace_ELBO(),
    )
    times = []
    for _ in range(steps + 3):  # of which the first sets up, and two warm up
        start = time.perf_counter()
        svi.step(x[torch.randint(len(x), (BATCH,))])
        times.append(time.perf_counter() - start)
    return {
        "size": size,
        "entries": entries,
        "setup_seconds": times[0],
        "step_seconds": statistics.median(times[3:]),
        "peak_memory_mb": megabytes() - before,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke", action="store_true", help="seconds rather than minutes; writes nothing"
    )
    parser.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)  # size, entries, steps
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    size, counts, steps = (
        (100, (100, 1000), 1) if options.smoke else (10_000, (10_000, 100_000, 1_000_000), 5)
    )
    rows = []
    for count in counts:
        command = [sys.executable, __file__, "--one", *map(str, (size, count, steps))]
        rows.append(
            json.loads(
                subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1]
            )
        )
    print("    size  entries  set-up s  step s     MB")
    for row in rows:
        print("{:>8} {:>8} {:>9.1f} {:>7.2f} {:>6.0f}".format(*row.values()))
    if not options.smoke:
        RESULTS.write_text(json.dumps({"batch": BATCH, "sizes": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
