# SPDX-License-Identifier: Apache-2.0
"""Which backend serves which layer of a torch model, and the bound layers.

What a torch module needs is known only when it is called. So a layer is described and selected at its first call:
as layer `index` of a model of that many layers, so that ``ATTN_BACKEND`` rules such as ``layers.0-11=…`` mean what
they say. The bound layer is shared by all modules of the same description and choice.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from ctypes import addressof
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import memory
from .._declarations import Phase, Status, attn_tensor
from ..errors import UnsupportedError, make
from ..extensions import gdn_weights, kv_quant_params, mla_weights, mm_encoder_state
from ..layers import LayerDesc
from ..model import Layer, Model
from ..runtime import Runtime, device_of
from ..step import Batch, Plan
from ..structs import Struct
from ..tensors import Rows, exchange
from . import call

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
ELEMENTS = DTYPES | {torch.float8_e4m3fn: "fp8_e4m3", torch.uint8: "uint8"}
PHASES = ("prefill", "decode")

#: Writes a tensor's ``DLTensor`` to an address, where torch can.
_view = (exchange(torch.Tensor) or (None, None))[1]

#: Parameters that extensions have.
_EXTENSIONS = ((("kv_b_proj",), mla_weights), (("a_log", "dt_bias", "conv_weight"), gdn_weights),
               (("hadamard_signs_k", "hadamard_signs_v", "v_channel_scale"), kv_quant_params), (("scales", "amax_history"), mm_encoder_state))
_AS_THEY_ARE = ("kv_b_proj", "conv_weight")  # all others are read in float32

#: Names of `Layer.bind_params` and of `_EXTENSIONS`, and their values.
Params = tuple[tuple[str, torch.Tensor | float], ...]


#: Of a plan: requests, tokens, length.
Limits = tuple[int, int, int]


class Workspace:
    """Memory for plans that never run at the same time; what the last of them planned lies in it. Or their scratch, which
    holds nothing between two calls: that of a device and stream is one for all plans whose steps go there."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.planned: object = None

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """At least so many bytes. Plans keep what they were given before."""
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = memory.allocate(nbytes, device)
        return self.memory


