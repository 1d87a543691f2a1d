"""Index maps against the index tensors that the models were written with."""

from __future__ import annotations

import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from models import Counted

from pyro_nami.graph import nami
from pyro_nami.program.runner import Runner
from pyro_nami.reading.extraction import extract
from pyro_nami.reading.index_maps.decoding import MapPlan, find_maps, maps_hold
from pyro_nami.reading.index_maps.nesting import routes

COUNTY = torch.tensor([4, 0, 2, 2, 1, 3, 0, 4, 4, 1, 3])
DAY = torch.tensor([0, 1, 2, 2, 1, 0, 1, 2, 0, 0, 1])
COUNTIES, DAYS, ROWS = 5, 3, 11


def normal(name, loc=0.0, scale=1.0, obs=None):
    return pyro.sample(name, dist.Normal(loc, scale), obs=obs)


def effects(name="alpha", plate="county", size=COUNTIES, loc=0.0):
    with pyro.plate(plate, size) if isinstance(plate, str) else plate:
        return normal(name, loc)


def rows(loc, name="y", plate=None):
    with plate or pyro.plate("obs", loc.shape[-1]):
        return normal(name, loc, obs=torch.zeros(loc.shape))


def sites_of_the_rows(*locs):
    with obs_plate():
        for i, loc in enumerate(locs):
            normal(f"y{i}", loc, obs=torch.zeros(ROWS))


def at_times(loc, plate="obs"):
    """Rows at some times, those of ``loc`` (times, rows) or three that are alike."""
    times = len(loc) if loc.dim() > 1 else 3
    with pyro.plate("time", times, dim=-2), pyro.plate(plate, ROWS, dim=-1):
        normal("y", loc, obs=torch.zeros(times, ROWS))


def mixed(components, size, rows):
    """Rows that take their component by a latent of their own: ``rows`` samples it and returns the index."""
    mu = effects("mu", "component", components)
    with pyro.plate("obs", size):
        normal("y", mu[rows()], obs=torch.zeros(size))


def alpha_and_beta(loc=0.0):
    """Intercepts and slopes of the counties."""
    county = county_plate()
    return effects("alpha", county, loc=loc), effects("beta", county)


def county_plate():
    return pyro.plate("county", COUNTIES)


def obs_plate():
    return pyro.plate("obs", ROWS)


OTHER = (COUNTY + 1) % COUNTIES
SAME = torch.full((ROWS,), 2)
STATE = torch.tensor([1, 0, 1, 1, 0])
LAND = torch.tensor([1, 0, 2, 1, 0])
FLOOR = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
LATE = (torch.arange(ROWS) > 3).float()
TO_COUNTY = {("obs", "county"): COUNTY}


def categorical(probs):
    return pyro.sample("z", dist.Categorical(probs))


def latent_rows():
    alpha = effects()
    with obs_plate():
        normal("y", normal("z", alpha[COUNTY]), obs=torch.zeros(ROWS))


