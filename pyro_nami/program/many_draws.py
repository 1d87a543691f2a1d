"""Checks that a run of a model for many draws at once agrees with runs for one draw each.

Models that are written for one draw mix up the draws, or fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import pyro
import torch
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_nami.program.masks import density_rounding
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Note, Runner, Sites, Values
from pyro_nami.program.vectorized import Vectorized

__all__ = ["difference_at", "extra_dims", "differing_site", "few_draws", "for_many", "of_rank"]

# Draws that show what several draws have in common: two may agree by chance, thirty take ten times as long at set-up.
FEWEST_DRAWS = 3
# Draws from which a run for many draws pays for a check or a set-up of its own; at ten times more, small models are
# run draw by draw.
MANY_DRAWS = 16
# Relative and absolute tolerance of log densities; 1e-2 for other dtypes: what Newton's last step in single precision
# may leave.
TOLERANCE = {torch.float64: 1e-6}


def few_draws(sites: Iterable[Any]) -> int:
    """Returns a number of draws, at least three, that is no size of a site, so that it cannot be taken for one."""
    sizes = {size for site in sites for size in site["fn"].shape()}
    return next(num for num in itertools.count(FEWEST_DRAWS) if num not in sizes)


def differing_site(
    together: Values,
    indices: Iterable[Any],
    alone_at: Callable[[Any], Values],
    rounding_at: Callable[[Any], Values] | None = None,
) -> str | None:
    """Returns the first site at which a run for many draws differs from runs for one draw; None if all agree.

    Args:
        together: site -> its log densities in the run for many draws, ``(*batch, *plates)``.
        indices: the draws that are compared, each by its place in the batch dims.
        alone_at: index -> the log densities of a run for this draw alone.
        rounding_at: index -> by site, the difference in nats that rounding explains there.
    """
    for index in indices:
        alone = alone_at(index)
        rounding = rounding_at(index) if rounding_at else {}
        for name in {**together, **alone}:
            if name not in together or name not in alone:
                return name
            if not _are_close(together[name][index], alone[name], rounding.get(name)):
                return name
    return None


def _are_close(here: Tensor, there: Tensor, rounding: Tensor | None) -> bool:
    """Whether log densities agree; ``rounding`` is a difference in nats that is allowed in any case."""
    if here.numel() != there.numel():
        return False
    tolerance = max(TOLERANCE.get(x.dtype, 1e-2) for x in (here, there))
    there = there.reshape(here.shape).to(here)
    same = torch.isclose(here, there, rtol=tolerance, atol=tolerance, equal_nan=True)
    if rounding is not None:
        same |= (here - there).abs() <= rounding
    return bool(same.all())


def for_many(
    program: Program, nesting: int, difference: Callable[[Program], str | None]
) -> tuple[Program, str | None]:
    """Returns a program that runs for many draws, and None; or the program as it is, and why it does not.

    The program is tried as it is, and then mapped over draws by `Vectorized`.

    Args:
        program: a model and its arguments.
        nesting: the model's plate dims, left of which that of draws stands.
        difference: from a program to where its run for many draws differs from runs for one; None if nowhere.
    """
    reason = difference(program)
    if reason is None or isinstance(program.model, Vectorized):
        return program, reason
    mapped = program._replace(model=Vectorized(program.model, nesting))
    return (mapped, None) if difference(mapped) is None else (program, reason)


def difference_at(draws: Sequence[Values], nesting: int, program: Program) -> str | None:
    """Returns where a run at several joint draws of all sites differs from a run at each of them; None if nowhere.

    Args:
        draws: site -> value, of a run each; they are repeated if they are too few.
        nesting: the model's plate dims.
        program: the model and its arguments.
    """
    try:
        with torch.no_grad(), pyro.validation_enabled(False):
            first = _sites(program, draws[0])
            num = few_draws(first.values())
            known = [first, *(_sites(program, draw) for draw in draws[1:num])]
            alone = [known[i % len(known)] for i in range(num)]
            values = {name: _stacked([sites[name] for sites in alone], nesting) for name in first}
            many = _sites(program, values, note=of_rank(nesting + 1))
            return differing_site(
                _log_densities(many),
                range(num),
                lambda i: _log_densities(alone[i]),
                lambda i: _rounding(alone[i]),
            )
    except Exception as error:  # noqa: BLE001  whatever a model does with batch dims that it was not written for
        return type(error).__name__


def extra_dims(draws: Sequence[Values], nesting: int, program: Program) -> str:
    """Returns what is wrong with a site that has more batch dims than draws and plates have; "" if there is none.

    Args:
        draws, nesting, program: as for `difference_at`.
    """
    try:
        with torch.no_grad(), pyro.validation_enabled(False):
            known = [_sites(program, draw) for draw in draws]
            first = {name: site for name, site in known[0].items() if name in draws[0]}
            values = {name: _stacked([sites[name] for sites in known], nesting) for name in first}
            _sites(program, values, note=of_rank(nesting + 1))
    except ExtraDimsError as error:
        return str(error)
    except Exception:  # noqa: BLE001  Pyro's own run raises it, too
        return ""
    return ""


class ExtraDimsError(ValueError):
    """A site has more batch dims than it may have."""


def of_rank(most: int) -> Note:
    """Returns a `note` for `Runner` that raises at a site of more batch dims, as ``p[z]`` in a chain doubles them."""

    def note(msg: Any) -> None:
        if not site_is_subsample(msg) and len(msg["fn"].batch_shape) > most:
            raise ExtraDimsError(
                f"Expected at most {most} batch dims of site '{msg['name']}'; got {tuple(msg['fn'].batch_shape)}."
            )

    return note


def _sites(program: Program, values: Values, note: Note | None = None) -> dict[str, Any]:
    sites = program.run(Runner(values, note=note))
    return {name: site for name, site in sites.items() if not site_is_subsample(site)}


def _stacked(sites: Sequence[Any], nesting: int) -> Tensor:
    """Returns the values of a site in several runs, ``(runs, *plates, *event)``."""
    fn = sites[0]["fn"]
    idle = (1,) * (nesting - len(fn.batch_shape))
    return torch.stack(
        [site["value"].expand(fn.shape()).reshape(idle + fn.shape()) for site in sites]
    )


def _rounding(sites: Sites) -> dict[str, Tensor]:
    """Returns the rounding error of the log densities of Normal sites, in nats: that of the worst instance for all.

    A location near zero may be what is left of terms as large as elsewhere.
    """
    errors = {name: density_rounding(site) for name, site in sites.items()}
    return {name: error.max() for name, error in errors.items() if error is not None}


def _log_densities(sites: Sites) -> dict[str, Tensor]:
    """Returns the log densities of the sites that have one, in nats, without scales and masks."""
    found = {}
    for name, site in sites.items():
        with suppress(NotImplementedError):
            found[name] = site["fn"].log_prob(site["value"])
    return found
