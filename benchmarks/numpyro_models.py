"""Three posteriors of posteriordb in NumPyro, for `fit.py`: what its NUTS takes, and is off by."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch

__all__ = ["MODELS", "measured"]

WIDE = 1e3  # end of the Uniforms that stand for flat priors


def regression(numpyro: ModuleType, x: Any, y: Any) -> None:
    dist = numpyro.distributions
    beta = numpyro.sample("beta", dist.Uniform(-WIDE, WIDE).expand([x.shape[-1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def eight_schools(numpyro: ModuleType, errors: Any, y: Any) -> None:
    dist = numpyro.distributions
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(y)):
        unit = numpyro.sample("unit", dist.Normal(0.0, 1.0))
        theta = numpyro.deterministic("theta", mu + tau * unit)
        numpyro.sample("y", dist.Normal(theta, errors), obs=y)


def radon(numpyro: ModuleType, county: Any, floor: Any, y: Any) -> None:
    dist = numpyro.distributions
    mu = numpyro.sample("mu_alpha", dist.Normal(0.0, 10.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0))
    scale = numpyro.sample("sigma_alpha", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma_y", dist.HalfNormal(1.0))
    with numpyro.plate("counties", int(county.max()) + 1):
        unit = numpyro.sample("unit", dist.Normal(0.0, 1.0))
        alpha = numpyro.deterministic("alpha", mu + scale * unit)
    with numpyro.plate("houses", len(y)):
        numpyro.sample("y", dist.Normal(alpha[county] + beta * floor, sigma), obs=y)


MODELS: dict[str, Callable[..., None]] = {
    "kidscore_momiq": regression,
    "eight_schools_noncentered": eight_schools,
    "radon_variable_intercept_noncentered": radon,
}


def measured(
    kind: str, posterior: Any, seed: int, chains: int, warm_up: int, samples: int
) -> dict[str, Any] | None:
    """Returns the CPU seconds and errors of NUTS, compiling included; None where NumPyro is not installed."""
    try:
        import jax
        import numpyro
        from numpyro.infer import MCMC, NUTS
    except ImportError:
        return None
    numpyro.enable_x64()
    arrays = [np.asarray(each) for each in posterior.args if isinstance(each, torch.Tensor)]
    start = time.process_time()
    run = MCMC(
        NUTS(lambda *args: MODELS[kind](numpyro, *args)),
        num_warmup=warm_up,
        num_samples=samples,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    run.run(jax.random.PRNGKey(seed), *arrays)
    drawn: Mapping[str, Any] = run.get_samples()
    seconds = time.process_time() - start
    draws = {name: torch.from_numpy(np.array(value)) for name, value in drawn.items()}
    mean, sd, _ = posterior.errors(draws)
    return {"seconds": seconds, "errors": [mean, sd]}
