"""`fit` on posteriordb: seconds from program and data to draws, errors, and the verdict; beside Stan and Pyro's guides.

A row is one posterior with flat priors written as wide `Uniform`s or as `ImproperUniform`s, and one seed: CPU seconds
of `fit` (imports left out), the largest error of a mean in reference standard deviations, the largest relative error
of a standard deviation, the verdict, and k-hat. With a checkout of posteriordb and the package ``stanli``, a Stan
engine in a wheel, each Stan program runs in the same process (four chains of 1,000 draws after 1,000), and where all
its parameters are the Pyro program's, the spread of the difference of both log densities over draws is told, in nats,
and by how much their slopes differ. Where ``numpyro`` is installed, its NUTS runs on three posteriors, with as many
chains and draws. With ``--guides``, what Pyro's guides are off by after 1,000 steps. Run with::

    python benchmarks/fit.py [--smoke] [--data FOLDER] [--only NAME] [--seeds 1] [--posteriordb FOLDER] [--guides]
"""

from __future__ import annotations

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpyro_models
import pyro
import torch
from posteriordb import is_right
from posteriors import FLAT, Posterior, options, posteriors, wide
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.optim import ClippedAdam

from pyro_nami import fit

RESULTS = Path(__file__).parent / "results"
SMOKE = ("eight_schools-eight_schools_noncentered", "kilpisjarvi_mod-kilpisjarvi")
CHAINS, WARM_UP, SAMPLES = 4, 1000, 1000
COMPARED = 20  # draws at which densities are compared
ASIDE = 1e-5  # relative change of a value, for the Jacobian of Stan's coordinates
WAYS = 5  # directions, at a draw each, in which slopes are compared
GUIDES: dict[str, Callable[..., Any]] = {
    "AutoNormal": AutoNormal,
    "AutoMultivariateNormal": AutoMultivariateNormal,
}
STEPS, PARTICLES, RATE = 1000, 16, 0.05
MOST_SECONDS = 120.0  # of a guide's training


def measured(posterior: Posterior, seed: int) -> tuple[dict[str, Any], Any]:
    """Returns what `fit` of one posterior takes and is off by, and what it found."""
    pyro.clear_param_store()
    start = time.process_time()
    found = fit(posterior.model, *posterior.args, seed=seed, progress=False)
    row: dict[str, Any] = {"seconds": time.process_time() - start}
    row["errors"] = list(posterior.errors(found.draws))
    row["verdict"], row["pareto_k"] = found.verdict.kind, float(found.pareto_k)
    row["effective"] = float(found.effective_sample_size)
    return row, found


