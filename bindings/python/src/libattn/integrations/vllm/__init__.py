# SPDX-License-Identifier: Apache-2.0
"""vLLM (v1): a backend class under the name ``CUSTOM``.

The entry point ``vllm.general_plugins`` calls `register` in every process of vLLM, so ``--attention-backend CUSTOM``
is all that has to be said; on a CPU the entry point ``vllm.platform_plugins`` sees to it that the name is taken at its
word. Which of libattn's backends then serves which layer, and ``ATTN_BACKEND``, is libattn's own choice; the reasons
against it are what `validate_configuration` answers.
"""
from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["platform", "register"]


def register() -> None:
    """Make the backend known to vLLM's registry, and its classes for vision towers and for gated delta layers."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "libattn.integrations.vllm.backend.LibattnBackend")
    with _optional("vision towers"):
        from . import vision

        vision.register()
    with _optional("gated delta layers"):
        _replace_gated_delta()


@contextmanager
def _optional(what: str) -> Iterator[None]:
    """A release that is not served must not stop other backends."""
    try:
        yield
    except ImportError as reason:
        logging.getLogger(__name__).warning("%s stay vLLM's own: %s", what, reason)


def _replace_gated_delta() -> None:
    """Python calls the hook where vLLM defines a gated delta layer, with the model: that module looks at the GPU when it is
    imported, which a plugin must not do."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    register_backend(MambaAttentionBackendEnum.CUSTOM, "libattn.integrations.vllm.gdn.LibattnStateBackend", is_mamba=True)

    def follow(cls: Any, **given: Any) -> None:
        super(GatedDeltaNetAttention, cls).__init_subclass__(**given)
        if cls.__name__ == "QwenGatedDeltaNetAttention" and cls.__name__ not in op_registry_oot:
            with _optional("gated delta layers"):
                from .gdn import replacement

                op_registry_oot[cls.__name__] = replacement(cls)

    GatedDeltaNetAttention.__init_subclass__ = classmethod(follow)
    for known in GatedDeltaNetAttention.__subclasses__():  # imported before this plugin
        follow(known)


def platform() -> str | None:
    """The platform's class where vLLM runs on CPUs; None elsewhere: vLLM's own platform stays."""
    from vllm.platforms import cpu_platform_plugin

    return None if cpu_platform_plugin() is None else "libattn.integrations.vllm.cpu.LibattnCpuPlatform"
