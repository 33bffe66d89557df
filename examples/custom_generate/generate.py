"""A `generate` that transformers loads: model.generate(..., custom_generate="examples", trust_remote_code=True).

As custom_generate/generate.py in a checkpoint's folder, it replaces `model.generate` for models loaded with
trust_remote_code=True.
"""

from pagedtree.generation.drafters import NgramDrafter
from pagedtree.integrations.transformers import tree_generate


def generate(model, *args, drafter=None, **kwargs):
    """Generates with draft trees, by default from the text itself."""
    if "stop_strings" in kwargs:
        kwargs["stop_tokenizer"] = kwargs.pop("tokenizer", None)
    # The class's, as the model's attribute may be this function.
    generate_of_class = type(model).generate
    return generate_of_class(model, *args, custom_generate=tree_generate, drafter=drafter or NgramDrafter(), **kwargs)