class Stan:
    """The Stan program of a posterior, on the same data."""

    def __init__(self, posterior: Posterior, checkout: Path, data: Path) -> None:
        import stanli

        name = posterior.name
        summary = json.loads((data / f"{name}.summary.json").read_text())
        values = json.loads((data / summary.get("data_file", f"{name}.data.json")).read_text())
        folder = checkout / "posterior_database" / "models" / "stan"
        self._posterior = posterior
        start = time.process_time()
        program = folder / f"{name.split('-', 1)[1]}.stan"
        self._model = stanli.Model(stan_file=str(program), data=values)
        self._compiling = time.process_time() - start

    def measured(self, seed: int) -> dict[str, Any]:
        """Returns the seconds and errors of its draws."""
        start = time.process_time()
        drawn = self._model.sample(
            chains=CHAINS,
            seed=seed + 1,
            warmup=WARM_UP,
            samples=SAMPLES,
            parallel_chains=1,
            refresh=0,
        )
        seconds = self._compiling + time.process_time() - start
        names = self._posterior.names
        found = torch.stack([torch.from_numpy(np.ravel(drawn[name])) for name in names], -1)
        mean = ((found.mean(0) - self._posterior.mean) / self._posterior.sd).abs().max()
        sd = (found.std(0) / self._posterior.sd - 1).abs().max()
        return {"seconds": seconds, "errors": [float(mean), float(sd)]}

    def difference(self, found: Any) -> float | None:
        """Returns by how much the difference of both log densities varies over draws, in nats.

        None where the program has parameters of another kind.
        """
        few = {name: value[:COMPARED] for name, value in found.draws.items()}
        ours = (found.log_prob(few) + found.log_evidence).double().numpy()
        try:
            theirs = self._log_probs(few)
        except (KeyError, ValueError, RuntimeError, TypeError):
            return None
        return float((theirs - ours).std())

    def slope_difference(self, found: Any) -> float:
        """Returns by how much slopes of both log densities differ, of those that are one nat in a posterior deviation.

        The program's are by autograd, Stan's of its density in double precision to both sides.
        """
        deviations = {name: value.double().std(0) for name, value in found.draws.items()}
        worst = 0.0
        for i in range(WAYS):
            values = {
                name: value[i].clone().requires_grad_() for name, value in found.draws.items()
            }
            ways = {name: sd * torch.randn_like(sd) for name, sd in deviations.items()}
            model = pyro.condition(self._posterior.model, values)
            log_p = pyro.poutine.trace(model).get_trace(*self._posterior.args).log_prob_sum()
            slopes = torch.autograd.grad(log_p, list(values.values()))
            ours = sum(float((slope * ways[name]).sum()) for slope, name in zip(slopes, values))
            ends = {
                name: torch.stack([value + side * ASIDE * ways[name] for side in (1, -1)]).detach()
                for name, value in values.items()
            }
            above, below = self._log_probs(ends)
            theirs = float(above - below) / (2 * ASIDE)
            worst = max(worst, abs(ours - theirs) / (1 + abs(theirs)))
        return worst

    def _log_probs(self, values: Mapping[str, Any]) -> np.ndarray:
        """Returns Stan's log densities of values of the program's latents, ``(draws, *event)``."""
        names = list(self._posterior.names)
        table = torch.stack([self._posterior.number(values, name) for name in names], -1).numpy()
        return np.array([self._log_prob(dict(zip(names, row))) for row in table])

    def _log_prob(self, numbers: Mapping[str, float]) -> float:
        """Returns Stan's log density of values, that of its coordinates with their Jacobian."""
        at = self._unconstrained(numbers)
        if len(at) != len(numbers):
            raise ValueError("other parameters")
        columns = []
        for name, value in numbers.items():
            step = ASIDE * max(abs(value), ASIDE)
            ends = [self._unconstrained({**numbers, name: value + side * step}) for side in (1, -1)]
            columns.append((ends[0] - ends[1]) / (2 * step))
        # unconstrained -> its density has the Jacobian of the inverse already
        _, log_det = np.linalg.slogdet(np.stack(columns, -1))
        return float(self._model.log_prob_grad(at)[0] + log_det)

    def _unconstrained(self, numbers: Mapping[str, float]) -> np.ndarray:
        values: dict[str, Any] = {}
        for name, value in numbers.items():
            base = name.split("[")[0]
            if base == name:
                values[name] = value
            else:
                values.setdefault(base, []).append(value)
        return np.asarray(self._model.unconstrain(values))


def guide_errors(posterior: Posterior) -> dict[str, Any]:
    """Returns what Pyro's guides are off by after training, and the seconds that it takes."""
    return {name: _guide_errors(posterior, make) for name, make in GUIDES.items()}


def _guide_errors(posterior: Posterior, make: Callable[..., Any]) -> dict[str, Any]:
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    start = time.process_time()
    try:
        guide = make(posterior.model)
        elbo = Trace_ELBO(PARTICLES, vectorize_particles=True, max_plate_nesting=2)
        decay = {"lr": RATE, "lrd": 0.01 ** (1 / STEPS)}
        svi = SVI(posterior.model, guide, ClippedAdam(decay), elbo)
        for _ in range(STEPS):
            svi.step(*posterior.args)
            if time.process_time() - start > MOST_SECONDS:
                return {"seconds": math.inf, "errors": [math.inf, math.inf]}
        seconds = time.process_time() - start
        with torch.no_grad(), pyro.plate("draws", 4000, dim=-3):
            errors = posterior.errors(guide(*posterior.args))
        return {"seconds": seconds, "errors": list(errors)}
    except Exception as error:  # noqa: BLE001  a guide that fails is a guide that is wrong
        return {"error": f"{type(error).__name__}: {error}", "errors": [math.inf, math.inf]}


