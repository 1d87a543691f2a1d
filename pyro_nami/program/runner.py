"""`Runner`: runs a model with chosen values at its sites, unseen by the handlers outside.

This is the one way in which a model is run: to extract its network, at a guide's set-up, and in
every call. The exception is the first run, whose trace Pyro's guides keep.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from pyro.contrib.easyguide import EasyGuide
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor, nn

from pyro_nami.factors.completed import completed
from pyro_nami.program.flat_priors import is_improper
from pyro_nami.program.plate_dims import frames_of, own_dims
from pyro_nami.program.site_values import any_value

__all__ = [
    "AllSeen",
    "RunModel",
    "Runner",
    "changed_event_shape",
    "is_fixed",
    "make_whole",
    "needs_arguments",
    "signature_of",
    "takes_observations",
]


Values = Mapping[str, Tensor]  # site -> its value
Message = Mapping[str, Any]  # of one site in a run, as Pyro has it
Sites = Mapping[str, Any]  # site -> its message
# Runs a model with values at sites, and may be told which sites it is for; returns its sites.
Choose = Callable[[Any], Any]  # message -> the value of its site; None: as it comes
Note = Callable[[Any], None]  # sees the message of a site
RunModel = Callable[..., Sites]


class AllSeen(BaseException):
    """Ends a run early, when all sites that it is made for have been seen."""


class Runner(Messenger):
    """Runs a model with given values, and stops its messages from reaching the handlers outside.

    Args:
        values: site -> the value that the model gets there, or a function of the site's distribution that makes it.
        indices: plate -> the instances that it holds in this run.
        shown: plates whose choice of instances is to be seen outside (and made there, by a replay, say).
        broadcast: whether values are expanded to the shape of their site.
        until: the sites that the run is made for; it ends by `AllSeen` behind the last of them. None: never.
        simulated: whether observed sites are drawn. Factors and deterministic sites are not, which
            `poutine.uncondition` draws as well, in a plate at a wrong shape.
        choose: message -> the value of a site, plates included, that has none in ``values``; None: as it comes.
        note: called with the message of every sample site, plates included, when it has its value.

    Attributes:
        is_sampling: whether values are to be draws; elsewhere any values stand for those of improper priors.
        sites: the message of every sample site, plates included, as the run left it.
        last: the message of the sample site that the run came to last.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     return pyro.sample("x", dist.Normal(pyro.sample("z", dist.Normal(0.0, 1.0)), 1.0))
        >>> sites = Runner({"z": torch.tensor(3.0)}).run(model, (), {})
        >>> list(sites), sites["x"]["fn"].loc
        (['z', 'x'], tensor(3.))
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        indices: Values | None = None,
        shown: Collection[str] = (),
        broadcast: bool = False,
        until: Collection[str] | None = None,
        simulated: bool = False,
        choose: Choose | None = None,
        note: Note | None = None,
    ) -> None:
        super().__init__()
        self.values = values
        self.indices = indices or {}
        self.shown = shown
        self.broadcast = broadcast
        self.simulated = simulated
        self.choose = choose
        self.note = note
        self.until, self.is_sampling = until, False
        Runner.restart(self)

    def restart(self) -> None:
        """Forgets what was seen so far of a run that starts again."""
        self.missing: set[str] = set(self.until or ())
        self.sites: dict[str, Any] = {}
        self.last: Any = None

    def run(self, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Runs the model, to its end or until all is seen; returns its sample sites, as a trace holds them."""
        with own_dims(), self, suppress(AllSeen):
            model(*args, **kwargs)
        return self.sites

    def _process_message(self, msg: Any) -> None:
        msg["stop"] = True
        if msg["type"] != "sample":
            return
        make_whole(msg)
        self.last, name = msg, msg["name"]
        chosen = None if self.choose is None or name in self.values else self.choose(msg)
        if chosen is not None:
            msg["value"], msg["done"] = chosen, True
        elif site_is_subsample(msg):
            if name in self.indices:
                msg["value"] = self.indices[name]
            elif name in self.shown:
                msg["stop"] = False
        elif name in self.values:
            value = self.values[name]
            if not callable(value):
                msg["value"] = _expanded(name, value, msg["fn"]) if self.broadcast else value
            elif not msg["is_observed"]:
                msg["value"] = value(msg["fn"])
        elif self.simulated and msg["is_observed"] and not is_fixed(msg):
            msg["is_observed"], msg["value"] = False, None
        elif msg["value"] is None and not self.is_sampling and is_improper(msg["fn"]):
            # An improper prior has no draws.
            msg["value"] = any_value(msg["fn"])

    def _postprocess_message(self, msg: Any) -> None:
        # Sequential enumeration puts the run off at a site, and there is no value yet.
        if msg["type"] != "sample" or msg["value"] is None:
            return
        if msg["name"] in self.sites and not site_is_subsample(msg):
            raise RuntimeError(
                f"Expected sites with names of their own; got '{msg['name']}' twice in one run."
            )
        self.sites[msg["name"]] = msg  # of which nothing changes from here on
        if self.note is not None:
            self.note(msg)
        if self.missing:
            self.missing.discard(msg["name"])
            if not self.missing:
                raise AllSeen


def make_whole(msg: Any) -> None:
    """Gives a site's distribution what it leaves out, and makes shapes whole where Pyro leaves them to broadcasting.

    The batch is its value's in a plate without a size, and a value that lacks event dims is repeated along them.
    """
    if site_is_subsample(msg):
        return
    fn = msg["fn"] = completed(msg["fn"])
    value = msg["value"]
    if not msg["is_observed"] or not isinstance(value, Tensor):
        return
    if any(frame.size < 0 for frame in frames_of(msg)):
        msg["fn"] = fn.expand(
            torch.broadcast_shapes(fn.batch_shape, value.shape[: value.dim() - fn.event_dim])
        )
    if value.shape[value.dim() - fn.event_dim :] != fn.event_shape and value.dim() <= fn.event_dim:
        msg["value"] = value.expand(fn.event_shape)


def is_fixed(site: Any) -> bool:
    """Whether a site has its value whatever is observed: a factor, or a deterministic site."""
    return site_is_factor(site) or bool(site["infer"].get("_deterministic"))


def _expanded(name: str, value: Tensor, fn: Any) -> Tensor:
    """Returns a value at the full shape of its site."""
    event_shape = value.shape[value.dim() - len(fn.event_shape) :]
    if event_shape != fn.event_shape:
        raise ValueError(changed_event_shape(name, event_shape, fn.event_shape))
    return value.expand(fn.shape())


def changed_event_shape(name: str, before: torch.Size, now: torch.Size) -> str:
    """The message for a site whose event shape is not that of the guide's first call."""
    return (
        f"Expected site '{name}' of event shape {tuple(before)}, as at the guide's first call; got {tuple(now)}. "
        "A guide's networks are fixed at its first call: make a new guide."
    )


def takes_observations(fn: Callable, *, is_guide: bool = False) -> bool:
    """Tells whether a model or a guide takes ``observations=``.

    By its signature; a guide with ``**kwargs`` does as well. Pyro's own guides hand everything on to their model.
    """
    if isinstance(fn, EasyGuide):
        return takes_observations(fn.guide)
    if isinstance(fn, AutoGuide) and not hasattr(fn, "log_prob"):
        return takes_observations(fn.model)
    try:
        parameters = signature_of(fn).parameters
    except (TypeError, ValueError):
        return False
    is_variadic = inspect.Parameter.VAR_KEYWORD in [each.kind for each in parameters.values()]
    return "observations" in parameters or (is_guide and is_variadic)


def needs_arguments(fn: Callable) -> bool:
    """Tells whether a model cannot be called without arguments, by its signature."""
    try:
        signature_of(fn).bind()
    except TypeError:
        return True
    except ValueError:  # it shows no signature
        return False
    return False


def signature_of(fn: Any) -> inspect.Signature:
    """Returns the signature of a model or a guide, of a module that of its `forward`, below handlers of Pyro.

    Raises:
        TypeError, ValueError: it has none.
    """
    fn = getattr(fn, "__wrapped__", fn) if isinstance(fn, nn.Module) else fn
    fn = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        # A handler of Pyro, such as the model that an AutoGuide holds, shows no signature of its own.
        if isinstance(fn, functools.partial) and fn.args:
            return signature_of(fn.args[-1])
        raise
