"""One file = one objective = its configuration, head, loss and metrics; the file's name is the objective's name.

`patches.py` holds what two of them share.
"""
