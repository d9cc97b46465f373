# SPDX-License-Identifier: Apache-2.0
"""The public headers as ctypes declarations. Written by ``bindings/python/generate.py``: do not edit."""
# fmt: off
from ctypes import (CFUNCTYPE, Structure, c_char, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint8,
                    c_uint16, c_uint32, c_uint64, c_void_p)
from enum import IntEnum

ATTN_ABI_VERSION = 0x00002
ATTN_ABI_VERSION_MIN = 0x00002
ATTN_FLAG_HINTS = 0xffff0000
ATTN_EXT_OPTIONAL = 1
ATTN_EXT_VENDOR = 0x10000
ATTN_ERROR_FIELD_SIZE = 64
ATTN_ERROR_MESSAGE_SIZE = 944
ATTN_MAX_PHASES = 4
ATTN_TERM_CAUSAL = 1 << 0
ATTN_TERM_BIDIRECTIONAL = 1 << 1
ATTN_TERM_CAUSAL_PER_REQUEST = 1 << 2
ATTN_TERM_SLIDING_WINDOW = 1 << 3
ATTN_TERM_SYMMETRIC_WINDOW = 1 << 4
ATTN_TERM_CHUNKED_LOCAL = 1 << 5
ATTN_TERM_SOFT_CAP = 1 << 6
ATTN_TERM_ALIBI = 1 << 7
ATTN_TERM_ALIBI_SQRT = 1 << 8
ATTN_TERM_SINKS = 1 << 9
ATTN_TERM_STATIC_SINK = 1 << 10
ATTN_TERM_PREFIX_LM = 1 << 11
ATTN_TERM_TREE_BITS = 1 << 12
ATTN_TERM_TREE_BIAS = 1 << 13
ATTN_TERM_COUNT = 14
ATTN_FEATURE_PAGED_KV = 1 << 0
ATTN_FEATURE_CONTIGUOUS_KV = 1 << 1
ATTN_FEATURE_LSE = 1 << 2
ATTN_FEATURE_BLOCK_TABLE_ROW = 1 << 3
ATTN_FEATURE_MIXED_BATCH = 1 << 4
ATTN_FEATURE_UPDATE_BLOCK_TABLE = 1 << 5
ATTN_FEATURE_FUSED_WRITE = 1 << 6
ATTN_FEATURE_FUSED_ROPE = 1 << 7
ATTN_FEATURE_FUSED_ROPE_NORM = 1 << 8
ATTN_FEATURE_GLOBAL_KEY_POSITIONS = 1 << 9
ATTN_FEATURE_CONTEXT_PARALLEL = 1 << 10
ATTN_FEATURE_INTERLEAVE = 1 << 11
ATTN_FEATURE_BATCH_INVARIANT = 1 << 12
ATTN_FEATURE_BATCH_INVARIANT_PREFIX = 1 << 13
ATTN_FEATURE_QUANTIZED_QUERY = 1 << 14
ATTN_FEATURE_DEVICE_SEQ_LENS = 1 << 15
ATTN_FEATURE_FAST_PREFILL = 1 << 16
ATTN_FEATURE_CASCADE = 1 << 17
ATTN_FEATURE_FP8_INPUTS = 1 << 18
ATTN_FEATURE_MXFP4_WEIGHTS = 1 << 19
ATTN_FEATURE_HOST_BOUNDS = 1 << 20
ATTN_FEATURE_COUNT = 21
ATTN_STEP_STACK_BYTES = 65536
ATTN_VIEW_NHD = 1 << 0
ATTN_VIEW_HND = 1 << 1
ATTN_VIEW_PACKED = 1 << 2
ATTN_VIEW_LATENT = 1 << 3
ATTN_VIEW_SEPARATE_STRIDES = 1 << 4
ATTN_MAX_CACHES = 16
ATTN_MAX_TABLES = 8
ATTN_KV_SPEC_MAX_DIMS = 8
ATTN_KERNEL_ATTEND = 1 << 0
ATTN_KERNEL_WRITE_KV = 1 << 1
ATTN_KERNEL_MERGE_STATES = 1 << 2
ATTN_KERNEL_ROPE_WRITE_KV = 1 << 3
ATTN_KERNEL_ATTEND_MLA = 1 << 4
ATTN_KERNEL_ATTEND_MLA_SPARSE = 1 << 5
ATTN_KERNEL_GATHER_KV = 1 << 6
ATTN_KERNEL_GATED_DELTA = 1 << 7
ATTN_KERNEL_BATCHED_GEMM = 1 << 8
ATTN_KERNEL_QUANTIZE = 1 << 9
ATTN_KERNEL_AMAX = 1 << 10
ATTN_KERNEL_COPY_BLOCKS = 1 << 11
ATTN_KERNEL_COPY = 1 << 12
ATTN_KERNEL_FILL = 1 << 13
ATTN_KERNEL_MAKE_BLOCK_TABLE = 1 << 14
ATTN_KERNEL_COUNT = 15
ATTN_SELECT_KEEP_UNSERVED = 1
ATTN_COMPOSE_CROSS = 1
ATTN_COMPOSE_ENCODER = 2
ATTN_COMPOSE_CHUNKED = 4
ATTN_COMPOSE_STATIC_SINK = 8
ATTN_COMPOSE_CASCADE = 16
ATTN_COMPOSE_MLA = 32
ATTN_COMPOSE_CONTEXT_PARALLEL = 64
ATTN_COMPOSE_OUTPUT_QUANT = 128
ATTN_COMPOSE_MM_ENCODER = 512
ATTN_COMPOSE_MLA_PREFILL = 256
ATTN_BATCH_NO_CASCADE = 1
ATTN_BATCH_IN_CAPTURE = 2
ATTN_BATCH_HOST_BOUNDS = 4
ATTN_BATCH_FAST_BUILD = 0x10000
ATTN_RUN_NO_WRITE = 1
ATTN_RUN_NO_ATTEND = 2
ATTN_MLA_WEIGHT_MXFP4 = 16


class ExtId(IntEnum):
    """``enum attn_ext_id``."""

    MLA_DESC = 1
    RECURRENT_DESC = 2
    MLA_WEIGHTS = 3
    RECURRENT_WEIGHTS = 4
    CONTEXT_PARALLEL = 5
    BATCH_CONTEXT = 6
    BATCH_RECURRENT = 7
    IO_MLA = 8
    IO_RECURRENT = 9
    IO_OUTPUT_QUANT = 10
    IO_ROPE = 11
    KV_QUANT_PARAMS = 12
    CAPS_MLA = 13
    CAPS_RECURRENT = 14
    MM_ENCODER = 15
    MM_ENCODER_STATE = 16
    LAYER_CACHES = 17
    IO_CACHES = 18


