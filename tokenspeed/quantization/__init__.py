"""Quantization schemes, one a file, behind `interface.Scheme`."""
