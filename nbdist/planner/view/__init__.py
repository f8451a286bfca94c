"""A plan, and a plan beside what was measured, as tables."""
