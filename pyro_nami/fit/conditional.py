"""The posterior given the values of some numbers among the latents, by an ensemble of walkers.

A walker moves along the line to another one, by a factor that it stretches the distance by. This takes the density
alone, of values of all latents, and no scales of theirs.

References:
    Goodman and Weare 2010, "Ensemble samplers with affine invariance"; here the density is that of the numbers that are
    free, and the ensemble is as large as the density is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro.ops.stats import effective_sample_size
from torch import Tensor

from pyro_nami.deriving.bent_vector import tempered
from pyro_nami.fit.chains import MOST_R_HAT, SPREAD, largest_r_hat
from pyro_nami.fit.verdict import LEAST_EFFECTIVE, Verdict, checked, untrusted
from pyro_nami.inference.weighted_samples import Pool, WeightedSamples
from pyro_nami.messages import quoted

__all__ = ["conditional_draws"]

# Ensembles, which agree where they have converged, and walkers of each. At ten times more, a slow density has few
# moves; at ten times fewer walkers, a few numbers have no spread.
ENSEMBLES, EACH = 8, 50
WALKERS = ENSEMBLES * EACH
# Moves of the first round, of which each later one has twice as many, and of the last. Rounds end when walkers agree.
FIRST_MOVES, LAST_MOVES = 64, 1024
# Largest factor by which a move stretches a distance; that of Goodman and Weare. At ten times more, hardly any move is
# accepted; at 1.1, moves are short.
MOST_STRETCH = 2.0
Density = Callable[[Mapping[str, Tensor]], Tensor]


@torch.no_grad()
def conditional_draws(
    density: Density, draws: Mapping[str, Tensor], given: Mapping[str, Any], num: int
) -> tuple[WeightedSamples, Verdict]:
    """Returns draws of all latents given some of their numbers, and a verdict on them.

    Args:
        density: from values ``(num, *site shape)`` of all latents to log densities ``(num,)``, up to a constant.
        draws: of the posterior, where walkers begin, ``(draws, *site shape)``.
        given: latent -> its value, NaN where a number is not given.
        num: of draws.

    Raises:
        ValueError: an unknown latent, a value of another shape, nothing left to draw, or values without density.
        NotImplementedError: latents left that are discrete.
    """
    held = _held(draws, given)
    free = {name: value.isnan() for name, value in held.items()}
    if not any(bool(each.any()) for each in free.values()):
        raise ValueError("Expected NaN for the numbers that are to be drawn; all are given.")
    index = torch.randint(len(next(iter(draws.values()))), (WALKERS,))
    start = {
        name: torch.where(free[name], value[index], held[name].to(value))
        for name, value in draws.items()
    }

    def values(position: Tensor) -> dict[str, Tensor]:
        found, columns = {}, iter(position.split([int(f.sum()) for f in free.values()], -1))
        for name, value in start.items():
            found[name] = value[: len(position)].clone()
            found[name][:, free[name]] = next(columns).to(value)
        return found

    def log_density(position: Tensor) -> Tensor:
        return density(values(position)).double().nan_to_num(-torch.inf, -torch.inf, -torch.inf)

    position = torch.cat([value[:, free[name]].double() for name, value in start.items()], -1)
    kept, r_hat = _walk(position, log_density)
    every = kept.flatten(0, 1)
    effective = float(effective_sample_size(kept, chain_dim=1, sample_dim=0).min())
    chosen = every[torch.randint(len(every), (num,))]
    parts = [values(part) for part in chosen.split(WALKERS)]
    samples = {name: torch.cat([part[name] for part in parts]) for name in start}
    weights = torch.zeros(num)
    drawn = WeightedSamples(samples, weights, pool=Pool.unknown(weights[0]))
    reason = f"{ENSEMBLES} ensembles of walkers have an R-hat of {r_hat:.2f}"
    if not (r_hat <= MOST_R_HAT and effective >= LEAST_EFFECTIVE):
        return drawn, untrusted(reason, "Give fewer numbers, or values nearer to the draws.")
    return drawn, checked(f"given some numbers, {reason}", drawn, min(effective, num))


def _held(draws: Mapping[str, Tensor], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns latent -> the numbers that are given, NaN elsewhere."""
    for name in given:
        if name not in draws:
            raise ValueError(
                f"Expected values of the latents {quoted(draws)}; got one of {name!r}."
            )
    held = {}
    for name, value in draws.items():
        own = torch.as_tensor(given.get(name, torch.nan)).to(torch.get_default_dtype())
        shape = value.shape[1:]
        if own.shape != shape and (own.dim() or name in given):
            raise ValueError(
                f"Expected a value of '{name}' of shape {tuple(shape)}, with NaN for numbers to be drawn; got shape "
                f"{tuple(own.shape)}."
            )
        held[name] = own.expand(shape)
        if not value.is_floating_point() and bool(held[name].isnan().any()):
            raise NotImplementedError(
                f"Expected continuous latents to be drawn given others; got '{name}', which is discrete. Give its "
                "value."
            )
    return held


def _walk(position: Tensor, log_density: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
    """Returns the positions of the last round ``(moves, walkers, numbers)``, and its R-hat."""
    height = log_density(position)
    if not (height > -torch.inf).any():
        raise ValueError(
            "Expected values that the posterior has a density at, with the other latents' draws; it is zero at all of "
            "them. Check the values, and their supports."
        )
    # walkers begin where they are likely, but not all at one place
    weights = tempered(height, SPREAD).softmax(0)
    chosen = torch.multinomial(weights, len(position), replacement=True)
    position, height = position[chosen], height[chosen]
    # copies of a walker differ a little, so that there are lines between them
    position = position + 1e-3 * position.std(0) * torch.randn_like(position)
    moved = log_density(position)
    position = torch.where((moved > -torch.inf)[:, None], position, position.roll(1, 0))
    height = log_density(position)
    moves = FIRST_MOVES
    while True:
        kept = []
        for _ in range(2 * moves):
            position, height = _moved(position, height, log_density)
            kept.append(position)
        last = torch.stack(kept[moves:])
        # an ensemble is a chain, of all its walkers at one time after another
        by_time = last.unflatten(1, (ENSEMBLES, EACH)).transpose(1, 2).flatten(0, 1)
        r_hat = largest_r_hat(by_time)
        if r_hat <= MOST_R_HAT or moves >= LAST_MOVES:
            return last, r_hat
        moves *= 2


def _moved(
    position: Tensor, height: Tensor, log_density: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns walkers after a move of each half of an ensemble along lines to walkers of its other half."""
    order = torch.rand(ENSEMBLES, EACH).argsort(-1) + EACH * torch.arange(ENSEMBLES)[:, None]
    halves = order.chunk(2, -1)
    position, height = position.clone(), height.clone()
    low = MOST_STRETCH**-0.5
    for mine, theirs in (halves, halves[::-1]):
        own = mine.flatten()
        others = theirs.gather(1, torch.randint(theirs.shape[1], mine.shape)).flatten()
        root = low + (MOST_STRETCH**0.5 - low) * torch.rand(len(own), 1, dtype=position.dtype)
        stretch = root.square()  # of density 1 / sqrt(stretch)
        proposed = position[others] + stretch * (position[own] - position[others])
        there = log_density(proposed)
        log_ratio = (position.shape[1] - 1) * stretch[:, 0].log() + there - height[own]
        accepted = torch.rand_like(log_ratio).log() < log_ratio
        position[own] = torch.where(accepted[:, None], proposed, position[own])
        height[own] = torch.where(accepted, there, height[own])
    return position, height
