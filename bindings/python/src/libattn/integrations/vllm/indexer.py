# SPDX-License-Identifier: Apache-2.0
"""vLLM's indexer of sparse MLA layers (DeepSeek-V3.2, GLM-5), with the option ``indexer``: one step of libattn writes the index keys,
scores and lists, over vLLM's cache. Projections, norms, rotations and the queries' fp8 stay vLLM's.

The cache is vLLM's own: a block has its keys in e4m3 and then a float32 scale for each. Since 0.32 models write it themselves with
other kernels, and libattn only reads. All models come to one function of vLLM's, from graphs of pieces through its operator
``vllm::sparse_attn_indexer``; it is replaced, and indexers that libattn does not serve go on to vLLM's.
"""
from __future__ import annotations

import sys
import warnings
from functools import cache, wraps
from typing import Any

import torch

from ..._declarations import Status, attn_io_indexer
from ...errors import make
from ...layers import LayerDesc
from ...model import KvView
from ...step import NO_WRITE
from ...torch.steps import Member
from ...torch.store import Params
from . import describe
from .backend import LibattnMetadataBuilder, graph_support
from .layers import index_of, reserve
from .metadata import LibattnMetadata, batch_of

#: vLLM's function and operator.
NAME = "sparse_attn_indexer"

#: The last line of a refusal.
LEAVE = "supported: no; to leave indexers to vLLM, leave the option indexer out of --additional-config"

#: The queries' own scales are in the weights.
PARAMS: Params = (("q_scale", 1.0),)


class IndexBuilder(LibattnMetadataBuilder):
    """The caches of index keys, whose batches have no common prefix to look for."""

    supports_update_block_table: bool = False
    looks_for_prefix: bool = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """What the backend that serves the indexers can capture."""
        text = vllm_config.model_config.hf_text_config
        return graph_support([describe.index(text.index_n_heads, text.index_head_dim, text.index_topk, vllm_config.model_config.dtype,
                                             kv_cache_spec.block_size)])


@cache
def backend_over(base: type) -> type:
    """vLLM's backend of these caches, their shapes and blocks, with libattn's builder."""
    class LibattnIndexBackend(base):  # type: ignore[misc,valid-type]
        @staticmethod
        def get_builder_cls() -> type[IndexBuilder]:
            return IndexBuilder

    return LibattnIndexBackend


def rows_of(kv_cache: torch.Tensor, head_size: int) -> KvView:
    """Keys [N, B, 1, D] and scales [N, B, 1] of vLLM's cache [N, B, D + 4], each block of which has all keys, then all scales."""
    blocks, slots, row = kv_cache.shape
    if row != head_size + 4 or kv_cache.stride()[1:] != (row, 1) or kv_cache.stride(0) % 4:
        raise make(Status.UNSUPPORTED, "kv_cache", f"{list(kv_cache.shape)} with strides {kv_cache.stride()}; supported: blocks of "
                   f"index keys of {head_size} bytes, in one piece with a float32 scale for each")
    start, stride = kv_cache.storage_offset(), kv_cache.stride(0)
    keys = kv_cache.as_strided((blocks, slots, 1, head_size), (stride, head_size, head_size, 1))
    scales = kv_cache.as_strided((blocks, slots, 1, 4), (stride, 4, 4, 1), start + slots * head_size)
    return KvView(keys, scales.view(torch.float32)[..., 0], head_size)


class Index:
    """One indexer for `libattn.torch.steps.Steps`."""

    def __init__(self, indexer: Any) -> None:
        self.indexer, self.impl, self.theirs = indexer, self, indexer.k_cache.get_attn_backend()
        self.limits = describe.limits()

    def get_attn_backend(self) -> type:
        """That of the cache, in place of vLLM's."""
        return backend_over(self.theirs)

    @property
    def kv_cache(self) -> torch.Tensor:
        """[blocks, slots, D + 4]; without elements before vLLM has its cache."""
        return self.indexer.k_cache.kv_cache

    def describe(self, dtype: torch.dtype, block_size: int, device_seq_lens_only: bool) -> LayerDesc:
        indexer = self.indexer
        return describe.index(indexer.n_head, indexer.head_dim, indexer.topk_tokens, dtype, block_size,
                              device_seq_lens_only=device_seq_lens_only)

    def version(self, layer: Any) -> Any:
        """A layer is bound again when this changes: an indexer has no parameters."""

    def member(self, layer: Any, kv_cache: torch.Tensor, m: LibattnMetadata, dtype: torch.dtype) -> Member:
        """The layer and its rows."""
        desc = self.describe(dtype, kv_cache.shape[1], m.seq_lens.device.type != "cpu")
        return Member(desc, index_of(self.indexer.k_cache.prefix), PARAMS, rows_of(kv_cache, self.indexer.head_dim), None)

    def run(self, m: LibattnMetadata, q: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor, lists: torch.Tensor,
            dtype: torch.dtype) -> None:
        """Rows [T, H, D] of e4m3, [T, D] or None where they are in the cache, [T, H], and int32 [T, k]."""
        m.steps.run(self, self, self.kv_cache, m, dtype, lambda: batch_of(m, q.shape[0]),
                    (q, None if k is None else k.unsqueeze(1), None, lists.unsqueeze(1)), NO_WRITE if k is None else 0,
                    lambda bound: bound.io(attn_io_indexer, weights=weights))


