"""Eight schools by inference compilation: trained on simulations alone, checked, then run on the real data.

The guide never sees the data in training. Every step simulates schools from the model and maximizes the guide's log
density of the latents that made them, so afterwards one pass gives the posterior of any eight schools with these
standard errors. `calibrate` says whether to trust it, and `misspecification` whether the data are like its simulations;
importance sampling corrects what is left, and gives the log evidence, which is known exactly here; annealed importance
sampling gives it a third time, without the guide. Run with::

    python examples/compiled_inference.py [--smoke] [--steps 4000] [--seed 0] [--device cpu] [--out out/compiled]

"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping

import pyro
import torch
from quickstart import SIGMA, Exact, Y, model
from study import argument_parser, on_device
from torch import Tensor

from pyro_nami import (
    AutoNaMIGuide,
    InferenceCompilation,
    annealed_importance_sampling,
    calibrate,
    importance_sample,
    misspecification,
)

BATCH = 250
LEARNING_RATE = 5e-3


def columns(values: Mapping[str, Tensor]) -> Tensor:
    """Draws ``(count, 10)``: mu, tau, and all theta."""
    count = len(values["mu"])
    return torch.cat(
        [values[site].reshape(count, -1).double().cpu() for site in ("mu", "tau", "theta")], -1
    )


def print_posterior(rows: Mapping[str, Tensor], exact: Tensor) -> None:
    """Means and sds of draws ``(count, 10)``, and how far they are from exact ones."""
    print(
        f"\n{'posterior mean (sd)':<22}{'mu':>16}{'tau':>16}{'theta_1':>16}{'mean off, sds':>15}{'sds off':>9}"
    )
    for name, draws in rows.items():
        cells = [f"{draws[:, i].mean():.2f} ({draws[:, i].std():.2f})" for i in range(3)]
        shift = ((draws.mean(0) - exact.mean(0)) / exact.std(0)).abs().max()
        ratio = (draws.std(0) / exact.std(0) - 1).abs().max()
        print(
            f"{name:<22}"
            + "".join(f"{cell:>16}" for cell in cells)
            + f"{shift:>15.2f}{ratio:>9.2f}"
        )


def main() -> None:
    """Compiles, checks, and samples; writes a figure and the numbers."""
    arguments = argument_parser(__doc__, "out/compiled", steps=4000).parse_args()
    smoke = arguments.smoke
    steps, data_sets, draws = (3, 50, 200) if smoke else (arguments.steps, 1000, 10_000)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    pyro.clear_param_store()
    pyro.set_rng_seed(arguments.seed)
    sigma, y = SIGMA.to(arguments.device), Y.to(arguments.device)
    exact = Exact()

    # By default tau is found by quadrature, and nothing is left to compile.
    guide = AutoNaMIGuide(model, observed=["y"], rules={"tau": "learned"})
    compilation = InferenceCompilation(
        model,
        guide,
        functools.partial(torch.optim.Adam, lr=LEARNING_RATE),
        batch_size=BATCH,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        clip_norm=10.0,
    )
    with on_device(arguments.device):
        history = compilation.fit(
            steps,
            args=(sigma,),
            validation=data_sets,
        )
        print(history)
        seed = arguments.seed
        found = calibrate(model, guide, sigma, num_datasets=data_sets, seed=seed)
        print(found)
        found.plot().savefig(arguments.out / "calibration.png", dpi=130)
        print(misspecification(model, sigma, observations={"y": y}, seed=seed))

        start = time.perf_counter()
        weighted = importance_sample(model, guide, sigma, num_samples=draws, observations={"y": y})
        seconds = time.perf_counter() - start
        annealed = annealed_importance_sampling(
            model,
            None,
            sigma,
            num_chains=4 if smoke else 50,
            num_temperatures=10 if smoke else 500,
            observations={"y": y},
            progress=True,
        )
    truth = exact.sample(draws)
    print_posterior(
        {
            "exact": truth,
            "guide": columns(weighted.samples),
            "guide, weighted": columns(weighted.resample(draws)),
        },
        truth,
    )
    share = float(weighted.effective_sample_size) / draws
    print(
        f"\n{draws:,} weighted draws in {seconds:.2f} s: {share:.0%} effective, k-hat {float(weighted.pareto_k):.2f}"
    )
    print(f"log evidence, nats: {exact.log_evidence:.4f} exact")
    for name, result in (
        ("importance sampling", weighted),
        ("annealed importance sampling", annealed),
    ):
        print(
            f"  {name}: {float(result.log_evidence):.4f} +- {float(result.log_evidence_error):.4f}"
        )
    numbers = {
        "effective share": share,
        "pareto k": float(weighted.pareto_k),
        "log evidence": float(weighted.log_evidence),
        "log evidence error": float(weighted.log_evidence_error),
        "annealed log evidence": float(annealed.log_evidence),
        "exact log evidence": exact.log_evidence,
        "passed": found.passed,
    }
    (arguments.out / "results.json").write_text(json.dumps(numbers, indent=1) + "\n")
    print(f"\nWritten to {arguments.out}: calibration.png and results.json")


if __name__ == "__main__":
    main()
