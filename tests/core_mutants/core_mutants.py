#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One-line mistakes in the core, each of which a test has to find.
usage: core_mutants.py BUILD [--only GLOB] [--sample N --seed S] [--jobs N]

A room's mutants stand in ROOM.txt next to this file, each as

    name | FILE of core/, or compositions/FILE, formats/FILE, isolation/FILE, observers/FILE, operators/FILE | tests that find it, first | what it breaks
    - a text of FILE with what the mutant changes; ../mutant_list.py has the form

The object of FILE is compiled with the build's own command, the library and the white-box tests are linked with it, and
tests run until one fails: those that the mutant names, then the others of the suite `core` but for SLOW ones. Tests
that open the library are given the mutant by redirect.c. A test counts as one that finds a mutant only if it passes on
the core as it is, in the same way. What no test finds has survived: a test is missing, and the exit status is 1. With
`-` in the place of tests a mutant is known to survive, says why after what it breaks, counts as not killed, and is in
no sample. A text that is not found once, or a mutant that does not compile, is an error. Tests that this build does not
have (collectives without MPI) leave out the mutants that name them alone."""
import argparse
import collections
import concurrent.futures
import contextlib
import fnmatch
import json
import os
import pathlib
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
TREE = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))
import mutant_list
ROOMS = ["util", "host", "runtime", "select", "bind", "step", "compositions", "observers"]
SLOW = ["abi_*", "cache_trust", "soak", "core_mutants"]
LIMIT_S = 60
KNOWN = ["-"]  # no test
STATIC, LIBRARY = "core/libcore_static.a", "core/libattn.so.1"

Mutant = collections.namedtuple("Mutant", "name file tests breaks diff")


def read_mutants():
    mutants = []
    for room in ROOMS:
        for fields, changes in mutant_list.read(HERE / f"{room}.txt"):
            if len(fields) != 4 or len(changes) != 1:
                sys.exit(f"{room}.{fields[0]}: name | file | tests | what it breaks and one change are expected")
            name, file, tests, breaks = fields
            mutants.append(Mutant(f"{room}.{name}", file, tests.split(), breaks, changes[0][1]))
    names = [mutant.name for mutant in mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        sys.exit("two mutants of one name: " + ", ".join(twice))
    return mutants


def place_of(mutant):
    return TREE / ("" if mutant.file.startswith(("compositions/", "formats/", "isolation/", "observers/", "operators/")) else "core") / mutant.file


def mutated_source(mutant):
    return mutant_list.changed(place_of(mutant).read_text(), mutant.diff, mutant.file)


class Build:
    """What the build directory knows of the core's objects, of linking and of tests."""

    def __init__(self, folder):
        self.folder = folder
        commands = json.loads((folder / "compile_commands.json").read_text())
        self.objects = {
            str((folder / entry["file"]).resolve().relative_to(TREE)).removeprefix("core/"): (entry["output"], shlex.split(entry["command"]))
            for entry in commands
            if entry["output"].startswith(STATIC + ".p/")
        }
        self.core_file = self.link_command(next(folder.glob("core/libattn.so.*.*.*[0-9]")))
        self.tests = {test["name"]: test for test in json.loads((folder / "meson-info/intro-tests.json").read_text())}
        self.white_box = {}
        for name, test in self.tests.items():
            if "/tests/core/" in test["cmd"][0]:
                self.white_box[name] = self.link_command(test["cmd"][0])
        self.core_tests = [
            name
            for name, test in self.tests.items()
            if "libattn:core" in test["suite"] and not any(fnmatch.fnmatch(name, slow) for slow in SLOW)
        ]
        self.redirect = folder / "tests/core_mutants/attn_redirect.so"
        self.sound = {}
        self.control = tempfile.TemporaryDirectory(prefix="mutant-none-")
        self.link_library(pathlib.Path(self.control.name), [output for output, _ in self.objects.values()])

    def link_command(self, target):
        target = pathlib.Path(target).relative_to(self.folder)
        lines = subprocess.run(
            ["ninja", "-t", "commands", str(target)], cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        return shlex.split(lines[-1])

    def call(self, command):
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise mutant_list.Broken((done.stderr or done.stdout).strip())

    def compile(self, mutant, place):
        """The mutant's object in the folder `place`, and the library with it."""
        if mutant.file not in self.objects:
            raise mutant_list.Broken(f"{mutant.file} is no source of the core")
        source = place / "mutant.c"
        source.write_text(mutated_source(mutant))
        own, command = self.objects[mutant.file]
        self.call([*mutant_list.compile_command(command, own, source), "-w", f"-I{place_of(mutant).parent}"])
        others = [output for output, _ in self.objects.values() if output != own]
        self.link_library(place, [f"{source}.o", *others])

    def link_library(self, place, objects):
        """In a folder that looks like the build: the core finds plugins and tools by its own place."""
        for entry in self.folder.iterdir():
            if entry.name != "core":
                (place / entry.name).symlink_to(entry)
        (place / "core").mkdir()
        self.link(self.core_file, place / LIBRARY, objects)

    def link(self, command, target, objects):
        at = command.index("-o") + 1
        command = [str(target) if i == at else word for i, word in enumerate(command)]
        at = command.index(STATIC)
        self.call(command[:at] + objects + command[at + 1 :])

    def run(self, name, place):
        """Does the test pass with the mutant of `place`, or with the core as it is (None)?"""
        test = self.tests[name]
        command = list(test["cmd"])
        variables = {**os.environ, **test["env"]}
        if name not in self.white_box:
            variables["LD_PRELOAD"] = str(self.redirect)
            variables["ATTN_REDIRECT"] = str((place or pathlib.Path(self.control.name)) / LIBRARY)
        elif place is not None:
            command[0] = str(place / "test")
            self.link(self.white_box[name], command[0], [str(place / "mutant.c.o"), STATIC])
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=test["workdir"] or self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
            )
            try:
                return process.wait(LIMIT_S) in (0, 77)
            except subprocess.TimeoutExpired:
                process.terminate()  # mpirun then ends its ranks, which have process groups of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                return False
            finally:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()

    def finds(self, name, place):
        if self.run(name, place):
            return False
        if name not in self.sound:
            self.sound[name] = self.run(name, None)
        return self.sound[name]


