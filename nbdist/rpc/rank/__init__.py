"""The rank's end of the wire: names of the user, progress, crash files, the collector paused.

What a rank does for a feature stands in that feature.
"""
