"""`AutoNaMIGuide` in place of Pyro's own guides, on models of Pyro's examples and tutorials, at several Adam rates.

A drop-in guide should train whatever the guide that it replaces trains. Each model (see `example_models`) is trained
by SVI for the same number of steps with every guide at every rate, guides as they come (``Guide(model)``), from the
same seeds; then the ELBO is estimated from many single draws. A run that fails is a row like any other: its status
says NaN, error (with the message) or timeout. One process runs one guide on one example, so that its peak memory is
its own; memory is the growth of the peak over what the model alone needed. Guides take unequal times a step, so that
``--cpu-seconds`` trains each for as many seconds of processor time, its first call included. Run with::

    python benchmarks/pyro_examples.py [--smoke] [--only NAME ...] [--guides NAME ...] [--rates RATE ...]
        [--steps N | --cpu-seconds SECONDS] [--seeds N] [--jobs N] [--out PATH]
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import math
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyro
import torch
from example_models import EXAMPLES, Example
from pyro.infer import SVI, autoguide
from pyro.infer.autoguide import AutoGuide
from pyro.optim import Adam

from pyro_nami import AutoNaMIGuide

__all__ = ["EXAMPLES", "Example", "Row", "run"]

FOLDER = Path(__file__).parent / "results"
OURS, BASELINE = "AutoNaMIGuide", "AutoNormal"
GUIDES = (BASELINE, "AutoMultivariateNormal", OURS)
# of ours, for ``--guides``
VARIANTS: dict[str, dict] = {OURS: {}, "amortized": {"mode": "amortized"}}
RATES = (0.001, 0.01, 0.05)
PARTICLES = 200
SECONDS = 90
_GIVE_UP = 20  # losses in a row that are not finite
_WARM_UP = 10  # steps that are not timed


@dataclass
class Row:
    """What came of one run; ``elbo`` and ``error`` (its standard error) in nats, ``memory`` in MiB."""

    example: str
    guide: str
    rate: float
    seed: int
    status: str = "finite"
    message: str = ""
    cpu_seconds: float | None = None  # given for training, where it is not a number of steps
    steps: int = 0
    not_finite: int = 0
    elbo: float | None = None
    error: float | None = None
    milliseconds: float | None = None
    first_step: float | None = None
    memory: float | None = None


class OutOfTime(BaseException):
    """Raised by the alarm; no `Exception`, so that no handler on the way takes it for its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` inside the block after ``seconds``."""

    def ring(*_: object) -> None:
        raise OutOfTime

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def make_guide(name: str, model: Callable, example: Example) -> AutoGuide:
    """The guide with default settings; with the example's plates where it takes them."""
    kind = AutoNaMIGuide if name in VARIANTS else getattr(autoguide, name)
    options = dict(VARIANTS.get(name, {}))
    if example.plates is not None and "create_plates" in inspect.signature(kind).parameters:
        options["create_plates"] = example.plates
    return kind(example.guided(model), **options)


def run(
    name: str,
    guide: str,
    rate: float,
    seed: int = 0,
    steps: int | None = None,
    particles: int = PARTICLES,
    cpu_seconds: float | None = None,
) -> Row:
    """Trains one guide on one example at one rate, and scores it; never raises for what the guide does.

    With ``cpu_seconds`` it takes steps until the process has been busy for so long since the guide was made.
    """
    example, row = EXAMPLES[name], Row(name, guide, rate, seed, cpu_seconds=cpu_seconds)
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    model, args = example.model(), example.args
    before = peak_memory()
    budget: Iterable[int] = range(steps or example.steps)
    if cpu_seconds is not None:
        end = time.process_time() + cpu_seconds
        budget = itertools.takewhile(lambda _: time.process_time() < end, itertools.count())
    try:
        fitted = make_guide(guide, model, example)
        svi = SVI(model, fitted, Adam({"lr": rate}), example.elbo())
        train(svi, example, args, row, budget)
        if row.status != "NaN":
            pyro.set_rng_seed(1000 + seed)
            score(model, fitted, example, args, row, particles)
    except Exception as error:  # whatever a guide or a model raises is a result
        row.status = "error" if parameters_finite() else "NaN"
        row.message = f"{type(error).__name__}: {error}".splitlines()[0]
    row.memory = peak_memory() - before
    return row


def train(svi: SVI, example: Example, args: tuple, row: Row, steps: Iterable[int]) -> None:
    """Takes a step for each of ``steps``, fewer where the losses stay NaN or the time is up."""
    times, bad = [], 0
    try:
        with time_limit(SECONDS):
            for _ in steps:
                start = time.perf_counter()
                loss = svi.step(*args, **example.kwargs)
                times.append(1e3 * (time.perf_counter() - start))
                row.steps += 1
                bad = 0 if math.isfinite(loss) else bad + 1
                row.not_finite += not math.isfinite(loss)
                if bad == _GIVE_UP:
                    break
    except OutOfTime:
        row.status = "timeout"
    finally:
        row.first_step = times[0] if times else None
        row.milliseconds = statistics.median(times[_WARM_UP:] or times[1:]) if times[1:] else None
    if bad:
        row.status = "NaN"


def score(
    model: Callable, guide: AutoGuide, example: Example, args: tuple, row: Row, particles: int
) -> None:
    """The ELBO as an average of losses of single draws, with its standard error."""
    elbo, losses = example.elbo(), []
    try:
        with time_limit(SECONDS / 3), torch.no_grad():
            for _ in range(particles):
                losses.append(
                    -elbo.loss(model, guide, *args, **{**example.kwargs, **example.scored})
                )
    except OutOfTime:
        pass
    if len(losses) < 2:
        return
    row.elbo, row.error = statistics.fmean(losses), statistics.stdev(losses) / len(losses) ** 0.5
    if not math.isfinite(row.elbo):
        row.status, row.elbo, row.error = "NaN", None, None


def parameters_finite() -> bool:
    """Whether all that Pyro trains is finite, so that an error is not for want of that."""
    return all(
        bool(value.isfinite().all()) for _, value in pyro.get_param_store().named_parameters()
    )


def peak_memory() -> float:
    """Peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rates_of(example: Example, rates: Sequence[str] | None) -> list[float]:
    """The rates asked for, or the common ones and the example's own."""
    asked = rates or (*RATES, "own")
    return sorted({example.rate if rate == "own" else float(rate) for rate in asked})


def here(name: str, guide: str, seed: int, arguments: argparse.Namespace) -> Iterator[Row]:
    """The rows of one guide on one example, at all rates."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for rate in rates_of(EXAMPLES[name], arguments.rates):
        particles = 5 if arguments.smoke else PARTICLES
        yield run(name, guide, rate, seed, arguments.steps, particles, arguments.cpu_seconds)


def work(name: str, guide: str, seed: int, arguments: argparse.Namespace) -> None:
    """What a child process does: prints each row as a line of JSON."""
    for row in here(name, guide, seed, arguments):
        print(json.dumps(asdict(row)), flush=True)


def delegate(name: str, guide: str, seed: int, arguments: argparse.Namespace) -> list[Row]:
    """The rows of a child process; those that it died before are errors."""
    rates = rates_of(EXAMPLES[name], arguments.rates)
    command = [sys.executable, str(Path(__file__)), "--work", name, guide, str(seed)]
    command += ["--rates", *map(str, rates)] + ["--smoke"] * arguments.smoke
    if arguments.steps is not None:
        command += ["--steps", str(arguments.steps)]
    if arguments.cpu_seconds is not None:
        command += ["--cpu-seconds", str(arguments.cpu_seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=60 + 1.5 * SECONDS * len(rates),
        )
        output, message = child.stdout, (child.stderr.strip().splitlines() or ["died"])[-1]
    except subprocess.TimeoutExpired as stopped:
        output, message = (stopped.stdout or b"").decode(), "killed after the time limit"
    rows = [Row(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    missing = rates[len(rows) :]
    return rows + [
        Row(name, guide, rate, seed, status="error", message=message) for rate in missing
    ]


def ratio(row: Row, rows: Sequence[Row]) -> float | None:
    """Step time relative to the baseline's in the same setting, None where either is not known."""
    base = find(rows, row, BASELINE)
    if base is None or not base.milliseconds or not row.milliseconds:
        return None
    return row.milliseconds / base.milliseconds


def find(rows: Sequence[Row], like: Row, guide: str) -> Row | None:
    """The row of another guide in the same setting."""
    key = (like.example, guide, like.rate, like.seed)
    return next((row for row in rows if (row.example, row.guide, row.rate, row.seed) == key), None)


def show(row: Row, rows: Sequence[Row]) -> None:
    """Prints one line of the table."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    elbo = "-" if row.elbo is None else f"{row.elbo:.2f} ± {row.error:.2f}"
    print(
        f"{row.example:<23} {row.guide:<23} {row.rate:<7g} {row.seed:<2} {row.status:<8} {row.steps:>5} "
        f"{elbo:>20} {number(row.milliseconds):>8} {number(ratio(row, rows)):>6} {number(row.memory, 0):>5}"
        f"  {row.message[:120]}".rstrip(),
        flush=True,
    )


def verdicts(rows: Sequence[Row]) -> list[dict]:
    """Per example and rate: is our ELBO at least the baseline's, and that of Pyro's best guide?"""
    settings = dict.fromkeys((row.example, row.rate) for row in rows if row.guide == OURS)
    return [
        verdict([row for row in rows if (row.example, row.rate) == setting]) for setting in settings
    ]


def gap(ours: Sequence[Row], others: Sequence[Row]) -> tuple[float, float] | None:
    """What our ELBO is over another guide's, on average over the seeds that this has one for; and the noise of that.

    Noise is two standard errors: of the difference over seeds, which share the data and a model's own networks, or of
    both estimates where there is one seed. None where the other guide has no ELBO; minus infinity where only ours has
    none.
    """
    by_seed = {row.seed: row for row in ours}
    pairs = [
        (by_seed[row.seed], row) for row in others if row.elbo is not None and row.seed in by_seed
    ]
    if not pairs:
        return None
    over = [-math.inf if mine.elbo is None else mine.elbo - row.elbo for mine, row in pairs]
    if len(pairs) == 1 or -math.inf in over:
        mine, row = pairs[0]
        return min(over), 2 * math.hypot(mine.error or 0.0, row.error)
    return statistics.fmean(over), 2 * statistics.stdev(over) / len(over) ** 0.5


def verdict(rows: Sequence[Row]) -> dict:
    """Of one setting: ours against the baseline, less 0.05 nats or 0.1%, and against all guides, less the noise.

    None where the other guides have no ELBO; False where only ours has none.
    """
    by_guide: dict[str, list[Row]] = {}
    for row in rows:
        by_guide.setdefault(row.guide, []).append(row)
    ours = by_guide.pop(OURS)
    gaps = {
        guide: found
        for guide, others in by_guide.items()
        if (found := gap(ours, others)) is not None
    }
    base = gaps.get(BASELINE)
    best = min(gaps, key=lambda guide: gaps[guide][0], default=None)
    level = (
        statistics.fmean(row.elbo for row in by_guide[BASELINE] if row.elbo is not None)
        if base
        else 0.0
    )
    return {
        "example": ours[0].example,
        "rate": ours[0].rate,
        "seeds": len(ours),
        "status": next((row.status for row in ours if row.status != "finite"), "finite"),
        "as_baseline": None if base is None else base[0] >= -max(0.05, 1e-3 * abs(level)),
        "within_noise": None if base is None else base[0] >= -max(0.05, 1e-3 * abs(level), base[1]),
        "as_best": None if best is None else all(over >= -noise for over, noise in gaps.values()),
        "over_baseline": None if base is None or math.isinf(base[0]) else base[0],
        "noise": None if base is None else base[1],
        "over_best": None if best is None or math.isinf(gaps[best][0]) else gaps[best][0],
        "best": best,
    }


def summarize(results: list[dict]) -> None:
    """Prints the verdicts and their counts."""
    print(
        f"\n{'example':<23} {'rate':<7} seeds {'status':<8} {'- AutoNormal':>13} {'noise':>7} {'- best':>10}  best"
    )
    for result in results:
        marks = [" " if result[key] is not False else "!" for key in ("as_baseline", "as_best")]
        gaps = [
            "-" if result[key] is None else f"{result[key]:.2f}"
            for key in ("over_baseline", "noise", "over_best")
        ]
        print(
            f"{result['example']:<23} {result['rate']:<7g} {result['seeds']:<5} {result['status']:<8} "
            f"{gaps[0]:>12}{marks[0]} {gaps[1]:>7} {gaps[2]:>9}{marks[1]}  {result['best'] or '-'}"
        )
    counts = (
        ("as_baseline", "AutoNormal"),
        ("within_noise", "it, within noise"),
        ("as_best", "the best, within noise"),
    )
    for key, what in counts:
        known = [result[key] for result in results if result[key] is not None]
        print(f"as good as {what}: {sum(known)} of {len(known)}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="three steps of four examples, the first in a child process, to see that it runs; writes no results",
    )
    parser.add_argument(
        "--only", nargs="+", choices=EXAMPLES, metavar="NAME", help="examples to run"
    )
    parser.add_argument("--guides", nargs="+", default=GUIDES, metavar="NAME", help="guides to run")
    parser.add_argument("--rates", nargs="+", help="numbers or own; default: 0.001 0.01 0.05 own")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, help="default: the example's own")
    budget.add_argument(
        "--cpu-seconds", type=float, help="processor time for each run, in place of steps"
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes at a time, of one thread each"
    )
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument(
        "--work", nargs=3, metavar=("NAME", "GUIDE", "SEED"), help=argparse.SUPPRESS
    )
    return parser.parse_args()


def rows_of(
    settings: Sequence[tuple[str, str, int]], arguments: argparse.Namespace
) -> Iterator[list[Row]]:
    """The rows of settings, each in a child process and as it ends; a smoke run starts one child alone."""
    if arguments.smoke:
        yield delegate(*settings[0], arguments)
        for setting in settings[1:]:
            yield list(here(*setting, arguments))
        return
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for future in as_completed(
            [pool.submit(delegate, *setting, arguments) for setting in settings]
        ):
            yield future.result()


def main() -> None:
    """Runs all, prints the table, and writes ``results/pyro_examples.json``."""
    arguments = parse()
    if arguments.smoke:
        arguments.only = arguments.only or ["eight_schools", "gmm", "lda", "hmm_1"]
        arguments.rates, arguments.steps = arguments.rates or ["own"], arguments.steps or 3
        arguments.cpu_seconds = None
    if arguments.work:
        name, guide, seed = arguments.work
        return work(name, guide, int(seed), arguments)
    settings = [
        (name, guide, seed)
        for name in arguments.only or EXAMPLES
        for seed in range(arguments.seeds)
        for guide in arguments.guides
    ]
    rows: list[Row] = []
    print(
        f"{'example':<23} {'guide':<23} {'rate':<7} s  {'status':<8} steps {'ELBO':>20} {'ms/step':>8} "
        f"{'ratio':>6} {'MiB':>5}"
    )
    for found in rows_of(settings, arguments):
        rows += found
        for row in found:
            show(row, rows)
    results = verdicts(rows)
    summarize(results)
    file = "pyro_examples.json" if arguments.cpu_seconds is None else "pyro_examples_seconds.json"
    default = None if arguments.smoke or arguments.only else FOLDER / file
    write(arguments.out or default, rows, results)


def write(path: Path | None, rows: Sequence[Row], results: list[dict]) -> None:
    """Writes rows and verdicts as JSON, unless there is nowhere to."""
    if path is None:
        return
    record = {
        "torch": torch.__version__,
        "pyro": pyro.__version__,
        "python": platform.python_version(),
        "particles": PARTICLES,
        "rows": [{**asdict(row), "ratio": ratio(row, rows)} for row in rows],
        "verdicts": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
