# SPDX-License-Identifier: Apache-2.0
"""What the tests share: attention written down from its definition, and the backends to hold against it."""
from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import libattn
import libattn.torch

# Hides fla-core: next to Triton its kernels, which need a GPU, would stand in for what Transformers' layers compute in PyTorch.
sys.modules["fla"] = None  # type: ignore[assignment]

#: One name per CPU backend that every x86-64 machine has; cpu_simd picks its best variant.
BACKENDS = ("cpu_ref", "cpu_simd")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor,
              soft_cap: float = 0.0, sinks: torch.Tensor | None = None, bias: torch.Tensor | None = None,
              ) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float64: q [T, Hq, D], k and v [L, Hk, D], visible [T, L] or [Hq, T, L].

    Returns
    -------
    out : [T, Hq, Dv]
    lse : [Hq, T], the sinks included
    """
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = scale * q @ k.transpose(1, 2)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return (weights[..., :k.shape[1]] @ v).transpose(0, 1), lse


def causal(queries: int, keys: int, window: int = 0) -> torch.Tensor:
    """[T, L], bottom-right aligned; a window of `window` keys, the query's own included."""
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None]
    return (key <= position) & ((key > position - window) if window else True)


def peaked(*shape: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Rows whose logits have a standard deviation of about 4 at scale 1 / sqrt(D): no uniform weights."""
    return scale * 2.0 * torch.randn(*shape, generator=generator)


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of an element, relative to its row's root mean square; infinite where one is NaN."""
    actual, expected = actual.double(), expected.double()
    rms = expected.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    error = float(((actual - expected).abs() / rms).max().detach())
    return math.inf if math.isnan(error) else error


def worst_of(out: torch.Tensor, q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], queries: Sequence[int],
             lengths: Sequence[int], scale: float, visible: Callable[[int, int, int], torch.Tensor] | None = None, window: int = 0,
             least: float = 0.0, error: Callable[[torch.Tensor, torch.Tensor], float] | None = None, **terms: Any) -> float:
    """The `worst` of requests whose rows follow one another in q and out [T, Hq, D]; `keys` and `values` have each request's, at least as
    many as its length. What a request's queries see is causal, or `visible` of its number, queries and length. Errors up to `least`
    do not count; `error` of found and expected rows stands in for `worst`."""
    found, at = [], 0
    for r, (count, length) in enumerate(zip(queries, lengths)):
        seen = causal(count, length, window) if visible is None else visible(r, count, length)
        expected, _ = attention(q[at:at + count], keys[r][:length], values[r][:length], scale, seen, **terms)
        got = out[at:at + count].double()
        found.append((error or worst)(torch.where((got - expected).abs() <= least, expected, got), expected) if count else 0.0)
        at += count
    return max(math.inf if math.isnan(one) else one for one in found)


def worst_of_batch(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float = 0.25,
                   **terms: Any) -> float:
    """The `worst` of a padded batch as `libattn.torch.attend` has it: out [B, S, Hq, Dv], the others [B, heads, rows, size]; seen [S, L],
    or [B, S, L]."""
    rows = zip(*(t.transpose(1, 2) for t in (q, k, v)), seen.expand(len(q), -1, -1), strict=True)
    return max(worst(got, attention(*qkv, scale, mine, **terms)[0]) for got, (*qkv, mine) in zip(out, rows, strict=True))


def each_backend(**options: Any) -> Iterator[str]:
    """The CPU backends by turns, as `libattn.torch` is configured."""
    for backend in BACKENDS:
        libattn.torch.configure(ignore_environment=True, backend=backend, **options)
        yield backend


def one_layer(desc: libattn.LayerDesc, backend: str | None = None, device: object = None, **options: object) -> tuple[
        libattn.Model, libattn.Layer]:
    """A model of one layer on a backend (None: the best) and a device (None: the CPU), with nothing bound."""
    runtime = libattn.Runtime(ignore_environment=True, **options)
    model = runtime.bind(runtime.select([desc], backend=backend, device=device))
    return model, model.layers[0]


def bound_layer(desc: libattn.LayerDesc, backend: str, blocks: int = 0, **params: object) -> tuple[
        libattn.Model, libattn.Layer]:
    """The same, its cache bound where it has one."""
    model, layer = one_layer(desc, backend)
    if layer.kv_spec.has_cache:
        layer.bind_kv(libattn.allocate(blocks * layer.kv_spec.padded_page_bytes), blocks)
    if params:
        layer.bind_params(**params)
    return model, layer


def planned(model: libattn.Model, batch: libattn.Batch, **limits: int) -> libattn.Plan:
    """A plan for one batch."""
    limits = {"max_num_reqs": 64, "max_num_tokens": 4096, "max_seq_len": 8192, **limits}
    plan = model.plan(0, **limits)
    if plan.workspace_bytes:
        plan.bind_workspace(libattn.allocate(plan.workspace_bytes))
    plan.update(batch)
    return plan
