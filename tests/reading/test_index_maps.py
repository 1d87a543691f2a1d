"""Index maps against the index tensors that the models were written with."""

from __future__ import annotations

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F

from pyro_nami.graph import nami
from pyro_nami.reading.index_maps.finder import MapPlan, find_maps, maps_hold
from pyro_nami.reading.index_maps.given import check_map
from pyro_nami.reading.index_maps.nesting import routes
from pyro_nami.reading.network import extract
from pyro_nami.reading.runner import Runner

COUNTY = torch.tensor([4, 0, 2, 2, 1, 3, 0, 4, 4, 1, 3])
DAY = torch.tensor([0, 1, 2, 2, 1, 0, 1, 2, 0, 0, 1])
COUNTIES, DAYS, ROWS = 5, 3, 11


@pytest.fixture(autouse=True)
def _seed():
    pyro.set_rng_seed(0)


def normal(name, loc=0.0, scale=1.0, obs=None):
    return pyro.sample(name, dist.Normal(loc, scale), obs=obs)


def effects(name="alpha", plate="county", size=COUNTIES, loc=0.0):
    with pyro.plate(plate, size) if isinstance(plate, str) else plate:
        return normal(name, loc)


def rows(loc, name="y", plate=None):
    with plate or pyro.plate("obs", loc.shape[-1]):
        return normal(name, loc, obs=torch.zeros(loc.shape))


def county_plate():
    return pyro.plate("county", COUNTIES)


def obs_plate():
    return pyro.plate("obs", ROWS)


# Ways to read through an index: name -> (model, the maps it is written with).
READ = {}
# Ways to read another plate that are no index map.
NOT_READ = {}


def idiom(**maps):
    def register(model):
        READ[model.__name__] = model, {tuple(key.split("__")): index for key, index in maps.items()}
        return model

    return register


def no_map(model):
    NOT_READ[model.__name__] = model
    return model


@idiom(obs__county=COUNTY)
def indexed():
    rows(effects(loc=normal("mu"))[COUNTY])


@idiom(obs__county=torch.full((ROWS,), 2))
def all_rows_read_the_same_instance():
    """As those of a minibatch may do; others of the same model will not."""
    rows(effects()[torch.full((ROWS,), 2)])


@idiom(obs__county=COUNTY, obs__day=DAY)
def crossed_effects():
    rows(normal("mu") + effects()[COUNTY] + effects("beta", "day", DAYS)[DAY])


@idiom(obs__county=COUNTY)
def intercept_and_slope_where_most_covariates_are_zero():
    x = (torch.arange(ROWS) % 4 == 0).float()
    county = county_plate()
    rows(effects("alpha", county)[COUNTY] + effects("beta", county)[COUNTY] * x)


FLOOR = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0])


def sites_of_the_rows(*locs):
    with obs_plate():
        for i, loc in enumerate(locs):
            normal(f"y{i}", loc, obs=torch.zeros(ROWS))


@idiom(obs__county=COUNTY)
def slopes_beside_intercepts_of_another_site():
    county = county_plate()
    alpha, beta = effects("alpha", county), effects("beta", county)
    sites_of_the_rows(alpha[COUNTY], beta[COUNTY] * FLOOR)


@idiom(obs__county=COUNTY)
def two_sites_that_read_some_rows_each():
    alpha = effects()
    sites_of_the_rows(alpha[COUNTY] * FLOOR, alpha[COUNTY] * (1 - FLOOR))


@idiom(obs__county=COUNTY)
def two_sites_of_which_one_reads_nothing_in_the_first_rows_and_one_nothing_in_the_last():
    county, late = county_plate(), (torch.arange(ROWS) > 3).float()
    sites_of_the_rows(effects("alpha", county)[COUNTY] * late, effects("beta", county)[COUNTY] * late.flip(0))