def over(theirs: Any) -> Any:
    """vLLM's function, with libattn in the place of its kernels."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    @eager_break_during_capture
    @wraps(theirs)
    def ours(hidden_states: torch.Tensor, k_cache_prefix: Any, kv_cache: torch.Tensor, q_quant: torch.Tensor, q_scale: Any,
             k: torch.Tensor | None, weights: torch.Tensor, quant_block_size: int, scale_fmt: str | None, topk_tokens: int,
             head_dim: int, max_model_len: int, total_seq_lens: int, topk_indices_buffer: torch.Tensor, skip_k_cache_insert: bool,
             *rest: Any, **more: Any) -> torch.Tensor:
        context, name = get_forward_context(), _resolve_layer_name(k_cache_prefix)
        index = getattr(context.no_compile_layers[name], "states", None)
        if index is None:
            return theirs(hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt,
                          topk_tokens, head_dim, max_model_len, total_seq_lens, topk_indices_buffer, skip_k_cache_insert, *rest, **more)
        if isinstance(context.attn_metadata, dict):  # else a run that measures memory
            index.run(context.attn_metadata[name], q_quant, None if skip_k_cache_insert else k, weights,
                      topk_indices_buffer[:q_quant.shape[0], :topk_tokens], hidden_states.dtype)
        return topk_indices_buffer

    ours.of_libattn = True
    return ours


def _replace(theirs: Any) -> None:
    """Put `over` in the place of vLLM's function, once: in its operator, and wherever a model has imported it."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import vllm_lib

    if getattr(theirs, "of_libattn", False):
        return
    ours = over(theirs)
    with warnings.catch_warnings():  # torch warns of an operator whose kernel is replaced
        warnings.simplefilter("ignore")
        vllm_lib.impl(NAME, ours, dispatch_key=current_platform.dispatch_key, allow_override=True)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get(NAME) is theirs:
            setattr(module, NAME, ours)


def _refuse(indexer: Any) -> None:
    """What vLLM's indexers may be, and libattn does not do over their cache."""
    op, backend = getattr(indexer, "indexer_op", None), indexer.k_cache.get_attn_backend().__name__
    parallel = getattr(describe.config(), "parallel_config", None)
    for field, asked in (
            ("device", describe.device()[0] == "rocm" and "rocm, where vLLM has another operator and order of the keys"),
            ("indexer", backend != "DeepseekV32IndexerBackend" and f"keys of {backend}, whose rows are not one token each"),
            ("indexer_kv_dtype", getattr(op, "use_fp4_cache", False) and "mxfp4"),
            ("index_head_dim", indexer.head_dim != indexer.quant_block_size and
             f"{indexer.head_dim}, with scales of {indexer.quant_block_size} elements"),
            *((field, (size := getattr(parallel, field, 1)) > 1 and f"{size}, over whose ranks keys are spread")
              for field in ("decode_context_parallel_size", "prefill_context_parallel_size"))):
        if asked:
            raise make(Status.UNSUPPORTED, field, f"{asked}, next to the option indexer; {LEAVE}")


def serve(indexer: Any) -> None:
    """Let libattn serve an indexer that is being made with its layer, or raise the reasons against it."""
    from vllm.model_executor.layers import sparse_attn_indexer as module

    _refuse(indexer)
    index = Index(indexer)
    desc = index.describe(describe.dtype(), 64, describe.device()[0] != "cpu")
    describe.refuse_unserved(desc)
    reserve(index, desc, PARAMS)
    indexer.k_cache.states, indexer.k_cache.get_attn_backend = index, index.get_attn_backend
    _replace(getattr(module, NAME))


__all__ = ["Index", "IndexBuilder", "backend_over", "over", "rows_of", "serve"]
