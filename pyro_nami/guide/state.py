"""Saving, copying and moving a guide: what belongs to its state besides its parameters, and what does not."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pyro
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_nami.guide.inverse_network import InverseNetwork
from pyro_nami.guide.observed import ObservedFeatures
from pyro_nami.guide.options import Options
from pyro_nami.guide.reader import CallReader
from pyro_nami.guide.structure import Covariates, Plan
from pyro_nami.reading.covariates import column_of, plain_column

__all__ = ["PersistentGuide"]


class PersistentGuide(AutoGuide):
    """A guide that can be saved, copied and moved, before its first call and after.

    Pyro's own guides lose their model when they are pickled, the original with the copy; this one keeps it, and a copy
    that cannot hold it gets it back by `bind`.
    """

    _plan: Plan  # this and the next two are None before the first call
    _reader: CallReader
    _observed: ObservedFeatures
    _options: Options
    _waiting_state: tuple[dict[str, Any], bool, bool] | None
    network: InverseNetwork

    def _check_store(self) -> None:
        """Raises where the parameter store holds parameters of the same names that cannot be this guide's."""
        store = pyro.get_param_store()
        for name, value in self.network.named_parameters():
            full = f"{self._pyro_name}.network.{name.removesuffix('_unconstrained')}"
            if full in store and store[full].shape != value.shape and not pyro.settings.get("module_local_params"):
                raise ValueError(
                    f"Expected parameter '{full}' of shape {tuple(value.shape)}; the parameter store has one of "
                    f"shape {tuple(store[full].shape)}, from another guide of this class. Call "
                    "pyro.clear_param_store() first, or use pyro.settings.set(module_local_params=True)."
                )

    def bind(self, model: Callable) -> PersistentGuide:
        """Gives a loaded guide its model back, and returns the guide."""
        self._model = (model,)
        return self

    @property
    def model(self) -> Callable:
        if self._model is None or self._model[0] is None:
            raise RuntimeError(
                "Expected a guide with a model; its model could not be pickled with it. Call guide.bind(model) first."
            )
        return self._model[0]

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["master"] = None
        state["plates"] = {}
        state["_model"] = (self._model[0] if _picklable(self._model[0]) else None,)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> PersistentGuide:
        """Copies everything but the model, which both guides then share."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for module in [self._model[0], self.create_plates]:
            memo[id(module)] = module
        state = {**self.__dict__, "master": None, "plates": {}}
        result.__setstate__(copy.deepcopy(state, memo))
        return result

    def get_extra_state(self) -> dict[str, Any]:
        """What belongs to the weights: which covariates are read, at which draws, and marks of the data last seen.

        With ``save_data=True`` these data themselves, and where latents have exact conditionals also the arguments that
        they came with, if these can be saved.
        """
        state: dict[str, Any] = {"simulated": self._options.simulated}
        if self._plan is None:
            return state
        memory, covariates = self._reader.memory, self._plan.covariates
        state.update(references=list(covariates.references), varied=memory.varied)
        state["columns"] = {site: [plain_column(c) for c in found] for site, found in covariates.columns.items()}
        state["marks"] = {_key(name): mark for name, mark in memory.all_marks().items()}
        if self._options.save_data:
            state["seen"] = {_key(name): value for name, value in memory.seen.items()}
            state["context"] = memory.plain_context()
        return state

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        device = self._plan.factory["device"]
        state = tree_map_only(Tensor, lambda value: value.to(device), dict(state))
        self._reader.memory.load(state, {_key(name): name for name in self._reader.names})
        columns = {site: tuple(map(column_of, found)) for site, found in state.get("columns", {}).items()}
        columns = {**self._plan.covariates.columns, **columns}
        covariates = Covariates(columns, list(state.get("references", ())))
        self._set_plan(dataclasses.replace(self._plan, covariates=covariates))

    def _set_plan(self, plan: Plan) -> None:
        self._plan = self._reader.plan = plan
        self._reader.forget()
        self._observed.forget()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state, or keeps it for the first call, when the guide gets its structure and parameters."""
        if self._plan is None:
            self._waiting_state = dict(state_dict), strict, assign
            return nn.modules.module._IncompatibleKeys([], [])
        self._set_plan(self._plan)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable, recurse: bool = True) -> PersistentGuide:
        super()._apply(fn, recurse)
        if self._plan is not None:
            plan = self._plan.to(fn)
            self._reader.apply(fn, plan)
            self._set_plan(plan)
        return self


def _picklable(model: Any) -> bool:
    try:
        pickle.dumps(model)
    except Exception:  # whatever the parts of a user's model raise
        return False
    return True


def _key(name: Any) -> str:
    return name if isinstance(name, str) else ":".join(name)