# Ways to read through the index `COUNTY`, which is the map to be found.
READ = {
    "indexed": lambda: rows(effects(loc=normal("mu"))[COUNTY]),
    "intercept and slope where most covariates are zero": lambda: (
        ab := alpha_and_beta(),
        rows(ab[0][COUNTY] + ab[1][COUNTY] * (torch.arange(ROWS) % 4 == 0)),
    ),
    "slopes beside intercepts of another site": lambda: (
        ab := alpha_and_beta(),
        sites_of_the_rows(ab[0][COUNTY], ab[1][COUNTY] * FLOOR),
    ),
    "two sites that read some rows each": lambda: (
        read := effects()[COUNTY],
        sites_of_the_rows(read * FLOOR, read * (1 - FLOOR)),
    ),
    "one site that reads nothing in the first rows and one nothing in the last": lambda: (
        ab := alpha_and_beta(),
        sites_of_the_rows(ab[0][COUNTY] * LATE, ab[1][COUNTY] * LATE.flip(0)),
    ),
    "rows that read at some times": lambda: at_times(
        effects()[COUNTY] * torch.stack([FLOOR, 1 - FLOOR])
    ),
    "gathered": lambda: rows(effects().gather(0, COUNTY)),
    "index selected": lambda: rows(effects().index_select(-1, COUNTY)),
    "one hot product": lambda: rows(F.one_hot(COUNTY, COUNTIES).float() @ effects()),
    "taken along a dim": lambda: rows(torch.take_along_dim(effects(), COUNTY, 0)),
    "embedded": lambda: rows(F.embedding(COUNTY, effects().unsqueeze(-1)).squeeze(-1)),
    "rectified": lambda: rows(effects()[COUNTY].relu()),
    "latent rows": latent_rows,
}
READ = {name: (model, TO_COUNTY) for name, model in READ.items()} | {
    # As those of a minibatch may do; others of the same model will not.
    "all rows read the same instance": (lambda: rows(effects()[SAME]), {("obs", "county"): SAME}),
    "crossed effects": (
        lambda: rows(normal("mu") + effects()[COUNTY] + effects("beta", "day", DAYS)[DAY]),
        {**TO_COUNTY, ("obs", "day"): DAY},
    ),
    "nested levels": (
        lambda: rows(effects(loc=effects("gamma", "state", 2)[STATE])[COUNTY]),
        {**TO_COUNTY, ("county", "state"): STATE},
    ),
    "nested levels all read by the rows": (
        lambda: (
            state := effects("gamma", "state", 3),
            rows(effects(loc=state[LAND])[COUNTY] + state[LAND[COUNTY]]),
        ),
        {**TO_COUNTY, ("county", "state"): LAND, ("obs", "state"): LAND[COUNTY]},
    ),
    "rows in two plates that read along one": (
        lambda: at_times(effects(plate="group")[COUNTY], "unit"),
        {("unit", "group"): COUNTY},
    ),
    "one row": (lambda: rows(effects()[COUNTY[:1]]), {("obs", "county"): COUNTY[:1]}),
}
# Ways to read another plate that are no index map.
NOT_READ = {
    "mean": lambda: rows(effects().mean() + torch.arange(1.0 * ROWS)),
    "two instances": lambda: rows((alpha := effects())[COUNTY] - alpha[OTHER]),
    "the larger of two instances": lambda: rows(
        torch.maximum((alpha := effects())[COUNTY], alpha[OTHER])
    ),
    "one of two instances by the value of one": lambda: (
        alpha := effects(),
        rows(torch.where(alpha[COUNTY] > 0, alpha[COUNTY], alpha[OTHER])),
    ),
    "a mixture by local categories": lambda: mixed(
        3, 4, lambda: categorical(torch.tensor([0.8, 0.1, 0.1]))
    ),
    "a mixture of two by two categories that are nearly sure": lambda: mixed(
        2, 2, lambda: pyro.sample("z", dist.Bernoulli(torch.tensor([0.001, 0.999]))).long()
    ),
    "an index that categories that are all but sure add to": lambda: mixed(
        4,
        4,
        lambda: (
            (
                torch.arange(4)
                + categorical(torch.tensor([20.0, 0.0, 0.0, 0.0]).softmax(0).expand(4, 4))
            )
            % 4
        ),
    ),
    "an index by the sign of a local latent": lambda: mixed(2, 3, lambda: (normal("b") > 0).long()),
    "two rows that the sign of a local latent swaps": lambda: mixed(
        2, 2, lambda: (torch.arange(2) + (normal("b") > 0)) % 2
    ),
    "the map differs along a second plate": lambda: (
        alpha := effects(),
        at_times(torch.stack([alpha[COUNTY], alpha[COUNTY.flip(0)]])),
    ),
    "two sites with different maps": lambda: (
        alpha := effects(),
        sites_of_the_rows(alpha[COUNTY], alpha[COUNTY.flip(0)]),
    ),
    "rows that read nothing": lambda: rows(effects()[COUNTY] * FLOOR),
    "rows that read nothing at any site": lambda: (
        ab := alpha_and_beta(),
        sites_of_the_rows(ab[0][COUNTY] * FLOOR, ab[1][COUNTY] * FLOOR * LATE),
    ),
    "rows that read nothing at any time": lambda: at_times(
        effects()[COUNTY] * torch.stack([FLOOR, FLOOR])
    ),
    # The third row does at the first time.
    "rows that read different instances at some times": lambda: (
        alpha := effects(),
        other := (COUNTY + (torch.arange(ROWS) == 2)) % COUNTIES,
        at_times(torch.stack([alpha[other], alpha[COUNTY] * (1 - FLOOR)])),
    ),
    "slopes read elsewhere than intercepts": lambda: (
        ab := alpha_and_beta(),
        sites_of_the_rows(ab[0][COUNTY], ab[1][OTHER] * FLOOR),
    ),
    "slopes of which some rows read two": lambda: (
        ab := alpha_and_beta(),
        sites_of_the_rows(ab[0][COUNTY], (ab[1][COUNTY] - ab[1][OTHER]) * FLOOR),
    ),
    "a second site reads all instances": lambda: (
        alpha := effects(),
        sites_of_the_rows(alpha[COUNTY], alpha.mean()),
    ),
    "constant along one plate of many rows and one of a single row": lambda: at_times(
        effects()[2].expand(1, ROWS)
    ),
}


