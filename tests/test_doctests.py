"""The examples in docstrings are run, and say what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["hardware", "prediction", "training"])
def test_the_examples_of_a_module_say_what_they_say(name):
    found = doctest.testmod(importlib.import_module(f"helpers.{name}"), report=True)
    assert found.attempted and not found.failed
