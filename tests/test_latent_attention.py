"""latent_attention: against the plain layer with the latents multiplied out; errors."""

import numpy as np
import pytest
import torch

from mhabook_lib.attention_layer import attention_forward, random_weights, rope_frequencies
from mhabook_lib.attention_shapes import LatentShape
from mhabook_lib.latent_attention import latent_forward


@pytest.fixture
def rng():
    return np.random.default_rng(2)


@pytest.mark.parametrize("d_query", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_latents_multiplied_out(d_query, causal, rng):
    """Without norms it is a plain layer whose key weights stand under the rotary ones."""
    shape = LatentShape(8, 3, 4, d_query, 2, 2, 3)
    w = random_weights(shape.weight_shapes(), rng, 0.5)
    x = torch.from_numpy(rng.standard_normal((2, 6, 8)))
    # Rotary coordinates first, as attention_forward turns the first ones.
    query = w["up_q"] @ w["down_q"] if d_query else w["up_q"]
    plain = {
        "w_q": query[:, [2, 3, 0, 1]],
        "w_k": torch.cat([w["rotary_k"].expand(3, -1, -1), w["up_k"] @ w["down_kv"]], dim=1),
        "w_v": w["up_v"] @ w["down_kv"],
        "w_o": w["w_o"],
    }
    rope = rope_frequencies(2)
    expected = attention_forward(plain, x, rope=rope, causal=causal)
    found = latent_forward(w, x, rope, causal=causal)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_norms_forget_the_scale_of_the_latents(rng):
    w = random_weights(LatentShape(8, 2, 4, 5, 2, 2, 3, normed=True).weight_shapes(), rng, 0.5)
    x, rope = torch.from_numpy(rng.standard_normal((6, 8))), rope_frequencies(2)
    scaled = {**w, "down_kv": 3 * w["down_kv"], "down_q": 0.2 * w["down_q"]}
    torch.testing.assert_close(latent_forward(scaled, x, rope), latent_forward(w, x, rope))


def test_errors(rng):
    w = random_weights(LatentShape(8, 2, 4, None, 2, 2, 3).weight_shapes(), rng)
    x, rope = torch.ones(6, 8, dtype=torch.float64), rope_frequencies(2)
    with pytest.raises(ValueError, match=r"down_kv of shape \(4, 8\).*1, d_rotary, 7"):
        latent_forward(w, x[:, :7], rope)
    with pytest.raises(ValueError, match="2 frequencies"):
        latent_forward(w, x, rope_frequencies(4))
    with pytest.raises(ValueError, match=r"w_o=.*finite"):
        latent_forward({**w, "w_o": w["w_o"] / 0}, x, rope)
