"""Checkpoints that no interruption corrupts, and that run no code when they are read.

A file holds tensors and plain Python values only.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pyro_nami.inference.site_messages import Values

__all__ = [
    "check_structure",
    "load_checkpoint",
    "save_checkpoint",
    "structure_of",
]

FORMAT = 1  # of the file; one more makes older files unreadable


def save_checkpoint(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a state of tensors and plain Python atomically: the file is the old one or the new one, never part of one.

    It is written beside its place, as ``.tmp``, and moved there when it is on the disk.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/guide.ckpt", {"step": 3})
        ...     load_checkpoint(f"{folder}/guide.ckpt")
        {'step': 3, 'format': 1}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        torch.save({**state, "format": FORMAT}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Returns what `save_checkpoint` wrote, its tensors on the CPU; raises ValueError for any other file."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"Expected a checkpoint of InferenceCompilation in '{path}'; got a file of another kind."
        ) from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise ValueError(f"Expected a checkpoint of format {FORMAT} in '{path}'; got {found!r}.")
    return state


# ---- structure


def structure_of(guide: Callable, parameters: Values) -> dict[str, str]:
    """Returns a guide's structure in words, per site and per parameter; weights fit guides of the same structure.

    Sites are those of a guide with ``bayesnet`` and ``inverse``; others have parameters alone. Plate sizes may vary.
    """
    net, inverse = getattr(guide, "bayesnet", None), getattr(guide, "inverse", None)
    words: dict[Any, str] = {}
    if net is not None and inverse is not None:
        words.update(zip(net.sites, str(net).splitlines()[1:]))
        for name, line in zip(reversed(inverse.order), str(inverse).splitlines()[1:]):
            words[name] += f"; in the inverse {line.strip()}"
    return {
        **{f"site '{name}'": line.strip() for name, line in words.items()},
        **{
            f"parameter '{name}'": f"shape {tuple(value.shape)}"
            for name, value in parameters.items()
        },
    }


def check_structure(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raises ValueError, which names the differences, for a checkpoint of another structure than the guide's own."""
    if saved == own:
        return
    differing = [key for key in {**own, **saved} if saved.get(key) != own.get(key)]
    sites = [key for key in differing if key.startswith("site")] or differing
    lines = [
        f"{key}: here {own.get(key, 'absent')}; there {saved.get(key, 'absent')}" for key in sites
    ]
    told = "; ".join(lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} more"])
    raise ValueError(
        f"Expected a checkpoint of this guide's structure; got one of another model or guide. They differ at {told}. "
        "Choose another path, or delete the file to start anew."
    )
