"""Searches the plates that a model reads through an index map, at a guide's first call.

A site in plate q that reads latents of a plate p, in which it does not lie, is a candidate. Its map
is found by group testing (`Trial`) with everything else held. It is accepted if it varies along q
and no other plate, and is a nesting (`Nesting`). So ``mu[z]`` with a latent ``z`` is no map, nor is
``alpha[m1] - alpha[m2]``; and q is not nested in p if a site of p reads all of q, or a second site
of q all of p.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from pyro_nami.program.plate_dims import first_instance
from pyro_nami.program.runner import Sites, Values
from pyro_nami.program.site_values import redraw
from pyro_nami.reading.index_maps.decoding import (
    NONE,
    SEVERAL,
    Key,
    MapPlan,
    Trial,
    along,
    completed,
    moved_instances,
)
from pyro_nami.reading.index_maps.nesting import Nesting
from pyro_nami.reading.interventions import Dependencies
from pyro_nami.reading.probe import ROUNDS, OutOfBudget, Probe

__all__ = ["search_maps"]


def search_maps(
    probe: Probe, found: Dependencies
) -> tuple[dict[Key, Tensor], tuple[MapPlan, ...], bool]:
    """Returns the map ``(size_q,)`` of each pair of plates (q, p), plans to find it again, and if the budget sufficed.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_nami.program.program import Program
        >>> from pyro_nami.reading.interventions import claim
        >>> def model(county):
        ...     with pyro.plate("county", 3):
        ...         alpha = pyro.sample("alpha", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("obs", 4):
        ...         pyro.sample("y", dist.Normal(alpha[county], 1.0), obs=torch.zeros(4))
        >>> probe = Probe(Program(model, (torch.tensor([0, 2, 1, 1]),), {}), None, (), budget=100)
        >>> search_maps(probe, claim(probe))[0]
        {('obs', 'county'): tensor([0, 2, 1, 1])}
    """
    search = _Search(probe, found)
    if probe.budget > 0:
        search.find()
    search.settle()
    return search.maps, search.plans(), search.finished


class _Search(Nesting):
    """A nesting that finds its maps by runs, and plans how to find in other calls those that are kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sites = self.probe.first.sites
        # plate -> the plan by which maps into it were found
        self.found: dict[str, MapPlan] = {}

    def find(self) -> None:
        """Finds candidate maps into every plate, as far as the budget goes."""
        try:
            for plate, size in self.probe.sizes.items():
                if size > 1:
                    self._find(plate)
                    self.drop([key for key, rows in self.maps.items() if (rows < 0).any()])
        except OutOfBudget:
            self.finished = False

    def plans(self) -> tuple[MapPlan, ...]:
        """The plans of the maps that are left."""
        dims = {plate: frame.dim for plate, frame in self.probe.plates.items()}
        plans = []
        for p, plan in self.found.items():
            targets = {name: q for name, q in plan.targets.items() if (q, p) in self.maps}
            plan = plan._replace(targets=targets, dims={q: dims[q] for q in targets.values()})
            if targets:
                plans.append(plan)
        return tuple(plans)

    def _find(self, plate: str) -> None:
        inside = [
            u for u in self.sites if u in self.probe.movable and plate in self.probe.plates_of[u]
        ]
        targets = [name for name in self.sites if self._is_target(name, plate, inside)]
        latents = [u for u in inside if any(u in self.parents[name] for name in targets)]
        plan = self._moving_plan(plate, latents, targets) if targets else None
        if plan is not None:
            accepted = {
                name: self._accept(plate, name, index)
                for name, index in self._trial(plan).decode().items()
            }
            over = {name: q for name, q in accepted.items() if q is not None}
            self.found[plate] = plan._replace(targets=over)

    def _is_target(self, name: str, plate: str, latents: Collection[str]) -> bool:
        plates = self.probe.plates_of[name]
        if name in self.hidden or plate in plates or not plates:
            return False
        return not self.parents[name].isdisjoint(latents)

    def _moving_plan(self, plate: str, latents: list[str], targets: list[str]) -> MapPlan | None:
        """Returns a plan whose two values move every row of its targets' plates, as many targets as can be had."""
        best = MapPlan(plate, self.probe.plates[plate].dim, {}, {}, {})
        for _ in range(ROUNDS):  # of ``relu(alpha)[county]`` half of the values move none
            values = {name: self._pair(name) for name in latents}
            plan = best._replace(values=values, targets=dict.fromkeys(targets, ""))
            try:
                trial = self._trial(plan)
                rows = trial.moved(torch.ones(trial.size, dtype=torch.bool))
            except KeyError:  # the model fails at these values, so that sites are missing
                continue
            dims = {
                name: {frame.name: frame.dim for frame in self.probe.frames[name]} for name in rows
            }
            # where none of a plate's instances moves, the others show what is read
            full = {q for q, instances in moved_instances(rows, dims).items() if instances.all()}
            moving = [
                name for name in targets if rows[name].any() and full & self.probe.plates_of[name]
            ]
            if len(moving) > len(best.targets):
                best = plan._replace(targets=dict.fromkeys(moving, ""))
            if len(moving) == len(targets):
                break
        return best if best.targets else None

    def _trial(self, plan: MapPlan) -> Trial:
        """Runs of the model with values of first instances, expanded to the shape of their sites."""

        base, sites = self.probe.base, self.sites

        def run(values: Values) -> Sites:
            full = {name: value.expand(base[name].shape) for name, value in values.items()}
            return self.probe.attempt(self.probe.run, full).sites

        held = [name for name in sites if name in self.probe.movable - plan.values.keys()]
        first = {name: first_instance(base[name], sites[name]) for name in held}
        return Trial(run, plan, first)

    def _pair(self, name: str) -> tuple[Tensor, Tensor]:
        """Two values of a latent's first instance that differ in every element."""
        site = self.sites[name]
        first = redraw(site["fn"], self.probe.base[name])
        second = redraw(site["fn"], first)
        return first_instance(first, site), first_instance(second, site)

    def _accept(self, plate: str, name: str, index: Tensor) -> str | None:
        """Takes what a target reads for a map, or a part of one: one instance a row, varying along one plate only.

        Returns that plate; None if it is no map.

        In a site of one plate it need not vary: a minibatch may have rows of one instance alone.
        """
        rows = {frame.name: along(index, frame.dim) for frame in self.probe.frames[name]}
        varying = {
            q: row
            for q, row in rows.items()
            if row is not None
            and (len(rows) == 1 or index.numel() == 1 or len(row[row != NONE].unique()) > 1)
        }
        if len(varying) != 1 or bool((index == SEVERAL).any()):
            return None
        q, row = next(iter(varying.items()))
        key = q, plate
        # Of a target that reads other instances `settle` shows that it does.
        self.maps[key] = completed(self.maps.get(key, row), row)
        return q
