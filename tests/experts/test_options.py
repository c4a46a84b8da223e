"""Options of streaming, from arguments and from the environment."""

import json
import os
import subprocess
import sys

import pytest

import k3mlx
from k3mlx.errors import UsageError
from k3mlx.experts.options import expert_cache_from_environment, stream_options

from .models import write_streaming_model


def test_defaults():
    options = stream_options(environment={})
    assert (options.io_threads, options.direct_io, options.pipe) == (4, "auto", True)
    assert (options.lookahead, options.policy, options.warm_start) == ("off", "lru", "auto")


def test_the_environment_counts_where_no_option_is_given():
    environment = {"K3_LOAD_THREADS": "7", "K3_DIRECT": "1", "K3_PIPE": "0"}
    options = stream_options(environment=environment)
    assert (options.io_threads, options.direct_io, options.pipe) == (7, "on", False)
    options = stream_options(2, "off", "on", environment=environment)
    assert (options.io_threads, options.direct_io, options.pipe) == (2, "off", True)
    off = stream_options(environment={"K3_DIRECT": "0", "K3_PIPE": "1"})
    assert (off.direct_io, off.pipe) == ("off", True)
    assert stream_options(direct_io=True, pipe=False, environment={}).direct_io == "on"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"K3_LOAD_THREADS": "many"}, "K3_LOAD_THREADS is 'many', expected a number from 1 to 64"),
        ({"K3_LOAD_THREADS": "0"}, "K3_LOAD_THREADS is '0'"),
        ({"K3_LOAD_THREADS": "65"}, "K3_LOAD_THREADS is 65"),
        ({"K3_DIRECT": "yes"}, "K3_DIRECT is 'yes', expected 0 or 1"),
        ({"K3_PIPE": "2"}, "K3_PIPE is '2', expected 0 or 1"),
    ],
)
def test_variables_that_mean_nothing(variables, message):
    with pytest.raises(UsageError, match=message):
        stream_options(environment=variables)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"io_threads": 0}, "io_threads is 0"),
        ({"io_threads": True}, "io_threads is True"),
        ({"direct_io": "maybe"}, "direct_io is 'maybe', expected auto, on or off"),
        ({"pipe": "auto"}, "pipe is 'auto', expected on or off"),
        ({"lookahead": "far"}, "lookahead is 'far', expected auto, off or a number"),
        ({"lookahead": -1}, "lookahead is -1"),
        ({"policy": "fifo"}, "cache policy is 'fifo'"),
        ({"warm_start": "hot"}, "warm_start is 'hot'"),
    ],
)
def test_options_that_mean_nothing(arguments, message):
    with pytest.raises(UsageError, match=message):
        stream_options(**arguments, environment={})


def test_gigabytes_of_experts():
    assert expert_cache_from_environment({}) is None
    assert expert_cache_from_environment({"K3_EXPERT_GB": "1.5"}) == 1_500_000_000
    assert expert_cache_from_environment({"K3_EXPERT_GB": "0"}) == 0
    for text in ("lots", "-1", "nan", "inf"):
        with pytest.raises(UsageError, match=f"K3_EXPERT_GB is '{text}', expected a number of gigabytes"):
            expert_cache_from_environment({"K3_EXPERT_GB": text})


def test_every_variable_acts_on_a_run_and_its_flag_overrides_it(tmp_path):
    """By the command line, with what the run itself reports."""
    folder = write_streaming_model(tmp_path / "model")
    with k3mlx.load(folder, backend="numpy") as engine:
        payload = engine.backend.store.payload
    code = (
        "import sys, json, k3mlx\n"
        "options = json.loads(sys.argv[2])\n"
        "with k3mlx.load(sys.argv[1], backend='numpy', **options) as engine:\n"
        "    engine.session().feed([1, 2, 3])\n"
        "    print(json.dumps(engine.report()['experts']))\n"
    )
    variables = {
        "K3_EXPERT_GB": f"{5 * payload / 1e9:.9f}",
        "K3_LOAD_THREADS": "3",
        "K3_DIRECT": "1",
        "K3_PIPE": "0",
    }

    def report(options):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), json.dumps(options)],
            env=os.environ | variables, capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return json.loads(done.stdout)

    by_environment = report({})
    names = ("cache_bytes", "io_threads", "direct_io", "pipe")
    assert [by_environment[name] for name in names] == [5 * payload, 3, True, False]
    flags = {"expert_cache": 9 * payload, "io_threads": 2, "direct_io": "off", "pipe": "on"}
    assert [report(flags)[name] for name in names] == [9 * payload, 2, False, True]
