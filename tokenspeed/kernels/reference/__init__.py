"""Operations in plain torch, float32 inside: the truth that all others are compared with."""
