"""What a guide's first call shows of its model: one run, its network, draws from its prior, and its plates."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import networkx as nx
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_nami.factors.registry import features_of
from pyro_nami.graph.network import BayesNet
from pyro_nami.graph.sites import Site
from pyro_nami.guide.mode import Mode
from pyro_nami.guide.options import Options
from pyro_nami.parameters.conditioning import Plates
from pyro_nami.program.computed_data import located
from pyro_nami.program.first_data import checked_run
from pyro_nami.program.first_run import first_run, is_latent, is_node, is_passing, subsamples
from pyro_nami.program.initial_values import likely_start, near_origin
from pyro_nami.program.isolation import dropping, forked_rng, seed_rng, untouched
from pyro_nami.program.loops import Loops
from pyro_nami.program.many_draws import FEWEST_DRAWS, MANY_DRAWS, difference_at, for_many
from pyro_nami.program.plate_dims import frames_of
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner, Sites
from pyro_nami.program.vectorized import Vectorized
from pyro_nami.reading.changes import moved
from pyro_nami.reading.extraction import Extraction, extract, is_blocked
from pyro_nami.reading.loops import has_loop
from pyro_nami.reading.masked_latents import read_where_masked
from pyro_nami.reading.series import has_series

__all__ = [
    "FirstCall",
    "data_features",
    "first_call",
    "with_hidden_evidence",
    "with_latent_blocks",
]


class FirstCall(NamedTuple):
    """What a guide's first call shows of its model."""

    program: Program
    options: Options
    found: Extraction
    net: BayesNet  # that of ``found`` as the guide takes it
    prototype: poutine.Trace  # a run at the initial values
    nodes: Sites  # of the prototype, with loops as one site each
    draws: list[dict[str, Tensor]]  # joint draws of all sites
    plates: Plates
    frames: Mapping[str, frozenset[str]]  # site -> the plates that its tensor has dims for
    passing: frozenset[str]  # sites that other calls may lack
    unread: frozenset[str]  # these, and data of which a call sees a part that no plate tells
    # latents too large for networks to say how they depend on others
    apart: frozenset[str] = frozenset()

    @property
    def latents(self) -> list[str]:
        """The latents that the run has."""
        return [name for name in self.net.latent if name in self.nodes]

    @property
    def data(self) -> list[str]:
        """The observed sites."""
        return [name for name in self.net.observed if name in self.nodes]

    @property
    def semi_observed(self) -> frozenset[str]:
        """The latents that a call may observe."""
        named = (name for block in self.options.blocks or () for name in block)
        return frozenset(self.net.latent) & frozenset(self.found.bayesnet.observed) | frozenset(
            named
        )

    @property
    def is_compiled(self) -> bool:
        """Whether this is a first call in an objective that Pyro compiles."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != "pyro.ops.jit":
            frame = frame.f_back
        return frame is not None or torch.jit.is_tracing()

    def read_where_masked(self) -> frozenset[str]:
        """Returns the latents that something reads where the model masks their density; by runs of the model."""
        latents = [name for name in self.latents if is_latent(self.nodes[name])]
        with forked_rng():
            return read_where_masked(self.nodes, latents, self.run)

    def within(self, name: str) -> str:
        """Returns how a latent's elements depend on each other: the option, or "independent" if it is too large."""
        return "independent" if name in self.apart else self.options.within

    def mapped(self) -> FirstCall | None:
        """Returns the call with the model mapped over draws by vmap, if the model needs and allows that; else None.

        A loss that Pyro compiles could not be; called from there, there is none.
        """
        if isinstance(self.program.model, Vectorized) or self.is_compiled:
            return None
        nesting = self.plates.nesting
        found, _ = for_many(self.program, nesting, partial(difference_at, self.draws, nesting))
        return None if found is self.program else self._replace(program=found)

    def run(self, values: Mapping[str, Any], until: Collection[str] | None = None) -> Sites:
        """Returns the sites of a run of the model at chosen values of its latents."""
        return self.program.run(Runner(values, broadcast=True, until=until))

    def factory(self, latents: Collection[str]) -> dict[str, Any]:
        """Returns dtype and device of the networks: of the first continuous value of the model, float32 at least."""
        values = [self.nodes[name]["value"] for name in (*latents, *self.data)]
        like = next((value for value in values if value.is_floating_point()), None)
        dtype = torch.get_default_dtype() if like is None else like.dtype
        return {
            "dtype": torch.float32 if dtype.itemsize < 4 else dtype,
            "device": values[0].device if values else None,
        }


