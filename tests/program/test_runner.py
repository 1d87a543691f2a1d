"""Running a model out of sight."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import local_normals
from pyro import poutine

from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner


def test_handlers_outside_see_nothing():
    with poutine.trace() as outer:
        Runner({}).run(local_normals, (torch.zeros(3),), {})
    assert not outer.trace.nodes


def test_values_are_taken_and_expanded():
    sites = Runner({"z": torch.ones(1)}, broadcast=True).run(local_normals, (torch.zeros(3),), {})
    assert torch.equal(sites["z"]["value"], torch.ones(3)) and sites["y"]["is_observed"]


def test_a_run_ends_behind_the_last_site_that_it_is_made_for():
    def failing(y):
        local_normals(y)
        raise AssertionError("ran on")

    sites = Runner({}, until=["mu", "z"]).run(failing, (torch.zeros(3),), {})
    assert "z" in sites and "y" not in sites
    assert not pyro.poutine.runtime._PYRO_STACK


def test_plates_take_their_own_dims_inside_others():
    with pyro.plate("outer", 5, dim=-1):
        sites = Runner({}).run(local_normals, (torch.zeros(3),), {})
    assert sites["z"]["value"].shape == (3,)


def test_there_are_no_draws_where_a_site_cannot_be_drawn():
    class Undrawn(dist.Normal):
        def __call__(self, *args, **kwargs):
            raise NotImplementedError

    assert Program(lambda: pyro.sample("z", Undrawn(0.0, 1.0)), (), {}).prior_draws(4) == []
    assert len(Program(local_normals, (torch.zeros(3),), {}).prior_draws(4)) == 4


def test_numbers_stand_for_draws_of_an_improper_prior_but_where_draws_are_needed():
    def improper():
        pyro.sample("z", dist.ImproperUniform(dist.constraints.real, (), ()))

    assert len({draw["z"].item() for draw in Program(improper, (), {}).prior_draws(4)}) == 4
    runner = Runner({})
    runner.is_sampling = True
    with pytest.raises(NotImplementedError):
        runner.run(improper, (), {})


def test_draws_at_which_the_model_fails_are_left_out():
    def failing():
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.factor("f", (1e3 * z.clamp(min=0.0)).exp() * 0.0)

    draws = Program(failing, (), {}).prior_draws(40)
    assert 5 < len(draws) < 35 and all(draw["z"] < 0.1 for draw in draws)


def test_a_model_that_fails_at_every_draw_is_told_of():
    def failing():
        z = pyro.sample("z", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        z @ torch.zeros(4)

    with pytest.warns(UserWarning, match="fails at every one of 4 draws.*RuntimeError"):
        assert Program(failing, (), {}).prior_draws(4) == []


def test_a_reference_value_of_another_event_shape_names_the_site():
    def vector(n):
        pyro.sample("v", dist.Normal(torch.zeros(n), 1.0).to_event(1))

    with pytest.raises(ValueError, match="site 'v' of event shape"):
        Runner({"v": torch.zeros(2)}, broadcast=True).run(vector, (3,), {})
