"""A call's arguments and data, frozen. `CallReader` finds them; change this module when a call knows something more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pyro_nami.guide.inputs import IndexMaps
from pyro_nami.reading.joint_gaussian import ConjugateGroup
from pyro_nami.reading.runner import Runner

__all__ = ["Call"]


@dataclass(frozen=True)
class Call:
    """One call's data.

    Attributes:
        model, args, kwargs: the model and its arguments.
        indices: subsampled plate -> its instances.
        values: observed site -> value that the factors read; own: those of them that the model's arguments bring.
        held: values that the model is run with in place of its own.
        sites: the model's sites at reference values of the latents, where a run was needed.
        lacking: sites of the guide's first call that this one lacks, so that they are no data in it.
        new: latents that the first call lacked, which are drawn from the model's own conditional.
        covariates: site -> its covariates.
        maps: the index maps of the rows that the factors read.
        familiar: whether the data are those that the guide has been trained on in all steps so far.
        unseen: latents of rows that no data covers.
        context, derived: the last call in training, and the latents whose exact conditionals are derived from it, since
            this call lacks data of theirs.
    """

    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    indices: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    held: Mapping[str, Tensor] = field(default_factory=dict)
    sites: Mapping[str, Any] = field(default_factory=dict)
    lacking: frozenset[str] = frozenset()
    new: tuple[str, ...] = ()
    covariates: Mapping[str, Tensor] = field(default_factory=dict)
    maps: IndexMaps = field(default_factory=lambda: IndexMaps({}, {}))
    familiar: bool = False
    unseen: frozenset[str] = frozenset()
    context: Call | None = None
    derived: frozenset[str] = frozenset()

    def argument(self, slot: int | str) -> Any:
        """Returns the model's argument at a position or of a name; None if this call has none."""
        if isinstance(slot, str):
            return self.kwargs.get(slot)
        return self.args[slot] if slot < len(self.args) else None

    @functools.cached_property
    def frames(self) -> dict[str, Any]:
        """Plate -> its frame, of the plates that `sites` are in."""
        frames = (frame for site in self.sites.values() for frame in site["cond_indep_stack"])
        return {frame.name: frame for frame in frames if frame.vectorized}

    def source(self, group: ConjugateGroup) -> Call:
        """Returns the call that the exact conditionals of some latents are derived from."""
        return self if self.context is None or self.derived.isdisjoint(group.members) else self.context

    def run(self, values: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Returns the sites of a hidden run of the model on this call's arguments and instances; see `Runner`."""
        return Runner(values, self.indices, **options).run(self.model, self.args, self.kwargs)
