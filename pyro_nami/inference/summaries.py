"""Tables of weighted draws for a reader."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from pyro_nami.messages import aligned

__all__ = ["table_of"]


def table_of(drawn: Any, prob: float, most: int = 100) -> str:
    """Returns mean, sd, median and the ends of a central interval of every element, a line each; see `WeightedSamples`.

    Of one site there are at most so many lines.

    Raises:
        ValueError: a probability outside of (0, 1).
    """
    if not 0 < prob < 1:
        raise ValueError(f"Expected a probability between 0 and 1; got {prob}.")
    ends = [(1 - prob) / 2, 0.5, (1 + prob) / 2]
    rows: list[tuple[str, ...]] = [("", "mean", "sd", *(f"{100 * end:.3g}%" for end in ends))]
    for name in drawn.samples:
        mean = drawn.mean(name)
        told = torch.cat(
            (torch.stack((mean, drawn.std(name))), drawn.quantile(name, ends).to(mean))
        )
        places = itertools.islice(itertools.product(*map(range, mean.shape)), most)
        for place, numbers in zip(places, told.reshape(5, -1).T.tolist()):
            index = f"[{', '.join(map(str, place))}]" if place else ""
            rows.append((name + index, *(f"{number:.3g}" for number in numbers)))
        if mean.numel() > most:
            rows.append((f"{name}: {mean.numel() - most:,} more", *[""] * 5))
    return "\n".join(aligned(rows, words=(0,)))
