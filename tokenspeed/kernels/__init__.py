"""Operations and their implementations. `reference/` is the truth; everything else is compared with it."""