@idiom(obs__county=COUNTY)
def rows_that_read_at_some_times():
    alpha = effects()
    with pyro.plate("time", 2, dim=-2), pyro.plate("obs", ROWS, dim=-1):
        normal("y", alpha[COUNTY] * torch.stack([FLOOR, 1 - FLOOR]), obs=torch.zeros(2, ROWS))


@idiom(obs__county=COUNTY, county__state=torch.tensor([1, 0, 1, 1, 0]))
def nested_levels():
    state = effects("gamma", "state", 2)
    rows(effects("alpha", loc=state[torch.tensor([1, 0, 1, 1, 0])])[COUNTY])


STATE = torch.tensor([1, 0, 2, 1, 0])


@idiom(obs__county=COUNTY, county__state=STATE, obs__state=STATE[COUNTY])
def nested_levels_all_read_by_the_rows():
    state = effects("gamma", "state", 3)
    rows(effects("alpha", loc=state[STATE])[COUNTY] + state[STATE[COUNTY]])


@idiom(obs__county=COUNTY)
def gathered():
    rows(effects().gather(0, COUNTY))


@idiom(obs__county=COUNTY)
def index_selected():
    rows(effects().index_select(-1, COUNTY))


@idiom(obs__county=COUNTY)
def one_hot_product():
    rows(F.one_hot(COUNTY, COUNTIES).float() @ effects())


@idiom(obs__county=COUNTY)
def taken_along_a_dim():
    rows(torch.take_along_dim(effects(), COUNTY, 0))


@idiom(obs__county=COUNTY)
def embedded():
    rows(F.embedding(COUNTY, effects().unsqueeze(-1)).squeeze(-1))


@idiom(obs__county=COUNTY)
def discrete_latents():
    with pyro.plate("county", COUNTIES):
        group = pyro.sample("group", dist.Categorical(torch.tensor([0.98, 0.01, 0.01])))
    rows(torch.tensor([-1.0, 0.0, 1.0])[group[COUNTY]])


@idiom(obs__county=COUNTY)
def scale_as_well_as_mean():
    with county_plate():
        alpha = normal("alpha")
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    with pyro.plate("obs", ROWS):
        normal("y", alpha[COUNTY], sigma[COUNTY], obs=torch.zeros(ROWS))


@idiom(obs__county=COUNTY)
def rectified():
    rows(effects()[COUNTY].relu())


@idiom(obs__county=COUNTY)
def a_distribution_without_parameters_of_its_own():
    alpha = effects()
    with pyro.plate("obs", ROWS):
        loc = torch.stack([alpha[COUNTY], alpha[COUNTY] + 1], -1)
        mixture = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(loc, 1.0))
        pyro.sample("y", mixture, obs=torch.zeros(ROWS))


@idiom(obs__county=COUNTY)
def features_in_a_plate_of_their_own():
    with pyro.plate("features", 2, dim=-2):
        with pyro.plate("county", COUNTIES, dim=-1):
            alpha = normal("alpha")
        with pyro.plate("obs", ROWS, dim=-1):
            normal("y", alpha[:, COUNTY], obs=torch.zeros(2, ROWS))


@idiom(unit__group=COUNTY)
def rows_in_two_plates_that_read_along_one():
    alpha = effects(plate="group")
    with pyro.plate("time", 3, dim=-2), pyro.plate("unit", ROWS, dim=-1):
        normal("y", alpha[COUNTY], obs=torch.zeros(3, ROWS))


