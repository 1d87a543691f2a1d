"""`AutoNaMIGuide`: a guide whose dependencies are a minimally faithful inverse of the model's.

This module is the contract with Pyro. At the first call `build.assemble` makes a `Plan` and the
networks. In every call `reader` finds the data, `draw` draws each latent by its rule in `rules`,
and `network_state` gives the parameters. `lifecycle` holds what happens between calls, `scoring`
the density of given values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.runtime import get_plates
from torch import Tensor, nn

from pyro_nami.graph.inverse import Inverse
from pyro_nami.graph.network import BayesNet
from pyro_nami.guide.ahead import DrawsAhead
from pyro_nami.guide.call import Call, TrainedAnswer
from pyro_nami.guide.draw import draw, draw_fresh, hand_out, is_predicting, start_pass
from pyro_nami.guide.mode import Mode
from pyro_nami.guide.options import Options
from pyro_nami.guide.plan import Plan
from pyro_nami.guide.rules import RuleNotes
from pyro_nami.guide.scoring import DensityGuide
from pyro_nami.messages import quoted, warn
from pyro_nami.parameters.inverse_network import as_pyro_module
from pyro_nami.program.isolation import on_ordinary_tensors, seed_rng, untouched
from pyro_nami.program.loops import family_of
from pyro_nami.program.many_draws import FEWEST_DRAWS, difference_at, extra_dims, for_many
from pyro_nami.program.memory import rows_in_memory
from pyro_nami.program.plate_dims import own_dims
from pyro_nami.program.runner import Message, Values
from pyro_nami.program.vectorized import Vectorized, unmapped

__all__ = ["AutoNaMIGuide"]

# Of Pyro's ELBOs and importance sampling, and of `Predictive`.
PLATES_OF_DRAWS = {"num_particles_vectorized", "_num_predictive_samples"}
MODES = {"auto": None, **{mode.value: mode for mode in Mode}}
# made by Pyro's metaclass, which type checkers do not follow
_ModuleDict: Any = pyro.nn.PyroModule[nn.ModuleDict]


class AutoNaMIGuide(DensityGuide):
    r"""A guide for any Pyro model: it derives the conditionals that the model gives, and learns the others.

    At its first call the guide runs the model, reads its Bayesian network off runs, and inverts that network with NaMI:
    the inverse can represent the posterior, and has no needless edge. A latent v is drawn from q(v | Pa(v)), where
    Pa(v) are its parents in the inverse, observed sites among them. This is v's own conditional where the model gives
    it; elsewhere it is a factor whose parameters masked autoregressive networks give, relative to the model's own
    conditional (the anchor). ``mode`` says whose data the guide answers for.

    It is used as Pyro's own guides are.

    Args:
        model: a Pyro model.
        inverse: ``"auto"`` (the direction with fewer edges), ``"forward"``, ``"reverse"``, ``"free"``,
            ``"stuhlmueller"``, ``"mean_field"``, ``"fully_connected"``, an `Inverse`, or a function of a `BayesNet`.
        blocks: an ordered partition of the latents; each block is eliminated before the next (sampled after it). An
            observed site named here is semi-observed: sampled in calls that do not observe it.
        observed: sites that the model samples where no data is given, but that inference will condition on.
        families: a family or its name for all latents, or a mapping from sites to these.
        hidden_features: widths of the hidden layers of every network; by default one of 64 units, and for latents in
            plates of more than 16,384 instances in SVI fewer, down to 8, as much as these are more.
        shared: one masked network for the latents in the same plates; otherwise a small one for every latent.
        skip: whether factors also read their inputs directly, so that linear-Gaussian conditionals are exact.
        within: ``"autoregressive"`` or ``"independent"``: how the elements of one site's vector depend on each other.
        embeddings: observed site -> module ``(batch, *event)`` to ``(batch, features)``; the guide trains a copy.
        pooling: how a set of instances is encoded: ``"mean"``, ``"attention"``, or a callable
            from a number of inputs to a module ``(..., inputs)`` to ``(..., features)``, which is averaged.
        evidence: whether each instance of a pooled plate adds precision to Normal, sinh-arcsinh and flow factors.
        exact: whether latents are drawn from their conditional where the model gives it in closed form
            (`pyro_nami.deriving.finder` derives it). Such latents have no weights. With ``inverse="auto"``, latents
            are ordered such that most of them have such a conditional. It needs ``anchor=True``.
        rules: latent -> how it is drawn. ``"learned"``: by networks, in place of its exact conditional. ``"exact"``:
            an error if there is no exact conditional. ``"located"``: about its posterior mode, also where weights of
            the model's own move the mode in each step. ``"bounded"``: from its conditional under a bound on the
            likelihood of its children (`pyro_nami.Bound`), with parameters that networks give, and corrected by
            networks unless the inverse is a mean field; the default for binary vectors under a linear bound.
            ``"bound"``: from its conditional under the tightest bound, without networks.
        mode: whose data the guide answers for. ``"fixed"``: the one data set that it is trained on, subsampled plates
            included; later calls have that posterior, whatever their arguments. ``"minibatches"``: one data set of
            which each training step has another part among its arguments. ``"amortized"``: the data of each call.
            ``"auto"``: fixed, until training steps turn out to be on minibatches.
        max_offsets: in a fixed guide each instance of a plate has parameters of its own (offsets, see
            `pyro_nami.parameters.free_parameters`), unless a latent has more instances than this.
        anchor: whether factors are relative to the model's own conditionals, where these are known when sampling.
        init_loc_fn: one of Pyro's initialization strategies, for the location at the first step. By default latents
            start near the origin of unconstrained space, or nearer to the median of their prior where the data are
            likelier there (not with ``observed``); a little aside, as symmetric models have no gradient in the middle.
        init_scale: scale at the first step, in unconstrained space; at most that of a known prior.
        create_plates: as in Pyro: a callable from the model's arguments to plates.
        activation: of all hidden layers; by default tanh, and silu in the encoders of sets.
        save_data: whether ``state_dict`` holds the data of training, so that a loaded guide needs none. By default it
            holds checksums, by which a loaded guide recognizes these data.

    Raises:
        ValueError, TypeError: for options out of range. Those that name sites are checked at the first call.

    References:
        Webb et al. 2018, "Faithful Inversion of Generative Models for Effective Amortized Inference".

    Example:
        >>> def model(x):
        ...     a, b = (pyro.sample(name, pyro.distributions.Normal(0.0, 1.0)) for name in "ab")
        ...     pyro.sample("x", pyro.distributions.Normal(a + b, 1.0), obs=x)
        >>> guide = AutoNaMIGuide(model)
        >>> svi = pyro.infer.SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.02}), pyro.infer.Trace_ELBO())
        >>> _ = svi.step(torch.tensor(1.0))
        >>> print(guide.inverse)  # the data couple a and b
        Inverse: latents 2, edges 3, levels 2
          a | x
          b | a, x
        Eliminated first, as the model gives their conditionals: b, a
    """

    def __init__(
        self,
        model: Callable,
        *,
        inverse: str | Inverse | Callable[[BayesNet], Inverse] = "auto",
        blocks: Sequence[Sequence[str]] | None = None,
        observed: Sequence[str] = (),
        families: Any = None,
        hidden_features: Sequence[int] | None = None,
        shared: bool = True,
        skip: bool = True,
        within: str = "autoregressive",
        embeddings: Mapping[str, nn.Module] | None = None,
        pooling: str | Callable[[int], nn.Module] = "mean",
        evidence: bool = True,
        anchor: bool = True,
        exact: bool = True,
        rules: Mapping[str, str] | None = None,
        mode: str = "auto",
        max_offsets: int = 100_000,
        init_loc_fn: Callable | None = None,
        init_scale: float = 0.1,
        create_plates: Callable | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
        save_data: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in Options._fields}
        super().__init__(model, create_plates=create_plates)
        embeddings = {
            site: as_pyro_module(copy.deepcopy(module))
            for site, module in (embeddings or {}).items()
        }
        if embeddings:  # A module's name has no dots; a site's may have some.
            self.embeddings = _ModuleDict(
                {site.replace(".", "/"): module for site, module in embeddings.items()}
            )
        if mode not in MODES:
            raise ValueError(f"Expected mode to be one of {quoted(MODES)}; got {mode!r}.")
        given.update(
            embeddings=embeddings,
            hidden_features=None if hidden_features is None else tuple(hidden_features),
            mode=Mode.AMORTIZED if observed else MODES[mode],
            observed=(observed,) if isinstance(observed, str) else tuple(observed),
            rules=dict(rules or {}),
        )
        self._options = Options(**given)
        self._options.check()
        self._plan = self._reader = None  # type: ignore[assignment]
        self._waiting_state = None
        self._ahead = DrawsAhead()
        # the plan, and by which many draws are made at once
        self._many: tuple[Plan, Plan | None] | None = None

    # ---- what was found

    @property
    def bayesnet(self) -> BayesNet:
        """The model's Bayesian network, as found at the first call."""
        return self._made().bayesnet

    @property
    def observed(self) -> tuple[str, ...]:
        """The sites that the model samples where no data is given, but that the guide conditions on."""
        return self._options.observed

    @property
    def inverse(self) -> Inverse:
        """The inverse that the guide is built on."""
        return self._made().inverse

    @property
    def conjugate(self) -> tuple[str, ...]:
        """The latents that are drawn from their exact conditional."""
        plan = self._made()
        return tuple(name for name in plan.groups if plan.note(name).rule == "exact")

    @property
    def rules(self) -> RuleNotes:
        """How each latent is drawn, what it reads, and why it is not drawn from an exact conditional.

        Example:
            >>> import pyro, torch, pyro.distributions as dist
            >>> def model(y):
            ...     sd = pyro.sample("sd", dist.HalfCauchy(1.0))
            ...     pyro.sample("y", dist.Normal(pyro.sample("mu", dist.Normal(0.0, 1.0)), sd), obs=y)
            >>> guide = AutoNaMIGuide(model)
            >>> _ = guide(torch.tensor(1.0))
            >>> guide.rules
            sd: quadrature, reads y; not exact: no closed form is known for a prior of type HalfCauchy
            mu: exact, reads sd, y
        """
        plan = self._made()
        return RuleNotes({name: plan.note(name) for name in plan.rules})

    @property
    def model_learns(self) -> bool:
        """Whether the model has parameters of its own."""
        return self._made().learns

    @property
    def mode(self) -> str:
        """Whose data the guide answers for: ``"fixed"``, ``"minibatches"`` or ``"amortized"``; see the option."""
        if self._plan is None:
            return (self._options.mode or Mode.FIXED).value
        self._settle()
        return self._reader.memory.mode.value

    @property
    def grid_points(self) -> int:
        """The largest number of points at which a draw runs the model at once."""
        return self._made().grid_points

    @property
    def num_parameters(self) -> int:
        """Number of weights that the guide computes with: masked ones and padding do not count."""
        self._made()
        embeddings = self._options.embeddings.values()
        return self.network.num_parameters + sum(
            p.numel() for module in embeddings for p in module.parameters()
        )

    def extra_repr(self) -> str:
        if self._plan is None:
            return "not called yet"
        exact = "".join(f", '{name}' by its exact conditional" for name in self.conjugate)
        return f"{self.mode}; {len(self._plan.rules)} latents{exact}; {self.num_parameters} weights"

    # ---- one call

    @on_ordinary_tensors
    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Samples every latent of the guide, given the model's arguments.

        Args:
            *args, **kwargs: as the model takes them. ``observations={site: value}`` gives values of observed sites
                directly, and reaches the model only if its signature has it.

        Returns:
            Latent -> value, in model order.
        """
        call = self._begin(args, kwargs)
        self._check_draws_at_once(call)
        is_ahead = call.target.call is not None and not call.indices and is_predicting()
        found = self._drawn_ahead(call) if is_ahead else None
        return self._drawn(call) if found is None else found

    def _check_draws_at_once(self, call: Call) -> None:
        """Warns, once, of a model that is written for one draw where Pyro runs it for many at once."""
        around = {frame.name for frame in get_plates()}
        if around.isdisjoint(PLATES_OF_DRAWS) or torch.jit.is_tracing():
            return
        if not self.network.tells("draws at once"):
            return
        nesting, model = self._made().plates.nesting, unmapped(call.program.model)
        with torch.no_grad(), untouched(self.model), poutine.block(), own_dims():
            few = self._few_draws(call)
            flaw = extra_dims(few, nesting, call.program._replace(model=model))
        if flaw:
            warn(
                f"The model is written for one draw, and Pyro runs it for many at once: {flaw} Data count once for "
                "each draw there, and the posterior is wrong with any guide. Leave out vectorize_particles=True, or "
                "parallel=True; or let the model take latents with a dim of draws to the left of its plates."
            )

    def _drawn_ahead(self, call: Call) -> dict[str, Tensor] | None:
        """Returns the next of the draws made in advance; None if the model cannot be run for many draws."""
        plan = self._made()
        with untouched(self.model), poutine.block():
            if self._plan_for_many(call) is None:
                return None

        program = call.program
        make = partial(self._draws, args=program.args, kwargs=dict(program.kwargs))
        values = self._ahead.next((self.network.passes, id(call.values)), make)
        loops = program.loops
        found, fresh = hand_out(plan, call, loops.joined(values)), dict[str, Tensor]()
        if call.target.fresh:
            current = start_pass(plan, self._start(call), call)
            own = {name: v.clone() if v.is_inference() else v for name, v in found.items()}
            current.values.update(loops.joined(own))
            fresh = draw_fresh(current)
        return self._in_order(call, found, fresh)

    def _in_order(self, call: Call, found: Values, fresh: Values) -> dict[str, Tensor]:
        """Returns draws in the model's order, those of latents that training lacked last."""
        shown = call.program.loops.names_of(self._plan.rules)
        found = {**found, **fresh}
        return {name: found[name] for name in (*shown, *fresh) if name in found}

    def _drawn(
        self, call: Call, refinement: Mapping[Hashable, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Returns one draw of every latent of a call; ``refinement`` is added to the parameters of its instances."""
        learning = self.training and torch.is_grad_enabled()
        state = self._start(call, learning=learning, refinement=refinement)
        current = start_pass(self._plan, state, call)
        try:
            with self.network.with_gradient():
                draw(current)
                fresh = draw_fresh(current)
        finally:  # the model may fail at NaN, too, but cannot say where it came from
            current.check()
        return self._in_order(call, current.outside.values, fresh)

    # ---- summaries

    @torch.no_grad()
    def quantiles(
        self,
        quantiles: Sequence[float],
        *args: Any,
        num_samples: int = 1000,
        **kwargs: Any,
    ) -> Values:
        """Returns Monte Carlo quantiles of every latent, elementwise in constrained space.

        The same draws serve every call, so `median` equals the quantile 0.5.

        Args:
            quantiles: numbers between 0 and 1.
            *args, **kwargs: the model's arguments.
            num_samples: number of draws. The standard errors of 1,000 are 4% of a standard deviation.

        Returns:
            Latent -> tensor ``(quantiles, *site shape)``.
        """
        draws = self._draws(num_samples, 0, args, kwargs)
        return {name: _quantiles_of(value, quantiles) for name, value in draws.items()}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns the Monte Carlo median of every latent, elementwise in constrained space; see `quantiles`."""
        return {name: value[0] for name, value in self.quantiles([0.5], *args, **kwargs).items()}

    def _draws(
        self, count: int, seed: int, args: tuple, kwargs: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Returns draws of every latent, ``(count, *site shape)``, from a seed of their own.

        Where the model is written for one draw, it is mapped over them, or run for one after another.
        """
        if self._plan is None:
            with poutine.block():
                self(*args, **kwargs)
        plan = self._made()
        with untouched(self.model), poutine.block(), poutine.mask(mask=True):
            call = self._begin(args, kwargs)
            sites = self._sites_of(call)
            at_once = self._plan_for_many(call)
            self._plan = at_once or plan
            seed_rng(seed)
            rows = sum(value.numel() for value in call.values.values())
            passes = torch.arange(count).split(rows_in_memory(rows) if at_once else 1)
            runs = []
            try:
                for size in map(len, passes):
                    with (
                        pyro.plate("_draws", size, dim=-1 - plan.plates.nesting)
                        if at_once
                        else nullcontext()
                    ):
                        run = self(*args, **kwargs)
                    own = {
                        name: _own_shape(value if at_once else value[None], size, sites[name])
                        for name, value in run.items()
                        if name in sites
                    }
                    runs.append(own)
            finally:
                self._plan = plan
        return {name: torch.cat([run[name] for run in runs]) for name in runs[0]}

    def _sites_of(self, call: Call) -> Mapping[str, Message]:
        """Returns the sites of the first call, and for each state of a call's loops one of its kind."""
        sites = self.prototype_trace.nodes
        kind = {family_of(name): site for name, site in sites.items()}
        states = [held for held in call.program.loops.states.values() if held.families]
        more = {name: kind[family_of(name)] for held in states for name in held.sites}
        return {**more, **sites}

    def _few_draws(self, call: Call) -> list[dict[str, Any]]:
        """Returns three draws of all latents."""
        seed_rng(0)
        own, loops = call._replace(target=TrainedAnswer()), call.program.loops
        return [{**call.held, **loops.joined(self._drawn(own))} for _ in range(FEWEST_DRAWS)]

    def _plan_for_many(self, call: Call) -> Plan | None:
        """Returns the plan for many draws at once, with a mapped model if need be; None if draws are one by one."""
        plan = self._made()
        if plan.plates.subsampled:  # whose instances are others in each run
            return plan
        if self._many is None or self._many[0] is not plan:
            few = self._few_draws(call)
            model = plan.for_many(unmapped(call.program.model))
            program, nesting = call.program._replace(model=model), plan.plates.nesting
            found, reason = for_many(program, nesting, partial(difference_at, few, nesting))
            is_mapped = isinstance(found.model, Vectorized)
            mapped = plan.program._replace(vectorized=is_mapped)
            many = plan if mapped == plan.program else replace(plan, program=mapped)
            self._many = plan, many if reason is None else None
        return self._many[1]


def _own_shape(value: Tensor, count: int, site: Message) -> Tensor:
    """Returns draws ``(count, *site shape)`` from values with the draws left of all plate dims."""
    event_dim = site["fn"].event_dim
    nesting = max((-frame.dim for frame in site["cond_indep_stack"] if frame.vectorized), default=0)
    cut = value.dim() - event_dim - nesting
    return value.expand((count,) + value.shape[1:]).reshape((count,) + value.shape[cut:])


def _quantiles_of(value: Tensor, quantiles: Sequence[float]) -> Tensor:
    ordered = value.sort(0).values
    last = len(ordered) - 1
    return torch.stack([ordered[min(last, max(0, math.floor(q * last + 0.5)))] for q in quantiles])
