"""The kernel function that MLX writes around a kernel text, by the rules MLX follows (mlx 0.32.4).

Owns names, address spaces, buffer numbers and thread attributes. `metal_text` is compared with what MLX
itself exports; `emulator_text` and the OpenCL form of judge a are made from the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arrays import DTYPES

SMALL = 8  # inputs of fewer elements are in the constant address space
# attribute -> (type, first of its values in the runtime's table)
ATTRIBUTES = {
    "thread_position_in_grid": ("uint3", 0),
    "thread_position_in_threadgroup": ("uint3", 3),
    "threadgroup_position_in_grid": ("uint3", 6),
    "threadgroups_per_grid": ("uint3", 9),
    "threads_per_grid": ("uint3", 12),
    "threads_per_threadgroup": ("uint3", 15),
    "thread_index_in_simdgroup": ("uint", 18),
    "simdgroup_index_in_threadgroup": ("uint", 19),
    "thread_index_in_threadgroup": ("uint", 20),
    "simdgroups_per_threadgroup": ("uint", 21),
    "threads_per_simdgroup": ("uint", 22),
}
TemplateValue = bool | int | str


@dataclass(frozen=True)
class Parameter:
    """One parameter of the generated function; `buffer` is None for a thread attribute."""

    name: str
    type: str
    space: str  # "device", "constant" or "" for an attribute
    const: bool
    form: str  # "*", "&" or ""
    buffer: int | None

    def metal(self) -> str:
        if self.buffer is None:
            return f"  {self.type} {self.name} [[{self.name}]]"
        const = "const " if self.const else ""
        return f"  {const}{self.space} {self.type}{self.form} {self.name} [[buffer({self.buffer})]]"


@dataclass(frozen=True)
class Generated:
    """Everything known of a kernel function once its launch is known."""

    name: str
    header: str
    source: str
    template: tuple[tuple[str, TemplateValue], ...]
    parameters: tuple[Parameter, ...]
    input_count: int

    @property
    def template_declaration(self) -> str:
        return ", ".join(f"{template_kind(value)} {name}" for name, value in self.template)

    @property
    def template_values(self) -> str:
        return ", ".join(template_text(value) for _, value in self.template)

    def metal_text(self) -> str:
        """Header, function and instantiation, as MLX prints them with `verbose`."""
        parameters = ",\n".join(p.metal() for p in self.parameters)
        template = f"template <{self.template_declaration}>\n" if self.template else ""
        text = f"{self.header}{template}[[kernel]] void {self.name}(\n{parameters}) {{\n{self.source}\n}}\n"
        if self.template:
            full = f"{self.name}<{self.template_values}>"
            text += f'\ntemplate [[host_name("{self.name}")]] [[kernel]] decltype({full}) {full};\n'
        return text

    def emulator_text(self) -> str:
        """A translation unit for g++: the same header and body, and an entry the runtime can call."""
        parameters = ", ".join(
            f"{'const ' if p.const else ''}{p.type}{p.form} {p.name}" for p in self.parameters
        )
        arguments = ", ".join(self._emulator_argument(p) for p in self.parameters)
        template = f"template <{self.template_declaration}>\n" if self.template else ""
        values = f"<{self.template_values}>" if self.template else ""
        return (
            f'#include "metal.h"\n#line 1 "header"\n{self.header}\n#line 1 "signature"\n'
            f'{template}inline void {self.name}({parameters}) {{\n#line 1 "source"\n{self.source}\n}}\n'
            '#line 1 "entry"\n'
            'extern "C" void k3_entry(void** buffers, const uint32_t* attributes) {\n'
            f"  {self.name}{values}({arguments});\n}}\n"
        )

    @staticmethod
    def _emulator_argument(p: Parameter) -> str:
        if p.buffer is not None:
            pointer = f"static_cast<{'const ' if p.const else ''}{p.type}*>(buffers[{p.buffer}])"
            return f"*{pointer}" if p.form == "&" else pointer
        first = ATTRIBUTES[p.name][1]
        values = [f"attributes[{first + n}]" for n in range(3 if p.type == "uint3" else 1)]
        return f"uint3{{{', '.join(values)}}}" if p.type == "uint3" else values[0]


def template_kind(value: TemplateValue) -> str:
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"


def template_text(value: TemplateValue) -> str:
    return str(int(value)) if isinstance(value, (bool, int)) else DTYPES[value][0]


def generate(
    name: str,
    inputs: Sequence[tuple[str, tuple[int, ...], str]],
    outputs: Sequence[tuple[str, str]],
    header: str,
    source: str,
    template: Sequence[tuple[str, TemplateValue]],
) -> Generated:
    """inputs: (name, shape, dtype) each; outputs: (name, dtype) each; template values: bool, int, dtype name."""
    parameters: list[Parameter] = []
    types = []

    def add(text: str, type_: str, space: str, const: bool, form: str) -> None:
        parameters.append(Parameter(text, type_, space, const, form, len(parameters)))

    for input_name, shape, dtype in inputs:
        size = 1
        for n in shape:
            size *= n
        small = size < SMALL
        add(input_name, DTYPES[dtype][0], "constant" if small else "device", True, "*" if shape else "&")
        types.append(DTYPES[dtype][0] + ("s" if not shape else "c" if small else ""))
        if shape:
            for extra, type_, form in (
                ("shape", "int", "*"),
                ("strides", "int64_t", "*"),
                ("ndim", "int", "&"),
            ):
                if f"{input_name}_{extra}" in source:
                    add(f"{input_name}_{extra}", type_, "constant", True, form)
    for output_name, dtype in outputs:
        add(output_name, DTYPES[dtype][0], "device", False, "*")
        types.append(DTYPES[dtype][0])
    for attribute in sorted(ATTRIBUTES):
        if attribute in source:
            parameters.append(Parameter(attribute, ATTRIBUTES[attribute][0], "", False, "", None))
    values = "".join(f"_{template_text(value)}".replace("-", "_") for _, value in template)
    full_name = "_".join([f"custom_kernel_{name}_{values}", *types])
    return Generated(full_name, header, source, tuple(template), tuple(parameters), len(inputs))
