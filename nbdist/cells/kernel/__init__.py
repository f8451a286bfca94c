"""One cell from the request to its outcome: sent, waited for, interrupted, reported.

Waits are explained in `hang`; what features add to a cell are hooks of theirs.
"""
