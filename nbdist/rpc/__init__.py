"""Protocol of the notebook and the ranks: functions by name and the fields of a message.

No feature's records: those travel, but are known to the feature alone.
"""
