# SPDX-License-Identifier: Apache-2.0
"""An engine on a GPU through libattn, next to its own backends; called by tools/device_engines.sh.

usage: device.py all FOLDER [ROUNDS [SECONDS [NAME...]]] | agree FOLDER MODEL DTYPE BACKEND | invariance FOLDER MODEL MODE BACKEND
       device.py serve BACKEND NAME GIB

`all`: agreement of each model, batch invariance, then speed in each row, or of the models and rows that are named ("batch invariance"
is one name); SECONDS after its start no further round begins. The others are its processes, of one engine each. The module `on_gpu` on
the path says how the engine is started and asked.

Agreement: the log-probabilities of the tokens that an engine chose, greedily, against those of Transformers' eager model in float32
with the same weights. The mean distance has to be within 1.2 times that of the best of the engine's own, or the largest in float32
within 1e-3 (vLLM's float32 has no MLA and no gated delta, an fp8 cache is compared in bfloat16, and experts in float32 differ by
vLLM's own products). `alike`: the part of the tokens that Transformers would choose. With drafts of a model `a step` is how many
tokens a step had, after the prefix cache of states `beyond` counts the second prompts that went on from inside of an answer: not less
than 0.9 times the engine's own.
Batch invariance: tokens and log-probabilities of requests alone, and among others in random order and with prompts in chunks, from an
empty prefix cache and from a full one, have the same bits. MODE `off`: the engine is not asked for that, and some differ.
Speed: Llama 3.1 8B's shape and a quarter of Qwen3-Next's with random weights, captured decodes, both engines alive, by turns; rows
"drafts": captured verifications of five tokens that followed each request's last ones before, most of which are right.
As many engines start at once as the GPU's memory holds. While a row is timed, those that still start or compare stand still.
"""
from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import on_gpu

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error")
os.environ.setdefault("OMP_NUM_THREADS", "2")  # eight engines start at once
import torch  # noqa: E402

COMMON = {"vocab_size": 512, "max_position_embeddings": 8192, "eos_token_id": 1, "num_hidden_layers": 4, "hidden_size": 512,
          "intermediate_size": 512, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
DEEPSEEK = {**COMMON, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 128,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 4, "moe_layer_freq": 1}
DEEPSEEK_DENSE = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
#: An indexer that leaves keys out of prompts of 700.
DEEPSEEK_SPARSE = {**DEEPSEEK, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 512,
                   "index_n_heads": 64, "index_head_dim": 128}
QWEN_NEXT_SMALL = {
    **COMMON, **HEADS, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "full_attention_interval": 4,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256}
LLAMA_SMALL = {**COMMON, **HEADS, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA_DRAFTED = {**LLAMA_SMALL, "num_key_value_heads": 1}  # as the head of EAGLE3 wants it
#: Cache, configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("auto", LLAMA_SMALL), "llama, drafts": ("auto", LLAMA_SMALL),
    "gemma-2": ("auto", {
        **COMMON, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 256, "sliding_window": 128, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}),
    "qwen-2.5, fp8 cache": ("fp8", {
        **COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2}),
    "gpt-oss": ("auto", {
        **COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 131072, "rope_theta": 150000.0, "hidden_act": "silu"}),
    "deepseek-v3": ("auto", DEEPSEEK_DENSE),
    "deepseek-v3.2": ("auto", DEEPSEEK_SPARSE), "deepseek-v3.2, indexer": ("auto", DEEPSEEK_SPARSE),
    "deepseek-v3.2, fp8_ds_mla": ("fp8_ds_mla", DEEPSEEK_SPARSE),
    "qwen3-next": ("auto", QWEN_NEXT_SMALL), "qwen3-next, drafts": ("auto", QWEN_NEXT_SMALL), "qwen3-next, mtp": ("auto", QWEN_NEXT_SMALL),
    "qwen3-next, states": ("auto", QWEN_NEXT_SMALL | {"num_experts_per_tok": 4}),  # none is chosen by a hair over a long text
    "llama, eagle": ("auto", LLAMA_DRAFTED), "llama, eagle3": ("auto", LLAMA_DRAFTED), "llama, eagle3 trees": ("auto", LLAMA_DRAFTED),
    "llama, draft model": ("auto", LLAMA_DRAFTED), "deepseek-v3, mtp": ("auto", DEEPSEEK_DENSE),
}
#: Options of some. Tokens drafted a step: from those so far, the request's in vLLM, all requests' in SGLang, as a tree; or by a model
#: (`method`: a head, the model's own layer or the model once more), in so many branches. libattn's indexer in place of vLLM's, where
#: libattn serves.
OPTIONS: dict[str, dict[str, Any]] = {
    "llama, drafts": {"drafts": 5}, "qwen3-next, drafts": {"drafts": 3}, "deepseek-v3.2, indexer": {"indexer": True},
    "llama, eagle": {"drafts": 3, "method": "eagle"}, "llama, eagle3": {"drafts": 3, "method": "eagle3"}, "llama, eagle3 trees": {"drafts": 7, "method": "eagle3", "branches": 3},
    "llama, draft model": {"drafts": 3, "method": "draft_model"}, "qwen3-next, mtp": {"drafts": 3, "method": "mtp"},
    "deepseek-v3, mtp": {"drafts": 3, "method": "mtp"}}
#: Whose second prompts go on after 70 tokens of the first answers, from states that decodes wrote for the prefix cache.
STATES = "qwen3-next, states"
LLAMA_8B = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
            "max_position_embeddings": 262144, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "eos_token_id": 1}
