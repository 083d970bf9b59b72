"""The page that the weekly run against the latest versions shows."""

import numpy

from tools import what_moved

DIFFERS = """\x1b[91mNotebook cell execution failed\x1b[0m
Cell 4: Cell outputs differ
Input:
# NBVAL_CHECK_OUTPUT
Traceback:
 mismatch 'stdout'
  '2\\n' == '1\\n'
  - 1
  + 2
"""
RESULTS = """<testsuites><testsuite>
<testcase classname="notebooks.02_where_memory_goes.ipynb" name="Cell 4">
  <failure>{}</failure></testcase>
<testcase classname="notebooks.solutions.07_optimizers.ipynb" name="Cell 0">
  <failure>Cell 0: Cell execution caused an exception&#10;ImportError: no name</failure></testcase>
<testcase classname="notebooks.03_batch_size.ipynb" name="Cell 1"/>
<testcase classname="tests.test_memory" name="test_it"><failure>E assert 1 == 2</failure></testcase>
</testsuite></testsuites>"""


def test_each_lesson_that_moved_is_named_with_its_cell_and_why(tmp_path, capsys):
    results = tmp_path / "tests.xml"
    results.write_text(RESULTS.format(DIFFERS.replace("\x1b", "#x1B")))
    assert what_moved.main([str(results)]) == 0
    shown = capsys.readouterr().out
    lessons, others = shown.split("## Lessons that moved")[1].split("## Other tests")
    assert (
        "02_where_memory_goes**\n  - code cell 5: `its checked output has changed: now 1; stored 2`"
        in (lessons)
    )
    assert "**solutions/07_optimizers**\n  - code cell 1: `ImportError: no name`" in lessons
    assert "03_batch_size" not in shown
    assert "**tests.test_memory**" in others


def test_versions_that_moved_are_those_that_differ():
    here = numpy.__version__
    found = what_moved.versions(f"numpy==0.1\nno-such-package==1\npytest=={here}x\n# x==1\n")
    assert ("numpy", "0.1", here) in found and "no-such-package" not in str(found)
    assert what_moved.versions(f"numpy=={here}") == []


def test_without_a_failure_the_page_says_so():
    assert what_moved.page([], []).count("None.") == 2


def test_results_that_are_missing_or_damaged_are_one_sentence(tmp_path, capsys):
    damaged = tmp_path / "tests.xml"
    damaged.write_text("<testsuites>")
    for arguments in ([], [str(damaged)], [str(tmp_path / "none.xml")]):
        assert what_moved.main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
