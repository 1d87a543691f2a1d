"""`Posterior`: draws of a posterior with weights, and what users ask of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro.poutine.util import site_is_factor
from torch import Tensor

from pyro_nami.fit.at_draws import AtDraws
from pyro_nami.fit.conditional import conditional_draws
from pyro_nami.fit.mode import highest
from pyro_nami.fit.of_guide import GuideDensity
from pyro_nami.fit.pairs import draw_pairs
from pyro_nami.fit.verdict import Verdict, of_weights
from pyro_nami.inference.loop_names import draws_of
from pyro_nami.inference.simulator_model import SimulatorModel
from pyro_nami.inference.site_messages import whole
from pyro_nami.inference.target import Extent, Target, log_densities, summed
from pyro_nami.inference.weighted_samples import Pool, WeightedSamples
from pyro_nami.messages import quoted, warn
from pyro_nami.program.isolation import forked_rng, seed_rng
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner
from pyro_nami.program.series_sites import SeriesSites
from pyro_nami.program.vectorized import unmapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Posterior", "derivation", "learned"]

DERIVED = {"exact", "quadrature", "prior"}  # rules of conditionals in closed form, or on a grid


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(WeightedSamples, Mapping[str, Tensor]):
    """The posterior of a model given data: weighted draws, and a verdict on them.

    `fit` and `amortize` return it. Draws from the guide have importance weights; as a mapping, it holds draws of equal
    weight: `posterior["site"]`, `dict(posterior)`. Estimates and their errors are those of `WeightedSamples`.

    Args:
        samples, log_weights, plates, pool: as for `WeightedSamples`.
        target: the model, its arguments, the data and the guide; None where a posterior was loaded without a model.
        judged: the verdict on draws whose weights alone do not tell; by default that of the weights.
        innovations: of a loaded posterior: latent -> the series that it drives. That of a guide is the guide's.
    """

    target: Target | None = field(default=None)
    judged: Verdict | None = None
    innovations: Mapping[str, SeriesSites] = field(default_factory=dict)

    @classmethod
    def of(
        cls, drawn: WeightedSamples, target: Target | None, judged: Verdict | None = None
    ) -> Posterior:
        """Returns the posterior of weighted draws."""
        return cls(drawn.samples, drawn.log_weights, drawn.plates, drawn.pool, target, judged)

    # ---- draws

    @cached_property
    def draws(self) -> dict[str, Tensor]:
        """Draws of equal weight, site -> ``(num_samples, *data sets, *site shape)``, the same at each access."""
        if bool((self.log_weights == self.log_weights[:1]).all()):
            return dict(self.samples)
        with forked_rng():
            seed_rng(0)
            return self.resample(self.num_samples)

    def __getitem__(self, site: str) -> Tensor:
        """Returns the draws of a site, ``(num_samples, *data sets, *site shape)``.

        The name of a loop gives those of its sites, ``(num_samples, *data sets, steps, *site shape)``.
        """
        if site not in self.samples and site not in self._sites:
            raise KeyError(f"Expected one of the sites {quoted(self._sites)}; got {site!r}.")
        return draws_of(self.draws, self._sites.get(site, ()), site, self.log_weights.dim())

    def __iter__(self) -> Iterator[str]:
        return iter(self.samples)

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, num: int = 1) -> dict[str, Tensor]:
        """Returns draws of equal weight, ``(num, *data sets, *site shape)``, by resampling those that are held."""
        return self.resample(num)

    @property
    def guide(self) -> Any:
        """The guide that made the draws, which answers for these data; None for a posterior that was loaded."""
        return self._target.guide

    @cached_property
    def verdict(self) -> Verdict:  # type: ignore[override]
        """Whether the draws can be trusted, with what error, and why: see `Verdict`."""
        if self.judged is not None:
            return self.judged
        remedy = "Ask for more draws, or train the guide for longer."
        return of_weights(self, "" if self.target is None else derivation(self.guide), remedy)

    # ---- densities

    def log_prob(self, values: Mapping[str, Any]) -> Tensor:
        """Returns the posterior's log density at values of all latents, ``(*batch)``, in nats.

        It is the model's joint log density less `log_evidence`, and NaN where that is not known, as after chains. Under
        improper priors both lack the same constant. Where data have no density, it is the guide's, within the prior.
        Outside of the latents' supports it is minus infinity.

        Args:
            values: latent -> ``(*batch, *site shape)``, with at most one batch dim.

        Raises:
            ValueError: a latent without a value, or with one of another shape.
        """
        missing = sorted(self.samples.keys() - values.keys())
        if missing:
            raise ValueError(f"Expected values of all latents; got none of {quoted(missing)}.")
        known = self._of_one_data_set()
        shapes = {name: value.shape[1:] for name, value in known.items()}
        given = {name: torch.as_tensor(values[name]).to(known[name]) for name in known}
        first, shape = next(iter(shapes.items()))
        batch = given[first].shape[: given[first].dim() - len(shape)]
        if any(given[name].shape != batch + shape for name, shape in shapes.items()):
            got = {name: tuple(value.shape) for name, value in given.items()}
            raise ValueError(
                f"Expected values of shapes (*batch, *site shape), of one batch; got {got}."
            )
        flat = {name: value.reshape(-1, *shapes[name]) for name, value in given.items()}
        found = self._log_density(flat)
        shift = 0.0 if self._has_no_density else self.log_evidence
        return (found - shift).reshape(batch)

    @cached_property
    def map(self) -> dict[str, Tensor]:
        """Latent -> its value at the mode, by a search from the likeliest draw; that draw if some are discrete.

        Warns:
            UserWarning: no mode was found, as where the density of a group's scale rises without bound.
        """
        known = self._of_one_data_set()
        heights = self._log_density(known)
        draw = {name: value[int(heights.argmax())] for name, value in known.items()}
        try:
            if self._has_no_density:
                return GuideDensity.of(self._target, known).mode(draw)
            return highest(replace(self._target, guide=None), draw)
        except NotImplementedError:
            return draw

    def conditional(self, values: Mapping[str, Any], num: int = 1000) -> Posterior:
        """Returns the posterior given also the values of some latents, or of some of their numbers.

        Draws come from walkers that follow `log_prob`; the verdict says whether they agree.

        Args:
            values: latent -> value of its shape, with NaN for numbers that are not given; a latent that is not among
                them is not given.
            num: of draws.

        Returns:
            Draws of all latents, those given at their values.

        Raises:
            ValueError: an unknown latent, a value of another shape or outside of the support; nothing left to draw.
            NotImplementedError: discrete latents that are not given.

        Example:
            >>> import pyro.distributions as dist
            >>> samples = {"z": torch.zeros(8, 2)}
            >>> model = lambda: pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            >>> posterior = Posterior(samples, torch.zeros(8), target=Target(Program(model, (), {}), None))
            >>> posterior.conditional({"z": torch.tensor([0.3, torch.nan])})["z"][:, 0].unique()
            tensor([0.3000])
        """
        density = self._log_density_of(self._of_one_data_set())
        drawn, verdict = conditional_draws(density, self._of_one_data_set(), values, num)
        return Posterior.of(replace(drawn, plates=self.plates), None, verdict)

    def marginal(self, *sites: str) -> WeightedSamples:
        """Returns the weighted draws of some latents alone; the name of a loop stands for all of its sites.

        Raises:
            ValueError: no latent, or an unknown one.
        """
        unknown = [name for name in sites if name not in self.samples and name not in self._sites]
        if unknown or not sites:
            raise ValueError(
                f"Expected some of the latents {quoted(self.samples)}; got {quoted(unknown) or 'none'}."
            )
        names = [each for name in sites for each in self._sites.get(name, [name])]
        samples = {name: self.samples[name] for name in names}
        return WeightedSamples(samples, self.log_weights, self.plates, self.pool)

    def predict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns what the model gives at the draws and at other arguments: data, and values of `pyro.deterministic`.

        Latents have the posterior's draws. A latent of another shape, as in a plate of another size, is drawn anew as a
        whole from the model's own conditional given the other latents, and a warning names it. Innovations that the
        model sums up over the steps of a series (``e.cumsum(-1)``) keep their draws; those of further steps are drawn
        from the model.

        Args:
            *args, **kwargs: of the model; without data, these are predicted.

        Returns:
            Site -> ``(num_samples, *site shape)``.
        """
        target = Target(Program(unmapped(self._target.program.model), args, kwargs), None)
        known = self._of_one_data_set()

        def fits(site: Any) -> bool:
            value = known.get(site["name"])
            return value is not None and site["fn"].shape() == value.shape[1:]

        def choose(site: Any) -> Tensor | None:
            return known[site["name"]][0] if fits(site) else None

        with torch.no_grad():
            now = target.run_model(target.one(), Runner({}, choose=choose))
        held = {name: known[name] for name, site in now.items() if fits(site)}
        series = self._series
        others = [name for name in known if name in now and name not in held]
        fresh = [name for name in others if name not in series]
        if fresh:
            warn(
                f"The posterior has no draws of {quoted(fresh)} for the instances of these arguments: all of them are "
                "drawn from the model's own conditional given the other latents. To keep the known instances beside "
                "new ones, fit the model at the larger size, and give data to the known ones alone."
            )

        def read(sites: Mapping[str, Any], extent: Extent) -> dict[str, Tensor]:
            found = {}
            for name, site in sites.items():
                if name not in held and not site_is_factor(site):
                    found[name] = whole(site).reshape(extent.sizes + now[name]["fn"].shape())
            return found

        found = AtDraws.of(target, held).read(held, read)
        further = {
            name: series[name].continued(known[name], found[name])
            for name in others
            if name in series
        }
        if not further:
            return found
        held |= further
        return further | AtDraws.of(target, held).read(held, read)

    # ---- for the reader

    def __repr__(self) -> str:
        return super().__repr__().replace("WeightedSamples", "Posterior", 1)

    def plot(self, sites: Sequence[str] | None = None, num: int = 6) -> Figure:
        """Returns a matplotlib figure of the marginals of some numbers, and of each pair of them.

        Args:
            sites: latents to show; all by default.
            num: of numbers, at most: the first of each latent, then the second, and so on.

        Raises:
            ImportError: matplotlib is not installed.
        """
        columns = []
        for name in self._sites if sites is None else sites:
            value = self[name]
            flat = value.reshape(len(value), -1)[:, :num].double().cpu().numpy()
            labels = self._labels(name, value.shape[1:], num)
            columns += [(i, label, flat[:, i]) for i, label in enumerate(labels)]
        columns.sort(key=operator.itemgetter(0))
        return draw_pairs({label: drawn for _, label, drawn in columns[:num]}, str(self.verdict))

    # ---- files

    def save(self, path: str | Path) -> None:
        """Writes the draws, their weights and the verdict to a file that `load` reads."""
        held = {
            "samples": dict(self.samples),
            "log_weights": self.log_weights,
            "plates": {name: list(names) for name, names in self.plates.items()},
            "pool": None if self.pool is None else tuple(self.pool),
            "verdict": self.verdict.__getnewargs__(),
            "series": {name: held.to_numbers() for name, held in self._series.items()},
        }
        torch.save(held, path)

    @classmethod
    def load(
        cls, path: str | Path, model: Callable | None = None, *args: Any, **kwargs: Any
    ) -> Posterior:
        """Reads a posterior from a file.

        Args:
            path: of the file.
            model: as `fit` was given it, for `predict`; without it there are draws and their summaries alone.
            *args, **kwargs: as `fit` was given them, the data among them, for `log_prob`, `map` and `conditional`.
        """
        held = torch.load(path, weights_only=True)
        pool = None if held["pool"] is None else Pool(*held["pool"])
        target = None if model is None else Target(Program(model, args, kwargs), None)
        verdict = Verdict(*held["verdict"])
        numbers = held.get("series", {})  # which files of earlier versions lack
        series = {name: SeriesSites.from_numbers(name, *each) for name, each in numbers.items()}
        return cls(
            held["samples"], held["log_weights"], held["plates"], pool, target, verdict, series
        )

    # ---- what is held

    @property
    def _series(self) -> Mapping[str, SeriesSites]:
        guide = None if self.target is None else self.target.guide
        return self.innovations if guide is None else getattr(guide, "series", {})

    @property
    def _has_no_density(self) -> bool:
        """Whether the data have none, so that the guide's stands for that of the posterior."""
        return isinstance(unmapped(self._target.program.model), SimulatorModel)

    def _log_density(self, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the log density at values ``(num, *site shape)``, in nats, less no evidence."""
        return self._log_density_of(self._of_one_data_set())(values)

    def _log_density_of(
        self, known: Mapping[str, Tensor]
    ) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """Returns the function of `_log_density`; runs of the model at draws find out how it is run for many."""
        if self._has_no_density:
            of_guide = GuideDensity.of(self._target, known)
            return torch.no_grad()(of_guide.log_prob)
        model = AtDraws.of(replace(self._target, guide=None), known)

        def joint(values: Mapping[str, Tensor]) -> Tensor:
            with pyro.validation_enabled(False):
                return model.read(values, _log_joint)["log_joint"]

        return joint

    @property
    def _target(self) -> Target:
        if self.target is None:
            raise ValueError(
                "Expected a posterior with its model; this one was loaded without. Load it with `Posterior.load(path, "
                "model, *args)`."
            )
        return self.target

    def _of_one_data_set(self) -> Mapping[str, Tensor]:
        if self.log_weights.dim() > 1:
            raise NotImplementedError(
                f"Expected a posterior given one data set; this one is given {self.log_weights.shape[1]}. Ask for one "
                "at a time."
            )
        return self.draws


def learned(guide: Any) -> list[str]:
    """Returns the latents whose conditionals a guide learns."""
    return [name for name, note in guide.rules.items() if note.rule == "learned"]


def derivation(guide: Any, *, most_named: int = 3) -> str:
    """Returns how all conditionals of a guide are derived, as words of a verdict; empty if some are not derived."""
    rules = getattr(guide, "rules", None)
    if rules is None or not {note.rule for note in rules.values()} <= DERIVED:
        return ""
    on_grid = [name for name, note in rules.items() if note.rule == "quadrature"]
    if not on_grid:
        return "all conditionals are in closed form"
    if len(on_grid) == len(rules):
        return "all conditionals are by quadrature"
    more = "" if len(on_grid) <= most_named else f" and {len(on_grid) - most_named} more"
    named = quoted(on_grid[:most_named]) + more
    return f"conditionals are in closed form, or by quadrature ({named})"


def _log_joint(sites: Mapping[str, Any], extent: Extent) -> dict[str, Tensor]:
    log_probs = log_densities(sites)
    total = summed(log_probs, extent)
    for name, log_prob in log_probs.items():
        if not sites[name]["is_observed"]:
            inside = sites[name]["fn"].support.check(sites[name]["value"]).expand(log_prob.shape)
            total = total.where(inside.reshape(*extent.sizes, -1).all(-1), -torch.inf)
    return {"log_joint": total}
