"""How a verb is reached: magics, plain cells rewritten, completion, the command line.

No logic of a feature.
"""
