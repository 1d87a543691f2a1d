"""The command line on files written for the purpose: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from pyro_nami.graph import BayesNet, Site, nami, nami_steps
from pyro_nami.reading.network import extract
from pyro_nami.show import main
from pyro_nami.show.render import render

ROOT = Path(__file__).parents[2]

SOURCE = '''
"""Models of all kinds."""
import functools
import math
from functools import partial

import neighbour
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine

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
hidden = poutine.block(tree, hide=["e"])


def rows(y):
    """Ragged groups: each row reads one group through an index; the group's scale is a support parent."""
    hi = pyro.sample("hi", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 3):
        z = pyro.sample("z", dist.Uniform(0.0, hi))
    with pyro.plate("rows", 6):
        pyro.sample("y", dist.Normal(z[..., torch.tensor([0, 0, 1, 1, 2, 2])], 1.0), obs=y)


rows_args = torch.zeros(6)


def leaky(y=torch.tensor(1.0)):
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    scale = 2.0 if float(w) > 0 else 1.0
    pyro.sample("noise", dist.Normal(float(torch.randn(())), 1.0))
    pyro.sample("y", dist.Normal(z, scale), obs=y)


def coupled():
    with pyro.plate("n", 3):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("x", dist.Normal(z.sum(), 1.0), obs=torch.zeros(3))


def breaks(size):
    z = pyro.sample("z", dist.Normal(torch.zeros(size), 1.0).to_event(1))
    raise ValueError(f"cannot go on with {size}.\\nThis is why.")


def nothing():
    return 1


def data_only():
    pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))


def local_index(value, *, twice=False):
    with pyro.plate("n", 2):
        pyro.sample("v", dist.Normal(torch.as_tensor(value), 1.0))
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


def loaded(text: str) -> dict:
    """The JSON of a command that went well."""
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def rebuilt(found: dict) -> BayesNet:
    """The network in JSON, by `BayesNet.from_edges`."""
    return BayesNet.from_edges(
        found["edges"],
        observed=[site["name"] for site in found["sites"] if site["observed"]],
        nodes=[site["name"] for site in found["sites"]],
        plates={site["name"]: site["plates"] for site in found["sites"]},
        plate_sizes=found["plate_sizes"],
        nesting=found["nesting"],
    )


def model(name):
    """The model itself, from a module of its own, and that module's names."""
    scope = {"__name__": "apart"}
    source = SOURCE.replace("import neighbour", "").replace("print(", "str(")
    exec(compile(source, "apart", "exec"), scope)
    return scope[name], scope


@pytest.fixture
def schools():
    """Eight schools, three of them, as extracted without the command line."""
    function, scope = model("schools")
    return extract(function, scope["data"]()).bayesnet


# ---- formats


def test_inspect_prints_the_network(run, schools):
    code, out, err = run("inspect", "schools", "--args", "data()")
    assert code == 0 and out == str(schools) + "\n"
    assert err == "imported\n"  # what the model prints in its many runs is dropped


@pytest.mark.parametrize("format", ["mermaid", "dot"])
@pytest.mark.parametrize("command", ["inspect", "invert"])
def test_drawings_are_those_of_render(run, schools, command, format):
    code, out, _ = run(command, "schools", "--args", "data()", "--format", format)
    drawn = render(schools if command == "inspect" else nami(schools), format)
    assert code == 0 and out == f"{drawn}\n"


def test_json_of_inspect_makes_the_network_again(run, schools):
    code, out, _ = run("inspect", "schools", "--args", "data()", "--format", "json")
    found = loaded(out)
    assert code == 0 and rebuilt(found) == schools
    assert found["command"] == "inspect" and found["model"] == "models_of_test.py:schools"
    assert list(found)[3:] == [
        "sites",
        "edges",
        "plate_sizes",
        "nesting",
        "index_maps",
        "escaped",
        "hidden_randomness",
    ]
    assert out == run("inspect", "schools", "--args", "data()", "--format", "json")[1]


