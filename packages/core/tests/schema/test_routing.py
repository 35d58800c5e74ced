"""Test patterns on agent paths, and routing tables."""

import pytest

from lightspan.schema.llm import LLM
from lightspan.schema.routing import (
    Route,
    Routing,
    Rule,
    Target,
    agent_name,
    join_path,
    make_routing,
    matches,
    split_path,
)

# fmt: off
PATTERNS = [
    # pattern            path                      matches
    ("writer",           "writer",                 True),
    ("writer",           "team/writer",            True),
    ("writer",           "writer/team",            False),
    ("writer",           "rewriter",               False),
    ("write*",           "write_query",            True),
    ("*",                "team/sub/writer",        True),
    ("**",               "team/sub/writer",        True),
    ("team/writer",      "team/writer",            True),
    ("team/writer",      "org/team/writer",        False),
    ("team/*",           "team/writer",            True),
    ("team/*",           "team/sub/writer",        False),
    ("team/*",           "team",                   False),
    ("*/writer",         "team/writer",            True),
    ("team/**",          "team",                   True),
    ("team/**",          "team/sub/writer",        True),
    ("**/writer",        "writer",                 True),
    ("**/writer",        "org/team/writer",        True),
    ("team/**/writer",   "team/writer",            True),
    ("team/**/writer",   "team/a/b/writer",        True),
    ("a**/b",            "ab",                     False),   # `**/` is a level only as a whole name
    ("a/**b",            "a/x/yb",                 True),
    ("w.iter",           "writer",                 False),   # nothing but `*` is special
    ("(writer|editor)",  "writer",                 False),
    ("sure?",            "surex",                  False),
    ("a\\d^$",           "a\\d^$",                 True),
    ("Ünïcode-智能体",    "team/Ünïcode-智能体",      True),
    ("ns%2Fwriter",      "ns%2Fwriter",            True),    # a `/` inside a name
    ("ns/writer",        "ns%2Fwriter",            False),
    ("ns*",              "ns%2Fwriter",            True),
    ("100%",             "100%25",                 True),    # as the user wrote the name
    ("Writer",           "writer",                 False),
]
# fmt: on


@pytest.mark.parametrize(("pattern", "path", "expected"), PATTERNS)
def test_a_pattern_matches_what_it_says_and_nothing_else(pattern, path, expected):
    assert matches(pattern, path) is expected


@pytest.mark.parametrize(
    "names",
    [["a"], ["a", "b"], ["a/b", "c"], ["%2F"], ["100%"], ["a%25", "/"], ["", "x"], ["智", "ñ /%"]],
)
def test_a_path_keeps_every_name(names):
    path = join_path(names)
    assert split_path(path) == names
    assert path.count("/") == len(names) - 1
    assert agent_name(path) == names[-1]
    assert matches(path, path)


def test_the_more_specific_pattern_decides_wherever_it_stands():
    routing = make_routing(
        {
            "*": "any",
            "w*": "w",
            "team/*": "team",
            "writer": "writer",
            "team/writer": "team-writer",
        },
        None,
        "any",
    )
    chosen = {path: routing.target(path).policy for path in ("x", "wx", "team/x", "a/writer")}
    assert chosen == {"x": "any", "wx": "w", "team/x": "team", "a/writer": "writer"}
    assert routing.target("team/writer").policy == "team-writer"


def test_what_is_not_selected_goes_where_frozen_says():
    endpoint = LLM(base_url="http://x/v1", model="m")
    frozen = {"checker": "base", "judge": endpoint, "critic": "shared", "planner": None}
    routing = make_routing({"writer": "sql"}, frozen, "sql")
    assert routing.target("writer") == Target(route=Route.POLICY, policy="sql")
    assert routing.target("checker") == Target(route=Route.BASE, policy="base")
    assert routing.target("judge") == Target(route=Route.ENDPOINT, endpoint=endpoint)
    assert routing.target("critic") == Target(route=Route.SHARED, policy="sql")
    assert routing.target("planner").route is Route.APP
    assert routing.target("nobody").route is Route.APP
    assert make_routing({"writer": "sql"}, "base", "sql").target("nobody").route is Route.BASE


def test_frozen_of_an_unknown_word_names_the_words():
    with pytest.raises(ValueError, match=r"'basis'.*base.*shared"):
        make_routing({"writer": "sql"}, "basis", "sql")


def test_unmatched_are_the_trained_patterns_without_an_agent():
    routing = make_routing({"writer": "p", "ghost": "p", "team/*": "p"}, {"checker": "base"}, "p")
    assert routing.unmatched(["writer", "a/b"]) == ["ghost", "team/*"]
    assert routing.unmatched(["writer", "ghost", "team/x"]) == []


def test_the_first_rule_decides():
    first, second = (Target(route=Route.POLICY, policy=name) for name in "ab")
    assert Routing(rules=[Rule("*", first), Rule("*", second)]).target("x") is first
