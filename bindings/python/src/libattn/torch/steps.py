# SPDX-License-Identifier: Apache-2.0
"""An engine's layers of one block table: bound together, planned together once a step, and plans of captured shapes."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._declarations import PlanMode, Status
from ..errors import make
from ..layers import ContextParallel, LayerDesc
from ..model import KvView
from ..step import Batch, Plan
from .paged import Step, bind_pages
from .store import Bound, Params, Workspace, bind_workspace, capturing, store, stream_of

#: By what a captured batch is known: requests, rows, the longest query, and what tells batches of one graph apart.
Shape = tuple[int, ...]


@dataclass
class Member:
    """One layer as its implementation describes it."""

    desc: LayerDesc
    index: int
    params: Params
    k_pages: torch.Tensor | KvView
    v_pages: torch.Tensor | KvView | None


@dataclass
class Place:
    """Where a layer is bound, and what has to be the same for it to stay there."""

    key: Any
    bound: Bound
    at: int
    impl: Any  #: known by its address, which no other one gets as long as this is here


class Steps:
    """The steps of one block table and of the layers that it addresses.

    A layer has a ``kv_cache`` and an ``impl``, which describes it (``member``); the layer is bound again when the
    impl's ``version`` changes. A step's metadata has ``captured``: the `Shape` of a batch that is captured or replays a
    graph, or None.

    Parameters
    ----------
    layers : callable
        Gives the layers that are to be bound together, as far as they are there.
    graph_level : str
        What captured batches need; ``never``: none are captured.
    max_seq_len : int
        The engine's, since a captured shape meets batches of every length; 0: that of the captured batch.
    ranks : ContextParallel, optional
        Where the cache is spread over some.
    """

    def __init__(self, layers: Any, graph_level: str = "never", max_seq_len: int = 0,
                 ranks: ContextParallel | None = None) -> None:
        self._layers, self.ranks = layers, ranks
        self.graph_level, self.max_seq_len = graph_level, max_seq_len
        self._places: dict[int, Place] = {}
        self._bounds: list[Bound] = []
        self._alone = Workspace()  # for layers that are bound alone
        self._captured: dict[Shape, int] = {}  # how many `Bound`s were captured

    def place(self, layer: Any, impl: Any, kv_cache: torch.Tensor, metadata: Any, dtype: Any) -> Place:
        """Where the layer is bound; with it are bound those of `layers` that have their caches, if it is one of them."""
        key = (kv_cache.data_ptr(), kv_cache.shape, dtype, impl.version(layer))
        found = self._places.get(id(impl))
        if found is None or found.key != key:
            others = [(other, other.impl, other.kv_cache) for other in self._layers()
                      if type(getattr(other, "impl", None)) is type(impl) and other.kv_cache.numel() > 0]
            together = any(other[1] is impl for other in others)
            self._bind(others if together else [(layer, impl, kv_cache)], metadata, dtype, kv_cache.device,
                       None if together else self._alone)
            found = self._places[id(impl)]
        return found

    def _bind(self, layers: Sequence[tuple[Any, Any, torch.Tensor]], metadata: Any, dtype: Any,
              device: torch.device, workspace: Workspace | None = None) -> None:
        members = [impl.member(layer, cache, metadata, dtype) for layer, impl, cache in layers]
        members = [replace(m, desc=replace(m.desc, graph_level=self.graph_level, context_parallel=self.ranks))
                   for m in members]
        found = store.group([(m.desc, m.index, m.params) for m in members], device, workspace)
        for member, (layer, impl, cache), (bound, at) in zip(members, layers, found):
            bind_pages(bound, at, member.k_pages, member.v_pages)
            key = (cache.data_ptr(), cache.shape, dtype, impl.version(layer))
            self._places[id(impl)] = Place(key, bound, at, impl)
        self._bounds = list({id(place.bound): place.bound for place in self._places.values()}.values())

    def plan(self, place: Place, metadata: Any, batch: Callable[[], Batch]) -> Plan | None:
        """Plan the step, unless that is done; the plan where it is one of a captured shape."""
        bound, step = place.bound, Step(metadata)
        if metadata.captured in bound.captured:
            if place.at == 0:
                bound.refresh()  # a graph records it, so that its replays read the weights of their time
            return bound.captured[metadata.captured]
        if not bound.holds(step):
            if capturing(bound.device):
                raise make(Status.ORDER, "capture", f"a layer that has no plan of {metadata.captured} (requests, tokens, "
                           "longest query); every layer has to run before a graph is captured")
            bound.refresh()
            bound.update(batch(), step, stream_of(bound.device))
        return None

    def run(self, layer: Any, impl: Any, kv_cache: torch.Tensor, metadata: Any, dtype: Any, batch: Callable[[], Batch],
            rows: Sequence[torch.Tensor | None], flags: int = 0, extension: Callable[[Bound], Any] = lambda bound: None) -> None:
        """A layer's step: its q, k, v and out, None where `extension` makes what stands in their place; `batch` makes what is to be
        planned, where that is not done."""
        place = self.place(layer, impl, kv_cache, metadata, dtype)
        plan = self.plan(place, metadata, batch)
        place.bound.run_rows(stream_of(place.bound.device), *rows, flags, place.at, plan, extension(place.bound))

    # Captured graphs. Engines hand over a batch's metadata and only then capture or replay its forward; nothing of Python
    # runs in a replay. So plans are made and updated here, with the metadata.

    @property
    def captures(self) -> bool:
        """Whether a shape was captured."""
        return bool(self._captured)

    def clear(self) -> None:
        """Bind all layers again when the next of them runs."""
        self._places.clear()
        self._bounds.clear()
        self._captured.clear()
        self._alone = Workspace()

    def capture(self, shape: Shape, metadata: Any, make_batch: Callable[[], Batch], dtype: Any) -> None:
        """Plans of their own for a batch's shape, one for each `Bound`."""
        present = [other for other in self._layers() if hasattr(other, "impl") and other.kv_cache.numel() > 0]
        if not present:
            raise make(Status.ORDER, "capture", "of a batch while no layer has its cache")
        for other in present:
            self.place(other, other.impl, other.kv_cache, metadata, dtype)
        batch = make_batch()
        for bound in self._bounds:
            plan = bound.model.plan(0, max_num_reqs=shape[0], max_num_tokens=shape[1], max_query_len=shape[2],
                                    max_seq_len=max(batch.struct.max_seq_len, self.max_seq_len),
                                    max_blocks_per_req=batch.struct.block_table_stride, graph=True)
            bind_workspace(plan, bound.device, store.replays(bound.device))
            plan.update(batch, stream_of(bound.device), PlanMode.CAPTURE)
            bound.captured[shape] = plan
        self._captured[shape] = len(self._bounds)

    def replay(self, shape: Shape, make_batch: Callable[[], Batch], mode: PlanMode = PlanMode.REPLAY) -> bool:
        """Bring the plans of a captured shape to a new batch; False: none was captured, or layers were bound again since.

        With `IN_GRAPH` the update is recorded into the graph that is being captured; `OUT_OF_GRAPH` comes before each replay of it."""
        if not self.replays(shape):
            return False
        batch, stream = make_batch(), stream_of(self._bounds[0].device)
        for bound in self._bounds:
            if shape in bound.captured:
                bound.captured[shape].update(batch, stream, mode)
        return True

    def replays(self, shape: Shape) -> bool:
        """Whether a shape was captured and no layer was bound again since."""
        return shape in self._captured and sum(shape in bound.captured for bound in self._bounds) == self._captured[shape] > 0


__all__ = ["Member", "Place", "Shape", "Steps"]