def test_json_holds_support_parents_nesting_and_index_maps(run):
    function, _ = model("rows")
    net = extract(function, (torch.zeros(6),)).bayesnet
    code, out, _ = run("inspect", "rows", "--format", "json")
    found = loaded(out)
    assert code == 0
    sites = [
        Site(
            site["name"],
            frozenset(site["plates"]),
            site["observed"],
            frozenset(site["support_parents"]),
            site["marginalized"],
        )
        for site in found["sites"]
    ]
    assert BayesNet(sites, found["edges"], found["plate_sizes"], found["nesting"]) == net
    assert found["index_maps"] == [{"plate": "rows", "outer": "groups", "map": [0, 0, 1, 1, 2, 2]}]
    assert found["nesting"] == {"rows": ["groups"]} and found["sites"][1]["support_parents"] == ["hi"]


def test_text_names_index_maps(run):
    code, out, _ = run("inspect", "rows")
    assert code == 0 and out.endswith("Index map rows -> groups: 0, 0, 1, 1, 2, 2\n")


def test_text_of_an_inverse_has_factors_counts_and_levels(run, schools):
    code, out, _ = run("invert", "schools", "--args", "data()")
    assert code == 0
    assert out.splitlines() == [
        "Inverse: latents 3, edges 6 (16 between instances), levels 3",  # 3 + 1 + 3 + 3 * 3
        "  mu | y over schools",
        "  tau | mu, y over schools",
        "  theta[schools] | mu, tau, y",
        "Sampled in turn: mu; tau; theta",
    ]


def test_json_of_an_inverse_has_what_each_factor_reads(run, schools):
    code, out, _ = run("invert", "schools", "--args", "data()", "--inverse", "forward", "--format", "json")
    found, inverse = loaded(out), nami(schools, direction="forward")
    assert code == 0 and rebuilt(found) == schools and found["inverse"] == "forward"
    factors = {factor["latent"]: factor for factor in found["factors"]}
    assert list(factors) == list(reversed(inverse.order))
    for v, factor in factors.items():
        assert {p["site"]: set(p["over"]) for p in factor["parents"]} == {
            u: set(inverse.pooled(v, u)) for u in inverse.parents[v]
        }
        assert set(factor["joint"]) == inverse.joint[v] and factor["predictive"] == (v in inverse.predictive)
    assert found["num_edges"] == inverse.num_edges
    assert found["num_grounded_edges"] == inverse.num_grounded_edges
    assert found["levels"] == [list(level) for level in inverse.levels]


@pytest.mark.parametrize("name", ["schools.json", "schools.mmd", "schools.dot", "schools.txt"])
@pytest.mark.parametrize("command", ["inspect", "invert", "verify"])
def test_a_file_gets_what_stdout_would_in_the_format_of_its_name(run, tmp_path, command, name):
    format = {"json": "json", "mmd": "mermaid", "dot": "dot", "txt": "text"}[name.split(".")[1]]
    _, printed, _ = run(command, "schools", "--args", "data()", "--format", format)
    code, out, _ = run(command, "schools", "--args", "data()", "-o", str(tmp_path / name))
    assert code == 0 and out == "" and (tmp_path / name).read_text() == printed


def test_a_given_format_goes_before_that_of_the_name(run, tmp_path):
    path = tmp_path / "net.md"
    code, _, _ = run("inspect", "tree", "-o", str(path), "--format", "mermaid")
    assert code == 0 and path.read_text().startswith("flowchart")


# ---- inverses


@pytest.mark.parametrize(
    "name", ["auto", "forward", "reverse", "free", "stuhlmueller", "mean_field", "fully_connected"]
)
def test_every_inverse_has_a_verdict(run, name):
    code, out, _ = run("verify", "tree", "--inverse", name, "--format", "json")
    found = loaded(out)
    faithful = name not in ("stuhlmueller", "mean_field")
    assert found["inverse"] == name and found["faithful"] is faithful and code == (not faithful)
    assert found["minimal"] is (name in ("auto", "forward", "reverse", "free"))
    assert bool(found["missing"]) is not faithful