def first_call(
    program: Program,
    options: Options,
    subsampled: Collection[str],
    random_layers: Sequence[nn.Module],
    *,
    lifted: bool,
    learned: bool = False,
    located_data: bool = True,
) -> FirstCall:
    """Returns what a first call shows. The model is left as it was; random number generators are not.

    Args:
        program: the model, and arguments that it runs with.
        options: the guide's.
        subsampled: plates that ``create_plates`` subsamples.
        random_layers: layers of the model that draw random numbers in training; they are in evaluation mode here.
        lifted: whether the sites of a loop are to be held as one.
        learned: whether networks are to say what its states are; see `find_loops`.
        located_data: whether data that the model computes from latents are shown as `LocatedData` has them.
    """
    start = options.init_loc_fn or near_origin
    prototype = checked_run(program, partial(first_run, program, start))
    lifted = lifted and not random_layers and _has_steps(prototype.nodes, learned)
    if not lifted:
        prototype = _started(program, options, prototype)
    # All runs see the same instances of a subsampled plate: with others the sites, or their shapes, may be others.
    program = program._replace(model=poutine.condition(program.model, subsamples(prototype.nodes)))
    with untouched(program.model):
        # A guide's structure and scales are a function of the model and its arguments, not of the seed.
        seed_rng(0)
        found = _extracted(program, options, prototype.nodes, lifted, learned)
        program = _as_read(program, found, options, located_data)
        is_derived = found.loops and not found.loops.is_learned
        draws = program.prior_draws(FEWEST_DRAWS if is_derived else MANY_DRAWS)
    if lifted and not found.loops:
        prototype = _started(program, options, prototype)
    nodes = _shown(program, prototype)
    restless = _moved_by(random_layers, program, nodes)
    found = found._replace(hidden_randomness=found.hidden_randomness | restless)
    net = with_latent_blocks(found.bayesnet, options.blocks)
    stacks = {name: frames_of(nodes[name]) for name in net.sites if name in nodes}
    passing = frozenset(name for name in stacks if is_passing(nodes[name]))
    _check_passing(nodes, passing)
    plates = _plates(_stacks(nodes, stacks), net, {*subsampled, *subsamples(nodes)})
    moving = _moving(options, net, stacks, found.loops)
    of_data = [_outermost(stacks[name], plates, options.along) for name in moving]
    return FirstCall(
        program=program,
        options=options,
        found=found,
        net=with_hidden_evidence(net) if is_blocked(program.model) else net,
        prototype=prototype,
        nodes=nodes,
        draws=draws,
        plates=plates._replace(minibatched=frozenset().union(*of_data)),
        frames={name: frozenset(frame.name for frame in stack) for name, stack in stacks.items()},
        passing=passing,
        unread=passing.union(name for name in moving if not stacks[name]),
    )


def _as_read(program: Program, found: Extraction, options: Options, located_data: bool) -> Program:
    """Returns a program that shows its loops, and what the model computes from latents, as they were read."""
    is_fixed = options.mode in (None, Mode.FIXED)
    computed = found.computed if located_data and is_fixed else frozenset()
    return program._replace(loops=found.loops, computed=computed)


def _shown(program: Program, prototype: poutine.Trace) -> Sites:
    """Returns the sites of the prototype as runs of the program show them."""
    nodes: dict[str, Any] = dict(prototype.nodes)
    nodes.update({name: {**nodes[name], **located(nodes[name])} for name in program.computed})
    return program.loops.messages(nodes)


def _has_steps(nodes: Sites, learned: bool) -> bool:
    """Whether latents look like the steps of a loop, or like the innovations of a series."""
    return has_loop(nodes, learned) or not learned and has_series(nodes)


def _stacks(nodes: Sites, names: Collection[str]) -> list[list]:
    """Returns the frames of the vectorized plates around each site, of a series around its innovations."""
    return [
        frames_of({"cond_indep_stack": nodes[name].get("stack", nodes[name]["cond_indep_stack"])})
        for name in names
    ]


def _started(program: Program, options: Options, first: poutine.Trace) -> poutine.Trace:
    """Returns the trace of a run at initial values chosen by the data, if options allow that; else the trace given.

    Of loops as a whole no start is looked for, which takes some dozens of runs: their states are derived.
    """
    if options.init_loc_fn is None and not options.observed:
        return likely_start(program, first, options.init_scale)
    return first


def _extracted(
    program: Program, options: Options, nodes: Sites, lifted: bool, learned: bool
) -> Extraction:
    """Returns the network of a program, as the options have it, given its sites at initial values."""
    return extract(
        program.model,
        program.args,
        program.kwargs,
        observed=options.observed,
        init=lambda site: nodes[site["name"]]["value"],
        lifted=lifted,
        learned=learned,
    )


def _moved_by(layers: Sequence[nn.Module], program: Program, nodes: Sites) -> frozenset[str]:
    """Returns the sites whose distributions vary between runs at equal values, by layers such as dropout."""
    if not layers:
        return frozenset()
    values = {name: site["value"] for name, site in nodes.items() if site["type"] == "sample"}
    runs = []
    with untouched(*program.roots), torch.no_grad(), dropping(layers):
        for seed in range(2):
            seed_rng(seed)
            runs.append(program.run(Runner(values)))
    before, after = runs
    names = [name for name in before if is_node(before[name])]
    return frozenset(name for name in names if moved(before[name], after.get(name)).any())


