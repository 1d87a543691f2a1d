"""One table of the benchmark page for all benchmarks that ask for a few numbers: time, memory, accuracy at other sizes.

Each function is a benchmark, as lines of cells divided by ``|``: what was measured, and what was found.
"""

from __future__ import annotations

from collections.abc import Iterator

from results_text import grouped, load, percent, span, spread

__all__ = ["TABLES"]


def costs() -> list[str]:
    """The benchmarks in the order of the alphabet."""
    of = (
        compilation,
        flat_priors,
        inversion,
        noisy_or,
        npe,
        plates,
        rates,
        sampling,
        svi_step,
    )
    lines = [f"`{benchmark.__name__}.py` | {line}" for benchmark in of for line in benchmark()]
    return ["Script | measured | found", *lines]


def compilation() -> Iterator[str]:
    results = load("compilation")
    ratios = [
        f"`{method}` {ratio:.1f} times" for method, ratio in results["throughput"]["ratios"].items()
    ]
    yield f"simulations a second of `InferenceCompilation`, 31-site tree, against | {', '.join(ratios)}"
    runs = results["schools"]["runs"]
    effective = ", ".join(percent(run["ess"]) for run in runs)
    k = ", ".join(f"{run['pareto_k']:.2f}" for run in runs)
    yield f"eight schools compiled, on the real data, three seeds: effective share of draws; k-hat | {effective}; {k}"


def flat_priors() -> Iterator[str]:
    rows = load("flat_priors")["rows"]
    learned = sum(bool(row["learned"]) for row in rows)
    mean, sd = (max(row[key] for row in rows) for key in ("mean", "sd"))
    yield (
        "16 linear regressions of posteriordb under flat priors, each written in eight ways: guides with anything to"
        f" learn; means, and sds, off by at most; CPU s | {learned} of {len(rows)}; {mean:.3f} sd, {percent(sd, 1)};"
        f" {spread([row['seconds'] for row in rows])}"
    )


def inversion() -> Iterator[str]:
    for (network, direction), rows in grouped(
        load("inversion")["rows"], "network", "direction"
    ).items():
        if network in ("binary tree", "chain") and direction != "free":
            row = max(rows, key=lambda row: row["sites"])
            edges = f"{row['edges']:,} edges"
            yield (
                f"inverting a {network} of {row['sites']:,} sites, {direction}, {edges}; against writing these into"
                f" networkx | {row['seconds']:.2f} s; {row['ratio']:.1f} times"
            )


def noisy_or() -> Iterator[str]:
    rows = load("noisy_or")["sizes"]
    entries = ", ".join(f"{row['entries']:,}" for row in rows)
    steps, memory, first = (
        ", ".join(f"{row[key] / unit:.3g}" for row in rows)
        for key, unit in (("step_seconds", 1), ("peak_memory_mb", 1e3), ("setup_seconds", 1))
    )
    yield (
        f"noisy-OR of 10,000 causes and effects, {entries} learned weights: a step of 128 points; peak memory; set-up"
        f" | {steps} s; {memory} GB; {first} s"
    )


def npe() -> Iterator[str]:
    methods = load("npe")["methods"].items()
    told = [
        f"{'ours' if name == 'guide' else name} {method['kl_per_latent']:.3f} in {method['seconds']:.0f} s"
        for name, method in methods
    ]
    yield f"KL a latent to the exact posterior, tree of 127 latents, 10,000 simulations; sbi's NPE | {', '.join(told)}"


def plates() -> Iterator[str]:
    results = load("plates")
    rows = ", ".join(f"{row['rows']:,}" for row in results["scale"])
    ratios = ", ".join(f"{row['ratio']:.1f}" for row in results["scale"])
    yield f"one SVI step, varying intercepts, {rows} rows, against `AutoNormal` | {ratios} times"
    sizes = ", ".join(
        f"{row['new_size_ms']:.0f} ms ({row['ratio']:.1f})" for row in results["sizes"]
    )
    yield f"a call with data of a new size (times a call at the old one), same rows | {sizes}"
    for run in results["sets"]:
        options = [f"{key}=False" for key in ("exact", "evidence") if not run[key]]
        label = f"`{', '.join(options)}`" if options else "default"
        errors = [
            f"{error['mean_error_in_sds']:.2f} sd, {percent(error['sd_error'], 1)}"
            for error in run["errors"].values()
        ]
        members = ", ".join(f"{int(size):,}" for size in run["errors"])
        yield (
            "a group's mean in a conjugate hierarchy trained at 5 to 50 members: mean and sd off by, at"
            f" {members} members, {label} | {'; '.join(errors)}"
        )


def rates() -> Iterator[str]:
    for model, rows in grouped(load("rates")["rows"], "model").items():
        gaps = ", ".join(f"{abs(row['gaps'][0]):.3f}" for row in rows)
        at = ", ".join(f"{row['rate']:g}" for row in rows)
        yield f"exact log evidence minus ELBO, {model}, after {rows[0]['steps']:,} steps at {at} | {gaps} nats"


def sampling() -> Iterator[str]:
    ratios = [row["ratio"]["incremental"] for row in load("sampling")["large"]]
    yield f"drawing 127 variables from a masked network of width 1,024, against one dense pass | {span(ratios)} times"


def svi_step() -> Iterator[str]:
    for row in load("svi_step")["records"]:
        low, high = row["ratio_quartiles"]
        yield (
            f"one SVI step, {row['model']}, against `{row['baseline']}`"
            f" | {row['ratio']:.2f} times (quartiles {low:.2f} to {high:.2f})"
        )


TABLES = {"costs": costs}
