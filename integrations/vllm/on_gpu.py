# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.26 for integrations/device.py: its decodes captured, in this process."""
from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_LOGGING_LEVEL="WARNING")

#: The backend that speed is compared with, and the one that knows float32.
REFERENCE, FLOAT32 = "FLASH_ATTN", "TRITON_ATTN"
#: vLLM's own backends of a model.
OWN = {"llama": ("FLASH_ATTN", "TRITON_ATTN"), "llama, drafts": ("FLASH_ATTN",), "gemma-2": ("FLASH_ATTN", "TRITON_ATTN"), "qwen-2.5, fp8 cache": ("FLASH_ATTN", "TRITON_ATTN"),
       "gpt-oss": ("FLASH_ATTN", "TRITON_ATTN"), "deepseek-v3": ("FLASH_ATTN_MLA", "TRITON_MLA"),
       "deepseek-v3.2": ("FLASH_ATTN_MLA_SPARSE",), "deepseek-v3.2, indexer": ("FLASH_ATTN_MLA_SPARSE",), "deepseek-v3.2, fp8_ds_mla": ("FLASHMLA_SPARSE",), "qwen3-next": ("FLASH_ATTN",),
       "qwen3-next, drafts": ("FLASH_ATTN",), "llama, eagle": ("FLASH_ATTN",), "llama, eagle3": ("FLASH_ATTN",), "qwen3-next, mtp": ("FLASH_ATTN",),
       "deepseek-v3, mtp": ("FLASH_ATTN_MLA",)}
#: Architectures of heads that draft.
HEADS = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}
#: Models whose bits must not depend on the batch, and vLLM's own backends that have that mode: none for gated delta layers.
INVARIANT = {"llama": ("FLASH_ATTN", "TRITON_ATTN"), "deepseek-v3": ("FLASH_ATTN_MLA",), "qwen3-next": ()}

#: Tokens of a request, at most.
LONGEST = 131584


def compile_in_threads() -> None:
    """Triton compiles all forms of a kernel that it is about to time at once, in place of one after the other: a hundred for gated
    delta layers."""
    from concurrent.futures import ThreadPoolExecutor

    import triton
    from triton.runtime.autotuner import Autotuner

    prune_configs, pool = Autotuner.prune_configs, ThreadPoolExecutor(8)

    def compiled(self: Any, kwargs: dict[str, Any]) -> Any:
        found = prune_configs(self, kwargs)
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for config in found:
                self.fn.run(*self.nargs.values(), **{**kwargs, "warmup": True}, **config.all_kwargs())
        return found

    Autotuner.prune_configs = compiled


def norms_by_torch(graphs: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine whose bits must not depend on the batch: in 0.26 those of vLLM's own norm do, since it adds up a row in
    another order from 256 tokens a step on (vllm#48271, mended in 0.33). With torch.compile these norms are vLLM's default."""
    graphs["custom_ops"] = ["-rms_norm"]
    return {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}}


def start(folder: str, backend: str, dtype: str, cache: str, large: bool, gigabytes: float, drafts: int = 0,
          indexer: bool = False, invariant: bool = False, method: str = "ngram") -> Any:
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(invariant))
    from vllm import LLM

    from libattn.integrations.vllm import register

    register()
    compile_in_threads()
    graphs: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    options: dict[str, Any] = {"load_format": "dummy", "max_model_len": LONGEST, "max_num_seqs": 256}
    graphs["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 32, 64]
    if not large:
        options = {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 8}
        graphs["cudagraph_capture_sizes"] = [1, 2, 4, 8]
    if drafts:  # whole steps of all requests are captured
        graphs["cudagraph_capture_sizes"] = [(1 + drafts) * n for n in graphs["cudagraph_capture_sizes"]]
        options["speculative_config"] = {"method": method, "num_speculative_tokens": drafts}
        if method == "ngram":
            options["speculative_config"] |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
            options["enable_prefix_caching"] = False
        else:  # vLLM chooses another backend for it else
            options["speculative_config"] |= {"attention_backend": "CUSTOM" if backend == "libattn" else backend} | (
                {"model": f"{folder}-head"} if method in HEADS else {})
            # Next to drafts libattn serves no prefix cache of states, which 0.26 turns on.
            options["enable_prefix_caching"] = "linear_num_key_heads" not in json.loads(Path(folder, "config.json").read_text())
    if invariant:
        options |= {"mamba_ssm_cache_dtype": "float32", **norms_by_torch(graphs)}
    return LLM(folder, attention_backend="CUSTOM" if backend == "libattn" else backend, skip_tokenizer_init=True, seed=7,
               additional_config={"gdn_prefill_backend": "triton",  # vLLM's own layers, without FlashInfer
                                  **({"libattn": {"indexer": True}} if indexer else {})},
               disable_log_stats=False, compilation_config=graphs, dtype=dtype, kv_cache_dtype=cache,
               kv_cache_memory_bytes=int(gigabytes * 2**30), gpu_memory_utilization=0.1, **options)


def generate(made: Any, prompts: list[list[int]], count: int, **options: Any) -> Any:
    from vllm import SamplingParams

    limits = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **options)
    return made.generate([{"prompt_token_ids": ids} for ids in prompts], limits, use_tqdm=False)


def chosen(made: Any, prompts: list[list[int]], count: int,
           counts: dict[str, list[int]] | None = None) -> list[tuple[list[int], list[float]]]:
    """The tokens after each prompt and their log-probabilities; to `counts`, how many tokens of each prompt the cache had, and steps of
    drafts, all so far."""
    done = generate(made, prompts, count, logprobs=1)
    if counts is not None:
        counts.setdefault("cached", []).extend(one.num_cached_tokens or 0 for one in done)
        counts["steps"] = [counted(made, "vllm:spec_decode_num_drafts")]
    found = []
    for one in done:
        tokens = list(one.outputs[0].token_ids)
        found.append((tokens, [row[t].logprob for row, t in zip(one.outputs[0].logprobs, tokens)]))
    return found


def counted(made: Any, name: str) -> int:
    """What the engine has counted so far."""
    return sum(int(one.value) for one in made.get_metrics() if one.name == name)


def forget(made: Any) -> None:
    """The prefix cache."""
    made.reset_prefix_cache()


def timed(made: Any, prompts: list[list[int]], count: int, own: bool) -> tuple[float, float, float]:
    """Seconds of all, and of a token after the first; tokens of a request's step."""
    accepted = "vllm:spec_decode_num_accepted_tokens"
    before, began = counted(made, accepted), time.perf_counter()
    done = generate(made, prompts, count)
    taken, tokens = time.perf_counter() - began, count * len(prompts)
    return (taken, (max(d.metrics.last_token_ts for d in done) - max(d.metrics.first_token_ts for d in done)) / (count - 1),
            tokens / (tokens - counted(made, accepted) + before))


def memory(made: Any) -> dict[str, float]:
    import torch

    return {"allocated": torch.cuda.memory_allocated() / 2**30, "reserved": torch.cuda.memory_reserved() / 2**30,
            "most": torch.cuda.max_memory_allocated() / 2**30}
