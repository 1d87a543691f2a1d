"""`Vectorized`: models that are written for one draw (`alpha[index]`, `X @ w`), run for many at once by `torch.vmap`.

Inside, the model sees one draw in its own shapes. Outside, handlers see sites with batch dims, as
if the model were written for many: the distribution of a site is taken apart into tensors inside,
put together outside with those of all draws, and its value is handed back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK, apply_stack
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from pyro_nami.program.distribution_parts import Parts
from pyro_nami.program.plate_dims import outer_sizes
from pyro_nami.program.runner import Runner

__all__ = ["Vectorized", "unmapped"]

# Functions that make tensors which a model may write into.
_MAKERS = {"clone", "new_tensor", "tensor"} | {
    form.format(name)
    for name in ("zeros", "ones", "full", "empty")
    for form in ("{}", "{}_like", "new_{}")
}


def unmapped(model: Any) -> Callable:
    """Returns the model that a user wrote, of one that is mapped over draws; another one as it is."""
    return model.model if isinstance(model, Vectorized) else model


class Vectorized(nn.Module):
    """A model that is written for one draw, as one that takes batch dims left of its plates.

    It is the model itself where no site has a value with batch dims. Once `torch.vmap` has failed, tensors that the
    model makes are made for each draw, as it may write into them (`x = torch.zeros(3)`, `x[t] = z`). It raises what
    `torch.vmap` does where that cannot run the model either (an `if` on a value, `float(z)`, random numbers of no
    site), and NotImplementedError at a distribution that does not say what it was made with, and where a loss is
    compiled, which `torch.jit.trace` does without vmap.

    Args:
        model: a Pyro model.
        nesting: its plate dims.

    Example:
        >>> import pyro.distributions as dist
        >>> def model():
        ...     w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ...     pyro.sample("x", dist.Normal(torch.eye(2) @ w, 1.0).to_event(1))
        >>> w = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
        >>> Runner({"w": w}).run(Vectorized(model, 0), (), {})["x"]["fn"].mean
        tensor([[0., 1.],
                [2., 3.],
                [4., 5.]])
    """

    def __init__(self, model: Callable, nesting: int) -> None:
        super().__init__()
        self.model, self.nesting = model, nesting
        self._writes = False  # whether it writes values of sites into tensors that it has made

    @property
    def __wrapped__(self) -> Callable:
        return self.model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model; what it returns is of use for one draw only."""
        batch = outer_sizes(self.nesting)
        while True:
            handlers = len(_PYRO_STACK)
            try:
                return self._run(batch, args, kwargs)
            except _Wider as wider:
                batch = wider.batch
            except RuntimeError as error:
                if not batch or self._writes or type(error) is not RuntimeError:
                    raise
                self._writes = True
            runners = [each for each in _PYRO_STACK[:handlers] if isinstance(each, Runner)]
            if runners:
                runners[-1].restart()  # others see nothing of this run

    def _run(self, batch: torch.Size, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not batch:
            with _Seen(batch, self.nesting):
                return self.model(*args, **kwargs)

        def one(index: Tensor) -> Tensor:
            crossing = _Crossing(batch, self.nesting, index, validates)
            with crossing, _Making(crossing) if self._writes else nullcontext():
                self.model(*args, **kwargs)
            return index

        if torch.jit.is_tracing():
            raise NotImplementedError(
                "Expected a loss that is not compiled (Trace_ELBO, say): the model is written for one draw, and mapped "
                "over draws by torch.vmap, which torch.jit.trace cannot. Or write it for many (`w @ X.mT` for "
                "`X @ w`, `alpha[..., index]`), or make a new guide whose first call is the compiled loss's."
            )
        validates = Distribution._validate_args  # which looks at values, as vmap cannot
        with pyro.validation_enabled(False):
            torch.func.vmap(one, randomness="error")(torch.arange(batch.numel()))
        return None


class _Wider(BaseException):
    """A value has other batch dims than those that the run is for."""

    def __init__(self, batch: torch.Size) -> None:
        super().__init__()
        self.batch = batch


class _Seen(Messenger):
    """Ends a run for some batch dims at a value that has more."""

    def __init__(self, batch: torch.Size, nesting: int) -> None:
        super().__init__()
        self.batch, self.nesting = batch, nesting

    def _postprocess_message(self, msg: Any) -> None:
        value = msg["value"]
        if msg["type"] != "sample" or site_is_subsample(msg) or not isinstance(value, Tensor):
            return
        batch = value.shape[: max(0, value.dim() - msg["fn"].event_dim - self.nesting)]
        wider = torch.broadcast_shapes(batch, self.batch)
        if wider != self.batch:
            raise _Wider(wider)


class _Crossing(_Seen):
    """Takes each site out of a run under `torch.vmap`, to the handlers outside, and brings its value back."""

    def __init__(self, batch: torch.Size, nesting: int, index: Tensor, validates: bool) -> None:
        super().__init__(batch, nesting)
        self.index, self.validates = index, validates

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg):
            msg["scale"], msg["mask"] = 1.0, None  # which say nothing of it, and may belong inside
            return
        fn = msg["fn"]
        parts = Parts(len(self.batch))
        nesting = self.nesting
        make = parts.distribution(fn, nesting)
        others = {key: parts.tensor(msg[key], nesting) for key in ("mask", "scale")}
        others["value"] = parts.tensor(msg["value"], nesting + fn.event_dim)

        def outside(given: Sequence[Tensor]) -> Tensor:
            with pyro.validation_enabled(self.validates), _outer_handlers(self):
                site: Any = {**msg, "infer": dict(msg["infer"]), "fn": make(given)}
                site.update((key, other(given)) for key, other in others.items())
                kept = site["value"]
                apply_stack(site)
            _Seen._postprocess_message(self, site)
            value = site["value"]
            own = fn.batch_shape + value.shape[value.dim() - fn.event_dim :]
            # to what is given plates add nothing
            own = msg["value"].shape if value is kept else own
            idle = (1,) * (nesting + fn.event_dim - len(own))
            return value.expand(self.batch + idle + own).reshape(self.batch.numel(), *own)

        msg["value"] = _Outside.apply(outside, self.batch, self.index, *parts.tensors)
        msg["done"] = msg["stop"] = True

    def _postprocess_message(self, msg: Any) -> None:
        pass


