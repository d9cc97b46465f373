# SPDX-License-Identifier: Apache-2.0
"""One rank of two that spread a cache, each a process: the table of collectives over torch's gloo, and the vLLM adapter's
layers over it, held against attention over all keys. Run by test_vllm.

usage: spread.py RANK FILE    (a file that is not there yet, where the ranks meet)
"""
from __future__ import annotations

import ctypes
import sys
import types
import weakref
from ctypes import addressof, sizeof
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import libattn
import libattn.torch
import test_vllm as recorded
from common import peaked, worst_of
from libattn._declarations import Status, attn_collective_args, attn_collectives, attn_error
from libattn.integrations.vllm.backend import LibattnMetadataBuilder
from libattn.integrations.vllm.cpu import compute_slot_mapping
from libattn.integrations.vllm.layers import LatentImpl, LibattnImpl
from libattn.integrations.vllm.ranks import spread
from libattn.torch.ranks import GroupTable

RANKS, HEADS, D, BLOCK, BLOCKS = 2, 4, 64, 16, 8
NOPE, ROPE, RANK, WIDTH = 16, 8, 32, 24
MODE = types.SimpleNamespace(has_full_cudagraphs=lambda: True)


def collective(table: GroupTable, which: str, send: torch.Tensor, received: int, count: int) -> torch.Tensor:
    """What a slot of the table receives: ``received`` numbers, -1 where nothing came."""
    receive = torch.full((received,), -1.0)
    args = attn_collective_args(struct_size=sizeof(attn_collective_args), send=send.data_ptr(),
                                receive=receive.data_ptr(), count=count)
    error = attn_error(struct_size=sizeof(attn_error))
    status = getattr(table._struct, which)(addressof(args), addressof(error))
    if status:
        raise AssertionError(f"{status} {error.field.decode()}: {error.message.decode()}")
    return receive


def check_not_connected(table: GroupTable) -> None:
    """A table whose group is not there yet or has ended says so."""
    try:
        collective(table, "all_gather", torch.zeros(6), 12, 24)
        raise SystemExit("a table without ranks worked")
    except AssertionError as error:
        assert str(error).startswith(f"{int(Status.ORDER)} collectives: ") and "not connected" in str(error), error


def check_collectives(me: int, table: GroupTable) -> None:
    """Each against its definition."""
    of_rank = [torch.arange(6.0) * (-1) ** r + 10 * r for r in range(RANKS)]
    mine, both = of_rank[me], torch.stack(of_rank)
    assert torch.equal(collective(table, "all_gather", mine, 12, 24), torch.cat(of_rank))
    assert torch.equal(collective(table, "all_to_all", mine, 6, 12), both.view(RANKS, RANKS, 3)[:, me].reshape(-1))
    assert torch.equal(collective(table, "reduce_scatter_f32", mine, 3, 3), both.sum(0).view(RANKS, 3)[me])
    assert torch.equal(collective(table, "all_reduce_max_f32", mine, 6, 6), both.amax(0))
    assert torch.equal(collective(table, "all_gather", mine, 1, 0), torch.tensor([-1.0])), "nothing to exchange"
    assert ctypes.c_size_t.from_address(table.address).value == sizeof(attn_collectives), "the struct begins with its size"


def config(interleave: int, context: dict[str, Any], graphs: bool) -> Any:
    """What a builder reads of vLLM's."""
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=RANKS, cp_kv_cache_interleave_size=interleave),
        compilation_config=types.SimpleNamespace(static_forward_context=context, cudagraph_mode=MODE if graphs else None),
        model_config=types.SimpleNamespace(dtype=torch.float32))


def step(queries: list[int], lengths: list[int], tables: torch.Tensor, me: int, interleave: int) -> Any:
    """vLLM's metadata of a rank, and slots that are the library's."""
    m = recorded.metadata(queries, lengths, torch.zeros(len(queries), 64).int())
    positions = torch.cat([torch.arange(n - c, n) for c, n in zip(queries, lengths)])
    slots = torch.full((len(positions) + 2,), -7)
    compute_slot_mapping(len(positions), len(slots), m.query_start_loc, positions, tables, tables.stride(0), slots, BLOCK,
                         RANKS, me, interleave)
    at = 0
    for r, (c, n) in enumerate(zip(queries, lengths)):
        assert slots[at:at + c].tolist() == libattn.context_parallel_slots(
            range(n - c, n), tables[r].tolist(), BLOCK, me, RANKS, interleave)
        at += c
    assert slots[at:].tolist() == [-1, -1]
    m.block_table_tensor, m.slot_mapping = tables, slots[:at]
    return m


