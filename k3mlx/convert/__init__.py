"""Dense weights of a snapshot to quantised ones, written as an overlay (see `k3mlx.checkpoint.overlay`)."""
