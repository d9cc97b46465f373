# SPDX-License-Identifier: Apache-2.0
"""vLLM's words for a layer in libattn's."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..._declarations import Status
from ...errors import AttnError, make
from ...layers import IndexerDesc, LayerDesc, MlaDesc, RecurrentRounding
from ...torch.segments import Window
from ...torch.store import DTYPES, store
from ..gated_delta import describe as gdn

#: AttentionType to layer kinds.
KINDS = {"decoder": "decoder", "encoder": "encoder", "encoder_only": "encoder_only", "encoder_decoder": "cross"}

#: CacheDType to KV dtypes; the last ones have the same names here.
KV_DTYPES = {
    "auto": "auto", "float16": "f16", "bfloat16": "bf16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2", **{name: name for name in (
        "fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "nvfp4", "turboquant_k8v4",
        "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")},
}
#: KV dtypes with a scale of the checkpoint.
SCALED = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
_TURBOQUANT_BITS = {"k8v4": (8, 4), "4bit_nc": (4, 4), "k3v4_nc": (3, 4), "3bit_nc": (3, 3)}

#: What ``--additional-config '{"libattn": {...}}'`` may say.
OPTIONS = ("any_version", "fp8_query", "gdn", "indexer")

#: The last line of a refusal.
ADVICE = ("to serve this model without libattn, leave out --attention-backend CUSTOM or name another one, such as FLASH_ATTN, "
          "FLASH_ATTN_MLA or, on a CPU, CPU_ATTN")


@dataclass(frozen=True)
class PackedRows:
    """One slot and head of a quantized cache, in bytes: a key, its scales, a value, its scales, padding."""

    key: int
    key_scales: int
    value: int
    value_scales: int

    @property
    def length(self) -> int:
        """An even number, as vLLM has it."""
        used = self.key + self.key_scales + self.value + self.value_scales
        return used + used % 2


def rows_of(kv_cache_dtype: str, head_size: int, head_size_v: int) -> PackedRows | None:
    """How vLLM's pages of a cache dtype are packed; None: keys and values are arrays of numbers."""
    name = kv_cache_dtype
    if name.endswith("_per_token_head"):
        share = 2 if name.startswith("int4") else 1
        return PackedRows(head_size // share, 4, head_size_v // share, 4)
    if name == "nvfp4":
        return PackedRows(head_size // 2, head_size // 16, head_size_v // 2, head_size_v // 16)
    if name.startswith("turboquant_"):
        bits, bits_v = _TURBOQUANT_BITS[name.removeprefix("turboquant_")]
        return PackedRows((head_size * bits + 7) // 8, 0 if bits == 8 else 2, (head_size_v * bits_v + 7) // 8, 4)
    return None


def device() -> tuple[str, int]:
    """Where this process's layers run."""
    if torch.cuda.is_available():
        return ("rocm" if torch.version.hip else "cuda"), torch.cuda.current_device()
    return "cpu", 0


def torch_device() -> torch.device:
    """The same as torch has it."""
    name, number = device()
    return torch.device("cpu") if name == "cpu" else torch.device("cuda", number)


def config() -> Any:
    """vLLM's configuration while an engine is being made, else None."""
    try:
        from vllm.config import get_current_vllm_config_or_none as current
    except ImportError:
        return None
    return current()


def _model_config() -> Any:
    return getattr(config(), "model_config", None)


def is_asked() -> bool:
    """Whether the engine that is being made runs ``CUSTOM``."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return getattr(getattr(config(), "attention_config", None), "backend", None) is AttentionBackendEnum.CUSTOM


def rounding(of: Any, layer: int) -> RecurrentRounding | None:
    """What a configuration's ``--enable-mamba-cache-stochastic-rounding`` and ``--mamba-cache-philox-rounds`` ask of a layer; the engine's
    seed and the layer's number, counted over tensor parallel ranks, are its seed."""
    asked = getattr(of, "mamba_config", None)
    if asked is None or not asked.enable_stochastic_rounding:
        return None
    seed = (getattr(of.model_config, "seed", None) or 0) % (1 << 32)
    return RecurrentRounding(seed + (layer << 32), asked.stochastic_rounding_philox_rounds)


_last: Any = None  # the model that was made last: caches are shaped when no configuration is current


def _shaped() -> Any:
    """The model that is being made, or was made last."""
    global _last
    _last = _model_config() or _last
    return _last


def is_latent() -> bool:
    """Whether its layers are MLA."""
    return bool(getattr(_shaped(), "use_mla", False))


def is_sparse() -> bool:
    """Whether they attend to keys that an indexer chooses."""
    found = mla_of(_shaped())
    return found is not None and found.topk > 0


def dtype() -> torch.dtype:
    """The dtype of the activations of the model that is being made."""
    found = getattr(_model_config(), "dtype", None)
    return found if found in DTYPES else torch.bfloat16


def limits() -> tuple[int, int, int]:
    """The most requests and tokens of a step and the longest request of the engine that is being made; 0: not known."""
    scheduler = getattr(config(), "scheduler_config", None)
    return (getattr(scheduler, "max_num_seqs", 0), getattr(scheduler, "max_num_batched_tokens", 0),
            getattr(_model_config(), "max_model_len", 0))


def options() -> dict[str, Any]:
    """The operator's, of this adapter: ``--additional-config '{"libattn": {...}}'``."""
    given = getattr(config(), "additional_config", None)
    found = given.get("libattn", {}) if isinstance(given, dict) else {}
    for name in found:
        if name not in OPTIONS:
            raise make(Status.UNSUPPORTED, f"additional_config.libattn.{name}", f"not known; known: {', '.join(OPTIONS)}")
    return found


def invariance(asked: bool | None = None) -> int:
    """`LayerDesc.batch_invariant` of what the operator asks (``VLLM_BATCH_INVARIANT``).

    2 where a request's keys may come from a prefix cache, or its prompt in chunks, whose bounds depend on the other
    requests of a step.
    """
    if asked is None:
        from vllm import envs

        asked = bool(envs.VLLM_BATCH_INVARIANT)
    cache, scheduler = (getattr(config(), name, None) for name in ("cache_config", "scheduler_config"))
    parted = getattr(cache, "enable_prefix_caching", False) or getattr(scheduler, "enable_chunked_prefill", False)
    return (2 if parted else 1) if asked else 0


def mla_of(model_config: Any) -> MlaDesc | None:
    """The sizes of a model's MLA layers; None: it has none."""
    text = getattr(model_config, "hf_text_config", None)
    if not getattr(model_config, "use_mla", False) or not hasattr(text, "kv_lora_rank"):
        return None
    topk = getattr(text, "index_topk", 0) or 0
    return MlaDesc(text.kv_lora_rank, text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim, topk=topk,
                   absorb_in_core=absorbs(topk))


def absorbs(topk: int) -> bool:
    """Whether queries of an MLA layer come per head, so that libattn projects them."""
    from .versions import LATENT_QUERIES

    return not (topk and LATENT_QUERIES)


def mla_of_head(head_size: int, sparse: bool = False) -> MlaDesc:
    """The MLA sizes of the model that is being made; if it names none, DeepSeek's with latent rows of `head_size`."""
    found = mla_of(_model_config()) or MlaDesc(head_size - 64, 128, 64, 128, absorb_in_core=True)
    topk = (found.topk or 2048) if sparse else 0
    return replace(found, topk=topk, absorb_in_core=absorbs(topk))


def index(num_heads: int, head_size: int, topk: int, dtype: torch.dtype, block_size: int, **terms: Any) -> LayerDesc:
    """Describe the indexer of a sparse MLA layer: its queries are e4m3, whose scales are in the heads' weights. Whatever the rest of
    a batch, it gives the same lists."""
    if dtype not in DTYPES:
        raise make(Status.UNSUPPORTED, "dtype", f"{dtype}; supported: {', '.join(map(str, DTYPES))}")
    return LayerDesc("layers.0", num_heads, 1, head_size, 1.0, "indexer", DTYPES[dtype], "fp8_per_token_head", block_size=block_size,
                     q_dtype="fp8_e4m3", q_scale_form="per_tensor",
                     indexer=IndexerDesc(topk, activation="relu", has_weights=True), **terms)


def window_of(sliding_window: int | None, attn_type: str) -> Window:
    """vLLM counts the query's own position in a window of w."""
    if sliding_window is None or sliding_window <= 0:
        return None
    return (sliding_window - 1, sliding_window - 1 if attn_type in ("encoder", "encoder_only") else 0)


def layer(name: str, num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, *, scale: float = 0.0,
          head_size_v: int = 0, attn_type: str = "decoder", sliding_window: int | None = None,
          kv_cache_dtype: str | None = "auto", soft_cap: float | None = None, alibi: str = "none",
          has_sinks: bool = False, block_size: int | None = None, causal: bool | None = None,
          device_seq_lens_only: bool = False, batch_invariant: int = 0, chunk_lookback: int = -1,
          scales_per_head: bool = False, mla: MlaDesc | None = None, **terms: Any) -> LayerDesc:
    """Describe a layer; raises `libattn.UnsupportedError` where vLLM's word has no counterpart here.

    `mla` makes it a latent one; `terms` are fields of `LayerDesc`.
    """
    kind = KINDS.get(str(getattr(attn_type, "value", attn_type)))
    if kind is None:
        raise make(Status.UNSUPPORTED, "attn_type", f"'{attn_type}'; supported: {', '.join(KINDS)}")
    if dtype not in DTYPES:
        raise make(Status.UNSUPPORTED, "dtype", f"{dtype}; supported: {', '.join(map(str, DTYPES))}")
    kv_dtype = KV_DTYPES.get(kv_cache_dtype or "auto")
    if kv_dtype is None:
        raise make(Status.UNSUPPORTED, "kv_cache_dtype", f"'{kv_cache_dtype}'; supported: {', '.join(KV_DTYPES)}")
    cached = kind in ("decoder", "cross")
    scales: dict[str, Any] = {}
    attn_type = str(getattr(attn_type, "value", attn_type))
    if kv_dtype in SCALED and cached:
        form = "per_head" if scales_per_head else "per_tensor"
        scales = {"k_scale_form": form} if mla else {"k_scale_form": form, "v_scale_form": form}
    window = window_of(sliding_window, attn_type)
    if chunk_lookback > -1 and sliding_window:  # Triton's kernels: chunks in place of the window
        terms |= {"chunk_size": sliding_window // (chunk_lookback + 1), "chunk_lookback": chunk_lookback}
        window = None
    return LayerDesc(name, num_heads, num_kv_heads, head_size, scale, "mla" if mla else kind, DTYPES[dtype],
                     kv_dtype if cached else "auto", head_size_v=head_size_v,
                     causal=(kind == "decoder") if causal is None else causal,
                     window=window, mla=mla,
                     soft_cap=soft_cap or 0.0, alibi=alibi, has_sinks=has_sinks,
                     block_size=(block_size or 0) if cached else 0, device_seq_lens_only=device_seq_lens_only,
                     batch_invariant=batch_invariant, **scales, **terms)


def reasons(desc: LayerDesc) -> list[str]:
    """Why no backend serves a layer, one line per backend and phase; empty if one does."""
    try:
        found = store.runtime.select([desc], device=device(), keep_unserved=True)
    except AttnError as error:
        return str(error).split("\n  ")
    lines = []
    for phase in ("prefill", "decode"):
        if found.choice(0, phase).status:
            lines += [f"{phase}: {v.backend}: {v.verdict}: {'; '.join(map(str, v.reasons))}"
                      for v in found.verdicts(0, phase) if v.verdict != "other_device"] or [
                          f"{phase}: no backend is for {device()[0]}"]
    return lines


def refuse_unserved(desc: LayerDesc) -> None:
    """Raise the reasons why no backend serves a layer as the model has it: when it is made, before weights are loaded."""
    lines = reasons(desc)
    if lines:
        layer = (f"a layer of {desc.num_q_heads} heads, {desc.num_kv_heads} of keys, of {desc.head_size}, "
                 f"{'no window' if desc.window is None else f'window {desc.window}'}")
        raise make(Status.UNSUPPORTED, "layer", "\n  ".join([layer, *lines, ADVICE]))
