"""How the networks of a guide that `amortize` makes read observed values: an encoder for each image or long series.

The shapes are ``(height, width)`` or ``(channels, height, width)`` of an ``"image"``, ``(steps,)`` or ``(steps,
numbers)`` of a ``"series"``, and ``(rows, numbers)`` of a ``"set"``. By its shape alone, a value is an image if it has
two or three dims, of which the last two are sides of at least 16, neither four times the other; and a series if it has
at least 100 steps of fewer than 16 numbers. Others are read as they are, number by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_nami.inference.simulate import Simulator
from pyro_nami.inference.site_messages import Values
from pyro_nami.messages import quoted
from pyro_nami.networks.encoders import encoder_of, kind_of

__all__ = ["embeddings_for"]

# Simulations that encoders are standardized by.
STANDARDIZED = 1_000


def embeddings_for(
    simulator: Simulator, observed: Values, given: Mapping[str, Any] | None, *, by_shape: bool
) -> dict[str, nn.Module]:
    """Returns observed site -> module that reads its values.

    Args:
        simulator: of the model.
        observed: simulated values, ``(draws, *plates, *event)``.
        given: as for `amortize`.
        by_shape: whether others are chosen by shape.

    Raises:
        ValueError: an unknown site or kind.
        TypeError: neither a kind nor a module.
    """
    given = dict(given or {})
    found = {}
    for name in sorted(given.keys() - set(simulator.observed)):
        raise ValueError(
            f"Expected the keys of `embeddings` to be observed sites, {quoted(simulator.observed)}; got {name!r}."
        )
    for name in simulator.observed:
        if name not in observed:
            continue
        event = simulator.single[name]["fn"].event_shape
        chosen = given.get(name, kind_of(event) if by_shape else None)
        if isinstance(chosen, str):
            found[name] = _encoder(name, chosen, observed[name], event)
        elif isinstance(chosen, nn.Module):
            found[name] = chosen
        elif chosen is not None:
            raise TypeError(
                f"Expected embeddings of site '{name}' to be a kind, a module or None; got {type(chosen).__name__}."
            )
    return found


def _encoder(name: str, kind: str, values: Tensor, event: torch.Size) -> nn.Module:
    rows = values[:STANDARDIZED].reshape(-1, *event)
    rows = rows if rows.is_floating_point() else rows.to(torch.get_default_dtype())
    try:
        return encoder_of(kind, rows)
    except ValueError as error:
        raise ValueError(f"{error} Of the embeddings, that of site '{name}'.") from error
