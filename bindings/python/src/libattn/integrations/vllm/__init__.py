# SPDX-License-Identifier: Apache-2.0
"""vLLM (v1): a backend class under the name ``CUSTOM``.

The entry point ``vllm.general_plugins`` calls `register` in every process of vLLM, so ``--attention-backend CUSTOM``
is all that has to be said; on a CPU the entry point ``vllm.platform_plugins`` sees to it that the name is taken at its
word. Which of libattn's backends then serves which layer, and ``ATTN_BACKEND``, is libattn's own choice; the reasons
against it are what `validate_configuration` answers.
"""
from __future__ import annotations

import logging
from typing import Any

__all__ = ["platform", "register"]


def register() -> None:
    """Make the backend known to vLLM's registry, and its classes for vision towers and for gated delta layers."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "libattn.integrations.vllm.backend.LibattnBackend")
    try:
        from . import vision
    except ImportError as reason:  # of a release that is not served, which must not stop other backends
        logging.getLogger(__name__).warning("vision towers stay vLLM's own: %s", reason)
    else:
        vision.register()
    try:
        _replace_gated_delta()
    except ImportError as reason:
        logging.getLogger(__name__).warning("gated delta layers stay vLLM's own: %s", reason)


def _replace_gated_delta() -> None:
    """Python calls the hook where vLLM defines a gated delta layer, with the model: that module looks at the GPU when it is
    imported, which a plugin must not do."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    register_backend(MambaAttentionBackendEnum.CUSTOM, "libattn.integrations.vllm.gdn.LibattnStateBackend", is_mamba=True)

    def follow(cls: type, **_: Any) -> None:
        if cls.__name__ == "QwenGatedDeltaNetAttention" and cls.__name__ not in op_registry_oot:
            from .gdn import replacement

            op_registry_oot[cls.__name__] = replacement(cls)

    GatedDeltaNetAttention.__init_subclass__ = classmethod(follow)


def platform() -> str | None:
    """The platform's class where vLLM runs on CPUs; None elsewhere: vLLM's own platform stays."""
    from vllm.platforms import cpu_platform_plugin

    return None if cpu_platform_plugin() is None else "libattn.integrations.vllm.cpu.LibattnCpuPlatform"
