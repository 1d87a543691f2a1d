"""Where batches of simulations come from: fresh simulations, or a data set that may be larger than memory."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset

from pyro_nami.inference.observations import as_tensor
from pyro_nami.inference.processes import Processes
from pyro_nami.inference.simulate import Batch, JointDraws, Simulator
from pyro_nami.program.isolation import forked_rng, rng_state, seed_rng, set_rng_state

__all__ = ["ArgumentsAt", "Simulations", "Stream", "are_all", "as_draws", "stream_of"]

HELD_OUT_SEED = 1_618_033_988  # that no training has; the same in every run

Renew = Callable[[JointDraws, dict[str, Any]], JointDraws]
ArgumentsAt = Callable[[int], tuple[tuple, dict[str, Any]]]  # step -> the model's arguments there


class Simulations(NamedTuple):
    """A model's simulations in batches, at arguments that may differ from step to step."""

    simulator: Simulator
    arguments: ArgumentsAt
    batch_size: int | Callable[[int], int]

    def size(self, step: int) -> int:
        """Returns the number of simulations in a step."""
        return self.batch_size(step) if callable(self.batch_size) else self.batch_size

    def at(self, step: int) -> Simulator:
        """Returns the simulator at the arguments of a step."""
        args, kwargs = self.arguments(step)
        return self.simulator.at(*args, **kwargs)

    def fresh(self, step: int, size: int | None = None) -> Batch:
        """Returns the batch of a step, with Pyro's random numbers."""
        simulator = self.at(step)
        draws = simulator.draw(size or self.size(step), keep_sites=True)
        return Batch(simulator.program.args, simulator.program.kwargs, draws)

    def total(self, num: int) -> Iterator[Batch]:
        """Yields ``num`` simulations in batches."""
        size = self.size(0)
        for step, done in enumerate(range(0, num, size)):
            yield self.fresh(step, min(size, num - done))

    def given(self, values: Any, step: int) -> Batch:
        """Returns the batch of a step from values made before; see `as_draws`."""
        return Batch(*self.arguments(step), as_draws(values, self.simulator))

    def held_out(self, given: Any) -> Callable[[], Iterable[Batch]] | None:
        """Returns a function that yields held-out batches: simulated, the same in every run, or as given."""
        if given is None:
            return None
        if isinstance(given, int):
            with forked_rng():
                seed_rng(HELD_OUT_SEED)
                batches = list(self.total(given))
            return lambda: batches
        if are_all(given):
            given = as_draws(given, self.simulator).in_batches(self.size(0))
        kept = list(given) if isinstance(given, Iterator) else given
        return lambda: (self.given(values, i) for i, values in enumerate(kept))


class Stream(NamedTuple):
    """Batches, one a step, and the state from which a resumed run continues after the last batch read."""

    batches: Iterator[Batch]
    state: dict[str, Any]

    @property
    def moved(self) -> float:
        """The share of the latents that moved after the last epoch."""
        return self.state.get("renewal", {}).get("moved", 0.0)


def stream_of(
    simulations: Simulations,
    steps: range,
    data: Any,
    state: Mapping[str, Any],
    processes: Processes,
    renew: Renew | None = None,
) -> Stream:
    """Returns the batches of ``steps``, of a data set or simulated when they are asked for.

    Args:
        simulations: the model's simulations.
        steps: the steps still to take.
        data: simulations made before, see `as_draws`; None: none. Batches end in all processes once one process has
            no more.
        state: of the stream to continue; empty for a new one.
        processes: the processes that train together.
        renew: returns the simulations of the next epoch, and keeps its own state in a dict.
    """
    if data is None:
        return Stream(map(simulations.fresh, steps), {})
    place = dict(state)
    if are_all(data):
        data = _Shuffled(as_draws(data, simulations.simulator), simulations.size, renew, place)
    return Stream(_read(simulations, steps, _epochs(data, place), processes), place)


