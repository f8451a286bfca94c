"""A running cell on the page: live text, tabs, the file with all of a long output."""
