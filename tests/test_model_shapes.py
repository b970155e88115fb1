"""model_shapes: the table of known models against their published totals, and the summary."""

import matplotlib.pyplot as plt
import pytest

from mhabook_lib.attention_shapes import AttentionShape
from mhabook_lib.model_shapes import known_models, layer_summary, plot_against_known

MODELS = {model.name: model for model in known_models()}


def test_every_model_has_a_source_and_layers():
    assert len(MODELS) == len(known_models()) >= 16
    for model in MODELS.values():
        assert model.source.startswith("https://") and model.layers > 0
        assert 0 < model.layer.share() < 0.1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # attention of all layers, from the released checkpoints' tensor shapes
        ("GPT-2 small", 12 * (768 * 2304 + 2304 + 768 * 768 + 768)),
        ("Llama-2-7B", 32 * 4 * 4096**2),
        ("Llama-3-8B", 32 * (2 * 4096**2 + 2 * 4096 * 1024)),
        ("Qwen2-7B", 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3584 + 2 * 512)),
        ("Qwen3-8B", 36 * (2 * 4096**2 + 2 * 4096 * 1024 + 2 * 128)),
        ("Gemma-2B", 18 * (2 * 2048**2 + 2 * 2048 * 256)),
    ],
)
def test_parameters_of_released_checkpoints(name, parameters):
    assert MODELS[name].layers * MODELS[name].layer.parameter_count() == parameters


def test_summary_and_plot():
    lines = layer_summary(AttentionShape(8, 2, biases="qkvo")).splitlines()
    numbers = [line.split()[-1] for line in lines[:-1]]
    assert numbers == ["288", "32", "32", "16", "0", "80"]
    assert lines[-1].split()[-2:] == ["27.7778", "%"]
    figure, axis = plt.subplots()
    plot_against_known(axis, AttentionShape(8, 2), "small")
    *texts, last = (text.get_text() for text in axis.texts)
    assert sorted(", ".join(texts).split(", ")) == sorted(MODELS) and last == "small"
    assert "Llama-3-8B, Mistral-7B, Qwen3-8B" in texts  # one point
    plt.close(figure)
