"""Verifiers: functions that judge a reply. A verdict is a number, or `Invalid` where it could not be reached.

No torch here, and no heavy library at import time.
"""
