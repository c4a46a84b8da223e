"""The output parser: the vectors, every row of its table, streaming, and time.

Outputs are written with signs: ( open, ) close, · sep, ¶ end of message.
"""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3mlx.channels import (
    MAX_TAG,
    CallArguments,
    CallClosed,
    CallDropped,
    CallStarted,
    OutputParser,
    Text,
    start_mode,
)
from k3mlx.chat import Segment, render
from tests.paths import needs_data
from tests.text import VECTORS, expected, marked, parsed, pieces, plain, rechunked, released, summary

OUTPUTS = [
    pytest.param(v["start"], v["output"], v["expected"], id=f"M{number}")
    for number, v in enumerate(VECTORS["outputs"], 1)
]


def call(body: str = "", name: str = "f") -> str:
    return f'(call tool="{name}" index="1"·{body})call·'


def argument(value: str, key: str = "k", type: str = "string") -> str:
    return f'(argument key="{key}" type="{type}"·{value})argument·'


def signed(text: str) -> list[bytes | str]:
    """Parser input for a text with signs."""
    return pieces(marked(text))


def arguments_of(body: str, stream_arguments: bool = False) -> str:
    parser, _ = parsed("response", signed(f"(tools·{call(body)})message·¶"), stream_arguments)
    [one] = parser.calls
    return one.arguments


@pytest.mark.parametrize("stream_arguments", [False, True])
@pytest.mark.parametrize(("start", "output", "wanted"), OUTPUTS)
def test_outputs(start: str, output: str, wanted: dict[str, Any], stream_arguments: bool) -> None:
    rng = random.Random(1)
    for stream in (pieces(output), *(rechunked(pieces(output), rng) for _ in range(20))):
        parser, _ = parsed(start, stream, stream_arguments)
        assert summary(parser) == expected(**wanted)


@needs_data
@pytest.mark.parametrize(("start", "output", "wanted"), OUTPUTS)
def test_outputs_in_released_ids(start: str, output: str, wanted: dict[str, Any]) -> None:
    assert summary(parsed(start, pieces(output, released()))[0]) == expected(**wanted)


def test_markers_spelled_in_ordinary_ids_are_text() -> None:
    text = "use <|close|>response<|sep|> literally"
    stream = plain(text) + signed(")response·)message·¶")
    for seed in range(20):
        parser, _ = parsed("response", rechunked(stream, random.Random(seed)))
        assert summary(parser) == expected(content=text)


SPELLED = "<|close|>argument<|sep|>"
BEFORE, AFTER = f"(tools·{call(argument('!', 's'))})message·¶".split("!")


def test_markers_spelled_in_ordinary_ids_inside_an_argument() -> None:
    stream = signed(BEFORE) + plain(SPELLED) + signed(AFTER)
    for seed in range(20):
        parser, _ = parsed("response", rechunked(stream, random.Random(seed)))
        assert parser.calls[0].arguments == '{"s": "<|close|>argument<|sep|>"}'


@needs_data
def test_released_ids_of_a_marker_in_an_argument() -> None:
    inside = [27, 91, 10794, 91, 29, 47185, 27, 91, 40433, 91, 29]
    before, after = (released().encode(marked(text), allow_special=True) for text in (BEFORE, AFTER))
    parser, _ = parsed("response", map(released().piece, [*before, *inside, *after]))
    assert parser.calls[0].arguments == '{"s": "<|close|>argument<|sep|>"}'


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "think"),
        ({"thinking": False}, "response"),
        ({"effort": "none"}, "response"),
        ({"add_generation_prompt": False}, "message"),
    ],
)
def test_start_mode_comes_from_the_prompt(options: dict[str, Any], mode: str) -> None:
    messages = [{"role": "user", "content": "<|open|>think<|sep|>"}, {"role": "assistant", "content": "x"}]
    assert start_mode(render(messages, **options)) == mode


@pytest.mark.parametrize(
    ("message", "mode"), [({"reasoning": "r"}, "think"), ({"reasoning": "r", "content": "c"}, "response")]
)
def test_start_mode_of_a_continued_message(message: dict[str, Any], mode: str) -> None:
    assert start_mode(render([{"role": "assistant", "partial": True, **message}])) == mode


def test_start_mode_of_a_bare_message() -> None:
    opened = [Segment("<|open|>", True), Segment("message"), Segment("<|sep|>", True)]
    assert start_mode(opened) == "message"
    assert start_mode([*opened, Segment("<|open|>"), Segment("think"), Segment("<|sep|>")]) == "message"
    assert start_mode([]) == "message"


def test_start_mode_is_checked() -> None:
    with pytest.raises(ValueError, match="start is 'tools'"):
        OutputParser("tools")


