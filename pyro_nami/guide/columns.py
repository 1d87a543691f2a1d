"""The covariates of a guide: which columns there are, and their values in a call.

`find_covariates` finds them at the first call; `covariate_values` reads them in every call.
`pyro_nami.reading.covariates` says what a column is and how probing finds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from pyro_nami.guide.first_call import FirstCall
from pyro_nami.guide.plan import Covariates
from pyro_nami.messages import warn
from pyro_nami.program.many_draws import FEWEST_DRAWS, MANY_DRAWS
from pyro_nami.program.plate_dims import first_instance
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Sites, Values
from pyro_nami.reading.covariates import Column, ColumnSearch, columns_of

__all__ = ["covariate_values", "find_covariates"]


def find_covariates(first: FirstCall, *, most: int = 64) -> Covariates:
    """Returns the covariate columns of every site in a plate, and the reference draws that they are found at.

    Args:
        first: the first call.
        most: covariates of a site, and runs of the model that look for them; each covariate is an input of networks.
    """
    loops = first.program.loops
    whole = {held.name for held in loops.parts} if loops.is_learned else loops.rows.keys()
    sites = [
        name
        for name, site in first.net.sites.items()
        if site.plates and name in first.nodes and name not in whole
    ]
    if not sites or not first.draws:
        return Covariates()
    searches, references = _search(first, sites, most)
    full = [name for name, search in searches.items() if len(search.columns) >= most]
    for name in full[:1]:
        warn(
            f"The instances of site '{name}' differ in {most} covariates or more. Factors read only the first {most} "
            "that were found."
        )
    columns = {name: tuple(search.columns) for name, search in searches.items() if search.columns}
    used = {
        column.draw for found in columns.values() for column in found if isinstance(column, Column)
    }
    return Covariates(columns, references[: max(used, default=-1) + 1])


def _search(
    first: FirstCall, sites: Collection[str], most: int
) -> tuple[dict[str, ColumnSearch], list[Values]]:
    """Returns site -> its finished search for covariates, and the draws of latents that the searches used."""
    searches = {name: ColumnSearch(most) for name in sites}
    explained: dict[str, ColumnSearch] = {}
    references: list[Values] = []
    draws = list(first.draws)
    for _ in range(most):
        draws = draws or first.program.prior_draws(MANY_DRAWS)
        if not draws:
            break
        values = draws.pop(0)
        draw = {
            name: first_instance(values[name], first.nodes[name])
            for name in first.net.sites
            if name in first.nodes
        }
        try:
            run = first.run(draw)
        except Exception:  # noqa: BLE001  a model may fail where all instances are alike
            continue
        number = len(references)
        references.append(draw)
        new = [name for name, search in searches.items() if search.add(number, run[name])]
        if number == FEWEST_DRAWS:
            # where covariates still grow, arguments may hold all of them
            explained = {
                name: searches[name] for name in new if _explained(first, name, searches[name])
            }
            searches = {name: search for name, search in searches.items() if name not in explained}
        if number > 0 and not new:
            break
    return searches | explained, references


def _explained(first: FirstCall, name: str, search: ColumnSearch) -> bool:
    """Whether the model's arguments hold all covariates of a site, so that its search can end."""
    if len(first.frames[name]) != 1 or first.frames[name] & first.plates.partial:
        return False
    (plate,) = first.frames[name]
    return search.explain(
        first.program.leaves(), first.plates.sizes[plate], first.plates.dims[plate]
    )


def covariate_values(
    covariates: Covariates,
    program: Program,
    run: Callable[[Values], Sites],
    lacking: Collection[str] = (),
) -> Values:
    """Returns site -> covariates ``(*batch, columns)``, for every site that has some and that is not ``lacking``.

    ``run`` runs the program at a reference draw.
    """
    sites_at = functools.cache(lambda number: run(covariates.references[number]))
    leaves = program.leaves()

    def at_draw(name: str, number: int) -> Any:
        return sites_at(number)[name]

    return {
        name: columns_of(columns, functools.partial(at_draw, name), leaves)
        for name, columns in covariates.columns.items()
        if name not in lacking
    }
