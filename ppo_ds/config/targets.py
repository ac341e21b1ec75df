"""Builds objects from open parts of the config: a `_target_` and keyword arguments for its signature.

Positional parameters of the signature are keys of the config. Keyword-only parameters are services, such as
the tokenizer, which the caller provides. An argument annotated ``Annotated[Reward, NESTED]`` is an open part
too, also inside lists, mappings and sections. It is checked together with the outer part, but built before
the outer part, with the same services.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, ValidationError, create_model
from pydantic_core import CoreSchema, core_schema

from ppo_ds.config.reading import complete, problems
from ppo_ds.config.registry import import_target
from ppo_ds.config.types import FROM_LIST, Arguments, Number, OneOf, Section, Text, refuse
from ppo_ds.errors import UserError

_SERVICE = inspect.Parameter.KEYWORD_ONLY
_KEY = inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True)
class Part:
    """A callable with checked arguments, to be called once the services are available."""

    target: Callable[..., Any]
    arguments: dict[str, Any]

    def make(self, key: str, services: dict[str, Any]) -> Any:
        """Calls the target with the services in its signature, among them ``key``, the section's name."""
        available = services | {"key": key}
        wanted = {
            name: available[name]
            for name, parameter in inspect.signature(self.target).parameters.items()
            if parameter.kind is _SERVICE
            and (name in available or parameter.default is inspect.Parameter.empty)
        }
        made = {name: _made(value, f"{key}.{name}", services) for name, value in self.arguments.items()}
        return self.target(**made, **wanted)


class Nested:
    """Marks an argument as an open part."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._part)

    @staticmethod
    def _part(value: Any) -> Part:
        if not isinstance(value, dict):
            refuse("must be a section with a _target_")
        try:
            return _bound(value, "$KEY")
        except UserError as error:
            refuse("\n".join(error.problems), whole_line=True)


NESTED = Nested()


def bind(spec: dict[str, Any], key: str) -> Callable[..., Any]:
    """Checks the arguments of ``spec``; returns a function that takes the services and builds the object.

    ``key`` is the section's name in the config. Before anything is loaded, raises UserError with every
    unknown, missing or mistyped key.
    """
    part = _bound(spec, key)
    return lambda **services: part.make(key, services)


def _bound(spec: dict[str, Any], key: str) -> Part:
    path = spec.get("_target_")
    if path in (None, "", "???"):
        raise UserError(f"{key}._target_ is missing: set it to package.module.name")
    try:
        target = import_target(str(path))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{key}._target_={path}: cannot be imported ({error}); must be package.module.name"
        ) from error
    if not callable(target):
        raise UserError(f"{key}._target_={path}: is not callable; choose a function or a class")
    arguments = read_arguments(arguments_of(target), spec, key)
    # Arguments that are not given keep the default of the signature.
    return Part(target, {name: getattr(arguments, name) for name in arguments.model_fields_set})


def read_arguments(section: type[Section], spec: dict[str, Any], key: str) -> Section:
    """Reads the arguments beside `_target_`. Raises UserError with every problem in them."""
    given = {name: value for name, value in spec.items() if name != "_target_"}
    try:
        # null is valid for an argument, but complete() removes required keys that are null
        return section.model_validate(given | complete(section, given))
    except ValidationError as error:
        raise UserError(*problems(error, section, key).values()) from None


def arguments_of(target: Callable[..., Any]) -> type[Section]:
    """Makes a section whose keys are the positional parameters of a signature."""
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.kind is _KEY:
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[name] = (checked_as(hints.get(name, Any)), default)
    with warnings.catch_warnings():  # pydantic warns of arguments named like its methods
        warnings.simplefilter("ignore", UserWarning)
        return create_model(getattr(target, "__name__", "arguments"), __base__=Arguments, **fields)


def checked_as(hint: Any) -> Any:
    """Converts an argument's annotation to a type that checks YAML values, or to Any if none does."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[checked_as(args[0]), *args[1:]]
    if origin in (Union, types.UnionType):
        return Union[tuple(checked_as(one) for one in args)]  # noqa: UP007
    if origin is Literal:
        return Annotated[Any, OneOf(args)]
    if origin is tuple:
        items = tuple(one if one is ... else checked_as(one) for one in args)
        return Annotated[origin[items], FROM_LIST]
    if origin in (list, dict):
        return origin[tuple(checked_as(one) for one in args)]
    if hint in (int, bool, list, dict, type(None)) or (isinstance(hint, type) and issubclass(hint, Section)):
        return hint
    return {float: Number, str: Text}.get(hint, Any)


def _made(value: Any, key: str, services: dict[str, Any]) -> Any:
    if isinstance(value, Part):
        return value.make(key, services)
    if isinstance(value, dict):
        return {name: _made(item, f"{key}.{name}", services) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_made(item, f"{key}[{i}]", services) for i, item in enumerate(value))
    if isinstance(value, Section):
        made = {name: _made(item, f"{key}.{name}", services) for name, item in value}
        return value.model_copy(update=made)
    return value
