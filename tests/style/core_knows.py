# SPDX-License-Identifier: Apache-2.0
"""What the core names of extensions outside of their table (util/abi_table.c): no more files than today. And what a
composition may be: at most six functions."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent.parent
MOST_FUNCTIONS = 6
# the core's own subjects: caches, parameters of a cache's dtype, outputs, rotations; a layer's name; ranks without queries
NAMING = {"bind/groups.c", "bind/params.c", "select/names.c", "step/check_io.c", "step/read_batch.c", "step/run.c", "step/tables.c"}
ID = re.compile(r"\bATTN_EXT_(?!OPTIONAL\b|VENDOR\b|DRAFT\b|DRAFT_KERNELS\b|COPIED_BYTES\b)[A-Z]\w*")
TABLE = re.compile(r"^const struct composition (\w+) = \{\n(.*?)^\};", re.M | re.S)
DATA = {"extension", "composed", "layer_bytes", "plan_bytes"}

wrong = 0
found = set()
for place in sorted((ROOT / "core").rglob("*.[ch]")):
    name = str(place.relative_to(ROOT / "core"))
    if ID.search(place.read_text()) and place.stem != "abi_table":
        found.add(name)
for name in sorted(found - NAMING):
    print(f"core/{name} names an extension")
    wrong += 1
tables = 0
for place in sorted((ROOT / "compositions").glob("*.c")):
    for table, fields in TABLE.findall(place.read_text()):
        functions = [field for field in re.findall(r"^    \.(\w+) =", fields, re.M) if field not in DATA]
        tables += 1
        if len(functions) > MOST_FUNCTIONS:
            print(f"{place.name}: {table} has {len(functions)} functions; at most {MOST_FUNCTIONS}")
            wrong += 1
print(f"{len(found)} files of the core name extensions, {tables} compositions of at most {MOST_FUNCTIONS} functions")
sys.exit(1 if wrong > 0 or tables == 0 else 0)
