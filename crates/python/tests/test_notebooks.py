# SPDX-License-Identifier: Apache-2.0
"""The notebooks of examples/notebooks run from top to bottom, and show pictures."""

import pathlib

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[3] / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_two():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_shows_a_picture(path):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    shown = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output["output_type"] in ("display_data", "execute_result")
    ]
    assert any("image/svg+xml" in data for data in shown)
