# SPDX-License-Identifier: Apache-2.0
"""Lists of mutants: mistakes that a test has to find. Each is a line of fields with ` | ` between them, and what it changes, as
a word diff:

    name | FIELD | ...
    - a text that its file has, once, with [-what goes-]{+what comes in its place+}; white space counts as one blank, and
      a line that begins with two blanks continues the text
    @ FILE of the texts that follow, where the mutant's fields do not say it
    = SET ARGUMENT: the changes that stand after a line `: SET`, with ARGUMENT in the place of each $
"""
import re

MARKED = re.compile(r"\[-(.*?)-\]|\{\+(.*?)\+\}", re.DOTALL)


class Broken(Exception):
    """A mutant that cannot be made."""


def read(path):
    """(fields, [[file or None, word diff]]) of each."""
    mutants, sets, changes, file = [], {}, None, None
    for line in path.read_text().splitlines():
        mark, text = line[:1], line[2:]
        if mark == "-":
            changes.append([file, text])
        elif mark == " ":
            changes[-1][1] += "\n" + text
        elif mark == "@":
            file = text
        elif mark == "=":
            name, _, argument = text.partition(" ")
            changes += [[where, diff.replace("$", argument)] for where, diff in sets[name]]
        elif mark != "#":
            changes, file = [], None
            if mark == ":":
                sets[text] = changes
            else:
                mutants.append(([field.strip() for field in line.split(" | ")], changes))
    return mutants


def old_text(diff):
    return MARKED.sub(lambda mark: mark[1] or "", diff)


def found_in(text, diff):
    return list(re.finditer(r"\s+".join(map(re.escape, old_text(diff).split())), text))


def changed(text, diff, file):
    found = found_in(text, diff)
    if len(found) != 1 or found[0][0] == "":
        raise Broken(f"'{' '.join(old_text(diff).split())}' is found {len(found)} times in {file}; once is needed")
    return text[: found[0].start()] + MARKED.sub(lambda mark: mark[2] or "", diff) + text[found[0].end() :]


def compile_command(command, own, source):
    """A build's command that makes the object `own`, for another source, whose object is source.o."""
    command = [str(source) if command[i - 1] == "-c" else word for i, word in enumerate(command)]
    return [f"{source}.o" if word == own else word.replace(f"{own}.d", f"{source}.d") for word in command]
