"""Constrained answers: what a grammar lets through, whatever the model wants."""

import json

import numpy as np
import pytest

import k3mlx.grammar as grammar
from k3mlx.channels import OutputParser
from k3mlx.errors import K3Error, UsageError
from k3mlx.generation import RunOptions, chat_prompt, run_prompt
from k3mlx.grammar import Grammars
from k3mlx.sampling import SamplingOptions
from tests.text import SIGNS, bytewise, marked, with_tokens

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": 'a&"b',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "days": {"type": "integer"},
                    "list": {"type": ["array", "null"]},
                },
                "required": ["city", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "bare"}},
]
VOCABULARIES = [bytewise(), with_tokens(['"}', '{"', " tool", '="', "call", "}\n\n", "5,", "response", '"s'])]


@pytest.fixture(params=VOCABULARIES, ids=["bytes", "longer"])
def grammars(request):
    return Grammars(request.param)


def accepts(grammars, maker, text):
    """Whether a whole message is allowed, its end included."""
    tokenizer, matcher = grammars._tokenizer, maker()
    for id in tokenizer.encode(marked(text), allow_special=True):
        if not np.isfinite(matcher.mask(np.zeros(tokenizer.vocab_size, np.float32))[id]):
            return False
        matcher.accept(id)
    return True


JSON_END = ")response·)message·¶"


@pytest.mark.parametrize(
    ("start", "text", "allowed"),
    [
        ("response", '{"n": 5, "s": "x"}' + JSON_END, True),
        ("response", '{\n  "n": -5,\n  "s": "é🚀"\n}' + JSON_END, True),
        ("response", '{"n":5,"s":"a|b"}' + JSON_END, True),
        ("response", '{"n": 5.5, "s": "x"}' + JSON_END, False),
        ("response", '{"n": 5}' + JSON_END, False),
        ("response", '{"n": 5, "s": "x", "t": 1}' + JSON_END, False),
        ("response", '```json\n{"n": 5, "s": "x"}' + JSON_END, False),
        ("response", '{"n": 5, "s": "x"} ok' + JSON_END, False),
        ("response", '{"n": 5, "s": "x"' + JSON_END, False),
        ("response", "[1]" + JSON_END, False),
        ("response", JSON_END, False),
        ("response", '{"n": 5,' + " " * 41, False),
        ("think", 'why "not"?)think·(response·{"n": 5, "s": "x"}' + JSON_END, True),
        ("think", ')think·(response·{"n": 5, "s": "x"}' + JSON_END, True),
        ("think", '{"n": 5, "s": "x"}' + JSON_END, False),
        ("think", "why)message·¶", False),
        ("think", "why¶", False),
        ("response", '{"n": 5, "s": "(open', False),  # report 22: no control id within a string
        ("response", '{"n": 5, "s": "¶', False),
        ("response", '{"n": 5, "s": "[EOS]', False),
        ("think", "(open", False),
    ],
)
def test_json_of_a_schema(grammars, start, text, allowed):
    assert accepts(grammars, grammars.json(start, SCHEMA), text) is allowed


def test_any_object(grammars):
    maker = grammars.json("response", {"type": "object"})
    assert accepts(grammars, maker, '{"a": [1, {"b": null}]}' + JSON_END)
    assert not accepts(grammars, maker, '"text"' + JSON_END)


CALL = '(call tool="a&amp;&quot;b" index="1"·{})call·'
CITY = '(argument key="city" type="string"·Pa"ris <é>)argument·'
DAYS = '(argument key="days" type="number"·3)argument·'
TAIL = ")tools·)message·¶"


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (f"(tools·{CALL.format(CITY + DAYS)}{TAIL}", True),
        (f"(tools·{CALL.format(CITY + DAYS)}{CALL.format(CITY + DAYS)}{TAIL}", True),
        (f'(tools·(call tool="bare" index="12"·)call·{TAIL}', True),
        (f'(tools·(call tool="bare" index="1"·(argument key="k" type="string"·v)argument·)call·{TAIL}', True),
        (f"(tools·{CALL.format(CITY)}{TAIL}", False),  # days is required
        (f"(tools·{CALL.format(DAYS)}{TAIL}", False),
        (f"(tools·{CALL.format(CITY + DAYS.replace('3', '3.5'))}{TAIL}", False),
        (f"(tools·{CALL.format(CITY + DAYS.replace('number', 'string'))}{TAIL}", False),
        ('(tools·(call tool="other"', False),
        (f"(tools·{TAIL}", False),
        (TAIL.removeprefix(")tools·"), False),  # a call is demanded
    ],
)
def test_calls_of_declared_tools(grammars, text, allowed):
    """Report 23: the open channel is closed first, and the response may hold text or be empty."""
    maker = grammars.calls("think", TOOLS)
    for before in (")think·(response·)response·", "why)think·(response·I look.)response·"):
        assert accepts(grammars, maker, before + text) is allowed
    assert not accepts(grammars, maker, text)
    assert accepts(grammars, grammars.calls("response", TOOLS), ")response·" + text) is allowed


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [
        ('(argument key="unit" type="string"·F)argument·', True),
        ('(argument key="unit" type="string"·K)argument·', False),
        ('(argument key="list" type="array"·[1, "x"])argument·', True),
        ('(argument key="list" type="null"·null)argument·', True),
        ('(argument key="list" type="object"·{})argument·', False),
    ],
)
def test_kinds_of_arguments(grammars, argument, allowed):
    arguments = CITY + argument + DAYS if "unit" in argument else CITY + DAYS + argument
    text = f")response·(tools·{CALL.format(arguments)}{TAIL}"
    assert accepts(grammars, grammars.calls("response", TOOLS), text) is allowed


