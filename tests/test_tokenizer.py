"""Encoding and decoding, against the vectors and against plain statements of the same rules."""

import random
import subprocess
import sys
import time
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from k3mlx import markers
from k3mlx.errors import ModelFilesError, UsageError
from k3mlx.tokenizer import PATTERN, StreamDecoder, Tokenizer, cut_long_text
from tests.paths import DATA, needs_data
from tests.text import BYTES, VECTORS, bytewise, released, vocabulary_file, with_tokens

PIECES = [pytest.param(v["text"], v["pieces"], v["ids"], id=ascii(v["text"])) for v in VECTORS["pieces"]]

# what the pieces are made of: every class of the expression, and characters near its borders
ALPHABET = "aZé'sſ ’\t\n\r\x85\u00a0\u3000\x1c09½Ⅷ²ǅˈ你々〇のテ한العر\u0301.,!_<|>[]🚀\u200d\x00\ufffd"


def split(text: str) -> list[str]:
    """The pieces by another engine, which knows class intersections in its version 1 syntax."""
    return regex.findall(PATTERN, text, regex.V1)


def merged(piece: bytes, rank: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding as it is defined: the lowest-ranked adjacent pair first, the leftmost of equals."""
    if piece in rank:
        return [rank[piece]]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while True:
        pairs = [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]
        if not pairs:
            return [rank[part] for part in parts]
        i = min(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@needs_data
@pytest.mark.parametrize(("text", "pieces", "ids"), PIECES)
def test_released_ids(text: str, pieces: list[str], ids: list[int]) -> None:
    assert released().encode(text) == ids
    assert [id for piece in pieces for id in released().encode(piece)] == ids
    assert released().decode(ids) == text


@pytest.mark.parametrize(("text", "pieces", "ids"), PIECES)
def test_pieces(text: str, pieces: list[str], ids: list[int]) -> None:
    tokenizer = with_tokens(pieces)
    assert [tokenizer.decode([id]) for id in tokenizer.encode(text)] == pieces
    assert split(text) == pieces


def stable(character: str) -> bool:
    """Whether every Unicode version since 3.2 agrees about the character; engines follow different ones."""
    return unicodedata.ucd_3_2_0.category(character) == unicodedata.category(character)


OLD_CHARACTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cn", "Co"]).filter(stable)


@given(st.text(st.sampled_from(ALPHABET) | OLD_CHARACTERS, max_size=40))
@settings(max_examples=100, deadline=None)
def test_two_engines_cut_alike(text: str) -> None:
    pieces = split(text)
    assert "".join(pieces) == text
    tokenizer = with_tokens(pieces)
    cut = [id for piece in pieces for id in tokenizer.encode(piece)]
    assert tokenizer.encode(text) == cut
    assert len(cut) == len(pieces)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=60),
    st.text("aabbc é\n", min_size=1, max_size=30) | st.text("ab", min_size=500, max_size=700),
)
@settings(max_examples=40, deadline=None)
def test_merges_lowest_rank_first(pairs: list[tuple[int, int]], text: str) -> None:
    tokens = list(BYTES)
    for a, b in [(64, 65), (64, 64), (65, 65), *pairs]:
        token = tokens[a % len(tokens)] + tokens[b % len(tokens)]
        if token not in tokens:
            tokens.append(token)
    rank = {token: id for id, token in enumerate(tokens)}
    ids = [id for piece in split(text) for id in merged(piece.encode(), rank)]
    assert Tokenizer(tokens).encode(text) == ids


@needs_data
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("before<|sep|>after", [14435, 163589, 14306]),
        ("<|reserved_token_163592|>", [163592]),
        ("<|reserved_token_163839|>", [27, 91, 64345, 14147, 62, 18752, 56284, 91, 29]),
        ("<|kimi_image_placeholder|>", [27, 91, 74, 30223, 11947, 114136, 91, 29]),
    ],
)
def test_special_names_allowed(text: str, ids: list[int]) -> None:
    assert released().encode(text, allow_special=True) == ids


@needs_data
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|open|>", [27, 91, 4454, 91, 29]),
        ("<|close|>", [27, 91, 10794, 91, 29]),
        ("<|sep|>", [27, 91, 40433, 91, 29]),
        ("<|end_of_msg|>", [27, 91, 517, 5118, 14222, 91, 29]),
        ("<|media_pad|>", [27, 91, 13634, 49974, 91, 29]),
    ],
)
def test_special_names_are_text_by_default(text: str, ids: list[int]) -> None:
    assert released().encode(text) == ids


@needs_data
@pytest.mark.parametrize(
    ("text", "limit", "ids"),
    [
        ("x" * 40, 7, [33642, 26713] * 5 + [5629, 26713]),
        ("你好世界" * 5, 6, [33845, 2243] * 5),
        ("abcdefghij", 4, [61858, 1183, 1050, 3694]),
    ],
)
def test_released_ids_of_cut_runs(text: str, limit: int, ids: list[int]) -> None:
    assert released().encode(text, max_run=limit) == ids


@needs_data
def test_released_special_ids() -> None:
    tokenizer = released()
    named = {
        163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
        163589: "<|sep|>", 163590: "[start_header_id]", 163591: "[end_header_id]", 163593: "[EOT]",
        163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>",
        163605: "<|media_pad|>", 163649: "<osagent_mode>", 163838: "[UNK]", 163839: "[PAD]",
    }  # fmt: skip
    for id in range(163584, 163840):
        name = named.get(id, f"<|reserved_token_{id}|>")
        assert tokenizer.marker(id) == name
        assert tokenizer.special[name] == id
        assert tokenizer.token_bytes(id) == name.encode()
        assert tokenizer.encode(name, allow_special=True) == [id]
        assert all(part < 163584 for part in tokenizer.encode(name))
    assert (tokenizer.vocab_size, len(tokenizer.special)) == (163840, 256)
    assert tokenizer.stop_ids == {163585, 163586, 163593}
    assert tokenizer.marker(163583) is None


def test_special_block_follows_the_ranks() -> None:
    tokenizer = Tokenizer([*BYTES, b"ab", b"abc"])
    assert tokenizer.vocab_size == 258 + 256
    assert [tokenizer.special[name] for name in ("[BOS]", "<|open|>", "[PAD]")] == [258, 261, 513]
    assert tokenizer.special["<|reserved_token_266|>"] == 266
    assert tokenizer.stop_ids == {259, 260, 267}
    assert tokenizer.encode("abc<|sep|>x", allow_special=True) == [257, 263, 87]
    assert tokenizer.piece(263) == "<|sep|>"
    assert tokenizer.piece(257) == b"abc"


def test_names_inside_text_count_only_if_allowed() -> None:
    tokenizer = bytewise()
    text = "a<|open|><|sep|>[EOS]"
    assert tokenizer.encode(text, allow_special=True) == [64, 259, 261, 257]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert max(tokenizer.encode(text)) < 256


def test_segments_are_encoded_apart() -> None:
    tokenizer = Tokenizer([*BYTES, b"he", b"hel", b"lo", b"hello"])
    assert tokenizer.encode_segments([("hel", False), ("lo", False)]) == [257, 258]
    assert tokenizer.encode_segments([("hello", False)]) == [259]
    assert tokenizer.encode_segments([("<|sep|>", True), ("x", False)]) == [tokenizer.special["<|sep|>"], 87]
    assert tokenizer.encode_segments([("", False), ("", True)]) == []


@needs_data
@pytest.mark.parametrize(
    ("value", "ids"),
    [
        ("get_weather", [2355, 878, 618, 21055, 2800, 1, 1798]),
        ("_private", [2355, 878, 29552, 1, 1798]),
        ("trailing_", [2355, 878, 523, 16627, 62, 1, 1798]),
        (".hidden", [2355, 878, 59789, 1, 1798]),
        ("$ref", [2355, 878, 3, 2113, 1, 1798]),
    ],
)
def test_released_ids_of_attributes(value: str, ids: list[int]) -> None:
    segments = [(text, False) for text in (" key", '="', value, '"', " type")]
    assert released().encode_segments(segments) == ids


@needs_data
def test_released_ids_of_frequent_words() -> None:
    ids = {
        "message": 2778, "think": 39964, "response": 12092, "tools": 25385, "call": 10257, "argument": 47185,
        "json": 5534, " role": 6244, " name": 1530, " type": 1798, " tool": 4453, " index": 4002,
        " key": 2355, '="': 878, '"': 1, "user": 2482, "system": 14062, "assistant": 69702,
        "tool": 20960,
        "string": 2033,
        "number": 10006, "boolean": 16849, "null": 6562, "object": 3721, "array": 4392,
    }  # fmt: skip
    assert {text: released().encode(text) for text in ids} == {text: [id] for text, id in ids.items()}


def walked(text: str, max_block: int, max_run: int) -> list[str]:
    """The cuts of long text as the rule words them: a walk over characters that counts the current run."""
    parts = []
    for start in range(0, len(text), max_block):
        part, count, space = "", 0, None
        for character in text[start : start + max_block]:
            count = count + 1 if character.isspace() == space else 1
            space = character.isspace()
            if count > max_run:
                parts.append(part)
                part, count = "", 1
            part += character
        parts.append(part)
    return parts


@given(st.text("ab你 \n\x1c\x85\u200b", max_size=60), st.integers(1, 30), st.integers(1, 12))
@settings(max_examples=500, deadline=None)
def test_long_text_is_cut_as_a_walk_would(text: str, max_block: int, max_run: int) -> None:
    parts = list(cut_long_text(text, max_block, max_run))
    assert parts == walked(text, max_block, max_run)
    encoded = [id for part in parts for id in bytewise().encode(part)]
    assert bytewise().encode(text, max_block=max_block, max_run=max_run) == encoded


def test_text_of_a_million_characters() -> None:
    tokenizer = Tokenizer([*BYTES, b"ab"])
    blocks = "y " * 199_999 + " a" + "b" + "y" * 399_998 + "ab"
    ids = tokenizer.encode(blocks)
    assert tokenizer.decode(ids) == blocks
    assert [len(blocks) - len(ids), ids[-2:]] == [0, [64, 65]]
    assert tokenizer.encode("ab" * 12_500) == [256] * 12_500
    assert tokenizer.encode("a" + "ab" * 12_500)[-2:] == [64, 65]
    assert tokenizer.encode("a" + "ab" * 12_500)[:-2] == [64] + [256] * 12_499


@pytest.mark.parametrize("allow_special", [False, True])
@pytest.mark.parametrize("text", ["\ud800", "abc\udfff", "é\ud83d x"])
def test_lone_surrogate_is_refused(text: str, allow_special: bool) -> None:
    with pytest.raises(UsageError, match=r"lone surrogate U\+D[0-9A-F]{3} at character [013]"):
        bytewise().encode(text, allow_special)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(deadline=None)
def test_decode_undoes_encode(text: str) -> None:
    assert bytewise().decode(bytewise().encode(text)) == text


def test_decode_replaces_what_is_not_a_character() -> None:
    ids = [BYTES.index(bytes([b])) for b in b"a\xf0\x9f\xffb"]
    assert bytewise().decode([*ids, 261]) == "a\ufffd\ufffdb<|sep|>"


@pytest.mark.parametrize("id", [-1, 512, 10**9])
def test_ids_outside_the_vocabulary(id: int) -> None:
    assert bytewise().marker(id) is None
    with pytest.raises(UsageError, match=rf"{id}.*0 to 511"):
        bytewise().decode([id])


STREAMS = [
    ([5885, 40101, 66957, 98, 3743], ["F09F", "9A80", "F09F94", "A5", "676F"], ["", "🚀", "", "🔥", "go"]),
    ([172, 254, 222, 222], ["F0", "A0", "80", "80"], ["", "", "", "𠀀"]),
    ([68, 37484], ["65", "CC81"], ["e", "\u0301"]),
]


@pytest.mark.parametrize(("ids", "data", "deltas"), STREAMS)
def test_stream_of_characters(ids: list[int], data: list[str], deltas: list[str]) -> None:
    decoder = StreamDecoder()
    assert [decoder.feed(bytes.fromhex(part)) for part in data] == deltas
    assert decoder.flush() == ""


@needs_data
@pytest.mark.parametrize(("ids", "data", "deltas"), STREAMS)
def test_released_bytes_of_streams(ids: list[int], data: list[str], deltas: list[str]) -> None:
    assert [released().token_bytes(id).hex().upper() for id in ids] == data


def test_stream_that_ends_inside_a_character() -> None:
    decoder = StreamDecoder()
    assert decoder.feed(b"\xf0\x9f") == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(b"ok") == "ok"


@pytest.mark.parametrize(
    "data",
    [b"\xff", b"\xc0", b"\x80", b"\xe0\x80", b"\xf0\x80", b"\xf4\x90", b"\xed\xa0", b"\xed\xbf", b"\xc3("],
)
def test_stream_does_not_wait_for_the_impossible(data: bytes) -> None:
    assert StreamDecoder().feed(data) == data.decode(errors="replace")


@given(st.binary(max_size=40) | st.text().map(str.encode), st.randoms(use_true_random=False))
@settings(max_examples=500, deadline=None)
def test_stream_equals_decoding_at_once(data: bytes, random: random.Random) -> None:
    decoder = StreamDecoder()
    text, held = "", data
    while held:
        size = random.randint(1, len(held))
        delta = decoder.feed(held[:size])
        text, held = text + delta, held[size:]
    assert text + decoder.flush() == data.decode(errors="replace")


def test_import_needs_no_tiktoken() -> None:
    code = "import sys, k3mlx.tokenizer, k3mlx.chat, k3mlx.channels; sys.exit('tiktoken' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@needs_data
def test_loading_the_released_vocabulary_is_quick() -> None:
    started = time.process_time()
    tokenizer = Tokenizer.load(DATA)
    assert time.process_time() - started < 2.0
    assert tokenizer.vocab_size == 163840
    assert markers.END_OF_MSG in tokenizer.special


def test_file_and_tokens_give_the_same_tokenizer(tmp_path: Path) -> None:
    tokens = [*BYTES, b"ab", b"abc"]
    (tmp_path / "tiktoken.model").write_bytes(vocabulary_file(tokens))
    loaded = Tokenizer.load(tmp_path, vocab_size=514)
    assert loaded.special == Tokenizer(tokens).special
    assert loaded.encode("abcab!") == [257, 256, 0]
    with pytest.raises(ModelFilesError, match="make 514, the model has 515"):
        Tokenizer.load(tmp_path, vocab_size=515)
