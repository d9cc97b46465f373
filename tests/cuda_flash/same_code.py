#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether two builds of cuda_flash have the same device code, kernel by kernel; no GPU is needed.

usage: same_code.py BEFORE AFTER [--gone] [--list]
BEFORE, AFTER: a plugin, an object, a cubin, or a folder of them. Images are taken out by cuobjdump ($CUOBJDUMP).

A kernel is its instructions, constants, parameters, registers and static shared memory on one architecture. Kernels with
the same name are compared; what has another name on both sides (moved, renamed, other template arguments) is paired by
its code. PTX is compared by function, without the numbers of its labels. Printed are kernels that differ, that only one
side has (with --gone, ones of BEFORE alone are no error), and counts; --list prints all of AFTER with their sizes.
Exit status: 0 same, 1 different, 77 no cuobjdump."""
import collections
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile

# The scope that nvcc gives static functions, with its length: 50_INTERNAL_HASH_12_sm90_plan_cu_HASH.
OF_FILE = re.compile(r'(\d+)_INTERNAL_')
PARTS = ('.text.', '.nv.constant0.', '.nv.constant2.', '.nv.constant4.', '.nv.shared.', '.nv.local.')


def own_name(text):
    """Names without the part that tells files apart."""
    at, kept = 0, []
    for match in OF_FILE.finditer(text):
        kept.append(text[at:match.start()])
        at = match.end(1) + int(match.group(1))
    return ''.join(kept) + text[at:]


def sections(image):
    """(name, bytes or size alone, info) of an ELF image of 64 bits."""
    table, = struct.unpack_from('<Q', image, 40)
    count, names = struct.unpack_from('<HH', image, 60)
    rows = [struct.unpack_from('<IIQQQQIIQQ', image, table + 64 * i) for i in range(count)]
    at = rows[names][4]
    for name, kind, _, _, offset, size, _, info, _, _ in rows:
        text = image[at + name:image.index(b'\0', at + name)].decode()
        yield text, struct.pack('<Q', size) if kind == 8 else image[offset:offset + size], info


def kernels_of_elf(image):
    """{name: (code, instructions' bytes)}."""
    parts = collections.defaultdict(dict)
    for name, content, info in sections(image):
        for part in PARTS:
            if name.startswith(part):
                parts[name[len(part):]][part] = content + bytes([info >> 24 if part == '.text.' else 0])
    return {name: (b'|'.join(p.encode() + own[p] for p in sorted(own)), len(own['.text.']) - 1)
            for name, own in parts.items() if '.text.' in own}


def kernels_of_ptx(text):
    """Functions and entries; what calls them uses names without the file's part."""
    found = {}
    for match in re.finditer(r'^[^\n]*\.(?:entry|func)\b[^\n]*?([\w$]+)\(.*?^}', own_name(text), re.M | re.S):
        code = re.sub(r'\$L__BB\d+_', '$L__BB_', match.group(0))
        code = re.sub(r'\.loc[^\n]*\n', '', code)
        found[match.group(1)] = (code.encode(), len(code))
    return found


def images(path, cuobjdump):
    """(architecture, image) of all that lies at the path."""
    if os.path.isdir(path):
        for name in sorted(os.listdir(path)):
            if name.endswith(('.o', '.so', '.cubin')):
                yield from images(os.path.join(path, name), cuobjdump)
        return
    with open(path, 'rb') as file:
        start = file.read(64)
    if start[18:20] == b'\xbe\x00':  # EM_CUDA
        with open(path, 'rb') as file:
            yield os.path.basename(path).split('.')[-2], file.read()
        return
    with tempfile.TemporaryDirectory() as work:
        for what in ('-xelf', '-xptx'):
            subprocess.run([cuobjdump, what, 'all', os.path.abspath(path)], cwd=work, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, check=False)
        for name in sorted(os.listdir(work)):  # FILE.1.sm_80.cubin, FILE.2.sm_80.ptx
            arch, kind = name.split('.')[-2:]
            with open(os.path.join(work, name), 'rb') as file:
                yield arch + (' PTX' if kind == 'ptx' else ''), file.read()


def kernels_of(path, cuobjdump):
    """{(architecture, name): (hash of the code, bytes)}."""
    found = {}
    for arch, image in images(path, cuobjdump):
        own = kernels_of_ptx(image.decode()) if arch.endswith('PTX') else kernels_of_elf(image)
        for name, (code, size) in own.items():
            key, value = (arch, own_name(name)), (hashlib.sha256(code).hexdigest(), size)
            while key in found and found[key][0] != value[0]:  # static kernels of one name in several files
                key = (key[0], key[1] + "'")
            found[key] = value
    return found


def plain(name):
    tool = shutil.which('c++filt')
    return subprocess.run([tool, name], capture_output=True, text=True, check=True).stdout.strip() if tool else name


def main():
    paths = [a for a in sys.argv[1:] if not a.startswith('--')]
    cuobjdump = os.environ.get('CUOBJDUMP') or shutil.which('cuobjdump')
    if len(paths) != 2:
        sys.exit(__doc__)
    if not cuobjdump:
        print('skipped: no cuobjdump, which the CUDA toolkit and the package nvidia-cuda-cuobjdump have')
        return 77
    before, after = (kernels_of(path, cuobjdump) for path in paths)
    if not before or not after:
        sys.exit(f'no device code in {paths[0] if not before else paths[1]}')
    if '--list' in sys.argv:
        for (arch, name), (_, size) in sorted(after.items(), key=lambda item: (item[0][0], -item[1][1])):
            print(f'{size:9} {arch} {plain(name)}')
    same = {key for key in before if key in after and before[key][0] == after[key][0]}
    differ = {key for key in before if key in after} - same
    # what is called otherwise now: by its code
    rest = collections.defaultdict(list)
    for key in sorted(set(after) - set(before)):
        rest[key[0], after[key][0]].append(key)
    moved, gone = 0, []
    for key in sorted(set(before) - set(after)):
        partner = rest.get((key[0], before[key][0]))
        if partner:
            partner.pop()
            moved += 1
        else:
            gone.append(key)
    new = sorted(key for keys in rest.values() for key in keys)
    for word, keys in (('differs', sorted(differ)), ('gone', gone), ('new', new)):
        for arch, name in keys:
            sizes = ' and '.join(str(side[arch, name][1]) for side in (before, after) if (arch, name) in side)
            print(f'{word}: {arch} {plain(name)}, {sizes} bytes')
    print(f'{len(same)} kernels are the same, {moved} with other names, {len(differ)} differ, {len(gone)} are gone, '
          f'{len(new)} are new')
    return int(bool(differ or new or (gone and '--gone' not in sys.argv)))


if __name__ == '__main__':
    sys.exit(main())
