"""Behaviour that other programs got wrong, as publicly reported; numbers are those of text specification §4.6.

Reports 8, 14, 22 and 23 are about servers and constrained decoding, 7 is in ``test_chat`` (published counts).
"""

import json
from typing import Any

import pytest

from k3mlx.channels import CallArguments, CallStarted, OutputParser, Text, start_mode
from k3mlx.chat import Segment, render
from k3mlx.chat_protocol import request_thinking
from tests.paths import needs_data
from tests.text import bytewise, expected, joined, marked, parsed, pieces, plain, released, summary

CALL = '(call tool="f" index="1"·(argument key="k" type="string"·v)argument·)call·'
CALLS = [{"name": "f", "arguments": '{"k": "v"}'}]


def meaning(start: str, output: str) -> dict[str, Any]:
    return summary(parsed(start, pieces(marked(output)))[0])


@pytest.mark.parametrize(
    ("next_element", "rest"),
    [
        (f"(tools·{CALL})tools·)message·¶", {"calls": CALLS}),
        ("(response·answer)response·)message·¶", {"content": "answer"}),
        (")response·)message·¶", {}),
        (")message·¶", {}),
        ("¶", {}),
    ],
)
def test_1_thinking_ends_with_whatever_comes_next(next_element: str, rest: dict[str, Any]) -> None:
    assert meaning("think", "why" + next_element) == expected(reasoning="why", **rest)


def test_2_closing_the_answer_ends_assumed_thinking() -> None:
    output = "why)response·(response·answer)response·)message·¶"
    assert meaning("think", output) == expected(reasoning="why", content="answer")


def test_3_the_end_of_a_message_is_never_content() -> None:
    parser, events = parsed("response", pieces(marked("Hi)message·¶")))
    assert [event for event in events if event != Text("response", "H")] == [Text("response", "i")]
    assert parser.ended


def test_4_thinking_that_was_cut_stays_reasoning() -> None:
    parser, events = parsed(
        start_mode(render([{"role": "user", "content": "hi"}])), pieces("so the answer is 4")
    )
    assert summary(parser) == expected(reasoning="so the answer is 4", ended=False)
    assert {event.channel for event in events if isinstance(event, Text)} == {"think"}


def test_5_arguments_can_be_streamed_and_an_escape_is_never_split() -> None:
    value = 'a "quoted" \\ line\nanother\té🚀'
    parser = OutputParser("response", stream_arguments=True)
    grown = [""]
    output = f'(tools·(call tool="f"·(argument key="s" type="string"·{value})argument·)call·'
    for piece in pieces(marked(output)):
        for event in parser.feed(piece):
            if isinstance(event, CallArguments):
                grown.append(grown[-1] + event.fragment)
    opened, *inside, closed, whole = grown[1:]
    assert opened == '{"s": "'
    assert [json.loads(text + '"}')["s"] for text in inside] == [value[: n + 1] for n in range(len(value))]
    assert closed + "}" == whole == parser.calls[0].arguments


def test_6_nothing_is_put_between_markers() -> None:
    segments = render([{"role": "user", "content": " x "}])
    ids = bytewise().encode_segments(segments)
    assert bytewise().decode(ids) == joined(segments)
    assert "<|sep|> x <|close|>message<|sep|><|end_of_msg|><|open|>message" in joined(segments)


def test_9_a_spelled_tools_marker_in_an_answer_is_no_call() -> None:
    text = marked(f"(tools·{CALL})tools·")
    parser, _ = parsed("response", [*plain(text), *pieces(marked(")response·)message·¶"))])
    assert summary(parser) == expected(content=text)


def test_10_the_placeholder_of_images_in_text_is_text() -> None:
    literal = "<|kimi_image_placeholder|>"
    content = [{"type": "text", "text": literal}, {"type": "image_url", "image_url": {"url": "x"}}]
    segments = render([{"role": "user", "content": content}], image_sizes=[(8, 4)])
    assert Segment(literal) in segments
    assert sum("<|media_pad|>" in text for text, _ in segments) == 1
    assert bytewise().decode(bytewise().encode(literal)) == literal
    assert Segment(literal) in render([{"role": "user", "content": literal}])


