"""Cost of sampling step by step from a masked network, against one dense pass and against a pass per variable.

Every variable has a location and a log scale that read all variables before it; a sample is drawn from them and fed
back. Times are medians of repetitions taken in turn in one run, after a warm-up, so ratios are comparable. A second
table gives the overhead on a network so small that only calls count. Run with::

    python benchmarks/sampling.py [--smoke | --full]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_nami.networks import MaskedMLP

RESULTS = Path(__file__).parent / "results" / "sampling.json"
LIMIT = 4.0


def autoregressive(variables: int, hidden_features: tuple[int, ...]) -> MaskedMLP:
    """A network with two rows per variable that read the variables before it, weights random throughout."""
    dependency = torch.ones(variables, variables, dtype=torch.bool).tril(-1).repeat_interleave(2, 0)
    inputs, outputs = [0] + [1] * (variables - 1) + [1], [2] * variables + [0]
    mlp = MaskedMLP(dependency, hidden_features, input_splits=inputs, output_splits=outputs)
    nn.init.normal_(mlp.output, std=0.01)
    return mlp


def draw(rows: Tensor) -> Tensor:
    """A reparameterized draw from location and log scale, ``(batch, 2)``."""
    return rows[:, :1] + rows[:, 1:].exp() * torch.randn(len(rows), 1)


def sample_incremental(mlp: MaskedMLP, batch: int) -> Tensor:
    """Samples of all variables, ``(batch, variables)``, by one pass in steps."""
    state: Any = mlp.start()
    x, values = torch.empty(batch, 0), []
    for step in range(mlp.in_features):
        rows, state = state.advance(x, step + 1)
        x = draw(rows)
        values.append(x)
    return torch.cat(values, -1)


def sample_naive(mlp: MaskedMLP, batch: int) -> Tensor:
    """Samples of all variables by a dense pass for each one."""
    values = torch.zeros(batch, mlp.in_features)
    for variable in range(mlp.in_features):
        x = draw(mlp(values)[:, 2 * variable : 2 * variable + 2])
        values = torch.cat((values[:, :variable], x, values[:, variable + 1 :]), -1)
    return values


def medians(
    functions: Mapping[str, Callable[[], object]], repeats: int, calls: int = 1
) -> dict[str, float]:
    """Median seconds a call of each function, repetitions taken in turn after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(calls):
                function()
            if repeat:
                times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def measure_large(
    variables: int, hidden_features: tuple[int, ...], batch: int, repeats: int, naive: bool
) -> list[dict]:
    """Times with and without gradients (forward and backward) for one network."""
    mlp = autoregressive(variables, hidden_features)
    x = torch.randn(batch, variables)
    passes: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: mlp(x),
        "incremental": lambda: sample_incremental(mlp, batch),
    }
    if naive:
        passes["naive"] = lambda: sample_naive(mlp, batch)
    records = []
    for gradient in (False, True):

        def timed(function: Callable[[], Tensor], gradient: bool = gradient) -> Callable[[], None]:
            def call() -> None:
                mlp.zero_grad()
                with torch.set_grad_enabled(gradient):
                    value = function().sum()
                if gradient:
                    value.backward()

            return call

        chosen = {
            name: timed(function)
            for name, function in passes.items()
            if name != "naive" or not gradient
        }
        seconds = medians(chosen, repeats)
        network = {
            "variables": variables,
            "hidden_features": hidden_features,
            "batch": batch,
            "gradient": gradient,
        }
        ratios = {name: value / seconds["dense"] for name, value in seconds.items()}
        records.append({**network, "seconds": seconds, "ratio": ratios})
    return records


def measure_tiny(repeats: int, calls: int, width: int = 32) -> dict[str, float]:
    """Microseconds of three advances and of single ones, one hidden layer, against a plain network of the size."""
    plain = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, 6))
    x = torch.randn(1, 3)
    chunks = [x[:, :0], x[:, :1], x[:, 1:2]]
    mlp = autoregressive(3, (width,))

    def steps() -> Tensor:
        state: Any = mlp.start()
        total = torch.zeros(())
        for step, chunk in enumerate(chunks):
            rows, state = state.advance(chunk, step + 1)
            total = total + rows.sum()
        return total

    def backward(function: Callable[[], Tensor]) -> None:
        function().sum().backward()

    states: list[Any] = [mlp.start()]
    for step, chunk in enumerate(chunks[:2]):
        states.append(states[-1].advance(chunk, step + 1)[1])
    functions: dict[str, Callable[[], object]] = {
        "plain": partial(plain, x),
        "dense": partial(mlp, x),
        "start": mlp.start,
        **{
            f"advance {step}": partial(states[step].advance, chunks[step], step + 1)
            for step in range(3)
        },
        "three steps": steps,
        "plain, backward": partial(backward, partial(plain, x)),
        "dense, backward": partial(backward, partial(mlp, x)),
        "three steps, backward": partial(backward, steps),
    }
    return {name: 1e6 * value for name, value in medians(functions, repeats, calls).items()}


def report(large: list[dict], tiny: dict[str, float]) -> None:
    """Prints both tables."""
    print(
        f"{'hidden':>14} {'gradient':>8} {'dense ms':>9} {'steps ms':>9} {'ratio':>6} {'naive':>7}   (limit {LIMIT})"
    )
    for record in large:
        seconds, ratio = record["seconds"], record["ratio"]
        naive = f"{ratio['naive']:7.1f}" if "naive" in ratio else f"{'-':>7}"
        hidden = "x".join(map(str, record["hidden_features"]))
        print(
            f"{hidden:>14} {record['gradient']!s:>8} {1e3 * seconds['dense']:9.1f} "
            f"{1e3 * seconds['incremental']:9.1f} {ratio['incremental']:6.2f} {naive}"
        )
    print("\n3 inputs, width 32, microseconds")
    for name, microseconds in tiny.items():
        print(f"{name:<34}{microseconds:14.1f}")


def main() -> None:
    """Measures, prints and writes ``results/sampling.json``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--smoke",
        action="store_true",
        help="small networks, to see that it runs; writes no results",
    )
    size.add_argument("--full", action="store_true", help="also a dense pass per variable (slow)")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    variables, width, batch, repeats, calls = 127, 1024, 1000, arguments.repeats, 200
    if arguments.smoke:
        variables, width, batch, repeats, calls = 15, 64, 10, 1, 2
    large = []
    for hidden_features in ((width,), (width, width)):
        large += measure_large(variables, hidden_features, batch, repeats, naive=arguments.full)
    tiny = measure_tiny(repeats, calls)
    report(large, tiny)
    if arguments.smoke:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    record = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "large": large,
        "tiny": tiny,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
