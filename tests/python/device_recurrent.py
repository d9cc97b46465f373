# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers on a GPU next to vLLM's Triton kernels (flash-linear-attention's and Mamba's), in one process: each answer is held
against the recurrence in float32 and against theirs, then both are timed as captured graphs, in turns. Without a folder, ours alone.
Inputs are those after the convolution. Our times include the gates; theirs of gated delta take ready gates.

Not part of CI: it needs a GPU, torch with Triton, and vLLM's Python (0.26) in a folder. 77 without a GPU.

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device_recurrent.py FOLDER_WITH_VLLM
"""
from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

import captured
import libattn
from captured import DEVICE
from common import one_layer
from device_lists import ON_CPU, compare, stream
from libattn import extensions

#: Slots before the first request's: vLLM's kernels take slot 0 for padding.
FIRST = 1


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of an element, relative to its row's root mean square. Sums of a row may cancel, so that it counts as at least a
    tenth of that of all rows."""
    actual, expected = actual.double(), expected.double()
    squares = expected.pow(2).mean(-1, keepdim=True)
    return float(((actual - expected).abs() / squares.clamp_min(squares.mean() / 100).sqrt()).max())


def package(folder: str) -> None:
    """vLLM's modules are found in `folder`, without what its packages do when they are imported."""
    import triton
    import triton.language as tl
    sys.path.append(folder)  # packages that they use
    names = ("vllm", "vllm.third_party", "vllm.utils", "vllm.model_executor", "vllm.model_executor.layers",
             "vllm.model_executor.layers.mamba")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(folder, *name.split(".")))]
    platform = types.SimpleNamespace(is_cuda_alike=lambda: not ON_CPU, is_xpu=lambda: False, is_rocm=lambda: False, is_cuda=lambda: not ON_CPU,
                                     is_cpu=lambda: ON_CPU)
    register = types.SimpleNamespace(register=lambda name: lambda cls: cls)
    custom_op = type("CustomOp", (torch.nn.Module,), {"register": staticmethod(register.register)})
    libdevice = getattr(importlib.import_module("triton.language.extra"), "libdevice", None)
    stubs: dict[str, dict[str, Any]] = {
        "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True},
        "vllm.platforms": {"current_platform": platform}, "vllm.model_executor.custom_op": {"CustomOp": custom_op},
        "vllm.logger": {"init_logger": lambda name: types.SimpleNamespace(warning_once=print)}, "vllm._custom_ops": {},
        "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm.utils.platform_utils": {"num_compute_units": lambda index: 132, "get_device_name_as_file_name": lambda: "none"},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
    }
    for name, members in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(members)
        if name.count(".") == 1:
            setattr(sys.modules["vllm"], name.split(".")[1], sys.modules[name])


def theirs(name: str) -> Any:
    return importlib.import_module(f"vllm.{name}")


