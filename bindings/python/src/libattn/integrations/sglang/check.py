# SPDX-License-Identifier: Apache-2.0
"""What is refused before SGLang loads weights, and whether gated delta layers are libattn's."""
from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.runtime_context import get_parallel  # as SGLang resolved it, before it loads a model
from sglang.srt.utils.common import cpu_has_amx_support

from ..._declarations import Status
from ...errors import AttnError, make
from ...layers import LayerDesc
from ...torch.store import DTYPES, store
from ..gated_delta import describe as gated_delta
from . import NAME, drafts_here
from .layers import KV_DTYPES, describe_latent, latent_sizes

#: Releases whose interface is tested, the first in its engine.
SERVED = ("0.5.16", "0.5.23")
#: Drafts of a model.
VERIFIED = ("EAGLE", "EAGLE3", "STANDALONE")
#: Beginnings of the names of architectures whose latent attention is SGLang's `DeepseekV2AttentionMLA`; others have their own.
LATENT = ("Bailing", "Deepseek", "DotsVLM", "Eagle3Deepseek", "GigaChat35", "Glm", "Kimi", "Longcat", "MistralLarge3", "Pixtral")
CACHES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ADVICE = f"; to serve this model without libattn, leave out --attention-backend {NAME} or name another one, such as fa3 or triton"


def before_weights(runner: Any) -> None:
    """Raises one error with what is not served and what to do, where the model, the options or the release do not fit."""
    if getattr(runner, "is_draft_worker", False) and not drafts_here(runner.server_args):
        return
    status, cause = Status.UNSUPPORTED, None
    reasons = [f"{field}: {asked}; supported: {supported}" for field, asked, supported in _refusals(runner) if asked]
    if not reasons:
        try:
            layers = [_layer(runner)]
            if serves_states(runner, logs=False):  # the reason against it is logged where backends are made
                layers.append(replace(_states(runner), name="layers.1"))
            store.runtime.select(layers, device=torch.device(runner.device, runner.gpu_id if runner.device == "cuda" else 0))
            return
        except AttnError as error:
            status, cause, reasons = error.status, error, [str(error)]
    raise make(status, "attention_backend", "; ".join(reasons) + ADVICE) from cause


def _captures_decodes(arguments: Any) -> bool:
    """SGLang folds its other options into cuda_graph_config; releases before it have disable_cuda_graph alone."""
    backend = getattr(getattr(getattr(arguments, "cuda_graph_config", None), "decode", None), "backend", None)
    return not getattr(arguments, "disable_cuda_graph", False) if backend is None else getattr(backend, "value", backend) != "disabled"