@idiom(obs__county=COUNTY)
def vector_effects():
    with pyro.plate("county", COUNTIES):
        alpha = pyro.sample("alpha", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    rows(alpha[COUNTY, 0] + alpha[COUNTY, 1] * torch.arange(ROWS))


@idiom(obs__county=COUNTY)
def latent_rows():
    alpha = effects()
    with obs_plate():
        normal("y", normal("z", alpha[COUNTY]), obs=torch.zeros(ROWS))


@idiom(obs__county=COUNTY)
def segment_means_read_back():
    county = county_plate()
    alpha = effects("alpha", county)
    with obs_plate():
        z = normal("z", alpha[COUNTY])
    rows(torch.zeros(COUNTIES).index_add(0, COUNTY, z), "s", county)


@idiom(obs__county=COUNTY[:1])
def one_row():
    rows(effects()[COUNTY[:1]])


@no_map
def mean():
    alpha = effects()
    rows(alpha.mean() + torch.arange(1.0 * ROWS))


@no_map
def two_instances():
    alpha = effects()
    rows(alpha[COUNTY] - alpha[(COUNTY + 1) % COUNTIES])


@no_map
def the_larger_of_two_instances():
    alpha = effects()
    rows(torch.maximum(alpha[COUNTY], alpha[(COUNTY + 1) % COUNTIES]))


@no_map
def one_of_two_instances_by_the_value_of_one():
    alpha = effects()
    rows(torch.where(alpha[COUNTY] > 0, alpha[COUNTY], alpha[(COUNTY + 1) % COUNTIES]))


@no_map
def a_mixture_by_local_categories():
    mu = effects("mu", "component", 3)
    with pyro.plate("obs", 4):
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.8, 0.1, 0.1])))
        normal("y", mu[z], obs=torch.zeros(4))


@no_map
def a_mixture_of_two_by_two_categories_that_are_nearly_sure():
    mu = effects("mu", "component", 2)
    with pyro.plate("obs", 2):
        z = pyro.sample("z", dist.Bernoulli(torch.tensor([0.001, 0.999])))
        normal("y", mu[z.long()], obs=torch.zeros(2))


@no_map
def an_index_that_categories_that_are_all_but_sure_add_to():
    mu = effects("mu", "component", 4)
    with pyro.plate("obs", 4):
        z = pyro.sample("z", dist.Categorical(logits=torch.tensor([20.0, 0.0, 0.0, 0.0]).expand(4, 4)))
        normal("y", mu[(torch.arange(4) + z) % 4], obs=torch.zeros(4))


@no_map
def an_index_by_the_sign_of_a_local_latent():
    mu = effects("mu", "component", 2)
    with pyro.plate("obs", 3):
        normal("y", mu[(normal("b") > 0).long()], obs=torch.zeros(3))


@no_map
def the_map_differs_along_a_second_plate():
    alpha = effects()
    with pyro.plate("time", 2, dim=-2), pyro.plate("obs", ROWS, dim=-1):
        normal("y", torch.stack([alpha[COUNTY], alpha[COUNTY.flip(0)]]), obs=torch.zeros(2, ROWS))


@no_map
def two_sites_with_different_maps():
    alpha = effects()
    with pyro.plate("obs", ROWS):
        normal("y", alpha[COUNTY], obs=torch.zeros(ROWS))
        normal("w", alpha[COUNTY.flip(0)], obs=torch.zeros(ROWS))


@no_map
def rows_that_read_nothing():
    rows(effects()[COUNTY] * FLOOR)


@no_map
def rows_that_read_nothing_at_any_site():
    county, some = county_plate(), FLOOR * (torch.arange(ROWS) > 3)
    sites_of_the_rows(effects("alpha", county)[COUNTY] * FLOOR, effects("beta", county)[COUNTY] * some)


@no_map
def rows_that_read_nothing_at_any_time():
    alpha = effects()
    with pyro.plate("time", 2, dim=-2), pyro.plate("obs", ROWS, dim=-1):
        normal("y", alpha[COUNTY] * torch.stack([FLOOR, FLOOR]), obs=torch.zeros(2, ROWS))


@no_map
def rows_that_read_different_instances_at_some_times():
    """The third row does at the first time."""
    alpha, other = effects(), (COUNTY + (torch.arange(ROWS) == 2)) % COUNTIES
    with pyro.plate("time", 2, dim=-2), pyro.plate("obs", ROWS, dim=-1):
        normal("y", torch.stack([alpha[other], alpha[COUNTY] * (1 - FLOOR)]), obs=torch.zeros(2, ROWS))


