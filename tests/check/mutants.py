#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mistakes in cpu_ref, each of which attn-check, or attn-run, has to find.
usage: mutants.py BUILD LIST [--part I/N] [--only GLOB] [--jobs N]

mutants.txt has each mutant as

    name | CASES of attn-check that have to find it [OPTION ...], or attn-run MODEL | what it breaks
    @ FILE of plugins/ of the texts that follow, where others than this one have a text, too
    - a text that one file has, once; white space counts as one blank
    + the text in its place; none, or a + alone before another text: the old text is dropped
    < a text that stays, before which the + is put; > one after which it is put
    = SET ARGUMENT: the changes that stand after `: SET`, with ARGUMENT in the place of each $

with several texts, of several files, where one is not enough. The objects of a file, or of all sources that include it,
are compiled with the build's own command and linked with the others to a plugin whose backend is `mutant`. A `control_*` has
to pass, by a sixteenth of the cases if they are many. LIST is a committed list of capabilities, for `--expect`."""
import argparse
import concurrent.futures
import fnmatch
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
TREE = HERE.parent.parent
PLUGINS = TREE / "plugins"


def read_mutants():
    """(name, cases, what it breaks, [[file or None, old, new]]) of each."""
    mutants, sets, changes, file, kept, last = [], {}, None, None, None, None
    for line in (HERE / "mutants.txt").read_text().splitlines():
        mark, text = line[:1], line[2:] + "\n"
        if mark == "#":
            continue
        if mark == "@":
            file = line[2:]
        elif mark == "=":
            name, _, argument = line[2:].partition(" ")
            changes += [[where, old, new.replace("$", argument)] for where, old, new in sets[name]]
        elif mark == "+":
            _, old, new = changes[-1]
            changes[-1][2] = new.removesuffix(old) + text + old if kept == "<" else new + text
        elif mark in "-<>":
            if last != mark:
                changes.append([file, "", ""])
            changes[-1][1] += text
            changes[-1][2] += text if mark != "-" else ""
            kept = mark
        else:
            changes, file = [], None
            if mark == ":":
                sets[line[2:]] = changes
            else:
                name, cases, breaks = (part.strip() for part in line.split(" | "))
                mutants.append((name, cases.split(), breaks, changes))
        last = mark
    return mutants


def found_in(text, old):
    return list(re.finditer(r"\s+".join(map(re.escape, old.split())), text))


def changed(text, old, new, file):
    found = found_in(text, old)
    if len(found) != 1:
        raise ValueError(f"'{' '.join(old.split())}' is found {len(found)} times in {file}; once is needed")
    return text[: found[0].start()] + new + text[found[0].end():]


class Build:
    def __init__(self, folder, expected):
        self.folder, self.expected = folder, expected
        self.commands = {}
        for entry in json.loads((folder / "compile_commands.json").read_text()):
            if entry["output"].startswith("plugins/cpu_ref/attn_cpu_ref.so.p/"):
                source = (folder / entry["file"]).resolve()
                self.commands[str(source.relative_to(PLUGINS))] = (entry["output"], shlex.split(entry["command"]))
        sources = [path for folder in ("cpu_ref", "common") for path in (PLUGINS / folder).rglob("*.[ch]")]
        self.texts = {str(path.relative_to(PLUGINS)): path.read_text() for path in sources}
        self.texts["cpu_ref/plugin.c"] = changed(self.texts["cpu_ref/plugin.c"], '.name = "cpu_ref",', '.name = "mutant",', "plugin.c")
        self.place = tempfile.TemporaryDirectory(prefix="mutants-")
        self.plugin = self.compile("cpu_ref/plugin.c", self.texts["cpu_ref/plugin.c"], pathlib.Path(self.place.name))

    def compile(self, name, text, place):
        source = place / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        own, command = self.commands[name]
        command = [str(source) if command[i - 1] == "-c" else word for i, word in enumerate(command)]
        command = [f"{source}.o" if word == own else word.replace(f"{own}.d", f"{source}.d") for word in command]
        at = command.index("-c")
        self.call(command[:at] + ["-w", "-O1", "-fdiagnostics-color=never", f"-I{TREE}"] + command[at:], place)
        return f"{source}.o"

    def call(self, command, place):
        first = next(i for i, word in enumerate(command) if word.startswith("-"))
        done = subprocess.run(command[:first] + [f"-I{place}"] + command[first:], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError((done.stderr or done.stdout).strip()[:600])

    def includes(self, text, header):
        """Directly, or by a header of plugins/."""
        found = re.findall(r'#include "([a-z_/]+\.h)"', text)
        paths = [path for name in found for path in (PLUGINS / "cpu_ref" / name, PLUGINS / name) if path.exists()]
        return header in found or any(self.includes(path.read_text(), header) for path in paths)

    def link(self, mutant, place):
        texts = {}
        for file, old, new in mutant[3]:
            files = [file] if file else [name for name, text in self.texts.items() if found_in(text, old)]
            if len(files) != 1:
                raise ValueError(f"'{' '.join(old.split())}' is found in {len(files)} files; an @ has to say which")
            texts[files[0]] = changed(texts.get(files[0]) or self.texts[files[0]], old, new, files[0])
        for file, text in list(texts.items()):
            if file not in self.commands:
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                (place / file).write_text(text)
                texts.update({name: texts.get(name, self.texts[name]) for name in self.commands if self.includes(self.texts[name], file)})
        made = {name: self.compile(name, text, place) for name, text in texts.items() if name in self.commands}
        made.setdefault("cpu_ref/plugin.c", self.plugin)
        objects = [made.get(name, str(self.folder / self.commands[name][0])) for name in self.commands]
        library = place / "attn_mutant.so"
        self.call([*shlex.split(os.environ.get("CC", "cc")), "-shared", "-o", str(library), *objects, "-lm"], place)
        return library

    def check(self, mutant):
        """What is wrong with it, or None."""
        name, (cases, *options), _, _ = mutant
        control = name.startswith("control_")
        options = [*options, self.expected] if "--expect" in options else options
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            try:
                library = self.link(mutant, pathlib.Path(folder))
            except ValueError as why:
                return str(why)
            part = "1/16" if control and not options else "1/1"
            environment = None
            command = [str(self.folder / "tools/attn-check"), str(library), *(options or ["--quick"]), "--part", part,
                       "--fail-fast", "--filter", cases]
            if cases == "attn-run":
                command = [str(self.folder / "tools/attn-run"), "--model", str(TREE / "models" / options[0]), "--layers", "1",
                           "--steps", "2", "--scale", "0.2", "--verify"]
                environment = {**os.environ, "ATTN_PLUGIN_PATH": str(library), "ATTN_BACKEND": "mutant"}
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
        found = done.returncode == 1 and re.search(r"FAILED|crashed with|capabilities|WRONG", done.stdout + done.stderr)
        if control:
            return None if done.returncode == 0 else f"fails: {(done.stdout + done.stderr)[-300:]}"
        return None if found else f"not found: exit status {done.returncode}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("expected", help="a committed list of capabilities")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--only", default="*", help="a glob of names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    part, count = map(int, given.part.split("/"))
    build = Build(given.build.resolve(), given.expected)
    mutants = [mutant for mutant in read_mutants() if fnmatch.fnmatch(mutant[0], given.only)][part - 1 :: count]
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for mutant, wrong in zip(mutants, pool.map(build.check, mutants)):
            if wrong is not None:
                bad += 1
                print(f"{mutant[0]}: {mutant[2]}: {wrong}", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants and controls as expected")
    return 1 if bad or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
