"""`AtDraws`: a model that is run at draws of its latents, for all of them at once where it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_nami.inference.site_messages import joined, plate_nesting, with_idle_dims
from pyro_nami.inference.target import Extent, Target
from pyro_nami.program.many_draws import FEWEST_DRAWS, difference_at, for_many
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.runner import Runner

__all__ = ["AtDraws"]

# Reads tensors ``(*extent.sizes, ...)`` off the sites of a run.
Read = Callable[[Mapping[str, Any], Extent], dict[str, Tensor]]


class AtDraws(NamedTuple):
    """A model at draws of its latents.

    Attributes:
        target: the model, its arguments and data.
        sites: of a run at the first draw.
        is_at_once: whether one run serves many draws.
    """

    target: Target
    sites: Mapping[str, Any]
    is_at_once: bool

    @classmethod
    def of(cls, target: Target, draws: Mapping[str, Tensor]) -> AtDraws:
        """Returns the model for draws ``(num, *site shape)``, of some or all latents; others are the model's own."""
        few = [{name: value[i] for name, value in draws.items()} for i in range(FEWEST_DRAWS)]
        one = target.one()
        runs = [target.run_model(one, Runner({**values, **one.data})) for values in few]
        nesting = plate_nesting(runs[0].values())
        known = [{name: site["value"] for name, site in sites.items()} for sites in runs]
        check = partial(difference_at, known, nesting)
        program, reason = for_many(target.program, nesting, check)
        return cls(replace(target, program=program, nesting=nesting), runs[0], reason is None)

    @torch.no_grad()
    def read(self, draws: Mapping[str, Tensor], read: Read) -> dict[str, Tensor]:
        """Returns the tensors that a function reads off the sites of runs at draws, ``(num, ...)``."""
        elements = sum(site["fn"].shape().numel() for site in self.sites.values())
        rows = rows_in_memory(elements) if self.is_at_once else 1
        chunks = zip(*(value.split(rows) for value in draws.values()))
        return joined(
            [self._part(dict(zip(draws, chunk)), len(chunk[0]), read) for chunk in chunks]
        )

    def _part(self, draws: Mapping[str, Tensor], num: int, read: Read) -> dict[str, Tensor]:
        if self.is_at_once:
            extent, nesting = self.target.extent(num), self.target.nesting
            wide = {n: with_idle_dims(v, self.sites[n], nesting, 1) for n, v in draws.items()}
            return read(self.target.run_model(extent, Runner({**wide, **extent.data})), extent)
        extent = self.target.one()
        values = {name: value[0] for name, value in draws.items()}
        sites = self.target.run_model(extent, Runner({**values, **extent.data}))
        return {name: value[None] for name, value in read(sites, extent).items()}
