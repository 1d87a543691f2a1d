"""`Surroundings`: what a model reads besides its arguments is put back as it was, wherever the model reads it."""

import functools
import types

import pytest
import torch
from torch import nn

from pyro_nami.program.surroundings import MOST_PLACES, Surroundings

GLOBAL = torch.tensor(1.0)


class Holder:
    def __init__(self):
        self.x = torch.tensor(1.0)

    def model(self):
        return float(self.x)

    def through_a_method(self):
        return self.model()


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.x = torch.tensor(1.0)
        self.register_buffer("kept", torch.tensor(1.0))
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self):
        return float(self.x), float(self.kept), float(self.weight)


def in_a_global():
    def change():
        global GLOBAL
        GLOBAL = GLOBAL + 1

    return lambda: float(GLOBAL), change, (), 1.0


def in_a_closure():
    x = torch.tensor(1.0)

    def change():
        nonlocal x
        x = None

    return lambda: float(x), change, (), 1.0


def in_a_dict():
    data = {"x": torch.tensor(1.0)}
    return lambda: float(data["x"]), lambda: data.pop("x"), (), 1.0


def in_a_list_of_a_dict():
    data = {"x": [torch.tensor(1.0)]}
    return lambda: float(data["x"][0]), lambda: data.update(x=[torch.tensor(2.0)]), (), 1.0


def in_an_object():
    held = Holder()
    return held.model, lambda: setattr(held, "x", torch.tensor(2.0)), (), 1.0


def in_a_method_of_an_object():
    held = Holder()
    return held.through_a_method, lambda: setattr(held, "x", torch.tensor(2.0)), (), 1.0


def in_an_argument():
    held = types.SimpleNamespace(x=torch.tensor(1.0))
    held.part = Holder()

    def change():
        held.x, held.part.x = held.x + 1, held.part.x + 1

    return lambda held: float(held.x + held.part.x), change, (held,), 2.0


def written_to():
    x = torch.tensor(1.0)
    return lambda: float(x), lambda: x.add_(1.0), (), 1.0


def through_a_partial():
    held = Holder()
    model = functools.partial(lambda held, scale: scale * float(held.x), held, scale=2.0)
    return model, lambda: setattr(held, "x", torch.tensor(2.0)), (), 2.0


def with_a_number():
    data = {"x": torch.ones(3), "n": 3}
    model = lambda: (float(data["x"].sum()), data["n"])  # noqa: E731
    return model, lambda: data.update(x=torch.ones(5), n=5), (), (3.0, 3)


def in_a_module():
    module = Module()

    def change():
        module.x, module.kept = torch.tensor(2.0), torch.tensor(2.0)
        module.weight.data.add_(1.0)

    return module, change, (), (1.0, 1.0, 2.0)  # a parameter is learned, and stays what it is


@pytest.mark.parametrize(
    "make",
    [
        in_a_global,
        in_a_closure,
        in_a_dict,
        in_a_list_of_a_dict,
        in_an_object,
        in_a_method_of_an_object,
        in_an_argument,
        written_to,
        through_a_partial,
        with_a_number,
        in_a_module,
    ],
)
def test_a_model_reads_what_it_read_then(make):
    model, change, args, expected = make()
    then = Surroundings([model, *args])
    assert then.are_current() and then.now() is then
    change()
    assert not then.are_current()
    assert then.around(model)(*args) == expected
    now = then.now()  # what is there in between is back
    assert not then.are_current() and now.are_current() and now is not then


def test_numbers_alone_are_taken_for_counters():
    count = {"runs": 0}

    def model():
        count["runs"] += 1

    then = Surroundings([model])
    model()
    assert then.are_current() and then.now() is not then


def test_code_of_libraries_is_not_looked_into():
    def model():
        return torch.nn.functional.relu(torch.zeros(2))

    assert len(Surroundings([model])._places) == 0


def test_no_more_places_are_looked_at_than_pays():
    data = [torch.tensor(float(i)) for i in range(2 * MOST_PLACES)]
    assert len(Surroundings([lambda: data])._places) == MOST_PLACES


def test_what_an_error_interrupts_is_put_back():
    data = {"x": torch.tensor(1.0)}

    def model():
        raise KeyError(float(data["x"]))

    then = Surroundings([model])
    data["x"] = torch.tensor(2.0)
    with pytest.raises(KeyError, match=r"1\.0"):
        then.around(model)()
    assert float(data["x"]) == 2.0


def test_what_a_model_writes_itself_does_not_count():
    data = {"x": torch.tensor(1.0), "latest": None}

    def model():
        data["latest"] = 2 * data["x"]

    before = Surroundings([model])
    model()
    then = Surroundings([model], before.written())
    model()
    assert then.are_current()
    data["x"] = torch.tensor(2.0)
    assert not then.are_current()
