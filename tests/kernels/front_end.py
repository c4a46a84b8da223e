"""Judge a: the generated kernel function under a real compiler front end, and Metal's limits.

Owns the OpenCL form of a launch (Metal's address spaces are OpenCL's), what is read off the syntax tree, and
the word list for what that front end lets pass. Needs the `libclang` wheel. Proves nothing about Apple's
compiler beyond what both languages share.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from .emulator.generate import Generated, template_kind, template_text

MAX_BUFFERS = 31
MAX_THREADS = 1024
THREADGROUP_BYTES = 32768
AVAILABLE = importlib.util.find_spec("clang") is not None
ARGUMENTS = (
    "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-Wall", "-Wconditional-uninitialized",
    "-Wno-unused-variable", "-Wno-unused-function", "-Wno-unused-const-variable",
)  # fmt: skip
_LOCAL, _GENERIC = 2, 5  # clang's numbers of address spaces
PRELUDE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef half float16_t;
typedef __bf16 bfloat16_t;
struct uint3 { uint x, y, z; };
#define device __global
#define constant __constant
#define thread __private
#define threadgroup __local
#define INFINITY __builtin_inff()
template <typename To, typename From> To as_type(From value);
namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_sum(float);
uint simd_max(uint);
uint simd_min(uint);
float simd_shuffle_xor(float, ushort);
float simd_shuffle(float, ushort);
float max(float, float);
float min(float, float);
int max(int, int);
int min(int, int);
namespace precise {
float exp(float);
float sqrt(float);
}
}
using namespace metal;
"""
# accepted by the front end, refused or different somewhere else
FORBIDDEN = {
    r"\bdouble\b": "double",
    r"\bgoto\b": "goto",
    r"\bstatic\b": "static local",
    r"\bfloat[234]\b|\bu?int[234]\b": "vector type",
    r"\bsimdgroup_(matrix|float8x8)\b": "SIMD group matrix",
    r"\batomic_": "atomic",
    r"\bsimd_vote\b": "vote type",
    r"\bM_PI_F\b|\bnumeric_limits\b|\bLimits<": "constants without counterpart",
    r"\[\s*[&=]?\s*\]\s*\(": "lambda",
    r"(?<![\w.])(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])|(?<![\w.])\d+[eE][+-]?\d+(?![\w.])": "literal without f",
    r"\bthreadgroup\s+\w+\s*\*": "pointer to threadgroup memory as a declared type",
    r"(?<!::)\b(?:exp|log|sqrt|rsqrt|tanh|sin|cos|pow)\s*\(": "mathematical function without its namespace",
    r"\bmetal::(?:exp|log|sqrt|rsqrt|tanh|sin|cos|pow)\s*\(": "mathematical function that is not metal::precise",
}


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def opencl_text(generated: Generated, small_in: str) -> str:
    """The function as C++ for OpenCL, with inputs of fewer than 8 elements in `constant` or in `device`."""
    parameters, values, attributes = [], [], []
    for p in generated.parameters:
        if p.buffer is None:
            attributes.append(f"{p.type} k3_attribute_{p.name}();")
            values.append(f"const {p.type} {p.name} = k3_attribute_{p.name}();")
            continue
        space = small_in if p.const and p.space == "constant" else p.space
        parameters.append(f"{'const ' if p.const else ''}{space} {p.type}* {p.name}")
    for name, value in generated.template:
        kind = template_kind(value)
        values.append(
            f"using {name} = {template_text(value)};"
            if kind == "typename"
            else f"constexpr {kind} {name} = {template_text(value)};"
        )
    return (
        f'{PRELUDE}{" ".join(attributes)}\n#line 1 "header"\n{generated.header}\n#line 1 "signature"\n'
        f"kernel void {generated.name}({', '.join(parameters)}) {{ {' '.join(values)}\n"
        f'#line 1 "source"\n{generated.source}\n}}\n'
    )


def parse(text: str) -> Any:
    from clang.cindex import Index

    return Index.create().parse("kernel.clcpp", args=list(ARGUMENTS), unsaved_files=[("kernel.clcpp", text)])


def _tree_findings(cursor: Any) -> Iterator[str]:
    """Pointers and references in the generic address space, doubles, threadgroup memory in all."""
    from clang.cindex import CursorKind, TypeKind

    local_sizes: dict[int, int] = {}
    for node in cursor.walk_preorder():
        where = f"line {node.location.line}: {node.spelling or node.kind.name}"
        kind = node.type.get_canonical()
        if kind.kind in (TypeKind.POINTER, TypeKind.LVALUEREFERENCE, TypeKind.RVALUEREFERENCE):
            pointee = kind.get_pointee()
            if pointee.kind != TypeKind.FUNCTIONPROTO and pointee.get_address_space() == _GENERIC:
                yield f"{where} points into the generic address space"
        if kind.kind in (TypeKind.DOUBLE, TypeKind.LONGDOUBLE):
            yield f"{where} is a double"
        if node.kind == CursorKind.VAR_DECL and node.type.get_address_space() == _LOCAL:
            local_sizes[node.hash] = (node.type.get_size() + 15) // 16 * 16
    local_bytes = sum(local_sizes.values())
    if local_bytes > THREADGROUP_BYTES:
        yield f"{local_bytes} bytes of threadgroup memory, at most {THREADGROUP_BYTES}"


def findings(generated: Generated, threadgroup: tuple[int, ...]) -> list[str]:
    """Everything judge a holds against a launch; empty when it passes."""
    found = text_findings(generated.header, generated.source)
    buffers = sum(p.buffer is not None for p in generated.parameters)
    if buffers > MAX_BUFFERS:
        found.append(f"{buffers} buffers, at most {MAX_BUFFERS}")
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > MAX_THREADS:
        found.append(f"{threads} threads in a threadgroup, at most {MAX_THREADS}")
    for space in ("constant", "device"):
        unit = parse(opencl_text(generated, space))
        found += [f"small inputs in {space}: {d.spelling}, {d.location.line}" for d in unit.diagnostics]
        found += [f"small inputs in {space}: {line}" for line in _tree_findings(unit.cursor)]
    return found


def text_findings(header: str, source: str) -> list[str]:
    """What a word list can tell, without a compiler."""
    found = []
    for name, text in (("header", header), ("source", source)):
        if not text.isascii():
            found.append(f"{name}: not plain ASCII")
        bare = without_comments(text)
        for pattern, what in FORBIDDEN.items():
            if match := re.search(pattern, bare):
                found.append(f"{name}: {what}: {match[0]}")
    for helper in re.findall(
        r"^(?:inline|constant)\s+[\w\s]*?(\w+)\s*[(=]", without_comments(header), flags=re.M
    ):
        if not helper.startswith("k3_"):
            found.append(f"header: {helper} does not start with k3_")
    return found
