"""What comes before a pass: the structure at the first call, and the data of every call.

Everything is lazy until the first call, as in Pyro, and fixed from then on. Change this module when a guide's plates or
data come to it in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.replay_messenger import ReplayMessenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.guide.build import assemble
from pyro_nami.guide.call import Call
from pyro_nami.guide.network_state import NetworkState
from pyro_nami.guide.observed import ObservedFeatures
from pyro_nami.guide.reader import CallReader
from pyro_nami.guide.state import PersistentGuide
from pyro_nami.guide.structure import Plan
from pyro_nami.reading.isolation import untouched
from pyro_nami.reading.runner import Runner, takes_observations

__all__ = ["LazyGuide"]


class LazyGuide(PersistentGuide):
    """A guide whose plan and networks are made at its first call, from the model's arguments there."""

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
        self._prototype_frames = {
            frame.name: frame
            for site in prototype.nodes.values()
            for frame in site["cond_indep_stack"]
            if frame.vectorized
        }
        self.prototype_trace = prototype
        self._check_store()
        if self.master is not None:
            self.master()._check_prototype(prototype)
        if self._waiting_state is not None:
            waiting, self._waiting_state = self._waiting_state, None
            self.load_state_dict(*waiting)

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

    def _begin(self, args: tuple, kwargs: dict[str, Any], *, draws: bool = True) -> Call:
        """Returns one call's data: arguments of the model, plates, and the values of observed sites."""
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
        plates, remember = self._create_plates(*args, **kwargs), self.training and torch.is_grad_enabled()
        call = Call(self.model, args, kwargs)
        return self._reader.read(call, plates, observations, remember=remember, draws=draws)

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

    def _start(self, call: Call, *, learning: bool = False) -> NetworkState:
        """Returns the networks' state with everything observed known."""
        plan = self._made()
        if not self.network.settled:
            with poutine.block(), torch.no_grad():  # parameters that this reads may get no gradient
                state = NetworkState(self.network, call.maps)
                self._observed.tell(state, plan, call, self.network)
                state.settle()
        varied = self._reader.memory.varied
        if varied and not self.network.varied:
            self.network.vary()
        state = NetworkState(
            self.network,
            call.maps,
            learning=learning,
            constant=call.familiar and not varied,
            indices=call.indices,
        )
        self._observed.tell(state, plan, call, self.network)
        return state