@no_map
def slopes_read_elsewhere_than_intercepts():
    county = county_plate()
    alpha, beta = effects("alpha", county), effects("beta", county)
    sites_of_the_rows(alpha[COUNTY], beta[(COUNTY + 1) % COUNTIES] * FLOOR)


@no_map
def slopes_of_which_some_rows_read_two():
    county = county_plate()
    alpha, beta = effects("alpha", county), effects("beta", county)
    sites_of_the_rows(alpha[COUNTY], (beta[COUNTY] - beta[(COUNTY + 1) % COUNTIES]) * FLOOR)


@no_map
def a_second_site_reads_all_instances():
    alpha = effects()
    with pyro.plate("obs", ROWS):
        normal("y", alpha[COUNTY], obs=torch.zeros(ROWS))
        normal("w", alpha.mean(), obs=torch.zeros(ROWS))


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
def constant_along_one_plate_of_many_rows_and_one_of_a_single_row():
    alpha = effects()
    with pyro.plate("time", 1, dim=-2), pyro.plate("obs", ROWS, dim=-1):
        normal("y", alpha[2].expand(1, ROWS), obs=torch.zeros(1, ROWS))


def two_ways_to_the_same_plate_that_disagree():
    """Students in classrooms in schools, and students in clubs in schools, other ones."""
    school = effects("school", "schools", 2)
    classroom = effects("classroom", "classrooms", 4, school[torch.tensor([0, 1, 0, 1])])
    club = effects("club", "clubs", 3, school[torch.tensor([0, 1, 1])])
    rows(classroom[torch.tensor([0, 1, 2, 3, 0])] + club[torch.tensor([0, 1, 2, 0, 1])])


