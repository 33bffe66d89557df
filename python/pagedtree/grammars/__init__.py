"""Grammars on draft trees: which tokens each node of a batch of trees may be followed by, packed for the verify ops."""

from pagedtree.grammars.masks import GrammarFill, GrammarMasks
from pagedtree.grammars.matcher import DepthFirstMatcher, GrammarMatcher, TokenTree, allow_only

__all__ = ["DepthFirstMatcher", "GrammarFill", "GrammarMasks", "GrammarMatcher", "TokenTree", "allow_only"]
