# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml says everything but this: in a checkout the declarations are written from the headers first."""
import runpy
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
if (HERE.parents[1] / "abi" / "attn").is_dir():
    runpy.run_path(str(HERE / "generate.py"))["write"]()
elif not (HERE / "src" / "libattn" / "_declarations.py").is_file():
    raise SystemExit("libattn: build from a checkout, or run its bindings/python/generate.py before copying this folder")
setup()