class Status(IntEnum):
    """``attn_status``."""

    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    OUT_OF_MEMORY = 3
    ABI_VERSION = 4
    STRUCT_SIZE = 5
    EXTENSION = 6
    NOT_FOUND = 7
    NO_BACKEND = 8
    REFUSED = 9
    SYNTAX = 10
    PLUGIN = 11
    DEVICE = 12
    ABSENT = 13
    WORKSPACE = 14
    ORDER = 15
    LIMIT = 16
    IO = 17
    TIMEOUT = 18
    NAN = 19
    INTERNAL = 20


class DeviceType(IntEnum):
    """``enum attn_device_type``."""

    CPU = 1
    CUDA = 2
    CUDA_HOST = 3
    ROCM = 10
    ROCM_HOST = 11
    EXTENSION = 12
    CUDA_MANAGED = 13
    ONEAPI = 14


class DtypeCode(IntEnum):
    """``enum attn_dtype_code``."""

    INT = 0
    UINT = 1
    FLOAT = 2
    BFLOAT = 4
    BOOL = 6
    FLOAT8_E4M3FN = 10
    FLOAT8_E4M3FNUZ = 11
    FLOAT8_E5M2 = 12
    FLOAT8_E5M2FNUZ = 13
    FLOAT8_E8M0FNU = 14
    FLOAT4_E2M1FN = 17


class DtypeId(IntEnum):
    """``enum attn_dtype_id``."""

    DEFAULT = 0
    F16 = 1
    BF16 = 2
    F32 = 3
    FP8_E4M3 = 4
    FP8_E5M2 = 5
    FP8_E4M3FNUZ = 6
    INT8 = 7


class LayerKind(IntEnum):
    """``enum attn_layer_kind``."""

    DECODER = 0
    ENCODER = 1
    CROSS = 2
    MLA = 3
    RECURRENT = 4


class Encoder(IntEnum):
    """``enum attn_encoder``."""

    OF_DECODER = 0
    ONLY = 1
    MULTIMODAL = 2


class Phase(IntEnum):
    """``enum attn_phase``."""

    PREFILL = 0
    DECODE = 1


class Alibi(IntEnum):
    """``enum attn_alibi``."""

    NONE = 0
    LINEAR = 1
    SQRT = 2


class TreeMask(IntEnum):
    """``enum attn_tree_mask``."""

    NONE = 0
    BITS = 1
    BIAS = 2


class ScaleForm(IntEnum):
    """``enum attn_scale_form``."""

    NONE = 0
    PER_TENSOR = 1
    PER_HEAD = 2
    PER_HEAD_CHANNEL = 3


class OutputForm(IntEnum):
    """``enum attn_output_form``."""

    PLAIN = 0
    FP8_STATIC = 1
    FP8_GROUP_64 = 2
    FP8_GROUP_128 = 3
    NVFP4 = 4


class GraphLevel(IntEnum):
    """``enum attn_graph_level``."""

    NEVER = 0
    SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class LogLevel(IntEnum):
    """``enum attn_log_level``."""

    ERROR = 0
    WARN = 1
    INFO = 2
    DEBUG = 3
    TRACE = 4


class KvDtype(IntEnum):
    """``enum attn_kv_dtype``."""

    AUTO = 0
    F16 = 1
    BF16 = 2
    F32 = 3
    FP8_E4M3 = 4
    FP8_E5M2 = 5
    FP8_PER_TOKEN_HEAD = 6
    INT8_PER_TOKEN_HEAD = 7
    INT4_PER_TOKEN_HEAD = 8
    INT8_KV = 9
    INT8_K = 10
    NVFP4 = 11
    FP8_DS_MLA = 12
    TURBOQUANT_K8V4 = 13
    TURBOQUANT_4BIT_NC = 14
    TURBOQUANT_K3V4_NC = 15
    TURBOQUANT_3BIT_NC = 16
    Q8_0 = 17
    Q4_0 = 18


class KvLayout(IntEnum):
    """``enum attn_kv_layout``."""

    NHD = 0
    HND = 1
    NHD_INNER = 2
    HND_INNER = 3
    HND_ROWS = 4
    PACKED_K = 5
    LATENT = 6


class CacheRole(IntEnum):
    """``enum attn_cache_role``."""

    K = 1
    V = 2
    LATENT = 3
    STATE = 4
    CONV = 5
    INDEX_K = 6
    SCALE = 7
    ZERO = 8
    COMPRESSED = 9
    EXTRA = 10


class KvSpecKind(IntEnum):
    """``enum attn_kv_spec_kind``."""

    NONE = 0
    FULL = 1
    SLIDING_WINDOW = 2
    CHUNKED_LOCAL = 3
    MLA = 4
    SLIDING_WINDOW_MLA = 5
    CROSS = 6
    SINK_FULL = 7
    STATE = 8
    MLA_INDEXER = 9


class VerdictCode(IntEnum):
    """``enum attn_verdict_code``."""

    CHOSEN = 0
    ELIGIBLE = 1
    EXCLUDED = 2
    UNSUPPORTED = 3
    OTHER_DEVICE = 4


class CpReduce(IntEnum):
    """``enum attn_cp_reduce``."""

    GATHER_REDUCE_SCATTER = 0
    TO_ALL = 1


class CpOrder(IntEnum):
    """``enum attn_cp_order``."""

    CONTIGUOUS = 0
    ZIGZAG = 1


class BatchMode(IntEnum):
    """``enum attn_batch_mode``."""

    AUTO = 0
    IDLE = 1
    DRAFT = 2
    TARGET_VERIFY = 3
    PROFILE = 4


class BatchCausal(IntEnum):
    """``enum attn_batch_causal``."""

    AS_LAYER = 0
    YES = 1
    NO = 2


class Rope(IntEnum):
    """``enum attn_rope``."""

    NONE = 0
    NEOX = 1
    GPTJ = 2


class RecurrentRule(IntEnum):
    """``enum attn_recurrent_rule``."""

    GATED_DELTA = 0
    ADDITIVE = 1


class RecurrentGate(IntEnum):
    """``enum attn_recurrent_gate``."""

    PER_HEAD = 0
    PER_CHANNEL = 1
    CONSTANT = 2


class RecurrentWriteGate(IntEnum):
    """``enum attn_recurrent_write_gate``."""

    SIGMOID = 0
    NONE = 1
    STEP = 2


