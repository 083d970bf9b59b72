"""How Sphinx builds the reading site from what `tools/site.py` lays out: see there."""

import tomllib
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
project = "One GPU, measured"
copyright = "the authors of One GPU, measured, MIT licence"
html_title = project
language = "en"
# Notebooks are shown with their stored outputs; nothing runs here.
extensions = ["myst_nb", "sphinx_copybutton"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show, nb_code_prompt_hide = "Show the {type}", "Hide the {type}"
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath", "html_image"]
suppress_warnings = ["mystnb.unknown_mime_type"]  # widgets: their static picture stands beside them
html_theme = "sphinx_book_theme"
html_theme_options = {
    "repository_url": PROJECT["urls"]["Repository"],
    "use_repository_button": True,
    "use_download_button": False,
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "navbar_persistent": [],  # the search stands in the sidebar already
    "footer_content_items": ["copyright.html"],
}
html_static_path = ["site.css", "will_it_fit.js"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_math_renderer = "mathml"


def write_formula(page, node):
    """A formula as MathML, which browsers show; MathJax would come from a network."""
    block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=block)
    page.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def not_searched(app, doctree):
    """Solutions are read after a lesson: a search that finds them answers exercises."""
    if "solutions/" in app.env.docname:
        app.env.metadata[app.env.docname]["nosearch"] = True


def setup(app):
    app.connect("doctree-read", not_searched)
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
