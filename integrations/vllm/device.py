# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on a GPU through libattn, next to vLLM's own backends; called by tools/device_vllm.sh.

usage: device.py all FOLDER [ROUNDS [SECONDS]] | agree FOLDER MODEL DTYPE BACKEND | serve BACKEND CACHE

`all`: agreement of each model, then speed; SECONDS after its start no further round begins. `agree` and `serve` are its
processes, of one engine each.

Agreement: the log-probabilities of the tokens that an engine chose, greedily, against those of Transformers' eager model in float32
with the same weights. The mean distance has to be within 1.2 times that of the best of vLLM's own, or the largest in float32 within
1e-3 (vLLM's float32 has no MLA, an fp8 cache is compared in bfloat16, and experts in float32 differ by vLLM's own products).
Speed: Llama 3.1 8B's shape with random weights, captured decodes, both engines alive, by turns.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0",
                  VLLM_LOGGING_LEVEL="WARNING", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
import torch  # noqa: E402

COMMON = {"vocab_size": 512, "max_position_embeddings": 2048, "eos_token_id": 1, "num_hidden_layers": 4, "hidden_size": 512,
          "intermediate_size": 512, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
#: Cache, vLLM's own backends, configuration.
MODELS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "llama": ("auto", ("FLASH_ATTN", "TRITON_ATTN"), {
        **COMMON, **HEADS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}),
    "gemma-2": ("auto", ("FLASH_ATTN", "TRITON_ATTN"), {
        **COMMON, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 256, "sliding_window": 128, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh"}),
    "qwen-2.5, fp8 cache": ("fp8", ("FLASH_ATTN", "TRITON_ATTN"), {
        **COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gpt-oss": ("auto", ("FLASH_ATTN", "TRITON_ATTN"), {
        **COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 131072, "rope_theta": 150000.0, "hidden_act": "silu"}),
    "deepseek-v3": ("auto", ("FLASH_ATTN_MLA", "TRITON_MLA"), {
        **COMMON, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "first_k_dense_replace": 4}),
}
LLAMA_8B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "eos_token_id": 1}
#: Lengths of prompts, tokens of each, whether a round has prompts of its own (else they come from the prefix cache).
ROWS: dict[str, tuple[list[int], int, bool]] = {
    "64 x 1024": ([1024] * 64, 128, True), "8 x 8192": ([8192] * 8, 64, True), "1 x 1024": ([1024], 128, True),
    "32 mixed": ([128 * (n + 1) for n in range(32)], 64, True), "1 x 65536": ([65536], 64, False),
}


def engine(folder: str, backend: str, **options: Any) -> Any:
    """vLLM's, its decodes captured."""
    from vllm import LLM

    from libattn.integrations.vllm import register

    register()
    return LLM(folder, attention_backend="CUSTOM" if backend == "libattn" else backend, skip_tokenizer_init=True, seed=7,
               disable_log_stats=False, compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **options.pop("graphs", {})},
               **options)


def chosen(folder: str, backend: str, dtype: str, cache: str) -> list[tuple[list[int], list[float]]]:
    """All tokens of each request, prompts first, and the log-probabilities of those that were chosen; each prompt twice."""
    from vllm import SamplingParams

    made = engine(folder, backend, dtype=dtype, kv_cache_dtype=cache, max_model_len=1024, kv_cache_memory_bytes=1 << 30,
                  max_num_batched_tokens=256, max_num_seqs=8, gpu_memory_utilization=0.1, graphs={"cudagraph_capture_sizes": [1, 2, 4, 8]})
    ids = torch.randint(100, 400, (8, 700), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [{"prompt_token_ids": ids[i][:n]} for i, n in enumerate((5, 1, 700, 33, 130, 17, 300, 64))]
    limits = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False, logprobs=1)
    found = []
    for _ in range(2):
        for prompt, done in zip(prompts, made.generate(prompts, limits, use_tqdm=False)):
            out = done.outputs[0]
            tokens = list(out.token_ids)
            found.append((prompt["prompt_token_ids"] + tokens, [row[t].logprob for row, t in zip(out.logprobs, tokens)]))
    return found


def agree(folder: Path, name: str, dtype: str, backend: str) -> None:
    """A line for one engine; the model's weights, the same for all, are made in `folder`."""
    from models import invent
    from transformers import AutoModelForCausalLM

    cache, _, config = MODELS[name]
    at = folder / f"{config['model_type']}-{dtype}-{backend}"
    invent(at, config, 0.05)
    line: dict[str, Any] = {"model": name, "dtype": dtype, "backend": backend}
    try:
        rows = chosen(str(at), backend, dtype, cache)
    except Exception as error:  # noqa: BLE001
        print("@@" + json.dumps(line | {"error": str(error)[-300:]}), flush=True)
        raise
    model = AutoModelForCausalLM.from_pretrained(str(at), dtype=getattr(torch, dtype), attn_implementation="eager").float().cuda()
    found = []
    with torch.no_grad():
        for tokens, given in rows:
            logits = model(torch.tensor([tokens], device="cuda")).logits[0, -len(given) - 1:-1].double().log_softmax(-1)
            right = logits.gather(1, torch.tensor(tokens[-len(given):], device="cuda")[:, None])[:, 0].cpu()
            found.append((right - torch.tensor(given, dtype=torch.float64)).abs())
    apart = torch.cat(found)
    print("@@" + json.dumps(line | {"mean": float(apart.mean()), "most": float(apart.max())}), flush=True)