@pytest.mark.parametrize(
    ("start", "output", "wanted"),
    [
        # reasoning
        ("think", "r(think·s", {"reasoning": "rs"}),
        ("think", "r)response·x(response·c", {"reasoning": "r", "content": "c"}),
        ("think", "r)think· \n(tools·" + call(), {"reasoning": "r", "calls": 1}),
        ("think", "r)tools·", {"reasoning": "r)tools·"}),
        ("think", "r)message·s", {"reasoning": "r", "ended": True}),
        # response
        ("response", "a(response·b)think·c", {"content": "abc"}),
        ("response", " \n(think·r)think·(response·c", {"reasoning": "r", "content": " \nc"}),
        ("response", "a(think·b", {"content": "ab"}),
        ("response", "a(tools·b" + call() + "c(response·d", {"content": "ad", "calls": 1}),
        ("response", 'a(call tool="f"·', {"content": 'a(call tool="f"·'}),
        ("response", "a[EOS]b", {"content": "a", "ended": True}),
        ("response", "a[EOT]b", {"content": "a", "ended": True}),
        ("response", "a¶b", {"content": "a", "ended": True}),
        # idle, and between elements
        ("message", "text", {"content": "text"}),
        ("message", "text¶", {"content": "text", "ended": True}),
        ("message", "text(foo·more", {"content": "textmore"}),
        ("message", "text(think·r", {"reasoning": "r"}),
        ("message", "text(response·c", {"content": "c"}),
        ("message", "text(tools·", {}),
        ("message", '(message role="assistant"·(response·c', {"content": "c"}),
        ("think", ")think·lost)foo··", {}),
        ("response", ")response·lost(think·r", {"reasoning": "r"}),
        # tools
        ("response", "(tools·x(foo·y)tools·z", {}),
        ("response", "(tools·)response·" + call(), {"calls": 1}),
        # calls
        ("response", "(tools·" + call('x(foo·(argument type="string"·y)argument·'), {"calls": 1}),
        ("response", "(tools·" + call("(response·c"), {"calls": 1}),
        ("response", '(tools·(call tool="f"·)tools·', {"dropped_calls": 1}),
        ("response", '(tools·(call tool="f"·)message·¶', {"dropped_calls": 1, "ended": True}),
        ("response", '(tools·(call index="1"·)call·' + call(), {"calls": 1, "dropped_calls": 1}),
        ("response", "(tools·" + call(name=""), {"dropped_calls": 1}),
        ("response", "(tools·(call tool=f·)call·", {"dropped_calls": 1}),
        # values
        ("response", '(tools·(call tool="g"·(argument key="k"·v)call·' + call(), {"calls": 1, "dropped_calls": 1}),
        ("response", '(tools·(call tool="g"·(json·v)tools·(tools·' + call(), {"calls": 1, "dropped_calls": 1}),
        # half a tag
        ("response", "a(resp", {"content": "a"}),
        ("response", "a(resp[EOS]", {"content": "a", "ended": True}),
        ("response", "a(b(c)response·", {"content": "a(b(c"}),
        ("think", "a)b)think·", {"reasoning": "a)b"}),
        ("response", "a·b", {"content": "a·b"}),
        # the form of tags
        ("think", "r) \n think\t·x", {"reasoning": "r"}),
        ("think", "r)think extra·x", {"reasoning": "r"}),
        ("think", "r)thinking·", {"reasoning": "r)thinking·"}),
        ("think", "r)\u00a0think·", {"reasoning": "r)\u00a0think·"}),
        ("response", '(tools·(call\n index="9"\ttool="f"·)call·', {"calls": 1}),
        # other special ids are text
        ("response", "a<|media_pad|>b<|reserved_token_266|>", {"content": "a<|media_pad|>b<|reserved_token_266|>"}),
        ("response", "a)resp<|media_pad|>onse·", {"content": "a)resp<|media_pad|>onse·"}),
    ],
)  # fmt: skip
def test_rows_of_the_table(start: str, output: str, wanted: dict[str, Any]) -> None:
    wanted = {"ended": False} | {key: marked(v) if isinstance(v, str) else v for key, v in wanted.items()}
    if "calls" in wanted:
        wanted["calls"] = [{"name": "f", "arguments": "{}"}] * wanted["calls"]
    assert summary(parsed(start, signed(output))[0]) == expected(**wanted)