#: A quarter of Qwen3-Next's 48 layers, its experts but in one layer replaced by one wide product.
QWEN_NEXT = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
             "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936,
             "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mlp_only_layers": list(range(11)),
             "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
             "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "eos_token_id": 1}
#: Engines of rows: cache, KiB of it for a token (states included), GiB of all else, configuration.
TIMED: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "llama": ("auto", 128, 18, LLAMA_8B), "llama, fp8": ("fp8", 64, 18, LLAMA_8B), "qwen3-next": ("auto", 128, 8, QWEN_NEXT),
    # So few tokens that each request's last one was there before, and each step has drafts.
    "llama, drafts": ("auto", 128, 18, LLAMA_8B | {"vocab_size": 128})}
#: GiB for all engines that live at the same time.
MEMORY = 130
#: One of those, lengths of prompts, tokens of each, whether a round has prompts of its own (else they come from the prefix cache).
ROWS: dict[str, tuple[str, list[int], int, bool]] = {
    "64 x 1024": ("llama", [1024] * 64, 128, True), "8 x 8192": ("llama", [8192] * 8, 64, True), "1 x 1024": ("llama", [1024], 128, True),
    "32 mixed": ("llama", [128 * (n + 1) for n in range(32)], 64, True), "1 x 65536": ("llama", [65536], 64, False),
    "8 x 32768": ("llama", [32768] * 8, 64, False), "1 x 131072": ("llama", [131072], 64, False),
    "64 x 1024, fp8": ("llama, fp8", [1024] * 64, 128, True),
    "64 x 1024, drafts": ("llama, drafts", [1024] * 64, 128, True), "1 x 1024, drafts": ("llama, drafts", [1024], 128, True),
    "qwen3-next, 64 x 1024": ("qwen3-next", [1024] * 64, 128, True), "qwen3-next, 8 x 8192": ("qwen3-next", [8192] * 8, 64, True),
    "qwen3-next, 1 x 1024": ("qwen3-next", [1024], 128, True),
}
#: The name of the comparison of bits.
INVARIANCE = "batch invariance"