class Cell:
    """A layer of libattn and inputs of `requests` times `tokens` tokens."""

    def __init__(self, requests: int, tokens: int, desc: libattn.GdnDesc, rule: libattn.RecurrentRule | None, scale: float) -> None:
        self.requests, self.tokens, self.desc, self.scale = requests, tokens, desc, scale
        total, hk, hv, dk, dv = requests * tokens, desc.num_k_heads, desc.num_v_heads, desc.head_size_k, desc.head_size_v
        self.q, self.k = (torch.randn(total, hk, dk, device=DEVICE).bfloat16() for _ in range(2))
        self.v = torch.randn(total, hv, dv, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.v)
        self.state = torch.zeros(FIRST + requests, hv, dv, dk, device=DEVICE)
        self.first_state = torch.randn(requests, hv, dv, dk, device=DEVICE) * (tokens == 1)
        self.starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * tokens
        self.slots = torch.arange(FIRST, FIRST + requests, dtype=torch.int32, device=DEVICE)
        self.state[FIRST:] = self.first_state
        layer = libattn.LayerDesc("recurrent", hk, hk, dk, kind="recurrent", head_size_v=dv, dtype="bf16", gdn=desc, rule=rule, scale=scale)
        self.model, self.layer = one_layer(layer, "cpu_ref" if ON_CPU else "cuda_flash", DEVICE)
        self.layer.bind_state(self.state, None)

    def call(self, weights: list[Any], a: torch.Tensor, b: torch.Tensor | None) -> Callable[[], None]:
        self.layer.bind_params(extensions=weights)
        total = self.requests * self.tokens
        self.plan = self.model.plan(0, max_num_reqs=self.requests, max_num_tokens=total, max_seq_len=self.tokens + 1)
        if self.plan.workspace_bytes:
            self.plan.bind_workspace(libattn.allocate(self.plan.workspace_bytes, DEVICE))
        lengths = torch.full((self.requests,), self.tokens + (self.tokens == 1), dtype=torch.int32)
        self.plan.update(libattn.Batch(self.starts, lengths.to(DEVICE), query_start_loc_host=self.starts.cpu(), seq_lens_host=lengths,
                                       max_query_len=self.tokens, max_seq_len=int(lengths[0]),
                                       extensions=[extensions.gdn_batch(self.slots)]))
        io = extensions.gdn_io(a, b)
        return lambda: self.plan.run(self.layer, self.q, self.k, self.v, self.out, stream=stream(), extensions=[io])

    def recurrence(self, g: torch.Tensor, beta: torch.Tensor, delta: bool, normed: bool, peers: bool) -> torch.Tensor:
        """g [T, Hv] or [T, Hv, Dk] is a logarithm, beta [T, Hv]. Steps of one token go on from the state of the call before:
        `compare` runs each side twice, and ours four times without a peer."""
        heads, shape = self.desc.num_v_heads // self.desc.num_k_heads, (self.requests, self.tokens)
        q, k, v, g, beta = (x.float().unflatten(0, shape) for x in (self.q, self.k, self.v, g, beta))
        q, k = (x.repeat_interleave(heads, 2) for x in (q, k))
        if normed:
            q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        state, out = self.first_state.clone(), torch.empty_like(v)
        for _ in range(1 if self.tokens > 1 else 2 if peers else 4):
            for t in range(self.tokens):
                decay = g[:, t].exp()
                state *= decay[..., None, None] if decay.dim() == 2 else decay[:, :, None]
                row = v[:, t] - torch.einsum("rhvk,rhk->rhv", state, k[:, t]) if delta else v[:, t]
                state += torch.einsum("rhv,rhk->rhvk", row * beta[:, t, :, None], k[:, t])
                out[:, t] = torch.einsum("rhvk,rhk->rhv", state, q[:, t]) * self.scale
        return out.flatten(0, 1)

    def compare(self, name: str, ours: Callable[[], None], peer: Callable[[], torch.Tensor] | None, expected: Callable[[], torch.Tensor]) -> None:
        outputs = [self.out]

        def other() -> None:
            outputs[1:] = [peer().view_as(self.out)]

        compare(f"{name}, {self.requests} x {self.tokens}", ours, peer and other, outputs, expected, worst, 4e-2, 0.3)


def delta(peers: bool, requests: int, tokens: int, per_channel: bool, heads: int, value_heads: int) -> None:
    """Gated delta and KDA."""
    dims = 128
    cell = Cell(requests, tokens, libattn.GdnDesc(heads, value_heads, dims, dims, qk_l2norm=True),
                libattn.RecurrentRule(gate_per_channel=True) if per_channel else None, dims**-0.5)
    total, channels = requests * tokens, dims if per_channel else 1
    a, b = torch.randn(total, value_heads * channels, device=DEVICE).bfloat16(), torch.randn(total, value_heads, device=DEVICE).bfloat16()
    a_log, bias = torch.randn(value_heads, device=DEVICE) * 0.5, torch.randn(value_heads * channels, device=DEVICE) - 3
    g = -a_log.exp()[:, None] * functional.softplus(a.float() + bias).view(total, value_heads, channels)
    g, beta = (g if per_channel else g[..., 0]), b.float().sigmoid()
    q, k, v, gates, write = (x[None] for x in (cell.q, cell.k, cell.v, g, beta))
    state = cell.first_state.clone()
    if not peers:
        peer = None
    elif per_channel and tokens > 1:
        kernel = theirs("third_party.flash_linear_attention.ops.kda").chunk_kda_with_fused_gate
        raw = a.view(1, total, value_heads, dims)
        # it writes its output over v, so its time has a copy
        peer = lambda: kernel(q, k, v.clone(), raw, write, a_log, bias, None, state, True, True, cell.starts)[0]  # noqa: E731
    elif per_channel:
        kernel = theirs("third_party.flash_linear_attention.ops.kda").fused_recurrent_kda
        own = cell.state.clone()
        peer = lambda: kernel(q, k, v, gates, write, None, own, True, True, cell.starts, cell.slots)[0]  # noqa: E731
    elif tokens > 1:
        kernel = theirs("third_party.flash_linear_attention.ops.chunk").chunk_gated_delta_rule
        peer = lambda: kernel(q, k, v, gates, write, None, state, True, cell.starts, use_qk_l2norm_in_kernel=True)[0]  # noqa: E731
    else:
        kernel = theirs("third_party.flash_linear_attention.ops.fused_recurrent").fused_recurrent_gated_delta_rule
        own = cell.state.clone()
        peer = lambda: kernel(q, k, v, gates, write, None, own, True, cell.starts, cell.slots, None, True)[0]  # noqa: E731
    cell.compare("KDA" if per_channel else "gated delta", cell.call([extensions.gdn_weights(a_log, bias)], a, b), peer,
                 lambda: cell.recurrence(g, beta, True, True, peers))


