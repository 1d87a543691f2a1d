"""A guide between calls: made at its first call, saved, loaded, copied, and moved to another mode.

As in Pyro, nothing is made before the first call.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
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

from pyro_nami.deriving.collapsed import Collapsed
from pyro_nami.guide.build import assemble
from pyro_nami.guide.call import Call, Reading
from pyro_nami.guide.exchangeable import exchangeable_plates
from pyro_nami.guide.known_parameters import (
    check_store,
    give_to_store,
    hand_over,
    warn_of_other_weights,
)
from pyro_nami.guide.mode import Mode
from pyro_nami.guide.observed import tell_observed
from pyro_nami.guide.options import Options
from pyro_nami.guide.plan import Covariates, Plan
from pyro_nami.guide.reader import ARGUMENTS, CallReader, has_first_sizes
from pyro_nami.messages import quoted
from pyro_nami.parameters.backward import Backward
from pyro_nami.parameters.conditioning import site_of
from pyro_nami.parameters.inverse_network import InverseNetwork
from pyro_nami.parameters.network_state import NetworkState
from pyro_nami.program.isolation import forked_rng, seed_rng, untouched
from pyro_nami.program.many_draws import FEWEST_DRAWS
from pyro_nami.program.plate_dims import own_dims
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner, needs_arguments, takes_observations
from pyro_nami.program.series_sites import SeriesSites
from pyro_nami.reading.covariates import column_of, plain_column

__all__ = ["LazyGuide"]

OTHER_STRUCTURE = (
    "The arguments and data of a guide's first call decide what is derived, and the sizes of its networks. Before "
    "loading, call the new guide with the data of training, or save the state with save_data=True."
)


class LazyGuide(AutoGuide):
    """A guide whose plan and networks are made at its first call, from the model's arguments there.

    It can be saved, copied and moved before that and after. Pyro's own guides lose their model when they are pickled,
    the original with the copy; this one keeps it, and a copy that cannot hold it gets it back by `bind`.
    """

    _plan: Plan  # this and the next one are None before the first call
    _reader: CallReader
    _options: Options
    _waiting_state: tuple[dict[str, Any], bool, bool] | None
    network: InverseNetwork

    # ---- the first call

    def _made(self) -> Plan:
        if self._plan is None:
            raise RuntimeError(
                "Expected a guide that was called once; call it with the model's arguments first."
            )
        return self._plan

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with poutine.block():
            plates = self._create_plates(*args, **kwargs)
        parts = [name for name, plate in plates.items() if plate.subsample_size < plate.size]
        found = assemble(self.model, args, kwargs, self._options, parts)
        self.prototype_trace = prototype = found.prototype
        self._plan, self.network = found.plan, found.network
        self._innovations = dict(found.series)
        self._reader = CallReader(found.plan, self._options)
        self._reader.memory.derived.tables.update(found.tables)
        for name, site in list(prototype.nodes.items()):
            if self._prototype_hide_fn(site):
                prototype.remove_node(name)
        check_store(self)
        self._choose_start(args, kwargs)
        if self.master is not None:
            self.master()._check_prototype(prototype)
        if self._waiting_state is not None:
            waiting, self._waiting_state = self._waiting_state, None
            self.load_state_dict(*waiting)

    def _choose_start(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Starts bounds at the candidate with the largest ELBO at the first call; without data, at the first one."""
        starts, self.network.starts = self.network.starts, []
        prefix = f"{self._pyro_name}."
        is_started = any(name.startswith(prefix) for name in pyro.get_param_store()._params)
        if len(starts) < 2 or self._options.observed or is_started:
            return
        elbo, losses = Trace_ELBO(FEWEST_DRAWS), []
        with (
            untouched(self.model),
            own_dims(),
            poutine.block(),
            pyro.validation_enabled(False),
            torch.no_grad(),
        ):
            for initial in starts:
                self.network.set_initial(initial)
                seed_rng(0)
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
                raise TypeError(
                    f"Expected create_plates() to return plates; got {type(plate).__name__}."
                )
        self.plates = {plate.name: plate for plate in plates}
        return self.plates

    # ---- each call

    def _begin(self, args: tuple, kwargs: dict[str, Any], *, draws: bool = True) -> Call:
        """Returns the call whose data the guide answers for.

        A call without arguments, where the model needs some, stands for the arguments of training.
        """
        context = None if self._plan is None or args or kwargs else self._reader.memory.context
        if context is not None and needs_arguments(self.model):
            args, kwargs = context[:2]
        observations = kwargs.get("observations") or {}
        if "observations" in kwargs and not takes_observations(self.model):
            kwargs = {key: value for key, value in kwargs.items() if key != "observations"}
        may_train = torch.is_grad_enabled()
        # A guide that scores first, or that is replayed (`pyro.infer.CSIS`), is trained on simulations.
        replayed = bool(observations) and any(
            isinstance(handler, ReplayMessenger) for handler in _PYRO_STACK
        )
        if replayed and self._plan is not None and not self._reader.memory.history.is_trained:
            self.serve_any_data()
        if self._plan is None:
            first = args, kwargs
            if observations:
                single = self._note_observations(observations, args, kwargs)
                if "observations" in kwargs:
                    first = args, {**kwargs, "observations": single}
            if self._waiting_state is not None:
                state = self._waiting_state[0].get("_extra_state", {})
                self._take_mode(state)
                first = (state.get("context") or first)[:2]  # as the saved guide was
            elif replayed or not draws:
                self._options = self._options._replace(mode=Mode.AMORTIZED)
            self._setup_prototype(*first[0], **first[1])
        else:
            self._settle()
            mode = self._reader.memory.mode
            if mode is Mode.MINIBATCHES and self._options.mode is not mode:
                self._go_over_to_minibatches()
        plan = self._made()
        loops = plan.loops.among(observations)
        observations = loops.joined(observations)
        for name in observations:
            if name not in plan.names:
                known = quoted(plan.bayesnet.observed)
                raise ValueError(
                    f"Expected observations of the model's sites, {known}; got one of '{name}'."
                )
        # of several data sets, whose values the model's runs hold, it sees the first
        if "observations" in kwargs:
            first_set = {
                name: plan.first_of(name, value) if torch.is_tensor(value) else value
                for name, value in observations.items()
            }
            kwargs = {**kwargs, "observations": loops.split(first_set)}
        plates = self._create_plates(*args, **kwargs)
        call = Call(
            Program(plan.for_many(self.model), args, kwargs, plan.loops, plan.program.computed)
        )
        self.network.backward = backward = Backward()
        return self._reader.read(
            call, plates, observations, backward=backward if may_train else None, draws=draws
        )

    def _go_over_to_minibatches(self) -> None:
        """Makes the guide anew, at the arguments of its first steps, for data that differ from step to step."""
        memory = self._reader.memory
        args, kwargs = (memory.context or ((), {}))[:2]
        moving = frozenset(map(site_of, memory.history.moving)).intersection(self._plan.sites)
        first = memory.kept or Reading(Call(Program(self.model, args, kwargs)))
        if ARGUMENTS in memory.history.moving:
            moving |= self._plan.program.computed | first.call.moving
        around = first.surroundings
        along = exchangeable_plates(first, self._reader.differing or first, moving)
        # if masks alone differ, all data are those of minibatches
        moving = frozenset(self._plan.loops.names_of(moving or self._plan.read))
        self._options = self._options._replace(mode=Mode.MINIBATCHES, moving=moving, along=along)
        before = list(self.network.parameters())
        self._unmake()
        with around.restored() if around else nullcontext():
            self._setup_prototype(*args, **kwargs)
        if memory.kept:
            memory.kept = memory.kept._replace(surroundings=None)
        memory.forget_derived()
        self._reader.memory = memory
        hand_over(before, list(self.network.parameters()))
        logging.getLogger(__name__).warning(
            "The data of %s differ from step to step, so the guide takes them for minibatches of one data set, over "
            "%s: latents outside are learned from all steps, latents inside are inferred from the data of each call. "
            "To say otherwise make the guide with mode='fixed', for one data set, or mode='amortized', for a posterior "
            "of each data set; or name another plate in the model: pyro.plate(name, size, subsample_size=rows).",
            quoted(sorted(moving)),
            " and ".join(f"plate {plate!r}" for plate in sorted(self._plan.plates.minibatched))
            or "no plate",
        )

    @property
    def series(self) -> dict[str, SeriesSites]:
        """The latents that are innovations of a series, by site."""
        self._made()
        return self._innovations

    def for_weights(self) -> LazyGuide:
        """Prepares the guide, before its first call, for draws that importance weights correct, and returns it.

        More latents are searched for together then, as weights repair what a search leaves, where SVI would have to
        learn it.
        """
        self._options = self._options._replace(is_weighted=True)
        return self

    def answer_for(self, *args: Any, **kwargs: Any) -> None:
        """Makes the guide answer for the data among these arguments, as a training step does."""
        with poutine.block(), torch.enable_grad(), forked_rng():
            self(*args, **kwargs)
        self._reader.count_as_training()

    def mix(self, is_weighted: bool = True) -> float | None:
        """From the next call on, draws the latents that come first from mixtures, for importance weights to correct.

        Args:
            is_weighted: whether draws will be; if not, mixtures have parts about modes alone.

        Returns:
            The share of searches for modes that would lead to others than those found; None where nothing is mixed.
        """
        tables = self._reader.memory.derived.tables.values()
        found = [each.conditionals for each in tables if isinstance(each.conditionals, Collapsed)]
        unseen = [each.mix(is_weighted) for each in found]
        return max((share for share in unseen if share is not None), default=None)

    def _take_mode(self, state: Mapping[str, Any]) -> None:
        """Takes the mode of a saved guide, if its user asked for that mode or training found it."""
        if "mode" in state:
            mode = Mode(state["mode"])
            kept = mode if state.get("asked") or mode is Mode.MINIBATCHES else None
            moving, along = (frozenset(state.get(key, ())) for key in ("moving", "along"))
            self._options = self._options._replace(mode=kept, moving=moving, along=along)

    def _note_observations(
        self, observations: Mapping[str, Any], args: tuple, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Marks sites as observed that ``observations`` gives at the first call, though the model samples them.

        Deterministic and factor sites, which `pyro.infer.CSIS` passes as well, are no data. Returns the first of
        several data sets, as a structure is found from one: values without batch dims that their sites do not have.
        """
        with untouched(self.model), torch.no_grad():
            sites = Runner({}).run(self.model, args, kwargs)
        observed, single = list(self._options.observed), dict(observations)
        for name, value in observations.items():
            site = sites.get(name)
            if site is None:
                continue
            is_sampled = not site["is_observed"] and not site_is_subsample(site)
            if is_sampled and name not in observed:
                observed.append(name)
            if isinstance(value, Tensor):
                single[name] = value[(0,) * max(0, value.dim() - len(site["fn"].shape()))]
        mode = Mode.AMORTIZED if observed else self._options.mode
        self._options = self._options._replace(observed=tuple(observed), mode=mode)
        return single

    def _start(
        self,
        call: Call,
        *,
        learning: bool = False,
        refinement: Mapping[Hashable, Tensor] | None = None,
    ) -> NetworkState:
        """Returns the networks' state with everything observed known."""
        plan, network = self._made(), self.network
        known = plan, call, self._reader.cache, self._options.embeddings
        if self._reader.moved:
            self._reader.moved = False
            network.renew()
        if not network.settled:
            with poutine.block(), torch.no_grad():  # parameters that this reads may get no gradient
                network.take_stored()
                state = NetworkState(network, call.maps)
                tell_observed(state, *known)
                state.settle()
        indices = call.indices if has_first_sizes(call, plan) else None
        state = NetworkState(
            network, call.maps, learning=learning, indices=indices, refinement=refinement
        )
        tell_observed(state, *known)
        return state

    def serve_any_data(self) -> None:
        """Makes the guide amortized: it is made anew at the next call, if there was one.

        Raises:
            ValueError: where it was trained on one data set already, or on minibatches of one.
        """
        if self.mode == Mode.AMORTIZED.value:
            return
        if self._plan is not None and self._reader.memory.history.is_trained:
            raise ValueError(
                "Expected a guide that answers for any data; this one was already trained on one data set. Make a new "
                "one with mode='amortized'."
            )
        self._options = self._options._replace(mode=Mode.AMORTIZED)
        self._unmake()

    def _unmake(self) -> None:
        """Forgets what the first call made, so that the next one is the first."""
        if self._plan is not None:
            self._plan = None  # type: ignore[assignment]
            del self.network  # and its parameters in the store, whose names new ones have

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        warn_of_other_weights(self)

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
        """Returns what is saved beside the weights: mode, covariates, and fingerprints of the training data.

        With ``save_data=True`` the arguments and data of training as well, if these are tensors and plain values.
        """
        mode = self._options.mode
        if self._plan is None:
            return {} if mode is None else {"mode": mode.value, "asked": True}
        self._settle()
        memory, covariates = self._reader.memory, self._plan.covariates
        history = memory.history
        return {
            "mode": (mode or memory.mode).value,
            "asked": mode is not None,
            "moving": sorted(self._options.moving),
            "along": sorted(self._options.along),
            "trained": history.is_trained,
            "one_context": memory.has_one_context,
            "data": {_key(node): each for node, each in (history.current or {}).items()},
            "references": list(covariates.references),
            "columns": {
                site: [plain_column(c) for c in found] for site, found in covariates.columns.items()
            },
            "context": memory.plain_context() if self._options.save_data else None,
            "learned": sorted(self._plan.learned),
        }

    def _settle(self) -> None:
        """Takes in the latest call as a training step, if it was one."""
        if self._plan is not None:
            self._reader.settle()

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        if "columns" not in state:  # of a guide that was not called
            return
        device = self._plan.factory["device"]
        state = tree_map_only(Tensor, lambda value: value.to(device), dict(state))
        self._reader.memory.load(state, {_key(name): name for name in self._reader.names})
        columns = {site: tuple(map(column_of, found)) for site, found in state["columns"].items()}
        columns = {**self._plan.columns, **columns}
        covariates = Covariates(columns, list(state["references"]))
        self._plan = dataclasses.replace(self._plan, covariates=covariates)
        self._reader.follow(self._plan)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state, or keeps it for the first call, when the guide gets its structure and parameters."""
        before = self._options.mode
        self._take_mode(state_dict.get("_extra_state", {}))
        if self._plan is None or self._options.mode is not before:
            self._unmake()  # as another mode has other networks
            self._waiting_state = dict(state_dict), strict, assign
            return nn.modules.module._IncompatibleKeys([], [])
        saved = set(state_dict.get("_extra_state", {}).get("learned", self._plan.learned))
        differing = saved.symmetric_difference(self._plan.learned)
        if strict and differing:
            own, names = quoted(sorted(self._plan.learned)), quoted(sorted(differing))
            raise RuntimeError(
                f"Expected a state_dict of a guide that learns {own or 'nothing'}; got one where {names} differ. "
                + OTHER_STRUCTURE
            )
        self._reader.follow(self._plan)
        try:
            keys = super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:  # of tensors of other sizes
            raise RuntimeError(f"{error}\n{OTHER_STRUCTURE}") from error
        give_to_store(self)
        return keys

    def _apply(self, fn: Callable, recurse: bool = True) -> LazyGuide:
        super()._apply(fn, recurse)
        if self._plan is not None:
            self._plan = self._plan.to(fn)
            self._reader.apply(fn, self._plan)
        return self


def _picklable(model: Any) -> bool:
    try:
        pickle.dumps(model)
    except Exception:  # whatever the parts of a user's model raise
        return False
    return True


def _key(name: Any) -> str:
    return name if isinstance(name, str) else ":".join(name)
