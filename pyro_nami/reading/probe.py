"""Running a model again: at base values, at chosen values, at fresh draws.

`Probe` draws the base values in a first run, and makes every later one. Each `Run` keeps a `Record` per site:
its log density at the base value, its shape, mask and support, so that two runs can be compared to the bit.
Change this module to change how sites are recognized, drawn or compared; what the comparisons mean is decided
in `extraction`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor
from torch.distributions import Distribution, Independent, Transform, biject_to
from torch.distributions.constraints import Constraint

from pyro_nami.factors.wrappers import layers
from pyro_nami.reading.provenance import ProvenanceTracker
from pyro_nami.reading.runner import widen

__all__ = ["Probe", "Record", "Run", "equal", "redraw", "redraw_part", "redraw_rows", "same"]

# What log_prob raises for a transform that knows the inverse of its own draws only.
_NO_DENSITY = (NotImplementedError, KeyError)
# Draws per run that fails at these values (a matrix that is not positive definite, say).
_RETRIES = 3
# Draws to find a value that differs, where the support cannot be enumerated (a Poisson of low rate).
_REDRAWS = 20

Choose = Callable[[Any], Any]


class Record(NamedTuple):
    """What one site was like in one run.

    Attributes:
        log_prob: Its log density in nats, ``(*batch)``, at the value it is judged at; None if that has none.
        shape: Its batch and event shape.
        inputs: What else decides its effect: mask, scale, and its value if it is observed.
        support: The tensors and numbers that its support depends on.
    """

    log_prob: Tensor | None
    shape: torch.Size
    inputs: list
    support: list


class Run(Messenger):
    """Runs a model with chosen values and records each site, a latent always at its base value.

    Args:
        base: The base value per site.
        choose: Takes a message, returns the value that the site shall hand to the model (None: as it comes).
        tracker: Follows provenance through the run.
        only: The sites to record; None for all.

    Attributes:
        values: The value of each site, and ``chosen`` those that ``choose`` gave.
        records: What each site was like.
        sites: The message of each site, as the run left it.
        reads: With a tracker, per site the names that reached its log density, its support, and Python.
        error: What ended the run early.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        choose: Choose,
        tracker: ProvenanceTracker | None = None,
        only: Container[str] | None = None,
    ) -> None:
        super().__init__()
        self.base, self.choose, self.tracker, self.only = base, choose, tracker, only
        self.values: dict[str, Any] = {}
        self.chosen: dict[str, Any] = {}
        self.records: dict[str, Record] = {}
        self.sites: dict[str, Any] = {}
        self.reads: dict[str, tuple[frozenset, frozenset, frozenset]] = {}
        self.error: Exception | None = None
        self._judged: Any = None

    def _pyro_sample(self, msg: Any) -> None:
        if _is_site(msg) or _is_random_subsample(msg):
            widen(msg)
            value = self.choose(msg)
            self._judged = msg["value"] if msg["is_observed"] else None
            if value is not None:
                self.chosen[msg["name"]] = value
                if value is self._judged:  # the model itself observed the changed argument
                    self._judged = self.base[msg["name"]]
                msg["value"], msg["done"] = value, True

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            self.values[msg["name"]] = msg["value"]
        elif _is_site(msg):
            name, value = msg["name"], msg["value"]
            self.values[name], self.sites[name] = value, msg
            if self.tracker is not None:
                msg["value"] = self._follow(msg, self.tracker)
            elif self.only is None or name in self.only:
                judged = self._judged if msg["is_observed"] else self.base.get(name, value)
                if isinstance(judged, Tensor):  # as a stranger, not as the draw that transforms remember
                    judged = judged.clone()
                self.records[name] = _record(msg, judged, Exception if self.base else _NO_DENSITY)

    def _follow(self, msg: Any, tracker: ProvenanceTracker) -> Any:
        """Notes what the site read, and returns its value with the site's own name as its provenance."""
        value, own, escaped = msg["value"], frozenset({msg["name"]}), tracker.escaped
        origin: frozenset = frozenset()
        if isinstance(value, Tensor):
            if msg["is_observed"]:  # other sites may observe the same data; that alone is no dependence
                origin = tracker.provenance(value) - tracker.provenance(self.base[msg["name"]])
            value = value.clone()
            tracker.tag(value, own)
        record = self.records[msg["name"]] = _record(msg, value, _NO_DENSITY)
        density = origin | tracker.provenance(record.log_prob, record.inputs)
        support = tracker.provenance(record.support)
        self.reads[msg["name"]] = density - own, support - own, tracker.escaped
        tracker.escaped = escaped  # what log_prob takes out of torch concerns this site only
        return value


