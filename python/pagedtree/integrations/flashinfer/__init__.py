"""FlashInfer's paged prefill, latent attention, packed masks, merging and chain sampling, without FlashInfer."""

from pagedtree.integrations.flashinfer.masks import (
    export_custom_mask,
    export_packed_custom_mask,
    import_custom_mask,
    import_packed_custom_mask,
)
from pagedtree.integrations.flashinfer.mla import BatchMLAPagedAttentionWrapper
from pagedtree.integrations.flashinfer.paged import BatchPrefillWithPagedKVCacheWrapper
from pagedtree.integrations.flashinfer.pages import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    cache_views,
    get_batch_indices_positions,
    get_seq_lens,
    page_table,
)
from pagedtree.integrations.flashinfer.sampling import chain_speculative_sampling
from pagedtree.integrations.flashinfer.states import merge_state, merge_state_in_place, merge_states

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "cache_views",
    "chain_speculative_sampling",
    "export_custom_mask",
    "export_packed_custom_mask",
    "get_batch_indices_positions",
    "get_seq_lens",
    "import_custom_mask",
    "import_packed_custom_mask",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "page_table",
]
