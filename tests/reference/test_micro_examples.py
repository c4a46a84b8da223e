"""The worked examples of the model specification, §6.1 and §6.2 (MXFP4 has its own test file)."""

import numpy as np
import pytest

from k3mlx.reference.attn_res import attn_res_mix
from k3mlx.reference.kda import decay_gate, kda_chunk, kda_recurrent, short_conv
from k3mlx.reference.mla import attend_absorbed, attend_expanded, split_kv_b
from k3mlx.reference.moe import route_topk
from k3mlx.reference.ops import l2_norm, rms_norm, sigmoid, situ


def close(got, expected):
    """Equal to the seven digits the specification prints."""
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=5e-10)


@pytest.mark.parametrize(
    ("gate", "up", "result", "gate_factor"),
    [
        (0, 1, 0, 0),
        (1, 1, 0.7158178, 0.7161996),
        (-1, 2, -0.5258289, -0.2634751),
        (0.5, -0.25, -0.07740211, 0.3096187),
        (4, 25, 56.95932, 2.991584),
        (-8, 3, -0.003860927, -0.001293147),
        (10, -100, -98.59078, 3.946278),
        (100, 1000, 100.0000, 4.000000),
        (-0.01, 0.01, -4.974990e-05, -0.004974990),
    ],
)
def test_situ(gate, up, result, gate_factor):
    close(situ(np.array([gate], float), np.array([up], float), 4.0, 25.0), [result])
    factor = situ(np.array([gate], float), np.array([1e6]), 4.0, 1.0)  # the up branch saturates at 1
    close(factor, [gate_factor])


@pytest.mark.parametrize(
    ("A_log", "z", "dt_bias", "g", "alpha"),
    [
        (0, 0, 0, -2.500000, 0.08208500),
        (0, 1, -3, -0.5960146, 0.5510032),
        (np.log(2), 0.5, -1, -1.344707, 0.2606160),
        (2, -0.25, -0.5, -0.01952097, 0.9806683),
        (np.log(16), 1, 0, -4.999999, 0.006737951),
        (-1.5, -10, 2, -0.7184088, 0.4875274),
        (0.3, 8, 0, -4.999898, 0.006738635),
    ],
)
def test_decay_gate(A_log, z, dt_bias, g, alpha):
    got = decay_gate(
        np.full((1, 1, 1), float(z)), np.array([float(A_log)]), np.full((1, 1), float(dt_bias)), -5.0
    )
    np.testing.assert_allclose(got, [[[g]]], rtol=1e-6)
    np.testing.assert_allclose(np.exp(got), [[[alpha]]], rtol=1e-6)


def test_short_convolution_and_window_shift():
    window = np.array([[1.0], [2.0], [3.0]])
    out, window = short_conv(np.array([[4.0]]), window, np.array([[0.1, -0.2, 0.3, 0.4]]))
    close(out, [[1.980549]])
    close(window, [[2.0], [3.0], [4.0]])


def test_epsilons():
    x = np.array([0.003, -0.001, 0.002, 0.0])
    close(rms_norm(x, np.ones(4), 1e-5), [0.8164966, -0.2721655, 0.5443311, 0])
    close(rms_norm(x, np.ones(4), 1e-6), [1.414214, -0.4714045, 0.9428090, 0])
    close(l2_norm(np.array([0.003, -0.004]), 1e-6), [0.5883484, -0.7844645])


def test_router_selects_by_biased_score_and_weighs_without_bias():
    logits = np.array([[0.2, -1, 1.5, 0.9, -0.3, 1.4]])
    bias = np.array([0, 0.5, -0.3, 0.05, 0.4, -0.05])
    close(sigmoid(logits), [[0.5498340, 0.2689414, 0.8175745, 0.7109495, 0.4255575, 0.8021839]])
    ids, weights = route_topk(logits, np.eye(6), bias, 2, 1.0)
    assert ids.tolist() == [[4, 1]]
    close(weights, [[0.6127547, 0.3872453]])
    assert sorted(route_topk(logits, np.eye(6), 0 * bias, 2, 1.0)[0][0]) == [2, 5]


def test_router_ties_go_to_the_lowest_id():
    ids, _ = route_topk(np.zeros((1, 3)), np.ones((7, 3)), np.zeros(7), 3, 1.0)
    assert ids.tolist() == [[0, 1, 2]]


def test_depth_mix():
    blocks = [np.array([[1, -2, 0.5, 3]]), np.array([[0.2, 0.1, -0.4, 0.3]])]
    partial = np.array([[-1.0, 2, 2, 0]])
    norm, query = np.array([1, 0.5, 2, 1.5]), np.array([0.6, -0.2, 0.1, 0.4])
    close(attn_res_mix(blocks, partial, norm, query, 1e-5), [[0.5416443, -0.9316729, 0.3889199, 1.857620]])
    assert attn_res_mix([], partial, norm, query, 1e-5) is partial


