"""Tests that keys beside ``_target_`` are checked against the callable's signature before it is called."""

from typing import Annotated, Literal

import pytest

from ppo_ds.config.targets import NESTED, bind
from ppo_ds.config.types import Count, Fraction, Section
from ppo_ds.errors import UserError

HERE = __name__
NOT_CALLABLE = 3
CALLS = []


class Engine(Section):
    power: float
    fuel: Literal["gas", "coal"] = "gas"


class Machine:
    def __init__(self, path: str, batch: Count = 8, ratio: Fraction | None = None, *, tokenizer, world=None):
        self.given = (path, batch, ratio, tokenizer, world)


def powered(engine: Engine, *, note: str = "none"):
    return engine, note


class Trailer(Section):
    pulled: Annotated[object, NESTED]
    load: float = 1.0


class Train:
    def __init__(
        self,
        first: Annotated[object, NESTED],
        others: list[Annotated[object, NESTED]] = (),
        named: dict[str, Trailer] | None = None,
        spare: Annotated[object, NESTED] | None = None,
        *,
        tokenizer,
        key="",
    ):
        self.first, self.others, self.named, self.spare, self.services = (
            first,
            others,
            named,
            spare,
            (tokenizer, key),
        )


def plain(path):
    CALLS.append(path)
    return path


def named(path, *, key="reward"):
    return path, key


def open_ended(path, *rest, **others):
    return path, rest, others


def refused(spec, *lines):
    with pytest.raises(UserError) as caught:
        bind(spec, "reward")
    assert len(caught.value.problems) == len(lines), caught.value.problems
    for problem, line in zip(caught.value.problems, lines, strict=True):
        assert problem.startswith(line) and "\n" not in problem, problem
    return caught.value.problems


def spec(name, **keys):
    return {"_target_": f"{HERE}.{name}", **keys}


def test_keys_are_typed_and_defaults_stay_the_callables_own():
    make = bind(spec("Machine", path="x", ratio=1), "reward")
    given = make(tokenizer="t", world="w").given
    assert given == ("x", 8, 1.0, "t", "w") and isinstance(given[2], float)


def test_only_services_that_are_named_are_injected():
    assert bind(spec("Machine", path="x", batch=2), "reward")(tokenizer="t", world="w", device="d").given == (
        "x",
        2,
        None,
        "t",
        "w",
    )
    assert bind(spec("plain", path="y"), "reward")(tokenizer="t") == "y"


def test_the_sections_own_name_is_a_service():
    assert bind(spec("named", path="x"), "reward.parts.a")() == ("x", "reward.parts.a")
    refused(
        spec("named", path="x", key="mine"), "reward.key=...: no such key"
    )  # the value is not shown, since it may be a secret


def test_a_service_with_a_default_may_be_absent():
    engine, note = bind(spec("powered", engine={"power": 2}), "reward")(tokenizer="t")
    assert (engine, note) == (Engine(power=2.0, fuel="gas"), "none")


def test_a_service_cannot_be_set_from_the_config():
    refused(
        spec("Machine", path="x", tokenizer="mine"),
        "reward.tokenizer=mine: no such key; the keys of reward are path, batch, ratio",
    )


def test_unknown_key_with_a_suggestion_and_without():
    refused(spec("Machine", path="x", bach=4), "reward.bach=4: no such key; did you mean reward.batch?")
    refused(spec("plain", path="x", zzz=None), "reward.zzz=null: no such key; the keys of reward are path")


def test_open_ended_signatures_take_no_keys_beyond_the_named_ones():
    assert bind(spec("open_ended", path="x"), "reward")(tokenizer="t") == ("x", (), {})
    refused(spec("open_ended", path="x", rest=1), "reward.rest=1: no such key; the keys of reward are path")


def test_missing_key():
    refused(spec("Machine"), "reward.path is missing")


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        (dict(batch="many"), "reward.batch=many: must be a whole number"),
        (dict(batch=0), "reward.batch=0: must be at least 1"),
        (dict(batch=True), "reward.batch=true: must be a whole number"),
        (dict(ratio=1.5), "reward.ratio=1.5: must be at least 0 and at most 1"),
    ],
)
def test_wrong_type(keys, line):
    refused(spec("Machine", path="x", **keys), line)


def test_all_problems_come_together():
    refused(
        spec("Machine", batch="many", size=1),
        "reward.size=1: no such key",
        "reward.path is missing",
        "reward.batch=many: must be",
    )


def test_dataclass_arguments_are_read_as_sections():
    refused(
        spec("powered", engine={"fuel": "oil"}),
        "reward.engine.power is missing",
        "reward.engine.fuel=oil: must be one of gas, coal",
    )
    refused(
        spec("powered", engine={"power": 1, "fule": "gas"}),
        "reward.engine.fule=gas: no such key; did you mean reward.engine.fuel?",
    )


def test_a_section_that_is_not_there_lacks_its_own_required_keys():
    refused(spec("powered"), "reward.engine.power is missing")


def test_nested_sections_are_made_with_the_same_services_and_know_their_keys():
    train = bind(
        spec(
            "Train",
            first=spec("Train", first=spec("named", path="deep")),
            others=[spec("named", path="one"), spec("Machine", path="two", batch=2)],
            named={"x": {"pulled": spec("named", path="three"), "load": 2}},
        ),
        "reward",
    )(tokenizer="t")
    assert train.services == ("t", "reward") and train.spare is None
    assert (train.first.services, train.first.first) == (
        ("t", "reward.first"),
        ("deep", "reward.first.first"),
    )
    assert train.others[0] == ("one", "reward.others[0]") and train.others[1].given == (
        "two",
        2,
        None,
        "t",
        None,
    )
    assert (train.named["x"].pulled, train.named["x"].load) == (("three", "reward.named.x.pulled"), 2.0)


def test_problems_of_nested_sections_come_together():
    nested = spec(
        "Train",
        first=spec("Machine", bach=3),
        others=[spec("plain"), "text", {"path": "x"}],
        named={"x": {"load": "heavy"}, "y": {"pulled": spec("Machine", path="p", ratio=2)}},
        spare=spec("Train", first=spec("nothing")),
    )
    refused(
        nested,
        "reward.first.bach=3: no such key; did you mean reward.first.batch?",
        "reward.first.path is missing",
        "reward.others[0].path is missing",
        "reward.others[1]=text: must be a section with a _target_",
        "reward.others[2]._target_ is missing",
        "reward.named.x.pulled is missing",
        "reward.named.x.load=heavy: must be a number",
        "reward.named.y.pulled.ratio=2: must be at least 0",
        f"reward.spare.first._target_={HERE}.nothing: cannot be imported",
    )


def test_nothing_is_called_before_the_services_are_there():
    make = bind(spec("Train", first=spec("plain", path="z")), "prepare")
    assert CALLS.count("z") == 0
    make(tokenizer="t")
    assert CALLS.count("z") == 1


@pytest.mark.parametrize("target", ["no.such.module", f"{HERE}.Missing", "nodots", "..", "os.path.nothing"])
def test_not_importable(target):
    refused({"_target_": target}, f"reward._target_={target}: cannot be imported")


def test_not_callable_and_no_target():
    refused({"_target_": f"{HERE}.NOT_CALLABLE"}, f"reward._target_={HERE}.NOT_CALLABLE: is not callable")
    for nothing in ({}, {"_target_": ""}, {"_target_": None}, {"_target_": "???"}):
        refused(nothing | {"path": "x"}, "reward._target_ is missing: set it to package.module.name")