@pytest.mark.parametrize(
    ("described", "right", "wrong"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("number", "5"), ("string", "x")),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ("null", "null"), ("boolean", "true")),
        ({"$ref": "#/$defs/Pair"}, ("object", '{"q": 1}'), ("object", '{"q": "1"}')),
        ({"type": "array", "items": {"$ref": "#/$defs/Pair"}}, ("array", '[{"q": 1}]'), ("array", "[1]")),
        ({"const": 5}, ("number", "5"), ("number", "6")),
        ({"const": "x"}, ("string", "x"), ("string", "y")),
        ({"enum": [1, "x", None]}, ("string", "x"), ("string", "1")),
        ({"enum": [1, "x", None]}, ("number", "1"), ("number", "2")),
        ({"type": ["integer", "string"]}, ("string", "1"), ("boolean", "true")),
        ({}, ("boolean", "false"), ("boolean", "x")),
        (True, ("string", "anything"), ("number", "x")),
    ],
)
def test_schemas_as_programs_write_them(described, right, wrong):
    grammars = Grammars(bytewise())
    parameters = {
        "type": "object",
        "properties": {"a": described},
        "required": ["a"],
        "$defs": {"Pair": {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}},
    }
    maker = grammars.calls("response", [{"function": {"name": "f", "parameters": parameters}}])
    for (kind, value), allowed in ((right, True), (wrong, False)):
        argument = f'(argument key="a" type="{kind}"·{value})argument·'
        text = f')response·(tools·(call tool="f" index="1"·{argument})call·{TAIL}'
        assert accepts(grammars, maker, text) is allowed, (kind, value)


@pytest.mark.parametrize("described", [{"type": "string", "enum": []}, {"type": "string", "enum": [5]}])
def test_a_tool_without_a_possible_value_is_refused(described):
    parameters = {"type": "object", "properties": {"a": described}}
    with pytest.raises(UsageError, match="no value fits the schema of 'a'"):
        Grammars(bytewise()).calls("response", [{"function": {"name": "f", "parameters": parameters}}])


def test_json_or_calls(grammars):
    maker = grammars.json("response", SCHEMA, TOOLS)
    assert accepts(grammars, maker, '{"n": 1, "s": ""}' + JSON_END)
    assert accepts(grammars, maker, f")response·(tools·{CALL.format(CITY + DAYS)}{TAIL}")
    assert not accepts(grammars, maker, ")response·)message·¶")


def test_a_schema_that_cannot_be_enforced():
    grammars = Grammars(bytewise())
    for schema in ({"type": "nonsense"}, {"type": "object", "properties": 5}, {"$ref": "#/nowhere"}):
        with pytest.raises(UsageError, match="the schema cannot be enforced"):
            grammars.json("response", schema)
    with pytest.raises(UsageError, match="only where the prompt opens"):
        grammars.json("message", SCHEMA)


def test_without_llguidance(monkeypatch):
    monkeypatch.setattr(grammar, "AVAILABLE", False)
    with pytest.raises(UsageError, match=r"pip install llguidance"):
        Grammars(bytewise())


def test_a_dead_end_is_an_error():
    matcher = Grammars(bytewise()).json("response", SCHEMA)()
    matcher.accept(bytewise().encode("x")[0])
    with pytest.raises(K3Error, match="grammar"):
        matcher.mask(np.zeros(bytewise().vocab_size, np.float32))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_model_writes_what_is_asked(engine, seed):
    """Whatever the weights say, the answer is JSON of the schema and the message ends by itself."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "s": {"enum": ["a", "bc"]}},
        "required": ["n", "s"],
        "additionalProperties": False,
    }
    tokenizer = engine.tokenizer
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": "x"}], thinking=False)
    options = RunOptions(SamplingOptions(temp=1, seed=seed), max_tokens=400)
    constraint = Grammars(tokenizer).json("response", schema)()
    *_, last = run_prompt(engine, prompt, options, constraint=constraint)
    done = last.completion
    value = json.loads(done.text)
    assert done.finish_reason == "stop"
    assert set(value) == {"n", "s"}
    assert value["s"] in ("a", "bc")


@pytest.mark.parametrize("seed", range(4))
def test_a_random_model_calls_a_tool(engine, seed):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9}, "c": {"type": "string", "enum": ["x", "y"]}},
        "required": ["n", "c"]}}}]  # fmt: skip
    tokenizer = engine.tokenizer
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": "x"}], thinking=False)
    options = RunOptions(SamplingOptions(temp=1, seed=seed), max_tokens=400, one_call=True)
    parser = OutputParser("response")
    closing = tokenizer.special[SIGNS[")"]]

    class Eager:
        """Closes the response at once, then goes by the grammar."""

        def __init__(self, inner):
            self.inner, self.first = inner, True

        def mask(self, logits):
            masked = self.inner.mask(logits)
            if self.first:
                assert np.isfinite(masked[closing])
                masked = np.full_like(masked, -np.inf)
                masked[closing] = 0
                self.first = False
            return masked

        def accept(self, id):
            parser.feed(tokenizer.piece(id))
            self.inner.accept(id)

    constraint = Eager(Grammars(tokenizer).calls("response", tools)())
    *_, last = run_prompt(engine, prompt, options, constraint=constraint)
    (call,) = last.completion.tool_calls
    arguments = json.loads(call["arguments"])
    assert call["name"] == "f"
    assert arguments["n"] in range(10)
    assert arguments["c"] in ("x", "y")
    assert parser.calls
