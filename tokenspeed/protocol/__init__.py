"""The words that rooms exchange: sampling parameters, step plans and results, channel messages, errors.

Owns types only. Imports nothing of TokenSpeed and never imports torch, so that every room may depend on it
and the server process starts without loading a device library.
"""
