"""A trace as a report, as a page and as a picture."""
