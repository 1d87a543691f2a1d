r"""Annealed importance sampling: the log evidence of a model, by a path of densities from prior or guide to the joint.

Chains start from the prior, or from a guide, and follow the densities

.. math:: f_t(z) = f_0(z)^{1 - t} \, p(z, x)^t, \qquad 0 = t_0 < \dots < t_K = 1,

with one Hamiltonian transition at each, in unconstrained space. A chain's weight, the product of f_{t_k} /
f_{t_{k-1}} at the places where it was, has the evidence p(x) as its mean. Here is the loop over temperatures, and the
result; `tempering` holds the densities and where they start, and `transitions` the kernel.

A step size serves all chains of a data set. It follows pilots, one for five chains, whose weights do not count, so
weights are unbiased. With `resample` (a sequential Monte Carlo sampler), chains of a data set are drawn anew by their
weights when fewer than half of them are effective; they are their own pilots, and steps are relative to the chains'
standard deviations. With `conditional_ess`, chains make up to `MAX_TRANSITIONS` transitions at each temperature,
until their weights hardly depend on where they were. Chains that start from `draws` are drawn from these by their
weights at the highest temperature that leaves as many effective, and go on from there.

Example:
    >>> def model(y):
    ...     z = pyro.sample("z", pyro.distributions.Normal(0.0, 1.0))
    ...     pyro.sample("y", pyro.distributions.Normal(z, 1.0), obs=y)
    >>> pyro.set_rng_seed(0)
    >>> result = annealed_importance_sampling(model, None, torch.tensor(1.0), num_chains=50, num_temperatures=20)
    >>> bool(abs(result.log_evidence - (-1.5155)) < 0.1)  # y ~ Normal(0, sqrt(2))
    True

References:
    Neal 2001, "Annealed importance sampling"; Wu et al. 2017, "On the quantitative analysis of decoder-based
    generative models", whose chains adapt their step sizes to themselves, which ours leave to pilots; Del
    Moral, Doucet and Jasra 2006, "Sequential Monte Carlo samplers"; Zhou, Johansen and Aston 2016, "Toward automatic
    model comparison", for temperatures by the conditional effective sample size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pyro_nami.annealing.tempering import Start, TemperedPath
from pyro_nami.annealing.transitions import (
    ChainState,
    Reached,
    chains_from,
    correlation,
    hamiltonian_step,
    next_temperatures,
    resampled_chains,
    sigmoid_temperatures,
    spread_of,
    variance_of_lineages,
)
from pyro_nami.inference.observations import as_mapping
from pyro_nami.inference.site_messages import Values, joined, plate_names
from pyro_nami.inference.target import Target
from pyro_nami.inference.weighted_samples import Pool, WeightedSamples
from pyro_nami.messages import check_counts
from pyro_nami.program.isolation import kept_store
from pyro_nami.program.program import Program

__all__ = ["AnnealedSamples", "annealed_importance_sampling"]

# Largest correlation of a chain's log ratio before and after the transitions at a temperature. At ten times less, every
# temperature takes the most transitions; at more, chains keep the log ratios that they had.
MAX_CORRELATION = 0.7
MAX_TRANSITIONS = (
    5  # at one temperature; ten times more make chains that mix slowly ten times as slow
)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AnnealedSamples(WeightedSamples):
    """Where chains ended, with their weights: `WeightedSamples`. The mean of the weights is unbiased for p(x).

    With ``resample`` the error of the evidence is that of chains which forget, from one resampling to the next, where
    they were, or if that is larger what tells by how many of the first ones all descend from.

    Attributes:
        acceptance_rate: mean acceptance probability of a chain's transitions, ``(chains, *data sets)``.
        step_size: of the last transition, ``(*data sets)``.
    """

    acceptance_rate: Tensor
    step_size: Tensor

    def weighted(self) -> WeightedSamples:
        """Returns the samples, which are weighted."""
        return self


@torch.no_grad()
def annealed_importance_sampling(
    model: Callable,
    guide: Callable | None = None,
    *args: Any,
    num_chains: int = 5,
    num_temperatures: int = 1000,
    num_leapfrog_steps: int = 10,
    step_size: float = 0.1,
    target_acceptance: float | None = 0.65,
    observations: Values | None = None,
    chunk_size: int | None = None,
    resample: bool = False,
    conditional_ess: float | None = None,
    draws: WeightedSamples | None = None,
    defensive: float = 0.0,
    progress: bool = False,
    **kwargs: Any,
) -> AnnealedSamples:
    """Estimates the log evidence of a model by annealed importance sampling with Hamiltonian transitions.

    Args:
        model: a Pyro model with continuous latents; one that is written for one draw is mapped by `torch.vmap`.
        guide: the start of the path: a guide, with a density at every latent; None for the prior.
        *args, **kwargs: the model's arguments.
        num_chains: independent chains for every data set.
        num_temperatures: number of densities, at `sigmoid_temperatures`: 2 is importance sampling.
        num_leapfrog_steps: gradients per transition.
        step_size: first step size in unconstrained space.
        target_acceptance: mean acceptance probability to steer step sizes for; None leaves them alone.
        observations: observed site -> value, in place of the model's own, as in `importance_sample`.
        chunk_size: number of data sets at a time, to bound memory; None for all.
        resample: whether to resample chains; far fewer temperatures are enough then, and the evidence is consistent.
        conditional_ess: share of the chains that stays effective from one temperature to the next. Temperatures are
            chosen for each data set such that it does. It needs ``resample``.
        draws: weighted draws of the guide, more than there are chains, to start from. It needs ``conditional_ess``.
        defensive: share of the chains that start from the prior, in place of the guide, as in `importance_sample`.
        progress: whether to show a progress bar.

    Raises:
        ValueError: options out of range; a site without batch dims, or without a finite density at the start.
        NotImplementedError: discrete or scaled latents; no bijection; subsampled plates; guides without densities.
    """
    options = _Options(
        num_temperatures,
        num_chains,
        num_leapfrog_steps,
        step_size,
        target_acceptance,
        chunk_size,
        resample,
        conditional_ess,
    )
    _check(options, draws)
    with _fixed(model, guide):
        target = Target(Program(model, args, kwargs), guide, prior_share=defensive)
        given, reached = (None, None) if draws is None else chains_from(draws, num_chains)
        start = Start.of(target, as_mapping(observations), given)
        return _annealed(start, options, reached, progress)


class _Options(NamedTuple):
    """The options of `annealed_importance_sampling`."""

    num_temperatures: int
    num_chains: int
    num_leapfrog_steps: int
    step_size: float
    target_acceptance: float | None
    chunk_size: int | None
    resample: bool
    conditional_ess: float | None


def _annealed(
    start: Start, options: _Options, reached: Reached | None, progress: bool
) -> AnnealedSamples:
    """Anneals all data sets, chunk by chunk."""
    num_chains = options.num_chains
    if options.target_acceptance is not None and not options.resample:
        # pilots, which step sizes follow, and that do not count
        num_chains += max(1, num_chains // 5)
    num_data = start.target.data.num or 1
    size = min(options.chunk_size or num_data, num_data)
    chunks = [slice(i, min(i + size, num_data)) for i in range(0, num_data, size)]
    start = start.checked(num_chains, chunks[0])
    total = len(chunks) * (options.num_temperatures - 1)
    parts = []
    with tqdm(
        total=None if options.conditional_ess else total,
        desc="annealing",
        delay=1,
        leave=False,
        disable=not progress,
    ) as bar:
        for rows in chunks:
            path, position = start.path(num_chains, rows)
            here = reached and Reached(*(part[rows] for part in reached))
            parts.append(_anneal(path, position, options, here, bar.update))
    return _joined(parts, start)


class _Annealed(NamedTuple):
    """Chains of a chunk of data sets, see `AnnealedSamples`; ``(chains, data sets)``, or ``(data sets,)``."""

    samples: Values
    log_weights: Tensor
    acceptance: Tensor
    step_size: Tensor
    variance: Tensor  # of the log evidence


# A wide step may bring values that the model's distributions refuse; such a step is rejected.
@pyro.validation_enabled(False)
def _anneal(
    path: TemperedPath,
    position: Tensor,
    options: _Options,
    reached: Reached | None,
    tick: Callable[[], Any],
) -> _Annealed:
    """Runs all chains of a chunk of data sets along the path; the chains behind ``num_chains`` are pilots."""
    schedule = sigmoid_temperatures(options.num_temperatures).tolist()
    state = ChainState(position, path.value(position))
    acceptance = torch.zeros_like(state.value.start)
    zero = acceptance[0]
    step_size = zero + options.step_size
    now, log_evidence, variance = reached or Reached(zero, zero, zero)
    log_weights = log_evidence.expand(acceptance.shape)
    ancestors = torch.arange(len(acceptance), device=acceptance.device)
    ancestors = ancestors.unsqueeze(-1).expand(acceptance.shape)
    count = moves = 0
    while (now < 1).any():
        count += 1
        before, ratio = now, state.value.ratio
        if options.conditional_ess is None:
            now = torch.full_like(now, schedule[count])
        else:
            now = next_temperatures(now, options.conditional_ess, log_weights, ratio)
        log_weights = log_weights + ((now - before) * ratio).where(now != before, 0.0)
        spread = torch.ones_like(position[0, :, :1])
        if options.resample:
            state, log_weights, added, ancestors = resampled_chains(state, log_weights, ancestors)
            variance = variance + added
            spread = spread_of(state.position, log_weights)
        ratio = state.value.ratio
        for _ in range(MAX_TRANSITIONS if options.conditional_ess else 1):
            wide = step_size.unsqueeze(-1) * spread
            state, accepted = hamiltonian_step(path, state, now, wide, options.num_leapfrog_steps)
            acceptance, moves = acceptance + accepted, moves + 1
            if options.target_acceptance is not None:
                pilots, rate = accepted, 1.0
                if not options.resample:
                    pilots, rate = accepted[options.num_chains :], count**-0.5
                error = pilots.mean(0) - options.target_acceptance
                step_size = step_size * torch.exp(rate * error)
            if not (correlation(ratio, state.value.ratio, log_weights) > MAX_CORRELATION).any():
                break
        tick()
    if options.resample:
        variance = variance.maximum(variance_of_lineages(ancestors, log_weights))
    counted = slice(options.num_chains)
    samples = {name: value[counted] for name, value in path.at(state.position).values.items()}
    return _Annealed(
        samples, log_weights[counted], acceptance[counted] / moves, step_size, variance
    )


def _joined(parts: list[_Annealed], start: Start) -> AnnealedSamples:
    """Returns the result for all chunks; without the dim of data sets if they are not batched."""
    samples, *others = zip(*parts)
    numbers = [torch.cat(part, -1) for part in others]
    if start.target.data.num is None:
        numbers = [part.squeeze(-1) for part in numbers]
    log_weights, acceptance, step_size, variance = numbers
    values, own, plates = joined(samples, 1), {}, {}
    for name, site in start.latents.items():
        own[name] = values[name].reshape(log_weights.shape + site["fn"].shape())
        plates[name] = plate_names(site)
    pool = Pool.none(variance)._replace(evidence=variance)
    return AnnealedSamples(
        own, log_weights, plates, pool, acceptance_rate=acceptance, step_size=step_size
    )


def _check(options: _Options, draws: WeightedSamples | None) -> None:
    temperatures, chains, leapfrogs, step_size, acceptance, size, resample, share = options
    _expect(temperatures > 1, f"num_temperatures >= 2; got {temperatures}")
    check_counts(num_chains=chains, num_leapfrog_steps=leapfrogs, chunk_size=size)
    _expect(step_size > 0, f"step_size > 0; got {step_size}")
    _expect(0 < (acceptance or 0.5) < 1, f"target_acceptance between 0 and 1; got {acceptance}")
    _expect(
        share is None or resample and 0 < share < 1,
        f"conditional_ess between 0 and 1, with resample=True; got {share}",
    )
    most = math.inf if draws is None else draws.num_samples
    _expect(
        draws is None or share is not None and chains <= most,
        f"conditional_ess, and at most {most} chains, where chains start from {most} draws; got {share} and "
        f"{chains} chains",
    )


def _expect(holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"Expected {expected}.")


@contextmanager
def _fixed(model: Callable, guide: Callable | None) -> Iterator[None]:
    """Holds modules in evaluation mode, as densities are to be functions; forgets parameters that a model adds."""
    roots = [each for each in (model, guide) if isinstance(each, nn.Module)]
    modes = {module: module.training for root in roots for module in root.modules()}
    try:
        for root in roots:
            root.eval()
        with kept_store() if guide is None else nullcontext():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
