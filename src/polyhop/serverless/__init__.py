"""Training with graph servers and stateless functions: what is dense, row by row, runs in functions that hold no state.

Nothing is imported here: a function package needs numpy alone, and ``polyhop.serverless.program`` must stay light.
"""

__all__: list[str] = []
