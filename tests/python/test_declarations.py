# SPDX-License-Identifier: Apache-2.0
"""The declarations of the package are those of the headers."""
import ctypes
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bindings" / "python"))

import generate  # noqa: E402
from libattn import _declarations as declarations  # noqa: E402


def compile_and_run(lines: list[str]) -> str:
    """What a C program with these statements in its main prints."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "layout.c"), Path(folder, "layout")
        body = "\n".join(f"    {line}" for line in lines)
        source.write_text("#include <attn/api.h>\n#include <attn/plugin.h>\n#include <stddef.h>\n#include <stdio.h>\n"
                          f"int main(void)\n{{\n{body}\n    return 0;\n}}\n", encoding="utf-8")
        subprocess.run([os.environ.get("CC", "cc"), "-std=c11", "-I", str(ROOT / "abi"), str(source), "-o",
                        str(program)], check=True)
        return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout


class Declarations(unittest.TestCase):
    def test_generated_from_these_headers(self) -> None:
        self.assertEqual(generate.OUTPUT.read_text(encoding="utf-8"), generate.generate(),
                         "older than the headers: build, or run python3 bindings/python/generate.py")

    def test_every_struct_of_the_headers_is_there(self) -> None:
        found = set()
        for header in (ROOT / "abi" / "attn").glob("*.h"):
            found |= set(re.findall(r"^struct (\w+) \{", header.read_text(encoding="utf-8"), flags=re.M))
        self.assertEqual(set(declarations.STRUCTS), found)
        self.assertGreater(len(found), 50)

    def test_sizes_and_offsets(self) -> None:
        lines, expected = [], []
        for name, struct in declarations.STRUCTS.items():
            lines.append(f'printf("%zu\\n", sizeof(struct {name}));')
            expected.append((name, ctypes.sizeof(struct)))
            for field, kind in struct._fields_:
                lines.append(f'printf("%zu\\n", offsetof(struct {name}, {field}));')
                lines.append(f'printf("%zu\\n", sizeof(((struct {name} *)0)->{field}));')
                expected.append((f"{name}.{field}", getattr(struct, field).offset))
                expected.append((f"sizeof {name}.{field}", ctypes.sizeof(kind)))
        values = [int(text) for text in compile_and_run(lines).split()]
        self.assertEqual(len(values), len(expected))
        wrong = [f"{what}: {ours}, in C {theirs}" for (what, ours), theirs in zip(expected, values) if ours != theirs]
        self.assertEqual(wrong, [])

    def test_constants_and_enumerations(self) -> None:
        text = "\n".join(h.read_text(encoding="utf-8") for h in sorted((ROOT / "abi" / "attn").glob("*.h")))
        names = [n for n in vars(declarations) if n.startswith("ATTN_")]
        pairs = [(n, getattr(declarations, n)) for n in names]
        for enum, body in re.findall(r"^enum (\w+) \{(.*?)\};", generate.strip(text), flags=re.S | re.M):
            if enum == "attn_status_code":
                pairs += [("ATTN_" + ("" if m.name == "OK" else "ERROR_") + m.name, int(m))
                          for m in declarations.Status]
                continue
            members = [m for m in re.findall(r"(\w+)\s*=", body) if not m.endswith("_COUNT")]
            prefix = generate.common_prefix(members)
            python = getattr(declarations, generate.python_name(enum))
            self.assertEqual(len(python), len(members), enum)
            pairs += [(prefix + member.name, int(member)) for member in python]
        self.assertGreater(len(pairs), 200)
        output = compile_and_run([f'printf("%lld\\n", (long long)({name}));' for name, _ in pairs])
        wrong = [f"{name}: {ours}, in C {theirs}" for (name, ours), theirs in zip(pairs, output.split())
                 if ours != int(theirs)]
        self.assertEqual(wrong, [])

    def test_one_version(self) -> None:
        """meson.build has it; what cannot read it there says the same."""
        version = re.search(r"^  version : '([^']+)'", (ROOT / "meson.build").read_text(encoding="utf-8"), flags=re.M)[1]
        init = (ROOT / "bindings" / "python" / "src" / "libattn" / "__init__.py").read_text(encoding="utf-8")
        self.assertIn(f'__version__ = "{version}"', init)
        self.assertTrue((ROOT / "NEWS").read_text(encoding="utf-8").startswith(version + " "))


if __name__ == "__main__":
    unittest.main()
