"""Runs the installed pyro_nami in an environment with only its core dependencies: `fit`, a guide in SVI, the command.

Used by `check_release.sh`, which passes the folder of the checkout: the package must not be the one there. Prints
versions and the verdict on its last line.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pyro
import torch
from pyro import distributions as dist
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import ClippedAdam

import pyro_nami

EXTRAS = (
    "scipy",
    "matplotlib",
    "arviz",
    "zuko",
    "sklearn",
    "pytest",
)  # packages that only extras bring
MODEL = """
import torch
import pyro
import pyro.distributions as dist


def model(y=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    with pyro.plate("rows", 5):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


model_args = (torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]),)
"""


def main(checkout: Path) -> None:
    _check_package(Path(pyro_nami.__file__).resolve().parent, checkout.resolve())
    verdict = _check_fit()
    _check_svi()
    _check_command()
    print(
        f"{sys.version.split()[0]}, pyro_nami {pyro_nami.__version__}, torch {torch.__version__}, "
        f"pyro {pyro.__version__}, numpy {importlib.metadata.version('numpy')}; fit: {verdict}"
    )


def _check_package(package: Path, checkout: Path) -> None:
    assert checkout not in package.parents, f"the package is the checkout's: {package}"
    assert (package / "py.typed").is_file(), "py.typed is not in the package"
    distribution = importlib.metadata.distribution("pyro-nami")
    assert distribution.version == pyro_nami.__version__
    names = [file.name for file in distribution.files or ()]
    assert "LICENSE" in names, "the licence is not in the package"
    found = [name for name in EXTRAS if importlib.util.find_spec(name)]
    assert not found, f"not an environment of core dependencies: {found}"


def _check_fit() -> str:
    """A hierarchy whose posterior mean of ``mu`` is known: 4.40 (sd 3.30), by quadrature."""
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    posterior = pyro_nami.fit(_schools, sigma, y, seed=0, progress=False)
    assert posterior.verdict.kind == "exact", posterior.verdict
    assert abs(posterior.log_evidence - -31.3113) < 1e-3
    assert abs(posterior.mean("mu") - 4.40) < 0.3
    return posterior.verdict.kind


def _schools(sigma: torch.Tensor, y: torch.Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def _check_svi() -> None:
    """Something is learned here: a positive latent under Student's t data."""
    data = torch.tensor([0.5, 1.5, 2.5, 9.0])

    def model() -> None:
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", 4):
            pyro.sample("x", dist.StudentT(3.0, rate.log(), rate), obs=data)

    guide = pyro_nami.AutoNaMIGuide(model)
    svi = SVI(model, guide, ClippedAdam({"lr": 0.01}), Trace_ELBO())
    losses = [svi.step() for _ in range(20)]
    assert all(loss == loss for loss in losses), losses


def _check_command() -> None:
    command = Path(sysconfig.get_path("scripts"), "pyro-nami")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.py").write_text(MODEL)
        done = subprocess.run(
            [command, "fit", "model.py:model"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "mean" in done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
