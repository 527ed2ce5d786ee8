"""The engine: its loop, process and channel, and the client that owns text. See `interface.py` for the face."""