class PlanMode(IntEnum):
    """``enum attn_plan_mode``."""

    EAGER = 0
    CAPTURE = 1
    REPLAY = 2
    OUT_OF_GRAPH = 3
    IN_GRAPH = 4


class CopyKind(IntEnum):
    """``enum attn_copy_kind``."""

    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3


class MemoryKind(IntEnum):
    """``enum attn_memory_kind``."""

    DEVICE = 1
    HOST = 2


class GroupKind(IntEnum):
    """``enum attn_group_kind``."""

    BLOCK_TABLE = 0
    SCHEDULE = 1


class RequestClass(IntEnum):
    """``enum attn_request_class``."""

    DECODE = 0
    SHORT_EXTEND = 1
    LONG_EXTEND = 2
    PREFILL = 3


class NameList(IntEnum):
    """``enum attn_name_list``."""

    KERNEL = 0
    LAYER_KIND = 1
    PHASE = 2
    DTYPE = 3
    KV_DTYPE = 4
    TERM = 5
    FEATURE = 6
    VIEW_FORM = 7
    KV_LAYOUT = 8
    SCALE_FORM = 9
    OUTPUT_FORM = 10
    CACHE_ROLE = 11


class attn_ext(Structure):
    """``struct attn_ext``."""

    _fields_ = [
        ("id", c_uint32),
        ("flags", c_uint32),
        ("struct_size", c_size_t),
        ("next", c_void_p),
    ]


class attn_error(Structure):
    """``struct attn_error``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("status", c_int32),
        ("reserved", c_int32),
        ("field", c_char * ATTN_ERROR_FIELD_SIZE),
        ("message", c_char * ATTN_ERROR_MESSAGE_SIZE),
    ]


class attn_device(Structure):
    """``struct attn_device``."""

    _fields_ = [
        ("type", c_int32),
        ("id", c_int32),
    ]


class attn_dtype(Structure):
    """``struct attn_dtype``."""

    _fields_ = [
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
    ]


class attn_tensor(Structure):
    """``struct attn_tensor``."""

    _fields_ = [
        ("data", c_void_p),
        ("device", attn_device),
        ("ndim", c_int32),
        ("dtype", attn_dtype),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


class attn_host(Structure):
    """``struct attn_host``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("user", c_void_p),
        ("log", CFUNCTYPE(None, c_void_p, c_int32, c_char_p, c_char_p)),
        ("allocate", CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t)),
        ("release", CFUNCTYPE(None, c_void_p, c_void_p, c_size_t)),
        ("parallel_for", CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
        ("num_threads", c_int32),
        ("abi_version", c_uint32),
    ]


class attn_kv_view(Structure):
    """``struct attn_kv_view``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int32),
        ("num_heads", c_int32),
        ("head_size", c_int32),
        ("pack", c_int32),
        ("stride_block", c_int64),
        ("stride_slot", c_int64),
        ("stride_head", c_int64),
        ("stride_pack", c_int64),
        ("scale", c_void_p),
        ("scale_stride_block", c_int64),
        ("scale_stride_slot", c_int64),
        ("scale_stride_head", c_int64),
        ("device", attn_device),
    ]


class attn_cache_desc(Structure):
    """``struct attn_cache_desc``."""

    _fields_ = [
        ("role", c_int32),
        ("of", c_int32),
        ("table", c_int32),
        ("kv_dtype", c_int32),
        ("num_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("tokens_per_row", c_int32),
    ]


class attn_layer_caches(Structure):
    """``struct attn_layer_caches``."""

    _fields_ = [
        ("ext", attn_ext),
        ("caches", c_void_p),
        ("num_caches", c_int32),
        ("cache_bytes", c_int32),
    ]


class attn_cache_spec(Structure):
    """``struct attn_cache_spec``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("role", c_int32),
        ("of", c_int32),
        ("table", c_int32),
        ("kv_dtype", c_int32),
        ("num_heads", c_int32),
        ("head_size", c_int32),
        ("block_size", c_int32),
        ("tokens_per_row", c_int32),
        ("page_bytes", c_int64),
        ("alignment", c_int32),
        ("kernel_block_size", c_int32),
    ]


class attn_cache_memory(Structure):
    """``struct attn_cache_memory``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("base", c_void_p),
        ("num_blocks", c_int64),
        ("further", c_void_p),
        ("further_num_blocks", c_void_p),
        ("num_further", c_int32),
        ("reserved", c_int32),
        ("device", attn_device),
    ]


class attn_layer_cache(Structure):
    """``struct attn_layer_cache``."""

    _fields_ = [
        ("role", c_int32),
        ("of", c_int32),
        ("table", c_int32),
        ("tokens_per_row", c_int32),
        ("view", c_void_p),
    ]


class attn_kv_spec(Structure):
    """``struct attn_kv_spec``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("kind", c_int32),
        ("kv_dtype", c_int32),
        ("layout", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("head_size_v", c_int32),
        ("sliding_window", c_int32),
        ("chunk_size", c_int32),
        ("sink_len", c_int32),
        ("page_bytes", c_int64),
        ("padded_page_bytes", c_int64),
        ("ndim", c_int32),
        ("alignment", c_int32),
        ("shape", c_int64 * ATTN_KV_SPEC_MAX_DIMS),
        ("stride_order", c_int32 * ATTN_KV_SPEC_MAX_DIMS),
        ("kernel_block_size", c_int32),
        ("reserved", c_int32),
    ]


