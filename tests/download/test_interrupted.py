"""Downloads that were cut short go on at the byte where they stopped."""

import os
from dataclasses import replace

import pytest

from k3mlx.download import Request
from tests.hub_server import COMMIT, Cut, HubServer, OtherRange, Short, Stall, Status, WholeFile

from .served import CUT, ONCE, OTHER, QUICK, SHARD, SIZE, VISION, check_files, failure, part, run


@pytest.mark.parametrize("fault", [Cut(CUT), Stall(CUT), Short(CUT)])
def test_one_run_goes_on_after_a_cut_and_a_stall(server: HubServer, request_: Request, fault: object) -> None:
    server.faults[SHARD].append(fault)
    _, notes = run(replace(request_, patience=replace(QUICK, timeout=0.3)))
    check_files(server, request_.local_dir, VISION)
    first, second = server.sent_of(SHARD)
    assert first.start == 0
    assert second.start == first.count == CUT
    assert f"{SHARD}: " in notes
    assert "next attempt in 0.01 s" in notes


def test_any_number_of_cuts_as_long_as_something_comes(server: HubServer, request_: Request) -> None:
    server.faults[SHARD] += [Cut(1 << 16)] * 5
    run(replace(request_, patience=replace(QUICK, attempts=2)))
    check_files(server, request_.local_dir, VISION)


def test_the_next_run_goes_on_after_a_cut(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Cut(CUT))
    text = failure(replace(request_, patience=ONCE, max_workers=1))
    assert "gave up after 1 attempts" in text
    assert "run the same command again" in text
    part(server, request_.local_dir, CUT)
    assert not (request_.local_dir / SHARD).exists()
    result, _ = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert [(s.start, s.count) for s in server.sent_of(SHARD)] == [
        (0, CUT),
        (CUT, SIZE - CUT),
    ]
    assert server.sent_of("config.json")[1:] == []
    assert result.received == SIZE - CUT + len(server.files[OTHER])


def test_the_next_run_takes_the_commit_of_the_first(server: HubServer, request_: Request) -> None:
    server.faults[SHARD].append(Cut(100))
    failure(replace(request_, patience=ONCE))
    server.commit = "f" * 40
    server.asked.clear()
    assert run(replace(request_, revision="main"))[0].commit == COMMIT
    assert not any(path.startswith("/api/") for path in server.asked)
    server.commits.add(server.commit)
    assert run(request_)[0].commit == COMMIT
    assert run(replace(request_, revision="main"))[0].commit == "f" * 40, "complete, so main is looked up"
    assert run(request_)[0].received == 0


@pytest.mark.parametrize("fault", [WholeFile(), OtherRange(5), Status(416)])
def test_a_server_that_will_not_go_on(server: HubServer, request_: Request, fault: object) -> None:
    server.faults[SHARD] += [Cut(CUT), fault]
    _, notes = run(request_)
    check_files(server, request_.local_dir, VISION)
    assert "wrong hash" not in notes


def test_a_file_that_was_cut_short_on_disk_gets_only_what_it_lacks(
    server: HubServer, request_: Request
) -> None:
    run(request_)
    os.truncate(request_.local_dir / SHARD, SIZE - 1)
    assert run(request_)[0].received == 1
    check_files(server, request_.local_dir, VISION)


def test_a_file_that_is_too_long_is_replaced(server: HubServer, request_: Request) -> None:
    run(request_)
    with open(request_.local_dir / SHARD, "ab") as file:
        file.write(b"more")
    assert run(request_)[0].received == SIZE
    check_files(server, request_.local_dir, VISION)