class Probe:
    """A model with its arguments and base values: everything that another run of it needs.

    Attributes:
        first: The base run, ``trace`` its trace, and ``base`` its values.
        order: The sites in model order.
        latent: Those that the model samples.
        observed: Those that inference conditions on.
        arguments: The observed sites whose values are arguments of the model.
        changeable: The sites that an intervention can change.
        plates: A frame for each vectorized plate.
        runs: The number of runs so far.
    """

    def __init__(
        self, model: Callable, args: tuple, kwargs: dict, init: Callable[[dict], Tensor] | None
    ) -> None:
        self.model, self.args, self.kwargs, self.runs = model, args, kwargs, 0
        for retries in reversed(range(_RETRIES + 1)):
            first = Run({}, partial(_first_value, init=init, drawn=retries > 0))
            try:
                self.trace = poutine.trace(first(model)).get_trace(*args, **kwargs)
                break
            except Exception:  # at draws far out, say, which a model need not be written for
                if not retries:
                    raise
        for node in self.trace.nodes.values():
            if node["type"] == "sample" and isinstance(node["value"], Tensor):
                node["value"] = node["value"].detach()
        self.base, self.first, self.order = first.values, first, tuple(first.records)
        self.rank = {name: i for i, name in enumerate(self.order)}
        self.observed = {name for name in self.order if self.trace.nodes[name]["is_observed"]}
        self.latent = frozenset(self.order) - self.observed
        given = {id(value) for value in (*args, *kwargs.values())}
        self.arguments = frozenset(name for name in self.observed if id(self.base[name]) in given)
        self.changeable = frozenset(filter(self._is_changeable, self.order))
        self.plates = {frame.name: frame for name in reversed(self.order) for frame in self.frames(name)}

    @property
    def device(self) -> torch.device:
        """Where the model's values are."""
        return next((value.device for value in self.base.values() if isinstance(value, Tensor)), torch.device("cpu"))

    def frames(self, name: str) -> list[Any]:
        """The frames of a site's vectorized plates."""
        return [frame for frame in self.trace.nodes[name]["cond_indep_stack"] if frame.vectorized]

    def plate_names(self, name: str) -> frozenset[str]:
        return frozenset(frame.name for frame in self.frames(name))

    def plate_size(self, frame: Any) -> int:
        """The number of a plate's instances in a run (for a plate without a size, as its sites have it)."""
        if frame.size > 0:
            return int(frame.size)
        sites: list[Any] = [self.trace.nodes[name] for name in self.order if frame in self.frames(name)]
        return max(site["fn"].batch_shape[frame.dim] for site in sites)

    def earlier(self, name: str) -> tuple[str, ...]:
        return self.order[: self.rank[name]]

    def add_observed(self, names: Iterable[str]) -> None:
        """Adds sites that are sampled here but that inference will condition on."""
        for name in names:
            if name not in self.rank:
                raise ValueError(
                    f"Expected the names of sample sites in `observed`; got '{name}'. "
                    f"The model's sites are: {', '.join(self.order) or 'none'}."
                )
            self.observed.add(name)

    def run(
        self,
        values: Mapping[str, Any],
        draw: Choose = lambda msg: None,
        tracker: ProvenanceTracker | None = None,
        only: Container[str] | None = None,
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
        args = [swaps.get(id(value), value) for value in self.args]
        kwargs = {key: swaps.get(id(value), value) for key, value in self.kwargs.items()}
        run = Run(self.base, choose, tracker, only)
        try:
            run(self.model)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever a model does at values that it was not written for
            run.error = error
        self._check_sites(run)
        return run

    def sample(self) -> Run:
        """Runs the model with a fresh draw of every latent."""
        return self.run(
            {}, lambda msg: None if msg["is_observed"] else _draw(msg["fn"], self.base[msg["name"]])
        )

    def redraw(self, names: Iterable[str], origin: Run, only: Container[str] | None = None) -> Run:
        """Repeats ``origin`` with fresh draws at the sites ``names``; again if the model fails at these."""
        names = frozenset(names)
        observed = [name for name in self.order if name in names and name not in self.latent]
        held = {name: value for name, value in origin.chosen.items() if name not in names}

        def draw(msg: Any) -> Any:
            return redraw(msg["fn"], origin.values[msg["name"]]) if msg["name"] in names else None

        for _ in range(_RETRIES):
            data = {u: redraw(self.trace.nodes[u]["fn"], origin.values[u]) for u in observed}
            run = self.run({**held, **data}, draw, only=only)
            if run.error is None:
                break
        return run

    def _is_changeable(self, name: str) -> bool:
        value = self.base[name]
        return isinstance(value, Tensor) and value.numel() > 0 and not site_is_factor(self.trace.nodes[name])

    def _check_sites(self, run: Run) -> None:
        changed = [name for name in run.sites if name not in self.rank]
        if run.error is None:
            changed += [name for name in self.order if name in self.latent and name not in run.sites]
        if changed:
            raise ValueError(
                f"Expected the same sites in every run of the model; got '{changed[0]}' in some runs only, "
                "depending on the values of other sites. Sample it in every run, and switch its effect with "
                "`torch.where` or `poutine.mask`."
            )


def _is_site(msg: Any) -> bool:
    """Whether a message is a node of the network: not a subsample, deterministic, Delta or masked out."""
    if msg["type"] != "sample" or site_is_subsample(msg):
        return False
    masked = msg["mask"] is False
    if msg["is_observed"] and (masked or msg["infer"].get("_deterministic", False)):
        return False
    for fn in layers(msg["fn"]):
        masked = masked or getattr(fn, "_mask", None) is False
    return type(fn).__name__ != "Delta" or (msg["is_observed"] and not masked)


def _record(msg: Any, value: Any, expected: Any) -> Record:
    fn, mask = msg["fn"], msg["mask"]
    inputs = [mask, msg["scale"], value if msg["is_observed"] else None]
    try:
        log_prob = fn.log_prob(value, *msg["args"], **msg["kwargs"])
        log_prob = torch.where(mask, log_prob, 0.0) if isinstance(mask, Tensor) else log_prob
    except expected:
        log_prob = None
        inputs += _parameters(fn)
    try:
        support = _parameters(fn.support)
    except (NotImplementedError, AttributeError):
        support = []
    return Record(log_prob, fn.batch_shape + fn.event_shape, inputs, support)


def same(a: Any, b: Any) -> bool:
    """Whether two records, or parts of them, agree to the bit."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(equal(a, b).all())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(np.all(a == b))


def equal(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan())


def _parameters(value: Any) -> list[Any]:
    """The tensors and numbers that a distribution, transform or constraint consists of."""
    if isinstance(value, (Distribution, Transform, Constraint)):
        value = [part for key, part in vars(value).items() if not key.startswith(("_cached", "_inv"))]
    if isinstance(value, (list, tuple)):
        return [leaf for part in value for leaf in _parameters(part)]
    return [value] if isinstance(value, (Tensor, int, float)) else []


def _first_value(msg: Any, init: Callable[[dict], Tensor] | None, drawn: bool) -> Any:
    """A value for a latent that has none yet: a draw, or if not ``drawn``, or none can be, that of ``init``."""
    if msg["is_observed"] or msg["value"] is not None or site_is_subsample(msg):
        return None
    value = _sample(msg["fn"]) if drawn or init is None else None
    if value is None:
        value = _draw(msg["fn"]) if init is None else init(msg)
    if value is None:
        raise NotImplementedError(
            f"Expected a latent site that can be sampled; got '{msg['name']}' with "
            f"{type(msg['fn']).__name__}. Pass `init`, a function from the site to a value."
        )
    return value


def _sample(fn: Any) -> Tensor | None:
    try:
        return fn()
    except NotImplementedError:
        return None


def _draw(fn: Any, otherwise: Tensor | None = None) -> Any:
    """A draw from ``fn``, else a normal one in unconstrained space, else (no bijection) ``otherwise``."""
    value = _sample(fn)
    if value is not None:
        return value
    try:
        transform = biject_to(fn.support)
    except NotImplementedError:
        return otherwise
    like = torch.empty(0) if otherwise is None else otherwise
    return transform(torch.randn(transform.inverse_shape(fn.shape()), dtype=like.dtype, device=like.device))


def redraw(fn: Any, base: Any) -> Any:
    """A draw from ``fn`` that differs from ``base`` in every element, where ``fn`` has another value."""
    value = _draw(fn, base)
    while isinstance(fn, Independent):
        fn = fn.base_dist
    for _ in range(_REDRAWS if value.shape == base.shape else 0):
        stuck = _whole_event(value == base, fn.event_dim)
        if not stuck.any():
            break
        value = torch.where(stuck, _other_value(fn, base) if fn.has_enumerate_support else _draw(fn, base), value)
    return value.to(base.dtype)


def _other_value(fn: Any, base: Tensor) -> Tensor:
    """A draw from ``fn`` given that it is not ``base``; ``base`` where it can be nothing else."""
    try:
        support = fn.enumerate_support()
    except NotImplementedError:
        return fn()
    log_prob, event = fn.log_prob(support), (1,) * fn.event_dim
    score = log_prob - torch.empty_like(log_prob).exponential_().log()
    score = score.reshape(log_prob.shape + event).masked_fill(
        _whole_event(support == base, fn.event_dim), -torch.inf
    )
    best, index = score.max(0, keepdim=True)
    other = support.gather(0, index.expand((1,) + base.shape))
    return torch.where(best.isfinite(), other, base)[0]


def _whole_event(equal: Tensor, event_dim: int) -> Tensor:
    return equal.flatten(-event_dim).all(-1)[(...,) + (None,) * event_dim] if event_dim else equal


def redraw_part(msg: Any, base: Mapping[str, Any], plate: str, kept: Tensor) -> Any:
    """Fresh draws for instances of ``plate`` that are not ``kept``, else base values; None outside it."""
    frame = next(
        (frame for frame in msg["cond_indep_stack"] if frame.name == plate and frame.vectorized), None
    )
    if frame is None or msg["is_observed"]:
        return None
    return redraw_rows(msg["fn"], base[msg["name"]], frame.dim, kept)


def redraw_rows(fn: Any, base: Tensor, dim: int, kept: Tensor) -> Tensor:
    """A fresh draw for instances along batch dim ``dim`` that are not ``kept``, else base values."""
    new, dim = redraw(fn, base), dim - fn.event_dim
    if new.shape != base.shape or base.dim() < -dim or base.shape[dim] != len(kept):
        return base
    return torch.where(kept.to(base.device).reshape((-1,) + (1,) * (-dim - 1)), base, new)


def _is_random_subsample(msg: Any) -> bool:
    if not site_is_subsample(msg) or msg["value"] is not None:
        return False
    return msg["fn"].subsample_size is not None and msg["fn"].subsample_size < msg["fn"].size
