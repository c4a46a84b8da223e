"""Answers held to a form: JSON of a schema, or calls of declared tools, enforced id by id.

Owns the grammars and the masks; llguidance (extra `grammar`) does the parsing. A grammar covers the whole
rest of the message, from the channel that the prompt left open, so markers come only where they belong and
never inside a string. Which answers are held to what is decided by the caller.
Source: text specification §2.6, §2.10, reports 22 and 23 of §4.6.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import markers
from .errors import K3Error, UsageError
from .tokenizer import Tokenizer

AVAILABLE = importlib.util.find_spec("llguidance") is not None

_SPACE = r"[ \n\t]{0,40}"  # at one place in JSON; without a limit a model can get lost in it
_ANYTHING = r"/(.|\n)*/"


class Grammars:
    """Compiles grammars for one vocabulary. Raises UsageError if llguidance is not installed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not AVAILABLE:
            raise UsageError("holding answers to a form needs llguidance: pip install llguidance")
        import llguidance

        self._tokenizer = tokenizer
        self._size = tokenizer.vocab_size
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer))
        self._vocabulary = llguidance.LLTokenizer(wrapper, n_vocab=self._size)
        self._matcher = llguidance.LLMatcher

    def json(
        self, start: str, schema: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Callable[[], Matcher]:
        """An answer that is JSON of `schema`; with tools it may be calls instead.

        start: the channel the prompt leaves open. Returns a maker of constraints, one for each answer.
        Raises UsageError for a schema that cannot be enforced.
        """
        close = self._close("response")
        body = f"json {close}"
        if tools:
            body = f"({body} | {close} calls)"
        rules = [f"json: {_json(schema)}"]
        return self._compile(start, body, [*rules, *self._calls(tools)], "the schema")

    def calls(self, start: str, tools: Sequence[Mapping[str, Any]]) -> Callable[[], Matcher]:
        """A message with at least one call of these tools, after any text. Arguments as in `json`."""
        rules = [*self._calls(tools), f"ANSWER: {_ANYTHING}"]
        return self._compile(start, f"ANSWER {self._close('response')} calls", rules, "the tools")

    def _compile(self, start: str, body: str, rules: list[str], what: str) -> Callable[[], Matcher]:
        think = f"THOUGHTS {self._close('think')} {self._open('response')}"
        begin = {"think": think, "response": ""}.get(start)
        if begin is None:
            raise UsageError("an answer can be held to a form only where the prompt opens its channel")
        rules = [f"start: {begin} {body} {self._close('message')}", f"THOUGHTS: {_ANYTHING}", *rules]
        grammar = "\n".join(rules)
        problem = self._matcher.validate_grammar(grammar, self._vocabulary)
        if problem and not problem.startswith("WARNING"):
            raise UsageError(f"{what} cannot be enforced: {problem.splitlines()[0][:300]}")
        return lambda: Matcher(self._matcher(self._vocabulary, grammar, log_level=0), self._size)

    def _calls(self, tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Rules of a tools element with one or more calls."""
        if not tools:
            return []
        names = [f"call{n}" for n in range(len(tools))]
        rules = [
            f"calls: {self._open('tools')} ({' | '.join(names)})+ {self._close('tools')}",
            "INDEX: /[1-9][0-9]*/",
            f"VALUE: {_ANYTHING}",
            'KEY: /[^"]+/',
        ]
        for name, tool in zip(names, tools, strict=True):
            function = tool["function"]
            head = f"{_text('call tool=')} {_text(_quoted(function['name']) + ' index=')} QUOTE INDEX QUOTE"
            arguments, more = self._arguments(name, function.get("parameters"))
            rules += [f"{name}: {self._tag(markers.OPEN, head)} {arguments} {self._close('call')}", *more]
        return [*rules, 'QUOTE: "\\""']

    def _arguments(self, call: str, schema: Any) -> tuple[str, list[str]]:
        """The arguments of a call: declared ones in their order, or any if none are declared."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping) or not properties:
            any_argument = self._argument(f"{_text('argument key=')} QUOTE KEY QUOTE", "string", "VALUE")
            return f"({any_argument})*", []
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts, rules = [], []
        for n, (key, described) in enumerate(properties.items()):
            described = described if isinstance(described, Mapping) else {}
            value, head = f"{call}value{n}", _text(f"argument key={_quoted(key)}")
            forms = []
            for kind in _kinds(described):
                limited = {**shared, **described, "type": _json_type(kind, described)}
                if not self._satisfiable(limited):
                    continue
                form = "VALUE"
                if kind != "string":
                    form = f"{value}{kind}"
                    rules.append(f"{form}: {_json(limited)}")
                elif (choices := _choices(described)) is not None:
                    form = f"{value}{kind}"
                    rules.append(f"{form}: {' | '.join(map(_text, choices))}")
                forms.append(self._argument(head, kind, form))
            if not forms:
                raise UsageError(f"the tools cannot be enforced: no value fits the schema of {key!r}")
            rules.append(f"{value}: {' | '.join(forms)}")
            parts.append(value if key in required else f"({value})?")
        return " ".join(parts), rules

    def _satisfiable(self, schema: Mapping[str, Any]) -> bool:
        problem = self._matcher.validate_grammar(f"start: {_json(schema)}", self._vocabulary)
        return "nsatisfiable" not in problem

    def _argument(self, head: str, kind: str, value: str) -> str:
        opening = self._tag(markers.OPEN, f"{head} {_text(' type=' + _quoted(kind))}")
        return f"{opening} {value} {self._close('argument')}"

    def _open(self, name: str) -> str:
        return self._tag(markers.OPEN, _text(name))

    def _close(self, name: str) -> str:
        return self._tag(markers.CLOSE, _text(name))

    def _tag(self, marker: str, head: str) -> str:
        ids = self._tokenizer.special
        return f"<[{ids[marker]}]> {head} <[{ids[markers.SEP]}]>"


class Matcher:
    """The state of one answer against its grammar; a `generation.Constraint`."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def mask(self, logits: np.ndarray) -> np.ndarray:
        """The logits [V], minus infinity where the grammar does not allow an id."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)
        masked = np.full_like(logits, -np.inf)
        masked[: self._size][allowed] = logits[: self._size][allowed]
        if self._matcher.is_error() or not allowed.any():
            raise K3Error(f"the grammar of this answer failed: {self._matcher.get_error() or 'no way on'}")
        return masked

    def accept(self, id: int) -> None:
        """The id was drawn."""
        self._matcher.consume_token(id)


class _Vocabulary:
    """A tokenizer as llguidance reads one: control ids apart, so that text never matches them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.special[markers.END_OF_MSG]
        self.bos_token_id = None
        self.special_token_ids = sorted(tokenizer.special.values())
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded)


def _json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, as the grammar names it."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _SPACE}})}"


def _text(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _quoted(value: str) -> str:
    """An attribute's value with its quotes, escaped as the format does."""
    escaped = value.replace("&", "&amp;").replace('"', "&quot;")
    return f'"{escaped}"'


def _kinds(described: Mapping[str, Any]) -> list[str]:
    """The types that an argument's element may name, for a property's schema; all if it names none."""
    kinds = described.get("type")
    if isinstance(kinds, str):
        kinds = [kinds]
    known = ("string", "number", "boolean", "null", "object", "array")
    if isinstance(kinds, list):
        named = dict.fromkeys("number" if kind == "integer" else kind for kind in kinds)
        kinds = [kind for kind in named if kind in known]
    return kinds or list(known)


def _json_type(kind: str, described: Mapping[str, Any]) -> str:
    return "integer" if kind == "number" and described.get("type") == "integer" else kind


def _choices(described: Mapping[str, Any]) -> list[str] | None:
    """The strings that a property's schema lists, None if it lists nothing."""
    listed = [described["const"]] if "const" in described else described.get("enum")
    return [choice for choice in listed if isinstance(choice, str)] if isinstance(listed, list) else None
