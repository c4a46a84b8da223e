"""A process that speaks may take as long as it likes; one that is silent, or dies, is told by what it said last."""

import sys
import time

import pytest

from k3mlx.apart import NoAnswerError, last_line


def run(program, silence):
    return last_line([sys.executable, "-u", "-c", program], silence)


def test_signs_of_life_put_the_deadline_off():
    started = time.monotonic()
    assert run("import time\nfor n in range(8): print(n); time.sleep(0.4)\nprint('done')", 2.5) == "done"
    assert time.monotonic() - started > 2.5


def test_a_silent_process_is_ended_and_named_by_its_last_line():
    started = time.monotonic()
    with pytest.raises(NoAnswerError, match=r"^no answer after 1.5 s at the second case$"):
        run("print('first'); print('the second case'); import time; time.sleep(60)", 1.5)
    assert time.monotonic() - started < 30


def test_a_process_that_closes_its_output_and_stays_is_ended():
    with pytest.raises(NoAnswerError, match="no answer after 1 s"):
        run("import os, time; os.close(1); time.sleep(60)", 1)


def test_a_process_that_dies_is_named_by_its_errors():
    with pytest.raises(NoAnswerError, match=r"^its process ended with status 3: because$"):
        run("import sys; print('at work'); print('well\\nbecause', file=sys.stderr); sys.exit(3)", 30)
