"""`Call`: the arguments and the data of one call, frozen. `CallReader` makes calls."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pyro_nami.guide.trained_answer import TrainedAnswer
from pyro_nami.parameters.inputs import IndexMaps
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner

__all__ = ["Call", "Derived"]


class Derived(NamedTuple):
    """Results that earlier calls derived from data.

    Attributes:
        constants: of exact conditionals at the data of training; None where the call has other data.
        tables: marginal group -> the arguments of the latest call, and its table.
        starts: group -> the warm starts of its mode search, `Starts`.
        is_fixed: whether the data of training stay, whatever arguments later calls have.
    """

    constants: dict[Any, Any] | None
    tables: dict[Any, Any]
    starts: dict[Any, Any]
    is_fixed: bool = False


@dataclass(frozen=True)
class Call:
    """The arguments and data whose posterior a guide draws from.

    If the guide was called with other arguments than those of training, ``target`` is the call with these."""

    program: Program
    indices: Mapping[str, Tensor] = field(default_factory=dict)  # subsampled plate -> its instances
    # observed site -> value that the factors read
    values: Mapping[str, Tensor] = field(default_factory=dict)
    # what the model is run with in place of its own values
    held: Mapping[str, Tensor] = field(default_factory=dict)
    # of a run at reference values, where one was needed
    sites: Mapping[str, Any] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()  # sites of the guide's first call that this one lacks
    # latents drawn from the model's own conditional: those that the first call lacked, or of rows that no data cover
    from_prior: tuple[str, ...] = ()
    covariates: Mapping[str, Tensor] = field(default_factory=dict)  # site -> its covariates
    # of the rows that the factors read
    maps: IndexMaps = field(default_factory=lambda: IndexMaps({}, {}))
    # observed sites whose values move with the model's parameters
    moving: frozenset[str] = frozenset()
    derived: Derived = field(default_factory=lambda: Derived(None, {}, {}))
    target: TrainedAnswer | None = None

    @functools.cached_property
    def frames(self) -> dict[str, Any]:
        """Plate -> its frame, for every plate around a site."""
        frames = (frame for site in self.sites.values() for frame in site["cond_indep_stack"])
        return {frame.name: frame for frame in frames if frame.vectorized}

    def run(self, values: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Returns the sites of a hidden run of the model on this call's arguments and instances; see `Runner`."""
        return self.program.run(Runner(values, self.indices, **options))