def idiom(model):
    READ[model.__name__] = model, TO_COUNTY
    return model


def no_map(model):
    NOT_READ[model.__name__] = model
    return model


@idiom
def discrete_latents():
    with pyro.plate("county", COUNTIES):
        group = pyro.sample("group", dist.Categorical(torch.tensor([0.98, 0.01, 0.01])))
    rows(torch.tensor([-1.0, 0.0, 1.0])[group[COUNTY]])


@idiom
def scale_as_well_as_mean():
    with county_plate():
        alpha = normal("alpha")
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    with pyro.plate("obs", ROWS):
        normal("y", alpha[COUNTY], sigma[COUNTY], obs=torch.zeros(ROWS))


@idiom
def a_distribution_without_parameters_of_its_own():
    alpha = effects()
    with pyro.plate("obs", ROWS):
        loc = torch.stack([alpha[COUNTY], alpha[COUNTY] + 1], -1)
        mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(loc, 1.0))
        pyro.sample("y", mixture, obs=torch.zeros(ROWS))


@idiom
def features_in_a_plate_of_their_own():
    with pyro.plate("features", 2, dim=-2):
        with pyro.plate("county", COUNTIES, dim=-1):
            alpha = normal("alpha")
        with pyro.plate("obs", ROWS, dim=-1):
            normal("y", alpha[:, COUNTY], obs=torch.zeros(2, ROWS))


@idiom
def vector_effects():
    with pyro.plate("county", COUNTIES):
        alpha = pyro.sample("alpha", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    rows(alpha[COUNTY, 0] + alpha[COUNTY, 1] * torch.arange(ROWS))


@idiom
def segment_means_read_back():
    county = county_plate()
    alpha = effects("alpha", county)
    with obs_plate():
        z = normal("z", alpha[COUNTY])
    rows(torch.zeros(COUNTIES).index_add(0, COUNTY, z), "s", county)


@idiom
def small_changes_of_the_mean_that_the_log_density_absorbs():
    alpha = effects()
    with obs_plate():
        normal("y", alpha[COUNTY] * 1e-6, obs=torch.full((ROWS,), 1e5))


@no_map
def the_outer_plate_reads_all_rows():
    county = county_plate()
    alpha = effects("alpha", county)
    with obs_plate():
        z = normal("z", alpha[COUNTY])
    rows(z.mean().expand(COUNTIES), "s", county)


@no_map
def a_third_site_has_both_plates_crossed():
    county, obs = pyro.plate("county", COUNTIES, dim=-2), pyro.plate("obs", ROWS, dim=-1)
    alpha = effects("alpha", county)
    rows(alpha[COUNTY, 0], "y", obs)
    with county, obs:
        normal("w", obs=torch.zeros(COUNTIES, ROWS))


@no_map
def two_ways_to_the_same_plate_that_disagree():
    """Students in classrooms in schools, and students in clubs in schools, other ones."""
    school = effects("school", "schools", 2)
    classroom = effects("classroom", "classrooms", 4, school[torch.tensor([0, 1, 0, 1])])
    club = effects("club", "clubs", 3, school[torch.tensor([0, 1, 1])])
    rows(classroom[torch.tensor([0, 1, 2, 3, 0])] + club[torch.tensor([0, 1, 2, 0, 1])])


def model_of(name):
    return READ[name][0]


def written(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return extract(model)


# Of few rows two signs are the same in a quarter of cases, and values that move no row are tried again.
SEEDS = {"rectified": 10, "two rows that the sign of a local latent swaps": 20}


@pytest.mark.parametrize(
    "name, seed", [(name, seed) for name in READ for seed in range(SEEDS.get(name, 3))]
)
def test_the_map_found_and_found_again_by_its_plan_is_the_index_the_model_was_written_with(
    name, seed
):
    model, maps = READ[name]
    pyro.set_rng_seed(seed)
    found = written(model)
    assert found.index_maps.keys() == maps.keys()
    assert all(torch.equal(found.index_maps[key], index) for key, index in maps.items())
    if not seed:
        again = find(found, model)
        assert again.keys() == maps.keys() and all(
            torch.equal(again[key], maps[key]) for key in maps
        )
        assert hold(found, again, model)
    for inner, outer in maps:
        assert outer in found.bayesnet.nesting[inner]
        assert {(plan.plate, q) for plan in found.map_plans for q in plan.dims} == {
            (p, q) for q, p in maps
        }


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (name, seed)
        for name in NOT_READ
        for seed in range(SEEDS.get(name, 5 if "categories" in name or "sign" in name else 2))
    ],
)
def test_what_is_no_index_map_is_read_whole(name, seed):
    """At more seeds where rows have latents of their own, whose draws it turns on."""
    pyro.set_rng_seed(seed)
    found = written(NOT_READ[name])
    assert not found.index_maps and not found.map_plans and not found.bayesnet.nesting


