# SPDX-License-Identifier: Apache-2.0
"""Hugging Face Transformers: ``attn_implementation="libattn"``.

    import libattn.integrations.transformers as integration
    integration.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="libattn")
    model.generate(...)                     # dense, static and sliding caches
    model.generate_batch(...)               # continuous batching over pages
    print(integration.table())              # which backend served which layer

``ATTN_BACKEND`` chooses as everywhere. What no backend can do raises `libattn.UnsupportedError` with the reasons;
nothing falls back to another implementation.
"""
from __future__ import annotations

from typing import Any

from ...torch import configure, table
from .forward import attention, attention_mask
from .hooks import allow_continuous_batching, refuse_models_without_hook

__all__ = ["attention", "attention_mask", "configure", "register", "table"]

NAME = "libattn"


def register(**options: Any) -> None:
    """Make ``attn_implementation="libattn"`` known. May be called again, with other options.

    Parameters
    ----------
    **options
        Of `libattn.Runtime`, in place of the environment: ``backend="cpu_simd"``, ``num_threads=4``, …
    """
    import transformers
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise ImportError(f"libattn: Transformers {transformers.__version__} has no AttentionInterface or no "
                          "AttentionMaskInterface; 4.53 or later is needed") from None

    configure(**options)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    refuse_models_without_hook(NAME)
    allow_continuous_batching(NAME)
