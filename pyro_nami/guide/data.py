"""Where a call's data comes from: the values of observed sites, the covariates, and what was seen before.

In this order: ``observations=``; the model's arguments, where an observed site's value is one of them; a run of the
model at reference values of its latents; and what was last seen in training. Change this module to feed a guide from
elsewhere.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from types import NoneType
from typing import Any, NamedTuple

import pyro
import torch
from pyro.poutine.util import is_validation_enabled, site_is_subsample
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_nami.guide.arguments import Arguments, Kind, kind_of, version_of
from pyro_nami.guide.columns import covariate_values
from pyro_nami.guide.conditioning import covariates_of
from pyro_nami.guide.inputs import IndexMaps
from pyro_nami.guide.interleaved import missing_site, new_site
from pyro_nami.guide.maps import MapReader
from pyro_nami.guide.network import InverseNetwork
from pyro_nami.guide.network_state import NetworkState
from pyro_nami.guide.sampling import fixed_size
from pyro_nami.guide.shapes import resized_plates
from pyro_nami.guide.structure import Assembly
from pyro_nami.messages import warn
from pyro_nami.networks.running import tempered
from pyro_nami.reading.first_run import is_latent, is_passing
from pyro_nami.reading.isolation import untouched
from pyro_nami.reading.runner import Runner, is_fixed

__all__ = ["Call", "DataReader", "check_data"]

_SAME = 1e-7  # relative error of marks of the same data
_MANY_LOOKS, _MOST_LOOKS = 8, 64  # at calls whose arguments differ in numbers only


class Call:
    """One call's data.

    Attributes:
        model, args, kwargs: the model and its arguments.
        plates: plates made outside the model.
        indices: subsampled plate -> its instances.
        values: observed site -> value that the factors read.
        given: values that the model is run with in place of its own.
        covariates: site -> its covariates.
        maps: the index maps of the rows that the factors read.
        unseen: latents of rows that no data covers.
        familiar: whether the data are those that the guide has been trained on in all steps so far.
        sites: the model's sites at reference values of the latents, where a run was needed.
        lacking: sites of the guide's first call that this one lacks, so that they are no data in it.
        new: latents that the first call lacked, which are drawn from the model's own conditional.
        context, derived: the last call in training, and the latents whose exact conditionals are derived from it, since
            this call lacks data of theirs.
    """

    def __init__(
        self, model: Callable, args: tuple, kwargs: Mapping[str, Any], plates: Mapping[str, pyro.plate]
    ) -> None:
        self.model, self.args, self.kwargs, self.plates = model, args, kwargs, plates
        self.indices = {name: plate.indices for name, plate in plates.items() if plate.subsample_size < plate.size}
        self.values: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self.covariates: dict[str, Tensor] = {}
        self.maps = IndexMaps({}, {})
        self.unseen: frozenset[str] = frozenset()
        self.familiar = False
        self.sites: dict[str, Any] = {}
        self.lacking: frozenset[str] = frozenset()
        self.new: tuple[str, ...] = ()
        self.context: Call | None = None
        self.derived: frozenset[str] = frozenset()

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

    def run(self, values: Mapping[str, Tensor], **options: Any) -> dict[str, Any]:
        """Returns the sites of a hidden run of the model on this call's arguments and instances; see `Runner`."""
        return Runner(values, self.indices, **options).run(self.model, self.args, self.kwargs)


class _Look(NamedTuple):
    """What a run of the model has shown: the arguments that are data, and whether calls of its kind vary in more."""

    slots: dict[str, int | str]
    varying: bool


