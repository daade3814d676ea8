"""Sandboxes of services in place of containers on this machine, each by the service's own client library.

remote_sandbox  what all have;   e2b_sandbox, daytona_sandbox, modal_sandbox  the calls of one client each
"""
