"""Tasks of the simulation-based inference benchmark by `amortize`, sbi and BayesFlow, all with their defaults.

Eight of its tasks (`sbibm_tasks.py`), with the same simulations for all methods. Told are the negative log density of
held-out latents in nats, beside the exact one where that is known, from which ours is told at ten times as many fresh
draws as well, with its standard error; seconds of training, of a core's own time; and how
well a classifier tells draws from those of the posterior (C2ST: 0.5 if not at all; mean of 5 data sets of the prior),
of 1,000 draws of the guide and of 1,000 resampled from what the posterior gives by default. References are as many from
4,000 chains by 200 temperatures from the prior, which see no guide (40 where the model solves differential equations);
of slcp, where the halves of symmetric posteriors come out as 0.4 and 0.6 by these, exact draws.
Of ours also the median share of draws that are effective, of the guide's (20 data sets, 1,000 draws each) and of the
default's (5, 4,000 draws each), and whether guide and posterior pass `calibrate` at 1,000 data sets.

Ours takes the likelihood, for moves between epochs and for weights, which methods for black boxes lack; ``black_box``
is ours without it. The others
(``pip install sbi bayesflow``, which nothing else here needs) are given logs of data that are positive, and sufficient
statistics of bernoulli_glm's; their densities and draws are those inside bounded priors. Run with::

    python benchmarks/sbibm.py [--smoke] [--simulations 10000] [--seeds 1] [--only NAME ...] [--methods NAME ...]
                               [--device cuda]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from sbibm_tasks import TASKS, Task
from torch import Tensor, nn

from pyro_nami import AmortizedPosterior, amortize, calibrate, from_simulator
from pyro_nami.annealing import annealed_importance_sampling
from pyro_nami.inference import JointDraws, Simulator

RESULTS = Path(__file__).parent / "results" / "sbibm.json"
TEST, FURTHER, DATA_SETS, DRAWS, REFERENCES, CHAINS = 2000, 20_000, 20, 1000, 5, 4
BLACK_BOX, SBI, BAYESFLOW = "black_box", ("maf", "nsf", "fmpe"), "bayesflow"
DEFAULT = ["amortize", *SBI, BAYESFLOW]
METHODS = *DEFAULT, BLACK_BOX
Sampler = Callable[[int, Tensor], Tensor]
# of the guide's draws, and of what the posterior gives by default
PAIRS = {"c2st": ".2f", "effective": ".0%"}


class Pair(NamedTuple):
    theta: Tensor
    x: Tensor


def reference(model: Callable, x: Tensor, draws: int, temperatures: int) -> Tensor:
    """Draws of the posterior ``(draws, data sets, latents)`` that no guide has seen."""
    options: dict[str, Any] = {
        "num_chains": CHAINS * draws,
        "num_leapfrog_steps": 10,
        "resample": True,
    }
    found = annealed_importance_sampling(
        model, num_temperatures=temperatures, observations={"x": x}, **options
    )
    return found.weighted().resample(draws)["theta"]


@torch.enable_grad()  # which BayesFlow turns off
def two_sample(first: Tensor, second: Tensor, steps: int) -> float:
    """Accuracy of a classifier of draws ``(draws, latents)``, by five-fold cross-validation, as in the benchmark.

    It has two layers of ten units a latent; draws are standardized by the first.
    """
    z = (torch.cat((first, second)) - first.mean(0)) / first.std(0)
    label = torch.arange(len(z)).ge(len(first)).float()
    order, width, right = torch.randperm(len(z)), 10 * z.shape[1], 0.0
    for fold in order.chunk(5):
        train = order[~torch.isin(order, fold)]
        parts = [
            nn.Linear(z.shape[1], width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        ]
        network = nn.Sequential(*parts)
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(steps):
            rows = train[torch.randint(len(train), (200,))]
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(
                network(z[rows]).squeeze(-1), label[rows]
            ).backward()
            optimizer.step()
        right += (network(z[fold]).squeeze(-1).gt(0) == label[fold].bool()).float().sum().item()
    return right / len(z)


def ours(
    task: Task, given: JointDraws, test: JointDraws, steps: int | None
) -> tuple[dict[str, Any], list[Tensor]]:
    """What is told of a compiled posterior, and draws for the first data sets: the guide's, and the default's."""
    start = time.process_time()
    posterior = amortize(task.model, observed=["x"], simulations=given, steps=steps, progress=False)
    seconds = time.process_time() - start
    x = test.observed["x"]
    with torch.no_grad():
        loss = -posterior.guide.log_prob(test.latents, observations={"x": x}).mean().item()
    draws = DRAWS if steps is None else 100
    plain = posterior({"x": x[:DATA_SETS]}, draws, num_temperatures=2, defensive=0)
    gaps = gaps_to_exact(task, posterior, FURTHER if steps is None else 20)
    sets = {"observed": ["x"], "num_datasets": 1000 if steps is None else 20}
    checked = [calibrate(task.model, posterior.guide, **sets)]
    if steps is None:  # what was trained for no more than that would have to be annealed
        checked.append(calibrate(task.model, posterior, **sets, num_draws=19))
    found = posterior(
        {"x": x[:REFERENCES]}, CHAINS * draws, num_temperatures=None if steps is None else 3
    )
    row = {
        "loss": loss,
        "gap": None
        if gaps is None
        else [gaps.mean().item(), (gaps.std() / len(gaps) ** 0.5).item()],
        "seconds": seconds,
        "effective": [
            (each.effective_sample_size / each.num_samples).median().item()
            for each in (plain, found)
        ],
        "calibrated": [each.passed for each in checked],
        "rule": posterior.guide.rules["theta"].rule,
    }
    return row, [plain.samples["theta"][:, :REFERENCES], found.resample(draws)["theta"]]


def gaps_to_exact(task: Task, posterior: AmortizedPosterior, num: int) -> Tensor | None:
    """Log density of each of so many fresh draws by the exact posterior, less that by the guide."""
    if task.exact is None:
        return None
    draws = Simulator(task.model, observed=["x"]).draw(num)
    parts = map(draws.select, torch.arange(num).split(TEST))
    with torch.no_grad():
        own = [posterior.guide.log_prob(part.latents, observations=part.observed) for part in parts]
    return (
        task.exact(draws.latents["theta"], draws.observed["x"]).flatten() - torch.cat(own).flatten()
    )


def black_box(method: str, task: Task, given: Pair, test: Pair) -> tuple[dict[str, Any], Sampler]:
    """Likewise by `amortize` without the likelihood."""
    simulator = Simulator(task.model, observed=["x"])

    def simulate(theta: Tensor) -> Tensor:
        x = simulator.draw(len(theta), latents={"theta": theta}).observed["x"]
        return task.statistics(x).flatten(1)

    model = from_simulator(prior(task), simulate)
    start = time.process_time()
    posterior = amortize(model, observed=["x"], simulations=given._asdict(), progress=False)
    seconds = time.process_time() - start
    with torch.no_grad():
        loss = (
            -posterior.guide.log_prob({"theta": test.theta}, observations={"x": test.x})
            .mean()
            .item()
        )
    return {"seconds": seconds, "loss": loss}, lambda num, x: posterior({"x": x}, num).samples[
        "theta"
    ]


def sbi(method: str, task: Task, given: Pair, test: Pair) -> tuple[dict[str, Any], Sampler]:
    """Likewise by one of sbi's estimators, and what draws ``(draws, data sets, latents)`` given data."""
    from sbi.inference import FMPE, NPE

    start = time.process_time()
    options = {"prior": prior(task), "show_progress_bars": False}
    inference = FMPE(**options) if method == "fmpe" else NPE(density_estimator=method, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        density = inference.append_simulations(*given).train()
    row: dict[str, Any] = {"seconds": time.process_time() - start}
    if method == "fmpe":  # whose density takes an equation to be solved
        posterior = inference.build_posterior()
        return row, lambda num, x: torch.stack(
            [posterior.sample((num,), x, show_progress_bars=False) for x in x], 1
        )

    def sample(num: int, x: Tensor) -> Tensor:
        return torch.cat([density.sample((num,), part) for part in x.split(100)], 1)

    log_prob = density.log_prob(test.theta.unsqueeze(0), test.x)[0]
    return {**row, "loss": -log_prob.mean().item()}, sample


def bayesflow(task: Task, given: Pair, test: Pair) -> tuple[dict[str, Any], Sampler]:
    """Likewise by BayesFlow's workflow."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    from bayesflow import BasicWorkflow

    start = time.process_time()
    workflow = BasicWorkflow(inference_variables=["theta"], inference_conditions=["x"])
    workflow.fit_offline(
        {name: value.numpy() for name, value in given._asdict().items()}, verbose=0
    )
    seconds = time.process_time() - start
    log_prob = workflow.log_prob({name: value.numpy() for name, value in test._asdict().items()})

    def sample(num: int, x: Tensor) -> Tensor:
        drawn = workflow.sample(num_samples=num, conditions={"x": x.numpy()})["theta"]
        return torch.from_numpy(drawn).float().transpose(0, 1)

    return {"seconds": seconds, "loss": -float(log_prob.mean())}, sample


def others(
    method: str, task: Task, given: JointDraws, test: JointDraws, draws: int
) -> tuple[dict[str, Any], list[Tensor]]:
    """What is told of another method, and its draws in the prior's support, to which densities are renormalized."""

    def pair(some: JointDraws) -> Pair:
        return Pair(some.latents["theta"], task.statistics(some.observed["x"]).flatten(1))

    held_out, own = pair(test), functools.partial(black_box if method == BLACK_BOX else sbi, method)
    fit = bayesflow if method == BAYESFLOW else own
    with torch.enable_grad():
        row, sample = fit(task, pair(given), held_out)
    within = prior(task).support.check
    with torch.no_grad():
        if "loss" in row:
            inside = within(sample(200, held_out.x)).float().mean(0)
            row["outside"] = 1 - inside.mean().item()
            row["loss"] += inside.clamp(min=1 / 400).log().mean().item()
        kept: list[Tensor] = [held_out.theta[:0]] * REFERENCES
        while min(map(len, kept)) < draws:  # a density may lie outside nearly everywhere
            drawn = sample(4 * draws, held_out.x[:REFERENCES]).unbind(1)
            kept = [torch.cat((old, each[within(each)])) for old, each in zip(kept, drawn)]
    return row, [torch.stack([each[:draws] for each in kept], 1)]


def prior(task: Task) -> Any:
    """The distribution of a task's latents."""
    return poutine.trace(task.model).get_trace().nodes["theta"]["fn"]


def run(
    name: str, simulations: int, seed: int, methods: list[str], steps: int | None
) -> list[dict[str, Any]]:
    """A row for each method, of the same simulations, held-out draws and references."""
    task = TASKS[name]
    # the first optimizer of a process imports for seconds
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    simulator = Simulator(task.model, observed=["x"])
    given, test = simulator.draw(simulations), simulator.draw(TEST)
    theta, x = test.latents["theta"], test.observed["x"]
    exact = None if task.exact is None else -task.exact(theta, x).mean().item()
    draws, temperatures, fit = (DRAWS, task.temperatures, 1000) if steps is None else (100, 2, 2)
    few = x[: REFERENCES if steps is None else 1]
    references = (
        task.draw(few, draws) if task.draw else reference(task.model, few, draws, temperatures)
    )
    rows = []
    for method in methods:
        if method == "amortize":
            row, drawn = ours(task, given, test, steps)
        else:
            row, drawn = others(method, task, given, test, draws)
        pairs = [zip(references.unbind(1), each.unbind(1)) for each in drawn]
        told = [statistics.fmean(two_sample(*pair, fit) for pair in each) for each in pairs]
        key = {"task": name, "simulations": simulations, "seed": seed, "method": method}
        rows.append({**key, "exact": exact, "c2st": told, **row})
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    loss, exact = (
        f"{row[key]:.2f}" if row.get(key) is not None else "" for key in ("loss", "exact")
    )
    told, effective = (
        " to ".join(format(each, form) for each in row.get(key, ())) for key, form in PAIRS.items()
    )
    passed = " to ".join("yes" if each else "no" for each in row.get("calibrated", ()))
    parts = f"{row['task']:24}{row['method']:9}{loss:>8}{exact:>8}{row['seconds']:8.0f}{told:>14}{effective:>14}"
    return f"{parts}{passed:>12}"


def main() -> None:
    """Runs all tasks, prints the table and writes it, unless it is a smoke run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a few steps of ours on 100 simulations of three tasks; writes nothing",
    )
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=DEFAULT, metavar="METHOD")
    parser.add_argument(
        "--device", default="cpu", help="of ours; another one's rows are printed, and not written"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    simulations, steps, methods = arguments.simulations, None, arguments.methods
    for package, needing in (("sbi", SBI), (BAYESFLOW, (BAYESFLOW,))):
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not run; to compare with it: pip install {package}")
            methods = [method for method in methods if method not in needing]
    if arguments.device != "cpu":  # the default, set anew, would slow down all calls of torch
        torch.set_default_device(arguments.device)
        methods = ["amortize"]
    names = arguments.only
    if arguments.smoke:
        simulations, steps, methods, names = 100, 5, ["amortize"], names[:3]
    rows = []
    head = f"{'':24}{'':9}{'loss':>8}{'exact':>8}{'s':>8}{'C2ST':>14}{'effective':>14}{'calibrated':>12}"
    print(head)
    for name in names:
        for seed in range(arguments.seeds):
            rows += run(name, simulations, seed, methods, steps)
            if not arguments.smoke and arguments.device == "cpu":
                write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    """Replaces rows of the same task, simulations, method and seed."""

    def key(row: dict[str, Any]) -> tuple:
        return row["task"], row["simulations"], row["method"], row["seed"]

    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    own = {key(row) for row in rows}
    rows = rows + [row for row in before["rows"] if key(row) not in own]
    tasks = list(TASKS)
    rows.sort(
        key=lambda row: (
            row["simulations"],
            tasks.index(row["task"]),
            METHODS.index(row["method"]),
            row["seed"],
        )
    )
    RESULTS.write_text(
        json.dumps(before | {"torch": torch.__version__, "rows": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
