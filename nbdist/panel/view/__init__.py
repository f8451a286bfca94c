"""The panel as HTML and as widgets."""
