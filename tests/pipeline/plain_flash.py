"""The two functions of `flash_attn.flash_attn_interface` that we call, written out plainly, with the package's own
signatures: what a variable-length FlashAttention kernel computes, in any precision and on any device."""
import torch


def _sequences(cu_seqlens_q, cu_seqlens_k):
    rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    assert len(rows) == len(keys)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in zip(rows, rows[1:], keys, keys[1:])]


def _scores(q, k, scale):
    return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                               causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                               return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None):
    assert dropout_p == 0.0 and not causal and window_size_left == window_size_right == -1
    out, lse = torch.full_like(q, float("nan")), q.new_full((q.shape[1], len(q)), float("nan"))
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        assert 0 < rows.stop - rows.start <= max_seqlen_q and 0 < keys.stop - keys.start <= max_seqlen_k
        scores = _scores(q[rows], k[keys], softmax_scale)
        lse[:, rows] = scores.logsumexp(-1)
        wide_v = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v)
    return out, lse, torch.empty(0), torch.zeros(2, dtype=torch.uint64)


def _flash_attn_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                                max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
                                softcap, alibi_slopes, deterministic, rng_state=None):
    group = q.shape[1] // k.shape[1]
    delta = (dout * out).sum(-1).t()
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        p = (_scores(q[rows], k[keys], softmax_scale) - softmax_lse[:, rows, None]).exp()
        wide_k, wide_v = (t[keys].repeat_interleave(group, 1) for t in (k, v))
        ds = p * (torch.einsum("qhd,khd->hqk", dout[rows], wide_v) - delta[:, rows, None]) * softmax_scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds, wide_k)
        dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[rows]).unflatten(1, (-1, group)).sum(2)
        dv[keys] = torch.einsum("hqk,qhd->khd", p, dout[rows]).unflatten(1, (-1, group)).sum(2)
    return delta
