"""Sites of a loop held as one: values, messages, runs."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami.program.loops import Loops, LoopSites
from pyro_nami.program.program import Program
from pyro_nami.program.runner import Runner


def model(y):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    z = torch.zeros(2)
    for t in range(len(y)):
        z = pyro.sample(f"z_{t}", dist.Normal(z, scale.unsqueeze(-1)).to_event(1))
        pyro.sample(f"y_{t}", dist.Normal(z, 1.0).to_event(1), obs=y[t])


def loops(count):
    states, data = (tuple(f"{stem}_{t}" for t in range(count)) for stem in "zy")
    events = (torch.Size((2,)),) * count
    return Loops(
        (
            LoopSites("z[time]", states, events, False, 2, 3, 2),
            LoopSites("y[time]", data, events, True, reads=tuple(range(0, 2 * count, 2))),
        )
    )


@pytest.fixture
def program():
    return Program(model, (torch.randn(4, 2),), {}, loops(4))


def test_values_go_there_and_back(program):
    values = {
        "scale": torch.ones(()),
        "z[time]": torch.randn(3, 8),
        "y[time]": torch.randn(3, 4, 2),
    }
    apart = program.loops.split(values)
    assert len(apart) == 9
    assert apart["z_1"].shape == apart["y_3"].shape == (3, 2)
    whole = program.loops.joined(apart)
    assert whole.keys() == values.keys()
    assert all(torch.equal(whole[name], values[name]) for name in values)


def test_a_run_has_the_density_of_its_sites(program):
    value = {"scale": torch.tensor([0.5, 2.0]), "z[time]": torch.randn(2, 8)}
    whole = program.run(Runner(value))
    assert list(whole) == ["scale", "z[time]", "y[time]"]
    apart = program._replace(loops=Loops()).run(Runner(program.loops.split(value)))
    for name in ("z", "y"):
        total = sum(
            apart[f"{name}_{t}"]["fn"].log_prob(apart[f"{name}_{t}"]["value"]) for t in range(4)
        )
        site = whole[f"{name}[time]"]
        torch.testing.assert_close(site["fn"].log_prob(site["value"]), total)


def test_a_function_of_the_prior_gives_the_states(program):
    shapes = []

    def make(prior):
        shapes.append((prior.batch_shape, prior.event_shape))
        return torch.arange(8.0)

    sites = program.run(Runner({"z[time]": make, "scale": torch.ones(())}))
    assert shapes == [((), (8,))]
    assert torch.equal(sites["z[time]"]["value"], torch.arange(8.0))


def test_a_run_until_the_states(program):
    assert "z[time]" in program.run(Runner({}, until=["z[time]"]))


def test_a_shorter_loop(program):
    args = (torch.randn(3, 2),)
    sites = program._replace(args=args).run(Runner({"z[time]": torch.arange(8.0)}))
    assert torch.equal(sites["z[time]"]["value"], torch.arange(6.0))
    assert sites["z[time]"]["part"].sites == ("z_0", "z_1", "z_2")


@pytest.mark.parametrize(
    "other", [lambda: dist.StudentT(3.0, 0.0, 1.0), lambda: dist.Normal(0.0, 1.0).mask(False)]
)
def test_states_of_another_kind_are_told(other):
    def changed(is_other):
        for t in range(3):
            pyro.sample(f"z_{t}", other() if is_other and t == 1 else dist.Normal(0.0, 1.0))

    names = tuple(f"z_{t}" for t in range(3))
    one = Loops((LoopSites("z[time]", names, (torch.Size(),) * 3, False),))
    assert "z[time]" in Program(changed, (False,), {}, one).run(Runner({}))
    with pytest.raises(ValueError, match="Expected latent 'z_1' of a Normal"):
        Program(changed, (True,), {}, one).run(Runner({}))