def test_effects_of_one_plate_stay_apart_given_the_globals_and_crossed_ones_are_coupled():
    alone = nami(extract(model_of("indexed")).bayesnet, direction="reverse")
    assert not any(alone.joint.values()) and "y" in alone.parents["alpha"]
    crossed = nami(extract(model_of("crossed effects")).bayesnet, direction="reverse")
    assert sum(map(bool, crossed.joint.values())) == 1


def test_plates_are_closed_along_a_chain_of_maps():
    net = extract(model_of("nested levels")).bayesnet
    assert (
        net.plates["y"] == {"obs", "county", "state"} and net.num_instances(net.plates["y"]) == ROWS
    )
    assert net.plates["alpha"] == {"county", "state"}


def test_a_map_beside_ones_that_are_dropped_is_kept():
    found = extract(lambda: rows(effects().mean() + effects("beta", "day", DAYS)[DAY]))
    assert found.index_maps.keys() == {("obs", "day")} and found.bayesnet.plates["y"] == {
        "obs",
        "day",
    }


URANIUM = torch.linspace(-1, 1, COUNTIES)


def with_an_observed_site_of_the_county(u, read):
    county = county_plate()
    with county:
        normal("x", obs=u)
        alpha = normal("alpha")
    rows(alpha[COUNTY] + read(u))


@pytest.mark.parametrize(
    ("read", "nested"), [(lambda u: u[COUNTY], True), (lambda u: u.mean(), False)]
)
def test_observed_sites_of_the_plate_are_read_through_the_same_map_or_there_is_none(read, nested):
    found = extract(with_an_observed_site_of_the_county, (URANIUM, read))
    assert ("x", "y") in found.bayesnet.edges and bool(found.index_maps) == nested


def test_data_that_cannot_be_changed_counts_as_read_whole():
    found = extract(lambda: with_an_observed_site_of_the_county(URANIUM, lambda u: u[COUNTY]))
    assert ("x", "y") in found.bayesnet.edges and not found.index_maps


def test_a_site_with_hidden_randomness_is_not_nested_with_what_it_may_read():
    with pytest.warns(UserWarning, match="Hidden randomness"):
        found = extract(
            lambda: sites_of_the_rows(read := effects()[COUNTY], read + torch.randn(ROWS))
        )
    assert not found.index_maps


def test_subsampled_rows_are_mapped_as_drawn():
    def model():
        alpha = effects()
        with pyro.plate("obs", ROWS, subsample_size=4) as index:
            normal("y", alpha[COUNTY[index]], obs=torch.zeros(4))

    found = extract(model)
    assert torch.equal(found.index_maps["obs", "county"], COUNTY[found.trace.nodes["obs"]["value"]])


