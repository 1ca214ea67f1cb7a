"""The gated delta rule of KDA (spec 2.5.6): token by token, and in chunks for prompts.

Shapes: state [heads, d_v, d_k], value-major; q, k, v, log_decay [tokens, heads, d]; beta [tokens, heads]. All
float32.
"""

import numpy as np

from stepkernel.reference.numerics import Floats

CHUNK = 16


def token_step(state: Floats, q: Floats, k: Floats, v: Floats, log_decay: Floats, beta: Floats) -> Floats:
    """One token; changes `state` in place and returns o [heads, d_v].

    The correction uses the state after its decay, the output uses the state after its update.
    """
    return corrected_step(state, q, k, v, np.exp(log_decay), beta)[0]


def corrected_step(
    state: Floats, q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats
) -> tuple[Floats, Floats]:
    """The same with the decay itself; also returns the correction [heads, d_v] that was added along k."""
    state *= decay[:, None, :]
    correction = beta[:, None] * (v - (state @ k[:, :, None])[:, :, 0])
    state += correction[:, :, None] * k[:, None, :]
    return np.asarray((state @ q[:, :, None])[:, :, 0]), correction


def fold(state: Floats, correction: Floats, k: Floats, decay: Floats) -> None:
    """Does to `state` what the step that gave this correction did, to the last bit."""
    state *= decay[:, None, :]
    state += correction[:, :, None] * k[:, None, :]


def chunked(state: Floats, q: Floats, k: Floats, v: Floats, log_decay: Floats, beta: Floats) -> Floats:
    """Many tokens; changes `state` in place and returns o [tokens, heads, d_v].

    With D(t, s) = exp(sum of log_decay over s < j <= t) per key channel, the corrections of a chunk solve
    e_t + beta_t sum_{s<t} (k_t . D(t, s) k_s) e_s = beta_t (v_t - S_0 D(t, 0) k_t), a unit triangular system.
    Every D is the exponential of a sum of terms <= 0 that is accumulated for its own pair, never a quotient
    of products and never a difference of cumulative sums: decays of e^-5 per token, or far below, neither
    overflow nor cancel.
    """
    tokens = len(q)
    q, k, v, log_decay = (_split(x) for x in (q, k, v, log_decay))
    beta = _split(beta[:, :, None])
    chunks, heads = k.shape[:2]
    query_key = np.zeros((chunks, heads, CHUNK, CHUNK), np.float32)
    key_key = np.zeros_like(query_key)
    span = np.zeros_like(k)
    for t in range(CHUNK):
        span[:, :, :t] += log_decay[:, :, t, None]
        decayed = k[:, :, : t + 1] * np.exp(span[:, :, : t + 1])
        query_key[:, :, t, : t + 1] = (decayed @ q[:, :, t, :, None])[..., 0]
        key_key[:, :, t, :t] = (decayed[:, :, :t] @ k[:, :, t, :, None])[..., 0] * beta[:, :, t]
    solve = _unit_inverse(key_key)
    since_start = np.exp(np.cumsum(log_decay, axis=2))
    start_key, start_query, end_key = k * since_start, q * since_start, k * np.exp(span)
    out = np.empty_like(v)
    for n in range(chunks):
        transposed = state.transpose(0, 2, 1)
        correction = solve[n] @ (beta[n] * (v[n] - start_key[n] @ transposed))
        out[n] = start_query[n] @ transposed + query_key[n] @ correction
        state *= since_start[n, :, -1:, :]
        state += correction.transpose(0, 2, 1) @ end_key[n]
    return out.transpose(0, 2, 1, 3).reshape(chunks * CHUNK, heads, -1)[:tokens]


def _split(x: Floats) -> Floats:
    """[tokens, heads, d] to [chunks, heads, CHUNK, d]; zeros fill the tail and leave the state alone."""
    tokens, heads, d = x.shape
    chunks = -(-tokens // CHUNK)
    padded = np.zeros((chunks * CHUNK, heads, d), np.float32)
    padded[:tokens] = x
    return np.ascontiguousarray(padded.reshape(chunks, CHUNK, heads, d).transpose(0, 2, 1, 3))


def _unit_inverse(lower: Floats) -> Floats:
    """(I + lower)^-1 of strictly lower triangular matrices, by forward substitution row by row."""
    inverse = np.zeros_like(lower)
    inverse[..., range(CHUNK), range(CHUNK)] = 1
    for t in range(1, CHUNK):
        inverse[..., t, :t] = -(lower[..., t, None, :t] @ inverse[..., :t, :t])[..., 0, :]
    return inverse