def serve(backend: str, cache: str) -> None:
    """An engine that answers lines of a row's name and a round's number with its times."""
    from vllm import SamplingParams

    folder = Path("llama-8b")
    folder.mkdir(exist_ok=True)
    (folder / f"{backend}-{cache}").mkdir(exist_ok=True)
    (folder / f"{backend}-{cache}" / "config.json").write_text(json.dumps(LLAMA_8B))
    made = engine(str(folder / f"{backend}-{cache}"), backend, dtype="bfloat16", kv_cache_dtype=cache, load_format="dummy",
                  max_model_len=66560, kv_cache_memory_bytes=12 << 30 if cache == "auto" else 6 << 30, max_num_seqs=256,
                  gpu_memory_utilization=0.1)

    def answer(**values: Any) -> None:
        print("@@" + json.dumps(values), flush=True)

    def memory() -> dict[str, float]:
        return {"allocated": torch.cuda.memory_allocated() / 2**30, "reserved": torch.cuda.memory_reserved() / 2**30,
                "most": torch.cuda.max_memory_allocated() / 2**30}

    answer(**memory())
    for line in sys.stdin:
        name, number = json.loads(line)
        lengths, count, own = ROWS[name]
        generator = torch.Generator().manual_seed(number if own else 0)
        prompts = [{"prompt_token_ids": torch.randint(0, 128000, (n,), generator=generator).tolist()} for n in lengths]
        limits = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        done = made.generate(prompts, limits, use_tqdm=False)
        taken = time.perf_counter() - began
        token = (max(d.metrics.last_token_ts for d in done) - max(d.metrics.first_token_ts for d in done)) / (count - 1)
        answer(rate=len(lengths) * count / taken, token=token * 1000, **memory())


class Process:
    """One of this program's, whose answers begin with @@."""

    def __init__(self, *arguments: str) -> None:
        self.log = open(f"{'-'.join(a.replace(' ', '_') for a in arguments if '/' not in a)}.log", "w")
        self.process = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True)
        if arguments[0] == "agree":  # one that hangs must not keep the others waiting
            timer = threading.Timer(120, self.process.kill)
            timer.daemon = True
            timer.start()

    def read(self) -> dict[str, Any] | None:
        """The next answer; None: it ended."""
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
            self.log.write(line)
        self.process.wait()
        return None

    def ask(self, row: str, number: int) -> dict[str, Any]:
        self.process.stdin.write(json.dumps([row, number]) + "\n")
        self.process.stdin.flush()
        found = self.read()
        if found is None:
            raise RuntimeError(f"{self.log.name}: the engine ended")
        return found

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def spread(values: list[float]) -> str:
    middle = sorted(values)[len(values) // 2]
    return f"{middle:.4g} ({min(values):.4g}-{max(values):.4g})"


def compare(servers: dict[str, Process], row: str, rounds: int, until: float, cache: str) -> None:
    """A line for each engine: the median of the rounds and their range."""
    found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in servers}
    for number in range(rounds + 1):
        if time.monotonic() > until and number > 1:
            break
        for backend in list(servers)[::1 if number % 2 else -1]:
            answer = servers[backend].ask(row, number)
            if number:  # the first warms up
                found[backend].append(answer)
    for backend, answers in found.items():
        print(f"{row}, cache {cache}, {backend}: {spread([a['rate'] for a in answers])} tokens/s, "
              f"{spread([a['token'] for a in answers])} ms a token, {len(answers)} rounds, GiB "
              f"{answers[-1]['allocated']:.2f} allocated, {answers[-1]['reserved']:.2f} reserved, {answers[-1]['most']:.2f} most",
              flush=True)


def everything(folder: str, rounds: int, seconds: float) -> int:
    began, failed = time.monotonic(), 0
    servers = {cache: {backend: Process("serve", backend, cache) for backend in ("FLASH_ATTN", "libattn")} for cache in ("auto", "fp8")}
    engines = [(name, dtype, backend) for name, (cache, theirs, config) in MODELS.items() for dtype in ("float32", "bfloat16")
               for backend in ("libattn", *theirs)
               if dtype == "bfloat16" or (cache == "auto" and backend in ("libattn", "TRITON_ATTN") and "kv_lora_rank" not in config)]
    with ThreadPoolExecutor(6) as pool:
        lines = dict(zip(engines, pool.map(lambda engine: Process("agree", folder, *engine).read() or {}, engines)))
    for (name, dtype, backend), line in lines.items():
        print(json.dumps(line), flush=True)
        if backend != "libattn":
            continue
        own = [other["mean"] for (n, d, b), other in lines.items() if (n, d) == (name, dtype) and b != backend and "mean" in other]
        right = line.get("mean", 1) <= 1.2 * min(own, default=0) or (dtype == "float32" and line.get("most", 1) <= 1e-3)
        if not right:
            failed += 1
            print(f"FAILED {name} {dtype}", flush=True)
    print(f"agreement after {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    for cache, both in servers.items():
        print(f"cache {cache}: GiB at the start", json.dumps({backend: server.read() for backend, server in both.items()}), flush=True)
    for cache, row in (("auto", "64 x 1024"), ("fp8", "64 x 1024"), *(("auto", row) for row in list(ROWS)[1:])):
        try:
            compare(servers[cache], row, rounds, began + seconds, cache)
        except (OSError, RuntimeError) as error:
            failed += 1
            print(f"FAILED {row}, cache {cache}: {error}", flush=True)
    for both in servers.values():
        for server in both.values():
            server.close()
    print(f"ended after {time.monotonic() - began:.0f} s", flush=True)
    return min(failed, 1)


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "agree":
        agree(Path(rest[0]), *rest[1:])
    elif what == "serve":
        serve(*rest)
    elif what == "all":
        return everything(rest[0], int(rest[1]) if len(rest) > 1 else 5, float(rest[2]) if len(rest) > 2 else 3600)
    else:
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
