"""What lesson 22 has a reader paste."""

import ast
import re
from pathlib import Path

import nbformat
from transformers import AutoImageProcessor, Qwen2VLImageProcessorPil

LESSON = Path(__file__).parents[1] / "notebooks" / "22_images_and_tokens.ipynb"


def test_the_area_that_is_pasted_bounds_the_tokens_of_a_loaded_processor(tmp_path):
    cells = nbformat.read(LESSON, as_version=4).cells
    pasted = next(cell.source for cell in cells if cell.id == "change")
    assert "AutoImageProcessor.from_pretrained(name, size=area)" in pasted
    sides = re.search(r"\+ area = (\{.*?\})", pasted)[1]
    area = eval(compile(ast.parse(sides, mode="eval"), "pasted", "eval"))  # numbers only
    default = {"shortest_edge": 256**2, "longest_edge": 4096**2}
    Qwen2VLImageProcessorPil(patch_size=16, size=default).save_pretrained(tmp_path)
    tokens = [
        AutoImageProcessor.from_pretrained(tmp_path, **how).get_number_of_image_patches(3024, 4032)
        // 4
        for how in ({}, {"size": area})
    ]
    assert tokens[1] <= 1024 < tokens[0] / 10
