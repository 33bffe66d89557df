"""Generation with draft trees over a paged cache, for any model that is a `packed_model.PackedModel`.

`engine` has the loop, `scheduler` says who takes part in a step, `drafters` guess. The adapters in
`pagedtree.integrations` bring the models; nothing here imports an adapter or the library that it serves.
"""
