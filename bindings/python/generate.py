# SPDX-License-Identifier: Apache-2.0
"""Write ``src/libattn/_declarations.py`` from the public headers in ``abi/attn``.

Meson runs this in every build, and so does ``pip install`` from a checkout; the result is part of the wheel and not of
the repository. ``tests/python/test_declarations.py`` holds it against the headers: a C program has to give the same sizes,
offsets and values.

    python3 bindings/python/generate.py            # writes, where the text has changed
    python3 bindings/python/generate.py STAMP DEPENDENCIES    # and what a build goes by: that it was done, and from what
"""
from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "abi" / "attn"
OUTPUT = Path(__file__).resolve().parent / "src" / "libattn" / "_declarations.py"

#: Headers in an order in which every struct that is held by value comes first.
ORDER = ("version", "status", "tensor", "types", "host", "kv_cache", "capability", "runtime", "selection", "layer",
         "collectives", "batch", "io", "mla", "recurrent", "indexer", "attend", "cache_kernels", "device_memory", "device_services",
         "numeric_kernels", "kernels", "plugin", "model", "api", "draft/mm_encoder", "draft/recurrent",
         "draft/index_lists", "draft/compressed", "draft/compressor", "draft/output_rope", "draft/index_write",
         "draft/layout")

SCALARS = {
    "int8_t": "c_int8", "uint8_t": "c_uint8", "uint16_t": "c_uint16", "int32_t": "c_int32", "uint32_t": "c_uint32",
    "int64_t": "c_int64", "uint64_t": "c_uint64", "size_t": "c_size_t", "float": "c_float", "double": "c_double",
    "char": "c_char", "attn_status": "c_int32", "void": "None",
}


def strip(text: str) -> str:
    """Remove comments and join continued lines."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    return text.replace("\\\n", " ")


#: ``const struct attn_tensor *const *name[4]``: const, type, stars, name, array length. Parameters may have no name.
DECLARATION = re.compile(r"(const\s+)?(?:struct\s+|enum\s+)?(\w+)\s*((?:\*|\bconst\b|\s)*)(\w*)\s*(?:\[(\w+)\])?")


def parsed(text: str) -> tuple[bool, str, int, str, str]:
    """Whether it is const, its type, how many stars, the name and the array's length."""
    match = DECLARATION.fullmatch(text.strip())
    if match is None:
        raise SystemExit(f"generate: cannot read '{text}'")
    const, kind, stars, name, length = match.groups(default="")
    return bool(const), kind, stars.count("*"), name, length


def c_type(text: str) -> str:
    """The ctypes name of a declaration's type: pointers are addresses, except text."""
    _, kind, stars, _, length = parsed(text)
    if stars == 1 and kind == "char":
        found = "c_char_p"
    elif stars > 0 or kind == "attn_parallel_body":
        found = "c_void_p"
    else:
        found = SCALARS.get(kind) or kind
    return f"{found} * {length}" if length else found


def pointee(text: str) -> str | None:
    """What a pointer field points at: ``int32`` and such, ``tensor``, a struct's name, ``void``, with a star for each further
    pointer and ``mutable`` before what the library writes; None: a number, text, a handle or a function."""
    if "(" in text:
        return None
    const, kind, stars, field, _ = parsed(text)
    if stars == 0 or field in ("next", "user", "stream") or (kind == "char" and stars == 1) or (kind.startswith("attn_") and not const):
        return None
    name = {"attn_tensor": "tensor", "float": "f32"}.get(kind) or kind.removesuffix("_t")
    return ("" if const or name == "void" else "mutable ") + name + "*" * (stars - 1)


def fields_of(body: str) -> list[tuple[str, str]]:
    """Pairs of a field's name and its ctypes expression."""
    fields = []
    for item in filter(None, (part.strip() for part in body.split(";"))):
        function = re.fullmatch(r"(.*?)\(\*(\w+)\)\s*\((.*)\)", item, flags=re.S)
        if function:
            result, name, parameters = function.groups()
            types = [result, *(parameters.split(",") if parameters.strip() != "void" else [])]
            fields.append((name, f"CFUNCTYPE({', '.join(map(c_type, types))})"))
        else:
            fields.append((parsed(item)[3], c_type(item)))
    return fields


def python_name(name: str) -> str:
    """``attn_kv_dtype`` becomes ``KvDtype``."""
    return "".join(word.capitalize() for word in name.removeprefix("attn_").split("_"))


def common_prefix(names: list[str]) -> str:
    """The longest prefix of whole words that all names share."""
    words = [name.split("_")[:-1] for name in names]
    shared = 0
    while all(len(w) > shared for w in words) and len({w[shared] for w in words}) == 1:
        shared += 1
    return "_".join(words[0][:shared]) + "_"


def enum_lines(name: str, body: str) -> list[str]:
    pairs = re.findall(r"(\w+)\s*=\s*(\w+)", body)
    pairs = [(member, value) for member, value in pairs if not member.endswith(("_COUNT", "_FORCE_INT32"))]
    prefix = common_prefix([member for member, _ in pairs])
    lines = ["", "", f"class {python_name(name)}(IntEnum):", f'    """``enum {name}``."""', ""]
    return lines + [f"    {member.removeprefix(prefix)} = {int(value, 0)}" for member, value in pairs]


