# SPDX-License-Identifier: Apache-2.0
"""Decodes as replays of CUDA graphs, played on a CPU, and SGLang's prefix cache of states that they write: a replay brings a captured
plan to its batch, and Python runs its calls again. SGLang refuses that cache on a CPU, whose gated delta layers it has no kernels for.
Imported before SGLang's workers are."""
from __future__ import annotations

import multiprocessing
import types
import unittest.mock
from typing import Any

import torch
from sglang.srt.server_args import ServerArgs


def replay_decodes(backend: Any) -> None:
    eager, batches, arrays = backend.init_forward_metadata, "captured_batches", (
        "seq_lens", "out_cache_loc", "mamba_track_mask", "mamba_track_indices")

    def init_forward_metadata(self: Any, batch: Any) -> None:
        if not hasattr(self, batches):
            self.init_cuda_graph_state(8, 8)
            setattr(self, batches, {})
        if not batch.forward_mode.is_decode():
            return eager(self, batch)
        size, captured = batch.batch_size, getattr(self, batches)
        if size not in captured:  # all layers have run in prompts
            ones = {name: torch.ones_like(getattr(batch, name)) for name in (*arrays, "seq_lens_cpu")}
            captured[size] = types.SimpleNamespace(**vars(batch) | ones)
            captured[size].mamba_track_mask.zero_()
            self.init_forward_metadata_out_graph(captured[size], in_capture=True)
            self.init_forward_metadata_in_graph(captured[size])
        for name in arrays:  # as SGLang does before a replay
            getattr(captured[size], name).copy_(getattr(batch, name))
        given, batch.mamba_track_mask = batch.mamba_track_mask, None
        self.init_forward_metadata_out_graph(batch)
        batch.mamba_track_mask = given
        with unittest.mock.patch("libattn.integrations.sglang.gathered.capturing", lambda device: True):
            self.init_forward_metadata_in_graph(batch)

    backend.init_forward_metadata = init_forward_metadata


ServerArgs._validate_mamba_extra_buffer = lambda *_: None
if multiprocessing.current_process().name != "MainProcess":  # that one has Transformers' model, too
    from libattn.integrations.sglang.backend import LibattnBackend
    from libattn.integrations.sglang.gdn import LibattnGdnBackend

    tensor = torch.tensor  # a CPU has no pinned memory
    torch.tensor = lambda *given, pin_memory=False, **options: tensor(*given, **options)
    torch.Tensor.pin_memory = lambda self, *_: self
    for each in (LibattnBackend, LibattnGdnBackend):
        replay_decodes(each)
