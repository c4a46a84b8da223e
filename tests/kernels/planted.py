"""Small kernels with one planted fault each, and correct ones that look like them.

Each text runs on inputs a [64] float32 and n [8] int32 with output o, 64 threads a group. HERE marks the line a
finding must name; `words` are the parts of the finding that must match.
"""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass, field

_INDEX = "const int i = int(thread_index_in_threadgroup);\n"
_GROUP = "const int g = int(threadgroup_position_in_grid.x);\n"
_LANE = "const int lane = int(thread_index_in_simdgroup);\n"
_SHARED = "threadgroup float s[64];\n"
_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


@dataclass(frozen=True)
class Text:
    """kind: the finding to expect, empty for a correct text; groups: threadgroups of 64 threads."""

    label: str
    kind: str
    source: str
    words: dict[str, str] = field(default_factory=dict)
    groups: int = 1
    out: int = 64
    dtype: str = "float32"

    @property
    def line(self) -> str | None:
        lines = self.source.split("\n")
        return next((str(n + 1) for n, line in enumerate(lines) if "HERE" in line), None)


FAULTS = [
    # bounds
    Text("one past the input", "bounds", _INDEX + "o[i] = a[i + 1]; // HERE", {"buffer": "a", "index": "64", "thread": "63"}),
    Text("one past the output", "bounds", _INDEX + "o[i + 1] = a[i]; // HERE", {"buffer": "o", "index": "64", "thread": "63"}),
    Text("before the input", "bounds", _INDEX + "o[i] = a[i - 1]; // HERE", {"buffer": "a", "index": "-1", "thread": "0"}),
    Text("far away", "bounds", _INDEX + "o[i] = a[i * 30000000]; // HERE", {"buffer": "a", "index": "30000000", "thread": "1"}),
    Text("threadgroup array", "bounds", _INDEX + _SHARED + "s[i + 1] = a[i]; // HERE\n" + _BARRIER + "o[i] = s[i];",
         {"buffer": "float[64]", "index": "64", "thread": "63"}),
    Text("threadgroup array by pointer", "bounds", _INDEX + _SHARED + "auto p = s;\np[i + 64] = a[i]; // HERE\n" + _BARRIER + "o[i] = s[i];",
         {"buffer": "s", "index": "64", "thread": "0"}),
    Text("private array", "bounds", _INDEX + "float x[4] = {0.0f, 1.0f, 2.0f, 3.0f};\no[i] = x[i / 15]; // HERE",
         {"buffer": "float[4]", "index": "4", "thread": "60"}),
    # races
    Text("no barrier", "race", _INDEX + _SHARED + "s[i] = a[i];\no[i] = s[i / 2]; // HERE", {"buffer": "s", "index": "0", "thread": "1", "other": "0"}),
    Text("barrier of the wrong memory", "race",
         _INDEX + _SHARED + "s[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_device);\no[i] = s[63 - i]; // HERE", {"buffer": "s", "index": "63", "thread": "0", "other": "63"}),
    Text("lanes taken to be in step", "race", _INDEX + _SHARED + "s[i] = a[i];\nconst float x = simd_sum(a[i]);\no[i] = x + s[i ^ 1]; // HERE",
         {"buffer": "s", "index": "1", "thread": "0", "other": "1"}),
    Text("all write one element", "race", _INDEX + _SHARED + "s[0] = 1.0f; // HERE\n" + _BARRIER + "o[i] = s[0];", {"buffer": "s", "index": "0", "thread": "1", "other": "0"}),
    Text("read, then overwritten", "race",
         _INDEX + _SHARED + "s[i] = a[i];\n" + _BARRIER + "o[i] = s[63 - i]; // HERE\ns[i] = 0.0f;", {"buffer": "s", "index": "31", "thread": "32", "other": "31"}),
    Text("all write one output", "race", _INDEX + "o[i] = 0.0f;\no[0] = a[i]; // HERE", {"buffer": "o", "index": "0", "thread": "1"}),
    Text("device memory without its barrier", "race", _INDEX + "o[i] = a[i];\n" + _BARRIER + "const float x = o[63 - i]; // HERE\n"
         + "threadgroup_barrier(mem_flags::mem_device);\no[i] = x;", {"buffer": "o", "index": "63", "thread": "0", "other": "63"}),
    Text("two groups write one place", "race", _INDEX + "o[i] = a[i]; // HERE", {"buffer": "o", "index": "0", "group": "1"}, groups=2),
    Text("one group reads another's", "race", _INDEX + _GROUP + "o[g * 64 + i] = g == 0 ? a[i] : o[i]; // HERE",
         {"buffer": "o", "index": "0", "group": "1"}, groups=2, out=128),
    # divergence
    Text("return before a barrier", "divergence", _INDEX + _SHARED + "if (i == 5) {\n  return;\n}\ns[i] = a[i];\n"
         "threadgroup_barrier(mem_flags::mem_threadgroup); // HERE\no[i] = s[i];", {"thread": "5"}),
    Text("barrier in a branch", "divergence", _INDEX + "if (i < 32) {\n  threadgroup_barrier(mem_flags::mem_none); // HERE\n}\no[i] = a[i];", {"thread": "32"}),
    Text("two barriers", "divergence", _INDEX + "if (i < 32) {\n  threadgroup_barrier(mem_flags::mem_none); // HERE\n} else {\n"
         "  threadgroup_barrier(mem_flags::mem_none);\n}\no[i] = a[i];", {"waiting": "0"}),
    Text("half a SIMD group sums", "divergence", _INDEX + _LANE + "float x = a[i];\nif (lane < 16) {\n  x = simd_sum(x); // HERE\n}\no[i] = x;", {"thread": "16"}),
    Text("barrier in a loop of unequal length", "divergence",
         _INDEX + "for (int t = 0; t < 2 + i / 32; ++t) {\n  threadgroup_barrier(mem_flags::mem_none); // HERE\n}\no[i] = a[i];", {"thread": "0"}),
    # outputs never written
    Text("last element", "unwritten", _INDEX + "if (i < 63) {\n  o[i] = a[i];\n}", {"buffer": "o", "index": "63"}),
    Text("every other element", "unwritten", _INDEX + "if (i % 2 == 0) {\n  o[i] = a[i];\n}", {"buffer": "o", "index": "1"}),
    Text("a whole group", "unwritten", _INDEX + _GROUP + "if (g == 0) {\n  o[i] = a[i];\n}", {"buffer": "o", "index": "64"}, groups=2, out=128),
    # uninitialised reads
    Text("threadgroup memory nobody wrote", "uninitialised", _INDEX + _SHARED + "o[i] = s[i]; // HERE", {"buffer": "s", "index": "0", "thread": "0"}),
    Text("half of it written", "uninitialised", _INDEX + _SHARED + "if (i < 32) {\n  s[i] = a[i];\n}\n" + _BARRIER + "o[i] = s[i]; // HERE",
         {"buffer": "s", "index": "32", "thread": "32"}),
    Text("left by the group before", "uninitialised", _INDEX + _GROUP + _SHARED + "if (g == 0) {\n  s[i] = a[i];\n}\n" + _BARRIER + "o[g * 64 + i] = s[i]; // HERE",
         {"buffer": "s", "index": "0", "group": "1"}, groups=2, out=128),
    Text("output read before it is written", "uninitialised", _INDEX + "o[i] = o[i] + a[i]; // HERE", {"buffer": "o", "index": "0"}),
    # arithmetic
    Text("sum past the integers", "overflow", _INDEX + "const int x = 2147483600 + i; // HERE\no[i] = float(x);", {"thread": "48"}),
    Text("shift by the width", "overflow", _INDEX + "const int x = 1 << (i + 8); // HERE\no[i] = float(x);", {"thread": "24"}),
    Text("division by zero", "overflow", _INDEX + "const int x = 5 / (i - 7); // HERE\no[i] = float(x);", {"thread": "7"}),
    Text("product past the integers", "overflow", _INDEX + "const int x = i * 100000000; // HERE\no[i] = float(x);", {"thread": "22"}),
    # alignment
    Text("float at an odd byte", "alignment", _INDEX + "auto p = reinterpret_cast<device const float*>(reinterpret_cast<device const uchar*>(a) + 1);\no[i] = p[0]; // HERE", {"thread": "0"}),
    Text("word at a half word", "alignment", _INDEX + "auto p = reinterpret_cast<device uint*>(reinterpret_cast<device ushort*>(o) + 1);\np[0] = 1u; // HERE", {"thread": "0"}),
    Text("half word at an odd byte", "alignment", _INDEX + "auto p = reinterpret_cast<device const ushort*>(reinterpret_cast<device const uchar*>(a) + 2 * i + 1);\no[i] = float(p[0]); // HERE", {"thread": "0"}),
    # threadgroup memory
    Text("one array too large", "threadgroup", _INDEX + "threadgroup float s[8193];\ns[i] = a[i];\no[i] = s[i];"),
    Text("two arrays too large", "threadgroup", _INDEX + "threadgroup float s[8000];\nthreadgroup uint r[200];\nr[i] = 0u;\ns[i] = a[i];\no[i] = s[i] + float(r[i]);"),
    Text("an initialiser", "threadgroup", _INDEX + "threadgroup float s[2] = {float(n[0]), 1.0f};\no[i] = s[i % 2];"),
    # private variables
    Text("never set", "private", _INDEX + "float x;\no[i] = x;", {"buffer": "o"}),
    Text("set in one branch", "private", _INDEX + "float x;\nif (i < 60) {\n  x = a[i];\n}\no[i] = x;", {"buffer": "o"}),
    Text("array set in part", "private", _INDEX + "float x[3];\nx[0] = a[i];\nx[1] = a[i];\no[i] = x[i % 3];", {"buffer": "o"}),
    # writes to inputs
    Text("const cast away", "input", _INDEX + "const_cast<device float*>(a)[i] = 1.0f; // HERE\no[i] = a[i];", {"buffer": "a", "index": "0"}),
    Text("through a cast pointer", "input", _INDEX + "auto p = (device float*)a;\np[i] = 2.0f; // HERE\no[i] = a[i];", {"buffer": "a", "index": "0"}),
    Text("the small input", "input", _INDEX + "o[i] = a[i];\nif (i == 3) {\n  ((device int*)n)[2] = 1; // HERE\n}", {"buffer": "n", "index": "2", "thread": "3"}),
    # lanes that are not there
    Text("lane 40", "lane", _INDEX + "o[i] = simd_shuffle(a[i], ushort(40)); // HERE", {"thread": "0", "lane": "40"}),
    Text("down from the last lane", "lane", _INDEX + "o[i] = simd_shuffle_down(a[i], ushort(1)); // HERE", {"thread": "31", "lane": "32"}),
    Text("exclusive or past the group", "lane", _INDEX + "o[i] = simd_shuffle_xor(a[i], ushort(33)); // HERE", {"thread": "0", "lane": "33"}),
]  # fmt: skip