def status_lines(text: str) -> list[str]:
    items = re.findall(r'X\(ATTN_(\w+),\s*(\d+),\s*"([^"]*)"\)', text)
    lines = ["", "", "class Status(IntEnum):", '    """``attn_status``."""', ""]
    return lines + [f"    {name.removeprefix('ERROR_')} = {value}" for name, value, _ in items]


def constant_lines(text: str) -> list[str]:
    lines = []
    for name, value in re.findall(r"^#define (ATTN_\w+)[ \t]+(\S.*)$", text, flags=re.M):
        value = re.sub(r"\b(\d+|0x[0-9a-fA-F]+)u(?:ll)?\b", r"\1", value.strip())
        if re.fullmatch(r"[\da-fA-Fx\s()<|]+", value):
            lines.append(f"{name} = {value.strip('()')}")
    return lines


def struct_lines(name: str, body: str, extensions: dict[str, str]) -> list[str]:
    lines = ["", "", f"class {name}(Struct):", f'    """``struct {name}``."""', ""]
    if name in extensions:
        lines.append(f"    _ext_ = {extensions[name]}")
    items = [item.strip() for item in body.split(";") if item.strip()]
    pointers = [(re.sub(r"\W", " ", item).split()[-1], pointee(item)) for item in items]
    pointers = [f'"{field}": "{kind}"' for field, kind in pointers if kind]
    if pointers:
        lines.append(f"    _pointees_ = {{{', '.join(pointers)}}}")
    lines.append("    _fields_ = [")
    lines += [f'        ("{field}", {kind}),' for field, kind in fields_of(body)]
    if name in ("attn_api", "attn_device_services"):
        failing = re.findall(r"\(\*(\w+)\)\s*\([^;]*?attn_error \*", body)
        lines[3:3] = ["    #: Functions whose last parameter is a ``struct attn_error *``.",
                      f"    _failing_ = frozenset({sorted(failing)})"]
    return lines + ["    ]"]


def generate() -> str:
    """The text of ``_declarations.py``."""
    found = {path.relative_to(HEADERS).with_suffix("").as_posix() for path in HEADERS.glob("**/*.h")}
    if found != set(ORDER):
        raise SystemExit(f"generate: headers that ORDER does not know, or lacks: {sorted(found ^ set(ORDER))}")
    constants: list[str] = []
    enums: list[str] = []
    structs: list[str] = []
    names: list[str] = []
    text = (HEADERS / "version.h").read_text(encoding="utf-8")
    extensions = {name: number for number, name in re.findall(r"ATTN_EXT_\w+ = (\d+),?\s*/\* struct (\w+),", text)}
    for path in (HEADERS / "draft").glob("*.h"):
        extensions |= {name: number for number, name in re.findall(r"#define ATTN_EXT_\w+ (0x\w+)u\s*/\* struct (\w+)",
                                                                   path.read_text(encoding="utf-8"))}
    for stem in ORDER:
        text = strip((HEADERS / f"{stem}.h").read_text(encoding="utf-8"))
        constants += constant_lines(text)
        if stem == "status":
            enums += status_lines(text)
        for name, body in re.findall(r"^enum (\w+) \{(.*?)\};", text, flags=re.S | re.M):
            if name != "attn_status_code":
                enums += enum_lines(name, body)
        for name, body in re.findall(r"^struct (\w+) \{(.*?)\n\};", text, flags=re.S | re.M):
            structs += struct_lines(name, body, extensions)
            names.append(name)
    head = [
        "# SPDX-License-Identifier: Apache-2.0",
        '"""The public headers as ctypes declarations. Written by ``bindings/python/generate.py``: do not edit."""',
        "# fmt: off",
        "from ctypes import (CFUNCTYPE, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint32,",
        "                    c_uint64, c_void_p)",
        "from enum import IntEnum",
        "",
        "from .structs import Struct",
        "",
    ]
    tail = ["", "", "#: Every struct, by its C name.", "STRUCTS = {", *[f'    "{n}": {n},' for n in names], "}", ""]
    return "\n".join(head + constants + enums + structs + tail)


def write() -> None:
    """Replaces the file whole, as two builds of one checkout may do at once."""
    text = generate()
    if not OUTPUT.is_file() or OUTPUT.read_text(encoding="utf-8") != text:
        fresh = OUTPUT.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(OUTPUT)


if __name__ == "__main__":
    try:
        write()
    except OSError as why:  # a checkout that may only be read builds all the same
        if len(sys.argv) != 3:
            raise
        print(f"generate.py: {why}: this checkout's Python package cannot be imported from here", file=sys.stderr)
    if len(sys.argv) == 3:
        Path(sys.argv[1]).touch()
        headers = (str(HEADERS / f"{stem}.h").replace(" ", "\\ ") for stem in ORDER)
        Path(sys.argv[2]).write_text(f"{sys.argv[1]}: {' '.join(headers)}\n")
