"""Reference results of the ops, by plain loops and in float64: one module for each family of ops.

Slow, and independent of the kernels. Each follows the loop in its op's docstring, and its rules for values out of
range.
"""

from pagedtree.reference import verify
from pagedtree.reference.attention import is_latent, merge_states, tree_attention, visible_keys
from pagedtree.reference.options import (
    apply_options,
    ends_of_bad_words,
    paths_of,
    penalties_of,
    unpacked,
    with_bias_and_penalties,
)
from pagedtree.reference.sampling import (
    DRAFT,
    GUMBEL,
    OTHERS,
    clean_logits,
    distribution,
    draft_use,
    gumbel_noise,
    kept_tokens,
    philox4x32,
    random_words,
    sample_row,
)
from pagedtree.reference.verify import *

__all__ = [
    "DRAFT",
    "GUMBEL",
    "OTHERS",
    "apply_options",
    "clean_logits",
    "distribution",
    "draft_use",
    "ends_of_bad_words",
    "gumbel_noise",
    "is_latent",
    "kept_tokens",
    "merge_states",
    "paths_of",
    "penalties_of",
    "philox4x32",
    "random_words",
    "sample_row",
    "tree_attention",
    "unpacked",
    "visible_keys",
    "with_bias_and_penalties",
]
__all__ += verify.__all__