def _refusals(runner: Any) -> list[tuple[str, Any, str]]:
    arguments, model = runner.server_args, runner.model_config
    found, tried = sglang.__version__, os.environ.get("ATTN_SGLANG_ANY_VERSION")
    known = tried == "1" or found in SERVED or found.startswith(tuple(f"{release}." for release in SERVED))
    # SGLang has kernels of its own for them on GPUs, and where a CPU has AMX.
    states = _states_reason(runner) if runner.device == "cpu" and not cpu_has_amx_support() else None
    latent = runner.use_mla_backend
    drafts = arguments.speculative_algorithm in VERIFIED and drafts_here(arguments)
    branches, page = getattr(arguments, "speculative_eagle_topk", None) or 1, runner.page_size or 1
    adaptive = getattr(arguments, "speculative_adaptive", False)
    captured = ("whose draft extends would be captured" if getattr(arguments, "enable_multi_layer_eagle", False) else
                "whose drafts of any number of steps would be captured" if adaptive else "")
    others = [name for name in model.hf_config.architectures if not name.startswith(LATENT)] if latent else []
    return [
        ("gated delta layers", states, "on a CPU, what the others have: those of Qwen3-Next and Qwen3.5 without drafts"),
        ("sglang", "" if known else found, f"{', '.join(SERVED)} (ATTN_SGLANG_ANY_VERSION=1 tries another release)"),
        ("model", ", ".join(others), "latent attention by SGLang's DeepseekV2AttentionMLA"),
        ("model", "multi-head latent attention over lists" if latent and getattr(model.hf_config, "index_topk", 0) else "",
         "latent attention of all keys"),
        ("kv_cache_dtype", arguments.kv_cache_dtype if latent and CACHES.get(arguments.kv_cache_dtype, model.dtype) != model.dtype else "",
         "auto, next to multi-head latent attention"),
        ("kv_cache_dtype", "auto, of which the checkpoint makes fp8_e4m3"
         if latent and arguments.kv_cache_dtype == "auto" and _kept(runner) != model.dtype else "",
         f"{model.dtype}, next to multi-head latent attention (--kv-cache-dtype bfloat16 for torch.bfloat16)"),
        ("model", "an encoder and a decoder" if getattr(model, "is_encoder_decoder", False) else "", "decoders without an encoder"),
        ("speculative_algorithm", "" if arguments.speculative_algorithm in (None, "NGRAM", *VERIFIED) else arguments.speculative_algorithm,
         ", ".join(("NGRAM", *VERIFIED))),
        ("speculative_eagle_topk", drafts and branches > 1 and page > 1 and f"{branches} with pages of {page} tokens",
         "1, or a page_size of 1"),
        ("speculative_algorithm", drafts and captured and runner.device != "cpu" and _captures_decodes(arguments) and
         f"{arguments.speculative_algorithm}, {captured}",
         "captured drafts of one number of steps and one layer (no --enable-multi-layer-eagle); drafts in eager steps (--disable-cuda-graph), or over another backend "
         "(--speculative-draft-attention-backend triton)"),
        ("disable_hybrid_swa_memory", "False, and sliding layers would have a pool of their own"
         if getattr(runner, "is_hybrid_swa", False) and not arguments.disable_hybrid_swa_memory else "",
         "one pool for all layers (--disable-hybrid-swa-memory)"),
        ("kv_cache_dtype", "" if arguments.kv_cache_dtype in ("auto", *CACHES) else arguments.kv_cache_dtype, ", ".join(("auto", *CACHES))),
        ("dtype", "" if model.dtype in DTYPES else model.dtype, ", ".join(map(str, DTYPES))),
    ]


def _quantizations(model: Any) -> Iterator[dict[str, Any]]:
    """What a checkpoint says of its quantization: in its configuration, and ModelOpt's in a file of its own, which SGLang has fetched."""
    for config in (model.hf_config, getattr(model.hf_config, "text_config", None)):
        found = getattr(config, "quantization_config", None)
        if found is not None:
            yield found if isinstance(found, dict) else found.to_dict()
    folder, name = getattr(model, "model_path", ""), "hf_quant_config.json"
    path: Any = os.path.join(folder, name)
    if folder and not os.path.isdir(folder):
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # neither a folder nor a hub's name
            path = try_to_load_from_cache(folder, name, revision=getattr(model, "revision", None))
    if isinstance(path, str) and os.path.isfile(path):
        yield json.loads(Path(path).read_text())


def _kept(runner: Any) -> torch.dtype:
    """The cache's type. Under `auto` it is fp8 where SGLang's configuration of the checkpoint's quantization has `kv_cache_quant_algo`
    FP8: ModelOpt's, and since 0.5.23 others' too."""
    asked, model = runner.server_args.kv_cache_dtype, runner.model_config
    for found in _quantizations(model) if asked == "auto" else ():
        section = found.get("quantization", found)
        method = str(section.get("quant_method", "modelopt"))
        if not method.startswith(("modelopt", "petit")) and sglang.__version__.startswith(SERVED[0]):
            continue
        scheme = section.get("kv_cache_scheme") or section.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            plain = not method.startswith("compressed") or (scheme.get("strategy") == "tensor" and not scheme.get("dynamic", False))
            scheme = "FP8" if plain and scheme.get("type") == "float" and scheme.get("num_bits") == 8 else ""
        if str(scheme).upper() in ("FP8", "FLOAT8"):
            return torch.float8_e4m3fn
    return CACHES.get(asked, model.dtype)


def _layer(runner: Any) -> LayerDesc:
    """A usual layer of the model, on one rank."""
    arguments, model = runner.server_args, runner.model_config
    ranks = get_parallel().attn_tp_size
    if runner.use_mla_backend:
        sizes = latent_sizes(model)
        return describe_latent(model.num_attention_heads // ranks, 1.0, model.dtype, runner.page_size or 1, sizes,
                               bool(arguments.speculative_algorithm))
    kept = _kept(runner)
    scales: dict[str, Any] = {"k_scale_form": "per_tensor", "v_scale_form": "per_tensor"} if kept.itemsize == 1 else {}
    return LayerDesc("layers.0", model.num_attention_heads // ranks, model.get_num_kv_heads(ranks), model.head_dim,
                     model.head_dim**-0.5, "decoder", DTYPES[model.dtype], KV_DTYPES[kept],
                     head_size_v=getattr(model, "v_head_dim", None) or model.head_dim, block_size=runner.page_size or 1,
                     tree_mask="bits" if arguments.speculative_algorithm else "none", **scales)


