from collections.abc import Sequence
from typing import Any

import numpy as np

HEAD_DIMS: tuple[tuple[int, int], ...]

def build_info() -> dict[str, Any]: ...
def available_isas() -> list[str]: ...
def active_isa() -> str: ...
def attention_engine() -> str: ...
def explain_attention(
    query_lens: list[int],
    seq_lens: list[int],
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int,
    latent: bool,
    kv_bytes: int,
    max_seqlen_q: int,
    window: int,
    num_sms: int,
    max_shared_bytes: int,
    l2_bytes: int,
    engine: str,
) -> list[dict[str, Any]]: ...
def attention_tiles(engine: str) -> dict[tuple[int, int], tuple[int, ...]]: ...
def copied_text(
    tokens: np.ndarray,
    lengths: np.ndarray,
    offsets: np.ndarray,
    parents: np.ndarray,
    draft_tokens: np.ndarray,
    longest: int,
) -> tuple[np.ndarray, np.ndarray]: ...
def former_continuations(
    tokens: np.ndarray,
    before: np.ndarray,
    newest: int,
    oldest: int,
    end: Sequence[int],
    context: int,
    max_ngram: int,
    length: int,
    most: int,
    max_places: int,
) -> np.ndarray: ...
