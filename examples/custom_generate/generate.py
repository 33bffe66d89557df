"""A `generate` that transformers loads: model.generate(..., custom_generate="examples", trust_remote_code=True).

In a checkpoint's own folder, as custom_generate/generate.py, it becomes what `model.generate` does by itself where the
checkpoint is loaded with trust_remote_code=True.
"""

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import tree_generate


def generate(model, *args, drafter=None, **kwargs):
    """`model.generate` with draft trees, by default from the text itself."""
    if "stop_strings" in kwargs:
        kwargs["stop_tokenizer"] = kwargs.pop("tokenizer", None)
    # The class's: the model's own attribute may be this very function.
    generate_of_class = type(model).generate
    return generate_of_class(model, *args, custom_generate=tree_generate, drafter=drafter or NgramDrafter(), **kwargs)