def _states_config(runner: Any) -> Any | None:
    """The configuration of a model with gated delta layers."""
    found = getattr(runner.model_config, "hf_config", None)
    text = found.get_text_config() if hasattr(found, "get_text_config") else found
    return text if getattr(text, "linear_num_value_heads", None) and getattr(text, "linear_layer_ids", None) else None


def _states_reason(runner: Any) -> str | None:
    """Why gated delta layers are not libattn's; None: they are, or the model has none."""
    config, arguments, dtype = _states_config(runner), runner.server_args, runner.model_config.dtype
    if config is None:
        return None
    windows = config.mamba2_cache_params.dtype.conv
    for asked, reason in (
            (not sglang.__version__.startswith(SERVED[0]), f"SGLang {sglang.__version__}, in whose engine they have not run"),
            (not type(config).__name__.startswith(("Qwen3Next", "Qwen3_5")), f"{type(config).__name__}'s"),
            (runner.device == "cpu" and cpu_has_amx_support(), "a CPU with AMX, where windows lie token by token"),
            (arguments.speculative_algorithm, "speculative_algorithm, whose states SGLang keeps in memory of its own, which it takes "
             "from CUDA"),
            (windows != dtype, f"windows of {windows} next to activations of {dtype}, where SGLANG_MAMBA_CONV_DTYPE={str(dtype)[6:]} makes "
             "them alike"),
            (arguments.linear_attn_backend != "triton" or arguments.linear_attn_prefill_backend or arguments.linear_attn_decode_backend,
             "--linear-attn-backend, --linear-attn-prefill-backend or --linear-attn-decode-backend, which choose SGLang's kernels"),
            (arguments.enable_linear_replayssm, "--enable-linear-replayssm"), (arguments.enable_unified_memory, "--enable-unified-memory"),
            (arguments.enable_page_major_kv_layout, "--enable-page-major-kv-layout"),
            (getattr(arguments, "enable_mamba_cache_stochastic_rounding", False), "--enable-mamba-cache-stochastic-rounding, whose "
             "random bits follow a request's length, of which a step here knows its own tokens")):
        if asked:
            return reason
    return None


def serves_states(runner: Any, logs: bool = True) -> bool:
    """Whether the model has gated delta layers and libattn serves them. With `logs` SGLang's log has the reason why it does not."""
    if _states_config(runner) is None or getattr(runner, "is_draft_worker", False):
        return False
    reason = _states_reason(runner)
    if reason is not None and logs:
        logging.getLogger(__name__).warning("libattn leaves gated delta layers to SGLang's own backend: %s", reason)
    return reason is None


@cache
def _warn(text: str) -> None:
    """Once."""
    logging.getLogger(__name__).warning(text)


def warn_of_others(runner: Any, full_attn_backend: Any, made: Any) -> None:
    """SGLang's log has what serves layers in libattn's place, in a backend that SGLang made for a model of several kinds of layers."""
    attends = getattr(made, "full_attn_backend", None) is full_attn_backend
    if attends and _states_config(runner) is not None:
        return  # gated delta layers, whose reason `serves_states` logs; a draft of their models has none
    other = type(getattr(made, "linear_attn_backend", made) if attends else made).__name__
    _warn(f"SGLang's own {other}, not libattn, serves layers of {', '.join(runner.model_config.hf_config.architectures)}; next to layers "
          "of attention libattn serves the gated delta layers of Qwen3-Next and Qwen3.5")


def _states(runner: Any) -> LayerDesc:
    """A gated delta layer of the model, on one rank."""
    config, ranks, dtype = _states_config(runner), get_parallel().attn_tp_size, runner.model_config.dtype
    assert config is not None
    return gated_delta(config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks, config.linear_key_head_dim,
                       config.linear_value_head_dim, config.linear_conv_kernel_dim, 0, dtype, config.mamba2_cache_params.dtype.temporal,
                       int(runner.server_args.mamba_cache_chunk_size) if runner.server_args.enable_mamba_extra_buffer() else 0)
