"""Assembling a guide: from a model and its arguments to networks on a minimally faithful inverse.

`assemble` runs once, at a guide's first call. What it returns is fixed from then on, whatever data comes later, and is
plain data beside one module, the networks. Change this module when a guide needs to know something more of its model.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_nami.factors.bijections import peel_support, support_of
from pyro_nami.factors.family import Family
from pyro_nami.factors.features import features_of
from pyro_nami.factors.registry import make_family
from pyro_nami.factors.unconstrained import NormalFamily
from pyro_nami.graph.inverse import Inverse
from pyro_nami.guide.columns import PRIOR_DRAWS, CovariateFinder, covariate_values
from pyro_nami.guide.conditioning import Plates, Read, Source, covariates_of, nodes_of, plan_sources
from pyro_nami.guide.couplings import MOST_COUPLED
from pyro_nami.guide.evidence import initial_evidence, initial_expert, pooled_part
from pyro_nami.guide.features import Embedding, first_instance, standardization
from pyro_nami.guide.groups import Factor
from pyro_nami.guide.inputs import flatten
from pyro_nami.guide.inversion import invert, plan_reads, with_hidden_evidence, with_latent_blocks
from pyro_nami.guide.network import InverseNetwork
from pyro_nami.guide.structure import Assembly, Options, check_names
from pyro_nami.messages import warn
from pyro_nami.networks.encoders import make_encoder
from pyro_nami.reading.covariates import Column
from pyro_nami.reading.first_run import (
    allows_nan,
    first_run,
    is_latent,
    is_passing,
    is_transparent,
    subsamples,
)
from pyro_nami.reading.forms import ConjugateGroup, find_conjugate
from pyro_nami.reading.isolation import untouched
from pyro_nami.reading.network import Extraction, extract, is_blocked
from pyro_nami.reading.runner import Runner, own_dims, prior_draws

__all__ = ["assemble"]

_POOLED_FEATURES, _POOLING_UNITS = 16, (16,)
_MOST_OFFSETS = 100_000  # instances of a factor
_PLENTY = 5  # instances from which an observed site is standardized by its own data


def assemble(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], options: Options, subsampled: Collection[str] = ()
) -> tuple[Assembly, InverseNetwork, poutine.Trace]:
    """Returns a guide's structure, its networks, and a run at the initial values, from one call's arguments.

    Args:
        model, args, kwargs: the model, and arguments that it runs with.
        options: the guide's.
        subsampled: plates that ``create_plates`` subsamples.

    Raises:
        ValueError: for a model without latents, and for options that name what the model lacks.
        NotImplementedError: for a site that no family covers.
    """
    with untouched(model), poutine.block(), own_dims(), torch.no_grad():
        prototype = first_run(model, args, kwargs, options.init_loc_fn)
        nodes: Mapping[str, Any] = prototype.nodes
        # All runs see the same instances of a subsampled plate: with others the sites, or their shapes, may be others.
        model = poutine.condition(model, subsamples(nodes))
        with untouched(model):
            # A guide's structure and scales are a function of the model and its arguments, not of the seed.
            pyro.set_rng_seed(0)
            maps = {pair: given(*args, **kwargs) for pair, given in options.index_maps.items()}
            found = extract(
                model,
                args,
                kwargs,
                observed=options.observed,
                init=lambda site: nodes[site["name"]]["value"],
                index_maps=maps,
            )
            draws = prior_draws(model, args, kwargs, PRIOR_DRAWS)
        assembler = _Assembler(model, args, kwargs, options, found, prototype, draws, frozenset(subsampled))
        return (*assembler.assemble(), prototype)


class _Assembler:
    """The steps of `assemble`, and what they share."""

    def __init__(
        self,
        model: Callable,
        args: tuple,
        kwargs: Mapping[str, Any],
        options: Options,
        found: Extraction,
        prototype: poutine.Trace,
        draws: list[dict[str, Tensor]],
        subsampled: frozenset,
    ) -> None:
        self.run = lambda values, until=None: Runner(values, broadcast=True, until=until).run(model, args, kwargs)
        self.model, self.args, self.kwargs = model, args, kwargs
        self.options, self.found, self.prototype, self.draws = options, found, prototype, draws
        self.net = with_latent_blocks(found.bayesnet, options.blocks)
        self.nodes: Mapping[str, Any] = prototype.nodes
        frames: dict[str, Any] = {}
        depth: dict[str, int] = {}
        for name in self.net.sites:
            for i, frame in enumerate(f for f in self.nodes[name]["cond_indep_stack"] if f.vectorized):
                frames[frame.name] = frame
                depth[frame.name] = max(depth.get(frame.name, 0), i)
        self.dims = {name: frame.dim for name, frame in frames.items()}
        self.sizes = {name: frame.size for name, frame in frames.items()}
        self.frames = {
            name: frozenset(frame.name for frame in self.nodes[name]["cond_indep_stack"] if frame.vectorized)
            for name in self.net.sites
            if name in self.nodes
        }
        if is_blocked(model):
            self.net = with_hidden_evidence(self.net)
        self.data = [name for name in self.net.observed if name in self.nodes]
        self.passing = {name for name in self.frames if is_passing(self.nodes[name])}
        for name in [name for name in self.passing if is_latent(self.nodes[name])]:
            raise NotImplementedError(
                f"Expected latent '{name}' in every call; it is in a sequential plate that the model subsamples. Use a "
                "vectorized plate, `with pyro.plate(...)`, or hide such latents: poutine.block(model, expose=[...])."
            )
        parts = (plate for plate, frame in frames.items() if frame.full_size not in (None, frame.size))
        self.subsampled = subsampled.union(subsamples(self.nodes), parts)
        nesting = self.net.nesting

        def level(plate: str) -> int:
            return max([depth[plate], *(1 + level(outer) for outer in nesting.get(plate, ()))])

        self.plate_order = tuple(sorted(frames, key=lambda plate: (level(plate), depth[plate])))
        self.program_rank = {name: i for i, name in enumerate(self.nodes)}

    def assemble(self) -> tuple[Assembly, InverseNetwork]:
        net, options = self.net, self.options
        latents = [name for name in net.latent if not net.sites[name].marginalized]
        if not latents and not is_blocked(self.model):
            logging.getLogger(__name__).warning(  # no warning of Python's, as Pyro's own guides are silent here
                "Expected a model with at least one latent sample site; got a model with %s, for which the guide is "
                "empty. If a site shall be inferred, do not pass it a value at the guide's first call, or name it in "
                "`blocks`.",
                "observed sites only: " + ", ".join(map(repr, net.observed)) if net.observed else "no sites",
            )
        inverse = invert(net, options.inverse, options.blocks)
        predictive = frozenset(inverse.predictive) - self.found.hidden_randomness
        # With blocks, factors may read some of these, which then have to be factors as well.
        read = predictive
        while read:
            learned = [name for name in inverse.order if name not in predictive]
            read = predictive.intersection(u for name in learned for u in inverse.parents[name])
            predictive -= read
        order = [name for name in reversed(inverse.order) if name not in predictive]
        interleaved = all(
            self.program_rank[parent] < self.program_rank[name]
            for name in order
            for parent in inverse.parents[name]
            if parent not in net.observed
        )
        if interleaved:
            order.sort(key=self.program_rank.__getitem__)
        families = {name: self._family(name) for name in order}
        check_names("embeddings", options.embeddings, self.data, "an observed site")
        features = {name: families.get(name) or self._features(name) for name in (*order, *self.data)}
        columns, references = CovariateFinder(
            self.options.covariates,
            self.model,
            self.args,
            self.kwargs,
            self.net,
            self.nodes,
            self.frames,
            self.sizes,
            self.dims,
            self.subsampled,
            self.draws,
            self.run,
        ).find()
        # A ``pyro.factor`` couples what it reads, but holds no value; and of a part no data set can be told.
        empty = {name for name in net.sites if name not in self.nodes or self.nodes[name]["value"].numel() == 0}
        empty |= self.passing
        reads = plan_reads(net, inverse, order, columns, empty)
        blocks = {name: self._block(name, inverse) for name in order}
        conjugate = self._conjugate(inverse, families, blocks) if interleaved else {}
        plates = Plates(
            self.plate_order, frozenset().union(*blocks.values()), self.subsampled, dict(net.nesting)
        )
        factors = [
            self._factor(name, families[name], reads[name], blocks[name], plates)
            for name in order
            if name not in conjugate
        ]
        anchored = self._anchored(families, inverse) if options.anchor and interleaved else frozenset()
        used = {child for group in conjugate.values() for child in group.children}
        used = used.union(*(nodes_of(source) for factor in factors for source in factor.sources))
        transparent = [name for name, site in self.nodes.items() if is_transparent(site)]
        emitted = {*latents, *transparent}
        assembly = Assembly(
            bayesnet=net,
            inverse=inverse,
            order=tuple(order),
            predictive=tuple(name for name in latents if name in predictive),
            transparent=tuple(transparent),
            program=tuple(name for name in self.nodes if name in emitted),
            factors={factor.name: factor for factor in factors},
            families=families,
            encodings=features,
            event_dims={name: self.nodes[name]["fn"].event_dim for name in (*latents, *self.data)},
            dims=self.dims,
            frames=self.frames,
            subsampled=self.subsampled,
            map_plans=self.found.map_plans,
            anchored=anchored,
            experts=self._experts(factors, families, anchored),
            conjugate=conjugate,
            masked=any(self.nodes[name]["mask"] is not None for name in emitted),
            interleaved=interleaved,
            read=tuple(name for name in self.data if name in used),
            semi_observed=self._semi_observed(),
            columns={name: found for name, found in columns.items() if {name, covariates_of(name)} & used},
            references=references,
            reference={name: first_instance(self.nodes[name]["value"], self.nodes[name]) for name in emitted},
            sizes=self.sizes,
            factory=self._factory(order),
            names=frozenset(name for name, site in self.nodes.items() if site["type"] == "sample"),
            nan_allowed=frozenset(name for name in self.data if allows_nan(self.nodes[name])),
            flattened={plate: factor.name for factor in factors for plate in factor.joint},
        )
        return assembly, self._network(assembly, factors, assembly.columns)

    def _family(self, name: str) -> Family:
        site = self.nodes[name]
        spec = self.options.families
        if isinstance(spec, Mapping):
            check_names("families", spec, self.net.latent, "a latent site")
            spec = spec.get(name)
        return make_family(spec, name, site["fn"], site["value"], self.options.within)

    def _features(self, name: str) -> Any:
        site = self.nodes[name]
        if name in self.options.embeddings:
            return Embedding(self.options.embeddings[name], site["fn"].event_dim)
        features = features_of(name, site["fn"], site["value"])
        if features.marks_nan and site["value"].isnan().all():
            raise ValueError(
                f"Expected at least one value of site '{name}' at the guide's first call, which shows what depends on "
                "it; got NaN only. Make the first call with data that has some."
            )
        return features

    def _block(self, name: str, inverse: Inverse) -> frozenset[str]:
        """Returns the plates, of those that the site's tensor has dims for, whose instances form one block.

        A plate that another of the site's plates determines adds nothing: instances of that one lie in it already.
        """
        block = frozenset(inverse.joint[name]) & self.frames[name]
        if block and self.options.within == "independent":
            plates = " and ".join(map(repr, sorted(block)))
            warn(
                f"The instances of '{name}' in plate {plates} depend on each other given the data; "
                'within="independent" gives this up, and draws each given its own data alone.'
            )
            return frozenset()
        return block

    def _factor(
        self, name: str, family: Family, reads: Mapping[Any, Read], joint: frozenset[str], plates: Plates
    ) -> Factor:
        frames = {node: self.frames[node if node in self.frames else node[1]] for node in reads}
        batch = plates.closure(self.frames[name] - joint)
        flattened = plates.sort(joint)
        elements = family.num_elements
        for plate in flattened:
            elements *= self.sizes[plate]
        # What the block couples, its members read across.
        coupled = plates.closure(joint)
        reads = {
            node: read._replace(across=read.across | (coupled & plates.closure(frames[node])) - batch)
            for node, read in reads.items()
        }
        sources = plan_sources(batch, reads, frames, plates, joint)
        sequential = elements > 1 and self.options.within == "autoregressive" and (bool(joint) or family.autoregressive)
        linear = sequential and not self.options.simulated and type(family) is NormalFamily
        if linear and elements > MOST_COUPLED:
            warn(
                f"Site '{name}' has {elements} elements that depend on each other given the data; more than "
                f"{MOST_COUPLED} are drawn independently."
            )
        return Factor(
            name,
            batch,
            flattened,
            elements,
            family.num_params,
            family.num_features,
            sequential and not linear,
            sources,
            tuple(family.locations),
            linear and elements <= MOST_COUPLED,
        )

    def _semi_observed(self) -> frozenset[str]:
        """Returns the latents that a call may observe."""
        named = (name for block in self.options.blocks or () for name in block)
        return frozenset(self.net.latent) & frozenset(self.found.bayesnet.observed) | frozenset(named)

    def _conjugate(
        self, inverse: Inverse, families: Mapping[str, Family], blocks: Mapping[str, frozenset[str]]
    ) -> dict[str, ConjugateGroup]:
        """Returns the latents that are drawn from their exact conditional; never all of them."""
        if not (self.options.anchor and self.options.conjugate):
            return {}
        own = {name: self.nodes[name]["value"] for name in (*families, *self.data)}
        found = find_conjugate(
            self.net,
            inverse,
            list(families),
            self.nodes,
            {name: family for name, family in families.items() if not blocks[name]},
            self.frames,
            subsampled=self.subsampled,
            excluded=self._semi_observed() | self.found.hidden_randomness,
            run=lambda values, until: self.run(values, until=until),
            draws=[own, *self.draws[:2]],
        )
        found = {name: group for name, group in found.items() if self.passing.isdisjoint(group.children)}
        return found if len(found) < len(families) else {}

    def _anchored(self, families: Mapping[str, Family], inverse: Inverse) -> frozenset[str]:
        """Returns the latents whose prior the guide knows when it draws them: a function of what their factor reads.

        An inverse that drops an edge of the model (mean field) shall not get it back by the anchor. In a guide that is
        trained on data a prior that nothing moves is none if it is bounded: most of its spread in unconstrained space
        may be one tail, and scales in units of it would be noise at rates that suit Pyro's guides.
        """
        given = frozenset(self.net.observed)

        def known(name: str) -> bool:
            parents = frozenset(self.net.graph.predecessors(name))
            real = peel_support(support_of(self.nodes[name]["fn"]))[0] is constraints.real
            return (self.options.simulated or real or bool(parents)) and parents <= given.union(inverse.parents[name])

        return frozenset(
            name
            for name, family in families.items()
            if name not in self.found.hidden_randomness
            and known(name)
            and family.anchor(self.nodes[name]["fn"]) is not None
        )

    def _experts(
        self, factors: Sequence[Factor], families: Mapping[str, Family], anchored: Collection[str]
    ) -> frozenset[str]:
        """Returns the latents whose factor is their prior times evidence of its own, see `Assembly`."""
        latents = set(self.net.latent)
        return frozenset(
            factor.name
            for factor in factors
            if factor.name in anchored
            and not self.options.simulated
            and not factor.sequential
            and families[factor.name].takes_evidence
            and latents.intersection(self.net.graph.predecessors(factor.name))
        )

    def _factory(self, order: Sequence[str]) -> dict[str, Any]:
        """Returns dtype and device of the networks: of the first continuous value of the model, float32 at least."""
        values = [self.nodes[name]["value"] for name in (*order, *self.data)]
        like = next((value for value in values if value.is_floating_point()), None)
        device = values[0].device if values else None
        dtype = torch.get_default_dtype() if like is None else like.dtype
        return {"dtype": torch.float32 if dtype.itemsize < 4 else dtype, "device": device}

    def _network(
        self, assembly: Assembly, factors: Sequence[Factor], columns: Mapping[str, tuple[Column, ...]]
    ) -> InverseNetwork:
        options = self.options
        factory = assembly.factory
        hidden = options.hidden_features
        network = InverseNetwork(
            factors,
            self._standard(assembly, factory),
            self.dims,
            self.sizes,
            hidden_features=hidden,
            shared=options.shared,
            make_encoder=lambda size: make_encoder(
                options.pooling,
                size,
                _POOLED_FEATURES,
                _POOLING_UNITS,
                activation=options.activation or nn.functional.silu,
                **factory,
            ),
            takes_evidence=functools.partial(self._takes_evidence, assembly.families),
            latents=assembly.order,
            simulated=options.simulated,
            skip=options.skip,
            activation=options.activation or torch.tanh,
            **factory,
        )
        if not network.simulated:
            for name, factor in network.factors.items():
                network.set_units(name, options.init_scale, self._anchor_scale(factor, assembly))
            network.set_offsets(self._offset_plates(network))
        network.set_initial(
            {name: self._initial(factor, assembly, network) for name, factor in network.factors.items()}
        )
        return network

    def _takes_evidence(self, families: Mapping[str, Family], factor: Factor, source: Source) -> bool:
        """Whether a factor takes evidence from a pooled source; a block does from sets of its members' own only."""
        pooled, members = pooled_part(source)
        wanted = self.options.evidence and families[factor.name].takes_evidence
        return wanted and pooled is not None and members == factor.joint

    def _initial(self, factor: Factor, assembly: Assembly, network: InverseNetwork) -> Tensor:
        """Returns raw parameters ``(elements, raw)`` at the initial value, averaged over batch plates."""
        site, family = self.nodes[factor.name], assembly.families[factor.name]
        anchor = family.anchor(site["fn"]) if factor.name in assembly.anchored else None
        if factor.name in assembly.experts and anchor is not None:
            raw = self._averaged(initial_expert(family, site["value"], self.options.init_scale, anchor), factor)
        else:
            raw = self._averaged(family.initial(site["value"], self.options.init_scale, anchor), factor)
        if not factor.evidence:
            return raw
        location = self._averaged(family.initial(site["value"], self.options.init_scale), factor)[:, 0]
        counts = [self._mean_count(pooled_part(read.source)[0]) for read in factor.evidence]
        evidence = initial_evidence(
            location, self.options.init_scale, counts, factor.evidence, network.scaling(factor.name)
        )
        return torch.cat((raw, evidence), -1)

    def _offset_plates(self, network: InverseNetwork) -> dict[str, dict[str, tuple[int, int]]]:
        """Returns factor -> its plates, with dims and full sizes, of those that get offsets."""
        found = {}
        for name, factor in network.factors.items():
            frames = [frame for frame in self.nodes[name]["cond_indep_stack"] if frame.name in factor.batch]
            plates = {frame.name: (frame.dim, frame.full_size or frame.size) for frame in frames if frame.vectorized}
            if plates and math.prod(size for _, size in plates.values()) <= _MOST_OFFSETS:
                found[name] = plates
        return found

    def _anchor_scale(self, factor: Factor, assembly: Assembly) -> Tensor:
        """Returns the scale of a factor's anchor at the initial value, ``(elements,)``; ones if it has none."""
        site, family = self.nodes[factor.name], assembly.families[factor.name]
        anchor = family.anchor(site["fn"]) if factor.name in assembly.anchored else None
        if anchor is None or not factor.locations or factor.name in assembly.experts:
            return torch.ones(factor.num_elements)
        return self._averaged(anchor.log(), factor)[:, 1].exp()

    def _averaged(self, raw: Tensor, factor: Factor) -> Tensor:
        """Returns ``(elements, params)`` of a factor from those of a site, ``(*batch, elements, params)``."""
        count = raw.shape[-1]
        raw = raw.expand(self.nodes[factor.name]["fn"].batch_shape + raw.shape[-2:]).flatten(-2)
        raw = raw[(None,) * (1 - min(self.dims.values(), default=0) - raw.dim())]
        for plate in factor.joint:
            raw = flatten(raw, self.dims[plate] - 1)
        return raw.reshape(-1, raw.shape[-1]).mean(0).reshape(factor.num_elements, count)

    def _mean_count(self, source: Any) -> float:
        """Returns how many instances of a pooled source each set of it holds on average."""
        outside = math.prod(self.sizes[plate] for plate in source.onto)
        return self.sizes[source.plate] / outside

    def _standard(self, assembly: Assembly, factory: dict) -> dict[Hashable, tuple[Tensor, Tensor]]:
        """Returns shift and scale of every node's features, such that shift + scale * features is of order one."""

        def rows(name: str, value: Tensor) -> Tensor:
            return torch.atleast_2d(assembly.features(name, value)).flatten(0, -2)

        standard: dict[Hashable, tuple[Tensor, Tensor]] = {}
        for name in (*assembly.order, *assembly.read):
            if name in self.options.embeddings:
                width = assembly.features(name, self.nodes[name]["value"]).shape[-1]
                standard[name] = torch.zeros(width, **factory), torch.ones(width, **factory)
                continue
            here = rows(name, self.nodes[name]["value"])
            mask = self.nodes[name]["mask"]
            if isinstance(mask, Tensor) and name in self.net.observed:
                seen = here[mask.expand(self.nodes[name]["fn"].batch_shape).reshape(-1)]
                here = seen if len(seen) else torch.zeros_like(here)
            drawn = [rows(name, draw[name]) for draw in self.draws if name in draw]
            plenty = self.nodes[name]["is_observed"] and len(here) >= _PLENTY
            standard[name] = standardization(here if plenty or not drawn else torch.cat(drawn), here, factory)
        covariates = covariate_values(assembly, self.options.covariates, self.args, self.kwargs, self.run)
        for name, chosen in assembly.columns.items():
            values = covariates[name].reshape(-1, len(chosen))
            standard[covariates_of(name)] = standardization(values, values, factory)
        return standard
