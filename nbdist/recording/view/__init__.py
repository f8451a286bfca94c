"""Pages in a frame of their own and pictures as PNG, with the script of both viewers."""
