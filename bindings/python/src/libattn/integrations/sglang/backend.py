# SPDX-License-Identifier: Apache-2.0
"""SGLang's attention backend: extend, decode, mixed and idle batches over its token pool.

Written against the published interface of SGLang 0.5.23. Speculative verification, encoder lengths, hybrid
sliding-window pools, MLA and graph capture are refused with a reason; linear attention (GDN) stays SGLang's own, which
puts its own backend next to this one.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ..._declarations import Status
from ...errors import make
from ...layers import LayerDesc
from ...step import NO_WRITE, Batch
from ...torch import run_pages
from ...torch.store import DTYPES

KV_DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float8_e4m3fn: "fp8_e4m3",
             torch.float8_e5m2: "fp8_e5m2"}


@dataclass(eq=False)
class Step:
    """One step's batch; layers that run with the same object share its plan."""

    batch: Batch
    num_tokens: int


def _refuse(field: str, asked: Any, supported: str) -> None:
    raise make(Status.UNSUPPORTED, field, f"{asked}; supported: {supported}")


class LibattnBackend(AttentionBackend):
    """One per model runner.

    Parameters
    ----------
    runner : ModelRunner
        For its pools and page size.
    """

    needs_cpu_seq_lens: bool = True

    def __init__(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if getattr(runner, "use_mla_backend", False):
            _refuse("use_mla_backend", True, "no (MLA is not carried by libattn's SGLang adapter)")
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        if getattr(self.token_to_kv_pool, "swa_layer_nums", 0):
            _refuse("token_to_kv_pool", "a hybrid pool with sliding layers of their own", "one pool for all layers "
                    "(--disable-hybrid-swa-memory)")
        self.page_size = int(getattr(runner, "page_size", 1) or 1)
        self.chunk_size = int(getattr(runner, "attention_chunk_size", None) or 0)  # Llama 4's layers with `use_irope`
        self.forward_metadata: Step | None = None

    # Metadata: both the eager entry and the newer pair.
    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.init_forward_metadata_out_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Read the batch; it is planned when the first layer of each description runs."""
        if in_capture:
            self.init_cuda_graph_state(0, 0)
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if getattr(forward_batch, "spec_info", None) is not None:
            _refuse("spec_info", type(forward_batch.spec_info).__name__, "no speculative batches")
        if getattr(forward_batch, "encoder_lens", None) is not None:
            _refuse("encoder_lens", "cross attention", "decoders without an encoder")
        lengths = _numbers(forward_batch, "seq_lens")
        queries = np.ones_like(lengths) if mode.is_decode() else _numbers(forward_batch, "extend_seq_lens")
        self.forward_metadata = self._step(forward_batch, queries, lengths)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is recorded: there is no capture."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        _refuse("cuda_graph", f"capture of {max_bs} requests", "eager steps (--disable-cuda-graph)")

    def init_forward_metadata_capture_cuda_graph(self, *args: Any, **kwargs: Any) -> None:
        """Of older releases."""
        self.init_cuda_graph_state(0, 0)

    init_forward_metadata_replay_cuda_graph = init_forward_metadata_capture_cuda_graph

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return True

    def _step(self, forward_batch: Any, queries: np.ndarray, lengths: np.ndarray) -> Step:
        table = self.req_to_token_pool.req_to_token
        device, page = table.device, self.page_size
        width = max(1, int(-(-lengths.max(initial=1) // page)))
        rows = table[forward_batch.req_pool_indices.long(), :width * page:page]
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        host = lengths.astype(np.int32)
        slots = forward_batch.out_cache_loc.to(torch.int64)
        batch = Batch(torch.from_numpy(starts).to(device), torch.from_numpy(host).to(device),
                      (rows // page).to(torch.int32).contiguous(), slots[:int(starts[-1])],
                      query_start_loc_host=torch.from_numpy(starts), seq_lens_host=torch.from_numpy(host),
                      max_seq_len=int(host.max(initial=1)))
        return Step(batch, int(starts[-1]))

    def forward_extend(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any,
                       forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any) -> torch.Tensor:
        return self._run(q, k, v, layer, save_kv_cache, kwargs)

    forward_decode = forward_mixed = forward_extend

    def _describe(self, layer: Any, dtype: torch.dtype, kv_dtype: torch.dtype, has_sinks: bool) -> LayerDesc:
        kind = str(getattr(layer.attn_type, "value", layer.attn_type))
        # decoder_bidirectional is causal but for an image's tokens, whose places do not come here.
        if layer.is_cross_attention or kind not in ("decoder", "encoder_only"):
            _refuse("attn_type", "cross" if layer.is_cross_attention else kind, "decoder, encoder_only")
        if dtype not in DTYPES or kv_dtype not in KV_DTYPES:
            _refuse("dtype", f"{dtype} with a cache of {kv_dtype}", f"{', '.join(map(str, KV_DTYPES))}")
        if getattr(layer, "xai_temperature_len", -1) > 0:
            _refuse("xai_temperature_len", layer.xai_temperature_len, "-1")
        if layer.pos_encoding_mode != "NONE":
            _refuse("pos_encoding_mode", layer.pos_encoding_mode, "NONE")
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            _refuse("logit_capping_method", layer.logit_capping_method, "tanh")
        # SGLang's window counts the keys before the query's own.
        window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        if window > -1 and kind != "decoder":
            _refuse("sliding_window_size", f"{window} of {kind}", "-1, and windows of decoders")
        scales: dict[str, Any] = {}
        if KV_DTYPES[kv_dtype].startswith("fp8"):
            scales = {"k_scale_form": "per_tensor", "v_scale_form": "per_tensor"}
        return LayerDesc("layers.0", layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.scaling,
                         "decoder", DTYPES[dtype], KV_DTYPES[kv_dtype], head_size_v=layer.v_head_dim,
                         causal=kind == "decoder", window=(window, 0) if window > -1 else None,
                         chunk_size=self.chunk_size if layer.use_irope else 0,
                         soft_cap=float(layer.logit_cap or 0.0), has_sinks=has_sinks, block_size=self.page_size,
                         **scales)

    def _run(self, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, layer: Any, save_kv_cache: bool,
             kwargs: dict[str, Any]) -> torch.Tensor:
        sinks = kwargs.pop("sinks", None)
        for name, value in kwargs.items():
            if value is not None and value is not False:
                _refuse(name, type(value).__name__, "no (not known to libattn's SGLang adapter)")
        step = self.forward_metadata
        if step is None:
            raise make(Status.ORDER, "init_forward_metadata", "a layer runs and no batch was given")
        pages = []
        for get in (self.token_to_kv_pool.get_key_buffer, self.token_to_kv_pool.get_value_buffer):
            buffer = get(layer.layer_id)
            whole = buffer.shape[0] // self.page_size * self.page_size
            pages.append(buffer[:whole].view(-1, self.page_size, *buffer.shape[1:]))
        desc = self._describe(layer, q.dtype, pages[0].dtype, sinks is not None)
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(rows.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        writes = save_kv_cache and k is not None and v is not None
        new = (k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)) \
            if writes else (None, None)
        params: list[tuple[str, Any]] = [] if sinks is None else [("sinks", sinks)]
        if desc.k_scale_form != "none":
            params += [("k_scale", float(layer.k_scale_float or 1.0)), ("v_scale", float(layer.v_scale_float or 1.0))]
        if rows.shape[0] > step.num_tokens:  # padded to a size that the engine likes
            step.batch.struct.num_tokens = rows.shape[0]
            out[step.num_tokens:] = 0
        run_pages(desc, layer.layer_id, tuple(params), rows, *new, out, *pages, lambda: step.batch, step,
                  0 if writes else NO_WRITE)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _numbers(forward_batch: Any, name: str) -> np.ndarray:
    """Lengths on the host: the engine's own copy where there is one."""
    host = getattr(forward_batch, f"{name}_cpu", None)
    values = host if host is not None else getattr(forward_batch, name)
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values, dtype=np.int64)
