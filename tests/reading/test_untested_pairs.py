"""Plans of group tests: every pair is tested, by few runs, and none is counted whose parents were changed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pyro_nami.reading.untested_pairs import Untested


def chain(count):
    return np.eye(count, k=-1, dtype=bool)


def star(count):
    held = np.zeros((count, count), dtype=bool)
    held[1:, 0] = True
    return held


def sparse(count):
    return np.tril(np.random.default_rng(0).random((count, count)) < 3 / count, -1)


@pytest.mark.parametrize("make, most", [(chain, 25), (star, 3), (sparse, 90)])
def test_every_pair_is_tested_once_by_few_runs(make, most):
    random.seed(0)
    held = make(200)
    wanted = np.tril(np.ones((200, 200), dtype=bool), -1) & ~held
    untested, tested, runs = Untested(held, wanted.astype(int)), np.zeros_like(wanted), 0
    while untested.sites.any():
        changed = untested.plan()
        for site in untested.test(changed):
            assert not (held[site] & changed).any()
            tested[site] |= changed
        runs += 1
    assert (tested >= wanted).all() and runs <= most


def test_what_is_worth_more_goes_first():
    held, worth = chain(50), np.tril(np.ones((50, 50), dtype=int), -1)
    worth[30, :30] *= 100
    untested = Untested(held, worth)
    assert 30 in untested.test(untested.plan())
    assert not untested.sites[30]


def test_what_is_held_from_now_on_needs_no_test():
    untested = Untested(chain(4), np.tril(np.ones((4, 4), dtype=int), -1))
    untested.hold(3, [True, True, True, False])
    assert untested.sites.tolist() == [False, False, True, False]
