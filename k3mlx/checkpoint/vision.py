"""The tensors of K3's vision tower and projector, which the text model leaves aside: names, shapes, dtypes.

For counting bytes and writing layouts only; nothing here is computed with. Source: model specification §1.2, §4.2.
"""

from collections.abc import Iterator

from .names import BF16, TensorSpec

BLOCKS = 27
WIDTH, QKV_WIDTH, INNER = 1024, 1536, 4096
PATCH, GRID = 14, 64
MERGED = 4 * WIDTH  # 2 × 2 patches become one token
TEXT_WIDTH = 7168


def vision_specs() -> Iterator[TensorSpec]:
    """Every tensor of the released vision part: 168, in BF16."""
    yield from (TensorSpec(name, shape, BF16) for name, shape in _shapes())


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "vision_tower.patch_embed.proj.weight", (WIDTH, 3, PATCH, PATCH)
    yield "vision_tower.patch_embed.pos_emb.weight", (GRID, GRID, WIDTH)
    for block in range(BLOCKS):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield f"{prefix}norm0.weight", (WIDTH,)
        yield f"{prefix}norm1.weight", (WIDTH,)
        yield f"{prefix}wqkv.weight", (3 * QKV_WIDTH, WIDTH)
        yield f"{prefix}wo.weight", (WIDTH, QKV_WIDTH)
        yield f"{prefix}mlp.fc0.weight", (INNER, WIDTH)
        yield f"{prefix}mlp.fc1.weight", (WIDTH, INNER)
    yield "vision_tower.encoder.final_layernorm.weight", (WIDTH,)
    yield "mm_projector.proj.0.weight", (MERGED, MERGED)
    yield "mm_projector.proj.2.weight", (TEXT_WIDTH, MERGED)
    yield "mm_projector.post_norm.weight", (TEXT_WIDTH,)
