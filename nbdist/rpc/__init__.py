"""What the notebook and the ranks agree on: functions by name and the fields of a message.

No feature's records: those travel, but are known to the feature alone.
"""
