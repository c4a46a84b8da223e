"""The model in MLX, a file per part. Imports mlx: import it only where MLX was chosen (`k3mlx.devices`)."""
