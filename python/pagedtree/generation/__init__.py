"""Generation with draft trees over a paged cache, for any model that is a `packed_model.PackedModel`.

`engine` has the loop, `scheduler` chooses each step's sequences, `drafters` draft. Adapters in `pagedtree.integrations`
bring the models; nothing here imports an adapter or its library.
"""