def test_random_numbers_are_left_alone():
    state, model = torch.get_rng_state(), model_of("crossed effects")
    found = extract(model)
    hold(found, find(found, model), model)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_checks_no_map_is_looked_for():
    assert written(model_of("indexed")).index_maps
    found = extract(model_of("indexed"), checks=0)
    assert not found.index_maps and not found.bayesnet.nesting


@pytest.mark.parametrize("checks", [6, 12, 20, 27])
def test_a_budget_that_ends_during_the_search_is_kept_and_reported(checks):
    model = Counted(model_of("crossed effects"))
    with pytest.warns(UserWarning, match=f"index map: the budget of {checks} runs"):
        found = extract(model, checks=checks)
    assert model.runs <= checks + 5
    assert found.bayesnet.nesting.get("obs", frozenset()) == {p for _, p in found.index_maps}
    assert all(
        torch.equal(index, {"county": COUNTY, "day": DAY}[p])
        for (_, p), index in found.index_maps.items()
    )


# Finding again, by the plan


def runner(model, *args, log=None):
    def run(values):
        if log is not None:
            log.append(values)
        with torch.no_grad():
            return Runner(values, broadcast=True).run(model, args, {})

    return run


def held(found):
    nodes = found.trace.nodes
    return {
        name: nodes[name]["value"][(slice(0, 1),) * len(nodes[name]["fn"].batch_shape)]
        for name in found.bayesnet.latent
    }


def find(found, model, *args, log=None):
    """Returns the maps of a call, by the plans of the first one."""
    return find_maps(runner(model, *args, log=log), found.map_plans, held(found))


def hold(found, maps, model, *args, log=None):
    """Returns whether maps hold in a call."""
    return maps_hold(runner(model, *args, log=log), found.map_plans, held(found), maps)


def of_any_size(county, day, counties, days):
    alpha = effects(size=counties, loc=normal("mu"))
    rows(alpha[county] + effects("beta", "day", days)[day])


FIRST = (COUNTY, DAY, COUNTIES, DAYS)


@pytest.fixture(scope="module")
def found():
    pyro.set_rng_seed(1)
    return extract(of_any_size, FIRST)


@pytest.mark.parametrize("sizes", [(1, 1, 7), (2, 9, 1), (64, 3, 500), (65, 128, 40)], ids=str)
def test_plans_find_other_maps_at_other_sizes(found, sizes):
    counties, days, size = sizes
    county, day = torch.randint(counties, (size,)), torch.randint(days, (size,))
    log = []
    maps = find(found, of_any_size, county, day, counties, days, log=log)
    assert torch.equal(maps["obs", "county"], county) and torch.equal(maps["obs", "day"], day)
    assert len(log) == sum(2 * (n - 1).bit_length() + 1 for n in (counties, days))


@pytest.mark.parametrize("size", [0, 1, 4])
def test_an_empty_plate_has_an_empty_map(size):
    """Pyro makes no plate without instances, so the run is written by hand."""

    def run(values):
        alpha = values["alpha"].expand(size)
        messages = {"alpha": dist.Normal(torch.zeros(size), 1.0), "y": dist.Normal(alpha[:0], 1.0)}
        return {
            name: {
                "fn": fn,
                "value": fn.mean,
                "mask": None,
                "scale": 1.0,
                "is_observed": False,
            }
            for name, fn in messages.items()
        }

    plan = MapPlan(
        "county", -1, {"alpha": (torch.zeros(1), torch.ones(1))}, {"y": "obs"}, {"obs": -1}
    )
    maps = find_maps(run, [plan], {})
    assert maps.keys() == {("obs", "county")} and maps["obs", "county"].shape == (0,)
    assert maps_hold(run, [plan], {}, maps)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (
            lambda alpha: alpha[COUNTY] + torch.where(torch.arange(ROWS) == 6, alpha[4], 0.0),
            r"'y' to read 'alpha' of plate 'county' .* row 6 .* reads several. .* new",
        ),
        (
            lambda alpha: alpha[COUNTY] * 0.0,
            r"'alpha' of plate 'county' .* row 0 of plate 'obs', which reads none",
        ),
    ],
    ids=["two", "none"],
)
def test_a_row_that_reads_two_instances_or_none_in_a_later_call_is_an_error(found, read, error):
    with pytest.raises(ValueError, match=error):
        find(
            found, lambda: rows(read(effects(loc=normal("mu"))) + effects("beta", "day", DAYS)[DAY])
        )


