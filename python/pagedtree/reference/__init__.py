"""Reference results of the ops, by plain loops and in float64: one module for each family of ops.

Slow, and independent of the kernels. Each follows the loop in its op's docstring, and its rules for values out of
range.
"""

from pagedtree.reference import attention, options, sampling, verify
from pagedtree.reference.attention import *
from pagedtree.reference.options import *
from pagedtree.reference.sampling import *
from pagedtree.reference.verify import *

__all__: list[str] = []
__all__ += attention.__all__
__all__ += options.__all__
__all__ += sampling.__all__
__all__ += verify.__all__