def agree(folder: Path, name: str, dtype: str, backend: str) -> None:
    """A line for one engine; the model's weights, the same for all, are made in `folder`."""
    from models import draft, invent, predict
    from transformers import AutoModelForCausalLM

    cache, config = MODELS[name]
    at = folder / f"{name.replace(', ', '-').replace(' ', '-')}-{dtype}-{backend}"
    invent(at, config, 0.05)
    options = {key: value for key, value in OPTIONS.get(name, {}).items() if backend == "libattn" or key != "indexer"}
    method = options.get("method")
    if method == "mtp":
        predict(at)
    elif method in on_gpu.HEADS:
        draft(Path(f"{at}-head"), at, on_gpu.HEADS[method], method == "eagle3")
    line: dict[str, Any] = {"model": name, "dtype": dtype, "backend": backend}
    counts: dict[str, list[int]] = {}
    counted = {"counts": counts} if method or name == STATES else {}
    ids = torch.randint(100, 400, (8, 700), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [ids[i][:n] for i, n in enumerate((5, 1, 700, 33, 130, 17, 300, 64))]
    try:
        made = on_gpu.start(str(at), backend, dtype, cache, False, 1, **options)
        rows = on_gpu.chosen(made, prompts, 80 if name == STATES else 40, **counted)
        again = [prompt + tokens[:70] + [99] for prompt, (tokens, _) in zip(prompts, rows)] if name == STATES else prompts
        rows += on_gpu.chosen(made, again, 40, **counted)  # from the prefix cache
    except Exception as error:  # noqa: BLE001
        print("@@" + json.dumps(line | {"error": str(error)[-300:]}), flush=True)
        raise
    model = AutoModelForCausalLM.from_pretrained(str(at), dtype=getattr(torch, dtype), attn_implementation="eager").float().cuda()
    found, alike = [], []
    with torch.no_grad():
        for prompt, (tokens, given) in zip(prompts + again, rows):
            logits = model(torch.tensor([prompt + tokens], device="cuda")).logits[0, -len(given) - 1:-1].double().log_softmax(-1)
            right = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu()
            found.append((right - torch.tensor(given, dtype=torch.float64)).abs())
            alike.append(logits.argmax(-1).cpu() == torch.tensor(tokens))
    apart = torch.cat(found)
    line["alike"] = float(torch.cat(alike).double().mean())
    if method:
        line["a step"] = 39 * len(rows) / sum(counts["steps"])
    elif counts:
        line["beyond"] = sum(map(int.__gt__, counts["cached"][len(prompts):], map(len, prompts)))
    if backend == "libattn":
        line["served"] = served()
    print("@@" + json.dumps(line | {"mean": float(apart.mean()), "most": float(apart.max())}), flush=True)


def invariance(folder: Path, name: str, mode: str, backend: str) -> None:
    """A line for one engine: how many of the requests among others had the bits of those alone."""
    from models import invent

    cache, config = MODELS[name]
    at = folder / f"{name}-{mode}-{backend}"
    invent(at, config, 0.05)
    made = on_gpu.start(str(at), backend, "bfloat16", cache, False, 1, invariant=mode == "on")
    ids = torch.randint(100, 400, (40, 900), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [row[:n] for row, n in zip(ids, (5, 1, 700, 33, 130, 17, 300, 64))]
    alone = []
    for prompt in prompts:
        on_gpu.forget(made)
        alone += on_gpu.chosen(made, [prompt], 40)
    same, apart = 0, 0.0
    for number in range(6):
        order = torch.Generator().manual_seed(number)
        others = [row[:n] for row, n in zip(ids[8:], torch.randint(1, 900, (32,), generator=order))]
        places = torch.randperm(len(prompts) + len(others), generator=order).tolist()
        if number % 2 == 0:
            on_gpu.forget(made)
        found = on_gpu.chosen(made, [(prompts + others)[place] for place in places], 40)
        for one, other in zip(alone, (found[places.index(r)] for r in range(len(prompts)))):
            same += one == other
            apart = max(apart, *(abs(a - b) for a, b in zip(one[1], other[1])))
    line = {"model": name, "mode": mode, "backend": backend, "same": same, "of": 6 * len(prompts), "apart": apart}
    print("@@" + json.dumps(line | ({"served": served()} if backend == "libattn" else {})), flush=True)


def served() -> list[str]:
    """The kinds of the layers that ran, where the engine is in this process."""
    from libattn.torch import table

    return sorted({row.kind for row in table()})


def serve(backend: str, name: str, gigabytes: str) -> None:
    """An engine that answers lines of a row's name and a round's number with its times."""
    cache, _, _, config = TIMED[name]
    folder = Path("timed") / f"{backend}-{name.replace(', ', '-')}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = on_gpu.start(str(folder), backend, "bfloat16", cache, True, int(gigabytes), **OPTIONS.get(name, {}))

    def answer(**values: Any) -> None:
        print("@@" + json.dumps(values), flush=True)

    answer(memory=on_gpu.memory(made))
    for line in sys.stdin:
        name, number = json.loads(line)
        _, lengths, count, own = ROWS[name]
        generator = torch.Generator().manual_seed(number if own else 0)
        prompts = [torch.randint(0, min(config["vocab_size"], 128000), (n,), generator=generator).tolist() for n in lengths]
        taken, token, step = on_gpu.timed(made, prompts, count, own)
        answer(rate=len(lengths) * count / taken, token=token * 1000, step=step, memory=on_gpu.memory(made))


class Process:
    """One of this program's, whose answers begin with @@."""

    alive: ClassVar[list[Process]] = []

    def __init__(self, limit: float, *arguments: str) -> None:
        self.log = open(f"{'-'.join(a.replace(' ', '_') for a in arguments if '/' not in a)}.log", "w")
        self.process = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, text=True, start_new_session=True)
        self.limit = limit
        self.watch()
        self.alive.append(self)

    def watch(self) -> None:
        """One that hangs does not keep the others waiting."""
        self.timer = threading.Timer(self.limit, self.signal, [signal.SIGKILL])
        self.timer.daemon = True
        self.timer.start()

    def stop(self) -> None:
        """Until `go_on`; its time does not pass."""
        self.timer.cancel()
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)
        self.watch()

    def signal(self, number: int) -> None:
        """To it and its children."""
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, number)

    def read(self) -> dict[str, Any] | None:
        """The next answer; None: it ended."""
        for line in self.process.stdout:
            self.log.write(line)
            if line.startswith("@@"):
                self.log.flush()  # what was answered stays where a later one never comes
                return json.loads(line[2:])
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
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.process.stdin.close()
        self.process.wait()
        self.timer.cancel()
        self.alive.remove(self)