@pytest.mark.parametrize("attend", [attend_absorbed, attend_expanded])
def test_mla_one_head(attend):
    U, O = np.array([[[1, 0.5], [-0.5, 2]]]), np.array([[[0.3, -1], [2, 0.1]]])
    latent, ext = np.array([[1.0, -1], [0.5, 0.25]]), np.array([[0.8], [-0.4]])
    q_nope, q_ext = np.array([[[0.6, -0.2]]]), np.array([[[1.5]]])
    out = attend(q_nope, q_ext, latent, ext, U, O, 3**-0.5)
    close(out, [[[1.003331, 1.714582]]])
    close(out * sigmoid(np.array([0.5, -0.5])), [[[0.6245327, 0.6473244]]])


def test_kv_b_is_split_per_head():
    U, O = split_kv_b(np.arange(2 * 5 * 1.0)[:, None], heads=2, nope=3)
    assert U[:, :, 0].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert O[:, :, 0].tolist() == [[3, 4], [8, 9]]


KDA = {  # one head of width 2, three tokens; the columns of the table in §6.2
    "q": [(3, -4), (0.5, 1.5), (-2, 1)],
    "k": [(1, 2), (-1, 0.5), (2, 0.1)],
    "v": [(0.7, -0.3), (-0.2, 1.1), (0.4, 0.9)],
    "z": [(0.2, -0.6), (-2, 3), (1, -4)],
    "b": [0.4, -0.8, 2],
    "q_hat": [(0.4242641, -0.5656854), (0.2236068, 0.6708203), (-0.6324555, 0.3162277)],
    "k_hat": [(0.4472136, 0.8944271), (-0.8944268, 0.4472134), (0.9987522, 0.04993761)],
    "g": [(-1.054943, -2.294375), (-0.03530215, -4.984458), (-2.500000, -0.01554215)],
    "beta": [0.5986877, 0.3100255, 0.8807971],
    "state": [
        [(0.3346418, -0.4351305), (0.3462773, 0.02781247)],
        [(0.2986682, -0.6208607), (0.01455281, 0.1006020)],
        [(0.3542260, 0.7811900), (0.03081387, 0.1406582)],
    ],
    "o": [(-0.05390752, -0.2003433), (0.07654654, -0.07134280), (-0.2142880, -0.4495879)],
}


def table_inputs():
    q, k, v, z = (np.array(KDA[name], float)[:, None] for name in "qkvz")  # [T, 1, 2]
    q, k = l2_norm(q, 1e-6) * 2**-0.5, l2_norm(k, 1e-6)
    g = decay_gate(z, np.array([0.5]), np.array([[-1, 0.5]]), -5.0)
    beta = sigmoid(np.array(KDA["b"])[:, None])
    return q, k, v, g, beta, np.array([[[0.5, -1], [0.25, 2]]])


def test_kda_table_inputs():
    q, k, _, g, beta, _ = table_inputs()
    for got, name in ((q[:, 0], "q_hat"), (k[:, 0], "k_hat"), (g[:, 0], "g"), (beta[:, 0], "beta")):
        np.testing.assert_allclose(got, KDA[name], rtol=1e-6, err_msg=name)


def test_kda_table_token_by_token():
    q, k, v, g, beta, state = table_inputs()
    for t in range(3):
        now = slice(t, t + 1)
        o, state = kda_recurrent(q[now], k[now], v[now], g[now], beta[now], state)
        np.testing.assert_allclose(o[0, 0], KDA["o"][t], rtol=2e-6, err_msg=f"o of token {t}")
        np.testing.assert_allclose(state[0], KDA["state"][t], rtol=2e-6, err_msg=f"state after token {t}")


@pytest.mark.parametrize("recurrence", [kda_recurrent, kda_chunk])
def test_kda_table_as_one_call(recurrence):
    *inputs, state = table_inputs()
    before = state.copy()
    o, after = recurrence(*inputs, state)
    np.testing.assert_allclose(o[:, 0], KDA["o"], rtol=2e-6)
    np.testing.assert_allclose(after[0], KDA["state"][-1], rtol=2e-6)
    np.testing.assert_array_equal(state, before)


def test_output_norm_then_gate():
    y = rms_norm(np.array(KDA["o"][0]), np.array([1.1, 0.9]), 1e-5) * sigmoid(np.array([0.3, -1.2]))
    np.testing.assert_allclose(y, [-0.2321395, -0.2844346], rtol=1e-6)