def test_the_heuristic_inverse_of_the_papers_counterexample_is_not_faithful(run):
    code, out, _ = run("verify", "tree", "--inverse", "stuhlmueller")
    assert code == 1
    assert out.splitlines() == [
        "models_of_test.py:tree, inverse stuhlmueller: not faithful",
        "  missing d -> c: c is taken to be independent of d, given e",
        "  missing c -> b: b is taken to be independent of c, given d",
    ]
    _, drawn, _ = run("verify", "tree", "--inverse", "stuhlmueller", "--format", "mermaid")
    lines = drawn.splitlines()
    assert lines[1] == "%%   missing d -> c: c is taken to be independent of d, given e"
    assert lines[3] == "flowchart TD"
    _, drawn, _ = run("verify", "tree", "--inverse", "stuhlmueller", "--format", "dot")
    assert drawn.startswith("// models_of_test.py:tree") and "\ndigraph {" in drawn


def test_missing_dependencies_in_json(run):
    _, out, _ = run("verify", "tree", "--inverse", "stuhlmueller", "--format", "json")
    assert loaded(out)["missing"] == [
        {"parent": "d", "latent": "c", "across": []},
        {"parent": "c", "latent": "b", "across": []},
    ]


def test_an_inverse_that_is_not_minimal_fails_only_on_demand(run):
    options = "tree", "--inverse", "fully_connected"
    code, out, _ = run("verify", *options)
    assert code == 0 and "faithful, not minimal\n" in out and "  redundant " in out
    assert run("verify", *options, "--minimal") == (1, out, "imported\n")
    assert run("verify", "tree", "--minimal")[0] == 0


def test_a_dependence_across_instances_is_named(run):
    code, out, _ = run("verify", "rows", "--inverse", "mean_field")
    assert code == 1 and "missing hi -> z: z is taken to be independent of hi, given y\n" in out
    code, out, _ = run(
        "verify", "schools", "--args", "(sigma,)", "--observed", "y", "--inverse", "fully_connected"
    )
    assert code == 0 and "  redundant theta -> theta across schools\n" in out


def test_the_steps_of_an_elimination(run, schools):
    code, out, _ = run("invert", "schools", "--args", "data()", "--steps")
    assert code == 0
    assert out.partition("Eliminated in turn:\n")[2].splitlines() == [
        "  1. theta among theta: reads mu, tau, y; fill-in mu - y, tau - y, cost 6",
        "  2. tau among mu, tau: reads mu, y; fill-in y - y, cost 3",
        "  3. mu among mu: reads y",
    ]
    code, out, _ = run("invert", "schools", "--args", "data()", "--steps", "--format", "json")
    steps = nami_steps(schools, direction="auto")
    for step, found in zip(steps, loaded(out)["steps"], strict=True):
        assert found["site"] == step.site and found["frontier"] == list(step.frontier)
        assert found["parents"] == list(step.parents) and found["cost"] == step.cost
        assert found["fill"] == [list(pair) for pair in step.fill]


def test_blocks_set_the_order_and_make_observed_sites_latent(run):
    code, out, _ = run("invert", "tree", "--blocks", "b, c ; a", "--format", "json")
    assert code == 0 and loaded(out)["factors"][0]["latent"] == "a"
    code, out, _ = run("invert", "tree", "--blocks", "a,b,c,e", "--format", "json")
    assert code == 0 and {factor["latent"] for factor in loaded(out)["factors"]} == {"a", "b", "c", "e"}


def test_a_blocked_model_is_inverted_with_its_hidden_evidence(run):
    """Without it c would be barren, and its factor the model's own."""
    code, out, _ = run("invert", "hidden", "--format", "json")
    factors = {factor["latent"]: factor for factor in loaded(out)["factors"]}
    assert code == 0 and not factors["c"]["predictive"]
    assert "('hidden',)" in {parent["site"] for parent in factors["c"]["parents"]}


