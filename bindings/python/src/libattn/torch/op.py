# SPDX-License-Identifier: Apache-2.0
"""Operators of torch: ``torch.ops.libattn.attend``, ``attend_mla`` and ``recurrent``. Each has a variant that writes into a
tensor of the caller's, its first argument: ``attend_out`` and so on.

``torch.compile``, ``torch.export`` and AOTInductor see opaque operators with known output shapes; selection, planning and the
reading of masks happen inside them, at run time. The operators are Python: no C++ here depends on a release of torch.

attend(q, k, v, mask, sinks, scale, causal, window, soft_cap, kind, index)
    See `libattn.torch.attend`; ``window`` has two elements or is None.
attend_mla(q, kv_c, k_pe, pages, block_table, slot_mapping, query_start_loc, seq_lens, kv_b_proj, scale, index)
    q [T, Hq, nope + rope], kv_c [T, rank], k_pe [T, rope], pages [N, page, rank + rope], kv_b_proj [Hq (nope + Dv), rank] as the
    checkpoint has it. Writes the step's latent rows and attends, causal; [T, Hq, Dv].
recurrent(q, k, v, a, b, state, slots, query_start_loc, seq_lens, scale, qk_l2norm, index)
    The gated delta rule: q, k [T, Hk, Dk], v [T, Hv, Dv], a [T, Hv] the gates' logarithms, b [T, Hv] before the sigmoid,
    state float32 [N, Hv, Dv, Dk], slots int32 [R]. A request with more keys than queries begins with its slot's state, others
    with zeros; [T, Hv, Dv].
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import library
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version

from .._declarations import Status, attn_io_mla, attn_io_recurrent
from ..errors import make
from ..extensions import gdn_batch, gdn_weights
from ..layers import GdnDesc, LayerDesc, MlaDesc, RecurrentRule
from ..step import Batch
from . import dense
from .paged import Step, bind_pages
from .store import Bound, Params, refuse_capture, store, stream_of

_library = library.Library("libattn", "FRAGMENT")
#: torch.compile with mode='reduce-overhead' leaves operators of the second tag outside of its CUDA graphs, since 2.9.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "cudagraph_unsafe") if hasattr(torch.Tag, name))


def _operator(name: str, arguments: str, shape_of: Callable[..., tuple[int, ...]], run: Callable[..., torch.Tensor],
              written: int | None = None) -> None:
    """`name`, whose output is like its first tensor, and `name`_out, whose first argument it is; `written` is the place of the
    tensor that both write. By torch's dispatcher alone: `custom_op` costs 6 to 25 us a call more."""
    names = ["out", *(argument.split()[1] for argument in arguments.split(", "))]

    def refuse_gradients(*given: Any) -> None:
        """Out (None: the operator's own) and the arguments: eager and in traced graphs, which would drop their gradients."""
        if torch.is_grad_enabled():
            for i, t in enumerate(given):
                if getattr(t, "requires_grad", False):
                    dense.refuse_gradient(names[i], t)

    def functional(*args: Any) -> torch.Tensor:
        refuse_gradients(None, *args)
        if written is not None:
            increment_version(args[written])
        return run(None, *args)

    def into(out: torch.Tensor, *args: Any) -> None:
        refuse_gradients(out, *args)
        increment_version(out if written is None else (out, args[written]))
        run(out, *args)

    def fake_functional(*args: Any) -> torch.Tensor:
        refuse_gradients(None, *args)
        return args[0].new_empty(shape_of(*args))

    def fake_into(out: torch.Tensor, *args: Any) -> None:
        refuse_gradients(out, *args)

    for full, schema, function, fake in (
            (name, f"({arguments}) -> Tensor", functional, fake_functional),
            (f"{name}_out", f"(Tensor(z!) out, {arguments}) -> ()", into, fake_into)):
        _library.define(full + schema, tags=_TAGS)
        _library.impl(full, _disable_dynamo(function), "CompositeExplicitAutograd")  # else a frame that it gave up is traced
        library.register_fake(f"libattn::{full}", fake, lib=_library)


def _attend(out: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
            sinks: torch.Tensor | None, scale: float, causal: bool, window: Sequence[int] | None, soft_cap: float,
            kind: str, index: int) -> torch.Tensor:
    return dense.attend(q, k, v, mask, scale=scale, causal=causal, soft_cap=soft_cap, sinks=sinks, kind=kind,
                        window=None if window is None else (window[0], window[1]), index=index, out=out)


_operator("attend", "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, bool causal, int[]? window, "
          "float soft_cap, str kind, int index",
          lambda q, k, v, *_: (q.shape[0], q.shape[2], q.shape[1], v.shape[3]), _attend)


def _bound(desc: LayerDesc, index: int, memory: torch.Tensor, params: Params, bind: Callable[[Bound], None]) -> Bound:
    """The layer over an engine's memory."""
    key = (memory.data_ptr(), memory.shape, memory.stride())
    bound = store.bound(desc, lambda: desc, index, memory.device, params, key)
    if bound.cache != key:
        bind(bound)
        bound.cache = key
    return bound


