"""Reference posteriors for the examples: NUTS, and exact draws of mixed models.

Draws are kept in a file for the next time, under a name made of the model, its data and the settings. Exact draws come
from importance sampling over the few unknowns that remain when effects are integrated out: by conjugacy where all is
linear and Gaussian given standard deviations (`LinearModel`), else by quadrature (`GeneralizedModel`).
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


def run_nuts(
    problem: Problem, folder: Path, *, seed: int, smoke: bool
) -> tuple[Draws, dict[str, float]]:
    """NUTS draws in double precision and their diagnostics; read from a file if the same were drawn before."""
    chains, warmup, kept, depth = (2, 4, 10, 2) if smoke else (4, 500, 1000, 10)
    problem = problem.convert(lambda part: part.double() if part.is_floating_point() else part)
    settings = (seed, chains, warmup, kept, depth)
    return _stored(
        folder / f"nuts-{fingerprint(problem, *settings)}.npz", lambda: _sample(problem, *settings)
    )


def _sample(
    problem: Problem, seed: int, chains: int, warmup: int, kept: int, depth: int
) -> tuple[Draws, dict[str, float]]:
    start, divergences, parts = time.perf_counter(), 0, []
    model = poutine.reparam(
        problem.model, {site: LocScaleReparam(0.0) for site in problem.noncentered}
    )
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
                predictive = Predictive(model, mcmc.get_samples(), return_sites=problem.sites)
                parts.append(predictive(*problem.arguments))
    finally:
        torch.set_default_dtype(before)
    chained = {
        site: torch.stack([part[site].reshape(kept, -1) for part in parts])
        for site in problem.sites
    }
    every = torch.cat(list(chained.values()), -1)
    found = {
        "largest R-hat": split_gelman_rubin(every, 0, 1).max().item(),
        "least effective draws": effective_sample_size(every, 0, 1).min().item(),
        "divergences": divergences,
        "seconds": time.perf_counter() - start,
    }
    return {site: part.flatten(0, 1).squeeze(-1) for site, part in chained.items()}, found


def _stored(
    path: Path, make: Callable[[], tuple[Draws, dict[str, float]]]
) -> tuple[Draws, dict[str, float]]:
    """Draws and what was found of them: from a file if it is there, else made and written to it."""
    if path.exists():
        print(f"Draws of an earlier run, from {path}")
        with np.load(path) as file:
            found = json.loads(str(file["found"]))
            return {
                site: torch.from_numpy(file[site]) for site in file.files if site != "found"
            }, found
    draws, found = make()
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
        self.priors, self.coefficients, self.prior_sd = dict(priors), {}, 1.0
        self._noise, self._around = noise, around or {}
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
            drawn.append(
                torch.linalg.solve_triangular(tril.mT, whitened + noise, upper=True)[..., 0]
            )
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
        tril = torch.linalg.cholesky(
            torch.diag_embed(1 / prior) + self._gram / variance[:, None, None]
        )
        information = self._moment / variance[:, None]
        whitened = torch.linalg.solve_triangular(tril, information[..., None], upper=False)
        spread = self._squares / variance - whitened.square().sum((-1, -2))
        log_det = 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1) + prior.log().sum(-1)
        log_noise = self._rows * (variance.log() + math.log(2 * math.pi))
        return -0.5 * (spread + log_det + log_noise), tril, whitened

    def _chunks(self, sds: Tensor) -> Sequence[Tensor]:
        return sds.split(max(1, 3_000_000 // len(self._sds) ** 2))  # matrices of 24 MB


class GeneralizedModel:
    """y ~ likelihood(columns coefficient + effect of the row's group + effect of the row); effects are Normal(0, sd).

    The likelihood is an exponential family with its canonical link. Effects are integrated out by sums over even grids
    (Trefethen and Weideman 2014): over 6 sds to both sides of the mode for an effect of a row, over 5 of the prior for
    one of a group. Grids are shifted at random, so that a node drawn by its weight is a draw from the density.

    Args:
        coefficients: name -> columns ``(rows, size)``.
        prior_sd: of every coefficient, Normal(0, prior_sd).
        likelihood: from linear predictors ``(*batch, rows)`` to the distribution of y.
        y: ``(rows,)``.
        priors: latent sd -> scale of its HalfNormal prior.
        rows: site of the rows' effects, and name of their sd.
        groups: the same of the groups' effects, and the number of each row's group, if there are any.
    """

    def __init__(
        self,
        coefficients: Mapping[str, Tensor],
        prior_sd: float,
        likelihood: Callable[[Tensor], Any],
        y: Tensor,
        priors: Mapping[str, float],
        rows: tuple[str, str],
        groups: tuple[str, str, Tensor] | None = None,
    ) -> None:
        self.coefficients = {name: columns.shape[-1] for name, columns in coefficients.items()}
        self._design = torch.cat(list(coefficients.values()), -1).double()
        self.priors, self.prior_sd, self._rows, self._groups = dict(priors), prior_sd, rows, groups
        self._likelihood, self._y = likelihood, y.double()

    def log_likelihood(self, values: Tensor) -> Tensor:
        """log p(y | coefficients, sds), ``(draws, coefficients and sds)`` to ``(draws,)``."""
        return torch.cat([self._given(part)[0] for part in values.split(4)])

    def sample(self, values: Tensor) -> Draws:
        """Draws of the effects, one for each row of values."""
        drawn = [self._given(part)[1]() for part in values.split(4)]
        return {site: torch.cat([part[site] for part in drawn]) for site in drawn[0]}

    def _given(self, values: Tensor) -> tuple[Tensor, Callable[[], Draws]]:
        """log p(y | values), and a function that draws the effects."""
        size = self._design.shape[-1]
        offset, sds = (
            values[:, :size] @ self._design.T,
            dict(zip(self.priors, values[:, size:].unbind(-1))),
        )
        site, name = self._rows
        sd = sds[name][:, None]
        if self._groups is None:
            nodes, log_density = self._over_rows(offset, sd)
            return log_density.logsumexp(0).sum(-1), lambda: {site: _chosen(nodes, log_density)}
        outer, name, index = self._groups
        center = values.new_zeros(len(values), int(index.max()) + 1)
        nodes, log_prior = _grid(33, 5.0, center, sds[name][:, None], sds[name][:, None])
        _, inner = self._over_rows(offset + nodes[..., index], sd)
        log_density = log_prior.index_add(-1, index, inner.logsumexp(0))

        def draw() -> Draws:
            effect = _chosen(nodes, log_density)
            return {outer: effect, site: _chosen(*self._over_rows(offset + effect[..., index], sd))}

        return log_density.logsumexp(0).sum(-1), draw

    def _over_rows(self, offset: Tensor, sd: Tensor) -> tuple[Tensor, Tensor]:
        """Nodes of every row's effect, ``(nodes, *batch, rows)``, and log p(y, effect | offset, sd) there."""
        mode, precision = torch.zeros_like(offset), sd.square().reciprocal()
        with torch.no_grad():
            for _ in range(8):  # steps of at most 1 reach the mode, as the density is log-concave
                y = self._likelihood(offset + mode)
                curvature = precision + y.variance
                mode = mode + ((self._y - y.mean - precision * mode) / curvature).clamp(-1, 1)
        nodes, log_prior = _grid(13, 6.0, mode, curvature.rsqrt(), sd)
        return nodes, log_prior + self._likelihood(offset + nodes).log_prob(self._y)


def _grid(
    count: int, span: float, center: Tensor, width: Tensor, sd: Tensor
) -> tuple[Tensor, Tensor]:
    """An even grid over ``span`` widths to both sides at a random shift, and log Normal(0, sd) times the step there."""
    places = torch.arange(count).double().reshape((-1,) + (1,) * center.dim()) - count / 2
    step = width * (2 * span / count)
    nodes = center + (places + torch.rand_like(center)) * step
    return nodes, dist.Normal(0.0, sd).log_prob(nodes) + step.log()


def _chosen(nodes: Tensor, log_density: Tensor) -> Tensor:
    chosen = dist.Categorical(logits=log_density.movedim(0, -1)).sample()
    return nodes.gather(0, chosen[None])[0]


class Exact(NamedTuple):
    """Exact draws; log p(y) in nats with its standard error; the effective share of the importance draws."""

    draws: Draws
    log_evidence: float
    error: float
    share: float


def exact_draws(
    problem: Problem, model: LinearModel | GeneralizedModel, folder: Path, *, seed: int, smoke: bool
) -> Exact:
    """The exact posterior by 20,000 proposals; read from a file if the same was sampled before."""
    count = 200 if smoke else 20_000

    def sample() -> tuple[Draws, dict[str, float]]:
        pyro.set_rng_seed(seed)
        draws, *found = exact_posterior(model, count)
        return draws, dict(zip(Exact._fields[1:], found))

    draws, found = _stored(folder / f"exact-{fingerprint(problem, seed, count)}.npz", sample)
    return Exact(draws, **found)


def exact_posterior(exact: LinearModel | GeneralizedModel, count: int) -> Exact:
    """Importance sampling of coefficients and log sds from a Student-t; the effects follow from these.

    The Student-t starts at the mode, with the curvature there; three rounds of draws adapt it.
    """
    size = sum(exact.coefficients.values())
    scales = torch.tensor(list(exact.priors.values())).double()

    def natural(point: Tensor) -> Tensor:
        return torch.cat([point[:, :size], point[:, size:].exp()], -1)

    def log_joint(point: Tensor) -> Tensor:
        values = natural(point)
        log_prior = dist.Normal(0.0, exact.prior_sd).log_prob(point[:, :size]).sum(-1)
        log_sds = (dist.HalfNormal(scales).log_prob(values[:, size:]) + point[:, size:]).sum(-1)
        return exact.log_likelihood(values) + log_prior + log_sds

    loc, tril = _mode(log_joint, torch.cat([torch.zeros(size), -torch.ones(len(scales))]).double())
    for number in tqdm((count // 10,) * 3 + (count,), desc="exact posterior"):
        proposal = dist.MultivariateStudentT(torch.tensor(5.0).double(), loc, tril)
        points = proposal.sample((number,))
        log_weight = log_joint(points) - proposal.log_prob(points)
        weights = log_weight.softmax(0)
        loc = weights @ points
        cov = (points - loc).mT * weights @ (points - loc)
        tril = torch.linalg.cholesky(1.2 * cov + 1e-6 * torch.eye(len(loc)))
    log_evidence = log_weight.logsumexp(0).item() - math.log(count)
    share = 1 / (weights.square().sum().item() * count)
    values = natural(points)[torch.multinomial(weights, count, replacement=True)]
    sizes = {**exact.coefficients, **dict.fromkeys(exact.priors, 1)}
    known = {
        name: part.squeeze(-1) for name, part in zip(sizes, values.split(list(sizes.values()), -1))
    }
    return Exact(
        {**known, **exact.sample(values)}, log_evidence, math.sqrt((1 / share - 1) / count), share
    )


def _mode(log_joint: Callable[[Tensor], Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """The mode, ``(size,)``, and the Cholesky factor of the inverse curvature there."""
    point = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([point], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -log_joint(point[None])[0]
        value.backward()
        return value

    optimizer.step(loss)
    curvature = torch.autograd.functional.hessian(
        lambda each: -log_joint(each[None])[0], point.detach()
    )
    return point.detach(), torch.linalg.cholesky(torch.linalg.inv(curvature))
