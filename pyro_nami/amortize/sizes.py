"""The arguments that simulations are made at, so that a guide learns from plates and loops of several sizes.

A guide that has seen one size of a plate knows nothing of others: its posteriors keep the width that they have at that
size. So a model whose integer argument is the size of a plate is simulated at arguments from a quarter of the one given
to four times as much.
"""

from __future__ import annotations

__all__ = ["CallArguments", "arguments_of", "sizes_of"]

from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch

from pyro_nami.inference.simulate import Simulator
from pyro_nami.inference.site_messages import Sites
from pyro_nami.messages import quoted
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.loops import family_of
from pyro_nami.program.plate_dims import frames_of

# Smallest and largest size by default, in sizes at the arguments given. At ten times more, the largest simulations take
# most of the time.
LEAST, MOST = 0.25, 4.0
# CallArguments that simulations are made at, so that sizes are 1.3 times the next smaller one. With a third of them,
# posteriors between two sizes are off; with three times as many, few simulations are left for each.
MOST_ARGUMENTS = 12
# Fewest simulations at the same arguments, about one batch.
FEWEST_ALIKE = 100


class CallArguments(NamedTuple):
    """Arguments of one call of a model."""

    args: tuple
    kwargs: Mapping[str, Any]

    def changed(self, slot: int | str, value: Any) -> CallArguments:
        """Returns these with another value at a position or of a name."""
        if isinstance(slot, str):
            return CallArguments(self.args, {**self.kwargs, slot: value})
        return CallArguments((*self.args[:slot], value, *self.args[slot + 1 :]), self.kwargs)

    def counts(self) -> dict[int | str, int]:
        """Returns position or name -> value, of arguments that are integers above zero."""
        slots: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        return {
            slot: int(value)
            for slot, value in slots
            if isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
        }


def sizes_of(sites: Sites, loops: frozenset[str] = frozenset()) -> dict[str, int]:
    """Returns plate -> its size, and loop -> its number of steps, of a run of one draw."""
    frames = (frame for site in sites.values() for frame in frames_of(site))
    steps = Counter(family_of(name) for name in sites)
    return {frame.name: frame.size for frame in frames} | {name: steps[name] for name in loops}


def arguments_of(
    simulator: Simulator,
    simulations: int,
    sizes: Mapping[str, tuple[int, int]] | None,
    arguments: Callable[[], tuple] | None,
) -> list[CallArguments]:
    """Returns the arguments to simulate at; first those of the simulator, whatever the others are.

    Args:
        simulator: at the arguments given.
        simulations: how many there will be.
        sizes: plate, or loop -> its smallest and largest size; by default of those that an argument gives, see above.
        arguments: draws arguments, a tuple of those without a name, in place of sizes.

    Raises:
        ValueError: both are given; a size that no argument gives, or that is none.
        TypeError: arguments that are no tuple.
    """
    if sizes and arguments:
        raise ValueError("Expected sizes or arguments; got both. The arguments give the sizes.")
    given = CallArguments(simulator.program.args, simulator.program.kwargs)
    num = max(1, min(MOST_ARGUMENTS, simulations // FEWEST_ALIKE))
    if arguments is not None:
        return [given, *(_drawn(arguments, given) for _ in range(num - 1))]
    ranges = _ranges(simulator, given, sizes)
    found = [given]
    # points of a lattice, so that each argument has each of its values once, and they go together in all ways
    for i in range(num - 1 if ranges else 0):
        there = given
        for k, (slot, (low, high)) in enumerate(ranges.items()):
            share = _spaced(i, num - 1, k)
            there = there.changed(slot, round(low * (high / low) ** share))
        if there not in found:
            found.append(there)
    return found


def _spaced(i: int, num: int, k: int) -> float:
    """Returns the k-th coordinate of the i-th of points that fill a cube evenly, from 0 to 1."""
    if k == 0:
        return i / max(1, num - 1)
    golden = 0.5 * (5**0.5 - 1)
    return (0.5 + (i + 1) * golden / k) % 1.0


def _drawn(arguments: Callable[[], tuple], given: CallArguments) -> CallArguments:
    found = arguments()
    if not isinstance(found, tuple):
        raise TypeError(
            "Expected arguments to be a function that returns a tuple of the model's arguments, as in "
            f"lambda: (int(torch.randint(10, 100, ())),); it returned {type(found).__name__}."
        )
    return given._replace(args=found)


def _ranges(
    simulator: Simulator, given: CallArguments, sizes: Mapping[str, tuple[int, int]] | None
) -> dict[int | str, tuple[int, int]]:
    """Returns argument -> its smallest and largest value."""
    if sizes is not None and not sizes:
        return {}
    before = sizes_of(simulator.single, simulator.loops)
    ranges: dict[int | str, tuple[int, int]] = {}
    moved_by = {
        slot: _moved(simulator, given, slot, value + 1, before)
        for slot, value in given.counts().items()
    }
    for slot, value in given.counts().items() if sizes is None else ():
        low, high = max(1, round(LEAST * value)), round(MOST * value)
        others = {low, high} - {value}
        if moved_by[slot] and all(_moved(simulator, given, slot, n, before) for n in others):
            ranges[slot] = low, high
    for plate, (least, most) in (sizes or {}).items():
        slots = [slot for slot, moved in moved_by.items() if plate in moved]
        if not slots:
            raise ValueError(
                f"Expected sizes of plates that an integer argument of the model gives; got '{plate}', of the plates "
                f"{quoted(before)}. Pass arguments=, a function that draws the model's arguments."
            )
        if not 1 <= least <= most:
            raise ValueError(
                f"Expected sizes of '{plate}' as a smallest one, at least 1, and a largest; got {least} and {most}."
            )
        unit = given.counts()[slots[0]] / before[plate]
        ranges[slots[0]] = max(1, round(least * unit)), max(1, round(most * unit))
    return ranges


def _moved(
    simulator: Simulator,
    given: CallArguments,
    slot: int | str,
    value: int,
    before: Mapping[str, int],
) -> set[str]:
    """Returns the plates and loops of other sizes at another value of an argument; none where the model fails there."""
    args, kwargs = given.changed(slot, value)
    try:
        with forked_rng(), torch.no_grad():
            sites = simulator.at(*args, **kwargs).sites()
    except Exception:  # noqa: BLE001  whatever a model does at arguments that it was not given
        return set()
    after = sizes_of(sites, simulator.loops)
    return {name for name, size in before.items() if after.get(name, size) != size}
