"""How much of a layer a finite data set identifies: exact ranks for few sequences and few tokens.

The laws are for softmax multi-head attention (one group a head, no QK-norm) with heads and
values that are not wider than what they read.
"""

from __future__ import annotations

from .attention_shapes import AttentionShape


def finite_data_rank(
    shape: AttentionShape, seq_len: int, sequences: int, causal: bool = True
) -> int:
    """Rank of the Jacobian of a layer on n generic sequences of length L.

    `(E - HC) min(nL, HC) + H min(CE + (H-1) C^2 + min(d_QK, k), r)` where a head has
    `d_QK = 2DE - D^2` identified query-key dimensions (`2DE - D` with rotary positions); causal:
    `k = n sum_l min(C, l-1)`, `r = C (min(n, E) + n (L-1))`; no mask: `k = n L min(C, L-1)`,
    `r = C n L`. A count of equations makes it an upper bound. It is attained in every case tried
    with two heads or more; a single head whose values are nearly as wide as the model can miss it
    when nL is a little above E (E=C=3, n=L=2, no mask: rank 11 in place of 12).
    Raises ValueError for shapes outside the law, for rotary positions with L < 3 and 2D > E, and
    for less than one token. Source: identification.X8.

    >>> finite_data_rank(AttentionShape(8, 2), 2, 16), finite_data_rank(AttentionShape(8, 2), 2, 48)
    (128, 192)
    """
    _require_law(shape)
    _require_room(shape, seq_len, sequences)
    heads, d_model, c = shape.num_heads, shape.d_model, shape.d_value
    logits, rows = _equations(shape, seq_len, sequences, causal)
    outside = (d_model - heads * c) * min(sequences * seq_len, heads * c)
    values = c * d_model + (heads - 1) * c**2
    return outside + heads * min(values + min(_identified_qk(shape), logits), rows)


def sequences_needed(shape: AttentionShape, seq_len: int, causal: bool = True) -> int:
    """Fewest generic sequences of length L that identify all a layer has to identify.

    By `finite_data_rank`, hence a lower bound for a single head. Raises as that, and ValueError
    for L = 1, where no number of them is enough.
    Source: identification.X8.

    >>> sequences_needed(AttentionShape(8, 2), 2)
    48
    """
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len}: expected at least two tokens, or no query is seen")
    complete = shape.parameter_count() - shape.unidentified_count().total
    n = 1
    while finite_data_rank(shape, seq_len, n, causal) < complete:
        n += 1
    return n


def input_limited_count(shape: AttentionShape, span: int, affine: int) -> int:
    """Unidentified directions when the inputs span only a part of the space.

    `span` s is the dimension of their linear span, `affine` a that of their affine hull
    (s = a or a + 1):

        u = H [2DE + D 1(b_Q) + D 1(b_K) - D (s_Q + a - D) + 2CE + C 1(b_V) - C (E + s_V - C)],

    `s_Q = a + 1` with a query bias, else s; `s_V = a` with an output bias, `a + 1` with a value
    bias alone, else s. Raises ValueError for shapes outside the law and for dimensions that do
    not fit. Source: identification.X9.

    >>> input_limited_count(AttentionShape(8, 2), 7, 7)  # plain LayerNorm
    88
    """
    _require_law(shape)
    heads, d_model = shape.num_heads, shape.d_model
    d, c, biases = shape.d_head, shape.d_value, shape.biases
    if shape.rotary_dim or span not in (affine, affine + 1) or span > d_model:
        raise ValueError(
            f"span={span}, affine={affine}, rotary_dim={shape.rotary_dim}: expected span = affine "
            f"or affine + 1, at most d_model={d_model}, and no rotary positions"
        )
    if max(d, c) > affine:
        raise ValueError(f"affine={affine}: expected at least d_head={d} and d_value={c}")
    seen_by_q = affine + 1 if "q" in biases else span
    seen_by_v = span
    if "o" in biases:
        seen_by_v = affine
    elif "v" in biases:
        seen_by_v = affine + 1
    qk = d * (2 * d_model + ("q" in biases) + ("k" in biases) - seen_by_q - affine + d)
    ov = c * (d_model + ("v" in biases) - seen_by_v + c)
    return heads * (qk + ov)


def _identified_qk(shape: AttentionShape) -> int:
    full = 2 * shape.d_head * shape.d_model
    return full - shape.unidentified_count().qk // shape.num_heads


def _equations(shape, seq_len, sequences, causal) -> tuple[int, int]:
    """Differences of logits that a head shows, and rows of outputs inside a head's span."""
    c = shape.d_value
    if not causal:
        return sequences * seq_len * min(c, seq_len - 1), c * sequences * seq_len
    logits = sequences * sum(min(c, l - 1) for l in range(1, seq_len + 1))
    return logits, c * (min(sequences, shape.d_model) + sequences * (seq_len - 1))


def _require_law(shape: AttentionShape) -> None:
    if shape.groups != shape.num_heads or shape.qk_norm or shape.memory_dim != shape.d_model:
        raise ValueError(
            f"{shape}: expected self-attention with one group a head and without QK-norm"
        )
    if not shape.output_projection or (
        shape.num_heads * shape.d_value > shape.d_model and "o" not in shape.biases
    ):
        raise ValueError(f"{shape}: expected an output projection and H C <= E")


def _require_room(shape: AttentionShape, seq_len: int, sequences: int) -> None:
    if shape.biases or shape.d_head > shape.d_model:
        raise ValueError(f"{shape}: expected no biases and d_head <= d_model")
    if seq_len < 1 or sequences < 1:
        raise ValueError(f"seq_len={seq_len}, sequences={sequences}: expected integers >= 1")
    if shape.rotary_dim and seq_len < 3 and 2 * shape.d_head > shape.d_model:
        raise ValueError(f"seq_len={seq_len}: expected at least 3 with rotary positions and 2D > E")
