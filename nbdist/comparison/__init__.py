"""The same steps under several strategies, side by side."""