# ---- targets and arguments


def test_a_target_may_be_a_module_and_a_partial(run, folder):
    module = run("inspect", "models_of_test:branches")
    file = run("inspect", f"{folder / 'models_of_test.py'}:branches")
    assert module == file and module[0] == 0 and "b: latent, given a" in module[1]


def test_arguments_are_the_files_variable_unless_given(run):
    assert "plate rows of 6" in run("inspect", "rows")[1]
    code, _, err = run("inspect", "rows", "--args", "torch.zeros(5)")
    assert code == 2 and "called with 1 argument(s), fails" in err


@pytest.mark.parametrize(
    "arguments", ["(np.zeros(2),)", "numpy.zeros(2)", "[1.0, 2.0]", "sigma[:2]", "(sigma[:2],)"]
)
def test_a_tuple_gives_all_arguments_and_anything_else_the_only_one(run, arguments):
    code, out, _ = run("inspect", "local_index", "--args", arguments, "--kwargs", "dict(twice=True)")
    assert code == 0 and "v[n]: latent" in out


def test_sites_may_be_named_observed(run):
    _, out, _ = run("inspect", "schools", "--args", "sigma", "--observed", "y, mu", "--format", "json")
    assert {site["name"] for site in loaded(out)["sites"] if site["observed"]} == {"mu", "y"}


def test_random_arguments_follow_the_seed(run, monkeypatch):
    seen = []

    def spy(model, args, kwargs, **options):
        seen.append(args[0])
        return extract(model, args, kwargs, **options)

    monkeypatch.setattr("pyro_nami.show.model_file.extract", spy)
    for seed in "0", "0", "1":
        run("inspect", "local_index", "--args", "torch.randn(2)", "--seed", seed)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_warnings_are_a_line_each_on_stderr_and_notes_in_the_output(run):
    with warnings.catch_warnings(record=True) as caught:
        code, out, err = run("inspect", "leaky")
    assert code == 0 and not caught
    lines = [line for line in err.splitlines() if line.startswith("pyro-nami: warning: ")]
    assert len(lines) == len(err.splitlines()) - 1 >= 2  # the first is what the import prints
    assert any("Hidden randomness: 'noise'" in line for line in lines)
    assert "Values left torch; edges from here are found by intervention: w\n" in out
    assert "Hidden randomness; taken to depend on all latents before: noise\n" in out
    found = loaded(run("inspect", "leaky", "--format", "json")[1])
    assert found["escaped"] == ["w"] and found["hidden_randomness"] == ["noise"]
    assert [f"pyro-nami: warning: {message}" for message in found["warnings"]] == lines