def _plan(bound: Bound, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, **given: Any) -> int | None:
    """Plan a step; the stream it is planned on."""
    refuse_capture(bound.device)
    starts, lengths = query_start_loc.cpu(), seq_lens.cpu()
    stream = stream_of(bound.device)
    bound.update(Batch(query_start_loc, seq_lens, query_start_loc_host=starts, seq_lens_host=lengths,
                       max_seq_len=int(lengths.max()) if len(lengths) > 0 else 1, **given), Step(None), stream)
    return stream


def _mla_sizes(q: torch.Tensor, k_pe: torch.Tensor, kv_b_proj: torch.Tensor) -> tuple[int, int, int]:
    """nope, rope, Dv."""
    rope = k_pe.shape[1]
    nope = q.shape[2] - rope
    return nope, rope, kv_b_proj.shape[0] // q.shape[1] - nope


def _mla_shape(q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, *rest: Any) -> tuple[int, ...]:
    return (q.shape[0], q.shape[1], _mla_sizes(q, k_pe, rest[5])[2])


def _attend_mla(out: torch.Tensor | None, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, pages: torch.Tensor,
                block_table: torch.Tensor, slot_mapping: torch.Tensor, query_start_loc: torch.Tensor,
                seq_lens: torch.Tensor, kv_b_proj: torch.Tensor, scale: float, index: int) -> torch.Tensor:
    dense.check_inputs(rows=q, kv_c=kv_c, k_pe=k_pe)
    nope, rope, width = _mla_sizes(q, k_pe, kv_b_proj)
    out = dense.output(out, q, (q.shape[0], q.shape[1], width))
    if pages.dtype != q.dtype:
        raise make(Status.UNSUPPORTED, "pages", f"{pages.dtype}; supported: {q.dtype}, that of q")
    rank = kv_c.shape[1]
    desc = LayerDesc("layers.0", q.shape[1], 1, rank + rope, scale, "mla", dense.dtype_of(q.dtype), head_size_v=width,
                     block_size=pages.shape[1], mla=MlaDesc(rank, nope, rope, width, absorb_in_core=True))
    bound = _bound(desc, index, pages, (("kv_b_proj", kv_b_proj),),
                   lambda bound: bind_pages(bound, 0, pages.unsqueeze(-2), None))
    stream = _plan(bound, query_start_loc, seq_lens, block_table=block_table, slot_mapping=slot_mapping)
    io = bound.io(attn_io_mla, q_nope=q[..., :nope], q_pe=q[..., nope:], kv_c=kv_c, k_pe=k_pe)
    bound.run_rows(stream, None, None, None, out, extension=io)
    return out


_operator("attend_mla", "Tensor q, Tensor kv_c, Tensor k_pe, Tensor(a!) pages, Tensor block_table, Tensor slot_mapping, "
          "Tensor query_start_loc, Tensor seq_lens, Tensor kv_b_proj, float scale, int index", _mla_shape, _attend_mla, 3)


def _recurrent(out: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
               state: torch.Tensor, slots: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
               scale: float, qk_l2norm: bool, index: int) -> torch.Tensor:
    dense.check_inputs(rows=q, keys=k, values=v, a=a, b=b)
    out = dense.output(out, q, v.shape)
    gdn = GdnDesc(q.shape[1], v.shape[1], q.shape[2], v.shape[2], qk_l2norm=qk_l2norm)
    desc = LayerDesc("layers.0", q.shape[1], q.shape[1], q.shape[2], scale, "recurrent", dense.dtype_of(q.dtype),
                     head_size_v=v.shape[2], gdn=gdn, rule=RecurrentRule(gate="given"))

    if state.dtype != torch.float32 or state.shape[1:] != (v.shape[1], v.shape[2], q.shape[2]) or not state[:1].is_contiguous():
        raise make(Status.INVALID_ARGUMENT, "state", f"{state.dtype} {list(state.shape)} with strides {list(state.stride())}; "
                   f"torch.float32 [N, {v.shape[1]}, {v.shape[2]}, {q.shape[2]}], each slot contiguous, is needed")

    def bind(bound: Bound) -> None:
        bind_pages(bound, 0, state.flatten(2).unsqueeze(1), None)
        bound.layer.bind_params(extensions=[gdn_weights(None, None)])

    bound = _bound(desc, index, state, (), bind)
    stream = _plan(bound, query_start_loc, seq_lens, extensions=[gdn_batch(slots)])
    bound.run_rows(stream, q, k, v, out, extension=bound.io(attn_io_recurrent, a=a, b=b))
    return out


_operator("recurrent", "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor(a!) state, Tensor slots, "
          "Tensor query_start_loc, Tensor seq_lens, float scale, bool qk_l2norm, int index",
          lambda q, k, v, *_: v.shape, _recurrent, 5)
