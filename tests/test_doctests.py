"""The examples in docstrings are run, and say what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["fake_cuda.cards", "helpers.prediction", "helpers.training"])
def test_the_examples_of_a_module_say_what_they_say(name):
    found = doctest.testmod(importlib.import_module(name), report=True)
    assert found.attempted and not found.failed
