# SPDX-License-Identifier: Apache-2.0
"""SGLang: an attention backend under the name ``libattn``.

The entry point ``sglang.srt.plugins`` calls `register`; then ``--attention-backend libattn``. Which of libattn's
backends serves which layer, and ``ATTN_BACKEND``, is libattn's own choice.
"""
from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "libattn"


def register() -> None:
    """Make the backend known to SGLang's registry and to its command line."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(NAME)
    def create(runner: Any) -> Any:
        from .backend import LibattnBackend

        return LibattnBackend(runner)

    for module in ("sglang.srt.arg_groups.choices", "sglang.srt.server_args"):
        try:
            choices = __import__(module, fromlist=["ATTENTION_BACKEND_CHOICES"]).ATTENTION_BACKEND_CHOICES
        except (ImportError, AttributeError):
            continue
        if NAME not in choices:
            choices.append(NAME)
