"""Constrained decoding: grammars in, masks over the vocabulary out. One library a file, behind `interface`."""
