"""Figure 4's encoders are of equal size, and training resumes where it was."""

from pathlib import Path

import pyro
import pytest
import torch

pytest.importorskip("sklearn")

import vae
from experiment import Options, Run
from images import Images, read_images

pytestmark = pytest.mark.usefixtures("own_parameters")


@pytest.fixture
def digits() -> Images:
    return read_images(None)


def a_run(folder: Path, tell=lambda share: None) -> Run:
    options = Options("smoke", "cpu", 1, 1, folder, folder, {"data": None})
    return Run(options, folder / "cell.ckpt", tell)


def trained(digits: Images, run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    pyro.set_rng_seed(0)
    decoder = vae.Decoder(digits.train.mean(0))
    guide = vae.make_guide(decoder, "faithful", 32)
    curve = vae.train(decoder, guide, digits, vae.SMOKE, 0, run)
    return curve, {**dict(decoder.named_parameters()), **dict(guide.named_parameters())}


def test_encoders_of_both_kinds_are_of_equal_size(digits):
    for size in (32, 100):
        counts = []
        for kind, units in (("mean field", size), ("faithful", vae.matching_units(size, 64))):
            guide = vae.make_guide(vae.Decoder(digits.train.mean(0)), kind, units)
            guide(digits.train[:10])
            counts.append(guide.num_parameters)
        assert counts[0] == size * 65 + size * (size + 1) + 30 * (size + 64 + 1)
        assert abs(counts[1] / counts[0] - 1) < 0.01


def test_only_the_faithful_encoder_lets_latents_depend_on_each_other(digits):
    x = digits.train[:1]
    for kind, depends in (("mean field", False), ("faithful", True)):
        pyro.set_rng_seed(0)
        guide = vae.make_guide(vae.Decoder(digits.train.mean(0)), kind, 40)
        guide(x)
        with torch.no_grad():
            for weight in guide.parameters():
                weight.normal_(0, 0.3)
        z = torch.randn(1, 30, requires_grad=True)
        (gradient,) = torch.autograd.grad(guide.log_prob({"z": z}, x), z, create_graph=True)
        (cross,) = torch.autograd.grad(gradient[0, 0], z)
        assert (cross[0, 1:].abs().max() > 1e-6) == depends


def test_training_goes_on_from_where_it_was_interrupted(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(vae, "KEEP_EVERY", -1)
    (tmp_path / "whole").mkdir()
    whole = trained(digits, a_run(tmp_path / "whole"))

    def interrupt(share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(vae, "TELL_EVERY", 5)
    with pytest.raises(KeyboardInterrupt):
        trained(digits, a_run(tmp_path, interrupt))
    assert (tmp_path / "cell.ckpt").exists()
    rest = trained(digits, a_run(tmp_path))
    assert rest[0] == whole[0] and len(rest[0]) == vae.SMOKE.epochs
    assert all(torch.equal(rest[1][name], value) for name, value in whole[1].items())