def spread(values: list[float]) -> str:
    middle = sorted(values)[len(values) // 2]
    return f"{middle:.4g} ({min(values):.4g}-{max(values):.4g})"


class Comparison:
    """What one call of `all` starts, and when no further round begins."""

    def __init__(self, folder: str, rounds: int, seconds: float, names: list[str]) -> None:
        self.folder, self.rounds, self.began, self.seconds, self.failed = folder, rounds, time.monotonic(), seconds, 0
        self.rows = [name for name in names or ROWS if name in ROWS]
        self.waiting = list(dict.fromkeys(ROWS[row][0] for row in self.rows))
        self.servers: dict[str, dict[str, Process]] = {}

    def left(self) -> float:
        return self.began + self.seconds - time.monotonic()

    def cache(self, name: str) -> int:
        """GiB that the longest of its rows takes, or one request of the longest that the engine is started for."""
        tokens = max(sum(ROWS[row][1]) + len(ROWS[row][1]) * ROWS[row][2] for row in self.rows if ROWS[row][0] == name)
        return 2 + max(tokens, on_gpu.LONGEST) * TIMED[name][1] // 2**20

    def start(self) -> None:
        """Engines of the next rows, both of each, as long as there is room."""
        def gigabytes(name: str) -> int:
            return 2 * (TIMED[name][2] + self.cache(name))

        while self.waiting and (not self.servers or sum(map(gigabytes, [*self.servers, self.waiting[0]])) <= MEMORY):
            name = self.waiting.pop(0)
            self.servers[name] = {backend: Process(3600, "serve", backend, name, str(self.cache(name)))
                                  for backend in (on_gpu.REFERENCE, "libattn")}

    def ask(self, what: str, engines: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
        """A line for each as it ends."""
        def one(engine: tuple[str, str, str]) -> dict[str, Any]:
            process = Process(max(self.left(), 1) + 60, what, self.folder, *engine)
            name, how, backend = engine
            line = {"model": name, "dtype" if what == "agree" else "mode": how, "backend": backend}
            line |= process.read() or {"error": "its process ended"}
            process.close()
            print(json.dumps(line), flush=True)
            return line

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, engines))

    def compare_bits(self) -> None:
        """Whether libattn's do not depend on the batch, and do where the engine was not asked for it."""
        engines = [(name, "on", backend) for name, theirs in on_gpu.INVARIANT.items() for backend in ("libattn", *theirs)]
        for line in self.ask("invariance", [*engines, *((name, "off", "libattn") for name in on_gpu.INVARIANT)]):
            if line["backend"] == "libattn" and (line.get("same") == line.get("of", -1)) != (line["mode"] == "on"):
                self.failed += 1
                print(f"FAILED batch invariance of {line['model']}, {line['mode']}", flush=True)

    def agree(self, engines: list[tuple[str, str, str]]) -> None:
        """Whether libattn's are right."""
        lines = self.ask("agree", engines)
        for line in (line for line in lines if line["backend"] == "libattn"):
            kind = line["model"], line["dtype"]
            own = [other["mean"] for other in lines if (other["model"], other["dtype"]) == kind and other is not line and "mean" in other]
            kept = all(line.get(key, 0) > 0.9 * max(other.get(key, 0) for other in lines if other["model"] == line["model"])
                       for key in ("a step", "beyond") if key in line)
            near = line.get("mean", 1) <= 1.2 * min(own, default=0) or (line["dtype"] == "float32" and line.get("most", 1) <= 1e-3)
            if not (kept and near):
                self.failed += 1
                print(f"FAILED {kind}", flush=True)
        print(f"agreement after {time.monotonic() - self.began:.0f} s", flush=True)

    def compare(self, name: str, row: str) -> None:
        """A line for each engine: the median of the rounds and their range."""
        servers = self.servers[name]
        found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in servers}
        others: list[Process] = []
        try:
            for number in range(self.rounds + 1):
                if self.left() < 0 and number > 1:
                    break
                for backend in list(servers)[::1 if number % 2 else -1]:
                    answer = servers[backend].ask(row, number)
                    if number:  # the first warms up
                        found[backend].append(answer)
                if not others:
                    others = [other for other in Process.alive if other not in servers.values()]
                    for other in others:
                        other.stop()
        finally:
            for other in others:
                other.go_on()
        for backend, answers in found.items():
            memory = ", ".join(f"{value:.2f} {key}" for key, value in answers[-1]["memory"].items())
            print(f"{row}, {backend}: {spread([a['rate'] for a in answers])} tokens/s, {spread([a['token'] for a in answers])} ms a token, "
                  f"{spread([a['step'] for a in answers])} tokens a step, {len(answers)} rounds, GiB {memory}", flush=True)

    def time(self) -> None:
        """All rows, engine by engine."""
        while self.servers:
            name = next(iter(self.servers))
            started = json.dumps({backend: server.read() for backend, server in self.servers[name].items()})
            print(f"{name}: after {time.monotonic() - self.began:.0f} s, GiB at the start {started}", flush=True)
            for row in (row for row in self.rows if ROWS[row][0] == name):
                try:
                    self.compare(name, row)
                except (OSError, RuntimeError) as error:
                    self.failed += 1
                    print(f"FAILED {row}: {error}", flush=True)
            for server in self.servers.pop(name).values():
                server.close()
            self.start()


