"""The covariates of a guide: which columns of what differ between instances, and their values in a call.

`CovariateFinder` says at the first call which they are, by the guide's option, and `covariate_values` reads them in
every call. What a column is, and how probing finds it, is in `pyro_nami.reading.covariates`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_nami.graph.network import BayesNet
from pyro_nami.guide.features import first_instance
from pyro_nami.guide.structure import Assembly, check_names
from pyro_nami.messages import warn
from pyro_nami.reading.covariates import MASK, Column, ColumnSearch, Given, columns_of
from pyro_nami.reading.runner import prior_draws

__all__ = ["PRIOR_DRAWS", "CovariateFinder", "covariate_values"]

PRIOR_DRAWS = 16
_FEW_DRAWS = 3  # after which a site whose covariates grow with every draw is explained by arguments, if it can be
_MOST_COVARIATES = 64


class CovariateFinder(NamedTuple):
    """Finds the covariates of a model's sites at a guide's first call.

    Attributes:
        option: the guide's option ``covariates``.
        model, args, kwargs: the model, and the arguments of the call.
        net, nodes: its network, and the sites of a run of it.
        frames: site -> the plates that its tensor has dims for; sizes, dims: of every plate.
        subsampled: plates of which a call may see a part only.
        draws: joint draws of all sites.
        run: runs the model at chosen values of its latents.
    """

    option: Any
    model: Callable
    args: tuple
    kwargs: Mapping[str, Any]
    net: BayesNet
    nodes: Mapping[str, Any]
    frames: Mapping[str, frozenset[str]]
    sizes: Mapping[str, int]
    dims: Mapping[str, int]
    subsampled: frozenset[str]
    draws: list[dict[str, Tensor]]
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Any]]

    def find(self) -> tuple[dict[str, tuple], list[dict[str, Tensor]]]:
        """Returns the covariate columns of every site in a plate, and the reference draws that they are found at."""
        searches = {
            name: ColumnSearch(_MOST_COVARIATES)
            for name, site in self.net.sites.items()
            if site.plates and name in self.nodes
        }
        if self.option != "auto":
            return self._given(searches)
        if not searches or not self.draws:
            return {}, []
        references: list[dict[str, Tensor]] = []
        explained: dict[str, ColumnSearch] = {}
        leaves = tree_leaves((self.args, self.kwargs))
        draws = list(self.draws)
        for _ in range(_MOST_COVARIATES):
            draws = draws or prior_draws(self.model, self.args, self.kwargs, PRIOR_DRAWS)
            if not draws:
                break
            drawn = draws.pop(0)
            draw = {n: first_instance(drawn[n], self.nodes[n]) for n in self.net.sites if n in self.nodes}
            try:
                sites = self.run(draw)
            except Exception:  # noqa: BLE001  a model may fail where all instances are alike
                continue
            number = len(references)
            references.append(draw)
            found = [search.add(number, sites[name]) for name, search in searches.items()]
            if number == _FEW_DRAWS:
                searches = {
                    name: search
                    for (name, search), new in zip(searches.items(), found)
                    if not (new and self._explained(name, search, leaves, explained))
                }
            if number > 0 and not any(found):
                break
        searches |= explained
        full = [name for name, search in searches.items() if len(search.columns) >= _MOST_COVARIATES]
        if full:
            warn(
                f"Site '{full[0]}' differs between the instances of its plate in {_MOST_COVARIATES} covariates at "
                "least, and factors read no others. Name what they shall read: covariates=, a callable from the "
                "model's arguments to a mapping from sites to tensors."
            )
        columns = {name: tuple(search.columns) for name, search in searches.items() if search.columns}
        used = {column.draw for found in columns.values() for column in found if isinstance(column, Column)}
        return columns, references[: max(used, default=-1) + 1]

    def _given(self, sites: Collection[str]) -> tuple[dict[str, tuple], list[dict[str, Tensor]]]:
        """Returns the columns that the user gives, with the masks of all sites before them."""
        option = self.option
        given = {} if option is None else option(*self.args, **self.kwargs)
        check_names("covariates", given, sites, "a site in a plate")
        columns = {
            name: (
                *([Column(0, MASK, 0)] if isinstance(self.nodes[name]["mask"], Tensor) else []),
                *(map(Given, range(given[name].shape[-1])) if name in given else ()),
            )
            for name in sites
        }
        initial = {n: first_instance(self.nodes[n]["value"], self.nodes[n]) for n in self.net.sites if n in self.nodes}
        return {name: found for name, found in columns.items() if found}, [initial]

    def _explained(
        self, name: str, search: ColumnSearch, leaves: Sequence[Any], explained: dict[str, ColumnSearch]
    ) -> bool:
        """Whether arguments of the model hold the covariates of a site; then it needs no more draws."""
        if len(self.frames[name]) != 1:
            return False
        (plate,) = self.frames[name]
        if plate in self.subsampled or not search.explain(leaves, self.sizes[plate], self.dims[plate]):
            return False
        explained[name] = search
        return True


def covariate_values(
    assembly: Assembly,
    option: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Any]],
    lacking: Collection[str] = (),
) -> dict[str, Tensor]:
    """Returns the covariates of every site that has some, ``(*batch, columns)``.

    Args:
        option: the guide's option ``covariates``.
        args, kwargs: the model's arguments.
        run: runs the model on them at a reference draw.
        lacking: sites that such a run lacks.
    """
    given = option(*args, **kwargs) if callable(option) else {}
    sites_at = functools.lru_cache(None)(lambda number: run(assembly.references[number]))

    def at_draw(name: str, number: int) -> Any:
        return sites_at(number)[name]

    leaves = tree_leaves((args, kwargs))

    return {
        name: columns_of(columns, functools.partial(at_draw, name), leaves, given.get(name))
        for name, columns in assembly.columns.items()
        if name not in lacking
    }
