# SPDX-License-Identifier: Apache-2.0
"""``python -m libattn`` prints what attn-info prints; ``python -m libattn check`` verifies every backend of this machine."""
import sys

from .tools import become

if __name__ == "__main__":
    if sys.argv[1:2] == ["check"]:
        from .check import main
        sys.exit(main(sys.argv[2:]))
    sys.exit(become("attn-info", *sys.argv[1:]))
