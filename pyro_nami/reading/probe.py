"""`Probe`: runs a model at its base values, at chosen values, or at fresh draws of all instances or some.

`interventions` and `index_maps` compare its runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor

from pyro_nami.factors.wrappers import innermost
from pyro_nami.program.first_run import is_node, is_partial
from pyro_nami.program.plate_dims import any_along, frames_of, spread
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Choose, Note, Runner, Values
from pyro_nami.program.site_values import any_value, drawn, redraw
from pyro_nami.reading.changes import differs, moved

__all__ = ["OutOfBudget", "Place", "Probe", "Run"]

# Times that a test by other values is repeated where it may pass by chance with probability 1/2: of an `if` on a value
# that left torch, of a row that follows the sign of a latent. Ten times fewer would miss most; ten times more would
# spend the budget of runs.
ROUNDS = 8


class OutOfBudget(Exception):
    """Raised where a further run would exceed the budget."""


class Place(NamedTuple):
    """Where a site lies in a plate: a batch dim, and the instance ``(size,)`` in which each row along it lies."""

    dim: int
    rows: Tensor


class Run(NamedTuple):
    """One run of a model with chosen values.

    Attributes:
        values: the value that the model got at each site, and of each plate the instances.
        sites: site -> its message; of an observed site with the data that the model itself observes.
        error: what ended the run early.
    """

    values: dict[str, Any]
    sites: dict[str, Any]
    error: Exception | None

    def differs(self, origin: Run, name: str) -> bool:
        """Whether a site is not, to the bit, what it was in another run."""
        return differs(origin.sites[name], self.sites.get(name))

    def strayed(self, origin: Run, name: str, place: Place, changed: Tensor) -> Tensor:
        """Returns which rows of a site in a plate moved, though their instances were not ``changed``, ``(size,)``."""
        rows = any_along(moved(origin.sites[name], self.sites[name], density_only=True), place.dim)
        return rows & ~changed[place.rows].to(rows.device)


class Probe:
    """A program with base values, run again and again at others.

    Args:
        program: the model and its arguments.
        init: site -> a constrained value, for latents that cannot be sampled.
        observed: sites that are sampled here but that inference will condition on.
        budget: the most runs that are to be made.
        tries: draws for a run that fails at its values (a matrix that is not positive definite, say).

    Attributes:
        first: the base run, and ``trace`` its trace.
        latent, observed: the sites that the model samples, and those that inference conditions on.
        arguments: the observed sites whose values are arguments of the model.
        changeable: the sites that an intervention can change.
        frames: per site those of its vectorized plates.
        sizes: per plate the number of instances in a run.
        runs: the number of runs so far.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
        ...     pyro.sample("x", dist.Normal(z, 1.0), obs=torch.tensor(1.0))
        >>> probe = Probe(Program(model, (), {}), None, (), budget=10)
        >>> run = probe.redraw(["z"], probe.first)
        >>> run.differs(probe.first, "x"), run.differs(probe.first, "z")
        (True, False)
    """

    def __init__(
        self, program: Program, init: Any, observed: Collection[str], budget: int, *, tries: int = 3
    ) -> None:
        self.program = program
        self.budget = budget
        self.tries = tries
        self.first, self.trace = self._first_run(init)
        self.runs = 0
        sites = self.first.sites
        seen = {name for name, site in sites.items() if site["is_observed"]}
        for name in observed:
            if name not in sites:
                raise ValueError(
                    f"Expected the names of sample sites in `observed`; got '{name}'. "
                    f"The model's sites are: {', '.join(sites) or 'none'}."
                )
        self.latent, self.observed = frozenset(sites) - seen, seen.union(observed)
        given = set(map(id, program.roots))
        self.arguments = frozenset(name for name in seen if id(self.base[name]) in given)
        self.changeable = frozenset(
            name
            for name, site in sites.items()
            if isinstance(self.base[name], Tensor)
            and self.base[name].numel()
            and not site_is_factor(site)
        )
        self.frames = {name: frames_of(site) for name, site in sites.items()}
        self.sizes = {plate: self._size(frame) for plate, frame in self.plates.items()}

    @property
    def base(self) -> dict[str, Any]:
        """The values of the base run."""
        return self.first.values

    @cached_property
    def movable(self) -> frozenset[str]:
        """The latents that an intervention can change."""
        return self.latent & self.changeable

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The sites in model order."""
        return tuple(self.first.sites)

    @cached_property
    def rank(self) -> dict[str, int]:
        """Site -> its place in the model's order."""
        return {name: i for i, name in enumerate(self.order)}

    @cached_property
    def plates(self) -> dict[str, Any]:
        """Plate -> one frame of it, that of the first site in it."""
        frames = [frame for name in self.order for frame in self.frames[name]]
        return {frame.name: frame for frame in reversed(frames)}

    @cached_property
    def plates_of(self) -> dict[str, frozenset[str]]:
        """Site -> its vectorized plates."""
        return {
            name: frozenset(frame.name for frame in frames) for name, frames in self.frames.items()
        }

    @property
    def device(self) -> torch.device:
        """The device of the first tensor in the base run."""
        tensors = (value for value in self.base.values() if isinstance(value, Tensor))
        return next((value.device for value in tensors), torch.device("cpu"))

    @property
    def spent(self) -> bool:
        """Whether all runs of the budget are made."""
        return self.runs >= self.budget

    def attempt(self, make: Callable[..., Run], *args: Any) -> Run:
        """Makes a run, and again if the model fails at the values that were drawn; ends by `OutOfBudget`."""
        for _ in range(self.tries):
            if self.spent:
                raise OutOfBudget
            run = make(*args)
            if run.error is None:
                break
        return run

    def run(
        self,
        values: Values,
        draw: Choose = lambda msg: None,
        note: Note = lambda msg: None,
    ) -> Run:
        """Runs the model with ``values``, else what ``draw`` returns, else the base values.

        An observed site whose value is an argument of the model is changed by changing the argument. ``note`` sees the
        message of each site once it has its value.
        """
        self.runs += 1
        swaps = {id(self.base[name]): values[name] for name in self.arguments if name in values}
        args = tuple(swaps.get(id(value), value) for value in self.program.args)
        kwargs = {key: swaps.get(id(value), value) for key, value in self.program.kwargs.items()}

        def choose(msg: Any) -> Any:
            name, value = msg["name"], values.get(msg["name"])
            if value is None and not site_is_subsample(msg):
                value = draw(msg)
            return self.base.get(name) if value is None and not msg["is_observed"] else value

        run = _run(self.program._replace(args=args, kwargs=kwargs), choose, note, self.base)
        self._check_sites(run)
        return run

    def redraw(self, names: Iterable[str], origin: Run, other: Any = None) -> Run:
        """Repeats ``origin`` with other values at the sites ``names``.

        ``other`` makes one for a name and a distribution: by default a draw that differs in every element.
        """
        names, make = frozenset(names), other or (lambda name, fn: redraw(fn, origin.values[name]))
        observed = [name for name in self.order if name in names and name not in self.latent]
        held = {name: value for name, value in origin.values.items() if name not in names}
        data = {name: make(name, self.first.sites[name]["fn"]) for name in observed}
        return self.run(
            {**held, **data},
            lambda msg: make(msg["name"], msg["fn"]) if msg["name"] in names else None,
        )

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

        return self.redraw((self.movable & places.keys()).union(data), origin, other)

    def _first_run(self, init: Callable[[dict], Tensor] | None) -> tuple[Run, poutine.Trace]:
        """Draws the base values; where the model fails at every draw, it takes those of ``init``."""
        for attempt in range(self.tries + 1):
            tracer = poutine.trace(self.program.model)
            choose = partial(_first_value, init=init, drawing=attempt < self.tries)
            run = _run(self.program._replace(model=tracer), choose)
            if run.error is None:
                break
        if run.error is not None:
            raise run.error
        for node in tracer.trace.nodes.values():
            if node["type"] == "sample" and isinstance(node["value"], Tensor):
                node["value"] = node["value"].detach()
        return run, tracer.trace

    def _size(self, frame: Any) -> int:
        """Returns the size of a plate; where the model does not say it, that of its sites."""
        inside = [name for name in self.order if frame.name in self.plates_of[name]]
        return max(
            frame.size, *(self.first.sites[name]["fn"].batch_shape[frame.dim] for name in inside)
        )

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


