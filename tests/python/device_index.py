# SPDX-License-Identifier: Apache-2.0
"""vLLM's indexer through the adapter on a GPU, where vLLM itself is not: the tests of test_vllm_index there, with 64 heads, and times
of a captured step next to torch's own operators over the same cache, with DeepSeek-V3.2's sizes.

Not part of CI: it needs a GPU and torch. From the root, with a build in build/ (and after python3 bindings/python/generate.py
where another machine built it); 77 without a GPU:

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device_index.py
"""
from __future__ import annotations

import os
import sys
import types
import unittest
from typing import Any
from unittest import mock

import torch

import libattn.torch
import test_vllm as recorded
from captured import Graph

os.environ["ATTN_TEST_DEVICE"] = "cuda"
import test_vllm_index as subject  # noqa: E402

#: Entries that have to be the same: torch's products are rounded to bfloat16, which decides where scores are close.
SAME = 0.99
TOPK, SIZE, HEADS, BLOCK = 2048, subject.SIZE, subject.HEADS, subject.BLOCK


def plain(pages: torch.Tensor, tables: torch.Tensor, q: torch.Tensor, weights: torch.Tensor, length: int) -> torch.Tensor:
    """The same lists, in another order, of one query for each request, by torch: rows in bfloat16 and their products."""
    rows = pages[tables.long()].flatten(2).view(len(tables), -1, BLOCK * (SIZE + 4))
    keys = rows[..., :BLOCK * SIZE].view(torch.float8_e4m3fn).to(torch.bfloat16).reshape(len(tables), -1, SIZE)
    scales = rows[..., BLOCK * SIZE:].contiguous().view(torch.float32).view(len(tables), -1)
    dots = torch.bmm(q.to(torch.bfloat16), keys.transpose(1, 2)).relu()
    scores = torch.bmm(weights.to(torch.bfloat16)[:, None], dots)[:, 0].float() * scales
    return scores[:, :length].topk(min(TOPK, length)).indices


def times(requests: int, length: int, case: subject.Indexers) -> bool:
    """Decodes of requests of one length; whether enough entries are torch's."""
    torch.manual_seed(1)
    config = case.configure(TOPK, indexer=True)
    config.model_config.max_model_len = length
    config.scheduler_config.max_num_seqs = config.scheduler_config.max_num_batched_tokens = requests
    one, blocks = case.indexer(TOPK), -(-length // BLOCK)
    one.k_cache.kv_cache = pages = torch.empty(requests * blocks, BLOCK, SIZE + 4, dtype=torch.uint8, device="cuda")
    view = subject.rows_of(pages, SIZE)
    view.data.copy_(torch.randn(view.data.shape, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8))
    view.scale.uniform_(0.5, 1.5)
    spec = types.SimpleNamespace(block_size=BLOCK, num_kv_heads=1, head_size=SIZE + 4)
    builder = one.k_cache.get_attn_backend().get_builder_cls()(spec, [one.k_cache.prefix], config, torch.device("cuda"))
    tables = torch.randperm(requests * blocks).view(requests, blocks).int()
    m = subject.metadata([1] * requests, [length] * requests, tables)
    tables = tables.cuda()
    generator = torch.Generator().manual_seed(1)
    q, weights = case.inputs(requests, generator)
    new = torch.randn(requests, SIZE, device="cuda").bfloat16()

    def step(metadata: Any) -> None:
        recorded.step_metadata[0] = {one.k_cache.prefix: metadata}
        case.call(subject.model.sparse_attn_indexer, one, q, weights, new)

    step(builder.build(0, m))
    metadata = builder.build_for_cudagraph_capture(m)
    ours = Graph(lambda: step(metadata))
    builder.build(0, m)
    ours.replay()
    found = one.topk_indices_buffer[:requests, :TOPK].clone()
    theirs = plain(pages, tables, q, weights, length)
    same = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(found, theirs)) / theirs.numel()
    graph = Graph(lambda: plain(pages, tables, q, weights, length))
    print(f"{requests} x {length}: libattn {ours.microseconds():.1f} us, torch {graph.microseconds():.1f} us, "
          f"{100 * same:.2f} % of the entries the same, {100 * SAME:g} are needed", flush=True)
    return same >= SAME


def main() -> int:
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(unittest.defaultTestLoader.loadTestsFromModule(subject))
    libattn.torch.configure(ignore_environment=True)
    good = result.wasSuccessful()
    for requests, length in ((1, 8192), (32, 8192), (32, 32768)):
        with mock.patch.object(recorded, "BLOCK", BLOCK):
            good &= times(requests, length, subject.Indexers())
    for row in libattn.torch.table():
        print(f"layer {row.index} {row.kind}: {row.prefill}, {row.decode}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
