# SPDX-License-Identifier: Apache-2.0
"""Every struct, enumeration and constant of the public headers, by its name there (enumerations ``KvDtype`` and such).

Structs are `libattn.structs.Struct`: ``abi.attn_cache_desc(role=abi.CacheRole.INDEX_K, num_heads=1, head_size=64)``.
"""
from . import _declarations
from ._declarations import *  # noqa: F403

__all__ = [name for name in vars(_declarations) if name.startswith(("attn_", "ATTN_")) or (
    isinstance(getattr(_declarations, name), type) and issubclass(getattr(_declarations, name), _declarations.IntEnum))]
