"""`Surroundings`: what a model reads besides its arguments is put back as it was, wherever the model reads it."""

import functools
import logging
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from pyro_nami.program.surroundings import MOST_ITEMS, Surroundings

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


def under_a_private_name():
    held = types.SimpleNamespace(_x=torch.tensor(1.0))
    return lambda: float(held._x), lambda: setattr(held, "_x", torch.tensor(2.0)), (), 1.0


def in_a_class():
    class Config:
        x = torch.tensor(1.0)

    return lambda: float(Config.x), lambda: setattr(Config, "x", torch.tensor(2.0)), (), 1.0


def in_a_slot():
    class Slotted:
        __slots__ = ("x",)

    held = Slotted()
    held.x = torch.tensor(1.0)
    return lambda: float(held.x), lambda: setattr(held, "x", torch.tensor(2.0)), (), 1.0


def in_an_array_that_is_written_to():
    x = np.ones(3)
    return lambda: float(x.sum()), lambda: x.__setitem__(0, 5.0), (), 3.0


def in_a_tuple_that_is_written_to():
    data = (torch.ones(2), "name")
    return lambda: float(data[0].sum()), lambda: data[0].add_(1.0), (), 2.0


def in_a_list_that_grows():
    data = [torch.tensor(1.0)]
    return lambda: float(sum(data)), lambda: data.append(torch.tensor(2.0)), (), 1.0


def in_a_list_that_shrinks():
    data = [torch.tensor(1.0), torch.tensor(2.0)]
    return lambda: float(sum(data)), data.clear, (), 3.0


def with_the_user_s_buffer():
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("x", torch.tensor(1.0))

        def forward(self):
            return float(self.x)

    module = Kept()
    return module, lambda: setattr(module, "x", torch.tensor(2.0)), (), 1.0


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
        under_a_private_name,
        in_a_class,
        in_a_slot,
        in_an_array_that_is_written_to,
        in_a_tuple_that_is_written_to,
        in_a_list_that_grows,
        in_a_list_that_shrinks,
        with_the_user_s_buffer,
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
    data = [torch.tensor(float(i)) for i in range(2 * MOST_ITEMS)]
    many = {i: [float(j) for j in range(500)] for i in range(500)}
    found = Surroundings([lambda: (data, many)])
    assert len(found._places) <= MOST_ITEMS + 1 and len(found._seen) < 30 * MOST_ITEMS


def test_attributes_that_no_code_of_the_model_names_are_left_alone():
    """As a history of losses beside the model, or the guide itself."""

    class Experiment:
        def __init__(self):
            self.x, self.history = torch.tensor(1.0), torch.zeros(3)
            self.other = Holder()

        def model(self):
            return float(self.x)

        def fit(self):
            self.history[0] = float(self.other.x)

    experiment = Experiment()
    then = Surroundings([experiment.model])
    experiment.fit()
    experiment.other.x = torch.tensor(2.0)
    assert then.are_current()
    experiment.x.add_(1.0)
    assert not then.are_current() and then.around(experiment.model)() == 1.0
    assert float(experiment.x) == 2.0


def test_objects_of_any_kind_are_looked_at_without_an_error():
    class Dead:
        pass

    class Odd:
        @property
        def __dict__(self):
            raise RuntimeError

    class Own(dict):
        def get(self, key):
            return self[key]

    data = [
        weakref.proxy(Dead()),
        Odd(),
        Own(x=torch.ones(2)),
        threading.Lock(),
        logging.getLogger("x"),
        (i for i in range(3)),
        torch.Generator(),
        torch.eye(3).to_sparse(),
        np.float64(1.0),
        np.ma.masked_array([1.0, 2.0], mask=[True, False]),
        nn.LazyLinear(3),
    ]
    with torch.inference_mode():
        data.append(torch.ones(3))
    then = Surroundings([lambda: data])
    assert then.are_current() and then.now() is then
    data.pop()
    assert len(then.around(lambda: list(data))()) == 12 and len(data) == 11


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
    then = Surroundings([model], before.changed())
    model()
    assert then.are_current()
    data["x"] = torch.tensor(2.0)
    assert not then.are_current()
