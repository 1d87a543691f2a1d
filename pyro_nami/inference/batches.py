"""Where batches of simulations come from: fresh ones, worker processes, or a data set larger than memory.

A stream of batches yields one a step, from a given step on, and knows what it takes to go on from there in another
process. Change this module for another source.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import pyro
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pyro_nami.inference.checkpoint import rng_state, set_rng_state
from pyro_nami.inference.simulate import JointDraws, Simulator, forked_rng

__all__ = [
    "Arguments",
    "Batch",
    "FreshBatches",
    "OfflineBatches",
    "WorkerBatches",
    "held_out_batches",
    "simulated",
]

_HELD_OUT_SEED = 1_618_033_988  # apart from the training's

Arguments = Callable[[int], tuple[tuple, dict[str, Any]]]  # step -> the model's arguments there


class Batch(NamedTuple):
    """Simulations, and the model's arguments that they were made at."""

    args: tuple
    kwargs: dict[str, Any]
    draws: JointDraws


class FreshBatches:
    """Batches simulated when they are asked for, with Pyro's random numbers."""

    def __init__(self, simulator: Simulator, arguments: Arguments, batch_size: int, start: int = 0) -> None:
        self.simulator, self.arguments, self.batch_size, self.step = simulator, arguments, batch_size, start

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        args, kwargs = self.arguments(self.step)
        self.step += 1
        return Batch(args, kwargs, self.simulator.at(*args, **kwargs).draw(self.batch_size, keep_sites=True))

    def state(self) -> dict[str, Any]:
        return {}


class WorkerBatches:
    """Batches simulated ahead in worker processes, every step from a seed of its own, in order."""

    def __init__(
        self,
        simulator: Simulator,
        arguments: Arguments,
        batch_size: int,
        steps: range,
        num_workers: int,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.seed: int = (state or {}).get("seed") or int(torch.randint(1, 2**31, ()))
        fork = "fork" in multiprocessing.get_all_start_methods()  # models are rarely picklable
        loader: DataLoader = DataLoader(
            _Simulations(simulator, arguments, batch_size, self.seed),
            batch_size=None,
            sampler=steps,
            num_workers=num_workers,
            multiprocessing_context="fork" if fork else None,
            generator=torch.Generator("cpu"),  # else the loader would draw from the global one
        )
        self.batches = iter(loader)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self.batches)

    def state(self) -> dict[str, Any]:
        return {"seed": self.seed}


class _Simulations(Dataset):
    """A batch for each step."""

    def __init__(self, simulator: Simulator, arguments: Arguments, batch_size: int, seed: int) -> None:
        self.simulator, self.arguments, self.batch_size, self.seed = simulator, arguments, batch_size, seed

    def __getitem__(self, step: int) -> Batch:
        pyro.set_rng_seed((self.seed + step) % 2**32)
        batch = next(FreshBatches(self.simulator, self.arguments, self.batch_size, step))
        return batch._replace(draws=batch.draws._replace(sites=None))  # not to go from process to process


class OfflineBatches:
    """Batches of an iterable, once more from its start when it ends; an iterator ends the stream.

    Going on in another process skips the batches of the epoch that were read, with the random numbers with which the
    epoch began, so that a loader that shuffles comes back to the same place.
    """

    def __init__(
        self,
        data: Iterable[Any],
        simulator: Simulator,
        arguments: Arguments,
        start: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.data, self.simulator, self.arguments, self.step = data, simulator, arguments, start
        state = state if state and "epoch" in state else None
        if state:
            set_rng_state(state["epoch"])
        self._begin()
        if state:
            self.position = state["position"]
            next(islice(self.batches, self.position, self.position), None)

    def _begin(self) -> None:
        self.epoch, self.position = rng_state(), 0
        self.batches = iter(self.data)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self.batches, None)
        if batch is None and self.position and self.batches is not self.data:
            self._begin()
            batch = next(self.batches, None)
        if batch is None:
            if self.step == 0:
                raise ValueError("Expected batches of simulations in data; got none.")
            raise StopIteration
        self.position += 1
        args, kwargs = self.arguments(self.step)
        self.step += 1
        return Batch(args, kwargs, as_draws(batch, self.simulator))

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}


def simulated(simulator: Simulator, arguments: Arguments, batch_size: int, num: int) -> Iterator[Batch]:
    """Yields ``num`` simulations in batches."""
    for step, done in enumerate(range(0, num, batch_size)):
        yield next(FreshBatches(simulator, arguments, min(batch_size, num - done), step))


def held_out_batches(
    given: int | Iterable[Any] | None, simulator: Simulator, arguments: Arguments, batch_size: int
) -> Callable[[], Iterable[Batch]] | None:
    """Returns what yields held-out simulations: a number of them, the same in every run, or the batches given.

    None where none are asked for.
    """
    if given is None:
        return None
    if isinstance(given, int):
        with forked_rng():
            pyro.set_rng_seed(_HELD_OUT_SEED)
            batches = list(simulated(simulator, arguments, batch_size, given))
        return lambda: batches
    kept = list(given) if isinstance(given, Iterator) else given
    return lambda: (Batch(*arguments(i), as_draws(batch, simulator)) for i, batch in enumerate(kept))


def as_draws(batch: Any, simulator: Simulator) -> JointDraws:
    """Returns a batch given as `JointDraws`, or as site -> values ``(draws, *plates, *event)`` of latents and data.

    Raises:
        TypeError: for anything else.
        ValueError: naming a site that is missing, or whose number of draws differs.
    """
    if isinstance(batch, JointDraws):
        batch = {**batch.latents, **batch.observed}
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"Expected batches as JointDraws or mappings from sites to values; got {type(batch).__name__}."
        )
    names = (*simulator.latent, *simulator.observed)
    for name in names:
        if not isinstance(batch.get(name), Tensor):
            raise ValueError(
                f"Expected a tensor for every site, {', '.join(map(repr, names))}; got none for '{name}'."
            )
        if batch[name].dim() <= simulator.nesting or len(batch[name]) != len(batch[names[0]]):
            raise ValueError(
                f"Expected values of site '{name}' of shape (draws, *plates, *event), with {simulator.nesting} plate "
                f"dims and as many draws as '{names[0]}', {len(batch[names[0]])}; got {tuple(batch[name].shape)}."
            )
    latents, observed = (
        {name: batch[name] for name in part} for part in (simulator.latent, simulator.observed)
    )
    return JointDraws(latents, observed, simulator.nesting)
