"""How a process talks about itself: log lines and startup timing. Every room may use it; it knows none of them."""
