"""`AutoNaMIGuide`: a guide whose dependencies are a minimally faithful inverse of the model's.

This module is the contract with Pyro: laziness, where observed values come from, plates, state, and what users call.
The structure is made in `assembly`, the networks in `network`, and the drawing of latents in `sampling`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import init_to_feasible
from torch import Tensor, nn

from pyro_nami.conditioning import covariates_of
from pyro_nami.extraction import untouched
from pyro_nami.graph import BayesNet, Inverse
from pyro_nami.guides.assembly import Assembly, Options, assemble, covariate_values
from pyro_nami.guides.network import NetworkState, as_pyro_module
from pyro_nami.guides.sampling import Interleaved, Pass, draw_detached, fixed_size
from pyro_nami.simulation import run_hidden

__all__ = ["AutoNaMIGuide"]

_MEDIAN_DRAWS = 1000


class AutoNaMIGuide(AutoGuide):
    r"""An amortized guide that can represent the posterior: a faithful inverse of the model, with no more edges.

    At its first call the guide runs the model, reads its Bayesian network off the run, inverts that network with NaMI,
    and builds masked autoregressive networks on the inverse. The factor of a latent v is q(v | Pa(v)) with Pa(v) its
    parents in the inverse, observed sites among them, so one guide serves all data sets of the model. Its parameters
    come, in this order, from the network's output relative to the model's own conditional (the anchor).

    Everything else is as with Pyro's own guides::

        guide = AutoNaMIGuide(model)
        svi = SVI(model, guide, ClippedAdam({"lr": 0.02}), Trace_ELBO())
        svi.step(x, y)
        print(guide.inverse)

    Args:
        model: a Pyro model.
        inverse: ``"auto"`` (the direction with fewer edges), ``"forward"``, ``"reverse"``, ``"free"``,
            ``"stuhlmueller"``, ``"mean_field"``, ``"fully_connected"``, an `Inverse`, or a callable from the model's
            `BayesNet` to one.
        blocks: an ordered partition of the latents; each block is eliminated before the next (sampled after it). An
            observed site named here is semi-observed: sampled in calls that do not observe it.
        observed: sites that the model samples where no data is given, but that inference will condition on.
        families: a family's name for all latents, or a mapping from sites to names or families.
        hidden_features: widths of the hidden layers of every network.
        shared: one masked network for the latents in the same plates; otherwise a small one for every latent.
        within: ``"autoregressive"`` or ``"independent"``: how the elements of one site's vector depend on each other.
        embeddings: observed site -> module that embeds its values, ``(batch, *event)`` to ``(batch, features)``; the
            guide trains a copy.
        covariates: ``"auto"`` finds what differs between the instances of a plate by probing the model; None for
            nothing; or a callable from the model's arguments to a mapping from sites to tensors
            ``(*plates, features)``.
        index_maps: not supported yet.
        anchor: whether factors are relative to the model's own conditionals, where these are known when sampling.
        init_loc_fn: one of Pyro's initialization strategies, for the location at the first step.
        init_scale: scale at the first step, in unconstrained space.
        create_plates: as in Pyro: a callable from the model's arguments to plates.
        activation: of the hidden layers.

    Raises:
        ValueError, TypeError: for options out of range. Those that name sites are checked at the first call.

    References:
        Webb et al. 2018, "Faithful Inversion of Generative Models for Effective Amortized Inference".
    """

    def __init__(
        self,
        model: Callable,
        *,
        inverse: str | Inverse | Callable[[BayesNet], Inverse] = "auto",
        blocks: Sequence[Sequence[str]] | None = None,
        observed: Sequence[str] = (),
        families: Any = None,
        hidden_features: Sequence[int] = (64,),
        shared: bool = True,
        within: str = "autoregressive",
        embeddings: Mapping[str, nn.Module] | None = None,
        covariates: str | None | Callable[..., Mapping[str, Tensor]] = "auto",
        index_maps: Mapping[tuple[str, str], Callable] | None = None,
        anchor: bool = True,
        init_loc_fn: Callable = init_to_feasible,
        init_scale: float = 0.1,
        create_plates: Callable | None = None,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
    ) -> None:
        if not (isinstance(init_scale, float) and init_scale > 0):
            raise ValueError(f"Expected init_scale > 0.; got {init_scale}.")
        if within not in ("autoregressive", "independent"):
            raise ValueError(f"Expected within to be 'autoregressive' or 'independent'; got {within!r}.")
        if covariates is not None and covariates != "auto" and not callable(covariates):
            raise TypeError(f"Expected covariates to be 'auto', None or a callable; got {covariates!r}.")
        if index_maps:
            raise NotImplementedError(
                "Expected index_maps=None; explicit index maps are not supported yet. Sites that read a plate through "
                "an index are pooled over it."
            )
        super().__init__(model, create_plates=create_plates)
        embeddings = {site: as_pyro_module(copy.deepcopy(module)) for site, module in (embeddings or {}).items()}
        self.embeddings = pyro.nn.PyroModule[nn.ModuleDict](embeddings)
        self._options = Options(
            inverse=inverse,
            blocks=blocks,
            observed=(observed,) if isinstance(observed, str) else tuple(observed),
            families=families,
            hidden_features=tuple(hidden_features),
            shared=shared,
            within=within,
            embeddings=embeddings,
            covariates=covariates,
            anchor=anchor,
            init_loc_fn=init_loc_fn,
            init_scale=init_scale,
            activation=activation,
        )
        self._assembly: Assembly | None = None
        self._seen: dict[str, Tensor] = {}
        self._slots: dict[str, int | str] = {}
        self._probed: tuple[list, dict[str, Tensor]] | None = None
        self._read: dict[Any, tuple[Tensor, int, Tensor]] = {}
        self._waiting_state: dict[str, Any] | None = None

    # ---- what was found

    @property
    def bayesnet(self) -> BayesNet:
        """The model's Bayesian network, as found at the first call."""
        return self._made().bayesnet

    @property
    def inverse(self) -> Inverse:
        """The inverse that the guide is built on."""
        return self._made().inverse

    def _made(self) -> Assembly:
        if self._assembly is None:
            raise RuntimeError("Expected a guide that was called once; call it with the model's arguments first.")
        return self._assembly

    # ---- set-up

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with poutine.block():
            plates = self._create_plates(*args, **kwargs)
        subsampled = [name for name, plate in plates.items() if plate.subsample_size < plate.size]
        assembly, network, prototype = assemble(self.model, args, kwargs, self._options, subsampled)
        self._assembly = assembly
        self.network = network
        self._slots = _find_slots(prototype, assembly.read, {**dict(enumerate(args)), **kwargs})
        for name in [name for name, site in prototype.nodes.items() if self._prototype_hide_fn(site)]:
            prototype.remove_node(name)
        self._prototype_frames = {
            frame.name: frame
            for site in prototype.nodes.values()
            for frame in site["cond_indep_stack"]
            if frame.vectorized
        }
        self.prototype_trace = prototype
        if self.master is not None:
            self.master()._check_prototype(prototype)
        if self._waiting_state is not None:
            state, self._waiting_state = self._waiting_state, None
            self.load_state_dict(state)

    def _create_plates(self, *args: Any, **kwargs: Any) -> dict[str, pyro.plate]:
        """Returns the plates that are made outside the model; all others are the model's own."""
        if self.master is not None:
            return super()._create_plates(*args, **kwargs)
        plates = [] if self.create_plates is None else self.create_plates(*args, **kwargs)
        plates = [plates] if isinstance(plates, pyro.plate) else list(plates)
        for plate in plates:
            if not isinstance(plate, pyro.plate):
                raise TypeError(f"Expected create_plates() to return plates; got {type(plate).__name__}.")
        self.plates = {plate.name: plate for plate in plates}
        return self.plates

    # ---- one call

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Samples every latent of the guide, given the model's arguments.

        Args:
            *args, **kwargs: as the model takes them. ``observations={site: value}`` gives values of observed sites
                directly, and reaches the model only if its signature has it.

        Returns:
            Latent -> value, in model order.
        """
        call = self._begin(args, kwargs)
        current = Pass(self._made(), self._start(call), call.unseen)
        if self._assembly.interleaved:
            self._run_interleaved(current, call)
        else:
            self._run_detached(current, call)
        return {name: current.values[name] for name in self._assembly.program if name not in call.observed}

    def _begin(self, args: tuple, kwargs: dict[str, Any]) -> _Call:
        """Returns one call's data: arguments of the model, plates, and the values of observed sites."""
        observations = kwargs.get("observations") or {}
        if "observations" in kwargs and not self._takes_observations():
            kwargs = {key: value for key, value in kwargs.items() if key != "observations"}
        if self._assembly is None:
            self._note_observations(observations)
            self._setup_prototype(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        indices = {name: plate.indices for name, plate in plates.items() if plate.subsample_size < plate.size}
        call = _Call(args, kwargs, plates, indices)
        self._observe(call, observations)
        return call

    def _takes_observations(self) -> bool:
        try:
            return "observations" in inspect.signature(self.model).parameters
        except (TypeError, ValueError):
            return False

    def _note_observations(self, observations: Mapping[str, Any]) -> None:
        """Takes sites given by ``observations`` at the first call as observed, whether or not the model samples them."""
        names = (*self._options.observed, *(name for name in observations if name not in self._options.observed))
        self._options = self._options._replace(observed=names)

    def _observe(self, call: _Call, observations: Mapping[str, Any]) -> None:
        """Fills in the values of all sites that factors read, from the sources in the order of the class's docstring."""
        assembly = self._assembly
        for name in (*assembly.read, *assembly.semi_observed):
            value = observations.get(name)
            if value is not None:
                call.values[name] = call.observed[name] = self._as_tensor(value)
            elif name in self._slots:
                value = call.argument(self._slots[name])
                if isinstance(value, Tensor):
                    call.values[name] = self._remember(name, value)
        complete = all(name in call.values for name in assembly.read)
        if not (complete and assembly.interleaved) or assembly.subsampled or assembly.semi_observed:
            call.trace = self._look(call)
            self._read_trace(call)
        if assembly.columns:
            call.covariates = self._covariates(call)
        self._fill_from_seen(call)

    def _look(self, call: _Call) -> poutine.Trace:
        """Returns a hidden run of the model at reference values of the latents, to see its data and plates."""
        assembly = self._assembly
        shown = assembly.subsampled - call.indices.keys()
        with torch.no_grad():
            trace = run_hidden(
                self.model,
                call.args,
                call.kwargs,
                assembly.reference,
                indices=call.indices,
                shown=shown,
                broadcast=True,
            )
        for name in shown:
            if name in trace.nodes:
                call.indices[name] = trace.nodes[name]["value"]
        return trace

    def _read_trace(self, call: _Call) -> None:
        assembly = self._assembly
        for name in (*assembly.read, *assembly.semi_observed):
            site = call.trace.nodes.get(name)
            if site is None:
                raise ValueError(
                    f"Expected the sites of the guide's first call; this call lacks '{name}'. A guide's structure is "
                    "fixed at its first call: make a new guide, or sample the site in every call."
                )
            if site["is_observed"] and name not in call.values:
                call.values[name] = self._remember(name, self._as_tensor(site["value"]))
                if name in assembly.semi_observed:
                    call.observed[name] = call.values[name]

    def _remember(self, name: str, value: Tensor) -> Tensor:
        """Keeps the data that the guide is trained on, for calls that bring none."""
        if self.training and torch.is_grad_enabled():
            self._seen[name] = value.detach()
        return value

    def _covariates(self, call: _Call) -> dict[str, Tensor]:
        """Returns the covariates of every site, probed anew only where the model's arguments changed."""
        assembly = self._assembly
        leaves = torch.utils._pytree.tree_leaves((call.args, call.kwargs))
        key = [(leaf, leaf._version if isinstance(leaf, Tensor) else None) for leaf in leaves]
        if self._probed is not None and not call.indices and _same_arguments(self._probed[0], key):
            return self._probed[1]

        def run(reference: Mapping[str, Tensor]) -> poutine.Trace:
            return run_hidden(
                self.model, call.args, call.kwargs, reference, indices=call.indices, broadcast=True
            )

        with untouched(self.model), torch.no_grad(), pyro.validation_enabled(False):
            values = covariate_values(assembly, self._options.covariates, call.args, call.kwargs, run)
        self._probed = (key, values)
        return values

    def _fill_from_seen(self, call: _Call) -> None:
        """Takes the data last seen in training where a call brings none, and finds plate rows that it does not cover."""
        assembly = self._assembly
        new_plates: dict[str, int] = {}
        for name in assembly.read:
            if name in call.values:
                if name in assembly.columns:
                    self._remember(covariates_of(name), call.covariates[name])
                continue
            if name not in self._seen:
                raise ValueError(
                    f"Expected data for the observed site '{name}'; this call brings none, and the guide has seen none. "
                    f"Pass it as the model takes it, or as observations={{'{name}': value}}."
                )
            call.values[name] = self._seen[name]
            site = call.trace.nodes[name]
            changed = _resized_plates(call.values[name], site, assembly.event_dims[name])
            if name in assembly.columns:
                seen, now = self._seen[covariates_of(name)], call.covariates[name]
                call.covariates[name] = seen
                if seen.shape != now.shape or not torch.equal(seen, now):
                    changed = {frame.name: frame.size for frame in site["cond_indep_stack"] if frame.vectorized}
            new_plates.update(changed)
            if not changed:
                call.observed.setdefault(name, call.values[name])
        call.unseen = self._unseen(new_plates)

    def _unseen(self, new_plates: Mapping[str, int]) -> frozenset[str]:
        """Returns the latents of new plate rows; they are drawn from the model's own conditional."""
        assembly = self._assembly
        unseen = frozenset(name for name in assembly.order if assembly.bayesnet.plates[name] & new_plates.keys())
        for name in assembly.order:
            reads = unseen.intersection(assembly.inverse.parents[name])
            if name not in unseen and reads:
                raise NotImplementedError(
                    f"Expected a guide that draws '{name}' before '{min(reads)}', in order to predict new rows of "
                    f"plate '{min(new_plates)}'; this one has the other order. Use inverse='reverse', or pass the "
                    "plate's data."
                )
            if name in unseen and assembly.factors[name].joint:
                plate = assembly.factors[name].joint[0]
                raise ValueError(fixed_size(name, plate, assembly.sizes[plate], new_plates.get(plate, 0)))
        return unseen

    def _as_tensor(self, value: Any) -> Tensor:
        like = self.network.no_columns()
        return value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=like.dtype, device=like.device)

    def _start(self, call: _Call) -> NetworkState:
        """Returns the networks' state with everything observed known."""
        state = self.network.start()
        for name in self._assembly.read:
            state.put(name, self._features(name, call.values[name]))
        for name, values in call.covariates.items():
            state.put(covariates_of(name), self._features(covariates_of(name), values))
        return state

    def _features(self, node: Any, value: Tensor) -> Tensor:
        """Returns the standardized features of an observed node, anew only where the value changed."""
        kept = self._read.get(node)
        if kept is not None and kept[0] is value and kept[1] == value._version:
            return kept[2]
        features = value if node not in self._assembly.encodings else self._assembly.features(node, value)
        if features.shape[-1] != self.network.num_features(node):
            raise ValueError(
                f"Expected site '{node}' of the event shape of the guide's first call; got a value of shape "
                f"{tuple(value.shape)}. A guide's networks are fixed at its first call: make a new guide."
            )
        features = self.network.standardize(node, features)
        if node not in self._options.embeddings:
            self._read[node] = value, value._version, features
        return features

    def _run_interleaved(self, current: Pass, call: _Call) -> None:
        with Interleaved(current, call.observed, call.indices) as run:
            self.model(*call.args, **call.kwargs)
        self._check_visited(run.visited)

    def _run_detached(self, current: Pass, call: _Call) -> None:
        assembly = self._assembly
        for name in assembly.semi_observed & call.observed.keys():
            current.know(name, call.observed[name])
        self._check_visited(call.trace.nodes)

        def prior_at(name: str, values: Mapping[str, Tensor]) -> Any:
            trace = run_hidden(self.model, call.args, call.kwargs, {**call.observed, **values}, indices=call.indices)
            return trace.nodes[name]["fn"]

        draw_detached(current, self._plates(call), call.trace, prior_at)
        if current.from_model:
            self._run_interleaved(current, call)

    def _check_visited(self, visited: Any) -> None:
        for name in self._assembly.program:
            if name not in visited:
                raise ValueError(
                    f"Expected the sites of the guide's first call; this call lacks the latent site '{name}'. A guide's "
                    "structure is fixed at its first call: make a new guide, or sample the site in every call."
                )

    def _plates(self, call: _Call) -> dict[str, pyro.plate]:
        """Returns the guide's own plates, of the sizes of this call."""
        plates = dict(call.plates)
        with poutine.block():
            for name in self._assembly.order:
                for frame in call.trace.nodes[name]["cond_indep_stack"]:
                    if frame.vectorized and frame.name not in plates:
                        size = frame.full_size or frame.size
                        subsample = call.indices.get(frame.name)
                        plates[frame.name] = pyro.plate(frame.name, size, subsample=subsample, dim=frame.dim)
        return plates

    # ---- densities and summaries

    def log_prob(self, latents: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Returns log q(latents | data) in nats, summed over sites and plates, in one dense pass.

        Args:
            latents: value of every latent. Batch dims go to the left of the model's plate dims, as in Pyro's
                vectorized particles: ``(*batch, *plates, *event)``, with size 1 for plates that a site is not in; or
                as `Predictive` returns them, one batch dim in front of each site's own shape.
            *args, **kwargs: the model's arguments, ``observations=`` included; observed values may have the same
                batch dims.

        Returns:
            A tensor of the shape of the batch dims.

        Raises:
            ValueError: for a latent that is missing, or of a shape that does not fit.
        """
        with self._pyro_context:
            call = self._begin(args, kwargs)
            assembly, state = self._assembly, self._start(call)
            values = _with_plate_dims(latents, assembly, call.observed)
            for name in assembly.order:
                state.add(name, assembly.features(name, values[name]))
            sites = self._priors(call, values) if assembly.anchored or assembly.predictive or assembly.varies else {}
            current = Pass(assembly, state, call.unseen)
            total = torch.zeros(())
            for name, value in values.items():
                site = sites.get(name)
                prior = site["fn"] if site else None
                fn = prior if name in current.from_model else current.dense(name, prior)
                log_prob = fn.log_prob(value)
                if site is not None and site["mask"] is not None:
                    log_prob = torch.where(torch.as_tensor(site["mask"]), log_prob, torch.zeros_like(log_prob))
                total = total + _sum_plates(log_prob, assembly.nesting)
            return total

    def _priors(self, call: _Call, values: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Returns the model's sites at given values of the latents, from one hidden run."""
        known = {**call.observed, **values}
        return run_hidden(self.model, call.args, call.kwargs, known, indices=call.indices).nodes

    @torch.no_grad()
    def quantiles(
        self, quantiles: Sequence[float], *args: Any, num_samples: int = _MEDIAN_DRAWS, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Returns Monte Carlo quantiles of every latent, elementwise in constrained space.

        The same draws serve every call, so `median` equals the quantile 0.5.

        Args:
            quantiles: numbers between 0 and 1.
            *args, **kwargs: the model's arguments.
            num_samples: number of draws.

        Returns:
            Latent -> tensor ``(quantiles, *site shape)``.
        """
        draws = self._draws(num_samples, args, kwargs)
        return {name: _quantiles(value, quantiles) for name, value in draws.items()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns the Monte Carlo median of every latent, elementwise in constrained space; see `quantiles`."""
        return {name: value[0] for name, value in self.quantiles([0.5], *args, **kwargs).items()}

    def _draws(self, count: int, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns draws of every latent, ``(count, *site shape)``, from a seed of their own."""
        if self._assembly is None:
            with poutine.block():
                self(*args, **kwargs)
        assembly = self._assembly
        with untouched(self.model), poutine.block():
            pyro.set_rng_seed(0)
            with pyro.plate("_draws", count, dim=-1 - assembly.nesting):
                values = self(*args, **kwargs)
        return {name: _own_shape(name, value, count, self.prototype_trace.nodes[name]) for name, value in values.items()}

    # ---- state

    def bind(self, model: Callable) -> AutoNaMIGuide:
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
        state["_probed"], state["_read"] = None, {}
        state["plates"] = {}
        state["_model"] = (self._model[0] if _picklable(self._model[0]) else None,)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoNaMIGuide:
        """Copies everything but the model, which both guides then share."""
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        for module in [self._model[0], self.create_plates]:
            memo[id(module)] = module
        state = {**self.__dict__, "master": None, "_probed": None, "_read": {}, "plates": {}}
        result.__setstate__(copy.deepcopy(state, memo))
        return result

    def get_extra_state(self) -> dict[str, Any]:
        """The data last seen in training, which belongs to a guide's state as its weights do."""
        return {"seen": {_key(name): value for name, value in self._seen.items()}}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        names = {_key(name): name for site in self._made().event_dims for name in (site, covariates_of(site))}
        self._seen = {names[key]: value for key, value in state["seen"].items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state, or keeps it for the first call, when the guide gets its structure and parameters."""
        if self._assembly is None:
            self._waiting_state = dict(state_dict)
            return nn.modules.module._IncompatibleKeys([], [])
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable, recurse: bool = True) -> AutoNaMIGuide:
        super()._apply(fn, recurse)
        self._seen = {name: fn(value) for name, value in self._seen.items()}
        if self._assembly is not None:
            self._assembly.apply(fn)
        self._probed, self._read = None, {}
        return self


class _Call:
    """One call's data.

    Attributes:
        args, kwargs: the model's arguments.
        plates: plates made outside the model.
        indices: subsampled plate -> its instances.
        values: observed site -> value that the factors read.
        observed: those values that the model is run with in place of its own.
        covariates: site -> its covariates.
        unseen: latents of rows that no data covers.
        trace: a run of the model at reference values, where one was needed.
    """

    def __init__(
        self, args: tuple, kwargs: dict[str, Any], plates: dict[str, pyro.plate], indices: dict[str, Tensor]
    ) -> None:
        self.args, self.kwargs, self.plates, self.indices = args, kwargs, plates, indices
        self.values: dict[str, Tensor] = {}
        self.observed: dict[str, Tensor] = {}
        self.covariates: dict[str, Tensor] = {}
        self.unseen: frozenset[str] = frozenset()
        self.trace: poutine.Trace | None = None

    def argument(self, slot: int | str) -> Any:
        """Returns the model's argument at a position or of a name; None if this call has none."""
        if isinstance(slot, str):
            return self.kwargs.get(slot)
        return self.args[slot] if slot < len(self.args) else None


def _find_slots(trace: poutine.Trace, sites: Sequence[str], arguments: Mapping[int | str, Any]) -> dict[str, int | str]:
    """Returns observed site -> the argument that is its very value, so that calls need no extra run to find it."""
    return {
        name: slot
        for name in sites
        for slot, argument in arguments.items()
        if isinstance(argument, Tensor) and argument is trace.nodes[name]["value"]
    }


def _same_arguments(before: list, now: list) -> bool:
    if len(before) != len(now):
        return False
    for (old, old_version), (new, version) in zip(before, now):
        if isinstance(old, Tensor) or isinstance(new, Tensor):
            if old is not new or old_version != version:
                return False
        elif old is not new and old != new:
            return False
    return True


def _resized_plates(value: Tensor, site: Mapping[str, Any], event_dim: int) -> dict[str, int]:
    """Returns the plates of a site, with their sizes now, in which ``value`` has another size."""
    batch = value.shape[: value.dim() - event_dim]
    return {
        frame.name: frame.size
        for frame in site["cond_indep_stack"]
        if frame.vectorized and len(batch) >= -frame.dim and batch[frame.dim] != frame.size
    }


def _picklable(model: Any) -> bool:
    try:
        pickle.dumps(model)
    except Exception:  # whatever the parts of a user's model raise
        return False
    return True


def _key(name: Any) -> str:
    return name if isinstance(name, str) else ":".join(name)


def _quantiles(value: Tensor, quantiles: Sequence[float]) -> Tensor:
    ordered = value.sort(0).values
    last = len(ordered) - 1
    return torch.stack([ordered[min(last, max(0, math.floor(q * last + 0.5)))] for q in quantiles])


def _own_shape(name: str, value: Tensor, count: int, site: Mapping[str, Any]) -> Tensor:
    """Returns draws ``(count, *site shape)`` from values with the draws left of all plate dims."""
    event_dim = site["fn"].event_dim
    nesting = max((-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized), default=0)
    cut = value.dim() - event_dim - nesting
    return value.expand((count,) + value.shape[1:]).reshape((count,) + value.shape[cut:])


def _with_plate_dims(
    latents: Mapping[str, Tensor], assembly: Assembly, observed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns every latent's value with batch dims left of the plate dims; see `AutoNaMIGuide.log_prob`."""
    wanted = [name for name in assembly.program if name not in observed and name not in assembly.transparent]
    for name in wanted:
        if name not in latents:
            raise ValueError(f"Expected a value for every latent, {wanted}; got none for '{name}'.")
    own_dims = {name: {assembly.dims[plate] for plate in assembly.bayesnet.plates[name]} for name in wanted}

    def fits(name: str) -> bool:
        value = latents[name]
        batch = value.shape[: value.dim() - assembly.event_dims[name]]
        return all(
            batch[dim] == 1 for dim in range(-min(len(batch), assembly.nesting), 0) if dim not in own_dims[name]
        )

    if all(map(fits, wanted)):
        return {name: latents[name] for name in wanted}
    values = {}
    for name in wanted:
        value, depth = latents[name], -min(own_dims[name], default=0)
        cut = value.dim() - assembly.event_dims[name] - depth
        if cut != 1:
            raise ValueError(
                f"Expected latent '{name}' of shape (*batch, *plates, *event), batch dims left of {assembly.nesting} "
                f"plate dims, or with one batch dim in front of its own shape; got {tuple(value.shape)}."
            )
        values[name] = value.reshape(value.shape[:1] + (1,) * (assembly.nesting - depth) + value.shape[1:])
    return values


def _sum_plates(log_prob: Tensor, nesting: int) -> Tensor:
    """Sums over the plate dims, the rightmost ``nesting``."""
    if nesting == 0:
        return log_prob
    log_prob = log_prob[(None,) * max(0, nesting - log_prob.dim())]
    return log_prob.sum(tuple(range(-nesting, 0)))
