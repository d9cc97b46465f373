# SPDX-License-Identifier: Apache-2.0
"""What the first use of cuda_flash costs a process that PyTorch has given a context, in milliseconds, median (least, most):

    first_use.py [PROCESSES]

`open`: libattn loaded, backends and devices probed; `bind`: a layer of Llama 3.1 8B selected and bound; `attend`: its plan and its first step,
a prompt of 1024 tokens; `graph`: a plan of a decode, captured without a step before it, and its first replay; `layer`: binding
a second layer of another dtype and head size. The library is the one of build/core, the plugin the one
that ATTN_PLUGIN_PATH names.
"""
from __future__ import annotations

import statistics
import subprocess
import sys
import time


def once() -> None:
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    times = [time.perf_counter()]

    def stop() -> None:
        torch.cuda.synchronize()
        times.append(time.perf_counter())

    import libattn

    def bind(size: int, dtype: str) -> libattn.Model:
        desc = libattn.LayerDesc("layer", 32, 8, size, dtype=dtype, block_size=16)
        model = runtime.bind(runtime.select([desc], backend="cuda_flash", device="cuda"))
        layer = model.layers[0]
        layer.bind_kv(libattn.allocate(256 * layer.kv_spec.padded_page_bytes, device="cuda"), 256)
        return model

    def plan_of(queries: int, keys: int) -> tuple[libattn.Plan, list[torch.Tensor]]:
        plan = model.plan(0, max_num_reqs=1, max_num_tokens=queries, max_seq_len=keys)
        if plan.workspace_bytes:
            plan.bind_workspace(libattn.allocate(plan.workspace_bytes, device="cuda"))
        host = [torch.tensor(x, dtype=torch.int32) for x in ([0, queries], [keys])]
        table = torch.arange(256, dtype=torch.int32).view(1, 256)
        slots = torch.arange(keys - queries, keys)
        batch = libattn.Batch(*(x.cuda() for x in (*host, table, slots)), query_start_loc_host=host[0], seq_lens_host=host[1])
        plan.update(batch, torch.cuda.current_stream())
        q, k, v = (torch.randn(queries, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
        return plan, [q, k, v, torch.empty_like(q)]

    runtime = libattn.Runtime()
    stop()
    model = bind(128, "bf16")
    stop()
    plan, tensors = plan_of(1024, 1024)
    plan.run(model.layers[0], *tensors, stream=torch.cuda.current_stream())
    stop()
    plan, tensors = plan_of(1, 1025)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(model.layers[0], *tensors, stream=torch.cuda.current_stream())
    graph.replay()
    stop()
    bind(64, "f16")
    stop()
    print(*((after - before) * 1e3 for before, after in zip(times, times[1:])))


def main() -> None:
    if sys.argv[1:] == ["once"]:
        once()
        return
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    rows = [[float(x) for x in subprocess.run([sys.executable, __file__, "once"], check=True, capture_output=True, text=True)
             .stdout.split()] for _ in range(processes)]
    for name, column in zip(("open", "bind", "attend", "graph", "layer"), zip(*rows)):
        print(f"{name:8}{statistics.median(column):7.1f} ({min(column):.1f}, {max(column):.1f})")


if __name__ == "__main__":
    main()
