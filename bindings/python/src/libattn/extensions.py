# SPDX-License-Identifier: Apache-2.0
"""What some layers add to descriptions, parameters, batches and runs: MLA, recurrence, lists of keys, quantized caches,
encoders and outputs, rotary embeddings, further caches, context parallelism (``attn/mla.h``, ``recurrent.h``,
``draft/index_lists.h``, ``layer.h``, ``io.h``, ``collectives.h``).

Each function gives a struct of `libattn.abi` for the ``extensions`` argument of `LayerDesc`, `Layer.bind_params`, `Batch` or
`Plan.run`. The struct, and what it is handed to, borrow its tensors and keep them alive.
"""
from __future__ import annotations

from typing import Any

from ._declarations import (CacheRole, DtypeId, Rope, attn_batch_context_parallel, attn_batch_recurrent, attn_batch_replay, attn_batch_table, attn_cache_desc,
                            attn_io_caches, attn_io_index_lists, attn_io_indexer, attn_io_mla, attn_io_output_quant,
                            attn_io_recurrent, attn_io_recurrent_gate, attn_io_rope, attn_kv_quant_params, attn_layer_caches, attn_mla_weights,
                            attn_mm_encoder_state, attn_recurrent_norm_weight, attn_recurrent_skip, attn_recurrent_weights)
from .layers import GdnDesc, code_of
from .structs import Struct, refused
from .tensors import as_tensor, as_writable

# Structs with no other arguments than their fields, in their order.

#: For `Layer.bind_params`: float32 [Hv] twice (dt_bias [Hv Dk] where the gate is per channel), or None where the gate takes none, and
#: the convolution's [channels, width] and [channels].
gdn_weights = attn_recurrent_weights
#: For `Layer.bind_params` of a rule with a skip: float32 [Hv].
recurrent_skip = attn_recurrent_skip
#: For `Layer.bind_params` of a layer with a norm: floats [Dv], or [Hv Dv] where it has groups.
recurrent_norm_weight = attn_recurrent_norm_weight
#: For `Plan.run` of a layer with a norm: [T, Hv, Dv], next to `gdn_io`.
recurrent_gate = attn_io_recurrent_gate
#: For `Batch` of layers with a ring of inputs (`replay_cache`), next to `gdn_batch`: int32 [R], how many of the ring's tokens each
#: request's state has not seen.
replay_batch = attn_batch_replay
#: For `Layer.bind_params`: [Hq (nope + v), rank] as the checkpoint has it, or already split per head.
mla_weights = attn_mla_weights
#: For `Plan.run` of an indexer: a weight for each head [T, H], and int32 [T, G] that the lists' lengths are written to.
indexer_io = attn_io_indexer
#: For `Layer.bind_params` of quantized caches: float32 [D] and [Dv] of +-1 (int4), [Hk, Dv] (int8_kv).
kv_quant_params = attn_kv_quant_params
#: For `LayerDesc.extensions`: caches beyond those of its kind, ``libattn.abi.attn_cache_desc(role=…)`` each.
layer_caches = attn_layer_caches
#: For `Plan.run`: new rows of each of those caches.
caches_io = attn_io_caches
#: For `Batch` of layers with a `ContextParallel`: int32 tensors as in the header.
context_parallel_batch = attn_batch_context_parallel


def mm_encoder_state(scales: Any | None = None, amax_history: Any | None = None) -> Struct:
    """For `Layer.bind_params` of a multimodal encoder in fp8: float32 [3] and [3, amax_history_len], of q, k and v."""
    return attn_mm_encoder_state(scales=scales, amax_history=amax_history)