class attn_device_info(Structure):
    """``struct attn_device_info``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("device", attn_device),
        ("name", c_char_p),
        ("arch", c_char_p),
        ("isa", c_char_p),
        ("compute_capability_major", c_int32),
        ("compute_capability_minor", c_int32),
        ("num_multiprocessors", c_int32),
        ("reserved", c_int32),
        ("memory_bytes", c_int64),
    ]


class attn_range(Structure):
    """``struct attn_range``."""

    _fields_ = [
        ("min", c_int32),
        ("max", c_int32),
        ("multiple", c_int32),
    ]


class attn_head_size_range(Structure):
    """``struct attn_head_size_range``."""

    _fields_ = [
        ("qk", attn_range),
        ("v", attn_range),
        ("same", c_int32),
    ]


class attn_refused_combination(Structure):
    """``struct attn_refused_combination``."""

    _fields_ = [
        ("terms", c_uint64),
        ("features", c_uint64),
        ("kv_dtypes", c_uint64),
        ("why", c_char_p),
        ("dtypes", c_uint64),
        ("layer_kinds", c_uint64),
        ("phases", c_uint64),
        ("head_size", attn_range),
        ("reserved", c_int32),
    ]


class attn_backend_caps(Structure):
    """``struct attn_backend_caps``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("name", c_char_p),
        ("variant", c_char_p),
        ("version", c_char_p),
        ("vendor", c_char_p),
        ("device", attn_device),
        ("kernels", c_uint64),
        ("layer_kinds", c_uint64),
        ("phases", c_uint64),
        ("dtypes", c_uint64),
        ("kv_dtypes", c_uint64),
        ("q_dtypes", c_uint64),
        ("terms", c_uint64),
        ("features", c_uint64),
        ("view_forms", c_uint64),
        ("layouts", c_uint64),
        ("k_scale_forms", c_uint64),
        ("v_scale_forms", c_uint64),
        ("p_scale_forms", c_uint64),
        ("output_forms", c_uint64),
        ("head_sizes", c_void_p),
        ("block_sizes", c_void_p),
        ("refused", c_void_p),
        ("num_head_sizes", c_int32),
        ("num_block_sizes", c_int32),
        ("num_refused", c_int32),
        ("preferred_layout", c_int32),
        ("preferred_block_size", c_int32),
        ("graph_level", c_int32),
        ("graph_fill_seq_len", c_int32),
        ("reorder_threshold", c_int32),
        ("kv_alignment", c_int32),
        ("io_alignment", c_int32),
        ("max_group", c_int32),
        ("max_num_q_heads", c_int32),
        ("max_speculative_tokens", c_int32),
        ("rank", c_int32 * ATTN_MAX_PHASES),
        ("reserved", c_int32),
        ("decode_write_kv_dtypes", c_uint64),
        ("cache_roles", c_uint64),
        ("max_tables", c_int32),
        ("refused_bytes", c_int32),
        ("extensions", c_void_p),
        ("num_extensions", c_int32),
        ("reserved_tail", c_int32),
    ]


class attn_probe_sink(Structure):
    """``struct attn_probe_sink``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("user", c_void_p),
        ("device", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("backend", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
    ]


class attn_reason_sink(Structure):
    """``struct attn_reason_sink``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("user", c_void_p),
        ("refuse", CFUNCTYPE(None, c_void_p, c_char_p, c_char_p, c_char_p)),
    ]


class attn_runtime_options(Structure):
    """``struct attn_runtime_options``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("host", c_void_p),
        ("backend", c_char_p),
        ("plugin_path", c_char_p),
        ("cache_dir", c_char_p),
        ("num_threads", c_int32),
        ("log_level", c_int32),
        ("validate", c_int32),
        ("ignore_environment", c_int32),
        ("no_default_plugins", c_int32),
        ("isolation", c_int32),
        ("probe_deadline_ms", c_int32),
        ("reserved", c_int32),
    ]


class attn_plugin_info(Structure):
    """``struct attn_plugin_info``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("file", c_char_p),
        ("name", c_char_p),
        ("version", c_char_p),
        ("vendor", c_char_p),
        ("status", c_int32),
        ("num_backends", c_int32),
        ("reason", c_char_p),
    ]


class attn_backend_info(Structure):
    """``struct attn_backend_info``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("caps", c_void_p),
        ("plugin", c_int32),
        ("reserved", c_int32),
    ]


class attn_select_options(Structure):
    """``struct attn_select_options``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("device", attn_device),
        ("backend", c_char_p),
        ("import_text", c_char_p),
        ("block_sizes", c_void_p),
        ("num_block_sizes", c_int32),
        ("flags", c_uint32),
    ]


class attn_choice(Structure):
    """``struct attn_choice``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("backend", c_int32),
        ("forced", c_int32),
        ("name", c_char_p),
        ("rule", c_char_p),
        ("rank", c_int32),
        ("measured", c_int32),
        ("kv_dtype", c_int32),
        ("block_size", c_int32),
        ("layout", c_int32),
        ("composed", c_uint32),
        ("graph_level", c_int32),
        ("status", c_int32),
        ("kernel_block_size", c_int32),
        ("reserved", c_int32),
    ]


class attn_reason(Structure):
    """``struct attn_reason``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("field", c_char_p),
        ("asked", c_char_p),
        ("supported", c_char_p),
    ]


class attn_layer_desc(Structure):
    """``struct attn_layer_desc``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("name", c_char_p),
        ("kv_sharing_target", c_char_p),
        ("kind", c_int32),
        ("dtype", c_int32),
        ("kv_dtype", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_size", c_int32),
        ("head_size_v", c_int32),
        ("scale", c_float),
        ("causal", c_int32),
        ("causal_per_request", c_int32),
        ("has_window", c_int32),
        ("window_left", c_int32),
        ("window_right", c_int32),
        ("chunk_size", c_int32),
        ("chunk_lookback", c_int32),
        ("soft_cap", c_float),
        ("alibi", c_int32),
        ("has_sinks", c_int32),
        ("sink_len", c_int32),
        ("prefix_lm", c_int32),
        ("prefix_lm_window", c_int32),
        ("tree_mask", c_int32),
        ("block_size", c_int32),
        ("num_speculative_tokens", c_int32),
        ("parallel_drafting", c_int32),
        ("padded_page_bytes", c_int64),
        ("q_scale_form", c_int32),
        ("k_scale_form", c_int32),
        ("v_scale_form", c_int32),
        ("p_scale_form", c_int32),
        ("q_dtype", c_int32),
        ("output_form", c_int32),
        ("output_scale_pow2", c_int32),
        ("output_scale_column_major", c_int32),
        ("skip_kv_quantization", c_int32),
        ("needs_lse", c_int32),
        ("graph_level", c_int32),
        ("batch_invariant", c_int32),
        ("rope", c_int32),
        ("qk_norm", c_int32),
        ("needs_block_table_row", c_int32),
        ("device_seq_lens_only", c_int32),
        ("fast_prefill", c_int32),
        ("max_seq_len", c_int32),
        ("max_num_reqs", c_int32),
        ("encoder", c_int32),
        ("needed_features", c_uint64),
        ("needed_view_forms", c_uint64),
        ("needs_page_lists", c_int32),
        ("host_bounds", c_int32),
    ]


class attn_layer_params(Structure):
    """``struct attn_layer_params``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("sinks", c_void_p),
        ("alibi_slopes", c_void_p),
        ("sink_k", c_void_p),
        ("sink_v", c_void_p),
        ("q_scale", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("p_scale", c_void_p),
        ("q_scale_host", c_float),
        ("k_scale_host", c_float),
        ("v_scale_host", c_float),
        ("p_scale_host", c_float),
        ("device", attn_device),
    ]


