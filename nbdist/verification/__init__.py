"""Is a parallel step right: every module of the user's own model beside a single-process run."""
