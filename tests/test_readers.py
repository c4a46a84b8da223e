"""Stop strings: what is shown does not depend on how the text comes."""

from hypothesis import given
from hypothesis import strategies as st

from k3mlx.readers import ChatReader, StopStrings
from tests.text import bytewise, marked


def shown(strings, parts):
    stop = StopStrings(strings)
    out = [stop.feed(part) for part in parts]
    return "".join(out) + ("" if stop.found else stop.flush()), stop.found, out


def by_definition(strings, text):
    for end in range(1, len(text) + 1):
        matches = [string for string in strings if text[:end].endswith(string)]
        if matches:
            return text[: end - max(map(len, matches))], True
    return text, False


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_the_string_that_is_complete_first_counts(strings, parts):
    text, found, _ = shown(strings, parts)
    assert (text, found) == by_definition(strings, "".join(parts))


def test_only_what_may_belong_to_a_string_is_held_back():
    _, _, out = shown(["stop", "top"], ["a s", "t", "x", "to", "p", "more"])
    assert out == ["a ", "", "stx", "", "", ""]


def test_held_back_text_comes_when_the_channel_ends():
    reader = ChatReader(bytewise(), "response", stop=["b)"])
    ids = bytewise().encode(marked("ab)response·)message·"), allow_special=True)
    pieces = [[piece.text for piece in reader.feed(id)] for id in ids]
    assert pieces[0] == ["a"]
    assert pieces[1] == []  # may be the beginning of the stop string
    closed = 3 + len("response")  # a, b, the marker, the name, the marker
    assert pieces[closed] == ["b"]
    assert reader.finish() == []
    assert not reader.stopped


def test_nothing_is_shown_after_a_stop_string():
    reader = ChatReader(bytewise(), "response", stop=["b"])
    call = 'ab)response·(tools·(call tool="f"·)call·)tools·)message·'
    texts = [
        piece.text for id in bytewise().encode(marked(call), allow_special=True) for piece in reader.feed(id)
    ]
    assert texts == ["a"]
    assert (reader.text, reader.tool_calls, reader.stopped) == ("a", [], True)