class attn_kv_quant_params(Structure):
    """``struct attn_kv_quant_params``."""

    _fields_ = [
        ("ext", attn_ext),
        ("hadamard_signs_k", c_void_p),
        ("hadamard_signs_v", c_void_p),
        ("v_channel_scale", c_void_p),
    ]


class attn_mm_encoder_quant(Structure):
    """``struct attn_mm_encoder_quant``."""

    _fields_ = [
        ("ext", attn_ext),
        ("fp8", c_int32),
        ("amax_history_len", c_int32),
        ("scale_margin", c_float),
        ("padded_head_size", c_int32),
    ]


class attn_mm_encoder_state(Structure):
    """``struct attn_mm_encoder_state``."""

    _fields_ = [
        ("ext", attn_ext),
        ("amax_history", c_void_p),
        ("scales", c_void_p),
    ]


class attn_collective_args(Structure):
    """``struct attn_collective_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("user", c_void_p),
        ("send", c_void_p),
        ("receive", c_void_p),
        ("count", c_size_t),
        ("stream", c_void_p),
    ]


class attn_collectives(Structure):
    """``struct attn_collectives``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("user", c_void_p),
        ("rank", c_int32),
        ("world_size", c_int32),
        ("all_gather", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("all_to_all", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("reduce_scatter_f32", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("all_reduce_max_f32", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
    ]


class attn_context_parallel(Structure):
    """``struct attn_context_parallel``."""

    _fields_ = [
        ("ext", attn_ext),
        ("decode", c_void_p),
        ("prefill", c_void_p),
        ("interleave", c_int32),
        ("reduce", c_int32),
        ("order", c_int32),
        ("reserved", c_int32),
    ]


class attn_batch_context_parallel(Structure):
    """``struct attn_batch_context_parallel``."""

    _fields_ = [
        ("ext", attn_ext),
        ("local_seq_lens", c_void_p),
        ("local_seq_lens_host", c_void_p),
        ("max_local_seq_len", c_int32),
        ("reserved", c_int32),
        ("query_positions", c_void_p),
        ("query_lens_host", c_void_p),
    ]


class attn_batch_table(Structure):
    """``struct attn_batch_table``."""

    _fields_ = [
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("block_table_rows", c_int64),
        ("block_table_row", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_slots", c_int64),
        ("seq_lens", c_void_p),
        ("seq_lens_host", c_void_p),
        ("max_seq_len", c_int32),
        ("reserved", c_int32),
        ("page_indices", c_void_p),
        ("page_start_loc", c_void_p),
        ("last_page_len", c_void_p),
        ("page_start_loc_host", c_void_p),
        ("last_page_len_host", c_void_p),
        ("num_pages", c_int64),
    ]


class attn_batch(Structure):
    """``struct attn_batch``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("mode", c_int32),
        ("flags", c_uint32),
        ("num_reqs", c_int32),
        ("num_tokens", c_int32),
        ("num_actual_tokens", c_int32),
        ("max_query_len", c_int32),
        ("max_seq_len", c_int32),
        ("causal", c_int32),
        ("query_start_loc", c_void_p),
        ("query_start_loc_host", c_void_p),
        ("seq_lens", c_void_p),
        ("seq_lens_host", c_void_p),
        ("key_start_loc", c_void_p),
        ("key_start_loc_host", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("block_table_rows", c_int64),
        ("block_table_row", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_slots", c_int64),
        ("causal_per_request", c_void_p),
        ("encoder_seq_lens", c_void_p),
        ("encoder_seq_lens_host", c_void_p),
        ("max_encoder_seq_len", c_int32),
        ("common_prefix_len", c_int32),
        ("logits_indices", c_void_p),
        ("num_logits_indices", c_int32),
        ("num_spans", c_int32),
        ("spans", c_void_p),
        ("span_start_loc", c_void_p),
        ("tree", c_void_p),
        ("tree_stride_request", c_int64),
        ("tree_stride_row", c_int64),
        ("tables", c_void_p),
        ("num_tables", c_int32),
        ("table_bytes", c_int32),
        ("page_indices", c_void_p),
        ("page_start_loc", c_void_p),
        ("last_page_len", c_void_p),
        ("page_start_loc_host", c_void_p),
        ("last_page_len_host", c_void_p),
        ("num_pages", c_int64),
    ]


class attn_batch_split(Structure):
    """``struct attn_batch_split``."""

    _fields_ = [
        ("num_decodes", c_int32),
        ("num_prefills", c_int32),
        ("num_decode_tokens", c_int32),
        ("num_prefill_tokens", c_int32),
    ]


class attn_step_io(Structure):
    """``struct attn_step_io``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("stream", c_void_p),
        ("flags", c_uint32),
        ("reserved", c_uint32),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
    ]


class attn_io_output_quant(Structure):
    """``struct attn_io_output_quant``."""

    _fields_ = [
        ("ext", attn_ext),
        ("scale", c_void_p),
        ("block_scales", c_void_p),
    ]


class attn_io_rope(Structure):
    """``struct attn_io_rope``."""

    _fields_ = [
        ("ext", attn_ext),
        ("form", c_int32),
        ("rotary_dim", c_int32),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("q_norm_weight", c_void_p),
        ("k_norm_weight", c_void_p),
        ("norm_eps", c_float),
        ("reserved", c_int32),
    ]


class attn_io_caches(Structure):
    """``struct attn_io_caches``."""

    _fields_ = [
        ("ext", attn_ext),
        ("rows", c_void_p),
        ("num_rows", c_int32),
        ("reserved", c_int32),
    ]


class attn_mla_desc(Structure):
    """``struct attn_mla_desc``."""

    _fields_ = [
        ("ext", attn_ext),
        ("kv_lora_rank", c_int32),
        ("qk_nope_head_dim", c_int32),
        ("qk_rope_head_dim", c_int32),
        ("v_head_dim", c_int32),
        ("topk", c_int32),
        ("absorb_in_core", c_int32),
        ("padded_num_q_heads", c_int32),
        ("weight_dtype", c_int32),
        ("context_workspace_tokens", c_int64),
    ]


class attn_mla_weights(Structure):
    """``struct attn_mla_weights``."""

    _fields_ = [
        ("ext", attn_ext),
        ("kv_b_proj", c_void_p),
        ("w_uk", c_void_p),
        ("w_uv", c_void_p),
        ("w_uk_scale", c_void_p),
        ("w_uv_scale", c_void_p),
    ]


class attn_io_mla(Structure):
    """``struct attn_io_mla``."""

    _fields_ = [
        ("ext", attn_ext),
        ("q_nope", c_void_p),
        ("q_pe", c_void_p),
        ("kv_c", c_void_p),
        ("k_pe", c_void_p),
        ("topk_indices", c_void_p),
        ("topk_stride", c_int64),
    ]


class attn_mla_caps(Structure):
    """``struct attn_mla_caps``."""

    _fields_ = [
        ("ext", attn_ext),
        ("kv_lora_rank_max", c_int32),
        ("qk_rope_head_dim_max", c_int32),
        ("num_q_heads_multiple", c_int32),
        ("max_query_len", c_int32),
        ("topk_max", c_int32),
        ("topk_multiple", c_int32),
    ]


class attn_recurrent_desc(Structure):
    """``struct attn_recurrent_desc``."""

    _fields_ = [
        ("ext", attn_ext),
        ("num_k_heads", c_int32),
        ("num_v_heads", c_int32),
        ("head_size_k", c_int32),
        ("head_size_v", c_int32),
        ("conv_width", c_int32),
        ("conv_silu", c_int32),
        ("qk_l2norm", c_int32),
        ("chunk_size", c_int32),
        ("num_speculative_tokens", c_int32),
        ("state_dtype", c_int32),
        ("rule", c_int32),
        ("gate", c_int32),
        ("write_gate", c_int32),
        ("has_skip", c_int32),
        ("has_initial_slots", c_int32),
        ("checkpoint_interval", c_int32),
    ]


class attn_recurrent_weights(Structure):
    """``struct attn_recurrent_weights``."""

    _fields_ = [
        ("ext", attn_ext),
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("conv_weight", c_void_p),
        ("conv_bias", c_void_p),
        ("skip", c_void_p),
    ]


class attn_recurrent_state(Structure):
    """``struct attn_recurrent_state``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("state", c_void_p),
        ("state_stride_slot", c_int64),
        ("conv_state", c_void_p),
        ("conv_stride_slot", c_int64),
        ("conv_stride_channel", c_int64),
        ("num_slots", c_int64),
        ("device", attn_device),
    ]


class attn_batch_recurrent(Structure):
    """``struct attn_batch_recurrent``."""

    _fields_ = [
        ("ext", attn_ext),
        ("state_slots", c_void_p),
        ("state_slots_stride", c_int64),
        ("has_initial_state", c_void_p),
        ("num_accepted_tokens", c_void_p),
        ("initial_slots", c_void_p),
        ("checkpoint_slots", c_void_p),
        ("checkpoint_slots_stride", c_int64),
    ]


class attn_io_recurrent(Structure):
    """``struct attn_io_recurrent``."""

    _fields_ = [
        ("ext", attn_ext),
        ("mixed_qkv", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
    ]


class attn_recurrent_caps(Structure):
    """``struct attn_recurrent_caps``."""

    _fields_ = [
        ("ext", attn_ext),
        ("head_size_k_max", c_int32),
        ("head_size_v_max", c_int32),
        ("conv_width_max", c_int32),
        ("max_speculative_tokens", c_int32),
        ("rules", c_uint32),
        ("gates", c_uint32),
        ("write_gates", c_uint32),
        ("skip", c_int32),
        ("initial_slots", c_int32),
        ("checkpoints", c_int32),
    ]


class attn_limits(Structure):
    """``struct attn_limits``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("max_num_reqs", c_int32),
        ("max_num_tokens", c_int32),
        ("max_query_len", c_int32),
        ("max_seq_len", c_int32),
        ("max_blocks_per_req", c_int32),
        ("reserved", c_int32),
    ]


class attn_schedule_size(Structure):
    """``struct attn_schedule_size``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("host_bytes", c_size_t),
        ("device_bytes", c_size_t),
    ]


class attn_prepare_args(Structure):
    """``struct attn_prepare_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("layer", c_void_p),
        ("params", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("caches", c_void_p),
        ("num_caches", c_int32),
        ("cache_bytes", c_int32),
        ("phase", c_int32),
        ("reserved", c_int32),
    ]


class attn_schedule_size_args(Structure):
    """``struct attn_schedule_size_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("prepared", c_void_p),
        ("limits", c_void_p),
    ]


class attn_attend_args(Structure):
    """``struct attn_attend_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("prepared", c_void_p),
        ("layer", c_void_p),
        ("params", c_void_p),
        ("batch", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("schedule_host", c_void_p),
        ("workspace", c_void_p),
        ("stream", c_void_p),
        ("flags", c_uint32),
        ("phase", c_int32),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("limits", c_void_p),
        ("schedule_host_bytes", c_size_t),
        ("workspace_bytes", c_size_t),
        ("caches", c_void_p),
        ("num_caches", c_int32),
        ("cache_bytes", c_int32),
    ]


class attn_write_kv_args(Structure):
    """``struct attn_write_kv_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("layer", c_void_p),
        ("params", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_slots", c_int64),
        ("stream", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("caches", c_void_p),
        ("num_caches", c_int32),
        ("cache_bytes", c_int32),
        ("batch", c_void_p),
    ]


class attn_gather_kv_args(Structure):
    """``struct attn_gather_kv_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("layer", c_void_p),
        ("params", c_void_p),
        ("cache", c_void_p),
        ("batch", c_void_p),
        ("first_key", c_void_p),
        ("out_start_loc", c_void_p),
        ("stream", c_void_p),
        ("out", c_void_p),
    ]


class attn_block_copy(Structure):
    """``struct attn_block_copy``."""

    _fields_ = [
        ("source", c_void_p),
        ("destination", c_void_p),
        ("source_stride", c_int64),
        ("destination_stride", c_int64),
        ("bytes", c_int64),
    ]


class attn_copy_blocks_args(Structure):
    """``struct attn_copy_blocks_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("kind", c_int32),
        ("num_copies", c_int32),
        ("copies", c_void_p),
        ("pairs", c_void_p),
        ("num_pairs", c_int64),
        ("copy_bytes", c_int32),
        ("reserved", c_int32),
    ]


class attn_copy_args(Structure):
    """``struct attn_copy_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("destination", c_void_p),
        ("source", c_void_p),
        ("bytes", c_size_t),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class attn_fill_args(Structure):
    """``struct attn_fill_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("destination", c_void_p),
        ("row_bytes", c_size_t),
        ("stride", c_size_t),
        ("rows", c_int64),
        ("value", c_int32),
        ("reserved", c_int32),
    ]


class attn_block_table_args(Structure):
    """``struct attn_block_table_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("num_reqs", c_int32),
        ("blocks_per_entry", c_int32),
        ("tokens_per_entry", c_int32),
        ("num_columns", c_int32),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("block_table_row", c_void_p),
        ("page_indices", c_void_p),
        ("page_start_loc", c_void_p),
        ("last_page_len", c_void_p),
        ("seq_lens", c_void_p),
        ("out", c_void_p),
        ("out_seq_lens", c_void_p),
    ]