def radon(county, floor, counties=COUNTIES, beta_county=None, apart=False):
    """Intercepts and slopes, read by one site or, ``apart``, by one each."""
    plate = pyro.plate("county", counties)
    alpha, beta = effects("alpha", plate, loc=normal("mu")), effects("beta", plate)
    slope = beta[..., county if beta_county is None else beta_county] * floor
    with pyro.plate("obs", len(county)):
        normal("y", alpha[..., county] + (0.0 if apart else slope), obs=torch.zeros(len(county)))
        if apart:
            normal("w", slope, obs=torch.zeros(len(county)))


slopes_apart = partial(radon, apart=True)


@pytest.mark.parametrize(
    "at_first", [FLOOR, torch.ones(ROWS)], ids=["zeros at first", "none at first"]
)
@pytest.mark.parametrize("model", [radon, slopes_apart], ids=["radon", "slopes apart"])
def test_zeros_among_covariates_cost_no_run_more(model, at_first):
    found = extract(model, (COUNTY, at_first))
    assert torch.equal(found.index_maps["obs", "county"], COUNTY)
    county, floor, log = torch.randint(85, (919,)), (torch.rand(919) < 0.2).float(), []
    maps = find(found, model, county, floor, 85, log=log)
    assert torch.equal(maps["obs", "county"], county) and len(log) == 2 * (85 - 1).bit_length() + 1
    log.clear()
    assert hold(found, maps, model, county, floor, 85, log=log)
    assert len(log) == 4


def test_zeros_hide_neither_another_map_nor_another_instance_in_a_later_call():
    found = extract(slopes_apart, (COUNTY, FLOOR))
    args = COUNTY, FLOOR, COUNTIES, (COUNTY + 1) % COUNTIES
    with pytest.raises(
        ValueError, match="'w' to read 'alpha' and 'beta' .* differs from that of another site"
    ):
        find(found, slopes_apart, *args)
    assert not hold(found, found.index_maps, slopes_apart, *args)


def test_rows_that_read_nothing_at_any_site_in_a_later_call_are_an_error():
    found = extract(model_of("two sites that read some rows each"))

    def model():
        read = effects()[COUNTY]
        sites_of_the_rows(read * FLOOR, read * 0.0)

    with pytest.raises(ValueError, match="row 0 of plate 'obs', which reads none"):
        find(found, model)
    assert not hold(found, found.index_maps, model)


def test_maps_that_no_longer_hold_are_noticed_in_a_few_runs(found):
    maps, log = found.index_maps, []
    assert hold(found, maps, of_any_size, *FIRST, log=log) and len(log) <= 4 * len(found.map_plans)
    for other in (
        {**maps, ("obs", "county"): (COUNTY + 1) % COUNTIES},
        {**maps, ("obs", "day"): DAY.flip(0)},
        {**maps, ("obs", "county"): COUNTY[:-1]},
        {**maps, ("obs", "county"): COUNTY + COUNTIES},
    ):
        assert not hold(found, other, of_any_size, *FIRST)


def test_maps_into_a_plate_of_one_instance_hold_by_themselves(found):
    zeros = torch.zeros(ROWS, dtype=torch.long)
    assert hold(
        found, {("obs", "county"): zeros, ("obs", "day"): zeros}, of_any_size, zeros, zeros, 1, 1
    )


def test_routes_compose_maps_and_end_on_a_cycle():
    maps = {
        ("a", "b"): torch.tensor([1, 0, 1]),
        ("b", "c"): torch.tensor([5, 7]),
        ("c", "a"): torch.zeros(8).long(),
    }
    found = {(len(route.maps), route.end): route.rows.tolist() for route in routes(maps, "a")}
    assert found == {(1, "b"): [1, 0, 1], (2, "c"): [7, 5, 7], (3, "a"): [0, 0, 0]}


def test_a_plan_names_what_it_changes():
    (plan,) = extract(features_in_a_plate_of_their_own).map_plans
    assert isinstance(plan, MapPlan) and (plan.plate, plan.dim) == ("county", -1)
    assert plan.targets == {"y": "obs"} and plan.dims == {"obs": -1}
    first, second = plan.values["alpha"]
    assert first.shape == second.shape == (1, 1) and (first != second).all()
