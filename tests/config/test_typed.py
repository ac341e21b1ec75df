from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from ppo_ds.config.typed import Bound, Count, Fraction, Positive, convert, defaults, dotted_keys, read
from ppo_ds.errors import UserError


@dataclass
class Inner:
    path: str
    depth: Count = 1
    mode: Literal["a", "b"] | None = None


@dataclass
class Outer:
    inner: Inner
    rates: tuple[float, float] = (0.5, 0.25)
    tags: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        ("1e-6", float, 1e-6),
        ("1e-6", float | None, 1e-6),
        (None, float | None, None),
        (7, str, "7"),
        ("b", Literal["a", "b"], "b"),
        (0, Literal[0, 3], 0),
        ([1, "2e0"], list[float], [1.0, 2.0]),
        ([1, 2], tuple[float, float], (1.0, 2.0)),
        ([1, 2, 3], tuple[int, ...], (1, 2, 3)),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"a": [1]}, dict[str, Any], {"a": [1]}),
        (0, Fraction, 0.0),
        (5, Annotated[int, Bound(5, 5)], 5),
        ({"path": "x", "depth": 2}, Inner, Inner("x", 2)),
        ({"path": "x"}, Inner | None, Inner("x")),
        ("anything", object, "anything"),
    ],
)
def test_converts(value: Any, annotation: Any, expected: Any) -> None:
    converted = convert(value, annotation, "k")
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "line"),
    [
        (True, int, "k=true: must be a whole number"),
        (True, float, "k=true: must be a number"),
        (2.0, int, "k=2.0: must be a whole number"),
        ("ten", int, "k=ten: must be a whole number"),
        ("fast", float | None, "k=fast: must be a number or null"),
        (float("nan"), float, "k=nan: must be a number"),
        ("inf", float, "k=inf: must be a number"),
        (1, bool, "k=1: must be true or false"),
        (None, str, "k=null: must be text"),
        (False, Literal[0, 3], "k=false: must be one of 0, 3"),
        ("c", Literal["a", "b"] | None, "k=c: must be one of a, b or null"),
        (0, Count, "k=0: must be at least 1"),
        (0, Positive, "k=0: must be above 0"),
        (1.5, Fraction, "k=1.5: must be at least 0 and at most 1"),
        ("a", list[str], "k=a: must be a list, as in k=[a]"),
        (["a", None], list[str], "k[1]=null: must be text"),
        ([1], tuple[float, float], "k=[1]: must be a list of 2"),
        (3, dict[str, Any], "k=3: must be a mapping (k.<name>=<value>)"),
        ({"a": "x"}, dict[str, float], "k.a=x: must be a number"),
        ({"path": "x", "dept": 2}, Inner, "k.dept=2: no such key; did you mean k.depth?"),
        ({}, Inner, "k.path is missing"),
        (
            "org/name",
            Inner,
            "k=org/name: must be a section with keys path, depth, mode; did you mean k.path=org/name?",
        ),
    ],
)
def test_refuses_with_one_line(value: Any, annotation: Any, line: str) -> None:
    with pytest.raises(UserError) as error:
        convert(value, annotation, "k")
    assert error.value.problems == [line]


def test_everything_wrong_is_found_at_once_and_the_rest_is_kept() -> None:
    problems: dict[str, str] = {}
    made = read(Outer, {"inner": {"depth": "x", "mode": "b"}, "rates": [1, True], "tag": ["a"]}, "", problems)
    assert list(problems) == ["tag", "inner.path", "inner.depth", "rates"]
    assert problems["rates"] == "rates[1]=true: must be a number"
    assert made.inner == Inner("", 1, "b") and made.rates == (0.5, 0.25)


def test_all_that_is_wrong_in_a_list_or_a_mapping_is_found_at_once() -> None:
    with pytest.raises(UserError) as error:
        convert({"a": {"depth": 0}, "b": {"path": "x"}, "c": 1}, dict[str, Inner], "k")
    assert error.value.problems == [
        "k.a.path is missing",
        "k.a.depth=0: must be at least 1",
        "k.c=1: must be a section with keys path, depth, mode",
    ]
    with pytest.raises(UserError) as error:
        convert([1, "x", None], list[float], "k")
    assert error.value.problems == ["k[1]=x: must be a number", "k[2]=null: must be a number"]


def test_did_you_mean_looks_deeper_then_beside_then_elsewhere() -> None:
    problems: dict[str, str] = {}
    read(
        Outer,
        {"depth": 1, "inner": {"path": "x", "pth": 1, "tags": []}, "inner_mode": "a", "zzz": 1},
        "",
        problems,
    )
    assert problems["depth"].endswith("did you mean inner.depth?")
    assert problems["inner.pth"].endswith("did you mean inner.path?")
    assert problems["inner.tags"].endswith("did you mean tags?")
    assert problems["inner_mode"].endswith("did you mean inner.mode?")
    assert problems["zzz"].endswith("the keys of the config are inner, rates, tags")


def test_a_value_of_many_lines_is_shown_on_one() -> None:
    with pytest.raises(UserError, match=r"^k=a b: must be a number$"):
        convert("a\n  b", float, "k")


def test_defaults_leave_out_what_has_none() -> None:
    assert defaults(Outer) == {"inner": {"depth": 1, "mode": None}, "rates": (0.5, 0.25), "tags": []}
    assert dotted_keys(Outer) == ["inner", "inner.path", "inner.depth", "inner.mode", "rates", "tags"]
