"""One tool-call format a file, found by discovery: a file carries `FORMAT` and `EXAMPLES`."""
