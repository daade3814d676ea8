"""Bridges: environments and tools of other libraries as environments of ours. Each library is an extra; those of Harbor
and NeMo Gym are not needed.

episodes        the shared base: turns, invalid actions, failures
reasoning       data sets of reasoning-gym, with their scorers
gym             Gymnasium
arena           TextArena
openenv         servers of OpenEnv, over their WebSocket protocol
nemo_gym        resources servers of NeMo Gym, over HTTP
mcp_tools       tools of an MCP server
harbor          task sets in Harbor's format, in containers;   harbor_tasks  reads their folders
"""
