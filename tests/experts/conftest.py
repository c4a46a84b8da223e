"""Checkpoints that several tests of streaming read."""

import pytest

from k3mlx.checkpoint.snapshot import Checkpoint

from .models import write_streaming_model


@pytest.fixture(scope="session", params=["mxfp4", "plain"])
def streaming_folder(request, tmp_path_factory):
    return write_streaming_model(tmp_path_factory.mktemp("streaming"), request.param)


@pytest.fixture(scope="session")
def packed_folder(tmp_path_factory):
    return write_streaming_model(tmp_path_factory.mktemp("packed"))


@pytest.fixture
def checkpoint(packed_folder):
    with Checkpoint.open(packed_folder) as checkpoint:
        for name in {info.path: name for name, info in checkpoint.tensors.items()}.values():
            checkpoint.raw(name)  # it keeps its files open from the first read of each
        yield checkpoint
