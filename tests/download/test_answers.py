"""Answers that are wrong, late or a refusal: hashes, statuses, names, tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from k3mlx.download import Request
from k3mlx.errors import ModelFilesError, UsageError
from tests.hub_server import INFO, Corrupt, Cut, HubServer, Status

from .served import CUT, ONCE, SHARD, SIZE, VISION, check_files, failure, part, run


def test_a_wrong_hash_is_fetched_again(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Corrupt(5))
    server.faults["config.json"].append(Corrupt(5))
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert len(server.sent_of(SHARD)) == len(server.sent_of("config.json")) == 2
    assert f"{SHARD}: came with a wrong hash; fetching it again" in notes


def test_a_wrong_hash_twice_is_an_error_and_the_rest_goes_on(server: HubServer, request_: Request) -> None:
    server.faults[SHARD] += [Corrupt(5), Corrupt(SIZE - 1)]
    assert f"{SHARD}: came twice with a wrong hash" in failure(request_)
    check_files(server, request_.local_dir, VISION, SHARD)


def test_a_part_with_wrong_bytes_is_found_at_the_end(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Cut(CUT))
    failure(replace(request_, patience=ONCE))
    part(server, request_.local_dir).write_bytes(b"\0" * CUT)
    run(request_)
    check_files(server, request_.local_dir, VISION)


@pytest.mark.parametrize("where", [SHARD, INFO])
def test_too_many_requests_waits_as_long_as_asked(server: HubServer, request_: Request, where: str) -> None:
    server.faults[where].append(Status(429, (("Retry-After", "0.2"),)))
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert "the server answers 429; next attempt in 0.2 s" in notes


@pytest.mark.parametrize("where", [SHARD, INFO])
def test_an_error_of_the_server_is_tried_again(server: HubServer, request_: Request, where: str) -> None:
    server.faults[where] += [Status(500), Status(503)]
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert "answers 500; next attempt in 0.01 s" in notes
    assert "answers 503; next attempt in 0.02 s" in notes


def test_an_error_that_stays_ends_the_run(server: HubServer, request_: Request) -> None:
    server.faults[SHARD] += [Status(500)] * 3
    assert f"{SHARD}: the server answers 500; gave up after 3 attempts" in failure(request_)
    server.faults[INFO] += [Status(502)] * 3
    assert "gave up after 3" in failure(replace(request_, local_dir=request_.local_dir / "new"))


def test_nobody_answers(server: HubServer, request_: Request) -> None:
    server.shutdown()
    server.server_close()
    assert "org/name at main: ConnectError" in failure(request_) or "ConnectionError" in failure(request_)


def test_unknown_names(request_: Request) -> None:
    assert "not found" in failure(replace(request_, repo="org/none"), UsageError)
    assert "not found" in failure(replace(request_, revision="v9"), UsageError)
    for bad in (
        Request("name"),
        Request(revision="../x"),
        Request(max_workers=0),
        Request(dirs=[Path("/no/x")]),
    ):
        failure(bad, UsageError)


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/x", "a\\b", "a//b", "c:x", "a\nb"])
def test_a_name_that_leads_elsewhere_is_refused(server: HubServer, request_: Request, name: str) -> None:
    server.files["a/" + name if name.startswith(".") else name] = b"evil"
    assert "expected a plain path" in failure(request_, ModelFilesError)
    assert not request_.local_dir.exists()


def test_files_in_folders_of_the_repository(server: HubServer, request_: Request) -> None:
    server.files["docs/a b.txt"] = b"text"
    run(request_)
    assert (request_.local_dir / "docs" / "a b.txt").read_bytes() == b"text"


def test_the_token_goes_to_the_hub_and_no_further(
    server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    run(request_)  # the second origin answers 400 to a token
    check_files(server, request_.local_dir, VISION)


def test_a_revoked_token_says_what_to_do(
    server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.token = "hf_good"
    monkeypatch.setenv("HF_TOKEN", "hf_revoked")
    text = failure(request_)
    assert "refused this token (401); it may be revoked" in text
    assert "hf auth login" in text
    assert "hf_revoked" not in text


def test_a_token_revoked_in_the_middle(
    server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    server.faults[SHARD].append(Cut(CUT))
    failure(replace(request_, patience=ONCE))
    server.token = "hf_new"
    assert "refused this token (401)" in failure(request_)
    part(server, request_.local_dir, CUT)


def test_gated_and_private(server: HubServer, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("k3mlx.download.remote.get_token", lambda: None)
    server.token = "hf_good"
    assert "not found, or not public (401)" in failure(request_)
    server.refused = Status(403, (("X-Error-Code", "GatedRepo"),))
    assert f"accept its terms at {server.url}/org/name" in failure(request_)
