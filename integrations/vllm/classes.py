# SPDX-License-Identifier: Apache-2.0
"""The adapter inside vLLM's own classes, for what no model on a CPU reaches: its attention layer and operator, metadata
and configuration with images' ranges, vision towers, a fused output and full CUDA graphs. The replay of a captured forward is played
by running the operator again with the metadata that `build` gave.

usage: classes.py MODEL    (a folder with a config.json)
"""
from __future__ import annotations

import sys
from typing import Any

import torch

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 8, 2, 64, 16, 12


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """One request in float64, by the definition."""
    k, v = (t.double().repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * SIZE**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v).flatten(1)


def common(query_lens: list[int], seq_lens: list[int], tables: torch.Tensor, **more: Any) -> Any:
    """vLLM's metadata of a batch."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)]).int()
    slots = [int(tables[r, p // BLOCK]) * BLOCK + p % BLOCK for r, (n, length) in enumerate(zip(query_lens, seq_lens))
             for p in range(length - n, length)]
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(seq_lens).int(),
        num_reqs=len(query_lens), num_actual_tokens=sum(query_lens), max_query_len=max(query_lens),
        max_seq_len=max(seq_lens), block_table_tensor=tables, slot_mapping=torch.tensor(slots), **more)


class Layer:
    """A layer of vLLM's, its cache and its builder."""

    def __init__(self, config: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        self.config, self.name = config, f"model.layers.{len(config.compilation_config.static_forward_context)}.attn"
        with set_current_vllm_config(config):
            self.layer = Attention(HEADS, SIZE, SIZE**-0.5, num_kv_heads=KV_HEADS, prefix=self.name,
                                   cache_config=config.cache_config)
        assert type(self.layer.impl).__name__ == "LibattnImpl", self.layer.impl
        self.layer.kv_cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
        self.spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
        self.builder = self.layer.get_attn_backend().get_builder_cls()(self.spec, [self.name], config,
                                                                       torch.device("cpu"))

    def run(self, metadata: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype = torch.float32,
            scale: torch.Tensor | None = None) -> torch.Tensor:
        """The operator that models and fused graphs call."""
        from vllm.forward_context import set_forward_context
        from vllm.utils.torch_utils import _encode_layer_name

        out = torch.empty(q.shape[0], HEADS * SIZE, dtype=dtype)
        with set_forward_context({self.name: metadata}, self.config):
            torch.ops.vllm.unified_attention_with_output(q, k, v, out, _encode_layer_name(self.name),
                                                         output_scale=scale)
        return out


def near(actual: torch.Tensor, expected: torch.Tensor, bound: float, what: str) -> None:
    worst = float((actual.double() - expected).abs().max() / expected.abs().max())
    assert worst < bound, f"{what}: {worst}"
    print(f"{what}: right, worst {worst:.1e} of the largest")


def rows(count: int) -> list[torch.Tensor]:
    return [2 * torch.randn(count, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def main() -> None:
    from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic
    from vllm.v1.attention.backend import AttentionCGSupport

    torch.manual_seed(5)
    config: VllmConfig = EngineArgs(sys.argv[1], dtype="float32", attention_backend="CUSTOM", enforce_eager=True,
                                    skip_tokenizer_init=True).create_engine_config()
    assert isinstance(config.model_config, ModelConfig)
    tables = torch.randperm(BLOCKS)[:12].reshape(3, 4).int()

    images = Layer(config)
    images.layer.use_mm_prefix = True
    lengths, ranges = [20, 33], {0: [(3, 11)], 1: [(0, 4), (9, 30)]}
    q, k, v = rows(sum(lengths))
    metadata = images.builder.build(0, common(lengths, lengths, tables[:2], mm_req_doc_ranges=ranges))
    out, at = images.run(metadata, q, k, v), 0
    for r, n in enumerate(lengths):
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        for first, last in ranges[r]:
            visible[first:last + 1, first:last + 1] = True
        near(out[at:at + n], attend(q[at:at + n], k[at:at + n], v[at:at + n], visible), 2e-6, f"images of request {r}")
        at += n

    starts = torch.tensor([0, 20, 53]).int()
    with set_current_vllm_config(config):
        tower = MMEncoderAttention(HEADS, SIZE, num_kv_heads=KV_HEADS, prefix="visual.blocks.1.attn")
    assert type(tower).__name__ == "LibattnTowerAttention" and tower.serves, tower
    with torch.inference_mode():
        out = tower(*(t.flatten(1)[None] for t in (q, k, v)), cu_seqlens=starts, max_seqlen=torch.tensor(33))[0]
    for a, b in zip(starts, starts[1:]):
        near(out[a:b], attend(q[a:b], k[a:b], v[a:b], torch.ones(b - a, b - a, dtype=torch.bool)), 2e-6, "a vision tower")

    fused = Layer(config)
    assert fused.layer.impl.fused_output_quant_supported(kFp8StaticTensorSym)
    assert fused.layer.impl.fused_output_quant_supported(kNvfp4Dynamic)
    metadata = fused.builder.build(0, common(lengths, lengths, tables[:2]))
    plain, scale = fused.run(metadata, q, k, v), torch.tensor([0.02])
    eighth = fused.run(metadata, q, k, v, torch.float8_e4m3fn, scale)
    wanted = (plain / scale).clamp(-448, 448)
    assert bool(((eighth.float() - wanted).abs() <= wanted.abs() / 16 + 2**-10).all()), "fused fp8"
    assert float((eighth.float() == wanted.to(torch.float8_e4m3fn).float()).double().mean()) > 0.999
    print("fused fp8 output: right")

    for mode, level in ((CUDAGraphMode.NONE, "never"), (CUDAGraphMode.PIECEWISE, "never"),
                        (CUDAGraphMode.FULL, "uniform_batch"), (CUDAGraphMode.FULL_DECODE_ONLY, "uniform_batch"),
                        (CUDAGraphMode.FULL_AND_PIECEWISE, "uniform_batch")):
        config.compilation_config.cudagraph_mode = mode
        config.compilation_config.static_forward_context.clear()
        captured = Layer(config)
        assert captured.builder.steps.graph_level == level, (mode, captured.builder.steps.graph_level)
        assert captured.builder.get_cudagraph_support(config, captured.spec) is AttentionCGSupport.UNIFORM_BATCH
    batch = common([1, 1, 1], [1, 1, 1], tables)
    assert captured.builder.build_for_cudagraph_capture(batch).captured == (3, 3, 1)
    caches = [rows(40)[1:] for _ in range(2)]
    for r, (keys, values) in enumerate(caches):
        for p in range(40):
            captured.layer.kv_cache[tables[r, p // BLOCK], :, p % BLOCK] = torch.cat([keys[p], values[p]], -1)
    for lengths in ([17, 33], [18, 34]):  # and a request of padding
        slots = [int(tables[r, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK for r, n in enumerate(lengths)]
        for buffer, now in ((batch.query_start_loc, [0, 1, 2, 2]), (batch.seq_lens, [*lengths, 0]),
                            (batch.slot_mapping, [*slots, -1])):
            buffer.copy_(torch.tensor(now))
        batch.max_seq_len = max(lengths)
        metadata = captured.builder.build(0, batch)
        assert metadata.captured == (3, 3, 1)
        q = rows(3)[0]
        k, v = (torch.stack([caches[r][i][n - 1] for r, n in enumerate(lengths)] + [caches[0][i][0]]) for i in (0, 1))
        out = captured.run(metadata, q, k, v)
        for r, n in enumerate(lengths):
            near(out[r:r + 1], attend(q[r:r + 1], caches[r][0][:n], caches[r][1][:n], torch.ones(1, n, dtype=torch.bool)),
                 2e-6, f"captured step, {n} keys")


if __name__ == "__main__":
    main()
