# SPDX-License-Identifier: Apache-2.0
"""Prefill of cuda_flash: checked against float64, timed next to other builds of it, PyTorch's cuDNN and FA2, a GEMM and a peer.

usage: prefill.py CELL.so [BUILD.so ...] PLUGIN.so [--check] [--alone] [--time NAME+...] [--peer FILE.so[:FUNCTION]]
                  [--rounds N] [--seed N]
CELL.so is prefill_cell.c. NAME is a cell's, or a pattern with * in it. One table row a cell; times are medians over rounds of captured
graphs, each round in another order. PLUGIN.so is what is checked and what the others are held to: they have a column of us and times
over its.

A peer is any attention that is built elsewhere. It exports FUNCTION, peer_attend if none is named:
    int peer_attend(const void *q, const void *k, const void *v, void *out, float *lse, int *counters, int requests, int queries,
                    int keys, int q_heads, int kv_heads, int head_size, int causal, int window, float scale, cudaStream_t stream);
Rows are contiguous bf16: q and out [requests, queries, q_heads, head_size], k and v [requests, keys, kv_heads, head_size]; lse is
[requests, q_heads, queries]; counters are 4 for its own use, zero at first; window: how many keys before its own a query sees, -1 all.
It launches on the stream, in a capture too, and returns 0, or another number for a shape that it does not take. Wrong results are
not timed.
"""
import argparse
import ctypes
import fnmatch
import math
import random
import re
import shutil
import statistics
import sys
import tempfile

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

INT, REAL, POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
BOUND = {torch.bfloat16: 0.06, torch.float16: 0.02}  # of an element, over its row's RMS
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}