class _Shuffled:
    """All simulations at once: each iteration is an epoch, of full batches in a new order.

    Args:
        draws: the simulations.
        size: from the number of steps done before an epoch to the size of its batches.
        renew: returns the simulations of the next epoch.
        place: the state for a resumed run, updated in place.
    """

    def __init__(
        self,
        draws: JointDraws,
        size: Callable[[int], int],
        renew: Renew | None,
        place: dict[str, Any],
    ) -> None:
        self.draws = draws._replace(latents=place.get("latents", draws.latents))
        self.size, self.renew, self.place = size, renew, place

    def __iter__(self) -> Iterator[JointDraws]:
        num, done = self.draws.num, self.place.setdefault("done", 0)
        size = min(num, self.size(done))
        if self.renew is not None:
            self.place["latents"] = self.draws.latents
        yield from self.draws.in_batches(size, torch.randperm(num)[: num - num % size])
        self.place["done"] = done + num // size
        if self.renew is not None:
            self.draws = self.renew(self.draws, self.place.setdefault("renewal", {}))


def _read(
    simulations: Simulations, steps: range, given: Iterator[Any], processes: Processes
) -> Iterator[Batch]:
    for step in steps:
        values = next(given, None)
        if processes.any(values is None):
            if step == 0:
                raise ValueError("Expected batches of simulations in data; got none.")
            return
        yield simulations.given(values, step)


def _epochs(data: Iterable[Any], place: dict[str, Any]) -> Iterator[Any]:
    """Yields the batches of a data set, again and again; the batches of an iterator once.

    ``place`` gets the position of the last batch in its epoch, and the random state with which the epoch began.
    """
    skipped, now = place.get("position", 0), rng_state()
    if skipped:
        set_rng_state(place["epoch"])
    while True:
        place.update(epoch=rng_state(), position=skipped)
        batches = iter(data)
        if skipped:
            next(islice(batches, skipped, skipped), None)
            set_rng_state(now)
            skipped = 0
        for values in batches:
            place["position"] += 1
            yield values
        if batches is data or not place["position"]:
            return


def are_all(data: Any) -> bool:
    """Whether data hold all simulations at once, and are no iterable of batches."""
    return isinstance(data, (JointDraws, Mapping, TensorDataset))


def as_draws(values: Any, simulator: Simulator) -> JointDraws:
    """Returns simulations given as `JointDraws`, or as values ``(draws, *plates, *event)``, after a check.

    Values are in a mapping from sites, or in two, or in a sequence or `TensorDataset`: of all latents and then observed
    sites, in model order. They get the model's dtypes and devices, and dims of size 1 for plates that a site is not in.
    """
    names = (*simulator.latent, *simulator.observed)
    if isinstance(values, TensorDataset):
        values = values.tensors
    elif isinstance(values, JointDraws):
        values = values[:2]
    if isinstance(values, (tuple, list)):
        if all(isinstance(part, Mapping) for part in values):
            values = ChainMap(*values)
        elif len(values) == len(names):
            values = dict(zip(names, values))
    if not isinstance(values, Mapping):
        raise TypeError(
            f"Expected simulations as JointDraws, or as tensors of {', '.join(map(repr, names))} in a mapping or in "
            f"this order, all at once or in batches; got {type(values).__name__}."
        )
    for name in names:
        if values.get(name) is None:
            raise ValueError(
                f"Expected a tensor for every site, {', '.join(map(repr, names))}; got none for '{name}'."
            )
    num = len(values[names[0]])
    found = {}
    for name, site in simulator.single.items():
        value, fn = as_tensor(name, values[name], site["value"]), site["fn"]
        if value.dim() == 1 + len(fn.shape()):
            idle = (1,) * (simulator.nesting - len(fn.batch_shape))
            value = value.reshape(len(value), *idle, *value.shape[1:])
        if value.dim() <= simulator.nesting or len(value) != num:
            raise ValueError(
                f"Expected values of site '{name}' of shape (draws, *plates, *event), with {simulator.nesting} plate "
                f"dims and as many draws as '{names[0]}', {num}; got {tuple(value.shape)}."
            )
        found[name] = value
    return simulator.joint(found)
