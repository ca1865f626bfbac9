# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, and pictures of one's own."""

import pytest

import pagetide


def test_figures_are_drawn_and_shown(tmp_path):
    drawn = pagetide.figures(tmp_path, packets=40, only="12b")
    figure = drawn["12b"]
    assert figure.pictures and all(picture.svg.startswith("<svg") for picture in figure.pictures)
    assert figure._repr_html_().count("<svg") == len(figure.pictures)
    assert (tmp_path / "index.html").exists() and str(tmp_path / "index.html") == drawn.page
    for name in figure.files + [figure.pictures[0].file]:
        assert (tmp_path / name).exists()
    with pytest.raises(KeyError):
        drawn["99"]
    with pytest.raises(pagetide.Error, match="there is no such figure"):
        pagetide.figures(tmp_path, only=["99"])


def test_chart_has_a_line_for_each_value(tmp_path):
    rows = [{"tenants": n, "gbps": n * 1.5, "preset": p} for p in ("base", "hypertrio") for n in (4, 16, 64)]
    picture = pagetide.chart(rows, x="tenants", y="gbps", by="preset", title="Goodput")
    assert "Goodput" in picture._repr_svg_() and "hypertrio" in picture.svg
    picture.write(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == picture.svg
    with pytest.raises(pagetide.Error, match="two rows have tenants = 4"):
        pagetide.chart(rows, x="tenants", y="gbps")
    with pytest.raises(pagetide.Error, match="no column 'speed'"):
        pagetide.chart(rows, x="tenants", y="speed")
    with pytest.raises(pagetide.Error, match="which is no number"):
        pagetide.chart(rows, x="tenants", y="preset", by="preset")
    with pytest.raises(pagetide.Error, match="no column"):
        pagetide.chart([], x="tenants", y="gbps")
