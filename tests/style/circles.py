# SPDX-License-Identifier: Apache-2.0
"""Files of one library or program that need each other in a circle, by the symbols of their objects: none.
usage: circles.py FOLDER...    each has the objects of one target, as Meson lays them down (TARGET.p)
The list of compositions is left out: it names them all, so that the rooms of the core may walk it and know none. So is what a
GPU plugin's own file says of it to the source that they share."""
import pathlib
import subprocess
import sys

REGISTRY = ".._compositions_compositions.c"
GIVEN = "gpu_vendor"


def needs_of(folder):
    """File -> files -> symbols that the first takes from the second."""
    defined, wanted = {}, {}
    objects = sorted(place for place in folder.glob("*.o") if place.stem != REGISTRY)
    table = subprocess.run(["nm", "-A", *(place.name for place in objects)], cwd=folder, capture_output=True, text=True, check=True)
    for line in table.stdout.splitlines():
        place, symbol = line.split(":", 1)
        kind, name = symbol.split()[-2:]
        wanted.setdefault(place[:-2], [])
        if kind == "U" and name != GIVEN:
            wanted[place[:-2]].append(name)
        elif kind in "TDBRVWC":
            defined[name] = place[:-2]
    needs = {file: {} for file in wanted}
    for file, names in wanted.items():
        for name in names:
            if defined.get(name, file) != file:
                needs[file].setdefault(defined[name], []).append(name)
    return needs


def reached(needs, start):
    """All files that `start` needs, its own name among them only if it is in a circle."""
    found, open_ends = set(), [start]
    while open_ends:
        for file in needs[open_ends.pop()]:
            if file not in found:
                found.add(file)
                open_ends.append(file)
    return found


circles = files = 0
for folder in map(pathlib.Path, sys.argv[1:]):
    needs = needs_of(folder)
    files += len(needs)
    behind = {file: reached(needs, file) for file in needs}
    for file in sorted(needs):
        for other, names in sorted(needs[file].items()):
            if file in behind[other]:
                print(f"{folder.name}: {file} needs {other} and is needed by it: {', '.join(names)}")
                circles += 1
print(f"{files} files, {circles} arrows in circles")
sys.exit(circles > 0 or files == 0)
