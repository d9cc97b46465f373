# SPDX-License-Identifier: Apache-2.0
"""What the backends of attention and of gated delta layers share: the begin of a step, layers that are bound together after their
first run, and plans of captured shapes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from ..._declarations import PlanMode, Status
from ...errors import make
from ...step import Batch
from ...torch.steps import Shape, Steps
from ...torch.store import capturing


@dataclass(eq=False)
class Step:
    """One step's batch; layers that run with the same object share its plan."""

    batch: Batch
    num_tokens: int
    captured: Shape | None = None
    record: Callable[[], None] | None = None  #: what a graph does before its layers run: its arrays, from those that SGLang fills
    ran: set[int] = field(default_factory=set)  #: layers of a captured step that ran in the present forward


class Gathered(AttentionBackend):
    """Knows a layer when it first runs.

    Parameters
    ----------
    runner : ModelRunner
        For its pools.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.forward_metadata: Step | None = None
        self.layers: dict[int, Any] = {}  # those that ran, by the address of SGLang's
        self.together: list[Any] = []     # those of them that are bound together
        self.steps = Steps(lambda: self.together, max_seq_len=self.req_to_token_pool.req_to_token.shape[1])

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Read the batch of an eager step; it is planned when the first layer runs."""
        self.gather()
        self.forward_metadata = None if forward_batch.forward_mode.is_idle() else self._read(forward_batch)

    def _read(self, forward_batch: Any) -> Step:
        """The step of a batch that is not idle."""
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Comes before each forward of a capture, two of which warm up. Layers are known once they ran, so plans for the
        captured shape are made here. A graph records what brings a step's arrays and plans to its batch, unless replays do that."""
        step = self.forward_metadata
        if step is None or step.captured is None:
            return
        step.ran.clear()
        if step.record is not None:
            step.record()
        if not capturing(self.req_to_token_pool.req_to_token.device):
            self.gather()
            if self.together:
                self.steps.capture(step.captured, step, lambda: step.batch, None)
        elif step.record is not None:
            self.replay(step.captured, step.batch, PlanMode.IN_GRAPH)

    def replay(self, shape: Shape, batch: Batch, mode: PlanMode = PlanMode.REPLAY) -> None:
        """Bring the plans of a captured shape to a batch."""
        if not self.steps.replay(shape, lambda: batch, mode):
            raise make(Status.ORDER, "capture", f"a replay of {shape[0]} requests or branches; so many were not captured, or "
                       "layers were bound again since")

    def is_there(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """Which requests of a captured decode are not padding: a decode has two keys or more."""
        return seq_lens > self.get_cuda_graph_seq_len_fill_value()

    def gather(self) -> None:
        """Layers that ran alone are bound together from the next step on, unless a graph holds the others where they are."""
        if len(self.layers) > len(self.together) and not self.steps.captures:
            self.together = list(self.layers.values())
            self.steps.clear()

    def _step(self, layer: Any) -> Step:
        """The step that a layer runs in."""
        step = self.forward_metadata
        if step is None:
            raise make(Status.ORDER, "init_forward_metadata", "a layer runs and no batch was given")
        if step.captured is not None:
            if id(layer) in step.ran:  # another forward begins
                self.init_forward_metadata_in_graph(None)
            step.ran.add(id(layer))
        return step
