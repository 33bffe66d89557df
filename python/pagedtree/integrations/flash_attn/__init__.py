"""FlashAttention's two functions for inference, on pagedtree. flash-attn is not needed.

The arguments are flash-attn 2.8's, in its order, and by name FlashAttention 3's. Causal masks are aligned to the last
key; a row that sees no key gives 0 and lse -inf. Unsupported arguments raise NotImplementedError.
"""

from pagedtree.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from pagedtree.integrations.flash_attn.varlen import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
