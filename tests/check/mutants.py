#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Mistakes in cpu_ref, each of which attn-check, or attn-run, has to find.
usage: mutants.py BUILD LIST [--part I/N] [--only GLOB] [--jobs N]

mutants.txt has each mutant as

    name | CASES of attn-check that have to find it [OPTION ...], or attn-run MODEL | what it breaks
    - a text of one file with what the mutant changes; ../mutant_list.py has the form

with several texts, of several files of plugins/ (an @ says which, where more than one have a text), where one is not enough.
The objects of a file, or of all sources that include it, are compiled with the build's own command and linked with the
others to a plugin whose backend is `mutant`. A `control_*` has to pass, by a sixteenth of the cases if they are many. LIST
is a committed list of capabilities, for `--expect`."""
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
sys.path.insert(0, str(HERE.parent))
import mutant_list


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
        self.texts["cpu_ref/plugin.c"] = mutant_list.changed(self.texts["cpu_ref/plugin.c"], '.name = "[-cpu_ref-]{+mutant+}",', "plugin.c")
        self.place = tempfile.TemporaryDirectory(prefix="mutants-")
        self.plugin = self.compile("cpu_ref/plugin.c", self.texts["cpu_ref/plugin.c"], pathlib.Path(self.place.name))

    def compile(self, name, text, place):
        source = place / name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        own, command = self.commands[name]
        command = mutant_list.compile_command(command, own, source)
        at = command.index("-c")
        self.call(command[:at] + ["-w", "-O1", "-fdiagnostics-color=never", f"-I{TREE}"] + command[at:], place)
        return f"{source}.o"

    def call(self, command, place):
        first = next(i for i, word in enumerate(command) if word.startswith("-"))
        done = subprocess.run(command[:first] + [f"-I{place}"] + command[first:], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise mutant_list.Broken((done.stderr or done.stdout).strip()[:600])

    def includes(self, text, header):
        """Directly, or by a header of plugins/."""
        found = re.findall(r'#include "([a-z_/]+\.h)"', text)
        paths = [path for name in found for path in (PLUGINS / "cpu_ref" / name, PLUGINS / name) if path.exists()]
        return header in found or any(self.includes(path.read_text(), header) for path in paths)

    def link(self, changes, place):
        texts = {}
        for file, diff in changes:
            files = [file] if file else [name for name, text in self.texts.items() if mutant_list.found_in(text, diff)]
            if len(files) != 1:
                raise mutant_list.Broken(f"'{diff}' is found in {len(files)} files; an @ has to say which")
            texts[files[0]] = mutant_list.changed(texts.get(files[0]) or self.texts[files[0]], diff, files[0])
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
        (name, cases, _), changes = mutant
        cases, *options = cases.split()
        control = name.startswith("control_")
        options = [*options, self.expected] if "--expect" in options else options
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            try:
                library = self.link(changes, pathlib.Path(folder))
            except mutant_list.Broken as why:
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
    mutants = [mutant for mutant in mutant_list.read(HERE / "mutants.txt") if fnmatch.fnmatch(mutant[0][0], given.only)][part - 1 :: count]
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for mutant, wrong in zip(mutants, pool.map(build.check, mutants)):
            if wrong is not None:
                bad += 1
                print(f"{mutant[0][0]}: {mutant[0][2]}: {wrong}", flush=True)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants and controls as expected")
    return 1 if bad or not mutants else 0


if __name__ == "__main__":
    sys.exit(main())
