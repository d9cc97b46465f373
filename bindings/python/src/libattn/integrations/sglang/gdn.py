# SPDX-License-Identifier: Apache-2.0
"""SGLang's gated delta layers (Qwen3-Next, Qwen3.5): the convolution and the rule are libattn's, over SGLang's pool of states;
projections, the gated norm and the pool's slots stay SGLang's.

Where the prefix cache wants a request's state at a multiple of its chunk, a step writes it as a checkpoint: a request's tokens are
counted from the first of the step, since SGLang counts its chunks from there.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend

from ..._declarations import PlanMode, attn_io_recurrent
from ...extensions import gdn_batch
from ...step import Batch
from ...torch.steps import Member
from ...torch.store import Params
from ..gated_delta import describe
from .gathered import Gathered, Step
from .layers import refuse


class States:
    """A `RadixLinearAttention` with its states of the pool, for `libattn.torch.steps.Steps`."""

    def __init__(self, layer: Any, pool: Any, interval: int) -> None:
        self.layer, self.impl, self.pool, self.interval = layer, self, pool, interval
        self.dtype = torch.float32  # that of its last run

    @property
    def kv_cache(self) -> torch.Tensor:
        """[slots, Hv, Dv, Dk]"""
        return self.pool.mamba2_layer_cache(self.layer.layer_id).temporal

    def version(self, layer: Any) -> Any:
        """A layer is bound again when this changes."""
        return self.dtype, *(t.data_ptr() for t in (self.layer.A_log, self.layer.dt_bias, self.layer.conv_weights))

    def member(self, layer: Any, states: torch.Tensor, metadata: Any, dtype: Any) -> Member:
        """The layer, its states and its windows as `Layer.bind_state` has them."""
        mine, windows = self.layer, self.pool.mamba2_layer_cache(self.layer.layer_id).conv[0]
        desc = describe(mine.num_k_heads, mine.num_v_heads, mine.head_k_dim, mine.head_v_dim, mine.conv_weights.shape[-1], 0,
                        self.dtype, states.dtype, self.interval)
        params: Params = (("a_log", mine.A_log), ("dt_bias", mine.dt_bias), ("conv_weight", mine.conv_weights))
        return Member(desc, mine.layer_id, params, states.flatten(2).unsqueeze(1), windows.unsqueeze(1))


class LibattnGdnBackend(Gathered):
    """One per model runner, next to its `LibattnBackend` in SGLang's `HybridLinearAttnBackend`."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        arguments = runner.server_args
        #: Tokens of the prefix cache's chunk, where it asks for states inside of a step.
        self.interval = int(arguments.mamba_cache_chunk_size) if arguments.enable_mamba_extra_buffer() else 0
        self.batches: dict[int, tuple[Any, ...]] = {}  # captured decodes, by requests: what replays read, and the batch
        #: By requests, SGLang's arrays that those read: lengths, whose state goes to the prefix cache, and where.
        self.given: dict[int, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = {}
        self.rows: dict[Any, torch.Tensor] = {}  # outputs of captured decodes, of one layer after the other

    def _slots(self, forward_batch: Any, requests: int) -> torch.Tensor:
        """Where each request's state lies; rows of padding have none."""
        pool = self.req_to_token_pool
        slots = pool.translate_mamba_indices(pool.get_mamba_indices(forward_batch.req_pool_indices)).int()
        slots[requests:] = -1  # a new tensor
        return slots

    def _tracked(self, forward_batch: Any, mask: torch.Tensor | None, prefix: torch.Tensor, queries: torch.Tensor,
                 most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys of each request as its layer counts them, and [requests, checkpoints] where states go, of up to `most` new tokens;
        `mask`: whose do.

        A request without a state begins at 0, another one at the interval; in a decode that is tracked, at its last token."""
        interval = self.interval or 2
        context = torch.where(prefix > 0, interval, 0)
        columns = max(most // interval, 1)
        checkpoints = torch.full((len(queries), columns), -1, dtype=torch.int32, device=queries.device)
        if self.interval and mask is not None:
            mask, where = mask[:len(queries)], self.req_to_token_pool.translate_mamba_indices(forward_batch.mamba_track_indices)
            if forward_batch.forward_mode.is_decode():
                at = torch.zeros_like(queries)
                context = torch.where(mask, interval - 1, context)
            else:
                at = (forward_batch.mamba_track_seqlens - prefix) // interval - 1
            chosen = (at[:, None] == torch.arange(columns, device=at.device)) & mask[:, None]
            checkpoints = torch.where(chosen, where[:len(queries), None].int(), checkpoints)
        return (context + queries).int(), checkpoints

    def _extensions(self, slots: torch.Tensor, checkpoints: torch.Tensor) -> list[Any]:
        return [gdn_batch(slots, checkpoint_slots=checkpoints if self.interval else None)]

    def _read(self, forward_batch: Any) -> Step:
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        given = getattr(forward_batch, "_original_batch_size", None)
        slots = self._slots(forward_batch, requests if given is None else given)
        if mode.is_decode():
            counts = np.ones(requests, np.int32)
            prefix, queries = forward_batch.seq_lens, torch.ones(requests, dtype=torch.int64, device=slots.device)
        elif mode.is_target_verify() or mode.is_draft_extend_v2():
            refuse("forward_mode", getattr(mode, "name", mode), "steps without drafts next to gated delta layers")
        else:
            counts = np.asarray(forward_batch.extend_seq_lens_cpu, np.int32)
            prefix, queries = forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        lengths, checkpoints = self._tracked(forward_batch, forward_batch.mamba_track_mask, prefix, queries, int(counts.max(initial=1)))
        batch = Batch(torch.from_numpy(starts).to(slots.device), lengths, query_start_loc_host=torch.from_numpy(starts),
                      num_tokens=int(starts[-1]), max_query_len=int(counts.max(initial=1)),
                      max_seq_len=int(counts.max(initial=1)) + (self.interval or 2), extensions=self._extensions(slots, checkpoints))
        return Step(batch, int(starts[-1]))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """From here on layers are served by backends that capture decodes, or refused."""
        if max_num_tokens != max_bs:
            refuse("max_num_tokens", f"{max_num_tokens} of {max_bs} requests", "decodes without drafts next to gated delta layers")
        device, interval = self.req_to_token_pool.req_to_token.device, self.interval
        #: Keys of a decode that is tracked, of another one, and no checkpoint.
        self.constants = [torch.tensor(value, dtype=torch.int32, device=device) for value in (interval, interval + 1, -1)]
        self.batches.clear()
        self.given.clear()
        self.rows.clear()
        self.steps.graph_level = "single_token_decode"
        self.steps.clear()

    def _captured(self, requests: int) -> tuple[Any, ...]:
        """Arrays that a replay reads at the addresses of the capture, and a batch of them."""
        if requests not in self.batches:
            device = self.req_to_token_pool.req_to_token.device
            found, slots, lengths, checkpoints = (
                torch.full(shape, value, dtype=torch.int32, device=device)
                for shape, value in (((requests,), -1), ((requests,), -1), ((requests,), 2), ((requests, 1), -1)))
            starts = torch.arange(requests + 1, dtype=torch.int32)
            batch = Batch(starts.to(device), lengths, query_start_loc_host=starts, num_tokens=requests, max_query_len=1,
                          max_seq_len=(self.interval or 1) + 1, extensions=self._extensions(slots, checkpoints))
            self.batches[requests] = found, slots, lengths, checkpoints, batch
        return self.batches[requests]

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Outside of a capture, bring slots and the host's part of plans to the batch that replays the graph, which does the rest."""
        mode, requests = forward_batch.forward_mode, forward_batch.batch_size
        if not (mode.is_decode() or mode.is_idle()):
            refuse("forward_mode", f"a captured {getattr(mode, 'name', mode)}", "captured DECODE next to gated delta layers")
        found, *_, batch = self._captured(requests)
        if in_capture:
            self.given[requests] = forward_batch.seq_lens, forward_batch.mamba_track_mask, forward_batch.mamba_track_indices
        else:  # in a graph this would come too late: the pool may give slots to other requests as soon as one is launched
            pool = self.req_to_token_pool
            found.copy_(pool.translate_mamba_indices(pool.get_mamba_indices(forward_batch.req_pool_indices)))
        shape = (requests, requests, 1)
        self.forward_metadata = Step(batch, requests, shape, lambda: self._fill_arrays(requests))
        if not in_capture:
            self.replay(shape, batch, PlanMode.OUT_OF_GRAPH)

    def _fill_arrays(self, requests: int) -> None:
        """As `_slots` and `_tracked` have them, from arrays that SGLang fills before a replay."""
        found, slots, lengths, checkpoints, _ = self._captured(requests)
        (seq_lens, mask, where), (tracked, other, none) = self.given[requests], self.constants
        torch.where(self.is_there(seq_lens), found, none, out=slots)
        if self.interval and mask is not None:
            torch.where(mask[:requests], tracked, other, out=lengths)
            torch.where(mask[:requests, None], where[:requests, None].int(), none, out=checkpoints)

    def _run(self, layer: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        step = self._step(layer)
        mine = self.layers.setdefault(id(layer), States(layer, self.req_to_token_pool, self.interval))
        rows, row = mixed_qkv.shape[0], (layer.num_v_heads, layer.head_v_dim)
        if step.captured is not None:
            # Rows of padding are not written, and experts are chosen by them: they hold 0 or an earlier output.
            out = self.rows.get((rows, row))
            if out is None:
                out = self.rows[rows, row] = mixed_qkv.new_zeros(rows, *row)
        else:
            out = mixed_qkv.new_empty(rows, *row) if rows == step.num_tokens else mixed_qkv.new_zeros(rows, *row)
        step.batch.struct.num_tokens = rows
        mine.dtype = mixed_qkv.dtype
        self.steps.run(layer, mine, mine.kv_cache, step, None, lambda: step.batch, (None, None, None, out),
                       extension=lambda bound: bound.io(attn_io_recurrent, mixed_qkv=mixed_qkv, a=a, b=b))
        return out

    def forward_decode(self, layer: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self._run(layer, mixed_qkv, a, b)

    forward_extend = forward_decode


def with_states(runner: Any, full: Any, layers: list[int]) -> HybridLinearAttnBackend:
    """SGLang's backend of both kinds of layers; `layers` are those of attention."""
    return HybridLinearAttnBackend(full, LibattnGdnBackend(runner), layers)
