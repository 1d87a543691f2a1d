"""Where batches of simulations come from: fresh ones, worker processes, or a data set larger than memory.

A stream yields one a step, and knows what it takes to go on from there in another process. Change this module for
another source.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pyro_nami.inference.checkpoint import rng_state, set_rng_state
from pyro_nami.inference.simulate import JointDraws, Simulator, forked_rng

__all__ = ["Arguments", "Batch", "Simulations", "Stream", "held_out_batches", "stream_of"]

_HELD_OUT_SEED = 1_618_033_988  # apart from the training's

Arguments = Callable[[int], tuple[tuple, dict[str, Any]]]  # step -> the model's arguments there


class Batch(NamedTuple):
    """Simulations, and the model's arguments that they were made at."""

    args: tuple
    kwargs: dict[str, Any]
    draws: JointDraws


class Simulations(NamedTuple):
    """A model's simulations in batches, at arguments that may differ from step to step."""

    simulator: Simulator
    arguments: Arguments
    batch_size: int

    def fresh(self, step: int, size: int | None = None) -> Batch:
        """Returns the batch of a step, with Pyro's random numbers."""
        args, kwargs = self.arguments(step)
        draws = self.simulator.at(*args, **kwargs).draw(size or self.batch_size, keep_sites=True)
        return Batch(args, kwargs, draws)

    def total(self, num: int) -> Iterator[Batch]:
        """Yields ``num`` simulations in batches."""
        for step, done in enumerate(range(0, num, self.batch_size)):
            yield self.fresh(step, min(self.batch_size, num - done))

    def given(self, values: Any, step: int) -> Batch:
        """Returns the batch of a step from values made before; see `_as_draws`."""
        return Batch(*self.arguments(step), _as_draws(values, self.simulator))


def held_out_batches(
    given: int | Iterable[Any] | None, simulations: Simulations
) -> Callable[[], Iterable[Batch]] | None:
    """Returns what yields held-out simulations: a number of them, the same in every run, or the batches given."""
    if given is None:
        return None
    if isinstance(given, int):
        with forked_rng():
            pyro.set_rng_seed(_HELD_OUT_SEED)
            batches = list(simulations.total(given))
        return lambda: batches
    kept = list(given) if isinstance(given, Iterator) else given
    return lambda: (simulations.given(values, i) for i, values in enumerate(kept))


class Stream(NamedTuple):
    """Batches, one a step.

    Attributes:
        batches: the batches themselves.
        state: what another process needs to go on behind the batch read last.
        ends: whether there may be fewer than steps.
    """

    batches: Iterator[Batch]
    state: dict[str, Any]
    ends: bool = False


def stream_of(
    simulations: Simulations,
    steps: range,
    data: Iterable[Any] | None,
    num_workers: int,
    state: Mapping[str, Any],
) -> Stream:
    """Returns the batches of ``steps``: of a data set, of workers, or simulated when they are asked for.

    Args:
        simulations, steps, data, num_workers: see `InferenceCompilation.fit`.
        state: of the stream to go on with; empty: none.
    """
    if data is not None:
        place = dict(state) if "epoch" in state else {}
        read = enumerate(_epochs(data, place), steps.start)
        return Stream((simulations.given(values, step) for step, values in read), place, ends=True)
    if num_workers == 0:
        return Stream(map(simulations.fresh, steps), {})
    seed = state.get("seed") or int(torch.randint(1, 2**31, ()))
    fork = "fork" in multiprocessing.get_all_start_methods()  # models are rarely picklable
    loader: DataLoader = DataLoader(
        _Seeded(simulations, seed),  # type: ignore[arg-type]
        batch_size=None,
        sampler=steps,
        num_workers=num_workers,
        multiprocessing_context="fork" if fork else None,
        generator=torch.Generator("cpu"),  # else the loader would draw from the global one
    )
    return Stream(iter(loader), {"seed": seed})


class _Seeded:
    """Simulations of which every step has a seed of its own, whichever process makes them."""

    def __init__(self, simulations: Simulations, seed: int) -> None:
        self.simulations, self.seed = simulations, seed

    def __getitem__(self, step: int) -> Batch:
        pyro.set_rng_seed((self.seed + step) % 2**32)
        batch = self.simulations.fresh(step)
        return batch._replace(draws=batch.draws._replace(sites=None))  # not to go from process to process


def _epochs(data: Iterable[Any], place: dict[str, Any]) -> Iterator[Any]:
    """Yields what a data set holds, again and again; what an iterator holds, once.

    ``place`` is kept at the batch read last: by its position in its epoch, and by the random numbers with which that
    began, so that a loader that shuffles comes back to it.
    """
    batches = _at(data, place) if place else None
    while True:
        if batches is None:
            place.update(epoch=rng_state(), position=0)
            batches = iter(data)
        for values in batches:
            place["position"] += 1
            yield values
        if batches is data or not place["position"]:
            return
        batches = None


def _at(data: Iterable[Any], place: Mapping[str, Any]) -> Iterator[Any]:
    """Returns the rest of the epoch that was left at a place; random numbers go on as if it had not been found again."""
    now = rng_state()
    set_rng_state(place["epoch"])
    batches = iter(data)
    next(islice(batches, place["position"], place["position"]), None)
    set_rng_state(now)
    return batches


def _as_draws(values: Any, simulator: Simulator) -> JointDraws:
    """Returns simulations given as `JointDraws`, or as site -> values ``(draws, *plates, *event)`` of latents and data.

    Raises:
        TypeError: for anything else.
        ValueError: naming a site that is missing, or whose number of draws differs.
    """
    if isinstance(values, JointDraws):
        values = {**values.latents, **values.observed}
    if not isinstance(values, Mapping):
        raise TypeError(
            f"Expected batches as JointDraws or mappings from sites to values; got {type(values).__name__}."
        )
    names = (*simulator.latent, *simulator.observed)
    for name in names:
        if not isinstance(values.get(name), Tensor):
            raise ValueError(
                f"Expected a tensor for every site, {', '.join(map(repr, names))}; got none for '{name}'."
            )
    num = len(values[names[0]])
    for name in names:
        if values[name].dim() <= simulator.nesting or len(values[name]) != num:
            raise ValueError(
                f"Expected values of site '{name}' of shape (draws, *plates, *event), with {simulator.nesting} plate "
                f"dims and as many draws as '{names[0]}', {num}; got {tuple(values[name].shape)}."
            )
    latents, observed = ({name: values[name] for name in part} for part in (simulator.latent, simulator.observed))
    return JointDraws(latents, observed, simulator.nesting)
