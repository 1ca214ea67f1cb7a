"""The gated delta rule of KDA (spec 2.5.6) in torch: one token of many requests, or a chunked scan of one request.

Shapes: state [..., heads, d_v, d_k], value-major; q, k, v, log_decay [..., heads, d]; beta [..., heads]. All float32.
"""

import torch
from torch import Tensor

CHUNK = 16


def token_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """One token of each of B requests; changes state [B, heads, d_v, d_k] in place, returns o [B, heads, d_v]."""
    state *= log_decay.exp().unsqueeze(-2)
    error = (v - (state @ k.unsqueeze(-1)).squeeze(-1)) * beta.unsqueeze(-1)
    state += error.unsqueeze(-1) * k.unsqueeze(-2)
    return (state @ q.unsqueeze(-1)).squeeze(-1)


def scan(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Many tokens of one request; changes state [heads, d_v, d_k] in place, returns o [tokens, heads, d_v].

    Inside a chunk the errors e_t solve a unit triangular system: e_t + beta_t sum_{s<t} (k_t . D(t,s) k_s) e_s =
    beta_t (v_t - S D(t,0) k_t), where D(t, s) decays from s to t. Each D is the exponential of a sum of terms <= 0
    that was accumulated for its own pair: a quotient of products or a difference of cumulative sums would overflow or
    cancel under strong decay. Everything but the walk over chunks is done for all chunks at once.
    """
    tokens = q.shape[0]
    q, k, v, log_decay = (_chunks(x) for x in (q, k, v, log_decay))
    beta = _chunks(beta.unsqueeze(-1))
    chunks, heads = q.shape[:2]
    query_key = q.new_zeros(chunks, heads, CHUNK, CHUNK)
    key_key = q.new_zeros(chunks, heads, CHUNK, CHUNK)
    span = torch.zeros_like(k)  # log decay from each earlier token up to token t
    for t in range(CHUNK):
        span[:, :, :t] += log_decay[:, :, t, None]
        decayed = k[:, :, : t + 1] * span[:, :, : t + 1].exp()
        query_key[:, :, t, : t + 1] = (decayed @ q[:, :, t, :, None]).squeeze(-1)
        key_key[:, :, t, :t] = (decayed[:, :, :t] @ k[:, :, t, :, None]).squeeze(-1)
    eye = torch.eye(CHUNK, dtype=q.dtype).expand(chunks, heads, CHUNK, CHUNK)
    solve = torch.linalg.solve_triangular(beta * key_key, eye, upper=False, unitriangular=True) * beta.mT
    since_start = log_decay.cumsum(2).exp()
    start_key, start_query, end_key = k * since_start, q * since_start, k * span.exp()
    out = torch.empty_like(v)
    for n in range(chunks):
        error = solve[n] @ (v[n] - start_key[n] @ state.mT)
        out[n] = start_query[n] @ state.mT + query_key[n] @ error
        state *= since_start[n, :, -1:]
        state += error.mT @ end_key[n]
    return out.transpose(1, 2).reshape(chunks * CHUNK, heads, -1)[:tokens]


def _chunks(x: Tensor) -> Tensor:
    """[tokens, heads, d] to [chunks, heads, CHUNK, d]; zeros fill the tail and leave the state alone."""
    tokens, heads, d = x.shape
    padded = x.new_zeros(-(-tokens // CHUNK) * CHUNK, heads, d)
    padded[:tokens] = x
    return padded.view(-1, CHUNK, heads, d).transpose(1, 2).contiguous()
