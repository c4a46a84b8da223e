"""Model files that text needs: what is accepted, and what each kind of damage is called."""

import base64
import json
from pathlib import Path

import pytest

from k3mlx import markers
from k3mlx.errors import ModelFilesError
from k3mlx.tokenizer import Tokenizer
from k3mlx.vocabulary import read_vocabulary
from tests.paths import DATA, needs_data
from tests.text import BYTES, released, vocabulary_file

TOKENS = [*BYTES, b"ab", b"abc"]
LINES = vocabulary_file(TOKENS).splitlines()


def line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d" % rank


def write(folder: Path, lines: list[bytes], end: bytes = b"\n") -> Path:
    path = folder / "tiktoken.model"
    path.write_bytes(b"\n".join(lines) + end)
    return path


@pytest.mark.parametrize(
    ("number", "bad", "finding"),
    [
        (3, b"!!!! 2", "is not a base64 token, one space and a decimal rank"),
        (3, b"Iw= 2", "is not a base64 token"),
        (3, b"Iw 2", "is not a base64 token"),
        (3, b"Iw==Iw== 2", "is not a base64 token"),
        (3, b"Ix== 2", "is not a base64 token"),
        (3, b"Iw==  2", "is not a base64 token"),
        (3, b"Iw==\t2", "is not a base64 token"),
        (3, b" 2", "is not a base64 token"),
        (3, b"2", "is not a base64 token"),
        (3, b"Iw==", "is not a base64 token"),
        (3, b"Iw== 2 ", "is not a base64 token"),
        (3, b"Iw== 2\r", "is not a base64 token"),
        (3, b"Iw== 02", "is not a base64 token"),
        (3, b"Iw== -2", "is not a base64 token"),
        (3, b"Iw== 2.0", "is not a base64 token"),
        (3, b"\xff\xfe 2", "is not a base64 token"),
        (3, b"Iw== " + b"9" * 5000, "is not a base64 token"),
        (3, b"Iw== 1", "rank 1 was already given on line 2"),
        (257, line(b"ab", 300), "rank 257, but there is no rank 256"),
        (258, line(b"abc", 300), "rank 300, but there is no rank 257"),
        (258, line(b"ab", 257), "the token of line 257 is repeated"),
    ],
)
def test_damaged_line_is_named(tmp_path: Path, number: int, bad: bytes, finding: str) -> None:
    lines = list(LINES)
    lines[number - 1] = bad
    with pytest.raises(ModelFilesError) as caught:
        read_vocabulary(write(tmp_path, lines))
    message = str(caught.value)
    place = number + 1 if "there is no rank 256" in finding else number
    assert f"tiktoken.model line {place}: " in message
    assert finding in message
    assert "expected lines 'BASE64 RANK'" in message
    assert len(message) < 500


def test_every_single_byte_must_be_there(tmp_path: Path) -> None:
    tokens = [token for token in TOKENS if token not in (b"\x07", b"z")]
    with pytest.raises(
        ModelFilesError, match=r"256 tokens, but none for 2 of the 256 single bytes .first: 0x07"
    ):
        read_vocabulary(write(tmp_path, vocabulary_file(tokens).splitlines()))


@pytest.mark.parametrize("data", [b"", b"\n\n"])
def test_empty_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tiktoken.model").write_bytes(data)
    with pytest.raises(ModelFilesError, match="0 tokens, but none for 256"):
        Tokenizer.load(tmp_path)


def test_cut_at_any_byte_is_noticed(tmp_path: Path) -> None:
    data = vocabulary_file(TOKENS)
    path = tmp_path / "tiktoken.model"
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(ModelFilesError):
            Tokenizer.load(tmp_path, vocab_size=len(TOKENS) + 256)


@pytest.mark.parametrize("arrange", ["as written", "no final newline", "empty lines", "another order"])
def test_sound_files(tmp_path: Path, arrange: str) -> None:
    lines = {
        "empty lines": [b"", *LINES[:9], b"", b"", *LINES[9:], b""],
        "another order": LINES[::-1],
    }.get(arrange, LINES)
    path = write(tmp_path, lines, b"" if arrange == "no final newline" else b"\n")
    assert read_vocabulary(path) == TOKENS


