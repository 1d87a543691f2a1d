"""`Probe`: runs a model at its base values, at chosen values, or at fresh draws of all instances or some.

Each `Run` holds a `Record` of every site, by which `interventions` and `index_maps` compare runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor

from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.first_run import is_node, is_partial
from pyro_nami.program.runner import Runner
from pyro_nami.program.site_values import any_value, drawn, redraw
from pyro_nami.reading.provenance import ProvenanceTracker
from pyro_nami.reading.site_records import Record, recorded, same, spread

__all__ = ["OutOfBudget", "Place", "Probe", "Run"]

# What log_prob raises for a transform that knows the inverse of its own draws only.
_NO_DENSITY = (NotImplementedError, KeyError)
# Draws per run that fails at these values (a matrix that is not positive definite, say).
_RETRIES = 3

Choose = Callable[[Any], Any]


class OutOfBudget(Exception):
    """Ends what runs the model where the budget does."""


class Place(NamedTuple):
    """Where a site lies in a plate: a batch dim, and the instance ``(size,)`` in which each row along it lies."""

    dim: int
    rows: Tensor


class Run:
    """One run of a model with chosen values, and what each site was like in it, a latent always at its base value.

    Args:
        base: the base value per site.
        choice: takes a message, returns the value that the site shall hand to the model (None: as it comes).
        tracker: a `ProvenanceTracker` that follows the run.
        only: the sites to record; None for all.

    Attributes:
        values: the value of each site, and of each plate the instances; ``chosen`` those that ``choice`` gave.
        sites: the message of each site, as the run left it.
        records: what each site was like.
        reads: with a tracker, per site the names that reached its log density, its support, and Python.
        error: what ended the run early.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        choice: Choose,
        tracker: Any = None,
        only: Container[str] | None = None,
    ) -> None:
        self._base = base
        self._choice = choice
        self._tracker = tracker
        self._only = only
        self.values: dict[str, Any] = {}
        self.chosen: dict[str, Any] = {}
        self.sites: dict[str, Any] = {}
        self.records: dict[str, Record] = {}
        self.reads: dict[str, tuple[frozenset, frozenset, frozenset]] = {}
        self.error: Exception | None = None
        self._data: Any = None  # what the model observes at the site that the run is at

    def make(self, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Runs the model."""
        Runner({}, choose=self._choose, note=self._note).run(model, args, kwargs)

    def differs(self, origin: Run, name: str) -> bool:
        """Whether a site is not, to the bit, what it was in another run."""
        return not same(self.records.get(name), origin.records.get(name))

    def _choose(self, msg: Any) -> Any:
        if not (is_node(msg) or is_partial(msg)):
            return None
        value, self._data = self._choice(msg), msg["value"]
        if value is not None:
            self.chosen[msg["name"]] = value
            if value is self._data:  # the model itself observed the changed argument
                self._data = self._base[msg["name"]]
        return value

    def _note(self, msg: Any) -> None:
        name, value = msg["name"], msg["value"]
        if site_is_subsample(msg):
            self.values[name] = value
        elif is_node(msg):
            self.values[name], self.sites[name] = value, msg
            if self._tracker is not None:
                msg["value"] = self._follow(msg, self._tracker)
            elif self._only is None or name in self._only:
                judged = self._data if msg["is_observed"] else self._base.get(name, value)
                # as a stranger, not as the draw that transforms remember
                if isinstance(judged, Tensor):
                    judged = judged.clone()
                self.records[name] = recorded(msg, judged, Exception if self._base else _NO_DENSITY)

    def _follow(self, msg: Any, tracker: ProvenanceTracker) -> Any:
        """Notes what the site read, and returns its value with the site's own name as its provenance."""
        name = msg["name"]
        value = msg["value"]
        escaped = tracker.escaped
        origin: frozenset = frozenset()
        if isinstance(value, Tensor):
            # other sites may observe the same data; that alone is no dependence
            if msg["is_observed"]:
                origin = tracker.provenance(value) - tracker.provenance(self._base[name])
            value = value.clone()
            tracker.tag(value, {name})
        record = self.records[name] = recorded(msg, value, _NO_DENSITY)
        density = origin | tracker.provenance(record.log_prob, record.inputs)
        self.reads[name] = (
            density - {name},
            tracker.provenance(record.support) - {name},
            tracker.escaped,
        )
        tracker.escaped = escaped  # what log_prob takes out of torch concerns this site only
        return value


class Probe:
    """A model with its arguments and base values: everything that another run of it needs.

    Args:
        model, args, kwargs: the model and its arguments.
        init: site -> a constrained value, for latents that cannot be sampled.
        observed: sites that are sampled here but that inference will condition on.
        budget: the most runs that are to be made.

    Attributes:
        first: the base run, ``trace`` its trace, and ``base`` its values.
        order: the sites in model order, and ``rank`` their places in it.
        latent, observed: those that the model samples, and those that inference conditions on.
        arguments: the observed sites whose values are arguments of the model.
        changeable: the sites that an intervention can change.
        frames: per site those of its vectorized plates, ``plates_of`` their names, and ``plates`` one for each name.
        sizes: per plate the number of instances in a run; ``runs``: the number of runs so far.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))
        >>> probe = Probe(model, (), {}, None, (), budget=10)
        >>> run = probe.redraw(["z"], probe.first)
        >>> run.differs(probe.first, "x"), run.differs(probe.first, "z")
        (True, False)
    """

    def __init__(
        self,
        model: Callable,
        args: tuple,
        kwargs: Mapping[str, Any],
        init: Any,
        observed: Collection[str],
        budget: int,
    ) -> None:
        self.model = model
        self.args = args
        self.kwargs = kwargs
        self.budget = budget
        self.runs = 0
        self.first, self.trace = self._first_run(init)
        self.base, self.order = self.first.values, tuple(self.first.records)
        self.rank = {name: i for i, name in enumerate(self.order)}
        sites: dict[str, Any] = {name: self.trace.nodes[name] for name in self.order}
        seen = {name for name, site in sites.items() if site["is_observed"]}
        for name in observed:
            if name not in sites:
                raise ValueError(
                    f"Expected the names of sample sites in `observed`; got '{name}'. "
                    f"The model's sites are: {', '.join(self.order) or 'none'}."
                )
        self.latent, self.observed = frozenset(sites) - seen, seen.union(observed)
        given = {id(value) for value in (*args, *kwargs.values())}
        self.arguments = frozenset(name for name in seen if id(self.base[name]) in given)
        tensors = {name: value for name, value in self.base.items() if isinstance(value, Tensor)}
        full = {name for name, value in tensors.items() if value.numel()}
        self.changeable = frozenset(
            name for name in sites if name in full and not site_is_factor(sites[name])
        )
        self.device = next((value.device for value in tensors.values()), torch.device("cpu"))
        self.frames = {
            name: [f for f in site["cond_indep_stack"] if f.vectorized]
            for name, site in sites.items()
        }
        self.plates_of = {
            name: frozenset(frame.name for frame in frames) for name, frames in self.frames.items()
        }
        self.plates = {
            frame.name: frame for name in reversed(self.order) for frame in self.frames[name]
        }
        self.sizes = {}
        for plate, frame in self.plates.items():
            inside = [
                site["fn"].batch_shape
                for name, site in sites.items()
                if plate in self.plates_of[name]
            ]
            self.sizes[plate] = (
                frame.size if frame.size > 0 else max(shape[frame.dim] for shape in inside)
            )

    @property
    def spent(self) -> bool:
        """Whether all runs of the budget are made."""
        return self.runs >= self.budget

    def attempt(self, make: Callable[..., Run], *args: Any) -> Run:
        """Makes a run, and again if the model fails at the values that were drawn; ends by `OutOfBudget`."""
        for _ in range(_RETRIES):
            if self.spent:
                raise OutOfBudget
            run = make(*args)
            if run.error is None:
                break
        return run

    def run(
        self,
        values: Mapping[str, Any],
        draw: Choose = lambda msg: None,
        tracker: Any = None,
        only: Any = None,
    ) -> Run:
        """Runs the model with ``values``, else what ``draw`` returns, else the base values; records sites ``only``.

        An observed site whose value is an argument of the model is changed by changing the argument.
        """

        def choose(msg: Any) -> Any:
            name, value = msg["name"], values.get(msg["name"])
            if value is None and not site_is_subsample(msg):
                value = draw(msg)
            return self.base.get(name) if value is None and not msg["is_observed"] else value

        self.runs += 1
        swaps = {id(self.base[name]): values[name] for name in self.arguments if name in values}
        args = tuple(swaps.get(id(value), value) for value in self.args)
        kwargs = {key: swaps.get(id(value), value) for key, value in self.kwargs.items()}
        run = Run(self.base, choose, tracker, only)
        try:
            run.make(self.model, args, kwargs)
        except Exception as error:  # noqa: BLE001  whatever a model does at values that it was not written for
            run.error = error
        self._check_sites(run)
        return run

    def sample(self) -> Run:
        """Runs the model with a fresh draw of every latent."""
        return self.run(
            {},
            lambda msg: (
                None if msg["is_observed"] else any_value(msg["fn"], self.base[msg["name"]])
            ),
        )

    def redraw(
        self,
        names: Iterable[str],
        origin: Run,
        only: Any = None,
        other: Any = None,
        attempts: int = _RETRIES,
    ) -> Run:
        """Repeats ``origin`` with other values at the sites ``names``; again if the model fails at these.

        ``other`` makes one for a name and a distribution: by default a draw that differs in every element.
        """
        names, make = frozenset(names), other or (lambda name, fn: redraw(fn, origin.values[name]))
        observed = [name for name in self.order if name in names and name not in self.latent]
        held = {name: value for name, value in origin.chosen.items() if name not in names}

        def draw(msg: Any) -> Any:
            return make(msg["name"], msg["fn"]) if msg["name"] in names else None

        for _ in range(attempts):
            data = {name: make(name, self.trace.nodes[name]["fn"]) for name in observed}
            run = self.run({**held, **data}, draw, only=only)
            if run.error is None:
                break
        return run

    def redraw_rows(
        self, origin: Run, places: Mapping[str, Place], chosen: Tensor, data: Collection[str] = ()
    ) -> Run:
        """Repeats ``origin`` with fresh draws for the ``chosen`` instances, boolean ``(size,)``, of a plate.

        Changes all latents that have a place in the plate, and arguments of the model, ``data``, that have one.
        """

        def other(name: str, fn: Any) -> Tensor:
            base, (dim, rows) = origin.values[name], places[name]
            new, dim = redraw(fn, base), dim - fn.event_dim
            if new.shape != base.shape or base.dim() < -dim or base.shape[dim] != len(rows):
                return base
            return torch.where(spread(chosen[rows].to(base.device), dim), new, base)

        latents = self.latent & self.changeable & places.keys()
        return self.redraw(latents.union(data), origin, other=other, attempts=1)

    def _first_run(self, init: Callable[[dict], Tensor] | None) -> tuple[Run, poutine.Trace]:
        """Draws the base values; where the model fails at every draw, it takes those of ``init``."""
        for retries in reversed(range(_RETRIES + 1)):
            run = Run({}, functools.partial(_first_value, init=init, drawing=retries > 0))
            tracer = poutine.trace(self.model)
            try:
                run.make(tracer, self.args, self.kwargs)
                break
            except Exception:  # at draws far out, say, which a model need not be written for
                if not retries:
                    raise
        for node in tracer.trace.nodes.values():
            if node["type"] == "sample" and isinstance(node["value"], Tensor):
                node["value"] = node["value"].detach()
        return run, tracer.trace

    def _check_sites(self, run: Run) -> None:
        changed = [name for name in run.sites if name not in self.rank]
        if run.error is None:
            changed += [
                name for name in self.order if name in self.latent and name not in run.sites
            ]
        if changed:
            raise ValueError(
                f"Expected the same sites in every run of the model; got '{changed[0]}' in some runs only, "
                "depending on the values of other sites. Sample it in every run, and switch its effect with "
                "`torch.where` or `poutine.mask`."
            )


def _first_value(msg: Any, init: Callable[[dict], Tensor] | None, drawing: bool) -> Any:
    """A value for a latent that has none yet: a draw, or if not ``drawing``, or none can be, that of ``init``."""
    if msg["is_observed"] or msg["value"] is not None or site_is_subsample(msg):
        return None
    value = drawn(msg["fn"]) if drawing or init is None else None
    if value is None:
        value = any_value(msg["fn"]) if init is None else init(msg)
    if value is None:
        raise NotImplementedError(
            f"Expected a latent site that can be sampled; got '{msg['name']}' with "
            f"{type(innermost(msg['fn'])).__name__}. Pass `init`, a function from the site to a value."
        )
    return value
