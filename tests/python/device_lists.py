# SPDX-License-Identifier: Apache-2.0
"""Lists of keys and indexers on a GPU next to vLLM's Triton kernels, in one process and over the same caches: each answer is held
against plain torch in float32 and against theirs, then both are timed as captured graphs, in turns. Without a folder, ours alone.

Not part of CI: it needs a GPU, torch with Triton, and vLLM's Python (0.26 has these kernels) in a folder. 77 without a GPU.

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device_lists.py FOLDER_WITH_VLLM
"""
from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import captured
import libattn
from captured import DEVICE, Graph, report
from common import one_layer, worst
from libattn import extensions

ON_CPU = DEVICE.type == "cpu"  # our half alone, with small sizes
PAGE, ROUNDS = 128, 7


def theirs(folder: str, path: str) -> Any:
    """A module of vLLM's, without the package around it."""
    import triton
    import triton.language as tl
    stubs = {"vllm": {}, "vllm.utils": {}, "vllm.utils.math_utils": {"round_up": lambda x, y: -(-x // y) * y},
             "vllm.platforms": {"current_platform": types.SimpleNamespace(is_arch_support_pdl=lambda: True)},
             "vllm.triton_utils": {"triton": triton, "tl": tl, "LOG2E": 1.4426950408889634, "LOGE2": 0.6931471805599453}}
    for name, members in stubs.items():
        sys.modules.setdefault(name, types.ModuleType(name)).__dict__.update(members)
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(folder) / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spoil(outputs: list[torch.Tensor]) -> None:
    for output in outputs:
        output.fill_(float("nan") if output.is_floating_point() else -7)


def compare(cell: str, ours: Callable[[], None], peer: Callable[[], None] | None, outputs: list[torch.Tensor],
            expected: Callable[[], torch.Tensor], error: Callable[[torch.Tensor, torch.Tensor], float], bound: float,
            apart: float | None = None) -> None:
    """Both run once before they are captured: what is compiled or loaded is there. outputs: ours, then the peer's, which may be
    another tensor after each call. apart: the bound of both against each other, if the peer is less precise."""
    for call in (ours, peer or ours):
        call()
    graphs = [Graph(call) for call in (ours, peer or ours)]
    spoil(outputs)
    for graph in graphs:
        graph.replay()
    report(cell, lambda: error(outputs[0], expected()), bound)
    if peer:
        report(f"{cell}, next to Triton", lambda: error(outputs[0], outputs[1]), apart or bound)
    if not ON_CPU:
        times = [[graph.microseconds() for graph in graphs] for _ in range(ROUNDS)]
        mine, other = (median(row[i] for row in times) for i in range(2))
        print(f"{cell}: libattn {mine:.1f} us, Triton {other:.1f} us, {other / mine:.2f}", flush=True)


def prepared(desc: libattn.LayerDesc, bind: Callable[[libattn.Layer], None], lengths: list[int], tables: torch.Tensor,
             ) -> tuple[libattn.Plan, libattn.Layer]:
    """A decode of one token of each request."""
    model, layer = one_layer(desc, "cpu_ref" if ON_CPU else "cuda_flash", DEVICE)
    bind(layer)
    count = len(lengths)
    plan = model.plan(0, max_num_reqs=count, max_num_tokens=count, max_seq_len=max(lengths))
    if plan.workspace_bytes:
        plan.bind_workspace(libattn.allocate(plan.workspace_bytes, DEVICE))
    starts = torch.arange(count + 1, dtype=torch.int32)
    slots = torch.full((count,), -1, dtype=torch.int64, device=DEVICE)
    batch = libattn.Batch(starts.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE), tables, slots,
                          query_start_loc_host=starts, max_query_len=1, max_seq_len=max(lengths))
    plan.update(batch)
    return plan, layer


def stream() -> int | None:
    return None if ON_CPU else torch.cuda.current_stream().cuda_stream


def random_tables(requests: int, blocks: int) -> torch.Tensor:
    return torch.randperm(requests * blocks, device=DEVICE).int().view(requests, blocks)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q: [heads, queries, dims]; k, v: [heads, keys, dims]."""
    return (q @ k.transpose(1, 2) * scale).softmax(-1) @ v


def msa(kernels: Any, requests: int, length: int) -> None:
    """MiniMax-M3's attention: 16 blocks of 128 keys, the query's own among them."""
    hq, hk, d, k = 64, 4, 128, 16
    blocks = length // PAGE
    cache = torch.empty(requests * blocks, hk, PAGE, 2 * d, dtype=torch.bfloat16, device=DEVICE).normal_()
    tables = random_tables(requests, blocks)
    lists = torch.rand(requests, hk, blocks - 1, device=DEVICE).topk(k - 1).indices.sort(-1).values.int()
    lists = torch.cat([lists, torch.full_like(lists[..., :1], blocks - 1)], -1).contiguous()
    q = torch.randn(requests, hq, d, device=DEVICE).bfloat16()
    out, other = torch.empty_like(q), torch.empty_like(q)
    desc = libattn.LayerDesc("msa", hq, hk, d, dtype="bf16", block_size=PAGE, lists=libattn.IndexLists(k, PAGE, "per_kv_head"))
    views = cache.transpose(1, 2)
    plan, layer = prepared(desc, lambda one: one.bind_kv_views(views[..., :d], views[..., d:]), [length] * requests, tables)
    given, lengths = lists.transpose(0, 1).contiguous(), torch.full((requests,), length, dtype=torch.int32, device=DEVICE)

    def expected() -> torch.Tensor:
        rows = [cache[tables[r][lists[r].long()].long(), torch.arange(hk, device=DEVICE)[:, None]].flatten(1, 2).float()
                for r in range(requests)]  # [heads, keys, 2 * dims] of each request
        queries = q.float().unflatten(1, (hk, hq // hk))
        return torch.cat([attend(queries[r], rows[r][..., :d], rows[r][..., d:], d**-0.5).flatten(0, 1)[None] for r in range(requests)])

    compare(f"MSA, {requests} x {length}",
            lambda: plan.run(layer, q, None, None, out, stream=stream(), flags=libattn.NO_WRITE,
                             extensions=[extensions.index_lists_io(lists)]),
            kernels and (lambda: kernels.minimax_m3_sparse_attn_decode(q, cache, given, tables, lengths, hk, d**-0.5, other, 1)),
            [out, other], expected, worst, 4e-2)


def index(kernels: Any, requests: int, length: int) -> None:
    """Its indexer: four heads with a list each, the best key of 128, the query's own block always."""
    heads, d, k = 4, 128, 16
    blocks = length // PAGE
    cache = torch.empty(requests * blocks, PAGE, d, dtype=torch.bfloat16, device=DEVICE).normal_()
    tables = random_tables(requests, blocks)
    q = torch.randn(requests, heads, d, device=DEVICE).bfloat16()
    out = torch.zeros(requests, heads, k, dtype=torch.int32, device=DEVICE)
    other = torch.zeros(heads, requests, k, dtype=torch.int32, device=DEVICE)
    desc = libattn.LayerDesc("index", heads, 1, d, kind="indexer", dtype="bf16", block_size=PAGE,
                             indexer=libattn.IndexerDesc(k, heads, rows_per_entry=PAGE, last_entries=1))
    plan, layer = prepared(desc, lambda one: one.bind_kv_views(cache[:, :, None], None), [length] * requests, tables)
    lengths = torch.full((requests,), length, dtype=torch.int32, device=DEVICE)

    def expected() -> torch.Tensor:
        best = torch.stack([(q[r].float() @ cache[tables[r].long()].float().flatten(0, 1).T).unflatten(1, (blocks, PAGE)).amax(-1)
                            for r in range(requests)])
        best[..., -1] = torch.inf
        return best.topk(k).indices

    def different(actual: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((actual.sort(-1).values != wanted.sort(-1).values).float().mean())

    compare(f"MSA's indexer, {requests} x {length}",
            lambda: plan.run(layer, q, None, None, out, stream=stream(), flags=libattn.NO_WRITE,
                             extensions=[extensions.indexer_io()]),
            kernels and (lambda: kernels.minimax_m3_index_decode(q, cache, tables, lengths, length, k, 0, 1, heads, 1, 1, out=other)),
            [out, other.transpose(0, 1)], expected, different, 1e-2)


def latent(kernels: Any, requests: int, length: int) -> None:
    """Lists over MLA, 128 heads; theirs takes slots of a plain array of rows."""
    heads, rank, rope, k = 128, 512, 64, min(2048, length // 2)
    blocks, scale = length // 64, 192**-0.5
    cache = torch.empty(requests * blocks, 64, rank + rope, dtype=torch.bfloat16, device=DEVICE).normal_()
    tables = random_tables(requests, blocks)
    lists = torch.rand(requests, length, device=DEVICE).topk(k).indices.sort(-1).values.int()
    slots = (tables.gather(1, (lists // 64).long()) * 64 + lists % 64)[:, None].contiguous()
    q = torch.randn(requests, heads, rank + rope, device=DEVICE).bfloat16()
    out = torch.empty(requests, heads, rank, dtype=torch.bfloat16, device=DEVICE)
    outputs = [out]
    desc = libattn.LayerDesc("mla", heads, 1, rank + rope, scale, "mla", head_size_v=rank, dtype="bf16", block_size=64,
                             mla=libattn.MlaDesc(rank, 128, rope, rank), lists=libattn.IndexLists(k))
    plan, layer = prepared(desc, lambda one: one.bind_kv_views(cache[:, :, None], None), [length] * requests, tables)
    given = lists[:, None].contiguous()

    def expected() -> torch.Tensor:
        rows = cache.view(-1, rank + rope)
        return torch.cat([attend(q[r][None].float(), rows[slots[r]].float(), rows[slots[r]][..., :rank].float(), scale)
                          for r in range(requests)])

    def peer() -> None:
        outputs[1:] = [kernels.triton_bf16_mla_sparse_interface(q, cache.view(-1, 1, rank + rope), slots, scale)[0]]

    compare(f"MLA lists, {requests} x {length}",
            lambda: plan.run(layer, None, None, None, out, stream=stream(), flags=libattn.NO_WRITE,
                             extensions=[extensions.mla_io(q[..., :rank], q[..., rank:]), extensions.index_lists_io(given)]),
            kernels and peer, outputs, expected, worst, 4e-2)


def main() -> int:
    folders = [arg for arg in sys.argv[1:] if arg != "cpu"]
    if not ON_CPU and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    torch.manual_seed(1)
    ops = "vllm/models/minimax_m3/common/ops/"
    for cell, path, requests, length in ((msa, ops + "sparse_attn.py", 64, 65536), (index, ops + "index_topk.py", 64, 131072),
                                         (latent, "vllm/v1/attention/ops/xpu_mla_sparse.py", 128, 4096)):
        sizes = (3, 4096) if ON_CPU else (requests, length)
        cell(theirs(folders[0], path) if folders else None, *sizes)
        if not ON_CPU:
            torch.cuda.empty_cache()
    return captured.failed > 0


if __name__ == "__main__":
    sys.exit(main())