class attn_memory_args(Structure):
    """``struct attn_memory_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("memory", c_void_p),
        ("bytes", c_size_t),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class attn_stream_args(Structure):
    """``struct attn_stream_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("graph", c_void_p),
    ]


class attn_merge_states_args(Structure):
    """``struct attn_merge_states_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("prefix_out", c_void_p),
        ("prefix_lse", c_void_p),
        ("suffix_out", c_void_p),
        ("suffix_lse", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("first_row", c_int64),
        ("num_rows", c_int64),
        ("num_rows_with_prefix", c_int64),
    ]


class attn_batched_gemm_args(Structure):
    """``struct attn_batched_gemm_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("a", c_void_p),
        ("w", c_void_p),
        ("w_scale", c_void_p),
        ("w_scale_count", c_int64),
        ("out", c_void_p),
        ("w_block_scale", c_void_p),
    ]


class attn_quantize_args(Structure):
    """``struct attn_quantize_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("form", c_int32),
        ("scale_form", c_int32),
        ("scale_pow2", c_int32),
        ("scale_column_major", c_int32),
        ("x", c_void_p),
        ("out", c_void_p),
        ("scale", c_void_p),
        ("block_scales", c_void_p),
    ]


class attn_amax_args(Structure):
    """``struct attn_amax_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("instance", c_void_p),
        ("stream", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("per_head", c_int32),
        ("accumulate", c_int32),
    ]


