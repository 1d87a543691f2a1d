"""Where Newton's method begins with data that it has seen: it ends where it did, in fewer runs of the model."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_nami import AutoNaMIGuide
from pyro_nami.guide.warm_starts import DataSets, Starts

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


class Logistic:
    """A regression whose coefficients have a Normal about the mode; counts its runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self):
        self.runs += 1
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0).to_event(1))
        logits = (X @ w.unsqueeze(-1)).squeeze(-1)
        pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1))


def draws(num, seed=0):
    pyro.set_rng_seed(seed)
    w = 2 * torch.randn(num, 3)
    return w, (torch.rand(num, 40) < (w @ X.T).sigmoid()).float()


def guide_of(model, y):
    pyro.clear_param_store()
    guide = AutoNaMIGuide(model, observed=["y"])
    guide(observations={"y": y[0]})
    assert guide.rules["w"].rule == "newton"
    return guide


@torch.no_grad()
def test_data_that_come_again_need_one_run_of_their_own_and_have_the_same_density():
    (w, y), model = draws(50), Logistic()
    guide = guide_of(model, y)

    def log_prob(rows):
        model.runs = 0
        return guide.log_prob({"w": w[rows]}, observations={"y": y[rows]}), model.runs

    first, before = log_prob(torch.arange(50))
    order = torch.arange(50).flip(0)[:30]
    again, after = log_prob(order)
    assert before - after >= 3
    torch.testing.assert_close(again, first[order], rtol=0, atol=1e-3)
    alone = guide_of(Logistic(), y).log_prob({"w": w[order]}, observations={"y": y[order]})
    torch.testing.assert_close(again, alone, rtol=0, atol=1e-3)


@torch.no_grad()
def test_data_seen_and_others_in_one_batch_have_the_densities_that_they_have_apart():
    w, y = draws(60)
    guide = guide_of(Logistic(), y)
    guide.log_prob({"w": w[:20]}, observations={"y": y[:20]})
    both = guide.log_prob({"w": w}, observations={"y": y})
    alone = guide_of(Logistic(), y).log_prob({"w": w}, observations={"y": y})
    torch.testing.assert_close(both, alone, rtol=0, atol=1e-3)


@torch.no_grad()
def test_modes_given_a_latent_that_is_learned_are_found_again_with_its_value():
    """As those of simulations are, in steps and moves; with other values search begins at the mode with the last."""

    class Scaled(Logistic):
        def __call__(self):
            self.runs += 1
            s = pyro.sample("s", dist.HalfNormal(1.0))
            w = pyro.sample("w", dist.Normal(torch.zeros(3), s.unsqueeze(-1)).to_event(1))
            logits = (X @ w.unsqueeze(-1)).squeeze(-1)
            pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1))

    (w, y), model = draws(50), Scaled()
    guide = guide_of(model, y)
    first, second = torch.rand(2, 50) + 0.5

    def log_prob(s):
        model.runs = 0
        return guide.log_prob({"w": w, "s": s}, observations={"y": y}), model.runs

    found, runs = zip(*map(log_prob, (first, second, first, second)))
    assert runs[0] > runs[2] == runs[3] < runs[1]
    for before, after in zip(found[:2], found[2:]):
        torch.testing.assert_close(after, before, rtol=0, atol=1e-3)


@torch.no_grad()
def test_copies_and_other_devices_begin_anew(tmp_path):
    w, y = draws(20)
    guide = guide_of(Logistic(), y)
    guide.log_prob({"w": w}, observations={"y": y})
    assert guide._reader.memory.derived.starts
    torch.save(guide.state_dict(), tmp_path / "guide.pt")
    assert not guide._reader.memory.__getstate__()["derived"].starts
    guide.double().float()
    assert not guide._reader.memory.derived.starts


class TestDataSets:
    def test_numbers_go_by_bits_whatever_the_order_and_the_batch(self):
        value = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(1))
        keys = DataSets.of({"x": value}, {"x": 1}, 1).keys
        assert len(set(keys)) == 6
        assert DataSets.of({"x": value.flip(0)}, {"x": 1}, 1).keys == keys[::-1]
        assert DataSets.of({"x": value.reshape(2, 3, 2, 3)}, {"x": 1}, 1).keys == keys
        other = value.clone()
        other[2, 1, 0] = torch.nextafter(value[2, 1, 0], torch.tensor(9.0))
        changed = [a != b for a, b in zip(DataSets.of({"x": other}, {"x": 1}, 1).keys, keys)]
        assert changed == [False, False, True, False, False, False]

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.float64]
    )
    def test_binary_data_with_equal_sums_of_places_differ(self, dtype):
        rows = torch.tensor(list(itertools.product([0, 1], repeat=12))).to(dtype)
        assert len(set(DataSets.of({"x": rows}, {"x": 1}, 0).keys)) == 2**12

    def test_sites_are_told_apart(self):
        a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        keys = [
            DataSets.of({"a": a, "b": b}, {}, 0).keys,
            DataSets.of({"a": b, "b": a}, {}, 0).keys,
        ]
        assert keys[0] != keys[1]

    def test_one_data_set_has_none(self):
        assert DataSets.of({"x": torch.ones(3)}, {"x": 0}, 1) is None


def test_values_kept_are_those_of_the_first_draw_and_newer_ones_replace_them():
    data = DataSets.of({"x": torch.tensor([1.0, 2.0])}, {"x": 0, "z": 1}, 0)
    starts = Starts()
    starts.note(data, {"z": torch.arange(12.0).reshape(3, 2, 2)})
    assert starts.find(data)["z"].tolist() == [[0, 1], [2, 3]]
    starts.note(data, {"z": torch.tensor([5.0, 6.0])})  # the same for both
    assert starts.find(data)["z"].tolist() == [[5, 6], [5, 6]]
    starts.note(data, {"z": torch.zeros(2, 3)})  # of another size: all before are forgotten
    assert starts.find(data)["z"].shape == (2, 3)
    assert starts.find(DataSets.of({"x": torch.tensor([3.0, 4.0])}, {"x": 0}, 0)) == {}


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("pyro_nami.program.memory.MEMORY", 6 * 8)
    data = DataSets.of({"x": torch.arange(5.0)}, {"x": 0, "z": 1}, 0)
    starts = Starts()
    starts.note(data, {"z": torch.arange(10.0).reshape(5, 2)})
    assert starts.find(data)["z"].isnan().any(-1).tolist() == [False, False, False, True, True]
    renewed = Starts()
    for first in (0, 2, 4):
        now = DataSets.of({"x": torch.arange(first, first + 2.0)}, {"x": 0, "z": 1}, 0)
        renewed.note(now, {"z": torch.ones(2, 2)})
    others = {"z": torch.full((5, 2), 7.0)}
    assert renewed.find(data, others)["z"][:, 0].tolist() == [7, 7, 7, 7, 1]
