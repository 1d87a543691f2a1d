"""The command line on files written for the purpose: what it prints, and how it exits."""

import re
import sys

import pytest
from scripts import ROOT, python

from pyro_nami import Posterior
from pyro_nami.show import main

SOURCE = '''
"""Models of all kinds."""
from functools import partial

import neighbour
import pyro
import pyro.distributions as dist
import torch

print("imported")
sigma = torch.tensor([15.0, 10.0, 16.0])
LATENT = 3


def data():
    return sigma, 1.0 + torch.zeros(3)


def schools(sigma, y=None):
    print("running")
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


def tree(d=torch.tensor(0.3), e=torch.tensor(0.4)):
    """Figure 1 of Webb et al. 2018: a root with two branches whose leaves are observed."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(a, 1.0))
    c = pyro.sample("c", dist.Normal(a, 1.0))
    pyro.sample("d", dist.Normal(b, 1.0), obs=d)
    pyro.sample("e", dist.Normal(c, 1.0), obs=e)


branches = partial(tree, e=torch.tensor(0.1))


def rows(y):
    """Ragged groups: each row reads one group through an index; the group's scale is a support parent."""
    hi = pyro.sample("hi", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 3):
        z = pyro.sample("z", dist.Uniform(0.0, hi))
    with pyro.plate("rows", 6):
        pyro.sample("y", dist.Normal(z[..., torch.tensor([0, 0, 1, 1, 2, 2])], 1.0), obs=y)


rows_args = torch.zeros(6)


def coupled():
    with pyro.plate("n", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.zeros(3))


def breaks(size):
    z = pyro.sample("z", dist.Normal(torch.zeros(size), 1.0).to_event(1))
    raise ValueError(f"cannot go on with {size}.\\nThis is why.")


def data_only():
    pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))


def local_index(value, *, twice=False):
    with pyro.plate("n", 2):
        v = pyro.sample("v", dist.Normal(torch.as_tensor(value).float(), 1.0))
        pyro.sample("x", dist.Normal(v, 1.0), obs=torch.zeros(2))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "models_of_test.py").write_text(SOURCE)
    (folder / "neighbour.py").write_text("VALUE = 1\n")
    (folder / "broken.py").write_text("x = 1\nraise RuntimeError('no')\n")
    (folder / "syntax.py").write_text("def model(:\n")
    (folder / "leaving.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "empty.py").write_text("")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Runs a command in the folder of the models; returns exit code, stdout, stderr."""
    monkeypatch.chdir(folder)

    def run(command: str, target: str, *options: str) -> tuple[int, str, str]:
        target = f"models_of_test.py:{target}" if ":" not in target else target
        before = list(sys.path), set(sys.modules)
        code = main([command, target, *options])
        assert sys.path == before[0] and "__model__" not in sys.modules
        return code, *capsys.readouterr()

    yield run
    for name in ("models_of_test", "neighbour"):
        sys.modules.pop(name, None)


SCHOOLS = ("schools", "--args", "data()")


def test_fit_prints_the_summary_and_writes_the_draws(run, tmp_path):
    path = tmp_path / "posterior.pt"
    code, out, _ = run("fit", *SCHOOLS, "--draws", "200", "-o", str(path))
    assert code == 0 and "exact: conditionals" in out and "theta[2]" in out
    assert Posterior.load(path)["theta"].shape == (200, 3)


def test_a_target_may_be_a_module_and_a_partial(run, folder):
    module = run("fit", "models_of_test:branches", "--draws", "100")
    file = run("fit", f"{folder / 'models_of_test.py'}:branches", "--draws", "100")
    assert module == file and module[0] == 0 and "draws of a, b, c" in module[1]


def test_arguments_are_the_files_variable_unless_given(run):
    assert "hi, z (3,)" in run("fit", "rows")[1]
    code, _, err = run("fit", "rows", "--args", "torch.zeros(5)")
    assert code == 2 and "called with 1 argument(s), fails" in err


@pytest.mark.parametrize(
    "arguments", ["(np.zeros(2),)", "numpy.zeros(2)", "[1.0, 2.0]", "sigma[:2]", "(sigma[:2],)"]
)
def test_a_tuple_gives_all_arguments_and_anything_else_the_only_one(run, arguments):
    options = ("--args", arguments, "--kwargs", "dict(twice=True)", "--draws", "100")
    code, out, _ = run("fit", "local_index", *options)
    assert code == 0 and "v[1]" in out


def test_random_arguments_follow_the_seed(run):
    drawn = ("fit", "local_index", "--args", "torch.randn(2)", "--draws", "100", "--seed")
    first, again, other = (run(*drawn, seed)[1] for seed in ("0", "0", "1"))
    assert first == again != other


# ---- failures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent.py:model"], r"Expected a Python file; got 'absent.py', which does not exist"),
        (["absent:model"], r"'absent' to import; got ModuleNotFoundError: No module named"),
        (["models_of_test.py:"], r"Expected path/to/file.py:name or package.module:name"),
        (["broken.py:model"], r"to import; got RuntimeError: no \(broken.py, line 2\)"),
        (["syntax.py:model"], r"'syntax.py' to import; got SyntaxError: .*line 1"),
        (["leaving.py:model"], r"'leaving.py' to import; got SystemExit: 3"),
        (["empty.py:model"], r"a name in 'empty.py'; got 'model'\."),
        (["school"], r"got 'school'\."),
        (["LATENT"], r"a callable; got 'LATENT', which is not callable"),
        (["partial"], r"got 'partial', which is a class; make an instance"),
        (["schools"], r"called with no arguments, fails: TypeError: .*'sigma'. Give .* by --args"),
        (["breaks", "--args=(3,)"], r"cannot go on with 3 \(models_of_test.py, line \d+\). Give"),
        (["breaks", "--kwargs={'size': 'x'}"], r"with 1 argument\(s\), fails: TypeError: zeros"),
        (["tree", "--args", "datum()"], r"Python expression; got 'datum\(\)': NameError"),
        (["tree", "--args", "(1"], r"--args to be a Python expression; got '\(1': SyntaxError"),
        (["tree", "--kwargs", "(1,)"], r"--kwargs to be a dict with names as keys; got '\(1,\)'"),
        (["tree", "--kwargs", "{1: 2}"], r"Expected --kwargs to be a dict"),
        (["tree", "-o", "posterior.csv"], r"ends in .nc or .pt; got 'posterior.csv'"),
        (["data_only"], r"at least one latent"),
        (["coupled"], r"Expected independent instances of site 'x', .* in plate 'n'"),
    ],
)
def test_no_answer_is_exit_code_2_and_one_line(run, arguments, message):
    code, out, err = run("fit", *arguments)
    line = err.splitlines()[-1]
    assert code == 2 and out == "" and line.startswith("pyro-nami: error: ")
    assert re.search(message, line) and "Traceback" not in err


@pytest.mark.parametrize("arguments", [[], ["fit"], ["inspect", "a.py:b"]])
def test_options_that_argparse_does_not_know_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and "usage: pyro-nami" in capsys.readouterr().err


# ---- as a process


def test_the_program_runs_as_a_module_of_python(folder):
    done = python("-m", "pyro_nami", "fit", "models_of_test.py:tree", "--draws", "100", cwd=folder)
    assert done.code == 0 and "draws of a, b, c" in done.printed
    assert "imported\n" in done.errors


def test_the_script_of_the_package_is_main():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\npyro-nami = "pyro_nami.show:main"\n' in text
