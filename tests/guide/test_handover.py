"""`hand_over`: an optimizer of torch goes on with the parameters that take the place of those that it knows."""

import gc

import pytest
import torch
from torch.nn import Parameter

from pyro_nami.guide import known_parameters
from pyro_nami.guide.known_parameters import hand_over


def pair(*sizes):
    return [Parameter(torch.ones(size)) for size in sizes]


def stepped(optimizer, parameters):
    optimizer.zero_grad()
    loss = sum(each.square().sum() for each in parameters)
    loss.backward()
    optimizer.step(None if not isinstance(optimizer, torch.optim.LBFGS) else lambda: float(loss))


@pytest.mark.parametrize(
    "make",
    [
        lambda given: torch.optim.Adam(given, lr=0.1),
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
        lambda given: torch.optim.LBFGS(given, lr=0.1, max_iter=1),
    ],
    ids=["Adam", "SGD", "LBFGS"],
)
def test_new_parameters_move_and_others_stay_known(make):
    old, kept = pair(2, 3), pair(1)
    optimizer = make([*old, *kept])
    stepped(optimizer, [*old, *kept])
    new = pair(5)
    hand_over(old, new)
    stepped(optimizer, [*new, *kept])
    assert (new[0] < 1).all() and (kept[0] < 1).all()
    known = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(known) == sorted(map(id, [*new, *kept])) and not set(old) & set(optimizer.state)


def test_two_guides_may_share_an_optimizer():
    first, second = pair(2), pair(3)
    optimizer = torch.optim.Adam([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.2}])
    others = pair(4), pair(5)
    hand_over(first, others[0])
    hand_over(second, others[1])
    stepped(optimizer, [*others[0], *others[1]])
    rates = [1 - float(each[0][0]) for each in others]
    assert rates == pytest.approx([0.1, 0.2], abs=1e-5)  # Adam's first step is its rate


def test_nothing_waits_for_parameters_that_are_gone_or_have_been_replaced():
    before = len(known_parameters._heirs)
    old, new = pair(2), pair(2)
    hand_over(old, new)
    assert len(known_parameters._heirs) == before + 1
    del old
    gc.collect()
    assert len(known_parameters._heirs) == before
    old = pair(2)
    optimizer = torch.optim.SGD([*old, *new], lr=0.1)  # which knows the new ones, too
    hand_over(old, new)
    stepped(optimizer, new)
    assert len(known_parameters._heirs) == before
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [id(new[0])]
