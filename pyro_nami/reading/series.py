"""`find_series`: vectors of Normal innovations that a model sums up over the steps of a series."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Independent

from pyro_nami.factors.wrappers import base_of, innermost
from pyro_nami.program.first_run import is_latent
from pyro_nami.program.loops import NO_LOOPS, Loops
from pyro_nami.program.masks import is_masked
from pyro_nami.program.plate_dims import frames_of
from pyro_nami.program.runner import Message, Sites, is_fixed
from pyro_nami.program.series_sites import SeriesSites, StepAxis
from pyro_nami.reading.probe import Probe

__all__ = ["find_series", "has_series"]

# Steps of a series from which its innovations are held as states; a shorter one is a dense block in no time, and at ten
# times more a dense block takes seconds.
SHORTEST = 32
# How many times innovations are summed up, at most: twice for a trend. Rounding hides what reads a sum of ten sums.
MOST_SUMS = 2


def has_series(sites: Sites) -> bool:
    """Whether latents of a run look like the innovations of a series, by their distributions."""
    latents = [n for n, site in sites.items() if site["type"] == "sample" and is_latent(site)]
    return bool(_candidates(sites, latents))


def find_series(probe: Probe, parents: Mapping[str, Collection[str]]) -> Loops:
    """Returns the innovations of a model as states; none if data do not read sums of them step by step.

    The model is run with one state changed, which is a change of two or three innovations in a row: the data that move
    are those that read the state.

    Args:
        probe: of the model.
        parents: site -> the earlier sites that it reads.
    """
    sites = probe.first.sites
    found = _candidates(sites, probe.latent)
    if len(found) != 1:
        return NO_LOOPS
    ((name, length),) = found.items()
    is_tied = any(name in parents[latent] for latent in probe.latent)
    read = [data for data in sites if data in probe.observed and name in parents[data]]
    axes = {data: _axis_of(sites[data], length) for data in read if not is_fixed(sites[data])}
    rows = {data: axis.of_rows for data, axis in axes.items() if axis is not None}
    if is_tied or not rows or len(rows) < len(axes):
        return NO_LOOPS
    for order in range(MOST_SUMS + 1):
        if span := _rows_moved(probe, name, order, length, rows):
            break
    if not span or not order:
        return NO_LOOPS
    axis = _axis_of(sites[name], length)
    assert axis is not None
    states = SeriesSites(f"{name}[time]", (name,), length, axis, order, span, rows)
    return Loops((states,)) if 2 * states.width <= length else NO_LOOPS


def _candidates(sites: Sites, latents: Collection[str]) -> dict[str, int]:
    """Returns Normal latents with many values in one vector, and their numbers."""
    found = {}
    for name in (name for name in sites if name in latents):
        fn, shape = sites[name]["fn"], sites[name]["fn"].shape()
        if type(innermost(fn)) is not dist.Normal or is_masked(sites[name]):
            continue
        is_long = shape.numel() == max(shape, default=0) > SHORTEST
        if is_long and _axis_of(sites[name], shape.numel()) is not None:
            found[name] = shape.numel()
    return found


def _axis_of(site: Message, length: int) -> StepAxis | None:
    """Returns where a site has the steps of a series: in its one plate, or event; None if neither has their number."""
    frames, event = frames_of(site), site["fn"].event_shape
    if not frames and event.numel() == length == event[0]:
        return StepAxis(0, len(event) - 1)
    is_one = len(frames) == 1 and frames[0].size == length and frames[0].full_size in (None, length)
    return StepAxis(frames[0].dim, len(event)) if is_one and event.numel() == 1 else None


def _rows_moved(
    probe: Probe,
    name: str,
    order: int,
    length: int,
    rows: Mapping[str, StepAxis],
    *,
    share: float = 1e-4,
    most: float = 10.0,
) -> int:
    """Returns how many rows of data, from that of its own step on, read a state; 0 if others read it, or none does.

    Args:
        probe: of the model.
        name: of the innovations.
        order: how many times they are summed up to give the states.
        length: number of steps.
        rows: observed site -> where the log density of its rows has the steps.
        share: of the largest change, below which that of another row is rounding; with a hundred times more a filter
            that decays slowly passes for a sum, whose posterior is 0.1 nats off.
        most: deviations of an innovation by which the state is changed, at most, such that rounding is small beside.
    """
    origin, place = probe.first, length // 2
    stencil = torch.zeros(length, dtype=torch.float64)
    stencil[place] = 1.0
    for _ in range(order):
        stencil[1:] -= stencil[:-1].clone()
    value: Tensor = origin.values[name]
    base: Any = innermost(origin.sites[name]["fn"])
    size = base.scale.mean() * min(length**0.5, most)
    change = (stencil.to(value) * size).reshape(value.shape)
    latents = {each: origin.values[each] for each in probe.latent}
    run = probe.run({**latents, name: value + change})
    if run.error is not None:
        return 0
    farthest = 0
    for data, axis in rows.items():
        before, after = (_row_densities(each.sites[data], axis) for each in (origin, run))
        off = (after - before).abs().nan_to_num().reshape(-1, before.shape[-1]).amax(0)
        moved = (off > share * off.max()).nonzero().squeeze(-1)
        if off.shape[-1] != length or len(moved) and int(moved[0]) < place:
            return 0
        if len(moved):
            farthest = max(farthest, int(moved[-1]) - place + 1)
    return farthest if farthest < length - place else 0


def _row_densities(site: Message, axis: StepAxis) -> Tensor:
    """Returns the log densities of the rows of data, with the steps last."""
    fn = site["fn"]
    fn = fn if axis.dim or not isinstance(fn, Independent) else base_of(fn)
    return axis.last(fn.log_prob(site["value"]).double())