@contextmanager
def _outer_handlers(handler: Messenger) -> Iterator[None]:
    """Leaves the handlers around one alone."""
    place = _PYRO_STACK.index(handler)
    inner = _PYRO_STACK[place:]
    del _PYRO_STACK[place:]
    try:
        yield
    finally:
        _PYRO_STACK[place:] = inner


class _Making(TorchFunctionMode):
    """Gives each draw tensors of its own, to write into, where those that a model makes are the same for all."""

    def __init__(self, crossing: _Crossing) -> None:
        super().__init__()
        self._crossing = crossing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        # then it is outside
        if getattr(func, "__name__", "") not in _MAKERS or self._crossing not in _PYRO_STACK:
            return value
        return torch.where(self._crossing.index >= 0, value, value)


class _Outside(torch.autograd.Function):
    """Calls a function, under `torch.vmap`, with the tensors of all draws, ``(*batch, *own)``."""

    generate_vmap_rule = False

    @staticmethod
    def forward(*args: Any) -> Tensor:
        raise AssertionError  # not without vmap

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, function: Callable, batch: torch.Size, *tensors: Tensor
    ) -> tuple[Tensor, int]:
        """Runs at the level below that of vmap, where gradients are recorded as anywhere."""
        given: list[tuple[Tensor, bool]] = []  # each with whether it is another one for each draw
        for part, dim in zip(tensors[1:], in_dims[3:]):
            given.append(
                (part, False) if dim is None else (part.movedim(dim, 0).unflatten(0, batch), True)
            )
        return function(given), 0