@pytest.mark.parametrize("stream_arguments", [False, True])
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", "{}"),
        (argument(""), '{"k": ""}'),
        (argument('say "é"\n\t\x01\\'), '{"k": "say \\"é\\"\\n\\t\\u0001\\\\"}'),
        ('(argument key="k"·1)argument·', '{"k": "1"}'),
        (argument("1e3", type="number"), '{"k": 1e3}'),
        (argument(" [1,\n2] ", type="array"), '{"k":  [1,\n2] }'),
        (argument("true", type="boolean"), '{"k": true}'),
        (argument("True", type="boolean"), '{"k": "True"}'),
        (argument("5", type="integer"), '{"k": 5}'),
        (argument("NaN", type="number"), '{"k": "NaN"}'),
        (argument("", type="null"), '{"k": ""}'),
        (argument("[" * 50_000, type="array"), '{"k": "' + "[" * 50_000 + '"}'),
        (argument("{bad", "q&quot;&amp;quot;", "object"), '{"q\\"&quot;": "{bad"}'),
        (argument("1") + argument("2", "ü"), '{"k": "1", "ü": "2"}'),
        (argument("a(foo x='1'·b)json··"), "{\"k\": \"a(foo x='1'·b)json··\"}"),
        ('(json type="object"·{"a": 1})json·', '{"a": 1}'),
        ("(json·{bad)argument·)json·", "{bad)argument·"),
        (argument("1") + "(json·{})json·", '{"k": "1"}'),
        ("(json·[1])json·" + argument("1"), "[1]"),
    ],
)  # fmt: skip
def test_arguments(body: str, arguments: str, stream_arguments: bool) -> None:
    assert arguments_of(body, stream_arguments) == marked(arguments)


def test_last_of_a_repeated_key_counts() -> None:
    body = argument("1") + argument("x", "other") + argument("2", type="number")
    assert arguments_of(body) == '{"k": 2, "other": "x"}'
    streamed = arguments_of(body, stream_arguments=True)
    assert streamed == '{"k": "1", "other": "x", "k": 2}'
    assert json.loads(streamed) == json.loads(arguments_of(body))


def test_events_of_a_whole_message() -> None:
    tools = call(argument("vé") + argument("[1]", "n", "array")) + call()
    output = signed(f"Hé)think·\n(response·ok)response·(tools·{tools})tools·)message·¶")
    _, events = parsed("think", output)
    assert events == [
        Text("think", "H"),
        Text("think", "é"),
        Text("response", "o"),
        Text("response", "k"),
        CallStarted(0, "f"),
        CallArguments(0, '{"k": "vé", "n": [1]}'),
        CallClosed(0, "f", '{"k": "vé", "n": [1]}'),
        CallStarted(1, "f"),
        CallArguments(1, "{}"),
        CallClosed(1, "f", "{}"),
    ]
    _, events = parsed("think", output, stream_arguments=True)
    fragments = ['{"k": "', "v", "é", '"', ', "n": ', "[1]", "}"]
    assert events[4:] == [
        CallStarted(0, "f"),
        *(CallArguments(0, fragment) for fragment in fragments),
        CallClosed(0, "f", '{"k": "vé", "n": [1]}'),
        CallStarted(1, "f"),
        CallArguments(1, "{}"),
        CallClosed(1, "f", "{}"),
    ]


def test_calls_dropped_after_they_were_announced() -> None:
    cut, nameless = '(call tool="a"·' + argument("1"), '(call index="1"·' + argument("1") + ")call·"
    output = signed(f"(tools·{cut})tools·(tools·{nameless}{call()}")
    parser, events = parsed("response", output, stream_arguments=True)
    assert parser.dropped_calls == 2
    assert [event for event in events if not isinstance(event, CallArguments)] == [
        CallStarted(0, "a"),
        CallDropped(0),
        CallStarted(1, "f"),
        CallClosed(1, "f", "{}"),
    ]
    parser, events = parsed("response", output)
    assert parser.dropped_calls == 2
    assert events == [CallStarted(0, "f"), CallArguments(0, "{}"), CallClosed(0, "f", "{}")]


def test_half_a_character_when_a_marker_comes() -> None:
    parser = OutputParser("response")
    assert parser.feed(b"\xf0\x9f") == []
    assert parser.feed("<|close|>") == [Text("response", "\ufffd")]
    assert parser.feed(b"response") == []
    assert parser.feed("<|sep|>") == []
    assert summary(parser) == expected(content="\ufffd", ended=False)


def test_half_a_character_when_generation_ends() -> None:
    parser, events = parsed("think", [b"a", b"\xf0\x9f"])
    assert events == [Text("think", "a"), Text("think", "\ufffd")]
    assert parser.finish() == []
    assert parser.feed(b"more") == []
    assert parser.reasoning == "a\ufffd"


def test_characters_do_not_cross_channels() -> None:
    parser, _ = parsed("think", [b"\xc3", *signed(")think·(response·"), b"\xa9x"])
    assert (parser.reasoning, parser.content) == ("\ufffd", "\ufffdx")


