"""Sphinx's configuration of the site; ``python -m docs`` puts it next to the pages."""

project = "fedlayers"
copyright = "the authors of fedlayers; MIT licence"
extensions = ["myst_nb"]
exclude_patterns = ["_static"]

nb_execution_mode = "off"  # notebooks show what they stored
nb_ipywidgets_js: dict[
    str, dict[str, str]
] = {}  # widgets would be fetched from the network
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_fence_as_directive: list[str] = []

html_theme = "furo"
html_title = "fedlayers"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["filter.js", "sort.js"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0173b2",
        "color-brand-content": "#0173b2",
    },
    "dark_css_variables": {
        "color-brand-primary": "#56b4e9",
        "color-brand-content": "#56b4e9",
    },
}
pygments_style, pygments_dark_style = "tango", "monokai"
highlight_language = "none"
maximum_signature_line_length = 88