def test_missing_file_or_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(
            ModelFilesError, match=r"tiktoken\.model: not found; expected the model's vocabulary"
        ):
            Tokenizer.load(folder)
    (tmp_path / "tiktoken.model").mkdir()
    with pytest.raises(ModelFilesError, match=r"tiktoken\.model: "):
        Tokenizer.load(tmp_path)


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tiktoken.model").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ModelFilesError, match="larger than 67108864 bytes"):
        Tokenizer.load(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, LINES)
    return tmp_path


def names_file(folder: Path, names: dict[int, str]) -> None:
    added = {str(id): {"content": name, "special": True} for id, name in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


FIRST = len(TOKENS)
RELEASED_NAMES = {FIRST + offset: name for offset, name in markers.NAMES.items()}


def test_names_come_from_the_file(folder: Path) -> None:
    names_file(folder, RELEASED_NAMES | {FIRST + 100: "<|mine|>"})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.special["<|mine|>"] == FIRST + 100
    assert f"<|reserved_token_{FIRST + 100}|>" not in tokenizer.special
    assert tokenizer.special["<|open|>"] == FIRST + 3
    assert tokenizer.warnings == ()


def test_names_without_a_file(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert {tokenizer.special[name]: name for name in RELEASED_NAMES.values()} == RELEASED_NAMES
    assert tokenizer.warnings == ()


@pytest.mark.parametrize(
    ("names", "conflict"),
    [
        ({FIRST + 3: "<|im_user|>"}, f"id {FIRST + 3} is <|im_user|>, expected <|open|>"),
        ({163586: "<|end_of_msg|>"}, "id 163586 (<|end_of_msg|>) is outside the special ids 258 to 513"),
        ({FIRST + 91: "<|open|>"}, "<|open|> names two ids"),
        ({FIRST + 91: f"<|reserved_token_{FIRST + 92}|>"}, f"<|reserved_token_{FIRST + 92}|> names two ids"),
    ],
)
def test_names_that_contradict_are_set_aside(folder: Path, names: dict[int, str], conflict: str) -> None:
    names_file(folder, {FIRST + 90: "<|mine|>"} | names)
    tokenizer = Tokenizer.load(folder)
    assert "<|mine|>" not in tokenizer.special
    assert tokenizer.special["<|open|>"] == FIRST + 3
    [warning] = tokenizer.warnings
    assert warning.startswith(f"tokenizer_config.json: {conflict}; its names are set aside")


@needs_data
def test_names_of_an_earlier_model_are_set_aside() -> None:
    if "<|im_end|>" not in (DATA / "tokenizer_config.json").read_text("utf-8"):
        pytest.skip("the test data's tokenizer_config.json has the K3 names")
    assert released().marker(163586) == "<|end_of_msg|>"
    assert released().marker(163594) == "<|reserved_token_163594|>"
    assert "163586 is <|im_end|>" in released().warnings[0]


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds a list; expected a JSON object"),
        ('{"added_tokens_decoder": [1]}', "added_tokens_decoder is a list"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "has 'x'"),
        ('{"added_tokens_decoder": {"1": "a"}}', "has '1'"),
        ('{"added_tokens_decoder": {"1": {"content": ""}}}', "has '1'"),
        ('{"added_tokens_decoder": {"1": {"content": "\\ud800"}}}', "has '1'"),
    ],
)
def test_damaged_names(folder: Path, text: str, finding: str) -> None:
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=r"tokenizer_config\.json") as caught:
        Tokenizer.load(folder)
    assert finding in str(caught.value)


@pytest.mark.parametrize(
    ("given", "more"),
    [("300", {300}), ("[0, 513]", {0, 513}), ("[]", set()), ("null", set()), (str(FIRST + 2), set())],
)
def test_stop_ids_are_added_to(folder: Path, given: str, more: set[int]) -> None:
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {given}}}')
    assert Tokenizer.load(folder).stop_ids == {FIRST + 1, FIRST + 2, FIRST + 9} | more


@pytest.mark.parametrize("given", ["true", "-1", "514", '"2"', "[1, null]", "1.5", "{}"])
def test_damaged_stop_ids(folder: Path, given: str) -> None:
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {given}}}')
    with pytest.raises(
        ModelFilesError, match=r"generation_config\.json: eos_token_id .* expected ids from 0 to 513"
    ):
        Tokenizer.load(folder)
