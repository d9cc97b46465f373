# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.16 for integrations/device.py: its engine with the scheduler in a process of its own, decodes captured."""
from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

os.environ.update(SGLANG_IS_FLASHINFER_AVAILABLE="false", SGLANG_ENABLE_JIT_DEEPGEMM="false")

#: The backend that speed is compared with; SGLang's norms know no float32 on a GPU.
REFERENCE, FLOAT32 = "fa3", ""
#: SGLang's own backends of a model; of FlashAttention-3 heads of 128 and 256 are packed alone.
OWN = {"llama": ("fa3", "triton"), "llama, drafts": ("triton",), "gemma-2": ("triton",), "qwen-2.5, fp8 cache": ("fa3", "triton"),
       "qwen3-next": ("fa3", "triton"), "deepseek-v3": ("triton",), "qwen3-next, states": ("fa3",), "llama, eagle": ("fa3",), "llama, eagle3": ("fa3",),
       "llama, eagle3 trees": ("triton",), "llama, draft model": ("fa3",), "deepseek-v3, mtp": ("triton",)}
#: Architectures of heads that draft.
HEADS = {"eagle": "LlamaForCausalLMEagle", "eagle3": "LlamaForCausalLMEagle3"}
#: SGLang's names of methods.
ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE", "mtp": "NEXTN"}
INVARIANT: dict[str, tuple[str, ...]] = {}

#: Tokens of a request, at most.
LONGEST = 131584


def start(folder: str, backend: str, dtype: str, cache: str, large: bool, gigabytes: float, drafts: int = 0,
          method: str = "ngram", branches: int = 1) -> Any:
    import sglang

    port = 12000 + os.getpid() % 10000  # each process has its own, outside of the range that the system assigns
    options: dict[str, Any] = {"load_format": "dummy", "context_length": LONGEST, "max_running_requests": 64,
                               "max_total_tokens": int(gigabytes * 2**30) // (32 * 8 * 128 * 2 * (2 if cache == "auto" else 1)),
                               "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64], "page_size": int(os.environ.get("ATTN_PAGE", 64))}
    if not large:  # requests of one token a page have the plain prefix cache
        options = {"context_length": 1024, "max_running_requests": 8, "max_total_tokens": 16384, "chunked_prefill_size": 256,
                   "cuda_graph_bs_decode": [1, 2, 4, 8], "page_size": 1 if cache == "auto" else 64, "disable_hybrid_swa_memory": True}
    if drafts:  # and the token that they follow
        options["speculative_num_draft_tokens"] = 1 + drafts
    if drafts and method == "ngram":
        # Trees need pages of one token.
        options.update(speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=1 if large else 2)
    elif drafts:  # by a model
        options.update(speculative_algorithm=ALGORITHMS[method], speculative_eagle_topk=branches, speculative_num_steps=3)
        if method != "mtp":
            options["speculative_draft_model_path"] = f"{folder}-head" if method in HEADS else folder
    if not large:  # a decode writes a state for the prefix cache at every 64th token
        options["mamba_track_interval"] = 64
    options["max_mamba_cache_size"] = 5 * options["max_running_requests"]  # models with states would take half of the memory
    with Path(folder, "..", "lock").open("w") as lock:
        if large:  # one after the other: SGLang finds its graphs' memory by the device's free memory
            fcntl.flock(lock, fcntl.LOCK_EX)
        return sglang.Engine(model_path=folder, attention_backend=backend, skip_tokenizer_init=True, random_seed=7, dtype=dtype,
                             kv_cache_dtype="fp8_e4m3" if cache == "fp8" else cache, mem_fraction_static=0.9, sampling_backend="pytorch",
                             grammar_backend="none", disable_prefill_cuda_graph=True, log_level="warning", skip_server_warmup=True,
                             stream_interval=200, port=port, nccl_port=port + 10000, **options)


def generate(made: Any, prompts: list[list[int]], count: int, **options: Any) -> Any:
    return made.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": count, "ignore_eos": True}, **options)


def chosen(made: Any, prompts: list[list[int]], count: int,
           counts: dict[str, list[int]] | None = None) -> list[tuple[list[int], list[float]]]:
    """The tokens after each prompt and their log-probabilities; to `counts`, how many tokens of each prompt the cache had, and steps of
    drafts."""
    found = generate(made, prompts, count, return_logprob=True)
    if counts is not None:
        for key, name in (("cached", "cached_tokens"), ("steps", "spec_verify_ct")):
            counts.setdefault(key, []).extend(int(done["meta_info"].get(name) or 0) for done in found)
    return [(list(done["output_ids"]), [row[0] for row in done["meta_info"]["output_token_logprobs"]]) for done in found]


def timed(made: Any, prompts: list[list[int]], count: int, own: bool) -> tuple[float, float, float]:
    """Seconds of all, and of a token after the first of the last request; tokens of a request's step."""
    if own:
        made.flush_cache()
    began = first = time.perf_counter()
    steps: dict[str, int] = {}
    for part in generate(made, prompts, count, stream=True):
        if part["meta_info"]["id"] not in steps:
            first = time.perf_counter()
        steps[part["meta_info"]["id"]] = part["meta_info"].get("spec_verify_ct") or count
    ended = time.perf_counter()
    return ended - began, (ended - first) / (count - 1), count * len(prompts) / sum(steps.values())


def memory(made: Any) -> dict[str, float]:
    """As SGLang counts it."""
    usage = made.get_server_info()["internal_states"][0]["memory_usage"]
    return {name: float(usage[name]) for name in ("weight", "kvcache", "graph")}
