"""Variables pushed to ranks and pulled from them, packed without the user's classes."""
