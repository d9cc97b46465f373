# SPDX-License-Identifier: Apache-2.0
"""What differs between the releases of vLLM that are served: 0.26, 0.32 and 0.33.

Before 0.32 a backend shapes the cache itself (`CacheShape`) and is asked about cascades; since then specs have a layout,
which a backend orders and packs (`CacheLayout`), batches bring no common prefix, and MLA's layers with an indexer write the cache and
project queries and outputs themselves (`LATENT_QUERIES`).
"""
from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from ..._declarations import KvLayout
from ...torch.store import store
from . import describe

SERVED = ("0.26", "0.32", "0.33")

#: Whether specs have a layout.
LAYOUTS = hasattr(AttentionBackend, "supported_kv_cache_layouts")

#: Whether sparse MLA layers bring queries in latent space.
LATENT_QUERIES = LAYOUTS


def refusals() -> list[str]:
    """A line if libattn does not serve this release of vLLM, unless ``--additional-config`` says to try."""
    from vllm.version import __version__ as found

    anyway = describe.options().get("any_version")
    if anyway or found.startswith(tuple(f"{version}." for version in SERVED)):
        return []
    return [f"vllm: {found}, served: {', '.join(SERVED)}; to try another release: "
            """--additional-config '{"libattn": {"any_version": true}}'"""]


@cache
def _warn(text: str) -> None:
    """Once."""
    logging.getLogger(__name__).warning(text)


def warn_of_norms() -> None:
    """0.26's own norm adds up a row in another order from 256 tokens a step on (vllm#48271), so that bits depend on the batch whatever
    attends. With torch.compile norms are torch's by default."""
    from vllm.version import __version__ as found

    config = describe.config()
    ops = getattr(getattr(config, "compilation_config", None), "custom_ops", ())
    priority = getattr(getattr(config, "kernel_config", None), "ir_op_priority", None)
    own = "+rms_norm" in ops or ("all" in ops and "-rms_norm" not in ops)
    first = (getattr(priority, "fused_add_rms_norm", None) or ["native"])[0]
    if found.startswith("0.26.") and (own or first != "native"):
        _warn(f"VLLM_BATCH_INVARIANT: the norms of vLLM {found} give other bits in steps of 256 tokens and more (vllm#48271); to take "
              """torch's: --compilation-config '{"custom_ops": ["-rms_norm"]}' """
              """--ir-op-priority '{"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}'""")


def drafts_of_a_model(config: Any) -> Any | None:
    """The configuration of drafts that a model makes, whose layers have an attention backend of their own."""
    drafts = getattr(config, "speculative_config", None)
    return drafts if drafts is not None and (drafts.use_eagle() or drafts.method == "draft_model") else None


def warn_of_drafts() -> None:
    """vLLM's V1 runner chooses the attention backend of a draft's layers by itself, unless it is named. V2 takes the target's, but for
    DFlash and DSpark."""
    config = describe.config()
    drafts = drafts_of_a_model(config)
    if drafts is None or drafts.attention_backend is not None:
        return
    if not getattr(config, "use_v2_model_runner", False) or drafts.method in ("dflash", "dspark"):
        _warn("""vLLM chooses another attention backend for the draft's layers; for libattn: "attention_backend": "CUSTOM" in """
              "--speculative-config")


def warn_of_states(layers: dict[str, Any]) -> None:
    """vLLM's log has the classes of a model's layers whose states vLLM's own backends keep. libattn's class is there too where an
    operator has left its layers to vLLM; nothing is said of those."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    others: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if getattr(layer, "mamba_type", None) not in (None, MambaAttentionBackendEnum.CUSTOM) and not hasattr(layer, "serves"):
            others.setdefault(type(layer).__name__, []).append(name)
    if others:
        found = ", ".join(f"{len(names)} {kind} (the first {names[0]})" for kind, names in others.items())
        _warn(f"vLLM's own backends, not libattn, serve {found}; of recurrent layers libattn serves QwenGatedDeltaNetAttention")


def heads_first() -> bool:
    """Whether the backend that serves a usual layer prefers a page's heads before its slots."""
    desc = describe.layer("layers.0", 8, 8, 128, describe.dtype())
    found = store.runtime.select([desc], device=describe.device(), keep_unserved=True).choice(0, "decode")
    return found.layout in (KvLayout.HND, KvLayout.HND_INNER, KvLayout.HND_ROWS)


class CacheShape:
    """Before 0.32: K and V in one row, blocks first, as vLLM needs where it pads pages or packs layers into one."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Not `MultipleOf(1)`: a model whose layers all have windows would get pages of one token. Next to an indexer's cache its
        blocks, since they share a table."""
        return [64] if describe.is_sparse() else [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
                           cache_dtype_str: str = "auto", **_: Any) -> tuple[int, ...]:
        """``[N, Hk, B, row]``, or MLA's ``[N, B, D]``."""
        if describe.is_latent():
            return (num_blocks, block_size, 656 if cache_dtype_str == "fp8_ds_mla" else head_size)
        row = describe.rows_of(cache_dtype_str, head_size, head_size)
        return (num_blocks, num_kv_heads, block_size, row.length if row else 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Physical order of those dimensions, by the layout that vLLM has settled on."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout

        if describe.is_latent():
            return (1, 0, 2, 3) if include_num_layers_dimension else (0, 1, 2)
        order = (0, 1, 2, 3) if get_kv_cache_layout() == "HND" else (0, 2, 1, 3)
        return (1, 0, *(n + 1 for n in order[1:])) if include_num_layers_dimension else order

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """The one that the chosen backend likes; None where the operator has said one, which is read as well."""
        from vllm import envs

        return None if envs.VLLM_KV_CACHE_LAYOUT else "HND" if heads_first() else "NHD"


class CacheLayout:
    """Since 0.32."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any; next to an indexer's cache its blocks."""
        return [MultipleOf(64 if describe.is_sparse() else 1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Any layout is read where it lies; first the one that the chosen backend likes."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        first, second = ("LBHNC", "LBNHC") if heads_first() else ("LBNHC", "LBHNC")
        rest = [layout for layout in KVCacheLayout if layout.name not in (first, second)]
        return (KVCacheLayout[first], KVCacheLayout[second], *rest)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Bytes of a slot and head of packed rows."""
        rows = describe.rows_of(spec.kv_quant_mode.name.lower(), spec.head_size, spec.head_size_v)
        return spec if rows is None or spec.state_content_bytes is not None else replace(
            spec, state_content_bytes=rows.length)


CacheForm: type = CacheLayout if LAYOUTS else CacheShape

__all__ = ["LATENT_QUERIES", "LAYOUTS", "SERVED", "CacheForm", "CacheLayout", "CacheShape", "heads_first", "refusals",
           "warn_of_drafts", "warn_of_norms", "warn_of_states"]
