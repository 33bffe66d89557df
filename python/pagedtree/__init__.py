"""Tree-masked paged attention and tree verification for speculative decoding."""

import signal
import sys

# The command `python -m pagedtree`: Ctrl-C ends it quietly, also while it imports torch.
if sys.argv[:1] == ["-m"] and "pagedtree" in sys.orig_argv and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))

from pagedtree import (
    attention,
    attention_cost,
    drafting,
    kv_cache,
    logprobs,
    recurrent,
    sampling,
    step,
    tree,
    tree_choice,
    verify,
)
from pagedtree import testing as testing
from pagedtree.attention import *
from pagedtree.attention_cost import *
from pagedtree.drafting import *
from pagedtree.kv_cache import *
from pagedtree.logprobs import *
from pagedtree.options import RequestOptions
from pagedtree.recurrent import *
from pagedtree.sampling import *
from pagedtree.step import *
from pagedtree.tree import *
from pagedtree.tree_choice import *
from pagedtree.verify import *

__version__ = "0.3.0"

# Type checkers understand this form: a new name goes only into its family's own list.
__all__ = ["RequestOptions"]
__all__ += attention.__all__
__all__ += tree_choice.__all__
__all__ += attention_cost.__all__
__all__ += drafting.__all__
__all__ += kv_cache.__all__
__all__ += logprobs.__all__
__all__ += recurrent.__all__
__all__ += sampling.__all__
__all__ += step.__all__
__all__ += tree.__all__
__all__ += verify.__all__
