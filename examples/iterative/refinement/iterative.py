"""`AutoIterativeGuide`: a guide whose estimates for the instances of a call are refined by learned steps.

`updates` holds the networks that take a step, and what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_nami.guide.call import Call
from pyro_nami.guide.known_parameters import check_store
from pyro_nami.guide.nami import AutoNaMIGuide
from pyro_nami.messages import warn
from pyro_nami.networks.running import tempered
from pyro_nami.parameters.inverse_network import as_pyro_module
from pyro_nami.program.isolation import forked_rng
from pyro_nami.program.plate_dims import frames_of, own_dims
from refinement.estimates import errors, log_weights, run_at
from refinement.updates import (
    ENCODINGS,
    INPUTS,
    Refined,
    Refinement,
    Updater,
    encoded,
)

__all__ = ["AutoIterativeGuide", "Trajectory"]


class Trajectory(NamedTuple):
    """The estimates of one call, and the networks' inputs at each estimate.

    Attributes:
        call: its data.
        estimates: refinements, from zero on; one more than there are steps.
        codes: for each step, the encoded gradients or errors at the estimate, a tensor for each part.
        parts: the refined factors, by group.
        data: the networks' features of the data, for each part; empty where they read none.
    """

    call: Call
    estimates: list[Refinement]
    codes: list[list[Tensor]]
    parts: Sequence[Refined]
    data: Sequence[Tensor]


class AutoIterativeGuide(AutoGuide):
    """Iterative amortized inference: an amortized guide, and learned steps that refine what it gives for an instance.

    In each call the ``guide`` gives a first estimate of q for every instance of the data. Each step then draws from the
    current q, runs the model, takes the gradient of the ELBO with respect to the parameters of that instance's q, and a
    network, shared by all instances and steps, reads gradient, estimate and data and says what the next estimate is.
    What is refined are the parameters of the guide's factors, whatever inverse it has: of single latents, of the
    elements of masked autoregressive ones, and of bounds. Gradients of training do not flow through these gradients.

    Use it as any guide of Pyro's. With `IterativeELBO` all steps are trained, not only the last.

    Args:
        guide: an `AutoNaMIGuide`, made with ``mode="amortized"`` or ``observed=`` or not called yet; trained with
            this one.
        steps: learned steps in a call. With 0 it is ``guide``.
        encode: ``"gradients"``, or ``"errors"``: for latent Gaussian models, (x - mean) / variance of each site.
        samples: draws of a step's gradient.
        inputs: what is read besides: ``"data"``, ``"estimate"``, both, or none.
        hidden_features: widths of the networks that refine.
        global_latents: whether latents that are in no plate are refined as well.
        temperature: of relaxed draws of binary and one-hot latents in steps; None leaves these unrefined.

    Raises:
        ValueError: for options that are none, or a guide that was trained on one data set.

    References:
        Marino, Yue and Mandt 2018, Iterative Amortized Inference.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_nami import AutoNaMIGuide
        >>> def model(x):
        ...     with pyro.plate("n", len(x)):
        ...         z = pyro.sample("z", dist.LogNormal(0.0, 1.0))
        ...         pyro.sample("x", dist.Normal(z, 0.1), obs=x)
        >>> guide = AutoIterativeGuide(AutoNaMIGuide(model, exact=False), steps=2)
        >>> guide(torch.rand(3))["z"].shape, guide.non_finite
        (torch.Size([3]), 0)
    """

    def __init__(
        self,
        guide: AutoNaMIGuide,
        *,
        steps: int = 5,
        encode: str = "gradients",
        samples: int = 1,
        inputs: Sequence[str] = INPUTS,
        hidden_features: Sequence[int] = (128, 128),
        global_latents: bool = False,
        temperature: float | None = None,
    ) -> None:
        super().__init__(guide.model)
        if encode not in ENCODINGS:
            raise ValueError(
                f"Expected encode to be one of {', '.join(map(repr, ENCODINGS))}; got {encode!r}."
            )
        if not set(inputs) <= set(INPUTS):
            raise ValueError(
                f"Expected inputs among {', '.join(map(repr, INPUTS))}; got {tuple(inputs)}."
            )
        if steps < 0 or samples < 1:
            raise ValueError(
                f"Expected steps of at least 0 and samples of at least 1; got {steps} and {samples}."
            )
        guide.serve_any_data()
        self.guide = guide
        guide.master = None  # it has plates of its own
        self.steps = steps
        self.encode = encode
        self.samples = samples
        self.inputs, self.hidden_features = frozenset(inputs), tuple(hidden_features)
        self.global_latents, self.temperature = global_latents, temperature
        # instances and steps whose gradient was not finite, so that they kept their estimate
        self.non_finite = 0
        self.updaters: Any = as_pyro_module(nn.ModuleList())
        self._held: tuple[Call, Refinement] | None = None
        self._told: set[Hashable] = set()

    @property
    def model(self) -> Callable:
        """The model of the guide that is refined."""
        return self.guide.model

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "master": None, "_model": (None,), "_held": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.guide.master = None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state, before the first call as well."""
        inner, own = _under("guide.", state_dict), _under("updaters.", state_dict)
        for i in range(len(self.updaters), len({key.split(".")[0] for key in own})):
            self.updaters.append(as_pyro_module(Updater.of_state(_under(f"{i}.", own))))
        self.guide.load_state_dict(inner, strict, assign)
        return self.updaters.load_state_dict(own, strict, assign)

    # ---- as a guide

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Samples every latent by the estimate after all steps, given the model's arguments."""
        if self._held is not None:
            return self.guide._drawn(*self._held)
        trajectory = self.trajectory(*args, **kwargs)
        return self.guide._drawn(trajectory.call, trajectory.estimates[-1])

    def trajectory(self, *args: Any, steps: int | None = None, **kwargs: Any) -> Trajectory:
        """Returns the estimates of all steps for a call.

        Beyond those that were trained, steps are a half, a third, ... of what the networks say: these have not learned
        to stay where they are, and the noise of gradients averages out.

        Args:
            *args, **kwargs: of the model.
            steps: how many, by default `steps`.
        """
        call = self.guide._begin(args, kwargs)
        parts = self._parts(call)
        found = Trajectory(call, [self._zero(parts)], [], parts, self._data(call, parts))
        for step in range(self.steps if steps is None else steps):
            found.codes.append(self._codes(found))
            estimate = found.estimates[step]
            following = self.advance(found, step, estimate)
            gain = 1 / max(1, step - self.steps + 2)
            if gain < 1:
                for name, value in following.items():
                    following[name] = torch.lerp(estimate[name], value, gain)
            found.estimates.append(following)
        return found

    def advance(self, trajectory: Trajectory, step: int, estimate: Refinement) -> Refinement:
        """Returns the estimate after a step, from the estimate before it and the codes of the step."""
        following: Refinement = {}
        for i, (part, code) in enumerate(zip(trajectory.parts, trajectory.codes[step])):
            joined, finite = part.joined(estimate), code.isfinite().all(-1, keepdim=True)
            read = [code.where(finite, 0.0)]
            if "estimate" in self.inputs:
                read.append(tempered(joined))
            read += trajectory.data[i : i + 1]
            updated = self._updater(i, torch.cat(read, -1), joined)
            following |= part.split(updated.where(finite, joined))
        return following

    @contextmanager
    def holding(self, call: Call, estimate: Refinement) -> Iterator[AutoIterativeGuide]:
        """Has the guide draw by an estimate that is given, whatever the arguments; for a trajectory's call."""
        before, self._held = self._held, (call, estimate)
        try:
            yield self
        finally:
            self._held = before

    @torch.no_grad()
    def refine(self, *args: Any, steps: int, num_particles: int = 100, **kwargs: Any) -> Tensor:
        """Returns the ELBO in nats after each step, ``(steps + 1,)``, of any number of steps, from 0 on.

        Args:
            *args, **kwargs: of the model.
            steps: learned steps, more than those of training as well.
            num_particles: draws by which each ELBO is estimated.
        """
        found = self.trajectory(*args, steps=steps, **kwargs)
        return torch.stack(
            [self.elbo(found.call, estimate, num_particles) for estimate in found.estimates]
        )

    # ---- a step

    def _zero(self, parts: Sequence[Refined]) -> Refinement:
        """Returns the estimate that refines nothing."""
        like = self.guide.network.like
        return {
            name: like.new_zeros(shape) for part in parts for name, shape in part.shapes().items()
        }

    def _data(self, call: Call, parts: Sequence[Refined]) -> list[Tensor]:
        """Returns the features of the data, ``(*plates, n)`` for each part."""
        if "data" not in self.inputs or not parts:
            return []
        state, none = self.guide._start(call), self.guide.network.like.new_zeros(0)
        found = []
        for part in parts:
            read = [each.expand(*part.plates, -1) for each in (none, *state.of_data(part.group))]
            found.append(torch.cat(read, -1))
        return found

    def _updater(self, index: int, inputs: Tensor, estimate: Tensor) -> Tensor:
        """Returns the next estimate by a group's network, which is made at the first step."""
        if index == len(self.updaters):
            made = Updater(inputs.shape[-1], estimate.shape[-1], self.hidden_features)
            self.updaters.append(as_pyro_module(made.to(inputs)))
            check_store(self)
        following: Tensor = self.updaters[index](inputs, estimate)
        return following

    def _parts(self, call: Call) -> list[Refined]:
        """Returns the refined factors, by group."""
        plan, network = self.guide._made(), self.guide.network
        with poutine.block(), own_dims(), forked_rng(), torch.no_grad():
            sites = call.run(call.held)
        sizes = {frame.name: frame.size for site in sites.values() for frame in frames_of(site)}
        found = []
        for group in network.groups:
            names = tuple(factor.name for factor in group.factors if self._is_refined(factor.name))
            batch = group.factors[0].batch
            if names and (batch or self.global_latents) and batch <= sizes.keys():
                plates = [1] * plan.plates.nesting
                for plate in batch:
                    plates[plan.plates.dims[plate]] = sizes[plate]
                found.append(Refined(group, names, tuple(plates)))
        return found

    def _is_refined(self, name: Hashable) -> bool:
        """Whether estimates of a factor are refined: gradients have to come through its draws."""
        rule = self.guide._made().rules.get(name) if isinstance(name, str) else None
        family = getattr(rule, "family", None)
        if family is None or family.has_rsample:
            return True
        indicator = family.layout.is_indicator
        if indicator and self.temperature is not None:
            return True
        if name not in self._told:
            self._told.add(name)
            how = " (`temperature=` refines it by relaxed draws)" if indicator else ""
            warn(
                f"Latent '{name}' is discrete, so what the guide gives for it is not refined{how}."
            )
        return False

    def _codes(self, trajectory: Trajectory) -> list[Tensor]:
        """Returns the encoded gradients or errors at the latest estimate, ``(*plates, n)`` for each part."""
        call, estimate, parts = trajectory.call, trajectory.estimates[-1], trajectory.parts
        if not parts:
            return []
        if self.encode == "errors":
            with torch.no_grad():
                run = run_at(self.guide, call, estimate, self.samples, self.temperature)
                found = [errors(run, part) for part in parts]
        else:
            gradient = self.gradient(call, estimate, self.samples)
            found = [part.joined(gradient) for part in parts]
        lost = sum(int((~each.isfinite().all(-1)).sum()) for each in found)
        if lost and not self.non_finite:
            warn(
                f"{self.encode} are not finite for {lost} instances, which keep their estimate; see guide.non_finite."
            )
        self.non_finite += lost
        return [encoded(each) for each in found]

    def log_weights(self, call: Call, estimate: Refinement, num_particles: int = 1) -> Tensor:
        """Returns log p(data, latents) - log q(latents) in nats at draws of q, ``(draws, instances)``.

        Args:
            call: its data, from `trajectory`.
            estimate: by which is drawn; it may carry gradients.
            num_particles: number of draws.

        Returns:
            Instances are those of the outermost plate that all latents are in, one if there is none; terms outside of
            it are shared out evenly.
        """
        return log_weights(run_at(self.guide, call, estimate, num_particles, self.temperature))

    def elbo(self, call: Call, estimate: Refinement, num_particles: int = 1) -> Tensor:
        """Returns the mean of `log_weights` over draws, summed over instances: the ELBO of a call in nats."""
        return self.log_weights(call, estimate, num_particles).sum() / num_particles

    def gradient(self, call: Call, estimate: Refinement, num_particles: int = 1) -> Refinement:
        """Returns the gradient of `elbo` by an estimate, without one of its own."""
        leaves = {name: value.detach().requires_grad_() for name, value in estimate.items()}
        with torch.enable_grad():
            elbo = self.elbo(call, leaves, num_particles)
            found = torch.autograd.grad(elbo, [*leaves.values()], materialize_grads=True)
        return dict(zip(leaves, found))


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the entries of a state below a prefix, without the prefix."""
    return {
        key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)
    }
