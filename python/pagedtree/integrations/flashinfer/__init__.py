"""FlashInfer's paged prefill, packed masks and chain sampling, on pagedtree. Nothing of FlashInfer is needed."""

from pagedtree.integrations.flashinfer.masks import (
    export_custom_mask,
    export_packed_custom_mask,
    import_custom_mask,
    import_packed_custom_mask,
)
from pagedtree.integrations.flashinfer.paged import BatchPrefillWithPagedKVCacheWrapper
from pagedtree.integrations.flashinfer.pages import append_paged_kv_cache, cache_views, page_table
from pagedtree.integrations.flashinfer.sampling import chain_speculative_sampling

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "cache_views",
    "chain_speculative_sampling",
    "export_custom_mask",
    "export_packed_custom_mask",
    "import_custom_mask",
    "import_packed_custom_mask",
    "page_table",
]