CORRECT = [
    Text("copy", "", _INDEX + "o[i] = a[i];"),
    Text("reversal through threadgroup memory", "", _INDEX + _SHARED + "s[i] = a[i];\n" + _BARRIER + "o[i] = s[63 - i];"),
    Text("array used twice", "", _INDEX + _SHARED + "float x = a[i];\nfor (int t = 0; t < 3; ++t) {\n  s[i] = x;\n  " + _BARRIER + "  x += s[63 - i];\n  " + _BARRIER + "}\no[i] = x;"),
    Text("sum by SIMD groups", "", _INDEX + _LANE + _SHARED + "const float x = simd_sum(a[i]);\nif (lane == 0) {\n  s[i / 32] = x;\n}\n" + _BARRIER + "o[i] = s[0] + s[1];"),
    Text("exchange inside a SIMD group", "", _INDEX + _SHARED + "s[i] = a[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[i ^ 1];"),
    Text("butterfly", "", _INDEX + "float x = a[i];\nfor (int step = 16; step > 0; step /= 2) {\n  x += simd_shuffle_xor(x, ushort(step));\n}\no[i] = x;"),
    Text("device memory with its barrier", "", _INDEX + "o[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_device);\nconst float x = o[63 - i];\nthreadgroup_barrier(mem_flags::mem_device);\no[i] = x;"),
    Text("two groups, two places", "", _INDEX + _GROUP + "o[g * 64 + i] = a[i];", groups=2, out=128),
    Text("one SIMD group sums", "", _INDEX + "float x = a[i];\nif (i < 32) {\n  x = simd_sum(x);\n}\no[i] = x;"),
    Text("barrier in a branch all take", "", _INDEX + _SHARED + "s[i] = a[i];\nif (n[0] == 0) {\n  " + _BARRIER + "}\no[i] = s[63 - i];"),
    Text("shape of an input", "", _INDEX + "o[i] = float(a_shape[0]) + float(a_strides[0]) + float(a_ndim);"),
    Text("rounding to bfloat16", "", _INDEX + "o[i] = bfloat16_t(a[i]);", dtype="bfloat16"),
    Text("one element, read by all", "", _INDEX + _SHARED + "if (i == 0) {\n  s[0] = a[3];\n}\n" + _BARRIER + "o[i] = s[0];"),
]  # fmt: skip
