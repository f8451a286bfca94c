"""Records in, a View out: text always, HTML beside it."""
