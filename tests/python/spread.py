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
from libattn._declarations import Status, attn_collective_args, attn_collectives, attn_error
from libattn.integrations.vllm.backend import LibattnMetadataBuilder
from libattn.integrations.vllm.cpu import compute_slot_mapping
from libattn.integrations.vllm.ranks import spread
from libattn.torch.ranks import GroupTable

RANKS, BLOCK = 2, recorded.BLOCK


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


class Rank(recorded.Engine):
    """A rank's part: the requests' rows are the same on all, its heads have queries and weights of their own."""

    def __init__(self, me: int, interleave: int, latent: bool, dtype: torch.dtype) -> None:
        super().__init__(dtype, recorded.Latent() if latent else None, not latent)
        self.me, self.interleave = me, interleave
        self.tables = self.tables.flatten()[:15].view(3, 5)  # a block has tokens for each rank
        self.generator.manual_seed(me)
        for layer, weight in zip(self.context.values(), self.weights):
            weight.copy_(weight + 0.2 * torch.randn(weight.shape, generator=self.generator).to(dtype))
            layer.impl.kv_b_proj.weight = weight.view(-1, weight.shape[-1]).to(dtype)
        self.config.parallel_config = parallel(interleave)
        self.builder = LibattnMetadataBuilder(types.SimpleNamespace(dcp_sharded=True), list(self.context), self.config, self.device)
        if dtype != torch.float32:  # the exchange that a description has where it names none
            self.builder.steps.ranks = replace(self.builder.spread.described, all_to_all=False)

    def batch(self, queries: list[int], lengths: list[int], requests: list[int] | None = None) -> Any:
        """vLLM's metadata of a rank, and slots that are the library's."""
        tables, m = self.tables[:len(queries)], recorded.metadata(queries, lengths, torch.zeros(len(queries), 64).int())
        positions = torch.cat([torch.arange(n - c, n) for c, n in zip(queries, lengths)])
        slots = torch.full((len(positions) + 2,), -7)
        compute_slot_mapping(len(positions), len(slots), m.query_start_loc, positions, tables, tables.stride(0), slots, BLOCK,
                             RANKS, self.me, self.interleave)
        wanted = [libattn.context_parallel_slots(range(n - c, n), table, BLOCK, self.me, RANKS, self.interleave)
                  for c, n, table in zip(queries, lengths, tables.tolist())]
        assert slots.tolist() == [*sum(wanted, []), -1, -1]
        m.block_table_tensor, m.slot_mapping, m.max_seq_len = tables, slots[:-2], self.ROOM
        return m


def parallel(interleave: int) -> Any:
    return types.SimpleNamespace(decode_context_parallel_size=RANKS, cp_kv_cache_interleave_size=interleave)


def check_layers(me: int, backend: str, interleave: int, latent: bool, dtype: torch.dtype = torch.float32) -> None:
    """A prefill, a chunk over earlier context next to decodes, decodes, drafts, and a captured shape."""
    libattn.torch.configure(ignore_environment=True, backend=backend)
    rank = Rank(me, interleave, latent, dtype)
    assert all(layer.impl.supports_dcp and layer.impl.can_return_lse_for_decode for layer in rank.context.values())
    lengths = [0, 0, 0]
    for queries in ([20, 7, 33], [1, 30, 1], [1, 1, 1], [3, 1, 2]):
        lengths = [a + b for a, b in zip(lengths, queries)]
        if queries == [1, 1, 1]:  # as on a device: with the lengths of the context that are here
            rank.builder._metadata = lambda m: replace(  # type: ignore[method-assign]
                LibattnMetadataBuilder._metadata(rank.builder, m), local_seq_lens=rank.builder.spread.local_lengths(m.seq_lens - 1))
        error = rank.step(queries, lengths)
        assert error < (1e-4 if dtype == torch.float32 else 4e-2), (backend, interleave, latent, queries, error)
        rank.builder.__dict__.pop("_metadata", None)
    local = [libattn.context_parallel_length(n, me, RANKS, interleave) for n in lengths]
    for layer in rank.context.values():
        rows = layer.kv_cache if latent else layer.kv_cache.transpose(1, 2)
        gaps = rows.reshape(len(rows) * BLOCK, -1).isnan()
        assert int((~gaps).all(1).sum()) == sum(local) and int(gaps.all(1).sum()) == len(gaps) - sum(local)
    # At an address that stays.
    found = rank.builder.spread.local_lengths(torch.tensor(lengths))
    assert found.tolist() == local and found.data_ptr() == rank.builder.spread.local_lengths(torch.tensor(lengths) + 1).data_ptr()
    if not latent:
        error = recorded.replayed(Rank(me, interleave, latent, dtype), 1)
        assert error < (1e-4 if dtype == torch.float32 else 4e-2), (backend, interleave, error)


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
    everywhere = spread(types.SimpleNamespace(parallel_config=parallel(1)), types.SimpleNamespace(dcp_sharded=False))
    assert everywhere is None, "a cache that every rank has"
    for backend in ("cpu_ref", "cpu_simd"):
        for interleave in (1, 8):
            for latent in (False, True):
                check_layers(me, backend, interleave, latent)
        check_layers(me, backend, 8, False, torch.bfloat16)
    group.destroy()
    assert ended() is None, "something keeps the group, whose threads then end the process when it exits"
    check_not_connected(table)


if __name__ == "__main__":
    main()
