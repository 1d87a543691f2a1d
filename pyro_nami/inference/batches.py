"""Where batches of simulations come from: fresh simulations, or a data set that may be larger than memory."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from pyro_nami.inference.observations import as_tensor
from pyro_nami.inference.simulate import Batch, JointDraws, Simulator
from pyro_nami.inference.simulator_model import as_floating, is_simulated
from pyro_nami.messages import quoted
from pyro_nami.program.isolation import forked_rng, seed_rng

__all__ = ["ArgumentsAt", "Simulations", "are_all", "as_draws", "batches_of"]

Renew = Callable[[list[Batch]], list[Batch]]
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
        return simulator.batch(simulator.draw(size or self.size(step), keep_sites=True))

    def total(self, num: int) -> Iterator[Batch]:
        """Yields ``num`` simulations in batches."""
        size = self.size(0)
        for step, done in enumerate(range(0, num, size)):
            yield self.fresh(step, min(size, num - done))

    def given(self, values: Any, step: int) -> Batch:
        """Returns the batch of a step from values made before; see `as_draws`. A `Batch` has arguments of its own."""
        if isinstance(values, Batch):
            return values
        return Batch(*self.arguments(step), as_draws(values, self.simulator))

    def groups(self, data: Any) -> list[Batch]:
        """Returns simulations given all at once, one group for each of the arguments that they were made at."""
        return [self.given(part, 0) for part in (data if isinstance(data, list) else [data])]

    def held_out(self, given: Any) -> Callable[[], Iterable[Batch]] | None:
        """Returns a function that yields held-out batches: simulated, the same in every run, or as given."""
        if given is None:
            return None
        if isinstance(given, int):
            with forked_rng():
                seed_rng(1_618_033_988)  # a seed that no training has
                batches = list(self.total(given))
            return lambda: batches
        if are_all(given):
            given = [
                group._replace(draws=draws)
                for group in self.groups(given)
                for draws in group.draws.in_batches(self.size(0))
            ]
        kept = list(given) if isinstance(given, Iterator) else given
        return lambda: (self.given(values, i) for i, values in enumerate(kept))


def batches_of(simulations: Simulations, data: Any, renew: Renew | None = None) -> Iterator[Batch]:
    """Returns the batches of all steps, of a data set or simulated when they are asked for.

    Args:
        simulations: the model's simulations.
        data: simulations made before, see `as_draws`, read again and again, an iterator once; None: none.
        renew: returns the simulations of the next epoch, of data given all at once.
    """
    steps = itertools.count()
    if data is None:
        return map(simulations.fresh, steps)
    if are_all(data):
        given: Iterator[Any] = _shuffled(simulations.groups(data), simulations.size, renew)
    else:
        given = _epochs(data)
    return map(simulations.given, given, steps)


def _shuffled(
    groups: list[Batch], size_at: Callable[[int], int], renew: Renew | None
) -> Iterator[Batch]:
    """Yields epochs of full batches in a new order each, of sizes by the number of steps done before an epoch.

    The simulations of a batch are of one group, as plates may have other sizes in another.
    """
    done = 0
    while True:
        parts = [(group, rows) for group in groups for rows in _full(group, size_at(done))]
        order = torch.randperm(len(parts)).tolist() if len(groups) > 1 else range(len(parts))
        for i in order:
            group, rows = parts[i]
            yield group._replace(draws=group.draws.select(rows))
        done += len(parts)
        if renew is not None:
            groups = renew(groups)


def _full(group: Batch, size: int) -> Sequence[Tensor]:
    """Returns the indices of full batches of a group's simulations, in a new order; of a small group, of all."""
    num = group.draws.num
    size = min(num, size)
    return torch.randperm(num)[: num - num % size].split(size)


def _epochs(data: Iterable[Any]) -> Iterator[Any]:
    """Yields the batches of a data set, again and again; the batches of an iterator once."""
    found = None
    while True:
        batches = iter(data)
        for found in batches:
            yield found
        if found is None:
            raise ValueError("Expected batches of simulations in data; got none.")
        if batches is data:
            return


def are_all(data: Any) -> bool:
    """Whether data hold all simulations at once, at one or more arguments, and are no iterable of batches."""
    if isinstance(data, list):
        return bool(data) and all(isinstance(part, Batch) for part in data)
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
            f"Expected simulations as JointDraws, or as tensors of {quoted(names)} in a mapping or in "
            f"this order, all at once or in batches; got {type(values).__name__}."
        )
    for name in names:
        if values.get(name) is None:
            raise ValueError(
                f"Expected a tensor for every site, {quoted(names)}; got none for '{name}'."
            )
    num = len(values[names[0]])
    found = {}
    for name, site in simulator.single.items():
        value, fn = as_tensor(name, values[name], site["value"]), site["fn"]
        value = as_floating(value, site["value"].dtype) if is_simulated(fn) else value
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
