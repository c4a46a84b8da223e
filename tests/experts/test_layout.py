"""Where experts lie on disk and in a slot."""

from pathlib import Path

import numpy as np

from k3mlx.checkpoint.safetensors import TensorInfo
from k3mlx.checkpoint.snapshot import Checkpoint
from k3mlx.experts.layout import GAP_MAX, ExpertLayout, _place
from k3mlx.experts.slots import ALIGN

from .models import stored

A, B = Path("a.safetensors"), Path("b.safetensors")


def tensors(*places):
    return {
        f"p{i}": TensorInfo(f"p{i}", "U8", (nbytes,), path, offset, nbytes)
        for i, (path, offset, nbytes) in enumerate(places)
    }


def test_adjacent_tensors_are_one_read_and_keep_their_place_in_a_block():
    placement = _place(tensors((A, 10_000, 300), (A, 10_300, 41), (A, 9_000, 1_000)))
    assert [tuple(piece) for piece in placement.pieces] == [(A, 9_000, 1_341, 9_000 % ALIGN)]
    assert {name: part.start for name, part in placement.parts.items()} == {
        "p2": 9_000 % ALIGN, "p0": 9_000 % ALIGN + 1_000, "p1": 9_000 % ALIGN + 1_300,
    }  # fmt: skip


def test_a_small_gap_is_read_through_and_a_large_one_is_not():
    near = _place(tensors((A, 0, 100), (A, 100 + GAP_MAX, 50)))
    assert [piece.nbytes for piece in near.pieces] == [150 + GAP_MAX]
    far = _place(tensors((A, 0, 100), (A, 101 + GAP_MAX, 50)))
    assert [piece.nbytes for piece in far.pieces] == [100, 50]


def test_pieces_never_share_a_block_of_the_slot():
    placement = _place(tensors((A, 4_000, 200), (B, 7, 5_000), (A, 50_000, 1), (B, 90_001, 8_192)))
    end = 0
    for piece in placement.pieces:
        assert piece.start % ALIGN == piece.offset % ALIGN
        assert piece.start - piece.offset % ALIGN >= end
        end = -(-(piece.start + piece.nbytes) // ALIGN) * ALIGN
    slot = -(-13_393 // ALIGN) * ALIGN + 4 * GAP_MAX  # what ExpertLayout sets aside for these four tensors
    assert end <= slot


def test_views_of_a_filled_slot_are_the_tensors(streaming_folder):
    with Checkpoint.open(streaming_folder) as checkpoint:
        layout = ExpertLayout(checkpoint)
        assert layout.layers == (1, 2, 3)
        assert layout.count == 27
        assert layout.payload == sum(array.nbytes for array in stored(checkpoint, 1, 0).values())
        slot = np.full(layout.slot_bytes, 0xEE, np.uint8)
        for layer, expert in ((1, 0), (2, 8), (3, 4)):
            placement = layout.place(layer, expert)
            for piece in placement.pieces:
                data = np.fromfile(piece.path, np.uint8, piece.nbytes, offset=piece.offset)
                slot[piece.start : piece.start + piece.nbytes] = data
            views, expected = placement.views(slot), stored(checkpoint, layer, expert)
            assert views.keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_array_equal(views[name], array)
                assert np.shares_memory(views[name], slot)