class DataReader:
    """Finds the data of each call of one guide.

    Args:
        assembly: the guide's structure.
        covariates, index_maps: the guide's options of these names.

    Attributes:
        seen: observed site, its covariates, or ``("index", rows, plate)`` -> values last seen in training.
        marks: of those of them that a loaded guide has not seen itself; see `_mark`.
        varied: whether data of several kinds were seen in training.
        context: arguments, keyword arguments, instances and values of the call that it was seen in, kept where latents
            are drawn from exact conditionals, which are derived from them.
    """

    def __init__(self, assembly: Assembly, covariates: Any, index_maps: Mapping[tuple[str, str], Callable]) -> None:
        self.assembly, self.covariates = assembly, covariates
        self._maps = MapReader(assembly, index_maps)
        self.seen: dict[Any, Tensor] = {}
        self.marks: dict[Any, Tensor] = {}
        self.varied = bool(assembly.semi_observed)
        self._equal: dict[Hashable, tuple[Tensor, int]] = {}  # observed node -> a value that is the one seen
        self.context: tuple[tuple, dict, dict, dict] | None = None
        self._looks: dict[Hashable, dict[Hashable, _Look]] = {}
        self._latest_kind: Kind | None = None
        self._probed: tuple[Arguments, dict[str, Tensor]] | None = None
        self._features: dict[Any, tuple[Tensor, int, Tensor]] = {}  # observed node -> value, its version, features

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_features": {}, "_equal": {}, "context": self.plain_context()}

    def __deepcopy__(self, memo: dict[int, Any]) -> DataReader:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__getstate__(), memo), context=self.context)
        return copied

    def plain_context(self) -> tuple[tuple, dict, dict, dict] | None:
        """Returns `context` if it consists of tensors and plain values, which can be saved anywhere."""
        return self.context if _is_plain(self.context) else None

    def read(self, call: Call, observations: Mapping[str, Any], *, remember: bool, draws: bool) -> None:
        """Fills in a call.

        Args:
            call: with model, arguments and plates.
            observations: values by site; those that are no observed sites are passed over.
            remember: whether to keep what the call's own arguments bring, for calls that bring none.
            draws: whether latents will be drawn; unless the model is run for that, it has to be run for their plates.

        Raises:
            ValueError: a site has no data, or is missing from the run.
        """
        assembly = self.assembly
        leaves = [*call.args, *call.kwargs.values(), *call.kwargs]
        if any(isinstance(leaf, (dict, list, tuple)) for leaf in leaves):
            leaves = tree_leaves(leaves)
        kind = self._kind(leaves)
        look = self._known_look(kind)
        slots = look.slots if look is not None else {}
        own: dict[str, Tensor] = {}
        for name in (*assembly.read, *assembly.semi_observed):
            if observations.get(name) is not None:
                call.values[name] = call.given[name] = self._as_tensor(observations[name])
            elif name in slots:
                value = call.argument(slots[name])
                if isinstance(value, Tensor):
                    call.values[name] = own[name] = value
                    if name in assembly.semi_observed:
                        call.given[name] = value
        for name in observations.keys() & set(assembly.bayesnet.observed) - call.values.keys():
            if observations[name] is not None:  # what no factor reads, the model's own conditionals may
                call.given[name] = self._as_tensor(observations[name])
        complete = all(name in call.values for name in assembly.read)
        alone = look is not None and complete and (assembly.interleaved or not draws)
        if not alone or assembly.subsampled or look is not None and look.varying:
            own.update(self._look(call))
        if look is None:
            arguments: dict[Any, Any] = {**dict(enumerate(call.args)), **call.kwargs}
            slots = {} if assembly.subsampled else _find_slots(own, arguments)
            own_data = any(name in own and name not in slots for name in assembly.semi_observed)
            table = self._looks.setdefault(kind[0], {})
            table[kind[1]] = _Look(slots, bool(call.lacking or call.new or own_data))
            if len(table) > _MOST_LOOKS:
                del table[next(iter(table))]
        if assembly.columns:
            call.covariates = self._covariates(call, leaves)
        absent = [name for name in assembly.read if name not in call.values]
        if observations or any(map(_is_data, call.sites.values())):
            absent = [name for name in absent if name not in call.lacking]
        if assembly.map_plans:
            for name in [name for plan in assembly.map_plans for name in (*plan.values, *plan.targets)]:
                if name in call.lacking:
                    raise ValueError(missing_site(name))
            stale = frozenset().union(*(assembly.frames[name] for name in absent))
            call.maps = self._maps.read(call, leaves, self.seen, stale)
        given = any(observations.get(name) is not None for name in assembly.read)  # which no other call can be held to
        call.familiar = not self.varied and not given and self._is_familiar(call)
        self.varied = self.varied or remember and not call.familiar
        if remember and own:
            self.seen.update({name: value.detach() for name, value in own.items()})
            self.seen.update({covariates_of(name): value for name, value in call.covariates.items()})
            self.seen.update(self._maps.state(call.maps))
            if assembly.conjugate:
                context = call.args, dict(call.kwargs), dict(call.indices), dict(call.values)
                self.context = tree_map_only(Tensor, Tensor.detach, context)
        self._fill_from_seen(call, absent)
        self._check_sizes(call)

    def _is_familiar(self, call: Call) -> bool:
        """Whether a call's data are those last seen in training, or none were seen; its minibatches are taken to be."""
        if not self.seen and not self.marks:
            return True
        values: list[tuple[str, Hashable, Tensor]] = []
        values += [(name, name, call.values[name]) for name in self.assembly.read if name in call.values]
        values += [(name, covariates_of(name), value) for name, value in call.covariates.items()]
        return all(
            self._was_seen(node, value)
            for name, node, value in values
            if self.assembly.subsampled.isdisjoint(self.assembly.frames[name])
        )

    def _was_seen(self, node: Hashable, value: Tensor) -> bool:
        known = self._equal.get(node)
        if known is not None and known[0] is value and known[1] == version_of(value):
            return True
        seen, mark = self.seen.get(node), self.marks.get(node)
        if seen is not None:
            same = seen.shape == value.shape and bool(((seen == value) | (seen != seen)).all())
        else:
            same = mark is not None and _same_mark(mark, _mark(value))
        if same:
            self._equal[node] = value, version_of(value)
        return same

    def tell(
        self, state: NetworkState, call: Call, network: InverseNetwork, changing: Collection[Hashable] = ()
    ) -> None:
        """Makes everything observed in a call known to a pass through the networks.

        Args:
            state: the pass, at its start.
            call: the call, read.
            network: the networks.
            changing: observed sites whose features depend on weights.
        """
        for name in call.lacking.intersection(self.assembly.order):
            state.put(name, self._blank(name, name, call, network))
        for name in call.lacking.intersection(self.assembly.columns).difference(call.covariates):
            state.put(covariates_of(name), self._blank(covariates_of(name), name, call, network))
        for name in self.assembly.read:
            if name not in call.values:
                state.put(name, self._blank(name, name, call, network))
                continue
            features = self._features_of(name, call.values[name], network, keep=name not in changing)
            column = self.assembly.mask_column(name)
            if column is not None:
                mask = call.covariates[name][..., column : column + 1] != 0
                features = torch.where(mask, features, torch.zeros_like(features))
            state.put(name, features)
        for name, values in call.covariates.items():
            state.put(covariates_of(name), self._features_of(covariates_of(name), values, network))

    def _blank(self, node: Any, site: str, call: Call, network: InverseNetwork) -> Tensor:
        """Returns features of a node whose site a call lacks: average ones, and none in plates that the call lacks."""
        assembly, shape = self.assembly, [1] * self.assembly.nesting
        for plate in assembly.frames[site]:
            if plate in assembly.flattened:
                shape[assembly.dims[plate]] = assembly.sizes[plate]
            elif plate not in call.frames:
                shape[assembly.dims[plate]] = 0
        return torch.zeros(*shape, network.num_features(node), **assembly.factory)

    def _features_of(self, node: Any, value: Tensor, network: InverseNetwork, keep: bool = True) -> Tensor:
        """Returns the standardized features of an observed node, anew only where the value changed."""
        kept = self._features.get(node)
        keep = keep and not torch.jit.is_tracing()
        if keep and kept is not None and kept[0] is value and kept[1] == version_of(value):
            return kept[2]
        if node in self.assembly.encodings:
            check_data(node, value, self.assembly)
            features = self.assembly.features(node, value)
        else:
            features = value
        if features.shape[-1] != network.num_features(node):
            raise ValueError(
                f"Expected site '{node}' of the event shape of the guide's first call; got a value of shape "
                f"{tuple(value.shape)}. A guide's networks are fixed at its first call: make a new guide."
            )
        features = tempered(network.standardize(node, features))
        if keep:
            self._features[node] = value, version_of(value), features
        return features

    def all_marks(self) -> dict[Any, Tensor]:
        """Returns the marks of all data last seen."""
        return {**self.marks, **{name: _mark(value) for name, value in self.seen.items()}}

    @property
    def names(self) -> list[Any]:
        """The names under which values may be in `seen`."""
        sites = self.assembly.event_dims
        return [*sites, *map(covariates_of, sites), *self._maps.names]

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Applies ``fn`` to all tensors kept, to move them to another device."""
        self.seen = {name: fn(value) for name, value in self.seen.items()}
        device = self.assembly.factory["device"]
        self.marks = {name: mark.to(device) for name, mark in self.marks.items()}
        self.context = tree_map_only(Tensor, fn, self.context)
        self.forget()

    def forget(self) -> None:
        """Forgets what was found for the arguments of earlier calls."""
        self._probed = None
        self._features, self._equal = {}, {}
        self._maps.forget()

    def _look(self, call: Call) -> dict[str, Tensor]:
        """Runs the model at reference values of the latents; returns the values that it observes itself."""
        assembly = self.assembly
        call.indices.update({name: p.indices for name, p in call.plates.items() if name in assembly.subsampled})
        shown = assembly.subsampled - call.indices.keys()
        with torch.no_grad():
            # A semi-observed site may bring its own value.
            latents = {name: v for name, v in assembly.reference.items() if name not in assembly.semi_observed}
            call.sites = sites = call.run(latents, shown=shown, broadcast=True)
        call.indices.update({name: sites[name]["value"] for name in shown if name in sites})
        call.lacking = assembly.names - sites.keys()
        fresh = [name for name in sites if name not in assembly.names and not is_passing(sites[name])]
        call.new = tuple(name for name in fresh if is_latent(sites[name]))
        for name in call.new[:1]:
            warn(f"{new_site(name)} It is drawn from the model's own conditional.")
        for name in [name for name in fresh if _is_data(sites[name])][:1]:
            warn(f"{new_site(name)} Its data is not read.")
        own = {}
        for name in (*assembly.read, *assembly.semi_observed):
            if name in sites and sites[name]["is_observed"] and name not in call.values:
                call.values[name] = own[name] = self._as_tensor(sites[name]["value"])
                if name in assembly.semi_observed:
                    call.given[name] = call.values[name]
        return own

    def _kind(self, leaves: list) -> Kind:
        """Returns a call's kind; that of the last call in a trace, which knows no shapes."""
        if self._latest_kind is None or not torch.jit.is_tracing():
            self._latest_kind = kind_of(leaves)
        return self._latest_kind

    def _known_look(self, kind: Kind) -> _Look | None:
        """Returns what a run of the model at arguments of this kind has shown, None if it is to be run.

        Its sites may be others, and what it observes too. Where many numbers did not matter, others will not either.
        """
        table = self._looks.get(kind[0], {})
        if kind[1] in table or len(table) < _MANY_LOOKS:
            return table.get(kind[1])
        first, *others = table.values()
        return None if first.varying or any(other != first for other in others) else first

    def _covariates(self, call: Call, leaves: list) -> dict[str, Tensor]:
        """Returns the covariates of every site, probed anew only where the model's arguments changed."""
        if self._probed is not None and not call.indices and self._probed[0].are(leaves):
            return dict(self._probed[1])
        with untouched(call.model), torch.no_grad(), pyro.validation_enabled(False):
            values = covariate_values(
                self.assembly,
                self.covariates,
                call.args,
                call.kwargs,
                lambda reference: call.run(reference, broadcast=True),
                call.lacking,
            )
        self._probed = Arguments(leaves), values
        return dict(values)

    def _fill_from_seen(self, call: Call, absent: list[str]) -> None:
        """Takes the data last seen in training where a call brings none, and finds plate rows that it does not cover.

        Covariates go with the data: rows whose covariates are others than those last seen are new rows.
        """
        assembly = self.assembly
        if not absent:
            return
        for name in absent:
            if name not in self.seen:
                raise ValueError(
                    f"Expected data for the observed site '{name}'; this call brings none, and the guide has seen "
                    f"none. Pass it as the model takes it, or as observations={{'{name}': value}}; a loaded guide has "
                    "data of its own only if it was saved with save_data=True."
                )
            call.values[name] = self.seen[name]
        plates: frozenset[Any] = frozenset().union(*(assembly.frames[name] for name in absent))
        new_plates = self._maps.resized(call)
        for name in absent:
            frames = [call.frames[plate] for plate in assembly.frames[name] & call.frames.keys()]
            new_plates.update(resized_plates(call.values[name], frames, assembly.event_dims[name]))
        for name in assembly.columns:
            seen, now = self.seen.get(covariates_of(name)), call.covariates.get(name)
            if seen is None or not plates & assembly.frames[name]:
                continue
            call.covariates[name] = seen
            if now is not None and (seen.shape != now.shape or not torch.equal(seen, now)):
                frames = [call.frames[plate] for plate in plates & assembly.frames[name]]
                new_plates.update({frame.name: frame.size for frame in frames})
        if new_plates:
            call.unseen = self._unseen(new_plates)
        else:
            call.given.update({name: call.values[name] for name in absent})
        lacking = frozenset(
            name
            for name, group in assembly.conjugate.items()
            if name not in call.unseen and not set(group.children).isdisjoint(absent)
        )
        if lacking:
            brought = {name: value for name, value in call.values.items() if name not in absent}
            call.context, call.derived = self._context(call, brought, absent[0]), lacking

    def _context(self, call: Call, brought: Mapping[str, Tensor], absent: str) -> Call:
        """Returns the last call in training, with the values that this one brings."""
        if self.context is None:
            raise ValueError(
                f"Expected data for the observed site '{absent}': latents {', '.join(self.assembly.conjugate)} are "
                "drawn from exact conditionals, derived from the arguments of the last call with data, which were not "
                "saved with the guide. Pass the data, or make the guide with conjugate=False."
            )
        args, kwargs, indices, values = self.context
        context = Call(call.model, args, kwargs, {})
        context.indices, context.values = indices, {**values, **brought}
        context.given = context.values
        return context

    def _check_sizes(self, call: Call) -> None:
        """Raises where a plate that the guide flattens has changed its size."""
        assembly = self.assembly
        for name in call.values.keys() & assembly.read if assembly.flattened else ():
            for plate in assembly.frames[name] & assembly.flattened.keys():
                value, dim = call.values[name], assembly.dims[plate] - assembly.event_dims[name]
                if value.dim() >= -dim and value.shape[dim] not in (1, assembly.sizes[plate]):
                    latent = assembly.flattened[plate]
                    raise ValueError(fixed_size(latent, plate, assembly.sizes[plate], value.shape[dim]))

    def _unseen(self, new_plates: Mapping[str, int]) -> frozenset[str]:
        """Returns the latents of new plate rows; they are drawn from the model's own conditional."""
        assembly = self.assembly
        unseen = frozenset(name for name in assembly.order if assembly.bayesnet.plates[name] & new_plates.keys())
        for name in assembly.order:
            reads = unseen.intersection(assembly.inverse.parents[name])
            if name not in unseen and reads:
                raise NotImplementedError(
                    f"Expected a guide that draws '{name}' before '{min(reads)}', in order to predict new rows of "
                    f"plate '{min(new_plates)}'; this one has the other order. Use inverse='reverse', or pass the "
                    "plate's data."
                )
            factor = assembly.factors.get(name)
            joint = [plate for plate in factor.joint if plate in new_plates] if factor else []
            if name in unseen and joint:
                raise ValueError(fixed_size(name, joint[0], assembly.sizes[joint[0]], new_plates[joint[0]]))
        return unseen

    def _as_tensor(self, value: Any) -> Tensor:
        return value if isinstance(value, Tensor) else torch.as_tensor(value, **self.assembly.factory)