def _run(
    program: Program,
    choose: Choose,
    note: Note = lambda msg: None,
    base: Values = MappingProxyType({}),
) -> Run:
    """Runs a program with chosen values at its sites.

    Args:
        program: the model and its arguments.
        choose: message of a site, or of a plate of which the model takes a part -> its value; None: as it comes.
        note: sees the message of each site once it has its value.
        base: site -> value in the base run, which stands for the data of a site whose argument is changed.
    """
    values: dict[str, Any] = {}
    sites: dict[str, Any] = {}
    data: dict[str, Any] = {}

    def chosen(msg: Any) -> Any:
        if not is_node(msg) and not is_partial(msg):
            return None
        name, value = msg["name"], choose(msg)
        if msg["is_observed"]:
            data[name] = base[name] if value is msg["value"] else msg["value"]
        return value

    def noted(msg: Any) -> None:
        name, value = msg["name"], msg["value"]
        if site_is_subsample(msg) or is_node(msg):
            values[name] = value
        if is_node(msg):
            sites[name] = {**msg, "value": data.get(name, value)}
            note(msg)

    error = None
    try:
        program.run(Runner({}, choose=chosen, note=noted))
    except Exception as raised:  # noqa: BLE001  whatever a model does at values that it was not written for
        error = raised
    return Run(values, sites, error)


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