def replay_cache(gdn: GdnDesc, dtype: str | int, replay: int, gate_per_channel: bool = False) -> Struct:
    """For `LayerDesc.extensions` of a recurrent layer of `dtype`, whose state is then written once in `replay` tokens: its
    ring, a draft, see ``attn/draft/recurrent.h``."""
    if gdn.num_k_heads < 1:
        raise refused("num_k_heads", f"{gdn.num_k_heads}; 1 or more is needed")
    code, group = code_of("dtype", dtype, DtypeId), gdn.num_v_heads // gdn.num_k_heads
    inputs = gdn.head_size_k + group * gdn.head_size_v
    gates = group * (gdn.head_size_k if gate_per_channel else 1) * (1 if code == DtypeId.F32 else 2)
    row = -(-(inputs + inputs % 2 + gates) // 8) * 8
    return layer_caches([attn_cache_desc(role=CacheRole.REPLAY, kv_dtype=code, num_heads=gdn.num_k_heads, head_size=row,
                                         block_size=replay + 2 * gdn.num_speculative_tokens)])


def gdn_batch(state_slots: Any, has_initial_state: Any | None = None, num_accepted_tokens: Any | None = None,
              initial_slots: Any | None = None, checkpoint_slots: Any | None = None) -> Struct:
    """For `Batch`.

    Parameters
    ----------
    state_slots : int32 tensor [R] or [R, 1 + n]
        Where each request's state lies; negative: skipped. Two dimensions: speculative.
    has_initial_state : uint8 tensor [R], optional
        By default where a request has more keys than queries.
    num_accepted_tokens : int32 tensor [R], optional
        Speculative.
    initial_slots : int32 tensor, as `state_slots`, optional
        Where each request's state is read from.
    checkpoint_slots : int32 tensor [R, n], optional
        Where the states after multiples of ``checkpoint_interval`` tokens of a request go that the step passes, in order.
    """
    slots, initial, checkpoints = (None if given is None else as_tensor(given)
                                   for given in (state_slots, initial_slots, checkpoint_slots))

    def stride(given: Any) -> int:
        return given.shape[1] if given and len(given.shape) == 2 else 1

    return attn_batch_recurrent(
        state_slots=slots, state_slots_stride=stride(slots), has_initial_state=has_initial_state,
        num_accepted_tokens=num_accepted_tokens, initial_slots=initial, initial_slots_stride=stride(initial),
        checkpoint_slots=checkpoints, checkpoint_slots_stride=stride(checkpoints) if checkpoints else 0)


def gdn_io(a: Any | None, b: Any | None, mixed_qkv: Any | None = None) -> Struct:
    """For `Plan.run`: [T, Hv] twice, or as the gates say, and [T, 2 Hk Dk + Hv Dv] before the convolution; without it
    q, k, v count."""
    return attn_io_recurrent(a=a, b=b, mixed_qkv=mixed_qkv)


def mla_io(q_nope: Any, q_pe: Any, kv_c: Any | None = None, k_pe: Any | None = None,
           topk_indices: Any | None = None) -> Struct:
    """For `Plan.run`, in place of q, k, v.

    Parameters
    ----------
    q_nope : [T, Hq, nope], or [T, Hq, rank] without absorption in the core
    q_pe : [T, Hq, rope]
    kv_c, k_pe : [T, rank], [T, rope], optional
        The step's own latent rows; None: nothing is written.
    topk_indices : int32 [T, k], optional
        Sparse.
    """
    top = None if topk_indices is None else as_tensor(topk_indices)
    if top is not None and len(top.shape) != 2:
        raise refused("topk_indices", f"{top}; [T, k] is needed")
    return attn_io_mla(q_nope=q_nope, q_pe=q_pe, kv_c=kv_c, k_pe=k_pe, topk_indices=top,
                       topk_stride=top.shape[1] if top else 0)


def index_lists_io(indices: Any, lengths: Any | None = None) -> Struct:
    """For `Plan.run` of a layer with `IndexLists`.

    Parameters
    ----------
    indices : int32 [T, G, max_entries]
        Entries of each token's lists, G as the layer's ``groups`` say; negative: none.
    lengths : int32 [T, G], optional
        How many entries of each count, where the layer says ``has_lengths``.
    """
    listed, counts = as_tensor(indices), None if lengths is None else as_tensor(lengths)
    if len(listed.shape) != 3:
        raise refused("indices", f"{listed}; [T, G, max_entries] is needed")
    if counts is not None and counts.shape != listed.shape[:2]:
        raise refused("lengths", f"{counts}; {list(listed.shape[:2])} is needed")
    return attn_io_index_lists(indices=listed, token_stride=listed.shape[1] * listed.shape[2], group_stride=listed.shape[2],
                               lengths=counts, length_stride=listed.shape[1] if counts is not None else 0)


def table(block_table: Any | None = None, slot_mapping: Any | None = None, **fields: Any) -> attn_batch_table:
    """For `Batch`'s `tables`; the fields of ``struct attn_batch_table``."""
    made = attn_batch_table(**fields)
    if block_table is not None:
        t = as_tensor(block_table)
        if len(t.shape) != 2:
            raise refused("block_table", f"{t}; [rows, blocks] is needed")
        made.block_table, made.block_table_rows, made.block_table_stride = t, t.shape[0], t.shape[1]
    if slot_mapping is not None:
        made.slot_mapping = slot_mapping
        made.num_slots = made.kept["slot_mapping"][1]
    if "page_indices" in fields:
        made.num_pages = made.kept["page_indices"][1]
    return made


def rope_io(positions: Any, cos_sin: Any, form: str = "neox", rotary_dim: int = 0, q_norm_weight: Any | None = None,
            k_norm_weight: Any | None = None, norm_eps: float = 0.0) -> Struct:
    """For `Plan.run` of a layer with `rope`: q and k are rotated with the cache write, q in place.

    Parameters
    ----------
    positions : int64 tensor [T]
    cos_sin : tensor [max position, rotary_dim]
        The cosines' half, then the sines'.
    form : str
        ``neox`` or ``gptj``.
    rotary_dim : int
        0: head_size.
    q_norm_weight, k_norm_weight : tensor [D], optional
        RMS norm of each head's row before the rotation, with `norm_eps`.
    """
    return attn_io_rope(form=code_of("form", form, Rope), rotary_dim=rotary_dim, positions=positions, cos_sin=cos_sin,
                        q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, norm_eps=norm_eps)


def output_quant(scale: Any | None = None, block_scales: Any | None = None) -> Struct:
    """For `Plan.run` of a layer with an `output_form`: float32 [1] that is read, and the scales that are written."""
    return attn_io_output_quant(scale=scale, block_scales=None if block_scales is None else
                                as_writable("block_scales", block_scales))
