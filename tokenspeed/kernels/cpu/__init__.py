"""Operations on a CPU: torch's own, and ours in C (`native/`)."""
