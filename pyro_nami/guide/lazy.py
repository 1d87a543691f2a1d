"""A guide around its calls: made at the first one, given data at each; saved, copied and moved between them.

Everything is lazy until the first call, as in Pyro, and fixed from then on. Change this module when a guide's plates or
data come to it in another way, or when more belongs to its state.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pyro_nami.guide.build import assemble
from pyro_nami.guide.call import Call
from pyro_nami.guide.inverse_network import InverseNetwork
from pyro_nami.guide.network_state import NetworkState
from pyro_nami.guide.observed import ObservedFeatures
from pyro_nami.guide.options import Options
from pyro_nami.guide.plan import Covariates, Plan
from pyro_nami.guide.reader import CallReader
from pyro_nami.guide.store_names import check_store
from pyro_nami.messages import warn
from pyro_nami.reading.covariates import column_of, plain_column
from pyro_nami.reading.isolation import untouched
from pyro_nami.reading.runner import Runner, needs_arguments, own_dims, takes_observations

__all__ = ["LazyGuide"]

_START_DRAWS = 5  # by which starts of bounds are compared


class LazyGuide(AutoGuide):
    """A guide whose plan and networks are made at its first call, from the model's arguments there.

    It can be saved, copied and moved before that and after. Pyro's own guides lose their model when they are pickled,
    the original with the copy; this one keeps it, and a copy that cannot hold it gets it back by `bind`.
    """

    _plan: Plan  # this and the next two are None before the first call
    _reader: CallReader
    _observed: ObservedFeatures
    _options: Options
    _waiting_state: tuple[dict[str, Any], bool, bool] | None
    _told: bool = False  # that data are not those of training
    network: InverseNetwork

    # ---- the first call

    @property
    def _assembly(self) -> Plan:
        """The plan, by the name that the check of a second device knows."""
        return self._plan

    def _made(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("Expected a guide that was called once; call it with the model's arguments first.")
        return self._plan

    def _subsampled(self, *args: Any, **kwargs: Any) -> list[str]:
        """Returns the plates that are made outside the model and hold a part of their instances."""
        with poutine.block():
            plates = self._create_plates(*args, **kwargs)
        return [name for name, plate in plates.items() if plate.subsample_size < plate.size]

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        subsampled = self._subsampled(*args, **kwargs)
        plan, network, prototype = assemble(self.model, args, kwargs, self._options, subsampled)
        self._plan, self.network = plan, network
        self._reader = CallReader(plan, self._options.covariates, self._options.index_maps)
        self._observed = ObservedFeatures(self._options.embeddings)
        for name in [name for name, site in prototype.nodes.items() if self._prototype_hide_fn(site)]:
            prototype.remove_node(name)
        self.prototype_trace = prototype
        check_store(self)
        self._choose_start(args, kwargs)
        if self.master is not None:
            self.master()._check_prototype(prototype)
        if self._waiting_state is not None:
            waiting, self._waiting_state = self._waiting_state, None
            self.load_state_dict(*waiting)

    def _choose_start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Starts bounds where the ELBO of the first call is largest; without data, where they were found first."""
        starts, self.network.starts = self.network.starts, []
        stored = any(name.startswith(f"{self._pyro_name}.") for name in pyro.get_param_store()._params)
        if len(starts) < 2 or self._options.observed or stored:  # in the store: they are started already
            return
        elbo, losses = Trace_ELBO(_START_DRAWS), []
        with untouched(self.model), own_dims(), poutine.block(), pyro.validation_enabled(False), torch.no_grad():
            for initial in starts:
                self.network.set_initial(initial)
                pyro.set_rng_seed(0)
                losses.append(elbo.loss(self.model, self, *args, **kwargs))
        self.network.set_initial(starts[int(torch.tensor(losses).nan_to_num(torch.inf).argmin())])

    def _create_plates(self, *args: Any, **kwargs: Any) -> dict[str, pyro.plate]:
        """Returns the plates that are made outside the model; all others are the model's own."""
        if self.master is not None:
            return super()._create_plates(*args, **kwargs)
        if self.create_plates is None:
            return {}
        plates = self.create_plates(*args, **kwargs)
        plates = [plates] if isinstance(plates, pyro.plate) else list(plates)
        for plate in plates:
            if not isinstance(plate, pyro.plate):
                raise TypeError(f"Expected create_plates() to return plates; got {type(plate).__name__}.")
        self.plates = {plate.name: plate for plate in plates}
        return self.plates

    # ---- each call

    def _begin(self, args: tuple, kwargs: dict[str, Any], *, draws: bool = True) -> Call:
        """Returns one call's data: arguments of the model, plates, and the values of observed sites.

        Without arguments, where the model needs some, those are meant that it had in training.
        """
        latest = None if self._plan is None or args or kwargs else self._reader.memory.latest
        if latest is not None and needs_arguments(self.model):
            args, kwargs = latest
        observations = kwargs.get("observations") or {}
        if "observations" in kwargs and not takes_observations(self.model):
            kwargs = {key: value for key, value in kwargs.items() if key != "observations"}
        if self._plan is None:
            first = kwargs
            if observations:
                single = self._note_observations(observations, args, kwargs)
                first = {**kwargs, "observations": single} if "observations" in kwargs else kwargs
            # A guide that scores first, or that is replayed (`pyro.infer.CSIS`), is trained on simulations.
            replayed = bool(observations) and any(isinstance(handler, ReplayMessenger) for handler in _PYRO_STACK)
            simulated = self._options.simulated or replayed or not draws
            if self._waiting_state is not None:
                simulated = self._waiting_state[0].get("_extra_state", {}).get("simulated", simulated)
            self._options = self._options._replace(simulated=simulated)
            self._setup_prototype(*args, **first)
        plan = self._made()
        for name in observations:
            if name not in plan.names:
                known = ", ".join(map(repr, plan.bayesnet.observed))
                raise ValueError(f"Expected observations of the model's sites, {known}; got one of '{name}'.")
        if "observations" in kwargs:  # of several data sets, whose values the model's runs hold, it sees the first
            kwargs = {**kwargs, "observations": _first_set(observations, plan)}
        plates, remember = self._create_plates(*args, **kwargs), self.training and torch.is_grad_enabled()
        call = Call(plan.for_many(self.model), args, kwargs)
        passes = self.network.passes
        if remember:
            self._reader.memory.latest = args, kwargs
        return self._reader.read(call, plates, observations, remember=remember, passes=passes, draws=draws)

    def _note_observations(
        self, observations: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Takes sites given by ``observations`` at the first call as observed, though the model samples them.

        Deterministic and factor sites, which `pyro.infer.CSIS` passes as well, are no data. Returns the first of
        several data sets, as a structure is found from one: values without batch dims that their sites do not have.
        """
        with untouched(self.model), torch.no_grad():
            sites = Runner({}).run(self.model, args, kwargs)
        sampled = {name for name, site in sites.items() if not site["is_observed"] and not site_is_subsample(site)}
        extra = [name for name in observations if name in sampled and name not in self._options.observed]
        observed = (*self._options.observed, *extra)
        self._options = self._options._replace(observed=observed, simulated=bool(observed) or self._options.simulated)
        more = {
            name: value.dim() - len(sites[name]["fn"].shape())
            for name, value in observations.items()
            if isinstance(value, Tensor) and name in sites
        }
        return {name: value[(0,) * max(more.get(name, 0), 0)] for name, value in observations.items()}

    def _start(
        self, call: Call, *, learning: bool = False, refinement: Mapping[Hashable, Tensor] | None = None
    ) -> NetworkState:
        """Returns the networks' state with everything observed known."""
        plan, varied = self._made(), self._reader.memory.varied
        others = varied and not self.network.varied
        if self._reader.renewed:
            self._reader.renewed = False
            self.network.renew()
        if others and not self.network.simulated or not self.network.settled:
            with poutine.block(), torch.no_grad():  # parameters that this reads may get no gradient
                state = NetworkState(self.network, call.maps)
                self._observed.tell(state, plan, call, self.network)
                state.settle()
        if others:
            self.network.vary()
        looks = call.own and not (self.training and torch.is_grad_enabled())
        if looks and not (varied or call.familiar or self._told) and self.network.passes:
            self._told = True
            warn(
                "The guide was trained on the same data in every step, and these are others: what it learned of the "
                "former by themselves is left out, and its networks have not learned to read data. Train it on data "
                "that differ from step to step, or on simulations by InferenceCompilation, for it to serve all."
            )
        state = NetworkState(
            self.network,
            call.maps,
            learning=learning,
            constant=(call.familiar or learning and self._reader.waits) and not varied,
            indices=call.indices,
            refinement=refinement,
        )
        self._observed.tell(state, plan, call, self.network)
        return state

    def serve_refinement(self) -> None:
        """Prepares the guide for one that refines what it gives for any data, so that it keeps no offsets itself.

        Raises:
            ValueError: where it was called already, and keeps some.
        """
        if self._plan is None:
            self._options = self._options._replace(simulated=True)
        elif not self.network.simulated:
            raise ValueError(
                "Expected a guide that keeps no offsets for the data that it is trained on; got one that was called "
                "already, with refine='auto'. Make it with refine=None, or call it later."
            )

    # ---- between calls

    def bind(self, model: Callable) -> LazyGuide:
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
        self._settle()
        state = {**self.__dict__, "master": None, "plates": {}}
        state["_model"] = (self._model[0] if _picklable(self._model[0]) else None,)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyGuide:
        """Copies everything but the model, which both guides then share."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for module in [self._model[0], self.create_plates]:
            memo[id(module)] = module
        self._settle()
        state = {**self.__dict__, "master": None, "plates": {}}
        result.__setstate__(copy.deepcopy(state, memo))
        return result

    def get_extra_state(self) -> dict[str, Any]:
        """What belongs to the weights: which covariates are read, at which draws, and marks of the data last seen.

        With ``save_data=True`` these data, and the arguments that exact conditionals need, if these can be saved.
        """
        state: dict[str, Any] = {"simulated": self._options.simulated}
        if self._plan is None:
            return state
        self._settle()
        memory, covariates = self._reader.memory, self._plan.covariates
        state.update(references=list(covariates.references), varied=memory.varied)
        state["columns"] = {site: [plain_column(c) for c in found] for site, found in covariates.columns.items()}
        state["marks"] = {_key(name): mark for name, mark in memory.all_marks().items()}
        if self._options.save_data:
            state["seen"] = {_key(name): value for name, value in memory.seen.items()}
            state["context"] = memory.plain_context()
        return state

    def _settle(self) -> None:
        if self._plan is not None:
            self._reader.settle(self.network.passes)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        device = self._plan.factory["device"]
        state = tree_map_only(Tensor, lambda value: value.to(device), dict(state))
        self._reader.memory.load(state, {_key(name): name for name in self._reader.names})
        columns = {site: tuple(map(column_of, found)) for site, found in state.get("columns", {}).items()}
        columns = {**self._plan.columns, **columns}
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

    def _apply(self, fn: Callable, recurse: bool = True) -> LazyGuide:
        super()._apply(fn, recurse)
        if self._plan is not None:
            plan = self._plan.to(fn)
            self._reader.apply(fn, plan)
            self._set_plan(plan)
        return self


def _first_set(observations: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns values of sites without batch dims that their sites do not have."""

    def own(name: str) -> int:
        site = plan.sites[name]
        return max((-plan.plates.dims[plate] for plate in site.plates), default=0) + site.event_dim

    return {
        name: value[(0,) * max(value.dim() - own(name), 0)] if name in plan.sites and torch.is_tensor(value) else value
        for name, value in observations.items()
    }


def _picklable(model: Any) -> bool:
    try:
        pickle.dumps(model)
    except Exception:  # whatever the parts of a user's model raise
        return False
    return True


def _key(name: Any) -> str:
    return name if isinstance(name, str) else ":".join(name)
