"""FlashAttention's two functions for inference, on pagedtree. Nothing of flash-attn is needed.

The arguments are those of flash-attn 2.8, in its order, and by name those of FlashAttention 3. Causal masks are aligned
to the last key, as in FlashAttention; a row that sees no key gives 0 and lse -inf. What is not supported is refused by
name, with NotImplementedError.
"""

from pagedtree.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from pagedtree.integrations.flash_attn.varlen import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]
