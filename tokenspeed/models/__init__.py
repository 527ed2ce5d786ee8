"""Model families, one a file, found by the `ARCHITECTURES` each declares."""