def stop(*_: Any) -> None:
    """All engines: they are sessions of their own."""
    for process in list(Process.alive):
        process.signal(signal.SIGKILL)
    os._exit(1)


def everything(folder: str, rounds: int, seconds: float, names: list[str]) -> int:
    unknown = [name for name in names if name not in (*ROWS, *on_gpu.OWN, INVARIANCE)]
    if unknown or rounds < 1:
        print(f"device.py: {unknown}, {rounds} rounds; models are {', '.join(on_gpu.OWN)}; rows are {', '.join(ROWS)}; also {INVARIANCE}; "
              "1 round or more", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    comparison = Comparison(folder, rounds, seconds, names)
    comparison.start()
    engines = [(name, dtype, backend) for name, theirs in on_gpu.OWN.items() if name in (names or on_gpu.OWN)
               for dtype in ("float32", "bfloat16") for backend in ("libattn", *theirs)
               if dtype == "bfloat16" or (MODELS[name][0] == "auto" and on_gpu.FLOAT32 and backend in ("libattn", on_gpu.FLOAT32)
                                          and not {"kv_lora_rank", "linear_num_key_heads"} & MODELS[name][1].keys())]
    comparisons = [threading.Thread(target=comparison.agree, args=[engines])]
    if INVARIANCE in (names or [INVARIANCE]):
        comparisons.append(threading.Thread(target=comparison.compare_bits))
    for thread in comparisons:
        thread.start()
    comparison.time()
    for thread in comparisons:
        thread.join()
    print(f"ended after {time.monotonic() - comparison.began:.0f} s, {comparison.failed} failed", flush=True)
    return min(comparison.failed, 1)


def main() -> int:
    what, *rest = sys.argv[1:]
    if what == "agree":
        agree(Path(rest[0]), *rest[1:])
    elif what == "invariance":
        invariance(Path(rest[0]), *rest[1:])
    elif what == "serve":
        serve(*rest)
    elif what == "all":
        return everything(rest[0], int(rest[1]) if len(rest) > 1 else 5, float(rest[2]) if len(rest) > 2 else 3600, rest[3:])
    else:
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
