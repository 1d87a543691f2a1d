"""Index maps that the user gives: which plates each of them joins, and whether it can be one.

A user gives a map by the names of two sites, ``("alpha", "y")``; what they mean is a pair of plates. Change this module
to check more of what is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.reading.probe import Probe

__all__ = ["check_map", "given_by_plates"]

Pair = tuple[str, str]


def given_by_plates(probe: Probe, given: Mapping[Pair, Any]) -> dict[Pair, dict[Pair, Tensor]]:
    """Returns the maps of a user by plates (q, p), and for these by pair ``(latent, site)``.

    Raises:
        TypeError: a map is not a tensor of integers.
        ValueError: a pair names no latent and site, or these have no such plates; a map points outside its plate; or
            two of the same plates differ.
    """
    found: dict[Pair, dict[Pair, Tensor]] = {}
    for pair, index in given.items():
        latent, name = pair
        for site, kind, sites in ((latent, "latent", probe.latent), (name, "sample site", probe.order)):
            if site not in sites:
                raise ValueError(
                    f"Expected pairs (latent, site) of the model in `index_maps`; got {pair!r}, where {site!r} is no "
                    f"{kind}. The model's sites are: {', '.join(probe.order)}."
                )
        outer = sorted(probe.plate_names(latent) - probe.plate_names(name))
        if len(outer) != 1:
            raise ValueError(
                f"Expected '{latent}' in one plate that '{name}' is not in, for the index map of {pair!r} to point "
                f"into; got {outer or 'none'}. Leave the pair out of `index_maps`."
            )
        size = probe.plate_size(probe.plates[outer[0]])
        rows = check_map(pair, index, outer[0], size).to(probe.base[latent].device)
        inner = [
            frame.name
            for frame in probe.frames(name)
            if frame.name not in probe.plate_names(latent) and probe.plate_size(frame) == len(rows)
        ]
        if len(inner) != 1:
            raise ValueError(
                f"Expected the index map of {pair!r} to have the length of one plate of '{name}' that '{latent}' is "
                f"not in; got {len(rows)} rows, the length of {inner or 'none'}. Give one index a row of '{name}'."
            )
        pairs = found.setdefault((inner[0], outer[0]), {})
        for other, same in pairs.items():
            if not torch.equal(rows, same):
                raise ValueError(
                    f"Expected one index map from plate '{inner[0]}' to plate '{outer[0]}'; got different ones for "
                    f"{other!r} and {pair!r}. Leave one of them out of `index_maps`."
                )
        pairs[pair] = rows
    return found


def check_map(pair: tuple[str, str], index: Any, plate: str, size: int) -> Tensor:
    """Returns a user's index map of a pair ``(latent, site)``, checked to point into a plate of ``size`` instances.

    Raises:
        TypeError: it is not a tensor of integers.
        ValueError: it is not one-dimensional, or points outside the plate.
    """
    if not isinstance(index, Tensor) or index.dtype == torch.bool or index.is_floating_point():
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"Expected the index map of {pair!r} to be a tensor of integers; got {kind}.")
    if index.dim() != 1:
        raise ValueError(
            f"Expected the index map of {pair!r} to have one dim, the instances of a plate of '{pair[1]}'; got shape "
            f"{tuple(index.shape)}."
        )
    outside = (index < 0) | (index >= size)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise ValueError(
            f"Expected indices from 0 to {size - 1}; the index map of {pair!r} points outside plate '{plate}': got "
            f"{int(index[row])} in row {row}. Number the instances of '{pair[0]}' from 0."
        )
    return index.long()