def written(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return extract(model)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", READ)
def test_the_map_found_is_the_index_the_model_was_written_with(name, seed):
    model, maps = READ[name]
    pyro.set_rng_seed(seed)
    found = written(model)
    assert found.index_maps.keys() == maps.keys()
    assert all(torch.equal(found.index_maps[key], index) for key, index in maps.items())
    for inner, outer in maps:
        assert outer in found.bayesnet.nesting[inner]
        assert {(plan.plate, q) for plan in found.map_plans for q in plan.dims} == {(p, q) for q, p in maps}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_no_index_map_is_read_whole(name, seed):
    pyro.set_rng_seed(seed)
    found = written(NOT_READ[name])
    assert not found.index_maps and not found.map_plans and not found.bayesnet.nesting


@pytest.mark.parametrize("seed", range(20))
def test_a_few_rows_are_tested_again_and_again(seed):
    """At other values two signs are the same in a quarter of cases."""

    def model():
        mu = effects("mu", "component", 2)
        with pyro.plate("obs", 2):
            normal("y", mu[(torch.arange(2) + (normal("b") > 0)) % 2], obs=torch.zeros(2))

    pyro.set_rng_seed(seed)
    assert not extract(model).index_maps


@pytest.mark.parametrize("seed", range(10))
def test_values_that_move_no_row_are_tried_again(seed):
    pyro.set_rng_seed(seed)
    assert torch.equal(extract(rectified).index_maps["obs", "county"], COUNTY)


def test_effects_of_one_plate_stay_apart_given_the_globals_and_crossed_ones_are_coupled():
    alone = nami(extract(indexed).bayesnet, direction="reverse")
    assert not any(alone.joint.values()) and "y" in alone.parents["alpha"]
    crossed = nami(extract(crossed_effects).bayesnet, direction="reverse")
    assert sum(map(bool, crossed.joint.values())) == 1


def test_plates_are_closed_along_a_chain_of_maps():
    net = extract(nested_levels).bayesnet
    assert net.plates["y"] == {"obs", "county", "state"} and net.num_instances(net.plates["y"]) == ROWS
    assert net.plates["alpha"] == {"county", "state"}


def test_ways_that_disagree_are_dropped_and_with_them_only_what_is_on_them():
    maps = extract(two_ways_to_the_same_plate_that_disagree).index_maps
    assert not maps


def test_a_map_beside_ones_that_are_dropped_is_kept():
    def model():
        alpha, beta = effects(), effects("beta", "day", DAYS)
        rows(alpha.mean() + beta[DAY])

    found = extract(model)
    assert found.index_maps.keys() == {("obs", "day")} and found.bayesnet.plates["y"] == {"obs", "day"}


URANIUM = torch.linspace(-1, 1, COUNTIES)


def with_an_observed_site_of_the_county(u, read):
    county = county_plate()
    with county:
        normal("x", obs=u)
        alpha = normal("alpha")
    rows(alpha[COUNTY] + read(u))


@pytest.mark.parametrize(("read", "nested"), [(lambda u: u[COUNTY], True), (lambda u: u.mean(), False)])
def test_observed_sites_of_the_plate_are_read_through_the_same_map_or_there_is_none(read, nested):
    found = extract(with_an_observed_site_of_the_county, (URANIUM, read))
    assert ("x", "y") in found.bayesnet.edges and bool(found.index_maps) == nested


def test_data_that_cannot_be_changed_counts_as_read_whole():
    found = extract(lambda: with_an_observed_site_of_the_county(URANIUM, lambda u: u[COUNTY]))
    assert ("x", "y") in found.bayesnet.edges and not found.index_maps


def test_a_site_with_hidden_randomness_is_not_nested_with_what_it_may_read():
    def model():
        alpha = effects()
        with obs_plate():
            normal("y", alpha[COUNTY], obs=torch.zeros(ROWS))
            normal("w", alpha[COUNTY] + torch.randn(ROWS), obs=torch.zeros(ROWS))

    with pytest.warns(UserWarning, match="Hidden randomness"):
        assert not extract(model).index_maps


def test_subsampled_rows_are_mapped_as_drawn():
    def model():
        alpha = effects()
        with pyro.plate("obs", ROWS, subsample_size=4) as index:
            normal("y", alpha[COUNTY[index]], obs=torch.zeros(4))

    found = extract(model)
    assert torch.equal(found.index_maps["obs", "county"], COUNTY[found.trace.nodes["obs"]["value"]])


def test_random_numbers_are_left_alone():
    state = torch.get_rng_state()
    found = extract(crossed_effects)
    find_maps(runner(crossed_effects), found.map_plans, held(found))
    maps_hold(runner(crossed_effects), found.map_plans, held(found), found.index_maps)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_checks_no_map_is_looked_for():
    assert written(lambda: indexed()).index_maps
    found = extract(indexed, checks=0)
    assert not found.index_maps and not found.bayesnet.nesting


@pytest.mark.parametrize("checks", [6, 12, 20, 27])
def test_a_budget_that_ends_during_the_search_is_kept_and_reported(checks):
    runs = 0

    def model():
        nonlocal runs
        runs += 1
        crossed_effects()

    with pytest.warns(UserWarning, match=f"index map: the budget of {checks} runs"):
        found = extract(model, checks=checks)
    assert runs <= checks + 5
    assert found.bayesnet.nesting.get("obs", frozenset()) == {p for _, p in found.index_maps}
    assert all(
        torch.equal(index, {"county": COUNTY, "day": DAY}[p]) for (_, p), index in found.index_maps.items()
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
    maps = find_maps(runner(of_any_size, county, day, counties, days, log=log), found.map_plans, held(found))
    assert torch.equal(maps["obs", "county"], county) and torch.equal(maps["obs", "day"], day)
    assert len(log) == sum(2 * (n - 1).bit_length() + 1 for n in (counties, days))


@pytest.mark.parametrize("size", [0, 1, 4])
def test_an_empty_plate_has_an_empty_map(size):
    """Pyro makes no plate without instances, so the run is written by hand."""

    def run(values):
        alpha = values["alpha"].expand(size)
        messages = {"alpha": dist.Normal(torch.zeros(size), 1.0), "y": dist.Normal(alpha[:0], 1.0)}
        return {
            name: {"fn": fn, "value": fn.mean, "mask": None, "scale": 1.0} for name, fn in messages.items()
        }

    plan = MapPlan("county", -1, {"alpha": (torch.zeros(1), torch.ones(1))}, {"y": "obs"}, {"obs": -1})
    maps = find_maps(run, [plan], {})
    assert maps.keys() == {("obs", "county")} and maps["obs", "county"].shape == (0,)
    assert maps_hold(run, [plan], {}, maps)


@pytest.mark.parametrize("name", READ)
def test_plans_of_every_idiom_find_what_was_found(name):
    model, maps = READ[name]
    found = extract(model)
    again = find_maps(runner(model), found.map_plans, held(found))
    assert again.keys() == maps.keys() and all(torch.equal(again[key], maps[key]) for key in maps)
    assert maps_hold(runner(model), found.map_plans, held(found), again)


def test_a_row_that_reads_two_instances_in_a_later_call_is_an_error(found):
    def model(*args):
        alpha, mu = None, normal("mu")
        alpha = effects(loc=mu)
        both = alpha[COUNTY] + torch.where(torch.arange(ROWS) == 6, alpha[4], 0.0)
        rows(both + effects("beta", "day", DAYS)[DAY])

    with pytest.raises(
        ValueError, match=r"'y' to read 'alpha' of plate 'county' .* row 6 .* reads several. .* new"
    ):
        find_maps(runner(model), found.map_plans, held(found))


def test_a_row_that_reads_no_instance_in_a_later_call_is_an_error(found):
    def model(*args):
        alpha = effects(loc=normal("mu")) * 0.0
        rows(alpha[COUNTY] + effects("beta", "day", DAYS)[DAY])

    with pytest.raises(
        ValueError, match=r"'alpha' of plate 'county' .* row 0 of plate 'obs', which reads none"
    ):
        find_maps(runner(model), found.map_plans, held(found))


def radon(county, floor, counties=COUNTIES):
    plate = pyro.plate("county", counties)
    alpha, beta = effects("alpha", plate, loc=normal("mu")), effects("beta", plate)
    rows(alpha[..., county] + beta[..., county] * floor)


def slopes_apart(county, floor, counties=COUNTIES, beta_county=None):
    """As `radon`, but a site of their own reads the slopes."""
    plate = pyro.plate("county", counties)
    alpha, beta = effects("alpha", plate, loc=normal("mu")), effects("beta", plate)
    with pyro.plate("obs", len(county)):
        normal("y", alpha[..., county], obs=torch.zeros(len(county)))
        slope = beta[..., county if beta_county is None else beta_county]
        normal("w", slope * floor, obs=torch.zeros(len(county)))


@pytest.mark.parametrize("at_first", [FLOOR, torch.ones(ROWS)], ids=["zeros at first", "none at first"])
@pytest.mark.parametrize("model", [radon, slopes_apart], ids=lambda model: model.__name__)
def test_zeros_among_covariates_cost_no_run_more(model, at_first):
    found = extract(model, (COUNTY, at_first))
    assert torch.equal(found.index_maps["obs", "county"], COUNTY)
    county, floor, log = torch.randint(85, (919,)), (torch.rand(919) < 0.2).float(), []
    maps = find_maps(runner(model, county, floor, 85, log=log), found.map_plans, held(found))
    assert torch.equal(maps["obs", "county"], county) and len(log) == 2 * (85 - 1).bit_length() + 1
    log.clear()
    assert maps_hold(runner(model, county, floor, 85, log=log), found.map_plans, held(found), maps)
    assert len(log) == 4


def test_zeros_hide_neither_another_map_nor_another_instance_in_a_later_call():
    found = extract(slopes_apart, (COUNTY, FLOOR))
    run = runner(slopes_apart, COUNTY, FLOOR, COUNTIES, (COUNTY + 1) % COUNTIES)
    with pytest.raises(
        ValueError, match="'w' to read 'alpha' and 'beta' .* differs from that of another site"
    ):
        find_maps(run, found.map_plans, held(found))
    assert not maps_hold(run, found.map_plans, held(found), found.index_maps)


def test_rows_that_read_nothing_at_any_site_in_a_later_call_are_an_error():
    found = extract(two_sites_that_read_some_rows_each)

    def model():
        alpha = effects()
        sites_of_the_rows(alpha[COUNTY] * FLOOR, alpha[COUNTY] * 0.0)

    with pytest.raises(ValueError, match="row 0 of plate 'obs', which reads none"):
        find_maps(runner(model), found.map_plans, held(found))
    assert not maps_hold(runner(model), found.map_plans, held(found), found.index_maps)


def test_maps_that_no_longer_hold_are_noticed_in_a_few_runs(found):
    log = []
    run = runner(of_any_size, *FIRST, log=log)
    maps = found.index_maps
    assert maps_hold(run, found.map_plans, held(found), maps) and len(log) <= 4 * len(found.map_plans)
    for other in (
        {**maps, ("obs", "county"): (COUNTY + 1) % COUNTIES},
        {**maps, ("obs", "day"): DAY.flip(0)},
        {**maps, ("obs", "county"): COUNTY[:-1]},
        {**maps, ("obs", "county"): COUNTY + COUNTIES},
    ):
        assert not maps_hold(run, found.map_plans, held(found), other)


def test_maps_into_a_plate_of_one_instance_hold_by_themselves(found):
    zeros = torch.zeros(ROWS, dtype=torch.long)
    run = runner(of_any_size, zeros, zeros, 1, 1)
    assert maps_hold(run, found.map_plans, held(found), {("obs", "county"): zeros, ("obs", "day"): zeros})


def test_small_changes_of_the_mean_are_seen_where_the_log_density_absorbs_them():
    def model():
        alpha = effects()
        with pyro.plate("obs", ROWS):
            normal("y", alpha[COUNTY] * 1e-6, obs=torch.full((ROWS,), 1e5))

    assert torch.equal(extract(model).index_maps["obs", "county"], COUNTY)


# Maps that the user gives


def test_a_given_map_is_used_without_a_run():
    runs = 0

    def model():
        nonlocal runs
        runs += 1
        indexed()

    plain = extract(model, checks=0)
    before, runs = runs, 0
    found = extract(model, checks=0, index_maps={("alpha", "y"): COUNTY.int()})
    assert runs == before and not plain.index_maps
    assert torch.equal(found.index_maps["obs", "county"], COUNTY)
    assert [plan.targets for plan in found.map_plans] == [{"y": "obs"}]
    assert found.bayesnet.plates["y"] == {"obs", "county"}


def test_a_given_map_goes_with_one_that_is_found():
    found = extract(crossed_effects, index_maps={("alpha", "y"): COUNTY})
    assert torch.equal(found.index_maps["obs", "county"], COUNTY)
    assert torch.equal(found.index_maps["obs", "day"], DAY)
    assert sorted(plan.plate for plan in found.map_plans) == ["county", "day"]


def test_a_given_map_stands_where_testing_shows_nothing():
    def model():
        rows(effects()[COUNTY] * (torch.arange(ROWS) > 3))

    assert not extract(model).index_maps
    found = extract(model, index_maps={("alpha", "y"): COUNTY})
    assert torch.equal(found.index_maps["obs", "county"], COUNTY)


@pytest.mark.parametrize(
    ("pair", "index", "kind", "error"),
    [
        (("alpha", "y"), COUNTY + 1, ValueError, "points outside plate 'county': got 5 in row 0"),
        (("alpha", "y"), COUNTY - 1, ValueError, "points outside plate 'county': got -1 in row 1"),
        (
            ("alpha", "y"),
            COUNTY.float(),
            TypeError,
            r"\('alpha', 'y'\) to be a tensor of integers; got torch.float32",
        ),
        (("alpha", "y"), COUNTY > 1, TypeError, "integers; got torch.bool"),
        (("alpha", "y"), COUNTY.tolist(), TypeError, "integers; got list"),
        (("alpha", "y"), COUNTY[:, None], ValueError, "one dim"),
        (("alpha", "y"), COUNTY[:-1], ValueError, "length of one plate of 'y' .* got 10 rows"),
        (("gamma", "y"), COUNTY, ValueError, "'gamma' is no latent"),
        (("y", "y"), COUNTY, ValueError, "'y' is no latent"),
        (("alpha", "w"), COUNTY, ValueError, "'w' is no sample site"),
        (("mu", "y"), COUNTY, ValueError, "'mu' in one plate that 'y' is not in"),
    ],
)
def test_errors_of_given_maps(pair, index, kind, error):
    with pytest.raises(kind, match=error):
        extract(indexed, index_maps={pair: index})


def test_given_maps_that_disagree_are_an_error():
    def model():
        county = county_plate()
        rows(effects("alpha", county)[COUNTY] + effects("beta", county)[COUNTY])

    with pytest.raises(ValueError, match="different ones for .*'alpha'.* and .*'beta'"):
        extract(model, index_maps={("alpha", "y"): COUNTY, ("beta", "y"): COUNTY.flip(0)})
    with pytest.raises(
        ValueError, match=r"given for \('alpha', 'y'\); got instance 4 in row 0, where the map has 3"
    ):
        extract(model, index_maps={("alpha", "y"): COUNTY.flip(0)})  # beta is tested


@pytest.mark.parametrize(
    "read",
    [
        lambda alpha, beta: beta[COUNTY.flip(0)] * FLOOR,
        lambda alpha, beta: beta.mean() + torch.zeros(ROWS),
        lambda alpha, beta: alpha.mean() + torch.zeros(ROWS),
    ],
    ids=["other rows", "all of another latent", "all of the same latent"],
)
def test_a_given_map_is_an_error_where_another_site_of_the_rows_reads_other_instances(read):
    def model():
        county = county_plate()
        alpha, beta = effects("alpha", county), effects("beta", county)
        sites_of_the_rows(alpha[COUNTY], read(alpha, beta))

    with pytest.raises(ValueError, match=r"'y1' to read plate 'county' .* given for .*\('alpha', 'y0'\)"):
        extract(model, index_maps={("alpha", "y0"): COUNTY})


def test_a_given_map_serves_rows_of_other_sites_that_read_nothing():
    found = extract(slopes_beside_intercepts_of_another_site, index_maps={("alpha", "y0"): COUNTY})
    assert torch.equal(found.index_maps["obs", "county"], COUNTY)


def test_routes_compose_maps_and_end_on_a_cycle():
    maps = {
        ("a", "b"): torch.tensor([1, 0, 1]),
        ("b", "c"): torch.tensor([5, 7]),
        ("c", "a"): torch.zeros(8).long(),
    }
    found = {(len(route.maps), route.end): route.rows.tolist() for route in routes(maps, "a")}
    assert found == {(1, "b"): [1, 0, 1], (2, "c"): [7, 5, 7], (3, "a"): [0, 0, 0]}


def test_a_checked_map_is_long():
    assert check_map(("alpha", "y"), COUNTY.to(torch.int16), "county", COUNTIES).dtype == torch.long
    assert check_map(("alpha", "y"), COUNTY[:0], "county", 0).shape == (0,)


def test_a_plan_names_what_it_changes():
    (plan,) = extract(features_in_a_plate_of_their_own).map_plans
    assert isinstance(plan, MapPlan) and (plan.plate, plan.dim) == ("county", -1)
    assert plan.targets == {"y": "obs"} and plan.dims == {"obs": -1}
    first, second = plan.values["alpha"]
    assert first.shape == second.shape == (1, 1) and (first != second).all()
