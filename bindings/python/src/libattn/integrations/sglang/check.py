# SPDX-License-Identifier: Apache-2.0
"""What is refused before SGLang loads weights."""
from __future__ import annotations

import os
from typing import Any

import sglang
import torch
from sglang.srt.runtime_context import get_parallel  # as SGLang resolved it, before it loads a model

from ..._declarations import Status
from ...errors import AttnError, make
from ...layers import LayerDesc
from ...torch.store import DTYPES, store
from . import NAME
from .layers import KV_DTYPES

#: Releases whose interface is tested, the first in its engine.
SERVED = ("0.5.16", "0.5.23")
CACHES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ADVICE = f"; to serve this model without libattn, leave out --attention-backend {NAME} or name another one, such as fa3 or triton"


def before_weights(runner: Any) -> None:
    """Raises one error with what is not served and what to do, where the model, the options or the release do not fit."""
    status, cause = Status.UNSUPPORTED, None
    reasons = [f"{field}: {asked}; supported: {supported}" for field, asked, supported in _refusals(runner) if asked]
    if not reasons:
        try:
            store.runtime.select([_layer(runner)], device=_device(runner))
            return
        except AttnError as error:
            status, cause, reasons = error.status, error, [str(error)]
    raise make(status, "attention_backend", "; ".join(reasons) + ADVICE) from cause


def _refusals(runner: Any) -> list[tuple[str, Any, str]]:
    arguments, model = runner.server_args, runner.model_config
    found, tried = sglang.__version__, os.environ.get("ATTN_SGLANG_ANY_VERSION")
    known = tried == "1" or found in SERVED or found.startswith(tuple(f"{release}." for release in SERVED))
    return [
        ("sglang", "" if known else found, f"{', '.join(SERVED)} (ATTN_SGLANG_ANY_VERSION=1 tries another release)"),
        ("model", "multi-head latent attention" if runner.use_mla_backend else "", "multi-head and grouped-query attention"),
        ("model", "an encoder and a decoder" if getattr(model, "is_encoder_decoder", False) else "", "decoders without an encoder"),
        ("speculative_algorithm", "" if arguments.speculative_algorithm in (None, "NGRAM") else arguments.speculative_algorithm,
         "NGRAM (drafts of a model are not served)"),
        ("disable_hybrid_swa_memory", "False, and sliding layers would have a pool of their own"
         if getattr(runner, "is_hybrid_swa", False) and not arguments.disable_hybrid_swa_memory else "",
         "one pool for all layers (--disable-hybrid-swa-memory)"),
        ("kv_cache_dtype", "" if arguments.kv_cache_dtype in ("auto", *CACHES) else arguments.kv_cache_dtype, ", ".join(("auto", *CACHES))),
        ("dtype", "" if model.dtype in DTYPES else model.dtype, ", ".join(map(str, DTYPES))),
    ]


def _layer(runner: Any) -> LayerDesc:
    """A usual layer of the model, on one rank."""
    arguments, model = runner.server_args, runner.model_config
    ranks = get_parallel().attn_tp_size
    kept = CACHES.get(arguments.kv_cache_dtype, model.dtype)
    scales: dict[str, Any] = {"k_scale_form": "per_tensor", "v_scale_form": "per_tensor"} if kept.itemsize == 1 else {}
    return LayerDesc("layers.0", model.num_attention_heads // ranks, model.get_num_kv_heads(ranks), model.head_dim,
                     model.head_dim**-0.5, "decoder", DTYPES[model.dtype], KV_DTYPES[kept],
                     head_size_v=getattr(model, "v_head_dim", None) or model.head_dim, block_size=runner.page_size or 1,
                     tree_mask="bits" if arguments.speculative_algorithm else "none", **scales)


def _device(runner: Any) -> tuple[str, int]:
    if runner.device == "cuda":
        return ("rocm" if torch.version.hip else "cuda"), runner.gpu_id
    return runner.device, 0
