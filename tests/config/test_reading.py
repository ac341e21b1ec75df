from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import Ge, Le
from pydantic import Field, create_model

from ppo_ds.config.reading import dotted_keys, read, with_defaults
from ppo_ds.config.types import (
    FROM_LIST,
    Count,
    Fraction,
    Must,
    Number,
    OneOf,
    Positive,
    Section,
    Text,
    Variants,
    refuse,
    replace,
)
from ppo_ds.errors import UserError

Pair = Annotated[tuple[Number, Number], FROM_LIST]


class Inner(Section):
    path: Text
    depth: Count = 1
    mode: Literal["a", "b"] | None = None


class Outer(Section):
    inner: Inner
    rates: Pair = (0.5, 0.25)
    tags: list[Text] = []


def convert(value: Any, annotation: Any) -> Any:
    """Reads a value as key ``k`` of the given type.

    Raises:
        UserError: with the error lines, if the value is refused.
    """
    section = create_model("K", __base__=Section, k=(annotation, None))
    made, problems = read(section, {"k": value})
    if problems:
        raise UserError(*problems.values())
    return made.k


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        (3, Number, 3.0),
        ("1e-6", Number, 1e-6),
        ("1e-6", Number | None, 1e-6),
        (None, Number | None, None),
        (7, Text, "7"),
        ("b", Literal["a", "b"], "b"),
        (0, Annotated[Any, OneOf((0, 3))], 0),
        ([1, "2e0"], list[Number], [1.0, 2.0]),
        ([1, 2], Pair, (1.0, 2.0)),
        ([1, 2, 3], Annotated[tuple[int, ...], FROM_LIST], (1, 2, 3)),
        ({"a": 1}, dict[str, Number], {"a": 1.0}),
        ({"a": [1]}, dict[str, Any], {"a": [1]}),
        (0, Fraction, 0.0),
        (5, Annotated[int, Ge(5), Le(5)], 5),
        ({"path": "x", "depth": 2}, Inner, Inner(path="x", depth=2)),
        ({"path": "x"}, Inner | None, Inner(path="x")),
        ("anything", object, "anything"),
    ],
)
def test_converts(value: Any, annotation: Any, expected: Any) -> None:
    converted = convert(value, annotation)
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "line"),
    [
        (True, int, "k=true: must be a whole number"),
        (True, Number, "k=true: must be a number"),
        (2.0, int, "k=2.0: must be a whole number"),
        ("ten", int, "k=ten: must be a whole number"),
        ("fast", Number | None, "k=fast: must be a number or null"),
        (float("nan"), Number, "k=nan: must be a number"),
        ("inf", Number, "k=inf: must be a number"),
        (1, bool, "k=1: must be true or false"),
        (None, Text, "k=null: must be text"),
        (False, Annotated[Any, OneOf((0, 3))], "k=false: must be one of 0, 3"),
        ("c", Literal["a", "b"] | None, "k=c: must be one of a, b or null"),
        (0, Count, "k=0: must be at least 1"),
        (0, Positive, "k=0: must be above 0"),
        (1.5, Fraction, "k=1.5: must be at least 0 and at most 1"),
        ("a", list[Text], "k=a: must be a list, as in k=[a]"),
        (["a", None], list[Text], "k[1]=null: must be text"),
        ([1], Pair, "k=[1]: must be a list of 2"),
        (3, dict[str, Any], "k=3: must be a mapping (k.<name>=<value>)"),
        ({"a": "x"}, dict[str, Number], "k.a=x: must be a number"),
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
        convert(value, annotation)
    assert error.value.problems == [line]


def test_everything_wrong_is_found_at_once_and_the_rest_is_kept() -> None:
    made, problems = read(Outer, {"inner": {"depth": "x", "mode": "b"}, "rates": [1, True], "tag": ["a"]})
    assert list(problems) == ["tag", "inner.path", "inner.depth", "rates[1]"]
    assert problems["rates[1]"] == "rates[1]=true: must be a number"
    assert made.inner == Inner(path="", depth=1, mode="b") and made.rates == (0.5, 0.25)


def test_all_that_is_wrong_in_a_list_or_a_mapping_is_found_at_once() -> None:
    with pytest.raises(UserError) as error:
        convert({"a": {"depth": 0}, "b": {"path": "x"}, "c": 1}, dict[str, Inner])
    assert error.value.problems == [
        "k.a.path is missing",
        "k.a.depth=0: must be at least 1",
        "k.c=1: must be a section with keys path, depth, mode",
    ]
    with pytest.raises(UserError) as error:
        convert([1, "x", None], list[Number])
    assert error.value.problems == ["k[1]=x: must be a number", "k[2]=null: must be a number"]


def test_did_you_mean_looks_deeper_then_beside_then_elsewhere() -> None:
    _, problems = read(
        Outer, {"depth": 1, "inner": {"path": "x", "pth": 1, "tags": []}, "inner_mode": "a", "zzz": 1}
    )
    assert problems["depth"].endswith("did you mean inner.depth?")
    assert problems["inner.pth"].endswith("did you mean inner.path?")
    assert problems["inner.tags"].endswith("did you mean tags?")
    assert problems["inner_mode"].endswith("did you mean inner.mode?")
    assert problems["zzz"].endswith("the keys of the config are inner, rates, tags")


def test_a_value_of_many_lines_is_shown_on_one() -> None:
    with pytest.raises(UserError, match=r"^k=a b: must be a number$"):
        convert("a\n  b", Number)


def test_defaults_leave_out_what_has_none() -> None:
    assert with_defaults(Outer, {}) == {"inner": {"depth": 1, "mode": None}, "rates": (0.5, 0.25), "tags": []}
    assert dotted_keys(Outer) == ["inner", "inner.path", "inner.depth", "inner.mode", "rates", "tags"]


def test_a_required_section_that_is_absent_names_what_it_lacks() -> None:
    _, problems = read(Outer, {})
    assert problems == {"inner.path": "inner.path is missing"}


def test_a_required_key_without_a_value_is_missing_and_its_description_says_what_is_due() -> None:
    section = create_model("K", __base__=Section, path=(Text, Field(description="A model folder.")))
    for nothing in (None, "", "???"):
        made, problems = read(section, {"path": nothing})
        assert problems == {"path": "path is missing: a model folder"} and made.path == ""


def test_unions_name_all_of_their_types() -> None:
    with pytest.raises(UserError, match=r"^k=2.5: must be a whole number or auto or null$"):
        convert(2.5, int | Literal["auto"] | None)
    for value in (0, "Auto"):
        with pytest.raises(UserError, match=rf"^k={value}: must be a whole number at least 1 or auto$"):
            convert(value, Count | Literal["auto"])
    with pytest.raises(UserError, match=r"^k=c: must be a number or one of a, b$"):
        convert("c", Number | Literal["a", "b"])


def test_conditions_of_ones_own() -> None:
    even = Annotated[int, Must(lambda value: value % 2 == 0, "even")]
    assert convert(2, even) == 2 and convert(None, even | None) is None
    with pytest.raises(UserError, match=r"^k=3: must be even or null$"):
        convert(3, even | None)
    with pytest.raises(UserError, match=r"^k=x: must be a whole number$"):
        convert("x", even)


def test_tables_may_grow() -> None:
    table = {"a": 1}
    choice = Annotated[str, OneOf(table, also=("auto",))]
    with pytest.raises(UserError, match=r"^k=b: must be one of auto, a$"):
        convert("b", choice)
    table["b"] = 2
    assert convert("b", choice) == "b"


def test_a_validator_may_keep_a_value_out_of_its_line() -> None:
    secret = Annotated[
        str, Must(lambda value: refuse("$KEY: is a secret, see $SECTION.z", whole_line=True), "")
    ]
    inner = create_model("Inner", __base__=Section, k=(secret, "none"))
    with pytest.raises(UserError, match=r"^k.k: is a secret, see k.z$"):
        convert({"k": "hidden"}, inner)


def test_sections_are_frozen_and_copied_with_known_keys_only() -> None:
    inner = Inner(path="x")
    with pytest.raises(ValueError, match="frozen"):
        inner.depth = 2
    assert replace(inner, depth=2) == Inner(path="x", depth=2) and inner.depth == 1
    with pytest.raises(AssertionError, match="dept"):
        replace(inner, dept=2)


class Shape(Variants):
    """A shape."""

    tag = "kind"
    variants: ClassVar[dict[str, type[Any]]] = {}
    kind: Annotated[str, OneOf(variants)] = Field("circle", description="Kind.")
    color: Text = "red"


class Round(Shape):
    """A shape with a radius; no variant, since it has no name."""

    radius: Positive = 1.0


class Circle(Round):
    kind: Literal["circle"] = "circle"


class Ring(Round):
    kind: Literal["ring"] = "ring"
    width: Positive = 0.5


class Square(Shape):
    kind: Literal["square"] = "square"
    side: Positive = 1.0


class Drawing(Section):
    shape: Shape


@pytest.mark.parametrize(
    ("tree", "lines"),
    [
        ({"kind": "ring", "width": 2}, []),
        ({"kind": "square", "radius": 1}, []),  # the default of another variant, as a preset may set it
        (
            {"kind": "square", "radius": 2, "side": 3},
            ["shape.radius=2: only used with shape.kind=circle or ring (it is square); set it to 1"],
        ),
        ({"width": 2.5}, ["shape.width=2.5: only used with shape.kind=ring (it is circle); set it to 0.5"]),
        (
            {"kind": "squar", "side": 3},
            ["shape.kind=squar: must be one of circle, ring, square; did you mean square?"],
        ),
        ({"kind": None}, ["shape.kind=null: must be one of circle, ring, square"]),
        ({"kind": "ring", "width": 0, "colr": 1}, None),
        (3, ["shape=3: must be a section with keys kind, color, radius, width, side"]),
    ],
)
def test_a_section_with_variants(tree: Any, lines: list[str] | None) -> None:
    drawing, found = read(Drawing, {"shape": tree})
    if lines is None:
        lines = ["shape.colr=1: no such key; did you mean shape.color?", "shape.width=0: must be above 0"]
    assert list(found.values()) == lines
    assert type(drawing.shape) is Shape.variant_of(tree)


def test_defaults_are_those_of_the_chosen_variant() -> None:
    made = with_defaults(Drawing, {"shape": {"kind": "square", "radius": 2}})
    assert made == {"shape": {"kind": "square", "color": "red", "side": 1.0, "radius": 2}}
    like = {"shape": {"kind": "ring"}}
    assert with_defaults(Drawing, {"shape": {"kind": "square"}}, like)["shape"].keys() == {
        *("kind", "color", "radius", "width")
    }
    shape = Drawing.model_validate({"shape": {"kind": "ring", "width": 2}})
    assert shape.model_dump() == {"shape": {"kind": "ring", "color": "red", "radius": 1.0, "width": 2.0}}
    assert dotted_keys(Drawing)[1:] == [
        f"shape.{key}" for key in ("kind", "color", "radius", "width", "side")
    ]
