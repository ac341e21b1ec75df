"""Defines the types of config keys, for values from YAML.

Bools are not accepted as numbers, nor numbers as bools. Text accepts integers, and Number accepts numbers
written as text. `read` in reading.py converts pydantic's errors to one line per problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan, BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from ppo_ds.config.text import did_you_mean, short

SectionT = TypeVar("SectionT", bound="Section")


class Section(BaseModel):
    """A section of the config: unknown keys are errors, and values cannot change after validation."""

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,  # the docstring below a key is its description
    )

    @classmethod
    def variant_of(cls, tree: Any) -> type[Self]:
        """Returns the class with which ``tree`` is read: this class; in Variants, the chosen variant."""
        return cls

    @classmethod
    def all_fields(cls) -> dict[str, FieldInfo]:
        """Returns the fields by name; in Variants, those of all variants."""
        return cls.model_fields


class Arguments(Section, use_attribute_docstrings=False):
    """A section made from the arguments of a function. Its keys have no docstrings that describe them."""


class Variants(Section):
    """A section in which one key, named by ``tag``, chooses a variant: a subclass with additional keys.

    A subclass is a variant if the type of this key is a Literal with one name, which is also the default. No
    other registration is necessary. A key must have the same meaning, range and default in all variants.
    """

    tag: ClassVar[str]
    variants: ClassVar[dict[str, type[Any]]]
    code: ClassVar[str] = ""  # name of the class variable that holds the dotted name of a variant's code
    # if the code is a function: the names of its arguments, and the type of its result
    interface: ClassVar[tuple[tuple[str, ...], str] | None] = None

    @classmethod
    def add(cls, name: str, target: Any, path: str) -> None:
        """Adds a user's variant ``name``.

        ``target`` is a subclass of this class, or the function or class that the variant selects, with the
        dotted name ``path``. In the second case, the variant has only the keys that all variants have.
        """
        own = isinstance(target, type) and issubclass(target, cls)
        values = {cls.tag: name, "__annotations__": {cls.tag: Literal[name]}, "__module__": __name__}
        code = {} if own else {cls.code: path}
        type(target.__name__, (target if own else cls,), values | code | {"__doc__": target.__doc__})

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if get_origin(cls.model_fields[cls.tag].annotation) is Literal:
            cls.variants[cls.model_fields[cls.tag].default] = cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if "tag" in cls.__dict__:
            return core_schema.no_info_plain_validator_function(cls.read)
        return handler(source)

    @classmethod
    def read(cls, tree: Any) -> Self:
        """Makes a section of the variant that ``tree`` chooses."""
        return tree if isinstance(tree, cls) else cls.variant_of(tree).model_validate(tree)

    @classmethod
    def variant_of(cls, tree: Any) -> type[Self]:
        """Returns the variant that ``tree`` chooses, or the default variant if the name is unknown."""
        if "tag" not in cls.__dict__:  # a variant
            return cls
        name = tree.get(cls.tag) if isinstance(tree, Mapping) else None
        default = cls.model_fields[cls.tag].default
        return cls.variants[name if isinstance(name, str) and name in cls.variants else default]

    @classmethod
    def all_fields(cls) -> dict[str, FieldInfo]:
        """Returns the fields by name: those of a variant, or on the base class those of all variants."""
        if "tag" not in cls.__dict__:
            return cls.model_fields
        fields: dict[str, FieldInfo] = {}
        for variant in cls.variants.values():
            fields |= {name: field for name, field in variant.model_fields.items() if name not in fields}
        return fields | {cls.tag: cls.model_fields[cls.tag]}

    @classmethod
    def users(cls, key: str) -> list[str]:
        return [name for name, variant in cls.variants.items() if key in variant.model_fields]

    @classmethod
    def foreign(cls, key: str, value: Any, default: Any) -> Iterator[str]:
        """Yields an error line for each non-default value at or below ``key``, a key of other variants."""
        section, _, name = key.rpartition(".")
        users, defaults = " or ".join(cls.users(name)), dict(leaves(default))
        for path, item in leaves(value):
            usual = defaults.get(path)
            if item != usual:
                yield (
                    f"{'.'.join((key, *path))}={short(item)}: only used with {section}.{cls.tag}={users} "
                    f"(it is {cls.model_fields[cls.tag].default}); set it to {short(usual)}"
                )


def replace(section: SectionT, **values: Any) -> SectionT:
    """Copies a section with new values, like `dataclasses.replace`. The new values are not validated."""
    assert values.keys() <= type(section).model_fields.keys(), f"no such keys: {values}"
    return section.model_copy(update=values)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields path and value of every key at or below ``path``; an empty mapping counts as a value."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, (*path, str(name)))
    else:
        yield path, value


def meaning(field: FieldInfo) -> str:
    """Returns the description of a key, on one line."""
    return " ".join((field.description or "").split())


def parts_of(section: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (config key, dict) for ``section`` itself, with the key ``key``, and for every dict inside."""
    yield key, section
    for name, inner in section.items():
        if isinstance(inner, dict):
            yield from parts_of(inner, f"{key}.{name}")


def refuse(message: str, *, whole_line: bool = False) -> NoReturn:
    """Raises the error of a validator; the error line becomes ``key=value: message``.

    With ``whole_line``, the line is only the message, in which $KEY and $SECTION are replaced by the key and
    its section. Use it for a value that must not be printed, and for a message of several lines.
    """
    raise PydanticCustomError("whole_line" if whole_line else "refused", "{message}", {"message": message})


@dataclass(frozen=True)
class Must:
    """Accepts values for which ``accepts`` is true: ``Annotated[str, Must(accepts, "a name")]``."""

    accepts: Callable[[Any], object]
    be: str  # completes "must be ..."

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        return value if self.accepts(value) else refuse(f"must be {self.be}")


@dataclass(frozen=True)
class OneOf:
    """Accepts the names or numbers in two collections: ``table``, which may grow later, and ``also``."""

    table: Iterable[Any]
    also: tuple[Any, ...] = ()

    @property
    def choices(self) -> list[Any]:
        return [*self.also, *self.table]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, value: Any) -> Any:
        # compares types too: 0 == False == 0.0 in Python, but only 0 is a ZeRO stage
        if any(value == choice and type(value) is type(choice) for choice in self.choices):
            return value
        names = [str(choice) for choice in self.choices]
        refuse(f"must be one of {', '.join(names)}{did_you_mean(str(value), names)}")


def _number(value: Any) -> Any:
    """Converts text to a number where possible, since YAML 1.1 parses 1e-6 as text."""
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


RANGE = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # attribute of a bound -> words
Text = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
Number = Annotated[float, BeforeValidator(_number), AllowInfNan(False)]
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[Number, Gt(0)]
NonNegative = Annotated[Number, Ge(0)]
Fraction = Annotated[Number, Ge(0), Le(1)]
# converts a list from YAML to a tuple
FROM_LIST = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
