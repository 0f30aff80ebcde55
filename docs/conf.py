"""How Sphinx makes the site of these pages: `make docs`."""

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
    "_ext.playground",
]
exclude_patterns = ["tutorials", "gallery", "_ext"]  # sphinx-gallery makes pages of these in made/
suppress_warnings = ["config.cache"]  # sphinx-gallery's settings hold functions

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

sphinx_gallery_conf = {
    "examples_dirs": ["tutorials", "gallery"],
    "gallery_dirs": ["made/tutorials", "made/gallery"],
    "image_scrapers": ("matplotlib", "show"),
    "filename_pattern": r"\.py$",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "parallel": 2,
    "show_memory": False,
    "show_signature": False,
    "remove_config_comments": True,
}

html_theme = "furo"
html_title = f"flex_inductor {release}"
html_static_path = ["_static"]
html_copy_source = False
