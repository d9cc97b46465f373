# SPDX-License-Identifier: Apache-2.0
"""vLLM's batch, kept for the layers of one cache group, and as libattn's."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata

from ..._declarations import Status
from ...errors import make
from ...extensions import context_parallel_batch, gdn_batch
from ...step import Batch
from ...torch.steps import Shape, Steps


@dataclass
class LibattnMetadata(AttentionMetadata):
    """One step of one KV-cache group. Layers that run with the same object share its plan.

    MLA's layers ask for the counts of decodes and prefills: to vLLM all are prefills, which it hands over as they are.
    """

    steps: Steps
    num_reqs: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor | None
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool | torch.Tensor
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: torch.Tensor | None = None
    spans: tuple[torch.Tensor, torch.Tensor] | None = None
    local_seq_lens: torch.Tensor | None = None
    state_slots: torch.Tensor | None = None  #: of recurrent layers, [requests, 1 + drafted tokens]
    accepted: torch.Tensor | None = None  #: next to drafts
    captured: Shape | None = None
    common_prefix_len: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 1
    prefill: None = None
    decode: None = None

    @property
    def causal_per_request(self) -> bool:
        """Whether each request says for itself if it is causal."""
        return isinstance(self.causal, torch.Tensor)


def host_copy(values: Any | None) -> torch.Tensor | None:
    return None if values is None else torch.as_tensor(values).to("cpu", torch.int32)


def spans_of(ranges: dict[int, list[tuple[int, int]]] | None, num_reqs: int, device: torch.device,
             ) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Ranges of positions, both ends included, one request after the other; ranges of one position are left out."""
    if not ranges:
        return None
    lists = [[span for span in ranges.get(r, ()) if span[0] < span[1]] for r in range(num_reqs)]
    starts = [0]
    for spans in lists:
        starts.append(starts[-1] + len(spans))
    if starts[-1] == 0:
        return None
    flat = [end for spans in lists for span in spans for end in span]
    return (torch.tensor(flat, dtype=torch.int32).reshape(-1, 2).to(device),
            torch.tensor(starts, dtype=torch.int32).to(device))


#: Fewer keys in common, or requests, are never attended apart.
CASCADE_KEYS, CASCADE_REQUESTS = 256, 8


def prefix_of(m: LibattnMetadata, block_size: int) -> int:
    """Keys that all requests of a batch have in common, where its tables lie on the host: since 0.32 vLLM does not say."""
    table = m.block_table[:m.num_reqs]
    blocks = m.max_seq_len // block_size if block_size else 0
    if table.device.type != "cpu" or m.num_reqs < CASCADE_REQUESTS or blocks * block_size < CASCADE_KEYS or bool(
            (table[:, 0] != table[0, 0]).any()):
        return 0
    differ = (table[:, :blocks] != table[0, :blocks]).any(0).nonzero()
    return (int(differ[0]) if len(differ) else blocks) * block_size


def batch_of(m: LibattnMetadata, rows: int, cross: bool = False) -> Batch:
    """libattn's batch of a step; a cross layer's keys are the encoder's, a recurrent layer has no table."""
    lengths: dict[str, Any] = {"seq_lens": m.seq_lens.to(torch.int32),
                               "seq_lens_host": None if m.captured else m.seq_lens_cpu}
    tokens = max(rows, m.num_actual_tokens)
    if m.state_slots is not None:
        return Batch(m.query_start_loc.to(torch.int32), query_start_loc_host=m.query_start_loc_cpu, num_tokens=tokens,
                     max_query_len=m.max_query_len, max_seq_len=m.max_seq_len, **lengths,
                     extensions=[gdn_batch(m.state_slots, num_accepted_tokens=m.accepted)])
    if cross:
        if m.encoder_seq_lens is None:
            raise make(Status.INVALID_ARGUMENT, "encoder_seq_lens", "None; a cross layer needs them")
        encoder = m.encoder_seq_lens.to(m.query_start_loc.device, torch.int32)
        known = m.encoder_seq_lens_cpu is not None
        lengths = {"encoder_seq_lens": encoder, "encoder_seq_lens_host": m.encoder_seq_lens_cpu,
                   "max_encoder_seq_len": int(m.encoder_seq_lens_cpu.max()) if known else m.max_seq_len}
    causal = {"causal_per_request": m.causal.to(torch.uint8)} if isinstance(m.causal, torch.Tensor) else {
        "causal": not cross and m.causal}
    spread = [] if m.local_seq_lens is None else [context_parallel_batch(m.local_seq_lens)]
    return Batch(m.query_start_loc.to(torch.int32), block_table=m.block_table.to(torch.int32),
                 slot_mapping=m.slot_mapping.to(torch.int64), query_start_loc_host=m.query_start_loc_cpu,
                 num_tokens=tokens, max_query_len=m.max_query_len,
                 max_seq_len=0 if cross else m.max_seq_len, spans=m.spans, extensions=spread,
                 common_prefix_len=0 if cross else m.common_prefix_len,
                 **causal, **lengths)


__all__ = ["CASCADE_KEYS", "CASCADE_REQUESTS", "LibattnMetadata", "batch_of", "host_copy", "prefix_of", "spans_of"]