def _check_passing(nodes: Sites, passing: Collection[str]) -> None:
    """Raises if a site that comes and goes between calls is a latent."""
    for name in passing:
        if is_latent(nodes[name]):
            raise NotImplementedError(
                f"Expected latent '{name}' in every call; it is in a sequential plate that the model subsamples. Use a "
                "vectorized plate, `with pyro.plate(...)`, or hide such latents: poutine.block(model, expose=[...])."
            )


def _moving(options: Options, net: BayesNet, stacks: Mapping[str, list], loops: Loops) -> list[str]:
    """Returns the sites whose values or covariates differ from minibatch to minibatch."""
    if options.mode is not Mode.MINIBATCHES:
        return []
    named = options.moving or {name for name in net.observed if name in stacks and stacks[name]}
    named = loops.wholes_of(named)
    return [name for name in stacks if name in named]


def _outermost(stack: list, plates: Plates, along: Collection[str]) -> list[str]:
    """Returns the outermost plate of a stack, or the one that is in ``along``, as a list of at most one."""
    names = sorted((frame.name for frame in stack), key=plates.order.index)
    return ([name for name in names if name in along] or names)[:1]


def _plates(stacks: Collection[list], net: BayesNet, subsampled: Collection[str]) -> Plates:
    """Returns the plates around sites, outermost first."""
    frames = {frame.name: frame for stack in stacks for frame in stack}
    depth: dict[str, int] = {}
    for stack in stacks:
        for i, frame in enumerate(stack):
            depth[frame.name] = max(depth.get(frame.name, 0), i)

    def level(plate: str) -> int:
        return max([depth[plate], *(1 + level(outer) for outer in net.nesting.get(plate, ()))])

    parts = [plate for plate, frame in frames.items() if frame.full_size not in (None, frame.size)]
    return Plates(
        order=tuple(sorted(frames, key=lambda plate: (level(plate), depth[plate]))),
        subsampled=frozenset({*subsampled, *parts}),
        determined=dict(net.nesting),
        dims={name: frame.dim for name, frame in frames.items()},
        sizes={name: frame.size for name, frame in frames.items()},
    )


def data_features(first: FirstCall, name: str) -> Any:
    """Returns the encoding of an observed site: an object with ``features(value)``."""
    site, embeddings = first.nodes[name], first.options.embeddings
    if name in embeddings:
        return _Embedding(embeddings[name], site["fn"].event_dim)
    features = features_of(name, site["fn"], site["value"])
    if features.marks_nan and site["value"].isnan().all():
        raise ValueError(
            f"Expected at least one value of site '{name}' at the guide's first call, which shows what depends on "
            "it; got NaN only. Make the first call with data that has some."
        )
    return features


class _Embedding(NamedTuple):
    """Features of an observed site by a module of the user's."""

    module: nn.Module
    event_dim: int

    def features(self, value: Tensor) -> Tensor:
        """Returns ``(*batch, 1, features)``; the module sees the batch as its only leading dim."""
        cut = value.dim() - self.event_dim
        return self.module(value.reshape((-1,) + value.shape[cut:])).reshape(
            value.shape[:cut] + (1, -1)
        )


def with_latent_blocks(net: BayesNet, blocks: Sequence[Sequence[str]] | None) -> BayesNet:
    """Returns the network with the observed sites that ``blocks`` names latent: they are semi-observed."""
    named: set[Any] = {name for block in blocks or () for name in block}
    if not named & set(net.observed):
        return net
    sites = {
        name: dataclasses.replace(site, observed=False) if name in named else site
        for name, site in net.sites.items()
    }
    return BayesNet(sites, net.edges, plate_sizes=net.plate_sizes, nesting=net.nesting)


def with_hidden_evidence(net: BayesNet) -> BayesNet:
    """Returns the network of a blocked model, with hidden evidence on latents without observed descendants.

    ``poutine.block`` may hide data, so a latent without observed descendants need not be without evidence. All such
    latents get an observed child in common for each set of plates that they lie in.
    """
    seen = set(net.observed)
    for name in net.observed:
        seen |= nx.ancestors(net.graph, name)
    barren = [name for name in net.latent if name not in seen]
    sites, edges = dict(net.sites), list(net.edges)
    for plates in {net.plates[name] for name in barren}:
        node = ("hidden", *sorted(plates))
        sites[node] = Site(node, plates=plates, observed=True)
        edges.extend((name, node) for name in barren if net.plates[name] <= plates)
    return BayesNet(sites, edges, plate_sizes=net.plate_sizes, nesting=net.nesting)
