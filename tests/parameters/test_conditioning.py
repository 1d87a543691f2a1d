"""How a factor reads its parents."""

import pytest
import torch

from pyro_nami.parameters.conditioning import (
    Direct,
    Flattened,
    Gathered,
    Plates,
    Pooled,
    Read,
    plan_sources,
)
from pyro_nami.parameters.inputs import IndexMaps, Sources, concatenate

FRAMES = {"m": (), "t": ("g",), "z": ("g", "i"), "y": ("g", "i"), "x": ("h",)}
PLATES = Plates(("g", "i", "h"))

# Rows n of `obs` belong to a county (in a state) and to a day.
RAGGED = Plates(
    ("state", "county", "day", "obs"),
    determined={"obs": frozenset({"county", "day", "state"}), "county": frozenset({"state"})},
)
RAGGED_FRAMES = {
    "mu": (),
    "s": ("state",),
    "a": ("county",),
    "b": ("day",),
    "z": ("obs",),
    "y": ("obs",),
}
ROWS = {"obs", "county", "day", "state"}


def plan(batch, parents, frames=FRAMES, plates=PLATES, rows=(), joint=(), **options):
    reads = {node: Read(frozenset(label), frozenset(rows)) for node, label in parents.items()}
    return plan_sources(batch, reads, frames, plates._replace(**options), joint)


def ragged(batch, parents, **options):
    return plan(batch, parents, RAGGED_FRAMES, RAGGED, **options)


def test_shared_plates_are_aligned_and_lacking_ones_broadcast():
    assert set(plan(["g", "i"], {"m": "", "t": "", "y": ""})) == {
        Direct("m"),
        Direct("t"),
        Direct("y"),
    }


def test_plates_outside_are_pooled_jointly_from_the_inside_out():
    inner = Pooled("i", (Direct("y"), Direct("z")))
    assert plan([], {"z": "", "y": "", "t": ""}) == (Pooled("g", (Direct("t"), inner)),)


def test_parents_meet_at_the_rows_of_the_factor_that_joins_them():
    rows = (Direct("t"), Direct("y"), Direct("z"))
    assert plan([], {"z": "", "y": "", "t": ""}, rows="gi") == (Pooled("g", (Pooled("i", rows),)),)


def test_reading_across_a_shared_plate_keeps_the_own_instance():
    sources = plan(["g"], {"t": ["g"]})
    assert set(sources) == {Direct("t"), Pooled("g", (Direct("t"),))}


def test_fixed_plates_are_flattened_and_subsampled_ones_not_read_across():
    assert plan([], {"t": ""}, fixed=frozenset("g")) == (Flattened(Direct("t"), ("g",)),)
    assert plan([], {"t": "", "m": ""}, subsampled=frozenset("g")) == (Direct("m"),)
    # What meets a subsampled plate only at the rows of a factor is read where it is.
    assert plan([], {"t": "", "y": ""}, rows="gi", subsampled=frozenset("i")) == (
        Pooled("g", (Direct("t"),)),
    )


def test_sets_are_not_kept_apart_by_two_plates_of_one_dim():
    """Rows and columns of a matrix, and what each of them has, in plates at the right."""
    matrix = Plates(
        ("u", "v", "rows", "columns"),
        determined={"rows": frozenset("u"), "columns": frozenset("v")},
        dims={"rows": -2, "columns": -1, "u": -1, "v": -1},
    )
    frames = {"y": ("rows", "columns"), "a": ("u",), "b": ("v",)}
    inner = Pooled("columns", (Direct("y"),))
    assert plan(["u"], {"y": ""}, frames, matrix) == (Pooled("rows", (inner,), ("u",)),)
    assert plan([], {"y": ""}, frames, matrix) == (
        Pooled("u", (Pooled("rows", (inner,), ("u",)),)),
    )
    elsewhere = {**matrix.dims, "u": -2}
    inner = Pooled("columns", (Direct("y"),), ("v",))
    both = (Pooled("v", (Pooled("rows", (inner,), ("u",)),)),)
    assert plan(["u"], {"y": ""}, frames, matrix, dims=elsewhere) == both


def test_a_group_reads_its_own_rows_and_what_these_meet():
    assert ragged(["county"], {"y": "", "b": "", "mu": ""}, rows=ROWS) == (
        Direct("mu"),
        Pooled("obs", (Direct("y"), Gathered(Direct("b"), "obs", ("day",))), ("county",)),
    )


def test_a_row_reads_the_instances_that_its_maps_name():
    assert set(ragged(["obs"], {"y": "", "a": "", "b": "", "s": ""})) == {
        Direct("y"),
        Gathered(Direct("a"), "obs", ("county",)),
        Gathered(Direct("b"), "obs", ("day",)),
        Gathered(Direct("s"), "obs", ("state",)),
    }


