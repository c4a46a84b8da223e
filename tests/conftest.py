"""Models that several test files share: small, random, with a vocabulary of single bytes."""

import numpy as np
import pytest
from hypothesis import settings

import k3mlx
from tests.text import BYTES, vocabulary_file
from tests.tiny import random_config, write_random_model

settings.register_profile("k3mlx", deadline=None)  # a busy machine is no failure
settings.load_profile("k3mlx")


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """Folder of a random model that can be talked to: 256 byte tokens, 256 special ids, context 500."""
    rng = np.random.default_rng(20)
    config = random_config(rng, vocab_size=512, num_hidden_layers=4, max_position_embeddings=500)
    folder = write_random_model(tmp_path_factory.mktemp("byte-model"), config, rng)
    (folder / "tiktoken.model").write_bytes(vocabulary_file(BYTES))
    return folder


@pytest.fixture
def engine(byte_model):
    """The random model on numpy in float32."""
    with k3mlx.load(byte_model) as engine:
        yield engine
