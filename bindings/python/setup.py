# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml says everything but this: in a checkout the declarations are written from the headers first, and calls in C are
compiled where a compiler and Python's headers are; without them, and for a Python without the interpreter's lock, whose stable ABI is
another one, the package has none."""
import runpy
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).resolve().parent
ABI = HERE.parents[1] / "abi"
modules = []
if (ABI / "attn").is_dir():
    runpy.run_path(str(HERE / "generate.py"))["write"]()
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        modules = [Extension("libattn.libattn_call", ["call.c"], include_dirs=[str(ABI)], py_limited_api=True, optional=True)]
elif not (HERE / "src" / "libattn" / "_declarations.py").is_file():
    raise SystemExit("libattn: build from a checkout, or run its bindings/python/generate.py before copying this folder")
setup(ext_modules=modules, options={"bdist_wheel": {"py_limited_api": "cp310"}} if modules else {})
