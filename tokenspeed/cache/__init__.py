"""Pages, prefix index and accounting, in integers. Never sees a tensor, never imports torch."""
