"""Which plate of a grid minibatches are of: the one whose rows moved with the arguments."""

from __future__ import annotations

import types

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

from pyro_nami import AutoNaMIGuide

POTS, WEEKS = 7, 8
TREATED = (torch.arange(POTS) % 2).float()


def growth(week, treated, y=None, *, inside=False, effect_of_pots=True):
    """Counts of pots, the outer plate, by weeks; a covariate of each, that of pots in one of two places."""
    effect, slope = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("effect", "slope"))
    of_pot = effect * treated if effect_of_pots else effect
    with pyro.plate("pots", len(treated), dim=-1):
        rate = pyro.sample("rate", dist.Normal(0.0 if inside else of_pot, 1.0))
        with pyro.plate("weeks", len(week), dim=-2):
            pyro.sample(
                "y",
                dist.Normal(rate + slope * week[:, None] + (of_pot if inside else 0.0), 1.0),
                obs=y,
            )


def along(model, calls):
    """Returns the plates that a guide takes some calls for minibatches of."""
    guide = AutoNaMIGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    for args in calls:
        svi.step(*args)
    assert guide.mode == "minibatches"
    return guide._plan.plates.minibatched


@pytest.mark.parametrize("inside", [False, True])
# as many weeks as pots: sizes do not tell the two apart
@pytest.mark.parametrize("count", [3, POTS])
def test_minibatches_are_of_the_plate_whose_rows_moved(inside, count):
    def model(*args):
        growth(*args, inside=inside)

    week, y = torch.arange(float(WEEKS)), torch.randn(WEEKS, POTS)
    of_weeks = [
        (week[part], TREATED, y[part]) for part in (torch.randperm(WEEKS)[:count] for _ in range(5))
    ]
    assert along(model, of_weeks) == {"weeks"}
    of_pots = [
        (week, TREATED[part], y[:, part]) for part in (torch.randperm(POTS)[:4] for _ in range(5))
    ]
    assert along(model, of_pots) == {"pots"}


@pytest.mark.parametrize("count", [3, POTS])
@pytest.mark.parametrize("of_weeks", [True, False])
def test_rows_that_the_model_reads_elsewhere_move_as_well(of_weeks, count):
    """As attributes beside the counts; the last minibatch is smaller, as that of a loader is."""
    week, y = torch.arange(float(WEEKS)), torch.randn(WEEKS, POTS)
    place = types.SimpleNamespace(week=week, treated=TREATED)

    def model(y):
        growth(place.week, place.treated, y)

    def calls():
        for size in (count, count, count, count, 2):
            part = torch.randperm(WEEKS if of_weeks else POTS)[:size]
            place.week, place.treated = week, TREATED
            setattr(place, *(("week", week[part]) if of_weeks else ("treated", TREATED[part])))
            yield (y[part] if of_weeks else y[:, part],)

    assert along(model, calls()) == {"weeks" if of_weeks else "pots"}


def test_minibatches_that_come_in_turn_are_told_apart():
    """The step that shows that data are minibatches may have the first data again."""
    week, y = torch.arange(9.0), torch.randn(9, POTS)
    parts = torch.arange(9).split(3)
    assert along(growth, [(week[part], TREATED, y[part]) for part in (*parts, *parts)]) == {"weeks"}


def test_a_covariate_that_moves_tells_the_plate_where_densities_do_not():
    """Of pots that nothing tells apart; that of weeks moves, and has no row of a pot."""

    def model(week, y=None):
        growth(week, torch.zeros(POTS), y, effect_of_pots=False)

    week, y = torch.arange(float(WEEKS)), torch.randn(WEEKS, POTS)
    parts = [torch.randperm(WEEKS)[:3] for _ in range(5)]
    assert along(model, [(week[part], y[part]) for part in parts]) == {"weeks"}


def test_of_plates_that_nothing_tells_apart_the_outermost_is_taken():
    def model(week, treated, y=None):
        growth(torch.zeros(WEEKS), treated, y, effect_of_pots=False)

    assert along(model, [(None, TREATED, torch.randn(WEEKS, POTS)) for _ in range(5)]) == {"pots"}


def test_a_model_that_refuses_other_orders_may_have_any_plate():
    def model(length, y):
        if not (length.diff() <= 0).all():
            raise ValueError("lengths are to be sorted")
        with pyro.plate("series", len(length), dim=-2):
            mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
            with pyro.plate("times", y.shape[1], dim=-1):
                pyro.sample(
                    "y",
                    dist.Normal(mean, 1.0).mask(torch.arange(y.shape[1]) < length[:, None]),
                    obs=y,
                )

    calls = [
        (torch.randint(2, 9, (6,)).sort(descending=True)[0], torch.randn(6, 9)) for _ in range(5)
    ]
    assert along(model, calls) == {"series"}


def test_the_plate_belongs_to_the_state():
    week, y = torch.arange(float(WEEKS)), torch.randn(WEEKS, POTS)
    calls = [(week[part], TREATED, y[part]) for part in torch.arange(WEEKS).roll(3).split(2)]
    guide = AutoNaMIGuide(growth)
    svi = SVI(growth, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    for args in [*calls, *calls]:
        svi.step(*args)
    other = AutoNaMIGuide(growth)
    other.load_state_dict(guide.state_dict())
    pyro.set_rng_seed(1)
    expected = guide(*calls[0])
    pyro.set_rng_seed(1)
    assert all(torch.equal(value, expected[name]) for name, value in other(*calls[0]).items())
    assert other._plan.plates.minibatched == {"weeks"}
