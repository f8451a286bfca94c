"""A snapshot as a report, as a page and as a picture."""
