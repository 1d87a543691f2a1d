"""Index maps that users name by two sites, ``("alpha", "y")``: which plates each of them joins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_nami.reading.probe import Probe

__all__ = ["check_map", "given_by_plates"]

Pair = tuple[str, str]


def given_by_plates(
    probe: Probe, given: Mapping[Pair, Any]
) -> tuple[dict[Pair, Tensor], dict[Pair, Pair]]:
    """Returns the maps of a user, checked, by plates (q, p), and these plates by pair ``(latent, site)``."""
    maps: dict[Pair, Tensor] = {}
    pairs: dict[Pair, Pair] = {}
    for pair, index in given.items():
        latent, name = pair
        for site, kind, sites in (
            (latent, "latent", probe.latent),
            (name, "sample site", probe.order),
        ):
            if site not in sites:
                raise ValueError(
                    f"Expected pairs (latent, site) of the model in `index_maps`; got {pair!r}, where {site!r} is no "
                    f"{kind}. The model's sites are: {', '.join(probe.order)}."
                )
        outer = sorted(probe.plates_of[latent] - probe.plates_of[name])
        if len(outer) != 1:
            raise ValueError(
                f"Expected '{latent}' in one plate that '{name}' is not in, for the index map of {pair!r} to point "
                f"into; got {outer or 'none'}. Leave the pair out of `index_maps`."
            )
        rows = check_map(pair, index, outer[0], probe.sizes[outer[0]]).to(probe.base[latent].device)
        apart = [
            frame.name for frame in probe.frames[name] if frame.name not in probe.plates_of[latent]
        ]
        inner = [plate for plate in apart if probe.sizes[plate] == len(rows)]
        if len(inner) != 1:
            raise ValueError(
                f"Expected the index map of {pair!r} to have the length of one plate of '{name}' that '{latent}' is "
                f"not in; got {len(rows)} rows, the length of {inner or 'none'}. Give one index a row of '{name}'."
            )
        key = inner[0], outer[0]
        if not torch.equal(maps.setdefault(key, rows), rows):
            other = next(other for other, plates in pairs.items() if plates == key)
            raise ValueError(
                f"Expected one index map from plate '{inner[0]}' to plate '{outer[0]}'; got different ones for "
                f"{other!r} and {pair!r}. Leave one of them out of `index_maps`."
            )
        pairs[pair] = key
    return maps, pairs


def check_map(pair: Pair, index: Any, plate: str, size: int) -> Tensor:
    """Returns a user's index map of a pair ``(latent, site)``, checked to point into a plate of ``size`` instances."""
    if not isinstance(index, Tensor) or index.dtype == torch.bool or index.is_floating_point():
        kind = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(
            f"Expected the index map of {pair!r} to be a tensor of integers; got {kind}."
        )
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
