"""vLLM on pagedtree, as plugins: an attention backend, and speculation with draft trees.

    vllm serve MODEL --attention-backend CUSTOM                      # only the attention backend
    export PAGEDTREE_PLUGINS=vllm                                    # draft trees; on CPUs the backend, too
    vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 15,
        "model": "pagedtree.integrations.vllm.drafters.NgramTreeDrafter"}'

On a GPU also name worker and scheduler, and the method "ngram_gpu" (docs/integrations/vllm.md). vLLM 0.32 finds the
package by its entry points.
"""
