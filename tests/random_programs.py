"""Random Pyro programs whose network is known by construction, for laws that hold for every program.

`random_program(seed)` draws a *plan*: sites with their types, plates, parents, masks and data, and the options of a
guide. `PlannedModel` is the model that carries a plan out; nothing in it is random but its sample sites. A site's
parents reach it through two real numbers an instance, which `KINDS` turns into a distribution. Change this module
when guides must cover another kind of site, plate or option: one more row in `KINDS`, `_LAYOUTS` or `_options`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import ELBO, Trace_ELBO, TraceGraph_ELBO
from torch import Tensor

__all__ = ["COUNT", "Program", "event_dim", "random_program", "to_device"]

COUNT = int(os.environ.get("PYRO_NAMI_PROGRAMS", 300))  # of seeds; other random models follow it


# ---- kinds of sites


class Kind(NamedTuple):
    """A type of site.

    Attributes:
        build: location-like and scale-like real numbers ``(*batch)`` to a distribution with that batch shape.
        event_dim: of its values.
        families: that a guide may give a latent of this kind, beside the default.
        classes: number of values where a child may use one as an index, else 0.
        linear: whether a child may take the value itself for a real number.
        observable: whether a site of this kind may be observed.
        weight: how often it is drawn.
    """

    build: Callable[[Tensor, Tensor], Any]
    event_dim: int = 0
    families: tuple[str, ...] = ("normal", "mixture", "flow", "sinh_arcsinh", "match")
    classes: int = 0
    linear: bool = False
    observable: bool = True
    weight: float = 1.0


def _positive(x: Tensor) -> Tensor:
    """Returns numbers between 0.2 and 5."""
    return (1.6 * torch.tanh(x / 2)).exp()


def _bounded(x: Tensor) -> Tensor:
    return 2 * torch.tanh(x / 2)


def _spread(x: Tensor, size: int) -> Tensor:
    """Returns ``(*batch, size)``: entries that all depend on x, in different ways."""
    return x.unsqueeze(-1) * torch.linspace(1.0, -0.5, size).to(x) + torch.linspace(
        0.0, 0.5, size
    ).to(x)


def _mvn(x: Tensor, z: Tensor) -> Any:
    tril = torch.tensor([[1.0, 0.0], [0.4, 0.8]]).to(x) * _positive(z)[..., None, None]
    return dist.MultivariateNormal(_spread(x, 2), scale_tril=tril)


def _ordered(x: Tensor, z: Tensor) -> Any:
    base = dist.Normal(_spread(x, 3), _positive(z).unsqueeze(-1)).to_event(1)
    return dist.TransformedDistribution(base, [dist.transforms.OrderedTransform()])


def _pair(x: Tensor, z: Tensor) -> Any:
    x, z = torch.broadcast_tensors(x, z)
    locs, logits = torch.stack([x - 1, x + 1], -1), torch.stack([z, -z], -1)
    return dist.MixtureSameFamily(
        dist.Categorical(logits=logits), dist.Normal(locs, torch.ones_like(locs))
    )


def _own(*more: str) -> tuple[str, ...]:
    return ("normal", "mixture", "flow", "sinh_arcsinh", *more)


_RARE, _DISCRETE = 0.4, ("match",)
KINDS: dict[str, Kind] = {
    "normal": Kind(lambda x, z: dist.Normal(x, _positive(z)), linear=True, weight=5.0),
    "student": Kind(lambda x, z: dist.StudentT(x.new_tensor(4.0), x, _positive(z))),
    "laplace": Kind(lambda x, z: dist.Laplace(x, _positive(z)), linear=True),
    "gumbel": Kind(lambda x, z: dist.Gumbel(x, _positive(z)), weight=_RARE),
    "logistic": Kind(lambda x, z: dist.Logistic(x, _positive(z)), weight=_RARE),
    "pair": Kind(lambda x, z: _pair(x, z), families=_own(), weight=_RARE),
    "lognormal": Kind(lambda x, z: dist.LogNormal(_bounded(x), _positive(z) / 2), weight=2.0),
    "gamma": Kind(lambda x, z: dist.Gamma(1 + _positive(x), _positive(z)), weight=2.0),
    "inverse gamma": Kind(
        lambda x, z: dist.InverseGamma(2 + _positive(x), _positive(z)), weight=_RARE
    ),
    "exponential": Kind(lambda x, z: dist.Exponential(_positive(x + z))),
    "half normal": Kind(lambda x, z: dist.HalfNormal(_positive(x + z))),
    "half Cauchy": Kind(lambda x, z: dist.HalfCauchy(_positive(x + z)), weight=_RARE),
    "Weibull": Kind(lambda x, z: dist.Weibull(_positive(x), 1 + _positive(z)), weight=_RARE),
    "beta": Kind(lambda x, z: dist.Beta(1 + _positive(x), 1 + _positive(z)), weight=2.0),
    "Kumaraswamy": Kind(
        lambda x, z: dist.Kumaraswamy(1 + _positive(x), 1 + _positive(z)), weight=_RARE
    ),
    "interval": Kind(
        lambda x, z: dist.AffineBeta(
            1 + _positive(x), 1 + _positive(z), -x.new_ones(()), x.new_tensor(3.0)
        ),
        families=_own(),
    ),
    "greater than": Kind(
        lambda x, z: dist.Pareto(x.new_tensor(1.5), 2 + _positive(x + z)), families=_own()
    ),
    "circle": Kind(lambda x, z: dist.VonMises(_bounded(x), _positive(z))),
    "simplex": Kind(lambda x, z: dist.Dirichlet(1 + _positive(_spread(x + z, 3))), 1),
    "vector": Kind(
        lambda x, z: dist.Normal(_spread(x, 2), _positive(z).unsqueeze(-1)).to_event(1),
        1,
        weight=2.0,
    ),
    "matrix": Kind(
        lambda x, z: dist.Normal(_spread(_spread(x, 2), 2), _positive(z)[..., None, None]).to_event(
            2
        ),
        2,
        weight=_RARE,
    ),
    "positive vector": Kind(
        lambda x, z: dist.Gamma(1 + _positive(_spread(x, 2)), _positive(z).unsqueeze(-1)).to_event(
            1
        ),
        1,
    ),
    "multivariate normal": Kind(_mvn, 1, families=_own()),
    "correlation": Kind(
        lambda x, z: dist.LKJCholesky(3, 1 + _positive(x + z)),
        2,
        _own(),
        observable=False,
        weight=_RARE,
    ),
    "ordered": Kind(_ordered, 1, families=_own()),
    "Bernoulli": Kind(
        lambda x, z: dist.Bernoulli(logits=x + z), 0, _DISCRETE, classes=2, weight=2.0
    ),
    "Bernoulli vector": Kind(
        lambda x, z: dist.Bernoulli(logits=_spread(x + z, 2)).to_event(1), 1, _DISCRETE
    ),
    "categorical": Kind(
        lambda x, z: dist.Categorical(logits=_spread(x + z, 3)), 0, _DISCRETE, classes=3
    ),
    "one hot": Kind(lambda x, z: dist.OneHotCategorical(logits=_spread(x + z, 3)), 1, _DISCRETE),
    "Poisson": Kind(lambda x, z: dist.Poisson(_positive(x + z)), 0, _DISCRETE),
    "binomial": Kind(
        lambda x, z: dist.Binomial(x.new_tensor(4.0), logits=_bounded(x + z)), 0, _DISCRETE
    ),
    "geometric": Kind(
        lambda x, z: dist.Geometric(logits=_bounded(x + z)), 0, _DISCRETE, weight=_RARE
    ),
    "negative binomial": Kind(
        lambda x, z: dist.NegativeBinomial(1 + _positive(x), logits=-_positive(z)),
        0,
        _DISCRETE,
        weight=_RARE,
    ),
}
NAN_KIND = Kind(lambda x, z: dist.NanMaskedNormal(x, _positive(z)))
# Supports that move with the parents, named apart since few kinds of sites are as hard.
MOVING: dict[str, Kind] = {
    "moving interval": Kind(lambda x, z: dist.Uniform(x, x + _positive(z)), families=_own()),
    "moving Pareto": Kind(
        lambda x, z: dist.Pareto(_positive(x), 2 + _positive(z)), families=_own()
    ),
    "moving beta": Kind(
        lambda x, z: dist.AffineBeta(x.new_tensor(2.0), x.new_tensor(3.0), x, _positive(z)),
        families=_own(),
    ),
    "moving vector": Kind(
        lambda x, z: dist.Uniform(
            _spread(x, 2), _spread(x, 2) + _positive(z).unsqueeze(-1)
        ).to_event(1),
        1,
        families=_own(),
    ),
    "moving count": Kind(
        lambda x, z: dist.Binomial(2 + _positive(x).round().detach(), logits=_bounded(z)),
        0,
        _DISCRETE,
    ),
}
_ALL = {**KINDS, **MOVING, "NaN": NAN_KIND}


# ---- plans


class Edge(NamedTuple):
    """How a site reads a parent: through ``link``, times ``weight``, into its first or second real number."""

    parent: str
    weight: float
    link: str
    into: int


class SitePlan(NamedTuple):
    """One site: see `Kind` for its type; ``missing`` is None, "mask", "NaN" or "obs_mask"."""

    name: str
    kind: str
    plates: tuple[str, ...]
    observed: bool
    edges: tuple[Edge, ...]
    bias: tuple[float, float]
    covariate: bool = False
    missing: str | None = None
    scale: float = 1.0
    deterministic: bool = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """The sites that Pyro makes of it."""
        partial = self.missing == "obs_mask"
        return (f"{self.name}_observed", f"{self.name}_unobserved") if partial else (self.name,)


class PlatePlan(NamedTuple):
    """One plate; ``batch`` is the size of its minibatches or None, ``maps`` the plates that it has an index into."""

    dim: int
    size: int
    batch: int | None = None
    by_index: bool = False
    maps: tuple[str, ...] = ()


class PlannedModel:
    """The model of a plan: ``model(inputs)`` or ``model(**inputs)``, inputs by name.

    Inputs are data under the names of their sites, and ``x site`` (covariates), ``mask site``, ``index plate other``,
    ``batch plate``. An observed site without data is drawn.
    """

    def __init__(
        self,
        sites: tuple[SitePlan, ...],
        plates: Mapping[str, PlatePlan],
        like: Tensor,
        markov: bool,
    ) -> None:
        self.sites, self.plates, self.like, self.markov = sites, dict(plates), like, markov

    def __call__(self, inputs: Mapping[str, Tensor] | None = None, **named: Tensor) -> None:
        self.run({**(inputs or {}), **named})

    def run(self, inputs: Mapping[str, Tensor], whole: bool = False) -> None:
        """Runs the plan; ``whole`` runs it without minibatches and missing values."""
        run = _Run(self, inputs, whole)
        for site in pyro.markov(self.sites) if self.markov else self.sites:
            with ExitStack() as stack:
                rows = {name: stack.enter_context(run.plate(name)) for name in site.plates}
                stack.enter_context(
                    poutine.scale(scale=site.scale) if site.scale != 1.0 else ExitStack()
                )
                run.values[site.name] = run.sample(site, rows)

    def paths(self, plate: str, other: str) -> Iterator[tuple[str, ...]]:
        """Yields the chains of index maps from one plate to another."""
        if plate == other:
            yield (plate,)
        for target in self.plates[plate].maps:
            yield from ((plate, *rest) for rest in self.paths(target, other))


@dataclass
class _Run:
    """One run of a planned model: its plates and the values drawn so far."""

    model: PlannedModel
    inputs: Mapping[str, Tensor]
    whole: bool
    made: dict[str, pyro.plate] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)

    def plate(self, name: str) -> pyro.plate:
        if name not in self.made:
            plan, options = self.model.plates[name], {}
            if self.is_batch(name) and plan.by_index:
                options = {"subsample": self.inputs[f"batch {name}"]}
            elif self.is_batch(name):
                options = {"subsample_size": plan.batch, "device": self.model.like.device}
            self.made[name] = pyro.plate(name, plan.size, dim=plan.dim, **options)
        return self.made[name]

    def is_batch(self, plate: str) -> bool:
        return self.model.plates[plate].batch is not None and not self.whole

    def sample(self, site: SitePlan, rows: Mapping[str, Tensor]) -> Tensor:
        def of_rows(key: str, event_dim: int = 0) -> Tensor:
            value = self.inputs[key]
            for name in filter(self.is_batch, site.plates):
                value = value.index_select(self.model.plates[name].dim - event_dim, rows[name])
            return value

        numbers = [self.model.like + bias for bias in site.bias]
        if site.covariate:
            numbers[0] = numbers[0] + of_rows(f"x {site.name}")
        for edge in site.edges:
            numbers[edge.into] = numbers[edge.into] + edge.weight * self.read(edge, site, rows)
        if site.deterministic:
            numbers[0] = pyro.deterministic(f"number of {site.name}", numbers[0])
        if site.kind == "factor":
            pyro.factor(site.name, -0.5 * (numbers[0] + numbers[1]).square())
            return numbers[0]
        kind = _ALL[site.kind]
        fn = kind.build(*numbers)
        data = (
            of_rows(site.name, kind.event_dim)
            if site.observed and site.name in self.inputs
            else None
        )
        mask = (
            None
            if self.whole or f"mask {site.name}" not in self.inputs
            else of_rows(f"mask {site.name}")
        )
        if site.missing == "obs_mask" and not self.whole:
            return pyro.sample(site.name, fn, obs=data, obs_mask=mask)
        with poutine.mask(mask=mask) if mask is not None else ExitStack():
            return pyro.sample(site.name, fn, obs=data)

    def read(self, edge: Edge, site: SitePlan, rows: Mapping[str, Tensor]) -> Tensor:
        """Returns a parent's numbers for the instances of a site: through index maps, else means over plates."""
        parent = next(other for other in self.model.sites if other.name == edge.parent)
        number = self.linked(edge.link, _ALL[parent.kind], self.values[edge.parent])
        for name in parent.plates:
            if name in site.plates:
                continue
            path = next((path for own in site.plates for path in self.model.paths(own, name)), None)
            if path is None:
                number = number.mean(self.model.plates[name].dim, keepdim=True)
                continue
            index = rows[path[0]] if self.is_batch(path[0]) else slice(None)
            for key in zip(path, path[1:]):
                index = self.inputs["index {} {}".format(*key)][index]
            number = number[..., index]
        return number

    def linked(self, link: str, kind: Kind, value: Tensor) -> Tensor:
        """Returns one number for each instance of a parent that depends on all of its value."""
        like = self.model.like
        if link == "linear":
            return value
        if link == "index":
            return torch.linspace(-1.0, 1.0, kind.classes).to(like)[value.long()]
        value = value.to(like.dtype)
        if kind.event_dim:
            value = value.flatten(-kind.event_dim)
            value = (value * torch.linspace(0.5, 1.0, value.shape[-1]).to(like)).sum(-1)
        return value / (1 + value.square()).sqrt()


