"""The engine: its loop, its process, the channel to it and the client that owns text. See `interface.py` for the face."""
