# SPDX-License-Identifier: Apache-2.0
"""``python -m libattn.info``: attn-info of the library that this package would open, with its arguments."""
import sys

from .tools import become

if __name__ == "__main__":
    sys.exit(become("attn-info", *sys.argv[1:]))