def test_text_comes_as_soon_as_it_can() -> None:
    parser = OutputParser("response")
    assert parser.feed(b"use <|cl") == [Text("response", "use <|cl")]
    assert parser.feed("🚀".encode()[:3]) == []
    assert parser.feed("🚀".encode()[3:]) == [Text("response", "🚀")]


def test_tag_that_never_ends_is_text_and_bounded() -> None:
    parser = OutputParser("response")
    waiting = 0
    for piece in (*signed("a("), *[b"x" * 16] * 10_000, *signed("·b)response·")):
        waiting = 0 if parser.feed(piece) else waiting + len(piece)
        assert waiting <= MAX_TAG + 100
    assert parser.content == marked("a(") + "x" * 160_000 + marked("·b")


def test_tag_of_the_largest_size_counts() -> None:
    padding = " " * (MAX_TAG - len("response"))
    for tag, content in [(f")response{padding}·", "a"), (f")response {padding}·", f"a)response {padding}·b")]:
        assert parsed("response", signed(f"a{tag}b"))[0].content == marked(content)


def seconds(stream: list[bytes | str], stream_arguments: bool) -> float:
    """CPU time of parsing, which other programs on the machine do not change much."""
    started = time.thread_time()
    parsed("response", stream, stream_arguments)
    return time.thread_time() - started


@pytest.mark.parametrize(
    "unit",
    [
        [b"x"] * 64,
        ["<|open|>", *[b"x"] * 64],
        ["<|open|>", *[b' a="'] * 64],
        ["<|open|>", *[b"="] * 64, "<|sep|>"],
        ["<|sep|>"] * 64,
        signed("(tools·" + call(argument("x" * 32)) * 2),
    ],
    ids=["text", "open tags", "attributes", "tags", "stray ends", "calls"],
)
@pytest.mark.parametrize("inside", ["", BEFORE], ids=["in the answer", "in a value"])
@pytest.mark.parametrize("stream_arguments", [False, True])
def test_time_grows_with_length_only(unit: list[bytes | str], inside: str, stream_arguments: bool) -> None:
    streams = [[*signed(inside), *unit * times, *signed(AFTER)] for times in (50, 500)]
    short = min(seconds(streams[0], stream_arguments) for _ in range(3))
    long = min(seconds(streams[1], stream_arguments) for _ in range(2))
    assert long < 10 * short * 4 + 0.3, f"10 times the input took {long / short:.0f} times as long"


TAGS = ["think", "response", "tools", "message", "call", "argument", "json", "foo", " think ", ""]
TAGS += ['call tool="f"', 'argument key="k" type="string"', 'argument key="n" type="number"']
PIECE = st.one_of(
    st.sampled_from(["<|open|>", "<|close|>", "<|sep|>", "<|media_pad|>"]).map(lambda name: [name]),
    st.sampled_from(["<|end_of_msg|>", "[EOS]"]).map(lambda name: [name]),
    st.tuples(st.sampled_from("()"), st.sampled_from(TAGS)).map(lambda tag: signed(f"{tag[0]}{tag[1]}·")),
    st.binary(max_size=6).map(lambda data: [data]),
    st.text("é🚀x1 <|", max_size=4).map(lambda text: [text.encode()]),
)


@given(
    st.sampled_from(["think", "response", "message"]),
    st.lists(PIECE, max_size=30).map(lambda parts: [piece for part in parts for piece in part]),
    st.randoms(use_true_random=False),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_anything_is_parsed_the_same_in_any_chunks(
    start: str, stream: list[bytes | str], rng: random.Random, stream_arguments: bool
) -> None:
    parser, _ = parsed(start, stream, stream_arguments)
    again, events = parsed(start, rechunked(stream, rng), stream_arguments)
    assert summary(again) == summary(parser)
    texts = {"think": "", "response": ""}
    names: dict[int, str] = {}
    fragments: dict[int, str] = {}
    closed, dropped = [], []
    for event in events:
        if isinstance(event, Text):
            assert event.text
            texts[event.channel] += event.text
        elif isinstance(event, CallStarted):
            assert event.index == len(names)
            names[event.index], fragments[event.index] = event.name, ""
        elif isinstance(event, CallArguments):
            fragments[event.index] += event.fragment
        elif isinstance(event, CallClosed):
            assert (event.name, event.arguments) == (names[event.index], fragments[event.index])
            closed.append(event)
        else:
            dropped.append(event.index)
    assert (texts["think"], texts["response"], closed) == (again.reasoning, again.content, again.calls)
    assert len(dropped) + len(closed) == len(names)
    assert len(dropped) <= again.dropped_calls
