import re

import pytest

from pyro_nami.graph import BayesNet, Site, nami
from pyro_nami.show.render import render

AWKWARD = [
    *(1, "1", ("z", 1), 'quo"te', "back\\slash", "trailing\\", "a&lt;b", "line\nbreak"),
    *("#34;", "`x`", None, "é", "]"),
]


@pytest.fixture
def net():
    return BayesNet(
        [
            Site("mu"),
            Site("theta", plates={"school"}),
            Site("k", plates={"school", "pupil"}, marginalized=True),
            Site("y", plates={"school", "pupil"}, observed=True),
            Site("w", plates={"pupil"}),
            Site("pred", plates={"school"}),
        ],
        [("mu", "theta"), ("theta", "k"), ("k", "y"), ("w", "y"), ("theta", "pred")],
        {"pupil": 5, "school": 8},
    )


def plain(count):
    return BayesNet.from_edges([(0, i) for i in range(1, count)], observed=[1])


@pytest.mark.parametrize("invert", [lambda net: net, nami])
def test_text_is_the_objects_own(net, invert):
    assert render(invert(net)) == str(invert(net)) == render(invert(net), "text")


def test_a_network_in_mermaid(net):
    assert render(net, "mermaid").splitlines() == [
        "flowchart TD",
        '  n0(["mu"])',
        '  subgraph p0["school (8)"]',
        '    n1(["theta"])',
        '    n5(["pred"])',
        '    subgraph p1["pupil (5)"]',
        '      n2(["k<br>marginalized"]):::dashed',
        '      n4(["y"]):::observed',
        "    end",
        "  end",
        '  subgraph p2["pupil (5)"]',
        '    n3(["w"])',
        "  end",
        "  n0 --> n1",
        "  n1 --> n2",
        "  n2 --> n4",
        "  n3 --> n4",
        "  n1 --> n5",
        "  classDef observed fill:#bbb",
        "  classDef dashed stroke-dasharray:6 4",
    ]


def test_an_inverse_in_mermaid_marks_fill_in_pooling_blocks_and_predictive_latents(net):
    inverse = nami(net, direction="forward")
    drawn = render(inverse, "mermaid")
    assert "k" not in re.findall(r'\["(\w+)', drawn)  # marginalized: no part of the inverse
    ids = {name: id for id, name in re.findall(r'(n\d+)\(\["(\w+)', drawn)}
    arrows = {
        (a, b): (arrow, text)
        for a, arrow, text, b in re.findall(r'(n\d+) (-+>|-\.->)(?:\|"(.*)"\|)? (n\d+)', drawn)
    }
    for v, reads in inverse.parents.items():
        for u in reads:
            arrow, text = arrows.pop((ids[u], ids[v]))
            is_fill_in = (u, v) not in net.edges and (v, u) not in net.edges
            assert arrow == ("-.->" if is_fill_in else "-->")
            assert set(re.findall("school|pupil", text)) == inverse.pooled(v, u)
    assert not arrows
    assert f'{ids["pred"]}(["pred<br>from the model"]):::dotted' in drawn
    for v in inverse.order:
        assert (f"{v}<br>jointly over" in drawn) == bool(inverse.joint[v])
    assert any(inverse.joint.values())


def test_awkward_names_stay_apart_and_are_escaped():
    net = BayesNet.from_edges(zip(AWKWARD, AWKWARD[1:]), observed=AWKWARD[-1:], nodes=AWKWARD)
    mermaid = render(net, "mermaid")
    nodes = re.findall(r'^  (n\d+)\(\["(.*)"\]\)', mermaid, flags=re.M)
    assert len(dict(nodes)) == len({text for _, text in nodes}) == len(AWKWARD)
    assert all(re.fullmatch(r"(?:[\w .,:()\[\]'/-]|#\d+;)*", text) for _, text in nodes)
    decoded = [re.sub(r"#(\d+);", lambda code: chr(int(code[1])), text) for _, text in nodes]
    assert decoded == [name if name == "é" else repr(name) for name in AWKWARD]
    assert len(mermaid.splitlines()) == 1 + len(AWKWARD) + len(AWKWARD) - 1 + 1


@pytest.mark.parametrize(
    ("plates", "sizes", "nesting", "titles"),
    [
        (
            ["obs", "county"],
            {"obs": 9, "county": 3},
            {"obs": ["county"]},
            ["county (3)", "obs (9 in all)"],
        ),
        (["a", "b"], {"b": 2, "a": 3}, {}, ["b (2)", "a (3)"]),
    ],
    ids=[
        "a ragged plate inside those it determines",
        "plates of the same sites as they were given",
    ],
)
def test_plates_are_drawn_in(plates, sizes, nesting, titles):
    of_sites = {"y": plates, "w": plates}
    net = BayesNet.from_edges(
        [("y", "w")], observed=["w"], plates=of_sites, plate_sizes=sizes, nesting=nesting
    )
    assert re.findall(r'subgraph p\d\["(.*)"\]', render(net, "mermaid")) == titles


def test_an_unknown_format_is_an_error():
    with pytest.raises(ValueError, match="'text' or 'mermaid'; got 'ascii'"):
        render(plain(2), "ascii")


def test_only_networks_and_inverses_are_drawn():
    with pytest.raises(TypeError, match="BayesNet or an Inverse; got dict"):
        render({})