def main() -> None:
    """Prints the table, and writes it."""
    given = _parser().parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first = next(posteriors(given.data, wide), None)
    if first is None:
        print(f"There are no posteriors of posteriordb in {given.data}; --data FOLDER has some.")
        return
    measured(first, 0)  # warms up
    rows = []
    for prior, flat in FLAT.items():
        for posterior in posteriors(given.data, flat):
            is_new = posterior.is_flat or flat is wide
            asked = posterior.name in SMOKE if given.smoke else given.only in posterior.name
            if is_new and asked:
                for seed in range(given.seeds):
                    case = {"posterior": posterior.name, "prior": prior, "seed": seed}
                    rows.append(case | _row(posterior, prior, seed, given))
                    print(_line(rows[-1]), flush=True)
    _print_totals(rows)
    if not (given.smoke or given.only):
        table = {"torch": torch.__version__, "rows": rows}
        (RESULTS / "fit.json").write_text(json.dumps(table, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = options(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="posteriors whose names hold this")
    parser.add_argument("--posteriordb", type=Path, help="a checkout, for Stan's programs")
    parser.add_argument("--guides", action="store_true", help="train Pyro's guides as well")
    return parser


def _row(posterior: Posterior, prior: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Returns the measures of one posterior; those of a program that fails are infinite."""
    try:
        row, found = measured(posterior, seed)
    except Exception as error:  # noqa: BLE001  a row that fails is a row that is wrong
        never = [math.inf, math.inf, ""]
        return {"error": f"{type(error).__name__}: {error}", "errors": never, "verdict": "error"}
    if given.posteriordb:
        stan = Stan(posterior, given.posteriordb, given.data)
        row["stan"] = stan.measured(seed)
        if seed == 0:
            row["density_differs_by"] = stan.difference(found)
            if row["density_differs_by"] is not None:
                row["slopes_differ_by"] = stan.slope_difference(found)
    if prior == "uniform" and (kind := posterior.name.split("-")[1]) in numpyro_models.MODELS:
        row["numpyro"] = numpyro_models.measured(kind, posterior, seed, CHAINS, WARM_UP, SAMPLES)
    if given.guides and seed == 0 and prior == "uniform":
        row["guides"] = guide_errors(posterior)
    return row


def _line(row: Mapping[str, Any]) -> str:
    name = f"{row['posterior'][:44]:44} {row['prior']:8} {row['seed']}"
    if "error" in row:
        return f"{name} {row['error']}"
    mean, sd, worst = row["errors"]
    line = f"{name} {row['seconds']:7.2f} {mean:6.3f} {sd:6.3f} {worst:10} {row['verdict']:8} {row['pareto_k']:6.2f}"
    if "stan" in row:
        mean, sd = row["stan"]["errors"]
        line += f"   Stan {row['stan']['seconds']:7.2f} {mean:6.3f} {sd:6.3f}"
        differs = row.get("density_differs_by")
        if differs is not None:
            line += f"  densities {differs:.1g} slopes {row['slopes_differ_by']:.1g}"
    if row.get("numpyro"):
        mean, sd = row["numpyro"]["errors"]
        line += f"   NumPyro {row['numpyro']['seconds']:7.2f} {mean:6.3f} {sd:6.3f}"
    for guide, each in row.get("guides", {}).items():
        line += f"   {guide} {each['errors'][0]:.2f} {each['errors'][1]:.2f}"
    return line


def _print_totals(rows: list[dict[str, Any]]) -> None:
    right = [is_right(row["errors"]) for row in rows]
    trusted = [row["verdict"] in ("exact", "checked") for row in rows]
    wrong = sum(not good and told for good, told in zip(right, trusted))
    print(
        f"{sum(right)} of {len(rows)} within 0.1 sd and 10%; trusted {sum(trusted)}; trusted and wrong {wrong}"
    )
    for peer in ("stan", "numpyro"):
        ratios = [row[peer]["seconds"] / row["seconds"] for row in rows if row.get(peer)]
        if ratios:
            mean, sooner = (
                math.exp(sum(map(math.log, ratios)) / len(ratios)),
                sum(each > 1 for each in ratios),
            )
            print(
                f"sooner than {peer}: {sooner} of {len(ratios)}; geometric mean of the ratios {mean:.2f}"
            )


if __name__ == "__main__":
    main()