@dataclass(frozen=True)
class Program:
    """A program, what is known of it, and the guide to be made for it.

    Attributes:
        seed: that it was made from.
        plan: the model, without data.
        model: what a guide is made for.
        inputs: by name, data included.
        edges: of the network, by construction.
        latents, observed: its sites.
        options: of the guide.
        style: how inputs are passed: "dict", "keywords", "condition" (data in the model), or "compile" (as
            ``observations=``, to sites that the model samples).
        steps: number of steps of its ELBO.
        ingredients: what it has in it.
    """

    seed: int
    plan: PlannedModel
    model: Callable
    inputs: Mapping[str, Tensor]
    edges: frozenset[tuple[str, str]]
    latents: tuple[str, ...]
    observed: tuple[str, ...]
    options: Mapping[str, Any]
    style: str
    ingredients: frozenset[str]

    @property
    def dtype(self) -> torch.dtype:
        return self.plan.like.dtype

    @property
    def nesting(self) -> int:
        """The number of plate dims in use."""
        used = {name for site in self.plan.sites for name in site.plates}
        return max([-self.plan.plates[name].dim for name in used], default=0)

    @property
    def data(self) -> dict[str, Tensor]:
        """The inputs that are values of observed sites."""
        return {
            site.name: self.inputs[site.name]
            for site in self.plan.sites
            if site.name in self.inputs
        }

    def call(self, function: Callable, *first: Any) -> Any:
        """Calls a guide, or something that takes its arguments, on the inputs."""
        rest = {name: value for name, value in self.inputs.items() if name not in self.data}
        if self.style == "compile":
            return function(*first, rest, observations=self.data)
        if self.style == "condition":
            return function(*first, rest)
        if self.style == "keywords":
            return function(*first, **self.inputs)
        return function(*first, dict(self.inputs))

    def elbo(self) -> ELBO:
        """Returns an ELBO that fits: with score functions where latents are discrete."""
        discrete = any(_is_discrete(site.kind) for site in self.plan.sites if not site.observed)
        if discrete and any(event_dim(site.kind) for site in self.plan.sites):
            # `Independent` fails on Pyro's provenance
            return Trace_ELBO(max_plate_nesting=self.nesting)
        if discrete:
            return TraceGraph_ELBO(max_plate_nesting=self.nesting)
        return Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=self.nesting)

    def with_inputs(self, inputs: Mapping[str, Tensor]) -> Program:
        """Returns the program on other inputs."""
        return replace(self, inputs=dict(inputs))

    def describe(self) -> str:
        """Returns the plan as text, a line a site."""
        lines = [f"seed {self.seed}, {self.style}, {self.dtype}, {dict(self.options)}"]
        lines += [f"  plate {name}: {plan}" for name, plan in self.plan.plates.items()]
        return "\n".join(lines + [f"  {site}" for site in self.plan.sites])


