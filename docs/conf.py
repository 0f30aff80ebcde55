"""How Sphinx makes the site of these pages: `make docs`, which puts this folder on Python's path."""

from _ext import scripts

from flex_inductor import __version__

project = "flex_inductor"
author = "the flex_inductor authors"
copyright = f"2026, {author}"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
    "_ext.command_line",
    "_ext.drawings",
    "_ext.from_source",
    "_ext.messages",
    "_ext.playground",
]
exclude_patterns = ["tutorials", "gallery", "_ext"]  # sphinx-gallery makes pages of these in made/
suppress_warnings = ["config.cache"]  # sphinx-gallery's settings hold functions

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"  # single backticks in docstrings: code, and a link where the name is known
autodoc_typehints = "none"  # descriptions have shapes and dtypes
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False

sphinx_gallery_conf = {
    "examples_dirs": ["tutorials", "gallery"],
    "gallery_dirs": ["made/tutorials", "made/gallery"],
    "filename_pattern": r"\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "parallel": 2,
    "show_memory": False,
    "capture_repr": (),
    "write_computation_times": False,
    "show_signature": False,
    "within_subsection_order": scripts.Order,
    "remove_config_comments": True,
    "image_scrapers": (scripts.scrape, "show"),
    "reset_modules": ("matplotlib", scripts.prepare),
}

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"flex_inductor {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f6690", "color-brand-content": "#2f6690"},
    "dark_css_variables": {"color-brand-primary": "#7db7e0", "color-brand-content": "#7db7e0"},
}
