"""Bridges: environments and tools of other libraries as environments of ours. Each library is an extra; Harbor's is not
needed.

episodes        the shared base: turns, invalid actions, failures
reasoning       data sets of reasoning-gym, with their scorers
gym             Gymnasium
arena           TextArena
openenv         servers of OpenEnv, over their WebSocket protocol
mcp_tools       tools of an MCP server
harbor          task sets in Harbor's format, in containers;   harbor_tasks  reads their folders
"""
