"""Old names, kept for one release: a user's profile may name the launcher here."""