def try_mutant(build, mutant):
    """'killed' by a test, 'survived', 'known' to survive, 'skipped' or 'error', with the seconds that it took."""
    began = time.monotonic()
    known = mutant.tests == KNOWN
    named = [test for test in mutant.tests if test in build.tests]
    if mutant.tests and not named and not known:
        return mutant, "skipped", "none of " + ", ".join(mutant.tests) + " is in this build", 0
    room = "step_" if mutant.file.startswith(("step/", "compositions/")) else ""
    others = sorted(set(build.core_tests) - set(named), key=lambda test: (not test.startswith(room), build.core_tests.index(test)))
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        place = pathlib.Path(folder)
        try:
            build.compile(mutant, place)
            found = next((test for test in named + others if build.finds(test, place)), None)
        except mutant_list.Broken as why:
            return mutant, "error", str(why), time.monotonic() - began
    return mutant, "killed" if found else "known" if known else "survived", found or "", time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--only", default="*", help="ROOM.NAME, a glob")
    parser.add_argument("--sample", type=int, help="so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    build = Build(given.build.resolve())
    if build.run("step_runs", pathlib.Path("/nowhere")):
        sys.exit("redirect.c has no effect")
    mutants = read_mutants()
    for mutant in mutants:  # also those that are not drawn: texts change with the core
        try:
            mutated_source(mutant)
        except mutant_list.Broken as broken:
            sys.exit(f"{mutant.name}: {broken}")
    mutants = [mutant for mutant in mutants if fnmatch.fnmatch(mutant.name, given.only)]
    if given.sample is not None:
        mutants = [mutant for mutant in mutants if mutant.tests != KNOWN]
        mutants = random.Random(given.seed).sample(mutants, min(given.sample, len(mutants)))
    table = {room: collections.Counter() for room in ROOMS}
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for mutant, outcome, why, seconds in pool.map(lambda mutant: try_mutant(build, mutant), mutants):
            table[mutant.name.split(".")[0]][outcome] += 1
            print(f"{outcome:8} {seconds:5.1f} s  {mutant.name}: {mutant.breaks}" + (f" ({why})" if why else ""), flush=True)
    for room, counts in table.items():
        total = sum(counts.values()) - counts["skipped"]
        print(f"{room:8} {counts['killed']:3} of {total:3} killed" + (f", {counts['skipped']} skipped" if counts["skipped"] else ""))
    left = sum(counts["survived"] + counts["error"] for counts in table.values())
    killed = sum(counts["killed"] for counts in table.values())
    total = killed + left + sum(counts["known"] for counts in table.values())
    print(f"{killed} of {total} killed, {100 * killed / max(total, 1):.1f} %")
    return 1 if left > 0 or killed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