def test_ragged_plates_are_pooled_from_the_inside_out():
    nested = Plates(
        ("state", "county", "obs"), determined={"obs": {"county", "state"}, "county": {"state"}}
    )
    sources = plan(["state"], {"y": "", "a": ""}, RAGGED_FRAMES, nested)
    inner = Pooled("obs", (Direct("y"),), ("county",))
    assert sources == (Pooled("county", (Direct("a"), inner), ("state",)),)


def test_crossed_plates_are_not_pooled_cell_by_cell():
    assert ragged(["state"], {"y": ""}) == (Pooled("obs", (Direct("y"),), ("state",)),)
    assert ragged([], {"y": ""}) == (Pooled("obs", (Direct("y"),)),)


def test_a_block_reads_the_rows_of_each_of_its_instances():
    sources = ragged([], {"y": ["day"]}, joint=["day"], fixed=frozenset(["day"]), rows=ROWS)
    assert sources == (Flattened(Pooled("obs", (Direct("y"),), ("day",)), ("day",)),)


def test_concatenate_broadcasts_batches():
    whole = concatenate([torch.zeros(4, 1, 2), torch.ones(3, 1)])
    assert whole.shape == (4, 3, 3) and torch.equal(whole[..., 2], torch.ones(4, 3))


def total(x, over):
    return over.sum(x)


def test_a_pooled_source_is_evaluated_once():
    calls = []

    def encoder(x, over):
        calls.append(over)
        return over.sum(x)

    source = Pooled("i", (Direct("y"),))
    y = torch.arange(6.0).reshape(2, 3, 1)
    sources = Sources({"i": -1}, IndexMaps({}, {}), {source: encoder}, {})
    sources.put("y", y)
    for _ in range(2):
        out = sources.value(source)
    assert torch.equal(out.flatten(), torch.tensor([3.0, 12.0])) and len(calls) == 1


COUNTY, DAY, STATE = (
    torch.tensor([2, 0, 0, 2, 1]),
    torch.tensor([1, 1, 0, 0, 1]),
    torch.tensor([1, 0, 1]),
)
MAPS = IndexMaps(
    {("obs", "county"): COUNTY, ("obs", "day"): DAY, ("county", "state"): STATE},
    {"county": 3, "day": 2, "state": 2},
)


@pytest.mark.parametrize(
    "dims",
    [
        {"obs": -1, "county": -1, "day": -1, "state": -1},
        {"obs": -1, "county": -2, "day": -3, "state": -1},
    ],
)
@pytest.mark.parametrize("particles", [(), (4,)])
def test_rows_are_gathered_and_pooled_like_a_loop_would(dims, particles):
    def placed(x, *plates):
        """Puts the dims of some plates of ``(*particles, *plates, features)`` in place, size 1 elsewhere."""
        shape = [*particles, 1, 1, 1, x.shape[-1]]
        for plate in plates:
            shape[dims[plate] - 1] = x.shape[len(particles) + plates.index(plate)]
        return x.reshape(shape)

    y, a, cell = (
        torch.randn(*particles, 5, 2),
        torch.randn(*particles, 3, 1),
        torch.randn(*particles, 3, 2, 1),
    )
    features = {"y": placed(y, "obs"), "a": placed(a, "county")}
    plates = [("county",), ("state",), ("day",)]
    if len({dims["county"], dims["day"], dims["obs"]}) == 3:
        features["cell"] = cell.transpose(-3, -2).reshape(*particles, 2, 3, 1, 1)
        plates.append(("county", "day"))
    pooled = {onto: Pooled("obs", (Direct("y"),), onto) for onto in plates}
    sources = Sources(dims, MAPS, dict.fromkeys(pooled.values(), total), {})
    for node, value in features.items():
        sources.put(node, value)

    gathered = sources.value(Gathered(Direct("a"), "obs", ("county",)))
    assert torch.equal(gathered, placed(a[..., COUNTY, :], "obs"))
    for onto, index in {"county": COUNTY, "day": DAY, "state": STATE[COUNTY]}.items():
        wanted = torch.stack([y[..., index == j, :].sum(-2) for j in range(MAPS.sizes[onto])], -2)
        assert torch.allclose(sources.value(pooled[onto,]), placed(wanted, onto))
    if "cell" in features:
        at_rows = sources.value(Gathered(Direct("cell"), "obs", ("county", "day")))
        assert torch.equal(at_rows, placed(cell[..., COUNTY, DAY, :], "obs"))
        sums = sources.value(pooled["county", "day"])
        for j in range(3):
            for k in range(2):
                wanted = y[..., (j == COUNTY) & (k == DAY), :].sum(-2)
                assert torch.allclose(sums[..., k, j, 0, :], wanted)