class attn_kernels(Structure):
    """``struct attn_kernels``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("attend", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("write_kv", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("merge_states", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("rope_write_kv", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("attend_mla", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("attend_mla_sparse", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("gather_kv", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("gated_delta", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("batched_gemm", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("quantize", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("amax", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("copy_blocks", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("copy", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("fill", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("prepare", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("release", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("schedule_size", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("schedule", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p)),
        ("update_block_table", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("allocate_memory", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("free_memory", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("memory_device", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("create_stream", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("destroy_stream", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("synchronize", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("begin_capture", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("end_capture", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("launch_graph", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("destroy_graph", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("make_block_table", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
    ]


class attn_create_args(Structure):
    """``struct attn_create_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("host", c_void_p),
        ("backend", c_char_p),
        ("variant", c_char_p),
        ("device", attn_device),
        ("native_device", c_void_p),
        ("native_context", c_void_p),
        ("options", c_void_p),
        ("num_options", c_int32),
        ("reserved", c_int32),
    ]


class attn_supports_args(Structure):
    """``struct attn_supports_args``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("caps", c_void_p),
        ("layer", c_void_p),
        ("phase", c_int32),
        ("reserved", c_int32),
    ]


class attn_plugin(Structure):
    """``struct attn_plugin``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("abi_version", c_uint32),
        ("reserved", c_uint32),
        ("name", c_char_p),
        ("version", c_char_p),
        ("vendor", c_char_p),
        ("probe", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("supports", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("create", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("destroy", CFUNCTYPE(None, c_void_p)),
    ]


class attn_model_options(Structure):
    """``struct attn_model_options``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("user", c_void_p),
        ("before_layer", CFUNCTYPE(None, c_void_p, c_int32, c_void_p)),
        ("after_layer", CFUNCTYPE(None, c_void_p, c_int32, c_void_p)),
        ("native_device", c_void_p),
        ("native_context", c_void_p),
        ("backend_options", c_void_p),
        ("num_backend_options", c_int32),
        ("reserved", c_int32),
    ]


class attn_plan_options(Structure):
    """``struct attn_plan_options``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("limits", c_void_p),
        ("graph", c_int32),
        ("reserved", c_int32),
    ]


class attn_workspace(Structure):
    """``struct attn_workspace``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("memory", c_void_p),
        ("bytes", c_size_t),
        ("device", attn_device),
        ("alignment", c_int32),
        ("reserved", c_int32),
    ]


class attn_block_memory(Structure):
    """``struct attn_block_memory``."""

    _fields_ = [
        ("base", c_void_p),
        ("stride", c_int64),
    ]


class attn_block_transfer(Structure):
    """``struct attn_block_transfer``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("group", c_int32),
        ("kind", c_int32),
        ("other", c_void_p),
        ("other_bytes", c_int32),
        ("reserved", c_int32),
        ("pairs", c_void_p),
        ("num_pairs", c_int64),
        ("stream", c_void_p),
    ]