def event_dim(kind: str) -> int:
    """Returns the number of event dims of a kind of site."""
    return 0 if kind == "factor" else _ALL[kind].event_dim


def _is_discrete(kind: str) -> bool:
    return kind != "factor" and _ALL[kind].families == _DISCRETE


# ---- drawing a program


def random_program(seed: int, device: str | torch.device = "cpu") -> Program:
    """Returns the program of a seed, with all its tensors on a device."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.float64] * 3 + [torch.float32])
    plates = draw.choice(list(_LAYOUTS.values()))(draw)
    whole = all(plate.batch is None for plate in plates.values())
    style = draw.choice(["dict", "keywords", "keywords"] + ["condition", "compile"] * whole)
    sites = _sites(draw, plates, style)
    generator = torch.Generator().manual_seed(seed)
    plan = PlannedModel(sites, plates, torch.zeros((), dtype=dtype), draw.random() < 0.2)
    inputs = _inputs(plan, generator)
    program = _finished(seed, plan, inputs, style, draw)
    return to_device(program, device)


def to_device(program: Program, device: str | torch.device) -> Program:
    """Returns the program with all its tensors on a device."""
    old = program.plan
    plan = PlannedModel(old.sites, old.plates, old.like.to(device), old.markov)
    inputs = {name: value.to(device) for name, value in program.inputs.items()}
    moved = replace(program, plan=plan, model=plan, inputs=inputs)
    return replace(moved, model=_passed(moved))


def _passed(program: Program) -> Callable:
    """Returns the model that a guide is made for: of a style, with the data in it."""
    return (
        poutine.condition(program.plan, program.data)
        if program.style == "condition"
        else program.plan
    )


_Layout = dict[str, PlatePlan]


def _grouped(draw: random.Random) -> _Layout:
    batch = draw.choice([None, None, None, 3])
    return {
        "groups": PlatePlan(-1, draw.randint(2, 3)),
        "rows": PlatePlan(-1, draw.randint(4, 6), batch, draw.random() < 0.5, ("groups",)),
    }


def _nested(draw: random.Random) -> _Layout:
    return {"groups": PlatePlan(-2, draw.randint(2, 3)), "rows": PlatePlan(-1, draw.randint(2, 3))}


_LAYOUTS: dict[str, Callable[[random.Random], _Layout]] = {
    "none": lambda draw: {},
    "rows": lambda draw: {"rows": PlatePlan(-1, draw.randint(2, 5))},
    "minibatch": lambda draw: {
        "rows": PlatePlan(-1, draw.randint(4, 6), draw.randint(2, 3), draw.random() < 0.5)
    },
    "nested": _nested,
    "nested too": _nested,
    "indexed": _grouped,
    "chained": lambda draw: {
        "areas": PlatePlan(-1, 2),
        "groups": PlatePlan(-1, draw.randint(3, 4), maps=("areas",)),
        "rows": PlatePlan(-1, draw.randint(5, 6), maps=("groups",)),
    },
    "two maps": lambda draw: {
        "groups": PlatePlan(-1, 2),
        "days": PlatePlan(-1, 3),
        "rows": PlatePlan(-1, draw.randint(4, 6), maps=("groups", "days")),
    },
}


def _places(plates: Mapping[str, PlatePlan]) -> list[tuple[str, ...]]:
    """Returns the sets of plates that a site may lie in: of those with different dims, any."""
    places: list[tuple[str, ...]] = [()]
    for name, plan in plates.items():
        others = [
            place for place in places if all(plates[other].dim != plan.dim for other in place)
        ]
        places += [(*place, name) for place in others]
    return places


def _sites(
    draw: random.Random, plates: Mapping[str, PlatePlan], style: str
) -> tuple[SitePlan, ...]:
    """Draws the sites: at least one latent, and data unless nothing but latents came."""
    places = _places(plates)
    count = draw.randint(3, 6)
    sites: list[SitePlan] = []
    for number in range(count):
        observed = number > 0 and draw.random() < (0.7 if number == count - 1 else 0.35)
        place = (
            draw.choice(places) if draw.random() < 0.4 else max(draw.choices(places, k=2), key=len)
        )
        sites.append(_site(draw, number, place, observed, sites, plates, style))
    return tuple(sites)


def _site(
    draw: random.Random,
    number: int,
    place: tuple[str, ...],
    observed: bool,
    before: list[SitePlan],
    plates: Mapping[str, PlatePlan],
    style: str,
) -> SitePlan:
    missing = None
    if observed and style != "compile" and draw.random() < 0.25:
        # which has sites of other names
        gaps = ["mask", "NaN"] + ["obs_mask"] * (style != "condition")
        missing = draw.choice(gaps) if place else None
    elif not observed and place and draw.random() < 0.05:
        missing = "mask"
    if observed and style != "compile" and missing is None and before and draw.random() < 0.1:
        kind = "factor"
    elif missing == "NaN":
        kind = "NaN"
    elif not observed and number > 0 and draw.random() < 0.06:
        kind = draw.choice(list(MOVING))
    else:
        kinds = {
            name: kind.weight for name, kind in KINDS.items() if kind.observable or not observed
        }
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
    edges = _edges(draw, place, before, plates, at_least=int(kind == "factor" or kind in MOVING))
    if not edges and kind == "factor":
        kind = "normal"
    prefix = ("f" if kind == "factor" else "y") if observed else draw.choice(["z", "z", "net.z"])
    return SitePlan(
        f"{prefix}{number}",
        kind,
        place,
        observed,
        edges,
        (draw.uniform(-0.5, 0.5), draw.uniform(-0.5, 0.5)),
        covariate=draw.random() < 0.3,
        missing=missing,
        scale=draw.choice([1.0] * 9 + [0.5]),
        deterministic=draw.random() < 0.1,
    )


def _edges(
    draw: random.Random,
    place: tuple[str, ...],
    before: list[SitePlan],
    plates: Mapping[str, PlatePlan],
    at_least: int,
) -> tuple[Edge, ...]:
    readable = [site for site in before if site.kind not in ("factor", "NaN")]
    able = [site for site in readable if _may_read(draw, place, site, plates)]
    wanted = [site for site in able if draw.random() < 1.6 / max(len(before), 2)][:3] or able[
        :at_least
    ]
    edges = []
    for site in wanted:
        kind = _ALL[site.kind]
        links = ["bounded"] + ["linear"] * (2 * kind.linear) + ["index"] * (kind.classes > 0)
        weight = draw.choice([-1, 1]) * draw.uniform(0.5, 1.2)
        edges.append(Edge(site.name, weight, draw.choice(links), int(draw.random() < 0.3)))
    return tuple(edges)


def _may_read(
    draw: random.Random, place: tuple[str, ...], site: SitePlan, plates: Mapping[str, PlatePlan]
) -> bool:
    """Whether a site at a place may read another: seldom a whole plate, and of a minibatch nothing outside of it."""
    lacking = [name for name in site.plates if name not in place]
    if not lacking:
        return True
    reach = _reach(place, plates)
    if reach.issuperset(lacking):
        return True
    # its own rows, which a mean cannot tell
    below = any(set(place) & _reach((name,), plates) for name in lacking)
    return (
        not below and all(plates[name].batch is None for name in lacking) and draw.random() < 0.25
    )


def _reach(place: tuple[str, ...], plates: Mapping[str, PlatePlan]) -> set[str]:
    """Returns the plates whose index those of a place determine."""
    reach = set(place)
    while more := {target for name in reach for target in plates[name].maps} - reach:
        reach |= more
    return reach


def _inputs(plan: PlannedModel, generator: torch.Generator) -> dict[str, Tensor]:
    """Draws covariates, index maps, minibatches, masks, and then data from the model itself."""
    inputs: dict[str, Tensor] = {}
    for name, plate in plan.plates.items():
        for other in plate.maps:
            size = plan.plates[other].size
            inputs[f"index {name} {other}"] = torch.randint(
                size, (plate.size,), generator=generator
            )
        if plate.batch is not None and plate.by_index:
            inputs[f"batch {name}"] = torch.randperm(plate.size, generator=generator)[: plate.batch]
    for site in plan.sites:
        shape = _shape(plan, site)
        if site.covariate:
            inputs[f"x {site.name}"] = torch.randn(
                shape, generator=generator, dtype=plan.like.dtype
            )
        if site.missing in ("mask", "obs_mask"):
            mask = torch.rand(shape, generator=generator) < 0.7
            inputs[f"mask {site.name}"] = (
                mask.index_fill(-1, torch.tensor([0]), True) if shape else mask
            )
    with _seeded(generator), torch.no_grad(), poutine.block(), pyro.validation_enabled(False):
        nodes = poutine.trace(plan.run).get_trace(inputs, whole=True).nodes
    for site in plan.sites:
        if site.observed and site.kind != "factor":
            value = nodes[site.name]["value"].clone()
            if site.missing == "NaN":
                holes = torch.rand(value.shape, generator=generator) < 0.3
                value = value.masked_fill(
                    holes.index_fill(-1, torch.tensor([0]), False), float("nan")
                )
            inputs[site.name] = value
    return inputs


def _shape(plan: PlannedModel, site: SitePlan) -> tuple[int, ...]:
    """Returns the batch shape of a site over whole plates."""
    sizes = {plan.plates[name].dim: plan.plates[name].size for name in site.plates}
    return tuple(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0))


@contextmanager
def _seeded(generator: torch.Generator) -> Iterator[None]:
    with torch.random.fork_rng(()):
        torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
        yield


def _finished(
    seed: int, plan: PlannedModel, inputs: Mapping[str, Tensor], style: str, draw: random.Random
) -> Program:
    by_name = {site.name: site for site in plan.sites}
    read = [(by_name[edge.parent], site) for site in plan.sites for edge in site.edges]
    edges = frozenset((u, v) for parent, site in read for u in parent.nodes for v in site.nodes)
    nodes = [
        (v, site.observed and not v.endswith("_unobserved"))
        for site in plan.sites
        for v in site.nodes
    ]
    latents = tuple(v for v, is_data in nodes if not is_data)
    observed = tuple(v for v, is_data in nodes if is_data)
    if style == "compile" and not observed:
        style = "dict"
    ingredients = {site.kind for site in plan.sites} | {
        site.missing for site in plan.sites if site.missing
    }
    ingredients |= {"moving"} if ingredients & MOVING.keys() else set()
    ingredients |= {style} | _of_plates(plan)
    program = Program(
        seed, plan, plan, inputs, edges, latents, observed, {}, style, frozenset(ingredients)
    )
    return replace(program, options=_options(draw, program))


def _of_plates(plan: PlannedModel) -> set[str]:
    """Returns what its plates make of a program."""
    maps = sum(len(plate.maps) for plate in plan.plates.values())
    found = {"several maps"} if maps > 1 else set()
    return found | {"minibatch" for plate in plan.plates.values() if plate.batch}


_INVERSES = ["auto", "forward", "reverse", "free", "stuhlmueller", "mean_field", "fully_connected"]


def _options(draw: random.Random, program: Program) -> dict[str, Any]:
    """Draws the guide's options; most are left at their defaults."""
    moving = bool({"moving", "interval", "greater than"} & program.ingredients)
    inverses = [name for name in _INVERSES if name != "stuhlmueller" or not moving]
    options: dict[str, Any] = {
        "inverse": draw.choice(inverses),
        "mode": draw.choice(["auto", "amortized"]),
    }
    choices: dict[str, list[Any]] = {
        "hidden_features": [(), (8,), (8, 8)],
        "shared": [False],
        "skip": [False],
        "within": ["independent"],
        "anchor": [False],
        "exact": [False],
        "evidence": [False],
        "pooling": ["attention"],
        "init_scale": [0.5],
    }
    options.update(
        {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.2}
    )
    # narrow layers cannot carry every dependency without direct weights
    if not options.get("skip", True):
        options.pop("hidden_features", None)
    if draw.random() < 0.35:
        kinds = {site.name: _ALL[site.kind] for site in program.plan.sites if not site.observed}
        options["families"] = {
            name: draw.choice(kind.families) for name, kind in kinds.items() if draw.random() < 0.7
        }
    if program.style == "compile":
        options["observed"] = program.observed
    if options["inverse"] in ("forward", "reverse", "free") and not moving and draw.random() < 0.2:
        cut = draw.randint(1, len(program.latents))
        options["blocks"] = [
            list(part) for part in (program.latents[:cut], program.latents[cut:]) if part
        ]
    return options