class Cell(ctypes.Structure):
    _fields_ = [(name, INT) for name in (
        "bf16 fp8 reqs q_heads kv_heads size size_v page nhd blocks keys causal window_left window_right chunk alibi "
        "invariant max_query max_keys workspace_percent form behind").split()]
    _fields_ += [("scale", REAL), ("soft_cap", REAL)]
    _fields_ += [(name, POINTER) for name in "query_start_host seq_lens_host query_start key_start seq_lens table sinks slopes".split()]
    _fields_ += [("table_stride", INT)]
    _fields_ += [(name, POINTER) for name in "q k v out lse codes code_scales code_scale".split()]
    _fields_ += [("bytes", INT), ("made", POINTER)]


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Problem:
    """queries[r] queries of requests with keys[r] keys, the queries last."""

    def __init__(self, library, queries, keys=None, heads=(32, 8), size=(128, 128), dtype=torch.bfloat16, causal=True, page=0, nhd=False,
                 window=(-1, -1), chunk=0, cap=0.0, alibi=0, sinks=False, invariant=False, lse=False, spread=1.0, fp8=False,
                 workspace_percent=100, form=0, behind=False, slopes=(0.0, 0.1)):
        keys = keys or queries
        self.calls = library
        self.queries, self.keys, self.heads, self.size, self.dtype, self.causal = queries, keys, heads, size, dtype, causal
        self.window, self.chunk, self.cap, self.alibi = window, chunk, cap, alibi
        tokens, total = sum(queries), sum(keys)
        new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)
        self.q = (new(tokens, heads[0], size[0]) * spread).to(dtype)
        self.narrow_q = self.q.to(torch.float8_e4m3fn) if fp8 == 2 else self.q
        self.q = self.narrow_q.to(dtype)
        self.out = torch.full((tokens, heads[0], size[1]), float("nan"), device="cuda", dtype=dtype)
        self.lse = torch.full((heads[0], tokens), float("nan"), device="cuda") if lse else None
        self.rows_k, self.rows_v = new(total, heads[1], size[0]), new(total, heads[1], size[1])
        self.sinks = torch.randn(heads[0], device="cuda") if sinks else None
        low, high = slopes
        self.slopes = low + torch.rand(heads[0], device="cuda") * (high - low) if alibi else None
        self.key_starts = [sum(keys[:r]) for r in range(len(keys) + 1)]
        self.query_starts = [sum(queries[:r]) for r in range(len(queries) + 1)]
        c = self.cell = Cell()
        c.bf16, c.reqs, c.q_heads, c.kv_heads, c.size, c.size_v = dtype == torch.bfloat16, len(queries), *heads, *size
        c.page, c.nhd, c.causal, c.window_left, c.window_right, c.chunk = page, nhd, causal, *window, chunk
        c.alibi, c.invariant, c.max_query, c.max_keys, c.keys = alibi, invariant, max(queries), max(keys), total
        c.scale, c.soft_cap = 1 / math.sqrt(size[0]), cap
        self.kept = [torch.tensor(self.query_starts, dtype=torch.int64), torch.tensor(keys, dtype=torch.int32),
                     ints(self.query_starts), ints(self.key_starts), ints(keys)]
        c.query_start_host, c.seq_lens_host, c.query_start, c.key_start, c.seq_lens = (x.data_ptr() for x in self.kept)
        self.k, self.v = self.rows_k, self.rows_v
        if page:
            self.fill_pages(page, nhd, fp8)
        c.fp8, c.workspace_percent = fp8, workspace_percent
        c.q, c.k, c.v, c.out = (x.data_ptr() for x in (self.narrow_q, self.k, self.v, self.out))
        self.form, c.form, c.behind = form, form, behind
        self.codes = torch.zeros(tokens, heads[0] * size[1], dtype=torch.uint8, device="cuda")
        self.code_scales = torch.zeros(tokens, heads[0] * size[1] // 16, device="cuda")
        self.code_scale = torch.full((1,), 0.05, device="cuda")
        c.codes, c.code_scales, c.code_scale = (x.data_ptr() for x in (self.codes, self.code_scales, self.code_scale))
        c.lse = self.lse.data_ptr() if lse else None
        c.sinks = self.sinks.data_ptr() if sinks else None
        c.slopes = self.slopes.data_ptr() if alibi else None
        assert library.cell_size(ctypes.byref(c)) == 0
        self.workspace = torch.empty(max(c.bytes, 1), dtype=torch.uint8, device="cuda")
        assert library.cell_plan(ctypes.byref(c), POINTER(self.workspace.data_ptr()), stream()) == 0
        torch.cuda.synchronize()

    def fill_pages(self, page, nhd, fp8):
        counts = [-(-k // page) for k in self.keys]
        order = torch.randperm(sum(counts))
        stride = max(counts)
        table = torch.full((len(counts), stride), 2**30, dtype=torch.int32)
        where = torch.empty(sum(self.keys), dtype=torch.int64)
        at = 0
        for r, count in enumerate(counts):
            table[r, :count] = order[at:at + count].int()
            j = torch.arange(self.keys[r])
            where[self.key_starts[r]:self.key_starts[r + 1]] = table[r, j // page].long() * page + j % page
            at += count
        where = where.cuda()
        blocks = sum(counts)
        made = []
        for rows in (self.rows_k, self.rows_v):
            stored = rows.to(torch.float8_e4m3fn) if fp8 else rows
            flat = torch.full((blocks * page, *rows.shape[1:]), float("nan"), device="cuda", dtype=self.dtype)
            flat = flat.to(stored.dtype)
            flat.view(torch.uint8 if fp8 else torch.int16)[where] = stored.view(torch.uint8 if fp8 else torch.int16)
            pages = flat.view(blocks, page, *rows.shape[1:])
            made.append(pages if nhd else pages.transpose(1, 2).contiguous())
            if fp8:
                rows.copy_(stored.to(self.dtype))
        self.k, self.v = made
        self.table = table.cuda()
        self.cell.table, self.cell.table_stride, self.cell.blocks = self.table.data_ptr(), stride, blocks

    def run(self):
        assert self.calls.cell_run(ctypes.byref(self.cell), stream()) == 0

    def close(self):
        self.calls.cell_close(ctypes.byref(self.cell))

    def numbers(self):
        """The output; of codes of e4m3 what they stand for, of nvfp4 0."""
        if not self.form:
            return self.out
        if self.form == 4:
            return torch.zeros_like(self.out)
        group = {1: self.size[1], 2: 64, 3: 128}[self.form]
        codes = self.codes.view(torch.float8_e4m3fn).float().view(len(self.q), -1, group)
        scales = self.code_scale if self.form == 1 else self.code_scales.flatten()[:codes[..., 0].numel()].view(len(self.q), -1, 1)
        return (codes * scales).view(self.out.shape)

    def visible(self, r, rows):
        p = rows[:, None] + self.keys[r] - self.queries[r]
        j = torch.arange(self.keys[r], device="cuda")[None, :]
        sees = (j <= p) if self.causal else torch.ones_like(p * j, dtype=torch.bool)
        if self.window[0] >= 0:
            sees &= j >= p - self.window[0]
        if self.window[1] >= 0:
            sees &= j <= p + self.window[1]
        if self.chunk:
            sees &= j // self.chunk == torch.div(p, self.chunk, rounding_mode="floor")
        return sees, p, j

    def error(self, samples=96, out=None):
        """Largest error of an element over its row's RMS, on some rows of each request and some heads; of a peer's out, if given."""
        worst, group, lse_too = 0.0, self.heads[0] // self.heads[1], out is None and self.lse is not None
        out = self.numbers() if out is None else out
        step = 2.0 ** -25 if self.dtype == torch.float16 else 0.0  # half of what lies between f16's smallest numbers
        for r in random.sample(range(len(self.queries)), min(6, len(self.queries))):
            n = self.queries[r]
            picked = set(random.sample(range(n), min(samples, n))) | {0, n - 1} | {x for x in (31, 32, 127, 128) if x < n}
            rows = torch.tensor(sorted(picked), device="cuda")
            for h in random.sample(range(self.heads[0]), min(3, self.heads[0])):
                q = self.q[self.query_starts[r] + rows, h].double()
                k = self.rows_k[self.key_starts[r]:self.key_starts[r + 1], h // group].double()
                v = self.rows_v[self.key_starts[r]:self.key_starts[r + 1], h // group].double()
                s = q @ k.T * self.cell.scale
                if self.cap:
                    s = self.cap * torch.tanh(s / self.cap)
                sees, p, j = self.visible(r, rows)
                if self.alibi == 1:
                    s = s - self.slopes[h].double() * (p - j).abs()
                if self.alibi == 2:
                    s = s - self.slopes[h].double() * (p - j).clamp(min=0).double().sqrt()
                s = s.masked_fill(~sees, -math.inf)
                if self.sinks is not None:
                    s = torch.cat([s, self.sinks[h].double().expand(len(rows), 1)], 1)
                lse = torch.logsumexp(s, 1)
                w = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[:, None])[:, :v.shape[0]]
                want = w @ v
                got = out[self.query_starts[r] + rows, h].double()
                rms = want.square().mean(1, keepdim=True).sqrt() + 1e-6
                e = (((got - want).abs() - step).clamp(min=0) / rms).max().item()
                worst = max(worst, e if e == e else 1e9)
                if lse_too:
                    e = (self.lse[h, self.query_starts[r] + rows].double() - lse).abs().max().item()
                    worst = max(worst, e if e == e else 1e9)
        return worst

    def flops(self):
        pairs = 0
        for n, m in zip(self.queries, self.keys):
            if self.window[0] >= 0 and self.causal:
                pairs += sum(min(m - n + i + 1, self.window[0] + 1) for i in range(n))
            elif self.chunk:
                pairs += sum((m - n + i) % self.chunk + 1 for i in range(n))
            else:
                pairs += n * (m - n) + n * (n + 1) // 2 if self.causal else n * m
        return 2.0 * self.heads[0] * pairs * (self.size[0] + self.size[1])


def stream():
    return POINTER(torch.cuda.current_stream().cuda_stream)


def graph_of(launch, copies):
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            launch()
    graph.replay()
    torch.cuda.synchronize()
    return graph, copies


def time_graph(made):
    graph, copies = made
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / copies


def open_cell(path, plugin):
    """A cell library of its own for each plugin, since one holds one."""
    with tempfile.NamedTemporaryFile(suffix=".so") as copy:
        shutil.copyfile(path, copy.name)
        library = ctypes.CDLL(copy.name)
    assert library.cell_open(plugin.encode()) == 0
    return library


def open_peer(path):
    file, _, name = path.partition(":")
    function = getattr(ctypes.CDLL(file), name or "peer_attend")
    function.argtypes = [POINTER] * 6 + [ctypes.c_int] * 8 + [ctypes.c_float, POINTER]
    return function


def torch_launch(problem, backend):
    n, heads = problem.queries[0], problem.heads
    q, k, v = (x.view(-1, n, *x.shape[1:]).transpose(1, 2) for x in (problem.q, problem.rows_k, problem.rows_v))

    def launch():
        with sdpa_kernel(backend):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=heads[0] != heads[1])
    return launch


def peer_launch(problem, function):
    requests, n, m = len(problem.queries), problem.queries[0], problem.keys[0]
    out, lse = torch.zeros_like(problem.out), torch.empty(requests, problem.heads[0], n, device="cuda")
    counters = torch.zeros(4, dtype=torch.int32, device="cuda")

    def launch():
        pointers = (x.data_ptr() for x in (problem.q, problem.rows_k, problem.rows_v, out, lse, counters))
        if function(*pointers, requests, n, m, *problem.heads, problem.size[0], problem.causal, problem.window[0], problem.cell.scale,
                    stream()) != 0:
            raise RuntimeError("refused")
        return out
    return launch


def others(problem, peer):
    """Launches over the same numbers, contiguous, by all who take them."""
    made = {}
    if problem.cap or problem.alibi or problem.chunk or problem.sinks is not None or problem.window[1] > 0 or \
            len(set(problem.queries)) + len(set(problem.keys)) > 2:
        return made
    if problem.queries == problem.keys and max(problem.window) < 0:
        made = {what: torch_launch(problem, backend) for what, backend in BACKENDS.items()}
    if peer and problem.dtype == torch.bfloat16 and problem.size[0] == problem.size[1]:
        made["peer"] = peer_launch(problem, peer)
    return {what: launch for what, launch in made.items() if takes(problem, launch)}


def takes(problem, launch):
    try:
        out = launch()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return out is None or problem.error(32, out) < BOUND[problem.dtype]


def tokens(n, total=16384):
    return [n] * (total // n)


CELLS = {}
for _n in (512, 2048, 8192, 16384):
    CELLS[f"causal {_n}"] = dict(queries=tokens(_n))
    CELLS[f"full {_n}"] = dict(queries=tokens(_n), causal=False)
CELLS |= {
    "causal 1 x 512": dict(queries=[512]),
    "causal 1 x 2048": dict(queries=[2048]),
    "causal 1 x 8192": dict(queries=[8192]),
    "full 1 x 8192": dict(queries=[8192], causal=False),
    "page 16, causal 8192": dict(queries=tokens(8192), page=16),
    "page 16, causal 2048": dict(queries=tokens(2048), page=16),
    "page 64, causal 8192": dict(queries=tokens(8192), page=64),
    "page 128, causal 8192": dict(queries=tokens(8192), page=128),
    "page 64, full 8192": dict(queries=tokens(8192), page=64, causal=False),
    "page 128, full 8192": dict(queries=tokens(8192), page=128, causal=False),
    "page 16 NHD, causal 8192": dict(queries=tokens(8192), page=16, nhd=True),
    "varlen 1024..3072, causal": dict(queries=[1024, 3072, 1536, 2560, 2047, 2049, 1793, 2303]),
    "D 64 full 8192": dict(queries=tokens(8192), causal=False, size=(64, 64)),
    "D 64 causal 8192": dict(queries=tokens(8192), size=(64, 64)),
    "D 96 causal 8192": dict(queries=tokens(8192), size=(96, 96)),
    "D 256 full 8192": dict(queries=tokens(8192), causal=False, size=(256, 256), heads=(16, 8)),
    "D 256 causal 8192": dict(queries=tokens(8192), size=(256, 256), heads=(16, 8)),
    "192/128 full 8192": dict(queries=tokens(8192), causal=False, size=(192, 128), heads=(16, 16)),
    "192/128 causal 8192": dict(queries=tokens(8192), size=(192, 128), heads=(16, 16)),
    "sinks, causal 8192": dict(queries=tokens(8192), sinks=True),
    "window 1024, 8192": dict(queries=tokens(8192), window=(1023, 0)),
    "window 4096, 8192": dict(queries=tokens(8192), window=(4095, 0)),
    "chunk 2048, 8192": dict(queries=tokens(8192), chunk=2048),
    "ALiBi, causal 8192": dict(queries=tokens(8192), alibi=1),
    "soft cap, causal 8192": dict(queries=tokens(8192), cap=50.0),
    "invariant, causal 8192": dict(queries=tokens(8192), invariant=True),
    "128 over 8192": dict(queries=[128], keys=[8320], page=16),
    "64 over 8192": dict(queries=[64], keys=[8256], page=16),
    "512 over 8192": dict(queries=[512], keys=[8704], page=16),
    "2048 over 8192": dict(queries=[2048], keys=[10240], page=16),
    "128 over 8192, contiguous": dict(queries=[128], keys=[8320]),
    "512 over 8192, contiguous": dict(queries=[512], keys=[8704]),
    "2048 over 8192, contiguous": dict(queries=[2048], keys=[10240]),
    "32 decodes 4096 + 4 x 512": dict(queries=[1] * 32 + [512] * 4, keys=[4096] * 32 + [512] * 4, page=64),
    "8 decodes 8192 + 8 x 128": dict(queries=[1] * 8 + [128] * 8, keys=[8192] * 8 + [128] * 8, page=64),
    "64 x 1 over 8192": dict(queries=[1] * 64, keys=[8192] * 64, page=64),
    "64 x 4 over 8192": dict(queries=[4] * 64, keys=[8192] * 64, page=64),
    "16 over 8192": dict(queries=[16], keys=[8192], page=64),
    "page 1, causal 8192": dict(queries=tokens(8192), page=1),
    "fp8 cache, page 64, causal 8192": dict(queries=tokens(8192), page=64, fp8=True),
    "fp8 cache, page 64, causal 2048": dict(queries=tokens(2048), page=64, fp8=True),
    "fp8 cache, 512 over 8192": dict(queries=[512], keys=[8704], page=16, fp8=True),
    "fp8 cache, 2048 over 8192": dict(queries=[2048], keys=[10240], page=16, fp8=True),
    "fp8 queries, causal 8192": dict(queries=tokens(8192), page=64, fp8=2),
    "fp8 queries, full 8192": dict(queries=tokens(8192), page=64, fp8=2, causal=False),
    "fp8 queries, 2048 over 8192": dict(queries=[2048], keys=[10240], page=64, fp8=2),
    "fp8 cache, soft cap, causal 8192": dict(queries=tokens(8192), page=64, fp8=True, cap=50.0),
}
for _form, _name in enumerate(("static fp8", "fp8 of 64", "fp8 of 128", "nvfp4"), 1):
    for _behind in (False, True):
        _what = f"{_name}{' behind' if _behind else ''}, "
        CELLS[_what + "causal 512"] = dict(queries=tokens(512), form=_form, behind=_behind)
        CELLS[_what + "causal 8192"] = dict(queries=tokens(8192), form=_form, behind=_behind)
        CELLS[_what + "64 decodes 8192"] = dict(queries=[1] * 64, keys=[8192] * 64, page=64, form=_form, behind=_behind)


def checks():
    some = lambda most: random.randint(1, most)
    lengths = [some(700) for _ in range(5)] + [1, 128, 129]
    more = [n + random.choice([0, some(900)]) for n in lengths]
    base = dict(queries=lengths, keys=more, lse=True, spread=2.0)
    for dtype in (torch.bfloat16, torch.float16):
        for size in ((64, 64), (128, 128), (192, 128), (256, 256), (96, 96), (80, 80), (40, 40)):
            for causal in (True, False):
                for page in (0, 16, 64, 24, 256, 1, 12):
                    yield dict(base, dtype=dtype, size=size, causal=causal, page=page, nhd=page == 64)
    for group in ((8, 8), (8, 1), (14, 2), (40, 8), (32, 2), (64, 2), (128, 1)):
        yield dict(base, heads=group, page=16)
        yield dict(base, heads=group)
    for page in (0, 16):
        for size in ((128, 128), (256, 256)):
            for term in (dict(window=(100, 0)), dict(window=(190, 0)), dict(window=(33, 33), causal=False), dict(chunk=96), dict(cap=20.0),
                         dict(alibi=1), dict(alibi=2), dict(alibi=1, causal=False), dict(sinks=True), dict(invariant=True),
                         dict(window=(130, 0), cap=30.0, sinks=True, alibi=1)):
                yield dict(base, page=page, size=size, **term)
    for size in ((64, 64), (96, 96), (128, 128), (256, 256)):
        for page in (16, 64, 24):
            for term in (dict(), dict(causal=False), dict(window=(300, 0)), dict(cap=20.0), dict(alibi=1), dict(sinks=True)):
                yield dict(base, fp8=random.randint(1, 2), page=page, size=size, nhd=page == 64, **term)
    for percent in (40, 20, 8):  # copies of some heads at a time
        yield dict(queries=[1500, 700, 9], keys=[3000, 700, 2500], lse=True, page=16, fp8=random.randint(1, 2),
                   workspace_percent=percent)
    for dtype in (torch.bfloat16, torch.float16):
        for spread in (12.0, 100.0):  # scores that grow past what a row's base leaves room for
            for term in (dict(), dict(causal=False), dict(alibi=1), dict(sinks=True, size=(64, 64))):
                yield dict(base, dtype=dtype, spread=spread, **term)
    for dtype in (torch.bfloat16, torch.float16):  # items of 192 rows
        for heads in ((32, 8), (8, 8), (8, 1), (14, 2), (40, 8)):
            for term in (dict(), dict(causal=False), dict(window=(100, 0)), dict(sinks=True, spread=12.0)):
                yield dict(base | term, dtype=dtype, size=random.choice([(64, 64), (40, 40)]), heads=heads, page=random.choice([0, 16, 64]),
                           invariant=True)
    few = dict(queries=[random.randint(33, 200)], keys=[random.randint(3000, 6000)], lse=True, spread=2.0)  # items are cut into parts
    for term in (dict(), dict(causal=False), dict(sinks=True), dict(cap=20.0), dict(alibi=1), dict(alibi=2), dict(window=(2500, 0)),
                 dict(dtype=torch.float16), dict(size=(64, 64)), dict(size=(192, 128), heads=(16, 16)), dict(size=(80, 80)),
                 dict(heads=(14, 2), sinks=True, cap=20.0), dict(spread=12.0), dict(size=(256, 256))):
        for page in (0, 16, 64):
            yield dict(few, page=page, nhd=page == 64, **term)
    for term in (dict(), dict(sinks=True), dict(cap=20.0), dict(size=(64, 64)), dict(size=(256, 256))):
        yield dict(few, page=16, fp8=random.randint(1, 2), **term)
    yield dict(queries=[33, 100, 9], keys=[9000, 2100, 100], page=16, lse=True)
    for dtype in (torch.bfloat16, torch.float16):
        for size in ((64, 64), (128, 128), (192, 128), (256, 256)):
            for slopes in ((0.0, 1.0), (-0.02, 0.05)):  # steep ones; of both signs
                yield dict(base, dtype=dtype, size=size, alibi=1, slopes=slopes, heads=random.choice([(32, 8), (14, 2), (8, 8)]))
    yield dict(queries=[4096], lse=True)
    yield dict(queries=[2048] * 3, causal=False, lse=True)
    yield dict(queries=[2048] * 3, size=(64, 64), lse=True)
    yield dict(queries=[300, 5000], keys=[20000, 5000], page=16, lse=True)


def check(library):
    failed = done = 0
    for settings in checks():
        problem = Problem(library, **settings)
        problem.run()
        torch.cuda.synchronize()
        worst = problem.error()
        once = problem.out.clone()
        problem.out.fill_(float("nan"))
        problem.run()
        torch.cuda.synchronize()
        moved = not torch.equal(once.view(torch.int16), problem.out.view(torch.int16))
        done += 1
        if worst > BOUND[problem.dtype] or moved:
            failed += 1
            if failed < 40:
                print(f"FAILED {worst:.4f}{' and moves' if moved else ''}: {settings}", flush=True)
        problem.close()
    print(f"checked {done}, failed {failed}", flush=True)
    return failed


def check_alone(library):
    """Batch-invariant layers: requests alone give the bits that they have in a batch of more items than multiprocessors."""
    failed = done = 0
    for settings in (dict(), dict(causal=False), dict(cap=20.0), dict(alibi=1), dict(alibi=2), dict(window=(300, 0)), dict(sinks=True),
                     dict(size=(64, 64)), dict(size=(192, 128)), dict(size=(256, 256)), dict(dtype=torch.float16, heads=(14, 2)),
                     dict(size=(64, 64), cap=8.0, causal=False), dict(size=(256, 256), alibi=1, window=(12, 1), causal=False),
                     dict(size=(224, 224), cap=8.0, alibi=2, window=(20, 0), dtype=torch.float16)):
        queries = [random.randint(1, 1500) for _ in range(20)] + [1, 2, 9, 33]
        keys = [n + random.choice([0, random.randint(1, 2000)]) for n in queries]
        settings = dict(settings, lse=True, invariant=True)
        whole = Problem(library, queries=queries, keys=keys, **settings)
        whole.run()
        torch.cuda.synchronize()
        for r in random.sample(range(20), 5) + [20, 21, 22, 23]:
            one = Problem(library, queries=[queries[r]], keys=[keys[r]], **settings)
            rows = slice(whole.query_starts[r], whole.query_starts[r + 1])
            own = slice(whole.key_starts[r], whole.key_starts[r + 1])
            one.q.copy_(whole.q[rows])
            one.rows_k.copy_(whole.rows_k[own])
            one.rows_v.copy_(whole.rows_v[own])
            for mine, theirs in ((one.sinks, whole.sinks), (one.slopes, whole.slopes)):
                if mine is not None:
                    mine.copy_(theirs)
            one.run()
            torch.cuda.synchronize()
            same = torch.equal(one.out.view(torch.int16), whole.out[rows].view(torch.int16)) and torch.equal(
                one.lse.view(torch.int32), whole.lse[:, rows].contiguous().view(torch.int32))
            done += 1
            failed += not same
            if not same:
                print(f"FAILED alone: {queries[r]} queries over {keys[r]} keys, {settings}", flush=True)
            one.close()
        whole.close()
    print(f"checked {done} alone, failed {failed}", flush=True)
    return failed


def measure(libraries, names, rounds, peer, seed):
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gemm = graph_of(lambda: torch.matmul(a, b), 1)
    builds = [f"build {i}" for i in range(1, len(libraries))]
    columns = builds + list(BACKENDS) + ["peer"] * (peer is not None)
    titles = ["cell", "us", "TFLOP/s", "of GEMM", *columns, "error"]
    print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
    for name in names:
        problems, errors = [], []
        for library in libraries:
            torch.manual_seed(seed)
            random.seed(seed)
            problems.append(Problem(library, **CELLS[name]))
            problems[-1].run()
            torch.cuda.synchronize()
            errors.append(problems[-1].error(32))
        ours = problems[-1]
        launches = {what: problem.run for what, problem in zip(builds + ["ours"], problems)} | others(ours, peer)
        copies = max(1, min(20, int(2e12 / ours.flops())))
        made = {what: graph_of(launch, copies) for what, launch in launches.items()} | {"GEMM": gemm}
        times = {what: [] for what in made}
        for _ in range(rounds):
            for what, graph in random.sample(list(made.items()), len(made)):  # what ran before it costs or spares up to 4 %
                time_graph(graph)
                times[what].append(min(time_graph(graph) for _ in range(2)) if what == "GEMM" else time_graph(graph))
        t = {what: statistics.median(x) for what, x in times.items()}
        rate, top = ours.flops() / t["ours"] / 1e6, 2 * 8192**3 / t["GEMM"] / 1e6
        cells = [name, f"{t['ours']:.1f}", f"{rate:.0f}", f"{rate / top:.2f} of {top:.0f}"]
        cells += [f"{t[x]:.1f}; {t[x] / t['ours']:.2f}" if x in t else "" for x in columns]
        print("| " + " | ".join(cells + [" ".join(f"{e:.3f}" for e in errors)]) + " |", flush=True)
        for problem in problems:
            problem.close()
        del problem, problems, ours, launches, made
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cell")
    parser.add_argument("plugins", nargs="+")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--time", default="")
    parser.add_argument("--peer", type=open_peer)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**31)
    names = []
    for pattern in re.split(r"(?<! )\+(?! )", args.time) if args.time else []:
        found = [name for name in CELLS if fnmatch.fnmatchcase(name, pattern) and name not in names]
        if not found:
            parser.error(f"--time: no cell is named {pattern}; there are: {'; '.join(CELLS)}")
        names += found
    print(f"seed {seed}", flush=True)
    random.seed(seed)
    torch.manual_seed(seed)
    libraries = [open_cell(args.cell, plugin) for plugin in args.plugins]
    failed = (check(libraries[-1]) if args.check else 0) + (check_alone(libraries[-1]) if args.alone else 0)
    if names:
        for i, plugin in enumerate(args.plugins[:-1], 1):
            print(f"build {i}: {plugin}")
        measure(libraries, names, args.rounds, args.peer, seed)
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