def mamba2(peers: bool, requests: int, tokens: int, groups: int, heads: int) -> None:
    dims, size = 64, 128
    cell = Cell(requests, tokens, libattn.GdnDesc(groups, heads, size, dims),
                libattn.RecurrentRule("additive", write_gate="step", values_first=True, has_skip=True), 1.0)
    total = requests * tokens
    dt = torch.randn(total, heads, device=DEVICE).bfloat16()
    a_log, bias, skip = torch.randn(heads, device=DEVICE) * 0.5, torch.randn(heads, device=DEVICE) - 3, torch.randn(heads, device=DEVICE)
    step = functional.softplus(dt.float() + bias)
    out, decay = torch.empty_like(cell.out), -a_log.exp()

    def scan() -> torch.Tensor:
        kernel = theirs("model_executor.layers.mamba.ops.ssd_combined").mamba_chunk_scan_combined_varlen
        chunk = min(256, tokens)
        count = tokens // chunk
        chunks = torch.arange(requests * count + 1, dtype=torch.int32, device=DEVICE) * chunk
        last = torch.arange(count - 1, requests * count, count, device=DEVICE, dtype=torch.int32)
        request = torch.arange(requests, dtype=torch.int32, device=DEVICE).repeat_interleave(count)
        kernel(cell.v, dt, decay, cell.k, cell.q, chunk, cell.starts, chunks, last, request, out, skip, dt_bias=bias, dt_softplus=True,
               state_dtype=torch.float32)
        return out

    def update() -> torch.Tensor:
        kernel = theirs("model_executor.layers.mamba.ops.mamba_ssm").selective_state_update
        kernel(own, cell.v, dt[..., None].expand(-1, -1, dims), decay[:, None, None].expand(-1, dims, size), cell.k, cell.q,
               skip[:, None].expand(-1, dims), bias[:, None].expand(-1, dims), dt_softplus=True, state_batch_indices=cell.slots, out=out)
        return out

    def expected() -> torch.Tensor:
        return cell.recurrence(step * decay, step, False, False, peers) + skip[:, None] * cell.v.float()

    own = cell.state.clone()
    cell.compare("Mamba2", cell.call([extensions.gdn_weights(a_log, bias), extensions.recurrent_skip(skip)], dt, None),
                 (scan if tokens > 1 else update) if peers else None, expected)


def main() -> int:
    folders = [argument for argument in sys.argv[1:] if argument != "cpu"]
    if not ON_CPU and not torch.cuda.is_available():
        print("skipped: no GPU")
        return 77
    torch.manual_seed(1)
    if folders:
        package(folders[0])
    peers = bool(folders)
    for requests, tokens in ((2, 128), (3, 1)) if ON_CPU else ((1, 8192), (8, 4096), (64, 1)):
        for per_channel, heads, value_heads in ((False, 16, 32), (True, 32, 32)):
            delta(peers, requests, tokens, per_channel, *((1, 2 - per_channel) if ON_CPU else (heads, value_heads)))
        mamba2(peers, requests * (1 + (tokens == 1)), tokens, 1 if ON_CPU else 8, 2 if ON_CPU else 64)
    for per_channel, heads, value_heads in () if ON_CPU else ((False, 2, 4), (False, 2, 8), (False, 4, 16), (True, 2, 2)):
        delta(peers, 1, 8192, per_channel, heads, value_heads)  # which are cut into segments
    return captured.failed > 0


if __name__ == "__main__":
    sys.exit(main())