# ---- failures


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("absent.py:model", [], r"Expected a Python file; got 'absent.py', which does not exist"),
        (
            "absent:model",
            [],
            r"Expected 'absent' to import; got ModuleNotFoundError: No module named 'absent'",
        ),
        ("models_of_test.py:", [], r"Expected path/to/file.py:name or package.module:name"),
        ("broken.py:model", [], r"'broken.py' to import; got RuntimeError: no \(broken.py, line 2\)"),
        ("syntax.py:model", [], r"'syntax.py' to import; got SyntaxError: .*line 1"),
        ("leaving.py:model", [], r"'leaving.py' to import; got SystemExit: 3"),
        ("empty.py:model", [], r"a name in 'empty.py'; got 'model'."),
        (
            "school",
            [],
            r"got 'school'",
        ),
        (
            "LATENT",
            [],
            r"Expected a model, that is a callable; got 'LATENT', which is not callable",
        ),
        ("partial", [], r"got 'partial', which is a class; make an instance"),
        (
            "schools",
            [],
            r"called with no arguments, fails: TypeError: .*'sigma'. Give its arguments by --args",
        ),
        (
            "breaks",
            ["--args", "(3,)"],
            r"fails: ValueError: cannot go on with 3 \(models_of_test.py, line \d+\). Give",
        ),
        ("breaks", ["--kwargs", "{'size': 'x'}"], r"called with 1 argument\(s\), fails: TypeError: zeros"),
        ("tree", ["--args", "datum()"], r"--args to be a Python expression; got 'datum\(\)': NameError"),
        ("tree", ["--args", "(1"], r"--args to be a Python expression; got '\(1': SyntaxError"),
        ("tree", ["--kwargs", "(1,)"], r"Expected --kwargs to be a dict with names as keys; got '\(1,\)'"),
        ("tree", ["--kwargs", "{1: 2}"], r"Expected --kwargs to be a dict"),
        ("tree", ["--observed", "zz"], r"names of sample sites in `observed`; got 'zz'"),
        (
            "coupled",
            [],
            r"error: Expected independent instances of site 'x', declared independent in plate 'n'",
        ),
        (
            "nothing",
            [],
            r"Expected a model with sample sites; got 'models_of_test.py:nothing', which has none",
        ),
        ("tree", ["-o", "net.png"], r"ends in one of .txt, .mmd, .dot, .json; got 'net.png'. Give --format"),
        ("tree", ["-o", "absent/net.txt"], r"Expected to write the output; got FileNotFoundError"),
    ],
)
def test_no_answer_is_exit_code_2_and_one_line(run, target, options, message):
    code, out, err = run("inspect", target, *options)
    line = err.splitlines()[-1]
    assert code == 2 and out == "" and line.startswith("pyro-nami: error: ")
    assert re.search(message, line)
    assert len(err.splitlines()) <= 2 and "Traceback" not in err  # the first is what the import prints


@pytest.mark.parametrize(
    ("command", "target", "options", "message"),
    [
        ("invert", "tree", ["--blocks", "a;b"], r"Expected every latent in blocks; got none for 'c'"),
        ("verify", "tree", ["--blocks", "a,b,c", "--inverse", "mean_field"], r"that honours `blocks`"),
        ("invert", "data_only", [], r"at least one latent; got observed sites only: 'x'. Pass no data"),
        ("verify", "data_only", [], r"at least one latent"),
        ("invert", "rows", ["--inverse", "forward", "--blocks", "hi;z"], r"'z' to be eliminated before 'hi'"),
        ("invert", "tree", ["--steps", "--format", "dot"], r"--steps with --format text or json; got dot"),
        (
            "invert",
            "tree",
            ["--steps", "--inverse", "mean_field"],
            r"--steps with --inverse auto, .*got mean_field",
        ),
    ],
)
def test_an_inverse_that_cannot_be_is_exit_code_2(run, command, target, options, message):
    code, out, err = run(command, target, *options)
    assert code == 2 and out == "" and re.search(message, err.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [[], ["inspect"], ["invert", "a.py:b", "--inverse", "best"], ["inspect", "a.py:b", "--format", "png"]],
)
def test_options_that_argparse_does_not_know_are_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2 and "usage: pyro-nami" in capsys.readouterr().err


def test_help_documents_every_key_of_the_json(run, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    told = capsys.readouterr().out
    assert left.value.code == 0
    for command, options in (("inspect", ()), ("invert", ("--steps",)), ("verify", ())):
        found = loaded(run(command, "rows", "--format", "json", *options)[1])
        nested = [
            found["sites"][0],
            *found.get("index_maps", ()),
            *found.get("factors", ()),
            *found.get("steps", ()),
        ]
        for key in (*found, *(key for part in nested for key in part)):
            assert re.search(rf"\b{key}\b", told), key


# ---- as a process


def test_the_program_runs_as_a_module_of_python(folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pyro_nami", "verify", "models_of_test.py:tree"]
    command += ["--inverse", "stuhlmueller", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
    assert done.returncode == 1 and loaded(done.stdout)["missing"]
    assert done.stderr == "imported\n"


def test_the_script_of_the_package_is_main():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\npyro-nami = "pyro_nami.show:main"\n' in text