def _mark(value: Tensor) -> Tensor:
    """Returns three numbers that tell data apart, to the rounding of float32, and do not tell what they are."""
    flat = value.detach().flatten().double().nan_to_num()
    place = torch.arange(1, len(flat) + 1, dtype=flat.dtype, device=flat.device)
    return torch.stack([flat.abs() @ place.log1p(), flat @ place.sin(), place.sum()])


def _same_mark(mark: Tensor, other: Tensor) -> bool:
    off = (mark - other).abs()
    return bool((off[:2] <= _SAME * mark[0]).all() and off[2] == 0)


def _is_plain(value: Any) -> bool:
    """Whether a value is made of what ``torch.load`` reads with ``weights_only=True``."""
    if type(value) in (list, tuple, dict):
        return all(map(_is_plain, [*value, *value.values()] if isinstance(value, dict) else value))
    return isinstance(value, Tensor) or type(value) in (int, float, bool, str, NoneType)


def _is_data(site: Any) -> bool:
    """Whether a run observes a value at a site."""
    return site["is_observed"] and not is_fixed(site) and not site_is_subsample(site)


def _find_slots(values: Mapping[str, Tensor], arguments: Mapping[int | str, Any]) -> dict[str, int | str]:
    """Returns observed site -> the argument that is its very value, so that calls need no extra run to find it."""
    return {
        name: slot
        for name, value in values.items()
        for slot, argument in arguments.items()
        if isinstance(argument, Tensor) and argument is value
    }


def check_data(name: str, value: Tensor, assembly: Assembly) -> None:
    """Raises for NaN in the data of a site whose distribution and mask do not allow for it."""
    if name in assembly.nan_allowed or not is_validation_enabled() or not value.is_floating_point():
        return
    missing = int(value.isnan().sum())
    if missing:
        raise ValueError(
            f"Expected data of site '{name}' without NaN; got {missing} of {value.numel()}. Mark missing values with "
            "obs_mask=, or observe them by NanMaskedNormal."
        )
