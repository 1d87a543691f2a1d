"""How a factor reads its parents."""

import torch

from pyro_nami.conditioning import Direct, Pooled, concatenate, evaluate, flatten, plan_sources

PLATES = {"m": (), "t": ("g",), "z": ("g", "i"), "y": ("g", "i"), "x": ("h",)}
NESTING = ("g", "i", "h")


def plan(batch, parents, **options):
    labels = {node: frozenset(label) for node, label in parents.items()}
    return plan_sources(batch, labels, PLATES, nesting=NESTING, **options)


def test_shared_plates_are_aligned_and_lacking_ones_broadcast():
    assert set(plan(["g", "i"], {"m": "", "t": "", "y": ""})) == {Direct("m"), Direct("t"), Direct("y")}


def test_plates_outside_are_pooled_jointly_from_the_inside_out():
    inner = Pooled("i", (Direct("y"), Direct("z")))
    assert plan([], {"z": "", "y": "", "t": ""}) == (Pooled("g", (Direct("t"), inner)),)


def test_reading_across_a_shared_plate_keeps_the_own_instance():
    sources = plan(["g"], {"t": ["g"]})
    assert set(sources) == {Direct("t"), Pooled("g", (Direct("t"),))}


def test_fixed_plates_are_flattened_and_subsampled_ones_not_read_across():
    assert plan([], {"t": ""}, fixed=["g"]) == (Direct("t", ("g",)),)
    assert plan([], {"t": "", "m": ""}, subsampled=["g"]) == (Direct("m"),)


def test_flatten_keeps_the_order_of_instances():
    value = torch.arange(12.0).reshape(2, 3, 2)
    assert torch.equal(flatten(value, -2), value.reshape(2, 1, 6))
    assert torch.equal(flatten(value, -3)[0, 1], torch.tensor([2.0, 3.0, 8.0, 9.0]))


def test_concatenate_broadcasts_batches():
    whole = concatenate([torch.zeros(4, 1, 2), torch.ones(3, 1)])
    assert whole.shape == (4, 3, 3) and torch.equal(whole[..., 2], torch.ones(4, 3))


def test_a_pooled_source_is_evaluated_once():
    calls = []

    def encoder(x, dim):
        calls.append(dim)
        return x.mean(dim - 1, keepdim=True)

    source = Pooled("i", (Direct("y"),))
    cache = {}
    for _ in range(2):
        out = evaluate(source, {"y": torch.arange(6.0).reshape(2, 3, 1)}, {"i": -1}, {source: encoder}, cache)
    assert torch.equal(out.flatten(), torch.tensor([1.0, 4.0])) and calls == [-1]