def check_layer(me: int, backend: str, interleave: int, latent: bool, dtype: torch.dtype = torch.float32) -> None:
    """A prefill, a chunk over earlier context next to a decode, decodes, drafts, and a captured shape. In 16 bits with the
    exchange that a description has where it names none."""
    libattn.torch.configure(ignore_environment=True, backend=backend)
    generator = torch.Generator().manual_seed(7 + interleave)
    context: dict[str, Any] = {}
    if latent:
        weight = torch.randn(RANKS * HEADS * (NOPE + WIDTH), RANK, generator=generator) * RANK**-0.5
        whole = weight.view(RANKS * HEADS, NOPE + WIDTH, RANK).double()
        impl: Any = LatentImpl(HEADS, RANK + ROPE, (NOPE + ROPE)**-0.5, kv_lora_rank=RANK, qk_nope_head_dim=NOPE,
                               qk_rope_head_dim=ROPE, v_head_dim=WIDTH,
                               kv_b_proj=types.SimpleNamespace(prefix="model.layers.0.self_attn.kv_b_proj"))
        impl.projection = weight.view(RANKS, -1, RANK)[me].contiguous()
        rows = torch.randn(3, 128, RANK, generator=generator), peaked(3, 128, ROPE, generator=generator)
        cache, width = torch.full((BLOCKS, BLOCK, RANK + ROPE), float("nan")), WIDTH
    else:
        impl = LibattnImpl(HEADS, D, D**-0.5, 1)
        rows = peaked(3, 128, 1, D, generator=generator), torch.randn(3, 128, 1, D, generator=generator)
        rows = tuple(t.to(dtype) for t in rows)
        cache, width = torch.full((BLOCKS, 1, BLOCK, 2 * D), float("nan"), dtype=dtype), D
    assert impl.supports_dcp and impl.can_return_lse_for_decode
    layer = context["model.layers.0.attn"] = types.SimpleNamespace(impl=impl, kv_cache=cache,
                                                                   layer_name="model.layers.0.attn")
    builder = LibattnMetadataBuilder(types.SimpleNamespace(dcp_sharded=True), list(context),
                                     config(interleave, context, not latent), torch.device("cpu"))
    builder.dtype = dtype
    if dtype != torch.float32:
        builder.steps.ranks = replace(builder.spread.described, all_to_all=False)
    tables = torch.tensor([[5, 2], [7, 0], [3, 6]]).int()  # blocks of 32 tokens, half of each here

    def forward(m: Any, queries: list[int], lengths: list[int]) -> None:
        count = sum(queries)
        q = peaked(count, RANKS * HEADS, (NOPE + ROPE) if latent else D, generator=generator).to(dtype)
        new = [torch.cat([t[r, n - c:n] for r, (c, n) in enumerate(zip(queries, lengths))]) for t in rows]
        mine = q[:, me * HEADS:(me + 1) * HEADS].contiguous()
        out = torch.full((count, HEADS * width), 7.0, dtype=dtype)
        if latent:
            impl.forward_mha(mine, new[0], new[1][:, None], cache, m, torch.ones(1), out)
        else:
            impl.forward(layer, mine, *new, cache, m, out)
        k, v = rows
        if latent:
            k, v = (torch.einsum("hdc,rtc->rthd", part, rows[0].double()) for part in whole[me * HEADS:][:HEADS].split([NOPE, WIDTH], dim=1))
            k = torch.cat([k, rows[1][:, :, None].double().expand(-1, -1, HEADS, -1)], dim=-1)
        error = worst_of(out.view(count, HEADS, width), mine, k, v, queries, lengths, impl.scale)
        assert error < (1e-4 if dtype == torch.float32 else 4e-2), (backend, interleave, latent, queries, error)

    lengths = [0, 0, 0]
    for queries in ([20, 7, 33], [1, 30, 1], [1, 1, 1], [3, 1, 2]):
        lengths = [a + b for a, b in zip(lengths, queries)]
        m = builder.build(0, step(queries, lengths, tables, me, interleave))
        if queries == [1, 1, 1]:  # as on a device: lengths of the context that are here, at an address that stays
            starts = m.seq_lens - (m.query_start_loc[1:] - m.query_start_loc[:-1])
            m.local_seq_lens = builder.spread.local_lengths(starts)
            assert m.local_seq_lens.tolist() == [libattn.context_parallel_length(int(n), me, RANKS, interleave)
                                                 for n in starts]
            assert m.local_seq_lens.data_ptr() == builder.spread.local_lengths(starts + 1).data_ptr()
            builder.spread.local_lengths(starts)
        forward(m, queries, lengths)
    slots = (cache if latent else cache.transpose(1, 2)).reshape(BLOCKS * BLOCK, -1)
    local = [libattn.context_parallel_length(n, me, RANKS, interleave) for n in lengths]
    assert int((~slots.isnan()).all(1).sum()) == sum(local) and int(slots.isnan().all(1).sum()) == len(slots) - sum(local)
    if not latent:
        given = step([1, 1, 1], [n + 1 for n in lengths], tables, me, interleave)
        builder.build_for_cudagraph_capture(given)
        m = builder.build(0, given)
        assert m.captured == (3, 3, 1)
        forward(m, [1, 1, 1], [n + 1 for n in lengths])


class Group:
    """What is read of vLLM's coordinator of a group."""

    def __init__(self, me: int) -> None:
        self.cpu_group, self.rank_in_group, self.world_size, self.device_communicator = dist.group.WORLD, me, RANKS, None

    def destroy(self) -> None:
        dist.destroy_process_group(self.cpu_group)
        del self.cpu_group


def main() -> None:
    me = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=me, world_size=RANKS)
    group = Group(me)
    recorded.dcp_group[:] = [group]
    ended, table = weakref.ref(group.cpu_group), GroupTable(group.cpu_group, me, RANKS)
    check_not_connected(GroupTable(None, me, RANKS))
    check_collectives(me, table)
    assert spread(config(1, {}, False), types.SimpleNamespace(dcp_sharded=False)) is None, "a cache that every rank has"
    for backend in ("cpu_ref", "cpu_simd"):
        for interleave in (1, 8):
            for latent in (False, True):
                check_layer(me, backend, interleave, latent)
        check_layer(me, backend, 8, False, torch.bfloat16)
    group.destroy()
    assert ended() is None, "something keeps the group, whose threads then end the process when it exits"
    check_not_connected(table)


if __name__ == "__main__":
    main()
