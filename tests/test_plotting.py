"""Figures: the arrays that reach the canvas, and colours that can be told apart."""

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from mhabook_lib import plotting


@pytest.fixture
def axis():
    figure, axis = plotting.panels()
    yield axis
    plotting.show(figure)


def test_curves_draws_each_row(axis):
    plotting.curves(axis, torch.arange(3.0), torch.eye(3)[:2], ["a", "b"])
    assert [line.get_ydata().tolist() for line in axis.lines] == [[1, 0, 0], [0, 1, 0]]
    assert [line.get_label() for line in axis.lines] == ["a", "b"]
    with pytest.raises(ValueError):
        plotting.curves(axis, [0, 1], np.zeros((2, 2)), ["only one name"])


def test_ratio_map_is_white_at_one_and_symmetric(axis):
    plotting.ratio_map(axis, [0, 1], [0, 1], [[1.0, 2.0], [0.5, 1.0]])
    mesh = axis.collections[0]
    assert mesh.get_array().ravel().tolist() == [0, 1, -1, 0]
    assert mesh.get_clim() == (-1, 1)


def test_sign_map_names_its_regions(axis):
    plotting.sign_map(axis, [0, 1, 2], [0, 1], [[-1, -1, 1], [-1, -1, 1]], ["plus", "minus"])
    place = {text.get_text(): text.get_position()[0] for text in axis.texts}
    assert place["plus"] == 2 and place["minus"] == 0.5


def test_globe_shows_the_far_side_pale(axis):
    plotting.globe(axis, torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]]), [0, 1])
    behind, front = axis.collections
    assert behind.get_alpha() < front.get_alpha()
    assert behind.get_offsets().shape == front.get_offsets().shape == (1, 2)


def test_palette_is_distinct_for_colour_blind_readers():
    """Pairwise distances after a simulation of deuteranopia and protanopia stay visible."""
    filters = (
        np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
        np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    )
    colours = np.array([to_rgb(c) for c in plotting.COLOURS])
    for matrix in filters:
        seen = colours @ matrix.T
        gaps = np.linalg.norm(seen[:, None] - seen, axis=-1) + 9 * np.eye(len(seen))
        assert gaps.min() > 0.12


def test_style_has_a_white_ground():
    with matplotlib.rc_context():
        plotting.use_style()
        assert matplotlib.rcParams["savefig.facecolor"] == "white"


def test_animation_is_small_and_has_a_still_and_words():
    def frame(k):
        figure, axis = plotting.panels(width=3)
        axis.plot([0, k], [0, 1])
        return figure

    moving = plotting.Animation((frame(k) for k in range(3)), 100, "a line that turns", "A < B")
    page = moving._repr_html_()
    assert "<figcaption>A &lt; B</figcaption>" in page
    assert 'alt="a line that turns"' in page and "prefers-reduced-motion" in page
    assert moving._repr_png_().startswith(b"\x89PNG") and moving.moving.startswith(b"GIF")
    assert len(page) < 200_000
