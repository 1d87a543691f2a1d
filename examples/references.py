"""Reference posteriors for the examples: NUTS, and exact draws where everything is linear and Gaussian given sds.

Draws of NUTS are kept in a file for the next time, under a name made of the model, its data and the settings. Exact
draws come from importance sampling over the few standard deviations, and from conjugacy for everything else.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Predictive
from pyro.infer.reparam import LocScaleReparam
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor
from tqdm import tqdm

Draws = dict[str, Tensor]  # site -> (draws, *shape), in double precision on the CPU


class Problem(NamedTuple):
    """A model with its data, what to report of it, and how NUTS is to see it.

    Attributes:
        common, effects: sites outside all plates, and those with a value for every group.
        noncentered: sites that NUTS samples in standardized form.
        dense: sites whose covariance NUTS estimates together; True for all.
    """

    model: Callable
    arguments: tuple
    common: tuple[str, ...]
    effects: tuple[str, ...] = ()
    noncentered: tuple[str, ...] = ()
    dense: bool | tuple[tuple[str, ...], ...] = False

    @property
    def sites(self) -> tuple[str, ...]:
        return self.common + self.effects

    def convert(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The problem with other tensors as arguments."""
        changed = (change(part) if isinstance(part, Tensor) else part for part in self.arguments)
        return self._replace(arguments=tuple(changed))


# ---- NUTS


def run_nuts(problem: Problem, folder: Path, *, seed: int, smoke: bool) -> tuple[Draws, dict[str, float]]:
    """NUTS draws in double precision and their diagnostics; read from a file if the same were drawn before."""
    chains, warmup, kept, depth = (2, 4, 10, 2) if smoke else (4, 500, 1000, 10)
    problem = problem.convert(lambda part: part.double() if part.is_floating_point() else part)
    path = folder / f"nuts-{fingerprint(problem, seed, chains, warmup, kept, depth)}.npz"
    if path.exists():
        print(f"NUTS draws of an earlier run, from {path}")
        with np.load(path) as stored:
            return {site: torch.from_numpy(stored[site]) for site in problem.sites}, json.loads(
                str(stored["found"])
            )
    start, divergences, parts = time.perf_counter(), 0, []
    model = poutine.reparam(problem.model, {site: LocScaleReparam(0.0) for site in problem.noncentered})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for chain in range(chains):
            print(f"NUTS, chain {chain + 1} of {chains}")
            pyro.clear_param_store()
            pyro.set_rng_seed(seed + chain)
            full_mass = problem.dense if isinstance(problem.dense, bool) else list(problem.dense)
            options = {"full_mass": full_mass, "max_tree_depth": depth, "target_accept_prob": 0.9}
            kernel = NUTS(model, **options, jit_compile=True, ignore_jit_warnings=True)
            mcmc = MCMC(kernel, num_samples=kept, warmup_steps=warmup)
            mcmc.run(*problem.arguments)
            divergences += sum(map(len, mcmc.diagnostics()["divergences"].values()))
            with torch.no_grad():
                parts.append(
                    Predictive(model, mcmc.get_samples(), return_sites=problem.sites)(*problem.arguments)
                )
    finally:
        torch.set_default_dtype(before)
    chained = {site: torch.stack([part[site].reshape(kept, -1) for part in parts]) for site in problem.sites}
    every = torch.cat(list(chained.values()), -1)
    found = {
        "largest R-hat": split_gelman_rubin(every, 0, 1).max().item(),
        "least effective draws": effective_sample_size(every, 0, 1).min().item(),
        "divergences": divergences,
        "seconds": time.perf_counter() - start,
    }
    draws = {site: part.flatten(0, 1).squeeze(-1) for site, part in chained.items()}
    arrays: dict[str, Any] = {site: part.numpy() for site, part in draws.items()}
    np.savez(path, found=json.dumps(found), **arrays)
    return draws, found