@dataclass
class Bound:
    """Bound layers of one block table (most often one), their scratch cache and the plan of the last batch. Used by one
    thread."""

    model: Model
    desc: LayerDesc
    device: torch.device
    block_size: int
    workspace: Workspace
    blocks: int = 0
    cache: Any = None
    kept: tuple[Any, ...] = ()
    converted: tuple[list[torch.Tensor], list[torch.Tensor]] = field(default_factory=lambda: ([], []))
    plan: Plan | None = None
    stream: int | None = None  # whose scratch the plan has
    limits: tuple[int, ...] = (0, 0, 0, 0)
    planned: Any = None
    rows: dict[Any, Any] = field(default_factory=dict)  # descriptors
    indices: set[int] = field(default_factory=set)  # the layers that the store gave this for
    sinks: torch.Tensor | None = None  # where layers that share this copy theirs before they run
    place: int = 0  # in `Store.in_place`'s pair
    recent: list[int] = field(default_factory=lambda: [0])  # the place in that pair that was used last
    contiguous: Any = None  # the batch of keys in place, which `libattn.torch.dense` fills again
    captured: dict[Any, Plan] = field(default_factory=dict)  # by shape, see `libattn.torch.steps`

    @property
    def layer(self) -> Layer:
        """The first layer."""
        return self.model.layers[0]

    def descriptor(self, name: str, tensor: torch.Tensor) -> int:
        """``struct attn_tensor *`` over a torch tensor, as long as that lives; one per name, refilled every step."""
        if _view is not None:
            struct = self.rows.get(name)
            if struct is None:
                struct = self.rows[name] = attn_tensor()
            _view(tensor, address := addressof(struct))
            return address
        key = (name, tensor.dtype, tensor.dim())
        rows = self.rows.get(key)
        if rows is None:
            rows = self.rows[key] = Rows(ELEMENTS[tensor.dtype], device_pair(self.device), tensor.dim())
        return rows.fill(tensor.data_ptr(), tensor.shape, tensor.stride())

    def io(self, kind: type[Struct], **rows: torch.Tensor) -> Any:
        """An extension of a step's tensors, which it keeps: descriptors point to their shapes."""
        made = kind(**{name: self.descriptor(name, t) for name, t in rows.items()})
        made._rows = rows
        return made

    def refresh(self) -> None:
        """Copy parameters again that libattn needs as contiguous float32; all others are read where they lie. Once a step:
        a loader's ``param.data.copy_()`` leaves the tensor's version as it was."""
        if self.converted[0]:
            with torch.no_grad():
                torch._foreach_copy_(*self.converted)

    def reserve(self, blocks: int) -> None:
        """Let the scratch cache hold so many blocks."""
        if blocks > self.blocks:
            blocks = max(blocks, self.blocks + self.blocks // 2)
            self.unplan()
            self.cache = memory.allocate(blocks * self.layer.kv_spec.padded_page_bytes, self.device)
            self.layer.bind_kv(self.cache, blocks)
            self.blocks = blocks

    def unplan(self) -> None:
        """Give up the plan, which holds the cache that is about to be replaced; the next `update` makes another."""
        if self.plan is not None:
            self.plan.close()
        self.plan = self.planned = None

    def run_rows(self, stream: int | None, q: torch.Tensor | None, k: torch.Tensor | None, v: torch.Tensor | None,
                 out: torch.Tensor | None, flags: int = 0, at: int = 0, plan: Plan | None = None,
                 extension: Struct | None = None) -> None:
        """Run the planned step on q, k, v and out.

        Parameters
        ----------
        at : int
            Which of the layers.
        plan : Plan, optional
            Another one than that of the last `update`.
        extension : ctypes structure, optional
            Of `libattn.extensions`, for `Plan.run`.
        """
        of, plan = self.descriptor, plan or self.plan
        if plan is None:
            raise make(Status.ORDER, "plan", "no batch is planned")
        plan.run_pointers(self.model.layers[at].handle, None if q is None else of("q", q), None if k is None else of("k", k),
                          None if v is None else of("v", v), None if out is None else of("out", out), stream, flags, extension)

    def holds(self, key: Any) -> bool:
        """Whether the batch of `key` is what was planned last, here and in the workspace."""
        return self.planned is not None and self.planned == key and self.workspace.planned is self

    def update(self, batch: Batch, key: Any, stream: int | None) -> None:
        """Plan a batch, unless it is the one that is planned: layers of one step share it."""
        if self.holds(key):
            return
        refuse_capture(self.device)
        longest = max(batch.struct.max_seq_len, batch.struct.max_encoder_seq_len)
        needed = (batch.struct.num_reqs, batch.struct.num_tokens, longest, batch.struct.block_table_stride)
        if self.plan is None or any(n > limit for n, limit in zip(needed, self.limits)):
            self.unplan()
            # Powers of two, so that a growing batch does not make a plan a step. Encoders have no lengths: 0, unknown.
            self.limits = tuple(max(limit, up(n)) for n, limit in zip(needed, self.limits))
            self.plan = self.model.plan(0, max_num_reqs=self.limits[0], max_num_tokens=self.limits[1],
                                        max_seq_len=self.limits[2], max_blocks_per_req=self.limits[3])
            bind_workspace(self.plan, self.device, stream, self.workspace)
        elif self.stream != stream:  # a step on another stream has that one's scratch
            bind_workspace(self.plan, self.device, stream, self.workspace)
        self.stream = stream
        self.planned, self.workspace.planned = None, self
        self.plan.update(batch, stream)
        self.planned = key


def up(n: int) -> int:
    """To a power of two; 0 stays."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def bind_workspace(plan: Plan, device: torch.device, stream: int | None, workspace: Workspace | None = None) -> None:
    """Give a plan its own part of `workspace`, or memory of its own, and the scratch of its stream. Addresses stay as long as
    the plan: a larger scratch is of the plans that come after."""
    whole, scratch = plan.workspace_bytes, plan.scratch_bytes
    if whole > 0:
        own = max(whole - scratch, 1)
        plan.bind_workspace(workspace.take(own, device) if workspace is not None else memory.allocate(own, device),
                            store.scratch(device, stream).take(scratch, device) if scratch > 0 else None)


def device_pair(device: torch.device) -> tuple[int, int]:
    """DLPack's (type, id) of a torch device."""
    found = device_of(device)
    return found.type, found.id


#: The address of a CUDA device's current stream, without an object of Python for it.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def stream_of(device: torch.device) -> int | None:
    """Torch's current stream on a device."""
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        if _raw_stream is not None and device.index is not None:
            return _raw_stream(device.index)
        return torch.cuda.current_stream(device).cuda_stream
    return torch.xpu.current_stream(device).sycl_queue if device.type == "xpu" else None


def capturing(device: torch.device) -> bool:
    """Whether torch's current stream on a device is being captured into a graph."""
    if device.type == "cpu":
        return False
    module = getattr(torch, device.type, None)
    ask = getattr(module, "is_current_stream_capturing", None)  # newer torch has one for XPUs
    if ask is None:
        return False
    if device.index is None or device.index == module.current_device():
        return bool(ask())
    with module.device(device):
        return bool(ask())


def refuse_capture(device: torch.device) -> None:
    """Refuse to capture a call whose plan is made on the host, from its own shapes: that of the next batch takes its place, and
    a replay would read it."""
    if capturing(device):
        raise make(Status.UNSUPPORTED, "capture", "a call that plans its batch when it runs; supported: calls outside of CUDA graphs "
                   "(torch.compile without mode='reduce-overhead'), or steps that are planned for a capture "
                   "(libattn.torch.steps.Steps.capture, Plan.update with PlanMode.CAPTURE)")


@dataclass(frozen=True)
class Row:
    """One line of the table of layers."""

    index: int
    kind: str
    prefill: str
    decode: str
    rule: str


class _Thread:
    """Ends with its thread, whose calls in C keep plans."""

    def __init__(self) -> None:
        self._ident, self._forget = threading.get_ident(), None if call.c is None else call.c.forget

    def __del__(self) -> None:
        if self._forget is not None:
            self._forget(self._ident)


class Store:
    """The layers of this process, and the runtime that chose for them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._local = threading.local()
        self._generation = 0
        self._options: dict[str, Any] = {}
        self._runtime: Runtime | None = None
        self._choices: dict[Any, tuple[str, str, int]] = {}
        self._table: dict[tuple[int, str], Row] = {}

    def configure(self, **options: Any) -> None:
        """Start again with a runtime of these options (see `libattn.Runtime`); the environment is read again."""
        with self._lock:
            self._options, self._runtime = options, None
            self._choices, self._table = {}, {}
            self._generation += 1
            if call.c is not None:
                call.c.forget(0)

    @property
    def runtime(self) -> Runtime:
        """Made at first use."""
        with self._lock:
            if self._runtime is None:
                self._runtime = Runtime(**self._options)
            return self._runtime

    @property
    def table(self) -> list[Row]:
        """What served each layer that has run."""
        with self._lock:
            return [self._table[key] for key in sorted(self._table)]

    def _choose(self, desc: LayerDesc, index: int, device: torch.device) -> tuple[str, str, int]:
        """Names of the backends for both phases and the block size."""
        key = (desc, index, str(device))
        with self._lock:
            if key in self._choices:
                return self._choices[key]
            layers = [replace(desc, name=f"layers.{i}") for i in range(index + 1)]
            found = self.runtime.select(layers, device=device, keep_unserved=True)
            choices = [found.choice(index, phase) for phase in PHASES]
            for phase, choice in zip(PHASES, choices):
                if choice.status:
                    raise make(choice.status, f"layers.{index}",
                               f"{phase}{f', rule {choice.rule!r}' if choice.rule else ''}:\n"
                               + found.explain(index, phase))
            result = (choices[0].backend, choices[1].backend, choices[Phase.DECODE].block_size)
            self._choices[key] = result
            kind = desc.kind if desc.kind != "decoder" else "sliding" if desc.window else "full"
            rules = " ".join(dict.fromkeys(c.rule for c in choices if c.rule))
            self._table[(index, str(kind))] = Row(index, str(kind), result[0], result[1], rules)
            return result

    def bound(self, key: Hashable, describe: Callable[[], LayerDesc], index: int, device: torch.device,
              params: Params = (), purpose: Hashable = "scratch", alone: bool = False, shares_sinks: bool = False) -> Bound:
        """The bound layer of a description for layer `index`; this thread's own, and one per purpose.

        Parameters
        ----------
        key : hashable
            Tells descriptions apart more cheaply than they do themselves; `describe` is called for a new one.
        params : pairs
            A name of `Layer.bind_params` and its value.
        alone : bool
            With a workspace of its own, so that its batch stays planned while others run; else all of a thread and device plan
            in one by turns.
        shares_sinks : bool
            A layer that has sinks reads `Bound.sinks`, which the caller fills before each run; they are not in `params`.
        """
        local = self.here()
        near_key = (key, index, device, purpose, identity(params) if params else (), shares_sinks)
        found = local.near.get(near_key)
        if found is not None:
            found.refresh()
            return found
        desc = describe()
        prefill, decode, block_size = self._choose(desc, index, device)
        far_key = (desc, prefill, decode, *near_key[2:])
        bound = local.layers.get(far_key)
        if bound is None:
            bound = local.layers[far_key] = self._bind([desc], prefill, decode, device, [params],
                                                       Workspace() if alone else None, shares_sinks)
        local.near[near_key] = bound
        bound.indices.add(index)
        return bound

    def in_place(self, key: Hashable, describe: Callable[[], LayerDesc], other: Callable[[], LayerDesc], index: int,
                 device: torch.device, purpose: Hashable, batch: Any, phase: Phase) -> Bound | None:
        """A layer of another description, by the backend that `bound` would give a phase of `describe`; None: it refuses.
        Its sinks are `Bound.sinks`, which the caller fills before each run.

        There are two for a description, each with the plan of another batch, since full and sliding layers take turns in a
        model and differ in their keys: the one that holds `batch`, or the one that was used less recently.
        """
        local = self.here()
        near_key = ("in place", key, phase, index, device, purpose)
        if near_key not in local.near:
            backend = self._choose(describe(), index, device)[phase]
            desc = other()
            far_key = (desc, backend, device, purpose)
            if far_key not in local.layers:
                try:
                    pair = [self._bind([desc], backend, backend, device, [()], Workspace(), True) for _ in range(2)]
                    pair[1].place, pair[1].indices, pair[1].recent = 1, pair[0].indices, pair[0].recent
                except UnsupportedError:
                    pair = []
                local.layers[far_key] = pair
            local.near[near_key] = local.layers[far_key]
        bounds: list[Bound] = local.near[near_key]
        if not bounds:
            return None
        recent = bounds[0].recent
        found = next((bound for bound in bounds if bound.holds(batch)), bounds[1 - recent[0]])
        found.indices.add(index)
        recent[0] = found.place
        return found

    def group(self, members: Sequence[tuple[LayerDesc, int, Params]], device: torch.device,
              workspace: Workspace | None = None) -> list[tuple[Bound, int]]:
        """Bind layers of one block table, so that one plan serves them all.

        Parameters
        ----------
        members : sequence of (description, index in the engine's model, parameters)
        workspace : Workspace, optional
            Of all, which then plan in it by turns.

        Returns
        -------
        list of (Bound, place in it), one for each member
            One Bound for the members of each backend and kind of cache (sliding, full); by default each with a
            workspace of its own, so that what is planned there stays while other groups run.
        """
        together: dict[Any, list[int]] = {}
        for at, (desc, index, _) in enumerate(members):
            together.setdefault(self._choose(desc, index, device)[:2], []).append(at)
        found: dict[int, tuple[Bound, int]] = {}
        for (prefill, decode), places in together.items():
            def bind(places: list[int], prefill: str = prefill, decode: str = decode) -> Bound:
                return self._bind([members[at][0] for at in places], prefill, decode, device,
                                  [members[at][2] for at in places], workspace or Workspace())

            bound = bind(places)
            groups = [[places[i] for i in group] for group in bound.model.groups]
            for group in groups:
                part = bound if len(groups) == 1 else bind(group)
                found.update({at: (part, place) for place, at in enumerate(group)})
        return [found[at] for at in range(len(members))]

    def here(self) -> Any:
        """This thread's own layers."""
        local = self._local
        if not hasattr(local, "thread"):
            local.thread = _Thread()
        if getattr(local, "generation", None) != self._generation:
            local.generation, local.layers, local.near, local.workspaces = self._generation, {}, {}, {}
            local.scratch, local.reserved, local.calls, local.batches = {}, {}, {}, {}
        return local

    def scratch(self, device: torch.device, stream: int | None) -> Workspace:
        """This thread's scratch for steps on a device's stream."""
        return self.here().scratch.setdefault((device, stream), Workspace())

    def reserve(self, desc: LayerDesc, index: int, device: torch.device, params: Params, limits: Limits) -> None:
        """Take the scratch of plans within `limits` (requests, tokens, length) on the current stream, on which graphs that are
        captured later are replayed: an engine that asks while it measures its memory counts it."""
        local, key = self.here(), (desc, device, limits)
        if key in local.reserved:
            return
        prefill, decode, _ = self._choose(desc, index, device)
        bound, stream = self._bind([desc], prefill, decode, device, [params]), stream_of(device)
        if bound.block_size:
            bound.reserve(1)  # a plan wants a cache
        reqs, tokens, length = (up(limit) for limit in limits)
        plan = bound.model.plan(0, max_num_reqs=reqs, max_num_tokens=tokens, max_seq_len=length)
        self.scratch(device, stream).take(plan.scratch_bytes, device)
        plan.close()
        local.reserved[key] = local.reserved[device] = stream

    def replays(self, device: torch.device) -> int | None:
        """The stream on which this thread's captured graphs are replayed: that of `reserve`, or the current one."""
        return self.here().reserved.get(device, stream_of(device))

    def _bind(self, descs: Sequence[LayerDesc], prefill: str, decode: str, device: torch.device,
              params: Sequence[Params], workspace: Workspace | None = None, shares_sinks: bool = False) -> Bound:
        descs = [replace(desc, name=f"layers.{i}") for i, desc in enumerate(descs)]
        runtime = self.runtime  # read once: other threads may configure another
        assignment = runtime.select(descs, device=device, backend=f"prefill={prefill};decode={decode}")
        model = runtime.bind(assignment)
        kept: list[Any] = []
        converted: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        sinks = None
        if shares_sinks and descs[0].has_sinks:
            with torch.inference_mode(False):  # written in other modes too
                sinks = torch.zeros(descs[0].num_q_heads, dtype=torch.float32, device=device)
            params = [(*params[0], ("sinks", sinks))]
        for layer, pairs in zip(model.layers, params):
            given = {name: value if isinstance(value, float) else value.detach() if name in _AS_THEY_ARE else
                     value.detach().to(device, torch.float32).contiguous() for name, value in pairs}
            for name, value in pairs:
                if not isinstance(value, float):  # its own memory too: nothing else may take the address it is known by
                    kept += [given[name], value.detach()]
                    if given[name].data_ptr() != value.data_ptr() and given[name].device == value.device:
                        converted[0].append(given[name])
                        converted[1].append(kept[-1])
            parts = [(struct, {name: given.pop(name) for name in names if name in given}) for names, struct in _EXTENSIONS]
            extensions = [struct(**part) for struct, part in parts if part]
            if given or extensions:
                layer.bind_params(**given, extensions=extensions)
        spec = model.layers[0].kv_spec
        if workspace is None:
            workspace = self.here().workspaces.setdefault(device, Workspace())
        return Bound(model, descs[0], device, spec.block_size if spec.has_cache else 0, workspace, kept=tuple(kept),
                     converted=converted, sinks=sinks)


def identity(params: Params) -> tuple[Any, ...]:
    """By what parameters are known to be the same: addresses of tensors, whose contents may change, values of numbers."""
    return tuple((name, value if isinstance(value, float) else
                  (value.data_ptr(), value.dtype, value.stride())) for name, value in params)


#: What `libattn.torch` uses.
store = Store()