class attn_calibration(Structure):
    """``struct attn_calibration``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("io", c_void_p),
        ("q_scale", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("amax", c_void_p),
        ("v_channel_scale", c_void_p),
        ("range", c_float),
        ("reserved", c_int32),
    ]


class attn_api(Structure):
    """``struct attn_api``."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("next", c_void_p),
        ("abi_version", c_uint32),
        ("reserved", c_uint32),
        ("version", c_char_p),
        ("status_text", CFUNCTYPE(c_char_p, c_int32)),
        ("runtime_create", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("runtime_destroy", CFUNCTYPE(None, c_void_p)),
        ("plugin_count", CFUNCTYPE(c_int32, c_void_p)),
        ("plugin_info", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p)),
        ("device_count", CFUNCTYPE(c_int32, c_void_p)),
        ("device_info", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p)),
        ("backend_count", CFUNCTYPE(c_int32, c_void_p)),
        ("backend_info", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p)),
        ("select", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p)),
        ("assignment_destroy", CFUNCTYPE(None, c_void_p)),
        ("assignment_num_layers", CFUNCTYPE(c_int32, c_void_p)),
        ("assignment_choice", CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, c_void_p)),
        ("assignment_verdict", CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
        ("assignment_reason", CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p)),
        ("assignment_export", CFUNCTYPE(c_int32, c_void_p, c_char_p, c_size_t, c_void_p, c_void_p)),
        ("model_create", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("model_destroy", CFUNCTYPE(None, c_void_p)),
        ("model_layer", CFUNCTYPE(c_void_p, c_void_p, c_int32)),
        ("model_num_groups", CFUNCTYPE(c_int32, c_void_p, c_int32)),
        ("model_group", CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p)),
        ("layer_group", CFUNCTYPE(c_int32, c_void_p, c_int32, c_int32)),
        ("layer_kv_spec", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("layer_kv_views", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)),
        ("layer_bind_kv", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("layer_bind_state", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("layer_bind_params", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("layer_calculate_scales", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("copy_blocks", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("plan_create", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_void_p)),
        ("plan_destroy", CFUNCTYPE(None, c_void_p)),
        ("plan_workspace", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("plan_bind_workspace", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("plan_graph_level", CFUNCTYPE(c_int32, c_void_p)),
        ("plan_graph_fill", CFUNCTYPE(c_int32, c_void_p)),
        ("plan_batch", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("plan_graph", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_void_p, c_void_p)),
        ("plan_update_block_table", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("plan_split", CFUNCTYPE(c_int32, c_void_p, c_void_p)),
        ("run", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("batch_order", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p)),
        ("context_parallel_length", CFUNCTYPE(c_int32, c_int32, c_int32, c_int32, c_int32)),
        ("context_parallel_slots", CFUNCTYPE(c_int32, c_void_p, c_int64, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p)),
        ("layer_calibrate_v_scales", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("best_device", CFUNCTYPE(c_int32, c_void_p, c_char_p, c_void_p, c_void_p)),
        ("device_open", CFUNCTYPE(c_int32, c_void_p, attn_device, c_void_p, c_void_p)),
        ("device_close", CFUNCTYPE(None, c_void_p)),
        ("device_allocate", CFUNCTYPE(c_int32, c_void_p, c_int32, c_size_t, c_void_p, c_void_p)),
        ("device_free", CFUNCTYPE(None, c_void_p, c_int32, c_void_p)),
        ("device_copy", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("device_fill", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("device_of_address", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("device_stream_create", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("device_stream_destroy", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("device_synchronize", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("device_capture_begin", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
        ("device_capture_end", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("device_graph_launch", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_void_p)),
        ("device_graph_destroy", CFUNCTYPE(None, c_void_p, c_void_p)),
        ("code_name", CFUNCTYPE(c_char_p, c_int32, c_int32)),
        ("layer_num_caches", CFUNCTYPE(c_int32, c_void_p)),
        ("layer_cache_spec", CFUNCTYPE(c_int32, c_void_p, c_int32, c_void_p, c_void_p)),
        ("layer_bind_caches", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_int32, c_void_p)),
        ("layer_bind_memory", CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p)),
    ]


#: Every struct, by its C name.
STRUCTS = {
    "attn_ext": attn_ext,
    "attn_error": attn_error,
    "attn_device": attn_device,
    "attn_dtype": attn_dtype,
    "attn_tensor": attn_tensor,
    "attn_host": attn_host,
    "attn_kv_view": attn_kv_view,
    "attn_cache_desc": attn_cache_desc,
    "attn_layer_caches": attn_layer_caches,
    "attn_cache_spec": attn_cache_spec,
    "attn_cache_memory": attn_cache_memory,
    "attn_layer_cache": attn_layer_cache,
    "attn_kv_spec": attn_kv_spec,
    "attn_device_info": attn_device_info,
    "attn_range": attn_range,
    "attn_head_size_range": attn_head_size_range,
    "attn_refused_combination": attn_refused_combination,
    "attn_backend_caps": attn_backend_caps,
    "attn_probe_sink": attn_probe_sink,
    "attn_reason_sink": attn_reason_sink,
    "attn_runtime_options": attn_runtime_options,
    "attn_plugin_info": attn_plugin_info,
    "attn_backend_info": attn_backend_info,
    "attn_select_options": attn_select_options,
    "attn_choice": attn_choice,
    "attn_reason": attn_reason,
    "attn_layer_desc": attn_layer_desc,
    "attn_layer_params": attn_layer_params,
    "attn_kv_quant_params": attn_kv_quant_params,
    "attn_mm_encoder_quant": attn_mm_encoder_quant,
    "attn_mm_encoder_state": attn_mm_encoder_state,
    "attn_collective_args": attn_collective_args,
    "attn_collectives": attn_collectives,
    "attn_context_parallel": attn_context_parallel,
    "attn_batch_context_parallel": attn_batch_context_parallel,
    "attn_batch_table": attn_batch_table,
    "attn_batch": attn_batch,
    "attn_batch_split": attn_batch_split,
    "attn_step_io": attn_step_io,
    "attn_io_output_quant": attn_io_output_quant,
    "attn_io_rope": attn_io_rope,
    "attn_io_caches": attn_io_caches,
    "attn_mla_desc": attn_mla_desc,
    "attn_mla_weights": attn_mla_weights,
    "attn_io_mla": attn_io_mla,
    "attn_mla_caps": attn_mla_caps,
    "attn_recurrent_desc": attn_recurrent_desc,
    "attn_recurrent_weights": attn_recurrent_weights,
    "attn_recurrent_state": attn_recurrent_state,
    "attn_batch_recurrent": attn_batch_recurrent,
    "attn_io_recurrent": attn_io_recurrent,
    "attn_recurrent_caps": attn_recurrent_caps,
    "attn_limits": attn_limits,
    "attn_schedule_size": attn_schedule_size,
    "attn_prepare_args": attn_prepare_args,
    "attn_schedule_size_args": attn_schedule_size_args,
    "attn_attend_args": attn_attend_args,
    "attn_write_kv_args": attn_write_kv_args,
    "attn_gather_kv_args": attn_gather_kv_args,
    "attn_block_copy": attn_block_copy,
    "attn_copy_blocks_args": attn_copy_blocks_args,
    "attn_copy_args": attn_copy_args,
    "attn_fill_args": attn_fill_args,
    "attn_block_table_args": attn_block_table_args,
    "attn_memory_args": attn_memory_args,
    "attn_stream_args": attn_stream_args,
    "attn_merge_states_args": attn_merge_states_args,
    "attn_batched_gemm_args": attn_batched_gemm_args,
    "attn_quantize_args": attn_quantize_args,
    "attn_amax_args": attn_amax_args,
    "attn_kernels": attn_kernels,
    "attn_create_args": attn_create_args,
    "attn_supports_args": attn_supports_args,
    "attn_plugin": attn_plugin,
    "attn_model_options": attn_model_options,
    "attn_plan_options": attn_plan_options,
    "attn_workspace": attn_workspace,
    "attn_block_memory": attn_block_memory,
    "attn_block_transfer": attn_block_transfer,
    "attn_calibration": attn_calibration,
    "attn_api": attn_api,
}
