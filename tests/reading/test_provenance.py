"""The tracker against sources that are known for every element of a result."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from pyro_nami.reading.provenance import ProvenanceTracker, tensors_in

TABLE = torch.arange(12.0).reshape(3, 4)

# Name -> a function of two sources (a of shape (3,), b scalar) and the names that reach its result.
RESULTS = {
    "arithmetic": (lambda a, b: a * 2 + b, "ab"),
    "only_one": (lambda a, b: a.exp(), "a"),
    "reduction": (lambda a, b: (TABLE.T @ a).sum(), "a"),
    "einsum": (lambda a, b: torch.einsum("i,ij->j", a, TABLE) + b, "ab"),
    "where": (lambda a, b: torch.where(b > 0, TABLE[0], 0.0), "b"),
    "gather": (lambda a, b: TABLE.gather(1, a.abs().long()[:, None]), "a"),
    "integer_index": (lambda a, b: TABLE[b.long()], "b"),
    "integer_index_of_source": (lambda a, b: a[b.long()], "ab"),
    "index_write": (lambda a, b: _written(TABLE.clone(), b.long(), 1.0), "b"),
    "constructor": (lambda a, b: torch.tensor([b, 1.0]), "b"),
    "as_tensor": (lambda a, b: torch.as_tensor([b, a[0]]), "ab"),
    "full": (lambda a, b: torch.full((2,), b), "b"),
    "new_tensor": (lambda a, b: a.new_tensor([b, 1.0]), "b"),
    "one_hot": (lambda a, b: torch.nn.functional.one_hot(b.long(), 4), "b"),
    "copy": (lambda a, b: copy.deepcopy(a) + copy.copy(b), "ab"),
    "sort": (lambda a, b: a.sort().indices, "a"),
    "out": (lambda a, b: torch.add(a, 1, out=torch.empty(3)), "a"),
    "vmap": (lambda a, b: torch.func.vmap(lambda x: x * b)(a), "ab"),
    "linalg": (lambda a, b: torch.linalg.cholesky(torch.eye(3) * b**2 + 1), "b"),
    "lstm": (lambda a, b: torch.nn.LSTM(3, 2)(a[None])[0], "a"),
    "complex": (lambda a, b: torch.view_as_real(torch.fft.fft(a))[0], "a"),
    "custom_function": (lambda a, b: _Square.apply(a), "a"),
    "random": (lambda a, b: torch.normal(a, 1.0), "a"),
    "zeros_like": (lambda a, b: torch.zeros_like(a), ""),
    "new_zeros": (lambda a, b: a.new_zeros(2) + b, "b"),
    "times_zero": (lambda a, b: a * 0.0 + b**0, ""),
    "detached_data": (lambda a, b: a.detach() + b.data, "ab"),
}

# Name -> a function that takes b out of torch.
ESCAPES = {
    "item": lambda a, b: b.item(),
    "float": lambda a, b: float(b),
    "bool": lambda a, b: bool(b > 0),
    "comparison_in_if": lambda a, b: 1 if b > 0 else 2,
    "tolist": lambda a, b: b[None].tolist(),
    "numpy": lambda a, b: b.numpy(),
    "asarray": lambda a, b: np.asarray(b),
    "list_index": lambda a, b: [1, 2, 3][b.long()],
    "range": lambda a, b: range(int(b)),
    "format": lambda a, b: f"{b}",
    "equal": lambda a, b: torch.equal(b, TABLE[0, 0]),
    "allclose": lambda a, b: torch.allclose(b, TABLE[0, 0]),
}


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x


def _written(tensor, index, value):
    tensor[index] = value
    return tensor


@pytest.fixture
def sources():
    with ProvenanceTracker() as tracker:
        a, b = torch.ones(3), torch.ones(())
        tracker.tag(a, "a"), tracker.tag(b, "b")
        yield tracker, a, b


@pytest.mark.parametrize("function, expected", RESULTS.values(), ids=RESULTS)
@pytest.mark.filterwarnings("ignore:To copy construct")
def test_names_that_reach_a_result(sources, function, expected):
    tracker, a, b = sources
    assert tracker.provenance(function(a, b)) == set(expected)
    assert tracker.provenance(a) == {"a"} and tracker.provenance(b) == {"b"}
    assert tracker.escaped == frozenset()


@pytest.mark.parametrize("function", ESCAPES.values(), ids=ESCAPES)
def test_escapes_are_noticed(sources, function):
    tracker, a, b = sources
    function(a, b)
    assert tracker.escaped == {"b"}


class TestElements:
    """Where a storage is written in parts, every element keeps its own names."""

    def test_rows_and_columns_of_a_buffer(self, sources):
        tracker, a, b = sources
        buffer = torch.zeros(3, 4)
        buffer[:, 1], buffer[2, 3] = a, b
        assert tracker.provenance(buffer) == {"a", "b"}
        assert tracker.provenance(buffer[:, 1], buffer[1]) == {"a"}
        assert tracker.provenance(buffer[2, 2:], buffer[:, 3]) == {"b"}
        assert tracker.provenance(buffer[:, 0], buffer[:2, 2:]) == frozenset()

    def test_overwriting_forgets(self, sources):
        tracker, a, b = sources
        buffer = torch.zeros(2)
        buffer[0] = b
        buffer[1] = a.sum()
        buffer[0] = 1.0
        assert tracker.provenance(buffer[0]) == frozenset() and tracker.provenance(buffer) == {"a"}
        buffer.zero_()
        assert tracker.provenance(buffer) == frozenset()

    def test_adding_in_place_remembers(self, sources):
        tracker, a, b = sources
        buffer = torch.zeros(2)
        buffer[0] = b
        buffer += a.sum()
        buffer[1].mul_(2)
        assert tracker.provenance(buffer[0]) == {"a", "b"} and tracker.provenance(buffer[1]) == {
            "a"
        }

    def test_stack_cat_and_elementwise_operations(self, sources):
        tracker, a, b = sources
        both = torch.cat([torch.stack([b, b]), 2 * a, torch.zeros(1)])
        result = (both.exp() + torch.arange(6.0)).clone().flip(0)
        assert [sorted(tracker.provenance(x)) for x in result] == [
            [],
            ["a"],
            ["a"],
            ["a"],
            ["b"],
            ["b"],
        ]

    def test_indexing_by_constants(self, sources):
        tracker, a, b = sources
        both = torch.cat([a, b[None]])
        picked = both[torch.tensor([3, 0])]
        assert tracker.provenance(picked[0]) == {"b"} and tracker.provenance(picked[1]) == {"a"}

    def test_broadcasting(self, sources):
        tracker, a, b = sources
        grid = torch.stack([a[0], b])[:, None] + torch.zeros(2, 3)
        assert tracker.provenance(grid[0]) == {"a"} and tracker.provenance(grid[1, 2]) == {"b"}

    def test_other_operations_have_all_names(self, sources):
        tracker, a, b = sources
        both = torch.stack([a[0], b])
        assert tracker.provenance(both.cumsum(0)[0]) == {"a", "b"}

    def test_another_element_size(self, sources):
        tracker, a, b = sources
        both = torch.stack([a[0], b])
        assert tracker.provenance(both.view(torch.int16)[0]) == {"a", "b"}

    def test_tagging_a_view(self, sources):
        tracker, a, _ = sources
        tracker.tag(a[1:], "c")
        assert tracker.provenance(a[0]) == {"a"} and tracker.provenance(a[1:]) == {"c"}

    def test_empty_tensors(self, sources):
        tracker, a, b = sources
        assert (
            tracker.provenance(torch.cat([torch.stack([b, a[0]]), torch.zeros(0)])[:0])
            == frozenset()
        )


def test_nothing_is_followed_outside_the_context(sources):
    tracker, a, _ = sources
    with torch.utils._python_dispatch._disable_current_modes():
        assert tracker.provenance(a + 1) == frozenset()


def test_tensors_in_nested_containers():
    a, b = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in tensors_in(({"x": [a, 1]}, (b, None), "s"))] == [1, 2]