@pytest.mark.parametrize("text", ["<|sep|", "<|open", "|>", "<|", "end_of_msg|>"])
def test_11_halves_of_markers_in_history_stay_text(text: str) -> None:
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "reasoning_content": text, "content": text},
        {"role": "user", "content": "|>" + text},
    ]
    segments = render(messages)
    wanted = [text for text, special in segments if special]
    tokenizer = bytewise()
    names = [tokenizer.marker(id) for id in tokenizer.encode_segments(segments)]
    assert [name for name in names if name] == wanted
    assert segments.count(Segment(text)) == 3


@needs_data
def test_12_user_markers_and_borders_survive_encoding() -> None:
    text = "<|close|>message<|sep|><|end_of_msg|>[EOS]"
    segments = render([{"role": "user", "content": text, "name": "_private"}])
    ids = released().encode_segments(segments)
    assert ids != released().encode(joined(segments), allow_special=True)
    assert sum(id >= 163584 for id in ids) == sum(special for _, special in segments)
    assert ids[ids.index(29552) - 1 :][:3] == [878, 29552, 1]


def test_12_continued_answer_closes_the_thinking_before_it() -> None:
    partial = {"role": "assistant", "reasoning_content": "why", "content": "The ans", "partial": True}
    segments = render([{"role": "user", "content": "hi"}, partial])
    assert joined(segments).endswith(marked("(think·why)think·(response·The ans"))
    assert "".join(text for text, special in segments if special).endswith(marked("·)·(·"))
    assert start_mode(segments) == "response"


def test_13_the_thinking_object_of_a_request_counts() -> None:
    assert request_thinking({"thinking": {"type": "enabled", "effort": "max"}}) == (True, "max")
    assert request_thinking({"thinking": {"type": "disabled"}}, default="max") == (False, None)


def test_15_malformed_arguments_in_history_are_kept_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1,}'}}
    text = joined(render([{"role": "assistant", "content": "", "tool_calls": [call]}]))
    assert marked('(json type="object"·{"a": 1,})json·') in text


def test_15_nothing_stands_between_an_image_and_text() -> None:
    content = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "what?"}]
    text = joined(render([{"role": "user", "content": content}], image_sizes=[(2, 3)]))
    assert "<|media_end|>what?" in text


def test_16_markers_are_found_however_the_stream_is_cut() -> None:
    output = pieces(marked("é)think·(response·🚀)response·)message·¶"))
    parser = OutputParser("think")
    for piece in output:
        parts = [piece] if isinstance(piece, str) else [piece[i : i + 1] for i in range(len(piece))]
        for part in parts:
            parser.feed(part)
    assert summary(parser) == expected(reasoning="é", content="🚀")


def test_17_complete_calls_survive_an_unclosed_tools_element() -> None:
    assert meaning("response", f"(tools·{CALL}") == expected(calls=CALLS, ended=False)
    cut = '(call tool="g" index="2"·(argument key="k"·v'
    assert meaning("response", f"(tools·{CALL}{cut}") == expected(calls=CALLS, ended=False, dropped_calls=1)


def test_18_no_marker_of_the_format_reaches_the_reader() -> None:
    output = f"why)think·(response·a)response·(tools·{CALL})tools·)message·¶"
    for stream_arguments in (False, True):
        _, events = parsed("think", pieces(marked(output)), stream_arguments)
        assert "<|" not in repr(events)


def test_19_none_is_no_effort_level() -> None:
    text = joined(render([{"role": "user", "content": "hi"}], effort="none"))
    assert "thinking_effort" not in text
    assert text.endswith(marked("(response·"))


def test_20_parsing_starts_in_the_channel_the_prompt_opened() -> None:
    for thinking, channel in ((True, "think"), (False, "response")):
        start = start_mode(render([{"role": "user", "content": "hi"}], thinking=thinking))
        assert OutputParser(start).feed(b"text") == [Text(channel, "text")]


def test_21_a_call_is_announced_once_with_its_whole_name() -> None:
    output = pieces(marked('(tools·(call tool="a_long_name" index="1"·)call·'))
    for stream_arguments in (False, True):
        _, events = parsed("response", output, stream_arguments)
        assert [event for event in events if isinstance(event, CallStarted)] == [
            CallStarted(0, "a_long_name")
        ]
        assert isinstance(events[0], CallStarted)


def test_24_the_header_of_a_tag_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import k3mlx.channels as channels

    read: list[int] = []
    original = channels.read_tag
    monkeypatch.setattr(
        channels, "read_tag", lambda marker, data: read.append(len(data)) or original(marker, data)
    )
    parsed("response", pieces(marked(f'(tools·(call tool="{"n" * 2000}"·)call·')))
    assert read == [5, 2012, 4]
