# SPDX-License-Identifier: Apache-2.0
"""libattn for Python: one ABI between inference engines and attention kernels.

    runtime = libattn.Runtime()
    layer = libattn.LayerDesc("layers.0", num_q_heads=32, num_kv_heads=8, head_size=128, dtype="bf16")
    assignment = runtime.select([layer])          # raises with all reasons if nothing can serve it
    model = runtime.bind(assignment)
    model.layers[0].bind_kv(memory, num_blocks)   # memory from torch, NumPy, … : nothing is copied
    plan = model.plan(max_num_reqs=8, max_num_tokens=2048)
    plan.bind_workspace(workspace)
    plan.update(batch)                            # once per step
    plan.run(model.layers[0], q, k, v, out)       # once per layer

Objects close themselves. Closed by hand in any order, each lives until what was made of it is gone.
"""
from . import abi, extensions
from ._declarations import (BatchMode, DeviceType, GraphLevel, KvDtype, KvLayout, KvSpecKind, LayerKind, Phase,
                            PlanMode, Status, VerdictCode)
from ._library import Library, open_library
from .collectives import Collectives
from .errors import (AbsentError, AttnError, InvalidArgumentError, OrderError, OutOfMemoryError, UnsupportedError)
from .layers import (ContextParallel, EncoderQuant, GdnDesc, IndexLists, IndexerDesc, LayerDesc, MlaDesc, RecurrentNorm, RecurrentRounding,
                     RecurrentRule)
from .layout import layout_convert, layout_id, layout_text
from .memory import allocate
from .model import KvSpec, KvView, Layer, Model
from .runtime import BackendInfo, DeviceInfo, PluginInfo, Runtime
from .scheduling import batch_order, context_parallel_length, context_parallel_slots
from .selection import Assignment, Choice, Reason, Verdict
from .step import NO_ATTEND, NO_WRITE, Batch, Plan
from .tensors import Rows, Tensor, as_tensor

__version__ = "0.1.0"  # meson.build's, by test

__all__ = [
    "NO_ATTEND", "NO_WRITE", "abi", "AbsentError", "Assignment", "AttnError", "BackendInfo", "Batch", "BatchMode", "Choice",
    "Collectives", "ContextParallel", "DeviceInfo", "DeviceType", "EncoderQuant", "GdnDesc", "GraphLevel", "IndexLists", "IndexerDesc", "InvalidArgumentError", "KvDtype",
    "KvLayout", "KvSpec", "KvSpecKind", "KvView", "Layer", "LayerDesc", "LayerKind", "Library", "MlaDesc", "Model", "OrderError", "OutOfMemoryError",
    "Phase", "Plan", "PlanMode", "PluginInfo", "Reason", "RecurrentNorm", "RecurrentRounding", "RecurrentRule", "Rows", "Runtime", "Status", "Tensor", "UnsupportedError",
    "Verdict", "VerdictCode", "allocate", "as_tensor", "batch_order", "context_parallel_length",
    "context_parallel_slots", "extensions", "layout_convert", "layout_id", "layout_text", "open_library",
]
