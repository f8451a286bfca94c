"""Sphinx settings for the site that `make docs` builds; no page of it asks another host."""

from nbdist.core.versions import VERSION

project = "nbdist"
author = "nbdist contributors"
version = release = VERSION
html_title = "nbdist"
html_theme = "furo"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Lessons are shown as they are stored: `make test` compares them with what they print.
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # two scripts of another host otherwise
nb_merge_streams = True
myst_heading_anchors = 6
myst_enable_extensions: list[str] = []  # "$" is a price here, and no formula

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # they stand in the text
add_module_names = False
napoleon_google_docstring = True
