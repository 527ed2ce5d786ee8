"""One reasoning format a file, found by discovery: a file carries `FORMAT` and `EXAMPLES`."""
