"""JSON as the prompt format writes and reads it.

Owns the two written forms (sorted and compact for declarations, plain for call arguments) and the strict
reading of what a model or a client wrote. Knows nothing of messages or tags.
Source: text specification §2.3, §2.6, §4.2.
"""

import json
from typing import Any, NoReturn

from k3mlx.errors import UsageError


def parse(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for anything else, also NaN and nesting past the stack."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def is_json(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def dump(value: Any, where: str) -> str:
    """JSON text with a space after commas and colons, keys in their order, non-ASCII characters raw.

    Raises UsageError, naming ``where``, for what JSON cannot hold.
    """
    return _dump(value, where, sort_keys=False, separators=(", ", ": "))


def dump_sorted(value: Any, where: str) -> str:
    """JSON text without spaces, keys sorted by code point at every depth, non-ASCII characters raw.

    Raises UsageError, naming ``where``, for what JSON cannot hold.
    """
    return _dump(value, where, sort_keys=True, separators=(",", ":"))


def _dump(value: Any, where: str, *, sort_keys: bool, separators: tuple[str, str]) -> str:
    try:
        return json.dumps(
            value, sort_keys=sort_keys, separators=separators, ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be written as JSON ({error}); expected plain JSON values") from None


def kind(value: Any) -> str | None:
    """The JSON type of a value, as call arguments name it; None for what JSON does not have."""
    if isinstance(value, bool):  # before numbers: to Python, True is an int
        return "boolean"
    types: tuple[tuple[Any, str], ...] = (
        (str, "string"),
        (int | float, "number"),
        (dict, "object"),
        (list | tuple, "array"),
        (type(None), "null"),
    )
    return next((name for python, name in types if isinstance(value, python)), None)


def short(value: Any) -> str:
    """A value as an error message shows it: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