def fingerprint(problem: Problem, *settings: int) -> str:
    """A name for the model's source, its data and settings; a log joint stands for all that the source refers to."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        log_joint = float(poutine.trace(problem.model).get_trace(*problem.arguments).log_prob_sum())
    data = [part.tolist() if isinstance(part, Tensor) else part for part in problem.arguments]
    known = (inspect.getsource(problem.model), data, problem[2:], settings, f"{log_joint:.6g}")
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]


# ---- exact draws


class LinearModel:
    """y = sum_k columns_k coefficient_k + noise, where coefficients and noise are Normal(0, sd).

    Args:
        terms: coefficient's name -> columns ``(rows, size)``, and its sd: a number, or the name of a latent sd.
        noise: name of the latent sd of the noise.
        priors: latent sd -> scale of its HalfNormal prior.
        y: ``(rows,)``.
        around: coefficient -> another one that is added to it in draws.
    """

    def __init__(
        self,
        terms: Mapping[str, tuple[Tensor, float | str]],
        noise: str,
        priors: Mapping[str, float],
        y: Tensor,
        around: Mapping[str, str] | None = None,
    ) -> None:
        self.priors, self._noise, self._around = dict(priors), noise, around or {}
        self._sizes = {name: columns.shape[-1] for name, (columns, _) in terms.items()}
        self._sds = [sd for columns, sd in terms.values() for _ in range(columns.shape[-1])]
        design = torch.cat([columns for columns, _ in terms.values()], -1).double()
        self._gram, self._moment = design.T @ design, design.T @ y.double()
        self._squares, self._rows = y.double().square().sum(), len(y)

    def log_likelihood(self, sds: Tensor) -> Tensor:
        """log p(y | sds) with all coefficients integrated out, ``(draws, sds)`` to ``(draws,)``."""
        return torch.cat([self._given(part)[0] for part in self._chunks(sds)])

    def sample(self, sds: Tensor) -> Draws:
        """Draws of the coefficients, one for each row of sds."""
        drawn = []
        for part in self._chunks(sds):
            _, tril, whitened = self._given(part)
            noise = torch.randn(whitened.shape, dtype=torch.float64)
            drawn.append(torch.linalg.solve_triangular(tril.mT, whitened + noise, upper=True)[..., 0])
        split = torch.cat(drawn).split(list(self._sizes.values()), -1)
        draws = {name: part.squeeze(-1) for name, part in zip(self._sizes, split)}
        shifts = {name: draws[center][:, None] for name, center in self._around.items()}
        return {name: part + shifts.get(name, 0.0) for name, part in draws.items()}

    def _given(self, sds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p(y | sds), the Cholesky factor L of the coefficients' precision, and L^-1 of their information."""
        latent = dict(zip(self.priors, sds.unbind(-1)))
        one = torch.ones(len(sds), dtype=torch.float64)
        own = [latent[sd] if isinstance(sd, str) else sd * one for sd in self._sds]
        prior = torch.stack(own, -1).square()
        variance = latent[self._noise].square()
        tril = torch.linalg.cholesky(torch.diag_embed(1 / prior) + self._gram / variance[:, None, None])
        information = self._moment / variance[:, None]
        whitened = torch.linalg.solve_triangular(tril, information[..., None], upper=False)
        spread = self._squares / variance - whitened.square().sum((-1, -2))
        log_det = 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + prior.log().sum(-1)
        log_noise = self._rows * (variance.log() + math.log(2 * math.pi))
        return -0.5 * (spread + log_det + log_noise), tril, whitened

    def _chunks(self, sds: Tensor) -> Sequence[Tensor]:
        return sds.split(max(1, 3_000_000 // len(self._sds) ** 2))  # matrices of 24 MB


class Exact(NamedTuple):
    """Exact draws; log p(y) in nats with its standard error; the effective share of the importance draws."""

    draws: Draws
    log_evidence: float
    error: float
    share: float


def exact_posterior(linear: LinearModel, count: int, proposals: int = 20_000) -> Exact:
    """Importance sampling of the log sds from a Student-t that three rounds of draws adapt; the rest by conjugacy."""
    prior = dist.HalfNormal(torch.tensor(list(linear.priors.values()), dtype=torch.float64))
    size = len(linear.priors)
    loc, tril = torch.full((size,), -1.0).double(), torch.eye(size).double()
    for number in tqdm((proposals // 10,) * 3 + (proposals,), desc="exact posterior"):
        proposal = dist.MultivariateStudentT(torch.tensor(5.0).double(), loc, tril)
        log_sds = proposal.sample((number,))
        sds = log_sds.exp()
        log_joint = linear.log_likelihood(sds) + (prior.log_prob(sds) + log_sds).sum(-1)
        log_weight = log_joint - proposal.log_prob(log_sds)
        weights = log_weight.softmax(0)
        loc = weights @ log_sds
        cov = (log_sds - loc).mT * weights @ (log_sds - loc)
        tril = torch.linalg.cholesky(1.2 * cov + 1e-6 * torch.eye(size))
    log_evidence = log_weight.logsumexp(0).item() - math.log(proposals)
    share = 1 / (weights.square().sum().item() * proposals)
    chosen = sds[torch.multinomial(weights, count, replacement=True)]
    draws = {**dict(zip(linear.priors, chosen.unbind(-1))), **linear.sample(chosen)}
    return Exact(draws, log_evidence, math.sqrt((1 / share - 1) / proposals), share)
