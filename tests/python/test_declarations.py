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
        drafts = "".join(f"#include <attn/draft/{path.name}>\n" for path in (ROOT / "abi" / "attn" / "draft").glob("*.h"))
        source.write_text(f"#include <attn/api.h>\n#include <attn/plugin.h>\n{drafts}#include <stddef.h>\n#include <stdio.h>\n"
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
        for header in (ROOT / "abi" / "attn").glob("**/*.h"):
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
        text = "\n".join(h.read_text(encoding="utf-8") for h in sorted((ROOT / "abi" / "attn").glob("**/*.h")))
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

    def test_every_function_has_a_caller(self) -> None:
        """Whatever the table has, the package calls."""
        text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "bindings" / "python" / "src").rglob("*.py")
                       if path.name != "_declarations.py")
        data = {"struct_size", "next", "abi_version", "reserved", "version", "device"}
        slots = [name for name, *_ in declarations.attn_api._fields_ if name not in data]
        slots += [f"device_{name}" for name, *_ in declarations.attn_device_services._fields_[2:]]
        self.assertGreater(len(slots), 50)
        # written f"{kind}_count", or of no use here: names are enumerations', texts are exceptions'
        others = {f"{kind}_{what}" for kind in ("plugin", "device", "backend") for what in ("count", "info")}
        others |= {"status_text", "code_name"}
        missing = [name for name in slots if name not in others and not re.search(rf"""["'.]{name}\b""", text)]
        self.assertEqual(missing, [])

    def test_every_struct_and_constant_is_public(self) -> None:
        from libattn import abi
        self.assertEqual(set(declarations.STRUCTS) - set(abi.__all__), set())
        self.assertEqual({n for n in vars(declarations) if n.startswith("ATTN_")} - set(abi.__all__), set())
        enums = {n for n, v in vars(declarations).items() if isinstance(v, type) and issubclass(v, declarations.IntEnum)}
        self.assertEqual(enums - set(abi.__all__), set())

    def test_every_field_is_a_parameter(self) -> None:
        """Engines fill these fields in. Others are set by extensions or libattn.abi, or follow from a parameter."""
        import dataclasses
        import inspect

        import libattn
        from libattn import extensions as ext

        def parameters(of: object) -> set[str]:
            return ({f.name for f in dataclasses.fields(of)} if dataclasses.is_dataclass(of)
                    else set(inspect.signature(of).parameters))

        computed = {"struct_size", "next", "ext", "reserved", "device"}
        window = {"has_window", "window_left", "window_right"}
        for struct, of, said in (
                ("attn_layer_desc", libattn.LayerDesc, window | {"encoder"}), ("attn_mla_desc", libattn.MlaDesc, set()),
                ("attn_recurrent_desc", libattn.GdnDesc, set()), ("attn_recurrent_rule", libattn.RecurrentRule, set()),
                ("attn_index_lists", libattn.IndexLists, set()),
                ("attn_context_parallel", libattn.ContextParallel, {"reduce", "order"}),
                ("attn_batch", libattn.Batch, {
                    "num_reqs", "block_table_stride", "block_table_rows", "num_slots", "num_logits_indices", "num_spans",
                    "span_start_loc", "tree_stride_request", "tree_stride_row", "num_tables", "table_stride", "num_pages"}),
                ("attn_layer_params", libattn.Layer.bind_params, {f"{x}_scale_host" for x in "qkvp"}),
                ("attn_step_io", libattn.Plan.run, set()),
                ("attn_limits", libattn.Plan.__init__, set()), ("attn_plan_options", libattn.Plan.__init__, {"limits"}),
                ("attn_runtime_options", libattn.Runtime.__init__, {"host", "isolation", "probe_deadline_ms"}),
                ("attn_select_options", libattn.Runtime.select, {"num_block_sizes", "flags"}),
                ("attn_batch_recurrent", ext.gdn_batch, {"state_slots_stride", "initial_slots_stride", "checkpoint_slots_stride"}),
                ("attn_io_recurrent", ext.gdn_io, set()),
                ("attn_recurrent_norm", libattn.RecurrentNorm, set()), ("attn_recurrent_rounding", libattn.RecurrentRounding, set()),
                ("attn_io_mla", ext.mla_io, {"topk_stride"}),
                ("attn_io_index_lists", ext.index_lists_io, {"token_stride", "group_stride", "length_stride"}),
                ("attn_mm_encoder_quant", libattn.EncoderQuant, set()),
                ("attn_io_rope", ext.rope_io, set()), ("attn_io_output_quant", ext.output_quant, set())):
            fields = {name for name, *_ in declarations.STRUCTS[struct]._fields_}
            self.assertEqual(fields - computed - said - parameters(of), set(), struct)
            self.assertEqual(said - fields, set(), f"{struct}: no such fields")

    def test_one_version(self) -> None:
        """meson.build has it; what cannot read it there says the same."""
        version = re.search(r"^  version : '([^']+)'", (ROOT / "meson.build").read_text(encoding="utf-8"), flags=re.M)[1]
        init = (ROOT / "bindings" / "python" / "src" / "libattn" / "__init__.py").read_text(encoding="utf-8")
        self.assertIn(f'__version__ = "{version}"', init)
        self.assertTrue((ROOT / "NEWS").read_text(encoding="utf-8").startswith(version + " "))
